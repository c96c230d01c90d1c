//! Limits of the notifier.

use std::time::Duration;

/// Of a source, id, type and key.
pub const NOTIFIER_NAME_BYTES_MAX: usize = 255;
/// Of the data of one event.
pub const NOTIFIER_DATA_BYTES_MAX: usize = 256 * 1024;
/// Of one call.
pub const NOTIFIER_BODY_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Events of one call.
pub const NOTIFIER_BATCH_MAX: usize = 1_000;
/// Bodies that are stored at once. Beyond it, a caller is asked to come later.
pub const NOTIFIER_CALLS_MAX: usize = 1_024;
/// Due lanes of one endpoint in memory; the others stay in the store.
pub const NOTIFIER_LANES_WAITING_MAX: usize = 512;
/// Attempts under way.
pub const NOTIFIER_ATTEMPTS_MAX: usize = 256;
pub const NOTIFIER_ATTEMPTS_PER_ENDPOINT_MAX: usize = 32;
pub const NOTIFIER_ATTEMPTS_PER_ORIGIN_MAX: usize = 64;
/// How often the store is asked for due lanes that nothing has announced.
pub const NOTIFIER_REFILL_INTERVAL: Duration = Duration::from_secs(30);
/// After an error of the store.
pub const NOTIFIER_STORE_RETRY: Duration = Duration::from_secs(1);
/// Attempts that are under way may end when the notifier stops.
pub const NOTIFIER_STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// Messages of one queue of RabbitMQ that were not acknowledged yet.
pub const NOTIFIER_PREFETCH: u16 = 64;
/// Deliveries of one message by RabbitMQ. Each of them but one is a lost connection.
pub const NOTIFIER_DELIVERY_LIMIT: i32 = 1_000_000;
/// Queues that RabbitMQ spreads the keys of events over.
pub const NOTIFIER_SHARDS_MAX: u16 = 256;
