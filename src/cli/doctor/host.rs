//! What a worker needs of this machine: a work folder, memory, open files, control groups, programs, a socket, and the word of
//! its cloud.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{StatVfsMountFlags, statvfs};
use rustix::process::{Resource, getrlimit};
use tokio::time::timeout;

use super::Check;
use crate::cli::exit::{Exit, Failure};
use crate::cli::termination_watch;
use crate::config::schema::{Config, Containment, Host, MetadataService};
use crate::control::client::{ControlClient, Error};
use crate::host::containment::own_cgroup;
use crate::host::{resources, termination_notice};
use crate::limits::{
    DOCTOR_CALL_TIMEOUT, DOCTOR_FREE_INODES_MIN, TASK_OPEN_FILES, WORKER_OPEN_FILES, WORKER_OPEN_FILES_MIN,
};
use crate::worker::snapshot::format_bytes;

/// Everything on this machine. Blocks for as long as its file systems take.
pub(super) fn check_host(config: &Config) -> Vec<Check> {
    let mut checks = check_work_dir(config);
    checks.extend([check_memory(config), check_open_files(config), check_cgroups(&config.host)]);
    checks.extend(check_task_limits(&config.host));
    checks
}

fn check_work_dir(config: &Config) -> Vec<Check> {
    let wanted = &config.worker.work_dir.0;
    let name = "work folder";
    // The worker makes it where it is missing.
    let Some(there) = nearest_existing(wanted) else {
        return vec![Check::failed(name, format!("{} is nowhere", wanted.display()), "set worker.work_dir")];
    };
    let shown = wanted.display();
    let fix = "make it the user's that runs the worker (`chown journeyman`), or set worker.work_dir to another";
    if let Err(error) = probe_writable(there) {
        let what = if there == wanted { "cannot be written" } else { "is not there and cannot be made" };
        return vec![Check::failed(name, format!("{shown} {what}: {error}"), fix)];
    }
    let mut checks = Vec::new();
    let about = match statvfs(there) {
        Ok(about) => about,
        Err(error) => return vec![Check::failed(name, format!("{shown} cannot be looked at: {error}"), fix)],
    };
    let made = if there == wanted { "can be written" } else { "will be made" };
    checks.push(if about.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        let fix = "mount it without `noexec`, or set worker.work_dir to another";
        Check::failed(name, format!("{shown} {made}, and nothing in it can be executed"), fix)
    } else {
        Check::ok(name, format!("{shown} {made}, and what is in it can be executed"))
    });
    let (free, least) = (about.f_bavail.saturating_mul(about.f_frsize), config.host.min_free_disk.0);
    let found = format!("{} free, host.min_free_disk is {}", format_bytes(free), format_bytes(least));
    checks.push(if free < least {
        Check::failed("disk", found, "nothing is claimed until there is more: free some, or set host.min_free_disk")
    } else {
        Check::ok("disk", found)
    });
    // Some file systems have no fixed number, and say 0 of 0.
    if about.f_files > 0 {
        let found = format!("{} of {} free", about.f_favail, about.f_files);
        checks.push(if about.f_favail < DOCTOR_FREE_INODES_MIN {
            Check::warning(
                "inodes",
                found,
                "tasks with many files will fail: remove some, or take a larger file system",
            )
        } else {
            Check::ok("inodes", found)
        });
    }
    checks
}

/// What there is of a folder: it, or the nearest above it.
fn nearest_existing(wanted: &Path) -> Option<&Path> {
    wanted.ancestors().map(|at| if at.as_os_str().is_empty() { Path::new(".") } else { at }).find(|at| at.exists())
}

/// The folders of the pools whose workers are started here.
pub(super) fn check_pool_dirs(config: &Config) -> Vec<Check> {
    let started = config.pool.iter().filter(|(_, pool)| !pool.command.is_empty());
    started
        .map(|(name, pool)| {
            let (part, folder) = (format!("{name}: folder"), &pool.state_dir.0);
            let written = nearest_existing(folder).map_or_else(|| Err(ErrorKind::NotFound.into()), probe_writable);
            match written {
                Ok(()) => Check::ok(part, format!("{} can be written", folder.display())),
                Err(error) => Check::failed(
                    part,
                    format!("{} cannot be written: {error}", folder.display()),
                    format!("make it the user's that runs the controller, or set pool.{name}.state_dir to another"),
                ),
            }
        })
        .collect()
}

/// Makes an empty file and takes it away again.
fn probe_writable(folder: &Path) -> std::io::Result<()> {
    let probe = folder.join(format!(".journeyman-doctor-{}", std::process::id()));
    File::create_new(&probe)?;
    std::fs::remove_file(&probe)
}

