//! Virtual time, the network between hosts and queue, and everything that goes wrong. A safety phase with faults, then
//! a liveness phase without: by its end every task is resolved and every message gone.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use journeyman_domain::claim::{CancelCommand, ClaimAction, ClaimEvent, LossReason, RunTerms, UploadStatus};
use journeyman_domain::host_health::ProbeResult;
use journeyman_domain::id::{LocalToken, PriorityQueue, Run, SourceId, TaskId};
use journeyman_domain::journal::{self, ClaimRecord, EntryId, JournalRecord};
use journeyman_domain::lease::Granted;
use journeyman_domain::outcome::{ExecuteFailure, Outcome, PrepareFailure, Verdict};
use journeyman_domain::refusal::Refusal;
use journeyman_domain::service_supervisor::ServiceAvailability;
use journeyman_domain::time::Instant;
use journeyman_domain::worker::{
    Effect, Event, ExitReason, GrantedClaim, OpenResult, PollResult, ReceivedMessage, RecoveryResult,
};

use crate::sim::faults::{ALL, Fault, FaultTotals};
use crate::sim::host::{CLAIMANT, Host, Received, Stop, Track};
use crate::sim::queue::{How, Queue, State};
use crate::sim::rng::Rng;

const CALL_TIMEOUT: u64 = 30_000;
/// The real service holds a poll for 20 s of a lease of 1200 s; one with leases of 15 s, for longer than a lease.
const LONG_POLL_SHARES: [u64; 3] = [60, 60, 1];
/// Longer than the lease of a claim that is granted at the end of it.
const LONG_POLL_EXTRA: u64 = 5_000;
const LONG_POLL_TIMEOUT: u64 = 60_000;
const EVENTS_MAX: u64 = 2_000_000;

#[derive(Debug, Clone)]
pub enum Call {
    Open,
    Poll { lane: PriorityQueue, max: u8 },
    Recover { held: Vec<Run>, newer_than: Option<Duration> },
    Claim { claim: LocalToken, run: Run },
    TakeOver { claim: LocalToken, run: Run },
    Delete { message: LocalToken, id: u64, receipt: u64 },
    Reclaim { claim: LocalToken, run: Run },
    Report { claim: LocalToken, run: Run, outcome: Outcome },
    Check { claim: LocalToken, run: Run },
}

/// What the queue says to a call.
#[derive(Debug, Clone)]
pub enum Answer {
    Opened,
    Entries(Vec<Received>, Vec<u32>),
    Granted(Vec<(Run, Duration)>),
    /// The same as `Granted`, and there is more that could not be.
    Partly(Vec<(Run, Duration)>),
    Length(Duration),
    Done,
    /// Why the run is not the host's.
    Lost(Option<LossReason>),
}

impl Answer {
    fn expect_length(self) -> Duration {
        match self {
            Self::Length(length) => length,
            other => unreachable!("{other:?}"),
        }
    }
}

#[derive(Debug, Clone)]
struct Request {
    host: usize,
    life: u32,
    call: Call,
    sent_at: Instant,
    /// The time at which the caller stops waiting.
    gives_up: u64,
    back: Back,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Back {
    After(u64),
    Lost,
    /// The connection breaks instead of a reply.
    Broken(u64),
}

#[derive(Debug)]
enum Happens {
    Arrive(Request),
    Reply { request: Request, answer: Result<Answer, Refusal> },
    AtHost { host: usize, life: u32, event: HostEvent },
    LongPollOver { id: u64 },
    Expiry { run: Run },
    Create,
    Cancel,
    Incident { host: usize, fault: Fault },
    Start { host: usize },
    Calm,
}

/// What happens at a host, unless its process ends before.
#[derive(Debug)]
enum HostEvent {
    Wake(u64),
    Prepared(LocalToken, Result<(), PrepareFailure>),
    Ended(LocalToken, Verdict),
    Uploaded(LocalToken, UploadStatus),
    Probed(ProbeResult),
    ServiceUp,
    SessionLost(Vec<LocalToken>),
}

#[derive(Debug)]
pub struct World {
    pub seed: u64,
    pub now: u64,
    rng: Rng,
    pub queue: Queue,
    pub hosts: Vec<Host>,
    agenda: BTreeMap<(u64, u64), Happens>,
    order: u64,
    enabled: BTreeSet<Fault>,
    pub calm: bool,
    calm_at: u64,
    pub totals: FaultTotals,
    waiters: BTreeMap<u64, Request>,
    long_poll: u64,
    errors_until: u64,
    forbidden_until: u64,
    stale: BTreeSet<usize>,
    alive: BTreeMap<TaskId, BTreeSet<usize>>,
    pub trace: Option<Vec<String>>,
    events: u64,
    /// The time of the request whose reply is being delivered.
    pub sent_at: Instant,
    /// That request was a poll.
    sent_poll: bool,
}

impl World {
    pub fn new(seed: u64, trace: bool) -> Self {
        let mut rng = Rng::new(seed);
        let lease_ms = rng.pick(&[20_000, 60_000, 300_000, 1_200_000]);
        let hosts = rng.between(1, 3);
        let hosts = (0..hosts).map(|_| Host::new(lease_ms, &mut rng)).collect();
        let long_poll = match rng.pick(&LONG_POLL_SHARES) {
            1 => (lease_ms + LONG_POLL_EXTRA).min(LONG_POLL_TIMEOUT / 2),
            share => lease_ms / share,
        };
        let share = rng.pick(&[0, 20, 50, 90]);
        let enabled = ALL.iter().copied().filter(|_| rng.chance(share)).collect();
        let mut world = Self {
            seed,
            now: 0,
            rng,
            queue: Queue::new(lease_ms),
            hosts,
            agenda: BTreeMap::new(),
            order: 0,
            enabled,
            calm: false,
            calm_at: 0,
            totals: FaultTotals::default(),
            waiters: BTreeMap::new(),
            long_poll,
            errors_until: 0,
            forbidden_until: 0,
            stale: BTreeSet::new(),
            alive: BTreeMap::new(),
            trace: trace.then(Vec::new),
            events: 0,
            sent_at: Instant::ORIGIN,
            sent_poll: false,
        };
        world.plan();
        world
    }

