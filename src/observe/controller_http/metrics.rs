//! OpenMetrics of a controller. No label holds a routing key, since the number of keys has no bound.

use crate::control::controller_api::ControllerStatusReply;
use crate::controller::status::{CounterValues, GroupPhase, GroupStatus, PoolStatus, Role};
use crate::observe::openmetrics::{self, MetricFamily, MetricKind, Sample, flag, float, labeled, unlabeled};

type Family = MetricFamily<ControllerStatusReply>;

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
}

fn families() -> Vec<Family> {
    vec![
        MetricFamily::new(
            MetricKind::Info,
            "build{version}",
            "The version that runs.",
            |status: &ControllerStatusReply| vec![labeled([&status.version], 1.0)],
        ),
        MetricFamily::new(
            MetricKind::Gauge,
            "controller_uptime_seconds",
            "Seconds since the controller started.",
            |status: &ControllerStatusReply| unlabeled(status.uptime_seconds),
        ),
        gauge("controller_role{pool,role}", "1 for the role of this controller in the pool.", |pool| {
            Role::ALL.map(|role| labeled([&*pool.name, role.as_str()], flag(pool.role == role))).into()
        }),
        gauge("controller_groups{pool,phase}", "Groups by phase.", |pool| {
            let many = |phase| pool.groups.iter().filter(|group| group.phase == phase).count() as u64;
            GroupPhase::ALL.map(|phase| labeled([&*pool.name, phase.as_str()], float(many(phase)))).into()
        }),
        group_sum("controller_groups_failing{pool}", "Groups whose workers keep failing.", |group| {
            group.failing.into()
        }),
        gauge("controller_driver_up{pool}", "1 while the driver lists and starts workers.", |pool| {
            vec![labeled([&pool.name], flag(pool.driver_error.is_none()))]
        }),
        gauge("controller_workers{pool,state}", "Workers by state.", |pool| {
            pool.workers.by_state().map(|(state, count)| labeled([&*pool.name, state], count.into())).into()
        }),
        group_sum("controller_workers_wanted{pool}", "Desired number of workers, all groups together.", |group| {
            group.wanted.unwrap_or_default()
        }),
        group_sum("controller_ready_requests{pool}", "Requests that are ready in the queues of groups.", |group| {
            group.ready.unwrap_or_default()
        }),
        gauge("controller_orphans_held{pool}", "Orphan requests that the controller holds.", |pool| {
            vec![labeled([&pool.name], float(pool.orphans_held))]
        }),
        group_sum("controller_groups_unsettled{pool}", "Groups whose queue waits for an operation.", |group| {
            u32::from(group.waiting_for.is_some())
        }),
        counter(
            "controller_orphans_forwarded{pool}",
            "Orphan requests that were forwarded to their queue.",
            |counters| counters.orphans_forwarded,
        ),
        counter("controller_dead_letters{pool}", "Requests that the controller answered with an error.", |counters| {
            counters.dead_letters
        }),
        counter("controller_poison_requests{pool}", "Requests that were moved to the poison queue.", |counters| {
            counters.poison_requests
        }),
        counter("controller_queue_operation_failures{pool}", "Queue operations that failed.", |counters| {
            counters.queue_operation_failures
        }),
        counter("controller_activity_reports{pool}", "Activity reports of workers.", |counters| {
            counters.activity_reports
        }),
        counter("controller_workers_started{pool}", "Workers that were started.", |counters| counters.workers_started),
        counter(
            "controller_worker_failures{pool}",
            "Workers that exited without a stop request, or failed to start.",
            |counters| counters.workers_failed,
        ),
        counter(
            "controller_broker_disconnects{pool}",
            "How often the connection to the broker was lost.",
            |counters| counters.broker_disconnects,
        ),
    ]
}

pub(super) fn text(status: &ControllerStatusReply) -> String {
    openmetrics::text(status, &families())
}

pub fn markdown() -> String {
    openmetrics::markdown(&families())
}
