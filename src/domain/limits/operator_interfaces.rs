//! Limits of the control socket, the HTTP pages, traces and systemd notifications.

use core::time::Duration;

pub const CONTROL_TIMEOUT: Duration = Duration::from_secs(5);
pub const CONTROL_BODY_BYTES_MAX: usize = 64 << 10;
pub const CONTROL_READ_BYTES: usize = 64 << 10;
pub const CONTROL_ANSWER_BYTES_MAX: usize = 64 << 20;
pub const SYSTEMD_STATUS_CHARS_MAX: usize = 400;
pub const SYSTEMD_STATUS_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The limit for a snapshot; a quarter of the watchdog interval, if that is shorter.
pub const SYSTEMD_SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(5);
pub const SYSTEMD_EXTEND_BY: Duration = Duration::from_secs(60);
/// A worker that takes longer does not count as alive.
pub const HTTP_SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(5);
/// The time for reading what a source shows of its queue.
pub const SOURCE_INSPECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A browser redraws them every two seconds.
pub const PAGE_GROUPS_MAX: usize = 200;
/// Beyond this, an idle connection is closed.
pub const HTTP_CONNECTIONS_MAX: usize = 32;
/// Browsers and Prometheus reconnect.
pub const HTTP_CONNECTION_AGE_MAX: Duration = Duration::from_secs(60);
pub const HTTP_HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// The time for the body of a request.
pub const HTTP_BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Taskcluster's clients send a certificate with its scopes in a header.
pub const HTTP_HEAD_BYTES_MAX: usize = 32 << 10;
pub const TOP_REFRESH_INTERVAL: Duration = Duration::from_secs(1);
pub const TOP_KEYS_QUEUED_MAX: usize = 64;
pub const TOP_KEY_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Ended claims in the status.
pub const RECENT_RESULTS_MAX: usize = 20;
/// Ended claims of the last hour whose phases are kept.
pub const HISTORY_CLAIMS_MAX: usize = 500;
pub const HISTORY_WINDOW: Duration = Duration::from_secs(3600);
/// Times of reclaims that are kept of a claim, the latest.
pub const HISTORY_RECLAIMS_MAX: usize = 64;
pub const CONTROL_CONNECTIONS_MAX: usize = 128;
/// Connections that wait to be accepted.
pub const CONTROL_BACKLOG: u32 = 128;
/// The time for the head of a request, and for the pause between requests.
pub const CONTROL_HEAD_TIMEOUT: Duration = Duration::from_secs(2);
/// Further claims are dropped and counted.
pub const TRACES_QUEUED_MAX: usize = 2048;
pub const TRACES_BATCH_MAX: usize = 128;
pub const TRACES_BATCH_DELAY: Duration = Duration::from_secs(5);
pub const TRACES_EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
pub const TRACES_CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a console asks each role for its status.
pub const CONSOLE_ASK_INTERVAL: Duration = Duration::from_secs(3);
pub const CONSOLE_ASK_TIMEOUT: Duration = Duration::from_secs(5);
pub const CONSOLE_ANSWER_BYTES_MAX: usize = 16 << 20;
/// The time that a page about many roles may wait for a queue.
pub const CONSOLE_OVERVIEW_TIMEOUT: Duration = Duration::from_secs(1);
/// The time that a page may wait for the queue that it is about.
pub const CONSOLE_QUEUE_TIMEOUT: Duration = Duration::from_secs(5);
/// Rows of a table of tasks.
pub const CONSOLE_TASKS_SHOWN: usize = 50;
/// The latest tasks of a queue whose times are drawn.
pub const CONSOLE_TASKS_MEASURED: usize = 100;
/// The tasks that one order may change.
pub const BULK_TASKS_MAX: usize = 1_000;
/// Calls of an order at the same time.
pub const BULK_CALLS_MAX: usize = 8;
/// The task queues whose counts a page asks for one by one, at a Taskcluster that does not list them together.
pub const CONSOLE_QUEUES_COUNTED: usize = 50;
/// The bytes at the end of a log that a page shows.
pub const CONSOLE_LOG_BYTES_MAX: usize = 1 << 20;
/// The lines at the end of a log that a page draws.
pub const CONSOLE_LOG_LINES_MAX: usize = 10_000;
/// The log of a running task is drawn when it has said nothing for so long.
pub const CONSOLE_LOG_STALL: Duration = Duration::from_millis(250);
/// Images of a task, and texts of it, on its page.
pub const CONSOLE_IMAGES_MAX: usize = 8;
/// A text of a task on its page.
pub const CONSOLE_TEXT_BYTES_MAX: usize = 256 << 10;
