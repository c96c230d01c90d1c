//! One connection to the broker: takes the pool lock, declares the topology, and runs the active controller until the connection
//! fails.

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

use super::broker_counts;
use super::dead_letters::{self, RejectCommand};
use super::error_replies::DeadLetterReason;
use super::external_demand;
use super::forwarding::{self, next_delivery, open_confirm_channel, try_next_delivery};
use super::poison_queue;
use super::policies;
use super::queue_jobs::{QueueJobKind, QueueJobResult, run_queue_jobs};
use super::queue_names::QueueNames;
use super::session_state::{DepthSample, is_group_limit_reached};
use super::status::Role;
use super::topology::{self, ArgumentSource, PRECONDITION_FAILED};
use super::{Controller, ControllerConfig, RecordedError};
use crate::amqp::{self, headers};
use crate::domain::group::Key;
use crate::domain::group::load::Load;
use crate::domain::group::pool::{Effect, Epoch, Event, StepResult};
use crate::domain::group::queue_polling::{self, PollPace};
use crate::limits::{
    AMQP_CALL_TIMEOUT, CONTROLLER_DEAD_LETTERS_MAX, CONTROLLER_ORPHANS_MAX, CONTROLLER_PLAN_DEBOUNCE,
    CONTROLLER_POISON_REQUESTS_MAX, CONTROLLER_POLICIES_TIMEOUT, CONTROLLER_QUEUE_CHECK_RETRY_DELAY,
    CONTROLLER_QUEUE_STEPS_QUEUED_MAX, CONTROLLER_RECONCILE_INTERVAL, CONTROLLER_REPORTS_BATCH_MAX,
    CONTROLLER_STANDBY_INTERVAL, DEMAND_COUNTS_MAX,
};

pub(super) struct SessionError {
    pub(super) reason: String,
}

impl From<lapin::Error> for SessionError {
    fn from(error: lapin::Error) -> Self {
        Self { reason: amqp::error_text(&error) }
    }
}

struct SessionChannels {
    orphans: Consumer,
    reports: Consumer,
    forwards: Channel,
}

pub(super) async fn run_session(controller: &mut Controller, epoch: u64) -> SessionError {
    let settings = controller.config.clone();
    let name = format!("journeyman controller of {}", settings.pool);
    let connection = match controller.run_while(settings.broker.connect(&name)).await {
        Ok(connection) => connection,
        Err(refused) => return SessionError { reason: refused.message },
    };
    match Box::pin(run_active(controller, &settings, Epoch(epoch), &connection)).await {
        Err(over) => over,
        Ok(never) => match never {},
    }
}

