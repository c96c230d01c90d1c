//! Builds the status of a pool.

use std::collections::BTreeSet;
use std::time::Duration;

use super::external_demand::DemandState;
use super::status::{
    BrokerStatus, DemandStatus, ErrorStatus, GroupPhase, GroupStatus, PauseStatus, PoolStatus, Role, ScaleStatus,
    WorkerStatus,
};
use super::{Controller, RecordedError};
use journeyman_domain::group::overrides::Pause;
use journeyman_domain::group::scale::GroupWorker;
use journeyman_domain::group::{self, Key};
use journeyman_domain::time::Instant;

impl Controller {
    pub(super) fn snapshot(&self, now: Instant) -> PoolStatus {
        let mut keys: BTreeSet<&Key> = self.pool.keys().collect();
        keys.extend(self.workers.keys());
        let mut by_key = self.workers.by_key(now);
        let groups = keys.into_iter().map(|key| self.group_status(key, by_key.remove(key).unwrap_or_default(), now));
        let groups: Vec<GroupStatus> = groups.collect();
        let counters = self.counters.lock();
        let workers = groups.iter().flat_map(|group| &group.worker_list).map(|worker| worker.state).collect();
        let lost = (self.role == Role::Disconnected).then(|| self.disconnect_reason.clone()).flatten();
        PoolStatus {
            name: self.config.pool.clone(),
            role: self.role,
            seconds_in_role: seconds(now.since(self.role_since)),
            broker: BrokerStatus {
                address: self.config.service_address(),
                error: lost,
                consecutive_failures: self.retry.failures(),
            },
            max_total: self.config.settings.max_total,
            paused: self.overrides.pool_pause().map(|pause| pause_status(pause, now)),
            starts_workers: self.workers.starts_workers(),
            driver_error: self.workers.failures.borrow().driver.as_ref().map(|error| error_status(error, now)),
            workers,
            groups,
            external_demands: self.demands.iter().map(|(name, known)| demand_status(name, known)).collect(),
            orphans_held: counters.orphans_held,
            counters: counters.values,
            last_error: self.last_error.as_ref().map(|ended| error_status(ended, now)),
        }
    }

    fn group_status(&self, key: &Key, workers: Vec<GroupWorker>, now: Instant) -> GroupStatus {
        let desired = self.pool.tracker().desired(key);
        let until = |at: Instant| seconds(at.since(now));
        let worker_status = |GroupWorker { id, activity, started_at }| WorkerStatus {
            detail: self.workers.detail(&id),
            id: id.into(),
            state: activity,
            age_seconds: seconds(now.since(started_at)),
        };
        let workers: Vec<WorkerStatus> = workers.into_iter().map(worker_status).collect();
        let (restarts, ours) = (self.workers.restarts.get(key), self.workers.starts_workers());
        let (load, decision) = (self.session.loads.get(key), self.workers.decisions.get(key));
        GroupStatus {
            key: key.as_str().to_owned(),
            phase: match desired.map(|desired| desired.phase) {
                Some(group::GroupPhase::Active) => GroupPhase::Active,
                Some(group::GroupPhase::Unbound) => GroupPhase::Unbound,
                None => GroupPhase::Deleting,
            },
            next_phase_seconds: desired.map(|desired| until(desired.until)),
            ready: self.pool.depth(key).map(|depth| depth.ready),
            unacknowledged: load.and_then(|load| load.unacknowledged.or_else(|| load.in_flight.filter(|_| ours))),
            workers: workers.iter().map(|worker| worker.state).collect(),
            worker_list: workers,
            wanted: decision.map(|decision| decision.desired),
            reasons: decision.iter().flat_map(|decision| &decision.reasons).map(ToString::to_string).collect(),
            waiting_for: self.pool.wait_of(key).map(|wait| match self.session.held.refusal(key) {
                Some(why) => format!("{wait}: {why}"),
                None => wait.to_string(),
            }),
            restart_backoff_seconds: restarts.map(|row| row.not_before()).filter(|at| *at > now).map(until),
            paused: self.overrides.pause_of(key).map(|pause| pause_status(pause, now)),
            scale_override: self.overrides.scale_of(key).map(|numbers| ScaleStatus {
                min: numbers.min,
                max: numbers.max,
                by: numbers.note.to_string(),
                remaining_seconds: seconds(numbers.until.since(now)),
            }),
            consecutive_failures: restarts.map_or(0, |row| row.consecutive_failures()),
            failing: restarts.is_some_and(|row| row.is_failing()),
            last_exit: self.workers.failures.borrow().groups.get(key).map(|failure| error_status(&failure.error, now)),
        }
    }
}

fn demand_status(name: &str, known: &DemandState) -> DemandStatus {
    DemandStatus {
        name: name.to_owned(),
        key: known.key.as_str().to_owned(),
        pending: known.counts.map(|counts| counts.pending),
        claimed: known.counts.and_then(|counts| counts.claimed),
        error: known.error.clone(),
    }
}

fn pause_status(pause: &Pause, now: Instant) -> PauseStatus {
    PauseStatus { by: pause.note.to_string(), remaining_seconds: pause.until.map(|until| seconds(until.since(now))) }
}

fn error_status(ended: &RecordedError, now: Instant) -> ErrorStatus {
    ErrorStatus { message: ended.message.clone(), seconds_ago: seconds(now.since(ended.at)) }
}

fn seconds(span: Duration) -> f64 {
    (span.as_secs_f64() * 1e3).round() / 1e3
}
