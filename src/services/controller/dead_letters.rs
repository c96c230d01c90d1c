//! Consumes dead letters: answers each with an error, and moves those that killed their workers to the poison queue.

use std::convert::Infallible;
use std::sync::Arc;

use futures_util::StreamExt as _;
use lapin::message::Delivery;
use lapin::options::BasicAckOptions;
use lapin::{Channel, Connection};
use serde_json::json;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::error_replies::{DeadLetterReason, publish_error};
use super::poison_message::{self, ExitedWorker, PoisonCause};
use super::queue_names::QueueNames;
use super::session_error::{SessionError, consume, stream_ended};
use super::workers::Failures;
use super::{ControllerConfig, RecordedError, SharedCounters};
use journeyman_domain::group::restart_backoff::RESTART_DELAY;
use journeyman_domain::limits::{
    CONTROLLER_DEAD_LETTERS_MAX, CONTROLLER_RECONCILE_INTERVAL, CONTROLLER_WORKER_EXIT_TIMEOUT,
};
use journeyman_platform::amqp;
use journeyman_platform::host::clock::Clock;
use journeyman_platform::tasks::supervised;
use journeyman_worker::notify::{Announcement, Announcer};

/// An orphan that has no queue.
pub(super) struct RejectedOrphan(pub(super) Delivery, pub(super) DeadLetterReason);

struct Rejecter {
    reply_channel: Channel,
    /// lapin may attribute a return to another publish of the channel, so one publish at a time.
    poison_channel: Mutex<Channel>,
    names: QueueNames,
    /// The attempts of a request that reached the limit of redeliveries.
    attempts: Option<u64>,
    failures: WorkerFailures,
    clock: Clock,
    counters: SharedCounters,
    announcer: Option<Announcer>,
    pool: String,
}

/// `None` if the controller starts no workers.
pub(super) type WorkerFailures = Option<watch::Receiver<Failures>>;

pub(super) async fn reject_requests(
    config: &ControllerConfig,
    connection: &Connection,
    orphans: mpsc::Receiver<RejectedOrphan>,
    failures: WorkerFailures,
    clock: Clock,
    counters: SharedCounters,
) -> SessionError {
    let run = async {
        let rejecter = Rejecter {
            reply_channel: amqp::confirm_channel(connection).await?,
            poison_channel: Mutex::new(amqp::confirm_channel(connection).await?),
            names: config.names.clone(),
            attempts: config.settings.delivery_limit().map(|limit| u64::from(limit) + 1),
            failures,
            clock,
            counters,
            announcer: config.announcer.clone(),
            pool: config.pool.clone(),
        };
        rejecter.run(connection, orphans).await
    };
    let Err(over) = run.await;
    over
}

impl Rejecter {
    async fn run(
        self,
        connection: &Connection,
        mut orphans: mpsc::Receiver<RejectedOrphan>,
    ) -> Result<Infallible, SessionError> {
        let mut letters = consume(connection, &self.names.dead_letter_queue(), CONTROLLER_DEAD_LETTERS_MAX).await?;
        let rejecter = Arc::new(self);
        let mut tasks = JoinSet::<Result<(), SessionError>>::new();
        loop {
            let rejecter = Arc::clone(&rejecter);
            tokio::select! {
                Some(done) = tasks.join_next() => done.map_err(|error| SessionError { reason: error.to_string() })??,
                letter = letters.next() => {
                    let letter = letter.ok_or_else(|| stream_ended("dead letters"))??;
                    let reason = DeadLetterReason::from_delivery(&letter);
                    tasks.spawn(supervised("a dead letter", async move { rejecter.reject(&letter, reason).await }));
                }
                orphan = orphans.recv() => {
                    let RejectedOrphan(delivery, reason) = orphan.ok_or_else(|| stream_ended("rejected orphans"))?;
                    tasks.spawn(supervised("a rejected orphan", async move {
                        rejecter.reject(&delivery, reason).await?;
                        rejecter.counters.on_orphan_released();
                        Ok(())
                    }));
                }
            }
        }
    }

    /// The client of a poison request gets its reply after the broker has the copy.
    async fn reject(&self, letter: &Delivery, mut reason: DeadLetterReason) -> Result<(), SessionError> {
        let key = self.names.original_key(letter);
        // A requeued request that has no reply stays in the inventory.
        if reason.is_poison() || poison_message::was_requeued(letter) {
            let (worker, attempts) =
                if reason.is_poison() { (self.last_exited_worker(&key).await, self.attempts) } else { (None, None) };
            let move_to_poison_queue = async || {
                let channel = self.poison_channel.lock().await;
                let about = PoisonCause { reason: &reason, attempts, worker: worker.as_ref() };
                poison_message::move_to_poison_queue(&channel, &self.names, letter, about).await
            };
            let id = loop {
                if let Some(id) = move_to_poison_queue().await? {
                    break id;
                }
                let queue = self.names.poison_queue();
                tracing::warn!(key, "the queue {queue} rejects a poison request, retrying");
                sleep(CONTROLLER_WORKER_EXIT_TIMEOUT).await;
            };
            self.counters.lock().values.poison_requests += 1;
            let worker = worker.map(|worker| worker.id);
            tracing::warn!(key, worker, reason = reason.reason, "moved a request to the poison queue");
            if let Some(announcer) = &self.announcer {
                let pool = &self.pool;
                announcer.announce(Announcement {
                    event_type: "request.put-aside",
                    key: format!("{pool}/{key}"),
                    id: format!("{pool}/{id}"),
                    epoch: None,
                    data: json!({ "pool": pool, "key": key, "id": id, "worker": worker, "reason": reason.reason }),
                });
            }
        } else {
            if reason.is_expired()
                && let Some(why) = self.recent_failure(&key)
            {
                reason.message = format!("{}; {why}", reason.message);
            }
            tracing::info!(reason = reason.reason, queue = reason.queue, "answered a dead letter with an error");
        }
        publish_error(&self.reply_channel, &self.names, letter, &reason).await?;
        self.counters.lock().values.dead_letters += 1;
        Ok(letter.acker.ack(BasicAckOptions::default()).await.map(drop)?)
    }

    /// Why no worker starts, or why workers of the key do not last.
    fn recent_failure(&self, key: &str) -> Option<String> {
        let (key, failures) = (self.names.parse_routing_key(key)?, self.failures.as_ref()?.borrow());
        if let Some(error) = &failures.driver {
            return Some(error.message.clone());
        }
        let RecordedError { at, message } = &failures.groups.get(&key)?.error;
        let seconds = self.clock.now().since(*at);
        let text = format!("the last worker of this key failed {} s ago: {message}", seconds.as_secs());
        (seconds <= RESTART_DELAY.max).then_some(text)
    }

    /// Waits for the driver to report the exit, since the dead letter arrives before that.
    async fn last_exited_worker(&self, key: &str) -> Option<ExitedWorker> {
        let (key, mut failures) = (self.names.parse_routing_key(key)?, self.failures.clone()?);
        let earliest = self.clock.now().minus(CONTROLLER_RECONCILE_INTERVAL);
        let is_reported =
            |failures: &Failures| failures.groups.get(&key).is_some_and(|failure| failure.error.at > earliest);
        timeout(CONTROLLER_WORKER_EXIT_TIMEOUT, failures.wait_for(is_reported)).await.ok();
        failures.borrow().groups.get(&key)?.worker.clone()
    }
}
