//! What the queue of a group waits for, for the status.

use core::fmt;

use super::{BindingState, Key, Pool, QueueStep};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueWait {
    Broker,
    Step { step: QueueStep, failures: u32 },
    WorkersExiting,
}

impl fmt::Display for QueueWait {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Broker => out.write_str("waiting for the broker"),
            Self::Step { step, failures: 0 } => write!(out, "{} the queue", step_text(*step)),
            Self::Step { step, failures } => {
                write!(out, "{} the queue failed, retrying (failures: {failures})", step_text(*step))
            }
            Self::WorkersExiting => out.write_str("the queue is deleted after its workers exit"),
        }
    }
}

const fn step_text(step: QueueStep) -> &'static str {
    match step {
        QueueStep::Bind => "declaring",
        QueueStep::Unbind => "unbinding",
        QueueStep::Inspect => "inspecting",
        QueueStep::Delete => "deleting",
    }
}

impl Pool {
    /// `None` if the queue is as the phase of its group requires.
    pub fn wait_of(&self, key: &Key) -> Option<QueueWait> {
        let queue = self.queues.get(key)?;
        let next = || queue.next_step(self.policy.stop_delay).map(|(step, _)| step);
        match queue.in_flight.or_else(next) {
            Some(_) if !self.is_connected => Some(QueueWait::Broker),
            Some(step) => Some(QueueWait::Step { step, failures: queue.backoff.tries() }),
            None if queue.target.is_none() && queue.binding != BindingState::Absent => Some(QueueWait::WorkersExiting),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString as _;
    use core::time::Duration;

    use super::super::tests::{POLICY, at};
    use super::super::{Event, GroupPhase, StepResult};
    use super::*;

    #[test]
    fn the_wait_shows_what_the_queue_of_a_group_lacks() {
        let key = Key::new("a").unwrap();
        let mut pool = Pool::new(POLICY, 1);
        let answered = |step, answer| Event::StepFinished { key: key.clone(), step, result: answer };
        let stands = |pool: &Pool| {
            let phase = pool.tracker().desired(&key).map(|desired| desired.phase);
            (phase, pool.wait_of(&key).map(|wait| wait.to_string()).unwrap_or_default())
        };
        assert_eq!(stands(&pool), (None, String::new()));
        pool.handle(Event::Demand { key: key.clone(), extra: Duration::ZERO }, at(0));
        assert_eq!(stands(&pool), (Some(GroupPhase::Active), "waiting for the broker".into()));
        pool.handle(Event::Connected, at(0));
        assert_eq!(stands(&pool).1, "declaring the queue");
        pool.handle(answered(QueueStep::Bind, StepResult::Failed), at(0));
        assert_eq!(stands(&pool).1, "declaring the queue failed, retrying (failures: 1)");
        let again = pool.next_deadline().unwrap();
        pool.handle(Event::Tick, again);
        pool.handle(answered(QueueStep::Bind, StepResult::Done), again);
        assert_eq!(stands(&pool), (Some(GroupPhase::Active), String::new()));
        pool.handle(Event::Workers { key: key.clone(), count: 2 }, at(5));
        pool.handle(Event::Tick, at(10));
        pool.handle(answered(QueueStep::Unbind, StepResult::Done), at(10));
        assert_eq!(stands(&pool), (Some(GroupPhase::Unbound), String::new()));
        pool.handle(Event::Tick, at(15));
        assert_eq!(stands(&pool), (None, "the queue is deleted after its workers exit".into()));
        pool.handle(Event::Workers { key: key.clone(), count: 0 }, at(15));
        assert_eq!(stands(&pool).1, "inspecting the queue");
        pool.handle(answered(QueueStep::Inspect, StepResult::Contents { ready: 0, consumers: 1 }), at(15));
        assert_eq!(stands(&pool).1, "inspecting the queue");
    }
}
