//! What is around the processes of one claim.

mod entry;

use std::cell::LazyCell;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::{fmt, io};

use rustix::io::Errno;
use rustix::process::Signal;
use tokio::sync::OnceCell;
use tokio::time::Instant;

use super::super::journal::Recorded;
use super::super::process::{self, LOOK_AGAIN};
use super::census::Census;
use super::cgroup::{Group, Means};
use super::{Limits, children};
use crate::domain::journal::{Leader, Remains};
use crate::domain::outcome::Emptiness;
use crate::limits::{FUGITIVES_NAMED_EVERY, PROCESS_KILLED_WAIT, PROCESSES_NAMED_MAX};
pub(crate) use entry::{Entry, Way};

/// By what the processes of a claim are found again, by whom ever. Known before the first of them exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    /// The value of [`COOKIE`](super::COOKIE) in the environment of its processes.
    pub cookie: String,
    /// Its control group, where it has one.
    pub cgroup: Option<PathBuf>,
}

impl Name {
    /// The same as it is written down. A group whose path is no text is found by the worker's own name alone.
    #[must_use]
    pub fn remains(&self) -> Remains {
        let cgroup = self.cgroup.as_ref().and_then(|path| path.to_str()).map(Into::into);
        Remains { cookie: self.cookie.as_str().into(), cgroup, leaders: Vec::new() }
    }
}

/// Who is told of the leaders of process groups.
#[derive(Default)]
struct Witness(OnceLock<Box<dyn Fn(Leader) + Send + Sync>>);

impl fmt::Debug for Witness {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Witness")
    }
}

/// Who writes the claim down before there are processes of it.
#[derive(Default)]
struct Register {
    write: OnceLock<Box<dyn Fn(Remains) -> Recorded + Send + Sync>>,
    written: OnceCell<()>,
}

impl fmt::Debug for Register {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Register(written: {})", self.written.initialized())
    }
}

/// A limit that a payload came up against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exceeded {
    /// It used up its memory, and the kernel ended it.
    Memory {
        /// What it might have used.
        bytes: u64,
    },
    /// Its folder grew too large.
    Disk {
        /// What it might have used.
        bytes: u64,
    },
    /// It was refused another process. That alone ends nothing.
    Processes {
        /// How many it might have had.
        most: u32,
    },
}

impl fmt::Display for Exceeded {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory { bytes } => {
                write!(out, "out of memory: the task used up the {bytes} bytes it may have and was killed")
            }
            Self::Disk { bytes } => write!(out, "the task's folder grew beyond the {bytes} bytes it may have"),
            Self::Processes { most } => {
                write!(out, "the task was refused a process, since it had the {most} that it may have")
            }
        }
    }
}

/// What is around the processes of one claim. Clones share it.
///
/// The last clone that is dropped kills what is left.
#[derive(Debug, Clone)]
pub struct Enclosure {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    name: Name,
    around: Around,
    limits: Limits,
    state: Mutex<State>,
    witness: Witness,
    register: Register,
}

#[derive(Debug)]
enum Around {
    /// The process group of each process, and no more.
    Nothing,
    /// We are given what payloads leave behind.
    Reaper,
    /// And what has left the group as well.
    Cgroup { group: Group, means: Means },
}

#[derive(Debug, Default)]
struct State {
    /// A control group exists, or a process was started.
    used: bool,
    /// Processes were in it, and it was seen without any since.
    emptied: bool,
    /// How many payload processes were started whose end was not seen.
    running: u32,
    /// What was counted at limits when it was last asked for.
    out_of_memory: u64,
    processes_refused: u64,
}

/// What is said now and then: a process that forks all the time is another one at each look.
#[derive(Debug, Default)]
struct Seldom {
    last: Option<Instant>,
}

impl Seldom {
    fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let due = self.last.is_none_or(|last| now - last >= FUGITIVES_NAMED_EVERY);
        if due {
            self.last = Some(now);
        }
        due
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.state.get_mut().is_ok_and(|state| state.used) {
            self.kill();
            children::over(&self.name.cookie);
            if let Around::Cgroup { group, .. } = &self.around {
                let strays = || children::strays(&self.name.cookie, Some(Signal::KILL));
                let none = !children::any() || strays().is_ok_and(|strays| strays.none());
                // If that is too early, the next start of this worker does it.
                if group.remove().is_ok() && none {
                    children::left(&self.name.cookie);
                }
            }
        }
    }
}

impl Inner {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kill(&self) {
        match &self.around {
            Around::Nothing => {}
            Around::Reaper => {
                // What cannot be seen is waited for, and so said.
                drop(children::strays(&self.name.cookie, Some(Signal::KILL)));
            }
            Around::Cgroup { group, means } => {
                if !group.empty() {
                    group.kill(*means);
                }
            }
        }
    }

    /// The same where somebody waits for the end of all, who kills what that leaves.
    fn kill_at_once(&self) {
        match &self.around {
            Around::Cgroup { group, means } => {
                if !group.empty() {
                    group.kill_at_once(*means);
                }
            }
            Around::Nothing | Around::Reaper => self.kill(),
        }
    }
}

