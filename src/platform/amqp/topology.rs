//! Declares, binds and looks up exchanges and queues.

use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{FieldTable, ShortString};
use lapin::{Channel, Connection, ExchangeKind, Queue};

use super::text_value;

/// Declares a queue that outlives a restart of the broker, a classic one unless the arguments name another type.
pub async fn declare_queue(channel: &Channel, name: &str, arguments: FieldTable) -> lapin::Result<Queue> {
    let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    declare_typed(channel, name, options, arguments).await
}

/// Declares a queue that only this connection may use, and that goes with it. The broker chooses a name if there is none.
pub async fn declare_own_queue(channel: &Channel, name: &str) -> lapin::Result<Queue> {
    let options = QueueDeclareOptions { exclusive: true, auto_delete: true, ..QueueDeclareOptions::default() };
    declare_typed(channel, name, options, FieldTable::default()).await
}

/// Every queue names its type: a vhost may have another default, and a quorum queue accepts two exclusive consumers.
async fn declare_typed(
    channel: &Channel,
    name: &str,
    options: QueueDeclareOptions,
    mut arguments: FieldTable,
) -> lapin::Result<Queue> {
    const TYPE: &str = "x-queue-type";
    if !arguments.contains_key(TYPE) {
        arguments.insert(TYPE.into(), text_value("classic"));
    }
    channel.queue_declare(name.into(), options, arguments).await
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
    find_queue_on(&connection.create_channel().await?, name).await
}

/// Looks a queue up on a channel that the broker may close.
pub async fn find_queue_on(channel: &Channel, name: ShortString) -> lapin::Result<Queue> {
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(name, options, FieldTable::default()).await
}

/// Looks an exchange up, as [`find_queue`].
pub async fn find_exchange(connection: &Connection, name: ShortString) -> lapin::Result<()> {
    let options = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
    let channel = connection.create_channel().await?;
    channel.exchange_declare(name, ExchangeKind::Direct, options, FieldTable::default()).await
}
