//! Every way in which an answer can fail to come, for a long poll and for an ordinary call: nothing definite is
//! learnt, memory and time stay bounded, and the sentence says what to look at.

use std::time::Duration;

use journeyman::domain::id::PriorityQueue;
use journeyman::domain::refusal::Refusal;
use journeyman::source::taskcluster::{Dialect, Taskcluster};
use journeyman::source::{CallError, Source as _};
use serde_json::json;

use crate::azure::{opened, queues};
use crate::gremlin::{self, Act, Gremlin, answer, answer_with, head};
use crate::support::{discreet, impatient, poll, settings, source};

const RETRY: Refusal = Refusal::Retry { retry_after: None };

fn unfinished(announced: usize) -> Vec<u8> {
    let announced = announced.to_string();
    let mut bytes = head(200, &[("content-type", "application/json"), ("content-length", &announced)]);
    bytes.extend(b"{\"tasks\": [");
    bytes
}

/// The refusals of claimWork, and of the poll of an Azure queue, under the same fault.
async fn both(act: Act) -> [CallError; 2] {
    let gremlin = Gremlin::start(|_| vec![act.clone()]).await;
    // Only an answer that never ends is given up soon: another has the time it needs on a busy machine.
    let endless = matches!(act, Act::Silence | Act::SayAndDrip(_));
    let given = if endless { impatient } else { source };
    let claim_work = discreet(poll(&given(&gremlin.url(), Dialect::ClaimWork)).await);
    let gremlin = Gremlin::start(|url| vec![queues(url, 1), act]).await;
    let azure = less_patient_azure(&gremlin).await;
    [claim_work, discreet(azure.poll(PriorityQueue(0), 4).await)]
}

async fn less_patient_azure(gremlin: &Gremlin) -> Taskcluster {
    // Opening is not what is tested: it has the time it needs on a busy machine.
    let mut settings = settings(&gremlin.url(), Dialect::Azure);
    settings.api.timeouts.call = Duration::from_secs(10);
    let source = Taskcluster::new(settings).expect("the settings are good");
    source.open().await.expect("the queues are found");
    source
}

/// What comes of it, where anything does.
async fn in_time<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), work).await.expect("it is not waited for without end")
}

fn all_retry(refusals: [CallError; 2], hint: &str) {
    for refused in refusals {
        assert_eq!(refused.refusal, RETRY, "{refused}");
        assert!(refused.message.contains(hint), "{hint}: {refused}");
    }
}

#[tokio::test]
async fn a_refused_connection_is_tried_again() {
    let source = source(&gremlin::nobody().await, Dialect::ClaimWork);
    let refused = discreet(poll(&source).await);
    assert_eq!(refused.refusal, RETRY);
    assert!(refused.message.starts_with("claimWork of prov/wt: cannot connect"), "{refused}");
}

#[tokio::test]
async fn a_reset_in_the_middle_of_a_body_is_tried_again() {
    all_retry(both(Act::SayAndReset(unfinished(1000))).await, "connection failed");
}

#[tokio::test]
async fn a_truncated_body_is_tried_again() {
    all_retry(both(Act::Say(unfinished(1000))).await, "connection failed");
}

#[tokio::test]
async fn a_body_that_drips_for_ever_is_given_up_in_time() {
    all_retry(in_time(both(Act::SayAndDrip(unfinished(1 << 19)))).await, "in time");
}

#[tokio::test]
async fn silence_is_given_up_in_time() {
    all_retry(in_time(both(Act::Silence)).await, "in time");
}

#[tokio::test]
async fn a_body_of_a_gigabyte_is_not_read() {
    let announced = head(200, &[("content-type", "application/xml"), ("content-length", "1073741824")]);
    let gremlin = Gremlin::start(|_| vec![Act::SayAndFlood(announced.clone())]).await;
    let refused = discreet(poll(&source(&gremlin.url(), Dialect::ClaimWork)).await);
    assert_eq!(refused.refusal, RETRY);
    assert!(refused.message.contains("longer than"), "{refused}");
    // What is in flight when the connection is closed is a matter of socket buffers, not of ours.
    assert!(gremlin.sent() < 16 << 20, "{} bytes were taken", gremlin.sent());
}

