//! Checks this machine: work directory, memory, open files, control groups, control socket and metadata service.

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
use crate::config::schema::{Config, Containment, Host};
use crate::control::client::{ControlClient, Error};
use crate::host::containment::own_cgroup;
use crate::host::resources;
use crate::host::termination_notice::{self, MetadataProvider};
use crate::limits::{
    DOCTOR_CALL_TIMEOUT, DOCTOR_FREE_INODES_MIN, TASK_OPEN_FILES, WORKER_OPEN_FILES, WORKER_OPEN_FILES_MIN,
};
use crate::worker::snapshot::format_bytes;

/// May block on a file system.
pub(super) fn check_host(config: &Config) -> Vec<Check> {
    let mut checks = check_work_dir(config);
    checks.extend([check_memory(config), check_open_files(config), check_cgroups(&config.host)]);
    checks.extend(check_task_limits(&config.host));
    checks
}

fn check_work_dir(config: &Config) -> Vec<Check> {
    let wanted = &config.worker.work_dir.0;
    let name = "work directory";
    let Some(there) = nearest_existing(wanted) else {
        return vec![Check::failed(
            name,
            format!("{} has no existing parent", wanted.display()),
            "set worker.work_dir",
        )];
    };
    let shown = wanted.display();
    let fix = "make the user of the worker its owner (`chown journeyman`), or change worker.work_dir";
    if let Err(error) = probe_writable(there) {
        let what = if there == wanted { "is not writable" } else { "cannot be created" };
        return vec![Check::failed(name, format!("{shown} {what}: {error}"), fix)];
    }
    let mut checks = Vec::new();
    let about = match statvfs(there) {
        Ok(about) => about,
        Err(error) => return vec![Check::failed(name, format!("cannot check {shown}: {error}"), fix)],
    };
    let made = if there == wanted { "is writable" } else { "will be created" };
    checks.push(if about.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        let fix = "mount it without `noexec`, or change worker.work_dir";
        Check::failed(name, format!("{shown} {made}, but is mounted noexec"), fix)
    } else {
        Check::ok(name, format!("{shown} {made}"))
    });
    let (free, least) = (about.f_bavail.saturating_mul(about.f_frsize), config.host.min_free_disk.0);
    let found = format!("{} free, host.min_free_disk is {}", format_bytes(free), format_bytes(least));
    checks.push(if free < least {
        Check::failed(
            "disk",
            found,
            "the worker claims nothing until more is free; free some, or change host.min_free_disk",
        )
    } else {
        Check::ok("disk", found)
    });
    // 0 for file systems without a fixed number of inodes.
    if about.f_files > 0 {
        let found = format!("{} of {} free", about.f_favail, about.f_files);
        checks.push(if about.f_favail < DOCTOR_FREE_INODES_MIN {
            Check::warning(
                "inodes",
                found,
                "tasks with many files will fail; remove files, or use a larger file system",
            )
        } else {
            Check::ok("inodes", found)
        });
    }
    checks
}

/// The directory or its nearest existing parent.
fn nearest_existing(wanted: &Path) -> Option<&Path> {
    wanted.ancestors().map(|at| if at.as_os_str().is_empty() { Path::new(".") } else { at }).find(|at| at.exists())
}

/// For pools with the process driver.
pub(super) fn check_pool_dirs(config: &Config) -> Vec<Check> {
    let started = config.pool.iter().filter(|(_, pool)| !pool.command.is_empty());
    started
        .map(|(name, pool)| {
            let (part, folder) = (format!("{name}: state directory"), &pool.state_dir.0);
            let written = nearest_existing(folder).map_or_else(|| Err(ErrorKind::NotFound.into()), probe_writable);
            match written {
                Ok(()) => Check::ok(part, format!("{} is writable", folder.display())),
                Err(error) => Check::failed(
                    part,
                    format!("{} is not writable: {error}", folder.display()),
                    format!("make the user of the controller its owner, or change pool.{name}.state_dir"),
                ),
            }
        })
        .collect()
}

