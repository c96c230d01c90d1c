//! The task and claim calls of the API: each parses its body, runs a job in the store and builds the response.

use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::json;
use tokio::time::timeout;

use super::call::{App, Call, QueueState, ReplyResult};
use super::clock::UnixMillis;
use super::field_types::{Identifier, Integer, SlugId, invalid_argument};
use super::queue_error::{QueueError, QueueErrorCode, json_response};
use super::store::tx::{ClaimedRun, ListPage, QueueSummary, TaskFilter, TaskRow, Tx};
use super::store::{self, StoreError};
use super::task_state::{ResolvedReason, RunError, TaskRecord, WorkerIdentity};
use super::{response_json, task_definition};
use journeyman_domain::limits::QUEUE_OVERLOADED_POLL_WAIT;
use journeyman_worker::task::formats::TASK_STATES;

/// The body of `claimWork`, and of `claimTask`, which ignores `tasks`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ClaimRequest {
    worker_group: Identifier,
    worker_id: Identifier,
    tasks: Option<Integer<1, 32>>,
}

impl ClaimRequest {
    fn worker(self) -> WorkerIdentity {
        WorkerIdentity { group: self.worker_group.0, id: self.worker_id.0 }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct TaskIds {
    #[serde(default)]
    task_ids: Vec<SlugId>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReportException {
    reason: ResolvedReason,
}

pub(crate) fn ok(body: String) -> ReplyResult {
    Ok(json_response(StatusCode::OK, body))
}

pub(crate) async fn ping(_: App, _: Call) -> ReplyResult {
    ok(json!({"alive": true}).to_string())
}

/// Answers after it has asked the store.
pub(crate) async fn heartbeat(app: App, _: Call) -> ReplyResult {
    app.store.execute(|_| Ok(())).await?;
    ok("{}".to_owned())
}

pub(crate) async fn version(_: App, _: Call) -> ReplyResult {
    ok(json!({"version": env!("CARGO_PKG_VERSION"), "source": "", "commit": "", "build": ""}).to_string())
}

pub(crate) async fn create_task(app: App, call: Call) -> ReplyResult {
    let new_task = task_definition::parse_create_task(&call.task_id(), &call.body)?;
    new_task.authorize(&call.caller)?;
    new_task.check(app.now())?;
    let task = app.store.execute(move |tx| tx.create_task(new_task)).await?;
    ok(response_json::status_reply(&task))
}

pub(crate) async fn task(app: App, call: Call) -> ReplyResult {
    let task = call.task_id();
    call.caller.require_scope(format!("queue:get-task:{task}"))?;
    let definition = app.store.execute(move |tx| {
        let row = tx.require_task(&task)?;
        tx.definition(row.id)
    });
    ok(definition.await?)
}

pub(crate) async fn status(app: App, call: Call) -> ReplyResult {
    let task = call.task_id();
    call.caller.require_scope(format!("queue:status:{task}"))?;
    let row = app.store.execute(move |tx| tx.require_task(&task)).await?;
    ok(response_json::status_reply(&row.task))
}

/// The definitions or the statuses of the named tasks that exist.
pub(crate) async fn tasks(app: App, call: Call, scope: &str, key: &'static str) -> ReplyResult {
    let (ids, page): (TaskIds, _) = (call.fields()?, call.page()?);
    let ids: Vec<_> = ids.task_ids.into_iter().map(|id| id.0).collect();
    call.caller.require_all(ids.iter().map(|id| format!("queue:{scope}:{id}")))?;
    let page = app.read(move |tx| tx.named_tasks(&ids, page)).await?;
    ok(response_json::listing("", key, &page, |listed| {
        let id = &listed.task.task_id;
        if key == "tasks" {
            return format!(r#"{{"taskId":"{id}","task":{}}}"#, listed.definition);
        }
        format!(r#"{{"taskId":"{id}","status":{}}}"#, response_json::to_json(&response_json::status(&listed.task)))
    }))
}

/// Changes a task by `rerunTask` or `cancelTask`.
pub(crate) async fn change_task(
    app: App,
    call: Call,
    verb: &'static str,
    change: fn(&mut TaskRecord, UnixMillis) -> Result<(), RunError>,
) -> ReplyResult {
    let (name, caller) = (call.task_id(), call.caller);
    let task = app.store.execute(move |tx| {
        let mut row = tx.require_task(&name)?;
        let TaskRecord { scheduler, group, project, .. } = &row.task;
        caller.require_any(&[
            format!("queue:{verb}-task:{scheduler}/{group}/{name}"),
            format!("queue:{verb}-task-in-project:{project}"),
        ])?;
        change(&mut row.task, tx.now)?;
        tx.save(row)
    });
    ok(response_json::status_reply(&task.await?))
}

pub(crate) async fn claim_work(app: App, call: Call) -> ReplyResult {
    let request: ClaimRequest = call.fields()?;
    let limit = request.tasks.as_ref().map_or(1, |tasks| tasks.0);
    let (queue, worker) = (call.task_queue(), request.worker());
    call.caller.require_claim_scopes("claim-work", &queue, &worker)?;
    let claims = wait_for_work(&app, queue, worker, limit).await?;
    let now = app.now();
    let claims: Vec<_> = claims.into_iter().map(|claim| response_json::claim_reply(&app.keyring, claim, now)).collect();
    ok(format!(r#"{{"tasks":[{}]}}"#, claims.join(",")))
}

async fn wait_for_work(
    app: &QueueState,
    queue: String,
    worker: WorkerIdentity,
    limit: u8,
) -> Result<Vec<ClaimedRun>, QueueError> {
    // Above the limit, the call returns after a short wait.
    let permit = app.long_poll_permits.try_acquire().ok();
    let cancel = app.stop.child_token();
    let mut answer = store::wait_for_work(&app.store, queue, worker, limit, cancel.clone()).await?;
    let wait = if permit.is_some() { app.config.long_poll } else { QUEUE_OVERLOADED_POLL_WAIT };
    if let Ok(Some(found)) = timeout(wait, cancel.run_until_cancelled(&mut answer)).await {
        return match found {
            Ok(claims) => Ok(claims),
            // The store lets go of calls that came just before the stop.
            Err(_) if cancel.is_cancelled() => Ok(Vec::new()),
            Err(_) => Err(QueueError::internal(&uuid::Uuid::new_v4())),
        };
    }
    // Claims of the batch in flight are returned, not lost.
    cancel.cancel();
    store::tick(&app.store).await;
    Ok(answer.try_recv().unwrap_or_default())
}

pub(crate) async fn claim_task(app: App, call: Call) -> ReplyResult {
    let worker = call.fields::<ClaimRequest>()?.worker();
    let (name, run, caller) = (call.task_id(), call.run(), call.caller);
    let claim = app.store.execute(move |tx| {
        let row = tx.require_task(&name)?;
        caller.require_claim_scopes("claim-task", &row.task.queue, &worker)?;
        tx.claim(row, run, &worker)
    });
    ok(response_json::claim_reply(&app.keyring, claim.await?, app.now()))
}

/// Changes a task by a call that names a run and needs `queue:SCOPE:TASK/RUN`.
async fn change_run<T: Send + 'static>(
    app: &QueueState,
    call: Call,
    scope: &'static str,
    change: impl FnOnce(&mut Tx<'_>, TaskRow, u32) -> Result<T, StoreError> + Send + 'static,
) -> Result<T, QueueError> {
    let (name, run, caller) = (call.task_id(), call.run(), call.caller);
    app.store
        .execute(move |tx| {
            let row = tx.require_task(&name)?;
            row.task.run(run)?;
            caller.require_scope(format!("queue:{scope}:{name}/{run}"))?;
            change(tx, row, run)
        })
        .await
}

pub(crate) async fn reclaim_task(app: App, call: Call) -> ReplyResult {
    let claim = change_run(&app, call, "reclaim-task", |tx, mut row, run| {
        row.task.reclaim(run, tx.now, tx.config.claim_timeout)?;
        tx.save_claim(row, run, None)
    })
    .await?;
    ok(response_json::claim_reply(&app.keyring, claim, app.now()))
}

pub(crate) async fn report_exception(app: App, call: Call) -> ReplyResult {
    let ReportException { reason } = call.fields()?;
    if !reason.is_reportable() {
        let message = "invalid request body: a worker cannot report this reason";
        return Err(QueueError::new(QueueErrorCode::InputValidationError, message));
    }
    report(app, call, reason).await
}

pub(crate) async fn report(app: App, call: Call, reason: ResolvedReason) -> ReplyResult {
    let task = change_run(&app, call, "resolve-task", move |tx, mut row, run| {
        row.task.report(run, reason, tx.now)?;
        tx.save(row)
    });
    ok(response_json::status_reply(&task.await?))
}

pub(crate) async fn pending_tasks(app: App, call: Call) -> ReplyResult {
    let queue = call.task_queue();
    call.caller.require_scope(format!("queue:pending-count:{queue}"))?;
    let name = queue.clone();
    let count = app.read(move |tx| tx.count_pending(&name)).await?;
    let (provisioner, worker_type) = task_definition::split_task_queue(&queue);
    let reply = json!({
        "provisionerId": provisioner, "workerType": worker_type, "taskQueueId": queue, "pendingTasks": count,
    });
    ok(reply.to_string())
}

pub(crate) async fn task_queue_counts(app: App, call: Call) -> ReplyResult {
    let queue = call.task_queue();
    let scopes = ["pending-count", "claimed-count"].map(|scope| format!("queue:{scope}:{queue}"));
    call.caller.require_all(scopes)?;
    let name = queue.clone();
    let counts = app.read(move |tx| Ok((tx.count_pending(&name)?, tx.count_claimed(&name)?)));
    let (pending, claimed) = counts.await?;
    let (provisioner, worker_type) = task_definition::split_task_queue(&queue);
    let reply = json!({
        "provisionerId": provisioner, "workerType": worker_type, "taskQueueId": queue,
        "pendingTasks": pending, "claimedTasks": claimed,
    });
    ok(reply.to_string())
}

/// Every task queue that a task names.
pub(crate) async fn list_task_queues(app: App, call: Call) -> ReplyResult {
    let page = call.page()?;
    call.caller.require_scope("queue:list-task-queues".to_owned())?;
    let page = app.read(move |tx| tx.list_task_queues(page)).await?;
    ok(response_json::listing("", "taskQueues", &page, |queue| {
        let entry = json!({
            "taskQueueId": queue.name, "stability": "stable", "description": "",
            "lastDateActive": queue.last_created, "expires": queue.expires,
        });
        entry.to_string()
    }))
}

/// An extension of this project: what each task queue holds, and its tasks of the last hour by minute.
pub(crate) async fn list_activity(app: App, call: Call) -> ReplyResult {
    let page = call.page()?;
    call.caller.require_scope("queue:journeyman-list-tasks".to_owned())?;
    let page = app.read(move |tx| {
        let queues = tx.list_task_queues(page)?;
        let held = |QueueSummary { name, .. }: QueueSummary| {
            let (pending, claimed) = (tx.count_pending(&name)?, tx.count_claimed(&name)?);
            let oldest = tx.oldest_pending(&name)?;
            Ok((name, pending, claimed, oldest))
        };
        let items = queues.items.into_iter().map(held).collect::<Result<Vec<_>, StoreError>>()?;
        Ok(ListPage { items, next: queues.next })
    });
    let (page, now) = (page.await?, app.now());
    let activity = app.activity.lock();
    ok(response_json::listing("", "taskQueues", &page, |(name, pending, claimed, oldest)| {
        let entry = json!({
            "taskQueueId": name, "pendingTasks": pending, "claimedTasks": claimed, "oldestPending": oldest,
            "minutes": activity.of(name, now),
        });
        entry.to_string()
    }))
}

/// The workers of the claims of a queue, and of its latest tasks.
pub(crate) async fn list_workers(app: App, call: Call) -> ReplyResult {
    let (queue, page) = (call.task_queue(), call.page()?);
    call.caller.require_scope(format!("queue:list-workers:{queue}"))?;
    let mut page = app.read(move |tx| tx.list_workers(&queue, page)).await?;
    if call.query("quarantined").as_deref() == Some("true") {
        // This queue has no quarantine.
        page.items.clear();
    }
    ok(response_json::listing("", "workers", &page, |seen| {
        let WorkerIdentity { group, id } = &seen.worker;
        let entry = json!({
            "workerGroup": group, "workerId": id, "firstClaim": seen.first_claim,
            "latestTask": {"taskId": seen.task, "runId": seen.run},
        });
        entry.to_string()
    }))
}

pub(crate) async fn list_pending(app: App, call: Call) -> ReplyResult {
    let (queue, page) = (call.task_queue(), call.page()?);
    call.caller.require_scope(format!("queue:pending-list:{queue}"))?;
    let page = app.read(move |tx| tx.list_pending(&queue, page)).await?;
    ok(response_json::listing("", "tasks", &page, response_json::run_entry))
}

pub(crate) async fn list_claimed(app: App, call: Call) -> ReplyResult {
    let (queue, page) = (call.task_queue(), call.page()?);
    call.caller.require_scope(format!("queue:claimed-list:{queue}"))?;
    let page = app.read(move |tx| tx.list_claimed(&queue, page)).await?;
    ok(response_json::listing("", "tasks", &page, response_json::run_entry))
}

/// An extension of this project: finds tasks by queue, state, part of the name and time of creation, newest first.
pub(crate) async fn find_tasks(app: App, call: Call) -> ReplyResult {
    let text = |name| call.query(name).unwrap_or_default();
    let since = match text("since").as_str() {
        "" => UnixMillis::default(),
        since => UnixMillis::parse(since).ok_or_else(|| invalid_argument(format!("since {since:?} is not a time")))?,
    };
    let state = text("state");
    if !state.is_empty() && !TASK_STATES.contains(&state.as_str()) {
        return Err(invalid_argument(format!("state {state:?} is none of {}", TASK_STATES.join(", "))));
    }
    let filter = TaskFilter { queue: text("queue"), state, name: text("name"), since };
    let page = call.page()?;
    call.caller.require_scope("queue:journeyman-list-tasks".to_owned())?;
    let page = app.read(move |tx| tx.find_tasks(&filter, page)).await?;
    ok(response_json::listing("", "tasks", &page, response_json::short_entry))
}

pub(crate) async fn list_task_group(app: App, call: Call) -> ReplyResult {
    let (group, page) = (call.param("taskGroupId").to_owned(), call.page()?);
    call.caller.require_scope(format!("queue:list-task-group:{group}"))?;
    let name = group.clone();
    let found = app.read(move |tx| {
        let last = tx.last_to_expire(&name)?;
        Ok((last, tx.list_group(&name, page)?))
    });
    let (last, page) = found.await?;
    let (scheduler, expires) = (last.scheduler, last.expires.iso());
    let fields = format!(r#""taskGroupId":"{group}","schedulerId":"{scheduler}","expires":"{expires}","#);
    ok(response_json::listing(&fields, "tasks", &page, response_json::task_entry))
}

/// Needs no `sealTaskGroup` before it: tasks may be added to any group.
pub(crate) async fn cancel_task_group(app: App, call: Call) -> ReplyResult {
    let (group, caller) = (call.param("taskGroupId").to_owned(), call.caller);
    let name = group.clone();
    let (size, canceled) = app
        .store
        .execute(move |tx| {
            tx.last_to_expire(&name)?;
            let mut canceled = Vec::new();
            for task in tx.ids_of_group(&name, true)? {
                // Read one by one, because a canceled task may schedule another one of the group.
                let mut row = tx.require_task(&task)?;
                let TaskRecord { scheduler, project, .. } = &row.task;
                caller.require_any(&[
                    format!("queue:cancel-task-group:{scheduler}/{name}"),
                    format!("queue:cancel-task-in-project:{project}"),
                ])?;
                if row.task.cancel(tx.now).is_ok() {
                    tx.save(row)?;
                    canceled.push(task);
                }
            }
            Ok((tx.ids_of_group(&name, false)?.len(), canceled))
        })
        .await?;
    let reply = json!({
        "taskGroupId": group, "taskGroupSize": size, "cancelledCount": canceled.len(), "taskIds": canceled,
    });
    ok(reply.to_string())
}
