//! The store: one SQLite file, one thread that owns it, and commits that many callers share.
//!
//! Jobs wait in a bounded channel. The thread takes all that wait, runs each inside a savepoint of one transaction,
//! commits (with the file flushed to disk), and only then answers. So an answered call survives a crash, and a disk
//! that flushes 500 times a second still serves thousands of calls.

pub(crate) mod artifacts;
mod health;
mod index;
mod keeper;
pub(crate) mod messages;
pub(crate) mod open;
pub(crate) mod room;
mod workers;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};

pub use self::open::OpenError;
pub(crate) use self::open::open;

use self::room::{Given, Room};
use super::clock::Clock;
use super::fault::Fault;
use super::rules::Worker;

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

/// How the thread that owns the file does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Life {
    Works,
    /// The last handle is gone, and the file is closed.
    Closed,
    /// The file can no longer be trusted, as this says.
    Failed(String),
}

/// The answer of a store that could not do what it was asked.
fn lost() -> Fault {
    Fault::internal(&uuid::Uuid::new_v4())
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

#[cfg(test)]
mod tests;
