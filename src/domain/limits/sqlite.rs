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
