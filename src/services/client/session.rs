//! One connection: publishes requests, and delivers each reply, return and confirm to its call.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use lapin::message::{BasicReturnMessage, Delivery};
use lapin::options::{BasicConsumeOptions, BasicPublishOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection, Consumer, PublisherConfirm};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{ReplyPosition, RpcError, RpcReply, RpcRequest};
use journeyman_domain::limits::{CALLS_MAX, EXCHANGE_CACHE_TTL, REPLIES_QUEUED_MAX};
use journeyman_domain::refusal::CallError;
use journeyman_platform::amqp::{self, Broker, headers};
use journeyman_platform::tasks::supervised;

/// The pseudo-queue of direct replies.
const DIRECT_REPLY_TO: &str = "amq.rabbitmq.reply-to";
const PERSISTENT: u8 = 2;

/// The pending calls, by correlation id.
type PendingCalls = Mutex<HashMap<String, mpsc::Sender<Result<RpcReply, RpcError>>>>;

/// Delivers a reply or an error, unless the call has ended.
fn deliver(calls: &PendingCalls, id: &str, result: Result<RpcReply, RpcError>) {
    let mut calls = calls.lock();
    if calls.get(id).is_some_and(|call| call.try_send(result).is_err()) {
        // Dropping the sender: the caller still reads what is in the channel, and then its end.
        calls.remove(id);
    }
}

/// A connection, open or lost.
pub(super) struct Session {
    pub(super) connection: Connection,
    channel: Channel,
    calls: Arc<PendingCalls>,
    confirms: mpsc::Sender<UnconfirmedRequest>,
    /// The time at which each exchange was last known to exist.
    exchanges_seen: Mutex<HashMap<String, Instant>>,
    _dispatcher: JoinSet<()>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Session({} calls)", self.calls.lock().len())
    }
}

/// The id of a request, and its confirm.
type UnconfirmedRequest = (String, PublisherConfirm);

impl Session {
    pub(super) async fn open(broker: &Broker, name: &str) -> Result<Self, CallError> {
        let connection = broker.connect(name).await?;
        let opening = async {
            let channel = amqp::confirm_channel(&connection).await?;
            let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
            let consumer = amqp::consume(&channel, DIRECT_REPLY_TO.into(), "".into(), options).await?;
            Ok((channel, consumer))
        };
        let (channel, consumer) = broker.bounded("open a channel", opening).await?;
        let calls: Arc<PendingCalls> = Arc::default();
        let (confirms, sent) = mpsc::channel(CALLS_MAX);
        let mut dispatcher = JoinSet::new();
        dispatcher.spawn(supervised("receiving replies", dispatch(consumer, sent, Arc::clone(&calls))));
        Ok(Self { connection, channel, calls, confirms, exchanges_seen: Mutex::default(), _dispatcher: dispatcher })
    }

    pub(super) fn is_open(&self) -> bool {
        self.channel.status().connected() && self.connection.status().connected()
    }

    /// Registers a call; its results arrive until [`Self::forget`].
    pub(super) fn register(&self, id: &str) -> mpsc::Receiver<Result<RpcReply, RpcError>> {
        let (sender, results) = mpsc::channel(REPLIES_QUEUED_MAX);
        self.calls.lock().insert(id.to_owned(), sender);
        results
    }

    pub(super) fn forget(&self, id: &str) {
        self.calls.lock().remove(id);
    }

    /// Publishes the request of a registered call.
    pub(super) async fn send(&self, id: &str, call: &RpcRequest, broker: &Broker) -> Result<(), RpcError> {
        self.check_exchange(&call.exchange, broker).await?;
        let properties = request_properties(call, call.message_ttl.or(Some(call.timeout)))?;
        let properties = properties.with_correlation_id(id.into()).with_reply_to(DIRECT_REPLY_TO.into());
        let confirm = publish(&self.channel, call, properties).await?;
        self.confirms.send((id.to_owned(), confirm)).await.map_err(|_| RpcError::ConnectionLost)?;
        tracing::debug!(message.id = id, "request sent");
        Ok(())
    }

    /// Publishes a request that awaits no reply, and returns once it is confirmed.
    pub(super) async fn send_detached(&self, call: &RpcRequest, broker: &Broker) -> Result<(), RpcError> {
        self.check_exchange(&call.exchange, broker).await?;
        // On a channel of its own, a return is that of this request: lapin attaches a return to whichever confirm comes next.
        let channel = amqp::confirm_channel(&self.connection).await.map_err(|_| RpcError::ConnectionLost)?;
        // It outlives its client and a restart of the broker.
        let properties = request_properties(call, call.message_ttl)?.with_delivery_mode(PERSISTENT);
        publish_confirmed(&channel, call, properties).await
    }

    /// Checks that the exchange exists, at most once in [`EXCHANGE_CACHE_TTL`], on another channel: publishing to a missing exchange closes
    /// the channel, and with it the replies of all calls.
    pub(super) async fn check_exchange(&self, exchange: &str, broker: &Broker) -> Result<(), RpcError> {
        let seen = || self.exchanges_seen.lock();
        let is_fresh = || seen().get(exchange).is_some_and(|seen| seen.elapsed() < EXCHANGE_CACHE_TTL);
        if exchange.is_empty() || is_fresh() {
            return Ok(());
        }
        let name = amqp::to_short_string("the exchange name", exchange)?;
        match amqp::find_exchange(&self.connection, name).await {
            Ok(()) => {
                seen().insert(exchange.to_owned(), Instant::now());
                Ok(())
            }
            Err(error) => Err(match amqp::reply_code(&error) {
                Some(amqp::NOT_FOUND) => RpcError::ExchangeNotFound(exchange.to_owned()),
                _ => broker.call_error("check the exchange", &error).into(),
            }),
        }
    }
}

