//! Orphans that go on from here: published again, confirmed, and acknowledged then.

use std::collections::BTreeMap;
use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use futures_core::Stream as _;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::AMQPValue;
use lapin::{BasicProperties, Channel, Confirmation, Connection, Consumer, PublisherConfirm};
use tokio::sync::mpsc;

use super::names::Names;
use super::tally::Tally;
use super::waiting::QueueIs;
use crate::amqp::headers;
use crate::domain::group::Key;
use crate::domain::group::forwarding::Forwarding;
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{CONTROLLER_BATCH_MAX, CONTROLLER_HOPS_MAX, CONTROLLER_LOOK_EVERY, CONTROLLER_ORPHAN_WAIT};

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
    /// What its queue was like when it was last tried.
    pub(super) queue: QueueIs,
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
/// nothing is waited for as long as the channel stands, for it may have it; others of its key are handed back meanwhile.
pub(super) async fn forward(
    channel: Channel,
    names: &Names,
    clock: Clock,
    mut ready: mpsc::Receiver<Orphan>,
    back: mpsc::Sender<Orphan>,
    tally: &Tally,
) -> lapin::Result<()> {
    let (mut sent, mut batch, mut forwarding) = (Vec::<Sent>::new(), Vec::new(), Forwarding::default());
    let (mut returns, mut undecided) = (Returns::default(), Vec::new());
    let (mut looked_at, mut said_at) = (None, None);
    loop {
        let silent_at = forwarding
            .silent_at()
            .map(|silent| looked_at.map_or(silent, |looked: Instant| silent.max(looked.plus(CONTROLLER_LOOK_EVERY))));
        tokio::select! {
            biased;
            confirmed = confirmed(&mut sent), if !sent.is_empty() => {
                let spoken = spoken_of(confirmed, &mut returns)?;
                spoken.iter().for_each(|one| forwarding.heard(&one.orphan.key, one.number));
                undecided.extend(spoken);
                let decided = returns.decide(&mut undecided, |number| sent.iter().any(|sent| sent.number == number));
                settle(decided, &back, tally).await?;
            }
            () = async { match silent_at {
                Some(at) => clock.sleep_until(at).await,
                None => std::future::pending().await,
            } } => {
                let now = clock.now();
                looked_at = Some(now);
                if said_at.is_none_or(|said| now.since(said) >= CONTROLLER_ORPHAN_WAIT) {
                    said_at = Some(now);
                    let (count, oldest) = (sent.len(), sent.iter().min_by_key(|sent| sent.number));
                    tracing::warn!(
                        count,
                        oldest = oldest.map(|oldest| oldest.orphan.key.as_str()),
                        "the broker does not confirm requests that were forwarded; they are waited for"
                    );
                }
                for orphan in forwarding.silenced(now) {
                    // As many as there can be have room. Where nobody listens any more, this is over as well.
                    back.send(Orphan { queue: QueueIs::Silent, ..orphan }).await.ok();
                }
            }
            count = ready.recv_many(&mut batch, CONTROLLER_BATCH_MAX) => {
                if count == 0 {
                    return Ok(());
                }
                batch.drain(..).for_each(|orphan: Orphan| forwarding.add(orphan.key.clone(), orphan));
            }
        }
        while let Some((number, orphan)) = forwarding.next(clock.now()) {
            let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
            let (exchange, key) = (names.requests().into(), orphan.delivery.routing_key.clone());
            let properties = once_more(&orphan.delivery, number);
            let publishing = channel.basic_publish(exchange, key, options, &orphan.delivery.data, properties);
            let confirm = Box::pin(publishing.await?);
            sent.push(Sent { number, confirm, orphan });
        }
    }
}

/// Those that the broker has spoken of, one at least, and all that it had spoken of before it spoke of the last of them.
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

/// One that the broker has spoken of.
struct Spoken {
    number: u64,
    orphan: Orphan,
    was_refused: bool,
}

fn spoken_of(confirmed: Vec<(Sent, lapin::Result<Confirmation>)>, returns: &mut Returns) -> lapin::Result<Vec<Spoken>> {
    let mut all = Vec::with_capacity(confirmed.len());
    for (Sent { number, orphan, .. }, said) in confirmed {
        let (was_refused, with) = match said? {
            Confirmation::Ack(with) => (false, with),
            Confirmation::Nack(with) => (true, with),
            Confirmation::NotRequested => (false, None),
        };
        if let Some(with) = with {
            let table = with.delivery.properties.headers().as_ref();
            let of = table.and_then(|table| headers::number(table, NUMBER));
            returns.carries(number, of.unwrap_or(number));
        }
        all.push(Spoken { number, orphan, was_refused });
    }
    Ok(all)
}

