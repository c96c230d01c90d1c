//! A request as the payload of a task.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A request: a `PayloadHandler::Payload` in Rust, and the `payload` of the document on
/// standard input for a program.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Request {
    /// The requested path, from the header `x-rpc-path`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The routing key it was published with.
    pub routing_key: String,
    /// The correlation id; the worker copies it to the reply.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub correlation_id: Option<String>,
    /// A key that is the same at each delivery of this request. A request may be delivered twice; use the key for effects
    /// that must not happen twice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotency_key: Option<String>,
    /// Headers whose value is a string, a number or a boolean, as strings. Other headers are omitted.
    pub headers: BTreeMap<String, String>,
    /// The media type of the body.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
    /// The encoding of the body, such as `gzip`. The worker does not decode it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_encoding: Option<String>,
    /// How many seconds the client waits, counted from when the worker received the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_left: Option<f64>,
    /// The body, if it is UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// The body in base64, if it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body_base64: Option<String>,
    /// The parsed body, if it is JSON of at most 1 MiB. Without `body` and `bodyBase64`, it is the body.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub json: Option<serde_json::Value>,
}

impl Request {
    pub(crate) fn set_body(&mut self, body: &[u8], json_bytes_max: usize) {
        match std::str::from_utf8(body) {
            Ok(text) => {
                self.json = (body.len() <= json_bytes_max).then(|| serde_json::from_str(text).ok()).flatten();
                self.body = Some(text.to_owned());
            }
            Err(_) => self.body_base64 = Some(STANDARD.encode(body)),
        }
    }

    /// Moves the body instead of copying it.
    pub(crate) fn into_value(mut self) -> serde_json::Value {
        let (body, json) = (self.body.take(), self.json.take());
        let mut value = serde_json::to_value(self).unwrap_or_default();
        if let serde_json::Value::Object(fields) = &mut value {
            fields.extend(body.map(|body| ("body".to_owned(), body.into())));
            fields.extend(json.map(|json| ("json".to_owned(), json)));
        }
        value
    }

    /// Returns the bytes of the body.
    pub fn body_bytes(&self) -> Vec<u8> {
        match (&self.body, &self.body_base64, &self.json) {
            (Some(text), _, _) => text.clone().into_bytes(),
            (None, Some(_), _) => self.decoded_body().unwrap_or_default(),
            (None, None, Some(json)) => json.to_string().into_bytes(),
            (None, None, None) => Vec::new(),
        }
    }

    /// Decodes `body_base64`; `None` if it is missing or not base64.
    pub fn decoded_body(&self) -> Option<Vec<u8>> {
        STANDARD.decode(self.body_base64.as_ref()?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_bytes_returns_the_body_that_was_set() {
        for (body, text, json) in [
            (&b"{\"x\":1}"[..], true, true),
            (b"null", true, true),
            (b"not json", true, false),
            (b"", true, false),
            (&[0xff, 0, 1], false, false),
        ] {
            let mut request = Request::default();
            request.set_body(body, 64);
            assert_eq!(request.body_bytes(), body);
            assert_eq!((request.body.is_some(), request.json.is_some()), (text, json), "{body:?}");
            let read: Request = serde_json::from_value(serde_json::to_value(&request).unwrap()).unwrap();
            assert_eq!(read.body_bytes(), body);
        }
    }

    #[test]
    fn a_body_may_be_given_as_json_and_unknown_keys_are_rejected() {
        let request: Request = serde_json::from_str(r#"{"path": "/x", "json": {"a": 1}}"#).unwrap();
        assert_eq!(request.body_bytes(), b"{\"a\":1}");
        assert!(serde_json::from_str::<Request>(r#"{"bodi": "x"}"#).is_err());
        assert_eq!(Request { body_base64: Some("not base64!".to_owned()), ..Request::default() }.decoded_body(), None);
    }

    #[test]
    fn json_above_the_limit_is_not_parsed() {
        let mut request = Request::default();
        request.set_body(b"[1,2,3]", 6);
        assert_eq!((request.body.as_deref(), request.json), (Some("[1,2,3]"), None));
    }
}
