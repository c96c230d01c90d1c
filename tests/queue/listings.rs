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
    for refused in ["since=monday", "state=done"] {
        let answer = api.get(&format!("journeyman/tasks?{refused}")).await;
        assert_eq!(answer.refusal(400).0, "InvalidRequestArguments");
    }

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
async fn the_activity_of_a_queue_is_counted_by_minute() {
    let server = TestQueue::new().await;
    let api = &server.api;
    let first = api.create("p/w", json!({})).await;
    server.advance(60).await;
    api.create("p/w", json!({})).await;
    let claims = api.claim_work("p/w", "w1", 1).await;
    let worker = api.with(&claims[0]["credentials"]);
    worker.bare_post(&format!("task/{first}/runs/0/failed")).await.expect(200);
    // What is resolved already is not counted again.
    api.bare_post(&format!("task/{first}/cancel")).await.expect(200);
    let queue = api.get("journeyman/task-queues").await.expect(200)["taskQueues"][0].take();
    assert_eq!(queue["taskQueueId"], "p/w");
    assert_eq!((&queue["pendingTasks"], &queue["claimedTasks"]), (&json!(1), &json!(0)));
    assert_eq!(queue["oldestPending"], iso(server.clock.unix_millis()));
    let minutes = queue["minutes"].as_array().expect("a list");
    let counts = |minute: &Value| ["created", "completed", "failed", "exceptions"].map(|name| minute[name].clone());
    assert_eq!(
        minutes.iter().map(counts).collect::<Vec<_>>(),
        [[1, 0, 0, 0], [1, 0, 1, 0]].map(|row| row.map(Value::from))
    );
    server.advance(3600).await;
    let queue = api.get("journeyman/task-queues").await.expect(200)["taskQueues"][0].take();
    assert_eq!(queue["minutes"], json!([]));
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

#[tokio::test]
async fn d8_definitions_and_statuses_of_several_tasks_are_read_at_once() {
    let server = TestQueue::new().await;
    let api = &server.api;
    let first = api.create("p/w", named("first")).await;
    let second = api.create("p/w", named("second")).await;
    let ids = json!({"taskIds": [second, slugid(), first]});
    let tasks = api.post("tasks", ids.clone()).await.expect(200);
    assert_eq!(tasks["tasks"].as_array().map(Vec::len), Some(2), "an unknown task is left out");
    assert_eq!(tasks["tasks"][0]["task"]["metadata"]["name"], "second");
    let page = api.post("tasks/status?limit=1", ids.clone()).await.expect(200);
    assert_eq!(page["statuses"][0]["status"]["taskId"], second.as_str());
    let token = page["continuationToken"].as_str().expect("there is another page");
    let path = format!("tasks/status?limit=1&continuationToken={token}");
    let page = api.post(&path, ids.clone()).await.expect(200);
    assert_eq!((&page["statuses"][0]["taskId"], page.get("continuationToken")), (&json!(first), None));
    let scopes = vec![format!("queue:status:{first}")];
    let narrow = Api { authorized_scopes: Some(scopes), ..api.clone() };
    assert_eq!(narrow.post("tasks/status", ids).await.refusal(403).0, "InsufficientScopes");
}

#[tokio::test]
async fn d8_task_queues_their_counts_and_workers_are_listed() {
    let server = TestQueue::new().await;
    let api = &server.api;
    for queue in ["p/w", "p/w", "p/w", "a/b"] {
        api.create(queue, json!({})).await;
    }
    let early = iso(server.clock.unix_millis());
    api.claim_work("p/w", "w2", 1).await;
    server.advance(10).await;
    api.claim_work("p/w", "w1", 1).await;
    let last = api.create("p/w", json!({"priority": "highest"})).await;
    api.claim_work("p/w", "w2", 1).await;

    let counts = api.get("task-queues/p%2Fw/counts").await.expect(200);
    assert_eq!((&counts["pendingTasks"], &counts["claimedTasks"]), (&json!(1), &json!(3)));
    assert_eq!((&counts["taskQueueId"], &counts["provisionerId"]), (&json!("p/w"), &json!("p")));
    let queues = api.get("task-queues").await.expect(200)["taskQueues"].take();
    assert_eq!((&queues[0]["taskQueueId"], &queues[1]["taskQueueId"]), (&json!("a/b"), &json!("p/w")));
    assert!(queues[0]["lastDateActive"].is_string() && queues[0]["expires"].is_string(), "{queues}");

    let path = "provisioners/p/worker-types/w/workers";
    let workers = api.get(path).await.expect(200)["workers"].take();
    assert_eq!((&workers[0]["workerId"], &workers[1]["workerId"]), (&json!("w1"), &json!("w2")));
    assert_eq!(workers[1]["firstClaim"], early.as_str());
    assert_eq!(workers[1]["latestTask"], json!({"taskId": last, "runId": 0}));
    let page = api.get(&format!("{path}?limit=1")).await.expect(200);
    assert_eq!((page["workers"].as_array().map(Vec::len), &page["continuationToken"]), (Some(1), &json!("1")));
    assert_eq!(api.get(&format!("{path}?quarantined=true")).await.expect(200)["workers"], json!([]));
}

#[tokio::test]
async fn d8_monitors_need_no_credentials() {
    let server = TestQueue::new().await;
    for path in ["ping", "__lbheartbeat__", "__heartbeat__"] {
        server.api.anonymous("GET", path, None).await.expect(200);
    }
    let version = server.api.anonymous("GET", "__version__", None).await.expect(200);
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
}
