//! Opens the database: pragmas, schema, and the thread that owns it.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::{Connection, ErrorCode};
use rustix::fs::{FallocateFlags, fallocate};
use secrecy::SecretString;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};

use super::super::{Config, Db};
use super::writer::Writer;
use super::{Store, StoreStatus};
use crate::limits::{QUEUE_JOBS_MAX, QUEUE_JOURNAL_BYTES_KEPT, QUEUE_JOURNAL_BYTES_RESERVED, QUEUE_STATEMENTS_MAX};
use crate::source::taskcluster::formats::new_task_id;

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot open database {path}; is its directory writable?")]
    File { path: String, source: rusqlite::Error },
    #[error("another process uses database {path}; stop that queue, or set another file as `queue.db`")]
    InUse { path: String },
    #[error(
        "database {path} was not written by a queue of journeyman, and stays as it is; set another file as `queue.db`"
    )]
    Foreign { path: String },
    #[error("database {path} is corrupt, or no SQLite database; {CORRUPT_HINT}")]
    Corrupt { path: String, source: rusqlite::Error },
    #[error(
        "database {path} has schema version {found}, but this version of journeyman needs {FORMAT}; use the version that wrote it"
    )]
    Format { path: String, found: i64 },
    #[error("cannot start the store thread")]
    Thread(#[source] std::io::Error),
}

const FORMAT: i64 = 5;
/// `jrny`, in the header of the file.
const APPLICATION_ID: i64 = 0x6a72_6e79;
const CORRUPT_HINT: &str = "restore it from a backup, or move it away to begin with an empty queue";

pub(crate) struct OpenedDatabase {
    pub(super) conn: Connection,
    pub(crate) own_secret: SecretString,
}

/// Creates the file with mode 0600, because it holds the queue's own secret. SQLite reports any error when it opens
/// it.
fn create_private(path: &Path) {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).ok();
}

pub(crate) fn open(db: &Db) -> Result<OpenedDatabase, OpenError> {
    let (path, conn) = match db {
        Db::File(path) => {
            create_private(path);
            (path.display().to_string(), Connection::open(path))
        }
        Db::Memory => (":memory:".to_owned(), Connection::open_in_memory()),
    };
    let failed = |source: rusqlite::Error| {
        let path = path.clone();
        match source.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => OpenError::InUse { path },
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => OpenError::Corrupt { path, source },
            _ => OpenError::File { path, source },
        }
    };
    let conn = conn.map_err(failed)?;
    // Before the first change.
    if !is_ours(&conn).map_err(failed)? {
        return Err(OpenError::Foreign { path });
    }
    let prepare = || -> rusqlite::Result<i64> {
        conn.set_prepared_statement_cache_capacity(QUEUE_STATEMENTS_MAX);
        conn.pragma_update(None, "journal_mode", "WAL")?;
        conn.pragma_update(None, "synchronous", "FULL")?;
        // Works without free file descriptors.
        conn.pragma_update(None, "temp_store", "MEMORY")?;
        conn.pragma_update(None, "journal_size_limit", QUEUE_JOURNAL_BYTES_KEPT)?;
        conn.execute_batch("BEGIN IMMEDIATE")?;
        let mut format = conn.pragma_query_value(None, "user_version", |row| row.get(0))?;
        if format == 0 {
            conn.execute_batch(include_str!("schema.sql"))?;
            let own_secret = format!("{}{}", new_task_id(), new_task_id());
            conn.execute("INSERT INTO meta (key, value) VALUES ('secret', ?1)", [own_secret])?;
            conn.pragma_update(None, "application_id", APPLICATION_ID)?;
            conn.pragma_update(None, "user_version", FORMAT)?;
            format = FORMAT;
        }
        conn.execute_batch("COMMIT")?;
        Ok(format)
    };
    let found = prepare().map_err(failed)?;
    if found != FORMAT {
        return Err(OpenError::Format { path, found });
    }
    let secret: rusqlite::Result<String> =
        conn.query_row("SELECT value FROM meta WHERE key = 'secret'", [], |row| row.get(0));
    let own_secret = secret.map_err(failed)?.into();
    if let Db::File(path) = db {
        reserve_log(path);
    }
    Ok(OpenedDatabase { conn, own_secret })
}

/// Whether the database is new or one of a queue.
fn is_ours(conn: &Connection) -> rusqlite::Result<bool> {
    conn.busy_timeout(Duration::ZERO)?;
    // Keeps a second queue from using the same file.
    conn.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
    let number = |query| conn.query_row(query, [], |row| row.get::<_, i64>(0));
    let application = number("PRAGMA application_id")?;
    Ok(application == APPLICATION_ID || (application == 0 && number("SELECT count(*) FROM sqlite_schema")? == 0))
}

/// Gives the write-ahead log the room that it needs between two checkpoints, so that the queue can store outcomes while a
/// payload has filled the disk.
fn reserve_log(db: &Path) {
    let mut path = db.as_os_str().to_owned();
    path.push("-wal");
    let reserved = OpenOptions::new().write(true).open(path);
    let reserved =
        reserved.and_then(|log| Ok(fallocate(&log, FallocateFlags::empty(), 0, QUEUE_JOURNAL_BYTES_RESERVED)?));
    if let Err(error) = reserved {
        tracing::warn!(%error, db = %db.display(), "cannot reserve room for the database; a full disk will stop the queue");
    }
}

pub(crate) struct RunningStore {
    pub(crate) store: Store,
    /// If the thread panics, the sender is dropped without a final status.
    pub(crate) status: watch::Receiver<StoreStatus>,
}

impl OpenedDatabase {
    pub(crate) fn start(self, config: Arc<Config>, runtime: Handle) -> Result<RunningStore, OpenError> {
        let (jobs, requests) = mpsc::channel(QUEUE_JOBS_MAX);
        let (status_sender, status) = watch::channel(StoreStatus::Running);
        let writer = Writer::new(self, config);
        let body = move || {
            let ended = writer.run(requests, &runtime);
            let failed = |error: rusqlite::Error| {
                let is_corrupt = error.sqlite_error_code() == Some(ErrorCode::DatabaseCorrupt);
                let hint = if is_corrupt { format!(": it is corrupt; {CORRUPT_HINT}") } else { String::new() };
                StoreStatus::Failed(format!("{error}{hint}"))
            };
            status_sender.send_replace(ended.map_or_else(failed, |()| StoreStatus::Closed));
        };
        std::thread::Builder::new().name("queue-store".to_owned()).spawn(body).map_err(OpenError::Thread)?;
        Ok(RunningStore { store: Store { jobs }, status })
    }
}
