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
use crate::source::CallError;
use crate::task::{Reply, ReplyLimits, ReplyStatus, Results};

use super::backpressure::Backpressure;
use super::counters::AmqpSourceCounters;
use super::delivery;
use super::publisher::PublishResult;
use super::refused_replies::RefusedReplies;
use super::reply_format::{PartialReplySender, error_reply, last_reply_properties};
use super::session::{AckKind, Session};

/// Header of a message in the poison queue: why it is there.
const REASON_HEADER: &str = "x-journeyman-reason";
/// Header of a message in the poison queue: the queue that it came from.
const ORIGIN_QUEUE_HEADER: &str = "x-journeyman-queue";

pub(super) struct RequestClaim {
    pub(super) run: Run,
    pub(super) session: Arc<Session>,
    pub(super) delivered_at: Instant,
    /// The same on the clock of tokio's timers.
    pub(super) received_at: tokio::time::Instant,
    delivery_tag: DeliveryTag,
    /// A delivery is settled once: settling an unknown delivery tag closes the channel.
    is_tag_used: AtomicBool,
    queue: ShortString,
    pub(super) properties: BasicProperties,
    pub(super) body: Arc<[u8]>,
    replies: Results,
    pub(super) context: SourceContext,
    pub(super) state: Mutex<State>,
    pub(super) is_settled: AtomicBool,
}

/// What all claims of a source share.
#[derive(Clone)]
pub(super) struct SourceContext {
    pub(super) counters: Arc<AmqpSourceCounters>,
    pub(super) refused_replies: Arc<RefusedReplies>,
    pub(super) backpressure: Arc<Backpressure>,
}

type PublishFuture = Pin<Box<dyn Future<Output = lapin::Result<PublishResult>> + Send>>;
/// Resolves to whether the acknowledgement was sent.
type AckFuture = Pin<Box<dyn Future<Output = lapin::Result<bool>> + Send>>;

/// Progress of the settlement. A future that is under way survives the call that started it, so that nothing is published twice.
#[derive(Default)]
pub(super) struct State {
    settling: Option<Arc<Settling>>,
    publishing: Option<PublishFuture>,
    published: Option<PublishResult>,
    /// The acknowledgement that is being sent; started once.
    acknowledging: Option<AckFuture>,
    reply_refused_since: Option<tokio::time::Instant>,
    copy_refused_since: Option<tokio::time::Instant>,
    is_poison_copy_stored: bool,
    pub(super) settled_as: Option<Outcome>,
}

/// How the settlement began. A later report cannot change it: the client would get two replies.
struct Settling {
    outcome: Outcome,
    plan: SettlePlan,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PublishKind {
    Reply,
    Copy,
}

/// What settles a request.
#[derive(Debug, Clone)]
pub(super) enum SettlePlan {
    /// Publish the reply, if the request has a `reply_to`, and acknowledge.
    Reply(Reply),
    /// Reject with requeue.
    Requeue,
    /// Publish a copy to the queue with the same number of attempts, and acknowledge: the request has not started.
    RepublishFresh,
    /// Publish a copy to the queue that records the attempts in a header, and acknowledge.
    Republish { attempts: u32 },
    /// Reject without requeue: the broker dead-letters the request, or drops it where no dead letter exchange is set.
    DeadLetter,
}

impl RequestClaim {
    pub(super) fn new(
        run: Run,
        delivery: ReceivedDelivery,
        session: Arc<Session>,
        limits: ReplyLimits,
        context: SourceContext,
    ) -> Self {
        let ReceivedDelivery { delivery_tag, properties, body, queue, delivered_at, received_at } = delivery;
        let partial_replies = PartialReplySender {
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
            replies: Results::new(partial_replies, limits),
            context,
            state: Mutex::default(),
            is_settled: AtomicBool::new(false),
        }
    }

    pub(super) fn replies(&self) -> Results {
        self.replies.clone()
    }

    /// Whether the broker blocks publishing.
    pub(super) fn is_blocked(&self) -> bool {
        self.session.is_blocked()
    }

    pub(super) fn properties(&self) -> &BasicProperties {
        &self.properties
    }

