//! Invalid replies of handlers: the client gets an error reply, the worker logs the reason and continues.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::amqp::controller::{Reports, fresh};
use crate::amqp::support::{Client, Kind, broker, shared_uri, within};
use crate::support::process::{Process, config};

/// Replies with the error that its path names; correctly for `/good`.
const PROGRAM: &str = r#"#!/usr/bin/env python3
import json, os, sys
request = json.load(sys.stdin)["payload"]
out = os.fdopen(3, "w")
def reply(**fields):
    print(json.dumps({"type": "answer", **fields}), file=out)
{
    "/good": lambda: reply(json="good", contentType="x" * 255),
    "/missing": lambda: reply(path="nowhere"),
    "/large": lambda: reply(text="x" * 30000),
    "/cut": lambda: out.write('{"type": "answer", "json": 1'),
    "/part": lambda: [reply(json=1, partial=True, contentType="x" * 300), reply(json="last")],
}[request["path"]]()
"#;

/// The paths and what the reply and the log say.
const INVALID: [(&str, &str); 4] = [
    ("/missing", "no such file"),
    ("/large", "more than the limit of 20000"),
    ("/cut", "not JSON"),
    ("/part", "the content type of a reply has 300 bytes"),
];

fn worker(folder: &std::path::Path, config: &std::path::Path, uri: &str, more: &[(&str, &str)]) -> Process {
    let mut variables = vec![("WORKER_AMQP_URI", uri), ("WORKER_ACTIVITY_EXCHANGE", ""), ("NO_COLOR", "1")];
    variables.push(("JOURNEYMAN__LOG__FORMAT", "human"));
    variables.push(("JOURNEYMAN__WORKER__CAPACITY", "1"));
    variables.extend(more);
    Process::start(folder, config, &variables)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_reply_of_a_program_becomes_an_error_reply() {
    let Some(uri) = shared_uri() else { return };
    let client = Client::new(&broker(&uri), Kind::Durable).await;
    let folder = tempfile::tempdir().expect("a folder");
    let config = config(folder.path(), PROGRAM, "");
    let queue = [("WORKER_REQUESTS_QUEUE", client.queue.as_str()), ("WORKER_MAX_MSG_SIZE", "20000")];
    let worker = worker(folder.path(), &config, &uri, &queue);
    for (path, why) in INVALID {
        let answer = client.call(path, b"1").await;
        assert_eq!(answer.status(), "core_error", "{path}: {}", String::from_utf8_lossy(&answer.body));
        let reply = answer.json();
        let message = reply["message"].as_str().unwrap_or_default();
        assert!(reply["type"] == "journeyman:failed" && message.contains(why), "{path}: {reply}");
    }
    let good = client.call("/good", b"1").await;
    assert_eq!((good.status(), good.json()), ("ok", "good".into()));
    let log = worker.drained().await;
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("program sent an invalid reply")).collect();
    assert_eq!(lines.len(), INVALID.len(), "{}", log);
    for ((path, why), line) in INVALID.iter().zip(lines) {
        assert!(line.contains(why), "{path}: {line}");
    }
    client.delete_queue().await;
}

/// A healthy service that responds with a media type of 300 bytes.
async fn serve(listener: tokio::net::UnixListener) {
    loop {
        let (mut stream, _) = listener.accept().await.expect("a connection");
        let mut head = [0; 16];
        stream.read_exact(&mut head).await.unwrap_or_default();
        let kind = if head.starts_with(b"GET /health ") { "text/plain".to_owned() } else { "x".repeat(300) };
        let answer =
            format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: 1\r\nconnection: close\r\n\r\n1");
        stream.write_all(answer.as_bytes()).await.unwrap_or_default();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_is_started_while_its_service_or_queue_is_missing_and_ready_once_it_takes_requests() {
    let Some(uri) = shared_uri() else { return };
    let exchange = format!("{}-activity", fresh());
    let client = Client::without_queue(&broker(&uri), &fresh()).await;
    let mut reports = Reports::of(&client, &exchange).await;
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("journeyman.toml");
    let text = "[handler.echo]\nkind = \"http\"\nurl = \"unix:echo.sock\"\nhealth = \"/health\"\nhealth_interval = \"100ms\"\n";
    std::fs::write(&config, text).expect("it is written");
    let variables = [
        ("WORKER_REQUESTS_QUEUE", client.queue.as_str()),
        ("WORKER_ACTIVITY_EXCHANGE", &exchange),
        ("WORKER_ID", "w"),
        ("WORKER_KEY", "k"),
    ];
    let worker = worker(folder.path(), &config, &uri, &variables);
    // Neither the service nor the queue exists yet.
    assert_eq!(reports.next("k", "w").await, "started");
    let service = tokio::spawn(serve(tokio::net::UnixListener::bind(folder.path().join("echo.sock")).expect("bound")));
    client.declare(Kind::Durable, &client.queue).await;
    reports.until_ready("k", "w").await;
    // Its responses cannot become replies.
    let answer = client.call("/x", b"1").await;
    let message = answer.json()["message"].to_string();
    assert_eq!(answer.status(), "core_error");
    assert!(message.contains("the content type of a reply has 300 bytes"), "{message}");
    assert_eq!(reports.next("k", "w").await, "request-received");
    let log = worker.drained().await;
    assert!(log.contains("cannot send a reply: the content type"), "{}", log);
    service.abort();
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_checks_the_request_queue() {
    let Some(uri) = shared_uri() else { return };
    let client = Client::new(&broker(&uri), Kind::Transient).await;
    let folder = tempfile::tempdir().expect("a folder");
    let source = "[source.requests]\nkind = \"amqp\"\nhandler = \"echo\"\ndeferred = true\n";
    let config = config(folder.path(), PROGRAM, source);
    let command = tokio::process::Command::new(env!("CARGO_BIN_EXE_journeyman"))
        .args(["doctor", "--config"])
        .arg(&config)
        .current_dir(folder.path())
        .env_clear()
        .env("JOURNEYMAN__HOST__METADATA_SERVICE", "off")
        .env("WORKER_AMQP_URI", &uri)
        .env("WORKER_KEY", "k")
        .env("WORKER_REQUESTS_QUEUE", &client.queue)
        .output();
    let output = within("the end of the command", command).await.expect("it can be run");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains(&format!("{}: 0 waiting", client.queue)), "{text}");
    assert!(text.contains("requests: delays") && text.contains("survive the death of the broker"), "{text}");
    client.delete_with_delays().await;
}
