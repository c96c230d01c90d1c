//! State of a pool that outlives its controller, in SQLite: worker processes, stop requests, and the keys that have queues.
//! The active controller is its only writer.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use rusqlite::Connection;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use journeyman_domain::group::Key;
use journeyman_domain::limits::CONTROLLER_STORE_TIMEOUT;
use journeyman_platform::tasks::blocking;

const FILE: &str = "state.db";

const FORMAT: i64 = 1;

const SCHEMA: &str = "
    CREATE TABLE worker (id TEXT PRIMARY KEY, record TEXT NOT NULL);
    CREATE TABLE stop_request (id TEXT PRIMARY KEY);
    CREATE TABLE known_key (key TEXT PRIMARY KEY);
";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct WorkerRecord {
    pub(super) id: String,
    pub(super) key: String,
    pub(super) boot: String,
    /// `None` until it has started.
    pub(super) process: Option<WorkerPid>,
    pub(super) cgroup: Option<PathBuf>,
}

/// Identifies a process across pid reuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct WorkerPid {
    pub(super) pid: i32,
    pub(super) start_ticks: u64,
}

impl WorkerRecord {
    pub(super) fn new(id: &str, key: &Key, cgroup: Option<PathBuf>) -> Self {
        let journeyman_domain::journal::BootId(boot) = journeyman_platform::host::journal::current_boot();
        Self { id: id.to_owned(), key: key.as_str().to_owned(), boot: boot.into(), process: None, cgroup }
    }
}

pub(in crate::controller) struct StateStore {
    connection: Mutex<Connection>,
    /// While a disk does not answer, it has one thread, and the other calls wait without one.
    gate: Arc<Semaphore>,
}

impl StateStore {
    pub(in crate::controller) fn open(folder: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let path = folder.join(FILE);
        let open = || {
            let connection = Connection::open(&path)?;
            connection.busy_timeout(CONTROLLER_STORE_TIMEOUT)?;
            connection.pragma_update(None, "journal_mode", "WAL")?;
            // Survives the death of the process; a power loss takes the workers with it.
            connection.pragma_update(None, "synchronous", "NORMAL")?;
            connection.execute_batch("BEGIN IMMEDIATE")?;
            let is_new = connection.query_row("SELECT count(*) = 0 FROM sqlite_schema", [], |row| row.get(0))?;
            if is_new {
                connection.execute_batch(SCHEMA)?;
                connection.pragma_update(None, "user_version", FORMAT)?;
            }
            let found = connection.pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0))?;
            connection.execute_batch("COMMIT")?;
            Ok((connection, found))
        };
        let (connection, found) = open().map_err(|error: rusqlite::Error| {
            io::Error::other(format!("cannot open the state of the pool, {}: {error}", path.display()))
        })?;
        if found != FORMAT {
            return Err(io::Error::other(format!(
                "the state of the pool, {}, has format {found}, but this version of journeyman needs {FORMAT}; \
                 stop the workers of the pool with the version that wrote it, then remove the file",
                path.display()
            )));
        }
        Ok(Self { connection: Mutex::new(connection), gate: Arc::new(Semaphore::new(1)) })
    }

    /// Does what reads or writes files of the pool on a thread that may block, one piece at a time.
    pub(in crate::controller) fn run<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> io::Result<T> + Send + 'static,
    ) -> BoxFuture<'static, io::Result<T>> {
        let (store, gate) = (Arc::clone(self), Arc::clone(&self.gate));
        Box::pin(async move {
            let permit = gate.acquire_owned().await.map_err(io::Error::other)?;
            let working = blocking(move || {
                let _permit = permit;
                work(&store)
            });
            working.await.map_err(io::Error::other)?
        })
    }

    fn execute(&self, statement: &str, values: impl rusqlite::Params) -> io::Result<()> {
        let connection = self.connection.lock();
        let mut statement = connection.prepare_cached(statement).map_err(failed)?;
        statement.execute(values).map(drop).map_err(failed)
    }

    fn texts(&self, statement: &str) -> io::Result<Vec<String>> {
        let connection = self.connection.lock();
        let mut statement = connection.prepare_cached(statement).map_err(failed)?;
        let rows = statement.query_map((), |row| row.get(0)).map_err(failed)?;
        rows.collect::<Result<_, _>>().map_err(failed)
    }

    pub(super) fn put_worker(&self, record: &WorkerRecord) -> io::Result<()> {
        let json = serde_json::to_string(record)?;
        self.execute("INSERT OR REPLACE INTO worker VALUES (?1, ?2)", [&record.id, &json])
    }

    pub(super) fn remove_worker(&self, id: &str) -> io::Result<()> {
        self.execute("DELETE FROM worker WHERE id = ?1", [id])
    }

    pub(super) fn workers(&self) -> io::Result<Vec<WorkerRecord>> {
        let records = self.texts("SELECT record FROM worker")?;
        records.iter().map(|json| Ok(serde_json::from_slice(json.as_bytes())?)).collect()
    }

    pub(super) fn stop_requests(&self) -> io::Result<BTreeSet<String>> {
        Ok(self.texts("SELECT id FROM stop_request")?.into_iter().collect())
    }

    /// Returns whether there was none.
    pub(super) fn add_stop_request(&self, id: &str) -> io::Result<bool> {
        let added = self.connection.lock().execute("INSERT OR IGNORE INTO stop_request VALUES (?1)", [id]);
        added.map(|rows| rows > 0).map_err(failed)
    }

    pub(super) fn remove_stop_request(&self, id: &str) -> io::Result<()> {
        self.execute("DELETE FROM stop_request WHERE id = ?1", [id])
    }

    pub(in crate::controller) fn known_keys(&self) -> io::Result<BTreeSet<Key>> {
        Ok(self.texts("SELECT key FROM known_key")?.iter().filter_map(|key| Key::new(key)).collect())
    }

    pub(in crate::controller) fn update_known_keys(&self, removed: &[Key], added: &[Key]) -> io::Result<()> {
        let mut connection = self.connection.lock();
        let mut update = || {
            let transaction = connection.transaction()?;
            for key in removed {
                transaction.execute("DELETE FROM known_key WHERE key = ?1", [key.as_str()])?;
            }
            for key in added {
                transaction.execute("INSERT OR IGNORE INTO known_key VALUES (?1)", [key.as_str()])?;
            }
            transaction.commit()
        };
        update().map_err(failed)
    }
}

fn failed(error: rusqlite::Error) -> io::Error {
    io::Error::other(format!("the state of the pool: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_another_version_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        for _ in 0..2 {
            StateStore::open(folder.path()).expect("it is new, or of this version");
        }
        let file = folder.path().join(FILE);
        // 0 is what versions had that wrote none.
        for other in [0, FORMAT + 1] {
            let connection = Connection::open(&file).expect("it is opened");
            connection.pragma_update(None, "user_version", other).expect("it is set");
            drop(connection);
            let error = StateStore::open(folder.path()).err().expect("it is refused").to_string();
            assert!(error.contains(&format!("{}, has format {other}", file.display())), "{error}");
        }
    }
}
