//! Driver: workers as process groups of this host, each in its own cgroup where cgroups v2 are available.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};

use super::stop_requests::is_stop_requested;
use super::worker_logs::WorkerLogs;
use super::worker_records::{PendingStart, RecordFile, WorkerRecord, WorkerRecords, remove_file};
use super::{Driver, DriverError, ListedWorker, StopMode, WorkerExit, WorkerSpec, WorkerState};
use crate::domain::group::Key;
use crate::host::containment::children::{self, ChildRegistration, StartedChild};
use crate::host::containment::{WorkerCgroup, WorkerCgroups};
use crate::host::process::{self, ProcessStat};
use crate::host::program_path::find_program;
use crate::limits::{CONTROLLER_RECONCILE_INTERVAL, DRIVER_START_RECORD_TIMEOUT};

#[derive(Debug, Clone)]
pub struct SubprocessConfig {
    pub command: Vec<String>,
}

enum WorkerProcess {
    Child { child: Box<Child>, _known: ChildRegistration },
    Adopted,
}

struct LocalWorker {
    record: WorkerRecord,
    process: WorkerProcess,
    is_stopping: bool,
    exit: Option<WorkerExit>,
}

pub(super) struct SubprocessDriver {
    config: SubprocessConfig,
    folder: PathBuf,
    records: WorkerRecords,
    logs: WorkerLogs,
    groups: Option<WorkerCgroups>,
    active: AtomicBool,
    boot: String,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    workers: BTreeMap<String, LocalWorker>,
    starting: BTreeSet<String>,
    records_read_at: Option<SystemTime>,
    is_cleaned: bool,
    dying_groups: Vec<WorkerCgroup>,
}

impl State {
    fn kill_group(&mut self, folder: Option<PathBuf>) {
        if let Some(folder) = folder {
            let group = WorkerCgroup::at(folder);
            group.kill();
            if !group.try_remove() {
                self.dying_groups.push(group);
            }
        }
    }
}

impl SubprocessDriver {
    pub(super) fn new(pool: &str, program: SubprocessConfig, folder: PathBuf) -> Self {
        let groups = WorkerCgroups::probe(&format!("{pool} {}", folder.display()));
        match &groups {
            Ok(_) => {
                tracing::info!(pool, "each worker runs in its own cgroup, so all of its processes stop with it")
            }
            Err(why) => {
                tracing::warn!(
                    pool,
                    "no cgroups, so processes that leave a worker's process group may outlive it: {why}"
                );
            }
        }
        let (records, logs) = (WorkerRecords::new(folder.clone()), WorkerLogs::new(folder.clone()));
        let (active, state) = (AtomicBool::new(false), Mutex::default());
        Self { config: program, folder, records, logs, groups: groups.ok(), active, boot: boot_id(), state }
    }

