//! Asks the workers of a pool, over AMQP: a request goes to an exchange under a key, and the answers come back.
//!
//! One connection carries thousands of calls at once. It is made by the first call, and made again by the next one after it
//! was lost; calls that were under way then fail, since nobody can tell whether they were worked at. Answers come by direct
//! reply-to, so they last as long as the connection.

mod session;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

use crate::amqp::{self, Broker, NameTooLong};
use crate::domain::refusal::Refusal;
use crate::limits::{CALL_BODY_BYTES_MAX, CALLS_MAX};
use session::{Event, Session};

/// A request.
#[derive(Clone, Default)]
pub struct RpcRequest {
    /// Where it is published: `{pool}-req-xchg` for a pool.
    pub exchange: String,
    /// Which worker group it is for.
    pub routing_key: String,
    /// What is asked for, for workers that tell requests apart by it (`x-rpc-path`).
    pub path: Option<String>,
    /// What it says. JSON for most workers.
    pub body: Vec<u8>,
    /// What kind of content that is, where the worker is to know (`content-type`).
    pub content_type: Option<String>,
    /// How the content is encoded, where it is (`content-encoding`).
    pub content_encoding: Option<String>,
    /// How long the last answer may take, from now, or the broker's word where no answer is awaited.
    pub timeout: Duration,
    /// How long the broker keeps the request for somebody to take it. `None` is for as long as `timeout`, or without end where no
    /// answer is awaited.
    pub message_ttl: Option<Duration>,
    /// More headers, as text.
    pub headers: BTreeMap<String, String>,
    /// The same whenever the same is asked again, so that whoever works at it knows; nothing where that is never meant.
    pub message_id: Option<String>,
}

impl RpcRequest {
    /// Whether it can be sent at all.
    ///
    /// # Errors
    ///
    /// [`RpcError::TooLarge`] and [`RpcError::NameTooLong`].
    pub fn validate(&self) -> Result<(), RpcError> {
        if self.body.len() > CALL_BODY_BYTES_MAX {
            return Err(RpcError::TooLarge { bytes: self.body.len() });
        }
        amqp::to_short_string("the name of the exchange", &self.exchange)?;
        amqp::to_short_string("the key", &self.routing_key)?;
        amqp::to_short_string("the message id", self.message_id.as_deref().unwrap_or_default())?;
        amqp::to_short_string("the content type", self.content_type.as_deref().unwrap_or_default())?;
        amqp::to_short_string("the content encoding", self.content_encoding.as_deref().unwrap_or_default())?;
        for name in self.headers.keys() {
            amqp::to_short_string("the name of a header", name)?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for RpcRequest {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Call({} to {}, {} bytes)", self.routing_key, self.exchange, self.body.len())
    }
}

/// Whether more answers follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyPosition {
    /// More follow.
    Partial,
    /// It is the last one.
    Last,
}

/// An answer.
#[derive(Clone, PartialEq, Eq)]
pub struct RpcReply {
    /// How it went (`x-status`): `ok`, or a word for what went wrong. `None` where whoever answered did not say.
    pub status: Option<String>,
    /// Why the request was dead-lettered, where the answer is not a worker's own.
    pub reason: Option<String>,
    /// What it says.
    pub body: Vec<u8>,
    /// Whether more follow.
    pub position: ReplyPosition,
}

impl std::fmt::Debug for RpcReply {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { status, reason, body, position: part } = self;
        write!(out, "Answer({status:?}, {reason:?}, {} bytes, {part:?})", body.len())
    }
}

impl RpcReply {
    /// Whether all is well.
    #[must_use]
    pub fn is_ok(&self) -> bool {
        self.status.as_deref() == Some("ok")
    }
}

/// Why a call has no answer. No text holds the request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RpcError {
    /// There is no such exchange.
    #[error("there is no exchange `{0}`: the pool does not exist, or its controller has not run yet")]
    ExchangeNotFound(String),
    /// Nobody takes requests under this key. It was not worked at.
    #[error(
        "nobody takes requests under the key `{key}` at `{exchange}`: no worker group is there, and no controller starts one"
    )]
    Unroutable {
        /// The exchange.
        exchange: String,
        /// The key.
        key: String,
    },
    /// The broker did not take it, such as for a full queue. It was not worked at.
    #[error("the broker did not take the request: its queue is full, or could not store it")]
    Nacked,
    /// There was no last answer in time. It may still be worked at.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The connection was lost. The request may have been worked at, and may still be.
    #[error("the connection to the broker was lost before the answer came; the request may have been worked at")]
    ConnectionLost,
    /// Partial answers came faster than they were taken.
    #[error("partial answers came faster than they were taken; the rest was dropped")]
    Overrun,
    /// The body is larger than a broker takes.
    #[error("the request has {bytes} bytes, and {CALL_BODY_BYTES_MAX} can be sent")]
    TooLarge {
        /// What it has.
        bytes: usize,
    },
    /// A name in it is longer than what can be sent.
    #[error(transparent)]
    NameTooLong(#[from] NameTooLong),
    /// The broker does not let us in, or not publish there.
    #[error("{0}")]
    Denied(String),
    /// The broker cannot be reached, or broke off.
    #[error("{0}")]
    Unreachable(String),
}

/// Asks the workers of pools.
#[derive(Debug)]
pub struct RpcClient {
    broker: Broker,
    name: String,
    session: Mutex<Option<Arc<Session>>>,
    call_permits: Arc<Semaphore>,
    late_replies: Arc<AtomicU64>,
}

