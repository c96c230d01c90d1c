//! Makes the exchanges and queues of a pool, and those of its groups.

use std::convert::Infallible;

use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::protocol::constants::REPLY_SUCCESS;
use lapin::types::{AMQPValue, FieldTable, LongString};
use lapin::{Channel, Connection, ExchangeKind};
use tokio::time::{sleep, timeout};

use super::queue_names::QueueNames;
use crate::amqp;
use crate::domain::group::Key;
use crate::domain::group::pool::{QueueStep, StepResult};
use crate::limits::{AMQP_CALL_TIMEOUT, CONTROLLER_TOPOLOGY_INTERVAL};

/// How requests are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum QueueType {
    /// Classic queues in memory, as existing workers know them. A restart of the broker loses what is in them.
    #[default]
    Classic,
    /// Quorum queues on disk.
    Quorum,
}

/// What becomes of requests that wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QueueOptions {
    /// How they are kept.
    pub queue_type: QueueType,
    /// How long one may wait, in milliseconds; `None` is for ever.
    pub message_ttl: Option<u32>,
    /// How many may wait; `None` is any number.
    pub max_length: Option<u32>,
    /// How often a quorum queue hands one out again; `None` is as the broker has it.
    pub delivery_limit: Option<u32>,
}

/// What is said of a queue when it is declared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ArgumentSource {
    /// All of it: nobody else says it.
    Declaration,
    /// What a policy does not say.
    Policy,
}

/// Who has made a queue, and with it of which kind it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// It is as this controller makes them.
    Controller,
    /// It was taken as it is, of whichever kind.
    External,
}

