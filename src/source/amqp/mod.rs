//! A source of requests from an AMQP 0-9-1 queue (RabbitMQ).
//!
//! A delivery is a claim, and its lease is the channel that brought it: while the channel is open, the broker hands the request to
//! no other consumer. A poll waits for deliveries, a reclaim checks the channel, a report publishes the reply and acknowledges.
//! A lost connection and a deleted queue arrive as [`SourceEvent`]s.

mod backpressure;
mod claim;
mod config;
mod connection;
mod counters;
mod delivery;
mod disposition;
mod publisher;
mod queue_facts;
mod refused_replies;
mod reply_clients;
mod reply_format;
mod session;

use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::amqp;
use crate::domain::consumer_timeout;
use crate::domain::delivery_attempts::AttemptAction;
use crate::domain::id::{PriorityQueue, Run};
use crate::domain::outcome::Outcome;
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{
    AMQP_CHANNEL_CHECK_INTERVAL, AMQP_CLOSE_TIMEOUT, AMQP_LEASE, AMQP_LONG_POLL_WAIT, AMQP_NAME_BYTES_MAX,
};
use crate::task::ReplyLimits;

use super::{
    Artifact, CallError, Capabilities, Claim, Grant, OpenResult, PollBatch, Source, SourceEvent, SourceFuture,
};
use backpressure::Backpressure;
use claim::{ReceivedDelivery, RequestClaim, SettlePlan, SourceContext};
pub use config::{AmqpSourceConfig, MaxRunTime, OnAttemptsExhausted};
use connection::SharedConnection;
use counters::AmqpSourceCounters;
pub use delivery::PayloadForm;
use disposition::{Disposition, give_up};
use queue_facts::QueueFacts;
use refused_replies::RefusedReplies;
use session::{PendingDelivery, Session};

/// A bound of the settlements that run outside of reports: more than a broker delivers to one consumer (65,535).
const BACKGROUND_SETTLES_MAX: u32 = 1 << 17;

/// A request queue.
pub struct AmqpSource {
    inner: Arc<AmqpSourceInner>,
}

struct AmqpSourceInner {
    config: AmqpSourceConfig,
    clock: Clock,
    connection: Arc<SharedConnection>,
    queue_facts: QueueFacts,
    session: Mutex<Option<Arc<Session>>>,
    /// Earlier sessions whose claims are still held, and the last one until its successor is open: a payload may outlive its
    /// connection.
    previous_sessions: Mutex<Vec<Arc<Session>>>,
    last_epoch: AtomicU64,
    prefetch: AtomicU16,
    events: Arc<EventQueue>,
    counters: Arc<AmqpSourceCounters>,
    refused_replies: Arc<RefusedReplies>,
    backpressure: Arc<Backpressure>,
    /// One permit for each settlement that runs outside of a report.
    settle_permits: Arc<Semaphore>,
    /// Background tasks; dropped with the source.
    tasks: Mutex<JoinSet<()>>,
}

/// Deliveries to this process, over all queues: makes run ids unique.
static DELIVERIES_TOTAL: AtomicU64 = AtomicU64::new(0);

/// Events that were not received yet; bounded by one for each claim held.
#[derive(Default)]
pub(crate) struct EventQueue {
    pending: Mutex<VecDeque<SourceEvent>>,
    pushed: Notify,
}

impl EventQueue {
    fn push(&self, event: SourceEvent) {
        self.pending.lock().push_back(event);
        self.pushed.notify_one();
    }

    async fn recv(&self) -> SourceEvent {
        loop {
            let next = self.pending.lock().pop_front();
            match next {
                Some(event) => return event,
                None => self.pushed.notified().await,
            }
        }
    }
}

