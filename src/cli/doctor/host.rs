//! Checks this machine: work directory, memory, open files, control groups, control socket and metadata service.

use std::fs::File;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use rustix::fs::{StatVfsMountFlags, statvfs};
use rustix::process::{Resource, getrlimit};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::cli::checks::Check;
use crate::cli::exit::{Exit, Failure};
use crate::cli::termination_watch;
use crate::config::schema::Config;
use crate::control::WorkerStatusReply;
use crate::control::client::{ControlClient, Error};
use journeyman_domain::limits::{DOCTOR_CALL_TIMEOUT, TASK_OPEN_FILES, WORKER_OPEN_FILES, WORKER_OPEN_FILES_MIN};
use journeyman_domain::units::format_bytes;
use journeyman_platform::host::containment::{Requirement, own_cgroup_path};
use journeyman_platform::host::resources;
use journeyman_platform::host::termination_notice::{self, MetadataProvider};
use journeyman_platform::settings::values::Listen;
use journeyman_worker::engine::config::Host;

/// On a thread of its own, because a file system may hang.
pub(super) async fn check_host(config: Config) -> Vec<Check> {
    let checks = tokio::task::spawn_blocking(move || {
        let mut checks = check_work_dir(&config);
        checks.extend([check_memory(&config), check_open_files(&config), check_cgroups(&config.host)]);
        checks
    });
    checks.await.unwrap_or_else(|error| vec![Check::failed("host", format!("check failed: {error}"), "")])
}

fn check_work_dir(config: &Config) -> Vec<Check> {
    let (name, wanted) = ("work directory", &config.worker.work_dir.0);
    let shown = wanted.display();
    let fix = "make the user of the worker its owner (`chown journeyman`), or change worker.work_dir";
    let (existing, (cannot, can)) = match nearest_existing(wanted) {
        dir if dir == wanted => (dir, ("is not writable", "is writable")),
        dir => (dir, ("cannot be created", "will be created")),
    };
    let (statvfs, written) = (statvfs(existing), probe_writable(existing));
    let volume = match written.and_then(|()| Ok(statvfs?)) {
        Ok(volume) => volume,
        Err(error) => return vec![Check::failed(name, format!("{shown} {cannot}: {error}"), fix)],
    };
    let dir = if volume.f_flag.contains(StatVfsMountFlags::NOEXEC) {
        let fix = "mount it without `noexec`, or change worker.work_dir";
        Check::failed(name, format!("{shown} {can}, but is mounted noexec"), fix)
    } else {
        Check::ok(name, format!("{shown} {can}"))
    };
    let free = volume.f_bavail.saturating_mul(volume.f_frsize);
    vec![dir, check_minimum("disk", free, config.host.min_free_disk.0)]
}

fn check_minimum(resource: &str, free: u64, minimum: u64) -> Check {
    let key = format!("host.min_free_{resource}");
    let found = format!("{} free, {key} is {}", format_bytes(free), format_bytes(minimum));
    if free < minimum {
        let fix = format!("the worker claims nothing until more is free; free some, or change {key}");
        Check::failed(resource, found, fix)
    } else {
        Check::ok(resource, found)
    }
}

/// The directory or its nearest existing parent.
fn nearest_existing(wanted: &Path) -> &Path {
    let existing = wanted.ancestors().filter(|dir| !dir.as_os_str().is_empty()).find(|dir| dir.exists());
    existing.unwrap_or_else(|| Path::new("."))
}

/// Creates and removes an empty file.
fn probe_writable(folder: &Path) -> std::io::Result<()> {
    let probe = folder.join(format!(".journeyman-doctor-{}", std::process::id()));
    File::create_new(&probe)?;
    std::fs::remove_file(&probe)
}

fn check_memory(config: &Config) -> Check {
    match resources::measure(Path::new("/")).memory {
        Some(free) => check_minimum("memory", free, config.host.min_free_memory.0),
        None => Check::warning("memory", "unknown: no MemAvailable in /proc/meminfo", "is /proc mounted?"),
    }
}

