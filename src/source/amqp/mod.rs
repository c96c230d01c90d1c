//! Requests of an AMQP 0-9-1 queue, as RabbitMQ serves them.
//!
//! A delivery is a claim, and its lease is the channel that brought it: while that stands, the broker gives the request to
//! nobody else. A poll waits for deliveries, a reclaim looks whether the channel stands, a report publishes the answer and
//! acknowledges. What the broker does without being asked (a lost connection, a deleted queue) is told as [`News`].

mod answer;
mod aside;
mod clients;
mod interrupted;
mod keeping;
mod link;
mod outlet;
mod part;
mod room;
mod rules;
mod session;
mod settings;
mod shelf;
mod tally;
mod task;
mod unanswered;

use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use lapin::types::ShortString;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::amqp;
use crate::domain::attempts::Step;
use crate::domain::id::{Lane, Run};
use crate::domain::outcome::Outcome;
use crate::domain::patience;
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{AMQP_CHANNEL_LOOK_EVERY, AMQP_CLOSE_WAIT, AMQP_LEASE, AMQP_POLL_HOLD};

use super::{Answer, Artifact, Batch, Claim, Grant, Manner, Message, News, Opened, Recovered, Refused, Source, Window};
use aside::{Aside, give_up};
use clients::Clients;
use interrupted::Interrupted;
use link::Link;
use part::{Around, Part, Plan, Taken};
use room::Room;
use rules::Rules;
use session::{Session, Waiting};
pub use settings::{Early, Exhausted, Longest, Settings};
use shelf::Shelf;
use tally::Tally;
pub use task::Form;
use unanswered::Unanswered;

/// More requests than are ever settled beside the calls at once.
const COPYING_MAX: u32 = 1 << 17;

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
    rules: Rules,
    session: Mutex<Option<Arc<Session>>>,
    /// Those before, for as long as claims of them are held, and the last one until there is another: leave of them may still have
    /// to be taken, and their payloads may be there when their connection is not.
    earlier: Mutex<Vec<Arc<Session>>>,
    epochs: AtomicU64,
    prefetch: AtomicU16,
    news: Arc<Noticeboard>,
    tally: Arc<Tally>,
    unanswered: Arc<Unanswered>,
    room: Arc<Room>,
    /// Held by whoever settles a request beside the calls: by a copy, and then the original.
    copying: Arc<Semaphore>,
    /// What goes on beside the calls; it ends with the source.
    tasks: Mutex<JoinSet<()>>,
}

