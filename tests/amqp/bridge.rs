//! `journeyman bridge` between a real broker and the embedded queue, with a worker on the other side.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use journeyman::handler::ExecuteError;
use journeyman::source::taskcluster::{self, ArtifactStorage, Dialect, Taskcluster};
use journeyman::task::Reply;
use journeyman::worker::WorkerConfig;
use journeyman_domain::id::TaskId;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::amqp::support::{
    Client, Gate, Kind, Running, broker, handler, queue as requests, returns_body, shared_uri, until,
};
use crate::support::broker::is_newer;
use crate::support::process::{self, Process};
use crate::support::task_queue::{TOKEN, TaskQueue, api_config};

/// A broker with a request queue, a task queue, and a directory.
struct Setup {
    uri: String,
    client: Client,
    tasks: TaskQueue,
    folder: tempfile::TempDir,
}

impl Setup {
    async fn new(claims: Duration) -> Option<Self> {
        let uri = shared_uri()?;
        let client = Client::new(&broker(&uri), Kind::Durable).await;
        let folder = tempfile::tempdir().expect("a folder");
        let tasks = TaskQueue::start(folder.path(), |config| config.claim_timeout = claims).await;
        Some(Self { uri, client, tasks, folder })
    }

    fn sources(&self) -> String {
        format!(
            "[source.requests]\nkind = \"amqp\"\nrequests_queue = \"{}\"\nmax_attempts = 0\n\n\
             [source.builds]\nkind = \"taskcluster\"\nroot_url = \"{}\"\ntask_queue = \"far/side\"\nclient_id = \"tester\"\n",
            self.client.queue,
            self.tasks.service.root_url()
        )
    }

    fn bridge(&self, from: &str, to: &str) -> Process {
        self.bridge_named(&self.client.queue["jm-test-".len()..], from, to)
    }

    fn bridge_named(&self, id: &str, from: &str, to: &str) -> Process {
        let bridge = format!("\n[bridge.it]\nfrom = \"{from}\"\nto = \"{to}\"\n");
        self.start(&format!("[worker]\ncapacity = 8\nid = \"{id}\"\n\n{}{bridge}", self.sources()))
    }

    fn start(&self, config: &str) -> Process {
        Process::of(bridge(self.folder.path(), config, &self.uri))
    }

    /// Ends the bridge and the worker, and deletes the queue.
    async fn finish(&self, bridge: Process, worker: Running) {
        bridge.drained().await;
        self.client.finish(worker).await;
    }

    async fn task(&self, payload: Value) -> TaskId {
        self.tasks.create("far/side", payload).await
    }

    /// Polls until the bridge's status contains these words.
    async fn says(&self, words: &str) {
        until(words, async || {
            let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_journeyman"));
            command.args(["status", "-o", "json", "--socket"]).arg(self.folder.path().join("work/control.sock"));
            let output = command.output().await.expect("the status is printed");
            String::from_utf8_lossy(&output.stdout).contains(words)
        })
        .await;
    }
}

/// `journeyman bridge` with this configuration.
fn bridge(folder: &std::path::Path, config: &str, uri: &str) -> Command {
    let file = folder.join("bridge.toml");
    std::fs::write(&file, config).expect("the file is written");
    let mut variables = vec![("JOURNEYMAN_AMQP_URI", uri)];
    if config.contains("[source.builds]") {
        variables.push(("JOURNEYMAN__SOURCE__BUILDS__ACCESS_TOKEN_FILE", "env:TEST_TOKEN"));
        variables.push(("TEST_TOKEN", TOKEN));
    }
    let mut command = process::command("bridge", folder, &file, &variables);
    // The capacity of the configuration applies.
    command.env_remove("JOURNEYMAN__WORKER__CAPACITY");
    command
}

/// A worker of the tasks that leaves a result, or fails, on permission.
fn far_side(setup: &Setup) -> (Gate, Running) {
    let (gate, act) = Gate::before(handler(|request, context| async move {
        if request.path.as_deref() == Some("/fail") {
            return Err(ExecuteError::failed("it failed".to_owned()));
        }
        let result = json!({"echo": request.json::<Value>().ok(), "path": request.path});
        std::fs::write(context.workdir().join("result"), result.to_string()).expect("the file is written");
        context.artifacts().file("public/result.json", "result").expect("a result");
        Ok(())
    }));
    let source = Taskcluster::new(taskcluster::Config {
        api: api_config(setup.tasks.service.root_url()),
        dialect: Dialect::ClaimWork,
        task_queue: "far/side".into(),
        worker_group: "group".into(),
        worker_id: "worker".into(),
        artifact_storage: ArtifactStorage::S3,
    });
    let source = Arc::new(source.expect("usable settings"));
    (gate, Running::of(source, |settings| WorkerConfig { capacity: 8, ..settings }, act))
}

const LONG: Duration = Duration::from_secs(600);

