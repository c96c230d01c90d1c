//! What the engine journals before a call: the oldest unread poll, so that the next process can
//! recover what it claimed, and decided outcomes.

use std::time::Duration;

use journeyman_domain::id::{LocalToken, SourceId};
use journeyman_domain::journal::{ClaimRecord, EntryId, JournalRecord};
use journeyman_domain::outcome::Outcome;
use journeyman_domain::poll::UnreadPoll;
use journeyman_domain::worker::{Event, RecoveredClaim};
use journeyman_platform::host::journal::{FirstRecord, Journal, PendingRecord, ProcessRecorder};
use journeyman_platform::host::worker_id_lock::WorkerIdLock;

use super::super::status::RecoverySummary;
use super::Engine;

/// The journal of this process, and what it continues of a previous one.
pub(in crate::engine) struct ClaimJournal {
    pub(in crate::engine) records: Journal,
    /// The claimant of each source.
    pub(in crate::engine) claimants: Vec<Box<str>>,
    /// The oldest unread poll of each source, as journaled.
    pub(in crate::engine) unread_polls: Vec<Option<UnreadPoll>>,
    pub(in crate::engine) recovery: RecoverySummary,
    /// Outcomes of a previous process; sent to the rules first.
    pub(in crate::engine) recovered_claims: Vec<RecoveredClaim>,
    /// When a previous process sent the oldest unread poll of each source.
    pub(in crate::engine) recovered_polls: Vec<Option<Duration>>,
    pub(in crate::engine) _id_locks: Vec<WorkerIdLock>,
}

impl ClaimJournal {
    pub(super) fn claim_record(&self, source: SourceId, run: journeyman_domain::id::Run) -> ClaimRecord {
        ClaimRecord { run, claimant: self.claimants[source.index()].clone(), processes: None }
    }

    pub(super) fn recorder(&self, entry: EntryId, first: FirstRecord) -> ProcessRecorder {
        ProcessRecorder::new(self.records.clone(), entry, first)
    }
}

impl Engine {
    /// They are in this process's journal already.
    pub(super) fn restore_unread_polls(&mut self) {
        for (index, sent_at) in std::mem::take(&mut self.journal.recovered_polls).into_iter().enumerate() {
            if let Some(sent_at) = sent_at {
                let age = self.config.clock.unix_time().saturating_sub(sent_at);
                self.handle_event(Event::UnreadPoll { source: SourceId::from_index(index), age });
            }
        }
        self.journal.unread_polls = self.unread_polls();
    }

    fn unread_polls(&self) -> Vec<Option<UnreadPoll>> {
        self.rules.sources().iter().map(|source| source.poller.unread_poll()).collect()
    }

    /// Journals the oldest unread poll of a source if it has changed.
    pub(super) fn journal_unread_poll(&mut self, source: SourceId) -> Option<PendingRecord> {
        let index = source.index();
        let unread = self.rules.sources()[index].poller.unread_poll();
        if self.journal.unread_polls[index] == unread {
            return None;
        }
        self.journal.unread_polls[index] = unread;
        let (now, claimant) = (self.now(), self.journal.claimants[index].clone());
        // Two sources may be one claimant, and the record is per claimant.
        let polls = self.journal.claimants.iter().zip(self.unread_polls());
        let of_claimant = polls.filter(|(other, _)| **other == claimant);
        let age = of_claimant.filter_map(|(_, poll)| poll).map(|poll| poll.age(now)).max();
        let sent_at = age.map(|age| self.config.clock.unix_time().saturating_sub(age));
        Some(self.journal.records.record_unread_poll(claimant, sent_at))
    }

    pub(super) fn journal_outcome(&mut self, claim: LocalToken, outcome: Outcome) {
        self.journal_unprepared(claim);
        self.journal.records.record(JournalRecord::OutcomeDecided { entry: EntryId(claim.0), outcome });
    }

    /// A claim that was never prepared is in no record yet, and its poll counts as read.
    pub(super) fn journal_unprepared(&mut self, claim: LocalToken) {
        let live = self.calls.claim(claim);
        let (source, run) = (live.source, live.run.clone());
        if live.task.is_none() && !live.recovered && !self.is_connection_scoped(source) {
            let record = self.journal.claim_record(source, run);
            self.journal.records.record(JournalRecord::Claimed { entry: EntryId(claim.0), claim: record });
        }
    }
}
