//! Sees processes end without reaping them, and finds out whether a group is empty.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, WaitId, WaitIdOptions};
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::host::process::{PROCESS_POLL_INTERVAL, ProcessStat, ProcessState, open_pidfd, wait_for_exit};

/// Tells when a child has ended, and leaves it to be reaped.
#[derive(Debug)]
pub(super) struct ExitWatcher {
    child: Pid,
    method: WatchMethod,
}

#[derive(Debug)]
enum WatchMethod {
    Descriptor(AsyncFd<OwnedFd>),
    Signal(Signal),
}

impl ExitWatcher {
    /// Watches a child that has not been reaped: by a descriptor, or by `SIGCHLD` where the kernel has none (before
    /// Linux 5.3, and in some sandboxes).
    pub(super) fn of(child: Pid) -> io::Result<Self> {
        match open_pidfd(child) {
            Ok(descriptor) => Ok(Self { child, method: WatchMethod::Descriptor(descriptor) }),
            Err(_) => Self::by_signal(child),
        }
    }

    fn by_signal(child: Pid) -> io::Result<Self> {
        let by = WatchMethod::Signal(signal(SignalKind::child())?);
        Ok(Self { child, method: by })
    }

    /// Resolves when the child has ended, again and again.
    ///
    /// Cancel safe.
    pub(super) async fn exited(&mut self) {
        while !has_exited(self.child) {
            match &mut self.method {
                WatchMethod::Descriptor(descriptor) => wait_readable(descriptor).await,
                WatchMethod::Signal(signals) => {
                    signals.recv().await;
                }
            }
        }
    }
}

async fn wait_readable(descriptor: &AsyncFd<OwnedFd>) {
    match descriptor.readable().await {
        Ok(mut ready) => ready.clear_ready(),
        Err(_) => tokio::time::sleep(PROCESS_POLL_INTERVAL).await,
    }
}

fn has_exited(child: Pid) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    match rustix::process::waitid(WaitId::Pid(child), options) {
        Ok(status) => status.is_some(),
        // No longer our child: somebody reaped it.
        Err(error) => error == Errno::CHILD,
    }
}

/// Resolves when the leader has ended and its group holds no other process that runs. Where there is no `/proc` to look
/// at, never.
pub(super) async fn group_exited(leader_exit: &mut ExitWatcher, leader: Pid) {
    leader_exit.exited().await;
    wait_until_empty(leader).await;
}

/// The processes of the group that are still there after `patience`. To be called when the leader was reaped.
pub(super) async fn survivors(group: Pid, patience: Duration) -> Vec<i32> {
    if rustix::process::test_kill_process_group(group) == Err(Errno::SRCH) {
        return Vec::new();
    }
    match tokio::time::timeout(patience, wait_until_empty(group)).await {
        Ok(()) => Vec::new(),
        Err(_) => running_members(group).unwrap_or_default(),
    }
}

async fn wait_until_empty(group: Pid) {
    loop {
        match running_members(group) {
            Ok(members) if members.is_empty() => return,
            Ok(members) => {
                for member in members {
                    wait_for_exit(member).await;
                }
            }
            Err(_) => std::future::pending::<()>().await,
        }
    }
}

/// The running processes of a group, its leader included; those that ended and wait to be reaped are not among them.
fn running_members(group: Pid) -> io::Result<Vec<i32>> {
    let of_group = |stat: &ProcessStat| stat.group == group.as_raw_pid() && stat.state == ProcessState::Running;
    Ok(ProcessStat::read_all()?.into_iter().filter(of_group).map(|stat| stat.pid).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn where_the_kernel_has_no_descriptors_the_signal_tells_of_the_end() {
        let mut child = tokio::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_raw(child.id().unwrap().cast_signed()).unwrap();
        let mut exit = ExitWatcher::by_signal(pid).unwrap();
        assert!(!has_exited(pid));
        drop(child.stdin.take());
        exit.exited().await;
        assert!(child.wait().await.unwrap().success());
    }
}
