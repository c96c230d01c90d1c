//! Calls for users and tools.

use std::sync::{Arc, Mutex};

use journeyman::source::taskcluster::{Api, ApiConfig, Credentials, Dialect, RereadCredentials};
use serde_json::json;

use crate::source::support::{RETRY, discreet, run, settings};
use crate::support::gremlin::{Act, Gremlin, answer, answer_with, head, json as say};
use crate::support::task_queue::content;

fn api(root_url: &str) -> Api {
    Api::new(settings(root_url, Dialect::ClaimWork).api).expect("the settings are good")
}

fn leads_to(place: &str) -> Act {
    answer_with(303, &[("location", place)], "{}")
}

#[tokio::test]
async fn tasks_are_created_watched_and_canceled() {
    let status = json!({ "status": { "taskId": "T", "state": "pending" } });
    let gremlin = Gremlin::start(|_| vec![say(200, &status)]).await;
    let (api, run) = (api(&gremlin.url()), run("T", 0));
    let definition = json!({ "payload": {} });
    assert_eq!(api.create_task(&run.task, definition.clone()).await.expect("it is created")["state"], "pending");
    api.task_status(&run.task).await.expect("it is known");
    api.cancel_task(&run.task).await.expect("it is canceled");
    let asked = gremlin.asked();
    let lines: Vec<_> = asked.iter().map(|asked| asked.line.as_str()).collect();
    let base = "/api/queue/v1/task/T";
    assert_eq!(
        lines,
        [format!("PUT {base} HTTP/1.1"), format!("GET {base}/status HTTP/1.1"), format!("POST {base}/cancel HTTP/1.1"),]
    );
    assert_eq!(asked[0].json(), definition);
}

#[tokio::test]
async fn an_artifact_is_followed_to_its_content_and_only_the_service_gets_a_signature() {
    let storage = Gremlin::start(|_| vec![answer(200, "text/plain", "the log")]).await;
    let place = format!("{}/bucket/x?sig=y", storage.url());
    let script = |url: &str| {
        let other = format!("{url}/api/queue/v1/task/T/runs/0/artifacts/private%2Flog");
        vec![leads_to(&other), leads_to(&place)]
    };
    let gremlin = Gremlin::start(script).await;
    assert_eq!(content(&api(&gremlin.url()), &run("T", 0), "public/a b").await, b"the log");
    let asked = gremlin.asked();
    assert_eq!(asked[0].line, "GET /api/queue/v1/task/T/runs/0/artifacts/public%2Fa%20b HTTP/1.1");
    assert!(asked.iter().all(|asked| asked.header("authorization").is_some()));
    assert_eq!(storage.asked()[0].line, "GET /bucket/x?sig=y HTTP/1.1");
    assert_eq!(storage.asked()[0].header("authorization"), None);
}

#[tokio::test]
async fn redirect_loops_and_redirects_to_metadata_services_are_not_followed() {
    let circle = Gremlin::start(|url| vec![leads_to(&format!("{url}/api/queue/v1/task/T/runs/0/artifacts/x"))]).await;
    let refused = discreet(api(&circle.url()).artifact(&run("T", 0), "x").await);
    assert!(refused.message.contains("redirects"), "{refused}");
    assert!(circle.asked().len() <= 6);
    for place in [
        "http://169.254.169.254/latest/meta-data",
        "http://[fe80::1]/",
        "http://10.0.0.1/",
        "file:///etc/passwd",
        "http://",
    ] {
        let gremlin = Gremlin::start(|_| vec![leads_to(place)]).await;
        let refused = discreet(api(&gremlin.url()).artifact(&run("T", 0), "x").await);
        assert!(refused.message.contains("redirect"), "{refused}");
    }
}

