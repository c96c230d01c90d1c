//! A delivery as a task: reads messages, and makes the properties of copies. Pure.

use std::sync::OnceLock;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use lapin::BasicProperties;
use lapin::message::Delivery;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::task::{Request, RequestMessage};
use journeyman_domain::delivery_attempts::{DeliveryHistory, DeliveryKind};
use journeyman_domain::id::{Run, TASK_ID_BYTES_MAX, TaskId};
use journeyman_domain::limits::IDEMPOTENCY_BODY_BYTES_MAX;
use journeyman_platform::amqp::{delay, headers};
use journeyman_platform::copy_properties;

/// Attempts before this delivery.
pub(super) const ATTEMPTS_HEADER: &str = "x-journeyman-attempts";
/// Set on the copy of a request that was redelivered, or whose service closed the connection.
const REDELIVERED_HEADER: &str = "x-journeyman-redelivered";
/// The delivery count of a quorum queue.
const DELIVERY_COUNT_HEADER: &str = "x-delivery-count";
/// How often a quorum queue of RabbitMQ 4.3 has delivered it: also what was requeued by a consumer timeout, which is not a delivery there.
const ACQUIRED_COUNT_HEADER: &str = "x-acquired-count";
/// Headers that a copy does not keep. By the first two the broker would route it to other queues too.
const DROPPED_HEADERS: [&str; 5] = ["CC", "BCC", DELIVERY_COUNT_HEADER, ACQUIRED_COUNT_HEADER, REDELIVERED_HEADER];

/// The record of staged work, as JSON.
pub(super) const RECORD_HEADER: &str = "jm-work";
/// The key of staged work.
pub(super) const KEY_HEADER: &str = "jm-task";
/// Headers that handlers do not see: a request looks the same at each look.
const CHECK_HEADERS: [&str; 3] = [RECORD_HEADER, KEY_HEADER, delay::NOT_BEFORE];

/// What a handler gets of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PayloadForm {
    /// The whole request as a [`Request`].
    Whole,
    /// The body as JSON, for handlers with a schema of their own.
    Body,
}

pub(super) fn attempt_history(delivery: &Delivery) -> DeliveryHistory {
    let empty = FieldTable::default();
    let table = delivery.properties.headers().as_ref().unwrap_or(&empty);
    let count = |name| headers::number(table, name).map(|count| u32::try_from(count).unwrap_or(u32::MAX));
    let arrival = if delivery.redelivered { DeliveryKind::Redelivered } else { DeliveryKind::First };
    let is_copy = table.inner().get(REDELIVERED_HEADER) == Some(&AMQPValue::Boolean(true));
    DeliveryHistory {
        header_count: count(ATTEMPTS_HEADER),
        broker_count: count(DELIVERY_COUNT_HEADER).max(count(ACQUIRED_COUNT_HEADER)),
        kind: arrival,
        original: if is_copy { DeliveryKind::Redelivered } else { DeliveryKind::First },
    }
}

/// The message's `expiration`, counted from when it was received.
pub(super) fn message_ttl(properties: &BasicProperties) -> Option<Duration> {
    let text = properties.expiration().as_ref()?;
    text.as_str().trim().parse().ok().map(Duration::from_millis)
}

/// The properties of a copy that replaces a message, with `attempts` recorded and `held` subtracted from its time to live.
pub(super) fn republish_properties(properties: &BasicProperties, attempts: u32, held: Duration) -> BasicProperties {
    let copy = copy_properties(properties, attempts);
    match message_ttl(properties) {
        // At 0 the broker would drop the copy, and the client would get no reply.
        Some(ttl) => {
            let remaining = ttl.saturating_sub(held).as_millis().max(1).to_string();
            copy.with_expiration(remaining.as_str().into())
        }
        None => copy,
    }
}

/// Records in a copy that the original may have ended its worker or its service.
pub(super) fn mark_redelivered(copy: BasicProperties) -> BasicProperties {
    let mut headers = copy.headers().clone().unwrap_or_default();
    headers.insert(REDELIVERED_HEADER.into(), AMQPValue::Boolean(true));
    copy.with_headers(headers)
}

