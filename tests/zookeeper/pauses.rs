//! A build reports its status and pauses; Zuul's scheduler reads that and resumes it.

use std::sync::Arc;

use journeyman::config::Environment;
use journeyman::config::schema::ProgramHandler;
use journeyman::handler::program::Program;
use journeyman::handler::{Context, ExecuteError};
use journeyman::source::zookeeper::Dialect;
use journeyman::task::Reply;
use journeyman::worker::ExitReason;
use journeyman_platform::zookeeper::CreateMode;
use journeyman_platform::zookeeper::event_queue::EventQueue;
use journeyman_platform::zookeeper::job_queue::RequestState;
use journeyman_platform::zookeeper::submit::Submission;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::support::wire::{Way, Wire};
use crate::zookeeper::support::{Program as Zuul, Running, Tree, handler, read_events, serve, start, until, within};

const SUBMIT: &str = "zuul_submit.py";

fn reply(value: &Value) -> Reply {
    Reply::ok(value.to_string().into_bytes())
}

/// Pauses once, and tells the test how that ended.
async fn pauses(context: Context, told: mpsc::Sender<Result<(), String>>) -> Result<(), ExecuteError> {
    context.set_reply(reply(&json!({ "data": { "port": 5000 }, "secret_data": { "key": "k" } }))).expect("it fits");
    let resumed = context.pause().await.map_err(|error| error.message);
    told.send(resumed.clone()).await.expect("the test listens");
    context.set_reply(reply(&json!({ "data": { "port": null } }))).expect("it fits");
    resumed.map_err(ExecuteError::failed)
}

type Told = mpsc::Receiver<Result<(), String>>;

/// A worker whose build this is, once it is paused.
async fn paused_build(tree: &Tree, connect: Option<String>) -> Option<(Running, Told)> {
    let (told, receiver) = mpsc::channel(1);
    let mut source = tree.source(Dialect::ZuulExecutor);
    source.connect.servers = connect.unwrap_or(source.connect.servers);
    let worker = start(source, handler(move |_, context| pauses(context, told.clone())));
    submit(tree).await?;
    let paused = tree.zuul(SUBMIT, &["events", "--count", "2"])?.says("BuildPausedEvent").await;
    let data = json!({ "paused": true, "data": { "port": 5000 }, "secret_data": { "key": "k" } });
    assert_eq!((&paused["data"]["build_uuid"], &paused["data"]["data"]), (&json!("aaaa"), &data));
    assert_eq!(state(tree).await, Some(RequestState::Paused));
    Some((worker, receiver))
}

async fn submit(tree: &Tree) -> Option<()> {
    assert_eq!(tree.zuul(SUBMIT, &["build", "--uuid", "aaaa"])?.ends().await, 0);
    Some(())
}

async fn state(tree: &Tree) -> Option<RequestState> {
    let queue = tree.queue(Dialect::ZuulExecutor);
    queue.read(&tree.session, "aaaa").await.expect("it is answered").and_then(|request| request.state())
}

fn flag(tree: &Tree) -> String {
    format!("{}/resume", tree.queue(Dialect::ZuulExecutor).path("requests", "aaaa"))
}

async fn zuul_says(tree: &Tree, command: &str) {
    assert_eq!(tree.zuul(SUBMIT, &[command, "aaaa"]).expect("Zuul is there").ends().await, 0, "{command}");
}

/// How the build ended, which must have been once.
async fn completed(tree: &Tree) -> Value {
    let events = EventQueue::of_pipeline("t", "p");
    let ends = async || {
        let all = read_events(&events, &tree.session).await;
        let ends = all.into_iter().filter(|event| event.fields["event_type"] == "BuildCompletedEvent");
        ends.map(|event| event.fields["event_data"]["data"].clone()).collect::<Vec<_>>()
    };
    until("the end of the build", async || !ends().await.is_empty()).await;
    let ends = ends().await;
    assert_eq!(ends.len(), 1, "{ends:?}");
    assert_eq!(state(tree).await, Some(RequestState::Completed));
    ends[0].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_build_is_resumed() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let Some((worker, mut told)) = paused_build(&tree, None).await else { return };
    let shown = worker.control.claim_detail("aaaa").await.expect("it is held").detail.claim.progress;
    assert_eq!(shown.as_deref(), Some("paused"));
    zuul_says(&tree, "resume").await;
    assert_eq!(told.recv().await, Some(Ok(())));
    let completed = completed(&tree).await;
    assert_eq!((&completed["result"], &completed["data"]), (&json!("SUCCESS"), &json!({ "port": null })));
    assert!(tree.session.stat(&flag(&tree)).await.expect("it is answered").is_none(), "the flag is removed");
    worker.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_is_resumed_while_the_connection_is_lost_goes_on_after_it() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let wire = Wire::to(&tree.connect.servers).await;
    let Some((worker, mut told)) = paused_build(&tree, Some(wire.address())).await else { return };
    wire.set(Way::Stall);
    tree.session.create(&flag(&tree), b"", CreateMode::Persistent).await.expect("it is created");
    let before = wire.connections();
    wire.cut();
    until("another connection", async || wire.connections() > before).await;
    wire.set(Way::Carry);
    assert_eq!(within("the resume", told.recv()).await, Some(Ok(())));
    assert_eq!(completed(&tree).await["result"], "SUCCESS");
    worker.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_build_is_canceled() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let Some((worker, mut told)) = paused_build(&tree, None).await else { return };
    zuul_says(&tree, "cancel").await;
    assert!(within("the cancel", told.recv()).await.expect("it is told").is_err());
    assert_eq!(completed(&tree).await["result"], "ABORTED");
    worker.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_waits_for_a_paused_build_and_a_release_ends_it() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let Some((worker, mut told)) = paused_build(&tree, None).await else { return };
    worker.control.drain().await;
    zuul_says(&tree, "resume").await;
    assert_eq!(told.recv().await, Some(Ok(())));
    assert_eq!(completed(&tree).await["result"], "SUCCESS");
    worker.drained().await;

    let tree = Tree::with_pipeline().await.expect("the server is there");
    let (worker, mut told) = paused_build(&tree, None).await.expect("Zuul is there");
    worker.control.release(None).await;
    assert!(told.recv().await.expect("it is told").is_err());
    assert_eq!(completed(&tree).await["result"], "ABORTED");
    assert_eq!(worker.ended().await, ExitReason::Released);
}

