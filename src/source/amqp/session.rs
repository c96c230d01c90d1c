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

use crate::amqp::{self, Broker, Provisional};
use crate::domain::id::Run;
use crate::domain::refusal::Refusal;
use crate::host::crash::crash_point;
use crate::limits::{AMQP_CALL_TIMEOUT, AMQP_CHANNEL_LOOK_EVERY, AMQP_CLOSE_WAIT, AMQP_UNPOLLED_MAX};
use crate::source::{News, Refused};

use super::clients::{Asked, Clients};
use super::outlet::{self, Outlet};
use super::{Noticeboard, link, lock};

/// A delivery that nobody has asked for yet.
pub(super) struct Waiting {
    pub(super) delivery: Delivery,
    pub(super) since: Instant,
}

/// The last word to the broker about a delivery.
#[derive(Clone, Copy)]
pub(super) enum Last {
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
    intake: Channel,
    pub(super) outlet: Arc<Outlet>,
    pub(super) clients: Arc<Clients>,
    state: Mutex<State>,
    /// How many claims of it there are, settled or not, that somebody still holds.
    parts: AtomicUsize,
    /// Something came, or nothing more will.
    pub(super) arrived: Notify,
    /// A poll has left something.
    left: Notify,
    /// Nobody wants more from it.
    retired: Notify,
    /// Nothing comes any more, and nothing is held.
    ended: Notify,
}

struct State {
    waiting: VecDeque<Waiting>,
    /// Why nothing more comes.
    over: Option<String>,
    /// Why nothing can be acknowledged any more.
    lost: Option<String>,
    /// What is held and not settled.
    live: BTreeSet<Run>,
    unwanted: bool,
    /// It was left for another one.
    retired: bool,
    polls: Polls,
}

impl State {
    fn unpolled_at(&self) -> Option<Instant> {
        match self.polls {
            Polls::NoneSince(since) => self.waiting.front().map(|first| since.max(first.since) + AMQP_UNPOLLED_MAX),
            Polls::UnderWay => None,
        }
    }
}

/// Whether somebody asks.
#[derive(Clone, Copy)]
enum Polls {
    UnderWay,
    NoneSince(Instant),
}

