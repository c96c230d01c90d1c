//! An embedded queue on a free port, and workers of it.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use journeyman::queue::{self, Db, RegisteredClient};
use journeyman::source::taskcluster::{
    Api, ApiConfig, ArtifactStorage, Config as SourceSettings, Credentials, Dialect, Taskcluster,
};
use journeyman::worker::{Worker, WorkerConfig};
use journeyman_domain::id::{Run, TaskId};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::worker::scripted::{Told, binding};

pub struct Service {
    pub queue: queue::RunningQueue,
    pub folder: tempfile::TempDir,
    pub dialect: Dialect,
}

pub const TASK_QUEUE: &str = "test/worker";

impl Service {
    pub async fn start(dialect: Dialect, claim_timeout: Duration) -> Self {
        Self::with_long_poll(dialect, claim_timeout, Duration::from_millis(500)).await
    }

    pub async fn with_long_poll(dialect: Dialect, claim_timeout: Duration, long_poll: Duration) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut settings = queue::Config::new(Db::Memory, folder.path().join("artifacts"));
        settings.claim_timeout = claim_timeout;
        settings.long_poll = long_poll;
        settings.clients = vec![RegisteredClient {
            client_id: "tester".into(),
            access_token: "secret-token".to_owned().into(),
            scopes: vec!["*".into()],
        }];
        let queue = queue::start(settings).await.expect("the queue starts");
        Self { queue, folder, dialect }
    }

    pub fn api(&self) -> Api {
        Api::new(self.settings()).expect("usable settings")
    }

    fn settings(&self) -> ApiConfig {
        let token = "secret-token".to_owned().into();
        ApiConfig::new(self.queue.root_url(), Some(Credentials::new("tester", token, None).expect("credentials")))
    }

    pub async fn create(&self, name: &str, payload: Value) -> TaskId {
        self.create_until(name, payload, SignedDuration::from_hours(1)).await
    }

    /// The deadline of the task comes after this time.
    pub async fn create_until(&self, name: &str, payload: Value, deadline: SignedDuration) -> TaskId {
        // A slugid whose first eight characters are the name.
        let id = format!("{name:A<8.8}QACAAAAAAAAAAA");
        let task = TaskId::parse(&id).expect("a task id");
        let now = Timestamp::now();
        let later = now.saturating_add(deadline).expect("a time");
        let definition = json!({
            "taskQueueId": TASK_QUEUE, "created": now.to_string(), "deadline": later.to_string(),
            "payload": payload, "metadata": {"name": name, "description": "d", "owner": "o@example.com", "source": "https://example.com"},
        });
        self.api().create_task(&task, definition).await.expect("created");
        task
    }

    pub async fn states(&self, task: &TaskId) -> Vec<String> {
        let status = self.api().task_status(task).await.expect("a status");
        let word = |run: &Value, key: &str| run.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let runs = status["runs"].as_array().expect("runs");
        runs.iter()
            .map(|run| match word(run, "reasonResolved") {
                reason if word(run, "state") == "exception" => reason,
                _ => word(run, "state"),
            })
            .collect()
    }

    pub async fn text(&self, task: &TaskId, run: u32, name: &str) -> String {
        let run = Run { task: task.clone(), run };
        let mut download = self.api().artifact(&run, name).await.expect("an artifact");
        let mut bytes = Vec::new();
        while let Some(piece) = download.next_chunk().await.expect("a piece") {
            bytes.extend(piece);
        }
        String::from_utf8(bytes).expect("text")
    }

    pub fn worker(&self, id: &str, change: impl FnOnce(&mut WorkerConfig)) -> (Worker, mpsc::Receiver<Told>) {
        let (sender, told) = mpsc::channel(64);
        let source = Taskcluster::new(SourceSettings {
            api: self.settings(),
            dialect: self.dialect,
            task_queue: TASK_QUEUE.into(),
            worker_group: "group".into(),
            worker_id: id.into(),
            artifact_storage: ArtifactStorage::S3,
        });
        let mut settings = WorkerConfig {
            capacity: 8,
            work_dir: self.folder.path().join(id),
            termination_grace: Duration::from_secs(2),
            poll_interval: Duration::from_millis(50),
            ..WorkerConfig::default()
        };
        change(&mut settings);
        (Worker::new(settings, vec![binding(source.expect("usable settings"), sender)]), told)
    }
}
