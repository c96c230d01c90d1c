//! Requests that go on from here: published again or answered; confirmed first, and acknowledged then.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use futures_core::Stream as _;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection, Consumer};
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::names::Names;
use super::session::Over;
use super::tally::Tally;
use crate::amqp::headers;
use crate::domain::group::Key;
use crate::domain::time::Instant;
use crate::limits::{
    CONTROLLER_ANSWER_AGAIN, CONTROLLER_ANSWER_TRIES, CONTROLLER_BATCH_MAX, CONTROLLER_HOPS_MAX, CONTROLLER_ORPHAN_WAIT,
};

/// The delivery mode of what is kept on disk.
pub(super) const PERSISTENT: u8 = 2;
/// How often a request came to the orphans.
const HOPS: &str = "x-journeyman-hops";
/// Which of a batch it is.
const NUMBER: &str = "x-journeyman-batch";

/// A request without a queue.
pub(super) struct Orphan {
    pub(super) key: Key,
    /// Since when it is in hand.
    pub(super) since: Instant,
    pub(super) delivery: Delivery,
}

/// How often it was an orphan before.
pub(super) fn hops(delivery: &Delivery) -> u64 {
    delivery.properties.headers().as_ref().and_then(|table| headers::number(table, HOPS)).unwrap_or_default()
}

/// Whether it goes round in circles.
pub(super) fn goes_round(delivery: &Delivery) -> bool {
    hops(delivery) >= CONTROLLER_HOPS_MAX
}

/// A channel on which the broker confirms.
pub(super) async fn confirming(connection: &Connection) -> lapin::Result<Channel> {
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok(channel)
}

/// The next delivery; `None` where there will be none.
pub(super) async fn next(consumer: &mut Consumer) -> Option<lapin::Result<Delivery>> {
    std::future::poll_fn(|context| Pin::new(&mut *consumer).poll_next(context)).await
}

/// The next delivery that is here already.
pub(super) fn at_hand(consumer: &mut Consumer) -> Option<lapin::Result<Delivery>> {
    match Pin::new(consumer).poll_next(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(delivery) => delivery,
        Poll::Pending => None,
    }
}

/// Publishes orphans as they were to the exchange of requests, until nobody brings more or the channel fails. Those that the
/// broker has are acknowledged; those that it does not take, or that came back, are handed back.
pub(super) async fn forward(
    channel: Channel,
    names: Names,
    mut ready: mpsc::Receiver<Orphan>,
    back: mpsc::Sender<Orphan>,
    tally: &Tally,
) -> lapin::Result<()> {
    let mut batch = Vec::new();
    while ready.recv_many(&mut batch, CONTROLLER_BATCH_MAX).await > 0 {
        let mut confirms = Vec::with_capacity(batch.len());
        for (number, Orphan { delivery, .. }) in batch.iter().enumerate() {
            let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
            let (exchange, key) = (names.requests().into(), delivery.routing_key.clone());
            let properties = once_more(delivery, number);
            confirms.push(channel.basic_publish(exchange, key, options, &delivery.data, properties).await?);
        }
        // lapin gives a return to whichever is confirmed next: which one it was, its own header says.
        let (mut returned, mut refused) = (BTreeSet::new(), BTreeSet::new());
        for (number, confirm) in confirms.into_iter().enumerate() {
            let back = match confirm.await? {
                Confirmation::Ack(back) => back,
                Confirmation::Nack(back) => {
                    refused.insert(number as u64);
                    back
                }
                Confirmation::NotRequested => None,
            };
            let table = back.as_ref().and_then(|back| back.delivery.properties.headers().as_ref());
            returned.extend(table.and_then(|table| headers::number(table, NUMBER)));
        }
        for (number, orphan) in batch.drain(..).enumerate() {
            let number = number as u64;
            if returned.contains(&number) || refused.contains(&number) {
                tracing::debug!(key = %orphan.key, "a request could not be forwarded; it stays an orphan");
                // As many as there can be have room. Where nobody listens any more, this is over as well.
                back.send(orphan).await.ok();
            } else {
                orphan.delivery.acker.ack(BasicAckOptions::default()).await?;
                tally.orphans.take();
                tally.forwarded.add();
            }
        }
    }
    Ok(())
}

/// Its properties, but for what the broker would not take from us.
fn once_more(delivery: &Delivery, number: usize) -> BasicProperties {
    let mut table = delivery.properties.headers().clone().unwrap_or_default();
    table.insert(HOPS.into(), whole(hops(delivery) + 1));
    table.insert(NUMBER.into(), whole(number as u64));
    let mut properties = delivery.properties.clone().with_headers(table);
    if properties.user_id().is_some() {
        // It has to be who publishes.
        properties = without_user(&properties);
    }
    properties
}

