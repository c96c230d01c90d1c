//! What is around the processes of one claim.

mod scoped_process;

use std::cell::LazyCell;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::{fmt, io};

use rustix::io::Errno;
use rustix::process::Signal;
use tokio::sync::OnceCell;
use tokio::time::Instant;

use super::super::journal::PendingSync;
use super::super::process::{self, PROCESS_POLL_INTERVAL};
use super::cgroup::{Cgroup, KillMethod};
use super::proc_scan::ProcScan;
use super::{ResourceLimits, children};
use crate::domain::journal::{Leader, ProcessRecord};
use crate::domain::outcome::Cleanup;
use crate::limits::{ESCAPED_PROCESSES_LOG_INTERVAL, PROCESS_KILL_TIMEOUT, PROCESSES_LISTED_MAX};
pub(crate) use scoped_process::{LaunchMethod, ScopedProcess};

/// By what the processes of a claim are found again, by whom ever. Known before the first of them exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScopeName {
    /// The value of [`COOKIE`](super::COOKIE_VARIABLE) in the environment of its processes.
    pub cookie: String,
    /// Its control group, where it has one.
    pub cgroup: Option<PathBuf>,
}

impl ScopeName {
    /// The same as it is written down. A group whose path is no text is found by the worker's own name alone.
    #[must_use]
    pub fn to_record(&self) -> ProcessRecord {
        let cgroup = self.cgroup.as_ref().and_then(|path| path.to_str()).map(Into::into);
        ProcessRecord { cookie: self.cookie.as_str().into(), cgroup, leaders: Vec::new() }
    }
}

/// Who is told of the leaders of process groups.
#[derive(Default)]
struct LeaderHook(OnceLock<Box<dyn Fn(Leader) + Send + Sync>>);

impl fmt::Debug for LeaderHook {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Witness")
    }
}

/// Who writes the claim down before there are processes of it.
#[derive(Default)]
struct ClaimRecorder {
    record: OnceLock<Box<dyn Fn(ProcessRecord) -> PendingSync + Send + Sync>>,
    recorded: OnceCell<()>,
}

impl fmt::Debug for ClaimRecorder {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Register(written: {})", self.recorded.initialized())
    }
}

/// A limit that a payload came up against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LimitExceeded {
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

impl fmt::Display for LimitExceeded {
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
pub struct ProcessScope {
    inner: Arc<ScopeInner>,
}

#[derive(Debug)]
struct ScopeInner {
    name: ScopeName,
    backend: Backend,
    limits: ResourceLimits,
    state: Mutex<ScopeState>,
    leader_hook: LeaderHook,
    recorder: ClaimRecorder,
}

#[derive(Debug)]
enum Backend {
    /// The process group of each process, and no more.
    ProcessGroup,
    /// We are given what payloads leave behind.
    Subreaper,
    /// And what has left the group as well.
    Cgroup { group: Cgroup, means: KillMethod },
}

#[derive(Debug, Default)]
struct ScopeState {
    /// A control group exists, or a process was started.
    used: bool,
    /// Processes were in it, and it was seen without any since.
    seen_empty: bool,
    /// How many payload processes were started whose end was not seen.
    running_count: u32,
    /// What was counted at limits when it was last asked for.
    oom_kill_count: u64,
    pids_refused_count: u64,
}

/// What is said now and then: a process that forks all the time is another one at each look.
#[derive(Debug, Default)]
struct LogThrottle {
    last: Option<Instant>,
}

impl LogThrottle {
    fn is_due(&mut self) -> bool {
        let now = Instant::now();
        let due = self.last.is_none_or(|last| now - last >= ESCAPED_PROCESSES_LOG_INTERVAL);
        if due {
            self.last = Some(now);
        }
        due
    }
}

impl Drop for ScopeInner {
    fn drop(&mut self) {
        if self.state.get_mut().is_ok_and(|state| state.used) {
            self.kill();
            children::mark_claim_ended(&self.name.cookie);
            if let Backend::Cgroup { group, .. } = &self.backend {
                let strays = || children::find_orphans(&self.name.cookie, Some(Signal::KILL));
                let none = !children::has_orphans() || strays().is_ok_and(|strays| strays.is_empty());
                // If that is too early, the next start of this worker does it.
                if group.remove().is_ok() && none {
                    children::forget_claim(&self.name.cookie);
                }
            }
        }
    }
}

impl ScopeInner {
    fn lock_state(&self) -> std::sync::MutexGuard<'_, ScopeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn kill(&self) {
        match &self.backend {
            Backend::ProcessGroup => {}
            Backend::Subreaper => {
                // What cannot be seen is waited for, and so said.
                drop(children::find_orphans(&self.name.cookie, Some(Signal::KILL)));
            }
            Backend::Cgroup { group, means } => {
                if !group.is_empty() {
                    group.kill(*means);
                }
            }
        }
    }

