//! A claim on a request: answered, then acknowledged on the channel that brought it, or not at all (I18, I19).

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, DeliveryTag, ShortString};
use tokio::sync::Mutex;

use crate::amqp;
use crate::domain::delivery_attempts::Republishing;
use crate::domain::id::Run;
use crate::domain::outcome::{ExceptionReason, Outcome};
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;
use crate::host::crash_points::crash_point;
use crate::source::{CallError, Reply, ReplyStatus, Results};

use super::backpressure::Backpressure;
use super::counters::AmqpSourceCounters;
use super::delivery;
use super::publisher::PublishResult;
use super::refused_replies::RefusedReplies;
use super::reply_format::{PartialReplySender, error_reply, last_reply_properties};
use super::session::{AckKind, Session};

/// Why a request is in the poison queue.
const REASON_HEADER: &str = "x-journeyman-reason";
/// Which queue it came from.
const ORIGIN_QUEUE_HEADER: &str = "x-journeyman-queue";

/// A claim on a request.
pub(super) struct RequestClaim {
    pub(super) run: Run,
    pub(super) session: Arc<Session>,
    pub(super) delivered_at: Instant,
    /// The same by the clock of timers.
    pub(super) received_at: tokio::time::Instant,
    delivery_tag: DeliveryTag,
    /// The broker is told of a delivery once: of what it does not know any more a second word would cost the channel.
    is_tag_used: AtomicBool,
    queue: ShortString,
    pub(super) properties: BasicProperties,
    pub(super) body: Arc<[u8]>,
    replies: Results,
    pub(super) context: SourceContext,
    pub(super) state: Mutex<State>,
    pub(super) is_settled: AtomicBool,
}

/// What the claims of a source have in common.
#[derive(Clone)]
pub(super) struct SourceContext {
    pub(super) counters: Arc<AmqpSourceCounters>,
    pub(super) refused_replies: Arc<RefusedReplies>,
    /// Whether its queue takes copies.
    pub(super) backpressure: Arc<Backpressure>,
}

type PublishFuture = Pin<Box<dyn Future<Output = lapin::Result<PublishResult>> + Send>>;
/// Resolves to whether the broker was told.
type AckFuture = Pin<Box<dyn Future<Output = lapin::Result<bool>> + Send>>;

/// How far settling it is. What is under way is kept over a call that was dropped, so that nothing is published twice.
#[derive(Default)]
pub(super) struct State {
    settling: Option<Arc<Settling>>,
    publishing: Option<PublishFuture>,
    published: Option<PublishResult>,
    /// The broker is being told what becomes of it, which can be begun once.
    acknowledging: Option<AckFuture>,
    /// Since when its answer is refused.
    reply_refused_since: Option<tokio::time::Instant>,
    /// Since when a copy of it is refused.
    copy_refused_since: Option<tokio::time::Instant>,
    /// A copy is in the queue for those that were given up.
    is_poison_copy_stored: bool,
    pub(super) settled_as: Option<Outcome>,
}

/// How it began to be settled. What is asked for later cannot call back what was sent: somebody would have it twice.
struct Settling {
    outcome: Outcome,
    plan: SettlePlan,
}

/// What is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PublishKind {
    Reply,
    Copy,
}

/// What is done with a request in the end.
#[derive(Debug, Clone)]
pub(super) enum SettlePlan {
    /// Answer, where somebody waits, and acknowledge.
    Reply(Reply),
    /// Give it back to the queue, where it was.
    Requeue,
    /// Put a copy of it into the queue as if it had not been handed out, and acknowledge: nothing of it has run.
    RepublishFresh,
    /// Put a copy into the queue whose header says how often it was tried, and acknowledge.
    Republish {
        /// What the header says.
        attempts: u32,
    },
    /// Let the broker dead-letter it, or drop it where no policy says otherwise.
    DeadLetter,
}

