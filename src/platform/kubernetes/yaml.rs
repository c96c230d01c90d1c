//! Reads YAML as JSON, without anchors. Depth is bounded, so a small text stays small, and no error quotes the text.

use granit_parser::{Event, Parser, ScalarStyle, ScanError, Span, Tag};
use serde_json::{Map, Number, Value};

use journeyman_domain::limits::YAML_DEPTH_MAX;

/// The only document of a text; null if it is empty.
pub fn from_str(text: &str) -> Result<Value, String> {
    let mut reader = Reader { events: &mut Parser::new_from_str(text), line: 1 };
    reader.document().map_err(|why| format!("{why} at line {}", reader.line))
}

struct Reader<'r, 't> {
    events: &'r mut dyn Iterator<Item = Result<(Event<'t>, Span), ScanError>>,
    line: usize,
}

impl<'t> Reader<'_, 't> {
    fn next(&mut self) -> Result<Event<'t>, String> {
        let Some(event) = self.events.next() else { return Ok(Event::StreamEnd) };
        let (event, span) = event.map_err(|error| {
            self.line = error.marker().line();
            error.info()
        })?;
        self.line = span.start.line();
        Ok(event)
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "every other event is part of a value")]
    fn document(&mut self) -> Result<Value, String> {
        let mut document = None;
        loop {
            match self.next()? {
                Event::StreamEnd => return Ok(document.unwrap_or_default()),
                Event::StreamStart | Event::DocumentEnd => {}
                Event::DocumentStart(..) if document.is_some() => {
                    return Err("there is more than one document".to_owned());
                }
                Event::DocumentStart(..) => {}
                event => document = Some(self.value(event, 0)?),
            }
        }
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "no other event begins a value, or is a key")]
    fn value(&mut self, event: Event<'t>, depth: usize) -> Result<Value, String> {
        if depth > YAML_DEPTH_MAX {
            return Err(format!("it is nested more than {YAML_DEPTH_MAX} deep"));
        }
        match event {
            Event::Scalar(text, style, _, tag) => scalar(&text, style, tag.as_deref()),
            Event::SequenceStart(..) => {
                let mut items = Vec::new();
                loop {
                    match self.next()? {
                        Event::SequenceEnd => return Ok(Value::Array(items)),
                        event => items.push(self.value(event, depth + 1)?),
                    }
                }
            }
            Event::MappingStart(..) => {
                let mut fields = Map::new();
                loop {
                    let name = match self.next()? {
                        Event::MappingEnd => return Ok(Value::Object(fields)),
                        Event::Scalar(name, ..) => name.into_owned(),
                        _ => return Err("a key is not a text".to_owned()),
                    };
                    if fields.contains_key(&name) {
                        return Err("a key is repeated".to_owned());
                    }
                    let event = self.next()?;
                    fields.insert(name, self.value(event, depth + 1)?);
                }
            }
            Event::Alias(_) | Event::UnresolvedAlias(_) => {
                Err("an alias of an anchor has to be written out".to_owned())
            }
            _ => Err("there is no value".to_owned()),
        }
    }
}

fn scalar(text: &str, style: ScalarStyle, tag: Option<&Tag>) -> Result<Value, String> {
    let is_text = match tag {
        None => style != ScalarStyle::Plain,
        Some(tag) => match tag.core_suffix() {
            Some("null" | "bool" | "int" | "float") => false,
            Some(_) => true,
            None => style != ScalarStyle::Plain || matches!(tag.suffix(), "!" | "binary"),
        },
    };
    if is_text {
        return Ok(Value::String(text.to_owned()));
    }
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Ok(Value::Null),
        ".inf" | ".Inf" | ".INF" | "+.inf" | "-.inf" | "-.Inf" | "-.INF" | ".nan" | ".NaN" | ".NAN" => {
            return Err("a number is not finite".to_owned());
        }
        _ => {}
    }
    let is_one = |names: [&str; 4]| names.iter().any(|name| text.eq_ignore_ascii_case(name));
    if is_one(["true", "yes", "on", "y"]) || is_one(["false", "no", "off", "n"]) {
        return Ok(Value::Bool(is_one(["true", "yes", "on", "y"])));
    }
    Ok(number(text).map_or_else(|| Value::String(text.to_owned()), Value::Number))
}