fn check_open_files(config: &Config) -> Check {
    let name = "open files";
    match open_files_warning(config) {
        Ok(None) => Check::ok(name, format!("enough for capacity {}", config.worker.capacity)),
        Ok(Some(warning)) => Check::warning(name, warning, ""),
        Err(failure) => Check::failed(name, failure.message, ""),
    }
}

/// A warning if the limit of open files is too low for the capacity, an error if too low for a worker without tasks.
pub(in crate::cli) fn open_files_warning(config: &Config) -> Result<Option<String>, Failure> {
    let capacity = config.worker.capacity;
    let needed = WORKER_OPEN_FILES + TASK_OPEN_FILES * u64::from(capacity);
    let Some(limit) = getrlimit(Resource::Nofile).current.filter(|limit| *limit < needed) else { return Ok(None) };
    let text = format!(
        "the limit of open files is {limit}, capacity {capacity} may need {needed}: raise it by LimitNOFILE= in a systemd unit \
         (set in the packaged units), else by `ulimit -n`"
    );
    if limit < WORKER_OPEN_FILES_MIN { Err(Failure::new(Exit::HostUnusable, text)) } else { Ok(Some(text)) }
}

/// Without moving a process; the worker itself tries it at start.
fn check_cgroups(host: &Host) -> Check {
    let own = own_cgroup_path().ok().filter(|own| own.exists());
    let missing = match &own {
        None => "no cgroup v2; payloads would run in process groups instead".to_owned(),
        Some(own) if rustix::fs::access(own, rustix::fs::Access::WRITE_OK).is_err() => {
            format!("{} is not writable; payloads would run in process groups instead", own.display())
        }
        Some(own) => {
            let available = std::fs::read_to_string(own.join("cgroup.controllers")).unwrap_or_default();
            let limits = [("memory", host.task_memory.is_some()), ("pids", host.task_pids.is_some())];
            let is_missing = |name: &str| !available.split_ascii_whitespace().any(|available| available == name);
            let missing = limits.into_iter().filter(|(name, is_set)| *is_set && is_missing(name)).map(|(name, _)| name);
            match missing.collect::<Vec<_>>().join(" and ") {
                missing if missing.is_empty() => return Check::ok("control groups", "cgroup v2, writable"),
                missing => format!("no controller for {missing}: the limit cannot be enforced"),
            }
        }
    };
    let fix =
        "under systemd set Delegate=yes (set in the packaged units), in a container mount /sys/fs/cgroup writable";
    if host.containment == Requirement::Cgroup {
        Check::failed("control groups", missing, fix)
    } else {
        Check::warning("control groups", missing, fix)
    }
}

/// Each address stays bound until all have been tried, so that two keys with the same one are found.
pub(super) async fn check_listeners(config: &Config, socket: Option<PathBuf>) -> Vec<Check> {
    let is_running = match socket {
        Some(socket) => UnixStream::connect(socket).await.is_ok(),
        None => false,
    };
    let (mut bound, mut checks) = (Vec::new(), Vec::new());
    for (key, listen) in [("http.listen", config.http.listen), ("worker.live_log", config.worker.live_log)] {
        let Some(Listen(address)) = listen else { continue };
        checks.push(match TcpListener::bind(address) {
            Ok(listener) => {
                bound.push(listener);
                Check::ok(key, format!("{address} is free"))
            }
            Err(error) if is_running && error.kind() == ErrorKind::AddrInUse => {
                Check::ok(key, format!("{address} is in use; the process of this configuration is running"))
            }
            Err(error) => {
                let fix = format!("stop the program that has it (`ss -ltnp` shows it), or change {key}");
                Check::failed(key, format!("cannot listen on {address}: {error}"), fix)
            }
        });
    }
    checks
}

