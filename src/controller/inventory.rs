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

use super::names::Names;
use super::poison::{self, Entry};
use crate::amqp::{self, Provisional};
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::limits::{AMQP_CALL_TIMEOUT, AMQP_CLOSE_WAIT, CONTROLLER_POISON_MAX, CONTROLLER_POISON_TIME};

/// What lies in the inventory of a pool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Inventory {
    /// The oldest first.
    pub requests: Vec<Entry>,
    /// How many more there are, which were not looked at.
    pub more: u32,
}

/// Which requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Which {
    /// All that are there.
    All,
    /// These, by what they are called.
    These(BTreeSet<String>),
}

/// What becomes of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Fate {
    /// They are tried once more, as if they had never been.
    Requeue,
    /// They are gone.
    Drop,
}

/// What became of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Settled {
    /// Those of which it is done.
    pub done: Vec<String>,
    /// Those of which it is not, and why.
    pub not: BTreeMap<String, String>,
    /// How many more there are, which were not looked at.
    pub more: u32,
}

/// Why nothing can be said.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unsaid {
    /// There is no such request.
    #[error("no request that was put aside is called {0}")]
    NoneSuch(String),
    /// It was not come to in the time for that; there are so many more.
    #[error("there was no time to look at {0} more, of which it may be one: ask again, or for fewer")]
    NotReached(u32),
    /// This controller does not have the pool now.
    #[error("{0}; the controller that has the pool can be asked")]
    NotHere(String),
    /// The broker did not do it.
    #[error("the broker: {0}")]
    Failed(String),
}

/// Where what is asked is answered.
pub(super) type Answer<T> = oneshot::Sender<Result<T, Unsaid>>;

/// What somebody wants.
#[derive(Debug)]
pub(super) enum Wish {
    See(Answer<Inventory>),
    Body(String, Answer<Vec<u8>>),
    Settle { which: Which, fate: Fate, by: String, answer: Answer<Settled> },
}

impl Wish {
    /// Says no. Who has asked may have gone.
    pub(super) fn refuse(self, why: Unsaid) {
        match self {
            Self::See(answer) => drop(answer.send(Err(why))),
            Self::Body(_, answer) => drop(answer.send(Err(why))),
            Self::Settle { answer, .. } => drop(answer.send(Err(why))),
        }
    }
}

/// Grants wishes one after the other, until nobody has any more: two at once would hide requests from each other.
pub(super) async fn grant(connection: &Connection, names: &Names, clock: Clock, mut wishes: mpsc::Receiver<Wish>) {
    let desk = Desk { connection, names, clock };
    while let Some(wish) = wishes.recv().await {
        match wish {
            Wish::See(answer) => drop(answer.send(desk.see().await)),
            Wish::Body(id, answer) => drop(answer.send(desk.body(&id).await)),
            // Who was told meanwhile that nothing came of it does not expect it any more.
            Wish::Settle { answer, .. } if answer.is_closed() => {}
            Wish::Settle { which, fate, by, answer } => drop(answer.send(desk.settle(which, fate, &by).await)),
        }
    }
}

struct Desk<'a> {
    connection: &'a Connection,
    names: &'a Names,
    clock: Clock,
}

