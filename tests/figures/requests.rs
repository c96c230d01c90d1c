//! Requests of an AMQP queue: the worker beside a loop of lapin's own, on one broker, in turns.
//!
//! Every answer is collected and looked at: a figure has no meaning where one is missing, and says how many came twice.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use journeyman::amqp::lapin::options::{
    BasicConsumeOptions, BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions, QueueDeclareOptions,
    QueueDeleteOptions,
};
use journeyman::amqp::lapin::protocol::constants::REPLY_SUCCESS;
use journeyman::amqp::lapin::types::{AMQPValue, FieldTable};
use journeyman::amqp::lapin::{Channel, Confirmation, Connection, ConnectionProperties, Consumer, ExchangeKind};
use tokio::process::Command;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::Done;
use crate::fleet::{Process, THREADS, WORKER_THREADS, numbers, slugid};
use crate::limits::Spans;
use crate::raw::{self, By, Caller, Loop, REPLY_TO};
use crate::roles::{Payload, RequestsRole, Role, WorkerRole, now};
use crate::rows::{Lab, millis};
use crate::table::{Row, load};

/// How long any one answer may take before the run is given up.
const PATIENCE: Duration = Duration::from_secs(90);
/// How late the count of a queue may be.
const COUNT_LATE: Duration = Duration::from_secs(60);
/// How many messages are published without waiting for each.
const WINDOW: usize = 500;
/// How often worker and loop take turns.
const ROUNDS: usize = 3;

/// Kinds of queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// As the known controller declares it.
    Classic,
    Quorum,
}

impl fmt::Display for Kind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Classic => "classic",
            Self::Quorum => "quorum",
        })
    }
}

/// Who is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    Worker,
    Raw,
}

/// What became of requests, as seen by whoever sent them.
#[derive(Debug, Clone, Copy, Default)]
struct Answers {
    lost: usize,
    twice: usize,
}

impl Answers {
    /// An error where one is missing.
    fn judged(self) -> Done<Self> {
        if self.lost == 0 { Ok(self) } else { Err(format!("{} requests were never answered", self.lost).into()) }
    }

    fn and(&mut self, other: Self) {
        *self = Self { lost: self.lost + other.lost, twice: self.twice + other.twice };
    }
}

impl fmt::Display for Answers {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "lost {}, answered twice {}", self.lost, self.twice)
    }
}

/// What a queue was worked off with.
#[derive(Debug, Clone, Copy)]
struct Ran {
    per_second: f64,
    cpu_us: f64,
}

impl Ran {
    /// What a process said of its pace.
    async fn of(process: &mut Process) -> Done<Self> {
        let [elapsed, cpu, count] = numbers(&process.hear("paced").await?)?;
        let per_second = count as f64 / Duration::from_nanos(elapsed).as_secs_f64();
        Ok(Self { per_second, cpu_us: cpu as f64 / 1e3 / count as f64 })
    }

    /// The middle one by pace, and the middle of what each took.
    fn median(all: &[Self]) -> Self {
        let middle = |of: fn(&Self) -> f64| {
            let mut all: Vec<f64> = all.iter().map(of).collect();
            all.sort_unstable_by(f64::total_cmp);
            all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
        };
        Self { per_second: middle(|ran| ran.per_second), cpu_us: middle(|ran| ran.cpu_us) }
    }
}

impl Lab {
    /// Requests that do nothing, round trips, memory, and calls.
    pub(crate) async fn requests(&self) -> Done<Vec<Row>> {
        let Some(broker) = Broker::start(self.path()).await? else { return Ok(Vec::new()) };
        let mut rows = Vec::new();
        for kind in [Kind::Classic, Kind::Quorum] {
            for prefetch in [1, 20, 256] {
                rows.extend(self.no_ops(&broker, kind, prefetch).await?);
            }
        }
        rows.push(self.round_trips(&broker).await?);
        rows.push(self.in_flight(&broker).await?);
        for parallel in [1, 1000] {
            rows.push(self.calls(&broker, parallel).await?);
        }
        broker.stop().await?;
        Ok(rows)
    }