pub(super) async fn check_control_socket(path: PathBuf) -> Vec<Check> {
    let (name, shown) = ("control socket", path.display().to_string());
    let hangs = "it hangs or is stopped; continue or kill it";
    // Connecting blocks while the listener accepts no connection.
    let client = tokio::task::spawn_blocking(move || ControlClient::new(&path));
    let Ok(Ok(client)) = timeout(DOCTOR_CALL_TIMEOUT, client).await else {
        return vec![Check::failed(name, format!("{shown}: the listening process accepts no connection"), hangs)];
    };
    vec![match client {
        Err(Error::NotRunning(_)) => Check::ok(name, format!("{shown} is free")),
        Err(error) => Check::warning(name, error.to_string(), "run doctor as root or as the user of the worker"),
        Ok(client) => match client.status().await {
            Ok(status) => return check_running_worker(&status, &shown),
            Err(error) => Check::failed(name, error.to_string(), hangs),
        },
    }]
}

/// What only a worker that runs tasks can find.
fn check_running_worker(status: &WorkerStatusReply, socket: &str) -> Vec<Check> {
    let pid = status.pid;
    let mut checks = vec![Check::ok("control socket", format!("worker with pid {pid} responds at {socket}"))];
    for source in &status.snapshot.sources {
        if let Some(error) = &source.storage_error {
            let (name, seconds) = (format!("{}: artifact storage", source.name), error.seconds_ago);
            let found = format!("worker with pid {pid} cannot store artifacts since {seconds:.0} s: {}", error.message);
            let fix = "check the service that the message names; tasks wait for it before they are reported";
            checks.push(Check::failed(name, found, fix));
        }
    }
    checks
}

pub(super) async fn check_cloud(host: &Host) -> Vec<Check> {
    let name = "cloud";
    if host.metadata_service == MetadataProvider::Off {
        return vec![Check::ok(name, "not checked: host.metadata_service = \"off\"")];
    }
    let watch = match termination_notice::NoticeWatch::new(termination_watch::watch_config(host)) {
        Ok(watch) => watch,
        Err(error) => {
            return vec![Check::failed(name, format!("host.metadata_endpoint: {error}"), "name an http:// address")];
        }
    };
    let responding = watch.responding_providers().await;
    let wanted = host.metadata_service.origin();
    let found = responding.iter().find(|provider| wanted.is_none_or(|wanted| wanted == **provider));
    vec![match (found, wanted) {
        (Some(provider), _) => Check::ok(name, format!("the metadata service of {} responds", provider.as_str())),
        (None, Some(wanted)) => Check::failed(
            name,
            format!("the metadata service of {} does not respond, so termination notices are missed", wanted.as_str()),
            "change host.metadata_service if this host is elsewhere; in a container on EC2 set the hop limit to 2",
        ),
        (None, None) => {
            Check::ok(name, "no metadata service responds; host.metadata_service = \"off\" skips the search")
        }
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::checks::State;
    use serde_json::json;

    #[test]
    fn b5_an_outage_of_the_artifact_storage_that_a_worker_reports_is_a_failed_check() {
        let source = |storage_error: serde_json::Value| json!({"name": "ci", "description": "", "state": "polling", "failing": false, "storage_error": storage_error});
        let status = |source| -> WorkerStatusReply {
            let hour = journeyman_worker::engine::counters::OutcomeCounts::default();
            let counts = journeyman_worker::engine::counters::WorkerCounts::default();
            let status = json!({
                "version": "1", "id": "w", "group": "g", "pid": 7, "state": "running", "uptime_seconds": 1.0, "capacity": 1,
                "sources": [source], "claims": [], "last_hour": hour, "counts": counts,
                "host": journeyman_worker::engine::status::HostStatus::default(), "hints": [],
            });
            serde_json::from_value(status).unwrap()
        };
        let error = json!({"message": "500: disk full", "seconds_ago": 35.0, "consecutive": 3});
        let checks = check_running_worker(&status(source(error)), "s");
        assert_eq!((checks.len(), checks[1].state, &*checks[1].name), (2, State::Failed, "ci: artifact storage"));
        assert!(checks[1].result.contains("since 35 s: 500: disk full"), "{}", checks[1].result);
        assert_eq!(check_running_worker(&status(source(json!(null))), "s").len(), 1);
    }
}
