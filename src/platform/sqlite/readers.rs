//! The connections that read while the writer writes: each sees what was committed when its work began.

use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use rusqlite::{Connection, InterruptHandle, ffi};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::JobError;
use super::open::configure;
use crate::host::file_lock::FileLock;
use crate::tasks::blocking;
use journeyman_domain::limits::{SQLITE_BUSY_TIMEOUT, SQLITE_READ_TIMEOUT, SQLITE_READERS};

#[derive(Debug)]
pub(super) struct Readers {
    idle: Mutex<Vec<Connection>>,
    /// Has a permit for each idle connection.
    free: Arc<Semaphore>,
    _lock: Arc<FileLock>,
}

/// Interrupts a read that is under way when it is dropped.
struct Interrupt(Arc<Mutex<Option<InterruptHandle>>>);

impl Drop for Interrupt {
    fn drop(&mut self) {
        if let Some(reading) = self.0.lock().take() {
            reading.interrupt();
        }
    }
}

impl Readers {
    pub(super) fn open(path: &Path, lock: Arc<FileLock>) -> rusqlite::Result<Self> {
        let open = |_| {
            let conn = Connection::open(path)?;
            conn.busy_timeout(SQLITE_BUSY_TIMEOUT)?;
            configure(&conn)?;
            conn.pragma_update(None, "query_only", true)?;
            Ok(conn)
        };
        let idle = (0..SQLITE_READERS).map(open).collect::<rusqlite::Result<_>>()?;
        Ok(Self { idle: Mutex::new(idle), free: Arc::new(Semaphore::new(SQLITE_READERS)), _lock: lock })
    }

    /// Runs work in one transaction, for [`SQLITE_READ_TIMEOUT`] at most.
    pub(super) async fn run<T, E>(
        self: &Arc<Self>,
        work: impl FnOnce(&mut Connection) -> Result<T, JobError<E>> + Send + 'static,
    ) -> Result<T, JobError<E>>
    where
        T: Send + 'static,
        E: Send + 'static,
    {
        let interrupted =
            || JobError::Sql(rusqlite::Error::SqliteFailure(ffi::Error::new(ffi::SQLITE_INTERRUPT), None));
        let reading = async {
            let permit = Arc::clone(&self.free).acquire_owned().await.map_err(|_| interrupted())?;
            let mut conn = self.idle.lock().pop().ok_or_else(interrupted)?;
            let interrupt = Interrupt(Arc::new(Mutex::new(Some(conn.get_interrupt_handle()))));
            let (readers, running) = (Arc::clone(self), Arc::clone(&interrupt.0));
            let reading = blocking(move || {
                let done = read(&mut conn, work);
                running.lock().take();
                readers.idle.lock().push(conn);
                drop(permit);
                done
            });
            reading.await.unwrap_or_else(|_| Err(interrupted()))
        };
        timeout(SQLITE_READ_TIMEOUT, reading).await.unwrap_or_else(|_| Err(interrupted()))
    }
}

fn read<T, E>(
    conn: &mut Connection,
    work: impl FnOnce(&mut Connection) -> Result<T, JobError<E>>,
) -> Result<T, JobError<E>> {
    conn.execute_batch("BEGIN")?;
    let done = work(conn);
    conn.execute_batch("ROLLBACK").or_else(|error| if conn.is_autocommit() { Ok(()) } else { Err(error) })?;
    done
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tokio::runtime::Handle;
    use tokio::sync::oneshot;
    use uuid::Uuid;

    use crate::sqlite::{Database, Db, JobError, Owner, Schema};
    use rusqlite::Connection;

    const SCHEMA: Schema = Schema {
        application_id: 7,
        format: 1,
        sql: "CREATE TABLE a (x); INSERT INTO a VALUES (1)",
        owner: "clerk",
        key: "clerk.db",
    };

    struct Clerk;

    impl Owner for Clerk {
        type Tx<'a> = &'a mut Connection;
        type Error = String;
        type Effects = ();

        fn store_error(cause: Option<&rusqlite::Error>, _: Uuid) -> String {
            format!("{cause:?}")
        }

        fn begin<'a>(&'a self, conn: &'a mut Connection) -> &'a mut Connection {
            conn
        }

        fn end(_: &mut Connection) {}
    }

    fn count(conn: &Connection) -> rusqlite::Result<i64> {
        conn.query_row("SELECT count(*) FROM a", [], |row| row.get(0))
    }

    /// Holds up the thread on which it is run, until the sender is dropped.
    fn held() -> (mpsc::Sender<()>, oneshot::Receiver<()>, impl FnOnce() + Send + 'static) {
        let (release, released) = mpsc::channel::<()>();
        let (begin, begun) = oneshot::channel();
        let hold = move || {
            begin.send(()).unwrap();
            released.recv().unwrap_err();
        };
        (release, begun, hold)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn f1_reads_wait_for_no_write_and_writes_for_no_read() {
        let folder = tempfile::tempdir().unwrap();
        let db = Db::File(folder.path().join("clerk.db"));
        let store = Database::open(&db, &SCHEMA).unwrap().start(Clerk, Handle::current()).unwrap().store;
        let insert = |conn: &mut &mut Connection| Ok(conn.execute("INSERT INTO a VALUES (2)", [])?);

        let (release, begun, hold) = held();
        let writing = store.execute(move |conn| {
            let inserted = insert(conn);
            hold();
            inserted
        });
        let beside = async {
            begun.await.unwrap();
            assert_eq!(store.read(|conn| Ok(count(conn)?)).await.unwrap(), 1, "what was committed");
            drop(release);
        };
        assert_eq!(tokio::join!(writing, beside).0, Ok(1));

        let (release, begun, hold) = held();
        let reading = store.read(move |conn| {
            let before = count(conn)?;
            hold();
            Ok((before, count(conn)?))
        });
        let beside = async {
            begun.await.unwrap();
            store.execute(insert).await.unwrap();
            assert_eq!(store.read(|conn| Ok(count(conn)?)).await.unwrap(), 3);
            drop(release);
        };
        assert_eq!(tokio::join!(reading, beside).0, Ok((2, 2)), "one read sees one state");
        let write = |conn: &mut Connection| Ok::<_, JobError<String>>(conn.execute("DELETE FROM a", [])?);
        assert!(store.read(write).await.unwrap_err().contains("readonly"));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn f1_a_read_whose_caller_has_gone_is_interrupted() {
        let folder = tempfile::tempdir().unwrap();
        let db = Db::File(folder.path().join("clerk.db"));
        let store = Database::open(&db, &SCHEMA).unwrap().start(Clerk, Handle::current()).unwrap().store;
        let endless = "WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n";
        for _ in 0..super::SQLITE_READERS {
            let (begin, begun) = oneshot::channel();
            let reading = store.read(move |conn: &mut Connection| {
                let mut numbers = conn.prepare(endless)?;
                let mut numbers = numbers.query([])?;
                numbers.next()?;
                begin.send(()).unwrap();
                while numbers.next()?.is_some() {}
                Ok(())
            });
            tokio::select! {
                _ = reading => panic!("it has no end"),
                begun = begun => begun.unwrap(),
            }
        }
        assert_eq!(store.read(|conn| Ok(count(conn)?)).await.unwrap(), 1, "the connections are free again");
    }
}
