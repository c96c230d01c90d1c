//! An RPC client for worker groups over AMQP: publishes requests and receives the replies.
//!
//! One connection carries thousands of concurrent calls. The first call opens it, and the first call after a loss opens a new one; calls
//! that were pending on the lost connection fail, since their requests may or may not have run. Replies use direct reply-to, so they
//! last as long as the connection, or a durable queue for each call.

mod reply_queue;
mod session;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use lapin::types::ShortString;
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, timeout_at};

use journeyman_domain::limits::{CALL_BODY_BYTES_MAX, CALLS_MAX, RPC_EXPIRED_REPLY_WAIT};
use journeyman_domain::refusal::{CallError, Refusal};
use journeyman_platform::amqp::{self, Broker, NameTooLong};
use session::Session;

/// A request.
#[derive(Clone, Default)]
pub struct RpcRequest {
    /// The exchange; `{pool}-req-xchg` for a pool.
    pub exchange: String,
    /// The routing key: which worker group the request is for.
    pub routing_key: String,
    /// The method, for workers with several (`x-rpc-path`).
    pub path: Option<String>,
    /// The body; JSON for most workers.
    pub body: Vec<u8>,
    /// The media type of the body (`content-type`).
    pub content_type: Option<String>,
    /// The encoding of the body (`content-encoding`).
    pub content_encoding: Option<String>,
    /// How long to wait for the last reply, and a second longer for that to an expired request, or how long for the confirm where no reply is awaited.
    pub timeout: Duration,
    /// How long the request may wait in its queue. Without it: `timeout`, or unlimited where no reply is awaited.
    pub message_ttl: Option<Duration>,
    /// More headers.
    pub headers: BTreeMap<String, String>,
    /// An id that is equal whenever the same request is sent again, so that the worker recognizes it.
    pub message_id: Option<String>,
}

impl RpcRequest {
    /// Checks that the request can be sent.
    ///
    /// # Errors
    ///
    /// [`RpcError::TooLarge`] and [`RpcError::NameTooLong`].
    pub fn validate(&self) -> Result<(), RpcError> {
        if self.body.len() > CALL_BODY_BYTES_MAX {
            return Err(RpcError::TooLarge { bytes: self.body.len() });
        }
        amqp::to_short_string("the exchange name", &self.exchange)?;
        amqp::to_short_string("the routing key", &self.routing_key)?;
        session::request_properties(self, None).map(drop)
    }
}

impl std::fmt::Debug for RpcRequest {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "RpcRequest({} to {}, {} bytes)", self.routing_key, self.exchange, self.body.len())
    }
}

/// The place of a reply among the others of its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyPosition {
    /// More follow.
    Partial,
    /// This is the last reply.
    Last,
}

/// A reply.
#[derive(Clone, PartialEq, Eq)]
pub struct RpcReply {
    /// The status (`x-status`): `ok`, or another word for an error. `None` where the reply has none.
    pub status: Option<String>,
    /// Why the request was dead-lettered, where the controller replied in place of a worker.
    pub reason: Option<String>,
    /// The body.
    pub body: Vec<u8>,
    /// Tells whether more follow.
    pub position: ReplyPosition,
}

impl std::fmt::Debug for RpcReply {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { status, reason, body, position } = self;
        write!(out, "RpcReply({status:?}, {reason:?}, {} bytes, {position:?})", body.len())
    }
}

impl RpcReply {
    /// True if the status is `ok`.
    pub fn is_ok(&self) -> bool {
        self.status.as_deref() == Some("ok")
    }

    /// The status for an error message, with the reason for a dead letter.
    pub fn status_text(&self) -> String {
        let status = self.status.as_deref().unwrap_or("no status");
        let reason = self.reason.as_ref().map_or_else(String::new, |reason| format!(" ({reason})"));
        format!("the reply has the status {status}{reason}")
    }
}

