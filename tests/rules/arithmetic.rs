//! Leases, waits, jitter and time do not overflow, whatever a queue or an operator sets.

use std::time::Duration;

use proptest::prelude::*;

use journeyman_domain::backoff::{Backoff, Policy, RETRY_AFTER_MAX};
use journeyman_domain::jitter::Jitter;
use journeyman_domain::lease::{Granted, Lease, RECLAIM_ATTEMPTS_MIN, clock_error};
use journeyman_domain::slots::Slots;
use journeyman_domain::time::Instant;

fn lengths() -> impl Strategy<Value = Duration> {
    prop_oneof![(1_000_u64..=86_400_000).prop_map(Duration::from_millis), (1_u64..600).prop_map(Duration::from_secs)]
}

fn anything() -> impl Strategy<Value = Duration> {
    prop_oneof![
        Just(Duration::ZERO),
        Just(Duration::MAX),
        Just(Duration::from_nanos(1)),
        Just(Duration::from_secs(u64::MAX)),
        Just(Duration::MAX - Duration::from_nanos(1)),
        any::<Duration>(),
        any::<u64>().prop_map(Duration::from_nanos),
    ]
}

fn granted(sent_at: Duration, length: Duration, grace: Duration) -> Lease {
    Lease::new(Granted { sent_at: Instant::at(sent_at), length }, grace)
}

