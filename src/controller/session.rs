//! One connection to the broker: the lock, the pool's exchanges and queues, and what comes by them.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, Consumer};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::demand;
use super::names::Names;
use super::publish::{self, Obituary, Orphan, confirming, next};
use super::tally::Tally;
use super::topology::{self, Keeping};
use super::view::Role;
use super::{Controller, Ended, Settings};
use crate::amqp::{self, headers};
use crate::domain::group::Key;
use crate::domain::group::pool::{Answer, Effect, Epoch, Event, Pool, Step};
use crate::domain::group::scale::Load;
use crate::domain::time::Instant;
use crate::limits::{
    AMQP_CALL_TIMEOUT, CONTROLLER_BIND_TRIES, CONTROLLER_GROUPS_MAX, CONTROLLER_LETTERS_MAX, CONTROLLER_LOOK_EVERY,
    CONTROLLER_ORPHAN_WAIT, CONTROLLER_ORPHANS_MAX, CONTROLLER_STANDBY_LOOK, CONTROLLER_STEPS_MAX, DEMAND_COUNTS_MAX,
};

/// It cannot go on.
pub(super) struct Over {
    pub(super) why: String,
}

impl From<lapin::Error> for Over {
    fn from(error: lapin::Error) -> Self {
        Self { why: amqp::shown(&error) }
    }
}

/// Something about a queue.
enum Job {
    Step(Step),
    Depth,
}

enum Done {
    Step(Step, Answer),
    Depth(Answer),
}

/// What came of a job, and why where it failed.
struct Finished {
    key: Key,
    done: Done,
    why: Option<String>,
}

/// What a session has its messages by.
struct Channels {
    orphans: Consumer,
    reports: Consumer,
    forwards: Channel,
    answers: Channel,
}

/// Controls the pool for as long as the connection lasts.
pub(super) async fn live(controller: &mut Controller, epoch: u64) -> Over {
    let settings = controller.settings.clone();
    let name = format!("journeyman controller of {}", settings.pool);
    let connection = match controller.meanwhile(settings.broker.connect(&name)).await {
        Ok(connection) => connection,
        Err(refused) => return Over { why: refused.what },
    };
    match control(controller, &settings, Epoch(epoch), &connection).await {
        Err(over) => over,
        Ok(never) => match never {},
    }
}

async fn control(
    controller: &mut Controller,
    settings: &Settings,
    epoch: Epoch,
    connection: &Connection,
) -> Result<std::convert::Infallible, Over> {
    let (names, clock, tally) = (&settings.names, controller.clock, Arc::clone(&controller.tally));
    let _lock = lock(controller, connection, names).await?;
    controller.becomes(Role::Starting);
    let Channels { answers, forwards, mut orphans, mut reports } =
        controller.meanwhile(open(settings, connection)).await?;
    controller.musters().await;
    controller.row.reset();
    controller.lost = None;
    controller.becomes(Role::Active);
    tracing::info!(pool = settings.pool, broker = settings.broker.shown(), "this is the controller of the pool");

    let (steps, to_do) = mpsc::channel(CONTROLLER_STEPS_MAX);
    let (depths, to_measure) = mpsc::channel(CONTROLLER_STEPS_MAX);
    let (done, mut results) = mpsc::channel(CONTROLLER_STEPS_MAX);
    let (ready, to_forward) = mpsc::channel(CONTROLLER_ORPHANS_MAX.into());
    let (unbound, mut strayed) = mpsc::channel(CONTROLLER_ORPHANS_MAX.into());
    let mut working = std::pin::pin!(work(connection, names, settings.keeping, (to_do, to_measure), done));
    let mut forwarding = std::pin::pin!(publish::forward(forwards, names.clone(), to_forward, unbound, &tally));
    let mut letters = std::pin::pin!(answer_letters(settings, connection, &tally));

    controller.pool.handle(Event::Connected(epoch), clock.now());
    for key in controller.staff.counts(&controller.staff.remembered().into_iter().collect()).into_keys() {
        controller.pool.handle(Event::Found(key), clock.now());
    }
    let (counts, mut counted) = mpsc::channel(DEMAND_COUNTS_MAX);
    let mut watching = JoinSet::new();
    for demand in &settings.demands {
        watching.spawn(demand::watch(demand.clone(), counts.clone()));
    }
    let mut look = interval(CONTROLLER_LOOK_EVERY);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let generation = controller.pool.tracker().generation();
        let deadline = controller.pool.next_deadline();
        tokio::select! {
            biased;
            Some(finished) = results.recv() => controller.finished(epoch, finished),
            Some(key) = strayed.recv() => controller.pool.handle(Event::Strayed(key), clock.now()),
            Some(counted) = counted.recv() => controller.counted(counted),
            Some(ask) = controller.asked.recv() => controller.hear(ask),
            news = controller.staff.news() => controller.told(news),
            orphan = next(&mut orphans) => {
                let delivery = orphan.ok_or_else(|| ended("orphans"))??;
                tally.orphans.add();
                if let Some(odd) = controller.here.take_in(names, &mut controller.pool, delivery, clock.now()) {
                    let (delivery, obituary) = *odd;
                    controller.bury(&answers, delivery, &obituary).await?;
                }
            }
            report = next(&mut reports) => {
                let delivery = report.ok_or_else(|| ended("reports"))??;
                controller.heard(&delivery);
                delivery.acker.ack(BasicAckOptions::default()).await?;
            }
            over = &mut working => return Err(over),
            over = &mut forwarding => {
                over?;
                return Err(ended("forwarded requests"));
            }
            over = &mut letters => return Err(over),
            _ = look.tick() => {
                for delivery in controller.look_after() {
                    controller.bury(&answers, delivery, &Obituary::of_no_queue()).await?;
                }
                controller.pool.handle(Event::Tick, clock.now());
                controller.plan();
                if depths.capacity() == depths.max_capacity() {
                    let keys = controller.pool.tracker().groups().map(|(key, _)| key);
                    for key in keys.filter(|key| controller.pool.is_bound(key)) {
                        // The next look asks again.
                        drop(depths.try_send(key.clone()));
                    }
                }
            }
            () = async { match deadline {
                Some(at) => clock.sleep_until(at).await,
                None => std::future::pending().await,
            } } => controller.pool.handle(Event::Tick, clock.now()),
        }
        while let Some(effect) = controller.pool.next_effect() {
            match effect {
                Effect::Do { key, step, .. } => {
                    if steps.try_send((key.clone(), step)).is_err() {
                        let answered = Event::Answered { epoch, key, step, answer: Answer::Failed };
                        controller.pool.handle(answered, clock.now());
                    }
                }
                Effect::Revived { key, ready } => {
                    tracing::warn!(%key, ready, "its queue was to go, and holds requests: the group goes on");
                }
            }
        }
        controller.here.let_go(&controller.pool, &ready);
        controller.staff.remember(controller.pool.keys());
        if controller.pool.tracker().generation() != generation {
            controller.plan();
        }
    }
}