    /// The same where somebody waits for the end of all, who kills what that leaves.
    fn kill_without_retry(&self) {
        match &self.backend {
            Backend::Cgroup { group, means } => {
                if !group.is_empty() {
                    group.kill_without_retry(*means);
                }
            }
            Backend::ProcessGroup | Backend::Subreaper => self.kill(),
        }
    }
}

impl ProcessScope {
    fn new(name: ScopeName, around: Backend, limits: ResourceLimits) -> Self {
        let (state, witness, register) = (Mutex::default(), LeaderHook::default(), ClaimRecorder::default());
        Self {
            inner: Arc::new(ScopeInner {
                name,
                backend: around,
                limits,
                state,
                leader_hook: witness,
                recorder: register,
            }),
        }
    }

    /// Nothing but the process group that each payload process leads anyway. What leaves it is not seen.
    #[must_use]
    pub fn without_cookie() -> Self {
        Self::new(ScopeName { cookie: String::new(), cgroup: None }, Backend::ProcessGroup, ResourceLimits::default())
    }

    /// As [`ProcessScope::without_cookie`], and its processes carry a cookie.
    pub(super) fn with_cookie(cookie: String, limits: ResourceLimits) -> Self {
        Self::new(ScopeName { cookie, cgroup: None }, Backend::ProcessGroup, limits)
    }

    pub(super) fn with_subreaper(cookie: String, limits: ResourceLimits) -> Self {
        Self::new(ScopeName { cookie, cgroup: None }, Backend::Subreaper, limits)
    }

    pub(super) fn with_cgroup(cookie: String, group: Cgroup, means: KillMethod, limits: ResourceLimits) -> Self {
        let name = ScopeName { cookie, cgroup: Some(group.path().to_owned()) };
        Self::new(name, Backend::Cgroup { group, means }, limits)
    }

    /// Its processes, as far as they can be told. Reads `/proc`, or the control group: not to be called where nothing may wait.
    #[must_use]
    pub fn processes(&self) -> Vec<i32> {
        match &self.inner.backend {
            Backend::ProcessGroup => Vec::new(),
            Backend::Subreaper => ProcScan::read().processes_of(&self.inner.name.cookie),
            Backend::Cgroup { group, .. } => group.processes(),
        }
    }

    /// Its processes for a person, as [`ProcessScope::processes_of`] finds them: numbers, and what they are called.
    pub(crate) fn describe_processes(&self) -> String {
        let called = |pid: i32| {
            let name = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("{pid} {:?}", String::from_utf8_lossy(&name).trim_end())
        };
        let strays = children::find_orphans(&self.inner.name.cookie, None).unwrap_or_default();
        let mut all = self.processes();
        all.extend(strays.ambiguous.iter().filter(|pid| !all.contains(pid)).collect::<Vec<_>>());
        let all: Vec<String> = all.into_iter().take(PROCESSES_LISTED_MAX).map(called).collect();
        if all.is_empty() { "none that can be told from others".to_owned() } else { all.join(", ") }
    }

