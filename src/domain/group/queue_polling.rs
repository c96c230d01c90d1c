//! How often the queue of a group is looked into. Each look is a call to the broker: with a thousand groups that have nothing to
//! do it would be most of what a controller does.

use core::time::Duration;

/// How often, where nothing has to be decided by what is found.
pub const QUIET_INTERVAL: Duration = Duration::from_secs(5);

/// What goes on in a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PollPace {
    /// Requests wait, or are held, or nobody is there who would take one.
    Active,
    /// Nothing waits or is held, and what comes is taken by those who are there, or is nobody's here to start workers for.
    Quiet,
}

/// Whether a queue that was looked into so long ago is looked into again.
#[must_use]
pub fn is_due(last: Option<Duration>, pace: PollPace) -> bool {
    last.is_none_or(|last| pace == PollPace::Active || last >= QUIET_INTERVAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quiet_queue_is_looked_into_at_once_and_then_now_and_then() {
        assert!(is_due(None, PollPace::Quiet));
        assert!(!is_due(Some(QUIET_INTERVAL - Duration::from_millis(1)), PollPace::Quiet));
        assert!(is_due(Some(QUIET_INTERVAL), PollPace::Quiet));
        assert!(is_due(Some(Duration::ZERO), PollPace::Active));
    }
}
