//! The bodies and ids of webhooks. Both depend on the event alone, so that each attempt sends the same.

use jiff::Timestamp;
use sha2::{Digest as _, Sha256};

use super::delivery::WebhookId;
use super::store::Head;

/// The same for an event that its source sends again, whatever the store holds.
pub(super) fn webhook_id(source: &str, event_id: &str) -> WebhookId {
    let mut hash = Sha256::new();
    hash.update(source.as_bytes());
    // No control character is in either.
    hash.update([0]);
    hash.update(event_id.as_bytes());
    WebhookId::of_hash(&hash.finalize())
}

/// The body of Standard Webhooks, with the data of the event as it came.
pub(super) fn standard(head: &Head) -> Vec<u8> {
    let time = Timestamp::from_millisecond(head.occurred_at.0).unwrap_or_default();
    let text = |text: &str| serde_json::Value::from(text).to_string();
    let before = format!("{{\"type\":{},\"timestamp\":{},\"data\":", text(&head.event_type), text(&time.to_string()));
    [before.as_bytes(), &head.data, b"}"].concat()
}
