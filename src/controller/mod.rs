//! A controller of worker groups: makes the queues that requests of a pool need, starts workers for their keys, and takes both
//! away when nobody needs them.
//!
//! Which groups are wanted, what follows from it, and how many workers each has is decided in [`crate::domain::group`]. One
//! loop carries that out; what waits for the broker waits beside it. Whoever holds the lock queue of a pool is its controller,
//! any other one stands by. Workers outlive the controller, and the next one finds them again.

mod answers;
mod counts;
mod demand;
mod driver;
mod escape;
pub mod inventory;
mod letters;
mod look;
mod memory;
mod names;
pub mod orders;
pub mod plan;
pub mod poison;
mod policies;
mod publish;
mod session;
mod staff;
mod steps;
mod tally;
mod topology;
pub mod view;
mod waiting;

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
use crate::domain::group::orders::Orders;
use crate::domain::group::pool::{Event, Pool};
use crate::domain::group::{scale, tracker};
use crate::domain::jitter::Jitter;
use crate::domain::poll::TROUBLE;
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{CONTROLLER_ASKS_MAX, CONTROLLER_MUSTER_WAIT, CONTROLLER_WISHES_MAX};

pub use demand::Demand;
pub use driver::{Cluster, Commands, Containers, Means, Posting, Program, Scaling, Template};
pub use names::{Names, Spelling};
pub use topology::{Keeping, Profile};

use demand::Known;
use driver::News;
use inventory::{Fate, Inventory, Settled, Unsaid, Which, Wish};
use orders::{Order, Refused};
use session::Over;
use staff::Staff;
use tally::Tally;
use view::Role;
use waiting::Here;

/// What a controller of one pool has to know.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The pool, as people call it.
    pub pool: String,
    /// The broker.
    pub broker: Broker,
    /// Its management interface, where it may be asked.
    pub management: Option<Management>,
    /// Its address as workers are given it, with user and password.
    pub uri: SecretString,
    /// What things are called.
    pub names: Names,
    /// How requests are kept.
    pub keeping: Keeping,
    /// How long groups stay, and how many workers they have.
    pub tuning: Tuning,
    /// Who starts its workers.
    pub posting: Posting,
    /// What else than requests its workers are for.
    pub demands: Vec<Demand>,
    /// The `x-status` of answers that the controller gives in a worker's place.
    pub dead_letter_status: String,
}

/// Asks the controller of one pool, and tells it.
#[derive(Debug, Clone)]
pub struct Control {
    /// The pool.
    pub pool: String,
    asks: mpsc::Sender<Ask>,
}

/// Where what is asked arrives.
#[derive(Debug)]
pub struct Asks(mpsc::Receiver<Ask>);

#[derive(Debug)]
enum Ask {
    Look(oneshot::Sender<view::Pool>),
    Tune(Tuning),
    Order(Order, String, oneshot::Sender<Result<String, Refused>>),
    Wish(Wish),
}

/// What can be changed while a controller runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// How long groups stay. What has begun is counted by the old ones.
    pub delays: tracker::Policy,
    /// How many workers a group has.
    pub limits: scale::Limits,
    /// How many all groups have together; `None` is any number.
    pub budget: Option<scale::Budget>,
}

impl Control {
    /// For the controller of this pool.
    #[must_use]
    pub fn of(pool: &str) -> (Self, Asks) {
        let (asks, asked) = mpsc::channel(CONTROLLER_ASKS_MAX);
        (Self { pool: pool.to_owned(), asks }, Asks(asked))
    }

