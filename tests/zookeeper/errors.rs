//! What goes wrong in Zuul's queues: a test for each row of the catalogue that is not elsewhere.

use std::sync::Arc;

use futures_util::{StreamExt as _, stream};
use journeyman::handler::ExecuteError;
use journeyman::source::zookeeper::{Dialect, ZooKeeperSource};
use journeyman::source::{Grant, Source as _, SourceEvent};
use journeyman::task::Reply;
use journeyman_domain::claim::RunTerms;
use journeyman_domain::id::PriorityQueue;
use journeyman_domain::outcome::{ExceptionReason, Outcome};
use journeyman_domain::refusal::Refusal;
use journeyman_platform::zookeeper::client::Acl;
use journeyman_platform::zookeeper::components::{self, Component, ComponentState, Registration};
use journeyman_platform::zookeeper::event_queue::EventQueue;
use journeyman_platform::zookeeper::janitor::Janitor;
use journeyman_platform::zookeeper::job_queue::ClaimAttempt;
use journeyman_platform::zookeeper::submit::{CancelResult, Submission};
use journeyman_platform::zookeeper::{CreateMode, Session};
use serde_json::{Value, json};

use crate::zookeeper::commands::owner;
use crate::zookeeper::support::{QueuedEvent, Tree, handler, never_ends, read_events, returns, start, until, within};

const RESULTS: &str = "/zuul/events/tenant/t/pipelines/p/result";

pub(super) fn submission(dialect: Dialect, payload: Value) -> Submission {
    let fields = [("tenant_name", "t"), ("pipeline_name", "p")];
    Submission {
        dialect,
        payload,
        precedence: 200,
        fields: fields.map(|(key, value)| (key.to_owned(), Value::from(value))).into_iter().collect(),
        waits: true,
    }
}

async fn submit(tree: &Tree, dialect: Dialect) -> String {
    let submission = submission(dialect, json!({ "zuul": {} }));
    tree.queue(dialect).add(&tree.session, &submission).await.expect("it is added")
}

/// A request that a worker has claimed and not ended.
async fn claimed(tree: &Tree, dialect: Dialect) -> (ZooKeeperSource, Grant) {
    submit(tree, dialect).await;
    let source = ZooKeeperSource::new(tree.source(dialect));
    let mut batch = within("a claim", source.poll(PriorityQueue(0), 1)).await.expect("it is answered");
    (source, batch.grants.pop().expect("it is granted"))
}