impl RequestClaim {
    pub(super) fn new(
        run: Run,
        delivery: ReceivedDelivery,
        session: Arc<Session>,
        most: usize,
        context: SourceContext,
    ) -> Self {
        let ReceivedDelivery { delivery_tag, properties, body, queue, delivered_at, received_at } = delivery;
        let partial = PartialReplySender {
            session: Arc::clone(&session),
            reply_to: properties.reply_to().clone(),
            correlation_id: properties.correlation_id().clone(),
            context: context.clone(),
        };
        session.add_claim(run.clone());
        Self {
            run,
            session,
            delivered_at,
            received_at,
            delivery_tag,
            is_tag_used: AtomicBool::new(false),
            queue,
            properties,
            body,
            replies: Results::new(partial, most),
            context,
            state: Mutex::default(),
            is_settled: AtomicBool::new(false),
        }
    }

    pub(super) fn replies(&self) -> Results {
        self.replies.clone()
    }

    /// Whether the broker lets nobody publish.
    pub(super) fn is_blocked(&self) -> bool {
        self.session.is_blocked()
    }

    pub(super) fn properties(&self) -> &BasicProperties {
        &self.properties
    }

    pub(super) fn body_bytes(&self) -> usize {
        self.body.len()
    }

    /// What an outcome asks for. `attempts` is how often it was tried, this time included.
    pub(super) fn plan_for(&self, outcome: Outcome) -> SettlePlan {
        // A handler that says itself what is wrong is believed; one that says all is well and then fails is not.
        let own = self.replies.final_reply();
        let refusal = own.clone().filter(|reply| reply.status != ReplyStatus::OK);
        let wrong = |kind: &str, otherwise: &str| {
            let why = self.replies.failure_reason();
            SettlePlan::Reply(
                refusal.clone().unwrap_or_else(|| error_reply(kind, why.as_deref().unwrap_or(otherwise), None)),
            )
        };
        match outcome {
            Outcome::Completed => SettlePlan::Reply(own.unwrap_or_else(|| Reply::ok(*b"null"))),
            Outcome::Failed => wrong("failed", "the request failed"),
            Outcome::Exception(ExceptionReason::MalformedPayload) => {
                wrong("malformed_request", "the request is malformed")
            }
            Outcome::Exception(ExceptionReason::ResourceUnavailable) => {
                wrong("resource_unavailable", "something it needs cannot be had")
            }
            Outcome::Exception(ExceptionReason::InternalError) => wrong("internal_error", "the worker is at fault"),
            Outcome::Exception(ExceptionReason::WorkerShutdown) if self.replies.is_not_started() => {
                SettlePlan::RepublishFresh
            }
            Outcome::Exception(ExceptionReason::WorkerShutdown) => SettlePlan::Requeue,
            Outcome::Exception(ExceptionReason::IntermittentTask) => {
                SettlePlan::Republish { attempts: self.run.run.saturating_add(1) }
            }
        }
    }

    /// Settles it. Repeating it goes on where it was, and is harmless once it is done.
    pub(super) async fn settle(&self, outcome: Outcome, plan: SettlePlan) -> Result<(), CallError> {
        let mut state = self.state.lock().await;
        if state.settled_as.is_none() {
            let begun = Arc::clone(state.settling.get_or_insert_with(|| Arc::new(Settling { outcome, plan })));
            if let Err(refused) = self.continue_settling(&mut state, &begun).await {
                (state.settling, state.published) = (None, None);
                return Err(refused);
            }
        }
        match state.settled_as {
            Some(done) if done != outcome => Err(self.call_error(Refusal::Gone, &format!("it was settled as {done}"))),
            Some(_) | None => Ok(()),
        }
    }

    async fn continue_settling(
        &self,
        state: &mut State,
        Settling { outcome, plan }: &Settling,
    ) -> Result<(), CallError> {
        if state.acknowledging.is_none() {
            if let Some(lost) = self.session.lost_reason() {
                return Err(self.call_error(Refusal::Gone, &lost));
            }
            // Somebody else has it by now, and would answer a second time.
            if self.session.is_lost() {
                return Err(self.call_error(Refusal::Gone, "its channel is closed"));
            }
            let last = self.publish_plan(state, plan).await?;
            state.acknowledging = Some(self.acknowledge(last));
        }
        self.await_acknowledged(state).await?;
        match plan {
            SettlePlan::Reply(_) => crash_point("request-acknowledged"),
            SettlePlan::RepublishFresh | SettlePlan::Requeue => self.context.counters.requeued.increment(),
            SettlePlan::Republish { .. } | SettlePlan::DeadLetter => {}
        }
        self.mark_settled(state, *outcome);
        Ok(())
    }

