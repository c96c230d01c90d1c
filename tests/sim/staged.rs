//! Work that is launched elsewhere, with each look a durable message: workers that die at any step, messages that come twice,
//! early, late or in another order, answers that are lost, and clocks that differ.

use std::collections::BTreeMap;
use std::time::Duration;

use journeyman_domain::jitter::Jitter;
use journeyman_domain::staged::{
    FailureClass, PhaseLimit, Progress, StagedAction, StagedAnswer, StagedEnd, StagedEvent, StagedPolicy, StagedRecord,
    StagedState, Stamp,
};
use journeyman_domain::time::Instant;

use super::Seeds;
use super::rng::Rng;

const TASKS: usize = 4;
/// Calls and messages of one history at most, so that one that never ends fails.
const STEPS_MAX: usize = 20_000;
const SKEW_MS: u64 = 300_000;
const SCHEDULE_MAX: Duration = Duration::from_secs(180);
const PULL_MAX: Duration = Duration::from_secs(600);
const INFRASTRUCTURE_RETRIES: u32 = 3;
const CAPACITY_RETRIES: u32 = 20;

/// How a launch ends, if nothing ends it before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Done,
    TaskFails,
    Evicted,
    /// It vanishes without a trace.
    Vanishes,
    NeverScheduled,
}

#[derive(Debug)]
struct Work {
    launch: u32,
    fate: Fate,
    created_at: u64,
    scheduled_at: u64,
    running_at: u64,
    ends_at: u64,
    /// The number of the look that was scheduled last.
    mark: u64,
    removed_at: Option<u64>,
}

impl Work {
    fn is_alive(&self, now: u64) -> bool {
        self.removed_at.is_none() && now < self.ends_at
    }

    fn is_there(&self, now: u64) -> bool {
        self.removed_at.is_none() && !(self.fate == Fate::Vanishes && now >= self.ends_at)
    }

    fn stamp(at: u64) -> Stamp {
        Stamp(i64::try_from(at).expect("a time"))
    }

    fn progress(&self, now: u64) -> Progress {
        let (phase, since) = if now < self.scheduled_at {
            ("unscheduled", self.created_at)
        } else if now < self.running_at {
            ("pulling", self.scheduled_at)
        } else {
            ("running", self.running_at)
        };
        let (since, observed_at) = (Some(Self::stamp(since)), Self::stamp(now));
        Progress { phase: phase.into(), since, observed_at, check_in: None }
    }

    fn look(&self, now: u64) -> StagedAnswer {
        let failed = |class| StagedAnswer::Failed { class, reason: "it failed".into() };
        match self.fate {
            _ if now < self.ends_at => StagedAnswer::Progress(self.progress(now)),
            Fate::Done => StagedAnswer::Done,
            Fate::TaskFails => failed(FailureClass::Task),
            Fate::Evicted | Fate::Vanishes | Fate::NeverScheduled => failed(FailureClass::Infrastructure),
        }
    }
}

#[derive(Debug, Clone)]
struct Check {
    task: usize,
    record: StagedRecord,
    due: u64,
}

#[derive(Debug, Default)]
struct Task {
    work: Vec<Work>,
    /// The first report that the queue accepted.
    reported: Option<StagedEnd>,
}

struct World {
    rng: Rng,
    now: u64,
    tasks: Vec<Task>,
    checks: Vec<Check>,
    faults: BTreeMap<&'static str, u64>,
    /// The advance of each worker's clock.
    skews: [u64; 3],
    has_faults: bool,
}

fn policy() -> StagedPolicy {
    let limit = |lasts_max, class| PhaseLimit { lasts_max, class };
    StagedPolicy {
        phases: [
            ("unscheduled".into(), limit(SCHEDULE_MAX, FailureClass::Capacity)),
            ("pulling".into(), limit(PULL_MAX, FailureClass::Infrastructure)),
        ]
        .into(),
        infrastructure_retries: INFRASTRUCTURE_RETRIES,
        capacity_retries: CAPACITY_RETRIES,
        check_interval: Duration::from_secs(30),
    }
}

impl World {
    fn new(seed: u64, skewed: bool, has_faults: bool) -> Self {
        let mut rng = Rng::new(seed);
        let skews = [0, 0, 0].map(|_: u64| rng.below(2 * SKEW_MS));
        let checks = (0..TASKS).map(|task| Check { task, record: StagedRecord::default(), due: 0 }).collect();
        Self {
            rng,
            now: 1_000_000,
            tasks: (0..TASKS).map(|_| Task::default()).collect(),
            checks,
            faults: BTreeMap::new(),
            skews: if skewed { skews } else { [SKEW_MS; 3] },
            has_faults,
        }
    }

    fn strikes(&mut self, fault: &'static str, percent: u64) -> bool {
        // Drawn in any case, so that a history is the same with other clocks.
        let strikes = self.rng.chance(percent) && self.has_faults;
        if strikes {
            *self.faults.entry(fault).or_default() += 1;
        }
        strikes
    }

