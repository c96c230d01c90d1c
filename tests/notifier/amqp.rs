//! Events that arrive through a real RabbitMQ.

use std::collections::BTreeMap;
use std::process::Output;

use journeyman_platform::amqp::lapin::options::{BasicGetOptions, BasicPublishOptions, QueueDeclareOptions};
use journeyman_platform::amqp::lapin::types::{AMQPValue, FieldTable};
use journeyman_platform::amqp::lapin::{BasicProperties, Channel, Confirmation, Connection};
use journeyman_platform::host::crash_points::NOTIFIER_CRASH_POINTS;
use reqwest::Method;
use serde_json::{Value, json};

use crate::notifier::support::{Place, Receiver, deaths, event, within};
use crate::support::broker;
use crate::support::wire::Wire;

const EXCHANGE: &str = "test.notify";

/// A vhost of one test.
struct Rabbit {
    vhost: String,
    uri: String,
    shards: u16,
    connection: Connection,
    channel: Channel,
}

impl Rabbit {
    async fn start() -> Option<Self> {
        let shared = broker::shared()?;
        let vhost = format!("notifier-{}", uuid::Uuid::new_v4());
        broker::api(Method::PUT, &format!("vhosts/{vhost}"), Some(json!({}))).await;
        let uri = broker::in_vhost(&shared, &vhost);
        let overview = broker::api(Method::GET, "overview", None).await;
        let types = overview["exchange_types"].as_array().expect("a list");
        let has_hash = types.iter().any(|one| one["name"] == "x-modulus-hash");
        if !has_hash {
            eprintln!("NOT TESTED: several shards; the broker has no plugin rabbitmq_sharding");
        }
        Some(Self::at(vhost, uri, if has_hash { 4 } else { 1 }).await)
    }

    async fn at(vhost: String, uri: String, shards: u16) -> Self {
        let (connection, channel) = broker::connect_to(&uri).await;
        Self { vhost, uri, shards, connection, channel }
    }

    /// A notifier that takes events from here.
    fn place(&self, receiver: &Receiver) -> Place {
        self.place_at(&self.uri, receiver)
    }

    fn place_at(&self, uri: &str, receiver: &Receiver) -> Place {
        let place = Place::new(&[("ci", receiver)]);
        place.write("uri", uri);
        place.configure(&format!(
            "\n[amqp]\nuri_file = \"uri\"\n\n[notifier.amqp]\nqueue = \"{EXCHANGE}\"\nshards = {}\n",
            self.shards
        ));
        place
    }

    /// Returns once the broker has it.
    async fn publish(&self, key: &str, body: &Value) {
        self.publish_raw(key, body.to_string().as_bytes()).await;
    }

    async fn publish_raw(&self, key: &str, body: &[u8]) {
        assert!(self.is_confirmed(key, body).await, "a confirmation");
    }

    /// Returns whether the broker has it; it may have it otherwise too.
    async fn is_confirmed(&self, key: &str, body: &[u8]) -> bool {
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let properties = BasicProperties::default().with_delivery_mode(2);
        let publishing = self.channel.basic_publish(EXCHANGE.into(), key.into(), options, body, properties);
        let confirmed = within("a confirmation, or none", async { publishing.await?.await }).await;
        matches!(confirmed, Ok(Confirmation::Ack(None)))
    }

    async fn publish_many(&self, numbers: std::ops::Range<usize>, keys: usize) {
        for number in numbers {
            let key = format!("key-{}", number % keys);
            self.publish(&key, &event(&number.to_string(), &key)).await;
        }
    }

    async fn remove(self) {
        self.connection.close(200, "OK".into()).await.expect("it closes");
        broker::api(Method::DELETE, &format!("vhosts/{}", self.vhost), None).await;
    }
}

fn setup(place: &Place, variables: &[(&str, &str)]) -> Output {
    place.command(&["notifier", "setup"]).envs(variables.iter().copied()).output().expect("it runs")
}

