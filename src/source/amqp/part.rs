//! A claim on a request: answered, then acknowledged on the channel that brought it, or not at all (I18, I19). One that takes
//! long may be put on the shelf and acknowledged before; from then on it belongs to this host, and no channel matters to it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, DeliveryTag, ShortString};
use tokio::sync::Mutex;

use crate::amqp;
use crate::domain::attempts::Copies;
use crate::domain::id::Run;
use crate::domain::outcome::{Outcome, Reason};
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;
use crate::host::crash::crash_point;
use crate::source::{Refused, Replies, Reply, Status};

use super::answer::{Sender, error, last};
use super::keeping::{Shelving, Telling};
use super::link::Link;
use super::outlet::Published;
use super::room::Room;
use super::session::{Last, Session};
use super::shelf::{Left, Shelf};
use super::tally::Tally;
use super::task;
use super::unanswered::Unanswered;

/// Why a request is in the poison queue.
const REASON: &str = "x-journeyman-reason";
/// Which queue it came from.
const ORIGIN: &str = "x-journeyman-queue";

/// A claim on a request.
pub(super) struct Part {
    pub(super) run: Run,
    pub(super) session: Arc<Session>,
    pub(super) delivered: Instant,
    /// The same by the clock of timers.
    pub(super) since: tokio::time::Instant,
    tag: DeliveryTag,
    /// The broker is told of a delivery once: of what it does not know any more a second word would cost the channel.
    told: AtomicBool,
    queue: ShortString,
    pub(super) properties: BasicProperties,
    pub(super) body: Arc<[u8]>,
    replies: Replies,
    pub(super) around: Around,
    pub(super) state: Mutex<State>,
    pub(super) settled: AtomicBool,
    /// Whether it is acknowledged and on the shelf, so that no channel matters to it.
    pub(super) shelved: Arc<AtomicBool>,
    /// Whether somebody is about to put it there.
    pub(super) shelving: AtomicBool,
    /// Whether the session still counts it.
    counted: AtomicBool,
}

/// What the claims of a source have in common.
#[derive(Clone)]
pub(super) struct Around {
    pub(super) link: Arc<Link>,
    /// Where requests are put that are acknowledged early; `None` where none are.
    pub(super) shelf: Option<Arc<Shelf>>,
    pub(super) tally: Arc<Tally>,
    pub(super) unanswered: Arc<Unanswered>,
    /// Whether its queue takes copies.
    pub(super) room: Arc<Room>,
}

type Publishing = Pin<Box<dyn Future<Output = lapin::Result<Published>> + Send>>;

/// How far settling it is. What is under way is kept over a call that was dropped, so that nothing is published twice.
#[derive(Default)]
pub(super) struct State {
    begun: Option<Arc<Begun>>,
    publishing: Option<Publishing>,
    published: Option<Published>,
    /// The broker is being told what becomes of it, which can be begun once.
    telling: Option<Telling>,
    /// Since when its answer is refused.
    refused_since: Option<tokio::time::Instant>,
    /// Since when a copy of it is refused.
    full_since: Option<tokio::time::Instant>,
    /// A copy is in the queue for those that were given up.
    kept: bool,
    pub(super) shelving: Shelving,
    pub(super) done: Option<Outcome>,
}

impl State {
    /// Whether it is neither settled nor about to be.
    pub(super) const fn may_be_shelved(&self) -> bool {
        self.done.is_none() && self.telling.is_none()
    }
}

/// How it began to be settled. What is asked for later cannot call back what was sent: somebody would have it twice.
struct Begun {
    outcome: Outcome,
    plan: Plan,
}

/// What is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Publish {
    Answer,
    Copy,
}

/// What is done with a request in the end.
#[derive(Debug, Clone)]
pub(super) enum Plan {
    /// Answer, where somebody waits, and acknowledge.
    Answer(Reply),
    /// Give it back to the queue, where it was.
    HandBack,
    /// Put a copy of it into the queue as if it had not been handed out, and acknowledge: nothing of it has run.
    HandOn,
    /// Put a copy into the queue whose header says how often it was tried, and acknowledge.
    Again {
        /// What the header says.
        attempts: u32,
    },
    /// Let the broker dead-letter it, or drop it where no policy says otherwise.
    DeadLetter,
}

