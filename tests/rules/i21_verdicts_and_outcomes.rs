//! I21: `malformed-payload` only if no task code ran, `failed` only if it ran and ended by itself; a kill of ours is neither.

use journeyman::domain::claim::{Act, Happening, Settled};
use journeyman::domain::outcome::{Outcome, Reason, Unprepared, Verdict};

use crate::support::{One, Reclaims, at};

const VERDICTS: [Verdict; 5] =
    [Verdict::Completed, Verdict::Failed, Verdict::Intermittent, Verdict::Unavailable, Verdict::Internal];

fn reported(acts: &[Act]) -> Option<Outcome> {
    acts.iter().find_map(|act| if let Act::Report { outcome, .. } = act { Some(*outcome) } else { None })
}

#[test]
fn i21_what_was_not_prepared_is_reported_by_its_reason_and_never_executed() {
    for (unprepared, reason) in [
        (Unprepared::Malformed, Reason::MalformedPayload),
        (Unprepared::Unavailable, Reason::ResourceUnavailable),
        (Unprepared::Internal, Reason::InternalError),
    ] {
        let mut one = One::preparing();
        assert_eq!(one.happens(Happening::Prepared(Err(unprepared))), [Act::Settle]);
        // Neither a missing artifact nor a log that cannot be stored changes what is the matter with the payload.
        for settled in [Settled::Clean, Settled::Missing, Settled::Unstored] {
            let mut one = One::preparing();
            one.happens(Happening::Prepared(Err(unprepared)));
            assert_eq!(reported(&one.happens(Happening::Settled(settled))), Some(Outcome::Exception(reason)));
        }
    }
}

#[test]
fn i21_what_was_started_as_soon_as_it_was_prepared_ran() {
    let mut one = One::preparing();
    one.happens(Happening::Started);
    assert_eq!(one.happens(Happening::Started), [], "said twice");
    assert_eq!(one.happens(Happening::Ended(Verdict::Completed)), [Act::Settle]);
    assert_eq!(reported(&one.happens(Happening::Settled(Settled::Clean))), Some(Outcome::Completed));
    // Told to end before that was known: its word does not count.
    let mut one = One::preparing();
    assert!(matches!(one.happens(Happening::HandBack { deadline: None })[..], [Act::Kill { .. }]));
    assert_eq!(one.happens(Happening::Started), []);
    let acts = one.happens(Happening::Ended(Verdict::Completed));
    assert_eq!(reported(&acts), Some(Outcome::Exception(Reason::WorkerShutdown)));
}

#[test]
fn i21_what_ran_to_its_end_is_reported_by_its_verdict() {
    for (verdict, outcome) in [
        (Verdict::Completed, Outcome::Completed),
        (Verdict::Failed, Outcome::Failed),
        (Verdict::Intermittent, Outcome::Exception(Reason::IntermittentTask)),
        (Verdict::Unavailable, Outcome::Exception(Reason::ResourceUnavailable)),
        (Verdict::Internal, Outcome::Exception(Reason::InternalError)),
    ] {
        let mut one = One::executing();
        one.happens(Happening::Ended(verdict));
        assert_eq!(reported(&one.happens(Happening::Settled(Settled::Clean))), Some(outcome));
    }
}

#[test]
fn i21_a_payload_that_we_ended_is_reported_as_our_going_whatever_it_said() {
    for verdict in VERDICTS {
        for mut one in [One::preparing(), One::executing()] {
            one.happens(Happening::HandBack { deadline: None });
            let acts = one.happens(Happening::Ended(verdict));
            assert_eq!(reported(&acts), Some(Outcome::Exception(Reason::WorkerShutdown)), "{verdict:?}");
        }
    }
}

#[test]
fn i21_what_ended_before_it_was_started_is_a_fault_of_ours() {
    for verdict in VERDICTS {
        let mut one = One::preparing();
        assert_eq!(one.happens(Happening::Ended(verdict)), [Act::Settle]);
        let acts = one.happens(Happening::Settled(Settled::Clean));
        assert_eq!(reported(&acts), Some(Outcome::Exception(Reason::InternalError)), "{verdict:?}");
    }
}

#[test]
fn i21_a_success_without_its_artifacts_is_none() {
    for (settled, outcome) in [
        (Settled::Clean, Outcome::Completed),
        (Settled::Missing, Outcome::Failed),
        (Settled::Unstored, Outcome::Exception(Reason::ResourceUnavailable)),
    ] {
        let mut one = One::settling();
        assert_eq!(reported(&one.happens(Happening::Settled(settled))), Some(outcome));
    }
}

#[test]
fn i21_a_failure_stays_one_whatever_became_of_its_artifacts() {
    for settled in [Settled::Missing, Settled::Unstored] {
        let mut one = One::executing();
        one.happens(Happening::Ended(Verdict::Failed));
        assert_eq!(reported(&one.happens(Happening::Settled(settled))), Some(Outcome::Failed));
    }
}

#[test]
fn i21_log_and_artifacts_come_before_the_outcome_and_on_a_hurried_way_out_after_it() {
    let mut one = One::executing();
    assert_eq!(one.happens(Happening::Ended(Verdict::Completed)), [Act::Settle]);
    assert_eq!(one.pass_to(at(60), Reclaims::Silent), [], "nothing is reported before the log is stored");

    let mut one = One::executing();
    one.happens(Happening::HandBack { deadline: None });
    assert!(matches!(one.happens(Happening::Ended(Verdict::Failed))[..], [Act::Report { .. }]));
    assert_eq!(one.happens(Happening::Reported(Ok(()))), [Act::Settle]);
}

#[test]
fn i21_the_queue_spells_the_reasons_so() {
    let spelled = [
        (Reason::WorkerShutdown, "worker-shutdown"),
        (Reason::MalformedPayload, "malformed-payload"),
        (Reason::ResourceUnavailable, "resource-unavailable"),
        (Reason::InternalError, "internal-error"),
        (Reason::IntermittentTask, "intermittent-task"),
    ];
    for (reason, text) in spelled {
        assert_eq!(reason.as_str(), text);
        assert_eq!(Outcome::Exception(reason).to_string(), format!("exception ({text})"));
    }
}
