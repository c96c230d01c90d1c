//! Requests as tasks: each request becomes a task of a Taskcluster queue, and how that is resolved becomes the answer.
//!
//! The id of the task is made of the request's idempotency key. A request that is delivered again, to this bridge or to
//! another one, finds the task that it has become and waits for that.

use std::fmt;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::{BridgeForm, RetryTimer, task_payload};
use crate::config::values::Queue;
use crate::domain::backoff::Policy;
use crate::domain::id::{Run, TaskId};
use crate::domain::refusal::Refusal;
use crate::handler::{CancelCause, Context, ExecuteError, PayloadHandler, PrepareError, Request};
use crate::limits::{
    BRIDGE_POLL_MAX, BRIDGE_POLL_MIN, BRIDGE_RESULT_BYTES_MAX, BRIDGE_RETRY_MAX, BRIDGE_RETRY_MIN,
    BRIDGE_TASK_RETENTION,
};
use crate::source::taskcluster::Api;
use crate::source::taskcluster::formats::{format_time, task_id_from_bytes};
use crate::source::{CallError, Reply};

/// What a task leaves behind for whoever asked.
pub(super) const RESULT_ARTIFACT: &str = "public/result.json";
const RETRY_POLICY: Policy = Policy { first: BRIDGE_RETRY_MIN, max: BRIDGE_RETRY_MAX };
const POLL_POLICY: Policy = Policy { first: BRIDGE_POLL_MIN, max: BRIDGE_POLL_MAX };

/// Where requests go.
#[derive(Clone)]
pub struct Config {
    /// The deployment.
    pub api: Api,
    /// The queue of the tasks.
    pub task_queue: Queue,
    /// Where requests come from. The same key of two origins is two tasks.
    pub origin: String,
    /// What the payload of a task is.
    pub form: BridgeForm,
    /// How long a task has, from when the request is taken, where its author waits no shorter.
    pub max_run_time: Duration,
}

/// Turns requests into tasks.
#[derive(Clone)]
pub struct RequestsToTasks(Config);

impl RequestsToTasks {
    /// Nothing is sent yet.
    #[must_use]
    pub const fn new(settings: Config) -> Self {
        Self(settings)
    }
}

/// A task to be made.
pub struct PreparedTask {
    task: TaskId,
    idempotency_key: String,
    definition: Value,
}

impl fmt::Debug for PreparedTask {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Plan({})", self.task)
    }
}

/// How a task was resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
enum TaskResult {
    /// In which run.
    Completed(u32),
    /// How else.
    Unsuccessful(String),
}

impl PayloadHandler for RequestsToTasks {
    type Payload = Request;
    type Prepared = PreparedTask;

    fn describe(&self) -> String {
        format!("hands requests on to {} as tasks", self.0.task_queue)
    }

    async fn prepare(&self, request: Request, context: &Context) -> Result<PreparedTask, PrepareError> {
        let payload =
            task_payload(&request, self.0.form).map_err(|what| PrepareError::Malformed(vec![what.to_owned()]))?;
        let key = request.idempotency_key.clone().unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
        let patience = request.seconds_left.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let time = patience.unwrap_or(self.0.max_run_time).min(self.0.max_run_time);
        let definition = self.definition(&request, &key, payload, time, context);
        let definition = definition.ok_or_else(|| PrepareError::Internal("its deadline is too far away".to_owned()))?;
        Ok(PreparedTask { task: task_id(&self.0.origin, &key), idempotency_key: key, definition })
    }

    async fn execute(&self, plan: PreparedTask, context: &Context) -> Result<(), ExecuteError> {
        tokio::select! {
            ended = self.create_and_wait(&plan, context) => ended,
            order = context.canceled() => {
                // The task goes on when the request is only handed back: whoever takes it next finds the task.
                if order.cause == CancelCause::Canceled {
                    let left = context.time_until(order.deadline);
                    let canceled = tokio::time::timeout(left, self.0.api.cancel_task(&plan.task)).await;
                    if !matches!(canceled, Ok(Ok(_))) {
                        context.log().write_note(&format!("task {} was not canceled", plan.task));
                    }
                }
                Err(ExecuteError::Intermittent(format!("task {} goes on without this bridge", plan.task)))
            }
        }
    }
}

