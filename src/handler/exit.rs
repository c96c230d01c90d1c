//! Sees processes end without reaping them, and finds out whether a group is empty.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, WaitId, WaitIdOptions};
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::host::process::{LOOK_AGAIN, Life, Stat, descriptor, gone};

/// Tells when a child has ended, and leaves it to be reaped.
#[derive(Debug)]
pub(super) struct Exit {
    child: Pid,
    by: By,
}

#[derive(Debug)]
enum By {
    Descriptor(AsyncFd<OwnedFd>),
    Signal(Signal),
}

impl Exit {
    /// Watches a child that has not been reaped: by a descriptor, or by `SIGCHLD` where the kernel has none (before
    /// Linux 5.3, and in some sandboxes).
    pub(super) fn of(child: Pid) -> io::Result<Self> {
        match descriptor(child) {
            Ok(descriptor) => Ok(Self { child, by: By::Descriptor(descriptor) }),
            Err(_) => Self::by_signal(child),
        }
    }

    fn by_signal(child: Pid) -> io::Result<Self> {
        let by = By::Signal(signal(SignalKind::child())?);
        Ok(Self { child, by })
    }

    /// Resolves when the child has ended, again and again.
    ///
    /// Cancel safe.
    pub(super) async fn seen(&mut self) {
        while !ended(self.child) {
            match &mut self.by {
                By::Descriptor(descriptor) => wait(descriptor).await,
                By::Signal(signals) => {
                    signals.recv().await;
                }
            }
        }
    }
}

async fn wait(descriptor: &AsyncFd<OwnedFd>) {
    match descriptor.readable().await {
        Ok(mut ready) => ready.clear_ready(),
        Err(_) => tokio::time::sleep(LOOK_AGAIN).await,
    }
}

fn ended(child: Pid) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    match rustix::process::waitid(WaitId::Pid(child), options) {
        Ok(status) => status.is_some(),
        // No longer our child: somebody reaped it.
        Err(error) => error == Errno::CHILD,
    }
}

/// Resolves when the leader has ended and its group holds no other process that runs. Where there is no `/proc` to look
/// at, never.
pub(super) async fn group_gone(leader_exit: &mut Exit, leader: Pid) {
    leader_exit.seen().await;
    empty(leader).await;
}

/// The processes of the group that are still there after `patience`. To be called when the leader was reaped.
pub(super) async fn survivors(group: Pid, patience: Duration) -> Vec<i32> {
    if rustix::process::test_kill_process_group(group) == Err(Errno::SRCH) {
        return Vec::new();
    }
    match tokio::time::timeout(patience, empty(group)).await {
        Ok(()) => Vec::new(),
        Err(_) => members(group).unwrap_or_default(),
    }
}

async fn empty(group: Pid) {
    loop {
        match members(group) {
            Ok(members) if members.is_empty() => return,
            Ok(members) => {
                for member in members {
                    gone(member).await;
                }
            }
            Err(_) => std::future::pending::<()>().await,
        }
    }
}

/// The running processes of a group, its leader included; those that ended and wait to be reaped are not among them.
fn members(group: Pid) -> io::Result<Vec<i32>> {
    let of_group = |stat: &Stat| stat.group == group.as_raw_pid() && stat.life == Life::Running;
    Ok(Stat::all()?.into_iter().filter(of_group).map(|stat| stat.pid).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn where_the_kernel_has_no_descriptors_the_signal_tells_of_the_end() {
        let mut child = tokio::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_raw(child.id().unwrap().cast_signed()).unwrap();
        let mut exit = Exit::by_signal(pid).unwrap();
        assert!(!ended(pid));
        drop(child.stdin.take());
        exit.seen().await;
        assert!(child.wait().await.unwrap().success());
    }
}