async fn run_active(
    controller: &mut Controller,
    settings: &ControllerConfig,
    epoch: Epoch,
    connection: &Connection,
) -> Result<std::convert::Infallible, SessionError> {
    let (names, clock, tally) = (&settings.names, controller.clock, Arc::clone(&controller.counters));
    let _lock = acquire_lock(controller, connection, names).await?;
    controller.set_role(Role::Starting);
    let SessionChannels { forwards, mut orphans, mut reports } =
        controller.run_while(declare_topology(settings, connection)).await?;
    controller.wait_for_workers().await;
    let (policy_results, mut policies) = mpsc::channel(1);
    let mut polls = JoinSet::new();
    if let Some(management) = settings.management.clone() {
        polls.spawn(policies::poll_policies(management, names.clone(), settings.queue_options, policy_results));
    }
    let argument_source = controller.reconcile_policies(&mut policies).await;
    declare_requests_exchange(controller, settings, connection, &mut policies).await?;
    controller.backoff.reset();
    controller.disconnect_reason = None;
    controller.set_role(Role::Active);
    tracing::info!(
        pool = settings.pool,
        broker = settings.broker.display_url(),
        "acquired the pool; this controller is active"
    );

    let (steps, to_do) = mpsc::channel(CONTROLLER_QUEUE_STEPS_QUEUED_MAX);
    let (depths, to_measure) = mpsc::channel(CONTROLLER_QUEUE_STEPS_QUEUED_MAX);
    let (done, mut results) = mpsc::channel(CONTROLLER_QUEUE_STEPS_QUEUED_MAX);
    let (ready, to_forward) = mpsc::channel(CONTROLLER_ORPHANS_MAX.into());
    let (back, mut strayed) = mpsc::channel(CONTROLLER_ORPHANS_MAX.into());
    let mut working = std::pin::pin!(run_queue_jobs(
        connection,
        names,
        settings.queue_options,
        argument_source,
        (to_do, to_measure),
        done
    ));
    let mut forwarding = std::pin::pin!(forwarding::forward_orphans(forwards, names, clock, to_forward, back, &tally));
    let mut keeping_up = std::pin::pin!(topology::restore_deleted(connection, names, settings.queue_options));
    let (rejects, to_reject) = mpsc::channel(usize::from(CONTROLLER_ORPHANS_MAX + CONTROLLER_DEAD_LETTERS_MAX));
    let (reject_events, mut rejected) = mpsc::channel(CONTROLLER_DEAD_LETTERS_MAX.into());
    let rejecting = dead_letters::reject_requests(settings, connection, to_reject, reject_events, Arc::clone(&tally));
    let mut rejecting = std::pin::pin!(rejecting);
    let (wishes, wished) = mpsc::channel(CONTROLLER_POISON_REQUESTS_MAX);
    let mut granting = std::pin::pin!(poison_queue::serve_poison_requests(connection, names, wished));
    controller.poison_requests = Some(wishes);
    let (told, mut broker_counts) = mpsc::channel(1);
    let mut counting = std::pin::pin!(async {
        match &settings.management {
            Some(management) => broker_counts::poll_broker_counts(management, names, told).await,
            None => std::future::pending().await,
        }
    });

    controller.pool.handle(Event::Connected(epoch), clock.now());
    let known_keys = controller.workers.load_known_keys();
    for key in controller.workers.counts(&known_keys).into_keys() {
        controller.pool.handle(Event::QueueFound(key), clock.now());
    }
    let (counts, mut counted) = mpsc::channel(DEMAND_COUNTS_MAX);
    let mut watching = JoinSet::new();
    for demand in &settings.demands {
        watching.spawn(external_demand::poll_demand(demand.clone(), counts.clone()));
    }
    let mut look = interval(CONTROLLER_RECONCILE_INTERVAL);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut measured = None;
    let (mut planned, mut planned_at) = (controller.pool.tracker().generation(), clock.now());
    loop {
        let changed = controller.pool.tracker().generation() != planned;
        let plan_at = changed.then(|| planned_at.plus(CONTROLLER_PLAN_DEBOUNCE));
        let deadline = controller.pool.next_deadline().into_iter().chain(plan_at).min();
        tokio::select! {
            biased;
            Some(finished) = results.recv() => controller.on_queue_job(epoch, finished),
            Some(orphan) = strayed.recv() => {
                if let Some(one_too_many) = controller.session.hold_returned(&mut controller.pool, orphan, clock.now()) {
                    let (delivery, reason) = *one_too_many;
                    drop(rejects.try_send(RejectCommand::Orphan(delivery, reason)));
                }
            }
            Some(counted) = counted.recv() => controller.on_demand_report(counted),
            Some(ask) = controller.requests.recv() => controller.handle(ask),
            news = controller.workers.next_event() => controller.on_driver_event(news),
            // Before external input: a flood must not delay work in progress.
            over = &mut working => return Err(over),
            over = &mut forwarding => {
                over?;
                return Err(stream_ended("forwarded requests"));
            }
            never = &mut keeping_up => match never {},
            over = &mut rejecting => match over? {},
            Some(event) = rejected.recv() => controller.on_reject_event(event, clock.now()),
            Some(result) = policies.recv() => controller.on_policy_result(result),
            Some(told) = broker_counts.recv() => controller.on_broker_counts(&told),
            () = &mut counting => return Err(stream_ended("counts")),
            () = &mut granting => return Err(stream_ended("wishes")),
            _ = look.tick() => {
                for (delivery, reason) in controller.on_tick() {
                    // The channel has room for CONTROLLER_ORPHANS_MAX.
                    drop(rejects.try_send(RejectCommand::Orphan(delivery, reason)));
                }
                controller.move_due_poison(&rejects);
                controller.pool.handle(Event::Tick, clock.now());
                controller.plan();
                planned = controller.pool.tracker().generation();
                measured = controller.request_depths(&depths, measured);
            }
            () = async { match deadline {
                Some(at) => clock.sleep_until(at).await,
                None => std::future::pending().await,
            } } => controller.pool.handle(Event::Tick, clock.now()),
            orphan = next_delivery(&mut orphans) => {
                let mut here = Poll::Ready(orphan);
                // One plan for all deliveries at hand.
                while let Poll::Ready(orphan) = here {
                    let delivery = orphan.ok_or_else(|| stream_ended("orphans"))??;
                    tally.orphans.increment();
                    if let Some(odd) = controller.session.hold_orphan(names, &mut controller.pool, delivery, clock.now()) {
                        let (delivery, reason) = *odd;
                        drop(rejects.try_send(RejectCommand::Orphan(delivery, reason)));
                    }
                    here = try_next_delivery(&mut orphans);
                }
            }
            report = next_delivery(&mut reports) => {
                let mut delivery = report.ok_or_else(|| stream_ended("reports"))??;
                controller.on_report(&delivery);
                // One acknowledgement for all reports at hand.
                for _ in 1..CONTROLLER_REPORTS_BATCH_MAX {
                    let Poll::Ready(more) = try_next_delivery(&mut reports) else { break };
                    delivery = more.ok_or_else(|| stream_ended("reports"))??;
                    controller.on_report(&delivery);
                }
                delivery.acker.ack(BasicAckOptions { multiple: true }).await?;
            }
        }
        while steps.capacity() > 0
            && let Some(effect) = controller.pool.next_effect()
        {
            match effect {
                Effect::RunStep { key, step, .. } => {
                    if steps.try_send((key.clone(), step)).is_err() {
                        let answered = Event::StepFinished { epoch, key, step, result: StepResult::Failed };
                        controller.pool.handle(answered, clock.now());
                    }
                }
                Effect::Reactivated { key, ready } => {
                    tracing::warn!(%key, ready, "the queue to delete holds requests; the group is active again");
                }
            }
        }
        controller.session.release_bound(&controller.pool, &ready, clock.now());
        controller.workers.store_known_keys(controller.pool.keys());
        // A plan visits every group, so changes are debounced.
        let generation = controller.pool.tracker().generation();
        if generation != planned && clock.now() >= planned_at.plus(CONTROLLER_PLAN_DEBOUNCE) {
            controller.plan();
            (planned, planned_at) = (generation, clock.now());
        }
    }
}