/// Why a call has no reply. No message holds the body of the request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RpcError {
    /// The exchange does not exist.
    #[error("exchange `{0}` does not exist: is the pool's name correct, and is its controller running?")]
    ExchangeNotFound(String),
    /// No queue is bound to this key. The request did not run.
    #[error(
        "no queue for the key `{key}` at the exchange `{exchange}`: the worker group does not exist, and no controller creates it"
    )]
    Unroutable {
        /// The exchange.
        exchange: String,
        /// The key.
        key: String,
    },
    /// The broker refused the request. It did not run.
    #[error("the broker refused the request: its queue is full")]
    Nacked,
    /// The last reply did not arrive in time. The request may still run.
    #[error("no reply within {0:?}")]
    TimedOut(Duration),
    /// The connection was lost. The request may have run, and may still run.
    #[error("the connection to the broker was lost before the reply arrived; the request may have run")]
    ConnectionLost,
    /// The caller did not read the partial replies fast enough.
    #[error("partial replies arrived faster than they were read; the remaining ones were dropped")]
    Overrun,
    /// The body is too large for a broker.
    #[error("the request has {bytes} bytes; the limit is {CALL_BODY_BYTES_MAX}")]
    TooLarge {
        /// Its size.
        bytes: usize,
    },
    /// A name in the request is too long for AMQP.
    #[error(transparent)]
    NameTooLong(#[from] NameTooLong),
    /// The broker rejected the login or has no permission to publish.
    #[error("{0}")]
    Denied(String),
    /// The broker cannot be reached, or closed the connection.
    #[error("{0}")]
    Unreachable(String),
}

impl From<CallError> for RpcError {
    fn from(CallError { refusal, message }: CallError) -> Self {
        if refusal == Refusal::Denied { Self::Denied(message) } else { Self::Unreachable(message) }
    }
}

/// A client for the requests of worker groups.
#[derive(Debug)]
pub struct RpcClient {
    broker: Broker,
    name: String,
    session: Mutex<Option<Arc<Session>>>,
    call_permits: Arc<Semaphore>,
}

impl RpcClient {
    /// A client that connects with its first call, as `name`.
    pub fn new(broker: Broker, name: impl Into<String>) -> Self {
        let call_permits = Arc::new(Semaphore::new(CALLS_MAX));
        Self { broker, name: name.into(), session: Mutex::default(), call_permits }
    }

