//! Orphans that go on from here: published again, confirmed, and acknowledged then.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use futures_core::Stream as _;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::AMQPValue;
use lapin::{BasicProperties, Channel, Confirmation, Connection, Consumer};
use tokio::sync::mpsc;
use tokio::time::timeout_at;

use super::names::Names;
use super::tally::Tally;
use crate::amqp::headers;
use crate::domain::group::Key;
use crate::domain::time::Instant;
use crate::limits::{AMQP_CALL_TIMEOUT, CONTROLLER_BATCH_MAX, CONTROLLER_HOPS_MAX};

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
    /// Its queue has refused it.
    pub(super) was_refused: bool,
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

/// The next delivery, where it is here already. That there will be none is told only once.
pub(super) fn at_hand(consumer: &mut Consumer) -> Poll<Option<lapin::Result<Delivery>>> {
    Pin::new(consumer).poll_next(&mut Context::from_waker(Waker::noop()))
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
        let (mut returned, mut refused, mut unknown) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        let until = tokio::time::Instant::now() + AMQP_CALL_TIMEOUT;
        for (number, confirm) in confirms.into_iter().enumerate() {
            let back = match timeout_at(until, confirm).await {
                // A queue that says nothing holds up no other one. Whether it has the request is not known, so it may have it twice.
                Err(_) => {
                    unknown.insert(number as u64);
                    None
                }
                Ok(Err(error)) => return Err(error),
                Ok(Ok(Confirmation::Ack(back))) => back,
                Ok(Ok(Confirmation::Nack(back))) => {
                    refused.insert(number as u64);
                    back
                }
                Ok(Ok(Confirmation::NotRequested)) => None,
            };
            let table = back.as_ref().and_then(|back| back.delivery.properties.headers().as_ref());
            returned.extend(table.and_then(|table| headers::number(table, NUMBER)));
        }
        for (number, mut orphan) in batch.drain(..).enumerate() {
            let number = number as u64;
            orphan.was_refused = refused.contains(&number) && !returned.contains(&number);
            if returned.contains(&number) || orphan.was_refused || unknown.contains(&number) {
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
