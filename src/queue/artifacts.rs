//! Artifacts: the calls that declare, finish, list and find them, and those of the object service that carry the
//! content of one kind. The content itself goes through `content`.

use axum::http::StatusCode;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use super::App;
use super::api::{Answer, Header, Input, Reply};
use super::auth::{Caller, slugid};
use super::check::{Field, Kind, may, must};
use super::clock::Millis;
use super::content::{self, Target};
use super::fault::{Code, Fault};
use super::route::Call;
use super::rules::{State, Task};
use super::scopes::{Asks, Era};
use super::store::Trouble;
use super::store::artifacts::Artifact;
use super::store::room::Room;
use super::view;
use crate::limits::{QUEUE_DRIFT, QUEUE_INLINE_BYTES_MAX, QUEUE_LATE_ARTIFACTS, QUEUE_PUT_URL_LIFE};

const KINDS: &[&str] = &["s3", "object", "reference", "link", "error"];
const REASONS: &[&str] = &[
    "file-missing-on-worker",
    "invalid-resource-on-worker",
    "too-large-file-on-worker",
    "file-not-readable-on-worker",
];
const ANY: &[Field] = &[
    must("storageType", Kind::Choice(KINDS)),
    must("expires", Kind::Time),
    may("contentType", Kind::Text(255)),
    may("contentLength", Kind::Whole(0, i64::MAX)),
    may("url", Kind::Uri(4_096)),
    may("artifact", Kind::Text(1_024)),
    may("reason", Kind::Choice(REASONS)),
    may("message", Kind::Text(4_096)),
];
const CONTENT: &[Field] = &[ANY[0], ANY[1], must("contentType", Kind::Text(255)), ANY[3]];
const REFERENCE: &[Field] = &[ANY[0], ANY[1], must("contentType", Kind::Text(255)), must("url", Kind::Uri(4_096))];
const LINK: &[Field] = &[ANY[0], ANY[1], ANY[2], must("artifact", Kind::Text(1_024))];
const ERROR: &[Field] = &[ANY[0], ANY[1], must("reason", Kind::Choice(REASONS)), must("message", Kind::Text(4_096))];
const FINISH: &[Field] = &[must("uploadId", Kind::Slug)];
const UPLOAD: &[Field] = &[
    must("expires", Kind::Time),
    must("projectId", Kind::Project(500)),
    must("uploadId", Kind::Slug),
    must("proposedUploadMethods", Kind::Object),
    may("hashes", Kind::Object),
];
const FINISH_UPLOAD: &[Field] =
    &[must("projectId", Kind::Project(500)), must("uploadId", Kind::Slug), may("hashes", Kind::Object)];

