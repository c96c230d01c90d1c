//! The context of a running task: its definition, task directory, log, artifacts, replies and cancellation.

use std::any::Any;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};

use crate::task::{ContentEncoding, Definition, Deployment, Reply, ReplyError, Results, cannot_pause};
use journeyman_domain::claim::CancelCause;
use journeyman_domain::id::{LocalToken, Run, TaskId};
use journeyman_domain::lease::{Granted, Lease};
use journeyman_domain::limits::{ARTIFACT_DEPTH_MAX, PROGRESS_CHARS_MAX};
use journeyman_domain::refusal::{CallError, Refusal};
use journeyman_domain::time::Instant;
use journeyman_domain::trace_context::TraceParent;
use journeyman_platform::host::caches::HeldCache;
use journeyman_platform::host::clock::{Clock, or_pending};
use journeyman_platform::host::containment::ProcessScope;
use journeyman_platform::host::remove_tree::{remove_all_but, remove_tree};
use journeyman_platform::host::task_user::TaskUser;
use journeyman_platform::host::work_dir::{self, WorkDirLock};
use journeyman_platform::redact;

use super::EndedWork;
use super::artifact::Artifacts;
use super::artifact_collector::ArtifactCollector;
use super::chain_of_trust::SigningKey;
use super::log::{BACKING_NAME, LIVE_NAME, LogLimits, TaskLog};

/// The lease that a handler sees without a claim.
const NO_LEASE: Duration = Duration::from_secs(20 * 60);

/// The task as a handler sees it.
#[derive(Debug, Clone)]
pub struct TaskInfo {
    /// The task and its run.
    pub run: Run,
    /// The name of the source in the configuration.
    pub source: String,
    /// The whole task definition, payload included.
    pub definition: Definition,
    /// Variables that the source adds to the environment of payload processes.
    pub env: Arc<BTreeMap<String, String>>,
    /// The trace that the payload continues, in `TRACEPARENT`.
    pub trace: Option<TraceParent>,
    /// How many of the task's first runs have an outcome that is final: what they have left elsewhere is not gone on with.
    pub reported_runs: u32,
}

/// A request to end the payload early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cancellation {
    /// Why the payload has to end.
    pub cause: CancelCause,
    /// The time at which the worker kills the payload, on the worker's clock.
    pub deadline: Instant,
    /// The time between the request and the deadline.
    pub termination_grace: Duration,
}

impl Cancellation {
    /// Ends a payload within its grace, for a shutdown.
    pub fn shutdown(termination_grace: Duration, clock: Clock) -> Self {
        Self { cause: CancelCause::Shutdown, deadline: clock.now().plus(termination_grace), termination_grace }
    }
}

/// The context in which a handler runs a payload. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Context {
    inner: Arc<ContextInner>,
    scope: ProcessScope,
    results: Option<Results>,
    deployment: Option<Arc<dyn Deployment>>,
    proxy_url: Option<Arc<str>>,
    user: Option<Arc<TaskUser>>,
}

#[derive(Debug)]
struct ContextInner {
    task: TaskInfo,
    /// Set, or named on first use: most requests have no files.
    files: OnceLock<TaskFiles>,
    names: Option<FileNames>,
    /// The result of creating the task directory; empty until the first use.
    workdir_result: OnceLock<io::Result<()>>,
    /// Held while files of the task are removed.
    removal: Mutex<()>,
    artifacts: OnceLock<Artifacts>,
    published_logs: Mutex<PublishedLogs>,
    progress: Mutex<Option<String>>,
    /// Why the task did not complete.
    failure_reason: OnceLock<String>,
    signing_key: OnceLock<SigningKey>,
    /// What the task has until its files are removed.
    held: OnceLock<Box<dyn Any + Send + Sync>>,
    caches: Mutex<Vec<HeldCache>>,
    /// Processes that have started and have not exited by themselves.
    unfinished_processes: AtomicUsize,
    leaves_work: AtomicBool,
    is_handed_over: AtomicBool,
    cancel: watch::Receiver<Option<Cancellation>>,
    lease: watch::Receiver<Option<Lease>>,
    clock: Clock,
}

