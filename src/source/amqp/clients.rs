//! Whether those whom an answer goes to at a direct reply address are still there. The broker has to be asked, and it has to be
//! asked before: who has their answer may leave at once, and has not gone without it.

use std::collections::HashMap;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::{Arc, Mutex, Weak};
use std::task::{Context, Poll, Waker};

use lapin::options::QueueDeclareOptions;
use lapin::types::{FieldTable, ShortString};
use lapin::{Channel, Connection};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use crate::amqp;
use crate::limits::{AMQP_CALL_TIMEOUT, AMQP_CLIENT_ASKED_EVERY, AMQP_CLIENTS_ASKED_MAX, AMQP_CLIENTS_SEEN_MAX};

use super::tally::Tally;
use super::{link, lock};

/// Clients of a session.
pub(super) struct Clients {
    connection: Arc<Connection>,
    /// For those who get an answer in parts.
    asking: tokio::sync::Mutex<Option<Channel>>,
    /// Nobody is being asked after on it.
    idle: Mutex<Option<Channel>>,
    asked: mpsc::Sender<Asked>,
    /// Direct reply addresses at which somebody was a moment ago.
    there: Mutex<HashMap<Box<str>, Instant>>,
}

/// A question that is on its way.
pub(super) struct Asked {
    address: ShortString,
    answer: Pin<Box<dyn Future<Output = lapin::Result<There>> + Send>>,
}

/// What is known of an address.
enum There {
    /// Somebody is, and the channel can be used again.
    Somebody(Channel),
    /// Nobody is; that has cost the channel.
    Nobody,
}

impl Clients {
    /// The second is for [`Clients::count`].
    pub(super) fn new(connection: Arc<Connection>) -> (Arc<Self>, mpsc::Receiver<Asked>) {
        let (asked, questions) = mpsc::channel(AMQP_CLIENTS_ASKED_MAX);
        let (asking, idle, there) = (tokio::sync::Mutex::default(), Mutex::default(), Mutex::default());
        (Arc::new(Self { connection, asking, idle, asked, there }), questions)
    }

    /// Asks whether somebody waits at a direct reply address, ahead of an answer that is published after this. One that was there a
    /// moment ago is not asked after, and nobody is while another is.
    pub(super) fn ask_ahead(&self, address: &ShortString) {
        if !is_direct(address) || self.seen_lately(address) {
            return;
        }
        let Some(channel) = lock(&self.idle).take() else {
            tracing::trace!("a client is not asked after: another is");
            return;
        };
        let mut answer: Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(asked(channel, address.clone()));
        // Polled once, it is on its way before anything that is published later. Whoever waits for it polls it again.
        if let Poll::Ready(known) = answer.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            answer = Box::pin(ready(known));
        }
        if self.asked.try_send(Asked { address: address.clone(), answer }).is_err() {
            tracing::trace!("a client is not asked after: nobody waits for the answer");
        }
    }

    fn seen_lately(&self, address: &ShortString) -> bool {
        let now = Instant::now();
        let mut there = lock(&self.there);
        there.retain(|_, asked| now.duration_since(*asked) < AMQP_CLIENT_ASKED_EVERY);
        there.contains_key(address.as_str())
    }

    /// Whether somebody still waits at a direct reply address.
    pub(super) async fn is_there(&self, address: &ShortString) -> lapin::Result<bool> {
        let asking = async {
            let mut place = self.asking.lock().await;
            let channel = match place.take().filter(|channel| channel.status().connected()) {
                Some(channel) => channel,
                None => self.connection.create_channel().await?,
            };
            Ok(match asked(channel, address.clone()).await? {
                There::Somebody(channel) => {
                    *place = Some(channel);
                    true
                }
                There::Nobody => false,
            })
        };
        link::while_connected(&self.connection, asking).await
    }

    /// Counts those who had gone before their answer, for as long as the session lasts.
    pub(super) async fn count(this: Weak<Self>, mut questions: mpsc::Receiver<Asked>, tally: Arc<Tally>) {
        loop {
            {
                let Some(clients) = this.upgrade() else { return };
                if !clients.is_ready().await {
                    return;
                }
            }
            let Some(Asked { address, answer }) = questions.recv().await else { return };
            let Some(clients) = this.upgrade() else { return };
            match timeout(AMQP_CALL_TIMEOUT, link::while_connected(&clients.connection, answer)).await {
                Ok(Ok(There::Nobody)) => tally.clients_gone.add(),
                Ok(Ok(There::Somebody(channel))) => clients.saw(&address, channel),
                Ok(Err(_)) | Err(_) => {}
            }
        }
    }

    /// Has a channel ready for the next question.
    async fn is_ready(&self) -> bool {
        if lock(&self.idle).is_some() {
            return true;
        }
        let making = link::while_connected(&self.connection, self.connection.create_channel());
        match timeout(AMQP_CALL_TIMEOUT, making).await {
            Ok(Ok(channel)) => {
                *lock(&self.idle) = Some(channel);
                true
            }
            Ok(Err(_)) | Err(_) => {
                tracing::debug!("clients are not asked after any more: no channel can be had for it");
                false
            }
        }
    }

    fn saw(&self, address: &ShortString, channel: Channel) {
        *lock(&self.idle) = Some(channel);
        let mut there = lock(&self.there);
        if there.len() < AMQP_CLIENTS_SEEN_MAX {
            there.insert(address.as_str().into(), Instant::now());
        }
    }
}

/// The broker answers as if the address were a queue, and closes the channel where nobody is there.
async fn asked(channel: Channel, address: ShortString) -> lapin::Result<There> {
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    match channel.queue_declare(address, options, FieldTable::default()).await {
        Ok(_) => Ok(There::Somebody(channel)),
        Err(error) if amqp::code(&error) == Some(amqp::NOT_FOUND) => Ok(There::Nobody),
        Err(error) => Err(error),
    }
}

/// Whether answers to it go straight to a client's channel, without a queue.
pub(super) fn is_direct(address: &ShortString) -> bool {
    address.as_str().starts_with("amq.rabbitmq.reply-to.")
}
