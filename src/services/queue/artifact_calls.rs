//! The artifact calls of the API: create, list and get. Content is in `artifact_content`.

use axum::http::StatusCode;
use axum::http::header::LOCATION;
use axum::response::IntoResponse as _;
use serde::Deserialize;
use serde_json::{Value, json};

use super::artifact_content::{self, ContentPath};
use super::auth::Caller;
use super::call::{App, Call, QueueState, ReplyResult};
use super::clock::UnixMillis;
use super::field_types::Uri;
use super::queue_error::{QueueError, QueueErrorCode, json_response};
use super::response_json;
use super::store::StoreError;
use super::store::artifacts::Artifact;
use super::store::tx::Tx;
use super::task_calls::ok;
use journeyman_domain::limits::{QUEUE_CLOCK_DRIFT_MAX, QUEUE_GET_URL_TTL, QUEUE_LINKS_MAX, QUEUE_PUT_URL_TTL};

#[derive(Deserialize)]
#[serde(tag = "storageType", rename_all = "lowercase", rename_all_fields = "camelCase", deny_unknown_fields)]
enum CreateArtifact {
    S3 {
        expires: UnixMillis,
        content_type: String,
        #[serde(rename = "contentLength")]
        _content_length: Option<u64>,
    },
    Reference {
        expires: UnixMillis,
        content_type: String,
        url: Uri,
    },
    Link {
        expires: UnixMillis,
        content_type: Option<String>,
        artifact: String,
    },
    Error {
        expires: UnixMillis,
        reason: String,
        message: String,
    },
}

impl CreateArtifact {
    fn into_artifact(self, name: String) -> Artifact {
        let (storage, expires, content_type, details) = match self {
            Self::S3 { expires, content_type, .. } => ("s3", expires, Some(content_type), json!({})),
            Self::Reference { expires, content_type, url } => {
                ("reference", expires, Some(content_type), json!({"url": url}))
            }
            Self::Link { expires, content_type, artifact } => {
                ("link", expires, content_type, json!({"artifact": artifact}))
            }
            Self::Error { expires, reason, message } => {
                ("error", expires, None, json!({"reason": reason, "message": message}))
            }
        };
        let content_type = content_type.unwrap_or_else(|| "application/binary".to_owned());
        Artifact { name, storage: storage.to_owned(), content_type, expires, details }
    }
}

pub(crate) async fn create(app: App, call: Call) -> ReplyResult {
    let path = ContentPath { task: call.task_id(), run: call.run(), name: call.param("name").to_owned() };
    let artifact = call.fields::<CreateArtifact>()?.into_artifact(path.name.clone());
    if artifact.expires < app.now().minus(QUEUE_CLOCK_DRIFT_MAX) {
        return Err(QueueError::input("`expires` must be in the future"));
    }
    let (caller, target) = (call.caller, path.clone());
    let artifact = app.store.execute(move |tx| store_artifact(tx, &caller, &target, artifact)).await?;
    let expires = app.now().plus(QUEUE_PUT_URL_TTL);
    let reply = match artifact.storage.as_str() {
        "s3" => {
            let target = artifact_content::signed_target(&app, "PUT", &path, &artifact.content_type, expires);
            json!({
                "storageType": "s3",
                "contentType": artifact.content_type,
                "expires": expires.iso(),
                "putUrl": format!("{}{target}", call.root_url),
            })
        }
        storage => json!({"storageType": storage}),
    };
    ok(reply.to_string())
}

fn store_artifact(
    tx: &mut Tx<'_>,
    caller: &Caller,
    path: &ContentPath,
    artifact: Artifact,
) -> Result<Artifact, StoreError> {
    let row = tx.find_task(&path.task)?.ok_or_else(|| QueueError::input("task not found"))?;
    let run = row.task.run(path.run).map_err(|_| QueueError::input("run not found"))?;
    if run.worker.is_none() {
        return Err(QueueError::input("the run was not claimed, so it has no artifacts").into());
    }
    caller.require_scope(format!("queue:create-artifact:{}/{}", path.task, path.run))?;
    if artifact.expires > row.task.expires {
        return Err(QueueError::input("the artifact cannot expire after its task").into());
    }
    if !run.accepts_artifacts(tx.now) {
        let message = "artifacts are accepted while the run is running and for 25 minutes after an exception";
        return Err(QueueError::conflict(message).into());
    }
    tx.put_artifact(&path.task, path.run, artifact)
}

/// Lists the artifacts of a run, or of the last one if the call names none.
pub(crate) async fn list(app: App, call: Call) -> ReplyResult {
    let (task, run, page) = (call.task_id(), call.named_run(), call.page()?);
    call.caller.require_scope(list_scope(&call))?;
    let found = app.read(move |tx| {
        let run = run_or_last(tx, &task, run)?;
        tx.list_artifacts(&task, run, page)
    });
    let page = found.await?;
    ok(response_json::listing("", "artifacts", &page, info_json))
}

