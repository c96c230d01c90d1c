//! What workers, a controller and notifiers cost what they stand on: connections, calls and memory at rest, and what a task or an event
//! adds. Each is measured in several sizes, so that the cost of one more can be read from the rows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use journeyman::source::zookeeper::Dialect;
use journeyman::task::formats::new_task_id;
use journeyman_platform::amqp::lapin::options::{ExchangeDeclareOptions, QueueDeclareOptions, QueueDeleteOptions};
use journeyman_platform::amqp::lapin::types::FieldTable;
use journeyman_platform::amqp::lapin::{Connection, ConnectionProperties, ExchangeKind};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::controller::Pool;
use crate::machine::{Row, Usage};
use crate::notifier::{Notifier, Receiver, endpoint, listening};
use crate::programs::{Broker, Ensemble, Postgres, Program, QUEUE, Queue, until};
use crate::support::task_queue::shell;
use crate::zookeeper::Backlog;
use crate::{Lab, Outcome};

const HOST: &str = "[host]\nmetadata_service = \"off\"\n";

impl Lab {
    pub(crate) async fn scale(&self) -> Outcome<Vec<Row>> {
        let (sizes, mut rows) = (self.pick(vec![1, 10, 100], vec![1, 2]), Vec::new());
        for dialect in ["claim-work", "azure"] {
            for size in &sizes {
                rows.push(self.workers_of_a_taskcluster(dialect, *size).await?);
            }
        }
        if let Some(broker) = Broker::start(self)?.filter(|broker| broker.management.is_some()) {
            for size in &sizes {
                rows.push(self.workers_of_a_rabbitmq(&broker, *size).await?);
            }
            for size in &sizes {
                rows.push(self.groups_of_a_rabbitmq(&broker, *size).await?);
            }
        }
        if let Some(ensemble) = Ensemble::start(self)? {
            for size in &sizes {
                rows.push(self.workers_of_a_zookeeper(&ensemble, *size).await?);
            }
        }
        if let Some(postgres) = Postgres::start(self)? {
            for size in sizes.iter().filter(|size| **size <= 10) {
                rows.push(self.notifiers_of_a_postgres(&postgres, *size).await?);
            }
        }
        Ok(rows)
    }

    /// Statistics of services are some seconds old.
    async fn settle(&self) {
        sleep(self.pick(Duration::from_secs(8), Duration::from_secs(1))).await;
    }

    /// Waits, and says for how many seconds.
    async fn at_rest(&self) -> f64 {
        let seconds = self.pick(30, 1);
        sleep(Duration::from_secs(seconds)).await;
        seconds as f64
    }

    async fn workers_of_a_taskcluster(&self, dialect: &str, count: usize) -> Outcome<Row> {
        let queue = Queue::start(self, "20m").await?;
        let pid = queue.program.child.id().ok_or("the queue has exited")?;
        let wire = CountingWire::to(queue.root_url.trim_start_matches("http://")).await?;
        let before = Usage::of(pid)?;
        let more = format!("{HOST}[worker]\nstatus_poll_interval = \"0s\"");
        let start = |_| Program::worker(self, dialect, &wire.root_url, &[QUEUE.to_owned()], &more);
        let workers = (0..count).map(start).collect::<Outcome<Vec<_>>>()?;
        for worker in &workers {
            worker.control().await?;
        }
        self.settle().await;
        let (calls, from) = (wire.calls(), Usage::of(pid)?);
        let seconds = self.at_rest().await;
        let (resting, connections, to) = (wire.calls() - calls, wire.open(), Usage::of(pid)?);
        let (tasks, calls) = (self.pick(200, 5), wire.calls());
        let ids = queue.create(tasks, &shell("exit 0")).await?;
        let are_completed = async || {
            sleep(Duration::from_millis(200)).await;
            Ok(queue.completed_once(&ids).await.is_ok())
        };
        until("the end of the tasks", are_completed).await?;
        Ok(Row {
            figure: format!("workers of a Taskcluster, `{dialect}`, {count} idle; then {tasks} tasks"),
            reached: format!(
                "{connections} connections, {:.2} calls/s; {:.1} calls a task",
                resting as f64 / seconds,
                (wire.calls() - calls) as f64 / tasks as f64
            ),
            aim: "",
            limit: format!(
                "queue {:.1} % CPU, {:.0} KiB a worker",
                percent(from, to, seconds),
                to.kib_above(before, count)
            ),
        })
    }

