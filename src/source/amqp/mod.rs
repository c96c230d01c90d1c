//! Requests of an AMQP 0-9-1 queue, as RabbitMQ serves them.
//!
//! A delivery is a claim, and its lease is the channel that brought it: while that stands, the broker gives the request to
//! nobody else. A poll waits for deliveries, a reclaim looks whether the channel stands, a report publishes the answer and
//! acknowledges. What the broker does without being asked (a lost connection, a deleted queue) is told as [`News`].

mod interrupted;
mod link;
mod part;
mod session;
mod shelf;
mod tally;
mod task;

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, Weak};
use std::time::Duration;

use lapin::Connection;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::amqp::Broker;
use crate::amqp::management::{Management, NotTold};
use crate::domain::attempts::Step;
use crate::domain::id::{Lane, Run};
use crate::domain::outcome::{Outcome, Reason};
use crate::domain::patience::{self, Says};
use crate::domain::refusal::Refusal;
use crate::host::clock::Clock;
use crate::limits::{AMQP_ATTEMPTS_MAX, AMQP_LEASE, AMQP_MESSAGE_BYTES_MAX, AMQP_POLL_HOLD};

use super::{Answer, Artifact, Batch, Claim, Grant, Manner, Message, News, Opened, Recovered, Refused, Source};
use interrupted::Interrupted;
use link::Link;
use part::{Around, Part, Plan, Taken};
use session::{Session, Waiting};
use shelf::Shelf;
use tally::Tally;
pub use task::Form;

/// What a request source is made of.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where the queue is.
    pub broker: Broker,
    /// The queue. It is consumed from, and never declared.
    pub queue: String,
    /// What the broker shows this worker as.
    pub name: String,
    /// What handlers are given of a request.
    pub form: Form,
    /// How often a request is tried; `None` is without end.
    pub max_attempts: Option<NonZeroU32>,
    /// What becomes of a request that was tried so often.
    pub exhausted: Exhausted,
    /// How long the broker lets a delivery be unacknowledged, where it does not tell itself; `None` is without end.
    pub consumer_timeout: Option<Duration>,
    /// Where the broker may tell; `None` where it is not asked.
    pub management: Option<Management>,
    /// How long a handler lets a request run, where that is known; for a warning.
    pub longest: Option<Duration>,
    /// Whether a request is acknowledged before its answer that takes longer than the broker waits.
    pub early: Early,
    /// The folder for such requests, on a disk that outlives the worker; `None` where there are none, whatever `early` says.
    pub shelf: Option<PathBuf>,
    /// The largest message that is taken or sent, in bytes.
    pub max_message: u64,
}

impl Settings {
    /// A queue of this broker, with built-in rules.
    #[must_use]
    pub fn new(broker: Broker, queue: &str, name: &str) -> Self {
        Self {
            broker,
            queue: queue.to_owned(),
            name: name.to_owned(),
            form: Form::Whole,
            max_attempts: NonZeroU32::new(AMQP_ATTEMPTS_MAX),
            exhausted: Exhausted::Answered,
            consumer_timeout: Some(patience::USUAL),
            management: None,
            longest: None,
            early: Early::Never,
            shelf: None,
            max_message: AMQP_MESSAGE_BYTES_MAX,
        }
    }
}

/// Whether a request is acknowledged before its answer that takes longer than the broker waits, and what becomes of it where
/// its worker ends before it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Early {
    /// None is. What an earlier life has acknowledged so goes back to its queue.
    Never,
    /// It is, and goes back to its queue.
    RunAgain,
    /// It is, and its author is told.
    Answer,
}

/// What becomes of a request that was tried too often.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exhausted {
    /// Its author is told.
    Answered,
    /// It is dead-lettered, as the broker's policy says.
    DeadLettered,
    /// A copy is kept in this queue, and its author is told.
    Kept(String),
}

