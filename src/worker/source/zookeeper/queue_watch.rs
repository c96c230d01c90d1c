//! The requests of a queue as one session sees them: recursive watches as long as few are free, and lists at first, after each lost
//! connection and while many are free.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::pin::pin;
use std::sync::Arc;

use futures_util::{FutureExt as _, StreamExt as _, stream};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;

use super::claim::QueueSession;
use super::{Dialect, ZooKeeperQueue};
use crate::source::{CallError, Grant, SourceEvent};
use journeyman_domain::id::Run;
use journeyman_domain::jitter::Jitter;
use journeyman_domain::job_requests::{JobRequests, SeenRequest};
use journeyman_domain::limits::{
    ZOOKEEPER_HELD_CHECK_INTERVAL, ZOOKEEPER_OTHERS_READ_INTERVAL, ZOOKEEPER_READS_CONCURRENT_MAX,
    ZOOKEEPER_RETRY_DELAY,
};
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
    /// The time of the last list; `None` while the requests are watched.
    listed_at: Mutex<Option<Instant>>,
    /// The requests have to be listed again.
    list_wanted: Notify,
    /// A task may have been resumed.
    resumed: Notify,
    stopped: CancellationToken,
    jitter: Mutex<Jitter>,
    /// The watches that `run` takes over.
    trees: Mutex<Option<Trees>>,
}

/// A worker needs no event of the queue's other folders.
struct Trees {
    requests: TreeWatch,
    /// `None` in Zuul's layouts, where the state of a request says that it is taken.
    locks: Option<TreeWatch>,
}

impl Trees {
    /// A request that is gone is seen before its lock seems free.
    async fn next(&mut self) -> TreeEvent {
        let locks = async {
            match &mut self.locks {
                Some(locks) => locks.next().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            event = self.requests.next() => event,
            event = locks => event,
        }
    }
}

struct HeldRun {
    run: Run,
    is_canceled: bool,
    /// The worker reports its end: its removal is no cancel.
    is_settling: bool,
    /// It was put back and offered again before its claim has ended here.
    is_offered: bool,
    /// It was held already when the held ones were last looked at.
    is_old: bool,
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
        } else if let Some(_unwatched) = *self.watch.listed_at.lock() {
            // No event tells that it was put back; a list does.
            self.watch.requests.lock().forget(&self.id);
        }
    }
}

