//! Replays requests recorded from a real Taskcluster and compares the responses, except for ids and times.
//!
//! Each test replays its requests in recorded order with the clock at the time of the recording.

use std::time::Duration;

use serde_json::{Value, json};

use super::client::{Answer, Api, iso};
use super::test_queue::TestQueue;
use crate::support::exchange::Exchange;

const MODERN: &str = "taskcluster";
const LEGACY: &str = "taskcluster-legacy";

pub(crate) fn read(folder: &str, name: &str) -> Exchange {
    let path = format!("{}/fixtures/{folder}/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    Exchange::parse(&std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}")))
}

fn request_body(recorded: &Exchange) -> Option<Value> {
    (!recorded.request.is_empty()).then(|| serde_json::from_str(&recorded.request).expect("a recorded body is JSON"))
}

async fn replay(api: &Api, folder: &str, name: &str) -> Value {
    replay_changed(api, folder, name, |_| {}).await
}

async fn replay_changed(api: &Api, folder: &str, name: &str, change: impl FnOnce(&mut Value)) -> Value {
    let recorded = read(folder, name);
    let mut body = request_body(&recorded);
    if let Some(body) = &mut body {
        change(body);
    }
    let answer = api.call(&recorded.method, &recorded.path, body.as_ref()).await;
    check(name, &recorded, &answer)
}

fn check(name: &str, recorded: &Exchange, answer: &Answer) -> Value {
    assert_eq!(answer.status, recorded.status, "{name}: {}", answer.text);
    for header in ["content-type", "cache-control", "www-authenticate", "x-taskcluster-artifact-storage-type"] {
        let ours = answer.headers.get(header).map(|value| value.to_str().expect("a header is text"));
        assert_eq!(ours, recorded.header(header), "{name}: {header}");
    }
    if answer.text.is_empty() {
        assert_eq!(recorded.body.trim(), "", "{name}");
        return Value::Null;
    }
    let parsed: Value = serde_json::from_str(&recorded.body).expect("a recorded answer is JSON");
    let (mut ours, expected) = (shape("", &answer.json()), shape("", &parsed));
    // The older service lacks some properties.
    for part in ["status", "task"] {
        if let (Some(Value::Object(fields)), Some(known)) = (ours.get_mut(part), expected[part].as_object()) {
            fields.retain(|field, _| {
                known.contains_key(field) || !["taskQueueId", "projectId", "priority"].contains(&field.as_str())
            });
        }
    }
    assert!(ours == expected, "{name}\nours: {ours:#}\nrecorded: {expected:#}");
    answer.json()
}