impl Settings {
    /// Says so where requests may run longer than the broker waits.
    fn warn_of(&self, patience: Option<Duration>) {
        let (Some(patience), Some(longest), Early::Never) = (patience, self.longest, self.early) else { return };
        if patience < longest {
            tracing::warn!(
                queue = self.queue,
                "requests may run for {longest:?} and the broker takes them back after {patience:?}: raise its \
                 consumer_timeout and `amqp.consumer_timeout`, lower `max_run_time` of the handler, or see \
                 `early_acknowledge`"
            );
        }
    }
}

/// A queue of requests.
pub struct Amqp {
    inner: Arc<Inner>,
}

struct Inner {
    settings: Settings,
    clock: Clock,
    link: Arc<Link>,
    shelf: Option<Arc<Shelf>>,
    looked_after: Once,
    /// How long the broker lets a delivery be unacknowledged, as far as that is known.
    patience: Mutex<Option<Duration>>,
    /// The connection whose broker was asked for that.
    asked: Mutex<Weak<Connection>>,
    session: Mutex<Option<Arc<Session>>>,
    /// Sessions whose connection was lost and whose payloads may still be there.
    lost: Mutex<Vec<Arc<Session>>>,
    epochs: AtomicU64,
    deliveries: AtomicU64,
    prefetch: AtomicU16,
    news: Arc<Noticeboard>,
    tally: Arc<Tally>,
    /// What goes on beside the calls; it ends with the source.
    tasks: Mutex<JoinSet<()>>,
}

/// News that waits to be read. At most one entry for each claim held.
#[derive(Default)]
pub(crate) struct Noticeboard {
    posted: Mutex<VecDeque<News>>,
    woken: Notify,
}

impl Noticeboard {
    fn post(&self, news: News) {
        self.posted.lock().unwrap_or_else(PoisonError::into_inner).push_back(news);
        self.woken.notify_one();
    }

