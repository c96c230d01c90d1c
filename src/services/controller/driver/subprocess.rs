//! Driver: workers as process groups of this host, each in its own cgroup where cgroups v2 are available.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};

use super::worker_logs::WorkerLogs;
use super::{Driver, DriverError, ListedWorker, StartError, StopMode, WorkerExit, WorkerSpec, WorkerState};
use crate::controller::state_store::{StateStore, WorkerPid, WorkerRecord};
use journeyman_domain::group::Key;
use journeyman_domain::journal::BootId;
use journeyman_platform::host::containment::children::{self, ChildRegistration, StartedChild};
use journeyman_platform::host::containment::{Cgroup, WorkerCgroups, command_prefix, prepare_entry};
use journeyman_platform::host::process::{self, ProcessStat};
use journeyman_platform::host::program_path::find_program;
use journeyman_platform::host::remove_tree::remove_tree;
use journeyman_platform::tasks::blocking;

/// Everything that it does reads or writes files, of `/proc` too, and so is off the controller's threads.
pub(super) struct SubprocessDriver(Arc<Processes>);

struct Processes {
    /// Program and arguments.
    command: Vec<String>,
    store: Arc<StateStore>,
    logs: WorkerLogs,
    cgroups: Option<WorkerCgroups>,
    /// Children of this process. Workers of a previous controller are observed by pid and start time instead.
    children: Mutex<Children>,
}

type Children = BTreeMap<String, (Child, ChildRegistration)>;

impl SubprocessDriver {
    pub(super) fn new(pool: &str, command: Vec<String>, folder: PathBuf, store: Arc<StateStore>) -> Self {
        let cgroups = WorkerCgroups::probe(&format!("{pool} {}", folder.display()));
        match &cgroups {
            Ok(_) => tracing::info!(pool, "each worker runs in its own cgroup, so all of its processes stop with it"),
            Err(why) => tracing::warn!(
                pool,
                "no cgroups, so processes that leave a worker's process group may outlive it: {why}"
            ),
        }
        let (logs, cgroups, children) = (WorkerLogs { folder }, cgroups.ok(), Mutex::default());
        Self(Arc::new(Processes { command, store, logs, cgroups, children }))
    }

    async fn run<T: Send + 'static, E: From<io::Error> + Send + 'static>(
        &self,
        work: impl FnOnce(&Processes) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E> {
        let processes = Arc::clone(&self.0);
        self.0.store.run(move |_| Ok(work(&processes))).await?
    }
}

impl Processes {
    fn list_workers(&self) -> io::Result<Vec<ListedWorker>> {
        let mut children = self.children.lock();
        let (records, stop_requests) = (self.store.workers()?, self.store.stop_requests()?);
        let mut listed = Vec::with_capacity(records.len());
        for record in records {
            let Some(key) = Key::new(&record.key) else { continue };
            if record.process.is_none() {
                // Its start failed, or the controller was killed meanwhile.
                if remove_cgroup(&record) {
                    remove_tree(&self.worker_dir(&record.id))?;
                    self.store.remove_worker(&record.id)?;
                }
                continue;
            }
            let has_processes = || record.cgroup.clone().is_some_and(|path| !Cgroup::at(path).processes().is_empty());
            let state = match exit_reason(&mut children, &record)? {
                None => WorkerState::Running,
                // A shell that does not `exec` its last program exits before that does.
                Some(_) if stop_requests.contains(&record.id) && has_processes() => WorkerState::Running,
                Some(reason) => {
                    kill_remaining(&record)?;
                    let (log, log_tail) = (Some(WorkerLogs::file_name(&record.id)), self.logs.tail(&record.id));
                    WorkerState::Exited(WorkerExit { reason, log, log_tail })
                }
            };
            self.logs.truncate(&record.id);
            listed.push(ListedWorker { id: record.id, key, state, detail: None });
        }
        Ok(listed)
    }

    fn worker_dir(&self, id: &str) -> PathBuf {
        self.logs.folder.join(format!("{id}.work"))
    }

