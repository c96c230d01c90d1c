//! Several notifiers that share a PostgreSQL.

use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::BoxFuture;
use rustix::process::Signal;
use tokio::sync::watch;

use crate::notifier::support::{Place, Receiver, answered, deaths, event, within};
use crate::support::gremlin::{Act, Asked, Gremlin};
use crate::support::needs;
use crate::support::server::Server;

fn events(numbers: std::ops::Range<usize>, lanes: usize) -> Vec<serde_json::Value> {
    numbers.map(|number| event(&number.to_string(), &format!("lane-{}", number % lanes))).collect()
}

#[tokio::test]
async fn nodes_deliver_each_lane_once_and_take_over_the_lanes_of_the_dead_and_of_those_that_stop() {
    let receiver = Receiver::answering(200).await;
    let Some(place) = Place::new(&[("ci", &receiver)]).on_postgres().await else { return };
    let first = place.start().await;
    first.publish_all(&events(0..40, 20)).await;
    let mut second = place.start().await;
    // The first one lets half of its partitions go.
    second.process.says("\"partitions\":32").await;
    second.publish_all(&events(40..200, 20)).await;
    receiver.wait_for(200).await;
    assert_eq!((receiver.check_order(), receiver.got().len()), (200, 200), "nothing is sent twice");
    first.kill().await;
    second.publish_all(&events(200..240, 20)).await;
    receiver.wait_for(240).await;
    // Of each lane of the dead one, its head was sent perhaps, and not stored.
    let sent = receiver.got().len();
    assert!(sent <= 240 + 20, "only heads are repeated: {sent}");
    let third = place.start().await;
    second.stop().await;
    third.publish_all(&events(240..280, 20)).await;
    receiver.wait_for(280).await;
    third.stop().await;
    assert_eq!((receiver.check_order(), receiver.got().len()), (280, sent + 40));
}

#[tokio::test]
async fn f12_an_endpoint_that_was_just_made_gets_the_next_event_of_another_node() {
    let receiver = Receiver::answering(200).await;
    let Some(place) = Place::new(&[]).on_postgres().await else { return };
    let (first, second) = (place.start().await, place.start().await);
    for number in 0..10 {
        let only = format!("only.{number}");
        let settings = serde_json::json!({ "url": format!("{}/hook", receiver.0.url()), "events": [only] });
        let (status, text) = first.call("put", &format!("/v1/endpoints/new-{number}"), &settings.to_string()).await;
        assert_eq!(status, 200, "{text}");
        let mut event = event(&number.to_string(), "lane");
        event["type"] = only.into();
        second.publish_all(&[event]).await;
    }
    receiver.wait_for(10).await;
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn p3_what_a_stalled_node_stores_after_its_lease_is_refused() {
    let (release, held) = watch::channel(false);
    let calls = AtomicUsize::new(0);
    let respond = move |_: &Asked| {
        let (is_first, mut held) = (calls.fetch_add(1, Ordering::SeqCst) == 0, held.clone());
        let act: BoxFuture<'static, Act> = Box::pin(async move {
            if is_first {
                held.wait_for(|is_released| *is_released).await.expect("the test goes on");
            }
            answered(200)
        });
        act
    };
    let receiver = Receiver(Gremlin::responding(respond).await);
    let Some(place) = Place::new(&[("ci", &receiver)]).on_postgres().await else { return };
    let mut stalled = place.start().await;
    stalled.publish_all(&events(0..5, 1)).await;
    within("the first attempt", receiver.0.wait_asked(|asked| !asked.is_empty())).await;
    stalled.process.signal(Signal::STOP);
    let other = place.start().await;
    receiver.wait_for(5).await;
    release.send_replace(true);
    stalled.process.signal(Signal::CONT);
    stalled.process.says("could not renew its lease in time").await;
    let log = stalled.process.log();
    other.publish_all(&events(5..10, 1)).await;
    receiver.wait_for(10).await;
    stalled.stop().await;
    other.stop().await;
    assert_eq!((receiver.check_order(), receiver.got().len()), (10, 11), "the head is sent by both: {log}");
}

#[tokio::test]
async fn p2_nothing_that_was_accepted_is_lost_when_postgresql_is_killed() {
    let receiver = Receiver::failing_first(503).await;
    let place = Place::new(&[("ci", &receiver)]);
    // The server is stopped at the end of the test only: it has to be one of its own.
    if needs("JOURNEYMAN_TEST_POSTGRES").is_none() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let mut server = Server::new("postgres", folder.path());
    server.start().expect("it starts");
    let value = |name| server.value(name).expect("it says where it is");
    let place = place.with_postgres(&value("POSTGRES"), &value("POSTGRES_CA"));
    let runs = deaths(1);
    let notifier = place.start().await;
    let mut accepted = 0;
    for run in 0..runs {
        for number in 0..40 {
            let id = run * 40 + number;
            let publishing = notifier.publish(event(&id.to_string(), &format!("lane-{}", id % 7)).to_string());
            if number == 20 {
                let (_, killed) = tokio::join!(publishing, async { server.run("kill", &[]) });
                killed.expect("it is there");
                server.start().expect("it starts again");
                // What had no answer, or an error, is sent again.
                let again = async {
                    while notifier
                        .publish(event(&id.to_string(), &format!("lane-{}", id % 7)).to_string())
                        .await
                        .is_none_or(|(status, _)| status != 202)
                    {}
                };
                within("an answer after the restart", again).await;
            } else {
                assert_eq!(publishing.await.map(|(status, _)| status), Some(202));
            }
            accepted += 1;
        }
    }
    receiver.wait_for(accepted).await;
    notifier.stop().await;
    drop(server);
    assert_eq!(receiver.check_order(), accepted);
    println!("{runs} deaths of PostgreSQL, {accepted} accepted, 0 lost, {} sent", receiver.got().len());
}
