//! The tasks that were created and resolved in the last hour, by queue and minute. In memory: it begins anew with the process.

use std::collections::{HashMap, VecDeque};

use serde::Serialize;

use super::super::clock::UnixMillis;
use super::super::task_state::RunState;
use journeyman_domain::limits::{QUEUE_ACTIVITY_MINUTES, QUEUE_ACTIVITY_QUEUES_MAX};

const MINUTE_MILLIS: i64 = 60_000;

/// What happened to a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TaskEvent {
    Created,
    Resolved(RunState),
}

/// The tasks of one minute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Minute {
    /// The time at which it began.
    pub(crate) from: UnixMillis,
    pub(crate) created: u32,
    pub(crate) completed: u32,
    pub(crate) failed: u32,
    pub(crate) exceptions: u32,
}

/// Minutes in which nothing happened are left out.
#[derive(Debug, Default)]
pub(crate) struct Activity(HashMap<String, VecDeque<Minute>>);

impl Activity {
    pub(crate) fn count(&mut self, queue: &str, event: TaskEvent, now: UnixMillis) {
        let is_known = self.0.contains_key(queue);
        if !is_known && self.0.len() >= QUEUE_ACTIVITY_QUEUES_MAX {
            self.0.retain(|_, minutes| minutes.back().is_some_and(|last| !is_old(last, now)));
            if self.0.len() >= QUEUE_ACTIVITY_QUEUES_MAX {
                return;
            }
        }
        let minutes = self.0.entry(queue.to_owned()).or_default();
        let from = UnixMillis(now.0 - now.0.rem_euclid(MINUTE_MILLIS));
        if minutes.back().is_none_or(|last| last.from < from) {
            minutes.push_back(Minute { from, ..Minute::default() });
        }
        while minutes.front().is_some_and(|first| is_old(first, now)) {
            minutes.pop_front();
        }
        let Some(minute) = minutes.back_mut() else { return };
        match event {
            TaskEvent::Created => minute.created += 1,
            TaskEvent::Resolved(RunState::Completed) => minute.completed += 1,
            TaskEvent::Resolved(RunState::Failed) => minute.failed += 1,
            TaskEvent::Resolved(RunState::Exception | RunState::Pending | RunState::Running) => minute.exceptions += 1,
        }
    }

    /// The oldest minute first.
    pub(crate) fn of(&self, queue: &str, now: UnixMillis) -> Vec<Minute> {
        let minutes = self.0.get(queue).into_iter().flatten();
        minutes.filter(|minute| !is_old(minute, now)).copied().collect()
    }
}

fn is_old(minute: &Minute, now: UnixMillis) -> bool {
    now.0 - minute.from.0 >= QUEUE_ACTIVITY_MINUTES * MINUTE_MILLIS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_counted_by_queue_and_minute_for_an_hour() {
        let mut activity = Activity::default();
        let at = |minutes: i64, millis: i64| UnixMillis(minutes * MINUTE_MILLIS + millis);
        activity.count("a/b", TaskEvent::Created, at(100, 7));
        activity.count("a/b", TaskEvent::Resolved(RunState::Failed), at(100, 9));
        activity.count("a/b", TaskEvent::Resolved(RunState::Completed), at(130, 0));
        let first = Minute { from: at(100, 0), created: 1, failed: 1, ..Minute::default() };
        let second = Minute { from: at(130, 0), completed: 1, ..Minute::default() };
        assert_eq!(activity.of("a/b", at(159, 59_999)), [first, second]);
        assert_eq!(activity.of("a/b", at(160, 0)), [second]);
        assert_eq!(activity.of("a/c", at(130, 0)), []);
        activity.count("a/b", TaskEvent::Created, at(195, 0));
        assert_eq!(activity.of("a/b", at(195, 0)).len(), 1);
    }

    #[test]
    fn queues_beyond_the_limit_are_not_counted_until_others_are_quiet() {
        let mut activity = Activity::default();
        let hour = UnixMillis(QUEUE_ACTIVITY_MINUTES * MINUTE_MILLIS);
        for number in 0..=QUEUE_ACTIVITY_QUEUES_MAX {
            activity.count(&format!("a/{number}"), TaskEvent::Created, UnixMillis(0));
        }
        assert_eq!(activity.0.len(), QUEUE_ACTIVITY_QUEUES_MAX);
        activity.count("a/new", TaskEvent::Created, hour);
        assert_eq!((activity.0.len(), activity.of("a/new", hour).len()), (1, 1));
    }
}