/// Declares what a pool has as a whole.
///
/// # Errors
///
/// What the broker says; it closes the channel with it.
pub(super) async fn declare(channel: &Channel, names: &QueueNames, keeping: QueueOptions) -> lapin::Result<()> {
    let durable = keeping.queue_type == QueueType::Quorum;
    let exchange = ExchangeDeclareOptions { durable, ..ExchangeDeclareOptions::default() };
    for name in [names.orphan_exchange(), names.dead_letter_exchange(), names.activity_exchange()] {
        channel.exchange_declare(name.into(), ExchangeKind::Fanout, exchange, FieldTable::default()).await?;
    }
    // Of these each outlives the controller, so that nothing is lost while there is none.
    let queue = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    // Whatever kind is the usual one there: a quorum queue drops what was looked at too often.
    let classic = amqp::header_table([("x-queue-type", text("classic"))]);
    for name in [names.orphan_queue(), names.dead_letter_queue(), names.poison_queue()] {
        channel.queue_declare(name.into(), queue, classic.clone()).await?;
    }
    // Reports of old are worth nothing.
    let reports = QueueDeclareOptions { exclusive: true, auto_delete: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(names.activity_queue().into(), reports, FieldTable::default()).await?;
    for (queue, exchange) in [
        (names.orphan_queue(), names.orphan_exchange()),
        (names.dead_letter_queue(), names.dead_letter_exchange()),
        (names.activity_queue(), names.activity_exchange()),
    ] {
        let options = QueueBindOptions::default();
        channel.queue_bind(queue.into(), exchange.into(), "".into(), options, FieldTable::default()).await?;
    }
    Ok(())
}

/// Declares the exchange of requests.
///
/// # Errors
///
/// What the broker says; it closes the channel with it.
pub(super) async fn declare_requests(
    channel: &Channel,
    names: &QueueNames,
    keeping: QueueOptions,
) -> lapin::Result<()> {
    let durable = keeping.queue_type == QueueType::Quorum;
    let exchange = ExchangeDeclareOptions { durable, ..ExchangeDeclareOptions::default() };
    let orphans = amqp::header_table([("alternate-exchange", text(&names.orphan_exchange()))]);
    channel.exchange_declare(names.requests_exchange().into(), ExchangeKind::Direct, exchange, orphans).await
}

/// Makes again what somebody takes away while the controller is at work, for as long as it is polled. What cannot be made is told of.
pub(super) async fn restore_deleted(connection: &Connection, names: &QueueNames, keeping: QueueOptions) -> Infallible {
    let mut said = None;
    loop {
        sleep(CONTROLLER_TOPOLOGY_INTERVAL).await;
        let making = async {
            if !has_exchanges(connection, names).await? {
                let exchange = names.requests_exchange();
                tracing::warn!(exchange, "somebody has deleted an exchange of the pool; all of them are made again");
            }
            let channel = connection.create_channel().await?;
            declare(&channel, names, keeping).await?;
            match declare_requests(&channel, names, keeping).await {
                // It was made otherwise, and taken as it is.
                Err(error) if amqp::reply_code(&error) == Some(PRECONDITION_FAILED) => Ok(()),
                Err(error) => Err(error),
                Ok(()) => channel.close(REPLY_SUCCESS, "OK".into()).await,
            }
        };
        let why = match timeout(AMQP_CALL_TIMEOUT, making).await {
            Ok(made) => made.err().map(|error| amqp::error_text(&error)),
            Err(_) => Some(format!("not done in {AMQP_CALL_TIMEOUT:?}")),
        };
        if let Some(why) = why.as_ref().filter(|why| said.as_ref() != Some(*why)) {
            tracing::warn!("what the pool needs at the broker may be missing, and cannot be made: {why}");
        }
        said = why;
    }
}

async fn has_exchanges(connection: &Connection, names: &QueueNames) -> lapin::Result<bool> {
    let channel = connection.create_channel().await?;
    let options = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
    let fanouts = [names.orphan_exchange(), names.dead_letter_exchange(), names.activity_exchange()]
        .map(|name| (name, ExchangeKind::Fanout));
    for (name, kind) in fanouts.into_iter().chain([(names.requests_exchange(), ExchangeKind::Direct)]) {
        match channel.exchange_declare(name.into(), kind, options, FieldTable::default()).await {
            Err(error) if amqp::reply_code(&error) == Some(amqp::NOT_FOUND) => return Ok(false),
            other => other?,
        }
    }
    channel.close(REPLY_SUCCESS, "OK".into()).await.map(|()| true)
}

/// Takes the exchange of requests as somebody else has made it.
///
/// # Errors
///
/// What the broker says; it closes the channel with it.
pub(super) async fn adopt_requests_exchange(channel: &Channel, names: &QueueNames) -> lapin::Result<()> {
    let options = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
    channel
        .exchange_declare(names.requests_exchange().into(), ExchangeKind::Direct, options, FieldTable::default())
        .await
}

/// Does a step about the queue of a key.
///
/// # Errors
///
/// What the broker says; it closes the channel with it.
pub(super) async fn run_step(
    channel: &Channel,
    names: &QueueNames,
    keeping: QueueOptions,
    said: ArgumentSource,
    key: &Key,
    (step, whose): (QueueStep, Owner),
) -> lapin::Result<StepResult> {
    // One whose name would be too long was answered long before.
    let Some(queue) = names.request_queue(key) else { return Ok(StepResult::NotFound) };
    let done = match step {
        QueueStep::Bind => declare_queue(channel, names, keeping, said, key, &queue).await.map(|()| StepResult::Done),
        QueueStep::Unbind => {
            let mut done = Ok(());
            for binding in names.bindings(key) {
                let exchange = names.requests_exchange().into();
                let (queue, binding) = (queue.as_str().into(), binding.into());
                done = done.and(channel.queue_unbind(queue, exchange, binding, FieldTable::default()).await);
            }
            done.map(|()| StepResult::Done)
        }
        QueueStep::Inspect => inspect_queue(channel, &queue).await,
        QueueStep::Delete => {
            // A quorum queue knows no such conditions: asking for them closes the connection. It was looked at just before.
            let conditional = keeping.queue_type == QueueType::Classic && whose == Owner::Controller;
            let options = QueueDeleteOptions { if_empty: conditional, if_unused: conditional, ..Default::default() };
            channel.queue_delete(queue.as_str().into(), options).await.map(|_| StepResult::Done)
        }
    };
    match done {
        // Of a queue that was to be made it says that something else is missing.
        Err(error) if step != QueueStep::Bind && amqp::reply_code(&error) == Some(amqp::NOT_FOUND) => {
            Ok(StepResult::NotFound)
        }
        Err(error) if step == QueueStep::Delete && amqp::reply_code(&error) == Some(PRECONDITION_FAILED) => {
            tracing::debug!(%key, "its queue is not empty, or somebody consumes from it: {}", amqp::error_text(&error));
            Ok(StepResult::Contents { ready: 0, consumers: 1 })
        }
        other => other,
    }
}

/// The reply code about what is there and otherwise.
pub(super) const PRECONDITION_FAILED: u16 = 406;

async fn declare_queue(
    channel: &Channel,
    names: &QueueNames,
    keeping: QueueOptions,
    said: ArgumentSource,
    key: &Key,
    queue: &str,
) -> lapin::Result<()> {
    let mut arguments = amqp::header_table([("x-dead-letter-exchange", text(&names.dead_letter_exchange()))]);
    let mut number = |name: &str, value: Option<u32>| {
        if let Some(value) = value.filter(|_| said == ArgumentSource::Declaration) {
            arguments.insert(name.into(), AMQPValue::LongLongInt(value.into()));
        }
    };
    number("x-message-ttl", keeping.message_ttl);
    number("x-max-length", keeping.max_length);
    let durable = keeping.queue_type == QueueType::Quorum;
    if durable {
        number("x-delivery-limit", keeping.delivery_limit);
        arguments.insert("x-queue-type".into(), text("quorum"));
    }
    let options = QueueDeclareOptions { durable, ..QueueDeclareOptions::default() };
    channel.queue_declare(queue.into(), options, arguments).await?;
    bind(channel, names, key, queue).await
}

/// Takes the queue of a key as somebody else has made it.
///
/// # Errors
///
/// What the broker says; it closes the channel with it.
pub(super) async fn adopt_queue(channel: &Channel, names: &QueueNames, key: &Key) -> lapin::Result<StepResult> {
    let Some(queue) = names.request_queue(key) else { return Ok(StepResult::NotFound) };
    inspect_queue(channel, &queue).await?;
    bind(channel, names, key, &queue).await.map(|()| StepResult::Done)
}

async fn bind(channel: &Channel, names: &QueueNames, key: &Key, queue: &str) -> lapin::Result<()> {
    for binding in names.bindings(key) {
        let exchange = names.requests_exchange().into();
        let options = QueueBindOptions::default();
        channel.queue_bind(queue.into(), exchange, binding.into(), options, FieldTable::default()).await?;
    }
    Ok(())
}

/// Asks what is in a queue.
///
/// # Errors
///
/// What the broker says; it closes the channel with it, also where there is no such queue.
pub(super) async fn inspect_queue(channel: &Channel, queue: &str) -> lapin::Result<StepResult> {
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    let queue = channel.queue_declare(queue.into(), options, FieldTable::default()).await?;
    Ok(StepResult::Contents { ready: queue.message_count(), consumers: queue.consumer_count() })
}

fn text(text: &str) -> AMQPValue {
    AMQPValue::LongString(LongString::from(text))
}
