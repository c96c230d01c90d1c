//! The task, claim and worker calls of the API: each validates its body, runs a job in the store and builds the
//! response.

use std::sync::Arc;

use axum::http::StatusCode;
use serde_json::{Map, Value, json};
use tokio::time::timeout;

use super::QueueState;
use super::artifact_calls;
use super::auth::Caller;
use super::body_schema::{self, Field, FieldType, optional, required};
use super::clock::UnixMillis;
use super::queue_error::{QueueError, QueueErrorCode};
use super::request_body::RequestBody;
use super::response_json;
use super::route::{ApiMethod, Route, query_param};
use super::scopes::{Era, ScopeExpression};
use super::store::tx::{ListPage, Tx};
use super::store::{StoreError, UndeliveredClaims};
use super::task_definition;
use super::task_state::{ClaimMethod, ResolvedReason, RunError, TaskRecord, Transition, WorkerIdentity};
use crate::limits::{QUEUE_OVERLOADED_POLL_WAIT, QUEUE_PAGE_MAX, QUEUE_RUNS_MAX};

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

const WORKER_FIELDS: [Field; 2] =
    [required("workerGroup", FieldType::Name(38)), required("workerId", FieldType::Name(38))];
const CLAIM_WORK_FIELDS: &[Field] = &[WORKER_FIELDS[0], WORKER_FIELDS[1], optional("tasks", FieldType::Integer(1, 32))];
const EXCEPTION_FIELDS: &[Field] = &[required(
    "reason",
    FieldType::OneOf(&[
        "worker-shutdown",
        "malformed-payload",
        "resource-unavailable",
        "internal-error",
        "superseded",
        "intermittent-task",
    ]),
)];
impl CallInput {
    fn body_object(&self) -> Map<String, Value> {
        match response_json::parse_body(&self.body) {
            Value::Object(fields) => fields,
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => Map::new(),
        }
    }

    pub(crate) fn validated_body(
        &self,
        app: &QueueState,
        schema: &str,
        fields: &[Field],
        era: Era,
    ) -> Result<Map<String, Value>, QueueError> {
        let body = self.body_object();
        let found = body_schema::schema_errors(&body, fields, era);
        if found.is_empty() {
            return Ok(body);
        }
        let message = body_schema::error_text(&app.root_url, schema, &found);
        Err(QueueError::new(QueueErrorCode::InputValidationError, message))
    }

    fn task_id(&self) -> String {
        self.route.param("taskId").to_owned()
    }

    fn task_queue(&self) -> String {
        match self.route.param("taskQueueId") {
            "" => format!("{}/{}", self.route.param("provisionerId"), self.route.param("workerType")),
            queue => queue.to_owned(),
        }
    }

    pub(crate) fn page_size(&self) -> Result<usize, QueueError> {
        let Some(text) = query_param(&self.query, "limit") else { return Ok(QUEUE_PAGE_MAX) };
        let limit: usize = text.parse().map_err(|_| {
            QueueError::new(
                QueueErrorCode::InvalidRequestArguments,
                format!("Query-string parameter: limit=\"{text}\" is not valid, error: must be a number"),
            )
        })?;
        Ok(limit.clamp(1, QUEUE_PAGE_MAX))
    }

    pub(crate) fn page_start(&self) -> Option<String> {
        query_param(&self.query, "continuationToken")
    }
}

