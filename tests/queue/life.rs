//! The life cycle of a task: create, claim, reclaim, report, cancel, rerun.

use std::sync::Arc;
use std::time::Duration;

use journeyman_services::queue::RunningQueue;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;

use super::client::{Api, iso};
use super::test_queue::TestQueue;

#[tokio::test]
async fn create_task_is_idempotent_for_the_same_definition() {
    let server = TestQueue::new().await;
    let body = server.api.definition("p/w", json!({}));
    let task = super::client::slugid();
    let path = format!("task/{task}");
    let first = server.api.queue("PUT", &path, Some(&body)).await.expect(200);
    let again = server.api.queue("PUT", &path, Some(&body)).await.expect(200);
    assert_eq!(first, again);
    assert_eq!(server.api.claim_work("p/w", "w1", 4).await.len(), 1);
    let other = server.api.definition("p/w", json!({"retries": 3}));
    assert_eq!(server.api.queue("PUT", &path, Some(&other)).await.refusal(409).0, "RequestConflict");
}

#[tokio::test]
async fn tasks_are_claimed_by_priority_and_then_by_age() {
    let server = TestQueue::new().await;
    let mut tasks = Vec::new();
    for priority in ["low", "highest", "low", "very-low", "highest"] {
        tasks.push(server.api.create("p/w", json!({"priority": priority})).await);
        server.advance(1).await;
    }
    let claims = server.api.claim_work("p/w", "w1", 4).await;
    let order: Vec<_> = claims.iter().map(|claim| claim["status"]["taskId"].as_str().unwrap()).collect();
    assert_eq!(order, [&tasks[1], &tasks[4], &tasks[0], &tasks[2]]);
}

#[tokio::test]
async fn each_task_goes_to_one_of_many_long_polls() {
    let server = TestQueue::with(|settings| settings.long_poll = Duration::from_secs(600)).await;
    let api = Arc::new(server.api.clone());
    let mut waiting = tokio::task::JoinSet::new();
    for worker in 0..16 {
        let api = Arc::clone(&api);
        waiting.spawn(async move { api.claim_work("p/w", &format!("w{worker}"), 1).await });
    }
    let mut tasks = Vec::new();
    for _ in 0..16 {
        tasks.push(api.create("p/w", json!({})).await);
    }
    let mut got = Vec::new();
    while let Some(claims) = waiting.join_next().await {
        let claims = claims.unwrap();
        assert_eq!(claims.len(), 1);
        got.push(claims[0]["status"]["taskId"].as_str().unwrap().to_owned());
    }
    got.sort();
    tasks.sort();
    assert_eq!(got, tasks);
}

#[tokio::test]
async fn a_stopping_queue_answers_long_polls() {
    let server = TestQueue::with(|settings| settings.long_poll = Duration::from_secs(600)).await;
    let api = server.api.clone();
    let waits = async move { api.claim_work("p/w", "w1", 1).await };
    let running = server.running;
    let stops = async move {
        wait_for_long_poll(&running).await;
        running.stop().await;
    };
    let (claims, ()) = tokio::join!(waits, stops);
    assert_eq!(claims, Vec::<Value>::new());
}

