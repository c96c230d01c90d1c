//! Ordered delivery: lanes of three endpoints at two origins, with receivers that fail in every way, a notifier that dies at any
//! moment, and operators who enable what was disabled. The rules are the project's own; the model is the store, time and receivers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use journeyman_domain::jitter::Jitter;
use journeyman_domain::lane::dispatcher::{AttemptLimits, Dispatcher, LaneId, NextAttempt};
use journeyman_domain::lane::endpoint::EndpointHealth;
use journeyman_domain::lane::retry::{HeadState, HeadVerdict, OnExhausted, RetryPolicy};
use journeyman_domain::lane::{Control, ErrorClass, Reply};
use journeyman_domain::staged::Stamp;
use journeyman_domain::time::Instant;

use super::Seeds;
use super::rng::Rng;

const LANES: usize = 6;
const ENDPOINTS: [(&str, &str); 3] = [("a", "x"), ("b", "x"), ("c", "y")];
const MESSAGES: u64 = 4;
/// Attempts of one history at most, so that one that never ends fails.
const ATTEMPTS_MAX: usize = 2_000;
/// Histories of each seed.
const HISTORIES: u64 = 50;

/// What the store has of a lane.
#[derive(Debug)]
struct Lane {
    endpoint: usize,
    head: u64,
    state: HeadState,
    due_at: u64,
    is_parked: bool,
    /// The last message that the receiver got.
    received: u64,
}

struct World {
    rng: Rng,
    now: u64,
    lanes: Vec<Lane>,
    health: [EndpointHealth; 3],
    is_disabled: [bool; 3],
    policy: RetryPolicy,
    jitter: Jitter,
    /// What is lost with the process.
    dispatcher: Dispatcher,
    under_way: Vec<(NextAttempt, u64, u64)>,
    taken: Vec<bool>,
    attempts: usize,
    faults: BTreeMap<&'static str, u64>,
}

