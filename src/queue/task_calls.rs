//! The task and claim calls of the API: each parses its body, runs a job in the store and builds the response.

use std::sync::Arc;

use axum::http::StatusCode;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use tokio::time::timeout;

use super::QueueState;
use super::artifact_calls;
use super::auth::Caller;
use super::clock::UnixMillis;
use super::field_types::{Identifier, Integer, parse_fields};
use super::queue_error::{QueueError, QueueErrorCode};
use super::request_body::RequestBody;
use super::response_json;
use super::route::{ApiMethod, Route, query_param};
use super::scopes::ScopeExpression;
use super::store::tx::Tx;
use super::store::{StoreError, UndeliveredClaims};
use super::task_definition;
use super::task_state::{ResolvedReason, RunError, TaskRecord, Transition, WorkerIdentity};
use crate::limits::{QUEUE_OVERLOADED_POLL_WAIT, QUEUE_PAGE_MAX};

pub(crate) struct CallInput {
    pub(crate) route: Route,
    pub(crate) query: String,
    pub(crate) caller: Caller,
    pub(crate) body: Arc<RequestBody>,
}

pub(crate) struct CallReply {
    pub(crate) status: StatusCode,
    pub(crate) body: String,
    pub(crate) headers: Vec<ReplyHeader>,
}

pub(crate) struct ReplyHeader {
    pub(crate) name: &'static str,
    pub(crate) value: String,
}

impl CallReply {
    pub(crate) const fn ok(body: String) -> Self {
        Self { status: StatusCode::OK, body, headers: Vec::new() }
    }
}