    /// How it looks now; `None` once it has gone.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn look(&self) -> Option<view::Pool> {
        let (sender, looked) = oneshot::channel();
        self.asks.send(Ask::Look(sender)).await.ok()?;
        looked.await.ok()
    }

    /// Orders something of it, by whom and why. Answers with what comes of it; `None` once it has gone.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; whether it is obeyed is not known then.
    pub async fn order(&self, order: Order, by: String) -> Option<Result<String, Refused>> {
        let (sender, said) = oneshot::channel();
        self.asks.send(Ask::Order(order, by, sender)).await.ok()?;
        said.await.ok()
    }

    /// Changes what can be changed. It is heeded from its next look on.
    pub async fn tune(&self, tuning: Tuning) {
        // One that has gone heeds nothing.
        self.asks.send(Ask::Tune(tuning)).await.ok();
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
    pub async fn inventory(&self) -> Option<Result<Inventory, Unsaid>> {
        self.wish(Wish::See).await
    }

    /// The body of a request that was put aside; `None` once the controller has gone.
    ///
    /// # Errors
    ///
    /// As [`Control::inventory`], and where there is no such request.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn body(&self, id: &str) -> Option<Result<Vec<u8>, Unsaid>> {
        self.wish(|answer| Wish::Body(id.to_owned(), answer)).await
    }

    /// Tries requests once more that were put aside, or drops them; `None` once the controller has gone. `by` is who says so.
    ///
    /// # Errors
    ///
    /// As [`Control::inventory`]. Some may be done by then.
    ///
    /// # Cancel safety
    ///
    /// What has begun is finished.
    pub async fn settle(&self, which: Which, fate: Fate, by: String) -> Option<Result<Settled, Unsaid>> {
        self.wish(|answer| Wish::Settle { which, fate, by, answer }).await
    }

    async fn wish<T>(&self, wish: impl FnOnce(inventory::Answer<T>) -> Wish) -> Option<Result<T, Unsaid>> {
        let (sender, granted) = oneshot::channel();
        self.asks.send(Ask::Wish(wish(sender))).await.ok()?;
        Some(granted.await.unwrap_or_else(|_| Err(Unsaid::Failed("it was lost meanwhile".to_owned()))))
    }
}

/// Something that ended badly.
#[derive(Debug, Clone)]
struct Ended {
    at: Instant,
    what: String,
}

/// The controller of one pool.
struct Controller {
    settings: Settings,
    clock: Clock,
    pool: Pool,
    staff: Staff,
    /// The attempts to have the broker.
    row: Backoff,
    role: Role,
    role_since: Instant,
    here: Here,
    orders: Orders,
    /// By their names.
    demands: BTreeMap<String, Known>,
    tally: Arc<Tally>,
    /// Why there is no connection.
    lost: Option<String>,
    /// The last thing that went wrong.
    fault: Option<Ended>,
    asked: mpsc::Receiver<Ask>,
    /// Who grants wishes about what was put aside, while there is a connection.
    wishes: Option<mpsc::Sender<Wish>>,
    /// What was last found of the policies that say what is asked of queues.
    by_policy: Option<policies::Look>,
}

