//! What the rules want done, each thing in a task of its own where it takes time.

use std::future::Future;
use std::sync::Arc;

use super::super::calls::{self, Back};
use super::super::guard::discard;
use super::super::live::{Job, Live, Surroundings};
use super::super::prompt::Prompt;
use super::super::settle::Store;
use super::super::timeline::{self, Phase};
use super::Engine;
use crate::domain::claim::{KillCause, Settled};
use crate::domain::id::{SourceId, Token};
use crate::domain::journal::{EntryId, Held, Keeping};
use crate::domain::outcome::Verdict;
use crate::domain::worker::{Effect, Event};
use crate::handler::RunsOn;
use crate::host::clock::Clock;
use crate::host::crash::crash_point;
use crate::source;

impl Engine {
    pub(super) fn perform(&mut self, effect: Effect) {
        if let Some(begun) = timeline::begins(&effect) {
            let now = self.clock.now();
            if let Some(live) = self.live.get_mut(&begun.claim) {
                live.timeline.begin(begun.phase, now);
            }
        }
        match effect {
            Effect::Open(id) => self.source_call(id, |source, clock| calls::open(source, id, clock)),
            Effect::Poll { source: id, lane, max } => {
                self.control.pulse.claim();
                let noted = self.note_polls(id);
                self.source_call(id, |source, clock| calls::poll(source, id, lane, max, noted, clock));
            }
            Effect::Recover { source: id, held, asked } => {
                self.source_call(id, |source, clock| calls::recover(source, id, held, asked, clock));
            }
            Effect::Claim(claim) => self.claim(claim),
            Effect::TakeOver(claim) => self.take_over(claim),
            Effect::Delete(message) => {
                crash_point("before-delete");
                self.delete(message);
            }
            Effect::Forget(message) => {
                self.entries.remove(&message);
                // A claim that was brought but not taken in hand goes by the same name.
                if self.live.get(&message).is_some_and(|live| live.message.is_none() && live.job.is_none()) {
                    self.live.remove(&message);
                }
            }
            Effect::Prepare(claim) => self.prepare(claim),
            Effect::Execute(claim) => self.execute(claim),
            Effect::Kill { claim, cause, grace } => {
                if cause == KillCause::Shutdown {
                    crash_point("handing-back");
                }
                let now = self.clock.now();
                if let Some(live) = self.live.get_mut(&claim) {
                    live.kill(cause, grace, now);
                    if let Some(prepared) = live.prepared.take() {
                        discard(prepared);
                        live.timeline.end(&[Phase::Prepare, Phase::End], now);
                        self.happened(Event::Ended { claim, verdict: Verdict::Internal });
                    }
                }
            }
            Effect::Settle(claim) => self.settle(claim),
            Effect::Report { claim, outcome, timeout } => {
                self.note_decided(claim, outcome);
                let begun = self.live.get_mut(&claim).and_then(|live| {
                    live.leave_untouched_unless_begun();
                    live.report.take()
                });
                if begun.is_none() {
                    crash_point("before-report");
                }
                self.claim_call(claim, |source, held, _| calls::report(source, claim, held, outcome, begun, timeout));
            }
            Effect::Reclaim { claim, timeout } => {
                self.claim_call(claim, |source, held, clock| calls::reclaim(source, claim, held, timeout, clock));
            }
            Effect::Check(claim) => self.claim_call(claim, |source, held, _| calls::check(source, claim, held)),
            Effect::Extended { claim, lease_ends } => {
                if let Some(live) = self.live.get(&claim) {
                    live.extended(lease_ends);
                }
            }
            Effect::Close { claim, run, end } => self.close(claim, &run, end),
            Effect::Look => {
                self.calls.spawn(calls::look(self.examination.clone()));
            }
            Effect::Alert(alert) => self.alert(&alert),
            Effect::Exit(exit) => self.exit = Some(exit),
        }
    }

    fn source_call<F, C>(&mut self, id: SourceId, call: C)
    where
        C: FnOnce(Arc<dyn source::Source>, Clock) -> F,
        F: Future<Output = Back> + Send + 'static,
    {
        if let Some(feed) = self.feeds.get(usize::from(id.0)) {
            let future = call(Arc::clone(&feed.source), self.clock);
            self.calls.spawn(future);
        }
    }

    fn claim_call<F, C>(&mut self, claim: Token, call: C)
    where
        C: FnOnce(Arc<dyn source::Source>, source::Claim, Clock) -> F,
        F: Future<Output = Back> + Send + 'static,
    {
        let Some(live) = self.live.get_mut(&claim) else { return };
        let (Some(feed), Some(held)) = (self.feeds.get(live.feed), live.claim.clone()) else { return };
        let future = call(Arc::clone(&feed.source), held, self.clock);
        live.keep(self.calls.spawn(future));
    }

