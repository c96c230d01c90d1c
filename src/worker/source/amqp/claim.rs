//! A claim on a request: answered, then acknowledged on the channel that brought it, or not at all (I18, I19).

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use lapin::types::{AMQPValue, ShortString};
use tokio::sync::Mutex;

use crate::source::{Artifact, CallError, Claim, Granted, LossReason, SourceFuture};
use crate::task::{Deferral, NextCheck, Reply, ReplyLimits, ReplyStatus, Results};
use journeyman_domain::consumer_timeout;
use journeyman_domain::delivery_attempts::Republishing;
use journeyman_domain::id::Run;
use journeyman_domain::limits::{AMQP_LEASE, AMQP_NAME_BYTES_MAX};
use journeyman_domain::outcome::{ExceptionReason, Outcome};
use journeyman_domain::refusal::Refusal;
use journeyman_domain::staged::StagedRecord;
use journeyman_domain::time::Instant;
use journeyman_platform::host::crash_points::crash_point;

use super::config::{OnAttemptsExhausted, OnRetry};
use super::deferral::{CheckRoute, DeferralConfig, Look};
use super::delivery::ReceivedRequest;
use super::publisher::PublishError;
use super::reply_format::{PartialReplySender, error_reply, last_reply_properties};
use super::session::{AckKind, PendingDelivery, Session};
use super::{AmqpSourceInner, delivery};

/// Header of a message in the poison queue: why it is there.
const REASON_HEADER: &str = "x-journeyman-reason";
/// Header of a message in the poison queue: the queue that it came from.
const ORIGIN_QUEUE_HEADER: &str = "x-journeyman-queue";

pub(super) struct RequestClaim {
    pub(super) run: Run,
    pub(super) delivered_at: Instant,
    pub(super) message: Arc<ReceivedRequest>,
    pub(super) session: Arc<Session>,
    source: Arc<AmqpSourceInner>,
    pub(super) results: Results,
    /// `None` where no look is deferred.
    look: Option<Look>,
    /// Locked while the request is being settled.
    progress: Mutex<Progress>,
    settled_as: OnceLock<Outcome>,
}

/// What an earlier attempt to settle the request has reached.
#[derive(Default)]
struct Progress {
    refused_since: Option<tokio::time::Instant>,
    is_poison_copy_done: bool,
}

/// What settles a request.
#[derive(Debug, Clone)]
pub(super) enum SettlePlan {
    /// Publish the reply, if the request has a `reply_to`, and acknowledge.
    Reply(Reply),
    /// Reject with requeue.
    Requeue,
    /// Publish a copy to the queue that records the attempts in a header, and acknowledge.
    Republish { attempts: u32 },
    /// The task ends as `on_attempts_exhausted` says.
    GiveUp { reason: String, attempts: u32 },
    /// Schedule a check, and acknowledge.
    Defer(NextCheck),
    /// Acknowledge without a reply: another message stands for it.
    Superseded,
    /// Reject without requeue.
    DeadLetter,
}

impl RequestClaim {
    pub(super) fn new(
        source: &Arc<AmqpSourceInner>,
        session: &Arc<Session>,
        PendingDelivery { delivery, received_at }: PendingDelivery,
    ) -> Arc<Self> {
        /// Deliveries to this process, over all queues: makes run ids unique.
        static DELIVERIES_TOTAL: AtomicU64 = AtomicU64::new(0);
        let number = DELIVERIES_TOTAL.fetch_add(1, Ordering::Relaxed);
        let attempt = delivery::attempt_history(&delivery).attempts();
        let run = delivery::run_id(&delivery.properties, number, attempt);
        let tag = delivery.delivery_tag;
        let format = source.config.deferral.as_ref().map(|config| &config.format);
        let deferral = format.map(|format| Deferral::new(format.read(&delivery)));
        let key = format.and_then(|format| format.key(&delivery));
        let message = Arc::new(ReceivedRequest::new(delivery, source.config.payload_form, key));
        let partial_replies = PartialReplySender { session: Arc::clone(session), message: Arc::clone(&message) };
        let limits = ReplyLimits { body_bytes: source.message_bytes_max(), content_type_bytes: AMQP_NAME_BYTES_MAX };
        let look = deferral.as_ref().map(|deferral| Look::new(deferral.record(), &message));
        if let Some(look) = &look {
            source.done_looks.begin(look);
        }
        session.add_claim(tag, run.clone());
        Arc::new(Self {
            run,
            delivered_at: source.clock.now().minus(received_at.elapsed()),
            message,
            session: Arc::clone(session),
            source: Arc::clone(source),
            results: Results::with_deferral(partial_replies, limits, deferral),
            look,
            progress: Mutex::default(),
            settled_as: OnceLock::new(),
        })
    }

