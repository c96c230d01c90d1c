//! Performs the effects of the rules, each in a task of its own where it takes time.

use std::future::Future;
use std::sync::Arc;

use super::super::calls::{self, CallResult};
use super::super::catch_panic::drop_guarded;
use super::super::claim_runtime::{ClaimRuntime, Execution, ExecutionSetup};
use super::super::timeline::{self, ClaimPhase};
use super::super::uploads::Uploader;
use super::Engine;
use crate::domain::claim::{KillCause, UploadStatus};
use crate::domain::id::{LocalToken, SourceId};
use crate::domain::journal::{ClaimRecord, EntryId, JournalTiming};
use crate::domain::outcome::ExecuteFailure;
use crate::domain::worker::{Effect, Event};
use crate::host::clock::Clock;
use crate::host::crash_points::crash_point;
use crate::host::journal::{FirstRecord, ProcessRecorder};
use crate::source;

impl Engine {
    pub(super) fn perform(&mut self, effect: Effect) {
        if let Some(begun) = timeline::phase_start(&effect) {
            let now = self.clock.now();
            if let Some(live) = self.claims.get_mut(&begun.claim) {
                live.timeline.start(begun.phase, now);
            }
        }
        match effect {
            Effect::Open(id) => self.spawn_source_call(id, |source, clock| calls::open(source, id, clock)),
            Effect::Poll { source: id, queue: lane, max } => {
                self.control.liveness.mark_claiming();
                let noted = self.journal_unread_poll(id);
                self.spawn_source_call(id, |source, clock| calls::poll(source, id, lane, max, noted, clock));
            }
            Effect::Recover { source: id, known_runs: held, newer_than } => {
                self.spawn_source_call(id, |source, clock| calls::recover(source, id, held, newer_than, clock));
            }
            Effect::Claim(claim) => self.claim(claim),
            Effect::TakeOver(claim) => self.take_over(claim),
            Effect::Delete(message) => {
                crash_point("before-delete");
                self.delete(message);
            }
            Effect::DropMessage(message) => {
                self.messages.remove(&message);
                // A grant that the rules did not take has the same token.
                if self.claims.get(&message).is_some_and(|live| live.message.is_none() && live.execution.is_none()) {
                    self.claims.remove(&message);
                }
            }
            Effect::Prepare(claim) => self.prepare(claim),
            Effect::Execute(claim) => self.execute(claim),
            Effect::Kill { claim, cause, grace } => {
                if cause == KillCause::Shutdown {
                    crash_point("releasing");
                }
                let now = self.clock.now();
                if let Some(live) = self.claims.get_mut(&claim) {
                    live.kill(cause, grace, now);
                    if let Some(prepared) = live.prepared.take() {
                        drop_guarded(prepared);
                        live.timeline.end(&[ClaimPhase::Prepare, ClaimPhase::End], now);
                        self.handle_event(Event::Ended { claim, verdict: Err(ExecuteFailure::Internal) });
                    }
                }
            }
            Effect::Upload(claim) => self.upload_results(claim),
            Effect::Report { claim, outcome, timeout } => {
                self.journal_outcome(claim, outcome);
                if let Some(live) = self.claims.get(&claim) {
                    live.mark_not_started();
                }
                crash_point("before-report");
                self.spawn_claim_call(claim, |held, _| calls::report(claim, held, outcome, timeout));
            }
            Effect::Reclaim { claim, timeout } => {
                self.spawn_claim_call(claim, |held, clock| calls::reclaim(claim, held, timeout, clock));
            }
            Effect::CheckStatus(claim) => self.spawn_claim_call(claim, |held, _| calls::check(claim, held)),
            Effect::UpdateLease { claim, expires_at: lease_ends } => {
                if let Some(live) = self.claims.get(&claim) {
                    live.set_expires_at(lease_ends);
                }
            }
            Effect::Close { claim, run, end } => self.close(claim, &run, end),
            Effect::ProbeHost => {
                self.calls.spawn(calls::probe_host(self.host_probe.clone()));
            }
            Effect::Alert(alert) => self.alert(&alert),
            Effect::Exit(exit) => self.exit = Some(exit),
        }
    }

    fn spawn_source_call<F, C>(&mut self, id: SourceId, call: C)
    where
        C: FnOnce(Arc<dyn source::Source>, Clock) -> F,
        F: Future<Output = CallResult> + Send + 'static,
    {
        let future = call(Arc::clone(&self.sources[id.index()].source), self.clock);
        self.calls.spawn(future);
    }

    fn spawn_claim_call<F, C>(&mut self, claim: LocalToken, call: C)
    where
        C: FnOnce(Arc<dyn source::Claim>, Clock) -> F,
        F: Future<Output = CallResult> + Send + 'static,
    {
        let Some(live) = self.claims.get_mut(&claim) else { return };
        let Some(held) = live.claim.clone() else { return };
        let future = call(held, self.clock);
        live.track_call(self.calls.spawn(future));
    }