fn text_field(body: &Map<String, Value>, name: &str) -> String {
    body.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn worker_of(body: &Map<String, Value>) -> WorkerIdentity {
    WorkerIdentity { group: text_field(body, "workerGroup"), id: text_field(body, "workerId") }
}

pub(crate) async fn handle(app: &QueueState, input: CallInput) -> ReplyResult {
    match input.route.method {
        ApiMethod::Ping => Ok(CallReply::ok(json!({"alive": true, "uptime": app.uptime().as_secs_f64()}).to_string())),
        ApiMethod::CreateTask => create_task(app, input).await,
        ApiMethod::Task => task(app, input).await,
        ApiMethod::Status => status(app, input).await,
        ApiMethod::ScheduleTask => apply_operation(app, input, TaskOperation::Schedule).await,
        ApiMethod::RerunTask => apply_operation(app, input, TaskOperation::Rerun).await,
        ApiMethod::CancelTask => apply_operation(app, input, TaskOperation::Cancel).await,
        ApiMethod::PollTaskUrls => super::azure_storage::poll_task_urls(app, input).await,
        ApiMethod::ClaimWork => claim_work(app, input).await,
        ApiMethod::ClaimTask => claim_task(app, input).await,
        ApiMethod::ReclaimTask => reclaim_task(app, input).await,
        ApiMethod::ReportCompleted => {
            // Very old workers report a failure this way.
            let failed = input.body_object().get("success") == Some(&Value::Bool(false));
            report(app, input, if failed { ResolvedReason::Failed } else { ResolvedReason::Completed }).await
        }
        ApiMethod::ReportFailed => report(app, input, ResolvedReason::Failed).await,
        ApiMethod::ReportException => {
            let body = input.validated_body(app, "task-exception-request", EXCEPTION_FIELDS, Era::Modern)?;
            let reason = ResolvedReason::parse_reported(&text_field(&body, "reason"));
            report(app, input, reason.unwrap_or(ResolvedReason::InternalError)).await
        }
        ApiMethod::PendingTasks => pending_tasks(app, input).await,
        ApiMethod::ListPendingTasks => list_pending(app, input).await,
        ApiMethod::ListClaimedTasks => list_claimed(app, input).await,
        ApiMethod::JourneymanListTasks => list_all(app, input).await,
        ApiMethod::CreateArtifact => artifact_calls::create(app, input).await,
        ApiMethod::GetArtifact | ApiMethod::GetLatestArtifact => artifact_calls::get(app, input).await,
        ApiMethod::ListArtifacts | ApiMethod::ListLatestArtifacts => artifact_calls::list(app, input).await,
    }
}

async fn create_task(app: &QueueState, input: CallInput) -> ReplyResult {
    let draft = task_definition::parse_create_task(&input.task_id(), &input.body, &app.root_url)?;
    input.caller.require(&draft.required_scopes(), Era::Modern)?;
    let echoed = |mut error: QueueError| {
        error.payload = Some(draft.echo());
        error
    };
    let made = draft.complete(app.now()).map_err(echoed)?;
    let task = app.store.execute(move |tx| tx.create_task(made)).await.map_err(echoed)?;
    Ok(CallReply::ok(response_json::status_reply(&task)))
}

fn task_not_found(task: &str, question: &str) -> QueueError {
    QueueError::not_found(format!("`{task}` does not correspond to a task that exists.\n{question}"))
}

const SUBMITTED: &str = "Are you sure this task has already been submitted?";
const BEFORE: &str = "Are you sure this task has been submitted before?";

async fn task(app: &QueueState, input: CallInput) -> ReplyResult {
    let task = input.task_id();
    input.caller.require_scope(format!("queue:get-task:{task}"))?;
    let found = app
        .store
        .execute(move |tx| match tx.find_task(&task)? {
            Some(row) => tx.definition(row.id),
            None => Err(task_not_found(&task, SUBMITTED).into()),
        })
        .await?;
    Ok(CallReply::ok(found))
}

async fn status(app: &QueueState, input: CallInput) -> ReplyResult {
    let task = input.task_id();
    input.caller.require_scope(format!("queue:status:{task}"))?;
    let found = app
        .store
        .execute(move |tx| {
            let row = tx.find_task(&task)?;
            row.map(|row| row.task).ok_or_else(|| task_not_found(&task, SUBMITTED).into())
        })
        .await?;
    Ok(CallReply::ok(response_json::status_reply(&found)))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TaskOperation {
    Schedule,
    Rerun,
    Cancel,
}

impl TaskOperation {
    const fn verb(self) -> &'static str {
        match self {
            Self::Schedule => "schedule",
            Self::Rerun => "rerun",
            Self::Cancel => "cancel",
        }
    }

    fn required_scopes(self, task: &TaskRecord) -> ScopeExpression {
        let (verb, scheduler, group) = (self.verb(), &task.scheduler, &task.group);
        ScopeExpression::Any(vec![
            ScopeExpression::scope(format!("queue:{verb}-task:{scheduler}/{group}/{}", task.task_id)),
            ScopeExpression::scope(format!("queue:{verb}-task-in-project:{}", task.project)),
            ScopeExpression::All(vec![
                ScopeExpression::scope(format!("queue:{verb}-task")),
                ScopeExpression::scope(format!("assume:scheduler-id:{scheduler}/{group}")),
            ]),
        ])
    }

    fn not_found_error(self, name: &str) -> QueueError {
        match self {
            Self::Schedule => QueueError::not_found(format!("taskId `{name}` not found. Are you sure it exists?")),
            Self::Rerun => task_not_found(name, BEFORE),
            Self::Cancel => QueueError::task_not_found(name),
        }
    }

    fn apply(self, task: &mut TaskRecord, now: UnixMillis) -> Result<Transition, RunError> {
        match self {
            Self::Schedule if task.deadline < now => Err(RunError::PastDeadline),
            Self::Schedule => Ok(task.schedule(now)),
            Self::Rerun => task.rerun(now),
            Self::Cancel => task.cancel(now),
        }
    }

    fn deadline_error(self, task: &TaskRecord) -> QueueError {
        let done = match self {
            Self::Schedule => "scheduled past its deadline at",
            Self::Rerun => "rescheduled past its deadline of",
            Self::Cancel => "canceled past its deadline of",
        };
        QueueError::conflict(format!("Task `{}` can't be {done} {}.", task.task_id, task.deadline.iso()))
    }
}

async fn apply_operation(app: &QueueState, input: CallInput, how: TaskOperation) -> ReplyResult {
    let (name, caller) = (input.task_id(), input.caller);
    let change = move |tx: &mut Tx<'_>| -> Result<TaskRecord, StoreError> {
        let mut row = tx.find_task(&name)?.ok_or_else(|| how.not_found_error(&name))?;
        caller.require(&how.required_scopes(&row.task), Era::Modern)?;
        match how.apply(&mut row.task, tx.now) {
            Ok(Transition::Unchanged) => Ok(row.task),
            Ok(Transition::Changed) => tx.save(row),
            Err(RunError::TooManyRuns) => {
                let message = format!("Maximum number of runs reached ({QUEUE_RUNS_MAX}).");
                Err(QueueError::conflict(message).into())
            }
            Err(
                RunError::NoSuchRun
                | RunError::AlreadyClaimed
                | RunError::PastDeadline
                | RunError::NotRunning
                | RunError::ResolvedOtherwise,
            ) => Err(how.deadline_error(&row.task).into()),
        }
    };
    let task = app.store.execute(change).await?;
    Ok(CallReply::ok(response_json::status_reply(&task)))
}

