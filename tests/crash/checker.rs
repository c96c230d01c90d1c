//! Compares the created tasks, the handlers' log, the outcomes that workers report as accepted, and the queue's final state. Pure;
//! its own tests check that it finds each kind of fault.

use std::collections::{BTreeMap, BTreeSet};

/// One attempt at a task.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Run {
    pub task: String,
    pub run: u32,
}

impl Run {
    pub fn read(text: &str) -> Option<Self> {
        let (task, run) = text.rsplit_once('/')?;
        Some(Self { task: task.to_owned(), run: run.parse().ok()? })
    }
}

/// A line of the log that all payloads append to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Line {
    Start(Run),
    /// It still runs.
    Step(Run),
    End(Run),
}

/// An outcome that the queue accepted, by a worker's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    pub run: Run,
    pub outcome: String,
}

/// A run in the queue's final state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Final {
    pub state: String,
    pub reason: String,
}

#[derive(Debug, Clone, Default)]
pub struct History {
    /// Tasks whose creation the queue has acknowledged.
    pub created: Vec<String>,
    pub lines: Vec<Line>,
    pub accepted: Vec<Accepted>,
    /// The runs of each task, the first one first.
    pub queue: BTreeMap<String, Vec<Final>>,
    /// Remaining payload processes.
    pub left: Vec<i32>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// The task was created and not completed.
    Lost(String),
    /// The queue has an outcome of a run that was not executed.
    Unexecuted(Run),
    /// It was executed and has no outcome.
    Unresolved(Run),
    /// It is completed, and its payload has not ended.
    Unfinished(Run),
    /// It was executed more than once.
    ExecutedAgain(Run),
    /// Its payload still ran when the next run of the task started.
    Outlived(Run),
    /// More than one outcome was accepted.
    TwoOutcomes(Run),
    /// A worker's outcome differs from the queue's.
    Disagreement(Run),
    /// More than one run of the task is completed.
    CompletedAgain(String),
    /// It was resolved for an unexpected reason.
    Unexplained(Run),
    /// A payload process remains.
    Left(i32),
}

/// Every fault of a history, in order.
pub fn check(history: &History) -> Vec<Fault> {
    let mut faults = BTreeSet::new();
    let nothing = Vec::new();
    for task in &history.created {
        let runs = history.queue.get(task).unwrap_or(&nothing);
        if runs.last().is_none_or(|last| last.state != "completed") {
            faults.insert(Fault::Lost(task.clone()));
        }
        if runs.iter().filter(|run| run.state == "completed").count() > 1 {
            faults.insert(Fault::CompletedAgain(task.clone()));
        }
    }
    for (task, runs) in &history.queue {
        for (number, found) in runs.iter().enumerate() {
            let run = Run { task: task.clone(), run: u32::try_from(number).expect("few runs") };
            let started = history.lines.contains(&Line::Start(run.clone()));
            let ended = history.lines.contains(&Line::End(run.clone()));
            let completed = found.state == "completed";
            let given_back =
                found.state == "exception" && ["worker-shutdown", "claim-expired"].contains(&&*found.reason);
            let open = ["pending", "running"].contains(&&*found.state);
            let fault = match (started, ended) {
                (false, _) if completed => Some(Fault::Unexecuted(run)),
                (true, false) if completed => Some(Fault::Unfinished(run)),
                (true, _) if open => Some(Fault::Unresolved(run)),
                _ if !completed && !given_back && !open => Some(Fault::Unexplained(run)),
                _ => None,
            };
            faults.extend(fault);
        }
    }
    faults.extend(faults_of_lines(&history.lines));
    faults.extend(faults_of_outcomes(history));
    faults.extend(history.left.iter().map(|pid| Fault::Left(*pid)));
    faults.into_iter().collect()
}

fn faults_of_lines(lines: &[Line]) -> BTreeSet<Fault> {
    let (mut faults, mut started) = (BTreeSet::new(), BTreeSet::new());
    let mut latest: BTreeMap<&str, u32> = BTreeMap::new();
    for line in lines {
        let (Line::Start(run) | Line::Step(run) | Line::End(run)) = line;
        if matches!(line, Line::Start(_)) && !started.insert(run) {
            faults.insert(Fault::ExecutedAgain(run.clone()));
        }
        let latest = latest.entry(&run.task).or_insert(run.run);
        if run.run < *latest {
            faults.insert(Fault::Outlived(run.clone()));
        }
        *latest = run.run.max(*latest);
    }
    faults
}

fn faults_of_outcomes(history: &History) -> BTreeSet<Fault> {
    let mut faults = BTreeSet::new();
    let mut seen = BTreeSet::new();
    for Accepted { run, outcome } in &history.accepted {
        if !seen.insert(run) {
            faults.insert(Fault::TwoOutcomes(run.clone()));
        }
        let found = history.queue.get(&run.task).and_then(|runs| runs.get(usize::try_from(run.run).ok()?));
        let agrees = found.is_some_and(|found| match &**outcome {
            "completed" | "failed" => found.state == *outcome,
            exception => exception == format!("exception ({})", found.reason),
        });
        if !agrees {
            faults.insert(Fault::Disagreement(run.clone()));
        }
    }
    faults
}

