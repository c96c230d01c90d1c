//! Opens a database: pragmas, schema, and the thread that owns it.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode};
use rustix::fs::{FallocateFlags, fallocate};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};

use super::readers::Readers;
use super::{Owner, RunningStore, Store, StoreStatus, Writer};
use crate::host::file_lock::FileLock;
use journeyman_domain::limits::{
    SQLITE_BUSY_TIMEOUT, SQLITE_JOBS_MAX, SQLITE_JOURNAL_BYTES_KEPT, SQLITE_JOURNAL_BYTES_RESERVED,
    SQLITE_STATEMENTS_MAX,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Db {
    /// A database file, created if missing; SQLite keeps two more files beside it while it is open, and its owner a lock.
    File(PathBuf),
    /// Lost when its role stops. For tests.
    Memory,
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot open database {path}; is its directory writable?")]
    File { path: String, source: rusqlite::Error },
    #[error("cannot open database {path}: no lock {path}.lock; is the directory writable, and the lock this user's?")]
    Lock { path: String, source: std::io::Error },
    #[error("another process uses database {path}; stop that {owner}, or set another file as `{key}`")]
    InUse { path: String, owner: &'static str, key: &'static str },
    #[error(
        "database {path} was not written by a {owner} of journeyman, and stays as it is; set another file as `{key}`"
    )]
    Foreign { path: String, owner: &'static str, key: &'static str },
    #[error("database {path} is corrupt, or no SQLite database; {}", corrupt_hint(.owner))]
    Corrupt { path: String, owner: &'static str, source: rusqlite::Error },
    #[error(
        "database {path} has schema version {found}, but this version of journeyman needs {needed}; use the version that wrote it"
    )]
    Format { path: String, found: i64, needed: i64 },
    #[error("cannot start the store thread")]
    Thread(#[source] std::io::Error),
}

fn corrupt_hint(owner: &str) -> String {
    format!("restore it from a backup, or move it away to begin with an empty {owner}")
}

/// The tables of a role, and its words in errors.
pub struct Schema {
    /// The application's id in the header of the file.
    pub application_id: i64,
    pub format: i64,
    pub sql: &'static str,
    /// The role.
    pub owner: &'static str,
    /// The configuration key of the file.
    pub key: &'static str,
}

pub struct Database {
    conn: Connection,
    path: String,
    schema: &'static Schema,
    file: Option<(PathBuf, Arc<FileLock>)>,
}

fn beside(db: &Path, suffix: &str) -> PathBuf {
    let mut path = db.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}

impl Database {
    pub fn open(db: &Db, schema: &'static Schema) -> Result<Self, OpenError> {
        let Schema { format, owner, key, .. } = *schema;
        let (path, conn, file) = match db {
            Db::File(file) => {
                let path = file.display().to_string();
                let lock = match FileLock::acquire(&beside(file, ".lock")) {
                    Ok(Some(lock)) => Arc::new(lock),
                    Ok(None) => return Err(OpenError::InUse { path, owner, key }),
                    Err(source) => return Err(OpenError::Lock { path, source }),
                };
                // With mode 0600, because it holds secrets of its role. SQLite reports any error when it opens it.
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(file).ok();
                (path, Connection::open(file), Some((file.clone(), lock)))
            }
            Db::Memory => (":memory:".to_owned(), Connection::open_in_memory(), None),
        };
        let conn = conn.map_err(|error| open_error(error, &path, schema))?;
        let database = Self { conn, path, schema, file };
        // Before the first change.
        if !database.run(|conn| is_ours(conn, schema))? {
            return Err(OpenError::Foreign { path: database.path, owner, key });
        }
        let found = database.run(|conn| prepare(conn, schema))?;
        if found != format {
            return Err(OpenError::Format { path: database.path, found, needed: format });
        }
        if let Db::File(path) = db {
            reserve_log(path, owner);
        }
        Ok(database)
    }

    /// A role reads or writes so before its thread starts.
    pub fn run<T>(&self, work: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T, OpenError> {
        work(&self.conn).map_err(|error| open_error(error, &self.path, self.schema))
    }

    pub fn into_writer<O: Owner>(self, owner: O) -> Writer<O> {
        Writer { conn: self.conn, owner, _lock: self.file.map(|(_, lock)| lock) }
    }

    pub fn start<O: Owner>(self, owner: O, runtime: Handle) -> Result<RunningStore<O>, OpenError> {
        let (jobs, requests) = mpsc::channel(SQLITE_JOBS_MAX);
        let (status_sender, status) = watch::channel(StoreStatus::Running);
        let role = self.schema.owner;
        let readers = self.file.as_ref().map(|(path, lock)| Readers::open(path, Arc::clone(lock))).transpose();
        let readers = readers.map_err(|error| open_error(error, &self.path, self.schema))?.map(Arc::new);
        let writer = self.into_writer(owner);
        let body = move || {
            let ended = writer.run(requests, &runtime);
            let failed = |error: rusqlite::Error| {
                let is_corrupt = error.sqlite_error_code() == Some(ErrorCode::DatabaseCorrupt);
                let hint = if is_corrupt { format!(": it is corrupt; {}", corrupt_hint(role)) } else { String::new() };
                StoreStatus::Failed(format!("{error}{hint}"))
            };
            status_sender.send_replace(ended.map_or_else(failed, |()| StoreStatus::Closed));
        };
        std::thread::Builder::new().name(format!("{role}-store")).spawn(body).map_err(OpenError::Thread)?;
        Ok(RunningStore { store: Store { jobs, readers }, status })
    }
}

fn open_error(source: rusqlite::Error, path: &str, schema: &Schema) -> OpenError {
    let (path, owner, key) = (path.to_owned(), schema.owner, schema.key);
    match source.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => OpenError::InUse { path, owner, key },
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => OpenError::Corrupt { path, owner, source },
        _ => OpenError::File { path, source },
    }
}