impl Controller {
    fn on_queue_job(&mut self, epoch: Epoch, finished: QueueJobResult) {
        let (QueueJobResult { key, kind: done, error: why }, now) = (finished, self.clock.now());
        if let QueueJobKind::Depth(_) = done {
            self.session.depth_checks.remove(&key);
        }
        if let Some(why) = why {
            self.last_error = Some(RecordedError { at: now, message: format!("queue operation for key {key}: {why}") });
        }
        match done {
            QueueJobKind::Step(step, answer) => {
                // First, so that a group with held requests is not released in the moment its queue is bound.
                if self.session.has_held(&key) {
                    self.pool.handle(Event::Demand { key: key.clone(), extra: Duration::ZERO }, now);
                }
                let count = if answer == StepResult::Failed {
                    &self.counters.queue_operation_failures
                } else {
                    &self.counters.queue_operations
                };
                count.increment();
                self.pool.handle(Event::StepFinished { epoch, key, step, result: answer }, now);
            }
            QueueJobKind::Depth(StepResult::Contents { ready, .. }) => {
                let held = self.session.counts.fresh(&key, now).map_or(0, |counted| counted.unacknowledged);
                // Waiting requests are demand: workers may only be slow to start.
                if ready > 0 || held > 0 {
                    self.pool.handle(Event::QueueCounted { key: key.clone(), ready, in_progress: held }, now);
                }
                self.session.depths.insert(key, DepthSample { ready, at: now });
            }
            QueueJobKind::Depth(StepResult::NotFound) => self.pool.handle(Event::Unroutable(key), now),
            QueueJobKind::Depth(StepResult::Failed) => {
                self.session.depth_backoff.insert(key, now.plus(CONTROLLER_QUEUE_CHECK_RETRY_DELAY));
            }
            QueueJobKind::Depth(StepResult::Done) => {}
        }
    }

    fn on_report(&mut self, report: &Delivery) {
        let Some(key) = self.config.names.parse_routing_key(report.routing_key.as_str()) else { return };
        let table = report.properties.headers().as_ref();
        let text = |name| table.and_then(|table| headers::text(table, name));
        let now = self.clock.now();
        self.counters.activity_reports.increment();
        if let (Some(id), Some(event)) = (text("x-worker-id"), text("x-event")) {
            self.workers.on_report(id, event, now);
        }
        // Any client can publish reports, so the group limit applies.
        if let Some(extra) = self.session.reports.admit(&key, now)
            && !is_group_limit_reached(&self.pool, &key)
        {
            self.pool.handle(Event::Demand { key, extra }, now);
        }
    }

