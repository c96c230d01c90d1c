//! The tasks of a queue in memory: their runs, leases and messages.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use super::{MemoryClaim, MemorySource, PRIORITIES, RunEnd, RunState};
use journeyman::id::{PriorityQueue, Run, TaskId};
use journeyman::source::{ArtifactBody, Grant, Granted, Message, PollBatch, RunTerms};
use journeyman::time::Instant;

#[derive(Default)]
pub(super) struct TaskTable {
    pub(super) tasks: BTreeMap<TaskId, TaskEntry>,
    /// Claimed runs by the end of their lease. Only the last run of a task can be claimed.
    pub(super) leases: BTreeSet<(Instant, TaskId)>,
    /// Pending runs by priority and age; with messages, every message not deleted.
    pub(super) entries: [Vec<QueuedMessage>; PRIORITIES.len()],
    pub(super) serial: u64,
}

pub(super) struct TaskEntry {
    pub(super) definition: Value,
    pub(super) queue: usize,
    pub(super) retries_left: u32,
    pub(super) runs: Vec<TaskRun>,
}

pub(super) struct TaskRun {
    pub(super) state: RunState,
    pub(super) worker: Option<Arc<str>>,
    pub(super) claimed_at: Instant,
    pub(super) taken_until: Instant,
    pub(super) artifacts: BTreeMap<String, ArtifactBody>,
}

pub(super) struct QueuedMessage {
    pub(super) id: Arc<str>,
    /// `None` is a message that cannot be read.
    pub(super) run: Option<Run>,
    pub(super) receipt: Arc<str>,
    pub(super) dequeue_count: u32,
    pub(super) visible_at: Instant,
}

impl TaskTable {
    pub(super) fn run(&self, run: &Run) -> Option<&TaskRun> {
        self.tasks.get(&run.task)?.runs.get(usize::try_from(run.run).ok()?)
    }

    pub(super) fn run_mut(&mut self, run: &Run) -> Option<&mut TaskRun> {
        self.tasks.get_mut(&run.task)?.runs.get_mut(usize::try_from(run.run).ok()?)
    }

    pub(super) fn schedule(&mut self, id: &TaskId, now: Instant) {
        let Some(task) = self.tasks.get_mut(id) else { return };
        let run = u32::try_from(task.runs.len()).unwrap_or(u32::MAX);
        let queue = task.queue;
        task.runs.push(TaskRun {
            state: RunState::Pending,
            worker: None,
            claimed_at: Instant::ORIGIN,
            taken_until: Instant::ORIGIN,
            artifacts: BTreeMap::new(),
        });
        self.push(queue, Some(Run { task: id.clone(), run }), now);
    }

    pub(super) fn push(&mut self, queue: usize, run: Option<Run>, now: Instant) {
        self.serial += 1;
        let id = format!("message-{}", self.serial).into();
        self.entries[queue].push(QueuedMessage { id, run, receipt: "".into(), dequeue_count: 0, visible_at: now });
    }

    pub(super) fn retry(&mut self, id: &TaskId, now: Instant) {
        if let Some(task) = self.tasks.get_mut(id)
            && let Some(left) = task.retries_left.checked_sub(1)
        {
            task.retries_left = left;
            self.schedule(id, now);
        }
    }

    pub(super) fn resolve(&mut self, id: &TaskId, end: RunEnd) {
        let Some(run) = self.tasks.get_mut(id).and_then(|task| task.runs.last_mut()) else { return };
        if matches!(run.state, RunState::Pending | RunState::Running) {
            let lease = (run.taken_until, id.clone());
            run.state = RunState::Resolved(end);
            self.leases.remove(&lease);
        }
    }

    pub(super) fn set_lease(&mut self, run: &Run, worker: &Arc<str>, lease: Duration, now: Instant) {
        let Some(found) = self.run_mut(run) else { return };
        let taken_until = now.plus(lease);
        let former = (found.taken_until, run.task.clone());
        if found.state == RunState::Pending {
            found.claimed_at = now;
        }
        found.state = RunState::Running;
        found.worker = Some(Arc::clone(worker));
        found.taken_until = taken_until;
        self.leases.remove(&former);
        self.leases.insert((taken_until, run.task.clone()));
    }

    pub(super) fn grant(&self, run: &Run, source: &MemorySource, granted: Granted) -> Option<Grant> {
        let TaskEntry { definition: task, retries_left, .. } = self.tasks.get(&run.task)?;
        let (task, retries_left) = (task.clone(), Some(*retries_left));
        let claim = Arc::new(MemoryClaim { source: source.clone(), run: run.clone() });
        let terms = RunTerms { deadline: None, retries_left };
        Some(Grant {
            run: run.clone(),
            lease: granted,
            terms,
            queued_for: None,
            task: task.into(),
            payload_error: None,
            claim,
            results: None,
        })
    }

    pub(super) fn is_running(&self, run: &Run, worker: &Arc<str>) -> bool {
        self.run(run).is_some_and(|found| found.state == RunState::Running && found.worker.as_ref() == Some(worker))
    }

    /// Claims up to `max` pending runs for a worker.
    pub(super) fn claim_pending(&mut self, max: u8, source: &MemorySource, now: Instant) -> PollBatch {
        let lease = source.queue.0.config.lease;
        let mut batch = PollBatch::default();
        for queue in 0..PRIORITIES.len() {
            while batch.grants.len() + batch.messages.len() < usize::from(max) && !self.entries[queue].is_empty() {
                let entry = self.entries[queue].remove(0);
                let Some(run) = entry.run.clone() else {
                    batch.messages.push(entry.received(queue));
                    continue;
                };
                if self.run(&run).is_none_or(|found| found.state != RunState::Pending) {
                    continue;
                }
                self.set_lease(&run, &source.worker, lease, now);
                batch.grants.extend(self.grant(&run, source, Granted { sent_at: now, length: lease }));
            }
        }
        batch
    }

    /// Receives up to `max` messages of a queue.
    pub(super) fn receive(&mut self, queue: usize, max: u8, hidden: Duration, now: Instant) -> PollBatch {
        let mut batch = PollBatch::default();
        let serial = &mut self.serial;
        let visible = self.entries[queue].iter_mut().filter(|entry| entry.visible_at <= now);
        for entry in visible.take(usize::from(max)) {
            *serial += 1;
            entry.visible_at = now.plus(hidden);
            entry.dequeue_count = entry.dequeue_count.saturating_add(1);
            entry.receipt = format!("receipt+{serial}/=").into();
            batch.messages.push(entry.received(queue));
        }
        batch
    }
}

impl QueuedMessage {
    fn received(&self, queue: usize) -> Message {
        Message {
            queue: priority_queue(queue),
            id: Arc::clone(&self.id),
            receipt: Arc::clone(&self.receipt),
            dequeue_count: self.dequeue_count,
            run: self.run.clone().ok_or_else(|| "not about a run".to_owned()),
        }
    }
}

pub(super) fn priority_queue(queue: usize) -> PriorityQueue {
    PriorityQueue(u16::try_from(queue).unwrap_or(u16::MAX))
}