    fn is_active(&self) -> bool {
        self.active.load(Ordering::Acquire)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn load_records(&self, state: &mut State) -> io::Result<()> {
        let changed = self.records.modified_at()?;
        if state.records_read_at == Some(changed) {
            return Ok(());
        }
        let (acts, mut is_open) = (self.is_active(), false);
        for note in self.records.load()? {
            match note {
                RecordFile::Started(WorkerRecord { id, .. }) | RecordFile::Pending(PendingStart { id, .. }, _)
                    if state.workers.contains_key(&id) || state.starting.contains(&id) => {}
                RecordFile::Started(record) => self.adopt(state, record, acts)?,
                RecordFile::Pending(begun, age) if acts => is_open |= !self.resolve_pending(state, begun, age)?,
                RecordFile::Unreadable(path) if acts => remove_file(&path),
                RecordFile::Pending(..) | RecordFile::Unreadable(_) => {}
            }
        }
        let is_old = changed.elapsed().is_ok_and(|age| age > MTIME_GRANULARITY);
        state.records_read_at = (is_old && !is_open).then_some(changed);
        Ok(())
    }

    fn adopt(&self, state: &mut State, record: WorkerRecord, acts: bool) -> io::Result<()> {
        let is_told = is_stop_requested(&self.folder, &record.id)?;
        let end = if self.is_running(&record)? || (is_told && self.has_running_group(&record)?) {
            None
        } else if !acts {
            return Ok(());
        } else {
            state.kill_group(record.group.clone());
            if is_told {
                self.records.remove(&record.id);
                return Ok(());
            }
            let how =
                if record.boot == self.boot { "while no controller was running" } else { "when the host restarted" };
            Some(self.exit_of(&record.id, format!("exited {how}")))
        };
        let worker = LocalWorker { process: WorkerProcess::Adopted, is_stopping: is_told, exit: end, record };
        state.workers.insert(worker.record.id.clone(), worker);
        Ok(())
    }

    fn resolve_pending(&self, state: &mut State, begun: PendingStart, age: Duration) -> io::Result<bool> {
        let is_this_boot = begun.boot == self.boot;
        if let Some(ProcessStat { pid, start_ticks: started, .. }) =
            if is_this_boot { find_by_worker_id(&begun.id)? } else { None }
        {
            let record = begun.started(pid, started);
            self.records.store(&record)?;
            tracing::info!(worker = begun.id, pid, "adopted a worker whose start was interrupted");
            self.adopt(state, record, true)?;
            return Ok(true);
        }
        let is_over = !is_this_boot || age > DRIVER_START_RECORD_TIMEOUT;
        if is_over {
            state.kill_group(begun.group);
            self.records.remove(&begun.id);
        }
        Ok(is_over)
    }

    fn exit_of(&self, id: &str, how: String) -> WorkerExit {
        WorkerExit { reason: how, log_tail: self.logs.tail(id), log: Some(WorkerLogs::file_name(id)) }
    }

    fn is_running(&self, record: &WorkerRecord) -> io::Result<bool> {
        Ok(record.boot == self.boot && start_ticks(record.pid)? == Some(record.started))
    }

    fn has_running_group(&self, record: &WorkerRecord) -> io::Result<bool> {
        // The pid may be reused.
        let is_others = ProcessStat::try_read(record.pid)?.is_some_and(|leader| leader.start_ticks != record.started);
        if record.boot != self.boot || is_others {
            return Ok(false);
        }
        let of_group = |stat: &ProcessStat| stat.group == record.pid && stat.state == process::ProcessState::Running;
        Ok(ProcessStat::read_all()?.iter().any(of_group))
    }

    fn kill_unrecorded_groups(&self, state: &mut State) {
        let Some(groups) = self.groups.as_ref().filter(|_| !state.is_cleaned) else { return };
        let is_known = |id: &str, state: &State| {
            let is_one = state.workers.contains_key(id) || state.starting.contains(id);
            is_one || state.dying_groups.iter().any(|group| group.path().ends_with(id))
        };
        for (id, folder) in groups.older_than(DRIVER_START_RECORD_TIMEOUT) {
            if !is_known(&id, state) {
                tracing::warn!(worker = id, "killing a cgroup without a worker record");
                state.kill_group(Some(folder));
            }
        }
        state.is_cleaned = groups.older_than(Duration::ZERO).iter().all(|(id, _)| is_known(id, state));
    }

    fn list_workers(&self) -> io::Result<Vec<ListedWorker>> {
        let mut state = self.state();
        let acts = self.is_active();
        self.load_records(&mut state)?;
        if acts {
            state.dying_groups.retain(|group| !group.try_remove());
            self.kill_unrecorded_groups(&mut state);
        } else {
            let is_over = |life: &mut WorkerProcess| match life {
                WorkerProcess::Child { child, .. } => !matches!(child.try_wait(), Ok(None)),
                WorkerProcess::Adopted => true,
            };
            state.workers.retain(|id, worker| !is_over(&mut worker.process) || self.records.contains(id));
        }
        let mut found = Vec::with_capacity(state.workers.len());
        for LocalWorker { record, process: life, is_stopping: is_told, exit: end } in state.workers.values_mut() {
            let Some(key) = Key::new(&record.key) else { continue };
            if end.is_some() {
                found.push(ListedWorker { id: record.id.clone(), key, state: state_of(end) });
                continue;
            }
            let how = match life {
                WorkerProcess::Child { child, .. } => match child.try_wait() {
                    Ok(None) => None,
                    Ok(Some(status)) => Some(status.to_string()),
                    Err(error) => Some(error.to_string()),
                },
                WorkerProcess::Adopted => (!self.is_running(record)?).then(|| "the process is gone".to_owned()),
            };
            *is_told = *is_told || (how.is_some() && is_stop_requested(&self.folder, &record.id)?);
            // A shell that does not `exec` its last program exits before that does.
            let goes_on = how.is_some() && *is_told && self.has_running_group(record)?;
            let how = how.filter(|_| !goes_on);
            if acts {
                self.logs.truncate(&record.id);
                if how.is_some() {
                    kill_remaining(record)?;
                }
            }
            let seen = how.map(|how| self.exit_of(&record.id, how));
            found.push(ListedWorker { id: record.id.clone(), key, state: state_of(&seen) });
            if acts {
                *end = seen;
            }
        }
        Ok(found)
    }

    fn make_group(&self, id: &str) -> Option<WorkerCgroup> {
        let created = self.groups.as_ref()?.create(id);
        created.inspect_err(|error| tracing::warn!(worker = id, "no cgroup for this worker: {error}")).ok()
    }

    fn start_worker(&self, assignment: WorkerSpec) -> Result<(), DriverError> {
        let WorkerSpec { id, key, variables } = assignment;
        let Some((program, arguments)) = self.config.command.split_first() else {
            return Err(DriverError("no command is configured".to_owned()));
        };
        // Fail the start with a clear error; the shim could report it only in the log.
        let own = || inherited_variables().find(|(name, _)| *name == "PATH")?.1.into_string().ok();
        let path = variables.get("PATH").cloned().or_else(own);
        find_program(program, &path.into_iter().map(|path| ("PATH".to_owned(), path)).collect(), Path::new(""))?;
        self.state().starting.insert(id.clone());
        let group = self.make_group(&id);
        let begun = PendingStart {
            id,
            key: key.as_str().to_owned(),
            boot: self.boot.clone(),
            group: group.as_ref().map(|group| group.path().to_owned()),
        };
        let started = self.spawn_worker(group, (program, arguments), &begun, variables);
        let mut state = self.state();
        state.starting.remove(&begun.id);
        match started {
            Ok(worker) => drop(state.workers.insert(begun.id, worker)),
            Err(why) => {
                state.kill_group(begun.group);
                self.records.remove(&begun.id);
                return Err(why);
            }
        }
        Ok(())
    }

    fn spawn_worker(
        &self,
        group: Option<WorkerCgroup>,
        (program, arguments): (&String, &[String]),
        begun: &PendingStart,
        variables: BTreeMap<String, String>,
    ) -> Result<LocalWorker, DriverError> {
        let log = self.logs.open(&begun.id)?;
        // Recorded before the spawn, so that the next controller searches for it.
        self.records.store_pending(begun)?;
        let mut command = match &group {
            Some(group) => {
                let (shim, arguments) = group.command_prefix()?;
                let mut command = Command::new(shim);
                command.args(arguments).arg(program);
                command
            }
            None => Command::new(program),
        };
        command.args(arguments).env_clear().envs(inherited_variables()).envs(variables);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0);
        let StartedChild { child, registration: known } = children::start_child(None, || command.spawn(), Child::id)?;
        let pid = child.id().and_then(|id| i32::try_from(id).ok());
        let Some(pid) = pid else { return Err(DriverError("exited at once".to_owned())) };
        let written = || {
            // The next list reports a worker that has exited already.
            let record = begun.started(pid, start_ticks(pid)?.unwrap_or_default());
            self.records.store(&record).map(|()| record)
        };
        let record = written().inspect_err(|_| {
            // It holds no request yet.
            if let Some(group) = Pid::from_raw(pid) {
                kill_process_group(group, Signal::KILL).ok();
            }
        })?;
        let life = WorkerProcess::Child { child: Box::new(child), _known: known };
        Ok(LocalWorker { record, process: life, is_stopping: false, exit: None })
    }

