//! Tasks as requests: sends a request to an AMQP worker group for each task, and resolves the task by the reply.
//!
//! The message id derives from the task id, so that a worker recognizes a repeated request. So does the queue of the reply, which
//! notes that the request was sent: a bridge that claims the task later waits for the reply there.

use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use super::request_from_payload;
use super::requests_to_tasks::RESULT_ARTIFACT;
use crate::client::{RpcClient, RpcError, RpcReply, RpcRequest};
use journeyman_domain::backoff::Policy;
use journeyman_domain::limits::{BRIDGE_RETRY_MAX, BRIDGE_RETRY_MIN};
use journeyman_platform::retry::Retry;
use journeyman_worker::handler::artifact::{ArtifactDeclaration, ArtifactKind};
use journeyman_worker::handler::{Context, ExecuteError, ExecuteFailure, PayloadHandler, PrepareError};

/// The artifact for a reply that is not JSON.
const RAW_RESULT_ARTIFACT: &str = "public/result";
const RETRY_POLICY: Policy = Policy { first: BRIDGE_RETRY_MIN, max: BRIDGE_RETRY_MAX };

/// Sends a request for each task.
#[derive(Debug)]
pub struct TasksToRequests {
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

impl PayloadHandler for TasksToRequests {
    type Payload = Value;
    type Prepared = RpcRequest;

    fn describe(&self) -> String {
        let Self { exchange, routing_key: key, .. } = self;
        if exchange.is_empty() {
            format!("forwards tasks to the queue {key} as requests")
        } else {
            format!("forwards tasks to {exchange} with the key {key} as requests")
        }
    }

    async fn prepare(&self, payload: Value, context: &Context) -> Result<RpcRequest, PrepareError> {
        let request = request_from_payload(payload).map_err(|what| PrepareError::malformed(vec![what]))?;
        let mut call = RpcRequest {
            exchange: self.exchange.clone(),
            routing_key: self.routing_key.clone(),
            timeout: self.max_run_time,
            message_id: Some(format!("{}/{}", self.origin, context.task().run.task)),
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
        let until = Instant::now() + self.max_run_time;
        let mut retry = Retry::new(RETRY_POLICY);
        let reply_queue = format!("journeyman-bridge-{}", context.task().run.task);
        loop {
            call.timeout = until.saturating_duration_since(Instant::now());
            context.set_progress("waiting for the reply");
            match self.client.call_once(&call, &reply_queue).await {
                Ok(reply) => return store_reply(&reply, context).await,
                Err(RpcError::TimedOut(_)) => {
                    return Err(ExecuteError::failed(format!("no reply within {:?}", self.max_run_time)));
                }
                Err(error @ (RpcError::TooLarge { .. } | RpcError::NameTooLong(_))) => {
                    return Err(ExecuteError::failed(error.to_string()));
                }
                Err(error) => {
                    context
                        .log()
                        .write_note(&format!("{error}; trying again, a request that was sent is not sent twice"));
                    context.set_progress(&format!("retrying: {error}"));
                    tokio::select! {
                        () = tokio::time::sleep(retry.next_wait(None)) => {}
                        // The next attempt times out at once.
                        () = tokio::time::sleep_until(until) => {}
                    }
                }
            }
        }
    }
}

async fn store_reply(reply: &RpcReply, context: &Context) -> Result<(), ExecuteError> {
    let is_json = serde_json::from_slice::<serde::de::IgnoredAny>(&reply.body).is_ok();
    let (name, kind) =
        if is_json { (RESULT_ARTIFACT, "application/json") } else { (RAW_RESULT_ARTIFACT, "application/octet-stream") };
    if !reply.body.is_empty() {
        let host_fault = |error: std::io::Error| {
            ExecuteError::new(ExecuteFailure::HostFault, format!("cannot store the reply: {error}"))
        };
        tokio::fs::write(context.workdir().join("reply"), &reply.body).await.map_err(host_fault)?;
        let file = ArtifactKind::File { path: "reply".into(), content_type: Some(kind.to_owned()) };
        let declared = context.artifacts().declare(ArtifactDeclaration::new(name, file));
        declared.map_err(|error| ExecuteError::internal(error.to_string()))?;
    }
    if reply.is_ok() {
        return Ok(());
    }
    Err(ExecuteError::failed(format!("{}; see the artifact {name}", reply.status_text())))
}
