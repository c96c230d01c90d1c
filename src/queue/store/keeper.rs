//! The thread that owns the file: takes what waits, runs it in one transaction, commits, and only then answers.
//!
//! It also ends claims and tasks whose time is over, and hands work to those who wait for it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};

use super::super::clock::Millis;
use super::super::fault::Fault;
use super::health::{Health, is_fatal};
use super::index::Index;
use super::open::{Opened, rebuild};
use super::room::{Given, Room};
use super::workers::Workers;
use super::{Found, Grants, Job, Knobs, Life, Trouble, Waiter, Work, lost};
use crate::limits::{QUEUE_BATCH_MAX, QUEUE_LOOK_EVERY, QUEUE_REST_MIN, QUEUE_SWEEP_EVERY, QUEUE_WAITERS_MAX};

/// The thread's own state.
pub(super) struct Keeper {
    conn: Connection,
    index: Index,
    workers: Workers,
    knobs: Knobs,
    waiters: HashMap<String, VecDeque<Waiter>>,
    /// Claims that nobody heard of.
    back: Arc<Mutex<Vec<(String, u32)>>>,
    jobs: mpsc::WeakSender<Work>,
    news: watch::Sender<u64>,
    alive: watch::Sender<Life>,
    swept: Option<Millis>,
    health: Health,
    /// The error that ends the queue once the batch has been answered.
    fatal: Option<rusqlite::Error>,
}

/// How things stood before a batch.
struct Before {
    failures: u32,
    changes: u64,
}

/// Whether a batch has reached the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Committed {
    Yes,
    No,
}

/// What is answered once the transaction has ended.
#[derive(Default)]
struct Answers {
    jobs: Vec<Answer>,
    served: Vec<Served>,
    ticks: Vec<oneshot::Sender<()>>,
    woken: Vec<String>,
    orphans: Vec<String>,
}

struct Answer {
    job: Box<dyn Job>,
    end: Result<(), Fault>,
}

struct Served {
    reply: oneshot::Sender<Result<Found, Fault>>,
    found: Result<Option<Vec<Given>>, Fault>,
}

impl Keeper {
    pub(super) fn new(
        opened: Opened,
        knobs: Knobs,
        jobs: mpsc::WeakSender<Work>,
        news: watch::Sender<u64>,
        alive: watch::Sender<Life>,
    ) -> Self {
        Self {
            conn: opened.conn,
            index: opened.index,
            workers: Workers::default(),
            knobs,
            waiters: HashMap::new(),
            back: Arc::default(),
            jobs,
            news,
            alive,
            swept: None,
            health: Health::default(),
            fatal: None,
        }
    }

    /// Works until the last handle on the store is gone.
    ///
    /// # Errors
    ///
    /// Where the file can no longer be trusted. Every call that waited for it has been refused.
    pub(super) fn work(mut self, mut inbox: mpsc::Receiver<Work>, runtime: &Handle) -> rusqlite::Result<()> {
        loop {
            let pause = self.pause();
            let came = runtime.block_on(async { tokio::time::timeout(pause, inbox.recv()).await });
            let first = match came {
                Ok(Some(work)) => Some(work),
                Ok(None) => return Ok(()),
                Err(_) => None,
            };
            let mut batch: Vec<Work> = first.into_iter().collect();
            while batch.len() < QUEUE_BATCH_MAX
                && let Ok(work) = inbox.try_recv()
            {
                batch.push(work);
            }
            self.batch(batch)?;
        }
    }

    /// When a claim or a task has to be ended next.
    fn next_end(&self) -> Option<Millis> {
        let claim = self.index.next_claim_end().map(|at| at.plus(self.knobs.claim_delay));
        let deadline = self.index.next_deadline().map(|at| at.plus(self.knobs.deadline_delay));
        [claim, deadline].into_iter().flatten().min()
    }

    fn is_due(&self) -> bool {
        self.next_end().is_some_and(|at| at <= self.knobs.clock.now())
    }

    /// How long the thread may sleep unless somebody wakes it.
    pub(super) fn pause(&self) -> Duration {
        if self.health.failures() > 0 {
            return self.health.rest();
        }
        let now = self.knobs.clock.now();
        let sweep = self.swept.map_or(now, |at| at.plus(QUEUE_SWEEP_EVERY));
        let next = self.next_end().map_or(sweep, |end| end.min(sweep));
        // The wall clock may step, and the timer stands still while the host sleeps.
        now.until(next).clamp(QUEUE_REST_MIN, QUEUE_LOOK_EVERY)
    }

