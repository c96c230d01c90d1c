//! What happened to the worker since its start, for the status.

use std::collections::VecDeque;
use std::sync::Arc;

use journeyman_domain::claim::ClaimEnd;
use journeyman_domain::id::{Run, SourceId};
use journeyman_domain::time::Instant;

use super::counters::{SourceCounts, WorkerCounters};
use super::durations::TaskDurations;
use super::recent_outcomes::{RecentOutcomes, RequestSummary};
use super::status::Note;
use super::storage_health::StorageHealth;
use super::timeline::Timeline;
use journeyman_domain::limits::HISTORY_CLAIMS_MAX;

#[derive(Debug, Default)]
pub(super) struct History {
    pub(super) started_at: Instant,
    pub(super) sources: Vec<SourceActivity>,
    pub(super) recent_outcomes: RecentOutcomes,
    /// The latest last.
    pub(super) ended_claims: VecDeque<EndedClaim>,
    pub(super) requests: RequestSummary,
    /// The operator who gave the last command.
    pub(super) note: Option<Note>,
    pub(super) notice: Option<NoticeReceived>,
    /// Why the work directory counts as lost.
    pub(super) work_dir_lost_reason: Option<String>,
    counters: Arc<WorkerCounters>,
}

#[derive(Debug)]
pub(super) struct EndedClaim {
    pub(super) run: Run,
    pub(super) name: Option<String>,
    pub(super) source: SourceId,
    pub(super) end: ClaimEnd,
    pub(super) reason: Option<String>,
    pub(super) granted_at: Instant,
    pub(super) ended_at: Instant,
    pub(super) timeline: Timeline,
    pub(super) reclaimed_at: VecDeque<Instant>,
}

/// The calls of one source.
#[derive(Debug, Default)]
pub(super) struct SourceActivity {
    pub(super) polled_at: Option<Instant>,
    pub(super) received_at: Option<Instant>,
    pub(super) last_refusal: Option<LastRefusal>,
    /// Missing scopes of recovery were logged.
    pub(super) recovery_denied: bool,
    pub(super) counts: SourceCounts,
    pub(super) durations: TaskDurations,
    pub(super) storage: Arc<StorageHealth>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct NoticeReceived {
    pub(super) at: Instant,
    pub(super) last_ended_at: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct LastRefusal {
    pub(super) at: Instant,
    pub(super) message: String,
    pub(super) consecutive: u32,
}

impl History {
    pub(super) fn new(sources: usize, counters: Arc<WorkerCounters>, now: Instant) -> Self {
        Self {
            started_at: now,
            sources: (0..sources).map(|_| SourceActivity::default()).collect(),
            counters,
            ..Self::default()
        }
    }

    pub(super) fn source(&mut self, source: SourceId) -> &mut SourceActivity {
        &mut self.sources[source.index()]
    }

    pub(super) fn count(&mut self, source: SourceId, count: impl Fn(&mut SourceCounts)) {
        count(&mut self.source(source).counts);
        self.counters.add(|counts| count(&mut counts.sources));
    }

    pub(super) fn on_claim_ended(&mut self, source: SourceId, end: ClaimEnd, now: Instant) {
        self.count(source, |counts| counts.outcomes.count(end));
        if let Some(notice) = &mut self.notice {
            notice.last_ended_at = Some(now);
        }
        self.recent_outcomes.count(now, end);
    }

    pub(super) fn keep_result(&mut self, ended: EndedClaim) {
        if self.ended_claims.len() == HISTORY_CLAIMS_MAX {
            self.ended_claims.pop_front();
        }
        self.ended_claims.push_back(ended);
    }
}

impl SourceActivity {
    pub(super) fn on_poll(&mut self, now: Instant, entries: usize) {
        self.polled_at = Some(now);
        self.last_refusal = None;
        if entries > 0 {
            self.received_at = Some(now);
        }
    }

    pub(super) fn on_refusal(&mut self, now: Instant, text: &str) {
        let consecutive = self.last_refusal.as_ref().map_or(0, |refusal| refusal.consecutive) + 1;
        self.last_refusal = Some(LastRefusal { at: now, message: text.to_owned(), consecutive });
    }
}
