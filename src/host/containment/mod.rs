//! Nothing outlives its claim: what this host offers to hold the processes of a payload together, and to end them.
//!
//! Three levels, the best of which is found out at the start by doing it once: a control group that the kernel kills as a
//! whole; a control group that is frozen and signaled; and a process group. At each, strays come to this process as their
//! reaper: at the third they have left the process group, at the others they have moved themselves to another control group,
//! which a payload can that runs as the worker's own user. Each claim has an [`Enclosure`] of its own.
//!
//! This is no wall between a payload and the host. Such a payload can have others start processes for it, or kill the worker.
//! It takes another user, or a container, to prevent that.

mod census;
mod cgroup;
pub(crate) mod children;
mod enclosure;
mod forerunner;
mod group;
mod leftovers;
mod shim;
mod size;

use std::fmt;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};

use super::process::{self, Stat};
use crate::limits::{CONTAINMENT_PROBE_WAIT, REAP_EVERY, REAP_EVERY_COUNTED, REAP_EVERY_GROUPED};
use cgroup::{Group, Means};

pub use enclosure::{Enclosure, Exceeded, Name};
pub(crate) use enclosure::{Entry, Way};
pub(crate) use forerunner::Failed;
pub(crate) use group::{ControlGroup, ControlGroups, passes_on};
pub use leftovers::kill_leftovers;
pub use shim::shim;
pub(crate) use shim::{NAME as SHIM, program, written};
pub(crate) use size::{larger_than, outgrown};

/// The variable by which a payload's processes can be told from all others.
pub const COOKIE: &str = "JOURNEYMAN_CLAIM";
/// What the worker's own group is called where it had to make room for those of its tasks.
const WORKER_GROUP: &str = "worker";

/// How payloads are held together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// A process group. What leaves it is found as an orphan of ours, if this process is its reaper.
    Group,
    /// A control group, frozen and then signaled. Linux before 5.14.
    CgroupFreeze,
    /// A control group, killed as a whole.
    CgroupKill,
}

impl Level {
    /// A word for logs and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Group => "group",
            Self::CgroupFreeze => "cgroup-freeze",
            Self::CgroupKill => "cgroup-kill",
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.as_str())
    }
}

/// What may be made of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Demand {
    /// The best that is there.
    #[default]
    Best,
    /// A control group, or the worker does not start.
    Cgroup,
    /// At most this level.
    AtMost(Level),
}

/// What a claim's processes may use together. Nothing is limited unless set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Bytes of memory, swap not counted and not granted. Needs the memory controller.
    pub memory: Option<u64>,
    /// Processes and threads. Needs the pids controller.
    pub processes: Option<u32>,
    /// Bytes in the task's folder. It is measured every few seconds and at the end, so that a task can go beyond it for
    /// that long.
    pub disk: Option<u64>,
}

/// What becomes of a slot whose payload may still be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unproven {
    /// It stays taken until nothing is left.
    #[default]
    Kept,
    /// It is given to the next task.
    Reused,
}

/// What is wanted of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Wanted {
    /// How payloads are to be held together.
    pub demand: Demand,
    /// What each claim may use.
    pub limits: Limits,
    /// What becomes of a slot whose payload may still be there.
    pub unproven: Unproven,
}

/// How this host holds payloads together. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Containment {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    level: Level,
    shortcomings: Vec<String>,
    limits: Limits,
    /// Which limits were asked for and are not enforced.
    unenforced: Option<&'static str>,
    unproven: Unproven,
    adopts: Adopts,
    groups: Option<Groups>,
    leftovers: usize,
}

/// Where the groups of claims are made.
#[derive(Debug, Clone)]
struct Groups {
    parent: Group,
    means: Means,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Adopts {
    Orphans,
    Nothing,
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Only where nothing is in it.
        if let Some(groups) = &self.groups {
            drop(groups.parent.remove());
        }
    }
}

