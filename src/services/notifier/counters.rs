//! What this node has counted since it started.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::delivery::AttemptResult;
use super::store::Head;
use journeyman_domain::lane::retry::{HeadVerdict, MessageOutcome};
use journeyman_domain::staged::Stamp;
use journeyman_platform::histogram::Histogram;

/// The upper bounds of the buckets; one without a bound follows.
pub const BOUNDS_SECONDS: [f64; 9] = [0.05, 0.25, 1.0, 5.0, 20.0, 60.0, 600.0, 3_600.0, 86_400.0];

type Durations = Histogram<{ BOUNDS_SECONDS.len() + 1 }>;

#[derive(Default)]
pub(super) struct Counters(Mutex<Counted>);

/// By words of fixed lists; those that were never counted are missing.
#[derive(Debug, Clone, Default)]
pub struct Counted {
    pub deliveries: BTreeMap<&'static str, u64>,
    /// Attempts by whether they have delivered.
    pub attempts: BTreeMap<bool, Durations>,
    pub errors: BTreeMap<&'static str, u64>,
    /// Events by source and result.
    pub intake: BTreeMap<(&'static str, &'static str), u64>,
    pub end_to_end: Durations,
    pub replayed: u64,
    /// The origin of each endpoint that was tried.
    origins: BTreeMap<Arc<str>, Arc<str>>,
    /// The time at which an origin that does not work is probed.
    pub breakers: BTreeMap<Arc<str>, Stamp>,
}

impl Counters {
    pub(super) fn counted(&self) -> Counted {
        self.0.lock().clone()
    }

    /// When the server of an endpoint is probed, of one that does not work.
    pub(super) fn probe_at(&self, endpoint: &str) -> Option<Stamp> {
        let counted = self.0.lock();
        counted.breakers.get(counted.origins.get(endpoint)?).copied()
    }

    /// Events of a source that are stored; `duplicates` were already.
    pub(super) fn on_taken(&self, source: &'static str, accepted: usize, duplicates: usize) {
        let mut counted = self.0.lock();
        *counted.intake.entry((source, "accepted")).or_default() += accepted as u64;
        *counted.intake.entry((source, "duplicate")).or_default() += duplicates as u64;
    }

    /// A call or message of a source.
    pub(super) fn on_refused(&self, source: &'static str) {
        *self.0.lock().intake.entry((source, "refused")).or_default() += 1;
    }

    pub(super) fn on_skipped(&self) {
        let outcome = MessageOutcome::SkippedByOperator.as_str();
        *self.0.lock().deliveries.entry(outcome).or_default() += 1;
    }

    pub(super) fn on_replayed(&self, messages: i64) {
        self.0.lock().replayed += u64::try_from(messages).unwrap_or_default();
    }

    pub(super) fn on_attempt(&self, head: &Head, result: &AttemptResult, verdict: HeadVerdict, now: Stamp) {
        let mut counted = self.0.lock();
        let is_delivered = verdict == HeadVerdict::Ended(MessageOutcome::Delivered);
        counted.attempts.entry(is_delivered).or_default().observe(&BOUNDS_SECONDS, result.took);
        if let HeadVerdict::Ended(outcome) = verdict {
            *counted.deliveries.entry(outcome.as_str()).or_default() += 1;
        }
        match &result.result {
            Ok(_) if is_delivered => {}
            Ok(_) => *counted.errors.entry("status").or_default() += 1,
            Err(error) => *counted.errors.entry(error.class.as_str()).or_default() += 1,
        }
        if is_delivered && !head.is_replay {
            counted.end_to_end.observe(&BOUNDS_SECONDS, now.since(head.occurred_at));
        }
    }

    pub(super) fn on_breaker(&self, endpoint: &Arc<str>, origin: &Arc<str>, probe_at: Option<Stamp>) {
        let mut counted = self.0.lock();
        counted.origins.insert(Arc::clone(endpoint), Arc::clone(origin));
        match probe_at {
            Some(at) => counted.breakers.insert(Arc::clone(origin), at),
            None => counted.breakers.remove(origin),
        };
    }
}
