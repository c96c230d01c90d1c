//! Turns the results of calls into events for the rules.

use std::sync::Arc;

use super::super::calls::{self, CallResult, PayloadStarted};
use super::super::catch_panic::drop_guarded;
use super::super::claim_runtime::{ClaimRuntime, PolledMessage, TraceRecording};
use super::super::counters::count;
use super::super::timeline::ClaimPhase;
use super::Engine;
use crate::domain::id::{LocalToken, SourceId};
use crate::domain::outcome::{Cleanup, ExecuteFailure, PrepareFailure};
use crate::domain::time::Instant as Moment;
use crate::domain::worker::{Event, GrantedClaim, OpenedQueues, PollResult, ReceivedMessage};
use crate::host::containment::OnCleanupFailure;
use crate::host::crash_points::crash_point;
use crate::source::{CallError, Grant, PollBatch};

impl Engine {
    pub(super) fn on_call_joined(&mut self, back: Result<CallResult, tokio::task::JoinError>) {
        match back {
            Ok(back) => self.on_call_result(back),
            Err(error) if error.is_cancelled() => {}
            // Every call catches panics; this would be one of the runtime's own.
            Err(error) => {
                count(&self.counters().panics);
                tracing::error!(%error, "a call of the worker panicked; its claim will expire");
            }
        }
    }

    pub(super) fn on_payload_started(&mut self, PayloadStarted { claim, at }: PayloadStarted) {
        let Some(live) = self.claims.get_mut(&claim) else { return };
        if live.started {
            return;
        }
        live.started = true;
        live.timeline.end(&[ClaimPhase::Prepare], at);
        live.timeline.start(ClaimPhase::Run, at);
        self.handle_event(Event::Started { claim });
    }