impl Containment {
    /// Finds out what the host offers, by doing it, and ends what an earlier worker of the same `name` has left in its
    /// control groups. Takes up to a few seconds of this thread.
    ///
    /// `name` is what no other worker on this host has at the same time, and what this one has at its next start again.
    ///
    /// # Errors
    ///
    /// Where control groups are demanded and not to be had, or a limit cannot be enforced then, or where processes of an
    /// earlier life of this worker cannot be killed. The text says what to do.
    pub fn establish(name: &str, wanted: Wanted) -> io::Result<Self> {
        let mut shortcomings = Vec::new();
        let most = match wanted.demand {
            Demand::Best | Demand::Cgroup => Level::CgroupKill,
            Demand::AtMost(level) => level,
        };
        let found = match most {
            Level::Group => Err("the configuration asks for process groups".to_owned()),
            Level::CgroupFreeze | Level::CgroupKill => probe(name, most, &mut shortcomings),
        };
        let (mut limits, adopts) = (wanted.limits, adopt());
        let (level, groups, leftovers) = match found {
            Ok(found) => {
                let level = match found.groups.means {
                    Means::Kill => Level::CgroupKill,
                    Means::Freeze => Level::CgroupFreeze,
                };
                if let Some(left) = found.still_there {
                    end_of_earlier_life(&left, wanted.unproven)?;
                }
                delegate(&found.own, &found.groups.parent, limits).unwrap_or_else(|why| {
                    shortcomings.push(format!("limits of memory and processes are not enforced: {why}"));
                    (limits.memory, limits.processes) = (None, None);
                });
                (level, Some(found.groups), found.leftovers)
            }
            Err(why) => {
                shortcomings.push(format!("no control groups: {why}"));
                (limits.memory, limits.processes) = (None, None);
                (Level::Group, None, 0)
            }
        };
        if adopts == Adopts::Nothing && level == Level::Group {
            shortcomings.push(
                "what leaves its process group is not seen: this program does not call journeyman::shim() first thing in \
                 main"
                    .to_owned(),
            );
        }
        if wanted.demand == Demand::Cgroup && (level == Level::Group || limits != wanted.limits) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, refusal(&shortcomings)));
        }
        let unproven = wanted.unproven;
        let unenforced = match (limits.memory != wanted.limits.memory, limits.processes != wanted.limits.processes) {
            (true, true) => Some("host.task_memory and host.task_pids"),
            (true, false) => Some("host.task_memory"),
            (false, true) => Some("host.task_pids"),
            (false, false) => None,
        };
        let inner = Inner { level, shortcomings, limits, unenforced, unproven, adopts, groups, leftovers };
        let established = Self { inner: Arc::new(inner) };
        established.say(&wanted.limits);
        Ok(established)
    }

    /// Process groups and nothing more: nothing is probed, adopted or limited.
    #[must_use]
    pub fn none() -> Self {
        Self {
            inner: Arc::new(Inner {
                level: Level::Group,
                shortcomings: Vec::new(),
                limits: Limits::default(),
                unenforced: None,
                unproven: Unproven::Kept,
                adopts: Adopts::Nothing,
                groups: None,
                leftovers: 0,
            }),
        }
    }

    /// How payloads are held together.
    #[must_use]
    pub fn level(&self) -> Level {
        self.inner.level
    }

    /// Why it is no better, a sentence each. Empty where nothing is missing.
    #[must_use]
    pub fn shortcomings(&self) -> &[String] {
        &self.inner.shortcomings
    }

    /// The limits that are enforced.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.inner.limits
    }

    /// What to do where limits were asked for that this host does not enforce.
    pub(crate) fn hint(&self) -> Option<String> {
        self.inner.unenforced.map(|keys| {
            format!(
                "{keys}: not enforced, a task may take more; {}; under systemd set Delegate=yes in the unit, or set \
                 host.containment = \"cgroup\" for a worker that does not start without",
                self.inner.shortcomings.join("; ")
            )
        })
    }

    /// What becomes of a slot whose payload may still be there.
    #[must_use]
    pub fn unproven(&self) -> Unproven {
        self.inner.unproven
    }

    /// How many control groups of an earlier life of this worker were found at the start, and ended.
    #[must_use]
    pub fn leftovers(&self) -> usize {
        self.inner.leftovers
    }

    /// What is to be around the processes of one claim. Nothing of it exists on the host before it is used; its
    /// [`Name`] is known at once, so that it can be written down first.
    #[must_use]
    pub fn enclosure(&self) -> Enclosure {
        let cookie = uuid::Uuid::new_v4().simple().to_string();
        match (&self.inner.groups, self.inner.adopts) {
            (Some(Groups { parent, means }), _) => {
                let group = Group::at(parent.folder().join(format!("{CLAIM_PREFIX}{cookie}")));
                Enclosure::cgroup(cookie, group, *means, self.inner.limits)
            }
            (None, Adopts::Orphans) => Enclosure::reaper(cookie, self.inner.limits),
            (None, Adopts::Nothing) => Enclosure::alone(cookie, self.inner.limits),
        }
    }

    /// Reaps what payloads have left to this process, for as long as it is polled. Never resolves.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn reap(&self) {
        let first = std::process::id() == 1;
        let reaper = first || rustix::process::child_subreaper().is_ok_and(|reaper| reaper.is_some());
        if !reaper || !shim::called() {
            return std::future::pending().await;
        }
        let rest = match (&self.inner.groups, self.inner.limits.processes) {
            // What has ended counts as a process of its task until it is reaped.
            (_, Some(_)) => REAP_EVERY_COUNTED,
            (None, None) => REAP_EVERY,
            // Few come here, and the end of a claim reaps them too. Each payload that ends would wake who waits for signals.
            (Some(_), None) => loop {
                tokio::time::sleep(REAP_EVERY_GROUPED).await;
                reap_any();
            },
        };
        let Ok(mut ended) = signal(SignalKind::child()) else { return std::future::pending().await };
        loop {
            reap_any();
            // A fleet of short payloads makes many signals.
            tokio::time::sleep(rest).await;
            ended.recv().await;
        }
    }

    fn say(&self, set: &Limits) {
        let Inner { level, shortcomings, leftovers, .. } = &*self.inner;
        tracing::info!(containment = level.as_str(), "payloads are held together by {}", sentence(*level));
        if *leftovers > 0 {
            tracing::warn!(tasks = leftovers, "what an earlier life of this worker left running was killed");
        }
        let missing = *level < Level::CgroupKill || self.inner.limits != *set;
        for why in shortcomings {
            if missing {
                tracing::warn!(containment = level.as_str(), "{why}");
            } else {
                tracing::debug!("{why}");
            }
        }
    }
}

