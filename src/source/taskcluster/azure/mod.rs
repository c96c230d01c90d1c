//! The poll half of the Azure-style dialect: finding the queues, receiving messages, deleting them.

mod signed_url;
mod xml;

use std::time::Duration;

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use jiff::Timestamp;
use reqwest::Method;
use serde::Deserialize;
use url::Url;

use super::Taskcluster;
use super::address_policy::host_matches;
use super::error_response::{ErrorResponse, call_error, retryable, sanitize, transport_error};
use super::transport::{ApiRequest, encode_segment, read_body, read_error_response};
use crate::domain::id::{PriorityQueue, Run, TaskId};
use crate::domain::refusal::Refusal;
use crate::limits::{POLL_BODY_BYTES_MAX, POLL_MESSAGES_MAX, PRIORITY_QUEUES_MAX, SIGNED_URL_RENEWAL_MARGIN};
use crate::source::{CallError, Message, OpenResult, PollBatch, UnreadableMessage};
use signed_url::SignedUrls;
use xml::RawMessage;

/// Hosts that signed queue URLs may lead to besides the deployment's own: Azure Queue Storage.
pub(super) const QUEUE_HOSTS: [&str; 3] =
    [".queue.core.windows.net", ".queue.core.usgovcloudapi.net", ".queue.core.chinacloudapi.cn"];

/// Standard base64; padding may be missing.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// The queues of a worker type, highest priority first.
#[derive(Default)]
pub(super) struct SignedQueues(Vec<SignedUrls>);

#[derive(Deserialize)]
pub(super) struct WireQueues {
    queues: Vec<WireQueue>,
    expires: Timestamp,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireQueue {
    signed_poll_url: String,
    signed_delete_url: String,
}

/// What a message's text says. Other keys are of no concern.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireMessage {
    task_id: String,
    run_id: u32,
}

impl Taskcluster {
    /// pollTaskUrls: the queues in the order in which they are to be polled.
    pub(super) async fn poll_task_urls(&self) -> Result<OpenResult, CallError> {
        let operation = format!("pollTaskUrls of {}", self.task_queue);
        let (provisioner, worker_type) = self.split_task_queue();
        let path = format!("/poll-task-url/{}/{}", encode_segment(provisioner), encode_segment(worker_type));
        let call = ApiRequest::to_queue(operation.clone(), Method::GET, path);
        let reply = self.api.call(call).await?;
        let date = reply.date_or_now();
        let WireQueues { queues, expires } = reply.json()?;
        let count = u16::try_from(queues.len()).unwrap_or(u16::MAX);
        if count == 0 || usize::from(count) > PRIORITY_QUEUES_MAX {
            return Err(retryable(format!(
                "{operation}: {count} queues came, and 1 to {PRIORITY_QUEUES_MAX} can be polled"
            )));
        }
        let usable_for = url_lifetime(expires, date)
            .ok_or_else(|| retryable(format!("{operation}: the URLs are over already, by the service's own clock")))?;
        let mut lanes = Vec::with_capacity(queues.len());
        for (place, queue) in queues.into_iter().enumerate() {
            let lane = SignedUrls::new(queue.signed_poll_url, queue.signed_delete_url)
                .and_then(|lane| self.check_queue_hosts(&lane).map(|()| lane))
                .map_err(|what| retryable(format!("{operation}: of queue {place}, {what}")))?;
            lanes.push(lane);
        }
        self.signed_queues.store(SignedQueues(lanes));
        Ok(OpenResult { priority_queues: count, usable_for: Some(usable_for) })
    }

    /// Receives at most `max` messages.
    pub(super) async fn receive_messages(&self, lane: PriorityQueue, max: u8) -> Result<PollBatch, CallError> {
        let operation = format!("poll of {} at priority {}", self.task_queue, lane.0);
        let max = max.clamp(1, POLL_MESSAGES_MAX);
        let lanes = self.signed_queues.load();
        let url = signed_urls(&lanes, lane, &operation)?
            .poll(max)
            .map_err(|what| call_error(Refusal::Stale, format!("{operation}: its URL {what}")))?;
        let response = self.send_to_storage(&operation, Method::GET, url).await?;
        if response.status().as_u16() != 200 {
            let answered = read_error_response(response).await;
            return Err(classify_storage_error(&operation, &answered));
        }
        let body = read_body(&operation, response, POLL_BODY_BYTES_MAX).await?;
        let unreadable = |what: String| {
            retryable(format!("{operation}: the answer cannot be read: {what}; is there a proxy in between?"))
        };
        let body = String::from_utf8(body).map_err(|_| unreadable("it is not UTF-8".into()))?;
        let mut messages = xml::parse_messages(&body).map_err(unreadable)?;
        // What was not asked for has no slot; it comes back by itself.
        messages.truncate(usize::from(max));
        Ok(poll_batch(lane, messages))
    }

