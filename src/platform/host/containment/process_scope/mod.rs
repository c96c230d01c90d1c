//! The processes of one claim: starting them in a control group or process group, finding, killing and waiting for them.

mod outside;
mod scoped_process;

use std::cell::LazyCell;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::process::{Pid, Signal};

use super::super::journal::ProcessRecorder;
use super::super::process::{self, PROCESS_POLL_INTERVAL, ProcessStat};
use super::super::socket_owner;
use super::cgroup::Cgroup;
use super::proc_scan::ProcScan;
use super::{Containment, children};
use journeyman_domain::journal::ProcessRecord;
use journeyman_domain::limits::{PROCESS_KILL_TIMEOUT, PROCESSES_LISTED_MAX};
use journeyman_domain::outcome::Cleanup;
pub use outside::Removal;
pub use scoped_process::{LaunchMethod, ScopedProcess};

/// What processes have used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScopeUsage {
    /// The most bytes of memory at one time.
    pub memory_peak: Option<u64>,
    /// CPU time.
    pub cpu: Option<Duration>,
}

/// A limit that a payload exceeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LimitExceeded {
    /// The kernel killed it.
    #[error("out of memory: the task exceeded its limit of {bytes} bytes and was killed")]
    Memory { bytes: u64 },
    #[error("the task's directory exceeded the {bytes} bytes of `host.task_disk`")]
    Disk { bytes: u64 },
    /// The kernel refused another process. That does not end the payload.
    #[error("the task could not start a process: it reached its limit of {max} processes")]
    Processes { max: u32 },
}

/// The processes of one claim. Clones share it; dropping the last one kills them.
#[derive(Debug, Clone)]
pub struct ProcessScope {
    inner: Arc<ScopeInner>,
}

#[derive(Debug)]
struct ScopeInner {
    containment: Containment,
    /// Made on first use: most requests have no process.
    identity: OnceLock<ScopeIdentity>,
    state: Mutex<ScopeState>,
    recorder: Option<ProcessRecorder>,
    /// Removes what runs for the claim outside of its processes.
    outside: Mutex<Option<Arc<Removal>>>,
}

#[derive(Debug)]
pub(super) struct ScopeIdentity {
    /// The value of [`COOKIE_VARIABLE`](super::COOKIE_VARIABLE) in the environment of its processes.
    pub(super) cookie: String,
    pub(super) backend: Backend,
}

#[derive(Debug, Clone, Default)]
pub(super) enum Backend {
    /// The process group of each process alone.
    #[default]
    ProcessGroup,
    /// Orphans of the payload are adopted by this process.
    Subreaper,
    /// A control group; orphans that left it are adopted.
    Cgroup(Cgroup),
}

#[derive(Debug, Default)]
struct ScopeState {
    /// The control group exists, or a process was started.
    used: bool,
    /// Started processes that were not waited for yet.
    running_count: u32,
    /// Process groups of these, whose leaders were not reaped yet, so that their numbers are not used again.
    groups: Vec<Pid>,
    /// Event counts when they were last read.
    oom_kill_count: u64,
    pids_refused_count: u64,
}

impl Drop for ScopeInner {
    fn drop(&mut self) {
        if self.state.get_mut().used {
            self.kill();
            children::mark_claim_ended(self.cookie());
            if let Backend::Cgroup(group) = self.backend() {
                let orphans = || children::find_orphans(self.cookie(), Some(Signal::KILL));
                let is_empty = !children::has_orphans() || orphans().is_ok_and(|orphans| orphans.is_empty());
                // A group that is not empty yet is removed by the worker's next start.
                if group.remove().is_ok() && is_empty {
                    children::forget_claim(self.cookie());
                }
            }
        }
    }
}

impl ScopeInner {
    fn identity(&self) -> &ScopeIdentity {
        self.identity.get_or_init(|| self.containment.new_scope_identity())
    }

    fn cookie(&self) -> &str {
        &self.identity().cookie
    }

    fn backend(&self) -> &Backend {
        &self.identity().backend
    }

    fn kill(&self) {
        match self.backend() {
            Backend::ProcessGroup => {}
            Backend::Subreaper => {
                // A failed scan is repeated and logged by `wait_cleaned_up`.
                drop(children::find_orphans(self.cookie(), Some(Signal::KILL)));
            }
            Backend::Cgroup(group) => {
                if !group.is_empty() {
                    group.kill();
                }
            }
        }
    }
}

impl ProcessScope {
    pub(super) fn new(containment: Containment, recorder: Option<ProcessRecorder>) -> Self {
        let (identity, state) = (OnceLock::new(), Mutex::default());
        Self { inner: Arc::new(ScopeInner { containment, identity, state, recorder, outside: Mutex::default() }) }
    }