#[tokio::test]
async fn an_endless_body_is_read_up_to_its_bound() {
    let endless = head(200, &[("content-type", "application/xml")]);
    let gremlin = Gremlin::start(|url| vec![queues(url, 1), Act::SayAndFlood(endless)]).await;
    let source = opened(&gremlin).await;
    let refused = discreet(source.poll(PriorityQueue(0), 4).await);
    assert_eq!(refused.refusal, RETRY);
    assert!(refused.message.contains("longer than 1048576 bytes"), "{refused}");
    assert!(gremlin.sent() < 16 << 20, "{} bytes were taken", gremlin.sent());
}

#[tokio::test]
async fn a_web_page_in_place_of_the_answer_is_tried_again() {
    let page = "<!DOCTYPE html><html><body>Welcome to the airport</body></html>";
    let [claim_work, azure] = both(answer(200, "text/html", page)).await;
    assert_eq!((claim_work.refusal, azure.refusal), (RETRY, RETRY));
    assert!(claim_work.message.contains("not the JSON"), "{claim_work}");
    assert!(azure.message.contains("cannot be read") && azure.message.contains("proxy"), "{azure}");
}

#[tokio::test]
async fn a_list_of_messages_is_read_whatever_its_content_type() {
    let list = "<QueueMessagesList/>";
    let gremlin = Gremlin::start(|url| vec![queues(url, 1), answer(200, "text/plain", list)]).await;
    let batch = opened(&gremlin).await.poll(PriorityQueue(0), 4).await.expect("the list is read");
    assert!(batch.messages.is_empty());
}

#[tokio::test]
async fn a_proxys_error_page_is_tried_again() {
    for status in [502, 503, 504] {
        let [claim_work, azure] = both(answer(status, "text/html", "<html>Bad Gateway</html>")).await;
        assert_eq!((claim_work.refusal, azure.refusal), (RETRY, RETRY));
        assert!(claim_work.message.contains(&status.to_string()), "{claim_work}");
    }
}

#[tokio::test]
async fn a_redirect_is_never_followed() {
    for status in [301, 302, 303, 307, 308] {
        let elsewhere = Gremlin::start(|_| vec![gremlin::json(200, &json!({ "tasks": [] }))]).await;
        let location = elsewhere.url();
        let act = answer_with(status, &[("location", &location)], "");
        let refusals = both(act).await;
        assert!(elsewhere.asked().is_empty(), "{status} was followed");
        for refused in refusals {
            assert_eq!(refused.refusal, RETRY, "{status}: {refused}");
            assert!(refused.message.contains("redirect, which is never followed"), "{refused}");
        }
    }
}

#[tokio::test]
async fn compression_is_not_asked_for_and_not_undone() {
    let headers = [("content-type", "application/json"), ("content-encoding", "gzip")];
    let bomb = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 0xab, 0xae, 5, 0, 0x43, 0xbf, 0xa6, 0xa3, 2, 0, 0, 0];
    let gremlin = Gremlin::start(|_| vec![answer_with(200, &headers, bomb)]).await;
    let refused = discreet(poll(&source(&gremlin.url(), Dialect::ClaimWork)).await);
    assert_eq!(refused.refusal, RETRY);
    assert_eq!(gremlin.asked()[0].header("accept-encoding"), None);
}

#[tokio::test]
async fn a_pace_that_is_too_fast_says_so_and_for_how_long() {
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
async fn hostile_xml_is_refused_before_it_grows() {
    let nested = format!("<QueueMessagesList>{}", "<a>".repeat(100_000));
    let entities = "<!DOCTYPE l [<!ENTITY a \"aaaaaaaaaa\">]><QueueMessagesList>&a;</QueueMessagesList>";
    let not_utf8 = [&b"<QueueMessagesList>"[..], &[0xff, 0xfe]].concat();
    for body in
        [nested.as_bytes(), entities.as_bytes(), &not_utf8, b"<", b"", b"<QueueMessagesList>&nbsp;</QueueMessagesList>"]
    {
        let gremlin = Gremlin::start(|url| vec![queues(url, 1), answer(200, "application/xml", body)]).await;
        let refused = discreet(opened(&gremlin).await.poll(PriorityQueue(0), 4).await);
        assert_eq!(refused.refusal, RETRY, "{refused}");
        assert!(refused.message.contains("cannot be read"), "{refused}");
    }
}
