//! Tasks as requests: sends a request to an AMQP worker group for each task, and resolves the task by the reply.
//!
//! The message id derives from the task id, so that a worker recognizes a repeated request. Replies arrive on the connection that sent
//! the request; when it is lost, the request is sent again.

use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use super::requests_to_tasks::RESULT_ARTIFACT;
use super::{RetryTimer, request_from_payload};
use crate::client::{ReplyPosition, RpcClient, RpcError, RpcReply, RpcRequest};
use crate::domain::backoff::Policy;
use crate::handler::artifact::{ArtifactDeclaration, ArtifactKind};
use crate::handler::{Context, ExecuteError, ExecuteFailure, PayloadHandler, PrepareError};
use crate::limits::{BRIDGE_PARTIAL_REPLIES_MAX, BRIDGE_RETRY_MAX, BRIDGE_RETRY_MIN};

/// The artifact for a reply that is not JSON.
const RAW_RESULT_ARTIFACT: &str = "public/result";
const RETRY_POLICY: Policy = Policy { first: BRIDGE_RETRY_MIN, max: BRIDGE_RETRY_MAX };

/// Settings of [`TasksToRequests`].
#[derive(Debug)]
pub struct Config {
    /// The client that sends the requests.
    pub client: RpcClient,
    /// The exchange; empty for a queue.
    pub exchange: String,
    /// The routing key.
    pub routing_key: String,
    /// The root URL that the tasks come from; a part of the message id.
    pub origin: String,
    /// How long to wait for the reply, over all attempts.
    pub max_run_time: Duration,
}

/// Sends a request for each task.
#[derive(Debug)]
pub struct TasksToRequests(Config);

impl TasksToRequests {
    /// A handler with these settings.
    #[must_use]
    pub const fn new(config: Config) -> Self {
        Self(config)
    }
}

impl PayloadHandler for TasksToRequests {
    type Payload = Value;
    type Prepared = RpcRequest;

    fn describe(&self) -> String {
        let Config { exchange, routing_key: key, .. } = &self.0;
        if exchange.is_empty() {
            format!("forwards tasks to the queue {key} as requests")
        } else {
            format!("forwards tasks to {exchange} with the key {key} as requests")
        }
    }

    async fn prepare(&self, payload: Value, context: &Context) -> Result<RpcRequest, PrepareError> {
        let request = request_from_payload(payload).map_err(|what| PrepareError::malformed(vec![what]))?;
        let mut call = RpcRequest {
            exchange: self.0.exchange.clone(),
            routing_key: self.0.routing_key.clone(),
            timeout: self.0.max_run_time,
            message_id: Some(format!("{}/{}", self.0.origin, context.task().run.task)),
            ..super::rpc_request(request)
        };
        if let Some(trace) = context.task().env.get("TRACEPARENT") {
            call.headers.insert("traceparent".to_owned(), trace.clone());
        }
        call.validate().map_err(|error| PrepareError::malformed(vec![format!("payload: {error}")]))?;
        Ok(call)
    }

    async fn execute(&self, call: RpcRequest, context: &Context) -> Result<(), ExecuteError> {
        tokio::select! {
            ended = self.request_until_reply(call, context) => ended,
            _ = context.canceled() => {
                Err(ExecuteError::new(ExecuteFailure::Intermittent, "the request may keep running without this bridge".to_owned()))
            }
        }
    }
}

impl TasksToRequests {
    async fn request_until_reply(&self, mut call: RpcRequest, context: &Context) -> Result<(), ExecuteError> {
        let until = Instant::now() + self.0.max_run_time;
        let mut retry = RetryTimer::new(RETRY_POLICY);
        let mut partial_replies = PartialReplies::default();
        loop {
            call.timeout = until.saturating_duration_since(Instant::now());
            context.set_progress("waiting for the reply");
            match self.request_once(&call, &mut partial_replies, context).await? {
                Ok(reply) => return store_last_reply(&reply, context).await,
                Err(RpcError::TimedOut(_)) => {
                    return Err(ExecuteError::failed(format!("no reply within {:?}", self.0.max_run_time)));
                }
                Err(error @ (RpcError::TooLarge { .. } | RpcError::NameTooLong(_))) => {
                    return Err(ExecuteError::failed(error.to_string()));
                }
                Err(error) => {
                    context.log().write_note(&format!("sending the request again later: {error}"));
                    context.set_progress(&format!("retrying: {error}"));
                    tokio::select! {
                        () = retry.wait(None) => {}
                        // The next attempt times out at once.
                        () = tokio::time::sleep_until(until) => {}
                    }
                }
            }
        }
    }

