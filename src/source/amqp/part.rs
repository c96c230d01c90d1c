//! A claim on a request: answered, then acknowledged on the channel that brought it, or not at all (I18, I19).

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Waker};
use std::time::Duration;

use lapin::options::{BasicAckOptions, BasicRejectOptions};
use lapin::types::{AMQPValue, ShortString};
use lapin::{Acker, BasicProperties};
use serde_json::json;
use tokio::sync::Mutex;

use crate::amqp::{self, table};
use crate::domain::id::Run;
use crate::domain::outcome::{Outcome, Reason};
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;
use crate::source::{Answer, Partial, Refused, Replies, Reply, Status};

use super::session::{self, Published, Session};
use super::tally::Tally;
use super::task;

/// How it went.
const STATUS: &str = "x-status";
/// Whether more answers follow.
const PARTIAL: &str = "x-non-terminating-response";
/// Why a request is in the poison queue.
const REASON: &str = "x-journeyman-reason";
/// Which queue it came from.
const ORIGIN: &str = "x-journeyman-queue";

/// A claim on a request.
pub(super) struct Part {
    pub(super) run: Run,
    pub(super) session: Arc<Session>,
    pub(super) delivered: Instant,
    acker: Acker,
    queue: ShortString,
    properties: BasicProperties,
    body: Arc<[u8]>,
    replies: Replies,
    tally: Arc<Tally>,
    state: Mutex<State>,
    settled: AtomicBool,
}

type Publishing = Pin<Box<dyn Future<Output = lapin::Result<Published>> + Send>>;

/// How far settling it is. What is under way is kept over a call that was dropped, so that nothing is published twice.
#[derive(Default)]
struct State {
    publishing: Option<Publishing>,
    published: Option<Published>,
    /// A copy is in the queue for those that were given up.
    kept: bool,
    done: Option<Outcome>,
}

/// What is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Publish {
    Answer,
    Copy,
}

/// What is done with a request in the end.
#[derive(Debug)]
pub(super) enum Plan {
    /// Answer, where somebody waits, and acknowledge.
    Answer(Reply),
    /// Give it back to the queue, where it was.
    HandBack,
    /// Put a copy into the queue whose header says how often it was tried, and acknowledge.
    Again {
        /// What the header says.
        attempts: u32,
    },
    /// Let the broker dead-letter it, or drop it where no policy says otherwise.
    DeadLetter,
}

impl Part {
    pub(super) fn new(run: Run, delivery: Taken, session: Arc<Session>, most: usize, tally: Arc<Tally>) -> Self {
        let Taken { acker, properties, body, queue, delivered } = delivery;
        let partial = Sender {
            session: Arc::clone(&session),
            to: properties.reply_to().clone(),
            correlation_id: properties.correlation_id().clone(),
            tally: Arc::clone(&tally),
        };
        session.hold(run.clone());
        Self {
            run,
            session,
            delivered,
            acker,
            queue,
            properties,
            body,
            replies: Replies::new(partial, most),
            tally,
            state: Mutex::default(),
            settled: AtomicBool::new(false),
        }
    }