    /// Publishes what the plan asks for. Says what the broker is told then.
    async fn publish_plan(&self, state: &mut State, plan: &SettlePlan) -> Result<AckKind, CallError> {
        match plan {
            SettlePlan::Reply(reply) => {
                self.publish_reply(state, reply).await?;
                crash_point("request-confirmed");
            }
            SettlePlan::Republish { attempts } => {
                if let Err(refused) = self.republish(state, *attempts).await {
                    if !self.is_copy_retry_over(state) {
                        return Err(refused);
                    }
                    // The slot that waits for room in a full queue is one that makes none there.
                    return Ok(AckKind::Requeue);
                }
                crash_point("request-copied");
            }
            SettlePlan::RepublishFresh => {
                if let Err(refused) = self.republish(state, self.run.run).await {
                    return if state.copy_refused_since.is_some() { Ok(AckKind::Requeue) } else { Err(refused) };
                }
                crash_point("request-copied");
            }
            SettlePlan::Requeue => return Ok(AckKind::Requeue),
            SettlePlan::DeadLetter => return Ok(AckKind::DeadLetter),
        }
        Ok(AckKind::Acknowledge)
    }

    /// Whether its queue has refused copies of it for as long as is waited for that.
    fn is_copy_retry_over(&self, state: &State) -> bool {
        state.copy_refused_since.is_some_and(|since| self.context.refused_replies.is_retry_over(since))
    }

    /// Puts a copy into its own queue whose header says how often it was tried.
    async fn republish(&self, state: &mut State, attempts: u32) -> Result<(), CallError> {
        let properties = delivery::republish_properties(&self.properties, attempts, self.received_at.elapsed());
        self.publish_copy(state, self.queue.clone(), properties).await
    }

    /// Puts a copy into another queue, with the reason. A queue that is not there is told of, and keeps nothing.
    pub(super) async fn store_poison_copy(&self, queue: &str, reason: &str, attempts: u32) -> Result<(), CallError> {
        let mut state = self.state.lock().await;
        if state.is_poison_copy_stored || state.settled_as.is_some() {
            return Ok(());
        }
        if self.session.is_lost() {
            return Err(self.call_error(Refusal::Gone, "its channel is closed"));
        }
        let properties = delivery::copy_properties(&self.properties, attempts);
        let mut headers = properties.headers().clone().unwrap_or_default();
        headers.insert(REASON_HEADER.into(), AMQPValue::LongString(reason.into()));
        headers.insert(ORIGIN_QUEUE_HEADER.into(), AMQPValue::LongString(self.queue.as_str().into()));
        let properties = properties.with_headers(headers);
        let copied = match amqp::to_short_string("the name of the queue for them", queue) {
            Ok(queue) => self.publish_copy(&mut state, queue, properties).await,
            Err(error) => Err(self.call_error(Refusal::Rejected, &error.to_string())),
        };
        match copied {
            Ok(()) => {}
            Err(refused) if refused.refusal == Refusal::Rejected => {
                self.alert_poison_copy_lost(&refused);
            }
            Err(refused) => {
                // It is refused again for as long as an answer would be.
                if !self.is_copy_retry_over(&state) {
                    state.reply_refused_since = state.reply_refused_since.or(state.copy_refused_since);
                    return Err(refused);
                }
                self.alert_poison_copy_lost(&refused);
            }
        }
        // Its own queue is another one, and so is that of its answer.
        (state.published, state.copy_refused_since, state.reply_refused_since) = (None, None, None);
        state.is_poison_copy_stored = true;
        Ok(())
    }

