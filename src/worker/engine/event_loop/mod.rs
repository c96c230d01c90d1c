//! The engine: sends events to the rules, performs their effects (`effects.rs`), and turns the results into events
//! (`call_results.rs`).

mod call_results;
mod effects;
mod journaling;

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::yield_now;

use crate::handler::sidecar::{SidecarContext, SidecarStatus};
use crate::source::{CallError, SourceEvent};
use journeyman_domain::claim::{ClaimEvent, LossReason};
use journeyman_domain::id::{LocalToken, ServiceId, SourceId};
use journeyman_domain::journal::EntryId;
use journeyman_domain::limits::{LAUNCHED_EVENTS_MAX, SOURCES_CLOSE_TIMEOUT};
use journeyman_domain::refusal::Refusal;
use journeyman_domain::service_supervisor::ServiceAvailability;
use journeyman_domain::time::Instant as DomainInstant;
use journeyman_domain::worker::{self as rules, Event, ExitReason, HostResources, SourceSpec};
use journeyman_platform::host::clock::or_pending;
use journeyman_platform::host::containment::Containment;
use journeyman_platform::host::crash_points::crash_point;
use journeyman_platform::host::resources;
use journeyman_platform::host::work_dir::{WorkDir, WorkDirLock};

use super::calls::CallResult;
use super::catch_panic::{Panicked, catch_panic};
use super::claim_runtime::{ClaimRuntime, TraceRecording};
use super::handler_runtime::HandlerRuntime;
use super::history::{History, NoticeReceived};
use super::host_probe::HostProbe;
use super::restart_recovery::{self, PreviousProcess};
use super::running_calls::RunningCalls;
use super::sidecars::Sidecars;
use super::status::Note;
use super::task_view::TaskView;
use super::{ClaimingState, Command, Control, ControlRequest, SourceBinding, Worker, WorkerConfig, calls};

pub(super) use journaling::ClaimJournal;

/// The folder in the work directory.
const SIDECARS_DIR: &str = "sidecars";
/// Between two looks at the clock and at commands.
const CALL_RESULTS_BATCH_MAX: usize = 64;

pub(super) struct Engine {
    pub(super) rules: rules::Worker,
    pub(super) config: WorkerConfig,
    pub(super) sources: Vec<SourceBinding>,
    pub(super) control: Control,
    requests: mpsc::Receiver<ControlRequest>,
    /// Claims whose work runs elsewhere.
    launched: mpsc::Receiver<LocalToken>,
    pub(super) launched_sender: mpsc::Sender<LocalToken>,
    pub(super) calls: RunningCalls,
    pub(super) journal: ClaimJournal,
    pub(super) history: History,
    pub(super) sidecars: Sidecars,
    work_dir: WorkDir,
    work_dir_lock: WorkDirLock,
    pub(super) containment: Containment,
    host_probe: HostProbe,
    pub(super) resources: HostResources,
    /// One measurement at a time, and one reading for a status.
    measuring: Arc<Semaphore>,
    pub(super) reading_memory: Arc<Semaphore>,
    /// The rules want claims of each source.
    claiming_enabled: Vec<bool>,
    pub(super) seed: u64,
    /// Work that another worker can go on with is left to it.
    hands_over: bool,
    exit: Option<ExitReason>,
}

