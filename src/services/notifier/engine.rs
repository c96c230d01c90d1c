//! Delivers the heads of due lanes, and stores what comes back.
//!
//! One task owns the [`Dispatcher`] and the health of the endpoints, and awaits nothing else: what the store is asked is a task beside
//! it. An attempt is one as well and returns with its reply; what the reply means is committed by a second task, and only then the lane
//! goes on. A commit that fails is repeated, never the attempt, and no attempt begins until the store takes one.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderValue};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::alerts;
use super::content_filter::ContentFilter;
use super::delivery::{AttemptResult, DeliveryRequest, Sender, SigningKey};
use super::format::{self, Format};
use super::intake::Intake;
use super::lease::{self, Term};
use super::registry::Registry;
use super::store::{
    AttemptRecord, Committed, DueLane, DueLanes, EndedAttempt, EndpointChange, EndpointState, Head, LaneEnd, Lease,
    Store, StoreFailure, StoredEndpoints,
};
use journeyman_domain::jitter::Jitter;
use journeyman_domain::lane::Reply;
use journeyman_domain::lane::dispatcher::{AttemptLimits, Dispatcher, EndpointLimits, LaneId, NextAttempt};
use journeyman_domain::lane::partitions::Partition;
use journeyman_domain::lane::retry::RetryPolicy;
use journeyman_domain::lane::wall_clock::WallClock;
use journeyman_domain::limits::{
    NOTIFIER_COMMITS_MAX, NOTIFIER_HEAD_AGE_MAX, NOTIFIER_HEADS_BYTES_MAX, NOTIFIER_LANES_WAITING_MAX,
    NOTIFIER_REFILL_INTERVAL, NOTIFIER_STORE_RETRY,
};
use journeyman_domain::staged::Stamp;
use journeyman_domain::time::Instant;
use journeyman_domain::trace_context::TraceParent;
use journeyman_platform::host::clock::{Clock, stamp};
use journeyman_platform::host::crash_points::crash_point;
use journeyman_platform::tasks::supervised;
use journeyman_worker::notify::Event;

/// An endpoint, as it is configured.
pub struct Endpoint {
    pub url: Url,
    pub(crate) headers: HeaderMap,
    pub(crate) keys: Arc<[SigningKey]>,
    pub timeout: Duration,
    pub(crate) retry: RetryPolicy,
    pub(crate) format: Format,
    pub(crate) filter: ContentFilter,
    pub limits: EndpointLimits,
}

pub(crate) struct Engine {
    store: Store,
    sender: Arc<Sender>,
    registry: Arc<Registry>,
    intake: Arc<Intake>,
    endpoints: BTreeMap<Arc<str>, EndpointEntry>,
    dispatcher: Dispatcher,
    /// The lanes that the dispatcher has, or whose attempts are under way.
    taken: HashMap<LaneId, Taken>,
    /// How often what is known of lanes may have changed.
    lane_changes: u64,
    /// Has a permit for each byte of data that may be kept.
    room_for_heads: Arc<Semaphore>,
    term: watch::Receiver<Term>,
    lease: Lease,
    /// What the task of the lease needs, until the engine runs.
    keeper: Option<(watch::Sender<Term>, watch::Receiver<Vec<Partition>>)>,
    let_go: watch::Sender<Vec<Partition>>,
    tasks: JoinSet<Step>,
    jitter: Jitter,
    clock: Clock,
    wall_clock: WallClock,
    /// A correction of the times of waiting heads that could not be stored: by how much the clock was set back, and when.
    uncorrected: Option<(i64, Stamp)>,
    /// The time at which the store is looked through whatever was told.
    look_at: Instant,
    /// The time at which the first pause ends.
    pause_ends: Option<Stamp>,
    changes: Reading,
    refill: Reading,
    /// There may be due lanes of any endpoint.
    is_all_behind: bool,
    /// The endpoints that may have due lanes which the dispatcher has not.
    behind: BTreeSet<Arc<str>>,
    /// The times at which the next lanes of endpoints are due. Endpoints without waiting lanes are not among them.
    next_due: BTreeMap<Arc<str>, Stamp>,
    /// What attempts bring can be stored.
    is_storing: bool,
    /// Ends of attempts that are not stored yet.
    commits: usize,
}

