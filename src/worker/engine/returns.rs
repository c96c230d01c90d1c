//! What comes back from the calls that carry effects out: it is kept where the rules have no use for it, and told to them.

use std::sync::Arc;

use super::super::calls::{self, Back, Started};
use super::super::counters::count;
use super::super::guard::discard;
use super::super::live::{Entry, Live, Recording};
use super::super::timeline::Phase;
use super::{Engine, source_id};
use crate::domain::id::{SourceId, Token};
use crate::domain::outcome::{Emptiness, Unprepared, Verdict};
use crate::domain::time::Instant as Moment;
use crate::domain::worker::{Brought, Event, Haul, Lanes, Seen};
use crate::host::containment::Unproven;
use crate::host::crash::crash_point;
use crate::source::{Batch, Grant, Refused};

impl Engine {
    pub(super) fn returned(&mut self, back: Result<Back, tokio::task::JoinError>) {
        match back {
            Ok(back) => self.came_back(back),
            Err(error) if error.is_cancelled() => {}
            // Every call guards against panics; this would be one of the runtime's own.
            Err(error) => {
                count(&self.counters().panics);
                tracing::error!(%error, "a call of the worker broke; its claim will run out");
            }
        }
    }

    /// A payload runs. It may have ended already.
    pub(super) fn started(&mut self, Started { claim, at }: Started) {
        let Some(live) = self.live.get_mut(&claim) else { return };
        if live.started {
            return;
        }
        live.started = true;
        live.timeline.end(&[Phase::Prepare], at);
        live.timeline.begin(Phase::Run, at);
        self.happened(Event::Started { claim });
    }

    pub(super) fn came_back(&mut self, back: Back) {
        if let Back::Ended { claim, started: Some(at), .. } = back {
            self.started(Started { claim, at });
        }
        if let Some(live) = back.claim().and_then(|claim| self.live.get_mut(&claim)) {
            live.let_go();
            live.timeline.end(back.ends(), self.clock.now());
        }
        let event = match back {
            Back::Opened { source, sent_at, answer } => {
                let answer = self
                    .unless_refused(source, answer)
                    .map(|opened| Lanes { count: opened.lanes, usable_for: opened.usable_for });
                Event::Opened { source, sent_at, answer }
            }
            Back::Measured { room, held } => {
                self.room = room;
                self.measure();
                if let Err(error) = held {
                    self.said_lost.get_or_insert_with(|| error.to_string());
                    self.happened(Event::FolderLost);
                }
                Event::Measured(room)
            }
            Back::Polled { source, lane, sent_at, answer } => {
                count(&self.counters().polls);
                if let (Ok(batch), Some(track)) = (&answer, self.tracks.get_mut(usize::from(source.0))) {
                    if !batch.grants.is_empty() {
                        crash_point("claim-answered");
                    }
                    let entries = batch.messages.len() + batch.undecodable.len() + batch.grants.len();
                    track.polled(self.clock.now(), entries);
                }
                let answer = self.unless_refused(source, answer).map(|batch| self.take_in(source, sent_at, batch));
                if answer.is_err() {
                    count(&self.counters().polls_failed);
                    self.tally(usize::from(source.0), |counts| counts.polls_failed += 1);
                }
                let brought: Vec<Token> =
                    answer.iter().flat_map(|haul| &haul.claims).map(|claim| claim.token).collect();
                self.happened(Event::Polled { source, lane, sent_at, answer });
                return self.drop_lost(&brought);
            }
            Back::Recovered { source, sent_at, answer } => {
                let answer = match answer {
                    Ok(found) => Ok(self.found(source, sent_at, found)),
                    Err(refused) => Err(self.recovery_refusal(source, refused)),
                };
                Event::Recovered { source, sent_at, answer }
            }
            Back::Told { source, news } => {
                self.listen(source);
                return self.told(source, news);
            }
            Back::Heard { beside, word } => return self.heard(beside, word),
            Back::Looked(condition) => Event::Looked(condition),
            Back::Claimed { claim, sent_at, answer } => self.claimed(claim, sent_at, answer),
            Back::TakenOver { claim, sent_at, answer } => self.taken_over(claim, sent_at, answer),
            Back::Deleted { message, answer } => {
                crash_point("after-delete");
                Event::Deleted { message, answer: answer.map_err(|refused| self.note("delete", refused)) }
            }
            Back::Prepared { claim, answer } => self.prepared(claim, answer),
            Back::Ended { claim, verdict, emptiness, report, .. } => {
                crash_point("ended");
                if let Some(live) = self.live.get_mut(&claim) {
                    live.report = report;
                }
                if emptiness == Emptiness::Unproven {
                    self.occupied(claim);
                }
                Event::Ended { claim, verdict }
            }
            Back::Vacated { claim } => {
                self.kept.remove(&claim);
                tracing::warn!("what a payload had left is gone; its slot is used again");
                Event::Vacated { claim }
            }
            Back::Settled { claim, settled } => {
                crash_point("after-storing");
                Event::Settled { claim, settled }
            }
            Back::Reported { claim, answer } => {
                crash_point("after-report");
                Event::Reported { claim, answer: answer.map_err(|refused| self.note("report", refused)) }
            }
            Back::Reclaimed { claim, sent_at, answer } => {
                crash_point("reclaimed");
                if answer.is_ok() {
                    self.control.pulse.receive();
                }
                count(if answer.is_ok() { &self.counters().reclaims } else { &self.counters().reclaims_failed });
                let now = self.clock.now();
                let feed = self.live.get_mut(&claim).map(|live| {
                    if answer.is_ok() {
                        (live.reclaimed, live.leased) = (Some(now), Some(sent_at));
                        live.reclaims = live.reclaims.saturating_add(1);
                    }
                    live.feed
                });
                self.tally(feed.unwrap_or(usize::MAX), |counts| match answer {
                    Ok(_) => counts.reclaims += 1,
                    Err(_) => counts.reclaims_failed += 1,
                });
                Event::Reclaimed { claim, sent_at, answer: answer.map_err(|refused| self.note("reclaim", refused)) }
            }
            Back::Checked { claim, answer } => {
                Event::Checked { claim, answer: answer.map_err(|refused| self.note("status", refused)) }
            }
        };
        self.happened(event);
    }

