//! Zuul's scheduler submits, our worker works.

use journeyman::source::zookeeper::{Dialect, ZooKeeperQueue};
use journeyman_platform::zookeeper::CreateMode;
use journeyman_platform::zookeeper::job_queue::{JobQueue, RequestState};
use serde_json::json;

use crate::zookeeper::support::{Tree, needs, never_ends, returns, start, until, within};

const SUBMIT: &str = "zuul_submit.py";

#[tokio::test(flavor = "multi_thread")]
async fn a_merge_of_zuul_gets_its_result() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let result = |_: &_| json!({ "merged": true, "updated": true, "commit": "abc", "files": { "zuul.yaml": "- job" } });
    let worker = start(tree.source(Dialect::ZuulMerger), returns(result));
    let Some(mut submitter) = tree.zuul(SUBMIT, &["merge", "--future", "--bytes", "3000000"]) else { return };
    let said = submitter.says("result").await;
    assert_eq!((&said["merged"], &said["data"]["commit"]), (&json!(true), &json!("abc")), "{said}");
    assert_eq!(submitter.ends().await, 0);
    let queue = tree.queue(Dialect::ZuulMerger);
    for folder in ["requests", "locks", "params", "result-data", "results", "waiters"] {
        let path = format!("{}/{folder}", queue.root());
        until(folder, async || {
            tree.session.children(&path).await.expect("it is answered").is_none_or(|left| left.is_empty())
        })
        .await;
    }
    worker.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_read_costs_the_others_nothing() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let (session, queue) = (&tree.session, tree.queue(Dialect::ZuulMerger));
    queue.ensure(session).await.expect("it is answered");
    let requested = br#"{"state":"requested","precedence":0,"result_path":"/x","uuid":"torn"}"#;
    for (id, request, params) in
        [("torn", &requested[..], &b"no zlib"[..]), ("odd", b"[1]", b""), ("old", b"{\"state\":7}", b"")]
    {
        session.ensure(&queue.path("params", id)).await.expect("it is answered");
        let shard = format!("{}/0000000000", queue.path("params", id));
        session.create(&shard, params, CreateMode::Persistent).await.expect("it is written");
        session.create(&queue.path("requests", id), request, CreateMode::Persistent).await.expect("it is written");
    }
    let worker = start(tree.source(Dialect::ZuulMerger), returns(|_| json!({ "merged": true })));
    let Some(mut submitter) = tree.zuul(SUBMIT, &["merge", "--future", "--precedence", "5"]) else { return };
    assert_eq!(submitter.says("result").await["merged"], json!(true));
    assert_eq!(submitter.ends().await, 0);
    until("the torn one is answered", async || {
        session.stat(&queue.path("results", "torn")).await.is_ok_and(|stat| stat.is_some())
    })
    .await;
    worker.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_merge_without_a_waiter_is_answered_by_an_event() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let worker = start(tree.source(Dialect::ZuulMerger), returns(|_| json!({ "merged": true, "commit": "abc" })));
    for (kind, event) in [("merge", "MergeCompletedEvent"), ("fileschanges", "FilesChangesCompletedEvent")] {
        let Some(mut submitter) = tree.zuul(SUBMIT, &["merge", "--type", kind]) else { return };
        let request = submitter.says("submitted").await["uuid"].clone();
        assert_eq!(submitter.says(event).await["data"]["request_uuid"], request);
        assert_eq!(submitter.ends().await, 0);
    }
    worker.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_of_zuul_is_started_and_completed() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let result = |payload: &serde_json::Value| json!({ "data": { "seen": payload["zuul"]["job"] }, "warnings": ["w"] });
    let worker = start(tree.source(Dialect::ZuulExecutor), returns(result));
    let Some(mut submitter) = tree.zuul(SUBMIT, &["build", "--wait", "--bytes", "3000000"]) else { return };
    let uuid = submitter.says("submitted").await["uuid"].clone();
    let started = submitter.says("BuildStartedEvent").await;
    assert_eq!(started["data"]["build_uuid"], uuid);
    let completed = submitter.says("BuildCompletedEvent").await["data"].clone();
    assert_eq!((&completed["build_uuid"], &completed["data"]["result"]), (&uuid, &json!("SUCCESS")), "{completed}");
    assert_eq!(completed["data"]["data"], json!({ "seen": "j" }));
    assert_eq!(submitter.ends().await, 0);
    worker.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn builds_of_several_zones_are_taken_by_their_precedence() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    for (uuid, zone, precedence) in [("low", "eu", "300"), ("other", "us", "100"), ("high", "eu", "100")] {
        let arguments = ["build", "--uuid", uuid, "--zone", zone, "--precedence", precedence];
        let Some(submitter) = tree.zuul(SUBMIT, &arguments) else { return };
        assert_eq!(submitter.ends().await, 0);
    }
    let submitter = tree.zuul(SUBMIT, &["build", "--uuid", "unzoned"]).expect("Zuul is there");
    assert_eq!(submitter.ends().await, 0);
    let queue = |zone: Option<&str>| ZooKeeperQueue {
        path: Dialect::ZuulExecutor.usual_queue(zone),
        zone: zone.map(str::to_owned),
    };
    let mut source = tree.source(Dialect::ZuulExecutor);
    source.queues = vec![queue(None), queue(Some("eu"))];
    let worker = start(source, returns(|_| json!({})));
    let mut events = tree.zuul(SUBMIT, &["events", "--count", "6"]).expect("Zuul is there");
    for uuid in ["high", "unzoned", "low"] {
        assert_eq!(events.says("BuildCompletedEvent").await["data"]["build_uuid"], uuid);
    }
    let other = JobQueue::new(&Dialect::ZuulExecutor.usual_queue(Some("us")));
    let other = other.read(&tree.session, "other").await.expect("it is answered").expect("it is there");
    assert_eq!(other.state(), Some(RequestState::Requested));
    worker.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn builds_are_canceled_before_and_after_they_start() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let Some(submitter) = tree.zuul(SUBMIT, &["build", "--uuid", "aaaa"]) else { return };
    assert_eq!(submitter.ends().await, 0);
    let mut cancel = tree.zuul(SUBMIT, &["cancel", "aaaa"]).expect("Zuul is there");
    assert_eq!(cancel.says("cancel").await["flagged"], false);
    assert_eq!(cancel.ends().await, 0);

    let (act, mut started) = never_ends();
    let worker = start(tree.source(Dialect::ZuulExecutor), act);
    assert_eq!(tree.zuul(SUBMIT, &["build", "--uuid", "bbbb"]).expect("Zuul is there").ends().await, 0);
    started.recv().await.expect("the second build runs");
    let mut cancel = tree.zuul(SUBMIT, &["cancel", "bbbb"]).expect("Zuul is there");
    assert_eq!(cancel.says("cancel").await["flagged"], true);
    assert_eq!(cancel.ends().await, 0);
    let mut events = tree.zuul(SUBMIT, &["events", "--count", "3"]).expect("Zuul is there");
    for (uuid, result) in [("aaaa", "CANCELED"), ("bbbb", "ABORTED")] {
        let completed = events.says("BuildCompletedEvent").await["data"].clone();
        assert_eq!(
            (completed["build_uuid"].as_str(), completed["data"]["result"].as_str()),
            (Some(uuid), Some(result))
        );
    }
    worker.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d3_the_example_runs_merge_jobs_with_zuuls_own_class() {
    let Some(python) = needs("JOURNEYMAN_TEST_ZUUL_PYTHON") else { return };
    let folder = tempfile::tempdir().expect("a folder");
    // Zuul asks for the version of a program that only its executors run.
    let script = r#"set -e; cd "$1"; mkdir -p bin repos/app
        printf '#!/bin/sh\necho bubblewrap 0.8.0\n' >bin/bwrap; chmod +x bin/bwrap; PATH=$1/bin:$PATH
        git init -q -b master repos/app; echo "- job" >repos/app/zuul.yaml; git -C repos/app add .
        git -C repos/app -c user.name=t -c user.email=t@t commit -qm one
        printf '[merger]\ngit_dir=%s/git\n[connection c]\ndriver=git\nbaseurl=file://%s/repos\n' "$1" "$1" >zuul.conf
        "$2" "$3" zuul.conf 3>result >log 2>&1 <<<"$4" || { cat log; exit 1; }; cat result"#;
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/handlers/zuul_merger.py");
    let payload =
        json!({ "connection": "c", "project": "app", "branch": "master", "files": ["zuul.yaml"], "dirs": [] });
    let document = json!({ "taskId": "t", "task": { "job_type": "cat" }, "payload": payload }).to_string();
    let mut command = tokio::process::Command::new("bash");
    command.args(["-c", script, "bash"]).arg(folder.path()).args([python.as_str(), example, &document]);
    let output = within("its end", command.output()).await.expect("bash starts");
    let mut said: serde_json::Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    assert!(said["value"]["elapsed_time"].take().is_number(), "{said}");
    let files = json!({ "zuul.yaml": "- job\n" });
    let value = json!({ "updated": true, "files": files, "elapsed_time": null });
    assert_eq!(said, json!({ "type": "result", "value": value }));
}