    fn alert_poison_copy_lost(&self, refused: &CallError) {
        tracing::error!(alert = "poison-copy-failed", claim.run = %self.run, "[alert operator] a request that was given up could not be kept: {}", refused.message);
    }

    /// Whether nothing is left to be done for it.
    pub(super) fn is_settled(&self) -> bool {
        self.is_settled.load(Ordering::Relaxed)
    }

    fn mark_settled(&self, state: &mut State, outcome: Outcome) {
        state.settled_as = Some(outcome);
        self.is_settled.store(true, Ordering::Relaxed);
        self.session.mark_settled(&self.run);
    }

    async fn publish_reply(&self, state: &mut State, reply: &Reply) -> Result<(), CallError> {
        let Some(to) = self.properties.reply_to().clone().filter(|to| !to.as_str().is_empty()) else {
            return Ok(());
        };
        let properties = |reply: &Reply| last_reply_properties(reply, &self.properties);
        match self.publish_once(state, to.clone(), properties(reply), &reply.body, PublishKind::Reply).await {
            Ok(PublishResult::Confirmed) => self.context.counters.replies.increment(),
            Ok(PublishResult::Returned) => self.context.counters.clients_absent.increment(),
            Ok(PublishResult::Nacked) => return self.on_reply_refused(state, &to),
            // It is this answer that the broker cannot take, such as for its size: no repetition helps, but a shorter one may.
            Err(fault) if is_channel_error(&fault) => {
                tracing::warn!(claim.run = %self.run, error = amqp::error_text(&fault), "an answer cannot be sent; an error goes in its place");
                let reply = error_reply(
                    "reply_refused",
                    &format!("the answer could not be sent: {}", amqp::error_text(&fault)),
                    None,
                );
                match self.publish_once(state, to.clone(), properties(&reply), &reply.body, PublishKind::Reply).await {
                    Ok(PublishResult::Confirmed | PublishResult::Returned) => {}
                    Ok(PublishResult::Nacked) => return self.on_reply_refused(state, &to),
                    Err(fault) => {
                        return Err(self.call_error(Refusal::Retry { retry_after: None }, &amqp::error_text(&fault)));
                    }
                }
            }
            Err(fault) => return Err(self.call_error(Refusal::Retry { retry_after: None }, &amqp::error_text(&fault))),
        }
        Ok(())
    }

    /// Its queue is full, or an answer may not come in. A slot that waits for that is no use to anybody else.
    fn on_reply_refused(&self, state: &mut State, to: &ShortString) -> Result<(), CallError> {
        self.context.counters.replies_nacked.increment();
        let since = *state.reply_refused_since.get_or_insert_with(tokio::time::Instant::now);
        if self.context.refused_replies.is_retry_over(since) {
            self.context.refused_replies.give_up(&self.run, to.as_str());
            return Ok(());
        }
        Err(self.call_error(Refusal::Retry { retry_after: None }, "the broker refused the answer"))
    }

    /// Whether its answer was refused, or what is kept of it.
    pub(super) async fn is_reply_refused(&self) -> bool {
        self.state.lock().await.reply_refused_since.is_some()
    }

    async fn publish_copy(
        &self,
        state: &mut State,
        queue: ShortString,
        properties: BasicProperties,
    ) -> Result<(), CallError> {
        let retry = |what: &str| Err(self.call_error(Refusal::Retry { retry_after: None }, what));
        match self.publish_once(state, queue.clone(), properties, &self.body, PublishKind::Copy).await {
            Ok(PublishResult::Confirmed) => {
                self.record_copy_result(&queue, Republishing::Accepted);
                Ok(())
            }
            Ok(PublishResult::Returned) => {
                Err(self.call_error(Refusal::Rejected, &format!("there is no queue {queue}")))
            }
            Ok(PublishResult::Nacked) => {
                self.record_copy_result(&queue, Republishing::Refused);
                state.copy_refused_since.get_or_insert_with(tokio::time::Instant::now);
                retry("the broker refused a copy of it: its queue is full")
            }
            Err(fault) if is_channel_error(&fault) => {
                self.record_copy_result(&queue, Republishing::Refused);
                Err(self.call_error(Refusal::Rejected, &amqp::error_text(&fault)))
            }
            Err(fault) => retry(&amqp::error_text(&fault)),
        }
    }