    /// Deletes one reception of a message.
    pub(super) async fn delete_message(&self, lane: PriorityQueue, id: &str, receipt: &str) -> Result<(), CallError> {
        let operation = format!("delete of message {} of {} at priority {}", sanitize(id), self.task_queue, lane.0);
        let lanes = self.signed_queues.load();
        let url = signed_urls(&lanes, lane, &operation)?
            .delete(id, receipt)
            .map_err(|what| call_error(Refusal::Rejected, format!("{operation}: its URL {what}")))?;
        let response = self.send_to_storage(&operation, Method::DELETE, url).await?;
        let is_deleted = response.status().is_success();
        let answered = read_error_response(response).await;
        // A page for people is of somebody on the way, who has deleted nothing.
        let is_page = answered.content_type.contains("html");
        if is_deleted && is_page {
            return Err(retryable(format!("{operation}: the answer is a page for people and not the storage's")));
        }
        if is_deleted || (answered.status == 404 && !is_page) {
            return Ok(());
        }
        Err(classify_storage_error(&operation, &answered))
    }

    async fn send_to_storage(&self, operation: &str, method: Method, url: Url) -> Result<reqwest::Response, CallError> {
        self.api
            .http()
            .request(method, url)
            .timeout(self.api.timeouts().call)
            .send()
            .await
            .map_err(|error| transport_error(operation, error))
    }

    fn split_task_queue(&self) -> (&str, &str) {
        self.task_queue.split_once('/').unwrap_or_default()
    }

    /// Whether a queue's URLs lead to where a queue may be.
    fn check_queue_hosts(&self, lane: &SignedUrls) -> Result<(), String> {
        for url in lane.target_urls()? {
            let reach = self.api.address_policy();
            let host = url.host_str().unwrap_or_default();
            let named = self.queue_hosts.iter().any(|allowed| host_matches(host, allowed));
            if !named && !reach.is_configured_host(host) {
                return Err(format!(
                    "a URL leads to {host}, which is neither the deployment's host nor one of queue_hosts; \
                     add it there if it is right"
                ));
            }
            reach.check_url(&url).map_err(|what| format!("a URL {what}"))?;
        }
        Ok(())
    }
}

/// How long signed URLs are used: until 5 minutes before they end, by the service's clock; half their life where that is short.
fn url_lifetime(expires: Timestamp, date: Timestamp) -> Option<Duration> {
    let life = Duration::try_from(expires.duration_since(date)).ok()?;
    let used = life.saturating_sub(SIGNED_URL_RENEWAL_MARGIN).max(life / 2);
    (!used.is_zero()).then_some(used)
}

fn signed_urls<'a>(lanes: &'a SignedQueues, lane: PriorityQueue, operation: &str) -> Result<&'a SignedUrls, CallError> {
    lanes
        .0
        .get(usize::from(lane.0))
        .ok_or_else(|| call_error(Refusal::Stale, format!("{operation}: there is no such queue at present")))
}

/// Classifies an answer of the queue storage.
fn classify_storage_error(operation: &str, answered: &ErrorResponse) -> CallError {
    let ErrorResponse { status, retry_after: after, .. } = *answered;
    let refusal = match status {
        401 | 403 | 404 => Refusal::Stale,
        429 => Refusal::Throttled { retry_after: after },
        408 => Refusal::Retry { retry_after: after },
        400..=499 => Refusal::Rejected,
        _ => Refusal::Retry { retry_after: after },
    };
    let said = std::str::from_utf8(&answered.body).ok().and_then(xml::parse_error).map(|error| {
        // What follows the first line are ids and, for a bad signature, what was signed.
        let line = error.message.lines().next().unwrap_or_default();
        format!(" {}: {}", sanitize(&error.code), sanitize(line))
    });
    let said = match said {
        Some(said) => said,
        None if (300..400).contains(&status) => ", a redirect, which is never followed".into(),
        None => String::new(),
    };
    call_error(refusal, format!("{operation}: {status}{said}"))
}

