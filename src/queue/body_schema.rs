//! Whether a request body has the form its call asks for, and the words of what is wrong with it. Pure.
//!
//! The words are those of the JSON Schema validator behind the real service, since clients show them to people.

use serde_json::{Map, Value};

use super::clock::UnixMillis;
use super::scopes::Era;

/// Whether a property must be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FieldPresence {
    Required,
    Optional,
}

/// What a property may hold.
#[derive(Debug, Clone, Copy)]
pub(crate) enum FieldType {
    /// Letters, digits, `-` and `_`, from 1 to so many.
    Name(usize),
    /// Letters, digits and `._/-`, from 1 to so many.
    Project(usize),
    /// Text of at most so many characters.
    Text(usize),
    /// `provisionerId/workerType`.
    QueueId,
    /// A whole number within bounds, both included.
    Integer(i64, i64),
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// An RFC 3339 timestamp.
    Time,
    /// An address with its scheme, of at most so many characters.
    Uri(usize),
    /// A slugid.
    SlugId,
    /// An object of any content.
    Object,
    /// A list of texts of at most so many characters.
    TextList(usize),
    /// A list of slugids.
    SlugIdList,
    /// An object with these properties.
    Nested(&'static [Field]),
}

/// A property of a request body.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) presence: FieldPresence,
    pub(crate) field_type: FieldType,
}

pub(crate) const fn required(name: &'static str, kind: FieldType) -> Field {
    Field { name, presence: FieldPresence::Required, field_type: kind }
}

pub(crate) const fn optional(name: &'static str, kind: FieldType) -> Field {
    Field { name, presence: FieldPresence::Optional, field_type: kind }
}

/// What is wrong with `body`, a line for each finding; empty where it is as it should be.
pub(crate) fn schema_errors(body: &Map<String, Value>, fields: &[Field], era: Era) -> Vec<String> {
    let mut found = Vec::new();
    check_fields("data", body, fields, era, &mut found);
    found
}

/// The refusal's text for a body that does not match the schema of that name.
pub(crate) fn error_text(root: &str, schema: &str, found: &[String]) -> String {
    let mut text =
        format!("\nSchema Validation Failed!\nRejecting Schema: {root}/schemas/queue/v1/{schema}.json#\nErrors:");
    for line in found {
        text.push_str("\n  * ");
        text.push_str(line);
    }
    text
}

fn check_fields(at: &str, body: &Map<String, Value>, fields: &[Field], era: Era, found: &mut Vec<String>) {
    let (lacks, extra) = match era {
        Era::Legacy => ("should have required property", "should NOT have additional properties"),
        Era::Modern => ("must have required property", "must NOT have additional properties"),
    };
    for field in fields {
        if field.presence == FieldPresence::Required && !body.contains_key(field.name) {
            found.push(format!("{at} {lacks} '{}'", field.name));
        }
    }
    for name in body.keys() {
        if !fields.iter().any(|field| field.name == name) {
            found.push(format!("{at} {extra}"));
        }
    }
    for field in fields {
        if let Some(value) = body.get(field.name) {
            check_field(&format!("{at}/{}", field.name), value, field.field_type, era, found);
        }
    }
}

fn check_field(at: &str, value: &Value, kind: FieldType, era: Era, found: &mut Vec<String>) {
    if let FieldType::Nested(fields) = kind
        && let Value::Object(inner) = value
    {
        check_fields(at, inner, fields, era, found);
        return;
    }
    let wrong = match kind {
        FieldType::Name(max) => check_text(value, 1, max, is_name, "^([a-zA-Z0-9-_]*)$"),
        FieldType::Project(max) => check_text(value, 1, max, is_project, "^([a-zA-Z0-9._/-]*)$"),
        FieldType::Text(max) => check_text(value, 0, max, |_| true, ""),
        FieldType::QueueId => check_text(value, 1, 77, is_queue_id, "^[a-zA-Z0-9-_]{1,38}/[a-zA-Z0-9-_]{1,38}$"),
        FieldType::SlugId => check_text(value, 22, 22, is_slugid, SLUGID_PATTERN),
        FieldType::Integer(min, max) => check_integer(value, min, max),
        FieldType::OneOf(words) => check_one_of(value, words),
        FieldType::Time => check_time(value),
        FieldType::Uri(max) => check_uri(value, max),
        FieldType::Object | FieldType::Nested(_) => (!value.is_object()).then(|| "must be object".to_owned()),
        FieldType::TextList(max) => {
            return check_list(at, value, found, |item| check_text(item, 0, max, is_ascii, "^[ -~]*$"));
        }
        FieldType::SlugIdList => {
            return check_list(at, value, found, |item| check_text(item, 22, 22, is_slugid, SLUGID_PATTERN));
        }
    };
    if let Some(wrong) = wrong {
        let wrong = match era {
            Era::Legacy => wrong.replace("must", "should"),
            Era::Modern => wrong,
        };
        found.push(format!("{at} {wrong}"));
    }
}

