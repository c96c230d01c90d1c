//! A worker as a controller starts it: configured by variables, with a program as its handler.

use std::path::Path;
use std::process::{Command, Stdio};

use journeyman_platform::amqp::lapin::options::{
    BasicConsumeOptions, BasicPublishOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions,
};
use journeyman_platform::amqp::lapin::types::{AMQPValue, FieldTable};
use journeyman_platform::amqp::lapin::{BasicProperties, Consumer, ExchangeKind};

use crate::amqp::configuration::listening;
use crate::support::http::get;

use crate::amqp::support::{Client, Kind, broker, next, pika_python, shared_uri, target, within};
use crate::support::process::{Process, config};
use crate::support::task_queue::{TOKEN, TaskQueue};
use crate::support::wire::{Way, Wire};

/// Replies with its input, and reports progress.
pub(crate) const ECHO: &str = r#"#!/usr/bin/env python3
import json, os, sys
request = json.load(sys.stdin)["payload"]
out = os.fdopen(3, "w")
print(json.dumps({"type": "answer", "json": "soon", "partial": True}), file=out, flush=True)
if request.get("path") == "/file":
    with open("answer", "w") as file:
        file.write("x" * 100000)
    print(json.dumps({"type": "answer", "path": "answer"}), file=out)
elif request.get("path") == "/result":
    print(json.dumps({"type": "result", "value": {"r": 1}}), file=out)
elif request.get("path") == "/crash":
    os.kill(os.getpid(), 9)
else:
    answer = {"echo": request["json"], "key": os.environ["WORKER_KEY"]}
    print(json.dumps({"type": "answer", "json": answer}), file=out)
"#;

struct Worker {
    process: Process,
    _folder: tempfile::TempDir,
}

impl Worker {
    /// `journeyman worker` with a handler and only these variables.
    fn start(variables: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let config = config(folder.path(), ECHO, "");
        Self { process: Process::start(folder.path(), &config, variables), _folder: folder }
    }

    /// Drains the worker, and returns its log.
    async fn leaves(self) -> String {
        self.process.drained().await
    }
}

/// The activity reports, as a controller receives them.
pub(crate) struct Reports(Consumer);

impl Reports {
    /// Declares the exchange as osrdyne does, and consumes.
    pub(crate) async fn of(client: &Client, exchange: &str) -> Self {
        let fanout = ExchangeKind::Fanout;
        let options = ExchangeDeclareOptions::default();
        client
            .channel
            .exchange_declare(exchange.into(), fanout, options, FieldTable::default())
            .await
            .expect("declared");
        let options = QueueDeclareOptions { exclusive: true, ..QueueDeclareOptions::default() };
        let queue = client.channel.queue_declare("".into(), options, FieldTable::default()).await.expect("a queue");
        let name = queue.name().clone();
        let bind = QueueBindOptions::default();
        client
            .channel
            .queue_bind(name.clone(), exchange.into(), "".into(), bind, FieldTable::default())
            .await
            .expect("bound");
        let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
        let consumer = client.channel.basic_consume(name, "".into(), options, FieldTable::default()).await;
        Self(consumer.expect("it is consumed"))
    }

    /// Skips the reports until now.
    async fn until_now(&mut self, client: &Client, exchange: &str) {
        let mark = b"the test's own";
        let options = BasicPublishOptions::default();
        let properties = BasicProperties::default();
        let channel = &client.channel;
        let published = channel.basic_publish(exchange.into(), "".into(), options, mark, properties).await;
        published.expect("it is published").await.expect("it is confirmed");
        while within("the mark", next(&mut self.0)).await.expect("the channel stays").data != mark {}
    }

    /// The next event of this key, which equals the recorded ones. A pool may have others.
    pub(crate) async fn next(&mut self, key: &str, id: &str) -> String {
        let report = loop {
            let report = within("a report", next(&mut self.0)).await.expect("the channel stays");
            if report.routing_key.as_str() == key {
                break report;
            }
        };
        assert!(report.data.is_empty());
        let table = report.properties.headers().clone().expect("headers");
        assert_eq!(table.inner().len(), 2);
        let text = |name: &str| match table.inner().get(name) {
            Some(AMQPValue::LongString(text)) => text.to_string(),
            other => panic!("{name} is a long string, not {other:?}"),
        };
        assert_eq!(text("x-worker-id"), id);
        text("x-event")
    }
}

impl Reports {
    /// Skips `started` until `ready`.
    pub(crate) async fn until_ready(&mut self, key: &str, id: &str) {
        loop {
            match self.next(key, id).await.as_str() {
                "started" => {}
                event => return assert_eq!(event, "ready"),
            }
        }
    }
}

