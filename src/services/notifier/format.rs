//! The bodies and ids of webhooks. Both depend on the event alone, so that each attempt sends the same.

use jiff::Timestamp;
use reqwest::header::HeaderValue;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::store::Head;

/// What an endpoint gets of an event.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// The JSON of Standard Webhooks: `type`, `timestamp` and `data`.
    #[default]
    Standard,
    /// The data alone, as a Mistral sends them.
    Mistral,
    /// A CloudEvent 1.0 in structured mode.
    CloudEvents,
}

impl Format {
    pub(super) const fn content_type(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::Standard | Self::Mistral => "application/json",
            Self::CloudEvents => "application/cloudevents+json",
        })
    }

    /// The body has the data of the event as it came.
    pub(super) fn body(self, head: &Head) -> Vec<u8> {
        let time = Timestamp::from_millisecond(head.occurred_at.0).unwrap_or_default();
        let text = |text: &str| serde_json::Value::from(text).to_string();
        let (event_type, time) = (text(&head.event_type), text(&time.to_string()));
        let before = match self {
            Self::Mistral => return head.data.clone(),
            Self::Standard => format!("{{\"type\":{event_type},\"timestamp\":{time},\"data\":"),
            Self::CloudEvents => {
                let (id, source, key) = (text(&head.event_id), text(&uri_reference(&head.source)), text(&head.key));
                format!(
                    "{{\"specversion\":\"1.0\",\"id\":{id},\"source\":{source},\"type\":{event_type},\"time\":{time},\
                     \"partitionkey\":{key},\"datacontenttype\":\"application/json\",\"data\":"
                )
            }
        };
        [before.as_bytes(), &head.data, b"}"].concat()
    }
}

/// The source of a CloudEvent is a URI reference.
fn uri_reference(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~:/?#[]@!$&'()*+,;=%".contains(&byte);
    let encode = |byte: u8| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(encode).collect()
}

/// The same for an event that its source sends again, whatever the store holds.
pub(super) fn webhook_id(source: &str, event_id: &str) -> HeaderValue {
    // No control character is in either.
    let hash = Sha256::new().chain_update(source).chain_update([0]).chain_update(event_id).finalize();
    let text = format!("evt_{}", hex::encode(hash.get(..16).unwrap_or(&hash)));
    // Letters, digits and `_`.
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("evt_"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use journeyman_domain::lane::dispatcher::LaneId;
    use journeyman_domain::lane::retry::HeadState;
    use journeyman_domain::staged::Stamp;

    #[test]
    fn each_format_has_the_data_byte_for_byte() {
        let head = Head {
            lane: LaneId(1),
            token: 0,
            is_replay: false,
            key: "build 7".to_owned(),
            position: 1,
            epoch: 0,
            seq: 1,
            state: HeadState::default(),
            source: "ci, à Paris".to_owned(),
            event_id: "7\"".to_owned(),
            event_type: "build.finished".to_owned(),
            occurred_at: Stamp(1_795_737_600_250),
            data: b"{ \"a\":  1.0}".to_vec(),
        };
        for (format, expected) in [
            (
                Format::Standard,
                r#"{"type":"build.finished","timestamp":"2026-11-27T00:00:00.25Z","data":{ "a":  1.0}}"#,
            ),
            (Format::Mistral, r#"{ "a":  1.0}"#),
            (
                Format::CloudEvents,
                r#"{"specversion":"1.0","id":"7\"","source":"ci,%20%C3%A0%20Paris","type":"build.finished","time":"2026-11-27T00:00:00.25Z","partitionkey":"build 7","datacontenttype":"application/json","data":{ "a":  1.0}}"#,
            ),
        ] {
            let body = format.body(&head);
            assert_eq!(String::from_utf8_lossy(&body), expected);
            assert!(serde_json::from_slice::<serde_json::Value>(&body).is_ok(), "{expected}");
        }
    }
}
