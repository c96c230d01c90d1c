//! A controller's state as OpenMetrics, read from the view that `journeyman controller status` shows. Labels hold names of
//! the configuration and words of a fixed list, and no keys: there may be any number of them.

use std::fmt;

use crate::control::controller_api::ControllerStatusReply;
use crate::controller::status::{GroupPhase, GroupStatus, PoolStatus, Role};
use crate::observe::openmetrics::{self, MetricFamily, MetricKind, Sample, flag, float, labeled, unlabeled};

type ReadSamples = fn(&ControllerStatusReply) -> Vec<Sample>;

const fn gauge(name: &'static str, help: &'static str, read: ReadSamples) -> MetricFamily<ControllerStatusReply> {
    MetricFamily::new(MetricKind::Gauge, name, help, read).with_labels(POOL)
}

const fn counter(name: &'static str, help: &'static str, read: ReadSamples) -> MetricFamily<ControllerStatusReply> {
    MetricFamily::new(MetricKind::Counter, name, help, read).with_labels(POOL)
}

const POOL: &[&str] = &["pool"];

const FAMILIES: &[MetricFamily<ControllerStatusReply>] = &[
    MetricFamily::new(MetricKind::Info, "build", "The version that runs.", |status: &ControllerStatusReply| {
        vec![labeled([&status.version], 1.0)]
    })
    .with_labels(&["version"]),
    gauge("controller_uptime", "Since the controller started.", |status| unlabeled(status.snapshot.uptime_seconds))
        .with_labels(&[])
        .with_unit("seconds"),
    gauge("controller_role", "1 for what this controller is to the pool.", |status| {
        let of =
            |pool: &PoolStatus| Role::ALL.map(|role| labeled([&*pool.name, role.as_str()], flag(pool.role == role)));
        status.snapshot.pools.iter().flat_map(of).collect()
    })
    .with_labels(&["pool", "role"]),
    gauge("controller_groups", "Groups by phase.", |status| {
        let many = |pool: &PoolStatus, phase| sum_groups(pool, |group| u64::from(group.phase == phase));
        let of = |pool: &PoolStatus| {
            GroupPhase::ALL.map(|phase| labeled([&*pool.name, phase.as_str()], float(many(pool, phase))))
        };
        status.snapshot.pools.iter().flat_map(of).collect()
    })
    .with_labels(&["pool", "phase"]),
    gauge("controller_groups_failing", "Groups whose workers do not last, so that somebody has to look.", |status| {
        per_pool(status, |pool| sum_groups(pool, |group| u64::from(group.fails)))
    }),
    gauge("controller_workers", "Workers by what they do.", |status| {
        let of = |pool: &PoolStatus| {
            let workers = pool.workers;
            let kinds = [
                ("starting", workers.starting),
                ("idle", workers.idle),
                ("busy", workers.busy),
                ("going", workers.going),
            ];
            kinds.map(|(kind, many)| labeled([&*pool.name, kind], many.into()))
        };
        status.snapshot.pools.iter().flat_map(of).collect()
    })
    .with_labels(&["pool", "doing"]),
    gauge("controller_workers_wanted", "How many workers all groups are to have.", |status| {
        per_pool(status, |pool| sum_groups(pool, |group| group.wanted.unwrap_or_default().into()))
    }),
    gauge("controller_ready_requests", "Requests in the queues of groups that no worker holds.", |status| {
        per_pool(status, |pool| sum_groups(pool, |group| group.ready.unwrap_or_default().into()))
    }),
    gauge("controller_orphans", "Requests in hand that came under a key without a queue.", |status| {
        per_pool(status, |pool| pool.orphans)
    }),
    gauge("controller_changes_pending", "Changes of what is wanted since the last that was carried out.", |status| {
        per_pool(status, |pool| pool.generation.saturating_sub(pool.reached))
    }),
    counter("controller_orphans_forwarded", "Orphans that were forwarded to their queue.", |status| {
        per_pool(status, |pool| pool.counts.orphans_forwarded)
    }),
    counter("controller_dead_letters", "Requests that were answered in a worker's place.", |status| {
        per_pool(status, |pool| pool.counts.dead_letters)
    }),
    counter("controller_poison", "Requests that were put aside as poison.", |status| {
        per_pool(status, |pool| pool.counts.poison)
    }),
    counter("controller_steps", "Steps about queues that were carried out.", |status| {
        per_pool(status, |pool| pool.counts.steps)
    }),
    counter("controller_step_failures", "Steps about queues that failed.", |status| {
        per_pool(status, |pool| pool.counts.steps_failed)
    }),
    counter("controller_reports", "Reports of workers.", |status| per_pool(status, |pool| pool.counts.reports)),
    counter("controller_workers_started", "Workers that were started.", |status| {
        per_pool(status, |pool| pool.counts.workers_started)
    }),
    counter(
        "controller_worker_failures",
        "Workers that ended without being told to, or could not be started.",
        |status| per_pool(status, |pool| pool.counts.workers_failed),
    ),
    counter("controller_broker_losses", "How often the broker was lost, or could not be had.", |status| {
        per_pool(status, |pool| pool.counts.broker_losses)
    }),
];

fn per_pool(status: &ControllerStatusReply, value: impl Fn(&PoolStatus) -> u64) -> Vec<Sample> {
    status.snapshot.pools.iter().map(|pool| labeled([&pool.name], float(value(pool)))).collect()
}

fn sum_groups(pool: &PoolStatus, value: impl Fn(&GroupStatus) -> u64) -> u64 {
    pool.groups.iter().map(value).sum()
}

/// The text that `/metrics` answers with.
///
/// # Errors
///
/// None that a String could have.
pub(super) fn text(status: ControllerStatusReply) -> Result<String, fmt::Error> {
    openmetrics::text(status, FAMILIES)
}

/// The names and labels as a Markdown table, as the guide shows it.
#[must_use]
pub fn markdown() -> String {
    openmetrics::markdown(FAMILIES)
}