#[tokio::test]
async fn truncated_content_is_an_error() {
    let mut short = head(200, &[("content-length", "100")]);
    short.extend(b"half");
    let gremlin = Gremlin::start(|_| vec![Act::Say(short)]).await;
    let api = api(&gremlin.url());
    let mut download = api.artifact(&run("T", 0), "x").await.expect("it begins");
    let refused = loop {
        match download.next_chunk().await {
            Ok(chunk) => assert!(chunk.is_some(), "half of it passed for all"),
            Err(refused) => break refused,
        }
    };
    assert_eq!(refused.refusal, RETRY);
}

#[tokio::test]
async fn listings_are_paged() {
    let script = vec![
        say(200, &json!({ "tasks": [{ "taskId": "A" }], "continuationToken": "t&u" })),
        say(200, &json!({ "tasks": [] })),
        say(200, &json!({ "artifacts": [{ "name": "x" }] })),
        say(200, &json!({ "pendingTasks": 7 })),
    ];
    let gremlin = Gremlin::start(|_| script).await;
    let api = api(&gremlin.url());
    let page = api.pending_tasks("prov/wt", None).await.expect("it is answered");
    assert_eq!(page.entries.len(), 1);
    let last = api.claimed_tasks("prov/wt", page.continuation_token.as_deref()).await.expect("it is answered");
    assert!(last.continuation_token.is_none());
    assert_eq!(api.artifacts(&run("T", 1), None).await.expect("it is answered").entries[0]["name"], "x");
    assert_eq!(api.pending_count("prov/wt").await.expect("it is answered"), 7);
    let lines: Vec<_> = gremlin.asked().into_iter().map(|asked| asked.line).collect();
    assert_eq!(lines[1], "GET /api/queue/v1/task-queues/prov%2Fwt/claimed?continuationToken=t%26u HTTP/1.1");
    assert_eq!(lines[3], "GET /api/queue/v1/task-queues/prov%2Fwt/counts HTTP/1.1");
}

#[tokio::test]
async fn b10_a_queue_without_counts_is_asked_for_its_pending_tasks() {
    for (refusals, last) in
        [(vec![(403, "InsufficientScopes")], "/pending/prov%2Fwt"), (vec![(404, "x"), (404, "x")], "/pending/prov/wt")]
    {
        let refusals =
            refusals.into_iter().map(|(status, code)| say(status, &json!({ "code": code, "message": "no" })));
        let script: Vec<_> = refusals.chain([say(200, &json!({ "pendingTasks": 7 }))]).collect();
        let gremlin = Gremlin::start(|_| script).await;
        assert_eq!(api(&gremlin.url()).pending_count("prov/wt").await.expect("it is answered"), 7);
        let asked = gremlin.asked();
        assert_eq!(asked.last().expect("a call").line, format!("GET /api/queue/v1{last} HTTP/1.1"));
    }
}

#[tokio::test]
async fn b2_a_401_makes_the_client_read_renewed_credentials_and_repeat_the_call() {
    let denied = json!({ "code": "AuthenticationFailed", "message": "Bad mac" });
    let status = json!({ "status": { "taskId": "T" } });
    let script = |_: &str| vec![say(401, &denied), say(200, &status), say(401, &denied)];
    let gremlin = Gremlin::start(script).await;
    let credentials = |token: &str| Credentials::new("renewed", token.to_owned().into(), None).expect("credentials");
    let files = Mutex::new(vec![credentials("second")]);
    let reread_credentials: RereadCredentials = Arc::new(move || files.lock().expect("no panic").pop());
    let config = settings(&gremlin.url(), Dialect::ClaimWork).api;
    let api = Api::new(ApiConfig { reread_credentials: Some(reread_credentials), ..config }).expect("good settings");

    let task = run("T", 0).task;
    api.task_status(&task).await.expect("the second call is accepted");
    let refused = api.task_status(&task).await.expect_err("the files hold nothing new");
    assert!(refused.message.contains("Bad mac"), "{refused}");
    let clients: Vec<_> = gremlin
        .asked()
        .iter()
        .map(|asked| asked.header("authorization").is_some_and(|header| header.contains("renewed")))
        .collect();
    assert_eq!(clients, [false, true, true]);
}
