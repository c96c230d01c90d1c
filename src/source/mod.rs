//! Where claims come from: the port that every adapter serves, and what passes through it.
//!
//! An adapter is thin. It knows its protocol's bytes and nothing of slots, leases or retries: it makes one call for
//! each method, within the limits of [`crate::limits`], and answers with a value or a [`CallError`] that says what
//! the caller must do next. Calls are made concurrently.

pub mod amqp;
pub mod memory;
mod reply;
pub mod taskcluster;

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::domain::id::{PriorityQueue, Run};
use crate::domain::outcome::Outcome;
use crate::domain::refusal::Refusal;

pub use crate::domain::poll::Capabilities;
pub use crate::domain::unread_polls::ClaimWindow;
pub use reply::{PartialReplySink, Reply, ReplyError, ReplyStatus, Results};

/// What a call to a source resolves to.
pub type SourceFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, CallError>> + Send + 'a>>;

/// A call that did not succeed: what to do next, and a sentence for the log.
///
/// The sentence names the operation, its subject and the useful line of the answer. It never holds a credential,
/// a signature or a payload.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct CallError {
    /// What the caller must do next.
    pub refusal: Refusal,
    /// The sentence.
    pub message: String,
}

/// The queues behind a source, as [`Source::open`] found them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenResult {
    /// How many lanes there are; lane 0 is to be polled first.
    pub priority_queues: u16,
    /// How long from when the call was sent this stays usable; `None` is for ever.
    pub usable_for: Option<Duration>,
}

/// What one poll brought.
#[derive(Debug, Default)]
pub struct PollBatch {
    /// Entries that lead to a claim by [`Source::claim`].
    pub messages: Vec<Message>,
    /// Entries that nothing can be made of; where the poll itself claims, claims of ours that cannot be read. They cost the
    /// rest of the batch nothing.
    pub unreadable: Vec<UnreadableMessage>,
    /// Claims that the poll itself made.
    pub grants: Vec<Grant>,
}

/// What a recovery found.
#[derive(Debug, Default)]
pub struct RecoveryBatch {
    /// Claims that were taken over.
    pub grants: Vec<Grant>,
    /// Why others could not be, if there are any. The next call finds them again.
    pub error: Option<CallError>,
    /// How many more go by this worker's name, claimed at other times than those asked for. They were left alone.
    pub foreign_claims: usize,
}

/// An entry of a queue that may lead to a claim.
#[derive(Clone)]
pub struct Message {
    /// The lane it came from.
    pub queue: PriorityQueue,
    /// The queue's own name for the entry; the same each time it is received.
    pub id: Arc<str>,
    /// What proves this reception of it (an Azure pop receipt). Never logged.
    pub receipt: Arc<str>,
    /// How often it has been received, this time included.
    pub dequeue_count: u32,
    /// The run that it is about.
    pub run: Run,
}

impl std::fmt::Debug for Message {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Message({} about {}, received {} times)", self.id, self.run, self.dequeue_count)
    }
}

impl std::fmt::Debug for UnreadableMessage {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Undecodable({}, received {} times: {})", self.id, self.dequeue_count, self.reason)
    }
}

/// An entry that could not be read.
#[derive(Clone)]
pub struct UnreadableMessage {
    /// The lane it came from.
    pub queue: PriorityQueue,
    /// The queue's own name for the entry.
    pub id: Arc<str>,
    /// What proves this reception of it. Never logged.
    pub receipt: Arc<str>,
    /// How often it has been received, this time included.
    pub dequeue_count: u32,
    /// What is wrong with it, without its content.
    pub reason: String,
}

/// The exclusive right to do one run, as a source granted it.
#[derive(Debug)]
pub struct Grant {
    /// The run.
    pub run: Run,
    /// How long the right lasts, counted from when the request was sent.
    pub lease: Duration,
    /// The task as its creator wrote it.
    pub task: serde_json::Value,
    /// Why its payload cannot be read; `None` where it can. It is malformed then.
    pub payload_error: Option<String>,
    /// The adapter's own part: credentials and the like.
    pub claim: Claim,
    /// Where the handler's answers go; `None` where nobody waits for any.
    pub results: Option<Results>,
}

/// Something about claims that a source found out without being asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceEvent {
    /// The claims of these runs are lost.
    Lost(Vec<Run>),
    /// There is nothing left to be polled, and there never will be.
    Exhausted {
        /// Why, for the log.
        what: String,
    },
}

/// What an adapter needs to know of a claim it granted. Opaque to everyone else; the adapter looks inside by
/// [`Claim::part`].
#[derive(Clone)]
pub struct Claim {
    run: Run,
    part: Arc<dyn std::any::Any + Send + Sync>,
}

impl Claim {
    /// Wraps an adapter's own part of a claim. Replaceable pieces (credentials) sit behind interior mutability.
    pub fn new<T: Send + Sync + 'static>(run: Run, part: T) -> Self {
        Self { run, part: Arc::new(part) }
    }

    /// The run that the claim is for.
    #[must_use]
    pub const fn run(&self) -> &Run {
        &self.run
    }

    /// The adapter's own part, where it is of type `T`.
    #[must_use]
    pub fn part<T: Send + Sync + 'static>(&self) -> Option<&T> {
        self.part.downcast_ref()
    }
}

impl std::fmt::Debug for Claim {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Claim({})", self.run)
    }
}

