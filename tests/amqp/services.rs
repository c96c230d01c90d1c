//! Requests of a real RabbitMQ that are forwarded to a service, which the worker starts.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use journeyman::amqp;
use journeyman::amqp::lapin::BasicProperties;
use journeyman::amqp::lapin::types::AMQPValue;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;

use crate::process::Process;
use crate::support::{Client, Kind, PATIENCE, broker, shared_uri};

#[path = "../../examples/echo_service.rs"]
#[expect(dead_code, reason = "its main is run by `cargo run --example echo_service`")]
mod example;

/// The service in Rust, as its own process: a worker starts this test program with this test alone.
#[test]
#[ignore = "it is a service, which another test lets a worker start"]
fn serves_as_the_example_in_rust() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(example::serve()).expect("it serves");
}

fn source(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name).display().to_string()
}

/// A request queue, and a worker's directory.
struct Scene {
    client: Client,
    uri: String,
    folder: tempfile::TempDir,
}

impl Drop for Scene {
    fn drop(&mut self) {
        // Kills the processes of a failed test.
        for pid in self.lives() {
            let line = std::fs::read_to_string(format!("/proc/{}/cmdline", pid.as_raw_pid())).unwrap_or_default();
            if line.contains("odd_service.py") {
                kill_process(pid, Signal::KILL).unwrap_or_default();
            }
        }
    }
}

impl Scene {
    async fn new(uri: String, exec: &[String], more: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let client = Client::new(&broker(&uri), Kind::Durable).await;
        let exec = serde_json::to_string(exec).expect("JSON is TOML here");
        let text = format!(
            "[source.requests]\nkind = \"amqp\"\nrequests_queue = \"{}\"\nhandler = \"echo\"\nmax_attempts = 2\n\
             [handler.echo]\nkind = \"http\"\nsocket = \"echo.sock\"\nhealth = \"/health\"\nexec = {exec}\n{more}\n",
            client.queue
        );
        std::fs::write(folder.path().join("journeyman.toml"), text).expect("it is written");
        let scene = Self { client, uri, folder };
        std::fs::create_dir_all(scene.service()).expect("a folder");
        scene
    }

    /// With a service that follows instructions.
    async fn odd(uri: String, more: &str) -> Self {
        Self::new(uri, &[source("tests/support/odd_service.py")], &format!("health_interval = \"100ms\"\n{more}")).await
    }

    fn service(&self) -> PathBuf {
        self.folder.path().join("work/sidecars/echo")
    }

    fn worker(&self) -> Process {
        let config = self.folder.path().join("journeyman.toml");
        let variables = [
            ("WORKER_AMQP_URI", self.uri.as_str()),
            ("WORKER_ACTIVITY_EXCHANGE", ""),
            ("JOURNEYMAN__LOG__FORMAT", "human"),
            ("NO_COLOR", "1"),
        ];
        Process::start(self.folder.path(), &config, &variables)
    }

    fn pipe(&self, name: &str) -> Pipe {
        let path = self.service().join(name);
        assert!(Command::new("mkfifo").arg(&path).status().expect("mkfifo").success());
        let from = pipe::OpenOptions::new().read_write(true).open_receiver(&path).expect("it is a pipe");
        Pipe { from, to: std::fs::OpenOptions::new().write(true).open(path).expect("it is open already") }
    }

    fn lives(&self) -> Vec<Pid> {
        let text = std::fs::read_to_string(self.service().join("lives")).unwrap_or_default();
        text.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)).collect()
    }

    async fn ask(&self, id: &str, path: &str, body: &[u8]) {
        assert!(self.client.publish(Client::properties(id, path), body).await, "there is a queue for it");
    }

    /// Drains the worker, and checks that the queue is empty.
    async fn ends(self, worker: Process) {
        worker.signal(Signal::TERM);
        let ended = worker.ends().await;
        assert_eq!(ended.code(), Some(0), "{}", ended.log);
        self.client.until_depth(0, 0).await;
        self.client.delete_queue().await;
        assert!(self.lives().into_iter().all(is_gone));
    }
}