/// The properties of a copy that does not expire.
pub(super) fn copy_properties(properties: &BasicProperties, attempts: u32) -> BasicProperties {
    let original = properties.headers().clone().unwrap_or_default();
    let mut headers = FieldTable::default();
    for (name, value) in original.inner() {
        if !DROPPED_HEADERS.contains(&name.as_str()) {
            headers.insert(name.clone(), value.clone());
        }
    }
    headers.insert(ATTEMPTS_HEADER.into(), AMQPValue::LongUInt(attempts));
    // The broker closes the channel over a user id that is not ours.
    let copy = BasicProperties::default().with_headers(headers);
    copy_properties!(properties => copy, delivery_mode with_delivery_mode, priority with_priority)
}

/// The run id of a delivery: its correlation id as far as that is a task id, and a number that is unique in this process, since
/// clients may reuse correlation ids and the broker may redeliver.
pub(super) fn run_id(properties: &BasicProperties, number: u64, attempt: u32) -> Run {
    let id = properties.correlation_id().as_ref().map_or("", |id| id.as_str());
    let clean: String = id.chars().filter(|char| char.is_ascii_graphic() && *char != '/').collect();
    let clean = clean.trim_start_matches('.');
    let name_part = if clean.is_empty() { "request" } else { clean };
    let number = format!(".{number}");
    let max_bytes = TASK_ID_BYTES_MAX - number.len();
    let name = format!("{}{number}", &name_part[..name_part.len().min(max_bytes)]);
    Run { task: TaskId::parse(&name).unwrap_or_else(|| fallback_task_id(&number)), run: attempt }
}

#[expect(clippy::expect_used, reason = "letters, a dot and digits are a task id")]
fn fallback_task_id(number: &str) -> TaskId {
    TaskId::parse(&format!("request{number}")).expect("letters, a dot and digits are a task id")
}

/// The same for every delivery of a request, and different for every other request: a digest of the message id, or of the reply
/// address with the correlation id; `None` where the request has neither. The body counts too, since a client may restart its
/// numbering.
fn idempotency_key(properties: &BasicProperties, body: &[u8]) -> Option<String> {
    let [message, reply_to, correlation] =
        [properties.message_id(), properties.reply_to(), properties.correlation_id()]
            .map(|text| text.as_ref().map_or("", ShortString::as_str));
    let names = match (message, correlation) {
        ("", "") => return None,
        ("", _) => ["reply", reply_to, correlation],
        _ => ["message", "", message],
    };
    let mut digest = Sha256::new();
    // The routing key does not count: copies are published under another one.
    for part in names {
        digest.update(part.len().to_be_bytes());
        digest.update(part);
    }
    digest.update(properties.timestamp().unwrap_or_default().to_be_bytes());
    digest.update(body.len().to_be_bytes());
    digest.update(&body[..body.len().min(IDEMPOTENCY_BODY_BYTES_MAX)]);
    Some(URL_SAFE_NO_PAD.encode(digest.finalize()))
}

/// A delivery whose body handlers share.
pub(super) struct ReceivedRequest {
    /// Without its body.
    pub(super) delivery: Delivery,
    pub(super) body: Bytes,
    form: PayloadForm,
    work_key: OnceLock<String>,
}

impl ReceivedRequest {
    /// `work_key` is the one that the message says.
    pub(super) fn new(mut delivery: Delivery, form: PayloadForm, work_key: Option<String>) -> Self {
        let work_key = work_key.map_or_else(OnceLock::new, OnceLock::from);
        Self { body: std::mem::take(&mut delivery.data).into(), delivery, form, work_key }
    }

    /// The same at each delivery of the request, unless it is redelivered and has no ids.
    pub(super) fn work_key(&self) -> &str {
        let none = || uuid::Uuid::new_v4().simple().to_string();
        self.work_key.get_or_init(|| self.idempotency_key().unwrap_or_else(none))
    }

    fn header(&self, name: &str) -> Option<&str> {
        headers::text(self.delivery.properties.headers().as_ref()?, name)
    }