impl Part {
    pub(super) fn new(run: Run, delivery: Taken, session: Arc<Session>, most: usize, around: Around) -> Self {
        let Taken { tag, properties, body, queue, delivered, since } = delivery;
        let shelved = Arc::new(AtomicBool::new(false));
        let partial = Sender {
            session: Arc::clone(&session),
            shelved: Arc::clone(&shelved),
            to: properties.reply_to().clone(),
            correlation_id: properties.correlation_id().clone(),
            around: around.clone(),
        };
        session.hold(run.clone());
        Self {
            run,
            session,
            delivered,
            since,
            tag,
            told: AtomicBool::new(false),
            queue,
            properties,
            body,
            replies: Replies::new(partial, most),
            around,
            state: Mutex::default(),
            settled: AtomicBool::new(false),
            shelved,
            shelving: AtomicBool::new(false),
            counted: AtomicBool::new(true),
        }
    }

    pub(super) fn replies(&self) -> Replies {
        self.replies.clone()
    }

    /// Whether the broker lets nobody publish.
    pub(super) fn is_blocked(&self) -> bool {
        self.session.blocked()
    }

    pub(super) fn properties(&self) -> &BasicProperties {
        &self.properties
    }

    pub(super) fn bytes(&self) -> usize {
        self.body.len()
    }

    /// What an outcome asks for. `attempts` is how often it was tried, this time included.
    pub(super) fn plan(&self, outcome: Outcome) -> Plan {
        // A handler that says itself what is wrong is believed; one that says all is well and then fails is not.
        let own = self.replies.last();
        let refusal = own.clone().filter(|reply| reply.status != Status::OK);
        let wrong = |kind: &str, otherwise: &str| {
            let why = self.replies.why();
            Plan::Answer(refusal.clone().unwrap_or_else(|| error(kind, why.as_deref().unwrap_or(otherwise), None)))
        };
        match outcome {
            Outcome::Completed => Plan::Answer(own.unwrap_or_else(|| Reply::ok(*b"null"))),
            Outcome::Failed => wrong("failed", "the request failed"),
            Outcome::Exception(Reason::MalformedPayload) => wrong("malformed_request", "the request is malformed"),
            Outcome::Exception(Reason::ResourceUnavailable) => wrong("unavailable", "something it needs cannot be had"),
            Outcome::Exception(Reason::InternalError) => wrong("internal_error", "the worker is at fault"),
            Outcome::Exception(Reason::WorkerShutdown) if self.replies.is_untouched() => Plan::HandOn,
            Outcome::Exception(Reason::WorkerShutdown) => Plan::HandBack,
            Outcome::Exception(Reason::IntermittentTask) => Plan::Again { attempts: self.run.run.saturating_add(1) },
        }
    }

    /// Settles it. Repeating it goes on where it was, and is harmless once it is done.
    pub(super) async fn settle(&self, outcome: Outcome, plan: Plan) -> Result<(), Refused> {
        let mut state = self.state.lock().await;
        if state.done.is_none() {
            let begun = Arc::clone(state.begun.get_or_insert_with(|| Arc::new(Begun { outcome, plan })));
            if let Err(refused) = self.go_on(&mut state, &begun).await {
                (state.begun, state.published) = (None, None);
                return Err(refused);
            }
        }
        match state.done {
            Some(done) if done != outcome => Err(self.refused(Refusal::Gone, &format!("it was settled as {done}"))),
            Some(_) | None => Ok(()),
        }
    }

    async fn go_on(&self, state: &mut State, begun: &Begun) -> Result<(), Refused> {
        if let Shelving::Acknowledging(..) = state.shelving {
            self.shelve_on(state).await?;
        }
        if self.is_shelved() {
            self.settle_shelved(state, &begun.plan).await?;
        } else {
            self.settle_held(state, &begun.plan).await?;
        }
        self.done(state, begun.outcome);
        Ok(())
    }

    async fn settle_held(&self, state: &mut State, plan: &Plan) -> Result<(), Refused> {
        if state.telling.is_none() {
            if let Some(lost) = self.session.lost() {
                return Err(self.refused(Refusal::Gone, &lost));
            }
            // Somebody else has it by now, and would answer a second time.
            if self.session.is_lost() {
                return Err(self.refused(Refusal::Gone, "its channel is closed"));
            }
            let last = self.publish(state, plan).await?;
            state.telling = Some(self.tell(last));
        }
        self.told(state).await?;
        match plan {
            Plan::Answer(_) => crash_point("request-acknowledged"),
            Plan::HandOn | Plan::HandBack => self.around.tally.handed_back.add(),
            Plan::Again { .. } | Plan::DeadLetter => {}
        }
        Ok(())
    }

