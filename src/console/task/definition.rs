//! Definitions of new tasks.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Map, Value, json};

use journeyman_worker::task::formats::format_time;

pub(crate) const DESCRIPTION: &str = "created by journeyman";

/// Fills in what a definition needs and does not say. `None` if the deadline is too far.
pub(crate) fn complete(definition: &mut Map<String, Value>, name: &str, deadline: Duration) -> Option<()> {
    let now = Timestamp::now();
    let deadline = now.checked_add(SignedDuration::try_from(deadline).ok()?).ok()?;
    let mut fill = |key: &str, value: Value| {
        definition.entry(key).or_insert(value);
    };
    fill("created", json!(format_time(now)));
    fill("deadline", json!(format_time(deadline)));
    let metadata = json!({
        "name": name,
        "description": DESCRIPTION,
        "owner": "unknown@example.com",
        "source": "https://example.com/journeyman",
    });
    fill("metadata", metadata);
    Some(())
}
