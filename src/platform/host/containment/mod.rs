//! Contains the processes of each payload, and kills them all: nothing outlives its claim.
//!
//! There are two levels; a probe at the start finds whether the first works: a control group that the kernel kills as a whole, and
//! a process group. At both this process adopts orphans as their subreaper: processes that left the process group, or that moved
//! themselves to another control group, which a payload that runs as the worker's user can do. Each claim has its own
//! [`ProcessScope`].
//!
//! This is not a security boundary. A payload of the worker's user can have other programs start processes for it, or kill the
//! worker. Preventing that takes another user, or a container.

mod cgroup;
pub mod children;
mod dir_size;
pub mod exec_shim;
mod kill_recorded;
mod proc_scan;
mod process_scope;
mod shim_launch;
mod worker_cgroups;

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Stdio;
use std::sync::Arc;

use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{SignalKind, signal};

use super::journal::ProcessRecorder;
use super::process::{self, ProcessStat};
use super::work_dir::child_dirs;
use cgroup::KILL_FILE;
use journeyman_domain::limits::{CONTAINMENT_PROBE_TIMEOUT, REAP_INTERVAL};
use journeyman_domain::named_enum;
use process_scope::{Backend, ScopeIdentity};
use shim_launch::shim_path;

pub use cgroup::{Cgroup, own_cgroup_path};
pub use dir_size::{disk_usage, is_larger_than, wait_larger_than};
pub use exec_shim::ShimError;
pub use kill_recorded::kill_recorded_processes;
pub use process_scope::{LaunchMethod, LimitExceeded, ProcessScope, Removal, ScopeUsage, ScopedProcess};
pub use shim_launch::{SHIM_BUILT, SHIM_NAME, encode_environment, install_shim, shim};
pub use worker_cgroups::{WorkerCgroups, command_prefix, prepare_entry};

/// Identifies the processes of a payload.
pub const COOKIE_VARIABLE: &str = "JOURNEYMAN_CLAIM_COOKIE";
/// The group that the worker moves into when its own group delegates controllers to those of its tasks.
const WORKER_CGROUP: &str = "worker";

named_enum! {
    /// How payloads are contained.
    pub enum ContainmentLevel {
        /// A process group. Processes that leave it are found if this process adopts them.
        ProcessGroup = "process-group",
        /// A control group, killed as a whole. Since Linux 5.14.
        CgroupKill = "cgroup-kill",
    }
}

/// How the processes of a task are contained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Requirement {
    /// The strongest method that the host offers.
    #[default]
    Auto,
    /// A control group for each task, with every configured limit; otherwise the worker does not start.
    Cgroup,
    /// A process group for each task.
    Group,
}

/// Limits for all processes of a claim together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ResourceLimits {
    /// In bytes; swap is disabled. Needs the memory controller.
    pub memory: Option<u64>,
    /// Processes and threads. Needs the pids controller.
    pub processes: Option<u32>,
    /// Bytes in the task's directory, measured every few seconds and at the end, so that a task may exceed it for that long.
    pub disk: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ContainmentConfig {
    pub requirement: Requirement,
    pub limits: ResourceLimits,
}

/// The containment of this host. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Containment {
    inner: Arc<ContainmentInner>,
}

#[derive(Debug, Default)]
struct ContainmentInner {
    /// Of each claim; a control group is the parent of the claims' groups.
    backend: Backend,
    shortcomings: Vec<String>,
    limits: ResourceLimits,
    /// The configured limits that are not enforced.
    unenforced_keys: Vec<&'static str>,
}

impl Drop for ContainmentInner {
    fn drop(&mut self) {
        // Succeeds only if it has no groups.
        if let Backend::Cgroup(group) = &self.backend {
            drop(group.remove());
        }
    }
}

