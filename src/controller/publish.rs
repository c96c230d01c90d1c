//! Orphans that go on from here: published again, confirmed, and acknowledged then.

use std::collections::BTreeSet;
use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use futures_core::Stream as _;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::AMQPValue;
use lapin::{BasicProperties, Channel, Confirmation, Connection, Consumer, PublisherConfirm};
use tokio::sync::mpsc;
use tokio::time::sleep_until;

use super::names::Names;
use super::tally::Tally;
use crate::amqp::headers;
use crate::domain::group::Key;
use crate::domain::time::Instant;
use crate::limits::{AMQP_CALL_TIMEOUT, CONTROLLER_BATCH_MAX, CONTROLLER_HOPS_MAX, CONTROLLER_ORPHAN_WAIT};

/// The delivery mode of what is kept on disk.
pub(super) const PERSISTENT: u8 = 2;
/// How often a request came to the orphans.
const HOPS: &str = "x-journeyman-hops";
/// Which of those that were sent over this channel it is.
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

/// One that was published and is not confirmed yet.
struct Sent {
    number: u64,
    orphan: Orphan,
    confirm: Pin<Box<PublisherConfirm>>,
}

/// Publishes orphans as they were to the exchange of requests, until nobody brings more or the channel fails. Those that the
/// broker has are acknowledged; those that it does not take, or that came back, are handed back. One of which the broker says
/// nothing is waited for as long as the channel stands, for it may have it, and holds up no other.
pub(super) async fn forward(
    channel: Channel,
    names: Names,
    mut ready: mpsc::Receiver<Orphan>,
    back: mpsc::Sender<Orphan>,
    tally: &Tally,
) -> lapin::Result<()> {
    let (mut sent, mut returned, mut batch, mut numbers) = (Vec::new(), BTreeSet::new(), Vec::new(), 0..);
    let mut silent_at = tokio::time::Instant::now() + AMQP_CALL_TIMEOUT;
    loop {
        tokio::select! {
            biased;
            confirmed = confirmed(&mut sent), if !sent.is_empty() => {
                settle(confirmed, &mut returned, &back, tally).await?;
                silent_at = tokio::time::Instant::now() + AMQP_CALL_TIMEOUT;
            }
            () = sleep_until(silent_at), if !sent.is_empty() => {
                let (count, key) = (sent.len(), sent.first().map(|sent| sent.orphan.key.as_str()));
                tracing::warn!(count, key, "the broker does not confirm requests that were forwarded; they are waited for");
                silent_at = tokio::time::Instant::now() + CONTROLLER_ORPHAN_WAIT;
            }
            count = ready.recv_many(&mut batch, CONTROLLER_BATCH_MAX) => {
                if count == 0 {
                    return Ok(());
                }
                if sent.is_empty() {
                    silent_at = tokio::time::Instant::now() + AMQP_CALL_TIMEOUT;
                }
                for (number, orphan) in numbers.by_ref().zip(batch.drain(..)) {
                    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
                    let (exchange, key) = (names.requests().into(), orphan.delivery.routing_key.clone());
                    let properties = once_more(&orphan.delivery, number);
                    let publishing = channel.basic_publish(exchange, key, options, &orphan.delivery.data, properties);
                    sent.push(Sent { number, confirm: Box::pin(publishing.await?), orphan });
                }
            }
        }
    }
}

/// Those that the broker has spoken of, one at least. What a return was given to is among them where that which it is of is: it was
/// confirmed before.
///
/// Cancel safe.
async fn confirmed(sent: &mut Vec<Sent>) -> Vec<(Sent, lapin::Result<Confirmation>)> {
    std::future::poll_fn(|context| {
        let mut confirmed = Vec::new();
        loop {
            let before = confirmed.len();
            let mut at = 0;
            while let Some(one) = sent.get_mut(at) {
                match one.confirm.as_mut().poll(context) {
                    Poll::Ready(said) => confirmed.push((sent.swap_remove(at), said)),
                    Poll::Pending => at += 1,
                }
            }
            if confirmed.len() == before {
                break;
            }
        }
        if confirmed.is_empty() { Poll::Pending } else { Poll::Ready(confirmed) }
    })
    .await
}

async fn settle(
    confirmed: Vec<(Sent, lapin::Result<Confirmation>)>,
    returned: &mut BTreeSet<u64>,
    back: &mpsc::Sender<Orphan>,
    tally: &Tally,
) -> lapin::Result<()> {
    let mut spoken_of = Vec::with_capacity(confirmed.len());
    for (Sent { number, orphan, .. }, said) in confirmed {
        let (was_refused, with) = match said? {
            Confirmation::Ack(with) => (false, with),
            Confirmation::Nack(with) => (true, with),
            Confirmation::NotRequested => (false, None),
        };
        // lapin gives a return to whichever is confirmed next: which one it was, its own header says.
        let table = with.as_ref().and_then(|with| with.delivery.properties.headers().as_ref());
        returned.extend(table.and_then(|table| headers::number(table, NUMBER)));
        spoken_of.push((number, orphan, was_refused));
    }
    for (number, mut orphan, was_refused) in spoken_of {
        let was_returned = returned.remove(&number);
        orphan.was_refused = was_refused && !was_returned;
        if was_refused || was_returned {
            tracing::debug!(key = %orphan.key, "a request could not be forwarded; it stays an orphan");
            // As many as there can be have room. Where nobody listens any more, this is over as well.
            back.send(orphan).await.ok();
        } else {
            orphan.delivery.acker.ack(BasicAckOptions::default()).await?;
            tally.orphans.take();
            tally.forwarded.add();
        }
    }
    Ok(())
}

/// Its properties, but for what the broker would not take from us.
fn once_more(delivery: &Delivery, number: u64) -> BasicProperties {
    let mut table = delivery.properties.headers().clone().unwrap_or_default();
    table.insert(HOPS.into(), whole(hops(delivery) + 1));
    table.insert(NUMBER.into(), whole(number));
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
