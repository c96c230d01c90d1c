//! One connection to the broker: takes the pool lock, declares the topology, and runs the active controller until the connection
//! fails.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::time::Duration;

use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use lapin::message::Delivery;
use lapin::options::BasicAckOptions;
use lapin::{Channel, Connection, Consumer};
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};

use super::external_demand::poll_demand;
use super::held_orphans::{HeldOrphans, is_group_limit_reached};
use super::policies::{self, PolicyCheck};
use super::queue_jobs::{QueueJob, QueueJobResult, QueueJobs};
use super::queue_names::QueueNames;
use super::session_error::{SessionError, consume, declare_timed_out, stream_ended};
use super::status::Role;
use super::topology::{ArgumentSource, Topology};
use super::unacknowledged_counts::{self, CountResult, UnacknowledgedCounts};
use super::{Controller, ControllerConfig, dead_letters, forwarding};
use journeyman_domain::group::Key;
use journeyman_domain::group::load::Load;
use journeyman_domain::group::pool::{DepthSample, Event, NextTaker, StepResult};
use journeyman_domain::group::scale::{GroupWorker, WorkerActivity};
use journeyman_domain::limits::{
    AMQP_CALL_TIMEOUT, CONTROLLER_COUNTS_INTERVAL, CONTROLLER_DEAD_LETTERS_MAX, CONTROLLER_ORPHANS_MAX,
    CONTROLLER_PLAN_DEBOUNCE, CONTROLLER_POLICIES_INTERVAL, CONTROLLER_QUEUE_CHECK_RETRY_DELAY,
    CONTROLLER_QUIET_QUEUE_INTERVAL, CONTROLLER_RECONCILE_INTERVAL, CONTROLLER_REPORTS_BATCH_MAX,
    CONTROLLER_SESSION_EVENTS_MAX,
};
use journeyman_domain::time::Instant;
use journeyman_platform::amqp::management::Management;
use journeyman_platform::amqp::{self, headers};
use journeyman_platform::host::clock::or_pending;

/// What is known over one connection.
#[derive(Default)]
pub(super) struct SessionState {
    pub(super) held: HeldOrphans,
    depth_backoff: BTreeMap<Key, Instant>,
    pub(super) loads: BTreeMap<Key, Load>,
    counts: UnacknowledgedCounts,
}

enum SessionEvent {
    Policies(PolicyCheck),
    Counts(CountResult),
}

struct SessionChannels {
    orphans: Consumer,
    reports: Consumer,
    forwards: Channel,
}

/// Ends with its session.
type SessionTask<'a> = Pin<Box<dyn Future<Output = SessionError> + Send + 'a>>;

pub(super) async fn run_session(controller: &mut Controller) -> Result<Infallible, SessionError> {
    let settings = controller.config.clone();
    let name = format!("journeyman controller of {}", settings.pool);
    let connected = controller.run_while(settings.broker.connect(&name)).await;
    let connection = connected.map_err(|refused| SessionError { reason: refused.message })?;
    Box::pin(run_active(controller, &settings, &connection)).await
}

