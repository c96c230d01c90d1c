//! The controller: declares the queues of a pool, starts workers by demand, and removes both when idle. Decisions are in
//! [`journeyman_domain::group`]. The exclusive lock queue of a pool elects one active controller; others are on standby.

pub mod commands;
pub mod config;
mod dead_letters;
mod driver;
mod error_replies;
mod external_demand;
mod forwarding;
mod held_orphans;
mod message_headers;
pub mod poison_message;
pub mod poison_queue;
mod policies;
mod queue_jobs;
mod queue_names;
mod session;
mod session_error;
mod snapshot;
mod state_store;
pub mod status;
mod topology;
mod unacknowledged_counts;
mod without_broker;
mod workers;

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{mpsc, oneshot};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::controller::config::{PoolConfig, QueueType};
use journeyman_domain::group::overrides::Overrides;
use journeyman_domain::group::pool::{Event, Pool};
use journeyman_domain::group::scale::ScaleLimits;
use journeyman_domain::group::tracker::TrackerPolicy;
use journeyman_domain::limits::{
    CONTROLLER_STANDBY_INTERVAL, CONTROLLER_STATUS_REQUESTS_MAX, CONTROLLER_WORKERS_TIMEOUT,
};
use journeyman_domain::poll::POLL_RETRY;
use journeyman_domain::time::Instant;
use journeyman_platform::amqp::Broker;
use journeyman_platform::amqp::management::Management;
use journeyman_platform::host::clock::Clock;
use journeyman_platform::retry::Retry;
use journeyman_platform::zookeeper::ConnectConfig;
use journeyman_worker::notify::Announcer;

pub use external_demand::{DemandQueue, DemandSource};
pub use queue_names::QueueNames;

use commands::{CommandError, PoolCommand};
use driver::DriverEvent;
use external_demand::DemandState;
use poison_queue::PoisonQueue;
use session::SessionState;
use session_error::SessionError;
use status::{CounterValues, Role};
use workers::WorkerSet;

#[derive(Clone)]
pub struct ControllerConfig {
    pub pool: String,
    pub broker: Broker,
    pub management: Option<Management>,
    pub names: QueueNames,
    pub settings: PoolConfig,
    pub demands: Vec<DemandSource>,
    /// Tells a notifier which requests were put aside.
    pub announcer: Option<Announcer>,
}

#[derive(Debug, Clone)]
pub struct ControllerHandle {
    pub pool: String,
    pub poison: PoisonQueue,
    requests: mpsc::Sender<ControllerRequest>,
}

#[derive(Debug)]
pub struct ControllerInbox(mpsc::Receiver<ControllerRequest>);

#[derive(Debug)]
enum ControllerRequest {
    Status(oneshot::Sender<status::PoolStatus>),
    Reconfigure(Box<PoolConfig>),
    Command(PoolCommand, String, oneshot::Sender<Result<String, CommandError>>),
}

const fn tracker_policy(pool: &PoolConfig) -> TrackerPolicy {
    TrackerPolicy { unbind_delay: pool.unbind_delay.0, stop_delay: pool.stop_delay.0 }
}

fn scale_limits(pool: &PoolConfig) -> ScaleLimits {
    // A group that KEDA scales is one worker here.
    let (min, max) = if pool.is_scaled_by_keda() { (1, 1) } else { (pool.min, pool.max.get()) };
    let (min_idle, concurrency) = (pool.min_idle, pool.concurrency.get());
    ScaleLimits { min, max, min_idle, concurrency, scale_down_delay: pool.scale_down_delay.0 }
}

impl ControllerConfig {
    /// The ZooKeeper that a pool without request queues has in place of a broker: that of its first such demand.
    pub fn zookeeper(&self) -> Option<&ConnectConfig> {
        let mut demands = self.demands.iter().filter(|_| self.settings.queue_type == QueueType::None);
        demands.find_map(|demand| match &demand.queue {
            DemandQueue::Zookeeper { connect, .. } => Some(connect),
            DemandQueue::Taskcluster { .. } => None,
        })
    }

