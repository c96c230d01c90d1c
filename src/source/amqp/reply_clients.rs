//! Whether the client of a partial reply still exists. The broker returns no message to a direct reply-to address, so it has to be asked;
//! without that a stream would go on that no client reads (`a_stream_without_a_client_ends`).

use std::sync::Arc;

use lapin::options::QueueDeclareOptions;
use lapin::types::{FieldTable, ShortString};
use lapin::{Channel, Connection};

use crate::amqp;

use super::connection;

pub(super) struct ReplyClients {
    connection: Arc<Connection>,
    channel: tokio::sync::Mutex<Option<Channel>>,
}

impl ReplyClients {
    pub(super) fn new(connection: Arc<Connection>) -> Self {
        Self { connection, channel: tokio::sync::Mutex::default() }
    }

    /// Whether a client consumes from a direct reply-to address. The broker treats the address as a queue, and closes the channel where
    /// it does not exist.
    pub(super) async fn is_present(&self, address: &ShortString) -> lapin::Result<bool> {
        let declaring = async {
            let mut idle = self.channel.lock().await;
            let channel = match idle.take().filter(|channel| channel.status().connected()) {
                Some(channel) => channel,
                None => self.connection.create_channel().await?,
            };
            let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
            match channel.queue_declare(address.clone(), options, FieldTable::default()).await {
                Ok(_) => {
                    *idle = Some(channel);
                    Ok(true)
                }
                Err(error) if amqp::reply_code(&error) == Some(amqp::NOT_FOUND) => Ok(false),
                Err(error) => Err(error),
            }
        };
        connection::while_connected(&self.connection, declaring).await
    }
}

/// Whether replies to this address go to a client's channel, without a queue.
pub(super) fn is_direct_reply_to(address: &ShortString) -> bool {
    address.as_str().starts_with("amq.rabbitmq.reply-to.")
}
