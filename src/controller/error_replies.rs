//! Answers in the place of workers: why there is one, and what it says.

use std::future::Future;
use std::sync::Arc;

use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicPublishOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::ControllerConfig;
use super::counters::PoolCounters;
use super::forwarding::open_confirm_channel;
use super::queue_names::QueueNames;
use super::session::{SessionError, stream_ended};
use super::session_state::QueueCondition;
use crate::amqp::headers;
use crate::limits::{
    AMQP_CALL_TIMEOUT, CONTROLLER_ANSWER_ATTEMPTS_MAX, CONTROLLER_ANSWER_RETRY_DELAY, CONTROLLER_HOPS_MAX,
    CONTROLLER_ORPHAN_TIMEOUT, CONTROLLER_QUEUE_DECLARE_SLOW, CONTROLLER_QUEUE_FULL_WAITING_MAX,
};

/// The queue that a dead letter died in first.
const DIED_IN: &str = "x-first-death-queue";

/// Why a request is answered by the controller.
pub(super) struct DeadLetterReason {
    /// In one word, such as `expired`.
    pub(super) reason: String,
    /// For people.
    pub(super) message: String,
    /// The queue that it died in.
    pub(super) queue: Option<String>,
}

impl DeadLetterReason {
    /// As the broker tells of a dead letter.
    pub(super) fn from_delivery(delivery: &Delivery) -> Self {
        let table = delivery.properties.headers().as_ref();
        let said = |name| table.and_then(|table| headers::text(table, name)).map(str::to_owned);
        let reason = said("x-first-death-reason").unwrap_or_else(|| "unknown".to_owned());
        let message = match reason.as_str() {
            "expired" => "no worker took the request before its time was over",
            "maxlen" => "too many requests wait for this key",
            "delivery_limit" => "every worker that took the request ended before it had answered",
            "rejected" => "a worker refused the request",
            _ => "the request was given up",
        };
        Self { message: message.to_owned(), queue: said(DIED_IN), reason }
    }

    /// A request whose queue has not taken it.
    pub(super) fn for_queue(queue: QueueCondition) -> Self {
        let (reason, message) = match queue {
            QueueCondition::Missing => {
                let what = "the queue of its key could not be made, or not within";
                ("no-queue", format!("{what} {CONTROLLER_ORPHAN_TIMEOUT:?}"))
            }
            QueueCondition::Full => ("maxlen", "too many requests wait for this key".to_owned()),
            QueueCondition::Unconfirmed => {
                let what = "the queue of its key has confirmed nothing for";
                ("publish-timeout", format!("{what} {CONTROLLER_ORPHAN_TIMEOUT:?}"))
            }
        };
        Self { reason: reason.to_owned(), message, queue: None }
    }

    /// A request that takes the room of others while its queue does not take it.
    pub(super) fn for_crowded_queue(queue: QueueCondition) -> Self {
        let many = format!(
            "more than {CONTROLLER_QUEUE_FULL_WAITING_MAX} requests have waited for the queue of its key, some for"
        );
        Self {
            message: format!("{many} {CONTROLLER_QUEUE_DECLARE_SLOW:?}, and take the room of others"),
            ..Self::for_queue(queue)
        }
    }

    /// A request that went round in circles.
    pub(super) fn for_loop() -> Self {
        Self {
            reason: "no-queue".to_owned(),
            message: format!(
                "the request came back {CONTROLLER_HOPS_MAX} times, since its key has no queue that lasts"
            ),
            queue: None,
        }
    }

    /// Whether it may have killed who worked on it.
    pub(super) fn is_poison(&self) -> bool {
        self.reason == "delivery_limit"
    }
}

/// Answers requests in the place of workers.
pub(super) struct ErrorReplier {
    channel: Channel,
    names: QueueNames,
    /// What its status says.
    status: Vec<u8>,
    counters: Arc<PoolCounters>,
}

impl ErrorReplier {
    /// Over a channel of its own.
    ///
    /// # Errors
    ///
    /// What the broker says.
    pub(super) async fn open(
        connection: &Connection,
        settings: &ControllerConfig,
        tally: Arc<PoolCounters>,
    ) -> lapin::Result<Arc<Self>> {
        let (names, status) = (settings.names.clone(), settings.dead_letter_status.as_bytes().to_vec());
        Ok(Arc::new(Self { channel: open_confirm_channel(connection).await?, names, status, counters: tally }))
    }

    /// Answers a request, and acknowledges it then.
    ///
    /// # Errors
    ///
    /// As [`ErrorReplier::reply`].
    pub(super) async fn reject(self: Arc<Self>, delivery: Delivery, obituary: DeadLetterReason) -> lapin::Result<()> {
        self.reply(&delivery, &obituary).await?;
        delivery.acker.ack(BasicAckOptions::default()).await.map(drop)
    }

