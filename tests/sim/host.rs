//! A worker host: the rules under test, its own clock, its payloads, and what the checker remembers of it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use journeyman_domain::claim;
use journeyman_domain::id::{LocalToken, Run, ServiceId, SourceId};
use journeyman_domain::journal::{BootId, ClaimRecord, EntryId, Journal, JournalRecord};
use journeyman_domain::lease::{self, Lease};
use journeyman_domain::outcome::{Outcome, Verdict};
use journeyman_domain::poll;
use journeyman_domain::service_supervisor::ServiceAvailability;
use journeyman_domain::time::Instant;
use journeyman_domain::worker::{
    Event, ExitPolicy, ExitReason, MinResources, OnTerminationNotice, RecoveredClaim, SourceSpec, Worker, WorkerPolicy,
};

use crate::sim::queue::LANES;
use crate::sim::rng::Rng;

pub const DEQUEUE_ALERT: u32 = 10;
pub const DENIED_MAX: u32 = 6;
/// What the host is called in its journal.
pub const CLAIMANT: &str = "host";

#[derive(Debug)]
pub struct Host {
    pub azure: bool,
    /// Its claims are those of a session, as with a ZooKeeper: they end together, also without the host.
    pub has_session: bool,
    /// Polls of an earlier session have failed.
    pub session_since: Instant,
    pub capacity: u32,
    pub policy: WorkerPolicy,
    pub ppm: i64,
    offset: u64,
    pub life: u32,
    pub worker: Option<Worker>,
    pub suspended_until: u64,
    pub wake: u64,
    tokens: u64,
    pub entries: BTreeMap<LocalToken, Received>,
    pub claims: BTreeMap<LocalToken, Track>,
    pub receipts: BTreeMap<u64, u64>,
    pub definite: BTreeSet<Run>,
    pub executed: BTreeSet<Run>,
    pub next_queue: u16,
    pub reserved: u32,
    pub accepted: bool,
    pub stop: Option<Stop>,
    pub ever_stopped: bool,
    pub deletes_failed: u64,
    pub delete_alerts: u64,
    pub alerted: BTreeSet<u64>,
    pub quarantined_until: u64,
    pub partitioned_until: u64,
    pub unfit_until: u64,
    /// A task was found to fail because of the host, and no look has found it fit since.
    pub known_unfit: bool,
    /// The time at which this process started.
    pub began: u64,
    /// What its tasks need is there, as its worker was told.
    pub serving: ServiceAvailability,
    pub request_good: Option<bool>,
    /// What is on its disk.
    pub journal: Journal,
    /// What this process recovered from the previous one.
    pub left: BTreeSet<Run>,
    /// What was executed here in whichever life.
    pub ever_executed: BTreeSet<Run>,
    /// What the queue refused to grant again in whichever life, for lack of a scope.
    pub forgotten: BTreeSet<Run>,
}

#[derive(Debug, Clone)]
pub struct Received {
    pub id: u64,
    pub receipt: u64,
    pub run: Option<Run>,
}

#[derive(Debug, Clone, Copy)]
pub struct Stop {
    pub deadline: Option<Instant>,
    /// Before this nothing that runs may be told to end; `None` is never.
    pub hand_back_from: Option<Instant>,
}

/// What the checker knows of one claim, kept apart from what the rules know.
#[derive(Debug)]
pub struct Track {
    pub run: Run,
    pub lease: Option<Lease>,
    pub told_gone: bool,
    pub told_canceled: bool,
    pub executed: bool,
    pub alive_since: Option<u64>,
    pub suspended: bool,
    pub killed: bool,
    pub ended: bool,
    pub ignores_term: bool,
    pub verdict: Option<Verdict>,
    pub reports: u32,
    pub answered: bool,
    pub recovered: bool,
    pub unasked: bool,
    pub outcome: Option<Outcome>,
    pub granted_calm: bool,
    /// No extension was asked for since the last one was granted.
    pub told_first: bool,
    pub given_up: bool,
    /// What was ordered of it before anything of it was reported.
    pub ordered: Option<claim::CancelCommand>,
}

