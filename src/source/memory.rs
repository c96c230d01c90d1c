//! A queue in memory, and the source that claims from it: for tests of handlers and of programs that embed a worker.
//!
//! It keeps the rules of the real queues (leases that end, one outcome, retries, redelivery, priorities) on a clock it
//! is given, and nothing else of them: no network, no credentials, no durability.

mod recovery;
mod tasks;

use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::sync::Notify;

use tasks::{Task, Tasks, named};

use crate::domain::id::{Lane, Run, TaskId};
use crate::domain::outcome::{Outcome, Reason};
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;
use crate::limits::MEMORY_ARTIFACT_BYTES_MAX;
use crate::source::{
    Answer, Artifact, ArtifactBody, Batch, Claim, Grant, Manner, Message, Opened, Recovered, Refused, Source, Window,
};

/// The priorities of tasks, highest first; each is a lane.
pub const PRIORITIES: [&str; 7] = ["highest", "very-high", "high", "medium", "low", "very-low", "lowest"];

/// What time it is, on a clock that never steps back.
pub type Clock = Arc<dyn Fn() -> Instant + Send + Sync>;

/// How a queue hands out its tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// As messages that lead to a claim, in one lane a priority.
    Messages {
        /// How long a received message stays hidden from others.
        hidden: Duration,
    },
    /// As claims, by a poll that waits for one.
    Claims {
        /// How long a poll waits.
        patience: Duration,
    },
}

/// How a queue behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// How tasks are handed out.
    pub style: Style,
    /// How long a claim lasts.
    pub lease: Duration,
    /// How often a task is retried, where its definition does not say.
    pub retries: u32,
}

impl Default for Settings {
    /// Claims of 20 minutes by a poll that waits 20 seconds, and 5 retries, as Taskcluster has it.
    fn default() -> Self {
        Self {
            style: Style::Claims { patience: Duration::from_secs(20) },
            lease: Duration::from_secs(20 * 60),
            retries: 5,
        }
    }
}

/// How far a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It waits for a worker.
    Pending,
    /// A worker has claimed it.
    Running,
    /// It was reported so, or ended as an exception for the reason given.
    Resolved(End),
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// As its worker reported.
    Reported(Outcome),
    /// Its worker let the claim expire.
    ClaimExpired,
    /// Somebody canceled the task.
    Canceled,
}

/// A task of this id exists already.
#[derive(Debug, thiserror::Error)]
#[error("task {0} exists already")]
pub struct Exists(pub TaskId);

/// A stored artifact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Its media type; empty for errors.
    pub content_type: String,
    /// What it is.
    pub what: StoredBody,
}

/// What a stored artifact is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoredBody {
    /// Content.
    Content(Vec<u8>),
    /// Another artifact of the same run.
    Link(String),
    /// A place elsewhere.
    Reference(String),
    /// Why it is not there.
    Error {
        /// The reason.
        reason: &'static str,
        /// The sentence.
        message: String,
    },
}

/// A queue in memory. Clones are the same queue.
#[derive(Clone)]
pub struct Queue(Arc<Shared>);

struct Shared {
    settings: Settings,
    clock: Clock,
    state: Mutex<Tasks>,
    woken: Notify,
}

impl Queue {
    /// An empty queue.
    #[must_use]
    pub fn new(settings: Settings, clock: Clock) -> Self {
        Self(Arc::new(Shared { settings, clock, state: Mutex::default(), woken: Notify::new() }))
    }

