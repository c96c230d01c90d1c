//! Waits for child processes to exit without reaping them, and for process groups to become empty.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, WaitId, WaitIdOptions};
use tokio::io::unix::AsyncFd;

use journeyman_platform::host::process::{PROCESS_POLL_INTERVAL, ProcessStat, ProcessState, open_pidfd, wait_for_exit};

#[derive(Debug)]
pub(super) struct ExitWatcher {
    child: Pid,
    /// `None` before Linux 5.3 and in sandboxes without pidfd.
    descriptor: Option<AsyncFd<OwnedFd>>,
}

impl ExitWatcher {
    /// Watches an unreaped child.
    pub(super) fn of(child: Pid) -> Self {
        Self { child, descriptor: open_pidfd(child).ok() }
    }

    pub(super) async fn exited(&mut self) {
        while !has_exited(self.child) {
            if let Some(descriptor) = &self.descriptor
                && let Ok(mut ready) = descriptor.readable().await
            {
                ready.clear_ready();
            } else {
                tokio::time::sleep(PROCESS_POLL_INTERVAL).await;
            }
        }
    }
}

fn has_exited(child: Pid) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    match rustix::process::waitid(WaitId::Pid(child), options) {
        Ok(status) => status.is_some(),
        // Already reaped.
        Err(error) => error == Errno::CHILD,
    }
}

/// Whether no process of the group runs after `wait` at most. Call it after the leader was reaped.
pub(super) async fn has_ended(group: Pid, wait: Duration) -> bool {
    rustix::process::test_kill_process_group(group) == Err(Errno::SRCH)
        || tokio::time::timeout(wait, wait_until_empty(group)).await.is_ok()
        || running_members(group).map_or(true, |members| members.is_empty())
}

/// Resolves when no process of the group runs. Pending forever without `/proc`.
pub(super) async fn wait_until_empty(group: Pid) {
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

/// The running processes of a group; zombies do not count.
fn running_members(group: Pid) -> io::Result<Vec<i32>> {
    let of_group = |stat: &ProcessStat| stat.group == group.as_raw_pid() && stat.state == ProcessState::Running;
    Ok(ProcessStat::read_all()?.into_iter().filter(of_group).map(|stat| stat.pid).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_exit_is_seen_without_pidfd() {
        let mut child = tokio::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = Pid::from_raw(child.id().unwrap().cast_signed()).unwrap();
        let mut exit = ExitWatcher { child: pid, descriptor: None };
        assert!(!has_exited(pid));
        drop(child.stdin.take());
        exit.exited().await;
        assert!(child.wait().await.unwrap().success());
    }
}