async fn run_active(
    controller: &mut Controller,
    settings: &ControllerConfig,
    connection: &Connection,
) -> Result<Infallible, SessionError> {
    let (names, clock) = (&settings.names, controller.clock);
    let _lock = acquire_lock(controller, connection, names).await?;
    controller.set_role(Role::Starting);
    let argument_source = ArgumentSource::Declaration;
    let mut topology = Topology { connection, names, settings: &settings.settings, argument_source };
    let SessionChannels { forwards, mut orphans, mut reports } =
        controller.run_while(declare_topology(topology)).await?;
    controller.wait_for_workers().await;
    controller.policy_result = None;
    if let Some(Ok(_)) = controller.apply_policies().await {
        topology.argument_source = ArgumentSource::Policy;
    }
    declare_requests_exchange(controller, topology).await?;

    let (events, mut received) = mpsc::channel(CONTROLLER_SESSION_EVENTS_MAX);
    let (demand_reports, mut demands) = mpsc::channel(CONTROLLER_SESSION_EVENTS_MAX);
    let (rejects, to_reject) = mpsc::channel(usize::from(CONTROLLER_ORPHANS_MAX));
    let counters = controller.counters.clone();
    let mut tasks = FuturesUnordered::<SessionTask<'_>>::new();
    tasks.push(Box::pin(topology.restore_deleted()));
    let failures = controller.workers.failures();
    tasks.push(Box::pin(dead_letters::reject_requests(settings, connection, to_reject, failures, clock, counters)));
    if let Some(management) = &settings.management {
        tasks.push(Box::pin(poll_counts(management, names, &events)));
        tasks.push(Box::pin(poll_policies(management, settings, &events)));
    }
    for demand in &settings.demands {
        tasks.push(Box::pin(poll_demand(demand, &demand_reports)));
    }
    let mut jobs = QueueJobs::new(topology, settings);
    let mut forwarding = FuturesUnordered::new();

    controller.become_active().await;
    let mut ticks = interval(CONTROLLER_RECONCILE_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut planned, mut planned_at) = (controller.pool.tracker().changes(), clock.now());
    loop {
        let changed = controller.pool.tracker().changes() != planned;
        let plan_at = changed.then(|| planned_at.plus(CONTROLLER_PLAN_DEBOUNCE));
        let deadline = controller.pool.next_deadline().into_iter().chain(plan_at).min();
        tokio::select! {
            biased;
            // External input comes last: a flood must not delay work in progress.
            Some(finished) = jobs.next() => controller.on_queue_job(finished),
            Some(forwarded) = forwarding.next() => {
                let more = std::iter::from_fn(|| forwarding.next().now_or_never().flatten());
                let results = std::iter::once(forwarded).chain(more).collect();
                controller.on_forwarded(results).await?;
            }
            Some(request) = controller.requests.recv() => controller.handle(request),
            event = controller.workers.next_event() => controller.on_driver_event(event),
            Some(over) = tasks.next() => return Err(over),
            Some(event) = received.recv() => match event {
                SessionEvent::Policies(result) => controller.on_policy_result(result),
                SessionEvent::Counts(counts) => controller.on_broker_counts(counts),
            },
            Some(report) = demands.recv() => controller.on_demand_report(report),
            _ = ticks.tick() => {
                controller.on_tick();
                controller.pool.handle(Event::Tick, clock.now());
                controller.plan();
                planned = controller.pool.tracker().changes();
                controller.request_depths(&mut jobs);
            }
            () = or_pending(deadline.map(|at| clock.sleep_until(at))) => controller.pool.handle(Event::Tick, clock.now()),
            orphan = orphans.next() => {
                let mut next = Some(orphan);
                // One plan for all deliveries at hand.
                while let Some(orphan) = next {
                    let delivery = orphan.ok_or_else(|| stream_ended("orphans"))??;
                    controller.counters.lock().orphans_held += 1;
                    controller.session.held.add(names, &mut controller.pool, delivery, clock.now());
                    next = orphans.next().now_or_never();
                }
            }
            report = reports.next() => {
                let mut delivery = report.ok_or_else(|| stream_ended("reports"))??;
                controller.on_report(&delivery);
                // One acknowledgement for all reports at hand.
                for _ in 1..CONTROLLER_REPORTS_BATCH_MAX {
                    let Some(more) = reports.next().now_or_never() else { break };
                    delivery = more.ok_or_else(|| stream_ended("reports"))??;
                    controller.on_report(&delivery);
                }
                delivery.acker.ack(BasicAckOptions { multiple: true }).await?;
            }
        }
        while jobs.running_steps < jobs.steps_max
            && let Some(effect) = controller.pool.next_effect()
        {
            jobs.start_step(effect.key, effect.step);
        }
        for (key, request) in controller.session.held.next_forwards(&controller.pool, clock.now()) {
            forwarding.push(forwarding::forward(&forwards, names, key, request));
        }
        for reject in controller.session.held.rejects.drain(..) {
            // The channel has room for the prefetch.
            rejects.try_send(reject).ok();
        }
        controller.workers.store_known_keys(controller.pool.keys());
        // A plan visits every group, so changes are debounced.
        let changes = controller.pool.tracker().changes();
        if changes != planned && clock.now() >= planned_at.plus(CONTROLLER_PLAN_DEBOUNCE) {
            controller.plan();
            (planned, planned_at) = (changes, clock.now());
        }
    }
}

async fn poll_counts(management: &Management, names: &QueueNames, events: &mpsc::Sender<SessionEvent>) -> SessionError {
    loop {
        events.send(SessionEvent::Counts(unacknowledged_counts::count_queues(management, names).await)).await.ok();
        sleep(CONTROLLER_COUNTS_INTERVAL).await;
    }
}

