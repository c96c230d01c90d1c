//! The times at which each phase of a claim began and ended.

use journeyman_domain::claim::{ClaimAction, ClaimEvent};
use journeyman_domain::named_enum;
use journeyman_domain::time::Instant;

named_enum! {
    /// A phase of a claim. Upload and report may overlap.
    pub enum ClaimPhase {
        /// Being requested.
        Claim = "claim",
        /// The payload is being prepared.
        Prepare = "prepare",
        /// The payload runs.
        Run = "run",
        /// The payload is being stopped.
        End = "end",
        /// Artifacts and log are being uploaded.
        Upload = "upload",
        /// The outcome is being reported.
        Report = "report",
    }
}

/// The times of one phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PhaseTiming {
    /// The phase.
    pub phase: ClaimPhase,
    /// The time at which it began.
    pub started_at: Instant,
    /// The time at which it ended; `None` while it lasts.
    pub ended_at: Option<Instant>,
}

/// The phases of a claim, each at most once.
#[derive(Debug, Clone, Default)]
pub struct Timeline(Vec<PhaseTiming>);

impl Timeline {
    pub(super) fn on_action(&mut self, action: &ClaimAction, now: Instant) {
        let phase = match action {
            ClaimAction::Request | ClaimAction::TakeOver => ClaimPhase::Claim,
            ClaimAction::Prepare => ClaimPhase::Prepare,
            ClaimAction::Execute | ClaimAction::Start => ClaimPhase::Run,
            ClaimAction::Kill { .. } => ClaimPhase::End,
            ClaimAction::Upload => ClaimPhase::Upload,
            ClaimAction::Report { .. } => ClaimPhase::Report,
            ClaimAction::Reclaim { .. }
            | ClaimAction::CheckStatus
            | ClaimAction::UpdateLease(_)
            | ClaimAction::Close(_) => return,
        };
        self.start(phase, now);
    }

    pub(super) fn on_event(&mut self, event: &ClaimEvent, now: Instant) {
        let phases: &[ClaimPhase] = match event {
            ClaimEvent::Claimed(_) => &[ClaimPhase::Claim],
            ClaimEvent::Prepared(Ok(())) => &[ClaimPhase::Prepare],
            ClaimEvent::Prepared(Err(_)) => &[ClaimPhase::Prepare, ClaimPhase::Run],
            ClaimEvent::Ended(_) => &[ClaimPhase::Prepare, ClaimPhase::Run, ClaimPhase::End],
            ClaimEvent::Uploaded(_) => &[ClaimPhase::Upload],
            ClaimEvent::Reported(_) => &[ClaimPhase::Report],
            ClaimEvent::Terms(_)
            | ClaimEvent::Reclaimed(_)
            | ClaimEvent::StatusChecked(_)
            | ClaimEvent::Lost
            | ClaimEvent::Release { .. }
            | ClaimEvent::Command(_)
            | ClaimEvent::PollStarted
            | ClaimEvent::PollEnded
            | ClaimEvent::Tick => return,
        };
        self.end(phases, now);
    }

    /// A phase begins; one that began before continues.
    pub fn start(&mut self, phase: ClaimPhase, now: Instant) {
        match self.0.iter_mut().find(|lap| lap.phase == phase) {
            Some(lap) => lap.ended_at = None,
            None => self.0.push(PhaseTiming { phase, started_at: now, ended_at: None }),
        }
    }

    /// Phases end that have begun.
    pub fn end(&mut self, phases: &[ClaimPhase], now: Instant) {
        for lap in self.0.iter_mut().filter(|lap| phases.contains(&lap.phase)) {
            lap.ended_at.get_or_insert(now);
        }
    }

    /// The phases in the order in which they began.
    pub fn phases(&self) -> &[PhaseTiming] {
        &self.0
    }
}

pub(super) fn seconds_between(from: Instant, to: Instant) -> f64 {
    (to.since(from).as_secs_f64() * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_occurs_once_with_its_first_start_and_last_end() {
        let at = |secs| Instant::at(std::time::Duration::from_secs(secs));
        let mut timeline = Timeline::default();
        timeline.end(&[ClaimPhase::Run], at(1));
        timeline.start(ClaimPhase::Report, at(2));
        timeline.end(&[ClaimPhase::Report, ClaimPhase::Run], at(3));
        timeline.end(&[ClaimPhase::Report], at(4));
        let lap = PhaseTiming { phase: ClaimPhase::Report, started_at: at(2), ended_at: Some(at(3)) };
        assert_eq!(timeline.phases(), [lap]);
        timeline.start(ClaimPhase::Report, at(5));
        assert_eq!(timeline.phases(), [PhaseTiming { ended_at: None, ..lap }]);
    }
}
