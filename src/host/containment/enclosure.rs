//! What is around the processes of one claim.

use std::cell::LazyCell;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use std::{fmt, io};

use rustix::io::Errno;
use rustix::process::Signal;
use tokio::sync::OnceCell;

use super::super::journal::Recorded;
use super::super::process::{self, LOOK_AGAIN};
use super::census::Census;
use super::cgroup::{Group, Means};
use super::{Limits, children, forerunner, shim};
use crate::domain::journal::{Leader, Remains};
use crate::domain::outcome::Emptiness;
use crate::limits::{PROCESS_KILLED_WAIT, PROCESSES_NAMED_MAX};

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
    Cgroup {
        group: Group,
        means: Means,
    },
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

impl Drop for Inner {
    fn drop(&mut self) {
        if self.state.get_mut().is_ok_and(|state| state.used) {
            self.kill();
            if let Around::Cgroup { group, .. } = &self.around {
                // If that is too early, the next start of this worker does it.
                drop(group.remove());
            }
            children::over(&self.name.cookie);
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
        let all: Vec<String> = self.processes().into_iter().take(PROCESSES_NAMED_MAX).map(called).collect();
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
            Around::Reaper => {
                self.killed_strays().await;
                children::left(&self.inner.name.cookie);
            }
            Around::Cgroup { group, means } => {
                group.killed(*means).await;
                while let Err(error) = group.remove() {
                    tracing::debug!(%error, "a control group cannot be removed yet");
                    tokio::time::sleep(LOOK_AGAIN).await;
                }
            }
        }
        let seen = !matches!(self.inner.around, Around::Nothing);
        *self.inner.state() = State { emptied: seen, ..State::default() };
    }

    /// Whether processes were in it, and nothing of them is left, as was seen.
    pub(crate) fn emptied(&self) -> bool {
        self.inner.state().emptied
    }

    async fn killed_strays(&self) {
        loop {
            match children::strays(&self.inner.name.cookie, Some(Signal::KILL)) {
                Ok(strays) if strays.none() => return,
                Ok(strays) => {
                    for pid in strays.certain.iter().chain(&strays.doubtful) {
                        // Ours to reap: one that waits for that would be found again and again.
                        process::gone(*pid).await;
                    }
                    if strays.certain.is_empty() && strays.doubtful.is_empty() {
                        tokio::time::sleep(LOOK_AGAIN).await;
                    }
                    drop(children::reap());
                }
                Err(error) => {
                    tracing::debug!(%error, "the children of this process cannot be seen");
                    tokio::time::sleep(LOOK_AGAIN).await;
                }
            }
        }
    }
}

/// A process's place in an enclosure, from just before it is started until its end was seen.
#[derive(Debug)]
pub(crate) struct Entry {
    enclosure: Enclosure,
}

impl Drop for Entry {
    fn drop(&mut self) {
        // What is in it has to go with the last process whose end somebody waits for.
        if self.alone() {
            self.enclosure.inner.kill();
        }
        let mut state = self.enclosure.inner.state();
        state.running = state.running.saturating_sub(1);
    }
}

/// How a process is to be started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Way {
    /// As it is.
    Direct,
    /// Through this program, with these arguments before its own.
    Through(Vec<std::ffi::OsString>),
}

impl Entry {
    fn inner(&self) -> &Inner {
        &self.enclosure.inner
    }

    /// How the process is to be started.
    pub(crate) fn way(&self, program: &std::path::Path, argv0: &str) -> Way {
        match &self.inner().around {
            Around::Nothing | Around::Reaper => Way::Direct,
            Around::Cgroup { group, .. } => Way::Through(shim::arguments(&group.entrance(), program, argv0).into()),
        }
    }

    /// The process has been started.
    pub(crate) fn started(&self, process: i32) {
        if let (Around::Nothing | Around::Reaper, Some(tell)) = (&self.inner().around, self.inner().witness.0.get())
            && let Some(stat) = process::Stat::of(process)
        {
            tell(Leader { pid: process, started: stat.started });
        }
        if let Around::Reaper = self.inner().around {
            children::entered(&self.inner().name.cookie, process);
            // The forerunner does it where there is one.
            drop(std::fs::write(format!("/proc/{process}/oom_score_adj"), forerunner::OOM_SCORE));
        }
    }

    /// Whether no other process of the enclosure is still to be waited for.
    fn alone(&self) -> bool {
        self.inner().state().running <= 1
    }

    /// Whether the process's group holds nothing that the enclosure does not hold, so that looking through all processes
    /// for it can be saved.
    pub(crate) fn holds_its_group(&self) -> bool {
        matches!(self.inner().around, Around::Cgroup { .. }) && self.alone()
    }

