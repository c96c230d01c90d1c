//! Whole workers against a queue, a network and hosts that fail in every way of `faults.rs`, in virtual time. One seed is
//! one history.
//!
//! `JOURNEYMAN_SIM_SEEDS` says how many histories; without it, each test begins new ones for 30 seconds. `JOURNEYMAN_SIM_SEED` says
//! where to start; without it, each day has its own seeds. `JOURNEYMAN_SIM_TRACE=1` keeps what happened for the message of a violation.

#![expect(
    unreachable_pub,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::wildcard_enum_match_arm,
    reason = "a test binary has no outside, and its panics are failures"
)]

mod check;
mod faults;
mod herd;
mod host;
mod lanes;
mod queue;
mod rng;
mod staged;
mod turns;
mod world;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use faults::{ALL, FaultTotals};
use parking_lot::Mutex;
use world::World;

/// Time in which histories of one test begin.
const TIME: Duration = Duration::from_secs(30);

#[expect(clippy::disallowed_methods, reason = "a test has no configuration of its own")]
fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// The seeds of one test, shared by its threads.
struct Seeds {
    first: u64,
    next: AtomicU64,
    end: Option<u64>,
    until: Instant,
}

impl Seeds {
    #[expect(clippy::disallowed_methods, reason = "a test has no clock of its own")]
    fn new() -> Self {
        let today = SystemTime::UNIX_EPOCH.elapsed().expect("it is after 1970").as_secs() / 86_400;
        let first = setting("JOURNEYMAN_SIM_SEED").unwrap_or(today * 1_000_000);
        let end = setting("JOURNEYMAN_SIM_SEEDS").map(|count| first + count);
        println!("JOURNEYMAN_SIM_SEED={first}");
        Self { first, next: AtomicU64::new(first), end, until: Instant::now() + TIME }
    }

    #[expect(clippy::disallowed_methods, reason = "a test has no clock of its own")]
    fn next(&self) -> Option<u64> {
        if self.end.is_none() && Instant::now() >= self.until {
            return None;
        }
        let seed = self.next.fetch_add(1, Ordering::Relaxed);
        self.end.is_none_or(|end| seed < end).then_some(seed)
    }

    fn count(&self) -> u64 {
        let next = self.next.load(Ordering::Relaxed);
        self.end.map_or(next, |end| next.min(end)) - self.first
    }
}

#[test]
fn workers_under_every_fault_lose_nothing_and_report_once() {
    let seeds = Seeds::new();
    let trace = setting("JOURNEYMAN_SIM_TRACE") == Some(1);
    let (virtual_ms, totals) = (AtomicU64::new(0), Mutex::new(FaultTotals::default()));
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    while let Some(seed) = seeds.next() {
                        let mut world = World::new(seed, trace);
                        world.run();
                        virtual_ms.fetch_add(world.now, Ordering::Relaxed);
                        totals.lock().add(&world.totals);
                    }
                })
            })
            .collect();
        for worker in workers {
            if let Err(panic) = worker.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
    let seeds = seeds.count();
    let totals = totals.into_inner();
    let days = virtual_ms.into_inner() / 86_400_000;
    let kinds = totals.0.len();
    let rarest = totals.0.iter().min_by_key(|(_, count)| **count);
    println!(
        "simulation: {seeds} seeds, {days} days of virtual time, {kinds} kinds of fault, rarest {rarest:?}, 0 lost"
    );
    if seeds >= 300 {
        let missing: Vec<_> = ALL.iter().filter(|fault| !totals.0.contains_key(fault)).collect();
        assert!(missing.is_empty(), "faults that never struck: {missing:?}");
    }
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    for seed in 0..20 {
        let traces: Vec<_> = (0..2)
            .map(|_| {
                let mut world = World::new(seed, true);
                world.run();
                world.trace.expect("traced")
            })
            .collect();
        assert!(!traces[0].is_empty());
        assert_eq!(traces[0], traces[1], "seed {seed} took two ways");
    }
}
