//! The watch over the file by which an operator, or a provider nobody knows of, says that the host goes.

use super::{NoticeEvent, NoticeReading, NoticeTracker, PollSchedule, Termination};
use crate::domain::time::Instant;

/// What the notice file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoticeFileContent {
    /// There is no such file.
    Missing,
    /// A time.
    Time(Instant),
    /// Nothing, which is an order to go.
    Empty,
    /// Something that is no time.
    Invalid,
    /// It cannot be read.
    Unreadable,
}

/// The watch over the notice file.
#[derive(Debug, Clone)]
pub struct NoticeFile {
    tracker: NoticeTracker,
    was_invalid: bool,
}

impl NoticeFile {
    /// A file that was never looked at.
    #[must_use]
    pub const fn new(pace: PollSchedule, seed: u64) -> Self {
        Self { tracker: NoticeTracker::new(pace, seed), was_invalid: false }
    }

    /// When to look next.
    #[must_use]
    pub const fn next_at(&self) -> Instant {
        self.tracker.next_at()
    }

    /// Whether it held something at the last look that is no time.
    #[must_use]
    pub const fn was_invalid(&self) -> bool {
        self.was_invalid
    }

    /// What it holds. A file that is being written may hold half a time; one that holds none at the next look is an order to
    /// go all the same.
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
