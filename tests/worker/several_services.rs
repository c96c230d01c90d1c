//! One worker for several queues.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use journeyman::domain::id::TaskId;
use journeyman::domain::outcome::Outcome;
use journeyman::handler;
use journeyman::host::clock::Clock;
use journeyman::source::memory::{Config as QueueSettings, MemoryQueue, PollStyle, RunEnd, RunState};
use journeyman::worker::{ExitReason, SourceBinding, Worker, WorkerConfig};
use serde_json::json;
use tokio::sync::mpsc;

use crate::scripted::{Scripted, Told};

async fn equal_task_ids(style: PollStyle) {
    let folder = tempfile::tempdir().expect("a folder");
    let clock = Clock::tokio();
    let (sender, mut told) = mpsc::channel(8);
    let settings = QueueSettings { style, ..QueueSettings::default() };
    let queues = [(); 2].map(|()| MemoryQueue::new(settings, Arc::new(move || clock.now())));
    let task = TaskId::parse("same").expect("a task id");
    for queue in &queues {
        queue.create(task.clone(), json!({"payload": {"do": "sleep", "seconds": 60}})).expect("created");
    }
    let feed = |(index, queue): (usize, &MemoryQueue)| SourceBinding {
        name: format!("queue{index}"),
        source: Arc::new(queue.source("worker")),
        handler: handler::erase(Scripted(sender.clone())),
        env: BTreeMap::new(),
    };
    let feeds = queues.iter().enumerate().map(feed).collect();
    let settings = WorkerConfig { capacity: 4, work_dir: folder.path().into(), clock, ..WorkerConfig::default() };
    let worker = Worker::new(settings, feeds);
    let control = worker.control();
    let watch = async {
        for _ in &queues {
            assert!(matches!(told.recv().await, Some(Told::Started(_))));
        }
        control.drain().await;
    };
    let (exit, ()) = tokio::join!(worker.run(), watch);
    assert_eq!(exit.expect("it ran"), ExitReason::Drained);
    for queue in &queues {
        assert_eq!(queue.states(&task), [RunState::Resolved(RunEnd::Reported(Outcome::Completed))]);
    }
}

#[tokio::test(start_paused = true)]
async fn i06_equal_task_ids_of_two_deployments_are_two_tasks_by_claims() {
    equal_task_ids(PollStyle::Claims { long_poll_wait: Duration::from_secs(20) }).await;
}

#[tokio::test(start_paused = true)]
async fn i06_equal_task_ids_of_two_deployments_are_two_tasks_by_messages() {
    equal_task_ids(PollStyle::Messages { visibility_timeout: Duration::from_secs(300) }).await;
}