impl Enclosure {
    fn new(name: Name, around: Around, limits: Limits) -> Self {
        let (state, witness, register) = (Mutex::default(), Witness::default(), Register::default());
        Self { inner: Arc::new(Inner { name, around, limits, state, witness, register }) }
    }

    /// Nothing but the process group that each payload process leads anyway. What leaves it is not seen.
    #[must_use]
    pub fn bare() -> Self {
        Self::new(Name { cookie: String::new(), cgroup: None }, Around::Nothing, Limits::default())
    }

    /// As [`Enclosure::bare`], and its processes carry a cookie.
    pub(super) fn alone(cookie: String, limits: Limits) -> Self {
        Self::new(Name { cookie, cgroup: None }, Around::Nothing, limits)
    }

    pub(super) fn reaper(cookie: String, limits: Limits) -> Self {
        Self::new(Name { cookie, cgroup: None }, Around::Reaper, limits)
    }

    pub(super) fn cgroup(cookie: String, group: Group, means: Means, limits: Limits) -> Self {
        let name = Name { cookie, cgroup: Some(group.folder().to_owned()) };
        Self::new(name, Around::Cgroup { group, means }, limits)
    }

    /// Its processes, as far as they can be told. Reads `/proc`, or the control group: not to be called where nothing may wait.
    #[must_use]
    pub fn processes(&self) -> Vec<i32> {
        match &self.inner.around {
            Around::Nothing => Vec::new(),
            Around::Reaper => Census::take().processes(&self.inner.name.cookie),
            Around::Cgroup { group, .. } => group.processes(),
        }
    }

    /// Its processes for a person, as [`Enclosure::processes`] finds them: numbers, and what they are called.
    pub(crate) fn described(&self) -> String {
        let called = |pid: i32| {
            let name = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("{pid} {:?}", String::from_utf8_lossy(&name).trim_end())
        };
        let strays = children::strays(&self.inner.name.cookie, None).unwrap_or_default();
        let mut all = self.processes();
        all.extend(strays.doubtful.iter().filter(|pid| !all.contains(pid)).collect::<Vec<_>>());
        let all: Vec<String> = all.into_iter().take(PROCESSES_NAMED_MAX).map(called).collect();
        if all.is_empty() { "none that can be told from others".to_owned() } else { all.join(", ") }
    }

    /// Bytes of memory that its processes take up; `None` where none is there, or none can be told. Reads files as
    /// [`Enclosure::processes`] does.
    #[must_use]
    pub fn memory(&self) -> Option<u64> {
        self.memory_by(&LazyCell::new(Census::take))
    }

    /// The same of many, for the price of one look at the processes of the host.
    #[must_use]
    pub fn memories(enclosures: &[Option<Self>]) -> Vec<Option<u64>> {
        let census: LazyCell<Census> = LazyCell::new(Census::take);
        enclosures.iter().map(|enclosure| enclosure.as_ref()?.memory_by(&census)).collect()
    }

    fn memory_by(&self, census: &LazyCell<Census>) -> Option<u64> {
        match &self.inner.around {
            Around::Nothing => None,
            Around::Reaper => {
                let processes = census.processes(&self.inner.name.cookie);
                (!processes.is_empty()).then(|| processes.into_iter().filter_map(process::resident).sum())
            }
            Around::Cgroup { group, .. } => group.memory(),
        }
    }

    /// By what its processes are found again.
    #[must_use]
    pub fn name(&self) -> &Name {
        &self.inner.name
    }

    /// Tells `witness` of each process group that is started in it and that no control group holds.
    pub(crate) fn witnessed_by(self, witness: impl Fn(Leader) + Send + Sync + 'static) -> Self {
        // Nobody else has set it.
        drop(self.inner.witness.0.set(Box::new(witness)));
        self
    }

    /// Has `write` put down by what its processes are found, before the first of them is started.
    pub(crate) fn registered_by(self, write: impl Fn(Remains) -> Recorded + Send + Sync + 'static) -> Self {
        // Nobody else has set it.
        drop(self.inner.register.write.set(Box::new(write)));
        self
    }

