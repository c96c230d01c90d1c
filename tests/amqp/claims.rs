//! How many requests a worker takes, holds and requeues.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::sync::atomic::Ordering;
use std::time::Duration;

use journeyman::handler::{ExecuteError, ExecuteFailure};
use journeyman::source::Source as _;
use journeyman::source::amqp::{AmqpSource, AmqpSourceConfig as Queue, OnAttemptsExhausted};
use journeyman::task::{Reply, ReplyStatus};
use journeyman::worker::status::LifecycleState;
use journeyman::worker::{Command, ExitReason, Note, WorkerConfig};
use journeyman_domain::id::PriorityQueue;
use journeyman_domain::outcome::Outcome;
use journeyman_platform::amqp;
use journeyman_platform::amqp::lapin::options::{BasicGetOptions, BasicRejectOptions};
use journeyman_platform::amqp::lapin::types::AMQPValue;
use journeyman_platform::amqp::management::Management;

use crate::support::Repeats;
use crate::support::broker::management;

use crate::amqp::support::{
    Client, Gate, Kind, Running, echo, failing, handler, header, next_grant, queue, replies, shared, until, wired,
    within,
};

#[tokio::test(flavor = "multi_thread")]
async fn b15_no_more_requests_are_taken_than_there_are_slots() {
    let Some(broker) = shared() else { return };
    for kind in [Kind::Transient, Kind::Quorum] {
        let client = Client::new(&broker, kind).await;
        client.request(&["1", "2", "3", "4", "5"]).await;
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
    client.request(&["1", "2", "3"]).await;
    let first = gate.enters().await;
    client.until_depth(2, 1).await;
    let settings = WorkerConfig { capacity: 2, ..WorkerConfig::default() };
    worker.control.reconfigure(settings).await;
    // They come in any order, since prefetched requests were requeued.
    let second = gate.enters().await;
    // Prefetched requests are requeued.
    until("the third waits in the queue", async || client.depth().await.0 == 1).await;
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
    client.request(&["1", "2", "3"]).await;
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
    client.request(&["1", "2"]).await;
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
async fn a_worker_whose_queue_is_deleted_finishes_and_exits() {
    let Some(client) = Client::shared(Kind::Transient).await else { return };
    client.request(&["1"]).await;
    let (mut gate, act) = Gate::handler();
    let worker = Running::start(queue(&client), 1, act);
    gate.enters().await;
    client.delete_queue().await;
    until("the worker drains", async || {
        worker.control.status().await.is_none_or(|status| status.state == LifecycleState::Draining)
    })
    .await;
    gate.go.add_permits(1);
    assert_eq!(client.answer("1").await.body, b"1");
    assert_eq!(worker.ended().await, ExitReason::Drained);
}

/// Starts workers that are aborted while they run the request, until it is given up.
async fn crashes(client: &Client, on_attempts_exhausted: OnAttemptsExhausted) -> usize {
    let mut tries = 0;
    loop {
        let (mut gate, act) = Gate::handler();
        let settings = Queue { max_attempts: NonZeroU32::new(3), on_attempts_exhausted, ..queue(client) };
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
async fn a_request_whose_workers_die_is_given_up_whatever_its_headers_say() {
    let Some(broker) = shared() else { return };
    let forged = |count| vec![("x-delivery-count", count), ("x-journeyman-attempts", AMQPValue::LongInt(-1))];
    for kind in [Kind::Transient, Kind::Durable, Kind::Quorum] {
        let client = Client::new(&broker, kind).await;
        for headers in [vec![], forged(AMQPValue::LongLongInt(0)), forged(AMQPValue::LongLongInt(i64::MAX))] {
            let properties = Client::properties("poison", "/work").with_headers(amqp::header_table(headers.clone()));
            assert!(client.publish(properties, b"poison").await);
            let tries = within("the request is given up", Box::pin(crashes(&client, OnAttemptsExhausted::Reply))).await;
            assert_eq!(tries, 3, "{kind:?} {headers:?}");
            let answer = client.answer("poison").await;
            let reply = answer.json();
            assert_eq!((answer.status(), &reply["type"]), ("core_error", &"journeyman:attempts_exhausted".into()));
            assert_eq!(reply["context"]["attempts"], 3);
        }
        assert!(client.publish(Client::tried("once", AMQPValue::LongUInt(u32::MAX)), b"1").await);
        assert_eq!(crashes(&client, OnAttemptsExhausted::Reply).await, 0);
        let reply = client.answer("once").await.json();
        assert_eq!(reply["context"]["attempts"], u32::MAX);
        assert!(reply["message"].as_str().is_some_and(|text| text.contains("x-journeyman-attempts")), "{reply}");
        client.delete_empty_queue().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_given_up_goes_to_the_poison_queue_with_the_reason() {
    let Some(client) = Client::shared(Kind::Durable).await else { return };
    let poison_queue = format!("{}-poison", client.queue);
    client.declare(Kind::Durable, &poison_queue).await;
    let (act, _) = failing(u32::MAX, ExecuteFailure::Intermittent, "the network is down");
    let to = Some(poison_queue.as_str().into());
    let settings = Queue { max_attempts: NonZeroU32::new(2), poison_queue: to, ..queue(&client) };
    let worker = Running::start(settings, 1, act);
    client.request(&["again"]).await;
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
    let (act, _) = failing(2, ExecuteFailure::Intermittent, "not yet");
    let worker = Running::start(queue(&client), 1, act);
    assert_eq!(client.call("/work", b"1").await.body, b"2");
    let counts = worker.control.status().await.expect("it works").sources[0].counts;
    assert_eq!(counts.outcomes.intermittent_task, 2);
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_given_up_is_dead_lettered() {
    let Some(client) = Client::shared(Kind::Durable).await else { return };
    let dead = format!("{}-dead", client.queue);
    client.declare(Kind::Durable, &dead).await;
    client.delete_queue().await;
    let arguments = [("x-dead-letter-exchange", ""), ("x-dead-letter-routing-key", dead.as_str())];
    let arguments = arguments.map(|(name, value)| (name, AMQPValue::LongString(value.into())));
    client.declare_with(Kind::Durable, &client.queue, arguments).await;
    client.request(&["poison"]).await;
    assert_eq!(crashes(&client, OnAttemptsExhausted::DeadLetter).await, 3);
    let letter = client.consume(&dead).await.next().await;
    assert_eq!(letter.data, b"poison");
    assert_eq!(header(&letter, "x-first-death-reason").as_deref(), Some("rejected"));
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_dead_letter_exchange_a_request_that_is_given_up_gets_an_error_reply() {
    let Some(broker) = shared() else { return };
    let client = Client::new(&broker, Kind::Durable).await;
    let (act, _) = failing(u32::MAX, ExecuteFailure::Intermittent, "no luck");
    let settings = Queue {
        max_attempts: NonZeroU32::new(2),
        on_attempts_exhausted: OnAttemptsExhausted::DeadLetter,
        management: Some(Management::new(&broker, &management(), None).expect("the URL is valid")),
        ..queue(&client)
    };
    let worker = Running::start(settings, 1, act);
    client.request(&["by its handler"]).await;
    assert_eq!(client.answer("by its handler").await.json()["context"]["attempts"], 2);
    assert!(client.publish(Client::tried("by its count", AMQPValue::LongUInt(2)), b"1").await);
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
    client.delete_empty_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requeueing_a_request_that_did_not_start_is_not_an_attempt() {
    let Some(broker) = shared() else { return };
    for kind in [Kind::Transient, Kind::Durable, Kind::Quorum] {
        let client = Client::new(&broker, kind).await;
        let (act, runs) = failing(5, ExecuteFailure::ServiceDown, "its service is unavailable");
        let worker = Running::start(Queue { max_attempts: NonZeroU32::new(2), ..queue(&client) }, 1, act);
        assert_eq!(client.call("/work", b"1").await.body, b"0", "{kind:?}: still the first attempt");
        assert_eq!(runs.load(Ordering::Relaxed), 6, "{kind:?}");
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
        let source = AmqpSource::new(Queue { max_attempts: NonZeroU32::new(tries), ..queue(&client) });
        source.set_capacity(3);
        for _ in 0..3 {
            client.request(&["1", "2", "3"]).await;
            source.open().await.expect("there is a queue");
            // Prefetched without a poll; on a slow machine they were requeued already.
            until("the requests are prefetched", async || matches!(client.depth().await, (0, 1) | (3, 0))).await;
            source.pause();
            client.until_depth(3, 0).await;
            source.resume();
            for _ in 0..3 {
                let grant = next_grant(&source).await;
                assert!(tries == 0 || grant.run.run == 0, "{kind:?} {:?}", grant.run);
                grant.claim.report(Outcome::Completed).await.expect("it is answered");
            }
            source.pause();
            client.until_depth(0, 0).await;
            source.resume();
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
        let (repeats, mut round) = (Repeats::new("JOURNEYMAN_CRASH_RUNS", Duration::from_secs(5)), 0);
        while repeats.again(round) {
            round += 1;
            // A poll is pending, or none is.
            let worker = Running::start(queue(&client), 1 + u32::from(round.is_multiple_of(2)), echo());
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
    client.request(&["1"]).await;
    source.open().await.expect("there is a queue");
    let grant = next_grant(&source).await;
    // Another consumer follows, and holds nothing.
    source.pause();
    client.until_depth(0, 0).await;
    source.resume();
    source.open().await.expect("there is a queue");
    wire.cut();
    within("the source knows", async { while source.poll(PriorityQueue(0), 1).await.is_ok() {} }).await;
    let refused = source.open().await.expect_err("its payload may be there");
    assert!(refused.message.contains("1 requests of a lost connection are still being ended"), "{refused:?}");
    drop(grant);
    source.open().await.expect("nothing is held");
    let again = next_grant(&source).await;
    again.claim.report(Outcome::Completed).await.expect("it is answered");
    // It was redelivered, so nothing was consumed beside it.
    client.until_depth(0, 0).await;
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
    let reply_retry_max = Duration::from_secs(1);
    let settings = Queue { max_attempts: NonZeroU32::new(3), reply_retry_max, ..queue(&client) };
    // And once it asks for another attempt, which cannot be recorded either.
    let (act, runs) = failing(1, ExecuteFailure::Intermittent, "not yet");
    let worker = Running::start(settings, 1, act);
    for id in ["first", "second"] {
        assert_eq!(client.answer(id).await.status(), "ok");
    }
    assert_eq!(runs.load(Ordering::Relaxed), 3);
    assert_eq!(worker.counter("attempts_exhausted").await, 0);
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_a_process_is_not_journaled() {
    let Some(client) = Client::shared(Kind::Transient).await else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let work_dir = folder.path().join("work");
    let journal = work_dir.join("journal");
    let act = replies(move |_, context| {
        let journal = std::fs::read_to_string(&journal).unwrap_or_default();
        journal.contains(context.task().run.task.as_str()).to_string().into_bytes()
    });
    let worker = Running::with(queue(&client), |settings| WorkerConfig { work_dir, ..settings }, act);
    assert_eq!(client.call("/work", b"1").await.body, b"false");
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_error_reply_of_a_handler_is_that_of_a_request_that_is_given_up() {
    let Some(client) = Client::shared(Kind::Transient).await else { return };
    let act = handler(|_, context| async move {
        let reply = Reply::ok(context.task().run.run.to_string().into_bytes());
        context.set_reply(reply.with_status(ReplyStatus::CORE_ERROR)).expect("it fits");
        Err(ExecuteError::new(ExecuteFailure::Intermittent, "busy".to_owned()))
    });
    let worker = Running::start(Queue { max_attempts: NonZeroU32::new(2), ..queue(&client) }, 1, act);
    let answer = client.call("/work", b"1").await;
    assert_eq!((answer.status(), answer.body.as_slice()), ("core_error", &b"1"[..]));
    client.finish(worker).await;
}

/// A poll waits longer than any test.
fn patient(client: &Client) -> Queue {
    Queue { poll_wait: Duration::from_secs(3600), consumer_timeout: None, ..queue(client) }
}

#[tokio::test(flavor = "multi_thread")]
async fn a4_a_poll_of_a_paused_source_ends_and_consumes_nothing() {
    let Some(client) = Client::shared(Kind::Durable).await else { return };
    let source = AmqpSource::new(patient(&client));
    source.open().await.expect("there is a queue");
    client.until_depth(0, 1).await;
    source.pause();
    client.request(&["1"]).await;
    let batch = within("the poll", source.poll(PriorityQueue(0), 1)).await.expect("nothing is wrong");
    assert_eq!(batch.grants.len(), 0, "{batch:?}");
    client.until_depth(1, 0).await;
    source.resume();
    next_grant(&source).await.claim.report(Outcome::Completed).await.expect("it is answered");
    source.close().await;
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a5_a_worker_whose_last_request_was_redelivered_does_not_wait_for_its_poll() {
    let Some(broker) = shared() else { return };
    for kind in [Kind::Durable, Kind::Quorum] {
        for ends_first in [true, false] {
            let client = Client::new(&broker, kind).await;
            client.request(&["1"]).await;
            let options = BasicGetOptions { no_ack: false };
            let got = client.channel.basic_get(client.queue.as_str().into(), options).await.expect("it is read");
            let lost = got.expect("there is a request").delivery;
            lost.acker.reject(BasicRejectOptions { requeue: true }).await.expect("it is requeued");
            let (mut gate, act) = Gate::handler();
            let worker = Running::start(patient(&client), 2, act);
            gate.enters().await;
            if ends_first {
                gate.go.add_permits(1);
                worker.completed(1).await;
                worker.control.drain().await;
            } else {
                worker.control.drain().await;
                gate.go.add_permits(1);
            }
            assert_eq!(worker.ended().await, ExitReason::Drained, "{kind:?}, {ends_first}");
            assert_eq!(client.answer("1").await.body, b"1");
            client.delete_queue().await;
        }
    }
}