    fn run(&mut self) {
        for _ in 0..STEPS_MAX {
            if self.checks.is_empty() {
                return;
            }
            let index = self.next_check();
            let check = self.checks[index].clone();
            self.now = self.now.max(check.due);
            if self.strikes("late check", 20) {
                self.now += self.rng.below(90_000);
            }
            let skew = self.rng.pick(&self.skews);
            if self.take(&check, skew).is_some() {
                self.checks.remove(index);
            }
            if self.strikes("check twice", 5) {
                self.checks.push(check);
            }
            let task = usize::try_from(self.rng.below(TASKS as u64)).expect("an index");
            if self.tasks[task].reported.is_some() && self.strikes("swept before the last check", 10) {
                let launches: Vec<u32> = self.tasks[task].work.iter().map(|work| work.launch).collect();
                for launch in launches {
                    self.remove(task, launch);
                }
            }
        }
        panic!("it goes on for ever: {:?}", self.checks);
    }

    /// The next that is due, or another one.
    fn next_check(&mut self) -> usize {
        if self.strikes("check out of order", 15) {
            let count = u64::try_from(self.checks.len()).expect("a count");
            let index = usize::try_from(self.rng.below(count)).expect("an index");
            // Early: time does not go on to when it is due.
            self.checks[index].due = self.checks[index].due.min(self.now);
            return index;
        }
        let next = self.checks.iter().enumerate().min_by_key(|(_, check)| check.due);
        next.expect("there is one").0
    }

    /// Works on a check until it is scheduled again or has ended. `None` if the worker dies before it acknowledges.
    fn take(&mut self, check: &Check, skew: u64) -> Option<()> {
        let task = check.task;
        let mut actions = Vec::new();
        let jitter = Jitter::seeded(self.rng.bits());
        let mut state = StagedState::new(policy(), check.record.clone(), jitter, &mut actions);
        while let Some(action) = actions.pop() {
            if self.strikes("crash", 4) {
                return None;
            }
            self.now += self.rng.below(400);
            let answer = match action {
                StagedAction::Adopt => self.adopt(task, state.record()),
                StagedAction::Start => self.launch(task, state.record().launch),
                StagedAction::Verify => self.look(task, state.record()),
                StagedAction::Cancel => self.remove(task, state.record().launch),
                StagedAction::Rest(wait) => {
                    let due = self.now + u64::try_from(wait.as_millis()).expect("a wait");
                    self.checks.push(Check { task, record: state.record().clone(), due });
                    if self.strikes("crash after the next check is stored", 4) {
                        return None;
                    }
                    let StagedRecord { launch, seq, .. } = *state.record();
                    if let Some(work) = self.tasks[task].work.iter_mut().find(|work| work.launch == launch) {
                        work.mark = work.mark.max(seq);
                    }
                    return if self.strikes("crash before the acknowledgement", 4) { None } else { Some(()) };
                }
                StagedAction::End(StagedEnd::Superseded) => return Some(()),
                StagedAction::End(end) => {
                    self.report(task, end);
                    return if self.strikes("crash after the report", 10) { None } else { Some(()) };
                }
            };
            let answer = if self.strikes("lost answer", 5) { StagedAnswer::Unknown } else { answer };
            let now = Instant::at(Duration::from_millis(self.now + skew));
            state.handle(StagedEvent::Answered(answer), now, &mut actions);
        }
        unreachable!("a machine always says what is next")
    }

    /// The latest launch that is there. An earlier one is removed.
    fn adopt(&mut self, task: usize, record: &StagedRecord) -> StagedAnswer {
        let there = self.tasks[task].work.iter().rev().find(|work| work.is_there(self.now));
        if let Some(earlier) = there.map(|work| work.launch).filter(|launch| *launch < record.launch) {
            self.remove(task, earlier);
            return StagedAnswer::Unknown;
        }
        match there {
            Some(work) if work.launch > record.launch || work.mark > record.seq => StagedAnswer::Superseded,
            Some(work) if work.launch == record.launch => self.started(work),
            Some(_) | None => StagedAnswer::Absent,
        }
    }

    fn started(&self, work: &Work) -> StagedAnswer {
        match work.look(self.now) {
            StagedAnswer::Progress(progress) => {
                StagedAnswer::Started { handle: work.launch.to_string().into(), progress }
            }
            other => other,
        }
    }

    fn look(&self, task: usize, record: &StagedRecord) -> StagedAnswer {
        let works = &self.tasks[task].work;
        if works.iter().any(|work| work.is_there(self.now) && work.launch > record.launch) {
            return StagedAnswer::Superseded;
        }
        match works.iter().find(|work| work.launch == record.launch && work.is_there(self.now)) {
            Some(work) if work.mark > record.seq => StagedAnswer::Superseded,
            Some(work) => work.look(self.now),
            None => StagedAnswer::Lost { reason: "it is gone".into() },
        }
    }

