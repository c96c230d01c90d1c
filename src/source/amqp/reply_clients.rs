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
use crate::limits::{AMQP_CALL_TIMEOUT, AMQP_CLIENT_PROBE_TTL, AMQP_CLIENT_PROBES_MAX, AMQP_CLIENTS_CACHED_MAX};

use super::counters::AmqpSourceCounters;
use super::{connection, lock};

/// Clients of a session.
pub(super) struct ReplyClients {
    connection: Arc<Connection>,
    /// For those who get an answer in parts.
    stream_channel: tokio::sync::Mutex<Option<Channel>>,
    /// Nobody is being asked after on it.
    idle_channel: Mutex<Option<Channel>>,
    checks: mpsc::Sender<PresenceCheck>,
    /// Direct reply addresses at which somebody was a moment ago.
    seen_at: Mutex<HashMap<Box<str>, Instant>>,
}

/// A question that is on its way.
pub(super) struct PresenceCheck {
    address: ShortString,
    presence: Pin<Box<dyn Future<Output = lapin::Result<ClientPresence>> + Send>>,
}

/// What is known of an address.
enum ClientPresence {
    /// Somebody is, and the channel can be used again.
    Present(Channel),
    /// Nobody is; that has cost the channel.
    Absent,
}

impl ReplyClients {
    /// The second is for [`ReplyClients::count_absent`].
    pub(super) fn new(connection: Arc<Connection>) -> (Arc<Self>, mpsc::Receiver<PresenceCheck>) {
        let (asked, questions) = mpsc::channel(AMQP_CLIENT_PROBES_MAX);
        let (asking, idle, there) = (tokio::sync::Mutex::default(), Mutex::default(), Mutex::default());
        (
            Arc::new(Self { connection, stream_channel: asking, idle_channel: idle, checks: asked, seen_at: there }),
            questions,
        )
    }

    /// Asks whether somebody waits at a direct reply address, ahead of an answer that is published after this. One that was there a
    /// moment ago is not asked after, and nobody is while another is.
    pub(super) fn check_before_reply(&self, address: &ShortString) {
        if !is_direct_reply_to(address) || self.was_seen_recently(address) {
            return;
        }
        let Some(channel) = lock(&self.idle_channel).take() else {
            tracing::trace!("a client is not asked after: another is");
            return;
        };
        let mut answer: Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(check_address(channel, address.clone()));
        // Polled once, it is on its way before anything that is published later. Whoever waits for it polls it again.
        if let Poll::Ready(known) = answer.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            answer = Box::pin(ready(known));
        }
        if self.checks.try_send(PresenceCheck { address: address.clone(), presence: answer }).is_err() {
            tracing::trace!("a client is not asked after: nobody waits for the answer");
        }
    }

    fn was_seen_recently(&self, address: &ShortString) -> bool {
        let now = Instant::now();
        let mut there = lock(&self.seen_at);
        there.retain(|_, asked| now.duration_since(*asked) < AMQP_CLIENT_PROBE_TTL);
        there.contains_key(address.as_str())
    }

    /// Whether somebody still waits at a direct reply address.
    pub(super) async fn is_present(&self, address: &ShortString) -> lapin::Result<bool> {
        let asking = async {
            let mut place = self.stream_channel.lock().await;
            let channel = match place.take().filter(|channel| channel.status().connected()) {
                Some(channel) => channel,
                None => self.connection.create_channel().await?,
            };
            Ok(match check_address(channel, address.clone()).await? {
                ClientPresence::Present(channel) => {
                    *place = Some(channel);
                    true
                }
                ClientPresence::Absent => false,
            })
        };
        connection::while_connected(&self.connection, asking).await
    }

    /// Counts those who had gone before their answer, for as long as the session lasts.
    pub(super) async fn count_absent(
        this: Weak<Self>,
        mut questions: mpsc::Receiver<PresenceCheck>,
        tally: Arc<AmqpSourceCounters>,
    ) {
        loop {
            {
                let Some(clients) = this.upgrade() else { return };
                if !clients.prepare_channel().await {
                    return;
                }
            }
            let Some(PresenceCheck { address, presence: answer }) = questions.recv().await else { return };
            let Some(clients) = this.upgrade() else { return };
            match timeout(AMQP_CALL_TIMEOUT, connection::while_connected(&clients.connection, answer)).await {
                Ok(Ok(ClientPresence::Absent)) => tally.clients_absent.increment(),
                Ok(Ok(ClientPresence::Present(channel))) => clients.record_present(&address, channel),
                Ok(Err(_)) | Err(_) => {}
            }
        }
    }

    /// Has a channel ready for the next question.
    async fn prepare_channel(&self) -> bool {
        if lock(&self.idle_channel).is_some() {
            return true;
        }
        let making = connection::while_connected(&self.connection, self.connection.create_channel());
        match timeout(AMQP_CALL_TIMEOUT, making).await {
            Ok(Ok(channel)) => {
                *lock(&self.idle_channel) = Some(channel);
                true
            }
            Ok(Err(_)) | Err(_) => {
                tracing::debug!("clients are not asked after any more: no channel can be had for it");
                false
            }
        }
    }

    fn record_present(&self, address: &ShortString, channel: Channel) {
        *lock(&self.idle_channel) = Some(channel);
        let mut there = lock(&self.seen_at);
        if there.len() < AMQP_CLIENTS_CACHED_MAX {
            there.insert(address.as_str().into(), Instant::now());
        }
    }
}

/// The broker answers as if the address were a queue, and closes the channel where nobody is there.
async fn check_address(channel: Channel, address: ShortString) -> lapin::Result<ClientPresence> {
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    match channel.queue_declare(address, options, FieldTable::default()).await {
        Ok(_) => Ok(ClientPresence::Present(channel)),
        Err(error) if amqp::reply_code(&error) == Some(amqp::NOT_FOUND) => Ok(ClientPresence::Absent),
        Err(error) => Err(error),
    }
}

/// Whether answers to it go straight to a client's channel, without a queue.
pub(super) fn is_direct_reply_to(address: &ShortString) -> bool {
    address.as_str().starts_with("amq.rabbitmq.reply-to.")
}
