//! The controller: what it adds to a call, and what its queues cost. It is `journeyman controller`, with `journeyman worker`
//! under it, on a broker of the run's own. Every request is accounted for.

use std::process::Stdio;
use std::time::Duration;

use futures_util::{TryStreamExt as _, stream};
use journeyman::client::{RpcClient, RpcRequest};
use journeyman_platform::amqp::lapin::options::{ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions};
use journeyman_platform::amqp::lapin::types::FieldTable;
use journeyman_platform::amqp::lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use serde_json::Value;
use tokio::process::{Child, Command};
use tokio::time::sleep;

use crate::lapin_alone::{body, broker as library_broker};
use crate::machine::{Row, Spans, millis, now};
use crate::programs::{Broker, Program, TIMEOUT, until};
use crate::requests::{WINDOW, publish};
use crate::{Lab, Outcome};

impl Lab {
    pub(crate) async fn controller(&self) -> Outcome<Vec<Row>> {
        let Some(broker) = Broker::start(self)? else { return Ok(Vec::new()) };
        Ok(vec![
            self.cold_calls(&broker).await?,
            self.new_keys(&broker).await?,
            self.orphans(&broker).await?,
            self.tracked(&broker).await?,
            self.takeover(&broker).await?,
        ])
    }

    /// A call under a new key, beside a worker that is started by hand for a queue with a request in it.
    async fn cold_calls(&self, broker: &Broker) -> Outcome<Row> {
        let count = self.pick(40, 2);
        let config = self.path().join("worker.toml");
        std::fs::write(&config, format!("[worker]\nwork_dir = \"{}\"\n{ECHO}", self.path().display()))?;
        let script = format!(
            "exec {} worker --config {} --work-dir {}/$WORKER_ID",
            env!("CARGO_BIN_EXE_journeyman"),
            config.display(),
            self.path().display()
        );
        let pool = Pool::start(self, broker, &format!("command = [\"/bin/sh\", \"-c\", '{script}']\n")).await?;
        let (mut cold, mut bare) = (Vec::new(), Vec::new());
        for number in 0..count {
            let began = now();
            pool.call(&pool.exchange("req"), &format!("cold-{number}")).await?;
            cold.push(now() - began);
            bare.push(pool.start_by_hand(broker, &script, &format!("bare-{number}")).await?);
        }
        pool.stop().await?;
        let (cold, bare) = (Spans::new(cold), Spans::new(bare));
        let more = |hundredths| cold.percentile(hundredths).as_secs_f64() - bare.percentile(hundredths).as_secs_f64();
        Ok(Row {
            figure: format!("call under a new key, subprocess: p50 and p99; 0 of {count} lost"),
            reached: format!("{}, {:+.1} and {:+.1} ms", cold.pair(50, 99), more(50) * 1e3, more(99) * 1e3),
            aim: "≤ +10 ms",
            limit: format!("{} from a process's start to its reply", bare.pair(50, 99)),
        })
    }

    /// Until each request is in its queue and a process was started for each key.
    async fn new_keys(&self, broker: &Broker) -> Outcome<Row> {
        let count = self.pick(300, 10);
        let pool = Pool::start(self, broker, "command = [\"/bin/sleep\", \"600\"]\n").await?;
        let began = now();
        let keys: Vec<String> = (0..count).map(|number| format!("new-{number}")).collect();
        pool.publish("req", keys.iter()).await?;
        pool.until("orphans_forwarded", count).await?;
        let forwarded = now() - began;
        pool.until("workers_started", count).await?;
        let started = now() - began;
        pool.none_lost(&keys, 1).await?;
        pool.stop().await?;
        let began = now();
        let spawn = |_| Command::new("/bin/sleep").arg("600").kill_on_drop(true).spawn();
        let children = (0..count).map(spawn).collect::<Result<Vec<Child>, _>>()?;
        let bare = now() - began;
        drop(children);
        Ok(Row {
            figure: format!("{count} new keys at once: each request in its queue, each process started; 0 lost"),
            reached: format!("{} and {}", millis(forwarded), millis(started)),
            aim: "",
            limit: format!("{} to start as many processes one after the other", millis(bare)),
        })
    }