    fn claim(&mut self, claim: LocalToken) {
        let live = match (self.claims.get_mut(&claim), self.messages.get(&claim)) {
            (Some(live), _) => live,
            (None, Some(entry)) => {
                let mut live = ClaimRuntime::new(entry.source_index);
                live.message.clone_from(&entry.message);
                live.timeline.start(ClaimPhase::Claim, self.clock.now());
                self.claims.entry(claim).or_insert(live)
            }
            (None, None) => return,
        };
        let Some(message) = live.message.clone() else { return };
        self.calls.spawn(calls::claim(Arc::clone(&self.sources[live.source_index].source), claim, message, self.clock));
    }

    fn delete(&mut self, message: LocalToken) {
        let Some(entry) = self.messages.get(&message) else { return };
        let source = Arc::clone(&self.sources[entry.source_index].source);
        self.calls.spawn(calls::delete(source, message, Arc::clone(entry)));
    }

    fn prepare(&mut self, claim: LocalToken) {
        let Some(live) = self.claims.get_mut(&claim) else { return };
        let Some(held) = live.claim.clone() else { return };
        let feed = &self.sources[live.source_index];
        let settings = &self.config;
        let claimant = self.claimants[live.source_index].clone();
        let (entry, run) = (EntryId(claim.0), held.run().clone());
        let new_scope =
            |first| self.containment.new_recorded_scope(ProcessRecorder::new(self.journal.clone(), entry, first));
        // I27: a payload that is not journaled would survive this worker unnoticed.
        let (enclosure, recorded) = match JournalTiming::of(feed.source.capabilities()) {
            JournalTiming::BeforePrepare => {
                let scope = new_scope(FirstRecord::Nothing);
                let claim = ClaimRecord { run, claimant, processes: Some(scope.name().to_record()) };
                (scope, Some(self.journal.record_claim(entry, claim)))
            }
            JournalTiming::BeforeFirstProcess => (new_scope(FirstRecord::Claim { run, claimant }), None),
        };
        let (tasks_dir, work_dir_lock) = (self.work_dir.tasks_dir(), self.work_dir_lock.clone());
        let around = ExecutionSetup { tasks_dir, work_dir_lock, log: settings.log, clock: self.clock, enclosure };
        let job = live.start_execution(claim, held.run(), feed, around);
        let trace_id = live.trace.map(|trace| trace.trace_id());
        let trace_id = trace_id.as_ref().map(tracing::field::display);
        // Requests may be thousands a second: the line about each one's end is enough.
        if feed.source.capabilities().connection_scoped {
            tracing::debug!(claim.run = %held.run(), source = feed.name, trace_id, "claimed");
        } else {
            tracing::info!(claim.run = %held.run(), source = feed.name, trace_id, "claimed");
        }
        let (handler, starts) = (Arc::clone(&feed.handler), self.payload_starts_sender.clone());
        let call = calls::prepare_and_execute(handler, recorded, claim, job.context, starts);
        self.calls.spawn_on(call, self.threads.handle());
    }

    fn execute(&mut self, claim: LocalToken) {
        let Some(live) = self.claims.get_mut(&claim) else { return };
        let (Some(prepared), Some(job)) = (live.prepared.take(), live.execution.as_ref()) else { return };
        let call = calls::execute(prepared, claim, job.context.clone());
        self.calls.spawn_on(call, self.threads.handle());
    }

    fn upload_results(&mut self, claim: LocalToken) {
        self.journal_unprepared(claim);
        let Some(live) = self.claims.get_mut(&claim) else { return };
        let Some(held) = live.claim.clone() else { return };
        let feed = &self.sources[live.source_index];
        if live.execution.is_none() && live.last_command.is_some() {
            // Stopped before it was prepared: the log says why.
            let (enclosure, settings) = (self.containment.new_scope(), &self.config);
            let (tasks_dir, work_dir_lock) = (self.work_dir.tasks_dir(), self.work_dir_lock.clone());
            let around = ExecutionSetup { tasks_dir, work_dir_lock, log: settings.log, clock: self.clock, enclosure };
            live.start_execution(claim, held.run(), feed, around);
            if let (Some(job), Some(said)) = (&live.execution, &live.last_command) {
                job.context.log().write_note(&said.log_line());
            }
        }
        let something = |job: &Execution| !job.context.artifacts().is_empty() || !job.context.log().is_empty();
        let Some(job) = live.execution.clone().filter(something) else {
            live.timeline.end(&[ClaimPhase::Upload], self.clock.now());
            return self.handle_event(Event::Uploaded { claim, status: UploadStatus::Complete });
        };
        crash_point("before-upload");
        let store = Uploader { claim: held, counters: Arc::clone(&self.control.counters), seed: self.seed ^ claim.0 };
        live.track_call(self.calls.spawn(calls::upload_results(store, claim, job)));
    }
}
