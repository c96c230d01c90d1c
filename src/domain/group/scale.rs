//! How many workers each group is to have, and which of them go: from what waits and what is held, within the group's
//! limits and the machine's budget, quickly up and slowly down.
//!
//! Whoever holds a request is never taken for idle, and idle workers go before busy ones. What is decided comes with its
//! reasons, for people who ask "why three workers?".

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::fmt;
use core::time::Duration;

use super::load::Load;
use super::{Key, Phase};
use crate::domain::time::Instant;

/// The limits of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// So many at least, while the group is wanted.
    pub min: u32,
    /// So many at most.
    pub max: u32,
    /// So many more than the load needs, while there is load.
    pub spares: u32,
    /// How many requests one worker holds at once. At least 1.
    pub concurrency: u32,
    /// Fewer are wanted only once fewer have been enough for so long.
    pub down_after: Duration,
    /// How many may be starting at once.
    pub starting_max: u32,
}

/// What a worker does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Doing {
    /// It was started and is not ready yet.
    Starting,
    /// It is ready and holds nothing.
    Idle,
    /// It holds requests, or nobody knows.
    Busy,
    /// It was told to go.
    Going,
}

/// A worker that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worker {
    /// Its name.
    pub id: Box<str>,
    /// What it does.
    pub doing: Doing,
    /// Since when it is there.
    pub since: Instant,
}

/// A group as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Its key.
    pub key: Key,
    /// What is wanted of it; `None` where it is to go.
    pub phase: Option<Phase>,
    /// Its limits.
    pub limits: Limits,
    /// Its load.
    pub load: Load,
    /// Its workers.
    pub workers: Vec<Worker>,
    /// None is started before.
    pub not_before: Instant,
    /// Whether it is left as it is.
    pub rest: Rest,
}

/// Whether a group is left as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// It is not.
    No,
    /// Nobody is started or told to go: somebody has said so.
    Paused,
}

/// Why a number of workers is what it is: each bound that changed it, in the order in which they did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Somebody has said that it is left as it is.
    Paused,
    /// The group is not wanted any more.
    NotWanted,
    /// What waits and is held needs so many.
    Load(u32),
    /// The rate of requests needs so many.
    Rate(u32),
    /// Nobody has looked into its queue yet: so many are there, and may be needed.
    Unknown(u32),
    /// So many more are kept warm.
    Spares(u32),
    /// There are to be so many at least.
    Min(u32),
    /// There are to be so many at most.
    Max(u32),
    /// So many were needed a short while ago.
    Recently(u32),
    /// The machine's budget allows so many.
    Budget(u32),
    /// The last ones did not last; the next is started then.
    Pause(Instant),
    /// So many are starting already.
    Starting(u32),
}

impl fmt::Display for Reason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Paused => out.write_str("it is paused, and left as it is"),
            Self::NotWanted => out.write_str("nobody needs the group"),
            Self::Load(count) => write!(out, "the load needs {count}"),
            Self::Rate(count) => write!(out, "the rate of requests needs {count}"),
            Self::Unknown(count) => write!(out, "{count} are there, and its queue was not looked at yet"),
            Self::Spares(count) => write!(out, "{count} more are kept warm"),
            Self::Min(count) => write!(out, "{count} at least"),
            Self::Max(count) => write!(out, "{count} at most"),
            Self::Recently(count) => write!(out, "{count} were needed a short while ago"),
            Self::Budget(count) => write!(out, "the budget allows {count}"),
            Self::Pause(_) => out.write_str("the last ones did not last"),
            Self::Starting(count) => write!(out, "{count} are starting already"),
        }
    }
}

/// What is to be done about a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision {
    /// Its key.
    pub key: Key,
    /// How many it is to have.
    pub wanted: u32,
    /// How many to start now.
    pub start: u32,
    /// Which to tell that they go: they take nothing new, and finish what they hold.
    pub drain: Vec<Box<str>>,
    /// Why.
    pub reasons: Vec<Reason>,
}

/// What all groups together may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// So many workers.
    pub workers: u32,
    /// Where there are more groups than workers, one that has a worker keeps it for so long before it is another one's turn.
    pub turn: Duration,
}

