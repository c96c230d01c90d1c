//! Where a group stands, for people who ask why nothing happens.

use core::fmt;

use super::{Generation, Instant, Key, Known, Phase, Pool, Step};

/// A group at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// What is wanted of it; `None` where it is to go.
    pub phase: Option<Phase>,
    /// When the next phase comes, if nothing more is heard of it.
    pub until: Option<Instant>,
    /// The change that led to what is wanted.
    pub generation: Generation,
    /// Whether that has been carried out.
    pub settled: bool,
    /// What its queue waits for.
    pub wait: Option<Wait>,
}

/// What the queue of a group waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// The broker.
    Broker,
    /// The answer to a step.
    Answer(Step),
    /// The time of the next step.
    Time {
        /// Which.
        step: Step,
        /// Then.
        at: Instant,
        /// How often in a row it has failed.
        failures: u32,
    },
    /// The end of so many workers.
    Workers(u32),
}

impl Wait {
    /// Until when, where that is known.
    #[must_use]
    pub const fn until(&self) -> Option<Instant> {
        match self {
            Self::Time { at, .. } => Some(*at),
            Self::Broker | Self::Answer(_) | Self::Workers(_) => None,
        }
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Broker => out.write_str("its queue waits for the broker"),
            Self::Answer(step) => write!(out, "the broker is asked to {}", words(*step)),
            Self::Time { step, failures: 0, .. } => write!(out, "the next step is to {}", words(*step)),
            Self::Time { step, failures: 1, .. } => write!(out, "to {} failed, and is tried again", words(*step)),
            Self::Time { step, failures, .. } => {
                write!(out, "to {} failed {failures} times, and is tried again", words(*step))
            }
            Self::Workers(1) => out.write_str("its queue goes when its last worker has ended"),
            Self::Workers(count) => write!(out, "its queue goes when its {count} workers have ended"),
        }
    }
}

const fn words(step: Step) -> &'static str {
    match step {
        Step::Bind => "make its queue",
        Step::Unbind => "unbind its queue",
        Step::Look => "look whether its queue is empty",
        Step::Delete => "delete its queue",
    }
}

impl Pool {
    /// Where a group stands; `None` where there is none of this key.
    #[must_use]
    pub fn standing(&self, key: &Key) -> Option<Standing> {
        let queue = self.queues.get(key)?;
        let wanted = self.tracker.wanted(key);
        let going = wanted.is_none() && matches!(queue.known, Known::Unbound { .. });
        let wait = if queue.is_settled() {
            None
        } else if self.epoch.is_none() {
            Some(Wait::Broker)
        } else if let Some(step) = queue.under_way {
            Some(Wait::Answer(step))
        } else if let Some((step, at)) = queue.step(self.policy.stop_delay) {
            Some(Wait::Time { step, at, failures: queue.row.tries() })
        } else {
            (going && queue.workers > 0).then_some(Wait::Workers(queue.workers))
        };
        Some(Standing {
            phase: wanted.map(|wanted| wanted.phase),
            until: wanted.map(|wanted| wanted.until),
            generation: queue.since,
            settled: queue.is_settled(),
            wait,
        })
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString as _;
    use core::time::Duration;

    use super::super::{Answer, Epoch, Event, tracker};
    use super::*;

    const POLICY: tracker::Policy =
        tracker::Policy { unbind_delay: Duration::from_secs(10), stop_delay: Duration::from_secs(5) };

    fn at(seconds: u64) -> Instant {
        Instant::at(Duration::from_secs(seconds))
    }

    #[test]
    fn a_group_says_at_each_turn_what_it_is_and_what_its_queue_waits_for() {
        let (key, epoch) = (Key::new("a").unwrap(), Epoch(1));
        let mut pool = Pool::new(POLICY, 1, at(0));
        let answered = |step, answer| Event::Answered { epoch, key: key.clone(), step, answer };
        let stands = |pool: &Pool| {
            let standing = pool.standing(&key).unwrap();
            (standing.phase, standing.settled, standing.wait.map(|wait| wait.to_string()).unwrap_or_default())
        };
        assert_eq!(pool.standing(&key), None);
        pool.handle(Event::Demand { key: key.clone(), extra: Duration::ZERO }, at(0));
        assert_eq!(stands(&pool), (Some(Phase::Active), false, "its queue waits for the broker".into()));
        pool.handle(Event::Connected(epoch), at(0));
        assert_eq!(stands(&pool).2, "the broker is asked to make its queue");
        pool.handle(answered(Step::Bind, Answer::Failed), at(0));
        assert_eq!(stands(&pool).2, "to make its queue failed, and is tried again");
        let again = pool.standing(&key).unwrap().wait.unwrap().until().unwrap();
        pool.handle(Event::Tick, again);
        pool.handle(answered(Step::Bind, Answer::Done), again);
        assert_eq!(stands(&pool), (Some(Phase::Active), true, String::new()));
        assert_eq!(pool.standing(&key).unwrap().until, Some(at(10)));
        pool.handle(Event::Workers { key: key.clone(), count: 2 }, at(5));
        pool.handle(Event::Tick, at(10));
        pool.handle(answered(Step::Unbind, Answer::Done), at(10));
        assert_eq!(stands(&pool), (Some(Phase::Unbound), true, String::new()));
        pool.handle(Event::Tick, at(15));
        assert_eq!(stands(&pool), (None, false, "its queue goes when its 2 workers have ended".into()));
        pool.handle(Event::Workers { key: key.clone(), count: 0 }, at(15));
        assert_eq!(stands(&pool).2, "the broker is asked to look whether its queue is empty");
        pool.handle(answered(Step::Look, Answer::Holds { ready: 0, consumers: 1 }), at(15));
        assert_eq!(stands(&pool).2, "the next step is to look whether its queue is empty");
    }
}