impl Desk<'_> {
    async fn see(&self) -> Result<Inventory, Unsaid> {
        let mut walk = self.walk().await?;
        let mut requests = Vec::new();
        while let Some(copy) = walk.next().await? {
            requests.push(poison::entry(&copy, self.names));
        }
        let more = walk.more;
        walk.close().await;
        Ok(Inventory { requests, more })
    }

    async fn body(&self, id: &str) -> Result<Vec<u8>, Unsaid> {
        let mut walk = self.walk().await?;
        while let Some(copy) = walk.next().await? {
            if poison::id(&copy) == id {
                walk.close().await;
                return Ok(copy.data);
            }
        }
        let more = walk.more;
        walk.close().await;
        Err(if more > 0 { Unsaid::NotReached(more) } else { Unsaid::NoneSuch(id.to_owned()) })
    }

    async fn settle(&self, which: Which, fate: Fate, by: &str) -> Result<Settled, Unsaid> {
        let mut settled = Settled::default();
        let mut wanted = match which {
            Which::All => None,
            Which::These(ids) => Some(ids),
        };
        let mut walk = self.walk().await?;
        while wanted.as_ref().is_none_or(|wanted| !wanted.is_empty())
            && let Some(copy) = walk.next().await?
        {
            let id = poison::id(&copy);
            if wanted.as_mut().is_some_and(|wanted| !wanted.remove(&id)) {
                continue;
            }
            let done = match fate {
                Fate::Requeue => self.requeue(&walk, &copy).await?,
                Fate::Drop => Ok(()),
            };
            if let Err(why) = done {
                settled.not.insert(id, why);
            } else if within(copy.acker.ack(BasicAckOptions::default())).await? {
                let what = if fate == Fate::Drop { "is dropped" } else { "is tried once more" };
                tracing::info!(request = id, by, key = poison::key(&copy, self.names), "what was put aside {what}");
                settled.done.push(id);
            } else {
                settled.not.insert(id, "its channel was lost, so it may be there still".to_owned());
            }
        }
        settled.more = if wanted.is_none() { walk.more } else { 0 };
        for id in wanted.unwrap_or_default() {
            let why = match walk.more {
                0 => "there is no such request".to_owned(),
                more => Unsaid::NotReached(more).to_string(),
            };
            settled.not.insert(id, why);
        }
        walk.close().await;
        Ok(settled)
    }

    /// Publishes it under its key, to its queue or to the orphans. Answers with why that could not be done.
    async fn requeue(&self, walk: &Walk<'_>, copy: &Delivery) -> Result<Result<(), String>, Unsaid> {
        let Some(key) = poison::key(copy, self.names).and_then(|key| amqp::short_or_none(&key)) else {
            return Ok(Err("nothing says under which key it came".to_owned()));
        };
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let (exchange, properties) = (self.names.requests().into(), poison::fresh(copy));
        let publishing =
            async { walk.channel.basic_publish(exchange, key, options, &copy.data, properties).await?.await };
        Ok(match within(publishing).await? {
            Confirmation::Ack(None) | Confirmation::NotRequested => Ok(()),
            Confirmation::Ack(Some(_)) => Err("its key leads nowhere".to_owned()),
            Confirmation::Nack(_) => Err("the broker did not take it".to_owned()),
        })
    }

    async fn walk(&self) -> Result<Walk<'_>, Unsaid> {
        let channel = within(self.connection.create_channel()).await?;
        let hold = Provisional::of(channel.clone());
        within(channel.confirm_select(ConfirmSelectOptions::default())).await?;
        let until = self.clock.now().plus(CONTROLLER_POISON_TIME);
        Ok(Walk {
            channel,
            _hold: hold,
            queue: self.names.poison_queue().into(),
            seen: 0,
            more: 0,
            until,
            clock: &self.clock,
        })
    }
}

/// On the way through the queue. What was taken is back when its channel is closed.
struct Walk<'a> {
    channel: Channel,
    _hold: Provisional<Channel>,
    queue: ShortString,
    seen: usize,
    more: u32,
    until: Instant,
    clock: &'a Clock,
}

impl Walk<'_> {
    /// The next one; `None` where there is none, or not the time for it.
    async fn next(&mut self) -> Result<Option<Delivery>, Unsaid> {
        if self.more > 0 && (self.seen >= CONTROLLER_POISON_MAX || self.clock.now() >= self.until) {
            return Ok(None);
        }
        let options = BasicGetOptions { no_ack: false };
        let got = within(self.channel.basic_get(self.queue.clone(), options)).await?;
        self.seen += 1;
        self.more = got.as_ref().map_or(0, |got| got.message_count);
        Ok(got.map(|got| got.delivery))
    }

    /// Waits until the broker has put back what is still wanted there.
    async fn close(self) {
        let closing = self.channel.close(lapin::protocol::constants::REPLY_SUCCESS, "OK".into());
        if !matches!(timeout(AMQP_CLOSE_WAIT, closing).await, Ok(Ok(()))) {
            tracing::debug!("the channel of the inventory was not closed in order");
        }
    }
}

async fn within<T>(doing: impl Future<Output = lapin::Result<T>>) -> Result<T, Unsaid> {
    match timeout(AMQP_CALL_TIMEOUT, doing).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(Unsaid::Failed(amqp::shown(&error))),
        Err(_) => Err(Unsaid::Failed(format!("not done in {AMQP_CALL_TIMEOUT:?}"))),
    }
}
