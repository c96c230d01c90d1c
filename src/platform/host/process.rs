//! Processes that need not be children of this one: reading `/proc`, signalling and waiting by pidfd.
//!
//! A PID may be reused as soon as the process is reaped. A process that is not our child is therefore signalled through a
//! pidfd, after it was checked again.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use journeyman_domain::limits::{DESCENT_ATTEMPTS_MAX, DESCENT_DEPTH_MAX, PROCESS_ENVIRONMENT_BYTES_MAX};

/// The interval of looks at state whose changes the kernel does not announce.
pub const PROCESS_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// How long to wait for a process before it is checked again: its PID may have been reused.
const PID_RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Reads a file that the kernel writes while it is read. Names in it need not be UTF-8, and its length is not known before, so that
/// `std::fs::read` would ask for it in vain, and then read 32 bytes, 32, 64 and so on.
pub(super) fn read_kernel_file(path: impl AsRef<Path>) -> io::Result<String> {
    let mut content = Vec::with_capacity(KERNEL_FILE_BYTES_USUAL);
    File::open(path)?.take(u64::MAX).read_to_end(&mut content)?;
    Ok(String::from_utf8(content).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

const KERNEL_FILE_BYTES_USUAL: usize = 1 << 10;

/// The fields of `/proc/PID/stat` that are used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessStat {
    pub pid: i32,
    pub state: ProcessState,
    pub parent: i32,
    pub group: i32,
    /// The start in clock ticks since boot.
    pub start_ticks: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessState {
    Running,
    /// Exited and not reaped.
    Zombie,
}

impl ProcessStat {
    pub fn read(pid: i32) -> Option<Self> {
        Self::try_read(pid).ok().flatten()
    }

    /// `None` is a missing process; a process that cannot be read is an error.
    pub fn try_read(pid: i32) -> io::Result<Option<Self>> {
        match read_kernel_file(format!("/proc/{pid}/stat")) {
            Ok(stat) => Self::parse(&stat).map(Some).ok_or_else(|| io::ErrorKind::InvalidData.into()),
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
        // A process whose first thread has exited looks like a zombie while other threads run.
        let process_state =
            if matches!(state, "Z" | "X") && threads <= 1 { ProcessState::Zombie } else { ProcessState::Running };
        Some(Self { pid, state: process_state, parent, group, start_ticks: started })
    }

    pub fn read_all() -> io::Result<Vec<Self>> {
        let mut all = Vec::new();
        for entry in std::fs::read_dir("/proc")? {
            let pid = entry?.file_name().to_str().and_then(|name| name.parse().ok());
            all.extend(pid.and_then(Self::read));
        }
        Ok(all)
    }

    /// Signals the process, unless it has ended and its PID is reused.
    pub fn signal(&self, signal: Signal) {
        signal_if(self.pid, signal, |pid| Self::read(pid).is_some_and(|now| now.start_ticks == self.start_ticks));
    }
}

/// Whether a process descends from this one, so that a task, a hook or a sidecar has started it. A descendant whose parents
/// have ended is a child of this process, if that adopts orphans. `None` is unknown.
pub fn is_descendant(pid: i32) -> Option<bool> {
    let own = std::process::id().cast_signed();
    if pid == own {
        return Some(false);
    }
    // A parent that ends meanwhile breaks the chain.
    (0..DESCENT_ATTEMPTS_MAX).find_map(|_| {
        let mut process = pid;
        for _ in 0..DESCENT_DEPTH_MAX {
            process = ProcessStat::read(process)?.parent;
            if process == own {
                return Some(true);
            }
            if process <= 1 {
                return Some(false);
            }
        }
        None
    })
}

/// The children of this process's first thread, zombies included. The kernel gives orphans to the first living thread of a
/// process, and the main thread of a Rust program lives as long as the program.
pub(crate) fn adopted_children() -> io::Result<Vec<i32>> {
    let own = std::process::id();
    match read_kernel_file(format!("/proc/self/task/{own}/children")) {
        Ok(list) => Ok(list.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect()),
        // A kernel built without CONFIG_PROC_CHILDREN.
        Err(_) => {
            let all = ProcessStat::read_all()?;
            Ok(all.into_iter().filter(|stat| stat.parent == own.cast_signed()).map(|stat| stat.pid).collect())
        }
    }
}

/// The processes and their descendants, as far as the parent links are intact.
pub(crate) fn with_descendants(roots: &[i32], all: &[ProcessStat]) -> Vec<i32> {
    let mut found = roots.to_vec();
    let mut at = 0;
    while let Some(&parent) = found.get(at) {
        at += 1;
        let children = all.iter().filter(|stat| stat.parent == parent && stat.state == ProcessState::Running);
        let children: Vec<i32> = children.map(|stat| stat.pid).filter(|pid| !found.contains(pid)).collect();
        found.extend(children);
    }
    found
}

/// Blocks until `condition` holds, at most for `timeout`. Returns whether it holds.
pub(crate) fn poll_blocking(timeout: Duration, mut condition: impl FnMut() -> bool) -> bool {
    for _ in 0..timeout.as_millis() / PROCESS_POLL_INTERVAL.as_millis() {
        if condition() {
            return true;
        }
        std::thread::sleep(PROCESS_POLL_INTERVAL);
    }
    false
}

/// The memory in bytes; `None` if the process has ended.
pub(crate) fn resident_memory(pid: i32) -> Option<u64> {
    parse_resident_memory(&read_kernel_file(format!("/proc/{pid}/status")).ok()?)
}

fn parse_resident_memory(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

/// From the environment that the process was started with. `None` if it is not set, or cannot be read.
pub(crate) fn environment_variable(pid: i32, name: &str) -> Option<String> {
    let environment = read_environment(format!("/proc/{pid}/environ")).or_else(|| {
        // The environment of an exited first thread is empty.
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten();
        threads.map(|thread| thread.path().join("environ")).find_map(read_environment)
    })?;
    environment.split(|byte| *byte == 0).find_map(|pair| {
        let value = pair.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?;
        String::from_utf8(value.to_vec()).ok()
    })
}

/// `None` if the file is missing or empty.
fn read_environment(file: impl AsRef<Path>) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = File::open(file).ok()?;
    file.take(PROCESS_ENVIRONMENT_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    (!bytes.is_empty()).then_some(bytes)
}

/// Signals a process, if `is_same` holds after a pidfd has pinned its PID.
pub(crate) fn signal_if(process: i32, signal: Signal, is_same: impl Fn(i32) -> bool) {
    let Some(pid) = Pid::from_raw(process) else { return };
    let sent = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
        Ok(descriptor) if is_same(process) => rustix::process::pidfd_send_signal(&descriptor, signal),
        Ok(_) | Err(Errno::SRCH) => return,
        // pidfds are not available: before Linux 5.3, and in some sandboxes.
        Err(_) if is_same(process) => rustix::process::kill_process(pid, signal),
        Err(_) => return,
    };
    match sent {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => tracing::warn!(process, ?signal, %error, "cannot signal a process of a payload"),
    }
}

#[expect(
    deprecated,
    reason = "unsound for types that may close or swap their descriptor; OwnedFd does neither, and the new way is unsafe"
)]
pub fn open_pidfd(process: Pid) -> io::Result<AsyncFd<OwnedFd>> {
    let descriptor = rustix::process::pidfd_open(process, PidfdFlags::NONBLOCK)?;
    AsyncFd::with_interest(descriptor, Interest::READABLE)
}

/// Waits for a process that is not our child, or for `PID_RECHECK_INTERVAL`.
pub async fn wait_for_exit(process: i32) {
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
    fn resident_memory_is_parsed() {
        assert_eq!(parse_resident_memory("Name:\tsh\nVmRSS:\t    1840 kB\nRssAnon:\t 96 kB\n"), Some(1840 << 10));
        assert_eq!(parse_resident_memory("Name:\tkthreadd\n"), None);
        assert!(resident_memory(std::process::id().cast_signed()).is_some_and(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn a_process_name_with_parentheses_is_parsed() {
        let stat = ProcessStat::parse(&format!("7 (a) Z 1 9) S 3 42 42 {TAIL}")).unwrap();
        assert_eq!(
            (stat.pid, stat.state, stat.parent, stat.group, stat.start_ticks),
            (7, ProcessState::Running, 3, 42, 777)
        );
        assert_eq!(ProcessStat::parse("7 (a) S 1"), None);
    }

    #[test]
    fn an_unreaped_process_is_a_zombie() {
        assert_eq!(ProcessStat::parse(&format!("7 (sh) Z 1 42 42 {TAIL}")).unwrap().state, ProcessState::Zombie);
    }

    #[test]
    fn a_process_with_an_exited_first_thread_still_runs() {
        let tail = TAIL.replace("20 0 1 0 777", "20 0 2 0 777");
        assert_eq!(ProcessStat::parse(&format!("7 (sh) Z 1 42 42 {tail}")).unwrap().state, ProcessState::Running);
    }

    #[test]
    fn this_process_is_found_in_proc() {
        let own = std::process::id().cast_signed();
        let stat = ProcessStat::read(own).unwrap();
        assert_eq!((stat.pid, stat.state), (own, ProcessState::Running));
        assert!(stat.start_ticks > 0);
        assert!(ProcessStat::read_all().unwrap().iter().any(|stat| stat.pid == own));
    }

    #[test]
    fn only_descendants_are_found_at_any_depth() {
        let stat = |pid, parent| ProcessStat { pid, state: ProcessState::Running, parent, group: 0, start_ticks: 0 };
        let all = [stat(4, 3), stat(3, 2), stat(2, 1), stat(9, 1)];
        assert_eq!(with_descendants(&[2], &all), [2, 3, 4]);
    }
}
