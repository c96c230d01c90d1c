//! Every bound that has a number, in one place.

use std::time::Duration;

/// The largest poll answer that is read.
pub const POLL_BODY_BYTES_MAX: usize = 1 << 20;
/// The largest JSON answer of a queue that is read; 32 task definitions of about 1 MiB would not fit a fleet's memory.
pub const JSON_BODY_BYTES_MAX: usize = 16 << 20;
/// The most entries one poll may bring.
pub const POLL_MESSAGES_MAX: usize = 32;
/// How deep XML elements of a poll answer may nest.
pub const XML_DEPTH_MAX: usize = 16;
/// How many attributes an XML element of a poll answer may have.
pub const XML_ATTRIBUTES_MAX: usize = 64;
/// How long a call that is not a long poll may take.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a long poll may take; the service answers after 20 s, proxies give up after 60 s.
pub const LONG_POLL_TIMEOUT: Duration = Duration::from_secs(60);
/// How long making a connection may take.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connection may stay unused; the service closes its own after 90 s.
pub const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// How much of a refusal's text is kept for the log.
pub const REFUSAL_TEXT_BYTES_MAX: usize = 300;
/// How many lanes (queues of one source) are polled.
pub const LANES_MAX: usize = 64;