    /// Starts workers as a controller does, so that they report their activity.
    async fn workers_of_a_rabbitmq(&self, broker: &Broker, count: usize) -> Outcome<Row> {
        let connection = Connection::connect(&broker.uri, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        let pool = new_task_id();
        let queue = format!("{pool}-req-scale");
        let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(queue.as_str().into(), options, FieldTable::default()).await?;
        let exchange = ExchangeDeclareOptions { auto_delete: true, ..ExchangeDeclareOptions::default() };
        let activity = format!("{pool}-activity-xchg").into();
        channel.exchange_declare(activity, ExchangeKind::Fanout, exchange, FieldTable::default()).await?;
        let before = self.broker_totals(broker).await?;
        let start = |number| {
            let config = format!(
                "{HOST}[worker]\nid = \"w{number}\"\nwork_dir = \"@HOME@/work\"\n[source.requests]\nkind = \"amqp\"\nhandler = \"command\"\n"
            );
            let env =
                [("WORKER_AMQP_URI", broker.uri.as_str()), ("WORKER_POOL", pool.as_str()), ("WORKER_KEY", "scale")];
            Program::start(self, "worker", &config, &env)
        };
        let workers = (0..count).map(start).collect::<Outcome<Vec<_>>>()?;
        let all_consume = async || {
            let options = QueueDeclareOptions { passive: true, ..options };
            let found = channel.queue_declare(queue.as_str().into(), options, FieldTable::default()).await?;
            Ok(found.consumer_count() as usize == count)
        };
        until("a consumer of each worker", all_consume).await?;
        let row = self.broker_row(broker, &before, format!("workers of a RabbitMQ, {count} idle"), count).await?;
        drop(workers);
        channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await?;
        connection.close(200, "done".into()).await?;
        Ok(row)
    }

    async fn groups_of_a_rabbitmq(&self, broker: &Broker, count: usize) -> Outcome<Row> {
        let before = self.broker_totals(broker).await?;
        let pool = Pool::start(self, broker, "").await?;
        let keys: Vec<String> = (0..count).map(|number| format!("scale-{number}")).collect();
        pool.publish("req", keys.iter()).await?;
        pool.until("orphans_forwarded", count).await?;
        let figure = format!("a controller beside a client, {count} groups with a request each");
        let row = self.broker_row(broker, &before, figure, count).await?;
        pool.stop().await?;
        Ok(row)
    }

    /// What is new at the broker, and what it does at rest.
    async fn broker_row(&self, broker: &Broker, before: &BrokerTotals, figure: String, count: usize) -> Outcome<Row> {
        let port = broker.uri.rsplit(':').next().and_then(|rest| rest.split('/').next()).ok_or("no port")?;
        let pid = listening(port.parse()?)?;
        let (totals, from) = (self.broker_totals(broker).await?, Usage::of(pid)?);
        let seconds = self.at_rest().await;
        let share = percent(from, Usage::of(pid)?, seconds);
        Ok(Row {
            figure,
            reached: format!(
                "{} connections, {} channels, {} queues; {:.0} KiB at the broker each",
                totals.connections - before.connections,
                totals.channels - before.channels,
                totals.queues - before.queues,
                (totals.memory - before.memory) as f64 / 1024.0 / count as f64
            ),
            aim: "",
            limit: format!("broker {share:.1} % CPU, {} descriptors", totals.descriptors_max),
        })
    }

    async fn broker_totals(&self, broker: &Broker) -> Outcome<BrokerTotals> {
        self.settle().await;
        let management = broker.management.as_deref().ok_or("no management interface")?;
        let http = reqwest::Client::builder().no_proxy().build()?;
        let get = async |what: &str| -> Outcome<Value> {
            Ok(http.get(format!("{management}/api/{what}")).send().await?.error_for_status()?.json().await?)
        };
        let (overview, nodes) = (get("overview").await?, get("nodes").await?);
        let total = |name: &str| overview["object_totals"][name].as_i64().unwrap_or_default();
        Ok(BrokerTotals {
            connections: total("connections"),
            channels: total("channels"),
            queues: total("queues"),
            memory: nodes[0]["mem_used"].as_i64().unwrap_or_default(),
            descriptors_max: nodes[0]["fd_total"].as_i64().unwrap_or_default(),
        })
    }

    async fn workers_of_a_zookeeper(&self, ensemble: &Ensemble, count: usize) -> Outcome<Row> {
        let mut backlog = Backlog::of(ensemble, Dialect::Native, 0).await?;
        let server = &ensemble.servers;
        let pid = listening(server.rsplit(':').next().ok_or("no port")?.parse()?)?;
        let before = ZooKeeperTotals::of(server).await?;
        let start = |number| {
            let config = format!(
                "{HOST}[worker]\nid = \"w{number}\"\nwork_dir = \"@HOME@/work\"\n[source.tasks]\nkind = \"zookeeper\"\n\
                 dialect = \"native\"\nconnect = \"{server}\"\nchroot = \"{}\"\nqueue = \"{}\"\nhandler = \"command\"\n",
                backlog.connect.chroot.as_deref().unwrap_or_default(),
                backlog.queue.root()
            );
            Program::start(self, "worker", &config, &[])
        };
        let workers = (0..count).map(start).collect::<Outcome<Vec<_>>>()?;
        for worker in &workers {
            // Connections are no measure: other programs may use the ensemble.
            let control = worker.control().await?;
            let has_polled = async || Ok(control.status().await?.snapshot.sources.iter().all(|source| source.is_up()));
            until("a session of each worker", has_polled).await?;
        }
        self.settle().await;
        let (rested, from) = (ZooKeeperTotals::of(server).await?, Usage::of(pid)?);
        let seconds = self.at_rest().await;
        let (idle, to) = (ZooKeeperTotals::of(server).await?, Usage::of(pid)?);
        let tasks = self.pick(200, 5);
        backlog.ids = backlog.add(tasks).await?;
        backlog.falls_to(0).await?;
        let after = ZooKeeperTotals::of(server).await?;
        drop(workers);
        backlog.remove().await?;
        let a_task = |from: i64, to: i64| (to - from) as f64 / tasks as f64;
        Ok(Row {
            figure: format!("workers of a ZooKeeper, `native`, {count} idle; then {tasks} tasks"),
            reached: format!(
                "{} connections, {} watches, {:.2} packets/s; {:.0} received and {:.0} sent a task",
                idle.connections - before.connections,
                idle.watches - before.watches,
                (idle.received - rested.received) as f64 / seconds,
                a_task(idle.received, after.received),
                a_task(idle.sent, after.sent)
            ),
            aim: "",
            limit: format!("server {:.1} % CPU at rest", percent(from, to, seconds)),
        })
    }

    async fn notifiers_of_a_postgres(&self, postgres: &Postgres, count: usize) -> Outcome<Row> {
        let (url, folder, receiver) = (postgres.database().await?, self.fresh("postgres")?, Receiver::start().await?);
        std::fs::write(folder.join("url"), &url)?;
        let (file, ca) = (folder.join("url"), &postgres.ca);
        let store = format!("[notifier.postgres]\nurl_file = \"{}\"\nca_file = \"{ca}\"\n", file.display());
        let mut nodes = Vec::new();
        for _ in 0..count {
            nodes.push(Notifier::start(self, &store, &endpoint("bench", receiver.address, "bench")).await?);
        }
        self.settle().await;
        let (rested, from) = (DatabaseTotals::of(&url).await?, nodes[0].program.usage()?);
        let seconds = self.at_rest().await;
        let (idle, to) = (DatabaseTotals::of(&url).await?, nodes[0].program.usage()?);
        let events = self.pick(20_000, 500);
        nodes[0].publish("bench", 0..events, events / 10).await?;
        receiver.wait_for(events).await?;
        let busy = DatabaseTotals::of(&url).await?.connections;
        self.settle().await;
        let after = DatabaseTotals::of(&url).await?;
        Ok(Row {
            figure: format!("notifiers of a PostgreSQL, {count} idle; then {events} events in {} lanes", events / 10),
            reached: format!(
                "{} connections, {:.1} transactions/s, {busy} connections while busy; {:.2} transactions an event",
                idle.connections,
                (idle.transactions - rested.transactions) as f64 / seconds,
                (after.transactions - idle.transactions) as f64 / events as f64
            ),
            aim: "",
            limit: format!("{} connections; notifier {:.2} % CPU", idle.connections_max, percent(from, to, seconds)),
        })
    }
}

fn percent(from: Usage, to: Usage, seconds: f64) -> f64 {
    to.cpu.saturating_sub(from.cpu).as_secs_f64() * 100.0 / seconds
}

struct BrokerTotals {
    connections: i64,
    channels: i64,
    queues: i64,
    memory: i64,
    descriptors_max: i64,
}

struct ZooKeeperTotals {
    connections: i64,
    watches: i64,
    received: i64,
    sent: i64,
}

impl ZooKeeperTotals {
    async fn of(server: &str) -> Outcome<Self> {
        let (mut stream, mut text) = (TcpStream::connect(server).await?, String::new());
        stream.write_all(b"mntr").await?;
        stream.read_to_string(&mut text).await?;
        let value = |name: &str| {
            let found = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<i64>().ok());
            found.ok_or_else(|| format!("no {name} in {text:?}"))
        };
        Ok(Self {
            connections: value("zk_num_alive_connections")?,
            watches: value("zk_watch_count")?,
            received: value("zk_packets_received")?,
            sent: value("zk_packets_sent")?,
        })
    }
}