    /// Tells processes that are outside the group to end.
    pub(crate) fn terminate_others(&self, group: i32) {
        if !self.alone() {
            return;
        }
        let outside = |process| process::Stat::of(process).is_some_and(|stat| stat.group != group);
        match &self.inner().around {
            Around::Nothing => {}
            Around::Reaper => {
                drop(children::strays(&self.inner().name.cookie, Some(Signal::TERM)));
            }
            Around::Cgroup { group, .. } => group.signal(Signal::TERM, outside),
        }
    }

    /// Resolves when all processes have gone by themselves.
    ///
    /// Cancel safe.
    pub(crate) async fn deserted(&self) {
        match &self.inner().around {
            Around::Cgroup { group, .. } if self.alone() => group.emptied().await,
            Around::Reaper if self.alone() => loop {
                match children::strays(&self.inner().name.cookie, None) {
                    Ok(strays) if strays.certain.is_empty() => return,
                    Ok(strays) => {
                        for pid in strays.certain {
                            process::gone(pid).await;
                        }
                        drop(children::reap());
                    }
                    Err(_) => return,
                }
            },
            Around::Nothing | Around::Reaper | Around::Cgroup { .. } => {}
        }
    }

    /// Kills whatever is still there, unless another process of the enclosure is to be waited for.
    pub(crate) fn kill(&self) {
        if self.alone() {
            self.inner().kill_at_once();
        }
    }

    /// The processes that are still there a while after they were killed.
    pub(crate) async fn survivors(&self) -> Vec<i32> {
        if !self.alone() {
            return Vec::new();
        }
        let gone = async {
            match &self.inner().around {
                Around::Nothing => {}
                Around::Reaper => self.certain_killed().await,
                Around::Cgroup { group, means } => group.killed(*means).await,
            }
        };
        if tokio::time::timeout(PROCESS_KILLED_WAIT, gone).await.is_ok() {
            return Vec::new();
        }
        match &self.inner().around {
            Around::Nothing => Vec::new(),
            Around::Reaper => {
                children::strays(&self.inner().name.cookie, None).map(|strays| strays.certain).unwrap_or_default()
            }
            Around::Cgroup { group, .. } => group.processes(),
        }
    }

    async fn certain_killed(&self) {
        while let Ok(strays) = children::strays(&self.inner().name.cookie, Some(Signal::KILL)) {
            if strays.certain.is_empty() && !strays.moving {
                return;
            }
            if strays.certain.is_empty() {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
            for pid in strays.certain {
                process::gone(pid).await;
            }
            drop(children::reap());
        }
    }

    /// The limit that a process came up against since this was last asked.
    pub(crate) fn exceeded(&self) -> Option<Exceeded> {
        let Around::Cgroup { group, .. } = &self.inner().around else { return None };
        let limits = &self.inner().limits;
        let mut state = self.inner().state();
        let more = |file, event, seen: &mut u64| {
            let count = group.events(file, event);
            std::mem::replace(seen, count) < count
        };
        if let Some(bytes) = limits.memory
            && more("memory.events", "oom_kill", &mut state.out_of_memory)
        {
            return Some(Exceeded::Memory { bytes });
        }
        let most = limits.processes?;
        more("pids.events", "max", &mut state.processes_refused).then_some(Exceeded::Processes { most })
    }
}

/// Resolves when a folder holds more than so many bytes, looked at now and then.
///
/// # Cancel safety
///
/// Cancel safe.
pub(crate) async fn outgrown(folder: PathBuf, bytes: u64, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        if larger_than(folder.clone(), bytes).await {
            return;
        }
    }
}

/// Whether the files below a folder take up more than so many bytes of the disk.
pub(crate) async fn larger_than(folder: PathBuf, bytes: u64) -> bool {
    tokio::task::spawn_blocking(move || taken(folder, bytes) > bytes).await.unwrap_or(false)
}

/// The bytes that a folder takes up, not counted much further than `enough`. What cannot be looked at counts nothing.
fn taken(folder: PathBuf, enough: u64) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let (mut total, mut folders) = (0_u64, vec![folder]);
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        for entry in entries.flatten() {
            let Ok(about) = entry.metadata() else { continue };
            total = total.saturating_add(about.blocks() * 512);
            if total > enough {
                return total;
            }
            if about.is_dir() {
                folders.push(entry.path());
            }
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_measured_with_all_that_is_below_it() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("a/b/c");
        std::fs::create_dir_all(&deep).unwrap();
        std::fs::write(deep.join("file"), vec![1; 100_000]).unwrap();
        std::os::unix::fs::symlink("/usr", deep.join("elsewhere")).unwrap();
        let bytes = taken(folder.path().to_owned(), u64::MAX);
        assert!((100_000..300_000).contains(&bytes), "{bytes}");
        assert!(taken(folder.path().to_owned(), 1000) > 1000);
    }

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

    #[tokio::test]
    async fn what_was_never_used_is_empty() {
        assert_eq!(Enclosure::bare().clear().await, Emptiness::Proven);
    }
}