    /// Answers a request; somebody else acknowledges it. An answer that its queue refuses again and again is given up, as that of a
    /// worker is, and so is one that is not confirmed. Both take their time: others are answered beside it.
    ///
    /// # Errors
    ///
    /// Where the channel fails.
    pub(super) async fn reply(&self, delivery: &Delivery, obituary: &DeadLetterReason) -> lapin::Result<()> {
        if let Some(reply_to) = delivery.properties.reply_to().clone() {
            let (body, properties) = self.render(delivery, obituary);
            let mut tries = 1;
            loop {
                let (options, properties) = (BasicPublishOptions::default(), properties.clone());
                let publishing = self.channel.basic_publish("".into(), reply_to.clone(), options, &body, properties);
                match timeout(AMQP_CALL_TIMEOUT, publishing.await?).await {
                    Ok(Ok(Confirmation::Nack(_))) if tries == CONTROLLER_ANSWER_ATTEMPTS_MAX => {
                        tracing::warn!(tries, "an answer in a worker's place is given up: its queue refuses it");
                        break;
                    }
                    Ok(Ok(Confirmation::Nack(_))) => {
                        tries += 1;
                        sleep(CONTROLLER_ANSWER_RETRY_DELAY).await;
                    }
                    Ok(Ok(Confirmation::Ack(_) | Confirmation::NotRequested)) => break,
                    Ok(Err(error)) => return Err(error),
                    Err(_) => {
                        tracing::warn!(
                            "an answer in a worker's place is given up: it is not confirmed in {AMQP_CALL_TIMEOUT:?}"
                        );
                        break;
                    }
                }
            }
        }
        self.counters.dead_letters.increment();
        Ok(())
    }

    /// What its client is answered.
    fn render(&self, delivery: &Delivery, obituary: &DeadLetterReason) -> (Vec<u8>, BasicProperties) {
        let body = serde_json::json!({
            "type": format!("journeyman:dead_letter:{}", obituary.reason),
            "message": obituary.message,
            "context": { "reason": obituary.reason, "queue": obituary.queue, "key": original_key(&self.names, delivery) },
            "cause": null,
        });
        let mut table = FieldTable::default();
        table.insert("x-status".into(), AMQPValue::ByteArray(self.status.clone().into()));
        table.insert("x-dead-letter-reason".into(), AMQPValue::LongString(obituary.reason.as_str().into()));
        let mut properties =
            BasicProperties::default().with_headers(table).with_content_type("application/json".into());
        if let Some(id) = delivery.properties.correlation_id().clone() {
            properties = properties.with_correlation_id(id);
        }
        (body.to_string().into_bytes(), properties)
    }
}

/// Answers requests that will have no queue, until nobody brings any more.
pub(super) async fn reject_undeliverable(
    answers: Arc<ErrorReplier>,
    mut condemned: mpsc::Receiver<(Delivery, DeadLetterReason)>,
) -> SessionError {
    let mut going = TaskSet::default();
    loop {
        tokio::select! {
            Some(over) = going.next_error() => return over,
            next = condemned.recv() => {
                let Some((delivery, obituary)) = next else { return stream_ended("burials") };
                let answers = Arc::clone(&answers);
                going.spawn(async move {
                    let tally = Arc::clone(&answers.counters);
                    answers.reject(delivery, obituary).await?;
                    tally.orphans.decrement();
                    Ok(())
                });
            }
        }
    }
}

/// What is done beside each other, as much of it as the broker hands out at once. It ends with this.
#[derive(Default)]
pub(super) struct TaskSet(JoinSet<Result<(), SessionError>>);

impl TaskSet {
    pub(super) fn spawn(&mut self, work: impl Future<Output = Result<(), SessionError>> + Send + 'static) {
        self.0.spawn(work);
    }

    /// The first that fails, if there is anything; `None` where nothing goes on.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(super) async fn next_error(&mut self) -> Option<SessionError> {
        while let Some(done) = self.0.join_next().await {
            match done {
                Ok(Ok(())) => {}
                Ok(Err(over)) => return Some(over),
                Err(error) => return Some(SessionError { reason: error.to_string() }),
            }
        }
        None
    }
}

/// What a request came under, as its client may have written it.
pub(super) fn original_key(names: &QueueNames, delivery: &Delivery) -> String {
    let table = delivery.properties.headers().as_ref();
    let died_in = table.and_then(|table| headers::text(table, DIED_IN));
    names.original_key(delivery.routing_key.as_str(), died_in)
}
