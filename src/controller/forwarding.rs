//! Forwards orphan requests to the requests exchange and acknowledges them once the broker confirms.

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

use super::counters::PoolCounters;
use super::queue_names::QueueNames;
use super::session_state::QueueCondition;
use crate::amqp::headers;
use crate::domain::group::Key;
use crate::domain::group::forwarding::ForwardQueue;
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{
    CONTROLLER_BATCH_MAX, CONTROLLER_HOPS_MAX, CONTROLLER_ORPHAN_TIMEOUT, CONTROLLER_RECONCILE_INTERVAL,
};

pub(super) const PERSISTENT: u8 = 2;
const HOPS: &str = "x-journeyman-hops";
const PUBLISH_NUMBER: &str = "x-journeyman-batch";

pub(super) struct OrphanRequest {
    pub(super) key: Key,
    pub(super) since: Instant,
    pub(super) queue: QueueCondition,
    pub(super) delivery: Delivery,
}

pub(super) fn hops(delivery: &Delivery) -> u64 {
    delivery.properties.headers().as_ref().and_then(|table| headers::number(table, HOPS)).unwrap_or_default()
}

pub(super) fn is_looping(delivery: &Delivery) -> bool {
    hops(delivery) >= CONTROLLER_HOPS_MAX
}

pub(super) async fn open_confirm_channel(connection: &Connection) -> lapin::Result<Channel> {
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok(channel)
}

pub(super) async fn next_delivery(consumer: &mut Consumer) -> Option<lapin::Result<Delivery>> {
    std::future::poll_fn(|context| Pin::new(&mut *consumer).poll_next(context)).await
}

pub(super) fn try_next_delivery(consumer: &mut Consumer) -> Poll<Option<lapin::Result<Delivery>>> {
    Pin::new(consumer).poll_next(&mut Context::from_waker(Waker::noop()))
}

struct UnconfirmedPublish {
    number: u64,
    orphan: OrphanRequest,
    confirm: Pin<Box<PublisherConfirm>>,
}

pub(super) async fn forward_orphans(
    channel: Channel,
    names: &QueueNames,
    clock: Clock,
    mut ready: mpsc::Receiver<OrphanRequest>,
    back: mpsc::Sender<OrphanRequest>,
    tally: &PoolCounters,
) -> lapin::Result<()> {
    let (mut sent, mut batch, mut forwarding) = (Vec::<UnconfirmedPublish>::new(), Vec::new(), ForwardQueue::default());
    let (mut returns, mut undecided) = (ReturnTracker::default(), Vec::new());
    let (mut looked_at, mut said_at) = (None, None);
    loop {
        let silent_at = forwarding.confirm_deadline().map(|silent| {
            looked_at.map_or(silent, |looked: Instant| silent.max(looked.plus(CONTROLLER_RECONCILE_INTERVAL)))
        });
        tokio::select! {
            biased;
            confirmed = next_confirmations(&mut sent), if !sent.is_empty() => {
                let spoken = collect_returns(confirmed, &mut returns)?;
                spoken.iter().for_each(|one| forwarding.on_confirmed(&one.orphan.key, one.number));
                undecided.extend(spoken);
                let decided = returns.decide(&mut undecided, |number| sent.iter().any(|sent| sent.number == number));
                complete(decided, &back, tally).await?;
            }
            () = async { match silent_at {
                Some(at) => clock.sleep_until(at).await,
                None => std::future::pending().await,
            } } => {
                let now = clock.now();
                looked_at = Some(now);
                if said_at.is_none_or(|said| now.since(said) >= CONTROLLER_ORPHAN_TIMEOUT) {
                    said_at = Some(now);
                    let (count, oldest) = (sent.len(), sent.iter().min_by_key(|sent| sent.number));
                    tracing::warn!(
                        count,
                        oldest = oldest.map(|oldest| oldest.orphan.key.as_str()),
                        "the broker does not confirm forwarded requests"
                    );
                }
                for orphan in forwarding.drain_timed_out(now) {
                    // The channel has room for the prefetch; a closed channel ends the session.
                    back.send(OrphanRequest { queue: QueueCondition::Unconfirmed, ..orphan }).await.ok();
                }
            }
            count = ready.recv_many(&mut batch, CONTROLLER_BATCH_MAX) => {
                if count == 0 {
                    return Ok(());
                }
                batch.drain(..).for_each(|orphan: OrphanRequest| forwarding.push(orphan.key.clone(), orphan));
            }
        }
        while let Some((number, orphan)) = forwarding.next(clock.now()) {
            let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
            let (exchange, key) = (names.requests_exchange().into(), orphan.delivery.routing_key.clone());
            let properties = forward_properties(&orphan.delivery, number);
            let publishing = channel.basic_publish(exchange, key, options, &orphan.delivery.data, properties);
            let confirm = Box::pin(publishing.await?);
            sent.push(UnconfirmedPublish { number, confirm, orphan });
        }
    }
}

