//! A worker that runs for hours of virtual time, on a queue in memory.

use std::sync::Arc;
use std::time::Duration;

use journeyman::worker::{ExitReason, Worker};
use journeyman_domain::id::TaskId;
use journeyman_platform::host::clock::Clock;
use serde_json::json;
use tokio::sync::mpsc;

use crate::memory_queue::{Config, MemoryQueue};
use crate::worker::scripted::{COMPLETED, STYLES, Told, binding, create, memory_queue, runs, settings};

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

#[tokio::test(start_paused = true)]
async fn b1_a_task_claimed_late_in_a_long_poll_runs_where_a_poll_may_outlast_a_claim() {
    let (folder, clock) = (tempfile::tempdir().expect("a folder"), Clock::tokio());
    let config = Config { lease: Duration::from_secs(15), ..Config::default() };
    let queue = MemoryQueue::new(config, Arc::new(move || clock.now()));
    let (sender, mut told) = mpsc::channel(8);
    let worker = Worker::new(settings(folder.path(), clock), vec![binding(queue.source("worker"), sender)]);
    let control = worker.control();
    let watch = async {
        // The first poll was sent at 0 s and is held for up to 20 s.
        tokio::time::sleep(Duration::from_secs(18)).await;
        let task = create(&queue, "late", json!({"do": "complete"}));
        assert_eq!(told.recv().await, Some(Told::Started("late/0".to_owned())));
        control.drain().await;
        task
    };
    let task = runs(worker, ExitReason::Drained, watch).await;
    assert_eq!(queue.states(&task), [COMPLETED], "no run was lost");
}

#[tokio::test(start_paused = true)]
async fn b7_a_task_without_retries_that_a_poll_claims_during_a_drain_runs() {
    let (folder, (queue, clock)) = (tempfile::tempdir().expect("a folder"), memory_queue(STYLES[0]));
    let (sender, mut told) = mpsc::channel(8);
    let worker = Worker::new(settings(folder.path(), clock), vec![binding(queue.source("worker"), sender)]);
    let control = worker.control();
    let watch = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        control.drain().await;
        let task = TaskId::parse("last").expect("a task id");
        queue.create(task.clone(), json!({"retries": 0, "payload": {"do": "complete"}})).expect("created");
        assert!(matches!(told.recv().await, Some(Told::Started(_))));
        task
    };
    let task = runs(worker, ExitReason::Drained, watch).await;
    assert_eq!(queue.states(&task), [COMPLETED]);
}
