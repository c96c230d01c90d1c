//! The thread that owns the file: takes what waits, runs it in one transaction, commits, and only then answers.
//!
//! It also ends claims and tasks whose time is over, and hands work to those who wait for it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};

use super::super::clock::UnixMillis;
use super::super::queue_error::QueueError;
use super::index::Index;
use super::open::{OpenedDatabase, rebuild_index};
use super::recent_workers::RecentWorkers;
use super::tx::{ClaimedRun, Tx};
use super::write_failures::{WriteFailures, is_fatal};
use super::{
    StoreConfig, StoreError, StoreJob, StoreRequest, StoreStatus, UndeliveredClaims, Waiter, WorkResult, internal_error,
};
use crate::limits::{
    QUEUE_BATCH_MAX, QUEUE_CLOCK_CHECK_INTERVAL, QUEUE_RETRY_DELAY_MIN, QUEUE_SWEEP_INTERVAL, QUEUE_WAITERS_MAX,
};

/// The thread's own state.
pub(super) struct Writer {
    conn: Connection,
    index: Index,
    workers: RecentWorkers,
    config: StoreConfig,
    waiters: HashMap<String, VecDeque<Waiter>>,
    /// Claims that nobody heard of.
    undelivered: Arc<Mutex<Vec<(String, u32)>>>,
    jobs: mpsc::WeakSender<StoreRequest>,
    pending_changed: watch::Sender<u64>,
    status: watch::Sender<StoreStatus>,
    last_sweep: Option<UnixMillis>,
    write_failures: WriteFailures,
    /// The error that ends the queue once the batch has been answered.
    fatal: Option<rusqlite::Error>,
}

/// How things stood before a batch.
struct BatchStart {
    failures: u32,
    changes: u64,
}

/// Whether a batch has reached the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CommitOutcome {
    Yes,
    No,
}

