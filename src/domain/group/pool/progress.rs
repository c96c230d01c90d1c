//! The progress of a group, for the status.

use core::fmt;

use super::{GroupPhase, Instant, Key, Pool, QueueStep};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupProgress {
    /// `None` where it is to be removed.
    pub phase: Option<GroupPhase>,
    /// When the next phase follows without further demand.
    pub until: Option<Instant>,
    /// Whether the queue is as the phase requires.
    pub is_settled: bool,
    pub wait: Option<QueueWait>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueWait {
    Broker,
    StepRunning(QueueStep),
    NextStep { step: QueueStep, at: Instant, failures: u32 },
    WorkersExiting,
}

impl QueueWait {
    /// The time it ends, where known.
    pub const fn until(&self) -> Option<Instant> {
        match self {
            Self::NextStep { at, .. } => Some(*at),
            Self::Broker | Self::StepRunning(_) | Self::WorkersExiting => None,
        }
    }
}

impl fmt::Display for QueueWait {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Broker => out.write_str("waiting for the broker"),
            Self::StepRunning(step) => write!(out, "{} the queue", step_text(*step)),
            Self::NextStep { step, failures: 0, .. } => write!(out, "next step: {} the queue", step_text(*step)),
            Self::NextStep { step, failures, .. } => {
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
    /// `None` where there is no group of this key.
    pub fn progress(&self, key: &Key) -> Option<GroupProgress> {
        let queue = self.queues.get(key)?;
        let wanted = self.tracker.desired(key);
        let wait = if queue.is_settled() {
            None
        } else if !self.is_connected {
            Some(QueueWait::Broker)
        } else if let Some(step) = queue.in_flight {
            Some(QueueWait::StepRunning(step))
        } else if let Some((step, at)) = queue.next_step(self.policy.stop_delay) {
            Some(QueueWait::NextStep { step, at, failures: queue.backoff.tries() })
        } else {
            Some(QueueWait::WorkersExiting)
        };
        Some(GroupProgress {
            phase: wanted.map(|wanted| wanted.phase),
            until: wanted.map(|wanted| wanted.until),
            is_settled: queue.is_settled(),
            wait,
        })
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString as _;
    use core::time::Duration;

    use super::super::{Event, StepResult, tracker};
    use super::*;

    const POLICY: tracker::TrackerPolicy =
        tracker::TrackerPolicy { unbind_delay: Duration::from_secs(10), stop_delay: Duration::from_secs(5) };

    fn at(seconds: u64) -> Instant {
        Instant::at(Duration::from_secs(seconds))
    }

    #[test]
    fn progress_shows_the_phase_of_a_group_and_what_its_queue_waits_for() {
        let key = Key::new("a").unwrap();
        let mut pool = Pool::new(POLICY, 1);
        let answered = |step, answer| Event::StepFinished { key: key.clone(), step, result: answer };
        let stands = |pool: &Pool| {
            let standing = pool.progress(&key).unwrap();
            (standing.phase, standing.is_settled, standing.wait.map(|wait| wait.to_string()).unwrap_or_default())
        };
        assert_eq!(pool.progress(&key), None);
        pool.handle(Event::Demand { key: key.clone(), extra: Duration::ZERO }, at(0));
        assert_eq!(stands(&pool), (Some(GroupPhase::Active), false, "waiting for the broker".into()));
        pool.handle(Event::Connected, at(0));
        assert_eq!(stands(&pool).2, "declaring the queue");
        pool.handle(answered(QueueStep::Bind, StepResult::Failed), at(0));
        assert_eq!(stands(&pool).2, "declaring the queue failed, retrying (failures: 1)");
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
        assert_eq!(stands(&pool), (None, false, "the queue is deleted after its workers exit".into()));
        pool.handle(Event::Workers { key: key.clone(), count: 0 }, at(15));
        assert_eq!(stands(&pool).2, "inspecting the queue");
        pool.handle(answered(QueueStep::Inspect, StepResult::Contents { ready: 0, consumers: 1 }), at(15));
        assert_eq!(stands(&pool).2, "next step: inspecting the queue");
    }
}