    pub(super) fn body_bytes(&self) -> usize {
        self.body.len()
    }

    /// The plan for an outcome.
    pub(super) fn plan_for(&self, outcome: Outcome) -> SettlePlan {
        // The handler's own error reply counts; an `ok` reply of a handler that failed does not.
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
                wrong("resource_unavailable", "a resource that the request needs is unavailable")
            }
            Outcome::Exception(ExceptionReason::InternalError) => wrong("internal_error", "the worker failed"),
            Outcome::Exception(ExceptionReason::WorkerShutdown) if self.replies.is_not_started() => {
                SettlePlan::RepublishFresh
            }
            Outcome::Exception(ExceptionReason::WorkerShutdown) => SettlePlan::Requeue,
            Outcome::Exception(ExceptionReason::IntermittentTask) => {
                SettlePlan::Republish { attempts: self.run.run.saturating_add(1) }
            }
        }
    }

    /// Settles the request. A repeated call continues where the previous one stopped; once settled it does nothing.
    pub(super) async fn settle(&self, outcome: Outcome, plan: SettlePlan) -> Result<(), CallError> {
        let mut state = self.state.lock().await;
        if state.settled_as.is_none() {
            let settling = Arc::clone(state.settling.get_or_insert_with(|| Arc::new(Settling { outcome, plan })));
            if let Err(refused) = self.continue_settling(&mut state, &settling).await {
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
            // The broker has redelivered the request; this reply would be a second one.
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

    /// Publishes what the plan asks for, and returns how to settle the delivery.
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
                    // Holding the slot would keep the worker from emptying the full queue.
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

    /// Whether the queue has refused copies of this request for `reply_retry_max`.
    fn is_copy_retry_over(&self, state: &State) -> bool {
        state.copy_refused_since.is_some_and(|since| self.context.refused_replies.is_retry_over(since))
    }

    /// Publishes a copy to the request queue that records the attempts.
    async fn republish(&self, state: &mut State, attempts: u32) -> Result<(), CallError> {
        let properties = delivery::republish_properties(&self.properties, attempts, self.received_at.elapsed());
        self.publish_copy(state, self.queue.clone(), properties).await
    }

    /// Publishes a copy to the poison queue, with the reason. A missing poison queue raises an alert and loses the copy.
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
        let copied = match amqp::to_short_string("the name of the poison queue", queue) {
            Ok(queue) => self.publish_copy(&mut state, queue, properties).await,
            Err(error) => Err(self.call_error(Refusal::Rejected, &error.to_string())),
        };
        match copied {
            Ok(()) => {}
            Err(refused) if refused.refusal == Refusal::Rejected => {
                self.alert_poison_copy_lost(&refused);
            }
            Err(refused) => {
                // Retried for as long as a refused reply.
                if !self.is_copy_retry_over(&state) {
                    state.reply_refused_since = state.reply_refused_since.or(state.copy_refused_since);
                    return Err(refused);
                }
                self.alert_poison_copy_lost(&refused);
            }
        }
        // The state of this copy says nothing of the request queue or of the reply.
        (state.published, state.copy_refused_since, state.reply_refused_since) = (None, None, None);
        state.is_poison_copy_stored = true;
        Ok(())
    }

    fn alert_poison_copy_lost(&self, refused: &CallError) {
        tracing::error!(alert = "poison-copy-failed", claim.run = %self.run, "[alert operator] a request was given up and could not be moved to the poison queue: {}", refused.message);
    }

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
            // The broker refuses this reply, such as for its size: retrying does not help, a short error reply may.
            Err(fault) if is_channel_error(&fault) => {
                tracing::warn!(claim.run = %self.run, error = amqp::error_text(&fault), "the broker refused a reply; replacing it by an error reply");
                let reply = error_reply(
                    "reply_refused",
                    &format!("the broker refused the reply: {}", amqp::error_text(&fault)),
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

    /// The reply queue is full or may not be written to. Waiting would keep the slot busy, so the reply is given up in the end.
    fn on_reply_refused(&self, state: &mut State, to: &ShortString) -> Result<(), CallError> {
        self.context.counters.replies_nacked.increment();
        let since = *state.reply_refused_since.get_or_insert_with(tokio::time::Instant::now);
        if self.context.refused_replies.is_retry_over(since) {
            self.context.refused_replies.give_up(&self.run, to.as_str());
            return Ok(());
        }
        Err(self.call_error(Refusal::Retry { retry_after: None }, "the broker refused the reply"))
    }

    /// Whether the reply, or the copy for the poison queue, was refused.
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
                retry("the broker refused a copy of it: the queue is full")
            }
            Err(fault) if is_channel_error(&fault) => {
                self.record_copy_result(&queue, Republishing::Refused);
                Err(self.call_error(Refusal::Rejected, &amqp::error_text(&fault)))
            }
            Err(fault) => retry(&amqp::error_text(&fault)),
        }
    }

    /// Copies to other queues say nothing of the request queue.
    fn record_copy_result(&self, queue: &ShortString, copies: Republishing) {
        if *queue == self.queue {
            self.context.backpressure.record(copies);
        }
    }

    /// Publishes, or continues to, or returns the earlier result.
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
            let (publisher, body) = (Arc::clone(&self.session.publisher), Arc::clone(body));
            match what {
                PublishKind::Reply => Box::pin(publisher.publish_reply(key, properties, body)),
                PublishKind::Copy => Box::pin(publisher.publish_copy(key, properties, body)),
            }
        });
        let ended = publishing.await;
        state.publishing = None;
        // A refused message is published again.
        state.published = ended.as_ref().ok().copied().filter(|published| *published != PublishResult::Nacked);
        ended
    }

    /// Starts when first polled.
    fn acknowledge(&self, last: AckKind) -> AckFuture {
        let (session, tag) = (Arc::clone(&self.session), self.use_tag_once());
        Box::pin(async move {
            match tag {
                Some(tag) => session.acknowledge(tag, last).await,
                None => Ok(false),
            }
        })
    }

    /// The delivery tag, to the first caller only.
    fn use_tag_once(&self) -> Option<DeliveryTag> {
        (!self.is_tag_used.swap(true, Ordering::AcqRel)).then_some(self.delivery_tag)
    }

    async fn await_acknowledged(&self, state: &mut State) -> Result<(), CallError> {
        let Some(acknowledging) = &mut state.acknowledging else { return Ok(()) };
        let acknowledged = acknowledging.await;
        state.acknowledging = None;
        match acknowledged {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.unacknowledged_error("its channel is closed")),
            Err(error) => Err(self.unacknowledged_error(&amqp::error_text(&error))),
        }
    }

    /// The claim is lost whatever was published: the broker redelivers the request.
    pub(super) fn unacknowledged_error(&self, why: &str) -> CallError {
        self.context.counters.acks_failed.increment();
        self.call_error(Refusal::Gone, why)
    }

    pub(super) fn call_error(&self, refusal: Refusal, what: &str) -> CallError {
        CallError { refusal, message: format!("report on request {}: {what}", self.run) }
    }
}

impl Drop for RequestClaim {
    /// Requeues what was not settled, without waiting for the end of the channel.
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

/// The parts of a delivery that a claim keeps.
pub(super) struct ReceivedDelivery {
    pub(super) delivery_tag: DeliveryTag,
    pub(super) properties: BasicProperties,
    pub(super) body: Arc<[u8]>,
    pub(super) queue: ShortString,
    pub(super) delivered_at: Instant,
    pub(super) received_at: tokio::time::Instant,
}

/// Whether the fault lies in the message, not in the connection.
fn is_channel_error(error: &lapin::Error) -> bool {
    error.is_amqp_soft_error()
}

/// The lease of a new claim: `max`, and never past the broker's consumer_timeout.
pub(super) fn initial_lease(
    delivered: Instant,
    now: Instant,
    consumer_timeout: Option<Duration>,
    max: Duration,
) -> Duration {
    consumer_timeout.map_or(max, |consumer_timeout| consumer_timeout.saturating_sub(now.since(delivered)).min(max))
}
