//! The store of a role: one SQLite database, one thread that owns it, and commits shared by many callers.
//!
//! The thread takes all queued jobs, runs each in a savepoint of one transaction, commits with a flush to disk, and
//! then replies. So an answered call survives a crash, and a disk that flushes 500 times a second serves thousands
//! of calls. What only reads has connections of its own, which wait for no job, and no job waits for them.

mod open;
mod readers;

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use rusqlite::{Connection, ErrorCode};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};
use uuid::Uuid;

pub use self::open::{Database, Db, OpenError, Schema};
use self::readers::Readers;

use crate::host::file_lock::FileLock;
use journeyman_domain::limits::{SQLITE_BATCH_INTERVAL, SQLITE_BATCH_MAX};

/// A role that has a store.
pub trait Owner: Sized + Send + 'static {
    /// One job's view of the store.
    type Tx<'a>;
    /// What callers are told of a failed job.
    type Error: Debug + Send + 'static;
    /// What the jobs of a batch leave to do.
    type Effects: Default;

    /// `cause` is in the log, with the incident, unless the thread has ended.
    fn store_error(cause: Option<&rusqlite::Error>, incident: Uuid) -> Self::Error;

    fn begin<'a>(&'a self, conn: &'a mut Connection) -> Self::Tx<'a>;

    /// Returns what the job leaves to do.
    fn end(tx: Self::Tx<'_>) -> Self::Effects;

    /// Called if the job succeeded.
    fn collect_effects(_of_job: Self::Effects, _effects: &mut Self::Effects) {}

    /// Called after the jobs of each batch and before its commit. Without jobs there is a batch every
    /// [`SQLITE_BATCH_INTERVAL`].
    fn end_batch(_writer: &mut Writer<Self>, _batch: &mut Batch<Self>) {}

    /// Called after the commit and the replies.
    fn committed(&mut self, _effects: Self::Effects) {}
}

#[derive(Debug)]
pub enum JobError<E> {
    Refused(Box<E>),
    Sql(rusqlite::Error),
}

impl<E> JobError<E> {
    pub fn json(error: serde_json::Error) -> Self {
        Self::Sql(rusqlite::Error::ToSqlConversionFailure(Box::new(error)))
    }
}

impl<E> From<rusqlite::Error> for JobError<E> {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sql(error)
    }
}

/// A handle. When the last one is dropped, the thread finishes its jobs and closes the database.
#[derive(Debug)]
pub struct Store<O: Owner> {
    jobs: mpsc::Sender<Job<O>>,
    /// A database in memory has none: the writer reads.
    readers: Option<Arc<Readers>>,
}

