//! Polls that claim and whose answers nobody has read. What a service counts as claimed under this worker's name, and nobody
//! here knows of, is this worker's only if it was claimed while such a poll may have been claiming. Whatever else goes by that
//! name is somebody else's, who lives.

use alloc::vec::Vec;
use core::time::Duration;

use super::time::Instant;

/// How long after it was sent a poll may claim: services hold one for 20 s, and it takes a while to get there. What it claims
/// later still is left to expire.
pub const CLAIMS_FOR: Duration = Duration::from_secs(30);
/// How far apart two clocks may be that were compared a moment ago: services tell the time in whole seconds.
pub const CLOCKS_APART: Duration = Duration::from_secs(2);
/// How many such polls are remembered; what older ones claimed is left to expire.
pub const UNREAD_MAX: usize = 16;

/// Whose poll it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Life {
    This,
    Earlier,
}

/// A poll that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    noted: Instant,
    /// How long before that it was sent.
    before: Duration,
    life: Life,
}

impl Asked {
    /// How long ago it was sent.
    #[must_use]
    pub const fn ago(&self, now: Instant) -> Duration {
        now.since(self.noted).saturating_add(self.before)
    }
}

/// A stretch of the past, by how long ago it began and ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// When it began.
    pub began: Duration,
    /// When it ended; zero where it has not.
    pub ended: Duration,
}

impl Window {
    /// All of the past.
    pub const ALWAYS: Self = Self { began: Duration::MAX, ended: Duration::ZERO };

    /// In which a poll may have claimed that was sent so long ago, as another clock may tell it.
    #[must_use]
    pub const fn of_poll(ago: Duration) -> Self {
        let ended = ago.saturating_sub(CLAIMS_FOR).saturating_sub(CLOCKS_APART);
        Self { began: ago.saturating_add(CLOCKS_APART), ended }
    }

    /// Whether something lies in it that was `ago` when somebody told so, `took` at most after this window was measured.
    #[must_use]
    pub fn holds(&self, ago: Duration, took: Duration) -> bool {
        ago >= self.ended && ago <= self.began.saturating_add(took)
    }
}

/// The polls of one source that nobody has read the answers of, the one under way included.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Unread {
    polls: Vec<Asked>,
}

impl Unread {
    /// None.
    pub const NONE: Self = Self { polls: Vec::new() };

    /// A poll is sent.
    pub fn sent(&mut self, now: Instant) {
        self.push(Asked { noted: now, before: Duration::ZERO, life: Life::This });
    }

    /// An earlier life sent one, so long ago.
    pub fn left(&mut self, now: Instant, ago: Duration) {
        self.push(Asked { noted: now, before: ago, life: Life::Earlier });
    }

    fn push(&mut self, asked: Asked) {
        if self.polls.len() >= UNREAD_MAX {
            self.polls.remove(0);
        }
        self.polls.push(asked);
    }

    /// The answer to the last one was read.
    pub fn read(&mut self) {
        self.polls.pop();
    }

    /// What they claimed is known.
    pub fn accounted(&mut self) {
        self.polls.clear();
    }

    /// Whether any is an earlier life's.
    #[must_use]
    pub fn of_earlier_life(&self) -> bool {
        self.polls.iter().any(|asked| asked.life == Life::Earlier)
    }

    /// Whether what any of them may have claimed may be an earlier life's as well: it was sent too soon after this one began for
    /// two clocks to tell.
    #[must_use]
    pub fn may_be_of_earlier_life(&self, began: Instant) -> bool {
        self.of_earlier_life() || self.polls.iter().any(|asked| asked.noted < began.plus(CLOCKS_APART))
    }

    /// They, the oldest first.
    #[must_use]
    pub fn polls(&self) -> &[Asked] {
        &self.polls
    }

    /// When they may have claimed, seen from now.
    #[must_use]
    pub fn windows(&self, now: Instant) -> Vec<Window> {
        self.polls.iter().map(|asked| Window::of_poll(asked.ago(now))).collect()
    }
}
