//! Workers as processes of this host: each in a process group of its own, and in a control group where the host has them, with a
//! log of its own, and written down, so that the next controller finds those that a controller left.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};

use super::logs::Logs;
use super::notes::{Begun, Note, Notes, Record, forget};
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
    notes: Notes,
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
    /// Those that are just being started here.
    starting: BTreeSet<String>,
    /// When the folder had last changed as it was last read; `None` where it may have since.
    read: Option<SystemTime>,
    /// No control group is there that nothing is written down of.
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
        let (notes, logs) = (Notes::new(folder.clone()), Logs::new(folder.clone()));
        let (in_charge, state) = (AtomicBool::new(false), Mutex::default());
        Self { program, folder, notes, logs, groups: None, in_charge, boot: boot(), state }
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
        let changed = self.notes.changed()?;
        if state.read == Some(changed) {
            return Ok(());
        }
        let (acts, mut is_open) = (self.has_the_pool(), false);
        for note in self.notes.read()? {
            match note {
                Note::Known(Record { id, .. }) | Note::Begun(Begun { id, .. }, _)
                    if state.workers.contains_key(&id) || state.starting.contains(&id) => {}
                Note::Known(record) => self.take_in(state, record, acts)?,
                Note::Begun(begun, age) if acts => is_open |= !self.is_settled(state, begun, age)?,
                Note::Strange(path) if acts => forget(&path),
                Note::Begun(..) | Note::Strange(_) => {}
            }
        }
        // What changes within a tick of the file system's clock does not show.
        let is_old = changed.elapsed().is_ok_and(|age| age > TICK);
        state.read = (is_old && !is_open).then_some(changed);
        Ok(())
    }

    /// Takes in one that was started by an earlier controller, or by the one that has the pool.
    fn take_in(&self, state: &mut State, record: Record, acts: bool) -> io::Result<()> {
        let is_told = was_told(&self.folder, &record.id)?;
        let end = if self.is_there(&record)? || (is_told && self.is_followed(&record)?) {
            None
        } else if !acts {
            return Ok(());
        } else {
            state.leave(record.group.clone());
            if is_told {
                self.notes.strike(&record.id);
                return Ok(());
            }
            let how = if record.boot == self.boot { "while no controller saw it" } else { "with its host" };
            Some(self.end_of(&record.id, format!("it ended {how}")))
        };
        let worker = Worker { life: Life::Adopted, is_told, end, record };
        state.workers.insert(worker.record.id.clone(), worker);
        Ok(())
    }

    /// An earlier controller was about to start one, and did not live to say which process it is. Whether that is known now: it is
    /// there, or will not be.
    fn is_settled(&self, state: &mut State, begun: Begun, age: Duration) -> io::Result<bool> {
        let is_this_boot = begun.boot == self.boot;
        if let Some(Stat { pid, started, .. }) = if is_this_boot { leader(&begun.id)? } else { None } {
            let record = begun.as_process(pid, started);
            self.notes.know(&record)?;
            tracing::info!(worker = begun.id, pid, "it was started by a controller that did not live to say so");
            self.take_in(state, record, true)?;
            return Ok(true);
        }
        let is_over = !is_this_boot || age > DRIVER_START_NOTED_MAX;
        if is_over {
            state.leave(begun.group);
            self.notes.strike(&begun.id);
        }
        Ok(is_over)
    }

    fn end_of(&self, id: &str, how: String) -> End {
        End { how, last_words: self.logs.last_words(id), log: Some(Logs::name(id)) }
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

    /// Ends what is in control groups that nothing is written down of.
    fn sweep(&self, state: &mut State) {
        let Some(groups) = self.groups.as_ref().filter(|_| !state.is_swept) else { return };
        let is_known = |id: &str, state: &State| {
            let is_one = state.workers.contains_key(id) || state.starting.contains(id);
            is_one || state.leaving.iter().any(|group| group.folder().ends_with(id))
        };
        for (id, folder) in groups.older_than(DRIVER_START_NOTED_MAX) {
            if !is_known(&id, state) {
                tracing::warn!(worker = id, "nothing is written down of it, and it is ended");
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
            state.workers.retain(|id, worker| !is_over(&mut worker.life) || self.notes.has(id));
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
            let seen = how.map(|how| self.end_of(&record.id, how));
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
        self.state().starting.insert(id.clone());
        let group = self.group_of(&id, &variables);
        let begun = Begun {
            id,
            key: key.as_str().to_owned(),
            boot: self.boot.clone(),
            group: group.as_ref().map(|group| group.folder().to_owned()),
        };
        let started = self.start_in(group, (program, arguments), &begun, variables);
        let mut state = self.state();
        state.starting.remove(&begun.id);
        match started {
            Ok(worker) => drop(state.workers.insert(begun.id, worker)),
            Err(why) => {
                state.leave(begun.group);
                self.notes.strike(&begun.id);
                return Err(why);
            }
        }
        Ok(())
    }

    fn start_in(
        &self,
        group: Option<ControlGroup>,
        (program, arguments): (&String, &[String]),
        begun: &Begun,
        variables: BTreeMap<String, String>,
    ) -> Result<Worker, Trouble> {
        let log = self.logs.begin(&begun.id)?;
        // Whoever finds this written down looks for it.
        self.notes.begin(begun)?;
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
        let written = || {
            // One that has ended already is found so by the next list.
            let record = begun.as_process(pid, started(pid)?.unwrap_or_default());
            self.notes.know(&record).map(|()| record)
        };
        let record = written().inspect_err(|_| {
            // It has a group of its own, and no request yet that it would not give back.
            if let Some(group) = Pid::from_raw(pid) {
                kill_process_group(group, Signal::KILL).ok();
            }
        })?;
        let life = Life::Own { child: Box::new(child), _known: known };
        Ok(Worker { record, life, is_told: false, end: None })
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
                self.notes.strike(id);
            }
        }
        Ok(())
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

/// The process that was started as the worker of this name: it leads its group, and was told so. The first, where it has started
/// others that were told the same.
fn leader(id: &str) -> io::Result<Option<Stat>> {
    let leads = |stat: &Stat| stat.life == process::Life::Running && stat.pid == stat.group;
    let is_it = |stat: &Stat| leads(stat) && process::variable(stat.pid, "WORKER_ID").is_some_and(|told| told == id);
    Ok(Stat::all()?.into_iter().filter(is_it).min_by_key(|stat| stat.started))
}

fn boot() -> String {
    let crate::domain::journal::Boot(boot) = crate::host::journal::this_boot();
    boot.into()
}

/// When a process was started; `None` where it is not there, or is only waited for.
fn started(pid: i32) -> io::Result<Option<u64>> {
    Ok(Stat::seen(pid)?.filter(|stat| stat.life == process::Life::Running).map(|stat| stat.started))
}
