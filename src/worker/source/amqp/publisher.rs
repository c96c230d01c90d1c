//! Publishes replies or copies for a session, with confirms, on a channel apart from that of the deliveries: the broker closes a channel
//! over one faulty message, and everything in flight on it counts as refused.

use std::sync::Arc;

use lapin::options::BasicPublishOptions;
use lapin::types::ShortString;
use lapin::{BasicProperties, Channel, Confirmation, Connection, PublisherConfirm};
use tokio::sync::Mutex;

use journeyman_platform::amqp;
use journeyman_platform::host::crash_points::crash_point;

const MANDATORY: BasicPublishOptions = BasicPublishOptions { mandatory: true, immediate: false };
const NOT_MANDATORY: BasicPublishOptions = BasicPublishOptions { mandatory: false, immediate: false };

#[derive(Debug, thiserror::Error)]
pub(super) enum PublishError {
    #[error("its queue does not exist")]
    Unroutable,
    #[error("its queue is full")]
    Nacked,
    /// The broker closed the channel over the message.
    #[error("{0}")]
    Rejected(String),
    /// The message may have been published.
    #[error("{0}")]
    Failed(String),
}

impl From<lapin::Error> for PublishError {
    fn from(error: lapin::Error) -> Self {
        let text = amqp::error_text(&error);
        if error.is_amqp_soft_error() { Self::Rejected(text) } else { Self::Failed(text) }
    }
}

pub(super) struct Publisher {
    connection: Arc<Connection>,
    channel: Mutex<Arc<Channel>>,
}

impl Publisher {
    pub(super) async fn open(connection: Arc<Connection>) -> lapin::Result<Self> {
        let channel = amqp::confirm_channel(&connection).await?;
        Ok(Self { connection, channel: Mutex::new(Arc::new(channel)) })
    }

    /// Publishes a reply. lapin attaches a return to whichever confirm comes next, so of concurrent replies the number of returns is known,
    /// and not which reply was returned.
    pub(super) async fn publish_reply(
        &self,
        key: ShortString,
        properties: BasicProperties,
        body: Arc<[u8]>,
    ) -> Result<(), PublishError> {
        // RabbitMQ returns each mandatory message to a direct reply-to address, delivered or not.
        let is_direct = key.as_str().starts_with("amq.rabbitmq.reply-to.");
        let options = if is_direct { NOT_MANDATORY } else { MANDATORY };
        let confirm = self.open_channel().await?.basic_publish("".into(), key, options, &body, properties).await?;
        crash_point("request-published");
        await_confirm(confirm).await
    }

    /// Publishes a copy to the request queue.
    pub(super) async fn publish_copy(
        &self,
        queue: ShortString,
        properties: BasicProperties,
        body: &[u8],
    ) -> Result<(), PublishError> {
        let channel = self.open_channel().await?;
        await_confirm(channel.basic_publish("".into(), queue, NOT_MANDATORY, body, properties).await?).await
    }

    /// Publishes on a channel of its own, so that a return is that of this message.
    pub(super) async fn publish_alone(
        &self,
        exchange: ShortString,
        key: ShortString,
        properties: BasicProperties,
        body: &[u8],
    ) -> Result<(), PublishError> {
        let channel = amqp::confirm_channel(&self.connection).await?;
        await_confirm(channel.basic_publish(exchange, key, MANDATORY, body, properties).await?).await
    }

    async fn open_channel(&self) -> lapin::Result<Arc<Channel>> {
        let mut channel = self.channel.lock().await;
        if !channel.status().connected() {
            *channel = Arc::new(Box::pin(amqp::confirm_channel(&self.connection)).await?);
        }
        Ok(Arc::clone(&channel))
    }
}

async fn await_confirm(confirm: PublisherConfirm) -> Result<(), PublishError> {
    match confirm.await? {
        Confirmation::Ack(None) | Confirmation::NotRequested => Ok(()),
        Confirmation::Ack(Some(_)) => Err(PublishError::Unroutable),
        Confirmation::Nack(_) => Err(PublishError::Nacked),
    }
}