/// A file that a handler leaves behind, ready to be sent.
#[derive(Debug)]
pub struct Artifact {
    /// Its name, printable ASCII, such as `public/build/target.tar.gz`.
    pub name: String,
    /// When it may be thrown away (RFC 3339); `None` is when the task expires.
    pub expires: Option<String>,
    /// What it is.
    pub body: ArtifactBody,
}

/// What an artifact is.
#[derive(Debug)]
pub enum ArtifactBody {
    /// The content of an open regular file, from offset 0, `bytes` long. Read with positioned reads.
    File {
        /// The file.
        file: Arc<std::fs::File>,
        /// How many bytes are sent.
        bytes: u64,
        /// Its media type.
        content_type: String,
    },
    /// Another artifact of the same run.
    Link {
        /// That artifact's name.
        target: String,
        /// Its media type.
        content_type: String,
    },
    /// A place elsewhere.
    Reference {
        /// The place.
        url: String,
        /// Its media type.
        content_type: String,
    },
    /// The reason why a declared artifact is not there.
    Error {
        /// One of `file-missing-on-worker`, `invalid-resource-on-worker`, `too-large-file-on-worker`,
        /// `file-not-readable-on-worker`.
        reason: &'static str,
        /// A sentence for the task's author.
        message: String,
    },
}

/// A place that hands out claims.
///
/// Every call is bounded in time and size by the adapter. Unless a method says otherwise, dropping its future is safe
/// and leaves at most one unanswered request behind.
pub trait Source: Send + Sync + 'static {
    /// One line for logs and status, without secrets: kind, address, queue.
    fn describe(&self) -> String;

    /// Names the service behind it, such as by its address. Sources of equal names speak of the same runs: what one of
    /// them has claimed, another neither claims again nor takes over.
    fn service_id(&self) -> String;

    /// Names who claims here: the service, the queue and this worker's own name. Two that are equal are the same worker to
    /// the service, also across restarts; what one has claimed, the other can take over.
    fn claimant(&self) -> String;

    /// How this source behaves.
    fn capabilities(&self) -> Capabilities;

    /// Finds the lanes. Called before the first poll, before the lanes' time is over, and after [`Refusal::Stale`].
    fn open(&self) -> SourceFuture<'_, OpenResult>;

    /// Asks one lane for at most `max` entries, `max` from 1 to 32.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe where [`Capabilities::long_poll`] is set: a claim that the service makes while the future is dropped
    /// is lost until its lease ends. The runtime never drops it.
    fn poll(&self, lane: PriorityQueue, max: u8) -> SourceFuture<'_, PollBatch>;

    /// Claims the run that a message is about. Idempotent for the same worker.
    fn claim<'a>(&'a self, message: &'a Message) -> SourceFuture<'a, Grant>;

    /// Deletes an entry. Already gone is success.
    fn delete<'a>(&'a self, lane: PriorityQueue, id: &'a str, receipt: &'a str) -> SourceFuture<'a, ()>;

    /// Finds the runs that the service counts as claimed by this very worker, except those in `held`, and takes each one over
    /// with a fresh lease that was claimed within a window of `asked`, measured from when this is called. The others may be those
    /// of another worker that lives under the same name: they are counted. Refused where none could be taken over.
    fn recover<'a>(&'a self, held: &'a [Run], asked: &'a [ClaimWindow]) -> SourceFuture<'a, RecoveryBatch>;

    /// Takes over a run that an earlier life of this worker has claimed, with a lease that counts from this request: what it
    /// grants may be reported, and nothing else is done with it. [`Refusal::Gone`] where the service counts the run as
    /// somebody else's, or as over.
    fn take_over<'a>(&'a self, run: &'a Run) -> SourceFuture<'a, Grant>;

    /// Extends a claim and answers with the new length, counted from when the request was sent. New credentials, where
    /// the answer brings them, replace the old ones for every later call of the claim.
    fn reclaim<'a>(&'a self, claim: &'a Claim) -> SourceFuture<'a, Duration>;

    /// Reports the outcome. Repeating the same outcome is safe.
    fn report<'a>(&'a self, claim: &'a Claim, outcome: Outcome) -> SourceFuture<'a, ()>;

    /// Stores an artifact of the run. Repeating it is safe.
    fn upload<'a>(&'a self, claim: &'a Claim, artifact: &'a Artifact) -> SourceFuture<'a, ()>;

    /// Resolves when the source has news; never, for one that learns everything by asking. One call at a time.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    fn next_event(&self) -> Pin<Box<dyn Future<Output = SourceEvent> + Send + '_>> {
        Box::pin(std::future::pending())
    }

    /// How many claims the worker may hold at once, for a source that is handed work ahead of a poll. Told at the start, and
    /// when it changes.
    fn set_capacity(&self, capacity: u32) {
        let _ = capacity;
    }

    /// How far this host's clock is ahead of the service's, in seconds, as its last answer told; negative where it is behind.
    fn clock_skew_seconds(&self) -> Option<i64> {
        None
    }

    /// What it counts besides claims, by names of its own.
    fn metrics(&self) -> BTreeMap<&'static str, u64> {
        BTreeMap::new()
    }

    /// No claims are wanted until the next poll: one under way may be answered now, if nothing is lost by it, and what was
    /// handed to the worker ahead of polls may go back.
    fn pause(&self) {}

    /// The worker exits, and holds nothing of it any more: takes leave of a service that might otherwise not heed what it was
    /// told last. Called once; bounded by the adapter.
    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(std::future::ready(()))
    }

    /// Whether the run has been resolved by somebody else.
    fn is_canceled<'a>(&'a self, claim: &'a Claim) -> SourceFuture<'a, bool>;
}
