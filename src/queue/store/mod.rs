//! The store: one SQLite file, one thread that owns it, and commits that many callers share.
//!
//! Jobs wait in a bounded channel. The thread takes all that wait, runs each inside a savepoint of one transaction,
//! commits (with the file flushed to disk), and only then answers. So an answered call survives a crash, and a disk
//! that flushes 500 times a second still serves thousands of calls.

pub(crate) mod artifacts;
mod index;
pub(crate) mod messages;
pub(crate) mod open;
mod recent_workers;
pub(crate) mod tx;
mod write_failures;
mod writer;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};

pub use self::open::OpenError;
pub(crate) use self::open::open;

use self::tx::{ClaimedRun, Tx};
use super::clock::QueueClock;
use super::queue_error::QueueError;
use super::task_state::WorkerIdentity;

/// What the store needs to know of the settings.
#[derive(Debug, Clone)]
pub(crate) struct StoreConfig {
    pub(crate) claim_timeout: Duration,
    /// How long after its end a claim is resolved.
    pub(crate) claim_delay: Duration,
    /// How long after its deadline a task is resolved.
    pub(crate) deadline_delay: Duration,
    pub(crate) clock: QueueClock,
    pub(crate) artifacts: PathBuf,
}

/// Why a job did not come to its end.
#[derive(Debug)]
pub(crate) enum StoreError {
    /// The caller is refused.
    Refused(Box<QueueError>),
    /// The file is in trouble.
    Sql(rusqlite::Error),
}

impl StoreError {
    fn json(error: serde_json::Error) -> Self {
        Self::Sql(rusqlite::Error::ToSqlConversionFailure(Box::new(error)))
    }
}

impl From<QueueError> for StoreError {
    fn from(fault: QueueError) -> Self {
        Self::Refused(Box::new(fault))
    }
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sql(error)
    }
}

/// A job, and how to answer it once its transaction has ended.
trait StoreJob: Send {
    fn run(&mut self, room: &mut Tx<'_>) -> Result<(), StoreError>;
    fn reply(self: Box<Self>, end: Result<(), QueueError>);
    fn is_awaited(&self) -> bool;
}

struct PendingJob<T, F> {
    work: Option<F>,
    result: Option<T>,
    reply: oneshot::Sender<Result<T, QueueError>>,
}

impl<T: Send, F: Send + FnOnce(&mut Tx<'_>) -> Result<T, StoreError>> StoreJob for PendingJob<T, F> {
    fn run(&mut self, room: &mut Tx<'_>) -> Result<(), StoreError> {
        if let Some(work) = self.work.take() {
            self.result = Some(work(room)?);
        }
        Ok(())
    }

    fn reply(self: Box<Self>, end: Result<(), QueueError>) {
        let answer = match (end, self.result) {
            (Ok(()), Some(done)) => Ok(done),
            (Err(fault), _) => Err(fault),
            (Ok(()), None) => Err(internal_error()),
        };
        // A caller who has left does not wait for an answer.
        self.reply.send(answer).ok();
    }

    fn is_awaited(&self) -> bool {
        !self.reply.is_closed()
    }
}

/// Somebody who waits for work.
struct Waiter {
    queue: String,
    worker: WorkerIdentity,
    limit: usize,
    reply: oneshot::Sender<Result<WorkResult, QueueError>>,
}

/// What a request for work found.
pub(crate) enum WorkResult {
    Work(UndeliveredClaims),
    /// The worker is barred from claiming.
    Quarantined,
}

/// Claims on their way to a worker. What is dropped before it was taken goes back to its queue.
pub(crate) struct UndeliveredClaims {
    claims: Vec<ClaimedRun>,
    undelivered: Arc<Mutex<Vec<(String, u32)>>>,
    jobs: mpsc::WeakSender<StoreRequest>,
}

impl UndeliveredClaims {
    /// The claims, for an answer that is now being sent.
    pub(crate) fn deliver(mut self) -> Vec<ClaimedRun> {
        std::mem::take(&mut self.claims)
    }
}

impl Drop for UndeliveredClaims {
    fn drop(&mut self) {
        if self.claims.is_empty() {
            return;
        }
        let unheard = self.claims.drain(..).map(|given| (given.task.task_id, given.run));
        self.undelivered.lock().unwrap_or_else(PoisonError::into_inner).extend(unheard);
        if let Some(jobs) = self.jobs.upgrade() {
            // Where the channel is full, the thread is awake and looks by itself.
            jobs.try_send(StoreRequest::Wake).ok();
        }
    }
}

enum StoreRequest {
    Job(Box<dyn StoreJob>),
    Wait(Waiter),
    Wake,
    Tick(oneshot::Sender<()>),
}

/// A handle on the store. When the last one is dropped, the thread ends what it has and closes the file.
#[derive(Clone)]
pub(crate) struct Store {
    jobs: mpsc::Sender<StoreRequest>,
    pending: watch::Receiver<u64>,
}

/// How the thread that owns the file does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StoreStatus {
    Running,
    /// The last handle is gone, and the file is closed.
    Closed,
    /// The file can no longer be trusted, as this says.
    Failed(String),
}

/// The answer of a store that could not do what it was asked.
fn internal_error() -> QueueError {
    QueueError::internal(&uuid::Uuid::new_v4())
}

impl Store {
    /// Runs a job and answers once what it did is on disk.
    ///
    /// # Cancel safety
    ///
    /// A job whose caller leaves before it was started is skipped; after that it is done, unheard.
    pub(crate) async fn execute<T, F>(&self, work: F) -> Result<T, QueueError>
    where
        T: Send + 'static,
        F: Send + 'static + FnOnce(&mut Tx<'_>) -> Result<T, StoreError>,
    {
        let (reply, answer) = oneshot::channel();
        let call = PendingJob { work: Some(work), result: None, reply };
        self.jobs.send(StoreRequest::Job(Box::new(call))).await.map_err(|_| internal_error())?;
        answer.await.map_err(|_| internal_error())?
    }

    /// Asks for work, and waits for it as long as the answer is not dropped.
    pub(crate) async fn wait_for_work(
        &self,
        queue: String,
        worker: WorkerIdentity,
        most: usize,
    ) -> Result<oneshot::Receiver<Result<WorkResult, QueueError>>, QueueError> {
        let (reply, answer) = oneshot::channel();
        let waiter = Waiter { queue, worker, limit: most, reply };
        self.jobs.send(StoreRequest::Wait(waiter)).await.map_err(|_| internal_error())?;
        Ok(answer)
    }

    /// Lets the resolvers look at the clock now. Answers when they have.
    pub(crate) async fn tick(&self) {
        let (reply, answer) = oneshot::channel();
        if self.jobs.send(StoreRequest::Tick(reply)).await.is_ok() {
            answer.await.ok();
        }
    }

    /// A number that grows each time something has become pending.
    pub(crate) fn pending(&self) -> watch::Receiver<u64> {
        self.pending.clone()
    }
}

#[cfg(test)]
mod tests;
