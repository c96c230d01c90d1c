//! One consumer on one channel: what it was handed, what came of it, and how it ended. What it publishes is in `outlet.rs`.
//!
//! A delivery can be acknowledged on the channel that brought it and on no other, so everything here belongs to one channel
//! for good. What comes after it is another session, with another number (the epoch).

use std::collections::{BTreeSet, VecDeque};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use futures_core::Stream as _;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicQosOptions, BasicRejectOptions, QueueDeclareOptions,
};
use lapin::protocol::constants::REPLY_SUCCESS;
use lapin::types::{DeliveryTag, FieldTable, ShortString};
use lapin::{Channel, Connection, Consumer};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::amqp::{self, Broker, CloseOnDrop};
use crate::domain::id::Run;
use crate::domain::refusal::Refusal;
use crate::host::crash_points::crash_point;
use crate::limits::{AMQP_CALL_TIMEOUT, AMQP_CHANNEL_CHECK_INTERVAL, AMQP_CLOSE_TIMEOUT, AMQP_UNPOLLED_REQUEUE_DELAY};
use crate::source::{CallError, SourceEvent};

use super::publisher::{self, Publisher};
use super::reply_clients::{PresenceCheck, ReplyClients};
use super::{EventQueue, connection, lock};

/// A delivery that nobody has asked for yet.
pub(super) struct PendingDelivery {
    pub(super) delivery: Delivery,
    pub(super) received_at: Instant,
}

/// The last word to the broker about a delivery.
#[derive(Clone, Copy)]
pub(super) enum AckKind {
    Acknowledge,
    Requeue,
    DeadLetter,
}

/// One consumer on one channel.
pub(super) struct Session {
    pub(super) epoch: u64,
    /// How many requests the broker may hand it at once.
    pub(super) prefetch: u16,
    pub(super) queue: ShortString,
    broker: Broker,
    connection: Arc<Connection>,
    consume_channel: Channel,
    pub(super) publisher: Arc<Publisher>,
    pub(super) reply_clients: Arc<ReplyClients>,
    state: Mutex<State>,
    /// How many claims of it there are, settled or not, that somebody still holds.
    held_claims: AtomicUsize,
    /// Something came, or nothing more will.
    pub(super) arrived: Notify,
    /// A poll has left something.
    poll_ended: Notify,
    /// Nobody wants more from it.
    retired: Notify,
    /// Nothing comes any more, and nothing is held.
    ended: Notify,
}

