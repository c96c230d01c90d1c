//! Derives a lease from RabbitMQ's `consumer_timeout`.
//!
//! RabbitMQ requeues the deliveries of a consumer when one is not acknowledged within the timeout. Until 4.2 it closes the channel.
//! From 4.3 on it cancels the consumer, a consumer says how long its timeout is, and classic queues have none.

use core::time::Duration;

use super::lease::margin;

/// RabbitMQ's default.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// The timeout that a consumer asks for where it may: at least the limit that is known, and time for its longest request; as good as
/// unlimited where there is to be no limit.
pub fn requested_timeout(known: Option<Duration>, max_run_time: Option<Duration>) -> Duration {
    const UNLIMITED: Duration = Duration::from_secs(30 * 24 * 3600);
    // A lease ends before the timeout, and a request may wait for its slot.
    let needed = max_run_time.unwrap_or_default().saturating_mul(2);
    known.map_or(UNLIMITED, |known| known.max(needed).min(UNLIMITED))
}

/// How long a reclaim extends the lease of a message received `held` ago, at most `max`. The margin is that of the
/// whole timeout: extending to the very end would leave a payload no time to stop. Close to the end an extension
/// gains nothing.
pub fn extension_length(held: Duration, timeout: Option<Duration>, max: Duration) -> Duration {
    let Some(timeout) = timeout else { return max };
    let margin = margin(timeout);
    let left = timeout.saturating_sub(margin).saturating_sub(held);
    if left < margin { Duration::ZERO } else { left.min(max) }
}

/// How long a poll may wait, at most `max`. A lease counts from when the poll was sent, so a short timeout must not
/// be spent on waiting.
pub fn long_poll_wait(timeout: Option<Duration>, max: Duration) -> Duration {
    timeout.map_or(max, |timeout| max.min(timeout / 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_that_is_extended_again_and_again_ends_a_margin_before_the_timeout() {
        use crate::jitter::Jitter;
        use crate::lease::{Granted, Lease};
        use crate::time::Instant;
        let (max, grace) = (Duration::from_secs(600), Duration::from_secs(10));
        for seconds in [10, 60, 300, 1800, 86_400] {
            let (timeout, mut jitter) = (Duration::from_secs(seconds), Jitter::seeded(seconds));
            let mut lease = Lease::new(Granted { sent_at: Instant::ORIGIN, length: timeout.min(max) }, grace);
            let mut now = lease.reclaim_at(&mut jitter);
            while lease.is_usable(now) {
                let length = extension_length(now.since(Instant::ORIGIN), Some(timeout), max);
                let extended = lease.or_later(Lease::new(Granted { sent_at: now, length }, grace));
                // A reclaim that gains nothing is sent again after a while.
                now = if extended == lease {
                    now.plus(lease.attempt_timeout())
                } else {
                    extended.reclaim_at(&mut jitter)
                };
                lease = extended;
            }
            let (end, last) = (lease.expires_at().since(Instant::ORIGIN), timeout - margin(timeout));
            assert!(end <= last && end >= timeout / 2, "{seconds}: {end:?}");
            assert!(lease.grace() >= grace.min(margin(timeout) / 10), "{seconds}: {:?}", lease.grace());
        }
    }

    #[test]
    fn c2_a_consumer_asks_for_a_timeout_that_its_longest_request_does_not_reach() {
        let (second, day) = (Duration::from_secs(1), Duration::from_secs(24 * 3600));
        assert_eq!(requested_timeout(Some(6 * second), Some(22 * second)), 44 * second);
        assert_eq!(requested_timeout(Some(DEFAULT_TIMEOUT), Some(22 * second)), DEFAULT_TIMEOUT);
        for max_run_time in [22 * second, 3600 * second, day] {
            let asked = requested_timeout(Some(DEFAULT_TIMEOUT), Some(max_run_time));
            assert!(extension_length(max_run_time, Some(asked), day) > Duration::ZERO, "{max_run_time:?}");
        }
        assert_eq!(requested_timeout(None, None), 30 * day);
    }

    #[test]
    fn a_poll_waits_no_longer_than_its_claims_have_time() {
        assert_eq!(long_poll_wait(Some(DEFAULT_TIMEOUT), Duration::from_secs(20)), Duration::from_secs(20));
        assert_eq!(long_poll_wait(Some(Duration::from_secs(4)), Duration::from_secs(20)), Duration::from_secs(1));
        assert_eq!(long_poll_wait(None, Duration::from_secs(20)), Duration::from_secs(20));
    }
}
