//! Delivers the heads of due lanes, and stores what comes back.
//!
//! One task owns the [`Dispatcher`] and the health of the endpoints. An attempt runs beside it and returns with its reply; what
//! the reply means is committed by a second task, and only then the lane goes on.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use reqwest::Url;
use reqwest::header::{HeaderMap, HeaderValue};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::delivery::{AttemptResult, DeliveryRequest, Sender, SigningKey};
use super::format::{self, Format};
use super::stamp;
use super::store::{AttemptRecord, Head, Store, StoreFailure};
use crate::domain::jitter::Jitter;
use crate::domain::lane::Reply;
use crate::domain::lane::dispatcher::{AttemptLimits, Dispatcher, EndpointLimits, LaneId, NextAttempt};
use crate::domain::lane::endpoint::EndpointHealth;
use crate::domain::lane::retry::RetryPolicy;
use crate::domain::staged::Stamp;
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::host::crash_points::crash_point;
use crate::limits::{NOTIFIER_LANES_WAITING_MAX, NOTIFIER_REFILL_INTERVAL, NOTIFIER_STORE_RETRY};

/// An endpoint, as it is configured.
pub(crate) struct Endpoint {
    pub(crate) url: Url,
    pub(crate) headers: HeaderMap,
    pub(crate) keys: Arc<[SigningKey]>,
    pub(crate) timeout: Duration,
    pub(crate) retry: RetryPolicy,
    pub(crate) format: Format,
    pub(crate) limits: EndpointLimits,
}

pub(crate) struct Engine {
    store: Store,
    sender: Arc<Sender>,
    endpoints: BTreeMap<Arc<str>, EndpointEntry>,
    dispatcher: Dispatcher,
    /// The lanes that the dispatcher has, or whose attempts are under way.
    taken: HashSet<LaneId>,
    tasks: JoinSet<Step>,
    jitter: Jitter,
    clock: Clock,
    /// Notified when events were stored.
    stored: Arc<Notify>,
}

struct EndpointEntry {
    config: Arc<Endpoint>,
    origin: Arc<str>,
    health: EndpointHealth,
    /// Whether there may be due lanes that the dispatcher does not have.
    is_behind: bool,
    next_due: Option<Stamp>,
}

/// Of one attempt.
enum Step {
    Sent { next: NextAttempt, sent: Result<Option<Box<Sent>>, StoreFailure> },
    Committed { next: NextAttempt, due: Result<Option<Stamp>, StoreFailure> },
}

struct Sent {
    head: Head,
    started_at: Stamp,
    result: AttemptResult,
}

impl Engine {
    /// # Errors
    ///
    /// If the store cannot be read.
    pub(crate) async fn new(
        store: Store,
        sender: Sender,
        endpoints: BTreeMap<Arc<str>, Endpoint>,
        limits: AttemptLimits,
        stored: Arc<Notify>,
    ) -> Result<Self, StoreFailure> {
        let (mut entries, mut dispatcher) = (BTreeMap::new(), Dispatcher::new(limits));
        for (name, config) in endpoints {
            let health = store.health(&name).await?;
            let origin = config.url.origin().ascii_serialization().into();
            dispatcher.limit(&name, &origin, config.limits);
            let entry = EndpointEntry { config: Arc::new(config), origin, health, is_behind: true, next_due: None };
            entries.insert(name, entry);
        }
        Ok(Self {
            store,
            sender: Arc::new(sender),
            endpoints: entries,
            dispatcher,
            taken: HashSet::new(),
            tasks: JoinSet::new(),
            jitter: Jitter::seeded(uuid::Uuid::new_v4().as_u64_pair().0),
            clock: Clock::boot(),
            stored,
        })
    }

