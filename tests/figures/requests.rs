//! Requests of an AMQP queue: a worker beside a loop of lapin alone, on one broker, in turns. Every reply is collected:
//! a missing one fails the run, and the rows say how many came twice.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::{TryStreamExt as _, stream};
use journeyman::task::formats::new_task_id;
use journeyman_platform::amqp::header_table;
use journeyman_platform::amqp::lapin::options::{
    BasicConsumeOptions, BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions, QueueDeclareOptions,
    QueueDeleteOptions,
};
use journeyman_platform::amqp::lapin::types::{AMQPValue, FieldTable};
use journeyman_platform::amqp::lapin::{
    BasicProperties, Channel, Confirmation, Connection, ConnectionProperties, ExchangeKind,
};
use tokio::time::timeout;

use crate::lapin_alone::{self, LapinLoop, REPLY_TO, next};
use crate::machine::{Row, Spans, now};
use crate::no_op_worker::{From, Payload};
use crate::programs::{Broker, Role, TIMEOUT, until};
use crate::{Lab, Outcome};

/// How many messages are published without waiting for each.
pub(crate) const WINDOW: usize = 500;
/// How often worker and loop take turns.
const ROUNDS: usize = 3;

#[derive(Debug, Clone, Copy)]
enum Who {
    Lapin,
    Worker,
}

/// Requests a second and CPU time of each.
pub(crate) struct Rate {
    pub(crate) per_second: f64,
    pub(crate) cpu_us: f64,
}

impl Rate {
    async fn of(role: &mut Role) -> Outcome<Self> {
        let (elapsed, cpu, count) = role.done().await?;
        let count = count as f64;
        Ok(Self { per_second: count / elapsed.as_secs_f64(), cpu_us: cpu.as_secs_f64() * 1e6 / count })
    }

    pub(crate) fn median(rates: &[Self]) -> Self {
        let middle = |of: fn(&Self) -> f64| {
            let mut all: Vec<f64> = rates.iter().map(of).collect();
            all.sort_unstable_by(f64::total_cmp);
            all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
        };
        Self { per_second: middle(|rate| rate.per_second), cpu_us: middle(|rate| rate.cpu_us) }
    }
}

impl Lab {
    pub(crate) async fn requests(&self) -> Outcome<Vec<Row>> {
        let Some(broker) = Broker::start(self)? else { return Ok(Vec::new()) };
        let mut rows = Vec::new();
        for queue_type in ["classic", "quorum"] {
            for prefetch in [1, 20, 256] {
                rows.extend(self.no_op_requests(&broker, queue_type, prefetch).await?);
            }
        }
        rows.push(self.round_trips(&broker).await?);
        rows.push(self.in_flight(&broker).await?);
        Ok(rows)
    }

    fn server(
        &self,
        who: Who,
        broker: &Broker,
        queues: &Queues,
        prefetch: u16,
        count: usize,
        activity_exchange: Option<String>,
    ) -> Outcome<Role> {
        let (uri, queue, expected) = (broker.uri.clone(), queues.requests.clone(), count as u64);
        match who {
            Who::Lapin => Role::start(self, lapin_alone::FLAG, &LapinLoop { uri, queue, prefetch, expected }),
            Who::Worker => {
                let from = From::Amqp { uri, queue, activity_exchange };
                self.no_op_worker(from, prefetch.into(), Payload::Nothing, count)
            }
        }
    }

    async fn no_op_requests(&self, broker: &Broker, queue_type: &str, prefetch: u16) -> Outcome<[Row; 2]> {
        let count = if prefetch == 1 { self.pick(4_000, 50) } else { self.pick(20_000, 300) };
        let (mut lapin, mut worker, mut twice) = (Vec::new(), Vec::new(), 0);
        for _ in 0..self.pick(ROUNDS, 1) {
            for (who, rates) in [(Who::Lapin, &mut lapin), (Who::Worker, &mut worker)] {
                let queues = Queues::declare(broker, queue_type).await?;
                queues.fill(count).await?;
                let mut role = self.server(who, broker, &queues, prefetch, count, None)?;
                rates.push(Rate::of(&mut role).await?);
                role.stop().await?;
                twice += queues.collect(count).await?;
            }
        }
        let (lapin, worker) = (Rate::median(&lapin), Rate::median(&worker));
        Ok([
            Row {
                figure: format!("no-op requests, {queue_type}, prefetch {prefetch}; 0 lost, {twice} answered twice"),
                reached: format!("{:.0} /s, {:.0} %", worker.per_second, worker.per_second * 100.0 / lapin.per_second),
                aim: "≥ 90 %",
                limit: format!("{:.0} /s by lapin alone, each confirmed", lapin.per_second),
            },
            Row {
                figure: format!("… CPU a request, {queue_type}, prefetch {prefetch}"),
                reached: format!("{:.0} µs, {:+.0} µs", worker.cpu_us, worker.cpu_us - lapin.cpu_us),
                aim: "≤ +25 µs",
                limit: format!("{:.0} µs by lapin alone", lapin.cpu_us),
            },
        ])
    }