fn poll_batch(lane: PriorityQueue, messages: Vec<RawMessage>) -> PollBatch {
    let mut batch = PollBatch::default();
    for message in messages {
        let id = message.id.as_str().into();
        let receipt = message.receipt.as_str().into();
        let dequeue_count = message.dequeue_count.trim().parse::<u64>().unwrap_or(1);
        let dequeue_count = u32::try_from(dequeue_count).unwrap_or(u32::MAX);
        match decode_message(&message) {
            Ok(run) => batch.messages.push(Message { queue: lane, id, receipt, dequeue_count, run }),
            Err(what) => batch.unreadable.push(UnreadableMessage {
                queue: lane,
                id,
                receipt,
                dequeue_count,
                reason: what.into(),
            }),
        }
    }
    batch
}

fn decode_message(message: &RawMessage) -> Result<Run, &'static str> {
    if message.id.is_empty() || message.receipt.is_empty() {
        return Err("it has no MessageId or no PopReceipt");
    }
    let mut text = message.text.clone();
    text.retain(|character| !character.is_ascii_whitespace());
    let json = BASE64.decode(text).map_err(|_| "its text is not base64")?;
    let named: WireMessage = serde_json::from_slice(&json).map_err(|_| "its text is not JSON with taskId and runId")?;
    // claimTask answers 400 to any other, which would read as a fault of our own configuration.
    let slugid = is_slugid(&named.task_id).then_some(&named.task_id);
    let task = slugid.and_then(|id| TaskId::parse(id)).ok_or("its taskId is no slugid")?;
    Ok(Run { task, run: named.run_id })
}

/// Whether the service takes this for a task id: a UUID of version 4 in URL-safe base64.
fn is_slugid(text: &str) -> bool {
    let bytes = text.as_bytes();
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    bytes.len() == 22
        && bytes.iter().all(plain)
        && matches!(bytes[8], b'Q'..=b'T')
        && b"CGKOSWaeimquy26-".contains(&bytes[10])
        && b"AQgw".contains(&bytes[21])
}

/// See [`super::fuzz_targets`].
pub(super) fn fuzz_poll_response(document: &str) {
    match xml::parse_messages(document) {
        Ok(messages) => {
            let found = messages.len();
            let batch = poll_batch(PriorityQueue(0), messages);
            assert!(found <= usize::from(POLL_MESSAGES_MAX) && batch.messages.len() + batch.unreadable.len() == found);
        }
        Err(what) => assert!(!what.is_empty()),
    }
    let answered = ErrorResponse { status: 403, retry_after: None, content_type: String::new(), body: document.into() };
    let said = classify_storage_error("op", &answered).message;
    assert!(!said.contains(['\n', '\r', '\u{1b}']), "{said:?}");
}

/// See [`super::fuzz_targets`].
pub(super) fn fuzz_message_text(text: &str) {
    let message = |text| RawMessage { id: "i".into(), receipt: "r".into(), dequeue_count: "1".into(), text };
    let encoded = base64::engine::general_purpose::STANDARD.encode(text);
    for text in [text.to_owned(), encoded] {
        if let Ok(run) = decode_message(&message(text)) {
            assert!(is_slugid(run.task.as_str()));
        }
    }
}

/// See [`super::fuzz_targets`].
pub(super) fn fuzz_signed_url(poll: &str, delete: &str, id: &str, receipt: &str) {
    let Ok(signed) = SignedUrls::new(poll.to_owned(), delete.to_owned()) else { return };
    let Ok([poll_place, delete_place]) = signed.target_urls() else { return };
    if let Ok(url) = signed.poll(32) {
        assert!(url.origin() == poll_place.origin() && url.path() == poll_place.path());
    }
    if let Ok(url) = signed.delete(id, receipt) {
        assert!(url.origin() == delete_place.origin());
        assert_eq!(url.path().split('/').count(), delete_place.path().split('/').count());
        assert_eq!(url.query_pairs().count(), delete_place.query_pairs().count());
    }
}

/// What the rest of the tests need to read a recorded pollTaskUrls.
#[cfg(test)]
pub(super) fn check_recorded(queues: WireQueues, date: Timestamp) {
    let minutes = url_lifetime(queues.expires, date).map(|life| life.as_secs() / 60);
    assert_eq!(minutes, Some(25));
    assert_eq!(queues.queues.len(), 7);
    for queue in queues.queues {
        let signed = SignedUrls::new(queue.signed_poll_url, queue.signed_delete_url).ok().unwrap();
        assert!(signed.poll(32).is_ok() && signed.delete("id", "re+ce/ipt=").is_ok());
    }
}

