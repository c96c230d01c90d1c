//! The store thread: runs queued jobs in one transaction, commits, and then replies.
//!
//! It also resolves expired claims and deadlines, and gives new work to waiting workers.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rusqlite::{Connection, ErrorCode};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};

use super::super::clock::UnixMillis;
use super::super::queue_error::QueueError;
use super::index::Index;
use super::open::{OpenedDatabase, rebuild_index};
use super::tx::{ClaimedRun, Tx};
use super::write_failures::{WriteFailures, is_fatal};
use super::{StoreConfig, StoreError, StoreJob, StoreRequest, StoreStatus, UndeliveredClaims, Waiter, internal_error};
use crate::limits::{
    QUEUE_BATCH_MAX, QUEUE_CLOCK_CHECK_INTERVAL, QUEUE_RETRY_DELAY_MIN, QUEUE_SWEEP_INTERVAL, QUEUE_WAITERS_MAX,
};

pub(super) struct Writer {
    conn: Connection,
    index: Index,
    config: StoreConfig,
    waiters: HashMap<String, VecDeque<Waiter>>,
    /// Claims whose response was not delivered.
    undelivered: Arc<Mutex<Vec<(String, u32)>>>,
    jobs: mpsc::WeakSender<StoreRequest>,
    pending_changed: watch::Sender<u64>,
    status: watch::Sender<StoreStatus>,
    last_sweep: Option<UnixMillis>,
    write_failures: WriteFailures,
    /// Stops the thread after the batch has been answered.
    fatal: Option<rusqlite::Error>,
}

struct BatchStart {
    failures: u32,
    changes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CommitOutcome {
    Yes,
    No,
}

#[derive(Default)]
struct BatchReplies {
    jobs: Vec<JobReply>,
    served: Vec<WaiterReply>,
    ticks: Vec<oneshot::Sender<()>>,
    queues_with_work: Vec<String>,
    files_to_remove: Vec<String>,
}

struct JobReply {
    job: Box<dyn StoreJob>,
    result: Result<(), QueueError>,
}

struct WaiterReply {
    reply: oneshot::Sender<Result<UndeliveredClaims, QueueError>>,
    result: Result<Vec<ClaimedRun>, QueueError>,
}

impl Writer {
    pub(super) fn new(
        opened: OpenedDatabase,
        config: StoreConfig,
        jobs: mpsc::WeakSender<StoreRequest>,
        pending_changed: watch::Sender<u64>,
        status: watch::Sender<StoreStatus>,
    ) -> Self {
        Self {
            conn: opened.conn,
            index: opened.index,
            config,
            waiters: HashMap::new(),
            undelivered: Arc::default(),
            jobs,
            pending_changed,
            status,
            last_sweep: None,
            write_failures: WriteFailures::default(),
            fatal: None,
        }
    }

    /// Runs until the last handle is dropped.
    ///
    /// # Errors
    ///
    /// A database error that stops the queue. All waiting calls have been rejected.
    pub(super) fn run(mut self, mut requests: mpsc::Receiver<StoreRequest>, runtime: &Handle) -> rusqlite::Result<()> {
        loop {
            let sleep = self.sleep_duration();
            let received = runtime.block_on(async { tokio::time::timeout(sleep, requests.recv()).await });
            let first = match received {
                Ok(Some(work)) => Some(work),
                Ok(None) => return Ok(()),
                Err(_) => None,
            };
            let mut batch: Vec<StoreRequest> = first.into_iter().collect();
            while batch.len() < QUEUE_BATCH_MAX
                && let Ok(work) = requests.try_recv()
            {
                batch.push(work);
            }
            self.run_batch(batch)?;
        }
    }

    fn next_due(&self) -> Option<UnixMillis> {
        let claim = self.index.next_claim_end().map(|at| at.plus(self.config.claim_delay));
        let deadline = self.index.next_deadline().map(|at| at.plus(self.config.deadline_delay));
        [claim, deadline].into_iter().flatten().min()
    }

    fn is_due(&self) -> bool {
        self.next_due().is_some_and(|at| at <= self.config.clock.now())
    }

    pub(super) fn sleep_duration(&self) -> Duration {
        if self.write_failures.failures() > 0 {
            return self.write_failures.backoff();
        }
        let now = self.config.clock.now();
        let sweep = self.last_sweep.map_or(now, |at| at.plus(QUEUE_SWEEP_INTERVAL));
        let next = self.next_due().map_or(sweep, |end| end.min(sweep));
        // The wall clock may step, and the timer stops during suspend.
        now.until(next).clamp(QUEUE_RETRY_DELAY_MIN, QUEUE_CLOCK_CHECK_INTERVAL)
    }