impl Controller {
    /// A job about a queue is done.
    fn finished(&mut self, epoch: Epoch, finished: Finished) {
        let (Finished { key, done, why }, now) = (finished, self.clock.now());
        if let Some(why) = why {
            self.fault = Some(Ended { at: now, what: format!("a step about the queue of {key}: {why}") });
        }
        match done {
            Done::Step(step, answer) => {
                let count = if answer == Answer::Failed { &self.tally.steps_failed } else { &self.tally.steps };
                count.add();
                self.pool.handle(Event::Answered { epoch, key, step, answer }, now);
            }
            Done::Depth(Answer::Holds { ready, .. }) => {
                // What waits is asked for: its workers may only be slow to come up.
                if ready > 0 {
                    self.pool.handle(Event::Demand { key: key.clone(), extra: Duration::ZERO }, now);
                }
                self.here.loads.insert(key, Load { ready, ..Load::default() });
            }
            Done::Depth(Answer::Missing) => self.pool.handle(Event::Strayed(key), now),
            Done::Depth(Answer::Done | Answer::Failed) => {}
        }
    }

    /// A worker has reported.
    fn heard(&mut self, report: &Delivery) {
        let Some(key) = self.settings.names.key(report.routing_key.as_str()) else { return };
        let table = report.properties.headers().as_ref();
        let text = |name| table.and_then(|table| headers::text(table, name));
        let now = self.clock.now();
        self.tally.reports.add();
        if let (Some(id), Some(event)) = (text("x-worker-id"), text("x-event")) {
            self.staff.heard(id, event, now);
        }
        // Anybody may report: it makes no more groups than requests may.
        if !full(&self.pool, &key) {
            self.pool.handle(Event::Demand { key, extra: Duration::ZERO }, now);
        }
    }

    /// Tells the rules who is there. Answers with the orphans that have waited too long.
    fn look_after(&mut self) -> Vec<Delivery> {
        let now = self.clock.now();
        self.orders.tick(now);
        for key in self.orders.kept() {
            self.pool.handle(Event::Demand { key: key.clone(), extra: Duration::ZERO }, now);
        }
        let wanted: BTreeSet<&Key> = self.pool.tracker().groups().map(|(key, _)| key).collect();
        self.here.loads.retain(|key, _| wanted.contains(key));
        let known = self.pool.keys().cloned().collect();
        for (key, count) in self.staff.counts(&known) {
            self.pool.handle(Event::Workers { key, count }, now);
        }
        self.here.give_up(&self.pool, now)
    }

