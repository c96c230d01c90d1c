//! A client like the recorded one, and a worker with a handler of the test's.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use futures_core::Stream as _;
use journeyman::handler::{Context, ExecuteError, ExecuteFailure, PrepareError, Request, erase};
use journeyman::source::amqp::{AmqpSource, AmqpSourceConfig as Queue};
use journeyman::source::{Grant, Source};
use journeyman::task::Reply;
use journeyman::worker::WorkerConfig;
use journeyman_domain::id::PriorityQueue;
use journeyman_platform::amqp::lapin::message::Delivery;
use journeyman_platform::amqp::lapin::options::{
    BasicConsumeOptions, BasicGetOptions, BasicPublishOptions, ExchangeDeleteOptions, QueueDeclareOptions,
    QueueDeleteOptions,
};
use journeyman_platform::amqp::lapin::types::{AMQPValue, FieldTable};
use journeyman_platform::amqp::lapin::{BasicProperties, Channel, Confirmation, Connection, Consumer};
use journeyman_platform::amqp::{self, headers};
use tokio::sync::mpsc;

use crate::support::broker::is_newer;
use crate::support::scripted::{self, Scripted};
use crate::support::wire::Wire;

pub(crate) use crate::support::scripted::Running;
pub(crate) use crate::support::{TEST_TIMEOUT, until, within};

/// The broker that all tests share.
pub(crate) fn shared() -> Option<amqp::Broker> {
    crate::support::broker::shared().map(|uri| broker(&uri))
}

pub(crate) fn shared_uri() -> Option<String> {
    crate::support::broker::shared()
}

/// A Python with the client library pika.
pub(crate) fn pika_python() -> Option<String> {
    crate::support::needs("JOURNEYMAN_TEST_PIKA_PYTHON")
}

pub(crate) fn broker(uri: &str) -> amqp::Broker {
    amqp::Broker::new(&amqp::BrokerConfig::new(uri)).expect("the address is good")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// osrdyne declares it so: classic, and not durable where the broker permits it.
    Transient,
    Durable,
    Quorum,
}

/// A client with its own queue.
pub(crate) struct Client {
    pub(crate) queue: String,
    pub(crate) broker: amqp::Broker,
    connection: Connection,
    pub(crate) channel: Channel,
    answers: Mutex<Option<Consumer>>,
    /// Replies that arrived while others were awaited, by correlation id.
    unclaimed: Mutex<HashMap<String, Vec<Answered>>>,
}

/// A reply, or a returned request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Answered {
    pub(crate) status: Option<AMQPValue>,
    pub(crate) partial: bool,
    pub(crate) correlation_id: Option<String>,
    pub(crate) body: Vec<u8>,
}

impl Answered {
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).expect("the answer is JSON")
    }

    /// The status, which is a byte array.
    pub(crate) fn status(&self) -> &str {
        match &self.status {
            Some(AMQPValue::ByteArray(bytes)) => std::str::from_utf8(bytes.as_slice()).expect("text"),
            other => panic!("the status is a byte array, not {other:?}"),
        }
    }
}

pub(crate) async fn consume(channel: &Channel, queue: &str) -> Consumer {
    let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
    channel.basic_consume(queue.into(), "".into(), options, FieldTable::default()).await.expect("a consumer")
}

pub(crate) async fn next(consumer: &mut Consumer) -> Option<Delivery> {
    let item = std::future::poll_fn(|context| Pin::new(&mut *consumer).poll_next(context)).await;
    item.map(|delivery| delivery.expect("a delivery"))
}

impl Client {
    pub(crate) async fn new(broker: &amqp::Broker, kind: Kind) -> Self {
        let queue = format!("jm-test-{}", uuid::Uuid::new_v4().simple());
        Self::on(broker, kind, &queue).await
    }

    /// On the broker that all tests share, where there is one.
    pub(crate) async fn shared(kind: Kind) -> Option<Self> {
        Some(Self::new(&shared()?, kind).await)
    }

    pub(crate) async fn on(broker: &amqp::Broker, kind: Kind, queue: &str) -> Self {
        let client = Self::without_queue(broker, queue).await;
        client.declare(kind, queue).await;
        client
    }

    pub(crate) async fn without_queue(broker: &amqp::Broker, queue: &str) -> Self {
        let (connection, channel) = crate::support::broker::connect(broker).await;
        let answers = consume(&channel, "amq.rabbitmq.reply-to").await;
        let (broker, answers) = (broker.clone(), Mutex::new(Some(answers)));
        Self { queue: queue.to_owned(), broker, connection, channel, answers, unclaimed: Mutex::default() }
    }

