//! Turns the readings of a host's metadata service into termination notices, and schedules the next request.
//!
//! `host/termination_notice` reads the services; [`super::worker`] decides what happens to tasks.

use core::time::Duration;

use super::backoff::{self, Backoff};
use super::jitter::Jitter;
use super::time::Instant;
use crate::named_enum;

/// After a request without an answer. Short: the service is on the same host, and a notice may be only 30 s.
pub const NOTICE_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(500), max: Duration::from_secs(5) };
/// Consecutive unanswered requests before the warning that a notice may be missed.
pub const FAILURES_BEFORE_WARNING: u32 = 3;
/// The shortest time left of a notice: the host is still running, so the time it names has not come.
pub const NOTICE_MIN: Duration = Duration::from_secs(5);
/// Deadlines this close are the same one.
pub const SAME_DEADLINE_WITHIN: Duration = Duration::from_secs(2);

named_enum! {
    #[derive(PartialOrd, Ord)]
    pub enum NoticeOrigin {
        /// EC2, IMDSv2.
        Aws = "aws",
        /// Compute Engine.
        Gcp = "gcp",
        Azure = "azure",
        /// The termination file.
        File = "file",
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Termination {
    At(Instant),
    /// Soon, at an unknown time.
    Soon,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoticeReading {
    Nothing,
    Terminating(Termination),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoticeEvent {
    /// A new notice, or an earlier deadline.
    Terminating(Termination),
    /// The service does not answer, so that notices may be missed.
    WatchFailing,
    WatchRecovered,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PollSchedule {
    /// The time from the start of a request to that of the next.
    pub interval: Duration,
    pub retry: backoff::Policy,
}

impl PollSchedule {
    pub const fn with_interval(interval: Duration) -> Self {
        Self { interval, retry: NOTICE_RETRY }
    }
}

#[derive(Debug, Clone)]
pub struct NoticeTracker {
    schedule: PollSchedule,
    jitter: Jitter,
    next_at: Instant,
    backoff: Backoff,
    /// The earliest deadline.
    earliest: Option<Instant>,
    soon_reported: bool,
}

impl NoticeTracker {
    pub const fn new(schedule: PollSchedule, seed: u64) -> Self {
        Self {
            schedule,
            jitter: Jitter::seeded(seed),
            next_at: Instant::ORIGIN,
            backoff: Backoff::NEW,
            earliest: None,
            soon_reported: false,
        }
    }

    /// The time at which to send the next request.
    pub const fn next_at(&self) -> Instant {
        self.next_at
    }

    /// Applies the reading of a request sent at `sent_at`; `None` without an answer, or with an invalid one.
    pub fn on_reading(
        &mut self,
        reading: Option<NoticeReading>,
        sent_at: Instant,
        now: Instant,
    ) -> Option<NoticeEvent> {
        let Some(reading) = reading else {
            self.next_at = now.plus(self.backoff.wait(self.schedule.retry, None, &mut self.jitter));
            return (self.backoff.tries() == FAILURES_BEFORE_WARNING).then_some(NoticeEvent::WatchFailing);
        };
        self.next_at = sent_at.plus(self.schedule.interval).max(now);
        let was_failing = self.backoff.tries() >= FAILURES_BEFORE_WARNING;
        self.backoff.reset();
        self.event_for(reading, now).or_else(|| was_failing.then_some(NoticeEvent::WatchRecovered))
    }

    fn event_for(&mut self, reading: NoticeReading, now: Instant) -> Option<NoticeEvent> {
        match reading {
            NoticeReading::Terminating(Termination::At(at)) => {
                let at = at.max(now.plus(NOTICE_MIN));
                let earlier = self.earliest.is_none_or(|known| at.plus(SAME_DEADLINE_WITHIN) <= known);
                earlier.then(|| {
                    self.earliest = Some(at);
                    NoticeEvent::Terminating(Termination::At(at))
                })
            }
            NoticeReading::Terminating(Termination::Soon) => (!core::mem::replace(&mut self.soon_reported, true))
                .then_some(NoticeEvent::Terminating(Termination::Soon)),
            // A notice that is withdrawn changes nothing: what was released is gone.
            NoticeReading::Nothing => None,
        }
    }
}
