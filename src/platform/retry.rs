//! Waits between attempts, and the loop around sessions that end when their connection is lost.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use journeyman_domain::backoff::{Backoff, Policy};
use journeyman_domain::jitter::Jitter;
use journeyman_domain::poll::POLL_RETRY;

/// Growing waits with jitter, so that what failed at the same moment is not retried at the same moment.
pub struct Retry {
    policy: Policy,
    backoff: Backoff,
    jitter: Jitter,
    last_reason: String,
}

impl Retry {
    pub fn new(policy: Policy) -> Self {
        let jitter = Jitter::seeded(uuid::Uuid::new_v4().as_u64_pair().0);
        Self { policy, backoff: Backoff::NEW, jitter, last_reason: String::new() }
    }

    /// Failures since the last success.
    pub const fn failures(&self) -> u32 {
        self.backoff.tries()
    }

    pub fn on_success(&mut self) {
        self.backoff.reset();
        self.last_reason.clear();
    }

    /// The next wait, at least as long as the service asked for within reason.
    pub fn next_wait(&mut self, asked: Option<Duration>) -> Duration {
        self.backoff.wait(self.policy, asked, &mut self.jitter)
    }

    /// Logs a failure, loudly only if its reason is new. Returns the next wait.
    pub fn on_failure(&mut self, what: &str, reason: String) -> Duration {
        let wait = self.next_wait(None);
        if self.last_reason == reason {
            tracing::debug!("{what}: {reason} (retrying in {wait:.1?})");
        } else {
            tracing::warn!("{what}: {reason} (retrying in {wait:.1?})");
            self.last_reason = reason;
        }
        wait
    }
}

/// Repeats a session until one ends without an error, or `stop` comes while it waits. `what` says what an error prevents.
pub async fn retry_sessions(
    what: &str,
    stop: &CancellationToken,
    mut session: impl AsyncFnMut() -> Result<(), String>,
) {
    let mut retry = Retry::new(POLL_RETRY);
    loop {
        let began = Instant::now();
        let Err(reason) = session().await else { return };
        // A connection alone proves nothing: what the session does may fail each time.
        if began.elapsed() > POLL_RETRY.max {
            retry.on_success();
        }
        let wait = retry.on_failure(what, reason);
        if stop.run_until_cancelled(sleep(wait)).await.is_none() {
            return;
        }
    }
}
