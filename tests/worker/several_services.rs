//! One worker for several queues.

use journeyman::worker::{ExitReason, Worker, WorkerConfig};
use serde_json::json;
use tokio::sync::mpsc;

use crate::worker::scripted::{COMPLETED, STYLES, Told, binding, create, memory_queue, runs, settings};

#[tokio::test(start_paused = true)]
async fn i06_equal_task_ids_of_two_deployments_are_two_tasks() {
    for style in STYLES {
        let folder = tempfile::tempdir().expect("a folder");
        let (sender, mut told) = mpsc::channel(8);
        let queues = [(); 2].map(|()| memory_queue(style));
        let tasks = queues.each_ref().map(|(queue, _)| create(queue, "same", json!({"do": "sleep", "seconds": 60})));
        let bindings = queues.iter().map(|(queue, _)| binding(queue.source("worker"), sender.clone())).collect();
        let settings = WorkerConfig { capacity: 4, ..settings(folder.path(), queues[0].1) };
        let worker = Worker::new(settings, bindings);
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