    /// Closes the connection, and waits for the broker.
    pub(crate) async fn close(self) {
        let closing = self.connection.close(lapin::protocol::constants::REPLY_SUCCESS, "OK".into());
        within("the connection is closed", closing).await.expect("it is closed in order");
    }

    pub(crate) async fn declare(&self, kind: Kind, queue: &str) {
        let quorum = (kind == Kind::Quorum).then(|| ("x-queue-type", AMQPValue::LongString("quorum".into())));
        self.declare_with(kind, queue, quorum).await;
    }

    pub(crate) async fn declare_with(
        &self,
        kind: Kind,
        queue: &str,
        arguments: impl IntoIterator<Item = (&'static str, AMQPValue)>,
    ) {
        let durable = kind != Kind::Transient || is_newer();
        let options = QueueDeclareOptions { durable, ..QueueDeclareOptions::default() };
        let declaring = self.channel.queue_declare(queue.into(), options, amqp::header_table(arguments));
        declaring.await.expect("the queue is declared");
    }

    /// Declares a queue that holds one message and refuses others.
    pub(crate) async fn declare_narrow(&self, queue: &str) {
        let overflow = AMQPValue::LongString("reject-publish".into());
        let arguments = [("x-max-length", AMQPValue::LongInt(1)), ("x-overflow", overflow)];
        self.declare_with(Kind::Durable, queue, arguments).await;
    }

    pub(crate) async fn delete_queue(&self) {
        let options = QueueDeleteOptions::default();
        self.channel.queue_delete(self.queue.as_str().into(), options).await.expect("the queue is deleted");
    }

    /// Deletes the queue once it is empty and has no consumer.
    pub(crate) async fn delete_empty_queue(&self) {
        self.until_depth(0, 0).await;
        self.delete_queue().await;
    }

    /// Drains the worker, and deletes the empty queue.
    pub(crate) async fn finish(&self, worker: Running) {
        worker.drained().await;
        self.delete_empty_queue().await;
    }

    /// Publishes a request for each body, which is its id too.
    pub(crate) async fn request(&self, bodies: &[&str]) {
        for body in bodies {
            assert!(self.publish(Self::properties(body, "/work"), body.as_bytes()).await);
        }
    }

    /// The properties of a request with a header that counts attempts.
    pub(crate) fn tried(id: &str, attempts: AMQPValue) -> BasicProperties {
        Self::properties(id, "/work").with_headers(amqp::header_table([("x-journeyman-attempts", attempts)]))
    }

    /// The properties of the recorded client.
    pub(crate) fn properties(id: &str, path: &str) -> BasicProperties {
        let path = AMQPValue::ByteArray(path.as_bytes().to_vec().into());
        BasicProperties::default()
            .with_reply_to("amq.rabbitmq.reply-to".into())
            .with_correlation_id(id.into())
            .with_headers(amqp::header_table([("x-rpc-path", path)]))
    }

    /// Publishes a request; returns whether the queue took it.
    pub(crate) async fn publish(&self, properties: BasicProperties, body: &[u8]) -> bool {
        self.publish_to(&self.queue, properties, body).await
    }

    /// Publishes to a queue; returns whether it took it.
    pub(crate) async fn publish_to(&self, queue: &str, properties: BasicProperties, body: &[u8]) -> bool {
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let confirm = self
            .channel
            .basic_publish("".into(), queue.into(), options, body, properties)
            .await
            .expect("it is published");
        matches!(confirm.await.expect("it is confirmed"), Confirmation::Ack(None))
    }

    /// Waits for the next reply to this request.
    pub(crate) async fn answer(&self, id: &str) -> Answered {
        within(&format!("the answer to {id}"), async {
            loop {
                if let Some(unclaimed) = self.unclaimed.lock().expect("unpoisoned").get_mut(id)
                    && !unclaimed.is_empty()
                {
                    return unclaimed.remove(0);
                }
                let mut answers = self.answers.lock().expect("unpoisoned").take().expect("one waits at a time");
                let delivery = next(&mut answers).await.expect("the channel stays");
                *self.answers.lock().expect("unpoisoned") = Some(answers);
                let answered = read(&delivery);
                let of = answered.correlation_id.clone().unwrap_or_default();
                self.unclaimed.lock().expect("unpoisoned").entry(of).or_default().push(answered);
            }
        })
        .await
    }

    /// Sends a request and waits for the reply.
    pub(crate) async fn call(&self, path: &str, body: &[u8]) -> Answered {
        let id = uuid::Uuid::new_v4().to_string();
        assert!(self.publish(Self::properties(&id, path), body).await, "there is a queue for it");
        self.answer(&id).await
    }

    /// The number of messages in the queue, and of its consumers.
    pub(crate) async fn depth(&self) -> (u32, u32) {
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let channel = self.connection.create_channel().await.expect("a channel");
        let queue = channel
            .queue_declare(self.queue.as_str().into(), options, FieldTable::default())
            .await
            .expect("the queue is there");
        (queue.message_count(), queue.consumer_count())
    }

    /// Polls until the queue has these numbers of messages and consumers.
    pub(crate) async fn until_depth(&self, ready: u32, consumers: u32) {
        let mut seen = (u32::MAX, u32::MAX);
        let wanted = async {
            while seen != (ready, consumers) {
                seen = self.depth().await;
            }
        };
        let ended = tokio::time::timeout(TEST_TIMEOUT, wanted).await;
        assert!(
            ended.is_ok(),
            "not {ready} messages ready and {consumers} consumers but {seen:?} within {TEST_TIMEOUT:?}"
        );
    }

    /// How many messages of the request queue wait in delays.
    pub(crate) async fn delayed(&self) -> u32 {
        let channel = self.connection.create_channel().await.expect("a channel");
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let mut sum = 0;
        for level in 0..17 {
            let name = format!("{}.delay.l{level}", self.queue);
            let queue = channel.queue_declare(name.into(), options, FieldTable::default()).await;
            sum += queue.expect("the delay is there").message_count();
        }
        sum
    }

    /// Deletes the request queue and its delays.
    pub(crate) async fn delete_with_delays(&self) {
        for level in 0..17 {
            let name = format!("{}.delay.l{level}", self.queue);
            let deleting = self.channel.queue_delete(name.as_str().into(), QueueDeleteOptions::default());
            deleting.await.expect("the delay is deleted");
            let deleting = self.channel.exchange_delete(name.into(), ExchangeDeleteOptions::default());
            deleting.await.expect("the exchange is deleted");
        }
        let exchange = format!("{}.delay.delivery", self.queue);
        let deleting = self.channel.exchange_delete(exchange.into(), ExchangeDeleteOptions::default());
        deleting.await.expect("the exchange is deleted");
        self.delete_queue().await;
    }

    /// Consumes from a queue.
    pub(crate) async fn consume(&self, queue: &str) -> Consumed {
        let channel = self.connection.create_channel().await.expect("a channel");
        Consumed { consumer: consume(&channel, queue).await, _channel: channel }
    }

    /// Takes one message out of a queue, if there is one.
    pub(crate) async fn get(&self, queue: &str) -> Option<Delivery> {
        let options = BasicGetOptions { no_ack: true };
        let got = self.channel.basic_get(queue.into(), options).await.expect("it can be looked into");
        got.map(|message| message.delivery)
    }
}

/// A consumer of a queue.
pub(crate) struct Consumed {
    consumer: Consumer,
    _channel: Channel,
}

impl Consumed {
    pub(crate) async fn next(&mut self) -> Delivery {
        self.next_or(|| "no reason known".to_owned()).await
    }

