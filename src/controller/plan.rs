//! Computes what another configuration would start and stop, from the state of a running controller.

use std::collections::BTreeMap;

use lapin::{Channel, Connection};
use serde::Serialize;
use tokio::time::timeout;

use super::driver::{self, DriverError, ListedWorker, WorkerState};
use super::known_keys::KnownKeys;
use super::status::{self, GroupPhase};
use super::{ControllerConfig, DriverKind, topology};
use crate::amqp;
use crate::domain::group::load::Load;
use crate::domain::group::pool::StepResult;
use crate::domain::group::scale::{GroupInput, GroupWorker, PauseState, ScaleDecision, Scaler, WorkerActivity};
use crate::domain::group::{self, Key};
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{AMQP_CALL_TIMEOUT, CONTROLLER_GROUPS_MAX};
use crate::source::CallError;

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PoolPlan {
    pub pool: String,
    pub broker: String,
    pub controlled: PoolOwner,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub orphans: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dead_letters: Option<u32>,
    pub starts_workers: bool,
    pub groups: Vec<GroupPlan>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PoolOwner {
    Here,
    Elsewhere,
    Nowhere,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct GroupPlan {
    pub key: String,
    pub phase: GroupPhase,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueDepth>,
    pub workers: u32,
    pub wanted: u32,
    pub start: u32,
    pub stop: Vec<String>,
    pub reasons: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct QueueDepth {
    pub ready: u32,
    pub consumers: u32,
}

pub async fn plan(
    settings: &ControllerConfig,
    seen: Option<&status::PoolStatus>,
    asked: &[Key],
) -> Result<PoolPlan, CallError> {
    let now = Clock::boot().now();
    let connection = settings.broker.connect(&format!("journeyman controller plan of {}", settings.pool)).await?;
    let mut eyes = QueueProber { connection: &connection, channel: None };
    let locked = eyes.probe(&settings.names.lock_queue()).await? == QueueProbe::Locked;
    let controlled = match (locked, seen.is_some()) {
        (true, true) => PoolOwner::Here,
        (true, false) => PoolOwner::Elsewhere,
        (false, _) => PoolOwner::Nowhere,
    };
    let mut drafts = match seen {
        Some(pool) => groups_from_status(pool, settings, now),
        None => groups_from_host(settings, now).await?,
    };
    for key in asked {
        let draft = drafts.entry(key.clone()).or_insert_with(|| draft(key, settings));
        draft.phase = Some(group::GroupPhase::Active);
    }
    let mut queues = BTreeMap::new();
    for (key, draft) in drafts.iter_mut().take(CONTROLLER_GROUPS_MAX) {
        let Some(name) = settings.names.request_queue(key) else { continue };
        if let QueueProbe::Present(queue) = eyes.probe(&name).await? {
            draft.load = Load { ready: queue.ready, ..Load::default() };
            // Waiting requests are demand.
            if queue.ready > 0 {
                draft.phase = Some(group::GroupPhase::Active);
            }
            queues.insert(key.clone(), queue);
        }
    }
    for demand in &settings.demands {
        let counts = demand.poll_once().await.map_err(|refused| CallError {
            message: format!("demand {}: cannot count tasks: {}", demand.name, refused.message),
            ..refused
        })?;
        let draft = drafts.entry(demand.key.clone()).or_insert_with(|| draft(&demand.key, settings));
        draft.load = counts.add_to(draft.load);
        if !draft.load.is_idle() {
            draft.phase = Some(group::GroupPhase::Active);
        }
    }
    let depth = |looked| match looked {
        QueueProbe::Present(queue) => Some(queue.ready),
        QueueProbe::Missing | QueueProbe::Locked => None,
    };
    let orphans = depth(eyes.probe(&settings.names.orphan_queue()).await?);
    let dead_letters = depth(eyes.probe(&settings.names.dead_letter_queue()).await?);
    // No need to wait for the close.
    drop(connection.close(200, "done".into()).await);
    let groups: Vec<GroupInput> = drafts.into_values().collect();
    let starts_workers = !matches!(settings.driver.kind, DriverKind::None);
    let decisions = decide(&groups, settings, now);
    let groups =
        groups.iter().map(|group| group_plan(group, &queues, decisions.get(&group.key), starts_workers)).collect();
    let (pool, broker) = (settings.pool.clone(), settings.broker.display_url().to_owned());
    Ok(PoolPlan { pool, broker, controlled, orphans, dead_letters, starts_workers, groups })
}

fn decide(groups: &[GroupInput], settings: &ControllerConfig, now: Instant) -> BTreeMap<Key, ScaleDecision> {
    let decisions = Scaler::default().plan(groups, settings.scaling.max_total, now);
    decisions.into_iter().map(|decision| (decision.key.clone(), decision)).collect()
}

fn group_plan(
    group: &GroupInput,
    queues: &BTreeMap<Key, QueueDepth>,
    decision: Option<&ScaleDecision>,
    starts_workers: bool,
) -> GroupPlan {
    let ours = decision.filter(|_| starts_workers);
    let workers = u32::try_from(group.workers.len()).unwrap_or(u32::MAX);
    GroupPlan {
        key: group.key.as_str().to_owned(),
        phase: match group.phase {
            Some(group::GroupPhase::Active) => GroupPhase::Active,
            Some(group::GroupPhase::Unbound) => GroupPhase::Unbound,
            None => GroupPhase::Deleting,
        },
        queue: queues.get(&group.key).copied(),
        workers,
        wanted: decision.map_or(workers, |decision| decision.desired),
        start: ours.map_or(0, |decision| decision.start),
        stop: ours.iter().flat_map(|decision| decision.drain.iter().map(ToString::to_string)).collect(),
        reasons: decision.iter().flat_map(|decision| decision.reasons.iter().map(ToString::to_string)).collect(),
    }
}

fn draft(key: &Key, settings: &ControllerConfig) -> GroupInput {
    GroupInput {
        key: key.clone(),
        phase: None,
        limits: settings.scaling.limits,
        load: Load::default(),
        workers: Vec::new(),
        not_before: Instant::ORIGIN,
        pause: PauseState::NotPaused,
    }
}

fn groups_from_status(
    pool: &status::PoolStatus,
    settings: &ControllerConfig,
    now: Instant,
) -> BTreeMap<Key, GroupInput> {
    let of = |seen: &status::GroupStatus| {
        let mut draft = draft(&Key::new(&seen.key)?, settings);
        draft.phase = match seen.phase {
            GroupPhase::Active => Some(group::GroupPhase::Active),
            GroupPhase::Unbound => Some(group::GroupPhase::Unbound),
            GroupPhase::Deleting => None,
        };
        let worker = |worker: &status::WorkerStatus| GroupWorker {
            id: worker.id.as_str().into(),
            activity: match worker.state {
                status::WorkerActivity::Starting => WorkerActivity::Starting,
                status::WorkerActivity::Idle => WorkerActivity::Idle,
                status::WorkerActivity::Busy => WorkerActivity::Busy,
                status::WorkerActivity::Stopping => WorkerActivity::Stopping,
            },
            started_at: now.minus(status::seconds_to_duration(worker.age_seconds)),
        };
        draft.workers = seen.worker_list.iter().map(worker).collect();
        draft.not_before =
            seen.restart_backoff_seconds.map_or(Instant::ORIGIN, |left| now.plus(status::seconds_to_duration(left)));
        Some((draft.key.clone(), draft))
    };
    pool.groups.iter().filter_map(of).collect()
}

async fn groups_from_host(settings: &ControllerConfig, now: Instant) -> Result<BTreeMap<Key, GroupInput>, CallError> {
    let posting = &settings.driver;
    let found = driver::list_once(posting).await;
    let found = found.map_err(|DriverError(why)| retryable(format!("cannot list the workers: {why}")))?;
    let starts_workers = !matches!(posting.kind, DriverKind::None);
    let known = KnownKeys::new(starts_workers.then(|| posting.folder.clone())).load();
    let mut drafts: BTreeMap<Key, GroupInput> =
        known.into_iter().map(|key| (key.clone(), draft(&key, settings))).collect();
    for ListedWorker { id, key, state: standing } in found {
        let draft = drafts.entry(key.clone()).or_insert_with(|| draft(&key, settings));
        let doing = if standing == WorkerState::Stopping { WorkerActivity::Stopping } else { WorkerActivity::Busy };
        draft.workers.push(GroupWorker { id: id.into(), activity: doing, started_at: now });
    }
    for draft in drafts.values_mut() {
        draft.phase = Some(group::GroupPhase::Active);
    }
    Ok(drafts)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QueueProbe {
    Present(QueueDepth),
    Missing,
    Locked,
}

struct QueueProber<'a> {
    connection: &'a Connection,
    channel: Option<Channel>,
}

impl QueueProber<'_> {
    async fn probe(&mut self, queue: &str) -> Result<QueueProbe, CallError> {
        let looking = async {
            let channel = match self.channel.take().filter(|channel| channel.status().connected()) {
                Some(channel) => channel,
                None => self.connection.create_channel().await?,
            };
            let looked = topology::inspect_queue(&channel, queue).await;
            self.channel = Some(channel);
            looked
        };
        let slow = |_| retryable(format!("no reply from the broker within {AMQP_CALL_TIMEOUT:?}"));
        match timeout(AMQP_CALL_TIMEOUT, looking).await.map_err(slow)? {
            Ok(StepResult::Contents { ready, consumers }) => Ok(QueueProbe::Present(QueueDepth { ready, consumers })),
            Ok(StepResult::Done | StepResult::NotFound | StepResult::Failed) => Ok(QueueProbe::Missing),
            Err(error) if amqp::reply_code(&error) == Some(amqp::NOT_FOUND) => Ok(QueueProbe::Missing),
            Err(error) if amqp::reply_code(&error) == Some(amqp::RESOURCE_LOCKED) => Ok(QueueProbe::Locked),
            Err(error) => Err(retryable(amqp::error_text(&error))),
        }
    }
}

const fn retryable(what: String) -> CallError {
    CallError { refusal: Refusal::Retry { retry_after: None }, message: what }
}
