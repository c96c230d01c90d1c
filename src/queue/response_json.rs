//! The JSON of responses: task status, claims and listings.

use serde::{Serialize, Serializer};
use serde_json::Value;

use super::auth::{Keyring, TemporaryCredentials};
use super::clock::UnixMillis;
use super::store::tx::{ClaimedRun, ListPage, ListedTask};
use super::task_definition::split_task_queue;
use super::task_state::{RunRecord, TaskRecord};

fn iso<S: Serializer>(at: &UnixMillis, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(&at.iso())
}

#[expect(clippy::ref_option, reason = "the signature that serde asks for")]
fn iso_option<S: Serializer>(at: &Option<UnixMillis>, out: S) -> Result<S::Ok, S::Error> {
    match at {
        Some(at) => out.serialize_str(&at.iso()),
        None => out.serialize_none(),
    }
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StatusJson<'a> {
    task_id: &'a str,
    provisioner_id: &'a str,
    worker_type: &'a str,
    task_queue_id: &'a str,
    scheduler_id: &'a str,
    project_id: &'a str,
    task_group_id: &'a str,
    priority: &'a str,
    #[serde(serialize_with = "iso")]
    deadline: UnixMillis,
    #[serde(serialize_with = "iso")]
    expires: UnixMillis,
    retries_left: u8,
    state: &'a str,
    runs: Vec<RunJson<'a>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct RunJson<'a> {
    run_id: usize,
    state: &'a str,
    reason_created: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason_resolved: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker_group: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "iso_option")]
    taken_until: Option<UnixMillis>,
    #[serde(serialize_with = "iso")]
    scheduled: UnixMillis,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "iso_option")]
    started: Option<UnixMillis>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "iso_option")]
    resolved: Option<UnixMillis>,
}

pub(crate) fn status(task: &TaskRecord) -> StatusJson<'_> {
    let (provisioner_id, worker_type) = split_task_queue(&task.queue);
    StatusJson {
        task_id: &task.task_id,
        provisioner_id,
        worker_type,
        task_queue_id: &task.queue,
        scheduler_id: &task.scheduler,
        project_id: &task.project,
        task_group_id: &task.group,
        priority: task.priority.as_str(),
        deadline: task.deadline,
        expires: task.expires,
        retries_left: task.retries_left,
        state: task.state_str(),
        runs: task.runs.iter().enumerate().map(|(at, record)| run(at, record)).collect(),
    }
}

fn run(run_id: usize, record: &RunRecord) -> RunJson<'_> {
    RunJson {
        run_id,
        state: record.state.as_str(),
        reason_created: record.origin.as_str(),
        reason_resolved: record.ending.map(super::task_state::ResolvedReason::as_str),
        worker_group: record.worker.as_ref().map(|worker| worker.group.as_str()),
        worker_id: record.worker.as_ref().map(|worker| worker.id.as_str()),
        taken_until: record.taken_until,
        scheduled: record.scheduled,
        started: record.started,
        resolved: record.resolved,
    }
}

pub(crate) fn to_json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

pub(crate) fn status_reply(task: &TaskRecord) -> String {
    format!(r#"{{"status":{}}}"#, to_json(&status(task)))
}

pub(crate) fn claim_credentials(
    keys: &Keyring,
    task: &TaskRecord,
    run: u32,
    scopes: Vec<String>,
    taken_until: UnixMillis,
    now: UnixMillis,
) -> TemporaryCredentials {
    let id = &task.task_id;
    let worker = task.runs.get(run as usize).and_then(|record| record.worker.as_ref());
    let (group, worker_id) = worker.map_or(("", ""), |worker| (worker.group.as_str(), worker.id.as_str()));
    let client = format!("task-client/{id}/{run}/on/{group}/{worker_id}/until/{}", taken_until.seconds_text());
    let mut all = vec![
        format!("queue:reclaim-task:{id}/{run}"),
        format!("queue:resolve-task:{id}/{run}"),
        format!("queue:create-artifact:{id}/{run}"),
    ];
    all.extend(scopes);
    keys.issue(client, all, now, taken_until)
}

/// Inserts the definition as the text it was stored as.
pub(crate) fn claim_reply(keys: &Keyring, claimed: ClaimedRun, now: UnixMillis) -> String {
    let ClaimedRun { task, run, taken_until, definition, scopes } = claimed;
    let credentials = claim_credentials(keys, &task, run, scopes, taken_until, now);
    format!(
        r#"{{{},"takenUntil":"{}","task":{definition},"credentials":{}}}"#,
        claim_prefix(&task, run),
        taken_until.iso_offset(),
        to_json(&credentials)
    )
}

pub(crate) fn reclaim_reply(
    keys: &Keyring,
    task: &TaskRecord,
    run: u32,
    scopes: Vec<String>,
    taken_until: UnixMillis,
    now: UnixMillis,
) -> String {
    let credentials = claim_credentials(keys, task, run, scopes, taken_until, now);
    format!(
        r#"{{{},"takenUntil":"{}","credentials":{}}}"#,
        claim_prefix(task, run),
        taken_until.iso(),
        to_json(&credentials)
    )
}

fn claim_prefix(task: &TaskRecord, run: u32) -> String {
    let worker = task.runs.get(run as usize).and_then(|record| record.worker.as_ref());
    let (group, id) = worker.map_or(("", ""), |worker| (worker.group.as_str(), worker.id.as_str()));
    format!(
        r#""status":{},"runId":{run},"workerGroup":{},"workerId":{}"#,
        to_json(&status(task)),
        to_json(&group),
        to_json(&id)
    )
}

pub(crate) fn listing(page: &ListPage<ListedTask>, entry: impl Fn(&ListedTask) -> String) -> String {
    let entries: Vec<_> = page.items.iter().map(entry).collect();
    let next = page.next.as_ref().map_or_else(String::new, |next| format!(r#","continuationToken":{}"#, to_json(next)));
    format!(r#"{{"tasks":[{}]{next}}}"#, entries.join(","))
}

pub(crate) fn claimed_entry(listed: &ListedTask) -> String {
    let Some((run, record)) = listed.task.last_run() else { return "null".to_owned() };
    let worker = record.worker.as_ref();
    format!(
        r#"{{"taskId":{},"runId":{run},"workerGroup":{},"workerId":{},"claimed":"{}","task":{}}}"#,
        to_json(&listed.task.task_id),
        to_json(&worker.map(|worker| worker.group.as_str())),
        to_json(&worker.map(|worker| worker.id.as_str())),
        record.started.unwrap_or_default().iso(),
        listed.definition
    )
}

pub(crate) fn pending_entry(listed: &ListedTask) -> String {
    let Some((run, record)) = listed.task.last_run() else { return "null".to_owned() };
    format!(
        r#"{{"taskId":{},"runId":{run},"inserted":"{}","task":{}}}"#,
        to_json(&listed.task.task_id),
        record.scheduled.iso(),
        listed.definition
    )
}

pub(crate) fn task_entry(listed: &ListedTask) -> String {
    format!(r#"{{"status":{},"task":{}}}"#, to_json(&status(&listed.task)), listed.definition)
}

pub(crate) fn status_pretty(task: &TaskRecord) -> String {
    serde_json::to_string_pretty(&status(task)).unwrap_or_default()
}

/// An empty or invalid body counts as an empty object.
pub(crate) fn parse_body(body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap_or_else(|_| Value::Object(serde_json::Map::new()))
}
