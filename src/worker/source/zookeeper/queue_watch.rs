//! The requests of a queue as one session sees them: a recursive watch, and a walk at first and after each lost connection.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;

use futures_util::{FutureExt as _, StreamExt as _, stream};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

use super::claim::QueueSession;
use super::{Dialect, ZooKeeperQueue};
use crate::source::{CallError, Grant, SourceEvent};
use journeyman_domain::id::Run;
use journeyman_domain::jitter::Jitter;
use journeyman_domain::job_requests::{JobRequests, SeenRequest};
use journeyman_domain::limits::ZOOKEEPER_READS_CONCURRENT_MAX;
use journeyman_platform::zookeeper::janitor::{Cleaned, Janitor};
use journeyman_platform::zookeeper::job_queue::{JobQueue, RequestState};
use journeyman_platform::zookeeper::json_object::JsonObject;
use journeyman_platform::zookeeper::watch::{TreeEvent, TreeWatch};
use journeyman_platform::zookeeper::{Error, Session};

pub(super) struct QueueWatch {
    pub(super) at: QueueSession,
    pub(super) zone: Option<String>,
    dialect: Dialect,
    requests: Mutex<JobRequests>,
    /// The requests that this worker claims or holds, by their ids.
    held: Mutex<BTreeMap<String, HeldRun>>,
    arrived: Arc<Notify>,
    /// A task may have been resumed.
    resumed: Notify,
    stopped: CancellationToken,
    jitter: Mutex<Jitter>,
    /// Of the requests and of the locks: a worker needs no event of the queue's other folders.
    trees: tokio::sync::Mutex<[TreeWatch; 2]>,
}

struct HeldRun {
    run: Run,
    is_canceled: bool,
    /// The worker reports its end: its removal is no cancel.
    is_settling: bool,
    /// It was put back and offered again before its claim has ended here.
    is_offered: bool,
}

/// A cancel of its request is noticed as long as it exists.
pub(super) struct HoldGuard {
    watch: Arc<QueueWatch>,
    id: String,
}

impl HoldGuard {
    pub(super) fn set_settling(&self) {
        if let Some(held) = self.watch.held.lock().get_mut(&self.id) {
            held.is_settling = true;
        }
    }

    pub(super) fn is_canceled(&self) -> bool {
        self.watch.held.lock().get(&self.id).is_some_and(|held| held.is_canceled)
    }
}

impl Drop for HoldGuard {
    fn drop(&mut self) {
        let held = self.watch.held.lock().remove(&self.id);
        if held.is_some_and(|held| held.is_offered) {
            self.watch.put_back(&self.id);
            self.watch.arrived.notify_waiters();
        }
    }
}

