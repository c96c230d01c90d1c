//! What a handler is told of its task, and what it may do while it runs.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tokio::sync::watch;

use crate::domain::id::Run;
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::host::containment::ProcessScope;
use crate::host::spare::Spares;
use crate::host::work_dir;
use crate::limits::PROGRESS_CHARS_MAX;

use crate::source::{CallError, Reply, ReplyError, Results};

use super::artifact::Artifacts;
use super::log::TaskLog;

/// The task as a handler sees it.
#[derive(Debug, Clone)]
pub struct TaskInfo {
    /// Task and attempt.
    pub run: Run,
    /// The name of the source in the configuration.
    pub source: String,
    /// The whole definition as its creator wrote it, payload included.
    pub definition: serde_json::Value,
    /// What a payload process finds in its environment on top of what the handler adds: `TASK_ID`, `RUN_ID` and the like.
    pub env: BTreeMap<String, String>,
}

/// Why a payload has to end early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CancelCause {
    /// The claim is no longer ours: canceled, resolved elsewhere, or the lease ran out. Nothing will be reported.
    ClaimLost,
    /// The worker has to go. `worker-shutdown` will be reported.
    Shutdown,
    /// Those who run the worker hand this one task back. `worker-shutdown` will be reported.
    Released,
    /// Those who run the worker canceled this one task. `internal-error` will be reported.
    Canceled,
}

/// The order to end early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cancellation {
    /// Why.
    pub cause: CancelCause,
    /// When what is left is killed, on the worker's clock.
    pub deadline: Instant,
    /// How long that is from when the order was given.
    pub termination_grace: std::time::Duration,
}

/// What a handler is given with a payload. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Context {
    inner: Arc<ContextInner>,
    scope: ProcessScope,
    spares: Option<Spares>,
    results: Option<Results>,
    payload_error: Option<Arc<str>>,
}

#[derive(Debug)]
struct ContextInner {
    task: TaskInfo,
    workdir: PathBuf,
    /// How making it went; empty until somebody asked for it.
    workdir_result: OnceLock<io::Result<()>>,
    log: TaskLog,
    artifacts: Artifacts,
    progress: Mutex<Option<String>>,
    cancel: watch::Receiver<Option<Cancellation>>,
    expires_at: watch::Receiver<Instant>,
    clock: Clock,
}

impl Context {
    /// Puts a context together. `workdir` is made when it is first asked for. The senders stay with whoever runs the
    /// handler.
    #[must_use]
    pub fn new(
        task: TaskInfo,
        workdir: PathBuf,
        log: TaskLog,
        artifacts: Artifacts,
        cancel: watch::Receiver<Option<Cancellation>>,
        lease_ends: watch::Receiver<Instant>,
        clock: Clock,
    ) -> Self {
        Self {
            inner: Arc::new(ContextInner {
                task,
                workdir,
                workdir_result: OnceLock::new(),
                log,
                artifacts,
                progress: Mutex::default(),
                cancel,
                expires_at: lease_ends,
                clock,
            }),
            scope: ProcessScope::without_cookie(),
            spares: None,
            results: None,
            payload_error: None,
        }
    }

    /// The same with a folder that an earlier task had, if there is one.
    pub(crate) fn of_spares(self, spares: Spares) -> Self {
        Self { spares: Some(spares), ..self }
    }

    /// Takes away what a task that is over has left on the disk, if there is anything; a folder that it has left empty, and
    /// a log file, are kept for later tasks. Blocks for as long as the disk takes. What is there by now if the worker has lost
    /// its work folder is another worker's, and stays.
    ///
    /// # Errors
    ///
    /// The last one of the file system. Whatever could be taken away is gone.
    pub(crate) fn clean_up(self) -> io::Result<()> {
        if self.spares.as_ref().is_some_and(Spares::lost) {
            return Ok(());
        }
        let folder = match (self.workdir_result(), &self.spares) {
            (None, _) => Ok(()),
            // Who still holds this may still write to the folder; so may processes that were not seen to end.
            (Some(_), Some(spares)) if self.scope.is_seen_empty() && Arc::strong_count(&self.inner) == 1 => {
                spares.keep_folder(&self.inner.workdir)
            }
            (Some(_), _) => work_dir::remove_tree(&self.inner.workdir),
        };
        let log = if self.log().is_empty() { Ok(()) } else { self.log().leave() };
        folder.and(log)
    }

    /// The same with an enclosure around the task's processes.
    #[must_use]
    pub fn in_scope(self, enclosure: ProcessScope) -> Self {
        Self { scope: enclosure, ..self }
    }

    /// The same for a request, whose author waits for answers.
    #[must_use]
    pub fn with_results(self, replies: Option<Results>) -> Self {
        Self { results: replies, ..self }
    }

    /// The same for a task whose payload cannot be read, with why.
    pub(crate) fn with_payload_error(self, why: Option<String>) -> Self {
        Self { payload_error: why.map(Into::into), ..self }
    }

