//! When a worker registers with Taskcluster's worker-manager and asks it whether it is still needed, and what the answers mean.

use alloc::collections::BTreeMap;
use alloc::string::String;
use core::time::Duration;

use super::backoff::{self, Backoff};
use super::jitter::Jitter;
use super::refusal::Refusal;
use super::time::Instant;
use super::worker::ExitReason;

/// Worker-manager decides as often which workers it needs.
pub const CHECK_INTERVAL: Duration = Duration::from_secs(60);
pub const CHECK_RETRY: backoff::Policy = backoff::Policy { first: CHECK_INTERVAL, max: Duration::from_secs(300) };
/// After a missing scope, or for a worker that worker-manager does not know: a person has to change that.
pub const REFUSED_CHECK_INTERVAL: Duration = Duration::from_secs(3600);
/// How long an idle worker stays after the last answer that it is needed: three checks may fail.
pub const NEEDED_FOR: Duration = Duration::from_secs(300);
/// Credentials are renewed this long before they expire, but not before three quarters of their time.
pub const RENEW_BEFORE: Duration = Duration::from_secs(1800);
pub const RENEW_RETRY: backoff::Policy =
    backoff::Policy { first: Duration::from_secs(2), max: Duration::from_secs(60) };

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolCall {
    /// The worker shows the static secret.
    Register,
    /// The worker shows the credentials and the one-time secret of the last registration.
    Reregister,
    CheckTermination,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolAnswer {
    /// The time counts from that at which the call was sent.
    Registered {
        usable_for: Duration,
    },
    Needed,
    Terminate,
}

/// What an answer means for the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolDecision {
    /// An idle worker stays.
    NeededUntil(Instant),
    /// It drains and exits, at the latest when its credentials expire.
    Leave { exit: ExitReason, deadline: Option<Instant> },
}

/// One worker in its pool. Calls are made one at a time.
#[derive(Debug)]
pub struct PoolMember {
    renewal: Option<Renewal>,
    /// `None` after an answer that ends the worker.
    check_at: Option<Instant>,
    check_retry: Backoff,
    jitter: Jitter,
}

#[derive(Debug)]
struct Renewal {
    call: PoolCall,
    at: Instant,
    /// `None` before the first registration.
    expires_at: Option<Instant>,
    retry: Backoff,
}

impl PoolMember {
    /// A worker with credentials of its own.
    pub const fn with_credentials(seed: u64) -> Self {
        Self { renewal: None, check_at: Some(Instant::ORIGIN), check_retry: Backoff::NEW, jitter: Jitter::seeded(seed) }
    }

    /// A worker that gets its credentials by registering.
    pub const fn unregistered(seed: u64) -> Self {
        let renewal = Renewal { call: PoolCall::Register, at: Instant::ORIGIN, expires_at: None, retry: Backoff::NEW };
        Self { renewal: Some(renewal), ..Self::with_credentials(seed) }
    }

    pub fn is_registered(&self) -> bool {
        self.renewal.as_ref().is_none_or(|renewal| renewal.expires_at.is_some())
    }

    pub fn next_call(&self) -> Option<PoolCall> {
        self.next().map(|(_, call)| call)
    }

    /// The time of [`Self::next_call`].
    pub fn next_deadline(&self) -> Option<Instant> {
        self.next().map(|(at, _)| at)
    }

    fn next(&self) -> Option<(Instant, PoolCall)> {
        let renewal = self.renewal.as_ref().map(|renewal| (renewal.at, renewal.call));
        let check = self.check_at.filter(|_| self.is_registered()).map(|at| (at, PoolCall::CheckTermination));
        [renewal, check].into_iter().flatten().min_by_key(|(at, _)| *at)
    }

