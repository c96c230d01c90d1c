//! Declares, adopts and deletes exchanges and queues.

use lapin::options::{ExchangeDeclareOptions, QueueDeleteOptions};
use lapin::protocol::constants::REPLY_SUCCESS;
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ExchangeKind};
use tokio::time::{sleep, timeout};

use super::queue_names::QueueNames;
use super::session_error::{SessionError, declare_timed_out};
use crate::controller::config::{PoolConfig, QueueType};
use journeyman_domain::group::Key;
use journeyman_domain::group::pool::{QueueStep, StepResult};
use journeyman_domain::limits::{AMQP_CALL_TIMEOUT, CONTROLLER_TOPOLOGY_INTERVAL};
use journeyman_platform::amqp::{self, PRECONDITION_FAILED, text_value};

pub(super) fn message_ttl_ms(pool: &PoolConfig) -> Option<u32> {
    pool.message_ttl.0.map(|ttl| u32::try_from(ttl.as_millis()).unwrap_or(u32::MAX))
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

/// Declares, adopts and deletes the exchanges and queues of one pool.
#[derive(Clone, Copy)]
pub(super) struct Topology<'a> {
    pub(super) connection: &'a Connection,
    pub(super) names: &'a QueueNames,
    pub(super) settings: &'a PoolConfig,
    pub(super) argument_source: ArgumentSource,
}

