//! The store: one SQLite file, one thread that owns it, and commits that many callers share.
//!
//! Jobs wait in a bounded channel. The thread takes all that wait, runs each inside a savepoint of one transaction,
//! commits (with the file flushed to disk), and only then answers. So an answered call survives a crash, and a disk
//! that flushes 500 times a second still serves thousands of calls.

pub(crate) mod artifacts;
mod index;
pub(crate) mod messages;
pub(crate) mod room;
mod workers;

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::Connection;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};

use self::index::{Index, Move, Position};
use self::room::{Given, Room, read, select};
use self::workers::Workers;
use super::clock::{Clock, Millis};
use super::fault::Fault;
use super::rules::Worker;
use crate::limits::{QUEUE_BATCH_MAX, QUEUE_JOBS_MAX, QUEUE_STATEMENTS_MAX, QUEUE_SWEEP_EVERY, QUEUE_WAITERS_MAX};

/// What the store needs to know of the settings.
#[derive(Debug, Clone)]
pub(crate) struct Knobs {
    pub(crate) claim_timeout: Duration,
    /// How long after its end a claim is resolved.
    pub(crate) claim_delay: Duration,
    /// How long after its deadline a task is resolved.
    pub(crate) deadline_delay: Duration,
    pub(crate) clock: Clock,
    pub(crate) artifacts: PathBuf,
}

/// Why a job did not come to its end.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// The caller is refused.
    Fault(Box<Fault>),
    /// The file is in trouble.
    Sql(rusqlite::Error),
}

impl Trouble {
    fn json(error: serde_json::Error) -> Self {
        Self::Sql(rusqlite::Error::ToSqlConversionFailure(Box::new(error)))
    }
}

impl From<Fault> for Trouble {
    fn from(fault: Fault) -> Self {
        Self::Fault(Box::new(fault))
    }
}

impl From<rusqlite::Error> for Trouble {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sql(error)
    }
}

/// A job, and how to answer it once its transaction has ended.
trait Job: Send {
    fn run(&mut self, room: &mut Room<'_>) -> Result<(), Trouble>;
    fn answer(self: Box<Self>, end: Result<(), Fault>);
    fn is_wanted(&self) -> bool;
}

struct Call<T, F> {
    work: Option<F>,
    done: Option<T>,
    reply: oneshot::Sender<Result<T, Fault>>,
}

impl<T: Send, F: Send + FnOnce(&mut Room<'_>) -> Result<T, Trouble>> Job for Call<T, F> {
    fn run(&mut self, room: &mut Room<'_>) -> Result<(), Trouble> {
        if let Some(work) = self.work.take() {
            self.done = Some(work(room)?);
        }
        Ok(())
    }

    fn answer(self: Box<Self>, end: Result<(), Fault>) {
        let answer = match (end, self.done) {
            (Ok(()), Some(done)) => Ok(done),
            (Err(fault), _) => Err(fault),
            (Ok(()), None) => Err(lost()),
        };
        // A caller who has left does not wait for an answer.
        self.reply.send(answer).ok();
    }

    fn is_wanted(&self) -> bool {
        !self.reply.is_closed()
    }
}

/// Somebody who waits for work.
struct Waiter {
    queue: String,
    worker: Worker,
    most: usize,
    reply: oneshot::Sender<Result<Found, Fault>>,
}

/// What a request for work found.
pub(crate) enum Found {
    Work(Grants),
    /// The worker is barred from claiming.
    Quarantined,
}

/// Claims on their way to a worker. What is dropped before it was taken goes back to its queue.
pub(crate) struct Grants {
    given: Vec<Given>,
    back: Arc<Mutex<Vec<(String, u32)>>>,
    jobs: mpsc::WeakSender<Work>,
}

impl Grants {
    /// The claims, for an answer that is now being sent.
    pub(crate) fn take(mut self) -> Vec<Given> {
        std::mem::take(&mut self.given)
    }
}

impl Drop for Grants {
    fn drop(&mut self) {
        if self.given.is_empty() {
            return;
        }
        let unheard = self.given.drain(..).map(|given| (given.task.task_id, given.run));
        self.back.lock().unwrap_or_else(PoisonError::into_inner).extend(unheard);
        if let Some(jobs) = self.jobs.upgrade() {
            // Where the channel is full, the thread is awake and looks by itself.
            jobs.try_send(Work::Wake).ok();
        }
    }
}

enum Work {
    Job(Box<dyn Job>),
    Wait(Waiter),
    Wake,
    Tick(oneshot::Sender<()>),
}

/// A handle on the store. When the last one is dropped, the thread ends what it has and closes the file.
#[derive(Clone)]
pub(crate) struct Store {
    jobs: mpsc::Sender<Work>,
    pending: watch::Receiver<u64>,
}

/// What is wrong with the file that the queue is to be kept in.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file cannot be used.
    #[error("the queue's file {path} cannot be opened; is another queue running on it, and is its folder writable?")]
    File {
        /// The file.
        path: String,
        /// What SQLite says.
        source: rusqlite::Error,
    },
    /// A newer journeyman has written the file.
    #[error(
        "the queue's file {path} has format {found}, and this journeyman knows format {FORMAT} at most; use a newer one"
    )]
    Format {
        /// The file.
        path: String,
        /// The file's format.
        found: i64,
    },
    /// The thread that owns the file could not be started.
    #[error("the thread of the queue's store could not be started")]
    Thread(#[source] std::io::Error),
}