    /// Publishes what the plan asks for. Says what the broker is told then.
    async fn publish(&self, state: &mut State, plan: &Plan) -> Result<Last, Refused> {
        match plan {
            Plan::Answer(reply) => {
                self.answer(state, reply).await?;
                crash_point("request-confirmed");
            }
            Plan::Again { attempts } => {
                if let Err(refused) = self.again(state, *attempts).await {
                    if !self.is_full_for_long(state) {
                        return Err(refused);
                    }
                    // The slot that waits for room in a full queue is one that makes none there.
                    return Ok(Last::Requeue);
                }
                crash_point("request-copied");
            }
            Plan::HandOn => {
                if let Err(refused) = self.again(state, self.run.run).await {
                    return if state.full_since.is_some() { Ok(Last::Requeue) } else { Err(refused) };
                }
                crash_point("request-copied");
            }
            Plan::HandBack => return Ok(Last::Requeue),
            Plan::DeadLetter => return Ok(Last::DeadLetter),
        }
        Ok(Last::Acknowledge)
    }

    /// Settles what is acknowledged already. What is handed back, or given up to the broker, goes there as a copy: with so many
    /// attempts in its header that whoever gets it gives it up as well. Where its queue is full for long it stays on the disk until
    /// that is over, and makes room for others.
    async fn settle_shelved(&self, state: &mut State, plan: &Plan) -> Result<(), Refused> {
        let attempts = match plan {
            Plan::Answer(_) => None,
            Plan::Again { attempts } => Some(*attempts),
            Plan::HandBack | Plan::HandOn => Some(self.run.run),
            Plan::DeadLetter => Some(self.run.run.saturating_add(1)),
        };
        if let Plan::Answer(reply) = plan {
            self.answer(state, reply).await?;
            crash_point("shelf-answered");
        }
        if let Some(attempts) = attempts {
            if let Err(refused) = self.again(state, attempts).await {
                return if self.is_full_for_long(state) { self.stays(state, attempts).await } else { Err(refused) };
            }
            crash_point("shelf-returned");
        }
        if let Plan::HandBack | Plan::HandOn = plan {
            self.around.tally.handed_back.add();
        }
        if let (Some(shelf), Shelving::Done(entry)) = (&self.around.shelf, &state.shelving) {
            shelf.clear(entry.clone()).await;
            crash_point("shelf-removed");
        }
        Ok(())
    }

    /// Whether its queue has refused copies of it for as long as is waited for that.
    fn is_full_for_long(&self, state: &State) -> bool {
        state.full_since.is_some_and(|since| self.around.unanswered.is_over(since))
    }

    /// Leaves it on the disk to whoever looks after what is there.
    async fn stays(&self, state: &mut State, attempts: u32) -> Result<(), Refused> {
        if let (Some(shelf), Shelving::Done(entry)) = (&self.around.shelf, &state.shelving) {
            tracing::warn!(claim.run = %self.run, "its queue is full: the request waits on this host's disk for room there");
            let (there, place) = (Arc::clone(shelf), entry.clone());
            let noting = tokio::task::spawn_blocking(move || there.hand_back(&place, attempts)).await;
            let place = noting.map_err(std::io::Error::other).and_then(|noted| noted).unwrap_or_else(|error| {
                tracing::warn!(claim.run = %self.run, %error, "a later life will take it for one that was interrupted");
                entry.clone()
            });
            shelf.leave(Left::Returning(place, attempts));
        }
        Ok(())
    }

    /// Puts a copy into its own queue whose header says how often it was tried.
    async fn again(&self, state: &mut State, attempts: u32) -> Result<(), Refused> {
        let properties = task::copied(&self.properties, attempts, self.since.elapsed());
        self.copy(state, self.queue.clone(), properties).await
    }

    /// Whether it is acknowledged and on the shelf.
    pub(super) fn is_shelved(&self) -> bool {
        self.shelved.load(Ordering::Acquire)
    }

    pub(super) fn uncount(&self) {
        if self.counted.swap(false, Ordering::AcqRel) {
            self.session.let_go();
        }
    }