/// Creates and removes an empty file.
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
            format!("{} available, host.min_free_memory is {}", format_bytes(free), format_bytes(least)),
            "the worker claims nothing until more is free; stop other programs, or change host.min_free_memory",
        ),
        Some(free) => Check::ok(
            "memory",
            format!("{} available, host.min_free_memory is {}", format_bytes(free), format_bytes(least)),
        ),
        None => Check::warning("memory", "unknown: no MemAvailable in /proc/meminfo", "is /proc mounted?"),
    }
}

fn check_open_files(config: &Config) -> Check {
    let OpenFileLimit { limit: most, needed: enough } = OpenFileLimit::from_config(config);
    let capacity = config.worker.capacity;
    let found = |most: String| format!("limit {most}, capacity {capacity} needs {enough}");
    match most {
        Some(most) if most < WORKER_OPEN_FILES_MIN => Check::failed("open files", found(most.to_string()), RAISE_FILES),
        Some(most) if most < enough => Check::warning("open files", found(most.to_string()), RAISE_FILES),
        Some(most) => Check::ok("open files", found(most.to_string())),
        None => Check::ok("open files", found("none".to_owned())),
    }
}

const RAISE_FILES: &str =
    "raise the limit of the worker: LimitNOFILE= in a systemd unit (set in the packaged units), else `ulimit -n`";

struct OpenFileLimit {
    limit: Option<u64>,
    /// For the configured capacity.
    needed: u64,
}

impl OpenFileLimit {
    fn from_config(config: &Config) -> Self {
        let needed = WORKER_OPEN_FILES + TASK_OPEN_FILES * u64::from(config.worker.capacity);
        Self { limit: getrlimit(Resource::Nofile).current, needed }
    }
}

/// A warning if the limit of open files is too low for the capacity, an error if too low for a worker without tasks.
pub(in crate::cli) fn open_files_warning(config: &Config) -> Result<Option<String>, Failure> {
    let OpenFileLimit { limit: most, needed: enough } = OpenFileLimit::from_config(config);
    let Some(most) = most.filter(|most| *most < enough) else { return Ok(None) };
    let capacity = config.worker.capacity;
    let text = format!("the limit of open files is {most}, capacity {capacity} may need {enough}: {RAISE_FILES}");
    if most < WORKER_OPEN_FILES_MIN { Err(Failure::new(Exit::HostUnusable, text)) } else { Ok(Some(text)) }
}

/// Without moving a process; the worker itself tries it at start.
fn check_cgroups(host: &Host) -> Check {
    let name = "control groups";
    let demanded = host.containment == Containment::Cgroup;
    let fix =
        "under systemd set Delegate=yes (set in the packaged units), in a container mount /sys/fs/cgroup writable";
    let lacks = |found: String| {
        let found = format!("{found}; payloads would run in process groups instead");
        if demanded { Check::failed(name, found, fix) } else { Check::warning(name, found, fix) }
    };
    let Some(own) = own_cgroup() else {
        return lacks("no cgroup v2".to_owned());
    };
    match rustix::fs::access(&own, rustix::fs::Access::WRITE_OK) {
        Ok(()) => Check::ok(name, "cgroup v2, writable"),
        Err(_) => lacks(format!("{} is not writable for this user", own.display())),
    }
}

/// `None` if no limit is set.
fn check_task_limits(host: &Host) -> Option<Check> {
    let wanted = [("memory", host.task_memory.is_some()), ("pids", host.task_pids.is_some())];
    let wanted: Vec<&str> = wanted.into_iter().filter_map(|(name, wanted)| wanted.then_some(name)).collect();
    if wanted.is_empty() {
        return None;
    }
    let (name, shown) = ("task limits", wanted.join(" and "));
    let fix = "under systemd set Delegate=yes in the unit; else delegate the controllers to this group, or unset \
               host.task_memory and host.task_pids";
    let offered = own_cgroup().and_then(|own| std::fs::read_to_string(own.join("cgroup.controllers")).ok());
    let offered = offered.unwrap_or_default();
    let missing: Vec<&str> =
        wanted.into_iter().filter(|name| !offered.split_ascii_whitespace().any(|offer| offer == *name)).collect();
    Some(if missing.is_empty() {
        Check::ok(name, format!("controllers for {shown} are available"))
    } else {
        let found = format!("no controller for {}: the limit cannot be enforced", missing.join(" and "));
        if host.containment == Containment::Cgroup {
            Check::failed(name, found, fix)
        } else {
            Check::warning(name, found, fix)
        }
    })
}

