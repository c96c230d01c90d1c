//! Takes the messages of one of Mistral's queues, and deletes the queue a while after its execution has ended.
//!
//! `end` is not acknowledged until then, so the broker keeps it for a notifier that starts again. RabbitMQ deletes the queue only if
//! it has no consumer and no other message waits there: one that comes in between keeps it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt as _, StreamExt as _};
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicRejectOptions, QueueDeleteOptions,
};
use lapin::types::{DeliveryTag, ShortString};
use lapin::{Channel, Connection, Consumer};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::MistralConfig;
use super::message::{self, Message};
use super::targets::{self, TargetError};
use crate::notifier::intake::Intake;
use journeyman_domain::limits::{NOTIFIER_BATCH_MAX, NOTIFIER_BODY_BYTES_MAX};
use journeyman_platform::amqp;
use journeyman_platform::host::crash_points::crash_point;
use journeyman_worker::notify::Event;

pub(super) struct QueueConsumer<'a> {
    pub(super) config: &'a MistralConfig,
    pub(super) intake: &'a Intake,
    pub(super) connection: &'a Connection,
    pub(super) channel: &'a Channel,
    pub(super) queue: ShortString,
    pub(super) end: Option<HeldEnd>,
}

/// An `end` that is not acknowledged yet.
pub(super) struct HeldEnd {
    tag: DeliveryTag,
    epoch: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pause {
    /// Nothing has come for long after `end`.
    Quiet,
    Stopped,
    /// The queue is gone.
    Canceled,
}

impl QueueConsumer<'_> {
    /// Runs until the queue is gone, or `stop`. Returns its name.
    pub(super) async fn run(mut self, must_exist: bool, stop: &CancellationToken) -> Result<ShortString, String> {
        // Consuming from a queue that is gone closes the channel of all.
        if !must_exist && !self.config.has_queue(self.connection, &self.queue).await? {
            return Ok(self.queue);
        }
        loop {
            let options = BasicConsumeOptions::default();
            let consuming = amqp::consume(self.channel, self.queue.clone(), ShortString::default(), options);
            let operation = format!("consume from {}", self.queue);
            let consuming = self.config.broker.bounded(&operation, consuming);
            let mut consumer = consuming.await.map_err(|error| error.message)?;
            match self.take(&mut consumer, stop).await? {
                Pause::Quiet if self.end_consumer(consumer).await? && self.delete().await? => return Ok(self.queue),
                Pause::Quiet => {}
                Pause::Stopped => return Ok(self.queue),
                Pause::Canceled if self.connection.status().connected() => return Ok(self.queue),
                Pause::Canceled => return Err("the connection was lost".to_owned()),
            }
        }
    }

    async fn take(&mut self, consumer: &mut Consumer, stop: &CancellationToken) -> Result<Pause, String> {
        loop {
            let quiet = self.config.delete_after.filter(|_| self.end.is_some()).unwrap_or(Duration::MAX);
            let next = stop.run_until_cancelled(timeout(quiet, consumer.next())).await;
            let next = match next {
                None => return Ok(Pause::Stopped),
                Some(Err(_)) => return Ok(Pause::Quiet),
                Some(Ok(None)) => return Ok(Pause::Canceled),
                Some(Ok(Some(delivery))) => delivery,
            };
            let mut batch = vec![next.map_err(|error| amqp::error_text(&error))?];
            while batch.len() < NOTIFIER_BATCH_MAX
                && let Some(Some(more)) = consumer.next().now_or_never()
            {
                batch.push(more.map_err(|error| amqp::error_text(&error))?);
            }
            self.store(batch).await?;
        }
    }

