//! A context to run handlers in.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use journeyman::handler::log::{LogLimits, TaskLog};
use journeyman::handler::{
    CancelCause, Cancellation, Context, DynHandler, EndedWork, ExecuteError, ExecuteFailure, PrepareError,
    PrepareFailure, TaskInfo,
};
use journeyman::task::Results;
use journeyman_domain::id::{Run, TaskId};
use journeyman_domain::lease::{Granted, Lease};
use journeyman_platform::host::clock::Clock;
use journeyman_platform::host::containment::ProcessScope;
use rustix::fs::{CWD, FileType, mknodat};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::watch;
use tokio::time::timeout;

const BOUND: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(crate) enum RunResult {
    Refused(PrepareError),
    Ran(Result<(), ExecuteError>),
}

impl RunResult {
    #[track_caller]
    pub(crate) fn completed(self) {
        assert!(matches!(self, Self::Ran(Ok(()))), "{self:?}");
    }

    /// The message of a failed task.
    #[track_caller]
    pub(crate) fn failed(self) -> String {
        let Self::Ran(Err(ExecuteError { reason: ExecuteFailure::Failed, message })) = self else { panic!("{self:?}") };
        message
    }

    /// What is wrong with a malformed payload.
    #[track_caller]
    pub(crate) fn malformed(self) -> Vec<String> {
        let Self::Refused(PrepareError { reason: PrepareFailure::Malformed, messages }) = self else {
            panic!("{self:?}")
        };
        messages
    }
}

pub(crate) struct Bench {
    _folder: TempDir,
    pub(crate) context: Context,
    cancel: watch::Sender<Option<Cancellation>>,
    clock: Clock,
    lease: watch::Sender<Option<Lease>>,
}

impl Bench {
    pub(crate) fn new() -> Self {
        Self::with_limits(LogLimits::default())
    }

    pub(crate) fn with_limits(limits: LogLimits) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let workdir = folder.path().join("task");
        std::fs::create_dir(&workdir).unwrap();
        let task = TaskInfo {
            run: Run { task: TaskId::parse("fN1SbArXTPSVFNUvaOlinQ").unwrap(), run: 3 },
            source: "local".to_owned(),
            definition: json!({
                "deadline": "2029-12-01T00:00:00.000Z",
                "expires": "2030-01-01T00:00:00.000Z",
                "metadata": {"name": "a task"},
                "payload": {"secret": 1},
            })
            .into(),
            env: Arc::new(BTreeMap::from([("TASKCLUSTER_ROOT_URL".to_owned(), "http://localhost".to_owned())])),
            trace: None,
            reported_runs: 0,
        };
        let clock = Clock::tokio();
        let (cancel, canceled) = watch::channel(None);
        let granted = Granted { sent_at: clock.now(), length: Duration::from_secs(1260) };
        let (lease, leased) = watch::channel(Some(Lease::new(granted, Duration::ZERO)));
        let log = TaskLog::new(folder.path().join("live_backing.log"), limits);
        let context = Context::new(task, workdir, log, canceled, leased, clock);
        Self { _folder: folder, context, cancel, clock, lease }
    }

    #[allow(dead_code, reason = "only one of the suites that share this uses it")]
    pub(crate) fn of(mut self, task: TaskInfo) -> Self {
        let (workdir, log) = (self.context.workdir().to_owned(), self.context.log().clone());
        let (cancel, lease) = (self.cancel.subscribe(), self.lease.subscribe());
        self.context = Context::new(task, workdir, log, cancel, lease, self.clock);
        self
    }

    #[allow(dead_code, reason = "only one of the suites that share this uses it")]
    pub(crate) fn within(mut self, enclosure: ProcessScope) -> Self {
        self.context = self.context.in_scope(enclosure);
        self
    }

    pub(crate) fn workdir(&self) -> &Path {
        self.context.workdir()
    }

    /// The log as it would be uploaded.
    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&read(&self.context)).into_owned()
    }

    pub(crate) fn cancel(&self, grace: Duration) {
        self.cancel_for(CancelCause::Shutdown, grace);
    }

    pub(crate) fn cancel_for(&self, cause: CancelCause, grace: Duration) {
        let order = Cancellation { cause, deadline: self.clock.now().plus(grace), termination_grace: grace };
        self.cancel.send_replace(Some(order));
    }

    pub(crate) async fn run(&self, handler: &dyn DynHandler, payload: Value) -> RunResult {
        match handler.prepare(&payload, &self.context).await {
            Err(refused) => RunResult::Refused(refused),
            Ok(ready) => RunResult::Ran(ready(&self.context).await),
        }
    }

    /// Does what the worker does once the outcome is reported.
    pub(crate) async fn discard(&self, handler: &dyn DynHandler) -> Result<(), String> {
        let TaskInfo { run, source, .. } = self.context.task().clone();
        let request = self.context.results().and_then(Results::work_key);
        match handler.discard(&EndedWork { source, run, request }) {
            Some(discarding) => discarding.await,
            None => Ok(()),
        }
    }

    /// Resolves when the log contains `text`.
    pub(crate) async fn logged(&self, text: &str) {
        let log = self.context.log();
        let seen = async {
            loop {
                let bytes = log.bytes();
                if std::fs::read_to_string(log.path()).is_ok_and(|log| log.contains(text)) {
                    return;
                }
                log.wait_for_growth(bytes).await;
            }
        };
        timeout(BOUND, seen).await.expect("the payload did not write the text");
    }

    /// A named pipe in the task directory that payloads keep open while they run.
    pub(crate) fn alive(&self) -> Alive {
        let path = self.workdir().join("alive");
        mknodat(CWD, &path, FileType::Fifo, 0o600.into(), 0).unwrap();
        Alive(pipe::OpenOptions::new().open_receiver(path).unwrap())
    }
}

pub(crate) struct Alive(pipe::Receiver);

impl Alive {
    /// True while a process has the pipe open.
    #[allow(dead_code, reason = "only one of the suites that share this uses it")]
    pub(crate) fn is_there(&self) -> bool {
        self.0.try_read(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    }

    /// Resolves when no process has the pipe open.
    pub(crate) async fn gone(mut self) {
        let mut rest = Vec::new();
        let end = timeout(BOUND, self.0.read_to_end(&mut rest));
        end.await.expect("a payload still runs").unwrap();
    }
}

pub(crate) fn read(context: &Context) -> Vec<u8> {
    use std::os::unix::fs::FileExt;
    let Some(finished) = context.log().finish().unwrap() else {
        return Vec::new();
    };
    let mut bytes = vec![0; usize::try_from(finished.bytes).unwrap()];
    finished.file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// True while a process runs; a zombie does not.
pub(crate) fn runs(process: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{process}/stat"))
        .is_ok_and(|stat| !stat.rsplit(") ").next().unwrap().starts_with(['Z', 'X']))
}

pub(crate) fn number_in(path: &Path) -> u32 {
    std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
}