fn number(text: &str) -> Option<Number> {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    for (prefix, radix) in [("0x", 16), ("0o", 8), ("0b", 2)] {
        if let Some(digits) = unsigned.strip_prefix(prefix) {
            let value = u64::from_str_radix(digits, radix).ok().filter(|_| unsigned.len() == text.len());
            return value.map(Number::from);
        }
    }
    // `0644` and `1_000` are texts, as `1.2.3` is.
    let is_padded =
        unsigned.len() > 1 && unsigned.starts_with('0') && unsigned.bytes().all(|byte| byte.is_ascii_digit());
    let is_number = unsigned.bytes().all(|byte| byte.is_ascii_digit() || b".eE+-".contains(&byte))
        && unsigned.starts_with(|first: char| first.is_ascii_digit() || first == '.');
    if is_padded || !is_number {
        return None;
    }
    let whole = text.strip_prefix('+').unwrap_or(text);
    let whole_number = whole.parse::<u64>().map(Number::from).or_else(|_| whole.parse::<i64>().map(Number::from));
    whole_number.ok().or_else(|| Number::from_f64(whole.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn plain_values_have_the_types_of_yaml_and_others_are_texts() {
        for (text, expected) in [
            (
                "[a, 'b', \"c\\n\", 1, -2, +3, 1.5, -1e3, 0x1f, 0o17]",
                json!(["a", "b", "c\n", 1, -2, 3, 1.5, -1e3, 31, 15]),
            ),
            ("[null, ~, Null, 'null', nullx]", json!([null, null, null, "null", "nullx"])),
            ("[true, False, yes, OFF, 'true']", json!([true, false, true, false, "true"])),
            (
                "[0644, 1_000, 1.2.3, 1.2.3.4:80, 12:30, 1e, .]",
                json!(["0644", "1_000", "1.2.3", "1.2.3.4:80", "12:30", "1e", "."]),
            ),
            ("[!!str 1, !!int '1', ! 2, !!bool 'no', !own 3]", json!(["1", 1, "2", false, 3])),
            ("[18446744073709551615, -9223372036854775808, 1e999]", json!([u64::MAX, i64::MIN, "1e999"])),
            ("a: |\n  x\n  y\nb: >\n  x\n  y\n", json!({ "a": "x\ny\n", "b": "x y\n" })),
            ("1: a\ntrue: b\n", json!({ "1": "a", "true": "b" })),
            ("{\"a\": [{\"b\": \"\\u00e9\\/\"}]}", json!({ "a": [{ "b": "é/" }] })),
            ("", Value::Null),
            ("# nothing\n", Value::Null),
        ] {
            assert_eq!(from_str(text), Ok(expected), "{text}");
        }
    }

    #[test]
    fn what_is_no_single_tree_is_refused_without_its_text() {
        for (text, words) in [
            ("a: 1\ncanary: 2\ncanary: 3\n", "a key is repeated at line 3"),
            ("a: &canary [1]\nb: *canary\n", "an alias of an anchor has to be written out at line 2"),
            ("canary\n---\ncanary\n", "more than one document"),
            ("{ [canary]: 1 }", "a key is not a text"),
            ("canary: [", "line 1"),
            ("canary: .inf", "a number is not finite"),
        ] {
            let error = from_str(text).unwrap_err();
            assert!(error.contains(words) && !error.contains("canary"), "{text}: {error}");
        }
    }

    #[test]
    fn a_deep_text_is_refused() {
        for deep in ["[".repeat(100) + &"]".repeat(100), "- ".repeat(100)] {
            let error = from_str(&deep).unwrap_err();
            assert!(error.contains("nested more than"), "{error}");
        }
    }
}
