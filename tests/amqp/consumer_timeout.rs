//! The consumer_timeout of a queue: what the broker reports of it, and how it bounds a lease.

use std::time::Duration;

use journeyman::amqp;
use journeyman::amqp::lapin::options::QueueDeclareOptions;
use journeyman::amqp::lapin::types::AMQPValue;
use journeyman::amqp::management::{Management, ManagementError};
use journeyman::domain::consumer_timeout::QueueTimeout;

use crate::broker::management;
use crate::gremlin::{self, Gremlin};
use crate::support::{Client, Gate, Kind, Running, broker, queue, shared};

#[tokio::test(flavor = "multi_thread")]
async fn a_timeout_argument_counts_only_with_brokers_that_enforce_it() {
    let Some(at) = shared() else { return };
    let base = management();
    let client = Client::new(&at, Kind::Transient).await;
    let named = format!("{}-named", client.queue);
    let arguments = amqp::header_table([("x-consumer-timeout", AMQPValue::LongInt(1000))]);
    let options = QueueDeclareOptions::default();
    client.channel.queue_declare(named.as_str().into(), options, arguments).await.expect("the queue is declared");
    let management = Management::new(&at, &base, None).expect("the URL is valid");
    let facts = management.describe_queue(&named).await.expect("the queue is described");
    println!("{facts:?}: {:?}", facts.timeout());
    assert_eq!(facts.argument, Some(Duration::from_secs(1)));
    // RabbitMQ 3.10 accepts the argument and ignores it; the management interface does not report the setting that counts.
    let enforces = facts.version >= journeyman::domain::consumer_timeout::BrokerVersion { major: 3, minor: 12 };
    assert_eq!(
        facts.timeout(),
        if enforces { QueueTimeout::Limited(Duration::from_secs(1)) } else { QueueTimeout::BrokerDefault }
    );
    assert!(matches!(management.describe_queue("nowhere").await, Err(ManagementError::NotFound)));
    let stranger = broker("amqp://guest:hunter2@127.0.0.1/");
    let unauthorized = Management::new(&stranger, &base, None).expect("the URL is valid").describe_queue(&named).await;
    let why = unauthorized.expect_err("the password is wrong").to_string();
    for part in ["401", "`amqp.management_url`", "the tag `management`"] {
        assert!(why.contains(part), "{why}");
    }
    assert!(!why.contains("hunter2"), "{why}");
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_timeout_that_the_broker_reports_overrides_the_configured_one() {
    let Some(at) = shared() else { return };
    let client = Client::new(&at, Kind::Durable).await;
    // The replies of a later RabbitMQ.
    let later = Gremlin::start(|_| {
        vec![
            gremlin::json(200, &serde_json::json!({ "rabbitmq_version": "3.13.7" })),
            gremlin::json(
                200,
                &serde_json::json!({
                    "type": "classic", "arguments": {}, "effective_policy_definition": { "consumer-timeout": 16000 },
                }),
            ),
        ]
    })
    .await;
    let (mut gate, act) = Gate::handler();
    let mut settings = queue(&client);
    settings.management = Some(Management::new(&at, &later.url(), None).expect("the URL is valid"));
    settings.max_attempts = std::num::NonZeroU32::new(1);
    let worker = Running::start(settings, 1, act);
    assert!(client.publish(Client::properties("long", "/long"), b"long").await);
    assert_eq!(gate.enters().await, "long");
    // The lease ends after seconds instead of the configured half hour.
    assert_eq!(client.answer("long").await.json()["type"], "journeyman:attempts_exhausted");
    let asked = later.asked();
    assert!(asked[1].line.contains(&format!("/api/queues/%2F/{}", client.queue)), "{}", asked[1].line);
    client.finish(worker).await;
}
