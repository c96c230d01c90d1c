//! Control groups, version 2: where ours may be made, and what is done with one.
//!
//! Nothing here decides what a payload deserves. A group is made, filled by the processes that enter it themselves,
//! killed as a whole, waited for and removed.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::super::mounts;
use super::super::process::{self, LOOK_AGAIN};
use super::{CLAIM_PREFIX, Limits};
use crate::limits::{CGROUP_FROZEN_WAIT, CGROUP_KILL_AGAIN, CGROUP_KILL_EACH, CGROUPS_NESTED_MAX};

/// The processes that are in a group; whoever writes to it enters.
const PROCESSES: &str = "cgroup.procs";
/// What kills all that is in it, since Linux 5.14.
const KILL: &str = "cgroup.kill";

/// How a group's processes are ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Means {
    /// `cgroup.kill`: at once, whatever forks meanwhile.
    Kill,
    /// `cgroup.freeze`, then a signal to each.
    Freeze,
}

/// The folder of the control group that this process is in, as it can be reached here.
pub(super) fn own() -> Result<PathBuf, String> {
    let mounts = mounts::table().map_err(|error| format!("no mounts: {error}"))?;
    let groups = std::fs::read_to_string("/proc/self/cgroup").map_err(|error| format!("no control groups: {error}"))?;
    let group = of_version_2(&groups).ok_or("the kernel knows no control groups of version 2")?;
    place(&mounts, group).ok_or_else(|| format!("no cgroup2 file system that shows the group {group} is mounted"))
}

fn of_version_2(groups: &str) -> Option<&str> {
    groups.lines().find_map(|line| line.strip_prefix("0::"))
}

/// The cookies of the claims whose groups a process is in, the innermost first.
pub(super) fn claims_of(process: i32) -> Vec<String> {
    let groups = std::fs::read(format!("/proc/{process}/cgroup")).unwrap_or_default();
    let groups = String::from_utf8_lossy(&groups);
    // What has ended stays in a group that is removed.
    let group = of_version_2(&groups).map(|group| group.strip_suffix(" (deleted)").unwrap_or(group));
    let parts = group.unwrap_or_default().rsplit('/');
    parts.filter_map(|part| part.strip_prefix(CLAIM_PREFIX)).map(ToOwned::to_owned).collect()
}

/// Where a group of the hierarchy is found in the file system. Of several mounts the last one hides the others.
fn place(mounts: &[u8], group: &str) -> Option<PathBuf> {
    mounts.split(|byte| *byte == b'\n').rev().find_map(|line| {
        let fields = || line.split(|byte| *byte == b' ');
        // The kind of the file system stands behind a dash.
        if fields().skip_while(|field| *field != b"-").nth(1) != Some(b"cgroup2") {
            return None;
        }
        let mut fields = fields().skip(3);
        let (root, point) = (mounts::path(fields.next()?), mounts::path(fields.next()?));
        let below = Path::new(group).strip_prefix(&root).ok()?;
        Some(point.join(below))
    })
}

/// One control group, which need not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Group {
    folder: PathBuf,
}

impl Group {
    pub(super) const fn at(folder: PathBuf) -> Self {
        Self { folder }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Makes it, unless it is there.
    pub(super) fn make(&self) -> io::Result<()> {
        match std::fs::create_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            // Somebody has taken away what it was to be made in, which may be empty between two tasks, and may be at it again.
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.is_below_groups() => {
                drop(self.folder.parent().map(std::fs::create_dir));
                std::fs::create_dir(&self.folder).map_err(|error| self.named(&error))
            }
            made => made.map_err(|error| self.named(&error)),
        }
    }

    /// Whether the folder around the one that it is made in is a control group.
    fn is_below_groups(&self) -> bool {
        self.folder.parent().and_then(Path::parent).is_some_and(|outer| outer.join(PROCESSES).exists())
    }

