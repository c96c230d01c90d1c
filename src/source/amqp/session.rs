//! One consumer on one channel: its deliveries, its claims, and its end.
//!
//! A delivery can be acknowledged only on the channel that brought it, so a session never changes its channel. A session is followed by
//! another one with the next epoch.

use std::collections::{BTreeSet, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_core::Stream as _;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicQosOptions, BasicRejectOptions, QueueDeclareOptions,
};
use lapin::protocol::constants::REPLY_SUCCESS;
use lapin::types::{DeliveryTag, FieldTable, ShortString};
use lapin::{Channel, Connection, Consumer};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::amqp::{self, Broker, CloseOnDrop};
use crate::domain::id::Run;
use crate::domain::refusal::Refusal;
use crate::host::crash_points::crash_point;
use crate::limits::{AMQP_CALL_TIMEOUT, AMQP_CHANNEL_CHECK_INTERVAL, AMQP_CLOSE_TIMEOUT, AMQP_UNPOLLED_REQUEUE_DELAY};
use crate::source::{CallError, SourceEvent};

use super::publisher::{self, Publisher};
use super::reply_clients::ReplyClients;
use super::{EventQueue, connection};

/// A delivery that no poll has taken yet.
pub(super) struct PendingDelivery {
    pub(super) delivery: Delivery,
    pub(super) received_at: Instant,
}

/// How a delivery is settled.
#[derive(Clone, Copy)]
pub(super) enum AckKind {
    Acknowledge,
    Requeue,
    DeadLetter,
}

pub(super) struct Session {
    pub(super) epoch: u64,
    pub(super) prefetch: u16,
    pub(super) queue: ShortString,
    broker: Broker,
    connection: Arc<Connection>,
    consume_channel: Channel,
    pub(super) publisher: Arc<Publisher>,
    pub(super) reply_clients: ReplyClients,
    state: Mutex<State>,
    /// Claims that exist, settled or not: their payloads may still run.
    held_claims: AtomicUsize,
    /// A delivery arrived, or the session ended.
    pub(super) arrived: Notify,
    /// A poll ended and left deliveries.
    poll_ended: Notify,
    retired: Notify,
    /// The consumer has ended, and no claim is unsettled.
    ended: Notify,
}

struct State {
    pending: VecDeque<PendingDelivery>,
    /// Why no more deliveries come.
    end_reason: Option<String>,
    /// Why nothing can be acknowledged any more.
    lost_reason: Option<String>,
    unsettled: BTreeSet<Run>,
    is_stopped: bool,
    /// Replaced by another session.
    is_retired: bool,
    poll_activity: PollActivity,
}

impl State {
    fn unpolled_deadline(&self) -> Option<Instant> {
        match self.poll_activity {
            PollActivity::IdleSince(since) => {
                self.pending.front().map(|first| since.max(first.received_at) + AMQP_UNPOLLED_REQUEUE_DELAY)
            }
            PollActivity::Polling => None,
        }
    }
}

#[derive(Clone, Copy)]
enum PollActivity {
    Polling,
    IdleSince(Instant),
}

