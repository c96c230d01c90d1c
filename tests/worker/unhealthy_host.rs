//! A host that cannot run tasks for a while.

use std::time::Duration;

use crate::memory_queue::RunState;
use journeyman::worker::ExitReason;
use journeyman_domain::id::TaskId;
use serde_json::json;

use crate::worker::faults::{Mood, Scene};
use crate::worker::scripted::{COMPLETED, HANDED_BACK, STYLES, create, drained, runs};

#[tokio::test(start_paused = true)]
async fn i33_a_sick_host_hands_one_task_back_claims_no_other_and_goes_on_once_it_is_mended() {
    let scene = Scene::new(Mood::Well);
    let (queue, work) = (&scene.queue, scene.folder.path().join("tasks"));
    let tasks = ["first", "second"].map(|name| create(queue, name, json!({"do": "leave"})));
    let control = scene.worker.control();
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
    };
    drained(scene.worker, watch).await;
}

#[tokio::test(start_paused = true)]
async fn i27_a_worker_whose_folder_is_removed_under_it_finishes_what_runs_begins_nothing_more_and_makes_no_folder() {
    let mut scene = Scene::with(Mood::Well, STYLES[0], 2);
    let (queue, work) = (&scene.queue, scene.folder.path());
    let long = create(queue, "long", json!({"do": "sleep", "seconds": 300}));
    let control = scene.worker.control();
    let watch = async {
        scene.told.recv().await.expect("it runs");
        std::fs::remove_dir_all(work).expect("removed");
        let waits = create(queue, "waits", json!({"do": "leave"}));
        tokio::time::sleep(Duration::from_secs(60)).await;
        let view = control.status().await.expect("it finishes what runs");
        assert!(!work.exists(), "it is the next worker's to make");
        let note = view.note.expect("why it drains").text;
        assert!(note.contains("removed or replaced"), "{note}");
        waits
    };
    let waits = runs(scene.worker, ExitReason::WorkDirLost, watch).await;
    assert_eq!(queue.states(&long), [COMPLETED]);
    assert_eq!(queue.states(&waits).last(), Some(&RunState::Pending), "{:?}", queue.states(&waits));
    assert!(!work.exists());
}