/// Which of those that were confirmed came back. lapin hands the returns that it has to whichever are confirmed next, the oldest
/// first: a return says by a header which one it is of, and may be handed to one that is confirmed earlier, or later.
#[derive(Debug, Default)]
struct Returns {
    /// Whose return each was handed that was handed one.
    handed: BTreeMap<u64, u64>,
}

impl Returns {
    fn carries(&mut self, number: u64, of: u64) {
        self.handed.insert(number, of);
    }

    /// Whether one that is confirmed came back; `None` while that is not known. `is_open` says of which the broker has not spoken.
    fn came_back(&self, number: u64, is_open: impl Fn(u64) -> bool) -> Option<bool> {
        if self.handed.values().any(|of| *of == number) {
            return Some(true);
        }
        // Whoever was handed another's return may have its own still waiting. When one is handed none, none waits, and that of
        // any that was confirmed before has been handed to somebody.
        let mut at = number;
        for _ in 0..=self.handed.len() {
            match self.handed.get(&at) {
                Some(of) if is_open(*of) => return None,
                Some(of) => at = *of,
                None => return Some(false),
            }
        }
        None
    }

    /// Takes out those of which it is known by now, with whether they came back.
    fn decide(&mut self, undecided: &mut Vec<Spoken>, is_open: impl Fn(u64) -> bool) -> Vec<(Spoken, bool)> {
        let (mut decided, mut waiting) = (Vec::with_capacity(undecided.len()), Vec::new());
        for one in undecided.drain(..) {
            match self.came_back(one.number, &is_open) {
                Some(came_back) => decided.push((one, came_back)),
                None => waiting.push(one),
            }
        }
        *undecided = waiting;
        if undecided.is_empty() {
            self.handed.retain(|_, of| is_open(*of));
        }
        decided
    }
}

async fn settle(decided: Vec<(Spoken, bool)>, back: &mpsc::Sender<Orphan>, tally: &Tally) -> lapin::Result<()> {
    for (Spoken { mut orphan, was_refused, .. }, came_back) in decided {
        orphan.queue = if was_refused && !came_back { QueueIs::Full } else { QueueIs::Missing };
        if was_refused || came_back {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Hands returns out as lapin does: the oldest to each that is confirmed, whichever that is.
    fn handed(returned: &[u64], confirmed: &[u64]) -> Returns {
        let mut returns = Returns::default();
        for (of, number) in returned.iter().zip(confirmed) {
            returns.carries(*number, *of);
        }
        returns
    }

    #[test]
    fn one_whose_return_was_handed_to_another_is_not_taken_for_forwarded_before_that_is_seen() {
        // 5 and 6 came back. 6 is confirmed first, with the return of 5.
        let mut returns = handed(&[5], &[6]);
        assert_eq!(returns.came_back(6, |number| number == 5), None);
        returns.carries(5, 6);
        let nobody = |_| false;
        assert_eq!((returns.came_back(5, nobody), returns.came_back(6, nobody)), (Some(true), Some(true)));
    }

    #[test]
    fn one_that_was_handed_a_return_and_went_through_is_forwarded_once_the_other_is_confirmed_with_none() {
        let returns = handed(&[5], &[6]);
        assert_eq!(returns.came_back(6, |number| number == 5), None);
        assert_eq!((returns.came_back(5, |_| false), returns.came_back(6, |_| false)), (Some(true), Some(false)));
    }

    #[test]
    fn whatever_comes_back_and_in_whatever_order_it_is_confirmed_each_is_decided_and_rightly() {
        fn orders(left: &[u64]) -> Vec<Vec<u64>> {
            if left.is_empty() {
                return vec![Vec::new()];
            }
            let first = left.iter().flat_map(|first| {
                let rest: Vec<u64> = left.iter().copied().filter(|number| number != first).collect();
                orders(&rest).into_iter().map(|rest| [vec![*first], rest].concat()).collect::<Vec<_>>()
            });
            first.collect()
        }
        let all: Vec<u64> = (0..5).collect();
        let mut undecided_once = 0;
        for chosen in 0_u64..1 << all.len() {
            let returned: Vec<u64> = all.iter().copied().filter(|number| chosen >> number & 1 == 1).collect();
            for order in orders(&all) {
                let mut returns = Returns::default();
                for (at, number) in order.iter().enumerate() {
                    if let Some(of) = returned.get(at) {
                        returns.carries(*number, *of);
                    }
                    for seen in &order[..=at] {
                        let said = returns.came_back(*seen, |number| !order[..=at].contains(&number));
                        undecided_once += u64::from(said.is_none());
                        assert!(
                            said.is_none_or(|said| said == returned.contains(seen)),
                            "{returned:?} {order:?} {seen}"
                        );
                    }
                }
                for number in &all {
                    assert_eq!(returns.came_back(*number, |_| false), Some(returned.contains(number)));
                }
            }
        }
        assert!(undecided_once > 0);
    }
}
