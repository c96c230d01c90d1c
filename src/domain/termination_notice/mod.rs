//! What the answers of a host's metadata service mean for the worker, and when to ask again.
//!
//! The adapters in `host/notice` make the calls and read the bodies; nothing here knows of HTTP, and nothing here decides
//! what becomes of tasks: that is [`super::worker`].

pub mod aws;
pub mod azure;
pub mod gcp;
pub mod notice_file;

use core::time::Duration;

use super::backoff::{self, Backoff};
use super::jitter::Jitter;
use super::time::Instant;

/// The waits after a look that brought no answer. Short: the service is on the same host, and a notice may be as short as
/// half a minute.
pub const NOTICE_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_millis(500), max: Duration::from_secs(5) };
/// After how many looks without an answer it is said that a notice may be missed.
pub const FAILURES_BEFORE_WARNING: u32 = 3;
/// What is left of a notice at the least, whatever it says: somebody is here to read it, so the time it names has not come.
pub const NOTICE_MIN: Duration = Duration::from_secs(5);
/// Deadlines this close are the same one, read twice.
pub const SAME_DEADLINE_WITHIN: Duration = Duration::from_secs(2);
/// The waits between looking for a metadata service. After the last one there is none: the network of a host that has just
/// been started may not be there at first.
pub const PROBE_DELAYS: [Duration; 3] = [Duration::from_secs(2), Duration::from_secs(8), Duration::from_secs(30)];

/// Whose metadata service it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Provider {
    /// EC2, its instance metadata service in version 2.
    Aws,
    /// Compute Engine.
    Gcp,
    /// Azure's virtual machines.
    Azure,
}

/// When the host goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Termination {
    /// At this time.
    At(Instant),
    /// Before long; nobody says when.
    Soon,
}

/// What a look brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoticeReading {
    /// Nothing is planned.
    Nothing,
    /// The host goes.
    Terminating(Termination),
    /// The host may have to go before long.
    AtRisk,
    /// No answer, or none that can be read.
    Unavailable,
}

/// What is new after an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoticeEvent {
    /// The host goes, and that was not known, or goes earlier than was known.
    Terminating(Termination),
    /// The host may have to go before long.
    AtRisk,
    /// What was said is not said any more. It is no reason to come back: what was handed back is gone.
    Withdrawn,
    /// Notices may be missed: the service does not answer.
    WatchFailing,
    /// It answers again.
    WatchRecovered,
}

/// How often a look is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PollSchedule {
    /// From the beginning of a look to that of the next.
    pub interval: Duration,
    /// The waits after a look without an answer.
    pub retry: backoff::Policy,
}

impl PollSchedule {
    /// A look as often as this.
    #[must_use]
    pub const fn with_interval(interval: Duration) -> Self {
        Self { interval, retry: NOTICE_RETRY }
    }
}

/// One thing that is looked at again and again.
#[derive(Debug, Clone)]
pub struct NoticeTracker {
    schedule: PollSchedule,
    jitter: Jitter,
    next_at: Instant,
    backoff: Backoff,
    /// The earliest time that was said.
    earliest: Option<Instant>,
    soon_reported: bool,
    last_reading: Option<NoticeReading>,
}

impl NoticeTracker {
    /// Something that was never looked at.
    #[must_use]
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

    /// When to look next.
    #[must_use]
    pub const fn next_at(&self) -> Instant {
        self.next_at
    }

    /// Whether the last look brought no answer.
    #[must_use]
    pub const fn is_failing(&self) -> bool {
        self.backoff.tries() > 0
    }

    /// Takes in what a look brought that began at `sent_at`.
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
            NoticeReading::AtRisk => (before != Some(answer)).then_some(NoticeEvent::AtRisk),
            NoticeReading::Nothing => {
                let said = matches!(before, Some(NoticeReading::Terminating(_) | NoticeReading::AtRisk));
                said.then_some(NoticeEvent::Withdrawn)
            }
            NoticeReading::Unavailable => None,
        }
    }
}

/// What to do next about a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextRequest<C> {
    /// Make this call.
    Call(C),
    /// Nothing before this time.
    WaitUntil(Instant),
}

/// What came of looking for a metadata service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProviderProbe {
    /// This one is there.
    Found(Provider),
    /// None yet; look again after this time.
    RetryAfter(Duration),
    /// None; nobody looks again.
    NotFound,
}

/// The search for the metadata service of a host whose cloud is not named.
#[derive(Debug, Clone, Default)]
pub struct ProviderSearch {
    rounds: usize,
}

impl ProviderSearch {
    /// All services were asked for at once, and these are there. Google and Azure prove who they are; EC2's interface is
    /// imitated by others, so it comes last.
    pub fn on_probed(&mut self, there: &[Provider]) -> ProviderProbe {
        let order = [Provider::Gcp, Provider::Azure, Provider::Aws];
        if let Some(found) = order.into_iter().find(|provider| there.contains(provider)) {
            return ProviderProbe::Found(found);
        }
        let again = PROBE_DELAYS.get(self.rounds);
        self.rounds += 1;
        again.map_or(ProviderProbe::NotFound, |wait| ProviderProbe::RetryAfter(*wait))
    }
}
