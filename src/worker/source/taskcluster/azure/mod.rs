//! The polling half of the Azure dialect: signed URLs, receiving and deleting messages.

mod signed_url;
mod xml;

use std::time::Duration;

use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use base64::{Engine as _, alphabet};
use jiff::Timestamp;
use reqwest::Method;
use serde::Deserialize;
use url::Url;

use super::Taskcluster;
use super::error_response::{ErrorResponse, sanitize, transport_error};
use super::transport::{ApiRequest, read_body, read_error_response};
use crate::source::{CallError, Message, OpenResult, PollBatch};
use crate::task::formats::is_slugid;
use journeyman_domain::id::{PriorityQueue, Run, TaskId};
use journeyman_domain::limits::{
    POLL_BODY_BYTES_MAX, POLL_MESSAGES_MAX, PRIORITY_QUEUES_MAX, SIGNED_URL_RENEWAL_MARGIN,
};
use journeyman_domain::refusal::Refusal;
use journeyman_platform::http::address::host_matches;
use signed_url::SignedUrls;
use xml::RawMessage;

/// Azure Queue Storage. Its hosts must have public addresses.
const QUEUE_HOSTS: [&str; 3] =
    [".queue.core.windows.net", ".queue.core.usgovcloudapi.net", ".queue.core.chinacloudapi.cn"];

/// Standard base64; padding may be missing.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Highest priority first.
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

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireMessage {
    task_id: String,
    run_id: u32,
}

impl Taskcluster {
    pub(super) async fn poll_task_urls(&self) -> Result<OpenResult, CallError> {
        let operation = format!("pollTaskUrls of {}", self.service.task_queue);
        let (provisioner, worker_type) = self.service.task_queue.split_once('/').unwrap_or_default();
        let path = format!("/poll-task-url/{}/{}", urlencoding::encode(provisioner), urlencoding::encode(worker_type));
        let call = ApiRequest::to_queue(operation.clone(), Method::GET, path);
        let reply = self.service.api.call(call).await?;
        let date = reply.date_or_now();
        let WireQueues { queues, expires } = reply.json()?;
        let count = u16::try_from(queues.len()).unwrap_or(u16::MAX);
        if count == 0 || usize::from(count) > PRIORITY_QUEUES_MAX {
            return Err(CallError::retry(format!(
                "{operation}: received {count} queues; expected 1 to {PRIORITY_QUEUES_MAX}"
            )));
        }
        let usable_for = url_lifetime(expires, date)
            .ok_or_else(|| CallError::retry(format!("{operation}: the signed URLs have already expired")))?;
        let mut signed = Vec::with_capacity(queues.len());
        for (index, queue) in queues.into_iter().enumerate() {
            let queue = SignedUrls::new(queue.signed_poll_url, queue.signed_delete_url)
                .and_then(|queue| self.check_queue_hosts(&queue).map(|()| queue))
                .map_err(|what| CallError::retry(format!("{operation}: queue {index}: {what}")))?;
            signed.push(queue);
        }
        self.signed_queues.store(SignedQueues(signed));
        Ok(OpenResult { priority_queues: count, usable_for: Some(usable_for) })
    }

    pub(super) async fn receive_messages(&self, queue: PriorityQueue, max: u8) -> Result<PollBatch, CallError> {
        let operation = format!("poll of {} at priority {}", self.service.task_queue, queue.0);
        let max = max.clamp(1, POLL_MESSAGES_MAX);
        let signed = self.signed_queues.load();
        let url = signed_urls(&signed, queue, &operation)?
            .poll(max)
            .map_err(|what| CallError::new(Refusal::Stale, format!("{operation}: its URL {what}")))?;
        let response = self.send_to_storage(&operation, Method::GET, url).await?;
        if response.status().as_u16() != 200 {
            let answered = read_error_response(response).await;
            return Err(classify_storage_error(&operation, &answered));
        }
        let body = read_body(&operation, response, POLL_BODY_BYTES_MAX).await?;
        let unreadable = |what: String| {
            CallError::retry(format!("{operation}: invalid response: {what}; is there a proxy in between?"))
        };
        let body = String::from_utf8(body).map_err(|_| unreadable("it is not UTF-8".into()))?;
        let mut messages = xml::parse_messages(&body).map_err(unreadable)?;
        // Surplus messages have no slot; they reappear after their visibility timeout.
        messages.truncate(usize::from(max));
        Ok(poll_batch(queue, messages))
    }

