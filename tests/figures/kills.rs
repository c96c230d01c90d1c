//! Requests of a RabbitMQ and events of a notifier while worker, connection and notifier are killed again and again: none is lost, events
//! arrive in order, and memory stays flat. `JOURNEYMAN_KILLS_REQUESTS` and `JOURNEYMAN_KILLS_EVENTS` are the numbers of them.

use std::time::Duration;

use futures_util::{TryStreamExt as _, stream};
use journeyman_domain::jitter::Jitter;
use journeyman_platform::amqp::lapin::options::{BasicConsumeOptions, QueueDeleteOptions};
use journeyman_platform::amqp::lapin::types::FieldTable;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::lapin_alone::{self, next};
use crate::machine::{Row, now};
use crate::no_op_worker::{From, Payload};
use crate::notifier::{Notifier, Receiver, endpoint};
use crate::programs::{Broker, TIMEOUT};
use crate::requests::{Queues, WINDOW, publish};
use crate::support::named;
use crate::support::wire::Wire;
use crate::{Lab, Outcome};

const CAPACITY: u32 = 256;
/// Requests without a reply at a time.
const WAITING_MAX: usize = 20_000;
/// Events that are published again after a kill among them. The notifier drops those that it has.
const CHUNK: usize = 20_000;
const LANES: usize = 10_000;

/// Memory of processes now and then, and what was done to them.
#[derive(Default)]
struct Lives {
    megabytes: Vec<f64>,
    kills: usize,
    cuts: usize,
}

impl Lives {
    /// Fails if those of the last third needed much more than those of the first.
    fn judge(&self) -> Outcome<String> {
        let third = self.megabytes.len().div_ceil(3);
        let mean = |of: &[f64]| of.iter().sum::<f64>() / of.len() as f64;
        let (first, last) = (mean(&self.megabytes[..third]), mean(&self.megabytes[self.megabytes.len() - third..]));
        if last > first * 1.2 + 5.0 {
            return Err(format!("memory grows from {first:.1} MB to {last:.1} MB: {:?}", self.megabytes).into());
        }
        Ok(format!("memory {first:.1} MB in the first third, {last:.1} MB in the last"))
    }
}

impl Lab {
    pub(crate) async fn kills(&self) -> Outcome<Vec<Row>> {
        let count = |name: &str, built_in| named(name).map_or(Ok(built_in), |text| text.parse());
        let requests = count("JOURNEYMAN_KILLS_REQUESTS", self.pick(300_000, 1_000))?;
        let events = count("JOURNEYMAN_KILLS_EVENTS", self.pick(100_000, 1_000))?;
        let mut rows = Vec::new();
        if let Some(broker) = Broker::start(self)? {
            rows.push(self.requests_under_kills(&broker, requests).await?);
        }
        rows.push(self.events_under_kills(events).await?);
        Ok(rows)
    }

    /// Some seconds, none like the one before.
    fn between_kills(&self, jitter: &mut Jitter) -> Duration {
        let span = self.pick(Duration::from_secs(10), Duration::from_millis(400));
        span + jitter.below(span)
    }