    /// True if another message of this work stands for this one.
    pub(super) fn is_look_done(&self) -> bool {
        self.look.as_ref().is_some_and(|look| self.source.done_looks.contains(look))
    }

    /// `next` follows the look of this message; `None` if nothing does.
    fn record_look(&self, next: Option<&StagedRecord>) {
        if let Some(look) = &self.look {
            self.source.done_looks.end(look, next);
        }
    }

    fn plan_for(&self, outcome: Outcome) -> SettlePlan {
        if let (Outcome::Deferred | Outcome::Exception(ExceptionReason::WorkerShutdown), Some(deferral)) =
            (outcome, self.results.deferral())
        {
            match deferral.next_check() {
                Some(check) => return SettlePlan::Defer(check),
                None if outcome == Outcome::Deferred => return SettlePlan::Superseded,
                None => {}
            }
        }
        // The handler's own error reply counts; an `ok` reply of a handler that failed does not.
        let reply = self.results.final_reply();
        let reason = self.results.failure_reason();
        let error = |kind: &str, default: &str| {
            let own = reply.clone().filter(|reply| reply.status != ReplyStatus::OK);
            SettlePlan::Reply(own.unwrap_or_else(|| error_reply(kind, reason.as_deref().unwrap_or(default), None)))
        };
        match outcome {
            Outcome::Completed => SettlePlan::Reply(reply.unwrap_or_else(|| Reply::ok(*b"null"))),
            Outcome::Failed => error("failed", "the request failed"),
            Outcome::Exception(ExceptionReason::MalformedPayload) => {
                error("malformed_request", "the request is malformed")
            }
            Outcome::Exception(ExceptionReason::ResourceUnavailable) => {
                error("resource_unavailable", "a resource that the request needs is unavailable")
            }
            Outcome::Exception(ExceptionReason::InternalError) | Outcome::Deferred => {
                error("internal_error", "the worker failed")
            }
            Outcome::Exception(ExceptionReason::WorkerShutdown) if self.results.is_not_started() => self.return_plan(),
            Outcome::Exception(ExceptionReason::WorkerShutdown) => SettlePlan::Requeue,
            Outcome::Exception(ExceptionReason::IntermittentTask)
                if self.source.config.on_retry == OnRetry::DeadLetter =>
            {
                SettlePlan::DeadLetter
            }
            Outcome::Exception(ExceptionReason::IntermittentTask) => {
                let attempts = self.run.run.saturating_add(1);
                if self.source.config.max_attempts.is_none_or(|max| attempts < max.get()) {
                    return SettlePlan::Republish { attempts };
                }
                let reason = format!(
                    "the request was tried {attempts} times, and each time its handler asked for another attempt: {}",
                    reason.as_deref().unwrap_or("no reason was given")
                );
                SettlePlan::GiveUp { reason, attempts }
            }
        }
    }

    /// How a request that has not started is returned. A copy keeps the number of attempts; where attempts are not limited, or the broker
    /// blocks publishing, the original is requeued and keeps its place.
    pub(super) fn return_plan(&self) -> SettlePlan {
        if self.source.config.max_attempts.is_some() && !self.session.is_blocked() {
            SettlePlan::Republish { attempts: self.run.run }
        } else {
            SettlePlan::Requeue
        }
    }

