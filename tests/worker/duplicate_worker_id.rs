//! Two workers of one name on two hosts, and what the work folder of one says of which claims are its own.

use std::time::Duration;

use journeyman::worker::Command;
use journeyman::worker::status::{Note, WorkerStatus};
use journeyman_domain::refusal::Refusal;
use serde_json::json;
use tokio::sync::watch;

use crate::memory_queue::RunState;
use crate::worker::faults::Mood;
use crate::worker::recovery::{Life, Scene};
use crate::worker::scripted::{COMPLETED, HANDED_BACK, STYLES, Told};

async fn view(life: &Life) -> WorkerStatus {
    life.control.status().await.expect("it lives")
}

/// Looks until the worker has asked for what goes by its name.
async fn others(life: &Life, expected: usize) -> WorkerStatus {
    loop {
        let view = view(life).await;
        if view.sources[0].foreign_claims == expected {
            return view;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_starts_under_the_name_of_one_that_lives_elsewhere_takes_nothing_from_it() {
    let scene = Scene::new(STYLES[0]);
    let task = scene.create_as("long", json!({"do": "sleep", "seconds": 600}));
    let mut first = scene.live();
    first.started().await;
    let folder = tempfile::tempdir().expect("a folder");
    // It starts, and dies, and starts again: nothing in its folder speaks of that claim.
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_secs(60)).await;
        let mut second = scene.live_on("elsewhere", folder.path(), "worker");
        let told = others(&second, 1).await;
        assert!(told.hints.iter().any(|hint| hint.contains("an `id` of its own")), "{:?}", told.hints);
        assert_eq!(scene.queue.states(&task), [RunState::Running]);
        assert!(second.told.try_recv().is_err(), "it was started twice");
        second.dies().await;
    }
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(scene.queue.states(&task), [COMPLETED], "its own worker has finished it");
}

#[tokio::test(start_paused = true)]
async fn a_worker_whose_poll_fails_takes_nothing_that_its_namesake_claimed_before() {
    let mut scene = Scene::new(STYLES[0]);
    scene.capacity = 2;
    let task = scene.create_as("long", json!({"do": "sleep", "seconds": 600}));
    let mut first = scene.live();
    first.started().await;
    let mood = std::mem::replace(&mut scene.mood, watch::channel(Mood::Well).0);
    // What comes now is the second one's.
    first.control.command(Command::Pause { span: None }, Note::of("the test")).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    let folder = tempfile::tempdir().expect("a folder");
    let mut second = scene.live_on("elsewhere", folder.path(), "worker");
    let short = scene.create_as("short", json!({"do": "sleep", "seconds": 300}));
    second.started().await;
    first.control.command(Command::Resume, Note::of("the test")).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    // Each loses a poll, and asks what goes by its name.
    for (life, mood) in [(&first, &mood), (&second, &scene.mood)] {
        mood.send_replace(Mood::Refuses(Refusal::Retry { retry_after: None }));
        while !view(life).await.sources[0].failing {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        mood.send_replace(Mood::Well);
        assert_eq!(others(life, 1).await.claims.len(), 1);
    }
    tokio::time::sleep(Duration::from_secs(900)).await;
    assert_eq!((scene.queue.states(&task), scene.queue.states(&short)), (vec![COMPLETED], vec![COMPLETED]));
    assert!(first.told.try_recv().is_err() && second.told.try_recv().is_err(), "something was started twice");
}

#[tokio::test(start_paused = true)]
async fn what_a_poll_claimed_whose_worker_died_before_it_was_answered_is_handed_back_by_the_next_one() {
    let scene = Scene::new(STYLES[0]);
    scene.mood.send_replace(Mood::LosesReplies);
    let mut first = scene.live();
    // The poll has been under way for a while when it claims.
    tokio::time::sleep(Duration::from_secs(15)).await;
    let task = scene.create_as("lost", json!({"do": "complete"}));
    while scene.queue.states(&task) != [RunState::Running] {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(first.told.try_recv().is_err());
    first.dies().await;
    scene.mood.send_replace(Mood::Well);
    // The next process may start hours later, and may be killed before its first poll.
    scene.mood.send_replace(Mood::Refuses(Refusal::Retry { retry_after: None }));
    let second = scene.live();
    tokio::time::sleep(Duration::from_secs(1)).await;
    second.dies().await;
    tokio::time::sleep(Duration::from_secs(10 * 60)).await;
    scene.mood.send_replace(Mood::Well);
    let mut third = scene.live();
    assert_eq!(third.told.recv().await, Some(Told::Started("lost/1".into())));
    assert_eq!(scene.queue.states(&task)[0], HANDED_BACK);
    assert_eq!(view(&third).await.sources[0].foreign_claims, 0);
}

#[tokio::test(start_paused = true)]
async fn without_its_work_folder_a_worker_leaves_to_expire_what_it_held() {
    let (scene, task) = Scene::orphaned(STYLES[0]).await;
    let folder = tempfile::tempdir().expect("a folder");
    let mut second = scene.live_on("", folder.path(), "worker");
    others(&second, 1).await;
    tokio::time::sleep(Duration::from_secs(10 * 60)).await;
    assert_eq!(scene.queue.states(&task), [RunState::Running]);
    second.started().await;
    assert_eq!(scene.queue.states(&task).len(), 2);
}