    /// Bytes of memory that its processes take up; `None` where none is there, or none can be told. Reads files as
    /// [`ProcessScope::processes_of`] does.
    #[must_use]
    pub fn memory_bytes(&self) -> Option<u64> {
        self.memory_bytes_by_scan(&LazyCell::new(ProcScan::read))
    }

    /// The same of many, for the price of one look at the processes of the host.
    #[must_use]
    pub fn memory_bytes_of(enclosures: &[Option<Self>]) -> Vec<Option<u64>> {
        let census: LazyCell<ProcScan> = LazyCell::new(ProcScan::read);
        enclosures.iter().map(|enclosure| enclosure.as_ref()?.memory_bytes_by_scan(&census)).collect()
    }

    fn memory_bytes_by_scan(&self, census: &LazyCell<ProcScan>) -> Option<u64> {
        match &self.inner.backend {
            Backend::ProcessGroup => None,
            Backend::Subreaper => {
                let processes = census.processes_of(&self.inner.name.cookie);
                (!processes.is_empty()).then(|| processes.into_iter().filter_map(process::resident_memory).sum())
            }
            Backend::Cgroup { group, .. } => group.memory_bytes(),
        }
    }

    /// By what its processes are found again.
    #[must_use]
    pub fn name(&self) -> &ScopeName {
        &self.inner.name
    }

    /// Tells `witness` of each process group that is started in it and that no control group holds.
    pub(crate) fn on_leader(self, witness: impl Fn(Leader) + Send + Sync + 'static) -> Self {
        // Nobody else has set it.
        drop(self.inner.leader_hook.0.set(Box::new(witness)));
        self
    }

