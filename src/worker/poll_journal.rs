//! Journals the polls whose answers have not been read, so that the next process can recover what they claimed.

use crate::domain::id::{LocalToken, SourceId};
use crate::domain::journal::{ClaimRecord, EntryId, JournalTimestamp, JournalTiming, UnreadPoll};
use crate::domain::outcome::Outcome;
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;
use crate::domain::unread_polls::SentPoll;
use crate::domain::worker::{Event, RecoveryResult};
use crate::host::clock::{self, Clock};
use crate::host::journal::PendingWrite;
use crate::source::{CallError, RecoveryBatch};

use super::engine::Engine;

pub(super) type JournaledPolls = Vec<(SentPoll, JournalTimestamp)>;

pub(super) fn current_stamp(clock: Clock) -> JournalTimestamp {
    JournalTimestamp { boot: Some(clock.now()), wall: clock::unix_time() }
}

impl Engine {
    /// They are in this process's journal already.
    pub(super) fn restore_polls(&mut self, left: Vec<UnreadPoll>) {
        let now = current_stamp(self.clock);
        for UnreadPoll { claimant, sent_at: sent } in left {
            let source = SourceId(u16::try_from(claimant).unwrap_or(u16::MAX));
            self.handle_event(Event::UnreadPoll { source, age: sent.age_at(now) });
            let told = self.unanswered_polls(source).last().copied();
            if let Some(noted) = self.journaled_polls.get_mut(claimant) {
                noted.extend(told.map(|asked| (asked, sent)));
            }
        }
    }

    fn unanswered_polls(&self, source: SourceId) -> &[SentPoll] {
        let view = self.rules.sources().nth(usize::from(source.0));
        view.map_or(&[], |view| view.poller.unread_polls().polls())
    }

    /// Journals the unread polls of a source if they have changed.
    pub(super) fn journal_polls(&mut self, source: SourceId) -> Option<PendingWrite> {
        let asked = self.unanswered_polls(source).to_vec();
        let (now, index) = (self.clock.now(), usize::from(source.0));
        let noted = self.journaled_polls.get_mut(index)?;
        if noted.iter().map(|(asked, _)| asked).eq(&asked) {
            return None;
        }
        let present = current_stamp(self.clock);
        let stamped = asked.into_iter().map(|asked| {
            let known = noted.iter().find(|(known, _)| *known == asked).map(|(_, stamp)| *stamp);
            (asked, known.unwrap_or_else(|| sent_stamp(present, asked, now)))
        });
        *noted = stamped.collect();
        let claimant = self.claimants.get(index).cloned().unwrap_or_default();
        // Two sources may be one claimant, and the record is per claimant.
        let same = self.claimants.iter().zip(&self.journaled_polls).filter(|(other, _)| **other == claimant);
        let unread = same.flat_map(|(_, stamped)| stamped.iter().map(|(_, stamp)| *stamp)).collect();
        Some(self.journal.record_unread_polls(claimant, unread))
    }

    /// Without waiting: a poll that is not journaled is recovered once more.
    pub(super) fn journal_all_polls(&mut self) {
        for source in 0..self.sources.len() {
            self.journal_polls(SourceId(u16::try_from(source).unwrap_or(u16::MAX)));
        }
    }

    pub(super) fn accept_recovered(
        &mut self,
        source: SourceId,
        sent_at: Instant,
        found: RecoveryBatch,
    ) -> RecoveryResult {
        let missed = found.error.map(|refused| self.log_recovery_refusal(source, refused));
        let claims = found.grants.into_iter().map(|grant| self.accept_grant(source, sent_at, grant)).collect();
        RecoveryResult { claims, error: missed, foreign_claims: found.foreign_claims }
    }

    /// As [`Engine::log_source_refusal`], for a recovery: missing scopes are logged once.
    pub(super) fn log_recovery_refusal(&mut self, source: SourceId, refused: CallError) -> Refusal {
        if refused.refusal == Refusal::Denied && !self.recovery_denied.insert(source) {
            tracing::debug!(source = self.source_name(source), refusal = %refused.refusal, "{}", refused.message);
            return refused.refusal;
        }
        self.log_source_refusal(source, refused)
    }
}

impl Engine {
    pub(super) fn journal_outcome(&self, claim: LocalToken, outcome: Outcome) {
        self.journal_unprepared(claim);
        self.journal.record_outcome(EntryId(claim.0), outcome);
    }

    /// A claim that was never prepared is in no record yet, and its poll counts as read.
    pub(super) fn journal_unprepared(&self, claim: LocalToken) {
        if let Some(live) = self.claims.get(&claim)
            && live.execution.is_none()
            && let (Some(held), Some(feed)) = (&live.claim, self.sources.get(live.source_index))
            && JournalTiming::of(feed.source.capabilities()) == JournalTiming::BeforePrepare
        {
            let claimant = self.claimants.get(live.source_index).cloned().unwrap_or_default();
            self.journal.record_claim_without_processes(
                EntryId(claim.0),
                ClaimRecord { run: held.run().clone(), claimant, processes: None },
            );
        }
    }
}

fn sent_stamp(present: JournalTimestamp, asked: SentPoll, now: Instant) -> JournalTimestamp {
    let ago = asked.age(now);
    JournalTimestamp { boot: present.boot.map(|at| at.minus(ago)), wall: present.wall.saturating_sub(ago) }
}