impl Containment {
    /// Probes what the host offers, and kills the processes that a previous worker of the same `name` left in its control groups.
    /// Blocks for up to a few seconds.
    ///
    /// `name` is unique among the running workers of this host, and the same at the worker's next start.
    ///
    /// # Errors
    ///
    /// Control groups are required and not available, or cannot enforce a limit, or processes of the previous worker process
    /// cannot be killed. The text says what to do.
    pub fn probe(name: &str, config: ContainmentConfig) -> io::Result<Self> {
        let mut shortcomings = Vec::new();
        let found = find_cgroups(name, config.requirement)?;
        let adopts_orphans = become_subreaper();
        let without_cgroups = ResourceLimits { disk: config.limits.disk, ..ResourceLimits::default() };
        let (backend, limits) = match found {
            Ok((own, parent)) => {
                let delegated = delegate_controllers(&own, &parent, config.limits);
                let limits = delegated.map_or_else(
                    |error| {
                        shortcomings.push(format!("limits of memory and processes are not enforced: {error}"));
                        without_cgroups
                    },
                    |()| config.limits,
                );
                (Backend::Cgroup(parent), limits)
            }
            Err(error) => {
                shortcomings.push(format!("no control groups: {error}"));
                if adopts_orphans {
                    (Backend::Subreaper, without_cgroups)
                } else {
                    let why = "processes that leave their process group are not tracked: call journeyman::shim() first in main";
                    shortcomings.push(why.to_owned());
                    (Backend::ProcessGroup, without_cgroups)
                }
            }
        };
        let has_cgroups = matches!(backend, Backend::Cgroup(_));
        if config.requirement == Requirement::Cgroup && (!has_cgroups || limits != config.limits) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, cgroup_required_message(&shortcomings)));
        }
        let mut unenforced_keys = Vec::new();
        if limits.memory != config.limits.memory {
            unenforced_keys.push("host.task_memory");
        }
        if limits.processes != config.limits.processes {
            unenforced_keys.push("host.task_pids");
        }
        let inner = ContainmentInner { backend, shortcomings, limits, unenforced_keys };
        let containment = Self { inner: Arc::new(inner) };
        let level = containment.level();
        tracing::info!(containment = level.as_str(), "containment of tasks: {}", level.as_str());
        for why in containment.shortcomings() {
            tracing::warn!(containment = level.as_str(), "{why}");
        }
        Ok(containment)
    }

    /// Process groups alone: nothing is probed, adopted or limited.
    pub fn disabled() -> Self {
        Self { inner: Arc::default() }
    }

    pub fn level(&self) -> ContainmentLevel {
        match &self.inner.backend {
            Backend::ProcessGroup | Backend::Subreaper => ContainmentLevel::ProcessGroup,
            Backend::Cgroup(_) => ContainmentLevel::CgroupKill,
        }
    }

    /// Why the level is not better, one message each.
    pub fn shortcomings(&self) -> &[String] {
        &self.inner.shortcomings
    }

    /// The limits that are enforced.
    pub fn limits(&self) -> ResourceLimits {
        self.inner.limits
    }

    /// What operators should know if configured limits are not enforced.
    pub fn unenforced_limits_hint(&self) -> Option<String> {
        let ContainmentInner { unenforced_keys: keys, shortcomings, .. } = &*self.inner;
        (!keys.is_empty()).then(|| {
            format!(
                "{}: not enforced, a task may use more; {}; under systemd set Delegate=yes in the unit, or set \
                 host.containment = \"cgroup\" to require control groups",
                keys.join(" and "),
                shortcomings.join("; ")
            )
        })
    }

    /// A scope for one claim. Its control group is created with the first process; its record is known at once, so that it can
    /// be journaled first.
    pub fn new_scope(&self) -> ProcessScope {
        self.new_recorded_scope(None)
    }

    /// As [`Containment::new_scope`], with the journal entry of its processes.
    pub fn new_recorded_scope(&self, recorder: Option<ProcessRecorder>) -> ProcessScope {
        ProcessScope::new(self.clone(), recorder)
    }

    fn new_scope_identity(&self) -> ScopeIdentity {
        let cookie = uuid::Uuid::new_v4().simple().to_string();
        let mut backend = self.inner.backend.clone();
        if let Backend::Cgroup(group) = &mut backend {
            *group = Cgroup::at(group.path().join(format!("{CLAIM_CGROUP_PREFIX}{cookie}")));
        }
        ScopeIdentity { cookie, backend }
    }

    /// Reaps exited orphans of payloads for as long as it is polled. Never resolves.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn reap_orphans(&self) {
        let is_init = std::process::id() == 1;
        let reaper = is_init || rustix::process::child_subreaper().is_ok_and(|reaper| reaper.is_some());
        if !reaper || !shim_launch::is_shim_called() {
            return std::future::pending().await;
        }
        let Ok(mut child_exited) = signal(SignalKind::child()) else { return std::future::pending().await };
        loop {
            if children::has_orphans()
                && let Err(error) = children::reap_orphans()
            {
                tracing::debug!(%error, "cannot list the children of this process");
            }
            // Many short payloads send many signals.
            tokio::time::sleep(REAP_INTERVAL).await;
            child_exited.recv().await;
        }
    }
}

