//! Reports that are dropped and repeated.

use std::future::Future;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use journeyman::source::amqp::AmqpSource;
use journeyman::source::{CallError, Grant, Source as _, SourceFuture};
use journeyman_domain::id::PriorityQueue;
use journeyman_domain::limits::AMQP_UNPOLLED_REQUEUE_DELAY;
use journeyman_domain::outcome::{ExceptionReason, Outcome};
use journeyman_domain::refusal::Refusal;
use journeyman_platform::amqp::lapin::BasicProperties;

use crate::amqp::support::{Client, Kind, next_grant, queue, wired, within};
use crate::support::wire::Way;

const SHUTDOWN: Outcome = Outcome::Exception(ExceptionReason::WorkerShutdown);

/// Polls it once.
async fn once(call: &mut SourceFuture<'_, ()>) -> Poll<Result<(), CallError>> {
    let mut call = Pin::new(call);
    std::future::poll_fn(|context| Poll::Ready(call.as_mut().poll(context))).await
}

/// Starts a report, and drops it.
async fn begin(grant: &Grant, outcome: Outcome) {
    drop(once(&mut grant.claim.report(outcome)).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_whose_reply_is_being_published_is_not_requeued() {
    let Some((client, wire, settings)) = wired(Kind::Durable).await else { return };

    let source = AmqpSource::new(settings);
    client.request(&["1"]).await;
    source.open().await.expect("there is a queue");
    let grant = next_grant(&source).await;
    // Requests that were not polled in time were requeued.
    let before = source.metrics()["requeued"];
    wire.set(Way::Stall);
    begin(&grant, Outcome::Completed).await;
    let mut back = grant.claim.report(SHUTDOWN);
    assert!(once(&mut back).await.is_pending(), "it waits for what became of the answer");
    wire.set(Way::Carry);
    let refused = within("the report", back).await.expect_err("it was answered");
    assert_eq!(refused.refusal, Refusal::Gone);
    assert!(refused.message.contains("it was settled as completed"), "{refused:?}");
    assert_eq!(client.answer("1").await.body, b"null");
    source.pause();
    client.until_depth(0, 0).await;
    assert_eq!((source.metrics()["replies"], source.metrics()["requeued"]), (1, before));
    source.close().await;
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acknowledgement_survives_a_dropped_report() {
    let Some(client) = Client::shared(Kind::Durable).await else { return };
    let source = AmqpSource::new(queue(&client));
    source.open().await.expect("there is a queue");
    for outcome in [Outcome::Completed, SHUTDOWN] {
        // Without reply_to the acknowledgement comes first.
        assert!(client.publish(BasicProperties::default(), b"1").await);
        let grant = next_grant(&source).await;
        begin(&grant, outcome).await;
        grant.claim.report(outcome).await.expect("it is settled");
    }
    let grant = next_grant(&source).await;
    grant.claim.report(Outcome::Completed).await.expect("it came back once");
    source.pause();
    client.until_depth(0, 0).await;
    source.close().await;
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_source_reports_no_error() {
    let Some(client) = Client::shared(Kind::Durable).await else { return };
    let source = AmqpSource::new(queue(&client));
    source.open().await.expect("there is a queue");
    // It waits for a poll, which takes it in time.
    client.request(&["1"]).await;
    let first = next_grant(&source).await;
    let idle =
        tokio::time::timeout(AMQP_UNPOLLED_REQUEUE_DELAY + Duration::from_secs(1), source.poll(PriorityQueue(0), 1))
            .await;
    assert!(idle.is_err(), "there is no error");
    first.claim.report(Outcome::Completed).await.expect("it is settled");
    // Its worker is paused, so to say.
    source.pause();
    client.until_depth(0, 0).await;
    source.resume();
    client.request(&["2"]).await;
    let again = async {
        loop {
            let batch = source.poll(PriorityQueue(0), 1).await.expect("no trouble");
            if let Some(grant) = batch.grants.into_iter().next() {
                return grant;
            }
        }
    };
    let second = within("it is asked again", again).await;
    second.claim.report(Outcome::Completed).await.expect("it is settled");
    source.close().await;
    client.delete_queue().await;
}
