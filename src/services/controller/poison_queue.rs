//! Lists, requeues and discards the requests of the poison queue, over a connection of its own. Requests that are fetched and not
//! acknowledged return to their place when it closes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicGetOptions, BasicPublishOptions};
use lapin::{Channel, Confirmation, Connection};
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::poison_message::{self, PoisonedRequest};
use super::queue_names::QueueNames;
use journeyman_domain::limits::{AMQP_CALL_TIMEOUT, AMQP_CLOSE_TIMEOUT, CONTROLLER_POISON_MAX};
use journeyman_platform::amqp::{self, Broker};

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoisonList {
    pub requests: Vec<PoisonedRequest>,
    pub not_scanned: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PoisonSelection {
    All,
    Ids(BTreeSet<String>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PoisonAction {
    Requeue,
    Discard,
}

impl PoisonAction {
    pub const fn past_tense(self) -> &'static str {
        match self {
            Self::Requeue => "requeued",
            Self::Discard => "discarded",
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoisonOutcome {
    pub succeeded: Vec<String>,
    pub failed: BTreeMap<String, String>,
    pub not_scanned: u32,
}

#[derive(Debug, Clone)]
pub struct PoisonQueue {
    broker: Broker,
    names: QueueNames,
    /// Concurrent scans would hide requests from each other.
    lock: Arc<Mutex<()>>,
}

impl PoisonQueue {
    pub fn new(broker: Broker, names: QueueNames) -> Self {
        Self { broker, names, lock: Arc::default() }
    }

    pub async fn list(&self) -> Result<PoisonList, String> {
        let _one = self.lock.lock().await;
        let connection = self.connect().await?;
        let mut scan = PoisonScan::open(&connection, self.names.poison_queue()).await?;
        let mut list = PoisonList::default();
        while let Some(copy) = scan.next().await? {
            list.requests.push(poison_message::describe(&copy, &self.names));
        }
        list.not_scanned = scan.not_scanned;
        amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
        Ok(list)
    }

    /// Dropped between the copy and the acknowledgement of a request, it leaves both.
    pub async fn resolve(
        &self,
        selection: &PoisonSelection,
        action: PoisonAction,
        by: &str,
    ) -> Result<PoisonOutcome, String> {
        let _one = self.lock.lock().await;
        let connection = self.connect().await?;
        let mut scan = PoisonScan::open(&connection, self.names.poison_queue()).await?;
        let mut outcome = PoisonOutcome::default();
        let mut remaining = match selection {
            PoisonSelection::All => None,
            PoisonSelection::Ids(ids) => Some(ids.clone()),
        };
        while remaining.as_ref().is_none_or(|ids| !ids.is_empty())
            && let Some(copy) = scan.next().await?
        {
            let id = poison_message::id(&copy);
            if remaining.as_mut().is_some_and(|ids| !ids.remove(&id)) {
                continue;
            }
            let published = match action {
                PoisonAction::Requeue => self.requeue(&scan.channel, &copy).await?,
                PoisonAction::Discard => Ok(()),
            };
            if let Err(why) = published {
                outcome.failed.insert(id, why);
                continue;
            }
            if !with_timeout(copy.acker.ack(BasicAckOptions::default())).await? {
                return Err("the channel was closed".to_owned());
            }
            let (key, what) = (poison_message::key(&copy, &self.names), action.past_tense());
            tracing::info!(request = id, by, key, "poison request {what}");
            outcome.succeeded.push(id);
        }
        match remaining {
            None => outcome.not_scanned = scan.not_scanned,
            Some(ids) => {
                let why = format!("no such request among the first {CONTROLLER_POISON_MAX}");
                outcome.failed.extend(ids.into_iter().map(|id| (id, why.clone())));
            }
        }
        amqp::close(&connection, AMQP_CLOSE_TIMEOUT).await;
        Ok(outcome)
    }

    async fn connect(&self) -> Result<Connection, String> {
        self.broker.connect("journeyman poison queue").await.map_err(|refused| refused.message)
    }

    /// The inner error is about this request only.
    async fn requeue(&self, channel: &Channel, copy: &Delivery) -> Result<Result<(), String>, String> {
        let Some(key) = poison_message::key(copy, &self.names).and_then(|key| amqp::to_short_string_or_none(&key))
        else {
            return Ok(Err("its key is unknown".to_owned()));
        };
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let (exchange, properties) = (self.names.requests_exchange().into(), poison_message::requeue_properties(copy));
        let publish = async { channel.basic_publish(exchange, key, options, &copy.data, properties).await?.await };
        Ok(match with_timeout(publish).await? {
            Confirmation::Ack(None) | Confirmation::NotRequested => Ok(()),
            Confirmation::Ack(Some(_)) => Err("unroutable".to_owned()),
            Confirmation::Nack(_) => Err("the broker rejected it".to_owned()),
        })
    }
}

struct PoisonScan {
    channel: Channel,
    queue: String,
    scanned: usize,
    not_scanned: u32,
}

impl PoisonScan {
    async fn open(connection: &Connection, queue: String) -> Result<Self, String> {
        let channel = with_timeout(amqp::confirm_channel(connection)).await?;
        Ok(Self { channel, queue, scanned: 0, not_scanned: 0 })
    }

    async fn next(&mut self) -> Result<Option<Delivery>, String> {
        if self.scanned >= CONTROLLER_POISON_MAX {
            return Ok(None);
        }
        let get = self.channel.basic_get(self.queue.as_str().into(), BasicGetOptions::default());
        let message = with_timeout(get).await?;
        self.scanned += 1;
        self.not_scanned = message.as_ref().map_or(0, |message| message.message_count);
        Ok(message.map(|message| message.delivery))
    }
}

async fn with_timeout<T>(call: impl Future<Output = lapin::Result<T>>) -> Result<T, String> {
    match timeout(AMQP_CALL_TIMEOUT, call).await {
        Ok(result) => result.map_err(|error| format!("the broker: {}", amqp::error_text(&error))),
        Err(_) => Err(format!("the broker: no reply within {AMQP_CALL_TIMEOUT:?}")),
    }
}