impl AmqpSource {
    /// A source that connects with its first poll.
    #[must_use]
    pub fn new(config: AmqpSourceConfig) -> Self {
        let counters: Arc<AmqpSourceCounters> = Arc::default();
        let AmqpSourceConfig { broker, connection_name: name, .. } = &config;
        let refused_replies = RefusedReplies::new(config.reply_retry_max, Arc::clone(&counters));
        Self {
            inner: Arc::new(AmqpSourceInner {
                connection: Arc::new(SharedConnection::new(broker.clone(), name, Arc::clone(&counters))),
                queue_facts: QueueFacts::new(&config),
                config,
                clock: Clock::boot(),
                session: Mutex::default(),
                previous_sessions: Mutex::default(),
                last_epoch: AtomicU64::new(0),
                prefetch: AtomicU16::new(1),
                events: Arc::default(),
                refused_replies: Arc::new(refused_replies),
                backpressure: Arc::default(),
                counters,
                settle_permits: Arc::new(Semaphore::new(BACKGROUND_SETTLES_MAX as usize)),
                tasks: Mutex::default(),
            }),
        }
    }
}

impl AmqpSourceInner {
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock();
        while let Some(ended) = tasks.try_join_next() {
            if let Err(error) = ended {
                tracing::error!(%error, "a task of a request source panicked; the broker redelivers its requests");
            }
        }
        tasks.spawn(task);
    }

    fn source_context(&self) -> SourceContext {
        SourceContext {
            counters: Arc::clone(&self.counters),
            refused_replies: Arc::clone(&self.refused_replies),
            backpressure: Arc::clone(&self.backpressure),
        }
    }

    async fn open(self: &Arc<Self>) -> Result<OpenResult, CallError> {
        let opened = OpenResult { priority_queues: 1, usable_for: None };
        {
            let mut current = self.session.lock();
            if current.as_ref().is_some_and(|session| session.end_reason().is_none()) {
                return Ok(opened);
            }
            self.previous_sessions.lock().extend(current.take());
        }
        let AmqpSourceConfig { broker, queue, connection_name: name, .. } = &self.config;
        let queue =
            &amqp::to_short_string("the queue name", queue).map_err(|error| amqp::retry_error(error.to_string()))?;
        let connection = self.connection.get_or_connect().await?;
        // Checked after connecting: a new connection is only opened once the previous one is known to be lost.
        self.check_lost_sessions()?;
        self.queue_facts.refresh(&self.config, &connection).await;
        let epoch = self.last_epoch.fetch_add(1, Ordering::Relaxed) + 1;
        let prefetch = self.prefetch.load(Ordering::Relaxed);
        let tag = format!("{name}.{epoch}");
        let (session, consumer) = Session::open(broker, connection, queue, &tag, prefetch, epoch).await?;
        self.counters.consumers_started.increment();
        tracing::debug!(queue = queue.as_str(), epoch, prefetch, "consuming");
        let (owner, inner) = (Arc::clone(&session), Arc::downgrade(self));
        self.spawn(Arc::clone(&session).run(consumer, Arc::clone(&self.events), move |pending| {
            if let Some(inner) = inner.upgrade() {
                inner.return_unclaimed(&owner, pending);
            }
        }));
        *self.session.lock() = Some(session);
        Ok(opened)
    }

    /// I6: the broker redelivers what a lost channel had brought, and the new delivery must not run beside the payload of the old one.
    fn check_lost_sessions(&self) -> Result<(), CallError> {
        let mut earlier = self.previous_sessions.lock();
        earlier.retain(|session| session.held_claims() > 0);
        let lost = earlier.iter().filter(|session| session.is_lost());
        let held: usize = lost.map(|session| session.held_claims()).sum();
        if held == 0 {
            return Ok(());
        }
        let message = format!("{held} requests of a lost connection are still being ended");
        Err(CallError { refusal: Refusal::Retry { retry_after: None }, message })
    }

    async fn poll(self: &Arc<Self>, max: u8) -> Result<PollBatch, CallError> {
        let session = self.current_session().await?;
        session.on_poll_started();
        let waited = timeout(
            consumer_timeout::long_poll_wait(self.queue_facts.consumer_timeout(), AMQP_LONG_POLL_WAIT),
            self.wait_for_grants(&session, max),
        )
        .await;
        session.on_poll_ended();
        waited.unwrap_or_else(|_| Ok(PollBatch::default()))
    }

    /// Opens a session where there is none or the current one is retired. At once, without a failed poll: a source that shares its slots
    /// with others would spend its turn on the failure.
    async fn current_session(self: &Arc<Self>) -> Result<Arc<Session>, CallError> {
        let current = || self.session.lock().clone();
        let is_over = current().is_none_or(|session| {
            if session.prefetch != self.prefetch.load(Ordering::Relaxed) {
                session.retire("the number of slots has changed");
            }
            session.is_retired()
        });
        if is_over {
            self.open().await?;
        }
        let message = || "the queue has no consumer yet".to_owned();
        current().ok_or_else(|| CallError { refusal: Refusal::Stale, message: message() })
    }

    async fn wait_for_grants(self: &Arc<Self>, session: &Arc<Session>, max: u8) -> Result<PollBatch, CallError> {
        loop {
            let must_wait = self.check_lost_sessions().is_err();
            let deliveries =
                if must_wait || session.is_stopped() { Vec::new() } else { session.drain_pending(usize::from(max)) };
            if deliveries.is_empty() {
                if let Some(what) = session.end_reason() {
                    // A retired session is no error: the next poll opens another one.
                    let is_none = session.is_stopped() || session.is_retired();
                    let ended = self.on_session_ended(session, what);
                    return if is_none { Ok(PollBatch::default()) } else { Err(ended) };
                }
                let arrived = session.arrived.notified();
                if must_wait {
                    // No event reports the end of the last lost claim.
                    drop(timeout(AMQP_CHANNEL_CHECK_INTERVAL, arrived).await);
                } else {
                    arrived.await;
                }
                continue;
            }
            let grants: Vec<Grant> = deliveries.into_iter().filter_map(|one| self.admit(session, one)).collect();
            if !grants.is_empty() {
                return Ok(PollBatch { grants, ..PollBatch::default() });
            }
        }
    }

    /// A session that was retired is replaced at once; one that was lost after a pause, so that the workers of a restarted broker do not
    /// all reconnect at the same moment.
    fn on_session_ended(&self, session: &Arc<Session>, message: String) -> CallError {
        let mut current = self.session.lock();
        if current.as_ref().is_some_and(|current| current.epoch == session.epoch) {
            self.previous_sessions.lock().extend(current.take());
        }
        let refusal =
            if session.lost_reason().is_some() { Refusal::Retry { retry_after: None } } else { Refusal::Stale };
        CallError { refusal, message }
    }

    /// Makes a grant of a delivery, or settles it without a handler.
    fn admit(self: &Arc<Self>, session: &Arc<Session>, pending: PendingDelivery) -> Option<Grant> {
        let PendingDelivery { delivery, received_at: since } = &pending;
        let (since, AmqpSourceConfig { payload_form: form, max_attempts, .. }) = (*since, &self.config);
        if delivery.redelivered {
            self.counters.redelivered.increment();
        }
        let step = delivery::attempt_history(delivery).next_action(*max_attempts, self.backpressure.last_copy_result());
        let attempt = match step {
            AttemptAction::Try { attempt } | AttemptAction::Republish { attempt } => attempt,
            AttemptAction::Exhausted { attempts } => attempts,
        };
        let fits = delivery.data.len() <= self.message_bytes_max();
        let task =
            (fits && matches!(step, AttemptAction::Try { .. })).then(|| delivery::task_definition(delivery, *form));
        let now = self.clock.now();
        let claim = self.new_claim(session, pending, attempt, now);
        if delivery::message_ttl(claim.properties()).is_some_and(|ttl| since.elapsed() >= ttl) {
            self.dispose(claim, Disposition::Expired);
            return None;
        }
        let Some(task) = task else {
            self.dispose(claim, if fits { Disposition::Step(step) } else { Disposition::TooLarge });
            return None;
        };
        let consumer_timeout = self.queue_facts.consumer_timeout();
        let lease = claim::initial_lease(claim.delivered_at, now, consumer_timeout, AMQP_LEASE);
        let (run, results) = (claim.run.clone(), Some(claim.replies()));
        let claim = Arc::new(GrantedRequest { claim, source: Arc::clone(self) });
        Some(Grant { run, expires_at: now.plus(lease), task, payload_error: None, claim, results })
    }

    fn new_claim(&self, session: &Arc<Session>, pending: PendingDelivery, attempt: u32, now: Instant) -> RequestClaim {
        let PendingDelivery { delivery, received_at: since } = pending;
        let run = delivery::run_id(&delivery.properties, DELIVERIES_TOTAL.fetch_add(1, Ordering::Relaxed), attempt);
        let delivery = ReceivedDelivery {
            delivery_tag: delivery.delivery_tag,
            properties: delivery.properties,
            body: delivery.data.into(),
            queue: session.queue.clone(),
            delivered_at: now.minus(since.elapsed()),
            received_at: since,
        };
        let limits = ReplyLimits { body_bytes: self.message_bytes_max(), content_type_bytes: AMQP_NAME_BYTES_MAX };
        RequestClaim::new(run, delivery, Arc::clone(session), limits, self.source_context())
    }

    fn message_bytes_max(&self) -> usize {
        usize::try_from(self.config.message_bytes_max).unwrap_or(usize::MAX)
    }

    /// The request was not looked at, so this is no attempt.
    fn return_unclaimed(self: &Arc<Self>, session: &Arc<Session>, pending: PendingDelivery) {
        let attempt = delivery::attempt_history(&pending.delivery).attempts();
        let claim = self.new_claim(session, pending, attempt, self.clock.now());
        let plan = self.return_plan(&claim);
        self.dispose(claim, Disposition::ReturnUnclaimed(plan));
    }

    /// How a request that has not started is returned. A copy keeps the number of attempts; where attempts are not limited, or the broker
    /// blocks publishing, the original is requeued and keeps its place.
    fn return_plan(&self, claim: &RequestClaim) -> SettlePlan {
        let counts = self.config.max_attempts.is_some();
        if counts && !claim.is_blocked() { SettlePlan::RepublishFresh } else { SettlePlan::Requeue }
    }

    /// Settles a request that no handler sees. Bounded by what the broker delivers to one consumer.
    fn dispose(self: &Arc<Self>, claim: RequestClaim, what: Disposition) {
        let (counters, inner) = (Arc::clone(&self.counters), Arc::downgrade(self));
        let permits = Arc::clone(&self.settle_permits);
        self.spawn(async move {
            let Ok(_permit) = permits.acquire().await else { return };
            let run = claim.run.clone();
            // A source that was dropped has requeued its requests.
            let Some(inner) = inner.upgrade() else { return };
            let exhausted = match what {
                Disposition::Step(AttemptAction::Exhausted { .. }) => {
                    queue_facts::exhausted_action(&inner.config).await
                }
                Disposition::Expired
                | Disposition::TooLarge
                | Disposition::Step(_)
                | Disposition::ReturnUnclaimed(_) => OnAttemptsExhausted::Reply,
            };
            drop(inner);
            if let Err(refused) = what.apply(claim, &counters, exhausted).await {
                tracing::warn!(claim.run = %run, next = %refused.refusal, "{}", refused.message);
            }
        });
    }
}

