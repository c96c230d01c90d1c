//! The watch over an Azure VM: its name first, then the list of events of the whole set.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::time::Duration;

use super::{Answer, Goes, News, Next, Pace, Watch};
use crate::domain::time::Instant;

/// The least time between an Azure event and its notice, where the notice's own time cannot be read.
pub const LEAST: Duration = Duration::from_secs(30);
/// How long the first list of Azure's events may take; the service is started by being asked.
pub const FIRST_ANSWER: Duration = Duration::from_secs(130);

/// What Azure's metadata service is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Call {
    /// What this VM is called; events are told to all VMs of a set.
    Name,
    /// What is planned, within this time.
    Events(Patience),
}

/// How long an answer is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// As for any call.
    Usual,
    /// [`FIRST_ANSWER`].
    Long,
}

/// What kind of event is planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The VM ends, is restarted, or moves to another host without its memory.
    Ends,
    /// The VM stands still for some seconds.
    Freezes,
    /// One that nobody has heard of.
    Other,
}

/// An event of Azure's list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scheduled {
    /// What happens.
    pub kind: Kind,
    /// Which VMs it happens to.
    pub resources: Vec<Box<str>>,
    /// When.
    pub goes: Goes,
}

/// The watch over an Azure VM.
#[derive(Debug, Clone)]
pub struct Azure {
    name: Option<Box<str>>,
    named: Watch,
    events: Watch,
    patience: Patience,
    /// The name is told again, and no list of events has come yet.
    well_owed: bool,
}

impl Azure {
    /// A VM that was never asked.
    #[must_use]
    pub const fn new(pace: Pace, seed: u64) -> Self {
        let (named, events) = (Watch::new(pace, seed), Watch::new(pace, seed ^ 1));
        Self { name: None, named, events, patience: Patience::Long, well_owed: false }
    }

    /// What to do next.
    #[must_use]
    pub fn next(&self, now: Instant) -> Next<Call> {
        let (watch, call) = match self.name {
            None => (&self.named, Call::Name),
            Some(_) => (&self.events, Call::Events(self.patience)),
        };
        if now < watch.due() { Next::Rest(watch.due()) } else { Next::Call(call) }
    }

    /// The answer to [`Call::Name`], if there was one.
    pub fn named(&mut self, name: Option<&str>, sent_at: Instant, now: Instant) -> Option<News> {
        self.name = name.filter(|name| !name.is_empty()).map(Box::from);
        let answer = if self.name.is_some() { Answer::Nothing } else { Answer::Trouble };
        let news = self.named.answered(answer, sent_at, now);
        self.well_owed |= news == Some(News::Well);
        news.filter(|news| *news != News::Well)
    }

    /// The answer to [`Call::Events`], if there was one.
    pub fn listed(&mut self, events: Option<&[Scheduled]>, sent_at: Instant, now: Instant) -> Option<News> {
        let answer = events.map_or(Answer::Trouble, |events| self.meant_for_us(events));
        if events.is_some() {
            self.patience = Patience::Usual;
        }
        let news = self.events.answered(answer, sent_at, now);
        let well = answer != Answer::Trouble && core::mem::take(&mut self.well_owed);
        news.or_else(|| well.then_some(News::Well))
    }

    fn meant_for_us(&self, events: &[Scheduled]) -> Answer {
        let ours = |event: &&Scheduled| {
            let name = self.name.as_deref().unwrap_or_default();
            event.kind == Kind::Ends && event.resources.iter().any(|named| named.eq_ignore_ascii_case(name))
        };
        let times = events.iter().filter(ours).map(|event| match event.goes {
            Goes::Soon => None,
            Goes::At(at) => Some(at),
        });
        // `None` is before every time: what has begun outweighs what is to come.
        times.min().map_or(Answer::Nothing, |at| Answer::Goes(at.map_or(Goes::Soon, Goes::At)))
    }
}
