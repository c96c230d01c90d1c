//! What the store keeps in memory of the open tasks: who waits, whose claim ends when, whose deadline comes when.
//!
//! It can be rebuilt from the tables at any time, and holds nothing that they do not.

use std::collections::{BTreeSet, HashMap};
use std::ops::Bound;

use super::super::clock::UnixMillis;
use super::super::task_state::{RunState, TaskRecord};

/// The place of a pending run in its queue: urgency first, then age.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PendingEntry {
    /// 0 is the most urgent.
    urgency: u8,
    since: UnixMillis,
    pub(super) id: i64,
}

/// Where a task belongs in the index.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Position {
    pending: Option<(String, PendingEntry)>,
    claim: Option<ClaimedEntry>,
    deadline: Option<(UnixMillis, i64)>,
}

/// A task under a claim.
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

    /// The queue in which the task waits.
    pub(super) fn pending_queue(&self) -> Option<&str> {
        self.pending.as_ref().map(|(queue, _)| queue.as_str())
    }
}

/// A task that moved.
#[derive(Debug)]
pub(super) struct Move {
    pub(super) from: Position,
    pub(super) to: Position,
}

/// The open tasks, in the orders that are asked for.
#[derive(Debug, Default)]
pub(super) struct Index {
    pending: HashMap<String, BTreeSet<PendingEntry>>,
    claims: BTreeSet<(UnixMillis, i64)>,
    claimed: HashMap<String, BTreeSet<i64>>,
    deadlines: BTreeSet<(UnixMillis, i64)>,
}

impl Index {
    pub(super) fn apply(&mut self, moved: Move) {
        if let Some((queue, place)) = moved.from.pending {
            remove_entry(&mut self.pending, &queue, &place);
        }
        if let Some(ClaimedEntry { queue, until, id }) = moved.from.claim {
            self.claims.remove(&(until, id));
            remove_entry(&mut self.claimed, &queue, &id);
        }
        if let Some(deadline) = moved.from.deadline {
            self.deadlines.remove(&deadline);
        }
        if let Some((queue, place)) = moved.to.pending {
            self.pending.entry(queue).or_default().insert(place);
        }
        if let Some(ClaimedEntry { queue, until, id }) = moved.to.claim {
            self.claims.insert((until, id));
            self.claimed.entry(queue).or_default().insert(id);
        }
        self.deadlines.extend(moved.to.deadline);
    }

    /// The tasks that wait in a queue, the next one first.
    pub(super) fn pending(&self, queue: &str) -> impl Iterator<Item = &PendingEntry> {
        self.pending.get(queue).into_iter().flatten()
    }

    pub(super) fn pending_count(&self, queue: &str) -> usize {
        self.pending.get(queue).map_or(0, BTreeSet::len)
    }

    /// Tasks whose claim ended at `now` or before.
    pub(super) fn claims_due(&self, now: UnixMillis, most: usize) -> Vec<i64> {
        due_ids(&self.claims, now, most)
    }

    /// Tasks whose deadline was at `now` or before.
    pub(super) fn deadlines_due(&self, now: UnixMillis, most: usize) -> Vec<i64> {
        due_ids(&self.deadlines, now, most)
    }

    pub(super) fn next_claim_end(&self) -> Option<UnixMillis> {
        self.claims.first().map(|(at, _)| *at)
    }

    pub(super) fn next_deadline(&self) -> Option<UnixMillis> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// The tasks of a queue that are under a claim, in the order they were created in, from the one after `after`.
    pub(super) fn claimed(&self, queue: &str, after: i64) -> impl Iterator<Item = i64> {
        let above = (Bound::Excluded(after), Bound::Unbounded);
        self.claimed.get(queue).into_iter().flat_map(move |held| held.range(above)).copied()
    }
}

/// Takes an entry out of its queue's set, and the set with it where it was the last.
fn remove_entry<T: Ord>(sets: &mut HashMap<String, BTreeSet<T>>, queue: &str, entry: &T) {
    if let Some(set) = sets.get_mut(queue) {
        set.remove(entry);
        if set.is_empty() {
            sets.remove(queue);
        }
    }
}

fn due_ids(set: &BTreeSet<(UnixMillis, i64)>, now: UnixMillis, most: usize) -> Vec<i64> {
    let reached = set.iter().take_while(|(at, _)| *at <= now);
    reached.take(most).map(|(_, id)| *id).collect()
}
