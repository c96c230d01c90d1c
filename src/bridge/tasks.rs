//! Requests as tasks: each request becomes a task of a Taskcluster queue, and how that is resolved becomes the answer.
//!
//! The id of the task is made of the request's idempotency key. A request that is delivered again, to this bridge or to
//! another one, finds the task that it has become and waits for that.

use std::fmt;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::{Form, Waits, payload};
use crate::config::values::Queue;
use crate::domain::backoff::Policy;
use crate::domain::id::{Run, TaskId};
use crate::domain::refusal::Refusal;
use crate::handler::{CancelCause, Context, NotCompleted, NotPrepared, PayloadHandler, Request};
use crate::limits::{
    BRIDGE_RESULT_BYTES_MAX, BRIDGE_RETRY_MAX, BRIDGE_RETRY_MIN, BRIDGE_TASK_KEPT, BRIDGE_WATCH_MAX, BRIDGE_WATCH_MIN,
};
use crate::source::taskcluster::Api;
use crate::source::taskcluster::words::{slug, stamp};
use crate::source::{Refused, Reply};

/// What a task leaves behind for whoever asked.
pub(super) const RESULT: &str = "public/result.json";
const RETRY: Policy = Policy { first: BRIDGE_RETRY_MIN, max: BRIDGE_RETRY_MAX };
const WATCH: Policy = Policy { first: BRIDGE_WATCH_MIN, max: BRIDGE_WATCH_MAX };

/// Where requests go.
#[derive(Clone)]
pub struct Settings {
    /// The deployment.
    pub api: Api,
    /// The queue of the tasks.
    pub task_queue: Queue,
    /// Where requests come from. The same key of two origins is two tasks.
    pub origin: String,
    /// What the payload of a task is.
    pub form: Form,
    /// How long a task has, from when the request is taken, where its author waits no shorter.
    pub max_run_time: Duration,
}

/// Turns requests into tasks.
#[derive(Clone)]
pub struct Tasks(Settings);

impl Tasks {
    /// Nothing is sent yet.
    #[must_use]
    pub const fn new(settings: Settings) -> Self {
        Self(settings)
    }
}

/// A task to be made.
pub struct Plan {
    task: TaskId,
    key: String,
    definition: Value,
}

impl fmt::Debug for Plan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Plan({})", self.task)
    }
}

/// How a task was resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    /// In which run.
    Completed(u32),
    /// How else.
    Otherwise(String),
}

impl PayloadHandler for Tasks {
    type Payload = Request;
    type Prepared = Plan;

    fn describe(&self) -> String {
        format!("hands requests on to {} as tasks", self.0.task_queue)
    }

    async fn prepare(&self, request: Request, context: &Context) -> Result<Plan, NotPrepared> {
        let payload = payload(&request, self.0.form).map_err(|what| NotPrepared::Malformed(vec![what.to_owned()]))?;
        let key = request.idempotency_key.clone().unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
        let patience = request.seconds_left.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let time = patience.unwrap_or(self.0.max_run_time).min(self.0.max_run_time);
        let definition = self.definition(&request, &key, payload, time, context);
        let definition = definition.ok_or_else(|| NotPrepared::Internal("its deadline is too far away".to_owned()))?;
        Ok(Plan { task: task_id(&self.0.origin, &key), key, definition })
    }

    async fn execute(&self, plan: Plan, context: &Context) -> Result<(), NotCompleted> {
        tokio::select! {
            ended = self.see_through(&plan, context) => ended,
            order = context.canceled() => {
                // The task goes on when the request is only handed back: whoever takes it next finds the task.
                if order.cause == CancelCause::Canceled {
                    let left = context.left(order.deadline);
                    let canceled = tokio::time::timeout(left, self.0.api.cancel_task(&plan.task)).await;
                    if !matches!(canceled, Ok(Ok(_))) {
                        context.log().note(&format!("task {} was not canceled", plan.task));
                    }
                }
                Err(NotCompleted::Intermittent(format!("task {} goes on without this bridge", plan.task)))
            }
        }
    }
}