impl RequestsToTasks {
    fn definition(
        &self,
        request: &Request,
        key: &str,
        payload: Value,
        time: Duration,
        context: &Context,
    ) -> Option<Value> {
        let now = Timestamp::now();
        let after = |span: Duration| now.checked_add(SignedDuration::try_from(span).ok()?).ok();
        let (deadline, expires) = (after(time)?, after(time.checked_add(BRIDGE_TASK_RETENTION)?)?);
        let queue = &self.0.task_queue;
        let mut extra = json!({"journeyman": {"bridge": key}});
        if let Some(trace) = context.task().env.get("TRACEPARENT") {
            extra["traceparent"] = trace.as_str().into();
        }
        Some(json!({
            "provisionerId": queue.provisioner(),
            "workerType": queue.worker_type(),
            "created": format_time(now),
            "deadline": format_time(deadline),
            "expires": format_time(expires),
            "payload": payload,
            "metadata": {
                "name": request.path.as_deref().filter(|path| !path.is_empty()).unwrap_or("request"),
                "description": format!("a request of {}, handed on by journeyman bridge", self.0.origin),
                "owner": "nobody@example.com",
                "source": "https://example.com/journeyman",
            },
            "extra": extra,
        }))
    }

    async fn create_and_wait(&self, plan: &PreparedTask, context: &Context) -> Result<(), ExecuteError> {
        self.create(plan, context).await?;
        context.set_progress(&format!("waits for task {}", plan.task));
        match self.wait_until_resolved(plan, context).await? {
            TaskResult::Completed(run) => {
                let run = Run { task: plan.task.clone(), run };
                let answer = self.fetch_result(&run, context).await?;
                let answered = context.set_reply(answer);
                answered.map_err(|error| ExecuteError::Failed(format!("task {}: {error}", plan.task)))
            }
            TaskResult::Unsuccessful(how) => Err(ExecuteError::Failed(format!("task {} {how}", plan.task))),
        }
    }

    /// Makes the task, or finds it made.
    async fn create(&self, plan: &PreparedTask, context: &Context) -> Result<(), ExecuteError> {
        let mut waits = RetryTimer::new(RETRY_POLICY);
        loop {
            match self.0.api.create_task(&plan.task, plan.definition.clone()).await {
                Ok(_) => return Ok(()),
                Err(CallError { refusal: Refusal::Gone, .. }) => return self.verify_existing(plan, context).await,
                Err(CallError { refusal: Refusal::Rejected, message: what }) => return Err(ExecuteError::Failed(what)),
                Err(refused) => wait_before_retry(&mut waits, &refused, context).await,
            }
        }
    }

    /// A task of this id that is another one was made by an earlier delivery, with other times.
    async fn verify_existing(&self, plan: &PreparedTask, context: &Context) -> Result<(), ExecuteError> {
        let mut waits = RetryTimer::new(RETRY_POLICY);
        loop {
            match self.0.api.task_definition(&plan.task).await {
                Ok(found) if found["extra"]["journeyman"]["bridge"] == plan.idempotency_key.as_str() => return Ok(()),
                Ok(_) => {
                    let what = format!("task {} exists and is not of this request", plan.task);
                    return Err(ExecuteError::Internal(what));
                }
                Err(refused) if is_transient(&refused) => wait_before_retry(&mut waits, &refused, context).await,
                Err(refused) => return Err(ExecuteError::Failed(refused.message)),
            }
        }
    }

    async fn wait_until_resolved(&self, plan: &PreparedTask, context: &Context) -> Result<TaskResult, ExecuteError> {
        let (mut watch, mut retry) = (RetryTimer::new(POLL_POLICY), RetryTimer::new(RETRY_POLICY));
        loop {
            match self.0.api.task_status(&plan.task).await {
                Ok(status) => match parse_status(&status) {
                    Some(end) => return Ok(end),
                    None => watch.wait(None).await,
                },
                Err(refused) if is_transient(&refused) => wait_before_retry(&mut retry, &refused, context).await,
                Err(refused) => return Err(ExecuteError::Failed(refused.message)),
            }
        }
    }