    /// The file whose writers enter the group.
    pub(super) fn entrance(&self) -> PathBuf {
        self.file(PROCESSES)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn named(&self, error: &io::Error) -> io::Error {
        io::Error::new(error.kind(), format!("control group {}: {error}", self.folder.display()))
    }

    pub(super) fn has(&self, file: &str) -> bool {
        self.file(file).exists()
    }

    pub(super) fn read(&self, file: &str) -> io::Result<String> {
        std::fs::read_to_string(self.file(file))
    }

    pub(super) fn write(&self, file: &str, text: &str) -> io::Result<()> {
        std::fs::write(self.file(file), text)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", self.file(file).display())))
    }

    /// Sets what the controllers enforce. To be called before anything enters.
    pub(super) fn limit(&self, limits: &Limits) -> io::Result<()> {
        if let Some(bytes) = limits.memory {
            self.write("memory.max", &bytes.to_string())?;
            // Otherwise the limit only moves the memory to the swap; and half a payload is of no use to anybody.
            for (file, text) in [("memory.swap.max", "0"), ("memory.oom.group", "1")] {
                if self.has(file) {
                    self.write(file, text)?;
                }
            }
        }
        match limits.processes {
            Some(most) => self.write("pids.max", &most.to_string()),
            None => Ok(()),
        }
    }

    /// How often `event` happened, by one of the group's `*.events` files.
    pub(super) fn events(&self, file: &str, event: &str) -> u64 {
        self.read(file).ok().and_then(|text| value(&text, event)).unwrap_or_default()
    }

    /// Tells every process in it and below to end, at once. Emptiness comes a moment later.
    pub(super) fn kill(&self, means: Means) {
        if let Err(error) = self.try_kill(means)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::error!(%error, "a control group cannot be killed");
        }
    }

    /// The same, at the lowest price: what the kernel passes over is left to [`Group::killed`].
    pub(super) fn kill_at_once(&self, means: Means) {
        match means {
            Means::Kill if self.write(KILL, "1").is_ok() => {}
            Means::Kill | Means::Freeze => self.kill(means),
        }
    }

    fn try_kill(&self, means: Means) -> io::Result<()> {
        match means {
            Means::Kill => {
                self.write(KILL, "1")?;
                // The kernel passes over a process whose first thread has ended and that goes on in the others.
                self.signal(Signal::KILL, |_| true);
                Ok(())
            }
            // It stays frozen until it is empty, so that nothing forks between two looks.
            Means::Freeze => self.write("cgroup.freeze", "1").map(|()| self.signal(Signal::KILL, |_| true)),
        }
    }

    /// Signals its processes one by one.
    pub(super) fn signal(&self, signal: Signal, wanted: impl Fn(i32) -> bool) {
        for process in self.processes().into_iter().filter(|process| wanted(*process)) {
            process::signal(process, signal, |process| self.holds(process));
        }
    }

    fn holds(&self, process: i32) -> bool {
        let Some(name) = self.folder.file_name().and_then(|name| name.to_str()) else { return false };
        // A group that a payload has made need have no name that is text.
        std::fs::read(format!("/proc/{process}/cgroup")).is_ok_and(|groups| {
            let groups = String::from_utf8_lossy(&groups);
            of_version_2(&groups).is_some_and(|group| group.split('/').any(|part| part == name))
        })
    }

    /// The processes in it and below.
    pub(super) fn processes(&self) -> Vec<i32> {
        let lists =
            self.nested().into_iter().filter_map(|folder| std::fs::read_to_string(folder.join("cgroup.procs")).ok());
        lists.flat_map(|list| list.lines().filter_map(|line| line.parse().ok()).collect::<Vec<_>>()).collect()
    }

    /// Bytes that they take up: as it is charged for them, or where no controller counts, what is resident of each.
    pub(super) fn memory(&self) -> Option<u64> {
        if let Ok(text) = self.read("memory.current") {
            return text.trim().parse().ok();
        }
        self.folder.is_dir().then(|| self.processes().into_iter().filter_map(process::resident).sum::<u64>())
    }

