//! One connection to the broker: the lock, the pool's exchanges and queues, and what comes by them.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::time::Duration;

use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, Consumer};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::Settings;
use super::names::Names;
use super::publish::{self, Obituary, Orphan, confirming, next};
use super::staff::Staff;
use super::topology::{self, Keeping};
use crate::amqp::{self, headers};
use crate::domain::backoff::Backoff;
use crate::domain::group::Key;
use crate::domain::group::pool::{Answer, Effect, Epoch, Event, Pool, Step};
use crate::domain::group::scale::Load;
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{
    AMQP_CALL_TIMEOUT, CONTROLLER_GROUPS_MAX, CONTROLLER_LETTERS_MAX, CONTROLLER_LOOK_EVERY, CONTROLLER_ORPHAN_WAIT,
    CONTROLLER_ORPHANS_MAX, CONTROLLER_STANDBY_LOOK, CONTROLLER_STEPS_MAX,
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

/// Controls the pool for as long as the connection lasts.
pub(super) async fn live(
    settings: &Settings,
    pool: &mut Pool,
    staff: &mut Staff,
    clock: Clock,
    epoch: u64,
    row: &mut Backoff,
) -> Over {
    let name = format!("journeyman controller of {}", settings.pool);
    let connection = match settings.broker.connect(&name).await {
        Ok(connection) => connection,
        Err(refused) => return Over { why: refused.what },
    };
    match control(settings, pool, staff, clock, Epoch(epoch), row, &connection).await {
        Err(over) => over,
        Ok(never) => match never {},
    }
}

async fn control(
    settings: &Settings,
    pool: &mut Pool,
    staff: &mut Staff,
    clock: Clock,
    epoch: Epoch,
    row: &mut Backoff,
    connection: &Connection,
) -> Result<std::convert::Infallible, Over> {
    let names = &settings.names;
    let _lock = lock(connection, names, staff, clock).await?;
    let channel = connection.create_channel().await?;
    timeout(AMQP_CALL_TIMEOUT, topology::declare(&channel, names, settings.keeping))
        .await
        .map_err(|_| Over { why: format!("the pool's queues were not made in {AMQP_CALL_TIMEOUT:?}") })??;
    row.reset();
    tracing::info!(pool = settings.pool, broker = settings.broker.shown(), "this is the controller of the pool");

    let (jobs, to_do) = mpsc::channel(CONTROLLER_STEPS_MAX);
    let (done, mut results) = mpsc::channel(CONTROLLER_STEPS_MAX);
    let (ready, to_forward) = mpsc::channel(CONTROLLER_ORPHANS_MAX.into());
    let (unbound, mut strayed) = mpsc::channel(CONTROLLER_ORPHANS_MAX.into());
    let mut working = std::pin::pin!(work(connection, names, settings.keeping, to_do, done));
    let mut forwarding =
        std::pin::pin!(publish::forward(confirming(connection).await?, names.clone(), to_forward, unbound));
    let mut letters = std::pin::pin!(answer_letters(settings, connection));
    let mut orphans = consume(connection, &names.orphan_queue(), Some(CONTROLLER_ORPHANS_MAX)).await?;
    let mut reports = consume(connection, &names.activity_queue(), None).await?;
    let answers = confirming(connection).await?;

    pool.handle(Event::Connected(epoch), clock.now());
    for key in staff.counts(&staff.remembered().into_iter().collect()).into_keys() {
        pool.handle(Event::Found(key), clock.now());
    }
    let mut here = Here { waiting: BTreeMap::new(), loads: BTreeMap::new() };
    let mut look = interval(CONTROLLER_LOOK_EVERY);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let generation = pool.tracker().generation();
        tokio::select! {
            biased;
            Some((key, result)) = results.recv() => match result {
                Done::Step(step, answer) => pool.handle(Event::Answered { epoch, key, step, answer }, clock.now()),
                Done::Depth(Answer::Holds { ready, .. }) => {
                    // What waits is asked for: its workers may only be slow to come up.
                    if ready > 0 {
                        pool.handle(Event::Demand { key: key.clone(), extra: Duration::ZERO }, clock.now());
                    }
                    here.loads.insert(key, Load { ready, ..Load::default() });
                }
                Done::Depth(Answer::Missing) => pool.handle(Event::Strayed(key), clock.now()),
                Done::Depth(Answer::Done | Answer::Failed) => {}
            },
            Some(key) = strayed.recv() => pool.handle(Event::Strayed(key), clock.now()),
            orphan = next(&mut orphans) => {
                let delivery = orphan.ok_or_else(|| ended("orphans"))??;
                if let Some(odd) = here.take_in(names, pool, delivery, clock.now()) {
                    let (delivery, obituary) = *odd;
                    publish::answer(&answers, names, &settings.dead_letter_status, delivery, &obituary).await?;
                }
            }
            report = next(&mut reports) => {
                let delivery = report.ok_or_else(|| ended("reports"))??;
                heard(names, pool, staff, &delivery, clock.now());
                delivery.acker.ack(BasicAckOptions::default()).await?;
            }
            over = &mut working => return Err(over),
            over = &mut forwarding => {
                over?;
                return Err(ended("forwarded requests"));
            }
            over = &mut letters => return Err(over),
            _ = look.tick() => {
                staff.look(clock.now());
                let wanted: BTreeSet<Key> = pool.tracker().groups().map(|(key, _)| key.clone()).collect();
                here.loads.retain(|key, _| wanted.contains(key));
                let known = pool.keys().cloned().collect();
                for (key, count) in staff.counts(&known) {
                    pool.handle(Event::Workers { key, count }, clock.now());
                }
                for delivery in here.give_up(clock.now()) {
                    let obituary = Obituary::of_no_queue();
                    publish::answer(&answers, names, &settings.dead_letter_status, delivery, &obituary).await?;
                }
                pool.handle(Event::Tick, clock.now());
                staff.plan(pool.tracker(), &here.loads, clock.now());
                for key in wanted.into_iter().filter(|key| pool.is_bound(key)) {
                    // The next look asks again.
                    drop(jobs.try_send((key, Job::Depth)));
                }
            }
            () = async { match pool.next_deadline() {
                Some(at) => clock.sleep_until(at).await,
                None => std::future::pending().await,
            } } => pool.handle(Event::Tick, clock.now()),
        }
        while let Some(effect) = pool.next_effect() {
            match effect {
                Effect::Do { key, step, .. } => {
                    if jobs.try_send((key.clone(), Job::Step(step))).is_err() {
                        pool.handle(Event::Answered { epoch, key, step, answer: Answer::Failed }, clock.now());
                    }
                }
                Effect::Revived { key, ready } => {
                    tracing::warn!(%key, ready, "its queue was to go, and holds requests: the group goes on");
                }
            }
        }
        here.let_go(pool, &ready);
        staff.remember(pool.keys());
        if pool.tracker().generation() != generation {
            staff.plan(pool.tracker(), &here.loads, clock.now());
        }
    }
}

