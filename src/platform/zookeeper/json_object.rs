//! A JSON object of another program: some values are changed, and every other stays as it is, byte for byte.
//!
//! Zuul's requests carry keys that this program does not know and integers of 128 bits, which a number of `serde_json` would
//! round.

use std::fmt;

use serde::de::{DeserializeOwned, Error as _, MapAccess, Visitor};
use serde::ser::SerializeMap as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

/// A JSON object in its own order.
#[derive(Debug, Clone, Default)]
pub struct JsonObject(Vec<(String, Box<RawValue>)>);

impl JsonObject {
    /// Reads an object.
    ///
    /// # Errors
    ///
    /// Fails if it is no JSON object.
    pub fn parse(text: &[u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(text)
    }

    /// Reads a value; `None` if it is absent, null or of another shape.
    pub fn get<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        let (_, value) = self.0.iter().find(|(name, _)| name == key)?;
        serde_json::from_slice::<Option<T>>(value.get().as_bytes()).ok().flatten()
    }

    /// Replaces a value, or adds it at the end.
    ///
    /// # Errors
    ///
    /// Fails if the value cannot be written as JSON.
    pub fn set(&mut self, key: &str, value: &impl Serialize) -> serde_json::Result<()> {
        let value = serde_json::value::to_raw_value(value)?;
        match self.0.iter_mut().find(|(name, _)| name == key) {
            Some((_, old)) => *old = value,
            None => self.0.push((key.to_owned(), value)),
        }
        Ok(())
    }

    /// Writes the object.
    ///
    /// # Errors
    ///
    /// None in practice: every value was JSON.
    pub fn to_bytes(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(self)
    }
}

impl Serialize for JsonObject {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, value) in &self.0 {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for JsonObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = JsonObject;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<JsonObject, A::Error> {
                let mut entries: Vec<(String, Box<RawValue>)> = Vec::new();
                while let Some((key, value)) = map.next_entry::<String, Box<RawValue>>()? {
                    if entries.iter().any(|(name, _)| *name == key) {
                        return Err(A::Error::custom(format_args!("the key {key:?} is there twice")));
                    }
                    entries.push((key, value));
                }
                Ok(JsonObject(entries))
            }
        }

        deserializer.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_changed_stays_byte_for_byte() {
        let text = br#"{"precedence":200,"span_context":{"trace_id": 258308413912233283120733312906718472447, "x":1e400},"state":"requested","zz":[1, 2]}"#;
        let mut object = JsonObject::parse(text).unwrap();
        object.set("state", &"running").unwrap();
        let written = String::from_utf8(object.to_bytes().unwrap()).unwrap();
        assert_eq!(written, String::from_utf8_lossy(text).replace("requested", "running"));
        assert_eq!((object.get::<i64>("precedence"), object.get::<String>("missing")), (Some(200), None));
    }

    #[test]
    fn anything_but_an_object_is_refused() {
        for text in ["[]", "1", "{\"a\":1", "{\"a\":1,\"a\":2}", ""] {
            assert!(JsonObject::parse(text.as_bytes()).is_err(), "{text}");
        }
    }
}