fn check_memory(config: &Config) -> Check {
    let least = config.host.min_free_memory.0;
    match resources::measure(Path::new("/")).memory {
        Some(free) if free < least => Check::failed(
            "memory",
            format!("{} can be had, host.min_free_memory is {}", format_bytes(free), format_bytes(least)),
            "nothing is claimed until there is more: end something, or set host.min_free_memory",
        ),
        Some(free) => Check::ok(
            "memory",
            format!("{} can be had, host.min_free_memory is {}", format_bytes(free), format_bytes(least)),
        ),
        None => Check::warning("memory", "/proc/meminfo does not say", "is /proc mounted?"),
    }
}

fn check_open_files(config: &Config) -> Check {
    let OpenFileLimit { limit: most, needed: enough } = OpenFileLimit::from_config(config);
    let capacity = config.worker.capacity;
    let found = |most: String| format!("{most} for this user, {enough} are enough for capacity {capacity}");
    match most {
        Some(most) if most < WORKER_OPEN_FILES_MIN => Check::failed("open files", found(most.to_string()), RAISE_FILES),
        Some(most) if most < enough => Check::warning("open files", found(most.to_string()), RAISE_FILES),
        Some(most) => Check::ok("open files", found(most.to_string())),
        None => Check::ok("open files", found("without a limit".to_owned())),
    }
}

const RAISE_FILES: &str =
    "raise it for the worker: LimitNOFILE= in the unit (the units that come along do), `ulimit -n` elsewhere";

/// How many files may be open.
struct OpenFileLimit {
    /// By this process; `None` is without a limit.
    limit: Option<u64>,
    /// For what the configuration wants to run at once.
    needed: u64,
}

impl OpenFileLimit {
    fn from_config(config: &Config) -> Self {
        let needed = WORKER_OPEN_FILES + TASK_OPEN_FILES * u64::from(config.worker.capacity);
        Self { limit: getrlimit(Resource::Nofile).current, needed }
    }
}

/// What a worker says at its start, where fewer files may be open than its capacity needs.
///
/// # Errors
///
/// [`Exit::HostUnusable`] where they are too few for a worker without tasks.
pub(in crate::cli) fn open_files_warning(config: &Config) -> Result<Option<String>, Failure> {
    let OpenFileLimit { limit: most, needed: enough } = OpenFileLimit::from_config(config);
    let Some(most) = most.filter(|most| *most < enough) else { return Ok(None) };
    let capacity = config.worker.capacity;
    let text = format!("{most} files may be open, and a capacity of {capacity} may need {enough}: {RAISE_FILES}");
    if most < WORKER_OPEN_FILES_MIN { Err(Failure::new(Exit::HostUnusable, text)) } else { Ok(Some(text)) }
}

/// What can be seen without moving a process: the worker itself finds out by doing it, and in its own group.
fn check_cgroups(host: &Host) -> Check {
    let name = "control groups";
    let demanded = host.containment == Containment::Cgroup;
    let fix = "under systemd set Delegate=yes in the unit (the units that come along do), in a container mount /sys/fs/cgroup writable";
    let lacks = |found: String| {
        let found = format!("{found}; seen from here, payloads would be process groups");
        if demanded { Check::failed(name, found, fix) } else { Check::warning(name, found, fix) }
    };
    let Some(own) = own_cgroup() else {
        return lacks("there is no control group of version 2".to_owned());
    };
    match rustix::fs::access(&own, rustix::fs::Access::WRITE_OK) {
        Ok(()) => Check::ok(name, "version 2, and this process may make one for each task"),
        Err(_) => lacks(format!("{} may not be written by this user", own.display())),
    }
}

/// Whether the limits that are set can be enforced, where any are.
fn check_task_limits(host: &Host) -> Option<Check> {
    let wanted = [("memory", host.task_memory.is_some()), ("pids", host.task_pids.is_some())];
    let wanted: Vec<&str> = wanted.into_iter().filter_map(|(name, wanted)| wanted.then_some(name)).collect();
    if wanted.is_empty() {
        return None;
    }
    let (name, shown) = ("task limits", wanted.join(" and "));
    let fix = "under systemd set Delegate=yes in the unit; elsewhere give this group the controllers, or unset \
               host.task_memory and host.task_pids";
    let offered = own_cgroup().and_then(|own| std::fs::read_to_string(own.join("cgroup.controllers")).ok());
    let offered = offered.unwrap_or_default();
    let missing: Vec<&str> =
        wanted.into_iter().filter(|name| !offered.split_ascii_whitespace().any(|offer| offer == *name)).collect();
    Some(if missing.is_empty() {
        Check::ok(name, format!("the controllers for {shown} are there"))
    } else {
        let found =
            format!("no controller for {}: seen from here, a task may take more than is set", missing.join(" and "));
        if host.containment == Containment::Cgroup {
            Check::failed(name, found, fix)
        } else {
            Check::warning(name, found, fix)
        }
    })
}