impl Session {
    /// Consumes on a new channel. The queue is never declared.
    pub(super) async fn open(
        broker: &Broker,
        connection: Arc<Connection>,
        queue: &ShortString,
        tag: &str,
        prefetch: u16,
        epoch: u64,
    ) -> Result<(Arc<Self>, Consumer), CallError> {
        let refused = |operation: &str, error: lapin::Error| queue_error(broker, queue.as_str(), operation, &error);
        let opening = async {
            let consume_channel =
                connection.create_channel().await.map_err(|error| refused("open a channel", error))?;
            consume_channel
                .basic_qos(prefetch, BasicQosOptions::default())
                .await
                .map_err(|error| refused("set the prefetch", error))?;
            let reply_channel =
                publisher::open_confirm_channel(&connection).await.map_err(|error| refused("open a channel", error))?;
            // Dropped without closing, the consumer would stay at the broker and take requests that no poll sees.
            let guard = CloseOnDrop::new(consume_channel.clone());
            // The broker generates a tag where ours is too long.
            let tag = amqp::to_short_string_or_none(tag).unwrap_or_default();
            let consumer = consume_channel
                .basic_consume(queue.clone(), tag, BasicConsumeOptions::default(), FieldTable::default())
                .await
                .map_err(|error| refused("consume", error))?;
            guard.disarm();
            Ok::<_, CallError>((consume_channel, reply_channel, consumer))
        };
        let (consume_channel, reply_channel, consumer) = match timeout(AMQP_CALL_TIMEOUT, opening).await {
            Ok(opened) => opened?,
            Err(_) => {
                return Err(amqp::retry_error(format!("consume from {queue}: timed out after {AMQP_CALL_TIMEOUT:?}")));
            }
        };
        let session = Self {
            epoch,
            prefetch,
            queue: queue.clone(),
            broker: broker.clone(),
            publisher: Arc::new(Publisher::new(Arc::clone(&connection), reply_channel)),
            reply_clients: ReplyClients::new(Arc::clone(&connection)),
            connection,
            consume_channel,
            state: Mutex::new(State {
                pending: VecDeque::new(),
                end_reason: None,
                lost_reason: None,
                unsettled: BTreeSet::new(),
                is_stopped: false,
                is_retired: false,
                poll_activity: PollActivity::IdleSince(Instant::now()),
            }),
            held_claims: AtomicUsize::new(0),
            arrived: Notify::new(),
            poll_ended: Notify::new(),
            retired: Notify::new(),
            ended: Notify::new(),
        };
        Ok((Arc::new(session), consumer))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(super) fn on_poll_started(&self) {
        self.state().poll_activity = PollActivity::Polling;
    }

    pub(super) fn on_poll_ended(&self) {
        let mut state = self.state();
        state.poll_activity = PollActivity::IdleSince(Instant::now());
        if !state.pending.is_empty() {
            self.poll_ended.notify_one();
        }
    }

    pub(super) fn drain_pending(&self, max: usize) -> Vec<PendingDelivery> {
        let mut state = self.state();
        let count = state.pending.len().min(max);
        state.pending.drain(..count).collect()
    }

    /// Why no more deliveries come, once all are taken.
    pub(super) fn end_reason(&self) -> Option<String> {
        let state = self.state();
        if state.pending.is_empty() || state.is_stopped { state.end_reason.clone() } else { None }
    }

    /// Whether another session replaces it, and it is neither lost nor stopped.
    pub(super) fn is_retired(&self) -> bool {
        let state = self.state();
        state.is_retired && !state.is_stopped && state.lost_reason.is_none()
    }

    pub(super) fn lost_reason(&self) -> Option<String> {
        self.state().lost_reason.clone()
    }

    /// Whether it is lost, including a loss that was not reported yet.
    pub(super) fn is_lost(&self) -> bool {
        self.lost_reason().is_some()
            || !self.connection.status().connected()
            || !self.consume_channel.status().connected()
    }

    pub(super) fn held_claims(&self) -> usize {
        self.held_claims.load(Ordering::Acquire)
    }

    pub(super) fn release_claim(&self) {
        self.held_claims.fetch_sub(1, Ordering::AcqRel);
    }

    pub(super) fn add_claim(&self, run: Run) {
        self.held_claims.fetch_add(1, Ordering::AcqRel);
        self.state().unsettled.insert(run);
    }

    pub(super) fn mark_settled(&self, run: &Run) {
        self.state().unsettled.remove(run);
    }

    /// Whether the broker blocks publishing.
    pub(super) fn is_blocked(&self) -> bool {
        amqp::is_blocked(&self.connection)
    }

    /// Ends the consumer: pending deliveries are requeued, claims go on.
    pub(super) fn retire(&self, why: &str) {
        let mut state = self.state();
        state.end_reason.get_or_insert_with(|| why.to_owned());
        state.is_retired = true;
        drop(state);
        self.retired.notify_one();
    }

    /// Retires the session because the worker pauses or drains.
    pub(super) fn stop_consuming(&self) {
        self.state().is_stopped = true;
        self.retire("the worker takes no requests at present");
        self.arrived.notify_one();
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.state().is_stopped
    }

    /// Settles a delivery at the broker. Returns whether that was sent: on a closed channel nothing is.
    ///
    /// Uses the channel, since a delivery's own `Acker` sends each frame by way of another task of lapin's.
    pub(super) async fn acknowledge(&self, tag: DeliveryTag, kind: AckKind) -> lapin::Result<bool> {
        if !self.consume_channel.status().connected() {
            return Ok(false);
        }
        let call = async {
            match kind {
                AckKind::Acknowledge => self.consume_channel.basic_ack(tag, BasicAckOptions::default()).await,
                AckKind::Requeue => self.consume_channel.basic_reject(tag, BasicRejectOptions { requeue: true }).await,
                AckKind::DeadLetter => {
                    self.consume_channel.basic_reject(tag, BasicRejectOptions { requeue: false }).await
                }
            }
        };
        connection::while_connected(&self.connection, call).await.map(|()| true)
    }

    /// Requeues a delivery without waiting for the broker: where the frame is lost, the channel has ended, and that requeues as well.
    /// Returns whether the channel was open.
    pub(super) fn requeue(&self, tag: DeliveryTag) -> bool {
        let open = self.consume_channel.status().connected();
        if open {
            amqp::poll_once(self.consume_channel.basic_reject(tag, BasicRejectOptions { requeue: true }));
        }
        open
    }

    /// Queues deliveries for polls until the consumer has ended and no claim is unsettled. Pending deliveries in the end go to `requeue`.
    pub(super) async fn run(
        self: Arc<Self>,
        consumer: Consumer,
        events: Arc<EventQueue>,
        requeue: impl Fn(PendingDelivery),
    ) {
        self.receive_deliveries(consumer, &events, requeue).await;
        self.ended.notify_one();
    }

    /// Ends the consumer, then the channel, in order: a quorum queue has been seen to lose acknowledgements that were on their way
    /// when their connection closed.
    pub(super) async fn close(&self) {
        self.state().is_stopped = true;
        self.retire("the worker exits");
        let closing = async {
            self.ended.notified().await;
            self.consume_channel.close(REPLY_SUCCESS, "OK".into()).await
        };
        if !matches!(timeout(AMQP_CLOSE_TIMEOUT, closing).await, Ok(Ok(()))) {
            tracing::debug!(queue = self.queue.as_str(), "a channel was not closed cleanly");
        }
    }

    async fn receive_deliveries(&self, mut consumer: Consumer, events: &EventQueue, requeue: impl Fn(PendingDelivery)) {
        loop {
            let unpolled = self.unpolled_deadline();
            let received = tokio::select! {
                biased;
                received = next_delivery(&mut consumer) => received,
                () = self.retired.notified() => break self.cancel_consumer(consumer, events, requeue).await,
                // Recalculates the deadline of pending deliveries.
                () = self.poll_ended.notified() => continue,
                () = async { match unpolled {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                } } => {
                    // A poll may have taken them meanwhile.
                    if self.unpolled_deadline().is_some_and(|at| at <= Instant::now()) {
                        self.retire("no poll takes requests at present; they were requeued");
                    }
                    continue;
                }
            };
            match received {
                Some(Ok(delivery)) => {
                    crash_point("request-delivered");
                    self.state().pending.push_back(PendingDelivery { delivery, received_at: Instant::now() });
                    self.arrived.notify_one();
                }
                Some(Err(error)) => return self.on_channel_lost(&amqp::error_text(&error), events),
                None if self.consume_channel.status().connected() => {
                    return self.on_consumer_canceled(events, requeue).await;
                }
                None => return self.on_channel_lost("the channel was closed", events),
            }
        }
    }

    /// When pending deliveries are requeued because no poll takes them. Requests that a worker prefetched while another source has its
    /// slots would wait otherwise (`sources_that_share_one_slot_take_turns`).
    fn unpolled_deadline(&self) -> Option<Instant> {
        self.state().unpolled_deadline()
    }

    /// Every claim is lost; the broker requeues pending deliveries itself.
    fn on_channel_lost(&self, why: &str, events: &EventQueue) {
        let reason = format!("the connection to {} was lost: {why}", self.broker.display_url());
        let unsettled = {
            let mut state = self.state();
            state.end_reason = Some(reason.clone());
            state.lost_reason = Some(reason);
            state.pending.clear();
            std::mem::take(&mut state.unsettled)
        };
        self.arrived.notify_one();
        if !unsettled.is_empty() {
            events.push(SourceEvent::Lost(unsettled.into_iter().collect()));
        }
    }

    /// The broker ended the consumer: the queue was deleted, or is unavailable.
    async fn on_consumer_canceled(&self, events: &EventQueue, requeue: impl Fn(PendingDelivery)) {
        let why = format!("the broker canceled the consumer of {}", self.queue);
        self.state().end_reason = Some(why.clone());
        self.arrived.notify_one();
        if self.is_queue_deleted().await {
            events.push(SourceEvent::Exhausted { what: format!("{why}: the queue was deleted") });
        }
        self.watch_channel(events, requeue).await;
    }

    /// Whether the queue was deleted, not just made unavailable.
    async fn is_queue_deleted(&self) -> bool {
        let declaring = async {
            let channel = self.connection.create_channel().await?;
            let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
            channel.queue_declare(self.queue.clone(), options, FieldTable::default()).await
        };
        match timeout(AMQP_CALL_TIMEOUT, declaring).await {
            Ok(Err(error)) => {
                amqp::reply_code(&error) == Some(amqp::NOT_FOUND)
                    && !amqp::error_text(&error).contains("down or inaccessible")
            }
            Ok(Ok(_)) | Err(_) => false,
        }
    }

    /// Ends the consumer, and requeues what it still brings.
    async fn cancel_consumer(&self, mut consumer: Consumer, events: &EventQueue, requeue: impl Fn(PendingDelivery)) {
        let canceling = self.consume_channel.basic_cancel(consumer.tag(), BasicCancelOptions::default());
        let ended = async {
            canceling.await?;
            while let Some(received) = next_delivery(&mut consumer).await {
                self.state().pending.push_back(PendingDelivery { delivery: received?, received_at: Instant::now() });
            }
            Ok::<_, lapin::Error>(())
        };
        match timeout(AMQP_CALL_TIMEOUT, ended).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return self.on_channel_lost(&amqp::error_text(&error), events),
            Err(_) => tracing::debug!(queue = self.queue.as_str(), "a consumer was not canceled in time"),
        }
        let pending = std::mem::take(&mut self.state().pending);
        pending.into_iter().for_each(&requeue);
        self.arrived.notify_one();
        self.watch_channel(events, requeue).await;
    }

