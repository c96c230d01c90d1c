//! The queues and messages of Mistral's publishers.
//!
//! A queue `EXECUTION.KEY` is that of a workflow execution and a URL, whose key is an HMAC: publishers and the notifier share its secret.
//! A message is JSON: `url`, `headers`, `restart_count` and the `body` that is posted as it is, or `"end": true`.

use std::collections::BTreeMap;

use lapin::BasicProperties;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use uuid::Uuid;

use super::targets::{KEY_BYTES, Target, UrlKey};
use journeyman_domain::limits::{NOTIFIER_MISTRAL_BODY_BYTES_MAX, NOTIFIER_RETRY_SECONDS_MAX};
use journeyman_worker::notify::Event;

/// The execution of a queue, if it is one of Mistral's, and the key of its URL.
pub(super) fn parse_queue(name: &str) -> Option<(&str, &str)> {
    let (execution, key) = name.rsplit_once('.')?;
    let is_key = key.len() == 2 * KEY_BYTES && key.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    (is_key && !execution.is_empty()).then_some((execution, key))
}

#[derive(Debug)]
pub(super) enum Message {
    Event {
        event: Box<Event>,
        target: Target,
    },
    /// The execution has ended, after so many restarts.
    End {
        epoch: u32,
    },
    /// A change of state without a name, which Mistral publishes too.
    Nameless,
}

#[derive(Deserialize)]
struct Wire {
    #[serde(default)]
    end: bool,
    restart_count: Option<u32>,
    /// Seconds.
    polling_time: Option<f64>,
    url: Option<String>,
    headers: Option<BTreeMap<String, Value>>,
    body: Option<Box<RawValue>>,
}

#[derive(Deserialize)]
struct Body {
    event: Option<String>,
}

