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
fn every_corpus_input_is_accepted_or_rejected() {
    replay::every_corpus_input_is_accepted_or_rejected(&TARGETS);
}

#[test]
fn random_changes_of_corpus_inputs_are_accepted_or_rejected() {
    replay::random_changes_of_corpus_inputs_are_accepted_or_rejected(&TARGETS);
}
