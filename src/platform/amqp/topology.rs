//! Declares, binds and looks up exchanges and queues.

use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{FieldTable, ShortString};
use lapin::{Channel, Connection, ExchangeKind, Queue};

/// Declares a queue that outlives a restart of the broker.
pub async fn declare_queue(channel: &Channel, name: &str, arguments: FieldTable) -> lapin::Result<Queue> {
    let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(name.into(), options, arguments).await
}

/// Declares a queue that only this connection may use, and that goes with it. The broker chooses a name if there is none.
pub async fn declare_own_queue(channel: &Channel, name: &str) -> lapin::Result<Queue> {
    let options = QueueDeclareOptions { exclusive: true, auto_delete: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(name.into(), options, FieldTable::default()).await
}

/// Declares an exchange that outlives a restart of the broker.
pub async fn declare_exchange(
    channel: &Channel,
    name: &str,
    kind: ExchangeKind,
    arguments: FieldTable,
) -> lapin::Result<()> {
    let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    channel.exchange_declare(name.into(), kind, options, arguments).await
}

pub async fn bind_queue(channel: &Channel, queue: &str, exchange: &str, key: &str) -> lapin::Result<()> {
    let (options, none) = (QueueBindOptions::default(), FieldTable::default());
    channel.queue_bind(queue.into(), exchange.into(), key.into(), options, none).await
}

/// Looks a queue up, on a channel of its own: the broker closes it with [`NOT_FOUND`](super::NOT_FOUND) where there is no such queue.
pub async fn find_queue(connection: &Connection, name: ShortString) -> lapin::Result<Queue> {
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    connection.create_channel().await?.queue_declare(name, options, FieldTable::default()).await
}

/// Looks an exchange up, as [`find_queue`].
pub async fn find_exchange(connection: &Connection, name: ShortString) -> lapin::Result<()> {
    let options = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
    let channel = connection.create_channel().await?;
    channel.exchange_declare(name, ExchangeKind::Direct, options, FieldTable::default()).await
}