pub(super) async fn check_control_socket(path: PathBuf) -> Check {
    let name = "control socket";
    let shown = path.display();
    let at = path.clone();
    // Both may block: on a file system that hangs, or on a listener that accepts no connection.
    let probing = tokio::task::spawn_blocking(move || {
        let about = std::fs::symlink_metadata(&at);
        let client = about.as_ref().is_ok_and(|about| about.file_type().is_socket()).then(|| ControlClient::new(&at));
        (about, client)
    });
    let (about, client) = match timeout(DOCTOR_CALL_TIMEOUT, probing).await {
        Ok(Ok(probed)) => probed,
        Ok(Err(error)) => return Check::failed(name, format!("cannot check {shown}: {error}"), ""),
        Err(_) => {
            let found = format!("{shown}: the listening process accepts no connection");
            return Check::failed(name, found, "it hangs or is stopped; continue or kill it");
        }
    };
    match about {
        Err(error) if error.kind() == ErrorKind::NotFound => Check::ok(name, format!("{shown} is free")),
        Err(error) => {
            Check::failed(name, format!("{shown}: {error}"), "set control.socket to a path that this user may access")
        }
        Ok(_) => match client {
            None => Check::failed(name, format!("{shown} is not a socket"), "remove it, or change control.socket"),
            Some(Err(Error::NotRunning(_))) => {
                Check::ok(name, format!("{shown} is left from a previous worker; the next one replaces it"))
            }
            Some(Err(error)) => {
                Check::warning(name, error.to_string(), "run doctor as root or as the user of the worker")
            }
            Some(Ok(client)) => match client.status().await {
                Ok(status) => {
                    let pid = status.pid;
                    Check::ok(name, format!("worker with pid {pid} responds at {shown}"))
                }
                Err(error) => Check::failed(name, error.to_string(), "it hangs or is stopped; continue or kill it"),
            },
        },
    }
}

pub(super) async fn check_cloud(host: Host) -> Vec<Check> {
    let name = "cloud";
    if host.metadata_service == MetadataProvider::Off {
        return vec![Check::ok(name, "not checked: host.metadata_service = \"off\"")];
    }
    let wanted = host.metadata_service.origin();
    let watch = match termination_notice::NoticeWatch::new(termination_watch::watch_config(&host)) {
        Ok(watch) => watch,
        Err(error) => {
            return vec![Check::failed(name, format!("host.metadata_endpoint: {error}"), "name an http:// address")];
        }
    };
    let there = watch.responding_providers().await;
    vec![match (wanted, there.as_slice()) {
        (Some(wanted), there) if there.contains(&wanted) => {
            Check::ok(name, format!("the metadata service of {} responds", wanted.as_str()))
        }
        (Some(wanted), _) => Check::failed(
            name,
            format!("the metadata service of {} does not respond, so termination notices are missed", wanted.as_str()),
            "change host.metadata_service if this host is elsewhere; in a container on EC2 set the hop limit to 2",
        ),
        (None, [provider, ..]) => Check::ok(name, format!("the metadata service of {} responds", provider.as_str())),
        (None, []) => Check::ok(name, "no metadata service responds; host.metadata_service = \"off\" skips the search"),
    }]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_cgroup_is_a_directory_if_there_is_one() {
        assert!(own_cgroup().is_none_or(|own| own.is_dir()));
    }

    #[test]
    fn the_capacity_determines_the_required_open_files() {
        let mut config = Config::default();
        config.worker.capacity = u16::MAX;
        assert!(check_open_files(&config).result.contains("capacity 65535 needs"));
    }
}