    pub fn on_answer(&mut self, answer: PoolAnswer, sent_at: Instant, now: Instant) -> Option<PoolDecision> {
        match answer {
            PoolAnswer::Registered { usable_for } => {
                let early = RENEW_BEFORE.min(usable_for / 4);
                let at = sent_at.plus(usable_for - early).max(now.plus(RENEW_RETRY.first));
                let expires_at = Some(sent_at.plus(usable_for));
                self.renewal = Some(Renewal { call: PoolCall::Reregister, at, expires_at, retry: Backoff::NEW });
                None
            }
            PoolAnswer::Needed => {
                self.check_retry.reset();
                self.check_at = Some(now.plus(CHECK_INTERVAL + self.jitter.below(CHECK_INTERVAL / 4)));
                Some(PoolDecision::NeededUntil(now.plus(NEEDED_FOR)))
            }
            PoolAnswer::Terminate => {
                self.check_at = None;
                Some(PoolDecision::Leave { exit: ExitReason::NotNeeded, deadline: None })
            }
        }
    }

    pub fn on_refusal(&mut self, call: PoolCall, refusal: Refusal, now: Instant) -> Option<PoolDecision> {
        let is_definite = matches!(refusal, Refusal::Gone | Refusal::Rejected | Refusal::Denied);
        match (call, &mut self.renewal) {
            (PoolCall::CheckTermination, _) | (_, None) => {
                let wait = self.check_retry.wait(CHECK_RETRY, refusal.retry_after(), &mut self.jitter);
                let wait = if is_definite { REFUSED_CHECK_INTERVAL } else { wait };
                self.check_at = self.check_at.map(|_| now.plus(wait));
                None
            }
            // The one-time secret is used up if an answer was lost; the static one is not.
            (PoolCall::Reregister, Some(renewal)) if is_definite => {
                *renewal = Renewal { call: PoolCall::Register, at: now, retry: Backoff::NEW, ..*renewal };
                None
            }
            (PoolCall::Register, Some(renewal)) if is_definite => {
                let deadline = renewal.expires_at;
                (self.renewal, self.check_at) = (None, None);
                Some(PoolDecision::Leave { exit: ExitReason::RegistrationRefused, deadline })
            }
            (PoolCall::Register | PoolCall::Reregister, Some(renewal)) => {
                renewal.at = now.plus(renewal.retry.wait(RENEW_RETRY, refusal.retry_after(), &mut self.jitter));
                None
            }
        }
    }
}

/// Which alerts are reported. Errors of a pool are listed for its owners, so one of a kind is enough for a while.
#[derive(Debug)]
pub struct AlertReports(
    /// The time at which each kind was reported last.
    BTreeMap<String, Instant>,
);

impl AlertReports {
    pub const INTERVAL: Duration = Duration::from_secs(3600);
    pub const NONE: Self = Self(BTreeMap::new());