/// The handler does not wait for its pauses: the first is resumed all the same, and the second ends with the build.
#[tokio::test(flavor = "multi_thread")]
async fn a_build_may_end_while_it_is_paused() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let (step, steps) = mpsc::channel::<()>(1);
    let steps = Arc::new(tokio::sync::Mutex::new(steps));
    let act = handler(move |_, context| {
        let steps = Arc::clone(&steps);
        async move {
            let mut steps = steps.lock().await;
            for _ in 0..2 {
                tokio::select! {
                    ended = context.pause() => panic!("it was not resumed: {ended:?}"),
                    _ = steps.recv() => {}
                }
                if let Err(refused) = context.pause().await {
                    assert!(refused.message.ends_with("it is paused already"), "{}", refused.message);
                }
                steps.recv().await.expect("the test goes on");
            }
            Ok(())
        }
    });
    let worker = start(tree.source(Dialect::ZuulExecutor), act);
    let Some(()) = submit(&tree).await else { return };
    for is_resumed in [true, false] {
        until("the pause", async || state(&tree).await == Some(RequestState::Paused)).await;
        step.send(()).await.expect("the handler listens");
        if is_resumed {
            zuul_says(&tree, "resume").await;
            until("the resume", async || {
                state(&tree).await == Some(RequestState::Running)
                    && tree.session.stat(&flag(&tree)).await.expect("it is answered").is_none()
            })
            .await;
        }
        step.send(()).await.expect("the handler listens");
    }
    assert_eq!(completed(&tree).await["result"], "SUCCESS");
    worker.drained().await;
}

const SCRIPT: &str = r#"
    echo '{"type":"answer","partial":true,"json":{"pre_fail":true}}' >&3
    echo '{"type":"result","value":{"data":{"port":5000},"secret_data":{"key":"k"}}}' >&3
    echo '{"type":"pause"}' >&3
    until [ -e resumed ]; do sleep 0.02; done
    echo '{"type":"result","value":{"data":{"port":null}}}' >&3"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_shell_script_reports_its_status_and_pauses() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let program = ProgramHandler::new(["sh", "-c", SCRIPT].map(str::to_owned).to_vec());
    let program = Program::new("test", program, &Environment::default()).expect("a handler");
    let worker = serve(tree.source(Dialect::ZuulExecutor), Arc::new(program));
    let Some(()) = submit(&tree).await else { return };
    let mut events: Zuul = tree.zuul(SUBMIT, &["events", "--count", "4"]).expect("Zuul is there");
    assert_eq!(events.says("BuildStatusEvent").await["data"]["data"], json!({ "pre_fail": true }));
    assert_eq!(events.says("BuildPausedEvent").await["data"]["data"]["data"], json!({ "port": 5000 }));
    zuul_says(&tree, "resume").await;
    let completed = events.says("BuildCompletedEvent").await["data"]["data"].clone();
    assert_eq!((&completed["result"], &completed["data"]), (&json!("SUCCESS"), &json!({ "port": null })));
    assert_eq!(events.ends().await, 0);
    worker.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_status_that_is_no_object_is_refused_and_so_are_pauses_of_other_dialects() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    for dialect in [Dialect::ZuulExecutor, Dialect::Native, Dialect::ZuulMerger] {
        let (told, mut receiver) = mpsc::channel(1);
        let act = handler(move |_, context| {
            let told = told.clone();
            async move {
                let status = context.send_partial_reply(reply(&json!([1]))).await.map_err(|error| error.message);
                let pause = match dialect {
                    Dialect::ZuulExecutor => Ok(()),
                    Dialect::Native | Dialect::ZuulMerger => context.pause().await.map_err(|error| error.message),
                };
                told.send((status, pause, context.progress())).await.expect("the test listens");
                Ok(())
            }
        });
        let worker = start(tree.source(dialect), act);
        let fields = [("tenant_name", "t"), ("pipeline_name", "p")];
        let submission = Submission {
            dialect,
            payload: json!({}),
            precedence: 200,
            fields: fields.map(|(key, value)| (key.to_owned(), Value::from(value))).into_iter().collect(),
            waits: false,
        };
        tree.queue(dialect).add(&tree.session, &submission).await.expect("it is added");
        let (status, pause, progress) = within("the run", receiver.recv()).await.expect("it is told");
        let (status_error, pause_error) = match dialect {
            Dialect::ZuulExecutor => ("must be a JSON object", None),
            Dialect::Native | Dialect::ZuulMerger => {
                ("no partial results", Some("this queue cannot pause a task".to_owned()))
            }
        };
        assert!(status.clone().expect_err("it is refused").contains(status_error), "{dialect:?}: {status:?}");
        assert_eq!((pause.err(), progress), (pause_error, None), "{dialect:?}");
        worker.drained().await;
    }
}
