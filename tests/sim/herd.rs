//! Ten thousand workers and one queue in virtual time: how often it is polled while the fleet is idle, after an outage, and after
//! all workers have started at once.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;
use std::time::Duration;

use journeyman_domain::claim::{ClaimAction, ClaimEvent, ClaimPolicy, RunTerms, UploadStatus};
use journeyman_domain::id::{LocalToken, Run, ServiceId, SourceId, TaskId};
use journeyman_domain::lease::Granted;
use journeyman_domain::poll::Capabilities;
use journeyman_domain::refusal::Refusal;
use journeyman_domain::time::Instant;
use journeyman_domain::worker::{
    Effect, Event, ExitPolicy, GrantedClaim, MinResources, OnTerminationNotice, OpenResult, PollResult, RecoveryResult,
    SourceSpec, Worker, WorkerPolicy,
};

use crate::sim::rng::Rng;

const WORKERS: usize = 10_000;
const LONG_POLL: u64 = 20_000;
const SECOND: u64 = 1_000;
/// The longest time of one call.
const LATENCY_MAX: u64 = 200;

/// The only source of each worker.
fn source() -> SourceId {
    SourceId::from_index(0)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dialect {
    ClaimWork,
    Azure,
}

/// What the queue does with calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Queue {
    Up,
    /// It refuses connections, and those that were open are cut.
    Down,
    /// It refuses what exceeds so many calls a second.
    Limited {
        calls: u64,
        refusal: Refusal,
    },
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happens {
    Tell,
    Wake(u64),
    /// A long poll ends without a task.
    PollEnds(u64),
}

struct Member {
    worker: Worker,
    /// The events that wait for their time.
    events: Vec<(u64, Event)>,
    open_poll: Option<u64>,
    wakes: u64,
}

struct Fleet {
    rng: Rng,
    now: u64,
    dialect: Dialect,
    queue: Queue,
    members: Vec<Member>,
    agenda: BinaryHeap<Reverse<(u64, u64, usize, Happens)>>,
    order: u64,
    /// How long a task runs; 0 is that there are none.
    task_max: u64,
    tasks: u64,
    /// The polls of each second.
    polls: Vec<u64>,
    calls: Vec<u64>,
}

fn at(ms: u64) -> Instant {
    Instant::at(Duration::from_millis(ms))
}

impl Fleet {
    /// Workers that start within `span`.
    fn start(dialect: Dialect, span: u64, task_max: u64) -> Self {
        let long_poll = dialect == Dialect::ClaimWork;
        let capabilities = Capabilities { long_poll, supports_recovery: long_poll, ..Capabilities::default() };
        let policy = WorkerPolicy {
            capacity: 1,
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
        let member = |seed: usize| Member {
            worker: Worker::new(policy.clone(), &[SourceSpec { capabilities, service: ServiceId(0) }], seed as u64),
            events: Vec::new(),
            open_poll: None,
            wakes: 0,
        };
        let mut fleet = Self {
            rng: Rng::new(1),
            now: 0,
            dialect,
            queue: Queue::Up,
            members: (0..WORKERS).map(member).collect(),
            agenda: BinaryHeap::new(),
            order: 0,
            task_max,
            tasks: 0,
            polls: Vec::new(),
            calls: Vec::new(),
        };
        for member in 0..WORKERS {
            let after = fleet.rng.below(span);
            fleet.tell_after(after, member, Event::Tick);
        }
        fleet
    }

    fn after(&mut self, ms: u64, member: usize, happens: Happens) {
        self.order += 1;
        self.agenda.push(Reverse((self.now + ms, self.order, member, happens)));
    }

    fn tell_after(&mut self, ms: u64, member: usize, event: Event) {
        self.after(ms, member, Happens::Tell);
        self.members[member].events.push((self.order, event));
    }

    fn run(&mut self, seconds: u64) -> Range<usize> {
        let (first, end) = (self.now / SECOND, self.now + seconds * SECOND);
        while self.agenda.peek().is_some_and(|Reverse((at, ..))| *at < end) {
            let Some(Reverse((now, order, member, happens))) = self.agenda.pop() else { break };
            self.now = now;
            match happens {
                Happens::Tell => {
                    let events = &mut self.members[member].events;
                    let found = events.iter().position(|(of, _)| *of == order).expect("an event");
                    let (_, event) = events.swap_remove(found);
                    self.tell(member, event);
                }
                Happens::Wake(wake) if wake == self.members[member].wakes => self.tell(member, Event::Tick),
                Happens::PollEnds(poll) if self.members[member].open_poll == Some(poll) => {
                    self.members[member].open_poll = None;
                    self.tell(member, Event::Polled { source: source(), answer: Ok(PollResult::default()) });
                }
                Happens::Wake(_) | Happens::PollEnds(_) => {}
            }
        }
        self.now = end;
        let index = |second: u64| usize::try_from(second).expect("small");
        self.polls.resize(index(end / SECOND), 0);
        self.calls.resize(index(end / SECOND), 0);
        index(first)..index(end / SECOND)
    }

    fn turn(&mut self, queue: Queue) {
        self.queue = queue;
        if queue == Queue::Down {
            self.cut();
        }
    }

    /// All open polls are cut.
    fn cut(&mut self) {
        for member in 0..WORKERS {
            if self.members[member].open_poll.take().is_some() {
                let answer = Err(Refusal::Retry { retry_after: None });
                let latency = self.rng.between(1, LATENCY_MAX);
                self.tell_after(latency, member, Event::Polled { source: source(), answer });
            }
        }
    }

    fn tell(&mut self, member: usize, event: Event) {
        let now = at(self.now);
        self.members[member].worker.handle(event, now);
        while let Some(effect) = self.members[member].worker.next_effect() {
            self.perform(member, effect);
        }
        let Member { worker, wakes, .. } = &mut self.members[member];
        *wakes += 1;
        let (wake, due) = (*wakes, worker.next_deadline());
        if let Some(due) = due {
            let ms = u64::try_from((due.since(now) + Duration::from_nanos(999_999)).as_millis()).expect("small");
            self.after(ms, member, Happens::Wake(wake));
        }
    }

    /// Tells whether the queue takes the call.
    fn call(&mut self) -> Result<(), Refusal> {
        let second = usize::try_from(self.now / SECOND).expect("small");
        if self.calls.len() <= second {
            self.calls.resize(second + 1, 0);
        }
        self.calls[second] += 1;
        match self.queue {
            Queue::Down => Err(Refusal::Retry { retry_after: None }),
            Queue::Limited { calls, refusal } if self.calls[second] > calls => Err(refusal),
            Queue::Up | Queue::Limited { .. } => Ok(()),
        }
    }

    fn perform(&mut self, member: usize, effect: Effect) {
        let latency = self.rng.between(1, LATENCY_MAX);
        let event = match effect {
            Effect::Open(source) => {
                // Opening a source of `claim-work` is no call.
                let taken = if self.dialect == Dialect::Azure { self.call() } else { Ok(()) };
                let answer = taken.map(|()| OpenResult { priority_queues: 1, usable_for: None });
                Event::Opened { source, sent_at: at(self.now), answer }
            }
            Effect::Recover { source, .. } => {
                Event::Recovered { source, answer: self.call().map(|()| RecoveryResult::default()) }
            }
            Effect::Poll { source, .. } => {
                let taken = self.call();
                let second = self.calls.len() - 1;
                self.polls.resize(second.max(self.polls.len().saturating_sub(1)) + 1, 0);
                self.polls[second] += 1;
                match taken {
                    Ok(()) if self.task_max > 0 => {
                        let claims = vec![self.grant()];
                        Event::Polled { source, answer: Ok(PollResult { messages: Vec::new(), claims }) }
                    }
                    Ok(()) if self.dialect == Dialect::ClaimWork => {
                        self.after(LONG_POLL + latency, member, Happens::PollEnds(self.order + 1));
                        self.members[member].open_poll = Some(self.order);
                        return;
                    }
                    Ok(()) => Event::Polled { source, answer: Ok(PollResult::default()) },
                    Err(refusal) => Event::Polled { source, answer: Err(refusal) },
                }
            }
            Effect::Claim(claim, action) => {
                let event = match action {
                    ClaimAction::Prepare => ClaimEvent::Prepared(Ok(())),
                    ClaimAction::Execute | ClaimAction::Start => {
                        let took = self.rng.between(self.task_max / 2, self.task_max * 3 / 2);
                        return self.tell_after(took, member, Event::Claim(claim, ClaimEvent::Ended(Ok(()))));
                    }
                    ClaimAction::Upload => ClaimEvent::Uploaded(UploadStatus::Complete),
                    ClaimAction::Report { .. } => ClaimEvent::Reported(self.call()),
                    ClaimAction::Close(_) | ClaimAction::UpdateLease(_) => return,
                    other => unreachable!("{other:?}"),
                };
                Event::Claim(claim, event)
            }
            Effect::Alert(_) => return,
            other => unreachable!("{other:?}"),
        };
        self.tell_after(latency, member, event);
    }

    fn grant(&mut self) -> GrantedClaim {
        self.tasks += 1;
        let run = Run { task: TaskId::parse(&format!("task-{}", self.tasks)).expect("a task id"), run: 0 };
        let lease = Granted { sent_at: at(self.now), length: Duration::from_secs(1200) };
        let terms = RunTerms { deadline: None, retries_left: Some(5) };
        GrantedClaim { token: LocalToken(self.tasks), run, lease, terms }
    }

    fn polls_a_second(&self, seconds: Range<usize>) -> Polls {
        let (count, seconds) = (seconds.len() as u64, &self.polls[seconds]);
        Polls { mean: seconds.iter().sum::<u64>() / count, peak: seconds.iter().copied().max().unwrap_or_default() }
    }
}

/// The polls of all workers in a second.
#[derive(Debug, Clone, Copy)]
struct Polls {
    mean: u64,
    peak: u64,
}

/// A fleet without tasks that has started over the length of a poll, and its usual polls.
fn idle_fleet(dialect: Dialect) -> (Fleet, Polls) {
    let mut fleet = Fleet::start(dialect, LONG_POLL, 0);
    fleet.run(40);
    let usual = fleet.run(40);
    let usual = fleet.polls_a_second(usual);
    (fleet, usual)
}

fn polls(fleet: &mut Fleet, queue: Queue, seconds: u64) -> Polls {
    fleet.turn(queue);
    let span = fleet.run(seconds);
    fleet.polls_a_second(span)
}

#[test]
fn an_idle_fleet_polls_evenly_and_after_a_minutes_outage_at_most_twice_as_often() {
    for dialect in [Dialect::ClaimWork, Dialect::Azure] {
        let (mut fleet, usual) = idle_fleet(dialect);
        let during = polls(&mut fleet, Queue::Down, 60);
        let after = polls(&mut fleet, Queue::Up, 100);
        println!("{dialect:?}: usually {usual:?}, in an outage {during:?}, after it {after:?}");
        assert!(usual.peak < usual.mean * 3 / 2, "{dialect:?}: {usual:?}");
        assert!(after.peak <= usual.mean * 2, "{dialect:?}: {usual:?}, then {after:?}");
    }
}

#[test]
fn a_queue_that_comes_back_slowly_is_polled_at_most_twice_as_often_as_usual() {
    let refusals = [
        Refusal::Retry { retry_after: None },
        Refusal::Retry { retry_after: Some(Duration::from_secs(30)) },
        Refusal::Throttled { retry_after: None },
        Refusal::Throttled { retry_after: Some(Duration::from_secs(30)) },
    ];
    for refusal in refusals {
        let (mut fleet, usual) = idle_fleet(Dialect::ClaimWork);
        polls(&mut fleet, Queue::Down, 60);
        let slow = polls(&mut fleet, Queue::Limited { calls: usual.mean / 4, refusal }, 120);
        let after = polls(&mut fleet, Queue::Up, 180);
        println!("{refusal:?}: usually {usual:?}, while it is slow {slow:?}, after that {after:?}");
        assert!(slow.peak.max(after.peak) <= usual.mean * 2, "{refusal:?}: {usual:?}, {slow:?}, {after:?}");
    }
}

#[test]
fn long_polls_that_are_cut_at_once_come_back_at_twice_the_usual_rate() {
    let (mut fleet, usual) = idle_fleet(Dialect::ClaimWork);
    fleet.cut();
    let after = polls(&mut fleet, Queue::Up, 60);
    println!("usually {usual:?}, after the cut {after:?}");
    assert!(after.peak <= usual.mean * 2, "{usual:?}, then {after:?}");
}

#[test]
fn a_busy_fleet_polls_after_an_outage_no_more_than_three_times_as_often_as_an_idle_one() {
    let mut fleet = Fleet::start(Dialect::ClaimWork, 60 * SECOND, 60 * SECOND);
    fleet.run(150);
    let usual = polls(&mut fleet, Queue::Up, 60);
    polls(&mut fleet, Queue::Down, 60);
    let after = polls(&mut fleet, Queue::Up, 100);
    println!("usually {usual:?}, after an outage {after:?}");
    // Its reports are repeated sooner than its polls, because claims run out.
    assert!(after.peak <= WORKERS as u64 * SECOND / LONG_POLL * 3, "{usual:?}, then {after:?}");
}
