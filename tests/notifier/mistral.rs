//! Notifications of Mistral, as its publishers send them, through a real RabbitMQ.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use hmac::{Hmac, KeyInit as _, Mac as _};
use journeyman_platform::amqp::lapin::options::{BasicPublishOptions, QueueDeclareOptions};
use journeyman_platform::amqp::lapin::types::FieldTable;
use journeyman_platform::amqp::lapin::{BasicProperties, Channel, Confirmation, Connection};
use journeyman_platform::host::crash_points::{MISTRAL_CRASH_POINTS, NOTIFIER_CRASH_POINTS};
use reqwest::Method;
use serde_json::{Value, json};
use sha2::Sha256;

use crate::notifier::support::{Place, Receiver, Running, deaths, within};
use crate::support::{broker, needs, until};

const URL_KEY: &str = "key-that-publishers-share";
const EXECUTION: &str = "4b1a0b62-7f0e-4a53-9a5c-0c8a6f1f0d11";

fn queue_name(execution: &str, url: &str) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(URL_KEY.as_bytes()).expect("any key");
    mac.update(url.as_bytes());
    format!("{execution}.{}", hex::encode(&mac.finalize().into_bytes()[..16]))
}

/// A vhost that the notifier makes.
struct Vhost {
    name: String,
    shared: String,
}

impl Vhost {
    async fn new() -> Option<Self> {
        let shared = broker::shared()?;
        let exchanges = broker::api(Method::GET, "exchanges/%2F?columns=name", None).await;
        let has_events = exchanges.as_array().expect("a list").iter().any(|one| one["name"] == "amq.rabbitmq.event");
        if !has_events {
            let needed = std::env::var("CI").is_ok_and(|value| value == "true");
            assert!(!needed, "the broker has no plugin rabbitmq_event_exchange; that of tests/run has it");
            eprintln!(
                "NOT TESTED: the broker has no plugin rabbitmq_event_exchange, so queues are found within a minute"
            );
            return None;
        }
        Some(Self { shared, name: format!("mistral-{}", uuid::Uuid::new_v4()) })
    }

    fn place(&self, delete_after: &str) -> Place {
        self.place_as(&self.shared, delete_after)
    }

    fn place_as(&self, uri: &str, delete_after: &str) -> Place {
        let place = Place::new(&[]);
        place.write("uri", uri);
        place.write("url-key", URL_KEY);
        place.configure(&format!(
            "\n[amqp]\nuri_file = \"uri\"\nmanagement_url = \"{}\"\n\n[notifier.mistral]\nvhost = \"{}\"\n\
             url_key_file = \"url-key\"\ndelete_after = \"{delete_after}\"\n",
            broker::management(),
            self.name
        ));
        place
    }

    fn uri(&self) -> String {
        broker::in_vhost(&self.shared, &self.name)
    }

    async fn publisher(&self, url: &str) -> Publisher {
        let (connection, channel) = broker::connect_to(&self.uri()).await;
        let queue = queue_name(EXECUTION, url);
        Publisher { connection, channel, url: url.to_owned(), queue, returned: 0, unsure: 0, published: 0 }
    }

    /// The queues that exist, but the notifier's own.
    async fn queues(&self) -> Vec<String> {
        let all =
            broker::api(Method::GET, &format!("queues/{}?columns=name&disable_stats=true", self.name), None).await;
        let names = all.as_array().expect("a list").iter().map(|one| one["name"].as_str().expect("a name").to_owned());
        names.filter(|name| !name.starts_with("journeyman.")).collect()
    }

    async fn remove(self) {
        broker::api(Method::DELETE, &format!("vhosts/{}", self.name), None).await;
    }
}

/// As an engine, with `mandatory`, and a look at the queue after each confirmation.
struct Publisher {
    connection: Connection,
    channel: Channel,
    url: String,
    queue: String,
    /// Messages that came back since the queue was gone.
    returned: usize,
    /// Messages that were confirmed, and whose queue was gone.
    unsure: usize,
    published: usize,
}

impl Publisher {
    async fn declare(&self) {
        let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        self.channel
            .queue_declare(self.queue.as_str().into(), durable, FieldTable::default())
            .await
            .expect("it is made");
    }

    /// RabbitMQ confirms a message, and does not return it, whose queue is deleted while the message is on the way to it.
    async fn send(&mut self, message: &Value) {
        let body = message.to_string();
        let id = uuid::Uuid::new_v4().to_string();
        loop {
            let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
            let properties = BasicProperties::default().with_delivery_mode(2).with_message_id(id.as_str().into());
            let queue = self.queue.as_str().into();
            let publishing = self.channel.basic_publish("".into(), queue, options, body.as_bytes(), properties);
            match within("a confirmation", async { publishing.await.expect("it is sent").await }).await {
                Ok(Confirmation::Ack(None)) if self.has_queue().await => return,
                Ok(Confirmation::Ack(None)) => self.unsure += 1,
                Ok(Confirmation::Ack(Some(_))) => self.returned += 1,
                other => panic!("{other:?}"),
            }
            self.declare().await;
        }
    }

