//! Runs queue operations and depth checks concurrently.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::task::Poll;

use lapin::{Channel, Connection};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::queue_names::QueueNames;
use super::session::{SessionError, stream_ended};
use super::topology::{self, ArgumentSource, Owner, PRECONDITION_FAILED, QueueOptions};
use crate::amqp;
use crate::domain::group::Key;
use crate::domain::group::pool::{QueueStep, StepResult};
use crate::limits::{AMQP_CALL_TIMEOUT, CONTROLLER_QUEUE_CHECKS_CONCURRENT_MAX, CONTROLLER_QUEUE_STEPS_CONCURRENT_MAX};

pub(super) enum QueueJobKind {
    Step(QueueStep, StepResult),
    Depth(StepResult),
}

pub(super) struct QueueJobResult {
    pub(super) key: Key,
    pub(super) kind: QueueJobKind,
    pub(super) error: Option<String>,
}

struct QueueJobRunner<'a> {
    connection: &'a Connection,
    names: &'a QueueNames,
    queue_options: QueueOptions,
    argument_source: ArgumentSource,
    steps: tokio::sync::Mutex<mpsc::Receiver<(Key, QueueStep)>>,
    depths: tokio::sync::Mutex<mpsc::Receiver<Key>>,
    results: mpsc::Sender<QueueJobResult>,
    external_queues: Mutex<BTreeSet<Key>>,
    stuck_channels: Mutex<BTreeMap<Key, Channel>>,
}

pub(super) async fn run_queue_jobs(
    connection: &Connection,
    names: &QueueNames,
    keeping: QueueOptions,
    said: ArgumentSource,
    (steps, depths): (mpsc::Receiver<(Key, QueueStep)>, mpsc::Receiver<Key>),
    done: mpsc::Sender<QueueJobResult>,
) -> SessionError {
    let (steps, depths) = (tokio::sync::Mutex::new(steps), tokio::sync::Mutex::new(depths));
    let (others, stuck) = (Mutex::default(), Mutex::default());
    let desk = &QueueJobRunner {
        connection,
        names,
        queue_options: keeping,
        argument_source: said,
        steps,
        depths,
        results: done,
        external_queues: others,
        stuck_channels: stuck,
    };
    let mut hands: Vec<Pin<Box<dyn Future<Output = SessionError> + Send + '_>>> = Vec::new();
    hands.extend((0..CONTROLLER_QUEUE_STEPS_CONCURRENT_MAX).map(|_| Box::pin(desk.run_steps()) as _));
    hands.extend((0..CONTROLLER_QUEUE_CHECKS_CONCURRENT_MAX).map(|_| Box::pin(desk.run_depth_checks()) as _));
    std::future::poll_fn(|context| {
        let over = hands.iter_mut().find_map(|hand| match hand.as_mut().poll(context) {
            Poll::Ready(over) => Some(over),
            Poll::Pending => None,
        });
        over.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

impl QueueJobRunner<'_> {
    async fn run_steps(&self) -> SessionError {
        let mut kept = None;
        loop {
            let next = self.steps.lock().await.recv().await;
            let Some((key, step)) = next else { return stream_ended("steps") };
            let tried = self.attempt(&mut kept, &key, Some(step)).await;
            if let Err(over) = self.send_result(key, |answer| QueueJobKind::Step(step, answer), tried).await {
                return over;
            }
        }
    }

    async fn run_depth_checks(&self) -> SessionError {
        let mut kept = None;
        loop {
            let next = self.depths.lock().await.recv().await;
            let Some(key) = next else { return stream_ended("looks") };
            let tried = self.attempt(&mut kept, &key, None).await;
            if let Err(over) = self.send_result(key, QueueJobKind::Depth, tried).await {
                return over;
            }
        }
    }

    async fn attempt(
        &self,
        kept: &mut Option<Channel>,
        key: &Key,
        step: Option<QueueStep>,
    ) -> Result<JobAttempt, SessionError> {
        let before = step.and_then(|_| lock(&self.stuck_channels).remove(key));
        let opening = timeout(AMQP_CALL_TIMEOUT, self.ensure_open(before.or_else(|| kept.take())));
        let Ok(open) = opening.await else { return Ok(JobAttempt::failed(NO_REPLY.to_owned())) };
        let mut open = open?;
        let doing = async {
            match step {
                Some(step) => self.step(&mut open, key, step).await,
                None => depth(&open, self.names, key).await,
            }
        };
        let done = timeout(AMQP_CALL_TIMEOUT, doing).await;
        match (&done, step) {
            (Ok(_), _) => *kept = Some(open),
            (Err(_), Some(_)) => drop(lock(&self.stuck_channels).insert(key.clone(), open)),
            (Err(_), None) => {}
        }
        Ok(match done {
            Ok(Ok(answer)) => JobAttempt { answer, error: None },
            Ok(Err(error)) => JobAttempt::failed(amqp::error_text(&error)),
            Err(_) => JobAttempt::failed(NO_REPLY.to_owned()),
        })
    }

    async fn ensure_open(&self, channel: Option<Channel>) -> Result<Channel, SessionError> {
        match channel.filter(|channel| channel.status().connected()) {
            Some(open) => Ok(open),
            None => Ok(self.connection.create_channel().await?),
        }
    }

    async fn step(&self, open: &mut Channel, key: &Key, step: QueueStep) -> lapin::Result<StepResult> {
        let Self { connection, names, queue_options: keeping, argument_source: said, .. } = *self;
        let whose = if lock(&self.external_queues).contains(key) { Owner::External } else { Owner::Controller };
        match topology::run_step(open, names, keeping, said, key, (step, whose)).await {
            Err(error) if step == QueueStep::Bind && amqp::reply_code(&error) == Some(PRECONDITION_FAILED) => {
                if lock(&self.external_queues).insert(key.clone()) {
                    let why = amqp::error_text(&error);
                    tracing::warn!(%key, "the queue exists with other arguments; adopting it: {why}");
                }
                *open = connection.create_channel().await?;
                topology::adopt_queue(open, names, key).await
            }
            other => {
                // A queue that could not be deleted keeps its owner.
                let is_done = matches!(other, Ok(StepResult::Done | StepResult::NotFound));
                if is_done && matches!(step, QueueStep::Bind | QueueStep::Delete) {
                    lock(&self.external_queues).remove(key);
                }
                other
            }
        }
    }

    async fn send_result(
        &self,
        key: Key,
        done: impl FnOnce(StepResult) -> QueueJobKind,
        tried: Result<JobAttempt, SessionError>,
    ) -> Result<(), SessionError> {
        let JobAttempt { answer, error: why } = tried?;
        if let Some(why) = &why {
            tracing::warn!(%key, "queue operation failed: {why}");
        }
        self.results
            .send(QueueJobResult { key, kind: done(answer), error: why })
            .await
            .map_err(|_| stream_ended("steps"))
    }
}

struct JobAttempt {
    answer: StepResult,
    error: Option<String>,
}

impl JobAttempt {
    const fn failed(why: String) -> Self {
        Self { answer: StepResult::Failed, error: Some(why) }
    }
}

const NO_REPLY: &str = "no reply from the broker in time";

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock()
}

async fn depth(channel: &Channel, names: &QueueNames, key: &Key) -> lapin::Result<StepResult> {
    let Some(queue) = names.request_queue(key) else { return Ok(StepResult::NotFound) };
    match topology::inspect_queue(channel, &queue).await {
        Err(error) if amqp::reply_code(&error) == Some(amqp::NOT_FOUND) => Ok(StepResult::NotFound),
        other => other,
    }
}