fn ended(what: &str) -> Over {
    Over { why: format!("no more {what} come") }
}

/// Waits until this is the controller of the pool. Whoever holds the queue is; it goes with its connection, and everything that
/// was sent by it was done before.
async fn lock(connection: &Connection, names: &Names, staff: &mut Staff, clock: Clock) -> Result<Channel, Over> {
    let options = QueueDeclareOptions { exclusive: true, auto_delete: true, ..QueueDeclareOptions::default() };
    let mut said = false;
    loop {
        let channel = connection.create_channel().await?;
        match channel.queue_declare(names.lock_queue().into(), options, FieldTable::default()).await {
            Ok(_) => return Ok(channel),
            Err(error) if amqp::code(&error) == Some(RESOURCE_LOCKED) => {
                if !said {
                    tracing::info!("another controller has this pool; this one stands by");
                    said = true;
                }
                staff.look(clock.now());
                sleep(CONTROLLER_STANDBY_LOOK).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// The reply code about what is somebody else's alone.
const RESOURCE_LOCKED: u16 = 405;

async fn consume(connection: &Connection, queue: &str, prefetch: Option<u16>) -> lapin::Result<Consumer> {
    let channel = connection.create_channel().await?;
    let prefetch = prefetch.unwrap_or(CONTROLLER_LETTERS_MAX);
    channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
    channel.basic_consume(queue.into(), "".into(), BasicConsumeOptions::default(), FieldTable::default()).await
}

/// Does what is to be done about queues, one after the other.
async fn work(
    connection: &Connection,
    names: &Names,
    keeping: Keeping,
    mut jobs: mpsc::Receiver<(Key, Job)>,
    done: mpsc::Sender<(Key, Done)>,
) -> Over {
    let mut channel: Option<Channel> = None;
    while let Some((key, job)) = jobs.recv().await {
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
        let answer = within(doing).await.unwrap_or_else(|why| {
            tracing::warn!(%key, "a step about its queue failed: {why}");
            Answer::Failed
        });
        channel = Some(open);
        let done_now = match job {
            Job::Step(step) => Done::Step(step, answer),
            Job::Depth => Done::Depth(answer),
        };
        if done.send((key, done_now)).await.is_err() {
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
async fn answer_letters(settings: &Settings, connection: &Connection) -> Over {
    let answering = async {
        let queue = settings.names.dead_letter_queue();
        let mut letters = consume(connection, &queue, Some(CONTROLLER_LETTERS_MAX)).await?;
        let answers = confirming(connection).await?;
        while let Some(letter) = next(&mut letters).await {
            let letter = letter?;
            let obituary = Obituary::of(&letter);
            tracing::info!(reason = obituary.reason, queue = obituary.queue, "a request is answered for its workers");
            publish::answer(&answers, &settings.names, &settings.dead_letter_status, letter, &obituary).await?;
        }
        Ok::<_, lapin::Error>(())
    };
    match answering.await {
        Ok(()) => ended("dead letters"),
        Err(error) => error.into(),
    }
}

/// A worker has reported.
fn heard(names: &Names, pool: &mut Pool, staff: &mut Staff, report: &Delivery, now: Instant) {
    let Some(key) = names.key(report.routing_key.as_str()) else { return };
    let table = report.properties.headers().as_ref();
    let text = |name| table.and_then(|table| headers::text(table, name));
    if let (Some(id), Some(event)) = (text("x-worker-id"), text("x-event")) {
        staff.heard(id, event, now);
    }
    pool.handle(Event::Demand { key, extra: Duration::ZERO }, now);
}

struct Waiting {
    since: Instant,
    delivery: Delivery,
}

/// What this connection brought.
struct Here {
    /// Orphans whose queue is not there yet.
    waiting: BTreeMap<Key, Vec<Waiting>>,
    loads: BTreeMap<Key, Load>,
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
        if pool.tracker().wanted(&key).is_none() && pool.tracker().groups().count() >= CONTROLLER_GROUPS_MAX {
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

    /// Those that have waited too long.
    fn give_up(&mut self, now: Instant) -> Vec<Delivery> {
        let mut over = Vec::new();
        self.waiting.retain(|_, waiting| {
            let first = waiting.iter().position(|one| now.since(one.since) < CONTROLLER_ORPHAN_WAIT);
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
