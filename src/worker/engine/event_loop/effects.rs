//! Performs the effects of the rules, each in a task of its own where it takes time.

use std::future::Future;
use std::sync::Arc;

use tokio::sync::watch;

use super::super::calls::{self, CallResult};
use super::super::claim_runtime::{ClaimRuntime, PolledMessage};
use super::super::uploads::Uploader;
use super::Engine;
use crate::handler::Context;
use crate::handler::context::PublishedLogs;
use crate::source;
use journeyman_domain::claim::{CancelCause, ClaimAction, ClaimEvent, LossReason, UploadStatus};
use journeyman_domain::id::{LocalToken, SourceId};
use journeyman_domain::journal::{ClaimRecord, EntryId};
use journeyman_domain::worker::{Effect, Event};
use journeyman_platform::host::clock::Clock;
use journeyman_platform::host::containment::ProcessScope;
use journeyman_platform::host::crash_points::crash_point;
use journeyman_platform::host::journal::FirstRecord;

/// The last line of the log of a task that ends without a report.
const fn loss_note(loss: LossReason) -> &'static str {
    match loss {
        LossReason::Canceled => "the task was canceled",
        LossReason::DeadlineExceeded => "the task's deadline has passed",
        LossReason::Revoked | LossReason::LeaseExpired | LossReason::GrantedTooLate | LossReason::ShutdownDeadline => {
            "the claim was lost"
        }
    }
}

