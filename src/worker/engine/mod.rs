//! The engine: sends events to the rules, performs their effects (`effects.rs`), and turns the results into events
//! (`call_results.rs`).

mod call_results;
mod effects;
mod journaling;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, mpsc, watch};
use tokio::task::JoinSet;

use crate::domain::claim::ClaimEvent;
use crate::domain::id::{LocalToken, Run, ServiceId, SourceId};
use crate::domain::journal::EntryId;
use crate::domain::poll::UnreadPoll;
use crate::domain::refusal::Refusal;
use crate::domain::service_supervisor::ServiceAvailability;
use crate::domain::time::Instant as Moment;
use crate::domain::worker::{self as rules, Event, ExitReason, HostResources, RecoveredClaim, SourceSpec};
use crate::handler::sidecar::{SidecarContext, SidecarStatus};
use crate::host::clock::Clock;
use crate::host::containment::Containment;
use crate::host::crash_points::crash_point;
use crate::host::journal::Journal;
use crate::host::name_lock::NameLock;
use crate::host::resources;
use crate::host::work_dir::{WorkDir, WorkDirLock};
use crate::limits::HANDLERS_DROP_TIMEOUT;
use crate::source::{CallError, SourceEvent};

use super::calls::{self, CallResult};
use super::claim_runtime::{ClaimRuntime, PolledMessage, TraceRecording};
use super::close_sources;
use super::counters::WorkerCounters;
use super::handler_runtime::HandlerRuntime;
use super::host_probe::HostProbe;
use super::recent_outcomes::RecentOutcomes;
use super::restart_recovery;
use super::sidecars::Sidecars;
use super::snapshot::{NoticeReceived, SourceActivity};
use super::status::{Note, RecoverySummary};
use super::{ClaimingState, Command, Control, ControlRequest, SourceBinding, Worker, WorkerConfig};

/// In the work directory.
const SIDECARS_DIR: &str = "sidecars";

pub(super) struct Engine {
    pub(super) rules: rules::Worker,
    pub(super) config: WorkerConfig,
    work_dir: WorkDir,
    work_dir_lock: WorkDirLock,
    /// Why the work directory counts as lost.
    pub(super) work_dir_lost_reason: Option<String>,
    /// Directories of earlier tasks that could not be removed.
    pub(super) unremoved_count: usize,
    host_probe: HostProbe,
    pub(super) clock: Clock,
    pub(super) sources: Vec<SourceBinding>,
    containment: Containment,
    requests: mpsc::Receiver<ControlRequest>,
    pub(super) control: Control,
    pub(super) calls: JoinSet<CallResult>,
    threads: HandlerRuntime,
    pub(super) sidecars: Sidecars,
    messages: HashMap<LocalToken, PolledMessage>,
    pub(super) claims: HashMap<LocalToken, ClaimRuntime>,
    /// Claims whose processes may remain.
    pub(super) pending_cleanup: BTreeMap<LocalToken, Run>,
    /// The oldest unread poll of each source, as journaled.
    pub(super) journaled_polls: Vec<Option<UnreadPoll>>,
    pub(super) source_activity: Vec<SourceActivity>,
    pub(super) recent_outcomes: RecentOutcomes,
    pub(super) started_at: Moment,
    pub(super) resources: HostResources,
    /// One measurement at a time.
    measuring: Arc<Semaphore>,
    /// The operator who gave the last command.
    pub(super) note: Option<Note>,
    pub(super) notice: Option<NoticeReceived>,
    last_token: u64,
    seed: u64,
    /// Whether the rules want claims of each source.
    claiming_enabled: Vec<bool>,
    exit: Option<ExitReason>,
    pub(super) journal: Journal,
    /// The claimant of each source in the journal.
    pub(super) claimants: Vec<Box<str>>,
    _name_locks: Vec<NameLock>,
    pub(super) recovery: RecoverySummary,
    /// Outcomes of a previous process; sent to the rules first.
    recovered_claims: Vec<RecoveredClaim>,
    /// When a previous process sent the oldest unread poll of each source.
    recovered_polls: Vec<Option<Duration>>,
}