/// Policies may be deleted, and the management interface may start late.
async fn poll_policies(
    management: &Management,
    config: &ControllerConfig,
    events: &mpsc::Sender<SessionEvent>,
) -> SessionError {
    loop {
        let result = policies::apply_policies(management, &config.names, &config.settings).await;
        events.send(SessionEvent::Policies(result)).await.ok();
        sleep(CONTROLLER_POLICIES_INTERVAL).await;
    }
}

impl Controller {
    fn on_queue_job(&mut self, finished: QueueJobResult) {
        let (QueueJobResult { key, job, result, error }, now) = (finished, self.clock.now());
        if let Some(why) = &error {
            self.counters.lock().values.queue_operation_failures += u64::from(job != QueueJob::Depth);
            self.record_error(format!("queue operation for key {key}: {why}"));
        }
        match (job, result) {
            (QueueJob::Step(step), result) => {
                self.session.held.set_refusal(&key, error.filter(|_| result == StepResult::Refused));
                // First, so that a group with held requests is not released in the moment its queue is bound.
                if self.session.held.contains(&key) {
                    self.pool.handle(Event::demand(key.clone()), now);
                }
                self.pool.handle(Event::StepFinished { key, step, result }, now);
            }
            (QueueJob::Depth, StepResult::Contents { ready, .. }) => {
                let held = self.session.counts.fresh(&key, now).unwrap_or_default();
                // Waiting requests are demand: workers may only be slow to start.
                if ready > 0 || held > 0 {
                    // The demand holds until the next count.
                    let extra =
                        if self.workers.starts_workers() { Duration::ZERO } else { CONTROLLER_QUIET_QUEUE_INTERVAL };
                    self.pool.handle(Event::Demand { key: key.clone(), extra }, now);
                }
                self.pool.handle(Event::Depth { key, ready }, now);
            }
            (QueueJob::Depth, StepResult::NotFound) => self.pool.handle(Event::Unroutable(key), now),
            (QueueJob::Depth, StepResult::Failed | StepResult::Refused) => {
                self.session.depth_backoff.insert(key, now.plus(CONTROLLER_QUEUE_CHECK_RETRY_DELAY));
            }
            (QueueJob::Depth, StepResult::Done) => {}
        }
    }

    fn on_report(&mut self, report: &Delivery) {
        let Some(key) = self.config.names.parse_routing_key(report.routing_key.as_str()) else { return };
        let table = report.properties.headers().as_ref();
        let text = |name| table.and_then(|table| headers::text(table, name));
        let now = self.clock.now();
        self.counters.lock().values.activity_reports += 1;
        if let (Some(id), Some(event)) = (text("x-worker-id"), text("x-event")) {
            self.workers.on_report(id, event, now);
        }
        // Any client can publish reports, so the group limit applies.
        if !is_group_limit_reached(&self.pool, &key) {
            self.pool.handle(Event::demand(key), now);
        }
    }

    pub(super) fn on_tick(&mut self) {
        let now = self.clock.now();
        self.overrides.expire(now);
        for key in self.overrides.keys_with_minimum() {
            self.pool.handle(Event::demand(key.clone()), now);
        }
        let waiting: Vec<Key> = self.session.held.keys().cloned().collect();
        for key in waiting {
            self.pool.handle(Event::demand(key), now);
        }
        self.session.depth_backoff.retain(|_, until| *until > now);
        let known = self.pool.keys().cloned().collect();
        for (key, count) in self.workers.counts(&known) {
            self.pool.handle(Event::Workers { key, count }, now);
        }
        let has_room = self.counters.lock().orphans_held < CONTROLLER_ORPHANS_MAX.into();
        self.session.held.expire(&self.pool, has_room, now);
    }

    fn request_depths(&self, jobs: &mut QueueJobs<'_>) {
        let now = self.clock.now();
        let workers = self.workers.by_key(now);
        let has_idle_only = |key: &Key| {
            let count = |activity| workers.get(key).map_or(0, |all| count(all, activity));
            count(WorkerActivity::Idle) > 0 && count(WorkerActivity::Busy) == 0
        };
        let next_taker = |key: &Key| {
            if !self.workers.starts_workers() {
                return NextTaker::ExternalWorker;
            }
            let held = self.session.loads.get(key).map_or(0, Load::in_progress);
            if held == 0 && has_idle_only(key) { NextTaker::IdleWorker } else { NextTaker::NewWorker }
        };
        for (key, _) in self.pool.tracker().groups() {
            if !self.session.depth_backoff.contains_key(key) && self.pool.is_count_due(key, next_taker(key), now) {
                jobs.request_depth(key);
            }
        }
    }