    /// Resolves when a process may be started in it: whoever comes after this worker would find it (I27).
    ///
    /// # Errors
    ///
    /// Where that cannot be written down, which is the host's fault.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(crate) async fn registered(&self) -> io::Result<()> {
        let Register { write, written } = &self.inner.register;
        let Some(write) = write.get() else { return Ok(()) };
        let writing = async || write(self.inner.name.remains()).safe().await;
        written.get_or_try_init(writing).await.map(drop).map_err(|why| {
            tracing::error!("no process of a task can be started: {why}");
            Errno::IO.into()
        })
    }

    /// What each of its processes finds in its environment as [`COOKIE`](super::COOKIE).
    pub(crate) fn cookie(&self) -> Option<&str> {
        Some(self.inner.name.cookie.as_str()).filter(|cookie| !cookie.is_empty())
    }

    /// How large the task's folder may grow.
    pub(crate) fn disk(&self) -> Option<u64> {
        self.inner.limits.disk
    }

    /// Makes what a process is to be started in.
    ///
    /// # Errors
    ///
    /// Where the control group cannot be made or its limits cannot be set.
    pub(crate) fn open(&self) -> io::Result<Entry> {
        let mut state = self.inner.state();
        if let Around::Cgroup { group, .. } = &self.inner.around
            && !state.used
        {
            // Without a kind or a number that a task could be blamed for.
            group.make().map_err(io::Error::other)?;
            state.used = true;
            group.limit(&self.inner.limits).map_err(io::Error::other)?;
        }
        state.used = true;
        state.emptied = false;
        state.running += 1;
        drop(state);
        Ok(Entry { enclosure: self.clone() })
    }

    /// Kills whatever is in it, waits for its end, and takes it down. It may be used again.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; what was killed stays killed.
    pub async fn clear(&self) -> Emptiness {
        if !self.inner.state().used {
            return Emptiness::Proven;
        }
        self.inner.kill_at_once();
        children::over(&self.inner.name.cookie);
        match tokio::time::timeout(PROCESS_KILLED_WAIT, self.vacated()).await {
            Ok(()) => Emptiness::Proven,
            Err(_) => Emptiness::Unproven,
        }
    }

    /// Resolves when nothing of it is left, and takes it down. What comes to light meanwhile is killed.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn vacated(&self) {
        match &self.inner.around {
            Around::Nothing => {}
            Around::Reaper => self.killed_strays().await,
            Around::Cgroup { group, means } => loop {
                group.killed(*means).await;
                self.killed_fugitives().await;
                match group.remove() {
                    Ok(()) => break,
                    Err(error) => tracing::debug!(%error, "a control group cannot be removed yet"),
                }
                tokio::time::sleep(LOOK_AGAIN).await;
            },
        }
        children::left(&self.inner.name.cookie);
        let seen = !matches!(self.inner.around, Around::Nothing);
        *self.inner.state() = State { emptied: seen, ..State::default() };
    }

    /// Whether processes were in it, and nothing of them is left, as was seen.
    pub(crate) fn emptied(&self) -> bool {
        self.inner.state().emptied
    }

    /// Resolves when nothing is left that has moved out of its control group, and nothing that may have. The group itself was
    /// seen empty: what cannot be looked at holds nobody up.
    async fn killed_fugitives(&self) {
        let cookie = &self.inner.name.cookie;
        let (mut doubts, mut kills) = (Seldom::default(), Seldom::default());
        while children::any() {
            let strays = match children::strays(cookie, Some(Signal::KILL)) {
                Ok(strays) => strays,
                Err(error) => return tracing::debug!(%error, "the children of this process cannot be seen"),
            };
            let doubtful = children::anew(&strays.doubtful);
            if !doubtful.is_empty() && doubts.is_due() {
                tracing::warn!(
                    processes = ?doubtful,
                    "processes have left the control group of a task, and nothing tells of which: they keep the slots of tasks \
                     that may have started them, and are killed when the last of those is over"
                );
            }
            if strays.certain.is_empty() && strays.doubtful.is_empty() {
                return;
            }
            if !strays.certain.is_empty() && kills.is_due() {
                let processes = &strays.certain;
                tracing::warn!(?processes, "processes of a task that had left its control group are killed");
            }
            for pid in strays.certain.iter().chain(&strays.doubtful) {
                process::gone(*pid).await;
            }
        }
    }

    /// Resolves when there are no strays.
    async fn killed_strays(&self) {
        loop {
            match children::strays(&self.inner.name.cookie, Some(Signal::KILL)) {
                Ok(strays) if strays.none() => return,
                Ok(strays) => {
                    for pid in strays.certain.iter().chain(&strays.doubtful) {
                        process::gone(*pid).await;
                    }
                    if strays.certain.is_empty() && strays.doubtful.is_empty() {
                        tokio::time::sleep(LOOK_AGAIN).await;
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "the children of this process cannot be seen");
                    tokio::time::sleep(LOOK_AGAIN).await;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn i27_what_cannot_be_written_down_is_the_hosts_fault_and_is_written_once_when_it_can() {
        let writes = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let count = Arc::clone(&writes);
        let enclosure = Enclosure::bare().registered_by(move |_| {
            let first = count.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0;
            if first { Recorded::refused() } else { Recorded::already() }
        });
        let error = enclosure.registered().await.unwrap_err();
        assert!(crate::handler::fault::is_of_host(&error), "{error}");
        for _ in 0..3 {
            enclosure.registered().await.unwrap();
        }
        assert_eq!(writes.load(std::sync::atomic::Ordering::Relaxed), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_again_and_again_is_said_now_and_then() {
        let mut word = Seldom::default();
        assert!(word.is_due());
        assert!(!word.is_due());
        tokio::time::advance(FUGITIVES_NAMED_EVERY).await;
        assert!(word.is_due());
    }

    #[tokio::test]
    async fn what_was_never_used_is_empty() {
        assert_eq!(Enclosure::bare().clear().await, Emptiness::Proven);
    }
}
