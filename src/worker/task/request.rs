//! A request as the payload of a task.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use journeyman_domain::limits::REQUEST_JSON_BYTES_MAX;
use journeyman_platform::committed_schema;

/// A request: a `PayloadHandler::Payload` in Rust, and the `payload` of the document on
/// standard input for a program.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(try_from = "RequestJson", into = "RequestJson")]
pub struct Request {
    /// The requested path, from the header `x-rpc-path`.
    pub path: Option<String>,
    /// The routing key it was published with.
    pub routing_key: String,
    /// The correlation id; the worker copies it to the reply.
    pub correlation_id: Option<String>,
    /// A key that is the same at each delivery of this request. A request may be delivered twice; use the key for effects
    /// that must not happen twice.
    pub idempotency_key: IdempotencyKey,
    /// Headers whose value is a string, a number or a boolean, as strings. Other headers are omitted.
    pub headers: BTreeMap<String, String>,
    /// The media type of the body.
    pub content_type: Option<String>,
    /// The encoding of the body, such as `gzip`. The worker does not decode it.
    pub content_encoding: Option<String>,
    /// How many seconds the client waits, counted from when the worker received the request.
    pub seconds_left: Option<f64>,
    /// The body. Clones share it.
    pub body: Bytes,
}

impl Request {
    /// Returns the JSON Schema of a request as a payload.
    pub fn schema() -> Value {
        committed_schema::parse(include_str!("request.schema.json"))
    }

    /// Returns the body as text, if it is UTF-8.
    pub fn text(&self) -> Option<&str> {
        std::str::from_utf8(&self.body).ok()
    }

    /// Parses the body as JSON.
    ///
    /// # Errors
    ///
    /// Fails if the body is not JSON, or not JSON of this shape.
    pub fn json<'a, T: Deserialize<'a>>(&'a self) -> serde_json::Result<T> {
        serde_json::from_slice(&self.body)
    }

    /// Writes the request as a payload.
    pub fn into_value(self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }
}

/// A request as its queue brought it.
pub trait RequestMessage: Send + Sync {
    /// Reads the request without its key, if it is the payload; a handler with a schema of its own gets the body instead.
    fn request(&self) -> Option<Request>;
    /// Computes the key that is the same at each delivery of the request.
    fn idempotency_key(&self) -> Option<String>;
    /// Writes the request as a task's definition.
    fn definition(&self) -> Value;
    /// The trace of its sender.
    fn traceparent(&self) -> Option<String>;
}

/// The key of a request. It is computed when it is first read, since that hashes the body.
#[derive(Clone, Default)]
pub struct IdempotencyKey {
    message: Option<Arc<dyn RequestMessage>>,
    key: OnceLock<Option<String>>,
}

impl IdempotencyKey {
    pub(super) fn of(message: &Arc<dyn RequestMessage>) -> Self {
        Self { message: Some(Arc::clone(message)), key: OnceLock::new() }
    }
}

impl Deref for IdempotencyKey {
    type Target = Option<String>;

    fn deref(&self) -> &Option<String> {
        self.key.get_or_init(|| self.message.as_ref()?.idempotency_key())
    }
}

impl From<Option<String>> for IdempotencyKey {
    fn from(key: Option<String>) -> Self {
        Self { message: None, key: key.into() }
    }
}

impl PartialEq for IdempotencyKey {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(out)
    }
}

