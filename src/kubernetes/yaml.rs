//! Reads YAML as JSON. What anchors and nesting make of a small text is bounded, and no error quotes the text.

use std::collections::HashMap;

use granit_parser::{Event, Parser, ScalarStyle, Tag};
use serde_json::{Map, Number, Value};

use journeyman_domain::limits::{YAML_BYTES_MAX, YAML_DEPTH_MAX};

/// What each value takes in memory, beside its text.
const VALUE_BYTES: usize = 64;

/// The only document of a text; null if there is none.
pub(crate) fn from_str(text: &str) -> Result<Value, String> {
    let mut reader = Reader { document: None, open: Vec::new(), anchors: HashMap::new(), bytes: 0 };
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| error.to_string())?;
        reader.read(event).map_err(|why| format!("{why} at line {}", span.start.line()))?;
    }
    Ok(reader.document.unwrap_or_default())
}

struct Anchored {
    value: Value,
    bytes: usize,
    depth: usize,
}

struct Open {
    value: Value,
    /// The key of a mapping that has no value yet.
    key: Option<Key>,
    /// Mappings whose fields count unless they are given.
    merged: Vec<Value>,
    anchor: usize,
}

enum Key {
    Field(String),
    Merge,
}

struct Reader {
    document: Option<Value>,
    open: Vec<Open>,
    anchors: HashMap<usize, Anchored>,
    bytes: usize,
}

impl Reader {
    fn read(&mut self, event: Event<'_>) -> Result<(), String> {
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let is_key = self.open.last().is_some_and(|open| open.value.is_object() && open.key.is_none());
                if is_key {
                    self.spend(text.len())?;
                    let is_merge = text == "<<" && style == ScalarStyle::Plain;
                    let key = if is_merge { Key::Merge } else { Key::Field(text.into_owned()) };
                    return self.set_key(key);
                }
                self.add(scalar(&text, style, tag.as_deref())?, anchor)
            }
            Event::SequenceStart(_, anchor, _) => self.begin(Value::Array(Vec::new()), anchor),
            Event::MappingStart(_, anchor, _) => self.begin(Value::Object(Map::new()), anchor),
            Event::SequenceEnd | Event::MappingEnd => {
                let Some(Open { mut value, merged, anchor, .. }) = self.open.pop() else { return Ok(()) };
                for (name, value_of) in merged.into_iter().filter_map(into_fields).flatten() {
                    if let Some(fields) = value.as_object_mut() {
                        fields.entry(name).or_insert(value_of);
                    }
                }
                self.add(value, anchor)
            }
            Event::Alias(anchor) => {
                let anchored = self.anchors.get(&anchor).ok_or("an alias has no whole value")?;
                let (bytes, depth) = (anchored.bytes, anchored.depth);
                self.check_depth(depth)?;
                // Before it is copied.
                self.spend(bytes)?;
                let value = self.anchors.get(&anchor).map(|anchored| anchored.value.clone());
                self.place(value.unwrap_or_default())
            }
            Event::DocumentStart(..) if self.document.is_some() => Err("there is more than one document".to_owned()),
            Event::UnresolvedAlias(_) => Err("an alias has no value".to_owned()),
            Event::StreamStart
            | Event::StreamEnd
            | Event::DocumentStart(..)
            | Event::DocumentEnd
            | Event::Anchor(..)
            | _ => Ok(()),
        }
    }

    fn begin(&mut self, value: Value, anchor: usize) -> Result<(), String> {
        if self.open.last().is_some_and(|open| open.value.is_object() && open.key.is_none()) {
            return Err("a key is not a text".to_owned());
        }
        self.open.push(Open { value, key: None, merged: Vec::new(), anchor });
        self.check_depth(0)
    }

    fn set_key(&mut self, key: Key) -> Result<(), String> {
        let Some(open) = self.open.last_mut() else { return Ok(()) };
        if let Key::Field(name) = &key
            && open.value.get(name).is_some()
        {
            return Err("a key is repeated".to_owned());
        }
        open.key = Some(key);
        Ok(())
    }

    /// Adds a value that was read.
    fn add(&mut self, value: Value, anchor: usize) -> Result<(), String> {
        self.spend(value.as_str().map_or(0, str::len))?;
        if anchor != 0 {
            let (bytes, depth) = measure(&value);
            self.spend(bytes)?;
            self.anchors.insert(anchor, Anchored { value: value.clone(), bytes, depth });
        }
        self.place(value)
    }

    fn place(&mut self, value: Value) -> Result<(), String> {
        let Some(open) = self.open.last_mut() else {
            self.document = Some(value);
            return Ok(());
        };
        match (&mut open.value, open.key.take()) {
            (Value::Object(_), Some(Key::Merge)) => match value {
                Value::Object(_) => open.merged.push(value),
                // The first one counts.
                Value::Array(several) if several.iter().all(Value::is_object) => open.merged.extend(several),
                Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                    return Err("what is merged is no mapping".to_owned());
                }
            },
            (Value::Object(fields), Some(Key::Field(name))) => {
                fields.insert(name, value);
            }
            (Value::Object(_), None) => match value {
                // An alias of a text is a key too.
                Value::String(name) => return self.set_key(Key::Field(name)),
                Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
                    return Err("a key is not a text".to_owned());
                }
            },
            (Value::Array(items), _) => items.push(value),
            _ => {}
        }
        Ok(())
    }

    fn spend(&mut self, bytes: usize) -> Result<(), String> {
        self.bytes += VALUE_BYTES + bytes;
        if self.bytes > YAML_BYTES_MAX { Err(format!("it has more than {YAML_BYTES_MAX} bytes")) } else { Ok(()) }
    }

    fn check_depth(&self, more: usize) -> Result<(), String> {
        let is_deep = self.open.len() + more > YAML_DEPTH_MAX;
        if is_deep { Err(format!("it is nested more than {YAML_DEPTH_MAX} deep")) } else { Ok(()) }
    }
}