impl Engine {
    pub(super) fn start(worker: Worker) -> std::io::Result<Self> {
        let Worker { config: settings, sources: feeds, requests: orders, control } = worker;
        let unusable = |error: std::io::Error| {
            std::io::Error::new(error.kind(), format!("cannot use the work directory: {error}"))
        };
        let folder = WorkDir::acquire(&settings.work_dir).map_err(unusable)?;
        let claimants: Vec<Box<str>> = feeds.iter().map(|feed| feed.source.claimant().into()).collect();
        let names = restart_recovery::lock_worker_names(&claimants)?;
        tracing::info!(path = %folder.path().display(), "work directory");
        let past = restart_recovery::recover_previous_process(folder.path(), &claimants)?;
        // The directory, and what is named after it, belongs to this worker only.
        let hold = folder.work_dir_lock()?;
        let containment = Containment::probe(&hold.identity(), settings.containment)?;
        // After the kill, since a previous process's payloads may have written there until then.
        crash_point("startup-processes-killed");
        let aside = folder.remove_task_dirs().map_err(unusable)?;
        crash_point("startup-dirs-cleared");
        let restart_recovery::RecoveredState {
            journal,
            recovery,
            recovered_claims: left_over,
            recovered_polls: polls_left,
        } = past.start_journal(hold.clone(), &claimants);
        // Nobody else sets it.
        drop(control.containment.set(containment.clone()));
        let seed = settings.seed.unwrap_or_else(|| uuid::Uuid::new_v4().as_u64_pair().0);
        let mut rules = rules::Worker::new(settings.policy(), &source_specs(&feeds), seed);
        let own = !settings.clock.is_tokio();
        let threads = if own { HandlerRuntime::dedicated(settings.handler_threads)? } else { HandlerRuntime::shared() };
        let feed_count = feeds.len();
        let services = folder.path().join(SIDECARS_DIR);
        let last_recovered = left_over.len() as u64;
        let besides = Sidecars::start(
            &feeds,
            |index| {
                let (context, handle) = SidecarContext::channel(services.clone(), settings.clock, containment.clone());
                (context.journaled(journal.clone(), EntryId(last_recovered + 1 + index as u64)), handle)
            },
            &threads,
        );
        for (beside, _) in besides.status_receivers() {
            besides
                .source_indexes(beside)
                .iter()
                .for_each(|feed| rules.set_availability(SourceId::from_index(*feed), ServiceAvailability::Down));
        }
        Ok(Self {
            rules,
            claiming_enabled: vec![true; feeds.len()],
            sidecars: besides,
            source_activity: feeds.iter().map(|_| SourceActivity::default()).collect(),
            recent_outcomes: RecentOutcomes::default(),
            started_at: settings.clock.now(),
            resources: resources::measure(folder.tasks_dir()),
            measuring: Arc::new(Semaphore::new(1)),
            note: None,
            notice: None,
            clock: settings.clock,
            config: settings,
            host_probe: HostProbe::new(folder.tasks_dir()),
            work_dir: folder,
            work_dir_lock: hold,
            work_dir_lost_reason: None,
            unremoved_count: aside,
            containment,
            sources: feeds,
            requests: orders,
            control,
            calls: JoinSet::new(),
            threads,
            messages: HashMap::new(),
            claims: HashMap::new(),
            pending_cleanup: BTreeMap::new(),
            journaled_polls: vec![None; claimants.len()],
            // Journal entries of sidecars have tokens too.
            last_token: last_recovered + feed_count as u64,
            seed,
            exit: None,
            journal,
            claimants,
            _name_locks: names,
            recovery,
            recovered_claims: left_over,
            recovered_polls: polls_left,
        })
    }

    pub(super) fn spawn_measurement(&mut self) {
        let (tasks, hold) = (self.work_dir.tasks_dir().to_owned(), self.work_dir_lock.clone());
        self.calls.spawn(calls::measure_resources(tasks, hold, Arc::clone(&self.measuring)));
    }

