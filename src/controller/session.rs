//! One connection to the broker: the lock, the pool's exchanges and queues, and what comes by them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, Consumer};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::answers::{self, Answers, Obituary};
use super::counts;
use super::demand;
use super::inventory;
use super::letters::{self, answer_letters};
use super::names::Names;
use super::policies;
use super::publish::{self, at_hand, confirming, next};
use super::steps::{Done, Finished, work};
use super::topology::{self, PRECONDITION_FAILED, Said};
use super::view::Role;
use super::waiting::{Depth, full};
use super::{Controller, Ended, Settings};
use crate::amqp::{self, headers};
use crate::domain::group::Key;
use crate::domain::group::load::Load;
use crate::domain::group::looks::{self, Pace};
use crate::domain::group::pool::{Answer, Effect, Epoch, Event};
use crate::limits::{
    AMQP_CALL_TIMEOUT, CONTROLLER_LETTERS_MAX, CONTROLLER_LOOK_EVERY, CONTROLLER_LOOK_REST, CONTROLLER_ORPHANS_MAX,
    CONTROLLER_PLAN_REST, CONTROLLER_POLICIES_WAIT, CONTROLLER_REPORTS_MAX, CONTROLLER_STANDBY_LOOK,
    CONTROLLER_STEPS_MAX, CONTROLLER_WISHES_MAX, DEMAND_COUNTS_MAX,
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

/// What a session has its messages by.
struct Channels {
    orphans: Consumer,
    reports: Consumer,
    forwards: Channel,
    asides: Channel,
}

/// Controls the pool for as long as the connection lasts.
pub(super) async fn live(controller: &mut Controller, epoch: u64) -> Over {
    let settings = controller.settings.clone();
    let name = format!("journeyman controller of {}", settings.pool);
    let connection = match controller.meanwhile(settings.broker.connect(&name)).await {
        Ok(connection) => connection,
        Err(refused) => return Over { why: refused.what },
    };
    match Box::pin(control(controller, &settings, Epoch(epoch), &connection)).await {
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
    let Channels { asides, forwards, mut orphans, mut reports } =
        controller.meanwhile(open(settings, connection)).await?;
    controller.musters().await;
    let mut looks = policies::Looks::new(settings.management.as_ref(), names, settings.keeping);
    let said = controller.agree(&mut looks).await;
    open_requests(controller, settings, connection, &mut looks).await?;
    controller.row.reset();
    controller.lost = None;
    controller.becomes(Role::Active);
    tracing::info!(pool = settings.pool, broker = settings.broker.shown(), "this is the controller of the pool");

    let (steps, to_do) = mpsc::channel(CONTROLLER_STEPS_MAX);
    let (depths, to_measure) = mpsc::channel(CONTROLLER_STEPS_MAX);
    let (done, mut results) = mpsc::channel(CONTROLLER_STEPS_MAX);
    let (ready, to_forward) = mpsc::channel(CONTROLLER_ORPHANS_MAX.into());
    let (back, mut strayed) = mpsc::channel(CONTROLLER_ORPHANS_MAX.into());
    let mut working = std::pin::pin!(work(connection, names, settings.keeping, said, (to_do, to_measure), done));
    let mut forwarding = std::pin::pin!(publish::forward(forwards, names, clock, to_forward, back, &tally));
    let mut keeping_up = std::pin::pin!(topology::keep_up(connection, names, settings.keeping));
    let (killers, mut killed) = mpsc::channel(CONTROLLER_LETTERS_MAX.into());
    let mut letters = std::pin::pin!(answer_letters(settings, connection, killers, Arc::clone(&tally)));
    let answers = controller.meanwhile(Answers::open(connection, settings, Arc::clone(&tally))).await?;
    let (aside, to_put_aside) = mpsc::channel(CONTROLLER_LETTERS_MAX.into());
    let (refused, mut not_aside) = mpsc::channel(CONTROLLER_LETTERS_MAX.into());
    let mut putting =
        std::pin::pin!(letters::put_aside(asides, answers, names, to_put_aside, refused, Arc::clone(&tally)));
    let answers = controller.meanwhile(Answers::open(connection, settings, Arc::clone(&tally))).await?;
    let (condemned, to_bury) = mpsc::channel(CONTROLLER_ORPHANS_MAX.into());
    let mut burying = std::pin::pin!(answers::bury(answers, to_bury));
    let (wishes, wished) = mpsc::channel(CONTROLLER_WISHES_MAX);
    let mut granting = std::pin::pin!(inventory::grant(connection, names, clock, wished));
    controller.wishes = Some(wishes);
    let (told, mut broker_counts) = mpsc::channel(1);
    let mut counting = std::pin::pin!(async {
        match &settings.management {
            Some(management) => counts::count(management, names, told).await,
            None => std::future::pending().await,
        }
    });

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
    let mut measured = None;
    let (mut planned, mut planned_at) = (controller.pool.tracker().generation(), clock.now());
    loop {
        let changed = controller.pool.tracker().generation() != planned;
        let plan_at = changed.then(|| planned_at.plus(CONTROLLER_PLAN_REST));
        let deadline = controller.pool.next_deadline().into_iter().chain(plan_at).min();
        tokio::select! {
            biased;
            Some(finished) = results.recv() => controller.finished(epoch, finished),
            Some(orphan) = strayed.recv() => {
                if let Some(one_too_many) = controller.here.take_back(&mut controller.pool, orphan, clock.now()) {
                    drop(condemned.try_send(*one_too_many));
                }
            }
            Some(counted) = counted.recv() => controller.counted(counted),
            Some(ask) = controller.asked.recv() => controller.hear(ask),
            news = controller.staff.news() => controller.told(news),
            // Before what comes from outside: a flood of that must hold up nothing that was begun.
            over = &mut working => return Err(over),
            over = &mut forwarding => {
                over?;
                return Err(ended("forwarded requests"));
            }
            never = &mut keeping_up => match never {},
            over = &mut letters => return Err(over),
            over = &mut putting => return Err(over),
            over = &mut burying => return Err(over),
            Some(letter) = not_aside.recv() => controller.take_back(letter, clock.now()),
            look = looks.next() => controller.looked(look),
            Some(told) = broker_counts.recv() => controller.broker_counted(&told),
            () = &mut counting => return Err(ended("counts")),
            () = &mut granting => return Err(ended("wishes")),
            _ = look.tick() => {
                for given_up in controller.look_after() {
                    // As many as there can be in hand have room.
                    drop(condemned.try_send(given_up));
                }
                controller.condemn(&aside);
                controller.pool.handle(Event::Tick, clock.now());
                controller.plan();
                planned = controller.pool.tracker().generation();
                measured = controller.measure(&depths, measured);
            }
            () = async { match deadline {
                Some(at) => clock.sleep_until(at).await,
                None => std::future::pending().await,
            } } => controller.pool.handle(Event::Tick, clock.now()),
            Some(delivery) = killed.recv() => controller.here.take_letter(delivery, clock.now()),
            orphan = next(&mut orphans) => {
                let mut here = Poll::Ready(orphan);
                // As many as there can be in hand: those that are here already cost one plan together.
                while let Poll::Ready(orphan) = here {
                    let delivery = orphan.ok_or_else(|| ended("orphans"))??;
                    tally.orphans.add();
                    if let Some(odd) = controller.here.take_in(names, &mut controller.pool, delivery, clock.now()) {
                        drop(condemned.try_send(*odd));
                    }
                    here = at_hand(&mut orphans);
                }
            }
            report = next(&mut reports) => {
                let mut delivery = report.ok_or_else(|| ended("reports"))??;
                controller.heard(&delivery);
                // Those that are here already cost one look at the groups, and one acknowledgement, together.
                for _ in 1..CONTROLLER_REPORTS_MAX {
                    let Poll::Ready(more) = at_hand(&mut reports) else { break };
                    delivery = more.ok_or_else(|| ended("reports"))??;
                    controller.heard(&delivery);
                }
                delivery.acker.ack(BasicAckOptions { multiple: true }).await?;
            }
        }
        // What there is no room for waits in its rules, until one of those that are under way is done.
        while steps.capacity() > 0
            && let Some(effect) = controller.pool.next_effect()
        {
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
        controller.here.let_go(&controller.pool, &ready, clock.now());
        controller.staff.remember(controller.pool.keys());
        // A plan looks at every group: of many changes each does not have its own.
        let generation = controller.pool.tracker().generation();
        if generation != planned && clock.now() >= planned_at.plus(CONTROLLER_PLAN_REST) {
            controller.plan();
            (planned, planned_at) = (generation, clock.now());
        }
    }
}

impl Controller {
    /// A job about a queue is done.
    fn finished(&mut self, epoch: Epoch, finished: Finished) {
        let (Finished { key, done, why }, now) = (finished, self.clock.now());
        if let Done::Depth(_) = done {
            self.here.looking.remove(&key);
        }
        if let Some(why) = why {
            self.fault = Some(Ended { at: now, what: format!("a step about the queue of {key}: {why}") });
        }
        match done {
            Done::Step(step, answer) => {
                // First: what waits for its queue must not find that given up in the moment in which it is there.
                if self.here.awaits(&key) {
                    self.pool.handle(Event::Demand { key: key.clone(), extra: Duration::ZERO }, now);
                }
                let count = if answer == Answer::Failed { &self.tally.steps_failed } else { &self.tally.steps };
                count.add();
                self.pool.handle(Event::Answered { epoch, key, step, answer }, now);
            }
            Done::Depth(Answer::Holds { ready, .. }) => {
                let held = self.here.counts.of(&key, now).map_or(0, |counted| counted.unacknowledged);
                // What waits is asked for: its workers may only be slow to come up.
                if ready > 0 || held > 0 {
                    self.pool.handle(Event::Seen { key: key.clone(), ready, held }, now);
                }
                self.here.depths.insert(key, Depth { ready, at: now });
            }
            Done::Depth(Answer::Missing) => self.pool.handle(Event::Strayed(key), now),
            // Others are looked into meanwhile.
            Done::Depth(Answer::Failed) => drop(self.here.unheard.insert(key, now.plus(CONTROLLER_LOOK_REST))),
            Done::Depth(Answer::Done) => {}
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
        if let Some(extra) = self.here.reports.take(&key, now)
            && !full(&self.pool, &key)
        {
            self.pool.handle(Event::Demand { key, extra }, now);
        }
    }

    /// Tells the rules who is there. Answers with the orphans that have waited too long.
    fn look_after(&mut self) -> Vec<(Delivery, Obituary)> {
        let now = self.clock.now();
        self.orders.tick(now);
        for key in self.orders.kept() {
            self.pool.handle(Event::Demand { key: key.clone(), extra: Duration::ZERO }, now);
        }
        let waiting: Vec<Key> = self.here.awaited().cloned().collect();
        for key in waiting {
            self.pool.handle(Event::Demand { key, extra: Duration::ZERO }, now);
        }
        let wanted: BTreeSet<&Key> = self.pool.tracker().groups().map(|(key, _)| key).collect();
        self.here.depths.retain(|key, _| wanted.contains(key));
        self.here.unheard.retain(|_, until| *until > now);
        let known = self.pool.keys().cloned().collect();
        for (key, count) in self.staff.counts(&known) {
            self.pool.handle(Event::Workers { key, count }, now);
        }
        let room_is_left = self.tally.orphans.get() < CONTROLLER_ORPHANS_MAX.into();
        self.here.give_up(&self.pool, room_is_left, now)
    }

    /// Asks what is in queues that are due, in the order of their keys and from the one on at which there was no room the last time.
    /// Answers with the first that there is none for.
    fn measure(&mut self, depths: &mpsc::Sender<Key>, from: Option<Key>) -> Option<Key> {
        let (now, attended) = (self.clock.now(), self.staff.attended(self.clock.now()));
        let due = |key: &&Key| {
            let last = self.here.depths.get(*key);
            let held = self.here.loads.get(*key).map_or(0, Load::held);
            let calm = held == 0 && last.is_some_and(|depth| depth.ready == 0);
            let is_attended = attended.as_ref().is_none_or(|keys| keys.contains(key));
            let pace = if calm && is_attended { Pace::Quiet } else { Pace::Brisk };
            looks::is_due(last.map(|depth| now.since(depth.at)), pace)
        };
        let keys = || {
            let groups = self.pool.tracker().groups().map(|(key, _)| key);
            let free = |key: &&Key| !self.here.looking.contains(*key) && !self.here.unheard.contains_key(*key);
            groups.filter(|key| self.pool.is_bound(key)).filter(free).filter(due)
        };
        let begins = |key: &&Key| from.as_ref().is_none_or(|from| *key >= from);
        let mut around = keys().filter(begins).chain(keys().filter(|key| !begins(key)));
        let mut sent = Vec::new();
        let one_too_many = around.find(|key| {
            let is_sent = depths.try_send((*key).clone()).is_ok();
            sent.extend(is_sent.then(|| (*key).clone()));
            !is_sent
        });
        let one_too_many = one_too_many.cloned();
        self.here.looking.extend(sent);
        one_too_many
    }

    pub(super) fn plan(&mut self) {
        let (now, concurrency) = (self.clock.now(), self.settings.tuning.limits.concurrency);
        let busy = self.staff.busy(now);
        let load = |key: &Key| match self.here.depths.get(key) {
            Some(Depth { ready, .. }) => {
                let busy = busy.get(key).copied().unwrap_or_default();
                Load::of(*ready, self.here.counts.of(key, now), busy, concurrency)
            }
            None => Load::unknown(),
        };
        self.here.loads = self.pool.tracker().groups().map(|(key, _)| (key.clone(), load(key))).collect();
        let mut loads = self.here.loads.clone();
        for key in self.demands.values().map(|known| &known.key) {
            let own = loads.get(key).copied().unwrap_or_default();
            loads.insert(key.clone(), self.with_demand(key, own));
        }
        self.staff.plan(self.pool.tracker(), &loads, &self.orders, now);
    }

    /// The broker has counted, or not.
    fn broker_counted(&mut self, told: &counts::Told) {
        let (now, first) = (self.clock.now(), self.here.counts.is_first());
        let policy = self.goes_by_policy().then(|| policies::of_queues(&self.settings.names));
        self.here.counts.take(told, policy.as_deref(), now);
        for (key, counted) in told.iter().flatten() {
            // Queues that nobody here remembers: they were made by a controller elsewhere, or by somebody else. Later on one that is
            // still counted may have been deleted meanwhile.
            if first && self.pool.standing(key).is_none() {
                self.pool.handle(Event::Found(key.clone()), now);
            }
            if counted.unacknowledged > 0 {
                let seen = Event::Seen { key: key.clone(), ready: 0, held: counted.unacknowledged };
                self.pool.handle(seen, now);
            }
        }
    }

    /// Makes the pool's policies, where that is possible at once: whoever takes a pool over has requests that wait. Answers with what is
    /// left to be said of each queue as long as this connection lasts.
    async fn agree(&mut self, looks: &mut policies::Looks<'_>) -> Said {
        self.by_policy = None;
        if self.settings.management.is_none() {
            return Said::All;
        }
        let unanswered = || Err(format!("the management interface has not answered in {CONTROLLER_POLICIES_WAIT:?}"));
        let look = self.meanwhile(timeout(CONTROLLER_POLICIES_WAIT, looks.next())).await;
        self.looked(look.unwrap_or_else(|_| unanswered()));
        if self.goes_by_policy() { Said::ByPolicy } else { Said::All }
    }

    fn goes_by_policy(&self) -> bool {
        matches!(self.by_policy, Some(Ok(_)))
    }

    /// The pool's policies were looked at. What is said of them is said once.
    fn looked(&mut self, look: policies::Look) {
        let (pool, before) = (&self.settings.pool, self.by_policy.as_ref());
        match &look {
            Err(why) if before.is_some_and(|before| before.as_ref().err() == Some(why)) => {}
            Err(why) => {
                if before.is_some_and(Result::is_ok) {
                    tracing::warn!(pool, "whether time, length and limits of queues still hold is not known: {why}");
                } else {
                    tracing::warn!(
                        pool,
                        "time, length and limits hold for queues that are made from now on only: {why}"
                    );
                }
                self.fault = Some(Ended { at: self.clock.now(), what: format!("policies: {why}") });
            }
            Ok(_) if before.is_some_and(Result::is_err) => {
                tracing::info!(
                    pool,
                    "time, length and limits hold for all queues now: its policies are what they should be"
                );
            }
            Ok(policies::Made::Now) if before.is_some() => {
                tracing::warn!(
                    pool,
                    "somebody has changed the pool's policies or taken them away; they are made again"
                );
            }
            Ok(_) => {}
        }
        self.by_policy = Some(look);
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
        asides: confirming(connection).await?,
    })
}

/// Makes the exchange of requests, or takes it as it is where a policy says the rest.
async fn open_requests(
    controller: &mut Controller,
    settings: &Settings,
    connection: &Connection,
    looks: &mut policies::Looks<'_>,
) -> Result<(), Over> {
    let (names, keeping) = (&settings.names, settings.keeping);
    let silent = |_| Over { why: format!("the exchange of requests was not made in {AMQP_CALL_TIMEOUT:?}") };
    let declaring = async { topology::declare_requests(&connection.create_channel().await?, names, keeping).await };
    match controller.meanwhile(timeout(AMQP_CALL_TIMEOUT, declaring)).await.map_err(silent)? {
        Err(error) if settings.management.is_some() && amqp::code(&error) == Some(PRECONDITION_FAILED) => {
            if !controller.goes_by_policy() {
                // Where it was made otherwise, all depends on what a policy says.
                let look = controller.meanwhile(looks.next()).await;
                controller.looked(look);
            }
            if !controller.goes_by_policy() {
                return Err(error.into());
            }
            let why = amqp::shown(&error);
            tracing::warn!("the exchange of requests was made otherwise, and is taken as it is: {why}");
            let taking = async { topology::take_requests(&connection.create_channel().await?, names).await };
            Ok(controller.meanwhile(timeout(AMQP_CALL_TIMEOUT, taking)).await.map_err(silent)??)
        }
        other => Ok(other?),
    }
}

pub(super) fn ended(what: &str) -> Over {
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

pub(super) async fn consume(connection: &Connection, queue: &str, prefetch: Option<u16>) -> lapin::Result<Consumer> {
    let channel = connection.create_channel().await?;
    let prefetch = prefetch.unwrap_or(CONTROLLER_LETTERS_MAX);
    channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
    channel.basic_consume(queue.into(), "".into(), BasicConsumeOptions::default(), FieldTable::default()).await
}