async fn children(tree: &Tree, path: &str) -> Vec<String> {
    tree.session.children(path).await.expect("it is answered").unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_was_removed_while_it_ran_gets_no_event() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let (source, grant) = claimed(&tree, Dialect::ZuulExecutor).await;
    let (queue, id) = (tree.queue(Dialect::ZuulExecutor), grant.run.task.as_str().to_owned());
    queue.remove(&tree.session, &id).await.expect("it is answered");
    let refused = grant.claim.report(Outcome::Completed).await.expect_err("it is gone");
    assert_eq!(refused.refusal, Refusal::Gone, "{}", refused.message);
    drop(grant);
    source.close().await;
    let events = read_events(&EventQueue::new(RESULTS), &tree.session).await;
    assert!(events.iter().all(|event| event.fields["event_type"] == "BuildStartedEvent"), "{events:?}");
    assert_eq!(children(&tree, &format!("{}/locks", queue.root())).await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_another_process_has_completed_is_not_completed_again() {
    for dialect in [Dialect::ZuulExecutor, Dialect::ZuulMerger] {
        let Some(tree) = Tree::with_pipeline().await else { return };
        let (source, grant) = claimed(&tree, dialect).await;
        let path = tree.queue(dialect).path("requests", grant.run.task.as_str());
        tree.session.set(&path, br#"{"state":"completed"}"#, None).await.expect("it is written");
        let refused = grant.claim.report(Outcome::Completed).await.expect_err("another process was faster");
        assert_eq!(refused.refusal, Refusal::Gone, "{}", refused.message);
        drop(grant);
        source.close().await;
        let events = read_events(&EventQueue::new(RESULTS), &tree.session).await;
        assert!(events.iter().all(|event| event.fields["event_type"] == "BuildStartedEvent"), "{events:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_whose_pipeline_is_gone_is_completed_without_an_event() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let (_source, grant) = claimed(&tree, Dialect::ZuulExecutor).await;
    tree.session.delete_tree("/zuul/events/tenant/t/pipelines/p").await.expect("it is answered");
    grant.claim.report(Outcome::Completed).await.expect("it is completed");
    let (queue, id) = (tree.queue(Dialect::ZuulExecutor), grant.run.task.as_str());
    let request = queue.read(&tree.session, id).await.expect("it is answered").expect("the scheduler removes it");
    assert_eq!(serde_json::to_value(request.state()).expect("it is JSON"), json!("completed"));
    assert!(tree.session.stat(RESULTS).await.expect("it is answered").is_none(), "the queue was made again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_parameters_fails_and_is_answered() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let queue = tree.queue(Dialect::ZuulExecutor);
    let id = submit(&tree, Dialect::ZuulExecutor).await;
    tree.session.delete_tree(&queue.path("params", &id)).await.expect("it is answered");
    let (act, _started) = never_ends();
    let worker = start(tree.source(Dialect::ZuulExecutor), act);
    let events = EventQueue::new(RESULTS);
    let ended = async || {
        let events = read_events(&events, &tree.session).await;
        events.iter().any(|event| event.fields["event_data"]["data"]["result"] == "ERROR")
    };
    until("the build has failed", ended).await;
    worker.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_was_removed_while_it_was_held_ends_the_claim() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let (source, grant) = claimed(&tree, Dialect::ZuulMerger).await;
    let queue = tree.queue(Dialect::ZuulMerger);
    let lock = queue.path("locks", grant.run.task.as_str());
    tree.session.delete_tree(&lock).await.expect("it is answered");
    let refused = grant.claim.renew().await.expect_err("its lock is gone");
    assert_eq!(refused.refusal, Refusal::Gone, "{}", refused.message);
    drop(grant);
    source.close().await;
    assert_eq!(children(&tree, &format!("{}/locks", queue.root())).await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_comes_too_late_leaves_no_lock_folder_behind() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let queue = tree.queue(Dialect::ZuulMerger);
    queue.ensure(&tree.session).await.expect("it is answered");
    let attempt = queue.claim(&tree.session, "gone", None).await.expect("it is answered");
    assert!(matches!(attempt, ClaimAttempt::Settled), "{attempt:?}");
    assert_eq!(children(&tree, &format!("{}/locks", queue.root())).await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_nobody_reads_is_refused_at_its_limit() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let event = format!("{RESULTS}/queue/q");
    let creates = (0..90_001).map(|_| tree.session.create(&event, b"", CreateMode::PersistentSequential));
    let created = stream::iter(creates).buffer_unordered(1_000).all(async |created| created.is_ok());
    assert!(created.await);
    let refused = EventQueue::new(RESULTS).put(&tree.session, "MergeCompletedEvent", json!({})).await;
    let refused = refused.expect_err("Zuul would drop it").to_string();
    assert!(refused.contains("90001 unread events"), "{refused}");
    // All tests share the server and its memory.
    let queue = format!("{RESULTS}/queue");
    let names = tree.session.children(&queue).await.expect("it is answered").unwrap_or_default();
    let paths: Vec<String> = names.iter().map(|name| format!("{queue}/{name}")).collect();
    let deletes = paths.iter().map(|path| tree.session.delete(path));
    assert!(stream::iter(deletes).buffer_unordered(1_000).all(async |deleted| deleted.is_ok()).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_registers_with_the_data_formats_of_the_oldest_process() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let scheduler = Component {
        state: ComponentState::Running,
        hostname: "scheduler".to_owned(),
        kind: "scheduler".to_owned(),
        version: "12".to_owned(),
        model_api: 30,
        own: serde_json::Map::new(),
    };
    let registered = Registration::create(&tree.session, "/zuul/components", scheduler).await;
    let _scheduler = registered.expect("it is registered");
    let (_source, _grant) = claimed(&tree, Dialect::ZuulMerger).await;
    let ours = components::list(&tree.session, "/zuul/components", "merger").await.expect("it is answered");
    let seen: Vec<_> = ours.iter().map(|(_, ours)| (ours.model_api, ours.state)).collect();
    assert_eq!(seen, [(30, ComponentState::Running)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancel_that_came_before_the_claim_keeps_the_build_from_starting() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let queue = tree.queue(Dialect::ZuulExecutor);
    let id = submit(&tree, Dialect::ZuulExecutor).await;
    let flag = queue.cancel_flag(&id);
    tree.session.create(&flag, b"", CreateMode::Persistent).await.expect("it is created");
    let (act, mut started) = never_ends();
    let worker = start(tree.source(Dialect::ZuulExecutor), act);
    let events = EventQueue::new(RESULTS);
    let ended = async || {
        let events = read_events(&events, &tree.session).await;
        events.iter().any(|event| event.fields["event_data"]["data"]["result"] == "ABORTED")
    };
    until("the build has ended", ended).await;
    assert!(started.try_recv().is_err(), "it was started");
    assert!(tree.session.stat(&flag).await.expect("it is answered").is_none(), "the flag is left");
    worker.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn our_cancel_ends_what_no_worker_holds_and_asks_the_worker_of_the_rest() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let (session, queue) = (&tree.session, tree.queue(Dialect::ZuulExecutor));
    let cancel = async |id: &str| queue.cancel(session, Dialect::ZuulExecutor, id).await.expect("it is answered");
    let id = submit(&tree, Dialect::ZuulExecutor).await;
    assert_eq!(cancel(&id).await, CancelResult::Canceled);
    assert_eq!(cancel(&id).await, CancelResult::Gone);
    let events = read_events(&EventQueue::new(RESULTS), session).await;
    let results: Vec<_> = events.iter().map(|event| &event.fields["event_data"]["data"]["result"]).collect();
    assert_eq!(results, [&json!("CANCELED")]);

    let (act, mut started) = never_ends();
    let worker = start(tree.source(Dialect::ZuulExecutor), act);
    let id = submit(&tree, Dialect::ZuulExecutor).await;
    started.recv().await.expect("it runs");
    assert_eq!(cancel(&id).await, CancelResult::Requested);
    let ended = async || {
        let events = read_events(&EventQueue::new(RESULTS), session).await;
        events.iter().any(|event| event.fields["event_data"]["data"]["result"] == "ABORTED")
    };
    until("the worker has ended it", ended).await;
    worker.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_a_canceled_request_is_told() {
    for dialect in [Dialect::ZuulMerger, Dialect::Native] {
        let Some(tree) = Tree::new().await else { return };
        let queue = tree.queue(dialect);
        let id = submit(&tree, dialect).await;
        let (waiting, canceling) = tokio::join!(
            within("the answer", queue.wait_for_result(&tree.session, dialect, &id)),
            queue.cancel(&tree.session, dialect, &id),
        );
        assert_eq!(canceling.expect("it is answered"), CancelResult::Canceled);
        let told = waiting.expect_err("there is no result").to_string();
        assert!(told.contains("canceled"), "{told}");
    }
}

/// Parameters of a build whose frozen job, changed as the test wants it, is in the tree.
pub(crate) async fn frozen_build(tree: &Tree, build_set: &str, change: impl FnOnce(&mut Value)) -> Value {
    let mut job: Value = serde_json::from_str(include_str!("../../fixtures/zookeeper/frozen-job.json")).expect("JSON");
    let mut params: Value =
        serde_json::from_str(include_str!("../../fixtures/zookeeper/build-params.json")).expect("JSON");
    change(&mut job);
    let path = format!("{build_set}/job/{}", job["uuid"].as_str().expect("text"));
    (params["job_ref"], params["semaphore_handle"]["buildset_path"]) = (path.as_str().into(), build_set.into());
    // The same compressed JSON is the first of its shards and the whole of a node.
    tree.session.write_shards(&path, job.to_string().as_bytes()).await.expect("it is written");
    let shard = format!("{path}/{:010}", 0);
    let (data, _) = tree.session.get(&shard).await.expect("it is answered").expect("it is there");
    tree.session.set(&path, &data, None).await.expect("it is written");
    tree.session.delete(&shard).await.expect("it is answered");
    params
}

const SEMAPHORE: &str = "/zuul/semaphores/t/one-at-a-time";

#[tokio::test(flavor = "multi_thread")]
async fn d1_four_builds_under_a_semaphore_of_one_run_one_at_a_time() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let queue = tree.queue(Dialect::ZuulExecutor);
    for number in 0..4 {
        let params = frozen_build(&tree, &format!("/zuul/set{number}"), |_| {}).await;
        queue.add(&tree.session, &submission(Dialect::ZuulExecutor, params)).await.expect("it is added");
    }
    for _ in 0..4 {
        let source = ZooKeeperSource::new(tree.source(Dialect::ZuulExecutor));
        let batch = within("a claim", source.poll(PriorityQueue(0), 4)).await.expect("it is answered");
        assert_eq!(batch.grants.len(), 1, "{:?}", batch.grants);
        assert_eq!(tree.session.semaphore_holders(SEMAPHORE).await.expect("it is answered").len(), 1);
        batch.grants[0].claim.report(Outcome::Completed).await.expect("it is completed");
        drop(batch);
        source.close().await;
    }
    assert_eq!(tree.session.semaphore_holders(SEMAPHORE).await.expect("it is answered"), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn d1_a_build_waits_for_the_semaphore_of_a_playbook_and_gives_it_back() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let session = &tree.session;
    for folder in ["/zuul/semaphores/t", "/zuul/events/tenant/t/management/queue"] {
        session.ensure(folder).await.expect("it is created");
    }
    let other = br#"[{"buildset_path":"/zuul/other","job_name":"j"}]"#;
    session.create(SEMAPHORE, other, CreateMode::Persistent).await.expect("it is created");
    let move_to_pre_run = |job: &mut Value| job["pre_run"] = job["run"].take();
    let params = frozen_build(&tree, "/zuul/tenant/t", move_to_pre_run).await;
    let queue = tree.queue(Dialect::ZuulExecutor);
    let added = queue.add(session, &submission(Dialect::ZuulExecutor, params)).await;
    let (act, mut started) = never_ends();
    let worker = start(tree.source(Dialect::ZuulExecutor), act);
    // It is claimed, found to wait, and given back.
    let lock = format!("{}/locks", queue.root());
    until("it was tried", async || {
        let folders = children(&tree, &lock).await;
        folders.len() == 1 && children(&tree, &format!("{lock}/{}", folders[0])).await.is_empty()
    })
    .await;
    assert!(started.try_recv().is_err(), "it was started without a place");
    session.set(SEMAPHORE, b"[]", None).await.expect("it is written");
    within("its start", started.recv()).await.expect("it runs");
    assert_eq!(session.semaphore_holders(SEMAPHORE).await.expect("it is answered").len(), 1);
    let canceled = queue.cancel(session, Dialect::ZuulExecutor, &added.expect("it is added")).await;
    assert_eq!(canceled.expect("it is answered"), CancelResult::Requested);
    worker.drained().await;
    assert_eq!(session.semaphore_holders(SEMAPHORE).await.expect("it is answered"), []);
    let told = read_events(&EventQueue::new("/zuul/events/tenant/t/management"), session).await;
    assert_eq!(told[0].fields["event_data"], json!({ "semaphore_name": "one-at-a-time" }));
}

#[tokio::test(flavor = "multi_thread")]
async fn d1_a_build_whose_job_cannot_be_read_is_not_run_without_it() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let odd = frozen_build(&tree, "/zuul/odd", |job| job["run"][0]["semaphores"][0]["max"] = Value::Null).await;
    let mut gone = odd.clone();
    gone["job_ref"] = "/zuul/gone".into();
    let mut unnamed = frozen_build(&tree, "/zuul/unnamed", |_| {}).await;
    unnamed["semaphore_handle"] = Value::Null;
    let queue = tree.queue(Dialect::ZuulExecutor);
    for params in [odd, gone, unnamed] {
        queue.add(&tree.session, &submission(Dialect::ZuulExecutor, params)).await.expect("it is added");
    }
    let (act, mut started) = never_ends();
    let worker = start(tree.source(Dialect::ZuulExecutor), act);
    until("the builds have failed", async || {
        let events = read_events(&EventQueue::new(RESULTS), &tree.session).await;
        let result = |event: &QueuedEvent| event.fields["event_data"]["data"]["result"].clone();
        events.iter().filter(|event| result(event) == "ERROR").count() == 3
    })
    .await;
    worker.drained().await;
    assert!(started.try_recv().is_err(), "it was started");
}

#[tokio::test(flavor = "multi_thread")]
async fn d3_a_handler_sees_the_fields_of_its_request_and_the_job_of_its_build() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let beside = "/zuul/set/job/beside/group_variables";
    let data = json!({ "data": { "all": { "number": 2 } }, "hash": "h", "_path": beside });
    tree.session.write_shards(beside, data.to_string().as_bytes()).await.expect("it is written");
    let params = frozen_build(&tree, "/zuul/set", |job| {
        job["variables"]["data"] = json!({ "number": 1 });
        job["group_variables"] = json!({ "storage": "offload", "path": beside, "hash": "h" });
        job["secrets"]["data"] = json!(["hidden"]);
    })
    .await;
    for (dialect, payload, own) in [
        (Dialect::ZuulMerger, json!({ "files": [] }), json!({ "job_type": "merge" })),
        (Dialect::ZuulExecutor, params, json!({})),
    ] {
        let mut submission = submission(dialect, payload.clone());
        submission.fields.extend([("event_id".to_owned(), "e1".into()), ("build_set_uuid".to_owned(), "b1".into())]);
        tree.queue(dialect).add(&tree.session, &submission).await.expect("it is added");
        let source = ZooKeeperSource::new(tree.source(dialect));
        let batch = within("a claim", source.poll(PriorityQueue(0), 1)).await.expect("it is answered");
        let mut task = batch.grants[0].task.json().clone();
        let job = task["job"].take();
        let mut expected = json!({
            "payload": payload, "tenant_name": "t", "pipeline_name": "p", "event_id": "e1", "build_set_uuid": "b1",
            "precedence": 200, "job": null,
        });
        expected.as_object_mut().expect("an object").extend(own.as_object().expect("an object").clone());
        assert_eq!(task, expected);
        if dialect == Dialect::ZuulExecutor {
            assert_eq!((&job["name"], &job["timeout"]), (&json!("sem1"), &json!(120)), "{job}");
            assert_eq!(job["run"][0]["path"], "playbooks/base/run.yaml", "{job}");
            assert_eq!(job["variables"], json!({ "number": 1 }));
            assert_eq!(job["group_variables"], json!({ "all": { "number": 2 } }));
            assert_eq!(job.get("secrets"), None);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn d3_a_build_that_takes_longer_than_its_job_may_is_timed_out() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let params = frozen_build(&tree, "/zuul/set", |job| job["timeout"] = json!(1)).await;
    tree.queue(Dialect::ZuulExecutor)
        .add(&tree.session, &submission(Dialect::ZuulExecutor, params))
        .await
        .expect("it is added");
    let (act, mut started) = never_ends();
    let worker = start(tree.source(Dialect::ZuulExecutor), act);
    within("its start", started.recv()).await.expect("it runs");
    until("the build has ended", async || {
        let events = read_events(&EventQueue::new(RESULTS), &tree.session).await;
        events.iter().any(|event| event.fields["event_data"]["data"]["result"] == "TIMED_OUT")
    })
    .await;
    worker.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d3_a_build_that_pauses_has_no_deadline_any_more() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let params = frozen_build(&tree, "/zuul/set", |_| {}).await;
    let submission = submission(Dialect::ZuulExecutor, params);
    tree.queue(Dialect::ZuulExecutor).add(&tree.session, &submission).await.expect("it is added");
    let source = ZooKeeperSource::new(tree.source(Dialect::ZuulExecutor));
    let batch = within("a claim", source.poll(PriorityQueue(0), 1)).await.expect("it is answered");
    let grant = &batch.grants[0];
    assert!(grant.terms.deadline.is_some());
    let unlimited = RunTerms { deadline: None, ..grant.terms };
    tokio::select! {
        resumed = grant.results.as_ref().expect("it has a result").pause() => panic!("it was not resumed: {resumed:?}"),
        event = within("its terms", source.next_event()) => {
            assert_eq!(event, SourceEvent::Terms(grant.run.clone(), unlimited));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_whose_result_is_larger_than_a_node_fails_once() {
    let Some(tree) = Tree::new().await else { return };
    let queue = tree.queue(Dialect::Native);
    // The second fits before it is written as JSON.
    for (result, limit) in [("x".repeat(1_500_000), None), ("\u{1}".repeat(900_000), Some("1,000,000"))] {
        let id = submit(&tree, Dialect::Native).await;
        let act = handler(move |_, context| {
            let set = context.set_reply(Reply::ok(result.clone().into_bytes()));
            std::future::ready(set.map_err(|error| ExecuteError::failed(error.to_string())))
        });
        let worker = start(tree.source(Dialect::Native), act);
        let waiting = queue.wait_for_result(&tree.session, Dialect::Native, &id);
        let ended = within("its end", waiting).await.expect("it can be read");
        assert_eq!(ended["outcome"], "failed", "{ended}");
        let reason = ended["reason"].as_str().unwrap_or_default();
        assert!(limit.is_none_or(|limit| reason.contains(limit)), "{reason}");
        worker.drained().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn d6_a_task_that_ends_its_worker_each_time_is_given_up() {
    let Some(tree) = Tree::new().await else { return };
    let queue = tree.queue(Dialect::Native);
    let id = submit(&tree, Dialect::Native).await;
    let path = queue.path("requests", &id);
    let mut claims = 0;
    // Its deaths are counted as those of workers that claimed it and said nothing more.
    let died = async || {
        let worker = Arc::new(Session::connect(&tree.connect).await.expect("it is connected"));
        let source = ZooKeeperSource::new(tree.source(Dialect::Native));
        let polling = source.poll(PriorityQueue(0), 1);
        let ended = queue.wait_for_result(&tree.session, Dialect::Native, &id);
        tokio::select! {
            batch = polling => {
                let (data, _) = worker.get(&path).await.expect("it is answered").expect("it is there");
                let batch = batch.expect("it is answered");
                batch.grants[0].claim.report(Outcome::Exception(ExceptionReason::WorkerShutdown)).await.expect("put back");
                // The state in which its claim left it.
                worker.set(&path, &data, None).await.expect("it is written");
                None
            }
            ended = ended => Some(ended.expect("it is read")),
        }
    };
    let ended = loop {
        match within("its next claim", died()).await {
            Some(ended) => break ended,
            None => claims += 1,
        }
        assert!(claims < 20, "it is claimed for ever");
    };
    assert_eq!((claims, &ended["outcome"]), (5, &json!("exception (internal-error)")), "{ended}");
    let reason = ended["reason"].as_str().expect("a reason");
    assert!(reason.contains("5 times"), "{reason}");
    assert_eq!(children(&tree, &format!("{}/locks", queue.root())).await, Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn d6_a_task_that_workers_hand_back_is_not_given_up() {
    let Some(tree) = Tree::new().await else { return };
    submit(&tree, Dialect::Native).await;
    for _ in 0..7 {
        let source = ZooKeeperSource::new(tree.source(Dialect::Native));
        let batch = within("a claim", source.poll(PriorityQueue(0), 1)).await.expect("it is answered");
        let shutdown = Outcome::Exception(ExceptionReason::WorkerShutdown);
        batch.grants[0].claim.report(shutdown).await.expect("it is put back");
        drop(batch);
        source.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_may_not_be_read_keeps_no_other_waiting() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let queue = tree.queue(Dialect::ZuulMerger);
    let id = submit(&tree, Dialect::ZuulMerger).await;
    let owner = owner(&tree).await;
    let params = queue.path("params", &id);
    tree.session.delete_tree(&params).await.expect("it is answered");
    owner.create(&params, b"", CreateMode::Persistent, Acl::CreatorAll).await.expect("it is made");
    let second = submit(&tree, Dialect::ZuulMerger).await;
    let worker = start(tree.source(Dialect::ZuulMerger), returns(|_| json!({})));
    let waiting = queue.wait_for_result(&tree.session, Dialect::ZuulMerger, &second);
    within("its result", waiting).await.expect("it can be read");
    worker.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_read_or_ended_keeps_a_janitor_from_nothing_else() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let session = &tree.session;
    session.ensure("/zuul/semaphores/t").await.expect("it is created");
    let old = br#"["old-handle"]"#;
    session.create("/zuul/semaphores/t/s", old, CreateMode::Persistent).await.expect("it is created");
    let queue = tree.queue(Dialect::ZuulExecutor);
    queue.ensure(session).await.expect("it is answered");
    // The name of the first one's tenant is no name of a node.
    for (id, tenant) in [("a", "../.."), ("b", "t")] {
        let build =
            json!({ "uuid": id, "state": "running", "tenant_name": tenant, "pipeline_name": "p", "precedence": 1 });
        let path = queue.path("requests", id);
        session.create(&path, build.to_string().as_bytes(), CreateMode::Persistent).await.expect("it is created");
    }
    let mut janitor = Janitor::new(queue, Dialect::ZuulExecutor);
    let looks = [janitor.clean(session).await, janitor.clean(session).await];
    let lost: Vec<String> =
        looks.into_iter().flat_map(|look| look.expect("it is answered").expect("it is free").lost).collect();
    assert_eq!(lost, ["b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_a_janitor_ends_what_another_has_left() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let (queue, id) = (tree.queue(Dialect::ZuulMerger), submit(&tree, Dialect::ZuulMerger).await);
    let mut request = queue.read(&tree.session, &id).await.expect("it is answered").expect("it is there");
    let running = journeyman_platform::zookeeper::job_queue::RequestState::Running;
    assert!(queue.set_state(&tree.session, &mut request, running).await.expect("it is answered"));
    let (act, _started) = never_ends();
    let mut source = tree.source(Dialect::ZuulMerger);
    source.janitor = true;
    let worker = start(source, act);
    let waiting = queue.wait_for_result(&tree.session, Dialect::ZuulMerger, &id);
    assert_eq!(within("its result", waiting).await.expect("it can be read"), json!({}));
    worker.drained().await;
}
