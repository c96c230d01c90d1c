//! Runs the queue steps and depth checks of a session, a few at a time, each on its own channel.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::pin::Pin;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use lapin::Channel;
use tokio::time::timeout;

use super::session_error::SessionError;
use super::topology::{Owner, Topology};
use journeyman_domain::group::Key;
use journeyman_domain::group::pool::{QueueStep, StepResult};
use journeyman_domain::limits::{
    AMQP_CALL_TIMEOUT, CONTROLLER_QUEUE_CHECKS_CONCURRENT_MAX, CONTROLLER_QUEUE_STEPS_CONCURRENT_MAX,
};
use journeyman_platform::amqp;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueueJob {
    Step(QueueStep),
    Depth,
}

pub(super) struct QueueJobResult {
    pub(super) key: Key,
    pub(super) job: QueueJob,
    pub(super) result: Result<StepResult, String>,
}

struct FinishedJob {
    key: Key,
    job: QueueJob,
    owner: Owner,
    channel: Option<Channel>,
    /// `None` if the broker did not reply in time.
    result: Option<lapin::Result<StepResult>>,
}

type RunningJob<'a> = Pin<Box<dyn Future<Output = Result<FinishedJob, SessionError>> + Send + 'a>>;

pub(super) struct QueueJobs<'a> {
    topology: Topology<'a>,
    running: FuturesUnordered<RunningJob<'a>>,
    running_steps: usize,
    depths_due: VecDeque<Key>,
    /// Due and running.
    depths: BTreeSet<Key>,
    /// Queues that exist with other arguments.
    external_queues: BTreeSet<Key>,
    idle_channels: Vec<Channel>,
    /// A step without a reply may still be carried out: the next one of its key follows it on the same channel.
    stuck_channels: BTreeMap<Key, Channel>,
}

impl<'a> QueueJobs<'a> {
    pub(super) fn new(topology: Topology<'a>) -> Self {
        Self {
            topology,
            running: FuturesUnordered::new(),
            running_steps: 0,
            depths_due: VecDeque::new(),
            depths: BTreeSet::new(),
            external_queues: BTreeSet::new(),
            idle_channels: Vec::new(),
            stuck_channels: BTreeMap::new(),
        }
    }

    pub(super) const fn can_start_step(&self) -> bool {
        self.running_steps < CONTROLLER_QUEUE_STEPS_CONCURRENT_MAX
    }

    pub(super) fn start_step(&mut self, key: Key, step: QueueStep) {
        self.running_steps += 1;
        let stuck = self.stuck_channels.remove(&key);
        self.start(key, QueueJob::Step(step), stuck);
    }

    pub(super) fn request_depth(&mut self, key: &Key) {
        if self.depths.insert(key.clone()) {
            self.depths_due.push_back(key.clone());
            self.start_depths();
        }
    }

    fn start_depths(&mut self) {
        while self.depths.len() - self.depths_due.len() < CONTROLLER_QUEUE_CHECKS_CONCURRENT_MAX
            && let Some(key) = self.depths_due.pop_front()
        {
            self.start(key, QueueJob::Depth, None);
        }
    }

    fn start(&mut self, key: Key, job: QueueJob, channel: Option<Channel>) {
        let owner = if self.external_queues.contains(&key) { Owner::External } else { Owner::Controller };
        let channel = channel.or_else(|| self.idle_channels.pop());
        self.running.push(Box::pin(run(self.topology, channel, key, job, owner)));
    }

    /// `None` if no job is running.
    ///
    /// Cancel safe.
    pub(super) async fn next(&mut self) -> Option<Result<QueueJobResult, SessionError>> {
        Some(self.running.next().await?.map(|job| self.finish(job)))
    }

    fn finish(&mut self, FinishedJob { key, job, owner, channel, result }: FinishedJob) -> QueueJobResult {
        let is_stuck = result.is_none();
        match job {
            QueueJob::Step(_) => {
                self.running_steps -= 1;
                let is_deleted = job == QueueJob::Step(QueueStep::Delete)
                    && matches!(result, Some(Ok(StepResult::Done | StepResult::NotFound)));
                match owner {
                    Owner::External if !is_deleted => drop(self.external_queues.insert(key.clone())),
                    Owner::External | Owner::Controller => drop(self.external_queues.remove(&key)),
                }
                if is_stuck {
                    self.stuck_channels.extend(channel.clone().map(|channel| (key.clone(), channel)));
                }
            }
            QueueJob::Depth => {
                self.depths.remove(&key);
                self.start_depths();
            }
        }
        self.idle_channels.extend(channel.filter(|_| !is_stuck));
        let result = match result {
            Some(result) => result.map_err(|error| amqp::error_text(&error)),
            None => Err("no reply from the broker in time".to_owned()),
        };
        if let Err(why) = &result {
            tracing::warn!(%key, "queue operation failed: {why}");
        }
        QueueJobResult { key, job, result }
    }
}

const BIND: QueueJob = QueueJob::Step(QueueStep::Bind);

async fn run(
    topology: Topology<'_>,
    channel: Option<Channel>,
    key: Key,
    job: QueueJob,
    mut owner: Owner,
) -> Result<FinishedJob, SessionError> {
    let open = async {
        match channel.filter(|channel| channel.status().connected()) {
            Some(open) => Ok(open),
            None => topology.connection.create_channel().await,
        }
    };
    let Ok(open) = timeout(AMQP_CALL_TIMEOUT, open).await else {
        return Ok(FinishedJob { key, job, owner, channel: None, result: None });
    };
    let mut channel = open?;
    let perform = async {
        let step = if let QueueJob::Step(step) = job { step } else { QueueStep::Inspect };
        match topology.run_step(&channel, &key, step, owner).await {
            Err(error) if job == BIND && amqp::reply_code(&error) == Some(amqp::PRECONDITION_FAILED) => {
                if owner == Owner::Controller {
                    let why = amqp::error_text(&error);
                    tracing::warn!(%key, "the queue exists with other arguments; adopting it: {why}");
                }
                owner = Owner::External;
                channel = topology.connection.create_channel().await?;
                topology.adopt_queue(&channel, &key).await
            }
            Ok(result) if job == BIND => {
                owner = Owner::Controller;
                Ok(result)
            }
            other => other,
        }
    };
    let result = timeout(AMQP_CALL_TIMEOUT, perform).await.ok();
    Ok(FinishedJob { key, job, owner, channel: Some(channel), result })
}