    async fn request_once(
        &self,
        call: &RpcRequest,
        partial_replies: &mut PartialReplies,
        context: &Context,
    ) -> Result<Result<RpcReply, RpcError>, ExecuteError> {
        let mut replies = match self.0.client.stream(call).await {
            Ok(replies) => replies,
            Err(error) => return Ok(Err(error)),
        };
        partial_replies.restart();
        loop {
            match replies.next().await {
                Some(Ok(reply)) if reply.position == ReplyPosition::Last => return Ok(Ok(reply)),
                Some(Ok(reply)) => partial_replies.store(&reply, context).await?,
                Some(Err(error)) => return Ok(Err(error)),
                None => return Ok(Err(RpcError::ConnectionLost)),
            }
        }
    }
}

/// The partial replies that were stored, over all attempts: repeated ones are not stored again.
#[derive(Debug, Default)]
struct PartialReplies {
    stored_count: usize,
    received_count: usize,
}

impl PartialReplies {
    fn restart(&mut self) {
        self.received_count = 0;
    }

    async fn store(&mut self, reply: &RpcReply, context: &Context) -> Result<(), ExecuteError> {
        self.received_count += 1;
        if self.received_count <= self.stored_count {
            return Ok(());
        }
        self.stored_count = self.received_count;
        if self.stored_count > BRIDGE_PARTIAL_REPLIES_MAX {
            if self.stored_count == BRIDGE_PARTIAL_REPLIES_MAX + 1 {
                context
                    .log()
                    .write_note(&format!("storing only the first {BRIDGE_PARTIAL_REPLIES_MAX} partial replies"));
            }
            return Ok(());
        }
        let name = format!(
            "public/partial-replies/{:04}{}",
            self.stored_count,
            if is_json(&reply.body) { ".json" } else { "" }
        );
        declare_artifact(&name, &format!("part-{}", self.stored_count), &reply.body, context).await
    }
}

async fn store_last_reply(reply: &RpcReply, context: &Context) -> Result<(), ExecuteError> {
    let name = if is_json(&reply.body) { RESULT_ARTIFACT } else { RAW_RESULT_ARTIFACT };
    if !reply.body.is_empty() {
        declare_artifact(name, "reply", &reply.body, context).await?;
    }
    if reply.is_ok() {
        return Ok(());
    }
    let status = reply.status.as_deref().unwrap_or("no status");
    let why = reply.reason.as_ref().map_or_else(String::new, |reason| format!(" ({reason})"));
    Err(ExecuteError::failed(format!("the reply has the status {status}{why}; see the artifact {name}")))
}

async fn declare_artifact(name: &str, file: &str, bytes: &[u8], context: &Context) -> Result<(), ExecuteError> {
    let path = context.workdir().join(file);
    let host =
        |error: std::io::Error| ExecuteError::new(ExecuteFailure::HostFault, format!("cannot store a reply: {error}"));
    tokio::fs::write(&path, bytes).await.map_err(host)?;
    let kind = if is_json(bytes) { "application/json" } else { "application/octet-stream" };
    let what = ArtifactKind::File { path: file.into(), content_type: Some(kind.to_owned()) };
    let declared = context.artifacts().declare(ArtifactDeclaration::new(name, what));
    declared.map_err(|error| ExecuteError::internal(error.to_string()))
}

fn is_json(bytes: &[u8]) -> bool {
    serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok()
}