/// Which artifacts of its log a task wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PublishedLogs {
    /// The name of the artifact that leads to the log; `None` if none does.
    pub(crate) live: Option<String>,
    /// The name of the artifact that holds the log; `None` if it is not stored.
    pub(crate) backing: Option<String>,
    pub(crate) encoding: ContentEncoding,
}

impl Default for PublishedLogs {
    fn default() -> Self {
        let name = |name: &str| Some(name.to_owned());
        Self { live: name(LIVE_NAME), backing: name(BACKING_NAME), encoding: ContentEncoding::Identity }
    }
}

#[derive(Debug)]
pub(crate) struct TaskFiles {
    workdir: PathBuf,
    log: TaskLog,
}

/// Names the files of a claim. The names are unique: two services may use equal ids, and the directory of an earlier claim may still
/// be being removed.
#[derive(Debug)]
pub(crate) struct FileNames {
    pub(crate) claim: LocalToken,
    pub(crate) work_dir: WorkDirLock,
    pub(crate) log_limits: LogLimits,
    pub(crate) log_times: bool,
    /// Told when its work runs elsewhere.
    pub(crate) launched: mpsc::Sender<LocalToken>,
}

impl FileNames {
    fn files(&self, run: &Run) -> TaskFiles {
        let workdir = self.work_dir.tasks_dir().join(format!("{}_{}_{}", run.task, run.run, self.claim.0));
        let mut log = workdir.clone().into_os_string();
        log.push(".log");
        let lock = Some(self.work_dir.clone());
        TaskFiles { workdir, log: TaskLog::in_work_dir(log.into(), self.log_limits, self.log_times, lock) }
    }
}

impl ContextInner {
    fn files(&self) -> &TaskFiles {
        self.files.get_or_init(|| {
            let Some(names) = &self.names else { unreachable!("a context has files or their names") };
            names.files(&self.task.run)
        })
    }
}

impl Context {
    /// Creates a context. `workdir` is created when it is first used.
    pub fn new(
        task: TaskInfo,
        workdir: PathBuf,
        log: TaskLog,
        cancel: watch::Receiver<Option<Cancellation>>,
        lease: watch::Receiver<Option<Lease>>,
        clock: Clock,
    ) -> Self {
        let files = TaskFiles { workdir, log };
        Self::with_files(task, Some(files), None, ProcessScope::without_cookie(), cancel, lease, clock)
    }

    /// The context of a claim has names, and any other one has files.
    pub(crate) fn with_files(
        task: TaskInfo,
        files: Option<TaskFiles>,
        names: Option<FileNames>,
        scope: ProcessScope,
        cancel: watch::Receiver<Option<Cancellation>>,
        lease: watch::Receiver<Option<Lease>>,
        clock: Clock,
    ) -> Self {
        let inner = ContextInner {
            task,
            files: files.map_or_else(OnceLock::new, OnceLock::from),
            names,
            workdir_result: OnceLock::new(),
            removal: Mutex::default(),
            artifacts: OnceLock::new(),
            published_logs: Mutex::default(),
            progress: Mutex::default(),
            failure_reason: OnceLock::new(),
            signing_key: OnceLock::new(),
            held: OnceLock::new(),
            caches: Mutex::default(),
            unfinished_processes: AtomicUsize::default(),
            leaves_work: AtomicBool::default(),
            is_handed_over: AtomicBool::default(),
            cancel,
            lease,
            clock,
        };
        Self { inner: Arc::new(inner), scope, results: None, deployment: None, proxy_url: None, user: None }
    }

    /// Only before the payload runs.
    pub(crate) fn set_published_logs(&self, logs: PublishedLogs) {
        *self.inner.published_logs.lock() = logs;
    }