    /// A payload may still be there: its slot waits for its end, unless the operator wants it otherwise.
    pub(super) fn occupied(&mut self, claim: Token) {
        let Some(job) = self.live.get(&claim).and_then(|live| live.job.as_ref()) else { return };
        match self.containment.unproven() {
            Unproven::Kept => {
                let enclosure = job.context.enclosure().clone();
                let run = job.context.task().run.clone();
                self.kept.insert(claim, run.clone());
                self.calls.spawn(calls::vacate(claim, run, enclosure));
                self.happened(Event::Occupied { claim });
            }
            Unproven::Reused => {
                count(&self.counters().occupied);
                tracing::error!(
                    alert = "occupied", claim.run = %job.context.task().run,
                    "[alert operator] processes of a payload may still be there; its slot is used again, as host.unproven says"
                );
            }
        }
    }

    pub(super) fn take_in(&mut self, source: SourceId, sent_at: Moment, batch: Batch) -> Haul {
        let mut haul = Haul::default();
        for message in batch.messages {
            let token = self.token();
            let message = Arc::new(message);
            haul.messages.push(Seen {
                token,
                id: (*message.id).into(),
                dequeue_count: message.dequeue_count,
                run: Some(message.run.clone()),
            });
            let entry = Entry {
                lane: message.lane,
                id: Arc::clone(&message.id),
                receipt: Arc::clone(&message.receipt),
                source: usize::from(source.0),
                message: Some(message),
            };
            self.entries.insert(token, Arc::new(entry));
        }
        for bad in batch.undecodable {
            let token = self.token();
            tracing::error!(
                source = self.source_name(source),
                message.id = &*bad.id,
                "what a poll brought cannot be read: {}",
                bad.what
            );
            haul.messages.push(Seen { token, id: (*bad.id).into(), dequeue_count: bad.dequeue_count, run: None });
            let source = usize::from(source.0);
            let entry = Entry { lane: bad.lane, id: bad.id, receipt: bad.receipt, source, message: None };
            self.entries.insert(token, Arc::new(entry));
        }
        haul.claims = batch.grants.into_iter().map(|grant| self.bring(source, sent_at, grant)).collect();
        haul
    }

    /// Gives up what was brought and lost meanwhile.
    pub(super) fn drop_lost(&mut self, brought: &[Token]) {
        if self.lost_early.is_empty() {
            return;
        }
        for claim in brought {
            let run = self.live.get(claim).and_then(|live| live.claim.as_ref()).map(|held| held.run().clone());
            if run.is_some_and(|run| self.lost_early.remove(&run)) {
                self.happened(Event::Lost { claim: *claim });
            }
        }
    }

    pub(in crate::worker) fn bring(&mut self, source: SourceId, sent_at: Moment, grant: Grant) -> Brought {
        let token = self.token();
        count(&self.counters().claims);
        self.tally(usize::from(source.0), |counts| counts.claims += 1);
        self.control.pulse.receive();
        let brought = Brought { token, run: grant.run.clone(), length: grant.lease };
        let mut live = Live::new(usize::from(source.0));
        live.granted(grant, sent_at, self.recording(), self.clock.now());
        self.live.insert(token, live);
        self.control.pulse.hold(self.live.len());
        brought
    }

    pub(super) fn claimed(&mut self, claim: Token, sent_at: Moment, answer: Result<Grant, Refused>) -> Event {
        let feed = self.live.get(&claim).map(|live| live.feed);
        self.tally(feed.unwrap_or(usize::MAX), |counts| match answer {
            Ok(_) => counts.claims += 1,
            Err(_) => counts.claims_refused += 1,
        });
        let answer = match answer {
            Ok(grant) => {
                crash_point("claim-answered");
                count(&self.counters().claims);
                self.control.pulse.receive();
                self.control.pulse.hold(self.live.len());
                let length = grant.lease;
                let recording = self.recording();
                if let Some(live) = self.live.get_mut(&claim) {
                    live.granted(grant, sent_at, recording, self.clock.now());
                }
                Ok(length)
            }
            Err(refused) => {
                count(&self.counters().claims_refused);
                match feed.map(source_id) {
                    Some(source) => Err(self.refusal(source, refused)),
                    None => Err(self.note("claim", refused)),
                }
            }
        };
        Event::Claimed { claim, sent_at, answer }
    }

    pub(super) fn prepared(
        &mut self,
        claim: Token,
        answer: Result<Box<dyn crate::handler::Prepared>, Unprepared>,
    ) -> Event {
        let Some(live) = self.live.get_mut(&claim) else {
            discard(answer);
            return Event::Prepared { claim, answer: Err(Unprepared::Internal) };
        };
        if live.killed() {
            // Told to end while this was on its way: dropping it here is the end.
            discard(answer);
            return Event::Ended { claim, verdict: Verdict::Internal };
        }
        let answer = answer.map(|prepared| live.prepared = Some(prepared));
        Event::Prepared { claim, answer }
    }

    pub(super) fn recording(&self) -> Recording {
        if self.settings.recorder.is_some() { Recording::On } else { Recording::Off }
    }
}
