//! JSON Schemas that are committed beside the types they describe. The development profile derives them, because `cfg(test)`
//! does not reach the other crates; the release profile does not, because the derived code would be a large part of the program.
//! Tests of the crate `journeyman` compare them.

use serde_json::Value;

/// Parses a committed schema.
#[expect(clippy::expect_used, reason = "a test compares each file with its type")]
pub fn parse(file: &str) -> Value {
    serde_json::from_slice(file.as_bytes()).expect("a committed schema is JSON")
}