    /// Settles the request, once: a later call with another outcome is [`Refusal::Gone`].
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: a reply may be published, and its request not acknowledged.
    pub(super) async fn settle(self: Arc<Self>, outcome: Outcome, plan: SettlePlan) -> Result<(), CallError> {
        let mut progress = self.progress.lock().await;
        match self.settled_as.get() {
            Some(earlier) if *earlier == outcome => return Ok(()),
            Some(earlier) => return Err(self.call_error(Refusal::Gone, &format!("it was settled as {earlier}"))),
            None => {}
        }
        // Once the channel is lost, the broker has redelivered the request, and a reply would be a second one.
        let settled = if self.session.is_lost() {
            None
        } else {
            self.session.while_open(self.perform(&mut progress, plan)).await
        };
        match settled {
            Some(Ok(())) => {
                let _first = self.settled_as.set(outcome);
                Ok(())
            }
            Some(Err(error)) => Err(error),
            None => Err(self.call_error(Refusal::Gone, &self.session.lost_reason())),
        }
    }

    async fn perform(&self, progress: &mut Progress, plan: SettlePlan) -> Result<(), CallError> {
        let ack = match &plan {
            // A copy that was taken at the same time was faster.
            _ if self.is_look_done() => {
                tracing::debug!(claim.run = %self.run, "acknowledged without effect: another message of this work was faster");
                AckKind::Acknowledge
            }
            SettlePlan::Reply(reply) => {
                self.publish_reply(progress, reply).await?;
                self.record_look(None);
                crash_point("request-confirmed");
                AckKind::Acknowledge
            }
            SettlePlan::Defer(check) => Box::pin(self.defer(check)).await?,
            SettlePlan::Superseded => AckKind::Acknowledge,
            SettlePlan::DeadLetter => AckKind::DeadLetter,
            SettlePlan::Republish { attempts } => Box::pin(self.republish(progress, *attempts)).await?,
            SettlePlan::Requeue => AckKind::Requeue,
            SettlePlan::GiveUp { reason, attempts } => Box::pin(self.give_up(progress, reason, *attempts)).await?,
        };
        if !self.session.settle(self.message.delivery.delivery_tag, ack) {
            return Err(self.call_error(Refusal::Gone, &self.session.lost_reason()));
        }
        if matches!(plan, SettlePlan::Republish { .. } | SettlePlan::Requeue) {
            self.source.counters.requeued.increment();
        }
        Ok(())
    }

    async fn publish_reply(&self, progress: &mut Progress, reply: &Reply) -> Result<(), CallError> {
        let properties = &self.message.delivery.properties;
        let Some(to) = properties.reply_to().as_ref().filter(|to| !to.as_str().is_empty()) else { return Ok(()) };
        let publish = |reply: &Reply| {
            let (publisher, body) = (&self.session.reply_publisher, Arc::clone(&reply.body));
            publisher.publish_reply(to.clone(), last_reply_properties(reply, properties), body)
        };
        let (counters, config) = (&self.source.counters, &self.source.config);
        let mut published = publish(reply).await;
        // Such as for its size: retrying does not help, a short error reply may.
        if let Err(PublishError::Rejected(why)) = &published {
            tracing::warn!(claim.run = %self.run, error = why, "the broker refused a reply; replacing it by an error reply");
            let message = format!("the broker refused the reply: {why}");
            published = Box::pin(publish(&error_reply("reply_refused", &message, None))).await;
        }
        match published {
            Ok(()) => counters.replies.increment(),
            Err(PublishError::Unroutable) => counters.clients_absent.increment(),
            Err(PublishError::Nacked) => {
                counters.replies_nacked.increment();
                if !self.is_retry_over(progress) {
                    return Err(self.retry_error("the broker refused the reply"));
                }
                // Waiting longer would keep the slot busy for nothing.
                counters.replies_given_up.increment();
                tracing::error!(
                    alert = "reply-given-up", claim.run = %self.run, reply.queue = to.as_str(),
                    "[alert operator] the reply queue {to} has refused a reply for {:?}; its request is acknowledged without one: \
                     is the queue full, and does a client consume from it?", config.reply_retry_max
                );
            }
            Err(PublishError::Rejected(why) | PublishError::Failed(why)) => return Err(self.retry_error(&why)),
        }
        Ok(())
    }

