//! What an attempt means for the head of its lane.

use alloc::boxed::Box;
use core::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Control, Reply};
use crate::jitter::Jitter;
use crate::named_enum;
use crate::staged::Stamp;

/// The waits of a lane that keeps its order; the last one is repeated.
pub const ORDERED_WAITS: [Duration; 8] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(15),
    Duration::from_secs(60),
    Duration::from_secs(5 * 60),
    Duration::from_secs(15 * 60),
    Duration::from_secs(30 * 60),
    Duration::from_secs(60 * 60),
];
/// How long the head of a lane is tried.
pub const ORDERED_LASTS: Duration = Duration::from_secs(5 * 24 * 60 * 60);
/// The longest `Retry-After` that is followed.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// What happens to a head that was tried for as long as it may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnExhausted {
    /// It is tried on, and the lane waits for it.
    #[default]
    Block,
    /// It is put aside, and the next one is the head.
    Skip,
    /// The lane stops until an operator resumes it.
    Park,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Not empty.
    pub waits: Box<[Duration]>,
    pub lasts: Duration,
    pub on_exhausted: OnExhausted,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self { waits: Box::new(ORDERED_WAITS), lasts: ORDERED_LASTS, on_exhausted: OnExhausted::default() }
    }
}

/// What is known of the head of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct HeadState {
    /// That have ended.
    pub attempts: u32,
    pub first_attempt_at: Option<Stamp>,
}

named_enum! {
    /// How the delivery of a message has ended.
    #[derive(Hash)]
    pub enum MessageOutcome {
        Delivered = "delivered",
        /// It was tried for as long as it may be.
        Exhausted = "exhausted",
        /// The receiver does not want it.
        AbortedByReceiver = "aborted-by-receiver",
        /// An operator has skipped it, with a reason.
        SkippedByOperator = "skipped-by-operator",
    }
}

/// What happens to the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HeadVerdict {
    /// The next message is the head.
    Ended(MessageOutcome),
    TryAgain {
        at: Stamp,
    },
    Park,
}

impl HeadState {
    /// Counts an attempt that ended `now`.
    pub fn on_reply(&mut self, reply: Reply, policy: &RetryPolicy, now: Stamp, jitter: &mut Jitter) -> HeadVerdict {
        let first = *self.first_attempt_at.get_or_insert(now);
        let wait = policy.wait(self.attempts, jitter);
        self.attempts = self.attempts.saturating_add(1);
        if reply.is_success() {
            return HeadVerdict::Ended(MessageOutcome::Delivered);
        }
        if matches!(reply, Reply::Answered { control: Some(Control::AbortMessage), .. }) {
            return HeadVerdict::Ended(MessageOutcome::AbortedByReceiver);
        }
        let is_exhausted = now.since(first) >= policy.lasts;
        match policy.on_exhausted {
            OnExhausted::Skip if is_exhausted => HeadVerdict::Ended(MessageOutcome::Exhausted),
            OnExhausted::Park if is_exhausted => HeadVerdict::Park,
            OnExhausted::Block | OnExhausted::Skip | OnExhausted::Park => {
                let asked = match reply {
                    Reply::Answered { retry_after, .. } => retry_after.unwrap_or_default().min(RETRY_AFTER_MAX),
                    Reply::Failed(_) => Duration::ZERO,
                };
                HeadVerdict::TryAgain { at: now.plus(wait.max(asked)) }
            }
        }
    }
}

impl RetryPolicy {
    /// After so many earlier attempts, a fifth shorter or longer.
    fn wait(&self, attempts: u32, jitter: &mut Jitter) -> Duration {
        let last = self.waits.len().saturating_sub(1);
        let index = usize::try_from(attempts).unwrap_or(usize::MAX).min(last);
        let wait = self.waits.get(index).copied().unwrap_or(Duration::from_secs(1));
        wait * 4 / 5 + jitter.below(wait * 2 / 5)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::ErrorClass;

    const ERROR: Reply = Reply::Failed(ErrorClass::Connect);

    fn answered(status: u16) -> Reply {
        Reply::Answered { status, retry_after: None, control: None }
    }

    fn at(head: &mut HeadState, reply: Reply, policy: &RetryPolicy, now: i64) -> HeadVerdict {
        head.on_reply(reply, policy, Stamp(now), &mut Jitter::seeded(7))
    }

    #[test]
    fn a_head_waits_longer_each_time_and_a_fifth_more_or_less() {
        let (mut head, policy) = (HeadState::default(), RetryPolicy::default());
        for wait in ORDERED_WAITS.iter().chain(&[ORDERED_WAITS[7]; 3]) {
            let HeadVerdict::TryAgain { at } = at(&mut head, ERROR, &policy, 0) else { panic!("it is tried again") };
            let wait = i64::try_from(wait.as_millis()).unwrap();
            assert!((wait * 4 / 5..=wait * 6 / 5).contains(&at.0), "{at:?} for {wait}");
        }
        assert_eq!(head.attempts, 11);
    }

    #[test]
    fn only_2xx_delivers_and_a_receiver_may_abort_a_message() {
        let policy = RetryPolicy::default();
        for (status, is_delivered) in [(200, true), (204, true), (299, true), (199, false), (302, false), (500, false)]
        {
            let verdict = at(&mut HeadState::default(), answered(status), &policy, 0);
            assert_eq!(verdict == HeadVerdict::Ended(MessageOutcome::Delivered), is_delivered, "{status}");
        }
        let abort = Reply::Answered { status: 500, retry_after: None, control: Some(Control::AbortMessage) };
        let verdict = at(&mut HeadState::default(), abort, &policy, 0);
        assert_eq!(verdict, HeadVerdict::Ended(MessageOutcome::AbortedByReceiver));
    }

    #[test]
    fn retry_after_is_followed_for_a_day_at_most() {
        for (asked, earliest) in [(7_200, 7_200_000), (1_000_000, 86_400_000)] {
            let reply = Reply::Answered { status: 503, retry_after: Some(Duration::from_secs(asked)), control: None };
            let verdict = at(&mut HeadState::default(), reply, &RetryPolicy::default(), 0);
            assert_eq!(verdict, HeadVerdict::TryAgain { at: Stamp(earliest) });
        }
    }

    #[test]
    fn a_head_that_was_tried_for_days_blocks_is_skipped_or_parks_its_lane() {
        let lasts = i64::try_from(ORDERED_LASTS.as_millis()).unwrap();
        for (on_exhausted, verdict) in
            [(OnExhausted::Skip, HeadVerdict::Ended(MessageOutcome::Exhausted)), (OnExhausted::Park, HeadVerdict::Park)]
        {
            let policy = RetryPolicy { on_exhausted, ..RetryPolicy::default() };
            let mut head = HeadState::default();
            assert!(matches!(at(&mut head, ERROR, &policy, 0), HeadVerdict::TryAgain { .. }));
            assert!(matches!(at(&mut head, ERROR, &policy, lasts - 1), HeadVerdict::TryAgain { .. }));
            assert_eq!(at(&mut head, ERROR, &policy, lasts), verdict);
        }
        let mut head = HeadState { attempts: 9, first_attempt_at: Some(Stamp(0)) };
        let verdict = at(&mut head, ERROR, &RetryPolicy::default(), lasts);
        assert!(matches!(verdict, HeadVerdict::TryAgain { .. }), "{verdict:?}");
    }
}
