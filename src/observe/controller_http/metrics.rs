//! OpenMetrics of a controller. No label holds a routing key, since the number of keys has no bound.

use crate::control::controller_api::ControllerStatusReply;
use crate::controller::status::{CounterValues, GroupPhase, GroupStatus, PoolStatus, Role};
use crate::observe::openmetrics::{self, MetricFamily, MetricKind, Sample, flag, float, labeled, unlabeled};

type Family = MetricFamily<ControllerStatusReply>;

const POOL: &[&str] = &["pool"];

fn gauge(name: &'static str, help: &'static str, read: fn(&PoolStatus) -> Vec<Sample>) -> Family {
    MetricFamily::new(MetricKind::Gauge, name, help, move |status: &ControllerStatusReply| {
        status.pools.iter().flat_map(read).collect()
    })
}

fn group_sum(name: &'static str, help: &'static str, read: fn(&GroupStatus) -> u32) -> Family {
    let sum = move |pool: &PoolStatus| pool.groups.iter().map(|group| u64::from(read(group))).sum();
    pool_metric(MetricKind::Gauge, name, help, sum)
}

fn counter(name: &'static str, help: &'static str, read: fn(&CounterValues) -> u64) -> Family {
    pool_metric(MetricKind::Counter, name, help, move |pool| read(&pool.counters))
}

fn pool_metric(
    kind: MetricKind,
    name: &'static str,
    help: &'static str,
    read: impl Fn(&PoolStatus) -> u64 + 'static,
) -> Family {
    MetricFamily::new(kind, name, help, move |status: &ControllerStatusReply| {
        status.pools.iter().map(|pool| labeled([&pool.name], float(read(pool)))).collect()
    })
    .with_labels(POOL)
}

fn families() -> Vec<Family> {
    vec![
        MetricFamily::new(MetricKind::Info, "build", "The version that runs.", |status: &ControllerStatusReply| {
            vec![labeled([&status.version], 1.0)]
        })
        .with_labels(&["version"]),
        MetricFamily::new(
            MetricKind::Gauge,
            "controller_uptime",
            "Seconds since the controller started.",
            |status: &ControllerStatusReply| unlabeled(status.uptime_seconds),
        )
        .with_unit("seconds"),
        gauge("controller_role", "1 for the role of this controller in the pool.", |pool| {
            Role::ALL.map(|role| labeled([&*pool.name, role.as_str()], flag(pool.role == role))).into()
        })
        .with_labels(&["pool", "role"]),
        gauge("controller_groups", "Groups by phase.", |pool| {
            let many = |phase| pool.groups.iter().filter(|group| group.phase == phase).count() as u64;
            GroupPhase::ALL.map(|phase| labeled([&*pool.name, phase.as_str()], float(many(phase)))).into()
        })
        .with_labels(&["pool", "phase"]),
        group_sum("controller_groups_failing", "Groups whose workers keep failing.", |group| group.failing.into()),
        gauge("controller_workers", "Workers by state.", |pool| {
            pool.workers.by_state().map(|(state, count)| labeled([&*pool.name, state], count.into())).into()
        })
        .with_labels(&["pool", "state"]),
        group_sum("controller_workers_wanted", "Desired number of workers, all groups together.", |group| {
            group.wanted.unwrap_or_default()
        }),
        group_sum("controller_ready_requests", "Requests that are ready in the queues of groups.", |group| {
            group.ready.unwrap_or_default()
        }),
        gauge("controller_orphans_held", "Orphan requests that the controller holds.", |pool| {
            vec![labeled([&pool.name], float(pool.orphans_held))]
        })
        .with_labels(POOL),
        group_sum("controller_groups_unsettled", "Groups whose queue waits for an operation.", |group| {
            u32::from(!group.is_settled)
        }),
        counter("controller_orphans_forwarded", "Orphan requests that were forwarded to their queue.", |counters| {
            counters.orphans_forwarded
        }),
        counter("controller_dead_letters", "Requests that the controller answered with an error.", |counters| {
            counters.dead_letters
        }),
        counter("controller_poison_requests", "Requests that were moved to the poison queue.", |counters| {
            counters.poison_requests
        }),
        counter("controller_queue_operation_failures", "Queue operations that failed.", |counters| {
            counters.queue_operation_failures
        }),
        counter("controller_activity_reports", "Activity reports of workers.", |counters| counters.activity_reports),
        counter("controller_workers_started", "Workers that were started.", |counters| counters.workers_started),
        counter(
            "controller_worker_failures",
            "Workers that exited without a stop request, or failed to start.",
            |counters| counters.workers_failed,
        ),
        counter("controller_broker_disconnects", "How often the connection to the broker was lost.", |counters| {
            counters.broker_disconnects
        }),
    ]
}

pub(super) fn text(status: &ControllerStatusReply) -> String {
    openmetrics::text(status, &families())
}

pub fn markdown() -> String {
    openmetrics::markdown(&families())
}
