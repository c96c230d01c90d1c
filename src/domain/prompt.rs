//! Whether what ran a payload may begin its report itself, before the rules have asked for it.
//!
//! Only that a payload was completed is reported so: of a claim that ends with its worker, so that no later life would repeat
//! the report; where nothing has to be stored first; and while the claim may still be acted on (I1), told by nobody to end.

use super::outcome::{Cleanup, Outcome, Verdict};
use super::poll::Capabilities;
use super::time::Instant;

/// What a payload has left to be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// Neither a log nor an artifact.
    Nothing,
    /// One of them.
    Something,
}

/// Whether somebody wants the claim to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Orders {
    /// Nobody has said so.
    None,
    /// It was told to end.
    ToEnd,
}

/// How a payload ended, as whoever ran it knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AtEnd {
    /// What its handler says.
    pub verdict: Verdict,
    /// Whether anything of it may be left.
    pub emptiness: Cleanup,
    /// What it has left to be stored.
    pub left: Left,
    /// Whether it was told to end.
    pub orders: Orders,
    /// Until when the claim may be acted on, as far as is known.
    pub usable_until: Instant,
}

/// Whether reports of claims of such a source may be begun so at all.
#[must_use]
pub const fn may_be_prompt(manner: Capabilities) -> bool {
    manner.connection_scoped
}

impl AtEnd {
    /// What is reported at once; `None` where the rules are asked first.
    #[must_use]
    pub fn reported_at_once(self, now: Instant) -> Option<Outcome> {
        let Self { verdict, emptiness, left, orders, usable_until } = self;
        let clear = verdict == Verdict::Completed && emptiness == Cleanup::Complete;
        let ours = orders == Orders::None && now < usable_until;
        (clear && ours && left == Left::Nothing).then_some(Outcome::Completed)
    }
}
