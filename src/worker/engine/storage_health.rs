//! Whether the artifacts of a source's tasks can be stored, as its uploads find.

use parking_lot::Mutex;

use journeyman_domain::limits::STORAGE_WARNING_INTERVAL;
use journeyman_domain::time::Instant;

use super::status::SourceError;
use super::timeline::seconds_between;

#[derive(Debug, Default)]
pub(super) struct StorageHealth(Mutex<Option<Outage>>);

#[derive(Debug)]
struct Outage {
    since: Instant,
    warned_at: Instant,
    failures: u32,
    message: String,
}

impl StorageHealth {
    pub(super) fn on_failure(&self, source: &str, message: &str, now: Instant) {
        let mut outage = self.0.lock();
        let is_new = outage.is_none();
        let new = || Outage { since: now, warned_at: now, failures: 0, message: String::new() };
        let outage = outage.get_or_insert_with(new);
        outage.failures = outage.failures.saturating_add(1);
        message.clone_into(&mut outage.message);
        if is_new || now.since(outage.warned_at) >= STORAGE_WARNING_INTERVAL {
            outage.warned_at = now;
            tracing::warn!(source, failures = outage.failures, "cannot store artifacts, retrying: {message}");
        }
    }

    pub(super) fn on_success(&self, source: &str, now: Instant) {
        if let Some(outage) = self.0.lock().take() {
            let seconds = now.since(outage.since).as_secs();
            tracing::info!(source, failures = outage.failures, "artifacts are stored again, after {seconds} s");
        }
    }

    pub(super) fn error(&self, now: Instant) -> Option<SourceError> {
        let outage = self.0.lock();
        let outage = outage.as_ref()?;
        let (message, seconds_ago) = (outage.message.clone(), seconds_between(outage.since, now));
        Some(SourceError { message, seconds_ago, consecutive: outage.failures })
    }
}
