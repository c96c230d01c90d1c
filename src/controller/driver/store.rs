//! State of a pool that outlives its controller, in SQLite: worker processes, stop requests, and the keys that have queues.
//! The active controller is its only writer.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use rusqlite::{Connection, Row, params};

use crate::domain::group::Key;
use crate::limits::CONTROLLER_STORE_TIMEOUT;

const FILE: &str = "state.db";

const SCHEMA: &str = "
    CREATE TABLE IF NOT EXISTS worker (
        id TEXT PRIMARY KEY,
        key TEXT NOT NULL,
        boot TEXT NOT NULL,
        created_at INTEGER NOT NULL,
        is_started INTEGER NOT NULL,
        pid INTEGER,
        start_ticks INTEGER,
        cgroup TEXT
    );
    CREATE TABLE IF NOT EXISTS stop_request (id TEXT PRIMARY KEY);
    CREATE TABLE IF NOT EXISTS known_key (key TEXT PRIMARY KEY);
";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WorkerRecord {
    pub(super) id: String,
    pub(super) key: String,
    pub(super) boot: String,
    /// Unix time in seconds.
    pub(super) created_at: i64,
    /// False from before the start call until it has returned.
    pub(super) is_started: bool,
    pub(super) process: Option<WorkerPid>,
    pub(super) cgroup: Option<PathBuf>,
}

/// Identifies a process across pid reuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WorkerPid {
    pub(super) pid: i32,
    pub(super) start_ticks: u64,
}

impl WorkerRecord {
    pub(super) fn pending(id: &str, key: &Key) -> Self {
        let crate::domain::journal::BootId(boot) = crate::host::journal::current_boot();
        Self {
            id: id.to_owned(),
            key: key.as_str().to_owned(),
            boot: boot.into(),
            created_at: jiff::Timestamp::now().as_second(),
            is_started: false,
            process: None,
            cgroup: None,
        }
    }

    pub(super) fn age(&self) -> Duration {
        let seconds = jiff::Timestamp::now().as_second().saturating_sub(self.created_at);
        Duration::from_secs(u64::try_from(seconds).unwrap_or_default())
    }
}

pub(in crate::controller) struct StateStore(Mutex<Connection>);

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
            connection.execute_batch(SCHEMA)?;
            Ok(connection)
        };
        let connection = open().map_err(|error: rusqlite::Error| {
            io::Error::other(format!("cannot open the state of the pool, {}: {error}", path.display()))
        })?;
        Ok(Self(Mutex::new(connection)))
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        self.0.lock()
    }

    fn execute(&self, statement: &str, values: impl rusqlite::Params) -> io::Result<()> {
        self.connection().prepare_cached(statement).and_then(|mut sql| sql.execute(values)).map(drop).map_err(failed)
    }

    fn texts(&self, statement: &str) -> io::Result<Vec<String>> {
        let connection = self.connection();
        let mut statement = connection.prepare_cached(statement).map_err(failed)?;
        let rows = statement.query_map((), |row| row.get(0)).map_err(failed)?;
        rows.collect::<Result<_, _>>().map_err(failed)
    }

    pub(super) fn insert_worker(&self, record: &WorkerRecord) -> io::Result<()> {
        self.execute(
            "INSERT INTO worker VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
            params![
                record.id,
                record.key,
                record.boot,
                record.created_at,
                record.is_started,
                record.process.map(|process| process.pid),
                record.process.map(|process| process.start_ticks.cast_signed()),
                record.cgroup.as_ref().map(|path| path.to_string_lossy()),
            ],
        )
    }

    pub(super) fn mark_started(&self, id: &str, process: Option<WorkerPid>) -> io::Result<()> {
        self.execute(
            "UPDATE worker SET is_started = 1, pid = ?2, start_ticks = ?3 WHERE id = ?1",
            params![id, process.map(|process| process.pid), process.map(|process| process.start_ticks.cast_signed())],
        )
    }

    pub(super) fn remove_worker(&self, id: &str) -> io::Result<()> {
        self.execute("DELETE FROM worker WHERE id = ?1", [id])
    }

    pub(super) fn workers(&self) -> io::Result<Vec<WorkerRecord>> {
        let connection = self.connection();
        let mut statement = connection.prepare_cached("SELECT * FROM worker").map_err(failed)?;
        let rows = statement.query_map((), worker_record).map_err(failed)?;
        rows.collect::<Result<_, _>>().map_err(failed)
    }

    pub(super) fn stop_requests(&self) -> io::Result<BTreeSet<String>> {
        Ok(self.texts("SELECT id FROM stop_request")?.into_iter().collect())
    }

    pub(super) fn add_stop_request(&self, id: &str) -> io::Result<()> {
        self.execute("INSERT OR IGNORE INTO stop_request VALUES (?1)", [id])
    }

    pub(super) fn remove_stop_request(&self, id: &str) -> io::Result<()> {
        self.execute("DELETE FROM stop_request WHERE id = ?1", [id])
    }

    pub(in crate::controller) fn known_keys(&self) -> io::Result<BTreeSet<Key>> {
        Ok(self.texts("SELECT key FROM known_key")?.iter().filter_map(|key| Key::new(key)).collect())
    }

    pub(in crate::controller) fn update_known_keys<'a>(
        &self,
        removed: impl Iterator<Item = &'a Key>,
        added: impl Iterator<Item = &'a Key>,
    ) -> io::Result<()> {
        let mut connection = self.connection();
        let update = || {
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

fn worker_record(row: &Row<'_>) -> rusqlite::Result<WorkerRecord> {
    let (pid, ticks): (Option<i32>, Option<i64>) = (row.get("pid")?, row.get("start_ticks")?);
    Ok(WorkerRecord {
        id: row.get("id")?,
        key: row.get("key")?,
        boot: row.get("boot")?,
        created_at: row.get("created_at")?,
        is_started: row.get("is_started")?,
        process: pid.zip(ticks).map(|(pid, ticks)| WorkerPid { pid, start_ticks: ticks.cast_unsigned() }),
        cgroup: row.get::<_, Option<String>>("cgroup")?.map(PathBuf::from),
    })
}

fn failed(error: rusqlite::Error) -> io::Error {
    io::Error::other(format!("the state of the pool: {error}"))
}
