//! Fuzzing of the configuration and the redaction. The targets of the Taskcluster source are beside it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    clippy::wildcard_enum_match_arm,
    reason = "a test fails by panicking"
)]

mod replay;
mod targets;

use targets::TARGETS;

#[test]
fn corpus_inputs_and_their_changes_are_accepted_or_rejected() {
    replay::run(&TARGETS);
}
