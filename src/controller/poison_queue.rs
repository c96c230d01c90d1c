//! Lists, requeues and discards the requests of the poison queue. Unacknowledged gets return to their place when the channel
//! closes.

use std::collections::{BTreeMap, BTreeSet};

use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicGetOptions, BasicPublishOptions};
use lapin::types::ShortString;
use lapin::{Channel, Confirmation, Connection};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::poison_message::{self, PoisonedRequest};
use super::queue_names::QueueNames;
use super::session::{SessionError, stream_ended};
use crate::amqp::{self, CloseOnDrop};
use crate::limits::{AMQP_CALL_TIMEOUT, AMQP_CLOSE_TIMEOUT, CONTROLLER_POISON_MAX};

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

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoisonOutcome {
    pub succeeded: Vec<String>,
    pub failed: BTreeMap<String, String>,
    pub not_scanned: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PoisonError {
    #[error("no request {0} in the poison queue")]
    NotFound(String),
    #[error("not among the requests that were scanned; {0} more were not scanned")]
    NotScanned(u32),
    #[error("{0}; ask the controller that holds the pool")]
    NotActive(String),
    #[error("the broker: {0}")]
    Failed(String),
}

pub(super) type PoisonReply<T> = oneshot::Sender<Result<T, PoisonError>>;

#[derive(Debug)]
pub(super) enum PoisonRequest {
    List(PoisonReply<PoisonList>),
    Body(String, PoisonReply<Vec<u8>>),
    Resolve { selection: PoisonSelection, action: PoisonAction, by: String, reply: PoisonReply<PoisonOutcome> },
}

impl PoisonRequest {
    pub(super) fn refuse(self, why: PoisonError) {
        match self {
            Self::List(answer) => drop(answer.send(Err(why))),
            Self::Body(_, answer) => drop(answer.send(Err(why))),
            Self::Resolve { reply: answer, .. } => drop(answer.send(Err(why))),
        }
    }
}

pub(super) async fn serve_poison_requests(
    connection: &Connection,
    names: &QueueNames,
    mut requests: mpsc::Receiver<PoisonRequest>,
) -> SessionError {
    let queue = PoisonQueue { connection, names };
    while let Some(request) = requests.recv().await {
        match request {
            PoisonRequest::List(reply) => drop(reply.send(queue.list().await)),
            PoisonRequest::Body(id, reply) => drop(reply.send(queue.body(&id).await)),
            // The caller was told that it timed out.
            PoisonRequest::Resolve { reply, .. } if reply.is_closed() => {}
            PoisonRequest::Resolve { selection, action, by, reply } => {
                drop(reply.send(queue.resolve(selection, action, &by).await));
            }
        }
    }
    stream_ended("poison requests")
}

struct PoisonQueue<'a> {
    connection: &'a Connection,
    names: &'a QueueNames,
}

