//! Takes what calls return: keeps the attachments, counts, and sends the events to the rules.

use std::sync::Arc;

use super::super::calls::{self, Attachment, CallResult};
use super::super::catch_panic::drop_guarded;
use super::super::claim_runtime::{ClaimRuntime, PolledMessage, TraceRecording};
use super::super::running_calls::UncleanedScope;
use super::Engine;
use crate::source::{Grant, PollBatch};
use journeyman_domain::claim::ClaimEvent;
use journeyman_domain::id::{LocalToken, SourceId};
use journeyman_domain::outcome::ExecuteFailure;
use journeyman_domain::refusal::Refusal;
use journeyman_domain::worker::{Event, GrantedClaim, PollResult, ReceivedMessage, RecoveryResult};
use journeyman_platform::host::crash_points::crash_point;

impl Engine {
    pub(super) fn on_call_result(&mut self, result: CallResult) {
        match result {
            CallResult::Event(event) => {
                if let Event::CleanupDone { claim } = event {
                    self.calls.uncleaned.remove(&claim);
                }
                self.handle_event(event);
            }
            CallResult::Done => {}
            CallResult::Claim { claim, event, attachment } => self.on_claim_call(claim, event, attachment),
            CallResult::Opened { source, sent_at, answer } => {
                let answer = answer.map_err(|error| self.log_source_refusal(source, error));
                self.handle_event(Event::Opened { source, sent_at, answer });
            }
            CallResult::Polled { source, answer } => {
                self.history.count(source, |counts| match answer {
                    Ok(_) => counts.polls += 1,
                    Err(_) => counts.polls_failed += 1,
                });
                let answer = match answer {
                    Ok(batch) => Ok(self.accept_poll_result(source, batch)),
                    Err(error) => Err(self.log_source_refusal(source, error)),
                };
                let granted: Vec<LocalToken> =
                    answer.iter().flat_map(|result| &result.claims).map(|claim| claim.token).collect();
                self.handle_event(Event::Polled { source, answer });
                self.drop_lost_grants(&granted);
            }
            CallResult::Recovered { source, answer } => {
                for grant in answer.iter().flat_map(|batch| &batch.grants) {
                    let source = self.source_name(source);
                    tracing::info!(claim.run = %grant.run, source, "recovered a claim whose reply was lost");
                }
                let answer =
                    answer.map_err(|error| self.log_recovery_refusal(source, error)).map(|batch| RecoveryResult {
                        error: batch.error.map(|error| self.log_recovery_refusal(source, error)),
                        claims: self.accept_grants(source, batch.grants),
                        foreign_claims: batch.foreign_claims,
                    });
                self.handle_event(Event::Recovered { source, answer });
            }
            CallResult::ResourcesMeasured { resources, work_dir } => {
                self.resources = resources;
                self.spawn_measurement();
                if let Err(error) = work_dir {
                    self.history.work_dir_lost_reason.get_or_insert_with(|| error.to_string());
                    self.handle_event(Event::WorkDirLost);
                }
                self.handle_event(Event::ResourcesMeasured(resources));
            }
            CallResult::SourceEvent { source, event } => {
                self.await_source_event(source);
                self.on_source_event(source, event);
            }
            CallResult::SidecarChanged { sidecar, status } => self.on_sidecar_changed(sidecar, status),
        }
    }

