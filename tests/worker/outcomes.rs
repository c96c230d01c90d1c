//! The outcomes of tasks, end to end, against the embedded queue in both dialects.

use std::time::Duration;

use journeyman::handler::CancelCause;
use journeyman::source::taskcluster::Dialect;
use journeyman::worker::{Command, ExitReason, Note};
use serde_json::json;

use crate::worker::scripted::{Told, drained, runs};
use crate::worker::service::Service;

const LONG: Duration = Duration::from_secs(1200);

async fn every_outcome(dialect: Dialect) {
    let service = Service::start(dialect, LONG).await;
    let completes = service.create(json!({"do": "leave"})).await;
    let fails = service.create(json!({"do": "fail"})).await;
    let panics = service.create(json!({"do": "panic"})).await;
    let again = service.create(json!({"do": "retry-later"})).await;
    let malformed = service.create(json!({"do": "dance", "wildly": 1})).await;
    let forgets = service.create(json!({"do": "forget"})).await;
    let vanishes = service.create(json!({"do": "vanish"})).await;
    let (worker, mut told) = service.worker(|_| {});
    let counts = worker.control();
    let watch = async {
        // Six that run, and the second run of the one that asks for it; then drain.
        for _ in 0..7 {
            assert!(matches!(told.recv().await, Some(Told::Started(_))));
        }
    };
    drained(worker, watch).await;
    assert_eq!(service.states(&completes).await, ["completed"]);
    assert_eq!(service.states(&fails).await, ["failed"]);
    assert_eq!(service.states(&panics).await, ["exception/internal-error"]);
    let states = service.states(&again).await;
    assert_eq!(states[..2], ["exception/intermittent-task", "exception/intermittent-task"], "{states:?}");
    assert_eq!(service.states(&malformed).await, ["exception/malformed-payload"]);
    assert_eq!(service.text(&completes, "public/out.txt").await, "made by the task");
    assert!(service.text(&completes, "public/logs/live_backing.log").await.contains("hello from the task"));
    assert!(service.text(&completes, "public/logs/live.log").await.contains("hello from the task"));
    let log = service.text(&malformed, "public/logs/live_backing.log").await;
    assert!(log.contains("malformed") && log.contains("no task code was run"), "{log}");
    for task in [&forgets, &vanishes] {
        assert_eq!(service.states(task).await, ["failed"]);
        let log = service.text(task, "public/logs/live_backing.log").await;
        assert!(log.contains("out.txt: no such file"), "{log}");
        assert!(log.trim_end().ends_with("without all of its artifacts the task is not completed"), "{log}");
    }
    let counts = counts.counts();
    assert_eq!(
        (counts.sources.outcomes.completed, counts.sources.outcomes.failed, counts.sources.outcomes.lost),
        (1, 3, 0),
        "{counts:?}"
    );
}

#[tokio::test]
async fn every_outcome_is_reported_once() {
    every_outcome(Dialect::ClaimWork).await;
    every_outcome(Dialect::Azure).await;
}

#[tokio::test]
async fn b14_the_log_of_a_canceled_task_is_stored_whether_a_reclaim_or_the_status_poll_saw_the_cancel() {
    for status_poll_interval in [None, Some(Duration::from_millis(50))] {
        let service = Service::start(Dialect::ClaimWork, Duration::from_secs(3)).await;
        let task = service.create(json!({"do": "wait"})).await;
        let (worker, mut told) = service.worker(|settings| settings.status_poll_interval = status_poll_interval);
        let counts = worker.control();
        let watch = async {
            assert!(matches!(told.recv().await, Some(Told::Started(_))));
            service.queue.api.cancel_task(&task).await.expect("canceled");
            assert!(matches!(told.recv().await, Some(Told::Canceled(_, CancelCause::ClaimLost(_)))));
        };
        drained(worker, watch).await;
        let log = service.text(&task, "public/logs/live_backing.log").await;
        assert!(log.contains("the task was canceled"), "{status_poll_interval:?}: {log}");
        let outcomes = counts.counts().sources.outcomes;
        assert_eq!((outcomes.canceled, outcomes.superseded, outcomes.lost), (1, 0, 0), "{status_poll_interval:?}");
    }
}

#[tokio::test]
async fn b6_the_payload_of_a_task_ends_at_its_deadline() {
    let service = Service::start(Dialect::ClaimWork, LONG).await;
    let task = service.create_until(json!({"do": "wait"}), jiff::SignedDuration::from_secs(2)).await;
    let (worker, mut told) = service.worker(|_| {});
    let counts = worker.control();
    let watch = async {
        assert!(matches!(told.recv().await, Some(Told::Started(_))));
        assert!(matches!(told.recv().await, Some(Told::Canceled(_, CancelCause::ClaimLost(_)))));
    };
    drained(worker, watch).await;
    assert_eq!(service.states(&task).await, ["running"], "nothing is reported: the queue resolves it some time later");
    let log = service.text(&task, "public/logs/live_backing.log").await;
    assert!(log.contains("the task's deadline has passed"), "{log}");
    let outcomes = counts.counts().sources.outcomes;
    assert_eq!((outcomes.deadline_exceeded, outcomes.lost), (1, 0));
}

#[tokio::test]
async fn a_task_ends_before_its_lease_when_the_queue_is_gone() {
    let service = Service::start(Dialect::ClaimWork, Duration::from_secs(2)).await;
    service.create(json!({"do": "wait"})).await;
    let (worker, mut told) = service.worker(|_| {});
    let watch = async {
        assert!(matches!(told.recv().await, Some(Told::Started(_))));
        service.queue.service.stop().await;
        told.recv().await
    };
    let order = drained(worker, watch).await;
    assert!(matches!(order, Some(Told::Canceled(_, CancelCause::ClaimLost(_)))), "{order:?}");
}

#[tokio::test]
async fn b12_b13_an_idle_worker_closes_its_poll_when_it_stops_and_claims_nothing_more() {
    for (command, exit) in [
        (Command::Drain { within: None }, ExitReason::Drained),
        (Command::Terminate { deadline: None }, ExitReason::HostTerminating),
    ] {
        let service = Service::with_long_poll(Dialect::ClaimWork, LONG, Duration::from_secs(60)).await;
        let (worker, _told) = service.worker(|_| {});
        let control = worker.control();
        let watch = async {
            while service.queue.service.long_polls() == 0 {
                tokio::task::yield_now().await;
            }
            control.command(command, Note::of("the test")).await;
            while service.queue.service.long_polls() > 0 {
                tokio::task::yield_now().await;
            }
            service.create(json!({"do": "complete"})).await
        };
        let stopped = tokio::time::timeout(Duration::from_secs(20), runs(worker, exit, watch)).await;
        let task = stopped.expect("it does not wait for the poll");
        assert_eq!(service.states(&task).await, ["pending"], "{command:?}: no retry is burned");
    }
}