    fn plan(&mut self) {
        let span = self.queue.lease_ms * 5;
        for host in 0..self.hosts.len() {
            let fast = if self.hit(Fault::ClockFast, 50) { 500 } else { 0 };
            let slow = if self.hit(Fault::ClockSlow, 50) { -500 } else { 0 };
            self.hosts[host].ppm = if fast != 0 { fast } else { slow };
            let at = self.rng.below(5_000);
            self.at(at, Happens::Start { host });
        }
        for _ in 0..self.rng.between(3, 12) {
            let at = self.rng.below(span);
            self.at(at, Happens::Create);
        }
        if self.enabled.contains(&Fault::TaskCanceled) {
            let at = self.rng.below(span);
            self.at(at, Happens::Cancel);
        }
        let incidents = [
            Fault::Crash,
            Fault::Suspend,
            Fault::Drain,
            Fault::HandBackNoDeadline,
            Fault::HandBack120s,
            Fault::HandBack30s,
            Fault::HandBackNow,
            Fault::SecondSignal,
            Fault::Abort,
            Fault::SpotNotice120s,
            Fault::SpotNotice30s,
            Fault::SpotNoticeWithoutTime,
            Fault::SpotNoticeThenSignal,
            Fault::EarlierNotice,
            Fault::QueueRestart,
            Fault::SessionLost,
            Fault::Quarantine,
            Fault::HostUnfit,
            Fault::ServiceGone,
            Fault::OperatorHandsBack,
            Fault::OperatorCancels,
            Fault::PartitionedReplies,
            Fault::InternalErrorForMinutes,
            Fault::ForbiddenForAWhile,
            Fault::UrlsExpired,
            Fault::Undecodable,
            Fault::UnknownTask,
            Fault::HighDequeueCount,
        ];
        for fault in incidents {
            if self.enabled.contains(&fault) {
                // Orders strike only where something is held.
                let most = if matches!(fault, Fault::OperatorHandsBack | Fault::OperatorCancels) { 8 } else { 2 };
                for _ in 0..self.rng.between(0, most) {
                    let host = usize::try_from(self.rng.below(self.hosts.len() as u64)).expect("small");
                    let at = self.rng.below(span);
                    self.at(at, Happens::Incident { host, fault });
                }
            }
        }
        self.at(span, Happens::Calm);
    }

    fn at(&mut self, at: u64, what: Happens) {
        self.order += 1;
        self.agenda.insert((at.max(self.now), self.order), what);
    }

    /// Something happens at a host so many milliseconds later.
    fn later(&mut self, host: usize, took: u64, event: HostEvent) {
        self.at(self.now + took, Happens::AtHost { host, life: self.hosts[host].life, event });
    }

    fn note(&mut self, what: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            let line = format!("{:>9}.{:03}  {}", self.now / 1_000, self.now % 1_000, what());
            trace.push(line);
        }
    }

    /// True if an enabled fault strikes now.
    fn hit(&mut self, fault: Fault, percent: u64) -> bool {
        let strikes = !self.calm && self.enabled.contains(&fault) && self.rng.chance(percent);
        if strikes {
            self.totals.count(fault);
            self.note(|| format!("fault {fault:?}"));
        }
        strikes
    }

    /// Runs to the end of the liveness phase.
    pub fn run(&mut self) {
        while let Some(((at, _), happens)) = self.agenda.pop_first() {
            self.now = at;
            self.events += 1;
            let tail = || {
                self.trace.as_ref().map_or(String::new(), |trace| trace[trace.len().saturating_sub(40)..].join("\n"))
            };
            assert!(self.events < EVENTS_MAX, "{}\nseed {}: no end after {EVENTS_MAX} events", tail(), self.seed);
            self.happen(happens);
            if self.calm && self.done() {
                return;
            }
        }
        panic!("seed {}: nothing left to happen, and not done", self.seed);
    }

    fn done(&mut self) -> bool {
        let limit = self.queue.lease_ms * 5 + 40 * self.queue.lease_ms + 12 * 3_600_000;
        // Messages are for the hosts that speak of them; without one they stay.
        let tidy = self.queue.entries.is_empty() || self.hosts.iter().all(|host| !host.azure);
        let done = self.queue.unresolved() == 0 && tidy;
        assert!(
            done || self.now < limit,
            "{}\nseed {}: not all tasks resolved in the calm: {:?}",
            self.trace.as_ref().map_or(String::new(), |trace| trace.join("\n")),
            self.seed,
            self.queue
        );
        done && self.hosts.iter().all(|host| host.claims.is_empty())
    }

    fn suspended(&self, host: usize) -> Option<u64> {
        let until = self.hosts[host].suspended_until;
        (until > self.now).then_some(until)
    }

    fn happen(&mut self, happens: Happens) {
        let concerned = match &happens {
            Happens::Reply { request, .. } => Some((request.host, request.life)),
            Happens::AtHost { host, life, .. } => Some((*host, *life)),
            _ => None,
        };
        if let Some((host, life)) = concerned {
            if self.hosts[host].life != life || self.hosts[host].worker.is_none() {
                return;
            }
            if let Some(until) = self.suspended(host) {
                return self.at(until, happens);
            }
        }
        match happens {
            Happens::Arrive(request) => self.arrive(request),
            Happens::Reply { request, answer } => self.reply(request, answer),
            Happens::AtHost { host, event, .. } => self.happen_at(host, event),
            Happens::LongPollOver { id } => {
                if let Some(request) = self.waiters.remove(&id) {
                    self.send_back(request, Ok(Answer::Granted(Vec::new())));
                }
            }
            Happens::Expiry { run } => {
                self.queue.expire(&run, self.now);
                self.serve_waiters();
            }
            Happens::Create => {
                let lane = u16::try_from(self.rng.below(3)).expect("small");
                let retries = u32::try_from(self.rng.between(0, 5)).expect("small");
                let task = self.queue.create(lane, retries, self.now);
                self.note(|| format!("created {task} in lane {lane}"));
                self.serve_waiters();
            }
            Happens::Cancel => {
                let tasks: Vec<TaskId> = self.queue.tasks.keys().cloned().collect();
                if let Some(task) = tasks.first() {
                    self.totals.count(Fault::TaskCanceled);
                    self.note(|| format!("canceled {task}"));
                    self.queue.cancel(task, self.now);
                }
            }
            Happens::Incident { host, fault } => self.incident(host, fault),
            Happens::Start { host } if self.hosts[host].worker.is_some() => {}
            Happens::Start { host } => {
                let mut rng = self.rng.clone();
                let told = self.hosts[host].start(&mut rng, self.now);
                self.rng = rng;
                self.note(|| format!("host {host} starts"));
                for event in told {
                    self.tell(host, event);
                }
                self.tell(host, Event::Tick);
            }
            Happens::Calm => self.become_calm(),
        }
    }