    pub(super) async fn delete_message(&self, message: &Message) -> Result<(), CallError> {
        let Message { queue, id, receipt, .. } = message;
        let operation =
            format!("delete of message {} of {} at priority {}", sanitize(id), self.service.task_queue, queue.0);
        let signed = self.signed_queues.load();
        let url = signed_urls(&signed, *queue, &operation)?
            .delete(id, receipt)
            .map_err(|what| CallError::new(Refusal::Rejected, format!("{operation}: its URL {what}")))?;
        let response = self.send_to_storage(&operation, Method::DELETE, url).await?;
        let is_deleted = response.status().is_success();
        let answered = read_error_response(response).await;
        // An HTML page comes from a proxy, which has deleted nothing.
        let is_page = answered.content_type.contains("html");
        if is_deleted && is_page {
            return Err(CallError::retry(format!(
                "{operation}: response is an HTML page, not from the storage service"
            )));
        }
        if is_deleted || (answered.status == 404 && !is_page) {
            return Ok(());
        }
        Err(classify_storage_error(&operation, &answered))
    }

    async fn send_to_storage(&self, operation: &str, method: Method, url: Url) -> Result<reqwest::Response, CallError> {
        self.service
            .api
            .0
            .http
            .request(method, url)
            .timeout(self.service.api.0.timeouts.call)
            .send()
            .await
            .map_err(|error| transport_error(operation, error))
    }

    fn check_queue_hosts(&self, queue: &SignedUrls) -> Result<(), String> {
        for url in queue.target_urls()? {
            let policy = &self.service.api.0.address_policy;
            let host = url.host_str().unwrap_or_default();
            if !policy.is_trusted(host) && !QUEUE_HOSTS.iter().any(|allowed| host_matches(host, allowed)) {
                return Err(format!(
                    "a URL leads to {host}; to allow it, set allow_hosts = [\"{host}\"] for this source"
                ));
            }
            policy.check_url(&url).map_err(|what| format!("a URL {what}"))?;
        }
        Ok(())
    }
}

/// Until 5 minutes before they expire by the service's clock, or half their lifetime if that is longer.
fn url_lifetime(expires: Timestamp, date: Timestamp) -> Option<Duration> {
    let life = Duration::try_from(expires.duration_since(date)).ok()?;
    let used = life.saturating_sub(SIGNED_URL_RENEWAL_MARGIN).max(life / 2);
    (!used.is_zero()).then_some(used)
}

fn signed_urls<'a>(
    signed: &'a SignedQueues,
    queue: PriorityQueue,
    operation: &str,
) -> Result<&'a SignedUrls, CallError> {
    signed
        .0
        .get(usize::from(queue.0))
        .ok_or_else(|| CallError::new(Refusal::Stale, format!("{operation}: no signed URL for this queue")))
}

fn classify_storage_error(operation: &str, answered: &ErrorResponse) -> CallError {
    let ErrorResponse { status, retry_after, .. } = *answered;
    let refusal = match status {
        401 | 403 | 404 => Refusal::Stale,
        429 => Refusal::Throttled { retry_after },
        408 => Refusal::Retry { retry_after },
        400..=499 => Refusal::Rejected,
        _ => Refusal::Retry { retry_after },
    };
    let detail = std::str::from_utf8(&answered.body).ok().and_then(xml::parse_error).map(|error| {
        // The lines after the first are ids and, for an invalid signature, the signed string.
        let line = error.message.lines().next().unwrap_or_default();
        format!(" {}: {}", sanitize(&error.code), sanitize(line))
    });
    let detail = match detail {
        Some(detail) => detail,
        None if (300..400).contains(&status) => ", a redirect, which is not followed".into(),
        None => String::new(),
    };
    CallError::new(refusal, format!("{operation}: {status}{detail}"))
}

