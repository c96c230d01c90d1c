use super::*;

const LENGTH: Duration = Duration::from_secs(1200);

fn task(retries: u8) -> TaskRecord {
    let mut task = TaskRecord {
        task_id: "XJOIQcqPRgykTZR_00-b1w".to_owned(),
        queue: "p/w".to_owned(),
        scheduler: "-".to_owned(),
        project: "none".to_owned(),
        group: "XJOIQcqPRgykTZR_00-b1w".to_owned(),
        priority: Priority::Lowest,
        deadline: UnixMillis(3_600_000),
        expires: UnixMillis(7_200_000),
        name: "n".to_owned(),
        created: UnixMillis(1),
        retries,
        retries_left: retries,
        runs: Vec::new(),
    };
    task.schedule(UnixMillis(1));
    task
}

fn worker(id: &str) -> WorkerIdentity {
    WorkerIdentity { group: "wg".to_owned(), id: id.to_owned() }
}

fn running(retries: u8) -> TaskRecord {
    let mut task = task(retries);
    assert_eq!(task.claim(0, &worker("w1"), UnixMillis(10), LENGTH), Ok(()));
    task
}

#[test]
fn a_claim_repeated_by_the_same_worker_is_the_same_claim() {
    let mut task = running(0);
    let before = task.clone();
    assert_eq!(task.claim(0, &worker("w1"), UnixMillis(500), LENGTH), Ok(()));
    assert_eq!(task, before);
    assert_eq!(task.claim(0, &worker("w2"), UnixMillis(500), LENGTH), Err(RunError::AlreadyClaimed));
    assert_eq!(task.claim(5, &worker("w1"), UnixMillis(500), LENGTH), Err(RunError::NoSuchRun));
}

#[test]
fn nothing_is_claimed_or_reclaimed_at_or_after_the_deadline_but_a_report_still_counts() {
    let mut task = running(0);
    let deadline = task.deadline;
    assert_eq!(task.claim(0, &worker("w1"), deadline, LENGTH), Err(RunError::PastDeadline));
    assert_eq!(task.reclaim(0, deadline, LENGTH), Err(RunError::PastDeadline));
    assert_eq!(task.report(0, ResolvedReason::Completed, deadline.plus(LENGTH)), Ok(()));
}

#[test]
fn a_reclaim_after_taken_until_counts_until_somebody_has_resolved_the_run() {
    let mut task = running(1);
    let late = UnixMillis(10).plus(LENGTH).plus(Duration::from_secs(1));
    assert_eq!(task.reclaim(0, late, LENGTH), Ok(()));
    assert_eq!(task.running_until(), Some(late.plus(LENGTH)));
    let later = late.plus(LENGTH);
    task.expire_claim(later);
    assert_eq!(task.reclaim(0, later, LENGTH), Err(RunError::NotRunning));
    assert_eq!(task.runs[0].ending, Some(ResolvedReason::ClaimExpired));
    assert_eq!(task.runs[1].origin, CreatedReason::Retry);
    assert_eq!(task.runs[1].scheduled, task.runs[0].resolved.unwrap());
    assert_eq!(task.retries_left, 0);
}

#[test]
fn a_reclaim_never_moves_the_end_of_a_claim_backwards() {
    let mut task = running(0);
    let until = task.running_until();
    assert_eq!(task.reclaim(0, UnixMillis(20), Duration::from_secs(1)), Ok(()));
    assert_eq!(task.running_until(), until);
}

#[test]
fn a_claim_does_not_expire_early() {
    let mut task = running(1);
    task.expire_claim(UnixMillis(9).plus(LENGTH));
    assert_eq!(task.runs[0].state, RunState::Running);
}

#[test]
fn only_shutdown_intermittent_and_expiry_are_retried_and_only_while_retries_are_left() {
    for (ending, origin) in [
        (ResolvedReason::WorkerShutdown, Some(CreatedReason::Retry)),
        (ResolvedReason::IntermittentTask, Some(CreatedReason::TaskRetry)),
        (ResolvedReason::MalformedPayload, None),
        (ResolvedReason::ResourceUnavailable, None),
        (ResolvedReason::InternalError, None),
        (ResolvedReason::Superseded, None),
    ] {
        let mut task = running(1);
        assert_eq!(task.report(0, ending, UnixMillis(50)), Ok(()));
        assert_eq!(task.runs.get(1).map(|run| run.origin), origin, "{ending:?}");
        assert_eq!(task.retries_left, u8::from(origin.is_none()));

        let mut last = running(0);
        assert_eq!(last.report(0, ending, UnixMillis(50)), Ok(()));
        assert_eq!(last.runs.len(), 1, "{ending:?} without retries left");
        assert!(!last.is_open());
    }
}

#[test]
fn the_same_report_again_is_accepted_and_another_one_is_not() {
    let mut done = running(1);
    assert_eq!(done.report(0, ResolvedReason::Completed, UnixMillis(50)), Ok(()));
    let before = done.clone();
    assert_eq!(done.report(0, ResolvedReason::Completed, UnixMillis(60)), Ok(()));
    assert_eq!(done, before);
    assert_eq!(done.report(0, ResolvedReason::Failed, UnixMillis(60)), Err(RunError::NotRunning));
    assert_eq!(done.report(0, ResolvedReason::InternalError, UnixMillis(60)), Err(RunError::NotRunning));

    let mut left = running(1);
    assert_eq!(left.report(0, ResolvedReason::WorkerShutdown, UnixMillis(50)), Ok(()));
    assert_eq!(left.report(0, ResolvedReason::WorkerShutdown, UnixMillis(60)), Ok(()));
    assert_eq!(left.report(0, ResolvedReason::InternalError, UnixMillis(60)), Err(RunError::NotRunning));
    assert_eq!(left.report(0, ResolvedReason::Completed, UnixMillis(60)), Err(RunError::NotRunning));
    assert_eq!(left.runs.len(), 2);
}