impl<O: Owner> Clone for Store<O> {
    fn clone(&self) -> Self {
        Self { jobs: self.jobs.clone(), readers: self.readers.clone() }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreStatus {
    Running,
    Closed,
    Failed(String),
}

pub struct RunningStore<O: Owner> {
    pub store: Store<O>,
    /// If the thread panics, the sender is dropped without a final status.
    pub status: watch::Receiver<StoreStatus>,
}

/// Waits for the final status, or for a panic of the thread.
pub async fn store_ended(status: &mut watch::Receiver<StoreStatus>) -> Result<StoreStatus, watch::error::RecvError> {
    status.wait_for(|status| *status != StoreStatus::Running).await.map(|status| status.clone())
}

impl<O: Owner> Store<O> {
    /// Runs a job and returns once its changes are on disk.
    ///
    /// # Cancel safety
    ///
    /// A job is skipped if the caller goes before it starts; afterwards it is done without a reply.
    pub async fn execute<T, F>(&self, work: F) -> Result<T, O::Error>
    where
        T: Send + 'static,
        F: Send + 'static + FnOnce(&mut O::Tx<'_>) -> Result<T, JobError<O::Error>>,
    {
        self.execute_erased(erase::<O, T>(work)).await.map(restore)
    }

    async fn execute_erased(&self, work: Work<O>) -> Result<Done, O::Error> {
        let (reply, answer) = oneshot::channel();
        self.send(job(work, reply)).await?;
        // No reply if the thread has ended.
        answer.await.map_err(|_| stopped::<O>())?
    }

    /// Runs work that changes nothing beside the jobs, on what was committed when it began.
    ///
    /// # Cancel safety
    ///
    /// The work is interrupted if the caller goes.
    pub async fn read<T, F>(&self, work: F) -> Result<T, O::Error>
    where
        T: Send + 'static,
        F: Send + 'static + FnOnce(&mut Connection) -> Result<T, JobError<O::Error>>,
    {
        let Some(readers) = &self.readers else {
            let (reply, answer) = oneshot::channel();
            self.send(Box::new(move |writer, _| drop(reply.send(work(&mut writer.conn))))).await?;
            return answer.await.map_err(|_| stopped::<O>())?.map_err(|error| refusal::<O>(error).0);
        };
        readers.run(work).await.map_err(|error| refusal::<O>(error).0)
    }

    /// Takes a job that does more than [`Store::execute`] allows.
    pub async fn send(&self, job: Job<O>) -> Result<(), O::Error> {
        self.jobs.send(job).await.map_err(|_| stopped::<O>())
    }
}

/// The result of a job, whose type is erased so that jobs are compiled once and not for each call.
pub type Done = Box<dyn Any + Send>;

pub type Work<O> = Box<dyn FnOnce(&mut <O as Owner>::Tx<'_>) -> Result<Done, JobError<<O as Owner>::Error>> + Send>;

pub fn erase<O: Owner, T: Send + 'static>(
    work: impl Send + 'static + FnOnce(&mut O::Tx<'_>) -> Result<T, JobError<O::Error>>,
) -> Work<O> {
    Box::new(|tx| Ok(Box::new(work(tx)?)))
}

/// Returns the result of [`erase`]'s work.
#[expect(clippy::expect_used, reason = "a caller gives both the same type")]
pub fn restore<T: 'static>(done: Done) -> T {
    *done.downcast().expect("the type that was erased")
}

pub fn job<O: Owner>(work: Work<O>, reply: oneshot::Sender<Result<Done, O::Error>>) -> Job<O> {
    Box::new(move |writer, batch| {
        if reply.is_closed() {
            return;
        }
        let result = writer.in_savepoint(batch, work);
        // The caller may be gone.
        batch
            .replies
            .push(Box::new(move |committed| drop(reply.send(result.and_then(|done| committed.map(|()| done))))));
    })
}

/// Runs within a batch and adds its reply to it.
pub type Job<O> = Box<dyn FnOnce(&mut Writer<O>, &mut Batch<O>) + Send>;

pub struct Writer<O: Owner> {
    conn: Connection,
    pub owner: O,
    /// Outlives the connection.
    _lock: Option<Arc<FileLock>>,
}

/// Is told whether the batch was committed.
type SendReply<E> = Box<dyn FnOnce(Result<(), E>) + Send>;

/// What a batch does once it is committed. If the commit fails, only the replies are sent, which say so.
pub struct Batch<O: Owner> {
    pub replies: Vec<SendReply<O::Error>>,
    pub effects: O::Effects,
    /// Stops the thread.
    fatal: Option<rusqlite::Error>,
}

impl<O: Owner> Writer<O> {
    /// Runs until the last handle is dropped.
    ///
    /// # Errors
    ///
    /// A database error that stops the owner.
    fn run(mut self, mut requests: mpsc::Receiver<Job<O>>, runtime: &Handle) -> rusqlite::Result<()> {
        loop {
            let received =
                runtime.block_on(async { tokio::time::timeout(SQLITE_BATCH_INTERVAL, requests.recv()).await });
            let first = match received {
                Ok(Some(work)) => Some(work),
                Ok(None) => return Ok(()),
                Err(_) => None,
            };
            let mut batch: Vec<Job<O>> = first.into_iter().collect();
            while batch.len() < SQLITE_BATCH_MAX
                && let Ok(work) = requests.try_recv()
            {
                batch.push(work);
            }
            self.run_batch(batch)?;
        }
    }