    async fn has_queue(&self) -> bool {
        let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let channel = self.connection.create_channel().await.expect("a channel");
        channel.queue_declare(self.queue.as_str().into(), passive, FieldTable::default()).await.is_ok()
    }

    async fn event(&mut self, restart_count: u32) {
        self.published += 1;
        let body = json!({ "event": "TASK_SUCCEEDED", "number": self.published });
        self.send(&json!({ "url": self.url, "headers": null, "restart_count": restart_count, "body": body })).await;
    }

    async fn end(&mut self, restart_count: u32) {
        self.send(&json!({ "end": true, "restart_count": restart_count })).await;
    }

    /// Calls that let some time pass.
    async fn round_trips(&self, count: usize) {
        for _ in 0..count {
            let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
            let name = "journeyman.dead".into();
            self.channel.queue_declare(name, passive, FieldTable::default()).await.expect("it is there");
        }
    }

    async fn close(self) {
        self.connection.close(200, "OK".into()).await.expect("it closes");
    }
}

/// All that was published came, in its order; only a head twice.
fn check_published(receiver: &Receiver, published: usize) {
    let mut numbers: Vec<u64> = Vec::new();
    for got in receiver.got() {
        let body: Value = serde_json::from_slice(&got.body).expect("JSON");
        let number = body["number"].as_u64().expect("a number");
        if numbers.last() != Some(&number) {
            numbers.push(number);
        }
    }
    let expected: Vec<u64> = (1..=published as u64).collect();
    assert_eq!(numbers, expected);
    assert_eq!(receiver.check_order(), published);
}

/// The example of a publisher.
struct Example {
    child: Child,
    calls: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Example {
    /// `None` without pika.
    fn start(vhost: &Vhost) -> Option<Self> {
        let python = needs("JOURNEYMAN_TEST_PIKA_PYTHON")?;
        let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/mistral/guaranteed_publisher.py");
        let mut child = Command::new(python)
            .arg(script)
            .env("AMQP_URI", vhost.uri())
            .env("URL_KEY", URL_KEY)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let (calls, answers) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        Some(Self { child, calls, answers: BufReader::new(answers) })
    }

    fn call(&mut self, line: &str) {
        writeln!(self.calls, "{line}").expect("it reads");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("it answers");
        assert_eq!(answer, "ok\n", "{line}");
    }

    fn start_execution(&mut self, publishers: &Value) {
        self.call(&json!({ "start": EXECUTION, "notify": publishers }).to_string());
    }

    /// `data` is passed as it is.
    fn notify(&mut self, publishers: &Value, data: &str, event: &str, state: &str, restart_count: u32) {
        self.call(&format!(
            r#"{{"execution": "{EXECUTION}", "notify": {publishers}, "data": {data}, "event": "{event}", "state": "{state}", "restart_count": {restart_count}}}"#
        ));
    }

    fn end(mut self) {
        drop(self.calls);
        assert!(self.child.wait().expect("it ends").success());
    }
}

fn goldens() -> BTreeMap<String, String> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/notifier/mistral");
    let files = std::fs::read_dir(folder).expect("the fixtures").map(|entry| entry.expect("a file").path());
    let name = |path: &std::path::Path| path.file_stem().expect("a name").to_string_lossy().into_owned();
    files.map(|path| (name(&path), std::fs::read_to_string(&path).expect("text"))).collect()
}

async fn ready(notifier: &mut Running<'_>) {
    notifier.process.says("taking Mistral's notifications").await;
}

