//! Bounds of requests: their queues, their clients, services beside the tasks, and the bridge.

use std::time::Duration;

/// How long a connection to an AMQP broker may take, TLS and login included.
pub const AMQP_CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// How often each side of an AMQP connection shows that it is there, in seconds, where the address does not say.
pub const AMQP_HEARTBEAT: u16 = 30;
/// How long a poll of a request queue waits.
pub const AMQP_LONG_POLL_WAIT: Duration = Duration::from_secs(20);
/// How long a request may be worked at between two looks whether its channel still stands.
pub const AMQP_LEASE: Duration = Duration::from_secs(600);
/// How long requests that were handed to this worker may wait for a poll before they go back to the others.
pub const AMQP_UNPOLLED_REQUEUE_DELAY: Duration = Duration::from_secs(2);
/// How long a call to a broker may take besides a connection.
pub const AMQP_CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a step of an orderly goodbye to a broker may take.
pub const AMQP_CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// The largest message that is taken or sent, unless configured: RabbitMQ's own bound before 4.0.
pub const AMQP_MESSAGE_BYTES_MAX: u64 = 128 << 20;
/// How long a client takes an exchange for granted that it has seen.
pub const EXCHANGE_CACHE_TTL: Duration = Duration::from_secs(1);
/// How long a request rests that a service was too busy for, unless it says how long.
pub const SERVICE_RETRY_AFTER_DEFAULT: Duration = Duration::from_secs(1);
/// The longest of such rests, whatever a service says.
pub const SERVICE_RETRY_AFTER_MAX: Duration = Duration::from_secs(30);
/// The longest name that AMQP has room for: of a queue, an exchange, a key, a header, a media type.
pub const AMQP_NAME_BYTES_MAX: usize = 255;
/// How often a request is tried, unless configured.
pub const AMQP_ATTEMPTS_MAX: u32 = 5;
/// How often a channel is looked at that is consumed from no more while requests of it are worked at.
pub const AMQP_CHANNEL_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// How long an answer is sent again that its queue refuses, since that is full.
pub const AMQP_ANSWER_RETRY_MAX: Duration = Duration::from_secs(60);
/// For how long it counts that the queue of requests has refused a copy.
pub const AMQP_QUEUE_FULL_TTL: Duration = Duration::from_secs(60);
/// The pause before such an answer is sent again to a request that no handler has seen.
pub const AMQP_ANSWER_RETRY_DELAY: Duration = Duration::from_secs(1);
/// How often an alert says that requests were acknowledged without an answer.
pub const AMQP_UNANSWERED_ALERT_INTERVAL: Duration = Duration::from_secs(60);
/// How many clients may be asked after at once, whether they still wait for their answers: an address that is nobody's costs the channel
/// that it is asked for on.
pub const AMQP_CLIENT_PROBES_MAX: usize = 1;
/// How long a client that was there is taken to be there still.
pub const AMQP_CLIENT_PROBE_TTL: Duration = Duration::from_secs(1);
/// How many such clients are remembered.
pub const AMQP_CLIENTS_CACHED_MAX: usize = 64;
/// How many calls of one client may be under way at once; more wait.
pub const CALLS_MAX: usize = 16_384;
/// The largest request of a client: RabbitMQ's own bound before 4.0.
pub const CALL_BODY_BYTES_MAX: usize = 128 << 20;
/// How long `journeyman call` waits for an answer unless it is told otherwise.
pub const CALL_ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How much of an answer's own words `journeyman call` repeats in its error.
pub const CALL_REASON_CHARS_MAX: usize = 500;
/// How much of a request's body counts for what tells requests apart; its length counts whatever it is.
pub const IDEMPOTENCY_BODY_BYTES_MAX: usize = 64 << 10;
/// The waits of a bridge between attempts at what did not go through.
pub const BRIDGE_RETRY_MIN: Duration = Duration::from_millis(500);
/// The longest of them.
pub const BRIDGE_RETRY_MAX: Duration = Duration::from_secs(30);
/// The first wait between two looks of a bridge at a task.
pub const BRIDGE_POLL_MIN: Duration = Duration::from_millis(100);
/// The longest one.
pub const BRIDGE_POLL_MAX: Duration = Duration::from_secs(5);
/// How long a task that was a request is kept after its deadline, for a request that comes again.
pub const BRIDGE_TASK_RETENTION: Duration = Duration::from_secs(24 * 3600);
/// The largest result of a task that becomes an answer.
pub const BRIDGE_RESULT_BYTES_MAX: usize = 16 << 20;
/// How many partial answers are kept with a task.
pub const BRIDGE_PARTIAL_ANSWERS_MAX: usize = 500;
/// How long a broker's management interface may take to answer.
pub const AMQP_MANAGEMENT_TIMEOUT: Duration = Duration::from_secs(20);
/// How much of its answer is read.
pub const AMQP_MANAGEMENT_BYTES_MAX: usize = 1 << 20;
/// How many queues it is asked about at once.
pub const AMQP_MANAGEMENT_PAGE_QUEUES: u32 = 500;
/// How many of them are counted in all.
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
