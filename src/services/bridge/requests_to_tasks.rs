//! Requests as tasks: creates a task of a Taskcluster queue for each request, and replies with its result.
//!
//! The task id derives from the request's idempotency key. A request that is redelivered, to this bridge or another one, finds its
//! task and waits for it.

use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use journeyman_domain::backoff::Policy;
use journeyman_domain::id::{Run, TaskId};
use journeyman_domain::limits::{
    BRIDGE_POLL_MAX, BRIDGE_POLL_MIN, BRIDGE_RESULT_BYTES_MAX, BRIDGE_RETRY_MAX, BRIDGE_RETRY_MIN,
    BRIDGE_TASK_RETENTION,
};
use journeyman_domain::refusal::Refusal;
use journeyman_platform::retry::Retry;
use journeyman_platform::settings::values::Queue;
use journeyman_worker::handler::{
    CancelCause, CancelCommand, Context, ExecuteError, ExecuteFailure, PayloadHandler, PrepareError, Request,
};
use journeyman_worker::source::CallError;
use journeyman_worker::source::taskcluster::Api;
use journeyman_worker::task::Reply;
use journeyman_worker::task::formats::{format_time, task_id_from_bytes};

/// The artifact that becomes the reply.
pub(super) const RESULT_ARTIFACT: &str = "public/result.json";
const RETRY_POLICY: Policy = Policy { first: BRIDGE_RETRY_MIN, max: BRIDGE_RETRY_MAX };
const POLL_POLICY: Policy = Policy { first: BRIDGE_POLL_MIN, max: BRIDGE_POLL_MAX };

/// Creates a task for each request.
#[derive(Clone)]
pub struct RequestsToTasks {
    /// The Taskcluster deployment.
    pub api: Api,
    /// The queue that the tasks are created for.
    pub task_queue: Queue,
    /// The queue that the requests come from; a part of the task id.
    pub origin: String,
    /// The longest time that a task has, from its request's claim to its deadline.
    pub max_run_time: Duration,
}

/// A task to be created.
pub struct PreparedTask {
    id: TaskId,
    definition: Value,
}

impl PayloadHandler for RequestsToTasks {
    type Payload = Request;
    type Prepared = PreparedTask;

    fn describe(&self) -> String {
        format!("forwards requests to {} as tasks", self.task_queue)
    }

    fn payload_schema(&self) -> Value {
        Request::schema()
    }

    async fn prepare(&self, request: Request, context: &Context) -> Result<PreparedTask, PrepareError> {
        let key = (*request.idempotency_key).clone().unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
        let remaining = request.seconds_left.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let time = remaining.unwrap_or(self.max_run_time).min(self.max_run_time);
        Ok(PreparedTask { id: task_id(&self.origin, &key), definition: self.definition(request, time, context) })
    }

    async fn execute(&self, task: PreparedTask, context: &Context) -> Result<(), ExecuteError> {
        tokio::select! {
            ended = self.create_and_wait(&task, context) => ended,
            cancel = context.canceled() => {
                // A release leaves the task running: the worker that claims the request next finds it.
                if cancel.cause == CancelCause::Command(CancelCommand::Cancel) {
                    let remaining = context.time_until(cancel.deadline);
                    let canceled = tokio::time::timeout(remaining, self.api.cancel_task(&task.id)).await;
                    if !matches!(canceled, Ok(Ok(_))) {
                        context.log().write_note(&format!("cannot cancel task {}", task.id));
                    }
                }
                Err(ExecuteError::new(ExecuteFailure::Intermittent, format!("task {} keeps running without this bridge", task.id)))
            }
        }
    }
}

impl RequestsToTasks {
    fn definition(&self, request: Request, time: Duration, context: &Context) -> Value {
        let now = Timestamp::now();
        let after = |span: Duration| now.saturating_add(span).unwrap_or(Timestamp::MAX);
        let (deadline, expires) = (after(time), after(time.saturating_add(BRIDGE_TASK_RETENTION)));
        let queue = &self.task_queue;
        let name = request.path.clone().filter(|path| !path.is_empty()).unwrap_or_else(|| "request".to_owned());
        let trace = context.task().env.get("TRACEPARENT");
        json!({
            "provisionerId": queue.provisioner(),
            "workerType": queue.worker_type(),
            "created": format_time(now),
            "deadline": format_time(deadline),
            "expires": format_time(expires),
            "payload": request.into_value(),
            "metadata": {
                "name": name,
                "description": format!("request from {}, created by journeyman bridge", self.origin),
                "owner": "nobody@example.com",
                "source": "https://example.com/journeyman",
            },
            "extra": trace.map_or_else(|| json!({}), |trace| json!({ "traceparent": trace })),
        })
    }

