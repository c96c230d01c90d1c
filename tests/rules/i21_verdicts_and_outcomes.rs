//! I21: `malformed-payload` only if no task code ran, `failed` only if it ran and exited by itself, not if the worker killed it.

use journeyman_domain::claim::{ClaimAction, ClaimEvent, UploadStatus};
use journeyman_domain::outcome::{ExceptionReason, ExecuteFailure, Outcome, PrepareFailure, Verdict};

use crate::rules::support::{COMPLETED, FAILED, One, RELEASE_CLAIM, REPORTED, Reclaims, UPLOADED, at};

const VERDICTS: [Verdict; 5] = [
    Ok(()),
    Err(ExecuteFailure::Failed),
    Err(ExecuteFailure::Intermittent),
    Err(ExecuteFailure::Unavailable),
    Err(ExecuteFailure::Internal),
];

fn reported(acts: &[ClaimAction]) -> Option<Outcome> {
    acts.iter().find_map(|act| if let ClaimAction::Report { outcome, .. } = act { Some(*outcome) } else { None })
}

#[test]
fn i21_what_was_not_prepared_is_reported_by_its_reason_and_never_executed() {
    for (unprepared, reason) in [
        (PrepareFailure::Malformed, ExceptionReason::MalformedPayload),
        (PrepareFailure::Unavailable, ExceptionReason::ResourceUnavailable),
        (PrepareFailure::Internal, ExceptionReason::InternalError),
    ] {
        let mut one = One::preparing();
        assert_eq!(one.happens(ClaimEvent::Prepared(Err(unprepared))), [ClaimAction::Upload]);
        // Neither a missing artifact nor a log that cannot be stored changes what is the matter with the payload.
        for settled in [UploadStatus::Complete, UploadStatus::ArtifactMissing, UploadStatus::UploadFailed] {
            let mut one = One::preparing();
            one.happens(ClaimEvent::Prepared(Err(unprepared)));
            assert_eq!(reported(&one.happens(ClaimEvent::Uploaded(settled))), Some(Outcome::Exception(reason)));
        }
    }
}

#[test]
fn i21_what_ran_to_its_end_is_reported_by_its_verdict() {
    for (verdict, outcome) in [
        (Ok(()), Outcome::Completed),
        (Err(ExecuteFailure::Failed), Outcome::Failed),
        (Err(ExecuteFailure::Intermittent), Outcome::Exception(ExceptionReason::IntermittentTask)),
        (Err(ExecuteFailure::Unavailable), Outcome::Exception(ExceptionReason::ResourceUnavailable)),
        (Err(ExecuteFailure::Internal), Outcome::Exception(ExceptionReason::InternalError)),
    ] {
        let mut one = One::executing();
        one.happens(ClaimEvent::Ended(verdict));
        assert_eq!(reported(&one.happens(UPLOADED)), Some(outcome));
    }
}

#[test]
fn i21_a_payload_that_we_ended_is_reported_as_our_going_whatever_it_said() {
    for verdict in VERDICTS {
        for mut one in [One::preparing(), One::executing()] {
            one.happens(RELEASE_CLAIM);
            let acts = one.happens(ClaimEvent::Ended(verdict));
            assert_eq!(reported(&acts), Some(Outcome::Exception(ExceptionReason::WorkerShutdown)), "{verdict:?}");
        }
    }
}

#[test]
fn i21_what_ended_before_it_was_started_is_a_fault_of_ours() {
    for verdict in VERDICTS {
        let mut one = One::preparing();
        assert_eq!(one.happens(ClaimEvent::Ended(verdict)), [ClaimAction::Upload]);
        let acts = one.happens(UPLOADED);
        assert_eq!(reported(&acts), Some(Outcome::Exception(ExceptionReason::InternalError)), "{verdict:?}");
    }
}

#[test]
fn i21_a_success_without_its_artifacts_is_none() {
    for (settled, outcome) in [
        (UploadStatus::Complete, Outcome::Completed),
        (UploadStatus::ArtifactMissing, Outcome::Failed),
        (UploadStatus::UploadFailed, Outcome::Exception(ExceptionReason::ResourceUnavailable)),
    ] {
        let mut one = One::settling();
        assert_eq!(reported(&one.happens(ClaimEvent::Uploaded(settled))), Some(outcome));
    }
}

#[test]
fn i21_a_failure_stays_one_whatever_became_of_its_artifacts() {
    for settled in [UploadStatus::ArtifactMissing, UploadStatus::UploadFailed] {
        let mut one = One::executing();
        one.happens(FAILED);
        assert_eq!(reported(&one.happens(ClaimEvent::Uploaded(settled))), Some(Outcome::Failed));
    }
}

#[test]
fn i21_log_and_artifacts_come_before_the_outcome_and_on_a_hurried_way_out_after_it() {
    let mut one = One::executing();
    assert_eq!(one.happens(COMPLETED), [ClaimAction::Upload]);
    assert_eq!(one.pass_to(at(60), Reclaims::Silent), [], "nothing is reported before the log is stored");

    let mut one = One::executing();
    one.happens(RELEASE_CLAIM);
    assert!(matches!(one.happens(FAILED)[..], [ClaimAction::Report { .. }]));
    assert_eq!(one.happens(REPORTED), [ClaimAction::Upload]);
}
