//! A worker that runs for hours of virtual time, on a queue in memory.

use std::sync::Arc;
use std::time::Duration;

use journeyman::domain::id::TaskId;
use journeyman::domain::outcome::Outcome;
use journeyman::host::clock::Clock;
use journeyman::source::memory::{Config as QueueSettings, MemoryQueue, PollStyle, RunEnd, RunState};
use journeyman::worker::{ExitReason, Worker, WorkerConfig};
use serde_json::json;
use tokio::sync::mpsc;

use crate::scripted::{self, Told};

async fn a_task_of_ten_hours(style: PollStyle) {
    let folder = tempfile::tempdir().expect("a folder");
    let clock = Clock::tokio();
    let settings = QueueSettings { style, ..QueueSettings::default() };
    let queue = MemoryQueue::new(settings, Arc::new(move || clock.now()));
    let task = TaskId::parse("long").expect("a task id");
    queue.create(task.clone(), json!({"payload": {"do": "sleep", "seconds": 36_000}})).expect("created");
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
    let (exit, ()) = tokio::join!(worker.run(), watch);
    assert_eq!(exit.expect("it ran"), ExitReason::Drained);
    assert_eq!(queue.states(&task), [RunState::Resolved(RunEnd::Reported(Outcome::Completed))]);
    let reclaims = counts.counts().reclaims;
    assert!((45..=50).contains(&reclaims), "at two thirds of 20 minutes, up to a twentieth earlier: {reclaims}");
}

#[tokio::test(start_paused = true)]
async fn a_task_of_ten_hours_keeps_its_claim_by_claims() {
    a_task_of_ten_hours(PollStyle::Claims { long_poll_wait: Duration::from_secs(20) }).await;
}

#[tokio::test(start_paused = true)]
async fn a_task_of_ten_hours_keeps_its_claim_by_messages() {
    a_task_of_ten_hours(PollStyle::Messages { visibility_timeout: Duration::from_secs(300) }).await;
}