impl Track {
    pub fn new(run: Run) -> Self {
        Self {
            run,
            lease: None,
            told_gone: false,
            told_canceled: false,
            executed: false,
            alive_since: None,
            suspended: false,
            killed: false,
            ended: false,
            ignores_term: false,
            verdict: None,
            reports: 0,
            answered: false,
            recovered: false,
            unasked: false,
            outcome: None,
            granted_calm: false,
            told_first: false,
            given_up: false,
            ordered: None,
        }
    }

    /// The latest moment at which anything may be started or sent, worked out from the reply and not from the rules.
    pub fn last_moment(&self, grace: Duration) -> Option<Instant> {
        let lease = self.lease?;
        let length = lease.length();
        Some(lease.granted_until().minus(lease::clock_error(length) + grace.min(length / 10)))
    }
}

impl Host {
    pub fn new(lease_ms: u64, rng: &mut Rng) -> Self {
        let azure = rng.chance(60);
        let has_session = !azure && rng.chance(50);
        let capacity = u32::try_from(rng.between(1, 5)).expect("small");
        let policy = WorkerPolicy {
            capacity,
            launched_max: 0,
            poll_interval: Duration::from_millis(rng.between(lease_ms / 20, lease_ms / 4)),
            claim: claim::ClaimPolicy {
                termination_grace: Duration::from_millis(rng.between(0, 20_000)),
                reports_cancellation: true,
                starts_in_one_step: false,
                fenced_reports: false,
                status_poll_interval: rng.chance(40).then(|| Duration::from_millis(lease_ms / 5)),
            },
            dequeue_alert: DEQUEUE_ALERT,
            max_auth_failures: DENIED_MAX,
            on_termination_notice: if rng.chance(80) {
                OnTerminationNotice::Finish { margin: Duration::from_millis(rng.pick(&[0, 5_000, 15_000, 60_000])) }
            } else {
                OnTerminationNotice::Release
            },
            drain_deadline: rng.chance(70).then(|| Duration::from_millis(rng.between(1_000, lease_ms * 2))),
            exit_policy: ExitPolicy::default(),
            min_resources: MinResources::default(),
        };
        Self {
            azure,
            has_session,
            session_since: Instant::ORIGIN,
            capacity,
            policy,
            ppm: 0,
            offset: rng.below(1_000_000_000),
            life: 0,
            worker: None,
            suspended_until: 0,
            wake: 0,
            tokens: 0,
            entries: BTreeMap::new(),
            claims: BTreeMap::new(),
            receipts: BTreeMap::new(),
            definite: BTreeSet::new(),
            executed: BTreeSet::new(),
            next_queue: 0,
            reserved: 0,
            accepted: false,
            stop: None,
            ever_stopped: false,
            deletes_failed: 0,
            delete_alerts: 0,
            alerted: BTreeSet::new(),
            quarantined_until: 0,
            partitioned_until: 0,
            unfit_until: 0,
            known_unfit: false,
            began: 0,
            serving: ServiceAvailability::Up,
            request_good: None,
            journal: Journal::default(),
            left: BTreeSet::new(),
            ever_executed: BTreeSet::new(),
            forgotten: BTreeSet::new(),
        }
    }

    /// From when on an order allows to hand back what runs, worked out from the order and not from the rules.
    pub fn hand_back_from(&self, order: &Event, now: Instant) -> Option<Instant> {
        let drained = self.policy.drain_deadline.map(|span| now.plus(span));
        match order {
            Event::Drain { deadline: None } => drained,
            Event::TerminationNotice { deadline: Some(deadline) } => {
                let needed = self.policy.claim.termination_grace + claim::REPORT_RESERVE;
                let margin = match self.policy.on_termination_notice {
                    OnTerminationNotice::Finish { margin } => margin.max(needed),
                    OnTerminationNotice::Release => Duration::MAX,
                };
                drained.into_iter().chain([deadline.minus(margin)]).min()
            }
            _ => Some(now),
        }
    }

    pub fn grace(&self) -> Duration {
        self.policy.claim.termination_grace
    }

    pub fn priority_queues(&self) -> u16 {
        if self.azure { LANES } else { 1 }
    }

