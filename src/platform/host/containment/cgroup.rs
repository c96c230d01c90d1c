//! Control groups (version 2): finding this process's own group, creating, filling, killing and removing groups.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::super::mounts;
use super::super::process::{self, PROCESS_POLL_INTERVAL};
use super::super::work_dir::child_dirs;
use super::{CLAIM_CGROUP_PREFIX, ResourceLimits, ScopeUsage};
use journeyman_domain::limits::{CGROUP_KILL_EACH_DELAY, CGROUP_KILL_INTERVAL, CGROUPS_NESTED_MAX};

/// Lists the processes of a group; a process that writes to it moves into the group.
const PROCS_FILE: &str = "cgroup.procs";
/// Says whether the group has processes, and announces a change.
const EVENTS_FILE: &str = "cgroup.events";
/// Kills all processes at once, even a fork bomb. Since Linux 5.14.
pub(super) const KILL_FILE: &str = "cgroup.kill";

/// The control group of this process, as a path in the mounted cgroup2 file system.
pub fn own_cgroup_path() -> Result<PathBuf, String> {
    let mounts = mounts::mount_table().map_err(|error| format!("cannot read mounts: {error}"))?;
    let groups = std::fs::read_to_string("/proc/self/cgroup")
        .map_err(|error| format!("cannot read /proc/self/cgroup: {error}"))?;
    let group = parse_v2_path(&groups).ok_or("the kernel has no control groups of version 2")?;
    mounted_path(&mounts, group).ok_or_else(|| format!("no mounted cgroup2 file system contains the group {group}"))
}

fn parse_v2_path(groups: &str) -> Option<&str> {
    groups.lines().find_map(|line| line.strip_prefix("0::"))
}

/// The cookies of the claims whose groups contain a process, innermost first.
pub(super) fn claim_cookies_of(process: i32) -> Vec<String> {
    let groups = process::read_kernel_file(format!("/proc/{process}/cgroup")).unwrap_or_default();
    // An exited process stays in its group after the group was removed.
    let group = parse_v2_path(&groups).map(|group| group.strip_suffix(" (deleted)").unwrap_or(group));
    let parts = group.unwrap_or_default().rsplit('/');
    parts.filter_map(|part| part.strip_prefix(CLAIM_CGROUP_PREFIX)).map(ToOwned::to_owned).collect()
}

/// The path of a group in the file system. The last of several mounts hides the others.
fn mounted_path(mounts: &[u8], group: &str) -> Option<PathBuf> {
    mounts.split(|byte| *byte == b'\n').rev().find_map(|line| {
        let fields = || line.split(|byte| *byte == b' ');
        // The type of the file system follows a dash.
        if fields().skip_while(|field| *field != b"-").nth(1) != Some(b"cgroup2") {
            return None;
        }
        let mut fields = fields().skip(3);
        let (root, point) = (mounts::unescape_path(fields.next()?), mounts::unescape_path(fields.next()?));
        let relative = Path::new(group).strip_prefix(&root).ok()?;
        Some(point.join(relative))
    })
}