/// A named pipe between the test and the service. Opened for both directions, so that neither side waits for the other.
struct Pipe {
    from: pipe::Receiver,
    to: std::fs::File,
}

impl Pipe {
    /// Waits for a report of the service.
    async fn hears(&mut self, worker: &Process) {
        let mut byte = [0; 1];
        let line = async { while self.from.read(&mut byte).await.expect("it can be read") > 0 && byte != *b"\n" {} };
        let heard = tokio::time::timeout(PATIENCE, line).await;
        assert!(heard.is_ok(), "the service says nothing: {}", worker.log());
    }

    /// Lets one request continue.
    fn lets_go(&mut self) {
        self.to.write_all(b"go\n").expect("it is written");
    }
}

fn is_gone(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).unwrap_or_default();
    test_kill_process(pid).is_err() || stat.contains(") Z ")
}

async fn echoes(uri: &str, exec: &[String]) {
    let scene = Scene::new(uri.to_owned(), exec, "").await;
    let mut worker = scene.worker();
    worker.says("service is up").await;
    let client = &scene.client;
    let answer = client.call("/echo", b"{\"x\": 1}").await;
    assert_eq!((answer.status(), answer.partial), ("ok", false));
    let said = answer.json();
    assert_eq!((&said["echo"], said["path"].as_str()), (&serde_json::json!({"x": 1}), Some("/echo")));
    assert!(said["task"].as_str().is_some_and(|task| task.contains('.')), "{said}");
    // The path as the other recorded type, and without one.
    let long = AMQPValue::LongString("/long".into());
    let base = || BasicProperties::default().with_reply_to("amq.rabbitmq.reply-to".into());
    let text = base().with_correlation_id("long".into()).with_headers(amqp::header_table([("x-rpc-path", long)]));
    assert!(client.publish(text, b"2").await);
    assert_eq!(client.answer("long").await.json()["path"], "/long");
    assert!(client.publish(base().with_correlation_id("none".into()), b"2").await);
    assert_eq!(client.answer("none").await.json()["path"], "/");
    // Partial replies.
    scene.ask("parts", "/count", b"3").await;
    for (body, partial) in [("1", true), ("2", true), ("3", true), ("\"done\"", false)] {
        let answer = client.answer("parts").await;
        assert_eq!((answer.status(), answer.body.as_slice(), answer.partial), ("ok", body.as_bytes(), partial));
    }
    // An error response.
    let answer = client.call("/echo", b"no JSON").await;
    assert_eq!((answer.status(), &answer.json()["message"]), ("core_error", &"the body is not JSON".into()));
    scene.ends(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_services_reply_in_python_and_in_rust() {
    let Some(uri) = shared_uri() else { return };
    echoes(&uri, &[source("examples/services/echo.py")]).await;
    let own = std::env::current_exe().expect("this program").display().to_string();
    let words = ["--exact", "services::serves_as_the_example_in_rust", "--ignored", "--nocapture"];
    echoes(&uri, &std::iter::once(own).chain(words.map(str::to_owned)).collect::<Vec<_>>()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_get_the_request_and_reply() {
    let Some(uri) = shared_uri() else { return };
    let scene = Scene::odd(uri, "").await;
    let text = format!(
        "[source.requests]\nkind = \"amqp\"\nrequests_queue = \"{}\"\nhandler = \"command\"\n",
        scene.client.queue
    );
    std::fs::write(scene.folder.path().join("journeyman.toml"), text).expect("it is written");
    let worker = scene.worker();
    let script = "echo '{\"type\":\"answer\",\"text\":\"half\",\"partial\":true}' >&3; \
                  echo \"{\\\"type\\\":\\\"answer\\\",\\\"status\\\":\\\"odd\\\",\\\"json\\\":$REQUEST}\" >&3; echo $TRACEPARENT";
    let body = serde_json::json!({ "command": [["/bin/sh", "-c", script]], "maxRunTime": 60 }).to_string();
    for path in [AMQPValue::ByteArray(b"/do".to_vec().into()), AMQPValue::LongString("/do".into())] {
        let own = AMQPValue::LongString("yes".into());
        let headers = amqp::header_table([("x-rpc-path", path), ("x-own", own)]);
        let properties = Client::properties("a", "/do").with_headers(headers).with_expiration("60000".into());
        let properties =
            properties.with_content_type("application/json".into()).with_content_encoding("identity".into());
        assert!(scene.client.publish(properties, body.as_bytes()).await);
        let half = scene.client.answer("a").await;
        assert_eq!((half.partial, half.body.as_slice()), (true, &b"half"[..]));
        let answer = scene.client.answer("a").await;
        let said = answer.json();
        assert_eq!((answer.status(), &said["path"], &said["correlationId"]), ("odd", &"/do".into(), &"a".into()));
        assert_eq!((&said["headers"]["x-own"], &said["secondsLeft"]), (&"yes".into(), &60.0.into()), "{said}");
        let of_body = (&said["contentType"], &said["contentEncoding"]);
        assert_eq!(of_body, (&"application/json".into(), &"identity".into()), "{said}");
    }
    scene.ends(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_that_closes_connections_is_retried_once_it_is_healthy() {
    let Some(uri) = shared_uri() else { return };
    let scene = Scene::odd(uri, "startup_timeout = \"3s\"").await;
    let mut worker = scene.worker();
    worker.says("service is up").await;
    let answer = scene.client.call("/stop", b"2").await;
    assert_eq!((answer.status(), answer.body.as_slice()), ("ok", &b"2"[..]), "{}", worker.log());
    assert_eq!(scene.lives().len(), 2);
    scene.ends(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_kills_its_service_each_time_is_given_up_with_an_error_reply() {
    let Some(uri) = shared_uri() else { return };
    let scene = Scene::odd(uri, "").await;
    let mut worker = scene.worker();
    worker.says("service is up").await;
    scene.ask("a", "/die", b"1").await;
    let answer = scene.client.answer("a").await;
    let said = answer.json();
    assert_eq!((answer.status(), &said["type"]), ("core_error", &"journeyman:attempts_exhausted".into()));
    // The next process is healthy. An attempt without a service does not count.
    assert_eq!(scene.client.call("/echo", b"2").await.body, b"2");
    assert_eq!(scene.lives().len(), 3, "{:?}", scene.lives());
    scene.ends(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_request_is_taken_while_the_service_is_unreachable() {
    let Some(uri) = shared_uri() else { return };
    let scene = Scene::odd(uri, "startup_timeout = \"3s\"").await;
    std::fs::write(scene.service().join("never"), "").expect("it is written");
    let mut worker = scene.worker();
    scene.ask("a", "/echo", b"1").await;
    worker.says("alert=\"sidecar-crash-loop\"").await;
    // The request waits in the queue, undelivered.
    scene.client.until_depth(1, 0).await;
    assert!(!worker.log().contains("DEBUG claimed"), "{}", worker.log());
    std::fs::remove_file(scene.service().join("never")).expect("it is there");
    assert_eq!(scene.client.answer("a").await.body, b"1");
    // The service becomes unhealthy while one request runs.
    let (mut waiting, mut go) = (scene.pipe("waiting"), scene.pipe("go"));
    scene.ask("b", "/wait", b"1").await;
    waiting.hears(&worker).await;
    std::fs::write(scene.service().join("ill"), "").expect("it is written");
    worker.says("service unhealthy").await;
    std::fs::remove_file(scene.service().join("ill")).expect("it is there");
    // Its service was stopped, so the request is retried.
    waiting.hears(&worker).await;
    go.lets_go();
    assert_eq!(scene.client.answer("b").await.body, b"waited");
    scene.ends(worker).await;
}
