//! Which events an endpoint gets by what they carry.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

/// JSON pointers into the data of an event, each with the value, or one of the values, that is there.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct ContentFilter(BTreeMap<String, Value>);

impl ContentFilter {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// # Errors
    ///
    /// A pointer or a value that matches nothing.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let is_simple = |value: &Value| !value.is_object() && !value.is_array();
        let is_good =
            |value: &Value| value.as_array().map_or_else(|| is_simple(value), |any| any.iter().all(is_simple));
        let good = self.0.iter().all(|(pointer, value)| pointer.starts_with('/') && is_good(value));
        good.then_some(()).ok_or("JSON pointers such as `/outcome`, each with a value or a list of values")
    }

    /// An event whose data cannot be read is not filtered out.
    pub(crate) fn matches(&self, data: &RawValue) -> bool {
        if self.is_empty() {
            return true;
        }
        let Ok(data) = serde_json::from_slice::<Value>(data.get().as_bytes()) else { return true };
        self.0.iter().all(|(pointer, wanted)| {
            let found = data.pointer(pointer).unwrap_or(&Value::Null);
            wanted.as_array().map_or_else(|| is_same(wanted, found), |any| any.iter().any(|one| is_same(one, found)))
        })
    }
}

/// 2 and 2.0 are the same number.
fn is_same(one: &Value, other: &Value) -> bool {
    one == other || one.as_f64().is_some_and(|number| other.as_f64() == Some(number))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_pointer_has_one_of_its_values() {
        let matches = |filter: Value, data: &str| {
            let filter: ContentFilter = serde_json::from_value(filter).unwrap();
            filter.check().unwrap();
            filter.matches(&RawValue::from_string(data.to_owned()).unwrap())
        };
        let failed = r#"{"outcome":"failed","run":{"id":2}}"#;
        for (filter, expected) in [
            (json!({}), true),
            (json!({ "/outcome": "failed" }), true),
            (json!({ "/outcome": ["failed", "exception"], "/run/id": 2 }), true),
            (json!({ "/run/id": [1, 2.0] }), true),
            (json!({ "/outcome": "failed", "/run/id": 3 }), false),
            (json!({ "/missing": "x" }), false),
            (json!({ "/missing": null }), true),
        ] {
            assert_eq!(matches(filter.clone(), failed), expected, "{filter}");
        }
        for filter in [json!({ "outcome": 1 }), json!({ "/a": { "b": 1 } }), json!({ "/a": [[1]] })] {
            assert!(serde_json::from_value::<ContentFilter>(filter).unwrap().check().is_err());
        }
    }
}