    pub(super) fn replies(&self) -> Replies {
        self.replies.clone()
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
            Outcome::Exception(Reason::WorkerShutdown) => Plan::HandBack,
            Outcome::Exception(Reason::IntermittentTask) => Plan::Again { attempts: self.run.run.saturating_add(1) },
        }
    }

    /// Settles it. Repeating it goes on where it was, and is harmless once it is done.
    pub(super) async fn settle(&self, outcome: Outcome, plan: &Plan) -> Result<(), Refused> {
        let mut state = self.state.lock().await;
        match state.done {
            Some(done) if done == outcome => return Ok(()),
            Some(done) => return Err(self.refused(Refusal::Gone, &format!("it was settled as {done}"))),
            None => {}
        }
        if let Some(lost) = self.session.lost() {
            return Err(self.refused(Refusal::Gone, &lost));
        }
        match plan {
            Plan::Answer(reply) => self.answer(&mut state, reply).await?,
            Plan::Again { attempts } => {
                let properties = task::copied(&self.properties, *attempts);
                self.copy(&mut state, self.queue.clone(), properties).await?;
            }
            Plan::HandBack => {
                self.reject(BasicRejectOptions { requeue: true }).await?;
                self.tally.handed_back.add();
                self.done(&mut state, outcome);
                return Ok(());
            }
            Plan::DeadLetter => {
                self.reject(BasicRejectOptions { requeue: false }).await?;
                self.done(&mut state, outcome);
                return Ok(());
            }
        }
        self.acknowledge().await?;
        self.done(&mut state, outcome);
        Ok(())
    }

    /// Puts a copy into another queue, with the reason. A queue that is not there is told of, and keeps nothing.
    pub(super) async fn keep(&self, queue: &str, reason: &str, attempts: u32) -> Result<(), Refused> {
        let mut state = self.state.lock().await;
        if state.kept || state.done.is_some() {
            return Ok(());
        }
        let mut headers = task::copied(&self.properties, attempts).headers().clone().unwrap_or_default();
        headers.insert(REASON.into(), AMQPValue::LongString(reason.into()));
        headers.insert(ORIGIN.into(), AMQPValue::LongString(self.queue.as_str().into()));
        let properties = task::copied(&self.properties, attempts).with_headers(headers);
        match self.copy(&mut state, queue.into(), properties).await {
            Ok(()) => {}
            Err(refused) if refused.refusal == Refusal::Rejected => {
                tracing::error!(alert = "not-kept", claim.run = %self.run, "[alert operator] a request that was given up could not be kept: {}", refused.what);
            }
            Err(refused) => return Err(refused),
        }
        state.published = None;
        state.kept = true;
        Ok(())
    }

    /// Whether nothing is left to be done for it.
    pub(super) fn is_settled(&self) -> bool {
        self.settled.load(Ordering::Relaxed)
    }

    fn done(&self, state: &mut State, outcome: Outcome) {
        state.done = Some(outcome);
        self.settled.store(true, Ordering::Relaxed);
        self.session.settled(&self.run);
    }

    async fn answer(&self, state: &mut State, reply: &Reply) -> Result<(), Refused> {
        let Some(to) = self.properties.reply_to().clone().filter(|to| !to.as_str().is_empty()) else {
            return Ok(());
        };
        // An answer lives as long as its request: it may wait in a queue, too.
        let durable = *self.properties.delivery_mode();
        let properties = |reply: &Reply| {
            let properties = answered(reply, self.properties.correlation_id().clone(), More::No);
            durable.map_or_else(|| properties.clone(), |mode| properties.clone().with_delivery_mode(mode))
        };
        match self.published(state, to.clone(), properties(reply), &reply.body, Publish::Answer).await {
            Ok(Published::Taken) => {
                self.tally.answers.add();
                self.session.ask_after(&to);
            }
            Ok(Published::Returned) => self.tally.clients_gone.add(),
            Ok(Published::Refused) => {
                self.tally.nacked.add();
                return Err(self.refused(Refusal::Retry { after: None }, "the broker refused the answer"));
            }
            // It is this answer that the broker cannot take, such as for its size: no repetition helps, but a shorter one may.
            Err(fault) if is_soft(&fault) => {
                tracing::warn!(claim.run = %self.run, error = amqp::shown(&fault), "an answer cannot be sent; an error goes in its place");
                let reply =
                    error("answer_refused", &format!("the answer could not be sent: {}", amqp::shown(&fault)), None);
                match self.published(state, to, properties(&reply), &reply.body, Publish::Answer).await {
                    Ok(Published::Taken | Published::Returned) => {}
                    Ok(Published::Refused) => {
                        return Err(self.refused(Refusal::Retry { after: None }, "the broker refused the answer"));
                    }
                    Err(fault) => return Err(self.refused(Refusal::Retry { after: None }, &amqp::shown(&fault))),
                }
            }
            Err(fault) => return Err(self.refused(Refusal::Retry { after: None }, &amqp::shown(&fault))),
        }
        Ok(())
    }

    async fn copy(&self, state: &mut State, queue: ShortString, properties: BasicProperties) -> Result<(), Refused> {
        let retry = |what: &str| Err(self.refused(Refusal::Retry { after: None }, what));
        match self.published(state, queue.clone(), properties, &self.body, Publish::Copy).await {
            Ok(Published::Taken) => Ok(()),
            Ok(Published::Returned) => Err(self.refused(Refusal::Rejected, &format!("there is no queue {queue}"))),
            Ok(Published::Refused) => retry("the broker refused a copy of it"),
            Err(fault) if is_soft(&fault) => Err(self.refused(Refusal::Rejected, &amqp::shown(&fault))),
            Err(fault) => retry(&amqp::shown(&fault)),
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
            let (session, body) = (Arc::clone(&self.session), Arc::clone(body));
            match what {
                Publish::Answer => Box::pin(session.publish(key, properties, body)),
                Publish::Copy => Box::pin(session.publish_alone(key, properties, body)),
            }
        });
        let ended = publishing.await;
        state.publishing = None;
        // What was refused is published anew.
        state.published = ended.as_ref().ok().copied().filter(|published| *published != Published::Refused);
        ended
    }

    async fn acknowledge(&self) -> Result<(), Refused> {
        match self.acker.ack(BasicAckOptions::default()).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.unacknowledged("its channel is closed")),
            Err(error) => Err(self.unacknowledged(&amqp::shown(&error))),
        }
    }

    async fn reject(&self, options: BasicRejectOptions) -> Result<(), Refused> {
        match self.acker.reject(options).await {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.unacknowledged("its channel is closed")),
            Err(error) => Err(self.unacknowledged(&amqp::shown(&error))),
        }
    }

    /// The claim is lost, whatever was published: it will be handed out again.
    fn unacknowledged(&self, why: &str) -> Refused {
        self.tally.unacknowledged.add();
        self.refused(Refusal::Gone, why)
    }

    fn refused(&self, refusal: Refusal, what: &str) -> Refused {
        Refused { refusal, what: format!("report on request {}: {what}", self.run) }
    }
}