    async fn no_ops(&self, broker: &Broker, kind: Kind, prefetch: u16) -> Done<[Row; 2]> {
        let count = if prefetch == 1 { self.size.pick(4_000, 50) } else { self.size.pick(20_000, 300) };
        let load = load();
        let (mut raw, mut worker, mut answers) = (Vec::new(), Vec::new(), Answers::default());
        for _ in 0..self.size.pick(ROUNDS, 1) {
            for (who, ran) in [(Who::Raw, &mut raw), (Who::Worker, &mut worker)] {
                let bench = Bench::open(broker, kind).await?;
                bench.fill(count).await?;
                let mut process = self.server(broker, &bench.queue, who, prefetch, count, None)?;
                ran.push(Ran::of(&mut process).await?);
                process.end().await?;
                answers.and(bench.collect(count).await?.judged()?);
            }
        }
        let (raw, worker) = (Ran::median(&raw), Ran::median(&worker));
        Ok([
            Row {
                what: format!("no-op requests, {kind}, prefetch {prefetch}; {answers}"),
                reached: format!("{:.0} /s, {:.0} %", worker.per_second, worker.per_second * 100.0 / raw.per_second),
                aim: "≥ 90 %".to_owned(),
                limit: format!("{:.0} /s by lapin alone, each confirmed", raw.per_second),
                load,
            },
            Row {
                what: format!("… CPU a request, {kind}, prefetch {prefetch}; {answers}"),
                reached: format!("{:.0} µs, {:+.0} µs", worker.cpu_us, worker.cpu_us - raw.cpu_us),
                aim: "≤ +40 µs".to_owned(),
                limit: format!("{:.0} µs by lapin alone", raw.cpu_us),
                load,
            },
        ])
    }

    fn server(
        &self,
        broker: &Broker,
        queue: &str,
        who: Who,
        prefetch: u16,
        expected: usize,
        exchange: Option<&str>,
    ) -> Done<Process> {
        let expected = expected as u64;
        let role = match who {
            Who::Raw => {
                let raw = Loop { uri: broker.uri.clone(), queue: queue.to_owned(), prefetch, expected };
                Role { raw: Some(raw), threads: WORKER_THREADS, ..Role::default() }
            }
            Who::Worker => {
                let worker = self.worker_of(broker, queue, prefetch, Payload::Nothing, expected, exchange)?;
                Role { worker: Some(worker), threads: WORKER_THREADS, ..Role::default() }
            }
        };
        Process::start(&role, &self.path().join("worker.log"))
    }

    fn worker_of(
        &self,
        broker: &Broker,
        queue: &str,
        prefetch: u16,
        payload: Payload,
        expected: u64,
        exchange: Option<&str>,
    ) -> Done<WorkerRole> {
        let (uri, queue, exchange) = (broker.uri.clone(), queue.to_owned(), exchange.map(str::to_owned));
        Ok(WorkerRole {
            root_url: String::new(),
            requests: Some(RequestsRole { uri, queue, exchange }),
            azure: false,
            queues: Vec::new(),
            capacity: prefetch.into(),
            work_dir: self.work_dir()?,
            payload,
            expected,
        })
    }