    /// Requests at the orphan exchange whose queues exist, so that only forwarding is measured.
    async fn orphans(&self, broker: &Broker) -> Outcome<Row> {
        let count = self.pick(20_000, 200);
        let pool = Pool::start(self, broker, "").await?;
        let keys: Vec<String> = (0..10).map(|number| format!("orphan-{number}")).collect();
        pool.publish("req", keys.iter()).await?;
        pool.until("orphans_forwarded", keys.len()).await?;
        let began = now();
        pool.publish("orphan", keys.iter().cycle().take(count)).await?;
        let published = now() - began;
        pool.until("orphans_forwarded", keys.len() + count).await?;
        let took = now() - began;
        pool.none_lost(&keys, u32::try_from(count / keys.len() + 1)?).await?;
        pool.stop().await?;
        Ok(Row {
            figure: format!("orphans forwarded, each confirmed, {count} under {} keys; 0 lost", keys.len()),
            reached: format!("{:.0} /s", count as f64 / took.as_secs_f64()),
            aim: "",
            limit: format!("{:.0} /s published and confirmed by lapin alone", count as f64 / published.as_secs_f64()),
        })
    }

    /// Groups without requests.
    async fn tracked(&self, broker: &Broker) -> Outcome<Row> {
        let (count, lasting) = (self.pick(1_000, 20), self.pick(20, 1));
        let pool = Pool::start(self, broker, "").await?;
        let before = pool.program.usage()?;
        let keys: Vec<String> = (0..count).map(|number| format!("idle-{number}")).collect();
        pool.publish("req", keys.iter()).await?;
        pool.until("orphans_forwarded", count).await?;
        let (at, from) = (now(), pool.program.usage()?);
        sleep(Duration::from_secs(lasting)).await;
        let (to, span) = (pool.program.usage()?, now() - at);
        let groups = pool.status().await?["groups"].as_array().map_or(0, Vec::len);
        pool.stop().await?;
        if groups != count {
            return Err(format!("{groups} of {count} groups are tracked").into());
        }
        let share = (to.cpu - from.cpu).as_secs_f64() * 100.0 / span.as_secs_f64();
        Ok(Row {
            figure: format!("{count} groups without requests, over {lasting} s; 0 lost"),
            reached: format!("{share:.2} % CPU, {:.1} MB", to.megabytes()),
            aim: "",
            limit: format!("{:.1} MB without a group", before.megabytes()),
        })
    }

    /// The time from the kill of a controller until its standby is active.
    async fn takeover(&self, broker: &Broker) -> Outcome<Row> {
        let rounds = self.pick(10, 1);
        let mut spans = Vec::new();
        for _ in 0..rounds {
            let mut first = Pool::start(self, broker, "").await?;
            let second = Pool::named(self, broker, "", &first.name).await?;
            second.has_role("standby").await?;
            let began = now();
            first.program.child.kill().await?;
            second.has_role("active").await?;
            spans.push(now() - began);
            let keys = ["after".to_owned()];
            second.publish("req", keys.iter()).await?;
            second.until("orphans_forwarded", 1).await?;
            second.none_lost(&keys, 1).await?;
            second.stop().await?;
        }
        let spans = Spans::new(spans);
        Ok(Row {
            figure: format!("takeover after the controller was killed: p50 and p99 of {rounds}; 0 lost"),
            reached: spans.pair(50, 99),
            aim: "≤ 5 s",
            limit: String::new(),
        })
    }
}

/// A pool of its own and its controller.
pub(crate) struct Pool {
    name: String,
    program: Program,
    status_url: String,
    http: reqwest::Client,
    client: RpcClient,
    channel: Channel,
    _connection: Connection,
}

impl Pool {
    pub(crate) async fn start(lab: &Lab, broker: &Broker, more: &str) -> Outcome<Self> {
        let pool = Self::named(lab, broker, more, &format!("p{}", uuid::Uuid::new_v4().simple())).await?;
        pool.has_role("active").await?;
        Ok(pool)
    }

    async fn named(lab: &Lab, broker: &Broker, more: &str, name: &str) -> Outcome<Self> {
        let config = format!(
            "[http]\nlisten = \"127.0.0.1:0\"\n[pool.{name}]\nstate_dir = \"@HOME@\"\nunbind_delay = \"30m\"\n\
             termination_grace = \"1s\"\n{more}"
        );
        let program = Program::start(lab, "controller", &config, &[("WORKER_AMQP_URI", &broker.uri)])?;
        let line = program.logged("http://").await?;
        let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next()).unwrap_or_default();
        let connection = Connection::connect(&broker.uri, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(Self {
            name: name.to_owned(),
            status_url: format!("http://{address}/status.json"),
            program,
            http: reqwest::Client::builder().no_proxy().build()?,
            client: RpcClient::new(library_broker(&broker.uri)?, "bench"),
            channel,
            _connection: connection,
        })
    }

