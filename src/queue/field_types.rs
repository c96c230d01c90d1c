//! Types that request bodies are deserialized into; each rejects values that the API does not allow.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Number;

use super::queue_error::{QueueError, QueueErrorCode};
use crate::source::taskcluster::formats::is_slugid;

/// Parses a body. An empty body is an empty object.
pub(crate) fn parse_fields<T: DeserializeOwned>(body: &[u8]) -> Result<T, QueueError> {
    serde_json::from_slice(if body.is_empty() { b"{}" } else { body }).map_err(|error| body_error(&error))
}

pub(crate) fn body_error(error: &serde_json::Error) -> QueueError {
    let code = if error.is_data() { QueueErrorCode::InputValidationError } else { QueueErrorCode::MalformedPayload };
    QueueError::new(code, format!("invalid request body: {error}"))
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
checked_string!(Project, is_project, "expected 1 to 500 letters, digits, `.`, `_`, `/` or `-`");
checked_string!(Uri, is_uri, "expected a URI of at most 4096 characters");
checked_string!(Route, |text| text.len() <= 249 && is_printable(text), "expected at most 249 printable characters");
checked_string!(Scope, |text| text.len() <= 1 << 16 && is_printable(text), "expected printable characters");

/// A string of at most `MAX` characters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Text<const MAX: usize>(pub(crate) String);

impl<const MAX: usize> TryFrom<String> for Text<MAX> {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        if text.chars().count() <= MAX { Ok(Self(text)) } else { Err(format!("expected at most {MAX} characters")) }
    }
}

/// An integer from `MIN` to `MAX`, also if it is written as 1.0, as some JavaScript clients do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Number")]
pub(crate) struct Integer<const MIN: u8, const MAX: u8>(pub(crate) u8);

impl<const MIN: u8, const MAX: u8> TryFrom<Number> for Integer<MIN, MAX> {
    type Error = String;

    fn try_from(number: Number) -> Result<Self, Self::Error> {
        let fits = |value: &u8| number.as_f64() == Some(f64::from(*value));
        (MIN..=MAX).find(fits).map(Self).ok_or_else(|| format!("expected an integer from {MIN} to {MAX}"))
    }
}

fn is_name(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}

pub(crate) fn is_identifier(text: &str) -> bool {
    (1..=38).contains(&text.len()) && is_name(text)
}

fn is_project(text: &str) -> bool {
    (1..=500).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._/-".contains(&byte))
}

pub(crate) fn is_printable(text: &str) -> bool {
    text.bytes().all(|byte| (b' '..=b'~').contains(&byte))
}

/// `provisionerId/workerType`.
pub(crate) fn is_queue_id(text: &str) -> bool {
    text.split_once('/').is_some_and(|(left, right)| is_identifier(left) && is_identifier(right))
}

/// A scheme, and nothing that would break a `Location` header.
fn is_uri(text: &str) -> bool {
    let is_scheme = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
    text.len() <= 4_096
        && text.bytes().all(|byte| byte.is_ascii_graphic())
        && text.split_once(':').is_some_and(|(scheme, _)| !scheme.is_empty() && scheme.bytes().all(is_scheme))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_may_be_written_with_a_zero_fraction() {
        let parse = |text: &str| serde_json::from_str::<Integer<1, 32>>(text).ok().map(|integer| integer.0);
        assert_eq!(parse("7"), Some(7));
        assert_eq!(parse("1.0"), Some(1));
        for text in ["0", "33", "1e300", "1.5", "-1", "\"1\"", "18446744073709551615"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_uri_has_a_scheme_and_no_control_characters() {
        assert!(is_uri("https://example.com/a?b#c"));
        for text in ["", "example.com", "http://x\r\ny: z", "http://\u{e9}", "://x"] {
            assert!(!is_uri(text), "{text}");
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
