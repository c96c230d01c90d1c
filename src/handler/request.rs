//! A request as a payload: what a handler is given of a message that somebody waits for an answer to.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A request. In Rust it is a [`PayloadHandler::Payload`](super::PayloadHandler::Payload), in any other language the
/// `payload` of the document on standard input.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct Request {
    /// What is asked for, from the header `x-rpc-path`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// What it was published under.
    pub routing_key: String,
    /// What tells the answer apart; it is copied to it anyway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub correlation_id: Option<String>,
    /// The same at each delivery of this request, and of no other as far as its author tells them apart. A request may be
    /// delivered twice; what must not happen twice is done under this key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotency_key: Option<String>,
    /// All headers that are text, numbers, or `true` and `false`, as text. Others are left out.
    pub headers: BTreeMap<String, String>,
    /// Its media type, where its author said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_type: Option<String>,
    /// How the body is encoded, such as `gzip`, where its author said. It is handed over as it came.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content_encoding: Option<String>,
    /// How long its author waits, counted from when it was received.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seconds_left: Option<f64>,
    /// The body, where it is text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// The body in base64, where it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body_base64: Option<String>,
    /// What the body says, where it is JSON of at most 1 MiB. Alone, it is the body.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub json: Option<serde_json::Value>,
}

impl Request {
    /// Takes a body in, in every form that it has.
    pub(crate) fn set_body(&mut self, body: &[u8], json_most: usize) {
        match std::str::from_utf8(body) {
            Ok(text) => {
                self.json = (body.len() <= json_most).then(|| serde_json::from_str(text).ok()).flatten();
                self.body = Some(text.to_owned());
            }
            Err(_) => self.body_base64 = Some(STANDARD.encode(body)),
        }
    }

    /// As a payload. What is long is moved, not copied.
    pub(crate) fn into_value(mut self) -> serde_json::Value {
        let (body, json) = (self.body.take(), self.json.take());
        let mut value = serde_json::to_value(self).unwrap_or_default();
        if let serde_json::Value::Object(fields) = &mut value {
            fields.extend(body.map(|body| ("body".to_owned(), body.into())));
            fields.extend(json.map(|json| ("json".to_owned(), json)));
        }
        value
    }

    /// The body, byte for byte.
    #[must_use]
    pub fn body_bytes(&self) -> Vec<u8> {
        match (&self.body, &self.body_base64, &self.json) {
            (Some(text), _, _) => text.clone().into_bytes(),
            (None, Some(_), _) => self.decoded_body().unwrap_or_default(),
            (None, None, Some(json)) => json.to_string().into_bytes(),
            (None, None, None) => Vec::new(),
        }
    }

    /// What `body_base64` stands for; `None` where there is none, or it is no base64.
    #[must_use]
    pub fn decoded_body(&self) -> Option<Vec<u8>> {
        STANDARD.decode(self.body_base64.as_ref()?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_had_back_byte_for_byte_whatever_it_is() {
        for (body, text, json) in [
            (&b"{\"x\":1}"[..], true, true),
            (b"null", true, true),
            (b"no json", true, false),
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
    fn a_task_may_give_its_body_as_json_and_misspells_nothing_in_silence() {
        let request: Request = serde_json::from_str(r#"{"path": "/x", "json": {"a": 1}}"#).unwrap();
        assert_eq!(request.body_bytes(), b"{\"a\":1}");
        assert!(serde_json::from_str::<Request>(r#"{"bodi": "x"}"#).is_err());
        assert_eq!(Request { body_base64: Some("no base64!".to_owned()), ..Request::default() }.decoded_body(), None);
    }

    #[test]
    fn json_that_is_too_large_is_left_as_text() {
        let mut request = Request::default();
        request.set_body(b"[1,2,3]", 6);
        assert_eq!((request.body.as_deref(), request.json), (Some("[1,2,3]"), None));
    }
}