proptest! {
    #[test]
    fn i02_the_margin_is_strictly_greater_than_clock_error_plus_grace(
        length in lengths(),
        grace in (0_u64..36_000_000).prop_map(Duration::from_millis),
        sent_at in (0_u64..1 << 40).prop_map(Duration::from_millis),
    ) {
        let lease = granted(sent_at, length, grace);
        prop_assert!(lease.margin() > clock_error(length) + lease.grace());
        prop_assert!(lease.grace() <= grace);
        let sent_at = Instant::at(sent_at);
        prop_assert!(sent_at < lease.expires_at() && lease.expires_at() < lease.granted_until());
        prop_assert_eq!(lease.granted_until().since(sent_at), length);
        prop_assert_eq!(lease.granted_until().since(lease.expires_at()), lease.margin());
        prop_assert!(lease.expires_at().since(sent_at) > length * 4 / 5 || lease.margin() <= Duration::from_secs(30).max(length / 4));
        // I1: a report sent at the last moment is answered before the queue may give the run away.
        prop_assert!(lease.attempt_timeout() < lease.margin());
    }

    #[test]
    fn d2_a_lease_until_the_kill_leaves_time_for_the_kill_and_for_reclaims(
        length in lengths(),
        grace in (0_u64..36_000_000).prop_map(Duration::from_millis),
        seed in any::<u64>(),
    ) {
        let lease = Lease::until_kill(Granted { sent_at: Instant::ORIGIN, length }, grace);
        // I2
        prop_assert!(lease.margin() > clock_error(length) + lease.grace());
        prop_assert!(lease.margin() <= granted(Duration::ZERO, length, grace).margin());
        // I4
        let attempts = (lease.attempt_timeout() + lease.retry_policy().max) * RECLAIM_ATTEMPTS_MIN;
        prop_assert!(lease.reclaim_at(&mut Jitter::seeded(seed)).plus(attempts) <= lease.expires_at());
    }

    #[test]
    fn i04_reclaiming_leaves_room_for_every_attempt(
        length in lengths(),
        grace in (0_u64..36_000_000).prop_map(Duration::from_millis),
        seed in any::<u64>(),
    ) {
        let lease = granted(Duration::ZERO, length, grace);
        let reclaim_at = lease.reclaim_at(&mut Jitter::seeded(seed));
        prop_assert!(reclaim_at >= Instant::at(length / 3), "not all the time");
        prop_assert!(reclaim_at <= Instant::at(length * 2 / 3));
        let attempts = (lease.attempt_timeout() + lease.retry_policy().max) * RECLAIM_ATTEMPTS_MIN;
        prop_assert!(reclaim_at.plus(attempts) <= lease.expires_at());
    }

    #[test]
    fn i04_an_extension_never_moves_the_end_back(one in lengths(), other in lengths(), later in lengths()) {
        let (old, new) = (granted(Duration::ZERO, one, Duration::ZERO), granted(later, other, Duration::ZERO));
        let best = old.or_later(new);
        prop_assert_eq!(best.expires_at(), old.expires_at().max(new.expires_at()));
    }

    #[test]
    fn no_lease_overflows(sent_at in anything(), length in anything(), grace in anything(), now in anything()) {
        let lease = granted(sent_at, length, grace);
        let sent_at = Instant::at(sent_at);
        prop_assert!(sent_at <= lease.expires_at() && lease.expires_at() <= lease.granted_until());
        let reclaim_at = lease.reclaim_at(&mut Jitter::seeded(length.subsec_nanos().into()));
        prop_assert!(sent_at <= reclaim_at && reclaim_at <= lease.granted_until());
        prop_assert_eq!(lease.is_usable(Instant::at(now)), Instant::at(now) < lease.expires_at());
        prop_assert!(!lease.is_usable(lease.granted_until()));
        let wait = Backoff::default().wait(lease.retry_policy(), Some(now), &mut Jitter::seeded(1));
        prop_assert!(wait <= lease.retry_policy().max.saturating_add(RETRY_AFTER_MAX));
    }

    #[test]
    fn waits_double_up_to_their_bound_and_never_undercut_what_was_asked(
        first in 1_u64..10_000, times in 1_u64..1000, asked in proptest::option::of(0_u64..1_000_000), seed in any::<u64>(),
    ) {
        let policy = Policy { first: Duration::from_millis(first), max: Duration::from_millis(first * times) };
        let asked = asked.map(Duration::from_millis);
        let (mut row, mut jitter) = (Backoff::NEW, Jitter::seeded(seed));
        let mut doubled = policy.first;
        for tries in 0..40 {
            prop_assert_eq!(row.tries(), tries);
            let wait = row.wait(policy, asked, &mut jitter);
            let heard = asked.unwrap_or_default().min(RETRY_AFTER_MAX);
            prop_assert!(wait >= (doubled / 2).max(heard) && wait <= doubled + heard, "{wait:?} of {doubled:?}");
            doubled = (doubled * 2).min(policy.max);
        }
        row.reset();
        prop_assert_eq!(row, Backoff::NEW);
    }

    #[test]
    fn no_wait_overflows(first in anything(), max in anything(), asked in anything(), seed in any::<u64>()) {
        let (mut row, mut jitter) = (Backoff::NEW, Jitter::seeded(seed));
        for _ in 0..70 {
            let wait = row.wait(Policy { first, max }, Some(asked), &mut jitter);
            prop_assert!(wait <= max.saturating_add(RETRY_AFTER_MAX));
        }
    }

    #[test]
    fn jitter_stays_below_its_span_and_the_same_seed_gives_the_same(seed in any::<u64>(), span in anything()) {
        let (mut one, mut other) = (Jitter::seeded(seed), Jitter::seeded(seed));
        for _ in 0..10 {
            let drawn = one.below(span);
            prop_assert!(drawn < span || span.is_zero() && drawn.is_zero());
            prop_assert_eq!(drawn, other.below(span));
        }
    }

    #[test]
    fn time_saturates_at_both_ends(at in anything(), span in anything()) {
        let instant = Instant::at(at);
        prop_assert!(instant.plus(span) >= instant && instant.minus(span) <= instant);
        prop_assert_eq!(instant.plus(span).since(instant), span.min(Duration::MAX - at));
        prop_assert_eq!(instant.since(instant.plus(span)), Duration::ZERO);
    }

    #[test]
    fn i08_slots_are_conserved(capacity in 0_u32..50, asks in proptest::collection::vec((0_u32..60, any::<bool>()), 0..30)) {
        let mut slots = Slots::new(capacity);
        let mut held = Vec::new();
        for (most, back) in asks {
            let taken = slots.reserve(most);
            prop_assert!(taken.len() <= most as usize);
            held.extend(taken);
            prop_assert_eq!(slots.free() as usize + held.len(), capacity as usize);
            if back {
                slots.release(held.drain(..held.len() / 2));
                prop_assert_eq!(slots.free() as usize + held.len(), capacity as usize);
            }
        }
    }
}

#[test]
fn jitter_spreads_evenly() {
    let (mut jitter, mut counts) = (Jitter::seeded(11), [0_u32; 10]);
    for _ in 0..10_000 {
        let drawn = jitter.below(Duration::from_secs(10));
        counts[usize::try_from(drawn.as_secs()).expect("below ten")] += 1;
    }
    assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
}