    fn create_cgroup(&self, id: &str) -> Option<Cgroup> {
        let created = self.cgroups.as_ref()?.create(id);
        created.inspect_err(|error| tracing::warn!(worker = id, "no cgroup for this worker: {error}")).ok()
    }

    fn start_worker(&self, spec: WorkerSpec) -> Result<(), StartError> {
        let WorkerSpec { id, key, variables } = spec;
        let Some((program, arguments)) = self.command.split_first() else {
            return Err(StartError::Worker("no command is configured".to_owned()));
        };
        // Fail the start with a clear error; the shim could report it only in the log.
        let own = || inherited_variables().find(|(name, _)| *name == "PATH")?.1.into_string().ok();
        let path = variables.get("PATH").cloned().or_else(own);
        find_program(program, &path.into_iter().map(|path| ("PATH".to_owned(), path)).collect(), Path::new(""))
            .map_err(cannot_run)?;
        let mut children = self.children.lock();
        let cgroup = self.create_cgroup(&id);
        if cgroup.is_some() {
            drop(tokio::task::spawn_blocking(prepare_entry));
        }
        let record = WorkerRecord::new(&id, &key, cgroup.as_ref().map(|cgroup| cgroup.path().to_owned()));
        let child = self.spawn_worker(cgroup, (program, arguments), record, variables)?;
        children.insert(id, child);
        Ok(())
    }

    fn spawn_worker(
        &self,
        cgroup: Option<Cgroup>,
        (program, arguments): (&String, &[String]),
        record: WorkerRecord,
        variables: BTreeMap<String, String>,
    ) -> Result<(Child, ChildRegistration), StartError> {
        let log = self.logs.open(&record.id)?;
        // Recorded before the spawn, so that the next controller kills a worker whose pid was not recorded.
        self.store.put_worker(&record)?;
        let dir = std::path::absolute(self.worker_dir(&record.id))?;
        std::fs::DirBuilder::new().mode(0o700).create(&dir)?;
        let mut command = match &cgroup {
            Some(cgroup) => {
                let (shim, arguments) = command_prefix(cgroup)?;
                let mut command = Command::new(shim);
                command.args(arguments).arg(program);
                command
            }
            None => Command::new(program),
        };
        command.args(arguments).env_clear().envs(inherited_variables()).envs(variables).env("WORKER_DIR", dir);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0);
        let started = children::start_child(None, || command.spawn(), Child::id);
        let StartedChild { child, registration } = started.map_err(cannot_run)?;
        let pid = child.id().and_then(|id| i32::try_from(id).ok());
        let Some(pid) = pid else { return Err(StartError::Worker("exited at once".to_owned())) };
        let recorded = || {
            // The next list reports a worker that has exited already.
            let start_ticks = start_ticks(pid)?.unwrap_or_default();
            let process = Some(WorkerPid { pid, start_ticks });
            self.store.put_worker(&WorkerRecord { process, ..record.clone() })
        };
        recorded().inspect_err(|_| signal_group(&record.id, pid, Signal::KILL))?;
        Ok((child, registration))
    }

    fn stop_worker(&self, id: &str, mode: StopMode) -> io::Result<()> {
        let mut children = self.children.lock();
        let records = self.store.workers()?;
        let Some(record) = records.iter().find(|record| record.id == id) else { return Ok(()) };
        let running = if is_running(record)? { record.process } else { None };
        match (mode, running) {
            (StopMode::Terminate, Some(process)) => {
                // Before the signal: a shell may exit at once, and its worker keeps its time. A call that timed out on a slow disk
                // may have sent it, and a second TERM makes a worker release what it runs.
                if self.store.add_stop_request(id)? {
                    signal_group(id, process.pid, Signal::TERM);
                }
            }
            (StopMode::Terminate, None) => {}
            (StopMode::Kill, Some(process)) => {
                signal_group(id, process.pid, Signal::KILL);
                kill_cgroup(record);
            }
            (StopMode::Kill, None) => kill_remaining(record)?,
            (StopMode::Remove, _) => {
                children.remove(id);
                if !remove_cgroup(record) {
                    return Err(io::Error::other("its processes are still exiting"));
                }
                self.store.remove_worker(id)?;
                self.logs.prune(|log| log == id || records.iter().all(|record| record.id != log));
            }
        }
        Ok(())
    }
}