    /// It and the groups below it, the outer before the inner.
    fn nested(&self) -> Vec<PathBuf> {
        let mut found = vec![self.folder.clone()];
        let mut at = 0;
        while let Some(folder) = found.get(at).filter(|_| found.len() < CGROUPS_NESTED_MAX) {
            at += 1;
            let Ok(entries) = std::fs::read_dir(folder) else { continue };
            let inner = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            let inner: Vec<PathBuf> = inner.map(|entry| entry.path()).collect();
            found.extend(inner);
        }
        found
    }

    /// Whether no process is in it or below. One that is not there is empty.
    pub(super) fn empty(&self) -> bool {
        match self.read("cgroup.events") {
            Ok(events) => value(&events, "populated") == Some(0),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }

    /// Resolves when no process is in it or below.
    ///
    /// Cancel safe.
    pub(super) async fn emptied(&self) {
        self.until(|events| value(events, "populated") == Some(0)).await;
    }

    /// Resolves when everything in it that was killed is gone; where it was frozen, after killing what was missed. It is
    /// killed again now and then, for the first time may have failed.
    ///
    /// Cancel safe.
    pub(super) async fn killed(&self, means: Means) {
        if means == Means::Freeze && !self.empty() {
            let frozen =
                self.until(|events| value(events, "frozen") == Some(1) || value(events, "populated") == Some(0));
            // What cannot be frozen in time is killed as it is.
            drop(tokio::time::timeout(CGROUP_FROZEN_WAIT, frozen).await);
            self.signal(Signal::KILL, |_| true);
        }
        let mut again = CGROUP_KILL_EACH;
        while tokio::time::timeout(again, self.emptied()).await.is_err() {
            again = CGROUP_KILL_AGAIN;
            if let Err(error) = self.try_kill(means) {
                tracing::debug!(%error, "a control group still cannot be killed");
            }
        }
        if means == Means::Freeze && self.has("cgroup.freeze") {
            drop(self.write("cgroup.freeze", "0"));
        }
    }

    async fn until(&self, so: impl Fn(&str) -> bool) {
        let Ok(file) = File::open(self.file("cgroup.events")) else { return };
        // An error is the end of the group itself.
        if read_again(&file).map_or(true, |events| so(&events)) {
            return;
        }
        let Ok(watched) = watch(file) else {
            while self.read("cgroup.events").is_ok_and(|events| !so(&events)) {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
            return;
        };
        while read_again(watched.get_ref()).is_ok_and(|events| !so(&events)) {
            match watched.ready(Interest::PRIORITY).await {
                Ok(mut ready) => ready.clear_ready(),
                Err(_) => tokio::time::sleep(LOOK_AGAIN).await,
            }
        }
    }

    /// Waits on this thread for it to be empty, for probing.
    pub(super) fn empty_within(&self, patience: Duration) -> bool {
        let looks = patience.as_millis() / LOOK_AGAIN.as_millis();
        (0..looks).any(|_| {
            let empty = self.empty();
            if !empty {
                std::thread::sleep(LOOK_AGAIN);
            }
            empty
        })
    }

    /// Removes it and what a payload made below it. It has to be empty.
    pub(super) fn remove(&self) -> io::Result<()> {
        match std::fs::remove_dir(&self.folder) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(_) => {}
        }
        for folder in self.nested().into_iter().rev() {
            std::fs::remove_dir(folder).map_err(|error| self.named(&error))?;
        }
        Ok(())
    }
}

#[expect(
    deprecated,
    reason = "unsound for types that may close or swap their descriptor; File does neither, and the new way is unsafe"
)]
fn watch(file: File) -> io::Result<AsyncFd<File>> {
    AsyncFd::with_interest(file, Interest::PRIORITY)
}

fn read_again(file: &File) -> io::Result<String> {
    let mut buffer = [0; 256];
    let taken = file.read_at(&mut buffer, 0)?;
    Ok(String::from_utf8_lossy(buffer.get(..taken).unwrap_or_default()).into_owned())
}

