//! The way out of a session: answers and copies, each confirmed, on channels apart from that of its deliveries.

use std::io;
use std::sync::{Arc, Mutex};

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::ShortString;
use lapin::{BasicProperties, Channel, Confirmation, Connection, PublisherConfirm};
use tokio::task::JoinSet;

use crate::host::crash::crash_point;

use super::clients::is_direct;
use super::{link, lock};

/// What became of a message that was published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Published {
    /// A queue has it.
    Taken,
    /// There is no queue for it.
    Returned,
    /// The broker did not want it.
    Refused,
}

/// Where a session publishes.
pub(super) struct Outlet {
    connection: Arc<Connection>,
    answers: Mutex<Channel>,
    /// Held by whoever makes another channel for answers.
    renewing: tokio::sync::Mutex<()>,
    /// Where one copy at a time is published; empty before the first one, and after one that nobody waited for.
    copies: tokio::sync::Mutex<Option<Channel>>,
}

impl Outlet {
    /// `answers` is a channel on which the broker confirms.
    pub(super) fn new(connection: Arc<Connection>, answers: Channel) -> Self {
        Self {
            connection,
            answers: Mutex::new(answers),
            renewing: tokio::sync::Mutex::default(),
            copies: tokio::sync::Mutex::default(),
        }
    }

    /// Publishes an answer by way of the default exchange, and waits until the broker has confirmed. Of several answers on their
    /// way, lapin gives a return to whichever is confirmed next: how many came back is told, and not which.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: it may or may not have been published.
    pub(super) async fn publish(
        self: Arc<Self>,
        key: ShortString,
        properties: BasicProperties,
        body: Arc<[u8]>,
    ) -> lapin::Result<Published> {
        let publishing = async {
            let channel = self.answering().await?;
            let confirm = sent(&channel, key, properties, body).await?;
            crash_point("request-published");
            published(confirm).await
        };
        self.while_it_stands(publishing).await
    }

    /// Publishes what must not be taken for stored when it came back, one at a time, so that a return is its own.
    ///
    /// # Cancel safety
    ///
    /// As [`Outlet::publish`].
    pub(super) async fn publish_alone(
        self: Arc<Self>,
        key: ShortString,
        properties: BasicProperties,
        body: Arc<[u8]>,
    ) -> lapin::Result<Published> {
        apart(async move {
            let publishing = async {
                let mut place = self.copies.lock().await;
                let channel = match place.take().filter(|channel| channel.status().connected()) {
                    Some(channel) => channel,
                    None => confirming(&self.connection).await?,
                };
                let ended = published(sent(&channel, key, properties, body).await?).await;
                *place = Some(channel);
                ended
            };
            self.while_it_stands(publishing).await
        })
        .await
    }

    /// The channel for what is published. Apart from that of the deliveries: what is wrong with one answer closes it, and must
    /// not cost every other request.
    async fn answering(self: &Arc<Self>) -> lapin::Result<Channel> {
        if let Some(channel) = self.open_for_answers() {
            return Ok(channel);
        }
        let this = Arc::clone(self);
        apart(async move {
            let making = async {
                let _one = this.renewing.lock().await;
                if let Some(channel) = this.open_for_answers() {
                    return Ok(channel);
                }
                let channel = confirming(&this.connection).await?;
                *lock(&this.answers) = channel.clone();
                Ok(channel)
            };
            this.while_it_stands(making).await
        })
        .await
    }

    fn open_for_answers(&self) -> Option<Channel> {
        let answers = lock(&self.answers);
        answers.status().connected().then(|| answers.clone())
    }

    async fn while_it_stands<T>(&self, work: impl Future<Output = lapin::Result<T>>) -> lapin::Result<T> {
        link::while_connected(&self.connection, work).await
    }
}

/// Goes on while whoever wants it waits for something else, until they want it no more: others may wait for what it holds.
async fn apart<T: Send + 'static>(work: impl Future<Output = lapin::Result<T>> + Send + 'static) -> lapin::Result<T> {
    let mut going = JoinSet::new();
    going.spawn(work);
    match going.join_next().await {
        Some(Ok(ended)) => ended,
        Some(Err(error)) => Err(io::Error::other(error).into()),
        None => Err(io::Error::other("it was not begun").into()),
    }
}

/// Publishes by way of the default exchange. What is sent is let go before it is confirmed: it may be large.
pub(super) async fn sent(
    channel: &Channel,
    key: ShortString,
    properties: BasicProperties,
    body: Arc<[u8]>,
) -> lapin::Result<PublisherConfirm> {
    // RabbitMQ returns each message to a direct reply address, whether it was delivered or not, body and all.
    let options = BasicPublishOptions { mandatory: !is_direct(&key), ..BasicPublishOptions::default() };
    channel.basic_publish("".into(), key, options, &body, properties).await
}

/// What became of it.
pub(super) async fn published(confirm: PublisherConfirm) -> lapin::Result<Published> {
    Ok(match confirm.await? {
        Confirmation::Ack(None) | Confirmation::NotRequested => Published::Taken,
        Confirmation::Ack(Some(_)) => Published::Returned,
        Confirmation::Nack(_) => Published::Refused,
    })
}

/// A channel on which the broker confirms.
pub(super) async fn confirming(connection: &Connection) -> lapin::Result<Channel> {
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok(channel)
}