struct DatabaseTotals {
    connections: i64,
    connections_max: String,
    transactions: i64,
}

impl DatabaseTotals {
    /// Without the connection that asks.
    async fn of(url: &str) -> Outcome<Self> {
        let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
        let asking = async {
            let totals =
                "SELECT numbackends::bigint - 1, xact_commit FROM pg_stat_database WHERE datname = current_database()";
            let (totals, max) =
                (client.query_one(totals, &[]).await?, client.query_one("SHOW max_connections", &[]).await?);
            Outcome::Ok(Self { connections: totals.get(0), transactions: totals.get(1), connections_max: max.get(0) })
        };
        tokio::select! {
            totals = asking => totals,
            ended = connection => Err(format!("the connection has ended: {ended:?}").into()),
        }
    }
}

/// Carries connections to a server and counts the calls of HTTP/1.1 in them.
struct CountingWire {
    root_url: String,
    counts: Arc<Counts>,
    _tasks: JoinSet<()>,
}

#[derive(Default)]
struct Counts {
    calls: AtomicU64,
    open: AtomicU64,
}

impl CountingWire {
    async fn to(server: &str) -> Outcome<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let root_url = format!("http://{}", listener.local_addr()?);
        let (counts, mut tasks, server) = (Arc::<Counts>::default(), JoinSet::new(), server.to_owned());
        let counted = Arc::clone(&counts);
        tasks.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((near, _)) = listener.accept().await {
                let (counted, server) = (Arc::clone(&counted), server.clone());
                open.spawn(async move {
                    counted.open.fetch_add(1, Ordering::Relaxed);
                    carry(near, &server, &counted).await.ok();
                    counted.open.fetch_sub(1, Ordering::Relaxed);
                });
            }
        });
        Ok(Self { root_url, counts, _tasks: tasks })
    }

    fn calls(&self) -> u64 {
        self.counts.calls.load(Ordering::Relaxed)
    }

    fn open(&self) -> u64 {
        self.counts.open.load(Ordering::Relaxed)
    }
}

async fn carry(near: TcpStream, server: &str, counts: &Counts) -> std::io::Result<()> {
    let far = TcpStream::connect(server).await?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let ((mut near_in, mut near_out), (mut far_in, mut far_out)) = (near.into_split(), far.into_split());
    let calls = async {
        let mut piece = vec![0; 64 << 10];
        loop {
            let length = near_in.read(&mut piece).await?;
            if length == 0 {
                return far_out.shutdown().await;
            }
            // A client writes the head of a call at once.
            let heads = piece[..length].windows(11).filter(|window| window == b" HTTP/1.1\r\n").count();
            counts.calls.fetch_add(heads as u64, Ordering::Relaxed);
            far_out.write_all(&piece[..length]).await?;
        }
    };
    tokio::select! {
        ended = calls => ended,
        ended = copy(&mut far_in, &mut near_out) => ended.map(drop),
    }
}
