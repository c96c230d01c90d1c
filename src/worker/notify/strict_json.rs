//! Refuses in valid JSON what parsers of receivers refuse.

use serde_json::Value;

use journeyman_domain::limits::NOTIFIER_NESTING_MAX;

/// # Errors
///
/// Half of a surrogate pair, numbers without a limit, and values that nest too deep. The error has the place, where there is one.
pub(super) fn check(json: &str) -> Result<(), String> {
    let value: Value = serde_json::from_slice(json.as_bytes()).map_err(|error| error.to_string())?;
    if depth(&value) > NOTIFIER_NESTING_MAX {
        return Err(format!("values that nest deeper than {NOTIFIER_NESTING_MAX} levels"));
    }
    Ok(())
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
        Value::Object(fields) => 1 + fields.values().map(depth).max().unwrap_or(0),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f9_what_other_parsers_refuse_is_found_with_its_place() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        for (json, expected) in [
            (r#"{"a": "\ud83d\ude00 \\ud800", "b": [1e308, -0.5E+3, 0]}"#, ""),
            (r#""\ud800""#, "line 1 column 8"),
            (r#"{"\udc00x": 1}"#, "surrogate"),
            (r#"["\\\"", "\ud83d\u0041"]"#, "surrogate"),
            (r#""\ud83d""#, "line 1 column 8"),
            ("[1,\n -1e999999]", "out of range at line 2"),
            (&nested(NOTIFIER_NESTING_MAX), ""),
            (&nested(NOTIFIER_NESTING_MAX + 1), "deeper than 62 levels"),
            (&nested(100_000), "recursion limit"),
            (&format!("[{}]", vec!["[]"; 100].join(",")), ""),
        ] {
            let refused = check(json).err().unwrap_or_default();
            let is_expected = refused.contains(expected) && refused.is_empty() == expected.is_empty();
            assert!(is_expected, "{json:.80}: {refused}");
        }
    }
}
