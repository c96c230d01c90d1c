//! When each part of a claim's life began and ended.

use crate::domain::id::Token;
use crate::domain::time::Instant;
use crate::domain::worker::Effect;

/// A part of a claim's life. Upload and report may overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// It is asked for.
    Claim,
    /// Its payload is prepared.
    Prepare,
    /// Its payload runs.
    Run,
    /// Its payload was told to end, and has not.
    End,
    /// Artifacts and log are stored.
    Upload,
    /// Its outcome is reported, as often as it takes.
    Report,
}

impl Phase {
    /// Its name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Prepare => "prepare",
            Self::Run => "run",
            Self::End => "end",
            Self::Upload => "upload",
            Self::Report => "report",
        }
    }
}

/// From when to when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lap {
    /// What.
    pub phase: Phase,
    /// When it began.
    pub began: Instant,
    /// When it ended, if it has.
    pub ended: Option<Instant>,
}

/// A part of a claim's life that begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Begun {
    pub(super) claim: Token,
    pub(super) phase: Phase,
}

/// What begins with an effect.
pub(super) const fn begins(effect: &Effect) -> Option<Begun> {
    let (claim, phase) = match effect {
        Effect::Claim(claim) | Effect::TakeOver(claim) => (*claim, Phase::Claim),
        Effect::Prepare(claim) => (*claim, Phase::Prepare),
        Effect::Execute(claim) => (*claim, Phase::Run),
        Effect::Kill { claim, .. } => (*claim, Phase::End),
        Effect::Settle(claim) => (*claim, Phase::Upload),
        Effect::Report { claim, .. } => (*claim, Phase::Report),
        Effect::Open(_)
        | Effect::Poll { .. }
        | Effect::Recover { .. }
        | Effect::Delete(_)
        | Effect::Forget(_)
        | Effect::Reclaim { .. }
        | Effect::Check(_)
        | Effect::Extended { .. }
        | Effect::Close { .. }
        | Effect::Look
        | Effect::Alert(_)
        | Effect::Exit(_) => return None,
    };
    Some(Begun { claim, phase })
}

/// What a claim has gone through. Each phase is in it once, so that its length is bounded.
#[derive(Debug, Clone, Default)]
pub struct Timeline(Vec<Lap>);

impl Timeline {
    /// A phase begins; one that has begun before goes on.
    pub fn begin(&mut self, phase: Phase, now: Instant) {
        match self.0.iter_mut().find(|lap| lap.phase == phase) {
            Some(lap) => lap.ended = None,
            None => self.0.push(Lap { phase, began: now, ended: None }),
        }
    }

    /// Phases end, where they have begun.
    pub fn end(&mut self, phases: &[Phase], now: Instant) {
        for lap in self.0.iter_mut().filter(|lap| phases.contains(&lap.phase)) {
            lap.ended.get_or_insert(now);
        }
    }

    /// In the order in which they began.
    #[must_use]
    pub fn laps(&self) -> &[Lap] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_is_there_once_and_has_the_times_of_its_first_begin_and_its_last_end() {
        let at = |secs| Instant::at(std::time::Duration::from_secs(secs));
        let mut timeline = Timeline::default();
        timeline.end(&[Phase::Run], at(1));
        timeline.begin(Phase::Report, at(2));
        timeline.end(&[Phase::Report, Phase::Run], at(3));
        timeline.end(&[Phase::Report], at(4));
        let lap = Lap { phase: Phase::Report, began: at(2), ended: Some(at(3)) };
        assert_eq!(timeline.laps(), [lap]);
        timeline.begin(Phase::Report, at(5));
        assert_eq!(timeline.laps(), [Lap { ended: None, ..lap }]);
    }
}