/// The version of the tables.
const FORMAT: i64 = 1;

fn lost() -> Fault {
    Fault::internal(&uuid::Uuid::new_v4())
}

/// The queue's file, opened.
pub(crate) struct Opened {
    conn: Connection,
    index: Index,
}

/// Opens the file, or a database in memory.
pub(crate) fn open(path: Option<&Path>) -> Result<Opened, OpenError> {
    let shown = path.map_or_else(|| ":memory:".to_owned(), |path| path.display().to_string());
    let failed = |source| OpenError::File { path: shown.clone(), source };
    let conn = match path {
        Some(path) => Connection::open(path),
        None => Connection::open_in_memory(),
    }
    .map_err(failed)?;
    let prepare = || -> rusqlite::Result<i64> {
        conn.set_prepared_statement_cache_capacity(QUEUE_STATEMENTS_MAX);
        // Held for as long as we live, so that a second queue on the same file is refused at its start.
        conn.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
        conn.pragma_update(None, "journal_mode", "WAL")?;
        conn.pragma_update(None, "synchronous", "FULL")?;
        conn.execute_batch("BEGIN IMMEDIATE")?;
        let mut format = conn.pragma_query_value(None, "user_version", |row| row.get(0))?;
        if format == 0 {
            conn.execute_batch(include_str!("schema.sql"))?;
            conn.pragma_update(None, "user_version", FORMAT)?;
            format = FORMAT;
        }
        conn.execute_batch("COMMIT")?;
        Ok(format)
    };
    let found = prepare().map_err(failed)?;
    if found > FORMAT {
        return Err(OpenError::Format { path: shown, found });
    }
    let index = rebuild(&conn).map_err(failed)?;
    Ok(Opened { conn, index })
}

impl Opened {
    /// The queue's own secret; made when the file is.
    pub(crate) fn own_secret(&self) -> Result<String, OpenError> {
        let failed = |source| OpenError::File { path: "(open)".to_owned(), source };
        let fresh = format!("{}{}", super::auth::slugid(), super::auth::slugid());
        self.conn.execute("INSERT OR IGNORE INTO meta (key, value) VALUES ('secret', ?1)", [fresh]).map_err(failed)?;
        self.conn.query_row("SELECT value FROM meta WHERE key = 'secret'", [], |row| row.get(0)).map_err(failed)
    }

    /// Starts the thread that owns the file.
    pub(crate) fn start(self, knobs: Knobs, runtime: Handle) -> Result<(Store, oneshot::Receiver<()>), OpenError> {
        let (jobs, inbox) = mpsc::channel(QUEUE_JOBS_MAX);
        let (news, pending) = watch::channel(0);
        let (ended, end) = oneshot::channel();
        let keeper = Keeper {
            conn: self.conn,
            index: self.index,
            workers: Workers::default(),
            knobs,
            waiters: HashMap::new(),
            back: Arc::default(),
            jobs: jobs.downgrade(),
            news,
            swept: None,
        };
        let body = move || {
            keeper.work(inbox, &runtime);
            ended.send(()).ok();
        };
        std::thread::Builder::new().name("queue-store".to_owned()).spawn(body).map_err(OpenError::Thread)?;
        Ok((Store { jobs, pending }, end))
    }
}

fn rebuild(conn: &Connection) -> rusqlite::Result<Index> {
    let mut index = Index::default();
    let mut open = conn.prepare(&select("WHERE open = 1"))?;
    for kept in open.query_map([], read)? {
        index.apply(Move { from: Position::default(), to: kept?.position() });
    }
    Ok(index)
}

impl Store {
    /// Runs a job and answers once what it did is on disk.
    ///
    /// # Cancel safety
    ///
    /// A job whose caller leaves before it was started is skipped; after that it is done, unheard.
    pub(crate) async fn call<T, F>(&self, work: F) -> Result<T, Fault>
    where
        T: Send + 'static,
        F: Send + 'static + FnOnce(&mut Room<'_>) -> Result<T, Trouble>,
    {
        let (reply, answer) = oneshot::channel();
        let call = Call { work: Some(work), done: None, reply };
        self.jobs.send(Work::Job(Box::new(call))).await.map_err(|_| lost())?;
        answer.await.map_err(|_| lost())?
    }

    /// Asks for work, and waits for it as long as the answer is not dropped.
    pub(crate) async fn wait_for_work(
        &self,
        queue: String,
        worker: Worker,
        most: usize,
    ) -> Result<oneshot::Receiver<Result<Found, Fault>>, Fault> {
        let (reply, answer) = oneshot::channel();
        let waiter = Waiter { queue, worker, most, reply };
        self.jobs.send(Work::Wait(waiter)).await.map_err(|_| lost())?;
        Ok(answer)
    }

    /// Lets the resolvers look at the clock now. Answers when they have.
    pub(crate) async fn tick(&self) {
        let (reply, answer) = oneshot::channel();
        if self.jobs.send(Work::Tick(reply)).await.is_ok() {
            answer.await.ok();
        }
    }

    /// A number that grows each time something has become pending.
    pub(crate) fn pending(&self) -> watch::Receiver<u64> {
        self.pending.clone()
    }
}

