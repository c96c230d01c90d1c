//! Watches one value of Google's metadata service with `wait_for_change`.

use core::time::Duration;

use super::{NextRequest, NoticeEvent, NoticeReading, NoticeTracker, PollSchedule, Termination};
use crate::domain::time::Instant;

/// Google's documented time from a preemption notice to the end of the VM.
pub const PREEMPTION_NOTICE: Duration = Duration::from_secs(30);
/// The same for maintenance that ends the VM. Hosts with GPUs get an hour, which cannot be told from here.
pub const MAINTENANCE_NOTICE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GcpRequest {
    Read,
    /// Answered when the value changes.
    WaitForChange,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GcpReply {
    Staying,
    Terminating,
    /// No answer, or an invalid one.
    Unavailable,
}

#[derive(Debug, Clone)]
pub struct GcpTracker {
    tracker: NoticeTracker,
    /// From the change of the value to the end of the VM.
    notice: Duration,
    last_staying_at: Option<Instant>,
}

impl GcpTracker {
    pub const fn new(pace: PollSchedule, notice: Duration, seed: u64) -> Self {
        Self { tracker: NoticeTracker::new(pace, seed), notice, last_staying_at: None }
    }

    pub fn next_request(&self, now: Instant) -> NextRequest<GcpRequest> {
        if now < self.tracker.next_at() {
            NextRequest::WaitUntil(self.tracker.next_at())
        } else if self.last_staying_at.is_some() && !self.tracker.is_failing() {
            NextRequest::Call(GcpRequest::WaitForChange)
        } else {
            NextRequest::Call(GcpRequest::Read)
        }
    }

    /// A wait that returns has seen the change; a read may be late by the time since the last one, and the first read
    /// by any time.
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
