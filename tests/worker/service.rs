//! An embedded queue on a free port, and workers of it.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use journeyman::source::taskcluster::{ArtifactStorage, Config as SourceSettings, Dialect, Taskcluster};
use journeyman::task::formats::{format_time, new_task_id};
use journeyman::worker::{Worker, WorkerConfig};
use journeyman_domain::id::TaskId;
use serde_json::Value;
use tokio::sync::mpsc;

use crate::support::task_queue::{TaskQueue, api_config, definition, states};
use crate::worker::scripted::{Told, binding};

pub struct Service {
    pub queue: TaskQueue,
    pub folder: tempfile::TempDir,
    pub dialect: Dialect,
}

const TASK_QUEUE: &str = "test/worker";

impl Service {
    pub async fn start(dialect: Dialect, claim_timeout: Duration) -> Self {
        Self::with_long_poll(dialect, claim_timeout, Duration::from_millis(500)).await
    }

    pub async fn with_long_poll(dialect: Dialect, claim_timeout: Duration, long_poll: Duration) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let change = |config: &mut journeyman_services::queue::Config| {
            (config.claim_timeout, config.long_poll) = (claim_timeout, long_poll);
        };
        Self { queue: TaskQueue::start(folder.path(), change).await, folder, dialect }
    }

    pub async fn create(&self, payload: Value) -> TaskId {
        self.queue.create(TASK_QUEUE, payload).await
    }

    /// The deadline of the task comes after this time.
    pub async fn create_until(&self, payload: Value, deadline: SignedDuration) -> TaskId {
        let task = new_task_id();
        let mut definition = definition(TASK_QUEUE, &payload);
        definition["deadline"] = format_time(Timestamp::now() + deadline).into();
        self.queue.api.create_task(&task, definition).await.expect("created");
        task
    }

    pub async fn states(&self, task: &TaskId) -> Vec<String> {
        states(&self.queue.status(task).await)
    }

    /// An artifact of the first run.
    pub async fn text(&self, task: &TaskId, name: &str) -> String {
        String::from_utf8(self.queue.content(task, 0, name).await).expect("text")
    }

    pub fn worker(&self, change: impl FnOnce(&mut WorkerConfig)) -> (Worker, mpsc::Receiver<Told>) {
        let (sender, told) = mpsc::channel(64);
        let source = Taskcluster::new(SourceSettings {
            api: api_config(self.queue.service.root_url()),
            dialect: self.dialect,
            task_queue: TASK_QUEUE.into(),
            worker_group: "group".into(),
            worker_id: "worker".into(),
            artifact_storage: ArtifactStorage::S3,
        });
        let mut settings = WorkerConfig {
            capacity: 8,
            work_dir: self.folder.path().join("worker"),
            termination_grace: Duration::from_secs(2),
            poll_interval: Duration::from_millis(50),
            ..WorkerConfig::default()
        };
        change(&mut settings);
        (Worker::new(settings, vec![binding(source.expect("usable settings"), sender)]), told)
    }
}
