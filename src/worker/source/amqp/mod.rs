//! A source of requests from an AMQP 0-9-1 queue (RabbitMQ).
//!
//! A delivery is a claim, and its lease is the channel that brought it: while the channel is open, the broker hands the request to
//! no other consumer. A poll waits for deliveries, a reclaim checks the channel, a report publishes the reply and acknowledges.
//! A lost connection and a deleted queue arrive as [`SourceEvent`]s.

mod claim;
#[doc(hidden)]
pub mod config;
mod counters;
mod deferral;
mod delivery;
mod isolation;
mod publisher;
mod queue_facts;
mod reply_format;
mod session;

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use lapin::Connection;
use lapin::message::Delivery;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

use journeyman_domain::consumer_timeout;
use journeyman_domain::delivery_attempts::{AttemptAction, Isolation, Republishing};
use journeyman_domain::id::PriorityQueue;
use journeyman_domain::limits::{
    AMQP_CLOSE_TIMEOUT, AMQP_EVENTS_MAX, AMQP_LEASE, AMQP_QUEUE_FULL_TTL, AMQP_REPLY_RETRY_DELAY,
};
use journeyman_domain::outcome::{ExceptionReason, Outcome};
use journeyman_domain::refusal::Refusal;
use journeyman_platform::amqp;
use journeyman_platform::amqp::delay::DelayGuarantee;
use journeyman_platform::host::clock::Clock;
use journeyman_platform::tasks::supervised;

use super::{
    CallError, Capabilities, Definition, Grant, Granted, OpenResult, PauseSwitch, PollBatch, RunTerms, Source,
    SourceEvent, SourceFuture, next_of,
};
use claim::{GrantedRequest, RequestClaim, SettlePlan};
pub use config::{AmqpSourceConfig, OnAttemptsExhausted, OnRetry};
use counters::AmqpSourceCounters;
use deferral::DoneLooks;
pub use deferral::{Check, CheckFormat, CheckRoute, DeferralConfig};
pub use delivery::PayloadForm;
use isolation::IsolatedRequest;
use queue_facts::QueueFacts;
use reply_format::error_reply;
use session::{PendingDelivery, Session, SessionEnd};

/// A request queue.
pub struct AmqpSource {
    inner: Arc<AmqpSourceInner>,
    events: tokio::sync::Mutex<mpsc::Receiver<SourceEvent>>,
}

struct AmqpSourceInner {
    config: AmqpSourceConfig,
    clock: Clock,
    connection: tokio::sync::Mutex<Option<Arc<Connection>>>,
    facts: Mutex<QueueFacts>,
    /// The last one takes requests. Claims of earlier ones may still be held: a payload may outlive its connection.
    sessions: Mutex<Vec<Arc<Session>>>,
    prefetch: AtomicU16,
    events: mpsc::Sender<SourceEvent>,
    counters: AmqpSourceCounters,
    /// When the request queue refused a copy, as a full queue with `reject-publish` does.
    copy_refused_at: Mutex<Option<Instant>>,
    isolated: Mutex<IsolatedRequest>,
    done_looks: DoneLooks,
    claim_ended: Notify,
    pause: PauseSwitch,
    /// Background tasks; aborted with the source.
    tasks: Mutex<JoinSet<()>>,
}

impl AmqpSource {
    /// A source that connects with its first poll.
    pub fn new(config: AmqpSourceConfig) -> Self {
        let (events, receiver) = mpsc::channel(AMQP_EVENTS_MAX);
        let inner = AmqpSourceInner {
            facts: Mutex::new(QueueFacts::configured(&config)),
            config,
            clock: Clock::boot(),
            connection: tokio::sync::Mutex::default(),
            sessions: Mutex::default(),
            prefetch: AtomicU16::new(1),
            events,
            counters: AmqpSourceCounters::default(),
            copy_refused_at: Mutex::default(),
            isolated: Mutex::default(),
            done_looks: DoneLooks::default(),
            claim_ended: Notify::new(),
            pause: PauseSwitch::new(),
            tasks: Mutex::default(),
        };
        Self { inner: Arc::new(inner), events: tokio::sync::Mutex::new(receiver) }
    }
}

impl Drop for AmqpSource {
    fn drop(&mut self) {
        self.inner.tasks.lock().abort_all();
    }
}