    fn happen_at(&mut self, host: usize, event: HostEvent) {
        match event {
            HostEvent::Wake(wake) if self.hosts[host].wake == wake => self.tell(host, Event::Tick),
            HostEvent::Wake(_) => {}
            HostEvent::Probed(condition) => {
                self.hosts[host].known_unfit &= condition == ProbeResult::Unhealthy;
                self.tell(host, Event::HostProbed(condition));
            }
            HostEvent::ServiceUp => self.serve(host, ServiceAvailability::Up),
            HostEvent::SessionLost(held) => {
                for claim in held {
                    if let Some(track) = self.hosts[host].claims.get_mut(&claim) {
                        track.told_gone = true;
                        self.tell(host, Event::Claim(claim, ClaimEvent::Lost));
                    }
                }
            }
            HostEvent::Prepared(claim, answer) => {
                self.note_host_fault(host, claim, answer == Err(PrepareFailure::HostFault));
                if self.hosts[host].claims.get(&claim).is_some_and(|track| !track.killed) {
                    self.tell(host, Event::Claim(claim, ClaimEvent::Prepared(answer)));
                }
            }
            HostEvent::Ended(claim, verdict) => self.payload_ended(host, claim, verdict),
            HostEvent::Uploaded(claim, status) => self.tell(host, Event::Claim(claim, ClaimEvent::Uploaded(status))),
        }
    }

    fn become_calm(&mut self) {
        self.calm = true;
        self.calm_at = self.now;
        self.note(|| "calm".to_owned());
        self.errors_until = 0;
        self.forbidden_until = 0;
        for host in 0..self.hosts.len() {
            self.hosts[host].quarantined_until = 0;
            self.hosts[host].partitioned_until = 0;
            self.hosts[host].unfit_until = 0;
            self.serve(host, ServiceAvailability::Up);
            if self.hosts[host].worker.is_none() {
                self.at(self.now, Happens::Start { host });
            }
        }
    }

    fn incident(&mut self, host: usize, fault: Fault) {
        self.totals.count(fault);
        self.note(|| format!("incident {fault:?} at host {host}"));
        match fault {
            Fault::Crash => self.stop_host(host),
            Fault::Suspend => {
                let until = self.now + self.rng.between(1_000, self.queue.lease_ms * 2);
                self.hosts[host].suspended_until = until;
                for track in self.hosts[host].claims.values_mut() {
                    track.suspended = true;
                }
            }
            Fault::Drain => self.tell_stop(host, Event::Drain { deadline: None }, None),
            Fault::HandBackNoDeadline => self.tell_stop(host, Event::Release { deadline: None }, None),
            Fault::HandBack120s => self.hand_back(host, 120),
            Fault::HandBack30s => self.hand_back(host, 30),
            Fault::HandBackNow => self.hand_back(host, 0),
            Fault::SecondSignal => {
                self.tell_stop(host, Event::Drain { deadline: None }, None);
                self.tell_stop(host, Event::Release { deadline: None }, None);
            }
            Fault::Abort => self.tell_stop(host, Event::Abort, None),
            Fault::SpotNotice120s => self.notice(host, 120),
            Fault::SpotNotice30s => self.notice(host, 30),
            Fault::SpotNoticeWithoutTime => self.tell_stop(host, Event::TerminationNotice { deadline: None }, None),
            Fault::SpotNoticeThenSignal => {
                self.notice(host, 120);
                self.tell_stop(host, Event::Drain { deadline: None }, None);
            }
            Fault::EarlierNotice => [600, 90, 300].into_iter().for_each(|seconds| self.notice(host, seconds)),
            Fault::QueueRestart => {
                for (_, request) in std::mem::take(&mut self.waiters) {
                    self.send_back(request, Err(Refusal::Retry { retry_after: None }));
                }
            }
            Fault::SessionLost => self.lose_session(host),
            Fault::HostUnfit => self.hosts[host].unfit_until = self.now + self.rng.between(1_000, 1_000_000),
            Fault::ServiceGone => {
                self.serve(host, ServiceAvailability::Down);
                let took = self.rng.between(1_000, 600_000);
                self.later(host, took, HostEvent::ServiceUp);
            }
            Fault::OperatorHandsBack => self.order(host, CancelCommand::Release),
            Fault::OperatorCancels => self.order(host, CancelCommand::Cancel),
            Fault::Quarantine => self.hosts[host].quarantined_until = self.now + self.rng.between(1_000, 600_000),
            Fault::PartitionedReplies => {
                self.hosts[host].partitioned_until = self.now + self.rng.between(1_000, self.queue.lease_ms * 2);
            }
            Fault::InternalErrorForMinutes => self.errors_until = self.now + self.rng.between(1_000, 300_000),
            Fault::ForbiddenForAWhile => self.forbidden_until = self.now + self.rng.between(1_000, 1_000_000),
            Fault::UrlsExpired => {
                self.stale.insert(host);
            }
            Fault::Undecodable => self.queue.put(0, None, 0, self.now),
            Fault::UnknownTask => {
                let task = TaskId::parse("unknown").expect("a task id");
                self.queue.put(1, Some(Run { task, run: 0 }), 0, self.now);
            }
            Fault::HighDequeueCount => {
                let task = TaskId::parse("unknown-too").expect("a task id");
                self.queue.put(2, Some(Run { task, run: 0 }), crate::sim::host::DEQUEUE_ALERT, self.now);
            }
            other => unreachable!("{other:?} is no incident"),
        }
    }

    fn serve(&mut self, host: usize, serving: ServiceAvailability) {
        if self.suspended(host).is_none() && std::mem::replace(&mut self.hosts[host].serving, serving) != serving {
            self.tell(host, Event::ServiceAvailabilityChanged { source: SourceId(0), availability: serving });
        }
    }