    pub(super) fn batch(&mut self, batch: Vec<Work>) -> rusqlite::Result<()> {
        let mut answers = Answers::default();
        let before = Before { failures: self.health.failures(), changes: self.conn.total_changes() };
        if let Err(error) = self.mark("BEGIN IMMEDIATE") {
            let end = self.sick(error);
            if let Err(error) = &end {
                self.alive.send_replace(Life::Failed(error.to_string()));
            }
            refuse_all(batch);
            return end;
        }
        self.take_back(&mut answers);
        for work in batch {
            match work {
                Work::Job(job) => self.job(job, &mut answers),
                Work::Wait(waiter) => self.wait(waiter, &mut answers),
                Work::Wake => {}
                Work::Tick(reply) => answers.ticks.push(reply),
            }
        }
        self.resolve(&mut answers);
        self.serve_waiters(&mut answers);
        let ended = match self.fatal.take() {
            Some(error) => Err(error),
            None => self.mark("COMMIT"),
        };
        let Err(error) = ended else {
            self.answer(answers, Committed::Yes);
            self.note_success(before);
            return Ok(());
        };
        let back = self.roll_back();
        let end = self.sick(error).and(back);
        if let Err(error) = &end {
            // Before anybody is refused, so that whoever is knows why.
            self.alive.send_replace(Life::Failed(error.to_string()));
        }
        self.answer(answers, Committed::No);
        end
    }

    /// Notes that the file failed us, and tells of it where that is news.
    ///
    /// # Errors
    ///
    /// The same error, where it ends the queue.
    fn sick(&mut self, error: rusqlite::Error) -> rusqlite::Result<()> {
        if is_fatal(&error) {
            return Err(error);
        }
        if self.health.failed() {
            tracing::error!(
                %error,
                "the queue's file does not take a change; what needs it is refused, or tried again. Is its disk full?"
            );
        }
        Ok(())
    }

    fn note_success(&mut self, before: Before) {
        // A batch that only read says nothing about a full disk.
        let changed = self.conn.total_changes() > before.changes;
        if changed && self.health.failures() == before.failures && self.health.well() {
            tracing::info!("the queue's file takes changes again");
        }
    }

    /// Forgets what a failed transaction has left in memory.
    fn roll_back(&mut self) -> rusqlite::Result<()> {
        if !self.conn.is_autocommit() {
            self.conn.execute_batch("ROLLBACK")?;
        }
        self.index = rebuild(&self.conn)?;
        Ok(())
    }