/// A read of the store: none, one under way, or one that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reading {
    No,
    Yes,
    /// It has changed since.
    Again,
    /// It has failed.
    Later(Instant),
}

struct EndpointEntry {
    config: Arc<Endpoint>,
    origin: Arc<str>,
    state: EndpointState,
    is_removed: bool,
    /// What attempts have changed is not in the store yet.
    is_unsaved: bool,
    is_saving: bool,
}

struct Taken {
    partition: Partition,
    next: Option<KnownHead>,
}

/// What a lane sends next, read with the end of its last attempt.
struct KnownHead {
    head: Box<Head>,
    read_at: Instant,
    _bytes: OwnedSemaphorePermit,
}

/// What the store has for the dispatcher.
#[derive(Default)]
struct Found {
    /// The endpoints with waiting lanes, if all were looked through.
    waiting: Option<Vec<(String, Stamp)>>,
    due: Vec<DueLanes>,
}

/// What a task of the engine returns.
enum Step {
    Sent { next: NextAttempt, sent: Result<Option<Box<Sent>>, StoreFailure> },
    Committed { commit: Commit, committed: Result<LaneEnd, StoreFailure> },
    Saved { endpoint: Arc<str>, saved: Result<(), StoreFailure> },
    Changed { read: Result<(StoredEndpoints, Option<Stamp>), StoreFailure> },
    Found { asked: Vec<(Arc<str>, usize)>, found: Result<Found, StoreFailure> },
    SetBack { by_ms: i64, since: Stamp, set: Result<(), StoreFailure> },
}

/// What an attempt has brought.
#[derive(Clone)]
struct Commit {
    next: NextAttempt,
    ended: Arc<EndedAttempt>,
    alerts: Vec<Arc<Event>>,
    /// The changes that were known when its transaction began.
    changes: u64,
}

struct Sent {
    head: Box<Head>,
    started_at: Stamp,
    result: AttemptResult,
}

impl EndpointEntry {
    fn may_deliver(&self, now: Stamp) -> bool {
        !self.is_removed && self.state.disabled.is_none() && self.state.paused_until.is_none_or(|until| until <= now)
    }
}

impl Engine {
    /// # Errors
    ///
    /// Fails if the store cannot be read.
    pub(crate) async fn new(
        store: Store,
        sender: Sender,
        registry: Arc<Registry>,
        limits: AttemptLimits,
        intake: Arc<Intake>,
    ) -> Result<Self, StoreFailure> {
        let clock = Clock::boot();
        let asked_at = clock.now();
        let (term_sender, term) = watch::channel(Term::new(store.keep_lease(Vec::new()).await?, asked_at));
        let (let_go, partitions) = watch::channel(Vec::new());
        let mut engine = Self {
            store,
            sender: Arc::new(sender),
            registry,
            intake,
            endpoints: BTreeMap::new(),
            dispatcher: Dispatcher::new(limits),
            taken: HashMap::new(),
            lane_changes: 0,
            room_for_heads: Arc::new(Semaphore::new(NOTIFIER_HEADS_BYTES_MAX)),
            lease: Lease::default(),
            term,
            keeper: Some((term_sender, partitions)),
            let_go,
            tasks: JoinSet::new(),
            jitter: Jitter::seeded(uuid::Uuid::new_v4().as_u64_pair().0),
            clock,
            wall_clock: WallClock::new(stamp(), clock.now()),
            uncorrected: None,
            look_at: Instant::ORIGIN,
            pause_ends: None,
            changes: Reading::No,
            refill: Reading::No,
            is_all_behind: true,
            behind: BTreeSet::new(),
            next_due: BTreeMap::new(),
            is_storing: true,
            commits: 0,
        };
        let stored = engine.store.endpoints().await?;
        engine.on_endpoints(stored);
        Ok(engine)
    }

