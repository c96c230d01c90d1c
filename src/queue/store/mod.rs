//! The store: one SQLite database, one thread that owns it, and commits shared by many callers.
//!
//! The thread takes all queued jobs, runs each in a savepoint of one transaction, commits with a flush to disk, and
//! then replies. So an answered call survives a crash, and a disk that flushes 500 times a second serves thousands
//! of calls.

pub(crate) mod artifacts;
mod index;
pub(crate) mod messages;
pub(crate) mod open;
pub(crate) mod tx;
mod write_failures;
mod writer;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot, watch};

pub use self::open::OpenError;
pub(crate) use self::open::open;

use self::tx::{ClaimedRun, Tx};
use super::clock::QueueClock;
use super::queue_error::QueueError;
use super::task_state::WorkerIdentity;

#[derive(Debug, Clone)]
pub(crate) struct StoreConfig {
    pub(crate) claim_timeout: Duration,
    /// See [`Config`](super::Config).
    pub(crate) claim_delay: Duration,
    pub(crate) deadline_delay: Duration,
    pub(crate) clock: QueueClock,
    pub(crate) artifacts: PathBuf,
}

#[derive(Debug)]
pub(crate) enum StoreError {
    Refused(Box<QueueError>),
    Sql(rusqlite::Error),
}

impl StoreError {
    fn json(error: serde_json::Error) -> Self {
        Self::Sql(rusqlite::Error::ToSqlConversionFailure(Box::new(error)))
    }
}

impl From<QueueError> for StoreError {
    fn from(error: QueueError) -> Self {
        Self::Refused(Box::new(error))
    }
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sql(error)
    }
}

trait StoreJob: Send {
    fn run(&mut self, tx: &mut Tx<'_>) -> Result<(), StoreError>;
    fn reply(self: Box<Self>, end: Result<(), QueueError>);
    fn is_awaited(&self) -> bool;
}

struct PendingJob<T, F> {
    work: Option<F>,
    result: Option<T>,
    reply: oneshot::Sender<Result<T, QueueError>>,
}

impl<T: Send, F: Send + FnOnce(&mut Tx<'_>) -> Result<T, StoreError>> StoreJob for PendingJob<T, F> {
    fn run(&mut self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        if let Some(work) = self.work.take() {
            self.result = Some(work(tx)?);
        }
        Ok(())
    }

    fn reply(self: Box<Self>, end: Result<(), QueueError>) {
        let answer = match (end, self.result) {
            (Ok(()), Some(done)) => Ok(done),
            (Err(error), _) => Err(error),
            (Ok(()), None) => Err(internal_error()),
        };
        // The caller may have gone.
        self.reply.send(answer).ok();
    }

    fn is_awaited(&self) -> bool {
        !self.reply.is_closed()
    }
}

struct Waiter {
    queue: String,
    worker: WorkerIdentity,
    limit: usize,
    reply: oneshot::Sender<Result<UndeliveredClaims, QueueError>>,
}

/// Claims for a response. Claims dropped before [`deliver`](Self::deliver) return to their queue.
pub(crate) struct UndeliveredClaims {
    claims: Vec<ClaimedRun>,
    undelivered: Arc<Mutex<Vec<(String, u32)>>>,
    jobs: mpsc::WeakSender<StoreRequest>,
}

impl UndeliveredClaims {
    pub(crate) fn deliver(mut self) -> Vec<ClaimedRun> {
        std::mem::take(&mut self.claims)
    }
}

impl Drop for UndeliveredClaims {
    fn drop(&mut self) {
        if self.claims.is_empty() {
            return;
        }
        let runs = self.claims.drain(..).map(|claimed| (claimed.task.task_id, claimed.run));
        self.undelivered.lock().extend(runs);
        if let Some(jobs) = self.jobs.upgrade() {
            // If the channel is full, the thread runs anyway.
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

/// A handle. When the last one is dropped, the thread finishes its jobs and closes the database.
#[derive(Clone)]
pub(crate) struct Store {
    jobs: mpsc::Sender<StoreRequest>,
    pending: watch::Receiver<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StoreStatus {
    Running,
    Closed,
    Failed(String),
}

fn internal_error() -> QueueError {
    QueueError::internal(&uuid::Uuid::new_v4())
}

impl Store {
    /// Runs a job and returns once its changes are on disk.
    ///
    /// # Cancel safety
    ///
    /// A job is skipped if the caller goes before it starts; afterwards it is done without a reply.
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

    /// Claims pending runs, or waits for some until the receiver is dropped.
    pub(crate) async fn wait_for_work(
        &self,
        queue: String,
        worker: WorkerIdentity,
        limit: usize,
    ) -> Result<oneshot::Receiver<Result<UndeliveredClaims, QueueError>>, QueueError> {
        let (reply, answer) = oneshot::channel();
        let waiter = Waiter { queue, worker, limit, reply };
        self.jobs.send(StoreRequest::Wait(waiter)).await.map_err(|_| internal_error())?;
        Ok(answer)
    }

    /// Resolves due claims and deadlines now.
    pub(crate) async fn tick(&self) {
        let (reply, answer) = oneshot::channel();
        if self.jobs.send(StoreRequest::Tick(reply)).await.is_ok() {
            answer.await.ok();
        }
    }

    /// A counter that grows each time a run becomes pending.
    pub(crate) fn pending(&self) -> watch::Receiver<u64> {
        self.pending.clone()
    }
}

#[cfg(test)]
mod tests;