/// What a recorded answer of a storage queue is taken for.
#[cfg(test)]
pub(super) fn read_recorded(method: &str, body: &str, answered: &ErrorResponse) -> String {
    match (method, answered.status) {
        (_, 200) => format!("{} messages", count_recorded(body)),
        ("DELETE", 204 | 404) => "deleted".into(),
        _ => {
            let refused = classify_storage_error("op", answered);
            assert!(!refused.message.contains("RequestId") && !refused.message.contains("sig="), "{}", refused.message);
            format!("{:?}", refused.refusal)
        }
    }
}

/// How many messages a recorded list holds.
#[cfg(test)]
pub(super) fn count_recorded(document: &str) -> usize {
    xml::parse_messages(document).unwrap().len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::engine::general_purpose::STANDARD;

    fn raw(text: &str) -> RawMessage {
        RawMessage { id: "i".into(), receipt: "r".into(), dequeue_count: "1".into(), text: text.into() }
    }

    fn said(json: &str) -> Result<String, &'static str> {
        decode_message(&raw(&STANDARD.encode(json))).map(|run| run.to_string())
    }

    #[test]
    fn message_texts_are_decoded_tolerantly() {
        assert_eq!(said(r#"{"taskId":"S2NL7euHSXSb2_FRd4pI_g","runId":3}"#), Ok("S2NL7euHSXSb2_FRd4pI_g/3".into()));
        assert_eq!(
            said(r#"{"new":[{}],"runId":0,"hintId":"h","taskId":"S2NL7euHSXSb2_FRd4pI_g"}"#),
            Ok("S2NL7euHSXSb2_FRd4pI_g/0".into())
        );
        let unpadded = STANDARD.encode(r#"{"taskId":"S2NL7euHSXSb2_FRd4pI_g","runId":0}  "#);
        let unpadded = unpadded.trim_end_matches('=');
        let folded = format!(" {}\r\n{} ", &unpadded[..10], &unpadded[10..]);
        assert!(decode_message(&raw(&folded)).is_ok());
    }

    #[test]
    fn an_undecodable_message_costs_the_batch_nothing() {
        let good = STANDARD.encode(r#"{"taskId":"S2NL7euHSXSb2_FRd4pI_g","runId":0}"#);
        let bad = [
            "%%%".to_owned(),
            String::new(),
            STANDARD.encode("no json"),
            STANDARD.encode("[]"),
            STANDARD.encode(r#"{"taskId":"S2NL7euHSXSb2_FRd4pI_g"}"#),
            STANDARD.encode(r#"{"taskId":"S2NL7euHSXSb2_FRd4pI_g","runId":"0"}"#),
            STANDARD.encode(r#"{"taskId":"S2NL7euHSXSb2_FRd4pI_g","runId":-1}"#),
            STANDARD.encode(r#"{"taskId":"../x","runId":0}"#),
            STANDARD.encode(r#"{"taskId":"no-slugid-but-22-bytes","runId":0}"#),
            STANDARD.encode([0xff, 0xfe]),
        ];
        let mut messages: Vec<_> = bad.iter().map(|text| raw(text)).collect();
        messages.insert(4, raw(&good));
        messages.push(RawMessage { receipt: String::new(), ..raw(&good) });
        let batch = poll_batch(PriorityQueue(2), messages);
        assert_eq!(batch.messages.len(), 1);
        assert_eq!(batch.unreadable.len(), bad.len() + 1);
        assert!(batch.unreadable.iter().all(|entry| entry.queue == PriorityQueue(2)));
    }

    #[test]
    fn dequeue_counts_are_never_a_reason_to_drop_a_message() {
        let count = |text: &str| {
            let message = RawMessage {
                dequeue_count: text.into(),
                ..raw(&STANDARD.encode(r#"{"taskId":"S2NL7euHSXSb2_FRd4pI_g","runId":0}"#))
            };
            poll_batch(PriorityQueue(0), vec![message]).messages[0].dequeue_count
        };
        assert_eq!(count(" 17 "), 17);
        assert_eq!(count("99999999999999"), u32::MAX);
        assert_eq!(count(""), 1);
    }

    #[test]
    fn urls_are_renewed_five_minutes_before_they_end() {
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let life = |expires| url_lifetime(at(expires), at("2026-11-21T10:00:00Z"));
        let minutes = |minutes: u64| Some(Duration::from_secs(minutes * 60));
        assert_eq!(life("2026-11-21T10:30:00.000Z"), minutes(25));
        assert_eq!(life("2026-11-21T10:04:00Z"), minutes(2));
        assert_eq!(life("2026-11-21T10:00:00Z"), None);
        assert_eq!(life("2026-11-21T09:00:00Z"), None);
    }
}