/// The number beside a key in a file of `key number` lines.
fn value(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n\
                          35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
                          38 31 0:31 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw\n";

    #[test]
    fn our_group_is_found_on_hosts_of_every_kind() {
        let groups = "9:name=systemd:/x\n4:memory:/y\n0::/system.slice/journeyman.service\n";
        assert_eq!(of_version_2(groups), Some("/system.slice/journeyman.service"));
        assert_eq!(place(HYBRID.as_bytes(), "/").unwrap(), Path::new("/sys/fs/cgroup/unified"));
        let beside_one_that_is_no_text = [b"36 35 0:30 / /a\xff rw - tmpfs t\xff rw\n", HYBRID.as_bytes()].concat();
        assert_eq!(place(&beside_one_that_is_no_text, "/").unwrap(), Path::new("/sys/fs/cgroup/unified"));
        let pure = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
        let ours = place(pure.as_bytes(), "/system.slice/journeyman.service").unwrap();
        assert_eq!(ours, Path::new("/sys/fs/cgroup/system.slice/journeyman.service"));
        // A container without a namespace for control groups is shown its own part.
        let part = "30 23 0:26 /docker/ab /sys/fs/cgroup\\040here ro - cgroup2 cgroup2 rw\n";
        assert_eq!(place(part.as_bytes(), "/docker/ab/in").unwrap(), Path::new("/sys/fs/cgroup here/in"));
        assert_eq!(place(part.as_bytes(), "/elsewhere"), None);
        assert_eq!(place(b"31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw", "/"), None);
    }

    #[test]
    fn a_group_whose_outer_one_was_taken_away_is_made_with_that_where_groups_are() {
        let folder = tempfile::tempdir().unwrap();
        let claim = Group::at(folder.path().join("journeyman-1/claim-1"));
        assert_eq!(claim.make().unwrap_err().kind(), io::ErrorKind::NotFound, "a folder is no control group");
        std::fs::write(folder.path().join(PROCESSES), "").unwrap();
        claim.make().unwrap();
        claim.make().unwrap();
        assert!(claim.folder().is_dir());
    }

    #[test]
    fn limits_become_the_files_of_the_controllers() {
        let folder = tempfile::tempdir().unwrap();
        let group = Group::at(folder.path().to_owned());
        group.limit(&Limits::default()).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        std::fs::write(folder.path().join("memory.oom.group"), "0").unwrap();
        group.limit(&Limits { memory: Some(4 << 30), processes: Some(512), disk: Some(1) }).unwrap();
        assert_eq!(group.read("memory.max").unwrap(), "4294967296");
        assert_eq!(group.read("memory.oom.group").unwrap(), "1");
        assert_eq!(group.read("pids.max").unwrap(), "512");
        assert!(!group.has("memory.swap.max"), "a host without swap accounting");
    }

    #[tokio::test(start_paused = true)]
    async fn a_group_whose_kill_failed_is_killed_again_until_it_is_empty() {
        let folder = tempfile::tempdir().unwrap();
        let group = Group::at(folder.path().to_owned());
        group.write("cgroup.events", "populated 1\nfrozen 0\n").unwrap();
        // What is a folder cannot be written.
        std::fs::create_dir(group.file("cgroup.kill")).unwrap();
        group.kill(Means::Kill);
        let host = async {
            tokio::time::sleep(CGROUP_KILL_AGAIN * 3 / 2).await;
            std::fs::remove_dir(group.file("cgroup.kill")).unwrap();
            while !group.has("cgroup.kill") {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
            group.write("cgroup.events", "populated 0\nfrozen 0\n").unwrap();
        };
        let both = async { tokio::join!(group.killed(Means::Kill), host) };
        tokio::time::timeout(CGROUP_KILL_AGAIN * 4, both).await.unwrap();
        assert_eq!(group.read("cgroup.kill").unwrap(), "1");
    }

    #[test]
    fn what_happened_at_a_limit_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let group = Group::at(folder.path().to_owned());
        assert_eq!(group.events("memory.events", "oom_kill"), 0);
        group.write("memory.events", "low 0\nhigh 0\nmax 12\noom 2\noom_kill 3\noom_group_kill 1\n").unwrap();
        assert_eq!(group.events("memory.events", "oom_kill"), 3);
        assert_eq!(group.events("memory.events", "oom"), 2);
    }
}