impl Engine {
    pub(super) fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Open(id) => self.spawn_source_call(id, |source, clock| calls::open(source, id, clock)),
            Effect::Poll { source: id, queue, max } => {
                self.control.liveness.mark_claiming();
                // Claiming may have been disabled after the rules decided to poll.
                if self.claiming_enabled[id.index()] {
                    self.sources[id.index()].source.resume();
                }
                let recorded = self.journal_unread_poll(id);
                self.spawn_source_call(id, |source, _| calls::poll(source, id, queue, max, recorded));
            }
            Effect::ClosePoll(id) => self.sources[id.index()].source.pause(),
            Effect::Recover { source: id, known_runs, newer_than } => {
                self.spawn_source_call(id, |source, _| calls::recover(source, id, known_runs, newer_than));
            }
            Effect::Claim(claim, action) => self.perform_claim_action(claim, action),
            Effect::Delete(message) => {
                crash_point("before-delete");
                let PolledMessage { source: id, message: received } = self.calls.messages[&message].clone();
                self.spawn_source_call(id, |source, _| calls::delete(source, message, received));
            }
            Effect::DropMessage(message) => {
                // Otherwise a grant that the rules did not take.
                if self.calls.messages.remove(&message).is_none() {
                    self.calls.claims.remove(&message);
                }
            }
            Effect::ProbeHost => {
                self.calls.spawn(calls::probe_host(self.host_probe.clone()));
            }
            Effect::Alert(alert) => self.alert(&alert),
            Effect::Exit(exit) => self.exit = Some(exit),
        }
    }

    fn perform_claim_action(&mut self, claim: LocalToken, action: ClaimAction) {
        let now = self.now();
        // A retry, by when the message may have been received anew, has its entry.
        if action == ClaimAction::Request && !self.calls.claims.contains_key(&claim) {
            let requested = ClaimRuntime::requested(&self.calls.messages[&claim]);
            self.calls.claims.insert(claim, requested);
        }
        let live = self.calls.claim(claim);
        live.timeline.on_action(&action, now);
        match action {
            ClaimAction::Request => {
                let (id, run) = (live.source, live.run.clone());
                self.spawn_source_call(id, |source, _| calls::claim(source, claim, run));
            }
            ClaimAction::TakeOver => {
                let (id, run) = (live.source, live.run.clone());
                self.spawn_source_call(id, |source, _| calls::take_over(source, claim, run));
            }
            ClaimAction::Prepare => self.prepare(claim),
            ClaimAction::Execute => self.execute(claim),
            ClaimAction::Start => self.start_request(claim),
            ClaimAction::Kill { cause, grace } => {
                if cause == CancelCause::Shutdown {
                    crash_point("releasing");
                }
                let is_first = !live.is_kill_requested();
                live.kill(cause, grace, now);
                if let Some(task) = live.task.clone().filter(|_| is_first) {
                    self.calls.spawn_claim_call(claim, |_| calls::kill_at_deadline(task));
                }
            }
            ClaimAction::Upload => self.upload_results(claim),
            ClaimAction::Report { outcome, timeout } => {
                live.mark_not_started();
                self.journal_outcome(claim, outcome);
                crash_point("before-report");
                let task = self.calls.claim(claim).task.clone();
                self.calls.spawn_claim_call(claim, |held| calls::report(claim, held, outcome, timeout, task));
            }
            ClaimAction::Reclaim { timeout } => {
                self.calls.spawn_claim_call(claim, |held| calls::reclaim(claim, held, timeout));
            }
            ClaimAction::CheckStatus => {
                self.calls.spawn_claim_call(claim, |held| calls::check_status(claim, held));
            }
            ClaimAction::UpdateLease(lease) => drop(live.lease.send_replace(Some(lease))),
            ClaimAction::Close(end) => self.close(claim, end),
        }
    }

    fn spawn_source_call<F, C>(&mut self, id: SourceId, call: C)
    where
        C: FnOnce(Arc<dyn source::Source>, Clock) -> F,
        F: Future<Output = CallResult> + Send + 'static,
    {
        self.calls.spawn(call(Arc::clone(&self.sources[id.index()].source), self.config.clock));
    }

    /// The handler's context, created without touching the disk.
    fn start_execution(&mut self, claim: LocalToken, scope: ProcessScope) -> Context {
        let live = self.calls.claim(claim);
        let binding = &self.sources[live.source.index()];
        live.start_execution(claim, binding, &self.config, self.work_dir_lock.clone(), scope, &self.launched_sender)
    }

    fn prepare(&mut self, claim: LocalToken) {
        let live = self.calls.claim(claim);
        let (entry, binding) = (EntryId(claim.0), &self.sources[live.source.index()]);
        let record = self.journal.claim_record(live.source, live.run.clone());
        // I27: a payload that is not journaled would survive this worker unnoticed, and the claim is reported by the next process.
        let scope = self.containment.new_recorded_scope(Some(self.journal.recorder(entry, FirstRecord::Nothing)));
        let record = ClaimRecord { processes: Some(scope.record()), ..record };
        let recorded = self.journal.records.record_claim(entry, record);
        let trace_id = live.trace.map(|trace| trace.trace_id());
        let trace_id = trace_id.as_ref().map(tracing::field::display);
        tracing::info!(claim.run = %live.run, source = binding.name, trace_id, "claimed");
        let (handler, payload_error) = (Arc::clone(&binding.handler), live.payload_error.take());
        let context = self.start_execution(claim, scope);
        let prepare = calls::prepare(handler, Some(recorded), claim, payload_error, context);
        self.calls.spawn_handler(prepare);
    }

    /// A connection-scoped claim leaves at most processes, which are journaled before the first of them starts (I27).
    fn start_request(&mut self, claim: LocalToken) {
        let live = self.calls.claim(claim);
        let binding = &self.sources[live.source.index()];
        let ClaimRecord { run, claimant, .. } = self.journal.claim_record(live.source, live.run.clone());
        let recorder = self.journal.recorder(EntryId(claim.0), FirstRecord::Claim { run, claimant });
        let scope = self.containment.new_recorded_scope(Some(recorder));
        tracing::debug!(claim.run = %live.run, source = binding.name, "claimed");
        let (handler, payload_error) = (Arc::clone(&binding.handler), live.payload_error.take());
        let context = self.start_execution(claim, scope);
        self.calls.spawn_handler(calls::start(handler, claim, payload_error, context));
    }

    fn execute(&mut self, claim: LocalToken) {
        let live = self.calls.claim(claim);
        let (Some(prepared), Some(task)) = (live.prepared.take(), &live.task) else {
            unreachable!("{claim:?} is executed without having been prepared")
        };
        let call = calls::execute(prepared, claim, task.for_handler());
        self.calls.spawn_handler(call);
        self.serve_live_log(claim);
    }

    fn serve_live_log(&mut self, claim: LocalToken) {
        let live = self.calls.claim(claim);
        let (Some(live_logs), Some(task)) = (&self.config.live_logs, &live.task) else { return };
        let PublishedLogs { live: Some(name), backing: Some(_), .. } = task.published_logs() else { return };
        let log = task.followed_log();
        let mut live_log = live_logs.serve(log.clone());
        let artifact = live_log.artifact(name);
        let upload = self.calls.spawn_claim_call(claim, |held| calls::publish_live_log(held, log, artifact));
        live_log.publishing = Some(upload);
        self.calls.claim(claim).live_log = Some(live_log);
    }

    fn upload_results(&mut self, claim: LocalToken) {
        self.journal_unprepared(claim);
        let live = self.calls.claim(claim);
        if let Some(upload) = live.live_log.as_ref().and_then(|log| log.publishing.as_ref()) {
            upload.abort();
        }
        if live.task.is_none()
            && let Some(command) = live.last_command.clone()
        {
            // Stopped before it was prepared: the log says why.
            let scope = self.containment.new_scope();
            self.start_execution(claim, scope).log().write_note(&command.log_line());
        }
        let is_stopped = self.calls.claim(claim).is_kill_requested();
        let view = is_stopped.then(|| self.rules.claims().find(|view| view.claim == claim)).flatten();
        let loss = view.and_then(|view| view.state.loss());
        if let (Some(loss), Some(task)) = (loss, &self.calls.claim(claim).task) {
            task.write_note(loss_note(loss));
        }
        let live = self.calls.claim(claim);
        let Some(task) = live.task.clone().filter(|task| task.has_artifacts() || task.has_log()) else {
            let event = ClaimEvent::Uploaded(UploadStatus::Complete);
            live.timeline.on_event(&event, self.config.clock.now());
            return self.handle_event(Event::Claim(claim, event));
        };
        crash_point("before-upload");
        // A lost claim is not reported.
        let lease = if loss.is_some() { watch::channel(None).1 } else { live.lease() };
        let source = live.source;
        let (counters, clock, seed) = (Arc::clone(&self.control.counters), self.config.clock, self.seed ^ claim.0);
        let storage = Arc::clone(&self.history.source(source).storage);
        let source = self.source_name(source).to_owned();
        self.calls.spawn_claim_call(claim, |held| {
            let uploader = Uploader { claim: held, counters, seed, storage, source, lease, clock };
            calls::upload_results(uploader, claim, task)
        });
    }
}
