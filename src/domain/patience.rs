//! How long a broker lets a message be worked at, and what follows for one that takes longer.
//!
//! RabbitMQ takes a message back, and closes the channel of all others, when it is not acknowledged in time. How long that is
//! a broker tells of some of its queues and not of others, by its version. What is known of it is a lease like any other; what
//! has to outlast it is put down here and acknowledged before its answer, where that is wanted.

use core::time::Duration;

use super::lease::margin;

/// What RabbitMQ has where nobody has set it.
pub const USUAL: Duration = Duration::from_secs(30 * 60);

/// A broker's version, as far as it counts here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The first number.
    pub major: u32,
    /// The second.
    pub minor: u32,
}

impl Version {
    /// Queues can have a time of their own from here on.
    const OF_QUEUES: Self = Self { major: 3, minor: 12 };
    /// Classic queues have none from here on.
    const NONE_FOR_CLASSIC: Self = Self { major: 4, minor: 3 };

    /// Reads `3.10.8`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.split('.').map(|number| number.parse().ok());
        Some(Self { major: numbers.next()??, minor: numbers.next()?? })
    }
}

/// Kinds of queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A classic one.
    Classic,
    /// Any other.
    Other,
}

/// What a broker tells of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Told {
    /// The broker's version.
    pub version: Version,
    /// What the queue is.
    pub kind: Kind,
    /// The queue's own argument, where it has one.
    pub argument: Option<Duration>,
    /// What the policies say that apply to it, where they do.
    pub policy: Option<Duration>,
    /// Whether what is rejected there goes anywhere.
    pub dead_letters: bool,
}

/// What follows of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Says {
    /// The broker's own setting counts, which it shows to nobody.
    Nothing,
    /// A message may be worked at without end.
    Never,
    /// So long.
    After(Duration),
}

impl Told {
    /// How long a message of the queue may be worked at.
    #[must_use]
    pub fn says(&self) -> Says {
        if self.version < Version::OF_QUEUES {
            return Says::Nothing;
        }
        if self.kind == Kind::Classic && self.version >= Version::NONE_FOR_CLASSIC {
            return Says::Never;
        }
        // Of the two the broker takes the shorter one.
        let shorter = self.argument.into_iter().chain(self.policy).filter(|span| !span.is_zero()).min();
        shorter.map_or(Says::Nothing, Says::After)
    }
}

impl Says {
    /// How long a message may be worked at, where `configured` is what an operator says of the broker's own setting; `None` is
    /// without end.
    #[must_use]
    pub const fn or(self, configured: Option<Duration>) -> Option<Duration> {
        match self {
            Self::Nothing => configured,
            Self::Never => None,
            Self::After(span) => Some(span),
        }
    }
}

/// Whether a message that was received so long ago is to be put down here now, so that it can be acknowledged: half of the
/// broker's patience is over, and the other half is there for a disk that takes its time.
#[must_use]
pub fn is_keeping_due(held: Duration, patience: Option<Duration>) -> bool {
    patience.is_some_and(|patience| held >= patience / 2)
}

/// How long a claim may be trusted from now on by a reclaim, at most `most`, when its message was received so long ago. It ends
/// with the margin of the whole patience: extended again and again to the very end of that, it would leave a payload no time to
/// end in. Near it nothing is gained any more.
#[must_use]
pub fn extension(held: Duration, patience: Option<Duration>, most: Duration) -> Duration {
    let Some(patience) = patience else { return most };
    let margin = margin(patience);
    let left = patience.saturating_sub(margin).saturating_sub(held);
    if left < margin { Duration::ZERO } else { left.min(most) }
}

