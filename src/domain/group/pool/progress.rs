//! Where a group stands, for people who ask why nothing happens.

use core::fmt;

use super::{BindingState, Generation, GroupPhase, Instant, Key, Pool, QueueStep};

/// A group at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupProgress {
    /// What is wanted of it; `None` where it is to go.
    pub phase: Option<GroupPhase>,
    /// When the next phase comes, if nothing more is heard of it.
    pub until: Option<Instant>,
    /// The change that led to what is wanted.
    pub generation: Generation,
    /// Whether that has been carried out.
    pub settled: bool,
    /// What its queue waits for.
    pub wait: Option<QueueWait>,
}

/// What the queue of a group waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueWait {
    /// The broker.
    Broker,
    /// The answer to a step.
    StepRunning(QueueStep),
    /// The time of the next step.
    NextStep {
        /// Which.
        step: QueueStep,
        /// Then.
        at: Instant,
        /// How often in a row it has failed.
        failures: u32,
    },
    /// The end of so many workers.
    WorkersExiting(u32),
}

impl QueueWait {
    /// Until when, where that is known.
    #[must_use]
    pub const fn until(&self) -> Option<Instant> {
        match self {
            Self::NextStep { at, .. } => Some(*at),
            Self::Broker | Self::StepRunning(_) | Self::WorkersExiting(_) => None,
        }
    }
}

impl fmt::Display for QueueWait {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Broker => out.write_str("its queue waits for the broker"),
            Self::StepRunning(step) => write!(out, "the broker is asked to {}", step_text(*step)),
            Self::NextStep { step, failures: 0, .. } => write!(out, "the next step is to {}", step_text(*step)),
            Self::NextStep { step, failures: 1, .. } => {
                write!(out, "to {} failed, and is tried again", step_text(*step))
            }
            Self::NextStep { step, failures, .. } => {
                write!(out, "to {} failed {failures} times, and is tried again", step_text(*step))
            }
            Self::WorkersExiting(1) => out.write_str("its queue goes when its last worker has ended"),
            Self::WorkersExiting(count) => write!(out, "its queue goes when its {count} workers have ended"),
        }
    }
}

const fn step_text(step: QueueStep) -> &'static str {
    match step {
        QueueStep::Bind => "make its queue",
        QueueStep::Unbind => "unbind its queue",
        QueueStep::Inspect => "look whether its queue is empty",
        QueueStep::Delete => "delete its queue",
    }
}

impl Pool {
    /// Where a group stands; `None` where there is none of this key.
    #[must_use]
    pub fn progress(&self, key: &Key) -> Option<GroupProgress> {
        let queue = self.queues.get(key)?;
        let wanted = self.tracker.desired(key);
        let going = wanted.is_none() && matches!(queue.binding, BindingState::Unbound { .. });
        let wait = if queue.is_settled() {
            None
        } else if self.epoch.is_none() {
            Some(QueueWait::Broker)
        } else if let Some(step) = queue.in_flight {
            Some(QueueWait::StepRunning(step))
        } else if let Some((step, at)) = queue.next_step(self.policy.stop_delay) {
            Some(QueueWait::NextStep { step, at, failures: queue.backoff.tries() })
        } else {
            (going && queue.workers > 0).then_some(QueueWait::WorkersExiting(queue.workers))
        };
        Some(GroupProgress {
            phase: wanted.map(|wanted| wanted.phase),
            until: wanted.map(|wanted| wanted.until),
            generation: queue.generation,
            settled: queue.is_settled(),
            wait,
        })
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString as _;
    use core::time::Duration;

    use super::super::{Epoch, Event, StepResult, tracker};
    use super::*;

    const POLICY: tracker::TrackerPolicy =
        tracker::TrackerPolicy { unbind_delay: Duration::from_secs(10), stop_delay: Duration::from_secs(5) };

    fn at(seconds: u64) -> Instant {
        Instant::at(Duration::from_secs(seconds))
    }

    #[test]
    fn a_group_says_at_each_turn_what_it_is_and_what_its_queue_waits_for() {
        let (key, epoch) = (Key::new("a").unwrap(), Epoch(1));
        let mut pool = Pool::new(POLICY, 1, at(0));
        let answered = |step, answer| Event::StepFinished { epoch, key: key.clone(), step, result: answer };
        let stands = |pool: &Pool| {
            let standing = pool.progress(&key).unwrap();
            (standing.phase, standing.settled, standing.wait.map(|wait| wait.to_string()).unwrap_or_default())
        };
        assert_eq!(pool.progress(&key), None);
        pool.handle(Event::Demand { key: key.clone(), extra: Duration::ZERO }, at(0));
        assert_eq!(stands(&pool), (Some(GroupPhase::Active), false, "its queue waits for the broker".into()));
        pool.handle(Event::Connected(epoch), at(0));
        assert_eq!(stands(&pool).2, "the broker is asked to make its queue");
        pool.handle(answered(QueueStep::Bind, StepResult::Failed), at(0));
        assert_eq!(stands(&pool).2, "to make its queue failed, and is tried again");
        let again = pool.progress(&key).unwrap().wait.unwrap().until().unwrap();
        pool.handle(Event::Tick, again);
        pool.handle(answered(QueueStep::Bind, StepResult::Done), again);
        assert_eq!(stands(&pool), (Some(GroupPhase::Active), true, String::new()));
        assert_eq!(pool.progress(&key).unwrap().until, Some(at(10)));
        pool.handle(Event::Workers { key: key.clone(), count: 2 }, at(5));
        pool.handle(Event::Tick, at(10));
        pool.handle(answered(QueueStep::Unbind, StepResult::Done), at(10));
        assert_eq!(stands(&pool), (Some(GroupPhase::Unbound), true, String::new()));
        pool.handle(Event::Tick, at(15));
        assert_eq!(stands(&pool), (None, false, "its queue goes when its 2 workers have ended".into()));
        pool.handle(Event::Workers { key: key.clone(), count: 0 }, at(15));
        assert_eq!(stands(&pool).2, "the broker is asked to look whether its queue is empty");
        pool.handle(answered(QueueStep::Inspect, StepResult::Contents { ready: 0, consumers: 1 }), at(15));
        assert_eq!(stands(&pool).2, "the next step is to look whether its queue is empty");
    }
}
