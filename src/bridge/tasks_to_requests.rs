//! Tasks as requests: each task becomes a request to an AMQP worker group, and the answer becomes its outcome.
//!
//! The message is named after the task, so that a worker which is asked again knows it. Answers come to the connection that
//! asked; when that is lost the request is sent once more.

use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use super::requests_to_tasks::RESULT_ARTIFACT;
use super::{BridgeForm, RetryTimer, request_from_payload};
use crate::client::{ReplyPosition, RpcClient, RpcError, RpcReply, RpcRequest};
use crate::domain::backoff::Policy;
use crate::handler::artifact::{ArtifactDeclaration, ArtifactKind};
use crate::handler::{Context, ExecuteError, PayloadHandler, PrepareError};
use crate::limits::{BRIDGE_PARTIAL_ANSWERS_MAX, BRIDGE_RETRY_MAX, BRIDGE_RETRY_MIN};

/// The content of an answer that is no JSON.
const RAW_RESULT_ARTIFACT: &str = "public/result";
const RETRY_POLICY: Policy = Policy { first: BRIDGE_RETRY_MIN, max: BRIDGE_RETRY_MAX };

/// Where tasks go.
#[derive(Debug)]
pub struct Config {
    /// Who asks.
    pub client: RpcClient,
    /// Where requests are published; empty for a queue itself.
    pub exchange: String,
    /// Under which key.
    pub routing_key: String,
    /// Where tasks come from, as a part of the name of each message.
    pub origin: String,
    /// What the payload of a task is.
    pub form: BridgeForm,
    /// How long an answer may take, all attempts together.
    pub max_run_time: Duration,
}

/// Turns tasks into requests.
#[derive(Debug)]
pub struct TasksToRequests(Config);

impl TasksToRequests {
    /// Nothing is sent yet.
    #[must_use]
    pub const fn new(settings: Config) -> Self {
        Self(settings)
    }
}

impl PayloadHandler for TasksToRequests {
    type Payload = Value;
    type Prepared = RpcRequest;

    fn describe(&self) -> String {
        let Config { exchange, routing_key: key, .. } = &self.0;
        if exchange.is_empty() {
            format!("hands tasks on to the queue {key} as requests")
        } else {
            format!("hands tasks on to {exchange} under {key} as requests")
        }
    }

    async fn prepare(&self, payload: Value, context: &Context) -> Result<RpcRequest, PrepareError> {
        let request = request_from_payload(payload, self.0.form).map_err(|what| PrepareError::Malformed(vec![what]))?;
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
        call.validate().map_err(|error| PrepareError::Malformed(vec![format!("payload: {error}")]))?;
        Ok(call)
    }

    async fn execute(&self, call: RpcRequest, context: &Context) -> Result<(), ExecuteError> {
        tokio::select! {
            ended = self.request_until_reply(call, context) => ended,
            _ = context.canceled() => {
                Err(ExecuteError::Intermittent("the request may go on without this bridge".to_owned()))
            }
        }
    }
}

impl TasksToRequests {
    async fn request_until_reply(&self, mut call: RpcRequest, context: &Context) -> Result<(), ExecuteError> {
        let until = Instant::now() + self.0.max_run_time;
        let mut waits = RetryTimer::new(RETRY_POLICY);
        let mut kept = PartialReplies::default();
        loop {
            call.timeout = until.saturating_duration_since(Instant::now());
            context.set_progress("waits for the answer");
            match self.request_once(&call, &mut kept, context).await? {
                Ok(answer) => return store_last_reply(&answer, context).await,
                Err(RpcError::TimedOut(_)) => {
                    return Err(ExecuteError::Failed(format!("no answer within {:?}", self.0.max_run_time)));
                }
                Err(error @ (RpcError::TooLarge { .. } | RpcError::NameTooLong(_))) => {
                    return Err(ExecuteError::Failed(error.to_string()));
                }
                Err(error) => {
                    context.log().write_note(&format!("the request is sent once more in a while: {error}"));
                    context.set_progress(&format!("waits: {error}"));
                    tokio::select! {
                        () = waits.wait(None) => {}
                        // The next one says that the time is over.
                        () = tokio::time::sleep_until(until) => {}
                    }
                }
            }
        }
    }

    async fn request_once(
        &self,
        call: &RpcRequest,
        kept: &mut PartialReplies,
        context: &Context,
    ) -> Result<Result<RpcReply, RpcError>, ExecuteError> {
        let mut answers = match self.0.client.stream(call).await {
            Ok(answers) => answers,
            Err(error) => return Ok(Err(error)),
        };
        kept.restart();
        loop {
            match answers.next().await {
                Some(Ok(answer)) if answer.position == ReplyPosition::Last => return Ok(Ok(answer)),
                Some(Ok(part)) => kept.store(&part, context).await?,
                Some(Err(error)) => return Ok(Err(error)),
                None => return Ok(Err(RpcError::ConnectionLost)),
            }
        }
    }
}

/// The partial answers that were kept, over all attempts: what came again is not kept twice.
#[derive(Debug, Default)]
struct PartialReplies {
    stored_count: usize,
    received_count: usize,
}

impl PartialReplies {
    fn restart(&mut self) {
        self.received_count = 0;
    }

    async fn store(&mut self, part: &RpcReply, context: &Context) -> Result<(), ExecuteError> {
        self.received_count += 1;
        if self.received_count <= self.stored_count {
            return Ok(());
        }
        self.stored_count = self.received_count;
        if self.stored_count > BRIDGE_PARTIAL_ANSWERS_MAX {
            if self.stored_count == BRIDGE_PARTIAL_ANSWERS_MAX + 1 {
                context
                    .log()
                    .write_note(&format!("only the first {BRIDGE_PARTIAL_ANSWERS_MAX} partial answers are kept"));
            }
            return Ok(());
        }
        let name = format!("public/parts/{:04}{}", self.stored_count, if is_json(&part.body) { ".json" } else { "" });
        declare_artifact(&name, &format!("part-{}", self.stored_count), &part.body, context).await
    }
}

async fn store_last_reply(answer: &RpcReply, context: &Context) -> Result<(), ExecuteError> {
    let name = if is_json(&answer.body) { RESULT_ARTIFACT } else { RAW_RESULT_ARTIFACT };
    if !answer.body.is_empty() {
        declare_artifact(name, "answer", &answer.body, context).await?;
    }
    if answer.is_ok() {
        return Ok(());
    }
    let status = answer.status.as_deref().unwrap_or("no status");
    let why = answer.reason.as_ref().map_or_else(String::new, |reason| format!(" ({reason})"));
    Err(ExecuteError::Failed(format!("it was answered with {status}{why}; the answer is the artifact {name}")))
}

async fn declare_artifact(name: &str, file: &str, bytes: &[u8], context: &Context) -> Result<(), ExecuteError> {
    let path = context.workdir().join(file);
    let host = |error: std::io::Error| ExecuteError::Host(format!("an answer cannot be stored: {error}"));
    tokio::fs::write(&path, bytes).await.map_err(host)?;
    let kind = if is_json(bytes) { "application/json" } else { "application/octet-stream" };
    let what = ArtifactKind::File { path: file.into(), content_type: Some(kind.to_owned()) };
    let declared = context.artifacts().declare(ArtifactDeclaration::new(name, what));
    declared.map_err(|error| ExecuteError::Internal(error.to_string()))
}

fn is_json(bytes: &[u8]) -> bool {
    serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok()
}
