//! The sections of the worker and of its host.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use crate::handler::config::termination_grace;
use journeyman_domain::limits::{LAUNCHED_DEFAULT, LAUNCHED_MAX, STATUS_POLL_MIN_MS};
use journeyman_platform::host::containment::Requirement;
use journeyman_platform::host::termination_notice::MetadataProvider;
use journeyman_platform::settings::rules::Rules;
use journeyman_platform::settings::values::{
    File, Listen, OptionalSpan, Size, Span, Url, WorkerName, built_in, whole_number,
};

/// This worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Worker {
    /// Worker id, unique within the group. `{hostname}` and `{pid}` are replaced. At most 38 characters, 22 with `dialect = "azure"`.
    pub id: WorkerName,
    /// Worker group, often a region. At most 38 characters, 22 with `dialect = "azure"`.
    pub group: WorkerName,
    /// Maximum number of tasks that run at once.
    #[cfg_attr(debug_assertions, schemars(range(min = 1, max = 16384)))]
    #[serde(deserialize_with = "whole_number::<_, _, 1, CAPACITY_MAX>")]
    pub capacity: u16,
    /// Maximum number of tasks beside these whose work runs elsewhere.
    #[cfg_attr(debug_assertions, schemars(range(max = 100_000)))]
    #[serde(deserialize_with = "whole_number::<_, _, 0, { LAUNCHED_MAX as i64 }>")]
    pub launched_max: u32,
    /// Directory for the files of running tasks. Two workers cannot share one.
    pub work_dir: File,
    /// How long running tasks may continue after the first TERM or INT before their claims are released.
    pub drain_deadline: Span,
    /// Time between SIGTERM and SIGKILL for a task that is stopped, and for the service of a handler. SIGKILL follows 0.5 s before its end, or a quarter before it if that is less, so that the exit is observed in time.
    pub termination_grace: Span,
    /// Pause between polls of an Azure-style queue without a task, up to a fifth shorter by jitter. Other queues hold a poll until there is a task.
    pub poll_interval: Span,
    /// How often the status of each running task is checked for cancellation. `0s` disables it.
    pub status_poll_interval: OptionalSpan<STATUS_POLL_MIN_MS>,
    /// Address that serves the logs of running tasks, each under a secret path, which the artifact `public/logs/live.log` leads to until the task ends [built-in: none]. With port 0 the system chooses a port.
    pub live_log: Option<Listen>,
    /// How readers reach `live_log`, such as the URL of a proxy in front of it [built-in: `http://` and the address of `live_log`].
    pub live_log_url: Option<Url>,
    /// Exit after this time without a claim; `0s` is never. Time in which the worker is paused does not count.
    pub exit_when_idle: OptionalSpan,
    /// Exit after this many tasks; 0 is never.
    pub max_tasks: u32,
    /// Drain and exit after this time; `0s` is never.
    pub max_uptime: OptionalSpan,
    /// The exit codes of `worker`, `bridge` and `run`: their own, or those of Taskcluster's generic-worker.
    pub exit_codes: ExitCodes,
}

/// The exit codes of a worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum ExitCodes {
    /// Its own.
    #[default]
    Journeyman,
    /// Those of generic-worker.
    GenericWorker,
}

impl Default for Worker {
    fn default() -> Self {
        Self {
            id: built_in("{hostname}"),
            group: built_in("journeyman"),
            capacity: 1,
            launched_max: LAUNCHED_DEFAULT,
            work_dir: built_in("/var/lib/journeyman/work"),
            drain_deadline: built_in("1h"),
            termination_grace: termination_grace(),
            poll_interval: built_in("1s"),
            status_poll_interval: built_in("10s"),
            live_log: None,
            live_log_url: None,
            exit_when_idle: OptionalSpan(None),
            max_tasks: 0,
            max_uptime: OptionalSpan(None),
            exit_codes: ExitCodes::default(),
        }
    }
}

/// The host that the worker runs on.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Host {
    /// Metadata service that announces the termination of a spot or preemptible host. `auto` tries all three at the start, and stops after 5 s without an answer.
    pub metadata_service: MetadataProvider,
    /// What happens to running tasks on a termination notice. With `finish` they are released 15 s before the termination, or earlier if `termination_grace` and the reports need more. Tasks that have not started are released at once.
    pub on_termination_notice: OnTerminationNotice,
    /// File that announces a termination by an RFC 3339 time. Any other content means that the host terminates now. The file need not exist.
    pub termination_file: Option<File>,
    /// URL of the metadata service if it is not `http://169.254.169.254`; `http://[fd00:ec2::254]` on EC2 without IPv4.
    pub metadata_endpoint: Option<Url>,
    /// Stop claiming below this free disk space in `worker.work_dir`. Tasks of a poll in flight are released, which costs them a retry.
    pub min_free_disk: Size,
    /// Stop claiming below this available memory. Tasks of a poll in flight are released, which costs them a retry.
    pub min_free_memory: Size,
    /// How the processes of a task are contained.
    pub containment: Requirement,
    /// Memory limit of all processes of a task. Needs control groups with the memory controller.
    pub task_memory: Option<Size>,
    /// Limit of processes and threads of a task. Needs control groups with the pids controller.
    pub task_pids: Option<NonZeroU32>,
    /// Maximum size of a task's directory, checked every 5 s and at the task's end [built-in: 80 % of the disk that holds `worker.work_dir`].
    pub task_disk: Option<Size>,
    /// Users of this host that tasks run as, one for each slot: at least as many as `worker.capacity`. `journeyman setup users` creates some. Needs a worker that runs as root [built-in: tasks run as the worker's user].
    pub task_users: Vec<String>,
    /// Disk space that downloads for mounts may take. The least recently used are removed.
    pub download_cache: Size,
    /// Free disk space below which downloads, then caches with a name, are removed, the least recently used first.
    pub cache_free_disk: Size,
}

impl Default for Host {
    fn default() -> Self {
        Self {
            metadata_service: MetadataProvider::Auto,
            on_termination_notice: OnTerminationNotice::Finish,
            termination_file: None,
            metadata_endpoint: None,
            min_free_disk: built_in("512MiB"),
            min_free_memory: built_in("64MiB"),
            containment: Requirement::Auto,
            task_memory: None,
            task_pids: None,
            task_disk: None,
            task_users: Vec::new(),
            download_cache: built_in("20GiB"),
            cache_free_disk: built_in("2GiB"),
        }
    }
}

/// What happens to running tasks on a termination notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum OnTerminationNotice {
    /// They may finish while there is time.
    Finish,
    /// They are released at once.
    Release,
}

impl Worker {
    pub fn check(&self, rules: &mut Rules<'_>) {
        if let Some(listen) = self.live_log
            && self.live_log_url.is_none()
            && listen.0.ip().is_unspecified()
        {
            rules.error(
                "worker",
                "live_log",
                format!("readers of logs cannot connect to {}", listen.0),
                "set `live_log_url` to the URL that they can connect to, or one address",
            );
        }
    }
}

const CAPACITY_MAX: i64 = 16_384;
