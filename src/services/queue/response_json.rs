//! The JSON of responses: task status, claims and listings.

use serde::Serialize;
use serde_json::{Value, json};

use super::auth::Keyring;
use super::clock::UnixMillis;
use super::store::tx::{ClaimedRun, ListPage, ListedTask, TaskRow};
use super::task_definition::split_task_queue;
use super::task_state::{RunRecord, TaskRecord, WorkerIdentity};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StatusJson<'a> {
    #[serde(flatten)]
    task: &'a TaskRecord,
    provisioner_id: &'a str,
    worker_type: &'a str,
    state: Value,
    runs: Vec<RunJson<'a>>,
}

#[derive(Debug, Serialize)]
struct RunJson<'a> {
    #[serde(rename = "runId")]
    run_id: usize,
    #[serde(flatten)]
    record: &'a RunRecord,
}

pub(crate) fn status(task: &TaskRecord) -> StatusJson<'_> {
    let (provisioner_id, worker_type) = split_task_queue(&task.queue);
    let runs = task.runs.iter().enumerate().map(|(run_id, record)| RunJson { run_id, record }).collect();
    let state = task.runs.last().map_or_else(|| json!("unscheduled"), |run| json!(run.state));
    StatusJson { task, provisioner_id, worker_type, state, runs }
}

pub(crate) fn to_json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

pub(crate) fn status_reply(task: &TaskRecord) -> String {
    format!(r#"{{"status":{}}}"#, to_json(&status(task)))
}

/// The response to a claim, or to a reclaim, which has no definition.
pub(crate) fn claim_reply(keyring: &Keyring, claim: ClaimedRun, now: UnixMillis) -> String {
    let ClaimedRun { task, run, taken_until, definition, scopes } = claim;
    let id = &task.task_id;
    let worker = task.runs.get(run as usize).and_then(|record| record.worker.as_ref());
    let (group, worker_id) = worker.map_or(("", ""), |worker| (&worker.group, &worker.id));
    let mut all_scopes = vec![
        format!("queue:reclaim-task:{id}/{run}"),
        format!("queue:resolve-task:{id}/{run}"),
        format!("queue:create-artifact:{id}/{run}"),
    ];
    all_scopes.extend(scopes);
    let client = format!("task-client/{id}/{run}/on/{group}/{worker_id}/until/{}", taken_until.0);
    let credentials = keyring.issue(client, all_scopes, now, taken_until);
    // The definition is inserted as the text it was stored as.
    let definition = definition.map_or_else(String::new, |definition| format!(r#""task":{definition},"#));
    format!(
        r#"{{"status":{},"runId":{run},"workerGroup":"{group}","workerId":"{worker_id}","takenUntil":"{}",{definition}"credentials":{}}}"#,
        to_json(&status(&task)),
        taken_until.iso(),
        to_json(&credentials)
    )
}

/// `fields` are further properties, each with a comma behind it.
pub(crate) fn listing<T>(fields: &str, key: &str, page: &ListPage<T>, entry: impl Fn(&T) -> String) -> String {
    let entries: Vec<_> = page.items.iter().map(entry).collect();
    let next = page.next.map_or_else(String::new, |next| format!(r#","continuationToken":"{next}""#));
    format!(r#"{{{fields}"{key}":[{}]{next}}}"#, entries.join(","))
}

/// One entry of a list of pending or claimed runs.
pub(crate) fn run_entry(listed: &ListedTask) -> String {
    let ListedTask { task, definition } = listed;
    let Some((run, record)) = task.last_run() else { return "null".to_owned() };
    let fields = match &record.worker {
        None => format!(r#""inserted":"{}""#, record.scheduled.iso()),
        Some(WorkerIdentity { group, id }) => {
            let claimed = record.started.unwrap_or_default().iso();
            format!(r#""workerGroup":"{group}","workerId":"{id}","claimed":"{claimed}""#)
        }
    };
    format!(r#"{{"taskId":"{}","runId":{run},{fields},"task":{definition}}}"#, task.task_id)
}

pub(crate) fn task_entry(listed: &ListedTask) -> String {
    format!(r#"{{"status":{},"task":{}}}"#, to_json(&status(&listed.task)), listed.definition)
}

pub(crate) fn short_entry(row: &TaskRow) -> String {
    let TaskRecord { name, created, .. } = &row.task;
    json!({"status": status(&row.task), "name": name, "created": created}).to_string()
}