impl PoisonQueue<'_> {
    async fn list(&self) -> Result<PoisonList, PoisonError> {
        let mut walk = self.scan().await?;
        let mut requests = Vec::new();
        while let Some(copy) = walk.next().await? {
            requests.push(poison_message::describe(&copy, self.names));
        }
        let more = walk.more;
        walk.close().await;
        Ok(PoisonList { requests, not_scanned: more })
    }

    async fn body(&self, id: &str) -> Result<Vec<u8>, PoisonError> {
        let mut walk = self.scan().await?;
        while let Some(copy) = walk.next().await? {
            if poison_message::id(&copy) == id {
                walk.close().await;
                return Ok(copy.data);
            }
        }
        let more = walk.more;
        walk.close().await;
        Err(if more > 0 { PoisonError::NotScanned(more) } else { PoisonError::NotFound(id.to_owned()) })
    }

    async fn resolve(
        &self,
        which: PoisonSelection,
        fate: PoisonAction,
        by: &str,
    ) -> Result<PoisonOutcome, PoisonError> {
        let mut settled = PoisonOutcome::default();
        let mut wanted = match which {
            PoisonSelection::All => None,
            PoisonSelection::Ids(ids) => Some(ids),
        };
        let mut walk = self.scan().await?;
        while wanted.as_ref().is_none_or(|wanted| !wanted.is_empty())
            && let Some(copy) = walk.next().await?
        {
            let id = poison_message::id(&copy);
            if wanted.as_mut().is_some_and(|wanted| !wanted.remove(&id)) {
                continue;
            }
            let done = match fate {
                PoisonAction::Requeue => self.requeue(&walk, &copy).await?,
                PoisonAction::Discard => Ok(()),
            };
            if let Err(why) = done {
                settled.failed.insert(id, why);
            } else if with_timeout(copy.acker.ack(BasicAckOptions::default())).await? {
                let what = if fate == PoisonAction::Discard { "discarded" } else { "requeued" };
                tracing::info!(request = id, by, key = poison_message::key(&copy, self.names), "poison request {what}");
                settled.succeeded.push(id);
            } else {
                settled.failed.insert(
                    id,
                    "the channel closed before the acknowledgement, so it may still be in the poison queue".to_owned(),
                );
            }
        }
        settled.not_scanned = if wanted.is_none() { walk.more } else { 0 };
        for id in wanted.unwrap_or_default() {
            let why = match walk.more {
                0 => "no such request".to_owned(),
                more => PoisonError::NotScanned(more).to_string(),
            };
            settled.failed.insert(id, why);
        }
        walk.close().await;
        Ok(settled)
    }

    async fn requeue(&self, walk: &PoisonScan, copy: &Delivery) -> Result<Result<(), String>, PoisonError> {
        let Some(key) = poison_message::key(copy, self.names).and_then(|key| amqp::to_short_string_or_none(&key))
        else {
            return Ok(Err("its key is unknown".to_owned()));
        };
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let (exchange, properties) = (self.names.requests_exchange().into(), poison_message::requeue_properties(copy));
        let publishing =
            async { walk.channel.basic_publish(exchange, key, options, &copy.data, properties).await?.await };
        Ok(match with_timeout(publishing).await? {
            Confirmation::Ack(None) | Confirmation::NotRequested => Ok(()),
            Confirmation::Ack(Some(_)) => Err("unroutable".to_owned()),
            Confirmation::Nack(_) => Err("the broker rejected it".to_owned()),
        })
    }

    async fn scan(&self) -> Result<PoisonScan, PoisonError> {
        let channel = with_timeout(amqp::confirm_channel(self.connection)).await?;
        let hold = CloseOnDrop::new(channel.clone());
        Ok(PoisonScan { channel, _hold: hold, queue: self.names.poison_queue().into(), scanned: 0, more: 0 })
    }
}

struct PoisonScan {
    channel: Channel,
    _hold: CloseOnDrop,
    queue: ShortString,
    scanned: usize,
    more: u32,
}

impl PoisonScan {
    async fn next(&mut self) -> Result<Option<Delivery>, PoisonError> {
        if self.more > 0 && self.scanned >= CONTROLLER_POISON_MAX {
            return Ok(None);
        }
        let options = BasicGetOptions { no_ack: false };
        let got = with_timeout(self.channel.basic_get(self.queue.clone(), options)).await?;
        self.scanned += 1;
        self.more = got.as_ref().map_or(0, |got| got.message_count);
        Ok(got.map(|got| got.delivery))
    }

    async fn close(self) {
        let closing = self.channel.close(lapin::protocol::constants::REPLY_SUCCESS, "OK".into());
        if !matches!(timeout(AMQP_CLOSE_TIMEOUT, closing).await, Ok(Ok(()))) {
            tracing::debug!("the channel of the poison queue was not closed cleanly");
        }
    }
}

async fn with_timeout<T>(doing: impl Future<Output = lapin::Result<T>>) -> Result<T, PoisonError> {
    match timeout(AMQP_CALL_TIMEOUT, doing).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(PoisonError::Failed(amqp::error_text(&error))),
        Err(_) => Err(PoisonError::Failed(format!("timed out after {AMQP_CALL_TIMEOUT:?}"))),
    }
}
