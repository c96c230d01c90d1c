//! What the broker's management interface says of a queue: how long it waits for an answer, and whether dead letters go anywhere.

use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use lapin::Connection;

use super::config::{AmqpSourceConfig, OnAttemptsExhausted, TimeoutOrigin};
use super::lock;
use crate::amqp::management::ManagementError;
use crate::domain::consumer_timeout::QueueTimeout;

/// What is known of them.
pub(super) struct QueueFacts {
    /// How long the broker lets a delivery be unacknowledged, as far as that is known.
    consumer_timeout: Mutex<Option<Duration>>,
    /// What was last looked at for a warning.
    warned_timeout: Mutex<Option<Option<Duration>>>,
    /// The connection whose broker was asked for that.
    queried_connection: Mutex<Weak<Connection>>,
}

impl QueueFacts {
    pub(super) fn new(settings: &AmqpSourceConfig) -> Self {
        if settings.management.is_none() {
            settings.warn_if_too_short(settings.consumer_timeout, TimeoutOrigin::Config);
        }
        Self {
            consumer_timeout: Mutex::new(settings.consumer_timeout),
            warned_timeout: Mutex::default(),
            queried_connection: Mutex::default(),
        }
    }

    pub(super) fn consumer_timeout(&self) -> Option<Duration> {
        *lock(&self.consumer_timeout)
    }

    /// Asks the broker how long it waits, once for each connection.
    pub(super) async fn refresh(&self, settings: &AmqpSourceConfig, connection: &Arc<Connection>) {
        let Some(management) = &settings.management else { return };
        if lock(&self.queried_connection).ptr_eq(&Arc::downgrade(connection)) {
            return;
        }
        let AmqpSourceConfig { queue, consumer_timeout, .. } = settings;
        let says = match management.describe_queue(queue).await {
            Ok(told) => {
                if settings.on_attempts_exhausted == OnAttemptsExhausted::DeadLetter && !told.dead_letters {
                    tracing::warn!(queue, "{}", no_dead_letter_warning(queue));
                }
                told.timeout()
            }
            // It is asked again when there is one.
            Err(ManagementError::NotFound) => return,
            Err(ManagementError::Failed(why)) => {
                tracing::warn!(
                    queue,
                    "how long the broker lets requests of {queue} be worked at cannot be asked, so `amqp.consumer_timeout` counts: {why}"
                );
                QueueTimeout::BrokerDefault
            }
        };
        *lock(&self.queried_connection) = Arc::downgrade(connection);
        let patience = says.or_configured(*consumer_timeout);
        *lock(&self.consumer_timeout) = patience;
        tracing::info!(queue, ?patience, ?says, "how long the broker waits for an answer");
        // Once, and again where it has changed.
        if lock(&self.warned_timeout).replace(patience) != Some(patience) {
            settings.warn_if_too_short(
                patience,
                if says == QueueTimeout::BrokerDefault { TimeoutOrigin::Config } else { TimeoutOrigin::Broker },
            );
        }
    }
}

/// What becomes of a request that was tried too often. Asked anew each time, for policies change: what nobody would get is
/// better answered.
pub(super) async fn exhausted_action(settings: &AmqpSourceConfig) -> OnAttemptsExhausted {
    let AmqpSourceConfig { on_attempts_exhausted: exhausted, management, queue, .. } = settings;
    match (exhausted, management) {
        (OnAttemptsExhausted::DeadLetter, Some(management)) => match management.describe_queue(queue).await {
            Ok(told) if !told.dead_letters => {
                tracing::warn!(queue, "{}", no_dead_letter_warning(queue));
                OnAttemptsExhausted::Reply
            }
            Ok(_) | Err(_) => OnAttemptsExhausted::DeadLetter,
        },
        (exhausted, _) => exhausted.clone(),
    }
}

/// Warns where `on_attempts_exhausted = "dead-letter"` it would lose requests.
fn no_dead_letter_warning(queue: &str) -> String {
    format!(
        "`on_attempts_exhausted` is \"dead-letter\", and the queue {queue} has no dead letter exchange: a request that is given up is answered \
         instead; name one by a policy or an argument of the queue, or set `poison_queue`"
    )
}