fn text(body: &Map<String, Value>, name: &str) -> String {
    body.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn time(body: &Map<String, Value>, name: &str) -> Millis {
    Millis::parse(&text(body, name)).unwrap_or_default()
}

/// The task, run and name that an address speaks of.
#[derive(Clone)]
struct At {
    task: String,
    run: u32,
    name: String,
}

fn at(input: &Input) -> At {
    let (task, name) = (input.route.param("taskId"), input.route.param("name"));
    At { task: task.to_owned(), run: input.route.run(), name: name.to_owned() }
}

/// The name of an artifact in the object service.
fn object_name(at: &At) -> String {
    format!("t/{}/{}/{}", at.task, at.run, at.name)
}

/// The reverse of [`object_name`].
fn of_object(name: &str) -> Option<At> {
    let mut parts = name.strip_prefix("t/")?.splitn(3, '/');
    let (task, run) = (parts.next()?.to_owned(), parts.next()?.parse().ok()?);
    Some(At { task, run, name: parts.next()?.to_owned() })
}

pub(crate) async fn create(app: &App, input: Input) -> Answer {
    let kind = match view::body_value(&input.body).get("storageType").and_then(Value::as_str) {
        Some("s3" | "object") => CONTENT,
        Some("reference") => REFERENCE,
        Some("link") => LINK,
        Some("error") => ERROR,
        _ => ANY,
    };
    let body = input.checked(app, "post-artifact-request", kind, Era::Modern)?;
    let at = at(&input);
    if at.name.is_empty() {
        return Err(Fault::new(Code::InvalidRequestArguments, "an artifact must have a name"));
    }
    let expires = time(&body, "expires");
    if expires < app.now().minus(QUEUE_DRIFT) {
        return Err(Fault::input("Expires must be in the future"));
    }
    let made = made(&at, &body, expires);
    let (caller, place) = (input.caller, at.clone());
    let kept = app.store.call(move |room| put(room, &caller, &place, made)).await?;
    Ok(Reply::ok(created(app, &at, &kept)))
}

/// An artifact as its creator declares it.
fn made(at: &At, body: &Map<String, Value>, expires: Millis) -> Artifact {
    let storage = text(body, "storageType");
    let content_type = match body.get("contentType").and_then(Value::as_str) {
        Some(given) => given.to_owned(),
        None => "application/binary".to_owned(),
    };
    let details = match storage.as_str() {
        "object" => json!({"uploadId": slugid()}),
        "reference" => json!({"url": text(body, "url")}),
        "link" => json!({"artifact": text(body, "artifact")}),
        "error" => json!({"reason": text(body, "reason"), "message": text(body, "message")}),
        _ => json!({}),
    };
    let present = storage != "object";
    Artifact { name: at.name.clone(), storage, content_type, expires, present, details }
}

/// An artifact that was declared, and what its creator has to know of the run.
struct Declared {
    artifact: Artifact,
    task: Task,
}

fn put(room: &mut Room<'_>, caller: &Caller, at: &At, made: Artifact) -> Result<Declared, Trouble> {
    let kept = room.find(&at.task)?.ok_or_else(|| Fault::input("Task not found"))?;
    let run = kept.task.run(at.run).map_err(|_| Fault::input("Run not found"))?;
    if run.worker.is_none() {
        return Err(Fault::input("Run was not claimed by a worker and so no artifacts can exist").into());
    }
    caller.must_have(format!("queue:create-artifact:{}/{}", at.task, at.run))?;
    if made.expires > kept.task.expires {
        return Err(Fault::input(format!(
            "Artifact expires ({}) after the task expiration {} (task.expires < expires) - this is not allowed, \
             artifacts may not expire after the task they belong to expires",
            made.expires.iso(),
            kept.task.expires.iso()
        ))
        .into());
    }
    let late =
        run.state == State::Exception && run.resolved.is_some_and(|end| end.plus(QUEUE_LATE_ARTIFACTS) > room.now);
    if run.state != State::Running && !late {
        return Err(Fault::conflict(format!(
            "Artifacts cannot be created for a task after it is resolved, unless it is resolved 'exception', and \
             even in this case only up to 25 min past resolution.This to ensure that artifacts have been uploaded \
             before a task is 'completed' and output is consumed by a dependent task\n\nTask status: {}",
            view::status_pretty(&kept.task)
        ))
        .into());
    }
    let artifact = room.put_artifact(&at.task, at.run, made)?;
    Ok(Declared { artifact, task: kept.task })
}

fn created(app: &App, at: &At, declared: &Declared) -> String {
    let (artifact, now) = (&declared.artifact, app.now());
    let target = Target { task: at.task.clone(), run: at.run, name: at.name.clone() };
    match artifact.storage.as_str() {
        "s3" => json!({
            "storageType": "s3",
            "contentType": artifact.content_type,
            "expires": now.plus(QUEUE_PUT_URL_LIFE).iso(),
            "putUrl": content::put_url(app, &target, &artifact.content_type, now.plus(QUEUE_PUT_URL_LIFE)),
        }),
        "object" => {
            let worker = declared.task.runs.get(at.run as usize).and_then(|run| run.worker.as_ref());
            let (group, id) = worker.map_or(("", ""), |worker| (worker.group.as_str(), worker.id.as_str()));
            let (name, project) = (object_name(at), &declared.task.project);
            let day = std::time::Duration::from_secs(24 * 3600);
            let credentials = app.keys.issue(
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

pub(crate) async fn finish(app: &App, input: Input) -> Answer {
    let body = input.checked(app, "finish-artifact-request", FINISH, Era::Modern)?;
    let (at, upload, caller) = (at(&input), text(&body, "uploadId"), input.caller);
    let stored = content::is_stored(app, &at.task, at.run, &at.name).await;
    app.store
        .call(move |room| {
            let run = room.find(&at.task)?.map(|kept| kept.task.run(at.run).is_ok());
            let found = room.artifact(&at.task, at.run, &at.name)?;
            let (Some(true), Some(artifact)) = (run, found) else {
                return Err(Fault::not_found(format!(
                    "Artifact with taskId `{}`, runId {}, name `{}` not found",
                    at.task, at.run, at.name
                ))
                .into());
            };
            caller.must_have(format!("queue:create-artifact:{}/{}", at.task, at.run))?;
            if artifact.storage != "object" {
                return Err(Fault::input("Only object artifacts can be finished").into());
            }
            if artifact.present {
                return Ok(());
            }
            if artifact.details.get("uploadId").and_then(Value::as_str) != Some(upload.as_str()) {
                return Err(Fault::input("given uploadId does not match that for the artifact").into());
            }
            if !stored {
                return Err(Fault::input("Object storing artifact data does not exist").into());
            }
            room.artifact_present(&at.task, at.run, &at.name)
        })
        .await?;
    Ok(Reply::empty())
}

pub(crate) async fn list(app: &App, input: Input) -> Answer {
    let (task, most) = (input.route.param("taskId").to_owned(), input.page_size()?);
    let after = input.page_start().unwrap_or_default();
    let run = (input.route.call == Call::ListArtifacts).then(|| input.route.run());
    let scope =
        run.map_or_else(|| format!("queue:list-artifacts:{task}"), |run| format!("queue:list-artifacts:{task}:{run}"));
    input.caller.must_have(scope)?;
    let page = app
        .store
        .call(move |room| {
            let latest = latest_run(room, &task)?;
            let run = run.unwrap_or(latest);
            if run > latest {
                return Err(Fault::not_found(format!("Task with taskId: `{task}` has no run with runId: {run}")).into());
            }
            room.artifacts(&task, run, &after, most)
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
    let mut shown = json!({"artifacts": artifacts});
    if let Some(next) = page.next {
        shown["continuationToken"] = next.into();
    }
    Ok(Reply::ok(shown.to_string()))
}

fn latest_run(room: &Room<'_>, task: &str) -> Result<u32, Trouble> {
    let kept = room.find(task)?.ok_or_else(|| Fault::not_found("Task not found"))?;
    let last = kept.task.last().map(|(run, _)| run);
    Ok(last.ok_or_else(|| Fault::not_found("Task doesn't have any runs"))?)
}

/// An artifact at the end of its links, and the run it belongs to.
struct Resolved {
    artifact: Artifact,
    run: u32,
}

fn follow(room: &Room<'_>, caller: &Caller, at: &At) -> Result<Resolved, Trouble> {
    let mut names = vec![at.name.clone()];
    loop {
        let asks = names.iter().map(|name| Asks::scope(format!("queue:get-artifact:{name}")));
        caller.must(&Asks::All(asks.collect()), Era::Modern)?;
        let name = names.last().map_or("", String::as_str);
        let found = room.artifact(&at.task, at.run, name)?.filter(|artifact| artifact.present);
        let artifact = found.ok_or_else(|| Fault::not_found("Artifact not found"))?;
        if artifact.expires < room.now {
            return Err(Fault::new(Code::ResourceExpired, "Artifact expired").into());
        }
        if artifact.storage != "link" {
            return Ok(Resolved { artifact, run: at.run });
        }
        let target = artifact.details.get("artifact").and_then(Value::as_str).unwrap_or_default();
        if names.iter().any(|name| name == target) {
            return Err(Fault::input("Artifact leads to a link cycle").into());
        }
        names.push(target.to_owned());
    }
}

pub(crate) async fn get(app: &App, input: Input) -> Answer {
    let (mut at, caller) = (at(&input), input.caller);
    let latest = input.route.call == Call::GetLatestArtifact;
    let task = at.task.clone();
    let Resolved { artifact, run } = app
        .store
        .call(move |room| {
            if latest {
                caller.must_have(format!("queue:get-artifact:{}", at.name))?;
                at.run = latest_run(room, &at.task)?;
            }
            follow(room, &caller, &at)
        })
        .await?;
    let storage = Header { name: "x-taskcluster-artifact-storage-type", value: artifact.storage.clone() };
    let detail = |name: &str| artifact.details.get(name).and_then(Value::as_str).unwrap_or_default();
    if artifact.storage == "error" {
        let body = json!({"reason": detail("reason"), "message": detail("message")}).to_string();
        return Ok(Reply { status: StatusCode::FAILED_DEPENDENCY, body, headers: vec![storage] });
    }
    let url = if artifact.storage == "reference" {
        detail("url").to_owned()
    } else {
        let target = Target { task, run, name: artifact.name.clone() };
        content::get_url(app, &target, &artifact.content_type)
    };
    let body = json!({"storageType": artifact.storage, "url": url}).to_string();
    let headers = vec![storage, Header { name: "location", value: url }];
    Ok(Reply { status: StatusCode::SEE_OTHER, body, headers })
}

/// The artifact that an upload is for, if the caller may upload it.
async fn upload_of(app: &App, input: &Input, body: &Map<String, Value>) -> Result<(At, Artifact), Fault> {
    let name = input.route.param("name").to_owned();
    let project = text(body, "projectId");
    input.caller.must_have(format!("object:upload:{project}:{name}"))?;
    let at = of_object(&name).ok_or_else(|| Fault::not_found("Object not found"))?;
    let place = at.clone();
    let found = app.store.call(move |room| room.artifact(&place.task, place.run, &place.name)).await?;
    let artifact =
        found.filter(|artifact| artifact.storage == "object").ok_or_else(|| Fault::not_found("Object not found"))?;
    let upload = artifact.details.get("uploadId").and_then(Value::as_str);
    if upload != body.get("uploadId").and_then(Value::as_str) {
        return Err(Fault::conflict("Object already exists with a different uploadId"));
    }
    Ok((at, artifact))
}

pub(crate) async fn create_upload(app: &App, input: Input) -> Answer {
    let body = input.checked(app, "create-upload-request", UPLOAD, Era::Modern)?;
    let (at, artifact) = upload_of(app, &input, &body).await?;
    let methods = body.get("proposedUploadMethods").cloned().unwrap_or_default();
    let method = if let Some(inline) = methods.get("dataInline") {
        let data = inline.get("objectData").and_then(Value::as_str).unwrap_or_default();
        let bytes = STANDARD
            .decode(data)
            .map_err(|_| Fault::input("proposedUploadMethods.dataInline.objectData is not base64"))?;
        if bytes.len() > QUEUE_INLINE_BYTES_MAX {
            let told = format!("an inline object may have at most {QUEUE_INLINE_BYTES_MAX} bytes");
            return Err(Fault::new(Code::InputTooLarge, told));
        }
        content::store(app, &at.task, at.run, &at.name, &bytes).await?;
        json!({"dataInline": true})
    } else if let Some(put) = methods.get("putUrl") {
        let content_type = put.get("contentType").and_then(Value::as_str);
        let content_type = content_type.unwrap_or(&artifact.content_type);
        let expires = app.now().plus(QUEUE_PUT_URL_LIFE);
        let target = Target { task: at.task, run: at.run, name: at.name };
        json!({"putUrl": {
            "url": content::put_url(app, &target, content_type, expires),
            "expires": expires.iso(),
            "headers": {"Content-Type": content_type, "Content-Length": put.get("contentLength").map(ToString::to_string)},
        }})
    } else {
        json!({})
    };
    Ok(Reply::ok(
        json!({
            "projectId": text(&body, "projectId"), "uploadId": text(&body, "uploadId"),
            "expires": time(&body, "expires").iso(), "uploadMethod": method,
        })
        .to_string(),
    ))
}

pub(crate) async fn finish_upload(app: &App, input: Input) -> Answer {
    let body = input.checked(app, "finish-upload-request", FINISH_UPLOAD, Era::Modern)?;
    let (at, _) = upload_of(app, &input, &body).await?;
    if !content::is_stored(app, &at.task, at.run, &at.name).await {
        return Err(Fault::conflict("No object data was uploaded"));
    }
    if let Some(hashes) = body.get("hashes").and_then(Value::as_object) {
        content::check_hashes(app, &at.task, at.run, &at.name, hashes).await?;
    }
    Ok(Reply::ok("{}".to_owned()))
}