/// A task that was released once and completed by its second run.
fn correct_history() -> History {
    let run = |number| Run { task: "a".into(), run: number };
    let ended = |state: &str, reason: &str| Final { state: state.into(), reason: reason.into() };
    let accepted = |number, outcome: &str| Accepted { run: run(number), outcome: outcome.into() };
    History {
        created: vec!["a".into()],
        lines: vec![
            Line::Start(run(0)),
            Line::Step(run(0)),
            Line::Start(run(1)),
            Line::Step(run(1)),
            Line::End(run(1)),
        ],
        accepted: vec![accepted(0, "exception (worker-shutdown)"), accepted(1, "completed")],
        queue: BTreeMap::from([(
            "a".into(),
            vec![ended("exception", "worker-shutdown"), ended("completed", "completed")],
        )]),
        left: Vec::new(),
    }
}

fn found(change: impl FnOnce(&mut History)) -> Vec<Fault> {
    let mut history = correct_history();
    change(&mut history);
    check(&history)
}

fn run(number: u32) -> Run {
    Run { task: "a".into(), run: number }
}

fn runs(history: &mut History) -> &mut Vec<Final> {
    history.queue.get_mut("a").expect("it is there")
}

#[test]
fn a_correct_history_has_no_fault() {
    assert_eq!(check(&correct_history()), []);
    // An outcome may be accepted without a log line of a killed worker; a run that never started may be released.
    assert_eq!(found(|history| history.accepted.clear()), []);
    assert_eq!(found(|history| history.lines = history.lines.split_off(2)), []);
    assert_eq!(
        found(|history| {
            runs(history)[0].reason = "claim-expired".into();
            history.accepted.remove(0);
        }),
        []
    );
}

#[test]
fn a_task_that_is_lost_is_detected() {
    let lost = Fault::Lost("a".into());
    assert_eq!(
        found(|history| history.queue.clear()),
        [lost.clone(), Fault::Disagreement(run(0)), Fault::Disagreement(run(1))]
    );
    assert_eq!(found(|history| history.created.push("b".into())), [Fault::Lost("b".into())]);
    let retries_used_up = |history: &mut History| {
        runs(history)[1] = Final { state: "exception".into(), reason: "worker-shutdown".into() };
        history.accepted.remove(1);
    };
    assert_eq!(found(retries_used_up), [lost]);
}

#[test]
fn an_executed_run_without_an_outcome_is_detected() {
    let open = |state: &'static str| {
        move |history: &mut History| {
            runs(history)[1] = Final { state: state.into(), reason: String::new() };
            history.accepted.remove(1);
        }
    };
    for state in ["running", "pending"] {
        assert_eq!(found(open(state)), [Fault::Lost("a".into()), Fault::Unresolved(run(1))]);
    }
}

#[test]
fn two_accepted_outcomes_are_detected() {
    let twice = |outcome: &'static str| {
        move |history: &mut History| history.accepted.push(Accepted { run: run(1), outcome: outcome.into() })
    };
    assert_eq!(found(twice("completed")), [Fault::TwoOutcomes(run(1))]);
    assert_eq!(found(twice("exception (worker-shutdown)")), [Fault::TwoOutcomes(run(1)), Fault::Disagreement(run(1))]);
    let again = Final { state: "completed".into(), reason: "completed".into() };
    let completed_twice = |history: &mut History| {
        runs(history)[0] = again;
        history.lines.insert(2, Line::End(run(0)));
        history.accepted.remove(0);
    };
    assert_eq!(found(completed_twice), [Fault::CompletedAgain("a".into())]);
}

#[test]
fn an_outcome_without_an_execution_is_detected() {
    assert_eq!(found(|history| history.lines.truncate(2)), [Fault::Unexecuted(run(1))]);
    assert_eq!(found(|history| history.lines.truncate(4)), [Fault::Unfinished(run(1))]);
}

#[test]
fn an_unexpected_outcome_is_detected() {
    let unexplained = |state: &'static str, reason: &'static str| {
        move |history: &mut History| {
            runs(history)[0] = Final { state: state.into(), reason: reason.into() };
            history.accepted.remove(0);
        }
    };
    for (state, reason) in [("exception", "internal-error"), ("exception", "canceled"), ("failed", "failed")] {
        assert_eq!(found(unexplained(state, reason)), [Fault::Unexplained(run(0))], "{state} {reason}");
    }
    let other = |history: &mut History| history.accepted[0].outcome = "completed".into();
    assert_eq!(found(other), [Fault::Disagreement(run(0))]);
}

#[test]
fn a_run_that_is_executed_again_is_detected() {
    assert_eq!(found(|history| history.lines.insert(1, Line::Start(run(0)))), [Fault::ExecutedAgain(run(0))]);
}

#[test]
fn a_payload_that_runs_after_its_release_is_detected() {
    for line in [Line::Step(run(0)), Line::End(run(0))] {
        assert_eq!(found(|history| history.lines.push(line.clone())), [Fault::Outlived(run(0))], "{line:?}");
    }
    assert_eq!(found(|history| history.left.push(7)), [Fault::Left(7)]);
}
