//! Delivers the heads of due lanes, and stores what comes back.
//!
//! One task owns the [`Dispatcher`], the health of the endpoints and the lease of this node. An attempt runs beside it and returns with its reply; what
//! the reply means is committed by a second task, and only then the lane goes on.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderValue};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::alerts;
use super::delivery::{AttemptResult, DeliveryRequest, Sender, SigningKey};
use super::format::{self, Format};
use super::intake::Intake;
use super::registry::Registry;
use super::store::{
    AttemptRecord, Committed, DueLane, EndpointChange, EndpointState, Head, Lease, Store, StoreFailure,
};
use journeyman_domain::jitter::Jitter;
use journeyman_domain::lane::Reply;
use journeyman_domain::lane::dispatcher::{AttemptLimits, Dispatcher, EndpointLimits, LaneId, NextAttempt};
use journeyman_domain::lane::partitions::Partition;
use journeyman_domain::lane::retry::RetryPolicy;
use journeyman_domain::limits::{
    NOTIFIER_LANES_WAITING_MAX, NOTIFIER_LEASE_RENEWAL, NOTIFIER_REFILL_INTERVAL, NOTIFIER_STORE_RETRY,
};
use journeyman_domain::staged::Stamp;
use journeyman_domain::time::Instant;
use journeyman_platform::host::clock::{Clock, stamp};
use journeyman_platform::host::crash_points::crash_point;
use journeyman_platform::tasks::supervised;

/// An endpoint, as it is configured.
pub struct Endpoint {
    pub url: Url,
    pub(crate) headers: HeaderMap,
    pub(crate) keys: Arc<[SigningKey]>,
    pub timeout: Duration,
    pub(crate) retry: RetryPolicy,
    pub(crate) format: Format,
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
    taken: HashMap<LaneId, Partition>,
    lease: HeldLease,
    tasks: JoinSet<Step>,
    jitter: Jitter,
    clock: Clock,
}

struct EndpointEntry {
    config: Arc<Endpoint>,
    origin: Arc<str>,
    state: EndpointState,
    is_removed: bool,
    /// What attempts have changed is not in the store yet.
    is_unsaved: bool,
    is_saving: bool,
    /// There may be due lanes that the dispatcher does not have.
    is_behind: bool,
    next_due: Option<Stamp>,
}

/// What this node may deliver.
#[derive(Default)]
struct HeldLease {
    lease: Lease,
    /// Nothing is sent later. `None` is for ever. Attempts look at it too, in case this process has slept.
    until: Arc<Mutex<Option<Instant>>>,
    /// The time of its renewal.
    renew_at: Option<Instant>,
    is_renewing: bool,
    /// Ends the attempts of this lease.
    ended: CancellationToken,
}

/// What a task of the engine returns.
enum Step {
    Sent { next: NextAttempt, sent: Result<Option<Box<Sent>>, StoreFailure> },
    Committed { next: NextAttempt, committed: Result<Committed, StoreFailure> },
    Saved { endpoint: Arc<str>, saved: Result<(), StoreFailure> },
    Renewed { asked_at: Instant, renewed: Result<(Lease, Option<Duration>), StoreFailure> },
}