/// A control group, which may not exist yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    pub const fn at(path: PathBuf) -> Self {
        Self { path }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn create(&self) -> io::Result<()> {
        match std::fs::create_dir(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            // An administrator or tool removed the parent, which is empty between two tasks, and may do so again.
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.is_below_groups() => {
                drop(self.path.parent().map(std::fs::create_dir));
                std::fs::create_dir(&self.path).map_err(|error| self.with_path(&error))
            }
            result => result.map_err(|error| self.with_path(&error)),
        }
    }

    /// True if the grandparent directory is a control group.
    fn is_below_groups(&self) -> bool {
        self.path.parent().and_then(Path::parent).is_some_and(|outer| outer.join(PROCS_FILE).exists())
    }

    pub(super) fn procs_path(&self) -> PathBuf {
        self.file_path(PROCS_FILE)
    }

    fn file_path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    fn with_path(&self, error: &io::Error) -> io::Error {
        io::Error::new(error.kind(), format!("control group {}: {error}", self.path.display()))
    }

    pub(super) fn has_file(&self, file: &str) -> bool {
        self.file_path(file).exists()
    }

    pub(super) fn read(&self, file: &str) -> io::Result<String> {
        process::read_kernel_file(self.file_path(file))
    }

    pub(super) fn write(&self, file: &str, text: &str) -> io::Result<()> {
        std::fs::write(self.file_path(file), text)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", self.file_path(file).display())))
    }

    /// Has to be called before a process enters.
    pub(super) fn set_limits(&self, limits: &ResourceLimits) -> io::Result<()> {
        if let Some(bytes) = limits.memory {
            self.write("memory.max", &bytes.to_string())?;
            // Without the first the limit only moves memory to swap; without the second half of a payload survives.
            for (file, text) in [("memory.swap.max", "0"), ("memory.oom.group", "1")] {
                if self.has_file(file) {
                    self.write(file, text)?;
                }
            }
        }
        match limits.processes {
            Some(max) => self.write("pids.max", &max.to_string()),
            None => Ok(()),
        }
    }

    /// Reads a counter of one of the group's `*.events` files.
    pub(super) fn event_count(&self, file: &str, event: &str) -> u64 {
        self.read(file).ok().and_then(|text| event_value(&text, event)).unwrap_or_default()
    }

    /// Sends SIGKILL to every process in the group and its descendants, without waiting.
    pub fn kill(&self) {
        if let Err(error) = self.try_kill()
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::error!(%error, "cannot kill a control group");
        }
    }

    fn try_kill(&self) -> io::Result<()> {
        self.write(KILL_FILE, "1")?;
        // The kernel skips a process whose first thread has exited while others run.
        self.signal(Signal::KILL, |_| true);
        Ok(())
    }

    pub(super) fn signal(&self, signal: Signal, wanted: impl Fn(i32) -> bool) {
        for process in self.processes().into_iter().filter(|process| wanted(*process)) {
            process::signal_if(process, signal, |process| self.contains(process));
        }
    }

    fn contains(&self, process: i32) -> bool {
        let Some(name) = self.path.file_name().and_then(|name| name.to_str()) else { return false };
        // A payload can give its own groups names that are not UTF-8.
        process::read_kernel_file(format!("/proc/{process}/cgroup"))
            .is_ok_and(|groups| parse_v2_path(&groups).is_some_and(|group| group.split('/').any(|part| part == name)))
    }

    /// The processes in the group and its descendants.
    pub fn processes(&self) -> Vec<i32> {
        let lists = self
            .with_descendants()
            .into_iter()
            .filter_map(|dir| process::read_kernel_file(dir.join("cgroup.procs")).ok());
        lists.flat_map(|list| list.lines().filter_map(|line| line.parse().ok()).collect::<Vec<_>>()).collect()
    }

    /// As charged by the memory controller, or else the sum of the processes' resident memory.
    pub(super) fn memory_bytes(&self) -> Option<u64> {
        if let Ok(text) = self.read("memory.current") {
            return text.trim().parse().ok();
        }
        self.path.is_dir().then(|| self.processes().into_iter().filter_map(process::resident_memory).sum::<u64>())
    }

    /// The most memory that its processes had at one time, and the CPU time that they took, where the host counts them.
    pub(super) fn usage(&self) -> ScopeUsage {
        let number = |text: String| text.trim().parse().ok();
        let cpu = self.read("cpu.stat").ok().and_then(|text| event_value(&text, "usage_usec"));
        ScopeUsage { memory_peak: self.read("memory.peak").ok().and_then(number), cpu: cpu.map(Duration::from_micros) }
    }

    /// The group and its descendants, outer before inner.
    fn with_descendants(&self) -> Vec<PathBuf> {
        let mut found = vec![self.path.clone()];
        let mut at = 0;
        while let Some(dir) = found.get(at).filter(|_| found.len() < CGROUPS_NESTED_MAX) {
            at += 1;
            let inner = child_dirs(dir);
            found.extend(inner);
        }
        found
    }

    /// Whether the group and its descendants have no process. A missing group is empty.
    pub(super) fn is_empty(&self) -> bool {
        match self.read(EVENTS_FILE) {
            Ok(events) => is_unpopulated(&events),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }

    /// Resolves when the group is empty, killing again at intervals because the first kill may have failed. Cancel safe.
    pub(super) async fn kill_until_empty(&self) {
        let mut delay = CGROUP_KILL_EACH_DELAY;
        while tokio::time::timeout(delay, self.wait_empty()).await.is_err() {
            delay = CGROUP_KILL_INTERVAL;
            if let Err(error) = self.try_kill() {
                tracing::debug!(%error, "cannot kill a control group, retrying");
            }
        }
    }

    /// Resolves when the group and its descendants have no process. Cancel safe.
    pub(super) async fn wait_empty(&self) {
        if self.is_empty() {
            return;
        }
        let Ok(watched) = File::open(self.file_path(EVENTS_FILE)).and_then(watch_events_file) else {
            while !self.is_empty() {
                tokio::time::sleep(PROCESS_POLL_INTERVAL).await;
            }
            return;
        };
        // An error means that the group was removed.
        while read_from_start(watched.get_ref()).is_ok_and(|events| !is_unpopulated(&events)) {
            match watched.ready(Interest::PRIORITY).await {
                Ok(mut ready) => ready.clear_ready(),
                Err(_) => tokio::time::sleep(PROCESS_POLL_INTERVAL).await,
            }
        }
    }

    /// Removes the empty group with the groups that a payload created in it.
    pub fn remove(&self) -> io::Result<()> {
        match std::fs::remove_dir(&self.path) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(_) => {}
        }
        for dir in self.with_descendants().into_iter().rev() {
            std::fs::remove_dir(dir).map_err(|error| self.with_path(&error))?;
        }
        Ok(())
    }
}