    async fn read(&self) -> News {
        loop {
            let next = self.posted.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            match next {
                Some(news) => return news,
                None => self.woken.notified().await,
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Amqp {
    /// A source that is not connected yet.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        let tally: Arc<Tally> = Arc::default();
        let Settings { broker, queue, name, .. } = &settings;
        let shelf = settings.shelf.as_ref().map(|folder| Arc::new(Shelf::new(folder, broker.shown(), queue)));
        if settings.management.is_none() {
            settings.warn_of(settings.consumer_timeout);
        }
        Self {
            inner: Arc::new(Inner {
                link: Arc::new(Link::new(broker.clone(), name, Arc::clone(&tally))),
                shelf,
                looked_after: Once::new(),
                patience: Mutex::new(settings.consumer_timeout),
                asked: Mutex::default(),
                settings,
                clock: Clock::boot(),
                session: Mutex::default(),
                lost: Mutex::default(),
                epochs: AtomicU64::new(0),
                deliveries: AtomicU64::new(0),
                prefetch: AtomicU16::new(1),
                news: Arc::default(),
                tally,
                tasks: Mutex::default(),
            }),
        }
    }
}

impl Inner {
    fn beside(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = lock(&self.tasks);
        while let Some(ended) = tasks.try_join_next() {
            if let Err(error) = ended {
                tracing::error!(%error, "a part of a source of requests panicked; its requests come back");
            }
        }
        tasks.spawn(task);
    }

    /// What outlives claims: the requests on the shelf.
    fn around(&self) -> Around {
        let takes = self.settings.early != Early::Never;
        Around {
            link: Arc::clone(&self.link),
            shelf: self.shelf.clone().filter(|_| takes),
            tally: Arc::clone(&self.tally),
        }
    }

    fn look_after_the_shelf(&self) {
        let Some(shelf) = self.shelf.clone() else { return };
        self.looked_after.call_once(|| {
            let Settings { queue, early, .. } = &self.settings;
            let (link, tally) = (Arc::clone(&self.link), Arc::clone(&self.tally));
            let interrupted = Interrupted { shelf, link, queue: queue.as_str().into(), early: *early, tally };
            self.beside(interrupted.look_after());
        });
    }

    fn patience(&self) -> Option<Duration> {
        *lock(&self.patience)
    }

    /// Asks the broker how long it waits, once for each connection.
    async fn learn(&self, connection: &Arc<Connection>) {
        let Some(management) = &self.settings.management else { return };
        if lock(&self.asked).ptr_eq(&Arc::downgrade(connection)) {
            return;
        }
        let Settings { queue, consumer_timeout, .. } = &self.settings;
        let says = match management.told(queue).await {
            Ok(told) => told.says(),
            // It is asked again when there is one.
            Err(NotTold::NoQueue) => return,
            Err(NotTold::Unanswered(why)) => {
                tracing::warn!(queue, "how long the broker waits for an answer cannot be asked: {why}");
                Says::Nothing
            }
        };
        *lock(&self.asked) = Arc::downgrade(connection);
        let patience = says.or(*consumer_timeout);
        let before = std::mem::replace(&mut *lock(&self.patience), patience);
        tracing::info!(queue, ?patience, ?says, "how long the broker waits for an answer");
        if before != patience || says == Says::Nothing {
            self.settings.warn_of(patience);
        }
    }

    /// How many requests may be on their way. One that is on the shelf has a slot, and the broker knows nothing of it.
    fn wanted(&self) -> u16 {
        let shelved = self.shelf.as_ref().map_or(0, |shelf| shelf.held());
        self.prefetch.load(Ordering::Relaxed).saturating_sub(shelved).max(1)
    }

    async fn open(&self) -> Result<Opened, Refused> {
        let opened = Opened { lanes: 1, usable_for: None };
        if lock(&self.session).as_ref().is_some_and(|session| session.over().is_none()) {
            return Ok(opened);
        }
        self.look_after_the_shelf();
        self.lost_are_over()?;
        let connection = self.link.connection().await?;
        self.learn(&connection).await;
        let Settings { broker, queue, name, .. } = &self.settings;
        let epoch = self.epochs.fetch_add(1, Ordering::Relaxed) + 1;
        let prefetch = self.wanted();
        let tag = format!("{name}.{epoch}");
        let session::Opened { session, consumer, addresses } =
            Session::open(broker, connection, queue, &tag, prefetch, epoch).await?;
        self.tally.sessions.add();
        tracing::debug!(queue, epoch, prefetch, "consuming");
        self.beside(Session::ask(Arc::downgrade(&session), addresses, Arc::clone(&self.tally)));
        self.beside(Arc::clone(&session).pump(consumer, Arc::clone(&self.news)));
        *lock(&self.session) = Some(session);
        Ok(opened)
    }

    /// I6: what a lost connection had brought comes again by the next one, and must not meet itself here.
    fn lost_are_over(&self) -> Result<(), Refused> {
        let mut lost = lock(&self.lost);
        lost.retain(|session| session.held() > 0);
        let held: usize = lost.iter().map(|session| session.held()).sum();
        if held == 0 {
            return Ok(());
        }
        let what = format!("{held} requests of the connection that was lost are still being ended");
        Err(Refused { refusal: Refusal::Retry { after: None }, what })
    }

    async fn poll(&self, max: u8) -> Result<Batch, Refused> {
        let began = self.clock.now();
        let Some(session) = lock(&self.session).clone() else {
            return Err(Refused { refusal: Refusal::Stale, what: "the queue is not consumed from yet".to_owned() });
        };
        if session.prefetch != self.wanted() {
            session.retire("the number of slots has changed");
        }
        session.asked();
        let waited = timeout(patience::hold(self.patience(), AMQP_POLL_HOLD), self.wait(&session, max, began)).await;
        session.unasked();
        waited.unwrap_or_else(|_| Ok(Batch::default()))
    }

    async fn wait(
        &self,
        session: &Arc<Session>,
        max: u8,
        began: crate::domain::time::Instant,
    ) -> Result<Batch, Refused> {
        loop {
            let taken = if session.is_unwanted() { Vec::new() } else { session.take(usize::from(max)) };
            if taken.is_empty() {
                if let Some(what) = session.over() {
                    let ended = self.ended(session, what);
                    return if session.is_unwanted() { Ok(Batch::default()) } else { Err(ended) };
                }
                session.arrived.notified().await;
                continue;
            }
            let grants: Vec<Grant> = taken.into_iter().filter_map(|one| self.admit(session, one, began)).collect();
            if !grants.is_empty() {
                return Ok(Batch { grants, ..Batch::default() });
            }
        }
    }

    /// What follows the end of a session: a new one at once, or after a while where the connection was lost, so that a broker
    /// that comes back is not met by everybody at once.
    fn ended(&self, session: &Arc<Session>, what: String) -> Refused {
        let lost = session.lost().is_some();
        if lost {
            lock(&self.lost).push(Arc::clone(session));
        }
        let mut current = lock(&self.session);
        if current.as_ref().is_some_and(|current| current.epoch == session.epoch) {
            *current = None;
        }
        let refusal = if lost { Refusal::Retry { after: None } } else { Refusal::Stale };
        Refused { refusal, what }
    }

    /// Makes a grant of a delivery, or deals with it aside.
    fn admit(&self, session: &Arc<Session>, waiting: Waiting, began: crate::domain::time::Instant) -> Option<Grant> {
        let Waiting { mut delivery, since } = waiting;
        let Settings { form, max_attempts, max_message, queue, .. } = &self.settings;
        let most = usize::try_from(*max_message).unwrap_or(usize::MAX);
        if delivery.redelivered {
            self.tally.redelivered.add();
        }
        let step = task::step(&delivery, *max_attempts);
        let attempt = match step {
            Step::Try { attempt } | Step::Note { attempt } => attempt,
            Step::GiveUp { attempts } => attempts,
        };
        let number = self.deliveries.fetch_add(1, Ordering::Relaxed);
        let run = task::run(&delivery.properties, number, attempt);
        let fits = delivery.data.len() <= most;
        let task = (fits && matches!(step, Step::Try { .. })).then(|| task::definition(&delivery, *form));
        let now = self.clock.now();
        let taken = Taken {
            acker: delivery.acker.clone(),
            properties: std::mem::take(&mut delivery.properties),
            body: std::mem::take(&mut delivery.data).into(),
            queue: queue.as_str().into(),
            delivered: now.minus(since.elapsed()),
        };
        let part = Part::new(run.clone(), taken, Arc::clone(session), most, self.around());
        if task::patience(part.properties()).is_some_and(|patience| since.elapsed() >= patience) {
            self.aside(part, Aside::Expired);
            return None;
        }
        let Some(task) = task else {
            self.aside(part, if fits { Aside::Step(step) } else { Aside::TooLarge });
            return None;
        };
        let lease = now.since(began) + part::lease(part.delivered, now, self.patience(), AMQP_LEASE);
        let replies = Some(part.replies());
        Some(Grant { run: run.clone(), lease, task, claim: Claim::new(run, part), replies })
    }

    /// Deals with a request that no handler is to see. At most as many at once as were handed to us.
    fn aside(&self, part: Part, what: Aside) {
        let (tally, exhausted) = (Arc::clone(&self.tally), self.settings.exhausted.clone());
        self.beside(async move {
            let run = part.run.clone();
            if let Err(refused) = what.deal(part, &tally, exhausted).await {
                tracing::warn!(claim.run = %run, next = ?refused.refusal, "{}", refused.what);
            }
        });
    }

    /// A disk may take longer than a reclaim may.
    fn shelve(&self, claim: Claim) {
        self.beside(async move {
            if let Some(part) = claim.part::<Part>() {
                part.shelve().await;
            }
        });
    }

    fn part<'a>(&self, claim: &'a Claim) -> Result<&'a Part, Refused> {
        claim.part::<Part>().ok_or_else(|| Refused {
            refusal: Refusal::Rejected,
            what: format!("the claim on {} is none of this source", claim.run()),
        })
    }
}

/// Why no handler sees a request.
enum Aside {
    Expired,
    TooLarge,
    Step(Step),
}

impl Aside {
    async fn deal(self, part: Part, tally: &Tally, exhausted: Exhausted) -> Result<(), Refused> {
        const INTERNAL: Outcome = Outcome::Exception(Reason::InternalError);
        // Counted when it is done: a worker that leaves before gives the request back.
        match self {
            Self::Expired => {
                let reply = part::error("expired", "its time was over before it could be started", None);
                part.settle(INTERNAL, &Plan::Answer(reply)).await?;
                tally.expired.add();
            }
            Self::TooLarge => {
                let message = format!("the request has {} bytes, which is more than this worker takes", part.bytes());
                part.settle(INTERNAL, &Plan::Answer(part::error("too_large", &message, None))).await?;
                tally.too_large.add();
            }
            Self::Step(Step::Note { attempt }) => {
                part.settle(INTERNAL, &Plan::Again { attempts: attempt }).await?;
                tally.noted.add();
            }
            Self::Step(Step::GiveUp { attempts }) => {
                let reason = format!("it was tried {attempts} times, and each time its worker did not come to an end");
                tracing::error!(
                    alert = "exhausted", claim.run = %part.run,
                    "[alert operator] a request was tried {attempts} times and is given up; what it does to its workers their logs say"
                );
                give_up(&part, exhausted, reason, attempts).await?;
                tally.exhausted.add();
            }
            Self::Step(Step::Try { .. }) => {}
        }
        Ok(())
    }
}

/// The end of a request that was tried too often.
async fn give_up(part: &Part, exhausted: Exhausted, reason: String, attempts: u32) -> Result<(), Refused> {
    const INTERNAL: Outcome = Outcome::Exception(Reason::InternalError);
    let answer = Plan::Answer(part::error("attempts_exhausted", &reason, Some(attempts)));
    match exhausted {
        Exhausted::Answered => part.settle(INTERNAL, &answer).await,
        Exhausted::DeadLettered => part.settle(INTERNAL, &Plan::DeadLetter).await,
        Exhausted::Kept(queue) => {
            part.keep(&queue, &reason, attempts).await?;
            part.settle(INTERNAL, &answer).await
        }
    }
}

impl Source for Amqp {
    fn describe(&self) -> String {
        let Settings { broker, queue, .. } = &self.inner.settings;
        let blocked = lock(&self.inner.session).as_ref().is_some_and(|session| session.blocked());
        format!(
            "AMQP queue {queue} at {}{}",
            broker.shown(),
            if blocked { ", which lets nobody publish at present" } else { "" }
        )
    }

