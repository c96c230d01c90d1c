//! The way out: drain, hand back, the host's end, exit.

use alloc::vec::Vec;

use super::{Effect, Exit, Mode, Worker};
use crate::domain::claim::{Happening, Machine};
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
        if self.mode == Mode::Running
            || matches!(self.exit, Exit::Drained | Exit::Idle | Exit::Limit | Exit::FolderLost)
        {
            self.exit = Exit::HandedBack;
        }
        let deadline = [self.hand_back_deadline(), deadline].into_iter().flatten().min();
        self.mode = Mode::HandingBack { deadline };
        self.hand_back_those(|_| true, deadline, now);
    }

    /// The host goes at a time that nobody knows: it may be the next second, so no report waits for our own poll. What that
    /// poll still brings is handed back as well.
    fn hand_back_without_waiting(&mut self, now: Instant) {
        self.hand_back(None, now);
        let claims: Vec<Token> = self.held.keys().copied().collect();
        for claim in claims {
            self.tell(claim, Happening::PollOver, now);
        }
    }

    /// The host goes. Its time is used: what has not started has nothing to lose and is handed back at once, what runs may
    /// finish until there is just time left to end it and to report it (I22).
    pub(super) fn terminate(&mut self, deadline: Option<Instant>, now: Instant) {
        let exit = match self.exit {
            Exit::Drained | Exit::HandedBack | Exit::DrainDeadline | Exit::Idle | Exit::Limit | Exit::FolderLost => {
                Exit::HostGoes
            }
            Exit::HostGoes | Exit::CredentialsRefused | Exit::Misconfigured | Exit::Aborted | Exit::Occupied => {
                self.exit
            }
        };
        let news = match (self.host_goes, deadline) {
            (Some(known), Some(deadline)) => deadline < known,
            (None, _) | (_, None) => true,
        };
        if news {
            self.host_goes = deadline.or(self.host_goes);
            let at_once = self.hand_back_at().is_none_or(|at| now >= at);
            if deadline.is_none() {
                self.hand_back_without_waiting(now);
            } else if at_once || matches!(self.mode, Mode::HandingBack { .. }) {
                self.hand_back(deadline, now);
            } else {
                self.drain(exit, now);
                self.hand_back_those(|machine| !machine.started(), deadline, now);
            }
        }
        self.exit = exit;
    }

    /// When what still runs has to be told to end, if it is known when the host goes.
    fn hand_back_at(&self) -> Option<Instant> {
        self.host_goes.and_then(|deadline| self.policy.noticed.hand_back_at(deadline, self.policy.claim.grace))
    }

    /// When a drain that began at `since` turns into a hand back.
    pub(super) fn drain_ends(&self, since: Instant) -> Option<Instant> {
        let limit = self.drain_by.or_else(|| self.policy.drain_deadline.map(|span| since.plus(span)));
        [limit, self.hand_back_at()].into_iter().flatten().min()
    }

    fn hand_back_those(&mut self, which: impl Fn(&Machine) -> bool, deadline: Option<Instant>, now: Instant) {
        let those = self.held.iter().filter(|(_, held)| which(&held.machine));
        let claims: Vec<(Token, SourceId)> = those.map(|(claim, held)| (*claim, held.source)).collect();
        for (claim, source) in claims {
            if self.feeds.get(usize::from(source.0)).is_some_and(|feed| feed.poller.waiting_for_work()) {
                self.tell(claim, Happening::PollOut, now);
            }
            self.tell(claim, Happening::HandBack { deadline }, now);
        }
    }

    /// A poll has ended: what waited for it is handed back.
    pub(super) fn release(&mut self, source: SourceId, now: Instant) {
        if self.mode == Mode::Running && !self.fitness.doubted() && !self.awaited.remove(&source) {
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
            Mode::Running | Mode::Draining { .. } | Mode::Exited => self.host_goes,
        }
    }

    pub(super) fn leave(&mut self, exit: Exit) {
        self.mode = Mode::Exited;
        let exit = if self.occupied.is_empty() || exit == Exit::Aborted { exit } else { Exit::Occupied };
        self.effects.push_back(Effect::Exit(exit));
    }

    pub(super) fn on_tick(&mut self, now: Instant) {
        self.tick_claims(now);
        self.tick_deletes(now);
        if let Mode::Draining { since } = self.mode
            && self.drain_ends(since).is_some_and(|at| now >= at)
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