    /// What a queue has made of a copy, where it is that of the requests.
    fn record_copy_result(&self, queue: &ShortString, copies: Republishing) {
        if *queue == self.queue {
            self.context.backpressure.record(copies);
        }
    }

    /// Publishes, or waits on for what is being published, or says what became of it.
    async fn publish_once(
        &self,
        state: &mut State,
        key: ShortString,
        properties: BasicProperties,
        body: &Arc<[u8]>,
        what: PublishKind,
    ) -> lapin::Result<PublishResult> {
        if let Some(published) = state.published {
            return Ok(published);
        }
        let publishing = state.publishing.get_or_insert_with(|| {
            let (outlet, body) = (Arc::clone(&self.session.publisher), Arc::clone(body));
            if what == PublishKind::Reply {
                self.session.reply_clients.check_before_reply(&key);
            }
            match what {
                PublishKind::Reply => Box::pin(outlet.publish_reply(key, properties, body)),
                PublishKind::Copy => Box::pin(outlet.publish_copy(key, properties, body)),
            }
        });
        let ended = publishing.await;
        state.publishing = None;
        // What was refused is published anew.
        state.published = ended.as_ref().ok().copied().filter(|published| *published != PublishResult::Nacked);
        ended
    }

    /// To be polled at once.
    fn acknowledge(&self, last: AckKind) -> AckFuture {
        let (session, tag) = (Arc::clone(&self.session), self.use_tag_once());
        Box::pin(async move {
            match tag {
                Some(tag) => session.acknowledge(tag, last).await,
                None => Ok(false),
            }
        })
    }

    /// Its tag, for the first who asks.
    fn use_tag_once(&self) -> Option<DeliveryTag> {
        (!self.is_tag_used.swap(true, Ordering::AcqRel)).then_some(self.delivery_tag)
    }

    async fn await_acknowledged(&self, state: &mut State) -> Result<(), CallError> {
        let Some(telling) = &mut state.acknowledging else { return Ok(()) };
        let told = telling.await;
        state.acknowledging = None;
        match told {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.unacknowledged_error("its channel is closed")),
            Err(error) => Err(self.unacknowledged_error(&amqp::error_text(&error))),
        }
    }

    /// The claim is lost, whatever was published: it will be handed out again.
    pub(super) fn unacknowledged_error(&self, why: &str) -> CallError {
        self.context.counters.acks_failed.increment();
        self.call_error(Refusal::Gone, why)
    }

    pub(super) fn call_error(&self, refusal: Refusal, what: &str) -> CallError {
        CallError { refusal, message: format!("report on request {}: {what}", self.run) }
    }
}

impl Drop for RequestClaim {
    /// What nobody settled goes back at once, instead of when its channel ends.
    fn drop(&mut self) {
        self.session.release_claim();
        if self.is_settled.load(Ordering::Relaxed) {
            return;
        }
        self.session.mark_settled(&self.run);
        if self.use_tag_once().is_some_and(|tag| self.session.requeue(tag)) {
            self.context.counters.requeued.increment();
        }
    }
}

/// What is kept of a delivery.
pub(super) struct ReceivedDelivery {
    pub(super) delivery_tag: DeliveryTag,
    pub(super) properties: BasicProperties,
    pub(super) body: Arc<[u8]>,
    pub(super) queue: ShortString,
    pub(super) delivered_at: Instant,
    pub(super) received_at: tokio::time::Instant,
}

/// Something is wrong with what was published, and not with the way there.
fn is_channel_error(error: &lapin::Error) -> bool {
    error.is_amqp_soft_error()
}

/// How long a claim may be trusted that was just brought: as long as its channel is looked after, and never past the broker's patience.
pub(super) fn initial_lease(delivered: Instant, now: Instant, patience: Option<Duration>, most: Duration) -> Duration {
    patience.map_or(most, |patience| patience.saturating_sub(now.since(delivered)).min(most))
}
