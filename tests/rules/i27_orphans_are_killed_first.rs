//! I27 under arbitrary events of a worker and its host: every journaled claim that is not closed is killed where its processes may
//! live, and reported or abandoned; nothing else is.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use journeyman_domain::claim::{ClaimEnd, LossReason};
use journeyman_domain::id::{Run, TaskId};
use journeyman_domain::journal::{
    self, BootId, ClaimRecord, EntryId, Journal, JournalRecord, Leader, LeftWork, ProcessRecord,
};
use journeyman_domain::outcome::{ExceptionReason, Outcome};

use crate::rules::support::SHUTDOWN;

/// What happens to a worker, as far as its journal is concerned.
#[derive(Debug, Clone)]
enum Step {
    Held { name: u8 },
    Leads { entry: u64 },
    Decided { entry: u64, outcome: Outcome },
    Over { entry: u64 },
}

/// What is not over: by which name it was claimed, and what was decided.
type Open = BTreeMap<u64, (u8, Option<Outcome>)>;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let outcomes = [Outcome::Completed, Outcome::Failed, SHUTDOWN];
    let step = prop_oneof![
        3 => (0_u8..3).prop_map(|name| Step::Held { name }),
        1 => (0_u64..12).prop_map(|entry| Step::Leads { entry }),
        2 => (0_u64..12, proptest::sample::select(outcomes.to_vec()))
            .prop_map(|(entry, outcome)| Step::Decided { entry, outcome }),
        2 => (0_u64..12).prop_map(|entry| Step::Over { entry }),
    ];
    proptest::collection::vec(step, 0..40)
}

fn run(number: u64) -> Run {
    Run { task: TaskId::parse(&format!("t{number}")).expect("a task id"), run: 0 }
}

fn claimant(name: u8) -> Box<str> {
    format!("claimant-{name}").into()
}

fn boot(name: &str) -> BootId {
    BootId(name.into())
}

/// The worker's records in their order, and what a reader has to make of them, worked out apart.
fn live(steps: &[Step]) -> (Vec<JournalRecord>, Open) {
    let mut journal = Journal::new(boot("one"));
    let (mut records, mut open, mut next) =
        (vec![JournalRecord::JournalStarted { boot: boot("one") }], BTreeMap::new(), 0);
    for step in steps {
        let record = match *step {
            Step::Held { name } => {
                next += 1;
                open.insert(next, (name, None));
                let remains = ProcessRecord { cookie: format!("c{next}").into(), ..ProcessRecord::default() };
                let held = ClaimRecord { run: run(next), claimant: claimant(name), processes: Some(remains) };
                JournalRecord::Claimed { entry: EntryId(next), claim: held }
            }
            Step::Leads { entry } => {
                JournalRecord::ProcessStarted { entry: EntryId(entry), leader: Leader { pid: 7, start_ticks: entry } }
            }
            Step::Decided { entry, outcome } => {
                if let Some((_, decided)) = open.get_mut(&entry) {
                    *decided = Some(outcome);
                }
                JournalRecord::OutcomeDecided { entry: EntryId(entry), outcome }
            }
            Step::Over { entry } => {
                open.remove(&entry);
                JournalRecord::Closed { entry: EntryId(entry) }
            }
        };
        records.extend(journal.record(record));
    }
    (records, open)
}

fn read(records: &[JournalRecord]) -> Journal {
    let mut journal = Journal::default();
    for record in records {
        journal.apply(record.clone());
    }
    journal
}

proptest! {
    #[test]
    fn i27_whatever_was_held_is_killed_and_then_reported_or_forgotten_and_nothing_else_is(
        steps in steps(),
        same_boot in any::<bool>(),
    ) {
        let (records, open) = live(&steps);
        let now = boot(if same_boot { "one" } else { "two" });
        let known = [claimant(0), claimant(1)];
        let plan = read(&records).recovery_plan(&now, &known);
        let reported: BTreeMap<Run, (usize, Outcome)> =
            plan.report.iter().map(|left| (left.run.clone(), (left.source.index(), left.outcome))).collect();
        prop_assert_eq!(reported.len(), plan.report.len(), "one end a run");
        let expected: BTreeMap<Run, (usize, Outcome)> = open
            .iter()
            .filter(|(_, (name, _))| *name < 2)
            .map(|(entry, (name, decided))| (run(*entry), (usize::from(*name), decided.unwrap_or(SHUTDOWN))))
            .collect();
        prop_assert_eq!(reported, expected);
        let forgotten: BTreeSet<Run> = plan.abandon.into_iter().collect();
        let expected: BTreeSet<Run> = open.iter().filter(|(_, (name, _))| *name == 2).map(|(entry, _)| run(*entry)).collect();
        prop_assert_eq!(forgotten, expected);
        // I27: of another boot nothing can be left; of this one everything may be.
        let killed: BTreeSet<String> = plan.kill.iter().map(|remains| remains.cookie.to_string()).collect();
        let expected = open.keys().filter(|_| same_boot).map(|entry| format!("c{entry}")).collect();
        prop_assert_eq!(killed, expected);
    }

    #[test]
    fn a_worker_that_dies_between_two_records_leaves_a_journal_that_holds_what_its_records_said(
        steps in steps(),
        at in any::<proptest::sample::Index>(),
    ) {
        let (records, _) = live(&steps);
        let kept = &records[..=at.index(records.len())];
        let journal = read(kept);
        // Written anew it says the same, and takes no more lines than it has to.
        let anew = journal.compacted();
        prop_assert_eq!(read(&anew), journal);
        prop_assert!(anew.len() <= kept.len());
    }

    #[test]
    fn a_lost_record_is_never_a_second_outcome(steps in steps(), at in any::<proptest::sample::Index>()) {
        let (mut records, _) = live(&steps);
        let before: Vec<JournalRecord> = records.clone();
        records.remove(at.index(before.len()));
        let plan = read(&records).recovery_plan(&boot("one"), &[claimant(0), claimant(1), claimant(2)]);
        let said = |run: &Run, outcome: Outcome| before.iter().any(|record| match record {
            JournalRecord::OutcomeDecided { entry, outcome: decided } => *decided == outcome && self::run(entry.0) == *run,
            _ => false,
        });
        for left in plan.report {
            prop_assert!(left.outcome == SHUTDOWN || said(&left.run, left.outcome), "{left:?}");
        }
    }

    #[test]
    fn a_journal_is_written_anew_before_it_is_much_larger_than_what_it_holds(records in 0_usize..100_000, open in 0_u64..200) {
        let mut journal = Journal::new(boot("one"));
        for entry in 0..open {
            let held = ClaimRecord { run: run(entry), claimant: claimant(0), processes: None };
            journal.apply(JournalRecord::Claimed { entry: EntryId(entry), claim: held });
        }
        let anew = journal.compacted().len();
        prop_assert!(!journal.needs_compaction(anew), "or it would be written anew for ever");
        prop_assert!(journal.needs_compaction(records) || records <= 4096 + 4 * usize::try_from(open).expect("few"));
    }
}