/// Whether a worker can be asked, and one that listens answers.
pub(super) async fn check_control_socket(path: PathBuf) -> Check {
    let name = "control socket";
    let shown = path.display();
    let at = path.clone();
    // Both may block: one on a file system that hangs, the other where somebody listens and takes nobody in.
    let looking = tokio::task::spawn_blocking(move || {
        let about = std::fs::symlink_metadata(&at);
        let client = about.as_ref().is_ok_and(|about| about.file_type().is_socket()).then(|| ControlClient::new(&at));
        (about, client)
    });
    let (about, client) = match timeout(DOCTOR_CALL_TIMEOUT, looking).await {
        Ok(Ok(looked)) => looked,
        Ok(Err(error)) => return Check::failed(name, format!("{shown} could not be looked at: {error}"), ""),
        Err(_) => {
            let found = format!("{shown}: somebody listens there and takes no connection");
            return Check::failed(name, found, "end it, or let it go on; nothing can be told to it now");
        }
    };
    match about {
        Err(error) if error.kind() == ErrorKind::NotFound => Check::ok(name, format!("{shown} is free")),
        Err(error) => {
            Check::failed(name, format!("{shown}: {error}"), "set control.socket to a place this user may use")
        }
        Ok(_) => match client {
            None => Check::failed(
                name,
                format!("{shown} is there and no socket"),
                "remove it, or set control.socket to another place",
            ),
            Some(Err(Error::NotRunning(_))) => {
                Check::ok(name, format!("{shown} is what an earlier worker left; the next one replaces it"))
            }
            Some(Err(error)) => Check::warning(name, error.to_string(), "ask as root, or as the worker's user"),
            Some(Ok(client)) => match client.status().await {
                Ok(status) => {
                    let pid = status.pid;
                    Check::ok(name, format!("a worker answers at {shown}, process {pid}; `journeyman status` shows it"))
                }
                Err(error) => {
                    Check::failed(name, error.to_string(), "end it, or let it go on; nothing can be told to it now")
                }
            },
        },
    }
}

/// Whether the metadata service that the configuration expects is there.
pub(super) async fn check_cloud(host: Host) -> Vec<Check> {
    let name = "cloud";
    if host.metadata_service == MetadataService::Off {
        return vec![Check::ok(name, "no metadata service is asked (host.metadata_service = \"off\")")];
    }
    let wanted = match termination_watch::watch_config(&host) {
        termination_notice::NoticeConfig { cloud: termination_notice::MetadataProvider::Fixed(provider), .. } => {
            Some(provider)
        }
        termination_notice::NoticeConfig { .. } => None,
    };
    let watch = match termination_notice::NoticeWatch::new(termination_watch::watch_config(&host)) {
        Ok(watch) => watch,
        Err(error) => {
            return vec![Check::failed(name, format!("host.metadata_endpoint: {error}"), "name an http:// address")];
        }
    };
    let there = watch.responding_providers().await;
    let shown = |provider| termination_notice::NoticeOrigin::Cloud(provider).as_str();
    vec![match (wanted, there.as_slice()) {
        (Some(wanted), there) if there.contains(&wanted) => {
            Check::ok(name, format!("the metadata service of {} answers", shown(wanted)))
        }
        (Some(wanted), _) => Check::failed(
            name,
            format!("the metadata service of {} does not answer, so no notice will be heard", shown(wanted)),
            "is this such a host, and in a container on EC2 is the hop limit 2? Otherwise set host.metadata_service",
        ),
        (None, [provider, ..]) => Check::ok(name, format!("the metadata service of {} answers", shown(*provider))),
        (None, []) => Check::ok(
            name,
            "no metadata service answers, so this is no cloud's host; host.metadata_service = \"off\" spares the search",
        ),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_group_is_a_folder_or_none() {
        assert!(own_cgroup().is_none_or(|own| own.is_dir()));
    }

    #[test]
    fn capacity_asks_for_open_files() {
        let mut config = Config::default();
        config.worker.capacity = u16::MAX;
        assert!(check_open_files(&config).found.contains("are enough for capacity 65535"));
    }
}