#[tokio::test(flavor = "multi_thread")]
async fn c4_a_bridge_says_that_its_queue_limits_deliveries_though_it_does_not() {
    let Some(setup) = Setup::new(LONG).await else { return };
    if !is_newer() {
        return eprintln!("NOT TESTED: quorum queues of this broker have no default limit");
    }
    setup.client.delete_queue().await;
    setup.client.declare(Kind::Quorum, &setup.client.queue).await;
    let mut bridge = setup.bridge("requests", "builds");
    bridge.says("20 times, if it is a quorum queue without a limit of its own").await;
    bridge.drained().await;
    setup.client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_becomes_a_task_and_its_result_the_reply() {
    let Some(setup) = Setup::new(LONG).await else { return };
    let bridge = setup.bridge("requests", "builds");
    let (mut far, worker) = far_side(&setup);
    assert!(setup.client.publish(Client::properties("a", "/echo"), b"{\"x\":1}").await);
    far.enters().await;
    far.go.add_permits(1);
    let answer = setup.client.answer("a").await;
    assert_eq!((answer.status(), answer.json()), ("ok", json!({"echo": {"x": 1}, "path": "/echo"})));
    assert!(setup.client.publish(Client::properties("b", "/fail"), b"{\"x\":2}").await);
    far.enters().await;
    far.go.add_permits(1);
    let answer = setup.client.answer("b").await;
    assert_eq!(answer.status(), "core_error");
    let message = answer.json()["message"].as_str().expect("a sentence").to_owned();
    assert!(message.contains("failed in run 0"), "{message}");
    let log = bridge.drained().await;
    assert!(!log.contains(TOKEN) && !log.contains("{\"x\":1}"), "{log}");
    setup.client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_a_bridge_that_is_killed_repeatedly_become_one_task_each() {
    const REQUESTS: usize = 24;
    let Some(setup) = Setup::new(LONG).await else { return };
    let (mut far, worker) = far_side(&setup);
    let mut bridge = setup.bridge("requests", "builds");
    for n in 0..REQUESTS {
        assert!(setup.client.publish(Client::properties(&n.to_string(), "/echo"), n.to_string().as_bytes()).await);
    }
    let mut started = Vec::new();
    for n in 0..REQUESTS {
        started.push(far.enters().await);
        // Killed while some tasks are created, some wait, some run and some are about to be answered.
        if n % 6 == 5 {
            bridge.signal(Signal::KILL);
            bridge.ends().await;
            far.go.add_permits(1);
            bridge = setup.bridge("requests", "builds");
        } else {
            far.go.add_permits(1);
        }
    }
    for n in 0..REQUESTS {
        let answer = setup.client.answer(&n.to_string()).await;
        assert_eq!((answer.status(), answer.json()["echo"].clone()), ("ok", json!(n)));
    }
    started.sort_by_key(|body| body.parse::<usize>().expect("a number"));
    let all: Vec<String> = (0..REQUESTS).map(|n| n.to_string()).collect();
    assert_eq!(started, all, "each request ran once");
    assert!(far.entered.try_recv().is_err(), "and none of them again");
    setup.finish(bridge, worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_holds_at_most_its_capacity_of_requests_and_requeues_them() {
    let Some(setup) = Setup::new(LONG).await else { return };
    let bridge = setup.bridge("requests", "builds");
    for n in 0..20 {
        assert!(setup.client.publish(Client::properties(&n.to_string(), "/echo"), b"1").await);
    }
    // Without a worker on the other side, eight requests are held, and the others stay in the queue.
    setup.client.until_depth(12, 1).await;
    bridge.signal(Signal::QUIT);
    bridge.ends().await;
    setup.client.until_depth(20, 0).await;
    setup.client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_becomes_a_request_and_the_reply_its_outcome() {
    let Some(setup) = Setup::new(LONG).await else { return };
    let act = handler(|request, context| async move {
        if request.path.as_deref() == Some("/no") {
            return Err(ExecuteError::failed("it will not".to_owned()));
        }
        context.send_partial_reply(Reply::ok(&b"[\"soon\"]"[..])).await.expect("it is sent");
        context.set_reply(Reply::ok(&*request.body)).expect("it is small");
        Ok(())
    });
    let worker = Running::start(requests(&setup.client), 4, act);
    let bridge = setup.bridge("builds", "requests");
    let good = setup.task(json!({"path": "/echo", "json": {"x": 1}})).await;
    let bad = setup.task(json!({"path": "/no", "body": "text"})).await;
    let none = setup.task(json!({"path": 7})).await;
    assert_eq!(setup.tasks.resolved(&good).await["state"], "completed");
    assert_eq!(setup.tasks.content(&good, 0, "public/result.json").await, b"{\"x\":1}");
    assert_eq!(setup.tasks.resolved(&bad).await["state"], "failed");
    let why = setup.tasks.content(&bad, 0, "public/result.json").await;
    assert!(String::from_utf8(why).expect("text").contains("it will not"));
    let none = setup.tasks.resolved(&none).await;
    assert_eq!(none["runs"][0]["reasonResolved"], "malformed-payload");
    setup.finish(bridge, worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_claims_at_most_its_capacity_of_tasks() {
    const TASKS: usize = 20;
    let Some(setup) = Setup::new(LONG).await else { return };
    let mut tasks = Vec::new();
    for n in 0..TASKS {
        tasks.push(setup.task(json!({"path": "/echo", "json": n})).await);
    }
    let bridge = setup.bridge("builds", "requests");
    // Without replies, eight requests are sent, and no other task is claimed.
    setup.client.until_depth(8, 0).await;
    let mut running = 0;
    for task in &tasks {
        running += usize::from(setup.tasks.status(task).await["state"] == "running");
    }
    assert_eq!(running, 8);
    let worker = Running::start(requests(&setup.client), 4, returns_body());
    for (n, task) in tasks.iter().enumerate() {
        assert_eq!(setup.tasks.resolved(task).await["state"], "completed");
        assert_eq!(setup.tasks.content(task, 0, "public/result.json").await, n.to_string().as_bytes());
    }
    setup.finish(bridge, worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn c7_tasks_of_a_bridge_that_is_killed_repeatedly_ask_once() {
    const TASKS: usize = 8;
    let Some(setup) = Setup::new(LONG).await else { return };
    let (mut gate, act) = Gate::before(returns_body());
    let worker = Running::start(requests(&setup.client), 16, act);
    let mut tasks = Vec::new();
    for n in 0..TASKS {
        tasks.push(setup.task(json!({"json": n})).await);
    }
    let count_completed = async || {
        let mut completed = 0;
        for task in &tasks {
            completed += usize::from(setup.tasks.status(task).await["state"] == "completed");
        }
        completed
    };
    let bridge = setup.bridge("builds", "requests");
    let mut asked = Vec::new();
    for _ in 0..TASKS {
        asked.push(gate.enters().await);
    }
    until("all are sent", async || bridge.log().matches("request sent").count() == TASKS).await;
    let restart = async |bridge: Process| {
        bridge.signal(Signal::KILL);
        bridge.ends().await;
        setup.bridge("builds", "requests")
    };
    let bridge = restart(bridge).await;
    setup.says("waiting for the reply").await;
    let bridge = restart(bridge).await;
    gate.go.add_permits(TASKS / 2);
    until("half of them are completed", async || count_completed().await == TASKS / 2).await;
    bridge.signal(Signal::KILL);
    bridge.ends().await;
    // They are answered while there is no bridge.
    gate.go.add_permits(TASKS / 2);
    worker.completed(TASKS as u64).await;
    let bridge = setup.bridge("builds", "requests");
    until("all are completed", async || count_completed().await == TASKS).await;
    assert!(gate.entered.try_recv().is_err(), "a request was sent again");
    asked.sort();
    assert_eq!(asked, (0..TASKS).map(|n| n.to_string()).collect::<Vec<_>>());
    setup.finish(bridge, worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_retries_while_the_other_side_is_unavailable_and_reports_it() {
    let Some(setup) = Setup::new(LONG).await else { return };
    setup.client.delete_queue().await;
    let bridge = setup.bridge("builds", "requests");
    let task = setup.task(json!({"json": 1})).await;
    setup.says("no queue for the key").await;
    setup.client.declare(Kind::Durable, &setup.client.queue).await;
    let worker = Running::start(requests(&setup.client), 4, returns_body());
    assert_eq!(setup.tasks.resolved(&task).await["state"], "completed");
    worker.drained().await;
    bridge.drained().await;
    // The opposite direction: the task queue is unavailable, and comes back.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let sources = setup.sources().replace(setup.tasks.service.root_url(), &format!("http://{address}"));
    let config = format!("{sources}\n[bridge.it]\nfrom = \"requests\"\nto = \"builds\"\n");
    // Closes the first connection at once.
    let shut = std::thread::spawn(move || drop(listener.accept()));
    let bridge = setup.start(&config);
    assert!(setup.client.publish(Client::properties("a", "/echo"), b"1").await);
    setup.says("retrying: createTask").await;
    shut.join().expect("it was asked");
    bridge.signal(Signal::QUIT);
    bridge.ends().await;
    setup.client.until_depth(1, 0).await;
    setup.client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_bridge_is_rejected_with_its_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let amqp =
        "[source.a]\nkind = \"amqp\"\nrequests_queue = \"a\"\n[source.b]\nkind = \"amqp\"\nrequests_queue = \"b\"\n";
    for (text, words) in [
        (String::new(), "no [bridge.NAME]"),
        (format!("{amqp}[bridge.x]\nfrom = \"a\"\nto = \"b\"\n"), "of the same kind"),
        (format!("{amqp}[bridge.x]\nfrom = \"aa\"\nto = \"b\"\n"), "did you mean `a`?"),
        (format!("{amqp}[bridge.x]\nfrom = \"a\"\n"), "needs `to`"),
    ] {
        let ended = Process::of(bridge(folder.path(), &text, "amqp://127.0.0.1:1")).ends().await;
        assert_eq!(ended.code(), Some(30), "{}", ended.log);
        assert!(ended.log.contains(words), "{words}: {}", ended.log);
    }
}
