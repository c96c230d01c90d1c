//! Nothing outlives its claim: what this host offers to hold the processes of a payload together, and to end them.
//!
//! Three levels, the best of which is found out at the start by doing it once: a control group that the kernel kills as a
//! whole; a control group that is frozen and signaled; and a process group. At each, strays come to this process as their
//! reaper: at the third they have left the process group, at the others they have moved themselves to another control group,
//! which a payload can that runs as the worker's own user. Each claim has an [`ProcessScope`] of its own.
//!
//! This is no wall between a payload and the host. Such a payload can have others start processes for it, or kill the worker.
//! It takes another user, or a container, to prevent that.

mod cgroup;
pub(crate) mod children;
mod dir_size;
#[doc(hidden)]
pub mod exec_shim;
mod kill_recorded;
mod proc_scan;
mod process_scope;
mod shim_launch;
mod worker_cgroups;

use std::fmt;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};

use super::process::{self, ProcessStat};
use crate::limits::{CONTAINMENT_PROBE_TIMEOUT, REAP_INTERVAL, REAP_INTERVAL_CGROUP, REAP_INTERVAL_PIDS_LIMITED};
use cgroup::{Cgroup, KillMethod};
use shim_launch::shim_path;

pub(crate) use dir_size::{is_larger_than, wait_larger_than};
pub(crate) use exec_shim::ShimError;
pub use kill_recorded::kill_recorded_processes;
pub(crate) use process_scope::{LaunchMethod, ScopedProcess};
pub use process_scope::{LimitExceeded, ProcessScope, ScopeName};
pub use shim_launch::shim;
pub(crate) use shim_launch::{SHIM_NAME, encode_environment};
pub(crate) use worker_cgroups::{WorkerCgroup, WorkerCgroups};

/// The variable by which a payload's processes can be told from all others.
pub const COOKIE_VARIABLE: &str = "JOURNEYMAN_CLAIM_COOKIE";
/// What the worker's own group is called where it had to make room for those of its tasks.
const WORKER_CGROUP: &str = "worker";

/// How payloads are held together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ContainmentLevel {
    /// A process group. What leaves it is found as an orphan of ours, if this process is its reaper.
    ProcessGroup,
    /// A control group, frozen and then signaled. Linux before 5.14.
    CgroupFreeze,
    /// A control group, killed as a whole.
    CgroupKill,
}

impl ContainmentLevel {
    /// A word for logs and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ProcessGroup => "process-group",
            Self::CgroupFreeze => "cgroup-freeze",
            Self::CgroupKill => "cgroup-kill",
        }
    }
}

impl fmt::Display for ContainmentLevel {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.as_str())
    }
}

/// What may be made of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Requirement {
    /// The best that is there.
    #[default]
    BestAvailable,
    /// A control group, or the worker does not start.
    CgroupRequired,
    /// At most this level.
    AtMost(ContainmentLevel),
}

/// What a claim's processes may use together. Nothing is limited unless set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ResourceLimits {
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
pub enum OnLeak {
    /// It stays taken until nothing is left.
    #[default]
    KeepSlot,
    /// It is given to the next task.
    ReuseSlot,
}

/// What is wanted of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ContainmentConfig {
    /// How payloads are to be held together.
    pub requirement: Requirement,
    /// What each claim may use.
    pub limits: ResourceLimits,
    /// What becomes of a slot whose payload may still be there.
    pub on_leak: OnLeak,
}

/// How this host holds payloads together. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Containment {
    inner: Arc<ContainmentInner>,
}

#[derive(Debug)]
struct ContainmentInner {
    level: ContainmentLevel,
    shortcomings: Vec<String>,
    limits: ResourceLimits,
    /// Which limits were asked for and are not enforced.
    unenforced_keys: Option<&'static str>,
    on_leak: OnLeak,
    orphan_adoption: OrphanAdoption,
    claim_cgroups: Option<ClaimCgroups>,
    leftover_count: usize,
}

