//! Whole workers whose sources share few slots: some always have tasks, some now and then, some never. No slot is kept from a source
//! that has a task by one that has none, and no task waits longer than its turn.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use journeyman_domain::claim::{ClaimAction, ClaimEvent, ClaimPolicy, RunTerms, UploadStatus};
use journeyman_domain::id::{LocalToken, Run, ServiceId, SourceId, TaskId};
use journeyman_domain::lease::Granted;
use journeyman_domain::poll::Capabilities;
use journeyman_domain::time::Instant;
use journeyman_domain::turns::{OPEN_POLL_MIN, QUIET_TURN};
use journeyman_domain::worker::{
    Effect, Event, ExitPolicy, GrantedClaim, MinResources, OnTerminationNotice, OpenResult, PollResult, RecoveryResult,
    SourceSpec, Worker, WorkerPolicy,
};

use crate::sim::rng::Rng;

const LEASE: Duration = Duration::from_secs(1200);
const LONG_POLL: u64 = 20_000;
const TASK_MAX: u64 = 3_000;
/// The longest time of one call.
const LATENCY_MAX: u64 = 200;
/// The longest time of closing a poll: it settles, and its claims are listed.
const CLOSING_MAX: u64 = 600;
const SPAN: u64 = 600_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Traffic {
    Always,
    NowAndThen,
    Never,
}

#[derive(Debug)]
struct Source {
    traffic: Traffic,
    /// The times at which its tasks came.
    pending: VecDeque<u64>,
    poll: Option<Poll>,
    granted_at: u64,
}

#[derive(Debug, Clone, Copy)]
struct Poll {
    number: u64,
    max: u8,
}

#[derive(Debug)]
enum Happens {
    Tell(Event),
    Arrive(usize),
    /// The service looks at a poll, which ends with this look or goes on.
    Look {
        source: usize,
        poll: u64,
        is_last: bool,
    },
    Wake(u64),
}

struct World {
    seed: u64,
    rng: Rng,
    now: u64,
    worker: Worker,
    capacity: u32,
    sources: Vec<Source>,
    agenda: BTreeMap<(u64, u64), Happens>,
    order: u64,
    running: BTreeSet<LocalToken>,
    /// Since when a slot has been without a task, and no source with tasks got one.
    unused_since: u64,
    wakes: u64,
    started: u64,
}