    pub(super) fn plan(&mut self) {
        let mut loads = self.here.loads.clone();
        for key in self.demands.values().map(|known| &known.key) {
            let own = loads.get(key).copied().unwrap_or_default();
            loads.insert(key.clone(), self.with_demand(key, own));
        }
        self.staff.plan(self.pool.tracker(), &loads, &self.orders, self.clock.now());
    }

    /// Answers an orphan that will have no queue.
    async fn bury(&mut self, answers: &Channel, delivery: Delivery, obituary: &Obituary) -> Result<(), Over> {
        let (names, status) = (self.settings.names.clone(), self.settings.dead_letter_status.clone());
        let tally = Arc::clone(&self.tally);
        self.meanwhile(publish::answer(answers, &names, &status, delivery, obituary, &tally)).await?;
        tally.orphans.take();
        Ok(())
    }
}

/// Makes the pool's exchanges and queues, and listens to them.
async fn open(settings: &Settings, connection: &Connection) -> Result<Channels, Over> {
    let names = &settings.names;
    let channel = connection.create_channel().await?;
    timeout(AMQP_CALL_TIMEOUT, topology::declare(&channel, names, settings.keeping))
        .await
        .map_err(|_| Over { why: format!("the pool's queues were not made in {AMQP_CALL_TIMEOUT:?}") })??;
    Ok(Channels {
        orphans: consume(connection, &names.orphan_queue(), Some(CONTROLLER_ORPHANS_MAX)).await?,
        reports: consume(connection, &names.activity_queue(), None).await?,
        forwards: confirming(connection).await?,
        answers: confirming(connection).await?,
    })
}

fn ended(what: &str) -> Over {
    Over { why: format!("no more {what} come") }
}