    /// One of the host's claims, whatever it is doing; the order may be repeated, or the other one follow it.
    fn order(&mut self, host: usize, first: CancelCommand) {
        let claims: Vec<LocalToken> = self.hosts[host].claims.keys().copied().collect();
        if claims.is_empty() || self.suspended(host).is_some() {
            return;
        }
        let claim = self.rng.pick(&claims);
        let second = self.rng.pick(&[None, Some(CancelCommand::Release), Some(CancelCommand::Cancel)]);
        for order in [Some(first), second].into_iter().flatten() {
            if let Some(track) = self.hosts[host].claims.get_mut(&claim).filter(|track| track.reports == 0) {
                track.ordered = track.ordered.max(Some(order));
            }
            self.tell(host, Event::Claim(claim, ClaimEvent::Command(order)));
        }
    }

    fn hand_back(&mut self, host: usize, seconds: u64) {
        let deadline = self.hosts[host].local(self.now).plus(Duration::from_secs(seconds));
        self.tell_stop(host, Event::Release { deadline: Some(deadline) }, Some(deadline));
    }

    fn notice(&mut self, host: usize, seconds: u64) {
        let deadline = self.hosts[host].local(self.now).plus(Duration::from_secs(seconds));
        self.tell_stop(host, Event::TerminationNotice { deadline: Some(deadline) }, Some(deadline));
    }

    fn tell_stop(&mut self, host: usize, event: Event, deadline: Option<Instant>) {
        if self.hosts[host].worker.is_none() || self.suspended(host).is_some() {
            return;
        }
        let before = self.hosts[host].stop;
        let deadline = [before.and_then(|stop| stop.deadline), deadline].into_iter().flatten().min();
        // A worker that the queue refuses has begun to drain by itself, at a time of its own.
        let refused = before.is_none() && self.hosts[host].worker.as_ref().is_some_and(|worker| worker.is_stopping());
        let from = if refused {
            Some(Instant::ORIGIN)
        } else {
            self.hosts[host].hand_back_from(&event, self.hosts[host].local(self.now))
        };
        let hand_back_from = [before.and_then(|stop| stop.hand_back_from), from].into_iter().flatten().min();
        self.hosts[host].stop = Some(Stop { deadline, hand_back_from });
        self.hosts[host].ever_stopped = true;
        let at_once = matches!(event, Event::Release { .. } | Event::TerminationNotice { deadline: None });
        self.tell(host, event);
        if at_once {
            self.check_all_told(host);
        }
    }

    /// Others may run at once what the host held, which it is told at any later moment, unless a call tells it before.
    fn lose_session(&mut self, host: usize) {
        if !self.hosts[host].has_session {
            return;
        }
        self.queue.end_session(host, self.now);
        self.hosts[host].session_since = self.hosts[host].local(self.now);
        let held = self.hosts[host].claims.iter_mut().map(|(claim, track)| {
            track.suspended = true;
            *claim
        });
        let held = held.collect();
        let took = self.rng.below(self.queue.lease_ms);
        self.later(host, took, HostEvent::SessionLost(held));
        self.serve_waiters();
    }

    /// The process is gone without a word; its payloads with it. It is started again some time later.
    fn stop_host(&mut self, host: usize) {
        if self.hosts[host].worker.is_none() {
            return;
        }
        for track in self.hosts[host].claims.values() {
            if track.alive_since.is_some()
                && let Some(hosts) = self.alive.get_mut(&track.run.task)
            {
                hosts.remove(&host);
            }
        }
        self.hosts[host].stopped();
        self.hosts[host].life += 1;
        let again = self.now + self.rng.between(100, 60_000);
        self.at(again, Happens::Start { host });
    }

    pub fn exited(&mut self, host: usize, exit: ExitReason) {
        self.note(|| format!("host {host} exits: {exit:?}"));
        self.check_exit(host, exit);
        self.stop_host(host);
    }

    // --- the host

    pub fn tell(&mut self, host: usize, event: Event) {
        let now = self.hosts[host].local(self.now);
        if self.trace.is_some() {
            let next = self.hosts[host].worker.as_ref().and_then(|worker| worker.next_deadline());
            let line = format!("host {host} <- {event:?} at {now:?}, due {next:?}");
            self.note(|| line);
        }
        let Some(worker) = self.hosts[host].worker.as_mut() else { return };
        worker.handle(event, now);
        let life = self.hosts[host].life;
        while let Some(effect) =
            self.hosts[host].worker.as_mut().and_then(journeyman_domain::worker::Worker::next_effect)
        {
            if self.trace.is_some() {
                let line = format!("host {host} -> {effect:?}");
                self.note(|| line);
            }
            self.check_effect(host, &effect);
            self.perform(host, effect);
            if self.hosts[host].life != life {
                return;
            }
        }
        self.hosts[host].note_polls(self.now);
        self.note_expired(host);
        self.check_capacity(host);
        self.check_told_in_time(host);
        self.set_wake(host);
    }

    fn set_wake(&mut self, host: usize) {
        let late = if self.hit(Fault::TimerLate, 5) { self.rng.below(self.queue.lease_ms / 20).min(240) } else { 0 };
        let Some(at) = self.hosts[host].worker.as_ref().and_then(journeyman_domain::worker::Worker::next_deadline)
        else {
            return;
        };
        self.hosts[host].wake += 1;
        let took = (self.hosts[host].truth(at) + late).saturating_sub(self.now);
        self.later(host, took, HostEvent::Wake(self.hosts[host].wake));
    }

