//! The watch over the file by which an operator, or a provider nobody knows of, says that the host goes.

use super::{Answer, Goes, News, Pace, Watch};
use crate::domain::time::Instant;

/// What the notice file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// There is no such file.
    Missing,
    /// A time.
    Time(Instant),
    /// Nothing, which is an order to go.
    Empty,
    /// Something that is no time.
    Odd,
    /// It cannot be read.
    Unreadable,
}

/// The watch over the notice file.
#[derive(Debug, Clone)]
pub struct NoticeFile {
    watch: Watch,
    odd: bool,
}

impl NoticeFile {
    /// A file that was never looked at.
    #[must_use]
    pub const fn new(pace: Pace, seed: u64) -> Self {
        Self { watch: Watch::new(pace, seed), odd: false }
    }

    /// When to look next.
    #[must_use]
    pub const fn due(&self) -> Instant {
        self.watch.due()
    }

    /// Whether it held something at the last look that is no time.
    #[must_use]
    pub const fn odd(&self) -> bool {
        self.odd
    }

    /// What it holds. A file that is being written may hold half a time; one that holds none at the next look is an order to
    /// go all the same.
    pub fn read(&mut self, content: Content, sent_at: Instant, now: Instant) -> Option<News> {
        let odd_before = core::mem::replace(&mut self.odd, content == Content::Odd);
        let answer = match content {
            Content::Missing => Answer::Nothing,
            Content::Time(at) => Answer::Goes(Goes::At(at)),
            Content::Empty => Answer::Goes(Goes::Soon),
            Content::Odd if odd_before => Answer::Goes(Goes::Soon),
            Content::Odd | Content::Unreadable => Answer::Trouble,
        };
        self.watch.answered(answer, sent_at, now)
    }
}
