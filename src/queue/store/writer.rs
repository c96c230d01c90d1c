//! The store thread: runs queued jobs in one transaction, commits, and then replies.
//!
//! It also resolves expired claims and deadlines, and gives new work to waiting workers.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use rusqlite::{Connection, ErrorCode};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::super::Config;
use super::super::queue_error::{QueueError, QueueErrorCode};
use super::open::OpenedDatabase;
use super::tx::Tx;
use super::{Job, StoreError, Waiter, internal_error};
use crate::limits::{QUEUE_BATCH_MAX, QUEUE_EXPIRY_INTERVAL};

pub(super) struct Writer {
    conn: Connection,
    config: Arc<Config>,
    waiters: HashMap<String, VecDeque<Waiter>>,
}

/// Is told whether the batch was committed.
type SendReply = Box<dyn FnOnce(Result<(), QueueError>) + Send>;

/// What a batch does once it is committed. If the commit fails, only the replies are sent, which say so.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) replies: Vec<SendReply>,
    queues_with_work: Vec<String>,
    files_to_remove: Vec<String>,
    /// Stops the thread.
    fatal: Option<rusqlite::Error>,
}

impl Writer {
    pub(super) fn new(opened: OpenedDatabase, config: Arc<Config>) -> Self {
        Self { conn: opened.conn, config, waiters: HashMap::new() }
    }

    /// Runs until the last handle is dropped.
    ///
    /// # Errors
    ///
    /// A database error that stops the queue.
    pub(super) fn run(mut self, mut requests: mpsc::Receiver<Job>, runtime: &Handle) -> rusqlite::Result<()> {
        loop {
            let received =
                runtime.block_on(async { tokio::time::timeout(QUEUE_EXPIRY_INTERVAL, requests.recv()).await });
            let first = match received {
                Ok(Some(work)) => Some(work),
                Ok(None) => return Ok(()),
                Err(_) => None,
            };
            let mut batch: Vec<Job> = first.into_iter().collect();
            while batch.len() < QUEUE_BATCH_MAX
                && let Ok(work) = requests.try_recv()
            {
                batch.push(work);
            }
            self.run_batch(batch)?;
        }
    }

    pub(super) fn run_batch(&mut self, jobs: Vec<Job>) -> rusqlite::Result<()> {
        let mut batch = Batch::default();
        let Err(error) = self.run_in_transaction(jobs, &mut batch) else {
            self.finish(batch);
            return Ok(());
        };
        let rolled_back = if self.conn.is_autocommit() { Ok(()) } else { self.conn.execute_batch("ROLLBACK") };
        tracing::error!(%error, "cannot write to the database; is the disk full?");
        batch.replies.into_iter().for_each(|reply| reply(Err(write_error(&error, uuid::Uuid::new_v4()))));
        if is_fatal(&error) { Err(error) } else { rolled_back }
    }

    fn run_in_transaction(&mut self, jobs: Vec<Job>, batch: &mut Batch) -> rusqlite::Result<()> {
        self.run_statement("BEGIN IMMEDIATE")?;
        jobs.into_iter().for_each(|job| job(self, batch));
        if let Err(error) = self.in_savepoint(batch, |tx| tx.expire_due().and_then(|()| tx.remove_expired())) {
            tracing::error!(?error, "cannot resolve and remove expired tasks; the next batch tries again");
        }
        self.serve_waiters(batch);
        match batch.fatal.take() {
            Some(error) => Err(error),
            None => self.run_statement("COMMIT"),
        }
    }

