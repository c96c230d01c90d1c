//! An embedded task queue, and a client of it that has all scopes.

use std::path::Path;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use journeyman::domain::id::TaskId;
use journeyman::queue::{self, Config, Db, RegisteredClient, RunningQueue};
use journeyman::source::taskcluster::formats::{format_time, new_task_id};
use journeyman::source::taskcluster::{Api, ApiConfig, Credentials, Timeouts};
use serde_json::{Value, json};

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

impl TaskQueue {
    pub(crate) async fn start(folder: &Path, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::new(Db::Memory, folder.join("artifacts"));
        config.long_poll = Duration::from_millis(500);
        config.clients = vec![client("tester", &["*"])];
        change(&mut config);
        let service = queue::start(config).await.expect("the queue starts");
        let api = Api::new(ApiConfig {
            root_url: service.root_url().to_owned(),
            credentials: Some(Credentials::new("tester", TOKEN.to_owned().into(), None).expect("credentials")),
            allow_hosts: Vec::new(),
            timeouts: Timeouts::default(),
        });
        Self { service, api: api.expect("usable settings") }
    }

    pub(crate) async fn create(&self, task_queue: &str, payload: Value) -> TaskId {
        let (task, now) = (new_task_id(), Timestamp::now());
        let definition = json!({
            "taskQueueId": task_queue, "created": format_time(now), "payload": payload,
            "deadline": format_time(now + SignedDuration::from_hours(1)),
            "metadata": {"name": "n", "description": "d", "owner": "o@example.com", "source": "https://example.com"},
        });
        self.api.create_task(&task, definition).await.expect("created");
        task
    }
}
