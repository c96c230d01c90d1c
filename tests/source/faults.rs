//! Network faults during a long poll and an ordinary call: nothing definite is learned, memory and time stay bounded, and
//! the message says what to check.

use std::time::Duration;

use journeyman::source::taskcluster::{Dialect, Taskcluster};
use journeyman::source::{CallError, Source as _};
use journeyman_domain::id::PriorityQueue;
use journeyman_domain::refusal::Refusal;
use serde_json::json;

use crate::source::azure::{opened, queues};
use crate::source::support::{RETRY, discreet, poll, settings, source, with_short_timeouts};
use crate::support::gremlin::{self, Act, Gremlin, answer, answer_with, head};

fn unfinished(announced: usize) -> Vec<u8> {
    let announced = announced.to_string();
    let mut bytes = head(200, &[("content-type", "application/json"), ("content-length", &announced)]);
    bytes.extend(b"{\"tasks\": [");
    bytes
}

/// The errors of claimWork and of an Azure poll under the same fault.
async fn both(act: Act) -> [CallError; 2] {
    let gremlin = Gremlin::start(|_| vec![act.clone()]).await;
    // Short timeouts only for endless responses; others may be slow on a busy machine.
    let endless = matches!(act, Act::Silence | Act::SayAndDrip(_));
    let given = if endless { with_short_timeouts } else { source };
    let claim_work = discreet(poll(&given(&gremlin.url(), Dialect::ClaimWork)).await);
    let gremlin = Gremlin::start(|url| vec![queues(url, 1), act]).await;
    let azure = azure_with_short_timeouts(&gremlin).await;
    [claim_work, discreet(azure.poll(PriorityQueue(0), 4).await)]
}

async fn azure_with_short_timeouts(gremlin: &Gremlin) -> Taskcluster {
    // Opening is not under test and may be slow on a busy machine.
    let mut settings = settings(&gremlin.url(), Dialect::Azure);
    settings.api.timeouts.call = Duration::from_secs(10);
    let source = Taskcluster::new(settings).expect("the settings are good");
    source.open().await.expect("the queues are found");
    source
}

async fn in_time<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), work).await.expect("the call ends")
}

fn all_retry(refusals: [CallError; 2], hint: &str) {
    for refused in refusals {
        assert_eq!(refused.refusal, RETRY, "{refused}");
        assert!(refused.message.contains(hint), "{hint}: {refused}");
    }
}

#[tokio::test]
async fn a_refused_connection_is_retried() {
    let source = source(&gremlin::unused_address().await, Dialect::ClaimWork);
    let refused = discreet(poll(&source).await);
    assert_eq!(refused.refusal, RETRY);
    assert!(refused.message.starts_with("claimWork of prov/wt: cannot connect"), "{refused}");
}

#[tokio::test]
async fn broken_and_endless_bodies_are_retried() {
    for (act, hint) in [
        (Act::SayAndReset(unfinished(1000)), "connection failed"),
        (Act::Say(unfinished(1000)), "connection failed"),
        (Act::SayAndDrip(unfinished(1 << 19)), "timed out"),
        (Act::Silence, "timed out"),
    ] {
        all_retry(in_time(both(act)).await, hint);
    }
}

#[tokio::test]
async fn a_body_of_a_gigabyte_is_not_read() {
    let announced = head(200, &[("content-type", "application/xml"), ("content-length", "1073741824")]);
    let gremlin = Gremlin::start(|_| vec![Act::SayAndFlood(announced.clone())]).await;
    let refused = discreet(poll(&source(&gremlin.url(), Dialect::ClaimWork)).await);
    assert_eq!(refused.refusal, RETRY);
    assert!(refused.message.contains("exceeds"), "{refused}");
    // Socket buffers decide how much is in flight when the connection is closed.
    assert!(gremlin.sent() < 16 << 20, "{} bytes were taken", gremlin.sent());
}

