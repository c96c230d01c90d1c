//! What lapin itself does with the same requests, without a worker around it: the limit that a worker is held against. A
//! loop that answers, and a caller that asks. Each runs in a process of its own, as the worker does.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_core::Stream as _;
use journeyman::amqp::lapin::message::Delivery;
use journeyman::amqp::lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions,
    ConfirmSelectOptions,
};
use journeyman::amqp::lapin::protocol::constants::REPLY_SUCCESS;
use journeyman::amqp::lapin::types::{AMQPValue, FieldTable, ShortString};
use journeyman::amqp::lapin::{
    BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, Consumer, PublisherConfirm,
};
use journeyman::amqp::{Broker, BrokerConfig, TlsFiles, header_table};
use journeyman::client::{RpcClient, RpcRequest};
use secrecy::SecretString;
use serde::{Deserialize, Serialize};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::Done;
use crate::roles::{cpu, now, say};

/// What a no-op answers.
const NOTHING: &[u8] = b"null";
/// No call takes longer.
const PATIENCE: Duration = Duration::from_secs(60);

/// A loop that consumes, publishes an answer, waits for the confirmation, and acknowledges.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Loop {
    pub(crate) uri: String,
    pub(crate) queue: String,
    pub(crate) prefetch: u16,
    /// After how many it says `paced`; 0 is never.
    pub(crate) expected: u64,
}

/// Somebody who asks, so many at once.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Caller {
    pub(crate) uri: String,
    pub(crate) queue: String,
    pub(crate) count: usize,
    pub(crate) parallel: usize,
    pub(crate) by: By,
}

/// What a caller calls by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum By {
    /// lapin alone.
    Lapin,
    /// The client library.
    Library,
}

/// From a tenth of the work on, so that no start is counted.
pub(crate) const fn warm(expected: u64) -> u64 {
    expected / 10
}

/// Says how long the rest took, how much CPU time, and how many they were.
#[derive(Debug)]
pub(crate) struct Pace {
    began: Duration,
    cpu: Duration,
    from: u64,
}

impl Pace {
    pub(crate) fn begin(from: u64) -> Self {
        Self { began: now(), cpu: cpu(), from }
    }

    pub(crate) fn say(&self, count: u64) {
        let (elapsed, used) = ((now() - self.began).as_nanos(), (cpu() - self.cpu).as_nanos());
        say(&format!("paced {elapsed} {used} {}", count - self.from));
    }
}

pub(crate) fn broker(uri: &str) -> Done<Broker> {
    Ok(Broker::new(&BrokerConfig { uri: SecretString::from(uri), tls: TlsFiles::default() })?)
}

pub(crate) async fn next(consumer: &mut Consumer) -> Done<Delivery> {
    let item = std::future::poll_fn(|context| Pin::new(&mut *consumer).poll_next(context)).await;
    Ok(item.ok_or("a consumer ended")??)
}

/// Whether it goes to a client's channel: RabbitMQ returns each of those that is mandatory, delivered or not.
fn is_direct(key: &ShortString) -> bool {
    key.as_str().starts_with("amq.rabbitmq.reply-to.")
}

async fn answer(channel: &Channel, request: &Delivery) -> Done<PublisherConfirm> {
    let key = request.properties.reply_to().clone().ok_or("a request says where its answer goes")?;
    let id = request.properties.correlation_id().clone().ok_or("a request has an id")?;
    let status = AMQPValue::ByteArray(b"ok".to_vec().into());
    let properties =
        BasicProperties::default().with_headers(header_table([("x-status", status)])).with_correlation_id(id);
    let options = BasicPublishOptions { mandatory: !is_direct(&key), ..BasicPublishOptions::default() };
    Ok(channel.basic_publish("".into(), key, options, NOTHING, properties).await?)
}

async fn serve(channel: Channel, request: Delivery) -> Done<()> {
    let confirmed = answer(&channel, &request).await?.await?;
    if confirmed != Confirmation::Ack(None) {
        return Err(format!("an answer was not taken: {confirmed:?}").into());
    }
    if request.acker.ack(BasicAckOptions::default()).await? { Ok(()) } else { Err("a channel is closed".into()) }
}

impl Loop {
    /// Until it is over. Then it takes leave as the worker does, step by step: what was acknowledged last would come back.
    pub(crate) async fn run(&self, over: &CancellationToken) -> Done<()> {
        let connection = Connection::connect(&self.uri, ConnectionProperties::default()).await?;
        let intake = connection.create_channel().await?;
        intake.basic_qos(self.prefetch, BasicQosOptions::default()).await?;
        let answers = connection.create_channel().await?;
        answers.confirm_select(ConfirmSelectOptions::default()).await?;
        let options = BasicConsumeOptions::default();
        let mut requests =
            intake.basic_consume(self.queue.as_str().into(), "raw".into(), options, FieldTable::default()).await?;
        say("working");
        let (mut served, mut pace, mut under_way) = (0, Pace::begin(0), JoinSet::new());
        loop {
            if self.prefetch == 1 {
                let request = tokio::select! {
                    biased;
                    request = next(&mut requests) => request?,
                    () = over.cancelled() => break,
                };
                serve(answers.clone(), request).await?;
            } else {
                tokio::select! {
                    biased;
                    Some(ended) = under_way.join_next() => ended??,
                    request = next(&mut requests) => {
                        under_way.spawn(serve(answers.clone(), request?));
                        continue;
                    }
                    () = over.cancelled() => break,
                }
            }
            served += 1;
            if self.expected > 0 && served == warm(self.expected) {
                pace = Pace::begin(served);
            } else if served == self.expected {
                pace.say(served);
            }
        }
        // Whoever says that it is over has every answer: what follows an answer may be on its way still.
        while let Some(ended) = under_way.join_next().await {
            ended??;
        }
        intake.basic_cancel(requests.tag(), BasicCancelOptions::default()).await?;
        intake.close(REPLY_SUCCESS, "OK".into()).await?;
        Ok(connection.close(REPLY_SUCCESS, "OK".into()).await?)
    }
}