fn set_up(place: &Place) -> String {
    let output = setup(place, &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// The events of each lane come in the order of their numbers.
fn check_published_order(receiver: &Receiver) {
    let mut last: BTreeMap<String, usize> = BTreeMap::new();
    for got in receiver.got() {
        let body: Value = serde_json::from_slice(&got.body).expect("JSON");
        let number = body["data"]["id"].as_str().and_then(|id| id.parse().ok()).expect("a number");
        let before = last.insert(got.lane.clone(), number);
        assert!(before.is_none_or(|before| before <= number), "{number} after {before:?} in {}", got.lane);
    }
}

#[tokio::test]
async fn events_of_a_key_arrive_in_order_through_the_broker() {
    let Some(rabbit) = Rabbit::start().await else { return };
    let receiver = Receiver::failing_first(500).await;
    let place = rabbit.place(&receiver);
    set_up(&place);
    rabbit.publish_many(0..60, 7).await;
    let notifier = place.start().await;
    rabbit.publish_many(60..100, 7).await;
    let batch: Vec<Value> = (100..140).map(|number| event(&number.to_string(), "key-1")).collect();
    rabbit.publish("key-1", &json!(batch)).await;
    receiver.wait_for(140).await;
    notifier.stop().await;
    assert_eq!(receiver.check_order(), 140);
    check_published_order(&receiver);
    rabbit.remove().await;
}

#[tokio::test]
async fn setup_makes_what_is_missing_and_refuses_what_differs() {
    let Some(rabbit) = Rabbit::start().await else { return };
    let receiver = Receiver::answering(200).await;
    let place = rabbit.place(&receiver);
    for _ in 0..2 {
        assert!(set_up(&place).ends_with("and its queues\n"));
    }

    for other in [rabbit.shards + 1, rabbit.shards - 1] {
        if other == 0 {
            continue;
        }
        let place =
            Rabbit { shards: other, ..Rabbit::start().await.expect("a broker") }.place_at(&rabbit.uri, &receiver);
        let refused = setup(&place, &[]);
        let words = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && words.contains("another number of shards"), "{other}: {words}");
    }

    let name = format!("{EXCHANGE}.other.dead");
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    rabbit.channel.queue_declare(name.as_str().into(), durable, FieldTable::default()).await.expect("it is made");
    let variable = [("JOURNEYMAN__NOTIFIER__AMQP__QUEUE", "test.notify.other")];
    let refused = setup(&place, &variable);
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && words.contains("test.notify.other.dead exists with other arguments"),
        "{words}"
    );
    rabbit.remove().await;
}

#[tokio::test]
async fn a_notifier_needs_no_right_to_configure_and_says_what_is_missing() {
    let Some(rabbit) = Rabbit::start().await else { return };
    let receiver = Receiver::answering(200).await;
    let user = rabbit.vhost.clone();
    broker::api(Method::PUT, &format!("users/{user}"), Some(json!({ "password": "weak", "tags": "" }))).await;
    let rights = json!({ "configure": "^$", "write": "^$", "read": r"^test\.notify\..*" });
    broker::api(Method::PUT, &format!("permissions/{}/{user}", rabbit.vhost), Some(rights)).await;
    let (_, host) = rabbit.uri.split_once('@').expect("an address with a user");
    let place = rabbit.place_at(&format!("amqp://{user}:weak@{host}"), &receiver);

    let mut notifier = place.start().await;
    notifier.process.says("RabbitMQ has no exchange test.notify: run `journeyman notifier setup`").await;
    let refused = setup(&place, &[]);
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && words.contains("403") && !words.contains("weak"), "{words}");
    let bootstrap = setup(&place, &[("JOURNEYMAN_AMQP_URI", &rabbit.uri)]);
    assert!(bootstrap.status.success(), "{}", String::from_utf8_lossy(&bootstrap.stderr));
    rabbit.publish_many(0..10, 3).await;
    receiver.wait_for(10).await;
    let log = notifier.stop().await;
    assert!(!log.contains("weak"), "{log}");
    broker::api(Method::DELETE, &format!("users/{user}"), None).await;
    rabbit.remove().await;
}

#[tokio::test]
async fn a_message_that_is_no_event_becomes_a_dead_letter_and_blocks_nothing() {
    let Some(rabbit) = Rabbit::start().await else { return };
    let receiver = Receiver::answering(200).await;
    let place = rabbit.place(&receiver);
    set_up(&place);
    rabbit.publish("k", &event("1", "k")).await;
    rabbit.publish_raw("k", b"{\"secret\": \"s3cret\"}").await;
    rabbit.publish("k", &json!([event("2", "k"), event("3", "")])).await;
    rabbit.publish("k", &event("4", "k")).await;
    let mut notifier = place.start().await;
    receiver.wait_for(2).await;
    notifier.process.says("event 1: key is empty").await;
    let log = notifier.stop().await;
    assert!(!log.contains("s3cret"), "{log}");
    assert_eq!(receiver.check_order(), 2);
    let dead = format!("{EXCHANGE}.dead");
    for body in ["s3cret", "\"id\":\"2\""] {
        let letter = within("a dead letter", async {
            loop {
                let got = rabbit.channel.basic_get(dead.as_str().into(), BasicGetOptions { no_ack: true });
                if let Some(letter) = got.await.expect("it answers") {
                    break letter;
                }
                tokio::task::yield_now().await;
            }
        });
        let letter = letter.await;
        assert!(String::from_utf8_lossy(&letter.data).contains(body), "{letter:?}");
        let table = letter.properties.headers().clone().unwrap_or_default();
        let why = table.inner().get("x-first-death-reason").cloned();
        assert_eq!(why, Some(AMQPValue::LongString("rejected".into())));
    }
    rabbit.remove().await;
}