fn check_list(at: &str, value: &Value, found: &mut Vec<String>, wrong: impl Fn(&Value) -> Option<String>) {
    let Value::Array(items) = value else {
        found.push(format!("{at} must be array"));
        return;
    };
    for (index, item) in items.iter().enumerate() {
        if let Some(wrong) = wrong(item) {
            found.push(format!("{at}/{index} {wrong}"));
        }
    }
}

fn check_text(value: &Value, min: usize, max: usize, fits: impl Fn(&str) -> bool, pattern: &str) -> Option<String> {
    let Value::String(text) = value else { return Some("must be string".to_owned()) };
    let length = text.chars().count();
    if length > max {
        return Some(format!("must NOT have more than {max} characters"));
    }
    if length < min {
        return Some(format!("must NOT have fewer than {min} characters"));
    }
    (!fits(text)).then(|| format!("must match pattern \"{pattern}\""))
}

fn check_integer(value: &Value, min: i64, max: i64) -> Option<String> {
    let Some(number) = as_integer(value) else { return Some("must be integer".to_owned()) };
    if number > max {
        return Some(format!("must be <= {max}"));
    }
    (number < min).then(|| format!("must be >= {min}"))
}

/// A whole number, however it is written: to JSON, 1.0 is as whole as 1.
pub(crate) fn as_integer(value: &Value) -> Option<i64> {
    let written = value.as_f64().filter(|number| number.fract() == 0.0);
    value.as_i64().or_else(|| written.map(clamped))
}

#[expect(clippy::cast_possible_truncation, reason = "what is too large becomes the largest")]
const fn clamped(number: f64) -> i64 {
    number as i64
}

fn check_one_of(value: &Value, words: &[&str]) -> Option<String> {
    let known = value.as_str().is_some_and(|text| words.contains(&text));
    (!known).then(|| "must be equal to one of the allowed values".to_owned())
}

fn check_time(value: &Value) -> Option<String> {
    let Value::String(text) = value else { return Some("must be string".to_owned()) };
    UnixMillis::parse(text).is_none().then(|| "must match format \"date-time\"".to_owned())
}

fn check_uri(value: &Value, max: usize) -> Option<String> {
    let scheme = |text: &str| {
        text.split_once(':').is_some_and(|(scheme, _)| !scheme.is_empty() && scheme.bytes().all(is_scheme))
    };
    let is_uri = |text: &str| scheme(text) && text.bytes().all(|byte| byte.is_ascii_graphic());
    check_text(value, 0, max, |_| true, "").or_else(|| {
        let fits = value.as_str().is_some_and(is_uri);
        (!fits).then(|| "must match format \"uri\"".to_owned())
    })
}

const fn is_scheme(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.')
}

const SLUGID_PATTERN: &str = "^[A-Za-z0-9_-]{8}[Q-T][A-Za-z0-9_-][CGKOSWaeimquy26-][A-Za-z0-9_-]{10}[AQgw]$";

/// A slugid: a UUID of version 4 in 22 characters.
pub(crate) fn is_slugid(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.len() == 22
        && is_name(text)
        && (b'Q'..=b'T').contains(&bytes[8])
        && b"CGKOSWaeimquy26-".contains(&bytes[10])
        && b"AQgw".contains(&bytes[21])
}