/// Remembers what groups needed, so that a short calm does not cost a warm worker, and whose turn it is.
#[derive(Debug, Clone, Default)]
pub struct Scale {
    /// For each group the needs of its window: times rise, needs fall.
    recent: BTreeMap<Key, VecDeque<Need>>,
    turns: BTreeMap<Key, Turn>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    /// It has workers, since then.
    Has(Instant),
    /// It has none, since then.
    Waits(Instant),
}

#[derive(Debug, Clone, Copy)]
struct Need {
    at: Instant,
    count: u32,
}

struct Draft<'a> {
    group: &'a Group,
    wanted: u32,
    reasons: Vec<Reason>,
}

impl Scale {
    /// Decides about every group there is. Each key is there once.
    pub fn plan(&mut self, groups: &[Group], budget: Option<Budget>, now: Instant) -> Vec<Decision> {
        self.take_turns(groups, now);
        let mut drafts: Vec<Draft<'_>> = groups.iter().map(|group| self.draft(group, now)).collect();
        let mut room = u32::MAX;
        if let Some(budget) = budget {
            drafts.sort_by_key(|draft| self.rank(draft, budget.turn, now));
            share(&mut drafts, budget.workers);
            // One that goes has its place until it has gone.
            let there: usize = groups.iter().map(|group| group.workers.len()).sum();
            room = budget.workers.saturating_sub(u32::try_from(there).unwrap_or(u32::MAX));
        }
        drafts.into_iter().map(|draft| draft.decide(&mut room, now)).collect()
    }

    fn take_turns(&mut self, groups: &[Group], now: Instant) {
        let known: BTreeSet<&Key> = groups.iter().map(|group| &group.key).collect();
        self.recent.retain(|key, _| known.contains(key));
        self.turns.retain(|key, _| known.contains(key));
        for group in groups {
            let has = count(group, |doing| doing != Doing::Going) > 0;
            let turn = match self.turns.get(&group.key) {
                Some(turn @ Turn::Has(_)) if has => *turn,
                Some(turn @ Turn::Waits(_)) if !has => *turn,
                Some(_) | None if has => Turn::Has(now),
                Some(_) | None => Turn::Waits(now),
            };
            self.turns.insert(group.key.clone(), turn);
        }
    }

    /// Who is served first: whose turn it is, then who has waited longest, then whose turn is over, and at last those without
    /// load.
    fn rank(&self, draft: &Draft<'_>, turn: Duration, now: Instant) -> (u8, Instant) {
        if draft.group.load.is_none() {
            return (3, Instant::ORIGIN);
        }
        match self.turns.get(&draft.group.key) {
            Some(Turn::Has(since)) if now < since.plus(turn) => (0, *since),
            Some(Turn::Waits(since)) => (1, *since),
            Some(Turn::Has(since)) => (2, *since),
            None => (1, now),
        }
    }

    /// When a decision may change by time alone.
    #[must_use]
    pub fn next_deadline(&self, groups: &[Group], now: Instant) -> Option<Instant> {
        let windows = groups.iter().filter_map(|group| {
            let recent = self.recent.get(&group.key).filter(|recent| recent.len() > 1)?;
            recent.front().map(|need| need.at.plus(group.limits.down_after))
        });
        windows.chain(groups.iter().map(|group| group.not_before)).filter(|at| *at > now).min()
    }

