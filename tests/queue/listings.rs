//! What lists tasks, task groups, task queues and workers, and what changes a whole group.

use serde_json::{Value, json};

use super::client::{Api, iso, slugid};
use super::test_queue::TestQueue;

fn named(name: &str) -> Value {
    json!({"metadata": {"name": name, "description": "d", "owner": "a@b.c", "source": "https://example.com"}})
}

async fn names(api: &Api, query: &str) -> Vec<String> {
    let found = api.get(&format!("journeyman/tasks?{query}")).await.expect(200);
    let tasks = found["tasks"].as_array().expect("a list of tasks");
    tasks.iter().map(|task| task["name"].as_str().expect("a name").to_owned()).collect()
}

#[tokio::test]
async fn e2_tasks_are_found_by_state_queue_name_and_time() {
    let server = TestQueue::new().await;
    let api = &server.api;
    api.create("p/w", named("Build the parser")).await;
    api.create("p/other", named("test 100%")).await;
    let claims = api.claim_work("p/w", "w1", 1).await;
    server.advance(600).await;
    let late = api.create("p/w", named("build docs")).await;

    assert_eq!(names(api, "").await, ["build docs", "test 100%", "Build the parser"]);
    assert_eq!(names(api, "limit=1").await, ["build docs"]);
    assert_eq!(names(api, "name=BUILD").await, ["build docs", "Build the parser"]);
    assert_eq!(names(api, "name=100%25").await, ["test 100%"]);
    assert_eq!(names(api, "queue=p/other").await, ["test 100%"]);
    assert_eq!(names(api, "queue=p/w&state=running").await, ["Build the parser"]);
    assert_eq!(names(api, "state=pending").await, ["build docs", "test 100%"]);
    let since = urlencoding::encode(&iso(server.clock.unix_millis() - 1_000)).into_owned();
    assert_eq!(names(api, &format!("since={since}")).await, ["build docs"]);
    assert_eq!(api.get("journeyman/tasks?since=monday").await.refusal(400).0, "InvalidRequestArguments");

    let worker = api.with(&claims[0]["credentials"]);
    let first = claims[0]["status"]["taskId"].as_str().expect("an id");
    worker.bare_post(&format!("task/{first}/runs/0/completed")).await.expect(200);
    assert_eq!(names(api, "state=completed").await, ["Build the parser"]);
    let found = api.get("journeyman/tasks?state=completed").await.expect(200)["tasks"].take();
    assert_eq!(found[0]["status"]["taskQueueId"], "p/w");
    assert!(found[0]["created"].is_string() && found[0]["status"]["runs"][0]["resolved"].is_string(), "{found}");
    api.bare_post(&format!("task/{late}/cancel")).await.expect(200);
    assert_eq!(names(api, "state=exception").await, ["build docs"]);
}

#[tokio::test]
async fn d8_a_task_group_is_listed_and_canceled() {
    let server = TestQueue::new().await;
    let api = &server.api;
    let group = slugid();
    let in_group = |more: Value| {
        let mut change = json!({"taskGroupId": group});
        change.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        change
    };
    let done = api.create("p/w", in_group(json!({}))).await;
    let claims = api.claim_work("p/w", "w1", 1).await;
    let worker = api.with(&claims[0]["credentials"]);
    worker.bare_post(&format!("task/{done}/runs/0/completed")).await.expect(200);
    let pending = api.create("p/w", in_group(json!({}))).await;
    // Once the first of them is canceled, this one is scheduled, and canceled as well.
    let waiting = json!({"dependencies": [pending], "requires": "all-resolved"});
    let waiting = api.create("p/w", in_group(waiting)).await;
    api.create("p/w", json!({})).await;

    let path = format!("task-group/{group}");
    let first = api.get(&format!("{path}/list?limit=2")).await.expect(200);
    assert_eq!((first["taskGroupId"].as_str(), first["tasks"].as_array().map(Vec::len)), (Some(&*group), Some(2)));
    assert_eq!(first["tasks"][0]["status"]["taskId"], done.as_str());
    assert_eq!(first["tasks"][0]["task"]["payload"], json!({"hello": "world"}));
    let token = first["continuationToken"].as_str().expect("there is another page");
    let rest = api.get(&format!("{path}/list?limit=2&continuationToken={token}")).await.expect(200);
    assert_eq!(rest["tasks"][0]["status"]["state"], "unscheduled");

    let reader = Api { authorized_scopes: Some(vec!["queue:list-task-group:*".to_owned()]), ..api.clone() };
    assert_eq!(reader.bare_post(&format!("{path}/cancel")).await.refusal(403).0, "InsufficientScopes");
    let canceled = api.bare_post(&format!("{path}/cancel")).await.expect(200);
    assert_eq!(canceled["taskGroupSize"], 3);
    assert_eq!(canceled["cancelledCount"], 2);
    assert_eq!(canceled["taskIds"], json!([pending, waiting]));
    for task in [&pending, &waiting] {
        assert_eq!(api.status(task).await["runs"][0]["reasonResolved"], "canceled");
    }
    assert_eq!(api.bare_post(&format!("{path}/cancel")).await.expect(200)["cancelledCount"], 0);
    let unknown = api.get(&format!("task-group/{}/list", slugid())).await;
    assert_eq!(unknown.refusal(404).0, "ResourceNotFound");
}
