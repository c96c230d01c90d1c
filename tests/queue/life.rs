//! The life of a task: created, waited for, claimed, extended, reported, canceled, run again.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::client::{Api, iso};
use super::place::Place;

#[tokio::test]
async fn a_task_is_created_claimed_reclaimed_and_reported_with_the_credentials_of_its_claim() {
    let place = Place::new().await;
    let task = place.api.create("p/w", json!({"scopes": ["project:x"]})).await;
    let claims = place.api.claim_work("p/w", "w1", 4).await;
    assert_eq!(claims.len(), 1);
    let worker = place.api.with(&claims[0]["credentials"]);
    let again = worker.bare_post(&format!("task/{task}/runs/0/reclaim")).await.expect(200);
    let worker = place.api.with(&again["credentials"]);
    let done = worker.bare_post(&format!("task/{task}/runs/0/completed")).await.expect(200);
    assert_eq!(done["status"]["state"], "completed");
    let twice = worker.bare_post(&format!("task/{task}/runs/0/completed")).await.expect(200);
    assert_eq!(done, twice);
    assert_eq!(worker.bare_post(&format!("task/{task}/runs/0/failed")).await.refusal(409).0, "RequestConflict");
    assert_eq!(place.api.status(&task).await["state"], "completed");
    place.running.stop().await;
}

#[tokio::test]
async fn the_same_definition_again_is_the_same_task_and_another_one_is_refused() {
    let place = Place::new().await;
    let body = place.api.definition("p/w", json!({}));
    let task = super::client::slugid();
    let path = format!("task/{task}");
    let first = place.api.queue("PUT", &path, Some(&body)).await.expect(200);
    let again = place.api.queue("PUT", &path, Some(&body)).await.expect(200);
    assert_eq!(first, again);
    assert_eq!(place.api.claim_work("p/w", "w1", 4).await.len(), 1);
    let other = place.api.definition("p/w", json!({"retries": 3}));
    assert_eq!(place.api.queue("PUT", &path, Some(&other)).await.refusal(409).0, "RequestConflict");
    place.running.stop().await;
}

#[tokio::test]
async fn work_is_handed_out_by_urgency_and_then_by_age() {
    let place = Place::new().await;
    let mut tasks = Vec::new();
    for priority in ["low", "highest", "low", "very-low", "highest"] {
        tasks.push(place.api.create("p/w", json!({"priority": priority})).await);
        place.advance(1).await;
    }
    let claims = place.api.claim_work("p/w", "w1", 4).await;
    let order: Vec<_> = claims.iter().map(|claim| claim["status"]["taskId"].as_str().unwrap()).collect();
    assert_eq!(order, [&tasks[1], &tasks[4], &tasks[0], &tasks[2]]);
    place.running.stop().await;
}

#[tokio::test]
async fn a_request_that_waits_is_answered_by_the_task_that_comes() {
    // The wait is longer than any test; what ends it is the task.
    let place = Place::with(|settings| settings.long_poll = Duration::from_secs(600)).await;
    let (api, other) = (place.api.clone(), place.api.clone());
    let waits = async move { api.claim_work("p/w", "w1", 1).await };
    let comes = async move { other.create("p/w", json!({})).await };
    let (claims, task) = tokio::join!(waits, comes);
    assert_eq!(claims[0]["status"]["taskId"], task.as_str());
    place.running.stop().await;
}

#[tokio::test]
async fn many_who_wait_share_the_work_and_nobody_gets_the_same() {
    let place = Place::with(|settings| settings.long_poll = Duration::from_secs(600)).await;
    let api = Arc::new(place.api.clone());
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
    place.running.stop().await;
}

#[tokio::test]
async fn who_waits_in_vain_gets_an_empty_list() {
    let place = Place::new().await;
    assert_eq!(place.api.claim_work("p/w", "w1", 1).await, Vec::<Value>::new());
    place.running.stop().await;
}

#[tokio::test]
async fn a_queue_that_stops_answers_those_who_wait() {
    let place = Place::with(|settings| settings.long_poll = Duration::from_secs(600)).await;
    let (api, other) = (place.api.clone(), place.api.clone());
    let waits = async move { api.claim_work("p/w", "w1", 1).await };
    let running = place.running;
    let stops = async move {
        heard_of(&other, "w1").await;
        running.stop().await;
    };
    let (claims, ()) = tokio::join!(waits, stops);
    assert_eq!(claims, Vec::<Value>::new());
}

