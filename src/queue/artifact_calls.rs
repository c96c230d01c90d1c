//! The artifact calls of the API: create, finish, list and get. Content is in `artifact_content`.

use axum::http::StatusCode;
use serde_json::{Map, Value, json};

use super::QueueState;
use super::artifact_content::{self, ContentPath};
use super::auth::Caller;
use super::body_schema::{Field, FieldType, optional, required};
use super::clock::UnixMillis;
use super::queue_error::{QueueError, QueueErrorCode};
use super::response_json;
use super::route::ApiMethod;
use super::scopes::{Era, ScopeExpression};
use super::store::StoreError;
use super::store::artifacts::Artifact;
use super::store::tx::Tx;
use super::task_calls::{CallInput, CallReply, ReplyHeader, ReplyResult};
use super::task_state::RunState;
use crate::limits::{QUEUE_CLOCK_DRIFT_MAX, QUEUE_LATE_ARTIFACTS_WINDOW, QUEUE_PUT_URL_TTL};

const STORAGE_TYPES: &[&str] = &["s3", "reference", "link", "error"];
const ERROR_REASONS: &[&str] = &[
    "file-missing-on-worker",
    "invalid-resource-on-worker",
    "too-large-file-on-worker",
    "file-not-readable-on-worker",
];
const ARTIFACT_FIELDS: &[Field] = &[
    required("storageType", FieldType::OneOf(STORAGE_TYPES)),
    required("expires", FieldType::Time),
    optional("contentType", FieldType::Text(255)),
    optional("contentLength", FieldType::Integer(0, i64::MAX)),
    optional("url", FieldType::Uri(4_096)),
    optional("artifact", FieldType::Text(1_024)),
    optional("reason", FieldType::OneOf(ERROR_REASONS)),
    optional("message", FieldType::Text(4_096)),
];
const CONTENT_FIELDS: &[Field] =
    &[ARTIFACT_FIELDS[0], ARTIFACT_FIELDS[1], required("contentType", FieldType::Text(255)), ARTIFACT_FIELDS[3]];
const REFERENCE_FIELDS: &[Field] = &[
    ARTIFACT_FIELDS[0],
    ARTIFACT_FIELDS[1],
    required("contentType", FieldType::Text(255)),
    required("url", FieldType::Uri(4_096)),
];
const LINK_FIELDS: &[Field] =
    &[ARTIFACT_FIELDS[0], ARTIFACT_FIELDS[1], ARTIFACT_FIELDS[2], required("artifact", FieldType::Text(1_024))];