    pub(super) fn containment(&self) -> Containment {
        self.containment.clone()
    }

    pub(super) async fn run(mut self) -> std::io::Result<ExitReason> {
        for feed in &self.sources {
            tracing::info!(source = feed.name, "source: {}", feed.source.describe());
        }
        let wake: Arc<Notify> = Arc::clone(&self.control.wake);
        let left_over = std::mem::take(&mut self.recovered_claims);
        left_over.iter().for_each(|left| {
            drop(self.claims.insert(left.token, ClaimRuntime::recovered(left.source, left.run.clone())))
        });
        self.handle_event(Event::ClaimsRecovered(left_over));
        let polls_left = std::mem::take(&mut self.recovered_polls);
        self.restore_unread_polls(polls_left);
        self.log_recovery();
        self.announce_capacity();
        for index in 0..self.sources.len() {
            self.await_source_event(SourceId::from_index(index));
        }
        for (beside, word) in self.sidecars.status_receivers() {
            self.calls.spawn(calls::sidecar_changed(beside, word));
        }
        self.handle_event(Event::ResourcesMeasured(self.resources));
        self.spawn_measurement();
        self.handle_event(Event::Tick);
        loop {
            while let Some(effect) = self.rules.next_effect() {
                self.perform(effect);
            }
            self.journal_unread_polls();
            if let Some(exit) = self.exit {
                tracing::info!(exit = exit.as_str(), "the worker exits: {}", self.control.counts());
                if tokio::time::timeout(HANDLERS_DROP_TIMEOUT, self.calls.shutdown()).await.is_err() {
                    tracing::warn!("a handler does not stop when dropped; its processes may remain");
                }
                self.journal.flush().await;
                if exit == ExitReason::Aborted {
                    self.sidecars.kill().await;
                } else {
                    let sources = self.sources.iter().map(|feed| Arc::clone(&feed.source)).collect();
                    close_sources::close_all(sources).await;
                    self.sidecars.stop().await;
                }
                return Ok(exit);
            }
            let deadline = self.rules.next_deadline();
            let clock = self.clock;
            // First, since a series of ready calls must not delay a reclaim.
            if deadline.is_some_and(|at| clock.now() >= at) {
                self.handle_event(Event::Tick);
                continue;
            }
            tokio::select! {
                biased;
                Some(request) = self.requests.recv() => request(&mut self),
                Some(back) = self.calls.join_next() => self.on_call_joined(back),
                () = async { match deadline {
                    Some(at) => clock.sleep_until(at).await,
                    None => std::future::pending().await,
                } } => self.handle_event(Event::Tick),
                () = wake.notified() => {
                    for source in 0..self.sources.len() {
                        self.handle_event(Event::Wake(SourceId::from_index(source)));
                    }
                }
            }
        }
    }

    pub(super) fn handle_event(&mut self, event: Event) {
        self.rules.handle(event, self.clock.now());
        let asking = matches!(self.rules.claiming(), ClaimingState::Polling | ClaimingState::AtCapacity);
        for ((view, feed), wanted) in self.rules.sources().zip(&self.sources).zip(&mut self.claiming_enabled) {
            let wanting = asking && view.availability == ServiceAvailability::Up;
            if std::mem::replace(wanted, wanting) && !wanting {
                feed.source.pause();
            }
        }
    }

    pub(super) fn apply_command(&mut self, command: Command, note: Note) {
        tracing::info!(by = note.by, note = note.text, "command: {command}");
        let in_time = |span: Option<Duration>| span.map(|span| self.clock.now().plus(span));
        let event = match command {
            Command::Pause { span } => Event::Pause { until: in_time(span) },
            Command::Resume => Event::Resume,
            Command::Drain { within } => Event::Drain { deadline: in_time(within) },
            Command::Release { within } => Event::Release { deadline: in_time(within) },
            Command::Terminate { deadline } => {
                let at = self.clock.now();
                self.notice.get_or_insert(NoticeReceived { at, last_ended_at: None });
                Event::TerminationNotice { deadline }
            }
            Command::Abort => Event::Abort,
        };
        self.note = Some(note).filter(|_| command != Command::Resume);
        self.handle_event(event);
    }