/// Letters, digits, `-` and `_`.
pub(crate) fn is_name(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_')
}

fn is_project(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._/-".contains(&byte))
}

fn is_ascii(text: &str) -> bool {
    text.bytes().all(|byte| (b' '..=b'~').contains(&byte))
}

/// `provisionerId/workerType`, each a name of 1 to 38 characters.
pub(crate) fn is_queue_id(text: &str) -> bool {
    text.split_once('/').is_some_and(|(left, right)| {
        [left, right].into_iter().all(|part| (1..=38).contains(&part.len()) && is_name(part))
    })
}

/// The pattern of slugids, for refusals.
pub(crate) const fn slugid_pattern() -> &'static str {
    SLUGID_PATTERN
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const FIELDS: &[Field] = &[
        required("workerGroup", FieldType::Name(38)),
        required("workerId", FieldType::Name(38)),
        optional("tasks", FieldType::Integer(1, 32)),
        optional("when", FieldType::Time),
        optional("inner", FieldType::Nested(&[required("name", FieldType::Text(3))])),
    ];

    fn found(body: &Value, era: Era) -> Vec<String> {
        schema_errors(body.as_object().unwrap(), FIELDS, era)
    }

    #[test]
    fn each_finding_is_told_in_the_validators_words() {
        let body = json!({
            "workerGroup": "x".repeat(39), "workerId": "a b", "tasks": 33, "when": "noon",
            "inner": {"name": "long", "other": 1}, "spare": true,
        });
        assert_eq!(
            found(&body, Era::Modern),
            [
                "data must NOT have additional properties",
                "data/workerGroup must NOT have more than 38 characters",
                "data/workerId must match pattern \"^([a-zA-Z0-9-_]*)$\"",
                "data/tasks must be <= 32",
                "data/when must match format \"date-time\"",
                "data/inner must NOT have additional properties",
                "data/inner/name must NOT have more than 3 characters",
            ]
        );
    }

    #[test]
    fn the_older_service_says_should() {
        let body = json!({"workerGroup": "wg"});
        assert_eq!(found(&body, Era::Legacy), ["data should have required property 'workerId'"]);
        assert_eq!(found(&body, Era::Modern), ["data must have required property 'workerId'"]);
    }

    #[test]
    fn a_fitting_body_has_no_findings() {
        let body = json!({"workerGroup": "wg", "workerId": "w-1", "tasks": 32});
        assert_eq!(found(&body, Era::Modern), Vec::<String>::new());
        assert_eq!(
            found(&json!({"workerGroup": 1, "workerId": "w", "tasks": 0.5}), Era::Modern),
            ["data/workerGroup must be string", "data/tasks must be integer",]
        );
    }

    #[test]
    fn a_number_without_a_fraction_is_whole_however_it_is_written() {
        let tasks = |number: Value| check_integer(&number, 1, 32);
        assert_eq!(tasks(json!(1.0)), None);
        assert_eq!(tasks(json!(1e300)).unwrap(), "must be <= 32");
        assert_eq!(tasks(json!(u64::MAX)).unwrap(), "must be <= 32");
        assert_eq!(tasks(json!(1.5)).unwrap(), "must be integer");
        assert_eq!(tasks(json!("1")).unwrap(), "must be integer");
    }

    #[test]
    fn an_address_has_a_scheme_and_nothing_that_breaks_a_header() {
        let message = |text: &str| check_uri(&json!(text), 100);
        assert_eq!(message("https://example.com/a?b#c"), None);
        for text in ["", "example.com", "http://x\r\ny: z", "http://\u{e9}", "://x"] {
            assert!(message(text).is_some(), "{text}");
        }
    }

    #[test]
    fn a_slugid_is_told_from_what_only_looks_like_one() {
        assert!(is_slugid("XJOIQcqPRgykTZR_00-b1w"));
        assert!(!is_slugid("XJOIQcqPAgykTZR_00-b1w"));
        assert!(!is_slugid("XJOIQcqPRgykTZR_00-b1"));
        assert!(is_queue_id("test-prov/test-wt"));
        assert!(!is_queue_id("test-prov"));
        assert!(!is_queue_id("a/b/c"));
    }
}