async fn claim_work(app: &QueueState, input: CallInput) -> ReplyResult {
    let body = input.validated_body(app, "claim-work-request", CLAIM_WORK_FIELDS, Era::Modern)?;
    let (queue, worker) = (input.task_queue(), worker_of(&body));
    input.caller.require(
        &ScopeExpression::All(vec![
            ScopeExpression::scope(format!("queue:claim-work:{queue}")),
            ScopeExpression::scope(format!("queue:worker-id:{}/{}", worker.group, worker.id)),
        ]),
        Era::Modern,
    )?;
    let tasks = body.get("tasks").and_then(body_schema::as_integer).unwrap_or(1);
    let limit = usize::try_from(tasks).unwrap_or(1);
    let claimed = match wait_for_work(app, queue, worker, limit).await? {
        Some(claims) => claims.deliver(),
        None => Vec::new(),
    };
    let now = app.now();
    let shown: Vec<_> =
        claimed.into_iter().map(|claimed| response_json::claim_reply(&app.keyring, claimed, now)).collect();
    Ok(CallReply::ok(format!(r#"{{"tasks":[{}]}}"#, shown.join(","))))
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
    let body = input.validated_body(app, "task-claim-request", &WORKER_FIELDS, Era::Legacy)?;
    let (name, run, worker) = (input.task_id(), input.route.run(), worker_of(&body));
    let caller = input.caller;
    let claimed = app
        .store
        .execute(move |tx| {
            let row = tx.require_task(&name)?;
            caller.require(&claim_task_scopes(&row.task.queue, &worker), Era::Legacy)?;
            let deadline = row.task.deadline;
            if deadline <= tx.now {
                return Err(QueueError::conflict(format!(
                    "Task `{name}` Can't be claimed past its deadline of {}.",
                    deadline.iso()
                ))
                .into());
            }
            tx.claim(row, run, &worker)?.map_err(|error| QueueError::from_run_error(error, &name, run).into())
        })
        .await?;
    Ok(CallReply::ok(response_json::claim_reply(&app.keyring, claimed, app.now())))
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

struct ReclaimedRun {
    task: TaskRecord,
    taken_until: UnixMillis,
    scopes: Vec<String>,
}

async fn reclaim_task(app: &QueueState, input: CallInput) -> ReplyResult {
    let (name, run, caller) = (input.task_id(), input.route.run(), input.caller);
    let ReclaimedRun { task, taken_until, scopes } = app
        .store
        .execute(move |tx| {
            let mut row = tx.require_task(&name)?;
            row.task.run(run).map_err(|error| QueueError::from_run_error(error, &name, run))?;
            caller.require_scope(format!("queue:reclaim-task:{name}/{run}"))?;
            let length = tx.config.claim_timeout;
            let taken_until = row.task.reclaim(run, tx.now, length).map_err(|error| match error {
                RunError::PastDeadline => QueueError::conflict(format!(
                    "Task `{name}` can't be reclaimed past its deadline of {}.",
                    row.task.deadline.iso()
                )),
                RunError::NoSuchRun
                | RunError::AlreadyClaimed
                | RunError::NotRunning
                | RunError::ResolvedOtherwise
                | RunError::TooManyRuns => QueueError::from_run_error(error, &name, run),
            })?;
            let scopes = tx.scopes(row.id)?;
            let task = tx.save(row)?;
            Ok(ReclaimedRun { task, taken_until, scopes })
        })
        .await?;
    Ok(CallReply::ok(response_json::reclaim_reply(&app.keyring, &task, run, scopes, taken_until, app.now())))
}

async fn report(app: &QueueState, input: CallInput, ending: ResolvedReason) -> ReplyResult {
    let exception = input.route.method == ApiMethod::ReportException;
    let (name, run, caller) = (input.task_id(), input.route.run(), input.caller);
    let root = app.root_url.clone();
    let change = move |tx: &mut Tx<'_>| -> Result<TaskRecord, StoreError> {
        let mut row = tx.find_task(&name)?.ok_or_else(|| {
            let question = if exception { "exists" } else { "was created" };
            QueueError::not_found(format!("Task `{name}` not found. Are you sure it {question}?"))
        })?;
        let record = row.task.run(run).map_err(|error| QueueError::from_run_error(error, &name, run))?;
        // `superseded` exists only for claims made by `claimTask`.
        if ending == ResolvedReason::Superseded && record.via != Some(ClaimMethod::ClaimTask) {
            let wrong = ["data/reason must be equal to one of the allowed values".to_owned()];
            let message = body_schema::error_text(&root, "task-exception-request", &wrong);
            return Err(QueueError::new(QueueErrorCode::InputValidationError, message).into());
        }
        caller.require_scope(format!("queue:resolve-task:{name}/{run}"))?;
        let transition = if exception {
            row.task.report_exception(run, ending, tx.now)
        } else {
            row.task.report(run, ending, tx.now)
        };
        match transition {
            Ok(Transition::Unchanged) => Ok(row.task),
            Ok(Transition::Changed) => tx.save(row),
            Err(RunError::ResolvedOtherwise) => {
                let end = ending.as_str();
                Err(QueueError::conflict(format!("Run {run} of task `{name}` is not running or {end}.")).into())
            }
            Err(error) => Err(QueueError::from_run_error(error, &name, run).into()),
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

fn page_offset(input: &CallInput) -> usize {
    input.page_start().and_then(|start| start.parse().ok()).unwrap_or(0)
}

async fn list_pending(app: &QueueState, input: CallInput) -> ReplyResult {
    let (queue, limit, after) = (input.task_queue(), input.page_size()?, page_offset(&input));
    input.caller.require_scope(format!("queue:pending-list:{queue}"))?;
    let page: ListPage<_> = app.store.execute(move |tx| tx.list_pending(&queue, after, limit)).await?;
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