/// A node that matters, by its path below the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QueueNode<'a> {
    Request(&'a str),
    CancelFlag(&'a str),
    ResumeFlag(&'a str),
    Lock(&'a str),
}

fn parse(dialect: Dialect, path: &str) -> Option<QueueNode<'_>> {
    let parts: Vec<&str> = path.strip_prefix('/')?.splitn(4, '/').collect();
    match (dialect, parts.as_slice()) {
        (_, ["requests", id]) => Some(QueueNode::Request(id)),
        (Dialect::ZuulExecutor, ["requests", id, "cancel"]) => Some(QueueNode::CancelFlag(id)),
        (Dialect::ZuulExecutor, ["requests", id, "resume"]) => Some(QueueNode::ResumeFlag(id)),
        (Dialect::Native, ["locks", id]) => Some(QueueNode::Lock(id)),
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
        let watch = Self {
            at: QueueSession { session: Arc::clone(session), queue },
            zone,
            dialect,
            requests: Mutex::default(),
            held: Mutex::default(),
            arrived: Arc::clone(arrived),
            listed_at: Mutex::new(None),
            list_wanted: Notify::new(),
            resumed: Notify::new(),
            stopped: CancellationToken::new(),
            jitter: Mutex::new(Jitter::seeded(uuid::Uuid::new_v4().as_u64_pair().0)),
            trees: Mutex::default(),
        };
        let trees = watch.watch().await?;
        *watch.trees.lock() = Some(trees);
        Ok(Arc::new(watch))
    }

    /// Precedence and age of the first free request.
    pub(super) fn first_place(&self) -> Option<(i64, i64)> {
        if self.needs_list() {
            self.list_wanted.notify_one();
        }
        self.requests.lock().first_place()
    }

    fn needs_list(&self) -> bool {
        let age = self.listed_at.lock().map(|at| at.elapsed());
        age.is_some_and(|age| self.requests.lock().needs_list(age))
    }

    pub(super) fn pick(&self) -> Option<Box<str>> {
        self.requests.lock().pick(|below| {
            let bits = self.jitter.lock().bits();
            usize::try_from(bits % u64::try_from(below).unwrap_or(1).max(1)).unwrap_or(0)
        })
    }

    pub(super) fn put_back(&self, id: &str) {
        self.requests.lock().offer(id);
    }

    pub(super) fn on_claim(&self, id: &str, claimed: Option<&Grant>) {
        let (listed_at, mut requests) = (self.listed_at.lock(), self.requests.lock());
        if claimed.is_some() {
            return requests.on_claim_won();
        }
        requests.on_claim_lost();
        // The next list shows whether it is worth another try.
        if listed_at.is_some() && self.dialect != Dialect::Native {
            requests.forget(id);
        }
    }

    /// Does not offer a request that cannot be claimed before it was read again.
    pub(super) fn set_aside(&self, id: &str) {
        self.requests.lock().set_aside(id);
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
            HeldRun { run: run.clone(), is_canceled: false, is_settling: false, is_offered: false, is_old: false },
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
        let mut trees = self.trees.lock().take();
        let mut others_read_at = Instant::now();
        let mut held_check = interval(ZOOKEEPER_HELD_CHECK_INTERVAL);
        held_check.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            // Also while events wait: where many requests are free, they may never end.
            if trees.is_some() && self.requests.lock().are_many() {
                self.unwatch(trees.take()).await;
            }
            if let Some(watched) = &mut trees {
                if let Some(event) = watched.next().now_or_never() {
                    if self.on_event(event, &events).await.is_break() {
                        return;
                    }
                    continue;
                }
                // What has changed is read when no event waits, and together: events that wait for reads are claims seen late.
                let unread = self.requests.lock().take_unread();
                if !unread.is_empty() {
                    self.warn(self.read_all(unread).await);
                    self.arrived.notify_waiters();
                    continue;
                }
            }
            let is_watched = trees.is_some();
            let next = async {
                match &mut trees {
                    Some(watched) => watched.next().await,
                    None => self.at.session.ended().map(|()| TreeEvent::Ended).await,
                }
            };
            tokio::select! {
                biased;
                () = self.stopped.cancelled() => return,
                event = next => if self.on_event(event, &events).await.is_break() {
                    return;
                },
                _ = held_check.tick(), if !is_watched => {
                    self.check_held(false, &events).await;
                    self.resumed.notify_waiters();
                }
                () = self.list_wanted.notified() => if self.needs_list() {
                    let again = others_read_at.elapsed() >= ZOOKEEPER_OTHERS_READ_INTERVAL;
                    if again {
                        others_read_at = Instant::now();
                    }
                    let listed = self.list_again(again).await;
                    if listed.is_err() {
                        sleep(ZOOKEEPER_RETRY_DELAY).await;
                    }
                    self.warn(listed.map(|watched| trees = watched));
                    if trees.is_some() {
                        self.check_held(true, &events).await;
                        self.resumed.notify_waiters();
                    }
                    self.arrived.notify_waiters();
                }
            }
        }
    }

    fn warn(&self, read: Result<(), Error>) {
        if let Err(error) = read {
            // The next connection reads again, and a lost session ends everything.
            tracing::warn!(queue = self.at.queue.root(), "cannot read the queue: {error}");
        }
    }

    async fn on_event(&self, event: TreeEvent, events: &mpsc::Sender<SourceEvent>) -> ControlFlow<()> {
        let path = match &event {
            TreeEvent::Created(path) | TreeEvent::Changed(path) | TreeEvent::Deleted(path) => path,
            TreeEvent::EventsLost => {
                self.offer_held_again();
                self.warn(self.list(true).await);
                self.check_held(true, events).await;
                self.arrived.notify_waiters();
                self.resumed.notify_waiters();
                return ControlFlow::Continue(());
            }
            TreeEvent::Ended => {
                // A report under way goes on in another session.
                let lost = |held: &HeldRun| (!held.is_settling).then(|| held.run.clone());
                let lost: Vec<Run> = self.held.lock().values().filter_map(lost).collect();
                if !lost.is_empty() {
                    _ = events.send(SourceEvent::Lost(lost)).await;
                }
                return ControlFlow::Break(());
            }
        };
        let node = path.strip_prefix(self.at.queue.root()).and_then(|path| parse(self.dialect, path));
        match (&event, node) {
            (TreeEvent::Deleted(_), Some(QueueNode::Request(id))) => {
                self.requests.lock().forget(id);
                self.cancel(id, events).await;
            }
            (TreeEvent::Created(_), Some(QueueNode::Request(id))) => self.requests.lock().on_request_created(id),
            // A task changes when an attempt is counted.
            (TreeEvent::Changed(_), Some(QueueNode::Request(id))) if self.dialect != Dialect::Native => {
                self.requests.lock().on_request_changed(id);
            }
            (TreeEvent::Created(_), Some(QueueNode::CancelFlag(id))) => self.cancel(id, events).await,
            (TreeEvent::Created(_), Some(QueueNode::ResumeFlag(_))) => self.resumed.notify_waiters(),
            (TreeEvent::Created(_), Some(QueueNode::Lock(id))) => self.requests.lock().on_locked(id),
            (TreeEvent::Deleted(_), Some(QueueNode::Lock(id))) => self.requests.lock().on_unlocked(id),
            _ => return ControlFlow::Continue(()),
        }
        if self.requests.lock().first_place().is_some() {
            self.arrived.notify_waiters();
        }
        ControlFlow::Continue(())
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
                () = sleep(janitor.pause()) => {}
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

    /// Looks at each claim, or at those that are not new, since nothing tells of their cancels.
    async fn check_held(&self, all: bool, events: &mpsc::Sender<SourceEvent>) {
        let old = |(id, held): (&String, &mut HeldRun)| {
            (std::mem::replace(&mut held.is_old, true) || all).then(|| id.clone())
        };
        let held: Vec<String> = self.held.lock().iter_mut().filter_map(old).collect();
        for id in held {
            let (request, flag) = (self.at.queue.path("requests", &id), self.at.queue.cancel_flag(&id));
            let is_canceled =
                self.dialect == Dialect::ZuulExecutor && matches!(self.at.session.stat(&flag).await, Ok(Some(_)));
            if is_canceled || matches!(self.at.session.stat(&request).await, Ok(None)) {
                self.cancel(&id, events).await;
            }
        }
    }

    /// Watches the queue, and lists it.
    async fn watch(&self) -> Result<Trees, Error> {
        let tree = async |folder| TreeWatch::start(&self.at.session, &self.folder(folder)).await;
        let requests = tree("requests").await?;
        let locks = if self.dialect == Dialect::Native { Some(tree("locks").await?) } else { None };
        // From here on a claim that ends leaves what is known of its request to the events.
        let listed_at = self.listed_at.lock().take();
        self.offer_held_again();
        if let Err(error) = self.list(true).await {
            *self.listed_at.lock() = listed_at;
            return Err(error);
        }
        tracing::debug!(queue = self.at.queue.root(), session = self.at.session.id(), "watching");
        Ok(Trees { requests, locks })
    }

    /// What is held may have been handed back without an event: it is tried again once its claim has ended here.
    fn offer_held_again(&self) {
        self.held.lock().values_mut().for_each(|held| held.is_offered = true);
    }

    async fn unwatch(&self, trees: Option<Trees>) {
        *self.listed_at.lock() = Some(Instant::now());
        let Some(Trees { requests, locks }) = trees else { return };
        requests.end(&self.at.session, &self.folder("requests")).await;
        if let Some(locks) = locks {
            locks.end(&self.at.session, &self.folder("locks")).await;
        }
        tracing::debug!(queue = self.at.queue.root(), "not watching: more tasks wait than this worker needs to know");
    }

    /// Lists a queue that is not watched, and watches it again if few requests are free.
    async fn list_again(&self, again: bool) -> Result<Option<Trees>, Error> {
        let began_at = Instant::now();
        self.list(again).await?;
        if self.requests.lock().are_many() {
            *self.listed_at.lock() = Some(began_at);
            return Ok(None);
        }
        self.watch().await.map(Some)
    }

    /// Lists the queue, and reads what the list does not tell. With `again` that is all that did not wait for a worker.
    async fn list(&self, again: bool) -> Result<(), Error> {
        let names = async |folder| {
            let path = self.folder(folder);
            self.at.session.retry(|| self.at.session.children(&path)).await.map(Option::unwrap_or_default)
        };
        // The locks first: what was locked and has ended meanwhile is in neither list.
        let locked = if self.dialect == Dialect::Native { names("locks").await? } else { Vec::new() };
        let requests = names("requests").await?;
        let unread = {
            let held = self.held.lock();
            self.requests.lock().on_list(requests, locked, |id| held.contains_key(id), again)
        };
        self.read_all(unread).await
    }

    fn folder(&self, folder: &str) -> String {
        format!("{}/{folder}", self.at.queue.root())
    }

    async fn read_all(&self, ids: impl IntoIterator<Item: AsRef<str>>) -> Result<(), Error> {
        let reads = ids.into_iter().map(|id| async move { self.read(id.as_ref()).await });
        let reads = stream::iter(reads).buffer_unordered(ZOOKEEPER_READS_CONCURRENT_MAX);
        let reads: Vec<Result<(), Error>> = reads.collect().await;
        reads.into_iter().collect()
    }

    async fn read(&self, id: &str) -> Result<(), Error> {
        let path = self.at.queue.path("requests", id);
        let read = match self.at.session.retry(|| self.at.session.get(&path)).await {
            Err(error) if self.at.session.is_ended() => return Err(error),
            Err(error) => Err(error.to_string()),
            Ok(None) => {
                self.requests.lock().forget(id);
                return Ok(());
            }
            Ok(Some((data, stat))) => match JsonObject::parse(&data) {
                Ok(json) => Ok((json, stat)),
                Err(_) => Err(format!("a request of {} is no JSON object", self.at.queue.root())),
            },
        };
        let (json, stat) = match read {
            Ok(read) => read,
            Err(why) => {
                tracing::warn!(request = id, "{why}; leaving it alone");
                self.set_aside(id);
                return Ok(());
            }
        };
        let is_requested = match self.dialect {
            Dialect::Native => true,
            Dialect::ZuulMerger | Dialect::ZuulExecutor => json.get("state") == Some(RequestState::Requested),
        };
        let precedence = json.get("precedence").unwrap_or_default();
        // The names of other tasks tell their time.
        let created = if self.dialect == Dialect::Native { stat.ctime } else { stat.czxid };
        self.requests.lock().on_request(id, SeenRequest { precedence, created, is_requested });
        Ok(())
    }
}