    async fn create_and_wait(&self, task: &PreparedTask, context: &Context) -> Result<(), ExecuteError> {
        let failed = |error: CallError| ExecuteError::failed(error.message);
        match retry(context, || self.api.create_task(&task.id, task.definition.clone())).await {
            // Gone: an earlier delivery created the task, with other times.
            Ok(_) | Err(CallError { refusal: Refusal::Gone, .. }) => {}
            Err(error) => return Err(failed(error)),
        }
        context.set_progress(&format!("waiting for task {}", task.id));
        let mut watch = Retry::new(POLL_POLICY);
        let result = loop {
            let status = retry(context, || self.api.task_status(&task.id)).await.map_err(failed)?;
            match parse_status(&status) {
                Some(result) => break result,
                None => tokio::time::sleep(watch.next_wait(None)).await,
            }
        };
        match result {
            Ok(run) => {
                let run = Run { task: task.id.clone(), run };
                let result = context.set_reply(self.fetch_result(&run, context).await.map_err(failed)?);
                result.map_err(|error| ExecuteError::failed(format!("task {}: {error}", task.id)))
            }
            Err(how) => Err(ExecuteError::failed(format!("task {} {how}", task.id))),
        }
    }

    /// The reply: the task's result artifact, or the task's id where it has none.
    async fn fetch_result(&self, run: &Run, context: &Context) -> Result<Reply, CallError> {
        let bytes = match retry(context, || self.download_result(run)).await {
            Err(CallError { refusal: Refusal::Gone, .. }) => {
                let ids = json!({"taskId": run.task.as_str(), "runId": run.run, "state": "completed"});
                ids.to_string().into_bytes()
            }
            downloaded => downloaded?,
        };
        Ok(Reply { content_type: Some("application/json".to_owned()), ..Reply::ok(bytes) })
    }

    async fn download_result(&self, run: &Run) -> Result<Vec<u8>, CallError> {
        let mut download = self.api.artifact(run, RESULT_ARTIFACT).await?;
        let mut bytes = Vec::new();
        while let Some(chunk) = download.next_chunk().await? {
            if bytes.len() + chunk.len() > BRIDGE_RESULT_BYTES_MAX {
                let message = format!(
                    "task {}: its result is larger than the limit of {BRIDGE_RESULT_BYTES_MAX} bytes",
                    run.task
                );
                return Err(CallError { refusal: Refusal::Rejected, message });
            }
            bytes.extend(chunk);
        }
        Ok(bytes)
    }
}

/// Repeats a call until it succeeds or fails for good. Denied is retried: credentials may be corrected while the request waits.
async fn retry<T, F: Future<Output = Result<T, CallError>>>(
    context: &Context,
    call: impl Fn() -> F,
) -> Result<T, CallError> {
    let mut timer = Retry::new(RETRY_POLICY);
    loop {
        let error = match call().await {
            Err(error) => error,
            result => return result,
        };
        let retry_after = match error.refusal {
            Refusal::Retry { retry_after } | Refusal::Throttled { retry_after } => retry_after,
            Refusal::Denied => {
                let run = &context.task().run;
                tracing::warn!(claim.run = %run, "retrying a request whose queue denies access: {}", error.message);
                None
            }
            Refusal::Full | Refusal::Stale => None,
            Refusal::Gone | Refusal::Rejected => return Err(error),
        };
        context.set_progress(&format!("retrying: {}", error.message));
        tokio::time::sleep(timer.next_wait(retry_after)).await;
    }
}

/// The run that completed the task, or what happened instead; `None` until the task is resolved.
fn parse_status(status: &Value) -> Option<Result<u32, String>> {
    let runs = status["runs"].as_array().map_or(&[][..], Vec::as_slice);
    let number = u32::try_from(runs.len().saturating_sub(1)).unwrap_or(u32::MAX);
    let reason = runs.last().and_then(|run| run["reasonResolved"].as_str()).unwrap_or("unknown");
    match status["state"].as_str() {
        Some("completed") => Some(Ok(number)),
        Some("failed") => Some(Err(format!("failed in run {number}"))),
        Some("exception") => Some(Err(format!("ended with {reason}"))),
        _ => None,
    }
}

/// The id of the task for a request.
fn task_id(origin: &str, key: &str) -> TaskId {
    let mut digest = Sha256::new();
    for part in ["journeyman bridge", origin, key] {
        digest.update(part.len().to_be_bytes());
        digest.update(part);
    }
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest.finalize()[..16]);
    task_id_from_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_task_id_derives_from_origin_and_key() {
        let one = task_id("requests", "key");
        assert_eq!(one, task_id("requests", "key"));
        for other in [task_id("requests", "yek"), task_id("elsewhere", "key"), task_id("request", "skey")] {
            assert_ne!(one, other);
        }
        assert_eq!(one.as_str().len(), 22);
    }

    #[test]
    fn a_status_is_parsed_once_the_task_is_resolved() {
        let of = |state: &str, runs: Value| parse_status(&json!({"state": state, "runs": runs}));
        for open in ["unscheduled", "pending", "running", "", "news"] {
            assert_eq!(of(open, json!([])), None);
        }
        assert_eq!(of("completed", json!([{}, {}])), Some(Ok(1)));
        assert_eq!(of("failed", json!([{}])), Some(Err("failed in run 0".to_owned())));
        let ended = of("exception", json!([{"reasonResolved": "deadline-exceeded"}]));
        assert_eq!(ended, Some(Err("ended with deadline-exceeded".to_owned())));
        assert_eq!(of("exception", json!([])), Some(Err("ended with unknown".to_owned())));
    }
}