/// The properties and the words of the protocol; ids, times, addresses and wording are left out.
fn shape(key: &str, value: &Value) -> Value {
    const WORDS: &str = "code state reasonCreated reasonResolved priority requires storageType contentType name method \
                         workerGroup workerId taskQueueId provisionerId workerType schedulerId";
    match value {
        Value::String(text) if key == "certificate" => shape("", &serde_json::from_str(text).expect("JSON")),
        Value::String(text) if WORDS.split(' ').any(|word| word == key) => text.as_str().into(),
        Value::String(_) => "text".into(),
        Value::Number(_) if ["start", "expiry"].contains(&key) => "number".into(),
        Value::Array(items) => items.iter().map(|item| shape("", item)).collect(),
        Value::Object(fields) => {
            let known = fields.iter().filter(|(name, _)| !(key == "requestInfo" && *name == "payload"));
            known.map(|(name, value)| (name.clone(), shape(name, value))).collect()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => value.clone(),
    }
}

/// A queue with the recorded task, and its clock at the time of the recording.
async fn with_recorded_task() -> TestQueue {
    let server = TestQueue::new().await;
    // The recorded queue had a task whose first claim had expired.
    let old = server.api.definition("test-prov/test-wt", json!({"retries": 1}));
    server.api.queue("PUT", "task/D3Ff2-QbREOJq4OwRPbddA", Some(&old)).await.expect(200);
    assert_eq!(server.api.claim_work("test-prov/test-wt", "w1", 1).await.len(), 1);
    server.advance(1_205).await;
    server
}

fn shifted(body: &mut Value, millis: i64) {
    for name in ["created", "deadline", "expires"] {
        if let Some(text) = body[name].as_str() {
            let at: jiff::Timestamp = text.parse().expect("a recorded time");
            body[name] = iso(at.as_millisecond() + millis).into();
        }
    }
}

const LATER: i64 = 1_205_000;

#[tokio::test]
async fn the_runs_of_a_task_match_the_recording() {
    let server = with_recorded_task().await;
    let api = &server.api;
    let later = |body: &mut Value| shifted(body, LATER);
    replay_changed(api, MODERN, "01-createTask", later).await;
    replay_changed(api, MODERN, "02-createTask-409", later).await;
    let claims = replay(api, MODERN, "03-claimWork").await;
    let worker = api.with(&claims["tasks"][0]["credentials"]);
    let again = replay(&worker, MODERN, "04-reclaimTask").await;
    replay(api, MODERN, "05-reclaim-rootcreds").await;
    let worker = api.with(&again["credentials"]);
    artifacts(&server, &worker).await;
    replay(&worker, MODERN, "12-exception-badreason-400").await;
    replay(&worker, MODERN, "13-exception-worker-shutdown").await;
    replay(&worker, MODERN, "14-completed-after-exception-409").await;
    replay(&worker, MODERN, "15-reclaim-resolved-409").await;
    let second = api.claim_work("test-prov/test-wt", "w1", 1).await;
    replay(api, MODERN, "16-cancelTask").await;
    replay(&api.with(&second[0]["credentials"]), MODERN, "17-reclaim-canceled-409").await;
}

async fn artifacts(server: &TestQueue, worker: &Api) {
    let later = |body: &mut Value| shifted(body, LATER);
    for kind in ["s3", "redirect", "link", "error"] {
        replay_changed(worker, MODERN, &format!("06-createArtifact-{kind}"), later).await;
    }
    // The recorded service had an object artifact too.
    let mut recorded = read(MODERN, "10-listArtifacts");
    let mut list: Value = serde_json::from_str(&recorded.body).expect("JSON");
    list["artifacts"].as_array_mut().expect("a list").retain(|artifact| artifact["storageType"] != "object");
    recorded.body = list.to_string();
    check("10-listArtifacts", &recorded, &server.api.call(&recorded.method, &recorded.path, None).await);
    for kind in ["error", "link", "redirect", "s3"] {
        replay(&server.api, MODERN, &format!("11-getArtifact-{kind}")).await;
    }
}

#[tokio::test]
async fn reports_and_late_calls_match_the_recording() {
    let server = TestQueue::new().await;
    let api = &server.api;
    for (task, outcome) in [("XmjgIv3RQwuFVhTBSE3Vqg", "completed"), ("QTtWeMJJRYCa5rOK27KBJQ", "failed")] {
        let body = api.definition("test-prov/test-wt", json!({}));
        api.queue("PUT", &format!("task/{task}"), Some(&body)).await.expect(200);
        let claims = api.claim_work("test-prov/test-wt", "w1", 1).await;
        let worker = api.with(&claims[0]["credentials"]);
        replay(&worker, MODERN, &format!("18-report-{outcome}")).await;
        replay(&worker, MODERN, &format!("19-artifact-after-{outcome}-409")).await;
    }
    for name in ["26-task-404", "28-run-404"] {
        replay(api, MODERN, name).await;
    }
    let recorded = read(MODERN, "27-route-404");
    let mut answer = api.call(&recorded.method, &recorded.path, None).await;
    // Ours says more, in the form of every other error.
    let mut body = answer.json();
    for name in ["code", "message"] {
        assert!(body[name].take().is_string(), "{body}");
        body.as_object_mut().expect("an object").remove(name);
    }
    answer.text = body.to_string();
    check("27-route-404", &recorded, &answer);
}

#[tokio::test]
async fn rejected_calls_match_the_recording() {
    let server = TestQueue::new().await;
    let api = &server.api;
    let recorded = read(MODERN, "20-noauth");
    let request = api.request(&recorded.method, &recorded.path, request_body(&recorded).as_ref());
    check("20-noauth", &recorded, &api.send(request).await);
    let wrong = Api { token: "not-the-token".to_owned(), ..api.clone() };
    replay(&wrong, MODERN, "21-badmac-401").await;
    replay(&Api { skew: -3 * 3600, ..api.clone() }, MODERN, "22-clockskew-401").await;
    let narrow = Api { authorized_scopes: Some(Vec::new()), ..api.clone() };
    replay(&narrow, MODERN, "23-insufficient-403").await;
    replay(api, MODERN, "24-tasks33-400").await;
    replay(api, MODERN, "25-longgroup-400").await;
    let recorded = read(MODERN, "63-bad-payload-hash");
    let header = api.header(&recorded.method, &recorded.path, Some(b"another payload's hash"));
    let request = api.request(&recorded.method, &recorded.path, request_body(&recorded).as_ref());
    let answer = api.send(request.header("authorization", header)).await;
    check("63-bad-payload-hash", &recorded, &answer);
}

#[tokio::test]
async fn expired_claims_and_tasks_match_the_recording() {
    let server = TestQueue::with(|settings| settings.claim_timeout = Duration::from_secs(15)).await;
    let api = &server.api;
    let body = api.definition("exp-prov/exp-wt", json!({"retries": 1}));
    api.queue("PUT", "task/YKJh9czOSimODCq0pKlqVQ", Some(&body)).await.expect(200);
    let first = api.claim_work("exp-prov/exp-wt", "w1", 1).await;
    server.advance(20).await;
    let worker = api.with(&first[0]["credentials"]);
    replay(&worker, MODERN, "40-reclaim-expired-creds").await;
    replay(api, MODERN, "41-reclaim-claim-expired-409").await;
    let second = api.claim_work("exp-prov/exp-wt", "w1", 1).await;
    // After `takenUntil`, before the claim is resolved.
    server.advance(16).await;
    replay(&api.with(&second[0]["credentials"]), MODERN, "42-reclaim-just-after-takenUntil").await;

    let short = json!({"deadline": iso(server.clock.unix_millis() + 6_000)});
    let body = api.definition("exp-prov/exp-wt", short);
    api.queue("PUT", "task/IO0gLgbpTB24OqcM1qFafA", Some(&body)).await.expect(200);
    let third = api.claim_work("exp-prov/exp-wt", "w1", 1).await;
    server.advance(7).await;
    let worker = api.with(&third[0]["credentials"]);
    replay(&worker, MODERN, "43-reclaim-past-deadline-409").await;
    replay(&worker, MODERN, "44-completed-past-deadline").await;
}

#[tokio::test]
async fn listings_match_the_recording() {
    let server = TestQueue::new().await;
    let api = &server.api;
    replay(api, MODERN, "48-pendingTasks").await;

    let body = api.definition("misc-p/misc-w", json!({}));
    api.queue("PUT", "task/fmcn_3sRTXiAb5fbzhKjHw", Some(&body)).await.expect(200);
    api.claim_work("misc-p/misc-w", "m1", 1).await;
    replay(api, MODERN, "60-listClaimedTasks").await;
    let body = api.definition("misc-p/misc-w2", json!({}));
    api.queue("PUT", "task/GhusDcSGS26T_qe46oyyFQ", Some(&body)).await.expect(200);
    replay(api, MODERN, "61-claimTask-modern").await;
    replay(api, MODERN, "62-claimWork-no-tasks").await;
}

#[tokio::test]
async fn rejected_artifacts_match_the_recording() {
    let server = TestQueue::new().await;
    let api = &server.api;
    let body = api.definition("misc-p/misc-w3", json!({}));
    api.queue("PUT", "task/Ak_2atYeRf2BrdoYgdFwww", Some(&body)).await.expect(200);
    let claims = api.claim_work("misc-p/misc-w3", "m1", 1).await;
    let worker = api.with(&claims[0]["credentials"]);
    let first = request_body(&read(MODERN, "64-artifact-conflict-409")).map(|mut body| {
        body["contentType"] = "text/plain".into();
        body
    });
    let path = "task/Ak_2atYeRf2BrdoYgdFwww/runs/0/artifacts/public%2Fx";
    worker.queue("POST", path, first.as_ref()).await.expect(200);
    replay(&worker, MODERN, "64-artifact-conflict-409").await;
    replay(&worker, MODERN, "65-artifact-expires-400").await;
}

#[tokio::test]
async fn the_azure_dialect_matches_the_recording() {
    let server = TestQueue::new().await;
    let api = &server.api;
    // These were recorded later than the others.
    server.advance(200).await;
    replay(api, LEGACY, "01-pollTaskUrls").await;
    replay(api, LEGACY, "02-createTask").await;
    let claim = replay(api, LEGACY, "04-claimTask").await;
    for name in ["05-claimTask-other-worker-409", "06-claimTask-run-404", "07-claimTask-task-404", "08-claimTask-400"] {
        replay(api, LEGACY, name).await;
    }
    let recorded = read(LEGACY, "09-claimTask-noauth");
    let request = api.request(&recorded.method, &recorded.path, request_body(&recorded).as_ref());
    check("09-claimTask-noauth", &recorded, &api.send(request).await);
    let worker = api.with(&claim["credentials"]);
    let again = replay(&worker, LEGACY, "10-reclaimTask").await;
    let worker = api.with(&again["credentials"]);
    replay(&worker, LEGACY, "11-exception-superseded").await;
    replay(&worker, LEGACY, "12-reclaim-resolved-409").await;
    canceled_and_late(&server).await;
    outcomes(&server).await;
}

async fn legacy_task(api: &Api, task: &str, change: Value) {
    let body = api.definition("lp/lw", change);
    api.queue("PUT", &format!("task/{task}"), Some(&body)).await.expect(200);
}

async fn canceled_and_late(server: &TestQueue) {
    let api = &server.api;
    legacy_task(api, "chhnAKzjTVOTGgoR9D03Iw", json!({})).await;
    api.bare_post("task/chhnAKzjTVOTGgoR9D03Iw/cancel").await.expect(200);
    replay(api, LEGACY, "13-claimTask-cancelled-409").await;
    let soon = iso(server.clock.unix_millis() + 1_000);
    legacy_task(api, "Tss-0xFDRN2BhRfowoeOIQ", json!({"deadline": soon})).await;
    server.advance(2).await;
    replay(api, LEGACY, "14-claimTask-past-deadline-409").await;
}

async fn outcomes(server: &TestQueue) {
    let api = &server.api;
    for (task, name, seconds) in [
        ("VO4k-t0-RsOE7f8dO9mD-g", "17-completed", 0),
        ("HdSTJZgOQCiK689IBrckQw", "17-failed", 0),
        ("Cjyg-S7QRfChvP-5uh8zPw", "17-exception", 0),
        ("fXgwoYOVTE67QdMSDn1T9Q", "18-reclaim-after-claim-expired", 1_206),
    ] {
        legacy_task(api, task, json!({"retries": 2})).await;
        let worker = json!({"workerGroup": "wg", "workerId": "w1"});
        let claim = api.post(&format!("task/{task}/runs/0/claim"), worker).await.expect(200);
        server.advance(seconds).await;
        replay(&api.with(&claim["credentials"]), LEGACY, name).await;
    }
}