/// Returns once the queue has read a request for work.
async fn wait_for_long_poll(running: &RunningQueue) {
    while running.long_polls() == 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_dropped_long_poll_leaves_no_claim() {
    let server = TestQueue::with(|settings| settings.long_poll = Duration::from_secs(600)).await;
    let body = json!({"workerGroup": "wg", "workerId": "gone"}).to_string();
    let path = "/api/queue/v1/claim-work/p%2Fw";
    let header = server.api.header("POST", path, None);
    let host = server.api.root.trim_start_matches("http://");
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nauthorization: {header}\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = tokio::net::TcpStream::connect(server.running.address()).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    wait_for_long_poll(&server.running).await;
    drop(stream);
    while server.running.long_polls() > 0 {
        tokio::task::yield_now().await;
    }
    let task = server.api.create("p/w", json!({})).await;
    let claims = server.api.claim_work("p/w", "w2", 1).await;
    assert_eq!(claims[0]["status"]["taskId"], task.as_str());
    assert_eq!(claims[0]["runId"], 0);
    assert_eq!(claims[0]["status"]["runs"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn an_expired_claim_is_retried() {
    let server = TestQueue::new().await;
    let task = server.api.create("p/w", json!({"retries": 1})).await;
    server.api.claim_work("p/w", "w1", 1).await;
    server.advance(1_204).await;
    assert_eq!(server.api.status(&task).await["state"], "running");
    server.advance(2).await;
    let status = server.api.status(&task).await;
    assert_eq!((&status["state"], &status["retriesLeft"]), (&json!("pending"), &json!(0)));
    assert_eq!(status["runs"][0]["reasonResolved"], "claim-expired");
    assert_eq!(status["runs"][1]["reasonCreated"], "retry");
    server.api.claim_work("p/w", "w1", 1).await;
    server.advance(1_206).await;
    let status = server.api.status(&task).await;
    assert_eq!((&status["state"], status["runs"].as_array().map(Vec::len)), (&json!("exception"), Some(2)));
}

#[tokio::test]
async fn the_deadline_resolves_pending_and_running_tasks() {
    let server = TestQueue::new().await;
    let soon = json!({"deadline": iso(server.clock.unix_millis() + 60_000)});
    let running = server.api.create("p/w", soon.clone()).await;
    server.api.claim_work("p/w", "w1", 1).await;
    let waiting = server.api.create("p/w", soon).await;
    server.advance(66).await;
    for task in [running, waiting] {
        assert_eq!(server.api.status(&task).await["runs"][0]["reasonResolved"], "deadline-exceeded");
    }
    assert_eq!(server.api.get("pending/p%2Fw").await.expect(200)["pendingTasks"], 0);
}

#[tokio::test]
async fn a_canceled_task_can_be_rerun() {
    let server = TestQueue::new().await;
    let task = server.api.create("p/w", json!({"retries": 2})).await;
    let canceled = server.api.bare_post(&format!("task/{task}/cancel")).await.expect(200);
    assert_eq!(canceled["status"]["runs"][0]["reasonResolved"], "canceled");
    assert_eq!(server.api.claim_work("p/w", "w1", 1).await.len(), 0);
    let again = server.api.bare_post(&format!("task/{task}/rerun")).await.expect(200);
    assert_eq!(again["status"]["runs"][1]["reasonCreated"], "rerun");
    assert_eq!(server.api.claim_work("p/w", "w1", 1).await[0]["runId"], 1);
}

async fn resolve(api: &Api, queue: &str, task: &str, outcome: &str) {
    api.claim_work(queue, "w1", 1).await;
    api.bare_post(&format!("task/{task}/runs/0/{outcome}")).await.expect(200);
}

#[tokio::test]
async fn a_task_waits_for_its_dependencies() {
    let server = TestQueue::new().await;
    let first = server.api.create("p/first", json!({})).await;
    let second = server.api.create("p/second", json!({"dependencies": [first]})).await;
    assert_eq!(server.api.status(&second).await["state"], "unscheduled");
    resolve(&server.api, "p/first", &first, "completed").await;
    assert_eq!(server.api.status(&second).await["state"], "pending");
    let third = server.api.create("p/second", json!({"dependencies": [first]})).await;
    assert_eq!(server.api.status(&third).await["state"], "pending");
    let body = server.api.definition("p/second", json!({"dependencies": ["XJOIQcqPRgykTZR_00-b1w"]}));
    let answer = server.api.queue("PUT", &format!("task/{}", super::client::slugid()), Some(&body)).await;
    assert_eq!(answer.refusal(400).0, "InputError");
}

#[tokio::test]
async fn a_failed_dependency_unblocks_only_all_resolved_tasks() {
    let server = TestQueue::new().await;
    let first = server.api.create("p/first", json!({})).await;
    let easy = server.api.create("p/second", json!({"dependencies": [first], "requires": "all-resolved"})).await;
    let words = json!({"requires": "all-resolved"});
    let strict =
        server.api.create("p/second", json!({"dependencies": [first], "payload": words, "extra": words})).await;
    resolve(&server.api, "p/first", &first, "failed").await;
    assert_eq!(server.api.status(&strict).await["state"], "unscheduled");
    assert_eq!(server.api.status(&easy).await["state"], "pending");
}

#[tokio::test]
async fn a_met_dependency_stays_met_after_it_has_expired() {
    let server = TestQueue::new().await;
    let now = server.clock.unix_millis();
    let brief = json!({"deadline": iso(now + 600_000), "expires": iso(now + 700_000)});
    let done = server.api.create("p/done", brief.clone()).await;
    let failed = server.api.create("p/failed", brief).await;
    let last = server.api.create("p/last", json!({})).await;
    let ready = server.api.create("p/second", json!({"dependencies": [done, last]})).await;
    let stuck = server.api.create("p/second", json!({"dependencies": [failed, last]})).await;
    resolve(&server.api, "p/done", &done, "completed").await;
    resolve(&server.api, "p/failed", &failed, "failed").await;
    server.advance(800).await;
    assert_eq!(server.api.get(&format!("task/{done}/status")).await.status, 404);
    resolve(&server.api, "p/last", &last, "completed").await;
    assert_eq!(server.api.status(&ready).await["state"], "pending");
    assert_eq!(server.api.status(&stuck).await["state"], "unscheduled");
}

#[tokio::test]
async fn listings_are_paged() {
    let server = TestQueue::new().await;
    for _ in 0..5 {
        server.api.create("p/w", json!({})).await;
    }
    server.api.claim_work("p/w", "w1", 3).await;
    assert_eq!(pages(&server.api, "task-queues/p%2Fw/claimed", 2).await, [2, 1]);
    assert_eq!(pages(&server.api, "task-queues/p%2Fw/pending", 1).await, [1, 1]);
    assert_eq!(pages(&server.api, "journeyman/tasks", 2).await, [2, 2, 1]);
}

#[tokio::test]
async fn responses_stay_within_the_size_that_a_worker_reads() {
    let server = TestQueue::new().await;
    for _ in 0..3 {
        server.api.create("p/w", json!({"payload": {"x": "y".repeat(5 << 20)}})).await;
    }
    assert_eq!(pages(&server.api, "task-queues/p%2Fw/pending", 3).await, [2, 1]);
    assert_eq!(server.api.claim_work("p/w", "w1", 3).await.len(), 2);
    assert_eq!(server.api.claim_work("p/w", "w1", 3).await.len(), 1);
    assert_eq!(pages(&server.api, "task-queues/p%2Fw/claimed", 3).await, [2, 1]);
}

async fn pages(api: &Api, path: &str, limit: usize) -> Vec<usize> {
    let (mut sizes, mut token) = (Vec::new(), String::new());
    loop {
        let page = api.get(&format!("{path}?limit={limit}{token}")).await.expect(200);
        sizes.push(page["tasks"].as_array().unwrap().len());
        match page["continuationToken"].as_str() {
            Some(next) => token = format!("&continuationToken={next}"),
            None => return sizes,
        }
    }
}

#[tokio::test]
async fn expired_tasks_are_removed() {
    let server = TestQueue::new().await;
    let end = iso(server.clock.unix_millis() + 3_700_000);
    let task = server.api.create("p/w", json!({"expires": end})).await;
    server.advance(3_650).await;
    assert_eq!(server.api.status(&task).await["state"], "exception");
    server.advance(700).await;
    assert_eq!(server.api.get(&format!("task/{task}/status")).await.refusal(404).0, "ResourceNotFound");
}

#[tokio::test]
async fn a_task_that_expires_at_its_deadline_is_resolved_before_it_is_removed() {
    let server = TestQueue::new().await;
    let end = iso(server.clock.unix_millis() + 600_000);
    let first = server.api.create("p/w", json!({"deadline": end, "expires": end})).await;
    let change = json!({"dependencies": [first], "requires": "all-resolved"});
    let second = server.api.create("p/w", change).await;
    server.advance(601).await;
    assert_eq!(server.api.status(&first).await["state"], "pending");
    server.advance(60).await;
    assert_eq!(server.api.get(&format!("task/{first}/status")).await.status, 404);
    assert_eq!(server.api.status(&second).await["state"], "pending");
}
