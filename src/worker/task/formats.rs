//! Ids, states and times in the queue's text form.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::Timestamp;

use journeyman_domain::id::TaskId;

/// The states of a task: those of its last run, or `unscheduled` before its first.
pub const TASK_STATES: [&str; 6] = ["unscheduled", "pending", "running", "completed", "failed", "exception"];

/// A new random task id.
pub fn new_task_id() -> TaskId {
    task_id_from_bytes(*uuid::Uuid::new_v4().as_bytes())
}

/// Encodes sixteen bytes as a task id: a version 4 UUID in 22 characters. Seven bits are fixed.
#[expect(clippy::expect_used, reason = "the alphabet holds nothing that an id may not")]
pub fn task_id_from_bytes(mut bytes: [u8; 16]) -> TaskId {
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    // Avoids a leading dash, which command lines take for an option.
    bytes[0] &= 0x7f;
    TaskId::parse(&URL_SAFE_NO_PAD.encode(bytes)).expect("22 characters of base64 are a task id")
}

/// Whether a text is a version 4 UUID in 22 characters of URL-safe base64.
pub fn is_slugid(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.len() == 22
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
        && matches!(bytes[8], b'Q'..=b'T')
        && b"CGKOSWaeimquy26-".contains(&bytes[10])
        && b"AQgw".contains(&bytes[21])
}

/// Formats a time as the queue does.
pub fn format_time(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_what_taskcluster_calls_a_slug() {
        for number in 0..=255 {
            for id in [task_id_from_bytes([number; 16]), new_task_id()] {
                // ^[A-Za-z0-9_-]{8}[Q-T][A-Za-z0-9_-][CGKOSWaeimquy26-][A-Za-z0-9_-]{10}[AQgw]$
                let letters: Vec<char> = id.as_str().chars().collect();
                assert_eq!(letters.len(), 22, "{id}");
                assert!(('Q'..='T').contains(&letters[8]), "{id}");
                assert!("CGKOSWaeimquy26-".contains(letters[10]) && "AQgw".contains(letters[21]), "{id}");
                assert!(letters[0].is_ascii_uppercase() || ('a'..='f').contains(&letters[0]), "{id}");
            }
        }
    }
}