    /// Begins a life; answers with what it is to be told first.
    pub fn start(&mut self, rng: &mut Rng, now: u64) -> Vec<Event> {
        self.stopped();
        self.life += 1;
        self.began = now;
        let boot = BootId("boot".into());
        let plan = self.journal.recovery_plan(&boot, &[CLAIMANT.into()]);
        let sent_at = self.journal.unread_poll(CLAIMANT);
        self.journal = Journal::new(boot);
        self.journal.apply(JournalRecord::UnreadPoll { claimant: CLAIMANT.into(), sent_at });
        self.left.clear();
        let mut left = Vec::new();
        for RecoveredClaim { run, outcome, .. } in plan.report {
            let token = self.token();
            let held = ClaimRecord { run: run.clone(), claimant: CLAIMANT.into(), processes: None };
            self.journal.apply(JournalRecord::Claimed { entry: EntryId(token.0), claim: held });
            self.journal.apply(JournalRecord::OutcomeDecided { entry: EntryId(token.0), outcome });
            let mut track = Track::new(run.clone());
            track.recovered = true;
            track.executed = self.ever_executed.contains(&run);
            self.claims.insert(token, track);
            self.left.insert(run.clone());
            // It was granted once.
            self.definite.insert(run.clone());
            left.push(RecoveredClaim { token, source: SourceId(0), run, outcome });
        }
        let manner = poll::Capabilities {
            long_poll: !self.azure,
            supports_recovery: !self.azure && !self.has_session,
            reports_cancellation: !self.has_session,
            connection_scoped: self.has_session,
            fenced_reports: false,
        };
        let spec = SourceSpec { capabilities: manner, service: ServiceId(0) };
        self.worker = Some(Worker::new(self.policy.clone(), &[spec], rng.bits()));
        let unread = sent_at.map(|sent_at| {
            let age = self.local(now).since_origin().saturating_sub(sent_at);
            Event::UnreadPoll { source: SourceId(0), age }
        });
        std::iter::once(Event::ClaimsRecovered(left)).chain(unread).collect()
    }

    /// Writes down the oldest poll that it has not read the answer of.
    pub fn note_polls(&mut self, now: u64) {
        let now = self.local(now);
        let Some(source) = self.worker.as_ref().and_then(|worker| worker.sources().first()) else { return };
        let unread = source.poller.unread_poll();
        let sent_at = unread.map(|poll| now.since_origin().saturating_sub(poll.age(now)));
        self.note(JournalRecord::UnreadPoll { claimant: CLAIMANT.into(), sent_at });
    }

    /// Writes something down.
    pub fn note(&mut self, record: JournalRecord) {
        self.journal.record(record);
    }

    /// The process is gone, and with it all that it knew.
    pub fn stopped(&mut self) {
        self.worker = None;
        self.entries.clear();
        self.claims.clear();
        self.receipts.clear();
        self.definite.clear();
        self.executed.clear();
        self.next_queue = 0;
        self.reserved = 0;
        self.accepted = false;
        self.stop = None;
        self.ever_stopped = false;
        self.alerted.clear();
        self.deletes_failed = 0;
        self.delete_alerts = 0;
        self.known_unfit = false;
        self.serving = ServiceAvailability::Up;
        self.request_good = None;
    }

    pub fn token(&mut self) -> LocalToken {
        self.tokens += 1;
        LocalToken(self.tokens)
    }

    /// This host's clock at a true time.
    pub fn local(&self, now: u64) -> Instant {
        let micros = i128::from(now) * 1_000;
        let off = micros * i128::from(self.ppm) / 1_000_000;
        let local = u64::try_from(micros + off).expect("after the origin") + self.offset * 1_000;
        Instant::at(Duration::from_micros(local))
    }

    /// The true time at which this host's clock shows `local`, rounded up.
    pub fn truth(&self, local: Instant) -> u64 {
        let micros =
            i128::try_from(local.since_origin().as_micros()).expect("fits") + 1 - i128::from(self.offset) * 1_000;
        let truth = micros * 1_000_000 / (1_000_000 + i128::from(self.ppm));
        u64::try_from(truth.max(0) / 1_000).expect("fits") + 1
    }

    pub fn expected_exits(&self) -> &'static [ExitReason] {
        if self.ever_stopped {
            &[
                ExitReason::Drained,
                ExitReason::Released,
                ExitReason::HostTerminating,
                ExitReason::Aborted,
                ExitReason::CredentialsRejected,
                ExitReason::Misconfigured,
            ]
        } else {
            &[ExitReason::CredentialsRejected, ExitReason::Misconfigured]
        }
    }
}