    /// Runs until `stop`, then waits for the attempts that are under way.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        loop {
            let refilled = if stop.is_cancelled() { Ok(()) } else { self.refill().await };
            let mut wait = NOTIFIER_REFILL_INTERVAL;
            match refilled {
                Ok(()) => wait = wait.min(self.next_wait()),
                Err(error) => {
                    tracing::error!("cannot read due lanes, retrying: {error}");
                    wait = NOTIFIER_STORE_RETRY;
                }
            }
            while !stop.is_cancelled()
                && let Some(next) = self.dispatcher.begin(self.clock.now())
            {
                self.begin(next);
            }
            if stop.is_cancelled() && self.tasks.is_empty() {
                return;
            }
            tokio::select! {
                Some(step) = self.tasks.join_next() => match step {
                    Ok(step) => self.on_step(step),
                    // A bug. Its lane goes on after a restart.
                    Err(error) => tracing::error!("an attempt has panicked: {error}"),
                },
                () = self.stored.notified() => self.look_for_due_lanes(),
                // The safety net of the notification.
                () = tokio::time::sleep(wait) => self.look_for_due_lanes(),
                () = stop.cancelled(), if !stop.is_cancelled() => {}
            }
        }
    }

    fn look_for_due_lanes(&mut self) {
        self.endpoints.values_mut().for_each(|entry| entry.is_behind = true);
    }

    /// Gives the dispatcher due lanes that it does not have.
    async fn refill(&mut self) -> Result<(), StoreFailure> {
        let now = stamp();
        for (name, entry) in &mut self.endpoints {
            let is_due = entry.is_behind || entry.next_due.is_some_and(|due| due <= now);
            let room = NOTIFIER_LANES_WAITING_MAX.saturating_sub(self.dispatcher.waiting(name));
            if !is_due || room < NOTIFIER_LANES_WAITING_MAX / 2 || entry.health.disabled.is_some() {
                continue;
            }
            // Those that are taken are due as well.
            let found = self.store.due(name, now, room + self.taken.len()).await?;
            entry.is_behind = found.len() > room;
            for lane in found {
                if self.taken.insert(lane) {
                    self.dispatcher.add(name, &entry.origin, lane);
                }
            }
            self.dispatcher.rest(name, instant(entry.health.rests_until, now, self.clock.now()));
            entry.next_due = self.store.next_due(name, now).await?;
        }
        Ok(())
    }

    /// Until something is due that the dispatcher has, or the store.
    fn next_wait(&self) -> Duration {
        let (now, at) = (stamp(), self.clock.now());
        let due =
            self.endpoints.values().filter(|entry| entry.health.disabled.is_none()).filter_map(|one| one.next_due);
        let of_store = due.min().map(|due| due.since(now));
        let of_dispatcher = self.dispatcher.next_deadline().map(|due| due.since(at));
        of_store
            .into_iter()
            .chain(of_dispatcher)
            .min()
            .unwrap_or(NOTIFIER_REFILL_INTERVAL)
            .max(Duration::from_millis(1))
    }

    fn begin(&mut self, next: NextAttempt) {
        let Some(entry) = self.endpoints.get(&next.endpoint) else { return };
        let (store, sender, endpoint) = (self.store.clone(), Arc::clone(&self.sender), Arc::clone(&entry.config));
        self.tasks.spawn(async move {
            let sent = match store.head(next.lane).await {
                Ok(Some(head)) => {
                    let started_at = stamp();
                    let result = sender.send(&request(&head, &endpoint, started_at)).await;
                    crash_point("notifier-sent");
                    Ok(Some(Box::new(Sent { head, started_at, result })))
                }
                Ok(None) => Ok(None),
                Err(error) => Err(error),
            };
            Step::Sent { next, sent }
        });
    }

    fn on_step(&mut self, step: Step) {
        match step {
            Step::Sent { next, sent: Ok(Some(sent)) } => self.on_sent(next, *sent),
            Step::Sent { next, sent } => {
                if let Err(error) = sent {
                    tracing::error!("cannot read the head of a lane, retrying: {error}");
                }
                self.dispatcher.forget(&next.endpoint, next.pass);
                self.give_back(&next);
            }
            Step::Committed { next, due: Ok(Some(due)) } if due <= stamp() => {
                if let Some(entry) = self.endpoints.get(&next.endpoint).filter(|one| one.health.disabled.is_none()) {
                    self.dispatcher.add(&next.endpoint, &entry.origin, next.lane);
                } else {
                    self.taken.remove(&next.lane);
                }
            }
            Step::Committed { next, due: Ok(due) } => {
                self.taken.remove(&next.lane);
                if let Some(entry) = self.endpoints.get_mut(&next.endpoint) {
                    entry.next_due = entry.next_due.into_iter().chain(due).min();
                    // A message that came after the commit was announced while the lane was taken.
                    entry.is_behind |= due.is_none();
                }
            }
            Step::Committed { next, due: Err(error) } => {
                tracing::error!("cannot store an attempt, so it is repeated: {error}");
                self.give_back(&next);
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
        self.dispatcher.end(&next.endpoint, next.pass, reply, self.clock.now());
        let Some(entry) = self.endpoints.get_mut(&next.endpoint) else { return };
        let mut state = head.state;
        let verdict = state.on_reply(reply, &entry.config.retry, now, &mut self.jitter);
        let was_disabled = entry.health.disabled;
        let health = entry.health.on_reply(reply, now).then_some(entry.health);
        self.dispatcher.rest(&next.endpoint, instant(entry.health.rests_until, now, self.clock.now()));
        if entry.health.disabled != was_disabled {
            tracing::error!(
                alert = "endpoint-disabled",
                endpoint = &*next.endpoint,
                "[alert operator] endpoint {} is disabled ({:?}); its messages are kept",
                next.endpoint,
                entry.health.disabled
            );
            for lane in self.dispatcher.remove(&next.endpoint) {
                self.taken.remove(&lane);
            }
        }
        tracing::debug!(endpoint = &*next.endpoint, epoch = head.epoch, seq = head.seq, ?verdict, "attempted");
        let (store, endpoint) = (self.store.clone(), Arc::clone(&next.endpoint));
        self.tasks.spawn(async move {
            let attempt = attempt_record(started_at, result);
            let due =
                store.end_attempt(head, state, attempt, verdict, health.map(|health| (endpoint, health)), now).await;
            crash_point("notifier-committed");
            Step::Committed { next, due }
        });
    }
}

fn instant(at: Option<Stamp>, now: Stamp, clock: Instant) -> Option<Instant> {
    at.map(|at| clock.plus(at.since(now)))
}

fn request(head: &Head, endpoint: &Endpoint, at: Stamp) -> DeliveryRequest {
    let mut headers = endpoint.headers.clone();
    for (name, text) in [
        ("journeyman-lane", head.key.clone()),
        ("journeyman-epoch", head.epoch.to_string()),
        ("journeyman-seq", head.seq.to_string()),
    ] {
        if let Ok(value) = HeaderValue::from_bytes(text.as_bytes()) {
            headers.insert(name, value);
        }
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
            let (class, detail) = (Some(error.class.name()), error.text.into_bytes());
            AttemptRecord { started_at, took_ms, status: None, error: class, detail }
        }
    }
}