impl Tasks {
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
        let (deadline, expires) = (after(time)?, after(time.checked_add(BRIDGE_TASK_KEPT)?)?);
        let queue = &self.0.task_queue;
        let mut extra = json!({"journeyman": {"bridge": key}});
        if let Some(trace) = context.task().env.get("TRACEPARENT") {
            extra["traceparent"] = trace.as_str().into();
        }
        Some(json!({
            "provisionerId": queue.provisioner(),
            "workerType": queue.worker_type(),
            "created": stamp(now),
            "deadline": stamp(deadline),
            "expires": stamp(expires),
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

    async fn see_through(&self, plan: &Plan, context: &Context) -> Result<(), NotCompleted> {
        self.create(plan, context).await?;
        context.set_progress(&format!("waits for task {}", plan.task));
        match self.resolved(plan, context).await? {
            End::Completed(run) => {
                let run = Run { task: plan.task.clone(), run };
                let answer = self.result(&run, context).await?;
                let answered = context.answer(answer);
                answered.map_err(|error| NotCompleted::Failed(format!("task {}: {error}", plan.task)))
            }
            End::Otherwise(how) => Err(NotCompleted::Failed(format!("task {} {how}", plan.task))),
        }
    }

    /// Makes the task, or finds it made.
    async fn create(&self, plan: &Plan, context: &Context) -> Result<(), NotCompleted> {
        let mut waits = Waits::new(RETRY);
        loop {
            match self.0.api.create_task(&plan.task, plan.definition.clone()).await {
                Ok(_) => return Ok(()),
                Err(Refused { refusal: Refusal::Gone, .. }) => return self.is_ours(plan, context).await,
                Err(Refused { refusal: Refusal::Rejected, what }) => return Err(NotCompleted::Failed(what)),
                Err(refused) => pause(&mut waits, &refused, context).await,
            }
        }
    }

    /// A task of this id that is another one was made by an earlier delivery, with other times.
    async fn is_ours(&self, plan: &Plan, context: &Context) -> Result<(), NotCompleted> {
        let mut waits = Waits::new(RETRY);
        loop {
            match self.0.api.task_definition(&plan.task).await {
                Ok(found) if found["extra"]["journeyman"]["bridge"] == plan.key.as_str() => return Ok(()),
                Ok(_) => {
                    let what = format!("task {} exists and is not of this request", plan.task);
                    return Err(NotCompleted::Internal(what));
                }
                Err(refused) if is_passing(&refused) => pause(&mut waits, &refused, context).await,
                Err(refused) => return Err(NotCompleted::Failed(refused.what)),
            }
        }
    }

    async fn resolved(&self, plan: &Plan, context: &Context) -> Result<End, NotCompleted> {
        let (mut watch, mut retry) = (Waits::new(WATCH), Waits::new(RETRY));
        loop {
            match self.0.api.task_status(&plan.task).await {
                Ok(status) => match end(&status) {
                    Some(end) => return Ok(end),
                    None => watch.next(None).await,
                },
                Err(refused) if is_passing(&refused) => pause(&mut retry, &refused, context).await,
                Err(refused) => return Err(NotCompleted::Failed(refused.what)),
            }
        }
    }

    /// The answer: what the task left behind as its result, or which task it was.
    async fn result(&self, run: &Run, context: &Context) -> Result<Reply, NotCompleted> {
        let mut waits = Waits::new(RETRY);
        let kind = Some("application/json".to_owned());
        loop {
            match self.read(run).await {
                Ok(Some(bytes)) => return Ok(Reply { content_type: kind, ..Reply::ok(bytes) }),
                Ok(None) => {
                    let what = format!("task {}: its result is larger than {BRIDGE_RESULT_BYTES_MAX} bytes", run.task);
                    return Err(NotCompleted::Failed(what));
                }
                Err(Refused { refusal: Refusal::Gone, .. }) => {
                    let body = json!({"taskId": run.task.as_str(), "runId": run.run, "state": "completed"});
                    return Ok(Reply { content_type: kind, ..Reply::ok(body.to_string().into_bytes()) });
                }
                Err(refused) if is_passing(&refused) => pause(&mut waits, &refused, context).await,
                Err(refused) => return Err(NotCompleted::Failed(refused.what)),
            }
        }
    }

    /// `None` where it is too large.
    async fn read(&self, run: &Run) -> Result<Option<Vec<u8>>, Refused> {
        let mut download = self.0.api.artifact(run, RESULT).await?;
        let mut bytes = Vec::new();
        while let Some(piece) = download.piece().await? {
            if bytes.len() + piece.len() > BRIDGE_RESULT_BYTES_MAX {
                return Ok(None);
            }
            bytes.extend(piece);
        }
        Ok(Some(bytes))
    }
}

/// Whether waiting helps. Credentials may be mended while the request waits; nothing is lost by that.
const fn is_passing(refused: &Refused) -> bool {
    match refused.refusal {
        Refusal::Retry { .. } | Refusal::Throttled { .. } | Refusal::Denied | Refusal::Stale => true,
        Refusal::Gone | Refusal::Rejected => false,
    }
}

async fn pause(waits: &mut Waits, refused: &Refused, context: &Context) {
    let asked = match refused.refusal {
        Refusal::Retry { after } | Refusal::Throttled { after } => after,
        Refusal::Denied | Refusal::Stale | Refusal::Gone | Refusal::Rejected => None,
    };
    if refused.refusal == Refusal::Denied {
        tracing::warn!(claim.run = %context.task().run, "a request waits, since the queue it goes to refuses us: {}", refused.what);
    }
    context.set_progress(&format!("waits: {}", refused.what));
    waits.next(asked).await;
}

/// `None` while there is more to wait for.
fn end(status: &Value) -> Option<End> {
    let runs = status["runs"].as_array().map_or(&[][..], Vec::as_slice);
    let last = runs.last();
    let number = u32::try_from(runs.len().saturating_sub(1)).unwrap_or(u32::MAX);
    let reason = last.and_then(|run| run["reasonResolved"].as_str()).unwrap_or("unknown");
    match status["state"].as_str() {
        Some("completed") => Some(End::Completed(number)),
        Some("failed") => Some(End::Otherwise(format!("failed in run {number}"))),
        Some("exception") => Some(End::Otherwise(format!("ended with {reason}"))),
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
    slug(bytes)
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
        let of = |state: &str, runs: Value| end(&json!({"state": state, "runs": runs}));
        for open in ["unscheduled", "pending", "running", "", "news"] {
            assert_eq!(of(open, json!([])), None);
        }
        assert_eq!(of("completed", json!([{}, {}])), Some(End::Completed(1)));
        assert_eq!(of("failed", json!([{}])), Some(End::Otherwise("failed in run 0".to_owned())));
        let ended = of("exception", json!([{"reasonResolved": "deadline-exceeded"}]));
        assert_eq!(ended, Some(End::Otherwise("ended with deadline-exceeded".to_owned())));
        assert_eq!(of("exception", json!([])), Some(End::Otherwise("ended with unknown".to_owned())));
    }
}