pub(super) fn request_properties(call: &RpcRequest, expires: Option<Duration>) -> Result<BasicProperties, RpcError> {
    let mut table = FieldTable::default();
    for (name, text) in &call.headers {
        table.insert(amqp::to_short_string("the header name", name)?, AMQPValue::LongString(text.as_str().into()));
    }
    if let Some(path) = &call.path {
        table.insert(headers::PATH.into(), AMQPValue::ByteArray(path.as_bytes().to_vec().into()));
    }
    let mut properties = BasicProperties::default().with_headers(table);
    if let Some(expires) = expires {
        properties = properties.with_expiration(expires.as_millis().to_string().as_str().into());
    }
    if let Some(id) = &call.message_id {
        properties = properties.with_message_id(amqp::to_short_string("the message id", id)?);
    }
    if let Some(kind) = &call.content_type {
        properties = properties.with_content_type(amqp::to_short_string("the content type", kind)?);
    }
    if let Some(encoding) = &call.content_encoding {
        properties = properties.with_content_encoding(amqp::to_short_string("the content encoding", encoding)?);
    }
    Ok(properties)
}

async fn publish(
    channel: &Channel,
    call: &RpcRequest,
    properties: BasicProperties,
) -> Result<PublisherConfirm, RpcError> {
    let exchange = amqp::to_short_string("the exchange name", &call.exchange)?;
    let key = amqp::to_short_string("the routing key", &call.routing_key)?;
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    channel.basic_publish(exchange, key, options, &call.body, properties).await.map_err(|_| RpcError::ConnectionLost)
}

/// On a channel with no other publish of a request in flight.
pub(super) async fn publish_confirmed(
    channel: &Channel,
    call: &RpcRequest,
    properties: BasicProperties,
) -> Result<(), RpcError> {
    let confirm = publish(channel, call, properties).await?;
    match confirm.await.map_err(|_| RpcError::ConnectionLost)? {
        Confirmation::Ack(None) => Ok(()),
        Confirmation::Ack(Some(returned)) | Confirmation::Nack(Some(returned)) => Err(unroutable(&returned)),
        Confirmation::Nack(None) | Confirmation::NotRequested => Err(RpcError::Nacked),
    }
}

/// Runs until the connection is lost or the session is dropped.
async fn dispatch(mut consumer: Consumer, mut sent: mpsc::Receiver<UnconfirmedRequest>, calls: Arc<PendingCalls>) {
    let mut confirms = FuturesUnordered::new();
    loop {
        tokio::select! {
            delivery = consumer.next() => match delivery {
                Some(Ok(delivery)) => on_delivery(&calls, delivery),
                Some(Err(_)) | None => break,
            },
            Some((id, confirm)) = sent.recv() => {
                confirms.push(async move { (id, confirm.await) });
            }
            Some((id, result)) = confirms.next() => match result {
                Ok(confirmation) => on_confirmed(&calls, &id, confirmation),
                Err(_) => break,
            },
        }
    }
    calls.lock().clear();
}

fn on_delivery(calls: &PendingCalls, delivery: Delivery) {
    let Some(id) = delivery.properties.correlation_id().as_ref().map(|id| id.as_str().to_owned()) else { return };
    deliver(calls, &id, Ok(parse_reply(delivery)));
}

pub(super) fn parse_reply(delivery: Delivery) -> RpcReply {
    let none = FieldTable::default();
    let table = delivery.properties.headers().as_ref().unwrap_or(&none);
    let is_partial = table.inner().get(headers::PARTIAL) == Some(&AMQPValue::Boolean(true));
    RpcReply {
        status: headers::text(table, headers::STATUS).map(str::to_owned),
        reason: headers::text(table, "x-reason").map(str::to_owned),
        position: if is_partial { ReplyPosition::Partial } else { ReplyPosition::Last },
        body: delivery.data,
    }
}

fn on_confirmed(calls: &PendingCalls, id: &str, confirmation: Confirmation) {
    let is_refused = confirmation.is_nack();
    // The correlation id says which call a return is about: lapin may attach it to the confirm of another one.
    if let Some(returned) = confirmation.take_message()
        && let Some(id) = returned.delivery.properties.correlation_id()
    {
        deliver(calls, id.as_str(), Err(unroutable(&returned)));
    }
    if is_refused {
        deliver(calls, id, Err(RpcError::Nacked));
    }
}

fn unroutable(returned: &BasicReturnMessage) -> RpcError {
    let Delivery { exchange, routing_key, .. } = &returned.delivery;
    RpcError::Unroutable { exchange: exchange.to_string(), key: routing_key.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_type_and_encoding_become_properties() {
        let mut call = RpcRequest {
            content_type: Some("application/json".to_owned()),
            content_encoding: Some("gzip".to_owned()),
            ..RpcRequest::default()
        };
        let properties = request_properties(&call, None).unwrap();
        assert_eq!(properties.content_type().as_ref().map(|kind| kind.as_str()), Some("application/json"));
        assert_eq!(properties.content_encoding().as_ref().map(|encoding| encoding.as_str()), Some("gzip"));
        let without = request_properties(&RpcRequest::default(), None).unwrap();
        assert!(without.content_type().is_none() && without.content_encoding().is_none());
        call.content_encoding = Some("x".repeat(256));
        assert!(matches!(call.validate(), Err(RpcError::NameTooLong(_))));
    }
}
