//! Events, as their sources send them.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::strict_json;
use journeyman_domain::limits::{NOTIFIER_DATA_BYTES_MAX, NOTIFIER_NAME_BYTES_MAX};

/// The beginning of the types of the notifier's own events, which no `*` alone stands for.
pub const OWN_TYPES: &str = "notifier.";

/// Something that has happened, for the endpoints that want its type.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Event {
    /// Who sends it, and under which id: the same one twice is one event.
    pub source: String,
    pub id: String,
    /// Such as `build.finished`.
    pub r#type: String,
    /// Events of one key arrive at an endpoint in the order in which they were accepted.
    pub key: String,
    /// Of what the key names: a run that starts over counts its events anew.
    pub epoch: Option<u32>,
    /// The time of the event; built-in: when it is accepted.
    pub time: Option<Timestamp>,
    /// No other event of the epoch follows.
    #[serde(default)]
    pub last: bool,
    pub data: Box<RawValue>,
}

impl Event {
    /// Whether it is one of the notifier's own about this endpoint, which does not get it.
    pub fn is_about(&self, endpoint: &str) -> bool {
        self.r#type.starts_with(OWN_TYPES) && self.key == endpoint
    }

    /// # Errors
    ///
    /// Fails if it cannot be stored, be sent in a header, or be parsed by a receiver.
    pub fn check(&self) -> Result<(), String> {
        self.check_with(NOTIFIER_DATA_BYTES_MAX)
    }

    /// The same with another limit of its data.
    ///
    /// # Errors
    ///
    /// Fails as [`Event::check`] does.
    pub fn check_with(&self, data_bytes_max: usize) -> Result<(), String> {
        for (field, text) in [("source", &self.source), ("id", &self.id), ("type", &self.r#type), ("key", &self.key)] {
            let is_good = (1..=NOTIFIER_NAME_BYTES_MAX).contains(&text.len()) && !text.contains(char::is_control);
            if !is_good {
                return Err(format!(
                    "{field} is empty, longer than {NOTIFIER_NAME_BYTES_MAX} bytes, or has control characters"
                ));
            }
        }
        let is_part = |part: &str| {
            !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte))
        };
        if !self.r#type.split('.').all(is_part) {
            return Err("type is not made of names with letters, digits, `_` and `-` that dots separate".to_owned());
        }
        if self.data.get().len() > data_bytes_max {
            return Err(format!("data has more than {data_bytes_max} bytes"));
        }
        strict_json::check(self.data.get()).map_err(|why| format!("data is refused by many parsers: {why}"))
    }
}