#[test]
fn an_outcome_of_a_pending_run_is_refused() {
    let mut task = task(1);
    assert_eq!(task.report(0, ResolvedReason::Completed, UnixMillis(5)), Err(RunError::NotRunning));
    assert_eq!(task.report(0, ResolvedReason::WorkerShutdown, UnixMillis(5)), Err(RunError::NotRunning));
    assert_eq!(task.report(3, ResolvedReason::Completed, UnixMillis(5)), Err(RunError::NoSuchRun));
}

#[test]
fn cancel_resolves_what_is_open_and_leaves_what_is_resolved() {
    let mut task = running(3);
    assert_eq!(task.cancel(UnixMillis(50)), Ok(()));
    assert_eq!(task.runs[0].ending, Some(ResolvedReason::Canceled));
    assert_eq!(task.runs.len(), 1);
    assert_eq!(task.cancel(UnixMillis(60)), Ok(()));
    assert_eq!(task.cancel(task.deadline.plus(LENGTH)), Err(RunError::PastDeadline));

    let mut bare = task.clone();
    bare.runs.clear();
    assert_eq!(bare.cancel(UnixMillis(50)), Ok(()));
    assert_eq!(bare.runs[0].origin, CreatedReason::Exception);
    assert!(!bare.is_open());
}

#[test]
fn a_rerun_gives_the_retries_back_and_stops_at_fifty_runs() {
    let mut task = running(49);
    assert_eq!(task.rerun(UnixMillis(20)), Ok(()));
    assert_eq!(task.cancel(UnixMillis(50)), Ok(()));
    assert_eq!(task.rerun(UnixMillis(60)), Ok(()));
    assert_eq!(task.retries_left, 48);
    while task.runs.len() < QUEUE_RUNS_MAX {
        assert_eq!(task.cancel(UnixMillis(70)), Ok(()));
        assert_eq!(task.rerun(UnixMillis(80)), Ok(()));
    }
    assert_eq!(task.cancel(UnixMillis(90)), Ok(()));
    assert_eq!(task.rerun(UnixMillis(95)), Err(RunError::TooManyRuns));
    assert_eq!(task.rerun(task.deadline.plus(LENGTH)), Err(RunError::PastDeadline));
}

#[test]
fn a_report_for_a_run_that_was_rerun_since_is_refused() {
    let mut task = running(0);
    assert_eq!(task.report(0, ResolvedReason::Failed, UnixMillis(50)), Ok(()));
    assert_eq!(task.rerun(UnixMillis(60)), Ok(()));
    assert_eq!(task.report(0, ResolvedReason::Failed, UnixMillis(70)), Err(RunError::NotRunning));
    assert_eq!(task.reclaim(0, UnixMillis(70), LENGTH), Err(RunError::NotRunning));
}

#[test]
fn the_deadline_ends_a_task_without_a_retry() {
    let mut task = running(3);
    task.expire_deadline(UnixMillis(100));
    assert!(task.is_open());
    task.expire_deadline(task.deadline);
    assert_eq!(task.runs.len(), 1);
    assert_eq!(task.runs[0].ending, Some(ResolvedReason::DeadlineExceeded));
}

/// Any sequence of calls keeps what the protocol promises: one open run at most, and that the last; a bounded number of
/// runs; a resolved run stays as it was.
mod any_sequence {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn keeps_one_open_run_and_never_rewrites_a_resolved_one(
            retries in 0_u8..=49,
            calls in proptest::collection::vec((0_u8..9, 0_u32..4, 0_i64..2_000_000), 0..120),
        ) {
            let mut task = task(retries);
            let mut now = UnixMillis(10);
            for (call, back, wait) in calls {
                now = UnixMillis(now.0 + wait);
                let before = task.clone();
                let last = u32::try_from(task.runs.len() - 1).unwrap();
                let run = last.saturating_sub(back);
                match call {
                    0 => { task.claim(run, &worker("w1"), now, LENGTH).ok(); }
                    1 => { task.claim(run, &worker("w2"), now, LENGTH).ok(); }
                    2 => { task.reclaim(run, now, LENGTH).ok(); }
                    3 => { task.report(run, ResolvedReason::Completed, now).ok(); }
                    4 => { task.report(run, ResolvedReason::WorkerShutdown, now).ok(); }
                    5 => { task.cancel(now).ok(); }
                    6 => { task.rerun(now).ok(); }
                    7 => { task.expire_claim(now); }
                    _ => { task.expire_deadline(now); }
                }
                prop_assert!(task.runs.len() <= QUEUE_RUNS_MAX);
                prop_assert!(task.retries_left <= retries);
                let (_, earlier) = task.runs.split_last().unwrap();
                prop_assert!(earlier.iter().all(|run| run.state.is_resolved()));
                for (old, new) in before.runs.iter().zip(&task.runs) {
                    if old.state.is_resolved() {
                        prop_assert_eq!(old, new);
                    }
                }
            }
        }
    }
}