impl Source for AmqpSource {
    fn describe(&self) -> String {
        let AmqpSourceConfig { broker, queue, .. } = &self.inner.config;
        let blocked = self.inner.session.lock().as_ref().is_some_and(|session| session.is_blocked());
        format!(
            "AMQP queue {queue} at {}{}",
            broker.display_url(),
            if blocked { ", which blocks publishing at present" } else { "" }
        )
    }

    fn service_id(&self) -> String {
        self.inner.config.broker.display_url().to_owned()
    }

    fn claimant(&self) -> String {
        let AmqpSourceConfig { broker, queue, connection_name: name, .. } = &self.inner.config;
        format!("{} {queue} {name}", broker.display_url())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { long_poll: true, supports_recovery: false, reports_cancellation: false, connection_scoped: true }
    }

    fn open(&self) -> SourceFuture<'_, OpenResult> {
        Box::pin(self.inner.open())
    }

    fn poll(&self, _lane: PriorityQueue, max: u8) -> SourceFuture<'_, PollBatch> {
        Box::pin(self.inner.poll(max))
    }

    fn next_event(&self) -> Pin<Box<dyn Future<Output = SourceEvent> + Send + '_>> {
        Box::pin(self.inner.events.recv())
    }

    fn set_capacity(&self, capacity: u32) {
        let prefetch = u16::try_from(capacity).unwrap_or(u16::MAX).max(1);
        let before = self.inner.prefetch.swap(prefetch, Ordering::Relaxed);
        if before != prefetch
            && let Some(session) = self.inner.session.lock().clone()
        {
            session.retire("the number of slots has changed");
        }
    }

    fn metrics(&self) -> BTreeMap<&'static str, u64> {
        self.inner.counters.snapshot()
    }

    fn pause(&self) {
        if let Some(session) = self.inner.session.lock().clone() {
            session.stop_consuming();
        }
    }

    /// Waits for acknowledgements that are still on their way: a broken connection would cause a redelivery.
    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {
            let earlier = std::mem::take(&mut *self.inner.previous_sessions.lock());
            let sessions = earlier.into_iter().chain(self.inner.session.lock().take());
            let closing =
                sessions.filter(|session| !session.is_lost()).map(|session| async move { session.close().await });
            let mut closing: JoinSet<()> = closing.collect();
            while closing.join_next().await.is_some() {}
            // A copy whose original is not settled is a duplicate.
            let all = self.inner.settle_permits.acquire_many(BACKGROUND_SETTLES_MAX);
            if timeout(AMQP_CLOSE_TIMEOUT, all).await.is_err() {
                tracing::debug!("requests were still being requeued when the source closed; some may run twice");
            }
            self.inner.settle_permits.close();
            if let Some(connection) = self.inner.connection.current() {
                amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
            }
        })
    }
}