    /// Runs until `stop`, then waits for the attempts that are under way.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut keeping = JoinSet::new();
        if let Some((term, let_go)) = self.keeper.take() {
            let (store, clock) = (self.store.clone(), self.clock);
            let renew = move |partitions| {
                let store = store.clone();
                async move { store.keep_lease(partitions).await }
            };
            keeping.spawn(supervised("a notifier's lease", lease::keep(renew, clock, term, let_go)));
        }
        loop {
            self.follow_lease();
            if stop.is_cancelled() {
                if self.tasks.is_empty() {
                    break;
                }
            } else {
                self.watch_clocks();
                self.read_changes();
                self.find_due_lanes();
                self.begin_all();
            }
            let wait = if stop.is_cancelled() { NOTIFIER_REFILL_INTERVAL } else { self.next_wait() };
            tokio::select! {
                Some(Ok(step)) = self.tasks.join_next() => self.on_step(step),
                endpoints = self.store.stored() => self.on_stored(endpoints),
                () = self.store.changed() => {
                    self.changes = self.changes.again();
                    self.forget_heads();
                }
                // `follow_lease` looks at it.
                Ok(()) = self.term.changed() => self.term.mark_changed(),
                () = tokio::time::sleep(wait) => {}
                () = stop.cancelled(), if !stop.is_cancelled() => {}
            }
        }
    }

    /// What the clocks say: a look at the store that nothing has asked for, and whether the wall clock was set.
    fn watch_clocks(&mut self) {
        let (now, at) = (stamp(), self.clock.now());
        // The safety net of the notifications.
        if self.look_at <= at || self.pause_ends.is_some_and(|ends| ends <= now) {
            (self.look_at, self.pause_ends) = (at.plus(NOTIFIER_REFILL_INTERVAL), None);
            self.changes = self.changes.again();
            self.is_all_behind = true;
            if let Some((by_ms, since)) = self.uncorrected.take() {
                self.correct_heads(by_ms, since);
            }
        }
        let Some(step) = self.wall_clock.step(now, at) else { return };
        tracing::warn!(
            alert = "clock-stepped",
            step_ms = step,
            "[alert operator] the clock of this host was set by {} s; heads that wait are tried when they were to be",
            step / 1_000
        );
        if step < 0 {
            self.set_back(step.saturating_neg(), now);
        }
        self.is_all_behind = true;
    }

    /// What waits for a time would wait for as much longer.
    fn set_back(&mut self, by_ms: i64, now: Stamp) {
        for entry in self.endpoints.values_mut() {
            if let Some(rests_until) = &mut entry.state.health.rests_until {
                rests_until.0 = rests_until.0.saturating_sub(by_ms);
                entry.is_unsaved = true;
            }
        }
        self.next_due.values_mut().for_each(|due| due.0 = due.0.saturating_sub(by_ms));
        self.correct_heads(by_ms, now);
    }

    fn correct_heads(&mut self, by_ms: i64, since: Stamp) {
        let store = self.store.clone();
        let setting = async move { Step::SetBack { by_ms, since, set: store.set_back(by_ms, since).await } };
        self.tasks.spawn(supervised("a correction of times", setting));
    }

    fn on_stored(&mut self, endpoints: Option<BTreeSet<Arc<str>>>) {
        let Some(endpoints) = endpoints else {
            self.is_all_behind = true;
            return;
        };
        for name in endpoints {
            if self.endpoints.contains_key(&name) {
                self.behind.insert(name);
            } else {
                // It was made just now.
                self.changes = self.changes.again();
            }
        }
    }

    /// Follows what operators and other nodes have changed.
    fn read_changes(&mut self) {
        if !self.changes.begin(self.clock.now()) {
            return;
        }
        let (store, now) = (self.store.clone(), stamp());
        let reading = async move {
            let read = async {
                let pause_ends = store.end_pauses(now).await?;
                Ok((store.endpoints().await?, pause_ends))
            };
            Step::Changed { read: read.await }
        };
        self.tasks.spawn(supervised("a read of endpoints", reading));
    }

    fn on_endpoints(&mut self, mut stored: StoredEndpoints) {
        self.registry.refresh(&stored);
        let registered = self.registry.current();
        for (name, entry) in &*registered {
            self.configure(name, &entry.endpoint);
        }
        let (now, clock) = (stamp(), self.clock.now());
        for (name, entry) in &mut self.endpoints {
            let (before, stored) = (entry.state.health, stored.states.remove(&**name).unwrap_or_default());
            // What attempts have shown goes the other way.
            let is_ours = entry.is_unsaved || entry.is_saving;
            let (health, disabled) = if is_ours { (before, entry.state.disabled) } else { (stored.health, None) };
            entry.state = EndpointState { health, disabled: stored.disabled.or(disabled), ..stored };
            if before.failures > 0 && health.failures == 0 {
                self.dispatcher.probe_at_once(&entry.origin, clock);
            }
            self.dispatcher.rest(name, instant(health.rests_until, now, clock));
            entry.is_removed = !registered.contains_key(name);
            if !entry.may_deliver(now) {
                for lane in self.dispatcher.remove(name) {
                    self.taken.remove(&lane);
                }
            }
            let pause_ends = entry.state.paused_until.filter(|until| *until > now);
            self.pause_ends = self.pause_ends.into_iter().chain(pause_ends).min();
        }
        let dispatcher = &mut self.dispatcher;
        self.endpoints.retain(|name, entry| !entry.is_removed || entry.is_saving || !dispatcher.drop_idle(name));
        self.next_due.retain(|name, _| self.endpoints.contains_key(name));
        self.behind.retain(|name| self.endpoints.contains_key(name));
    }

    fn configure(&mut self, name: &Arc<str>, config: &Arc<Endpoint>) {
        let origin: Arc<str> = config.url.origin().ascii_serialization().into();
        if let Some(entry) = self.endpoints.get_mut(name) {
            if Arc::ptr_eq(&entry.config, config) {
                return;
            }
            (entry.config, entry.origin) = (Arc::clone(config), Arc::clone(&origin));
        } else {
            let entry = EndpointEntry {
                config: Arc::clone(config),
                origin: Arc::clone(&origin),
                state: EndpointState::default(),
                is_removed: false,
                is_unsaved: false,
                is_saving: false,
            };
            self.is_all_behind = true;
            self.endpoints.insert(Arc::clone(name), entry);
        }
        self.dispatcher.limit(name, &origin, config.limits);
    }

    /// What this node may deliver no more is dropped before its attempts begin.
    fn follow_lease(&mut self) {
        if self.term.has_changed().is_ok_and(|has_changed| has_changed) || self.lease.nodes == 0 {
            let lease = self.term.borrow_and_update().lease.clone();
            if lease.has != self.lease.has {
                let (partitions, nodes) = (lease.has.len(), lease.nodes);
                tracing::info!(partitions, nodes, "this node delivers the lanes of its partitions");
                self.is_all_behind = true;
            }
            self.lease = lease;
            self.forget_heads();
        }
        let let_go = if self.lease.drain.is_empty() {
            Vec::new()
        } else {
            let under_way: HashSet<Partition> = self.taken.values().map(|taken| taken.partition).collect();
            self.lease.drain.iter().filter(|one| !under_way.contains(one)).copied().collect()
        };
        self.let_go.send_if_modified(|before| std::mem::replace(before, let_go) != *before);
    }

    /// Asks the store for due lanes that the dispatcher does not have.
    fn find_due_lanes(&mut self) {
        let (now, is_all) = (stamp(), self.is_all_behind);
        // Those that are taken are due as well.
        let (mut asked, taken) = (BTreeMap::new(), self.taken.len());
        let due = self.next_due.iter().filter(|(_, due)| **due <= now).map(|(name, _)| name);
        for name in due.chain(&self.behind) {
            let Some(entry) = self.endpoints.get(name) else { continue };
            if has_room(&self.dispatcher, name) && entry.may_deliver(now) {
                let room = NOTIFIER_LANES_WAITING_MAX.saturating_sub(self.dispatcher.waiting(name));
                asked.insert(Arc::clone(name), room + taken);
            }
        }
        if (asked.is_empty() && !is_all) || !self.refill.begin_if_idle(self.clock.now()) {
            return;
        }
        self.is_all_behind = false;
        for name in asked.keys() {
            self.behind.remove(name);
            self.next_due.remove(name);
        }
        let asked: Vec<_> = asked.into_iter().collect();
        let (store, wanted) = (self.store.clone(), asked.clone());
        self.tasks.spawn(supervised("a search for due lanes", async move {
            let found = async {
                let waiting = if is_all { Some(store.waiting().await?) } else { None };
                Ok(Found { waiting, due: store.due(wanted, now).await? })
            };
            let found = found.await;
            Step::Found { asked, found }
        }));
    }

    fn on_found(&mut self, asked: Vec<(Arc<str>, usize)>, found: Result<Found, StoreFailure>) {
        let Found { waiting, due } = match found {
            Ok(found) => {
                self.refill = Reading::No;
                found
            }
            Err(error) => {
                tracing::error!("cannot read due lanes, retrying: {error}");
                self.refill = Reading::Later(self.clock.now().plus(NOTIFIER_STORE_RETRY));
                self.is_all_behind = true;
                return;
            }
        };
        for (name, due) in waiting.into_iter().flatten() {
            if let Some((name, _)) = self.endpoints.get_key_value(&*name) {
                let name = Arc::clone(name);
                self.expect(&name, Some(due));
            }
        }
        for (DueLanes { endpoint, lanes, next }, (_, max)) in due.into_iter().zip(asked) {
            // An attempt may have ended since.
            self.expect(&endpoint, next);
            if lanes.len() >= max {
                self.behind.insert(Arc::clone(&endpoint));
            }
            let Some(entry) = self.endpoints.get(&endpoint) else { continue };
            for DueLane { id, partition } in lanes {
                if self.dispatcher.waiting(&endpoint) >= NOTIFIER_LANES_WAITING_MAX {
                    self.behind.insert(Arc::clone(&endpoint));
                    break;
                }
                if self.term.borrow().has(partition) && !self.taken.contains_key(&id) {
                    self.taken.insert(id, Taken { partition, next: None });
                    self.dispatcher.add(&endpoint, &entry.origin, id);
                }
            }
            let rests_until = instant(entry.state.health.rests_until, stamp(), self.clock.now());
            self.dispatcher.rest(&endpoint, rests_until);
        }
    }

    /// The next lane of an endpoint is due then, or earlier.
    fn expect(&mut self, endpoint: &Arc<str>, due: Option<Stamp>) {
        if let Some(due) = due {
            let next = self.next_due.entry(Arc::clone(endpoint)).or_insert(due);
            *next = due.min(*next);
        }
    }

    /// The time until something is due that the dispatcher has, or the store.
    fn next_wait(&self) -> Duration {
        let (now, at) = (stamp(), self.clock.now());
        // One with many waiting lanes needs no others.
        let wants = |name: &Arc<str>| {
            self.endpoints.get(name).is_some_and(|entry| entry.may_deliver(now)) && has_room(&self.dispatcher, name)
        };
        // A search is awaited, or the end of the pause after it.
        let due = self.next_due.iter().filter(|(name, _)| wants(name)).map(|(_, due)| *due);
        let due = due.filter(|_| self.refill == Reading::No).chain(self.pause_ends).min();
        let of_store = due.map(|due| due.since(now));
        let later = |reading| if let Reading::Later(at) = reading { Some(at) } else { None };
        let readings = [self.changes, self.refill].into_iter().filter_map(later);
        let of_clock = self.dispatcher.next_deadline().into_iter().chain(readings).chain([self.look_at]);
        let of_clock = of_clock.filter(|due| *due > at).map(|due| due.since(at));
        of_store.into_iter().chain(of_clock).min().unwrap_or(NOTIFIER_REFILL_INTERVAL).max(Duration::from_millis(1))
    }

    fn begin_all(&mut self) {
        let now = self.clock.now();
        while self.is_storing
            && self.commits < NOTIFIER_COMMITS_MAX
            && let Some(next) = self.dispatcher.begin(now)
        {
            if self.is_drained(next.lane) {
                self.dispatcher.forget(&next);
                self.taken.remove(&next.lane);
            } else {
                self.begin(next);
            }
        }
    }

    /// Another node is to have the lane.
    fn is_drained(&self, lane: LaneId) -> bool {
        self.taken.get(&lane).is_none_or(|taken| !self.term.borrow().has(taken.partition))
    }

    /// What is known of lanes may have changed.
    fn forget_heads(&mut self) {
        self.lane_changes += 1;
        self.taken.values_mut().for_each(|taken| taken.next = None);
    }

    fn begin(&mut self, next: NextAttempt) {
        let Some(entry) = self.endpoints.get(&next.endpoint) else { return };
        let (known, now) = (self.taken.get_mut(&next.lane).and_then(|taken| taken.next.take()), self.clock.now());
        let known = known.filter(|known| now.since(known.read_at) < NOTIFIER_HEAD_AGE_MAX).map(|known| known.head);
        // A change that was answered, such as of a key, counts for each attempt that begins after it.
        let registered = self.registry.current();
        let endpoint = registered.get(&next.endpoint).map_or(&entry.config, |entry| &entry.endpoint);
        let (store, sender, endpoint) = (self.store.clone(), Arc::clone(&self.sender), Arc::clone(endpoint));
        let (lease_ended, term, clock) = (self.term.borrow().ended.clone(), self.term.clone(), self.clock);
        self.tasks.spawn(supervised("an attempt", async move {
            let attempt = async {
                let head = match known {
                    Some(head) => Some(head),
                    None => store.head(next.lane, stamp()).await?,
                };
                let Some(head) = head else { return Ok(None) };
                let until = term.borrow().until;
                if until.is_some_and(|until| until <= clock.now()) {
                    return Ok(None);
                }
                let started_at = stamp();
                let result = sender.send(&request(&head, &endpoint, started_at)).await;
                crash_point("notifier-sent");
                Ok(Some(Box::new(Sent { head, started_at, result })))
            };
            let sent = lease_ended.run_until_cancelled(attempt).await.unwrap_or(Ok(None));
            Step::Sent { next, sent }
        }));
    }

    fn on_step(&mut self, step: Step) {
        match step {
            Step::Sent { next, sent: Ok(Some(sent)) } => self.on_sent(next, *sent),
            Step::Sent { next, sent } => {
                if let Err(error) = sent {
                    tracing::error!("cannot read the head of a lane, retrying: {error}");
                }
                self.dispatcher.forget(&next);
                self.give_back(&next);
            }
            Step::Committed { commit, committed } => self.on_committed(commit, committed),
            Step::Saved { endpoint, saved } => {
                if let Err(error) = saved {
                    tracing::error!("cannot store the state of endpoint {endpoint}: {error}");
                }
                if let Some(entry) = self.endpoints.get_mut(&endpoint) {
                    entry.is_saving = false;
                }
                self.save(&endpoint);
            }
            Step::Changed { read: Ok((stored, pause_ends)) } => {
                self.changes.end();
                self.pause_ends = pause_ends;
                self.on_endpoints(stored);
                self.is_all_behind = true;
            }
            Step::Changed { read: Err(error) } => {
                tracing::error!("cannot read the endpoints, retrying: {error}");
                self.changes = Reading::Later(self.clock.now().plus(NOTIFIER_STORE_RETRY));
            }
            Step::Found { asked, found } => self.on_found(asked, found),
            Step::SetBack { set: Ok(()), .. } => self.is_all_behind = true,
            Step::SetBack { by_ms, since, set: Err(error) } => {
                tracing::error!("cannot correct the times of heads that wait, retrying: {error}");
                self.uncorrected = Some((by_ms, since));
            }
        }
    }

    fn on_committed(&mut self, commit: Commit, committed: Result<LaneEnd, StoreFailure>) {
        let next = &commit.next;
        self.commits = self.commits.saturating_sub(1);
        let could_store = std::mem::replace(&mut self.is_storing, committed.is_ok());
        match committed {
            Ok((Committed::Due(Some(due)), head)) if due <= stamp() => {
                let is_drained = self.is_drained(next.lane);
                let entry = self.endpoints.get(&next.endpoint);
                if let Some(entry) = entry.filter(|one| !is_drained && one.may_deliver(stamp())) {
                    self.dispatcher.add(&next.endpoint, &entry.origin, next.lane);
                    if let Some(taken) = self.taken.get_mut(&next.lane) {
                        taken.next = head.filter(|_| commit.changes == self.lane_changes).and_then(|head| {
                            let bytes = u32::try_from(head.data.len()).unwrap_or(u32::MAX);
                            let _bytes = Arc::clone(&self.room_for_heads).try_acquire_many_owned(bytes).ok()?;
                            Some(KnownHead { head, read_at: self.clock.now(), _bytes })
                        });
                    }
                } else {
                    self.taken.remove(&next.lane);
                }
            }
            Ok((Committed::Due(due), _)) => {
                self.taken.remove(&next.lane);
                self.expect(&next.endpoint, due);
                if due.is_none() {
                    // A message that came after the commit was announced while the lane was taken.
                    self.behind.insert(Arc::clone(&next.endpoint));
                }
            }
            Ok((Committed::Refused, _)) => {
                tracing::warn!(endpoint = &*next.endpoint, "an attempt is not stored: its lane has gone on without it");
                self.give_back(next);
            }
            Err(error) => {
                // What is wrong with one lane holds up no others.
                self.is_storing = matches!(error, StoreFailure::Failed(_));
                if self.is_storing {
                    tracing::error!(endpoint = &*next.endpoint, "cannot store an attempt, retrying: {error}");
                } else if could_store {
                    tracing::error!("cannot store an attempt, retrying; no other one begins until then: {error}");
                }
                self.commit(commit, NOTIFIER_STORE_RETRY);
            }
        }
    }

    /// Stores what an attempt has brought, unless the lease ends first: another node repeats the attempt then.
    fn commit(&mut self, mut commit: Commit, wait: Duration) {
        commit.changes = self.lane_changes;
        let (store, intake, lease_ended) =
            (self.store.clone(), Arc::clone(&self.intake), self.term.borrow().ended.clone());
        self.commits += 1;
        self.tasks.spawn(supervised("an attempt", async move {
            let committing = async {
                // The timer has a tick of a millisecond.
                if !wait.is_zero() {
                    tokio::time::sleep(wait).await;
                }
                intake.accept_own(commit.alerts.clone()).await;
                let committed = store.end_attempt(Arc::clone(&commit.ended)).await;
                crash_point("notifier-committed");
                committed
            };
            let committed = lease_ended.run_until_cancelled(committing).await.unwrap_or(Ok((Committed::Refused, None)));
            Step::Committed { commit, committed }
        }));
    }

    /// The lane is due still.
    fn give_back(&mut self, next: &NextAttempt) {
        self.taken.remove(&next.lane);
        self.expect(&next.endpoint, Some(stamp().plus(NOTIFIER_STORE_RETRY)));
    }

    fn on_sent(&mut self, next: NextAttempt, sent: Sent) {
        let now = stamp();
        let Sent { head, started_at, result } = sent;
        let reply = reply_of(&result);
        self.dispatcher.end(&next, reply, self.clock.now());
        let Some(entry) = self.endpoints.get_mut(&next.endpoint) else { return };
        let mut state = head.state;
        let verdict = state.on_reply(reply, &entry.config.retry, now, &mut self.jitter);
        tracing::debug!(endpoint = &*next.endpoint, epoch = head.epoch, seq = head.seq, ?verdict, "attempted");
        let before = entry.state.health;
        let disable = entry.state.health.on_reply(reply, now).filter(|_| entry.state.disabled.is_none());
        entry.state.disabled = entry.state.disabled.or(disable);
        entry.is_unsaved |= entry.state.health != before || disable.is_some();
        self.dispatcher.rest(&next.endpoint, instant(entry.state.health.rests_until, now, self.clock.now()));
        let after = entry.state.health;
        let change = alerts::Change { endpoint: &next.endpoint, before, after, disabled: disable, verdict };
        let alerts = change.alerts(&head);
        let counters = &self.intake.counters;
        counters.on_attempt(&head, &result, verdict, now);
        let probe_at = self.dispatcher.probe_at(&next.origin).map(|at| now.plus(at.since(self.clock.now())));
        counters.on_breaker(&next.endpoint, &next.origin, probe_at);
        if disable.is_some() {
            for lane in self.dispatcher.remove(&next.endpoint) {
                self.taken.remove(&lane);
            }
        }
        self.save(&next.endpoint);
        let attempt = attempt_record(started_at, result);
        let ended = Arc::new(EndedAttempt { head: *head, state, attempt, verdict, at: now });
        let alerts = alerts.into_iter().map(Arc::new).collect();
        self.commit(Commit { next, ended, alerts, changes: 0 }, Duration::ZERO);
    }

    /// Stores what attempts have changed of an endpoint, one change after another.
    fn save(&mut self, endpoint: &Arc<str>) {
        let Some(entry) = self.endpoints.get_mut(endpoint) else { return };
        if entry.is_saving || !entry.is_unsaved {
            return;
        }
        (entry.is_saving, entry.is_unsaved) = (true, false);
        let (store, endpoint, state) = (self.store.clone(), Arc::clone(endpoint), entry.state.clone());
        self.tasks.spawn(supervised("an endpoint's health", async move {
            let saved = async {
                store.set_health(&endpoint, state.health).await?;
                match state.disabled {
                    Some(reason) => {
                        store.change_endpoint(&endpoint, EndpointChange::Disable(reason), None, stamp()).await
                    }
                    None => Ok(()),
                }
            };
            let saved = saved.await;
            Step::Saved { endpoint, saved }
        }));
    }
}