    fn service(&self) -> &'static str {
        if self.zookeeper().is_some() { "ZooKeeper" } else { "broker" }
    }

    fn service_address(&self) -> String {
        let zookeeper = self.zookeeper().map(|connect| format!("ZooKeeper at {}", connect.servers));
        zookeeper.unwrap_or_else(|| self.broker.display_url().to_owned())
    }
}

impl ControllerHandle {
    pub fn new(config: &ControllerConfig) -> (Self, ControllerInbox) {
        let (requests, received) = mpsc::channel(CONTROLLER_STATUS_REQUESTS_MAX);
        let poison = PoisonQueue::new(config.broker.clone(), config.names.clone());
        (Self { pool: config.pool.clone(), poison, requests }, ControllerInbox(received))
    }

    pub async fn status(&self) -> Option<status::PoolStatus> {
        self.request(ControllerRequest::Status).await
    }

    pub async fn command(&self, command: PoolCommand, by: String) -> Option<Result<String, CommandError>> {
        self.request(|reply| ControllerRequest::Command(command, by, reply)).await
    }

    pub async fn reconfigure(&self, settings: PoolConfig) {
        // The controller may have exited.
        self.requests.send(ControllerRequest::Reconfigure(Box::new(settings))).await.ok();
    }

    /// `None` if the controller has exited.
    async fn request<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> ControllerRequest) -> Option<T> {
        let (sender, reply) = oneshot::channel();
        self.requests.send(request(sender)).await.ok()?;
        reply.await.ok()
    }
}

#[derive(Default)]
struct PoolCounters {
    /// Orphans of this connection.
    orphans_held: u64,
    values: CounterValues,
}

#[derive(Clone, Default)]
struct SharedCounters(Arc<Mutex<PoolCounters>>);

impl SharedCounters {
    fn lock(&self) -> MutexGuard<'_, PoolCounters> {
        self.0.lock()
    }

    fn on_orphan_released(&self) {
        let mut counters = self.lock();
        // A task of the last connection may release one late.
        counters.orphans_held = counters.orphans_held.saturating_sub(1);
    }
}

#[derive(Debug, Clone)]
struct RecordedError {
    at: Instant,
    message: String,
}

struct Controller {
    config: ControllerConfig,
    clock: Clock,
    pool: Pool,
    workers: WorkerSet,
    retry: Retry,
    role: Role,
    role_since: Instant,
    session: SessionState,
    overrides: Overrides,
    demands: BTreeMap<String, DemandState>,
    counters: SharedCounters,
    disconnect_reason: Option<String>,
    last_error: Option<RecordedError>,
    requests: mpsc::Receiver<ControllerRequest>,
    policy_result: Option<policies::PolicyCheck>,
}

pub async fn run(settings: ControllerConfig, inbox: ControllerInbox, stop: CancellationToken) -> io::Result<()> {
    let clock = Clock::boot();
    let counters = SharedCounters::default();
    let ControllerInbox(requests) = inbox;
    let mut controller = Controller {
        pool: Pool::new(tracker_policy(&settings.settings), uuid::Uuid::new_v4().as_u64_pair().0),
        workers: WorkerSet::open(&settings, counters.clone(), clock)?,
        retry: Retry::new(POLL_RETRY),
        role: Role::Disconnected,
        role_since: clock.now(),
        session: SessionState::default(),
        overrides: Overrides::default(),
        demands: BTreeMap::new(),
        counters,
        disconnect_reason: None,
        last_error: None,
        requests,
        policy_result: None,
        config: settings,
        clock,
    };
    let controlling = async {
        loop {
            let Err(over) = match controller.config.zookeeper().cloned() {
                Some(connect) => Box::pin(without_broker::run_session(&mut controller, &connect)).await,
                None => Box::pin(session::run_session(&mut controller)).await,
            };
            let again = controller.on_disconnected(over);
            controller.run_while(clock.sleep_until(again)).await;
        }
    };
    tokio::select! {
        () = controlling => Ok(()),
        () = stop.cancelled() => Ok(()),
    }
}