// The command blocks its thread.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_when_the_connection_is_cut_again_and_again() {
    let Some(rabbit) = Rabbit::start().await else { return };
    let receiver = Receiver::answering(200).await;
    let (_, rest) = rabbit.uri.split_once('@').expect("an address with a user");
    let (host, _) = rest.split_once('/').expect("an address with a path");
    let wire = Wire::to(host).await;
    let place = rabbit.place_at(&wire.uri(&rabbit.uri), &receiver);
    set_up(&place);
    let notifier = place.start().await;
    const CUTS: usize = 4;
    for round in 0..CUTS {
        rabbit.publish_many(round * 50..round * 50 + 25, 5).await;
        wire.cut();
        rabbit.publish_many(round * 50 + 25..round * 50 + 50, 5).await;
        receiver.wait_for((round + 1) * 50).await;
    }
    notifier.stop().await;
    assert_eq!(receiver.check_order(), CUTS * 50);
    check_published_order(&receiver);
    println!("{CUTS} cuts, {} connections", wire.connections());
    rabbit.remove().await;
}

#[tokio::test]
async fn p2_nothing_that_rabbitmq_has_confirmed_is_lost_when_the_notifier_is_killed() {
    let runs = deaths(2);
    for point in NOTIFIER_CRASH_POINTS {
        let Some(rabbit) = Rabbit::start().await else { return };
        let receiver = Receiver::failing_first(500).await;
        let place = rabbit.place(&receiver);
        set_up(&place);
        let mut published = 0;
        for run in 1..=runs {
            // What has arrived is stored at once, so this one may be reached only once.
            let hit = if *point == "notifier-stored" { 1 } else { run % 4 + 1 };
            let notifier = place.spawn(&[("JOURNEYMAN_CRASH_POINT", &format!("{point}:{hit}"))]);
            rabbit.publish_many(published..published + 20, 10).await;
            published += 20;
            let ended = notifier.ends().await;
            assert_eq!(ended.signal(), Some(9), "at {point}: {}", ended.log);
        }
        let notifier = place.start().await;
        receiver.wait_for(published).await;
        notifier.stop().await;
        assert_eq!(receiver.check_order(), published, "{point}");
        check_published_order(&receiver);
        println!("{point}: {runs} deaths, {published} confirmed, 0 lost, {} sent", receiver.got().len());
        rabbit.remove().await;
    }
}

#[tokio::test]
async fn p2_nothing_that_rabbitmq_has_confirmed_is_lost_when_rabbitmq_is_killed() {
    let Some(mut server) = broker::Broker::own() else { return };
    let runs = deaths(1);
    let mut rabbit = Rabbit::at("/".to_owned(), server.uri(), 4).await;
    let receiver = Receiver::failing_first(500).await;
    let place = rabbit.place(&receiver);
    set_up(&place);
    server.store_queue_list();
    let notifier = place.start().await;
    let publish = async |rabbit: &Rabbit, number: usize| {
        let key = format!("key-{}", number % 10);
        rabbit.is_confirmed(&key, event(&number.to_string(), &key).to_string().as_bytes()).await
    };
    for run in 0..runs {
        for number in run * 40..(run + 1) * 40 {
            if number % 40 == 20 {
                let (_, ()) = tokio::join!(publish(&rabbit, number), async { server.kill() });
                server.up();
                rabbit = Rabbit::at("/".to_owned(), server.uri(), 4).await;
            }
            // It waits for the confirm: a queue elects its leader first.
            within("a confirmation", async { while !publish(&rabbit, number).await {} }).await;
        }
    }
    receiver.wait_for(runs * 40).await;
    notifier.stop().await;
    assert_eq!(receiver.check_order(), runs * 40);
    check_published_order(&receiver);
    println!("{runs} deaths of RabbitMQ, {} confirmed, 0 lost, {} sent", runs * 40, receiver.got().len());
}
