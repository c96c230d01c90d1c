//! Consumes dead letters: answers each with an error, and moves those that killed their workers to the poison queue.

use std::sync::Arc;

use lapin::message::Delivery;
use lapin::{Channel, Connection};
use tokio::sync::mpsc;

use super::counters::PoolCounters;
use super::error_replies::{DeadLetterReason, ErrorReplier, TaskSet, original_key};
use super::forwarding::next_delivery;
use super::poison_message::{self, WorkerFailure};
use super::queue_names::QueueNames;
use super::session::{SessionError, consume, stream_ended};
use super::session_state::HeldRequest;
use super::{Controller, ControllerConfig, RecordedError};
use crate::domain::group::Key;
use crate::domain::time::Instant;
use crate::limits::{CONTROLLER_DEAD_LETTERS_MAX, CONTROLLER_RECONCILE_INTERVAL, CONTROLLER_WORKER_EXIT_TIMEOUT};

pub(super) async fn process_dead_letters(
    settings: &ControllerConfig,
    connection: &Connection,
    killers: mpsc::Sender<Delivery>,
    tally: Arc<PoolCounters>,
) -> SessionError {
    let answering = async {
        let queue = settings.names.dead_letter_queue();
        let mut letters = consume(connection, &queue, Some(CONTROLLER_DEAD_LETTERS_MAX)).await?;
        let answers = ErrorReplier::open(connection, settings, tally).await?;
        let mut going = TaskSet::default();
        loop {
            let letter = tokio::select! {
                Some(over) = going.next_error() => return Err(over),
                letter = next_delivery(&mut letters) => match letter {
                    Some(letter) => letter?,
                    None => break,
                },
            };
            let obituary = DeadLetterReason::from_delivery(&letter);
            if obituary.is_poison() {
                // The channel has room for the prefetch; a closed channel ends the session.
                killers.send(letter).await.ok();
            } else {
                tracing::info!(
                    reason = obituary.reason,
                    queue = obituary.queue,
                    "answered a dead letter with an error"
                );
                let answers = Arc::clone(&answers);
                going.spawn(async move { Ok(answers.reject(letter, obituary).await?) });
            }
        }
        Ok::<_, SessionError>(())
    };
    answering.await.err().unwrap_or_else(|| stream_ended("dead letters"))
}

pub(super) struct PoisonCandidate {
    request: HeldRequest,
    attempts: Option<u64>,
    last_failure: Option<WorkerFailure>,
}

pub(super) async fn fill_poison_queue(
    channel: Channel,
    answers: Arc<ErrorReplier>,
    names: &QueueNames,
    mut due: mpsc::Receiver<PoisonCandidate>,
    back: mpsc::Sender<HeldRequest>,
    tally: Arc<PoolCounters>,
) -> SessionError {
    let putting = async {
        let mut going = TaskSet::default();
        loop {
            let killer = tokio::select! {
                Some(over) = going.next_error() => return Err(over),
                killer = due.recv() => killer,
            };
            let Some(PoisonCandidate { request: letter, attempts: tries, last_failure: death }) = killer else { break };
            let delivery = &letter.delivery;
            if !poison_message::move_to_poison_queue(&channel, names, delivery, tries, death.as_ref()).await? {
                // The channel has room for the prefetch.
                back.send(letter).await.ok();
                continue;
            }
            let (key, worker) = (original_key(names, delivery), death.as_ref().map(|death| death.worker.as_str()));
            tracing::warn!(key, worker, "moved a request that kills its workers to the poison queue");
            tally.poison_requests.increment();
            let answers = Arc::clone(&answers);
            going.spawn(async move {
                let obituary = DeadLetterReason::from_delivery(&letter.delivery);
                Ok(answers.reject(letter.delivery, obituary).await?)
            });
        }
        Ok::<_, SessionError>(())
    };
    putting.await.err().unwrap_or_else(|| stream_ended("poison requests"))
}

impl Controller {
    pub(super) fn move_due_poison(&mut self, due: &mpsc::Sender<PoisonCandidate>) {
        let (names, now) = (&self.config.names, self.clock.now());
        let key = |waiting: &HeldRequest| names.parse_routing_key(&original_key(names, &waiting.delivery));
        // The dead letter arrives before the driver reports the exit.
        let waits = |waiting: &HeldRequest, key: Option<&Key>| {
            let earliest = waiting.since.minus(CONTROLLER_RECONCILE_INTERVAL);
            self.workers.starts_workers()
                && now.since(waiting.since) < CONTROLLER_WORKER_EXIT_TIMEOUT
                && key.is_none_or(|key| self.workers.last_failure(key).is_none_or(|(at, _)| at <= earliest))
        };
        let (later, ready): (Vec<HeldRequest>, Vec<HeldRequest>) = std::mem::take(&mut self.session.poison_pending)
            .into_iter()
            .partition(|waiting| now < waiting.not_before || waits(waiting, key(waiting).as_ref()));
        for letter in ready {
            let death = key(&letter).and_then(|key| Some(self.workers.last_failure(&key)?.1.clone()));
            // The limit counts redeliveries, not deliveries.
            let tries = self.config.queue_options.delivery_limit.map(|limit| u64::from(limit) + 1);
            // The channel has room for the prefetch; if it is closed, the session is over and the broker redelivers.
            drop(due.try_send(PoisonCandidate { request: letter, attempts: tries, last_failure: death }));
        }
        self.session.poison_pending = later;
    }

    pub(super) fn on_poison_queue_refused(&mut self, letter: HeldRequest, now: Instant) {
        let queue = self.config.names.poison_queue();
        let what = format!("the queue {queue} rejects a poison request, retrying");
        tracing::warn!(key = original_key(&self.config.names, &letter.delivery), "{what}");
        self.last_error = Some(RecordedError { at: now, message: what });
        self.session
            .poison_pending
            .push(HeldRequest { not_before: now.plus(CONTROLLER_WORKER_EXIT_TIMEOUT), ..letter });
    }
}
