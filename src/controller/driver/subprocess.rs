//! Workers as processes of this host: each in a process group of its own, and in a control group where the host has them, with a
//! log of its own, and written down, so that the next controller finds those that a controller left.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Deserialize, Serialize};
use tokio::process::{Child, Command};

use super::logs::Logs;
use super::told::was_told;
use super::{Assignment, Driver, End, Found, Standing, Stop, Trouble};
use crate::domain::group::Key;
use crate::host::containment::children::{self, Known, Started};
use crate::host::containment::{self, ControlGroup, ControlGroups};
use crate::host::process::{self, Stat};
use crate::host::program::locate;
use crate::limits::{CONTROLLER_LOOK_EVERY, DRIVER_START_NOTED_MAX};

/// What is started.
#[derive(Debug, Clone)]
pub struct Program {
    /// The program and its arguments.
    pub command: Vec<String>,
}

/// By what one is found again.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Record {
    id: String,
    key: String,
    pid: i32,
    /// In clock ticks since the host was started: number and start together are nobody else's.
    started: u64,
    boot: String,
    /// The control group that it is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    group: Option<PathBuf>,
}

enum Life {
    Own { child: Box<Child>, _known: Known },
    Adopted,
}

struct Worker {
    record: Record,
    life: Life,
    /// It was told to go, and has its time for that: whoever it has started, too.
    is_told: bool,
    end: Option<End>,
}

/// The workers of one pool on this host.
pub(super) struct Subprocesses {
    program: Program,
    folder: PathBuf,
    logs: Logs,
    /// Where there are control groups.
    groups: Option<ControlGroups>,
    /// Whether anything is to be changed: another controller may have the pool.
    in_charge: AtomicBool,
    boot: String,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    workers: BTreeMap<String, Worker>,
    /// When the folder had last changed as it was last read; `None` where it may have since.
    read: Option<SystemTime>,
    /// Nothing is left of starts that an earlier controller was killed in.
    is_swept: bool,
    /// Control groups of workers that are gone. What was killed in one may take a moment to be gone, too.
    leaving: Vec<ControlGroup>,
}

impl State {
    /// Takes the control group away, now or when what was killed in it is gone.
    fn leave(&mut self, folder: Option<PathBuf>) {
        if let Some(folder) = folder {
            let group = ControlGroup::at(folder);
            group.kill();
            if !group.is_removed() {
                self.leaving.push(group);
            }
        }
    }
}

impl Subprocesses {
    /// To see who is there, and nothing else.
    pub(super) fn to_look(program: Program, folder: PathBuf) -> Self {
        let logs = Logs::new(folder.clone());
        let (in_charge, state) = (AtomicBool::new(false), Mutex::default());
        Self { program, folder, logs, groups: None, in_charge, boot: boot(), state }
    }

    pub(super) fn new(pool: &str, program: Program, folder: PathBuf) -> Self {
        let groups = ControlGroups::establish(&format!("{pool} {}", folder.display()));
        match &groups {
            Ok(_) => {
                tracing::info!(pool, "each worker is in a control group, by which all that it has started goes with it")
            }
            Err(why) => {
                tracing::warn!(
                    pool,
                    "workers have process groups alone, and what one puts elsewhere may outlive it: {why}"
                );
            }
        }
        Self { groups: groups.ok(), ..Self::to_look(program, folder) }
    }

