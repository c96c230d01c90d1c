//! A worker that runs for hours of virtual time, on a queue in memory.

use journeyman::worker::{ExitReason, Worker, WorkerConfig};
use serde_json::json;
use tokio::sync::mpsc;

use crate::scripted::{self, COMPLETED, STYLES, Told, create, memory_queue, runs};

#[tokio::test(start_paused = true)]
async fn a_task_of_ten_hours_keeps_its_claim() {
    for style in STYLES {
        let folder = tempfile::tempdir().expect("a folder");
        let (queue, clock) = memory_queue(style);
        let task = create(&queue, "long", json!({"do": "sleep", "seconds": 36_000}));
        let (sender, mut told) = mpsc::channel(8);
        let settings =
            WorkerConfig { work_dir: folder.path().into(), clock, drain_deadline: None, ..WorkerConfig::default() };
        let worker = Worker::new(settings, vec![scripted::feed(&queue, sender)]);
        let control = worker.control();
        let counts = control.clone();
        let watch = async {
            assert!(matches!(told.recv().await, Some(Told::Started(_))));
            control.drain().await;
        };
        runs(worker, ExitReason::Drained, watch).await;
        assert_eq!(queue.states(&task), [COMPLETED], "{style:?}");
        let reclaims = counts.counts().reclaims;
        assert!((45..=50).contains(&reclaims), "at two thirds of 20 minutes, up to a twentieth earlier: {reclaims}");
    }
}
