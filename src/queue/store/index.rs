//! The open tasks in memory: pending runs, claim expiries, deadlines.
//!
//! Derived from the tables and rebuilt from them at any time.

use std::collections::{BTreeSet, HashMap};
use std::ops::Bound;

use super::super::clock::UnixMillis;
use super::super::task_state::{RunState, TaskRecord};

/// Ordered by urgency, then by age.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PendingEntry {
    /// 0 is the most urgent.
    urgency: u8,
    since: UnixMillis,
    pub(super) id: i64,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Position {
    pending: Option<(String, PendingEntry)>,
    claim: Option<ClaimedEntry>,
    deadline: Option<(UnixMillis, i64)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct ClaimedEntry {
    queue: String,
    until: UnixMillis,
    id: i64,
}

impl Position {
    pub(super) fn of(id: i64, task: &TaskRecord) -> Self {
        let last = task.runs.last();
        let pending = last.filter(|run| run.state == RunState::Pending).map(|run| {
            let urgency = u8::MAX - task.priority.rank();
            (task.queue.clone(), PendingEntry { urgency, since: run.scheduled, id })
        });
        let claim = last
            .filter(|run| run.state == RunState::Running)
            .and_then(|run| run.taken_until)
            .map(|until| ClaimedEntry { queue: task.queue.clone(), until, id });
        let deadline = task.is_open().then_some((task.deadline, id));
        Self { pending, claim, deadline }
    }

    pub(super) fn pending_queue(&self) -> Option<&str> {
        self.pending.as_ref().map(|(queue, _)| queue.as_str())
    }
}

#[derive(Debug)]
pub(super) struct Move {
    pub(super) from: Position,
    pub(super) to: Position,
}

#[derive(Debug, Default)]
pub(super) struct Index {
    pending: HashMap<String, BTreeSet<PendingEntry>>,
    claims: BTreeSet<(UnixMillis, i64)>,
    claimed: HashMap<String, BTreeSet<i64>>,
    deadlines: BTreeSet<(UnixMillis, i64)>,
}

impl Index {
    pub(super) fn apply(&mut self, moved: Move) {
        if let Some((queue, entry)) = moved.from.pending {
            remove_entry(&mut self.pending, &queue, &entry);
        }
        if let Some(ClaimedEntry { queue, until, id }) = moved.from.claim {
            self.claims.remove(&(until, id));
            remove_entry(&mut self.claimed, &queue, &id);
        }
        if let Some(deadline) = moved.from.deadline {
            self.deadlines.remove(&deadline);
        }
        if let Some((queue, entry)) = moved.to.pending {
            self.pending.entry(queue).or_default().insert(entry);
        }
        if let Some(ClaimedEntry { queue, until, id }) = moved.to.claim {
            self.claims.insert((until, id));
            self.claimed.entry(queue).or_default().insert(id);
        }
        self.deadlines.extend(moved.to.deadline);
    }

    /// Next to be claimed first.
    pub(super) fn pending(&self, queue: &str) -> impl Iterator<Item = &PendingEntry> {
        self.pending.get(queue).into_iter().flatten()
    }

    pub(super) fn pending_count(&self, queue: &str) -> usize {
        self.pending.get(queue).map_or(0, BTreeSet::len)
    }

    pub(super) fn claims_due(&self, now: UnixMillis, limit: usize) -> Vec<i64> {
        due_ids(&self.claims, now, limit)
    }

    pub(super) fn deadlines_due(&self, now: UnixMillis, limit: usize) -> Vec<i64> {
        due_ids(&self.deadlines, now, limit)
    }

    pub(super) fn next_claim_end(&self) -> Option<UnixMillis> {
        self.claims.first().map(|(at, _)| *at)
    }

    pub(super) fn next_deadline(&self) -> Option<UnixMillis> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// In order of creation, starting after row `after`.
    pub(super) fn claimed(&self, queue: &str, after: i64) -> impl Iterator<Item = i64> {
        let above = (Bound::Excluded(after), Bound::Unbounded);
        self.claimed.get(queue).into_iter().flat_map(move |held| held.range(above)).copied()
    }
}

fn remove_entry<T: Ord>(sets: &mut HashMap<String, BTreeSet<T>>, queue: &str, entry: &T) {
    if let Some(set) = sets.get_mut(queue) {
        set.remove(entry);
        if set.is_empty() {
            sets.remove(queue);
        }
    }
}

fn due_ids(set: &BTreeSet<(UnixMillis, i64)>, now: UnixMillis, limit: usize) -> Vec<i64> {
    let reached = set.iter().take_while(|(at, _)| *at <= now);
    reached.take(limit).map(|(_, id)| *id).collect()
}