    /// Whether the broker has refused what is published for this request for `reply_retry_max`.
    fn is_retry_over(&self, progress: &mut Progress) -> bool {
        let since = progress.refused_since.get_or_insert_with(tokio::time::Instant::now);
        since.elapsed() >= self.source.config.reply_retry_max
    }

    /// Publishes a copy to the request queue that records the attempts.
    async fn republish(&self, progress: &mut Progress, attempts: u32) -> Result<AckKind, CallError> {
        let held = self.source.clock.now().since(self.delivered_at);
        let mut properties = delivery::republish_properties(&self.message.delivery.properties, attempts, held);
        let is_asked_for = attempts > self.run.run;
        let was_suspect = delivery::attempt_history(&self.message.delivery).is_suspect();
        if self.results.is_suspect() || (!is_asked_for && was_suspect) {
            properties = delivery::mark_redelivered(properties);
        }
        let queue = self.session.queue.clone();
        match self.session.copy_publisher.publish_copy(queue, properties, &self.message.body).await {
            Ok(()) => {
                self.source.record_copy_result(Republishing::Accepted);
                crash_point("request-copied");
                Ok(AckKind::Acknowledge)
            }
            Err(PublishError::Failed(why)) => Err(self.retry_error(&why)),
            Err(PublishError::Nacked | PublishError::Rejected(_) | PublishError::Unroutable) => {
                self.source.record_copy_result(Republishing::Refused);
                // Its handler wants another attempt, and would at once be asked for it again and again.
                if is_asked_for && !self.is_retry_over(progress) {
                    return Err(self.retry_error("the request queue is full"));
                }
                // Holding the slot longer would keep the worker from emptying the full queue.
                Ok(AckKind::Requeue)
            }
        }
    }

    /// Publishes the check that follows this message.
    async fn defer(&self, next: &NextCheck) -> Result<AckKind, CallError> {
        // What is published now would arrive once the broker goes on, and what is published again as well.
        if self.session.is_blocked() {
            return Err(self.retry_error("the broker blocks publishing"));
        }
        let Some(DeferralConfig { format, route }) = &self.source.config.deferral else {
            return Err(self.call_error(Refusal::Rejected, "this source schedules no messages"));
        };
        let (message, publisher) = (&self.message, &self.session.copy_publisher);
        let written = format.write(&message.delivery.properties, &message.body, message.work_key(), next);
        let Some(check) = written else { return Ok(AckKind::DeadLetter) };
        match route {
            CheckRoute::Delays { delays, queue } => {
                let to = if check.to_source { &self.source.config.queue } else { queue };
                let connection = &self.session.connection;
                delays.publish(connection, to.as_str(), next.wait, &check.properties, &check.body).await?;
            }
            CheckRoute::WaitQueue { exchange, key } => {
                let published = publisher.publish_alone(exchange.clone(), key.clone(), check.properties, &check.body);
                let failed = |why| self.retry_error(&format!("the check is not published to {key}: {why}"));
                published.await.map_err(failed)?;
            }
        }
        crash_point("deferral-confirmed");
        self.record_look(Some(&next.record));
        Ok(AckKind::Acknowledge)
    }

    async fn give_up(&self, progress: &mut Progress, reason: &str, attempts: u32) -> Result<AckKind, CallError> {
        // The handler's error of the last attempt says more than the number of attempts.
        let own = self.results.final_reply().filter(|reply| reply.status != ReplyStatus::OK);
        let reply = own.unwrap_or_else(|| error_reply("attempts_exhausted", reason, Some(attempts)));
        let poison_queue = &self.source.config.poison_queue;
        if let Some(queue) = poison_queue
            && !progress.is_poison_copy_done
        {
            self.publish_poison_copy(progress, queue, reason, attempts).await?;
            *progress = Progress { refused_since: None, is_poison_copy_done: true };
        }
        let on_exhausted = self.source.facts.lock().on_attempts_exhausted;
        let ack = if poison_queue.is_none() && on_exhausted == OnAttemptsExhausted::DeadLetter {
            AckKind::DeadLetter
        } else {
            self.publish_reply(progress, &reply).await?;
            AckKind::Acknowledge
        };
        self.source.counters.attempts_exhausted.increment();
        Ok(ack)
    }

