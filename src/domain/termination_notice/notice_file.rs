//! Watches the file by which an operator or another provider announces a termination.

use super::{NoticeEvent, NoticeReading, NoticeTracker, PollSchedule, Termination};
use crate::domain::time::Instant;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoticeFileContent {
    Missing,
    Time(Instant),
    /// Terminate at once.
    Empty,
    /// Not a time.
    Invalid,
    Unreadable,
}

#[derive(Debug, Clone)]
pub struct NoticeFile {
    tracker: NoticeTracker,
    was_invalid: bool,
}

impl NoticeFile {
    pub const fn new(pace: PollSchedule, seed: u64) -> Self {
        Self { tracker: NoticeTracker::new(pace, seed), was_invalid: false }
    }

    pub const fn next_at(&self) -> Instant {
        self.tracker.next_at()
    }

    /// A file that is being written may hold half a time; one that is still invalid at the next read means terminate.
    pub fn on_read(&mut self, content: NoticeFileContent, sent_at: Instant, now: Instant) -> Option<NoticeEvent> {
        let odd_before = core::mem::replace(&mut self.was_invalid, content == NoticeFileContent::Invalid);
        let answer = match content {
            NoticeFileContent::Missing => NoticeReading::Nothing,
            NoticeFileContent::Time(at) => NoticeReading::Terminating(Termination::At(at)),
            NoticeFileContent::Empty => NoticeReading::Terminating(Termination::Soon),
            NoticeFileContent::Invalid if odd_before => NoticeReading::Terminating(Termination::Soon),
            NoticeFileContent::Invalid | NoticeFileContent::Unreadable => NoticeReading::Unavailable,
        };
        self.tracker.on_reading(answer, sent_at, now)
    }
}