    fn exchange(&self, kind: &str) -> String {
        format!("{}-{kind}-xchg", self.name)
    }

    /// The queue of a key of letters, digits and `-`.
    fn queue(&self, key: &str) -> String {
        format!("{}-req-{}", self.name, key.replace('-', "%2D"))
    }

    async fn status(&self) -> Outcome<Value> {
        let status: Value = self.http.get(&self.status_url).send().await?.json().await?;
        Ok(status["pools"][0].clone())
    }

    pub(crate) async fn until(&self, counter: &str, count: usize) -> Outcome<()> {
        until(counter, async || Ok(self.status().await?["counters"][counter].as_u64() >= Some(count as u64))).await
    }

    async fn has_role(&self, role: &str) -> Outcome<()> {
        until(role, async || Ok(self.status().await?["role"] == role)).await
    }

    /// Publishes one message under each key, confirmed.
    pub(crate) async fn publish(&self, kind: &str, keys: impl Iterator<Item = &String>) -> Outcome<()> {
        let exchange = self.exchange(kind);
        let request = async |(number, key): (usize, &String)| {
            let properties = BasicProperties::default().with_correlation_id(number.to_string().into());
            publish(&self.channel, &exchange, key, properties, b"null").await
        };
        stream::iter(keys.enumerate().map(Ok)).try_for_each_concurrent(WINDOW, request).await
    }

    async fn call(&self, exchange: &str, key: &str) -> Outcome<()> {
        let (exchange, routing_key) = (exchange.to_owned(), key.to_owned());
        let call = RpcRequest { exchange, routing_key, body: body(), timeout: TIMEOUT, ..RpcRequest::default() };
        let reply = self.client.call(&call).await?;
        if reply.is_ok() { Ok(()) } else { Err(format!("{reply:?}").into()) }
    }

    /// From the start of a worker's process until it has answered the request in its queue.
    async fn start_by_hand(&self, broker: &Broker, script: &str, key: &str) -> Outcome<Duration> {
        let queue = self.queue(key);
        self.channel
            .queue_declare(queue.as_str().into(), QueueDeclareOptions::default(), FieldTable::default())
            .await?;
        let call = RpcRequest { routing_key: queue.clone(), body: body(), timeout: TIMEOUT, ..RpcRequest::default() };
        let mut replies = self.client.stream(&call).await?;
        let began = now();
        let mut worker = Command::new("/bin/sh")
            .args(["-c", script])
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("WORKER_ID", key)
            .env("WORKER_KEY", key)
            .env("WORKER_POOL", &self.name)
            .env("WORKER_REQUESTS_QUEUE", &queue)
            .env("WORKER_ACTIVITY_EXCHANGE", self.exchange("activity"))
            .env("WORKER_AMQP_URI", &broker.uri)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        while let Some(reply) = replies.next().await {
            if !reply?.is_ok() {
                return Err("a request failed".into());
            }
        }
        let took = now() - began;
        worker.kill().await?;
        self.channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
        Ok(took)
    }

    async fn none_lost(&self, keys: &[String], each: u32) -> Outcome<()> {
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        for key in keys {
            let queue = self.channel.queue_declare(self.queue(key).into(), options, FieldTable::default()).await?;
            if queue.message_count() < each {
                return Err(format!("{} of {each} requests are in the queue of {key}", queue.message_count()).into());
            }
        }
        Ok(())
    }

    /// Stops the controller's workers by taking their groups away, then the controller.
    pub(crate) async fn stop(mut self) -> Outcome<()> {
        let groups = self.status().await?["groups"].as_array().cloned().unwrap_or_default();
        let workers = groups.iter().flat_map(|group| group["worker_list"].as_array().into_iter().flatten());
        let pids: Vec<i32> = workers.filter_map(|worker| i32::try_from(worker["pid"].as_i64()?).ok()).collect();
        self.program.child.kill().await?;
        for group in pids.into_iter().filter_map(rustix::process::Pid::from_raw) {
            // It may have exited by itself.
            rustix::process::kill_process_group(group, rustix::process::Signal::KILL).ok();
        }
        let keys = groups.iter().filter_map(|group| group["key"].as_str());
        for queue in keys.map(|key| self.queue(key)).chain([format!("{}-orphan", self.name)]) {
            self.channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
        }
        Ok(())
    }
}

/// A handler that replies at once.
const ECHO: &str = r#"[host]
metadata_service = "off"
[handler.echo]
kind = "program"
exec = ["/bin/sh", "-c", 'printf "{\"type\":\"answer\",\"json\":null}\n" >&3']
"#;
