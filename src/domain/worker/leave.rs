//! The way out: drain, hand back, exit.

use alloc::vec::Vec;

use super::{Effect, Exit, Mode, Worker};
use crate::domain::claim::Happening;
use crate::domain::id::{SourceId, Token};
use crate::domain::time::Instant;

impl Worker {
    pub(super) fn drain(&mut self, exit: Exit, now: Instant) {
        if self.mode == Mode::Running {
            self.mode = Mode::Draining { since: now };
            self.exit = exit;
            // I22: what is not granted yet is handed back when it is, and not asked for again.
            let asked: Vec<Token> =
                self.held.iter().filter(|(_, held)| !held.machine.granted()).map(|(claim, _)| *claim).collect();
            for claim in asked {
                self.tell(claim, Happening::HandBack { deadline: None }, now);
            }
        }
    }

    pub(super) fn hand_back(&mut self, deadline: Option<Instant>, now: Instant) {
        if self.mode == Mode::Running || matches!(self.exit, Exit::Drained | Exit::Idle | Exit::Limit) {
            self.exit = Exit::HandedBack;
        }
        let known = self.hand_back_deadline();
        let deadline = match (known, deadline) {
            (Some(known), Some(new)) => Some(known.min(new)),
            (known, new) => known.or(new),
        };
        self.mode = Mode::HandingBack { deadline };
        let claims: Vec<(Token, SourceId)> = self.held.iter().map(|(claim, held)| (*claim, held.source)).collect();
        for (claim, source) in claims {
            if self.feeds.get(usize::from(source.0)).is_some_and(|feed| feed.poller.waiting_for_work()) {
                self.tell(claim, Happening::PollOut, now);
            }
            self.tell(claim, Happening::HandBack { deadline }, now);
        }
    }

    /// A poll has ended: what waited for it is handed back.
    pub(super) fn release(&mut self, source: SourceId, now: Instant) {
        if !matches!(self.mode, Mode::HandingBack { .. }) {
            return;
        }
        let of_source = self.held.iter().filter(|(_, held)| held.source == source);
        let claims: Vec<Token> = of_source.map(|(claim, _)| *claim).collect();
        for claim in claims {
            self.tell(claim, Happening::PollOver, now);
        }
    }

    pub(super) const fn hand_back_deadline(&self) -> Option<Instant> {
        match self.mode {
            Mode::HandingBack { deadline } => deadline,
            Mode::Running | Mode::Draining { .. } | Mode::Exited => None,
        }
    }

    pub(super) fn leave(&mut self, exit: Exit) {
        self.mode = Mode::Exited;
        self.effects.push_back(Effect::Exit(exit));
    }

    pub(super) fn on_tick(&mut self, now: Instant) {
        self.tick_claims(now);
        self.tick_deletes(now);
        if let Mode::Draining { since } = self.mode
            && self.policy.drain_deadline.is_some_and(|span| now >= since.plus(span))
        {
            let exit = if self.exit == Exit::Drained { Exit::DrainDeadline } else { self.exit };
            self.hand_back(None, now);
            self.exit = exit;
        }
    }

    pub(super) fn proceed(&mut self, now: Instant) {
        match self.mode {
            Mode::Running => self.stay(now),
            Mode::Draining { .. } | Mode::HandingBack { .. } => {
                self.open_for_deletes(now);
                self.maybe_exit(now);
            }
            Mode::Exited => {}
        }
    }

    fn maybe_exit(&mut self, now: Instant) {
        self.overdue |= self.hand_back_deadline().is_some_and(|deadline| now >= deadline);
        let polling = self.feeds.iter().any(|feed| feed.poller.polling());
        if self.held.is_empty() && (self.overdue || (!polling && self.kept.is_empty())) {
            self.leave(self.exit);
        }
    }
}