    /// Adds a task. Of its definition, `priority` (default `lowest`) and `retries` are looked at.
    ///
    /// # Errors
    ///
    /// Where there is a task of this id.
    pub fn create(&self, task: TaskId, definition: Value) -> Result<(), Exists> {
        let now = self.now();
        let mut tasks = self.settled(now);
        if tasks.tasks.contains_key(&task) {
            return Err(Exists(task));
        }
        let named = definition.get("priority").and_then(Value::as_str);
        let lane = PRIORITIES.iter().position(|name| Some(*name) == named).unwrap_or(PRIORITIES.len() - 1);
        let retries = definition.get("retries").and_then(Value::as_u64);
        let retries_left = retries.and_then(|count| count.try_into().ok()).unwrap_or(self.0.settings.retries);
        tasks.tasks.insert(task.clone(), Task { definition, lane, retries_left, runs: Vec::new() });
        tasks.schedule(&task, now);
        drop(tasks);
        self.0.woken.notify_waiters();
        Ok(())
    }

    /// Adds an entry that nothing can be made of.
    pub fn put_unreadable(&self, lane: Lane) {
        let now = self.now();
        self.settled(now).push(usize::from(lane.0).min(PRIORITIES.len() - 1), None, now);
        self.0.woken.notify_waiters();
    }

    /// Cancels a task. Nothing happens where it is resolved already.
    pub fn cancel(&self, task: &TaskId) {
        let mut tasks = self.settled(self.now());
        tasks.resolve(task, End::Canceled);
    }

    /// The states of a task's runs, the first run first; empty where there is no such task.
    #[must_use]
    pub fn states(&self, task: &TaskId) -> Vec<State> {
        let tasks = self.settled(self.now());
        tasks.tasks.get(task).map_or_else(Vec::new, |task| task.runs.iter().map(|run| run.state).collect())
    }

    /// What a run left behind under a name.
    #[must_use]
    pub fn artifact(&self, run: &Run, name: &str) -> Option<Stored> {
        let tasks = self.settled(self.now());
        tasks.run(run)?.artifacts.get(name).cloned()
    }

    /// A source that claims from this queue as `worker`.
    #[must_use]
    pub fn source(&self, worker: &str) -> Memory {
        Memory { queue: self.clone(), worker: worker.into() }
    }

    fn now(&self) -> Instant {
        (self.0.clock)()
    }

    /// The tasks, after every lease that is over has been ended.
    fn settled(&self, now: Instant) -> MutexGuard<'_, Tasks> {
        let mut tasks = self.0.state.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some((_, task)) = tasks.leases.first().filter(|(end, _)| *end <= now).cloned() {
            tasks.resolve(&task, End::ClaimExpired);
            tasks.retry(&task, now);
        }
        tasks
    }
}

/// A source of claims from a [`Queue`], for one worker.
pub struct Memory {
    queue: Queue,
    worker: Arc<str>,
}

struct Part {
    worker: Arc<str>,
}

impl Memory {
    async fn take(&self, max: u8, patience: Duration) -> Batch {
        let shared = &self.queue.0;
        let found = async {
            loop {
                let mut woken = std::pin::pin!(shared.woken.notified());
                woken.as_mut().enable();
                let now = self.queue.now();
                let batch = self.queue.settled(now).take(max, &self.worker, &shared.settings, now);
                if !batch.grants.is_empty() || !batch.undecodable.is_empty() {
                    return batch;
                }
                woken.await;
            }
        };
        if let Ok(batch) = tokio::time::timeout(patience, found).await {
            return batch;
        }
        // What became free by the passing of time alone woke nobody.
        let now = self.queue.now();
        self.queue.settled(now).take(max, &self.worker, &shared.settings, now)
    }

    fn claim_now(&self, run: &Run) -> Result<Grant, Refused> {
        let now = self.queue.now();
        let settings = self.queue.0.settings;
        let mut tasks = self.queue.settled(now);
        let lease = match tasks.run(run) {
            Some(found) if found.state == State::Pending => settings.lease,
            Some(found) if tasks.is_running(run, &self.worker) => found.taken_until.since(now),
            Some(_) => return Err(gone(run, "claimed by another worker, or resolved")),
            None => return Err(gone(run, "unknown")),
        };
        tasks.lend(run, &self.worker, lease, now);
        tasks.grant(run, &self.worker, lease).ok_or_else(|| gone(run, "unknown"))
    }