/// A request as JSON: the `payload` of the document on standard input for a program.
#[derive(Default, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
#[cfg_attr(debug_assertions, schemars(rename = "Request"))]
struct RequestJson {
    /// The requested path, from the header `x-rpc-path`.
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    /// The routing key it was published with.
    routing_key: String,
    /// The correlation id; the worker copies it to the reply.
    #[serde(skip_serializing_if = "Option::is_none")]
    correlation_id: Option<String>,
    /// A key that is the same at each delivery of this request. A request may be delivered twice; use the key for effects
    /// that must not happen twice.
    #[serde(skip_serializing_if = "Option::is_none")]
    idempotency_key: Option<String>,
    /// Headers whose value is a string, a number or a boolean, as strings. Other headers are omitted.
    headers: BTreeMap<String, String>,
    /// The media type of the body.
    #[serde(skip_serializing_if = "Option::is_none")]
    content_type: Option<String>,
    /// The encoding of the body, such as `gzip`. The worker does not decode it.
    #[serde(skip_serializing_if = "Option::is_none")]
    content_encoding: Option<String>,
    /// How many seconds the client waits, counted from when the worker received the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds_left: Option<f64>,
    /// The body, if it is UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<String>,
    /// The body in base64, if it is not UTF-8.
    #[cfg_attr(
        debug_assertions,
        schemars(regex(pattern = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"))
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    body_base64: Option<String>,
    /// The parsed body, if it is JSON of at most 1 MiB. Without `body` and `bodyBase64`, it is the body.
    #[serde(skip_serializing_if = "Option::is_none")]
    json: Option<Value>,
}

impl From<Request> for RequestJson {
    fn from(request: Request) -> Self {
        let Request { path, routing_key, correlation_id, idempotency_key, headers, .. } = request;
        let Request { content_type, content_encoding, seconds_left, body, .. } = request;
        let text = std::str::from_utf8(&body);
        let parsed = text.ok().filter(|text| text.len() <= REQUEST_JSON_BYTES_MAX);
        Self {
            path,
            routing_key,
            correlation_id,
            idempotency_key: (*idempotency_key).clone(),
            headers,
            content_type,
            content_encoding,
            seconds_left,
            body: text.ok().map(str::to_owned),
            body_base64: text.is_err().then(|| STANDARD.encode(&body)),
            json: parsed.and_then(|text| serde_json::from_slice(text.as_bytes()).ok()),
        }
    }
}

impl TryFrom<RequestJson> for Request {
    type Error = &'static str;

    fn try_from(read: RequestJson) -> Result<Self, &'static str> {
        let RequestJson { path, routing_key, correlation_id, idempotency_key, headers, .. } = read;
        let RequestJson { content_type, content_encoding, seconds_left, body, body_base64, json, .. } = read;
        let body = match (body, body_base64, json) {
            (Some(text), _, _) => text.into_bytes(),
            (None, Some(text), _) => STANDARD.decode(text).map_err(|_| "bodyBase64: not base64")?,
            (None, None, Some(json)) => json.to_string().into_bytes(),
            (None, None, None) => Vec::new(),
        };
        let body = body.into();
        Ok(Self {
            path,
            routing_key,
            correlation_id,
            idempotency_key: idempotency_key.into(),
            headers,
            content_type,
            content_encoding,
            seconds_left,
            body,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_body_of_a_request_is_written_as_text_or_base64_and_read_again() {
        for (body, text, json) in [
            (&b"{\"x\":1}"[..], true, true),
            (b"null", true, true),
            (b"not json", true, false),
            (b"", true, false),
            (&[0xff, 0, 1], false, false),
        ] {
            let request = Request { body: Bytes::from_static(body), ..Request::default() };
            let written = request.clone().into_value();
            assert_eq!(
                (written.get("body").is_some(), written.get("bodyBase64").is_some(), written.get("json").is_some()),
                (text, !text, json),
                "{body:?}"
            );
            assert_eq!(serde_json::from_value::<Request>(written).unwrap(), request);
        }
    }

    #[test]
    fn a_body_may_be_given_as_json_and_unknown_keys_are_rejected() {
        let request: Request = serde_json::from_str(r#"{"path": "/x", "json": {"a": 1}}"#).unwrap();
        assert_eq!(request.body, &b"{\"a\":1}"[..]);
        assert_eq!(request.json::<Value>().unwrap(), json!({"a": 1}));
        assert!(serde_json::from_str::<Request>(r#"{"bodi": "x"}"#).is_err());
        let error = serde_json::from_str::<Request>(r#"{"bodyBase64": "not base64!"}"#).unwrap_err();
        assert!(error.to_string().contains("bodyBase64: not base64"), "{error}");
    }

    #[test]
    fn json_above_the_limit_is_not_parsed() {
        let long = format!("[{}1]", "1,".repeat(REQUEST_JSON_BYTES_MAX / 2));
        let written = Request { body: long.into(), ..Request::default() }.into_value();
        assert!(written.get("body").is_some() && written.get("json").is_none());
    }
}
