//! Handlers of kind `http` and `command` on a real RabbitMQ. `tests/cli/services.rs` shows how a worker starts and stops services.

use journeyman::amqp;
use journeyman::amqp::lapin::BasicProperties;
use journeyman::amqp::lapin::types::AMQPValue;

use crate::process::Process;
use crate::support::{Client, Kind, broker, shared_uri};

/// A worker with this handler.
async fn start(name: &str, handler: &str) -> Option<(Client, Process, tempfile::TempDir)> {
    let uri = shared_uri()?;
    let client = Client::new(&broker(&uri), Kind::Durable).await;
    let folder = tempfile::tempdir().expect("a folder");
    let source =
        format!("[source.requests]\nkind = \"amqp\"\nrequests_queue = \"{}\"\nhandler = \"{name}\"\n", client.queue);
    let config = folder.path().join("journeyman.toml");
    std::fs::write(&config, source + handler).expect("the file is written");
    let variables = [("WORKER_AMQP_URI", uri.as_str()), ("WORKER_ACTIVITY_EXCHANGE", "")];
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
    let Some((client, worker, _folder)) = start("echo", &handler).await else { return };
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
    let Some((client, worker, _folder)) = start("command", "").await else { return };
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