    fn stop_worker(&self, id: &str, stop: StopMode) -> io::Result<()> {
        let mut state = self.state();
        let Some(LocalWorker { record, is_stopping: is_told, .. }) = state.workers.get_mut(id) else { return Ok(()) };
        match stop {
            StopMode::Terminate => {
                if self.is_running(record)? {
                    *is_told = true;
                    signal_group(record, Signal::TERM);
                }
            }
            StopMode::Kill if self.is_running(record)? => {
                signal_group(record, Signal::KILL);
                kill_cgroup(record);
            }
            StopMode::Kill => kill_remaining(record)?,
            StopMode::Remove => {
                let group = record.group.clone();
                state.workers.remove(id);
                state.kill_group(group);
                self.logs.prune(|id| !state.workers.contains_key(id));
                drop(state);
                self.records.remove(id);
            }
        }
        Ok(())
    }
}

impl Driver for SubprocessDriver {
    const LIST_INTERVAL: Duration = CONTROLLER_RECONCILE_INTERVAL;

    fn set_active(&self, in_charge: bool) {
        if self.active.swap(in_charge, Ordering::AcqRel) != in_charge {
            let mut state = self.state();
            (state.records_read_at, state.is_cleaned) = (None, false);
        }
    }

    async fn list(&self) -> Result<Vec<ListedWorker>, DriverError> {
        Ok(self.list_workers()?)
    }

