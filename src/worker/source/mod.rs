//! The port that every source adapter implements.
//!
//! An adapter knows its protocol and nothing of slots, leases or retries: it makes one call for each method, within
//! the limits of [`journeyman_domain::limits`], and returns a value or a [`CallError`] that says what the caller must do next.
//! Calls are made concurrently.

pub mod amqp;
pub mod taskcluster;
pub mod zookeeper;

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::{Mutex, mpsc, watch};

use journeyman_domain::id::{PriorityQueue, Run, TaskId};
use journeyman_domain::outcome::Outcome;

pub use crate::task::{Artifact, ArtifactBody, Deferral, Definition, Deployment, Results};
pub use journeyman_domain::claim::{LossReason, RunTerms};
pub use journeyman_domain::lease::Granted;
pub use journeyman_domain::poll::Capabilities;
pub use journeyman_domain::refusal::{CallError, Refusal};
pub use journeyman_domain::worker::OpenResult;

/// The future of a call to a source.
pub type SourceFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, CallError>> + Send + 'a>>;

/// The result of one poll.
#[derive(Debug, Default)]
pub struct PollBatch {
    /// Messages about runs to be claimed, and messages or claims that cannot be read.
    pub messages: Vec<Message>,
    /// Claims made by the poll itself.
    pub grants: Vec<Grant>,
}

/// The result of a recovery.
#[derive(Debug, Default)]
pub struct RecoveryBatch {
    /// Claims that were taken over.
    pub grants: Vec<Grant>,
    /// Why others could not be taken over. The next call finds them again.
    pub error: Option<CallError>,
    /// Older claims under this worker's id. They are left alone.
    pub foreign_claims: usize,
}

/// A message about a run that can be claimed, or an entry of a poll that cannot be read.
#[derive(Clone)]
pub struct Message {
    /// The priority queue that it came from.
    pub queue: PriorityQueue,
    /// The queue's id for the message; the same each time it is received.
    pub id: Arc<str>,
    /// The receipt of this reception (an Azure pop receipt). Never logged.
    pub receipt: Arc<str>,
    /// How often it has been received, this time included.
    pub dequeue_count: u32,
    /// The run that it is about, or what is wrong with it, without its content.
    pub run: Result<Run, String>,
}

impl std::fmt::Debug for Message {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Message({} about {:?}, received {} times)", self.id, self.run, self.dequeue_count)
    }
}

/// A claim that was granted, and what it is for.
#[derive(Debug)]
pub struct Grant {
    /// The run.
    pub run: Run,
    /// The length of the lease, and when its request was sent.
    pub lease: Granted,
    /// The task's deadline and retries, by the service.
    pub terms: RunTerms,
    /// How long the run was pending, by the clock of its queue; `None` where the queue does not say.
    pub queued_for: Option<Duration>,
    /// The task definition.
    pub task: Definition,
    /// Why the payload cannot be read; it is malformed then.
    pub payload_error: Option<String>,
    /// The right to execute the run.
    pub claim: Arc<dyn Claim>,
    /// The sink of the handler's replies; `None` if the sender expects none.
    pub results: Option<Results>,
}

/// A part of what a source shows of its queue, and of the processes that share it.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct InspectionTable {
    /// What the rows are.
    pub name: &'static str,
    /// The keys of a row, in the order of a page. Those in `_seconds_ago` are points in time.
    #[serde(skip)]
    pub columns: &'static [&'static str],
    /// Objects with these keys.
    pub rows: Vec<serde_json::Value>,
    /// How many rows were left out.
    pub more: usize,
    /// How the rows are to be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<&'static str>,
}

/// Waits for the next event, for ever once all senders are gone.
async fn next_of(events: &Mutex<mpsc::Receiver<SourceEvent>>) -> SourceEvent {
    match events.lock().await.recv().await {
        Some(event) => event,
        None => std::future::pending().await,
    }
}

