//! Limits of the embedded queue.

use core::time::Duration;

pub const QUEUE_RUNS_MAX: usize = 50;
pub const QUEUE_DEADLINE_MAX: Duration = Duration::from_secs(5 * 24 * 3600);
/// How far the clocks of the embedded queue and its clients may differ.
pub const QUEUE_CLOCK_DRIFT_MAX: Duration = Duration::from_secs(15 * 60);
pub const QUEUE_CERTIFICATE_DRIFT: Duration = Duration::from_secs(5 * 60);
pub const QUEUE_CERTIFICATE_TTL_MAX: Duration = Duration::from_secs(31 * 24 * 3600);
/// The time that a task is kept after its deadline, unless it says when it expires.
pub const QUEUE_TASK_RETENTION: Duration = Duration::from_secs(365 * 24 * 3600);
/// Of a payload. serde_json parses 127 levels, and a claim has four around it.
pub const QUEUE_NESTING_MAX: usize = 120;
pub const QUEUE_DEPENDENCIES_MAX: usize = 1_000;
pub const QUEUE_CLAIM_TIMEOUT: Duration = Duration::from_secs(1200);
pub const QUEUE_CLAIM_DELAY: Duration = Duration::from_secs(5);
/// After the deadline, until when a report is accepted.
pub const QUEUE_DEADLINE_DELAY: Duration = Duration::from_secs(5);
pub const QUEUE_POLL_URL_TTL: Duration = Duration::from_secs(30 * 60);
pub const QUEUE_VISIBILITY_TIMEOUT: Duration = Duration::from_secs(300);
pub const QUEUE_VISIBILITY_TIMEOUT_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// Taskcluster's `claimWork` waits as long.
pub const QUEUE_LONG_POLL_WAIT: Duration = Duration::from_secs(20);
pub const QUEUE_LONG_POLLS_MAX: usize = 4_096;
pub const QUEUE_CONNECTIONS_MAX: usize = 8_192;
/// Connections that wait to be accepted; beyond it, clients retry after 1, 3, 7 … seconds.
pub const QUEUE_BACKLOG: u32 = 4_096;
/// The time between requests, and for the head of one.
pub const QUEUE_CONNECTION_IDLE_MAX: Duration = Duration::from_secs(90);
pub const QUEUE_SMALL_BODY_BYTES_MAX: u32 = 64 << 10;
pub const QUEUE_UNAUTHENTICATED_BODY_BYTES_MAX: u32 = 4 << 10;
/// Bodies of clients in memory at once; further requests are told to retry.
pub const QUEUE_BODIES_BYTES_MAX: u32 = 64 << 20;
pub const QUEUE_DISCARD_TIMEOUT: Duration = Duration::from_secs(2);
pub const QUEUE_BODY_BYTES_MAX: u32 = 10 << 20;
pub const QUEUE_BODY_TIMEOUT: Duration = Duration::from_secs(60);
pub const QUEUE_ARTIFACT_BYTES_MAX: u64 = 4 << 30;
/// Expired claims, tasks or artifacts in one commit.
pub const QUEUE_SWEEP_MAX: u32 = 512;
/// The claimed tasks of a queue, and the latest ones, whose runs tell its workers.
pub const QUEUE_WORKER_TASKS_MAX: u32 = 2_000;
pub const QUEUE_PAGE_MAX: u32 = 1_000;
/// What is counted of each queue in memory.
pub const QUEUE_ACTIVITY_MINUTES: i64 = 60;
/// Tasks of further queues are not counted.
pub const QUEUE_ACTIVITY_QUEUES_MAX: usize = 1_000;
/// At least one task is returned; a worker reads [`JSON_BODY_BYTES_MAX`](super::JSON_BODY_BYTES_MAX).
pub const QUEUE_REPLY_BYTES_MAX: usize = 12 << 20;
pub const QUEUE_STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Artifacts are accepted this long after an exception.
pub const QUEUE_LATE_ARTIFACTS_WINDOW: Duration = Duration::from_secs(25 * 60);
/// Links that lead to the content of one artifact.
pub const QUEUE_LINKS_MAX: u8 = 8;
pub const QUEUE_PUT_URL_TTL: Duration = Duration::from_secs(45 * 60);
pub const QUEUE_GET_URL_TTL: Duration = Duration::from_secs(30 * 60);
/// An upload URL expires after the same time.
pub const QUEUE_UPLOAD_TIMEOUT: Duration = QUEUE_PUT_URL_TTL;
/// The start of an upload, which is kept in memory: a shorter one is written at once.
pub const QUEUE_UPLOAD_HEAD_BYTES: u64 = 64 << 10;
pub const QUEUE_READ_BYTES: usize = 64 << 10;
pub const QUEUE_OVERLOADED_POLL_WAIT: Duration = Duration::from_secs(1);
