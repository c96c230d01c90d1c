//! Limits of AMQP: request queues, RPC clients, sidecar services, and the bridge.

use std::time::Duration;

/// Timeout of a connection to a broker, TLS and login included.
pub const AMQP_CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Heartbeat of AMQP connections in seconds, where the address sets none.
pub const AMQP_HEARTBEAT: u16 = 30;
/// How long a poll of a request queue waits.
pub const AMQP_LONG_POLL_WAIT: Duration = Duration::from_secs(20);
/// Lease of a request: the interval of checks whether its channel is open.
pub const AMQP_LEASE: Duration = Duration::from_secs(600);
/// How long prefetched requests wait for a poll before they are requeued.
pub const AMQP_UNPOLLED_REQUEUE_DELAY: Duration = Duration::from_secs(2);
/// Timeout of a call to a broker.
pub const AMQP_CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout of each step of closing a connection.
pub const AMQP_CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Default of `amqp.max_message_size`: RabbitMQ's limit before 4.0.
pub const AMQP_MESSAGE_BYTES_MAX: u64 = 128 << 20;
/// How long a client relies on having seen an exchange.
pub const EXCHANGE_CACHE_TTL: Duration = Duration::from_secs(1);
/// How long a request rests that a service was too busy for, unless it says how long.
pub const SERVICE_RETRY_AFTER_DEFAULT: Duration = Duration::from_secs(1);
/// The longest of such rests, whatever a service says.
pub const SERVICE_RETRY_AFTER_MAX: Duration = Duration::from_secs(30);
/// Longest name in AMQP: of a queue, exchange, key, header or media type.
pub const AMQP_NAME_BYTES_MAX: usize = 255;
/// Default of `max_attempts`.
pub const AMQP_ATTEMPTS_MAX: u32 = 5;
/// Interval of checks of a channel or connection whose end is not reported.
pub const AMQP_CHANNEL_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How long a reply is retried that its queue refuses.
pub const AMQP_REPLY_RETRY_MAX: Duration = Duration::from_secs(60);
/// How long a refused copy marks the request queue as full.
pub const AMQP_QUEUE_FULL_TTL: Duration = Duration::from_secs(60);
/// Pause before a refused reply is retried, for requests that no handler sees.
pub const AMQP_REPLY_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Interval of alerts about replies that were given up.
pub const AMQP_REPLY_GIVEN_UP_ALERT_INTERVAL: Duration = Duration::from_secs(60);
/// Concurrent calls of one client; more wait.
pub const CALLS_MAX: usize = 16_384;
/// Largest request of a client: RabbitMQ's limit before 4.0.
pub const CALL_BODY_BYTES_MAX: usize = 128 << 20;
/// Default of `journeyman call --timeout`.
pub const RPC_TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
/// How much of a reply's message `journeyman call` quotes in its error.
pub const CALL_REASON_CHARS_MAX: usize = 500;
/// How much of a body enters the idempotency key; its length always does.
pub const IDEMPOTENCY_BODY_BYTES_MAX: usize = 64 << 10;
/// First wait of a bridge before a retry.
pub const BRIDGE_RETRY_MIN: Duration = Duration::from_millis(500);
/// Longest wait of a bridge before a retry.
pub const BRIDGE_RETRY_MAX: Duration = Duration::from_secs(30);
/// First wait between two status calls for a task.
pub const BRIDGE_POLL_MIN: Duration = Duration::from_millis(100);
/// Longest wait between two status calls for a task.
pub const BRIDGE_POLL_MAX: Duration = Duration::from_secs(5);
/// How long a task is kept after its deadline, for a request that is redelivered.
pub const BRIDGE_TASK_RETENTION: Duration = Duration::from_secs(24 * 3600);
/// Largest task result that becomes a reply.
pub const BRIDGE_RESULT_BYTES_MAX: usize = 16 << 20;
/// Partial replies that are stored with a task.
pub const BRIDGE_PARTIAL_REPLIES_MAX: usize = 500;
/// Timeout of a call to the management interface.
pub const AMQP_MANAGEMENT_TIMEOUT: Duration = Duration::from_secs(20);
/// Largest response of the management interface.
pub const AMQP_MANAGEMENT_BYTES_MAX: usize = 1 << 20;
/// Queues per page of the management interface.
pub const AMQP_MANAGEMENT_PAGE_QUEUES: u32 = 500;
/// Queues that are counted in all.
pub const AMQP_MANAGEMENT_QUEUES_MAX: u32 = 10_000;
/// How long connecting to a service beside the tasks may take; it is on this host as a rule.
pub const SERVICE_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a service is asked after that this worker has started, until it answers.
pub const SERVICE_STARTING_PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// How often a service is asked after that somebody else starts, until it answers.
pub const SERVICE_ABSENT_PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// The shortest time between two questions to a service, and the shortest time that it may be given to answer one.
pub const SERVICE_PROBE_INTERVAL_MIN: Duration = Duration::from_millis(100);
/// The shortest time that a service may be given to start.
pub const SERVICE_STARTUP_TIMEOUT_MIN: Duration = Duration::from_millis(100);
/// How often in a row a service may not answer well before it is started again.
pub const SERVICE_FAILED_PROBES_MAX: u32 = 3;
/// How long a connection to a service that broke off has to last until it counts as there.
pub const SERVICE_CONNECTION_HELD_MIN: Duration = Duration::from_millis(100);
/// How long a request that a service broke off waits until that is known to be on its way out.
pub const SERVICE_DISCONNECT_WAIT: Duration = Duration::from_secs(1);
/// After how many lives in a row that did not last an operator is told of a service.
pub const SERVICE_FAILURES_ALERT_AFTER: u32 = 3;
/// After how many more an operator is told again; most of half an hour.
pub const SERVICE_FAILURES_ALERT_EVERY: u32 = 30;
/// How much of one life of a service is kept of its log.
pub const SERVICE_LOG_BYTES_MAX: u64 = 64 << 20;
/// How much is read of what is written down of a service.
pub const SERVICE_RECORD_BYTES_MAX: u64 = 64 << 10;
/// How long services may take to end when their worker ends. Each has a grace of its own.
pub const SERVICES_STOP_TIMEOUT: Duration = Duration::from_secs(10 * 60);
/// How many headers of a request are passed on to a service.
pub const SERVICE_HEADERS_MAX: usize = 64;
/// The largest answer of a service to a task that nobody waits for; to a request it is what can be sent.
pub const SERVICE_ANSWER_BYTES_MAX: usize = 128 << 20;
