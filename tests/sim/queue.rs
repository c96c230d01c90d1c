//! The queue service as a worker can observe it, in both dialects at once, without any I/O. Times are milliseconds.

use std::collections::BTreeMap;

use journeyman_domain::id::{Run, TaskId};
use journeyman_domain::outcome::{ExceptionReason, Outcome};

pub const LANES: u16 = 3;
pub const VISIBILITY_MS: u64 = 300_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Pending,
    Running { host: usize, taken_until: u64 },
    Done { how: How, host: Option<usize> },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    Reported(Outcome),
    ClaimExpired,
    Canceled,
}

#[derive(Debug)]
pub struct Task {
    pub lane: u16,
    pub runs: Vec<State>,
    retries: u32,
}

#[derive(Debug, Clone)]
pub struct Entry {
    pub id: u64,
    pub lane: u16,
    pub run: Option<Run>,
    pub visible_at: u64,
    pub receipt: u64,
    pub dequeues: u32,
}

#[derive(Debug)]
pub struct Queue {
    pub lease_ms: u64,
    pub tasks: BTreeMap<TaskId, Task>,
    pub entries: BTreeMap<u64, Entry>,
    /// The time at which each run was claimed.
    pub claimed: BTreeMap<Run, u64>,
    next: u64,
}

/// What the service says: an answer, or "not yours, or not there" (404, 409).
pub type Said<T> = Result<T, ()>;

impl Queue {
    pub fn new(lease_ms: u64) -> Self {
        Self { lease_ms, tasks: BTreeMap::new(), entries: BTreeMap::new(), claimed: BTreeMap::new(), next: 0 }
    }

    pub fn create(&mut self, lane: u16, retries: u32, now: u64) -> TaskId {
        self.next += 1;
        let id = TaskId::parse(&format!("task-{}", self.next)).expect("a task id");
        self.tasks.insert(id.clone(), Task { lane, runs: Vec::new(), retries });
        self.add_run(&id, now);
        id
    }

    fn add_run(&mut self, id: &TaskId, now: u64) {
        let task = self.tasks.get_mut(id).expect("the task exists");
        let run = u32::try_from(task.runs.len()).expect("few runs");
        task.runs.push(State::Pending);
        let lane = task.lane;
        self.put(lane, Some(Run { task: id.clone(), run }), 0, now);
    }

    pub fn put(&mut self, lane: u16, run: Option<Run>, dequeues: u32, now: u64) {
        self.next += 1;
        let id = self.next;
        self.entries.insert(id, Entry { id, lane, run, visible_at: now, receipt: 0, dequeues });
    }

    pub fn state(&self, run: &Run) -> Option<State> {
        self.tasks.get(&run.task)?.runs.get(run.run as usize).copied()
    }

    pub fn unresolved(&self) -> usize {
        let open = |task: &&Task| !matches!(task.runs.last(), Some(State::Done { .. }));
        self.tasks.values().filter(open).count()
    }

    pub fn retries_left(&self, run: &Run) -> u32 {
        self.tasks[&run.task].retries
    }

    fn set(&mut self, run: &Run, state: State) {
        self.tasks.get_mut(&run.task).expect("the task exists").runs[run.run as usize] = state;
    }

    pub fn receive(&mut self, lane: u16, max: usize, now: u64) -> Vec<Entry> {
        let visible = self.entries.values_mut().filter(|entry| entry.lane == lane && entry.visible_at <= now);
        visible
            .take(max)
            .map(|entry| {
                self.next += 1;
                entry.receipt = self.next;
                entry.visible_at = now + VISIBILITY_MS;
                entry.dequeues += 1;
                entry.clone()
            })
            .collect()
    }

    /// `Ok(true)`: deleted or already gone. `Ok(false)`: the receipt is stale.
    pub fn delete(&mut self, id: u64, receipt: u64) -> bool {
        match self.entries.get(&id) {
            Some(entry) if entry.receipt != receipt => false,
            Some(_) | None => {
                self.entries.remove(&id);
                true
            }
        }
    }

