//! Workers as processes of this host: each in a process group of its own, with a log of its own, and written down, so that the
//! next controller finds those that a controller left.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Deserialize, Serialize};
use tokio::process::{Child, Command};

use crate::domain::time::Instant;

/// The keys that there are queues for. Not the record of a worker, whose names end otherwise.
const KEYS: &str = "keys";
const KEYS_FRESH: &str = "keys.new";

/// What is started.
#[derive(Debug, Clone)]
pub struct Program {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// What it finds in its environment besides what every worker does.
    pub env: BTreeMap<String, String>,
    /// Where logs and records of workers are.
    pub folder: PathBuf,
    /// How long one has between being told to end and being killed.
    pub grace: Duration,
}

/// A worker to start.
pub(super) struct Assignment {
    pub(super) id: String,
    /// As it is told its key.
    pub(super) key: String,
    /// What it is told of its work.
    pub(super) variables: Vec<(&'static str, String)>,
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
}

enum Life {
    Own(Box<Child>),
    Adopted,
}

struct Worker {
    record: Record,
    life: Life,
    kill_at: Option<Instant>,
}

/// One that has ended.
pub(super) struct Gone {
    pub(super) id: String,
    /// For people.
    pub(super) how: String,
    /// Whether it was told to.
    pub(super) told: bool,
}

/// The workers of one pool on this host.
pub(super) struct Subprocesses {
    program: Program,
    workers: BTreeMap<String, Worker>,
}

impl Subprocesses {
    /// Finds those that are there already.
    ///
    /// # Errors
    ///
    /// Where the folder cannot be used.
    pub(super) fn find(program: Program) -> io::Result<Self> {
        std::fs::create_dir_all(&program.folder)?;
        let boot = boot();
        let mut workers = BTreeMap::new();
        for entry in std::fs::read_dir(&program.folder)?.flatten() {
            let path = entry.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let record: Option<Record> =
                std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
            match record {
                Some(record) if record.boot == boot && started(record.pid) == Some(record.started) => {
                    let worker = Worker { life: Life::Adopted, kill_at: None, record };
                    workers.insert(worker.record.id.clone(), worker);
                }
                Some(_) | None => forget(&path),
            }
        }
        Ok(Self { program, workers })
    }

    /// The keys that an earlier controller had queues for.
    pub(super) fn remembered(&self) -> Vec<String> {
        let bytes = std::fs::read(self.program.folder.join(KEYS)).unwrap_or_default();
        serde_json::from_slice(&bytes).unwrap_or_default()
    }

    /// Writes down which keys there are queues for: a later controller would not hear of what comes to them.
    pub(super) fn remember(&self, keys: &[&str]) {
        let (path, fresh) = (self.program.folder.join(KEYS), self.program.folder.join(KEYS_FRESH));
        let written = serde_json::to_vec(keys)
            .map_err(io::Error::other)
            .and_then(|bytes| std::fs::write(&fresh, bytes))
            .and_then(|()| std::fs::rename(&fresh, &path));
        if let Err(error) = written {
            tracing::warn!(%error, path = %path.display(), "which keys there are queues for cannot be written down");
        }
    }

    /// Those that are there, and the keys they were told.
    pub(super) fn there(&self) -> impl Iterator<Item = (&str, &str)> {
        self.workers.values().map(|worker| (worker.record.id.as_str(), worker.record.key.as_str()))
    }

    /// Starts one.
    ///
    /// # Errors
    ///
    /// Where it cannot be started, or not be written down: then it is killed.
    pub(super) fn start(&mut self, assignment: Assignment) -> io::Result<()> {
        let Assignment { id, key, variables } = assignment;
        let Some((program, arguments)) = self.program.command.split_first() else {
            return Err(io::Error::other("no command is configured"));
        };
        let log = std::fs::File::create(self.program.folder.join(format!("{id}.log")))?;
        let mut command = Command::new(program);
        command.args(arguments).env_clear();
        for name in ["PATH", "HOME", "LANG", "USER"] {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        command.envs(&self.program.env).envs(variables);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).process_group(0);
        let mut child = command.spawn()?;
        let pid = child.id().and_then(|id| i32::try_from(id).ok());
        let record = pid.zip(pid.and_then(started)).map(|(pid, started)| Record {
            id: id.clone(),
            key,
            pid,
            started,
            boot: boot(),
        });
        let Some(record) = record else { return Err(io::Error::other("it ended at once")) };
        let written = serde_json::to_vec(&record)
            .map_err(io::Error::other)
            .and_then(|bytes| std::fs::write(self.path(&id), bytes));
        if let Err(error) = written {
            child.start_kill()?;
            return Err(error);
        }
        self.workers.insert(id, Worker { record, life: Life::Own(Box::new(child)), kill_at: None });
        Ok(())
    }

    /// Tells one to go; it is killed when its grace is over.
    pub(super) fn stop(&mut self, id: &str, now: Instant) {
        let Some(worker) = self.workers.get_mut(id) else { return };
        if worker.kill_at.is_none() {
            worker.kill_at = Some(now.plus(self.program.grace));
            signal(&worker.record, Signal::TERM);
        }
    }

    /// Kills those whose time is over, and tells of those that have ended.
    pub(super) fn look(&mut self, now: Instant) -> Vec<Gone> {
        let mut gone = Vec::new();
        for (id, worker) in &mut self.workers {
            let how = match &mut worker.life {
                Life::Own(child) => match child.try_wait() {
                    Ok(None) => None,
                    Ok(Some(status)) => Some(status.to_string()),
                    Err(error) => Some(error.to_string()),
                },
                Life::Adopted => (started(worker.record.pid) != Some(worker.record.started))
                    .then(|| "it is not there any more".to_owned()),
            };
            match how {
                // What it has left in its group goes with it.
                Some(how) => {
                    signal(&worker.record, Signal::KILL);
                    gone.push(Gone { id: id.clone(), how, told: worker.kill_at.is_some() });
                }
                None if worker.kill_at.is_some_and(|at| at <= now) => signal(&worker.record, Signal::KILL),
                None => {}
            }
        }
        for Gone { id, .. } in &gone {
            self.workers.remove(id);
            forget(&self.path(id));
        }
        gone
    }

    fn path(&self, id: &str) -> PathBuf {
        self.program.folder.join(format!("{id}.json"))
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
fn started(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Its name may hold anything, spaces and parentheses too.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") { None } else { fields.nth(18)?.parse().ok() }
}
