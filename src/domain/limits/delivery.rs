//! Limits of the delivery of webhooks.

use core::time::Duration;

/// A part of a URL's path that is as long may be a secret, and is not shown where a receiver repeats it.
pub const WEBHOOK_SECRET_PATH_BYTES_MIN: usize = 16;

/// Of an attempt, from the look-up of the host to the end of the answer. Longer ones are refused.
pub const WEBHOOK_TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// Look-up, connection and TLS handshake.
pub const WEBHOOK_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Shorter than [`WEBHOOK_CONNECT_TIMEOUT`], so that a slow name server is told apart from a slow endpoint.
pub const WEBHOOK_DNS_TIMEOUT: Duration = Duration::from_secs(4);
/// Node.js closes idle connections after 5 s; a request on one that is being closed fails.
pub const WEBHOOK_IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// The attempts of an endpoint's rate; so many times are kept.
pub const WEBHOOK_RATE_ATTEMPTS_MAX: usize = 10_000;
/// The beginning of an answer that is kept.
pub const WEBHOOK_ANSWER_BYTES_MAX: usize = 16 << 10;
/// Of the text of a failed attempt; certificates of receivers can make it long.
pub const WEBHOOK_ERROR_CHARS_MAX: usize = 500;