    pub(super) fn reconfigure(&mut self, settings: WorkerConfig) {
        let WorkerConfig { work_dir, seed, clock, recorder, .. } = self.config.clone();
        self.config = WorkerConfig { work_dir, seed, clock, recorder, ..settings };
        self.announce_capacity();
        self.handle_event(Event::Reconfigured(Box::new(self.config.policy())));
        self.handle_event(Event::ResourcesMeasured(self.resources));
    }

    fn next_token(&mut self) -> LocalToken {
        self.last_token += 1;
        LocalToken(self.last_token)
    }

    fn announce_capacity(&self) {
        self.sources.iter().for_each(|feed| feed.source.set_capacity(self.config.capacity));
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
        for index in self.sidecars.source_indexes(sidecar).to_vec() {
            self.handle_event(Event::ServiceAvailabilityChanged { source: SourceId::from_index(index), availability });
        }
    }

    fn on_source_event(&mut self, source: SourceId, news: SourceEvent) {
        match news {
            SourceEvent::Lost(runs) => {
                for claim in runs.iter().filter_map(|run| self.claim_on(source, run)).collect::<Vec<_>>() {
                    self.handle_event(Event::Claim(claim, ClaimEvent::Lost));
                }
            }
            // A run that is not held here needs no stop.
            SourceEvent::CancelRequested(run) => {
                if let Some(claim) = self.claim_on(source, &run) {
                    self.handle_event(Event::Claim(claim, ClaimEvent::StatusChecked(Ok(true))));
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

    fn claim_on(&self, source: SourceId, run: &Run) -> Option<LocalToken> {
        let is_held = |live: &ClaimRuntime| live.source == source && live.run == *run && live.claim.is_some();
        self.claims.iter().find(|(_, live)| is_held(live)).map(|(claim, _)| *claim)
    }

    pub(super) fn log_source_refusal(&mut self, source: SourceId, error: CallError) -> Refusal {
        self.count_for_source(source, |counts| counts.refusals += 1);
        self.source_activity[source.index()].on_refusal(self.clock.now(), &error.message);
        tracing::warn!(source = self.source_name(source), refusal = %error.refusal, "{}", error.message);
        error.refusal
    }

    /// Recovery is optional: missing scopes are logged once.
    fn log_recovery_refusal(&mut self, source: SourceId, error: CallError) -> Refusal {
        let activity = &mut self.source_activity[source.index()];
        if error.refusal == Refusal::Denied && std::mem::replace(&mut activity.recovery_denied, true) {
            return error.refusal;
        }
        self.log_source_refusal(source, error)
    }

    fn trace_recording(&self) -> TraceRecording {
        if self.config.recorder.is_some() { TraceRecording::On } else { TraceRecording::Off }
    }

    pub(super) fn counters(&self) -> &WorkerCounters {
        &self.control.counters
    }
}

/// The rules perform actions of open claims only.
pub(super) fn open_claim(claims: &mut HashMap<LocalToken, ClaimRuntime>, claim: LocalToken) -> &mut ClaimRuntime {
    let Some(live) = claims.get_mut(&claim) else { unreachable!("{claim:?} is not open") };
    live
}

/// Sources with equal service ids share one number.
fn source_specs(feeds: &[SourceBinding]) -> Vec<SourceSpec> {
    let names: Vec<String> = feeds.iter().map(|feed| feed.source.service_id()).collect();
    let first = |name: &String| names.iter().position(|other| other == name).unwrap_or_default();
    let number = |name: &String| ServiceId(u16::try_from(first(name)).unwrap_or(u16::MAX));
    feeds
        .iter()
        .zip(&names)
        .map(|(feed, name)| SourceSpec { capabilities: feed.source.capabilities(), service: number(name) })
        .collect()
}