    fn draft<'a>(&mut self, group: &'a Group, now: Instant) -> Draft<'a> {
        let (limits, load) = (group.limits, group.load);
        if group.rest == Rest::Paused {
            let present = count(group, |doing| doing != Doing::Going);
            return Draft { group, wanted: present, reasons: Vec::from([Reason::Paused]) };
        }
        if group.phase.is_none() {
            self.recent.remove(&group.key);
            return Draft { group, wanted: 0, reasons: Vec::from([Reason::NotWanted]) };
        }
        let mut reasons = Vec::new();
        let by_load = load.ready.saturating_add(load.held()).div_ceil(limits.concurrency.max(1));
        let by_rate = load.held_by_rate.unwrap_or_default().div_ceil(u64::from(limits.concurrency.max(1)) * 1_000);
        let by_rate = u32::try_from(by_rate).unwrap_or(u32::MAX);
        let mut wanted = by_load.max(by_rate);
        reasons.push(if by_rate > by_load { Reason::Rate(by_rate) } else { Reason::Load(by_load) });
        let present = count(group, |doing| doing != Doing::Going);
        if load.is_unknown && present > wanted {
            wanted = present;
            reasons.push(Reason::Unknown(present));
        }
        if !load.is_unknown && wanted > 0 && limits.spares > 0 {
            wanted = wanted.saturating_add(limits.spares);
            reasons.push(Reason::Spares(limits.spares));
        }
        let recently = self.remember(group, wanted, now);
        if recently > wanted {
            wanted = recently;
            reasons.push(Reason::Recently(recently));
        }
        if wanted < limits.min {
            wanted = limits.min;
            reasons.push(Reason::Min(limits.min));
        }
        if wanted > limits.max {
            wanted = limits.max;
            reasons.push(Reason::Max(limits.max));
        }
        Draft { group, wanted, reasons }
    }

    /// The greatest need within the window, this one included.
    fn remember(&mut self, group: &Group, count: u32, now: Instant) -> u32 {
        let recent = self.recent.entry(group.key.clone()).or_default();
        while recent.back().is_some_and(|need| need.count <= count) {
            recent.pop_back();
        }
        recent.push_back(Need { at: now, count });
        // The one before the last is outlived as of when the last one began, so that each counts for a whole window.
        while recent.len() > 1 && recent.front().is_some_and(|need| now.since(need.at) >= group.limits.down_after) {
            recent.pop_front();
        }
        recent.front().map_or(count, |need| need.count)
    }
}

impl Draft<'_> {
    fn decide(self, room: &mut u32, now: Instant) -> Decision {
        let Self { group, wanted, mut reasons } = self;
        // The budget takes nobody away either.
        if group.rest == Rest::Paused {
            return Decision { key: group.key.clone(), wanted, start: 0, drain: Vec::new(), reasons };
        }
        let present = count(group, |doing| doing != Doing::Going);
        let mut start = 0;
        if wanted > present {
            let starting = count(group, |doing| doing == Doing::Starting);
            start = (wanted - present).min(*room);
            if now < group.not_before {
                reasons.push(Reason::Pause(group.not_before));
                start = 0;
            } else if starting.saturating_add(start) > group.limits.starting_max.max(1) {
                reasons.push(Reason::Starting(starting));
                start = group.limits.starting_max.max(1).saturating_sub(starting);
            }
            *room -= start;
        }
        let surplus = usize::try_from(present.saturating_sub(wanted)).unwrap_or(usize::MAX);
        let mut candidates: Vec<&Worker> = group.workers.iter().filter(|worker| worker.doing != Doing::Going).collect();
        // Who has nothing to lose goes first: one that is not ready yet, then idle ones, the youngest first.
        candidates.sort_by_key(|worker| (worker.doing, Reverse(worker.since)));
        let drain = candidates.into_iter().take(surplus).map(|worker| worker.id.clone()).collect();
        Decision { key: group.key.clone(), wanted, start, drain, reasons }
    }
}

fn count(group: &Group, which: impl Fn(Doing) -> bool) -> u32 {
    u32::try_from(group.workers.iter().filter(|worker| which(worker.doing)).count()).unwrap_or(u32::MAX)
}