    fn has_the_pool(&self) -> bool {
        self.in_charge.load(Ordering::Acquire)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in those that were written down by somebody else.
    fn read(&self, state: &mut State) -> io::Result<()> {
        let changed = std::fs::metadata(&self.folder)?.modified()?;
        if state.read == Some(changed) {
            return Ok(());
        }
        let acts = self.has_the_pool();
        for entry in std::fs::read_dir(&self.folder)? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let bytes = match std::fs::read(&path) {
                Ok(bytes) => bytes,
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::IsADirectory) => continue,
                // A worker that cannot be read of is none that is not there.
                Err(error) => return Err(io::Error::new(error.kind(), format!("{}: {error}", path.display()))),
            };
            match serde_json::from_slice::<Record>(&bytes) {
                Ok(record) if state.workers.contains_key(&record.id) => {}
                Ok(record) => {
                    let is_told = was_told(&self.folder, &record.id)?;
                    if self.is_there(&record)? || (is_told && self.is_followed(&record)?) {
                        let worker = Worker { life: Life::Adopted, is_told, end: None, record };
                        state.workers.insert(worker.record.id.clone(), worker);
                    } else if acts {
                        state.leave(record.group);
                        forget(&path);
                    }
                }
                Err(_) if acts => forget(&path),
                Err(_) => {}
            }
        }
        // What changes within a tick of the file system's clock does not show.
        let is_old = changed.elapsed().is_ok_and(|age| age > TICK);
        state.read = is_old.then_some(changed);
        Ok(())
    }

    fn is_there(&self, record: &Record) -> io::Result<bool> {
        Ok(record.boot == self.boot && started(record.pid)? == Some(record.started))
    }

    /// Whether any of those is there that were told to go together with a worker that has ended itself.
    fn is_followed(&self, record: &Record) -> io::Result<bool> {
        // Its number may be somebody else's by now.
        let is_others = Stat::seen(record.pid)?.is_some_and(|leader| leader.started != record.started);
        if record.boot != self.boot || is_others {
            return Ok(false);
        }
        let of_group = |stat: &Stat| stat.group == record.pid && stat.life == process::Life::Running;
        Ok(Stat::all()?.iter().any(of_group))
    }

    /// Ends what an earlier controller had started and was killed before it could write that down.
    fn sweep(&self, state: &mut State) {
        let Some(groups) = self.groups.as_ref().filter(|_| !state.is_swept) else { return };
        let is_known = |id: &str, state: &State| {
            state.workers.contains_key(id) || state.leaving.iter().any(|group| group.folder().ends_with(id))
        };
        for (id, folder) in groups.older_than(DRIVER_START_NOTED_MAX) {
            if !is_known(&id, state) {
                tracing::warn!(worker = id, "it was started by a controller that did not live to say so, and is ended");
                state.leave(Some(folder));
            }
        }
        state.is_swept = groups.older_than(Duration::ZERO).iter().all(|(id, _)| is_known(id, state));
    }

    fn look(&self) -> io::Result<Vec<Found>> {
        let mut state = self.state();
        let acts = self.has_the_pool();
        self.read(&mut state)?;
        if acts {
            state.leaving.retain(|group| !group.is_removed());
            self.sweep(&mut state);
        } else {
            // Whoever has the pool has seen the end of these, and forgotten them.
            let is_over = |life: &mut Life| match life {
                Life::Own { child, .. } => !matches!(child.try_wait(), Ok(None)),
                Life::Adopted => true,
            };
            state.workers.retain(|id, worker| !is_over(&mut worker.life) || self.path(id).exists());
        }
        let mut found = Vec::with_capacity(state.workers.len());
        for Worker { record, life, is_told, end } in state.workers.values_mut() {
            // A key that is none was written by somebody else.
            let Some(key) = Key::new(&record.key) else { continue };
            if end.is_some() {
                found.push(Found { id: record.id.clone(), key, standing: standing(end) });
                continue;
            }
            let how = match life {
                Life::Own { child, .. } => match child.try_wait() {
                    Ok(None) => None,
                    Ok(Some(status)) => Some(status.to_string()),
                    Err(error) => Some(error.to_string()),
                },
                Life::Adopted => (!self.is_there(record)?).then(|| "it is not there any more".to_owned()),
            };
            // Another controller may have told it.
            *is_told = *is_told || (how.is_some() && was_told(&self.folder, &record.id)?);
            // A shell that was told to go ends before the worker that it has started.
            let goes_on = how.is_some() && *is_told && self.is_followed(record)?;
            let how = how.filter(|_| !goes_on);
            if acts {
                self.logs.cut(&record.id);
                if how.is_some() {
                    end_what_is_left(record)?;
                }
            }
            let seen = how.map(|how| End {
                how,
                last_words: self.logs.last_words(&record.id),
                log: Some(Logs::name(&record.id)),
            });
            found.push(Found { id: record.id.clone(), key, standing: standing(&seen) });
            // Whoever has the pool by then ends what is left.
            if acts {
                *end = seen;
            }
        }
        Ok(found)
    }

    /// A control group for a worker, where there are any and the shell by which it is entered passes on what the worker is told.
    fn group_of(&self, id: &str, variables: &BTreeMap<String, String>) -> Option<ControlGroup> {
        let groups = self.groups.as_ref()?;
        if let Some(name) = variables.keys().find(|name| !containment::passes_on(name)) {
            tracing::warn!(
                worker = id,
                name,
                "it has a process group alone: no shell passes on a variable of this name"
            );
            return None;
        }
        let made = groups.make(id);
        made.inspect_err(|error| tracing::warn!(worker = id, "it has a process group alone: {error}")).ok()
    }

    fn start_now(&self, assignment: Assignment) -> Result<(), Trouble> {
        let Assignment { id, key, variables } = assignment;
        let Some((program, arguments)) = self.program.command.split_first() else {
            return Err(Trouble("no command is configured".to_owned()));
        };
        // A shell that does not find it could say so only in the log.
        let own = || usual().find(|(name, _)| *name == "PATH")?.1.into_string().ok();
        let path = variables.get("PATH").cloned().or_else(own);
        locate(program, &path.into_iter().map(|path| ("PATH".to_owned(), path)).collect(), Path::new(""))?;
        let group = self.group_of(&id, &variables);
        let left = group.as_ref().map(|group| group.folder().to_owned());
        let started = self.start_in(group, (program, arguments), Assignment { id, key, variables });
        if started.is_err() {
            self.state().leave(left);
        }
        started
    }

    fn start_in(
        &self,
        group: Option<ControlGroup>,
        (program, arguments): (&String, &[String]),
        assignment: Assignment,
    ) -> Result<(), Trouble> {
        let Assignment { id, key, variables } = assignment;
        let log = self.logs.begin(&id)?;
        let mut command = match &group {
            Some(group) => {
                let (shell, before) = group.before();
                let mut command = Command::new(shell);
                command.args(before).arg(program);
                command
            }
            None => Command::new(program),
        };
        command.args(arguments).env_clear().envs(usual()).envs(variables);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0);
        let Started { child, known } = children::start(None, || command.spawn(), Child::id)?;
        let pid = child.id().and_then(|id| i32::try_from(id).ok());
        let Some(pid) = pid else { return Err(Trouble("it ended at once".to_owned())) };
        let (path, fresh) = (self.path(&id), self.folder.join(format!("{id}.new")));
        let written = || {
            let record = Record {
                id: id.clone(),
                key: key.as_str().to_owned(),
                pid,
                // One that has ended already is found so by the next list.
                started: started(pid)?.unwrap_or_default(),
                boot: self.boot.clone(),
                group: group.as_ref().map(|group| group.folder().to_owned()),
            };
            // Whoever reads it finds the whole of it.
            std::fs::write(&fresh, serde_json::to_vec(&record)?)?;
            std::fs::rename(&fresh, &path).map(|()| record)
        };
        let record = written().inspect_err(|_| {
            drop(std::fs::remove_file(&fresh));
            // It has a group of its own, and no request yet that it would not give back.
            if let Some(group) = Pid::from_raw(pid) {
                kill_process_group(group, Signal::KILL).ok();
            }
        })?;
        self.state().workers.insert(
            id,
            Worker { record, life: Life::Own { child: Box::new(child), _known: known }, is_told: false, end: None },
        );
        Ok(())
    }

    fn stop_now(&self, id: &str, stop: Stop) -> io::Result<()> {
        let mut state = self.state();
        let Some(Worker { record, is_told, .. }) = state.workers.get_mut(id) else { return Ok(()) };
        match stop {
            Stop::Ask => {
                if self.is_there(record)? {
                    *is_told = true;
                    signal(record, Signal::TERM);
                }
            }
            Stop::Force if self.is_there(record)? => {
                signal(record, Signal::KILL);
                kill(record);
            }
            Stop::Force => end_what_is_left(record)?,
            Stop::Forget => {
                let group = record.group.clone();
                state.workers.remove(id);
                state.leave(group);
                self.logs.clear(|id| !state.workers.contains_key(id));
                drop(state);
                forget(&self.path(id));
            }
        }
        Ok(())
    }

    fn path(&self, id: &str) -> PathBuf {
        self.folder.join(format!("{id}.json"))
    }
}

