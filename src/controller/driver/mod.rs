//! How workers of a pool come into being and go. Each driver is asked the same: who is there, start one, tell one to go.
//!
//! What a driver does may take long, and its answer may be lost. So it works in a task of its own, behind channels with a limit,
//! and is asked again and again who is there: its list alone says that a worker has come or gone ([`roster`]). A start whose
//! answer was lost is found by the next list, and what was not told to go is told again.

#[cfg(test)]
mod conformance;
mod docker;
mod exec;
mod kubernetes;
mod logs;
mod notes;
mod program;
mod roster;
mod subprocess;
mod systemd;
mod told;

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::domain::group::Key;
use crate::host::clock::Clock;
use crate::limits::{DRIVER_CALL_TIMEOUT, DRIVER_CALLS_MAX, DRIVER_NEWS_MAX, DRIVER_ORDERS_MAX};

pub use docker::Containers;
pub use exec::Commands;
pub use kubernetes::{Cluster, Scaling};
pub use subprocess::Program;
pub use systemd::Template;

use docker::Daemon;
use exec::Exec;
use kubernetes::Kubernetes;
use roster::Roster;
use subprocess::Subprocesses;
use systemd::Systemd;
use told::Told;

/// Who starts the workers of a pool, and how.
#[derive(Debug, Clone)]
pub enum Means {
    /// Nobody here: it is said what would be started.
    None,
    /// Processes of this host.
    Subprocess(Program),
    /// Whatever the site's own commands start.
    Exec(Commands),
    /// Instances of a template unit.
    Systemd(Template),
    /// Containers of a daemon.
    Docker(Containers),
    /// Pods of a cluster.
    Kubernetes(Box<Cluster>),
}

/// What every driver has to know.
#[derive(Debug, Clone)]
pub struct Posting {
    /// Whose workers they are. Those of another pool are none of its business, wherever it meets them.
    pub pool: String,
    /// Who starts them.
    pub means: Means,
    /// What workers find in their environment besides what they are told of their work.
    pub env: BTreeMap<String, String>,
    /// A folder of the pool's own: logs, and what workers are found again by.
    pub folder: PathBuf,
    /// How long one has between being told to end and being killed.
    pub grace: Duration,
}

/// A worker to start.
#[derive(Clone)]
pub(super) struct Assignment {
    pub(super) id: String,
    pub(super) key: Key,
    /// Its environment. There are secrets in it.
    pub(super) variables: BTreeMap<String, String>,
}

/// A worker that a driver knows of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) id: String,
    pub(super) key: Key,
    pub(super) standing: Standing,
}

/// What a driver knows of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Standing {
    /// It is there.
    There,
    /// It is there, and was told to go.
    Going,
    /// One was promised that has no name of its own yet: it will come under another one.
    Promised,
    /// It has ended, and is not forgotten yet.
    Ended(End),
}

/// Who says what workers are called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Names {
    /// Whoever has them started.
    Ours,
    /// Where they are started: one that was started is a promise until it is there under its own name.
    Theirs,
}

/// How one has ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct End {
    /// For people.
    pub(super) how: String,
    /// Where its log is; `None` where nobody knows.
    pub(super) log: Option<String>,
    /// What it said last; nothing where nobody knows.
    pub(super) last_words: String,
}

/// How one is told to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    /// It may finish what it holds.
    Ask,
    /// Its time is over.
    Force,
    /// It has ended: what is left of it may go.
    Forget,
}

/// What did not work, for people. Whatever it is, it is tried again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Trouble(pub(super) String);

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self(error.to_string())
    }
}

/// Starts and stops workers. It may be called for several at once, but has one list under way at a time.
trait Driver: Send + Sync + 'static {
    /// How often it is asked who is there.
    const LOOK_EVERY: Duration;

    /// Who names its workers.
    fn names(&self) -> Names {
        Names::Ours
    }

    /// Whether this controller has the pool. One that has not lists, and changes nothing meanwhile.
    fn is_in_charge(&self, _in_charge: bool) {}

    /// Those of this pool.
    fn list(&self) -> impl Future<Output = Result<Vec<Found>, Trouble>> + Send;

    /// Starts one. It may be there although this failed.
    fn start(&self, assignment: Assignment) -> impl Future<Output = Result<(), Trouble>> + Send;

    /// Tells one to go. That one is not there is no trouble.
    fn stop(&self, id: String, key: Key, stop: Stop) -> impl Future<Output = Result<(), Trouble>> + Send;
}

/// What the staff tells its driver.
enum Order {
    Start(Assignment),
    Stop(String),
    /// To ask who is there at once, and to say so under this number.
    Look(u64),
}

/// What a driver has to say.
#[derive(Debug)]
pub(super) enum News {
    /// A worker was started.
    Started(String),
    /// A worker was not started.
    Refused { id: String, why: Trouble },
    /// It was asked who is there. It knows of everything until then, or cannot say.
    Looked { number: u64, changes: Result<Vec<Change>, Trouble> },
}