#[tokio::test]
async fn an_endless_body_is_read_up_to_the_limit() {
    let endless = head(200, &[("content-type", "application/xml")]);
    let gremlin = Gremlin::start(|url| vec![queues(url, 1), Act::SayAndFlood(endless)]).await;
    let source = opened(&gremlin).await;
    let refused = discreet(source.poll(PriorityQueue(0), 4).await);
    assert_eq!(refused.refusal, RETRY);
    assert!(refused.message.contains("exceeds 1048576 bytes"), "{refused}");
    assert!(gremlin.sent() < 16 << 20, "{} bytes were taken", gremlin.sent());
}

#[tokio::test]
async fn a_web_page_is_retried() {
    let page = "<!DOCTYPE html><html><body>Welcome to the airport</body></html>";
    let [claim_work, azure] = both(answer(200, "text/html", page)).await;
    assert_eq!((claim_work.refusal, azure.refusal), (RETRY, RETRY));
    assert!(claim_work.message.contains("unexpected JSON"), "{claim_work}");
    assert!(azure.message.contains("invalid response") && azure.message.contains("proxy"), "{azure}");
    // A proxy sends it so.
    for status in [502, 503, 504] {
        all_retry(both(answer(status, "text/html", page)).await, &status.to_string());
    }
}

#[tokio::test]
async fn a_message_list_may_have_any_content_type() {
    let list = "<QueueMessagesList/>";
    let gremlin = Gremlin::start(|url| vec![queues(url, 1), answer(200, "text/plain", list)]).await;
    let batch = opened(&gremlin).await.poll(PriorityQueue(0), 4).await.expect("the list is read");
    assert!(batch.messages.is_empty());
}

#[tokio::test]
async fn redirects_are_not_followed() {
    for status in [301, 302, 303, 307, 308] {
        let elsewhere = Gremlin::start(|_| vec![gremlin::json(200, &json!({ "tasks": [] }))]).await;
        let location = elsewhere.url();
        let refusals = both(answer_with(status, &[("location", &location)], "")).await;
        assert!(elsewhere.asked().is_empty(), "{status} was followed");
        all_retry(refusals, "redirect, which is not followed");
    }
}

#[tokio::test]
async fn compression_is_neither_requested_nor_decoded() {
    let headers = [("content-type", "application/json"), ("content-encoding", "gzip")];
    let bomb = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 0xab, 0xae, 5, 0, 0x43, 0xbf, 0xa6, 0xa3, 2, 0, 0, 0];
    let gremlin = Gremlin::start(|_| vec![answer_with(200, &headers, bomb)]).await;
    let refused = discreet(poll(&source(&gremlin.url(), Dialect::ClaimWork)).await);
    assert_eq!(refused.refusal, RETRY);
    assert_eq!(gremlin.asked()[0].header("accept-encoding"), None);
}

#[tokio::test]
async fn retry_after_is_kept() {
    let headers = [("content-type", "application/json"), ("retry-after", "7")];
    let after = Some(Duration::from_secs(7));
    for refused in both(answer_with(429, &headers, "{}")).await {
        assert_eq!(refused.refusal, Refusal::Throttled { retry_after: after }, "{refused}");
    }
    for refused in both(answer_with(503, &headers, "{}")).await {
        assert_eq!(refused.refusal, Refusal::Retry { retry_after: after }, "{refused}");
    }
}

#[tokio::test]
async fn hostile_xml_is_rejected_before_expansion() {
    let nested = format!("<QueueMessagesList>{}", "<a>".repeat(100_000));
    let entities = "<!DOCTYPE l [<!ENTITY a \"aaaaaaaaaa\">]><QueueMessagesList>&a;</QueueMessagesList>";
    let not_utf8 = [&b"<QueueMessagesList>"[..], &[0xff, 0xfe]].concat();
    for body in
        [nested.as_bytes(), entities.as_bytes(), &not_utf8, b"<", b"", b"<QueueMessagesList>&nbsp;</QueueMessagesList>"]
    {
        let gremlin = Gremlin::start(|url| vec![queues(url, 1), answer(200, "application/xml", body)]).await;
        let refused = discreet(opened(&gremlin).await.poll(PriorityQueue(0), 4).await);
        assert_eq!(refused.refusal, RETRY, "{refused}");
        assert!(refused.message.contains("invalid response"), "{refused}");
    }
}