impl AmqpSourceInner {
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(supervised("a request source", task));
    }

    /// The session that takes requests.
    fn current_session(&self) -> Option<Arc<Session>> {
        self.sessions.lock().last().filter(|session| session.end().is_none()).cloned()
    }

    async fn connection(&self) -> Result<Arc<Connection>, CallError> {
        let mut current = self.connection.lock().await;
        if let Some(connection) = current.as_ref().filter(|connection| connection.status().connected()) {
            return Ok(Arc::clone(connection));
        }
        let connection = self.config.broker.connect(&self.config.connection_name).await?;
        self.counters.connections.increment();
        Ok(Arc::clone(current.insert(Arc::new(connection))))
    }

    async fn open(self: &Arc<Self>) -> Result<Arc<Session>, CallError> {
        let is_next_suspect = matches!(*self.isolated.lock(), IsolatedRequest::Ended);
        let prefetch = if is_next_suspect { 1 } else { self.prefetch.load(Ordering::Relaxed) };
        match self.current_session() {
            Some(session) if session.prefetch == prefetch => return Ok(session),
            Some(outdated) => outdated.retire(),
            None => {}
        }
        let connection = self.connection().await?;
        // Checked after connecting: a new connection is only opened once the previous one is known to be lost.
        self.check_lost_sessions()?;
        let is_new = !self.facts.lock().are_of(&connection);
        if is_new {
            if let Some(deferral) = &self.config.deferral
                && Box::pin(deferral.declare(&connection, &self.config.queue)).await?
                    == Some(DelayGuarantee::AtMostOnce)
            {
                let queue = self.config.queue.as_str();
                tracing::warn!(queue, "{}", DelayGuarantee::AtMostOnce);
            }
            let facts = QueueFacts::query(&self.config, &connection).await;
            *self.facts.lock() = facts;
        }
        let open = |timeout| Session::open(&self.config, Arc::clone(&connection), prefetch, timeout);
        let requested = self.facts.lock().requested_timeout;
        let opened = match Box::pin(open(requested)).await {
            Err((_, Some(amqp::PRECONDITION_FAILED))) if requested.is_some() => {
                self.facts.lock().on_timeout_refused();
                Box::pin(open(None)).await
            }
            opened => opened,
        };
        let (session, consumer) = opened.map_err(|(error, _)| error)?;
        if is_new {
            self.facts.lock().warn_of_limits(&self.config);
        }
        tracing::debug!(queue = self.config.queue.as_str(), prefetch, "consuming");
        let (owner, source) = (Arc::clone(&session), Arc::downgrade(self));
        self.spawn(Arc::clone(&session).run(consumer, self.events.clone(), move |pending| {
            if let Some(source) = source.upgrade() {
                source.return_unclaimed(&owner, pending);
            }
        }));
        self.sessions.lock().push(Arc::clone(&session));
        Ok(session)
    }

    /// I6: the broker redelivers what a lost channel had brought, and the new delivery must not run beside the payload of the old one.
    fn check_lost_sessions(&self) -> Result<(), CallError> {
        let mut sessions = self.sessions.lock();
        // `close` waits for consumers that are still being ended.
        sessions.retain(|session| !session.is_finished() || session.held_claims() > 0);
        let lost = sessions.iter().filter(|session| session.is_lost());
        match lost.map(|session| session.held_claims()).sum::<usize>() {
            0 => Ok(()),
            held => Err(CallError::retry(format!("{held} requests of a lost connection are still being ended"))),
        }
    }

    /// Opens a session where the last one has ended. At once, without a failed poll: a source that shares its slots with others would
    /// spend its turn on the failure.
    async fn poll(self: &Arc<Self>, max: u8) -> Result<PollBatch, CallError> {
        let wait = consumer_timeout::long_poll_wait(self.consumer_timeout(), self.config.poll_wait);
        let ends_at = Instant::now() + wait;
        while !self.pause.is_paused() {
            self.check_lost_sessions()?;
            match self.until_paused(ends_at, self.next_isolated()).await {
                Some(Some(grant)) => return Ok(PollBatch { grants: vec![grant], ..PollBatch::default() }),
                Some(None) => {}
                None => break,
            }
            let session = self.open().await?;
            session.on_poll_started();
            let polled = self.until_paused(ends_at, self.wait_for_grants(&session, max)).await;
            session.on_poll_ended();
            match polled {
                Some(Ok(batch)) if batch.grants.is_empty() && self.is_isolating() => {}
                Some(answer) => return answer,
                None => break,
            }
        }
        // This poll may have opened or isolated some after the pause began.
        if self.pause.is_paused() {
            self.stop_consuming();
        }
        Ok(PollBatch::default())
    }

    /// `None` if the source was paused, or the time was over, before `work` ended.
    async fn until_paused<T>(&self, ends_at: Instant, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            done = timeout_at(ends_at, work) => done.ok(),
            () = self.pause.paused() => None,
        }
    }

    /// The broker gets back what no handler runs.
    fn stop_consuming(self: &Arc<Self>) {
        if let Some(claim) = self.take_waiting() {
            let plan = claim.return_plan();
            self.settle_in_background(claim, plan);
        }
        if let Some(session) = self.current_session() {
            session.retire();
        }
    }

    async fn wait_for_grants(self: &Arc<Self>, session: &Arc<Session>, max: u8) -> Result<PollBatch, CallError> {
        loop {
            self.check_lost_sessions()?;
            let is_isolated = |delivery: &Delivery| self.isolation(delivery) != Isolation::Shared;
            let deliveries = session.take_pending(usize::from(max), is_isolated);
            if deliveries.is_empty() {
                match session.end() {
                    Some(SessionEnd::Retired) => return Ok(PollBatch::default()),
                    Some(SessionEnd::Canceled(message)) => return Err(CallError { refusal: Refusal::Stale, message }),
                    // The worker waits before it retries, so that those of a restarted broker do not all reconnect at the same moment.
                    Some(SessionEnd::Lost(message)) => return Err(CallError::retry(message)),
                    None => session.arrived.notified().await,
                }
                continue;
            }
            let grants: Vec<Grant> = deliveries.into_iter().filter_map(|one| self.admit(session, one)).collect();
            if !grants.is_empty() {
                return Ok(PollBatch { grants, ..PollBatch::default() });
            }
        }
    }

    /// Makes a grant of a delivery, or settles it without a handler.
    fn admit(self: &Arc<Self>, session: &Arc<Session>, pending: PendingDelivery) -> Option<Grant> {
        let delivery = &pending.delivery;
        let isolation = self.isolation(delivery);
        let (bytes, ttl) = (delivery.data.len(), delivery::message_ttl(&delivery.properties));
        if delivery.redelivered {
            self.counters.redelivered.increment();
        }
        let action = delivery::attempt_history(delivery).next_action(self.config.max_attempts, self.last_copy_result());
        let is_expired = ttl.is_some_and(|ttl| pending.received_at.elapsed() >= ttl);
        let too_early = self.config.deferral.as_ref().and_then(|deferral| deferral.too_early(delivery));
        let claim = RequestClaim::new(self, session, pending);
        let plan = if claim.is_look_done() {
            SettlePlan::Superseded
        } else if let Some(check) = too_early {
            SettlePlan::Defer(check)
        } else if is_expired {
            self.counters.expired.increment();
            SettlePlan::Reply(error_reply("expired", "the request expired before it could start", None))
        } else if bytes > self.message_bytes_max() {
            self.counters.too_large.increment();
            let message = format!("the request has {bytes} bytes, more than this worker accepts");
            SettlePlan::Reply(error_reply("too_large", &message, None))
        } else {
            match action {
                AttemptAction::Try { .. } if isolation == Isolation::Shared => {
                    *self.isolated.lock() = IsolatedRequest::None;
                    return Some(self.grant(claim));
                }
                AttemptAction::Try { .. } => {
                    self.isolate(claim, isolation);
                    return None;
                }
                AttemptAction::Republish { attempt } => SettlePlan::Republish { attempts: attempt },
                AttemptAction::Exhausted { attempts } => {
                    tracing::error!(
                        alert = "attempts-exhausted", claim.run = %claim.run,
                        "[alert operator] giving up a request after {attempts} attempts; see the logs of its workers for the cause"
                    );
                    let reason = format!(
                        "the request was delivered {attempts} times, by the count of its queue or its header {}, and no worker settled it",
                        delivery::ATTEMPTS_HEADER
                    );
                    SettlePlan::GiveUp { reason, attempts }
                }
            }
        };
        self.settle_in_background(claim, plan);
        None
    }

    fn isolation(&self, delivery: &Delivery) -> Isolation {
        let (history, max_attempts) = (delivery::attempt_history(delivery), self.config.max_attempts);
        match history.next_action(max_attempts, self.last_copy_result()) {
            AttemptAction::Try { .. } => history.isolation(max_attempts),
            AttemptAction::Republish { .. } | AttemptAction::Exhausted { .. } => Isolation::Shared,
        }
    }

    fn grant(&self, claim: Arc<RequestClaim>) -> Grant {
        let (sent_at, consumer_timeout) = (self.clock.now(), self.consumer_timeout());
        let held = sent_at.since(claim.delivered_at);
        let length = consumer_timeout.map_or(AMQP_LEASE, |timeout| timeout.saturating_sub(held).min(AMQP_LEASE));
        let (run, results) = (claim.run.clone(), Some(claim.results.clone()));
        let task = Definition::of_request(claim.message.clone());
        let claim = Arc::new(GrantedRequest { claim, settlement: Default::default() });
        // A release puts the request back into its queue.
        let terms = RunTerms { deadline: None, retries_left: Some(u32::MAX) };
        Grant {
            run,
            lease: Granted { sent_at, length },
            terms,
            queued_for: None,
            task,
            payload_error: None,
            claim,
            results,
        }
    }

    /// No handler has seen the request, so this is no attempt.
    fn return_unclaimed(self: &Arc<Self>, session: &Arc<Session>, pending: PendingDelivery) {
        let claim = RequestClaim::new(self, session, pending);
        let plan = claim.return_plan();
        self.settle_in_background(claim, plan);
    }

    /// Settles a request that no handler sees. Bounded by what the broker delivers to one consumer.
    fn settle_in_background(&self, claim: Arc<RequestClaim>, plan: SettlePlan) {
        const OUTCOME: Outcome = Outcome::Exception(ExceptionReason::InternalError);
        let settling = Arc::clone(&claim.session.settling);
        self.spawn(async move {
            let _settling = settling;
            loop {
                match Arc::clone(&claim).settle(OUTCOME, plan.clone()).await {
                    Ok(()) => return,
                    // Requeued, it would be delivered again at once.
                    Err(CallError { refusal: Refusal::Retry { .. }, .. }) => sleep(AMQP_REPLY_RETRY_DELAY).await,
                    Err(error) => {
                        tracing::warn!(claim.run = %claim.run, next = %error.refusal, "{}", error.message);
                        return;
                    }
                }
            }
        });
    }

    fn consumer_timeout(&self) -> Option<Duration> {
        self.facts.lock().consumer_timeout
    }

    fn message_bytes_max(&self) -> usize {
        usize::try_from(self.config.message_bytes_max).unwrap_or(usize::MAX)
    }

    /// The result of the last copy, forgotten after a while.
    fn last_copy_result(&self) -> Republishing {
        match *self.copy_refused_at.lock() {
            Some(at) if at.elapsed() < AMQP_QUEUE_FULL_TTL => Republishing::Refused,
            Some(_) | None => Republishing::Accepted,
        }
    }

    fn record_copy_result(&self, result: Republishing) {
        let refused_at = (result == Republishing::Refused).then(Instant::now);
        let earlier = std::mem::replace(&mut *self.copy_refused_at.lock(), refused_at);
        if refused_at.is_some() && earlier.is_none() {
            tracing::warn!(
                "the request queue refuses copies: it is probably full; attempts are not recorded meanwhile"
            );
        }
    }
}

