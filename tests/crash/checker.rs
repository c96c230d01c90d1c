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

fn run(number: u32) -> Run {
    Run { task: "a".into(), run: number }
}

/// Gives a run another end, of which no worker has logged anything.
fn end_otherwise(history: &mut History, number: usize, state: &str, reason: &str) {
    let runs = history.queue.get_mut("a").expect("the history has one task");
    runs[number] = Final { state: state.into(), reason: reason.into() };
    history.accepted.remove(number);
}

fn accept_second(history: &mut History, outcome: &str) {
    history.accepted.push(Accepted { run: run(1), outcome: outcome.into() });
}

#[test]
fn each_kind_of_fault_is_found_and_nothing_else() {
    type Change = fn(&mut History);
    let lost = || Fault::Lost("a".into());
    let cases: [(&str, Change, Vec<Fault>); 19] = [
        ("correct", |_| {}, vec![]),
        ("a killed worker logs no outcome", |history| history.accepted.clear(), vec![]),
        ("a run that never started is released", |history| drop(history.lines.drain(..2)), vec![]),
        ("expired", |history| end_otherwise(history, 0, "exception", "claim-expired"), vec![]),
        (
            "the queue lost a task",
            |history| history.queue.clear(),
            vec![lost(), Fault::Disagreement(run(0)), Fault::Disagreement(run(1))],
        ),
        ("unknown to the queue", |history| history.created.push("b".into()), vec![Fault::Lost("b".into())]),
        ("released last", |history| end_otherwise(history, 1, "exception", "worker-shutdown"), vec![lost()]),
        ("running", |history| end_otherwise(history, 1, "running", ""), vec![lost(), Fault::Unresolved(run(1))]),
        ("pending", |history| end_otherwise(history, 1, "pending", ""), vec![lost(), Fault::Unresolved(run(1))]),
        ("accepted twice", |history| accept_second(history, "completed"), vec![Fault::TwoOutcomes(run(1))]),
        (
            "two outcomes accepted",
            |history| accept_second(history, "exception (worker-shutdown)"),
            vec![Fault::TwoOutcomes(run(1)), Fault::Disagreement(run(1))],
        ),
        (
            "completed twice",
            |history| {
                end_otherwise(history, 0, "completed", "completed");
                history.lines.insert(2, Line::End(run(0)));
            },
            vec![Fault::CompletedAgain("a".into())],
        ),
        ("not started", |history| history.lines.truncate(2), vec![Fault::Unexecuted(run(1))]),
        ("not ended", |history| history.lines.truncate(4), vec![Fault::Unfinished(run(1))]),
        ("failed", |history| end_otherwise(history, 0, "failed", "failed"), vec![Fault::Unexplained(run(0))]),
        (
            "another outcome logged",
            |history| history.accepted[0].outcome = "completed".into(),
            vec![Fault::Disagreement(run(0))],
        ),
        ("started twice", |history| history.lines.insert(1, Line::Start(run(0))), vec![Fault::ExecutedAgain(run(0))]),
        ("runs after its release", |history| history.lines.push(Line::Step(run(0))), vec![Fault::Outlived(run(0))]),
        ("a process remains", |history| history.left.push(7), vec![Fault::Left(7)]),
    ];
    for (name, change, faults) in cases {
        let mut history = correct_history();
        change(&mut history);
        assert_eq!(check(&history), faults, "{name}");
    }
}
