//! A controller of worker groups: makes the queues that requests of a pool need, starts workers for their keys, and takes both
//! away when nobody needs them.
//!
//! Which groups are wanted, what follows from it, and how many workers each has is decided in [`crate::domain::group`]. One
//! loop carries that out; what waits for the broker waits beside it. Whoever holds the lock queue of a pool is its controller,
//! any other one stands by. Workers outlive the controller, and the next one finds them again.

mod broker_counts;
pub mod commands;
mod counters;
mod dead_letters;
mod driver;
mod error_replies;
mod external_demand;
mod forwarding;
mod known_keys;
mod name_encoding;
pub mod plan;
pub mod poison_message;
pub mod poison_queue;
mod policies;
mod queue_jobs;
mod queue_names;
mod session;
mod session_state;
mod snapshot;
pub mod status;
mod topology;
mod workers;

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::sync::Arc;

use secrecy::SecretString;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::amqp::Broker;
use crate::amqp::management::Management;
use crate::domain::backoff::Backoff;
use crate::domain::group::overrides::Overrides;
use crate::domain::group::pool::{Event, Pool};
use crate::domain::group::{scale, tracker};
use crate::domain::jitter::Jitter;
use crate::domain::poll::POLL_RETRY;
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{CONTROLLER_POISON_REQUESTS_MAX, CONTROLLER_STATUS_REQUESTS_MAX, CONTROLLER_WORKERS_TIMEOUT};

pub use driver::{
    DockerConfig, DriverConfig, DriverKind, ExecConfig, KubernetesConfig, Scaling, SubprocessConfig, SystemdConfig,
};
pub use external_demand::DemandSource;
pub use queue_names::{NamingScheme, QueueNames};
pub use topology::{QueueOptions, QueueType};

use commands::{CommandError, PoolCommand};
use counters::PoolCounters;
use driver::DriverEvent;
use external_demand::DemandState;
use poison_queue::{PoisonAction, PoisonError, PoisonList, PoisonOutcome, PoisonRequest, PoisonSelection};
use session::SessionError;
use session_state::SessionState;
use status::Role;
use workers::WorkerSet;

/// What a controller of one pool has to know.
#[derive(Debug, Clone)]
pub struct ControllerConfig {
    /// The pool, as people call it.
    pub pool: String,
    /// The broker.
    pub broker: Broker,
    /// Its management interface, where it may be asked.
    pub management: Option<Management>,
    /// Its address as workers are given it, with user and password.
    pub uri: SecretString,
    /// What things are called.
    pub names: QueueNames,
    /// How requests are kept.
    pub queue_options: QueueOptions,
    /// How long groups stay, and how many workers they have.
    pub scaling: ScalingConfig,
    /// Who starts its workers.
    pub driver: DriverConfig,
    /// What else than requests its workers are for.
    pub demands: Vec<DemandSource>,
    /// The `x-status` of answers that the controller gives in a worker's place.
    pub dead_letter_status: String,
}

/// Asks the controller of one pool, and tells it.
#[derive(Debug, Clone)]
pub struct ControllerHandle {
    /// The pool.
    pub pool: String,
    requests: mpsc::Sender<ControllerRequest>,
}

/// Where what is asked arrives.
#[derive(Debug)]
pub struct ControllerInbox(mpsc::Receiver<ControllerRequest>);

#[derive(Debug)]
enum ControllerRequest {
    Status(oneshot::Sender<status::PoolStatus>),
    Reconfigure(ScalingConfig),
    Command(PoolCommand, String, oneshot::Sender<Result<String, CommandError>>),
    Poison(PoisonRequest),
}

/// What can be changed while a controller runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScalingConfig {
    /// How long groups stay. What has begun is counted by the old ones.
    pub delays: tracker::TrackerPolicy,
    /// How many workers a group has.
    pub limits: scale::ScaleLimits,
    /// How many all groups have together; `None` is any number.
    pub budget: Option<scale::WorkerBudget>,
}

impl ControllerHandle {
    /// For the controller of this pool.
    #[must_use]
    pub fn new(pool: &str) -> (Self, ControllerInbox) {
        let (asks, asked) = mpsc::channel(CONTROLLER_STATUS_REQUESTS_MAX);
        (Self { pool: pool.to_owned(), requests: asks }, ControllerInbox(asked))
    }

