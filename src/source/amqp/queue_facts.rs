//! Facts of a queue from the broker's management interface: its consumer_timeout, and whether it has a dead letter exchange.

use std::sync::{Arc, Weak};
use std::time::Duration;

use lapin::Connection;
use parking_lot::Mutex;

use super::config::{AmqpSourceConfig, OnAttemptsExhausted, TimeoutOrigin};
use crate::amqp::management::ManagementError;
use crate::domain::consumer_timeout::QueueTimeout;

pub(super) struct QueueFacts {
    /// How long the broker lets a delivery be unacknowledged; `None` is unlimited.
    consumer_timeout: Mutex<Option<Duration>>,
    /// The last timeout that was compared with `max_run_time`.
    warned_timeout: Mutex<Option<Option<Duration>>>,
    queried_connection: Mutex<Weak<Connection>>,
}

impl QueueFacts {
    pub(super) fn new(config: &AmqpSourceConfig) -> Self {
        if config.management.is_none() {
            config.warn_if_too_short(config.consumer_timeout, TimeoutOrigin::Config);
        }
        Self {
            consumer_timeout: Mutex::new(config.consumer_timeout),
            warned_timeout: Mutex::default(),
            queried_connection: Mutex::default(),
        }
    }

    pub(super) fn consumer_timeout(&self) -> Option<Duration> {
        *self.consumer_timeout.lock()
    }

    /// Queries the management interface, once for each connection.
    pub(super) async fn refresh(&self, config: &AmqpSourceConfig, connection: &Arc<Connection>) {
        let Some(management) = &config.management else { return };
        if self.queried_connection.lock().ptr_eq(&Arc::downgrade(connection)) {
            return;
        }
        let AmqpSourceConfig { queue, consumer_timeout, .. } = config;
        let broker_timeout = match management.describe_queue(queue).await {
            Ok(facts) => {
                if config.on_attempts_exhausted == OnAttemptsExhausted::DeadLetter && !facts.dead_letters {
                    tracing::warn!(queue, "{}", no_dead_letter_warning(queue));
                }
                facts.timeout()
            }
            // The queue is queried again once it exists.
            Err(ManagementError::NotFound) => return,
            Err(ManagementError::Failed(why)) => {
                tracing::warn!(
                    queue,
                    "cannot query the consumer_timeout of {queue}, using `amqp.consumer_timeout`: {why}"
                );
                QueueTimeout::BrokerDefault
            }
        };
        *self.queried_connection.lock() = Arc::downgrade(connection);
        let timeout = broker_timeout.or_configured(*consumer_timeout);
        *self.consumer_timeout.lock() = timeout;
        tracing::info!(queue, consumer_timeout = ?timeout, ?broker_timeout, "consumer_timeout of the queue");
        if self.warned_timeout.lock().replace(timeout) != Some(timeout) {
            config.warn_if_too_short(
                timeout,
                if broker_timeout == QueueTimeout::BrokerDefault {
                    TimeoutOrigin::Config
                } else {
                    TimeoutOrigin::Broker
                },
            );
        }
    }
}

/// What happens after the last attempt. Queried anew each time, since policies change: without a dead letter exchange the broker would
/// drop the request.
pub(super) async fn exhausted_action(config: &AmqpSourceConfig) -> OnAttemptsExhausted {
    let AmqpSourceConfig { on_attempts_exhausted, management, queue, .. } = config;
    match (on_attempts_exhausted, management) {
        (OnAttemptsExhausted::DeadLetter, Some(management)) => match management.describe_queue(queue).await {
            Ok(facts) if !facts.dead_letters => {
                tracing::warn!(queue, "{}", no_dead_letter_warning(queue));
                OnAttemptsExhausted::Reply
            }
            Ok(_) | Err(_) => OnAttemptsExhausted::DeadLetter,
        },
        (on_attempts_exhausted, _) => on_attempts_exhausted.clone(),
    }
}

fn no_dead_letter_warning(queue: &str) -> String {
    format!(
        "`on_attempts_exhausted` is \"dead-letter\", and the queue {queue} has no dead letter exchange: replying to requests that are given up \
         instead; set one by a policy or an argument of the queue, or set `poison_queue`"
    )
}
