//! The way out of a session: answers and copies, each confirmed, on channels apart from that of its deliveries.

use std::io;
use std::sync::{Arc, Mutex};

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::ShortString;
use lapin::{BasicProperties, Channel, Confirmation, Connection, PublisherConfirm};
use tokio::task::JoinSet;

use crate::host::crash_points::crash_point;

use super::reply_clients::is_direct_reply_to;
use super::{connection, lock};

/// What became of a message that was published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PublishResult {
    /// A queue has it.
    Confirmed,
    /// There is no queue for it.
    Returned,
    /// The broker did not want it.
    Nacked,
}

/// Where a session publishes.
pub(super) struct Publisher {
    connection: Arc<Connection>,
    reply_channel: Mutex<Channel>,
    /// Held by whoever makes another channel for answers.
    reopening: tokio::sync::Mutex<()>,
    /// Where one copy at a time is published; empty before the first one, and after one that nobody waited for.
    copy_channel: tokio::sync::Mutex<Option<Channel>>,
}

impl Publisher {
    /// `answers` is a channel on which the broker confirms.
    pub(super) fn new(connection: Arc<Connection>, answers: Channel) -> Self {
        Self {
            connection,
            reply_channel: Mutex::new(answers),
            reopening: tokio::sync::Mutex::default(),
            copy_channel: tokio::sync::Mutex::default(),
        }
    }

    /// Publishes an answer by way of the default exchange, and waits until the broker has confirmed. Of several answers on their
    /// way, lapin gives a return to whichever is confirmed next: how many came back is told, and not which.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: it may or may not have been published.
    pub(super) async fn publish_reply(
        self: Arc<Self>,
        key: ShortString,
        properties: BasicProperties,
        body: Arc<[u8]>,
    ) -> lapin::Result<PublishResult> {
        let publishing = async {
            let channel = self.open_reply_channel().await?;
            let confirm = send(&channel, key, properties, body).await?;
            crash_point("request-published");
            await_confirm(confirm).await
        };
        self.while_connected(publishing).await
    }

    /// Publishes what must not be taken for stored when it came back, one at a time, so that a return is its own.
    ///
    /// # Cancel safety
    ///
    /// As [`Publisher::publish_reply`].
    pub(super) async fn publish_copy(
        self: Arc<Self>,
        key: ShortString,
        properties: BasicProperties,
        body: Arc<[u8]>,
    ) -> lapin::Result<PublishResult> {
        run_to_completion(async move {
            let publishing = async {
                let mut place = self.copy_channel.lock().await;
                let channel = match place.take().filter(|channel| channel.status().connected()) {
                    Some(channel) => channel,
                    None => open_confirm_channel(&self.connection).await?,
                };
                let ended = await_confirm(send(&channel, key, properties, body).await?).await;
                *place = Some(channel);
                ended
            };
            self.while_connected(publishing).await
        })
        .await
    }

    /// The channel for what is published. Apart from that of the deliveries: what is wrong with one answer closes it, and must
    /// not cost every other request.
    async fn open_reply_channel(self: &Arc<Self>) -> lapin::Result<Channel> {
        if let Some(channel) = self.current_reply_channel() {
            return Ok(channel);
        }
        let this = Arc::clone(self);
        run_to_completion(async move {
            let making = async {
                let _one = this.reopening.lock().await;
                if let Some(channel) = this.current_reply_channel() {
                    return Ok(channel);
                }
                let channel = open_confirm_channel(&this.connection).await?;
                *lock(&this.reply_channel) = channel.clone();
                Ok(channel)
            };
            this.while_connected(making).await
        })
        .await
    }

    fn current_reply_channel(&self) -> Option<Channel> {
        let answers = lock(&self.reply_channel);
        answers.status().connected().then(|| answers.clone())
    }

    async fn while_connected<T>(&self, work: impl Future<Output = lapin::Result<T>>) -> lapin::Result<T> {
        connection::while_connected(&self.connection, work).await
    }
}

/// Goes on while whoever wants it waits for something else, until they want it no more: others may wait for what it holds.
async fn run_to_completion<T: Send + 'static>(
    work: impl Future<Output = lapin::Result<T>> + Send + 'static,
) -> lapin::Result<T> {
    let mut going = JoinSet::new();
    going.spawn(work);
    match going.join_next().await {
        Some(Ok(ended)) => ended,
        Some(Err(error)) => Err(io::Error::other(error).into()),
        None => Err(io::Error::other("it was not begun").into()),
    }
}

/// Publishes by way of the default exchange. What is sent is let go before it is confirmed: it may be large.
pub(super) async fn send(
    channel: &Channel,
    key: ShortString,
    properties: BasicProperties,
    body: Arc<[u8]>,
) -> lapin::Result<PublisherConfirm> {
    // RabbitMQ returns each message to a direct reply address, whether it was delivered or not, body and all.
    let options = BasicPublishOptions { mandatory: !is_direct_reply_to(&key), ..BasicPublishOptions::default() };
    channel.basic_publish("".into(), key, options, &body, properties).await
}

/// What became of it.
pub(super) async fn await_confirm(confirm: PublisherConfirm) -> lapin::Result<PublishResult> {
    Ok(match confirm.await? {
        Confirmation::Ack(None) | Confirmation::NotRequested => PublishResult::Confirmed,
        Confirmation::Ack(Some(_)) => PublishResult::Returned,
        Confirmation::Nack(_) => PublishResult::Nacked,
    })
}

/// A channel on which the broker confirms.
pub(super) async fn open_confirm_channel(connection: &Connection) -> lapin::Result<Channel> {
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok(channel)
}