/// A unique name.
pub(crate) fn fresh() -> String {
    format!("p{}", &uuid::Uuid::new_v4().simple().to_string()[..12])
}

#[tokio::test(flavor = "multi_thread")]
async fn variables_and_a_handler_configure_a_worker() {
    let Some(uri) = shared_uri() else { return };
    let (pool, key) = (fresh(), "infra=42,x");
    let queue = format!("{pool}-req-{key}");
    let client = Client::on(&broker(&uri), Kind::Transient, &queue).await;
    let mut reports = Reports::of(&client, &format!("{pool}-activity-xchg")).await;
    let worker = Worker::start(&[
        ("WORKER_ID", "eb81c35e-5808-45ff-970a-5ac9b8a0c2aa"),
        ("WORKER_KEY", key),
        ("WORKER_POOL", &pool),
        ("WORKER_AMQP_URI", &format!("{uri};")),
    ]);
    let id = "eb81c35e-5808-45ff-970a-5ac9b8a0c2aa";
    assert_eq!(reports.next(key, id).await, "started");
    assert_eq!(reports.next(key, id).await, "ready");
    for (path, body, answer) in [
        ("/echo", &b"{\"x\":1}"[..], serde_json::json!({ "echo": { "x": 1 }, "key": key })),
        ("/result", b"null", serde_json::json!({ "r": 1 })),
    ] {
        assert!(client.publish(Client::properties(path, path), body).await);
        let partial = client.answer(path).await;
        assert!(partial.partial && partial.body == b"\"soon\"");
        let last = client.answer(path).await;
        assert_eq!((last.status(), last.partial, last.json()), ("ok", false, answer));
    }
    assert!(client.publish(Client::properties("file", "/file"), b"null").await);
    assert!(client.answer("file").await.partial);
    assert_eq!(client.answer("file").await.body.len(), 100_000);
    assert!(client.publish(Client::properties("crash", "/crash"), b"null").await);
    assert!(client.answer("crash").await.partial);
    let crashed = client.answer("crash").await;
    assert_eq!((crashed.status(), &crashed.json()["type"]), ("core_error", &"journeyman:failed".into()));
    assert_eq!(reports.next(key, id).await, "request-received");
    let log = worker.leaves().await;
    assert!(!log.contains("guest:guest"), "{log}");
    assert!(!log.contains("amq.rabbitmq.reply-to.g"), "{log}");
    client.until_depth(0, 0).await;
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_run_without_an_activity_exchange() {
    let Some(uri) = shared_uri() else { return };
    let queue = format!("jm-test-{}", fresh());
    let client = Client::on(&broker(&uri), Kind::Transient, &queue).await;
    let exchange = format!("{queue}-activity");
    let mut worker = Worker::start(&[
        ("WORKER_REQUESTS_QUEUE", &queue),
        ("WORKER_KEY", "42"),
        ("WORKER_ID", "w"),
        ("WORKER_AMQP_URI", &uri),
        ("WORKER_ACTIVITY_EXCHANGE", &exchange),
    ]);
    assert!(client.publish(Client::properties("a", "/a"), b"1").await);
    assert!(client.answer("a").await.partial);
    assert_eq!(client.answer("a").await.status(), "ok");
    worker.process.says("cannot report activity").await;
    // Reports arrive once the exchange exists.
    let mut reports = Reports::of(&client, &exchange).await;
    // Reports from before are lost; the next request is reported again.
    assert!(client.publish(Client::properties("b", "/a"), b"1").await);
    let first = reports.next("42", "w").await;
    assert!(["started", "ready", "request-received"].contains(&first.as_str()), "{first}");
    assert!(client.answer("b").await.partial);
    assert_eq!(client.answer("b").await.status(), "ok");
    worker.leaves().await;
    client.delete_queue().await;
}

/// The payload of a task that sleeps.
fn sleeps(seconds: &str) -> serde_json::Value {
    serde_json::json!({"command": [["sleep", seconds]], "maxRunTime": 60})
}

/// A worker of an embedded queue, which reports activity.
fn worker_of_tasks(tasks: &TaskQueue, protocol: &str, exchange: &str, uri: &str) -> Worker {
    let source = |key: &str| format!("JOURNEYMAN__SOURCE__CI__{key}");
    Worker::start(&[
        (&source("KIND"), "taskcluster"),
        (&source("DIALECT"), protocol),
        (&source("ROOT_URL"), tasks.service.root_url()),
        (&source("TASK_QUEUE"), "test/worker"),
        (&source("CLIENT_ID"), "tester"),
        (&source("ACCESS_TOKEN_FILE"), "env:TEST_TOKEN"),
        ("TEST_TOKEN", TOKEN),
        ("JOURNEYMAN__HTTP__LISTEN", "127.0.0.1:0"),
        ("WORKER_ID", "w"),
        ("WORKER_KEY", "k"),
        ("WORKER_AMQP_URI", uri),
        ("WORKER_ACTIVITY_EXCHANGE", exchange),
    ])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_of_taskcluster_reports_activity() {
    let Some(uri) = shared_uri() else { return };
    let exchange = format!("{}-activity", fresh());
    let client = Client::new(&broker(&uri), Kind::Transient).await;
    let mut reports = Reports::of(&client, &exchange).await;
    let folder = tempfile::tempdir().expect("a folder");
    for protocol in ["azure", "claim-work"] {
        let tasks = TaskQueue::start(&folder.path().join(protocol), |_| {}).await;
        let worker = worker_of_tasks(&tasks, protocol, &exchange, &uri);
        assert_eq!(reports.next("k", "w").await, "started");
        reports.until_ready("k", "w").await;
        tasks.create("test/worker", sleeps("3")).await;
        // A pair when it is claimed.
        for _ in 0..2 {
            assert_eq!(reports.next("k", "w").await, "request-received");
        }
        worker.leaves().await;
        reports.until_now(&client, &exchange).await;
        tasks.service.stop().await;
    }
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_run_without_the_broker_and_activity_resumes_with_it() {
    let Some(uri) = shared_uri() else { return };
    let exchange = format!("{}-activity", fresh());
    let client = Client::new(&broker(&uri), Kind::Transient).await;
    let mut reports = Reports::of(&client, &exchange).await;
    let wire = Wire::to(&target(&uri)).await;
    wire.set(Way::Stall);
    let folder = tempfile::tempdir().expect("a folder");
    let tasks = TaskQueue::start(folder.path(), |_| {}).await;
    let mut worker = worker_of_tasks(&tasks, "claim-work", &exchange, &wire.uri(&uri));
    let address = listening(&mut worker.process).await;
    let metrics = async || get(&address, "/metrics").await.body;
    tasks.create("test/worker", sleeps("0")).await;
    within("the task", async { while !metrics().await.contains("outcome=\"completed\"} 1.0") {} }).await;
    within("a failure", async {
        while metrics().await.contains("journeyman_activity_failures_total 0.0") {
            wire.cut();
        }
    })
    .await;
    let said = metrics().await;
    assert!(said.contains("journeyman_activity_up 0.0"), "{said}");
    assert!(said.contains("journeyman_source_up{source=\"ci\"} 1.0"), "{said}");
    wire.set(Way::Carry);
    reports.until_ready("k", "w").await;
    within("it is seen", async { while !metrics().await.contains("journeyman_activity_up 1.0") {} }).await;
    worker.leaves().await;
    tasks.service.stop().await;
    client.delete_queue().await;
}

/// The page's first section: its configuration, its worker, and a client in another library.
#[tokio::test(flavor = "multi_thread")]
async fn the_example_client_gets_a_reply_of_the_example_handler() {
    let (Some(uri), Some(python)) = (shared_uri(), pika_python()) else { return };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(root.join("src/guide/requests.md")).expect("the page");
    let toml = page.split("<<'TOML'\n").nth(1).and_then(|rest| rest.split("TOML\n").next()).expect("its file");
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("journeyman.toml");
    let handler = root.join("examples/handlers/echo.py");
    let toml = toml.replace("examples/handlers/echo.py", handler.to_str().expect("a path"));
    std::fs::write(&config, toml).expect("it is written");
    let (pool, key) = (fresh(), "42");
    // Either the client declares the queue and the worker waits for it, or the other way round.
    let variables = [("WORKER_POOL", pool.as_str()), ("WORKER_KEY", key), ("WORKER_AMQP_URI", &uri)];
    let worker = Process::start(folder.path(), &config, &variables);
    let mut ask = Command::new(python);
    ask.arg(root.join("examples/ask.py")).args([&format!("{pool}-req-{key}"), "/echo", "{\"x\": 1}"]);
    ask.env("WORKER_AMQP_URI", &uri).stdin(Stdio::null());
    let asked = tokio::task::spawn_blocking(move || ask.output().expect("it runs"));
    let asked = within("the answer", asked).await.expect("it ends");
    assert_eq!(String::from_utf8_lossy(&asked.stdout), "ok {\"echo\":{\"x\":1}}\n", "{asked:?}");
    assert!(page.contains(String::from_utf8_lossy(&asked.stdout).trim()), "as the page has it");
    worker.drained().await;
}
