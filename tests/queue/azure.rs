//! The Azure dialect: signed URLs, messages and pop receipts, with the statuses, codes and elements recorded in
//! `fixtures/azure-queue`.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::client::{Answer, Api};
use super::golden;
use super::test_queue::TestQueue;

struct Message {
    id: String,
    receipt: String,
    dequeued: u32,
    visible: String,
    body: Value,
}

impl Message {
    fn task(&self) -> &str {
        self.body["taskId"].as_str().expect("a message names a task")
    }
}

struct Urls {
    poll: String,
    delete: String,
}

impl Urls {
    fn delete(&self, id: &str, receipt: &str) -> String {
        self.delete.replacen("{{messageId}}", id, 1).replacen("{{popReceipt}}", receipt, 1)
    }
}

async fn urls(api: &Api) -> Vec<Urls> {
    let reply = api.get("poll-task-url/lp/lw").await.expect(200);
    let text = |entry: &Value, name: &str| entry[name].as_str().expect("a URL is text").to_owned();
    let entries = reply["queues"].as_array().expect("a list of queues");
    let urls =
        entries.iter().map(|entry| Urls { poll: text(entry, "signedPollUrl"), delete: text(entry, "signedDeleteUrl") });
    urls.collect()
}

async fn raw(api: &Api, method: &str, url: &str) -> Answer {
    let method = reqwest::Method::from_bytes(method.as_bytes()).expect("a method");
    api.send(api.http.request(method, url)).await
}

fn element<'a>(xml: &'a str, name: &str) -> &'a str {
    let (_, rest) = xml.split_once(&format!("<{name}>")).unwrap_or_else(|| panic!("no {name} in {xml}"));
    rest.split_once(&format!("</{name}>")).expect("an element ends").0
}

async fn poll(api: &Api, url: &str) -> Vec<Message> {
    let answer = raw(api, "GET", url).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(answer.headers["content-type"], "application/xml");
    answer
        .text
        .split("<QueueMessage>")
        .skip(1)
        .map(|xml| Message {
            id: element(xml, "MessageId").to_owned(),
            receipt: element(xml, "PopReceipt").to_owned(),
            dequeued: element(xml, "DequeueCount").parse().expect("a count is a number"),
            visible: element(xml, "TimeNextVisible").to_owned(),
            body: serde_json::from_slice(&STANDARD.decode(element(xml, "MessageText")).expect("base64")).expect("JSON"),
        })
        .collect()
}

/// Compares the status and the code of an error response with a recorded one.
fn assert_recorded(answer: &Answer, recorded: &str) {
    let exchange = golden::read("azure-queue", &format!("{recorded}.http"));
    assert_eq!(answer.status, exchange.status, "{recorded}: {}", answer.text);
    let code = exchange.header("x-ms-error-code");
    assert_eq!(answer.headers.get("x-ms-error-code").map(|code| code.to_str().expect("text")), code, "{recorded}");
    if let Some(code) = code {
        assert_eq!(element(&answer.text, "Code"), code, "{recorded}");
    }
}

#[tokio::test]
async fn seven_queues_are_signed_for_half_an_hour_the_most_urgent_first() {
    let server = TestQueue::new().await;
    let reply = server.api.get("poll-task-url/lp/lw").await.expect(200);
    let first = reply["queues"][0]["signedPollUrl"].as_str().expect("a URL");
    assert!(first.contains("/azure/lp/lw/7/messages?visibilitytimeout=300&"), "{first}");
    assert_eq!(reply["expires"], "2026-11-21T10:50:44.549Z");
    let last = reply["queues"][6]["signedDeleteUrl"].as_str().expect("a URL");
    assert!(last.contains("/1/messages/{{messageId}}?popreceipt={{popReceipt}}&"), "{last}");
}