/// What is other than at the last look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    /// One is there that this controller has not started.
    Found { id: String, key: Key },
    /// One is promised.
    Promised { id: String, key: Key },
    /// A promise is there no longer: it was kept under another name, or somebody has taken it back.
    Kept { id: String },
    /// One goes that this controller has not told to.
    Going { id: String },
    /// One has ended. Whether it was told to.
    Ended { id: String, key: Key, end: End, told: bool },
}

/// The staff's end of the line.
pub(super) struct Line {
    orders: mpsc::Sender<Order>,
    news: mpsc::Receiver<News>,
    looks: u64,
    in_charge: watch::Sender<bool>,
}

impl Line {
    /// Has one started. `false` where too much is to be done already: then it is nobody's until the next plan.
    pub(super) fn start(&self, assignment: Assignment) -> bool {
        self.orders.try_send(Order::Start(assignment)).is_ok()
    }

    /// Has one told to go. `false` as above.
    pub(super) fn stop(&self, id: &str) -> bool {
        self.orders.try_send(Order::Stop(id.to_owned())).is_ok()
    }

    /// This controller has the pool, or another one has: then what is left of workers that have ended is left to that.
    pub(super) fn is_in_charge(&self, in_charge: bool) {
        self.in_charge.send_replace(in_charge);
    }

    /// Asks who is there now. The answer has this number, or a later one.
    pub(super) fn look(&mut self) -> u64 {
        self.looks += 1;
        // Where there is no room it looks by itself before long, if under an earlier number: whoever waits asks again.
        self.orders.try_send(Order::Look(self.looks)).ok();
        self.looks
    }

    /// What it says next.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub(super) async fn news(&mut self) -> Option<News> {
        self.news.recv().await
    }
}

/// Starts a driver. It works for as long as the set is there; `None` where nobody starts workers.
///
/// # Errors
///
/// Where what it needs on this host cannot be had.
pub(super) fn engage(posting: &Posting, clock: Clock, tasks: &mut JoinSet<()>) -> io::Result<Option<Line>> {
    let Posting { pool, means, folder, grace, .. } = posting.clone();
    if !matches!(means, Means::None) {
        std::fs::create_dir_all(&folder)?;
    }
    let told = Told::new(&folder);
    Ok(Some(match means {
        Means::None => return Ok(None),
        Means::Subprocess(program) => {
            let driver = Subprocesses::new(&pool, program, folder);
            put_to_work(driver, told, grace, clock, tasks)
        }
        Means::Exec(commands) => put_to_work(Exec { commands, pool }, told, grace, clock, tasks),
        Means::Docker(containers) => put_to_work(Daemon::new(containers, pool), told, grace, clock, tasks),
        Means::Kubernetes(cluster) => {
            let driver = Kubernetes::new(*cluster, pool, grace).map_err(|Trouble(why)| io::Error::other(why))?;
            put_to_work(driver, told, grace, clock, tasks)
        }
        Means::Systemd(template) => put_to_work(Systemd::new(template, pool, folder), told, grace, clock, tasks),
    }))
}

/// Asks once who is there, and nothing else: no folder is made, and nobody is told anything.
///
/// # Errors
///
/// Where that is not told.
pub(super) async fn peek(posting: &Posting) -> Result<Vec<Found>, Trouble> {
    let Posting { pool, means, folder, grace, .. } = posting.clone();
    let found = match means {
        Means::None => Ok(Vec::new()),
        // One that may not be looked at is none that is not there.
        Means::Subprocess(_) if matches!(folder.try_exists(), Ok(false)) => Ok(Vec::new()),
        Means::Subprocess(program) => within(Subprocesses::to_look(program, folder).list()).await,
        Means::Exec(commands) => within(Exec { commands, pool }.list()).await,
        Means::Docker(containers) => within(Daemon::new(containers, pool).list()).await,
        Means::Kubernetes(cluster) => within(Kubernetes::new(*cluster, pool, grace)?.list()).await,
        Means::Systemd(template) => within(Systemd::new(template, pool, folder).list()).await,
    };
    // What has ended is there no more.
    found.map(|found| found.into_iter().filter(|found| !matches!(found.standing, Standing::Ended(_))).collect())
}

fn put_to_work(driver: impl Driver, told: Told, grace: Duration, clock: Clock, tasks: &mut JoinSet<()>) -> Line {
    let (orders, ordered) = mpsc::channel(DRIVER_ORDERS_MAX);
    let (teller, news) = mpsc::channel(DRIVER_NEWS_MAX);
    let (in_charge, charge) = watch::channel(false);
    let roster = Roster::new(grace, driver.names());
    tasks.spawn(work(Arc::new(driver), (roster, told), clock, charge, (ordered, teller)));
    Line { orders, news, looks: 0, in_charge }
}

