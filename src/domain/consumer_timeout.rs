//! How long a broker lets a message be worked at, and what follows for one that takes longer.
//!
//! RabbitMQ takes a message back, and closes the channel of all others, when it is not acknowledged in time. How long that is
//! a broker tells of some of its queues and not of others, by its version. What is known of it is a lease like any other.

use core::time::Duration;

use super::lease::margin;

/// What RabbitMQ has where nobody has set it.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// A broker's version, as far as it counts here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BrokerVersion {
    /// The first number.
    pub major: u32,
    /// The second.
    pub minor: u32,
}

impl BrokerVersion {
    /// Queues can have a time of their own from here on.
    const PER_QUEUE_TIMEOUT: Self = Self { major: 3, minor: 12 };
    /// Classic queues have none from here on.
    const CLASSIC_UNLIMITED: Self = Self { major: 4, minor: 3 };

    /// Reads `3.10.8`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split('.').map(|number| number.parse().ok());
        Some(Self { major: numbers.next()??, minor: numbers.next()?? })
    }
}

/// Kinds of queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueKind {
    /// A classic one.
    Classic,
    /// Any other.
    Other,
}

/// What a broker tells of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeoutFacts {
    /// The broker's version.
    pub version: BrokerVersion,
    /// What the queue is.
    pub kind: QueueKind,
    /// The queue's own argument, where it has one.
    pub argument: Option<Duration>,
    /// What the policies say that apply to it, where they do.
    pub policy: Option<Duration>,
    /// Whether what is rejected there goes anywhere.
    pub dead_letters: bool,
}

/// What follows of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueTimeout {
    /// The broker's own setting counts, which it shows to nobody.
    BrokerDefault,
    /// A message may be worked at without end.
    Unlimited,
    /// So long.
    Limited(Duration),
}

impl TimeoutFacts {
    /// How long a message of the queue may be worked at.
    #[must_use]
    pub fn timeout(&self) -> QueueTimeout {
        if self.version < BrokerVersion::PER_QUEUE_TIMEOUT {
            return QueueTimeout::BrokerDefault;
        }
        if self.kind == QueueKind::Classic && self.version >= BrokerVersion::CLASSIC_UNLIMITED {
            return QueueTimeout::Unlimited;
        }
        // Of the two the broker takes the shorter one.
        let shorter = self.argument.into_iter().chain(self.policy).filter(|span| !span.is_zero()).min();
        shorter.map_or(QueueTimeout::BrokerDefault, QueueTimeout::Limited)
    }
}

impl QueueTimeout {
    /// How long a message may be worked at, where `configured` is what an operator says of the broker's own setting; `None` is
    /// without end.
    #[must_use]
    pub const fn or_configured(self, configured: Option<Duration>) -> Option<Duration> {
        match self {
            Self::BrokerDefault => configured,
            Self::Unlimited => None,
            Self::Limited(span) => Some(span),
        }
    }
}

/// How long a claim may be trusted from now on by a reclaim, at most `most`, when its message was received so long ago. It ends
/// with the margin of the whole patience: extended again and again to the very end of that, it would leave a payload no time to
/// end in. Near it nothing is gained any more.
#[must_use]
pub fn extension_length(held: Duration, patience: Option<Duration>, most: Duration) -> Duration {
    let Some(patience) = patience else { return most };
    let margin = margin(patience);
    let left = patience.saturating_sub(margin).saturating_sub(held);
    if left < margin { Duration::ZERO } else { left.min(most) }
}

/// How long a poll may wait, at most `most`: a lease counts from when the poll was sent, and one whose claims have little time
/// must not use that up by waiting for them.
#[must_use]
pub fn long_poll_wait(patience: Option<Duration>, most: Duration) -> Duration {
    patience.map_or(most, |patience| most.min(patience / 4))
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
        let (most, policy) = (Duration::from_secs(600), Policy { termination_grace: Duration::from_secs(10) });
        for seconds in [10, 60, 300, 1800, 86_400] {
            let (patience, mut jitter) = (Duration::from_secs(seconds), Jitter::seeded(seconds));
            let mut lease = Lease::granted(Instant::ORIGIN, patience.min(most), policy);
            let mut now = lease.reclaim_at(&mut jitter);
            while lease.is_usable(now) {
                let length = extension_length(now.since(Instant::ORIGIN), Some(patience), most);
                let extended = lease.or_later(Lease::granted(now, length, policy));
                // Nothing gained is asked again after a while.
                now = if extended == lease {
                    now.plus(lease.attempt_timeout())
                } else {
                    extended.reclaim_at(&mut jitter)
                };
                lease = extended;
            }
            let (end, last) = (lease.expires_at().since(Instant::ORIGIN), patience - margin(patience));
            assert!(end <= last && end >= patience / 2, "{seconds}: {end:?}");
            assert!(
                lease.grace() >= policy.termination_grace.min(margin(patience) / 10),
                "{seconds}: {:?}",
                lease.grace()
            );
        }
    }

    #[test]
    fn a_broker_is_believed_by_its_version() {
        for (version, kind, argument, policy, says) in [
            // It takes both, and heeds neither.
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