    /// Runs work in a savepoint, so that its failure does not affect the rest of the batch.
    pub(super) fn in_savepoint<T>(
        &mut self,
        batch: &mut Batch,
        work: impl FnOnce(&mut Tx<'_>) -> Result<T, StoreError>,
    ) -> Result<T, QueueError> {
        // Some errors, such as a full disk, end the whole transaction; later statements would commit on their own.
        if batch.fatal.is_some() || self.conn.is_autocommit() {
            return Err(internal_error());
        }
        let mut tx = Tx {
            conn: &self.conn,
            config: &self.config,
            now: self.config.clock.now(),
            queues_with_work: Vec::new(),
            files_to_remove: Vec::new(),
        };
        let run = |statement| -> Result<usize, StoreError> { Ok(self.conn.prepare_cached(statement)?.execute([])?) };
        let end = run("SAVEPOINT job").and_then(|_| work(&mut tx)).and_then(|done| run("RELEASE job").map(|_| done));
        let (queues, files) = (tx.queues_with_work, tx.files_to_remove);
        match end {
            Ok(done) => {
                batch.queues_with_work.extend(queues);
                batch.files_to_remove.extend(files);
                Ok(done)
            }
            Err(error) => {
                let is_rolled_back = self.conn.is_autocommit();
                let rolled_back =
                    if is_rolled_back { Ok(()) } else { self.conn.execute_batch("ROLLBACK TO job; RELEASE job") };
                Err(Self::convert_error(rolled_back.map_err(StoreError::from).err().unwrap_or(error), batch))
            }
        }
    }

    fn convert_error(error: StoreError, batch: &mut Batch) -> QueueError {
        let error = match error {
            StoreError::Refused(error) => return *error,
            StoreError::Sql(error) => error,
        };
        let incident = uuid::Uuid::new_v4();
        tracing::error!(%error, %incident, "database operation failed");
        let answer = write_error(&error, incident);
        if is_fatal(&error) {
            batch.fatal.get_or_insert(error);
        }
        answer
    }

    fn run_statement(&self, statement: &str) -> rusqlite::Result<()> {
        self.conn.prepare_cached(statement)?.execute([]).map(drop)
    }

    pub(super) fn run_waiter(&mut self, waiter: Waiter, batch: &mut Batch) {
        if let Some(waiter) = self.claim_for(waiter, batch) {
            // At most one for each connection.
            let waiters = self.waiters.entry(waiter.queue.clone()).or_default();
            waiters.retain(|waiter| !waiter.is_gone());
            waiters.push_back(waiter);
        }
    }

    /// Longest wait first.
    fn serve_waiters(&mut self, batch: &mut Batch) {
        let mut queues = batch.queues_with_work.clone();
        queues.sort_unstable();
        queues.dedup();
        for queue in queues {
            let Some(mut waiters) = self.waiters.remove(&queue) else { continue };
            while let Some(waiter) = waiters.pop_front() {
                if let Some(waiter) = self.claim_for(waiter, batch) {
                    waiters.push_front(waiter);
                    break;
                }
            }
            if !waiters.is_empty() {
                self.waiters.insert(queue, waiters);
            }
        }
    }

    /// Returns the waiter if it has to wait for work.
    fn claim_for(&mut self, waiter: Waiter, batch: &mut Batch) -> Option<Waiter> {
        if waiter.is_gone() {
            return None;
        }
        let claims = self.in_savepoint(batch, |tx| tx.claim_work(&waiter.queue, &waiter.worker, waiter.limit)).ok()?;
        if claims.is_empty() {
            return Some(waiter);
        }
        // If the receiver is gone, the claims expire, or their worker recovers them.
        batch.replies.push(Box::new(move |committed| drop(committed.map(|()| waiter.reply.send(claims)))));
        None
    }

    fn finish(&self, batch: Batch) {
        batch.replies.into_iter().for_each(|reply| reply(Ok(())));
        for path in &batch.files_to_remove {
            super::super::artifact_files::remove(&self.config.artifacts, path);
        }
    }
}

/// Callers may be told that the disk is full, and nothing else.
fn write_error(error: &rusqlite::Error, incident: uuid::Uuid) -> QueueError {
    if error.sqlite_error_code() == Some(ErrorCode::DiskFull) {
        return QueueError::new(QueueErrorCode::InsufficientStorage, "disk full: the queue cannot write its database");
    }
    QueueError::internal(&incident)
}

/// Corruption and I/O errors stop the queue, because no later result can be trusted. A full disk does not.
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