    pub(super) fn run_batch(&mut self, batch: Vec<StoreRequest>) -> rusqlite::Result<()> {
        let mut replies = BatchReplies::default();
        let before = BatchStart { failures: self.write_failures.failures(), changes: self.conn.total_changes() };
        if let Err(error) = self.run_statement("BEGIN IMMEDIATE") {
            let end = self.record_failure(error);
            if let Err(error) = &end {
                self.status.send_replace(StoreStatus::Failed(error.to_string()));
            }
            refuse_all(batch);
            return end;
        }
        self.revert_undelivered(&mut replies);
        for work in batch {
            match work {
                StoreRequest::Job(job) => self.run_job(job, &mut replies),
                StoreRequest::Wait(waiter) => self.run_waiter(waiter, &mut replies),
                StoreRequest::Wake => {}
                StoreRequest::Tick(reply) => replies.ticks.push(reply),
            }
        }
        self.run_due(&mut replies);
        self.serve_waiters(&mut replies);
        let ended = match self.fatal.take() {
            Some(error) => Err(error),
            None => self.run_statement("COMMIT"),
        };
        let Err(error) = ended else {
            self.send_replies(replies, CommitOutcome::Yes);
            self.record_success(before);
            return Ok(());
        };
        let rolled_back = self.roll_back();
        let end = self.record_failure(error).and(rolled_back);
        if let Err(error) = &end {
            // Published first, so that a rejected caller can see the reason.
            self.status.send_replace(StoreStatus::Failed(error.to_string()));
        }
        self.send_replies(replies, CommitOutcome::No);
        end
    }

    /// Records a write failure and logs the first.
    ///
    /// # Errors
    ///
    /// The same error, if it stops the queue.
    fn record_failure(&mut self, error: rusqlite::Error) -> rusqlite::Result<()> {
        if is_fatal(&error) {
            return Err(error);
        }
        if self.write_failures.record_failure() {
            tracing::error!(
                %error,
                "cannot write to the database; writes are refused until it recovers. Is the disk full?"
            );
        }
        Ok(())
    }

    fn record_success(&mut self, before: BatchStart) {
        // A read-only batch does not show that the disk has space.
        let changed = self.conn.total_changes() > before.changes;
        if changed && self.write_failures.failures() == before.failures && self.write_failures.record_success() {
            tracing::info!("the database accepts writes again");
        }
    }

    /// Rolls back and rebuilds the index.
    fn roll_back(&mut self) -> rusqlite::Result<()> {
        if !self.conn.is_autocommit() {
            self.conn.execute_batch("ROLLBACK")?;
        }
        self.index = rebuild_index(&self.conn)?;
        Ok(())
    }