/// A request that a handler runs.
struct GrantedRequest {
    claim: RequestClaim,
    source: Arc<AmqpSourceInner>,
}

impl Claim for GrantedRequest {
    fn run(&self) -> &Run {
        &self.claim.run
    }

    fn renew(&self) -> SourceFuture<'_, Instant> {
        Box::pin(async {
            let Self { claim, source } = self;
            let gone =
                |what: &str| CallError { refusal: Refusal::Gone, message: format!("reclaim {}: {what}", claim.run) };
            if claim.is_settled() {
                return Err(gone("it is already settled"));
            }
            match claim.session.lost_reason() {
                Some(what) => Err(gone(&what)),
                None if claim.session.is_lost() => Err(gone("its channel is closed")),
                None => {
                    let now = source.clock.now();
                    let consumer_timeout = source.queue_facts.consumer_timeout();
                    let held_for = now.since(claim.delivered_at);
                    Ok(now.plus(consumer_timeout::extension_length(held_for, consumer_timeout, AMQP_LEASE)))
                }
            }
        })
    }

    fn report(&self, outcome: Outcome) -> SourceFuture<'_, ()> {
        Box::pin(async move {
            let Self { claim, source } = self;
            match claim.plan_for(outcome) {
                SettlePlan::Republish { attempts }
                    if source.config.max_attempts.is_some_and(|max| attempts >= max.get()) =>
                {
                    let why = claim.replies().failure_reason();
                    let reason = format!(
                        "the request was tried {attempts} times, and each time its handler asked for another attempt: {}",
                        why.as_deref().unwrap_or("no reason was given")
                    );
                    give_up(claim, queue_facts::exhausted_action(&source.config).await, reason, attempts).await?;
                    source.counters.attempts_exhausted.increment();
                    Ok(())
                }
                SettlePlan::RepublishFresh => claim.settle(outcome, source.return_plan(claim)).await,
                plan @ (SettlePlan::Reply(_)
                | SettlePlan::Requeue
                | SettlePlan::Republish { .. }
                | SettlePlan::DeadLetter) => claim.settle(outcome, plan).await,
            }
        })
    }

    fn upload<'a>(&'a self, artifact: &'a Artifact) -> SourceFuture<'a, ()> {
        Box::pin(async move {
            // Logs are served while the request runs, and not stored.
            if artifact.name.starts_with("public/logs/") {
                return Ok(());
            }
            let message =
                format!("request {} has no artifacts: {} can be part of its reply", self.run(), artifact.name);
            Err(CallError { refusal: Refusal::Rejected, message })
        })
    }
}
