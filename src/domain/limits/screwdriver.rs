//! Limits of Screwdriver sources.

use core::time::Duration;

/// The time of a call to the build API; the existing worker waits as long.
pub const SCREWDRIVER_API_TIMEOUT: Duration = Duration::from_secs(10);
/// Queues that are looked at, with those that dead letters lead to.
pub const SCREWDRIVER_QUEUES_MAX: usize = 32;
/// Before a start is tried again. The delay of the queue counts; the existing worker's is as long.
pub const SCREWDRIVER_START_RETRY: Duration = Duration::from_secs(5);
/// A message of a build that was stopped so long ago is gone: the token is valid for 12 hours.
pub const SCREWDRIVER_TOMBSTONE_KEPT: Duration = Duration::from_secs(24 * 60 * 60);
/// The stopped builds that one call lists.
pub const SCREWDRIVER_TOMBSTONES_PAGE: u32 = 500;