    /// One request after the other, answered straight to the client's channel.
    async fn round_trips(&self, broker: &Broker) -> Done<Row> {
        let count = self.size.pick(1_000, 50);
        let load = load();
        let (mut raw, mut worker, mut answers) = (Vec::new(), Vec::new(), Answers::default());
        for _ in 0..self.size.pick(ROUNDS, 1) {
            for (who, spans) in [(Who::Raw, &mut raw), (Who::Worker, &mut worker)] {
                let bench = Bench::open(broker, Kind::Classic).await?;
                let exchange = bench.exchange().await?;
                let mut process = self.server(broker, &bench.queue, who, 4, 0, Some(&exchange))?;
                process.hear("working").await?;
                let twice = bench.trips(count, spans).await?;
                // Before its queue goes.
                process.end().await?;
                answers.and(bench.collect(0).await?.judged()?);
                answers.and(Answers { lost: 0, twice });
            }
        }
        let (raw, worker) = (Spans::new(raw), Spans::new(worker));
        let more = |hundredths| {
            let (ours, theirs) = (worker.percentile(hundredths), raw.percentile(hundredths));
            (ours.as_secs_f64() / theirs.as_secs_f64() - 1.0) * 100.0
        };
        Ok(Row {
            what: format!("round trip of a request, activity reported: p50 and p99 of {}; {answers}", worker.len()),
            reached: format!(
                "{} and {}, {:+.0} % and {:+.0} %",
                millis(worker.percentile(50)),
                millis(worker.percentile(99)),
                more(50),
                more(99)
            ),
            aim: "≤ +20 %".to_owned(),
            limit: format!("{} and {} by lapin alone", millis(raw.percentile(50)), millis(raw.percentile(99))),
            load,
        })
    }

    /// Many requests held at once.
    async fn in_flight(&self, broker: &Broker) -> Done<Row> {
        let count: u16 = self.size.pick(1_000, 50);
        let load = load();
        let bench = Bench::open(broker, Kind::Classic).await?;
        let role = self.worker_of(broker, &bench.queue, count, Payload::Wait, count.into(), None)?;
        let role = Role { worker: Some(role), threads: WORKER_THREADS, ..Role::default() };
        let mut worker = Process::start(&role, &self.path().join("worker.log"))?;
        worker.hear("working").await?;
        bench.consumers(1).await?;
        let before = worker.usage().await?;
        bench.fill(count.into()).await?;
        worker.until("claims", count.into()).await?;
        let held = worker.usage().await?;
        worker.tell("release").await?;
        worker.hear("done").await?;
        worker.end().await?;
        let answers = bench.collect(count.into()).await?.judged()?;
        let each = held.resident_kib.saturating_sub(before.resident_kib) as f64 / f64::from(count);
        Ok(Row {
            what: format!("{count} requests of 512 bytes in flight in one worker: memory, and for each; {answers}"),
            reached: format!("{:.1} MB, {each:.1} KiB", held.resident_kib as f64 * 1024.0 / 1e6),
            aim: String::new(),
            limit: format!("{:.1} MB before", before.resident_kib as f64 * 1024.0 / 1e6),
            load,
        })
    }

    /// The client library against a client that is no more than lapin, with lapin's loop at the other end.
    async fn calls(&self, broker: &Broker, parallel: usize) -> Done<Row> {
        let count = if parallel == 1 { self.size.pick(3_000, 50) } else { self.size.pick(20_000, 300) };
        let load = load();
        let (mut raw, mut library, mut answers) = (Vec::new(), Vec::new(), Answers::default());
        for _ in 0..self.size.pick(ROUNDS, 1) {
            for (by, ran) in [(By::Lapin, &mut raw), (By::Library, &mut library)] {
                let bench = Bench::open(broker, Kind::Classic).await?;
                // One call before the others, and one after them.
                let mut server = self.server(broker, &bench.queue, Who::Raw, 256, count + 2, None)?;
                server.hear("working").await?;
                let caller = Caller { uri: broker.uri.clone(), queue: bench.queue.clone(), count, parallel, by };
                let role = Role { caller: Some(caller), threads: THREADS, ..Role::default() };
                let mut caller = Process::start(&role, &self.path().join("caller.log"))?;
                // It says so when each call has had its answer; the other end, when it has given as many.
                ran.push(Ran::of(&mut caller).await?);
                let [twice] = numbers::<1>(&caller.hear("twice").await?)?;
                answers.and(Answers { lost: 0, twice: usize::try_from(twice)? });
                server.hear("paced").await?;
                caller.end().await?;
                server.end().await?;
                answers.and(bench.collect(0).await?.judged()?);
            }
        }
        let (raw, library) = (Ran::median(&raw), Ran::median(&library));
        Ok(Row {
            what: format!("calls by the client library, {parallel} at once; {answers}"),
            reached: format!("{:.0} /s, {:.0} µs CPU", library.per_second, library.cpu_us),
            aim: String::new(),
            limit: format!("{:.0} /s, {:.0} µs CPU by lapin alone", raw.per_second, raw.cpu_us),
            load,
        })
    }
}

