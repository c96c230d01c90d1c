//! Replies to requests.

use std::time::Duration;

use journeyman::client::{RpcError, RpcRequest};
use journeyman::handler::{ExecuteError, ExecuteFailure};
use journeyman::source::amqp::AmqpSourceConfig as Queue;
use journeyman::task::{Reply, ReplyStatus};
use journeyman::worker::ExitReason;
use journeyman_platform::amqp;
use journeyman_platform::amqp::lapin::BasicProperties;
use journeyman_platform::amqp::lapin::types::AMQPValue;

use crate::amqp::support::{Client, Gate, Kind, Running, TEST_TIMEOUT, echo, handler, queue, replies, shared};
use crate::support::broker::is_newer;

#[tokio::test(flavor = "multi_thread")]
async fn every_outcome_becomes_a_reply() {
    let Some(client) = Client::shared(Kind::Durable).await else { return };
    let act = handler(|request, context| async move {
        match request.path.as_deref() {
            Some("/silent") => Ok(()),
            Some("/failed") => {
                context.set_reply(Reply::ok(*b"all is well")).expect("it fits");
                Err(ExecuteError::failed("the train is late".to_owned()))
            }
            Some("/own") => {
                let status = ReplyStatus::parse("not_found").expect("a word");
                context.set_reply(Reply::ok(*b"no such train").with_status(status)).expect("it fits");
                Err(ExecuteError::failed("whatever".to_owned()))
            }
            Some("/unavailable") => Err(ExecuteError::new(ExecuteFailure::Unavailable, "no map".to_owned())),
            _ => panic!("a handler that panics"),
        }
    });
    let worker = Running::start(queue(&client), 2, act);
    assert_eq!(client.call("/silent", b"null").await.body, b"null");
    let own = client.call("/own", b"1").await;
    assert_eq!((own.status(), own.body.as_slice()), ("not_found", &b"no such train"[..]));
    for (path, kind, words) in [
        ("/failed", "journeyman:failed", "the train is late"),
        ("/unavailable", "journeyman:resource_unavailable", "no map"),
        ("/malformed", "journeyman:malformed_request", "not what it should be"),
        ("/panics", "journeyman:internal_error", "panicked"),
    ] {
        let answer = client.call(path, b"{}").await;
        assert_eq!(answer.status(), "core_error", "{path}");
        let reply = answer.json();
        assert_eq!(reply["type"], kind);
        assert!(reply["message"].as_str().is_some_and(|message| message.contains(words)), "{reply}");
        assert!(reply["context"].is_object() && reply["cause"].is_null());
    }
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_of_every_type_and_missing_ones_are_accepted() {
    let Some(client) = Client::shared(Kind::Transient).await else { return };
    let act = replies(|request, _| format!("{:?} {:?}", request.path, request.headers.get("traceparent")).into_bytes());
    let worker = Running::start(queue(&client), 1, act);
    let long = |text: &str| AMQPValue::LongString(text.into());
    let odd = amqp::header_table([
        ("x-rpc-path", AMQPValue::Double(1.5)),
        ("array", AMQPValue::FieldArray(vec![AMQPValue::Boolean(true)].into())),
        ("void", AMQPValue::Void),
        ("traceparent", long("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")),
    ]);
    let base = || BasicProperties::default().with_reply_to("amq.rabbitmq.reply-to".into());
    for (id, properties, seen) in [
        ("string", base().with_headers(amqp::header_table([("x-rpc-path", long("/long"))])), "Some(\"/long\") None"),
        ("none", base(), "None None"),
        ("large", base().with_headers(amqp::header_table([("x-large", long(&"x".repeat(100_000)))])), "None None"),
        ("odd", base().with_headers(odd), "None Some(\"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\")"),
    ] {
        assert!(client.publish(properties.with_correlation_id(id.into()), b"\xff").await);
        assert_eq!(String::from_utf8(client.answer(id).await.body).expect("text"), seen);
    }
    // Requests without reply_to run and are acknowledged.
    assert!(client.publish(BasicProperties::default(), b"1").await);
    assert!(client.publish(base(), b"1").await);
    assert_eq!(client.answer("").await.correlation_id, None);
    client.until_depth(0, 1).await;
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_without_a_client_costs_nothing_and_a_missing_reply_queue_is_counted() {
    let Some(broker) = shared() else { return };
    let client = Client::new(&broker, Kind::Transient).await;
    let (mut gate, act) = Gate::handler();
    let worker = Running::start(queue(&client), 1, act);
    let absent = Client::without_queue(&client.broker, &client.queue).await;
    assert!(absent.publish(Client::properties("a", "/a"), b"a").await);
    assert_eq!(gate.enters().await, "a");
    absent.close().await;
    gate.go.add_permits(1);
    worker.completed(1).await;
    for (count, reply_to) in [(0, "amq.rabbitmq.reply-to.invalid"), (1, "jm-test-missing-queue")] {
        gate.go.add_permits(1);
        assert!(client.publish(Client::properties("b", "/b").with_reply_to(reply_to.into()), b"b").await);
        assert_eq!(gate.enters().await, "b");
        worker.completed(count + 2).await;
        assert_eq!(worker.counter("clients_absent").await, count);
    }
    gate.go.add_permits(1);
    assert_eq!(client.call("/d", b"d").await.body, b"d");
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_too_large_or_expired_gets_a_reply_and_does_not_run() {
    let Some(client) = Client::shared(Kind::Transient).await else { return };
    let (mut gate, act) = Gate::handler();
    // One more slot than requests: the broker drops expired messages that it cannot deliver at once.
    let worker = Running::start(Queue { message_bytes_max: 1000, ..queue(&client) }, 2, act);
    let too_large = client.call("/large", &[b'x'; 1001]).await;
    assert_eq!((too_large.status(), &too_large.json()["type"]), ("core_error", &"journeyman:too_large".into()));
    let late = Client::properties("late", "/late").with_expiration("0".into());
    assert!(client.publish(late, b"late").await);
    assert_eq!(client.answer("late").await.json()["type"], "journeyman:expired");
    gate.go.add_permits(1);
    assert_eq!(client.call("/fits", &[b'x'; 1000]).await.body.len(), 1000);
    assert_eq!(gate.enters().await.len(), 1000);
    worker.counts("too_large", 1).await;
    worker.counts("expired", 1).await;
    assert_eq!(worker.control.counts().sources.claims, 1);
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_above_the_brokers_limit_is_refused_and_the_largest_one_is_answered() {
    const MOST: usize = 128 << 20;
    let Some(broker) = shared() else { return };
    // The limit of RabbitMQ itself.
    let largest = if is_newer() { 16 << 20 } else { MOST };
    let client = Client::new(&broker, Kind::Transient).await;
    let act = replies(|request, _| request.body.len().to_string().into_bytes());
    let worker = Running::start(queue(&client), 1, act);
    let body = vec![b' '; MOST + 1];
    // Our own client refuses to send it.
    let asking = journeyman::client::RpcClient::new(broker.clone(), "a caller");
    let call = RpcRequest {
        routing_key: client.queue.clone(),
        body: body.clone(),
        timeout: TEST_TIMEOUT,
        ..RpcRequest::default()
    };
    assert_eq!(asking.call(&call).await, Err(RpcError::TooLarge { bytes: MOST + 1 }));
    assert_eq!(client.call("/largest", &body[..largest]).await.body, largest.to_string().as_bytes());
    assert_eq!((worker.control.counts().sources.claims, worker.counter("too_large").await), (1, 0));
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_the_broker_refuses_is_replaced_by_an_error() {
    let Some(client) = Client::shared(Kind::Transient).await else { return };
    // One byte more than RabbitMQ takes.
    let act = replies(|_, _| vec![0_u8; (128 << 20) + 1]);
    let worker = Running::start(Queue { message_bytes_max: 256 << 20, ..queue(&client) }, 1, act);
    let answer = client.call("/huge", b"null").await;
    assert_eq!((answer.status(), &answer.json()["type"]), ("core_error", &"journeyman:reply_refused".into()));
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn i18_a_reply_that_its_queue_refuses_is_retried_and_its_request_is_held_until_it_is_accepted() {
    let Some(client) = Client::shared(Kind::Durable).await else { return };
    let full = format!("{}-full", client.queue);
    client.declare_narrow(&full).await;
    assert!(client.publish_to(&full, BasicProperties::default(), b"in the way").await);
    assert!(!client.publish_to(&full, BasicProperties::default(), b"one too many").await, "it is refused");
    let request = || Client::properties("a", "/a").with_reply_to(full.as_str().into()).with_delivery_mode(2);
    let settings = Queue { reply_retry_max: Duration::MAX, ..queue(&client) };
    let first = Running::start(settings.clone(), 1, echo());
    assert!(client.publish(request(), b"a").await);
    first.counts("replies_nacked", 2).await;
    // Without a reply the request was not acknowledged: the next worker gets it.
    first.control.abort().await;
    assert_eq!(first.ended().await, ExitReason::Aborted);
    client.until_depth(1, 0).await;
    let second = Running::start(settings, 1, echo());
    second.counts("replies_nacked", 2).await;
    // It was redelivered, so nothing is consumed beside it.
    client.until_depth(0, 0).await;
    assert_eq!(second.control.status().await.expect("it works").claims.len(), 1, "it is held");
    assert_eq!(client.get(&full).await.expect("it is there").data, b"in the way");
    let answer = client.consume(&full).await.next().await;
    assert_eq!(answer.properties.correlation_id().as_ref().map(ToString::to_string).as_deref(), Some("a"));
    client.finish(second).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_whose_reply_is_refused_for_too_long_is_acknowledged_without_one_and_counted() {
    let Some(client) = Client::shared(Kind::Durable).await else { return };
    let full = format!("{}-full", client.queue);
    client.declare_narrow(&full).await;
    assert!(client.publish_to(&full, BasicProperties::default(), b"in the way").await);
    let settings = Queue { reply_retry_max: Duration::from_secs(1), message_bytes_max: 10, ..queue(&client) };
    let worker = Running::start(settings, 1, echo());
    // One that a handler has seen, and one that no handler sees.
    for (body, count) in [("short", 1), ("longer than ten bytes", 2)] {
        let refused = worker.counter("replies_nacked").await;
        let to_the_full = Client::properties("a", "/a").with_reply_to(full.as_str().into());
        assert!(client.publish(to_the_full, body.as_bytes()).await);
        worker.counts("replies_given_up", count).await;
        assert!(worker.counter("replies_nacked").await >= refused + 2, "it was sent again before");
    }
    // Its slot is free.
    assert_eq!(client.call("/a", b"b").await.body, b"b");
    worker.counts("too_large", 1).await;
    assert_eq!(client.get(&full).await.expect("it is there").data, b"in the way");
    client.finish(worker).await;
}
