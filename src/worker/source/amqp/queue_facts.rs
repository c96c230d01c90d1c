//! Facts of a queue, from the broker's release and its management interface: its consumer_timeout, its delivery limit, and whether it
//! has a dead letter exchange.

use std::sync::{Arc, Weak};
use std::time::Duration;

use lapin::Connection;

use super::config::{AmqpSourceConfig, OnAttemptsExhausted};
use journeyman_domain::consumer_timeout;
use journeyman_platform::amqp::Release;
use journeyman_platform::amqp::management::ManagementError;

/// From this release on a consumer of a quorum queue says how long its consumer_timeout is; a classic queue refuses that, and has none.
const ASKS_FOR_TIMEOUT: Release = Release { major: 4, minor: 3 };
/// Of a quorum queue for which nothing is set, from RabbitMQ 4.0 on.
const DELIVERY_LIMIT: u32 = 20;

pub(super) struct QueueFacts {
    /// How long the broker lets a delivery be unacknowledged; `None` is unlimited.
    pub(super) consumer_timeout: Option<Duration>,
    /// As configured; replies, where the broker would drop a request for want of a dead letter exchange.
    pub(super) on_attempts_exhausted: OnAttemptsExhausted,
    /// What a consumer asks for.
    pub(super) requested_timeout: Option<Duration>,
    delivery_limit: DeliveryLimit,
    /// The connection for which they were queried.
    connection: Weak<Connection>,
}

/// How often the broker redelivers a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DeliveryLimit {
    None,
    Known(u32),
    /// The default of the broker, which quorum queues have unless an argument or a policy says otherwise.
    Default(u32),
}

impl QueueFacts {
    pub(super) fn configured(config: &AmqpSourceConfig) -> Self {
        Self {
            consumer_timeout: config.consumer_timeout,
            on_attempts_exhausted: config.on_attempts_exhausted,
            requested_timeout: None,
            delivery_limit: DeliveryLimit::None,
            connection: Weak::new(),
        }
    }

    pub(super) fn are_of(&self, connection: &Arc<Connection>) -> bool {
        self.connection.ptr_eq(&Arc::downgrade(connection))
    }

    /// Queries the management interface, if one is configured.
    pub(super) async fn query(config: &AmqpSourceConfig, connection: &Arc<Connection>) -> Self {
        let mut facts = Self { connection: Arc::downgrade(connection), ..Self::configured(config) };
        let (queue, release) = (config.queue.as_str(), config.broker.release());
        if release.is_some_and(|release| release.major >= 4) {
            facts.delivery_limit = DeliveryLimit::Default(DELIVERY_LIMIT);
        }
        if let Some(management) = &config.management {
            match management.queue_settings(queue).await {
                Ok(found) => {
                    facts.consumer_timeout = found.consumer_timeout.or(config.consumer_timeout);
                    facts.delivery_limit = found.delivery_limit.map_or(DeliveryLimit::None, DeliveryLimit::Known);
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
        if release >= Some(ASKS_FOR_TIMEOUT) {
            let requested = consumer_timeout::requested_timeout(facts.consumer_timeout, config.max_run_time);
            (facts.consumer_timeout, facts.requested_timeout) = (Some(requested), Some(requested));
        }
        facts
    }

    /// It is a classic queue of a release that asks.
    pub(super) const fn on_timeout_refused(&mut self) {
        (self.consumer_timeout, self.requested_timeout, self.delivery_limit) = (None, None, DeliveryLimit::None);
    }

    pub(super) fn warn_of_limits(&self, config: &AmqpSourceConfig) {
        let queue = config.queue.as_str();
        tracing::debug!(queue, consumer_timeout = ?self.consumer_timeout, "consumer_timeout of the queue");
        let (limit, condition) = match self.delivery_limit {
            DeliveryLimit::None => (None, ""),
            DeliveryLimit::Known(limit) => (Some(limit), ""),
            DeliveryLimit::Default(limit) => (Some(limit), ", if it is a quorum queue without a limit of its own"),
        };
        if let Some(limit) = limit
            && config.max_attempts.is_none_or(|max| max.get() > limit.saturating_add(1))
        {
            tracing::warn!(
                queue,
                "the broker redelivers a request of {queue} {limit} times{condition}, and drops or dead-letters it before \
                 `max_attempts` is reached: set `delivery-limit` by a policy (-1 is none from RabbitMQ 4.0 on), or lower `max_attempts`"
            );
        }
        if let (Some(timeout), Some(max_run_time)) = (self.consumer_timeout, config.max_run_time)
            && timeout < max_run_time
        {
            tracing::warn!(
                queue,
                "requests may run for {max_run_time:?} and the broker requeues them after {timeout:?}: raise its \
                 consumer_timeout and `amqp.consumer_timeout` (\"0s\" if it has none), or lower `max_run_time` of the handler"
            );
        }
    }
}