    /// How it looks now; `None` once it has gone.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn status(&self) -> Option<status::PoolStatus> {
        let (sender, looked) = oneshot::channel();
        self.requests.send(ControllerRequest::Status(sender)).await.ok()?;
        looked.await.ok()
    }

    /// Orders something of it, by whom and why. Answers with what comes of it; `None` once it has gone.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; whether it is obeyed is not known then.
    pub async fn command(&self, order: PoolCommand, by: String) -> Option<Result<String, CommandError>> {
        let (sender, said) = oneshot::channel();
        self.requests.send(ControllerRequest::Command(order, by, sender)).await.ok()?;
        said.await.ok()
    }

    /// Changes what can be changed. It is heeded from its next look on.
    pub async fn reconfigure(&self, tuning: ScalingConfig) {
        // One that has gone heeds nothing.
        self.requests.send(ControllerRequest::Reconfigure(tuning)).await.ok();
    }

    /// What has been put aside; `None` once the controller has gone.
    ///
    /// # Errors
    ///
    /// Where this controller does not have the pool, or the broker does not let it look.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn list_poison(&self) -> Option<Result<PoisonList, PoisonError>> {
        self.poison_request(PoisonRequest::List).await
    }

    /// The body of a request that was put aside; `None` once the controller has gone.
    ///
    /// # Errors
    ///
    /// As [`ControllerHandle::list_poison`], and where there is no such request.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn poison_body(&self, id: &str) -> Option<Result<Vec<u8>, PoisonError>> {
        self.poison_request(|answer| PoisonRequest::Body(id.to_owned(), answer)).await
    }

    /// Tries requests once more that were put aside, or drops them; `None` once the controller has gone. `by` is who says so.
    ///
    /// # Errors
    ///
    /// As [`ControllerHandle::list_poison`]. Some may be done by then.
    ///
    /// # Cancel safety
    ///
    /// What has begun is finished.
    pub async fn resolve_poison(
        &self,
        which: PoisonSelection,
        fate: PoisonAction,
        by: String,
    ) -> Option<Result<PoisonOutcome, PoisonError>> {
        self.poison_request(|answer| PoisonRequest::Resolve { selection: which, action: fate, by, reply: answer }).await
    }

    async fn poison_request<T>(
        &self,
        wish: impl FnOnce(poison_queue::PoisonReply<T>) -> PoisonRequest,
    ) -> Option<Result<T, PoisonError>> {
        let (sender, granted) = oneshot::channel();
        self.requests.send(ControllerRequest::Poison(wish(sender))).await.ok()?;
        Some(granted.await.unwrap_or_else(|_| Err(PoisonError::Failed("it was lost meanwhile".to_owned()))))
    }
}

/// Something that ended badly.
#[derive(Debug, Clone)]
struct RecordedError {
    at: Instant,
    message: String,
}

/// The controller of one pool.
struct Controller {
    config: ControllerConfig,
    clock: Clock,
    pool: Pool,
    workers: WorkerSet,
    /// The attempts to have the broker.
    backoff: Backoff,
    role: Role,
    role_since: Instant,
    session: SessionState,
    overrides: Overrides,
    /// By their names.
    demands: BTreeMap<String, DemandState>,
    counters: Arc<PoolCounters>,
    /// Why there is no connection.
    disconnect_reason: Option<String>,
    /// The last thing that went wrong.
    last_error: Option<RecordedError>,
    requests: mpsc::Receiver<ControllerRequest>,
    /// Who grants wishes about what was put aside, while there is a connection.
    poison_requests: Option<mpsc::Sender<PoisonRequest>>,
    /// What was last found of the policies that say what is asked of queues.
    policy_result: Option<policies::PolicyCheck>,
}

/// Controls the pool until it is told to leave. Workers and queues stay as they are then.
///
/// # Errors
///
/// Where what its driver needs on this host cannot be had.
pub async fn run(settings: ControllerConfig, asks: ControllerInbox, leave: CancellationToken) -> io::Result<()> {
    let clock = Clock::boot();
    let seed = uuid::Uuid::new_v4().as_u64_pair().0;
    let tally = Arc::new(PoolCounters::default());
    let ControllerInbox(asked) = asks;
    let mut drivers = JoinSet::new();
    let mut controller = Controller {
        pool: Pool::new(settings.scaling.delays, seed, clock.now()),
        workers: WorkerSet::start(&settings, Arc::clone(&tally), clock, &mut drivers)?,
        backoff: Backoff::NEW,
        role: Role::Disconnected,
        role_since: clock.now(),
        session: SessionState::default(),
        overrides: Overrides::default(),
        demands: BTreeMap::new(),
        counters: tally,
        disconnect_reason: None,
        last_error: None,
        requests: asked,
        poison_requests: None,
        policy_result: None,
        config: settings,
        clock,
    };
    let controlling = async {
        let (mut jitter, mut epoch) = (Jitter::seeded(seed), 0);
        loop {
            epoch += 1;
            let over = Box::pin(session::run_session(&mut controller, epoch)).await;
            let again = controller.on_disconnected(over, &mut jitter);
            controller.run_while(clock.sleep_until(again)).await;
        }
    };
    tokio::select! {
        () = controlling => Ok(()),
        () = leave.cancelled() => Ok(()),
        Some(_) = drivers.join_next() => Err(io::Error::other("who starts its workers has ended")),
    }
}