/// True if the database is new or one of this role.
fn is_ours(conn: &Connection, schema: &Schema) -> rusqlite::Result<bool> {
    conn.busy_timeout(SQLITE_BUSY_TIMEOUT)?;
    let number = |query| conn.query_row(query, [], |row| row.get::<_, i64>(0));
    let application = number("PRAGMA application_id")?;
    Ok(application == schema.application_id || (application == 0 && number("SELECT count(*) FROM sqlite_schema")? == 0))
}

/// Configures a connection, whether it writes or reads.
pub(super) fn configure(conn: &Connection) -> rusqlite::Result<()> {
    conn.set_prepared_statement_cache_capacity(SQLITE_STATEMENTS_MAX);
    // Works without free file descriptors.
    conn.pragma_update(None, "temp_store", "MEMORY")?;
    // Without the stability guarantee SQLite compiles a statement again for each value that could let it use a partial index.
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true).map(drop)
}

/// Creates the tables, if there are none. Returns the format of the database.
fn prepare(conn: &Connection, schema: &Schema) -> rusqlite::Result<i64> {
    configure(conn)?;
    conn.pragma_update(None, "journal_mode", "WAL")?;
    conn.pragma_update(None, "synchronous", "FULL")?;
    conn.pragma_update(None, "journal_size_limit", SQLITE_JOURNAL_BYTES_KEPT)?;
    conn.execute_batch("BEGIN IMMEDIATE")?;
    let mut format = conn.pragma_query_value(None, "user_version", |row| row.get(0))?;
    if format == 0 {
        conn.execute_batch(schema.sql)?;
        conn.pragma_update(None, "application_id", schema.application_id)?;
        format = schema.format;
        conn.pragma_update(None, "user_version", format)?;
    }
    conn.execute_batch("COMMIT")?;
    Ok(format)
}

/// Gives the write-ahead log the room that it needs between two checkpoints, so that the role can store results while
/// something else has filled the disk.
fn reserve_log(db: &Path, owner: &str) {
    let reserved = OpenOptions::new().write(true).open(beside(db, "-wal"));
    let reserved =
        reserved.and_then(|log| Ok(fallocate(&log, FallocateFlags::empty(), 0, SQLITE_JOURNAL_BYTES_RESERVED)?));
    if let Err(error) = reserved {
        tracing::warn!(%error, db = %db.display(), "cannot reserve room for the database; a full disk will stop the {owner}");
    }
}

#[cfg(test)]
mod tests {
    use rusqlite::StatementStatus;

    use super::*;

    const V1: Schema =
        Schema { application_id: 7, format: 1, sql: "CREATE TABLE a (x)", owner: "clerk", key: "clerk.db" };
    const V3: Schema = Schema { format: 3, sql: "CREATE TABLE a (x, y, z)", ..V1 };
    const OTHER: Schema = Schema { application_id: 8, ..V1 };

    #[test]
    fn a_statement_is_compiled_once_whatever_values_it_gets() {
        let sql = "CREATE TABLE a (x, y); CREATE INDEX some ON a (x) WHERE y = 'open'";
        let schema: &'static Schema = Box::leak(Box::new(Schema { sql, ..V1 }));
        let database = Database::open(&Db::Memory, schema).unwrap();
        let compiled_again = database.run(|conn| {
            let mut found = conn.prepare("SELECT count(*) FROM a WHERE x = ?1 AND y = ?2")?;
            for value in ["open", "closed", "open"] {
                found.query_row([value, value], |row| row.get::<_, i64>(0))?;
            }
            Ok(found.get_status(StatementStatus::RePrepare))
        });
        assert_eq!(compiled_again.unwrap(), 0);
    }

    #[test]
    fn a_database_of_another_version_or_role_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let db = Db::File(folder.path().join("clerk.db"));
        let columns = |schema| {
            let count = "SELECT count(*) FROM pragma_table_info('a')";
            Database::open(&db, schema)?.run(|conn| conn.query_row(count, [], |row| row.get::<_, i64>(0)))
        };
        assert_eq!(columns(&V3).unwrap(), 3);
        assert_eq!(columns(&V3).unwrap(), 3);
        assert!(matches!(columns(&V1), Err(OpenError::Format { found: 3, needed: 1, .. })));
        assert_eq!(columns(&V3).unwrap(), 3);
        let open = Database::open(&db, &V3).unwrap();
        assert!(matches!(columns(&V3), Err(OpenError::InUse { .. })), "one process has it");
        drop(open);
        let foreign = columns(&OTHER).unwrap_err().to_string();
        assert!(foreign.contains("by a clerk of journeyman") && foreign.ends_with("as `clerk.db`"), "{foreign}");
    }
}
