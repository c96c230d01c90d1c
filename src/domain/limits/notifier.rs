//! Limits of the notifier.

use core::time::Duration;

/// The bytes of a source, id, type or key.
pub const NOTIFIER_NAME_BYTES_MAX: usize = 255;
/// The bytes of the data of one event.
pub const NOTIFIER_DATA_BYTES_MAX: usize = 256 * 1024;
/// The bytes of the body of a Mistral's notification.
pub const NOTIFIER_MISTRAL_BODY_BYTES_MAX: usize = 1024 * 1024;
/// How deep the data of an event nests: with what is around it, as deep as .NET parses.
pub const NOTIFIER_NESTING_MAX: usize = 62;
/// The bytes of one call.
pub const NOTIFIER_BODY_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Events of one call.
pub const NOTIFIER_BATCH_MAX: usize = 1_000;
/// The bytes of the other calls, which are not about events.
pub const NOTIFIER_SMALL_BODY_BYTES_MAX: usize = 64 * 1024;
/// Bytes of events in memory that are not stored yet. Beyond it, a caller is asked to come later.
pub const NOTIFIER_BODIES_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Beyond it, an idle connection is closed.
pub const NOTIFIER_CONNECTIONS_MAX: usize = 1_024;
/// Due lanes of one endpoint in memory; the others stay in the store.
pub const NOTIFIER_LANES_WAITING_MAX: usize = 512;
/// Attempts under way.
pub const NOTIFIER_ATTEMPTS_MAX: usize = 256;
/// The attempts at one endpoint, unless it says otherwise.
pub const NOTIFIER_ATTEMPTS_PER_ENDPOINT: u16 = 32;
pub const NOTIFIER_ATTEMPTS_PER_ORIGIN_MAX: u16 = 64;
pub const NOTIFY_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The time of one call of a publisher.
pub const NOTIFY_CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Events of a role without a store that wait for the notifier. More are dropped, counted and logged.
pub const NOTIFY_EVENTS_WAITING_MAX: usize = 10_000;
/// Events of one call.
pub const NOTIFY_BATCH_MAX: usize = 100;
/// How often it is logged that events wait.
pub const NOTIFY_REPORT_INTERVAL: Duration = Duration::from_secs(60);
/// The pause after a call that was denied.
pub const NOTIFY_DENIED_WAIT: Duration = Duration::from_secs(60);
/// The time for the last events of a process that ends.
pub const NOTIFY_CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Events in the database of a queue. More are dropped and logged.
pub const NOTIFY_OUTBOX_ROWS_MAX: i64 = 1_000_000;
/// Lanes whose order `notifier listen` follows.
pub const NOTIFIER_LISTEN_LANES_MAX: usize = 100_000;
/// How often the store is asked for due lanes that nothing has announced.
pub const NOTIFIER_REFILL_INTERVAL: Duration = Duration::from_secs(30);
/// The longest pause between attempts that a publisher sets, in seconds.
pub const NOTIFIER_RETRY_SECONDS_MAX: f64 = 86_400.0;
/// The pause after an error of the store.
pub const NOTIFIER_STORE_RETRY: Duration = Duration::from_secs(1);
/// Attempts that are under way may end when the notifier stops.
pub const NOTIFIER_STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// Parts that the lanes are divided into. Nodes share lanes by these, so it never changes.
pub const NOTIFIER_PARTITIONS: u16 = 64;
/// How long a node has its partitions without a word from it.
pub const NOTIFIER_LEASE: Duration = Duration::from_secs(15);
pub const NOTIFIER_LEASE_RENEWAL: Duration = Duration::from_secs(5);
/// The time for handing the lanes over when a node stops.
pub const NOTIFIER_LEASE_END_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the endpoints of events are chosen while they change.
pub const NOTIFIER_CHOICES_MAX: usize = 20;
/// Connections of a node to PostgreSQL, beside the one that listens and the one of the lease.
pub const POSTGRES_DELIVERY_CONNECTIONS: usize = 6;
pub const POSTGRES_INTAKE_CONNECTIONS: usize = 6;
pub const POSTGRES_PAGE_CONNECTIONS: usize = 3;
/// Events of the calls that share a transaction, heads that are read together, and attempts whose ends are stored together.
pub const NOTIFIER_TRANSACTION_MAX: usize = 64;
/// How long a head that was read waits for its attempt. An older one is read again: another node may have changed its lane.
pub const NOTIFIER_HEAD_AGE_MAX: Duration = Duration::from_secs(1);
/// The data of all heads that are kept with their lanes.
pub const NOTIFIER_HEADS_BYTES_MAX: usize = 16 * 1024 * 1024;
/// What attempts have brought and is not stored yet: no attempt begins beside so many.
pub const NOTIFIER_COMMITS_MAX: usize = 256;
/// Transactions that store the ends of attempts.
pub const NOTIFIER_ENDS_AT_ONCE: usize = 2;
/// The time that a connection may take.
pub const POSTGRES_WAIT_TIMEOUT: Duration = Duration::from_secs(10);
pub const POSTGRES_STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);
/// The server ends the transaction of a node that has stopped in the middle of it.
pub const POSTGRES_IDLE_TRANSACTION_TIMEOUT: Duration = Duration::from_secs(5);
/// The tries of one transaction.
pub const POSTGRES_TRIES_MAX: usize = 4;
/// The pause after the connection that listens was lost.
pub const POSTGRES_HINT_RETRY: Duration = Duration::from_secs(2);
/// Lanes whose messages one transaction sends once more.
pub const NOTIFIER_REPLAY_LANES: usize = 200;
/// Rows that one transaction of the clean-up removes.
pub const NOTIFIER_UPKEEP_BATCH: usize = 500;
/// Between its transactions, so that events and attempts come in between.
pub const NOTIFIER_UPKEEP_PAUSE: Duration = Duration::from_millis(100);
pub const NOTIFIER_UPKEEP_INTERVAL: Duration = Duration::from_secs(10 * 60);
/// Lanes or attempts of one answer.
pub const NOTIFIER_ROWS_MAX: usize = 1_000;
/// Events that a list of messages looks at together, and how often it goes on before the page ends.
pub const NOTIFIER_SEARCH_EVENTS: usize = 200;
pub const NOTIFIER_SEARCH_STEPS: usize = 50;
/// Of the rows of one answer, with the beginnings of what receivers have answered.
pub const NOTIFIER_ROWS_BYTES_MAX: usize = 64 * 1024 * 1024;
/// The rows that are shown unless more are asked for.
pub const NOTIFIER_ROWS_SHOWN: usize = 100;
/// Rows of an outbox that one transaction takes.
pub const NOTIFIER_OUTBOX_ROWS: usize = 64;
/// How often an outbox is looked at that was empty.
pub const NOTIFIER_OUTBOX_INTERVAL: Duration = Duration::from_millis(500);
/// Messages of one queue of RabbitMQ that were not acknowledged yet.
pub const NOTIFIER_PREFETCH: u16 = 64;
/// Messages of all shards that were not acknowledged yet. Each is in memory, with at most [`NOTIFIER_BODY_BYTES_MAX`].
pub const NOTIFIER_UNACKED_MAX: u16 = 128;
/// Deliveries of one message by RabbitMQ. Each of them but one is a lost connection.
pub const NOTIFIER_DELIVERY_LIMIT: i32 = 1_000_000;
/// Queues that RabbitMQ spreads the keys of events over.
pub const NOTIFIER_SHARDS_MAX: u16 = 256;
/// How often Mistral's queues are listed.
pub const NOTIFIER_MISTRAL_DISCOVERY_INTERVAL: Duration = Duration::from_secs(60);
/// How often a notifier looks whether the one that takes Mistral's messages is gone.
pub const NOTIFIER_MISTRAL_STANDBY_INTERVAL: Duration = Duration::from_secs(2);
/// Queues of Mistral that messages are taken from. Others wait until some are deleted.
pub const NOTIFIER_MISTRAL_QUEUES_MAX: usize = 10_000;
/// Messages of one of them that were not acknowledged yet.
pub const NOTIFIER_MISTRAL_PREFETCH: u16 = 16;
/// Endpoints that Mistral's messages have named, each a URL with its headers.
pub const NOTIFIER_TARGETS_MAX: usize = 10_000;
/// The time of an attempt at one of them.
pub const NOTIFIER_TARGET_TIMEOUT: Duration = Duration::from_secs(20);
/// The time of the demonstration.
pub const NOTIFIER_DEV_TIMEOUT: Duration = Duration::from_secs(60);
