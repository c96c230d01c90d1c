//! The polling half of the Azure dialect: requests on the wire and classified responses.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use journeyman::source::taskcluster::{Dialect, Taskcluster};
use journeyman::source::{Message, MessageQueue as _, Recovery as _, Source as _};
use journeyman_domain::id::PriorityQueue;
use journeyman_domain::refusal::Refusal;
use serde_json::{Value, json};

use crate::source::support::{CANARY, RETRY, discreet, run, settings, source};
use crate::support::gremlin::{Act, Gremlin, answer, json as say};

fn urls(base: &str, lane: usize, key: &str) -> Value {
    let signature = format!("sv=2015-04-05&se=2026-11-21T10%3A54%3A04Z&sp=p&sig={CANARY}%2B{key}%2F%3D");
    json!({
        "signedPollUrl": format!("{base}/acc/q-{lane}/messages?visibilitytimeout=300&{signature}"),
        "signedDeleteUrl":
            format!("{base}/acc/q-{lane}/messages/{{{{messageId}}}}?popreceipt={{{{popReceipt}}}}&{signature}"),
    })
}

fn queues_by(base: &str, lanes: usize, key: &str) -> Act {
    let expires = (jiff::Timestamp::now() + jiff::SignedDuration::from_secs(1800)).to_string();
    let queues: Vec<_> = (0..lanes).map(|lane| urls(base, lane, key)).collect();
    say(200, &json!({ "queues": queues, "expires": expires }))
}

/// A pollTaskUrls response with this many queues, all at `base`.
pub(crate) fn queues(base: &str, lanes: usize) -> Act {
    queues_by(base, lanes, "k1")
}

fn received(id: &str, receipt: &str) -> Message {
    let run = Ok(run("T", 0));
    Message { queue: PriorityQueue(0), id: id.into(), receipt: receipt.into(), dequeue_count: 1, run }
}

pub(crate) async fn opened(gremlin: &Gremlin) -> Taskcluster {
    let source = source(&gremlin.url(), Dialect::Azure);
    source.open().await.expect("the queues are found");
    source
}

fn message(id: &str, receipt: &str, text: &str) -> String {
    format!(
        "<QueueMessage><MessageId>{id}</MessageId><PopReceipt>{receipt}</PopReceipt>\
         <DequeueCount>3</DequeueCount><MessageText>{text}</MessageText></QueueMessage>"
    )
}

fn list(messages: &[String]) -> Act {
    let body = format!("\u{feff}<?xml version=\"1.0\"?><QueueMessagesList>{}</QueueMessagesList>", messages.concat());
    answer(200, "application/xml", body)
}

/// A slugid with this prefix.
fn slugid(start: &str) -> String {
    format!("{start:A<8}QACAAAAAAAAAAA")
}

fn about(task: &str) -> String {
    let task = slugid(task);
    STANDARD.encode(json!({ "taskId": task, "runId": 0, "hintId": "h" }).to_string())
}

fn storage_error(status: u16, code: &str) -> Act {
    let body = format!("<Error><Code>{code}</Code><Message>Said.\nString to sign: {CANARY}</Message></Error>");
    answer(status, "application/xml", body)
}

#[tokio::test]
async fn signed_urls_are_used_until_five_minutes_before_they_expire() {
    let gremlin = Gremlin::start(|url| vec![queues(url, 7)]).await;
    let found = source(&gremlin.url(), Dialect::Azure).open().await.expect("the queues are found");
    assert_eq!(found.priority_queues, 7);
    let seconds = found.usable_for.expect("they end").as_secs();
    assert!((1499..=1500).contains(&seconds), "{seconds}");
    assert_eq!(gremlin.asked()[0].line, "GET /api/queue/v1/poll-task-url/prov/wt HTTP/1.1");
}

#[tokio::test]
async fn numofmessages_is_appended_and_the_url_is_unchanged() {
    let gremlin = Gremlin::start(|url| vec![queues(url, 2), list(&[])]).await;
    let source = opened(&gremlin).await;
    source.poll(PriorityQueue(1), 7).await.expect("the list is read");
    source.poll(PriorityQueue(0), 200).await.expect("the list is read");
    let path =
        "/acc/q-1/messages?visibilitytimeout=300&sv=2015-04-05&se=2026-11-21T10%3A54%3A04Z&sp=p&sig=CANARY%2Bk1%2F%3D";
    let asked = gremlin.asked();
    assert_eq!(asked[1].line, format!("GET {path}&numofmessages=7 HTTP/1.1"));
    assert!(asked[2].line.ends_with("&numofmessages=32 HTTP/1.1"));
    assert_eq!(asked[1].header("authorization"), None);
}

