//! Limits of Screwdriver sources.

use std::time::Duration;

/// Of a call to the build API; the existing worker waits as long.
pub const SCREWDRIVER_API_TIMEOUT: Duration = Duration::from_secs(10);
/// Queues that are looked at, with those that dead letters lead to.
pub const SCREWDRIVER_QUEUES_MAX: usize = 32;
