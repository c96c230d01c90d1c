//! Runs the queue steps and depth checks of a session, a few at a time, each on its own channel.
//!
//! They have a connection of their own: the broker closes the whole connection over some of the declarations that it does not allow.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::pin::Pin;
use std::sync::Arc;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use lapin::{Channel, Connection};
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::ControllerConfig;
use super::topology::{Owner, Topology};
use journeyman_domain::group::Key;
use journeyman_domain::group::pool::{QueueStep, StepResult};
use journeyman_domain::limits::{
    AMQP_CALL_TIMEOUT, CONTROLLER_QUEUE_CHECKS_CONCURRENT_MAX, CONTROLLER_QUEUE_STEPS_CONCURRENT_MAX,
};
use journeyman_domain::refusal::CallError;
use journeyman_platform::amqp;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueueJob {
    Step(QueueStep),
    Depth,
}

pub(super) struct QueueJobResult {
    pub(super) key: Key,
    pub(super) job: QueueJob,
    pub(super) result: StepResult,
    /// Why it failed or was refused.
    pub(super) error: Option<String>,
}

struct FinishedJob {
    key: Key,
    job: QueueJob,
    owner: Owner,
    channel: Option<Channel>,
    /// `None` if the broker did not reply in time.
    result: Option<Result<StepResult, JobError>>,
    steps_max: usize,
}

struct JobError {
    code: Option<u16>,
    message: String,
}

impl From<lapin::Error> for JobError {
    fn from(error: lapin::Error) -> Self {
        Self { code: amqp::reply_code(&error), message: amqp::error_text(&error) }
    }
}

impl From<CallError> for JobError {
    fn from(error: CallError) -> Self {
        Self { code: None, message: error.message }
    }
}

type RunningJob<'a> = Pin<Box<dyn Future<Output = FinishedJob> + Send + 'a>>;
type JobConnection = Arc<Mutex<Option<Connection>>>;

pub(super) struct QueueJobs<'a> {
    topology: Topology<'a>,
    config: &'a ControllerConfig,
    connection: JobConnection,
    running: FuturesUnordered<RunningJob<'a>>,
    pub(super) running_steps: usize,
    /// One after the broker has closed the connection, until the step is found for which it did.
    pub(super) steps_max: usize,
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
    pub(super) fn new(topology: Topology<'a>, config: &'a ControllerConfig) -> Self {
        Self {
            topology,
            config,
            connection: JobConnection::default(),
            running: FuturesUnordered::new(),
            running_steps: 0,
            steps_max: CONTROLLER_QUEUE_STEPS_CONCURRENT_MAX,
            depths_due: VecDeque::new(),
            depths: BTreeSet::new(),
            external_queues: BTreeSet::new(),
            idle_channels: Vec::new(),
            stuck_channels: BTreeMap::new(),
        }
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
        let (topology, config, steps_max) = (self.topology, self.config, self.steps_max);
        let connection = Arc::clone(&self.connection);
        self.running.push(Box::pin(async move {
            let (owner, channel, result) = run(topology, config, connection, channel, &key, job, owner).await;
            FinishedJob { key, job, owner, channel, result, steps_max }
        }));
    }

    /// `None` if no job is running.
    ///
    /// Cancel safe.
    pub(super) async fn next(&mut self) -> Option<QueueJobResult> {
        self.running.next().await.map(|job| self.finish(job))
    }

    fn finish(&mut self, FinishedJob { key, job, owner, channel, result, steps_max }: FinishedJob) -> QueueJobResult {
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
        let (result, error) = match result {
            Some(Ok(result)) => (result, None),
            Some(Err(JobError { code, message })) => (self.judge(job, code, steps_max), Some(message)),
            None => (StepResult::Failed, Some("no reply from the broker in time".to_owned())),
        };
        if let Some(why) = &error {
            tracing::warn!(%key, "queue operation failed: {why}");
        }
        QueueJobResult { key, job, result, error }
    }

    /// Whether a broker that replies with `code` refuses the queue of the key. A closed connection ends the steps beside as well, so
    /// the one that closed it is known only where it was alone.
    fn judge(&mut self, job: QueueJob, code: Option<u16>, steps_max: usize) -> StepResult {
        const REFUSED: [u16; 3] = [amqp::ACCESS_REFUSED, amqp::RESOURCE_LOCKED, amqp::PRECONDITION_FAILED];
        let closes_connection = code.is_some_and(|code| amqp::CALL_CLOSES_CONNECTION.contains(&code));
        let is_alone = steps_max == 1;
        if closes_connection && job != QueueJob::Depth {
            self.steps_max = if is_alone { CONTROLLER_QUEUE_STEPS_CONCURRENT_MAX } else { 1 };
        }
        let is_refused = code.is_some_and(|code| REFUSED.contains(&code)) || (closes_connection && is_alone);
        if job == BIND && is_refused { StepResult::Refused } else { StepResult::Failed }
    }
}

const BIND: QueueJob = QueueJob::Step(QueueStep::Bind);

type JobResult = Option<Result<StepResult, JobError>>;

async fn run(
    topology: Topology<'_>,
    config: &ControllerConfig,
    connection: JobConnection,
    channel: Option<Channel>,
    key: &Key,
    job: QueueJob,
    mut owner: Owner,
) -> (Owner, Option<Channel>, JobResult) {
    let create_channel = async || {
        let mut current = connection.lock().await;
        let open = match &mut *current {
            Some(open) if open.status().connected() => open,
            other => {
                let name = format!("journeyman controller of {}, queues", config.pool);
                other.insert(config.broker.connect(&name).await?)
            }
        };
        Ok::<_, JobError>(open.create_channel().await?)
    };
    let open = async {
        match channel.filter(|channel| channel.status().connected()) {
            Some(open) => Ok(open),
            None => create_channel().await,
        }
    };
    let mut channel = match timeout(AMQP_CALL_TIMEOUT, open).await {
        Ok(Ok(channel)) => channel,
        Ok(Err(error)) => return (owner, None, Some(Err(error))),
        Err(_) => return (owner, None, None),
    };
    let perform = async {
        let step = if let QueueJob::Step(step) = job { step } else { QueueStep::Inspect };
        match topology.run_step(&channel, key, step, owner).await {
            Err(error) if job == BIND && amqp::reply_code(&error) == Some(amqp::PRECONDITION_FAILED) => {
                channel = create_channel().await?;
                let adopted = topology.adopt_queue(&channel, key).await?;
                if adopted == StepResult::NotFound {
                    return Err(error.into());
                }
                if owner == Owner::Controller {
                    let why = amqp::error_text(&error);
                    tracing::warn!(%key, "the queue exists with other arguments; adopting it until its group ends: {why}");
                }
                owner = Owner::External;
                Ok(adopted)
            }
            Ok(result) if job == BIND => {
                owner = Owner::Controller;
                Ok(result)
            }
            other => Ok(other?),
        }
    };
    let result = timeout(AMQP_CALL_TIMEOUT, perform).await.ok();
    (owner, Some(channel), result)
}