#[tokio::test]
async fn every_pending_run_has_one_message() {
    let server = TestQueue::new().await;
    let api = &server.api;
    // One task is older than the poll URLs, one newer.
    let early = api.create("lp/lw", json!({"priority": "high"})).await;
    let urls = urls(api).await;
    let late = api.create("lp/lw", json!({"priority": "high"})).await;
    let high = &urls[2];
    let found = poll(api, &format!("{}&numofmessages=32", high.poll)).await;
    assert_eq!(found.iter().map(Message::task).collect::<Vec<_>>(), [early.as_str(), late.as_str()]);
    assert_eq!((found[0].dequeued, &found[0].body["runId"]), (1, &json!(0)));
    assert_eq!(found[0].visible, "Sat, 21 Nov 2026 10:25:44 GMT");
    for other in [0, 1, 3, 4, 5, 6] {
        assert_recorded(&raw(api, "GET", &urls[other].poll).await, "01-empty");
    }
    let body = json!({"workerGroup": "wg", "workerId": "w1"});
    api.post(&format!("task/{early}/runs/0/claim"), body.clone()).await.expect(200);
    let delete = high.delete(&found[0].id, &urlencoding::encode(&found[0].receipt));
    let answer = raw(api, "DELETE", &delete).await;
    assert_recorded(&answer, "04-delete-ok");
    assert_recorded(&raw(api, "DELETE", &delete).await, "05-delete-again-404");
    // A retry is a new pending run, so a new message.
    let again = json!({"reason": "worker-shutdown"});
    api.post(&format!("task/{early}/runs/0/exception"), again).await.expect(200);
    let found = poll(api, &high.poll).await;
    assert_eq!((found[0].task(), &found[0].body["runId"]), (early.as_str(), &json!(1)));
}

#[tokio::test]
async fn a_receipt_with_an_unencoded_plus_is_rejected() {
    let server = TestQueue::new().await;
    let api = &server.api;
    let lowest = urls(api).await.remove(6);
    for _ in 0..32 {
        api.create("lp/lw", json!({})).await;
    }
    let (mut plus, mut slash) = (false, false);
    // Receipts are random; a hundred rounds of 32 hold both kinds with any luck there is.
    for _ in 0..100 {
        let url = lowest.poll.replace("visibilitytimeout=300", "visibilitytimeout=1");
        for message in poll(api, &format!("{url}&numofmessages=32")).await {
            assert!(message.receipt.starts_with("AgAAAAMAAAAAAAAA") && message.receipt.ends_with('='));
            let raw_url = lowest.delete(&message.id, &message.receipt);
            if message.receipt.contains('+') && !plus {
                plus = true;
                assert_recorded(&raw(api, "DELETE", &raw_url).await, "06-delete-UNENCODED-popreceipt-pluseq");
                let encoded = lowest.delete(&message.id, &urlencoding::encode(&message.receipt));
                assert_recorded(&raw(api, "DELETE", &encoded).await, "06-delete-encoded-popreceipt-pluseq");
            } else if message.receipt.contains('/') && !message.receipt.contains('+') && !slash {
                slash = true;
                assert_recorded(&raw(api, "DELETE", &raw_url).await, "06-delete-UNENCODED-popreceipt-slasheq");
            }
        }
        if plus && slash {
            break;
        }
        server.advance(2).await;
    }
    assert!(plus && slash, "no receipt with a plus, or none with a slash, in 100 rounds");
}

#[tokio::test]
async fn modified_and_expired_urls_are_rejected() {
    let server = TestQueue::new().await;
    let api = &server.api;
    let urls = urls(api).await;
    let url = &urls[0].poll;
    let refused = |recorded: &'static str, url: String| async move {
        assert_recorded(&raw(api, "GET", &url).await, recorded);
    };
    refused("14-sas-bad-signature-403", url.replace("&sig=", "&sig=AB")).await;
    refused("14-sas-bad-signature-403", url.replace("end=1", "end=2")).await;
    refused("14-sas-bad-signature-403", url.replace("/7/messages", "/6/messages")).await;
    refused("17-visibilitytimeout-too-large", url.replace("timeout=300", "timeout=800000")).await;
    refused("08-numofmessages-33", format!("{url}&numofmessages=33")).await;
    assert_recorded(&raw(api, "POST", url).await, "15-sas-wrong-permission");
    let wrong = urls[0].delete("555af783-2fcb-4126-a3cd-42af2c6fe133", "x");
    assert_recorded(&raw(api, "DELETE", &wrong).await, "05-delete-again-404");
    server.advance(1_801).await;
    refused("12-sas-expired-403", url.clone()).await;
}

#[tokio::test]
async fn claim_work_removes_the_message_of_a_run() {
    let server = TestQueue::new().await;
    let api = &server.api;
    let lowest = urls(api).await.remove(6);
    let task = api.create("lp/lw", json!({})).await;
    assert_eq!(api.claim_work("lp/lw", "w2", 1).await.len(), 1);
    assert!(poll(api, &lowest.poll).await.is_empty());
    let body = json!({"workerGroup": "wg", "workerId": "w1"});
    assert_eq!(api.post(&format!("task/{task}/runs/0/claim"), body).await.refusal(409).0, "RequestConflict");
}