impl Controller {
    fn on_disconnected(&mut self, over: SessionError) -> Instant {
        let (SessionError { reason: why }, now) = (over, self.clock.now());
        self.pool.handle(Event::Disconnected, now);
        self.session = SessionState::default();
        self.counters.lock().orphans_held = 0;
        let was_connected = self.role != Role::Disconnected;
        self.set_role(Role::Disconnected);
        if was_connected && self.retry.failures() == 0 {
            self.counters.lock().values.broker_disconnects += 1;
        }
        let problem = if was_connected { "lost connection" } else { "no connection" };
        let (pool, service) = (&self.config.pool, self.config.service());
        let what = format!("pool {pool}: {problem} to the {service}; workers keep running");
        let wait = self.retry.on_failure(&what, why.clone());
        self.record_error(format!("{service}: {why}"));
        self.disconnect_reason = Some(why);
        now.plus(wait)
    }

    fn record_error(&mut self, message: String) {
        self.last_error = Some(RecordedError { at: self.clock.now(), message });
    }

    fn set_role(&mut self, role: Role) {
        if self.role != role {
            (self.role, self.role_since) = (role, self.clock.now());
        }
        match role {
            Role::Standby => self.workers.stand_down(),
            Role::Starting => self.workers.activate(),
            Role::Disconnected => self.workers.deactivate(),
            Role::Active => {}
        }
    }

    async fn stand_by(&mut self) {
        if self.role != Role::Standby {
            tracing::info!("another controller holds the pool; standing by");
            self.set_role(Role::Standby);
            self.disconnect_reason = None;
            self.retry.on_success();
        }
        self.run_while(sleep(CONTROLLER_STANDBY_INTERVAL)).await;
    }

    async fn become_active(&mut self) {
        self.retry.on_success();
        self.disconnect_reason = None;
        self.set_role(Role::Active);
        let (pool, broker) = (&self.config.pool, self.config.service_address());
        tracing::info!(pool, broker, "acquired the pool; this controller is active");
        self.pool.handle(Event::Connected, self.clock.now());
        let loading = self.workers.load_known_keys();
        let known_keys = self.run_while(loading).await;
        self.workers.known_keys.clone_from(&known_keys);
        for key in self.workers.counts(&known_keys).into_keys() {
            self.pool.handle(Event::demand(key), self.clock.now());
        }
    }

    async fn run_while<T>(&mut self, doing: impl Future<Output = T>) -> T {
        let mut doing = std::pin::pin!(doing);
        loop {
            tokio::select! {
                biased;
                done = &mut doing => return done,
                Some(ask) = self.requests.recv() => self.handle(ask),
                news = self.workers.next_event() => self.on_driver_event(news),
            }
        }
    }

    async fn wait_for_workers(&mut self) {
        let until = self.clock.now().plus(CONTROLLER_WORKERS_TIMEOUT);
        while !self.workers.is_listed {
            let clock = self.clock;
            tokio::select! {
                biased;
                Some(ask) = self.requests.recv() => self.handle(ask),
                news = self.workers.next_event() => self.on_driver_event(news),
                () = clock.sleep_until(until) => return,
            }
        }
    }

    fn on_driver_event(&mut self, news: DriverEvent) {
        let now = self.clock.now();
        match self.workers.on_driver_event(news, now) {
            Ok(found) if self.role == Role::Active => {
                for key in found {
                    self.pool.handle(Event::demand(key), now);
                }
            }
            // The session reads them when it becomes active.
            Ok(_) => {}
            Err(why) => self.record_error(why),
        }
    }

    fn handle(&mut self, ask: ControllerRequest) {
        match ask {
            // The caller may have timed out.
            ControllerRequest::Status(answer) => drop(answer.send(self.snapshot(self.clock.now()))),
            ControllerRequest::Command(order, by, answer) => drop(answer.send(self.apply(order, &by))),
            ControllerRequest::Reconfigure(settings) => {
                self.pool.reconfigure(tracker_policy(&settings));
                self.config.settings = *settings;
            }
        }
    }
}