const ERROR_FIELDS: &[Field] = &[
    ARTIFACT_FIELDS[0],
    ARTIFACT_FIELDS[1],
    required("reason", FieldType::OneOf(ERROR_REASONS)),
    required("message", FieldType::Text(4_096)),
];
fn text_field(body: &Map<String, Value>, name: &str) -> String {
    body.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn time_field(body: &Map<String, Value>, name: &str) -> UnixMillis {
    UnixMillis::parse(&text_field(body, name)).unwrap_or_default()
}

fn artifact_path(input: &CallInput) -> ContentPath {
    let (task, name) = (input.route.param("taskId"), input.route.param("name"));
    ContentPath { task: task.to_owned(), run: input.route.run(), name: name.to_owned() }
}

pub(crate) async fn create(app: &QueueState, input: CallInput) -> ReplyResult {
    let kind = match response_json::parse_body(&input.body).get("storageType").and_then(Value::as_str) {
        Some("s3") => CONTENT_FIELDS,
        Some("reference") => REFERENCE_FIELDS,
        Some("link") => LINK_FIELDS,
        Some("error") => ERROR_FIELDS,
        _ => ARTIFACT_FIELDS,
    };
    let body = input.validated_body(app, "post-artifact-request", kind, Era::Modern)?;
    let at = artifact_path(&input);
    if at.name.is_empty() {
        return Err(QueueError::new(QueueErrorCode::InvalidRequestArguments, "the artifact name is empty"));
    }
    let expires = time_field(&body, "expires");
    if expires < app.now().minus(QUEUE_CLOCK_DRIFT_MAX) {
        return Err(QueueError::input("Expires must be in the future"));
    }
    let artifact = declared_artifact(&at, &body, expires);
    let (caller, place) = (input.caller, at.clone());
    let declared = app.store.execute(move |tx| declare(tx, &caller, &place, artifact)).await?;
    Ok(CallReply::ok(create_response(app, &at, &declared)))
}

fn declared_artifact(at: &ContentPath, body: &Map<String, Value>, expires: UnixMillis) -> Artifact {
    let storage = text_field(body, "storageType");
    let content_type = match body.get("contentType").and_then(Value::as_str) {
        Some(given) => given.to_owned(),
        None => "application/binary".to_owned(),
    };
    let details = match storage.as_str() {
        "reference" => json!({"url": text_field(body, "url")}),
        "link" => json!({"artifact": text_field(body, "artifact")}),
        "error" => json!({"reason": text_field(body, "reason"), "message": text_field(body, "message")}),
        _ => json!({}),
    };
    Artifact { name: at.name.clone(), storage, content_type, expires, details }
}

fn declare(tx: &mut Tx<'_>, caller: &Caller, at: &ContentPath, artifact: Artifact) -> Result<Artifact, StoreError> {
    let row = tx.find_task(&at.task)?.ok_or_else(|| QueueError::input("Task not found"))?;
    let run = row.task.run(at.run).map_err(|_| QueueError::input("Run not found"))?;
    if run.worker.is_none() {
        return Err(QueueError::input("Run was not claimed by a worker and so no artifacts can exist").into());
    }
    caller.require_scope(format!("queue:create-artifact:{}/{}", at.task, at.run))?;
    if artifact.expires > row.task.expires {
        return Err(QueueError::input(format!(
            "Artifact expires ({}) after the task expiration {} (task.expires < expires) - this is not allowed, \
             artifacts may not expire after the task they belong to expires",
            artifact.expires.iso(),
            row.task.expires.iso()
        ))
        .into());
    }
    let late = run.state == RunState::Exception
        && run.resolved.is_some_and(|end| end.plus(QUEUE_LATE_ARTIFACTS_WINDOW) > tx.now);
    if run.state != RunState::Running && !late {
        return Err(QueueError::conflict(format!(
            "Artifacts cannot be created for a task after it is resolved, unless it is resolved 'exception', and \
             even in this case only up to 25 min past resolution.This to ensure that artifacts have been uploaded \
             before a task is 'completed' and output is consumed by a dependent task\n\nTask status: {}",
            response_json::status_pretty(&row.task)
        ))
        .into());
    }
    tx.put_artifact(&at.task, at.run, artifact)
}

fn create_response(app: &QueueState, at: &ContentPath, artifact: &Artifact) -> String {
    let storage = &artifact.storage;
    if storage != "s3" {
        return json!({"storageType": storage}).to_string();
    }
    let expires = app.now().plus(QUEUE_PUT_URL_TTL);
    json!({
        "storageType": storage,
        "contentType": artifact.content_type,
        "expires": expires.iso(),
        "putUrl": artifact_content::put_url(app, at, &artifact.content_type, expires),
    })
    .to_string()
}

pub(crate) async fn list(app: &QueueState, input: CallInput) -> ReplyResult {
    let (task, limit) = (input.route.param("taskId").to_owned(), input.page_size()?);
    let after = input.page_start().unwrap_or_default();
    let run = (input.route.method == ApiMethod::ListArtifacts).then(|| input.route.run());
    let scope =
        run.map_or_else(|| format!("queue:list-artifacts:{task}"), |run| format!("queue:list-artifacts:{task}:{run}"));
    input.caller.require_scope(scope)?;
    let page = app
        .store
        .execute(move |tx| {
            let latest = latest_run(tx, &task)?;
            let run = run.unwrap_or(latest);
            if run > latest {
                return Err(
                    QueueError::not_found(format!("Task with taskId: `{task}` has no run with runId: {run}")).into()
                );
            }
            tx.list_artifacts(&task, run, &after, limit)
        })
        .await?;
    let artifacts: Vec<Value> = page
        .items
        .iter()
        .map(|artifact| {
            json!({
                "storageType": artifact.storage, "name": artifact.name,
                "expires": artifact.expires.iso(), "contentType": artifact.content_type,
            })
        })
        .collect();
    let mut reply = json!({"artifacts": artifacts});
    if let Some(next) = page.next {
        reply["continuationToken"] = next.into();
    }
    Ok(CallReply::ok(reply.to_string()))
}

fn latest_run(tx: &Tx<'_>, task: &str) -> Result<u32, StoreError> {
    let row = tx.find_task(task)?.ok_or_else(|| QueueError::not_found("Task not found"))?;
    let last = row.task.last_run().map(|(run, _)| run);
    Ok(last.ok_or_else(|| QueueError::not_found("Task doesn't have any runs"))?)
}

struct ResolvedArtifact {
    artifact: Artifact,
    run: u32,
}

fn follow_links(tx: &Tx<'_>, caller: &Caller, at: &ContentPath) -> Result<ResolvedArtifact, StoreError> {
    let mut names = vec![at.name.clone()];
    loop {
        let asks = names.iter().map(|name| ScopeExpression::scope(format!("queue:get-artifact:{name}")));
        caller.require(&ScopeExpression::All(asks.collect()), Era::Modern)?;
        let name = names.last().map_or("", String::as_str);
        let found = tx.find_artifact(&at.task, at.run, name)?;
        let artifact = found.ok_or_else(|| QueueError::not_found("Artifact not found"))?;
        if artifact.expires < tx.now {
            return Err(QueueError::new(QueueErrorCode::ResourceExpired, "Artifact expired").into());
        }
        if artifact.storage != "link" {
            return Ok(ResolvedArtifact { artifact, run: at.run });
        }
        let target = artifact.details.get("artifact").and_then(Value::as_str).unwrap_or_default();
        if names.iter().any(|name| name == target) {
            return Err(QueueError::input("Artifact leads to a link cycle").into());
        }
        names.push(target.to_owned());
    }
}

pub(crate) async fn get(app: &QueueState, input: CallInput) -> ReplyResult {
    let (mut at, caller) = (artifact_path(&input), input.caller);
    let latest = input.route.method == ApiMethod::GetLatestArtifact;
    let task = at.task.clone();
    let ResolvedArtifact { artifact, run } = app
        .store
        .execute(move |tx| {
            if latest {
                caller.require_scope(format!("queue:get-artifact:{}", at.name))?;
                at.run = latest_run(tx, &at.task)?;
            }
            follow_links(tx, &caller, &at)
        })
        .await?;
    let storage = ReplyHeader { name: "x-taskcluster-artifact-storage-type", value: artifact.storage.clone() };
    let detail = |name: &str| artifact.details.get(name).and_then(Value::as_str).unwrap_or_default();
    if artifact.storage == "error" {
        let body = json!({"reason": detail("reason"), "message": detail("message")}).to_string();
        return Ok(CallReply { status: StatusCode::FAILED_DEPENDENCY, body, headers: vec![storage] });
    }
    let url = if artifact.storage == "reference" {
        detail("url").to_owned()
    } else {
        let target = ContentPath { task, run, name: artifact.name.clone() };
        artifact_content::get_url(app, &target, &artifact.content_type)
    };
    let body = json!({"storageType": artifact.storage, "url": url}).to_string();
    let headers = vec![storage, ReplyHeader { name: "location", value: url }];
    Ok(CallReply { status: StatusCode::SEE_OTHER, body, headers })
}