    fn perform(&mut self, host: usize, effect: Effect) {
        let run_of =
            |world: &Self, claim: LocalToken| world.hosts[host].claims.get(&claim).map(|track| track.run.clone());
        match effect {
            Effect::Open(_) => self.send(host, Call::Open, CALL_TIMEOUT),
            Effect::Poll { queue: lane, max, .. } => {
                self.hosts[host].reserved += u32::from(max);
                self.hosts[host].note_polls(self.now);
                let timeout = if self.hosts[host].azure { CALL_TIMEOUT } else { LONG_POLL_TIMEOUT };
                self.send(host, Call::Poll { lane, max }, timeout);
            }
            Effect::Recover { known_runs: held, newer_than, .. } => {
                self.send(host, Call::Recover { held, newer_than }, CALL_TIMEOUT)
            }
            Effect::Claim(claim, ClaimAction::Request) => {
                let run = run_of(self, claim).expect("check_effect made the track");
                self.send(host, Call::Claim { claim, run }, CALL_TIMEOUT);
            }
            Effect::Claim(claim, ClaimAction::TakeOver) => {
                let run = run_of(self, claim).expect("made at the start");
                self.send(host, Call::TakeOver { claim, run }, CALL_TIMEOUT);
            }
            Effect::Delete(message) => {
                let Received { id, receipt, .. } = self.hosts[host].entries[&message].clone();
                self.send(host, Call::Delete { message, id, receipt }, CALL_TIMEOUT);
            }
            Effect::DropMessage(token) => {
                // Either a message, or a claim that was brought and not taken in hand.
                if self.hosts[host].entries.remove(&token).is_none() {
                    self.hosts[host].claims.remove(&token);
                }
            }
            Effect::Claim(claim, ClaimAction::Prepare) => {
                let run = run_of(self, claim).expect("a claim");
                let held = ClaimRecord { run, claimant: CLAIMANT.into(), processes: None };
                self.hosts[host].note(JournalRecord::Claimed { entry: EntryId(claim.0), claim: held });
                self.prepare(host, claim);
            }
            Effect::Claim(claim, ClaimAction::Execute | ClaimAction::Start) => self.execute(host, claim),
            Effect::Claim(claim, ClaimAction::Kill { grace, .. }) => self.kill(host, claim, grace),
            Effect::Claim(claim, ClaimAction::Upload) => self.settle(host, claim),
            Effect::Claim(claim, ClaimAction::Report { outcome, timeout }) => {
                // The record may be lost with the host, unless a caller waits for it.
                if let Some(run) = run_of(self, claim).filter(|_| !self.rng.chance(10)) {
                    let held = ClaimRecord { run, claimant: CLAIMANT.into(), processes: None };
                    self.hosts[host].note(JournalRecord::Claimed { entry: EntryId(claim.0), claim: held });
                    self.hosts[host].note(JournalRecord::OutcomeDecided { entry: EntryId(claim.0), outcome });
                }
                if let Some(run) = run_of(self, claim) {
                    self.send(host, Call::Report { claim, run, outcome }, millis(timeout));
                }
            }
            Effect::Claim(claim, ClaimAction::Reclaim { timeout }) => {
                if let Some(run) = run_of(self, claim) {
                    self.send(host, Call::Reclaim { claim, run }, millis(timeout));
                }
            }
            Effect::Claim(claim, ClaimAction::CheckStatus) => {
                if let Some(run) = run_of(self, claim) {
                    self.send(host, Call::Check { claim, run }, CALL_TIMEOUT);
                }
            }
            Effect::ProbeHost => {
                // A look may miss what is wrong.
                let missed = self.rng.chance(10);
                let unfit = self.now < self.hosts[host].unfit_until && !missed;
                let condition = if unfit { ProbeResult::Unhealthy } else { ProbeResult::Healthy };
                let took = self.rng.between(1, 10_000);
                self.later(host, took, HostEvent::Probed(condition));
            }
            // A host has one source, so no other wants its slots.
            Effect::ClosePoll(_) => unreachable!("host {host} closes its poll"),
            Effect::Claim(_, ClaimAction::UpdateLease(_)) | Effect::Alert(_) => {}
            Effect::Claim(claim, ClaimAction::Close(end)) => {
                self.hosts[host].claims.remove(&claim);
                if !journal::is_left_to_next_process(end) && !self.rng.chance(10) {
                    self.hosts[host].note(JournalRecord::Closed { entry: EntryId(claim.0) });
                }
            }
            Effect::Exit(exit) => self.exited(host, exit),
        }
    }

    fn prepare(&mut self, host: usize, claim: LocalToken) {
        let mut took = self.rng.between(0, 2_000);
        if self.hit(Fault::SlowPrepare, 10) {
            took = self.rng.between(0, self.queue.lease_ms * 2);
        }
        let unfit = self.now < self.hosts[host].unfit_until;
        let answer = if unfit && self.rng.chance(50) {
            Err(PrepareFailure::HostFault)
        } else if self.hosts[host].serving == ServiceAvailability::Down && self.rng.chance(50) {
            Err(PrepareFailure::ServiceDown)
        } else if self.hit(Fault::Malformed, 10) {
            Err(PrepareFailure::Malformed)
        } else if self.hit(Fault::Unavailable, 5) {
            Err(PrepareFailure::Unavailable)
        } else {
            Ok(())
        };
        self.later(host, took, HostEvent::Prepared(claim, answer));
    }

    fn execute(&mut self, host: usize, claim: LocalToken) {
        let ignores_term = self.hit(Fault::IgnoresTerm, 20);
        let never_ends = self.hit(Fault::NeverEnds, 5);
        let took = if self.rng.chance(50) { self.rng.below(3_000) } else { self.rng.below(self.queue.lease_ms * 2) };
        let unfit = self.now < self.hosts[host].unfit_until;
        let verdict = if unfit {
            Err(ExecuteFailure::HostFault)
        } else if self.hosts[host].serving == ServiceAvailability::Down && self.rng.chance(50) {
            Err(ExecuteFailure::ServiceDown)
        } else if self.hit(Fault::Panics, 5) {
            Err(ExecuteFailure::Internal)
        } else if self.hit(Fault::Intermittent, 10) {
            Err(ExecuteFailure::Intermittent)
        } else {
            self.rng.pick(&[Ok(()), Ok(()), Ok(()), Err(ExecuteFailure::Failed)])
        };
        let track = self.hosts[host].claims.get_mut(&claim).expect("a claim");
        track.alive_since = Some(self.now);
        track.ignores_term = ignores_term;
        let task = track.run.task.clone();
        self.alive.entry(task).or_default().insert(host);
        // Nothing runs for ever: a canceled task of this kind is noticed by its worker, any other has a limit of its own.
        let took = if never_ends { self.queue.lease_ms * 12 } else { took };
        self.later(host, took, HostEvent::Ended(claim, verdict));
    }

    fn kill(&mut self, host: usize, claim: LocalToken, grace: Duration) {
        let Some(track) = self.hosts[host].claims.get_mut(&claim) else { return };
        track.killed = true;
        let took = if track.ignores_term { millis(grace) } else { self.rng.below(millis(grace) + 1) };
        let took = if self.hosts[host].claims[&claim].alive_since.is_some() { took } else { 0 };
        self.later(host, took, HostEvent::Ended(claim, Err(ExecuteFailure::Failed)));
    }