    fn on_tick(&mut self) -> Vec<(Delivery, DeadLetterReason)> {
        let now = self.clock.now();
        self.overrides.expire(now);
        for key in self.overrides.keys_with_minimum() {
            self.pool.handle(Event::Demand { key: key.clone(), extra: Duration::ZERO }, now);
        }
        let waiting: Vec<Key> = self.session.held_keys().cloned().collect();
        for key in waiting {
            self.pool.handle(Event::Demand { key, extra: Duration::ZERO }, now);
        }
        let wanted: BTreeSet<&Key> = self.pool.tracker().groups().map(|(key, _)| key).collect();
        self.session.depths.retain(|key, _| wanted.contains(key));
        self.session.depth_backoff.retain(|_, until| *until > now);
        let known = self.pool.keys().cloned().collect();
        for (key, count) in self.workers.counts(&known) {
            self.pool.handle(Event::Workers { key, count }, now);
        }
        let room_is_left = self.counters.orphans.get() < CONTROLLER_ORPHANS_MAX.into();
        self.session.expire_orphans(&self.pool, room_is_left, now)
    }

    fn request_depths(&mut self, depths: &mpsc::Sender<Key>, from: Option<Key>) -> Option<Key> {
        let (now, attended) = (self.clock.now(), self.workers.keys_with_idle_workers(self.clock.now()));
        let due = |key: &&Key| {
            let last = self.session.depths.get(*key);
            let held = self.session.loads.get(*key).map_or(0, Load::in_progress);
            let calm = held == 0 && last.is_some_and(|depth| depth.ready == 0);
            let is_attended = attended.as_ref().is_none_or(|keys| keys.contains(key));
            let pace = if calm && is_attended { PollPace::Quiet } else { PollPace::Active };
            queue_polling::is_due(last.map(|depth| now.since(depth.at)), pace)
        };
        let keys = || {
            let groups = self.pool.tracker().groups().map(|(key, _)| key);
            let free = |key: &&Key| {
                !self.session.depth_checks.contains(*key) && !self.session.depth_backoff.contains_key(*key)
            };
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
        self.session.depth_checks.extend(sent);
        one_too_many
    }

    pub(super) fn plan(&mut self) {
        let (now, concurrency) = (self.clock.now(), self.config.scaling.limits.concurrency);
        let busy = self.workers.busy_by_key(now);
        let load = |key: &Key| match self.session.depths.get(key) {
            Some(DepthSample { ready, .. }) => {
                let busy = busy.get(key).copied().unwrap_or_default();
                Load::new(*ready, self.session.counts.fresh(key, now), busy, concurrency)
            }
            None => Load::unknown(),
        };
        self.session.loads = self.pool.tracker().groups().map(|(key, _)| (key.clone(), load(key))).collect();
        let mut loads = self.session.loads.clone();
        for key in self.demands.values().map(|known| &known.key) {
            let own = loads.get(key).copied().unwrap_or_default();
            loads.insert(key.clone(), self.add_demand(key, own));
        }
        self.workers.plan(self.pool.tracker(), &loads, &self.overrides, now);
    }

    fn on_broker_counts(&mut self, told: &broker_counts::CountResult) {
        let (now, first) = (self.clock.now(), self.session.counts.is_empty());
        self.session.counts.update(told, now);
        for (key, counted) in told.iter().flatten() {
            // Unknown queues on the first count were declared by another controller. Later they may be stale.
            if first && self.pool.progress(key).is_none() {
                self.pool.handle(Event::QueueFound(key.clone()), now);
            }
            if counted.unacknowledged > 0 {
                let seen = Event::QueueCounted { key: key.clone(), ready: 0, in_progress: counted.unacknowledged };
                self.pool.handle(seen, now);
            }
        }
    }

    /// Waits briefly for the policies, so that requests are not delayed when a pool is taken over.
    async fn reconcile_policies(&mut self, policies: &mut mpsc::Receiver<policies::PolicyCheck>) -> ArgumentSource {
        self.policy_result = None;
        if self.config.management.is_none() {
            return ArgumentSource::Declaration;
        }
        let no_reply = || Err(format!("no reply from the management interface within {CONTROLLER_POLICIES_TIMEOUT:?}"));
        let result = self.run_while(timeout(CONTROLLER_POLICIES_TIMEOUT, policies.recv())).await;
        self.on_policy_result(result.ok().flatten().unwrap_or_else(no_reply));
        if self.has_policies() { ArgumentSource::Policy } else { ArgumentSource::Declaration }
    }

    fn has_policies(&self) -> bool {
        matches!(self.policy_result, Some(Ok(_)))
    }

    fn on_policy_result(&mut self, result: policies::PolicyCheck) {
        let pool = &self.config.pool;
        match (&result, &self.policy_result) {
            (Err(why), Some(Err(before))) if why == before => {}
            (Err(why), _) => {
                tracing::warn!(
                    pool,
                    "cannot apply policies, so TTL, length and limits hold for new queues only: {why}"
                );
                self.last_error = Some(RecordedError { at: self.clock.now(), message: format!("policies: {why}") });
            }
            (Ok(_), Some(Err(_))) => {
                tracing::info!(pool, "policies applied: TTL, length and limits hold for all queues");
            }
            (Ok(policies::PolicyChange::Applied), Some(Ok(_))) => {
                tracing::warn!(pool, "the policies of the pool were changed or deleted; applied them again");
            }
            (Ok(_), _) => {}
        }
        self.policy_result = Some(result);
    }
}

async fn declare_topology(
    settings: &ControllerConfig,
    connection: &Connection,
) -> Result<SessionChannels, SessionError> {
    let names = &settings.names;
    let channel = connection.create_channel().await?;
    timeout(AMQP_CALL_TIMEOUT, topology::declare(&channel, names, settings.queue_options)).await.map_err(|_| {
        SessionError { reason: format!("declaring the queues of the pool took more than {AMQP_CALL_TIMEOUT:?}") }
    })??;
    Ok(SessionChannels {
        orphans: consume(connection, &names.orphan_queue(), CONTROLLER_ORPHANS_MAX).await?,
        reports: consume(connection, &names.activity_queue(), CONTROLLER_DEAD_LETTERS_MAX).await?,
        forwards: open_confirm_channel(connection).await?,
    })
}

async fn declare_requests_exchange(
    controller: &mut Controller,
    settings: &ControllerConfig,
    connection: &Connection,
    policies: &mut mpsc::Receiver<policies::PolicyCheck>,
) -> Result<(), SessionError> {
    let (names, keeping) = (&settings.names, settings.queue_options);
    let silent =
        |_| SessionError { reason: format!("declaring the requests exchange took more than {AMQP_CALL_TIMEOUT:?}") };
    let declaring = async { topology::declare_requests(&connection.create_channel().await?, names, keeping).await };
    match controller.run_while(timeout(AMQP_CALL_TIMEOUT, declaring)).await.map_err(silent)? {
        Err(error) if settings.management.is_some() && amqp::reply_code(&error) == Some(PRECONDITION_FAILED) => {
            if !controller.has_policies() {
                // An exchange with other arguments works only with the policy.
                if let Some(result) = controller.run_while(policies.recv()).await {
                    controller.on_policy_result(result);
                }
            }
            if !controller.has_policies() {
                return Err(error.into());
            }
            let why = amqp::error_text(&error);
            tracing::warn!("the requests exchange exists with other arguments; adopting it: {why}");
            let taking = async { topology::adopt_requests_exchange(&connection.create_channel().await?, names).await };
            Ok(controller.run_while(timeout(AMQP_CALL_TIMEOUT, taking)).await.map_err(silent)??)
        }
        other => Ok(other?),
    }
}

pub(super) fn stream_ended(what: &str) -> SessionError {
    SessionError { reason: format!("the stream of {what} ended") }
}

async fn acquire_lock(
    controller: &mut Controller,
    connection: &Connection,
    names: &QueueNames,
) -> Result<Channel, SessionError> {
    let options = QueueDeclareOptions { exclusive: true, auto_delete: true, ..QueueDeclareOptions::default() };
    loop {
        let declared = async {
            let channel = connection.create_channel().await?;
            let declaring = channel.queue_declare(names.lock_queue().into(), options, FieldTable::default());
            declaring.await.map(|_| channel)
        };
        match controller.run_while(declared).await {
            Ok(channel) => return Ok(channel),
            Err(error) if amqp::reply_code(&error) == Some(amqp::RESOURCE_LOCKED) => {
                if controller.role != Role::Standby {
                    tracing::info!("another controller holds the pool; standing by");
                    controller.set_role(Role::Standby);
                    controller.disconnect_reason = None;
                    controller.backoff.reset();
                }
                controller.run_while(sleep(CONTROLLER_STANDBY_INTERVAL)).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}

pub(super) async fn consume(connection: &Connection, queue: &str, prefetch: u16) -> lapin::Result<Consumer> {
    let channel = connection.create_channel().await?;
    channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
    channel.basic_consume(queue.into(), "".into(), BasicConsumeOptions::default(), FieldTable::default()).await
}
