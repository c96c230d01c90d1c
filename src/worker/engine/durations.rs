//! How long the phases of ended claims took, as histograms.

use std::time::Duration;

use journeyman_domain::claim::ClaimEnd;
use journeyman_domain::named_enum;
use journeyman_domain::outcome::Outcome;
use journeyman_domain::time::Instant;
use journeyman_platform::histogram::Histogram;

use super::timeline::{ClaimPhase, Timeline};

/// The upper bounds of the buckets; one without a bound follows.
pub const BOUNDS_SECONDS: [f64; 7] = [0.01, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0];

named_enum! {
    /// A time that a task takes.
    pub enum TaskPhase {
        /// The time from scheduled to claimed, by the queue's clock.
        Queue = "queue",
        /// The time from the claim to the start of the payload.
        Start = "start",
        /// The payload.
        Run = "run",
        /// Storing artifacts and log.
        Store = "store",
        /// Reporting the outcome.
        Report = "report",
    }
}

named_enum! {
    /// How the claim ended, in few words.
    pub enum EndKind {
        Completed = "completed",
        Failed = "failed",
        Exception = "exception",
        /// Not reported, or the report was not accepted.
        Lost = "lost",
    }
}

/// The durations of one phase.
pub type Durations = Histogram<{ BOUNDS_SECONDS.len() + 1 }>;

impl EndKind {
    /// `None` if the task goes on, or was not claimed.
    pub(super) const fn of(end: ClaimEnd) -> Option<Self> {
        Some(match end {
            ClaimEnd::Reported(Outcome::Completed) => Self::Completed,
            ClaimEnd::Reported(Outcome::Failed) => Self::Failed,
            ClaimEnd::Reported(Outcome::Exception(_)) => Self::Exception,
            ClaimEnd::Reported(Outcome::Deferred) | ClaimEnd::NotGranted => return None,
            ClaimEnd::AlreadyResolved(_)
            | ClaimEnd::ReportRejected(_)
            | ClaimEnd::Unconfirmed { .. }
            | ClaimEnd::Lost(_) => Self::Lost,
        })
    }
}

/// The histograms of one source.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TaskDurations([[Durations; EndKind::ALL.len()]; TaskPhase::ALL.len()]);

impl TaskDurations {
    pub const fn of(&self, phase: TaskPhase, end: EndKind) -> &Durations {
        &self.0[phase as usize][end as usize]
    }

    /// Counts a claim that was granted at `granted_at` and ends `now`.
    pub(super) fn observe(
        &mut self,
        timeline: &Timeline,
        queued_for: Option<Duration>,
        granted_at: Instant,
        end: ClaimEnd,
        now: Instant,
    ) {
        let Some(kind) = EndKind::of(end) else { return };
        let mut observe =
            |phase: TaskPhase, duration| self.0[phase as usize][kind as usize].observe(&BOUNDS_SECONDS, duration);
        if let Some(queued_for) = queued_for {
            observe(TaskPhase::Queue, queued_for);
        }
        for timing in timeline.phases() {
            let took = timing.ended_at.unwrap_or(now).since(timing.started_at);
            match timing.phase {
                ClaimPhase::Run => {
                    observe(TaskPhase::Start, timing.started_at.since(granted_at));
                    observe(TaskPhase::Run, took);
                }
                ClaimPhase::Upload => observe(TaskPhase::Store, took),
                ClaimPhase::Report => observe(TaskPhase::Report, took),
                ClaimPhase::Claim | ClaimPhase::Prepare | ClaimPhase::End => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4_the_phases_of_a_claim_are_counted_by_its_outcome() {
        let at = |secs| Instant::at(Duration::from_secs(secs));
        let mut timeline = Timeline::default();
        timeline.start(ClaimPhase::Run, at(12));
        timeline.end(&[ClaimPhase::Run], at(42));
        timeline.start(ClaimPhase::Report, at(42));
        let mut durations = TaskDurations::default();
        let end = ClaimEnd::Reported(Outcome::Failed);
        durations.observe(&timeline, Some(Duration::from_secs(9000)), at(11), end, at(42));
        let of = |phase| durations.of(phase, EndKind::Failed);
        assert_eq!(of(TaskPhase::Queue).buckets, [0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(of(TaskPhase::Start).buckets, [0, 0, 1, 0, 0, 0, 0, 0]);
        assert_eq!(*of(TaskPhase::Run), Histogram { buckets: [0, 0, 0, 0, 1, 0, 0, 0], sum_seconds: 30.0 });
        assert_eq!(*of(TaskPhase::Report), Histogram { buckets: [1, 0, 0, 0, 0, 0, 0, 0], sum_seconds: 0.0 });
        assert_eq!(*of(TaskPhase::Store), Histogram::default());
        assert_eq!(*durations.of(TaskPhase::Run, EndKind::Completed), Histogram::default());
    }
}