impl Engine {
    pub(super) async fn start(worker: Worker) -> std::io::Result<Self> {
        let Worker { config, sources, requests, control } = worker;
        let unusable = |error: std::io::Error| {
            std::io::Error::new(error.kind(), format!("cannot use the work directory: {error}"))
        };
        let work_dir = WorkDir::acquire(&config.work_dir).map_err(unusable)?;
        let claimants: Vec<Box<str>> = sources.iter().map(|binding| binding.source.claimant().into()).collect();
        let id_locks = restart_recovery::lock_worker_ids(&claimants)?;
        tracing::info!(path = %work_dir.path().display(), "work directory");
        let previous = PreviousProcess::recover(work_dir.path(), claimants)?;
        restart_recovery::end_leftovers(&sources).await?;
        // The directory, and what is named after it, belongs to this worker only.
        let work_dir_lock = work_dir.work_dir_lock()?;
        let containment = Containment::probe(&work_dir_lock.identity(), config.containment)?;
        // After the kill, since a previous process's payloads may have written there until then.
        crash_point("startup-processes-killed");
        work_dir.remove_task_dirs().map_err(unusable)?;
        crash_point("startup-dirs-cleared");
        let journal = previous.start_journal(work_dir_lock.clone(), id_locks);
        // Set here only.
        drop(control.containment.set(containment.clone()));
        let seed = config.seed.unwrap_or_else(|| uuid::Uuid::new_v4().as_u64_pair().0);
        let mut rules = rules::Worker::new(config.policy(), &source_specs(&sources), seed);
        let handlers = if config.clock.is_tokio() {
            HandlerRuntime::shared()
        } else {
            HandlerRuntime::dedicated(config.handler_threads)?
        };
        let (launched_sender, launched) = mpsc::channel(LAUNCHED_EVENTS_MAX);
        // Journal entries of sidecars have tokens too.
        let last_recovered = journal.recovered_claims.len() as u64;
        let sidecars_dir = work_dir.path().join(SIDECARS_DIR);
        let new_context = |index: usize| {
            let (context, handle) = SidecarContext::channel(sidecars_dir.clone(), config.clock, containment.clone());
            let entry = EntryId(last_recovered + 1 + index as u64);
            (context.journaled(journal.records.clone(), entry), handle)
        };
        let sidecars = Sidecars::start(&sources, new_context, &handlers);
        for (sidecar, _) in sidecars.status_receivers() {
            for source in sidecars.sources(sidecar) {
                rules.set_availability(*source, ServiceAvailability::Down);
            }
        }
        Ok(Self {
            rules,
            calls: RunningCalls::new(handlers, last_recovered + sources.len() as u64),
            history: History::new(sources.len(), Arc::clone(&control.counters), config.clock.now()),
            resources: resources::measure(work_dir.tasks_dir()),
            host_probe: HostProbe::new(work_dir.tasks_dir()),
            measuring: Arc::new(Semaphore::new(1)),
            reading_memory: Arc::new(Semaphore::new(1)),
            claiming_enabled: vec![true; sources.len()],
            hands_over: false,
            exit: None,
            config,
            sources,
            control,
            requests,
            launched,
            launched_sender,
            journal,
            sidecars,
            work_dir,
            work_dir_lock,
            containment,
            seed,
        })
    }

    pub(super) fn now(&self) -> DomainInstant {
        self.config.clock.now()
    }

    pub(super) fn spawn_measurement(&mut self) {
        let (tasks_dir, lock) = (self.work_dir.tasks_dir().to_owned(), self.work_dir_lock.clone());
        self.calls.spawn(calls::measure_resources(tasks_dir, lock, Arc::clone(&self.measuring)));
    }

    pub(super) async fn run(mut self) -> std::io::Result<ExitReason> {
        for binding in &self.sources {
            tracing::info!(source = binding.name, "source: {}", binding.source.describe());
        }
        let recovered = std::mem::take(&mut self.journal.recovered_claims);
        for claim in &recovered {
            self.calls.claims.insert(claim.token, ClaimRuntime::recovered(claim.source, claim.run.clone()));
        }
        self.handle_event(Event::ClaimsRecovered(recovered));
        self.restore_unread_polls();
        self.log_recovery();
        self.announce_capacity();
        for index in 0..self.sources.len() {
            self.await_source_event(SourceId::from_index(index));
        }
        for (sidecar, status) in self.sidecars.status_receivers() {
            self.calls.spawn(calls::sidecar_changed(sidecar, status));
        }
        self.handle_event(Event::ResourcesMeasured(self.resources));
        self.spawn_measurement();
        self.handle_event(Event::Tick);
        let clock = self.config.clock;
        loop {
            self.perform_effects();
            // Without waiting: a poll that is not journaled is recovered once more.
            for index in 0..self.sources.len() {
                self.journal_unread_poll(SourceId::from_index(index));
            }
            if let Some(exit) = self.exit {
                self.shut_down(exit).await;
                return Ok(exit);
            }
            let deadline = [self.rules.next_deadline(), self.history.requests.due].into_iter().flatten().min();
            // First, since a series of ready calls must not delay a reclaim.
            if deadline.is_some_and(|at| clock.now() >= at) {
                if self.history.requests.due == deadline {
                    self.history.requests.log();
                }
                self.handle_event(Event::Tick);
                continue;
            }
            tokio::select! {
                biased;
                Some(request) = self.requests.recv() => request(&mut self),
                Some(claim) = self.launched.recv() => {
                    self.handle_event(Event::Launched { claim });
                    self.hand_over();
                }
                Some(result) = self.calls.next_result() => self.on_call_results(result).await,
                () = or_pending(deadline.map(|at| clock.sleep_until(at))) => {}
            }
        }
    }