impl Reading {
    /// There is something new to read.
    const fn again(self) -> Self {
        match self {
            Self::No | Self::Later(_) => Self::Later(Instant::ORIGIN),
            Self::Yes | Self::Again => Self::Again,
        }
    }

    /// Returns whether a read is to begin that was asked for.
    fn begin(&mut self, now: Instant) -> bool {
        let is_due = matches!(*self, Self::Later(at) if at <= now);
        if is_due {
            *self = Self::Yes;
        }
        is_due
    }

    /// Begins as [`Reading::begin`] does, even if nothing has asked for the read.
    fn begin_if_idle(&mut self, now: Instant) -> bool {
        if *self == Self::No {
            *self = Self::Later(Instant::ORIGIN);
        }
        self.begin(now)
    }

    fn end(&mut self) {
        *self = if *self == Self::Again { Self::Later(Instant::ORIGIN) } else { Self::No };
    }
}

/// True if the dispatcher takes more lanes of an endpoint.
fn has_room(dispatcher: &Dispatcher, endpoint: &str) -> bool {
    dispatcher.waiting(endpoint) <= NOTIFIER_LANES_WAITING_MAX / 2
}

fn instant(at: Option<Stamp>, now: Stamp, clock: Instant) -> Option<Instant> {
    at.map(|at| clock.plus(at.since(now)))
}

