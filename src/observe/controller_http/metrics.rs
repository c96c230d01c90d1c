//! OpenMetrics of a controller. No label holds a routing key, since the number of keys has no bound.

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
    gauge("controller_uptime", "Seconds since the controller started.", |status| {
        unlabeled(status.snapshot.uptime_seconds)
    })
    .with_labels(&[])
    .with_unit("seconds"),
    gauge("controller_role", "1 for the role of this controller in the pool.", |status| {
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
    gauge("controller_groups_failing", "Groups whose workers keep failing.", |status| {
        per_pool(status, |pool| sum_groups(pool, |group| u64::from(group.failing)))
    }),
    gauge("controller_workers", "Workers by state.", |status| {
        let of = |pool: &PoolStatus| {
            let workers = pool.workers;
            let kinds = [
                ("starting", workers.starting),
                ("idle", workers.idle),
                ("busy", workers.busy),
                ("stopping", workers.stopping),
            ];
            kinds.map(|(kind, many)| labeled([&*pool.name, kind], many.into()))
        };
        status.snapshot.pools.iter().flat_map(of).collect()
    })
    .with_labels(&["pool", "state"]),
    gauge("controller_workers_wanted", "Desired number of workers, all groups together.", |status| {
        per_pool(status, |pool| sum_groups(pool, |group| group.wanted.unwrap_or_default().into()))
    }),
    gauge("controller_ready_requests", "Requests that are ready in the queues of groups.", |status| {
        per_pool(status, |pool| sum_groups(pool, |group| group.ready.unwrap_or_default().into()))
    }),
    gauge("controller_orphans_held", "Orphan requests that the controller holds.", |status| {
        per_pool(status, |pool| pool.orphans_held)
    }),
    gauge("controller_generations_pending", "Changes of the desired state that are not applied yet.", |status| {
        per_pool(status, |pool| pool.generation.saturating_sub(pool.observed_generation))
    }),
    counter("controller_orphans_forwarded", "Orphan requests that were forwarded to their queue.", |status| {
        per_pool(status, |pool| pool.counters.orphans_forwarded)
    }),
    counter("controller_dead_letters", "Requests that the controller answered with an error.", |status| {
        per_pool(status, |pool| pool.counters.dead_letters)
    }),
    counter("controller_poison_requests", "Requests that were moved to the poison queue.", |status| {
        per_pool(status, |pool| pool.counters.poison_requests)
    }),
    counter("controller_queue_operations", "Queue operations that succeeded.", |status| {
        per_pool(status, |pool| pool.counters.queue_operations)
    }),
    counter("controller_queue_operation_failures", "Queue operations that failed.", |status| {
        per_pool(status, |pool| pool.counters.queue_operation_failures)
    }),
    counter("controller_activity_reports", "Activity reports of workers.", |status| {
        per_pool(status, |pool| pool.counters.activity_reports)
    }),
    counter("controller_workers_started", "Workers that were started.", |status| {
        per_pool(status, |pool| pool.counters.workers_started)
    }),
    counter(
        "controller_worker_failures",
        "Workers that exited without a stop request, or failed to start.",
        |status| per_pool(status, |pool| pool.counters.workers_failed),
    ),
    counter("controller_broker_disconnects", "How often the connection to the broker was lost.", |status| {
        per_pool(status, |pool| pool.counters.broker_disconnects)
    }),
];

fn per_pool(status: &ControllerStatusReply, value: impl Fn(&PoolStatus) -> u64) -> Vec<Sample> {
    status.snapshot.pools.iter().map(|pool| labeled([&pool.name], float(value(pool)))).collect()
}

fn sum_groups(pool: &PoolStatus, value: impl Fn(&GroupStatus) -> u64) -> u64 {
    pool.groups.iter().map(value).sum()
}

pub(super) fn text(status: ControllerStatusReply) -> Result<String, fmt::Error> {
    openmetrics::text(status, FAMILIES)
}

pub fn markdown() -> String {
    openmetrics::markdown(FAMILIES)
}