    /// Calls of several claims that end in one turn of the runtime are handled together: one poll takes the slots of them all.
    async fn on_call_results(&mut self, first: CallResult) {
        if self.calls.claims.len() > 1 {
            yield_now().await;
        }
        self.on_call_result(first);
        for _ in 1..CALL_RESULTS_BATCH_MAX {
            let Some(result) = self.calls.try_next_result() else { break };
            self.perform_effects();
            self.on_call_result(result);
        }
    }

    fn perform_effects(&mut self) {
        while let Some(effect) = self.rules.next_effect() {
            self.perform(effect);
        }
    }

    async fn shut_down(&mut self, exit: ExitReason) {
        tracing::info!(exit = exit.as_str(), "the worker exits: {}", self.control.counts());
        self.history.requests.log();
        if exit != ExitReason::Aborted {
            self.calls.finish_discards().await;
        }
        self.calls.shut_down().await;
        self.journal.records.flush().await;
        if exit == ExitReason::Aborted {
            self.sidecars.kill().await;
        } else {
            close_all(&self.sources).await;
            self.sidecars.stop().await;
        }
    }

    pub(super) fn handle_event(&mut self, event: Event) {
        self.rules.handle(event, self.config.clock.now());
        let claiming = matches!(self.rules.claiming(), ClaimingState::Polling | ClaimingState::AtCapacity);
        for ((view, binding), enabled) in self.rules.sources().iter().zip(&self.sources).zip(&mut self.claiming_enabled)
        {
            let wanted = claiming && view.availability == ServiceAvailability::Up;
            if std::mem::replace(enabled, wanted) && !wanted {
                binding.source.pause();
            }
        }
    }

    pub(super) fn apply_command(&mut self, command: Command, note: Note) {
        tracing::info!(by = note.by, note = note.text, "command: {command}");
        let now = self.now();
        let after = |span: Option<Duration>| span.map(|span| now.plus(span));
        let event = match command {
            Command::Pause { span } => Event::Pause { until: after(span) },
            Command::Resume => Event::Resume,
            Command::Drain { within } => Event::Drain { deadline: after(within) },
            Command::Release { within } => Event::Release { deadline: after(within) },
            Command::Terminate { deadline } => {
                self.history.notice.get_or_insert(NoticeReceived { at: now, last_ended_at: None });
                Event::TerminationNotice { deadline }
            }
            Command::Abort => Event::Abort,
        };
        self.history.note = Some(note).filter(|_| command != Command::Resume);
        self.hands_over |= matches!(command, Command::Drain { .. });
        self.handle_event(event);
        self.hand_over();
        if let Some(message) = self.open_poll_message() {
            tracing::info!("no task is left; {message}");
        }
    }

    fn hand_over(&mut self) {
        if self.hands_over {
            let is_left = |live: &ClaimRuntime| live.task.as_ref().is_some_and(TaskView::is_handed_over);
            let claims = self.calls.claims.iter().filter(|(_, live)| is_left(live)).map(|(claim, _)| *claim);
            self.handle_event(Event::HandOver(claims.collect()));
        }
    }

    pub(super) fn reconfigure(&mut self, new: WorkerConfig) {
        let WorkerConfig { work_dir, seed, clock, recorder, announcer, live_logs, .. } = self.config.clone();
        self.config = WorkerConfig { work_dir, seed, clock, recorder, announcer, live_logs, ..new };
        self.announce_capacity();
        self.handle_event(Event::Reconfigured(Box::new(self.config.policy())));
        self.handle_event(Event::ResourcesMeasured(self.resources));
    }

    fn announce_capacity(&self) {
        self.sources.iter().for_each(|binding| binding.source.set_capacity(self.config.capacity));
    }