/// What is answered once the transaction has ended.
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
    reply: oneshot::Sender<Result<WorkResult, QueueError>>,
    result: Result<Option<Vec<ClaimedRun>>, QueueError>,
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
            workers: RecentWorkers::default(),
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

    /// Works until the last handle on the store is gone.
    ///
    /// # Errors
    ///
    /// Where the file can no longer be trusted. Every call that waited for it has been refused.
    pub(super) fn run(mut self, mut inbox: mpsc::Receiver<StoreRequest>, runtime: &Handle) -> rusqlite::Result<()> {
        loop {
            let pause = self.sleep_duration();
            let came = runtime.block_on(async { tokio::time::timeout(pause, inbox.recv()).await });
            let first = match came {
                Ok(Some(work)) => Some(work),
                Ok(None) => return Ok(()),
                Err(_) => None,
            };
            let mut batch: Vec<StoreRequest> = first.into_iter().collect();
            while batch.len() < QUEUE_BATCH_MAX
                && let Ok(work) = inbox.try_recv()
            {
                batch.push(work);
            }
            self.run_batch(batch)?;
        }
    }

    /// When a claim or a task has to be ended next.
    fn next_due(&self) -> Option<UnixMillis> {
        let claim = self.index.next_claim_end().map(|at| at.plus(self.config.claim_delay));
        let deadline = self.index.next_deadline().map(|at| at.plus(self.config.deadline_delay));
        [claim, deadline].into_iter().flatten().min()
    }

    fn is_due(&self) -> bool {
        self.next_due().is_some_and(|at| at <= self.config.clock.now())
    }

    /// How long the thread may sleep unless somebody wakes it.
    pub(super) fn sleep_duration(&self) -> Duration {
        if self.write_failures.failures() > 0 {
            return self.write_failures.backoff();
        }
        let now = self.config.clock.now();
        let sweep = self.last_sweep.map_or(now, |at| at.plus(QUEUE_SWEEP_INTERVAL));
        let next = self.next_due().map_or(sweep, |end| end.min(sweep));
        // The wall clock may step, and the timer stands still while the host sleeps.
        now.until(next).clamp(QUEUE_RETRY_DELAY_MIN, QUEUE_CLOCK_CHECK_INTERVAL)
    }

    pub(super) fn run_batch(&mut self, batch: Vec<StoreRequest>) -> rusqlite::Result<()> {
        let mut answers = BatchReplies::default();
        let before = BatchStart { failures: self.write_failures.failures(), changes: self.conn.total_changes() };
        if let Err(error) = self.run_statement("BEGIN IMMEDIATE") {
            let end = self.record_failure(error);
            if let Err(error) = &end {
                self.status.send_replace(StoreStatus::Failed(error.to_string()));
            }
            refuse_all(batch);
            return end;
        }
        self.revert_undelivered(&mut answers);
        for work in batch {
            match work {
                StoreRequest::Job(job) => self.run_job(job, &mut answers),
                StoreRequest::Wait(waiter) => self.run_waiter(waiter, &mut answers),
                StoreRequest::Wake => {}
                StoreRequest::Tick(reply) => answers.ticks.push(reply),
            }
        }
        self.run_due(&mut answers);
        self.serve_waiters(&mut answers);
        let ended = match self.fatal.take() {
            Some(error) => Err(error),
            None => self.run_statement("COMMIT"),
        };
        let Err(error) = ended else {
            self.send_replies(answers, CommitOutcome::Yes);
            self.record_success(before);
            return Ok(());
        };
        let back = self.roll_back();
        let end = self.record_failure(error).and(back);
        if let Err(error) = &end {
            // Before anybody is refused, so that whoever is knows why.
            self.status.send_replace(StoreStatus::Failed(error.to_string()));
        }
        self.send_replies(answers, CommitOutcome::No);
        end
    }

    /// Notes that the file failed us, and tells of it where that is news.
    ///
    /// # Errors
    ///
    /// The same error, where it ends the queue.
    fn record_failure(&mut self, error: rusqlite::Error) -> rusqlite::Result<()> {
        if is_fatal(&error) {
            return Err(error);
        }
        if self.write_failures.record_failure() {
            tracing::error!(
                %error,
                "the queue's file does not take a change; what needs it is refused, or tried again. Is its disk full?"
            );
        }
        Ok(())
    }

    fn record_success(&mut self, before: BatchStart) {
        // A batch that only read says nothing about a full disk.
        let changed = self.conn.total_changes() > before.changes;
        if changed && self.write_failures.failures() == before.failures && self.write_failures.record_success() {
            tracing::info!("the queue's file takes changes again");
        }
    }

    /// Forgets what a failed transaction has left in memory.
    fn roll_back(&mut self) -> rusqlite::Result<()> {
        if !self.conn.is_autocommit() {
            self.conn.execute_batch("ROLLBACK")?;
        }
        self.index = rebuild_index(&self.conn)?;
        Ok(())
    }

    /// Runs one piece of work in a savepoint of its own, so that its failure costs nobody else.
    fn in_savepoint<T>(
        &mut self,
        answers: &mut BatchReplies,
        work: impl FnOnce(&mut Tx<'_>) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        // Some errors, such as a full disk, end the whole transaction. What follows would then be committed alone.
        if self.fatal.is_some() || self.conn.is_autocommit() {
            return Err(internal_error().into());
        }
        let begun = self.run_statement("SAVEPOINT job");
        let mut room = Tx {
            conn: &self.conn,
            index: &mut self.index,
            workers: &mut self.workers,
            config: &self.config,
            now: self.config.clock.now(),
            moves: Vec::new(),
            queues_with_work: Vec::new(),
            files_to_remove: Vec::new(),
        };
        let end = begun.map_err(StoreError::from).and_then(|()| work(&mut room));
        let (moves, woken, orphans) = (room.moves, room.queues_with_work, room.files_to_remove);
        let end = end.and_then(|done| {
            self.run_statement("RELEASE job")?;
            Ok(done)
        });
        match end {
            Ok(done) => {
                moves.into_iter().for_each(|moved| self.index.apply(moved));
                answers.queues_with_work.extend(woken);
                answers.files_to_remove.extend(orphans);
                Ok(done)
            }
            Err(trouble) => {
                if !self.conn.is_autocommit() {
                    self.conn.execute_batch("ROLLBACK TO job; RELEASE job")?;
                }
                Err(trouble)
            }
        }
    }

    /// What a caller is told of the trouble that its job met.
    fn to_queue_error(&mut self, trouble: StoreError) -> QueueError {
        let error = match trouble {
            StoreError::Refused(fault) => return *fault,
            StoreError::Sql(error) => error,
        };
        let incident = uuid::Uuid::new_v4();
        if error.sqlite_error_code() == Some(ErrorCode::DiskFull) || is_fatal(&error) {
            self.record_file_error(error);
        } else {
            tracing::error!(%error, %incident, "a call on the queue's file failed");
        }
        QueueError::internal(&incident)
    }

    /// Notes an error of the file itself, which ends the queue at the end of the batch where it is of that kind.
    fn record_file_error(&mut self, error: rusqlite::Error) {
        if let Err(error) = self.record_failure(error) {
            self.fatal.get_or_insert(error);
        }
    }

    fn run_statement(&self, statement: &str) -> rusqlite::Result<()> {
        self.conn.prepare_cached(statement)?.execute([]).map(drop)
    }

    fn run_job(&mut self, mut job: Box<dyn StoreJob>, answers: &mut BatchReplies) {
        if !job.is_awaited() {
            return;
        }
        let end = self.in_savepoint(answers, |room| job.run(room)).map_err(|trouble| self.to_queue_error(trouble));
        answers.jobs.push(JobReply { job, result: end });
    }

    fn run_waiter(&mut self, waiter: Waiter, answers: &mut BatchReplies) {
        if waiter.reply.is_closed() {
            return;
        }
        let Waiter { queue, worker, limit: most, reply } = waiter;
        let found = self.in_savepoint(answers, |room| {
            room.workers.record_seen(&queue, &worker, room.now);
            if room.is_quarantined(&queue, &worker)? {
                return Ok(None);
            }
            room.claim_work(&queue, &worker, most).map(Some)
        });
        let found = found.map_err(|trouble| self.to_queue_error(trouble));
        if found.as_ref().is_ok_and(|found| found.as_ref().is_some_and(Vec::is_empty)) {
            let line = self.waiters.entry(queue.clone()).or_default();
            line.retain(|waiter| !waiter.reply.is_closed());
            if line.len() < QUEUE_WAITERS_MAX {
                line.push_back(Waiter { queue, worker, limit: most, reply });
                return;
            }
        }
        answers.served.push(WaiterReply { reply, result: found });
    }

    /// Gives what has become pending to those who wait for it, the longest wait first.
    fn serve_waiters(&mut self, answers: &mut BatchReplies) {
        let mut woken = answers.queues_with_work.clone();
        woken.sort_unstable();
        woken.dedup();
        for queue in woken {
            while self.index.pending_count(&queue) > 0 {
                let Some(line) = self.waiters.get_mut(&queue) else { break };
                let Some(waiter) = line.pop_front() else {
                    self.waiters.remove(&queue);
                    break;
                };
                if waiter.reply.is_closed() {
                    continue;
                }
                let found = self.in_savepoint(answers, |room| {
                    if room.is_quarantined(&queue, &waiter.worker)? {
                        return Ok(None);
                    }
                    room.claim_work(&queue, &waiter.worker, waiter.limit).map(Some)
                });
                let found = found.map_err(|trouble| self.to_queue_error(trouble));
                if found.as_ref().is_ok_and(|found| found.as_ref().is_some_and(Vec::is_empty)) {
                    if let Some(line) = self.waiters.get_mut(&queue) {
                        line.push_front(waiter);
                    }
                    break;
                }
                answers.served.push(WaiterReply { reply: waiter.reply, result: found });
            }
        }
    }

    fn revert_undelivered(&mut self, answers: &mut BatchReplies) {
        let back = std::mem::take(&mut *self.undelivered.lock().unwrap_or_else(PoisonError::into_inner));
        for (task_id, run) in back {
            // Where that fails, the claim ends by itself in time.
            let done = self.in_savepoint(answers, |room| room.revert_claim(&task_id, run));
            self.record_result(done);
        }
    }

    fn run_due(&mut self, answers: &mut BatchReplies) {
        // What fails is tried again with the next batch, or after a rest.
        if self.is_due() {
            let done = self.in_savepoint(answers, |room| room.expire_due());
            self.record_result(done);
        }
        let now = self.config.clock.now();
        // A sweep in the future was made by a clock that has since been set back.
        if self.last_sweep.is_none_or(|at| at > now || at.plus(QUEUE_SWEEP_INTERVAL) <= now) {
            let done = self.in_savepoint(answers, |room| room.remove_expired());
            self.record_result(done);
            self.last_sweep = Some(now);
        }
    }

    /// Notes how work that nobody waits for has ended.
    fn record_result(&mut self, done: Result<(), StoreError>) {
        if let Err(StoreError::Sql(error)) = done {
            self.record_file_error(error);
        }
    }

    fn send_replies(&mut self, answers: BatchReplies, committed: CommitOutcome) {
        let committed = committed == CommitOutcome::Yes;
        if committed && !answers.queues_with_work.is_empty() {
            self.pending_changed.send_modify(|count| *count += 1);
        }
        for JobReply { job, result: end } in answers.jobs {
            job.reply(if committed { end } else { Err(internal_error()) });
        }
        for WaiterReply { reply, result: found } in answers.served {
            let answer = if committed { found.map(|found| self.work_result(found)) } else { Err(internal_error()) };
            // A waiter who has left drops the claims, which takes them back.
            reply.send(answer).ok();
        }
        for reply in answers.ticks {
            reply.send(()).ok();
        }
        if committed {
            answers.files_to_remove.iter().for_each(|place| {
                super::super::artifact_files::remove(&self.config.artifacts, place);
            });
        }
    }

    fn work_result(&self, found: Option<Vec<ClaimedRun>>) -> WorkResult {
        found.map_or(WorkResult::Quarantined, |given| {
            WorkResult::Work(UndeliveredClaims {
                claims: given,
                undelivered: Arc::clone(&self.undelivered),
                jobs: self.jobs.clone(),
            })
        })
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