/// Controls the pool until it is told to leave. Workers and queues stay as they are then.
///
/// # Errors
///
/// Where what its driver needs on this host cannot be had.
pub async fn run(settings: Settings, asks: Asks, leave: CancellationToken) -> io::Result<()> {
    let clock = Clock::boot();
    let seed = uuid::Uuid::new_v4().as_u64_pair().0;
    let tally = Arc::new(Tally::default());
    let Asks(asked) = asks;
    let mut drivers = JoinSet::new();
    let mut controller = Controller {
        pool: Pool::new(settings.tuning.delays, seed, clock.now()),
        staff: Staff::engage(&settings, Arc::clone(&tally), clock, &mut drivers)?,
        row: Backoff::NEW,
        role: Role::Disconnected,
        role_since: clock.now(),
        here: Here::default(),
        orders: Orders::default(),
        demands: BTreeMap::new(),
        tally,
        lost: None,
        fault: None,
        asked,
        wishes: None,
        by_policy: None,
        settings,
        clock,
    };
    let controlling = async {
        let (mut jitter, mut epoch) = (Jitter::seeded(seed), 0);
        loop {
            epoch += 1;
            let over = Box::pin(session::live(&mut controller, epoch)).await;
            let again = controller.lost(over, &mut jitter);
            controller.meanwhile(clock.sleep_until(again)).await;
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
    fn lost(&mut self, over: Over, jitter: &mut Jitter) -> Instant {
        let (Over { why }, now) = (over, self.clock.now());
        self.pool.handle(Event::Disconnected, now);
        self.here = Here::default();
        self.wishes = None;
        self.tally.orphans.clear();
        self.becomes(Role::Disconnected);
        if self.row.tries() == 0 {
            self.tally.losses.add();
            tracing::warn!(
                pool = self.settings.pool,
                "the broker is lost: {why}; workers go on, and it is tried again"
            );
        } else {
            tracing::debug!(pool = self.settings.pool, "still no broker: {why}");
        }
        self.fault = Some(Ended { at: now, what: format!("the broker: {why}") });
        self.lost = Some(why);
        now.plus(self.row.wait(TROUBLE, None, jitter))
    }

    fn becomes(&mut self, role: Role) {
        if self.role != role {
            (self.role, self.role_since) = (role, self.clock.now());
        }
        match role {
            Role::Standby => self.staff.stands_by(),
            Role::Starting => self.staff.takes_charge(),
            Role::Disconnected => self.staff.tells_nobody(),
            Role::Active => {}
        }
    }

    /// Sees to it that something is done, and meanwhile to who asks and to what is said of its workers: a broker that is slow
    /// keeps nobody from looking.
    async fn meanwhile<T>(&mut self, doing: impl Future<Output = T>) -> T {
        let mut doing = std::pin::pin!(doing);
        loop {
            tokio::select! {
                biased;
                done = &mut doing => return done,
                Some(ask) = self.asked.recv() => self.hear(ask),
                news = self.staff.news() => self.told(news),
            }
        }
    }

    /// Waits until it is known who is there, though not for ever: without workers, too, requests are forwarded.
    async fn musters(&mut self) {
        let until = self.clock.now().plus(CONTROLLER_MUSTER_WAIT);
        while !self.staff.knows() {
            let clock = self.clock;
            tokio::select! {
                biased;
                Some(ask) = self.asked.recv() => self.hear(ask),
                news = self.staff.news() => self.told(news),
                () = clock.sleep_until(until) => return,
            }
        }
    }

    /// Its driver has said something.
    fn told(&mut self, news: News) {
        let now = self.clock.now();
        match self.staff.told(news, now) {
            Ok(found) if self.role == Role::Active => {
                for key in found {
                    self.pool.handle(Event::Found(key), now);
                }
            }
            // The session asks for them as it begins.
            Ok(_) => {}
            Err(what) => self.fault = Some(Ended { at: now, what }),
        }
    }

    fn pass_on(&self, wish: Wish) {
        let Some(wishes) = self.wishes.as_ref().filter(|_| self.role == Role::Active) else {
            let why = self.role.rests().unwrap_or("it has no connection");
            return wish.refuse(Unsaid::NotHere(why.to_owned()));
        };
        if let Err(full) = wishes.try_send(wish) {
            let why = format!("{CONTROLLER_WISHES_MAX} others look at what was put aside");
            full.into_inner().refuse(Unsaid::Failed(why));
        }
    }

    fn hear(&mut self, ask: Ask) {
        match ask {
            // Who has asked may have gone.
            Ask::Look(answer) => drop(answer.send(self.look(self.clock.now()))),
            Ask::Order(order, by, answer) => drop(answer.send(self.obey(order, &by))),
            Ask::Tune(Tuning { delays, limits, budget }) => {
                self.settings.tuning = Tuning { delays, limits, budget };
                self.pool.reconfigure(delays);
                self.staff.tune(limits, budget);
            }
            Ask::Wish(wish) => self.pass_on(wish),
        }
    }
}
