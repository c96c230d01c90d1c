//! The watch over one value of Google's metadata service, which answers when the value changes.

use core::time::Duration;

use super::{NextRequest, NoticeEvent, NoticeReading, NoticeTracker, PollSchedule, Termination};
use crate::domain::time::Instant;

/// The time between a preemption's notice and the end of the VM, as Google documents it.
pub const PREEMPTION_NOTICE: Duration = Duration::from_secs(30);
/// The same for maintenance that ends the VM. Hosts with GPUs have an hour, which cannot be told from here.
pub const MAINTENANCE_NOTICE: Duration = Duration::from_secs(60);

/// How a value of Google's metadata service is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GcpRequest {
    /// As it is.
    Read,
    /// When it is another than last time.
    WaitForChange,
}

/// What a value of Google's metadata service says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GcpReply {
    /// The VM stays.
    Staying,
    /// The VM goes.
    Terminating,
    /// No answer, or none that can be read.
    Unavailable,
}

/// The watch over one value of Google's metadata service.
#[derive(Debug, Clone)]
pub struct GcpTracker {
    tracker: NoticeTracker,
    /// From the change of the value to the end of the VM.
    notice: Duration,
    /// When the VM was last known to stay.
    last_staying_at: Option<Instant>,
}

impl GcpTracker {
    /// A value that was never asked for.
    #[must_use]
    pub const fn new(pace: PollSchedule, notice: Duration, seed: u64) -> Self {
        Self { tracker: NoticeTracker::new(pace, seed), notice, last_staying_at: None }
    }

    /// What to do next.
    #[must_use]
    pub fn next_request(&self, now: Instant) -> NextRequest<GcpRequest> {
        if now < self.tracker.next_at() {
            NextRequest::WaitUntil(self.tracker.next_at())
        } else if self.last_staying_at.is_some() && !self.tracker.is_failing() {
            NextRequest::Call(GcpRequest::WaitForChange)
        } else {
            NextRequest::Call(GcpRequest::Read)
        }
    }

    /// The answer. A wait that comes back has seen the change; a read may be late by as much as nobody looked, and the first
    /// one by any time.
    pub fn on_reply(
        &mut self,
        call: GcpRequest,
        reply: GcpReply,
        sent_at: Instant,
        now: Instant,
    ) -> Option<NoticeEvent> {
        let answer = match (reply, call, self.last_staying_at) {
            (GcpReply::Unavailable, _, _) => NoticeReading::Unavailable,
            (GcpReply::Staying, _, _) => {
                self.last_staying_at = Some(now);
                NoticeReading::Nothing
            }
            (GcpReply::Terminating, GcpRequest::WaitForChange, _) => {
                NoticeReading::Terminating(Termination::At(now.plus(self.notice)))
            }
            (GcpReply::Terminating, GcpRequest::Read, Some(stayed)) => {
                NoticeReading::Terminating(Termination::At(stayed.plus(self.notice)))
            }
            (GcpReply::Terminating, GcpRequest::Read, None) => NoticeReading::Terminating(Termination::Soon),
        };
        self.tracker.on_reading(answer, sent_at, now)
    }
}
