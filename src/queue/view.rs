//! How tasks, claims and listings are shown: the JSON of the API's answers.

use serde::{Serialize, Serializer};
use serde_json::Value;

use super::auth::{Credentials, Keyring};
use super::clock::Millis;
use super::definition::split;
use super::rules::{RunRecord, Task};
use super::store::room::{Given, Listed, Page};

/// A time as text.
fn iso<S: Serializer>(at: &Millis, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(&at.iso())
}

/// A time as text, if there is one.
#[expect(clippy::ref_option, reason = "the signature that serde asks for")]
fn iso_maybe<S: Serializer>(at: &Option<Millis>, out: S) -> Result<S::Ok, S::Error> {
    match at {
        Some(at) => out.serialize_str(&at.iso()),
        None => out.serialize_none(),
    }
}

/// A task's status.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Status<'a> {
    task_id: &'a str,
    provisioner_id: &'a str,
    worker_type: &'a str,
    task_queue_id: &'a str,
    scheduler_id: &'a str,
    project_id: &'a str,
    task_group_id: &'a str,
    priority: &'a str,
    #[serde(serialize_with = "iso")]
    deadline: Millis,
    #[serde(serialize_with = "iso")]
    expires: Millis,
    retries_left: u8,
    state: &'a str,
    runs: Vec<Run<'a>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Run<'a> {
    run_id: usize,
    state: &'a str,
    reason_created: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason_resolved: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker_group: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "iso_maybe")]
    taken_until: Option<Millis>,
    #[serde(serialize_with = "iso")]
    scheduled: Millis,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "iso_maybe")]
    started: Option<Millis>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "iso_maybe")]
    resolved: Option<Millis>,
}

/// The status of a task.
pub(crate) fn status(task: &Task) -> Status<'_> {
    let (provisioner_id, worker_type) = split(&task.queue);
    Status {
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

fn run(run_id: usize, record: &RunRecord) -> Run<'_> {
    Run {
        run_id,
        state: record.state.as_str(),
        reason_created: record.origin.as_str(),
        reason_resolved: record.ending.map(super::rules::Ending::as_str),
        worker_group: record.worker.as_ref().map(|worker| worker.group.as_str()),
        worker_id: record.worker.as_ref().map(|worker| worker.id.as_str()),
        taken_until: record.taken_until,
        scheduled: record.scheduled,
        started: record.started,
        resolved: record.resolved,
    }
}

/// JSON text of something that always has one.
pub(crate) fn text<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// `{"status": …}`.
pub(crate) fn status_reply(task: &Task) -> String {
    format!(r#"{{"status":{}}}"#, text(&status(task)))
}

/// The credentials of one claim.
pub(crate) fn claim_credentials(
    keys: &Keyring,
    task: &Task,
    run: u32,
    scopes: Vec<String>,
    taken_until: Millis,
    now: Millis,
) -> Credentials {
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

/// The answer to a fresh claim. The definition goes in as the text it is kept as.
pub(crate) fn claim_reply(keys: &Keyring, given: Given, now: Millis) -> String {
    let Given { task, run, taken_until, definition, scopes } = given;
    let credentials = claim_credentials(keys, &task, run, scopes, taken_until, now);
    format!(
        r#"{{{},"takenUntil":"{}","task":{definition},"credentials":{}}}"#,
        claim_head(&task, run),
        taken_until.iso_offset(),
        text(&credentials)
    )
}

/// The answer to a reclaim.
pub(crate) fn reclaim_reply(
    keys: &Keyring,
    task: &Task,
    run: u32,
    scopes: Vec<String>,
    taken_until: Millis,
    now: Millis,
) -> String {
    let credentials = claim_credentials(keys, task, run, scopes, taken_until, now);
    format!(
        r#"{{{},"takenUntil":"{}","credentials":{}}}"#,
        claim_head(task, run),
        taken_until.iso(),
        text(&credentials)
    )
}

fn claim_head(task: &Task, run: u32) -> String {
    let worker = task.runs.get(run as usize).and_then(|record| record.worker.as_ref());
    let (group, id) = worker.map_or(("", ""), |worker| (worker.group.as_str(), worker.id.as_str()));
    format!(r#""status":{},"runId":{run},"workerGroup":{},"workerId":{}"#, text(&status(task)), text(&group), text(&id))
}

/// `{"tasks": […]}` of a listing, each entry made by `entry`.
pub(crate) fn listing(page: &Page<Listed>, entry: impl Fn(&Listed) -> String) -> String {
    let entries: Vec<_> = page.items.iter().map(entry).collect();
    let next = page.next.as_ref().map_or_else(String::new, |next| format!(r#","continuationToken":{}"#, text(next)));
    format!(r#"{{"tasks":[{}]{next}}}"#, entries.join(","))
}

/// An entry of the claimed tasks.
pub(crate) fn claimed_entry(listed: &Listed) -> String {
    let Some((run, record)) = listed.task.last() else { return "null".to_owned() };
    let worker = record.worker.as_ref();
    format!(
        r#"{{"taskId":{},"runId":{run},"workerGroup":{},"workerId":{},"claimed":"{}","task":{}}}"#,
        text(&listed.task.task_id),
        text(&worker.map(|worker| worker.group.as_str())),
        text(&worker.map(|worker| worker.id.as_str())),
        record.started.unwrap_or_default().iso(),
        listed.definition
    )
}

/// An entry of the pending tasks.
pub(crate) fn pending_entry(listed: &Listed) -> String {
    let Some((run, record)) = listed.task.last() else { return "null".to_owned() };
    format!(
        r#"{{"taskId":{},"runId":{run},"inserted":"{}","task":{}}}"#,
        text(&listed.task.task_id),
        record.scheduled.iso(),
        listed.definition
    )
}

/// An entry of the listing of every task.
pub(crate) fn task_entry(listed: &Listed) -> String {
    format!(r#"{{"status":{},"task":{}}}"#, text(&status(&listed.task)), listed.definition)
}

/// A status as text spread over lines, as refusals show it.
pub(crate) fn status_pretty(task: &Task) -> String {
    serde_json::to_string_pretty(&status(task)).unwrap_or_default()
}

/// A JSON value from a body; an empty one is an empty object.
pub(crate) fn body_value(body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap_or_else(|_| Value::Object(serde_json::Map::new()))
}