    fn launch(&mut self, task: usize, launch: u32) -> StagedAnswer {
        // As every handler does: is it still wanted?
        if self.tasks[task].reported.is_some() {
            return StagedAnswer::Canceled;
        }
        if self.strikes("quota", 10) {
            let (after, class) = (Duration::from_secs(60), FailureClass::Capacity);
            return StagedAnswer::Retry { after, class, reason: "quota".into() };
        }
        let now = self.now;
        if let Some(work) = self.tasks[task].work.iter().find(|work| work.launch == launch && work.is_there(now)) {
            return self.started(work);
        }
        let alive: Vec<_> = self.tasks[task].work.iter().filter(|work| work.is_alive(now)).collect();
        assert!(alive.is_empty(), "launch {launch} of task {task} runs beside {alive:?}");
        let fate = match self.rng.below(10) {
            0..=4 => Fate::Done,
            5 => Fate::TaskFails,
            6 | 7 => Fate::Evicted,
            8 => Fate::Vanishes,
            _ => Fate::NeverScheduled,
        };
        let scheduled_at = now + if fate == Fate::NeverScheduled { u64::MAX / 4 } else { self.rng.below(150_000) };
        let running_at = scheduled_at + self.rng.below(500_000);
        let ends_at = running_at + self.rng.below(1_000_000);
        let work = Work { launch, fate, created_at: now, scheduled_at, running_at, ends_at, mark: 0, removed_at: None };
        let answer = self.started(&work);
        self.tasks[task].work.push(work);
        answer
    }

    fn remove(&mut self, task: usize, launch: u32) -> StagedAnswer {
        let now = self.now;
        for work in self.tasks[task].work.iter_mut().filter(|work| work.launch == launch) {
            work.removed_at.get_or_insert(now);
        }
        StagedAnswer::Canceled
    }

    fn report(&mut self, task: usize, end: StagedEnd) {
        let Task { work, reported } = &self.tasks[task];
        if reported.is_some() {
            // The queue refuses it.
            return;
        }
        // What was removed before its end has not ended.
        let ended = |work: &&Work| work.ends_at <= work.removed_at.unwrap_or(self.now);
        let has_ended_as = |fate| work.iter().filter(ended).any(|work| work.fate == fate);
        let is_true = match &end {
            StagedEnd::Done => has_ended_as(Fate::Done),
            StagedEnd::Failed { class: FailureClass::Task, .. } => has_ended_as(Fate::TaskFails),
            StagedEnd::Failed { .. } => !has_ended_as(Fate::Done) && !has_ended_as(Fate::TaskFails),
            StagedEnd::Canceled | StagedEnd::Superseded => false,
        };
        assert!(is_true, "task {task} ends as {end:?}: {work:?}");
        self.tasks[task].reported = Some(end);
    }

    fn assert_ended(&self) {
        for (number, Task { work, reported }) in self.tasks.iter().enumerate() {
            assert!(reported.is_some(), "task {number} is lost");
            let own_code = |work: &&Work| {
                let until = work.removed_at.unwrap_or(self.now);
                matches!(work.fate, Fate::Done | Fate::TaskFails) && work.ends_at <= until
            };
            assert!(work.iter().filter(own_code).count() <= 1, "task {number} has run twice: {work:?}");
            let alive: Vec<_> = work.iter().filter(|work| work.is_alive(self.now)).collect();
            assert!(alive.is_empty(), "task {number} leaves {alive:?}");
        }
    }
}

#[test]
fn staged_work_is_lost_by_no_crash_and_has_one_outcome() {
    let seeds = Seeds::new();
    let mut faults: BTreeMap<&str, u64> = BTreeMap::new();
    while let Some(seed) = seeds.next() {
        let mut world = World::new(seed, true, true);
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            world.run();
            world.assert_ended();
        }));
        if ran.is_err() {
            panic!("seed {seed}");
        }
        for (fault, count) in world.faults {
            *faults.entry(fault).or_default() += count;
        }
    }
    let seeds = seeds.count();
    println!("simulation of staged work: {seeds} seeds, {faults:?}, 0 lost");
    assert!(seeds < 300 || faults.len() == 10, "faults that never struck: only {faults:?}");
}

#[test]
fn staged_work_ends_the_same_whatever_the_clocks_of_the_workers_say() {
    let seeds = Seeds::new();
    while let Some(seed) = seeds.next() {
        let [same, other] = [false, true].map(|skewed| {
            let mut world = World::new(seed, skewed, true);
            world.run();
            world.tasks.into_iter().map(|task| task.reported).collect::<Vec<_>>()
        });
        assert_eq!(same, other, "seed {seed}");
    }
}