    /// The next message, or a panic with the reason.
    pub(crate) async fn next_or(&mut self, why: impl FnOnce() -> String) -> Delivery {
        match tokio::time::timeout(TEST_TIMEOUT, next(&mut self.consumer)).await {
            Ok(message) => message.expect("the channel stays"),
            Err(_) => panic!("no message within {TEST_TIMEOUT:?}: {}", why()),
        }
    }
}

fn read(delivery: &Delivery) -> Answered {
    let empty = FieldTable::default();
    let table = delivery.properties.headers().as_ref().unwrap_or(&empty);
    Answered {
        status: table.inner().get("x-status").cloned(),
        partial: table.inner().get("x-non-terminating-response") == Some(&AMQPValue::Boolean(true)),
        correlation_id: delivery.properties.correlation_id().as_ref().map(ToString::to_string),
        body: delivery.data.clone(),
    }
}

pub(crate) type Act = scripted::Act<Request>;

impl Running {
    pub(crate) fn start(queue: Queue, capacity: u32, act: Act) -> Self {
        Self::with(queue, |settings| WorkerConfig { capacity, ..settings }, act)
    }

    pub(crate) fn with(queue: Queue, change: impl FnOnce(WorkerConfig) -> WorkerConfig, act: Act) -> Self {
        let source = AmqpSource::new(queue);
        assert!(source.capabilities().long_poll);
        Self::of(Arc::new(source), change, act)
    }