    pub(super) fn on_call_result(&mut self, back: CallResult) {
        if let CallResult::Ended { claim, started: Some(at), .. } = back {
            self.on_payload_started(PayloadStarted { claim, at });
        }
        if let Some(live) = back.claim().and_then(|claim| self.claims.get_mut(&claim)) {
            live.prune_calls();
            live.timeline.end(back.phases_ended(), self.clock.now());
        }
        let event = match back {
            CallResult::Opened { source, sent_at, answer } => {
                let answer = self
                    .map_refusal(source, answer)
                    .map(|opened| OpenedQueues { count: opened.priority_queues, usable_for: opened.usable_for });
                Event::Opened { source, sent_at, answer }
            }
            CallResult::ResourcesMeasured { room, held } => {
                self.resources = room;
                self.spawn_measurement();
                if let Err(error) = held {
                    self.work_dir_lost_reason.get_or_insert_with(|| error.to_string());
                    self.handle_event(Event::WorkDirLost);
                }
                Event::ResourcesMeasured(room)
            }
            CallResult::Polled { source, lane, sent_at, answer } => {
                if let Ok(batch) = &answer {
                    if !batch.grants.is_empty() {
                        crash_point("claim-granted");
                    }
                    let entries = batch.messages.len() + batch.unreadable.len() + batch.grants.len();
                    self.source_activity[source.index()].on_poll(self.clock.now(), entries);
                }
                let answer =
                    self.map_refusal(source, answer).map(|batch| self.accept_poll_result(source, sent_at, batch));
                self.count_for_source(source.index(), |counts| match answer {
                    Ok(_) => counts.polls += 1,
                    Err(_) => counts.polls_failed += 1,
                });
                let brought: Vec<LocalToken> =
                    answer.iter().flat_map(|haul| &haul.claims).map(|claim| claim.token).collect();
                self.handle_event(Event::Polled { source, queue: lane, sent_at, answer });
                return self.drop_early_losses(&brought);
            }
            CallResult::Recovered { source, sent_at, answer } => {
                let answer = match answer {
                    Ok(found) => Ok(self.accept_recovered(source, sent_at, found)),
                    Err(refused) => Err(self.log_recovery_refusal(source, refused)),
                };
                Event::Recovered { source, sent_at, answer }
            }
            CallResult::SourceEvent { source, news } => {
                self.await_source_event(source);
                return self.on_source_event(source, news);
            }
            CallResult::SidecarChanged { beside, word } => return self.on_sidecar_changed(beside, word),
            CallResult::HostProbed(condition) => Event::HostProbed(condition),
            CallResult::Claimed { claim, sent_at, answer } => self.on_claimed(claim, sent_at, answer),
            CallResult::TakenOver { claim, sent_at, answer } => self.on_taken_over(claim, sent_at, answer),
            CallResult::Deleted { message, answer } => {
                crash_point("after-delete");
                Event::Deleted { message, answer: answer.map_err(|refused| self.log_refusal("delete", refused)) }
            }
            CallResult::Prepared { claim, answer } => self.on_prepared(claim, answer),
            CallResult::Ended { claim, verdict, emptiness, .. } => {
                crash_point("exited");
                if emptiness == Cleanup::Incomplete {
                    self.on_cleanup_unproven(claim);
                }
                Event::Ended { claim, verdict }
            }
            CallResult::CleanupDone { claim } => {
                self.pending_cleanup.remove(&claim);
                tracing::warn!("the remaining processes of a payload are gone; its slot is free");
                Event::CleanupDone { claim }
            }
            CallResult::Uploaded { claim, settled } => {
                crash_point("after-upload");
                Event::Uploaded { claim, status: settled }
            }
            CallResult::Reported { claim, answer } => {
                crash_point("after-report");
                Event::Reported { claim, answer: answer.map_err(|refused| self.log_refusal("report", refused)) }
            }
            CallResult::Reclaimed { claim, sent_at, answer } => {
                crash_point("reclaimed");
                if answer.is_ok() {
                    self.control.liveness.count_received();
                }
                let now = self.clock.now();
                if let Some(live) = self.claims.get_mut(&claim) {
                    if answer.is_ok() {
                        (live.reclaimed_at, live.lease_requested_at) = (Some(now), Some(sent_at));
                        live.reclaims = live.reclaims.saturating_add(1);
                    }
                    let source = live.source_index;
                    self.count_for_source(source, |counts| match answer {
                        Ok(_) => counts.reclaims += 1,
                        Err(_) => counts.reclaims_failed += 1,
                    });
                }
                Event::Reclaimed {
                    claim,
                    sent_at,
                    answer: answer.map_err(|refused| self.log_refusal("reclaim", refused)),
                }
            }
            CallResult::Checked { claim, answer } => {
                Event::StatusChecked { claim, answer: answer.map_err(|refused| self.log_refusal("status", refused)) }
            }
        };
        self.handle_event(event);
    }

    /// Processes of the payload may have survived: the slot stays taken until they are gone, unless configured
    /// otherwise.
    pub(super) fn on_cleanup_unproven(&mut self, claim: LocalToken) {
        let Some(job) = self.claims.get(&claim).and_then(|live| live.execution.as_ref()) else { return };
        match self.containment.on_cleanup_failure() {
            OnCleanupFailure::KeepSlot => {
                let enclosure = job.context.scope().clone();
                let run = job.context.task().run.clone();
                self.pending_cleanup.insert(claim, run.clone());
                self.calls.spawn(calls::wait_for_cleanup(claim, run, enclosure));
                self.handle_event(Event::CleanupPending { claim });
            }
            OnCleanupFailure::ReuseSlot => {
                count(&self.counters().cleanup_pending);
                tracing::error!(
                    alert = "cleanup-pending", claim.run = %job.context.task().run,
                    "[alert operator] processes of a payload may remain; its slot is reused, as host.on_cleanup_failure says"
                );
            }
        }
    }

