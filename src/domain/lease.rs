//! How long a claim may be trusted.
//!
//! The queue and the worker do not share a clock, so `takenUntil` is never compared with the local time. The length
//! of the lease is counted from when the request *was sent*, on a clock that runs through suspend: the queue cannot
//! have started it earlier. The claim ends a margin before that, and the margin is strictly greater than the clock
//! error plus the time to kill a payload. Equal is not enough; `tests/model` shows both.

use core::time::Duration;

use super::backoff;
use super::jitter::Jitter;
use super::time::Instant;

/// Reclaims that must fit between the first attempt and expiry (I4).
pub const RECLAIM_ATTEMPTS_MIN: u32 = 3;
/// Rate error of the local clock; an undisciplined quartz stays below 100.
pub const CLOCK_DRIFT_PPM: u32 = 500;
/// How late a local timer may fire.
pub const TIMER_LATENESS: Duration = Duration::from_millis(250);
/// The margin of a long lease.
pub const MARGIN_MIN: Duration = Duration::from_secs(30);
/// A handler is dropped, and its processes killed, this long after the payload's grace.
pub const KILL_SLACK: Duration = Duration::from_millis(500);
pub const RECLAIM_TIMEOUT_MAX: Duration = Duration::from_secs(30);

/// What a queue grants with a claim, or with its renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Granted {
    /// The time at which the request was sent, on the worker's clock.
    pub sent_at: Instant,
    /// How long the claim lasts from then on.
    pub length: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lease {
    sent_at: Instant,
    length: Duration,
    grace: Duration,
    margin: Duration,
}

impl Lease {
    pub fn new(granted: Granted, termination_grace: Duration) -> Self {
        let lease = Self::until_kill(granted, termination_grace);
        Self { margin: margin(lease.length).max(lease.margin), ..lease }
    }

    /// A lease whose margin has time for the kill of a payload alone (I2), since its outcome may be reported later.
    pub fn until_kill(granted: Granted, termination_grace: Duration) -> Self {
        let Granted { sent_at, length } = granted;
        let grace = termination_grace.min(length / 10);
        let needed = clock_error(length) + grace + KILL_SLACK.min(length / 40);
        Self { sent_at, length, grace, margin: needed + Duration::from_millis(1) }
    }

    pub const fn length(&self) -> Duration {
        self.length
    }

    /// The earliest time at which the queue may give the run to another worker.
    pub const fn granted_until(&self) -> Instant {
        self.sent_at.plus(self.length)
    }

    /// When the claim is abandoned: nothing is started or reported from then on, and the payload is killed (I1, I2,
    /// I3).
    pub const fn expires_at(&self) -> Instant {
        let abandon_at = self.granted_until().minus(self.margin);
        // A lease shorter than its margin was never usable.
        if abandon_at.since_origin().as_nanos() < self.sent_at.since_origin().as_nanos() {
            self.sent_at
        } else {
            abandon_at
        }
    }

    pub fn is_usable(&self, now: Instant) -> bool {
        now < self.expires_at()
    }

    /// Whether a reclaim that is sent now is answered before the claim is abandoned.
    pub fn has_room(&self, now: Instant) -> bool {
        now.plus(self.attempt_timeout()) < self.expires_at()
    }

    /// The time between SIGTERM and SIGKILL after the claim is lost; at most a tenth of the lease.
    pub const fn grace(&self) -> Duration {
        self.grace
    }

    pub const fn margin(&self) -> Duration {
        self.margin
    }

    pub fn attempt_timeout(&self) -> Duration {
        (self.length / 24).min(RECLAIM_TIMEOUT_MAX)
    }

    pub fn retry_policy(&self) -> backoff::Policy {
        backoff::Policy { first: self.attempt_timeout() / 8, max: self.attempt_timeout() }
    }

    /// Two thirds of the lease, less up to a twentieth of jitter, and early enough for [`RECLAIM_ATTEMPTS_MIN`]
    /// attempts (I4).
    pub fn reclaim_at(&self, jitter: &mut Jitter) -> Instant {
        let two_thirds = self.sent_at.plus(self.length / 3 * 2).minus(jitter.below(self.length / 20));
        let attempts = (self.attempt_timeout() + self.retry_policy().max) * RECLAIM_ATTEMPTS_MIN;
        two_thirds.min(self.expires_at().minus(attempts)).max(self.sent_at)
    }

    /// When an outcome is reported whatever is still to be stored, so that several attempts fit before the lease ends.
    pub fn report_by(&self) -> Instant {
        self.expires_at().minus(self.attempt_timeout() * RECLAIM_ATTEMPTS_MIN)
    }

    /// The later of two leases of the same claim: queues never move `takenUntil` back.
    pub fn or_later(self, extension: Self) -> Self {
        if extension.expires_at() > self.expires_at() { extension } else { self }
    }
}

pub fn margin(length: Duration) -> Duration {
    MARGIN_MIN.max(length / 20).min(length / 4)
}

/// The error of the local clock and timers over `length`.
pub fn clock_error(length: Duration) -> Duration {
    length / 1_000_000 * CLOCK_DRIFT_PPM + TIMER_LATENESS.min(length / 20)
}