#[test]
fn i27_no_number_of_a_process_is_believed_of_a_boot_that_is_not_known() {
    let (mut records, _) = live(&[Step::Held { name: 0 }, Step::Leads { entry: 1 }]);
    let whole = read(&records).recovery_plan(&boot("one"), &[claimant(0)]);
    assert_eq!(whole.kill[0].leaders.len(), 1);
    records.remove(0);
    let without = read(&records).recovery_plan(&boot("one"), &[claimant(0)]);
    assert_eq!((&*without.kill[0].cookie, without.kill[0].leaders.len()), ("c1", 0));
}

#[test]
fn one_run_that_was_written_down_twice_is_reported_once_as_it_was_decided_last() {
    let held = |entry| JournalRecord::Claimed {
        entry: EntryId(entry),
        claim: ClaimRecord { run: run(9), claimant: claimant(0), processes: None },
    };
    let decided = JournalRecord::OutcomeDecided { entry: EntryId(2), outcome: Outcome::Failed };
    let plan = read(&[held(1), held(2), decided]).recovery_plan(&boot("one"), &[claimant(0)]);
    assert_eq!(plan.report.len(), 1);
    assert_eq!(plan.report[0].outcome, Outcome::Failed);
}

#[test]
fn i28_only_what_the_queue_may_still_count_as_ours_is_asked_for_again() {
    let outcome = Outcome::Completed;
    for (end, after) in [
        (ClaimEnd::Reported(outcome), false),
        (ClaimEnd::AlreadyResolved(outcome), false),
        (ClaimEnd::ReportRejected(outcome), false),
        (ClaimEnd::Lost(LossReason::Revoked), false),
        (ClaimEnd::Lost(LossReason::Canceled), false),
        (ClaimEnd::Lost(LossReason::LeaseExpired), true),
        (ClaimEnd::Lost(LossReason::GrantedTooLate), true),
        (ClaimEnd::Lost(LossReason::ShutdownDeadline), true),
        (ClaimEnd::Unconfirmed { outcome, loss: LossReason::LeaseExpired }, true),
        (ClaimEnd::Unconfirmed { outcome, loss: LossReason::ShutdownDeadline }, true),
        (ClaimEnd::NotGranted, true),
    ] {
        assert_eq!(journal::is_left_to_next_process(end), after, "{end:?}");
    }
}

#[test]
fn e1_work_elsewhere_is_removed_once_its_outcome_is_accepted_or_the_task_is_over() {
    let unavailable = Outcome::Exception(ExceptionReason::ResourceUnavailable);
    for (end, left) in [
        (ClaimEnd::Reported(Outcome::Completed), LeftWork::Removed),
        (ClaimEnd::Reported(unavailable), LeftWork::Removed),
        (ClaimEnd::Reported(SHUTDOWN), LeftWork::Kept),
        (ClaimEnd::Reported(Outcome::Deferred), LeftWork::Kept),
        (ClaimEnd::Lost(LossReason::LeaseExpired), LeftWork::Kept),
        (ClaimEnd::NotGranted, LeftWork::Kept),
        (ClaimEnd::Lost(LossReason::Canceled), LeftWork::RemovedIfResolved),
        (ClaimEnd::Lost(LossReason::Revoked), LeftWork::RemovedIfResolved),
        (ClaimEnd::AlreadyResolved(Outcome::Completed), LeftWork::RemovedIfResolved),
    ] {
        assert_eq!(journal::left_work(end), left, "{end:?}");
    }
}
