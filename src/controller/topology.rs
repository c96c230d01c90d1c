//! Declares, adopts and deletes exchanges and queues.

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

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum QueueType {
    #[default]
    Classic,
    Quorum,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QueueOptions {
    pub queue_type: QueueType,
    pub message_ttl: Option<u32>,
    pub max_length: Option<u32>,
    pub delivery_limit: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ArgumentSource {
    Declaration,
    Policy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    Controller,
    External,
}

pub(super) async fn declare(channel: &Channel, names: &QueueNames, keeping: QueueOptions) -> lapin::Result<()> {
    let durable = keeping.queue_type == QueueType::Quorum;
    let exchange = ExchangeDeclareOptions { durable, ..ExchangeDeclareOptions::default() };
    for name in [names.orphan_exchange(), names.dead_letter_exchange(), names.activity_exchange()] {
        channel.exchange_declare(name.into(), ExchangeKind::Fanout, exchange, FieldTable::default()).await?;
    }
    // Durable, so that requests survive while no controller runs.
    let queue = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    // Not quorum, which would drop what is fetched and returned too often.
    let classic = amqp::header_table([("x-queue-type", text("classic"))]);
    for name in [names.orphan_queue(), names.dead_letter_queue(), names.poison_queue()] {
        channel.queue_declare(name.into(), queue, classic.clone()).await?;
    }
    // Old reports are worthless.
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

pub(super) async fn restore_deleted(connection: &Connection, names: &QueueNames, keeping: QueueOptions) -> Infallible {
    let mut said = None;
    loop {
        sleep(CONTROLLER_TOPOLOGY_INTERVAL).await;
        let making = async {
            if !has_exchanges(connection, names).await? {
                let exchange = names.requests_exchange();
                tracing::warn!(exchange, "an exchange of the pool was deleted; declaring all of them again");
            }
            let channel = connection.create_channel().await?;
            declare(&channel, names, keeping).await?;
            match declare_requests(&channel, names, keeping).await {
                // Adopted with other arguments.
                Err(error) if amqp::reply_code(&error) == Some(PRECONDITION_FAILED) => Ok(()),
                Err(error) => Err(error),
                Ok(()) => channel.close(REPLY_SUCCESS, "OK".into()).await,
            }
        };
        let why = match timeout(AMQP_CALL_TIMEOUT, making).await {
            Ok(made) => made.err().map(|error| amqp::error_text(&error)),
            Err(_) => Some(format!("timed out after {AMQP_CALL_TIMEOUT:?}")),
        };
        if let Some(why) = why.as_ref().filter(|why| said.as_ref() != Some(*why)) {
            tracing::warn!("cannot declare the exchanges and queues of the pool: {why}");
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

pub(super) async fn adopt_requests_exchange(channel: &Channel, names: &QueueNames) -> lapin::Result<()> {
    let options = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
    channel
        .exchange_declare(names.requests_exchange().into(), ExchangeKind::Direct, options, FieldTable::default())
        .await
}

pub(super) async fn run_step(
    channel: &Channel,
    names: &QueueNames,
    keeping: QueueOptions,
    said: ArgumentSource,
    key: &Key,
    (step, whose): (QueueStep, Owner),
) -> lapin::Result<StepResult> {
    // Requests with too long a key are rejected on arrival.
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
            // Quorum queues do not support the conditions (the connection would close); it was inspected just before.
            let conditional = keeping.queue_type == QueueType::Classic && whose == Owner::Controller;
            let options = QueueDeleteOptions { if_empty: conditional, if_unused: conditional, ..Default::default() };
            channel.queue_delete(queue.as_str().into(), options).await.map(|_| StepResult::Done)
        }
    };
    match done {
        // For Bind, 404 means that the exchange is missing.
        Err(error) if step != QueueStep::Bind && amqp::reply_code(&error) == Some(amqp::NOT_FOUND) => {
            Ok(StepResult::NotFound)
        }
        Err(error) if step == QueueStep::Delete && amqp::reply_code(&error) == Some(PRECONDITION_FAILED) => {
            tracing::debug!(%key, "the queue is not empty or has consumers: {}", amqp::error_text(&error));
            Ok(StepResult::Contents { ready: 0, consumers: 1 })
        }
        other => other,
    }
}

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

pub(super) async fn inspect_queue(channel: &Channel, queue: &str) -> lapin::Result<StepResult> {
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    let queue = channel.queue_declare(queue.into(), options, FieldTable::default()).await?;
    Ok(StepResult::Contents { ready: queue.message_count(), consumers: queue.consumer_count() })
}

fn text(text: &str) -> AMQPValue {
    AMQPValue::LongString(LongString::from(text))
}
