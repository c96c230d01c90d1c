//! Requests of a real RabbitMQ. A broker keeps no history of runs, so that what needs one is shown in `tests/amqp`.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::conformance::bench::{Adapter, Bench, Fut, Need, Rig, Spec};
use futures_core::Stream as _;
use journeyman::source::amqp::{AmqpSource, AmqpSourceConfig, PayloadForm};
use journeyman::source::{Artifact, Capabilities, Claim, Grant, OpenResult, PollBatch, Source, SourceFuture};
use journeyman_domain::id::{PriorityQueue, Run, TaskId};
use journeyman_domain::lease::Granted;
use journeyman_domain::outcome::Outcome;
use journeyman_platform::amqp::lapin::options::{BasicConsumeOptions, BasicPublishOptions, QueueDeclareOptions};
use journeyman_platform::amqp::lapin::types::FieldTable;
use journeyman_platform::amqp::lapin::{BasicProperties, Channel, Connection, Consumer};
use journeyman_platform::amqp::{Broker, BrokerConfig, headers, lapin};

pub(crate) fn adapter() -> Adapter {
    match std::env::var("JOURNEYMAN_TEST_AMQP").ok().filter(|uri| !uri.is_empty()) {
        Some(uri) => Adapter::Present { rigs: vec![Box::new(Requests { uri })] },
        None => Adapter::Absent {
            name: "amqp",
            why: "JOURNEYMAN_TEST_AMQP names no broker; tests/run starts one".into(),
            needed: true,
        },
    }
}

/// How late an answer may come.
const ANSWER_LATE: Duration = Duration::from_secs(5);

struct Requests {
    uri: String,
}

impl Rig for Requests {
    fn name(&self) -> String {
        "amqp".into()
    }

    fn can(&self, need: Need) -> bool {
        matches!(need, Need::Claims | Need::Waits)
    }

    fn bench(&self) -> Fut<'static, Arc<dyn Bench>> {
        let at = BrokerConfig::new(self.uri.as_str());
        Box::pin(async move {
            let broker = Broker::new(&at).expect("the address is good");
            let queue = format!("jm-test-{}", uuid::Uuid::new_v4().simple());
            let connection = broker.connect("conformance").await.expect("the broker lets us in");
            let channel = connection.create_channel().await.expect("a channel");
            let options = QueueDeclareOptions { durable: true, auto_delete: true, ..QueueDeclareOptions::default() };
            let none = FieldTable::default;
            channel.queue_declare(queue.as_str().into(), options, none()).await.expect("a queue");
            let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
            let direct = "amq.rabbitmq.reply-to";
            let answers = channel.basic_consume(direct.into(), "".into(), options, none()).await.expect("answers");
            let bench = RequestsBench {
                broker,
                queue,
                _connection: connection,
                channel,
                answers: tokio::sync::Mutex::new(answers),
                heard: Mutex::default(),
                created: AtomicUsize::new(0),
            };
            Arc::new(bench) as Arc<dyn Bench>
        })
    }
}

struct RequestsBench {
    broker: Broker,
    queue: String,
    _connection: Connection,
    channel: Channel,
    answers: tokio::sync::Mutex<Consumer>,
    heard: Mutex<BTreeMap<String, String>>,
    created: AtomicUsize,
}

impl Bench for RequestsBench {
    fn source(&self, worker: &str) -> Arc<dyn Source> {
        let settings = AmqpSourceConfig {
            payload_form: PayloadForm::Body,
            ..AmqpSourceConfig::new(self.broker.clone(), self.queue.as_str().into(), worker)
        };
        let source = AmqpSource::new(settings);
        // No case has more in hand at once.
        source.set_capacity(4);
        Arc::new(Named(source))
    }

    fn create(&self, spec: Spec) -> Fut<'_, TaskId> {
        Box::pin(async move {
            let task = format!("task-{}", self.created.fetch_add(1, Ordering::Relaxed));
            let properties = BasicProperties::default()
                .with_reply_to("amq.rabbitmq.reply-to".into())
                .with_correlation_id(task.as_str().into());
            let body = spec.payload.to_string();
            let options = BasicPublishOptions::default();
            let publish =
                self.channel.basic_publish("".into(), self.queue.as_str().into(), options, body.as_bytes(), properties);
            publish.await.expect("it is published").await.expect("no confirmation was asked for");
            TaskId::parse(&task).expect("a good id")
        })
    }

    /// What its author has been told, or else that it runs. Only asked of what was claimed, and settled if ever.
    fn states<'a>(&'a self, task: &'a TaskId) -> Fut<'a, Vec<String>> {
        Box::pin(async move {
            let mut answers = self.answers.lock().await;
            let told = async {
                while !self.heard.lock().expect("unpoisoned").contains_key(task.as_str()) {
                    let Some(Ok(answer)) = next_of(&mut answers).await else { return };
                    let id = answer.properties.correlation_id().as_ref().expect("an id").to_string();
                    let table = answer.properties.headers().clone().expect("headers");
                    let state = if headers::text(&table, "x-status") == Some("ok") { "completed" } else { "failed" };
                    self.heard.lock().expect("unpoisoned").insert(id, state.to_owned());
                }
            };
            tokio::time::timeout(ANSWER_LATE, told).await.ok();
            let heard = self.heard.lock().expect("unpoisoned");
            vec![heard.get(task.as_str()).cloned().unwrap_or_else(|| "running".to_owned())]
        })
    }
}

async fn next_of(answers: &mut Consumer) -> Option<lapin::Result<lapin::message::Delivery>> {
    std::future::poll_fn(|context| Pin::new(&mut *answers).poll_next(context)).await
}

/// The source with the names that its authors gave: without the number that tells deliveries apart.
struct Named(AmqpSource);

struct NamedClaim {
    run: Run,
    inner: Arc<dyn Claim>,
}

fn renamed(run: &Run) -> Run {
    let name = run.task.as_str().rsplit_once('.').expect("a number is part of it").0;
    Run { task: TaskId::parse(name).expect("a good id"), run: run.run }
}

impl Source for Named {
    fn describe(&self) -> String {
        self.0.describe()
    }

    fn service_id(&self) -> String {
        self.0.service_id()
    }

    fn claimant(&self) -> String {
        self.0.claimant()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn open(&self) -> SourceFuture<'_, OpenResult> {
        self.0.open()
    }

    fn poll(&self, lane: PriorityQueue, max: u8) -> SourceFuture<'_, PollBatch> {
        Box::pin(async move {
            // As the worker does after the first refusal, which says that nothing is consumed from yet.
            self.0.open().await?;
            let batch = self.0.poll(lane, max).await?;
            let name = |grant: Grant| {
                let run = renamed(&grant.run);
                let claim = NamedClaim { run: run.clone(), inner: grant.claim };
                Grant { claim: Arc::new(claim), run, ..grant }
            };
            Ok(PollBatch { grants: batch.grants.into_iter().map(name).collect(), ..PollBatch::default() })
        })
    }
}

impl Claim for NamedClaim {
    fn run(&self) -> &Run {
        &self.run
    }

    fn renew(&self) -> SourceFuture<'_, Granted> {
        self.inner.renew()
    }

    fn report(&self, outcome: Outcome) -> SourceFuture<'_, ()> {
        self.inner.report(outcome)
    }

    fn upload<'a>(&'a self, artifact: &'a Artifact) -> SourceFuture<'a, ()> {
        self.inner.upload(artifact)
    }
}