/// A RabbitMQ of the run's own, or the one that the environment names.
pub(crate) struct Broker {
    pub(crate) uri: String,
    folder: Option<PathBuf>,
}

fn script(what: &str, folder: &Path) -> Command {
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/rabbitmq"));
    command.arg(what).arg(folder).stdin(Stdio::null());
    command
}

impl Broker {
    /// `None` where there is no RabbitMQ, which is said.
    pub(crate) async fn start(folder: &Path) -> Done<Option<Self>> {
        let named = std::env::vars().find(|(name, value)| name == "JOURNEYMAN_TEST_AMQP" && !value.is_empty());
        if let Some((_, uri)) = named {
            return Ok(Some(Self { uri, folder: None }));
        }
        let folder = folder.join("rabbitmq");
        let output = script("start", &folder).output().await?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            eprintln!(
                "NOT MEASURED: requests, for want of a RabbitMQ (`apt-get install rabbitmq-server` has it): {said}"
            );
            return Ok(None);
        }
        let said = String::from_utf8(output.stdout)?;
        let uri = said.lines().find_map(|line| line.strip_prefix("AMQP=")).ok_or("it says where it is")?;
        Ok(Some(Self { uri: uri.to_owned(), folder: Some(folder) }))
    }

    pub(crate) async fn stop(mut self) -> Done<()> {
        if let Some(folder) = self.folder.take() {
            script("kill", &folder).status().await?;
        }
        Ok(())
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            // Nothing is waited for: this is the way out after an error.
            drop(script("kill", folder).spawn());
        }
    }
}

/// A queue of requests and one of answers, and who speaks to both.
struct Bench {
    connection: Connection,
    channel: Channel,
    queue: String,
    answers: String,
}