pub(crate) type ReplyResult = Result<CallReply, QueueError>;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ClaimWork {
    worker_group: Identifier,
    worker_id: Identifier,
    tasks: Option<Integer<1, 32>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ClaimTask {
    worker_group: Identifier,
    worker_id: Identifier,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReportException {
    reason: ResolvedReason,
}

impl CallInput {
    pub(crate) fn fields<T: DeserializeOwned>(&self) -> Result<T, QueueError> {
        parse_fields(&self.body)
    }

    fn task_id(&self) -> String {
        self.route.param("taskId").to_owned()
    }

    fn task_queue(&self) -> String {
        self.route.param("taskQueueId").to_owned()
    }

    pub(crate) fn page_size(&self) -> Result<usize, QueueError> {
        let Some(text) = query_param(&self.query, "limit") else { return Ok(QUEUE_PAGE_MAX) };
        let limit: usize = text.parse().map_err(|_| {
            QueueError::new(QueueErrorCode::InvalidRequestArguments, format!("limit {text:?} is not a number"))
        })?;
        Ok(limit.clamp(1, QUEUE_PAGE_MAX))
    }

    pub(crate) fn page_start(&self) -> Option<String> {
        query_param(&self.query, "continuationToken")
    }
}

pub(crate) async fn handle(app: &QueueState, input: CallInput) -> ReplyResult {
    match input.route.method {
        ApiMethod::Ping => Ok(CallReply::ok(json!({"alive": true, "uptime": app.uptime().as_secs_f64()}).to_string())),
        ApiMethod::CreateTask => create_task(app, input).await,
        ApiMethod::Task => task(app, input).await,
        ApiMethod::Status => status(app, input).await,
        ApiMethod::RerunTask => apply_operation(app, input, TaskOperation::Rerun).await,
        ApiMethod::CancelTask => apply_operation(app, input, TaskOperation::Cancel).await,
        ApiMethod::PollTaskUrls => super::azure_storage::poll_task_urls(app, input).await,
        ApiMethod::ClaimWork => claim_work(app, input).await,
        ApiMethod::ClaimTask => claim_task(app, input).await,
        ApiMethod::ReclaimTask => reclaim_task(app, input).await,
        ApiMethod::ReportCompleted => report(app, input, ResolvedReason::Completed).await,
        ApiMethod::ReportFailed => report(app, input, ResolvedReason::Failed).await,
        ApiMethod::ReportException => {
            let ReportException { reason } = input.fields()?;
            if !reason.is_reportable() {
                let message = "invalid request body: a worker cannot report this reason";
                return Err(QueueError::new(QueueErrorCode::InputValidationError, message));
            }
            report(app, input, reason).await
        }
        ApiMethod::PendingTasks => pending_tasks(app, input).await,
        ApiMethod::ListPendingTasks => list_pending(app, input).await,
        ApiMethod::ListClaimedTasks => list_claimed(app, input).await,
        ApiMethod::JourneymanListTasks => list_all(app, input).await,
        ApiMethod::CreateArtifact => artifact_calls::create(app, input).await,
        ApiMethod::GetArtifact | ApiMethod::GetLatestArtifact => artifact_calls::get(app, input).await,
        ApiMethod::ListArtifacts => artifact_calls::list(app, input).await,
    }
}

async fn create_task(app: &QueueState, input: CallInput) -> ReplyResult {
    let draft = task_definition::parse_create_task(&input.task_id(), &input.body)?;
    input.caller.require(&draft.required_scopes())?;
    let new_task = draft.complete(app.now())?;
    let task = app.store.execute(move |tx| tx.create_task(new_task)).await?;
    Ok(CallReply::ok(response_json::status_reply(&task)))
}

async fn task(app: &QueueState, input: CallInput) -> ReplyResult {
    let task = input.task_id();
    input.caller.require_scope(format!("queue:get-task:{task}"))?;
    let definition = app
        .store
        .execute(move |tx| {
            let row = tx.require_task(&task)?;
            tx.definition(row.id)
        })
        .await?;
    Ok(CallReply::ok(definition))
}

async fn status(app: &QueueState, input: CallInput) -> ReplyResult {
    let task = input.task_id();
    input.caller.require_scope(format!("queue:status:{task}"))?;
    let row = app.store.execute(move |tx| tx.require_task(&task)).await?;
    Ok(CallReply::ok(response_json::status_reply(&row.task)))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TaskOperation {
    Rerun,
    Cancel,
}

impl TaskOperation {
    fn required_scopes(self, task: &TaskRecord) -> ScopeExpression {
        let verb = match self {
            Self::Rerun => "rerun",
            Self::Cancel => "cancel",
        };
        let (scheduler, group) = (&task.scheduler, &task.group);
        ScopeExpression::Any(vec![
            ScopeExpression::scope(format!("queue:{verb}-task:{scheduler}/{group}/{}", task.task_id)),
            ScopeExpression::scope(format!("queue:{verb}-task-in-project:{}", task.project)),
            ScopeExpression::All(vec![
                ScopeExpression::scope(format!("queue:{verb}-task")),
                ScopeExpression::scope(format!("assume:scheduler-id:{scheduler}/{group}")),
            ]),
        ])
    }

    fn apply(self, task: &mut TaskRecord, now: UnixMillis) -> Result<Transition, RunError> {
        match self {
            Self::Rerun => task.rerun(now),
            Self::Cancel => task.cancel(now),
        }
    }
}

async fn apply_operation(app: &QueueState, input: CallInput, operation: TaskOperation) -> ReplyResult {
    let (name, caller) = (input.task_id(), input.caller);
    let change = move |tx: &mut Tx<'_>| -> Result<TaskRecord, StoreError> {
        let mut row = tx.require_task(&name)?;
        caller.require(&operation.required_scopes(&row.task))?;
        match operation.apply(&mut row.task, tx.now) {
            Ok(Transition::Unchanged) => Ok(row.task),
            Ok(Transition::Changed) => tx.save(row),
            Err(error) => Err(QueueError::from_run_error(error, &name).into()),
        }
    };
    let task = app.store.execute(change).await?;
    Ok(CallReply::ok(response_json::status_reply(&task)))
}

async fn claim_work(app: &QueueState, input: CallInput) -> ReplyResult {
    let ClaimWork { worker_group, worker_id, tasks } = input.fields()?;
    let (queue, worker) = (input.task_queue(), WorkerIdentity { group: worker_group.0, id: worker_id.0 });
    input.caller.require(&ScopeExpression::All(vec![
        ScopeExpression::scope(format!("queue:claim-work:{queue}")),
        ScopeExpression::scope(format!("queue:worker-id:{}/{}", worker.group, worker.id)),
    ]))?;
    let limit = tasks.map_or(1, |tasks| usize::from(tasks.0));
    let claims = wait_for_work(app, queue, worker, limit).await?.map(UndeliveredClaims::deliver).unwrap_or_default();
    let now = app.now();
    let claims: Vec<_> = claims.into_iter().map(|claim| response_json::claim_reply(&app.keyring, claim, now)).collect();
    Ok(CallReply::ok(format!(r#"{{"tasks":[{}]}}"#, claims.join(","))))
}

async fn wait_for_work(
    app: &QueueState,
    queue: String,
    worker: WorkerIdentity,
    limit: usize,
) -> Result<Option<UndeliveredClaims>, QueueError> {
    // Above the limit, the call returns after a short wait.
    let permit = app.long_poll_permits.try_acquire().ok();
    let mut answer = app.store.wait_for_work(queue, worker, limit).await?;
    let wait = if permit.is_some() { app.long_poll } else { QUEUE_OVERLOADED_POLL_WAIT };
    let received = tokio::select! {
        received = timeout(wait, &mut answer) => received.ok(),
        () = app.stop_requested() => None,
    };
    match received {
        Some(Ok(found)) => found.map(Some),
        Some(Err(_)) => Ok(None),
        None => {
            // A claim that was delivered at this moment is returned, not lost.
            answer.close();
            answer.try_recv().ok().transpose()
        }
    }
}

async fn claim_task(app: &QueueState, input: CallInput) -> ReplyResult {
    let ClaimTask { worker_group, worker_id } = input.fields()?;
    let worker = WorkerIdentity { group: worker_group.0, id: worker_id.0 };
    let (name, run, caller) = (input.task_id(), input.route.run(), input.caller);
    let claim = app
        .store
        .execute(move |tx| {
            let row = tx.require_task(&name)?;
            caller.require(&claim_task_scopes(&row.task.queue, &worker))?;
            tx.claim(row, run, &worker)?
                .map_err(|error| QueueError::from_run_error(error, &format!("{name}/{run}")).into())
        })
        .await?;
    Ok(CallReply::ok(response_json::claim_reply(&app.keyring, claim, app.now())))
}

fn claim_task_scopes(queue: &str, worker: &WorkerIdentity) -> ScopeExpression {
    let worker = format!("{}/{}", worker.group, worker.id);
    ScopeExpression::Any(vec![
        ScopeExpression::All(vec![
            ScopeExpression::scope(format!("queue:claim-task:{queue}")),
            ScopeExpression::scope(format!("queue:worker-id:{worker}")),
        ]),
        ScopeExpression::All(vec![
            ScopeExpression::scope("queue:claim-task"),
            ScopeExpression::scope(format!("assume:worker-type:{queue}")),
            ScopeExpression::scope(format!("assume:worker-id:{worker}")),
        ]),
    ])
}

async fn reclaim_task(app: &QueueState, input: CallInput) -> ReplyResult {
    let (name, run, caller) = (input.task_id(), input.route.run(), input.caller);
    let claim = app
        .store
        .execute(move |tx| {
            let run_error = |error| QueueError::from_run_error(error, &format!("{name}/{run}"));
            let mut row = tx.require_task(&name)?;
            row.task.run(run).map_err(run_error)?;
            caller.require_scope(format!("queue:reclaim-task:{name}/{run}"))?;
            row.task.reclaim(run, tx.now, tx.config.claim_timeout).map_err(run_error)?;
            tx.reclaim(row, run)
        })
        .await?;
    Ok(CallReply::ok(response_json::claim_reply(&app.keyring, claim, app.now())))
}

async fn report(app: &QueueState, input: CallInput, ending: ResolvedReason) -> ReplyResult {
    let exception = input.route.method == ApiMethod::ReportException;
    let (name, run, caller) = (input.task_id(), input.route.run(), input.caller);
    let change = move |tx: &mut Tx<'_>| -> Result<TaskRecord, StoreError> {
        let run_error = |error| QueueError::from_run_error(error, &format!("{name}/{run}"));
        let mut row = tx.require_task(&name)?;
        row.task.run(run).map_err(run_error)?;
        caller.require_scope(format!("queue:resolve-task:{name}/{run}"))?;
        let transition = if exception {
            row.task.report_exception(run, ending, tx.now)
        } else {
            row.task.report(run, ending, tx.now)
        };
        match transition.map_err(run_error)? {
            Transition::Unchanged => Ok(row.task),
            Transition::Changed => tx.save(row),
        }
    };
    let task = app.store.execute(change).await?;
    Ok(CallReply::ok(response_json::status_reply(&task)))
}

async fn pending_tasks(app: &QueueState, input: CallInput) -> ReplyResult {
    let queue = input.task_queue();
    input.caller.require_scope(format!("queue:pending-count:{queue}"))?;
    let name = queue.clone();
    let count = app.store.execute(move |tx| Ok(tx.count_pending(&name))).await?;
    let (provisioner, worker_type) = task_definition::split_task_queue(&queue);
    Ok(CallReply::ok(
        json!({
            "provisionerId": provisioner, "workerType": worker_type, "taskQueueId": queue, "pendingTasks": count,
        })
        .to_string(),
    ))
}

async fn list_pending(app: &QueueState, input: CallInput) -> ReplyResult {
    let (queue, limit) = (input.task_queue(), input.page_size()?);
    let offset = input.page_start().and_then(|start| start.parse().ok()).unwrap_or(0);
    input.caller.require_scope(format!("queue:pending-list:{queue}"))?;
    let page = app.store.execute(move |tx| tx.list_pending(&queue, offset, limit)).await?;
    Ok(CallReply::ok(response_json::listing(&page, response_json::pending_entry)))
}

async fn list_claimed(app: &QueueState, input: CallInput) -> ReplyResult {
    let (queue, limit) = (input.task_queue(), input.page_size()?);
    let after = input.page_start().and_then(|start| start.parse().ok()).unwrap_or(0);
    input.caller.require_scope(format!("queue:claimed-list:{queue}"))?;
    let page = app.store.execute(move |tx| tx.list_claimed(&queue, after, limit)).await?;
    Ok(CallReply::ok(response_json::listing(&page, response_json::claimed_entry)))
}

async fn list_all(app: &QueueState, input: CallInput) -> ReplyResult {
    let limit = input.page_size()?;
    input.caller.require_scope("queue:journeyman-list-tasks".to_owned())?;
    let before = input.page_start().and_then(|start| start.parse().ok()).unwrap_or(i64::MAX);
    let page = app.store.execute(move |tx| tx.list_all(before, limit)).await?;
    Ok(CallReply::ok(response_json::listing(&page, response_json::task_entry)))
}
