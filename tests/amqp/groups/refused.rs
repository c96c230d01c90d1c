//! A controller whose broker refuses a request, a queue or an exchange.

use journeyman_platform::amqp::lapin::ExchangeKind;
use journeyman_platform::amqp::lapin::options::{
    BasicPublishOptions, ExchangeDeclareOptions, ExchangeDeleteOptions, QueueDeclareOptions, QueueDeleteOptions,
    QueuePurgeOptions,
};
use journeyman_platform::amqp::lapin::types::FieldTable;
use reqwest::Method;
use serde_json::{Value, json};

use super::{Pool, assert_includes};
use crate::amqp::support::{Client, shared_uri, target, within};
use crate::support::broker::{Broker, api, in_vhost};
use crate::support::wire::Wire;

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_a_key_whose_queue_cannot_be_declared_get_an_error_and_delay_no_other_key() {
    let Some(pool) = Pool::new().await else { return };
    let queue = format!("{}-req-bad", pool.name);
    // No other connection may use it.
    let options = QueueDeclareOptions { exclusive: true, ..QueueDeclareOptions::default() };
    let declaring = pool.client.channel.queue_declare(queue.as_str().into(), options, FieldTable::default());
    declaring.await.expect("it is made");
    let _controller = pool.active("").await;
    // More than a controller has in hand at once.
    for number in 0..600 {
        pool.ask("bad", &number.to_string()).await;
    }
    pool.ask("good", "good").await;
    let good = format!("{}-req-good", pool.name);
    within("the other key has its request", async { while pool.depth(&good).await != Some((1, 0)) {} }).await;
    for number in 0..600 {
        assert_eq!(pool.rejected(&number.to_string()).await, "no-queue");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn c1_a_key_over_whose_queue_the_broker_closes_the_connection_gets_the_reason_and_costs_no_other_key() {
    const KEYS: usize = 20;
    let Some(uri) = shared_uri() else { return };
    let wire = Wire::to(&target(&uri)).await;
    let pool = Pool::at(wire.uri(&uri)).await;
    wire.refuse(&format!("{}-req-bad", pool.name));
    let _controller = pool.active("").await;
    for number in 0..KEYS {
        pool.ask("bad", &format!("bad {number}")).await;
        pool.ask(&format!("k{number}"), &number.to_string()).await;
    }
    for number in 0..KEYS {
        let answer = pool.client.answer(&format!("bad {number}")).await.json();
        assert_includes(&answer["context"], &json!({ "reason": "no-queue" }));
        assert!(answer["message"].as_str().is_some_and(|why| why.contains("541 INTERNAL_ERROR")), "{answer}");
    }
    let all = |seen: &Value| seen["counters"]["orphans_forwarded"] == KEYS;
    let seen = pool.sees("the other keys have their requests", all).await;
    assert_eq!(seen["counters"]["broker_disconnects"], 0, "{seen}");
    let connections = wire.connections();
    pool.ask("bad", "later").await;
    assert_eq!(pool.rejected("later").await, "no-queue");
    assert_eq!(wire.connections(), connections, "it is answered without another attempt");
}

#[tokio::test(flavor = "multi_thread")]
async fn c1_a_queue_beyond_the_limit_of_its_vhost_is_answered_with_that_reason() {
    let Some(shared) = shared_uri() else { return };
    let vhost = format!("limited-{}", uuid::Uuid::new_v4().simple());
    let path = format!("vhosts/{vhost}");
    api(Method::PUT, &path, Some(json!({}))).await;
    let pool = Pool::at(in_vhost(&shared, &vhost)).await;
    let controller = pool.active("").await;
    pool.ask("a", "1").await;
    pool.until(&format!("{}-req-a", pool.name), Some((1, 0))).await;
    // Those of the pool, and this one.
    api(Method::PUT, &format!("vhost-limits/{vhost}/max-queues"), Some(json!({ "value": 6 }))).await;
    pool.ask("b", "2").await;
    let answer = pool.client.answer("2").await.json();
    assert!(answer["message"].as_str().is_some_and(|why| why.contains("queue limit in vhost")), "{answer}");
    let seen = pool.sees("it is still there", |_| true).await;
    assert_includes(&seen["counters"], &json!({ "broker_disconnects": 0, "queue_operation_failures": 1 }));
    controller.drained().await;
    api(Method::DELETE, &path, None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_a_key_whose_queue_is_full_get_an_error_and_delay_no_other_key() {
    const REQUESTS: u64 = 700;
    let Some(pool) = Pool::new().await else { return };
    pool.client.declare_narrow(&format!("{}-req-hot", pool.name)).await;
    let first = pool.active("").await;
    first.drained().await;
    // All of them are orphans: no controller binds the queue meanwhile.
    for number in 0..REQUESTS {
        pool.ask("hot", &number.to_string()).await;
    }
    pool.ask("good", "good").await;
    let controller = pool.active("").await;
    // Some wait for room, for a while; and one has it.
    let waiting = 1 + journeyman_domain::limits::CONTROLLER_QUEUE_FULL_WAITING_MAX as u64;
    let answered = |seen: &Value| seen["counters"]["dead_letters"].as_u64() == Some(REQUESTS - waiting);
    pool.sees("the others are answered", answered).await;
    let good = format!("{}-req-good", pool.name);
    within("the other key has its request", async { while pool.depth(&good).await != Some((1, 0)) {} }).await;
    assert_eq!(controller.log().matches("exists with other arguments").count(), 1, "{}", controller.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_whose_queue_confirms_nothing_delays_no_other_key_and_loses_no_request() {
    const REQUESTS: u64 = 600;
    // Another test's broker would have it, too.
    let Some(own) = Broker::own() else { return };
    let pool = Pool::at(own.uri()).await;
    let _controller = pool.active("").await;
    pool.ask("hot", "first").await;
    let hot = format!("{}-req-hot", pool.name);
    pool.until(&hot, Some((1, 0))).await;
    let its_process = |what: &str| {
        let queue = format!("{{resource, <<\"/\">>, queue, <<\"{hot}\">>}}");
        own.ctl(&["eval", &format!("{{ok, Q}} = rabbit_amqqueue:lookup({queue}), sys:{what}(amqqueue:get_pid(Q)).")]);
    };
    its_process("suspend");
    // The broker does so where they have no queue.
    let orphans = format!("{}-orphan-xchg", pool.name);
    for number in 0..REQUESTS {
        let (options, properties) = (BasicPublishOptions::default(), Client::properties(&number.to_string(), "/echo"));
        let publishing =
            pool.client.channel.basic_publish(orphans.as_str().into(), "hot".into(), options, b"1", properties);
        publishing.await.expect("it is published").await.expect("it is confirmed");
    }
    pool.ask("good", "good").await;
    pool.until(&format!("{}-req-good", pool.name), Some((1, 0))).await;
    let many = |seen: &Value| seen["counters"]["dead_letters"].as_u64() > Some(400);
    pool.sees("those that it has no room for are answered", many).await;
    its_process("resume");
    let all = |seen: &Value| {
        let count = |name: &str| seen["counters"][name].as_u64().unwrap_or_default();
        // Besides those of this queue, the first one and the one of the other key.
        count("dead_letters") + count("orphans_forwarded") == REQUESTS + 2
    };
    let seen = pool.sees("each is answered, or in its queue", all).await;
    let answered = seen["counters"]["dead_letters"].as_u64().expect("a number");
    assert!((400..REQUESTS).contains(&answered), "{seen}");
    let there = u32::try_from(1 + REQUESTS - answered).expect("a number of requests");
    pool.until(&hot, Some((there, 0))).await;
    assert_eq!(seen["counters"]["broker_disconnects"], 0, "{seen}");
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_exchanges_are_declared_again_while_the_connection_lasts() {
    let Some(pool) = Pool::new().await else { return };
    let _controller = pool.active("message_ttl = \"200ms\"\n").await;
    pool.ask("a", "1").await;
    assert_eq!(pool.rejected("1").await, "expired");
    // The requests exchange is declared last.
    for name in ["orphan-xchg", "deadletter-xchg", "req-xchg"] {
        let name = format!("{}-{name}", pool.name);
        let deleting = pool.client.channel.exchange_delete(name.into(), ExchangeDeleteOptions::default());
        deleting.await.expect("it is deleted");
    }
    let exchange = format!("{}-req-xchg", pool.name);
    let there = async {
        loop {
            let connection = pool.client.broker.connect("look").await.expect("the broker lets us in");
            let channel = connection.create_channel().await.expect("a channel");
            let options = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
            let name = exchange.as_str().into();
            if channel.exchange_declare(name, ExchangeKind::Direct, options, FieldTable::default()).await.is_ok() {
                return;
            }
        }
    };
    within("the exchange", there).await;
    // One key is known, and one is not.
    for (key, id) in [("a", "2"), ("b", "3")] {
        pool.ask(key, id).await;
        assert_eq!(pool.rejected(id).await, "expired", "{key}");
    }
    let seen = pool.sees("it has them", |_| true).await;
    assert_eq!(seen["counters"]["broker_disconnects"], 0, "{seen}");
}

#[tokio::test(flavor = "multi_thread")]
async fn cold_requests_reach_their_queue_although_their_group_expires_before_it_is_declared() {
    const KEYS: usize = 200;
    let Some(pool) = Pool::new().await else { return };
    let _controller = pool.active("driver = \"noop\"\nunbind_delay = \"50ms\"\nstop_delay = \"50ms\"\n").await;
    for number in 0..KEYS {
        pool.ask(&format!("k{number}"), &number.to_string()).await;
    }
    let all = |seen: &Value| seen["counters"]["orphans_forwarded"].as_u64() >= Some(KEYS as u64);
    let seen = pool.sees("all have reached their queues", all).await;
    assert_eq!(seen["counters"]["dead_letters"], 0, "{seen}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_reply_that_its_queue_refuses_is_given_up_and_delays_no_other() {
    let Some(pool) = Pool::new().await else { return };
    let mut controller = pool.active("message_ttl = \"200ms\"\n").await;
    let full = format!("{}-full", pool.name);
    pool.client.declare_narrow(&full).await;
    assert!(pool.client.publish_to(&full, Client::properties("1", "/echo"), b"1").await);
    // One after the other they would take as long as no test waits.
    for _ in 0..100 {
        let properties = Client::properties("1", "/echo").with_reply_to(full.as_str().into());
        assert!(pool.publish("idle", properties).await);
    }
    pool.ask("idle", "2").await;
    controller.says("gave up an error reply: its queue rejects it").await;
    assert_eq!(pool.rejected("2").await, "expired");
    pool.until(&format!("{}-deadletter", pool.name), Some((0, 1))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poison_request_is_moved_although_the_poison_queue_was_deleted() {
    let Some(pool) = Pool::new().await else { return };
    let mut controller = pool.active(&pool.killed_workers()).await;
    let poison = format!("{}-poison", pool.name);
    let connection = pool.client.broker.connect("delete").await.expect("the broker lets us in");
    // The controller declares the queue again every few seconds, and may do so just before it moves the request there.
    let mut request = 1;
    loop {
        pool.ask("a", &request.to_string()).await;
        let channel = connection.create_channel().await.expect("a channel");
        let empty = QueueDeleteOptions { if_empty: true, ..QueueDeleteOptions::default() };
        tokio::select! {
            () = controller.says(" was deleted") => break,
            () = async { while channel.queue_delete(poison.as_str().into(), empty).await.is_ok() {} } => {}
        }
        if pool.sees("it answers", |_| true).await["counters"]["broker_disconnects"] != 0 {
            break;
        }
        let channel = connection.create_channel().await.expect("a channel");
        channel.queue_purge(poison.as_str().into(), QueuePurgeOptions::default()).await.expect("it is emptied");
        request += 1;
    }
    pool.until(&poison, Some((1, 0))).await;
    assert_eq!(pool.rejected(&request.to_string()).await, "delivery_limit");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_poison_request_that_the_poison_queue_refuses_is_retried_and_answered_once() {
    let Some(pool) = Pool::new().await else { return };
    let poison = format!("{}-poison", pool.name);
    let full = format!("policies/%2F/{poison}");
    let policy = json!({
        "pattern": format!("^{poison}$"), "apply-to": "queues", "priority": 99,
        "definition": { "max-length": 0, "overflow": "reject-publish" },
    });
    api(Method::PUT, &full, Some(policy)).await;
    let mut controller = pool.active(&pool.killed_workers()).await;
    pool.ask("a", "1").await;
    controller.says("rejects a poison request").await;
    api(Method::DELETE, &full, None).await;
    pool.until(&poison, Some((1, 0))).await;
    assert_eq!(pool.rejected("1").await, "delivery_limit");
    let seen = pool.sees("it is done", |seen| seen["counters"]["dead_letters"] == 1).await;
    assert_includes(&seen["counters"], &json!({ "broker_disconnects": 0, "poison_requests": 1 }));
    pool.until(&format!("{}-deadletter", pool.name), Some((0, 1))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn c3_a_request_that_expires_because_workers_do_not_last_is_answered_with_why() {
    let Some(pool) = Pool::new().await else { return };
    let mut controller = pool.active("command = [\"/bin/sh\", \"-c\", \"exit 7\"]\n").await;
    pool.ask("a", "first").await;
    controller.says("worker exited").await;
    assert!(pool.publish("a", Client::properties("1", "/echo").with_expiration("500".into())).await);
    // A message behind another one does not expire.
    let first = pool.client.get(&format!("{}-req-a", pool.name)).await;
    assert!(first.is_some_and(|first| first.properties.expiration().is_none()));
    let body = pool.client.answer("1").await.json();
    let message = body["message"].as_str().unwrap_or_default();
    assert!(
        message.starts_with("the request expired before a worker took it; the last worker of this key failed "),
        "{body}"
    );
    assert!(message.contains(" s ago: exit status: 7; log: "), "{body}");
    assert_eq!(body["context"]["reason"], "expired");
}

#[tokio::test(flavor = "multi_thread")]
async fn b13_a_missing_vhost_is_named_with_what_to_do() {
    let Some(mut pool) = Pool::new().await else { return };
    pool.uri = in_vhost(&pool.uri, "nowhere");
    let mut controller = pool.controller("");
    let line = controller.line("no connection to the broker", 1).await;
    for words in ["vhost nowhere not found", "does the virtual host at the end of the broker's URI exist"] {
        assert!(line.contains(words), "{line}");
    }
    controller.drained().await;
}