impl Source for AmqpSource {
    fn describe(&self) -> String {
        let AmqpSourceConfig { broker, queue, .. } = &self.inner.config;
        let is_blocked = self.inner.current_session().is_some_and(|session| session.is_blocked());
        let blocked = if is_blocked { ", which blocks publishing at present" } else { "" };
        format!("AMQP queue {queue} at {}{blocked}", broker.display_url())
    }

    fn service_id(&self) -> String {
        self.inner.config.broker.display_url().to_owned()
    }

    fn claimant(&self) -> String {
        let AmqpSourceConfig { broker, queue, connection_name: name, .. } = &self.inner.config;
        format!("{} {queue} {name}", broker.display_url())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            long_poll: true,
            supports_recovery: false,
            reports_cancellation: false,
            connection_scoped: true,
            fenced_reports: false,
        }
    }

    fn open(&self) -> SourceFuture<'_, OpenResult> {
        Box::pin(async {
            self.inner.open().await?;
            Ok(OpenResult { priority_queues: 1, usable_for: None })
        })
    }

    fn poll(&self, _lane: PriorityQueue, max: u8) -> SourceFuture<'_, PollBatch> {
        Box::pin(self.inner.poll(max))
    }

    fn next_event(&self) -> Pin<Box<dyn Future<Output = SourceEvent> + Send + '_>> {
        Box::pin(next_of(&self.events))
    }

    fn set_capacity(&self, capacity: u32) {
        let prefetch = u16::try_from(capacity).unwrap_or(u16::MAX).max(1);
        if self.inner.prefetch.swap(prefetch, Ordering::Relaxed) != prefetch {
            self.inner.stop_consuming();
        }
    }

    fn metrics(&self) -> BTreeMap<&'static str, u64> {
        self.inner.counters.snapshot()
    }

    fn pause(&self) {
        self.inner.pause.set(true);
        self.inner.stop_consuming();
    }

    fn resume(&self) {
        self.inner.pause.set(false);
    }

    /// Waits for acknowledgements that are still on their way: a broken connection would cause a redelivery.
    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        self.pause();
        Box::pin(async {
            let sessions = std::mem::take(&mut *self.inner.sessions.lock());
            join_all(sessions.iter().filter(|session| !session.is_lost()).map(|session| session.close())).await;
            if let Some(connection) = self.inner.connection.lock().await.take() {
                amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
            }
        })
    }
}