    /// Publishes no log, or only once the task has ended. Only before the payload runs; until then its log says why it does not.
    pub(super) fn decline_logs(&self, has_live: bool, has_backing: bool) {
        let mut logs = self.inner.published_logs.lock();
        logs.live.take_if(|_| !has_live);
        logs.backing.take_if(|_| !has_backing);
    }

    /// Keeps the first reason that is known; the sender of a request gets it.
    pub(crate) fn set_failure_reason(&self, reason: &str) {
        self.inner.failure_reason.get_or_init(|| self.for_status(reason));
        if let Some(results) = &self.results {
            results.set_failure_reason(reason);
        }
    }

    pub(crate) fn failure_reason(&self) -> Option<&str> {
        self.inner.failure_reason.get().map(String::as_str)
    }

    /// Has the task's artifacts signed. Only before the payload runs.
    pub(super) fn set_signing_key(&self, key: SigningKey) {
        self.inner.signing_key.get_or_init(|| key);
    }

    pub(crate) fn signing_key(&self) -> Option<&SigningKey> {
        self.inner.signing_key.get()
    }

    pub(crate) fn published_logs(&self) -> PublishedLogs {
        self.inner.published_logs.lock().clone()
    }

    /// Creates a context without a claim, and what cancels it.
    pub(crate) fn without_claim(
        name: &str,
        definition: Definition,
        workdir: PathBuf,
        log: TaskLog,
        clock: Clock,
    ) -> io::Result<(Self, watch::Sender<Option<Cancellation>>)> {
        let task = TaskId::parse(name).ok_or_else(|| io::Error::other("invalid task id"))?;
        let run = Run { task, run: 0 };
        let task =
            TaskInfo { run, source: name.to_owned(), definition, env: Arc::default(), trace: None, reported_runs: 0 };
        let (cancel, canceled) = watch::channel(None);
        // Without a claim there is no lease, so the sender is dropped.
        let lease = Lease::new(Granted { sent_at: clock.now(), length: NO_LEASE }, Duration::ZERO);
        let (_, lease) = watch::channel(Some(lease));
        Ok((Self::new(task, workdir, log, canceled, lease, clock), cancel))
    }

    /// The same task, for what runs after its payload was stopped.
    pub(super) fn without_cancellation(&self) -> Self {
        let ContextInner { task, lease, clock, .. } = &*self.inner;
        let (workdir, never) = (self.workdir_path().to_owned(), watch::channel(None).1);
        Self::new(task.clone(), workdir, self.log().clone(), never, lease.clone(), *clock).in_scope(self.scope.clone())
    }

    /// Removes the task directory and the log file, if they exist. Blocks. Removes nothing if the worker has lost its work
    /// directory, because the files at these paths belong to another worker.
    ///
    /// # Errors
    ///
    /// The last error of the file system; the other files are removed.
    pub(crate) fn clean_up(self) -> io::Result<()> {
        let dir = self.remove_folder();
        let keeps_log = self.log().is_empty() || self.log().verify_work_dir().is_err();
        let log = if keeps_log { Ok(()) } else { self.log().discard() };
        dir.and(log)
    }

    /// Removes what the task directory contains besides declared artifacts, unless a link in them may lead to it, or a named cache is
    /// still there. Blocks.
    pub(crate) fn remove_all_but_artifacts(&self) -> io::Result<()> {
        let keep = self.artifacts().paths();
        if !self.inner.caches.lock().is_empty() {
            return Ok(());
        }
        let is_linked = |path: &PathBuf| {
            let is_link = |path: &Path| self.workdir_path().join(path).is_symlink();
            path.ancestors().any(is_link) || has_links(&self.workdir_path().join(path), ARTIFACT_DEPTH_MAX)
        };
        if keep.iter().any(is_linked) {
            return Ok(());
        }
        self.log().verify_work_dir().map_or(Ok(()), |()| self.remove_all_but(&keep))
    }

