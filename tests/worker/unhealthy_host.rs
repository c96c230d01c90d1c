//! A host that cannot run tasks for a while.

use std::time::Duration;

use journeyman::worker::{ExitReason, Worker, WorkerConfig};
use journeyman_domain::id::TaskId;
use serde_json::json;
use tokio::sync::mpsc;

use crate::memory_queue::RunState;
use crate::worker::scripted::{COMPLETED, HANDED_BACK, STYLES, binding, create, memory_queue, runs, settings};

#[tokio::test(start_paused = true)]
async fn i33_a_sick_host_hands_one_task_back_claims_no_other_and_goes_on_once_it_is_mended() {
    let folder = tempfile::tempdir().expect("a folder");
    let (queue, clock) = memory_queue(STYLES[0]);
    let tasks = ["first", "second"].map(|name| create(&queue, name, json!({"do": "leave"})));
    let (sender, _told) = mpsc::channel(8);
    let worker = Worker::new(settings(folder.path(), clock), vec![binding(queue.source("worker"), sender)]);
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
        assert_eq!(states, [vec![HANDED_BACK, RunState::Pending], vec![RunState::Pending]], "one retry, and no more");
        assert_eq!(control.counts().host_faults, 1);
        std::fs::remove_file(&work).expect("removed");
        let done = |task: &TaskId| queue.states(task).last() == Some(&COMPLETED);
        while !tasks.iter().all(done) {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        control.drain().await;
    };
    runs(worker, ExitReason::Drained, watch).await;
}

#[tokio::test(start_paused = true)]
async fn i27_a_worker_whose_folder_is_removed_under_it_finishes_what_runs_begins_nothing_more_and_makes_no_folder() {
    let home = tempfile::tempdir().expect("a folder");
    let work = home.path().join("work");
    let (queue, clock) = memory_queue(STYLES[0]);
    let long = create(&queue, "long", json!({"do": "sleep", "seconds": 300}));
    let (sender, mut told) = mpsc::channel(8);
    let settings = WorkerConfig { capacity: 2, ..settings(&work, clock) };
    let worker = Worker::new(settings, vec![binding(queue.source("worker"), sender)]);
    let control = worker.control();
    let watch = async {
        told.recv().await.expect("it runs");
        std::fs::remove_dir_all(&work).expect("removed");
        let waits = create(&queue, "waits", json!({"do": "leave"}));
        tokio::time::sleep(Duration::from_secs(60)).await;
        let view = control.status().await.expect("it finishes what runs");
        assert!(!work.exists(), "it is the next worker's to make");
        let note = view.note.expect("why it drains").text;
        assert!(note.contains("removed or replaced"), "{note}");
        waits
    };
    let waits = runs(worker, ExitReason::WorkDirLost, watch).await;
    assert_eq!(queue.states(&long), [COMPLETED]);
    assert_eq!(queue.states(&waits).last(), Some(&RunState::Pending), "{:?}", queue.states(&waits));
    assert!(!work.exists());
}