fn reap_any() {
    if children::any()
        && let Err(error) = children::reap()
    {
        tracing::debug!(%error, "the children of this process cannot be seen");
    }
}

/// How the groups of claims begin.
const CLAIM_PREFIX: &str = "claim-";

const fn sentence(level: Level) -> &'static str {
    match level {
        Level::CgroupKill => "a control group each, killed as a whole",
        Level::CgroupFreeze => "a control group each, frozen and then killed",
        Level::Group => "a process group each; strays are looked for by descent and by their environment",
    }
}

fn refusal(shortcomings: &[String]) -> String {
    format!(
        "host.containment = \"cgroup\" cannot be had here: {}; under systemd set Delegate=yes in the unit, in a container \
         mount /sys/fs/cgroup writable (docker run --cgroupns=private with a writable cgroup mount), or set \
         host.containment = \"auto\"",
        shortcomings.join("; ")
    )
}

/// Keeps payloads of the same user out of this process: they can neither read its memory and environment nor trace it, and
/// its memory is written to no core file. Payloads inherit that they write none either, and may ask for them again.
///
/// What this process says of itself under `/proc` belongs to root from then on, so that a debugger has to as well.
pub fn harden() {
    use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit};
    let hidden = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    let core = Rlimit { current: Some(0), ..getrlimit(Resource::Core) };
    if let Err(error) = hidden.and_then(|()| setrlimit(Resource::Core, core)) {
        tracing::warn!(%error, "payloads of this user may be able to read the worker's memory");
    }
}

/// Keeps from payloads what whoever started this process left open: that may be anything, secrets too. To be called once what
/// is to be read of it was read, since the descriptors that came with a process are known by this mark.
pub fn bequeath_nothing() {
    close_fds::set_fds_cloexec(3, &[]);
}

/// Makes this process the reaper of what payloads leave behind.
fn adopt() -> Adopts {
    if !shim::called() {
        return Adopts::Nothing;
    }
    // The process that is set is this one, whatever number is given.
    match rustix::process::set_child_subreaper(Some(rustix::process::getpid())) {
        Ok(()) => Adopts::Orphans,
        Err(error) => {
            tracing::warn!(%error, "this process cannot adopt what payloads leave behind");
            Adopts::Nothing
        }
    }
}

/// What probing found.
struct Found {
    groups: Groups,
    /// Our own group, where limits could be delegated from.
    own: Group,
    leftovers: usize,
    /// A group of an earlier life that could not be emptied.
    still_there: Option<String>,
}

