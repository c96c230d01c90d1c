//! The controller: what it adds to the start of a worker and to a call, and what its queues and counts cost.
//!
//! It is `journeyman controller` itself, with `journeyman worker` under it, on a broker of the run's own. Every request is
//! accounted for: a figure has no meaning where one is missing.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use journeyman::amqp::header_table;
use journeyman::amqp::lapin::options::{
    BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use journeyman::amqp::lapin::types::{AMQPValue, FieldTable};
use journeyman::amqp::lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use journeyman::client::{RpcClient, RpcRequest};
use serde_json::Value;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::Done;
use crate::fleet::{Usage, fresh, numbers, resident, slugid};
use crate::limits::Spans;
use crate::raw;
use crate::requests::Broker;
use crate::roles::now;
use crate::rows::{Lab, millis};
use crate::table::{Row, load};

/// How long anything may take before the run is given up.
const PATIENCE: Duration = Duration::from_secs(180);
/// How often a controller is asked how far it is.
const ASK_EVERY: Duration = Duration::from_millis(2);
/// How many messages are published without waiting for each.
const WINDOW: usize = 500;

impl Lab {
    /// Calls cold and warm, many keys at once, orphans, reports, groups that are only there, and a takeover.
    pub(crate) async fn controller(&self) -> Done<Vec<Row>> {
        let Some(broker) = Broker::start(self.path()).await? else { return Ok(Vec::new()) };
        let rows = vec![
            self.cold(&broker).await?,
            self.warm(&broker).await?,
            self.many(&broker).await?,
            self.orphans(&broker).await?,
            self.reports(&broker).await?,
            self.tracked(&broker).await?,
            self.takeover(&broker).await?,
        ];
        broker.stop().await?;
        Ok(rows)
    }

    /// A call under a key that nobody has used, beside a worker that is started by hand for a queue with a request in it.
    async fn cold(&self, broker: &Broker) -> Done<Row> {
        let (count, load) = (self.size.pick(40, 2), load());
        let pool = Pool::start(self.path(), broker, &worker(self.path())?).await?;
        let (mut cold, mut bare) = (Vec::new(), Vec::new());
        for number in 0..count {
            let began = now();
            pool.call(&format!("cold-{number}")).await?;
            cold.push(now() - began);
            bare.push(pool.bare_start(&format!("bare-{number}")).await?);
        }
        pool.end().await?;
        let (cold, bare) = (Spans::new(cold), Spans::new(bare));
        let more = |hundredths| cold.percentile(hundredths).as_secs_f64() - bare.percentile(hundredths).as_secs_f64();
        Ok(Row {
            what: format!("call under an unknown key, subprocess: p50 and p99; 0 of {count} lost"),
            reached: format!(
                "{} and {}, {:+.1} and {:+.1} ms",
                millis(cold.percentile(50)),
                millis(cold.percentile(99)),
                more(50) * 1e3,
                more(99) * 1e3
            ),
            aim: "≤ +10 ms".to_owned(),
            limit: format!(
                "{} and {} from a process's start to its answer",
                millis(bare.percentile(50)),
                millis(bare.percentile(99))
            ),
            load,
        })
    }

    /// A call that a worker waits for, beside one straight to the queue of a worker that was started by hand.
    async fn warm(&self, broker: &Broker) -> Done<Row> {
        let (count, load) = (self.size.pick(2_000, 30), load());
        let pool = Pool::start(self.path(), broker, &worker(self.path())?).await?;
        let queue = pool.queue("alone");
        pool.declare(&queue).await?;
        let mut alone = pool.by_hand("alone")?;
        let (mut raw, mut ours) = (Vec::new(), Vec::new());
        // In turns, so that both have the machine as it is.
        for number in 0..count + count / 10 {
            for (exchange, key, spans) in [("", &*queue, &mut raw), (&*pool.exchange(), "warm", &mut ours)] {
                let began = now();
                pool.ask(exchange, key).await?;
                if number >= count / 10 {
                    spans.push(now() - began);
                }
            }
        }
        alone.kill().await?;
        pool.end().await?;
        let (raw, ours) = (Spans::new(raw), Spans::new(ours));
        let more = |hundredths| {
            (ours.percentile(hundredths).as_secs_f64() / raw.percentile(hundredths).as_secs_f64() - 1.0) * 100.0
        };
        Ok(Row {
            what: format!("call under a warm key: p50 and p99 of {count}; 0 lost"),
            reached: format!(
                "{} and {}, {:+.0} % and {:+.0} %",
                millis(ours.percentile(50)),
                millis(ours.percentile(99)),
                more(50),
                more(99)
            ),
            aim: "≤ +20 %".to_owned(),
            limit: format!("{} and {} without a controller", millis(raw.percentile(50)), millis(raw.percentile(99))),
            load,
        })
    }

    /// Until each request is in its queue, and a process was started for each key.
    async fn many(&self, broker: &Broker) -> Done<Row> {
        let (count, load) = (self.size.pick(300, 10), load());
        let pool = Pool::start(self.path(), broker, "command = [\"/bin/sleep\", \"600\"]\n").await?;
        let began = now();
        let keys: Vec<String> = (0..count).map(|number| format!("many-{number}")).collect();
        publish(&pool.channel, &pool.exchange(), keys.iter().cloned()).await?;
        let count = u64::try_from(count)?;
        pool.until(|seen| seen["counters"]["orphans_forwarded"].as_u64() == Some(count)).await?;
        let forwarded = now() - began;
        pool.until(|seen| seen["counters"]["workers_started"].as_u64() >= Some(count)).await?;
        let started = now() - began;
        let lost = pool.missing(&keys, 1).await?;
        let bare = spawned(usize::try_from(count)?)?;
        pool.end().await?;
        none_lost(lost)?;
        Ok(Row {
            what: format!(
                "{count} unknown keys at once: each request in its queue, and a process started for each; {lost} lost"
            ),
            reached: format!("{} and {}", millis(forwarded), millis(started)),
            aim: String::new(),
            limit: format!("{} to start as many processes one after the other", millis(bare)),
            load,
        })
    }

    /// Requests at the exchange of orphans whose queues are there, so that nothing but forwarding is measured.
    async fn orphans(&self, broker: &Broker) -> Done<Row> {
        let (count, load) = (self.size.pick(20_000, 200), load());
        let pool = Pool::start(self.path(), broker, "").await?;
        let keys: Vec<String> = (0..10).map(|number| format!("orphan-{number}")).collect();
        publish(&pool.channel, &pool.exchange(), keys.iter().cloned()).await?;
        let known = u64::try_from(keys.len())?;
        pool.until(|seen| seen["counters"]["orphans_forwarded"].as_u64() == Some(known)).await?;
        let queue = format!("plain-{}", slugid());
        pool.declare(&queue).await?;
        let began = now();
        publish(&pool.channel, "", std::iter::repeat_n(queue.clone(), count)).await?;
        let plain = now() - began;
        pool.channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
        let began = now();
        publish(&pool.channel, &pool.orphan_exchange(), keys.iter().cycle().take(count).cloned()).await?;
        let all = known + u64::try_from(count)?;
        pool.until(|seen| seen["counters"]["orphans_forwarded"].as_u64() == Some(all)).await?;
        let took = now() - began;
        let each = u32::try_from(count / keys.len() + 1)?;
        let lost = pool.missing(&keys, each).await?;
        pool.end().await?;
        none_lost(lost)?;
        Ok(Row {
            what: format!("orphans forwarded, each confirmed, {count} under {known} keys; {lost} lost"),
            reached: format!("{:.0} /s", count as f64 / took.as_secs_f64()),
            aim: String::new(),
            limit: format!("{:.0} /s published and confirmed by lapin alone", count as f64 / plain.as_secs_f64()),
            load,
        })
    }

    /// Reports of workers about keys that are there.
    async fn reports(&self, broker: &Broker) -> Done<Row> {
        let (count, load) = (self.size.pick(40_000, 300), load());
        let pool = Pool::start(self.path(), broker, "").await?;
        let keys: Vec<String> = (0..100).map(|number| format!("report-{number}")).collect();
        let began = now();
        publish(&pool.channel, &pool.activity_exchange(), keys.iter().cycle().take(count).cloned()).await?;
        let published = now() - began;
        let all = u64::try_from(count)?;
        pool.until(|seen| seen["counters"]["activity_reports"].as_u64() == Some(all)).await?;
        let took = now() - began;
        pool.end().await?;
        Ok(Row {
            what: format!("reports of workers heeded, {count} about {} keys; 0 lost", keys.len()),
            reached: format!("{:.0} /s", count as f64 / took.as_secs_f64()),
            aim: String::new(),
            limit: format!("{:.0} /s published and confirmed", count as f64 / published.as_secs_f64()),
            load,
        })
    }

    /// Groups that nobody asks anything of.
    async fn tracked(&self, broker: &Broker) -> Done<Row> {
        let (count, load) = (self.size.pick(1_000, 20), load());
        let lasting = Duration::from_secs(self.size.pick(20, 1));
        let pool = Pool::start(self.path(), broker, "").await?;
        let before = pool.usage()?;
        publish(&pool.channel, &pool.exchange(), (0..count).map(|number| format!("idle-{number}"))).await?;
        let all = u64::try_from(count)?;
        pool.until(|seen| seen["counters"]["orphans_forwarded"].as_u64() == Some(all)).await?;
        let (at, from) = (now(), pool.usage()?);
        sleep(lasting).await;
        let (to, span) = (pool.usage()?, now() - at);
        let seen = pool.look().await?;
        let groups = seen["groups"].as_array().map_or(0, Vec::len);
        pool.end().await?;
        none_lost(count - groups.min(count))?;
        let megabytes = |usage: Usage| usage.resident_kib as f64 * 1024.0 / 1e6;
        Ok(Row {
            what: format!("{count} groups tracked, nobody asks, over {} s; 0 lost", lasting.as_secs()),
            reached: format!(
                "{:.2} % CPU, {:.1} MB",
                (to.cpu - from.cpu).as_secs_f64() * 100.0 / span.as_secs_f64(),
                megabytes(to)
            ),
            aim: String::new(),
            limit: format!("{:.1} MB without a group", megabytes(before)),
            load,
        })
    }

    /// From the death of a controller until the one that stands by has the pool.
    async fn takeover(&self, broker: &Broker) -> Done<Row> {
        let (rounds, load) = (self.size.pick(10, 1), load());
        let mut spans = Vec::new();
        for _ in 0..rounds {
            let mut first = Pool::start(self.path(), broker, "").await?;
            let second = first.beside(self.path(), broker).await?;
            let began = now();
            first.controller.kill().await?;
            second.until(|seen| seen["role"] == "active").await?;
            spans.push(now() - began);
            let keys = ["after".to_owned()];
            publish(&second.channel, &second.exchange(), keys.iter().cloned()).await?;
            second.until(|seen| seen["counters"]["orphans_forwarded"].as_u64() == Some(1)).await?;
            none_lost(second.missing(&keys, 1).await?)?;
            second.end().await?;
        }
        let spans = Spans::new(spans);
        Ok(Row {
            what: format!("takeover after the controller was killed: p50 and p99 of {rounds}; 0 lost"),
            reached: format!("{} and {}", millis(spans.percentile(50)), millis(spans.percentile(99))),
            aim: "≤ 5 s".to_owned(),
            limit: String::new(),
            load,
        })
    }
}

/// A pool of its own, and the controller that has it.
struct Pool {
    name: String,
    uri: String,
    home: PathBuf,
    controller: Child,
    address: String,
    http: reqwest::Client,
    client: RpcClient,
    channel: Channel,
    _connection: Connection,
}

impl Pool {
    /// With this said of the pool.
    async fn start(folder: &Path, broker: &Broker, more: &str) -> Done<Self> {
        let name = format!("p{}", uuid::Uuid::new_v4().simple());
        let pool = Self::under(folder, broker, more, name).await?;
        pool.until(|seen| seen["role"] == "active").await?;
        Ok(pool)
    }

    /// Another controller of the same pool.
    async fn beside(&self, folder: &Path, broker: &Broker) -> Done<Self> {
        let other = Self::under(folder, broker, "", self.name.clone()).await?;
        other.until(|seen| seen["role"] == "standby").await?;
        Ok(other)
    }

    async fn under(folder: &Path, broker: &Broker, more: &str, name: String) -> Done<Self> {
        let home = fresh(folder, "controller")?;
        let config = home.join("controller.toml");
        let text = format!(
            "[http]\nlisten = \"127.0.0.1:0\"\n[pool.{name}]\nstate_dir = \"{}\"\nunbind_delay = \"30m\"\ntermination_grace = \"1s\"\n{more}",
            home.display()
        );
        std::fs::write(&config, text)?;
        let log = home.join("log");
        let controller = Command::new(env!("CARGO_BIN_EXE_journeyman"))
            .args(["controller", "--config"])
            .arg(config)
            .env("WORKER_AMQP_URI", &broker.uri)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log)?)
            .kill_on_drop(true)
            .spawn()?;
        let listens = async {
            loop {
                let said = std::fs::read_to_string(&log)?;
                let place = said.split("state: http://").nth(1).and_then(|rest| rest.split_once('/'));
                if let Some((address, _)) = place {
                    return Done::Ok(address.to_owned());
                }
                sleep(ASK_EVERY).await;
            }
        };
        let address = timeout(PATIENCE, listens).await.map_err(|_| "the controller does not listen")??;
        let connection = Connection::connect(&broker.uri, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        let http = reqwest::Client::builder().no_proxy().build()?;
        let client = RpcClient::new(raw::broker(&broker.uri)?, "bench");
        let uri = broker.uri.clone();
        Ok(Self { name, uri, home, controller, address, http, client, channel, _connection: connection })
    }

    fn exchange(&self) -> String {
        format!("{}-req-xchg", self.name)
    }

    fn orphan_exchange(&self) -> String {
        format!("{}-orphan-xchg", self.name)
    }

    fn activity_exchange(&self) -> String {
        format!("{}-activity-xchg", self.name)
    }

    /// The queue of a key; all of them here are letters, digits and `-`.
    fn queue(&self, key: &str) -> String {
        format!("{}-req-{}", self.name, key.replace('-', "%2D"))
    }

    async fn look(&self) -> Done<Value> {
        let text = self.http.get(format!("http://{}/status.json", self.address)).send().await?.text().await?;
        let seen: Value = serde_json::from_str(&text).map_err(|_| text)?;
        Ok(seen["pools"][0].clone())
    }

    /// Looks until it is so. Nobody tells when it is.
    async fn until(&self, like: impl Fn(&Value) -> bool) -> Done<()> {
        let asking = async {
            while !like(&self.look().await?) {
                sleep(ASK_EVERY).await;
            }
            Done::Ok(())
        };
        timeout(PATIENCE, asking).await.map_err(|_| "the controller does not come so far")?
    }

    async fn call(&self, key: &str) -> Done<()> {
        self.ask(&self.exchange(), key).await
    }

    /// A call, and its answer.
    async fn ask(&self, exchange: &str, key: &str) -> Done<()> {
        let (exchange, key) = (exchange.to_owned(), key.to_owned());
        let call =
            RpcRequest { exchange, routing_key: key, body: raw::body(), timeout: PATIENCE, ..RpcRequest::default() };
        let answer = self.client.call(&call).await?;
        if answer.is_ok() { Ok(()) } else { Err(format!("{answer:?}").into()) }
    }

    async fn declare(&self, queue: &str) -> Done<()> {
        let options = QueueDeclareOptions::default();
        self.channel.queue_declare(queue.into(), options, FieldTable::default()).await?;
        Ok(())
    }

    /// A worker as the controller would start it.
    fn by_hand(&self, key: &str) -> Done<Child> {
        let work = fresh(&self.home, "work")?;
        Ok(Command::new(env!("CARGO_BIN_EXE_journeyman"))
            .args(["worker", "--config"])
            .arg(self.home.parent().ok_or("it has a parent")?.join("worker.toml"))
            .arg("--work-dir")
            .arg(work)
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("WORKER_ID", key)
            .env("WORKER_KEY", key)
            .env("WORKER_POOL", &self.name)
            .env("WORKER_REQUESTS_QUEUE", self.queue(key))
            .env("WORKER_ACTIVITY_EXCHANGE", self.activity_exchange())
            .env("WORKER_AMQP_URI", &self.uri)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()?)
    }

    /// From the start of a worker's process until it has answered what was in its queue.
    async fn bare_start(&self, key: &str) -> Done<Duration> {
        let queue = self.queue(key);
        self.declare(&queue).await?;
        let mut answers = {
            let call = RpcRequest {
                routing_key: queue.clone(),
                body: raw::body(),
                timeout: PATIENCE,
                ..RpcRequest::default()
            };
            self.client.stream(&call).await?
        };
        let began = now();
        let mut worker = self.by_hand(key)?;
        while let Some(answer) = answers.next().await {
            if !answer?.is_ok() {
                return Err("it was not answered well".into());
            }
        }
        let took = now() - began;
        worker.kill().await?;
        self.channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
        Ok(took)
    }

    /// How many requests are missing in queues that are to have so many each.
    async fn missing(&self, keys: &[String], each: u32) -> Done<usize> {
        let mut missing = 0;
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        for key in keys {
            let queue = self.channel.queue_declare(self.queue(key).into(), options, FieldTable::default()).await?;
            missing += each.saturating_sub(queue.message_count());
        }
        Ok(usize::try_from(missing)?)
    }

    fn usage(&self) -> Done<Usage> {
        let id = self.controller.id().ok_or("the controller has ended by itself")?;
        let mut cpu = Duration::ZERO;
        for thread in std::fs::read_dir(format!("/proc/{id}/task"))? {
            let stat = std::fs::read_to_string(thread?.path().join("schedstat"))?;
            let [running, _, _] = numbers(stat.trim())?;
            cpu += Duration::from_nanos(running);
        }
        Ok(Usage { cpu, resident_kib: resident(&id.to_string())? })
    }

    /// Ends the controller, its workers, and what the broker has of it.
    async fn end(mut self) -> Done<()> {
        self.controller.kill().await?;
        let state = rusqlite::Connection::open(self.home.join(&self.name).join("state.db"))?;
        let mut workers = state.prepare("SELECT pid FROM worker WHERE pid IS NOT NULL")?;
        for pid in workers.query_map((), |row| row.get(0))? {
            if let Some(group) = rustix::process::Pid::from_raw(pid?) {
                // It may have exited.
                rustix::process::kill_process_group(group, rustix::process::Signal::KILL).ok();
            }
        }
        let mut select = state.prepare("SELECT key FROM known_key")?;
        let keys = select.query_map((), |row| row.get(0))?.collect::<Result<Vec<String>, _>>()?;
        for queue in keys.iter().map(|key| self.queue(key)).chain([format!("{}-orphan", self.name)]) {
            self.channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
        }
        Ok(())
    }
}

