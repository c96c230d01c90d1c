//! Computes what another configuration would start and stop, from the status of a running controller.

use serde::Serialize;

use super::scale_limits;
use super::status::{self, GroupPhase};
use crate::config::pool::PoolConfig;
use crate::domain::group::load::Load;
use crate::domain::group::scale::{GroupInput, GroupWorker, ScaleLimits, Scaler};
use crate::domain::group::{self, Key};
use crate::domain::time::Instant;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PoolPlan {
    pub pool: String,
    /// Their groups are unknown until they are forwarded.
    pub orphans_held: u64,
    pub starts_workers: bool,
    pub groups: Vec<GroupPlan>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupPlan {
    pub key: String,
    pub workers: u32,
    pub wanted: u32,
    pub start: u32,
    pub stop: Vec<String>,
    pub reasons: Vec<String>,
}

pub fn plan(pool: &status::PoolStatus, settings: &PoolConfig, now: Instant) -> PoolPlan {
    let limits = scale_limits(settings);
    let inputs: Vec<GroupInput> =
        pool.groups.iter().filter_map(|group| group_input(pool, group, limits, now)).collect();
    let mut decisions = Scaler::default().plan(&inputs, settings.max_total, now);
    decisions.sort_by(|one, other| one.key.cmp(&other.key));
    let groups = decisions.into_iter().map(|decision| {
        let seen = pool.groups.iter().find(|group| group.key == decision.key.as_str());
        GroupPlan {
            key: decision.key.as_str().to_owned(),
            workers: seen.map_or(0, |group| group.workers.total()),
            wanted: decision.desired,
            start: if pool.starts_workers { decision.start } else { 0 },
            stop: decision.drain.iter().filter(|_| pool.starts_workers).map(ToString::to_string).collect(),
            reasons: decision.reasons.iter().map(ToString::to_string).collect(),
        }
    });
    PoolPlan {
        pool: pool.name.clone(),
        orphans_held: pool.orphans_held,
        starts_workers: pool.starts_workers,
        groups: groups.collect(),
    }
}

fn group_input(
    pool: &status::PoolStatus,
    seen: &status::GroupStatus,
    limits: ScaleLimits,
    now: Instant,
) -> Option<GroupInput> {
    let demands = || pool.external_demands.iter().filter(|demand| demand.key == seen.key);
    let external: u32 = demands().map(|demand| demand.pending.unwrap_or(0) + demand.claimed.unwrap_or(0)).sum();
    let worker = |worker: &status::WorkerStatus| GroupWorker {
        id: worker.id.as_str().into(),
        activity: worker.state,
        started_at: now.minus(status::seconds_to_duration(worker.age_seconds)),
    };
    Some(GroupInput {
        key: Key::new(&seen.key)?,
        phase: match seen.phase {
            GroupPhase::Active => Some(group::GroupPhase::Active),
            GroupPhase::Unbound => Some(group::GroupPhase::Unbound),
            GroupPhase::Deleting => None,
        },
        limits,
        load: Load {
            ready: seen.ready.unwrap_or(0),
            unacknowledged: seen.unacknowledged,
            external_tasks: external,
            is_unknown: seen.ready.is_none() && external == 0,
            ..Load::default()
        },
        workers: seen.worker_list.iter().map(worker).collect(),
        not_before: seen
            .restart_backoff_seconds
            .map_or(Instant::ORIGIN, |left| now.plus(status::seconds_to_duration(left))),
        is_driver_unavailable: pool.driver_error.is_some(),
        is_paused: seen.paused.is_some(),
    })
}
