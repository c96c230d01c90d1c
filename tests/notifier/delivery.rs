//! Events that become webhooks: once for each endpoint, in order, whatever dies.

use futures_util::future::{BoxFuture, join_all};
use journeyman_platform::host::crash_points::NOTIFIER_CRASH_POINTS;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::notifier::support::{Place, Receiver, answered, deaths, event, within};
use crate::support::gremlin::{Act, Asked, Gremlin};

#[tokio::test]
async fn an_event_is_delivered_with_its_lane_and_a_signature() {
    let receiver = Receiver::answering(204).await;
    let place = Place::new(&[("ci", &receiver)]);
    let notifier = place.start().await;
    let body = r#"{ "source": "ci", "id": "7", "type": "build.finished", "key": "build 7", "epoch": 2,
                    "time": "2026-11-26T10:00:00Z", "data": {"b":  1, "a":[ ]} }"#;
    assert_eq!(notifier.publish(body).await, Some((202, json!({ "accepted": 1, "duplicates": 0 }))));
    assert_eq!(notifier.publish(body).await, Some((202, json!({ "accepted": 0, "duplicates": 1 }))));
    receiver.wait_for(1).await;
    let asked = receiver.0.asked().remove(0);
    let header = |name: &str| asked.header(name).unwrap_or_default().to_owned();
    assert_eq!(asked.line, "POST /hook HTTP/1.1");
    let lane = [header("journeyman-lane"), header("journeyman-epoch"), header("journeyman-seq")];
    assert_eq!(lane, ["build 7", "2", "1"]);
    assert!(header("webhook-signature").starts_with("v1,"), "{asked:?}");
    let expected = r#"{"type":"build.finished","timestamp":"2026-11-26T10:00:00Z","data":{"b":  1, "a":[ ]}}"#;
    assert_eq!(String::from_utf8_lossy(&asked.body), expected, "byte for byte");
    notifier.stop().await;
    assert_eq!(receiver.got().len(), 1);
}

#[tokio::test]
async fn p1_a_lane_waits_for_its_head_and_other_lanes_do_not() {
    let receiver = Receiver::failing_first(500).await;
    let place = Place::new(&[("ci", &receiver)]);
    let notifier = place.start().await;
    let events: Vec<_> = (0..60).map(|number| event(&number.to_string(), &format!("lane-{}", number % 10))).collect();
    notifier.publish_all(&events).await;
    receiver.wait_for(60).await;
    notifier.stop().await;
    assert_eq!(receiver.check_order(), 60);
    assert!(receiver.got().len() > 60, "some were repeated");
}

#[tokio::test]
async fn f3_a_result_that_cannot_be_stored_is_kept_and_its_attempt_is_not_repeated() {
    let (release, held) = watch::channel(false);
    let respond = move |_: &Asked| {
        let mut held = held.clone();
        let act: BoxFuture<'static, Act> = Box::pin(async move {
            held.wait_for(|is_released| *is_released).await.expect("the test goes on");
            answered(200)
        });
        act
    };
    let receiver = Receiver(Gremlin::responding(respond).await);
    let place = Place::new(&[("ci", &receiver)]);
    let mut notifier = place.start().await;
    let events = |from: usize| (from..from + 4).map(|n| event(&n.to_string(), &format!("lane-{}", n % 4)));
    notifier.publish_all(&events(0).collect::<Vec<_>>()).await;
    within("the attempts", receiver.0.wait_asked(|asked| asked.len() == 4)).await;
    // Another program keeps the notifier from writing, as a full disk does.
    let other = rusqlite::Connection::open(place.path().join("notifier.db")).expect("it opens");
    other.execute_batch("BEGIN IMMEDIATE").expect("it waits for the notifier");
    release.send_replace(true);
    notifier.process.says("cannot store an attempt, retrying").await;
    other.execute_batch("ROLLBACK").expect("it is let go");
    notifier.publish_all(&events(4).collect::<Vec<_>>()).await;
    receiver.wait_for(8).await;
    notifier.stop().await;
    assert_eq!((receiver.check_order(), receiver.got().len()), (8, 8), "nothing is sent twice");
}

#[tokio::test]
async fn an_event_that_follows_a_delivered_one_at_once_does_not_wait() {
    let receiver = Receiver::answering(200).await;
    let place = Place::new(&[("ci", &receiver)]);
    let notifier = place.start().await;
    // The receiver has the last one, and the notifier has not stored that yet.
    for number in 1..=200 {
        notifier.publish_all(&[event(&number.to_string(), "lane")]).await;
        receiver.wait_for(number).await;
    }
    notifier.stop().await;
    assert_eq!(receiver.check_order(), 200);
}

/// Runs with a file, and with PostgreSQL, where each death costs a lease.
#[tokio::test]
async fn p2_nothing_that_was_accepted_is_lost_when_the_notifier_is_killed() {
    let each = NOTIFIER_CRASH_POINTS.iter().flat_map(|point| [(*point, false), (*point, true)]);
    join_all(each.map(async |(point, is_shared)| {
        let receiver = Receiver::failing_first(503).await;
        let mut place = Place::new(&[("ci", &receiver)]);
        if is_shared {
            let Some(shared) = place.on_postgres().await else { return };
            place = shared;
        }
        survives_kills(&place, &receiver, point, deaths(if is_shared { 1 } else { 2 })).await;
    }))
    .await;
}

