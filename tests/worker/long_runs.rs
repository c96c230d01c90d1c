//! A worker that runs for hours of virtual time, on a queue in memory.

use journeyman::worker::{ExitReason, Worker};
use serde_json::json;
use tokio::sync::mpsc;

use crate::scripted::{COMPLETED, STYLES, Told, binding, create, memory_queue, runs, settings};

#[tokio::test(start_paused = true)]
async fn a_task_of_ten_hours_keeps_its_claim() {
    for style in STYLES {
        let folder = tempfile::tempdir().expect("a folder");
        let (queue, clock) = memory_queue(style);
        let task = create(&queue, "long", json!({"do": "sleep", "seconds": 36_000}));
        let (sender, mut told) = mpsc::channel(8);
        let worker = Worker::new(settings(folder.path(), clock), vec![binding(queue.source("worker"), sender)]);
        let control = worker.control();
        let counts = control.clone();
        let watch = async {
            assert!(matches!(told.recv().await, Some(Told::Started(_))));
            control.drain().await;
        };
        runs(worker, ExitReason::Drained, watch).await;
        assert_eq!(queue.states(&task), [COMPLETED], "{style:?}");
        let reclaims = counts.counts().sources.reclaims;
        assert!((45..=50).contains(&reclaims), "at two thirds of 20 minutes, up to a twentieth earlier: {reclaims}");
    }
}
