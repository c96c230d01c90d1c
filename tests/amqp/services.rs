//! Handlers of kind `http` and `command` on a real RabbitMQ. `tests/cli/services.rs` shows how a worker starts and stops services.

use journeyman_platform::amqp;
use journeyman_platform::amqp::lapin::BasicProperties;
use journeyman_platform::amqp::lapin::types::AMQPValue;

use crate::amqp::support::{Client, Kind, broker, shared_uri};
use crate::support::process::Process;

/// A worker with this handler.
async fn start(kind: Kind, name: &str, handler: &str) -> Option<(Client, Process, tempfile::TempDir)> {
    let uri = shared_uri()?;
    let client = Client::new(&broker(&uri), kind).await;
    let folder = tempfile::tempdir().expect("a folder");
    let source =
        format!("[source.requests]\nkind = \"amqp\"\nrequests_queue = \"{}\"\nhandler = \"{name}\"\n", client.queue);
    let config = folder.path().join("journeyman.toml");
    std::fs::write(&config, source + handler).expect("the file is written");
    let variables =
        [("WORKER_AMQP_URI", uri.as_str()), ("WORKER_ACTIVITY_EXCHANGE", ""), ("JOURNEYMAN__WORKER__CAPACITY", "8")];
    let worker = Process::start(folder.path(), &config, &variables);
    Some((client, worker, folder))
}

async fn stop(client: &Client, worker: Process) {
    worker.drained().await;
    client.delete_empty_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_example_service_replies() {
    let service = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/services/echo.py");
    let handler = format!(
        "[handler.echo]\nkind = \"http\"\nurl = \"unix:echo.sock\"\nhealth = \"/health\"\nexec = [\"{service}\"]\n"
    );
    let Some((client, worker, _folder)) = start(Kind::Durable, "echo", &handler).await else { return };
    let answer = client.call("/echo", b"{\"x\": 1}").await;
    assert_eq!((answer.status(), answer.partial), ("ok", false));
    let reply = answer.json();
    assert_eq!((&reply["echo"], reply["path"].as_str()), (&serde_json::json!({"x": 1}), Some("/echo")));
    assert!(reply["task"].as_str().is_some_and(|task| task.contains('.')), "{reply}");
    // Without a path.
    let without = BasicProperties::default().with_reply_to("amq.rabbitmq.reply-to".into());
    assert!(client.publish(without.with_correlation_id("none".into()), b"2").await);
    assert_eq!(client.answer("none").await.json()["path"], "/");
    // Partial replies.
    assert!(client.publish(Client::properties("parts", "/count"), b"3").await);
    for (body, partial) in [("1", true), ("2", true), ("3", true), ("\"done\"", false)] {
        let answer = client.answer("parts").await;
        assert_eq!((answer.status(), answer.body.as_slice(), answer.partial), ("ok", body.as_bytes(), partial));
    }
    // An error response.
    let answer = client.call("/echo", b"no JSON").await;
    assert_eq!((answer.status(), &answer.json()["message"]), ("core_error", &"the body is not JSON".into()));
    stop(&client, worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_get_the_request_and_reply() {
    let Some((client, worker, _folder)) = start(Kind::Durable, "command", "").await else { return };
    let script = "echo '{\"type\":\"answer\",\"text\":\"half\",\"partial\":true}' >&3; \
                  echo \"{\\\"type\\\":\\\"answer\\\",\\\"status\\\":\\\"odd\\\",\\\"json\\\":$REQUEST}\" >&3; echo $TRACEPARENT";
    let body = serde_json::json!({ "command": [["/bin/sh", "-c", script]], "maxRunTime": 60 }).to_string();
    let own = amqp::header_table(
        [("x-rpc-path", "/do"), ("x-own", "yes")].map(|(name, text)| (name, AMQPValue::LongString(text.into()))),
    );
    let properties = Client::properties("a", "/do").with_headers(own).with_expiration("60000".into());
    let properties = properties.with_content_type("application/json".into()).with_content_encoding("identity".into());
    assert!(client.publish(properties, body.as_bytes()).await);
    let half = client.answer("a").await;
    assert_eq!((half.partial, half.body.as_slice()), (true, &b"half"[..]));
    let answer = client.answer("a").await;
    let reply = answer.json();
    assert_eq!((answer.status(), &reply["path"], &reply["correlationId"]), ("odd", &"/do".into(), &"a".into()));
    assert_eq!((&reply["headers"]["x-own"], &reply["secondsLeft"]), (&"yes".into(), &60.0.into()), "{reply}");
    let of_body = (&reply["contentType"], &reply["contentEncoding"]);
    assert_eq!(of_body, (&"application/json".into(), &"identity".into()), "{reply}");
    stop(&client, worker).await;
}

/// Is busy at first, and exits over `/poison` sooner than the other requests are done.
const POISONED: &str = r#"
import os, socketserver, time

class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        first = line = self.rfile.readline()
        while line not in (b"\r\n", b""):
            line = self.rfile.readline()
        status = b"200 OK"
        if b"/poison" in first:
            time.sleep(0.1)
            os._exit(3)
        if b"/work" in first:
            time.sleep(0.4)
        if b"/busy" in first and not os.path.exists("busy"):
            open("busy", "w").close()
            status = b"503 Busy\r\nretry-after: 0"
        self.wfile.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 1\r\nconnection: close\r\n\r\n1")

socketserver.ThreadingUnixStreamServer(os.environ["JOURNEYMAN_SERVICE_SOCKET"], Handler).serve_forever()
"#;

#[tokio::test(flavor = "multi_thread")]
async fn a2_a_request_that_ends_its_service_is_given_up_without_those_that_were_forwarded_with_it() {
    for kind in [Kind::Quorum, Kind::Durable] {
        let service = toml::Value::String(POISONED.to_owned());
        let handler = format!(
            "max_attempts = 3\n[handler.echo]\nkind = \"http\"\nurl = \"unix:echo.sock\"\n\
             exec = [\"/usr/bin/env\", \"python3\", \"-c\", {service}]\n"
        );
        let Some((client, worker, _folder)) = start(kind, "echo", &handler).await else { return };
        assert_eq!(client.call("/busy", b"").await.status(), "ok");
        assert!(!worker.log().contains("starts alone"), "{}", worker.log());
        let innocents: Vec<String> = (0..33).map(|number| format!("i{number}")).collect();
        for (place, innocent) in innocents.iter().enumerate() {
            if place == 3 {
                assert!(client.publish(Client::properties("poison", "/poison"), b"").await);
            }
            assert!(client.publish(Client::properties(innocent, "/work"), b"").await);
        }
        for innocent in &innocents {
            let answer = client.answer(innocent).await;
            assert_eq!(answer.status(), "ok", "{kind:?} {innocent}: {}", answer.json());
        }
        assert_eq!(client.answer("poison").await.json()["type"], "journeyman:attempts_exhausted");
        // It takes requests again.
        assert_eq!(client.call("/work", b"").await.status(), "ok");
        let log = worker.drained().await;
        let deaths = log.matches("service ended: exited").count();
        // A quorum queue also counts what it delivers while its consumer is being canceled.
        let least = if kind == Kind::Quorum { 2 } else { 3 };
        assert!((least..=3).contains(&deaths), "{kind:?}: {deaths}, {log}");
        client.delete_empty_queue().await;
    }
}
