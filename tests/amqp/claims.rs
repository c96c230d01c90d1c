//! How many requests a worker takes, holds and requeues.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use journeyman::amqp;
use journeyman::amqp::lapin::options::{BasicGetOptions, BasicRejectOptions};
use journeyman::amqp::lapin::types::AMQPValue;
use journeyman::amqp::management::Management;
use journeyman::domain::id::PriorityQueue;
use journeyman::domain::outcome::{ExceptionReason, Outcome};
use journeyman::handler::{ExecuteError, ExecuteFailure};
use journeyman::source::Source as _;
use journeyman::source::amqp::{AmqpSource, OnAttemptsExhausted};
use journeyman::task::{Reply, ReplyStatus};
use journeyman::worker::{Command, ExitReason, Note, WorkerConfig};

use crate::broker::management;

use crate::support::{
    Act, Client, Gate, Kind, Running, echo, header, intermittent, next_grant, queue, shared, wired, within,
};

pub(crate) async fn publish(client: &Client, bodies: &[&str]) {
    for body in bodies {
        assert!(client.publish(Client::properties(body, "/work"), body.as_bytes()).await);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn b15_no_more_requests_are_taken_than_there_are_slots() {
    let Some(broker) = shared() else { return };
    for kind in [Kind::Transient, Kind::Quorum] {
        let client = Client::new(&broker, kind).await;
        publish(&client, &["1", "2", "3", "4", "5"]).await;
        let (mut gate, act) = Gate::handler();
        let worker = Running::start(queue(&client), 2, act);
        for _ in 0..2 {
            gate.enters().await;
        }
        // The other requests stay available for other workers.
        client.until_depth(3, 1).await;
        gate.go.add_permits(5);
        for id in ["1", "2", "3", "4", "5"] {
            assert_eq!(client.answer(id).await.body, id.as_bytes());
        }
        client.finish(worker).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_larger_capacity_takes_more_and_a_paused_worker_nothing() {
    let Some(client) = Client::shared(Kind::Transient).await else { return };
    let (mut gate, act) = Gate::handler();
    let worker = Running::start(queue(&client), 1, act);
    publish(&client, &["1", "2", "3"]).await;
    let first = gate.enters().await;
    client.until_depth(2, 1).await;
    let settings = WorkerConfig { capacity: 2, ..WorkerConfig::default() };
    worker.control.reconfigure(settings).await;
    // In any order, since prefetched requests were requeued.
    let second = gate.enters().await;
    // Prefetched requests are requeued.
    within("the third waits in the queue", async {
        while client.depth().await.0 != 1 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    worker.control.command(Command::Pause { span: None }, Note::of("the test")).await;
    gate.go.add_permits(2);
    client.answer(&first).await;
    client.answer(&second).await;
    client.until_depth(1, 0).await;
    worker.control.command(Command::Resume, Note::of("the test")).await;
    let third = gate.enters().await;
    assert_eq!(BTreeSet::from([first.as_str(), &second, &third]), BTreeSet::from(["1", "2", "3"]));
    gate.go.add_permits(1);
    client.answer(&third).await;
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_finishes_running_requests_and_leaves_the_others_in_the_queue() {
    let Some(client) = Client::shared(Kind::Durable).await else { return };
    publish(&client, &["1", "2", "3"]).await;
    let (mut gate, act) = Gate::handler();
    let worker = Running::start(queue(&client), 1, act);
    gate.enters().await;
    worker.control.drain().await;
    client.until_depth(2, 0).await;
    gate.go.add_permits(1);
    assert_eq!(client.answer("1").await.body, b"1");
    assert_eq!(worker.ended().await, ExitReason::Drained);
    let second = Running::start(queue(&client), 4, echo());
    for id in ["2", "3"] {
        assert_eq!(client.answer(id).await.status(), "ok");
    }
    client.finish(second).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_released_request_runs_on_another_worker_at_once() {
    let Some(client) = Client::shared(Kind::Transient).await else { return };
    publish(&client, &["1", "2"]).await;
    let (mut gate, act) = Gate::handler();
    let first = Running::start(queue(&client), 2, act);
    gate.enters().await;
    gate.enters().await;
    first.control.release(None).await;
    assert_eq!(first.ended().await, ExitReason::Released);
    let second = Running::start(queue(&client), 2, echo());
    for id in ["1", "2"] {
        assert_eq!(client.answer(id).await.status(), "ok");
    }
    client.finish(second).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_waits_for_a_missing_queue() {
    let Some(broker) = shared() else { return };
    let name = format!("jm-test-{}", uuid::Uuid::new_v4().simple());
    let client = Client::without_queue(&broker, &name).await;
    let worker = Running::start(queue(&client), 1, echo());
    worker.reports_error("does not exist").await;
    client.declare(Kind::Transient, &name).await;
    assert_eq!(client.call("/echo", b"1").await.status(), "ok");
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_queue_is_deleted_finishes_and_exits() {
    let Some(client) = Client::shared(Kind::Transient).await else { return };
    publish(&client, &["1"]).await;
    let (mut gate, act) = Gate::handler();
    let worker = Running::start(queue(&client), 1, act);
    gate.enters().await;
    client.delete_queue().await;
    within("it drains", async {
        while worker
            .control
            .status()
            .await
            .is_some_and(|view| view.state != journeyman::worker::status::LifecycleState::Draining)
        {
            tokio::task::yield_now().await;
        }
    })
    .await;
    gate.go.add_permits(1);
    assert_eq!(client.answer("1").await.body, b"1");
    assert_eq!(worker.ended().await, ExitReason::Drained);
}

/// Starts workers that are aborted while they run the request, until it is given up.
async fn crashes(client: &Client, exhausted: &OnAttemptsExhausted) -> usize {
    let mut tries = 0;
    loop {
        let (mut gate, act) = Gate::handler();
        let mut settings = queue(client);
        settings.max_attempts = NonZeroU32::new(3);
        settings.on_attempts_exhausted = exhausted.clone();
        let worker = Running::start(settings, 1, act);
        tokio::select! {
            _ = gate.enters() => {
                tries += 1;
                worker.control.abort().await;
                assert_eq!(worker.ended().await, ExitReason::Aborted);
            }
            () = worker.counts("attempts_exhausted", 1) => {
                worker.drained().await;
                return tries;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_whose_workers_die_is_given_up_and_gets_an_error_reply() {
    let Some(broker) = shared() else { return };
    for kind in [Kind::Transient, Kind::Durable, Kind::Quorum] {
        let client = Client::new(&broker, kind).await;
        publish(&client, &["poison"]).await;
        assert_eq!(crashes(&client, &OnAttemptsExhausted::Reply).await, 3, "{kind:?}");
        let answer = client.answer("poison").await;
        assert_eq!((answer.status(), &answer.json()["type"]), ("core_error", &"journeyman:attempts_exhausted".into()));
        assert_eq!(answer.json()["context"]["attempts"], 3);
        client.until_depth(0, 0).await;
        client.delete_queue().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempts_header_of_the_client_does_not_defeat_max_attempts() {
    let Some(broker) = shared() else { return };
    for kind in [Kind::Durable, Kind::Quorum] {
        let client = Client::new(&broker, kind).await;
        for counted in [0, 1, i64::MAX] {
            let headers = amqp::header_table([
                ("x-delivery-count", AMQPValue::LongLongInt(counted)),
                ("x-journeyman-attempts", AMQPValue::LongInt(-1)),
            ]);
            let properties = Client::properties("poison", "/work").with_headers(headers);
            assert!(client.publish(properties, b"poison").await);
            let tries = within("it is given up", Box::pin(crashes(&client, &OnAttemptsExhausted::Reply))).await;
            assert_eq!(tries, 3, "{kind:?} {counted}");
            assert_eq!(client.answer("poison").await.json()["context"]["attempts"], 3);
        }
        let headers = amqp::header_table([("x-journeyman-attempts", AMQPValue::LongUInt(u32::MAX))]);
        assert!(client.publish(Client::properties("once", "/work").with_headers(headers), b"1").await);
        assert_eq!(crashes(&client, &OnAttemptsExhausted::Reply).await, 0);
        let reply = client.answer("once").await.json();
        assert_eq!(
            (&reply["type"], &reply["context"]["attempts"]),
            (&"journeyman:attempts_exhausted".into(), &u32::MAX.into())
        );
        assert!(reply["message"].as_str().is_some_and(|text| text.contains("x-journeyman-attempts")), "{reply}");
        client.until_depth(0, 0).await;
        client.delete_queue().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_given_up_goes_to_the_poison_queue_with_the_reason() {
    let Some(client) = Client::shared(Kind::Durable).await else { return };
    let poison_queue = format!("{}-poison", client.queue);
    client.declare(Kind::Durable, &poison_queue).await;
    let act = intermittent("the network is down");
    let mut settings = queue(&client);
    settings.max_attempts = NonZeroU32::new(2);
    settings.on_attempts_exhausted = OnAttemptsExhausted::PoisonQueue(poison_queue.clone());
    let worker = Running::start(settings, 1, act);
    publish(&client, &["again"]).await;
    let answer = client.answer("again").await;
    assert_eq!(answer.json()["context"]["attempts"], 2);
    assert!(answer.json()["message"].as_str().is_some_and(|reply| reply.contains("the network is down")));
    let copy = client.get(&poison_queue).await.expect("a copy is kept");
    assert_eq!(copy.data, b"again");
    assert!(header(&copy, "x-journeyman-reason").is_some_and(|reason| reason.contains("the network is down")));
    assert_eq!(header(&copy, "x-journeyman-queue").as_deref(), Some(client.queue.as_str()));
    assert_eq!(header(&copy, "x-rpc-path").as_deref(), Some("/work"));
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_may_ask_for_another_attempt() {
    let Some(client) = Client::shared(Kind::Quorum).await else { return };
    let act: Act = Arc::new(|_, context| {
        Box::pin(async move {
            if context.task().run.run < 2 {
                return Err(ExecuteError::new(ExecuteFailure::Intermittent, "not yet".to_owned()));
            }
            context.set_reply(Reply::ok(context.task().run.run.to_string().into_bytes())).expect("it fits");
            Ok(())
        })
    });
    let worker = Running::start(queue(&client), 1, act);
    assert_eq!(client.call("/work", b"1").await.body, b"2");
    let counts = worker.control.status().await.expect("it works").sources[0].counts;
    assert_eq!(counts.ends.intermittent_task, 2);
    assert_eq!(Outcome::Exception(ExceptionReason::IntermittentTask).to_string(), "exception (intermittent-task)");
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_given_up_is_dead_lettered() {
    let Some(client) = Client::shared(Kind::Durable).await else { return };
    let dead = format!("{}-dead", client.queue);
    client.declare(Kind::Durable, &dead).await;
    client.delete_queue().await;
    client.declare_with_dead_letters(&dead).await;
    publish(&client, &["poison"]).await;
    assert_eq!(crashes(&client, &OnAttemptsExhausted::DeadLetter).await, 3);
    let letter = client.consume(&dead).await.next().await;
    assert_eq!(letter.data, b"poison");
    assert_eq!(header(&letter, "x-first-death-reason").as_deref(), Some("rejected"));
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_dead_letter_exchange_a_request_that_is_given_up_gets_an_error_reply() {
    let Some(broker) = shared() else { return };
    let client = Client::new(&broker, Kind::Durable).await;
    let management = Management::new(&broker, &management(), None).expect("the URL is valid");
    let act = intermittent("no luck");
    let mut settings = queue(&client);
    settings.max_attempts = NonZeroU32::new(2);
    settings.on_attempts_exhausted = OnAttemptsExhausted::DeadLetter;
    settings.management = Some(management);
    let worker = Running::start(settings, 1, act);
    publish(&client, &["by its handler"]).await;
    assert_eq!(client.answer("by its handler").await.json()["context"]["attempts"], 2);
    let headers = amqp::header_table([("x-journeyman-attempts", AMQPValue::LongUInt(2))]);
    assert!(client.publish(Client::properties("by its count", "/work").with_headers(headers), b"1").await);
    assert_eq!(client.answer("by its count").await.json()["type"], "journeyman:attempts_exhausted");
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_whose_creation_is_dropped_is_closed() {
    let Some(client) = Client::shared(Kind::Transient).await else { return };
    for moment in 0..100 {
        let source = AmqpSource::new(queue(&client));
        // Dropped at different steps of connecting, opening channels, and consuming.
        drop(tokio::time::timeout(Duration::from_millis(moment), source.open()).await);
    }
    client.until_depth(0, 0).await;
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requeueing_a_request_that_did_not_start_is_not_an_attempt() {
    let Some(broker) = shared() else { return };
    for kind in [Kind::Transient, Kind::Durable, Kind::Quorum] {
        let client = Client::new(&broker, kind).await;
        let tries = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let counter = Arc::clone(&tries);
        let act: Act = Arc::new(move |_, context| {
            let before = counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            Box::pin(async move {
                if before < 5 {
                    return Err(ExecuteError::new(
                        ExecuteFailure::ServiceDown,
                        "its service is unavailable".to_owned(),
                    ));
                }
                // Still the first attempt.
                assert_eq!(context.task().run.run, 0);
                context.set_reply(Reply::ok(*b"at last")).expect("it fits");
                Ok(())
            })
        });
        let mut settings = queue(&client);
        settings.max_attempts = NonZeroU32::new(2);
        let worker = Running::start(settings, 1, act);
        assert_eq!(client.call("/work", b"1").await.body, b"at last", "{kind:?}");
        assert_eq!(tries.load(std::sync::atomic::Ordering::Relaxed), 6, "{kind:?}");
        assert_eq!(worker.counter("attempts_exhausted").await, 0, "{kind:?}");
        assert!(worker.counter("requeued").await >= 5, "{kind:?}: it is requeued again and again");
        client.finish(worker).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requeueing_a_prefetched_request_is_not_an_attempt() {
    let Some(broker) = shared() else { return };
    for (kind, tries) in [(Kind::Transient, 1), (Kind::Quorum, 1), (Kind::Durable, 0)] {
        let client = Client::new(&broker, kind).await;
        let mut settings = queue(&client);
        settings.max_attempts = NonZeroU32::new(tries);
        let source = AmqpSource::new(settings);
        source.set_capacity(3);
        for _ in 0..3 {
            publish(&client, &["1", "2", "3"]).await;
            source.open().await.expect("there is a queue");
            // Prefetched without a poll; on a slow machine they were requeued already.
            let prefetched = async { while !matches!(client.depth().await, (0, 1) | (3, 0)) {} };
            within("the requests are prefetched", prefetched).await;
            source.pause();
            client.until_depth(3, 0).await;
            source.open().await.expect("there is a queue");
            let mut grants = Vec::new();
            let polling = async {
                while grants.len() < 3 {
                    match source.poll(PriorityQueue(0), 3).await {
                        Ok(batch) => grants.extend(batch.grants),
                        // On a slow machine they were requeued once more.
                        Err(_) => drop(source.open().await.expect("there is a queue")),
                    }
                }
            };
            within("the requests are delivered again", polling).await;
            for grant in grants {
                assert!(tries == 0 || grant.run.run == 0, "{kind:?} {:?}", grant.run);
                grant.claim.report(Outcome::Completed).await.expect("it is answered");
            }
            source.pause();
            client.until_depth(0, 0).await;
        }
        assert_eq!(source.metrics()["attempts_exhausted"], 0, "{kind:?}");
        client.delete_queue().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_acknowledgements_arrive_before_the_worker_exits() {
    let Some(broker) = shared() else { return };
    for kind in [Kind::Transient, Kind::Quorum] {
        let client = Client::new(&broker, kind).await;
        for round in 0..25_u32 {
            // With and without a pending poll.
            let worker = Running::start(queue(&client), 1 + round % 2, echo());
            assert_eq!(client.call("/work", b"1").await.status(), "ok");
            worker.drained().await;
            client.until_depth(0, 0).await;
        }
        client.delete_queue().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn i06_a_request_of_a_previous_consumer_does_not_run_twice_at_once_after_a_lost_connection() {
    let Some((client, wire, settings)) = wired(Kind::Durable).await else { return };

    let source = AmqpSource::new(settings);
    publish(&client, &["1"]).await;
    source.open().await.expect("there is a queue");
    let grant = next_grant(&source).await;
    // Another consumer follows, and holds nothing.
    source.pause();
    client.until_depth(0, 0).await;
    source.open().await.expect("there is a queue");
    wire.cut();
    within("the source knows", async { while source.poll(PriorityQueue(0), 1).await.is_ok() {} }).await;
    let refused = source.open().await.expect_err("its payload may be there");
    assert!(refused.message.contains("1 requests of a lost connection are still being ended"), "{refused:?}");
    drop(grant);
    source.open().await.expect("nothing is held");
    let again = next_grant(&source).await;
    again.claim.report(Outcome::Completed).await.expect("it is answered");
    client.until_depth(0, 1).await;
    source.close().await;
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redelivered_request_of_a_full_queue_is_tried_without_recording_the_attempt() {
    let Some(client) = Client::shared(Kind::Durable).await else { return };
    client.delete_queue().await;
    client.declare_narrow(&client.queue).await;
    let request = |id: &str| Client::properties(id, "/a");
    assert!(client.publish(request("first"), b"first").await);
    let options = BasicGetOptions { no_ack: false };
    let message = client.channel.basic_get(client.queue.as_str().into(), options).await.expect("the queue is read");
    let delivery = message.expect("it is there").delivery;
    assert!(client.publish(request("second"), b"second").await);
    assert!(!client.publish(request("third"), b"third").await, "there is no more room");
    // As after the death of its worker: it is at the head of the queue again.
    delivery.acker.reject(BasicRejectOptions { requeue: true }).await.expect("the request is requeued");
    client.until_depth(2, 0).await;
    let mut settings = queue(&client);
    settings.max_attempts = NonZeroU32::new(3);
    settings.reply_retry_max = Duration::from_secs(1);
    let tries = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let counter = Arc::clone(&tries);
    // And once it asks for another attempt, which cannot be recorded either.
    let act: Act = Arc::new(move |_, context| {
        let first = counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0;
        Box::pin(async move {
            if first {
                return Err(ExecuteError::new(ExecuteFailure::Intermittent, "not yet".to_owned()));
            }
            context.set_reply(Reply::ok(*b"at last")).expect("it fits");
            Ok(())
        })
    });
    let worker = Running::start(settings, 1, act);
    for id in ["first", "second"] {
        assert_eq!(client.answer(id).await.body, b"at last");
    }
    assert_eq!(tries.load(std::sync::atomic::Ordering::Relaxed), 3);
    assert_eq!(worker.counter("attempts_exhausted").await, 0);
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_a_process_is_not_journaled() {
    let Some(client) = Client::shared(Kind::Transient).await else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let work_dir = folder.path().join("work");
    let journal = work_dir.join("journal");
    let act: Act = Arc::new(move |_, context| {
        let journal = std::fs::read_to_string(&journal).unwrap_or_default();
        Box::pin(async move {
            let is_journaled = journal.contains(context.task().run.task.as_str());
            context.set_reply(Reply::ok(is_journaled.to_string().into_bytes())).expect("it fits");
            Ok(())
        })
    });
    let worker = Running::with(queue(&client), |settings| WorkerConfig { work_dir, ..settings }, act);
    assert_eq!(client.call("/work", b"1").await.body, b"false");
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_error_reply_of_a_handler_is_that_of_a_request_that_is_given_up() {
    let Some(client) = Client::shared(Kind::Transient).await else { return };
    let act: Act = Arc::new(|_, context| {
        Box::pin(async move {
            let reply = Reply::ok(context.task().run.run.to_string().into_bytes());
            context.set_reply(reply.with_status(ReplyStatus::CORE_ERROR)).expect("it fits");
            Err(ExecuteError::new(ExecuteFailure::Intermittent, "busy".to_owned()))
        })
    });
    let mut settings = queue(&client);
    settings.max_attempts = NonZeroU32::new(2);
    let worker = Running::start(settings, 1, act);
    let answer = client.call("/work", b"1").await;
    assert_eq!((answer.status(), answer.body.as_slice()), ("core_error", &b"1"[..]));
    client.finish(worker).await;
}