fn probe(name: &str, most: Level, shortcomings: &mut Vec<String>) -> Result<Found, String> {
    if !shim::called() {
        return Err("this program does not call journeyman::shim() first thing in main".to_owned());
    }
    let own = Group::at(cgroup::own()?);
    let parent = of_worker(&own, name);
    parent.make().map_err(|error| format!("{error} (under systemd, set Delegate=yes)"))?;
    let mut leftovers = 0;
    let mut still_there = None;
    for left in claims_in(parent.folder()) {
        leftovers += 1;
        if let Err(error) = end(&Group::at(left)) {
            still_there = Some(error.to_string());
        }
    }
    let trial = Group::at(parent.folder().join("trial"));
    let means = match most {
        Level::CgroupKill => [Some(Means::Kill), Some(Means::Freeze)],
        Level::CgroupFreeze | Level::Group => [None, Some(Means::Freeze)],
    };
    for means in means.into_iter().flatten() {
        #[expect(clippy::disallowed_methods, reason = "at the start only, and for milliseconds")]
        let mut waiting = std::process::Command::new(program());
        waiting.arg0(SHIM).args(shim::waiting(&trial.entrance())).env_clear();
        match try_out(&trial, means, waiting) {
            Ok(()) => {
                let groups = Groups { parent, means };
                return Ok(Found { groups, own, leftovers, still_there });
            }
            Err(why) => shortcomings.push(why),
        }
    }
    drop(trial.remove());
    drop(parent.remove());
    Err("none that was tried could be killed".to_owned())
}

/// Where a worker that is started in `own` has the groups of its claims.
fn of_worker(own: &Group, name: &str) -> Group {
    Group::at(own.folder().join(format!("journeyman-{}", digest(name))))
}

/// Removes the group of a worker that was killed, by the name that it was established with, if it was started where this
/// process is and nothing is in it.
pub(crate) fn leave(name: &str) {
    if let Ok(own) = cgroup::own() {
        // One in which something lives is its next worker's to end.
        drop(of_worker(&Group::at(own), name).remove());
    }
}

/// Puts a process into a group, kills it, and sees it gone. It is one that enters and then waits for the end of its input.
fn try_out(trial: &Group, means: Means, mut waiting: std::process::Command) -> Result<(), String> {
    trial.make().map_err(|error| error.to_string())?;
    let file = match means {
        Means::Kill => "cgroup.kill",
        Means::Freeze => "cgroup.freeze",
    };
    if !trial.has(file) {
        return Err(format!("the kernel has no {file}"));
    }
    waiting.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let started =
        children::start(None, || waiting.spawn(), |child| Some(child.id())).map_err(|error| error.to_string())?;
    let children::Started { mut child, known } = started;
    let entered = (0..CONTAINMENT_PROBE_WAIT.as_millis() / process::LOOK_AGAIN.as_millis()).any(|_| {
        let inside = trial.processes().contains(&child.id().cast_signed());
        if !inside && !matches!(child.try_wait(), Ok(Some(_))) {
            std::thread::sleep(process::LOOK_AGAIN);
        }
        inside
    });
    if entered {
        trial.kill(means);
    } else {
        drop(child.kill());
    }
    let ended = child.wait();
    drop(known);
    ended.map_err(|error| error.to_string())?;
    if !entered {
        return Err("a process could not enter a control group of ours".to_owned());
    }
    if !trial.empty_within(CONTAINMENT_PROBE_WAIT) {
        return Err(format!("a process that was killed by {file} is still there"));
    }
    trial.remove().map_err(|error| error.to_string())
}

fn claims_in(parent: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.path()).collect()
}

/// Kills what is in a group, and what that has started and has left it, and removes it.
fn end(group: &Group) -> io::Result<()> {
    if !group.empty() {
        // Their parents are still there to tell.
        let (inside, all) = (group.processes(), Stat::all()?);
        let with = process::with_descendants(&inside, &all);
        let own = std::process::id().cast_signed();
        let outside =
            all.iter().filter(|stat| with.contains(&stat.pid) && !inside.contains(&stat.pid) && stat.pid != own);
        for stat in outside {
            process::signal(stat.pid, Signal::KILL, |pid| Stat::of(pid).is_some_and(|now| now.started == stat.started));
        }
        group.kill(if group.has("cgroup.kill") { Means::Kill } else { Means::Freeze });
        if !group.empty_within(CONTAINMENT_PROBE_WAIT) {
            let left = group.processes();
            let text = format!("processes in {} cannot be killed: {left:?}", group.folder().display());
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
        }
    }
    group.remove()
}

/// This process's own control group, where the host has version 2.
pub(crate) fn own_group() -> Option<PathBuf> {
    cgroup::own().ok().filter(|own| own.exists())
}

