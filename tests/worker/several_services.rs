//! One worker for several queues.

use std::collections::BTreeMap;
use std::sync::Arc;

use journeyman::handler;
use journeyman::host::clock::Clock;
use journeyman::source::memory::MemoryQueue;
use journeyman::worker::{ExitReason, SourceBinding, Worker, WorkerConfig};
use serde_json::json;
use tokio::sync::mpsc;

use crate::scripted::{COMPLETED, STYLES, Scripted, Told, create, memory_queue, runs};

#[tokio::test(start_paused = true)]
async fn i06_equal_task_ids_of_two_deployments_are_two_tasks() {
    for style in STYLES {
        let folder = tempfile::tempdir().expect("a folder");
        let (sender, mut told) = mpsc::channel(8);
        let queues = [(); 2].map(|()| memory_queue(style));
        let tasks = queues.each_ref().map(|(queue, _)| create(queue, "same", json!({"do": "sleep", "seconds": 60})));
        let feed = |(index, (queue, _)): (usize, &(MemoryQueue, Clock))| SourceBinding {
            name: format!("queue{index}"),
            source: Arc::new(queue.source("worker")),
            handler: handler::erase(Scripted(sender.clone())),
            env: BTreeMap::new(),
        };
        let feeds = queues.iter().enumerate().map(feed).collect();
        let settings =
            WorkerConfig { capacity: 4, work_dir: folder.path().into(), clock: queues[0].1, ..WorkerConfig::default() };
        let worker = Worker::new(settings, feeds);
        let control = worker.control();
        let watch = async {
            for _ in &queues {
                assert!(matches!(told.recv().await, Some(Told::Started(_))));
            }
            control.drain().await;
        };
        runs(worker, ExitReason::Drained, watch).await;
        for ((queue, _), task) in queues.iter().zip(&tasks) {
            assert_eq!(queue.states(task), [COMPLETED], "{style:?}");
        }
    }
}