/// What makes a controller start workers that echo, and a worker's configuration beside it.
fn worker(folder: &Path) -> Done<String> {
    let config = folder.join("worker.toml");
    std::fs::write(
        &config,
        format!("[worker]\nwork_dir = \"{}\"\n[host]\nmetadata_service = \"off\"\n{ECHO}", folder.display()),
    )?;
    let script = format!(
        "exec {} worker --config {} --work-dir {}/$WORKER_ID",
        env!("CARGO_BIN_EXE_journeyman"),
        config.display(),
        folder.display()
    );
    Ok(format!("command = [\"/bin/sh\", \"-c\", '{script}']\n"))
}

/// A handler that answers at once.
const ECHO: &str = r#"[handler.echo]
kind = "program"
exec = ["/bin/sh", "-c", 'printf "{\"type\":\"answer\",\"json\":null}\n" >&3']
"#;

/// So many messages, each under a key, by an exchange.
async fn publish(channel: &Channel, exchange: &str, keys: impl Iterator<Item = String>) -> Done<()> {
    let mut under_way = JoinSet::new();
    for (number, key) in keys.enumerate() {
        if under_way.len() >= WINDOW
            && let Some(ended) = under_way.join_next().await
        {
            ended??;
        }
        let (channel, exchange) = (channel.clone(), exchange.to_owned());
        under_way.spawn(async move {
            let text = |text: &str| AMQPValue::LongString(text.into());
            let headers = header_table([("x-worker-id", text("bench")), ("x-event", text("request-received"))]);
            let properties =
                BasicProperties::default().with_correlation_id(number.to_string().into()).with_headers(headers);
            let options = BasicPublishOptions::default();
            channel.basic_publish(exchange.into(), key.into(), options, b"null", properties).await?.await?;
            Done::Ok(())
        });
    }
    while let Some(ended) = under_way.join_next().await {
        ended??;
    }
    Ok(())
}

/// How long it takes to start so many processes of the kind that a worker stands for.
fn spawned(count: usize) -> Done<Duration> {
    let began = now();
    let mut children = Vec::with_capacity(count);
    for _ in 0..count {
        children.push(Command::new("/bin/sleep").arg("600").kill_on_drop(true).spawn()?);
    }
    let took = now() - began;
    drop(children);
    Ok(took)
}

fn none_lost(lost: usize) -> Done<()> {
    if lost == 0 { Ok(()) } else { Err(format!("{lost} requests are lost").into()) }
}