#[tokio::test]
async fn a_batch_keeps_order_receipts_and_duplicates() {
    let twice = message("m-1", "AgAA+/==", &about("A"));
    let batch = [twice.clone(), message("m-2", "r", "!!!"), message("m-3", "&lt;r&#43;&gt;", &about("B")), twice];
    let gremlin = Gremlin::start(|url| vec![queues(url, 1), list(&batch)]).await;
    let batch = opened(&gremlin).await.poll(PriorityQueue(0), 4).await.expect("the list is read");
    let seen = |message: &Message| (message.id.to_string(), message.receipt.to_string(), message.run.clone().ok());
    let seen: Vec<_> = batch.messages.iter().map(seen).collect();
    let entry = |id: &str, receipt: &str, run| (id.to_owned(), receipt.to_owned(), run);
    let (a, b) = (Some(run(&slugid("A"), 0)), Some(run(&slugid("B"), 0)));
    let first = entry("m-1", "AgAA+/==", a);
    assert_eq!(seen, [first.clone(), entry("m-2", "r", None), entry("m-3", "<r+>", b), first]);
    assert_eq!(batch.messages[0].dequeue_count, 3);
}

#[tokio::test]
async fn surplus_messages_are_left_in_the_queue() {
    let batch: Vec<_> = (0..6).map(|number| message(&format!("m-{number}"), "r", &about("A"))).collect();
    let gremlin = Gremlin::start(|url| vec![queues(url, 1), list(&batch)]).await;
    let batch = opened(&gremlin).await.poll(PriorityQueue(0), 4).await.expect("the list is read");
    assert_eq!(batch.messages.len(), 4);
}

#[tokio::test]
async fn poll_errors_are_classified() {
    let expected = [
        (400, "OutOfRangeQueryParameterValue", Refusal::Rejected),
        (403, "AuthenticationFailed", Refusal::Stale),
        (404, "QueueNotFound", Refusal::Stale),
        (429, "TooManyRequests", Refusal::Throttled { retry_after: None }),
        (500, "InternalError", RETRY),
        (503, "ServerBusy", RETRY),
    ];
    for (status, code, refusal) in expected {
        let gremlin = Gremlin::start(|url| vec![queues(url, 1), storage_error(status, code)]).await;
        let refused = discreet(opened(&gremlin).await.poll(PriorityQueue(0), 1).await);
        assert_eq!(refused.refusal, refusal, "{refused}");
        assert_eq!(refused.message, format!("poll of prov/wt at priority 0: {status} {code}: Said."));
    }
}

#[tokio::test]
async fn an_unknown_queue_is_stale() {
    let source = source("http://127.0.0.1:1", Dialect::Azure);
    assert_eq!(discreet(source.poll(PriorityQueue(0), 1).await).refusal, Refusal::Stale);
    assert_eq!(discreet(source.delete(&received("i", "r")).await).refusal, Refusal::Stale);
}

#[tokio::test]
async fn a_delete_substitutes_id_and_receipt_and_nothing_else() {
    let gremlin = Gremlin::start(|url| vec![queues(url, 1), answer(204, "", "")]).await;
    opened(&gremlin).await.delete(&received("7790fece-964b", "AgAA+b/A==")).await.expect("it is deleted");
    let rest = "sv=2015-04-05&se=2026-11-21T10%3A54%3A04Z&sp=p&sig=CANARY%2Bk1%2F%3D";
    let path = format!("/acc/q-0/messages/7790fece-964b?popreceipt=AgAA%2Bb%2FA%3D%3D&{rest}");
    let asked = gremlin.asked().remove(1);
    assert_eq!(asked.line, format!("DELETE {path} HTTP/1.1"));
    assert_eq!(asked.header("authorization"), None);
    assert!(asked.body.is_empty());
}

#[tokio::test]
async fn delete_responses_are_classified() {
    let expected = [
        (200, "", Ok(())),
        (204, "", Ok(())),
        (404, "MessageNotFound", Ok(())),
        (400, "PopReceiptMismatch", Err(Refusal::Rejected)),
        (403, "AuthenticationFailed", Err(Refusal::Stale)),
        (429, "TooManyRequests", Err(Refusal::Throttled { retry_after: None })),
        (500, "InternalError", Err(RETRY)),
    ];
    for (status, code, expected) in expected {
        let gremlin = Gremlin::start(|url| vec![queues(url, 1), storage_error(status, code)]).await;
        let answer = opened(&gremlin).await.delete(&received("i", "r")).await;
        if expected.is_ok() {
            assert!(answer.is_ok(), "{status}");
        } else {
            assert_eq!(discreet(answer).refusal, expected.expect_err("a refusal"), "{status}");
        }
    }
}

