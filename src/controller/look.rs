//! The view of a pool, put together from what the rules say and what the session remembers.

use std::collections::BTreeSet;
use std::time::Duration;

use super::demand::Known;
use super::staff::Seen;
use super::view::{Broker, Counts, Demand, Doing, Fault, Group, Phase, Pool, Role, Scaled, Worker, Workers};
use super::{Controller, Ended};
use crate::domain::group::{self, Key, scale};
use crate::domain::time::Instant;

impl Controller {
    /// How it looks.
    pub(super) fn look(&self, now: Instant) -> Pool {
        let mut keys: BTreeSet<&Key> = self.pool.keys().collect();
        keys.extend(self.staff.keys());
        let mut seen = self.staff.seen(now);
        let groups: Vec<Group> =
            keys.into_iter().map(|key| self.group(key, seen.remove(key).unwrap_or_default(), now)).collect();
        let workers = groups.iter().fold(Workers::default(), |sum, group| Workers {
            starting: sum.starting + group.workers.starting,
            idle: sum.idle + group.workers.idle,
            busy: sum.busy + group.workers.busy,
            going: sum.going + group.workers.going,
        });
        let lost = (self.role == Role::Disconnected).then(|| self.lost.clone()).flatten();
        Pool {
            name: self.settings.pool.clone(),
            role: self.role,
            role_seconds: seconds(now.since(self.role_since)),
            broker: Broker {
                address: self.settings.broker.shown().to_owned(),
                connected: self.role != Role::Disconnected,
                error: lost,
                failures: self.row.tries(),
            },
            generation: self.pool.tracker().generation().0,
            reached: self.pool.reached().0,
            budget: self.staff.budget().map(|budget| budget.workers),
            paused: self.orders.of_pool().map(|pause| Self::seen_pause(pause, now)),
            starts_workers: self.staff.starts_workers(),
            workers,
            groups,
            demands: self.demands.iter().map(|(name, known)| demand(name, known)).collect(),
            orphans: self.tally.orphans.get(),
            counts: self.counts(),
            last_error: self.fault.as_ref().map(|ended| fault(ended, now)),
        }
    }

    fn group(&self, key: &Key, seen: Seen<'_>, now: Instant) -> Group {
        let standing = self.pool.standing(key);
        let until = |at: Instant| seconds(at.since(now));
        let mut workers = Workers::default();
        let members: Vec<Worker> = seen.workers.into_iter().map(|worker| member(worker, &mut workers, now)).collect();
        let wait = standing.and_then(|standing| standing.wait);
        let (restarts, ours) = (seen.restarts, self.staff.starts_workers());
        Group {
            key: key.as_str().to_owned(),
            phase: match standing.and_then(|standing| standing.phase) {
                Some(group::Phase::Active) => Phase::Active,
                Some(group::Phase::Unbound) => Phase::Unbound,
                None => Phase::Going,
            },
            next_phase_seconds: standing.and_then(|standing| standing.until).map(until),
            generation: standing.map_or(0, |standing| standing.generation.0),
            settled: standing.is_none_or(|standing| standing.settled),
            ready: self.here.depths.get(key).map(|depth| depth.ready),
            held: self
                .here
                .loads
                .get(key)
                .and_then(|load| load.unacknowledged.or_else(|| load.in_flight.filter(|_| ours))),
            workers,
            members,
            wanted: seen.decision.map(|decision| decision.wanted),
            reasons: seen
                .decision
                .iter()
                .flat_map(|decision| decision.reasons.iter().map(ToString::to_string))
                .collect(),
            waits: wait.map(|wait| wait.to_string()),
            waits_seconds: wait.and_then(|wait| wait.until()).map(until),
            pause_seconds: restarts.map(|row| row.not_before()).filter(|at| *at > now).map(until),
            paused: self.orders.paused(key).map(|pause| Self::seen_pause(pause, now)),
            scaled: self.orders.numbers(key).map(|numbers| Scaled {
                min: numbers.min,
                max: numbers.max,
                by: numbers.by.to_string(),
                seconds_left: seconds(numbers.until.since(now)),
            }),
            short_lives: restarts.map_or(0, |row| row.short_lives()),
            fails: restarts.is_some_and(|row| row.fails()),
            last_end: seen.last_end.map(|ended| fault(ended, now)),
        }
    }

    fn counts(&self) -> Counts {
        let tally = &self.tally;
        Counts {
            orphans_forwarded: tally.forwarded.get(),
            dead_letters: tally.dead_letters.get(),
            poison: tally.poison.get(),
            steps: tally.steps.get(),
            steps_failed: tally.steps_failed.get(),
            reports: tally.reports.get(),
            workers_started: tally.started.get(),
            workers_failed: tally.failed.get(),
            broker_losses: tally.losses.get(),
        }
    }
}

fn demand(name: &str, known: &Known) -> Demand {
    Demand {
        name: name.to_owned(),
        key: known.key.as_str().to_owned(),
        pending: known.counts.map(|counts| counts.pending),
        claimed: known.counts.and_then(|counts| counts.claimed),
        trouble: known.trouble.clone(),
    }
}

/// A worker, counted.
fn member(worker: scale::Worker, counts: &mut Workers, now: Instant) -> Worker {
    let (doing, count) = match worker.doing {
        scale::Doing::Starting => (Doing::Starting, &mut counts.starting),
        scale::Doing::Idle => (Doing::Idle, &mut counts.idle),
        scale::Doing::Busy => (Doing::Busy, &mut counts.busy),
        scale::Doing::Going => (Doing::Going, &mut counts.going),
    };
    *count += 1;
    Worker { id: worker.id.into(), doing, seconds: seconds(now.since(worker.since)) }
}

fn fault(ended: &Ended, now: Instant) -> Fault {
    Fault { text: ended.what.clone(), seconds_ago: seconds(now.since(ended.at)) }
}

/// Milliseconds are enough for people.
fn seconds(span: Duration) -> f64 {
    (span.as_secs_f64() * 1e3).round() / 1e3
}