/// Where the groups of claims are made.
#[derive(Debug, Clone)]
struct ClaimCgroups {
    parent: Cgroup,
    kill_method: KillMethod,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OrphanAdoption {
    Enabled,
    Disabled,
}

impl Drop for ContainmentInner {
    fn drop(&mut self) {
        // Only where nothing is in it.
        if let Some(groups) = &self.claim_cgroups {
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
    pub fn probe(name: &str, wanted: ContainmentConfig) -> io::Result<Self> {
        let mut shortcomings = Vec::new();
        let most = match wanted.requirement {
            Requirement::BestAvailable | Requirement::CgroupRequired => ContainmentLevel::CgroupKill,
            Requirement::AtMost(level) => level,
        };
        let found = match most {
            ContainmentLevel::ProcessGroup => Err("the configuration asks for process groups".to_owned()),
            ContainmentLevel::CgroupFreeze | ContainmentLevel::CgroupKill => {
                probe_cgroups(name, most, &mut shortcomings)
            }
        };
        let (mut limits, adopts) = (wanted.limits, become_subreaper());
        let (level, groups, leftovers) = match found {
            Ok(found) => {
                let level = match found.claim_cgroups.kill_method {
                    KillMethod::Kill => ContainmentLevel::CgroupKill,
                    KillMethod::FreezeAndSignal => ContainmentLevel::CgroupFreeze,
                };
                if let Some(left) = found.unkillable {
                    apply_on_leak(&left, wanted.on_leak)?;
                }
                delegate_controllers(&found.own_cgroup, &found.claim_cgroups.parent, limits).unwrap_or_else(|why| {
                    shortcomings.push(format!("limits of memory and processes are not enforced: {why}"));
                    (limits.memory, limits.processes) = (None, None);
                });
                (level, Some(found.claim_cgroups), found.leftover_count)
            }
            Err(why) => {
                shortcomings.push(format!("no control groups: {why}"));
                (limits.memory, limits.processes) = (None, None);
                (ContainmentLevel::ProcessGroup, None, 0)
            }
        };
        if adopts == OrphanAdoption::Disabled && level == ContainmentLevel::ProcessGroup {
            shortcomings.push(
                "what leaves its process group is not seen: this program does not call journeyman::shim() first thing in \
                 main"
                    .to_owned(),
            );
        }
        if wanted.requirement == Requirement::CgroupRequired
            && (level == ContainmentLevel::ProcessGroup || limits != wanted.limits)
        {
            return Err(io::Error::new(io::ErrorKind::Unsupported, cgroup_required_message(&shortcomings)));
        }
        let unproven = wanted.on_leak;
        let unenforced = match (limits.memory != wanted.limits.memory, limits.processes != wanted.limits.processes) {
            (true, true) => Some("host.task_memory and host.task_pids"),
            (true, false) => Some("host.task_memory"),
            (false, true) => Some("host.task_pids"),
            (false, false) => None,
        };
        let inner = ContainmentInner {
            level,
            shortcomings,
            limits,
            unenforced_keys: unenforced,
            on_leak: unproven,
            orphan_adoption: adopts,
            claim_cgroups: groups,
            leftover_count: leftovers,
        };
        let established = Self { inner: Arc::new(inner) };
        established.log_summary(&wanted.limits);
        Ok(established)
    }

    /// Process groups and nothing more: nothing is probed, adopted or limited.
    #[must_use]
    pub fn disabled() -> Self {
        Self {
            inner: Arc::new(ContainmentInner {
                level: ContainmentLevel::ProcessGroup,
                shortcomings: Vec::new(),
                limits: ResourceLimits::default(),
                unenforced_keys: None,
                on_leak: OnLeak::KeepSlot,
                orphan_adoption: OrphanAdoption::Disabled,
                claim_cgroups: None,
                leftover_count: 0,
            }),
        }
    }

    /// How payloads are held together.
    #[must_use]
    pub fn level(&self) -> ContainmentLevel {
        self.inner.level
    }

    /// Why it is no better, a sentence each. Empty where nothing is missing.
    #[must_use]
    pub fn shortcomings(&self) -> &[String] {
        &self.inner.shortcomings
    }

    /// The limits that are enforced.
    #[must_use]
    pub fn limits(&self) -> ResourceLimits {
        self.inner.limits
    }

    /// What to do where limits were asked for that this host does not enforce.
    pub(crate) fn unenforced_limits_hint(&self) -> Option<String> {
        self.inner.unenforced_keys.map(|keys| {
            format!(
                "{keys}: not enforced, a task may take more; {}; under systemd set Delegate=yes in the unit, or set \
                 host.containment = \"cgroup\" for a worker that does not start without",
                self.inner.shortcomings.join("; ")
            )
        })
    }

    /// What becomes of a slot whose payload may still be there.
    #[must_use]
    pub fn on_leak(&self) -> OnLeak {
        self.inner.on_leak
    }

    /// How many control groups of an earlier life of this worker were found at the start, and ended.
    #[must_use]
    pub fn leftover_count(&self) -> usize {
        self.inner.leftover_count
    }

    /// What is to be around the processes of one claim. Nothing of it exists on the host before it is used; its
    /// [`ScopeName`] is known at once, so that it can be written down first.
    #[must_use]
    pub fn new_scope(&self) -> ProcessScope {
        let cookie = uuid::Uuid::new_v4().simple().to_string();
        match (&self.inner.claim_cgroups, self.inner.orphan_adoption) {
            (Some(ClaimCgroups { parent, kill_method: means }), _) => {
                let group = Cgroup::at(parent.path().join(format!("{CLAIM_CGROUP_PREFIX}{cookie}")));
                ProcessScope::with_cgroup(cookie, group, *means, self.inner.limits)
            }
            (None, OrphanAdoption::Enabled) => ProcessScope::with_subreaper(cookie, self.inner.limits),
            (None, OrphanAdoption::Disabled) => ProcessScope::with_cookie(cookie, self.inner.limits),
        }
    }

    /// Reaps what payloads have left to this process, for as long as it is polled. Never resolves.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn reap_orphans(&self) {
        let first = std::process::id() == 1;
        let reaper = first || rustix::process::child_subreaper().is_ok_and(|reaper| reaper.is_some());
        if !reaper || !shim_launch::is_shim_called() {
            return std::future::pending().await;
        }
        let rest = match (&self.inner.claim_cgroups, self.inner.limits.processes) {
            // What has ended counts as a process of its task until it is reaped.
            (_, Some(_)) => REAP_INTERVAL_PIDS_LIMITED,
            (None, None) => REAP_INTERVAL,
            // Few come here, and the end of a claim reaps them too. Each payload that ends would wake who waits for signals.
            (Some(_), None) => loop {
                tokio::time::sleep(REAP_INTERVAL_CGROUP).await;
                reap_if_any();
            },
        };
        let Ok(mut ended) = signal(SignalKind::child()) else { return std::future::pending().await };
        loop {
            reap_if_any();
            // A fleet of short payloads makes many signals.
            tokio::time::sleep(rest).await;
            ended.recv().await;
        }
    }

    fn log_summary(&self, set: &ResourceLimits) {
        let ContainmentInner { level, shortcomings, leftover_count: leftovers, .. } = &*self.inner;
        tracing::info!(containment = level.as_str(), "payloads are held together by {}", level_description(*level));
        if *leftovers > 0 {
            tracing::warn!(tasks = leftovers, "what an earlier life of this worker left running was killed");
        }
        let missing = *level < ContainmentLevel::CgroupKill || self.inner.limits != *set;
        for why in shortcomings {
            if missing {
                tracing::warn!(containment = level.as_str(), "{why}");
            } else {
                tracing::debug!("{why}");
            }
        }
    }
}

fn reap_if_any() {
    if children::has_orphans()
        && let Err(error) = children::reap_orphans()
    {
        tracing::debug!(%error, "the children of this process cannot be seen");
    }
}

/// How the groups of claims begin.
const CLAIM_CGROUP_PREFIX: &str = "claim-";

const fn level_description(level: ContainmentLevel) -> &'static str {
    match level {
        ContainmentLevel::CgroupKill => "a control group each, killed as a whole",
        ContainmentLevel::CgroupFreeze => "a control group each, frozen and then killed",
        ContainmentLevel::ProcessGroup => {
            "a process group each; strays are looked for by descent and by their environment"
        }
    }
}

fn cgroup_required_message(shortcomings: &[String]) -> String {
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
pub fn harden_process() {
    use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit};
    let hidden = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    let core = Rlimit { current: Some(0), ..getrlimit(Resource::Core) };
    if let Err(error) = hidden.and_then(|()| setrlimit(Resource::Core, core)) {
        tracing::warn!(%error, "payloads of this user may be able to read the worker's memory");
    }
}

/// Keeps from payloads what whoever started this process left open: that may be anything, secrets too. To be called once what
/// is to be read of it was read, since the descriptors that came with a process are known by this mark.
pub fn close_inherited_fds_on_exec() {
    close_fds::set_fds_cloexec(3, &[]);
}

/// Makes this process the reaper of what payloads leave behind.
fn become_subreaper() -> OrphanAdoption {
    if !shim_launch::is_shim_called() {
        return OrphanAdoption::Disabled;
    }
    // The process that is set is this one, whatever number is given.
    match rustix::process::set_child_subreaper(Some(rustix::process::getpid())) {
        Ok(()) => OrphanAdoption::Enabled,
        Err(error) => {
            tracing::warn!(%error, "this process cannot adopt what payloads leave behind");
            OrphanAdoption::Disabled
        }
    }
}

/// What probing found.
struct CgroupProbe {
    claim_cgroups: ClaimCgroups,
    /// Our own group, where limits could be delegated from.
    own_cgroup: Cgroup,
    leftover_count: usize,
    /// A group of an earlier life that could not be emptied.
    unkillable: Option<String>,
}

fn probe_cgroups(name: &str, most: ContainmentLevel, shortcomings: &mut Vec<String>) -> Result<CgroupProbe, String> {
    if !shim_launch::is_shim_called() {
        return Err("this program does not call journeyman::shim() first thing in main".to_owned());
    }
    let own = Cgroup::at(cgroup::own_cgroup_path()?);
    let parent = worker_cgroup(&own, name);
    parent.create().map_err(|error| format!("{error} (under systemd, set Delegate=yes)"))?;
    let mut leftovers = 0;
    let mut still_there = None;
    for left in claim_cgroups_in(parent.path()) {
        leftovers += 1;
        if let Err(error) = kill_and_remove(&Cgroup::at(left)) {
            still_there = Some(error.to_string());
        }
    }
    let trial = Cgroup::at(parent.path().join("probe"));
    let means = match most {
        ContainmentLevel::CgroupKill => [Some(KillMethod::Kill), Some(KillMethod::FreezeAndSignal)],
        ContainmentLevel::CgroupFreeze | ContainmentLevel::ProcessGroup => [None, Some(KillMethod::FreezeAndSignal)],
    };
    for means in means.into_iter().flatten() {
        match try_kill_method(&trial, means) {
            Ok(()) => {
                let groups = ClaimCgroups { parent, kill_method: means };
                return Ok(CgroupProbe {
                    claim_cgroups: groups,
                    own_cgroup: own,
                    leftover_count: leftovers,
                    unkillable: still_there,
                });
            }
            Err(why) => shortcomings.push(why),
        }
    }
    drop(trial.remove());
    drop(parent.remove());
    Err("none that was tried could be killed".to_owned())
}

/// Where a worker that is started in `own` has the groups of its claims.
fn worker_cgroup(own: &Cgroup, name: &str) -> Cgroup {
    Cgroup::at(own.path().join(format!("journeyman-{}", name_digest(name))))
}

/// Removes the group of a worker that was killed, by the name that it was established with, if it was started where this
/// process is and nothing is in it.
pub(crate) fn remove_worker_cgroup(name: &str) {
    if let Ok(own) = cgroup::own_cgroup_path() {
        // One in which something lives is its next worker's to end.
        drop(worker_cgroup(&Cgroup::at(own), name).remove());
    }
}

/// Starts the shim in a group, kills it, and waits for its end.
fn try_kill_method(trial: &Cgroup, means: KillMethod) -> Result<(), String> {
    let shim = shim_path().map_err(|error| error.to_string())?;
    trial.create().map_err(|error| error.to_string())?;
    let file = match means {
        KillMethod::Kill => "cgroup.kill",
        KillMethod::FreezeAndSignal => "cgroup.freeze",
    };
    if !trial.has_file(file) {
        return Err(format!("the kernel has no {file}"));
    }
    #[expect(clippy::disallowed_methods, reason = "only at the start, and for milliseconds")]
    let mut command = std::process::Command::new(shim);
    command.arg0(SHIM_NAME).args(shim_launch::wait_arguments(&trial.procs_path())).env_clear();
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let started = children::start_child(None, || command.spawn(), |child| Some(child.id()))
        .map_err(|error| format!("cannot execute the exec shim: {error}"))?;
    let children::StartedChild { mut child, registration: known } = started;
    let entered = (0..CONTAINMENT_PROBE_TIMEOUT.as_millis() / process::PROCESS_POLL_INTERVAL.as_millis()).any(|_| {
        let inside = trial.processes().contains(&child.id().cast_signed());
        if !inside && !matches!(child.try_wait(), Ok(Some(_))) {
            std::thread::sleep(process::PROCESS_POLL_INTERVAL);
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
    if !trial.wait_empty_blocking(CONTAINMENT_PROBE_TIMEOUT) {
        return Err(format!("a process that was killed by {file} is still there"));
    }
    trial.remove().map_err(|error| error.to_string())
}

fn claim_cgroups_in(parent: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.path()).collect()
}

/// Kills what is in a group, and what that has started and has left it, and removes it.
fn kill_and_remove(group: &Cgroup) -> io::Result<()> {
    if !group.is_empty() {
        // Their parents are still there to tell.
        let (inside, all) = (group.processes(), ProcessStat::read_all()?);
        let with = process::with_descendants(&inside, &all);
        let own = std::process::id().cast_signed();
        let outside =
            all.iter().filter(|stat| with.contains(&stat.pid) && !inside.contains(&stat.pid) && stat.pid != own);
        for stat in outside {
            process::signal_if(stat.pid, Signal::KILL, |pid| {
                ProcessStat::read(pid).is_some_and(|now| now.start_ticks == stat.start_ticks)
            });
        }
        group.kill(if group.has_file("cgroup.kill") { KillMethod::Kill } else { KillMethod::FreezeAndSignal });
        if !group.wait_empty_blocking(CONTAINMENT_PROBE_TIMEOUT) {
            let left = group.processes();
            let text = format!("processes in {} cannot be killed: {left:?}", group.path().display());
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
        }
    }
    group.remove()
}

/// This process's own control group, where the host has version 2.
pub(crate) fn own_cgroup() -> Option<PathBuf> {
    cgroup::own_cgroup_path().ok().filter(|own| own.exists())
}

pub(crate) fn apply_on_leak(left: &str, unproven: OnLeak) -> io::Result<()> {
    match unproven {
        OnLeak::ReuseSlot => {
            tracing::error!("[alert operator] an earlier life of this worker is not over: {left}");
            Ok(())
        }
        OnLeak::KeepSlot => Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            format!(
                "an earlier life of this worker is not over: {left}; restart the host, or set host.on_cleanup_failure = \"reuse-slot\""
            ),
        )),
    }
}

/// Hands the controllers that the limits need down to the groups of claims. A group that does so must not hold processes
/// itself, so the worker moves into one of its own first.
fn delegate_controllers(own: &Cgroup, parent: &Cgroup, limits: ResourceLimits) -> Result<(), String> {
    let needed = [("memory", limits.memory.is_some()), ("pids", limits.processes.is_some())];
    let needed: Vec<&str> = needed.iter().filter(|(_, needed)| *needed).map(|(name, _)| *name).collect();
    if needed.is_empty() {
        return Ok(());
    }
    let offered = own.read("cgroup.controllers").map_err(|error| error.to_string())?;
    let offered: Vec<&str> = offered.split_ascii_whitespace().collect();
    if let Some(missing) = needed.iter().find(|name| !offered.contains(name)) {
        return Err(format!("the {missing} controller is not delegated to {}", own.path().display()));
    }
    let wanted: Vec<String> = needed.iter().map(|name| format!("+{name}")).collect();
    let wanted = wanted.join(" ");
    let own_process = std::process::id().cast_signed();
    // The root of the hierarchy alone may hold processes beside groups; it has no type.
    if own.has_file("cgroup.type") {
        let inside = own.read("cgroup.procs").map_err(|error| error.to_string())?;
        let mut others = inside.lines().filter_map(|line| line.parse::<i32>().ok()).filter(|pid| *pid != own_process);
        if let Some(other) = others.next() {
            return Err(format!("process {other} shares the worker's control group; give the worker one of its own"));
        }
        let leaf = Cgroup::at(own.path().join(WORKER_CGROUP));
        leaf.create().and_then(|()| leaf.write("cgroup.procs", "0")).map_err(|error| error.to_string())?;
    }
    [own, parent]
        .iter()
        .try_for_each(|group| group.write("cgroup.subtree_control", &wanted))
        .map_err(|error| error.to_string())
}

/// A name of fixed length that says nothing.
fn name_digest(name: &str) -> String {
    use sha2::Digest as _;
    sha2::Sha256::digest(name.as_bytes()).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_shim_a_payload_is_a_process_group_and_the_reason_is_said() {
        let containment = Containment::probe("test", ContainmentConfig::default()).unwrap();
        assert_eq!(containment.level(), ContainmentLevel::ProcessGroup);
        assert!(containment.shortcomings().iter().any(|why| why.contains("shim")), "{containment:?}");
        let demanded = ContainmentConfig { requirement: Requirement::CgroupRequired, ..ContainmentConfig::default() };
        let error = Containment::probe("test", demanded).unwrap_err().to_string();
        assert!(error.contains("Delegate=yes") && error.contains("shim"), "{error}");
    }

    #[test]
    fn controllers_are_handed_down_only_where_they_are_offered() {
        let folder = tempfile::tempdir().unwrap();
        let own = Cgroup::at(folder.path().to_owned());
        let parent = Cgroup::at(folder.path().join("journeyman-1"));
        parent.create().unwrap();
        own.write("cgroup.controllers", "cpu pids\n").unwrap();
        let none = ResourceLimits::default();
        delegate_controllers(&own, &parent, none).unwrap();
        assert!(!own.has_file("cgroup.subtree_control"));
        let why = delegate_controllers(&own, &parent, ResourceLimits { memory: Some(1), ..none }).unwrap_err();
        assert!(why.contains("the memory controller is not delegated"), "{why}");
        delegate_controllers(&own, &parent, ResourceLimits { processes: Some(1), ..none }).unwrap();
        assert_eq!(parent.read("cgroup.subtree_control").unwrap(), "+pids");
    }

    #[test]
    fn a_worker_that_shares_its_group_is_told_so() {
        let folder = tempfile::tempdir().unwrap();
        let own = Cgroup::at(folder.path().to_owned());
        own.write("cgroup.controllers", "memory pids").unwrap();
        own.write("cgroup.type", "domain").unwrap();
        own.write("cgroup.procs", &format!("1\n{}\n", std::process::id())).unwrap();
        let limits = ResourceLimits { memory: Some(1), ..ResourceLimits::default() };
        let why = delegate_controllers(&own, &own, limits).unwrap_err();
        assert!(why.contains("process 1 shares"), "{why}");
        own.write("cgroup.procs", &std::process::id().to_string()).unwrap();
        delegate_controllers(&own, &own, limits).unwrap();
        assert_eq!(Cgroup::at(folder.path().join(WORKER_CGROUP)).read("cgroup.procs").unwrap(), "0");
    }
}