    /// One request after the other, replied to straight to the client's channel.
    async fn round_trips(&self, broker: &Broker) -> Outcome<Row> {
        let count = self.pick(1_000, 50);
        let (mut lapin, mut worker, mut twice) = (Vec::new(), Vec::new(), 0);
        for _ in 0..self.pick(ROUNDS, 1) {
            for (who, spans) in [(Who::Lapin, &mut lapin), (Who::Worker, &mut worker)] {
                let queues = Queues::declare(broker, "classic").await?;
                let exchange = queues.activity_exchange().await?;
                let mut role = self.server(who, broker, &queues, 4, 0, Some(exchange))?;
                role.line("working").await?;
                twice += queues.round_trips(count, spans).await?;
                role.stop().await?;
                queues.collect(0).await?;
            }
        }
        let (lapin, worker) = (Spans::new(lapin), Spans::new(worker));
        Ok(Row {
            figure: format!(
                "round trip of a request, activity reported: p50 and p99 of {}; 0 lost, {twice} answered twice",
                worker.len()
            ),
            reached: format!("{}, {}", worker.pair(50, 99), worker.percent_above(&lapin)),
            aim: "≤ +20 %",
            limit: format!("{} by lapin alone", lapin.pair(50, 99)),
        })
    }

    /// Many requests held at once.
    async fn in_flight(&self, broker: &Broker) -> Outcome<Row> {
        let count: u16 = self.pick(1_000, 50);
        let queues = Queues::declare(broker, "classic").await?;
        let from = From::Amqp { uri: broker.uri.clone(), queue: queues.requests.clone(), activity_exchange: None };
        let mut worker = self.no_op_worker(from, count.into(), Payload::Wait, count.into())?;
        worker.line("working").await?;
        queues.has_consumer().await?;
        let before = worker.usage()?;
        queues.fill(count.into()).await?;
        let all_claimed = async {
            while worker.counts().await?["claims"].as_u64() < Some(count.into()) {}
            Outcome::Ok(())
        };
        timeout(TIMEOUT, all_claimed).await??;
        let held = worker.usage()?;
        worker.send("release").await?;
        worker.done().await?;
        worker.stop().await?;
        let twice = queues.collect(count.into()).await?;
        Ok(Row {
            figure: format!(
                "{count} requests of 512 bytes in flight in one worker: memory, and each; 0 lost, {twice} answered twice"
            ),
            reached: format!("{:.1} MB, {:.1} KiB", held.megabytes(), held.kib_above(before, count.into())),
            aim: "",
            limit: format!("{:.1} MB before", before.megabytes()),
        })
    }
}

/// A queue of requests and one of replies, and a channel for both.
pub(crate) struct Queues {
    _connection: Connection,
    pub(crate) channel: Channel,
    pub(crate) requests: String,
    pub(crate) replies: String,
}

