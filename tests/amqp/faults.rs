//! Faults of the broker and of the network.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use journeyman::source::amqp::AmqpSourceConfig as Queue;
use journeyman::worker::WorkerConfig;
use journeyman_platform::amqp::lapin::BasicProperties;

use crate::amqp::support::{Client, Gate, Kind, Running, broker, echo, handler, queue, until, wired, within};
use crate::support::broker::Broker;

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_connection_stops_the_payload_and_the_redelivery_is_answered_once() {
    for kind in [Kind::Transient, Kind::Quorum] {
        let Some((client, wire, settings)) = wired(kind).await else { return };
        let (mut gate, act) = Gate::handler();
        let worker = Running::start(settings, 1, act);
        assert!(client.publish(Client::properties("a", "/a"), b"a").await);
        assert_eq!(gate.enters().await, "a");
        wire.cut();
        // The payload was canceled, and the broker redelivered the request on the worker's next connection.
        assert_eq!(gate.enters().await, "a");
        gate.go.add_permits(1);
        assert_eq!(client.answer("a").await.body, b"a");
        worker.completed(1).await;
        client.until_depth(0, 1).await;
        let counts = worker.control.counts();
        assert_eq!((counts.sources.outcomes.lost, counts.sources.outcomes.completed), (1, 1), "{kind:?}");
        assert_eq!(worker.counter("replies").await, 1);
        client.finish(worker).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_waits_for_a_killed_broker_and_no_durable_request_is_lost() {
    let Some(mut own) = Broker::own() else { return };
    let at = broker(&own.uri());
    let client = Client::new(&at, Kind::Durable).await;
    let reply_to = format!("{}-answers", client.queue);
    client.declare(Kind::Durable, &reply_to).await;
    let worker = Running::start(queue(&client), 4, echo());
    let mut published = 0;
    for _ in 0..200 {
        published += u64::from(client.publish(persistent(&published.to_string(), &reply_to), b"1").await);
    }
    let name = client.queue.clone();
    tokio::task::block_in_place(|| {
        own.store_queue_list();
        own.kill();
        own.up();
    });
    drop(client);
    let client = Client::without_queue(&broker(&own.uri()), &name).await;
    for more in published..published + 100 {
        assert!(client.publish(persistent(&more.to_string(), &reply_to), b"1").await);
    }
    published += 100;
    let mut answers = client.consume(&reply_to).await;
    let mut seen = BTreeMap::new();
    while seen.len() < usize::try_from(published).expect("few") {
        let answer = answers.next().await;
        let id = answer.properties.correlation_id().as_ref().expect("an id").to_string();
        *seen.entry(id).or_insert(0) += 1;
    }
    worker.drained().await;
    own.stop();
}

pub(crate) fn persistent(id: &str, reply_to: &str) -> BasicProperties {
    Client::properties(id, "/work").with_reply_to(reply_to.into()).with_delivery_mode(2)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_blocks_publishing_delays_replies_only() {
    let Some(own) = Broker::own() else { return };
    let client = Client::new(&broker(&own.uri()), Kind::Transient).await;
    let (mut gate, act) = Gate::handler();
    let worker = Running::start(queue(&client), 1, act);
    assert!(client.publish(Client::properties("a", "/a"), b"a").await);
    assert_eq!(gate.enters().await, "a");
    tokio::task::block_in_place(|| own.ctl(&["set_vm_memory_high_watermark", "absolute", "1"]));
    gate.go.add_permits(1);
    until("the status says so", async || {
        let status = worker.control.status().await.expect("it works");
        status.sources[0].description.contains("blocks publishing") && status.claims.len() == 1
    })
    .await;
    tokio::task::block_in_place(|| own.ctl(&["set_vm_memory_high_watermark", "0.9"]));
    assert_eq!(client.answer("a").await.body, b"a");
    worker.completed(1).await;
    client.until_depth(0, 1).await;
    assert_eq!((worker.counter("replies").await, worker.control.counts().sources.outcomes.completed), (1, 1));
    worker.drained().await;
    drop(own);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_stopped_before_the_consumer_timeout_and_others_continue() {
    let Some(client) = Client::shared(Kind::Quorum).await else { return };
    let (mut gate, act) = Gate::handler();
    let consumer_timeout = Some(Duration::from_secs(12));
    let settings = Queue { consumer_timeout, max_attempts: NonZeroU32::new(2), ..queue(&client) };
    let worker = Running::start(settings, 1, act);
    assert!(client.publish(Client::properties("long", "/long"), b"long").await);
    // Stopped and tried again, then given up.
    assert_eq!(gate.enters().await, "long");
    assert_eq!(gate.enters().await, "long");
    assert_eq!(client.answer("long").await.json()["type"], "journeyman:attempts_exhausted");
    assert_eq!(worker.counter("connections").await, 1, "the channel was never closed");
    assert_eq!(worker.control.counts().sources.outcomes.lost, 2);
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn i06_c2_a_request_that_the_consumer_timeout_took_back_does_not_run_twice_at_once() {
    let Some(own) = Broker::own() else { return };
    // RabbitMQ 4.3 gives a consumer the time that it asks for.
    let variables = "[{consumer_timeout, 6000}, {channel_tick_interval, 1000}]";
    let set = format!("[application:set_env(rabbit, K, V) || {{K, V}} <- {variables}].");
    tokio::task::block_in_place(|| own.ctl(&["eval", &set]));
    // A consumer that is replaced loses its channel on each release. Another one is canceled on RabbitMQ 4.3.
    for is_replaced in [true, false] {
        let client = Client::new(&broker(&own.uri()), Kind::Quorum).await;
        let (sender, mut started) = tokio::sync::mpsc::channel(16);
        let (may_end, ends) = std::sync::mpsc::channel::<()>();
        let (running, ends) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(ends)));
        // Sends how many others run whenever an attempt starts. The first blocks its thread, so that the worker cannot stop it in time.
        let act = handler(move |_, context| {
            let (sender, running, ends) = (sender.clone(), Arc::clone(&running), Arc::clone(&ends));
            async move {
                sender.send(running.fetch_add(1, Ordering::SeqCst)).await.expect("the test listens");
                if context.task().run.run == 0 {
                    ends.lock().expect("unpoisoned").recv().expect("the test goes on");
                }
                running.fetch_sub(1, Ordering::SeqCst);
                Ok(())
            }
        });
        let settings = Queue { consumer_timeout: Some(Duration::from_secs(6)), ..queue(&client) };
        let worker = Running::start(settings, 2, act);
        client.request(&["a"]).await;
        assert_eq!(within("the request starts", started.recv()).await, Some(0));
        if is_replaced {
            // By one with more slots, on the same connection, to which the request is redelivered.
            worker.control.reconfigure(WorkerConfig { capacity: 3, ..WorkerConfig::default() }).await;
        }
        worker.reports_error("still being ended").await;
        may_end.send(()).expect("the first attempt waits");
        assert_eq!(within("the request starts again", started.recv()).await, Some(0), "alone");
        assert_eq!(client.answer("a").await.body, b"null");
        assert_eq!(worker.control.counts().sources.outcomes.lost, 1);
        worker.drained().await;
    }
}
