//! Processes that need not be our children: what `/proc` tells of them, signals that cannot reach a stranger, and their
//! end.
//!
//! A process's number may be given to another one as soon as it is reaped. Whoever is not our own child is therefore
//! signaled through a descriptor, and only after it was looked at again.

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::limits::PROCESS_ENVIRONMENT_BYTES_MAX;

/// How often something is looked at where the kernel cannot tell when it changes.
pub(crate) const PROCESS_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// How long a process is waited for before it is looked at again: its number may by now be somebody else's.
const PID_RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// What `/proc/PID/stat` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProcessStat {
    pub(crate) pid: i32,
    pub(crate) state: ProcessState,
    pub(crate) parent: i32,
    pub(crate) group: i32,
    /// In clock ticks since the host was started.
    pub(crate) start_ticks: u64,
}

/// Whether a process can still do something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessState {
    Running,
    /// It ended and waits to be reaped.
    Zombie,
}

impl ProcessStat {
    pub(crate) fn read(pid: i32) -> Option<Self> {
        Self::try_read(pid).ok().flatten()
    }

    /// The same, where what cannot be told from its absence matters: `None` is one that is not there.
    pub(crate) fn try_read(pid: i32) -> io::Result<Option<Self>> {
        match std::fs::read(format!("/proc/{pid}/stat")) {
            // Its name need not be text.
            Ok(bytes) => {
                Self::parse(&String::from_utf8_lossy(&bytes)).map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into())
            }
            Err(error)
                if error.kind() == io::ErrorKind::NotFound
                    || error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Reads `pid (name) state ppid pgrp …`, where the name may hold anything.
    fn parse(stat: &str) -> Option<Self> {
        let (before, after) = stat.rsplit_once(')')?;
        let pid = before.split_once(' ')?.0.parse().ok()?;
        let mut fields = after.split_ascii_whitespace();
        let state = fields.next()?;
        let parent = fields.next()?.parse().ok()?;
        let group = fields.next()?.parse().ok()?;
        let threads: u32 = fields.nth(14)?.parse().ok()?;
        let started = fields.nth(1)?.parse().ok()?;
        // One whose first thread has ended looks ended, and goes on in the others.
        let life =
            if matches!(state, "Z" | "X") && threads <= 1 { ProcessState::Zombie } else { ProcessState::Running };
        Some(Self { pid, state: life, parent, group, start_ticks: started })
    }

    /// Every process that can be seen.
    pub(crate) fn read_all() -> io::Result<Vec<Self>> {
        let mut all = Vec::new();
        for entry in std::fs::read_dir("/proc")? {
            let pid = entry?.file_name().to_str().and_then(|name| name.parse().ok());
            all.extend(pid.and_then(Self::read));
        }
        Ok(all)
    }
}

/// The children of this process that orphans are among, those that ended included. The kernel gives orphans to the first thread
/// of a process that lives, and that of a program in Rust lives for as long as the program.
pub(crate) fn adopted_children() -> io::Result<Vec<i32>> {
    let own = std::process::id();
    match std::fs::read_to_string(format!("/proc/self/task/{own}/children")) {
        Ok(list) => Ok(list.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect()),
        // A kernel without these lists.
        Err(_) => {
            let all = ProcessStat::read_all()?;
            Ok(all.into_iter().filter(|stat| stat.parent == own.cast_signed()).map(|stat| stat.pid).collect())
        }
    }
}

/// Those processes and everything they started that still has its parents.
pub(crate) fn with_descendants(roots: &[i32], all: &[ProcessStat]) -> Vec<i32> {
    let mut found = roots.to_vec();
    let mut at = 0;
    while let Some(&parent) = found.get(at) {
        at += 1;
        let born = all.iter().filter(|stat| stat.parent == parent && stat.state == ProcessState::Running);
        let born: Vec<i32> = born.map(|stat| stat.pid).filter(|pid| !found.contains(pid)).collect();
        found.extend(born);
    }
    found
}

/// Bytes of memory that a process takes up; `None` where it has ended.
pub(crate) fn resident_memory(pid: i32) -> Option<u64> {
    parse_resident_memory(&String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/status")).ok()?))
}

fn parse_resident_memory(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

/// The value of a variable in the environment that a process was started with. `None` where it has none, and where we may
/// not look.
pub(crate) fn environment_variable(pid: i32, name: &str) -> Option<String> {
    let environment = read_environment(format!("/proc/{pid}/environ")).or_else(|| {
        // A first thread that has ended has none to show.
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten();
        threads.map(|thread| thread.path().join("environ")).find_map(read_environment)
    })?;
    environment.split(|byte| *byte == 0).find_map(|pair| {
        let value = pair.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
        String::from_utf8(value.to_vec()).ok()
    })
}

/// What a file of `/proc` shows of an environment, if it shows anything.
fn read_environment(file: impl AsRef<Path>) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(file).ok()?;
    file.take(PROCESS_ENVIRONMENT_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    (!bytes.is_empty()).then_some(bytes)
}

/// Signals a process if it still is what it was taken for when its number can no longer go to another.
pub(crate) fn signal_if(process: i32, signal: Signal, still: impl Fn(i32) -> bool) {
    let Some(pid) = Pid::from_raw(process) else { return };
    let sent = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(descriptor) if still(process) => rustix::process::pidfd_send_signal(&descriptor, signal),
        Ok(_) | Err(Errno::SRCH) => return,
        // No such descriptors here (before Linux 5.3, and in some sandboxes).
        Err(_) if still(process) => rustix::process::kill_process(pid, signal),
        Err(_) => return,
    };
    match sent {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => tracing::warn!(process, ?signal, %error, "a payload's process cannot be signaled"),
    }
}

#[expect(
    deprecated,
    reason = "unsound for types that may close or swap their descriptor; OwnedFd does neither, and the new way is unsafe"
)]
pub(crate) fn open_pidfd(process: Pid) -> io::Result<AsyncFd<OwnedFd>> {
    let descriptor = rustix::process::pidfd_open(process, PidfdFlags::NONBLOCK)?;
    AsyncFd::with_interest(descriptor, Interest::READABLE)
}