/// A node that matters, by its path below the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QueueNode<'a> {
    Request(&'a str),
    CancelFlag(&'a str),
    ResumeFlag(&'a str),
    Contender { id: &'a str, name: &'a str },
}

fn parse(dialect: Dialect, path: &str) -> Option<QueueNode<'_>> {
    let parts: Vec<&str> = path.strip_prefix('/')?.splitn(4, '/').collect();
    match (dialect, parts.as_slice()) {
        (_, ["requests", id]) => Some(QueueNode::Request(id)),
        (Dialect::ZuulExecutor, ["requests", id, "cancel"]) => Some(QueueNode::CancelFlag(id)),
        (Dialect::ZuulExecutor, ["requests", id, "resume"]) => Some(QueueNode::ResumeFlag(id)),
        (Dialect::Native, ["locks", id]) => Some(QueueNode::Contender { id, name: "" }),
        (Dialect::ZuulMerger | Dialect::ZuulExecutor, ["locks", id, name]) => Some(QueueNode::Contender { id, name }),
        _ => None,
    }
}

impl QueueWatch {
    pub(super) async fn start(
        dialect: Dialect,
        queue: &ZooKeeperQueue,
        session: &Arc<Session>,
        arrived: &Arc<Notify>,
    ) -> Result<Arc<Self>, CallError> {
        let zone = queue.zone.clone();
        let queue = JobQueue::new(&queue.path);
        queue.ensure(session).await?;
        let tree = async |folder| TreeWatch::start(session, &format!("{}/{folder}", queue.root())).await;
        let trees = [tree("requests").await?, tree("locks").await?];
        tracing::debug!(queue = queue.root(), session = session.id(), "watching");
        let watch = Self {
            at: QueueSession { session: Arc::clone(session), queue },
            zone,
            dialect,
            requests: Mutex::default(),
            held: Mutex::default(),
            arrived: Arc::clone(arrived),
            resumed: Notify::new(),
            stopped: CancellationToken::new(),
            jitter: Mutex::new(Jitter::seeded(uuid::Uuid::new_v4().as_u64_pair().0)),
            trees: tokio::sync::Mutex::new(trees),
        };
        watch.walk().await?;
        Ok(Arc::new(watch))
    }

    /// Precedence and age of the first free request.
    pub(super) fn first_place(&self) -> Option<(i64, i64)> {
        self.requests.lock().first_place()
    }

    pub(super) fn pick(&self) -> Option<Box<str>> {
        self.requests.lock().pick(|below| {
            let bits = self.jitter.lock().bits();
            usize::try_from(bits % u64::try_from(below).unwrap_or(1).max(1)).unwrap_or(0)
        })
    }

    pub(super) fn put_back(&self, id: &str) {
        self.requests.lock().put_back(id);
    }

    pub(super) fn on_claim(&self, claimed: Option<&Grant>) {
        let mut requests = self.requests.lock();
        if claimed.is_some() { requests.on_claim_won() } else { requests.on_claim_lost() }
    }

    /// Does not offer a request for a while.
    pub(super) fn defer(&self, id: &str) {
        self.requests.lock().defer(id);
    }

    pub(super) fn end_deferral(&self, id: &str) {
        self.requests.lock().end_deferral(id);
        self.arrived.notify_waiters();
    }

    /// Called before the claim, so that no cancel is missed. `None` while an earlier claim of the request is still being ended here.
    pub(super) fn hold(self: &Arc<Self>, run: &Run) -> Option<HoldGuard> {
        let id = run.task.as_str().to_owned();
        let mut held = self.held.lock();
        if let Some(earlier) = held.get_mut(&id) {
            earlier.is_offered = true;
            return None;
        }
        held.insert(
            id.clone(),
            HeldRun { run: run.clone(), is_canceled: false, is_settling: false, is_offered: false },
        );
        Some(HoldGuard { watch: Arc::clone(self), id })
    }

    pub(super) fn held_claims(&self) -> usize {
        self.held.lock().len()
    }

    pub(super) fn stop(&self) {
        self.stopped.cancel();
    }

    /// Waits until a scheduler has set the flag that resumes a build. The watch of the queue tells of it: before ZooKeeper 3.9
    /// another watch of one node may disturb that one.
    pub(super) async fn resumed(&self, id: &str) -> Result<(), Error> {
        let flag = self.at.queue.resume_flag(id);
        loop {
            let mut changed = pin!(self.resumed.notified());
            changed.as_mut().enable();
            if self.at.session.retry(|| self.at.session.stat(&flag)).await?.is_some() {
                return Ok(());
            }
            tokio::select! {
                () = changed => {}
                () = self.at.session.ended() => {}
            }
        }
    }

    /// Follows the queue until the session ends.
    pub(super) async fn run(&self, events: mpsc::Sender<SourceEvent>) {
        let [requests, locks] = &mut *self.trees.lock().await;
        // A request that is gone is seen before its lock seems free.
        let mut next = async || {
            tokio::select! {
                biased;
                event = requests.next() => event,
                event = locks.next() => event,
            }
        };
        loop {
            // What has changed is read when no event waits, and together: events that wait for reads are claims seen late.
            let waiting = next().now_or_never();
            let event = if let Some(event) = waiting {
                event
            } else {
                let unread = self.requests.lock().take_unread();
                if !unread.is_empty() {
                    if let Err(error) = self.read_all(unread).await {
                        tracing::warn!(queue = self.at.queue.root(), "{error}");
                    }
                    self.arrived.notify_waiters();
                    continue;
                }
                tokio::select! {
                    biased;
                    () = self.stopped.cancelled() => return,
                    event = next() => event,
                }
            };
            let path = match &event {
                TreeEvent::Created(path) | TreeEvent::Changed(path) | TreeEvent::Deleted(path) => path,
                TreeEvent::EventsLost => {
                    self.walk_again(&events).await;
                    continue;
                }
                TreeEvent::Ended => {
                    // A report under way goes on in another session.
                    let lost = |held: &HeldRun| (!held.is_settling).then(|| held.run.clone());
                    let lost: Vec<Run> = self.held.lock().values().filter_map(lost).collect();
                    if !lost.is_empty() {
                        _ = events.send(SourceEvent::Lost(lost)).await;
                    }
                    return;
                }
            };
            let Some(node) = path.strip_prefix(self.at.queue.root()).and_then(|path| parse(self.dialect, path)) else {
                continue;
            };
            match (&event, node) {
                (TreeEvent::Deleted(_), QueueNode::Request(id)) => {
                    self.requests.lock().on_request_deleted(id);
                    self.cancel(id, &events).await;
                }
                // An attempt was counted.
                (TreeEvent::Changed(_), QueueNode::Request(_)) if self.dialect == Dialect::Native => continue,
                (_, QueueNode::Request(id)) => self.requests.lock().on_request_changed(id),
                (TreeEvent::Created(_), QueueNode::CancelFlag(id)) => self.cancel(id, &events).await,
                (TreeEvent::Created(_), QueueNode::ResumeFlag(_)) => {
                    self.resumed.notify_waiters();
                    continue;
                }
                (TreeEvent::Created(_), QueueNode::Contender { id, name }) => {
                    self.requests.lock().on_contender(id, name)
                }
                (TreeEvent::Deleted(_), QueueNode::Contender { id, name }) => {
                    self.requests.lock().on_contender_left(id, name);
                }
                (_, QueueNode::CancelFlag(_) | QueueNode::ResumeFlag(_) | QueueNode::Contender { .. }) => continue,
            }
            self.arrived.notify_waiters();
        }
    }

    /// Cleans the queue up each minute, where no other process does it, until the session ends.
    pub(super) async fn clean_up(&self) {
        let mut janitor = Janitor::new(self.at.queue.clone(), self.dialect);
        loop {
            match janitor.clean(&self.at.session).await {
                Ok(Some(cleaned)) if cleaned != Cleaned::default() => {
                    let Cleaned { lost, removed, released } = cleaned;
                    let (queue, removed, released) = (self.at.queue.root(), removed.len(), released.len());
                    tracing::warn!(queue, ?lost, removed, released, "cleaned up after workers that are gone");
                }
                Ok(_) => {}
                Err(error) => tracing::warn!(queue = self.at.queue.root(), "cannot clean up: {error}"),
            }
            tokio::select! {
                () = self.stopped.cancelled() => return,
                () = self.at.session.ended() => return,
                () = tokio::time::sleep(janitor.pause()) => {}
            }
        }
    }

    async fn cancel(&self, id: &str, events: &mpsc::Sender<SourceEvent>) {
        let held = self.held.lock().get_mut(id).filter(|held| !held.is_settling).map(|held| {
            held.is_canceled = true;
            held.run.clone()
        });
        if let Some(run) = held {
            _ = events.send(SourceEvent::CancelRequested(run)).await;
        }
    }

    async fn walk_again(&self, events: &mpsc::Sender<SourceEvent>) {
        if let Err(error) = self.walk().await {
            // The next connection walks again, and a lost session ends everything.
            tracing::warn!(queue = self.at.queue.root(), "cannot read the queue again: {error}");
        }
        let held: Vec<String> = self.held.lock().keys().cloned().collect();
        for id in held {
            let request = self.at.queue.path("requests", &id);
            let is_canceled = matches!(self.at.session.stat(&self.at.queue.cancel_flag(&id)).await, Ok(Some(_)));
            let is_gone = matches!(self.at.session.stat(&request).await, Ok(None));
            if is_canceled || is_gone {
                self.cancel(&id, events).await;
            }
        }
        self.arrived.notify_waiters();
        self.resumed.notify_waiters();
    }

    /// Reads the whole queue.
    async fn walk(&self) -> Result<(), Error> {
        let session = &self.at.session;
        let locked = self.list("locks").await?;
        let contenders: Vec<(String, Vec<String>)> = match self.dialect {
            Dialect::Native => locked.into_iter().map(|id| (id, vec![String::new()])).collect(),
            Dialect::ZuulMerger | Dialect::ZuulExecutor => {
                let reads = locked.into_iter().map(|id| async {
                    let path = self.at.queue.path("locks", &id);
                    let names = session.retry(|| session.children(&path)).await;
                    names.map(|names| (id, names.unwrap_or_default()))
                });
                let reads: Vec<_> =
                    stream::iter(reads).buffer_unordered(ZOOKEEPER_READS_CONCURRENT_MAX).collect().await;
                reads.into_iter().collect::<Result<_, Error>>()?
            }
        };
        {
            let mut requests = self.requests.lock();
            requests.clear();
            for (id, name) in contenders.iter().flat_map(|(id, names)| names.iter().map(move |name| (id, name))) {
                requests.on_contender(id, name);
            }
        }
        self.read_all(self.list("requests").await?).await
    }

    async fn read_all(&self, ids: impl IntoIterator<Item: AsRef<str>>) -> Result<(), Error> {
        let reads = ids.into_iter().map(|id| async move { self.read(id.as_ref()).await });
        let reads = stream::iter(reads).buffer_unordered(ZOOKEEPER_READS_CONCURRENT_MAX);
        let reads: Vec<Result<(), Error>> = reads.collect().await;
        reads.into_iter().collect()
    }

    async fn list(&self, folder: &str) -> Result<Vec<String>, Error> {
        let path = format!("{}/{folder}", self.at.queue.root());
        self.at.session.retry(|| self.at.session.children(&path)).await.map(Option::unwrap_or_default)
    }

    async fn read(&self, id: &str) -> Result<(), Error> {
        let path = self.at.queue.path("requests", id);
        let found = self.at.session.retry(|| self.at.session.get(&path)).await?;
        let Some((data, stat)) = found else {
            self.requests.lock().on_request_deleted(id);
            return Ok(());
        };
        let Ok(json) = JsonObject::parse(&data) else {
            tracing::warn!(request = id, "a request of {} is no JSON object; leaving it alone", self.at.queue.root());
            return Ok(());
        };
        let is_requested = match self.dialect {
            Dialect::Native => true,
            Dialect::ZuulMerger | Dialect::ZuulExecutor => json.get("state") == Some(RequestState::Requested),
        };
        let precedence = json.get("precedence").unwrap_or_default();
        self.requests.lock().on_request(id, SeenRequest { precedence, created: stat.czxid, is_requested });
        Ok(())
    }
}