    /// The worker has a source of the test's.
    pub(crate) fn of(source: Arc<dyn Source>, change: impl FnOnce(WorkerConfig) -> WorkerConfig, act: Act) -> Self {
        let prepare = |request: Request| match request.path.as_deref() {
            Some("/malformed") => Err(PrepareError::malformed(vec!["body: it is not what it should be".to_owned()])),
            _ => Ok(request),
        };
        Self::serving(source, change, erase(Scripted { prepare, act }))
    }
}

/// A queue of the shared broker, with default settings.
pub(crate) fn queue(client: &Client) -> Queue {
    Queue::new(client.broker.clone(), client.queue.as_str().into(), "test worker")
}

/// The host and port of a broker.
pub(crate) fn target(uri: &str) -> String {
    let rest = uri.split_once('@').expect("an address with a user").1;
    rest.split_once('/').expect("an address with a path").0.to_owned()
}

/// A client of the shared broker, and the settings of a source that reaches its queue over a wire.
pub(crate) async fn wired(kind: Kind) -> Option<(Client, Wire, Queue)> {
    let (client, uri) = (Client::shared(kind).await?, shared_uri()?);
    let wire = Wire::to(&target(&uri)).await;
    let mut settings = queue(&client);
    settings.broker = broker(&wire.uri(&uri));
    Some((client, wire, settings))
}

/// A handler that reports what it gets, and continues on permission.
pub(crate) struct Gate {
    pub(crate) entered: mpsc::Receiver<String>,
    pub(crate) go: Arc<tokio::sync::Semaphore>,
}

impl Gate {
    /// A handler that replies with its body on permission, and can be canceled.
    pub(crate) fn handler() -> (Self, Act) {
        Self::before(returns_body())
    }

    /// A handler that continues with `act` on permission, and can be canceled.
    pub(crate) fn before(act: Act) -> (Self, Act) {
        let (sender, entered) = mpsc::channel(1024);
        let go = Arc::new(tokio::sync::Semaphore::new(0));
        let gate = Arc::clone(&go);
        let gated = handler(move |request, context| {
            let (sender, gate, act) = (sender.clone(), Arc::clone(&gate), Arc::clone(&act));
            async move {
                sender.send(request.text().unwrap_or_default().to_owned()).await.expect("the test listens");
                tokio::select! {
                    permit = gate.acquire() => permit.expect("the gate stays").forget(),
                    _ = context.canceled() => return Err(ExecuteError::failed("canceled".to_owned())),
                }
                act(request, context).await
            }
        });
        (Self { entered, go }, gated)
    }

    pub(crate) async fn enters(&mut self) -> String {
        within("a request reaches its handler", self.entered.recv()).await.expect("the worker lives")
    }
}

pub(crate) fn handler<F>(run: impl Fn(Request, Context) -> F + Send + Sync + 'static) -> Act
where
    F: Future<Output = Result<(), ExecuteError>> + Send + 'static,
{
    scripted::handler(run)
}

pub(crate) fn replies(body: impl Fn(&Request, &Context) -> Vec<u8> + Send + Sync + 'static) -> Act {
    scripted::replies(body)
}

/// A handler that fails this often before it replies with the number of the attempt, and the number of its runs.
pub(crate) fn failing(times: u32, failure: ExecuteFailure, message: &'static str) -> (Act, Arc<AtomicU32>) {
    let runs = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&runs);
    let act = handler(move |_, context| {
        let fails = counter.fetch_add(1, Ordering::Relaxed) < times;
        async move {
            if fails {
                return Err(ExecuteError::new(failure, message.to_owned()));
            }
            let attempt = context.task().run.run.to_string();
            context.set_reply(Reply::ok(attempt.into_bytes())).expect("the worker accepts it");
            Ok(())
        }
    });
    (act, runs)
}

/// A handler that replies with the body of its request.
pub(crate) fn returns_body() -> Act {
    replies(|request, _| request.body.to_vec())
}

pub(crate) fn echo() -> Act {
    replies(|request, _| match request.json::<serde_json::Value>() {
        Ok(json) => serde_json::json!({ "echo": json }).to_string().into_bytes(),
        Err(_) => request.body.to_vec(),
    })
}

/// A header of a message as text.
pub(crate) fn header(delivery: &Delivery, name: &str) -> Option<String> {
    headers::text(delivery.properties.headers().as_ref()?, name).map(str::to_owned)
}

/// The request of one poll.
pub(crate) async fn next_grant(source: &AmqpSource) -> Grant {
    let polling = async {
        loop {
            match source.poll(PriorityQueue(0), 1).await {
                Ok(mut batch) if !batch.grants.is_empty() => return batch.grants.remove(0),
                Ok(_) => {}
                // On a slow machine it was requeued meanwhile.
                Err(_) => drop(source.open().await.expect("there is a queue")),
            }
        }
    };
    within("a request", polling).await
}
