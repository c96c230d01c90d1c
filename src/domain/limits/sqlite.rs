//! Limits of the stores in SQLite.

use core::time::Duration;

pub const SQLITE_JOBS_MAX: usize = 4_096;
/// Jobs that share a commit.
pub const SQLITE_BATCH_MAX: usize = 512;
/// The size that SQLite's write-ahead log is truncated to.
pub const SQLITE_JOURNAL_BYTES_KEPT: i64 = 16 << 20;
/// Of the write-ahead log: what SQLite writes between two checkpoints.
pub const SQLITE_JOURNAL_BYTES_RESERVED: u64 = 4 << 20;
pub const SQLITE_STATEMENTS_MAX: usize = 64;
/// The time between two batches without jobs.
pub const SQLITE_BATCH_INTERVAL: Duration = Duration::from_secs(1);
/// Connections that read while the writer writes.
pub const SQLITE_READERS: usize = 2;
/// The time of one read, with its wait for a connection.
pub const SQLITE_READ_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a statement waits for another program that has the file open, such as `sqlite3`.
pub const SQLITE_BUSY_TIMEOUT: Duration = Duration::from_secs(1);