/// What came of a call.
enum Done {
    Listed { number: u64, found: Result<Vec<Found>, Trouble> },
    Started { id: String, result: Result<(), Trouble> },
    Stopped { id: String, stop: Stop, result: Result<(), Trouble> },
}

async fn work<D: Driver>(
    driver: Arc<D>,
    (mut roster, mut told): (Roster, Told),
    clock: Clock,
    charge: watch::Receiver<bool>,
    (mut orders, news): (mpsc::Receiver<Order>, mpsc::Sender<News>),
) {
    let mut calls: JoinSet<Done> = JoinSet::new();
    let mut look = interval(D::LOOK_EVERY);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The number of a look that somebody waits for, and of the one under way.
    let (mut asked, mut answered, mut under_way) = (0, 0, None);
    loop {
        let busy = calls.len() >= DRIVER_CALLS_MAX;
        tokio::select! {
            biased;
            Some(done) = calls.join_next() => {
                let said = match done {
                    Ok(Done::Listed { number, found }) => {
                        under_way = None;
                        answered = number;
                        let in_charge = *charge.borrow();
                        // Another one may have had the pool meanwhile, and have told some.
                        told.read();
                        roster.is_in_charge(in_charge, clock.now());
                        let changes = found.map(|mut found| {
                            told.mark(&mut found);
                            let mut changes = roster.seen(found, clock.now());
                            told.correct(&mut changes);
                            if in_charge {
                                told.keep(|id| roster.knows(id));
                            }
                            changes
                        });
                        Some(News::Looked { number, changes })
                    }
                    Ok(Done::Started { id, result: Ok(()) }) => {
                        roster.started(&id);
                        Some(News::Started(id))
                    }
                    Ok(Done::Started { id, result: Err(why) }) => {
                        roster.refused(&id);
                        Some(News::Refused { id, why })
                    }
                    Ok(Done::Stopped { id, stop, result }) => {
                        let is_news = roster.stopped(&id, stop, result.is_ok());
                        match (stop, result) {
                            (_, Err(Trouble(why))) if is_news => {
                                tracing::warn!(worker = id, "a worker cannot be told to go, which is tried again: {why}");
                            }
                            (Stop::Ask, Ok(())) => told.add(&id),
                            (Stop::Force, Ok(())) if is_news => {
                                tracing::warn!(worker = id, "a worker was still there `stop_grace` after it was told to go, and is killed");
                            }
                            (Stop::Force | Stop::Forget, Ok(())) | (_, Err(_)) => {}
                        }
                        None
                    }
                    Err(error) => match error.try_into_panic() {
                        // Whose fault it is ends with it, and the controller with that.
                        Ok(panic) => std::panic::resume_unwind(panic),
                        // Everything ends.
                        Err(_) => return,
                    },
                };
                if let Some(said) = said
                    && news.send(said).await.is_err()
                {
                    return;
                }
            }
            order = orders.recv(), if !busy => match order {
                None => return,
                Some(Order::Start(assignment)) => {
                    roster.starts(&assignment);
                    let driver = Arc::clone(&driver);
                    calls.spawn(async move {
                        let id = assignment.id.clone();
                        Done::Started { id, result: within(driver.start(assignment)).await }
                    });
                }
                Some(Order::Stop(id)) => roster.leaves(&id, clock.now()),
                Some(Order::Look(number)) => asked = number,
            },
            _ = look.tick() => {
                if under_way.is_none() {
                    driver.is_in_charge(*charge.borrow());
                    under_way = Some(list(&driver, &mut roster, asked, &mut calls));
                }
            }
        }
        if under_way.is_none() && asked > answered {
            driver.is_in_charge(*charge.borrow());
            under_way = Some(list(&driver, &mut roster, asked, &mut calls));
        }
        if !*charge.borrow() {
            roster.is_in_charge(false, clock.now());
        }
        while calls.len() < DRIVER_CALLS_MAX
            && let Some((id, key, stop)) = roster.due(clock.now())
        {
            let driver = Arc::clone(&driver);
            calls.spawn(async move {
                let result = within(driver.stop(id.clone(), key, stop)).await;
                Done::Stopped { id, stop, result }
            });
        }
    }
}

fn list<D: Driver>(driver: &Arc<D>, roster: &mut Roster, number: u64, calls: &mut JoinSet<Done>) -> u64 {
    roster.looks();
    let driver = Arc::clone(driver);
    calls.spawn(async move { Done::Listed { number, found: within(driver.list()).await } });
    number
}

async fn within<T>(call: impl Future<Output = Result<T, Trouble>>) -> Result<T, Trouble> {
    match timeout(DRIVER_CALL_TIMEOUT, call).await {
        Ok(result) => result,
        Err(_) => Err(Trouble(format!("not done in {DRIVER_CALL_TIMEOUT:?}"))),
    }
}
