//! Derives a lease from RabbitMQ's `consumer_timeout`.
//!
//! RabbitMQ closes the channel and requeues its deliveries when one is not acknowledged within the timeout. Whether
//! the broker reports the timeout of a queue depends on its version and on the queue's type. A known timeout is
//! treated as a lease.

use core::time::Duration;

use super::lease::margin;

/// RabbitMQ's default.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BrokerVersion {
    pub major: u32,
    pub minor: u32,
}

impl BrokerVersion {
    /// Queues accept `x-consumer-timeout` from this version.
    const PER_QUEUE_TIMEOUT: Self = Self { major: 3, minor: 12 };
    /// Classic queues have no consumer timeout from this version.
    const CLASSIC_UNLIMITED: Self = Self { major: 4, minor: 3 };

    pub fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split('.').map(|number| number.parse().ok());
        Some(Self { major: numbers.next()??, minor: numbers.next()?? })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueKind {
    Classic,
    Other,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeoutFacts {
    pub version: BrokerVersion,
    pub kind: QueueKind,
    pub argument: Option<Duration>,
    pub policy: Option<Duration>,
    pub dead_letters: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueTimeout {
    /// The broker's own setting applies, which the management API does not report.
    BrokerDefault,
    Unlimited,
    Limited(Duration),
}

impl TimeoutFacts {
    pub fn timeout(&self) -> QueueTimeout {
        if self.version < BrokerVersion::PER_QUEUE_TIMEOUT {
            return QueueTimeout::BrokerDefault;
        }
        if self.kind == QueueKind::Classic && self.version >= BrokerVersion::CLASSIC_UNLIMITED {
            return QueueTimeout::Unlimited;
        }
        // RabbitMQ applies the shorter of the two.
        let shorter = self.argument.into_iter().chain(self.policy).filter(|span| !span.is_zero()).min();
        shorter.map_or(QueueTimeout::BrokerDefault, QueueTimeout::Limited)
    }
}

impl QueueTimeout {
    /// The timeout of a queue, given the `configured` value of the broker's own setting; `None` is unlimited.
    pub const fn or_configured(self, configured: Option<Duration>) -> Option<Duration> {
        match self {
            Self::BrokerDefault => configured,
            Self::Unlimited => None,
            Self::Limited(span) => Some(span),
        }
    }
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

    const HOUR: Duration = Duration::from_secs(60 * 60);
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    fn told(version: &str, kind: QueueKind, argument: Option<Duration>, policy: Option<Duration>) -> QueueTimeout {
        TimeoutFacts { version: BrokerVersion::parse(version).unwrap(), kind, argument, policy, dead_letters: false }
            .timeout()
    }

    #[test]
    fn a_claim_that_is_extended_as_often_as_can_be_still_ends_a_margin_before_the_patience() {
        use crate::domain::jitter::Jitter;
        use crate::domain::lease::{Lease, Policy};
        use crate::domain::time::Instant;
        let (max, policy) = (Duration::from_secs(600), Policy { termination_grace: Duration::from_secs(10) });
        for seconds in [10, 60, 300, 1800, 86_400] {
            let (timeout, mut jitter) = (Duration::from_secs(seconds), Jitter::seeded(seconds));
            let mut lease = Lease::granted(Instant::ORIGIN, timeout.min(max), policy);
            let mut now = lease.reclaim_at(&mut jitter);
            while lease.is_usable(now) {
                let length = extension_length(now.since(Instant::ORIGIN), Some(timeout), max);
                let extended = lease.or_later(Lease::granted(now, length, policy));
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
            assert!(
                lease.grace() >= policy.termination_grace.min(margin(timeout) / 10),
                "{seconds}: {:?}",
                lease.grace()
            );
        }
    }

    #[test]
    fn a_broker_is_believed_by_its_version() {
        for (version, kind, argument, policy, says) in [
            // This version ignores both.
            ("3.10.8", QueueKind::Other, Some(HOUR), Some(HOUR), QueueTimeout::BrokerDefault),
            ("3.12.0", QueueKind::Classic, None, None, QueueTimeout::BrokerDefault),
            ("3.12.0", QueueKind::Classic, Some(HOUR), None, QueueTimeout::Limited(HOUR)),
            ("3.13.7", QueueKind::Other, Some(DAY), Some(HOUR), QueueTimeout::Limited(HOUR)),
            ("4.2.1", QueueKind::Classic, None, Some(DAY), QueueTimeout::Limited(DAY)),
            ("4.3.0", QueueKind::Classic, Some(HOUR), None, QueueTimeout::Unlimited),
            ("4.3.0", QueueKind::Other, Some(HOUR), None, QueueTimeout::Limited(HOUR)),
            ("4.4.0-beta.1", QueueKind::Other, None, None, QueueTimeout::BrokerDefault),
            ("3.12.0", QueueKind::Other, Some(Duration::ZERO), None, QueueTimeout::BrokerDefault),
        ] {
            assert_eq!(told(version, kind, argument, policy), says, "{version} {kind:?} {argument:?} {policy:?}");
        }
    }

    #[test]
    fn what_a_broker_does_not_say_is_configured() {
        assert_eq!(QueueTimeout::BrokerDefault.or_configured(Some(DEFAULT_TIMEOUT)), Some(DEFAULT_TIMEOUT));
        assert_eq!(
            (
                QueueTimeout::BrokerDefault.or_configured(None),
                QueueTimeout::Unlimited.or_configured(Some(DEFAULT_TIMEOUT))
            ),
            (None, None)
        );
        assert_eq!(QueueTimeout::Limited(HOUR).or_configured(Some(DEFAULT_TIMEOUT)), Some(HOUR));
    }

    #[test]
    fn a_version_that_cannot_be_read_is_none() {
        for odd in ["", "3", "three.ten", "3.x"] {
            assert_eq!(BrokerVersion::parse(odd), None, "{odd}");
        }
    }

    #[test]
    fn a_poll_waits_no_longer_than_its_claims_have_time() {
        assert_eq!(long_poll_wait(Some(DEFAULT_TIMEOUT), Duration::from_secs(20)), Duration::from_secs(20));
        assert_eq!(long_poll_wait(Some(Duration::from_secs(4)), Duration::from_secs(20)), Duration::from_secs(1));
        assert_eq!(long_poll_wait(None, Duration::from_secs(20)), Duration::from_secs(20));
    }
}