    /// The answer: what the task left behind as its result, or which task it was.
    async fn fetch_result(&self, run: &Run, context: &Context) -> Result<Reply, ExecuteError> {
        let mut waits = RetryTimer::new(RETRY_POLICY);
        let kind = Some("application/json".to_owned());
        loop {
            match self.download_result(run).await {
                Ok(Some(bytes)) => return Ok(Reply { content_type: kind, ..Reply::ok(bytes) }),
                Ok(None) => {
                    let what = format!("task {}: its result is larger than {BRIDGE_RESULT_BYTES_MAX} bytes", run.task);
                    return Err(ExecuteError::Failed(what));
                }
                Err(CallError { refusal: Refusal::Gone, .. }) => {
                    let body = json!({"taskId": run.task.as_str(), "runId": run.run, "state": "completed"});
                    return Ok(Reply { content_type: kind, ..Reply::ok(body.to_string().into_bytes()) });
                }
                Err(refused) if is_transient(&refused) => wait_before_retry(&mut waits, &refused, context).await,
                Err(refused) => return Err(ExecuteError::Failed(refused.message)),
            }
        }
    }

    /// `None` where it is too large.
    async fn download_result(&self, run: &Run) -> Result<Option<Vec<u8>>, CallError> {
        let mut download = self.0.api.artifact(run, RESULT_ARTIFACT).await?;
        let mut bytes = Vec::new();
        while let Some(piece) = download.next_chunk().await? {
            if bytes.len() + piece.len() > BRIDGE_RESULT_BYTES_MAX {
                return Ok(None);
            }
            bytes.extend(piece);
        }
        Ok(Some(bytes))
    }
}

/// Whether waiting helps. Credentials may be mended while the request waits; nothing is lost by that.
const fn is_transient(refused: &CallError) -> bool {
    match refused.refusal {
        Refusal::Retry { .. } | Refusal::Throttled { .. } | Refusal::Denied | Refusal::Stale => true,
        Refusal::Gone | Refusal::Rejected => false,
    }
}

async fn wait_before_retry(waits: &mut RetryTimer, refused: &CallError, context: &Context) {
    let asked = match refused.refusal {
        Refusal::Retry { retry_after: after } | Refusal::Throttled { retry_after: after } => after,
        Refusal::Denied | Refusal::Stale | Refusal::Gone | Refusal::Rejected => None,
    };
    if refused.refusal == Refusal::Denied {
        tracing::warn!(claim.run = %context.task().run, "a request waits, since the queue it goes to refuses us: {}", refused.message);
    }
    context.set_progress(&format!("waits: {}", refused.message));
    waits.wait(asked).await;
}

/// `None` while there is more to wait for.
fn parse_status(status: &Value) -> Option<TaskResult> {
    let runs = status["runs"].as_array().map_or(&[][..], Vec::as_slice);
    let last = runs.last();
    let number = u32::try_from(runs.len().saturating_sub(1)).unwrap_or(u32::MAX);
    let reason = last.and_then(|run| run["reasonResolved"].as_str()).unwrap_or("unknown");
    match status["state"].as_str() {
        Some("completed") => Some(TaskResult::Completed(number)),
        Some("failed") => Some(TaskResult::Unsuccessful(format!("failed in run {number}"))),
        Some("exception") => Some(TaskResult::Unsuccessful(format!("ended with {reason}"))),
        _ => None,
    }
}

/// The id of the task that a request becomes.
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
    fn the_same_request_is_always_the_same_task_and_of_another_origin_another() {
        let one = task_id("requests", "key");
        assert_eq!(one, task_id("requests", "key"));
        for other in [task_id("requests", "yek"), task_id("elsewhere", "key"), task_id("request", "skey")] {
            assert_ne!(one, other);
        }
        assert_eq!(one.as_str().len(), 22);
    }

    #[test]
    fn a_status_says_whether_there_is_more_to_wait_for() {
        let of = |state: &str, runs: Value| parse_status(&json!({"state": state, "runs": runs}));
        for open in ["unscheduled", "pending", "running", "", "news"] {
            assert_eq!(of(open, json!([])), None);
        }
        assert_eq!(of("completed", json!([{}, {}])), Some(TaskResult::Completed(1)));
        assert_eq!(of("failed", json!([{}])), Some(TaskResult::Unsuccessful("failed in run 0".to_owned())));
        let ended = of("exception", json!([{"reasonResolved": "deadline-exceeded"}]));
        assert_eq!(ended, Some(TaskResult::Unsuccessful("ended with deadline-exceeded".to_owned())));
        assert_eq!(of("exception", json!([])), Some(TaskResult::Unsuccessful("ended with unknown".to_owned())));
    }
}
