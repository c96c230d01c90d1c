//! A pool without request queues: its groups follow what is counted in a ZooKeeper, where the active controller holds a lock.

use std::convert::Infallible;
use std::sync::Arc;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

use super::Controller;
use super::external_demand::poll_demand;
use super::session_error::{SessionError, stream_ended};
use super::status::Role;
use journeyman_domain::group::Key;
use journeyman_domain::group::pool::{Event, QueueStep, StepResult};
use journeyman_domain::limits::{CONTROLLER_RECONCILE_INTERVAL, CONTROLLER_SESSION_EVENTS_MAX};
use journeyman_platform::zookeeper::lock::{HeldLock, LockMode};
use journeyman_platform::zookeeper::{ConnectConfig, Session};

/// One lock for each pool below.
const LOCKS: &str = "/journeyman-controllers";

pub(super) async fn run_session(
    controller: &mut Controller,
    connect: &ConnectConfig,
) -> Result<Infallible, SessionError> {
    let (settings, clock) = (controller.config.clone(), controller.clock);
    let session = Arc::new(controller.run_while(Session::connect(connect)).await?);
    let _lock = acquire_lock(controller, &session).await?;
    controller.set_role(Role::Starting);
    controller.wait_for_workers().await;
    controller.become_active().await;
    let (events, mut reports) = mpsc::channel(CONTROLLER_SESSION_EVENTS_MAX);
    let mut polls: FuturesUnordered<_> = settings.demands.iter().map(|demand| poll_demand(demand, &events)).collect();
    let mut ticks = interval(CONTROLLER_RECONCILE_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = session.ended() => return Err(stream_ended("the session with ZooKeeper")),
            Some(request) = controller.requests.recv() => controller.handle(request),
            event = controller.workers.next_event() => controller.on_driver_event(event),
            Some(over) = polls.next() => return Err(over),
            Some(report) = reports.recv() => controller.on_demand_report(report),
            _ = ticks.tick() => {
                controller.workers.assume_ready(clock.now());
                controller.on_tick();
                controller.pool.handle(Event::Tick, clock.now());
                controller.plan_by_demand();
            }
        }
        controller.skip_queue_steps();
        controller.workers.store_known_keys(controller.pool.keys());
    }
}

impl Controller {
    /// There are no queues: each step is done, and each queue is empty.
    fn skip_queue_steps(&mut self) {
        while let Some(effect) = self.pool.next_effect() {
            let result = match effect.step {
                QueueStep::Bind | QueueStep::Unbind | QueueStep::Delete => StepResult::Done,
                QueueStep::Inspect => StepResult::Contents { ready: 0, consumers: 0 },
            };
            self.pool.handle(Event::StepFinished { key: effect.key, step: effect.step, result }, self.clock.now());
        }
    }

    fn plan_by_demand(&mut self) {
        let now = self.clock.now();
        let keys: Vec<Key> = self.pool.tracker().groups().map(|(key, _)| key.clone()).collect();
        for key in keys {
            self.pool.handle(Event::Depth { key, ready: 0 }, now);
        }
        self.plan();
    }
}

async fn acquire_lock(controller: &mut Controller, session: &Arc<Session>) -> Result<HeldLock, SessionError> {
    let folder = format!("{LOCKS}/{}", controller.config.pool);
    loop {
        if let Some(lock) = controller.run_while(HeldLock::try_take(session, &folder, LockMode::Exclusive)).await? {
            return Ok(lock);
        }
        controller.stand_by().await;
    }
}