    /// Whether to report an alert of this kind. If so, it counts as reported.
    pub fn is_due(&mut self, kind: &str, now: Instant) -> bool {
        let is_due = self.0.get(kind).is_none_or(|at| now.since(*at) >= Self::INTERVAL);
        if is_due {
            self.0.insert(kind.into(), now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);
    const RETRY: Refusal = Refusal::Retry { retry_after: None };

    fn at(seconds: u64) -> Instant {
        Instant::at(Duration::from_secs(seconds))
    }

    fn registered(usable_for: Duration) -> PoolMember {
        let mut member = PoolMember::unregistered(1);
        assert_eq!((member.next_call(), member.is_registered()), (Some(PoolCall::Register), false));
        assert_eq!(member.on_answer(PoolAnswer::Registered { usable_for }, at(0), at(1)), None);
        member
    }

    /// Answers checks until the next call is another one, and returns its time.
    fn next_renewal(member: &mut PoolMember) -> Instant {
        while member.next_call() == Some(PoolCall::CheckTermination) {
            let now = member.next_deadline().unwrap();
            member.on_answer(PoolAnswer::Needed, now, now);
        }
        assert_eq!(member.next_call(), Some(PoolCall::Reregister));
        member.next_deadline().unwrap()
    }

    #[test]
    fn credentials_are_renewed_half_an_hour_or_a_quarter_before_they_expire() {
        for (usable_for, renewed) in [(96 * HOUR, at(96 * 3600 - 1800)), (HOUR, at(2700)), (HOUR / 60, at(45))] {
            assert_eq!(next_renewal(&mut registered(usable_for)), renewed);
        }
        // Credentials that have expired are no reason for a busy loop.
        let member = registered(Duration::ZERO);
        assert_eq!(member.next_call(), Some(PoolCall::CheckTermination));
        assert_eq!(member.renewal.unwrap().at, at(3));
    }

    #[test]
    fn a_renewal_without_an_answer_is_repeated_at_growing_intervals() {
        let mut member = registered(HOUR);
        let mut now = next_renewal(&mut member);
        for _ in 1..20 {
            assert_eq!(member.on_refusal(PoolCall::Reregister, RETRY, now), None);
            let renewal = member.renewal.as_ref().unwrap();
            let wait = renewal.at.since(now);
            assert!((RENEW_RETRY.first / 2..=RENEW_RETRY.max).contains(&wait), "{wait:?}");
            now = renewal.at;
        }
    }

    #[test]
    fn a_refused_reregistration_is_a_registration_and_its_refusal_ends_the_worker_with_its_credentials() {
        for refusal in [Refusal::Rejected, Refusal::Denied, Refusal::Gone] {
            let mut member = registered(HOUR);
            let now = next_renewal(&mut member);
            assert_eq!(member.on_refusal(PoolCall::Reregister, refusal, now), None);
            assert_eq!((member.next_call(), member.next_deadline()), (Some(PoolCall::Register), Some(now)));
            assert!(member.is_registered(), "the credentials last");
            let leave = PoolDecision::Leave { exit: ExitReason::RegistrationRefused, deadline: Some(at(3600)) };
            assert_eq!(member.on_refusal(PoolCall::Register, refusal, now), Some(leave));
            assert_eq!(member.next_call(), None);
        }
    }

    #[test]
    fn the_first_registration_precedes_the_first_check() {
        let mut member = PoolMember::unregistered(1);
        member.on_refusal(PoolCall::Register, RETRY, at(5));
        assert_eq!(member.next_call(), Some(PoolCall::Register));
        assert!(member.next_deadline() > Some(at(5)));
        let member = PoolMember::with_credentials(1);
        assert_eq!((member.next_call(), member.is_registered()), (Some(PoolCall::CheckTermination), true));
    }

    #[test]
    fn checks_are_a_minute_apart_and_a_refused_one_is_repeated_after_an_hour() {
        let mut member = PoolMember::with_credentials(1);
        let needed = member.on_answer(PoolAnswer::Needed, at(10), at(10));
        assert_eq!(needed, Some(PoolDecision::NeededUntil(at(310))));
        assert!((at(70)..at(85)).contains(&member.next_deadline().unwrap()));
        assert_eq!(member.on_refusal(PoolCall::CheckTermination, RETRY, at(80)), None);
        let retried = member.next_deadline().unwrap();
        assert!((at(110)..=at(140)).contains(&retried), "{retried:?}");
        assert_eq!(member.on_refusal(PoolCall::CheckTermination, Refusal::Denied, at(200)), None);
        assert_eq!(member.next_deadline(), Some(at(200 + 3600)));
    }

    #[test]
    fn a_worker_that_is_not_needed_is_told_once_and_renews_its_credentials_until_its_tasks_end() {
        let mut member = registered(HOUR);
        let leave = PoolDecision::Leave { exit: ExitReason::NotNeeded, deadline: None };
        assert_eq!(member.on_answer(PoolAnswer::Terminate, at(2), at(2)), Some(leave));
        assert_eq!(next_renewal(&mut member), at(2700));
    }

    #[test]
    fn an_alert_of_one_kind_is_reported_once_an_hour() {
        let mut reports = AlertReports::NONE;
        assert!(reports.is_due("auth-denied", at(0)) && !reports.is_due("auth-denied", at(3599)));
        assert!(reports.is_due("other", at(1)) && reports.is_due("auth-denied", at(3600)));
    }
}