    /// The request without its idempotency key, whose hash costs time.
    fn read(&self) -> Request {
        let properties = &self.delivery.properties;
        let text = |text: &Option<ShortString>| text.as_ref().map(|text| text.as_str().to_owned());
        let headers = properties.headers().iter().flat_map(headers::text_entries);
        let headers = headers.filter(|(name, _)| !CHECK_HEADERS.contains(name));
        Request {
            path: self.header(headers::PATH).map(ToOwned::to_owned),
            routing_key: self.delivery.routing_key.as_str().to_owned(),
            correlation_id: text(properties.correlation_id()),
            content_type: text(properties.content_type()),
            content_encoding: text(properties.content_encoding()),
            seconds_left: message_ttl(properties).map(|span| span.as_secs_f64()),
            headers: headers.map(|(name, text)| (name.to_owned(), text.into_owned())).collect(),
            body: self.body.clone(),
            ..Request::default()
        }
    }
}

impl RequestMessage for ReceivedRequest {
    fn request(&self) -> Option<Request> {
        (self.form == PayloadForm::Whole).then(|| self.read())
    }

    fn idempotency_key(&self) -> Option<String> {
        idempotency_key(&self.delivery.properties, &self.body)
    }

    fn definition(&self) -> Value {
        let request = Request { idempotency_key: self.idempotency_key().into(), ..self.read() };
        let traces = ["traceparent", "tracestate"].into_iter();
        let mut extra: Value = traces.filter_map(|name| Some((name, request.headers.get(name)?.as_str()))).collect();
        let payload = match self.form {
            PayloadForm::Whole => request.into_value(),
            // A body that is not JSON becomes null, which no schema accepts.
            PayloadForm::Body => {
                let mut head = Request { body: Bytes::new(), ..request }.into_value();
                head.as_object_mut().map(|head| head.remove("body"));
                extra["request"] = head;
                serde_json::from_slice(&self.body).unwrap_or_default()
            }
        };
        json!({ "payload": payload, "extra": extra })
    }