#[tokio::test]
async fn p9_each_event_is_posted_with_the_body_of_mistral_byte_for_byte() {
    let Some(vhost) = Vhost::new().await else { return };
    let receiver = Receiver::answering(202).await;
    let place = vhost.place("0s");
    let mut notifier = place.start().await;
    ready(&mut notifier).await;
    let Some(mut example) = Example::start(&vhost) else { return };
    let url = format!("{}/hook?token=in-the-url", receiver.0.url());
    let publishers = json!([{ "type": "webhook", "url": url, "headers": { "X-Auth-Token": "s3cret" } }]);
    example.start_execution(&publishers);
    let goldens = goldens();
    for (event, body) in &goldens {
        example.notify(&publishers, body, event, "RUNNING", 0);
    }
    receiver.wait_for(goldens.len()).await;
    example.end();
    let log = notifier.stop().await;
    assert!(!log.contains("s3cret") && !log.contains("in-the-url") && !log.contains(URL_KEY), "{log}");
    assert_eq!(receiver.check_order(), goldens.len());
    for (asked, (event, body)) in receiver.0.asked().iter().zip(&goldens) {
        assert_eq!(String::from_utf8_lossy(&asked.body), body.as_str(), "{event}");
        assert_eq!(asked.header("x-auth-token"), Some("s3cret"));
        assert_eq!(asked.header("journeyman-lane"), Some(EXECUTION));
        assert!(asked.line.starts_with("POST /hook?token=in-the-url "), "{}", asked.line);
    }
    assert_eq!(goldens.len(), 15);
    vhost.remove().await;
}

#[tokio::test]
async fn each_url_gets_the_events_it_wants_and_a_rerun_follows_with_the_next_epoch() {
    let Some(vhost) = Vhost::new().await else { return };
    let (all, some) = (Receiver::answering(200).await, Receiver::failing_first(500).await);
    let place = vhost.place("50ms");
    let mut notifier = place.start().await;
    ready(&mut notifier).await;
    let Some(mut example) = Example::start(&vhost) else { return };
    let publishers = json!([
        { "type": "webhook", "url": format!("{}/hook", all.0.url()) },
        { "type": "webhook", "url": format!("{}/hook", some.0.url()), "event_types": ["TASK_FAILED"] },
        { "type": "noop" },
    ]);
    let data = |number: u32| json!({ "event": "x", "number": number }).to_string();
    example.start_execution(&publishers);
    example.notify(&publishers, &data(1), "WORKFLOW_LAUNCHED", "RUNNING", 0);
    example.notify(&publishers, &data(2), "TASK_FAILED", "RUNNING", 0);
    example.notify(&publishers, &data(3), "WORKFLOW_FAILED", "ERROR", 0);
    all.wait_for(3).await;
    // The queues of what has ended are deleted, and the publisher makes them again.
    for _ in 0..2 {
        notifier.process.says("deleted the queue").await;
    }
    until("both queues are gone", async || vhost.queues().await.is_empty()).await;
    example.start_execution(&publishers);
    example.notify(&publishers, &data(4), "WORKFLOW_RERUN", "RUNNING", 1);
    example.notify(&publishers, &data(5), "TASK_FAILED", "RUNNING", 1);
    all.wait_for(5).await;
    some.wait_for(2).await;
    example.end();
    notifier.stop().await;
    let lanes =
        |receiver: &Receiver| -> Vec<(u32, u32)> { receiver.got().iter().map(|got| (got.epoch, got.seq)).collect() };
    assert_eq!(lanes(&all), [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]);
    assert_eq!(lanes(&some), [(0, 1), (1, 1)]);
    vhost.remove().await;
}

/// The interleavings of an `end`, a re-run and the deletion of the queue, by the time that passes between them.
#[tokio::test(flavor = "multi_thread")]
async fn p4_a_rerun_while_its_queue_is_deleted_loses_nothing() {
    const ROUNDS: u32 = 80;
    let Some(vhost) = Vhost::new().await else { return };
    let receiver = Receiver::answering(200).await;
    let place = vhost.place("1ms");
    let mut notifier = place.start().await;
    ready(&mut notifier).await;
    let mut publisher = vhost.publisher(&format!("{}/hook", receiver.0.url())).await;
    for round in 0..ROUNDS {
        publisher.declare().await;
        publisher.round_trips(usize::try_from(round % 5).expect("few")).await;
        publisher.event(round).await;
        publisher.end(round).await;
        // A late one, of the run that has ended.
        if round % 3 == 0 {
            publisher.event(round).await;
            publisher.end(round).await;
        }
        receiver.wait_for(publisher.published).await;
        publisher.round_trips(usize::try_from(round % 17).expect("few")).await;
    }
    receiver.wait_for(publisher.published).await;
    let log = notifier.stop().await;
    let count = |words: &str| log.lines().filter(|line| line.contains(words)).count();
    let (deleted, kept) = (count("deleted the queue"), count("kept the queue"));
    let Publisher { returned, unsure, .. } = publisher;
    println!("{ROUNDS} runs, {deleted} deletions, {kept} refused, {returned} returned, {unsure} unsure, 0 lost");
    check_published(&receiver, publisher.published);
    assert!(deleted > 0);
    publisher.close().await;
    vhost.remove().await;
}