fn dispatcher() -> Dispatcher {
    Dispatcher::new(AttemptLimits { in_all: 4, per_endpoint: 2, per_origin: 3 })
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let on_exhausted = rng.pick(&[OnExhausted::Block, OnExhausted::Skip, OnExhausted::Park]);
        let lane = |number| Lane {
            endpoint: number % 3,
            head: 1,
            state: HeadState::default(),
            due_at: 0,
            is_parked: false,
            received: 0,
        };
        Self {
            now: 0,
            lanes: (0..LANES).map(lane).collect(),
            health: [EndpointHealth::default(); 3],
            is_disabled: [false; 3],
            policy: RetryPolicy { lasts: Duration::from_secs(6 * 60 * 60), on_exhausted, ..RetryPolicy::default() },
            jitter: Jitter::seeded(seed),
            dispatcher: dispatcher(),
            under_way: Vec::new(),
            taken: vec![false; LANES],
            attempts: 0,
            faults: BTreeMap::new(),
            rng,
        }
    }

    fn instant(&self) -> Instant {
        Instant::at(Duration::from_millis(self.now))
    }

    fn fault(&mut self, name: &'static str) {
        *self.faults.entry(name).or_default() += 1;
    }

    fn run(&mut self) {
        while self.lanes.iter().any(|lane| lane.head <= MESSAGES) {
            self.attempts += 1;
            assert!(self.attempts < ATTEMPTS_MAX, "it goes on: {:?}", self.lanes);
            self.refill();
            while let Some(next) = self.dispatcher.begin(self.instant()) {
                let position = self.lanes[index(&next)].head;
                let ends_at = self.now + self.rng.below(5_000);
                self.under_way.push((next, position, ends_at));
            }
            if self.rng.chance(3) {
                self.die();
            }
            if !self.end_next() {
                self.wait();
            }
        }
    }

    fn refill(&mut self) {
        for number in 0..LANES {
            let lane = &self.lanes[number];
            let is_due = lane.head <= MESSAGES && !lane.is_parked && lane.due_at <= self.now;
            if is_due && !self.taken[number] && !self.is_disabled[lane.endpoint] {
                let (name, origin) = ENDPOINTS[lane.endpoint];
                let id = LaneId(i64::try_from(number).expect("a lane"));
                self.dispatcher.add(&Arc::from(name), &Arc::from(origin), id);
                self.taken[number] = true;
            }
        }
    }

    /// The process and all that it knows is gone. What was sent may have arrived.
    fn die(&mut self) {
        self.fault("death");
        for (next, position, _) in std::mem::take(&mut self.under_way) {
            if self.rng.chance(50) {
                self.receive(index(&next), position);
            }
        }
        self.dispatcher = dispatcher();
        self.taken = vec![false; LANES];
    }

    /// In each lane only the head is repeated, and no number is left out but by the policy.
    fn receive(&mut self, number: usize, position: u64) {
        let lane = &mut self.lanes[number];
        let may_skip = self.policy.on_exhausted == OnExhausted::Skip || position <= lane.received + 1;
        assert!(position >= lane.received && may_skip, "message {position} after {}", lane.received);
        lane.received = position;
    }

    /// An attempt was under way.
    fn end_next(&mut self) -> bool {
        let Some(first) = (0..self.under_way.len()).min_by_key(|index| self.under_way[*index].2) else { return false };
        let (next, position, ends_at) = self.under_way.swap_remove(first);
        self.now = self.now.max(ends_at);
        let number = index(&next);
        let reply = self.reply(number, position);
        let now = Stamp(i64::try_from(self.now).expect("a time"));
        self.dispatcher.end(&next, reply, self.instant());
        let endpoint = self.lanes[number].endpoint;
        if self.health[endpoint].on_reply(reply, now).is_some() {
            self.is_disabled[endpoint] = true;
            for lane in self.dispatcher.remove(&next.endpoint) {
                self.taken[usize::try_from(lane.0).expect("a lane")] = false;
            }
        }
        let rests_until = self.health[endpoint].rests_until;
        self.dispatcher.rest(&next.endpoint, rests_until.map(|at| self.instant().plus(at.since(now))));
        let mut state = self.lanes[number].state;
        let verdict = state.on_reply(reply, &self.policy, now, &mut self.jitter);
        self.taken[number] = false;
        if self.rng.chance(2) {
            // The store has failed: the attempt is repeated.
            self.fault("lost commit");
            return true;
        }
        let lane = &mut self.lanes[number];
        match verdict {
            HeadVerdict::Ended(_) => {
                (lane.head, lane.state, lane.due_at) = (lane.head + 1, HeadState::default(), self.now);
            }
            HeadVerdict::TryAgain { at } => {
                (lane.state, lane.due_at) = (state, u64::try_from(at.0).expect("a time"));
            }
            HeadVerdict::Park => lane.is_parked = true,
        }
        true
    }

    /// What the receiver does, and what the notifier hears of it. Failures become rarer, so that histories end.
    fn reply(&mut self, number: usize, position: u64) -> Reply {
        let answered = |status, retry_after, control| Reply::Answered { status, retry_after, control };
        let failing = 60_u64.saturating_sub(u64::try_from(self.attempts).unwrap_or(u64::MAX) / 3);
        if !self.rng.chance(failing) {
            self.receive(number, position);
            return answered(200, None, None);
        }
        let name =
            self.rng.pick(&["error", "throttled", "refused", "answer lost", "late answer", "gone", "broken body"]);
        self.fault(name);
        match name {
            "throttled" => {
                let asked = self.rng.below(3).checked_sub(1).map(|minutes| Duration::from_secs(60 * minutes));
                answered(self.rng.pick(&[429, 503]), asked, None)
            }
            "refused" => Reply::Failed(ErrorClass::Connect),
            "answer lost" => {
                self.receive(number, position);
                Reply::Failed(ErrorClass::Timeout)
            }
            "late answer" => {
                self.receive(number, position);
                answered(504, None, None)
            }
            "gone" => answered(410, None, Some(Control::DisableEndpoint).filter(|_| self.rng.chance(50))),
            _ => answered(self.rng.pick(&[301, 404, 500]), None, None),
        }
    }

    /// Waits until something is due; then operators mend what is not.
    fn wait(&mut self) {
        let due = self.lanes.iter().filter(|lane| {
            lane.head <= MESSAGES && !lane.is_parked && !self.is_disabled[lane.endpoint] && lane.due_at > self.now
        });
        let of_store = due.map(|lane| lane.due_at).min();
        let of_dispatcher = self
            .dispatcher
            .next_deadline()
            .map(|at| self.now + u64::try_from(at.since(self.instant()).as_millis()).expect("a time") + 1);
        match of_store.into_iter().chain(of_dispatcher).filter(|at| *at > self.now).min() {
            Some(at) => self.now = at,
            None => {
                self.fault("mended by an operator");
                self.now += 60_000;
                self.is_disabled = [false; 3];
                self.health = [EndpointHealth::default(); 3];
                for lane in &mut self.lanes {
                    (lane.is_parked, lane.state.first_attempt_at) = (false, None);
                }
            }
        }
    }
}

fn index(next: &NextAttempt) -> usize {
    usize::try_from(next.lane.0).expect("a lane")
}

#[test]
fn p1_receivers_get_each_lane_in_order_without_gaps_and_only_heads_twice() {
    let seeds = Seeds::new();
    let (mut faults, mut attempts): (BTreeMap<&str, u64>, usize) = (BTreeMap::new(), 0);
    while let Some(seed) = seeds.next() {
        for history in 0..HISTORIES {
            let mut world = World::new(seed * HISTORIES + history);
            let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| world.run()));
            assert!(ran.is_ok(), "JOURNEYMAN_SIM_SEED={seed}, its history {history}");
            attempts += world.attempts;
            for (fault, count) in world.faults {
                *faults.entry(fault).or_default() += count;
            }
        }
    }
    let seeds = seeds.count();
    println!("simulation of lanes: {} histories, {attempts} attempts, {faults:?}, 0 lost", seeds * HISTORIES);
    assert!(seeds < 300 || faults.len() == 10, "faults that never struck: only {faults:?}");
}