    fn claim(&mut self, claim: Token) {
        let live = match (self.live.get_mut(&claim), self.entries.get(&claim)) {
            (Some(live), _) => live,
            (None, Some(entry)) => {
                let mut live = Live::new(entry.source);
                live.message.clone_from(&entry.message);
                live.timeline.begin(Phase::Claim, self.clock.now());
                self.live.entry(claim).or_insert(live)
            }
            (None, None) => return,
        };
        let (Some(feed), Some(message)) = (self.feeds.get(live.feed), live.message.clone()) else { return };
        self.calls.spawn(calls::claim(Arc::clone(&feed.source), claim, message, self.clock));
    }

    fn delete(&mut self, message: Token) {
        let Some(entry) = self.entries.get(&message) else { return };
        let Some(feed) = self.feeds.get(entry.source) else { return };
        self.calls.spawn(calls::delete(Arc::clone(&feed.source), message, Arc::clone(entry)));
    }

    fn prepare(&mut self, claim: Token) {
        let Some(live) = self.live.get_mut(&claim) else { return };
        let (Some(feed), Some(held)) = (self.feeds.get(live.feed), live.claim.clone()) else { return };
        let settings = &self.settings;
        let (journal, entry) = (self.journal.clone(), EntryId(claim.0));
        let enclosure = self.containment.enclosure().witnessed_by(move |leader| journal.leads(entry, leader));
        let claimant = self.claimants.get(live.feed).cloned().unwrap_or_default();
        let (run, journal) = (held.run().clone(), self.journal.clone());
        let hold = move |remains| {
            journal.hold(entry, Held { run: run.clone(), claimant: claimant.clone(), remains: Some(remains) })
        };
        // I27: a payload that nobody has written down would outlive this worker.
        let (enclosure, recorded) = match Keeping::of(feed.source.manner()) {
            Keeping::AtOnce => {
                let recorded = hold(enclosure.name().remains());
                (enclosure, Some(recorded))
            }
            Keeping::WithProcesses => (enclosure.registered_by(hold), None),
        };
        let (base, spares) = (self.folder.tasks(), self.spares.clone());
        let around = Surroundings { base, spares, log: settings.log, clock: self.clock, enclosure };
        let job = live.begin(claim, held.run(), feed, around);
        let trace_id = live.trace.map(|trace| trace.trace_id());
        let trace_id = trace_id.as_ref().map(tracing::field::display);
        // Requests may be thousands a second: the line about each one's end is enough.
        if feed.source.manner().ends_with_worker {
            tracing::debug!(claim.run = %held.run(), source = feed.name, trace_id, "claimed");
        } else {
            tracing::info!(claim.run = %held.run(), source = feed.name, trace_id, "claimed");
        }
        let (handler, starts) = (Arc::clone(&feed.handler), self.starting.clone());
        let prompt = Prompt::of(&feed.source, &held);
        let call = calls::run(handler, recorded, claim, job.context, prompt, starts);
        let runs_on = feed.handler.runs_on();
        self.run_on(runs_on, call);
    }

    fn execute(&mut self, claim: Token) {
        let Some(live) = self.live.get_mut(&claim) else { return };
        let (Some(prepared), Some(job)) = (live.prepared.take(), live.job.as_ref()) else { return };
        let Some(feed) = self.feeds.get(live.feed) else { return };
        let (runs_on, call) = (feed.handler.runs_on(), calls::execute(prepared, claim, job.context.clone()));
        self.run_on(runs_on, call);
    }

    fn run_on(&mut self, threads: RunsOn, call: impl Future<Output = Back> + Send + 'static) {
        match threads {
            RunsOn::OwnThreads => self.calls.spawn_on(call, self.threads.handle()),
            RunsOn::LeaseThreads => self.calls.spawn(call),
        };
    }

    fn settle(&mut self, claim: Token) {
        self.note_unprepared(claim);
        let Some(live) = self.live.get_mut(&claim) else { return };
        let (Some(feed), Some(held)) = (self.feeds.get(live.feed), live.claim.clone()) else { return };
        if live.job.is_none() && live.ordered.is_some() {
            // Ended before anything of it was prepared: its log says why.
            let (enclosure, settings) = (self.containment.enclosure(), &self.settings);
            let (base, spares) = (self.folder.tasks(), self.spares.clone());
            let around = Surroundings { base, spares, log: settings.log, clock: self.clock, enclosure };
            live.begin(claim, held.run(), feed, around);
            if let (Some(job), Some(said)) = (&live.job, &live.ordered) {
                job.context.log().note(&said.sentence());
            }
        }
        let something = |job: &Job| !job.context.artifacts().is_empty() || !job.context.log().is_empty();
        let Some(job) = live.job.clone().filter(something) else {
            live.timeline.end(&[Phase::Upload], self.clock.now());
            return self.happened(Event::Settled { claim, settled: Settled::Clean });
        };
        crash_point("before-storing");
        let store = Store {
            source: Arc::clone(&feed.source),
            claim: held,
            counters: Arc::clone(&self.control.counters),
            seed: self.seed ^ claim.0,
        };
        live.keep(self.calls.spawn(calls::settle(store, claim, job)));
    }
}
