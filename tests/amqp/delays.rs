//! Messages that arrive later, through the queues of a real broker.

use std::time::Duration;

use futures_util::StreamExt as _;
use jiff::Timestamp;
use journeyman_platform::amqp::delay::{DelayGuarantee, DelayQueues, early_by};
use journeyman_platform::amqp::lapin::options::{BasicAckOptions, BasicConsumeOptions, QueueDeclareOptions};
use journeyman_platform::amqp::lapin::types::FieldTable;
use journeyman_platform::amqp::lapin::{BasicProperties, Connection, Consumer};

use crate::amqp::controller::fresh;
use crate::amqp::support::{broker, shared_uri, within};

struct Bench {
    connection: Connection,
    delays: DelayQueues,
    queue: String,
    arriving: Consumer,
}

impl Bench {
    async fn new(fixed: &[Duration]) -> Option<Self> {
        let connection = broker(&shared_uri()?).connect("delays").await.expect("the broker lets us in");
        let prefix = fresh();
        // A dot in the name, and another queue whose name is the end of it.
        let queue = format!("{prefix}.work");
        let channel = connection.create_channel().await.expect("a channel");
        for name in [&queue, "work"] {
            let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
            channel.queue_declare(name.into(), options, FieldTable::default()).await.expect("it is declared");
        }
        let delays = DelayQueues::new(&prefix, fixed);
        // Twice, as two workers do.
        for _ in 0..2 {
            assert_eq!(delays.declare(&connection).await.expect("declared"), DelayGuarantee::AtLeastOnce);
            delays.lead_to(&connection, &queue).await.expect("it is bound");
            delays.lead_to(&connection, "work").await.expect("it is bound");
        }
        let options = BasicConsumeOptions::default();
        let consuming = channel.basic_consume(queue.as_str().into(), "test".into(), options, FieldTable::default());
        let arriving = consuming.await.expect("it is consumed");
        Some(Self { connection, delays, queue, arriving })
    }

    async fn publish(&self, delay: Duration, properties: &BasicProperties, body: &str) {
        let published = self.delays.publish(&self.connection, &self.queue, delay, properties, body.as_bytes()).await;
        published.expect("it is confirmed");
    }

    /// Body and properties of the next message.
    async fn next(&mut self) -> (String, BasicProperties) {
        let delivery = within("a message", self.arriving.next()).await.expect("the channel stays").expect("a delivery");
        delivery.ack(BasicAckOptions::default()).await.expect("it is acknowledged");
        let headers = delivery.properties.headers().clone().expect("headers");
        let early = early_by(&headers, Timestamp::now());
        assert!(early <= Duration::from_millis(10), "{early:?} early");
        (String::from_utf8(delivery.data).expect("text"), delivery.properties)
    }
}

#[tokio::test]
async fn s3_a_short_delay_does_not_wait_for_a_longer_one_before_it() {
    let Some(mut bench) = Bench::new(&[]).await else { return };
    let none = BasicProperties::default();
    for (body, seconds) in [("seven", 7), ("one", 1), ("three", 3), ("now", 0)] {
        bench.publish(Duration::from_secs(seconds), &none, body).await;
    }
    for body in ["now", "one", "three", "seven"] {
        assert_eq!(bench.next().await.0, body);
    }
}

#[tokio::test]
async fn s4_a_message_that_is_delayed_again_and_again_arrives_each_time() {
    let delay = Duration::from_millis(100);
    let Some(mut bench) = Bench::new(&[delay]).await else { return };
    let mut properties = BasicProperties::default().with_content_type("application/json".into());
    for _ in 0..10 {
        bench.publish(delay, &properties, "again").await;
        let (body, arrived) = bench.next().await;
        assert_eq!(body, "again");
        assert_eq!(arrived.content_type().as_ref().map(|kind| kind.as_str()), Some("application/json"));
        properties = arrived;
    }
}