    /// Runs work in a savepoint, so that its failure does not affect the rest of the batch.
    fn in_savepoint<T>(
        &mut self,
        replies: &mut BatchReplies,
        work: impl FnOnce(&mut Tx<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        // Some errors, such as a full disk, end the whole transaction; later statements would commit on their own.
        if self.fatal.is_some() || self.conn.is_autocommit() {
            return Err(internal_error().into());
        }
        let begun_savepoint = self.run_statement("SAVEPOINT job");
        let mut tx = Tx {
            conn: &self.conn,
            index: &mut self.index,
            config: &self.config,
            now: self.config.clock.now(),
            moves: Vec::new(),
            queues_with_work: Vec::new(),
            files_to_remove: Vec::new(),
        };
        let end = begun_savepoint.map_err(StoreError::from).and_then(|()| work(&mut tx));
        let (moves, queues, files) = (tx.moves, tx.queues_with_work, tx.files_to_remove);
        let end = end.and_then(|done| {
            self.run_statement("RELEASE job")?;
            Ok(done)
        });
        match end {
            Ok(done) => {
                moves.into_iter().for_each(|moved| self.index.apply(moved));
                replies.queues_with_work.extend(queues);
                replies.files_to_remove.extend(files);
                Ok(done)
            }
            Err(error) => {
                if !self.conn.is_autocommit() {
                    self.conn.execute_batch("ROLLBACK TO job; RELEASE job")?;
                }
                Err(error)
            }
        }
    }

    fn convert_error(&mut self, error: StoreError) -> QueueError {
        let error = match error {
            StoreError::Refused(error) => return *error,
            StoreError::Sql(error) => error,
        };
        let incident = uuid::Uuid::new_v4();
        if error.sqlite_error_code() == Some(ErrorCode::DiskFull) || is_fatal(&error) {
            self.record_file_error(error);
        } else {
            tracing::error!(%error, %incident, "database operation failed");
        }
        QueueError::internal(&incident)
    }

    /// Records an error of the database; a fatal one stops the queue after the batch.
    fn record_file_error(&mut self, error: rusqlite::Error) {
        if let Err(error) = self.record_failure(error) {
            self.fatal.get_or_insert(error);
        }
    }

    fn run_statement(&self, statement: &str) -> rusqlite::Result<()> {
        self.conn.prepare_cached(statement)?.execute([]).map(drop)
    }

    fn run_job(&mut self, mut job: Box<dyn StoreJob>, replies: &mut BatchReplies) {
        if !job.is_awaited() {
            return;
        }
        let end = self.in_savepoint(replies, |tx| job.run(tx)).map_err(|error| self.convert_error(error));
        replies.jobs.push(JobReply { job, result: end });
    }

    fn run_waiter(&mut self, waiter: Waiter, replies: &mut BatchReplies) {
        if waiter.reply.is_closed() {
            return;
        }
        let Waiter { queue, worker, limit, reply } = waiter;
        let found = self.in_savepoint(replies, |tx| tx.claim_work(&queue, &worker, limit));
        let found = found.map_err(|error| self.convert_error(error));
        if found.as_ref().is_ok_and(Vec::is_empty) {
            let waiters = self.waiters.entry(queue.clone()).or_default();
            waiters.retain(|waiter| !waiter.reply.is_closed());
            if waiters.len() < QUEUE_WAITERS_MAX {
                waiters.push_back(Waiter { queue, worker, limit, reply });
                return;
            }
        }
        replies.served.push(WaiterReply { reply, result: found });
    }

    /// Longest wait first.
    fn serve_waiters(&mut self, replies: &mut BatchReplies) {
        let mut queues = replies.queues_with_work.clone();
        queues.sort_unstable();
        queues.dedup();
        for queue in queues {
            while self.index.pending_count(&queue) > 0 {
                let Some(waiters) = self.waiters.get_mut(&queue) else { break };
                let Some(waiter) = waiters.pop_front() else {
                    self.waiters.remove(&queue);
                    break;
                };
                if waiter.reply.is_closed() {
                    continue;
                }
                let found = self.in_savepoint(replies, |tx| tx.claim_work(&queue, &waiter.worker, waiter.limit));
                let found = found.map_err(|error| self.convert_error(error));
                if found.as_ref().is_ok_and(Vec::is_empty) {
                    if let Some(waiters) = self.waiters.get_mut(&queue) {
                        waiters.push_front(waiter);
                    }
                    break;
                }
                replies.served.push(WaiterReply { reply: waiter.reply, result: found });
            }
        }
    }

    fn revert_undelivered(&mut self, replies: &mut BatchReplies) {
        let undelivered = std::mem::take(&mut *self.undelivered.lock());
        for (task_id, run) in undelivered {
            // On failure, the claim expires.
            let done = self.in_savepoint(replies, |tx| tx.revert_claim(&task_id, run));
            self.record_result(done);
        }
    }

    fn run_due(&mut self, replies: &mut BatchReplies) {
        // Failures are retried with the next batch or after a backoff.
        if self.is_due() {
            let done = self.in_savepoint(replies, |tx| tx.expire_due());
            self.record_result(done);
        }
        let now = self.config.clock.now();
        // The clock may have been set back since the last sweep.
        if self.last_sweep.is_none_or(|at| at > now || at.plus(QUEUE_SWEEP_INTERVAL) <= now) {
            let done = self.in_savepoint(replies, |tx| tx.remove_expired());
            self.record_result(done);
            self.last_sweep = Some(now);
        }
    }

    fn record_result(&mut self, done: Result<(), StoreError>) {
        if let Err(StoreError::Sql(error)) = done {
            self.record_file_error(error);
        }
    }

    fn send_replies(&mut self, replies: BatchReplies, committed: CommitOutcome) {
        let committed = committed == CommitOutcome::Yes;
        if committed && !replies.queues_with_work.is_empty() {
            self.pending_changed.send_modify(|count| *count += 1);
        }
        for JobReply { job, result: end } in replies.jobs {
            job.reply(if committed { end } else { Err(internal_error()) });
        }
        for WaiterReply { reply, result: found } in replies.served {
            let answer =
                if committed { found.map(|claims| self.undelivered_claims(claims)) } else { Err(internal_error()) };
            // If the receiver is gone, the claims are dropped, which reverts them.
            reply.send(answer).ok();
        }
        for reply in replies.ticks {
            reply.send(()).ok();
        }
        if committed {
            replies.files_to_remove.iter().for_each(|path| {
                super::super::artifact_files::remove(&self.config.artifacts, path);
            });
        }
    }

    fn undelivered_claims(&self, claims: Vec<ClaimedRun>) -> UndeliveredClaims {
        UndeliveredClaims { claims, undelivered: Arc::clone(&self.undelivered), jobs: self.jobs.clone() }
    }
}

fn refuse_all(batch: Vec<StoreRequest>) {
    for work in batch {
        match work {
            StoreRequest::Job(job) => job.reply(Err(internal_error())),
            StoreRequest::Wait(waiter) => {
                waiter.reply.send(Err(internal_error())).ok();
            }
            StoreRequest::Tick(_) | StoreRequest::Wake => {}
        }
    }
}
