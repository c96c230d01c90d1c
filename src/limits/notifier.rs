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
/// Unless the endpoint says otherwise.
pub const NOTIFIER_ATTEMPTS_PER_ENDPOINT: u16 = 32;
pub const NOTIFIER_ATTEMPTS_PER_ORIGIN_MAX: u16 = 64;
/// Of what a notifier answers to a publisher.
pub const NOTIFY_ANSWER_BYTES_MAX: usize = 64 * 1024;
pub const NOTIFY_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Of one call of a publisher.
pub const NOTIFY_CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Lanes whose order `notifier listen` follows.
pub const NOTIFIER_LISTEN_LANES_MAX: usize = 100_000;
/// How often the store is asked for due lanes that nothing has announced.
pub const NOTIFIER_REFILL_INTERVAL: Duration = Duration::from_secs(30);
/// After an error of the store.
pub const NOTIFIER_STORE_RETRY: Duration = Duration::from_secs(1);
/// Attempts that are under way may end when the notifier stops.
pub const NOTIFIER_STOP_TIMEOUT: Duration = Duration::from_secs(30);