    fn on_claim_call(&mut self, claim: LocalToken, mut event: ClaimEvent, attachment: Option<Attachment>) {
        let (now, recording) = (self.now(), self.trace_recording());
        // A call may return after the end of its claim.
        let Some(live) = self.calls.claims.get_mut(&claim) else { return drop_guarded(attachment) };
        let source = live.source;
        live.prune_calls();
        live.timeline.on_event(&event, now);
        // Stopped while it prepared: a prepared payload ends when it is dropped, and a failure to prepare no longer counts.
        let attachment = if matches!(event, ClaimEvent::Prepared(_)) && live.is_kill_requested() {
            drop_guarded(attachment);
            event = ClaimEvent::Ended(Err(ExecuteFailure::Internal));
            None
        } else {
            attachment
        };
        if let ClaimEvent::Reclaimed(answer) = event {
            if answer.is_ok() {
                live.on_reclaimed(now);
                self.control.liveness.count_received();
            }
            self.history.count(source, |counts| match answer {
                Ok(_) => counts.reclaims += 1,
                Err(_) => counts.reclaims_failed += 1,
            });
        }
        match attachment {
            None => {}
            Some(Attachment::Grant(grant)) => {
                crash_point(if live.recovered { "taken-over" } else { "claim-granted" });
                let terms = grant.terms;
                // Spans of a recovered claim were the previous process's to record.
                live.on_granted(*grant, if live.recovered { TraceRecording::Off } else { recording }, now);
                self.control.liveness.count_received();
                self.control.liveness.set_claims_held(self.calls.claims.len());
                self.history.count(source, |counts| counts.claims += 1);
                self.handle_event(Event::Claim(claim, ClaimEvent::Terms(terms)));
            }
            // The most frequent result of a take-over: reported by then, or expired.
            Some(Attachment::ClaimRefused(error)) if live.recovered && error.refusal == Refusal::Gone => {
                tracing::debug!("{}", error.message);
            }
            Some(Attachment::ClaimRefused(error)) => {
                self.history.count(source, |counts| counts.claims_refused += 1);
                self.log_source_refusal(source, error);
            }
            Some(Attachment::Prepared(prepared)) => live.prepared = Some(prepared),
            Some(Attachment::CleanupPending) => self.on_cleanup_pending(claim),
        }
        self.handle_event(Event::Claim(claim, event));
    }

    /// The slot stays taken until the processes are gone.
    fn on_cleanup_pending(&mut self, claim: LocalToken) {
        let live = self.calls.claim(claim);
        let Some(task) = &live.task else { unreachable!("{claim:?} has processes and was never started") };
        let uncleaned = UncleanedScope::new(live.run.clone(), task.scope().clone());
        self.calls.uncleaned.insert(claim, uncleaned.clone());
        self.calls.spawn(calls::wait_for_cleanup(claim, uncleaned));
        self.handle_event(Event::CleanupPending { claim });
    }

    fn accept_poll_result(&mut self, source: SourceId, batch: PollBatch) -> PollResult {
        if !batch.grants.is_empty() {
            crash_point("claim-granted");
        }
        let entries = batch.messages.len() + batch.grants.len();
        let now = self.now();
        self.history.source(source).on_poll(now, entries);
        let mut result = PollResult::default();
        for message in batch.messages {
            let token = self.calls.next_token();
            if let Err(reason) = &message.run {
                let source = self.source_name(source);
                tracing::error!(source, message.id = &*message.id, "cannot read an entry of a poll: {reason}");
            }
            result.messages.push(ReceivedMessage {
                token,
                id: (*message.id).into(),
                dequeue_count: message.dequeue_count,
                run: message.run.clone().ok(),
            });
            self.calls.messages.insert(token, PolledMessage { source, message: Arc::new(message) });
        }
        result.claims = self.accept_grants(source, batch.grants);
        result
    }

    /// Claims that were reported lost or canceled before their grant arrived.
    fn drop_lost_grants(&mut self, granted: &[LocalToken]) {
        for claim in granted {
            if let Some(reason) = self.calls.claims.get(claim).and_then(|live| live.granted().known_loss()) {
                self.handle_event(Event::Claim(*claim, ClaimEvent::StatusChecked(Ok(Some(reason)))));
            }
        }
    }

    fn accept_grants(&mut self, source: SourceId, grants: Vec<Grant>) -> Vec<GrantedClaim> {
        let accept = |grant: Grant| {
            let token = self.calls.next_token();
            self.history.count(source, |counts| counts.claims += 1);
            self.control.liveness.count_received();
            let (run, terms) = (grant.run.clone(), grant.terms);
            let granted = GrantedClaim { token, run, lease: grant.lease, terms };
            let mut live = ClaimRuntime::new(source, grant.run.clone());
            live.on_granted(grant, self.trace_recording(), self.now());
            self.calls.claims.insert(token, live);
            granted
        };
        let granted = grants.into_iter().map(accept).collect();
        self.control.liveness.set_claims_held(self.calls.claims.len());
        granted
    }
}