pub(crate) fn end_of_earlier_life(left: &str, unproven: Unproven) -> io::Result<()> {
    match unproven {
        Unproven::Reused => {
            tracing::error!("[alert operator] an earlier life of this worker is not over: {left}");
            Ok(())
        }
        Unproven::Kept => Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            format!(
                "an earlier life of this worker is not over: {left}; restart the host, or set host.unproven = \"reuse\""
            ),
        )),
    }
}

/// Hands the controllers that the limits need down to the groups of claims. A group that does so must not hold processes
/// itself, so the worker moves into one of its own first.
fn delegate(own: &Group, parent: &Group, limits: Limits) -> Result<(), String> {
    let needed = [("memory", limits.memory.is_some()), ("pids", limits.processes.is_some())];
    let needed: Vec<&str> = needed.iter().filter(|(_, needed)| *needed).map(|(name, _)| *name).collect();
    if needed.is_empty() {
        return Ok(());
    }
    let offered = own.read("cgroup.controllers").map_err(|error| error.to_string())?;
    let offered: Vec<&str> = offered.split_ascii_whitespace().collect();
    if let Some(missing) = needed.iter().find(|name| !offered.contains(name)) {
        return Err(format!("the {missing} controller is not delegated to {}", own.folder().display()));
    }
    let wanted: Vec<String> = needed.iter().map(|name| format!("+{name}")).collect();
    let wanted = wanted.join(" ");
    let own_process = std::process::id().cast_signed();
    // The root of the hierarchy alone may hold processes beside groups; it has no type.
    if own.has("cgroup.type") {
        let inside = own.read("cgroup.procs").map_err(|error| error.to_string())?;
        let mut others = inside.lines().filter_map(|line| line.parse::<i32>().ok()).filter(|pid| *pid != own_process);
        if let Some(other) = others.next() {
            return Err(format!("process {other} shares the worker's control group; give the worker one of its own"));
        }
        let leaf = Group::at(own.folder().join(WORKER_GROUP));
        leaf.make().and_then(|()| leaf.write("cgroup.procs", "0")).map_err(|error| error.to_string())?;
    }
    [own, parent]
        .iter()
        .try_for_each(|group| group.write("cgroup.subtree_control", &wanted))
        .map_err(|error| error.to_string())
}

/// A name of fixed length that says nothing.
fn digest(name: &str) -> String {
    use sha2::Digest as _;
    sha2::Sha256::digest(name.as_bytes()).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_shim_a_payload_is_a_process_group_and_the_reason_is_said() {
        let containment = Containment::establish("test", Wanted::default()).unwrap();
        assert_eq!(containment.level(), Level::Group);
        assert!(containment.shortcomings().iter().any(|why| why.contains("shim")), "{containment:?}");
        let demanded = Wanted { demand: Demand::Cgroup, ..Wanted::default() };
        let error = Containment::establish("test", demanded).unwrap_err().to_string();
        assert!(error.contains("Delegate=yes") && error.contains("shim"), "{error}");
    }

    #[test]
    fn controllers_are_handed_down_only_where_they_are_offered() {
        let folder = tempfile::tempdir().unwrap();
        let own = Group::at(folder.path().to_owned());
        let parent = Group::at(folder.path().join("journeyman-1"));
        parent.make().unwrap();
        own.write("cgroup.controllers", "cpu pids\n").unwrap();
        let none = Limits::default();
        delegate(&own, &parent, none).unwrap();
        assert!(!own.has("cgroup.subtree_control"));
        let why = delegate(&own, &parent, Limits { memory: Some(1), ..none }).unwrap_err();
        assert!(why.contains("the memory controller is not delegated"), "{why}");
        delegate(&own, &parent, Limits { processes: Some(1), ..none }).unwrap();
        assert_eq!(parent.read("cgroup.subtree_control").unwrap(), "+pids");
    }

    #[test]
    fn a_worker_that_shares_its_group_is_told_so() {
        let folder = tempfile::tempdir().unwrap();
        let own = Group::at(folder.path().to_owned());
        own.write("cgroup.controllers", "memory pids").unwrap();
        own.write("cgroup.type", "domain").unwrap();
        own.write("cgroup.procs", &format!("1\n{}\n", std::process::id())).unwrap();
        let limits = Limits { memory: Some(1), ..Limits::default() };
        let why = delegate(&own, &own, limits).unwrap_err();
        assert!(why.contains("process 1 shares"), "{why}");
        own.write("cgroup.procs", &std::process::id().to_string()).unwrap();
        delegate(&own, &own, limits).unwrap();
        assert_eq!(Group::at(folder.path().join(WORKER_GROUP)).read("cgroup.procs").unwrap(), "0");
    }
}