/// How long a poll may wait, at most `most`: a lease counts from when the poll was sent, and one whose claims have little time
/// must not use that up by waiting for them.
#[must_use]
pub fn hold(patience: Option<Duration>, most: Duration) -> Duration {
    patience.map_or(most, |patience| most.min(patience / 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(60 * 60);
    const DAY: Duration = Duration::from_secs(24 * 60 * 60);

    fn told(version: &str, kind: Kind, argument: Option<Duration>, policy: Option<Duration>) -> Says {
        Told { version: Version::parse(version).unwrap(), kind, argument, policy, dead_letters: false }.says()
    }

    #[test]
    fn a_claim_that_is_extended_as_often_as_can_be_still_ends_a_margin_before_the_patience() {
        use crate::domain::jitter::Jitter;
        use crate::domain::lease::{Lease, Policy};
        use crate::domain::time::Instant;
        let (most, policy) = (Duration::from_secs(600), Policy { grace: Duration::from_secs(10) });
        for seconds in [10, 60, 300, 1800, 86_400] {
            let (patience, mut jitter) = (Duration::from_secs(seconds), Jitter::seeded(seconds));
            let mut lease = Lease::granted(Instant::ORIGIN, patience.min(most), policy);
            let mut now = lease.reclaim_at(&mut jitter);
            while lease.usable(now) {
                let length = extension(now.since(Instant::ORIGIN), Some(patience), most);
                let extended = lease.or_later(Lease::granted(now, length, policy));
                // Nothing gained is asked again after a while.
                now = if extended == lease { now.plus(lease.attempt()) } else { extended.reclaim_at(&mut jitter) };
                lease = extended;
            }
            let (end, last) = (lease.abandon_at().since(Instant::ORIGIN), patience - margin(patience));
            assert!(end <= last && end >= patience / 2, "{seconds}: {end:?}");
            assert!(lease.grace() >= policy.grace.min(margin(patience) / 10), "{seconds}: {:?}", lease.grace());
        }
    }

    #[test]
    fn a_broker_is_believed_by_its_version() {
        for (version, kind, argument, policy, says) in [
            // It takes both, and heeds neither.
            ("3.10.8", Kind::Other, Some(HOUR), Some(HOUR), Says::Nothing),
            ("3.12.0", Kind::Classic, None, None, Says::Nothing),
            ("3.12.0", Kind::Classic, Some(HOUR), None, Says::After(HOUR)),
            ("3.13.7", Kind::Other, Some(DAY), Some(HOUR), Says::After(HOUR)),
            ("4.2.1", Kind::Classic, None, Some(DAY), Says::After(DAY)),
            ("4.3.0", Kind::Classic, Some(HOUR), None, Says::Never),
            ("4.3.0", Kind::Other, Some(HOUR), None, Says::After(HOUR)),
            ("4.4.0-beta.1", Kind::Other, None, None, Says::Nothing),
            ("3.12.0", Kind::Other, Some(Duration::ZERO), None, Says::Nothing),
        ] {
            assert_eq!(told(version, kind, argument, policy), says, "{version} {kind:?} {argument:?} {policy:?}");
        }
    }

    #[test]
    fn what_a_broker_does_not_say_is_configured() {
        assert_eq!(Says::Nothing.or(Some(USUAL)), Some(USUAL));
        assert_eq!((Says::Nothing.or(None), Says::Never.or(Some(USUAL))), (None, None));
        assert_eq!(Says::After(HOUR).or(Some(USUAL)), Some(HOUR));
    }

    #[test]
    fn a_version_that_cannot_be_read_is_none() {
        for odd in ["", "3", "three.ten", "3.x"] {
            assert_eq!(Version::parse(odd), None, "{odd}");
        }
    }

    #[test]
    fn half_of_the_time_is_left_for_putting_it_down() {
        assert!(!is_keeping_due(USUAL / 2 - Duration::from_millis(1), Some(USUAL)));
        assert!(is_keeping_due(USUAL / 2, Some(USUAL)));
        assert!(!is_keeping_due(DAY, None), "without end nothing is due");
    }

    #[test]
    fn a_poll_waits_no_longer_than_its_claims_have_time() {
        assert_eq!(hold(Some(USUAL), Duration::from_secs(20)), Duration::from_secs(20));
        assert_eq!(hold(Some(Duration::from_secs(4)), Duration::from_secs(20)), Duration::from_secs(1));
        assert_eq!(hold(None, Duration::from_secs(20)), Duration::from_secs(20));
    }
}