    fn extend(&self, claim: &Claim) -> Result<Duration, Refused> {
        let (run, worker) = (claim.run(), worker(claim)?);
        let now = self.queue.now();
        let lease = self.queue.0.settings.lease;
        let mut tasks = self.queue.settled(now);
        if !tasks.is_running(run, worker) {
            return Err(gone(run, "not running, or not for this worker"));
        }
        tasks.lend(run, worker, lease, now);
        Ok(lease)
    }

    fn resolve(&self, claim: &Claim, outcome: Outcome) -> Result<(), Refused> {
        let (run, worker) = (claim.run(), worker(claim)?);
        let now = self.queue.now();
        let mut tasks = self.queue.settled(now);
        if tasks.is_running(run, worker) {
            tasks.resolve(&run.task, End::Reported(outcome));
            if matches!(outcome, Outcome::Exception(Reason::WorkerShutdown | Reason::IntermittentTask)) {
                tasks.retry(&run.task, now);
                drop(tasks);
                self.queue.0.woken.notify_waiters();
            }
            return Ok(());
        }
        let again = State::Resolved(End::Reported(outcome));
        let repeated =
            tasks.run(run).is_some_and(|found| found.state == again && found.worker.as_ref() == Some(worker));
        if repeated { Ok(()) } else { Err(gone(run, "resolved already")) }
    }

    fn store(&self, claim: &Claim, artifact: &Artifact, stored: Stored) -> Result<(), Refused> {
        let (run, worker) = (claim.run(), worker(claim)?);
        let mut tasks = self.queue.settled(self.queue.now());
        let found = tasks.run_mut(run).filter(|found| found.worker.as_ref() == Some(worker));
        let open = |state| {
            let ended = State::Resolved(End::Reported(Outcome::Completed));
            state != ended && state != State::Resolved(End::Reported(Outcome::Failed))
        };
        let found =
            found.filter(|found| open(found.state)).ok_or_else(|| gone(run, "resolved, and takes no artifacts"))?;
        found.artifacts.insert(artifact.name.clone(), stored);
        Ok(())
    }

    fn discard(&self, lane: Lane, id: &str, receipt: &str) -> Result<(), Refused> {
        let mut tasks = self.queue.settled(self.queue.now());
        let Some(entries) = tasks.entries.get_mut(usize::from(lane.0)) else {
            return Err(refused(Refusal::Rejected, format!("there is no lane {}", lane.0)));
        };
        let Some(place) = entries.iter().position(|entry| &*entry.id == id) else { return Ok(()) };
        if &*entries[place].receipt != receipt {
            let what = format!("delete of {id}: it was received again since");
            return Err(refused(Refusal::Rejected, what));
        }
        entries.remove(place);
        Ok(())
    }
}

fn worker(claim: &Claim) -> Result<&Arc<str>, Refused> {
    let part: Option<&Part> = claim.part();
    part.map(|part| &part.worker).ok_or_else(|| {
        let what = format!("{}: the claim was granted by another source", claim.run());
        refused(Refusal::Rejected, what)
    })
}

fn refused(refusal: Refusal, what: String) -> Refused {
    Refused { refusal, what }
}

fn gone(run: &Run, how: &str) -> Refused {
    refused(Refusal::Gone, format!("run {run} is {how}"))
}

async fn keep(artifact: &Artifact) -> Result<Stored, Refused> {
    let (content_type, what) = match &artifact.body {
        ArtifactBody::File { file, bytes, content_type } => {
            let cannot = |why: String| refused(Refusal::Rejected, format!("artifact {}: {why}", artifact.name));
            let length = usize::try_from(*bytes).ok().filter(|length| *length <= MEMORY_ARTIFACT_BYTES_MAX);
            let length = length.ok_or_else(|| cannot("too large for a queue in memory".into()))?;
            let file = Arc::clone(file);
            let read = tokio::task::spawn_blocking(move || {
                let mut content = vec![0; length];
                file.read_exact_at(&mut content, 0).map(|()| content)
            });
            let content = read.await.map_err(|error| cannot(error.to_string()))?;
            let content = content.map_err(|error| cannot(format!("its file cannot be read: {error}")))?;
            (content_type.clone(), StoredBody::Content(content))
        }
        ArtifactBody::Link { target, content_type } => (content_type.clone(), StoredBody::Link(target.clone())),
        ArtifactBody::Reference { url, content_type } => (content_type.clone(), StoredBody::Reference(url.clone())),
        ArtifactBody::Error { reason, message } => {
            (String::new(), StoredBody::Error { reason, message: message.clone() })
        }
    };
    Ok(Stored { content_type, what })
}

