//! What a queue in memory knows of its tasks: their runs, who has which and until when, and what waits.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use super::{End, PRIORITIES, Part, Settings, State, Stored};
use crate::domain::id::{Lane, Run, TaskId};
use crate::domain::time::Instant;
use crate::source::{Batch, Claim, Grant, Message, Undecodable};

#[derive(Default)]
pub(super) struct Tasks {
    pub(super) tasks: BTreeMap<TaskId, Task>,
    /// What runs, by the end of its lease. At most the last run of a task is running.
    pub(super) leases: BTreeSet<(Instant, TaskId)>,
    /// What waits, by priority and age; in the style of messages, every message that is not deleted.
    pub(super) entries: [Vec<Entry>; PRIORITIES.len()],
    pub(super) serial: u64,
}

pub(super) struct Task {
    pub(super) definition: Value,
    pub(super) lane: usize,
    pub(super) retries_left: u32,
    pub(super) runs: Vec<TaskRun>,
}

pub(super) struct TaskRun {
    pub(super) state: State,
    pub(super) worker: Option<Arc<str>>,
    pub(super) claimed: Instant,
    pub(super) taken_until: Instant,
    pub(super) artifacts: BTreeMap<String, Stored>,
}

pub(super) struct Entry {
    pub(super) id: Arc<str>,
    /// `None` stands for an entry that nothing can be made of.
    pub(super) run: Option<Run>,
    pub(super) receipt: Arc<str>,
    pub(super) dequeue_count: u32,
    pub(super) visible: Instant,
}

impl Tasks {
    pub(super) fn run(&self, run: &Run) -> Option<&TaskRun> {
        self.tasks.get(&run.task)?.runs.get(usize::try_from(run.run).ok()?)
    }

    pub(super) fn run_mut(&mut self, run: &Run) -> Option<&mut TaskRun> {
        self.tasks.get_mut(&run.task)?.runs.get_mut(usize::try_from(run.run).ok()?)
    }

    /// Adds a pending run.
    pub(super) fn schedule(&mut self, id: &TaskId, now: Instant) {
        let Some(task) = self.tasks.get_mut(id) else { return };
        let run = u32::try_from(task.runs.len()).unwrap_or(u32::MAX);
        let lane = task.lane;
        task.runs.push(TaskRun {
            state: State::Pending,
            worker: None,
            claimed: Instant::ORIGIN,
            taken_until: Instant::ORIGIN,
            artifacts: BTreeMap::new(),
        });
        self.push(lane, Some(Run { task: id.clone(), run }), now);
    }

    pub(super) fn push(&mut self, lane: usize, run: Option<Run>, now: Instant) {
        self.serial += 1;
        let id = format!("message-{}", self.serial).into();
        self.entries[lane].push(Entry { id, run, receipt: "".into(), dequeue_count: 0, visible: now });
    }

    pub(super) fn retry(&mut self, id: &TaskId, now: Instant) {
        if let Some(task) = self.tasks.get_mut(id)
            && let Some(left) = task.retries_left.checked_sub(1)
        {
            task.retries_left = left;
            self.schedule(id, now);
        }
    }

    /// Ends the last run of a task, where it has not ended.
    pub(super) fn resolve(&mut self, id: &TaskId, end: End) {
        let Some(run) = self.tasks.get_mut(id).and_then(|task| task.runs.last_mut()) else { return };
        if matches!(run.state, State::Pending | State::Running) {
            let lease = (run.taken_until, id.clone());
            run.state = State::Resolved(end);
            self.leases.remove(&lease);
        }
    }

    /// Gives a run to a worker until `taken_until`.
    pub(super) fn lend(&mut self, run: &Run, worker: &Arc<str>, lease: Duration, now: Instant) {
        let Some(found) = self.run_mut(run) else { return };
        let taken_until = now.plus(lease);
        let former = (found.taken_until, run.task.clone());
        if found.state == State::Pending {
            found.claimed = now;
        }
        found.state = State::Running;
        found.worker = Some(Arc::clone(worker));
        found.taken_until = taken_until;
        self.leases.remove(&former);
        self.leases.insert((taken_until, run.task.clone()));
    }

    pub(super) fn grant(&self, run: &Run, worker: &Arc<str>, lease: Duration) -> Option<Grant> {
        let task = self.tasks.get(&run.task)?.definition.clone();
        let claim = Claim::new(run.clone(), Part { worker: Arc::clone(worker) });
        Some(Grant { run: run.clone(), lease, task, unreadable: None, claim, replies: None })
    }

    pub(super) fn is_running(&self, run: &Run, worker: &Arc<str>) -> bool {
        self.run(run).is_some_and(|found| found.state == State::Running && found.worker.as_ref() == Some(worker))
    }

    /// Takes up to `max` pending runs for a worker.
    pub(super) fn take(&mut self, max: u8, worker: &Arc<str>, settings: &Settings, now: Instant) -> Batch {
        let mut batch = Batch::default();
        for lane in 0..PRIORITIES.len() {
            while batch.grants.len() + batch.undecodable.len() < usize::from(max) && !self.entries[lane].is_empty() {
                let entry = self.entries[lane].remove(0);
                let Some(run) = entry.run.clone() else {
                    batch.undecodable.push(unreadable(&entry, lane));
                    continue;
                };
                if self.run(&run).is_none_or(|found| found.state != State::Pending) {
                    continue;
                }
                self.lend(&run, worker, settings.lease, now);
                batch.grants.extend(self.grant(&run, worker, settings.lease));
            }
        }
        batch
    }

    /// Receives up to `max` messages of a lane.
    pub(super) fn receive(&mut self, lane: usize, max: u8, hidden: Duration, now: Instant) -> Batch {
        let mut batch = Batch::default();
        let serial = &mut self.serial;
        let visible = self.entries[lane].iter_mut().filter(|entry| entry.visible <= now);
        for entry in visible.take(usize::from(max)) {
            *serial += 1;
            entry.visible = now.plus(hidden);
            entry.dequeue_count = entry.dequeue_count.saturating_add(1);
            entry.receipt = format!("receipt+{serial}/=").into();
            match entry.run.clone() {
                Some(run) => batch.messages.push(Message {
                    lane: named(lane),
                    id: Arc::clone(&entry.id),
                    receipt: Arc::clone(&entry.receipt),
                    dequeue_count: entry.dequeue_count,
                    run,
                }),
                None => batch.undecodable.push(unreadable(entry, lane)),
            }
        }
        batch
    }
}

pub(super) fn unreadable(entry: &Entry, lane: usize) -> Undecodable {
    Undecodable {
        lane: named(lane),
        id: Arc::clone(&entry.id),
        receipt: Arc::clone(&entry.receipt),
        dequeue_count: entry.dequeue_count,
        what: "nothing can be made of it".into(),
    }
}

pub(super) fn named(lane: usize) -> Lane {
    Lane(u16::try_from(lane).unwrap_or(u16::MAX))
}
