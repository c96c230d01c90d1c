//! Demand from queues of another system: pending and claimed tasks, polled.

use tokio::sync::mpsc;
use tokio::time::sleep;

use super::Controller;
use super::session_error::SessionError;
use journeyman_domain::group::Key;
use journeyman_domain::group::load::Load;
use journeyman_domain::group::pool::Event;
use journeyman_domain::limits::{DEMAND_CLAIMED_MAX, DEMAND_INTERVAL, TASK_LIST_PAGES_MAX};
use journeyman_domain::refusal::Refusal;
use journeyman_platform::zookeeper::{ConnectConfig, Dialect, Session, job_queue::JobQueue};
use journeyman_worker::source::CallError;
use journeyman_worker::source::taskcluster::Api;

#[derive(Clone)]
pub struct DemandSource {
    pub name: String,
    pub key: Key,
    pub queue: DemandQueue,
}

#[derive(Clone)]
pub enum DemandQueue {
    Taskcluster { api: Api, task_queue: String },
    Zookeeper { connect: ConnectConfig, queues: Vec<JobQueue>, dialect: Dialect },
}

impl DemandCounts {
    pub(super) fn add_to(self, load: Load) -> Load {
        match self.claimed {
            Some(claimed) => {
                let all = self.pending.saturating_add(claimed);
                Load { external_tasks: load.external_tasks.saturating_add(all), ..load }
            }
            None => Load { ready: load.ready.saturating_add(self.pending), ..load },
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DemandCounts {
    pub(super) pending: u32,
    pub(super) claimed: Option<u32>,
}

pub(super) struct DemandReport {
    name: String,
    key: Key,
    counts: Result<DemandCounts, CallError>,
}

pub(super) struct DemandState {
    pub(super) key: Key,
    pub(super) counts: Option<DemandCounts>,
    pub(super) error: Option<String>,
}

pub(super) async fn poll_demand(demand: &DemandSource, reports: &mpsc::Sender<DemandReport>) -> SessionError {
    let mut session = None;
    loop {
        let counts = match &demand.queue {
            DemandQueue::Taskcluster { api, task_queue } => count_tasks(api, task_queue).await,
            DemandQueue::Zookeeper { connect, queues, dialect } => {
                count_requests(&mut session, connect, queues, *dialect).await
            }
        };
        let report = DemandReport { name: demand.name.clone(), key: demand.key.clone(), counts };
        reports.send(report).await.ok();
        sleep(DEMAND_INTERVAL).await;
    }
}

async fn count_tasks(api: &Api, task_queue: &str) -> Result<DemandCounts, CallError> {
    let pending = u32::try_from(api.pending_count(task_queue).await?).unwrap_or(u32::MAX);
    match count_claimed(api, task_queue).await {
        Ok(claimed) => Ok(DemandCounts { pending, claimed: Some(claimed) }),
        Err(error) if matches!(error.refusal, Refusal::Denied | Refusal::Gone | Refusal::Rejected) => {
            Ok(DemandCounts { pending, claimed: None })
        }
        Err(error) => Err(error),
    }
}

/// Uses the session of the poll before, unless that has ended.
async fn count_requests(
    session: &mut Option<Session>,
    connect: &ConnectConfig,
    queues: &[JobQueue],
    dialect: Dialect,
) -> Result<DemandCounts, CallError> {
    let standing = match session.take().filter(|session| !session.is_ended()) {
        Some(standing) => standing,
        None => Session::connect(connect).await?,
    };
    let session = session.insert(standing);
    let (mut pending, mut claimed) = (0, 0);
    for queue in queues {
        let counts = queue.count(session, dialect).await?;
        pending += counts.pending;
        claimed += counts.claimed;
    }
    let number = |count| u32::try_from(count).unwrap_or(u32::MAX);
    Ok(DemandCounts { pending: number(pending), claimed: Some(number(claimed)) })
}

async fn count_claimed(api: &Api, task_queue: &str) -> Result<u32, CallError> {
    let (mut claimed, mut token) = (0_usize, None);
    for _ in 0..TASK_LIST_PAGES_MAX {
        let page = api.claimed_tasks(task_queue, token.as_deref()).await?;
        claimed += page.entries.len();
        token = page.continuation_token;
        if token.is_none() || claimed >= DEMAND_CLAIMED_MAX {
            break;
        }
    }
    Ok(u32::try_from(claimed).unwrap_or(u32::MAX))
}

impl Controller {
    pub(super) fn on_demand_report(&mut self, report: DemandReport) {
        let DemandReport { name, key, counts } = report;
        let now = self.clock.now();
        let known = self.demands.entry(name.clone());
        let known = known.or_insert_with(|| DemandState { key: key.clone(), counts: None, error: None });
        match counts {
            Ok(counts) => {
                if known.error.take().is_some() {
                    tracing::info!(demand = name, "task counts are available again");
                }
                if counts.claimed.is_none() && known.counts.is_none_or(|before| before.claimed.is_some()) {
                    tracing::warn!(demand = name, "not allowed to list claimed tasks, counting pending tasks only");
                }
                known.counts = Some(counts);
                if counts.pending > 0 || counts.claimed > Some(0) {
                    self.pool.handle(Event::Demand { key: key.clone(), extra: DEMAND_INTERVAL }, now);
                }
            }
            Err(refused) => {
                let why = refused.message;
                if known.error.is_none() {
                    tracing::warn!(demand = name, "cannot count tasks, keeping the last counts: {why}");
                }
                let message = format!("demand {name}: {why}");
                known.error = Some(why);
                self.record_error(message);
            }
        }
    }

    pub(super) fn add_demand(&self, key: &Key, load: Load) -> Load {
        let counted = self.demands.values().filter(|known| known.key == *key).filter_map(|known| known.counts);
        counted.fold(load, |load, counts| counts.add_to(load))
    }
}
