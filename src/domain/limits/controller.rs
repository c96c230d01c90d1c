//! Limits of the controller of worker groups and its drivers.

use core::time::Duration;

pub const CONTROLLER_ORPHANS_MAX: u16 = 512;
/// Forwarded requests of one key that the broker has not confirmed.
pub const CONTROLLER_FORWARDS_MAX: usize = 32;
/// A request that becomes an orphan more often is answered with an error.
pub const CONTROLLER_HOPS_MAX: u64 = 8;
/// Requests of one key that wait for a full or slow queue; further ones are answered with an error.
pub const CONTROLLER_QUEUE_FULL_WAITING_MAX: usize = 32;
pub const CONTROLLER_QUEUE_DECLARE_SLOW: Duration = Duration::from_secs(5);
/// An orphan that waits longer for its queue is answered with an error, so that one key does not block others.
pub const CONTROLLER_ORPHAN_TIMEOUT: Duration = Duration::from_secs(60);
/// Failed declarations of a queue in a row, after which the orphans of its key no longer wait.
pub const CONTROLLER_BIND_ATTEMPTS_MAX: u32 = 5;
pub const CONTROLLER_DEAD_LETTERS_MAX: u16 = 256;
pub const CONTROLLER_TOPOLOGY_INTERVAL: Duration = Duration::from_secs(5);
pub const CONTROLLER_POLICIES_INTERVAL: Duration = Duration::from_secs(15);
pub const CONTROLLER_POLICIES_TIMEOUT: Duration = Duration::from_secs(2);
pub const CONTROLLER_RECONCILE_INTERVAL: Duration = Duration::from_millis(500);
pub const CONTROLLER_PLAN_DEBOUNCE: Duration = Duration::from_millis(50);
/// The controller adds headers, and RabbitMQ accepts 128 KiB.
pub const CONTROLLER_HEADERS_BYTES_MAX: usize = 120 << 10;
/// In seconds. RabbitMQ passes the pool to the standby controller after two missed heartbeats.
pub const CONTROLLER_HEARTBEAT: u16 = 5;
pub const CONTROLLER_STANDBY_INTERVAL: Duration = Duration::from_secs(1);
pub const CONTROLLER_QUEUE_STEPS_CONCURRENT_MAX: usize = 8;
pub const CONTROLLER_QUEUE_CHECKS_CONCURRENT_MAX: usize = 4;
pub const CONTROLLER_QUEUE_CHECK_RETRY_DELAY: Duration = Duration::from_secs(20);
/// A queue is counted this often where no worker would start for its next request, unless something about its group changes.
pub const CONTROLLER_QUIET_QUEUE_INTERVAL: Duration = Duration::from_secs(5);
pub const CONTROLLER_SESSION_EVENTS_MAX: usize = 64;
/// A worker counts as busy this long after its last report; a busy worker reports once a minute.
pub const CONTROLLER_BUSY_TTL: Duration = Duration::from_secs(90);
/// A worker that was ready this long resets the restart backoff.
pub const CONTROLLER_WORKER_STABLE_AFTER: Duration = Duration::from_secs(30);
pub const CONTROLLER_STATUS_REQUESTS_MAX: usize = 64;
pub const CONTROLLER_GROUPS_MAX: usize = 10_000;
/// How long a controller waits at start for the list of workers.
pub const CONTROLLER_WORKERS_TIMEOUT: Duration = Duration::from_secs(5);
pub const DRIVER_CALLS_MAX: usize = 16;
pub const DRIVER_CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// A list that takes longer counts as a driver that does not reply, so that the status shows it within five seconds.
pub const DRIVER_LIST_SLOW: Duration = Duration::from_secs(3);
pub const DRIVER_STARTS_QUEUED_MAX: usize = 1024;
/// The longest text of a worker's exit, and of each of its last log lines.
pub const DRIVER_EXIT_REASON_CHARS_MAX: usize = 512;
pub const DRIVER_LOG_TAIL_BYTES_MAX: u64 = 4096;
/// The log of a worker process is truncated at the front beyond this size.
pub const DRIVER_LOG_BYTES_MAX: u64 = 64 << 20;
pub const DRIVER_LOG_BYTES_KEPT: u64 = 8 << 20;
pub const DRIVER_ENDED_LOGS_MAX: usize = 200;
pub const DRIVER_POLL_INTERVAL: Duration = Duration::from_secs(2);
/// A list of some thousands of pods.
pub const DRIVER_OUTPUT_BYTES_MAX: usize = 64 << 20;
pub const DEMAND_INTERVAL: Duration = Duration::from_secs(5);
/// Claimed tasks counted in a remote queue; more need no more workers than a host has.
pub const DEMAND_CLAIMED_MAX: usize = 1_000;
pub const TOKEN_BYTES_MIN: usize = 16;
pub const COMMAND_DURATION_MAX: Duration = Duration::from_secs(7 * 24 * 60 * 60);
pub const CONTROLLER_WORKER_EXIT_TIMEOUT: Duration = Duration::from_secs(5);
pub const CONTROLLER_LOG_TAIL_LINES_MAX: usize = 20;
pub const CONTROLLER_POISON_MAX: usize = 2_000;
pub const CONTROLLER_POISON_TIMEOUT: Duration = Duration::from_secs(10);
pub const CONTROLLER_REPORTS_BATCH_MAX: usize = 128;
/// RabbitMQ updates its counts every five seconds.
pub const CONTROLLER_COUNTS_INTERVAL: Duration = Duration::from_secs(2);
pub const CONTROLLER_COUNTS_TTL: Duration = Duration::from_secs(15);
/// How long a write to the state of a pool waits for another process.
pub const CONTROLLER_STORE_TIMEOUT: Duration = Duration::from_secs(5);
/// The API server answers in milliseconds; a driver that cannot be asked is reported within seconds.
pub const KUBERNETES_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
pub const KUBERNETES_CALL_TIMEOUT: Duration = Duration::from_secs(10);
pub const KUBERNETES_RETRY_AFTER_MAX: Duration = Duration::from_secs(60);
/// A list of some thousands of pods.
pub const KUBERNETES_ANSWER_BYTES_MAX: usize = 64 << 20;
/// Files with tokens are rotated while the old token is good for minutes.
pub const KUBERNETES_TOKEN_REREAD: Duration = Duration::from_secs(50);
/// A credential plugin may ask a service of a cloud.
pub const KUBERNETES_PLUGIN_TIMEOUT: Duration = Duration::from_secs(30);
/// How long before they expire credentials are renewed, or at half their life.
pub const KUBERNETES_RENEWAL_MARGIN: Duration = Duration::from_secs(60);
pub const KUBERNETES_RENEWAL_RETRY: Duration = Duration::from_secs(10);
/// Attempts to change an object that others change as well.
pub const KUBERNETES_CHANGE_ATTEMPTS_MAX: usize = 5;
/// A missing image or configuration may come within this time of a pod's creation.
pub const KUBERNETES_START_GRACE_SECONDS: i64 = 30;
pub const KUBERNETES_WATCH_RETRY: Duration = Duration::from_secs(5);
/// A server ends a watch after 290 s.
pub const KUBERNETES_WATCH_SILENCE_MAX: Duration = Duration::from_secs(300);
/// The metadata of a pod; the API server takes 1.5 MiB of an object.
pub const KUBERNETES_WATCH_LINE_BYTES_MAX: usize = 4 << 20;
/// The time between two requests for the log of a pod.
pub const POD_LOG_RETRY: Duration = Duration::from_secs(1);
/// How long the rest of a log is read once its pod has ended.
pub const POD_LOG_TIMEOUT: Duration = Duration::from_secs(20);
/// Longer lines of a pod are cut.
pub const POD_LOG_LINE_BYTES_MAX: u64 = 1024 * 1024;
/// Warnings of a failed pod in its task's log.
pub const POD_WARNINGS_MAX: usize = 5;
/// How long a pod that has ended is kept if no worker removes it. A check that comes later would launch its work again.
pub const POD_KEPT: Duration = Duration::from_secs(24 * 60 * 60);
pub const POD_SWEEP_INTERVAL: Duration = Duration::from_secs(10 * 60);
pub const YAML_DEPTH_MAX: usize = 64;
/// Steps of a pod template.
pub const POD_TEMPLATE_FUEL: u64 = 100_000;
pub const POD_TEMPLATE_RECURSION_MAX: usize = 50;
