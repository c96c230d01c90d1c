//! Error replies that the controller publishes instead of a worker.

use lapin::message::Delivery;
use lapin::options::BasicPublishOptions;
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation};
use tokio::time::timeout;

use super::queue_names::QueueNames;
use journeyman_domain::limits::{AMQP_CALL_TIMEOUT, CONTROLLER_HOPS_MAX};
use journeyman_platform::amqp::headers;

pub(super) const DIED_IN: &str = "x-first-death-queue";
const EXPIRED: &str = "expired";
const QUEUE_FULL: &str = "too many requests wait for this key";

pub(super) struct DeadLetterReason {
    pub(super) reason: String,
    pub(super) message: String,
    pub(super) queue: Option<String>,
}

impl DeadLetterReason {
    pub(super) fn new(reason: &str, message: String) -> Self {
        Self { reason: reason.to_owned(), message, queue: None }
    }

    pub(super) fn from_delivery(delivery: &Delivery) -> Self {
        let table = delivery.properties.headers().as_ref();
        let said = |name| table.and_then(|table| headers::text(table, name)).map(str::to_owned);
        let reason = said("x-first-death-reason").unwrap_or_else(|| "unknown".to_owned());
        let message = match reason.as_str() {
            EXPIRED => "the request expired before a worker took it",
            "maxlen" => QUEUE_FULL,
            "delivery_limit" => "every worker that took the request exited before it replied",
            "rejected" => "a worker rejected the request",
            _ => "the request was dead-lettered",
        };
        Self { message: message.to_owned(), queue: said(DIED_IN), reason }
    }

    pub(super) fn no_queue() -> Self {
        Self::new("no-queue", "the queue of its key could not be declared, or confirmed nothing, in time".to_owned())
    }

    pub(super) fn for_refused_queue(why: &str) -> Self {
        Self::new("no-queue", format!("the broker refuses to declare the queue of its key: {why}"))
    }

    pub(super) fn full_queue() -> Self {
        Self::new("maxlen", QUEUE_FULL.to_owned())
    }

    pub(super) fn for_loop() -> Self {
        Self::new("no-queue", format!("the request returned to the orphan queue {CONTROLLER_HOPS_MAX} times"))
    }

    pub(super) fn is_expired(&self) -> bool {
        self.reason == EXPIRED
    }

    pub(super) fn is_poison(&self) -> bool {
        self.reason == "delivery_limit"
    }
}

/// Publishes the error to a client that waits for a reply. A reply that its queue rejects or does not confirm is given up.
pub(super) async fn publish_error(
    channel: &Channel,
    names: &QueueNames,
    delivery: &Delivery,
    reason: &DeadLetterReason,
) -> lapin::Result<()> {
    let Some(reply_to) = delivery.properties.reply_to().clone() else { return Ok(()) };
    let (body, properties) = render(names, delivery, reason);
    let confirm = channel.basic_publish("".into(), reply_to, BasicPublishOptions::default(), &body, properties).await?;
    match timeout(AMQP_CALL_TIMEOUT, confirm).await {
        Ok(Ok(Confirmation::Ack(_) | Confirmation::NotRequested)) => {}
        Ok(Ok(Confirmation::Nack(_))) => tracing::warn!("gave up an error reply: its queue rejects it"),
        Ok(Err(error)) => return Err(error),
        Err(_) => tracing::warn!("gave up an error reply: not confirmed within {AMQP_CALL_TIMEOUT:?}"),
    }
    Ok(())
}

fn render(names: &QueueNames, delivery: &Delivery, reason: &DeadLetterReason) -> (Vec<u8>, BasicProperties) {
    let body = serde_json::json!({
        "type": format!("journeyman:dead_letter:{}", reason.reason),
        "message": reason.message,
        "context": { "reason": reason.reason, "queue": reason.queue, "key": names.original_key(delivery) },
        "cause": null,
    });
    let mut table = FieldTable::default();
    // One client exits at a status that it does not know.
    table.insert("x-status".into(), AMQPValue::ByteArray(b"core_error".to_vec().into()));
    table.insert("x-dead-letter-reason".into(), AMQPValue::LongString(reason.reason.as_str().into()));
    let mut properties = BasicProperties::default().with_headers(table).with_content_type("application/json".into());
    if let Some(id) = delivery.properties.correlation_id().clone() {
        properties = properties.with_correlation_id(id);
    }
    (body.to_string().into_bytes(), properties)
}