struct Sent {
    head: Head,
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
        let mut engine = Self {
            store,
            sender: Arc::new(sender),
            registry,
            intake,
            endpoints: BTreeMap::new(),
            dispatcher: Dispatcher::new(limits),
            taken: HashMap::new(),
            lease: HeldLease::default(),
            tasks: JoinSet::new(),
            jitter: Jitter::seeded(uuid::Uuid::new_v4().as_u64_pair().0),
            clock: Clock::boot(),
        };
        engine.read_endpoints().await?;
        let asked_at = engine.clock.now();
        let renewed = engine.store.keep_lease(Vec::new()).await?;
        engine.on_renewed(asked_at, renewed);
        Ok(engine)
    }

    /// Runs until `stop`, then waits for the attempts that are under way.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut look_at = Instant::ORIGIN;
        loop {
            // The safety net of the notifications.
            let now = self.clock.now();
            if look_at <= now {
                look_at = now.plus(NOTIFIER_REFILL_INTERVAL);
                self.on_changed().await;
            }
            let refilled = if stop.is_cancelled() { Ok(()) } else { self.refill().await };
            let mut wait = look_at.since(now);
            match refilled {
                Ok(()) => wait = wait.min(self.next_wait()),
                Err(error) => {
                    tracing::error!("cannot read due lanes, retrying: {error}");
                    wait = NOTIFIER_STORE_RETRY;
                }
            }
            self.keep_lease();
            if !stop.is_cancelled() {
                self.begin_all();
            } else if self.tasks.is_empty() {
                break;
            }
            tokio::select! {
                Some(Ok(step)) = self.tasks.join_next() => self.on_step(step),
                () = self.store.stored() => self.look_for_due_lanes(),
                () = self.store.changed() => self.on_changed().await,
                () = tokio::time::sleep(wait) => {}
                () = stop.cancelled(), if !stop.is_cancelled() => {}
            }
        }
        if let Err(error) = self.store.end_lease().await {
            tracing::warn!("other nodes take over when the lease ends: {error}");
        }
    }

    fn look_for_due_lanes(&mut self) {
        self.endpoints.values_mut().for_each(|entry| entry.is_behind = true);
    }

    async fn on_changed(&mut self) {
        let read = match self.store.end_pauses(stamp()).await {
            Ok(_) => self.read_endpoints().await,
            Err(error) => Err(error),
        };
        if let Err(error) = read {
            tracing::error!("cannot read the endpoints, retrying: {error}");
        }
        self.look_for_due_lanes();
    }

    /// Follows what operators and other nodes have changed.
    async fn read_endpoints(&mut self) -> Result<(), StoreFailure> {
        let read = self.registry.begin_read();
        let mut states = self.store.endpoints().await?;
        self.registry.refresh(read, &states);
        let registered = self.registry.current();
        for (name, entry) in &*registered {
            self.configure(name, &entry.endpoint);
        }
        let (now, clock) = (stamp(), self.clock.now());
        for (name, entry) in &mut self.endpoints {
            let (before, stored) = (entry.state.health, states.remove(&**name).unwrap_or_default());
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
        }
        Ok(())
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
                is_behind: true,
                next_due: None,
            };
            self.endpoints.insert(Arc::clone(name), entry);
        }
        self.dispatcher.limit(name, &origin, config.limits);
    }

    /// Renews the lease when it is time, and ends what is under way if it could not be renewed in time.
    fn keep_lease(&mut self) {
        let now = self.clock.now();
        if self.lease.until.lock().is_some_and(|until| until <= now) && !self.lease.lease.has.is_empty() {
            tracing::warn!("this node could not renew its lease in time; its attempts are repeated");
            self.lease.lease = Lease::default();
            self.lease.ended.cancel();
            let dispatcher = &mut self.dispatcher;
            let waiting = self.endpoints.keys().flat_map(|name| dispatcher.remove(name));
            for lane in waiting {
                self.taken.remove(&lane);
            }
        }
        if self.lease.is_renewing || self.lease.renew_at.is_none_or(|at| now < at) {
            return;
        }
        self.lease.is_renewing = true;
        let under_way: HashSet<Partition> = self.taken.values().copied().collect();
        let let_go =
            self.lease.lease.drain.iter().filter(|partition| !under_way.contains(partition)).copied().collect();
        let store = self.store.clone();
        let renewing = async move { Step::Renewed { asked_at: now, renewed: store.keep_lease(let_go).await } };
        self.tasks.spawn(supervised("a notifier's lease", renewing));
    }

    fn on_renewed(&mut self, asked_at: Instant, (lease, lasts): (Lease, Option<Duration>)) {
        if lease.has != self.lease.lease.has {
            tracing::info!(
                partitions = lease.has.len(),
                nodes = lease.nodes,
                "this node delivers the lanes of its partitions"
            );
            self.look_for_due_lanes();
        }
        *self.lease.until.lock() = lasts.map(|lasts| asked_at.plus(lasts * 3 / 4));
        self.lease.renew_at = lasts.map(|_| asked_at.plus(NOTIFIER_LEASE_RENEWAL));
        self.lease.lease = lease;
        if self.lease.ended.is_cancelled() {
            self.lease.ended = CancellationToken::new();
        }
    }

    /// Gives the dispatcher due lanes that it does not have.
    async fn refill(&mut self) -> Result<(), StoreFailure> {
        let now = stamp();
        for (name, entry) in &mut self.endpoints {
            let is_due = entry.is_behind || entry.next_due.is_some_and(|due| due <= now);
            let room = NOTIFIER_LANES_WAITING_MAX.saturating_sub(self.dispatcher.waiting(name));
            if !is_due || !has_room(&self.dispatcher, name) || !entry.may_deliver(now) {
                continue;
            }
            // Those that are taken are due as well.
            let (found, next_due) = self.store.due(name, now, room + self.taken.len()).await?;
            entry.next_due = next_due;
            entry.is_behind = found.len() > room;
            for DueLane { id, partition } in found {
                let is_ours = self.lease.lease.has.contains(&partition) && !self.lease.lease.drain.contains(&partition);
                if is_ours && !self.taken.contains_key(&id) {
                    self.taken.insert(id, partition);
                    self.dispatcher.add(name, &entry.origin, id);
                }
            }
            self.dispatcher.rest(name, instant(entry.state.health.rests_until, now, self.clock.now()));
        }
        Ok(())
    }

    /// The time until something is due that the dispatcher has, or the store.
    fn next_wait(&self) -> Duration {
        let (now, at) = (stamp(), self.clock.now());
        // One with many waiting lanes needs no others.
        let wants =
            |(name, entry): &(&Arc<str>, &EndpointEntry)| entry.may_deliver(now) && has_room(&self.dispatcher, name);
        let due = self.endpoints.iter().filter(wants).filter_map(|(_, one)| one.next_due);
        let of_store = due.min().map(|due| due.since(now));
        let deadlines = self.dispatcher.next_deadline().into_iter();
        let renewal = self.lease.renew_at.filter(|_| !self.lease.is_renewing);
        let of_clock =
            deadlines.chain(renewal).chain(*self.lease.until.lock()).filter(|due| *due > at).map(|due| due.since(at));
        of_store.into_iter().chain(of_clock).min().unwrap_or(NOTIFIER_REFILL_INTERVAL).max(Duration::from_millis(1))
    }

    fn begin_all(&mut self) {
        let now = self.clock.now();
        while let Some(next) = self.dispatcher.begin(now) {
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
        self.taken.get(&lane).is_none_or(|partition| self.lease.lease.drain.contains(partition))
    }

    fn begin(&mut self, next: NextAttempt) {
        let Some(entry) = self.endpoints.get(&next.endpoint) else { return };
        let (store, sender, endpoint) = (self.store.clone(), Arc::clone(&self.sender), Arc::clone(&entry.config));
        let (lease_ended, until, clock) = (self.lease.ended.clone(), Arc::clone(&self.lease.until), self.clock);
        self.tasks.spawn(supervised("an attempt", async move {
            let attempt = async {
                let Some(head) = store.head(next.lane).await? else { return Ok(None) };
                if until.lock().is_some_and(|until| until <= clock.now()) {
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
            Step::Committed { next, committed: Ok(Committed::Due(Some(due))) } if due <= stamp() => {
                let is_drained = self.is_drained(next.lane);
                let entry = self.endpoints.get(&next.endpoint);
                if let Some(entry) = entry.filter(|one| !is_drained && one.may_deliver(stamp())) {
                    self.dispatcher.add(&next.endpoint, &entry.origin, next.lane);
                } else {
                    self.taken.remove(&next.lane);
                }
            }
            Step::Committed { next, committed: Ok(Committed::Due(due)) } => {
                self.taken.remove(&next.lane);
                if let Some(entry) = self.endpoints.get_mut(&next.endpoint) {
                    entry.next_due = entry.next_due.into_iter().chain(due).min();
                    // A message that came after the commit was announced while the lane was taken.
                    entry.is_behind |= due.is_none();
                }
            }
            Step::Committed { next, committed: Ok(Committed::Refused) } => {
                tracing::warn!(endpoint = &*next.endpoint, "an attempt is not stored: its lane has gone on without it");
                self.give_back(&next);
            }
            Step::Committed { next, committed: Err(error) } => {
                tracing::error!("cannot store an attempt, so it is repeated: {error}");
                self.give_back(&next);
            }
            Step::Saved { endpoint, saved } => {
                if let Err(error) = saved {
                    tracing::error!("cannot store the state of endpoint {endpoint}: {error}");
                }
                if let Some(entry) = self.endpoints.get_mut(&endpoint) {
                    entry.is_saving = false;
                }
                self.save(&endpoint);
            }
            Step::Renewed { asked_at, renewed } => {
                self.lease.is_renewing = false;
                match renewed {
                    Ok(renewed) => self.on_renewed(asked_at, renewed),
                    Err(error) => {
                        tracing::error!("cannot renew the lease of this node, retrying: {error}");
                        self.lease.renew_at = Some(self.clock.now().plus(NOTIFIER_STORE_RETRY));
                    }
                }
            }
        }
    }

    /// The lane is due still.
    fn give_back(&mut self, next: &NextAttempt) {
        self.taken.remove(&next.lane);
        if let Some(entry) = self.endpoints.get_mut(&next.endpoint) {
            entry.next_due = Some(stamp().plus(NOTIFIER_STORE_RETRY));
        }
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
        let (store, intake) = (self.store.clone(), Arc::clone(&self.intake));
        self.tasks.spawn(supervised("an attempt", async move {
            intake.accept_own(alerts).await;
            let attempt = attempt_record(started_at, result);
            let committed = store.end_attempt(head, state, attempt, verdict, now).await;
            crash_point("notifier-committed");
            Step::Committed { next, committed }
        }));
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
    match attempt.result {
        Ok(answer) => {
            let (status, detail) = (Some(answer.status), answer.head.into());
            AttemptRecord { started_at, took_ms, status, error: None, detail }
        }
        Err(error) => {
            let (class, detail) = (Some(error.class.as_str()), error.text.into_bytes());
            AttemptRecord { started_at, took_ms, status: None, error: class, detail }
        }
    }
}
