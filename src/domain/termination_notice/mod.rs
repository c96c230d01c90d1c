//! Turns the answers of a host's metadata service into termination notices, and schedules the next request.
//!
//! The adapters in `host/notice` send the requests and parse the bodies; [`super::worker`] decides what happens to
//! tasks.

pub mod aws;
pub mod azure;
pub mod gcp;
pub mod notice_file;

use core::time::Duration;

use super::backoff::{self, Backoff};
use super::jitter::Jitter;
use super::time::Instant;

/// After a request without an answer. Short: the service is on the same host, and a notice may be only 30 s.
pub const NOTICE_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(500), max: Duration::from_secs(5) };
/// Consecutive unanswered requests before the warning that a notice may be missed.
pub const FAILURES_BEFORE_WARNING: u32 = 3;
/// The shortest time left of a notice: the host is still running, so the time it names has not come.
pub const NOTICE_MIN: Duration = Duration::from_secs(5);
/// Deadlines this close are the same one.
pub const SAME_DEADLINE_WITHIN: Duration = Duration::from_secs(2);
/// Between probes for a metadata service; the network of a freshly started host may not be up at first.
pub const PROBE_DELAYS: [Duration; 3] = [Duration::from_secs(2), Duration::from_secs(8), Duration::from_secs(30)];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum NoticeOrigin {
    /// EC2, IMDSv2.
    Aws,
    /// Compute Engine.
    Gcp,
    Azure,
    /// The termination file.
    File,
}

impl NoticeOrigin {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Aws => "aws",
            Self::Gcp => "gcp",
            Self::Azure => "azure",
            Self::File => "file",
        }
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
    /// No answer, or an invalid one.
    Unavailable,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoticeEvent {
    /// A new notice, or an earlier deadline.
    Terminating(Termination),
    /// The notice was withdrawn. The worker still exits: what was released is gone.
    Withdrawn,
    /// The service does not answer, so that notices may be missed.
    WatchFailing,
    WatchRecovered,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PollSchedule {
    /// From the start of a request to that of the next.
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
    last_reading: Option<NoticeReading>,
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
            last_reading: None,
        }
    }

    /// When to send the next request.
    pub const fn next_at(&self) -> Instant {
        self.next_at
    }

    pub const fn is_failing(&self) -> bool {
        self.backoff.tries() > 0
    }

    /// Applies the reading of a request sent at `sent_at`.
    pub fn on_reading(&mut self, answer: NoticeReading, sent_at: Instant, now: Instant) -> Option<NoticeEvent> {
        if answer == NoticeReading::Unavailable {
            self.next_at = now.plus(self.backoff.wait(self.schedule.retry, None, &mut self.jitter));
            return (self.backoff.tries() == FAILURES_BEFORE_WARNING).then_some(NoticeEvent::WatchFailing);
        }
        self.next_at = sent_at.plus(self.schedule.interval).max(now);
        let was_unwell = self.backoff.tries() >= FAILURES_BEFORE_WARNING;
        self.backoff.reset();
        self.event_for(answer, now).or_else(|| was_unwell.then_some(NoticeEvent::WatchRecovered))
    }

    fn event_for(&mut self, answer: NoticeReading, now: Instant) -> Option<NoticeEvent> {
        let before = self.last_reading.replace(answer);
        match answer {
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
            NoticeReading::Nothing => {
                matches!(before, Some(NoticeReading::Terminating(_))).then_some(NoticeEvent::Withdrawn)
            }
            NoticeReading::Unavailable => None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextRequest<C> {
    Call(C),
    WaitUntil(Instant),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProviderProbe {
    Found(NoticeOrigin),
    RetryAfter(Duration),
    NotFound,
}

#[derive(Debug, Clone, Default)]
pub struct ProviderSearch {
    rounds: usize,
}

impl ProviderSearch {
    /// The providers that answered. Google and Azure identify themselves; other clouds imitate EC2's interface, so it
    /// comes last.
    pub fn on_probed(&mut self, there: &[NoticeOrigin]) -> ProviderProbe {
        let order = [NoticeOrigin::Gcp, NoticeOrigin::Azure, NoticeOrigin::Aws];
        if let Some(found) = order.into_iter().find(|provider| there.contains(provider)) {
            return ProviderProbe::Found(found);
        }
        let again = PROBE_DELAYS.get(self.rounds);
        self.rounds += 1;
        again.map_or(ProviderProbe::NotFound, |wait| ProviderProbe::RetryAfter(*wait))
    }
}