fn into_fields(value: Value) -> Option<Map<String, Value>> {
    if let Value::Object(fields) = value { Some(fields) } else { None }
}

/// The memory of a value, and how deep it is.
fn measure(value: &Value) -> (usize, usize) {
    let own = VALUE_BYTES + value.as_str().map_or(0, str::len);
    let fields = value.as_object().into_iter().flatten().map(|(name, value)| (VALUE_BYTES + name.len(), value));
    let items = value.as_array().into_iter().flatten().map(|value| (0, value));
    let all = fields.chain(items).map(|(key, value)| (key, measure(value)));
    let is_collection = value.is_array() || value.is_object();
    let (bytes, depth) = all.fold((own, 0), |(sum, most), (key, (bytes, depth))| (sum + key + bytes, most.max(depth)));
    (bytes, depth + usize::from(is_collection))
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
    fn aliases_and_merged_mappings_are_copies() {
        let text = "a: &a { x: 1, y: 2 }\nb: *a\nc: { <<: *a, y: 3 }\nd: { y: 4, <<: [{ z: 5 }, *a, { z: 6 }] }\n";
        let a = json!({ "x": 1, "y": 2 });
        let merged = [json!({ "x": 1, "y": 3 }), json!({ "x": 1, "y": 4, "z": 5 })];
        assert_eq!(from_str(text), Ok(json!({ "a": a, "b": a, "c": merged[0], "d": merged[1] })));
    }

    #[test]
    fn what_is_no_single_tree_is_refused_without_its_text() {
        for (text, words) in [
            ("a: 1\ncanary: 2\ncanary: 3\n", "a key is repeated at line 3"),
            ("canary: &canary [*canary]\n", "an alias has no whole value"),
            ("canary\n---\ncanary\n", "more than one document"),
            ("{ [canary]: 1 }", "a key is not a text"),
            ("canary: [", "line 1"),
            ("canary: .inf", "a number is not finite"),
            ("<<: canary", "what is merged is no mapping"),
        ] {
            let error = from_str(text).unwrap_err();
            assert!(error.contains(words) && !error.contains("canary"), "{text}: {error}");
        }
    }

    #[test]
    fn a_small_text_does_not_become_a_large_or_deep_value() {
        let bomb: String = (1..30).map(|n| format!("a{n}: &a{n} [*a{p}, *a{p}]\n", p = n - 1)).collect();
        let error = from_str(&format!("a0: &a0 [x, x]\n{bomb}")).unwrap_err();
        assert!(error.contains("bytes"), "{error}");
        let long = "x".repeat(1 << 20);
        let error = from_str(&format!("a: &a {long}\nb: [{}]", "*a, ".repeat(1_000))).unwrap_err();
        assert!(error.contains("bytes"), "{error}");
        let chain: String = (1..100).map(|n| format!("a{n}: &a{n} [*a{}]\n", n - 1)).collect();
        for deep in [format!("a0: &a0 []\n{chain}"), "[".repeat(100) + &"]".repeat(100), "- ".repeat(100)] {
            let error = from_str(&deep).unwrap_err();
            assert!(error.contains("nested more than"), "{error}");
        }
    }
}
