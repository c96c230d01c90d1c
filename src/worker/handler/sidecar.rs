//! Sidecars: long-running processes of a handler that live as long as the worker, such as a service for its tasks.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::watch;

use super::HandlerFuture;
use super::context::{Cancellation, Context};
use super::log::{LogLimits, TaskLog};
use journeyman_domain::journal::EntryId;
use journeyman_domain::limits::SERVICE_LOG_BYTES_MAX;
use journeyman_platform::host::clock::Clock;
use journeyman_platform::host::containment::Containment;
use journeyman_platform::host::journal::{FirstRecord, Journal, ProcessRecorder};
use journeyman_platform::host::work_dir;

pub use journeyman_domain::service_supervisor::ServiceAvailability;

/// A long-running part of a handler.
#[expect(missing_debug_implementations, reason = "it is a closure")]
pub struct Sidecar {
    /// A valid file name.
    pub name: String,
    /// Runs it until [`SidecarContext::stop_requested`] resolves.
    pub run: Box<dyn FnOnce(SidecarContext) -> HandlerFuture<'static, ()> + Send>,
}

/// The status of a sidecar.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SidecarStatus {
    /// The worker may claim tasks for the handler, or not yet.
    pub availability: ServiceAvailability,
    /// What the sidecar does or why it is down, for `journeyman status`. Must contain no secrets.
    pub message: String,
    /// How often it was restarted.
    pub restart_count: u64,
    /// The path of its log, if it has one.
    pub log_path: Option<PathBuf>,
}

impl Default for SidecarStatus {
    fn default() -> Self {
        Self {
            availability: ServiceAvailability::Down,
            message: "starting".to_owned(),
            restart_count: 0,
            log_path: None,
        }
    }
}

/// What the worker provides to a sidecar.
#[derive(Debug)]
pub struct SidecarContext {
    folder: PathBuf,
    clock: Clock,
    containment: Containment,
    journal: Option<(Journal, EntryId)>,
    status: watch::Sender<SidecarStatus>,
    stop: watch::Receiver<bool>,
}

/// The worker's side of a [`SidecarContext`].
#[derive(Debug)]
pub struct SidecarHandle {
    /// The status of the sidecar; closed after it has ended.
    pub status: watch::Receiver<SidecarStatus>,
    /// Set to `true` to stop the sidecar.
    pub stop: watch::Sender<bool>,
}

impl SidecarContext {
    /// Creates a context and its handle. `folder` need not exist.
    pub fn channel(folder: PathBuf, clock: Clock, containment: Containment) -> (Self, SidecarHandle) {
        let (status, status_receiver) = watch::channel(SidecarStatus::default());
        let (stop_sender, stop) = watch::channel(false);
        let handle = SidecarHandle { status: status_receiver, stop: stop_sender };
        (Self { folder, clock, containment, journal: None, status, stop }, handle)
    }

    /// Journals the processes of the sidecar under `entry`.
    pub(crate) fn journaled(self, journal: Journal, entry: EntryId) -> Self {
        Self { journal: Some((journal, entry)), ..self }
    }

    /// Returns the worker's clock.
    pub const fn clock(&self) -> Clock {
        self.clock
    }

    /// Returns the path of the log of a process. The log of the previous process has the suffix `.previous`.
    pub fn log_path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.log"))
    }

    /// Sets the status, which decides whether the worker claims tasks for the handler.
    pub fn set_status(&self, status: SidecarStatus) {
        self.status.send_replace(status);
    }

    /// Resolves when the sidecar has to stop.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn stop_requested(&self) {
        let mut stop = self.stop.clone();
        // An error means that the worker's side is gone: stop then too.
        drop(stop.wait_for(|stop| *stop).await);
    }

    /// Prepares a process of the sidecar: a directory, a process scope and a log. If this worker is killed, the next one finds the process by
    /// the journal.
    ///
    /// # Errors
    ///
    /// Fails if the directory cannot be created.
    pub fn prepare_process(&self, name: &str) -> io::Result<SidecarProcess> {
        let folder = self.folder.join(name);
        work_dir::create_task_dir(&folder)?;
        let path = self.log_path(name);
        let mut previous = path.clone().into_os_string();
        previous.push(".previous");
        std::fs::rename(&path, previous).or_else(work_dir::ignore_missing)?;
        // I27: an unrecorded process would outlive a killed worker.
        let journal = self.journal.clone();
        let recorder = journal.map(|(journal, entry)| ProcessRecorder::new(journal, entry, FirstRecord::Sidecar));
        let scope = self.containment.new_recorded_scope(recorder);
        let log = TaskLog::new(path, LOG_LIMITS);
        let (context, cancel) =
            Context::without_claim("service", crate::task::Definition::default(), folder, log, self.clock)?;
        let context = context.in_scope(scope);
        Ok(SidecarProcess { context, cancel, journal: self.journal.clone() })
    }
}

const LOG_LIMITS: LogLimits =
    LogLimits { head_bytes: SERVICE_LOG_BYTES_MAX / 4 * 3, tail_bytes: SERVICE_LOG_BYTES_MAX / 4 };

/// A process of a sidecar.
#[derive(Debug)]
pub struct SidecarProcess {
    /// The context for [`RunningProcess`](super::process::RunningProcess).
    pub context: Context,
    cancel: watch::Sender<Option<Cancellation>>,
    journal: Option<(Journal, EntryId)>,
}

impl SidecarProcess {
    /// Sends SIGTERM, and SIGKILL after the grace.
    pub fn stop(&self, termination_grace: Duration, clock: Clock) {
        self.cancel.send_replace(Some(Cancellation::shutdown(termination_grace, clock)));
    }

    /// Closes its journal entry, after all its processes have ended.
    pub fn close_record(&self) {
        if let Some((journal, entry)) = &self.journal {
            journal.record_closed(*entry);
        }
    }
}
