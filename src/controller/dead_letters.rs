//! Consumes dead letters: answers each with an error, and moves those that killed their workers to the poison queue.

use std::convert::Infallible;
use std::sync::Arc;

use futures_util::StreamExt as _;
use lapin::message::Delivery;
use lapin::{Channel, Connection};
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinSet;

use super::counters::PoolCounters;
use super::error_replies::{DeadLetterReason, ErrorReplier, original_key};
use super::poison_message::{self, WorkerFailure};
use super::queue_names::QueueNames;
use super::session::{SessionError, SessionEvent, consume, stream_ended};
use super::session_state::HeldRequest;
use super::{Controller, ControllerConfig, RecordedError};
use crate::amqp;
use crate::domain::group::Key;
use crate::domain::time::Instant;
use crate::limits::{CONTROLLER_DEAD_LETTERS_MAX, CONTROLLER_RECONCILE_INTERVAL, CONTROLLER_WORKER_EXIT_TIMEOUT};

pub(super) enum RejectCommand {
    /// An orphan that has no queue.
    Orphan(Delivery, DeadLetterReason),
    Poison(PoisonCandidate),
}

pub(super) enum RejectEvent {
    /// To be moved to the poison queue once its worker is known.
    Poison(Delivery),
    /// The poison queue rejected it.
    PoisonRefused(HeldRequest),
}

pub(super) struct PoisonCandidate {
    request: HeldRequest,
    attempts: Option<u64>,
    last_failure: Option<WorkerFailure>,
}

/// Rejects dead letters, and orphans and poison requests on command.
pub(super) async fn reject_requests(
    config: &ControllerConfig,
    connection: &Connection,
    commands: mpsc::Receiver<RejectCommand>,
    events: mpsc::Sender<SessionEvent>,
    counters: Arc<PoolCounters>,
) -> SessionError {
    let Err(over) = try_reject_requests(config, connection, commands, events, counters).await;
    over
}

async fn try_reject_requests(
    config: &ControllerConfig,
    connection: &Connection,
    mut commands: mpsc::Receiver<RejectCommand>,
    events: mpsc::Sender<SessionEvent>,
    counters: Arc<PoolCounters>,
) -> Result<Infallible, SessionError> {
    let mut letters = consume(connection, &config.names.dead_letter_queue(), CONTROLLER_DEAD_LETTERS_MAX).await?;
    let replier = ErrorReplier::open(connection, config, Arc::clone(&counters)).await?;
    // lapin may attribute a return to another publish of the channel, so one publish at a time.
    let poison = Arc::new(Mutex::new(amqp::confirm_channel(connection).await?));
    let mut tasks = JoinSet::<Result<(), SessionError>>::new();
    loop {
        tokio::select! {
            Some(done) = tasks.join_next() => done.map_err(|error| SessionError { reason: error.to_string() })??,
            letter = letters.next() => {
                let letter = letter.ok_or_else(|| stream_ended("dead letters"))??;
                let reason = DeadLetterReason::from_delivery(&letter);
                if reason.is_poison() {
                    events.send(SessionEvent::Reject(Box::new(RejectEvent::Poison(letter)))).await.ok();
                } else {
                    tracing::info!(reason = reason.reason, queue = reason.queue, "answered a dead letter with an error");
                    let replier = Arc::clone(&replier);
                    tasks.spawn(async move { Ok(replier.reject(&letter, &reason).await?) });
                }
            }
            command = commands.recv() => match command.ok_or_else(|| stream_ended("reject commands"))? {
                RejectCommand::Orphan(delivery, reason) => {
                    let (replier, counters) = (Arc::clone(&replier), Arc::clone(&counters));
                    tasks.spawn(async move {
                        replier.reject(&delivery, &reason).await?;
                        counters.orphans.decrement();
                        Ok(())
                    });
                }
                RejectCommand::Poison(candidate) => {
                    let (replier, poison, counters) = (Arc::clone(&replier), Arc::clone(&poison), Arc::clone(&counters));
                    let (names, events) = (config.names.clone(), events.clone());
                    tasks.spawn(async move {
                        if reject_poison(&candidate, &names, &replier, &poison).await? {
                            counters.poison_requests.increment();
                        } else {
                            let refused = RejectEvent::PoisonRefused(candidate.request);
                            events.send(SessionEvent::Reject(Box::new(refused))).await.ok();
                        }
                        Ok(())
                    });
                }
            },
        }
    }
}

/// False if the poison queue rejected it. The client gets its reply after the broker has the copy.
async fn reject_poison(
    candidate: &PoisonCandidate,
    names: &QueueNames,
    replier: &ErrorReplier,
    poison: &Mutex<Channel>,
) -> Result<bool, SessionError> {
    let PoisonCandidate { request: HeldRequest { delivery, .. }, attempts, last_failure } = candidate;
    let channel = poison.lock().await;
    if !poison_message::move_to_poison_queue(&channel, names, delivery, *attempts, last_failure.as_ref()).await? {
        return Ok(false);
    }
    drop(channel);
    let (key, worker) = (original_key(names, delivery), last_failure.as_ref().map(|failure| failure.worker.as_str()));
    tracing::warn!(key, worker, "moved a request that kills its workers to the poison queue");
    replier.reject(delivery, &DeadLetterReason::from_delivery(delivery)).await?;
    Ok(true)
}

impl Controller {
    pub(super) fn on_reject_event(&mut self, event: RejectEvent, now: Instant) {
        match event {
            RejectEvent::Poison(delivery) => self.session.poison_pending.push(HeldRequest::new(delivery, now)),
            RejectEvent::PoisonRefused(request) => {
                let queue = self.config.names.poison_queue();
                let what = format!("the queue {queue} rejects a poison request, retrying");
                tracing::warn!(key = original_key(&self.config.names, &request.delivery), "{what}");
                self.last_error = Some(RecordedError { at: now, message: what });
                let not_before = now.plus(CONTROLLER_WORKER_EXIT_TIMEOUT);
                self.session.poison_pending.push(HeldRequest { not_before, ..request });
            }
        }
    }

    /// Moves requests to the poison queue once it is known which worker exited.
    pub(super) fn move_due_poison(&mut self) {
        let (names, now) = (&self.config.names, self.clock.now());
        let key = |request: &HeldRequest| names.parse_routing_key(&original_key(names, &request.delivery));
        // The dead letter arrives before the driver reports the exit.
        let waits = |request: &HeldRequest, key: Option<&Key>| {
            let earliest = request.since.minus(CONTROLLER_RECONCILE_INTERVAL);
            self.workers.starts_workers()
                && now.since(request.since) < CONTROLLER_WORKER_EXIT_TIMEOUT
                && key.is_none_or(|key| self.workers.last_failure(key).is_none_or(|(at, _)| at <= earliest))
        };
        let (later, due): (Vec<HeldRequest>, Vec<HeldRequest>) = std::mem::take(&mut self.session.poison_pending)
            .into_iter()
            .partition(|request| now < request.not_before || waits(request, key(request).as_ref()));
        for request in due {
            let last_failure = key(&request).and_then(|key| Some(self.workers.last_failure(&key)?.1.clone()));
            // The limit counts redeliveries, not deliveries.
            let attempts = self.config.settings.delivery_limit.map(|limit| u64::from(limit) + 1);
            self.session.rejects.push(RejectCommand::Poison(PoisonCandidate { request, attempts, last_failure }));
        }
        self.session.poison_pending = later;
    }
}
