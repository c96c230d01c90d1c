//! Facts of a queue from the broker's management interface: its consumer_timeout, and whether it has a dead letter exchange.

use std::sync::{Arc, Weak};
use std::time::Duration;

use lapin::Connection;

use super::config::{AmqpSourceConfig, OnAttemptsExhausted};
use journeyman_platform::amqp::management::ManagementError;

pub(super) struct QueueFacts {
    /// How long the broker lets a delivery be unacknowledged; `None` is unlimited.
    pub(super) consumer_timeout: Option<Duration>,
    /// As configured; replies, where the broker would drop a request for want of a dead letter exchange.
    pub(super) on_attempts_exhausted: OnAttemptsExhausted,
    /// The connection for which they were queried.
    connection: Weak<Connection>,
}

impl QueueFacts {
    pub(super) fn configured(config: &AmqpSourceConfig) -> Self {
        Self {
            consumer_timeout: config.consumer_timeout,
            on_attempts_exhausted: config.on_attempts_exhausted,
            connection: Weak::new(),
        }
    }

    pub(super) fn are_of(&self, connection: &Arc<Connection>) -> bool {
        self.connection.ptr_eq(&Arc::downgrade(connection))
    }

    /// Queries the management interface, if one is configured.
    pub(super) async fn query(config: &AmqpSourceConfig, connection: &Arc<Connection>) -> Self {
        let mut facts = Self { connection: Arc::downgrade(connection), ..Self::configured(config) };
        let queue = config.queue.as_str();
        if let Some(management) = &config.management {
            match management.queue_settings(queue).await {
                Ok(found) => {
                    facts.consumer_timeout = found.consumer_timeout.or(config.consumer_timeout);
                    let is_dead_lettered = config.on_attempts_exhausted == OnAttemptsExhausted::DeadLetter;
                    if is_dead_lettered && config.poison_queue.is_none() && !found.dead_letters {
                        tracing::warn!(
                            queue,
                            "`on_attempts_exhausted` is \"dead-letter\", and the queue {queue} has no dead letter exchange: replying to requests that are given up instead; set one by a policy or an argument of the queue, or set `poison_queue`"
                        );
                        facts.on_attempts_exhausted = OnAttemptsExhausted::Reply;
                    }
                }
                // It is queried again once it exists.
                Err(ManagementError::NotFound) => return Self::configured(config),
                Err(ManagementError::Failed(why)) => {
                    tracing::warn!(
                        queue,
                        "cannot query the consumer_timeout of {queue}, using `amqp.consumer_timeout`: {why}"
                    );
                }
            }
        }
        tracing::debug!(queue, consumer_timeout = ?facts.consumer_timeout, "consumer_timeout of the queue");
        if let (Some(timeout), Some(max_run_time)) = (facts.consumer_timeout, config.max_run_time)
            && timeout < max_run_time
        {
            tracing::warn!(
                queue,
                "requests may run for {max_run_time:?} and the broker requeues them after {timeout:?}: raise its \
                 consumer_timeout and `amqp.consumer_timeout` (\"0s\" if it has none), or lower `max_run_time` of the handler"
            );
        }
        facts
    }
}