    /// Stores what the deliveries hold, and acknowledges them. Returns once it is on disk.
    async fn store(&mut self, batch: Vec<Delivery>) -> Result<(), String> {
        let (mut events, mut done): (Vec<(Event, Arc<str>)>, Vec<DeliveryTag>) = (Vec::new(), Vec::new());
        let mut ended = None;
        for delivery in batch {
            let tag = delivery.delivery_tag;
            match self.parse(&delivery) {
                Ok(Message::Event { event, target }) => {
                    let endpoint = match target.endpoint(&self.config.url_key, self.intake).await {
                        Ok(endpoint) => endpoint,
                        Err(TargetError::Invalid(why)) => {
                            self.reject(tag, &why);
                            continue;
                        }
                        Err(TargetError::Failed(why)) => return Err(why),
                    };
                    // A re-run; events of the run that has ended may be late.
                    let is_rerun = |end: &mut HeldEnd| event.epoch.is_some_and(|epoch| epoch > end.epoch);
                    done.extend(self.end.take_if(is_rerun).map(|end| end.tag));
                    events.push((*event, endpoint));
                    done.push(tag);
                }
                Ok(Message::End { epoch }) => {
                    ended = Some(epoch);
                    done.extend(self.end.replace(HeldEnd { tag, epoch }).map(|end| end.tag));
                }
                Ok(Message::Nameless) => done.push(tag),
                Err(why) => self.reject(tag, &why),
            }
        }
        self.intake.accept_each(events).await.map_err(|error| error.to_string())?;
        if let (Some(epoch), Some((execution, _))) = (ended, message::parse_queue(self.queue.as_str())) {
            let closed = self.intake.store.close_lanes(targets::PREFIX, execution, epoch).await;
            closed.map_err(|error| error.to_string())?;
        }
        for tag in done {
            amqp::poll_once(self.channel.basic_ack(tag, BasicAckOptions::default()));
        }
        Ok(())
    }

    fn reject(&self, tag: DeliveryTag, why: &str) {
        let queue = self.queue.as_str();
        let text = "a message is not delivered and becomes a dead letter; those after it are delivered without it";
        tracing::error!(alert = "message-rejected", queue, "[alert operator] {text}: {why}");
        amqp::poll_once(self.channel.basic_reject(tag, BasicRejectOptions { requeue: false }));
    }

    fn parse(&self, delivery: &Delivery) -> Result<Message, String> {
        if delivery.data.len() > NOTIFIER_BODY_BYTES_MAX {
            return Err(format!("it has more than {NOTIFIER_BODY_BYTES_MAX} bytes"));
        }
        message::parse(self.queue.as_str(), &self.config.url_key, &delivery.properties, &delivery.data)
    }

    /// Returns whether nothing has come on the way.
    async fn end_consumer(&mut self, mut consumer: Consumer) -> Result<bool, String> {
        let ending = async {
            self.channel.basic_cancel(consumer.tag(), BasicCancelOptions::default()).await?;
            let mut late = Vec::new();
            while let Some(delivery) = consumer.next().await {
                late.push(delivery?);
            }
            lapin::Result::Ok(late)
        };
        let operation = format!("cancel the consumer of {}", self.queue);
        let late = self.config.broker.bounded(&operation, ending).await.map_err(|error| error.message)?;
        let is_quiet = late.is_empty();
        self.store(late).await?;
        crash_point("mistral-consumer-ended");
        Ok(is_quiet)
    }

    /// Returns whether the queue is gone, and `end` with it.
    async fn delete(&self) -> Result<bool, String> {
        // RabbitMQ closes the connection of who wants this of a quorum queue.
        match self.config.management.is_classic(self.queue.as_str()).await {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(error) => {
                tracing::warn!(
                    queue = self.queue.as_str(),
                    "cannot look the queue up, so it is not deleted yet: {error}"
                );
                return Ok(false);
            }
        }
        let deleting = async {
            let channel = self.connection.create_channel().await?;
            let options = QueueDeleteOptions { if_unused: true, if_empty: true, nowait: false };
            channel.queue_delete(self.queue.clone(), options).await
        };
        match self.config.broker.bounded_or_code(&format!("delete {}", self.queue), deleting).await {
            Ok(_) => {
                tracing::debug!(queue = self.queue.as_str(), "deleted the queue of an execution that has ended");
                Ok(true)
            }
            Err((_, Some(amqp::PRECONDITION_FAILED))) => {
                tracing::debug!(queue = self.queue.as_str(), "kept the queue: a message has come for it");
                Ok(false)
            }
            Err((error, Some(amqp::ACCESS_REFUSED))) => {
                tracing::warn!("no right to delete queues of executions that have ended: {}", error.message);
                Ok(false)
            }
            Err((error, _)) => Err(error.message),
        }
    }
}
