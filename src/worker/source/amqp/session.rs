//! One consumer on one channel: its deliveries, its claims, and its end.
//!
//! A delivery can be acknowledged only on the channel that brought it, so a session never changes its channel. Another session replaces
//! one that has ended.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicQosOptions, BasicRejectOptions};
use lapin::protocol::constants::REPLY_SUCCESS;
use lapin::types::{AMQPValue, DeliveryTag, ShortString};
use lapin::{Channel, Connection, Consumer};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::task::yield_now;
use tokio::time::{Instant, interval, timeout};
use tokio_util::sync::CancellationToken;

use crate::source::{CallError, SourceEvent};
use journeyman_domain::ack_window::{Ack, AckWindow};
use journeyman_domain::id::Run;
use journeyman_domain::limits::{
    AMQP_CALL_TIMEOUT, AMQP_CHANNEL_CHECK_INTERVAL, AMQP_CLOSE_TIMEOUT, AMQP_UNPOLLED_REQUEUE_DELAY,
};
use journeyman_platform::amqp::{self, Broker};
use journeyman_platform::host::crash_points::crash_point;

use super::config::AmqpSourceConfig;
use super::publisher::Publisher;

/// A delivery that no poll has taken yet.
pub(super) struct PendingDelivery {
    pub(super) delivery: Delivery,
    pub(super) received_at: Instant,
}

/// How a delivery is settled.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AckKind {
    Acknowledge,
    Requeue,
    DeadLetter,
}

/// Why a session brings no more deliveries.
#[derive(Clone)]
pub(super) enum SessionEnd {
    /// This worker ended it; claims go on.
    Retired,
    /// The broker has canceled it, since the queue was deleted; claims go on.
    Canceled(String),
    /// The channel is closed or the broker has canceled the consumer, and its claims are lost.
    Lost(String),
}

pub(super) struct Session {
    pub(super) prefetch: u16,
    pub(super) queue: ShortString,
    broker: Broker,
    pub(super) connection: Arc<Connection>,
    consume_channel: Channel,
    pub(super) reply_publisher: Publisher,
    pub(super) copy_publisher: Publisher,
    state: Mutex<State>,
    /// Claims that exist, settled or not: their payloads may still run.
    held_claims: AtomicUsize,
    /// Shared by the tasks that settle requests which no handler sees.
    pub(super) settling: Arc<()>,
    /// A delivery arrived, or the session ended.
    pub(super) arrived: Notify,
    retired: Notify,
    /// A delivery is to be acknowledged.
    acks_due: Notify,
    /// [`Self::is_finished`] became true.
    finished: Notify,
    /// Cancelled once the channel is closed.
    lost: CancellationToken,
}

#[derive(Default)]
struct State {
    pending: VecDeque<PendingDelivery>,
    unsettled: BTreeMap<DeliveryTag, Run>,
    acks: AckWindow,
    end: Option<SessionEnd>,
    is_consumer_ended: bool,
    is_finished: bool,
    /// `None` during a poll.
    last_poll_at: Option<Instant>,
}