impl Controller {
    /// The connection is over. Answers with when the next one is tried.
    fn on_disconnected(&mut self, over: SessionError, jitter: &mut Jitter) -> Instant {
        let (SessionError { reason: why }, now) = (over, self.clock.now());
        self.pool.handle(Event::Disconnected, now);
        self.session = SessionState::default();
        self.poison_requests = None;
        self.counters.orphans.reset();
        self.set_role(Role::Disconnected);
        if self.backoff.tries() == 0 {
            self.counters.broker_disconnects.increment();
            tracing::warn!(pool = self.config.pool, "the broker is lost: {why}; workers go on, and it is tried again");
        } else {
            tracing::debug!(pool = self.config.pool, "still no broker: {why}");
        }
        self.last_error = Some(RecordedError { at: now, message: format!("the broker: {why}") });
        self.disconnect_reason = Some(why);
        now.plus(self.backoff.wait(POLL_RETRY, None, jitter))
    }

    fn set_role(&mut self, role: Role) {
        if self.role != role {
            (self.role, self.role_since) = (role, self.clock.now());
        }
        match role {
            Role::Standby => self.workers.stand_down(),
            Role::Starting => self.workers.activate(),
            Role::Disconnected => self.workers.suspend_driver(),
            Role::Active => {}
        }
    }

    /// Sees to it that something is done, and meanwhile to who asks and to what is said of its workers: a broker that is slow
    /// keeps nobody from looking.
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

    /// Waits until it is known who is there, though not for ever: without workers, too, requests are forwarded.
    async fn wait_for_workers(&mut self) {
        let until = self.clock.now().plus(CONTROLLER_WORKERS_TIMEOUT);
        while !self.workers.has_listed() {
            let clock = self.clock;
            tokio::select! {
                biased;
                Some(ask) = self.requests.recv() => self.handle(ask),
                news = self.workers.next_event() => self.on_driver_event(news),
                () = clock.sleep_until(until) => return,
            }
        }
    }

    /// Its driver has said something.
    fn on_driver_event(&mut self, news: DriverEvent) {
        let now = self.clock.now();
        match self.workers.on_driver_event(news, now) {
            Ok(found) if self.role == Role::Active => {
                for key in found {
                    self.pool.handle(Event::QueueFound(key), now);
                }
            }
            // The session asks for them as it begins.
            Ok(_) => {}
            Err(what) => self.last_error = Some(RecordedError { at: now, message: what }),
        }
    }

    fn forward_poison_request(&self, wish: PoisonRequest) {
        let Some(wishes) = self.poison_requests.as_ref().filter(|_| self.role == Role::Active) else {
            let why = self.role.inactive_reason().unwrap_or("it has no connection");
            return wish.refuse(PoisonError::NotActive(why.to_owned()));
        };
        if let Err(full) = wishes.try_send(wish) {
            let why = format!("{CONTROLLER_POISON_REQUESTS_MAX} others look at what was put aside");
            full.into_inner().refuse(PoisonError::Failed(why));
        }
    }

    fn handle(&mut self, ask: ControllerRequest) {
        match ask {
            // Who has asked may have gone.
            ControllerRequest::Status(answer) => drop(answer.send(self.snapshot(self.clock.now()))),
            ControllerRequest::Command(order, by, answer) => drop(answer.send(self.apply(order, &by))),
            ControllerRequest::Reconfigure(ScalingConfig { delays, limits, budget }) => {
                self.config.scaling = ScalingConfig { delays, limits, budget };
                self.pool.reconfigure(delays);
                self.workers.reconfigure(limits, budget);
            }
            ControllerRequest::Poison(wish) => self.forward_poison_request(wish),
        }
    }
}
