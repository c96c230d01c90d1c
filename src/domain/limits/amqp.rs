//! Limits of AMQP sources and clients, sidecars, and the bridge.

use core::time::Duration;

/// The heartbeat in seconds, unless the URI sets it.
pub const AMQP_HEARTBEAT: u16 = 30;
pub const AMQP_LONG_POLL_WAIT: Duration = Duration::from_secs(20);
/// Of a source beside others: they share the slots, and a poll of one that has them all keeps the others waiting.
pub const AMQP_SHARED_POLL_WAIT: Duration = Duration::from_secs(1);
/// How long a request is worked on between two checks of its channel.
pub const AMQP_LEASE: Duration = Duration::from_secs(600);
/// Prefetched requests that wait longer for a poll are requeued.
pub const AMQP_UNPOLLED_REQUEUE_DELAY: Duration = Duration::from_secs(2);
/// The limit for a call, and for connecting with TLS and login.
pub const AMQP_CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// The time for declaring the delays of a queue.
pub const AMQP_DECLARE_TIMEOUT: Duration = Duration::from_secs(60);
/// Works that run elsewhere of which a worker knows copies.
pub const AMQP_DONE_LOOKS_MAX: usize = 20_000;
pub const AMQP_CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// RabbitMQ's own limit before 4.0.
pub const AMQP_MESSAGE_BYTES_MAX: u64 = 128 << 20;
pub const EXCHANGE_CACHE_TTL: Duration = Duration::from_secs(1);
/// The delay after 429 or 503 without `retry-after`.
pub const SERVICE_RETRY_AFTER_DEFAULT: Duration = Duration::from_secs(1);
pub const SERVICE_RETRY_AFTER_MAX: Duration = Duration::from_secs(30);
/// AMQP's limit for queues, exchanges, keys, headers and media types.
pub const AMQP_NAME_BYTES_MAX: usize = 255;
pub const AMQP_ATTEMPTS_MAX: u32 = 5;
/// How long a redelivered request runs before the worker takes others: long enough for most requests that end their worker.
pub const AMQP_ISOLATION_AT_FIRST: Duration = Duration::from_secs(60);
pub const AMQP_CHANNEL_CHECK_INTERVAL: Duration = Duration::from_secs(1);
pub const AMQP_REPLY_RETRY_MAX: Duration = Duration::from_secs(60);
pub const AMQP_QUEUE_FULL_TTL: Duration = Duration::from_secs(60);
pub const AMQP_REPLY_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Lost claims and queues that the worker has not received yet; more wait.
pub const AMQP_EVENTS_MAX: usize = 64;
pub const CALLS_MAX: usize = 16_384;
/// RabbitMQ's own limit before 4.0.
pub const CALL_BODY_BYTES_MAX: usize = 128 << 20;
pub const RPC_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
pub const RPC_EXPIRED_REPLY_WAIT: Duration = Duration::from_secs(1);
/// How much of a request's body is hashed; its length is always hashed.
pub const IDEMPOTENCY_BODY_BYTES_MAX: usize = 64 << 10;
pub const BRIDGE_RETRY_MIN: Duration = Duration::from_millis(500);
pub const BRIDGE_RETRY_MAX: Duration = Duration::from_secs(30);
pub const BRIDGE_POLL_MIN: Duration = Duration::from_millis(100);
pub const BRIDGE_POLL_MAX: Duration = Duration::from_secs(5);
/// How long after its deadline a task of a request is kept, for a redelivery.
pub const BRIDGE_TASK_RETENTION: Duration = Duration::from_secs(24 * 3600);
/// How long a durable reply queue exists without a client.
pub const REPLY_QUEUE_RETENTION: Duration = Duration::from_secs(24 * 3600);
pub const BRIDGE_RESULT_BYTES_MAX: usize = 16 << 20;
pub const AMQP_MANAGEMENT_TIMEOUT: Duration = Duration::from_secs(20);
pub const AMQP_MANAGEMENT_BYTES_MAX: usize = 1 << 20;
pub const AMQP_MANAGEMENT_PAGE_QUEUES: u32 = 500;
pub const AMQP_MANAGEMENT_QUEUES_MAX: u32 = 10_000;
pub const SERVICE_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The interval for a service that the worker starts, until it is healthy.
pub const SERVICE_STARTING_PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// The interval for an external service, until it is healthy.
pub const SERVICE_ABSENT_PROBE_INTERVAL: Duration = Duration::from_secs(1);
pub const SERVICE_PROBE_INTERVAL_MIN_MS: u64 = 100;
/// A shorter interval of probes does not shorten the time that a probe may take.
pub const SERVICE_PROBE_TIMEOUT_MIN: Duration = Duration::from_secs(1);
pub const SERVICE_STARTUP_TIMEOUT_MIN_MS: u64 = 100;
/// Consecutive failed probes before a restart.
pub const SERVICE_FAILED_PROBES_MAX: u32 = 3;
pub const SERVICE_FAILURES_ALERT_AFTER: u32 = 3;
/// Further failures between alerts; about half an hour.
pub const SERVICE_FAILURES_ALERT_EVERY: u32 = 30;
pub const SERVICE_LOG_BYTES_MAX: u64 = 64 << 20;
/// Each service has a termination grace of its own.
pub const SERVICES_STOP_TIMEOUT: Duration = Duration::from_secs(10 * 60);
pub const SERVICE_HEADERS_MAX: usize = 64;
pub const SERVICE_ANSWER_BYTES_MAX: usize = 128 << 20;