/// The thread's own state.
struct Keeper {
    conn: Connection,
    index: Index,
    workers: Workers,
    knobs: Knobs,
    waiters: HashMap<String, VecDeque<Waiter>>,
    /// Claims that nobody heard of.
    back: Arc<Mutex<Vec<(String, u32)>>>,
    jobs: mpsc::WeakSender<Work>,
    news: watch::Sender<u64>,
    swept: Option<Millis>,
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
    fn work(mut self, mut inbox: mpsc::Receiver<Work>, runtime: &Handle) {
        loop {
            let pause = self.pause();
            let came = runtime.block_on(async { tokio::time::timeout(pause, inbox.recv()).await });
            let first = match came {
                Ok(Some(work)) => Some(work),
                Ok(None) => return,
                Err(_) => None,
            };
            let mut batch: Vec<Work> = first.into_iter().collect();
            while batch.len() < QUEUE_BATCH_MAX
                && let Ok(work) = inbox.try_recv()
            {
                batch.push(work);
            }
            self.batch(batch);
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
    fn pause(&self) -> Duration {
        let now = self.knobs.clock.now();
        let sweep = self.swept.map_or(now, |at| at.plus(QUEUE_SWEEP_EVERY));
        let next = self.next_end().map_or(sweep, |end| end.min(sweep));
        // A resolver that could not do its work must not spin.
        now.until(next).max(Duration::from_millis(10))
    }

    fn batch(&mut self, batch: Vec<Work>) {
        let mut answers = Answers::default();
        if let Err(error) = self.mark("BEGIN IMMEDIATE") {
            return refuse_all(batch, &error);
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
        let committed = self.mark("COMMIT");
        if let Err(error) = &committed {
            tracing::error!(%error, "the queue's file could not be written; calls are refused and retried by their callers");
            self.roll_back();
        }
        self.answer(answers, committed.is_ok());
    }

    /// Forgets what a failed transaction has left in memory.
    fn roll_back(&mut self) {
        if !self.conn.is_autocommit()
            && let Err(error) = self.conn.execute_batch("ROLLBACK")
        {
            tracing::error!(%error, "the queue's file could not be rolled back");
        }
        match rebuild(&self.conn) {
            Ok(index) => self.index = index,
            Err(error) => tracing::error!(%error, "the queue's file could not be read back"),
        }
    }

    /// Runs one piece of work in a savepoint of its own, so that its failure costs nobody else.
    fn alone<T>(
        &mut self,
        answers: &mut Answers,
        work: impl FnOnce(&mut Room<'_>) -> Result<T, Trouble>,
    ) -> Result<T, Fault> {
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
                let undone = self.conn.execute_batch("ROLLBACK TO job; RELEASE job");
                Err(match trouble {
                    Trouble::Fault(fault) => *fault,
                    Trouble::Sql(error) => {
                        let incident = uuid::Uuid::new_v4();
                        tracing::error!(%error, ?undone, %incident, "a call on the queue's file failed");
                        Fault::internal(&incident)
                    }
                })
            }
        }
    }

    fn mark(&self, statement: &str) -> rusqlite::Result<()> {
        self.conn.prepare_cached(statement)?.execute([]).map(drop)
    }

    fn job(&mut self, mut job: Box<dyn Job>, answers: &mut Answers) {
        if !job.is_wanted() {
            return;
        }
        let end = self.alone(answers, |room| job.run(room));
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
            // A failure is in the log, and the claim ends by itself in time.
            self.alone(answers, |room| room.unclaim(&task_id, run)).ok();
        }
    }

    fn resolve(&mut self, answers: &mut Answers) {
        // A failure is in the log, and the next round tries again.
        if self.is_due() {
            self.alone(answers, |room| room.expire()).ok();
        }
        let now = self.knobs.clock.now();
        if self.swept.is_none_or(|at| at.plus(QUEUE_SWEEP_EVERY) <= now) {
            self.alone(answers, |room| room.sweep()).ok();
            self.swept = Some(now);
        }
    }

    fn answer(&mut self, answers: Answers, committed: bool) {
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
                super::files::remove(&self.knobs.artifacts, place);
            });
        }
    }

    fn found(&self, found: Option<Vec<Given>>) -> Found {
        found.map_or(Found::Quarantined, |given| {
            Found::Work(Grants { given, back: Arc::clone(&self.back), jobs: self.jobs.clone() })
        })
    }
}

fn refuse_all(batch: Vec<Work>, error: &rusqlite::Error) {
    tracing::error!(%error, "the queue's file could not be locked for writing");
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

#[cfg(test)]
mod tests;
