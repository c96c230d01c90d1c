//! A host that cannot run tasks for a while.

use std::sync::Arc;
use std::time::Duration;

use journeyman::domain::id::TaskId;
use journeyman::domain::outcome::{ExceptionReason, Outcome};
use journeyman::host::clock::Clock;
use journeyman::source::memory::{Config as QueueSettings, MemoryQueue, RunEnd, RunState};
use journeyman::worker::{ExitReason, Worker, WorkerConfig};
use serde_json::json;
use tokio::sync::mpsc;

use crate::scripted;

#[tokio::test(start_paused = true)]
async fn i33_a_sick_host_hands_one_task_back_claims_no_other_and_goes_on_once_it_is_mended() {
    let folder = tempfile::tempdir().expect("a folder");
    let clock = Clock::tokio();
    let queue = MemoryQueue::new(QueueSettings::default(), Arc::new(move || clock.now()));
    let tasks = ["first", "second"].map(|name| TaskId::parse(name).expect("a task id"));
    for task in &tasks {
        queue.create(task.clone(), json!({"payload": {"do": "leave"}})).expect("created");
    }
    let (sender, _told) = mpsc::channel(8);
    let settings =
        WorkerConfig { work_dir: folder.path().into(), clock, drain_deadline: None, ..WorkerConfig::default() };
    let worker = Worker::new(settings, vec![scripted::feed(&queue, sender)]);
    let control = worker.control();
    let work = folder.path().join("tasks");
    let watch = async {
        // Everything a task needs of the disk is gone as soon as the worker has begun.
        while !work.is_dir() {
            tokio::task::yield_now().await;
        }
        std::fs::remove_dir(&work).expect("it is empty");
        std::fs::write(&work, "in the way").expect("written");
        tokio::time::sleep(Duration::from_secs(600)).await;
        let states: Vec<_> = tasks.iter().map(|task| queue.states(task)).collect();
        let handed_back = RunState::Resolved(RunEnd::Reported(Outcome::Exception(ExceptionReason::WorkerShutdown)));
        assert_eq!(states, [vec![handed_back, RunState::Pending], vec![RunState::Pending]], "one retry, and no more");
        assert_eq!(control.counts().host_faults, 1);
        std::fs::remove_file(&work).expect("removed");
        let done = |task: &TaskId| {
            queue.states(task).last() == Some(&RunState::Resolved(RunEnd::Reported(Outcome::Completed)))
        };
        while !tasks.iter().all(done) {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        control.drain().await;
    };
    let (exit, ()) = tokio::join!(worker.run(), watch);
    assert_eq!(exit.expect("it ran"), ExitReason::Drained);
}

#[tokio::test(start_paused = true)]
async fn i27_a_worker_whose_folder_is_removed_under_it_finishes_what_runs_begins_nothing_more_and_makes_no_folder() {
    let home = tempfile::tempdir().expect("a folder");
    let work = home.path().join("work");
    let clock = Clock::tokio();
    let queue = MemoryQueue::new(QueueSettings::default(), Arc::new(move || clock.now()));
    let [runs, waits] = ["runs", "waits"].map(|name| TaskId::parse(name).expect("a task id"));
    let (sender, mut told) = mpsc::channel(8);
    let settings =
        WorkerConfig { capacity: 2, work_dir: work.clone(), clock, drain_deadline: None, ..WorkerConfig::default() };
    let worker = Worker::new(settings, vec![scripted::feed(&queue, sender)]);
    let control = worker.control();
    queue.create(runs.clone(), json!({"payload": {"do": "sleep", "seconds": 300}})).expect("created");
    let watch = async {
        told.recv().await.expect("it runs");
        std::fs::remove_dir_all(&work).expect("removed");
        queue.create(waits.clone(), json!({"payload": {"do": "leave"}})).expect("created");
        tokio::time::sleep(Duration::from_secs(60)).await;
        let view = control.status().await.expect("it finishes what runs");
        assert!(!work.exists(), "it is the next worker's to make");
        let note = view.note.expect("why it drains").text;
        assert!(note.contains("removed or replaced"), "{note}");
    };
    let (exit, ()) = tokio::join!(worker.run(), watch);
    assert_eq!(exit.expect("it ran"), ExitReason::WorkDirLost);
    let completed = RunState::Resolved(RunEnd::Reported(Outcome::Completed));
    assert_eq!(queue.states(&runs), [completed]);
    assert_eq!(queue.states(&waits).last(), Some(&RunState::Pending), "{:?}", queue.states(&waits));
    assert!(!work.exists());
}