    pub(super) fn plan(&mut self) {
        let (now, concurrency) = (self.clock.now(), self.config.settings.concurrency.get());
        let busy = self.workers.busy_by_key(|key| Some(self.pool.depth(key)?.at), now);
        let load = |key: &Key| match self.pool.depth(key) {
            Some(DepthSample { ready, .. }) => {
                let busy = busy.get(key).copied().unwrap_or_default();
                Load::new(ready, self.session.counts.fresh(key, now), busy, concurrency)
            }
            None => Load::unknown(),
        };
        self.session.loads = self.pool.tracker().groups().map(|(key, _)| (key.clone(), load(key))).collect();
        let mut loads = self.session.loads.clone();
        for key in self.demands.values().map(|known| &known.key) {
            let own = loads.get(key).copied().unwrap_or_default();
            loads.insert(key.clone(), self.add_demand(key, own));
        }
        self.workers.plan(&self.config, self.pool.tracker(), &loads, &self.overrides, now);
    }

    fn on_broker_counts(&mut self, result: CountResult) {
        let (now, first) = (self.clock.now(), self.session.counts.is_empty());
        for (key, unacknowledged) in result.iter().flatten() {
            // Unknown queues on the first count were declared by another controller. Later they may be stale.
            if *unacknowledged > 0 || (first && self.pool.tracker().desired(key).is_none()) {
                self.pool.handle(Event::demand(key.clone()), now);
            }
        }
        self.session.counts.update(result, now);
    }
}

fn count(workers: &[GroupWorker], activity: WorkerActivity) -> u32 {
    u32::try_from(workers.iter().filter(|worker| worker.activity == activity).count()).unwrap_or(u32::MAX)
}

async fn declare_topology(topology: Topology<'_>) -> Result<SessionChannels, SessionError> {
    let Topology { connection, names, .. } = topology;
    let channel = connection.create_channel().await?;
    timeout(AMQP_CALL_TIMEOUT, topology.declare(&channel))
        .await
        .map_err(|_| declare_timed_out("queues of the pool"))??;
    Ok(SessionChannels {
        orphans: consume(connection, &names.orphan_queue(), CONTROLLER_ORPHANS_MAX).await?,
        reports: consume(connection, &names.activity_queue(), CONTROLLER_DEAD_LETTERS_MAX).await?,
        forwards: amqp::confirm_channel(connection).await?,
    })
}

async fn declare_requests_exchange(controller: &mut Controller, topology: Topology<'_>) -> Result<(), SessionError> {
    let timed_out = |_| declare_timed_out("requests exchange");
    let declare = async { topology.declare_requests(&topology.connection.create_channel().await?).await };
    match controller.run_while(timeout(AMQP_CALL_TIMEOUT, declare)).await.map_err(timed_out)? {
        Err(error) if amqp::reply_code(&error) == Some(amqp::PRECONDITION_FAILED) => {
            // An exchange with other arguments works only with the policy.
            let has_policies = matches!(controller.policy_result, Some(Ok(_)));
            if !has_policies && !matches!(controller.apply_policies().await, Some(Ok(_))) {
                return Err(error.into());
            }
            let why = amqp::error_text(&error);
            tracing::warn!("the requests exchange exists with other arguments; adopting it: {why}");
            let exchange = topology.names.requests_exchange();
            let adopt = timeout(AMQP_CALL_TIMEOUT, amqp::find_exchange(topology.connection, exchange.into()));
            Ok(controller.run_while(adopt).await.map_err(timed_out)??)
        }
        other => Ok(other?),
    }
}

async fn acquire_lock(
    controller: &mut Controller,
    connection: &Connection,
    names: &QueueNames,
) -> Result<Channel, SessionError> {
    loop {
        let declared = async {
            let channel = connection.create_channel().await?;
            amqp::declare_own_queue(&channel, &names.lock_queue()).await.map(|_| channel)
        };
        match controller.run_while(declared).await {
            Ok(channel) => return Ok(channel),
            Err(error) if amqp::reply_code(&error) == Some(amqp::RESOURCE_LOCKED) => {
                controller.stand_by().await;
            }
            Err(error) => return Err(error.into()),
        }
    }
}