pub(super) fn whole(number: u64) -> AMQPValue {
    AMQPValue::LongLongInt(i64::try_from(number).unwrap_or(i64::MAX))
}

/// There is no way to take a property away.
pub(super) fn without_user(from: &BasicProperties) -> BasicProperties {
    let mut to = BasicProperties::default();
    macro_rules! copy {
        ($($get:ident $with:ident),*) => {$(
            if let Some(value) = from.$get() {
                to = to.$with(value.clone());
            }
        )*};
    }
    copy!(
        content_type with_content_type, content_encoding with_content_encoding, headers with_headers,
        delivery_mode with_delivery_mode, priority with_priority, correlation_id with_correlation_id,
        reply_to with_reply_to, expiration with_expiration, message_id with_message_id, timestamp with_timestamp,
        kind with_type, app_id with_app_id, cluster_id with_cluster_id
    );
    to
}

/// Why a request is answered by the controller.
pub(super) struct Obituary {
    /// In one word, such as `expired`.
    pub(super) reason: String,
    /// For people.
    pub(super) message: String,
    /// The queue that it died in.
    pub(super) queue: Option<String>,
}

impl Obituary {
    /// As the broker tells of a dead letter.
    pub(super) fn of(delivery: &Delivery) -> Self {
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
        Self { message: message.to_owned(), queue: said("x-first-death-queue"), reason }
    }

    /// A request whose queue could not be made.
    pub(super) fn of_no_queue() -> Self {
        let message = format!("the queue of its key could not be made, or not within {CONTROLLER_ORPHAN_WAIT:?}");
        Self { reason: "no-queue".to_owned(), message, queue: None }
    }

    /// A request that went round in circles.
    pub(super) fn of_circle() -> Self {
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

/// Answers a request in the place of a worker, and acknowledges it once the broker has the answer.
///
/// # Errors
///
/// As [`reply`].
pub(super) async fn answer(
    channel: &Channel,
    status: &str,
    delivery: Delivery,
    obituary: &Obituary,
    tally: &Tally,
) -> Result<(), Over> {
    reply(channel, status, &delivery, obituary, tally).await?;
    delivery.acker.ack(BasicAckOptions::default()).await?;
    Ok(())
}

/// Answers a request in the place of a worker; somebody else acknowledges it. An answer that its queue refuses again and again is
/// given up, as that of a worker is.
///
/// # Errors
///
/// Where the channel fails.
pub(super) async fn reply(
    channel: &Channel,
    status: &str,
    delivery: &Delivery,
    obituary: &Obituary,
    tally: &Tally,
) -> Result<(), Over> {
    if let Some(reply_to) = delivery.properties.reply_to().clone() {
        let (body, properties) = said(status, delivery, obituary);
        let mut tries = 1;
        loop {
            let options = BasicPublishOptions::default();
            let publishing = channel.basic_publish("".into(), reply_to.clone(), options, &body, properties.clone());
            if !matches!(publishing.await?.await?, Confirmation::Nack(_)) {
                break;
            }
            if tries == CONTROLLER_ANSWER_TRIES {
                tracing::warn!(tries, "an answer in a worker's place is given up: its queue refuses it");
                break;
            }
            tries += 1;
            sleep(CONTROLLER_ANSWER_AGAIN).await;
        }
    }
    tally.dead_letters.add();
    Ok(())
}

/// What its client is answered.
fn said(status: &str, delivery: &Delivery, obituary: &Obituary) -> (Vec<u8>, BasicProperties) {
    let body = serde_json::json!({
        "type": format!("journeyman:dead_letter:{}", obituary.reason),
        "message": obituary.message,
        "context": { "reason": obituary.reason, "queue": obituary.queue, "key": delivery.routing_key.as_str() },
        "cause": null,
    });
    let mut table = FieldTable::default();
    table.insert("x-status".into(), AMQPValue::ByteArray(status.as_bytes().to_vec().into()));
    table.insert("x-dead-letter-reason".into(), AMQPValue::LongString(obituary.reason.as_str().into()));
    let mut properties = BasicProperties::default().with_headers(table).with_content_type("application/json".into());
    if let Some(id) = delivery.properties.correlation_id().clone() {
        properties = properties.with_correlation_id(id);
    }
    (body.to_string().into_bytes(), properties)
}
