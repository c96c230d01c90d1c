//! The watch over an Azure VM: its name first, then the list of events of the whole set.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::time::Duration;

use super::{NextRequest, NoticeEvent, NoticeReading, NoticeTracker, PollSchedule, Termination};
use crate::domain::time::Instant;

/// The least time between an Azure event and its notice, where the notice's own time cannot be read.
pub const EVENT_NOTICE_MIN: Duration = Duration::from_secs(30);
/// How long the first list of Azure's events may take; the service is started by being asked.
pub const FIRST_REPLY_TIMEOUT: Duration = Duration::from_secs(130);

/// What Azure's metadata service is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AzureRequest {
    /// What this VM is called; events are told to all VMs of a set.
    Name,
    /// What is planned, within this time.
    Events(AzureTimeout),
}

/// How long an answer is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AzureTimeout {
    /// As for any call.
    Default,
    /// [`FIRST_REPLY_TIMEOUT`].
    FirstReply,
}

/// What kind of event is planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmEventKind {
    /// The VM ends, is restarted, or moves to another host without its memory.
    Terminates,
    /// The VM stands still for some seconds.
    Freezes,
    /// One that nobody has heard of.
    Other,
}

/// An event of Azure's list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmEvent {
    /// What happens.
    pub kind: VmEventKind,
    /// Which VMs it happens to.
    pub resources: Vec<Box<str>>,
    /// When.
    pub termination: Termination,
}

/// The watch over an Azure VM.
#[derive(Debug, Clone)]
pub struct AzureTracker {
    name: Option<Box<str>>,
    name_tracker: NoticeTracker,
    event_tracker: NoticeTracker,
    timeout: AzureTimeout,
    /// The name is told again, and no list of events has come yet.
    recovery_unreported: bool,
}

impl AzureTracker {
    /// A VM that was never asked.
    #[must_use]
    pub const fn new(pace: PollSchedule, seed: u64) -> Self {
        let (name_tracker, event_tracker) = (NoticeTracker::new(pace, seed), NoticeTracker::new(pace, seed ^ 1));
        Self { name: None, name_tracker, event_tracker, timeout: AzureTimeout::FirstReply, recovery_unreported: false }
    }

    /// What to do next.
    #[must_use]
    pub fn next_request(&self, now: Instant) -> NextRequest<AzureRequest> {
        let (watch, call) = match self.name {
            None => (&self.name_tracker, AzureRequest::Name),
            Some(_) => (&self.event_tracker, AzureRequest::Events(self.timeout)),
        };
        if now < watch.next_at() { NextRequest::WaitUntil(watch.next_at()) } else { NextRequest::Call(call) }
    }

    /// The answer to [`AzureRequest::Name`], if there was one.
    pub fn on_name(&mut self, name: Option<&str>, sent_at: Instant, now: Instant) -> Option<NoticeEvent> {
        self.name = name.filter(|name| !name.is_empty()).map(Box::from);
        let answer = if self.name.is_some() { NoticeReading::Nothing } else { NoticeReading::Unavailable };
        let news = self.name_tracker.on_reading(answer, sent_at, now);
        self.recovery_unreported |= news == Some(NoticeEvent::WatchRecovered);
        news.filter(|news| *news != NoticeEvent::WatchRecovered)
    }

    /// The answer to [`AzureRequest::Events`], if there was one.
    pub fn on_events(&mut self, events: Option<&[VmEvent]>, sent_at: Instant, now: Instant) -> Option<NoticeEvent> {
        let answer = events.map_or(NoticeReading::Unavailable, |events| self.reading_for_this_vm(events));
        if events.is_some() {
            self.timeout = AzureTimeout::Default;
        }
        let news = self.event_tracker.on_reading(answer, sent_at, now);
        let well = answer != NoticeReading::Unavailable && core::mem::take(&mut self.recovery_unreported);
        news.or_else(|| well.then_some(NoticeEvent::WatchRecovered))
    }

    fn reading_for_this_vm(&self, events: &[VmEvent]) -> NoticeReading {
        let ours = |event: &&VmEvent| {
            let name = self.name.as_deref().unwrap_or_default();
            event.kind == VmEventKind::Terminates
                && event.resources.iter().any(|named| named.eq_ignore_ascii_case(name))
        };
        let times = events.iter().filter(ours).map(|event| match event.termination {
            Termination::Soon => None,
            Termination::At(at) => Some(at),
        });
        // `None` is before every time: what has begun outweighs what is to come.
        times.min().map_or(NoticeReading::Nothing, |at| {
            NoticeReading::Terminating(at.map_or(Termination::Soon, Termination::At))
        })
    }
}
