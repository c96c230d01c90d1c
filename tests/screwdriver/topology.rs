//! `journeyman screwdriver topology` on the queues of a real broker.

use std::process::Command;

use journeyman_platform::amqp::header_table;
use journeyman_platform::amqp::lapin::options::{
    BasicGetOptions, BasicNackOptions, BasicPublishOptions, ExchangeDeclareOptions, ExchangeDeleteOptions,
    QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use journeyman_platform::amqp::lapin::types::{AMQPValue, FieldTable};
use journeyman_platform::amqp::lapin::{BasicProperties, Channel, Confirmation, ExchangeKind};
use serde_json::Value;

use crate::screwdriver::support::{text, until};
use crate::support::broker::{connect_to, management, shared};

/// Names of one test at the shared broker.
struct Place {
    uri: String,
    folder: tempfile::TempDir,
    prefix: String,
    channel: Channel,
}

/// What the command has printed, and its exit code.
struct Told {
    code: Option<i32>,
    checks: Vec<(String, String, String)>,
    err: String,
}

impl Place {
    async fn new() -> Option<Self> {
        let uri = shared()?;
        let (_, channel) = connect_to(&uri).await;
        let prefix = format!("sd{}", &uuid::Uuid::new_v4().simple().to_string()[..8]);
        Some(Self { uri, folder: tempfile::tempdir().expect("a folder"), prefix, channel })
    }

    fn name(&self, name: &str) -> String {
        format!("{}-{name}", self.prefix)
    }

    fn run(&self, uri: &str, management: Option<&str>, arguments: &[&str]) -> Told {
        let names = ["main", "retry", "wait", "build"].map(|name| self.name(name));
        let [main, retry, wait, exchange] = &names;
        let management = management.map(|url| format!("[amqp]\nmanagement_url = \"{url}\"\n")).unwrap_or_default();
        let config = format!(
            "{management}[source.builds]\nkind = \"screwdriver\"\nui = \"http://ui\"\nstore = \"http://store\"\n\
             main_queue = \"{main}\"\nretry_queue = \"{retry}\"\nwait_queue = \"{wait}\"\nexchange = \"{exchange}\"\n"
        );
        let file = self.folder.path().join("journeyman.toml");
        std::fs::write(&file, config).expect("it is written");
        let mut command = Command::new(env!("CARGO_BIN_EXE_journeyman"));
        command.env_clear().env("JOURNEYMAN_AMQP_URI", uri).current_dir(self.folder.path());
        let output = command.args(["screwdriver", "topology", "-o", "json", "--config"]).arg(&file).args(arguments);
        let output = output.output().expect("it runs");
        let checks = serde_json::from_slice::<Value>(&output.stdout).unwrap_or_default();
        let text = |check: &Value, key: &str| check[key].as_str().unwrap_or_default().replace(&self.prefix, "P");
        let checks = checks["checks"].as_array().into_iter().flatten();
        Told {
            code: output.status.code(),
            checks: checks.map(|check| (text(check, "name"), text(check, "state"), text(check, "result"))).collect(),
            err: String::from_utf8(output.stderr).expect("text"),
        }
    }

    fn checked(&self, arguments: &[&str]) -> Told {
        self.run(&self.uri, Some(&management()), arguments)
    }

    async fn declare(&self, queue: &str, arguments: FieldTable) {
        let (name, exchange) = (self.name(queue), self.name("build"));
        let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        self.channel.queue_declare(name.as_str().into(), options, arguments).await.expect("it is declared");
        let (queue, exchange, key) = (name.as_str().into(), exchange.as_str().into(), name.as_str().into());
        let binding = self.channel.queue_bind(queue, exchange, key, QueueBindOptions::default(), FieldTable::default());
        binding.await.expect("it is bound");
    }

    async fn remove(self) {
        for queue in ["main", "maindlr", "retry", "retrydlr", "wait", "default"] {
            let deleting = self.channel.queue_delete(self.name(queue).as_str().into(), QueueDeleteOptions::default());
            deleting.await.expect("it is deleted");
        }
        let deleting =
            self.channel.exchange_delete(self.name("build").as_str().into(), ExchangeDeleteOptions::default());
        deleting.await.expect("it is deleted");
    }
}

impl Told {
    fn of(&self, state: &str) -> Vec<String> {
        let found = self.checks.iter().filter(|(_, one, _)| one == state);
        found.map(|(name, _, result)| format!("{name} {result}")).collect()
    }
}

const LATE: &str = "queue P-wait a check with a short delay waits there for longer ones in front of it";

#[tokio::test]
async fn what_is_missing_is_named_and_declared_and_loses_nothing() {
    let Some(place) = Place::new().await else { return };
    let missing = place.checked(&[]);
    assert_eq!(missing.code, Some(1), "{}", missing.err);
    assert_eq!(
        missing.of("failed"),
        [
            "exchange P-build does not exist",
            "queue P-main does not exist",
            "queue P-retry does not exist",
            "queue P-wait does not exist"
        ]
    );

    let applied = place.checked(&["--apply"]);
    assert_eq!((applied.code, applied.of("failed")), (Some(0), Vec::new()), "{}", applied.err);
    assert_eq!(applied.of("warning"), [LATE]);
    let done = applied.of("ok").join("\n");
    for queue in ["main", "maindlr", "retry", "retrydlr", "wait"] {
        assert!(done.contains(&format!("queue P-{queue} declared: durable")), "{done}");
        assert!(done.contains(&format!("queue P-{queue} bound to P-build by its name")), "{done}");
    }

    let again = place.checked(&["--apply"]);
    assert_eq!((again.code, again.of("warning")), (Some(0), vec![LATE.to_owned()]));
    let same = ["exchange P-build exists", "queue P-main exists", "queue P-retry exists"];
    assert_eq!(again.of("ok"), same, "nothing is declared twice");

    for queue in ["main", "retry"] {
        let (exchange, key) = (place.name("build"), place.name(queue));
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let properties = BasicProperties::default();
        let sending =
            place.channel.basic_publish(exchange.as_str().into(), key.as_str().into(), options, b"x", properties);
        let confirmed = sending.await.expect("it is sent").await.expect("it is confirmed");
        assert_eq!(confirmed, Confirmation::Ack(None), "it has reached a queue");
        let got = place.channel.basic_get(key.as_str().into(), BasicGetOptions::default()).await;
        let message = got.expect("a queue").expect("a message");
        message.nack(BasicNackOptions::default()).await.expect("it is rejected");
        let delay = place.name(&format!("{queue}dlr"));
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        until("it is kept for later", async || {
            let looking = place.channel.queue_declare(delay.as_str().into(), options, FieldTable::default());
            looking.await.expect("a queue").message_count() > 0
        })
        .await;
    }
    place.remove().await;
}

#[tokio::test]
async fn the_dangers_of_queues_that_exist_are_named_and_nothing_of_them_is_changed() {
    let Some(place) = Place::new().await else { return };
    let exchange = place.name("build");
    let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    let declaring =
        place.channel.exchange_declare(exchange.as_str().into(), ExchangeKind::Topic, options, FieldTable::default());
    declaring.await.expect("it is declared");
    let to = |key: &str, ttl_ms: Option<i32>| {
        let always =
            [("x-dead-letter-exchange", text(&exchange)), ("x-dead-letter-routing-key", text(&place.name(key)))];
        header_table(always.into_iter().chain(ttl_ms.map(|ttl_ms| ("x-message-ttl", AMQPValue::LongInt(ttl_ms)))))
    };
    let queues = [
        ("main", to("maindlr", Some(28_800_000))),
        ("maindlr", to("main", Some(5_000))),
        ("retry", FieldTable::default()),
        ("wait", to("main", None)),
        ("default", FieldTable::default()),
    ];
    for (queue, arguments) in &queues {
        place.declare(queue, arguments.clone()).await;
    }
    let catch_all = place.name("default");
    let (queue, source) = (catch_all.as_str().into(), exchange.as_str().into());
    let binding =
        place.channel.queue_bind(queue, source, "".into(), QueueBindOptions::default(), FieldTable::default());
    binding.await.expect("it is bound");

    let told = place.checked(&["--apply"]);
    assert_eq!((told.code, told.of("ok").len()), (Some(1), 0), "{}", told.err);
    assert_eq!(told.of("failed"), ["queue P-wait sends expired checks to P-main and not to P-retry"]);
    let dangers = told.of("warning");
    for (found, words) in dangers.iter().zip([
        "exchange P-build queue P-default is bound with an empty key",
        "queue P-main messages expire after 28800s and come back by expiring again",
        "queue P-retry has no dead letter exchange",
        LATE,
    ]) {
        assert!(found.starts_with(words), "{found}");
    }
    assert_eq!(dangers.len(), 4, "{dangers:?}");
    // The broker refuses other arguments than those of a queue that exists.
    for (queue, arguments) in &queues {
        place.declare(queue, arguments.clone()).await;
    }

    let unchecked = place.run(&place.uri, None, &[]);
    assert_eq!((unchecked.code, unchecked.of("warning").len()), (Some(0), 1));
    assert!(unchecked.of("warning")[0].contains("were not checked"));
    place.remove().await;
}

#[tokio::test]
async fn without_a_broker_or_the_right_to_use_it_the_exit_code_says_so() {
    let Some(place) = Place::new().await else { return };
    let closed = place.run("amqp://guest:guest@127.0.0.1:1/", None, &[]);
    assert_eq!(closed.code, Some(32), "{}", closed.err);
    let (scheme, rest) = place.uri.split_once("://").expect("a scheme");
    let host = rest.rsplit('@').next().expect("a host");
    let denied = place.run(&format!("{scheme}://guest:wrong-password@{host}"), None, &[]);
    assert_eq!(denied.code, Some(31), "{}", denied.err);
    assert!(!denied.err.contains("wrong-password"));
}