    /// Runs one piece of work in a savepoint of its own, so that its failure costs nobody else.
    fn alone<T>(
        &mut self,
        answers: &mut Answers,
        work: impl FnOnce(&mut Room<'_>) -> Result<T, Trouble>,
    ) -> Result<T, Trouble> {
        // Some errors, such as a full disk, end the whole transaction. What follows would then be committed alone.
        if self.fatal.is_some() || self.conn.is_autocommit() {
            return Err(lost().into());
        }
        let begun = self.mark("SAVEPOINT job");
        let mut room = Room {
            conn: &self.conn,
            index: &mut self.index,
            workers: &mut self.workers,
            knobs: &self.knobs,
            now: self.knobs.clock.now(),
            moves: Vec::new(),
            woken: Vec::new(),
            orphans: Vec::new(),
        };
        let end = begun.map_err(Trouble::from).and_then(|()| work(&mut room));
        let (moves, woken, orphans) = (room.moves, room.woken, room.orphans);
        let end = end.and_then(|done| {
            self.mark("RELEASE job")?;
            Ok(done)
        });
        match end {
            Ok(done) => {
                moves.into_iter().for_each(|moved| self.index.apply(moved));
                answers.woken.extend(woken);
                answers.orphans.extend(orphans);
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
    fn refusal(&mut self, trouble: Trouble) -> Fault {
        let error = match trouble {
            Trouble::Fault(fault) => return *fault,
            Trouble::Sql(error) => error,
        };
        let incident = uuid::Uuid::new_v4();
        if error.sqlite_error_code() == Some(ErrorCode::DiskFull) || is_fatal(&error) {
            self.unfit(error);
        } else {
            tracing::error!(%error, %incident, "a call on the queue's file failed");
        }
        Fault::internal(&incident)
    }

    /// Notes an error of the file itself, which ends the queue at the end of the batch where it is of that kind.
    fn unfit(&mut self, error: rusqlite::Error) {
        if let Err(error) = self.sick(error) {
            self.fatal.get_or_insert(error);
        }
    }

    fn mark(&self, statement: &str) -> rusqlite::Result<()> {
        self.conn.prepare_cached(statement)?.execute([]).map(drop)
    }

    fn job(&mut self, mut job: Box<dyn Job>, answers: &mut Answers) {
        if !job.is_wanted() {
            return;
        }
        let end = self.alone(answers, |room| job.run(room)).map_err(|trouble| self.refusal(trouble));
        answers.jobs.push(Answer { job, end });
    }

    fn wait(&mut self, waiter: Waiter, answers: &mut Answers) {
        if waiter.reply.is_closed() {
            return;
        }
        let Waiter { queue, worker, most, reply } = waiter;
        let found = self.alone(answers, |room| {
            room.workers.seen(&queue, &worker, room.now);
            if room.is_quarantined(&queue, &worker)? {
                return Ok(None);
            }
            room.claim_work(&queue, &worker, most).map(Some)
        });
        let found = found.map_err(|trouble| self.refusal(trouble));
        if found.as_ref().is_ok_and(|found| found.as_ref().is_some_and(Vec::is_empty)) {
            let line = self.waiters.entry(queue.clone()).or_default();
            line.retain(|waiter| !waiter.reply.is_closed());
            if line.len() < QUEUE_WAITERS_MAX {
                line.push_back(Waiter { queue, worker, most, reply });
                return;
            }
        }
        answers.served.push(Served { reply, found });
    }

    /// Gives what has become pending to those who wait for it, the longest wait first.
    fn serve_waiters(&mut self, answers: &mut Answers) {
        let mut woken = answers.woken.clone();
        woken.sort_unstable();
        woken.dedup();
        for queue in woken {
            while self.index.count(&queue) > 0 {
                let Some(line) = self.waiters.get_mut(&queue) else { break };
                let Some(waiter) = line.pop_front() else {
                    self.waiters.remove(&queue);
                    break;
                };
                if waiter.reply.is_closed() {
                    continue;
                }
                let found = self.alone(answers, |room| {
                    if room.is_quarantined(&queue, &waiter.worker)? {
                        return Ok(None);
                    }
                    room.claim_work(&queue, &waiter.worker, waiter.most).map(Some)
                });
                let found = found.map_err(|trouble| self.refusal(trouble));
                if found.as_ref().is_ok_and(|found| found.as_ref().is_some_and(Vec::is_empty)) {
                    if let Some(line) = self.waiters.get_mut(&queue) {
                        line.push_front(waiter);
                    }
                    break;
                }
                answers.served.push(Served { reply: waiter.reply, found });
            }
        }
    }

    fn take_back(&mut self, answers: &mut Answers) {
        let back = std::mem::take(&mut *self.back.lock().unwrap_or_else(PoisonError::into_inner));
        for (task_id, run) in back {
            // Where that fails, the claim ends by itself in time.
            let done = self.alone(answers, |room| room.unclaim(&task_id, run));
            self.note(done);
        }
    }

    fn resolve(&mut self, answers: &mut Answers) {
        // What fails is tried again with the next batch, or after a rest.
        if self.is_due() {
            let done = self.alone(answers, |room| room.expire());
            self.note(done);
        }
        let now = self.knobs.clock.now();
        // A sweep in the future was made by a clock that has since been set back.
        if self.swept.is_none_or(|at| at > now || at.plus(QUEUE_SWEEP_EVERY) <= now) {
            let done = self.alone(answers, |room| room.sweep());
            self.note(done);
            self.swept = Some(now);
        }
    }

    /// Notes how work that nobody waits for has ended.
    fn note(&mut self, done: Result<(), Trouble>) {
        if let Err(Trouble::Sql(error)) = done {
            self.unfit(error);
        }
    }

    fn answer(&mut self, answers: Answers, committed: Committed) {
        let committed = committed == Committed::Yes;
        if committed && !answers.woken.is_empty() {
            self.news.send_modify(|count| *count += 1);
        }
        for Answer { job, end } in answers.jobs {
            job.answer(if committed { end } else { Err(lost()) });
        }
        for Served { reply, found } in answers.served {
            let answer = if committed { found.map(|found| self.found(found)) } else { Err(lost()) };
            // A waiter who has left drops the claims, which takes them back.
            reply.send(answer).ok();
        }
        for reply in answers.ticks {
            reply.send(()).ok();
        }
        if committed {
            answers.orphans.iter().for_each(|place| {
                super::super::files::remove(&self.knobs.artifacts, place);
            });
        }
    }

    fn found(&self, found: Option<Vec<Given>>) -> Found {
        found.map_or(Found::Quarantined, |given| {
            Found::Work(Grants { given, back: Arc::clone(&self.back), jobs: self.jobs.clone() })
        })
    }
}

fn refuse_all(batch: Vec<Work>) {
    for work in batch {
        match work {
            Work::Job(job) => job.answer(Err(lost())),
            Work::Wait(waiter) => {
                waiter.reply.send(Err(lost())).ok();
            }
            Work::Tick(_) | Work::Wake => {}
        }
    }
}
