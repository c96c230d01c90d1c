//! Counts database write failures, for logging and backoff. Pure.

use std::time::Duration;

use rusqlite::ErrorCode;

use crate::limits::{QUEUE_RETRY_DELAY_MAX, QUEUE_RETRY_DELAY_MIN};

#[derive(Debug, Default)]
pub(super) struct WriteFailures {
    failures: u32,
}

impl WriteFailures {
    /// Returns whether this is the first failure since the last successful write.
    pub(super) const fn record_failure(&mut self) -> bool {
        self.failures = self.failures.saturating_add(1);
        self.failures == 1
    }

    /// Returns whether there were failures before.
    pub(super) fn record_success(&mut self) -> bool {
        std::mem::take(&mut self.failures) > 0
    }

    pub(super) const fn failures(&self) -> u32 {
        self.failures
    }

    /// Doubles with each failure.
    pub(super) fn backoff(&self) -> Duration {
        let doublings = self.failures.saturating_sub(1).min(16);
        QUEUE_RETRY_DELAY_MIN.saturating_mul(1 << doublings).min(QUEUE_RETRY_DELAY_MAX)
    }
}

/// Corruption and I/O errors stop the queue, because no later result can be trusted. A full disk does not.
pub(super) fn is_fatal(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(
            ErrorCode::SystemIoFailure
                | ErrorCode::DatabaseCorrupt
                | ErrorCode::NotADatabase
                | ErrorCode::CannotOpen
                | ErrorCode::ReadOnly
        )
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_news_once_and_so_is_its_end() {
        let mut health = WriteFailures::default();
        assert!(!health.record_success());
        assert!(health.record_failure());
        assert!(!health.record_failure());
        assert!(health.record_success());
        assert!(!health.record_success());
        assert!(health.record_failure());
    }

    #[test]
    fn the_rest_doubles_up_to_its_limit_and_starts_again() {
        let mut health = WriteFailures::default();
        let rests: Vec<Duration> = (0..100)
            .map(|_| {
                health.record_failure();
                health.backoff()
            })
            .collect();
        assert_eq!(rests[..3], [QUEUE_RETRY_DELAY_MIN, QUEUE_RETRY_DELAY_MIN * 2, QUEUE_RETRY_DELAY_MIN * 4]);
        assert_eq!(rests[99], QUEUE_RETRY_DELAY_MAX);
        health.record_success();
        health.record_failure();
        assert_eq!(health.backoff(), QUEUE_RETRY_DELAY_MIN);
    }
}
