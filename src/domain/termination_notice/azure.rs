//! Watches an Azure VM: its name first, then the events of its whole set.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::time::Duration;

use super::{NextRequest, NoticeEvent, NoticeReading, NoticeTracker, PollSchedule, Termination};
use crate::domain::time::Instant;

/// The shortest notice of an Azure event, used where the event's time cannot be read.
pub const EVENT_NOTICE_MIN: Duration = Duration::from_secs(30);
/// For the first list of events; the first request starts the service.
pub const FIRST_REPLY_TIMEOUT: Duration = Duration::from_secs(130);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AzureRequest {
    /// The name of this VM; events are sent to all VMs of a set.
    Name,
    /// The scheduled events.
    Events(AzureTimeout),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AzureTimeout {
    Default,
    /// [`FIRST_REPLY_TIMEOUT`].
    FirstReply,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmEventKind {
    /// The VM ends, restarts, or moves to another host without its memory.
    Terminates,
    /// The VM is paused for some seconds.
    Freezes,
    /// Unknown.
    Other,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmEvent {
    pub kind: VmEventKind,
    /// The VMs that it applies to.
    pub resources: Vec<Box<str>>,
    pub termination: Termination,
}

#[derive(Debug, Clone)]
pub struct AzureTracker {
    name: Option<Box<str>>,
    name_tracker: NoticeTracker,
    event_tracker: NoticeTracker,
    timeout: AzureTimeout,
    /// The name was read again, and no list of events has confirmed the recovery yet.
    recovery_unreported: bool,
}

impl AzureTracker {
    pub const fn new(pace: PollSchedule, seed: u64) -> Self {
        let (name_tracker, event_tracker) = (NoticeTracker::new(pace, seed), NoticeTracker::new(pace, seed ^ 1));
        Self { name: None, name_tracker, event_tracker, timeout: AzureTimeout::FirstReply, recovery_unreported: false }
    }

    pub fn next_request(&self, now: Instant) -> NextRequest<AzureRequest> {
        let (watch, call) = match self.name {
            None => (&self.name_tracker, AzureRequest::Name),
            Some(_) => (&self.event_tracker, AzureRequest::Events(self.timeout)),
        };
        if now < watch.next_at() { NextRequest::WaitUntil(watch.next_at()) } else { NextRequest::Call(call) }
    }

    pub fn on_name(&mut self, name: Option<&str>, sent_at: Instant, now: Instant) -> Option<NoticeEvent> {
        self.name = name.filter(|name| !name.is_empty()).map(Box::from);
        let answer = if self.name.is_some() { NoticeReading::Nothing } else { NoticeReading::Unavailable };
        let news = self.name_tracker.on_reading(answer, sent_at, now);
        self.recovery_unreported |= news == Some(NoticeEvent::WatchRecovered);
        news.filter(|news| *news != NoticeEvent::WatchRecovered)
    }

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
        // `None` sorts first: an event under way outranks a scheduled one.
        times.min().map_or(NoticeReading::Nothing, |at| {
            NoticeReading::Terminating(at.map_or(Termination::Soon, Termination::At))
        })
    }
}