impl Session {
    /// Consumes on a new channel. The queue is never declared.
    pub(super) async fn open(
        config: &AmqpSourceConfig,
        connection: Arc<Connection>,
        prefetch: u16,
        consumer_timeout: Option<Duration>,
    ) -> Result<(Arc<Self>, Consumer), (CallError, Option<u16>)> {
        let AmqpSourceConfig { broker, queue, connection_name, .. } = config;
        let opening = async {
            let consume_channel = connection.create_channel().await?;
            consume_channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
            let reply_publisher = Publisher::open(Arc::clone(&connection)).await?;
            let copy_publisher = Publisher::open(Arc::clone(&connection)).await?;
            // The broker generates a tag where ours is too long.
            let tag = amqp::to_short_string_or_none(connection_name).unwrap_or_default();
            let milliseconds = |timeout: Duration| i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX);
            let argument = |timeout| ("x-consumer-timeout", AMQPValue::LongLongInt(milliseconds(timeout)));
            let arguments = amqp::header_table(consumer_timeout.map(argument));
            let options = BasicConsumeOptions::default();
            let consumer = amqp::consume_with(&consume_channel, queue.clone(), tag, options, arguments).await?;
            lapin::Result::Ok((consume_channel, reply_publisher, copy_publisher, consumer))
        };
        let (consume_channel, reply_publisher, copy_publisher, consumer) =
            broker.bounded_or_code(&format!("consume from {queue}"), opening).await?;
        let session = Self {
            prefetch,
            queue: queue.clone(),
            broker: broker.clone(),
            reply_publisher,
            copy_publisher,
            connection,
            consume_channel,
            state: Mutex::new(State { last_poll_at: Some(Instant::now()), ..State::default() }),
            held_claims: AtomicUsize::new(0),
            settling: Arc::default(),
            arrived: Notify::new(),
            retired: Notify::new(),
            acks_due: Notify::new(),
            finished: Notify::new(),
            lost: CancellationToken::new(),
        };
        Ok((Arc::new(session), consumer))
    }

    pub(super) fn on_poll_started(&self) {
        self.state.lock().last_poll_at = None;
    }

    pub(super) fn on_poll_ended(&self) {
        self.state.lock().last_poll_at = Some(Instant::now());
    }

    /// The deliveries before the first that starts alone, or that one.
    pub(super) fn take_pending(&self, max: usize, is_isolated: impl Fn(&Delivery) -> bool) -> Vec<PendingDelivery> {
        let mut state = self.state.lock();
        let most = if state.end.is_some() { 0 } else { state.pending.len().min(max) };
        let shared = state.pending.iter().take(most).take_while(|one| !is_isolated(&one.delivery)).count();
        let count = if shared == 0 { most.min(1) } else { shared };
        state.pending.drain(..count).collect()
    }

    /// Whether the broker has back what this session received and no handler runs.
    pub(super) fn has_returned_deliveries(&self) -> bool {
        let is_settled = self.state.lock().is_consumer_ended && Arc::strong_count(&self.settling) == 1;
        if is_settled {
            // Before a request starts that may kill this worker.
            self.send_acks();
        }
        self.is_lost() || is_settled
    }

    pub(super) fn end(&self) -> Option<SessionEnd> {
        self.state.lock().end.clone()
    }

    /// Whether the consumer has ended, not just been told to, and no claim is unsettled.
    pub(super) fn is_finished(&self) -> bool {
        self.state.lock().is_finished
    }

    /// True once the channel is closed, also where that was not reported yet, or its consumer was canceled by the broker.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.is_cancelled() || !self.connection.status().connected() || !self.consume_channel.status().connected()
    }

    /// Runs `work` until the channel is closed: lapin leaves some calls unanswered that are made while a connection ends.
    pub(super) async fn while_open<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        self.lost.run_until_cancelled(work).await
    }

    pub(super) fn lost_reason(&self) -> String {
        match self.end() {
            Some(SessionEnd::Lost(reason)) => reason,
            Some(SessionEnd::Retired | SessionEnd::Canceled(_)) | None => "its channel is closed".to_owned(),
        }
    }

    pub(super) fn held_claims(&self) -> usize {
        self.held_claims.load(Ordering::Acquire)
    }

    pub(super) fn release_claim(&self) {
        self.held_claims.fetch_sub(1, Ordering::AcqRel);
    }

    pub(super) fn add_claim(&self, tag: DeliveryTag, run: Run) {
        self.held_claims.fetch_add(1, Ordering::AcqRel);
        self.state.lock().unsettled.insert(tag, run);
    }

    /// True while the broker blocks publishing, for want of memory or disk.
    pub(super) fn is_blocked(&self) -> bool {
        self.connection.status().blocked()
    }

    /// Ends the consumer: pending deliveries are requeued, claims go on.
    pub(super) fn retire(&self) {
        self.state.lock().end.get_or_insert(SessionEnd::Retired);
        self.retired.notify_one();
        self.arrived.notify_one();
    }

    /// Settles a delivery at the broker, without waiting for the frame: where it is lost, the channel has ended, which requeues as well.
    /// Acknowledgements of one turn of the runtime are sent together. Returns whether the channel was open.
    ///
    /// Uses the channel, since a delivery's own `Acker` sends each frame by way of another task of lapin's.
    pub(super) fn settle(&self, tag: DeliveryTag, kind: AckKind) -> bool {
        let is_open = !self.is_lost();
        let mut state = self.state.lock();
        state.unsettled.remove(&tag);
        match kind {
            AckKind::Acknowledge => state.acks.on_finished(tag),
            AckKind::Requeue | AckKind::DeadLetter => {
                let options = BasicRejectOptions { requeue: kind == AckKind::Requeue };
                amqp::poll_once(self.consume_channel.basic_reject(tag, options));
                state.acks.on_rejected(tag);
            }
        }
        drop(state);
        self.acks_due.notify_one();
        is_open
    }

    fn send_acks(&self) {
        let acks = self.state.lock().acks.take();
        for ack in acks {
            let (tag, multiple) = match ack {
                Ack::One(tag) => (tag, false),
                Ack::UpTo(tag) => (tag, true),
            };
            amqp::poll_once(self.consume_channel.basic_ack(tag, BasicAckOptions { multiple }));
            crash_point("request-acknowledged");
        }
    }

    /// Queues deliveries for polls until the consumer has ended, passes pending ones to `requeue`, and waits until no claim is unsettled.
    pub(super) async fn run(
        self: Arc<Self>,
        consumer: Consumer,
        events: mpsc::Sender<SourceEvent>,
        requeue: impl Fn(PendingDelivery),
    ) {
        if let Err(why) = self.run_until_settled(consumer, &events, requeue).await {
            self.on_channel_lost(&why, &events).await;
        }
        self.state.lock().is_finished = true;
        self.finished.notify_one();
    }

    /// An error is the reason why the channel is closed.
    async fn run_until_settled(
        &self,
        mut consumer: Consumer,
        events: &mpsc::Sender<SourceEvent>,
        requeue: impl Fn(PendingDelivery),
    ) -> Result<(), String> {
        self.receive_deliveries(&mut consumer, events).await?;
        let pending = std::mem::take(&mut self.state.lock().pending);
        pending.into_iter().for_each(requeue);
        self.state.lock().is_consumer_ended = true;
        self.arrived.notify_one();
        while !self.state.lock().unsettled.is_empty() {
            // Without a consumer nothing reports the end of the channel.
            drop(timeout(AMQP_CHANNEL_CHECK_INTERVAL, self.acks_due.notified()).await);
            self.send_acks();
            if self.is_lost() {
                return Err("the channel was closed".to_owned());
            }
        }
        self.send_acks();
        Ok(())
    }

    /// Ends the consumer, then the channel, in order: a quorum queue has been seen to lose acknowledgements that were on their way
    /// when their connection closed.
    pub(super) async fn close(&self) {
        self.retire();
        let closing = async {
            self.finished.notified().await;
            self.consume_channel.close(REPLY_SUCCESS, "OK".into()).await
        };
        if !matches!(timeout(AMQP_CLOSE_TIMEOUT, closing).await, Ok(Ok(()))) {
            tracing::debug!(
                queue = self.queue.as_str(),
                "a channel was not closed cleanly; some requests may run twice"
            );
        }
    }

    async fn receive_deliveries(
        &self,
        consumer: &mut Consumer,
        events: &mpsc::Sender<SourceEvent>,
    ) -> Result<(), String> {
        let mut checks = interval(AMQP_CHANNEL_CHECK_INTERVAL);
        loop {
            tokio::select! {
                biased;
                received = consumer.next() => match received {
                    Some(delivery) => self.on_delivery(delivery.map_err(|error| amqp::error_text(&error))?),
                    None if self.is_lost() => return Err("the channel was closed".to_owned()),
                    None => return self.on_consumer_canceled(events).await,
                },
                () = self.acks_due.notified() => {
                    // Requests whose replies are confirmed in this turn of the runtime are acknowledged together.
                    if !self.state.lock().unsettled.is_empty() {
                        yield_now().await;
                    }
                    self.send_acks();
                }
                () = self.retired.notified() => return self.cancel_consumer(consumer).await,
                _ = checks.tick() => {
                    if self.is_lost() {
                        return Err("the channel was closed".to_owned());
                    }
                    if self.is_unpolled() {
                        self.retire();
                    }
                }
            }
        }
    }

    fn on_delivery(&self, delivery: Delivery) {
        crash_point("request-delivered");
        self.state.lock().pending.push_back(PendingDelivery { delivery, received_at: Instant::now() });
        self.arrived.notify_one();
    }

    /// Whether deliveries wait and no poll takes them. Requests that a worker prefetched while another source has its slots would wait
    /// otherwise (`sources_that_share_one_slot_take_turns`).
    fn is_unpolled(&self) -> bool {
        let state = self.state.lock();
        match (state.last_poll_at, state.pending.front()) {
            (Some(polled), Some(first)) => polled.max(first.received_at).elapsed() >= AMQP_UNPOLLED_REQUEUE_DELAY,
            (None, _) | (_, None) => false,
        }
    }

    /// Every claim is lost; the broker requeues pending deliveries itself.
    async fn on_channel_lost(&self, why: &str, events: &mpsc::Sender<SourceEvent>) {
        self.lost.cancel();
        let reason = format!("the deliveries of {} at {} were lost: {why}", self.queue, self.broker.display_url());
        let unsettled = {
            let mut state = self.state.lock();
            state.end = Some(SessionEnd::Lost(reason));
            state.pending.clear();
            std::mem::take(&mut state.unsettled)
        };
        self.arrived.notify_one();
        if !unsettled.is_empty() {
            drop(events.send(SourceEvent::Lost(unsettled.into_values().collect())).await);
        }
    }

    /// The broker ended the consumer. What a deleted queue had delivered is worked on; what another one had is in it again.
    async fn on_consumer_canceled(&self, events: &mpsc::Sender<SourceEvent>) -> Result<(), String> {
        let why = format!("the broker canceled the consumer of {}", self.queue);
        if !self.is_queue_deleted().await {
            self.lost.cancel();
            let closing = self.consume_channel.close(REPLY_SUCCESS, "OK".into());
            // A channel that cannot be closed in time has no consumer either.
            drop(timeout(AMQP_CALL_TIMEOUT, closing).await);
            return Err(format!("{why}: a consumer_timeout has passed, or the queue is unavailable"));
        }
        self.state.lock().end.get_or_insert_with(|| SessionEnd::Canceled(why.clone()));
        self.arrived.notify_one();
        drop(events.send(SourceEvent::Exhausted { what: format!("{why}: the queue was deleted") }).await);
        Ok(())
    }

    /// True if the queue was deleted, not just made unavailable.
    async fn is_queue_deleted(&self) -> bool {
        match timeout(AMQP_CALL_TIMEOUT, amqp::find_queue(&self.connection, self.queue.clone())).await {
            Ok(Err(error)) => {
                amqp::reply_code(&error) == Some(amqp::NOT_FOUND)
                    && !amqp::error_text(&error).contains("down or inaccessible")
            }
            Ok(Ok(_)) | Err(_) => false,
        }
    }

    /// Ends the consumer, and takes what it still brings.
    async fn cancel_consumer(&self, consumer: &mut Consumer) -> Result<(), String> {
        let canceling = self.consume_channel.basic_cancel(consumer.tag(), BasicCancelOptions::default());
        let ended = async {
            canceling.await?;
            while let Some(delivery) = consumer.next().await {
                self.on_delivery(delivery?);
            }
            lapin::Result::Ok(())
        };
        match timeout(AMQP_CALL_TIMEOUT, ended).await {
            Ok(ended) => ended.map_err(|error| amqp::error_text(&error)),
            Err(_) => {
                tracing::debug!(queue = self.queue.as_str(), "a consumer was not canceled in time");
                Ok(())
            }
        }
    }
}