    fn await_source_event(&mut self, id: SourceId) {
        self.calls.spawn(calls::next_source_event(Arc::clone(&self.sources[id.index()].source), id));
    }

    fn on_sidecar_changed(&mut self, sidecar: usize, status: Option<watch::Receiver<SidecarStatus>>) {
        let availability = status.map_or(ServiceAvailability::Down, |mut status| {
            let availability = status.borrow_and_update().availability;
            self.calls.spawn(calls::sidecar_changed(sidecar, status));
            availability
        });
        for source in self.sidecars.sources(sidecar).to_vec() {
            self.handle_event(Event::ServiceAvailabilityChanged { source, availability });
        }
    }

    fn on_source_event(&mut self, source: SourceId, event: SourceEvent) {
        match event {
            SourceEvent::Lost(runs) => {
                for claim in runs.iter().filter_map(|run| self.calls.find(source, run)).collect::<Vec<_>>() {
                    self.handle_event(Event::Claim(claim, ClaimEvent::Lost));
                }
            }
            // A run that is not held here needs no stop.
            SourceEvent::CancelRequested(run) => {
                if let Some(claim) = self.calls.find(source, &run) {
                    self.handle_event(Event::Claim(claim, ClaimEvent::StatusChecked(Ok(Some(LossReason::Canceled)))));
                }
            }
            SourceEvent::Terms(run, terms) => {
                if let Some(claim) = self.calls.find(source, &run) {
                    self.handle_event(Event::Claim(claim, ClaimEvent::Terms(terms)));
                }
            }
            SourceEvent::Exhausted { what } if self.sources.len() == 1 => {
                tracing::info!(source = self.source_name(source), "{what}: finishing the held claims, then exiting");
                self.handle_event(Event::Drain { deadline: None });
            }
            SourceEvent::Exhausted { what } => {
                tracing::warn!(source = self.source_name(source), "{what}: polling again from time to time");
            }
        }
    }

    pub(super) fn log_source_refusal(&mut self, source: SourceId, error: CallError) -> Refusal {
        let now = self.now();
        self.history.count(source, |counts| counts.refusals += 1);
        self.history.source(source).on_refusal(now, &error.message);
        tracing::warn!(source = self.source_name(source), refusal = %error.refusal, "{}", error.message);
        error.refusal
    }

    /// Recovery is optional: missing scopes are logged once.
    fn log_recovery_refusal(&mut self, source: SourceId, error: CallError) -> Refusal {
        let activity = self.history.source(source);
        if error.refusal == Refusal::Denied && std::mem::replace(&mut activity.recovery_denied, true) {
            return error.refusal;
        }
        self.log_source_refusal(source, error)
    }

    pub(super) fn is_connection_scoped(&self, source: SourceId) -> bool {
        self.sources[source.index()].source.capabilities().connection_scoped
    }

    fn trace_recording(&self) -> TraceRecording {
        if self.config.recorder.is_some() { TraceRecording::On } else { TraceRecording::Off }
    }
}

/// All close at the same time, so that none delays another.
async fn close_all(bindings: &[SourceBinding]) {
    let closing = bindings.iter().map(|binding| async move {
        if let Err(Panicked(panic)) = catch_panic(binding.source.close()).await {
            tracing::error!(panic, source = binding.name, "a source panicked in close");
        }
    });
    if tokio::time::timeout(SOURCES_CLOSE_TIMEOUT, join_all(closing)).await.is_err() {
        tracing::warn!(
            "a source did not close within {SOURCES_CLOSE_TIMEOUT:?}; what was reported last may be delivered again"
        );
    }
}

/// Sources with equal service ids share one number.
fn source_specs(bindings: &[SourceBinding]) -> Vec<SourceSpec> {
    let ids: Vec<String> = bindings.iter().map(|binding| binding.source.service_id()).collect();
    let number = |id: &String| ids.iter().position(|other| other == id).and_then(|first| u16::try_from(first).ok());
    let services = ids.iter().map(|id| ServiceId(number(id).unwrap_or(u16::MAX)));
    let specs = bindings.iter().zip(services);
    specs.map(|(binding, service)| SourceSpec { capabilities: binding.source.capabilities(), service }).collect()
}
