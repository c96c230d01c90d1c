//! Polls that claim and whose answers nobody has read. What a service counts as claimed under this worker's name, and nobody
//! here knows of, is this worker's only if it was claimed while such a poll may have been claiming. Whatever else goes by that
//! name is somebody else's, who lives.

use alloc::vec::Vec;
use core::time::Duration;

use super::time::Instant;

/// How long after it was sent a poll may claim: services hold one for 20 s, and it takes a while to get there. What it claims
/// later still is left to expire.
pub const POLL_CLAIM_WINDOW: Duration = Duration::from_secs(30);
/// How far apart two clocks may be that were compared a moment ago: services tell the time in whole seconds.
pub const CLOCK_SKEW_MAX: Duration = Duration::from_secs(2);
/// How many such polls are remembered; what older ones claimed is left to expire.
pub const UNREAD_POLLS_MAX: usize = 16;

/// Whose poll it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SentBy {
    ThisProcess,
    PreviousProcess,
}

/// A poll that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SentPoll {
    recorded_at: Instant,
    /// How long before that it was sent.
    age_when_recorded: Duration,
    sent_by: SentBy,
}

impl SentPoll {
    /// How long ago it was sent.
    #[must_use]
    pub const fn age(&self, now: Instant) -> Duration {
        now.since(self.recorded_at).saturating_add(self.age_when_recorded)
    }
}

/// A stretch of the past, by how long ago it began and ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClaimWindow {
    /// When it began.
    pub started_ago: Duration,
    /// When it ended; zero where it has not.
    pub ended_ago: Duration,
}

impl ClaimWindow {
    /// All of the past.
    pub const ALWAYS: Self = Self { started_ago: Duration::MAX, ended_ago: Duration::ZERO };

    /// In which a poll may have claimed that was sent so long ago, as another clock may tell it.
    #[must_use]
    pub const fn for_poll(ago: Duration) -> Self {
        let ended_ago = ago.saturating_sub(POLL_CLAIM_WINDOW).saturating_sub(CLOCK_SKEW_MAX);
        Self { started_ago: ago.saturating_add(CLOCK_SKEW_MAX), ended_ago }
    }

    /// Whether something lies in it that was `ago` when somebody told so, `took` at most after this window was measured.
    #[must_use]
    pub fn contains(&self, ago: Duration, took: Duration) -> bool {
        ago >= self.ended_ago && ago <= self.started_ago.saturating_add(took)
    }
}

/// The polls of one source that nobody has read the answers of, the one under way included.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UnreadPolls {
    polls: Vec<SentPoll>,
}

impl UnreadPolls {
    /// None.
    pub const EMPTY: Self = Self { polls: Vec::new() };

    /// A poll is sent.
    pub fn record_sent(&mut self, now: Instant) {
        self.push(SentPoll { recorded_at: now, age_when_recorded: Duration::ZERO, sent_by: SentBy::ThisProcess });
    }

    /// An earlier life sent one, so long ago.
    pub fn record_previous_process(&mut self, now: Instant, ago: Duration) {
        self.push(SentPoll { recorded_at: now, age_when_recorded: ago, sent_by: SentBy::PreviousProcess });
    }

    fn push(&mut self, asked: SentPoll) {
        if self.polls.len() >= UNREAD_POLLS_MAX {
            self.polls.remove(0);
        }
        self.polls.push(asked);
    }

    /// The answer to the last one was read.
    pub fn record_read(&mut self) {
        self.polls.pop();
    }

    /// What they claimed is known.
    pub fn clear(&mut self) {
        self.polls.clear();
    }

    /// Whether any is an earlier life's.
    #[must_use]
    pub fn any_from_previous_process(&self) -> bool {
        self.polls.iter().any(|asked| asked.sent_by == SentBy::PreviousProcess)
    }

    /// Whether what any of them may have claimed may be an earlier life's as well: it was sent too soon after this one began for
    /// two clocks to tell.
    #[must_use]
    pub fn may_include_previous_process(&self, began: Instant) -> bool {
        self.any_from_previous_process()
            || self.polls.iter().any(|asked| asked.recorded_at < began.plus(CLOCK_SKEW_MAX))
    }

    /// They, the oldest first.
    #[must_use]
    pub fn polls(&self) -> &[SentPoll] {
        &self.polls
    }

    /// When they may have claimed, seen from now.
    #[must_use]
    pub fn windows(&self, now: Instant) -> Vec<ClaimWindow> {
        self.polls.iter().map(|asked| ClaimWindow::for_poll(asked.age(now))).collect()
    }
}
