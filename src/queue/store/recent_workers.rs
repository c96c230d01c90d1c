//! Which workers were heard of, and what they claimed last. Kept in memory only: after a restart it fills up again.

use std::collections::{HashMap, VecDeque};

use super::super::clock::UnixMillis;
use super::super::task_state::WorkerIdentity;
use crate::limits::{QUEUE_WORKER_TASKS_MAX, QUEUE_WORKERS_MAX};

/// What is known of a worker.
#[derive(Debug, Clone)]
pub(crate) struct WorkerHistory {
    pub(crate) first_seen: UnixMillis,
    pub(crate) last_seen: UnixMillis,
    /// Task and run of its latest claims, the oldest first.
    pub(crate) recent: VecDeque<(String, u32)>,
}

/// The workers heard of.
#[derive(Debug, Default)]
pub(crate) struct RecentWorkers(HashMap<(String, WorkerIdentity), WorkerHistory>);

impl RecentWorkers {
    pub(crate) fn record_seen(&mut self, queue: &str, worker: &WorkerIdentity, now: UnixMillis) {
        self.entry(queue, worker, now).last_seen = now;
    }

    pub(crate) fn record_claim(&mut self, queue: &str, worker: &WorkerIdentity, task: &str, run: u32, now: UnixMillis) {
        let known = self.entry(queue, worker, now);
        known.last_seen = now;
        if known.recent.len() >= QUEUE_WORKER_TASKS_MAX {
            known.recent.pop_front();
        }
        known.recent.push_back((task.to_owned(), run));
    }

    pub(crate) fn get(&self, queue: &str, worker: &WorkerIdentity) -> Option<&WorkerHistory> {
        self.0.get(&(queue.to_owned(), worker.clone()))
    }

    fn entry(&mut self, queue: &str, worker: &WorkerIdentity, now: UnixMillis) -> &mut WorkerHistory {
        let key = (queue.to_owned(), worker.clone());
        if self.0.len() >= QUEUE_WORKERS_MAX && !self.0.contains_key(&key) {
            let oldest = self.0.iter().min_by_key(|(_, known)| known.last_seen);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                self.0.remove(&oldest);
            }
        }
        self.0.entry(key).or_insert_with(|| WorkerHistory { first_seen: now, last_seen: now, recent: VecDeque::new() })
    }
}