    pub fn run_batch(&mut self, jobs: Vec<Job<O>>) -> rusqlite::Result<()> {
        let mut batch = Batch { replies: Vec::new(), effects: O::Effects::default(), fatal: None };
        let Err(error) = self.run_in_transaction(jobs, &mut batch) else {
            batch.replies.into_iter().for_each(|reply| reply(Ok(())));
            self.owner.committed(batch.effects);
            return Ok(());
        };
        let rolled_back = if self.conn.is_autocommit() { Ok(()) } else { self.conn.execute_batch("ROLLBACK") };
        tracing::error!(%error, "cannot write to the database; is the disk full?");
        batch.replies.into_iter().for_each(|reply| reply(Err(O::store_error(Some(&error), Uuid::new_v4()))));
        if is_fatal(&error) { Err(error) } else { rolled_back }
    }

    fn run_in_transaction(&mut self, jobs: Vec<Job<O>>, batch: &mut Batch<O>) -> rusqlite::Result<()> {
        self.run_statement("BEGIN IMMEDIATE")?;
        jobs.into_iter().for_each(|job| job(self, batch));
        O::end_batch(self, batch);
        match batch.fatal.take() {
            Some(error) => Err(error),
            None => self.run_statement("COMMIT"),
        }
    }

    /// Runs work in a savepoint, so that its failure does not affect the rest of the batch.
    pub fn in_savepoint<T>(
        &mut self,
        batch: &mut Batch<O>,
        work: impl FnOnce(&mut O::Tx<'_>) -> Result<T, JobError<O::Error>>,
    ) -> Result<T, O::Error> {
        // Some errors, such as a full disk, end the whole transaction; later statements would commit on their own.
        if batch.fatal.is_some() || self.conn.is_autocommit() {
            return Err(stopped::<O>());
        }
        match self.run_savepoint(work) {
            Ok((done, effects)) => {
                O::collect_effects(effects, &mut batch.effects);
                Ok(done)
            }
            Err(error) => {
                let is_rolled_back = self.conn.is_autocommit();
                let rolled_back =
                    if is_rolled_back { Ok(()) } else { self.conn.execute_batch("ROLLBACK TO job; RELEASE job") };
                Err(Self::convert_error(rolled_back.map_err(JobError::from).err().unwrap_or(error), batch))
            }
        }
    }

    fn run_savepoint<T>(
        &mut self,
        work: impl FnOnce(&mut O::Tx<'_>) -> Result<T, JobError<O::Error>>,
    ) -> Result<(T, O::Effects), JobError<O::Error>> {
        self.run_statement("SAVEPOINT job")?;
        let mut tx = self.owner.begin(&mut self.conn);
        let done = work(&mut tx)?;
        let effects = O::end(tx);
        self.run_statement("RELEASE job")?;
        Ok((done, effects))
    }

    fn convert_error(error: JobError<O::Error>, batch: &mut Batch<O>) -> O::Error {
        let (answer, cause) = refusal::<O>(error);
        if let Some(error) = cause.filter(is_fatal) {
            batch.fatal.get_or_insert(error);
        }
        answer
    }

    fn run_statement(&self, statement: &str) -> rusqlite::Result<()> {
        self.conn.prepare_cached(statement)?.execute([]).map(drop)
    }
}

/// What the caller of a failed job is told, and the error that the log has.
fn refusal<O: Owner>(error: JobError<O::Error>) -> (O::Error, Option<rusqlite::Error>) {
    let error = match error {
        JobError::Refused(error) => return (*error, None),
        JobError::Sql(error) => error,
    };
    let incident = Uuid::new_v4();
    tracing::error!(%error, %incident, "database operation failed");
    (O::store_error(Some(&error), incident), Some(error))
}

fn stopped<O: Owner>() -> O::Error {
    O::store_error(None, Uuid::new_v4())
}

/// Corruption and I/O errors stop the owner, because no later result can be trusted. A full disk does not.
fn is_fatal(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(
            ErrorCode::SystemIoFailure
                | ErrorCode::DatabaseCorrupt
                | ErrorCode::NotADatabase
                | ErrorCode::CannotOpen
                | ErrorCode::ReadOnly
        )
    )
}
