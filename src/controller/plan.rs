//! What a controller would start and stop, from what the broker and this host have at the moment. Nothing is made, taken from a
//! queue, or told to anybody.
//!
//! Where a controller answers, groups and workers are as it sees them. Where none does, they are what one would find that is
//! started now: the workers of this host and the queues of the keys that were written down.

use std::collections::BTreeMap;

use lapin::{Channel, Connection};
use serde::Serialize;
use tokio::time::timeout;

use super::driver::{self, Found, Standing, Trouble};
use super::memory::Memory;
use super::view::{self, Phase};
use super::{Means, Settings, topology};
use crate::amqp;
use crate::domain::group::load::Load;
use crate::domain::group::pool::Answer;
use crate::domain::group::scale::{Decision, Doing, Group, Rest, Scale, Worker};
use crate::domain::group::{self, Key};
use crate::domain::refusal::Refusal;
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{AMQP_CALL_TIMEOUT, CONTROLLER_GROUPS_MAX};
use crate::source::Refused;

/// What would be done about a pool. The keys are stable: `journeyman controller plan -o json` shows them as they are.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// The pool.
    pub pool: String,
    /// Its broker, without user and password.
    pub broker: String,
    /// Whether a controller has the pool.
    pub controlled: Controlled,
    /// Requests under keys without a queue; absent where their queue has not been made. Which keys they have is not known before
    /// they are taken, so the groups that they ask for are not among those here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub orphans: Option<u32>,
    /// Requests that wait to be answered in a worker's place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dead_letters: Option<u32>,
    /// Whether workers are started here at all.
    pub starts_workers: bool,
    /// In the order of their keys.
    pub groups: Vec<Planned>,
}

/// Who has a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Controlled {
    /// The controller that answers here.
    Here,
    /// Another one: what is started here stands by until that has gone.
    Elsewhere,
    /// Nobody.
    Nowhere,
}

/// What would be done about a group.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Planned {
    /// Its key.
    pub key: String,
    /// What is wanted of it.
    pub phase: Phase,
    /// Its queue; absent where there is none, or none that could be asked: it would be made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<Queue>,
    /// The workers that are there.
    pub workers: u32,
    /// How many it would have.
    pub wanted: u32,
    /// How many would be started at once.
    pub start: u32,
    /// Who would be told to go.
    pub stop: Vec<String>,
    /// Why.
    pub reasons: Vec<String>,
}

/// What a queue holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Queue {
    /// Requests that no worker holds.
    pub ready: u32,
    /// How many consume.
    pub consumers: u32,
}

/// Looks, and decides as a controller with these settings would.
///
/// # Errors
///
/// Where the broker cannot be asked.
pub async fn plan(settings: &Settings, seen: Option<&view::Pool>, asked: &[Key]) -> Result<Plan, Refused> {
    let now = Clock::boot().now();
    let connection = settings.broker.connect(&format!("journeyman controller plan of {}", settings.pool)).await?;
    let mut eyes = Eyes { connection: &connection, channel: None };
    let locked = eyes.look(&settings.names.lock_queue()).await? == Looked::Locked;
    let controlled = match (locked, seen.is_some()) {
        (true, true) => Controlled::Here,
        (true, false) => Controlled::Elsewhere,
        (false, _) => Controlled::Nowhere,
    };
    let mut drafts = match seen {
        Some(pool) => of_view(pool, settings, now),
        None => of_host(settings, now).await?,
    };
    for key in asked {
        let draft = drafts.entry(key.clone()).or_insert_with(|| draft(key, settings));
        draft.phase = Some(group::Phase::Active);
    }
    let mut queues = BTreeMap::new();
    for (key, draft) in drafts.iter_mut().take(CONTROLLER_GROUPS_MAX) {
        let Some(name) = settings.names.request_queue(key) else { continue };
        if let Looked::There(queue) = eyes.look(&name).await? {
            draft.load = Load { ready: queue.ready, ..Load::default() };
            // What waits is asked for.
            if queue.ready > 0 {
                draft.phase = Some(group::Phase::Active);
            }
            queues.insert(key.clone(), queue);
        }
    }
    for demand in &settings.demands {
        let counts = demand.counts().await.map_err(|refused| Refused {
            what: format!("the demand {} cannot be counted: {}", demand.name, refused.what),
            ..refused
        })?;
        let draft = drafts.entry(demand.key.clone()).or_insert_with(|| draft(&demand.key, settings));
        draft.load = counts.over(draft.load);
        if !draft.load.is_none() {
            draft.phase = Some(group::Phase::Active);
        }
    }
    let depth = |looked| match looked {
        Looked::There(queue) => Some(queue.ready),
        Looked::Missing | Looked::Locked => None,
    };
    let orphans = depth(eyes.look(&settings.names.orphan_queue()).await?);
    let dead_letters = depth(eyes.look(&settings.names.dead_letter_queue()).await?);
    // Nothing waits for the broker's word that the connection is over.
    drop(connection.close(200, "done".into()).await);
    let groups: Vec<Group> = drafts.into_values().collect();
    let starts_workers = !matches!(settings.posting.means, Means::None);
    let decisions = decided(&groups, settings, now);
    let groups =
        groups.iter().map(|group| planned(group, &queues, decisions.get(&group.key), starts_workers)).collect();
    let (pool, broker) = (settings.pool.clone(), settings.broker.shown().to_owned());
    Ok(Plan { pool, broker, controlled, orphans, dead_letters, starts_workers, groups })
}