    /// Opens the declared artifacts one after the other. Blocks.
    pub(crate) fn collect_artifacts(&self) -> io::Result<ArtifactCollector> {
        self.log().verify_work_dir()?;
        self.artifacts().collect(self.workdir())
    }

    /// Gives the named caches back, and removes the task directory as [`Context::clean_up`] does.
    pub(crate) fn remove_folder(&self) -> io::Result<()> {
        self.return_caches();
        self.log().verify_work_dir().map_or(Ok(()), |()| self.remove_all_but(&[]))
    }

    fn remove_all_but(&self, keep: &[PathBuf]) -> io::Result<()> {
        let _one_at_a_time = self.inner.removal.lock();
        let dir = self.workdir_path();
        // What is removed early needs no second look at the mount table.
        match self.workdir_result() {
            Some(Ok(())) if !keep.is_empty() => remove_all_but(dir, keep),
            Some(_) if dir.symlink_metadata().is_ok() => remove_tree(dir),
            Some(_) | None => Ok(()),
        }
    }

    /// Runs the task's processes in `scope`.
    #[must_use]
    pub fn in_scope(self, scope: ProcessScope) -> Self {
        Self { scope, ..self }
    }

    /// Sends replies to `results`, for a task that is a request.
    #[must_use]
    pub fn with_results(self, results: Option<Results>) -> Self {
        Self { results, ..self }
    }

    /// Lets the task use the services of its queue's deployment.
    #[must_use]
    pub(crate) fn with_deployment(self, deployment: Option<Arc<dyn Deployment>>) -> Self {
        Self { deployment, ..self }
    }

    /// Returns the deployment that the task's queue belongs to; `None` for a queue that belongs to none.
    pub const fn deployment(&self) -> Option<&Arc<dyn Deployment>> {
        self.deployment.as_ref()
    }

    /// Tells the task's processes where their proxy is.
    #[must_use]
    pub(super) fn with_proxy(self, url: &str) -> Self {
        Self { proxy_url: Some(url.into()), ..self }
    }

    pub(super) fn proxy_url(&self) -> Option<&str> {
        self.proxy_url.as_deref()
    }

    /// Drops what the task needs for itself once its files are removed.
    pub(super) fn hold_until_removed(&self, held: impl Any + Send + Sync) {
        drop(self.inner.held.set(Box::new(held)));
    }

    /// Runs the task's processes as this user.
    #[must_use]
    pub(super) fn with_user(self, user: TaskUser) -> Self {
        Self { user: Some(Arc::new(user)), ..self }
    }

    /// The user that the task's processes run as; `None` for the worker's own.
    pub(super) fn user(&self) -> Option<&Arc<TaskUser>> {
        self.user.as_ref()
    }

    /// Has a named cache given back once the payload has ended.
    pub(super) fn hold_cache(&self, cache: HeldCache) {
        self.inner.caches.lock().push(cache);
    }

    /// Leaves the named caches to the task, with whose directory they are removed.
    pub(crate) fn abandon_caches(&self) {
        self.inner.caches.lock().clear();
    }