/// Waits until this is the controller of the pool. Whoever holds the queue is; it goes with its connection, and everything that
/// was sent by it was done before.
async fn lock(controller: &mut Controller, connection: &Connection, names: &Names) -> Result<Channel, Over> {
    let options = QueueDeclareOptions { exclusive: true, auto_delete: true, ..QueueDeclareOptions::default() };
    loop {
        let declared = async {
            let channel = connection.create_channel().await?;
            let declaring = channel.queue_declare(names.lock_queue().into(), options, FieldTable::default());
            declaring.await.map(|_| channel)
        };
        match controller.meanwhile(declared).await {
            Ok(channel) => return Ok(channel),
            Err(error) if amqp::code(&error) == Some(amqp::RESOURCE_LOCKED) => {
                if controller.role != Role::Standby {
                    tracing::info!("another controller has this pool; this one stands by");
                    controller.becomes(Role::Standby);
                    controller.lost = None;
                    controller.row.reset();
                }
                controller.meanwhile(sleep(CONTROLLER_STANDBY_LOOK)).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

async fn consume(connection: &Connection, queue: &str, prefetch: Option<u16>) -> lapin::Result<Consumer> {
    let channel = connection.create_channel().await?;
    let prefetch = prefetch.unwrap_or(CONTROLLER_LETTERS_MAX);
    channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
    channel.basic_consume(queue.into(), "".into(), BasicConsumeOptions::default(), FieldTable::default()).await
}

/// Does what is to be done about queues, one after the other: steps first, since who waits for one is a request.
async fn work(
    connection: &Connection,
    names: &Names,
    keeping: Keeping,
    (mut steps, mut depths): (mpsc::Receiver<(Key, Step)>, mpsc::Receiver<Key>),
    done: mpsc::Sender<Finished>,
) -> Over {
    let mut channel: Option<Channel> = None;
    loop {
        let (key, job) = tokio::select! {
            biased;
            Some((key, step)) = steps.recv() => (key, Job::Step(step)),
            Some(key) = depths.recv() => (key, Job::Depth),
            else => break,
        };
        let open = match channel.take().filter(|channel| channel.status().connected()) {
            Some(open) => open,
            None => match connection.create_channel().await {
                Ok(open) => open,
                Err(error) => return error.into(),
            },
        };
        let doing = async {
            match &job {
                Job::Step(step) => topology::carry_out(&open, names, keeping, &key, *step).await,
                Job::Depth => depth(&open, names, &key).await,
            }
        };
        let (answer, why) = match within(doing).await {
            Ok(answer) => (answer, None),
            Err(why) => {
                tracing::warn!(%key, "a step about its queue failed: {why}");
                (Answer::Failed, Some(why))
            }
        };
        channel = Some(open);
        let finished = match job {
            Job::Step(step) => Done::Step(step, answer),
            Job::Depth => Done::Depth(answer),
        };
        if done.send(Finished { key, done: finished, why }).await.is_err() {
            break;
        }
    }
    ended("steps")
}

async fn within(doing: impl Future<Output = lapin::Result<Answer>>) -> Result<Answer, String> {
    match timeout(AMQP_CALL_TIMEOUT, doing).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(amqp::shown(&error)),
        Err(_) => Err(format!("not done in {AMQP_CALL_TIMEOUT:?}")),
    }
}

async fn depth(channel: &Channel, names: &Names, key: &Key) -> lapin::Result<Answer> {
    let Some(queue) = names.request_queue(key) else { return Ok(Answer::Missing) };
    match topology::look(channel, &queue).await {
        Err(error) if amqp::code(&error) == Some(amqp::NOT_FOUND) => Ok(Answer::Missing),
        other => other,
    }
}

/// Answers what nobody else will.
async fn answer_letters(settings: &Settings, connection: &Connection, tally: &Tally) -> Over {
    let answering = async {
        let queue = settings.names.dead_letter_queue();
        let mut letters = consume(connection, &queue, Some(CONTROLLER_LETTERS_MAX)).await?;
        let answers = confirming(connection).await?;
        while let Some(letter) = next(&mut letters).await {
            let letter = letter?;
            let obituary = Obituary::of(&letter);
            tracing::info!(reason = obituary.reason, queue = obituary.queue, "a request is answered for its workers");
            publish::answer(&answers, &settings.names, &settings.dead_letter_status, letter, &obituary, tally).await?;
        }
        Ok::<_, Over>(())
    };
    answering.await.err().unwrap_or_else(|| ended("dead letters"))
}

/// Whether there is no room for a group of this key.
fn full(pool: &Pool, key: &Key) -> bool {
    pool.tracker().wanted(key).is_none() && pool.tracker().groups().count() >= CONTROLLER_GROUPS_MAX
}

struct Waiting {
    since: Instant,
    delivery: Delivery,
}

/// What this connection brought.
#[derive(Default)]
pub(super) struct Here {
    /// Orphans whose queue is not there yet.
    waiting: BTreeMap<Key, Vec<Waiting>>,
    pub(super) loads: BTreeMap<Key, Load>,
}

impl Here {
    /// Takes an orphan in. Answers with one that will have no queue.
    fn take_in(
        &mut self,
        names: &Names,
        pool: &mut Pool,
        delivery: Delivery,
        now: Instant,
    ) -> Option<Box<(Delivery, Obituary)>> {
        let key = names.key(delivery.routing_key.as_str()).filter(|key| names.request_queue(key).is_some());
        let Some(key) = key else {
            let message = "the key is too long for the name of a queue, or is not text".to_owned();
            return Some(Box::new((delivery, Obituary { reason: "key".to_owned(), message, queue: None })));
        };
        if publish::goes_round(&delivery) {
            return Some(Box::new((delivery, Obituary::of_circle())));
        }
        if full(pool, &key) {
            let message = format!("there are {CONTROLLER_GROUPS_MAX} groups already");
            return Some(Box::new((delivery, Obituary { reason: "groups".to_owned(), message, queue: None })));
        }
        if publish::hops(&delivery) > 0 {
            pool.handle(Event::Strayed(key.clone()), now);
        }
        pool.handle(Event::Demand { key: key.clone(), extra: Duration::ZERO }, now);
        self.waiting.entry(key).or_default().push(Waiting { since: now, delivery });
        None
    }

    /// Those that have waited too long, or whose queue cannot be made: they would take the room of others.
    fn give_up(&mut self, pool: &Pool, now: Instant) -> Vec<Delivery> {
        let mut over = Vec::new();
        self.waiting.retain(|key, waiting| {
            let in_vain = pool.failures(key) >= CONTROLLER_BIND_TRIES;
            let first = waiting.iter().position(|one| !in_vain && now.since(one.since) < CONTROLLER_ORPHAN_WAIT);
            over.extend(waiting.drain(..first.unwrap_or(waiting.len())).map(|one| one.delivery));
            !waiting.is_empty()
        });
        over
    }

    /// Forwards those whose queue is there.
    fn let_go(&mut self, pool: &Pool, ready: &mpsc::Sender<Orphan>) {
        let bound: Vec<Key> = self.waiting.keys().filter(|key| pool.is_bound(key)).cloned().collect();
        for key in bound {
            for Waiting { delivery, .. } in self.waiting.remove(&key).unwrap_or_default() {
                // As many as there can be have room; otherwise the connection is over, and the broker has them.
                drop(ready.try_send(Orphan { key: key.clone(), delivery }));
            }
        }
    }
}