const CLAIM_CGROUP_PREFIX: &str = "claim-";

fn cgroup_required_message(shortcomings: &[String]) -> String {
    format!(
        "host.containment = \"cgroup\" is not possible here: {}; under systemd set Delegate=yes in the unit, in a container \
         mount /sys/fs/cgroup writable (docker run --cgroupns=private with a writable cgroup mount), or set \
         host.containment = \"auto\"",
        shortcomings.join("; ")
    )
}

/// Protects this process from payloads of the same user: they can neither read its memory and environment nor trace it, and it
/// writes no core file. Payloads inherit the limit for core files, and may raise it again.
///
/// `/proc/PID` of this process then belongs to root, so a debugger has to run as root.
pub fn harden_process() {
    use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit};
    let protected = set_dumpable_behavior(DumpableBehavior::NotDumpable);
    let core = Rlimit { current: Some(0), ..getrlimit(Resource::Core) };
    if let Err(error) = protected.and_then(|()| setrlimit(Resource::Core, core)) {
        tracing::warn!(%error, "payloads of this user may be able to read the worker's memory");
    }
}

/// Keeps inherited descriptors from payloads, because they may lead to secrets.
pub fn close_inherited_fds_on_exec() {
    close_fds::set_fds_cloexec(3, &[]);
}

/// Makes this process adopt orphans of payloads. `false` if it does not.
fn become_subreaper() -> bool {
    if !shim_launch::is_shim_called() {
        return false;
    }
    // The call applies to this process, whatever PID is given.
    let result = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
    result.inspect_err(|error| tracing::warn!(%error, "this process cannot adopt orphans of payloads")).is_ok()
}

/// The worker's own group, which can delegate controllers, and the parent of the claims' groups, after it has killed the processes
/// in groups of the previous worker process. The inner error says why control groups cannot be used.
fn find_cgroups(name: &str, requirement: Requirement) -> io::Result<Result<(Cgroup, Cgroup), String>> {
    if requirement == Requirement::Group {
        return Ok(Err("the configuration asks for process groups".to_owned()));
    }
    if !shim_launch::is_shim_called() {
        return Ok(Err("this program does not call journeyman::shim() first in main".to_owned()));
    }
    let (own, parent) = match create_parent_cgroup("journeyman", name) {
        Ok(created) => created,
        Err(error) => return Ok(Err(error)),
    };
    for path in child_dirs(parent.path()) {
        tracing::warn!(cgroup = %path.display(), "killing processes left by the previous worker process");
        kill_and_remove(&Cgroup::at(path)).map_err(|error| survivors_error(&error.to_string()))?;
    }
    let probe = Cgroup::at(parent.path().join("probe"));
    if let Err(error) = try_kill(&probe) {
        drop(probe.remove());
        drop(parent.remove());
        return Ok(Err(error));
    }
    Ok(Ok((own, parent)))
}

/// This process's own group, and a parent of further groups in it.
fn create_parent_cgroup(prefix: &str, name: &str) -> Result<(Cgroup, Cgroup), String> {
    let own = Cgroup::at(own_cgroup_path()?);
    let parent = Cgroup::at(own.path().join(format!("{prefix}-{}", name_digest(name))));
    parent.create().map_err(|error| format!("{error} (under systemd, set Delegate=yes)"))?;
    Ok((own, parent))
}

/// Starts the shim in a group, kills it, and waits for its end.
fn try_kill(probe: &Cgroup) -> Result<(), String> {
    let shim = shim_path().map_err(|error| error.to_string())?;
    probe.create().map_err(|error| error.to_string())?;
    if !probe.has_file(KILL_FILE) {
        return Err(format!("the kernel has no {KILL_FILE}; it has it from Linux 5.14 on"));
    }
    #[expect(clippy::disallowed_methods, reason = "only at the start, and for milliseconds")]
    let mut command = std::process::Command::new(shim);
    command.arg0(SHIM_NAME).arg(exec_shim::WAIT).arg(probe.procs_path()).env_clear();
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let started = children::start_child(None, || command.spawn(), |child| Some(child.id()))
        .map_err(|error| format!("cannot execute the exec shim: {error}"))?;
    let children::StartedChild { mut child, registration } = started;
    let pid = child.id().cast_signed();
    process::poll_blocking(CONTAINMENT_PROBE_TIMEOUT, || {
        probe.processes().contains(&pid) || matches!(child.try_wait(), Ok(Some(_)))
    });
    let entered = probe.processes().contains(&pid);
    if entered {
        probe.kill();
    } else {
        drop(child.kill());
    }
    let exit = child.wait();
    drop(registration);
    exit.map_err(|error| error.to_string())?;
    if !entered {
        return Err("a process could not enter a test control group".to_owned());
    }
    if !process::poll_blocking(CONTAINMENT_PROBE_TIMEOUT, || probe.is_empty()) {
        return Err(format!("a process survived {KILL_FILE}"));
    }
    probe.remove().map_err(|error| error.to_string())
}

