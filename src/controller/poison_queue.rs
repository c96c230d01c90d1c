//! Goes through the requests that were put aside: shows them, tries them once more, or drops them.
//!
//! AMQP lets nobody look into a queue. Each request is taken and not acknowledged, and all that are still wanted there are back in
//! their places when the channel closes, also where the controller dies. What is tried again is confirmed at its new place before it
//! leaves the old one, so at worst it is at both.

use std::collections::{BTreeMap, BTreeSet};

use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::ShortString;
use lapin::{Channel, Confirmation, Connection};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::poison_message::{self, PoisonedRequest};
use super::queue_names::QueueNames;
use crate::amqp::{self, CloseOnDrop};
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{AMQP_CALL_TIMEOUT, AMQP_CLOSE_TIMEOUT, CONTROLLER_POISON_MAX, CONTROLLER_POISON_TIMEOUT};

/// What lies in the inventory of a pool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PoisonList {
    /// The oldest first.
    pub requests: Vec<PoisonedRequest>,
    /// How many more there are, which were not looked at.
    pub not_scanned: u32,
}

/// Which requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PoisonSelection {
    /// All that are there.
    All,
    /// These, by what they are called.
    Ids(BTreeSet<String>),
}

/// What becomes of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PoisonAction {
    /// They are tried once more, as if they had never been.
    Requeue,
    /// They are gone.
    Discard,
}

/// What became of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PoisonOutcome {
    /// Those of which it is done.
    pub succeeded: Vec<String>,
    /// Those of which it is not, and why.
    pub failed: BTreeMap<String, String>,
    /// How many more there are, which were not looked at.
    pub not_scanned: u32,
}

/// Why nothing can be said.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PoisonError {
    /// There is no such request.
    #[error("no request that was put aside is called {0}")]
    NotFound(String),
    /// It was not come to in the time for that; there are so many more.
    #[error("there was no time to look at {0} more, of which it may be one: ask again, or for fewer")]
    NotScanned(u32),
    /// This controller does not have the pool now.
    #[error("{0}; the controller that has the pool can be asked")]
    NotActive(String),
    /// The broker did not do it.
    #[error("the broker: {0}")]
    Failed(String),
}

/// Where what is asked is answered.
pub(super) type PoisonReply<T> = oneshot::Sender<Result<T, PoisonError>>;

/// What somebody wants.
#[derive(Debug)]
pub(super) enum PoisonRequest {
    List(PoisonReply<PoisonList>),
    Body(String, PoisonReply<Vec<u8>>),
    Resolve { selection: PoisonSelection, action: PoisonAction, by: String, reply: PoisonReply<PoisonOutcome> },
}

impl PoisonRequest {
    /// Says no. Who has asked may have gone.
    pub(super) fn refuse(self, why: PoisonError) {
        match self {
            Self::List(answer) => drop(answer.send(Err(why))),
            Self::Body(_, answer) => drop(answer.send(Err(why))),
            Self::Resolve { reply: answer, .. } => drop(answer.send(Err(why))),
        }
    }
}

/// Grants wishes one after the other, until nobody has any more: two at once would hide requests from each other.
pub(super) async fn serve_poison_requests(
    connection: &Connection,
    names: &QueueNames,
    clock: Clock,
    mut wishes: mpsc::Receiver<PoisonRequest>,
) {
    let desk = PoisonQueue { connection, names, clock };
    while let Some(wish) = wishes.recv().await {
        match wish {
            PoisonRequest::List(answer) => drop(answer.send(desk.list().await)),
            PoisonRequest::Body(id, answer) => drop(answer.send(desk.body(&id).await)),
            // Who was told meanwhile that nothing came of it does not expect it any more.
            PoisonRequest::Resolve { reply: answer, .. } if answer.is_closed() => {}
            PoisonRequest::Resolve { selection: which, action: fate, by, reply: answer } => {
                drop(answer.send(desk.resolve(which, fate, &by).await))
            }
        }
    }
}

