//! Runs handlers without a queue and a worker, for their tests.
//!
//! ```no_run
//! # async fn test<Thumbs: journeyman_worker::handler::PayloadHandler>(thumbs: Thumbs) -> std::io::Result<()> {
//! use journeyman_worker::testing::run_one;
//!
//! let ended = run_one(thumbs, serde_json::json!({"url": "cat.jpg"})).await?;
//! assert!(ended.is_completed(), "{ended:?}");
//! assert!(ended.log.contains("cat.jpg"));
//! assert!(ended.artifacts.contains_key("public/thumb.png"));
//! # Ok(())
//! # }
//! ```

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::watch;

use journeyman_domain::claim::CancelCause;
use journeyman_domain::id::{Run, TaskId};
use journeyman_domain::lease::{Granted, Lease};
use journeyman_domain::limits::{AMQP_MESSAGE_BYTES_MAX, AMQP_NAME_BYTES_MAX};
use journeyman_domain::outcome::Outcome;
use journeyman_platform::host::clock::Clock;

use crate::handler::artifact_collector::CollectedArtifact;
use crate::handler::log::{LogLimits, TaskLog};
use crate::handler::{Cancellation, Context, DynHandler, ExecuteError, PayloadHandler, TaskInfo, erase};
use crate::task::file::TaskFile;
use crate::task::{ArtifactBody, PartialReplySink, Reply, ReplyFuture, ReplyLimits, Results};

/// How a payload ended, and what it left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// What a worker would report.
    pub outcome: Outcome,
    /// Why it did not complete: what is wrong with the payload, or the message of the failure.
    pub messages: Vec<String>,
    /// The log.
    pub log: String,
    /// The content of the declared artifacts by their names. One that a worker would report as missing is in `messages`.
    pub artifacts: BTreeMap<String, Vec<u8>>,
    /// What the client of a request would get, apart from partial replies.
    pub reply: Option<Reply>,
}

impl Ended {
    /// Returns whether the payload succeeded and has all its artifacts.
    pub fn is_completed(&self) -> bool {
        self.outcome == Outcome::Completed && self.messages.is_empty()
    }
}

/// A task for a handler, which is also a request. Its clock is that of tokio, which tests may pause.
#[derive(Debug)]
pub struct TestTask {
    context: Context,
    cancel: watch::Sender<Option<Cancellation>>,
    lease: watch::Sender<Option<Lease>>,
    folder: TempDir,
}

/// Runs one payload to its end.
///
/// # Errors
///
/// No temporary directory can be created, or a file in it cannot be read.
pub async fn run_one<H: PayloadHandler>(handler: H, payload: Value) -> io::Result<Ended> {
    TestTask::new(payload)?.run(&*erase(handler)).await
}

impl TestTask {
    /// A task with this payload, a lease of 20 minutes and a temporary directory.
    ///
    /// # Errors
    ///
    /// No temporary directory can be created.
    pub fn new(payload: Value) -> io::Result<Self> {
        let folder = tempfile::Builder::new().prefix("journeyman-test-").tempdir()?;
        let (workdir, log) = (folder.path().join("task"), folder.path().join("log"));
        let definition = json!({"metadata": {"name": "test"}, "payload": payload});
        let log = TaskLog::new(log, LogLimits::default());
        let task = TaskId::parse("test").ok_or_else(|| io::Error::other("invalid task id"))?;
        let task = TaskInfo {
            run: Run { task, run: 0 },
            source: "test".to_owned(),
            definition: definition.into(),
            env: Arc::default(),
            trace: None,
            reported_runs: 0,
        };
        let (cancel, canceled) = watch::channel(None);
        let (lease, leased) = watch::channel(Some(lease(LEASE)));
        let context = Context::new(task, workdir, log, canceled, leased, Clock::tokio());
        Ok(Self { context: context.with_results(Some(discarded_replies())), cancel, lease, folder })
    }

    /// The context that the handler gets.
    pub const fn context(&self) -> &Context {
        &self.context
    }

    /// Asks the payload to end, as a worker that shuts down does.
    pub fn cancel(&self, cause: CancelCause, termination_grace: Duration) {
        let asked = Cancellation::shutdown(termination_grace, Clock::tokio());
        self.cancel.send_replace(Some(Cancellation { cause, ..asked }));
    }

    /// Extends the lease, as a reclaim does, to this length from now on.
    pub fn reclaim(&self, length: Duration) {
        self.lease.send_replace(Some(lease(length)));
    }

    /// Prepares and executes the payload, and collects what it left.
    ///
    /// # Errors
    ///
    /// Files of the test cannot be read.
    pub async fn run(self, handler: &dyn DynHandler) -> io::Result<Ended> {
        let context = &self.context;
        let (outcome, mut messages) = match handler.prepare_task(context).await {
            Err(error) => (error.reason.outcome(), error.messages),
            Ok(prepared) => match prepared(context).await {
                Ok(()) => (Outcome::Completed, Vec::new()),
                Err(ExecuteError { reason, message }) => (reason.outcome(), vec![message]),
            },
        };
        let mut artifacts = BTreeMap::new();
        for collected in context.artifacts().collect(context.workdir())? {
            match collected {
                CollectedArtifact::Found(artifact, _) => {
                    let ArtifactBody::File { file, bytes, .. } = artifact.body else { continue };
                    artifacts.insert(artifact.name, read(&file, bytes)?);
                }
                CollectedArtifact::Missing { message, .. } => messages.push(message),
                CollectedArtifact::Skipped { .. } => {}
            }
        }
        let log = context.log().finish()?.map_or_else(|| Ok(Vec::new()), |log| read(&log.file, log.bytes))?;
        let reply = context.results().and_then(Results::final_reply);
        self.folder.close()?;
        Ok(Ended { outcome, messages, log: String::from_utf8_lossy(&log).into_owned(), artifacts, reply })
    }
}

/// The lease that a worker of a Taskcluster has.
const LEASE: Duration = Duration::from_secs(20 * 60);

fn lease(length: Duration) -> Lease {
    Lease::new(Granted { sent_at: Clock::tokio().now(), length }, Duration::ZERO)
}

fn read(file: &TaskFile, bytes: u64) -> io::Result<Vec<u8>> {
    let mut content = vec![0; usize::try_from(bytes).map_err(io::Error::other)?];
    file.read_exact_at(&mut content, 0)?;
    Ok(content)
}

/// Results of a request whose partial replies reach no client.
pub(crate) fn discarded_replies() -> Results {
    let limits = ReplyLimits {
        body_bytes: usize::try_from(AMQP_MESSAGE_BYTES_MAX).unwrap_or(usize::MAX),
        content_type_bytes: AMQP_NAME_BYTES_MAX,
    };
    Results::new(DiscardReplies, limits)
}

struct DiscardReplies;

impl PartialReplySink for DiscardReplies {
    fn send(&self, _: Reply) -> ReplyFuture<'_> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// The test resumes at once.
    fn pause(&self) -> ReplyFuture<'_> {
        Box::pin(std::future::ready(Ok(())))
    }
}
