//! Mistral's guaranteed notifications: a queue for each workflow execution and URL, found as they appear.
//!
//! The queues are only transport: their messages are moved into the store, where each execution and URL is a lane. One notifier
//! at a time does so, so that the messages of a queue keep their order.

mod message;
mod queues;
mod targets;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::{BoxFuture, OptionFuture};
use futures_util::stream::FuturesUnordered;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::{AMQPValue, ShortString};
use lapin::{Channel, Connection, Consumer};
use serde_json::{Map, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use self::queues::QueueConsumer;
pub use self::targets::UrlKey;
pub(super) use self::targets::{is_target, name_pattern};
use super::intake::Intake;
use journeyman_domain::limits::{
    AMQP_CLOSE_TIMEOUT, NOTIFIER_DELIVERY_LIMIT, NOTIFIER_MISTRAL_DISCOVERY_INTERVAL, NOTIFIER_MISTRAL_PREFETCH,
    NOTIFIER_MISTRAL_QUEUES_MAX, NOTIFIER_MISTRAL_STANDBY_INTERVAL, NOTIFIER_PREFETCH,
};
use journeyman_platform::amqp::management::{BrokerPolicy, Management, ManagementError};
use journeyman_platform::amqp::{self, Broker, header_table, headers};
use journeyman_platform::retry::retry_sessions;

/// The queue for messages that are no events.
const DEAD: &str = "journeyman.dead";
/// An exclusive queue of the notifier that takes the messages.
const LOCK: &str = "journeyman.lock";
const EVENTS: &str = "amq.rabbitmq.event";

pub struct MistralConfig {
    /// The broker in the vhost of the queues.
    pub broker: Broker,
    pub management: Management,
    /// The broker in the vhost where RabbitMQ publishes its own events.
    pub events: Broker,
    pub url_key: UrlKey,
    /// How long nothing has to come after `end` before a queue is deleted; `None` deletes none.
    pub delete_after: Option<Duration>,
}

struct Found {
    queue: ShortString,
    /// Just now, rather than at some time.
    is_created: bool,
}

/// The events of RabbitMQ, and what they come through.
type Watch = (Consumer, Channel, Connection);

impl MistralConfig {
    /// Makes the vhost, with the rights of these users, and a queue for what is no event. What exists is kept.
    ///
    /// # Errors
    ///
    /// What the user of the broker's URI may not do.
    pub async fn set_up(&self, users: &BTreeSet<String>) -> Result<(), String> {
        let management = |error: ManagementError| error.to_string();
        self.management.create_vhost().await.map_err(management)?;
        for user in users {
            self.management.grant_all(user).await.map_err(management)?;
        }
        let connection = self.broker.connect("journeyman notifier setup").await.map_err(|error| error.message)?;
        let declaring = async {
            let arguments = header_table([
                ("x-queue-type", amqp::text_value("quorum")),
                ("x-delivery-limit", AMQPValue::LongInt(NOTIFIER_DELIVERY_LIMIT)),
            ]);
            amqp::declare_queue(&connection.create_channel().await?, DEAD, arguments).await
        };
        let declared = self.broker.bounded(&format!("declare {DEAD}"), declaring).await;
        amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
        declared.map_err(|error| error.message)?;
        let definition = Map::from_iter([
            ("dead-letter-exchange".to_owned(), json!("")),
            ("dead-letter-routing-key".to_owned(), json!(DEAD)),
        ]);
        let policy = BrokerPolicy {
            pattern: r"\.[0-9a-f]{32}$".to_owned(),
            apply_to: "queues".to_owned(),
            priority: 0,
            definition,
        };
        self.management.ensure_policy("journeyman", &policy).await.map(drop).map_err(management)
    }

    async fn has_queue(&self, connection: &Connection, queue: &ShortString) -> Result<bool, String> {
        let finding = amqp::find_queue(connection, queue.clone());
        match self.broker.bounded_or_code(&format!("look up {queue}"), finding).await {
            Ok(_) => Ok(true),
            Err((_, Some(amqp::NOT_FOUND))) => Ok(false),
            Err((error, _)) => Err(error.message),
        }
    }
}

pub(super) struct MistralIntake {
    pub(super) config: MistralConfig,
    pub(super) intake: Arc<Intake>,
}

impl MistralIntake {
    /// Takes messages until `stop`. After an error it connects again.
    pub(super) async fn run(self, stop: CancellationToken) {
        retry_sessions("cannot take Mistral's notifications from RabbitMQ", &stop, async || {
            self.run_session(&stop).await
        })
        .await;
    }

    async fn run_session(&self, stop: &CancellationToken) -> Result<(), String> {
        let broker = &self.config.broker;
        let Some(connected) = stop.run_until_cancelled(broker.connect("journeyman notifier")).await else {
            return Ok(());
        };
        let connection = match connected {
            Ok(connection) => connection,
            Err(error) if error.message.contains("not found") => {
                let why =
                    |why| format!("{}; making it failed too: {why}; run `journeyman notifier setup`", error.message);
                self.config.set_up(&BTreeSet::from([broker.user()])).await.map_err(why)?;
                broker.connect("journeyman notifier").await.map_err(|error| error.message)?
            }
            Err(error) => return Err(error.message),
        };
        let ended = match self.find_dead_queue(&connection).await {
            Ok(()) => Box::pin(self.take(&connection, stop)).await,
            Err(why) => Err(why),
        };
        amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
        ended
    }

    /// Without it, what is refused would be lost.
    async fn find_dead_queue(&self, connection: &Connection) -> Result<(), String> {
        if self.config.has_queue(connection, &DEAD.into()).await? {
            return Ok(());
        }
        let failed = |why| format!("no queue {DEAD}, and making it failed: {why}; run `journeyman notifier setup`");
        self.config.set_up(&BTreeSet::new()).await.map_err(failed)
    }

    async fn take(&self, connection: &Connection, stop: &CancellationToken) -> Result<(), String> {
        let locking = stop.run_until_cancelled(self.lock(connection)).await;
        let Some(_lock) = locking.transpose()? else { return Ok(()) };
        let opening = async {
            let channel = connection.create_channel().await?;
            channel.basic_qos(NOTIFIER_MISTRAL_PREFETCH, BasicQosOptions::default()).await?;
            lapin::Result::Ok(channel)
        };
        let channel = self.config.broker.bounded("open a channel", opening).await.map_err(|error| error.message)?;
        tracing::info!(vhost = self.config.broker.vhost(), "taking Mistral's notifications");
        let (sender, found) = mpsc::channel(NOTIFIER_MISTRAL_QUEUES_MAX);
        tokio::select! {
            ended = self.consume_all(connection, &channel, found, stop) => ended,
            why = self.discover(&sender) => Err(why),
        }
    }

    /// Waits until no other notifier has the lock. It is let go with the connection.
    async fn lock(&self, connection: &Connection) -> Result<Channel, String> {
        loop {
            let locking = async {
                let channel = connection.create_channel().await?;
                amqp::declare_own_queue(&channel, LOCK).await.map(|_| channel)
            };
            match self.config.broker.bounded_or_code("take the lock", locking).await {
                Ok(channel) => return Ok(channel),
                Err((_, Some(amqp::RESOURCE_LOCKED))) => sleep(NOTIFIER_MISTRAL_STANDBY_INTERVAL).await,
                Err((error, _)) => return Err(error.message),
            }
        }
    }

    async fn consume_all(
        &self,
        connection: &Connection,
        channel: &Channel,
        mut found: mpsc::Receiver<Found>,
        stop: &CancellationToken,
    ) -> Result<(), String> {
        let mut queues = FuturesUnordered::<BoxFuture<'_, Result<ShortString, String>>>::new();
        // Those of which a consumer runs, and whether their queue was made again since.
        let mut known: BTreeMap<ShortString, bool> = BTreeMap::new();
        loop {
            let (queue, must_exist) = tokio::select! {
                biased;
                Some(ended) = queues.next() => {
                    let queue = ended?;
                    if known.remove(&queue) != Some(true) {
                        continue;
                    }
                    (queue, false)
                }
                () = stop.cancelled(), if queues.is_empty() => return Ok(()),
                Some(Found { queue, is_created }) = found.recv(), if !stop.is_cancelled() && known.len() < NOTIFIER_MISTRAL_QUEUES_MAX => {
                    if let Some(again) = known.get_mut(&queue) {
                        *again |= is_created;
                        continue;
                    }
                    (queue, true)
                }
            };
            known.insert(queue.clone(), false);
            let Self { config, intake } = self;
            let consumer = QueueConsumer { config, intake, connection, channel, queue, end: None };
            queues.push(Box::pin(consumer.run(must_exist, stop)));
        }
    }

    /// Finds queues: at once by the events of RabbitMQ, where its plugin publishes them, and otherwise within a minute.
    async fn discover(&self, found: &mpsc::Sender<Found>) -> String {
        let name_of = |name: &str| message::parse_queue(name).and_then(|_| amqp::to_short_string_or_none(name));
        let mut created = match self.watch().await {
            Ok(created) => Some(created),
            Err(why) => {
                let every = NOTIFIER_MISTRAL_DISCOVERY_INTERVAL;
                tracing::info!("new queues of Mistral are found within {every:?}: no events of RabbitMQ ({why})");
                None
            }
        };
        loop {
            match self.config.management.queue_names().await {
                Ok(names) => {
                    for queue in names.iter().filter_map(|name| name_of(name)) {
                        found.send(Found { queue, is_created: false }).await.ok();
                    }
                }
                Err(error) => tracing::warn!("cannot look for queues of Mistral, retrying: {error}"),
            }
            let next_list = Instant::now() + NOTIFIER_MISTRAL_DISCOVERY_INTERVAL;
            loop {
                let event = OptionFuture::from(created.as_mut().map(|(consumer, ..)| consumer.next()));
                tokio::select! {
                    Some(event) = event => match event {
                        Some(Ok(event)) => {
                            if let Some((_, channel, _)) = &created {
                                amqp::poll_once(channel.basic_ack(event.delivery_tag, BasicAckOptions::default()));
                            }
                            let table = event.properties.headers().clone().unwrap_or_default();
                            let is_here = headers::text(&table, "vhost") == Some(self.config.broker.vhost());
                            if let Some(queue) = headers::text(&table, "name").filter(|_| is_here).and_then(name_of) {
                                found.send(Found { queue, is_created: true }).await.ok();
                            }
                        }
                        Some(Err(error)) => return amqp::error_text(&error),
                        None => return "the events of RabbitMQ have ended".to_owned(),
                    },
                    () = sleep_until(next_list) => break,
                }
            }
        }
    }

    async fn watch(&self) -> Result<Watch, String> {
        let broker = &self.config.events;
        let connection = broker.connect("journeyman notifier, events").await.map_err(|error| error.message)?;
        let watching = async {
            amqp::find_exchange(&connection, EVENTS.into()).await?;
            let channel = connection.create_channel().await?;
            let queue = amqp::declare_own_queue(&channel, "").await?.name().clone();
            amqp::bind_queue(&channel, queue.as_str(), EVENTS, "queue.created").await?;
            channel.basic_qos(NOTIFIER_PREFETCH, BasicQosOptions::default()).await?;
            let options = BasicConsumeOptions::default();
            let consumer = amqp::consume(&channel, queue, ShortString::default(), options).await?;
            lapin::Result::Ok((consumer, channel))
        };
        let watched = broker.bounded("watch for new queues", watching).await;
        let (consumer, channel) = watched.map_err(|error| error.message)?;
        Ok((consumer, channel, connection))
    }
}
