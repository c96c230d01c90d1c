//! What a handler keeps there beside its tasks, for as long as its worker works: a service that they are forwarded to.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::artifact::Artifacts;
use super::context::{CancelCause, Cancellation, Context, TaskInfo};
use super::log::{LogLimits, TaskLog};
use crate::domain::id::{Run, TaskId};
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::host::containment::Containment;
use crate::host::service_record::ServiceRecord;
use crate::limits::SERVICE_LOG_BYTES_MAX;

pub use crate::domain::service_supervisor::ServiceAvailability;

/// What is known of what runs beside the tasks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SidecarStatus {
    /// Whether tasks can be forwarded.
    pub availability: ServiceAvailability,
    /// What it does, or why it is not there, for people. No secrets.
    pub message: String,
    /// How often it was started again.
    pub restart_count: u64,
    /// Where its log is, if it has one.
    pub log_path: Option<PathBuf>,
}

impl Default for SidecarStatus {
    fn default() -> Self {
        Self {
            availability: ServiceAvailability::Down,
            message: "it is being started".to_owned(),
            restart_count: 0,
            log_path: None,
        }
    }
}

/// What the worker lends to a handler that keeps something there beside its tasks.
#[derive(Debug)]
pub struct SidecarContext {
    folder: PathBuf,
    clock: Clock,
    containment: Containment,
    status: watch::Sender<SidecarStatus>,
    stop: watch::Receiver<bool>,
}

/// The other side of a [`SidecarContext`].
#[derive(Debug)]
pub struct SidecarHandle {
    /// What is said of it. Closed when it has ended.
    pub status: watch::Receiver<SidecarStatus>,
    /// Set to end it.
    pub stop: watch::Sender<bool>,
}

impl SidecarContext {
    /// Lends what is needed, and the folder `folder`, which need not exist.
    #[must_use]
    pub fn channel(folder: PathBuf, clock: Clock, containment: Containment) -> (Self, SidecarHandle) {
        let (word, heard) = watch::channel(SidecarStatus::default());
        let (over, told) = watch::channel(false);
        (Self { folder, clock, containment, status: word, stop: told }, SidecarHandle { status: heard, stop: over })
    }

    /// The worker's clock.
    #[must_use]
    pub const fn clock(&self) -> Clock {
        self.clock
    }

    /// A folder of its own, which this makes where it is missing.
    ///
    /// # Errors
    ///
    /// Where it cannot be made.
    pub fn folder(&self, name: &str) -> io::Result<PathBuf> {
        let folder = self.folder.join(name);
        crate::host::work_dir::create_task_dir(&folder)?;
        Ok(folder)
    }

    /// Where the log of what runs under this name is. That of the life before has `.before` at its end.
    #[must_use]
    pub fn log_path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.log"))
    }

    /// Says how it is, and so whether tasks may be claimed.
    pub fn set_status(&self, word: SidecarStatus) {
        self.status.send_if_modified(|last| {
            let news = *last != word;
            *last = word;
            news
        });
    }

    /// Resolves when the worker goes, and what runs has to end.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn stop_requested(&self) {
        let mut over = self.stop.clone();
        // Where nobody is left to say so, it is over as well.
        drop(over.wait_for(|over| *over).await);
    }

    /// What a process is started with that is to run beside the tasks: an enclosure, a log and an end of its own. It is
    /// written down by what it is found again, should this worker be killed.
    ///
    /// # Errors
    ///
    /// Where that cannot be written down, or the folder cannot be made.
    pub fn prepare_process(&self, name: &str) -> io::Result<SidecarProcess> {
        let folder = self.folder(name)?;
        let path = self.log_path(name);
        let mut before = path.clone().into_os_string();
        before.push(".before");
        match std::fs::rename(&path, before) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let enclosure = self.containment.new_scope();
        // I27: what nobody has written down would outlive this worker.
        let remains = Arc::new(ServiceRecord::create(&self.folder, name, enclosure.name())?);
        let witness = Arc::clone(&remains);
        let enclosure = enclosure.on_leader(move |leader| witness.record_leader(leader));
        let task = TaskId::parse("service").ok_or_else(|| io::Error::other("the service has no valid name"))?;
        let task = TaskInfo {
            run: Run { task, run: 0 },
            source: String::new(),
            definition: serde_json::Value::Null,
            env: BTreeMap::new(),
        };
        let (cancel, orders) = watch::channel(None);
        // No claim is behind it, and so no lease.
        let (_, lease) = watch::channel(Instant::ORIGIN);
        let log = TaskLog::new(path, LOG_LIMITS);
        let context = Context::new(task, folder, log, Artifacts::new(), orders, lease, self.clock).in_scope(enclosure);
        Ok(SidecarProcess { context, cancel, record: remains })
    }
}

const LOG_LIMITS: LogLimits =
    LogLimits { head_bytes: SERVICE_LOG_BYTES_MAX / 4 * 3, tail_bytes: SERVICE_LOG_BYTES_MAX / 4 };

/// One life of it.
#[derive(Debug)]
pub struct SidecarProcess {
    /// For [`process::Running`](super::process::RunningProcess).
    pub context: Context,
    cancel: watch::Sender<Option<Cancellation>>,
    record: Arc<ServiceRecord>,
}

impl SidecarProcess {
    /// Where it runs.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.context.workdir()
    }

    /// Tells it to end, and kills it when the grace is over.
    pub fn stop(&self, grace: Duration, clock: Clock) {
        let order =
            Cancellation { cause: CancelCause::Shutdown, deadline: clock.now().plus(grace), termination_grace: grace };
        self.cancel.send_replace(Some(order));
    }

    /// It has ended, and nothing of it is left.
    pub fn remove_record(&self) {
        self.record.remove();
    }
}
