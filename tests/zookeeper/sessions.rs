//! Lost connections and lost sessions.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use journeyman::handler::Context;
use journeyman::source::zookeeper::Dialect;
use journeyman::task::Reply;
use journeyman_platform::zookeeper::event_queue::EventQueue;
use journeyman_platform::zookeeper::job_queue::RequestState;
use journeyman_platform::zookeeper::lock::{HeldLock, LockMode};
use journeyman_platform::zookeeper::submit::Submission;
use journeyman_platform::zookeeper::{ConnectConfig, CreateMode, Session};
use serde_json::json;

use crate::support::wire::{Way, Wire};
use crate::zookeeper::support::{
    Running, Tree, handler, never_ends, read_events, returns, start, until, waits, within,
};

fn task() -> Submission {
    Submission {
        dialect: Dialect::Native,
        payload: json!({ "number": 1 }),
        precedence: 200,
        fields: serde_json::Map::new(),
        waits: true,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_is_submitted_while_the_connection_is_lost_is_found_after_it() {
    let Some(tree) = Tree::new().await else { return };
    let wire = Wire::to(&tree.connect.servers).await;
    let mut source = tree.source(Dialect::Native);
    source.connect.servers = wire.address();
    let worker = start(source, returns(|payload| payload.clone()));
    let queue = tree.queue(Dialect::Native);
    for _ in 0..3 {
        let id = queue.add(&tree.session, &task()).await.expect("it is added");
        let result = queue.wait_for_result(&tree.session, Dialect::Native, &id);
        assert_eq!(within("the result", result).await.expect("it is read")["result"], json!({ "number": 1 }));
        wire.cut();
    }
    worker.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_expires_ends_the_payload_and_another_worker_runs_the_task() {
    let Some(tree) = Tree::new().await else { return };
    let wire = Wire::to(&tree.connect.servers).await;
    let mut source = tree.source(Dialect::Native);
    source.connect.servers = wire.address();
    source.connect.session_timeout = Duration::from_secs(2);
    let (act, mut started) = never_ends();
    let first = start(source, act);
    let queue = tree.queue(Dialect::Native);
    let id = queue.add(&tree.session, &task()).await.expect("it is added");
    started.recv().await.expect("it runs");
    wire.set(Way::Stall);
    let second = start(tree.source(Dialect::Native), returns(|payload| payload.clone()));
    let result = queue.wait_for_result(&tree.session, Dialect::Native, &id);
    assert_eq!(within("the result", result).await.expect("it is read")["outcome"], "completed");
    until("the loss is counted", async || first.control.counts().sources.outcomes.lost == 1).await;
    wire.set(Way::Carry);
    second.drained().await;
    first.drained().await;
}

/// Loses the answers that are on their way.
async fn reset(wire: &Wire) {
    let before = wire.connections();
    wire.cut();
    until("another connection", async || wire.connections() > before).await;
    wire.set(Way::Carry);
}

/// Calls whose answers a reset of the connection loses, after the server has performed them.
#[tokio::test(flavor = "multi_thread")]
async fn answers_that_a_reset_connection_loses_are_asked_for_again() {
    let Some(tree) = Tree::with_pipeline().await else { return };
    let wire = Wire::to(&tree.connect.servers).await;
    let connect = ConnectConfig { servers: wire.address(), ..tree.connect.clone() };
    let session = Arc::new(Session::connect(&connect).await.expect("the server answers"));
    let merge = Submission { dialect: Dialect::ZuulMerger, ..task() };
    let queue = tree.queue(Dialect::ZuulMerger);
    queue.ensure(&tree.session).await.expect("it is answered");
    let id = queue.add(&tree.session, &merge).await.expect("it is added");
    let (locks, path) = (queue.path("locks", &id), queue.path("requests", &id));
    tree.session.ensure(&locks).await.expect("it is created");
    let reset_once = async |condition: &dyn Fn(&str) -> bool| {
        until("the server has performed it", async || {
            let contenders = tree.session.children(&locks).await.expect("it is answered").unwrap_or_default();
            let request = tree.session.get(&path).await.expect("it is answered").expect("it is there").0;
            condition(&format!("{contenders:?} {}", String::from_utf8_lossy(&request)))
        })
        .await;
        reset(&wire).await;
    };
    wire.set(Way::Unanswered);
    let (lock, ()) = tokio::join!(
        HeldLock::try_take(&session, &locks, LockMode::Exclusive),
        reset_once(&|seen| seen.contains("__lock__"))
    );
    let lock = lock.expect("it is asked for again").expect("it is free");
    let mut request = queue.read(&session, &id).await.expect("it is answered").expect("it is there");
    wire.set(Way::Unanswered);
    let (is_set, ()) = tokio::join!(
        queue.set_state(&session, &mut request, RequestState::Running),
        reset_once(&|seen| seen.contains("running"))
    );
    assert!(is_set.expect("it is asked for again"), "its own write is taken for another's");
    wire.set(Way::Unanswered);
    let (released, ()) = tokio::join!(lock.release(), reset_once(&|seen| seen.starts_with("[]")));
    released.expect("it is asked for again");
}

/// Whether its submitter waits for its result or not, and has removed it by then or not.
#[tokio::test(flavor = "multi_thread")]
async fn d7_a_task_whose_end_is_not_answered_before_a_reset_is_completed_once() {
    for waits_for_result in [true, false] {
        let Some(tree) = Tree::new().await else { return };
        let wire = Wire::to(&tree.connect.servers).await;
        let mut source = tree.source(Dialect::Native);
        source.connect.servers = wire.address();
        let (act, mut started, go_on) = waits();
        let worker = start(source, act);
        let queue = tree.queue(Dialect::Native);
        let submission = Submission { waits: waits_for_result, ..task() };
        let id = queue.add(&tree.session, &submission).await.expect("it is added");
        within("its start", started.recv()).await.expect("it runs");
        wire.set(Way::Unanswered);
        go_on.send(true).expect("it waits");
        if waits_for_result {
            let result = queue.wait_for_result(&tree.session, Dialect::Native, &id);
            assert_eq!(within("the result", result).await.expect("it is read")["outcome"], "completed");
        }
        let is_empty = async |folder: &str| {
            let path = format!("{}/{folder}", queue.root());
            tree.session.children(&path).await.expect("it is answered").is_none_or(|names| names.is_empty())
        };
        until("it is removed", async || is_empty("requests").await).await;
        reset(&wire).await;
        until("its lock is gone", async || is_empty("locks").await).await;
        let control = worker.control.clone();
        worker.drained().await;
        let outcomes = control.counts().sources.outcomes;
        assert_eq!((outcomes.completed, outcomes.superseded, outcomes.lost), (1, 0, 0));
    }
}

/// A worker whose payload ends while its server cannot be reached, until its session has expired there.
async fn finished_without_a_session(
    dialect: Dialect,
    meanwhile: impl AsyncFnOnce(&Tree, &str),
) -> Option<(Tree, Running, Wire)> {
    let tree = Tree::with_pipeline().await?;
    let wire = Wire::to(&tree.connect.servers).await;
    let mut source = tree.source(dialect);
    (source.connect.servers, source.connect.session_timeout) = (wire.address(), Duration::from_secs(6));
    let (started, mut starts) = tokio::sync::mpsc::channel(1);
    let (go_on, may_go_on) = tokio::sync::watch::channel(false);
    let act = handler(move |_: serde_json::Value, context: Context| {
        let (started, mut may_go_on) = (started.clone(), may_go_on.clone());
        async move {
            started.send(()).await.expect("the test listens");
            may_go_on.wait_for(|may| *may).await.expect("the test lets it go on");
            context.set_reply(Reply::ok(json!({ "merged": true }).to_string().into_bytes())).expect("it is accepted");
            Ok(())
        }
    });
    let worker = start(source, act);
    let queue = tree.queue(dialect);
    let fields = [("tenant_name", "t"), ("pipeline_name", "p")];
    let fields = fields.map(|(key, value)| (key.to_owned(), value.into())).into_iter().collect();
    let id = queue.add(&tree.session, &Submission { dialect, fields, ..task() }).await.expect("it is added");
    within("its start", starts.recv()).await.expect("it runs");
    wire.set(Way::Stall);
    go_on.send_replace(true);
    let lock = queue.path("locks", &id);
    until("its session has expired", async || match dialect {
        Dialect::Native => tree.session.stat(&lock).await.expect("it is answered").is_none(),
        Dialect::ZuulMerger | Dialect::ZuulExecutor => {
            tree.session.children(&lock).await.expect("it is answered").is_none_or(|names| names.is_empty())
        }
    })
    .await;
    meanwhile(&tree, &queue.path("requests", &id)).await;
    wire.cut();
    wire.set(Way::Carry);
    let outcomes = || worker.control.counts().sources.outcomes;
    until("its end is counted", async || {
        let outcomes = outcomes();
        outcomes.completed + outcomes.superseded + outcomes.lost + outcomes.unconfirmed == 1
    })
    .await;
    Some((tree, worker, wire))
}

async fn completed_builds(tree: &Tree) -> usize {
    let events = read_events(&EventQueue::of_pipeline("t", "p"), &tree.session).await;
    events.iter().filter(|event| event.fields["event_type"] == "BuildCompletedEvent").count()
}

#[tokio::test(flavor = "multi_thread")]
async fn d2_a_result_that_was_finished_before_its_session_expired_is_stored_in_another() {
    let check = async |dialect| {
        let Some((tree, worker, _wire)) = finished_without_a_session(dialect, async |_, _| {}).await else { return };
        assert_eq!(worker.control.counts().sources.outcomes.completed, 1, "{dialect:?}");
        let queue = tree.queue(dialect);
        if dialect == Dialect::ZuulExecutor {
            assert_eq!(completed_builds(&tree).await, 1);
        } else {
            let results = format!("{}/results", queue.root());
            let ids = tree.session.children(&results).await.expect("it is answered").unwrap_or_default();
            let result = queue.wait_for_result(&tree.session, dialect, &ids[0]).await.expect("it is read");
            assert!(result == json!({ "merged": true }) || result["outcome"] == "completed", "{result}");
            let left = tree.session.children(&format!("{}/requests", queue.root())).await.expect("it is answered");
            assert_eq!(left, Some(Vec::new()));
        }
        worker.drained().await;
    };
    tokio::join!(check(Dialect::ZuulMerger), check(Dialect::ZuulExecutor), check(Dialect::Native));
}

#[tokio::test(flavor = "multi_thread")]
async fn d2_a_result_that_comes_after_another_worker_had_the_request_is_not_stored() {
    let check = async |dialect| {
        let changes = async |tree: &Tree, request: &str| {
            let (data, _) = tree.session.get(request).await.expect("it is answered").expect("it is there");
            if dialect == Dialect::Native {
                let lock = request.replace("/requests/", "/locks/");
                tree.session.create(&lock, b"{}", CreateMode::Ephemeral).await.expect("it is free");
            }
            tree.session.set(request, &data, None).await.expect("it is written");
        };
        let Some((tree, worker, _wire)) = finished_without_a_session(dialect, changes).await else { return };
        assert_eq!(worker.control.counts().sources.outcomes.superseded, 1, "{dialect:?}");
        assert_eq!(completed_builds(&tree).await, 0);
        let results = format!("{}/results", tree.queue(dialect).root());
        assert_eq!(tree.session.children(&results).await.expect("it is answered"), Some(Vec::new()), "{dialect:?}");
        worker.drained().await;
    };
    tokio::join!(check(Dialect::ZuulMerger), check(Dialect::ZuulExecutor), check(Dialect::Native));
}

/// A server of the test's own, which it may kill.
struct Server {
    folder: tempfile::TempDir,
}

impl Server {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a folder") }
    }

    /// `limit` is a shell's command before the start. Returns the address.
    fn start(&self, limit: &str) -> String {
        let said = self.tool(limit, "start");
        let address = said.lines().find_map(|line| line.strip_prefix("ZOOKEEPER="));
        address.unwrap_or_else(|| panic!("it did not start: {said}")).to_owned()
    }

    fn tool(&self, limit: &str, what: &str) -> String {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/zookeeper");
        let line = format!("{limit} exec {} {what} {}", script.display(), self.folder.path().display());
        let output = std::process::Command::new("bash").args(["-c", &line]).output().expect("bash starts");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.tool("", "kill");
    }
}

/// A worker goes on where its server dies in the middle of a task and comes back within the session.
async fn the_server_dies(limit: &str, die: impl AsyncFnOnce(&Server, &Session)) {
    if Tree::new().await.is_none() {
        return;
    }
    let server = Server::new();
    std::fs::write(server.folder.path().join("zookeeper.extra"), "preAllocSize=16\n").expect("it is written");
    let tree = Tree::at(&server.start(limit)).await;
    let (act, mut started, go_on) = waits();
    let worker = start(tree.source(Dialect::Native), act);
    let queue = tree.queue(Dialect::Native);
    let first = queue.add(&tree.session, &task()).await.expect("it is added");
    started.recv().await.expect("it runs");
    die(&server, &tree.session).await;
    server.start("");
    go_on.send_replace(true);
    let result = queue.wait_for_result(&tree.session, Dialect::Native, &first);
    assert_eq!(within("the result", result).await.expect("it is read")["outcome"], "completed");
    let second = queue.add(&tree.session, &task()).await.expect("it is added");
    let result = queue.wait_for_result(&tree.session, Dialect::Native, &second);
    assert_eq!(within("the result", result).await.expect("it is read")["outcome"], "completed");
    let control = worker.control.clone();
    worker.drained().await;
    let counts = control.counts().sources;
    assert_eq!((counts.claims, counts.outcomes.completed, counts.outcomes.lost), (2, 2, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_restarts_within_the_session_costs_nothing() {
    the_server_dies("", async |server, _| drop(server.tool("", "kill"))).await;
}

/// A server exits when it cannot write its log: here, because the file may not grow.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_whose_disk_is_full_costs_nothing_once_it_has_space_again() {
    let fill = async |server: &Server, session: &Session| {
        let large = vec![b'x'; 500_000];
        let mut number = 0;
        while session.create(&format!("/fill{number}"), &large, CreateMode::Persistent).await.is_ok() {
            number += 1;
        }
        // It may not have exited yet.
        server.tool("", "kill");
    };
    the_server_dies("ulimit -f 1024;", fill).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_merge_whose_report_takes_long_is_settled_once_and_removed() {
    let Some(tree) = Tree::new().await else { return };
    let wire = Wire::to(&tree.connect.servers).await;
    let mut source = tree.source(Dialect::ZuulMerger);
    source.connect.servers = wire.address();
    source.connect.session_timeout = Duration::from_secs(10);
    let worker = start(source, returns(|_| json!({ "merged": true })));
    // The worker repeats a report after 0.4 s. This one is nine calls of 0.2 s each.
    wire.set(Way::Delay(Duration::from_millis(100)));
    let queue = tree.queue(Dialect::ZuulMerger);
    let submission = Submission { dialect: Dialect::ZuulMerger, ..task() };
    let id = queue.add(&tree.session, &submission).await.expect("it is added");
    let result = queue.wait_for_result(&tree.session, Dialect::ZuulMerger, &id);
    assert_eq!(within("the result", result).await.expect("it is read"), json!({ "merged": true }));
    let outcomes = || worker.control.counts().sources.outcomes;
    until("its end is counted", async || outcomes().completed + outcomes().superseded == 1).await;
    assert_eq!(outcomes().completed, 1);
    for folder in ["requests", "locks", "params"] {
        let left = tree.session.children(&format!("{}/{folder}", queue.root())).await.expect("it is answered");
        assert_eq!(left, Some(Vec::new()), "{folder}");
    }
    worker.drained().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_with_a_client_certificate() {
    let (Ok(servers), Ok(folder)) =
        (std::env::var("JOURNEYMAN_TEST_ZOOKEEPER_TLS"), std::env::var("JOURNEYMAN_TEST_ZOOKEEPER_TLS_DIR"))
    else {
        return;
    };
    let file = |name: &str| Path::new(&folder).join(name);
    let tls = journeyman_platform::zookeeper::TlsFiles {
        ca: file("ca.pem"),
        certificate: file("client.pem"),
        key: file("client.key"),
    };
    let connect = ConnectConfig {
        servers,
        chroot: Some("/tls".to_owned()),
        tls: Some(tls),
        session_timeout: Duration::from_secs(5),
    };
    let session = Session::connect(&connect).await.expect("it is connected");
    assert!(session.children("/").await.expect("it is answered").is_some());
}
