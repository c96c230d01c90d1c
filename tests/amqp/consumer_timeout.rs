//! The consumer_timeout of a queue: what the management interface reports of it, and how it bounds a lease.

use std::num::NonZeroU32;
use std::time::Duration;

use crate::amqp::support::{
    Client, Gate, Kind, Running, broker, next, next_grant, queue, returns_body, shared, within,
};
use crate::support::broker::{is_newer, management};
use journeyman::source::Source as _;
use journeyman::source::amqp::{AmqpSource, AmqpSourceConfig as Queue};
use journeyman_platform::amqp;
use journeyman_platform::amqp::lapin::options::BasicConsumeOptions;
use journeyman_platform::amqp::lapin::types::{AMQPValue, FieldTable};
use journeyman_platform::amqp::management::{Management, ManagementError};

#[tokio::test(flavor = "multi_thread")]
async fn the_timeout_argument_of_a_queue_overrides_the_configured_timeout() {
    let Some(at) = shared() else { return };
    if is_newer() {
        return eprintln!("NOT TESTED: a consumer asks for its timeout here");
    }
    let client = Client::new(&at, Kind::Transient).await;
    client.delete_queue().await;
    let management = Management::new(&at, &management(), None).expect("the URL is valid");
    assert!(matches!(management.queue_settings(&client.queue).await, Err(ManagementError::NotFound)));
    client.declare_with(Kind::Transient, &client.queue, [("x-consumer-timeout", AMQPValue::LongInt(60_000))]).await;
    let source = AmqpSource::new(Queue { management: Some(management), ..queue(&client) });
    client.request(&["1"]).await;
    source.open().await.expect("there is a queue");
    let grant = next_grant(&source).await;
    for lease in [grant.lease, grant.claim.renew().await.expect("the claim is held")] {
        assert!(lease.length < Duration::from_secs(60), "{lease:?}");
    }
    drop(grant);
    source.close().await;
    client.delete_queue().await;
}

/// A queue whose deliveries are taken back after a second; `None` where the broker lets consumers not choose.
async fn impatient() -> Option<Client> {
    let at = shared()?;
    if !is_newer() {
        eprintln!("NOT TESTED: consumers of this broker do not choose their timeouts");
        return None;
    }
    let queue = format!("jm-test-{}", uuid::Uuid::new_v4().simple());
    let client = Client::without_queue(&at, &queue).await;
    let arguments = [("x-queue-type", amqp::text_value("quorum")), ("x-consumer-timeout", AMQPValue::LongInt(1_000))];
    client.declare_with(Kind::Quorum, &client.queue, arguments).await;
    Some(client)
}

/// Takes a request, acknowledges nothing, and waits until the broker has taken it back.
async fn lose_a_delivery(client: &Client) {
    let channel = client.broker.connect("slow").await.expect("the broker lets us in");
    let channel = channel.create_channel().await.expect("a channel");
    let (options, none) = (BasicConsumeOptions::default(), FieldTable::default());
    let consuming = channel.basic_consume(client.queue.as_str().into(), "".into(), options, none);
    let mut consumer = consuming.await.expect("a consumer");
    within("a delivery", next(&mut consumer)).await.expect("it is delivered");
    assert!(within("the broker takes it back", next(&mut consumer)).await.is_none(), "once");
}

#[tokio::test(flavor = "multi_thread")]
async fn c2_a_worker_asks_for_the_time_that_its_requests_need() {
    let (Some(client), Some(other)) = (impatient().await, impatient().await) else { return };
    let (mut gate, act) = Gate::handler();
    let second = Duration::from_secs(1);
    let settings = Queue { consumer_timeout: Some(second), max_run_time: Some(60 * second), ..queue(&client) };
    assert!(settings.management.is_none());
    let worker = Running::start(settings, 1, act);
    client.request(&["a"]).await;
    gate.enters().await;
    // Delivered after the other one, and taken back.
    other.request(&["b"]).await;
    lose_a_delivery(&other).await;
    gate.go.add_permits(1);
    assert_eq!(client.answer("a").await.body, b"a");
    let counts = worker.control.counts().sources;
    assert_eq!((counts.claims, counts.outcomes.lost), (1, 0));
    client.finish(worker).await;
    other.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn c2_deliveries_that_timed_out_count_as_attempts() {
    let Some(client) = impatient().await else { return };
    client.request(&["a"]).await;
    for _ in 0..3 {
        lose_a_delivery(&client).await;
    }
    let settings = Queue { max_attempts: NonZeroU32::new(3), ..queue(&client) };
    let worker = Running::start(settings, 1, returns_body());
    let answer = client.answer("a").await;
    assert!(answer.json()["message"].as_str().is_some_and(|why| why.contains("delivered 3 times")), "{answer:?}");
    assert_eq!(worker.control.counts().sources.claims, 0);
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_management_interface_that_denies_access_is_reported_without_the_password() {
    let Some(client) = Client::shared(Kind::Transient).await else { return };
    let stranger = broker("amqp://guest:hunter2@127.0.0.1/");
    let unauthorized = Management::new(&stranger, &management(), None).expect("the URL is valid");
    let why = unauthorized.queue_settings(&client.queue).await.expect_err("the password is wrong").to_string();
    for part in ["401", "`amqp.management_url`", "the tag `management`"] {
        assert!(why.contains(part), "{why}");
    }
    assert!(!why.contains("hunter2"), "{why}");
    client.delete_queue().await;
}