impl RpcClient {
    /// A client that is not connected yet. The broker shows its connection as `name`.
    #[must_use]
    pub fn new(broker: Broker, name: impl Into<String>) -> Self {
        Self {
            broker,
            name: name.into(),
            session: Mutex::default(),
            call_permits: Arc::new(Semaphore::new(CALLS_MAX)),
            late_replies: Arc::default(),
        }
    }

    /// How many answers came that no call waited for any more: second ones, and those that came too late.
    #[must_use]
    pub fn late_replies(&self) -> u64 {
        self.late_replies.load(Ordering::Relaxed)
    }

    /// Sends a request, and waits for the last answer.
    ///
    /// # Errors
    ///
    /// See [`RpcError`]. An answer that says no is no error.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: the answer is dropped when it comes. The request may be worked at all the same.
    pub async fn call(&self, call: &RpcRequest) -> Result<RpcReply, RpcError> {
        let mut answers = self.stream(call).await?;
        loop {
            match answers.next().await {
                Some(Ok(answer)) if answer.position == ReplyPosition::Last => return Ok(answer),
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error),
                None => return Err(RpcError::ConnectionLost),
            }
        }
    }

    /// Sends a request. Its answers are had from what is returned, partial ones too.
    ///
    /// More than [`CALLS_MAX`] calls at once wait for each other.
    ///
    /// # Errors
    ///
    /// See [`RpcError`]; what becomes known later comes in the place of an answer.
    ///
    /// # Cancel safety
    ///
    /// As [`RpcClient::call`].
    pub async fn stream(&self, call: &RpcRequest) -> Result<RpcReplies, RpcError> {
        let until = Instant::now() + call.timeout;
        let sending = async {
            let ReadySession { session, permit: room } = self.ready_session(call, until).await?;
            let pending = session.send(call, &self.broker).await?;
            Ok(RpcReplies { pending, state: State::Open, deadline: until, timeout: call.timeout, _permit: room })
        };
        timeout_at(until, sending).await.unwrap_or(Err(RpcError::TimedOut(call.timeout)))
    }

    /// Sends a request that nobody waits for an answer to. Returns when the broker has it.
    ///
    /// # Errors
    ///
    /// See [`RpcError`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; whether the broker has it is not known then.
    pub async fn send(&self, call: &RpcRequest) -> Result<(), RpcError> {
        let until = Instant::now() + call.timeout;
        let sending = async {
            let ready = self.ready_session(call, until).await?;
            ready.session.send_detached(call, &self.broker).await
        };
        timeout_at(until, sending).await.unwrap_or(Err(RpcError::TimedOut(call.timeout)))
    }

    /// As [`RpcClient::send`], without waiting for the broker's word that it has it: whether anybody takes requests under the key, and
    /// whether the queue had room, is not known.
    ///
    /// # Errors
    ///
    /// See [`RpcError`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; whether it was sent is not known then.
    pub async fn send_unconfirmed(&self, call: &RpcRequest) -> Result<(), RpcError> {
        let until = Instant::now() + call.timeout;
        let sending = async {
            let ready = self.ready_session(call, until).await?;
            ready.session.send_unconfirmed(call, &self.broker).await
        };
        timeout_at(until, sending).await.unwrap_or(Err(RpcError::TimedOut(call.timeout)))
    }

    async fn ready_session(&self, call: &RpcRequest, until: Instant) -> Result<ReadySession, RpcError> {
        call.validate()?;
        let room = Arc::clone(&self.call_permits).acquire_owned().await.map_err(|_| RpcError::ConnectionLost)?;
        let silent = || {
            let what = "the broker lets us connect and has said nothing";
            RpcError::Unreachable(format!("{what} within {:?}; the request was not sent", call.timeout))
        };
        // What waits around this gives up at the same time, and asks first what has come of it.
        let session = timeout_at(until, self.session()).await.unwrap_or_else(|_| Err(silent()))?;
        Ok(ReadySession { session, permit: room })
    }

    async fn session(&self) -> Result<Arc<Session>, RpcError> {
        let mut place = self.session.lock().await;
        if let Some(session) = place.as_ref().filter(|session| session.is_open()) {
            return Ok(Arc::clone(session));
        }
        let opened =
            Session::open(&self.broker, &self.name, Arc::clone(&self.late_replies)).await.map_err(|refused| {
                match refused.refusal {
                    Refusal::Denied => RpcError::Denied(refused.message),
                    Refusal::Retry { .. }
                    | Refusal::Throttled { .. }
                    | Refusal::Gone
                    | Refusal::Rejected
                    | Refusal::Stale => RpcError::Unreachable(refused.message),
                }
            })?;
        Ok(Arc::clone(place.insert(Arc::new(opened))))
    }
}

/// What a call needs.
struct ReadySession {
    session: Arc<Session>,
    permit: OwnedSemaphorePermit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Ended,
}

/// The answers to a request, in the order in which they come.
#[derive(Debug)]
pub struct RpcReplies {
    pending: session::PendingCall,
    state: State,
    deadline: Instant,
    timeout: Duration,
    _permit: OwnedSemaphorePermit,
}

impl RpcReplies {
    /// The next answer, or why there is none; `None` after the last one.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn next(&mut self) -> Option<Result<RpcReply, RpcError>> {
        if self.state == State::Ended {
            return None;
        }
        match timeout_at(self.deadline, self.pending.next()).await {
            Ok(Event::Reply(answer)) => {
                if answer.position == ReplyPosition::Last {
                    self.state = State::Ended;
                }
                Some(Ok(answer))
            }
            Ok(Event::Failed(error)) => self.end_with(error),
            Err(_) => self.end_with(RpcError::TimedOut(self.timeout)),
        }
    }

    fn end_with(&mut self, error: RpcError) -> Option<Result<RpcReply, RpcError>> {
        self.state = State::Ended;
        Some(Err(error))
    }
}