    async fn start(&self, assignment: WorkerSpec) -> Result<(), DriverError> {
        self.start_worker(assignment)
    }

    async fn stop(&self, id: String, _key: Key, stop: StopMode) -> Result<(), DriverError> {
        Ok(self.stop_worker(&id, stop)?)
    }
}

const MTIME_GRANULARITY: Duration = Duration::from_millis(100);

pub(super) fn inherited_variables() -> impl Iterator<Item = (&'static str, std::ffi::OsString)> {
    ["PATH", "HOME", "LANG", "USER"].into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)))
}

fn state_of(end: &Option<WorkerExit>) -> WorkerState {
    end.clone().map_or(WorkerState::Running, WorkerState::Exited)
}

fn kill_remaining(record: &WorkerRecord) -> io::Result<()> {
    if start_ticks(record.pid)?.is_none() {
        signal_group(record, Signal::KILL);
    }
    kill_cgroup(record);
    Ok(())
}

fn kill_cgroup(record: &WorkerRecord) {
    if let Some(folder) = &record.group {
        WorkerCgroup::at(folder.clone()).kill();
    }
}

fn signal_group(record: &WorkerRecord, signal: Signal) {
    if let Some(group) = Pid::from_raw(record.pid)
        && let Err(error) = kill_process_group(group, signal)
        && error != rustix::io::Errno::SRCH
    {
        tracing::warn!(worker = record.id, %error, "cannot signal the worker");
    }
}

fn find_by_worker_id(id: &str) -> io::Result<Option<ProcessStat>> {
    let leads = |stat: &ProcessStat| stat.state == process::ProcessState::Running && stat.pid == stat.group;
    let is_it = |stat: &ProcessStat| {
        leads(stat) && process::environment_variable(stat.pid, "WORKER_ID").is_some_and(|told| told == id)
    };
    Ok(ProcessStat::read_all()?.into_iter().filter(is_it).min_by_key(|stat| stat.start_ticks))
}

fn boot_id() -> String {
    let crate::domain::journal::BootId(boot) = crate::host::journal::current_boot();
    boot.into()
}

fn start_ticks(pid: i32) -> io::Result<Option<u64>> {
    Ok(ProcessStat::try_read(pid)?
        .filter(|stat| stat.state == process::ProcessState::Running)
        .map(|stat| stat.start_ticks))
}
