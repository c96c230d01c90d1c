//! What the engine journals before a call: the oldest poll whose answer was not read, so that the next process can
//! recover what it claimed, and decided outcomes.

use std::time::Duration;

use crate::domain::id::{LocalToken, SourceId};
use crate::domain::journal::{ClaimRecord, EntryId};
use crate::domain::outcome::Outcome;
use crate::domain::poll::UnreadPoll;
use crate::domain::worker::Event;
use crate::host::journal::PendingRecord;

use super::{Engine, open_claim};

impl Engine {
    /// They are in this process's journal already.
    pub(in crate::worker) fn restore_unread_polls(&mut self, sent_at: Vec<Option<Duration>>) {
        for (index, sent_at) in sent_at.into_iter().enumerate() {
            if let Some(sent_at) = sent_at {
                let age = self.clock.unix_time().saturating_sub(sent_at);
                self.handle_event(Event::UnreadPoll { source: SourceId::from_index(index), age });
            }
        }
        self.journaled_polls = self.unread_polls();
    }

    fn unread_polls(&self) -> Vec<Option<UnreadPoll>> {
        self.rules.sources().map(|source| source.poller.unread_poll()).collect()
    }

    /// Journals the oldest unread poll of a source if it has changed.
    pub(in crate::worker) fn journal_unread_poll(&mut self, source: SourceId) -> Option<PendingRecord> {
        let index = source.index();
        let unread = self.rules.source(source).poller.unread_poll();
        if self.journaled_polls[index] == unread {
            return None;
        }
        self.journaled_polls[index] = unread;
        let (now, claimant) = (self.clock.now(), self.claimants[index].clone());
        // Two sources may be one claimant, and the record is per claimant.
        let of_claimant = self.claimants.iter().zip(self.unread_polls()).filter(|(other, _)| **other == claimant);
        let age = of_claimant.filter_map(|(_, poll)| poll).map(|poll| poll.age(now)).max();
        let sent_at = age.map(|age| self.clock.unix_time().saturating_sub(age));
        Some(self.journal.record_unread_poll(claimant, sent_at))
    }

    /// Without waiting: a poll that is not journaled is recovered once more.
    pub(in crate::worker) fn journal_unread_polls(&mut self) {
        for index in 0..self.sources.len() {
            self.journal_unread_poll(SourceId::from_index(index));
        }
    }

    pub(in crate::worker) fn journal_outcome(&mut self, claim: LocalToken, outcome: Outcome) {
        self.journal_unprepared(claim);
        self.journal.record_outcome(EntryId(claim.0), outcome);
    }

    /// A claim that was never prepared is in no record yet, and its poll counts as read.
    pub(in crate::worker) fn journal_unprepared(&mut self, claim: LocalToken) {
        let live = open_claim(&mut self.claims, claim);
        let index = live.source.index();
        if live.execution.is_none() && !live.recovered && !self.sources[index].source.capabilities().connection_scoped {
            let record =
                ClaimRecord { run: live.run.clone(), claimant: self.claimants[index].clone(), processes: None };
            self.journal.record_claim_without_processes(EntryId(claim.0), record);
        }
    }
}