impl Caller {
    pub(crate) async fn run(&self) -> Done<()> {
        let asking: Arc<dyn Ask> = match self.by {
            By::Lapin => Raw::open(&self.uri, &self.queue).await?,
            By::Library => {
                Arc::new(Library { client: RpcClient::new(broker(&self.uri)?, "bench"), queue: self.queue.clone() })
            }
        };
        // Connected, and warm.
        asking.ask().await?;
        let (room, mut calls) = (Arc::new(Semaphore::new(self.parallel)), JoinSet::new());
        let pace = Pace::begin(1);
        for _ in 0..self.count {
            let permit = Arc::clone(&room).acquire_owned().await?;
            let asking = Arc::clone(&asking);
            calls.spawn(async move {
                let answer = asking.ask().await;
                drop(permit);
                answer
            });
            while let Some(ended) = calls.try_join_next() {
                ended??;
            }
        }
        while let Some(ended) = calls.join_next().await {
            ended??;
        }
        pace.say(self.count as u64 + 1);
        // Whatever came before this one's answer was taken in.
        asking.ask().await?;
        say(&format!("twice {}", asking.twice()));
        Ok(())
    }
}

type Answered<'a> = Pin<Box<dyn Future<Output = Done<()>> + Send + 'a>>;

/// One request and its answer.
trait Ask: Send + Sync {
    fn ask(&self) -> Answered<'_>;

    /// How many answers came for which nobody waited any more.
    fn twice(&self) -> u64;
}

struct Library {
    client: RpcClient,
    queue: String,
}

impl Ask for Library {
    fn ask(&self) -> Answered<'_> {
        Box::pin(async {
            let call = RpcRequest {
                routing_key: self.queue.clone(),
                path: Some("/nothing".to_owned()),
                body: body(),
                timeout: PATIENCE,
                ..RpcRequest::default()
            };
            let answer = self.client.call(&call).await?;
            if answer.is_ok() && answer.body == NOTHING { Ok(()) } else { Err(format!("{answer:?}").into()) }
        })
    }

    fn twice(&self) -> u64 {
        self.client.late_replies()
    }
}

type Waiting = Mutex<HashMap<String, oneshot::Sender<Vec<u8>>>>;

struct Raw {
    channel: Channel,
    queue: String,
    waiting: Arc<Waiting>,
    twice: Arc<AtomicU64>,
    _connection: Connection,
    _reader: JoinSet<()>,
}

impl Raw {
    async fn open(uri: &str, queue: &str) -> Done<Arc<Self>> {
        let connection = Connection::connect(uri, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
        let mut answers = channel.basic_consume(REPLY_TO.into(), "".into(), options, FieldTable::default()).await?;
        let (waiting, mut reader) = (Arc::<Waiting>::default(), JoinSet::new());
        let (asked, strays) = (Arc::clone(&waiting), Arc::<AtomicU64>::default());
        let twice = Arc::clone(&strays);
        reader.spawn(async move {
            while let Ok(answer) = next(&mut answers).await {
                let id = answer.properties.correlation_id().as_ref().map(ToString::to_string).unwrap_or_default();
                let waiting = asked.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
                // Who asked has gone where nobody takes it.
                match waiting {
                    Some(waiting) => drop(waiting.send(answer.data)),
                    None => drop(strays.fetch_add(1, Ordering::Relaxed)),
                }
            }
        });
        Ok(Arc::new(Self {
            channel,
            queue: queue.to_owned(),
            waiting,
            twice,
            _connection: connection,
            _reader: reader,
        }))
    }
}

impl Ask for Raw {
    fn ask(&self) -> Answered<'_> {
        Box::pin(async {
            let id = uuid::Uuid::new_v4().to_string();
            let (sender, answer) = oneshot::channel();
            self.waiting.lock().unwrap_or_else(PoisonError::into_inner).insert(id.clone(), sender);
            let properties = request(&id, REPLY_TO);
            let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
            let key = self.queue.as_str().into();
            let confirm = self.channel.basic_publish("".into(), key, options, &body(), properties).await?;
            let (confirmed, answer) = tokio::join!(confirm, answer);
            match (confirmed?, answer?) {
                (Confirmation::Ack(None), answer) if answer == NOTHING => Ok(()),
                (confirmed, _) => Err(format!("a call went wrong: {confirmed:?}").into()),
            }
        })
    }

    fn twice(&self) -> u64 {
        self.twice.load(Ordering::Relaxed)
    }
}

/// Where answers come straight to a channel.
pub(crate) const REPLY_TO: &str = "amq.rabbitmq.reply-to";

/// A request of 512 bytes.
pub(crate) fn body() -> Vec<u8> {
    let mut body = vec![b'x'; 512];
    body[..7].copy_from_slice(b"{\"of\":\"");
    body[510..].copy_from_slice(b"\"}");
    body
}

/// Its properties, as known clients have them.
pub(crate) fn request(id: &str, reply_to: &str) -> BasicProperties {
    let path = AMQPValue::ByteArray(b"/nothing".to_vec().into());
    BasicProperties::default()
        .with_headers(header_table([("x-rpc-path", path)]))
        .with_correlation_id(id.into())
        .with_reply_to(reply_to.into())
}