    fn payload_ended(&mut self, host: usize, claim: LocalToken, verdict: Verdict) {
        let Some(track) = self.hosts[host].claims.get_mut(&claim) else { return };
        if std::mem::replace(&mut track.ended, true) {
            return;
        }
        track.verdict = Some(verdict);
        let task = track.run.task.clone();
        if track.alive_since.is_some() {
            self.check_outlived(host, claim);
            self.alive.entry(task).or_default().remove(&host);
            self.hosts[host].claims.get_mut(&claim).expect("a claim").alive_since = None;
        }
        self.note_host_fault(host, claim, verdict == Err(ExecuteFailure::HostFault));
        self.tell(host, Event::Claim(claim, ClaimEvent::Ended(verdict)));
    }

    fn note_host_fault(&mut self, host: usize, claim: LocalToken, fault: bool) {
        let told = self.hosts[host].claims.get(&claim).is_some_and(|track| !track.killed);
        self.hosts[host].known_unfit |= fault && told;
    }

    fn settle(&mut self, host: usize, claim: LocalToken) {
        let mut took = self.rng.between(0, 500);
        if self.hit(Fault::SlowSettle, 10) {
            took = self.rng.between(0, self.queue.lease_ms * 2);
        }
        let status = if self.hit(Fault::ArtifactMissing, 5) {
            UploadStatus::ArtifactMissing
        } else if self.hit(Fault::ArtifactUnstored, 5) {
            UploadStatus::UploadFailed
        } else {
            UploadStatus::Complete
        };
        self.later(host, took, HostEvent::Uploaded(claim, status));
    }

    // --- the network

    fn send(&mut self, host: usize, call: Call, timeout: u64) {
        let sent_at = self.hosts[host].local(self.now);
        let gives_up = self.now + timeout;
        let mut request = Request {
            host,
            life: self.hosts[host].life,
            call,
            sent_at,
            gives_up,
            back: Back::After(self.rng.between(1, 40)),
        };
        let mut there = self.rng.between(1, 40);
        let instantly = [Fault::Refused, Fault::DnsFailure, Fault::TlsFailure];
        for fault in instantly {
            if self.hit(fault, 2) {
                return self
                    .at(self.now + 1, Happens::Reply { request, answer: Err(Refusal::Retry { retry_after: None }) });
            }
        }
        if self.hit(Fault::BlackHole, 2) {
            return self.at(gives_up, Happens::Reply { request, answer: Err(Refusal::Retry { retry_after: None }) });
        }
        if self.hit(Fault::ReplyLost, 3) || self.now < self.hosts[host].partitioned_until {
            request.back = Back::Lost;
        } else if self.hit(Fault::ResetMidBody, 3) || self.hit(Fault::Proxy504AfterCommit, 2) {
            request.back = Back::Broken(self.rng.between(1, 5_000));
        } else if self.hit(Fault::InternalErrorAfterCommit, 3) {
            request.back = Back::Broken(10);
        } else if self.hit(Fault::SlowReply, 3) {
            request.back = Back::After(self.rng.between(1, 120_000));
        }
        if self.hit(Fault::LateRequest, 2) {
            there = timeout + self.rng.between(1, 60_000);
            request.back = Back::Lost;
        }
        if there >= timeout || request.back == Back::Lost {
            self.at(
                gives_up,
                Happens::Reply { request: request.clone(), answer: Err(Refusal::Retry { retry_after: None }) },
            );
        }
        self.at(self.now + there, Happens::Arrive(request));
    }

    fn send_back(&mut self, request: Request, answer: Result<Answer, Refusal>) {
        let silent = Err(Refusal::Retry { retry_after: None });
        match request.back {
            // The caller got its answer when it timed out.
            Back::Lost => {}
            Back::Broken(took) => {
                let at = (self.now + took).min(request.gives_up);
                self.at(at, Happens::Reply { request, answer: silent });
            }
            Back::After(took) if self.now + took >= request.gives_up => {
                self.at(request.gives_up, Happens::Reply { request, answer: silent });
            }
            Back::After(took) => self.at(self.now + took, Happens::Reply { request, answer }),
        }
    }

    fn arrive(&mut self, request: Request) {
        if let Some(refusal) = self.service_fault(&request) {
            return self.send_back(request, Err(refusal));
        }
        let host = request.host;
        let answer = match request.call.clone() {
            Call::Open => {
                self.stale.remove(&host);
                Ok(Answer::Opened)
            }
            Call::Poll { lane, max } if self.hosts[host].azure => Ok(self.receive(lane, max)),
            Call::Poll { max, .. } => return self.claim_work(request, max),
            Call::Recover { held, newer_than } => {
                let mut granted = Vec::new();
                let mut missed = false;
                let took = self.hosts[host].local(self.now).since(request.sent_at);
                for run in self.queue.claimed_by(host).into_iter().filter(|run| !held.contains(run)) {
                    let ago = Duration::from_millis(self.now - self.queue.claimed[&run]);
                    if newer_than.is_none_or(|age| ago > age.saturating_add(took)) {
                        continue;
                    }
                    if self.hit(Fault::RecoveryPartly, 30) {
                        missed = true;
                    } else if let Ok(Answer::Length(length)) = self.length(|queue, now| queue.reclaim(host, &run, now))
                    {
                        granted.push((run, length));
                    }
                }
                match granted.is_empty() {
                    _ if !missed => Ok(Answer::Granted(granted)),
                    true => Err(Refusal::Retry { retry_after: None }),
                    false => Ok(Answer::Partly(granted)),
                }
            }
            Call::Claim { run, .. } => self.length(|queue, now| queue.claim(host, &run, now)),
            Call::TakeOver { run, .. } => {
                self.check_taken_over(host, &run);
                // In the older dialect by claiming it once more, which it grants to the same worker, and extending that.
                if self.hosts[host].azure && self.queue.claim(host, &run, self.now).is_err() {
                    Err(Refusal::Gone)
                } else {
                    self.length(|queue, now| queue.reclaim(host, &run, now))
                }
            }
            Call::Delete { id, receipt, .. } => {
                let deleted = !self.hit(Fault::DeleteMismatch, 3) && self.queue.delete(id, receipt);
                if deleted { Ok(Answer::Done) } else { Err(Refusal::Rejected) }
            }
            Call::Reclaim { run, .. } => self.length(|queue, now| queue.reclaim(host, &run, now)),
            Call::Report { run, outcome, .. } => {
                self.queue.report(host, &run, outcome, self.now).map(|()| Answer::Done).map_err(|()| Refusal::Gone)
            }
            Call::Check { run, .. } => Ok(Answer::Lost(match self.queue.state(&run) {
                Some(State::Running { host: owner, .. }) if owner == host => None,
                Some(State::Done { how: How::Canceled, .. }) => Some(LossReason::Canceled),
                _ => Some(LossReason::Revoked),
            })),
        };
        self.watch_expiries(&request, &answer);
        self.send_back(request, answer);
        self.serve_waiters();
    }

