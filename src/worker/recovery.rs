//! Claims that the queue counts as this worker's and that nobody here knows of: which polls may have made them is written down
//! while nobody has read their answers, so that the next life knows it as well.

use crate::domain::id::{SourceId, Token};
use crate::domain::journal::{EntryId, Held, Keeping, PollLeft, Stamp};
use crate::domain::outcome::Outcome;
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;
use crate::domain::unread::Asked;
use crate::domain::worker::{Event, Found};
use crate::host::clock::{self, Clock};
use crate::host::journal::Noted;
use crate::source::{Recovered, Refused};

use super::engine::Engine;

/// The polls of one source as the journal has them.
pub(super) type Stamped = Vec<(Asked, Stamp)>;

/// The present, as another life can tell it.
pub(super) fn stamp(clock: Clock) -> Stamp {
    Stamp { boot: Some(clock.now()), wall: clock::wall() }
}

impl Engine {
    /// Tells the rules of the polls that an earlier life has left. They are in the journal of this one already.
    pub(super) fn tell_polls_left(&mut self, left: Vec<PollLeft>) {
        let now = stamp(self.clock);
        for PollLeft { claimant, sent } in left {
            let source = SourceId(u16::try_from(claimant).unwrap_or(u16::MAX));
            self.happened(Event::PollLeft { source, ago: sent.ago(now) });
            let told = self.unread(source).last().copied();
            if let Some(noted) = self.stamped.get_mut(claimant) {
                noted.extend(told.map(|asked| (asked, sent)));
            }
        }
    }

    fn unread(&self, source: SourceId) -> &[Asked] {
        let view = self.rules.sources().nth(usize::from(source.0));
        view.map_or(&[], |view| view.poller.unread().polls())
    }

    /// Writes down which polls of a source nobody has read the answers of, where that has changed.
    pub(super) fn note_polls(&mut self, source: SourceId) -> Option<Noted> {
        let asked = self.unread(source).to_vec();
        let (now, index) = (self.clock.now(), usize::from(source.0));
        let noted = self.stamped.get_mut(index)?;
        if noted.iter().map(|(asked, _)| asked).eq(&asked) {
            return None;
        }
        let present = stamp(self.clock);
        let stamped = asked.into_iter().map(|asked| {
            let known = noted.iter().find(|(known, _)| *known == asked).map(|(_, stamp)| *stamp);
            (asked, known.unwrap_or_else(|| before(present, asked, now)))
        });
        *noted = stamped.collect();
        let claimant = self.claimants.get(index).cloned().unwrap_or_default();
        // Two sources may be one claimant, and the record is of the claimant.
        let same = self.claimants.iter().zip(&self.stamped).filter(|(other, _)| **other == claimant);
        let unread = same.flat_map(|(_, stamped)| stamped.iter().map(|(_, stamp)| *stamp)).collect();
        Some(self.journal.polls(claimant, unread))
    }

    /// The same of every source. Nobody waits for it: what is not written is asked for once more.
    pub(super) fn note_all_polls(&mut self) {
        for source in 0..self.feeds.len() {
            self.note_polls(SourceId(u16::try_from(source).unwrap_or(u16::MAX)));
        }
    }

    /// What a recovery brought.
    pub(super) fn found(&mut self, source: SourceId, sent_at: Instant, found: Recovered) -> Found {
        let missed = found.missed.map(|refused| self.recovery_refusal(source, refused));
        let claims = found.grants.into_iter().map(|grant| self.bring(source, sent_at, grant)).collect();
        Found { claims, missed, others: found.others }
    }

    /// As [`Engine::refusal`], of a recovery: scopes that are missing are missing all day, and are said once.
    pub(super) fn recovery_refusal(&mut self, source: SourceId, refused: Refused) -> Refusal {
        if refused.refusal == Refusal::Denied && !self.unrecovered.insert(source) {
            tracing::debug!(source = self.source_name(source), next = %refused.refusal, "{}", refused.what);
            return refused.refusal;
        }
        self.refusal(source, refused)
    }
}

impl Engine {
    /// Writes down what is about to be reported.
    pub(super) fn note_decided(&self, claim: Token, outcome: Outcome) {
        self.note_unprepared(claim);
        self.journal.decided(EntryId(claim.0), outcome);
    }

    /// A claim that was never prepared is in no record yet, and the poll that brought it is not waited for any more.
    pub(super) fn note_unprepared(&self, claim: Token) {
        if let Some(live) = self.live.get(&claim)
            && live.job.is_none()
            && let (Some(held), Some(feed)) = (&live.claim, self.feeds.get(live.feed))
            && Keeping::of(feed.source.manner()) == Keeping::AtOnce
        {
            let claimant = self.claimants.get(live.feed).cloned().unwrap_or_default();
            self.journal.hold_idle(EntryId(claim.0), Held { run: held.run().clone(), claimant, remains: None });
        }
    }
}

/// When a poll was sent that was sent so long ago.
fn before(present: Stamp, asked: Asked, now: Instant) -> Stamp {
    let ago = asked.ago(now);
    Stamp { boot: present.boot.map(|at| at.minus(ago)), wall: present.wall.saturating_sub(ago) }
}
