//! The fields of requests: readers, and the types of bodies, each of which rejects values that the API does not allow.

use axum::http::header::AsHeaderName;
use axum::http::request::Parts;
use serde::{Deserialize, Serialize};
use url::Url;

use super::queue_error::{QueueError, QueueErrorCode};
use journeyman_worker::task::formats::is_slugid;

pub(crate) fn body_error(error: &serde_json::Error) -> QueueError {
    let code = if error.is_data() { QueueErrorCode::InputValidationError } else { QueueErrorCode::MalformedPayload };
    QueueError::new(code, format!("invalid request body: {error}"))
}

pub(crate) fn header_str(parts: &Parts, name: impl AsHeaderName) -> Option<&str> {
    parts.headers.get(name).and_then(|value| value.to_str().ok())
}

/// Decodes a query parameter; `+` is a space.
pub(crate) fn query_param(query: &str, name: &str) -> Option<String> {
    url::form_urlencoded::parse(query.as_bytes()).find(|(key, _)| key == name).map(|(_, value)| value.into_owned())
}

pub(crate) fn invalid_argument(message: String) -> QueueError {
    QueueError::new(QueueErrorCode::InvalidRequestArguments, message)
}

/// Declares a string type whose values satisfy a check.
macro_rules! checked_string {
    ($name:ident, $check:expr, $expected:literal) => {
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(try_from = "String")]
        pub(crate) struct $name(pub(crate) String);

        impl TryFrom<String> for $name {
            type Error = &'static str;

            fn try_from(text: String) -> Result<Self, Self::Error> {
                let check: fn(&str) -> bool = $check;
                if check(&text) { Ok(Self(text)) } else { Err($expected) }
            }
        }
    };
}

checked_string!(Identifier, is_identifier, "expected 1 to 38 letters, digits, `-` or `_`");
checked_string!(SlugId, is_slugid, "expected a slugid");
checked_string!(TaskQueueId, is_queue_id, "expected provisionerId/workerType");
checked_string!(TaskName, |text| text.chars().count() <= 255, "expected at most 255 characters");
checked_string!(Printable, is_printable, "expected printable ASCII characters");
// Nothing in it breaks a `Location` header.
checked_string!(Uri, |text| is_printable(text) && Url::parse(text).is_ok(), "expected a URL of printable characters");

/// An integer from `MIN` to `MAX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "u8")]
pub(crate) struct Integer<const MIN: u8, const MAX: u8>(pub(crate) u8);

impl<const MIN: u8, const MAX: u8> TryFrom<u8> for Integer<MIN, MAX> {
    type Error = String;

    fn try_from(number: u8) -> Result<Self, Self::Error> {
        let fits = (MIN..=MAX).contains(&number);
        if fits { Ok(Self(number)) } else { Err(format!("expected an integer from {MIN} to {MAX}")) }
    }
}

fn is_name(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}

pub(crate) fn is_identifier(text: &str) -> bool {
    (1..=38).contains(&text.len()) && is_name(text)
}

pub(crate) fn is_printable(text: &str) -> bool {
    text.bytes().all(|byte| (b' '..=b'~').contains(&byte))
}

/// `provisionerId/workerType`.
pub(crate) fn is_queue_id(text: &str) -> bool {
    text.split_once('/').is_some_and(|(left, right)| is_identifier(left) && is_identifier(right))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_plus_in_a_query_is_a_space() {
        assert_eq!(query_param("a=1&popreceipt=x+y%2B=", "popreceipt").unwrap(), "x y+=");
        assert_eq!(query_param("a=1", "b"), None);
    }

    #[test]
    fn a_uri_has_a_scheme_and_no_control_characters() {
        let parse = |text: &str| Uri::try_from(text.to_owned());
        assert!(parse("https://example.com/a?b#c").is_ok());
        for text in ["", "example.com", "http://x\r\ny: z", "http://\u{e9}", "://x"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn slugids_and_task_queue_ids_are_checked() {
        assert!(is_slugid("XJOIQcqPRgykTZR_00-b1w"));
        assert!(!is_slugid("XJOIQcqPAgykTZR_00-b1w"));
        assert!(!is_slugid("XJOIQcqPRgykTZR_00-b1"));
        assert!(is_queue_id("test-prov/test-wt"));
        assert!(!is_queue_id("test-prov"));
        assert!(!is_queue_id("a/b/c"));
    }
}
