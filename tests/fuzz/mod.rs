//! Fuzzing of the configuration and the redaction. The targets of the Taskcluster source are beside it.

mod replay;
mod targets;

use targets::TARGETS;

#[test]
fn corpus_inputs_and_their_changes_are_accepted_or_rejected() {
    replay::run(&TARGETS);
}
