//! Which workers were heard of, and what they claimed last. Kept in memory only: after a restart it fills up again.

use std::collections::{HashMap, VecDeque};

use super::super::clock::Millis;
use super::super::rules::Worker;
use crate::limits::{QUEUE_WORKER_TASKS_MAX, QUEUE_WORKERS_MAX};

/// What is known of a worker.
#[derive(Debug, Clone)]
pub(crate) struct Known {
    pub(crate) first: Millis,
    pub(crate) last: Millis,
    /// Task and run of its latest claims, the oldest first.
    pub(crate) recent: VecDeque<(String, u32)>,
}

/// The workers heard of.
#[derive(Debug, Default)]
pub(crate) struct Workers(HashMap<(String, Worker), Known>);

impl Workers {
    pub(crate) fn seen(&mut self, queue: &str, worker: &Worker, now: Millis) {
        self.entry(queue, worker, now).last = now;
    }

    pub(crate) fn claimed(&mut self, queue: &str, worker: &Worker, task: &str, run: u32, now: Millis) {
        let known = self.entry(queue, worker, now);
        known.last = now;
        if known.recent.len() >= QUEUE_WORKER_TASKS_MAX {
            known.recent.pop_front();
        }
        known.recent.push_back((task.to_owned(), run));
    }

    pub(crate) fn get(&self, queue: &str, worker: &Worker) -> Option<&Known> {
        self.0.get(&(queue.to_owned(), worker.clone()))
    }

    fn entry(&mut self, queue: &str, worker: &Worker, now: Millis) -> &mut Known {
        let key = (queue.to_owned(), worker.clone());
        if self.0.len() >= QUEUE_WORKERS_MAX && !self.0.contains_key(&key) {
            let oldest = self.0.iter().min_by_key(|(_, known)| known.last);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                self.0.remove(&oldest);
            }
        }
        self.0.entry(key).or_insert_with(|| Known { first: now, last: now, recent: VecDeque::new() })
    }
}
