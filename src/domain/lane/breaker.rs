//! The rule that an origin (scheme, host and port) is tried or not.

use core::time::Duration;

use super::Reply;
use crate::time::Instant;

/// Consecutive failures of an origin that works no more.
pub const BREAKER_FAILURES: u32 = 5;
/// Before an origin is tried again; doubled each time.
pub const BREAKER_REST_FIRST: Duration = Duration::from_secs(5);
pub const BREAKER_REST_MAX: Duration = Duration::from_secs(5 * 60);

/// Of one origin. Open, it lets one probe pass after each rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Breaker {
    failures: u32,
    rests: u32,
    open_until: Option<Instant>,
    is_probing: bool,
}

/// What an attempt was let pass as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    Free,
    Probe,
}

impl Breaker {
    /// Begins an attempt, if the origin may be tried.
    pub fn begin(&mut self, now: Instant) -> Option<Pass> {
        let Some(until) = self.open_until else { return Some(Pass::Free) };
        if now < until || self.is_probing {
            return None;
        }
        self.is_probing = true;
        Some(Pass::Probe)
    }

    /// The attempt was not made.
    pub fn forget(&mut self, pass: Pass) {
        self.is_probing &= pass != Pass::Probe;
    }

    /// An operator knows better than to wait for the end of the rest.
    pub fn probe_at_once(&mut self, now: Instant) {
        self.open_until = self.open_until.map(|_| now);
    }

    pub const fn is_open(&self) -> bool {
        self.open_until.is_some()
    }

    /// The time at which a probe passes or has passed.
    pub const fn open_until(&self) -> Option<Instant> {
        self.open_until
    }

    /// When a probe may pass; `None` if one is under way, or none is needed.
    pub fn next_probe(&self) -> Option<Instant> {
        self.open_until.filter(|_| !self.is_probing)
    }

    /// An attempt that began before the breaker opened may end later.
    pub fn on_reply(&mut self, pass: Pass, reply: Reply, now: Instant) {
        if !reply.is_of_origin() {
            *self = Self::default();
            return;
        }
        self.failures = self.failures.saturating_add(1);
        match pass {
            Pass::Probe => self.is_probing = false,
            Pass::Free if self.is_open() || self.failures < BREAKER_FAILURES => return,
            Pass::Free => {}
        }
        let rest = BREAKER_REST_FIRST.saturating_mul(1 << self.rests.min(10)).min(BREAKER_REST_MAX);
        self.rests = self.rests.saturating_add(1);
        self.open_until = Some(now.plus(rest));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lane::ErrorClass;

    const DEAD: Reply = Reply::Failed(ErrorClass::Connect);
    const WELL: Reply = Reply::Answered { status: 400, retry_after: None, control: None };

    fn at(seconds: u64) -> Instant {
        Instant::at(Duration::from_secs(seconds))
    }

    #[test]
    fn an_operator_makes_the_next_probe_come_at_once() {
        let mut breaker = Breaker::default();
        breaker.probe_at_once(at(0));
        assert_eq!(breaker.begin(at(0)), Some(Pass::Free), "it is closed");
        for _ in 0..BREAKER_FAILURES {
            breaker.on_reply(Pass::Free, DEAD, at(0));
        }
        assert_eq!(breaker.begin(at(1)), None);
        breaker.probe_at_once(at(1));
        assert_eq!((breaker.begin(at(1)), breaker.begin(at(1))), (Some(Pass::Probe), None));
    }

    #[test]
    fn p5_a_dead_origin_gets_one_probe_after_each_rest() {
        let mut breaker = Breaker::default();
        // More than it takes are under way.
        for _ in 0..BREAKER_FAILURES + 3 {
            assert_eq!(breaker.begin(at(0)), Some(Pass::Free));
        }
        for _ in 0..BREAKER_FAILURES + 3 {
            breaker.on_reply(Pass::Free, DEAD, at(0));
        }
        let mut now = 0;
        for rest in [5, 10, 20, 40, 80, 160, 300, 300] {
            assert_eq!((breaker.begin(at(now + rest - 1)), breaker.next_probe()), (None, Some(at(now + rest))));
            now += rest;
            assert_eq!((breaker.begin(at(now)), breaker.begin(at(now))), (Some(Pass::Probe), None));
            breaker.on_reply(Pass::Probe, DEAD, at(now));
        }
        now += 300;
        assert_eq!(breaker.begin(at(now)), Some(Pass::Probe));
        breaker.on_reply(Pass::Probe, WELL, at(now));
        assert_eq!((breaker.begin(at(now)), breaker), (Some(Pass::Free), Breaker::default()));
    }

    #[test]
    fn an_answer_in_between_starts_the_count_over() {
        let mut breaker = Breaker::default();
        for reply in [DEAD, DEAD, DEAD, DEAD, WELL, DEAD, DEAD, DEAD, DEAD] {
            breaker.on_reply(Pass::Free, reply, at(0));
        }
        assert!(!breaker.is_open());
        breaker.on_reply(Pass::Free, DEAD, at(0));
        assert!(breaker.is_open());
    }
}
