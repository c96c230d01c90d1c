//! Publishes replies and copies for a session, with confirms, on channels apart from that of the deliveries.

use std::io;
use std::sync::Arc;

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::ShortString;
use lapin::{BasicProperties, Channel, Confirmation, Connection, PublisherConfirm};
use parking_lot::Mutex;
use tokio::task::JoinSet;

use crate::host::crash_points::crash_point;

use super::connection;
use super::reply_clients::is_direct_reply_to;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PublishResult {
    /// A queue has it.
    Confirmed,
    /// No queue matches the key.
    Returned,
    /// The broker refused it.
    Nacked,
}

pub(super) struct Publisher {
    connection: Arc<Connection>,
    reply_channel: Mutex<Channel>,
    /// Held while a new reply channel is opened.
    reopening: tokio::sync::Mutex<()>,
    /// Publishes one copy at a time. `None` before the first one, and after one whose result was not awaited.
    copy_channel: tokio::sync::Mutex<Option<Channel>>,
}

impl Publisher {
    /// `reply_channel` is in confirm mode.
    pub(super) fn new(connection: Arc<Connection>, reply_channel: Channel) -> Self {
        Self {
            connection,
            reply_channel: Mutex::new(reply_channel),
            reopening: tokio::sync::Mutex::default(),
            copy_channel: tokio::sync::Mutex::default(),
        }
    }

    /// Publishes a reply through the default exchange and waits for the confirm. lapin attaches a return to whichever confirm comes next, so
    /// of concurrent replies the number of returns is known, and not which reply was returned.
    ///
    /// Not cancel safe: the reply may have been published.
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

    /// Publishes a copy whose return has to be its own, so one at a time. Not cancel safe.
    pub(super) async fn publish_copy(
        self: Arc<Self>,
        key: ShortString,
        properties: BasicProperties,
        body: Arc<[u8]>,
    ) -> lapin::Result<PublishResult> {
        run_to_completion(async move {
            let publishing = async {
                let mut copy_channel = self.copy_channel.lock().await;
                let channel = match copy_channel.take().filter(|channel| channel.status().connected()) {
                    Some(channel) => channel,
                    None => open_confirm_channel(&self.connection).await?,
                };
                let ended = await_confirm(send(&channel, key, properties, body).await?).await;
                *copy_channel = Some(channel);
                ended
            };
            self.while_connected(publishing).await
        })
        .await
    }

    /// The broker closes the channel over one faulty reply, which must not cost the deliveries, so replies have their own.
    async fn open_reply_channel(self: &Arc<Self>) -> lapin::Result<Channel> {
        if let Some(channel) = self.current_reply_channel() {
            return Ok(channel);
        }
        let this = Arc::clone(self);
        run_to_completion(async move {
            let opening = async {
                let _reopening = this.reopening.lock().await;
                if let Some(channel) = this.current_reply_channel() {
                    return Ok(channel);
                }
                let channel = open_confirm_channel(&this.connection).await?;
                *this.reply_channel.lock() = channel.clone();
                Ok(channel)
            };
            this.while_connected(opening).await
        })
        .await
    }

    fn current_reply_channel(&self) -> Option<Channel> {
        let reply_channel = self.reply_channel.lock();
        reply_channel.status().connected().then(|| reply_channel.clone())
    }

    async fn while_connected<T>(&self, work: impl Future<Output = lapin::Result<T>>) -> lapin::Result<T> {
        connection::while_connected(&self.connection, work).await
    }
}

/// Runs to the end while the caller waits for something else: other tasks may wait for the lock that it holds.
async fn run_to_completion<T: Send + 'static>(
    work: impl Future<Output = lapin::Result<T>> + Send + 'static,
) -> lapin::Result<T> {
    let mut tasks = JoinSet::new();
    tasks.spawn(work);
    match tasks.join_next().await {
        Some(Ok(ended)) => ended,
        Some(Err(error)) => Err(io::Error::other(error).into()),
        None => Err(io::Error::other("the task did not start").into()),
    }
}

/// Publishes through the default exchange. The body is freed before the confirm: it may be large.
pub(super) async fn send(
    channel: &Channel,
    key: ShortString,
    properties: BasicProperties,
    body: Arc<[u8]>,
) -> lapin::Result<PublisherConfirm> {
    // RabbitMQ returns each mandatory message to a direct reply-to address, delivered or not.
    let options = BasicPublishOptions { mandatory: !is_direct_reply_to(&key), ..BasicPublishOptions::default() };
    channel.basic_publish("".into(), key, options, &body, properties).await
}

pub(super) async fn await_confirm(confirm: PublisherConfirm) -> lapin::Result<PublishResult> {
    Ok(match confirm.await? {
        Confirmation::Ack(None) | Confirmation::NotRequested => PublishResult::Confirmed,
        Confirmation::Ack(Some(_)) => PublishResult::Returned,
        Confirmation::Nack(_) => PublishResult::Nacked,
    })
}

pub(super) async fn open_confirm_channel(connection: &Connection) -> lapin::Result<Channel> {
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok(channel)
}
