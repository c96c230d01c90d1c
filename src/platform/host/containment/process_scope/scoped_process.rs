//! One process of a scope: how it is started, terminated and waited for.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::Gid;
use rustix::process::{Pid, Signal};
use tokio::time::timeout;

use super::super::super::process::{self, PROCESS_POLL_INTERVAL};
use super::super::super::task_user::TaskUser;
use super::super::children::{self, OrphanScan};
use super::super::{exec_shim, shim_launch};
use super::{Backend, LimitExceeded, ProcessScope, ScopeInner};
use journeyman_domain::journal::Leader;
use journeyman_domain::limits::PROCESS_KILL_TIMEOUT;

/// Exists from just before the process starts until it was waited for.
#[derive(Debug)]
pub struct ScopedProcess {
    pub(super) scope: ProcessScope,
    /// Its process group, which is in the list of the scope.
    pub(super) group: Option<Pid>,
}

impl Drop for ScopedProcess {
    fn drop(&mut self) {
        // The last process takes everything in the scope with it.
        if self.is_last() {
            self.scope.inner.kill();
        }
        self.before_reaping();
        let mut state = self.scope.inner.state.lock();
        state.running_count = state.running_count.saturating_sub(1);
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LaunchMethod {
    Direct,
    /// Start another program, which becomes the exec shim, with `arguments` before those of the payload.
    ViaShim {
        program: PathBuf,
        arguments: Vec<OsString>,
    },
}

impl ScopedProcess {
    fn inner(&self) -> &ScopeInner {
        &self.scope.inner
    }

    /// How to start a program, as another user in further groups if there is one.
    pub fn launch_method(
        &self,
        program: &Path,
        argv0: &str,
        user: Option<(&TaskUser, &[Gid])>,
    ) -> io::Result<LaunchMethod> {
        let procs = match self.inner().backend() {
            Backend::ProcessGroup | Backend::Subreaper => None,
            Backend::Cgroup(group) => Some(group.procs_path()),
        };
        let payload =
            |procs: &Path| -> [OsString; 4] { [exec_shim::PAYLOAD.into(), procs.into(), program.into(), argv0.into()] };
        Ok(match (procs, user) {
            (None, None) => LaunchMethod::Direct,
            (Some(procs), None) => {
                LaunchMethod::ViaShim { program: shim_launch::shim_path()?.into(), arguments: payload(&procs).into() }
            }
            // The shim that becomes the payload runs as the user, and is in the group by then.
            (procs, Some((user, groups))) => {
                let mut line = user.command_line(groups);
                line.extend(payload(Path::new("/dev/null")));
                if let Some(procs) = procs {
                    let enter = [shim_launch::shim_path()?.into(), exec_shim::EXEC.into(), procs.into()];
                    line.splice(0..0, enter);
                }
                LaunchMethod::ViaShim { program: line.remove(0).into(), arguments: line }
            }
        })
    }

    /// The claim's cookie, if orphans of the claim can be found.
    pub fn orphan_cookie(&self) -> Option<&str> {
        let adopts = !matches!(self.inner().backend(), Backend::ProcessGroup);
        adopts.then_some(self.inner().cookie())
    }

    pub fn on_started(&mut self, leader: Pid) {
        self.scope.inner.state.lock().groups.push(leader);
        self.group = Some(leader);
        let process = leader.as_raw_pid();
        // A control group is recorded instead.
        if let (Backend::ProcessGroup | Backend::Subreaper, Some(recorder)) =
            (self.inner().backend(), &self.inner().recorder)
            && let Some(stat) = process::ProcessStat::read(process)
        {
            recorder.record_leader(Leader { pid: process, start_ticks: stat.start_ticks });
        }
        if let Backend::Subreaper = self.inner().backend() {
            // The exec shim does it in a control group.
            drop(std::fs::write(format!("/proc/{process}/oom_score_adj"), exec_shim::OOM_SCORE));
        }
    }

    /// Has to be called before the leader is reaped, after which another process may get its number.
    pub fn before_reaping(&mut self) {
        if let Some(leader) = self.group.take() {
            self.scope.inner.state.lock().groups.retain(|group| *group != leader);
        }
    }

    /// True if no other process of the scope is still to be waited for.
    fn is_last(&self) -> bool {
        self.inner().state.lock().running_count <= 1
    }

    /// Whether the scope contains every process of the process group, so that `/proc` need not be searched for it.
    pub fn contains_process_group(&self) -> bool {
        matches!(self.inner().backend(), Backend::Cgroup(_)) && self.is_last()
    }

    /// Sends TERM to the processes outside the process group.
    pub fn terminate_outside_group(&self, group: i32) {
        if !self.is_last() {
            return;
        }
        let outside = |process| process::ProcessStat::read(process).is_some_and(|stat| stat.group != group);
        match self.inner().backend() {
            Backend::ProcessGroup => {}
            Backend::Subreaper => {
                drop(children::find_orphans(self.inner().cookie(), Some(Signal::TERM)));
            }
            Backend::Cgroup(group) => group.signal(Signal::TERM, outside),
        }
    }

    /// Resolves when all processes have exited. Cancel safe.
    pub async fn wait_exited(&self) {
        match self.inner().backend() {
            Backend::Cgroup(group) if self.is_last() => group.wait_empty().await,
            Backend::Subreaper if self.is_last() => self.wait_orphans_exited(None).await,
            Backend::ProcessGroup | Backend::Subreaper | Backend::Cgroup(_) => {}
        }
    }

    /// Kills all processes, unless another process of the scope is to be waited for.
    pub fn kill(&self) {
        if self.is_last() {
            self.inner().kill();
        }
    }

    /// Kills all processes, unless another process of the scope is to be waited for. Returns whether they have ended within
    /// [`PROCESS_KILL_TIMEOUT`].
    pub async fn end(&self) -> bool {
        match self.inner().backend() {
            Backend::Cgroup(group) if self.is_last() => {
                timeout(PROCESS_KILL_TIMEOUT, group.kill_until_empty()).await.is_ok()
            }
            Backend::Subreaper if self.is_last() => {
                let ended = timeout(PROCESS_KILL_TIMEOUT, self.wait_orphans_exited(Some(Signal::KILL))).await;
                let is_empty = |orphans: OrphanScan| orphans.owned.is_empty();
                ended.is_ok() || children::find_orphans(self.inner().cookie(), None).map_or(true, is_empty)
            }
            Backend::ProcessGroup | Backend::Subreaper | Backend::Cgroup(_) => true,
        }
    }

    /// Sends `signal` to the orphans of the claim until all have exited.
    async fn wait_orphans_exited(&self, signal: Option<Signal>) {
        while let Ok(orphans) = children::find_orphans(self.inner().cookie(), signal) {
            if orphans.owned.is_empty() && !orphans.changed_during_scan {
                return;
            }
            if orphans.owned.is_empty() {
                tokio::time::sleep(PROCESS_POLL_INTERVAL).await;
            }
            for pid in orphans.owned {
                process::wait_for_exit(pid).await;
            }
            drop(children::reap_orphans());
        }
    }

    /// The limit that a process exceeded since the last call.
    pub fn take_exceeded_limit(&self) -> Option<LimitExceeded> {
        let Backend::Cgroup(group) = self.inner().backend() else { return None };
        let limits = self.inner().containment.limits();
        let mut state = self.inner().state.lock();
        let more = |file, event, seen: &mut u64| {
            let count = group.event_count(file, event);
            std::mem::replace(seen, count) < count
        };
        if let Some(bytes) = limits.memory
            && more("memory.events", "oom_kill", &mut state.oom_kill_count)
        {
            return Some(LimitExceeded::Memory { bytes });
        }
        let max = limits.processes?;
        more("pids.events", "max", &mut state.pids_refused_count).then_some(LimitExceeded::Processes { max })
    }
}