    fn traceparent(&self) -> Option<String> {
        self.header("traceparent").map(str::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use journeyman_domain::delivery_attempts::{AttemptAction, Republishing};

    /// A message that `fixtures/amqp` recorded.
    fn recorded(text: &str) -> Delivery {
        let recorded: Value = serde_json::from_str(text).unwrap();
        let body = recorded["body"].as_str().unwrap().as_bytes().to_vec();
        let key = recorded["routing_key"].as_str().unwrap();
        let mut delivery = Delivery::mock(1, recorded["exchange"].as_str().unwrap().into(), key.into(), false, body);
        let mut table = FieldTable::default();
        for (name, header) in recorded["properties"]["headers"].as_object().unwrap() {
            let text = header["value"].as_str().unwrap_or_default();
            let value = match header["amqp_type"].as_str().unwrap() {
                "x (byte array)" => AMQPValue::ByteArray(text.as_bytes().to_vec().into()),
                "S (long string)" => AMQPValue::LongString(text.into()),
                _ => AMQPValue::Void,
            };
            table.insert(name.as_str().into(), value);
        }
        let property = |name: &str| recorded["properties"][name].as_str().unwrap_or_default().into();
        delivery.properties = BasicProperties::default()
            .with_headers(table)
            .with_correlation_id(property("correlation_id"))
            .with_reply_to(property("reply_to"));
        delivery
    }

    fn task_definition(delivery: Delivery, form: PayloadForm) -> Value {
        ReceivedRequest::new(delivery, form, None).definition()
    }

    #[test]
    fn recorded_requests_become_tasks() {
        for (text, id) in [
            (
                include_str!("../../../../fixtures/amqp/request-warm-as-seen-by-worker.json"),
                "f449c2b8-9ccc-418f-8b0d-c0446cb8db76",
            ),
            (
                include_str!("../../../../fixtures/amqp/request-cold-as-seen-by-worker.json"),
                "e3435b68-0f14-40a8-8c83-f391d9e20fae",
            ),
        ] {
            let delivery = recorded(text);
            let definition = task_definition(recorded(text), PayloadForm::Whole);
            let request: Request = serde_json::from_value(definition["payload"].clone()).unwrap();
            assert_eq!((request.path.as_deref(), request.routing_key.as_str()), (Some("/echo"), "42"));
            assert_eq!((request.json().ok(), request.correlation_id.as_deref()), (Some(json!({"x": 1})), Some(id)));
            assert_eq!(
                attempt_history(&delivery).next_action(NonZeroU32::new(3), Republishing::Accepted),
                AttemptAction::Try { attempt: 0 }
            );
            assert_eq!(run_id(&delivery.properties, 7, 0).to_string(), format!("{id}.7/0"));
            assert_eq!(task_definition(recorded(text), PayloadForm::Body)["payload"], json!({"x": 1}));
        }
    }

    #[test]
    fn a_request_published_by_the_client_brings_its_trace() {
        let delivery = recorded(include_str!("../../../../fixtures/amqp/request-as-published-by-client.json"));
        let request = ReceivedRequest::new(delivery, PayloadForm::Whole, None);
        let trace = "<W3C trace context, injected by editoast>";
        assert_eq!(request.traceparent().as_deref(), Some(trace));
        assert_eq!(request.definition()["extra"]["traceparent"], json!(trace));
    }

    #[test]
    fn the_idempotency_key_is_equal_for_redeliveries_and_differs_for_other_requests() {
        let with = |message: &str, reply: &str, correlation: &str, body: &str, again: bool| {
            let mut delivery = Delivery::mock(1, "".into(), "k".into(), again, body.as_bytes().to_vec());
            let properties = BasicProperties::default().with_reply_to(reply.into());
            let properties = properties.with_correlation_id(correlation.into());
            delivery.properties = properties.with_message_id(message.into());
            if again {
                delivery.properties = republish_properties(&delivery.properties, 1, Duration::ZERO);
            }
            idempotency_key(&delivery.properties, &delivery.data)
        };
        let first = with("", "there", "1", "{}", false);
        assert!(first.is_some());
        assert_eq!(first, with("", "there", "1", "{}", true), "a redelivery, and a copy");
        for other in [
            with("", "elsewhere", "1", "{}", false),
            with("", "there", "2", "{}", false),
            with("", "there", "1", "[]", false),
            with("", "ther", "e1", "{}", false),
            with("m", "there", "1", "{}", false),
            with("", "there", "", "{}", false),
        ] {
            assert_ne!(first, other);
        }
        assert_eq!(
            with("m", "there", "1", "{}", false),
            with("m", "elsewhere", "2", "{}", false),
            "a message has one id"
        );
        assert_eq!(with("", "there", "", "{}", false), None, "there is nothing to identify it by");
    }

    #[test]
    fn content_type_and_encoding_reach_the_handler_in_both_forms() {
        let body = [0x1f, 0x8b];
        let definition = |form| {
            let mut delivery = Delivery::mock(1, "".into(), "k".into(), false, body.to_vec());
            let properties = BasicProperties::default().with_content_type("application/json".into());
            delivery.properties = properties.with_content_encoding("gzip".into());
            task_definition(delivery, form)
        };
        let whole = definition(PayloadForm::Whole);
        let request: Request = serde_json::from_value(whole["payload"].clone()).unwrap();
        assert_eq!(&*request.body, body);
        for request in [&whole["payload"], &definition(PayloadForm::Body)["extra"]["request"]] {
            assert_eq!(
                (&request["contentType"], &request["contentEncoding"]),
                (&json!("application/json"), &json!("gzip"))
            );
        }
        let plain = Delivery::mock(1, "".into(), "k".into(), false, b"1".to_vec());
        let whole = task_definition(plain, PayloadForm::Whole);
        assert!(whole["payload"].get("contentEncoding").is_none());
    }

    #[test]
    fn the_attempts_header_is_read_from_every_type() {
        let of = |value: AMQPValue| {
            let mut delivery = Delivery::mock(1, "".into(), "k".into(), false, Vec::new());
            let mut table = FieldTable::default();
            table.insert(ATTEMPTS_HEADER.into(), value);
            delivery.properties = BasicProperties::default().with_headers(table);
            let step = attempt_history(&delivery).next_action(NonZeroU32::new(3), Republishing::Accepted);
            // The run id accepts any count.
            run_id(&delivery.properties, 1, attempt_history(&delivery).attempts()).to_string();
            step
        };
        for (value, tried) in [
            (AMQPValue::LongUInt(2), 2),
            (AMQPValue::ShortShortInt(2), 2),
            (AMQPValue::LongLongInt(1), 1),
            (AMQPValue::Timestamp(1), 1),
            (AMQPValue::LongInt(-1), 0),
            (AMQPValue::LongLongInt(i64::MIN), 0),
            (AMQPValue::Double(2.0), 0),
            (AMQPValue::Boolean(true), 0),
            (AMQPValue::Void, 0),
            (AMQPValue::LongString("2".into()), 0),
            (AMQPValue::ByteArray(b"2".to_vec().into()), 0),
            (AMQPValue::FieldArray(vec![AMQPValue::LongUInt(2)].into()), 0),
            (AMQPValue::FieldTable(FieldTable::default()), 0),
        ] {
            assert_eq!(of(value.clone()), AttemptAction::Try { attempt: tried }, "{value:?}");
        }
        for (value, tried) in [
            (AMQPValue::LongUInt(u32::MAX), u32::MAX),
            (AMQPValue::LongLongInt(i64::MAX), u32::MAX),
            (AMQPValue::Timestamp(u64::MAX), u32::MAX),
            (AMQPValue::ShortShortUInt(3), 3),
        ] {
            assert_eq!(of(value.clone()), AttemptAction::Exhausted { attempts: tried }, "{value:?}");
        }
    }

    #[test]
    fn every_correlation_id_yields_a_run_id() {
        let named =
            |id: &str| run_id(&BasicProperties::default().with_correlation_id(id.into()), 1, 0).task.to_string();
        assert_eq!(named("a/b c"), "abc.1");
        assert_eq!(named(""), "request.1");
        assert_eq!(named("..."), "request.1");
        assert_eq!(named("é"), "request.1");
        assert_eq!(named(&"x".repeat(200)).len(), TASK_ID_BYTES_MAX);
        assert_eq!(run_id(&BasicProperties::default(), 2, 5).to_string(), "request.2/5");
    }

    #[test]
    fn a_copy_keeps_the_properties_without_routing_headers_and_user_id() {
        let mut table = FieldTable::default();
        table.insert("CC".into(), AMQPValue::LongString("elsewhere".into()));
        table.insert(DELIVERY_COUNT_HEADER.into(), AMQPValue::LongLongInt(4));
        table.insert(headers::PATH.into(), AMQPValue::ByteArray(b"/echo".to_vec().into()));
        let original = BasicProperties::default()
            .with_headers(table)
            .with_user_id("another-user".into())
            .with_reply_to("there".into())
            .with_expiration("1500".into());
        let copy = republish_properties(&original, 2, Duration::from_millis(400));
        let table = copy.headers().as_ref().unwrap();
        assert_eq!(headers::number(table, ATTEMPTS_HEADER), Some(2));
        assert_eq!(headers::text(table, headers::PATH), Some("/echo"));
        assert!(table.inner().len() == 2 && copy.user_id().is_none());
        assert_eq!(copy.reply_to().as_ref().map(ToString::to_string).as_deref(), Some("there"));
        assert_eq!(message_ttl(&copy), Some(Duration::from_millis(1100)), "400 ms of it are over");
        assert_eq!(
            message_ttl(&republish_properties(&original, 2, Duration::from_secs(9))),
            Some(Duration::from_millis(1))
        );
        assert_eq!(message_ttl(&copy_properties(&original, 2)), None, "a copy in the poison queue does not expire");
    }

    #[test]
    fn unusable_headers_and_expirations_are_ignored() {
        let mut delivery = Delivery::mock(1, "".into(), "k".into(), true, vec![0xff]);
        let mut table = FieldTable::default();
        table.insert(headers::PATH.into(), AMQPValue::Double(1.5));
        table.insert(ATTEMPTS_HEADER.into(), AMQPValue::LongString("many".into()));
        table.insert("nested".into(), AMQPValue::FieldTable(FieldTable::default()));
        delivery.properties = BasicProperties::default().with_headers(table).with_expiration("soon".into());
        assert_eq!(
            attempt_history(&delivery).next_action(NonZeroU32::new(3), Republishing::Accepted),
            AttemptAction::Republish { attempt: 1 }
        );
        let definition = task_definition(delivery, PayloadForm::Whole);
        assert_eq!(definition["payload"]["bodyBase64"], json!("/w=="));
        assert!(definition["payload"]["path"].is_null() && definition["payload"]["secondsLeft"].is_null());
    }
}