struct PoisonQueue<'a> {
    connection: &'a Connection,
    names: &'a QueueNames,
    clock: Clock,
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
                let what = if fate == PoisonAction::Discard { "is dropped" } else { "is tried once more" };
                tracing::info!(
                    request = id,
                    by,
                    key = poison_message::key(&copy, self.names),
                    "what was put aside {what}"
                );
                settled.succeeded.push(id);
            } else {
                settled.failed.insert(id, "its channel was lost, so it may be there still".to_owned());
            }
        }
        settled.not_scanned = if wanted.is_none() { walk.more } else { 0 };
        for id in wanted.unwrap_or_default() {
            let why = match walk.more {
                0 => "there is no such request".to_owned(),
                more => PoisonError::NotScanned(more).to_string(),
            };
            settled.failed.insert(id, why);
        }
        walk.close().await;
        Ok(settled)
    }

    /// Publishes it under its key, to its queue or to the orphans. Answers with why that could not be done.
    async fn requeue(&self, walk: &PoisonScan<'_>, copy: &Delivery) -> Result<Result<(), String>, PoisonError> {
        let Some(key) = poison_message::key(copy, self.names).and_then(|key| amqp::to_short_string_or_none(&key))
        else {
            return Ok(Err("nothing says under which key it came".to_owned()));
        };
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let (exchange, properties) = (self.names.requests_exchange().into(), poison_message::requeue_properties(copy));
        let publishing =
            async { walk.channel.basic_publish(exchange, key, options, &copy.data, properties).await?.await };
        Ok(match with_timeout(publishing).await? {
            Confirmation::Ack(None) | Confirmation::NotRequested => Ok(()),
            Confirmation::Ack(Some(_)) => Err("its key leads nowhere".to_owned()),
            Confirmation::Nack(_) => Err("the broker did not take it".to_owned()),
        })
    }

    async fn scan(&self) -> Result<PoisonScan<'_>, PoisonError> {
        let channel = with_timeout(self.connection.create_channel()).await?;
        let hold = CloseOnDrop::new(channel.clone());
        with_timeout(channel.confirm_select(ConfirmSelectOptions::default())).await?;
        let until = self.clock.now().plus(CONTROLLER_POISON_TIMEOUT);
        Ok(PoisonScan {
            channel,
            _hold: hold,
            queue: self.names.poison_queue().into(),
            scanned: 0,
            more: 0,
            until,
            clock: &self.clock,
        })
    }
}

/// On the way through the queue. What was taken is back when its channel is closed.
struct PoisonScan<'a> {
    channel: Channel,
    _hold: CloseOnDrop<Channel>,
    queue: ShortString,
    scanned: usize,
    more: u32,
    until: Instant,
    clock: &'a Clock,
}

impl PoisonScan<'_> {
    /// The next one; `None` where there is none, or not the time for it.
    async fn next(&mut self) -> Result<Option<Delivery>, PoisonError> {
        if self.more > 0 && (self.scanned >= CONTROLLER_POISON_MAX || self.clock.now() >= self.until) {
            return Ok(None);
        }
        let options = BasicGetOptions { no_ack: false };
        let got = with_timeout(self.channel.basic_get(self.queue.clone(), options)).await?;
        self.scanned += 1;
        self.more = got.as_ref().map_or(0, |got| got.message_count);
        Ok(got.map(|got| got.delivery))
    }

    /// Waits until the broker has put back what is still wanted there.
    async fn close(self) {
        let closing = self.channel.close(lapin::protocol::constants::REPLY_SUCCESS, "OK".into());
        if !matches!(timeout(AMQP_CLOSE_TIMEOUT, closing).await, Ok(Ok(()))) {
            tracing::debug!("the channel of the inventory was not closed in order");
        }
    }
}

async fn with_timeout<T>(doing: impl Future<Output = lapin::Result<T>>) -> Result<T, PoisonError> {
    match timeout(AMQP_CALL_TIMEOUT, doing).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(PoisonError::Failed(amqp::error_text(&error))),
        Err(_) => Err(PoisonError::Failed(format!("not done in {AMQP_CALL_TIMEOUT:?}"))),
    }
}