#[tokio::test]
async fn an_html_page_is_not_a_successful_delete() {
    let gremlin = Gremlin::start(|url| vec![queues(url, 1), answer(404, "text/html", "<html>?</html>")]).await;
    assert_eq!(discreet(opened(&gremlin).await.delete(&received("i", "r")).await).refusal, Refusal::Stale);
    let gremlin = Gremlin::start(|url| vec![queues(url, 1), answer(200, "text/html", "<html>?</html>")]).await;
    assert_eq!(discreet(opened(&gremlin).await.delete(&received("i", "r")).await).refusal, RETRY);
}

#[tokio::test]
async fn a_delete_after_url_renewal_uses_the_new_url_and_the_old_receipt() {
    let script = |url: &str| {
        vec![
            queues_by(url, 1, "k1"),
            storage_error(403, "AuthenticationFailed"),
            queues_by(url, 1, "k2"),
            answer(204, "", ""),
        ]
    };
    let gremlin = Gremlin::start(script).await;
    let source = opened(&gremlin).await;
    assert_eq!(discreet(source.delete(&received("i", "r+")).await).refusal, Refusal::Stale);
    source.open().await.expect("the queues are found again");
    source.delete(&received("i", "r+")).await.expect("it is deleted");
    let lines: Vec<_> = gremlin.asked().into_iter().map(|asked| asked.line).collect();
    assert!(lines[1].contains("popreceipt=r%2B&") && lines[1].contains("%2Bk1%2F"), "{}", lines[1]);
    assert!(lines[3].contains("popreceipt=r%2B&") && lines[3].contains("%2Bk2%2F"), "{}", lines[3]);
}

#[tokio::test]
async fn urls_of_unknown_hosts_are_rejected() {
    let expires = "2099-01-01T00:00:00Z";
    for elsewhere in [
        "http://169.254.169.254",
        "http://[::ffff:a9fe:a9fe]",
        "http://2852039166",
        "http://example.com",
        "https://queue.core.windows.net.example.com",
        "http://127.0.0.1.example.com",
        "http://user:pw@127.0.0.1",
        "file:///etc",
        "gopher://127.0.0.1",
        "",
    ] {
        let queues = json!({ "queues": [urls(elsewhere, 0, "k")], "expires": expires });
        let gremlin = Gremlin::start(|_| vec![say(200, &queues)]).await;
        let refused = discreet(source(&gremlin.url(), Dialect::Azure).open().await);
        assert_eq!(refused.refusal, RETRY, "{elsewhere}: {refused}");
        assert_eq!(gremlin.asked().len(), 1);
    }
}

#[tokio::test]
async fn azure_hosts_and_configured_hosts_are_accepted() {
    let open = |base: &'static str, hosts: Vec<String>| async move {
        let queues = json!({ "queues": [urls(base, 0, "k")], "expires": "2099-01-01T00:00:00Z" });
        let gremlin = Gremlin::start(|_| vec![say(200, &queues)]).await;
        let mut settings = settings(&gremlin.url(), Dialect::Azure);
        settings.api.allow_hosts = hosts;
        Taskcluster::new(settings).expect("the settings are good").open().await.is_ok()
    };
    assert!(open("https://acc.queue.core.windows.net", Vec::new()).await);
    assert!(open("http://storage.internal:10001", vec!["storage.internal".into()]).await);
    assert!(!open("http://storage.internal:10001", vec![".internal.example".into()]).await);
    assert!(!open("https://queue.example.com", Vec::new()).await);
    // Metadata services are rejected even if configured.
    assert!(!open("http://169.254.169.254", vec!["169.254.169.254".into()]).await);
}

#[tokio::test]
async fn invalid_poll_task_urls_responses_are_retried() {
    let pair = urls("http://127.0.0.1", 0, "k");
    let bare = json!({ "signedPollUrl": "http://127.0.0.1/q?s", "signedDeleteUrl": "http://127.0.0.1/q?s" });
    let far = "2099-01-01T00:00:00Z";
    for body in [
        json!({ "queues": [], "expires": far }),
        json!({ "queues": vec![pair.clone(); 65], "expires": far }),
        json!({ "queues": [pair], "expires": "2001-01-01T00:00:00Z" }),
        json!({ "queues": [bare], "expires": far }),
        json!({ "expires": far }),
    ] {
        let gremlin = Gremlin::start(|_| vec![say(200, &body)]).await;
        let refused = discreet(source(&gremlin.url(), Dialect::Azure).open().await);
        assert_eq!(refused.refusal, RETRY, "{refused}");
    }
}

#[tokio::test]
async fn the_azure_dialect_needs_no_recovery() {
    let source = source("http://127.0.0.1:1", Dialect::Azure);
    assert!(source.recover(&[], None).await.expect("no call is made").grants.is_empty());
}