/// Whether a source is paused. It is a state, so a poll finds it whenever it looks.
struct PauseSwitch(watch::Sender<bool>);

impl PauseSwitch {
    fn new() -> Self {
        Self(watch::Sender::new(false))
    }

    fn set(&self, is_paused: bool) {
        self.0.send_replace(is_paused);
    }

    fn is_paused(&self) -> bool {
        *self.0.borrow()
    }

    /// Resolves while it is paused. Cancel safe.
    async fn paused(&self) {
        // The sender is here.
        self.0.subscribe().wait_for(|is_paused| *is_paused).await.ok();
    }
}

/// An event that a source reports without being asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceEvent {
    /// The claims of these runs are lost.
    Lost(Vec<Run>),
    /// The creator of this run has canceled it. Its payload is stopped, and nothing is reported.
    CancelRequested(Run),
    /// This run has other terms than its grant had.
    Terms(Run, RunTerms),
    /// No more tasks will ever be pending.
    Exhausted {
        /// The reason, for the log.
        what: String,
    },
}

/// The exclusive right to execute one run.
///
/// Its calls follow the rules of [`Source`].
pub trait Claim: Send + Sync {
    /// The run that the claim is for.
    fn run(&self) -> &Run;

    /// Extends the lease. New credentials in the answer replace the old ones for every later call of the claim.
    fn renew(&self) -> SourceFuture<'_, Granted>;

    /// Reports the outcome. Repeating the same outcome is safe.
    fn report(&self, outcome: Outcome) -> SourceFuture<'_, ()>;

    /// Uploads an artifact of the run. Repeating it is safe.
    fn upload<'a>(&'a self, artifact: &'a Artifact) -> SourceFuture<'a, ()>;

    /// Returns whether the queue stores compressed content and says so to readers.
    fn stores_encodings(&self) -> bool {
        false
    }

    /// How many runs of the task have an outcome that is final, counted from the first to the last of them. Their work elsewhere is
    /// not gone on with.
    fn reported_runs(&self) -> u32 {
        0
    }

    /// The services that the task and its worker may call beside the queue; `None` where there is only the queue.
    fn deployment(self: Arc<Self>) -> Option<Arc<dyn Deployment>> {
        None
    }

    /// Why the claim is known to be over already. A source sets it before it sends [`SourceEvent::Lost`] or
    /// [`SourceEvent::CancelRequested`], which may arrive before the grant does.
    fn known_loss(&self) -> Option<LossReason> {
        None
    }

    /// Why the run is no longer this worker's; `None` while it is. Called only if
    /// [`Capabilities::reports_cancellation`] is set.
    fn lost_reason(&self) -> SourceFuture<'_, Option<LossReason>> {
        Box::pin(std::future::ready(Ok(None)))
    }
}

/// The answer to [`Outcome::Deferred`] of a source whose [`Results`] offer no deferral.
fn cannot_defer(run: &Run) -> CallError {
    CallError { refusal: Refusal::Rejected, message: format!("report of {run}: this queue schedules no messages") }
}

impl std::fmt::Debug for dyn Claim {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Claim({})", self.run())
    }
}

