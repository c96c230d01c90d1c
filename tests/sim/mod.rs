//! Whole workers against a queue, a network and hosts that fail in every way of `faults.rs`, in virtual time. One seed is
//! one history.
//!
//! `JOURNEYMAN_SIM_SEEDS` says how many histories (2,000 unless set), `JOURNEYMAN_SIM_SEED` where to start,
//! `JOURNEYMAN_SIM_TRACE=1` keeps what happened for the message of a violation.

#![expect(
    unreachable_pub,
    clippy::expect_used,
    clippy::panic,
    clippy::wildcard_enum_match_arm,
    reason = "a test binary has no outside, and its panics are failures"
)]

mod check;
mod faults;
mod host;
mod lanes;
mod queue;
mod rng;
mod staged;
mod world;

use std::sync::atomic::{AtomicU64, Ordering};

use faults::{ALL, FaultTotals};
use parking_lot::Mutex;
use world::World;

#[expect(clippy::disallowed_methods, reason = "a test has no configuration of its own")]
fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn workers_under_every_fault_lose_nothing_and_report_once() {
    let (first, seeds) = (setting("JOURNEYMAN_SIM_SEED", 0), setting("JOURNEYMAN_SIM_SEEDS", 2_000));
    let trace = setting("JOURNEYMAN_SIM_TRACE", 0) == 1;
    let (next, virtual_ms, totals) = (AtomicU64::new(first), AtomicU64::new(0), Mutex::new(FaultTotals::default()));
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    loop {
                        let seed = next.fetch_add(1, Ordering::Relaxed);
                        if seed >= first + seeds {
                            return;
                        }
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