/// Returns once the queue has heard of a worker, so once its request for work has been read.
async fn heard_of(api: &Api, worker: &str) {
    while api.get(&format!("provisioners/p/worker-types/w/workers/wg/{worker}")).await.status != 200 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_connection_that_is_dropped_while_it_waits_leaves_no_claim_behind() {
    let place = Place::with(|settings| settings.long_poll = Duration::from_secs(600)).await;
    let body = json!({"workerGroup": "wg", "workerId": "gone"}).to_string();
    let path = "/api/queue/v1/claim-work/p%2Fw";
    let header = place.api.header("POST", path, None);
    let host = place.api.root.trim_start_matches("http://");
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nauthorization: {header}\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = tokio::net::TcpStream::connect(place.running.address()).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    heard_of(&place.api, "gone").await;
    drop(stream);
    let task = place.api.create("p/w", json!({})).await;
    // Whether the queue learnt of the loss before or after it had claimed for the lost worker, the task is free again.
    let claims = place.api.claim_work("p/w", "w2", 1).await;
    assert_eq!(claims[0]["status"]["taskId"], task.as_str());
    assert_eq!(claims[0]["runId"], 0);
    assert_eq!(claims[0]["status"]["runs"].as_array().unwrap().len(), 1);
    place.running.stop().await;
}

#[tokio::test]
async fn a_claim_that_nobody_extends_expires_and_the_task_runs_again() {
    let place = Place::new().await;
    let task = place.api.create("p/w", json!({"retries": 1})).await;
    place.api.claim_work("p/w", "w1", 1).await;
    place.advance(1_204).await;
    assert_eq!(place.api.status(&task).await["state"], "running");
    place.advance(2).await;
    let status = place.api.status(&task).await;
    assert_eq!((&status["state"], &status["retriesLeft"]), (&json!("pending"), &json!(0)));
    assert_eq!(status["runs"][0]["reasonResolved"], "claim-expired");
    assert_eq!(status["runs"][1]["reasonCreated"], "retry");
    place.api.claim_work("p/w", "w1", 1).await;
    place.advance(1_206).await;
    let status = place.api.status(&task).await;
    assert_eq!((&status["state"], status["runs"].as_array().map(Vec::len)), (&json!("exception"), Some(2)));
    place.running.stop().await;
}

#[tokio::test]
async fn a_reclaimed_claim_does_not_expire() {
    let place = Place::new().await;
    let task = place.api.create("p/w", json!({})).await;
    place.api.claim_work("p/w", "w1", 1).await;
    for _ in 0..3 {
        place.advance(900).await;
        place.api.bare_post(&format!("task/{task}/runs/0/reclaim")).await.expect(200);
    }
    assert_eq!(place.api.status(&task).await["runs"].as_array().map(Vec::len), Some(1));
    place.running.stop().await;
}

#[tokio::test]
async fn a_deadline_resolves_what_waits_and_what_runs() {
    let place = Place::new().await;
    let soon = json!({"deadline": iso(place.clock.unix_millis() + 60_000)});
    let running = place.api.create("p/w", soon.clone()).await;
    place.api.claim_work("p/w", "w1", 1).await;
    let waiting = place.api.create("p/w", soon).await;
    place.advance(66).await;
    for task in [running, waiting] {
        assert_eq!(place.api.status(&task).await["runs"][0]["reasonResolved"], "deadline-exceeded");
    }
    assert_eq!(place.api.get("pending/p%2Fw").await.expect(200)["pendingTasks"], 0);
    place.running.stop().await;
}

#[tokio::test]
async fn a_resolved_task_can_be_run_again_and_a_canceled_one_too() {
    let place = Place::new().await;
    let task = place.api.create("p/w", json!({"retries": 2})).await;
    let canceled = place.api.bare_post(&format!("task/{task}/cancel")).await.expect(200);
    assert_eq!(canceled["status"]["runs"][0]["reasonResolved"], "canceled");
    assert_eq!(place.api.claim_work("p/w", "w1", 1).await.len(), 0);
    let again = place.api.bare_post(&format!("task/{task}/rerun")).await.expect(200);
    assert_eq!(again["status"]["runs"][1]["reasonCreated"], "rerun");
    assert_eq!(place.api.claim_work("p/w", "w1", 1).await[0]["runId"], 1);
    place.running.stop().await;
}

#[tokio::test]
async fn a_task_waits_for_those_it_depends_on() {
    let place = Place::new().await;
    let first = place.api.create("p/first", json!({})).await;
    let second = place.api.create("p/second", json!({"dependencies": [first]})).await;
    assert_eq!(place.api.status(&second).await["state"], "unscheduled");
    place.api.claim_work("p/first", "w1", 1).await;
    place.api.bare_post(&format!("task/{first}/runs/0/completed")).await.expect(200);
    assert_eq!(place.api.status(&second).await["state"], "pending");
    let third = place.api.create("p/second", json!({"dependencies": [first]})).await;
    assert_eq!(place.api.status(&third).await["state"], "pending");
    let body = place.api.definition("p/second", json!({"dependencies": ["XJOIQcqPRgykTZR_00-b1w"]}));
    let answer = place.api.queue("PUT", &format!("task/{}", super::client::slugid()), Some(&body)).await;
    assert_eq!(answer.refusal(400).0, "InputError");
    place.running.stop().await;
}

#[tokio::test]
async fn a_dependency_that_failed_lets_go_only_those_that_do_not_mind() {
    let place = Place::new().await;
    let first = place.api.create("p/first", json!({})).await;
    let easy = place.api.create("p/second", json!({"dependencies": [first], "requires": "all-resolved"})).await;
    let words = json!({"requires": "all-resolved"});
    let strict = place.api.create("p/second", json!({"dependencies": [first], "payload": words, "extra": words})).await;
    place.api.claim_work("p/first", "w1", 1).await;
    place.api.bare_post(&format!("task/{first}/runs/0/failed")).await.expect(200);
    assert_eq!(place.api.status(&strict).await["state"], "unscheduled");
    assert_eq!(place.api.status(&easy).await["state"], "pending");
    let forced = place.api.bare_post(&format!("task/{strict}/schedule")).await.expect(200);
    assert_eq!(forced["status"]["state"], "pending");
    place.running.stop().await;
}

#[tokio::test]
async fn a_worker_in_the_same_process_can_wait_for_news() {
    let place = Place::new().await;
    let mut news = place.running.pending();
    news.mark_unchanged();
    place.api.create("p/w", json!({})).await;
    news.changed().await.unwrap();
    place.running.stop().await;
}

#[tokio::test]
async fn listings_come_in_pages() {
    let place = Place::new().await;
    for _ in 0..5 {
        place.api.create("p/w", json!({})).await;
    }
    place.api.claim_work("p/w", "w1", 3).await;
    assert_eq!(pages(&place.api, "task-queues/p%2Fw/claimed", 2).await, [2, 1]);
    assert_eq!(pages(&place.api, "task-queues/p/w/pending", 1).await, [1, 1]);
    assert_eq!(pages(&place.api, "journeyman/tasks", 2).await, [2, 2, 1]);
    place.running.stop().await;
}

#[tokio::test]
async fn an_answer_holds_no_more_than_a_worker_reads() {
    let place = Place::new().await;
    for _ in 0..3 {
        place.api.create("p/w", json!({"payload": {"x": "y".repeat(5 << 20)}})).await;
    }
    assert_eq!(pages(&place.api, "task-queues/p/w/pending", 3).await, [2, 1]);
    assert_eq!(place.api.claim_work("p/w", "w1", 3).await.len(), 2);
    assert_eq!(place.api.claim_work("p/w", "w1", 3).await.len(), 1);
    assert_eq!(pages(&place.api, "task-queues/p%2Fw/claimed", 3).await, [2, 1]);
    assert_eq!(pages(&place.api, "journeyman/tasks", 3).await, [2, 1]);
    place.running.stop().await;
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
async fn what_has_expired_is_forgotten() {
    let place = Place::new().await;
    let end = iso(place.clock.unix_millis() + 3_700_000);
    let task = place.api.create("p/w", json!({"expires": end})).await;
    place.advance(3_650).await;
    assert_eq!(place.api.status(&task).await["state"], "exception");
    place.advance(700).await;
    assert_eq!(place.api.get(&format!("task/{task}/status")).await.refusal(404).0, "ResourceNotFound");
    place.running.stop().await;
}

#[tokio::test]
async fn a_request_body_without_an_end_is_cut_off() {
    let place = Place::new().await;
    let body = place.api.definition("p/w", json!({"payload": {"x": "y".repeat(11 << 20)}}));
    let answer = place.api.queue("PUT", &format!("task/{}", super::client::slugid()), Some(&body)).await;
    assert_eq!(answer.refusal(413).0, "InputTooLarge");
    let mut stream = tokio::net::TcpStream::connect(place.running.address()).await.unwrap();
    stream.write_all(b"GET /api/queue/v1/ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    assert!(text.starts_with("HTTP/1.1 200 OK") && text.contains(r#""alive":true"#), "{text}");
    assert!(text.to_ascii_lowercase().contains("\r\ndate: "), "{text}");
    place.running.stop().await;
}