/// A source of claims: what every queue has. What only some have is a trait of its own.
///
/// The adapter bounds every call in time and size. Unless a method says otherwise, dropping its future is safe and
/// leaves at most one unanswered request behind.
pub trait Source: Send + Sync + 'static {
    /// Kind, address and queue in one line without secrets, for logs and status.
    fn describe(&self) -> String;

    /// The service behind the source, such as its address. Sources with equal service ids refer to the same runs: a
    /// run claimed through one is neither claimed nor taken over through another.
    fn service_id(&self) -> String;

    /// The claimant: service, queue and worker id. Equal claimants are the same worker to the service, also across
    /// restarts; one can take over the other's claims.
    fn claimant(&self) -> String;

    /// The behaviour of this source.
    fn capabilities(&self) -> Capabilities;

    /// Finds the priority queues. Called before the first poll, before they stop being usable, and after
    /// [`Refusal::Stale`].
    fn open(&self) -> SourceFuture<'_, OpenResult>;

    /// Polls one priority queue for at most `max` entries, 1 to 32.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe if [`Capabilities::long_poll`] is set: a claim that the service makes while the future is
    /// dropped is lost until its lease ends. The runtime never drops it; see [`Source::pause`].
    fn poll(&self, queue: PriorityQueue, max: u8) -> SourceFuture<'_, PollBatch>;

    /// The calls about messages, if polls return messages.
    fn message_queue(&self) -> Option<&dyn MessageQueue> {
        None
    }

    /// The calls that recover claims, if a claim outlives the connection and the process that made it.
    fn recovery(&self) -> Option<&dyn Recovery> {
        None
    }

    /// Resolves with the next event; never, for a source that learns everything by polling. One call at a time.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    fn next_event(&self) -> Pin<Box<dyn Future<Output = SourceEvent> + Send + '_>> {
        Box::pin(std::future::pending())
    }

    /// The number of claims that the worker may hold, for a source that receives work ahead of a poll. Called at the
    /// start and on changes.
    fn set_capacity(&self, capacity: u32) {
        let _ = capacity;
    }

    /// Until when the service gives this worker no tasks, as an operator has decided.
    fn quarantined_until(&self) -> Option<Timestamp> {
        None
    }

    /// How far the host's clock is ahead of the service's at the last answer, in seconds; negative if behind.
    fn clock_skew_seconds(&self) -> Option<i64> {
        None
    }

    /// The source's own counters by name.
    fn metrics(&self) -> BTreeMap<&'static str, u64> {
        BTreeMap::new()
    }

    /// Reads what the queue holds and who works for it, for a status page; `None` for a source that shows nothing.
    fn inspect(&self) -> Option<SourceFuture<'_, Vec<InspectionTable>>> {
        None
    }

    /// No claims are wanted until [`Source::resume`]: a poll in flight, and one that is yet to be called, may be
    /// answered if nothing is lost by it, and work received ahead of polls may be returned.
    fn pause(&self) {}

    /// Claims are wanted again. Called before each poll, and never during one.
    fn resume(&self) {}

    /// The worker exits and holds no claim: tells the service where needed. Called once; bounded by the adapter.
    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(std::future::ready(()))
    }
}

/// A source of messages, which are claimed one by one.
pub trait MessageQueue: Send + Sync {
    /// Claims the run of a message. Idempotent for the same worker.
    fn claim<'a>(&'a self, run: &'a Run) -> SourceFuture<'a, Grant>;

    /// Deletes a message. Succeeds if it is gone already.
    fn delete<'a>(&'a self, message: &'a Message) -> SourceFuture<'a, ()>;
}

/// A source of claims that outlive the connection and the process that made them.
pub trait Recovery: Send + Sync {
    /// Lists the runs that the service counts as claimed by this worker, except `held`, and takes over those that
    /// were claimed at most `newer_than` before this call, with a new lease. The others, which may belong to another
    /// worker with the same id, are counted; `None` counts all. Refused if none could be taken over.
    fn recover<'a>(&'a self, held: &'a [Run], newer_than: Option<Duration>) -> SourceFuture<'a, RecoveryBatch>;

    /// Takes over a run that a previous process of this worker has claimed, in order to report it, with a lease from
    /// this request. [`Refusal::Gone`] if the service counts the run as another worker's, or as resolved.
    fn take_over<'a>(&'a self, run: &'a Run) -> SourceFuture<'a, Grant>;

    /// Whether the task has ended, so that no run of it is pending or running; `false` if the service does not tell.
    fn is_resolved<'a>(&'a self, task: &'a TaskId) -> SourceFuture<'a, bool> {
        _ = task;
        Box::pin(std::future::ready(Ok(false)))
    }
}
