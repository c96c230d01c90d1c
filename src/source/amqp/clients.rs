//! Whether those who were answered at a direct reply address are still there: the broker has to be asked, beside the work.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

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
    asking: tokio::sync::Mutex<Option<Channel>>,
    asked: mpsc::Sender<ShortString>,
    /// Direct reply addresses at which somebody was a moment ago.
    there: Mutex<HashMap<Box<str>, Instant>>,
}

impl Clients {
    /// The second is for [`Clients::ask`].
    pub(super) fn new(connection: Arc<Connection>) -> (Arc<Self>, mpsc::Receiver<ShortString>) {
        let (asked, addresses) = mpsc::channel(AMQP_CLIENTS_ASKED_MAX);
        let clients = Self { connection, asking: tokio::sync::Mutex::default(), asked, there: Mutex::default() };
        (Arc::new(clients), addresses)
    }

    /// Wants to know whether somebody still waits at a direct reply address, when there is time. One that was there a moment ago
    /// is not asked after; where many are, some are not.
    pub(super) fn ask_after(&self, address: &ShortString) {
        if !is_direct(address) || self.seen_lately(address) {
            return;
        }
        if self.asked.try_send(address.clone()).is_err() {
            tracing::trace!("a client is not asked after: others are");
        }
    }

    fn seen_lately(&self, address: &ShortString) -> bool {
        let now = Instant::now();
        let mut there = lock(&self.there);
        there.retain(|_, asked| now.duration_since(*asked) < AMQP_CLIENT_ASKED_EVERY);
        there.contains_key(address.as_str())
    }

    /// Whether somebody still waits at a direct reply address. The broker answers as if it were a queue, and closes the channel
    /// where there is none.
    pub(super) async fn is_there(&self, address: &ShortString) -> lapin::Result<bool> {
        let asked = async {
            let mut asking = self.asking.lock().await;
            let channel = match asking.take().filter(|channel| channel.status().connected()) {
                Some(channel) => channel,
                None => self.connection.create_channel().await?,
            };
            let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
            match channel.queue_declare(address.clone(), options, FieldTable::default()).await {
                Ok(_) => {
                    *asking = Some(channel);
                    Ok(true)
                }
                Err(error) if amqp::code(&error) == Some(amqp::NOT_FOUND) => Ok(false),
                Err(error) => Err(error),
            }
        };
        link::while_connected(&self.connection, asked).await
    }

    /// Asks after those that were answered, for as long as the session lasts.
    pub(super) async fn ask(this: Weak<Self>, mut addresses: mpsc::Receiver<ShortString>, tally: Arc<Tally>) {
        while let Some(address) = addresses.recv().await {
            let Some(clients) = this.upgrade() else { return };
            match timeout(AMQP_CALL_TIMEOUT, clients.is_there(&address)).await {
                Ok(Ok(false)) => tally.clients_gone.add(),
                Ok(Ok(true)) => {
                    let mut there = lock(&clients.there);
                    if there.len() < AMQP_CLIENTS_SEEN_MAX {
                        there.insert(address.as_str().into(), Instant::now());
                    }
                }
                Ok(Err(_)) | Err(_) => {}
            }
        }
    }
}

/// Whether answers to it go straight to a client's channel, without a queue.
pub(super) fn is_direct(address: &ShortString) -> bool {
    address.as_str().starts_with("amq.rabbitmq.reply-to.")
}