    /// Puts a copy into another queue, with the reason. A queue that is not there is told of, and keeps nothing.
    pub(super) async fn keep(&self, queue: &str, reason: &str, attempts: u32) -> Result<(), Refused> {
        let mut state = self.state.lock().await;
        if state.kept || state.done.is_some() {
            return Ok(());
        }
        if self.session.is_lost() && !self.is_shelved() {
            return Err(self.refused(Refusal::Gone, "its channel is closed"));
        }
        let properties = task::kept(&self.properties, attempts);
        let mut headers = properties.headers().clone().unwrap_or_default();
        headers.insert(REASON.into(), AMQPValue::LongString(reason.into()));
        headers.insert(ORIGIN.into(), AMQPValue::LongString(self.queue.as_str().into()));
        let properties = properties.with_headers(headers);
        let copied = match amqp::short("the name of the queue for them", queue) {
            Ok(queue) => self.copy(&mut state, queue, properties).await,
            Err(error) => Err(self.refused(Refusal::Rejected, &error.to_string())),
        };
        match copied {
            Ok(()) => {}
            Err(refused) if refused.refusal == Refusal::Rejected => {
                self.not_kept(&refused);
            }
            Err(refused) => {
                // It is refused again for as long as an answer would be.
                if !self.is_full_for_long(&state) {
                    state.refused_since = state.refused_since.or(state.full_since);
                    return Err(refused);
                }
                self.not_kept(&refused);
            }
        }
        // Its own queue is another one, and so is that of its answer.
        (state.published, state.full_since, state.refused_since) = (None, None, None);
        state.kept = true;
        Ok(())
    }

    fn not_kept(&self, refused: &Refused) {
        tracing::error!(alert = "not-kept", claim.run = %self.run, "[alert operator] a request that was given up could not be kept: {}", refused.what);
    }

    /// Whether nothing is left to be done for it.
    pub(super) fn is_settled(&self) -> bool {
        self.settled.load(Ordering::Relaxed)
    }

    fn done(&self, state: &mut State, outcome: Outcome) {
        state.done = Some(outcome);
        self.settled.store(true, Ordering::Relaxed);
        self.session.settled(&self.run);
        self.leave(std::mem::take(&mut state.shelving));
    }

    async fn answer(&self, state: &mut State, reply: &Reply) -> Result<(), Refused> {
        let Some(to) = self.properties.reply_to().clone().filter(|to| !to.as_str().is_empty()) else {
            return Ok(());
        };
        let properties = |reply: &Reply| last(reply, &self.properties);
        match self.published(state, to.clone(), properties(reply), &reply.body, Publish::Answer).await {
            Ok(Published::Taken) => self.around.tally.answers.add(),
            Ok(Published::Returned) => self.around.tally.clients_gone.add(),
            Ok(Published::Refused) => return self.refused_again(state, &to),
            // It is this answer that the broker cannot take, such as for its size: no repetition helps, but a shorter one may.
            Err(fault) if is_soft(&fault) => {
                tracing::warn!(claim.run = %self.run, error = amqp::shown(&fault), "an answer cannot be sent; an error goes in its place");
                let reply =
                    error("answer_refused", &format!("the answer could not be sent: {}", amqp::shown(&fault)), None);
                match self.published(state, to.clone(), properties(&reply), &reply.body, Publish::Answer).await {
                    Ok(Published::Taken | Published::Returned) => {}
                    Ok(Published::Refused) => return self.refused_again(state, &to),
                    Err(fault) => return Err(self.refused(Refusal::Retry { after: None }, &amqp::shown(&fault))),
                }
            }
            Err(fault) => return Err(self.refused(Refusal::Retry { after: None }, &amqp::shown(&fault))),
        }
        Ok(())
    }

    /// Its queue is full, or an answer may not come in. A slot that waits for that is no use to anybody else.
    fn refused_again(&self, state: &mut State, to: &ShortString) -> Result<(), Refused> {
        self.around.tally.nacked.add();
        let since = *state.refused_since.get_or_insert_with(tokio::time::Instant::now);
        if self.around.unanswered.is_over(since) {
            self.around.unanswered.give_up(&self.run, to.as_str());
            return Ok(());
        }
        Err(self.refused(Refusal::Retry { after: None }, "the broker refused the answer"))
    }

    /// Whether its answer was refused, or what is kept of it.
    pub(super) async fn is_refused(&self) -> bool {
        self.state.lock().await.refused_since.is_some()
    }