    /// The process group that each payload process leads, without a cookie. Processes that leave it are not found.
    pub fn without_cookie() -> Self {
        let identity = ScopeIdentity { cookie: String::new(), backend: Backend::ProcessGroup };
        let (containment, state, outside) = (Containment::disabled(), Mutex::default(), Mutex::default());
        Self { inner: Arc::new(ScopeInner { containment, identity: identity.into(), state, recorder: None, outside }) }
    }

    /// Its processes, as far as they can be found. Reads `/proc` or the control group; blocks.
    pub fn processes(&self) -> Vec<i32> {
        match self.inner.backend() {
            Backend::ProcessGroup => self.inner.state.lock().groups.iter().map(|leader| leader.as_raw_pid()).collect(),
            Backend::Subreaper => {
                ProcScan::read().map(|scan| scan.processes_of(self.inner.cookie())).unwrap_or_default()
            }
            Backend::Cgroup(group) => group.processes(),
        }
    }

    /// Whether one of its processes has made the connection from `peer` to `local`. Reads `/proc`; blocks.
    ///
    /// # Errors
    ///
    /// `/proc` cannot be read.
    pub fn holds_connection(&self, peer: SocketAddr, local: SocketAddr) -> io::Result<bool> {
        let mut processes = self.processes();
        if matches!(self.inner.backend(), Backend::ProcessGroup) {
            processes = process::with_descendants(&processes, &ProcessStat::read_all()?);
        }
        if self.outside().is_some() {
            processes.extend(ProcScan::read()?.processes_of(self.inner.cookie()));
        }
        socket_owner::is_held_by(&processes, peer, local)
    }

    /// Lists its processes by PID and name, for a message.
    pub fn describe_processes(&self) -> String {
        let describe = |pid: i32| {
            let name = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
            format!("{pid} {:?}", String::from_utf8_lossy(&name).trim_end())
        };
        let orphans = children::find_orphans(self.inner.cookie(), None).unwrap_or_default();
        let mut all = self.processes();
        all.extend(orphans.ambiguous.iter().filter(|pid| !all.contains(pid)).collect::<Vec<_>>());
        let outside = self.outside().map(|removal| format!("what `{removal}` removes"));
        let all: Vec<String> = all.into_iter().take(PROCESSES_LISTED_MAX).map(describe).chain(outside).collect();
        if all.is_empty() { "none identified".to_owned() } else { all.join(", ") }
    }

    /// The memory of each scope's processes in bytes; `None` if it has none, or none can be found. Reads `/proc` once for all, and
    /// control groups; blocks.
    pub fn memory_bytes_of(scopes: &[Option<Self>]) -> Vec<Option<u64>> {
        let scan: LazyCell<Option<ProcScan>> = LazyCell::new(|| ProcScan::read().ok());
        let memory_bytes = |scope: &Self| match &scope.inner.identity.get()?.backend {
            Backend::ProcessGroup => None,
            Backend::Subreaper => {
                let processes = scan.as_ref()?.processes_of(scope.inner.cookie());
                (!processes.is_empty()).then(|| processes.into_iter().filter_map(process::resident_memory).sum())
            }
            Backend::Cgroup(group) => group.memory_bytes(),
        };
        scopes.iter().map(|scope| memory_bytes(scope.as_ref()?)).collect()
    }

    /// What its processes have used so far, as far as a control group counts it. Reads files; blocks.
    pub fn usage(&self) -> ScopeUsage {
        match self.inner.backend() {
            Backend::ProcessGroup | Backend::Subreaper => ScopeUsage::default(),
            Backend::Cgroup(group) => group.usage(),
        }
    }

    /// Identifies its processes for the journal, before the first of them exists. Omits a control group whose path is not UTF-8: the
    /// worker's next start finds it by the work directory.
    pub fn record(&self) -> ProcessRecord {
        let cgroup = self.cgroup().and_then(Path::to_str).map(Into::into);
        ProcessRecord { cookie: self.inner.cookie().into(), cgroup, leaders: Vec::new() }
    }

    pub fn cgroup(&self) -> Option<&Path> {
        match self.inner.backend() {
            Backend::ProcessGroup | Backend::Subreaper => None,
            Backend::Cgroup(group) => Some(group.path()),
        }
    }

    /// Resolves when a process may start. Cancel safe.
    ///
    /// # Errors
    ///
    /// The journal cannot be written, which is a fault of the host.
    pub async fn ensure_recorded(&self) -> io::Result<()> {
        match &self.inner.recorder {
            Some(recorder) => recorder.ensure_recorded(self.record()).await,
            None => Ok(()),
        }
    }

    pub fn cookie(&self) -> Option<&str> {
        Some(self.inner.cookie()).filter(|cookie| !cookie.is_empty())
    }

    /// The limit of the task's directory, in bytes.
    pub fn disk_limit(&self) -> Option<u64> {
        self.inner.containment.limits().disk
    }