impl Source for Memory {
    fn describe(&self) -> String {
        "queue in memory".into()
    }

    fn deployment(&self) -> String {
        format!("memory at {:p}", Arc::as_ptr(&self.queue.0))
    }

    fn claimant(&self) -> String {
        format!("{} {}", self.deployment(), self.worker)
    }

    fn manner(&self) -> Manner {
        let claims = matches!(self.queue.0.settings.style, Style::Claims { .. });
        Manner { long_poll: claims, recovers: claims, tells_canceled: true, ends_with_worker: false }
    }

    fn open(&self) -> Answer<'_, Opened> {
        let lanes = match self.queue.0.settings.style {
            Style::Messages { .. } => named(PRIORITIES.len()).0,
            Style::Claims { .. } => 1,
        };
        Box::pin(async move { Ok(Opened { lanes, usable_for: None }) })
    }

    fn poll(&self, lane: Lane, max: u8) -> Answer<'_, Batch> {
        Box::pin(async move {
            match self.queue.0.settings.style {
                Style::Claims { patience } => Ok(self.take(max, patience).await),
                Style::Messages { hidden } => {
                    let lane = usize::from(lane.0);
                    if lane >= PRIORITIES.len() {
                        return Err(refused(Refusal::Stale, format!("there is no lane {lane}")));
                    }
                    let now = self.queue.now();
                    Ok(self.queue.settled(now).receive(lane, max, hidden, now))
                }
            }
        })
    }

    fn claim<'a>(&'a self, message: &'a Message) -> Answer<'a, Grant> {
        Box::pin(async { self.claim_now(&message.run) })
    }

    fn delete<'a>(&'a self, lane: Lane, id: &'a str, receipt: &'a str) -> Answer<'a, ()> {
        Box::pin(async move {
            match self.queue.0.settings.style {
                Style::Messages { .. } => self.discard(lane, id, receipt),
                Style::Claims { .. } => Ok(()),
            }
        })
    }

    fn recover<'a>(&'a self, held: &'a [Run], asked: &'a [Window]) -> Answer<'a, Recovered> {
        Box::pin(async {
            match self.queue.0.settings.style {
                Style::Messages { .. } => Ok(Recovered::default()),
                Style::Claims { .. } => Ok(self.adopt(held, asked)),
            }
        })
    }

    fn take_over<'a>(&'a self, run: &'a Run) -> Answer<'a, Grant> {
        Box::pin(async { self.take_back(run) })
    }

    fn reclaim<'a>(&'a self, claim: &'a Claim) -> Answer<'a, Duration> {
        Box::pin(async { self.extend(claim) })
    }

    fn report<'a>(&'a self, claim: &'a Claim, outcome: Outcome) -> Answer<'a, ()> {
        Box::pin(async move { self.resolve(claim, outcome) })
    }

    fn upload<'a>(&'a self, claim: &'a Claim, artifact: &'a Artifact) -> Answer<'a, ()> {
        Box::pin(async { self.store(claim, artifact, keep(artifact).await?) })
    }

    fn canceled<'a>(&'a self, claim: &'a Claim) -> Answer<'a, bool> {
        Box::pin(async {
            let tasks = self.queue.settled(self.queue.now());
            Ok(!tasks.is_running(claim.run(), worker(claim)?))
        })
    }
}