/// A session that was opened, and what has to be done beside it.
pub(super) struct Opened {
    pub(super) session: Arc<Session>,
    /// For [`Session::pump`].
    pub(super) consumer: Consumer,
    /// For [`Clients::count`].
    pub(super) questions: mpsc::Receiver<Asked>,
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
    ) -> Result<Opened, Refused> {
        let refused = |operation: &str, error: lapin::Error| missing_or(broker, queue.as_str(), operation, &error);
        let opening = async {
            let intake = connection.create_channel().await.map_err(|error| refused("open a channel", error))?;
            intake
                .basic_qos(prefetch, BasicQosOptions::default())
                .await
                .map_err(|error| refused("set the prefetch", error))?;
            let answers = outlet::confirming(&connection).await.map_err(|error| refused("open a channel", error))?;
            // Were it dropped here, the consumer would stay at the broker and take requests that nobody sees.
            let unwanted = Provisional::of(intake.clone());
            // Where ours is too long the broker makes one.
            let tag = amqp::short_or_none(tag).unwrap_or_default();
            let consumer = intake
                .basic_consume(queue.clone(), tag, BasicConsumeOptions::default(), FieldTable::default())
                .await
                .map_err(|error| refused("consume", error))?;
            unwanted.keep();
            Ok::<_, Refused>((intake, answers, consumer))
        };
        let (intake, answers, consumer) = match timeout(AMQP_CALL_TIMEOUT, opening).await {
            Ok(opened) => opened?,
            Err(_) => return Err(amqp::retry(format!("consume from {queue}: not done in {AMQP_CALL_TIMEOUT:?}"))),
        };
        let (clients, questions) = Clients::new(Arc::clone(&connection));
        let session = Self {
            epoch,
            prefetch,
            queue: queue.clone(),
            broker: broker.clone(),
            outlet: Arc::new(Outlet::new(Arc::clone(&connection), answers)),
            clients,
            connection,
            intake,
            state: Mutex::new(State {
                waiting: VecDeque::new(),
                over: None,
                lost: None,
                live: BTreeSet::new(),
                unwanted: false,
                retired: false,
                polls: Polls::NoneSince(Instant::now()),
            }),
            parts: AtomicUsize::new(0),
            arrived: Notify::new(),
            left: Notify::new(),
            retired: Notify::new(),
            ended: Notify::new(),
        };
        Ok(Opened { session: Arc::new(session), consumer, questions })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// A poll begins.
    pub(super) fn asked(&self) {
        self.state().polls = Polls::UnderWay;
    }

    /// A poll has ended.
    pub(super) fn unasked(&self) {
        let mut state = self.state();
        state.polls = Polls::NoneSince(Instant::now());
        if !state.waiting.is_empty() {
            self.left.notify_one();
        }
    }

    /// Takes what was handed over, `most` at most.
    pub(super) fn take(&self, most: usize) -> Vec<Waiting> {
        let mut state = self.state();
        let count = state.waiting.len().min(most);
        state.waiting.drain(..count).collect()
    }

    /// Why nothing more comes, if nothing does.
    pub(super) fn over(&self) -> Option<String> {
        let state = self.state();
        if state.waiting.is_empty() || state.unwanted { state.over.clone() } else { None }
    }

    /// Whether it was left for another one, and is neither lost nor dismissed.
    pub(super) fn is_left(&self) -> bool {
        let state = self.state();
        state.retired && !state.unwanted && state.lost.is_none()
    }

    /// Why nothing of it can be acknowledged any more.
    pub(super) fn lost(&self) -> Option<String> {
        self.state().lost.clone()
    }

    /// The same, where it may be that nobody was told yet.
    pub(super) fn is_lost(&self) -> bool {
        self.lost().is_some() || !self.connection.status().connected() || !self.intake.status().connected()
    }

    /// How many of its claims somebody holds: payloads of them may still be there.
    pub(super) fn held(&self) -> usize {
        self.parts.load(Ordering::Acquire)
    }

    /// Somebody lets a claim go.
    pub(super) fn let_go(&self) {
        self.parts.fetch_sub(1, Ordering::AcqRel);
    }

    /// A claim is held.
    pub(super) fn hold(&self, run: Run) {
        self.parts.fetch_add(1, Ordering::AcqRel);
        self.state().live.insert(run);
    }

    /// A claim is settled, or given up.
    pub(super) fn settled(&self, run: &Run) {
        self.state().live.remove(run);
    }

    /// Whether the broker lets nobody publish.
    pub(super) fn blocked(&self) -> bool {
        amqp::is_blocked(&self.connection)
    }

    /// Nobody wants more from it: what waits goes back, what is held goes on.
    pub(super) fn retire(&self, why: &str) {
        let mut state = self.state();
        state.over.get_or_insert_with(|| why.to_owned());
        state.retired = true;
        drop(state);
        self.retired.notify_one();
    }

    /// As [`Session::retire`], because the worker wants no requests at present.
    pub(super) fn dismiss(&self) {
        self.state().unwanted = true;
        self.retire("no requests are wanted at present");
        self.arrived.notify_one();
    }

    /// Whether it was dismissed.
    pub(super) fn is_unwanted(&self) -> bool {
        self.state().unwanted
    }

    /// Tells the broker what becomes of a delivery, once for each. Says whether it was told: after the end of its channel nothing
    /// is.
    ///
    /// By the channel and not by the delivery's own `Acker`, which has each word go by another task of lapin's first.
    pub(super) async fn tell(&self, tag: DeliveryTag, last: Last) -> lapin::Result<bool> {
        if !self.intake.status().connected() {
            return Ok(false);
        }
        let telling = async {
            match last {
                Last::Acknowledge => self.intake.basic_ack(tag, BasicAckOptions::default()).await,
                Last::Requeue => self.intake.basic_reject(tag, BasicRejectOptions { requeue: true }).await,
                Last::DeadLetter => self.intake.basic_reject(tag, BasicRejectOptions { requeue: false }).await,
            }
        };
        link::while_connected(&self.connection, telling).await.map(|()| true)
    }

    /// Gives back what nobody settled. Whether the broker hears of it nobody waits for: if not, its channel has ended, and that
    /// does the same. Says whether it is to be told.
    pub(super) fn give_back(&self, tag: DeliveryTag) -> bool {
        let open = self.intake.status().connected();
        if open {
            amqp::order(self.intake.basic_reject(tag, BasicRejectOptions { requeue: true }));
        }
        open
    }

    /// Moves deliveries to where polls find them, until none come and none are held. What nobody has asked for in the end goes `back`.
    pub(super) async fn pump(self: Arc<Self>, consumer: Consumer, news: Arc<Noticeboard>, back: impl Fn(Waiting)) {
        self.move_on(consumer, &news, back).await;
        self.ended.notify_one();
    }

    /// Takes leave of the broker, in order: nothing comes any more, then the channel ends. Only then has a quorum queue heeded every
    /// acknowledgement; of those that are on their way when their connection is closed it has been seen to forget some.
    pub(super) async fn close(&self) {
        self.state().unwanted = true;
        self.retire("the worker exits");
        let closing = async {
            self.ended.notified().await;
            self.intake.close(REPLY_SUCCESS, "OK".into()).await
        };
        if !matches!(timeout(AMQP_CLOSE_WAIT, closing).await, Ok(Ok(()))) {
            tracing::debug!(queue = self.queue.as_str(), "a channel was not closed in order");
        }
    }

    async fn move_on(&self, mut consumer: Consumer, news: &Noticeboard, back: impl Fn(Waiting)) {
        loop {
            let unpolled = self.unpolled_at();
            let item = tokio::select! {
                biased;
                item = next(&mut consumer) => item,
                () = self.retired.notified() => break self.wind_up(consumer, news, back).await,
                // From now on what waits waits for nobody.
                () = self.left.notified() => continue,
                () = async { match unpolled {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                } } => {
                    // A poll may have taken what waited, without a word.
                    if self.unpolled_at().is_some_and(|at| at <= Instant::now()) {
                        self.retire("nobody asks for requests at present; they went back");
                    }
                    continue;
                }
            };
            match item {
                Some(Ok(delivery)) => {
                    crash_point("request-delivered");
                    self.state().waiting.push_back(Waiting { delivery, since: Instant::now() });
                    self.arrived.notify_one();
                }
                Some(Err(error)) => return self.fail(&amqp::shown(&error), news),
                None if self.intake.status().connected() => return self.canceled(news, back).await,
                None => return self.fail("the channel was closed", news),
            }
        }
    }

    /// When what waits has waited long enough without anybody asking.
    fn unpolled_at(&self) -> Option<Instant> {
        self.state().unpolled_at()
    }

    /// Every claim of it is lost, and what waits is the broker's again.
    fn fail(&self, why: &str, news: &Noticeboard) {
        let what = format!("the connection to {} was lost: {why}", self.broker.shown());
        let live = {
            let mut state = self.state();
            state.over = Some(what.clone());
            state.lost = Some(what);
            state.waiting.clear();
            std::mem::take(&mut state.live)
        };
        self.arrived.notify_one();
        if !live.is_empty() {
            news.post(News::Lost(live.into_iter().collect()));
        }
    }

    /// The broker has ended the consumer: its queue is gone, or cannot be reached.
    async fn canceled(&self, news: &Noticeboard, back: impl Fn(Waiting)) {
        let why = format!("the broker has canceled the consumer of {}", self.queue);
        self.state().over = Some(why.clone());
        self.arrived.notify_one();
        if self.is_deleted().await {
            news.post(News::Over { what: format!("{why}, and the queue is gone") });
        }
        self.watch(news, back).await;
    }

    /// Whether the queue was deleted, and not just lost from sight.
    async fn is_deleted(&self) -> bool {
        let asking = async {
            let channel = self.connection.create_channel().await?;
            let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
            channel.queue_declare(self.queue.clone(), options, FieldTable::default()).await
        };
        match timeout(AMQP_CALL_TIMEOUT, asking).await {
            Ok(Err(error)) => {
                amqp::code(&error) == Some(amqp::NOT_FOUND) && !amqp::shown(&error).contains("down or inaccessible")
            }
            Ok(Ok(_)) | Err(_) => false,
        }
    }

    /// Ends the consumer, and gives back what it still brings.
    async fn wind_up(&self, mut consumer: Consumer, news: &Noticeboard, back: impl Fn(Waiting)) {
        let canceling = self.intake.basic_cancel(consumer.tag(), BasicCancelOptions::default());
        let ended = async {
            canceling.await?;
            while let Some(item) = next(&mut consumer).await {
                self.state().waiting.push_back(Waiting { delivery: item?, since: Instant::now() });
            }
            Ok::<_, lapin::Error>(())
        };
        match timeout(AMQP_CALL_TIMEOUT, ended).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return self.fail(&amqp::shown(&error), news),
            Err(_) => tracing::debug!(queue = self.queue.as_str(), "a consumer was not canceled in time"),
        }
        let waiting = std::mem::take(&mut self.state().waiting);
        waiting.into_iter().for_each(&back);
        self.arrived.notify_one();
        self.watch(news, back).await;
    }

    /// Looks after the channel while claims of it are held, or wait. No consumer tells of its end any more.
    async fn watch(&self, news: &Noticeboard, back: impl Fn(Waiting)) {
        loop {
            self.for_nobody().into_iter().for_each(&back);
            {
                let state = self.state();
                if state.live.is_empty() && state.waiting.is_empty() {
                    return;
                }
            }
            if !self.intake.status().connected() {
                return self.fail("the channel was closed", news);
            }
            sleep(AMQP_CHANNEL_LOOK_EVERY).await;
        }
    }

    /// What waits and is not wanted, or was not asked for in time.
    fn for_nobody(&self) -> VecDeque<Waiting> {
        let mut state = self.state();
        let is_late = state.unpolled_at().is_some_and(|at| at <= Instant::now());
        if state.unwanted || is_late { std::mem::take(&mut state.waiting) } else { VecDeque::new() }
    }
}

async fn next(consumer: &mut Consumer) -> Option<lapin::Result<Delivery>> {
    std::future::poll_fn(|context| Pin::new(&mut *consumer).poll_next(context)).await
}

/// A queue that is not there may come to be.
fn missing_or(broker: &Broker, queue: &str, operation: &str, error: &lapin::Error) -> Refused {
    if amqp::code(error) == Some(amqp::NOT_FOUND) {
        let what =
            format!("there is no queue {queue} at {}; it is waited for, since its controller makes it", broker.shown());
        return Refused { refusal: Refusal::Retry { after: None }, what };
    }
    broker.refused(operation, error)
}
