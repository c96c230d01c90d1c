//! An embedded task queue, and a client of it that has all scopes.

use std::path::Path;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use journeyman::source::taskcluster::{Api, ApiConfig, Credentials};
use journeyman::task::formats::{format_time, new_task_id};
use journeyman_domain::id::{Run, TaskId};
use journeyman_services::queue::{self, Config, Db, RegisteredClient, RunningQueue};
use serde_json::{Value, json};

use crate::support::until;

pub(crate) const CLIENT_ID: &str = "tester";
pub(crate) const TOKEN: &str = "secret-token";

pub(crate) struct TaskQueue {
    pub(crate) service: RunningQueue,
    pub(crate) api: Api,
}

pub(crate) fn client(id: &str, scopes: &[&str]) -> RegisteredClient {
    RegisteredClient {
        client_id: id.to_owned(),
        access_token: TOKEN.to_owned().into(),
        scopes: scopes.iter().map(ToString::to_string).collect(),
    }
}

pub(crate) fn api_config(root_url: &str) -> ApiConfig {
    ApiConfig::new(root_url, Some(Credentials::new(CLIENT_ID, TOKEN.to_owned().into(), None).expect("credentials")))
}

pub(crate) fn api(root_url: &str) -> Api {
    Api::new(api_config(root_url)).expect("usable settings")
}

pub(crate) fn definition(task_queue: &str, payload: &Value) -> Value {
    let now = Timestamp::now();
    json!({
        "taskQueueId": task_queue, "created": format_time(now), "payload": payload, "retries": 40,
        "deadline": format_time(now + SignedDuration::from_hours(24)),
        "metadata": {"name": "n", "description": "d", "owner": "o@example.com", "source": "https://example.com"},
    })
}

/// The content of an artifact.
pub(crate) async fn content(api: &Api, run: &Run, name: &str) -> Vec<u8> {
    let mut download = api.artifact(run, name).await.expect("it was stored");
    let mut content = Vec::new();
    while let Some(piece) = download.next_chunk().await.expect("it can be read") {
        content.extend(piece);
    }
    content
}

/// The states of a task's runs. That of an exception is followed by its reason.
pub(crate) fn states(status: &Value) -> Vec<String> {
    let text = |run: &Value, key| run.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let shown = |run: &Value| match text(run, "state").as_str() {
        "exception" => format!("exception/{}", text(run, "reasonResolved")),
        state => state.to_owned(),
    };
    status["runs"].as_array().expect("it has runs").iter().map(shown).collect()
}

/// The payload of a shell script.
pub(crate) fn shell(script: &str) -> Value {
    json!({"command": [["/bin/sh", "-c", script]], "maxRunTime": 900})
}

impl TaskQueue {
    pub(crate) async fn start(folder: &Path, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::new(Db::Memory, folder.join("artifacts"));
        config.long_poll = Duration::from_millis(500);
        config.clients = vec![client(CLIENT_ID, &["*"])];
        change(&mut config);
        let service = queue::start(config).await.expect("the queue starts");
        let api = api(service.root_url());
        Self { service, api }
    }

    pub(crate) async fn create(&self, task_queue: &str, payload: Value) -> TaskId {
        let task = new_task_id();
        self.api.create_task(&task, definition(task_queue, &payload)).await.expect("created");
        task
    }

    pub(crate) async fn status(&self, task: &TaskId) -> Value {
        self.api.task_status(task).await.expect("a status")
    }

    /// Polls: the queue sends no notification.
    pub(crate) async fn resolved(&self, task: &TaskId) -> Value {
        let mut status = Value::Null;
        until("the task is resolved", async || {
            status = self.status(task).await;
            !["pending", "running"].contains(&status["state"].as_str().expect("a state"))
        })
        .await;
        status
    }

    pub(crate) async fn content(&self, task: &TaskId, run: u32, name: &str) -> Vec<u8> {
        content(&self.api, &Run { task: task.clone(), run }, name).await
    }
}