    /// Has `write` put down by what its processes are found, before the first of them is started.
    pub(crate) fn record_with(self, write: impl Fn(ProcessRecord) -> PendingSync + Send + Sync + 'static) -> Self {
        // Nobody else has set it.
        drop(self.inner.recorder.record.set(Box::new(write)));
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
    pub(crate) async fn ensure_recorded(&self) -> io::Result<()> {
        let ClaimRecorder { record: write, recorded: written } = &self.inner.recorder;
        let Some(write) = write.get() else { return Ok(()) };
        let writing = async || write(self.inner.name.to_record()).synced().await;
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
    pub(crate) fn disk_limit(&self) -> Option<u64> {
        self.inner.limits.disk
    }

    /// Makes what a process is to be started in.
    ///
    /// # Errors
    ///
    /// Where the control group cannot be made or its limits cannot be set.
    pub(crate) fn admit_process(&self) -> io::Result<ScopedProcess> {
        let mut state = self.inner.lock_state();
        if let Backend::Cgroup { group, .. } = &self.inner.backend
            && !state.used
        {
            // Without a kind or a number that a task could be blamed for.
            group.create().map_err(io::Error::other)?;
            state.used = true;
            group.set_limits(&self.inner.limits).map_err(io::Error::other)?;
        }
        state.used = true;
        state.seen_empty = false;
        state.running_count += 1;
        drop(state);
        Ok(ScopedProcess { scope: self.clone() })
    }

    /// Kills whatever is in it, waits for its end, and takes it down. It may be used again.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; what was killed stays killed.
    pub async fn clean_up(&self) -> Cleanup {
        if !self.inner.lock_state().used {
            return Cleanup::Complete;
        }
        self.inner.kill_without_retry();
        children::mark_claim_ended(&self.inner.name.cookie);
        match tokio::time::timeout(PROCESS_KILL_TIMEOUT, self.wait_cleaned_up()).await {
            Ok(()) => Cleanup::Complete,
            Err(_) => Cleanup::Incomplete,
        }
    }

    /// Resolves when nothing of it is left, and takes it down. What comes to light meanwhile is killed.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn wait_cleaned_up(&self) {
        match &self.inner.backend {
            Backend::ProcessGroup => {}
            Backend::Subreaper => self.kill_orphans().await,
            Backend::Cgroup { group, means } => loop {
                group.kill_until_empty(*means).await;
                self.kill_escaped().await;
                match group.remove() {
                    Ok(()) => break,
                    Err(error) => tracing::debug!(%error, "a control group cannot be removed yet"),
                }
                tokio::time::sleep(PROCESS_POLL_INTERVAL).await;
            },
        }
        children::forget_claim(&self.inner.name.cookie);
        let seen = !matches!(self.inner.backend, Backend::ProcessGroup);
        *self.inner.lock_state() = ScopeState { seen_empty: seen, ..ScopeState::default() };
    }

    /// Whether processes were in it, and nothing of them is left, as was seen.
    pub(crate) fn is_seen_empty(&self) -> bool {
        self.inner.lock_state().seen_empty
    }

    /// Resolves when nothing is left that has moved out of its control group, and nothing that may have. The group itself was
    /// seen empty: what cannot be looked at holds nobody up.
    async fn kill_escaped(&self) {
        let cookie = &self.inner.name.cookie;
        let (mut doubts, mut kills) = (LogThrottle::default(), LogThrottle::default());
        while children::has_orphans() {
            let strays = match children::find_orphans(cookie, Some(Signal::KILL)) {
                Ok(strays) => strays,
                Err(error) => return tracing::debug!(%error, "the children of this process cannot be seen"),
            };
            let doubtful = children::newly_ambiguous(&strays.ambiguous);
            if !doubtful.is_empty() && doubts.is_due() {
                tracing::warn!(
                    processes = ?doubtful,
                    "processes have left the control group of a task, and nothing tells of which: they keep the slots of tasks \
                     that may have started them, and are killed when the last of those is over"
                );
            }
            if strays.owned.is_empty() && strays.ambiguous.is_empty() {
                return;
            }
            if !strays.owned.is_empty() && kills.is_due() {
                let processes = &strays.owned;
                tracing::warn!(?processes, "processes of a task that had left its control group are killed");
            }
            for pid in strays.owned.iter().chain(&strays.ambiguous) {
                process::wait_for_exit(*pid).await;
            }
        }
    }

    /// Resolves when there are no strays.
    async fn kill_orphans(&self) {
        loop {
            match children::find_orphans(&self.inner.name.cookie, Some(Signal::KILL)) {
                Ok(strays) if strays.is_empty() => return,
                Ok(strays) => {
                    for pid in strays.owned.iter().chain(&strays.ambiguous) {
                        process::wait_for_exit(*pid).await;
                    }
                    if strays.owned.is_empty() && strays.ambiguous.is_empty() {
                        tokio::time::sleep(PROCESS_POLL_INTERVAL).await;
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "the children of this process cannot be seen");
                    tokio::time::sleep(PROCESS_POLL_INTERVAL).await;
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
        let enclosure = ProcessScope::without_cookie().record_with(move |_| {
            let first = count.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0;
            if first { PendingSync::failed() } else { PendingSync::succeeded() }
        });
        let error = enclosure.ensure_recorded().await.unwrap_err();
        assert!(crate::handler::host_errors::is_host_error(&error), "{error}");
        for _ in 0..3 {
            enclosure.ensure_recorded().await.unwrap();
        }
        assert_eq!(writes.load(std::sync::atomic::Ordering::Relaxed), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_again_and_again_is_said_now_and_then() {
        let mut word = LogThrottle::default();
        assert!(word.is_due());
        assert!(!word.is_due());
        tokio::time::advance(ESCAPED_PROCESSES_LOG_INTERVAL).await;
        assert!(word.is_due());
    }

    #[tokio::test]
    async fn what_was_never_used_is_empty() {
        assert_eq!(ProcessScope::without_cookie().clean_up().await, Cleanup::Complete);
    }
}