    async fn requests_under_kills(&self, broker: &Broker, count: usize) -> Outcome<Row> {
        let queues = Queues::declare(broker, "classic").await?;
        let address = broker.uri.split('@').nth(1).and_then(|rest| rest.split('/').next()).ok_or("no address")?;
        let wire = Wire::to(address).await;
        let from = From::Amqp { uri: wire.uri(&broker.uri), queue: queues.requests.clone(), activity_exchange: None };
        let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
        let queue = queues.replies.as_str().into();
        let mut replies = queues.channel.basic_consume(queue, "".into(), options, FieldTable::default()).await?;
        let (may_wait, body) = (Semaphore::new(WAITING_MAX), lapin_alone::body());
        let request = async |number: usize| {
            may_wait.acquire().await?.forget();
            let properties = lapin_alone::request(&number.to_string(), &queues.replies);
            publish(&queues.channel, "", &queues.requests, properties, &body).await
        };
        let publishing = stream::iter((0..count).map(Ok)).try_for_each_concurrent(WINDOW, request);
        let collecting = async {
            let (mut answered, mut left, mut twice) = (vec![false; count], count, 0);
            while left > 0 {
                let reply = timeout(TIMEOUT, next(&mut replies)).await;
                let reply = reply.map_err(|_| format!("{left} of {count} requests are not answered"))??;
                let id = reply.properties.correlation_id().as_ref().map(ToString::to_string).unwrap_or_default();
                if std::mem::replace(&mut answered[id.parse::<usize>()?], true) {
                    twice += 1;
                    continue;
                }
                left -= 1;
                may_wait.add_permits(1);
                if left % count.div_ceil(20) == 0 {
                    eprintln!("{} of {count} requests answered, {twice} of them twice", count - left);
                }
            }
            Outcome::Ok(twice)
        };
        let mut lives = Lives::default();
        let began = now();
        let twice = tokio::select! {
            done = async { futures_util::try_join!(publishing, collecting) } => done?.1,
            failed = self.kill_workers(from, &wire, &mut lives) => return failed,
        };
        let took = now() - began;
        for queue in [&queues.requests, &queues.replies] {
            queues.channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await?;
        }
        Ok(Row {
            figure: format!(
                "{count} requests under {} kills of the worker and {} cuts of its connection; 0 lost, {twice} answered twice",
                lives.kills, lives.cuts
            ),
            reached: format!("{:.0} /s", count as f64 / took.as_secs_f64()),
            aim: "0 lost",
            limit: lives.judge()?,
        })
    }

    /// Kills workers until the caller drops it.
    async fn kill_workers(&self, from: From, wire: &Wire, lives: &mut Lives) -> Outcome<Row> {
        let mut jitter = Jitter::seeded(1);
        loop {
            let worker = self.no_op_worker(from.clone(), CAPACITY, Payload::Nothing, 0)?;
            for _ in 0..=jitter.bits() % 3 {
                sleep(self.between_kills(&mut jitter)).await;
                wire.cut();
                lives.cuts += 1;
            }
            sleep(self.between_kills(&mut jitter)).await;
            lives.megabytes.push(worker.usage()?.megabytes());
            worker.kill().await?;
            lives.kills += 1;
        }
    }

    async fn events_under_kills(&self, count: usize) -> Outcome<Row> {
        let (receiver, folder) = (Receiver::start().await?, self.fresh("kills")?);
        let store = format!("db = \"{}\"", folder.join("notifier.db").display());
        let config = endpoint("bench", receiver.address, "bench");
        let (mut jitter, mut lives, began) = (Jitter::seeded(1), Lives::default(), now());
        let mut notifier = Notifier::start(self, &store, &config).await?;
        let (mut first, mut kill_at) = (0, Instant::now() + self.between_kills(&mut jitter));
        while first < count {
            let end = count.min(first + CHUNK);
            tokio::select! {
                published = notifier.publish("bench", first..end, LANES) => {
                    published?;
                    first = end;
                    eprintln!("{first} of {count} events taken, {} delivered", *receiver.count.borrow());
                    continue;
                }
                () = sleep_until(kill_at) => {}
            }
            lives.megabytes.push(notifier.program.usage()?.megabytes());
            notifier.program.child.kill().await?;
            lives.kills += 1;
            notifier = Notifier::start(self, &store, &config).await?;
            kill_at = Instant::now() + self.between_kills(&mut jitter);
        }
        receiver.wait_for_all(count).await?;
        let took = now() - began;
        let repeated = receiver.arrived.lock().repeated;
        lives.megabytes.push(notifier.program.usage()?.megabytes());
        Ok(Row {
            figure: format!(
                "{count} events in {LANES} lanes under {} kills of the notifier; 0 lost, in order, {repeated} sent twice",
                lives.kills
            ),
            reached: format!("{:.0} /s", count as f64 / took.as_secs_f64()),
            aim: "0 lost",
            limit: lives.judge()?,
        })
    }
}