/// Does not follow links.
pub(crate) async fn info(app: App, call: Call) -> ReplyResult {
    let (task, run, name) = (call.task_id(), call.named_run(), call.param("name").to_owned());
    call.caller.require_scope(list_scope(&call))?;
    let found = app.store.execute(move |tx| {
        let run = run_or_last(tx, &task, run)?;
        require_artifact(tx, &task, run, &name)
    });
    ok(info_json(&found.await?))
}

fn list_scope(call: &Call) -> String {
    let run = call.named_run().map_or_else(String::new, |run| format!(":{run}"));
    format!("queue:list-artifacts:{}{run}", call.task_id())
}

fn info_json(artifact: &Artifact) -> String {
    let Artifact { name, storage, content_type, expires, .. } = artifact;
    json!({"storageType": storage, "name": name, "expires": expires, "contentType": content_type}).to_string()
}

fn run_or_last(tx: &Tx<'_>, task: &str, run: Option<u32>) -> Result<u32, StoreError> {
    let task = tx.require_task(task)?.task;
    let run = run.or_else(|| task.last_run().map(|(run, _)| run)).unwrap_or_default();
    task.run(run)?;
    Ok(run)
}

fn require_artifact(tx: &Tx<'_>, task: &str, run: u32, name: &str) -> Result<Artifact, StoreError> {
    let found = tx.find_artifact(task, run, name)?;
    let artifact = found.ok_or_else(|| QueueError::not_found("artifact not found"))?;
    if artifact.expires < tx.now {
        return Err(QueueError::new(QueueErrorCode::ResourceExpired, "the artifact has expired").into());
    }
    Ok(artifact)
}

/// The caller needs the scope of each link.
fn follow_links(tx: &Tx<'_>, caller: &Caller, path: &ContentPath) -> Result<Artifact, StoreError> {
    let mut name = path.name.clone();
    for _ in 0..QUEUE_LINKS_MAX {
        caller.require_scope(format!("queue:get-artifact:{name}"))?;
        let artifact = require_artifact(tx, &path.task, path.run, &name)?;
        if artifact.storage != "link" {
            return Ok(artifact);
        }
        name = artifact.details.get("artifact").and_then(Value::as_str).unwrap_or_default().to_owned();
    }
    Err(QueueError::input(format!("the artifact leads to more than {QUEUE_LINKS_MAX} links")).into())
}

/// An artifact of a run, or of the last one if the call names none, and the URL of its content.
async fn find(app: &QueueState, call: Call) -> Result<(Artifact, Option<String>), QueueError> {
    let (task, run, name, caller) = (call.task_id(), call.named_run(), call.param("name").to_owned(), call.caller);
    caller.require_scope(format!("queue:get-artifact:{name}"))?;
    let found = app.store.execute(move |tx| {
        let run = run_or_last(tx, &task, run)?;
        let mut path = ContentPath { task, run, name };
        let artifact = follow_links(tx, &caller, &path)?;
        path.name.clone_from(&artifact.name);
        Ok((artifact, path))
    });
    let (artifact, path) = found.await?;
    let url = match artifact.storage.as_str() {
        "error" => None,
        "reference" => artifact.details.get("url").and_then(Value::as_str).map(str::to_owned),
        _ => {
            let end = app.now().plus(QUEUE_GET_URL_TTL);
            let target = artifact_content::signed_target(app, "GET", &path, &artifact.content_type, end);
            Some(format!("{}{target}", call.root_url))
        }
    };
    Ok((artifact, url))
}

/// Redirects to the content.
pub(crate) async fn get(app: App, call: Call) -> ReplyResult {
    let (artifact, url) = find(&app, call).await?;
    let storage = [("x-taskcluster-artifact-storage-type", artifact.storage.clone())];
    let Some(url) = url else {
        let reply = json_response(StatusCode::FAILED_DEPENDENCY, artifact.details.to_string());
        return Ok((storage, reply).into_response());
    };
    let body = json!({"storageType": artifact.storage, "url": url}).to_string();
    Ok((storage, [(LOCATION, url)], json_response(StatusCode::SEE_OTHER, body)).into_response())
}

/// Says where the content is.
pub(crate) async fn content(app: App, call: Call) -> ReplyResult {
    let (artifact, url) = find(&app, call).await?;
    let mut reply = url.map_or(artifact.details, |url| json!({"url": url}));
    reply["storageType"] = artifact.storage.into();
    ok(reply.to_string())
}