impl Drop for Part {
    /// What nobody settled goes back at once, instead of when its channel ends.
    fn drop(&mut self) {
        self.session.let_go();
        if self.settled.load(Ordering::Relaxed) {
            return;
        }
        self.session.settled(&self.run);
        if self.acker.usable() {
            let reject = self.acker.reject(BasicRejectOptions { requeue: true });
            // The order is given when it is first polled; what comes of it nobody waits for.
            let _sent = std::pin::pin!(reject).as_mut().poll(&mut Context::from_waker(Waker::noop()));
            self.tally.handed_back.add();
        }
    }
}

/// What is kept of a delivery.
pub(super) struct Taken {
    pub(super) acker: Acker,
    pub(super) properties: BasicProperties,
    pub(super) body: Arc<[u8]>,
    pub(super) queue: ShortString,
    pub(super) delivered: Instant,
}

/// Sends partial answers.
struct Sender {
    session: Arc<Session>,
    to: Option<ShortString>,
    correlation_id: Option<ShortString>,
    tally: Arc<Tally>,
}

impl Partial for Sender {
    fn send(&self, reply: Reply) -> Answer<'_, ()> {
        Box::pin(async move {
            let refused = |refusal, what: &str| Refused { refusal, what: format!("a partial answer: {what}") };
            let Some(to) = self.to.clone() else {
                return Err(refused(Refusal::Gone, "nobody waits for an answer"));
            };
            if let Some(lost) = self.session.lost() {
                return Err(refused(Refusal::Gone, &lost));
            }
            let properties = answered(&reply, self.correlation_id.clone(), More::Yes);
            match Arc::clone(&self.session).publish(to.clone(), properties, reply.body).await {
                Ok(Published::Taken)
                    if session::is_direct(&to) && matches!(self.session.is_there(&to).await, Ok(false)) =>
                {
                    self.tally.clients_gone.add();
                    Err(refused(Refusal::Gone, "nobody waits for it any more"))
                }
                Ok(Published::Taken) => {
                    self.tally.partial_answers.add();
                    Ok(())
                }
                Ok(Published::Returned) => Err(refused(Refusal::Gone, "nobody waits for it any more")),
                Ok(Published::Refused) => Err(refused(Refusal::Retry { after: None }, "the broker refused it")),
                Err(error) => Err(refused(Refusal::Retry { after: None }, &amqp::shown(&error))),
            }
        })
    }
}

/// Whether an answer is followed by others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum More {
    Yes,
    No,
}

fn answered(reply: &Reply, correlation_id: Option<ShortString>, more: More) -> BasicProperties {
    let status = AMQPValue::ByteArray(reply.status.as_str().as_bytes().to_vec().into());
    let mut headers = table([(STATUS, status)]);
    if more == More::Yes {
        headers.insert(PARTIAL.into(), AMQPValue::Boolean(true));
    }
    let mut properties = BasicProperties::default().with_headers(headers);
    if let Some(id) = correlation_id {
        properties = properties.with_correlation_id(id);
    }
    if let Some(kind) = &reply.content_type {
        properties = properties.with_content_type(kind.as_str().into());
    }
    properties
}

/// Something is wrong with what was published, and not with the way there.
fn is_soft(error: &lapin::Error) -> bool {
    error.is_amqp_soft_error()
}

/// An answer that a client reads as an error.
pub(super) fn error(kind: &str, message: &str, attempts: Option<u32>) -> Reply {
    let context = attempts.map_or_else(|| json!({}), |attempts| json!({ "attempts": attempts }));
    let body = json!({ "type": format!("journeyman:{kind}"), "message": message, "context": context, "cause": null });
    Reply {
        status: Status::CORE_ERROR,
        body: body.to_string().into_bytes().into(),
        content_type: Some("application/json".to_owned()),
    }
}

/// How long a claim may be trusted from now on: as long as its channel is looked after, and never past the broker's patience.
pub(super) fn lease(delivered: Instant, now: Instant, patience: Option<Duration>, most: Duration) -> Duration {
    patience.map_or(most, |patience| patience.saturating_sub(now.since(delivered)).min(most))
}