fn request(head: &Head, endpoint: &Endpoint, at: Stamp) -> DeliveryRequest {
    let mut headers = endpoint.headers.clone();
    headers.insert("journeyman-epoch", head.epoch.into());
    headers.insert("journeyman-seq", head.seq.into());
    if let Ok(key) = HeaderValue::from_bytes(head.key.as_bytes()) {
        headers.insert("journeyman-lane", key);
    }
    if let Some(trace) = traceparent(&head.data) {
        headers.insert("traceparent", trace);
    }
    if head.is_replay {
        headers.insert("journeyman-replay", HeaderValue::from_static("true"));
    }
    DeliveryRequest {
        url: endpoint.url.clone(),
        webhook_id: format::webhook_id(&head.source, &head.event_id),
        at: Duration::from_millis(u64::try_from(at.0).unwrap_or_default()),
        headers,
        content_type: endpoint.format.content_type(),
        body: endpoint.format.body(head).into(),
        keys: Arc::clone(&endpoint.keys),
        timeout: endpoint.timeout,
    }
}

/// The trace that the data of an event names, as what happened belongs to it.
fn traceparent(data: &[u8]) -> Option<HeaderValue> {
    #[derive(serde::Deserialize)]
    struct Traced {
        traceparent: String,
    }
    let Traced { traceparent } = serde_json::from_slice(data).ok()?;
    TraceParent::parse(&traceparent)?;
    HeaderValue::from_str(&traceparent).ok()
}

fn reply_of(result: &AttemptResult) -> Reply {
    match &result.result {
        Ok(answer) => {
            Reply::Answered { status: answer.status, retry_after: answer.retry_after, control: answer.control }
        }
        Err(error) => Reply::Failed(error.class),
    }
}

fn attempt_record(started_at: Stamp, attempt: AttemptResult) -> AttemptRecord {
    let took_ms = i64::try_from(attempt.took.as_millis()).unwrap_or(i64::MAX);
    let (status, error, detail) = match attempt.result {
        Ok(answer) => (Some(answer.status), None, answer.head.into()),
        Err(error) => (None, Some(error.class.as_str()), error.text.into_bytes()),
    };
    AttemptRecord { started_at, took_ms, status, error, detail }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
