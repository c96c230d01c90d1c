//! The consumer_timeout of a queue: what the management interface reports of it, and how it bounds a lease.

use std::time::Duration;

use crate::amqp::support::{Client, Kind, broker, next_grant, queue, shared};
use crate::support::broker::management;
use journeyman::source::Source as _;
use journeyman::source::amqp::{AmqpSource, AmqpSourceConfig as Queue};
use journeyman_platform::amqp::lapin::types::AMQPValue;
use journeyman_platform::amqp::management::{Management, ManagementError};

#[tokio::test(flavor = "multi_thread")]
async fn the_timeout_argument_of_a_queue_overrides_the_configured_timeout() {
    let Some(at) = shared() else { return };
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