    fn deployment(&self) -> String {
        self.inner.settings.broker.shown().to_owned()
    }

    fn claimant(&self) -> String {
        let Settings { broker, queue, name, .. } = &self.inner.settings;
        format!("{} {queue} {name}", broker.shown())
    }

    fn manner(&self) -> Manner {
        Manner { long_poll: true, recovers: false, tells_canceled: false, ends_with_worker: true }
    }

    fn open(&self) -> Answer<'_, Opened> {
        Box::pin(self.inner.open())
    }

    fn poll(&self, _lane: Lane, max: u8) -> Answer<'_, Batch> {
        Box::pin(self.inner.poll(max))
    }

    fn claim<'a>(&'a self, message: &'a Message) -> Answer<'a, Grant> {
        let what = format!("requests are claimed by polls, and {} is a message", message.id);
        Box::pin(async { Err(Refused { refusal: Refusal::Rejected, what }) })
    }

    fn delete<'a>(&'a self, _lane: Lane, _id: &'a str, _receipt: &'a str) -> Answer<'a, ()> {
        Box::pin(async { Ok(()) })
    }

    fn recover<'a>(&'a self, _held: &'a [Run]) -> Answer<'a, Recovered> {
        Box::pin(async { Ok(Recovered::default()) })
    }

    /// What an earlier life held is the broker's again since its connection ended, or on the shelf, which is looked after apart.
    fn take_over<'a>(&'a self, run: &'a Run) -> Answer<'a, Grant> {
        let what = format!("request {run} was given up when its worker ended");
        Box::pin(async { Err(Refused { refusal: Refusal::Gone, what }) })
    }

    fn reclaim<'a>(&'a self, claim: &'a Claim) -> Answer<'a, Duration> {
        Box::pin(async {
            let part = self.inner.part(claim)?;
            let gone = |what: &str| Refused { refusal: Refusal::Gone, what: format!("reclaim {}: {what}", part.run) };
            if part.is_settled() {
                return Err(gone("it is settled"));
            }
            let patience = self.inner.patience();
            let due = patience::is_keeping_due(self.inner.clock.now().since(part.delivered), patience);
            if due && part.is_to_be_shelved() {
                self.inner.shelve(claim.clone());
            }
            if part.is_shelved() {
                return Ok(AMQP_LEASE);
            }
            match part.session.lost() {
                Some(what) => Err(gone(&what)),
                None => Ok(part::lease(part.delivered, self.inner.clock.now(), patience, AMQP_LEASE)),
            }
        })
    }

    fn report<'a>(&'a self, claim: &'a Claim, outcome: Outcome) -> Answer<'a, ()> {
        Box::pin(async move {
            let part = self.inner.part(claim)?;
            match part.plan(outcome) {
                Plan::Again { attempts }
                    if self.inner.settings.max_attempts.is_some_and(|max| attempts >= max.get()) =>
                {
                    let why = part.replies().why();
                    let reason = format!(
                        "it was tried {attempts} times, and each time its handler asked for another: {}",
                        why.as_deref().unwrap_or("no reason was given")
                    );
                    give_up(part, self.inner.settings.exhausted.clone(), reason, attempts).await?;
                    self.inner.tally.exhausted.add();
                    Ok(())
                }
                plan @ (Plan::Answer(_) | Plan::HandBack | Plan::Again { .. } | Plan::DeadLetter) => {
                    part.settle(outcome, &plan).await
                }
            }
        })
    }

    fn upload<'a>(&'a self, claim: &'a Claim, artifact: &'a Artifact) -> Answer<'a, ()> {
        Box::pin(async move {
            // Logs are read while the request runs; nobody keeps them.
            if artifact.name.starts_with("public/logs/") {
                return Ok(());
            }
            let what = format!("request {} has no artifacts: {} can go into its answer", claim.run(), artifact.name);
            Err(Refused { refusal: Refusal::Rejected, what })
        })
    }

    fn news(&self) -> Pin<Box<dyn Future<Output = News> + Send + '_>> {
        Box::pin(self.inner.news.read())
    }

    fn resized(&self, capacity: u32) {
        let prefetch = u16::try_from(capacity).unwrap_or(u16::MAX).max(1);
        let before = self.inner.prefetch.swap(prefetch, Ordering::Relaxed);
        if before != prefetch
            && let Some(session) = lock(&self.inner.session).clone()
        {
            session.retire("the number of slots has changed");
        }
    }

    fn tallies(&self) -> BTreeMap<&'static str, u64> {
        self.inner.tally.read()
    }

    fn unwanted(&self) {
        if let Some(session) = lock(&self.inner.session).clone() {
            session.dismiss();
        }
    }

    fn canceled<'a>(&'a self, claim: &'a Claim) -> Answer<'a, bool> {
        Box::pin(async {
            let part = self.inner.part(claim)?;
            Ok(!part.is_shelved() && part.session.lost().is_some())
        })
    }
}
