//! The store: one SQLite database, one thread that owns it, and commits shared by many callers.
//!
//! The thread takes all queued jobs, runs each in a savepoint of one transaction, commits with a flush to disk, and
//! then replies. So an answered call survives a crash, and a disk that flushes 500 times a second serves thousands
//! of calls.

pub(crate) mod artifacts;
pub(crate) mod messages;
pub(crate) mod open;
pub(crate) mod tx;
mod writer;

use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

pub use self::open::OpenError;
pub(crate) use self::open::open;

use self::tx::{ClaimedRun, Tx};
use self::writer::{Batch, Writer};
use super::queue_error::QueueError;
use super::task_state::{RunError, WorkerIdentity};

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

impl From<RunError> for StoreError {
    fn from(error: RunError) -> Self {
        QueueError::from(error).into()
    }
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sql(error)
    }
}

/// Runs within a batch and adds its reply to it.
type Job = Box<dyn FnOnce(&mut Writer, &mut Batch) + Send>;

struct Waiter {
    queue: String,
    worker: WorkerIdentity,
    limit: u8,
    reply: oneshot::Sender<Vec<ClaimedRun>>,
    cancel: CancellationToken,
}

impl Waiter {
    fn is_gone(&self) -> bool {
        self.cancel.is_cancelled() || self.reply.is_closed()
    }
}

/// A handle. When the last one is dropped, the thread finishes its jobs and closes the database.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    jobs: mpsc::Sender<Job>,
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
        self.jobs.send(job(work, reply)).await.map_err(|_| internal_error())?;
        // No reply if the thread has ended.
        answer.await.map_err(|_| internal_error())?
    }

    /// Claims pending runs, or waits for some until `cancel`. Without a reply, the claims failed.
    pub(crate) async fn wait_for_work(
        &self,
        queue: String,
        worker: WorkerIdentity,
        limit: u8,
        cancel: CancellationToken,
    ) -> Result<oneshot::Receiver<Vec<ClaimedRun>>, QueueError> {
        let (reply, answer) = oneshot::channel();
        let waiter = Waiter { queue, worker, limit, reply, cancel };
        let job: Job = Box::new(move |writer, batch| writer.run_waiter(waiter, batch));
        self.jobs.send(job).await.map_err(|_| internal_error())?;
        Ok(answer)
    }

    /// Resolves due claims and deadlines now.
    pub(crate) async fn tick(&self) {
        // Every batch does.
        self.execute(|_| Ok(())).await.ok();
    }
}

fn job<T, F>(work: F, reply: oneshot::Sender<Result<T, QueueError>>) -> Job
where
    T: Send + 'static,
    F: Send + 'static + FnOnce(&mut Tx<'_>) -> Result<T, StoreError>,
{
    Box::new(move |writer, batch| {
        if reply.is_closed() {
            return;
        }
        let result = writer.in_savepoint(batch, work);
        // The caller may have gone.
        batch
            .replies
            .push(Box::new(move |committed| drop(reply.send(result.and_then(|done| committed.map(|()| done))))));
    })
}

#[cfg(test)]
mod tests;