    pub(super) fn on_process_started(&self) {
        self.inner.unfinished_processes.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn on_process_exited(&self) {
        self.inner.unfinished_processes.fetch_sub(1, Ordering::Relaxed);
    }

    /// Gives the named caches back for the next task. Those that a stopped process may have left half written are not kept.
    /// The task's processes must have ended. Blocks.
    pub(crate) fn return_caches(&self) {
        let held = std::mem::take(&mut *self.inner.caches.lock());
        let was_stopped = self.inner.unfinished_processes.load(Ordering::Relaxed) > 0;
        // A cache may be mounted in another one.
        for cache in held.into_iter().rev() {
            let path = cache.path().display().to_string();
            if was_stopped {
                self.log().write_note(&format!("cache at {path}: not kept, because the payload was stopped"));
            } else if let Err(error) = cache.give_back() {
                self.log().write_note(&format!("cache at {path}: not kept: {error}"));
            }
        }
    }

    /// Returns whether there are named caches that no artifact can lie in.
    pub(crate) fn may_return_caches(&self) -> bool {
        !self.has_artifacts() && !self.inner.caches.lock().is_empty()
    }

    /// Returns where replies go; `None` if the task is not a request.
    pub const fn results(&self) -> Option<&Results> {
        self.results.as_ref()
    }

    /// Sets the final reply to a request; a later call replaces it. Does nothing for a task that is not a request.
    ///
    /// The worker sends the reply after the payload succeeded. A reply whose status is not `ok` is sent after a failure as
    /// well. Without a reply the worker sends `null` after success and an error after failure.
    ///
    /// # Errors
    ///
    /// Fails if the reply is too large; the reply set before stays.
    pub fn set_reply(&self, reply: Reply) -> Result<(), ReplyError> {
        self.results.as_ref().map_or(Ok(()), |results| results.set_final(reply))
    }

    /// Sends a partial reply to a request and returns when the broker has confirmed it. Does nothing for a task that is not
    /// a request.
    ///
    /// # Errors
    ///
    /// [`Gone`](Refusal::Gone) if the client no longer waits; a streaming handler may stop then.
    /// Other errors may be retried.
    pub async fn send_partial_reply(&self, reply: Reply) -> Result<(), CallError> {
        match &self.results {
            Some(results) => results.send_partial(reply).await,
            None => Ok(()),
        }
    }

    /// Pauses the task and returns once it was resumed. Only builds of a Zuul can be paused: the scheduler gets the data of
    /// the reply set so far, runs the jobs that depend on the build, and resumes it after them. The limit of the handler counts on.
    ///
    /// # Errors
    ///
    /// [`Gone`](Refusal::Gone) if the queue cannot pause a task, or the payload has to end; `Rejected` if the task is paused
    /// already.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future resumes nothing: the task stays paused until the scheduler resumes it or it ends.
    pub async fn pause(&self) -> Result<(), CallError> {
        let results = self.results.as_ref().ok_or_else(cannot_pause)?;
        let earlier = self.progress();
        self.set_progress("paused");
        let resumed = tokio::select! {
            resumed = results.pause() => resumed,
            Cancellation { cause, .. } = self.canceled() => {
                Err(CallError { refusal: Refusal::Gone, message: cause.message().to_owned() })
            }
        };
        *self.inner.progress.lock() = earlier;
        resumed
    }

    /// Returns the task.
    pub fn task(&self) -> &TaskInfo {
        &self.inner.task
    }

    /// Returns the task directory. It is empty at the start and removed at the end.
    ///
    /// The first call creates it. If that fails, the worker releases the task, whatever the handler returns.
    pub fn workdir(&self) -> &Path {
        self.inner.workdir_result.get_or_init(|| work_dir::create_task_dir(self.workdir_path()));
        self.workdir_path()
    }

    /// The path of the task directory, which may not exist.
    pub(crate) fn workdir_path(&self) -> &Path {
        &self.inner.files().workdir
    }

    /// The log, if it was ever used.
    pub(crate) fn used_log(&self) -> Option<&TaskLog> {
        self.inner.files.get().map(|files| &files.log)
    }

    pub(crate) fn has_artifacts(&self) -> bool {
        self.inner.artifacts.get().is_some_and(|artifacts| !artifacts.is_empty())
    }

    /// Returns the scope that contains the task's processes; by default only their process groups.
    pub const fn scope(&self) -> &ProcessScope {
        &self.scope
    }

    /// `None` if the task directory was never used.
    pub(crate) fn workdir_result(&self) -> Option<&io::Result<()>> {
        self.inner.workdir_result.get()
    }

    /// Returns the task's log.
    pub fn log(&self) -> &TaskLog {
        &self.inner.files().log
    }

    /// Returns the task's artifacts. The worker uploads them after the payload has ended.
    pub fn artifacts(&self) -> &Artifacts {
        self.inner.artifacts.get_or_init(Artifacts::new)
    }

    /// Sets the progress text that `journeyman status` shows, cut to [`PROGRESS_CHARS_MAX`] characters.
    pub fn set_progress(&self, text: &str) {
        *self.inner.progress.lock() = Some(self.for_status(text));
    }

    /// Without secrets and control characters, and short.
    fn for_status(&self, text: &str) -> String {
        let secrets = self.used_log().and_then(TaskLog::task_secrets);
        let text = redact::bytes(text.as_bytes(), secrets.as_deref());
        String::from_utf8_lossy(&text).chars().filter(|char| !char.is_control()).take(PROGRESS_CHARS_MAX).collect()
    }

    /// Returns the last progress text.
    pub fn progress(&self) -> Option<String> {
        self.inner.progress.lock().clone()
    }

    /// Returns when the claim expires unless it is reclaimed, on the worker's clock.
    pub fn expires_at(&self) -> Instant {
        self.inner.lease.borrow().map_or(Instant::ORIGIN, |lease| lease.expires_at())
    }

    /// Returns the time until `deadline`; zero if it has passed.
    pub fn time_until(&self, deadline: Instant) -> Duration {
        deadline.since(self.inner.clock.now())
    }

    /// Has the worker discard what the payload leaves elsewhere, once the outcome is reported.
    pub(super) fn mark_leaves_work(&self) {
        self.inner.leaves_work.store(true, Ordering::Relaxed);
    }

    pub(crate) fn leaves_work(&self) -> bool {
        self.inner.leaves_work.load(Ordering::Relaxed)
    }

    /// Has a worker that drains leave the payload to another one.
    pub(super) fn mark_handed_over(&self) {
        self.inner.is_handed_over.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_handed_over(&self) -> bool {
        self.inner.is_handed_over.load(Ordering::Relaxed)
    }

    pub(crate) fn work_name(&self) -> EndedWork {
        let TaskInfo { run, source, .. } = self.task();
        EndedWork { source: source.clone(), run: run.clone(), request: self.results().and_then(Results::work_key) }
    }

    /// Tells the worker that nothing of the task runs here, so that it takes another one.
    pub(super) async fn launched(&self) {
        if let Some(names) = &self.inner.names {
            // A worker that has ended needs no other task.
            _ = names.launched.send(names.claim).await;
        }
    }

    pub(super) fn clock(&self) -> Clock {
        self.inner.clock
    }

    /// Returns the request to end early, if there is one.
    pub fn cancellation(&self) -> Option<Cancellation> {
        *self.inner.cancel.borrow()
    }

    /// Resolves when the payload must be killed: at the deadline of the cancellation, which a later cancellation may bring
    /// forward. Pending forever without a cancellation.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn kill_due(&self) {
        let mut cancel = self.inner.cancel.clone();
        loop {
            let deadline = cancel.borrow_and_update().map(|cancellation| cancellation.deadline);
            tokio::select! {
                () = or_pending(deadline.map(|deadline| self.inner.clock.sleep_until(deadline))) => return,
                Ok(()) = cancel.changed() => {}
            }
        }
    }

    /// Resolves when the payload has to end early.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn canceled(&self) -> Cancellation {
        let mut cancel = self.inner.cancel.clone();
        match cancel.wait_for(Option::is_some).await.map(|cancellation| *cancellation) {
            Ok(Some(cancellation)) => cancellation,
            Ok(None) | Err(_) => std::future::pending().await,
        }
    }
}

fn has_links(folder: &Path, depth: usize) -> bool {
    let Ok(entries) = std::fs::read_dir(folder) else { return false };
    entries.flatten().any(|entry| {
        let kind = entry.file_type().ok();
        let is_folder = kind.is_some_and(|kind| kind.is_dir());
        kind.is_some_and(|kind| kind.is_symlink()) || (is_folder && depth > 0 && has_links(&entry.path(), depth - 1))
    })
}
