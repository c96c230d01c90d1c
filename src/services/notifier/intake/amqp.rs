//! Takes events from RabbitMQ: one consumer for each shard of the [`Topology`], and an acknowledgement once the store has them.
//!
//! Nothing is requeued to wait: while the store fails, the connection is closed, and the queues keep what was not acknowledged.

use std::sync::Arc;

use futures_util::{FutureExt as _, StreamExt as _};
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions, BasicRejectOptions};
use lapin::types::ShortString;
use lapin::{Channel, Connection, Consumer};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::topology::Topology;
use super::{Intake, parse_events};
use journeyman_domain::limits::{
    AMQP_CLOSE_TIMEOUT, NOTIFIER_BATCH_MAX, NOTIFIER_BODY_BYTES_MAX, NOTIFIER_PREFETCH, NOTIFIER_UNACKED_MAX,
};
use journeyman_platform::amqp::{self, Broker};
use journeyman_platform::retry::retry_sessions;
use journeyman_platform::tasks::supervised;

pub struct AmqpConfig {
    pub broker: Broker,
    pub topology: Topology,
}

pub(crate) struct AmqpIntake {
    pub(crate) config: AmqpConfig,
    pub(crate) intake: Arc<Intake>,
}

struct Shard {
    queue: ShortString,
    channel: Channel,
    consumer: Consumer,
}

impl AmqpIntake {
    /// Takes events until `stop`. After an error it connects again.
    pub(crate) async fn run(self, stop: CancellationToken) {
        retry_sessions("cannot take events from RabbitMQ", &stop, async || self.run_session(&stop).await).await;
    }

    async fn run_session(&self, stop: &CancellationToken) -> Result<(), String> {
        let connecting = self.config.broker.connect("journeyman notifier");
        let Some(connection) = stop.run_until_cancelled(connecting).await else { return Ok(()) };
        let connection = connection.map_err(|error| error.message)?;
        let ended = match stop.run_until_cancelled(self.open_shards(&connection)).await {
            Some(Ok(shards)) => {
                let mut running = JoinSet::new();
                for shard in shards {
                    running.spawn(supervised("intake from a queue", shard.run(Arc::clone(&self.intake), stop.clone())));
                }
                let mut ended = Ok(());
                while let (Ok(()), Some(one)) = (&ended, running.join_next().await) {
                    ended = one.unwrap_or(Ok(()));
                }
                ended
            }
            Some(Err(why)) => Err(why),
            None => Ok(()),
        };
        amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
        ended
    }

    async fn open_shards(&self, connection: &Connection) -> Result<Vec<Shard>, String> {
        let AmqpConfig { broker, topology } = &self.config;
        let dead = topology.check(broker, connection).await?;
        if dead > 0 {
            tracing::warn!(
                queue = topology.dead.as_str(),
                "{dead} messages could not be taken; they are in {}",
                topology.dead
            );
        }
        let mut shards = Vec::new();
        for queue in &topology.shards {
            let opening = async {
                let channel = connection.create_channel().await?;
                channel.basic_qos(prefetch(topology.shards.len()), BasicQosOptions::default()).await?;
                let options = BasicConsumeOptions::default();
                let consumer = amqp::consume(&channel, queue.clone(), ShortString::default(), options).await?;
                lapin::Result::Ok(Shard { queue: queue.clone(), channel, consumer })
            };
            let opened = broker.bounded(&format!("consume from {queue}"), opening).await;
            shards.push(opened.map_err(|error| error.message)?);
        }
        tracing::info!(broker = broker.display_url(), "taking events from {} queues of RabbitMQ", shards.len());
        Ok(shards)
    }
}

impl Shard {
    async fn run(mut self, intake: Arc<Intake>, stop: CancellationToken) -> Result<(), String> {
        while let Some(next) = stop.run_until_cancelled(self.consumer.next()).await {
            let mut next = next.ok_or_else(|| format!("the broker ended the consumer of {}", self.queue))?;
            let (mut events, mut last) = (Vec::new(), None);
            // Whatever has arrived becomes one transaction.
            loop {
                let delivery = next.map_err(|error| amqp::error_text(&error))?;
                match parse(&delivery) {
                    Ok(parsed) => {
                        events.extend(parsed);
                        last = Some(delivery.delivery_tag);
                    }
                    Err(why) => {
                        intake.counters.on_refused("amqp");
                        self.reject(&delivery, &why);
                    }
                }
                if events.len() >= NOTIFIER_BATCH_MAX {
                    break;
                }
                let Some(Some(more)) = self.consumer.next().now_or_never() else { break };
                next = more;
            }
            if let Some(last) = last {
                intake.take("amqp", events).await.map_err(|error| error.to_string())?;
                amqp::poll_once(self.channel.basic_ack(last, BasicAckOptions { multiple: true }));
            }
        }
        Ok(())
    }

    fn reject(&self, delivery: &Delivery, why: &str) {
        tracing::warn!(queue = self.queue.as_str(), "a message is no event, so it becomes a dead letter: {why}");
        amqp::poll_once(self.channel.basic_reject(delivery.delivery_tag, BasicRejectOptions { requeue: false }));
    }
}

/// The share of a shard of the messages that may be in memory.
fn prefetch(shards: usize) -> u16 {
    let shards = u16::try_from(shards).unwrap_or(u16::MAX).max(1);
    (NOTIFIER_UNACKED_MAX / shards).clamp(1, NOTIFIER_PREFETCH)
}

fn parse(delivery: &Delivery) -> Result<Vec<journeyman_worker::notify::Event>, String> {
    let bytes = delivery.data.len();
    if bytes > NOTIFIER_BODY_BYTES_MAX {
        return Err(format!("it has {bytes} bytes, and at most {NOTIFIER_BODY_BYTES_MAX} are taken"));
    }
    parse_events(&delivery.data)
}

#[cfg(test)]
mod tests {
    use journeyman_domain::limits::NOTIFIER_SHARDS_MAX;

    use super::*;

    #[test]
    fn f11_the_messages_in_memory_have_one_bound_for_all_shards() {
        for shards in 1..=NOTIFIER_SHARDS_MAX {
            let all = prefetch(shards.into()) * shards;
            assert!(all <= NOTIFIER_UNACKED_MAX.max(shards), "{shards} shards, {all} messages");
        }
    }
}
