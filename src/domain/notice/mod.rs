//! What the answers of a host's metadata service mean for the worker, and when to ask again.
//!
//! The adapters in `host/notice` make the calls and read the bodies; nothing here knows of HTTP, and nothing here decides
//! what becomes of tasks: that is [`super::worker`].

pub mod aws;
pub mod azure;
pub mod file;
pub mod gcp;

use core::time::Duration;

use super::backoff::{self, Backoff};
use super::jitter::Jitter;
use super::time::Instant;

/// The waits after a look that brought no answer. Short: the service is on the same host, and a notice may be as short as
/// half a minute.
pub const TROUBLE: backoff::Policy = backoff::Policy { first: Duration::from_millis(500), max: Duration::from_secs(5) };
/// After how many looks without an answer it is said that a notice may be missed.
pub const UNWELL_AFTER: u32 = 3;
/// What is left of a notice at the least, whatever it says: somebody is here to read it, so the time it names has not come.
pub const NOTICE_LEAST: Duration = Duration::from_secs(5);
/// Deadlines this close are the same one, read twice.
pub const SAME_NOTICE: Duration = Duration::from_secs(2);
/// The waits between looking for a metadata service. After the last one there is none: the network of a host that has just
/// been started may not be there at first.
pub const PROBE_AGAIN: [Duration; 3] = [Duration::from_secs(2), Duration::from_secs(8), Duration::from_secs(30)];

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
pub enum Goes {
    /// At this time.
    At(Instant),
    /// Before long; nobody says when.
    Soon,
}

/// What a look brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Nothing is planned.
    Nothing,
    /// The host goes.
    Goes(Goes),
    /// The host may have to go before long.
    AtRisk,
    /// No answer, or none that can be read.
    Trouble,
}

/// What is new after an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// The host goes, and that was not known, or goes earlier than was known.
    Goes(Goes),
    /// The host may have to go before long.
    AtRisk,
    /// What was said is not said any more. It is no reason to come back: what was handed back is gone.
    Withdrawn,
    /// Notices may be missed: the service does not answer.
    Unwell,
    /// It answers again.
    Well,
}

/// How often a look is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// From the beginning of a look to that of the next.
    pub every: Duration,
    /// The waits after a look without an answer.
    pub trouble: backoff::Policy,
}

impl Pace {
    /// A look as often as this.
    #[must_use]
    pub const fn every(every: Duration) -> Self {
        Self { every, trouble: TROUBLE }
    }
}

/// One thing that is looked at again and again.
#[derive(Debug, Clone)]
pub struct Watch {
    pace: Pace,
    jitter: Jitter,
    due: Instant,
    trouble: Backoff,
    /// The earliest time that was said.
    at: Option<Instant>,
    soon: bool,
    said: Option<Answer>,
}

impl Watch {
    /// Something that was never looked at.
    #[must_use]
    pub const fn new(pace: Pace, seed: u64) -> Self {
        Self {
            pace,
            jitter: Jitter::seeded(seed),
            due: Instant::ORIGIN,
            trouble: Backoff::NEW,
            at: None,
            soon: false,
            said: None,
        }
    }

    /// When to look next.
    #[must_use]
    pub const fn due(&self) -> Instant {
        self.due
    }

    /// Whether the last look brought no answer.
    #[must_use]
    pub const fn troubled(&self) -> bool {
        self.trouble.tries() > 0
    }

    /// Takes in what a look brought that began at `sent_at`.
    pub fn answered(&mut self, answer: Answer, sent_at: Instant, now: Instant) -> Option<News> {
        if answer == Answer::Trouble {
            self.due = now.plus(self.trouble.wait(self.pace.trouble, None, &mut self.jitter));
            return (self.trouble.tries() == UNWELL_AFTER).then_some(News::Unwell);
        }
        self.due = sent_at.plus(self.pace.every).max(now);
        let was_unwell = self.trouble.tries() >= UNWELL_AFTER;
        self.trouble.reset();
        self.news(answer, now).or_else(|| was_unwell.then_some(News::Well))
    }

    fn news(&mut self, answer: Answer, now: Instant) -> Option<News> {
        let before = self.said.replace(answer);
        match answer {
            Answer::Goes(Goes::At(at)) => {
                let at = at.max(now.plus(NOTICE_LEAST));
                let earlier = self.at.is_none_or(|known| at.plus(SAME_NOTICE) <= known);
                earlier.then(|| {
                    self.at = Some(at);
                    News::Goes(Goes::At(at))
                })
            }
            Answer::Goes(Goes::Soon) => (!core::mem::replace(&mut self.soon, true)).then_some(News::Goes(Goes::Soon)),
            Answer::AtRisk => (before != Some(answer)).then_some(News::AtRisk),
            Answer::Nothing => {
                let said = matches!(before, Some(Answer::Goes(_) | Answer::AtRisk));
                said.then_some(News::Withdrawn)
            }
            Answer::Trouble => None,
        }
    }
}

/// What to do next about a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next<C> {
    /// Make this call.
    Call(C),
    /// Nothing before this time.
    Rest(Instant),
}

/// What came of looking for a metadata service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Probed {
    /// This one is there.
    Found(Provider),
    /// None yet; look again after this time.
    Again(Duration),
    /// None; nobody looks again.
    NoCloud,
}

/// The search for the metadata service of a host whose cloud is not named.
#[derive(Debug, Clone, Default)]
pub struct Search {
    rounds: usize,
}

impl Search {
    /// All services were asked for at once, and these are there. Google and Azure prove who they are; EC2's interface is
    /// imitated by others, so it comes last.
    pub fn probed(&mut self, there: &[Provider]) -> Probed {
        let order = [Provider::Gcp, Provider::Azure, Provider::Aws];
        if let Some(found) = order.into_iter().find(|provider| there.contains(provider)) {
            return Probed::Found(found);
        }
        let again = PROBE_AGAIN.get(self.rounds);
        self.rounds += 1;
        again.map_or(Probed::NoCloud, |wait| Probed::Again(*wait))
    }
}