    /// Why the payload cannot be read, where it cannot.
    pub(crate) fn payload_error(&self) -> Option<&str> {
        self.payload_error.as_deref()
    }

    /// Where answers go; `None` where nobody waits for any.
    #[must_use]
    pub const fn results(&self) -> Option<&Results> {
        self.results.as_ref()
    }

    /// Sets the answer to a request, which is sent when the payload has ended well; one with another status than `ok` also
    /// when it has not. A later one replaces it. Without one the answer is `null`, or an error. Does nothing for a task that is
    /// no request.
    ///
    /// # Errors
    ///
    /// Where it is too large to be sent; what was set before stays.
    pub fn set_reply(&self, reply: Reply) -> Result<(), ReplyError> {
        self.results.as_ref().map_or(Ok(()), |replies| replies.set_final(reply))
    }

    /// Sends a partial answer to a request at once, and returns when it is on its way for sure. Does nothing for a task that is
    /// no request.
    ///
    /// # Errors
    ///
    /// [`Gone`](crate::domain::refusal::Refusal::Gone) where nobody waits for it any more: whoever answers a stream may stop
    /// then. Others may be tried again.
    pub async fn send_partial_reply(&self, reply: Reply) -> Result<(), CallError> {
        match &self.results {
            Some(replies) => replies.send_partial(reply).await,
            None => Ok(()),
        }
    }

    /// The task.
    #[must_use]
    pub fn task(&self) -> &TaskInfo {
        &self.inner.task
    }

    /// The task's own folder. It is empty at the start, and removed at the end.
    ///
    /// It is made by the first call, so that a handler without files costs the disk nothing. Where it cannot be made the
    /// task is handed back, whatever its handler says.
    #[must_use]
    pub fn workdir(&self) -> &Path {
        self.inner.workdir_result.get_or_init(|| match &self.spares {
            Some(spares) => spares.folder(&self.inner.workdir),
            None => work_dir::create_task_dir(&self.inner.workdir),
        });
        &self.inner.workdir
    }

    /// What is around the processes of the task. Unless somebody said otherwise, nothing but their process groups.
    #[must_use]
    pub const fn scope(&self) -> &ProcessScope {
        &self.scope
    }

    /// How making the folder went; `None` where nobody asked for it.
    pub(crate) fn workdir_result(&self) -> Option<&io::Result<()>> {
        self.inner.workdir_result.get()
    }

    /// The task's log.
    #[must_use]
    pub fn log(&self) -> &TaskLog {
        &self.inner.log
    }

    /// What the task leaves behind; uploaded by the runtime when the payload has ended.
    #[must_use]
    pub fn artifacts(&self) -> &Artifacts {
        &self.inner.artifacts
    }

    /// Says how far the task is, for those who look at the worker. Cut at [`PROGRESS_CHARS_MAX`].
    pub fn set_progress(&self, text: &str) {
        let text: String = text.chars().filter(|char| !char.is_control()).take(PROGRESS_CHARS_MAX).collect();
        *self.inner.progress.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
    }

    /// What was said last of how far the task is.
    #[must_use]
    pub fn progress(&self) -> Option<String> {
        self.inner.progress.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// When the claim runs out if it is not extended, on the worker's clock.
    #[must_use]
    pub fn expires_at(&self) -> Instant {
        *self.inner.expires_at.borrow()
    }

    /// How long it is until `then`; zero where that has passed.
    #[must_use]
    pub fn time_until(&self, then: Instant) -> std::time::Duration {
        then.since(self.inner.clock.now())
    }

    /// The time on the worker's clock.
    pub(crate) fn now(&self) -> Instant {
        self.inner.clock.now()
    }

    /// As [`Context::expires_at`], to wait for its changes.
    #[must_use]
    pub fn watch_expires_at(&self) -> watch::Receiver<Instant> {
        self.inner.expires_at.clone()
    }

    /// The order to end early, if it was given.
    #[must_use]
    pub fn cancellation(&self) -> Option<Cancellation> {
        *self.inner.cancel.borrow()
    }

    /// Resolves when what is left of the payload is to be killed: at the deadline of the order to end early, which a
    /// later order may bring forward. Never, if no order is given.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn kill_due(&self) {
        let mut orders = self.inner.cancel.clone();
        loop {
            let order = *orders.borrow_and_update();
            let due = async {
                match order {
                    Some(order) => self.inner.clock.sleep_until(order.deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = due => return,
                changed = orders.changed() => if changed.is_err() {
                    // Nobody is left to bring it forward.
                    match order {
                        Some(order) => return self.inner.clock.sleep_until(order.deadline).await,
                        None => std::future::pending::<()>().await,
                    }
                },
            }
        }
    }

    /// Resolves when the order to end early is given; never, if it is not.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn canceled(&self) -> Cancellation {
        let mut cancel = self.inner.cancel.clone();
        loop {
            if let Some(order) = *cancel.borrow_and_update() {
                return order;
            }
            if cancel.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}
