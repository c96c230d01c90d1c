//! The artifact calls of the API: create, list and get. Content is in `artifact_content`.

use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::QueueState;
use super::artifact_content::{self, ContentPath};
use super::auth::Caller;
use super::field_types::{Text, Time, Uri};
use super::queue_error::{QueueError, QueueErrorCode};
use super::route::ApiMethod;
use super::scopes::ScopeExpression;
use super::store::StoreError;
use super::store::artifacts::Artifact;
use super::store::tx::Tx;
use super::task_calls::{CallInput, CallReply, ReplyHeader, ReplyResult};
use super::task_state::RunState;
use crate::limits::{QUEUE_CLOCK_DRIFT_MAX, QUEUE_LATE_ARTIFACTS_WINDOW, QUEUE_PUT_URL_TTL};

#[derive(Deserialize)]
#[serde(tag = "storageType", rename_all = "lowercase", rename_all_fields = "camelCase", deny_unknown_fields)]
enum CreateArtifact {
    S3 {
        expires: Time,
        content_type: Text<255>,
        #[serde(rename = "contentLength")]
        _content_length: Option<u64>,
    },
    Reference {
        expires: Time,
        content_type: Text<255>,
        url: Uri,
    },
    Link {
        expires: Time,
        content_type: Option<Text<255>>,
        artifact: Text<1_024>,
    },
    Error {
        expires: Time,
        reason: ErrorReason,
        message: Text<4_096>,
    },
}

#[derive(Serialize, Deserialize)]
enum ErrorReason {
    #[serde(rename = "file-missing-on-worker")]
    FileMissing,
    #[serde(rename = "invalid-resource-on-worker")]
    InvalidResource,
    #[serde(rename = "too-large-file-on-worker")]
    FileTooLarge,
    #[serde(rename = "file-not-readable-on-worker")]
    FileNotReadable,
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
        let content_type = content_type.map_or_else(|| "application/binary".to_owned(), |text| text.0);
        Artifact { name, storage: storage.to_owned(), content_type, expires: expires.0, details }
    }
}

fn artifact_path(input: &CallInput) -> ContentPath {
    let (task, name) = (input.route.param("taskId"), input.route.param("name"));
    ContentPath { task: task.to_owned(), run: input.route.run(), name: name.to_owned() }
}

pub(crate) async fn create(app: &QueueState, input: CallInput) -> ReplyResult {
    let path = artifact_path(&input);
    if path.name.is_empty() {
        return Err(QueueError::new(QueueErrorCode::InvalidRequestArguments, "the artifact name is empty"));
    }
    let artifact = input.fields::<CreateArtifact>()?.into_artifact(path.name.clone());
    if artifact.expires < app.now().minus(QUEUE_CLOCK_DRIFT_MAX) {
        return Err(QueueError::input("`expires` must be in the future"));
    }
    let (caller, target) = (input.caller, path.clone());
    let artifact = app.store.execute(move |tx| store_artifact(tx, &caller, &target, artifact)).await?;
    let expires = app.now().plus(QUEUE_PUT_URL_TTL);
    let reply = match artifact.storage.as_str() {
        "s3" => json!({
            "storageType": "s3",
            "contentType": artifact.content_type,
            "expires": expires.iso(),
            "putUrl": artifact_content::put_url(app, &path, &artifact.content_type, expires),
        }),
        storage => json!({"storageType": storage}),
    };
    Ok(CallReply::ok(reply.to_string()))
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
    let is_late = run.state == RunState::Exception
        && run.resolved.is_some_and(|end| end.plus(QUEUE_LATE_ARTIFACTS_WINDOW) > tx.now);
    if run.state != RunState::Running && !is_late {
        let message = "artifacts are accepted while the run is running and for 25 minutes after an exception";
        return Err(QueueError::conflict(message).into());
    }
    tx.put_artifact(&path.task, path.run, artifact)
}

pub(crate) async fn list(app: &QueueState, input: CallInput) -> ReplyResult {
    let (task, run, limit) = (input.route.param("taskId").to_owned(), input.route.run(), input.page_size()?);
    let after = input.page_start().unwrap_or_default();
    input.caller.require_scope(format!("queue:list-artifacts:{task}:{run}"))?;
    let page = app
        .store
        .execute(move |tx| {
            let row = tx.require_task(&task)?;
            row.task.run(run).map_err(|error| QueueError::from_run_error(error, &format!("{task}/{run}")))?;
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
    let last = tx.require_task(task)?.task.last_run().map(|(run, _)| run);
    Ok(last.ok_or_else(|| QueueError::not_found(format!("task `{task}` has no runs")))?)
}

/// An artifact after its links, and its run.
struct ResolvedArtifact {
    artifact: Artifact,
    run: u32,
}

fn follow_links(tx: &Tx<'_>, caller: &Caller, path: &ContentPath) -> Result<ResolvedArtifact, StoreError> {
    let mut names = vec![path.name.clone()];
    loop {
        let scopes = names.iter().map(|name| ScopeExpression::scope(format!("queue:get-artifact:{name}")));
        caller.require(&ScopeExpression::All(scopes.collect()))?;
        let name = names.last().map_or("", String::as_str);
        let found = tx.find_artifact(&path.task, path.run, name)?;
        let artifact = found.ok_or_else(|| QueueError::not_found("artifact not found"))?;
        if artifact.expires < tx.now {
            return Err(QueueError::new(QueueErrorCode::ResourceExpired, "the artifact has expired").into());
        }
        if artifact.storage != "link" {
            return Ok(ResolvedArtifact { artifact, run: path.run });
        }
        let target = artifact.details.get("artifact").and_then(Value::as_str).unwrap_or_default();
        if names.iter().any(|name| name == target) {
            return Err(QueueError::input("the artifact is part of a link cycle").into());
        }
        names.push(target.to_owned());
    }
}

pub(crate) async fn get(app: &QueueState, input: CallInput) -> ReplyResult {
    let (mut path, caller) = (artifact_path(&input), input.caller);
    let is_latest = input.route.method == ApiMethod::GetLatestArtifact;
    let task = path.task.clone();
    let ResolvedArtifact { artifact, run } = app
        .store
        .execute(move |tx| {
            if is_latest {
                caller.require_scope(format!("queue:get-artifact:{}", path.name))?;
                path.run = latest_run(tx, &path.task)?;
            }
            follow_links(tx, &caller, &path)
        })
        .await?;
    let storage = ReplyHeader { name: "x-taskcluster-artifact-storage-type", value: artifact.storage.clone() };
    if artifact.storage == "error" {
        let body = artifact.details.to_string();
        return Ok(CallReply { status: StatusCode::FAILED_DEPENDENCY, body, headers: vec![storage] });
    }
    let url = match artifact.details.get("url").and_then(Value::as_str) {
        Some(url) => url.to_owned(),
        None => {
            let target = ContentPath { task, run, name: artifact.name.clone() };
            artifact_content::get_url(app, &target, &artifact.content_type)
        }
    };
    let body = json!({"storageType": artifact.storage, "url": url}).to_string();
    let headers = vec![storage, ReplyHeader { name: "location", value: url }];
    Ok(CallReply { status: StatusCode::SEE_OTHER, body, headers })
}