/// Shares the budget so that no group has more than another one lacks: all shares rise together until each is enough or
/// nothing is left, and what cannot be divided goes to those who come first.
fn share(drafts: &mut [Draft<'_>], budget: u32) {
    let total = drafts.iter().fold(0_u32, |sum, draft| sum.saturating_add(draft.wanted));
    if total <= budget {
        return;
    }
    let mut left = budget;
    let mut shares: Vec<u32> = drafts.iter().map(|_| 0).collect();
    while left > 0 {
        let hungry: Vec<usize> = shares
            .iter()
            .zip(drafts.iter())
            .enumerate()
            .filter(|(_, (share, draft))| **share < draft.wanted)
            .map(|(at, _)| at)
            .collect();
        let Some(each) = u32::try_from(hungry.len()).ok().filter(|count| *count > 0) else { break };
        let level = (left / each).max(1);
        for at in hungry {
            let (Some(share), Some(draft)) = (shares.get_mut(at), drafts.get(at)) else { continue };
            let more = level.min(draft.wanted - *share).min(left);
            *share += more;
            left -= more;
        }
    }
    for (draft, share) in drafts.iter_mut().zip(shares) {
        if share < draft.wanted {
            draft.wanted = share;
            draft.reasons.push(Reason::Budget(share));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { min: 1, max: 10, spares: 0, concurrency: 2, down_after: Duration::from_secs(60), starting_max: 10 };

    fn at(seconds: u64) -> Instant {
        Instant::at(Duration::from_secs(seconds))
    }

    fn group(key: &str, ready: u32, workers: &[Doing]) -> Group {
        let workers = workers.iter().enumerate().map(|(number, doing)| Worker {
            id: alloc::format!("{key}{number}").into(),
            doing: *doing,
            since: at(number as u64),
        });
        Group {
            key: Key::new(key).unwrap(),
            phase: Some(Phase::Active),
            limits: LIMITS,
            load: Load { ready, ..Load::default() },
            workers: workers.collect(),
            not_before: Instant::ORIGIN,
            rest: Rest::No,
        }
    }

    fn alone(group: Group) -> Decision {
        Scale::default().plan(&[group], None, at(100)).remove(0)
    }

    fn drained(decision: &Decision) -> Vec<&str> {
        decision.drain.iter().map(|id| &**id).collect()
    }

    #[test]
    fn who_is_there_when_a_controller_begins_stays_until_the_queue_was_looked_at_and_for_a_while_after() {
        let mut scale = Scale::default();
        let mut decide = |load: Load, seconds: u64| {
            let group = Group { load, ..group("a", 0, &[Doing::Idle, Doing::Busy, Doing::Idle, Doing::Going]) };
            scale.plan(&[group], None, at(seconds)).remove(0)
        };
        let first = decide(Load::unknown(), 100);
        assert_eq!((first.wanted, first.start, drained(&first)), (3, 0, vec![]));
        assert_eq!(first.reasons, [Reason::Load(0), Reason::Unknown(3)]);
        let none = Load::default();
        assert_eq!(decide(none, 101).wanted, 3, "it may only be that nobody has reported yet");
        assert_eq!(decide(none, 161).wanted, 1);
        let cold = Scale::default().plan(&[Group { load: Load::unknown(), ..group("b", 0, &[]) }], None, at(1));
        assert_eq!((cold[0].wanted, cold[0].start), (1, 1), "as many as there are to be at least");
    }

    #[test]
    fn a_group_that_is_paused_is_left_as_it_is_whatever_it_needs_and_whatever_the_budget_says() {
        let mut needs = group("a", 9, &[Doing::Idle]);
        let mut going = group("b", 0, &[Doing::Idle, Doing::Busy]);
        going.phase = None;
        for group in [&mut needs, &mut going] {
            group.rest = Rest::Paused;
        }
        let budget = Budget { workers: 1, turn: Duration::ZERO };
        for decision in Scale::default().plan(&[needs, going], Some(budget), at(100)) {
            assert_eq!((decision.start, decision.drain.len()), (0, 0), "{decision:?}");
            assert_eq!(decision.reasons.first(), Some(&Reason::Paused));
        }
    }

    #[test]
    fn what_waits_and_what_is_held_needs_workers() {
        let mut busy = group("a", 3, &[]);
        busy.load.unacknowledged = Some(4);
        let decision = alone(busy);
        assert_eq!((decision.wanted, decision.start), (4, 4));
        assert_eq!(decision.reasons, [Reason::Load(4)]);
    }

    #[test]
    fn nobody_is_stopped_because_nothing_waits_while_requests_are_held() {
        let mut busy = group("a", 0, &[Doing::Busy; 5]);
        busy.load = Load { unacknowledged: Some(0), in_flight: Some(10), ..Load::default() };
        let decision = alone(busy);
        assert_eq!((decision.wanted, decision.start, drained(&decision)), (5, 0, vec![]));
    }

    #[test]
    fn idle_workers_go_before_busy_ones_and_the_oldest_idle_one_stays() {
        let mut calm = group("a", 0, &[Doing::Busy, Doing::Idle, Doing::Idle, Doing::Busy, Doing::Starting]);
        calm.load.unacknowledged = Some(5);
        let decision = alone(calm);
        assert_eq!((decision.wanted, drained(&decision)), (3, vec!["a4", "a2"]));
    }

    #[test]
    fn limits_and_spares_are_kept_and_named() {
        let mut warm = group("a", 1, &[]);
        warm.limits.spares = 2;
        assert_eq!(alone(warm.clone()).wanted, 3);
        warm.load = Load::default();
        let idle = alone(warm.clone());
        assert_eq!((idle.wanted, idle.reasons), (1, vec![Reason::Load(0), Reason::Min(1)]));
        warm.load.ready = 1_000_000;
        let full = alone(warm);
        assert_eq!(full.wanted, 10);
        assert!(full.reasons.contains(&Reason::Max(10)));
    }

    #[test]
    fn the_rate_keeps_workers_that_a_short_queue_would_not() {
        let mut steady = group("a", 0, &[Doing::Idle; 3]);
        // Two each.
        steady.load.held_by_rate = Some(4_100);
        let decision = alone(steady);
        assert_eq!((decision.wanted, decision.reasons), (3, vec![Reason::Rate(3)]));
    }

    #[test]
    fn a_calm_costs_workers_only_once_it_has_lasted() {
        let mut scale = Scale::default();
        let mut wanted =
            |ready, second| scale.plan(&[group("a", ready, &[Doing::Idle; 4])], None, at(second)).remove(0);
        assert_eq!(wanted(8, 0).wanted, 4);
        assert_eq!(wanted(0, 10).wanted, 4);
        assert_eq!(wanted(4, 30).wanted, 4);
        let later = wanted(0, 61);
        assert_eq!((later.wanted, later.reasons), (2, vec![Reason::Load(0), Reason::Recently(2)]));
        assert_eq!(wanted(0, 91).wanted, 1);
    }

    #[test]
    fn a_group_that_is_not_wanted_loses_every_worker() {
        let mut over = group("a", 5, &[Doing::Idle, Doing::Busy, Doing::Going]);
        over.phase = None;
        let decision = alone(over);
        assert_eq!((decision.wanted, decision.start, drained(&decision)), (0, 0, vec!["a0", "a1"]));
        assert_eq!(decision.reasons, [Reason::NotWanted]);
    }

    #[test]
    fn workers_that_go_count_for_the_budget_and_not_for_the_group() {
        let budget = Some(Budget { workers: 3, turn: Duration::from_secs(60) });
        let decision = Scale::default().plan(&[group("a", 6, &[Doing::Going, Doing::Going])], budget, at(0)).remove(0);
        assert_eq!((decision.wanted, decision.start), (3, 1));
    }

    #[test]
    fn the_budget_is_shared_by_what_each_lacks() {
        let budget = Some(Budget { workers: 10, turn: Duration::from_secs(60) });
        let groups = [group("a", 100, &[]), group("b", 2, &[]), group("c", 100, &[])];
        let mut decisions = Scale::default().plan(&groups, budget, at(0));
        decisions.sort_by(|one, other| one.key.cmp(&other.key));
        let wanted: Vec<u32> = decisions.iter().map(|decision| decision.wanted).collect();
        assert_eq!(wanted[1], 1);
        assert_eq!(wanted.iter().sum::<u32>(), 10);
        assert!(wanted[0].abs_diff(wanted[2]) <= 1, "{wanted:?}");
    }

    #[test]
    fn more_groups_than_workers_take_turns() {
        let budget = Some(Budget { workers: 1, turn: Duration::from_secs(60) });
        let (mut scale, mut has, mut turns) = (Scale::default(), None::<usize>, [0, 0, 0]);
        for second in 0..600 {
            let groups: Vec<Group> = ["a", "b", "c"]
                .into_iter()
                .enumerate()
                .map(|(number, key)| group(key, 9, if has == Some(number) { &[Doing::Busy] } else { &[] }))
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
    fn a_group_whose_workers_do_not_last_waits_and_starts_are_few_at_once() {
        let mut failing = group("a", 20, &[Doing::Starting]);
        failing.not_before = at(200);
        let decision = alone(failing.clone());
        assert_eq!((decision.start, decision.reasons.last()), (0, Some(&Reason::Pause(at(200)))));
        (failing.not_before, failing.limits.starting_max) = (at(0), 3);
        let decision = alone(failing);
        assert_eq!((decision.wanted, decision.start), (10, 2));
    }
}