impl Driver for Subprocesses {
    const LOOK_EVERY: Duration = CONTROLLER_LOOK_EVERY;

    fn is_in_charge(&self, in_charge: bool) {
        if self.in_charge.swap(in_charge, Ordering::AcqRel) != in_charge {
            // What was left to the other one is to be seen.
            let mut state = self.state();
            (state.read, state.is_swept) = (None, false);
        }
    }

    async fn list(&self) -> Result<Vec<Found>, Trouble> {
        Ok(self.look()?)
    }

    async fn start(&self, assignment: Assignment) -> Result<(), Trouble> {
        self.start_now(assignment)
    }

    async fn stop(&self, id: String, _key: Key, stop: Stop) -> Result<(), Trouble> {
        Ok(self.stop_now(&id, stop)?)
    }
}

/// A change of a folder within so short a time of another one may not show in its time.
const TICK: Duration = Duration::from_millis(100);

/// What a program that is started here keeps of the controller's own environment.
pub(super) fn usual() -> impl Iterator<Item = (&'static str, std::ffi::OsString)> {
    ["PATH", "HOME", "LANG", "USER"].into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)))
}

fn standing(end: &Option<End>) -> Standing {
    end.clone().map_or(Standing::There, Standing::Ended)
}

/// What a worker that has ended has left goes with it. A number that somebody else has by now is none of our business.
fn end_what_is_left(record: &Record) -> io::Result<()> {
    if started(record.pid)?.is_none() {
        signal(record, Signal::KILL);
    }
    kill(record);
    Ok(())
}

/// Ends all that a worker has started, wherever that has gone.
fn kill(record: &Record) {
    if let Some(folder) = &record.group {
        ControlGroup::at(folder.clone()).kill();
    }
}

fn signal(record: &Record, signal: Signal) {
    if let Some(group) = Pid::from_raw(record.pid)
        && let Err(error) = kill_process_group(group, signal)
        && error != rustix::io::Errno::SRCH
    {
        tracing::warn!(worker = record.id, %error, "a worker cannot be told");
    }
}

fn forget(path: &Path) {
    if let Err(error) = std::fs::remove_file(path) {
        tracing::debug!(%error, path = %path.display(), "the record of a worker cannot be removed");
    }
}

fn boot() -> String {
    let crate::domain::journal::Boot(boot) = crate::host::journal::this_boot();
    boot.into()
}

/// When a process was started; `None` where it is not there, or is only waited for.
fn started(pid: i32) -> io::Result<Option<u64>> {
    Ok(Stat::seen(pid)?.filter(|stat| stat.life == process::Life::Running).map(|stat| stat.started))
}