struct State {
    pending: VecDeque<PendingDelivery>,
    /// Why nothing more comes.
    end_reason: Option<String>,
    /// Why nothing can be acknowledged any more.
    lost_reason: Option<String>,
    /// What is held and not settled.
    unsettled: BTreeSet<Run>,
    is_stopped: bool,
    /// It was left for another one.
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

/// Whether somebody asks.
#[derive(Clone, Copy)]
enum PollActivity {
    Polling,
    IdleSince(Instant),
}

/// A session that was opened, and what has to be done beside it.
pub(super) struct OpenedSession {
    pub(super) session: Arc<Session>,
    /// For [`Session::run`].
    pub(super) consumer: Consumer,
    /// For [`ReplyClients::count_absent`].
    pub(super) presence_checks: mpsc::Receiver<PresenceCheck>,
}

impl Session {
    /// Consumes on a channel of its own. The queue is never declared.
    pub(super) async fn open(
        broker: &Broker,
        connection: Arc<Connection>,
        queue: &ShortString,
        tag: &str,
        prefetch: u16,
        epoch: u64,
    ) -> Result<OpenedSession, CallError> {
        let refused = |operation: &str, error: lapin::Error| queue_error(broker, queue.as_str(), operation, &error);
        let opening = async {
            let intake = connection.create_channel().await.map_err(|error| refused("open a channel", error))?;
            intake
                .basic_qos(prefetch, BasicQosOptions::default())
                .await
                .map_err(|error| refused("set the prefetch", error))?;
            let answers =
                publisher::open_confirm_channel(&connection).await.map_err(|error| refused("open a channel", error))?;
            // Were it dropped here, the consumer would stay at the broker and take requests that nobody sees.
            let unwanted = CloseOnDrop::new(intake.clone());
            // Where ours is too long the broker makes one.
            let tag = amqp::to_short_string_or_none(tag).unwrap_or_default();
            let consumer = intake
                .basic_consume(queue.clone(), tag, BasicConsumeOptions::default(), FieldTable::default())
                .await
                .map_err(|error| refused("consume", error))?;
            unwanted.disarm();
            Ok::<_, CallError>((intake, answers, consumer))
        };
        let (intake, answers, consumer) = match timeout(AMQP_CALL_TIMEOUT, opening).await {
            Ok(opened) => opened?,
            Err(_) => {
                return Err(amqp::retry_error(format!("consume from {queue}: not done in {AMQP_CALL_TIMEOUT:?}")));
            }
        };
        let (clients, questions) = ReplyClients::new(Arc::clone(&connection));
        let session = Self {
            epoch,
            prefetch,
            queue: queue.clone(),
            broker: broker.clone(),
            publisher: Arc::new(Publisher::new(Arc::clone(&connection), answers)),
            reply_clients: clients,
            connection,
            consume_channel: intake,
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
        Ok(OpenedSession { session: Arc::new(session), consumer, presence_checks: questions })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// A poll begins.
    pub(super) fn on_poll_started(&self) {
        self.state().poll_activity = PollActivity::Polling;
    }

    /// A poll has ended.
    pub(super) fn on_poll_ended(&self) {
        let mut state = self.state();
        state.poll_activity = PollActivity::IdleSince(Instant::now());
        if !state.pending.is_empty() {
            self.poll_ended.notify_one();
        }
    }

    /// Takes what was handed over, `most` at most.
    pub(super) fn drain_pending(&self, most: usize) -> Vec<PendingDelivery> {
        let mut state = self.state();
        let count = state.pending.len().min(most);
        state.pending.drain(..count).collect()
    }

    /// Why nothing more comes, if nothing does.
    pub(super) fn end_reason(&self) -> Option<String> {
        let state = self.state();
        if state.pending.is_empty() || state.is_stopped { state.end_reason.clone() } else { None }
    }

    /// Whether it was left for another one, and is neither lost nor dismissed.
    pub(super) fn is_retired(&self) -> bool {
        let state = self.state();
        state.is_retired && !state.is_stopped && state.lost_reason.is_none()
    }

    /// Why nothing of it can be acknowledged any more.
    pub(super) fn lost_reason(&self) -> Option<String> {
        self.state().lost_reason.clone()
    }

    /// The same, where it may be that nobody was told yet.
    pub(super) fn is_lost(&self) -> bool {
        self.lost_reason().is_some()
            || !self.connection.status().connected()
            || !self.consume_channel.status().connected()
    }

    /// How many of its claims somebody holds: payloads of them may still be there.
    pub(super) fn held_claims(&self) -> usize {
        self.held_claims.load(Ordering::Acquire)
    }

    /// Somebody lets a claim go.
    pub(super) fn release_claim(&self) {
        self.held_claims.fetch_sub(1, Ordering::AcqRel);
    }

    /// A claim is held.
    pub(super) fn add_claim(&self, run: Run) {
        self.held_claims.fetch_add(1, Ordering::AcqRel);
        self.state().unsettled.insert(run);
    }

    /// A claim is settled, or given up.
    pub(super) fn mark_settled(&self, run: &Run) {
        self.state().unsettled.remove(run);
    }

    /// Whether the broker lets nobody publish.
    pub(super) fn is_blocked(&self) -> bool {
        amqp::is_blocked(&self.connection)
    }

    /// Nobody wants more from it: what waits goes back, what is held goes on.
    pub(super) fn retire(&self, why: &str) {
        let mut state = self.state();
        state.end_reason.get_or_insert_with(|| why.to_owned());
        state.is_retired = true;
        drop(state);
        self.retired.notify_one();
    }

    /// As [`Session::retire`], because the worker wants no requests at present.
    pub(super) fn stop_consuming(&self) {
        self.state().is_stopped = true;
        self.retire("no requests are wanted at present");
        self.arrived.notify_one();
    }

    /// Whether it was dismissed.
    pub(super) fn is_stopped(&self) -> bool {
        self.state().is_stopped
    }

    /// Tells the broker what becomes of a delivery, once for each. Says whether it was told: after the end of its channel nothing
    /// is.
    ///
    /// By the channel and not by the delivery's own `Acker`, which has each word go by another task of lapin's first.
    pub(super) async fn acknowledge(&self, tag: DeliveryTag, last: AckKind) -> lapin::Result<bool> {
        if !self.consume_channel.status().connected() {
            return Ok(false);
        }
        let telling = async {
            match last {
                AckKind::Acknowledge => self.consume_channel.basic_ack(tag, BasicAckOptions::default()).await,
                AckKind::Requeue => self.consume_channel.basic_reject(tag, BasicRejectOptions { requeue: true }).await,
                AckKind::DeadLetter => {
                    self.consume_channel.basic_reject(tag, BasicRejectOptions { requeue: false }).await
                }
            }
        };
        connection::while_connected(&self.connection, telling).await.map(|()| true)
    }

    /// Gives back what nobody settled. Whether the broker hears of it nobody waits for: if not, its channel has ended, and that
    /// does the same. Says whether it is to be told.
    pub(super) fn requeue(&self, tag: DeliveryTag) -> bool {
        let open = self.consume_channel.status().connected();
        if open {
            amqp::poll_once(self.consume_channel.basic_reject(tag, BasicRejectOptions { requeue: true }));
        }
        open
    }

    /// Moves deliveries to where polls find them, until none come and none are held. What nobody has asked for in the end goes `back`.
    pub(super) async fn run(
        self: Arc<Self>,
        consumer: Consumer,
        news: Arc<EventQueue>,
        back: impl Fn(PendingDelivery),
    ) {
        self.receive_deliveries(consumer, &news, back).await;
        self.ended.notify_one();
    }

    /// Takes leave of the broker, in order: nothing comes any more, then the channel ends. Only then has a quorum queue heeded every
    /// acknowledgement; of those that are on their way when their connection is closed it has been seen to forget some.
    pub(super) async fn close(&self) {
        self.state().is_stopped = true;
        self.retire("the worker exits");
        let closing = async {
            self.ended.notified().await;
            self.consume_channel.close(REPLY_SUCCESS, "OK".into()).await
        };
        if !matches!(timeout(AMQP_CLOSE_TIMEOUT, closing).await, Ok(Ok(()))) {
            tracing::debug!(queue = self.queue.as_str(), "a channel was not closed in order");
        }
    }

    async fn receive_deliveries(&self, mut consumer: Consumer, news: &EventQueue, back: impl Fn(PendingDelivery)) {
        loop {
            let unpolled = self.unpolled_deadline();
            let item = tokio::select! {
                biased;
                item = next_delivery(&mut consumer) => item,
                () = self.retired.notified() => break self.cancel_consumer(consumer, news, back).await,
                // From now on what waits waits for nobody.
                () = self.poll_ended.notified() => continue,
                () = async { match unpolled {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                } } => {
                    // A poll may have taken what waited, without a word.
                    if self.unpolled_deadline().is_some_and(|at| at <= Instant::now()) {
                        self.retire("nobody asks for requests at present; they went back");
                    }
                    continue;
                }
            };
            match item {
                Some(Ok(delivery)) => {
                    crash_point("request-delivered");
                    self.state().pending.push_back(PendingDelivery { delivery, received_at: Instant::now() });
                    self.arrived.notify_one();
                }
                Some(Err(error)) => return self.on_channel_lost(&amqp::error_text(&error), news),
                None if self.consume_channel.status().connected() => {
                    return self.on_consumer_canceled(news, back).await;
                }
                None => return self.on_channel_lost("the channel was closed", news),
            }
        }
    }

    /// When what waits has waited long enough without anybody asking.
    fn unpolled_deadline(&self) -> Option<Instant> {
        self.state().unpolled_deadline()
    }

    /// Every claim of it is lost, and what waits is the broker's again.
    fn on_channel_lost(&self, why: &str, news: &EventQueue) {
        let what = format!("the connection to {} was lost: {why}", self.broker.display_url());
        let live = {
            let mut state = self.state();
            state.end_reason = Some(what.clone());
            state.lost_reason = Some(what);
            state.pending.clear();
            std::mem::take(&mut state.unsettled)
        };
        self.arrived.notify_one();
        if !live.is_empty() {
            news.push(SourceEvent::Lost(live.into_iter().collect()));
        }
    }

    /// The broker has ended the consumer: its queue is gone, or cannot be reached.
    async fn on_consumer_canceled(&self, news: &EventQueue, back: impl Fn(PendingDelivery)) {
        let why = format!("the broker has canceled the consumer of {}", self.queue);
        self.state().end_reason = Some(why.clone());
        self.arrived.notify_one();
        if self.is_queue_deleted().await {
            news.push(SourceEvent::Exhausted { what: format!("{why}, and the queue is gone") });
        }
        self.watch_channel(news, back).await;
    }

    /// Whether the queue was deleted, and not just lost from sight.
    async fn is_queue_deleted(&self) -> bool {
        let asking = async {
            let channel = self.connection.create_channel().await?;
            let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
            channel.queue_declare(self.queue.clone(), options, FieldTable::default()).await
        };
        match timeout(AMQP_CALL_TIMEOUT, asking).await {
            Ok(Err(error)) => {
                amqp::reply_code(&error) == Some(amqp::NOT_FOUND)
                    && !amqp::error_text(&error).contains("down or inaccessible")
            }
            Ok(Ok(_)) | Err(_) => false,
        }
    }

    /// Ends the consumer, and gives back what it still brings.
    async fn cancel_consumer(&self, mut consumer: Consumer, news: &EventQueue, back: impl Fn(PendingDelivery)) {
        let canceling = self.consume_channel.basic_cancel(consumer.tag(), BasicCancelOptions::default());
        let ended = async {
            canceling.await?;
            while let Some(item) = next_delivery(&mut consumer).await {
                self.state().pending.push_back(PendingDelivery { delivery: item?, received_at: Instant::now() });
            }
            Ok::<_, lapin::Error>(())
        };
        match timeout(AMQP_CALL_TIMEOUT, ended).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return self.on_channel_lost(&amqp::error_text(&error), news),
            Err(_) => tracing::debug!(queue = self.queue.as_str(), "a consumer was not canceled in time"),
        }
        let waiting = std::mem::take(&mut self.state().pending);
        waiting.into_iter().for_each(&back);
        self.arrived.notify_one();
        self.watch_channel(news, back).await;
    }

    /// Looks after the channel while claims of it are held, or wait. No consumer tells of its end any more.
    async fn watch_channel(&self, news: &EventQueue, back: impl Fn(PendingDelivery)) {
        loop {
            self.drain_unclaimed().into_iter().for_each(&back);
            {
                let state = self.state();
                if state.unsettled.is_empty() && state.pending.is_empty() {
                    return;
                }
            }
            if !self.consume_channel.status().connected() {
                return self.on_channel_lost("the channel was closed", news);
            }
            sleep(AMQP_CHANNEL_CHECK_INTERVAL).await;
        }
    }

    /// What waits and is not wanted, or was not asked for in time.
    fn drain_unclaimed(&self) -> VecDeque<PendingDelivery> {
        let mut state = self.state();
        let is_late = state.unpolled_deadline().is_some_and(|at| at <= Instant::now());
        if state.is_stopped || is_late { std::mem::take(&mut state.pending) } else { VecDeque::new() }
    }
}

async fn next_delivery(consumer: &mut Consumer) -> Option<lapin::Result<Delivery>> {
    std::future::poll_fn(|context| Pin::new(&mut *consumer).poll_next(context)).await
}

/// A queue that is not there may come to be.
fn queue_error(broker: &Broker, queue: &str, operation: &str, error: &lapin::Error) -> CallError {
    if amqp::reply_code(error) == Some(amqp::NOT_FOUND) {
        let what = format!(
            "there is no queue {queue} at {}; it is waited for, since its controller makes it",
            broker.display_url()
        );
        return CallError { refusal: Refusal::Retry { retry_after: None }, message: what };
    }
    broker.call_error(operation, error)
}
