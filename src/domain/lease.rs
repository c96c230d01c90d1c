//! How long a claim may be trusted.
//!
//! The queue and the worker do not share a clock, so the queue's `takenUntil` is never compared with ours. Its length is
//! counted from when the request *was sent*, on a clock that runs through suspend: the queue cannot have started it earlier.
//! Everything of the claim ends a margin before that, and the margin is strictly greater than what our clock may be
//! wrong by plus what killing a payload may take. Equal is not enough; the model in `tests/model` shows both halves.

use core::time::Duration;

use super::backoff;
use super::jitter::Jitter;
use super::time::Instant;

/// Reclaims that must fit between the first attempt and giving up (I4).
pub const RECLAIM_ATTEMPTS_MIN: u32 = 3;
/// Our clock's rate error in parts per million; an undisciplined quartz stays below 100.
pub const CLOCK_DRIFT_PPM: u32 = 500;
/// How late a timer of ours may fire.
pub const TIMER_LATENESS: Duration = Duration::from_millis(250);
/// The margin that a long lease gets.
pub const MARGIN_MIN: Duration = Duration::from_secs(30);
/// How long after a payload's grace its handler is dropped, and what is left goes with it.
pub const KILL_SLACK: Duration = Duration::from_millis(500);
/// The longest a single reclaim may take.
pub const RECLAIM_TIMEOUT_MAX: Duration = Duration::from_secs(30);

/// What the rules of a lease depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// How long a payload may take to end after it was told to, before it is killed.
    pub termination_grace: Duration,
}

/// A lease as the worker trusts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lease {
    sent_at: Instant,
    length: Duration,
    grace: Duration,
    margin: Duration,
}

impl Lease {
    /// The lease that a request sent at `sent_at` was granted.
    #[must_use]
    pub fn granted(sent_at: Instant, length: Duration, policy: Policy) -> Self {
        let grace = policy.termination_grace.min(length / 10);
        let needed = clock_error(length) + grace + KILL_SLACK.min(length / 40);
        let margin = margin(length).max(needed + Duration::from_millis(1));
        Self { sent_at, length, grace, margin }
    }

    /// When the queue may give the run to somebody else, at the earliest.
    #[must_use]
    pub const fn granted_until(&self) -> Instant {
        self.sent_at.plus(self.length)
    }

    /// When the claim is given up: nothing is started or reported from here on, and what runs is killed (I1, I2, I3).
    #[must_use]
    pub const fn expires_at(&self) -> Instant {
        let abandon_at = self.granted_until().minus(self.margin);
        // A lease shorter than its margin was never usable.
        if abandon_at.since_origin().as_nanos() < self.sent_at.since_origin().as_nanos() {
            self.sent_at
        } else {
            abandon_at
        }
    }

    /// Whether the claim may still be acted on.
    #[must_use]
    pub fn is_usable(&self, now: Instant) -> bool {
        now < self.expires_at()
    }

    /// How long a payload has between being told to end and being killed once the claim is lost; at most a tenth of the lease.
    #[must_use]
    pub const fn grace(&self) -> Duration {
        self.grace
    }

    /// The time between giving up and the deadline.
    #[must_use]
    pub const fn margin(&self) -> Duration {
        self.margin
    }

    /// How long one reclaim may take.
    #[must_use]
    pub fn attempt_timeout(&self) -> Duration {
        (self.length / 24).min(RECLAIM_TIMEOUT_MAX)
    }

    /// The waits between reclaims that brought no definite answer.
    #[must_use]
    pub fn retry_policy(&self) -> backoff::Policy {
        backoff::Policy { first: self.attempt_timeout() / 8, max: self.attempt_timeout() }
    }

    /// When to reclaim: at two thirds of the lease, up to a twentieth of it earlier so that many claims made at once do
    /// not come back at once, and early enough for [`RECLAIM_ATTEMPTS_MIN`] attempts (I4).
    pub fn reclaim_at(&self, jitter: &mut Jitter) -> Instant {
        let two_thirds = self.sent_at.plus(self.length / 3 * 2).minus(jitter.below(self.length / 20));
        let attempts = (self.attempt_timeout() + self.retry_policy().max) * RECLAIM_ATTEMPTS_MIN;
        two_thirds.min(self.expires_at().minus(attempts)).max(self.sent_at)
    }

    /// The later of two leases of the same claim: an extension never shortens (queues never move `takenUntil` back).
    #[must_use]
    pub fn or_later(self, extension: Self) -> Self {
        if extension.expires_at() > self.expires_at() { extension } else { self }
    }
}

/// The margin that a lease of this length has at least.
#[must_use]
pub fn margin(length: Duration) -> Duration {
    MARGIN_MIN.max(length / 20).min(length / 4)
}

/// The bound on what our clock and timers may be wrong by over `length`.
#[must_use]
pub fn clock_error(length: Duration) -> Duration {
    length / 1_000_000 * CLOCK_DRIFT_PPM + TIMER_LATENESS.min(length / 20)
}