    pub(super) fn accept_poll_result(&mut self, source: SourceId, sent_at: Moment, batch: PollBatch) -> PollResult {
        let mut haul = PollResult::default();
        for message in batch.messages {
            let token = self.next_token();
            let message = Arc::new(message);
            haul.messages.push(ReceivedMessage {
                token,
                id: (*message.id).into(),
                dequeue_count: message.dequeue_count,
                run: Some(message.run.clone()),
            });
            let entry = PolledMessage {
                lane: message.queue,
                id: Arc::clone(&message.id),
                receipt: Arc::clone(&message.receipt),
                source_index: source.index(),
                message: Some(message),
            };
            self.messages.insert(token, Arc::new(entry));
        }
        for bad in batch.unreadable {
            let token = self.next_token();
            tracing::error!(
                source = self.source_name(source),
                message.id = &*bad.id,
                "cannot read an entry of a poll: {}",
                bad.reason
            );
            haul.messages.push(ReceivedMessage {
                token,
                id: (*bad.id).into(),
                dequeue_count: bad.dequeue_count,
                run: None,
            });
            let source = source.index();
            let entry = PolledMessage {
                lane: bad.queue,
                id: bad.id,
                receipt: bad.receipt,
                source_index: source,
                message: None,
            };
            self.messages.insert(token, Arc::new(entry));
        }
        haul.claims = batch.grants.into_iter().map(|grant| self.accept_grant(source, sent_at, grant)).collect();
        haul
    }

    /// A claim reported lost before its grant arrived is lost at once.
    pub(super) fn drop_early_losses(&mut self, brought: &[LocalToken]) {
        if self.early_losses.is_empty() {
            return;
        }
        for claim in brought {
            let run = self.claims.get(claim).and_then(|live| live.claim.as_ref()).map(|held| held.run().clone());
            if run.is_some_and(|run| self.early_losses.remove(&run)) {
                self.handle_event(Event::Lost { claim: *claim });
            }
        }
    }

    pub(in crate::worker) fn accept_grant(&mut self, source: SourceId, sent_at: Moment, grant: Grant) -> GrantedClaim {
        let token = self.next_token();
        self.count_for_source(source.index(), |counts| counts.claims += 1);
        self.control.liveness.count_received();
        let brought = GrantedClaim { token, run: grant.run.clone(), length: grant.expires_at.since(sent_at) };
        let mut live = ClaimRuntime::new(source.index());
        live.on_granted(grant, sent_at, self.trace_recording(), self.clock.now());
        self.claims.insert(token, live);
        self.control.liveness.set_claims_held(self.claims.len());
        brought
    }

    pub(super) fn on_claimed(&mut self, claim: LocalToken, sent_at: Moment, answer: Result<Grant, CallError>) -> Event {
        let feed = self.claims.get(&claim).map(|live| live.source_index);
        if let Some(source) = feed {
            self.count_for_source(source, |counts| match answer {
                Ok(_) => counts.claims += 1,
                Err(_) => counts.claims_refused += 1,
            });
        }
        let answer = match answer {
            Ok(grant) => {
                crash_point("claim-granted");
                self.control.liveness.count_received();
                self.control.liveness.set_claims_held(self.claims.len());
                let length = grant.expires_at.since(sent_at);
                let recording = self.trace_recording();
                if let Some(live) = self.claims.get_mut(&claim) {
                    live.on_granted(grant, sent_at, recording, self.clock.now());
                }
                Ok(length)
            }
            Err(refused) => match feed.map(SourceId::from_index) {
                Some(source) => Err(self.log_source_refusal(source, refused)),
                None => Err(self.log_refusal("claim", refused)),
            },
        };
        Event::Claimed { claim, sent_at, answer }
    }

    pub(super) fn on_prepared(
        &mut self,
        claim: LocalToken,
        answer: Result<Box<dyn crate::handler::PreparedPayload>, PrepareFailure>,
    ) -> Event {
        let Some(live) = self.claims.get_mut(&claim) else {
            drop_guarded(answer);
            return Event::Prepared { claim, answer: Err(PrepareFailure::Internal) };
        };
        if live.is_kill_requested() {
            // Stopped meanwhile: dropping the prepared payload ends it.
            drop_guarded(answer);
            return Event::Ended { claim, verdict: Err(ExecuteFailure::Internal) };
        }
        let answer = answer.map(|prepared| live.prepared = Some(prepared));
        Event::Prepared { claim, answer }
    }

    pub(super) fn trace_recording(&self) -> TraceRecording {
        if self.config.recorder.is_some() { TraceRecording::On } else { TraceRecording::Off }
    }
}