impl Bench {
    async fn open(broker: &Broker, kind: Kind) -> Done<Self> {
        let connection = Connection::connect(&broker.uri, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        let (queue, answers) = (format!("bench-{}", slugid()), format!("answers-{}", slugid()));
        let bench = Self { connection, channel, queue, answers };
        let quorum = || AMQPValue::LongString("quorum".into());
        let arguments = (kind == Kind::Quorum).then(|| journeyman::amqp::header_table([("x-queue-type", quorum())]));
        let options = QueueDeclareOptions { durable: kind == Kind::Quorum, ..QueueDeclareOptions::default() };
        let arguments = arguments.unwrap_or_default();
        bench.channel.queue_declare(bench.queue.as_str().into(), options, arguments).await?;
        let options = QueueDeclareOptions::default();
        bench.channel.queue_declare(bench.answers.as_str().into(), options, FieldTable::default()).await?;
        Ok(bench)
    }

    /// Somewhere for activity reports, which nobody reads.
    async fn exchange(&self) -> Done<String> {
        let name = format!("activity-{}", slugid());
        let options = ExchangeDeclareOptions { auto_delete: true, ..ExchangeDeclareOptions::default() };
        let kind = ExchangeKind::Fanout;
        self.channel.exchange_declare(name.as_str().into(), kind, options, FieldTable::default()).await?;
        Ok(name)
    }

    async fn publish(&self, id: &str, reply_to: &str) -> Done<()> {
        publish(self.channel.clone(), self.queue.clone(), id.to_owned(), reply_to.to_owned()).await
    }

    /// So many requests, named by their numbers.
    async fn fill(&self, count: usize) -> Done<()> {
        let mut under_way = JoinSet::new();
        for number in 0..count {
            if under_way.len() >= WINDOW
                && let Some(ended) = under_way.join_next().await
            {
                ended??;
            }
            let (channel, queue, reply_to) = (self.channel.clone(), self.queue.clone(), self.answers.clone());
            under_way.spawn(publish(channel, queue, number.to_string(), reply_to));
        }
        while let Some(ended) = under_way.join_next().await {
            ended??;
        }
        Ok(())
    }

    async fn depth(&self, queue: &str) -> Done<Depth> {
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let queue = self.channel.queue_declare(queue.into(), options, FieldTable::default()).await?;
        Ok(Depth { messages: queue.message_count(), consumers: queue.consumer_count() })
    }

    /// Until so many consume. The broker has to be asked.
    async fn consumers(&self, count: u32) -> Done<()> {
        let there = async {
            while self.depth(&self.queue).await?.consumers < count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Ok(())
        };
        timeout(PATIENCE, there).await.map_err(|_| "nobody consumes")?
    }

    /// How many requests are left. What a quorum queue says of that is a moment late: one that is still counted then was acknowledged.
    async fn left(&self) -> Done<u32> {
        let none = async {
            while self.depth(&self.queue).await?.messages > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Ok(0)
        };
        match timeout(COUNT_LATE, none).await {
            Ok(none) => none,
            Err(_) => Ok(self.depth(&self.queue).await?.messages),
        }
    }

    /// Reads every answer there is, when nobody answers any more, and takes the queues away.
    async fn collect(self, count: usize) -> Done<Answers> {
        let waiting = self.depth(&self.answers).await?.messages;
        let unanswered = self.left().await?;
        let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
        let answers = self.answers.as_str().into();
        let mut consumer = self.channel.basic_consume(answers, "".into(), options, FieldTable::default()).await?;
        let mut seen: HashMap<String, usize> = HashMap::new();
        for _ in 0..waiting {
            let answer = timeout(PATIENCE, raw::next(&mut consumer)).await.map_err(|_| "an answer does not come")??;
            let id = answer.properties.correlation_id().as_ref().map(ToString::to_string).unwrap_or_default();
            *seen.entry(id).or_insert(0) += 1;
        }
        let lost = (0..count).filter(|number| !seen.contains_key(&number.to_string())).count();
        if unanswered > 0 && lost == 0 {
            return Err(format!("{unanswered} requests are left that were answered").into());
        }
        let twice = seen.values().map(|times| times - 1).sum();
        for queue in [&self.queue, &self.answers] {
            self.channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await?;
        }
        let (code, text) = (REPLY_SUCCESS, "OK");
        self.connection.close(code, text.into()).await?;
        Ok(Answers { lost, twice })
    }

    /// So many requests, each when the one before was answered. Answers with how many were answered twice.
    async fn trips(&self, count: usize, spans: &mut Vec<Duration>) -> Done<usize> {
        let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
        let table = FieldTable::default();
        let mut answers = self.channel.basic_consume(REPLY_TO.into(), "".into(), options, table).await?;
        self.consumers(1).await?;
        let (warm, mut twice) = (count / 10, 0);
        for number in 0..warm + count {
            let (id, began) = (number.to_string(), now());
            self.publish(&id, REPLY_TO).await?;
            timeout(PATIENCE, answered(&mut answers, &id, &mut twice)).await.map_err(|_| "no answer came")??;
            if number >= warm {
                spans.push(now() - began);
            }
        }
        Ok(twice)
    }
}

async fn publish(channel: Channel, queue: String, id: String, reply_to: String) -> Done<()> {
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    let properties = raw::request(&id, &reply_to);
    let confirm = channel.basic_publish("".into(), queue.into(), options, &raw::body(), properties).await?;
    let confirmed = confirm.await?;
    if confirmed == Confirmation::Ack(None) {
        Ok(())
    } else {
        Err(format!("a request was not taken: {confirmed:?}").into())
    }
}

/// Until the answer to this request comes; others are second ones.
async fn answered(answers: &mut Consumer, id: &str, twice: &mut usize) -> Done<()> {
    loop {
        let answer = raw::next(answers).await?;
        if answer.properties.correlation_id().as_ref().is_some_and(|of| of.as_str() == id) {
            return Ok(());
        }
        *twice += 1;
    }
}

struct Depth {
    messages: u32,
    consumers: u32,
}