    /// Publishes a copy to the poison queue, with the reason. A queue that is missing or stays full raises an alert and loses the copy.
    async fn publish_poison_copy(
        &self,
        progress: &mut Progress,
        queue: &ShortString,
        reason: &str,
        attempts: u32,
    ) -> Result<(), CallError> {
        let properties = delivery::copy_properties(&self.message.delivery.properties, attempts);
        let mut headers = properties.headers().clone().unwrap_or_default();
        headers.insert(REASON_HEADER.into(), AMQPValue::LongString(reason.into()));
        headers.insert(ORIGIN_QUEUE_HEADER.into(), AMQPValue::LongString(self.session.queue.as_str().into()));
        let properties = properties.with_headers(headers);
        let publisher = &self.session.copy_publisher;
        let publish = publisher.publish_alone("".into(), queue.clone(), properties, &self.message.body);
        let why = match publish.await {
            Ok(()) => return Ok(()),
            Err(PublishError::Failed(why)) => return Err(self.retry_error(&why)),
            Err(PublishError::Nacked) if !self.is_retry_over(progress) => {
                return Err(self.retry_error("the poison queue is full"));
            }
            Err(why) => why,
        };
        tracing::error!(alert = "poison-copy-failed", claim.run = %self.run, "[alert operator] a request was given up and could not be moved to the poison queue {queue}: {why}");
        Ok(())
    }

    fn retry_error(&self, what: &str) -> CallError {
        self.call_error(Refusal::Retry { retry_after: None }, what)
    }

    fn call_error(&self, refusal: Refusal, what: &str) -> CallError {
        CallError { refusal, message: format!("report on request {}: {what}", self.run) }
    }
}

impl Drop for RequestClaim {
    /// Requeues what was not settled, without waiting for the broker.
    fn drop(&mut self) {
        if self.settled_as.get().is_none() && self.session.settle(self.message.delivery.delivery_tag, AckKind::Requeue)
        {
            self.source.counters.requeued.increment();
        }
        self.session.release_claim();
        self.source.claim_ended.notify_one();
    }
}

/// A request that a handler runs.
pub(super) struct GrantedRequest {
    pub(super) claim: Arc<RequestClaim>,
    /// What a report has begun and the next one continues.
    pub(super) settlement: Mutex<Option<Settlement>>,
}

type Settlement = (Outcome, SourceFuture<'static, ()>);

impl Claim for GrantedRequest {
    fn run(&self) -> &Run {
        &self.claim.run
    }

    fn known_loss(&self) -> Option<LossReason> {
        self.claim.session.is_lost().then_some(LossReason::Revoked)
    }

    fn renew(&self) -> SourceFuture<'_, Granted> {
        Box::pin(async {
            let claim = &self.claim;
            let gone =
                |what: &str| CallError { refusal: Refusal::Gone, message: format!("reclaim {}: {what}", claim.run) };
            if claim.settled_as.get().is_some() {
                return Err(gone("it is already settled"));
            }
            if claim.session.is_lost() {
                return Err(gone(&claim.session.lost_reason()));
            }
            let sent_at = claim.source.clock.now();
            let (held, timeout) = (sent_at.since(claim.delivered_at), claim.source.consumer_timeout());
            Ok(Granted { sent_at, length: consumer_timeout::extension_length(held, timeout, AMQP_LEASE) })
        })
    }

    fn report(&self, outcome: Outcome) -> SourceFuture<'_, ()> {
        Box::pin(async move {
            let mut settlement = self.settlement.lock().await;
            loop {
                let (earlier, settling) = settlement.get_or_insert_with(|| {
                    (outcome, Box::pin(Arc::clone(&self.claim).settle(outcome, self.claim.plan_for(outcome))))
                });
                let (settled, answer) = (*earlier, settling.await);
                *settlement = None;
                if settled == outcome {
                    return answer;
                }
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