async fn next_confirmations(
    sent: &mut Vec<UnconfirmedPublish>,
) -> Vec<(UnconfirmedPublish, lapin::Result<Confirmation>)> {
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

struct ConfirmedPublish {
    number: u64,
    orphan: OrphanRequest,
    was_nacked: bool,
}

fn collect_returns(
    confirmed: Vec<(UnconfirmedPublish, lapin::Result<Confirmation>)>,
    returns: &mut ReturnTracker,
) -> lapin::Result<Vec<ConfirmedPublish>> {
    let mut all = Vec::with_capacity(confirmed.len());
    for (UnconfirmedPublish { number, orphan, .. }, said) in confirmed {
        let (was_refused, with) = match said? {
            Confirmation::Ack(with) => (false, with),
            Confirmation::Nack(with) => (true, with),
            Confirmation::NotRequested => (false, None),
        };
        if let Some(with) = with {
            let table = with.delivery.properties.headers().as_ref();
            let of = table.and_then(|table| headers::number(table, PUBLISH_NUMBER));
            returns.record(number, of.unwrap_or(number));
        }
        all.push(ConfirmedPublish { number, orphan, was_nacked: was_refused });
    }
    Ok(all)
}

#[derive(Debug, Default)]
struct ReturnTracker {
    return_of: BTreeMap<u64, u64>,
}

impl ReturnTracker {
    fn record(&mut self, number: u64, of: u64) {
        self.return_of.insert(number, of);
    }

    fn was_returned(&self, number: u64, is_open: impl Fn(u64) -> bool) -> Option<bool> {
        if self.return_of.values().any(|of| *of == number) {
            return Some(true);
        }
        let mut at = number;
        for _ in 0..=self.return_of.len() {
            match self.return_of.get(&at) {
                Some(of) if is_open(*of) => return None,
                Some(of) => at = *of,
                None => return Some(false),
            }
        }
        None
    }

    fn decide(
        &mut self,
        undecided: &mut Vec<ConfirmedPublish>,
        is_open: impl Fn(u64) -> bool,
    ) -> Vec<(ConfirmedPublish, bool)> {
        let (mut decided, mut waiting) = (Vec::with_capacity(undecided.len()), Vec::new());
        for one in undecided.drain(..) {
            match self.was_returned(one.number, &is_open) {
                Some(came_back) => decided.push((one, came_back)),
                None => waiting.push(one),
            }
        }
        *undecided = waiting;
        if undecided.is_empty() {
            self.return_of.retain(|_, of| is_open(*of));
        }
        decided
    }
}

async fn complete(
    decided: Vec<(ConfirmedPublish, bool)>,
    back: &mpsc::Sender<OrphanRequest>,
    tally: &PoolCounters,
) -> lapin::Result<()> {
    for (ConfirmedPublish { mut orphan, was_nacked: was_refused, .. }, came_back) in decided {
        orphan.queue = if was_refused && !came_back { QueueCondition::Full } else { QueueCondition::Missing };
        if was_refused || came_back {
            tracing::debug!(key = %orphan.key, "cannot forward a request, keeping it as an orphan");
            // The channel has room for the prefetch; a closed channel ends the session.
            back.send(orphan).await.ok();
        } else {
            orphan.delivery.acker.ack(BasicAckOptions::default()).await?;
            tally.orphans.decrement();
            tally.orphans_forwarded.increment();
        }
    }
    Ok(())
}

fn forward_properties(delivery: &Delivery, number: u64) -> BasicProperties {
    let mut table = delivery.properties.headers().clone().unwrap_or_default();
    table.insert(HOPS.into(), integer(hops(delivery) + 1));
    table.insert(PUBLISH_NUMBER.into(), integer(number));
    let mut properties = delivery.properties.clone().with_headers(table);
    if properties.user_id().is_some() {
        // The broker requires user-id to match the publisher.
        properties = without_user_id(&properties);
    }
    properties
}

pub(super) fn integer(number: u64) -> AMQPValue {
    AMQPValue::LongLongInt(i64::try_from(number).unwrap_or(i64::MAX))
}

pub(super) fn without_user_id(from: &BasicProperties) -> BasicProperties {
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

    fn handed(returned: &[u64], confirmed: &[u64]) -> ReturnTracker {
        let mut returns = ReturnTracker::default();
        for (of, number) in returned.iter().zip(confirmed) {
            returns.record(*number, *of);
        }
        returns
    }

    #[test]
    fn one_whose_return_was_handed_to_another_is_not_taken_for_forwarded_before_that_is_seen() {
        let mut returns = handed(&[5], &[6]);
        assert_eq!(returns.was_returned(6, |number| number == 5), None);
        returns.record(5, 6);
        let nobody = |_| false;
        assert_eq!((returns.was_returned(5, nobody), returns.was_returned(6, nobody)), (Some(true), Some(true)));
    }

    #[test]
    fn one_that_was_handed_a_return_and_went_through_is_forwarded_once_the_other_is_confirmed_with_none() {
        let returns = handed(&[5], &[6]);
        assert_eq!(returns.was_returned(6, |number| number == 5), None);
        assert_eq!((returns.was_returned(5, |_| false), returns.was_returned(6, |_| false)), (Some(true), Some(false)));
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
                let mut returns = ReturnTracker::default();
                for (at, number) in order.iter().enumerate() {
                    if let Some(of) = returned.get(at) {
                        returns.record(*number, *of);
                    }
                    for seen in &order[..=at] {
                        let said = returns.was_returned(*seen, |number| !order[..=at].contains(&number));
                        undecided_once += u64::from(said.is_none());
                        assert!(
                            said.is_none_or(|said| said == returned.contains(seen)),
                            "{returned:?} {order:?} {seen}"
                        );
                    }
                }
                for number in &all {
                    assert_eq!(returns.was_returned(*number, |_| false), Some(returned.contains(number)));
                }
            }
        }
        assert!(undecided_once > 0);
    }
}