impl Driver for SubprocessDriver {
    async fn list(&self) -> Result<Vec<ListedWorker>, DriverError> {
        self.run(|processes| Ok(processes.list_workers()?)).await
    }

    async fn start(&self, spec: WorkerSpec) -> Result<(), StartError> {
        self.run(|processes| processes.start_worker(spec)).await
    }

    async fn stop(&self, id: String, _key: Key, mode: StopMode) -> Result<(), DriverError> {
        if mode == StopMode::Remove {
            let dir = self.0.worker_dir(&id);
            // It may have many files, and other calls do not wait for them.
            let removed = blocking(move || remove_tree(&dir)).await;
            removed.map_err(io::Error::other)?.map_err(|error| {
                DriverError(format!("cannot remove its directory {}: {error}", self.0.worker_dir(&id).display()))
            })?;
        }
        self.run(move |processes| Ok(processes.stop_worker(&id, mode)?)).await
    }
}

/// What a program that a driver starts inherits from the environment of the controller.
pub(super) fn inherited_variables() -> impl Iterator<Item = (&'static str, std::ffi::OsString)> {
    ["PATH", "HOME", "LANG", "USER"].into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)))
}

fn cannot_run(error: impl std::fmt::Display) -> StartError {
    StartError::Worker(error.to_string())
}

fn is_this_boot(record: &WorkerRecord) -> bool {
    static BOOT: LazyLock<BootId> = LazyLock::new(journeyman_platform::host::journal::current_boot);
    *BOOT.0 == *record.boot
}

fn is_running(record: &WorkerRecord) -> io::Result<bool> {
    let Some(process) = record.process.filter(|_| is_this_boot(record)) else { return Ok(false) };
    Ok(start_ticks(process.pid)? == Some(process.start_ticks))
}

/// Kills what an exited worker has left behind.
fn kill_remaining(record: &WorkerRecord) -> io::Result<()> {
    // The pid may be reused.
    if let Some(WorkerPid { pid, .. }) = record.process
        && is_this_boot(record)
        && start_ticks(pid)?.is_none()
    {
        signal_group(&record.id, pid, Signal::KILL);
    }
    kill_cgroup(record);
    Ok(())
}

fn kill_cgroup(record: &WorkerRecord) {
    if let Some(path) = &record.cgroup {
        Cgroup::at(path.clone()).kill();
    }
}

/// False while processes of it are exiting.
fn remove_cgroup(record: &WorkerRecord) -> bool {
    kill_cgroup(record);
    record.cgroup.clone().is_none_or(|path| Cgroup::at(path).remove().is_ok())
}

fn exit_reason(children: &mut Children, record: &WorkerRecord) -> io::Result<Option<String>> {
    if let Some((child, _)) = children.get_mut(&record.id) {
        return Ok(child.try_wait()?.map(|status| status.to_string()));
    }
    Ok((!is_running(record)?).then(|| "exited without a controller to read its status".to_owned()))
}

fn signal_group(id: &str, pid: i32, signal: Signal) {
    if let Some(group) = Pid::from_raw(pid)
        && let Err(error) = kill_process_group(group, signal)
        && error != rustix::io::Errno::SRCH
    {
        tracing::warn!(worker = id, %error, "cannot signal the worker");
    }
}

/// `None` if the process is gone or a zombie. In clock ticks since boot.
fn start_ticks(pid: i32) -> io::Result<Option<u64>> {
    Ok(ProcessStat::try_read(pid)?
        .filter(|stat| stat.state == process::ProcessState::Running)
        .map(|stat| stat.start_ticks))
}
