//! Sees processes end without reaping them, and finds out whether a group is empty.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// How often a group is looked at where the kernel cannot tell when a process ends.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// How long a process is waited for before its group is looked at again: its number may by now be somebody else's.
const NUMBER_DOUBTED: Duration = Duration::from_secs(1);

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

#[expect(
    deprecated,
    reason = "unsound for types that may close or swap their descriptor; OwnedFd does neither, and the new way is unsafe"
)]
fn descriptor(process: Pid) -> io::Result<AsyncFd<OwnedFd>> {
    let descriptor = rustix::process::pidfd_open(process, PidfdFlags::NONBLOCK)?;
    AsyncFd::with_interest(descriptor, Interest::READABLE)
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
pub(super) async fn survivors(group: Pid, patience: Duration) -> Vec<u32> {
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

/// Waits for a process that is not our child, or for [`NUMBER_DOUBTED`].
async fn gone(process: u32) {
    let Some(pid) = Pid::from_raw(process.cast_signed()) else {
        return;
    };
    match descriptor(pid) {
        Ok(descriptor) => {
            let readable = tokio::time::timeout(NUMBER_DOUBTED, descriptor.readable());
            if let Ok(Err(_)) = readable.await {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        }
        Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {}
        Err(_) => tokio::time::sleep(LOOK_AGAIN).await,
    }
}

/// The running processes of a group, its leader included; those that ended and wait to be reaped are not among them.
fn members(group: Pid) -> io::Result<Vec<u32>> {
    let mut members = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let Some(process) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(format!("/proc/{process}/stat")) else {
            continue;
        };
        if is_running_member(&stat, group.as_raw_pid()) {
            members.push(process);
        }
    }
    Ok(members)
}

/// Reads `pid (name) state ppid pgrp …`, where the name may hold anything.
fn is_running_member(stat: &str, group: i32) -> bool {
    let Some((_, rest)) = stat.rsplit_once(')') else {
        return false;
    };
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next();
    let of_group = fields.nth(1).and_then(|field| field.parse().ok());
    of_group == Some(group) && !matches!(state, Some("Z" | "X") | None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_a_spiteful_name_is_read_right() {
        assert!(is_running_member("7 (a) Z 1 9) S 1 42 42 0", 42));
        assert!(!is_running_member("7 (a) S 1 42) S 1 43 42 0", 42));
    }

    #[test]
    fn a_process_that_waits_to_be_reaped_is_no_member() {
        assert!(!is_running_member("7 (sh) Z 1 42 42 0", 42));
    }

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
