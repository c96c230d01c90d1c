//! Payloads over each property of the schemas of generic-worker and docker-worker: how each ends, and what its log says.
//!
//! A line of the fixture has what differs from a payload that completes.

use std::sync::Arc;

use axum::Router;
use axum::routing::get;
use journeyman::handler::containers::config::{ContainersConfig, Permission};
use journeyman::handler::containers::with_containers;
use journeyman_domain::id::TaskId;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::payloads::chain_of_trust::signing_key;
use crate::payloads::containers::{IMAGE, handler, saved, tools};
use crate::payloads::deployment::{Deployment, tar};
use crate::payloads::switches::stored;
use crate::payloads::users::as_users;

const TABLE: &str = include_str!("../../fixtures/taskcluster/payloads.jsonl");
const SLOTS: u32 = 8;

/// Fills in times: a task and its artifacts expire with its deadline, or half a second later.
fn with_times(row: &Value, definition: &mut Value) -> String {
    definition["expires"] = definition["deadline"].clone();
    let expires: jiff::Timestamp = definition["expires"].as_str().expect("text").parse().expect("a time");
    let later = expires + jiff::SignedDuration::from_millis(500);
    row["payload"].to_string().replace("$EXPIRES", &expires.to_string()).replace("$LATER", &later.to_string())
}

#[tokio::test]
async fn each_payload_ends_as_the_table_says() {
    let deployment = Deployment::start().await;
    let rows: Vec<Value> = TABLE.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let mut tasks = Vec::new();
    for row in &rows {
        let change = |definition: &mut Value| {
            let keys: Value = serde_json::from_str(&with_times(row, definition)).expect("JSON");
            let plain = json!({ "command": [["sh", "-c", "true"]], "maxRunTime": 60 });
            definition["payload"] = if row["bare"] == true { json!({}) } else { plain };
            let payload = definition["payload"].as_object_mut().expect("an object");
            payload.extend(keys.as_object().expect("an object").clone());
            definition["scopes"] = row.get("scopes").cloned().unwrap_or_else(|| json!([]));
        };
        tasks.push(deployment.create("", json!({}), change).await);
    }
    let handler = with_containers(deployment.handler(), None, "command");
    let ended = deployment.run_with(handler, SLOTS, &tasks.iter().collect::<Vec<_>>()).await;
    let mut wrong = String::new();
    for (row, ended) in rows.iter().zip(&ended) {
        let says = row["says"].as_str().unwrap_or_default();
        if ended.states != [row["state"].as_str().expect("text")] || !ended.log.contains(says) {
            wrong += &format!("{row}\n{:?}\n{}\n\n", ended.states, ended.log);
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

const DEFINITIONS: &str = include_str!("../../fixtures/taskcluster/definitions.jsonl");

/// The shapes of public definitions of tasks, with short commands in the place of theirs. `of` says where each is from.
#[tokio::test]
async fn public_definitions_run_as_they_are() {
    let mut deployment = Deployment::start().await;
    let rows: Vec<Value> = DEFINITIONS.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let archive = tar("-cz", &[("go/f", "go"), ("f", "content")]);
    let sha256 = hex::encode(Sha256::digest(&archive));
    let run_task = || async { "#!/bin/sh\necho run-task\n" };
    let files = Router::new().route("/go.tar.gz", get(|| async { archive })).route("/run-task", get(run_task));
    let url = deployment.serve(files).await;
    let made = dependency(&deployment).await;
    let containers = tools().first().map(|tool| {
        let allow = vec![
            Permission::Privileged,
            Permission::DisableSeccomp,
            Permission::AllowPtrace,
            Permission::HostSharedMemory,
        ];
        handler(&deployment, ContainersConfig { allow, ..tool.config() })
    });
    let as_worker = containers.clone().unwrap_or_else(|| deployment.handler());
    let as_user = as_users(&deployment, deployment.signing_handler(signing_key()), &["nobody"]);
    let mut tasks = Vec::new();
    for row in &rows {
        let is_user = row["users"] == true;
        if is_user && as_user.is_none() || row["payload"].get("image").is_some() && containers.is_none() {
            eprintln!("NOT TESTED: {}: no users or no containers here", row["name"]);
            continue;
        }
        let change = |definition: &mut Value| {
            let text = with_times(row, definition).replace("$URL", &url);
            let text = text.replace("$SHA", &sha256).replace("$DEP", made.as_str()).replace("$IMAGE", IMAGE);
            definition["payload"] = serde_json::from_str(&text).expect("JSON");
            definition["scopes"] = row["scopes"].clone();
            definition["dependencies"] = json!([made.as_str()]);
        };
        if let Some(namespace) = row["index"].as_str() {
            deployment.answers.lock().index.insert(namespace.to_owned(), made.to_string());
        }
        let task = deployment.create("", json!({}), change).await;
        let handler = as_user.clone().filter(|_| is_user).unwrap_or_else(|| Arc::clone(&as_worker));
        let ended = deployment.run_with(handler, 1, &[&task]).await.remove(0);
        tasks.push((row, task, ended));
    }
    let mut wrong = String::new();
    for (row, task, ended) in &tasks {
        let says = row["says"].as_str().unwrap_or_default();
        if ended.states != [row["state"].as_str().expect("text")] || !ended.log.contains(says) {
            wrong += &format!("{row}\n{:?}\n{}\n\n", ended.states, ended.log);
            continue;
        }
        for name in row["artifacts"].as_array().into_iter().flatten() {
            deployment.queue.content(task, 0, name.as_str().expect("text")).await;
        }
        for (name, encoding) in row["encodings"].as_object().into_iter().flatten() {
            assert_eq!(stored(&deployment, task.as_str(), name).await.1.as_deref(), encoding.as_str(), "{name}");
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// A task whose artifacts others mount.
async fn dependency(deployment: &Deployment) -> TaskId {
    let folder = deployment.folder.path();
    std::fs::write(folder.join("git.tar.zst"), tar("-cIzstd", &[("f", "content")])).expect("written");
    std::fs::write(folder.join("msys2.tar.bz2"), tar("-cj", &[("f", "content")])).expect("written");
    let image = match tools().first() {
        Some(tool) => saved(tool, folder, "localhost/of-table").await,
        None => folder.join("git.tar.zst"),
    };
    let names = ["git.tar.zst", "msys2.tar.bz2", "image.zst"];
    let artifacts = names.map(|name| json!({ "type": "file", "path": name, "name": format!("public/{name}") }));
    let script =
        format!("cp {0}/git.tar.zst {0}/msys2.tar.bz2 .; zstd -q {1} -o image.zst", folder.display(), image.display());
    let made = deployment.create(&script, json!({ "artifacts": artifacts }), |_| {}).await;
    deployment.run(&[&made]).await.remove(0).completed();
    made
}