fn poll_batch(queue: PriorityQueue, messages: Vec<RawMessage>) -> PollBatch {
    let read = |message: RawMessage| {
        let dequeue_count = message.dequeue_count.trim().parse::<u64>().unwrap_or(1);
        Message {
            queue,
            id: message.id.as_str().into(),
            receipt: message.receipt.as_str().into(),
            dequeue_count: u32::try_from(dequeue_count).unwrap_or(u32::MAX),
            run: decode_message(&message).map_err(str::to_owned),
        }
    };
    PollBatch { messages: messages.into_iter().map(read).collect(), grants: Vec::new() }
}

fn decode_message(message: &RawMessage) -> Result<Run, &'static str> {
    if message.id.is_empty() || message.receipt.is_empty() {
        return Err("missing MessageId or PopReceipt");
    }
    let mut text = message.text.clone();
    text.retain(|character| !character.is_ascii_whitespace());
    let json = BASE64.decode(text).map_err(|_| "text is not base64")?;
    let named: WireMessage = serde_json::from_slice(&json).map_err(|_| "text is not JSON with taskId and runId")?;
    // claimTask rejects any other id with 400, which would look like a configuration error.
    let slugid = is_slugid(&named.task_id).then_some(&named.task_id);
    let task = slugid.and_then(|id| TaskId::parse(id)).ok_or("taskId is not a slugid")?;
    Ok(Run { task, run: named.run_id })
}

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

#[cfg(any(test, fuzzing))]
pub(super) fn fuzz_poll_response(document: &str) {
    match xml::parse_messages(document) {
        Ok(messages) => {
            let found = messages.len();
            let batch = poll_batch(PriorityQueue(0), messages);
            assert!(found <= usize::from(POLL_MESSAGES_MAX) && batch.messages.len() == found);
        }
        Err(what) => assert!(!what.is_empty()),
    }
    let answered = ErrorResponse { status: 403, retry_after: None, content_type: String::new(), body: document.into() };
    let detail = classify_storage_error("op", &answered).message;
    assert!(!detail.contains(['\n', '\r', '\u{1b}']), "{detail:?}");
}

#[cfg(any(test, fuzzing))]
pub(super) fn fuzz_message_text(text: &str) {
    let message = |text| RawMessage { id: "i".into(), receipt: "r".into(), dequeue_count: "1".into(), text };
    let encoded = base64::engine::general_purpose::STANDARD.encode(text);
    for text in [text.to_owned(), encoded] {
        if let Ok(run) = decode_message(&message(text)) {
            assert!(is_slugid(run.task.as_str()));
        }
    }
}

#[cfg(any(test, fuzzing))]
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

#[cfg(test)]
mod tests {
    use super::*;
    use base64::engine::general_purpose::STANDARD;

    fn raw(text: &str) -> RawMessage {
        RawMessage { id: "i".into(), receipt: "r".into(), dequeue_count: "1".into(), text: text.into() }
    }

    fn detail(json: &str) -> Result<String, &'static str> {
        decode_message(&raw(&STANDARD.encode(json))).map(|run| run.to_string())
    }

    #[test]
    fn message_texts_are_decoded_tolerantly() {
        assert_eq!(detail(r#"{"taskId":"S2NL7euHSXSb2_FRd4pI_g","runId":3}"#), Ok("S2NL7euHSXSb2_FRd4pI_g/3".into()));
        assert_eq!(
            detail(r#"{"new":[{}],"runId":0,"hintId":"h","taskId":"S2NL7euHSXSb2_FRd4pI_g"}"#),
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
        let readable: Vec<bool> = batch.messages.iter().map(|message| message.run.is_ok()).collect();
        assert_eq!(readable, (0..bad.len() + 2).map(|index| index == 4).collect::<Vec<_>>());
        assert!(batch.messages.iter().all(|message| message.queue == PriorityQueue(2)));
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