    pub fn claim(&mut self, host: usize, run: &Run, now: u64) -> Said<u64> {
        let last = self.tasks.get(&run.task).map(|task| task.runs.len() - 1).ok_or(())?;
        if last != run.run as usize {
            return Err(());
        }
        match self.state(run).ok_or(())? {
            State::Pending => {
                self.claimed.insert(run.clone(), now);
                self.set(run, State::Running { host, taken_until: now + self.lease_ms });
                Ok(now + self.lease_ms)
            }
            State::Running { host: owner, taken_until } if owner == host => Ok(taken_until),
            State::Running { .. } | State::Done { .. } => Err(()),
        }
    }

    pub fn claim_work(&mut self, host: usize, max: usize, now: u64) -> Vec<Run> {
        let mut pending: Vec<(u16, Run)> = Vec::new();
        for (id, task) in &self.tasks {
            if task.runs.last() == Some(&State::Pending) {
                let run = u32::try_from(task.runs.len() - 1).expect("few runs");
                pending.push((task.lane, Run { task: id.clone(), run }));
            }
        }
        pending.sort();
        pending.truncate(max);
        let runs: Vec<Run> = pending.into_iter().map(|(_, run)| run).collect();
        for run in &runs {
            self.claimed.insert(run.clone(), now);
            self.set(run, State::Running { host, taken_until: now + self.lease_ms });
        }
        runs
    }

    pub fn claimed_by(&self, host: usize) -> Vec<Run> {
        let mut runs = Vec::new();
        for (id, task) in &self.tasks {
            for (index, state) in task.runs.iter().enumerate() {
                if matches!(state, State::Running { host: owner, .. } if *owner == host) {
                    runs.push(Run { task: id.clone(), run: u32::try_from(index).expect("few runs") });
                }
            }
        }
        runs
    }

    pub fn reclaim(&mut self, host: usize, run: &Run, now: u64) -> Said<u64> {
        match self.state(run).ok_or(())? {
            State::Running { host: owner, taken_until } if owner == host => {
                let taken_until = taken_until.max(now + self.lease_ms);
                self.set(run, State::Running { host, taken_until });
                Ok(taken_until)
            }
            State::Pending | State::Running { .. } | State::Done { .. } => Err(()),
        }
    }

    /// I9: a run that is resolved stays resolved, whatever is reported.
    pub fn report(&mut self, host: usize, run: &Run, outcome: Outcome, now: u64) -> Said<()> {
        match self.state(run).ok_or(())? {
            State::Running { host: owner, .. } if owner == host => {
                self.resolve(run, How::Reported(outcome), Some(host), now);
                Ok(())
            }
            State::Done { how: How::Reported(same), host: Some(owner) } if same == outcome && owner == host => Ok(()),
            State::Pending | State::Running { .. } | State::Done { .. } => Err(()),
        }
    }

    fn resolve(&mut self, run: &Run, how: How, host: Option<usize>, now: u64) {
        self.set(run, State::Done { how, host });
        let retried = match how {
            How::Reported(Outcome::Exception(ExceptionReason::WorkerShutdown | ExceptionReason::IntermittentTask))
            | How::ClaimExpired => true,
            How::Reported(_) | How::Canceled => false,
        };
        let task = self.tasks.get_mut(&run.task).expect("the task exists");
        if retried && task.retries > 0 {
            task.retries -= 1;
            self.add_run(&run.task, now);
        }
    }

    pub fn expire(&mut self, run: &Run, now: u64) {
        if let Some(State::Running { taken_until, .. }) = self.state(run)
            && taken_until <= now
        {
            self.resolve(run, How::ClaimExpired, None, now);
        }
    }

    /// The session of a host is over, and with it all its claims.
    pub fn end_session(&mut self, host: usize, now: u64) {
        for run in self.claimed_by(host) {
            self.resolve(&run, How::ClaimExpired, None, now);
        }
    }

    pub fn cancel(&mut self, task: &TaskId, now: u64) {
        let last = self.tasks[task].runs.len() - 1;
        let run = Run { task: task.clone(), run: u32::try_from(last).expect("few runs") };
        if !matches!(self.state(&run), Some(State::Done { .. })) {
            self.resolve(&run, How::Canceled, None, now);
        }
    }
}