impl Topology<'_> {
    fn exchange_options(self) -> ExchangeDeclareOptions {
        ExchangeDeclareOptions { durable: self.settings.queue_type == QueueType::Quorum, ..Default::default() }
    }

    /// All but the requests exchange.
    pub(super) async fn declare(self, channel: &Channel) -> lapin::Result<()> {
        let Self { names, .. } = self;
        for name in [names.orphan_exchange(), names.dead_letter_exchange(), names.activity_exchange()] {
            let (kind, options) = (ExchangeKind::Fanout, self.exchange_options());
            channel.exchange_declare(name.into(), kind, options, FieldTable::default()).await?;
        }
        // Durable, so that requests survive while no controller runs.
        // Not quorum, which would drop what is fetched and returned too often.
        for name in [names.orphan_queue(), names.dead_letter_queue(), names.poison_queue()] {
            amqp::declare_queue(channel, &name, FieldTable::default()).await?;
        }
        // Old reports are worthless.
        amqp::declare_own_queue(channel, &names.activity_queue()).await?;
        for (queue, exchange) in [
            (names.orphan_queue(), names.orphan_exchange()),
            (names.dead_letter_queue(), names.dead_letter_exchange()),
            (names.activity_queue(), names.activity_exchange()),
        ] {
            amqp::bind_queue(channel, &queue, &exchange, "").await?;
        }
        Ok(())
    }

    pub(super) async fn declare_requests(self, channel: &Channel) -> lapin::Result<()> {
        let orphans = amqp::header_table([("alternate-exchange", text_value(&self.names.orphan_exchange()))]);
        let (name, options) = (self.names.requests_exchange().into(), self.exchange_options());
        channel.exchange_declare(name, ExchangeKind::Direct, options, orphans).await
    }

    /// Declares again what operators delete, until the connection is closed.
    pub(super) async fn restore_deleted(self) -> SessionError {
        let declare = async || {
            let channel = self.connection.create_channel().await?;
            self.declare(&channel).await?;
            match self.declare_requests(&channel).await {
                // Adopted with other arguments.
                Err(error) if amqp::reply_code(&error) == Some(PRECONDITION_FAILED) => Ok(()),
                Err(error) => Err(error),
                Ok(()) => channel.close(REPLY_SUCCESS, "OK".into()).await,
            }
        };
        let mut is_failing = false;
        loop {
            sleep(CONTROLLER_TOPOLOGY_INTERVAL).await;
            let error = match timeout(AMQP_CALL_TIMEOUT, declare()).await {
                Ok(Ok(())) => {
                    is_failing = false;
                    continue;
                }
                Ok(Err(error)) => error.into(),
                Err(_) => declare_timed_out("exchanges and queues of the pool"),
            };
            if !self.connection.status().connected() {
                return error;
            }
            if !std::mem::replace(&mut is_failing, true) {
                tracing::warn!(error = error.reason, "exchanges and queues of the pool cannot be declared again");
            }
        }
    }

    pub(super) async fn run_step(
        self,
        channel: &Channel,
        key: &Key,
        step: QueueStep,
        owner: Owner,
    ) -> lapin::Result<StepResult> {
        // Requests with too long a key are rejected on arrival.
        let Some(queue) = self.names.request_queue(key) else { return Ok(StepResult::NotFound) };
        let done = match step {
            QueueStep::Bind => {
                self.declare_queue(channel, &queue).await?;
                self.bind(channel, key, &queue).await
            }
            QueueStep::Unbind => {
                let mut done = Ok(());
                for binding in self.names.bindings(key) {
                    let (queue, exchange) = (queue.as_str().into(), self.names.requests_exchange().into());
                    done = done.and(channel.queue_unbind(queue, exchange, binding.into(), FieldTable::default()).await);
                }
                done.map(|()| StepResult::Done)
            }
            QueueStep::Inspect => inspect_queue(channel, &queue).await,
            QueueStep::Delete => {
                // Quorum queues do not support the conditions (the connection would close); it was inspected just before.
                let conditional = self.settings.queue_type == QueueType::Classic && owner == Owner::Controller;
                let options =
                    QueueDeleteOptions { if_empty: conditional, if_unused: conditional, ..Default::default() };
                channel.queue_delete(queue.as_str().into(), options).await.map(|_| StepResult::Done)
            }
        };
        match done {
            // 404 means for Bind that the exchange is missing.
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

    async fn declare_queue(self, channel: &Channel, queue: &str) -> lapin::Result<()> {
        let mut arguments =
            amqp::header_table([("x-dead-letter-exchange", text_value(&self.names.dead_letter_exchange()))]);
        let mut number = |name: &str, value: Option<u32>| {
            if let Some(value) = value.filter(|_| self.argument_source == ArgumentSource::Declaration) {
                arguments.insert(name.into(), AMQPValue::LongLongInt(value.into()));
            }
        };
        number("x-message-ttl", message_ttl_ms(self.settings));
        number("x-max-length", self.settings.max_length);
        if self.settings.queue_type == QueueType::Quorum {
            number("x-delivery-limit", self.settings.delivery_limit());
            arguments.insert("x-queue-type".into(), text_value("quorum"));
        }
        amqp::declare_queue(channel, queue, arguments).await.map(drop)
    }

    /// Binds a queue that exists with other arguments; [`StepResult::NotFound`] if there is none.
    pub(super) async fn adopt_queue(self, channel: &Channel, key: &Key) -> lapin::Result<StepResult> {
        let Some(queue) = self.names.request_queue(key) else { return Ok(StepResult::NotFound) };
        match inspect_queue(channel, &queue).await {
            Err(error) if amqp::reply_code(&error) == Some(amqp::NOT_FOUND) => Ok(StepResult::NotFound),
            Err(error) => Err(error),
            Ok(_) => self.bind(channel, key, &queue).await,
        }
    }

    async fn bind(self, channel: &Channel, key: &Key, queue: &str) -> lapin::Result<StepResult> {
        for binding in self.names.bindings(key) {
            amqp::bind_queue(channel, queue, &self.names.requests_exchange(), &binding).await?;
        }
        Ok(StepResult::Done)
    }
}

async fn inspect_queue(channel: &Channel, queue: &str) -> lapin::Result<StepResult> {
    let queue = amqp::find_queue_on(channel, queue.into()).await?;
    Ok(StepResult::Contents { ready: queue.message_count(), consumers: queue.consumer_count() })
}