/// Waits for a process that is not our child, or for [`PID_RECHECK_INTERVAL`].
pub(crate) async fn wait_for_exit(process: i32) {
    let Some(pid) = Pid::from_raw(process) else { return };
    match open_pidfd(pid) {
        Ok(descriptor) => {
            let readable = tokio::time::timeout(PID_RECHECK_INTERVAL, descriptor.readable());
            if let Ok(Err(_)) = readable.await {
                tokio::time::sleep(PROCESS_POLL_INTERVAL).await;
            }
        }
        Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {}
        Err(_) => tokio::time::sleep(PROCESS_POLL_INTERVAL).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TAIL: &str = "0 0 0 0 0 0 0 0 0 0 0 20 0 1 0 777 0";

    #[test]
    fn what_is_resident_of_a_process_is_read() {
        assert_eq!(parse_resident_memory("Name:\tsh\nVmRSS:\t    1840 kB\nRssAnon:\t 96 kB\n"), Some(1840 << 10));
        assert_eq!(parse_resident_memory("Name:\tkthreadd\n"), None);
        assert!(resident_memory(std::process::id().cast_signed()).is_some_and(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn a_process_with_a_spiteful_name_is_read_right() {
        let stat = ProcessStat::parse(&format!("7 (a) Z 1 9) S 3 42 42 {TAIL}")).unwrap();
        assert_eq!(
            (stat.pid, stat.state, stat.parent, stat.group, stat.start_ticks),
            (7, ProcessState::Running, 3, 42, 777)
        );
        assert_eq!(ProcessStat::parse("7 (a) S 1"), None);
    }

    #[test]
    fn a_process_that_waits_to_be_reaped_does_not_run() {
        assert_eq!(ProcessStat::parse(&format!("7 (sh) Z 1 42 42 {TAIL}")).unwrap().state, ProcessState::Zombie);
    }

    #[test]
    fn a_process_whose_first_thread_has_ended_runs_in_the_others() {
        let tail = TAIL.replace("20 0 1 0 777", "20 0 2 0 777");
        assert_eq!(ProcessStat::parse(&format!("7 (sh) Z 1 42 42 {tail}")).unwrap().state, ProcessState::Running);
    }

    #[test]
    fn what_proc_says_of_ourselves_is_read() {
        let own = std::process::id().cast_signed();
        let stat = ProcessStat::read(own).unwrap();
        assert_eq!((stat.pid, stat.state), (own, ProcessState::Running));
        assert!(stat.start_ticks > 0);
        assert!(ProcessStat::read_all().unwrap().iter().any(|stat| stat.pid == own));
    }

    #[test]
    fn descendants_are_found_at_any_depth_and_strangers_are_not() {
        let stat = |pid, parent| ProcessStat { pid, state: ProcessState::Running, parent, group: 0, start_ticks: 0 };
        let all = [stat(4, 3), stat(3, 2), stat(2, 1), stat(9, 1)];
        assert_eq!(with_descendants(&[2], &all), [2, 3, 4]);
    }
}
