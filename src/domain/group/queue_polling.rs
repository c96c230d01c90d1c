//! How often the queue of a group is inspected. Each inspection is a call to the broker: with a thousand idle groups
//! they would be most of a controller's work.

use core::time::Duration;

pub const QUIET_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PollPace {
    /// Requests wait or are held, or there is no worker for new ones.
    Active,
    /// Nothing waits or is held, and workers take new requests, or none are started for them here.
    Quiet,
}

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
