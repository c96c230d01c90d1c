//! Claiming polls whose answers have not been read. A claim under this worker's id that no record has is this
//! worker's only if it was made while such a poll was open. Any other belongs to another worker with the same id.

use alloc::vec::Vec;
use core::time::Duration;

use super::time::Instant;

/// How long after sending a poll may claim: services hold one for 20 s, plus transport. Later claims are left to
/// expire.
pub const POLL_CLAIM_WINDOW: Duration = Duration::from_secs(30);
/// Tolerated difference of two clocks; services report whole seconds.
pub const CLOCK_SKEW_MAX: Duration = Duration::from_secs(2);
/// Older ones are dropped; their claims are left to expire.
pub const UNREAD_POLLS_MAX: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SentBy {
    ThisProcess,
    PreviousProcess,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SentPoll {
    recorded_at: Instant,
    age_when_recorded: Duration,
    sent_by: SentBy,
}

impl SentPoll {
    #[must_use]
    pub const fn age(&self, now: Instant) -> Duration {
        now.since(self.recorded_at).saturating_add(self.age_when_recorded)
    }
}

/// An interval of the past, as ages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClaimWindow {
    pub started_ago: Duration,
    /// Zero if it has not ended.
    pub ended_ago: Duration,
}

impl ClaimWindow {
    pub const ALWAYS: Self = Self { started_ago: Duration::MAX, ended_ago: Duration::ZERO };

    /// The interval in which a poll of this age may have claimed, by another clock.
    #[must_use]
    pub const fn for_poll(ago: Duration) -> Self {
        let ended_ago = ago.saturating_sub(POLL_CLAIM_WINDOW).saturating_sub(CLOCK_SKEW_MAX);
        Self { started_ago: ago.saturating_add(CLOCK_SKEW_MAX), ended_ago }
    }

    /// Whether an event of age `ago` lies in it, if that was measured at most `took` after the window.
    #[must_use]
    pub fn contains(&self, ago: Duration, took: Duration) -> bool {
        ago >= self.ended_ago && ago <= self.started_ago.saturating_add(took)
    }
}

/// The unread polls of one source, the poll in flight included.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UnreadPolls {
    polls: Vec<SentPoll>,
}

impl UnreadPolls {
    pub const EMPTY: Self = Self { polls: Vec::new() };

    pub fn record_sent(&mut self, now: Instant) {
        self.push(SentPoll { recorded_at: now, age_when_recorded: Duration::ZERO, sent_by: SentBy::ThisProcess });
    }

    pub fn record_previous_process(&mut self, now: Instant, ago: Duration) {
        self.push(SentPoll { recorded_at: now, age_when_recorded: ago, sent_by: SentBy::PreviousProcess });
    }

    fn push(&mut self, asked: SentPoll) {
        if self.polls.len() >= UNREAD_POLLS_MAX {
            self.polls.remove(0);
        }
        self.polls.push(asked);
    }

    pub fn record_read(&mut self) {
        self.polls.pop();
    }

    pub fn clear(&mut self) {
        self.polls.clear();
    }

    #[must_use]
    pub fn any_from_previous_process(&self) -> bool {
        self.polls.iter().any(|asked| asked.sent_by == SentBy::PreviousProcess)
    }

    /// Whether a claim of any of them may be a previous process's: it was sent too soon after the start for two
    /// clocks to tell.
    #[must_use]
    pub fn may_include_previous_process(&self, began: Instant) -> bool {
        self.any_from_previous_process()
            || self.polls.iter().any(|asked| asked.recorded_at < began.plus(CLOCK_SKEW_MAX))
    }

    /// Oldest first.
    #[must_use]
    pub fn polls(&self) -> &[SentPoll] {
        &self.polls
    }

    #[must_use]
    pub fn windows(&self, now: Instant) -> Vec<ClaimWindow> {
        self.polls.iter().map(|asked| ClaimWindow::for_poll(asked.age(now))).collect()
    }
}
