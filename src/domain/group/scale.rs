//! How many workers each group has, and which of them are stopped: from its load, within the group's limits and the
//! pool's `max_total`, quickly up and slowly down.
//!
//! A worker is busy once it reports a request, and idle workers are stopped before busy ones. Each
//! decision comes with its reasons.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::fmt;
use core::time::Duration;

use super::load::Load;
use super::{GroupPhase, Key};
use crate::named_enum;
use crate::time::Instant;

/// Workers of one group that start at once: more would only compete for the host.
pub const MAX_STARTING: u32 = 4;
/// With more groups than workers, a group keeps its worker for this long, counted from when it was ready, before the
/// next one gets it.
pub const ROTATION_INTERVAL: Duration = Duration::from_secs(60);
/// A turn whose worker is not ready by then is over: its start hangs.
pub const START_TURN_MAX: Duration = Duration::from_secs(600);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScaleLimits {
    /// While the group is wanted.
    pub min: u32,
    pub max: u32,
    /// Above what the load needs, while there is load.
    pub min_idle: u32,
    /// Requests that one worker holds at once; at least 1.
    pub concurrency: u32,
    /// Scale down only after fewer were enough for this long.
    pub scale_down_delay: Duration,
}

named_enum! {
    #[derive(PartialOrd, Ord, Hash)]
    pub enum WorkerActivity {
        Starting = "starting",
        Idle = "idle",
        /// It reported a request.
        Busy = "busy",
        Stopping = "stopping",
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupWorker {
    pub id: Box<str>,
    pub activity: WorkerActivity,
    pub started_at: Instant,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupInput {
    pub key: Key,
    /// `None` where it is to be removed.
    pub phase: Option<GroupPhase>,
    pub limits: ScaleLimits,
    pub load: Load,
    pub workers: Vec<GroupWorker>,
    /// No start before this time.
    pub not_before: Instant,
    /// Nothing can be started.
    pub is_driver_unavailable: bool,
    /// No worker is started or stopped.
    pub is_paused: bool,
}

/// Why a group has its number of workers: each bound that changed it, in the order applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ScaleReason {
    Paused,
    NotNeeded,
    Load(u32),
    /// The queue has not been inspected; the running workers are kept.
    Unknown(u32),
    MinIdle(u32),
    Min(u32),
    Max(u32),
    /// So many were needed within `scale_down_delay`.
    RecentNeed(u32),
    Budget(u32),
    DriverUnavailable,
    RestartDelay(Instant),
    Starting(u32),
}

impl fmt::Display for ScaleReason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Paused => out.write_str("paused"),
            Self::NotNeeded => out.write_str("the group is not needed"),
            Self::Load(count) => write!(out, "the load needs {count}"),
            Self::Unknown(count) => write!(out, "{count} are running and the queue has not been inspected yet"),
            Self::MinIdle(count) => write!(out, "min_idle adds {count}"),
            Self::Min(count) => write!(out, "raised to min = {count}"),
            Self::Max(count) => write!(out, "limited by max = {count}"),
            Self::RecentNeed(count) => write!(out, "{count} were needed within scale_down_delay"),
            Self::Budget(count) => write!(out, "max_total leaves {count}"),
            Self::DriverUnavailable => out.write_str("the driver is unavailable"),
            Self::RestartDelay(_) => out.write_str("waiting after failed starts"),
            Self::Starting(count) => write!(out, "{count} are already starting"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScaleDecision {
    pub key: Key,
    pub desired: u32,
    pub start: u32,
    /// Workers to drain: they take no new requests and finish those they hold.
    pub drain: Vec<Box<str>>,
    pub reasons: Vec<ScaleReason>,
}

/// Remembers recent needs, so that a short calm does not cost a warm worker, and the rotation.
#[derive(Debug, Clone, Default)]
pub struct Scaler {
    /// The needs of each group within its window: times rise, needs fall.
    recent_needs: BTreeMap<Key, VecDeque<RecentNeed>>,
    turns: BTreeMap<Key, BudgetTurn>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct BudgetTurn {
    state: TurnState,
    since: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TurnState {
    Waiting,
    Starting,
    Ready,
}

#[derive(Debug, Clone, Copy)]
struct RecentNeed {
    at: Instant,
    count: u32,
}

struct DecisionDraft<'a> {
    group: &'a GroupInput,
    desired: u32,
    reasons: Vec<ScaleReason>,
}

impl Scaler {
    /// Decides about every group. Each key occurs once.
    pub fn plan(&mut self, groups: &[GroupInput], max_total: Option<u32>, now: Instant) -> Vec<ScaleDecision> {
        self.update_turns(groups, now);
        let mut drafts: Vec<DecisionDraft<'_>> = groups.iter().map(|group| self.draft(group, now)).collect();
        let mut room = u32::MAX;
        if let Some(max_total) = max_total {
            drafts.sort_by_key(|draft| self.rank(draft, now));
            share_budget(&mut drafts, max_total);
            // A stopping worker takes its place until it has exited.
            let there: usize = groups.iter().map(|group| group.workers.len()).sum();
            room = max_total.saturating_sub(u32::try_from(there).unwrap_or(u32::MAX));
        }
        drafts.into_iter().map(|draft| draft.decide(&mut room, now)).collect()
    }

    fn update_turns(&mut self, groups: &[GroupInput], now: Instant) {
        let known: BTreeSet<&Key> = groups.iter().map(|group| &group.key).collect();
        self.recent_needs.retain(|key, _| known.contains(key));
        self.turns.retain(|key, _| known.contains(key));
        for group in groups {
            let ready = |activity| matches!(activity, WorkerActivity::Idle | WorkerActivity::Busy);
            let state = match present_workers(group) {
                0 => TurnState::Waiting,
                _ if count_workers(group, ready) > 0 => TurnState::Ready,
                _ => TurnState::Starting,
            };
            let changed = BudgetTurn { state, since: now };
            let turn = self.turns.entry(group.key.clone()).or_insert(changed);
            if turn.state != state {
                *turn = changed;
            }
        }
    }

    /// Who is served first: the group whose turn it is, then the longest waiting, then those whose turn is over, then
    /// those without load.
    fn rank(&self, draft: &DecisionDraft<'_>, now: Instant) -> (u8, Instant) {
        if draft.group.load.is_idle() {
            return (3, Instant::ORIGIN);
        }
        let Some(turn) = self.turns.get(&draft.group.key) else { return (1, now) };
        let length = match turn.state {
            TurnState::Waiting => return (1, turn.since),
            TurnState::Starting => START_TURN_MAX,
            TurnState::Ready => ROTATION_INTERVAL,
        };
        (if now < turn.since.plus(length) { 0 } else { 2 }, turn.since)
    }

    fn draft<'a>(&mut self, group: &'a GroupInput, now: Instant) -> DecisionDraft<'a> {
        let (limits, load) = (group.limits, group.load);
        let present = present_workers(group);
        if group.is_paused {
            return DecisionDraft { group, desired: present, reasons: Vec::from([ScaleReason::Paused]) };
        }
        if group.phase.is_none() {
            self.recent_needs.remove(&group.key);
            return DecisionDraft { group, desired: 0, reasons: Vec::from([ScaleReason::NotNeeded]) };
        }
        let mut reasons = Vec::new();
        let mut wanted = load.ready.saturating_add(load.in_progress()).div_ceil(limits.concurrency.max(1));
        reasons.push(ScaleReason::Load(wanted));
        if load.is_unknown && present > wanted {
            wanted = present;
            reasons.push(ScaleReason::Unknown(present));
        }
        if !load.is_unknown && wanted > 0 && limits.min_idle > 0 {
            wanted = wanted.saturating_add(limits.min_idle);
            reasons.push(ScaleReason::MinIdle(limits.min_idle));
        }
        let recently = self.record_need(group, wanted, now);
        if recently > wanted {
            wanted = recently;
            reasons.push(ScaleReason::RecentNeed(recently));
        }
        if wanted < limits.min {
            wanted = limits.min;
            reasons.push(ScaleReason::Min(limits.min));
        }
        if wanted > limits.max {
            wanted = limits.max;
            reasons.push(ScaleReason::Max(limits.max));
        }
        DecisionDraft { group, desired: wanted, reasons }
    }

    /// The greatest need within the window, this one included.
    fn record_need(&mut self, group: &GroupInput, count: u32, now: Instant) -> u32 {
        let recent = self.recent_needs.entry(group.key.clone()).or_default();
        while recent.back().is_some_and(|need| need.count <= count) {
            recent.pop_back();
        }
        recent.push_back(RecentNeed { at: now, count });
        // The one before the last expires when the last one began, so that each counts for a whole window.
        while recent.len() > 1 && recent.front().is_some_and(|need| now.since(need.at) >= group.limits.scale_down_delay)
        {
            recent.pop_front();
        }
        recent.front().map_or(count, |need| need.count)
    }
}

impl DecisionDraft<'_> {
    fn decide(self, room: &mut u32, now: Instant) -> ScaleDecision {
        let Self { group, desired: wanted, mut reasons } = self;
        // `max_total` does not stop workers of a paused group either.
        if group.is_paused {
            return ScaleDecision { key: group.key.clone(), desired: wanted, start: 0, drain: Vec::new(), reasons };
        }
        let present = present_workers(group);
        let mut start = 0;
        if wanted > present {
            let starting = count_workers(group, |activity| activity == WorkerActivity::Starting);
            start = (wanted - present).min(*room);
            if group.is_driver_unavailable {
                reasons.push(ScaleReason::DriverUnavailable);
                start = 0;
            } else if now < group.not_before {
                reasons.push(ScaleReason::RestartDelay(group.not_before));
                start = 0;
            } else if starting.saturating_add(start) > MAX_STARTING {
                reasons.push(ScaleReason::Starting(starting));
                start = MAX_STARTING.saturating_sub(starting);
            }
            *room -= start;
        }
        let surplus = usize::try_from(present.saturating_sub(wanted)).unwrap_or(usize::MAX);
        let mut candidates: Vec<&GroupWorker> =
            group.workers.iter().filter(|worker| worker.activity != WorkerActivity::Stopping).collect();
        // Starting workers first, then idle ones, the youngest first.
        candidates.sort_by_key(|worker| (worker.activity, Reverse(worker.started_at)));
        let drain = candidates.into_iter().take(surplus).map(|worker| worker.id.clone()).collect();
        ScaleDecision { key: group.key.clone(), desired: wanted, start, drain, reasons }
    }
}

fn present_workers(group: &GroupInput) -> u32 {
    count_workers(group, |activity| activity != WorkerActivity::Stopping)
}

fn count_workers(group: &GroupInput, which: impl Fn(WorkerActivity) -> bool) -> u32 {
    u32::try_from(group.workers.iter().filter(|worker| which(worker.activity)).count()).unwrap_or(u32::MAX)
}

/// Shares `max_total` so that no group has more than another one lacks: all shares rise together until each is enough
/// or nothing is left; the remainder goes by rank.
fn share_budget(drafts: &mut [DecisionDraft<'_>], budget: u32) {
    let total = drafts.iter().fold(0_u32, |sum, draft| sum.saturating_add(draft.desired));
    if total <= budget {
        return;
    }
    let mut left = budget;
    let mut shares: Vec<u32> = drafts.iter().map(|_| 0).collect();
    // The sum of all needs is greater than the budget, so each round finds a draft that lacks a worker.
    while left > 0 {
        for (share, draft) in shares.iter_mut().zip(drafts.iter()) {
            if left > 0 && *share < draft.desired {
                *share += 1;
                left -= 1;
            }
        }
    }
    for (draft, share) in drafts.iter_mut().zip(shares) {
        if share < draft.desired {
            draft.desired = share;
            draft.reasons.push(ScaleReason::Budget(share));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ScaleLimits =
        ScaleLimits { min: 1, max: 10, min_idle: 0, concurrency: 2, scale_down_delay: Duration::from_secs(60) };

    fn at(seconds: u64) -> Instant {
        Instant::at(Duration::from_secs(seconds))
    }

    fn group(key: &str, ready: u32, workers: &[WorkerActivity]) -> GroupInput {
        let workers = workers.iter().enumerate().map(|(number, doing)| GroupWorker {
            id: alloc::format!("{key}{number}").into(),
            activity: *doing,
            started_at: at(number as u64),
        });
        GroupInput {
            key: Key::new(key).unwrap(),
            phase: Some(GroupPhase::Active),
            limits: LIMITS,
            load: Load { ready, ..Load::default() },
            workers: workers.collect(),
            not_before: Instant::ORIGIN,
            is_driver_unavailable: false,
            is_paused: false,
        }
    }

    fn alone(group: GroupInput) -> ScaleDecision {
        Scaler::default().plan(&[group], None, at(100)).remove(0)
    }

    fn drained(decision: &ScaleDecision) -> Vec<&str> {
        decision.drain.iter().map(|id| &**id).collect()
    }

    #[test]
    fn who_is_there_when_a_controller_begins_stays_until_the_queue_was_looked_at_and_for_a_while_after() {
        let mut scale = Scaler::default();
        let mut decide = |load: Load, seconds: u64| {
            let group = GroupInput {
                load,
                ..group(
                    "a",
                    0,
                    &[WorkerActivity::Idle, WorkerActivity::Busy, WorkerActivity::Idle, WorkerActivity::Stopping],
                )
            };
            scale.plan(&[group], None, at(seconds)).remove(0)
        };
        let first = decide(Load::unknown(), 100);
        assert_eq!((first.desired, first.start, drained(&first)), (3, 0, vec![]));
        assert_eq!(first.reasons, [ScaleReason::Load(0), ScaleReason::Unknown(3)]);
        let none = Load::default();
        assert_eq!(decide(none, 101).desired, 3, "workers may not have reported yet");
        assert_eq!(decide(none, 161).desired, 1);
        let cold = Scaler::default().plan(&[GroupInput { load: Load::unknown(), ..group("b", 0, &[]) }], None, at(1));
        assert_eq!((cold[0].desired, cold[0].start), (1, 1), "as many as there are to be at least");
    }

    #[test]
    fn a_group_that_is_paused_is_left_as_it_is_whatever_it_needs_and_whatever_the_budget_says() {
        let mut needs = group("a", 9, &[WorkerActivity::Idle]);
        let mut going = group("b", 0, &[WorkerActivity::Idle, WorkerActivity::Busy]);
        going.phase = None;
        for group in [&mut needs, &mut going] {
            group.is_paused = true;
        }
        let budget = Some(1);
        for decision in Scaler::default().plan(&[needs, going], budget, at(100)) {
            assert_eq!((decision.start, decision.drain.len()), (0, 0), "{decision:?}");
            assert_eq!(decision.reasons.first(), Some(&ScaleReason::Paused));
        }
    }

    #[test]
    fn what_waits_and_what_is_held_needs_workers() {
        let mut busy = group("a", 3, &[]);
        busy.load.unacknowledged = Some(4);
        let decision = alone(busy);
        assert_eq!((decision.desired, decision.start), (4, 4));
        assert_eq!(decision.reasons, [ScaleReason::Load(4)]);
    }

    #[test]
    fn workers_that_hold_requests_are_not_stopped_although_nothing_waits() {
        let mut busy = group("a", 0, &[WorkerActivity::Busy; 5]);
        busy.load = Load { unacknowledged: Some(0), in_flight: Some(10), ..Load::default() };
        let decision = alone(busy);
        assert_eq!((decision.desired, decision.start, drained(&decision)), (5, 0, vec![]));
    }

    #[test]
    fn idle_workers_go_before_busy_ones_and_the_oldest_idle_one_stays() {
        let mut calm = group(
            "a",
            0,
            &[
                WorkerActivity::Busy,
                WorkerActivity::Idle,
                WorkerActivity::Idle,
                WorkerActivity::Busy,
                WorkerActivity::Starting,
            ],
        );
        calm.load.unacknowledged = Some(5);
        let decision = alone(calm);
        assert_eq!((decision.desired, drained(&decision)), (3, vec!["a4", "a2"]));
    }

    #[test]
    fn limits_and_spares_are_kept_and_named() {
        let mut warm = group("a", 1, &[]);
        warm.limits.min_idle = 2;
        assert_eq!(alone(warm.clone()).desired, 3);
        warm.load = Load::default();
        let idle = alone(warm.clone());
        assert_eq!((idle.desired, idle.reasons), (1, vec![ScaleReason::Load(0), ScaleReason::Min(1)]));
        warm.load.ready = 1_000_000;
        let full = alone(warm);
        assert_eq!(full.desired, 10);
        assert!(full.reasons.contains(&ScaleReason::Max(10)));
    }

    #[test]
    fn a_calm_costs_workers_only_once_it_has_lasted() {
        let mut scale = Scaler::default();
        let mut wanted =
            |ready, second| scale.plan(&[group("a", ready, &[WorkerActivity::Idle; 4])], None, at(second)).remove(0);
        assert_eq!(wanted(8, 0).desired, 4);
        assert_eq!(wanted(0, 10).desired, 4);
        assert_eq!(wanted(4, 30).desired, 4);
        let later = wanted(0, 61);
        assert_eq!((later.desired, later.reasons), (2, vec![ScaleReason::Load(0), ScaleReason::RecentNeed(2)]));
        assert_eq!(wanted(0, 91).desired, 1);
    }

    #[test]
    fn a_group_that_is_not_wanted_loses_every_worker() {
        let mut over = group("a", 5, &[WorkerActivity::Idle, WorkerActivity::Busy, WorkerActivity::Stopping]);
        over.phase = None;
        let decision = alone(over);
        assert_eq!((decision.desired, decision.start, drained(&decision)), (0, 0, vec!["a0", "a1"]));
        assert_eq!(decision.reasons, [ScaleReason::NotNeeded]);
    }

    #[test]
    fn workers_that_go_count_for_the_budget_and_not_for_the_group() {
        let budget = Some(3);
        let decision = Scaler::default()
            .plan(&[group("a", 6, &[WorkerActivity::Stopping, WorkerActivity::Stopping])], budget, at(0))
            .remove(0);
        assert_eq!((decision.desired, decision.start), (3, 1));
    }

    #[test]
    fn the_budget_is_shared_by_what_each_lacks() {
        let budget = Some(10);
        let groups = [group("a", 100, &[]), group("b", 2, &[]), group("c", 100, &[])];
        let mut decisions = Scaler::default().plan(&groups, budget, at(0));
        decisions.sort_by(|one, other| one.key.cmp(&other.key));
        let wanted: Vec<u32> = decisions.iter().map(|decision| decision.desired).collect();
        assert_eq!(wanted[1], 1);
        assert_eq!(wanted.iter().sum::<u32>(), 10);
        assert!(wanted[0].abs_diff(wanted[2]) <= 1, "{wanted:?}");
    }

    #[test]
    fn more_groups_than_workers_take_turns() {
        let budget = Some(1);
        let (mut scale, mut has, mut turns) = (Scaler::default(), None::<usize>, [0, 0, 0]);
        for second in 0..600 {
            let groups: Vec<GroupInput> = ["a", "b", "c"]
                .into_iter()
                .enumerate()
                .map(|(number, key)| group(key, 9, if has == Some(number) { &[WorkerActivity::Busy] } else { &[] }))
                .collect();
            for decision in scale.plan(&groups, budget, at(second)) {
                let number = groups.iter().position(|group| group.key == decision.key).unwrap();
                assert!(decision.start == 0 || has.is_none(), "the budget is one worker");
                if decision.start == 1 {
                    has = Some(number);
                } else if !decision.drain.is_empty() {
                    has = None;
                }
            }
            turns[has.unwrap_or(0)] += 1;
        }
        assert!(turns.iter().all(|seconds| *seconds >= 150), "{turns:?}");
    }

    #[test]
    fn c4_a_turn_begins_when_its_worker_is_ready_and_a_start_that_hangs_ends_one() {
        let budget = Some(1);
        let (mut scale, mut worker, mut starts) = (Scaler::default(), None::<(usize, u64)>, 0);
        // A start takes two turns; the last group's never ends.
        let is_ready = |key: usize, since: u64, second: u64| key != 2 && second - since >= 120;
        let mut turns = [0, 0, 0];
        for second in 0..3_600 {
            let groups: Vec<GroupInput> = ["a", "b", "c"]
                .into_iter()
                .enumerate()
                .map(|(number, key)| match worker {
                    Some((has, since)) if has == number && is_ready(has, since, second) => {
                        turns[number] += 1;
                        group(key, 9, &[WorkerActivity::Busy])
                    }
                    Some((has, _)) if has == number => group(key, 9, &[WorkerActivity::Starting]),
                    Some(_) | None => group(key, 9, &[]),
                })
                .collect();
            for decision in scale.plan(&groups, budget, at(second)) {
                let number = groups.iter().position(|group| group.key == decision.key).unwrap();
                if decision.start == 1 {
                    (worker, starts) = (Some((number, second)), starts + 1);
                } else if !decision.drain.is_empty() {
                    worker = None;
                }
            }
        }
        // Of an hour, the hanging starts take ten minutes each, the others three.
        assert!(turns[0] >= 180 && turns[1] >= 180 && turns[2] == 0, "{turns:?}");
        assert!((9..=13).contains(&starts), "{starts}");
    }

    #[test]
    fn a_group_whose_workers_do_not_last_waits_and_starts_are_few_at_once() {
        let mut failing = group("a", 20, &[WorkerActivity::Starting]);
        failing.not_before = at(200);
        let decision = alone(failing.clone());
        assert_eq!((decision.start, decision.reasons.last()), (0, Some(&ScaleReason::RestartDelay(at(200)))));
        failing.not_before = at(0);
        failing.is_driver_unavailable = true;
        let decision = alone(failing.clone());
        assert_eq!((decision.start, decision.reasons.last()), (0, Some(&ScaleReason::DriverUnavailable)));
        failing.is_driver_unavailable = false;
        let decision = alone(failing);
        assert_eq!((decision.desired, decision.start), (10, MAX_STARTING - 1));
    }
}