/// How many requests were handed to this process, whichever queue they are of: no two of them are called the same.
static DELIVERIES: AtomicU64 = AtomicU64::new(0);

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
        let unanswered = Unanswered::new(settings.refused_most, Arc::clone(&tally));
        Self {
            inner: Arc::new(Inner {
                link: Arc::new(Link::new(broker.clone(), name, Arc::clone(&tally))),
                shelf,
                looked_after: Once::new(),
                rules: Rules::new(&settings),
                settings,
                clock: Clock::boot(),
                session: Mutex::default(),
                earlier: Mutex::default(),
                epochs: AtomicU64::new(0),
                prefetch: AtomicU16::new(1),
                news: Arc::default(),
                unanswered: Arc::new(unanswered),
                room: Arc::default(),
                tally,
                copying: Arc::new(Semaphore::new(COPYING_MAX as usize)),
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
            unanswered: Arc::clone(&self.unanswered),
            room: Arc::clone(&self.room),
        }
    }

    fn look_after_the_shelf(&self, queue: &ShortString) {
        let Some(shelf) = self.shelf.clone() else { return };
        self.looked_after.call_once(|| {
            let copying = Arc::clone(&self.copying);
            let (link, tally, early) = (Arc::clone(&self.link), Arc::clone(&self.tally), self.settings.early);
            let interrupted = Interrupted { shelf, link, queue: queue.clone(), early, tally, copying };
            self.beside(interrupted.look_after());
        });
    }

    /// How many requests may be on their way. One that is on the shelf has a slot, and the broker knows nothing of it.
    fn wanted(&self) -> u16 {
        let shelved = self.shelf.as_ref().map_or(0, |shelf| shelf.held());
        self.prefetch.load(Ordering::Relaxed).saturating_sub(shelved).max(1)
    }

    async fn open(self: &Arc<Self>) -> Result<Opened, Refused> {
        let opened = Opened { lanes: 1, usable_for: None };
        {
            let mut current = lock(&self.session);
            if current.as_ref().is_some_and(|session| session.over().is_none()) {
                return Ok(opened);
            }
            lock(&self.earlier).extend(current.take());
        }
        let Settings { broker, queue, name, .. } = &self.settings;
        let queue = &amqp::short("the name of the queue", queue).map_err(|error| amqp::retry(error.to_string()))?;
        self.look_after_the_shelf(queue);
        let connection = self.link.connection().await?;
        // Asked only now: a new connection is made where the one before is known to be lost.
        self.lost_are_over()?;
        self.rules.learn(&self.settings, &connection).await;
        let epoch = self.epochs.fetch_add(1, Ordering::Relaxed) + 1;
        let prefetch = self.wanted();
        let tag = format!("{name}.{epoch}");
        let session::Opened { session, consumer, questions } =
            Session::open(broker, connection, queue, &tag, prefetch, epoch).await?;
        self.tally.sessions.add();
        tracing::debug!(queue = queue.as_str(), epoch, prefetch, "consuming");
        self.beside(Clients::count(Arc::downgrade(&session.clients), questions, Arc::clone(&self.tally)));
        let (pumped, inner) = (Arc::clone(&session), Arc::downgrade(self));
        self.beside(Arc::clone(&session).pump(consumer, Arc::clone(&self.news), move |waiting| {
            if let Some(inner) = inner.upgrade() {
                inner.hand_back(&pumped, waiting);
            }
        }));
        *lock(&self.session) = Some(session);
        Ok(opened)
    }

    /// I6: what a lost connection or channel had brought comes again by the next one, and must not meet itself here.
    fn lost_are_over(&self) -> Result<(), Refused> {
        let mut earlier = lock(&self.earlier);
        earlier.retain(|session| session.held() > 0);
        let lost = earlier.iter().filter(|session| session.is_lost());
        let held: usize = lost.map(|session| session.held()).sum();
        if held == 0 {
            return Ok(());
        }
        let what = format!("{held} requests of a connection or channel that was lost are still being ended");
        Err(Refused { refusal: Refusal::Retry { after: None }, what })
    }

    async fn poll(self: &Arc<Self>, max: u8) -> Result<Batch, Refused> {
        let began = self.clock.now();
        let session = self.session().await?;
        session.asked();
        let waited =
            timeout(patience::hold(self.rules.patience(), AMQP_POLL_HOLD), self.wait(&session, max, began)).await;
        session.unasked();
        waited.unwrap_or_else(|_| Ok(Batch::default()))
    }

    /// Where to ask. One that was left while nobody asked, or dismissed, is followed by another one at once: a source that shares its
    /// slots with others would use up its turn with that, again and again.
    async fn session(self: &Arc<Self>) -> Result<Arc<Session>, Refused> {
        let current = || lock(&self.session).clone();
        let is_left = current().is_none_or(|session| {
            if session.prefetch != self.wanted() {
                session.retire("the number of slots has changed");
            }
            session.is_left()
        });
        if is_left {
            self.open().await?;
        }
        let what = || "the queue is not consumed from yet".to_owned();
        current().ok_or_else(|| Refused { refusal: Refusal::Stale, what: what() })
    }

    async fn wait(self: &Arc<Self>, session: &Arc<Session>, max: u8, began: Instant) -> Result<Batch, Refused> {
        loop {
            let meets = self.lost_are_over().is_err();
            let taken = if meets || session.is_unwanted() { Vec::new() } else { session.take(usize::from(max)) };
            if taken.is_empty() {
                if let Some(what) = session.over() {
                    // One that was left is no trouble: the next poll has another one.
                    let is_none = session.is_unwanted() || session.is_left();
                    let ended = self.ended(session, what);
                    return if is_none { Ok(Batch::default()) } else { Err(ended) };
                }
                let arrived = session.arrived.notified();
                if meets {
                    // Nobody tells when the last of them has ended.
                    drop(timeout(AMQP_CHANNEL_LOOK_EVERY, arrived).await);
                } else {
                    arrived.await;
                }
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
        let mut current = lock(&self.session);
        if current.as_ref().is_some_and(|current| current.epoch == session.epoch) {
            lock(&self.earlier).extend(current.take());
        }
        let refusal = if session.lost().is_some() { Refusal::Retry { after: None } } else { Refusal::Stale };
        Refused { refusal, what }
    }

    /// Makes a grant of a delivery, or deals with it aside.
    fn admit(self: &Arc<Self>, session: &Arc<Session>, waiting: Waiting, began: Instant) -> Option<Grant> {
        let Waiting { delivery, since } = &waiting;
        let (since, Settings { form, max_attempts, .. }) = (*since, &self.settings);
        if delivery.redelivered {
            self.tally.redelivered.add();
        }
        let step = task::seen(delivery).step(*max_attempts, self.room.copies());
        let attempt = match step {
            Step::Try { attempt } | Step::Note { attempt } => attempt,
            Step::GiveUp { attempts } => attempts,
        };
        let fits = delivery.data.len() <= self.most();
        let task = (fits && matches!(step, Step::Try { .. })).then(|| task::definition(delivery, *form));
        let now = self.clock.now();
        let part = self.part_of(session, waiting, attempt, now);
        if task::patience(part.properties()).is_some_and(|patience| since.elapsed() >= patience) {
            self.aside(part, Aside::Expired);
            return None;
        }
        let Some(task) = task else {
            self.aside(part, if fits { Aside::Step(step) } else { Aside::TooLarge });
            return None;
        };
        let lease = now.since(began) + part::lease(part.delivered, now, self.rules.patience(), AMQP_LEASE);
        let (run, replies) = (part.run.clone(), Some(part.replies()));
        Some(Grant { run: run.clone(), lease, task, unreadable: None, claim: Claim::new(run, part), replies })
    }

    fn part_of(&self, session: &Arc<Session>, waiting: Waiting, attempt: u32, now: Instant) -> Part {
        let Waiting { delivery, since } = waiting;
        let run = task::run(&delivery.properties, DELIVERIES.fetch_add(1, Ordering::Relaxed), attempt);
        let taken = Taken {
            tag: delivery.delivery_tag,
            properties: delivery.properties,
            body: delivery.data.into(),
            queue: session.queue.clone(),
            delivered: now.minus(since.elapsed()),
            since,
        };
        Part::new(run, taken, Arc::clone(session), self.most(), self.around())
    }

    /// The largest request.
    fn most(&self) -> usize {
        usize::try_from(self.settings.max_message).unwrap_or(usize::MAX)
    }

    /// Nobody has looked at it, which is no attempt.
    fn hand_back(self: &Arc<Self>, session: &Arc<Session>, waiting: Waiting) {
        let attempt = task::seen(&waiting.delivery).attempts();
        let part = self.part_of(session, waiting, attempt, self.clock.now());
        let plan = self.handed_on(&part);
        self.aside(part, Aside::Unwanted(plan));
    }

    /// How what was not begun goes back. Where nothing is counted it need not lose its place, and where nobody may publish a copy
    /// would wait for as long.
    fn handed_on(&self, part: &Part) -> Plan {
        let counts = self.settings.max_attempts.is_some();
        if counts && !part.is_blocked() { Plan::HandOn } else { Plan::HandBack }
    }

    /// Deals with a request that no handler is to see. At most as many at once as were handed to us.
    fn aside(self: &Arc<Self>, part: Part, what: Aside) {
        let (tally, inner) = (Arc::clone(&self.tally), Arc::downgrade(self));
        let copying = Arc::clone(&self.copying);
        self.beside(async move {
            let Ok(_copying) = copying.acquire().await else { return };
            let run = part.run.clone();
            // A source that is gone has given its requests back.
            let Some(inner) = inner.upgrade() else { return };
            let exhausted = match what {
                Aside::Step(Step::GiveUp { .. }) => rules::exhausted(&inner.settings).await,
                Aside::Expired | Aside::TooLarge | Aside::Step(_) | Aside::Unwanted(_) => Exhausted::Answered,
            };
            drop(inner);
            if let Err(refused) = what.deal(part, &tally, exhausted).await {
                tracing::warn!(claim.run = %run, next = %refused.refusal, "{}", refused.what);
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

    fn recover<'a>(&'a self, _held: &'a [Run], _asked: &'a [Window]) -> Answer<'a, Recovered> {
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
            let patience = self.inner.rules.patience();
            let due = patience::is_keeping_due(self.inner.clock.now().since(part.delivered), patience);
            if due && part.is_to_be_shelved() {
                self.inner.shelve(claim.clone());
            }
            if part.is_shelved() {
                return Ok(AMQP_LEASE);
            }
            match part.session.lost() {
                Some(what) => Err(gone(&what)),
                None if part.session.is_lost() => Err(gone("its channel is closed")),
                None => Ok(patience::extension(self.inner.clock.now().since(part.delivered), patience, AMQP_LEASE)),
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
                    give_up(part, rules::exhausted(&self.inner.settings).await, reason, attempts).await?;
                    self.inner.tally.exhausted.add();
                    Ok(())
                }
                Plan::HandOn => part.settle(outcome, self.inner.handed_on(part)).await,
                plan @ (Plan::Answer(_) | Plan::HandBack | Plan::Again { .. } | Plan::DeadLetter) => {
                    part.settle(outcome, plan).await
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

    /// What was acknowledged last may still be on its way: a connection that breaks would bring it back.
    fn close(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {
            let earlier = std::mem::take(&mut *lock(&self.inner.earlier));
            let sessions = earlier.into_iter().chain(lock(&self.inner.session).take());
            let closing =
                sessions.filter(|session| !session.is_lost()).map(|session| async move { session.close().await });
            let mut closing: JoinSet<()> = closing.collect();
            while closing.join_next().await.is_some() {}
            // A copy whose original is not settled yet would be one too many.
            let all = self.inner.copying.acquire_many(COPYING_MAX);
            if timeout(AMQP_CLOSE_WAIT, all).await.is_err() {
                tracing::debug!("requests that are put back are not waited for any longer; some may run twice");
            }
            self.inner.copying.close();
            if let Some(connection) = self.inner.link.known() {
                amqp::close(&connection, AMQP_CLOSE_WAIT).await;
            }
        })
    }

    fn canceled<'a>(&'a self, claim: &'a Claim) -> Answer<'a, bool> {
        Box::pin(async {
            let part = self.inner.part(claim)?;
            Ok(!part.is_shelved() && part.session.lost().is_some())
        })
    }
}