    async fn copy(&self, state: &mut State, queue: ShortString, properties: BasicProperties) -> Result<(), Refused> {
        let retry = |what: &str| Err(self.refused(Refusal::Retry { after: None }, what));
        match self.published(state, queue.clone(), properties, &self.body, Publish::Copy).await {
            Ok(Published::Taken) => {
                self.learns(&queue, Copies::Taken);
                Ok(())
            }
            Ok(Published::Returned) => Err(self.refused(Refusal::Rejected, &format!("there is no queue {queue}"))),
            Ok(Published::Refused) => {
                self.learns(&queue, Copies::Refused);
                state.full_since.get_or_insert_with(tokio::time::Instant::now);
                retry("the broker refused a copy of it: its queue is full")
            }
            Err(fault) if is_soft(&fault) => {
                self.learns(&queue, Copies::Refused);
                Err(self.refused(Refusal::Rejected, &amqp::shown(&fault)))
            }
            Err(fault) => retry(&amqp::shown(&fault)),
        }
    }

    /// What a queue has made of a copy, where it is that of the requests.
    fn learns(&self, queue: &ShortString, copies: Copies) {
        if *queue == self.queue {
            self.around.room.learns(copies);
        }
    }

    /// Publishes, or waits on for what is being published, or says what became of it.
    async fn published(
        &self,
        state: &mut State,
        key: ShortString,
        properties: BasicProperties,
        body: &Arc<[u8]>,
        what: Publish,
    ) -> lapin::Result<Published> {
        if let Some(published) = state.published {
            return Ok(published);
        }
        let publishing = state.publishing.get_or_insert_with(|| {
            let (outlet, body) = (Arc::clone(&self.session.outlet), Arc::clone(body));
            if what == Publish::Answer {
                self.session.clients.ask_ahead(&key);
            }
            match what {
                _ if self.is_shelved() => Box::pin(Arc::clone(&self.around.link).publish(key, properties, body)),
                Publish::Answer => Box::pin(outlet.publish(key, properties, body)),
                Publish::Copy => Box::pin(outlet.publish_alone(key, properties, body)),
            }
        });
        let ended = publishing.await;
        state.publishing = None;
        // What was refused is published anew.
        state.published = ended.as_ref().ok().copied().filter(|published| *published != Published::Refused);
        ended
    }

    /// To be polled at once.
    pub(super) fn tell(&self, last: Last) -> Telling {
        let (session, tag) = (Arc::clone(&self.session), self.once());
        Box::pin(async move {
            match tag {
                Some(tag) => session.tell(tag, last).await,
                None => Ok(false),
            }
        })
    }

    /// Its tag, for the first who asks.
    fn once(&self) -> Option<DeliveryTag> {
        (!self.told.swap(true, Ordering::AcqRel)).then_some(self.tag)
    }

    async fn told(&self, state: &mut State) -> Result<(), Refused> {
        let Some(telling) = &mut state.telling else { return Ok(()) };
        let told = telling.await;
        state.telling = None;
        match told {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.unacknowledged("its channel is closed")),
            Err(error) => Err(self.unacknowledged(&amqp::shown(&error))),
        }
    }

    /// The claim is lost, whatever was published: it will be handed out again.
    pub(super) fn unacknowledged(&self, why: &str) -> Refused {
        self.around.tally.unacknowledged.add();
        self.refused(Refusal::Gone, why)
    }

    pub(super) fn refused(&self, refusal: Refusal, what: &str) -> Refused {
        Refused { refusal, what: format!("report on request {}: {what}", self.run) }
    }
}

impl Drop for Part {
    /// What nobody settled goes back at once, instead of when its channel ends.
    fn drop(&mut self) {
        self.uncount();
        if self.settled.load(Ordering::Relaxed) {
            return;
        }
        self.session.settled(&self.run);
        let shelving = std::mem::take(&mut self.state.get_mut().shelving);
        let is_the_brokers = matches!(shelving, Shelving::No | Shelving::Writing(..) | Shelving::Written(_));
        self.leave(shelving);
        if is_the_brokers && self.once().is_some_and(|tag| self.session.give_back(tag)) {
            self.around.tally.handed_back.add();
        }
    }
}

/// What is kept of a delivery.
pub(super) struct Taken {
    pub(super) tag: DeliveryTag,
    pub(super) properties: BasicProperties,
    pub(super) body: Arc<[u8]>,
    pub(super) queue: ShortString,
    pub(super) delivered: Instant,
    pub(super) since: tokio::time::Instant,
}

/// Something is wrong with what was published, and not with the way there.
fn is_soft(error: &lapin::Error) -> bool {
    error.is_amqp_soft_error()
}

/// How long a claim may be trusted that was just brought: as long as its channel is looked after, and never past the broker's patience.
pub(super) fn lease(delivered: Instant, now: Instant, patience: Option<Duration>, most: Duration) -> Duration {
    patience.map_or(most, |patience| patience.saturating_sub(now.since(delivered)).min(most))
}