    /// Sends a request and waits for the last reply.
    ///
    /// # Errors
    ///
    /// See [`RpcError`]. A reply with an error status is `Ok`.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: the reply is dropped when it arrives. The request may run nevertheless.
    pub async fn call(&self, call: &RpcRequest) -> Result<RpcReply, RpcError> {
        let mut replies = self.stream(call).await?;
        loop {
            match replies.next().await {
                Some(Ok(reply)) if reply.position == ReplyPosition::Last => return Ok(reply),
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error),
                None => return Err(RpcError::ConnectionLost),
            }
        }
    }

    /// Sends a request and waits for the last reply in a durable queue, which it declares, and deletes when the call has ended. A
    /// request that an earlier call with this queue has sent is not sent again: the call waits for the reply to the earlier one.
    ///
    /// # Errors
    ///
    /// Calls as [`RpcClient::call`] does.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: the next call with this queue waits for the reply.
    pub async fn call_once(&self, call: &RpcRequest, reply_queue: &str) -> Result<RpcReply, RpcError> {
        let reply_queue = &ShortString::from(reply_queue);
        let deadline = Instant::now() + call.timeout;
        let opening = timeout_at(deadline, self.ready_session(call, deadline)).await;
        let (session, _permit) = opening.unwrap_or(Err(RpcError::TimedOut(call.timeout)))?;
        reply_queue::call(&session, reply_queue, call, deadline, &self.broker).await
    }

    /// Sends a request, and returns its replies, partial ones too. More than [`CALLS_MAX`] concurrent calls wait.
    ///
    /// # Errors
    ///
    /// See [`RpcError`]; later errors arrive in place of a reply.
    ///
    /// # Cancel safety
    ///
    /// Calls as [`RpcClient::call`] does.
    pub async fn stream(&self, call: &RpcRequest) -> Result<RpcReplies, RpcError> {
        let deadline = Instant::now() + call.timeout;
        let sending = async {
            let (session, permit) = self.ready_session(call, deadline).await?;
            let id = uuid::Uuid::new_v4().to_string();
            let results = session.register(&id);
            let timeout = call.timeout;
            // A controller replies to a request that has expired, with the reason.
            let deadline = deadline + RPC_EXPIRED_REPLY_WAIT;
            let replies = RpcReplies { id, results, session, is_ended: false, deadline, timeout, _permit: permit };
            replies.session.send(&replies.id, call, &self.broker).await?;
            Ok(replies)
        };
        timeout_at(deadline, sending).await.unwrap_or(Err(RpcError::TimedOut(call.timeout)))
    }

    /// Sends a request without awaiting a reply. Returns once the broker has confirmed it.
    ///
    /// # Errors
    ///
    /// See [`RpcError`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; whether the broker has the request is unknown then.
    pub async fn send(&self, call: &RpcRequest) -> Result<(), RpcError> {
        let deadline = Instant::now() + call.timeout;
        let sending = async {
            let (session, _permit) = self.ready_session(call, deadline).await?;
            session.send_detached(call, &self.broker).await
        };
        timeout_at(deadline, sending).await.unwrap_or(Err(RpcError::TimedOut(call.timeout)))
    }

    async fn ready_session(
        &self,
        call: &RpcRequest,
        deadline: Instant,
    ) -> Result<(Arc<Session>, OwnedSemaphorePermit), RpcError> {
        call.validate()?;
        let permit = Arc::clone(&self.call_permits).acquire_owned().await.map_err(|_| RpcError::ConnectionLost)?;
        let no_response = || {
            let what = "connected to the broker, which did not respond";
            RpcError::Unreachable(format!("{what} within {:?}; the request was not sent", call.timeout))
        };
        // The enclosing timeout has the same deadline and polls this future first.
        let session = timeout_at(deadline, self.session()).await.unwrap_or_else(|_| Err(no_response()))?;
        Ok((session, permit))
    }

    async fn session(&self) -> Result<Arc<Session>, RpcError> {
        let mut place = self.session.lock().await;
        if let Some(session) = place.as_ref().filter(|session| session.is_open()) {
            return Ok(Arc::clone(session));
        }
        let opened = Session::open(&self.broker, &self.name).await?;
        Ok(Arc::clone(place.insert(Arc::new(opened))))
    }
}

/// The replies to a request, in order of arrival.
#[derive(Debug)]
pub struct RpcReplies {
    id: String,
    results: mpsc::Receiver<Result<RpcReply, RpcError>>,
    session: Arc<Session>,
    is_ended: bool,
    deadline: Instant,
    timeout: Duration,
    _permit: OwnedSemaphorePermit,
}

impl RpcReplies {
    /// Returns the next reply, or why it is missing; `None` after the last reply.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn next(&mut self) -> Option<Result<RpcReply, RpcError>> {
        if self.is_ended {
            return None;
        }
        let result = match timeout_at(self.deadline, self.results.recv()).await {
            Ok(Some(result)) => result,
            Ok(None) if self.session.is_open() => Err(RpcError::Overrun),
            Ok(None) => Err(RpcError::ConnectionLost),
            Err(_) => Err(RpcError::TimedOut(self.timeout)),
        };
        self.is_ended = !matches!(&result, Ok(reply) if reply.position == ReplyPosition::Partial);
        Some(result)
    }
}

impl Drop for RpcReplies {
    fn drop(&mut self) {
        self.session.forget(&self.id);
    }
}