fn at(ms: u64) -> Instant {
    Instant::at(Duration::from_millis(ms))
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).expect("small")
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let capacity = u32::try_from(rng.between(1, 4)).expect("small");
        let traffic = [Traffic::Always, Traffic::NowAndThen, Traffic::NowAndThen, Traffic::Never];
        let source =
            |rng: &mut Rng| Source { traffic: rng.pick(&traffic), pending: VecDeque::new(), poll: None, granted_at: 0 };
        let sources: Vec<Source> = (0..rng.between(2, 4)).map(|_| source(&mut rng)).collect();
        let capabilities = Capabilities {
            long_poll: true,
            supports_recovery: true,
            reports_cancellation: false,
            connection_scoped: rng.chance(30),
            fenced_reports: false,
        };
        let spec = SourceSpec { capabilities, service: ServiceId(0) };
        let policy = WorkerPolicy {
            capacity,
            launched_max: 0,
            poll_interval: Duration::from_secs(1),
            claim: ClaimPolicy {
                termination_grace: Duration::from_secs(10),
                status_poll_interval: None,
                reports_cancellation: false,
                starts_in_one_step: false,
                fenced_reports: false,
            },
            dequeue_alert: 10,
            max_auth_failures: 5,
            drain_deadline: None,
            exit_policy: ExitPolicy::default(),
            min_resources: MinResources::default(),
            on_termination_notice: OnTerminationNotice::Release,
        };
        let worker = Worker::new(policy, &vec![spec; sources.len()], seed);
        let mut world = Self {
            seed,
            rng,
            now: 0,
            worker,
            capacity,
            sources,
            agenda: BTreeMap::new(),
            order: 0,
            running: BTreeSet::new(),
            unused_since: 0,
            wakes: 0,
            started: 0,
        };
        for source in 0..world.sources.len() {
            let after = world.rng.below(2_000);
            world.after(after, Happens::Arrive(source));
        }
        world
    }

    fn after(&mut self, ms: u64, happens: Happens) {
        self.order += 1;
        self.agenda.insert((self.now + ms, self.order), happens);
    }

    fn soon(&mut self, event: Event) {
        let latency = self.rng.between(1, LATENCY_MAX);
        self.after(latency, Happens::Tell(event));
    }

    fn run(&mut self) {
        self.tell(Event::Tick);
        while let Some(((at, _), happens)) = self.agenda.pop_first().filter(|((at, _), _)| *at < SPAN) {
            self.check_waits(at);
            self.now = at;
            match happens {
                Happens::Tell(event) => self.tell(event),
                Happens::Wake(wake) if wake == self.wakes => self.tell(Event::Tick),
                Happens::Wake(_) => {}
                Happens::Arrive(source) => self.arrive(source),
                Happens::Look { source, poll, is_last } => self.look(source, poll, is_last),
            }
        }
    }

    fn arrive(&mut self, source: usize) {
        let again = match self.sources[source].traffic {
            Traffic::Never => return,
            Traffic::Always => 50,
            Traffic::NowAndThen => self.rng.between(3_000, 60_000),
        };
        let is_flooded = self.sources[source].pending.len() >= 40;
        for _ in 0..if is_flooded { 0 } else { self.rng.between(1, 3) } {
            self.sources[source].pending.push_back(self.now);
        }
        self.after(again, Happens::Arrive(source));
        if let Some(Poll { number, .. }) = self.sources[source].poll {
            let latency = self.rng.between(1, LATENCY_MAX);
            self.after(latency, Happens::Look { source, poll: number, is_last: false });
        }
    }

    /// The poll is answered if there are tasks, or if it ends anyway.
    fn look(&mut self, source: usize, poll: u64, is_last: bool) {
        let state = &mut self.sources[source];
        let Some(Poll { max, .. }) = state.poll.filter(|open| open.number == poll) else { return };
        let count = state.pending.len().min(usize::from(max));
        if count == 0 && !is_last {
            return;
        }
        state.pending.drain(..count);
        state.poll = None;
        if count > 0 {
            (state.granted_at, self.unused_since) = (self.now, self.now);
        }
        let claims = (0..count).map(|_| self.grant()).collect();
        let answer = Ok(PollResult { messages: Vec::new(), claims });
        self.tell(Event::Polled { source: SourceId::from_index(source), answer });
    }

    fn grant(&mut self) -> GrantedClaim {
        self.started += 1;
        let token = LocalToken(self.started);
        self.running.insert(token);
        let run = Run { task: TaskId::parse(&format!("task-{}", self.started)).expect("a task id"), run: 0 };
        let lease = Granted { sent_at: at(self.now), length: LEASE };
        GrantedClaim { token, run, lease, terms: RunTerms { deadline: None, retries_left: Some(5) } }
    }

    fn tell(&mut self, event: Event) {
        self.worker.handle(event, at(self.now));
        while let Some(effect) = self.worker.next_effect() {
            self.perform(effect);
        }
        // I8
        let reserved: usize = self.worker.sources().iter().map(|source| source.reserved_slots.len()).sum();
        let taken = reserved + self.running.len();
        assert_eq!(taken + self.worker.free_slots() as usize, self.capacity as usize, "seed {}", self.seed);
        if let Some(due) = self.worker.next_deadline() {
            self.wakes += 1;
            let ms = millis(due.since(at(self.now)) + Duration::from_micros(999));
            self.after(ms, Happens::Wake(self.wakes));
        }
    }

    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Open(source) => {
                let answer = Ok(OpenResult { priority_queues: 1, usable_for: None });
                self.soon(Event::Opened { source, sent_at: at(self.now), answer });
            }
            Effect::Recover { source, .. } => {
                self.soon(Event::Recovered { source, answer: Ok(RecoveryResult::default()) })
            }
            Effect::Poll { source, max, .. } => {
                self.order += 1;
                let (source, number) = (source.index(), self.order);
                self.sources[source].poll = Some(Poll { number, max });
                let latency = self.rng.between(1, LATENCY_MAX);
                self.after(latency, Happens::Look { source, poll: number, is_last: false });
                self.after(LONG_POLL, Happens::Look { source, poll: number, is_last: true });
            }
            Effect::ClosePoll(source) => {
                let poll = self.sources[source.index()].poll.expect("a poll is open").number;
                let took = self.rng.between(1, CLOSING_MAX);
                self.after(took, Happens::Look { source: source.index(), poll, is_last: true });
            }
            Effect::Claim(claim, action) => {
                let event = match action {
                    ClaimAction::Prepare => ClaimEvent::Prepared(Ok(())),
                    ClaimAction::Execute | ClaimAction::Start => {
                        let took = self.rng.between(1, TASK_MAX - 3 * LATENCY_MAX);
                        return self.after(took, Happens::Tell(Event::Claim(claim, ClaimEvent::Ended(Ok(())))));
                    }
                    ClaimAction::Upload => ClaimEvent::Uploaded(UploadStatus::Complete),
                    ClaimAction::Report { .. } => ClaimEvent::Reported(Ok(())),
                    ClaimAction::Close(_) => {
                        self.running.remove(&claim);
                        self.unused_since = self.now;
                        return;
                    }
                    ClaimAction::UpdateLease(_) => return,
                    other => unreachable!("{other:?}"),
                };
                self.soon(Event::Claim(claim, event));
            }
            other => unreachable!("{other:?}"),
        }
    }

    fn check_waits(&self, now: u64) {
        let turn = millis(OPEN_POLL_MIN) + CLOSING_MAX + 2 * LATENCY_MAX;
        let sources = self.sources.len() as u64;
        for (index, source) in self.sources.iter().enumerate() {
            let Some(pending) = source.pending.front() else { continue };
            let waited = now.saturating_sub((*pending).max(source.granted_at));
            // Each of the others may have a turn before it, and a task of that keeps the slot.
            let bound = millis(QUIET_TURN) + sources * (turn + TASK_MAX);
            assert!(
                waited <= bound,
                "seed {}: a task of source {index} waits {waited} ms: {:?}",
                self.seed,
                self.sources
            );
        }
        // A source is busy once a poll has brought something.
        let is_busy = |source: &Source| source.traffic == Traffic::Always && source.granted_at > 0;
        let is_wanted = self.sources.iter().any(|source| is_busy(source) && !source.pending.is_empty());
        if is_wanted && self.running.len() < self.capacity as usize {
            let unused = now.saturating_sub(self.unused_since);
            let bound = sources * turn;
            assert!(unused <= bound, "seed {}: a slot is unused for {unused} ms: {:?}", self.seed, self.sources);
        }
    }
}

#[test]
fn a3_sources_that_share_slots_neither_hold_each_other_up_nor_starve() {
    let seeds = crate::sim::Seeds::new();
    let mut started = 0;
    while let Some(seed) = seeds.next() {
        let mut world = World::new(seed);
        world.run();
        started += world.started;
    }
    println!("shared slots: {} seeds, {started} tasks", seeds.count());
}
