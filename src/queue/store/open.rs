//! Opening the file: its settings, its tables, what of it is kept in memory, and the start of the thread that owns it.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rusqlite::Connection;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};

use super::index::{Index, Move, Position};
use super::tx::{read_task, select_tasks};
use super::writer::Writer;
use super::{Store, StoreConfig, StoreStatus};
use crate::limits::{QUEUE_JOBS_MAX, QUEUE_JOURNAL_BYTES_KEPT, QUEUE_STATEMENTS_MAX};

/// What is wrong with the file that the queue is to be kept in.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file cannot be used.
    #[error("the queue's file {path} cannot be opened; is another queue running on it, and is its folder writable?")]
    File {
        /// The file.
        path: String,
        /// What SQLite says.
        source: rusqlite::Error,
    },
    /// A newer journeyman has written the file.
    #[error(
        "the queue's file {path} has format {found}, and this journeyman knows format {FORMAT} at most; use a newer one"
    )]
    Format {
        /// The file.
        path: String,
        /// The file's format.
        found: i64,
    },
    /// The thread that owns the file could not be started.
    #[error("the thread of the queue's store could not be started")]
    Thread(#[source] std::io::Error),
}

/// The version of the tables.
const FORMAT: i64 = 1;

/// The queue's file, opened.
pub(crate) struct OpenedDatabase {
    pub(super) conn: Connection,
    pub(super) index: Index,
}

/// Makes the file, where it is missing, so that only its owner can read it: the queue's own secret is in it. Whatever
/// goes wrong comes out when SQLite opens it.
fn create_private(path: &Path) {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).ok();
}

/// Opens the file, or a database in memory.
pub(crate) fn open(path: Option<&Path>) -> Result<OpenedDatabase, OpenError> {
    let shown = path.map_or_else(|| ":memory:".to_owned(), |path| path.display().to_string());
    let failed = |source| OpenError::File { path: shown.clone(), source };
    let conn = match path {
        Some(path) => {
            create_private(path);
            Connection::open(path)
        }
        None => Connection::open_in_memory(),
    }
    .map_err(failed)?;
    let prepare = || -> rusqlite::Result<i64> {
        conn.set_prepared_statement_cache_capacity(QUEUE_STATEMENTS_MAX);
        // Held for as long as we live, so that a second queue on the same file is refused at its start.
        conn.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
        conn.pragma_update(None, "journal_mode", "WAL")?;
        conn.pragma_update(None, "synchronous", "FULL")?;
        // A process that has no file descriptor left still serves.
        conn.pragma_update(None, "temp_store", "MEMORY")?;
        conn.pragma_update(None, "journal_size_limit", QUEUE_JOURNAL_BYTES_KEPT)?;
        conn.execute_batch("BEGIN IMMEDIATE")?;
        let mut format = conn.pragma_query_value(None, "user_version", |row| row.get(0))?;
        if format == 0 {
            conn.execute_batch(include_str!("schema.sql"))?;
            conn.pragma_update(None, "user_version", FORMAT)?;
            format = FORMAT;
        }
        conn.execute_batch("COMMIT")?;
        Ok(format)
    };
    let found = prepare().map_err(failed)?;
    if found > FORMAT {
        return Err(OpenError::Format { path: shown, found });
    }
    let index = rebuild_index(&conn).map_err(failed)?;
    Ok(OpenedDatabase { conn, index })
}

/// A store at work.
pub(crate) struct RunningStore {
    pub(crate) store: Store,
    /// How its thread does. Where the thread panics, the sender goes without a last word.
    pub(crate) status: watch::Receiver<StoreStatus>,
}

impl OpenedDatabase {
    /// The queue's own secret; made when the file is.
    pub(crate) fn own_secret(&self) -> Result<String, OpenError> {
        let failed = |source| OpenError::File { path: "(open)".to_owned(), source };
        let fresh = format!("{}{}", super::super::auth::new_slugid(), super::super::auth::new_slugid());
        self.conn.execute("INSERT OR IGNORE INTO meta (key, value) VALUES ('secret', ?1)", [fresh]).map_err(failed)?;
        self.conn.query_row("SELECT value FROM meta WHERE key = 'secret'", [], |row| row.get(0)).map_err(failed)
    }

    /// Starts the thread that owns the file.
    pub(crate) fn start(self, knobs: StoreConfig, runtime: Handle) -> Result<RunningStore, OpenError> {
        let (jobs, inbox) = mpsc::channel(QUEUE_JOBS_MAX);
        let (news, pending) = watch::channel(0);
        let (alive, life) = watch::channel(StoreStatus::Running);
        let keeper = Writer::new(self, knobs, jobs.downgrade(), news, alive.clone());
        let body = move || {
            // What went wrong has been told by then.
            if keeper.run(inbox, &runtime).is_ok() {
                alive.send_replace(StoreStatus::Closed);
            }
        };
        std::thread::Builder::new().name("queue-store".to_owned()).spawn(body).map_err(OpenError::Thread)?;
        Ok(RunningStore { store: Store { jobs, pending }, status: life })
    }
}

/// Reads the open tasks into memory.
pub(super) fn rebuild_index(conn: &Connection) -> rusqlite::Result<Index> {
    let mut index = Index::default();
    let mut open = conn.prepare(&select_tasks("WHERE open = 1"))?;
    for kept in open.query_map([], read_task)? {
        index.apply(Move { from: Position::default(), to: kept?.position() });
    }
    Ok(index)
}