#[expect(
    deprecated,
    reason = "unsound for types that may close or swap their descriptor; File does neither, and the new way is unsafe"
)]
fn watch_events_file(file: File) -> io::Result<AsyncFd<File>> {
    AsyncFd::with_interest(file, Interest::PRIORITY)
}

fn read_from_start(file: &File) -> io::Result<String> {
    let mut buffer = [0; 256];
    let taken = file.read_at(&mut buffer, 0)?;
    Ok(String::from_utf8_lossy(buffer.get(..taken).unwrap_or_default()).into_owned())
}

fn is_unpopulated(events: &str) -> bool {
    event_value(events, "populated") == Some(0)
}

/// Reads a file of `key number` lines.
fn event_value(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
                          35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
                          38 31 0:31 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n";

    #[test]
    fn own_group_is_found_in_every_mount_layout() {
        let groups = "9:name=systemd:/x\n4:memory:/y\n0::/system.slice/journeyman.service\n";
        assert_eq!(parse_v2_path(groups), Some("/system.slice/journeyman.service"));
        assert_eq!(mounted_path(HYBRID.as_bytes(), "/").unwrap(), Path::new("/sys/fs/cgroup/unified"));
        let non_utf8_mount = [b"36 35 0:30 / /a\xff rw - tmpfs t\xff rw\n", HYBRID.as_bytes()].concat();
        assert_eq!(mounted_path(&non_utf8_mount, "/").unwrap(), Path::new("/sys/fs/cgroup/unified"));
        let pure = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
        let ours = mounted_path(pure.as_bytes(), "/system.slice/journeyman.service").unwrap();
        assert_eq!(ours, Path::new("/sys/fs/cgroup/system.slice/journeyman.service"));
        // A container without a cgroup namespace sees only its own subtree.
        let part = "30 23 0:26 /docker/ab /sys/fs/cgroup\\040here ro - cgroup2 cgroup2 rw\n";
        assert_eq!(mounted_path(part.as_bytes(), "/docker/ab/in").unwrap(), Path::new("/sys/fs/cgroup here/in"));
        assert_eq!(mounted_path(part.as_bytes(), "/elsewhere"), None);
        assert_eq!(mounted_path(b"31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw", "/"), None);
    }

    #[test]
    fn a_removed_parent_group_is_created_again() {
        let dir = tempfile::tempdir().unwrap();
        let claim = Cgroup::at(dir.path().join("journeyman-1/claim-1"));
        assert_eq!(
            claim.create().unwrap_err().kind(),
            io::ErrorKind::NotFound,
            "the grandparent is not a control group"
        );
        std::fs::write(dir.path().join(PROCS_FILE), "").unwrap();
        claim.create().unwrap();
        claim.create().unwrap();
        assert!(claim.path().is_dir());
    }

    #[test]
    fn limits_are_written_to_the_controllers_files() {
        let dir = tempfile::tempdir().unwrap();
        let group = Cgroup::at(dir.path().to_owned());
        group.set_limits(&ResourceLimits::default()).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        std::fs::write(dir.path().join("memory.oom.group"), "0").unwrap();
        group.set_limits(&ResourceLimits { memory: Some(4 << 30), processes: Some(512), disk: Some(1) }).unwrap();
        assert_eq!(group.read("memory.max").unwrap(), "4294967296");
        assert_eq!(group.read("memory.oom.group").unwrap(), "1");
        assert_eq!(group.read("pids.max").unwrap(), "512");
        assert!(!group.has_file("memory.swap.max"), "a host without swap accounting");
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_kill_is_repeated_until_the_group_is_empty() {
        let dir = tempfile::tempdir().unwrap();
        let group = Cgroup::at(dir.path().to_owned());
        group.write("cgroup.events", "populated 1\nfrozen 0\n").unwrap();
        // Writing to a directory fails.
        std::fs::create_dir(group.file_path("cgroup.kill")).unwrap();
        group.kill();
        let host = async {
            tokio::time::sleep(CGROUP_KILL_INTERVAL * 3 / 2).await;
            std::fs::remove_dir(group.file_path("cgroup.kill")).unwrap();
            while !group.has_file("cgroup.kill") {
                tokio::time::sleep(PROCESS_POLL_INTERVAL).await;
            }
            group.write("cgroup.events", "populated 0\nfrozen 0\n").unwrap();
        };
        let both = async { tokio::join!(group.kill_until_empty(), host) };
        tokio::time::timeout(CGROUP_KILL_INTERVAL * 4, both).await.unwrap();
        assert_eq!(group.read("cgroup.kill").unwrap(), "1");
    }

    #[test]
    fn events_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let group = Cgroup::at(dir.path().to_owned());
        assert_eq!(group.event_count("memory.events", "oom_kill"), 0);
        group.write("memory.events", "low 0\nhigh 0\nmax 12\noom 2\noom_kill 3\noom_group_kill 1\n").unwrap();
        assert_eq!(group.event_count("memory.events", "oom_kill"), 3);
        assert_eq!(group.event_count("memory.events", "oom"), 2);
    }
}