/// # Errors
///
/// What is wrong with it, in words without anything of the message.
pub(super) fn parse(queue: &str, key: &UrlKey, properties: &BasicProperties, data: &[u8]) -> Result<Message, String> {
    let Some((execution, url_key)) = parse_queue(queue) else { return Err("its queue has no key of a URL".to_owned()) };
    let place = |error: serde_json::Error| format!("invalid JSON at line {}, column {}", error.line(), error.column());
    let wire: Wire = serde_json::from_slice(data).map_err(place)?;
    let epoch = wire.restart_count.unwrap_or(0);
    if wire.end {
        return Ok(Message::End { epoch });
    }
    let (Some(url), Some(body)) = (wire.url, wire.body) else { return Err("it has no `url` or no `body`".to_owned()) };
    if key.of(&[&url]) != url_key {
        return Err(
            "its URL is not that of its queue, or `notifier.mistral.url_key_file` is not the publisher's".to_owned()
        );
    }
    let headers = wire.headers.unwrap_or_default().into_iter().filter_map(|(name, value)| match value {
        Value::Null => None,
        Value::String(text) => Some(Ok((name, text))),
        Value::Number(_) | Value::Bool(_) => Some(Ok((name, value.to_string()))),
        Value::Array(_) | Value::Object(_) => Some(Err("one of its headers is none of HTTP")),
    });
    let retry_seconds = wire.polling_time.filter(|seconds| *seconds > 0.0).map(retry_seconds);
    let target = Target::new(url, &headers.collect::<Result<_, _>>()?, retry_seconds)?;
    let Body { event } = serde_json::from_slice(body.get().as_bytes()).map_err(place)?;
    let Some(r#type) = event else { return Ok(Message::Nameless) };
    let id = match properties.message_id() {
        Some(id) => id.to_string(),
        // Mistral may say the same twice. What RabbitMQ delivers again is then two as well, and lost is none.
        None => Uuid::new_v4().to_string(),
    };
    let (source, key) = (format!("mistral {queue}"), execution.to_owned());
    let event = Box::new(Event { source, id, r#type, key, epoch: Some(epoch), time: None, last: false, data: body });
    event.check_with(NOTIFIER_MISTRAL_BODY_BYTES_MAX)?;
    Ok(Message::Event { event, target })
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is clamped")]
fn retry_seconds(seconds: f64) -> u64 {
    seconds.clamp(1.0, NOTIFIER_RETRY_SECONDS_MAX).ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXECUTION: &str = "6fd5c4b0-3a07-4e0e-9a43-91c36a0fb7a4";
    const URL: &str = "https://example.com/hook?token=s3cret";

    fn key() -> UrlKey {
        UrlKey::new("shared").unwrap()
    }

    fn parsed(data: &str) -> Result<Message, String> {
        let queue = format!("{EXECUTION}.{}", key().of(&[URL]));
        parse(&queue, &key(), &BasicProperties::default(), data.as_bytes())
    }

    #[test]
    fn the_key_of_a_url_is_what_publishers_compute() {
        // hmac.new(b"shared", url, hashlib.sha256).hexdigest()[:32]
        assert_eq!(key().of(&[URL]), "74145670fc12d6368ded355047176360");
        let queue = format!("{EXECUTION}.{}", key().of(&[&"x".repeat(2_000)]));
        assert!(queue.len() < 100);
        assert_eq!(parse_queue(&queue).map(|(execution, _)| execution), Some(EXECUTION));
        for other in
            ["orders", "journeyman.dead", "a.00112233445566778899aabbccddeefg", ".00112233445566778899aabbccddeeff"]
        {
            assert_eq!(parse_queue(other), None, "{other}");
        }
    }

    #[test]
    fn a_body_is_kept_byte_for_byte() {
        let body = r#"{"id": "1",  "name":"caf\u00e9", "event": "TASK_FAILED"}"#;
        let data =
            format!(r#"{{"url": "{URL}", "headers": null, "polling_time": 5, "restart_count": 3, "body": {body}}}"#);
        let Ok(Message::Event { event, target }) = parsed(&data) else { panic!("an event") };
        assert_eq!((event.data.get(), event.epoch, event.key.as_str()), (body, Some(3), EXECUTION));
        assert_eq!(
            (event.r#type.as_str(), target),
            ("TASK_FAILED", Target::new(URL.to_owned(), &BTreeMap::new(), Some(5)).unwrap())
        );
    }

    #[test]
    fn f5_what_publishers_send_is_taken_and_equal_messages_are_two() {
        let event = |fields: &str| {
            let message = parsed(&format!(r#"{{"url": "{URL}", {fields}, "body": {{"event": "A"}}}}"#));
            let Ok(Message::Event { event, target }) = message else { panic!("{message:?}") };
            (event, target)
        };
        let target = |headers: &[(&str, &str)], seconds| {
            let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
            Target::new(URL.to_owned(), &headers.collect(), seconds).unwrap()
        };
        let (first, found) = event(r#""restart_count": null, "headers": {"X-Try": 5, "X-Dry": true, "X-No": null}"#);
        assert_eq!((first.epoch, found), (Some(0), target(&[("X-Try", "5"), ("X-Dry", "true")], None)));
        for (polling_time, seconds) in
            [("null", None), ("0", None), ("0.2", Some(1)), ("30", Some(30)), ("1e300", Some(86_400))]
        {
            let (second, found) = event(&format!(r#""polling_time": {polling_time}"#));
            assert_eq!(found, target(&[], seconds), "{polling_time}");
            assert_ne!(first.id, second.id);
        }
        let (one, _) = event(r#""restart_count": 1"#);
        let (other, _) = event(r#""restart_count": 1"#);
        assert_ne!(one.id, other.id);
        let large = |bytes: usize| {
            parsed(&format!(r#"{{"url": "{URL}", "body": {{"event": "A", "x": "{}"}}}}"#, "y".repeat(bytes)))
        };
        assert!(large(NOTIFIER_MISTRAL_BODY_BYTES_MAX - 100).is_ok());
        assert!(large(NOTIFIER_MISTRAL_BODY_BYTES_MAX).unwrap_err().contains("more than 1048576 bytes"));
    }

    #[test]
    fn what_is_no_event_is_told_without_its_content() {
        assert!(matches!(parsed(r#"{"end": true, "restart_count": 2}"#), Ok(Message::End { epoch: 2 })));
        let nameless = format!(r#"{{"url": "{URL}", "body": {{"event": null}}}}"#);
        assert!(matches!(parsed(&nameless), Ok(Message::Nameless)));
        for (data, why) in [
            ("end".to_owned(), "invalid JSON at line 1"),
            (format!(r#"{{"url": "{URL}"}}"#), "no `url` or no `body`"),
            (
                r#"{"url": "http://other/s3cret", "body": {"event": "A"}}"#.to_owned(),
                "its URL is not that of its queue",
            ),
            (format!(r#"{{"url": "{URL}", "body": {{"event": "s3 cret"}}}}"#), "type is not made of names"),
        ] {
            let error = parsed(&data).unwrap_err();
            assert!(error.contains(why) && !error.contains("s3"), "{error}");
        }
    }
}