/// Kills the processes of a group, and their descendants that left it, and removes the group.
fn kill_and_remove(group: &Cgroup) -> io::Result<()> {
    if !group.is_empty() {
        // Before the kill: descendants are found by their parents.
        let (inside, all) = (group.processes(), ProcessStat::read_all()?);
        let tree = process::with_descendants(&inside, &all);
        let own = std::process::id().cast_signed();
        let outside =
            all.iter().filter(|stat| tree.contains(&stat.pid) && !inside.contains(&stat.pid) && stat.pid != own);
        outside.for_each(|stat| stat.signal(Signal::KILL));
        group.kill();
        if !process::poll_blocking(CONTAINMENT_PROBE_TIMEOUT, || group.is_empty()) {
            let text = format!("cannot kill processes in {}: {:?}", group.path().display(), group.processes());
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
        }
    }
    group.remove()
}

pub fn survivors_error(unkillable: &str) -> io::Error {
    let message = format!("cannot kill processes of the previous worker process: {unkillable}; restart the host");
    io::Error::new(io::ErrorKind::ResourceBusy, message)
}

/// Enables the controllers that the limits need in the claims' groups. A group that does so must not have processes itself, so
/// the worker moves into a child group first.
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
    // Only the root of the hierarchy may have processes beside groups; it has no type.
    if own.has_file("cgroup.type") {
        let inside = own.read("cgroup.procs").map_err(|error| error.to_string())?;
        let mut others = inside.lines().filter_map(|line| line.parse::<i32>().ok()).filter(|pid| *pid != own_process);
        if let Some(other) = others.next() {
            return Err(format!("process {other} shares the worker's control group; give the worker its own"));
        }
        let leaf = Cgroup::at(own.path().join(WORKER_CGROUP));
        leaf.create().and_then(|()| leaf.write("cgroup.procs", "0")).map_err(|error| error.to_string())?;
    }
    [own, parent]
        .iter()
        .try_for_each(|group| group.write("cgroup.subtree_control", &wanted))
        .map_err(|error| error.to_string())
}

/// A name of fixed length.
fn name_digest(name: &str) -> String {
    use sha2::Digest as _;
    let mut digits = hex::encode(sha2::Sha256::digest(name.as_bytes()));
    digits.truncate(16);
    digits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_the_shim_payloads_are_process_groups_and_the_reason_is_listed() {
        let containment = Containment::probe("test", ContainmentConfig::default()).unwrap();
        assert_eq!(containment.level(), ContainmentLevel::ProcessGroup);
        assert!(containment.shortcomings().iter().any(|why| why.contains("shim")), "{containment:?}");
        let required = ContainmentConfig { requirement: Requirement::Cgroup, ..ContainmentConfig::default() };
        let error = Containment::probe("test", required).unwrap_err().to_string();
        assert!(error.contains("Delegate=yes") && error.contains("shim"), "{error}");
    }

    #[test]
    fn controllers_are_delegated_only_if_available() {
        let dir = tempfile::tempdir().unwrap();
        let own = Cgroup::at(dir.path().to_owned());
        let parent = Cgroup::at(dir.path().join("journeyman-1"));
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
    fn a_shared_control_group_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let own = Cgroup::at(dir.path().to_owned());
        own.write("cgroup.controllers", "memory pids").unwrap();
        own.write("cgroup.type", "domain").unwrap();
        own.write("cgroup.procs", &format!("1\n{}\n", std::process::id())).unwrap();
        let limits = ResourceLimits { memory: Some(1), ..ResourceLimits::default() };
        let why = delegate_controllers(&own, &own, limits).unwrap_err();
        assert!(why.contains("process 1 shares"), "{why}");
        own.write("cgroup.procs", &std::process::id().to_string()).unwrap();
        delegate_controllers(&own, &own, limits).unwrap();
        assert_eq!(Cgroup::at(dir.path().join(WORKER_CGROUP)).read("cgroup.procs").unwrap(), "0");
    }
}