    /// What the service refuses before it does anything.
    fn service_fault(&mut self, request: &Request) -> Option<Refusal> {
        let host = request.host;
        if self.now < self.errors_until || self.hit(Fault::InternalErrorBeforeCommit, 2) || self.hit(Fault::Proxy502, 2)
        {
            return Some(Refusal::Retry { retry_after: None });
        }
        if self.hit(Fault::Html200, 1) || self.hit(Fault::Redirect, 1) {
            return Some(Refusal::Retry { retry_after: None });
        }
        if self.hit(Fault::TooManyRequests, 1) {
            return Some(Refusal::Throttled { retry_after: None });
        }
        if self.hit(Fault::TooManyRequestsWithRetryAfter, 1) {
            return Some(Refusal::Throttled { retry_after: Some(Duration::from_secs(self.rng.between(1, 120))) });
        }
        let azure = self.hosts[host].azure;
        match request.call {
            Call::Delete { .. } if self.hit(Fault::DeleteForbidden, 3) => return Some(Refusal::Stale),
            Call::Delete { .. } => return None,
            Call::Poll { .. } if azure => {
                let stale = self.stale.contains(&host) || self.hit(Fault::QueueNotFound, 1);
                return stale.then_some(Refusal::Stale);
            }
            Call::Claim { .. } if self.now < self.hosts[host].quarantined_until => {
                return Some(Refusal::Retry { retry_after: None });
            }
            Call::Claim { .. } if self.misconfigured(host) => return Some(Refusal::Rejected),
            Call::Open | Call::Poll { .. } | Call::Recover { .. } | Call::Claim { .. } | Call::TakeOver { .. } => {}
            Call::Reclaim { .. } | Call::Report { .. } | Call::Check { .. } => {}
        }
        if self.now < self.forbidden_until || self.hit(Fault::UnauthorizedOnce, 1) {
            return Some(Refusal::Denied);
        }
        None
    }

    /// A worker whose own requests are wrong: from its first claim to its last.
    fn misconfigured(&mut self, host: usize) -> bool {
        if self.hosts[host].request_good.is_none() {
            let good = !self.hit(Fault::WorkerRequestRejected, 5);
            self.hosts[host].request_good = Some(good);
        }
        self.hosts[host].request_good == Some(false)
    }

    fn receive(&mut self, lane: PriorityQueue, max: u8) -> Answer {
        let more = usize::from(self.hit(Fault::MoreThanAsked, 3));
        let mut entries = self.queue.receive(lane.0, usize::from(max) + more, self.now);
        if !entries.is_empty() && self.hit(Fault::SameMessageTwice, 10) {
            let mut again = entries[0].clone();
            let stored = self.queue.entries.get_mut(&again.id).expect("just received");
            stored.receipt += 1_000_000_000;
            again.receipt = stored.receipt;
            entries.push(again);
        }
        let counts = entries.iter().map(|entry| entry.dequeues).collect();
        let received =
            entries.into_iter().map(|entry| Received { id: entry.id, receipt: entry.receipt, run: entry.run });
        Answer::Entries(received.collect(), counts)
    }

    fn claim_work(&mut self, request: Request, max: u8) {
        let more = usize::from(self.hit(Fault::ClaimWorkUnasked, 2));
        if let Some(waiting) = self.grant_pending(request, usize::from(max) + more) {
            self.order += 1;
            let id = self.order;
            self.waiters.insert(id, waiting);
            self.at(self.now + self.long_poll, Happens::LongPollOver { id });
        }
    }

    /// Answers a poll with what is pending; the poll itself if nothing is.
    fn grant_pending(&mut self, request: Request, max: usize) -> Option<Request> {
        if self.now < self.hosts[request.host].quarantined_until {
            return Some(request);
        }
        let runs = self.queue.claim_work(request.host, max, self.now);
        if runs.is_empty() {
            return Some(request);
        }
        let answer = Ok(self.granted(runs));
        self.watch_expiries(&request, &answer);
        self.send_back(request, answer);
        None
    }

    fn serve_waiters(&mut self) {
        for (id, request) in std::mem::take(&mut self.waiters) {
            let Call::Poll { max, .. } = request.call else { continue };
            let connected = self.hosts[request.host].life == request.life && self.now < request.gives_up;
            if connected && let Some(waiting) = self.grant_pending(request, usize::from(max)) {
                self.waiters.insert(id, waiting);
            }
        }
    }

    /// The resolver looks at each claim when it should be over, up to 5 s late as the real one does.
    fn watch_expiries(&mut self, request: &Request, answer: &Result<Answer, Refusal>) {
        let runs: Vec<Run> = match (&request.call, answer) {
            (
                Call::Claim { run, .. } | Call::TakeOver { run, .. } | Call::Reclaim { run, .. },
                Ok(Answer::Length(_)),
            ) => vec![run.clone()],
            (_, Ok(Answer::Granted(granted) | Answer::Partly(granted))) => {
                granted.iter().map(|(run, _)| run.clone()).collect()
            }
            _ => Vec::new(),
        };
        for run in runs {
            if let Some(State::Running { taken_until, .. }) = self.queue.state(&run) {
                let late = self.rng.below(5_000);
                self.at(taken_until + late, Happens::Expiry { run });
            }
        }
    }

    /// What an adapter makes of `takenUntil` and a `Date` of whole seconds: never more than is left.
    fn left(&self, until: u64) -> Duration {
        Duration::from_millis(until.saturating_sub(self.now / 1_000 * 1_000 + 1_000))
    }

