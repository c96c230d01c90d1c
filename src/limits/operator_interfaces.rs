//! Bounds of those who look and tell: the control socket, the status page, traces, the service manager.

use std::time::Duration;

/// How long a worker may take to answer its control socket.
pub const CONTROL_TIMEOUT: Duration = Duration::from_secs(5);
/// The largest request that a control socket takes.
pub const CONTROL_BODY_BYTES_MAX: usize = 64 << 10;
/// How much of a task's log is read at a time for somebody who follows it.
pub const CONTROL_READ_BYTES: usize = 64 << 10;
/// How often it is checked that a task whose log is followed is still there.
pub const CONTROL_FOLLOW_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The largest answer of a control socket, logs aside.
pub const CONTROL_ANSWER_BYTES_MAX: usize = 64 << 20;
/// How many words to a service manager may wait for it to read.
pub const SYSTEMD_MESSAGES_QUEUED_MAX: usize = 16;
/// The longest status that a service manager is told.
pub const SYSTEMD_STATUS_CHARS_MAX: usize = 400;
/// How often a worker is looked at on behalf of a service manager.
pub const SYSTEMD_STATUS_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How long its loop may take to answer, a quarter of the watchdog's span where that is less.
pub const SYSTEMD_SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a status is told in which only a span has run down.
pub const SYSTEMD_STATUS_INTERVAL: Duration = Duration::from_secs(10);
/// How often a service manager is asked for more time while a worker drains.
pub const SYSTEMD_EXTEND_INTERVAL: Duration = Duration::from_secs(10);
/// How much more time it is asked for.
pub const SYSTEMD_EXTEND_BY: Duration = Duration::from_secs(60);
/// How long the last words to a service manager may take.
pub const SYSTEMD_CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the worker's loop may take to answer before it does not count as alive, or the page goes without.
pub const HTTP_SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(5);
/// How many groups of a pool a controller's page shows; a browser redraws them every two seconds.
pub const PAGE_GROUPS_MAX: usize = 200;
/// How many connections the status page and the metrics are served over at once; beyond, one that asks for nothing makes room.
pub const HTTP_CONNECTIONS_MAX: usize = 32;
/// How long a connection of the status page may last; browsers and Prometheus make another.
pub const HTTP_CONNECTION_AGE_MAX: Duration = Duration::from_secs(60);
/// How long the head of a request for the status page may take to come.
pub const HTTP_HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long what is posted to a controller may take to come.
pub const HTTP_BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest head of a request for the status page.
pub const HTTP_HEAD_BYTES_MAX: usize = 16 << 10;
/// How long to wait before the next attempt to accept a connection of the status page.
pub const HTTP_ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// How often `journeyman top` looks at a worker.
pub const TOP_REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// How many keys may wait for `journeyman top`.
pub const TOP_KEYS_QUEUED_MAX: usize = 64;
/// How long `journeyman top` waits for a key before it looks whether it is still wanted.
pub const TOP_KEY_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// How many lines of a log `journeyman top` keeps.
pub const TOP_LOG_LINES_MAX: usize = 2_000;
/// How many bytes of a line of a log `journeyman top` keeps.
pub const TOP_LOG_LINE_BYTES_MAX: usize = 1_000;
/// How many connections a control socket serves at once; the others wait.
pub const CONTROL_CONNECTIONS_MAX: usize = 128;
/// How long the head of a request to a control socket may take, and how long a connection may be silent between two.
pub const CONTROL_HEAD_TIMEOUT: Duration = Duration::from_secs(2);
/// How often it is looked whether the file of a control socket is still there.
pub const CONTROL_SOCKET_CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// The rest after a connection to a control socket could not be accepted.
pub const CONTROL_ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// How many ended claims wait for a collector of traces; what comes on top is dropped and counted.
pub const TRACES_QUEUED_MAX: usize = 2048;
/// How many claims go into one request to a collector.
pub const TRACES_BATCH_MAX: usize = 128;
/// How long a span waits for others at most.
pub const TRACES_BATCH_DELAY: Duration = Duration::from_secs(5);
/// How often spans are sent in all before they are dropped.
pub const TRACES_ATTEMPTS_MAX: u32 = 4;
/// How long a collector may take to answer, where the environment does not say.
pub const TRACES_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest that the environment may say.
pub const TRACES_TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// How long a worker that leaves waits for a collector.
pub const TRACES_CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// How much of a collector's answer is read.
pub const TRACES_ANSWER_BYTES_MAX: usize = 64 * 1024;
