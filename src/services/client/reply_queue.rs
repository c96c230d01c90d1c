//! A call with a durable reply queue of its own, so that a caller that is restarted does not send the request again.
//!
//! The queue also holds a note that the request was sent. Nothing in it is acknowledged: a caller that dies leaves note and reply
//! to the next one, and a call that ends deletes the queue. Notes are transient, as requests are: a restart of the broker drops both.

use futures_util::StreamExt as _;
use lapin::options::{BasicConsumeOptions, BasicPublishOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, ShortString};
use lapin::{BasicProperties, Channel, Connection, Consumer};
use tokio::time::{Instant, timeout_at};

use super::session::{Session, parse_reply, publish_confirmed, request_properties};
use super::{ReplyPosition, RpcError, RpcReply, RpcRequest};
use journeyman_domain::limits::{REPLY_QUEUE_RETENTION, RPC_EXPIRED_REPLY_WAIT};
use journeyman_platform::amqp::{self, Broker};

/// The `type` of a note.
const NOTE: &str = "journeyman-sent";
/// The `type` of what a caller publishes first: what it receives before is of earlier callers.
const PROBE: &str = "journeyman-probe";

pub(super) async fn call(
    session: &Session,
    queue: &ShortString,
    call: &RpcRequest,
    deadline: Instant,
    broker: &Broker,
) -> Result<RpcReply, RpcError> {
    let opening = open(&session.connection, queue.clone());
    let (channel, replies) = broker.bounded(&format!("consume from {queue}"), opening).await?;
    let receiving = send_and_receive(session, &channel, replies, queue, call, broker);
    let receiving = timeout_at(deadline + RPC_EXPIRED_REPLY_WAIT, receiving).await;
    let result = receiving.unwrap_or(Err(RpcError::TimedOut(call.timeout)));
    if matches!(result, Ok(_) | Err(RpcError::TimedOut(_))) {
        let deleting = channel.queue_delete(queue.clone(), QueueDeleteOptions::default());
        if let Err(error) = broker.bounded("delete a reply queue", deleting).await {
            tracing::debug!("{}; it is deleted when it has been unused for a day", error.message);
        }
    }
    result
}

async fn open(connection: &Connection, queue: ShortString) -> lapin::Result<(Channel, Consumer)> {
    let channel = amqp::confirm_channel(connection).await?;
    let retention = AMQPValue::LongLongInt(REPLY_QUEUE_RETENTION.as_millis().try_into().unwrap_or(i64::MAX));
    amqp::declare_queue(&channel, queue.as_str(), amqp::header_table([("x-expires", retention)])).await?;
    // Refused until the broker has noticed that an earlier caller is gone, which holds what is in the queue.
    let options = BasicConsumeOptions { exclusive: true, ..BasicConsumeOptions::default() };
    let replies = amqp::consume(&channel, queue, "".into(), options).await?;
    Ok((channel, replies))
}

async fn send_and_receive(
    session: &Session,
    channel: &Channel,
    mut replies: Consumer,
    queue: &ShortString,
    call: &RpcRequest,
    broker: &Broker,
) -> Result<RpcReply, RpcError> {
    let probe = uuid::Uuid::new_v4().to_string();
    publish_mark(channel, queue, PROBE, &probe).await?;
    let mut is_sent = false;
    while let Some(Ok(delivery)) = replies.next().await {
        let text = |property: &Option<ShortString>| property.as_ref().map(ToString::to_string).unwrap_or_default();
        match text(delivery.properties.kind()).as_str() {
            NOTE => is_sent = true,
            PROBE if is_sent || text(delivery.properties.correlation_id()) != probe => {}
            PROBE => {
                session.check_exchange(&call.exchange, broker).await?;
                let properties = request_properties(call, call.message_ttl.or(Some(call.timeout)))?;
                let properties = properties.with_correlation_id(queue.clone()).with_reply_to(queue.clone());
                publish_confirmed(channel, call, properties).await?;
                publish_mark(channel, queue, NOTE, "").await?;
                tracing::debug!(reply_queue = %queue, "request sent");
                is_sent = true;
            }
            _ => {
                let reply = parse_reply(delivery);
                if reply.position == ReplyPosition::Last {
                    return Ok(reply);
                }
                is_sent = true;
            }
        }
    }
    Err(RpcError::ConnectionLost)
}

async fn publish_mark(channel: &Channel, queue: &ShortString, kind: &str, id: &str) -> Result<(), RpcError> {
    let properties = BasicProperties::default().with_type(kind.into()).with_correlation_id(id.into());
    let options = BasicPublishOptions::default();
    let publishing = async { channel.basic_publish("".into(), queue.clone(), options, &[], properties).await?.await };
    publishing.await.map(drop).map_err(|_| RpcError::ConnectionLost)
}