fn decided(groups: &[Group], settings: &Settings, now: Instant) -> BTreeMap<Key, Decision> {
    let decisions = Scale::default().plan(groups, settings.tuning.budget, now);
    decisions.into_iter().map(|decision| (decision.key.clone(), decision)).collect()
}

fn planned(group: &Group, queues: &BTreeMap<Key, Queue>, decision: Option<&Decision>, starts_workers: bool) -> Planned {
    let ours = decision.filter(|_| starts_workers);
    let workers = u32::try_from(group.workers.len()).unwrap_or(u32::MAX);
    Planned {
        key: group.key.as_str().to_owned(),
        phase: match group.phase {
            Some(group::Phase::Active) => Phase::Active,
            Some(group::Phase::Unbound) => Phase::Unbound,
            None => Phase::Going,
        },
        queue: queues.get(&group.key).copied(),
        workers,
        wanted: decision.map_or(workers, |decision| decision.wanted),
        start: ours.map_or(0, |decision| decision.start),
        stop: ours.iter().flat_map(|decision| decision.drain.iter().map(ToString::to_string)).collect(),
        reasons: decision.iter().flat_map(|decision| decision.reasons.iter().map(ToString::to_string)).collect(),
    }
}

fn draft(key: &Key, settings: &Settings) -> Group {
    Group {
        key: key.clone(),
        phase: None,
        limits: settings.tuning.limits,
        load: Load::default(),
        workers: Vec::new(),
        not_before: Instant::ORIGIN,
        rest: Rest::No,
    }
}

/// As the controller sees them that answers.
fn of_view(pool: &view::Pool, settings: &Settings, now: Instant) -> BTreeMap<Key, Group> {
    let of = |seen: &view::Group| {
        let mut draft = draft(&Key::new(&seen.key)?, settings);
        draft.phase = match seen.phase {
            Phase::Active => Some(group::Phase::Active),
            Phase::Unbound => Some(group::Phase::Unbound),
            Phase::Going => None,
        };
        let worker = |worker: &view::Worker| Worker {
            id: worker.id.as_str().into(),
            doing: match worker.doing {
                view::Doing::Starting => Doing::Starting,
                view::Doing::Idle => Doing::Idle,
                view::Doing::Busy => Doing::Busy,
                view::Doing::Going => Doing::Going,
            },
            since: now.minus(view::span(worker.seconds)),
        };
        draft.workers = seen.members.iter().map(worker).collect();
        draft.not_before = seen.pause_seconds.map_or(Instant::ORIGIN, |left| now.plus(view::span(left)));
        Some((draft.key.clone(), draft))
    };
    pool.groups.iter().filter_map(of).collect()
}

/// As a controller would find them that is started now: each for a whole life.
async fn of_host(settings: &Settings, now: Instant) -> Result<BTreeMap<Key, Group>, Refused> {
    let posting = &settings.posting;
    let found = driver::peek(posting).await;
    let found = found.map_err(|Trouble(why)| trouble(format!("it is not known which workers are there: {why}")))?;
    let starts_workers = !matches!(posting.means, Means::None);
    let known = Memory::new(starts_workers.then(|| posting.folder.clone())).read();
    let mut drafts: BTreeMap<Key, Group> = known.into_iter().map(|key| (key.clone(), draft(&key, settings))).collect();
    for Found { id, key, standing } in found {
        let draft = drafts.entry(key.clone()).or_insert_with(|| draft(&key, settings));
        // What one that was found does nobody knows yet.
        let doing = if standing == Standing::Going { Doing::Going } else { Doing::Busy };
        draft.workers.push(Worker { id: id.into(), doing, since: now });
    }
    for draft in drafts.values_mut() {
        draft.phase = Some(group::Phase::Active);
    }
    Ok(drafts)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Looked {
    There(Queue),
    Missing,
    /// It is somebody else's alone.
    Locked,
}

/// Looks at queues. Each that is not there costs a channel.
struct Eyes<'a> {
    connection: &'a Connection,
    channel: Option<Channel>,
}

impl Eyes<'_> {
    async fn look(&mut self, queue: &str) -> Result<Looked, Refused> {
        let looking = async {
            let channel = match self.channel.take().filter(|channel| channel.status().connected()) {
                Some(channel) => channel,
                None => self.connection.create_channel().await?,
            };
            let looked = topology::look(&channel, queue).await;
            self.channel = Some(channel);
            looked
        };
        let slow = |_| trouble(format!("the broker did not answer in {AMQP_CALL_TIMEOUT:?}"));
        match timeout(AMQP_CALL_TIMEOUT, looking).await.map_err(slow)? {
            Ok(Answer::Holds { ready, consumers }) => Ok(Looked::There(Queue { ready, consumers })),
            Ok(Answer::Done | Answer::Missing | Answer::Failed) => Ok(Looked::Missing),
            Err(error) if amqp::code(&error) == Some(amqp::NOT_FOUND) => Ok(Looked::Missing),
            Err(error) if amqp::code(&error) == Some(amqp::RESOURCE_LOCKED) => Ok(Looked::Locked),
            Err(error) => Err(trouble(amqp::shown(&error))),
        }
    }
}

const fn trouble(what: String) -> Refused {
    Refused { refusal: Refusal::Retry { after: None }, what }
}