    /// Creates the control group for the first process.
    ///
    /// # Errors
    ///
    /// The control group cannot be created, or its limits cannot be set.
    pub fn admit_process(&self) -> io::Result<ScopedProcess> {
        let mut state = self.inner.state.lock();
        if let Backend::Cgroup(group) = self.inner.backend()
            && !state.used
        {
            // As `Other`, because another kind or an error number could be blamed on the task.
            group.create().map_err(io::Error::other)?;
            state.used = true;
            group.set_limits(&self.inner.containment.limits()).map_err(io::Error::other)?;
        }
        state.used = true;
        state.running_count += 1;
        drop(state);
        Ok(ScopedProcess { scope: self.clone(), group: None })
    }

    /// Sends SIGKILL to all processes and waits for nothing, neither for a disk nor for those who wait for their end. Has to
    /// be called on a runtime.
    pub fn kill(&self) {
        let state = self.inner.state.lock();
        if !state.used {
            return;
        }
        if let Some(removal) = self.outside() {
            removal.start();
        }
        for group in &state.groups {
            rustix::process::kill_process_group(*group, Signal::KILL).ok();
        }
        drop(state);
        match self.inner.backend() {
            Backend::ProcessGroup | Backend::Cgroup(_) => self.inner.kill(),
            Backend::Subreaper => {
                // Reading a process may wait for it.
                let scope = self.clone();
                drop(tokio::task::spawn_blocking(move || scope.inner.kill()));
            }
        }
    }

    /// Kills all processes, waits until they are gone, and removes the control group. The scope may be used again.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; killed processes stay killed.
    pub async fn clean_up(&self) -> Cleanup {
        if !self.inner.state.lock().used {
            return Cleanup::Complete;
        }
        self.inner.kill();
        children::mark_claim_ended(self.inner.cookie());
        match tokio::time::timeout(PROCESS_KILL_TIMEOUT, self.wait_cleaned_up()).await {
            Ok(()) => Cleanup::Complete,
            Err(_) => Cleanup::Incomplete,
        }
    }

    /// Resolves when all processes are gone, the control group is removed, and nothing runs outside. Kills processes that it still finds.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn wait_cleaned_up(&self) {
        match self.inner.backend() {
            Backend::ProcessGroup => {}
            Backend::Subreaper => self.kill_orphans().await,
            Backend::Cgroup(group) => loop {
                group.kill_until_empty().await;
                self.kill_orphans().await;
                match group.remove() {
                    Ok(()) => break,
                    Err(error) => tracing::debug!(%error, "cannot remove a control group, retrying"),
                }
                tokio::time::sleep(PROCESS_POLL_INTERVAL).await;
            },
        }
        self.wait_outside_removed().await;
        children::forget_claim(self.inner.cookie());
        *self.inner.state.lock() = ScopeState::default();
    }

    /// Kills orphans until none is left that belongs, or may belong, to this scope. Behind a control group, which was seen empty,
    /// unreadable children do not count, and escaped processes are logged.
    async fn kill_orphans(&self) {
        let in_cgroup = matches!(self.inner.backend(), Backend::Cgroup(_));
        let mut logged = false;
        while !in_cgroup || children::has_orphans() {
            let scan = match children::find_orphans(self.inner.cookie(), Some(Signal::KILL)) {
                Ok(scan) => scan,
                Err(error) if in_cgroup => return tracing::debug!(%error, "cannot list the children of this process"),
                Err(error) => {
                    tracing::debug!(%error, "cannot list the children of this process");
                    tokio::time::sleep(PROCESS_POLL_INTERVAL).await;
                    continue;
                }
            };
            let found = !scan.owned.is_empty() || !scan.ambiguous.is_empty();
            // Once a scope: a fork bomb is another process at each scan.
            if in_cgroup && found && !std::mem::replace(&mut logged, true) {
                tracing::warn!(
                    killed = ?scan.owned, ambiguous = ?scan.ambiguous,
                    "processes have left the control group of their task; slots of tasks that may own an ambiguous one stay \
                     busy, and it is killed when the last such task ends"
                );
            }
            if scan.is_empty() || (in_cgroup && !found) {
                return;
            }
            for pid in scan.owned.iter().chain(&scan.ambiguous) {
                process::wait_for_exit(*pid).await;
            }
            if !found {
                tokio::time::sleep(PROCESS_POLL_INTERVAL).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn c1_a_scope_without_a_process_gets_no_cookie() {
        let scope = Containment::disabled().new_scope();
        assert_eq!(ProcessScope::memory_bytes_of(&[Some(scope.clone())]), [None]);
        assert_eq!(scope.clean_up().await, Cleanup::Complete);
        assert!(scope.inner.identity.get().is_none());
        assert_eq!(scope.cookie().map(str::len), Some(32));
    }

    #[tokio::test]
    async fn an_unused_scope_is_clean() {
        assert_eq!(ProcessScope::without_cookie().clean_up().await, Cleanup::Complete);
    }
}
