//! The artifact calls of the API: create, finish, list and get. Content is in `artifact_content`.

use axum::http::StatusCode;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use super::QueueState;
use super::artifact_content::{self, ContentPath};
use super::auth::{Caller, new_slugid};
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
use super::task_state::{RunState, TaskRecord};
use crate::limits::{QUEUE_CLOCK_DRIFT_MAX, QUEUE_INLINE_BYTES_MAX, QUEUE_LATE_ARTIFACTS_WINDOW, QUEUE_PUT_URL_TTL};

const STORAGE_TYPES: &[&str] = &["s3", "object", "reference", "link", "error"];
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
const FINISH: &[Field] = &[required("uploadId", FieldType::SlugId)];
const UPLOAD: &[Field] = &[
    required("expires", FieldType::Time),
    required("projectId", FieldType::Project(500)),
    required("uploadId", FieldType::SlugId),
    required("proposedUploadMethods", FieldType::Object),
    optional("hashes", FieldType::Object),
];
const FINISH_UPLOAD: &[Field] = &[
    required("projectId", FieldType::Project(500)),
    required("uploadId", FieldType::SlugId),
    optional("hashes", FieldType::Object),
];

fn text_field(body: &Map<String, Value>, name: &str) -> String {
    body.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn time_field(body: &Map<String, Value>, name: &str) -> UnixMillis {
    UnixMillis::parse(&text_field(body, name)).unwrap_or_default()
}

#[derive(Clone)]
struct ArtifactPath {
    task: String,
    run: u32,
    name: String,
}

fn artifact_path(input: &CallInput) -> ArtifactPath {
    let (task, name) = (input.route.param("taskId"), input.route.param("name"));
    ArtifactPath { task: task.to_owned(), run: input.route.run(), name: name.to_owned() }
}

fn object_name(at: &ArtifactPath) -> String {
    format!("t/{}/{}/{}", at.task, at.run, at.name)
}

/// The reverse of [`object_name`].
fn of_object(name: &str) -> Option<ArtifactPath> {
    let mut parts = name.strip_prefix("t/")?.splitn(3, '/');
    let (task, run) = (parts.next()?.to_owned(), parts.next()?.parse().ok()?);
    Some(ArtifactPath { task, run, name: parts.next()?.to_owned() })
}

pub(crate) async fn create(app: &QueueState, input: CallInput) -> ReplyResult {
    let kind = match response_json::parse_body(&input.body).get("storageType").and_then(Value::as_str) {
        Some("s3" | "object") => CONTENT_FIELDS,
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

fn declared_artifact(at: &ArtifactPath, body: &Map<String, Value>, expires: UnixMillis) -> Artifact {
    let storage = text_field(body, "storageType");
    let content_type = match body.get("contentType").and_then(Value::as_str) {
        Some(given) => given.to_owned(),
        None => "application/binary".to_owned(),
    };
    let details = match storage.as_str() {
        "object" => json!({"uploadId": new_slugid()}),
        "reference" => json!({"url": text_field(body, "url")}),
        "link" => json!({"artifact": text_field(body, "artifact")}),
        "error" => json!({"reason": text_field(body, "reason"), "message": text_field(body, "message")}),
        _ => json!({}),
    };
    let present = storage != "object";
    Artifact { name: at.name.clone(), storage, content_type, expires, present, details }
}

struct DeclaredArtifact {
    artifact: Artifact,
    task: TaskRecord,
}

fn declare(
    tx: &mut Tx<'_>,
    caller: &Caller,
    at: &ArtifactPath,
    artifact: Artifact,
) -> Result<DeclaredArtifact, StoreError> {
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
    let artifact = tx.put_artifact(&at.task, at.run, artifact)?;
    Ok(DeclaredArtifact { artifact, task: row.task })
}

fn create_response(app: &QueueState, at: &ArtifactPath, declared: &DeclaredArtifact) -> String {
    let (artifact, now) = (&declared.artifact, app.now());
    let target = ContentPath { task: at.task.clone(), run: at.run, name: at.name.clone() };
    match artifact.storage.as_str() {
        "s3" => json!({
            "storageType": "s3",
            "contentType": artifact.content_type,
            "expires": now.plus(QUEUE_PUT_URL_TTL).iso(),
            "putUrl": artifact_content::put_url(app, &target, &artifact.content_type, now.plus(QUEUE_PUT_URL_TTL)),
        }),
        "object" => {
            let worker = declared.task.runs.get(at.run as usize).and_then(|run| run.worker.as_ref());
            let (group, id) = worker.map_or(("", ""), |worker| (worker.group.as_str(), worker.id.as_str()));
            let (name, project) = (object_name(at), &declared.task.project);
            let day = std::time::Duration::from_secs(24 * 3600);
            let credentials = app.keyring.issue(
                format!("artifact-upload/{}/{}/on/{group}/{id}", at.task, at.run),
                vec![format!("object:upload:{project}:{name}")],
                now,
                artifact.expires.min(now.plus(day)),
            );
            json!({
                "storageType": "object",
                "name": name,
                "projectId": project,
                "uploadId": artifact.details.get("uploadId"),
                "expires": artifact.expires.iso(),
                "credentials": credentials,
            })
        }
        other => json!({"storageType": other}),
    }
    .to_string()
}

pub(crate) async fn finish(app: &QueueState, input: CallInput) -> ReplyResult {
    let body = input.validated_body(app, "finish-artifact-request", FINISH, Era::Modern)?;
    let (at, upload, caller) = (artifact_path(&input), text_field(&body, "uploadId"), input.caller);
    let stored = artifact_content::is_stored(app, &at.task, at.run, &at.name).await;
    app.store
        .execute(move |tx| {
            let run = tx.find_task(&at.task)?.map(|row| row.task.run(at.run).is_ok());
            let found = tx.find_artifact(&at.task, at.run, &at.name)?;
            let (Some(true), Some(artifact)) = (run, found) else {
                return Err(QueueError::not_found(format!(
                    "Artifact with taskId `{}`, runId {}, name `{}` not found",
                    at.task, at.run, at.name
                ))
                .into());
            };
            caller.require_scope(format!("queue:create-artifact:{}/{}", at.task, at.run))?;
            if artifact.storage != "object" {
                return Err(QueueError::input("Only object artifacts can be finished").into());
            }
            if artifact.present {
                return Ok(());
            }
            if artifact.details.get("uploadId").and_then(Value::as_str) != Some(upload.as_str()) {
                return Err(QueueError::input("given uploadId does not match that for the artifact").into());
            }
            if !stored {
                return Err(QueueError::input("Object storing artifact data does not exist").into());
            }
            tx.mark_artifact_present(&at.task, at.run, &at.name)
        })
        .await?;
    Ok(CallReply::empty())
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

fn follow_links(tx: &Tx<'_>, caller: &Caller, at: &ArtifactPath) -> Result<ResolvedArtifact, StoreError> {
    let mut names = vec![at.name.clone()];
    loop {
        let asks = names.iter().map(|name| ScopeExpression::scope(format!("queue:get-artifact:{name}")));
        caller.require(&ScopeExpression::All(asks.collect()), Era::Modern)?;
        let name = names.last().map_or("", String::as_str);
        let found = tx.find_artifact(&at.task, at.run, name)?.filter(|artifact| artifact.present);
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

async fn upload_of(
    app: &QueueState,
    input: &CallInput,
    body: &Map<String, Value>,
) -> Result<(ArtifactPath, Artifact), QueueError> {
    let name = input.route.param("name").to_owned();
    let project = text_field(body, "projectId");
    input.caller.require_scope(format!("object:upload:{project}:{name}"))?;
    let at = of_object(&name).ok_or_else(|| QueueError::not_found("Object not found"))?;
    let place = at.clone();
    let found = app.store.execute(move |tx| tx.find_artifact(&place.task, place.run, &place.name)).await?;
    let artifact = found
        .filter(|artifact| artifact.storage == "object")
        .ok_or_else(|| QueueError::not_found("Object not found"))?;
    let upload = artifact.details.get("uploadId").and_then(Value::as_str);
    if upload != body.get("uploadId").and_then(Value::as_str) {
        return Err(QueueError::conflict("Object already exists with a different uploadId"));
    }
    Ok((at, artifact))
}

pub(crate) async fn create_upload(app: &QueueState, input: CallInput) -> ReplyResult {
    let body = input.validated_body(app, "create-upload-request", UPLOAD, Era::Modern)?;
    let (at, artifact) = upload_of(app, &input, &body).await?;
    let methods = body.get("proposedUploadMethods").cloned().unwrap_or_default();
    let method = if let Some(inline) = methods.get("dataInline") {
        let data = inline.get("objectData").and_then(Value::as_str).unwrap_or_default();
        let bytes = STANDARD
            .decode(data)
            .map_err(|_| QueueError::input("proposedUploadMethods.dataInline.objectData is not base64"))?;
        if bytes.len() > QUEUE_INLINE_BYTES_MAX {
            let message = format!("an inline object may have at most {QUEUE_INLINE_BYTES_MAX} bytes");
            return Err(QueueError::new(QueueErrorCode::InputTooLarge, message));
        }
        artifact_content::store_inline(app, &at.task, at.run, &at.name, &bytes).await?;
        json!({"dataInline": true})
    } else if let Some(put) = methods.get("putUrl") {
        let content_type = put.get("contentType").and_then(Value::as_str);
        let content_type = content_type.unwrap_or(&artifact.content_type);
        let expires = app.now().plus(QUEUE_PUT_URL_TTL);
        let target = ContentPath { task: at.task, run: at.run, name: at.name };
        json!({"putUrl": {
            "url": artifact_content::put_url(app, &target, content_type, expires),
            "expires": expires.iso(),
            "headers": {"Content-Type": content_type, "Content-Length": put.get("contentLength").map(ToString::to_string)},
        }})
    } else {
        json!({})
    };
    Ok(CallReply::ok(
        json!({
            "projectId": text_field(&body, "projectId"), "uploadId": text_field(&body, "uploadId"),
            "expires": time_field(&body, "expires").iso(), "uploadMethod": method,
        })
        .to_string(),
    ))
}

pub(crate) async fn finish_upload(app: &QueueState, input: CallInput) -> ReplyResult {
    let body = input.validated_body(app, "finish-upload-request", FINISH_UPLOAD, Era::Modern)?;
    let (at, _) = upload_of(app, &input, &body).await?;
    if !artifact_content::is_stored(app, &at.task, at.run, &at.name).await {
        return Err(QueueError::conflict("No object data was uploaded"));
    }
    if let Some(hashes) = body.get("hashes").and_then(Value::as_object) {
        artifact_content::check_hashes(app, &at.task, at.run, &at.name, hashes).await?;
    }
    Ok(CallReply::ok("{}".to_owned()))
}