#[tokio::test]
async fn p2_nothing_of_mistral_is_lost_when_the_notifier_is_killed() {
    let runs = deaths(2);
    for point in NOTIFIER_CRASH_POINTS.iter().chain(MISTRAL_CRASH_POINTS) {
        let Some(vhost) = Vhost::new().await else { return };
        let receiver = Receiver::failing_first(500).await;
        let place = vhost.place("1ms");
        let mut first = place.start().await;
        ready(&mut first).await;
        first.stop().await;
        let mut publisher = vhost.publisher(&format!("{}/hook", receiver.0.url())).await;
        for run in (0..).take(runs) {
            let notifier = place.spawn(&[("JOURNEYMAN_CRASH_POINT", point)]);
            publisher.declare().await;
            for _ in 0..3 {
                publisher.event(run).await;
            }
            publisher.end(run).await;
            let ended = notifier.ends().await;
            assert_eq!(ended.signal(), Some(9), "at {point}: {}", ended.log);
        }
        let notifier = place.start().await;
        receiver.wait_for(publisher.published).await;
        until("the queue is gone: `end` was kept", async || vhost.queues().await.is_empty()).await;
        notifier.stop().await;
        check_published(&receiver, publisher.published);
        println!("{point}: {runs} deaths, {} confirmed, 0 lost, {} sent", publisher.published, receiver.got().len());
        publisher.close().await;
        vhost.remove().await;
    }
}

#[tokio::test]
async fn an_unavailable_url_is_listed_and_delivered_in_order_once_it_is_named() {
    let Some(vhost) = Vhost::new().await else { return };
    let receiver = Receiver::answering_at_first(410, 1).await;
    let place = vhost.place("0s");
    let mut notifier = place.start().await;
    ready(&mut notifier).await;
    let url = format!("{}/hook", receiver.0.url());
    let mut publisher = vhost.publisher(&url).await;
    publisher.declare().await;
    publisher.event(0).await;
    notifier.process.says("is disabled").await;
    publisher.event(0).await;
    publisher.event(0).await;
    let listed = notifier.get("/unavailable").await;
    let urls: BTreeSet<&str> =
        listed["unavailable"].as_array().expect("a list").iter().filter_map(|one| one["url"].as_str()).collect();
    assert_eq!(urls, BTreeSet::from([url.as_str()]));
    assert_eq!(notifier.post("/redeliver", &json!({ "url": "http://127.0.0.1:1/other" })).await.0, 404);
    assert_eq!(notifier.post("/redeliver", &json!({ "url": url })).await, (200, json!({ "endpoints": 1 })));
    receiver.wait_for(3).await;
    assert_eq!(notifier.get("/unavailable").await, json!({ "unavailable": [] }));
    notifier.stop().await;
    check_published(&receiver, 3);
    publisher.close().await;
    vhost.remove().await;
}

#[tokio::test]
async fn a_message_that_is_no_event_becomes_a_dead_letter_and_a_user_without_rights_is_told() {
    let Some(vhost) = Vhost::new().await else { return };
    let receiver = Receiver::answering(200).await;
    let user = vhost.name.clone();
    broker::api(Method::PUT, &format!("users/{user}"), Some(json!({ "password": "weak", "tags": "management" }))).await;
    let (_, host) = vhost.shared.split_once('@').expect("an address with a user");
    let place = vhost.place_as(&format!("amqp://{user}:weak@{host}"), "0s");
    let mut notifier = place.start().await;
    notifier.process.says("run `journeyman notifier setup`").await;
    let setup =
        place.command(&["notifier", "setup"]).env("JOURNEYMAN_AMQP_URI", &vhost.shared).output().expect("it runs");
    assert!(setup.status.success(), "{}", String::from_utf8_lossy(&setup.stderr));
    notifier.kill().await;
    // Without a right to the events of RabbitMQ, later queues are found within a minute.
    let mut publisher = vhost.publisher(&format!("{}/hook", receiver.0.url())).await;
    publisher.declare().await;
    let mut notifier = place.start().await;
    ready(&mut notifier).await;
    publisher.send(&json!({ "url": "http://other/s3cret", "body": { "event": "TASK_FAILED" } })).await;
    publisher.event(0).await;
    receiver.wait_for(1).await;
    within("a dead letter", async {
        loop {
            let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
            let dead = publisher.channel.queue_declare("journeyman.dead".into(), options, FieldTable::default());
            if dead.await.expect("it is there").message_count() == 1 {
                break;
            }
        }
    })
    .await;
    let log = notifier.stop().await;
    assert!(
        log.contains("its URL is not that of its queue") && !log.contains("s3cret") && !log.contains("weak"),
        "{log}"
    );
    publisher.close().await;
    broker::api(Method::DELETE, &format!("users/{user}"), None).await;
    vhost.remove().await;
}