async fn survives_kills(place: &Place, receiver: &Receiver, point: &str, runs: usize) {
    let mut accepted = 0;
    for run in 1..=runs {
        // The rest of the last run may end this one before anything is published.
        let point_of_run = format!("{point}:{run}");
        let Some(notifier) = place.try_start(&[("JOURNEYMAN_CRASH_POINT", &point_of_run)]).await else { continue };
        // The same ones again where no answer came.
        for number in 0..20 {
            let id = format!("{run}-{number}");
            if notifier.publish(event(&id, &format!("lane-{}", number % 4)).to_string()).await.is_none() {
                break;
            }
            accepted += 1;
        }
        let ended = notifier.process.ends().await;
        assert_eq!(ended.signal(), Some(9), "at {point}: {}", ended.log);
    }
    let notifier = place.start().await;
    receiver.wait_for(accepted).await;
    notifier.stop().await;
    let delivered = receiver.check_order();
    assert!(delivered >= accepted, "{point}: {delivered} of {accepted}");
    println!("{point}: {runs} deaths, {accepted} accepted, 0 lost, {} sent", receiver.got().len());
}

#[tokio::test]
async fn an_endpoint_that_is_gone_gets_nothing_more_and_others_go_on() {
    let (gone, well) = (Receiver::answering(410).await, Receiver::answering(200).await);
    let place = Place::new(&[("gone", &gone), ("well", &well)]);
    let mut notifier = place.start().await;
    notifier.publish_all(&[event("1", "a")]).await;
    notifier.process.says("endpoint gone is disabled").await;
    notifier.publish_all(&[event("2", "a"), event("3", "b")]).await;
    well.wait_for(3).await;
    let is_kept = |status: &Value| (&status["disabled"], &status["messages"]) == (&json!("gone"), &json!(3));
    notifier.wait_for_status("gone", is_kept).await;
    notifier.kill().await;
    let notifier = place.start().await;
    notifier.publish_all(&[event("4", "a")]).await;
    well.wait_for(4).await;
    notifier.stop().await;
    assert_eq!((gone.got().len(), well.check_order()), (1, 4));
}

#[tokio::test]
async fn bad_events_are_refused_with_a_reason_and_none_of_a_batch_is_stored() {
    let receiver = Receiver::answering(200).await;
    let place = Place::new(&[("ci", &receiver)]);
    let notifier = place.start().await;
    let mut bad_type = event("2", "k");
    bad_type["type"] = json!("build finished");
    let mut no_key = event("3", "k");
    no_key["key"] = json!("");
    for (body, words) in [
        ("{".to_owned(), "invalid event at line 1, column 1"),
        ("[]".to_owned(), "0 events"),
        (json!([event("1", "k"), bad_type]).to_string(), "event 1: type"),
        (json!([event("1", "k"), no_key]).to_string(), "event 1: key is empty"),
        (json!({ "secret": "s3cret" }).to_string(), "invalid event at line 1"),
    ] {
        let (status, answer) = notifier.publish(body).await.expect("an answer");
        let message = answer["message"].as_str().expect("a message").to_owned();
        assert!(status == 400 && message.starts_with(words) && !message.contains("s3cret"), "{status} {message}");
    }
    assert_eq!(notifier.status("ci").await["messages"], 0);
    notifier.stop().await;
}

#[tokio::test]
async fn an_endpoint_is_made_changed_and_removed_while_the_notifier_runs() {
    let (first, second) = (Receiver::answering(200).await, Receiver::answering(200).await);
    let place = Place::new(&[]);
    let notifier = place.start().await;
    let url = |receiver: &Receiver| {
        json!({ "url": format!("{}/s3cret", receiver.0.url()), "events": ["build.*"] }).to_string()
    };
    assert_eq!(notifier.call("PUT", "/v1/endpoints/made", &url(&first)).await.0, 200);
    notifier.publish_all(&[event("1", "a")]).await;
    first.wait_for(1).await;
    notifier.kill().await;
    let notifier = place.start().await;
    notifier.publish_all(&[event("2", "a")]).await;
    first.wait_for(2).await;
    assert_eq!(notifier.call("PUT", "/v1/endpoints/made", &url(&second)).await.0, 200);
    notifier.publish_all(&[event("3", "a")]).await;
    second.wait_for(1).await;
    assert_eq!(notifier.call("DELETE", "/v1/endpoints/made", "").await.0, 200);
    notifier.publish_all(&[event("4", "a")]).await;
    assert_eq!(notifier.status("made").await, Value::Null);
    let log = notifier.stop().await;
    assert!(!log.contains("s3cret"), "{log}");
    let stored = place.database();
    assert!(!stored.windows(6).any(|bytes| bytes == b"s3cret"), "it is sealed");
    assert_eq!((first.check_order(), second.got().len()), (2, 1));
}