    fn length(&mut self, ask: impl FnOnce(&mut Queue, u64) -> Result<u64, ()>) -> Result<Answer, Refusal> {
        let until = ask(&mut self.queue, self.now).map_err(|()| Refusal::Gone)?;
        Ok(Answer::Length(self.left(until)))
    }

    fn granted(&self, runs: Vec<Run>) -> Answer {
        let length = self.left(self.now + self.queue.lease_ms);
        Answer::Granted(runs.into_iter().map(|run| (run, length)).collect())
    }

    // --- replies

    fn reply(&mut self, request: Request, answer: Result<Answer, Refusal>) {
        let Request { host, call, sent_at, .. } = request;
        self.sent_at = sent_at;
        let event = match call {
            Call::Open => {
                let usable_for = Some(Duration::from_millis(self.queue.lease_ms * 2));
                let count = self.hosts[host].priority_queues();
                self.hosts[host].next_queue = 0;
                let answer = answer.map(|_| OpenResult { priority_queues: count, usable_for });
                Event::Opened { source: SourceId(0), sent_at, answer }
            }
            Call::Poll { lane, max } => {
                self.hosts[host].reserved -= u32::from(max);
                // A claim of the session that was lost is known to be lost.
                let is_lost = self.hosts[host].has_session && sent_at <= self.hosts[host].session_since;
                let answer = if is_lost { Err(Refusal::Retry { retry_after: None }) } else { answer };
                self.sent_poll = true;
                let answer = answer.map(|answer| self.poll_result(host, answer));
                self.sent_poll = false;
                self.check_polled(host, lane, &answer);
                Event::Polled { source: SourceId(0), answer }
            }
            Call::Recover { .. } => {
                let answer = answer.map(|answer| self.found(host, answer));
                self.check_recovered(host, &answer);
                Event::Recovered { source: SourceId(0), answer }
            }
            Call::Claim { claim, run } => {
                let answer = answer.map(|answer| Granted { sent_at, length: answer.expect_length() });
                if answer.is_ok() {
                    let terms = self.terms(&run);
                    self.tell(host, Event::Claim(claim, ClaimEvent::Terms(terms)));
                }
                self.check_claimed(host, claim, sent_at, answer);
                Event::Claim(claim, ClaimEvent::Claimed(answer))
            }
            Call::TakeOver { claim, .. } => {
                let answer = answer.map(|answer| Granted { sent_at, length: answer.expect_length() });
                self.check_taken(host, claim, sent_at, answer);
                Event::Claim(claim, ClaimEvent::Claimed(answer))
            }
            Call::Delete { message, .. } => {
                let answer = answer.map(|_| ());
                self.check_deleted(host, message, answer);
                Event::Deleted { message, answer }
            }
            Call::Reclaim { claim, .. } => {
                let answer = answer.map(|answer| Granted { sent_at, length: answer.expect_length() });
                self.check_reclaimed(host, claim, answer);
                Event::Claim(claim, ClaimEvent::Reclaimed(answer))
            }
            Call::Report { claim, .. } => {
                let answer = answer.map(|_| ());
                if let Some(track) = self.hosts[host].claims.get_mut(&claim) {
                    track.answered |= matches!(answer, Ok(()) | Err(Refusal::Gone | Refusal::Rejected));
                }
                Event::Claim(claim, ClaimEvent::Reported(answer))
            }
            Call::Check { claim, .. } => {
                let answer = answer.map(|answer| if let Answer::Lost(loss) = answer { loss } else { None });
                if let Some(track) = self.hosts[host].claims.get_mut(&claim) {
                    track.told_canceled |= answer == Ok(Some(LossReason::Canceled));
                    track.told_gone |= answer == Ok(Some(LossReason::Revoked));
                }
                Event::Claim(claim, ClaimEvent::StatusChecked(answer))
            }
        };
        self.tell(host, event);
    }

    fn found(&mut self, host: usize, answer: Answer) -> RecoveryResult {
        let (answer, missed) = match answer {
            Answer::Partly(granted) => (Answer::Granted(granted), Some(Refusal::Retry { retry_after: None })),
            other => (other, None),
        };
        RecoveryResult { claims: self.poll_result(host, answer).claims, error: missed, foreign_claims: 0 }
    }

    fn poll_result(&mut self, host: usize, answer: Answer) -> PollResult {
        let mut polled = PollResult::default();
        match answer {
            Answer::Entries(entries, counts) => {
                for (entry, dequeue_count) in entries.into_iter().zip(counts) {
                    let token = self.hosts[host].token();
                    let (id, run) = (entry.id.to_string().into(), entry.run.clone());
                    polled.messages.push(ReceivedMessage { token, id, dequeue_count, run });
                    self.hosts[host].receipts.insert(entry.id, entry.receipt);
                    self.hosts[host].entries.insert(token, entry);
                }
            }
            Answer::Granted(granted) => {
                let unread = self.sent_poll && !granted.is_empty() && self.hit(Fault::ClaimUnreadable, 5);
                for (run, length) in granted {
                    let token = self.hosts[host].token();
                    if unread {
                        let id = run.to_string().into();
                        polled.messages.push(ReceivedMessage { token, id, dequeue_count: 1, run: None });
                        continue;
                    }
                    let mut track = Track::new(run.clone());
                    track.granted_calm = self.sent_in_calm(host, self.sent_at);
                    self.hosts[host].claims.insert(token, track);
                    let terms = self.terms(&run);
                    let lease = Granted { sent_at: self.sent_at, length };
                    polled.claims.push(GrantedClaim { token, run, lease, terms });
                }
            }
            Answer::Opened | Answer::Partly(_) | Answer::Length(_) | Answer::Done | Answer::Lost(_) => {
                unreachable!("no polls")
            }
        }
        polled
    }

    fn terms(&self, run: &Run) -> RunTerms {
        RunTerms { deadline: None, retries_left: Some(self.queue.retries_left(run)) }
    }

    /// What was sent in the very moment in which the calm began may have met a fault before.
    pub fn sent_in_calm(&self, host: usize, sent_at: Instant) -> bool {
        self.calm && sent_at > self.hosts[host].local(self.calm_at)
    }

    pub fn other_alive(&self, task: &TaskId, host: usize) -> Option<usize> {
        self.alive.get(task)?.iter().copied().find(|other| *other != host)
    }
}

pub fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).expect("fits")
}