impl Queues {
    pub(crate) async fn declare(broker: &Broker, queue_type: &str) -> Outcome<Self> {
        let connection = Connection::connect(&broker.uri, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        let (requests, replies) = (format!("bench-{}", new_task_id()), format!("replies-{}", new_task_id()));
        let options = QueueDeclareOptions { durable: queue_type == "quorum", ..QueueDeclareOptions::default() };
        let arguments = header_table([("x-queue-type", AMQPValue::LongString(queue_type.into()))]);
        channel.queue_declare(requests.as_str().into(), options, arguments).await?;
        channel.queue_declare(replies.as_str().into(), QueueDeclareOptions::default(), FieldTable::default()).await?;
        Ok(Self { _connection: connection, channel, requests, replies })
    }

    /// An exchange for activity reports without a reader.
    async fn activity_exchange(&self) -> Outcome<String> {
        let name = format!("activity-{}", new_task_id());
        let options = ExchangeDeclareOptions { auto_delete: true, ..ExchangeDeclareOptions::default() };
        self.channel
            .exchange_declare(name.as_str().into(), ExchangeKind::Fanout, options, FieldTable::default())
            .await?;
        Ok(name)
    }

    /// Publishes so many requests, named by their numbers.
    async fn fill(&self, count: usize) -> Outcome<()> {
        let body = lapin_alone::body();
        let request = async |number: usize| {
            let properties = lapin_alone::request(&number.to_string(), &self.replies);
            publish(&self.channel, "", &self.requests, properties, &body).await
        };
        stream::iter((0..count).map(Ok)).try_for_each_concurrent(WINDOW, request).await
    }

    async fn inspect(&self, queue: &str) -> Outcome<(u32, u32)> {
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let queue = self.channel.queue_declare(queue.into(), options, FieldTable::default()).await?;
        Ok((queue.message_count(), queue.consumer_count()))
    }

    async fn has_consumer(&self) -> Outcome<()> {
        until("a consumer", async || Ok(self.inspect(&self.requests).await?.1 > 0)).await
    }

    /// Reads every reply and deletes the queues. Fails if a reply is missing. Returns how many came twice.
    async fn collect(self, count: usize) -> Outcome<usize> {
        // A quorum queue counts an acknowledged request for a moment longer.
        until("the end of all requests", async || Ok(self.inspect(&self.requests).await?.0 == 0)).await?;
        let (waiting, _) = self.inspect(&self.replies).await?;
        let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
        let queue = self.replies.as_str().into();
        let mut consumer = self.channel.basic_consume(queue, "".into(), options, FieldTable::default()).await?;
        let mut seen: HashMap<String, usize> = HashMap::new();
        for _ in 0..waiting {
            let reply = timeout(TIMEOUT, next(&mut consumer)).await??;
            let id = reply.properties.correlation_id().as_ref().map(ToString::to_string).unwrap_or_default();
            *seen.entry(id).or_insert(0) += 1;
        }
        for queue in [&self.requests, &self.replies] {
            self.channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await?;
        }
        let lost = (0..count).filter(|number| !seen.contains_key(&number.to_string())).count();
        if lost > 0 {
            return Err(format!("{lost} of {count} requests were never answered").into());
        }
        Ok(seen.values().map(|times| times - 1).sum())
    }

    /// Sends so many requests, each after the reply to the one before. Returns how many were answered twice.
    async fn round_trips(&self, count: usize, spans: &mut Vec<Duration>) -> Outcome<usize> {
        let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
        let mut replies =
            self.channel.basic_consume(REPLY_TO.into(), "".into(), options, FieldTable::default()).await?;
        self.has_consumer().await?;
        let (warm_up, mut twice) = (count / 10, 0);
        for number in 0..warm_up + count {
            let (id, began) = (number.to_string(), now());
            let properties = lapin_alone::request(&id, REPLY_TO);
            publish(&self.channel, "", &self.requests, properties, &lapin_alone::body()).await?;
            loop {
                let reply = timeout(TIMEOUT, next(&mut replies)).await??;
                if reply.properties.correlation_id().as_ref().is_some_and(|of| of.as_str() == id) {
                    break;
                }
                twice += 1;
            }
            if number >= warm_up {
                spans.push(now() - began);
            }
        }
        Ok(twice)
    }
}

/// Publishes one message and waits for its confirm.
pub(crate) async fn publish(
    channel: &Channel,
    exchange: &str,
    key: &str,
    properties: BasicProperties,
    body: &[u8],
) -> Outcome<()> {
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    match channel.basic_publish(exchange.into(), key.into(), options, body, properties).await?.await? {
        Confirmation::Ack(None) => Ok(()),
        other @ (Confirmation::Ack(Some(_)) | Confirmation::Nack(_) | Confirmation::NotRequested) => {
            Err(format!("a message was not accepted: {other:?}").into())
        }
    }
}