    /// Watches the channel while claims of it are held or deliveries are pending: without a consumer nothing reports its end.
    async fn watch_channel(&self, events: &EventQueue, requeue: impl Fn(PendingDelivery)) {
        loop {
            self.drain_unclaimed().into_iter().for_each(&requeue);
            {
                let state = self.state();
                if state.unsettled.is_empty() && state.pending.is_empty() {
                    return;
                }
            }
            if !self.consume_channel.status().connected() {
                return self.on_channel_lost("the channel was closed", events);
            }
            sleep(AMQP_CHANNEL_CHECK_INTERVAL).await;
        }
    }

    /// Pending deliveries of a stopped session, and those that no poll took in time.
    fn drain_unclaimed(&self) -> VecDeque<PendingDelivery> {
        let mut state = self.state();
        let is_late = state.unpolled_deadline().is_some_and(|at| at <= Instant::now());
        if state.is_stopped || is_late { std::mem::take(&mut state.pending) } else { VecDeque::new() }
    }
}

async fn next_delivery(consumer: &mut Consumer) -> Option<lapin::Result<Delivery>> {
    std::future::poll_fn(|context| Pin::new(&mut *consumer).poll_next(context)).await
}

/// A missing queue may be declared later.
fn queue_error(broker: &Broker, queue: &str, operation: &str, error: &lapin::Error) -> CallError {
    if amqp::reply_code(error) == Some(amqp::NOT_FOUND) {
        let reason = format!(
            "the queue {queue} does not exist at {}; waiting for its controller to declare it",
            broker.display_url()
        );
        return CallError { refusal: Refusal::Retry { retry_after: None }, message: reason };
    }
    broker.call_error(operation, error)
}
