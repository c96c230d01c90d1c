//! The invariants, judged from what the worker was told and did, and from what the queue knows. Each has its number.

use std::time::Duration;

use journeyman_domain::claim::{CancelCause, ClaimAction, ClaimEnd, LossReason, REPORT_RESERVE};
use journeyman_domain::id::{LocalToken, PriorityQueue, Run};
use journeyman_domain::lease::{self, Granted, Lease};
use journeyman_domain::outcome::{ExceptionReason, Outcome};
use journeyman_domain::refusal::Refusal;
use journeyman_domain::service_supervisor::ServiceAvailability;
use journeyman_domain::time::Instant;
use journeyman_domain::worker::{Alert, Effect, ExitReason, GrantedClaim, PollResult, RecoveryResult};

use crate::sim::host::{DEQUEUE_ALERT, Track};
use crate::sim::queue::{How, State};
use crate::sim::world::World;

/// How late a timer of the simulated host may fire.
const LATE: Duration = Duration::from_millis(250);

impl World {
    fn held(&self, invariant: &str, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            let tail =
                self.trace.as_ref().map_or(String::new(), |trace| trace[trace.len().saturating_sub(60)..].join("\n"));
            panic!(
                "{tail}\n{invariant} is violated with seed {} at {} ms: {}\nsee it with JOURNEYMAN_SIM_SEED={} JOURNEYMAN_SIM_SEEDS=1 JOURNEYMAN_SIM_TRACE=1",
                self.seed,
                self.now,
                what(),
                self.seed
            );
        }
    }

    pub fn check_effect(&mut self, host: usize, effect: &Effect) {
        match effect {
            Effect::Poll { queue, max, .. } => self.check_poll(host, *queue, *max),
            Effect::Claim(claim, ClaimAction::Request) => self.check_claim(host, *claim),
            Effect::Delete(message) => self.check_delete(host, *message),
            Effect::Claim(claim, ClaimAction::Prepare) => {
                let track = &self.hosts[host].claims[claim];
                self.held("I28", !track.recovered, || format!("prepared what a previous process held: {track:?}"));
            }
            Effect::Claim(claim, ClaimAction::Execute | ClaimAction::Start) => self.check_execute(host, *claim),
            Effect::Claim(claim, ClaimAction::Report { outcome, .. }) => self.check_report(host, *claim, *outcome),
            Effect::Claim(claim, ClaimAction::Reclaim { timeout }) => self.check_reclaim(host, *claim, *timeout),
            Effect::Claim(claim, ClaimAction::Kill { cause: CancelCause::ClaimLost(_), .. }) => {
                if let Some(track) = self.hosts[host].claims.get_mut(claim) {
                    track.given_up = true;
                }
            }
            Effect::Claim(claim, ClaimAction::Kill { cause: CancelCause::Shutdown, .. }) => {
                self.check_shutdown(host, *claim)
            }
            Effect::Claim(claim, ClaimAction::Kill { cause: CancelCause::Command(order), .. }) => {
                let track = &self.hosts[host].claims[claim];
                self.held("I34", track.ordered == Some(*order), || {
                    format!("host {host} ends without an order: {track:?}")
                });
            }
            Effect::Claim(claim, ClaimAction::Close(end)) => self.check_close(host, *claim, *end),
            Effect::Alert(alert) => self.check_alert(host, alert),
            Effect::Recover { .. } => self.check_fit(host),
            Effect::Claim(claim, ClaimAction::TakeOver) => {
                let known = self.hosts[host].claims.get(claim).is_some_and(|track| track.recovered);
                self.held("I28", known, || format!("host {host} takes over {claim:?}, which no previous process held"));
            }
            Effect::Open(_)
            | Effect::ClosePoll(_)
            | Effect::ProbeHost
            | Effect::DropMessage(_)
            | Effect::Claim(_, ClaimAction::Upload | ClaimAction::CheckStatus | ClaimAction::UpdateLease(_))
            | Effect::Exit(_) => {}
        }
    }

    fn check_poll(&mut self, host: usize, queue: PriorityQueue, max: u8) {
        let expected = self.hosts[host].next_queue;
        self.held("I16", queue.0 <= expected, || {
            format!("host {host} polls queue {queue:?} before queue {expected} was empty")
        });
        self.held("I22", self.hosts[host].stop.is_none(), || format!("host {host} polls after it was told to stop"));
        self.check_fit(host);
        let served = self.hosts[host].serving == ServiceAvailability::Up;
        self.held("I33", served, || format!("host {host} polls while its sidecar is down"));
        self.held("I8", (1..=32).contains(&max), || format!("host {host} asks for {max}"));
    }

    /// A host that cannot run tasks claims none until it was found fit.
    fn check_fit(&self, host: usize) {
        self.held("I33", !self.hosts[host].known_unfit, || format!("host {host} claims although it is unfit"));
    }

    fn check_claim(&mut self, host: usize, claim: LocalToken) {
        let Some(run) = self.hosts[host].entries.get(&claim).and_then(|entry| entry.run.clone()) else {
            let again = self.hosts[host].claims.contains_key(&claim);
            return self.held("I6", again, || format!("host {host} claims {claim:?}, which no message is about"));
        };
        let twice = self.hosts[host].claims.iter().any(|(token, track)| *token != claim && track.run == run);
        self.held("I6", !twice, || format!("host {host} has a claim of {run} in progress already"));
        self.hosts[host].claims.entry(claim).or_insert_with(|| Track::new(run));
    }

    fn check_delete(&mut self, host: usize, message: LocalToken) {
        let host_state = &self.hosts[host];
        let Some(entry) = host_state.entries.get(&message) else {
            return self.held("I13", false, || format!("host {host} deletes {message:?}, which it has forgotten"));
        };
        let settled = entry.run.as_ref().is_none_or(|run| host_state.definite.contains(run));
        self.held("I12", settled, || format!("host {host} deletes {entry:?} without a definite answer"));
        let latest = host_state.receipts.get(&entry.id) == Some(&entry.receipt);
        self.held("I13", latest, || format!("host {host} uses an old receipt: {entry:?}"));
    }

    fn check_execute(&mut self, host: usize, claim: LocalToken) {
        let now = self.hosts[host].local(self.now);
        let track = &self.hosts[host].claims[&claim];
        let run = track.run.clone();
        let last = track.last_moment(self.hosts[host].grace());
        self.held("I3", last.is_some_and(|last| now < last), || {
            format!("host {host} starts {run} too late: {track:?}")
        });
        self.held("I25", !track.executed, || format!("host {host} starts {run} again"));
        let forgotten = self.hosts[host].forgotten.contains(&run);
        self.held("I25", !self.hosts[host].ever_executed.contains(&run) || forgotten, || {
            format!("host {host} starts {run} in a second process")
        });
        self.held("I6", !self.hosts[host].executed.contains(&run), || {
            format!("host {host} starts {run} a second time")
        });
        self.held("I28", !self.hosts[host].left.contains(&run), || {
            format!("host {host} starts {run}, which its previous process held")
        });
        if let Some(other) = self.other_alive(&run.task, host) {
            let excused = self.hosts[other].claims.values().any(|track| track.run.task == run.task && track.suspended);
            // A payload whose task was canceled or whose claim was lost is about to be killed; its lease was not extended.
            self.held("I7", excused, || format!("{run} runs at host {other} and now at host {host}"));
        }
        let track = self.hosts[host].claims.get_mut(&claim).expect("a claim");
        track.executed = true;
        self.hosts[host].ever_executed.insert(run.clone());
        self.hosts[host].executed.insert(run);
    }

    fn check_report(&mut self, host: usize, claim: LocalToken, outcome: Outcome) {
        let now = self.hosts[host].local(self.now);
        let track = &self.hosts[host].claims[&claim];
        let last = track.last_moment(self.hosts[host].grace());
        self.held("I1", last.is_some_and(|last| now < last), || format!("host {host} reports too late: {track:?}"));
        self.held("I1", !track.told_gone && !track.told_canceled, || {
            format!("host {host} reports a lost claim: {track:?}")
        });
        self.held("I9", !track.answered, || format!("host {host} reports again after an answer: {track:?}"));
        let agrees = track.ordered.is_none_or(|order| order.override_outcome(outcome) == outcome);
        self.held("I34", agrees, || format!("host {host} reports {outcome} against an order: {track:?}"));
        self.held("I26", track.alive_since.is_none(), || {
            format!("host {host} reports while the payload lives: {track:?}")
        });
        let says = |reason| outcome == Outcome::Exception(reason);
        let ran = track.executed;
        self.held("I21", !says(ExceptionReason::MalformedPayload) || !ran, || {
            format!("malformed after it ran: {track:?}")
        });
        let by_itself = ran && !track.killed;
        let of_task =
            matches!(outcome, Outcome::Completed | Outcome::Failed) || says(ExceptionReason::IntermittentTask);
        self.held("I21", !of_task || by_itself, || format!("{outcome} although it did not end by itself: {track:?}"));
        let same = track.outcome.is_none_or(|before| before == outcome);
        self.held("I22", same, || format!("two outcomes for one claim: {outcome} after {track:?}"));
        let track = self.hosts[host].claims.get_mut(&claim).expect("a claim");
        track.reports += 1;
        track.outcome = Some(outcome);
    }

    fn check_reclaim(&mut self, host: usize, claim: LocalToken, timeout: Duration) {
        let now = self.hosts[host].local(self.now);
        let Some(track) = self.hosts[host].claims.get(&claim) else { return };
        let Some(lease) = track.lease else { return };
        self.held("I10", !track.answered, || format!("host {host} extends after the report was answered: {track:?}"));
        let room = lease.expires_at().since(now) + LATE >= timeout * 2 * lease::RECLAIM_ATTEMPTS_MIN;
        // A claim that was granted late in a long poll is reclaimed before anything is started.
        let granted_late = !track.executed && now >= lease.expires_at();
        let on_time = track.lease.is_some() && !track.suspended && track.told_first && !granted_late;
        self.held("I4", room || !on_time, || format!("host {host} extends too late for three attempts: {track:?}"));
        self.hosts[host].claims.get_mut(&claim).expect("a claim").told_first = false;
    }

    fn check_close(&mut self, host: usize, claim: LocalToken, end: ClaimEnd) {
        let now = self.hosts[host].local(self.now);
        let Some(track) = self.hosts[host].claims.get(&claim) else { return };
        self.held("I26", track.alive_since.is_none(), || {
            format!("host {host} closes with a living payload: {track:?}")
        });
        // What is said to have been reported without an answer was, and nothing else is.
        let unanswered = track.reports > 0 && !track.answered;
        match end {
            ClaimEnd::Unconfirmed { .. } => {
                self.held("I9", unanswered, || format!("never reported, or answered: {track:?}"))
            }
            // The queue has said that the report did not count.
            ClaimEnd::Lost(LossReason::Canceled | LossReason::DeadlineExceeded) => {}
            ClaimEnd::Lost(_) => {
                self.held("I9", track.reports == 0, || format!("reported, and said to be lost: {track:?}"))
            }
            _ => {}
        }
        match end {
            ClaimEnd::Lost(LossReason::Revoked) | ClaimEnd::Unconfirmed { loss: LossReason::Revoked, .. } => {
                self.held("I5", track.told_gone, || format!("host {host} gives up without a refusal: {track:?}"));
            }
            ClaimEnd::Lost(LossReason::Canceled) | ClaimEnd::Unconfirmed { loss: LossReason::Canceled, .. } => {
                self.held("I5", track.told_canceled, || format!("host {host} gives up without being told: {track:?}"));
            }
            ClaimEnd::Lost(LossReason::DeadlineExceeded)
            | ClaimEnd::Unconfirmed { loss: LossReason::DeadlineExceeded, .. } => {
                self.held("I5", false, || format!("no task here has a deadline: {track:?}"));
            }
            ClaimEnd::Lost(LossReason::LeaseExpired | LossReason::GrantedTooLate)
            | ClaimEnd::Unconfirmed { loss: LossReason::LeaseExpired | LossReason::GrantedTooLate, .. } => {
                // A claim that has not begun may be left once no reclaim fits.
                let is_late = end == ClaimEnd::Lost(LossReason::GrantedTooLate);
                let is_over = |lease: Lease| now >= lease.expires_at() || (is_late && !lease.has_room(now));
                let over = track.lease.is_some_and(is_over);
                self.held("I5", over, || format!("host {host} gives up before its time: {track:?}"));
                // A claim that a previous process made is granted again for the rest of its lease.
                let whole =
                    track.lease.is_some_and(|lease| lease.length().as_millis() > u128::from(self.queue.lease_ms / 2));
                let calm = self.calm && track.granted_calm && !track.suspended && whole;
                self.held("I10", !calm, || format!("host {host} loses a lease in the calm: {track:?}"));
            }
            ClaimEnd::Lost(LossReason::ShutdownDeadline)
            | ClaimEnd::Unconfirmed { loss: LossReason::ShutdownDeadline, .. } => {
                let due = self.hosts[host].stop.is_some_and(|stop| stop.deadline.is_some());
                self.held("I22", due, || format!("host {host} leaves a claim without being out of time: {track:?}"));
            }
            ClaimEnd::Reported(outcome) => {
                let ours = self.queue.state(&track.run);
                let agreed = ours == Some(State::Done { how: How::Reported(outcome), host: Some(host) });
                self.held("I9", agreed, || format!("reported {outcome}, but the queue has {ours:?}"));
            }
            ClaimEnd::AlreadyResolved(_) | ClaimEnd::ReportRejected(_) | ClaimEnd::NotGranted => {}
        }
    }

    fn check_alert(&mut self, host: usize, alert: &Alert) {
        match alert {
            Alert::DequeueCount { id, count } => {
                let new = self.hosts[host].alerted.insert(id.parse().expect("a number"));
                self.held("I15", new && *count > DEQUEUE_ALERT, || {
                    format!("host {host} alerts again for {id}: {count}")
                });
            }
            Alert::DeleteFailed { .. } => self.hosts[host].delete_alerts += 1,
            Alert::LateGrant { .. } => {}
            Alert::LastRun { run } => {
                let retries = self.queue.retries_left(run);
                self.held("I22", retries == 0, || format!("host {host} runs {run}, which has {retries} retries"));
            }
            Alert::RecoveredClaim { run } => {
                let track = self.hosts[host].claims.values_mut().find(|track| track.run == *run);
                let known = track.map(|track| track.unasked = true);
                self.held("I28", known.is_some(), || format!("{run} is no claim of host {host}"));
            }
            Alert::UnexpectedGrant { run } => {
                if let Some(track) = self.hosts[host].claims.values_mut().find(|track| track.run == *run) {
                    track.unasked = true;
                }
            }
            Alert::Undecodable { .. }
            | Alert::HostUnhealthy { .. }
            | Alert::AccessDenied { .. }
            | Alert::WorkDirLost
            | Alert::SourceUnavailable { .. }
            | Alert::CleanupPending { .. }
            | Alert::DuplicateWorkerId { .. }
            | Alert::UnreadableClaim { .. }
            | Alert::Denied { .. }
            | Alert::Throttled { .. }
            | Alert::OverlapPossible { .. } => {}
        }
    }

    /// A lease that is over stays over, even if its extension was on its way.
    pub fn note_expired(&mut self, host: usize) {
        let now = self.hosts[host].local(self.now);
        for track in self.hosts[host].claims.values_mut() {
            track.given_up |= track.reports > 0 && track.lease.is_some_and(|lease| now >= lease.expires_at());
        }
    }

    pub fn check_capacity(&self, host: usize) {
        let state = &self.hosts[host];
        let claims = state.claims.values().filter(|track| !track.recovered && !track.unasked).count();
        let taken = u32::try_from(claims).expect("few") + state.reserved;
        self.held("I8", taken <= state.capacity, || format!("host {host} holds {taken} of {}", state.capacity));
        let free = state.worker.as_ref().map_or(0, |worker| worker.free_slots());
        self.held("I8", free + taken == state.capacity, || {
            format!("host {host} lost a slot: {free} free, {taken} taken")
        });
        self.held("I14", state.deletes_failed == state.delete_alerts, || format!("host {host} hid a failed delete"));
    }

    /// I2: no payload runs when another worker may start it, unless this host was asleep (I7).
    pub fn check_outlived(&self, host: usize, claim: LocalToken) {
        let track = &self.hosts[host].claims[&claim];
        let in_time = match self.queue.state(&track.run) {
            Some(State::Running { taken_until, .. }) => self.now <= taken_until,
            Some(State::Done { how: How::ClaimExpired, .. }) | None => false,
            Some(State::Done { how: How::Reported(_) | How::Canceled, .. } | State::Pending) => true,
        };
        self.held("I2", in_time || track.suspended, || format!("host {host}: a payload outlives its claim: {track:?}"));
    }

    /// I23: at a hand back every payload is told at once.
    pub fn check_all_told(&self, host: usize) {
        for track in self.hosts[host].claims.values() {
            let told = track.alive_since.is_none() || track.killed;
            self.held("I23", told, || format!("host {host} hands back without telling {track:?}"));
        }
    }

    /// I22: a notice is used as long as it may be, and what has not started is not held up by what has.
    fn check_shutdown(&self, host: usize, claim: LocalToken) {
        let (state, now) = (&self.hosts[host], self.hosts[host].local(self.now));
        let Some(track) = state.claims.get(&claim).filter(|track| track.executed) else { return };
        let Some(stop) = state.stop else { return };
        let from = stop.hand_back_from;
        // A wake-up is worked out to the millisecond above.
        let due = from.is_some_and(|from| now.plus(Duration::from_millis(1)) >= from);
        self.held("I22", due, || format!("host {host} ends before it has to, {now:?} before {from:?}: {track:?}"));
    }

    /// I22: when the host goes, everything was told to end while there was time for a report.
    pub fn check_told_in_time(&self, host: usize) {
        let state = &self.hosts[host];
        let Some(deadline) = state.stop.and_then(|stop| stop.deadline) else { return };
        let late = state.local(self.now) >= deadline.minus(REPORT_RESERVE).plus(LATE * 2);
        for track in state.claims.values().filter(|_| late && state.suspended_until == 0) {
            let told = track.alive_since.is_none() || track.killed;
            self.held("I22", told, || format!("host {host} is about to go and did not tell {track:?}"));
        }
    }

    pub fn check_exit(&self, host: usize, exit: ExitReason) {
        let state = &self.hosts[host];
        let expected = state.expected_exits().contains(&exit);
        self.held("I24", expected, || format!("host {host} exits with {exit:?}, told to stop: {}", state.ever_stopped));
        let alive = state.claims.values().filter(|track| track.alive_since.is_some()).count();
        let left = exit == ExitReason::Aborted || alive == 0;
        self.held("I26", left, || format!("host {host} exits with {alive} payloads alive"));
        if let Some(deadline) = state.stop.and_then(|stop| stop.deadline)
            && exit != ExitReason::Aborted
        {
            let now = state.local(self.now);
            let late = now.since(deadline);
            let asleep = state.suspended_until > 0;
            self.held("I22", late <= Duration::from_secs(2) || asleep, || {
                format!("host {host} exits {late:?} too late")
            });
        }
    }

    // --- what the worker is told

    pub fn check_polled(&mut self, host: usize, queue: PriorityQueue, answer: &Result<PollResult, Refusal>) {
        let state = &mut self.hosts[host];
        let queues = state.priority_queues();
        state.next_queue = match answer {
            Ok(polled) if polled.messages.is_empty() && polled.claims.is_empty() => (queue.0 + 1) % queues,
            Ok(_) | Err(_) => 0,
        };
        if let Ok(polled) = answer {
            state.accepted |= !state.azure;
            self.note_grants(host, &polled.claims);
        }
    }

    pub fn check_recovered(&mut self, host: usize, answer: &Result<RecoveryResult, Refusal>) {
        let Ok(RecoveryResult { claims: brought, .. }) = answer else { return };
        let began = self.hosts[host].began;
        for one in brought {
            if let Some(track) = self.hosts[host].claims.get_mut(&one.token) {
                // A last run is run, since a release would end its task.
                let last = self.queue.retries_left(&track.run) == 0;
                track.recovered = !last && self.queue.claimed[&track.run] < began;
            }
        }
        self.note_grants(host, brought);
    }

    fn note_grants(&mut self, host: usize, brought: &[GrantedClaim]) {
        let grace = self.hosts[host].grace();
        let now = self.hosts[host].local(self.now);
        for one in brought {
            if let Some(track) = self.hosts[host].claims.get_mut(&one.token) {
                track.leased(one.lease, grace, now);
            }
        }
    }

    pub fn check_claimed(
        &mut self,
        host: usize,
        claim: LocalToken,
        sent_at: Instant,
        answer: Result<Granted, Refusal>,
    ) {
        let (calm, now) = (self.sent_in_calm(host, sent_at), self.hosts[host].local(self.now));
        let state = &mut self.hosts[host];
        let grace = state.grace();
        let Some(track) = state.claims.get_mut(&claim) else { return };
        match answer {
            Ok(granted) => {
                state.definite.insert(track.run.clone());
                state.accepted = true;
                track.granted_calm = calm;
                track.leased(granted, grace, now);
            }
            Err(Refusal::Gone) => {
                state.definite.insert(track.run.clone());
            }
            Err(Refusal::Rejected) if state.accepted => {
                state.definite.insert(track.run.clone());
            }
            Err(
                Refusal::Rejected
                | Refusal::Denied
                | Refusal::Retry { .. }
                | Refusal::Throttled { .. }
                | Refusal::Full
                | Refusal::Stale,
            ) => {}
        }
    }

    /// What was written down was granted once, so that asking for it again claims nothing new.
    pub fn check_taken_over(&self, host: usize, run: &Run) {
        let state = self.queue.state(run);
        self.held("I28", state != Some(State::Pending), || {
            format!("host {host} has written down {run}, never granted")
        });
    }

    pub fn check_taken(&mut self, host: usize, claim: LocalToken, sent_at: Instant, answer: Result<Granted, Refusal>) {
        let now = self.hosts[host].local(self.now);
        let calm = self.sent_in_calm(host, sent_at);
        let state = &mut self.hosts[host];
        let grace = state.grace();
        let Some(track) = state.claims.get_mut(&claim) else { return };
        match answer {
            Ok(granted) => {
                state.definite.insert(track.run.clone());
                track.granted_calm = calm;
                track.leased(granted, grace, now);
            }
            // Where a message may bring the run again, credentials that are refused settle nothing.
            Err(Refusal::Denied) if state.azure => {}
            Err(refusal @ (Refusal::Gone | Refusal::Denied | Refusal::Rejected)) => {
                state.definite.insert(track.run.clone());
                track.told_gone = true;
                // Without the optional scope a claim is forgotten; a recovery may find it as that of a lost reply.
                if refusal == Refusal::Denied {
                    state.forgotten.insert(track.run.clone());
                }
            }
            Err(Refusal::Retry { .. } | Refusal::Throttled { .. } | Refusal::Full | Refusal::Stale) => {}
        }
    }

    pub fn check_deleted(&mut self, host: usize, message: LocalToken, answer: Result<(), Refusal>) {
        let known = self.hosts[host].entries.contains_key(&message);
        if known && !matches!(answer, Ok(()) | Err(Refusal::Gone)) {
            self.hosts[host].deletes_failed += 1;
        }
    }

    pub fn check_reclaimed(&mut self, host: usize, claim: LocalToken, answer: Result<Granted, Refusal>) {
        let (grace, now) = (self.hosts[host].grace(), self.hosts[host].local(self.now));
        let Some(track) = self.hosts[host].claims.get_mut(&claim) else { return };
        match answer {
            Ok(granted) => track.leased(granted, grace, now),
            Err(Refusal::Gone) => track.told_gone = true,
            Err(_) => {}
        }
    }
}

impl Track {
    /// Notes what a reply granted, whatever the rules make of it.
    fn leased(&mut self, granted: Granted, grace: Duration, now: Instant) {
        let lease = Lease::new(granted, grace);
        // What was given up stays given up, even if the extension was on its way.
        if !self.given_up && self.lease.is_none_or(|known| lease.expires_at() > known.expires_at()) {
            self.lease = Some(lease);
            // A reply that took its time leaves no room; then the extension is due at once.
            self.told_first =
                lease.expires_at().since(now) >= lease.attempt_timeout() * 2 * lease::RECLAIM_ATTEMPTS_MIN;
        }
    }
}
