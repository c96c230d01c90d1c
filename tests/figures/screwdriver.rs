//! Messages of a Screwdriver: what the start and the check of a build cost a worker, with stand-ins for the cluster and for the
//! build API.

use std::collections::HashMap;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Json, Path, State};
use axum::routing::put;
use futures_util::{TryStreamExt as _, stream};
use jiff::Timestamp;
use journeyman::task::formats::new_task_id;
use journeyman_platform::amqp::header_table;
use journeyman_platform::amqp::lapin::options::{
    ConfirmSelectOptions, ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions,
    QueueDeleteOptions,
};
use journeyman_platform::amqp::lapin::types::{AMQPValue, FieldTable};
use journeyman_platform::amqp::lapin::{BasicProperties, Channel, Connection, ConnectionProperties, ExchangeKind};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::delays::remove_delays;
use crate::machine::Row;
use crate::programs::{Broker, Program, until};
use crate::requests::{WINDOW, publish};
use crate::support::cluster::{Cluster, NAMESPACE};
use crate::{Lab, Outcome};

/// As many messages as the existing worker prefetches from one queue.
const CAPACITY: usize = 20;
/// The worker's own checks arrive after the end of the measurement.
const DELAY_MS: u64 = 3_600_000;
/// The token of a build is as long.
const TOKEN_BYTES: usize = 600;
const EXISTING: &str = "1 CPU-second, 112 MB in a process each by Screwdriver's own worker";

impl Lab {
    pub(crate) async fn screwdriver(&self) -> Outcome<Vec<Row>> {
        let Some(broker) = Broker::start(self)? else { return Ok(Vec::new()) };
        let count = self.pick(500, 20);
        let (queues, cluster, api) =
            (Queues::declare(&broker).await?, Cluster::start().await, BuildApi::start().await?);
        let kubeconfig = cluster.kubeconfig(&self.fresh("cluster")?);
        let config = format!(
            "[host]\nmetadata_service = \"off\"\n[worker]\ncapacity = {CAPACITY}\nwork_dir = \"@HOME@/work\"\n\
             [source.builds]\nkind = \"screwdriver\"\nmain_queue = \"{main}\"\nretry_queue = \"{retry}\"\n\
             exchange = \"{exchange}\"\nnamespace = \"{NAMESPACE}\"\nkubeconfig = \"{kubeconfig}\"\n\
             ui = \"http://ui\"\nstore = \"http://store\"\nlimits = {{ delay = \"{DELAY_MS}ms\", delay_step = \"0s\" }}\n",
            main = queues.main,
            retry = queues.retry,
            exchange = queues.exchange,
            kubeconfig = kubeconfig.display(),
        );
        let worker = Program::start(self, "worker", &config, &[("JOURNEYMAN_AMQP_URI", &broker.uri)])?;
        let client = worker.control().await?;
        let ended = async || Outcome::Ok(client.status().await?.snapshot.counts.sources.outcomes);
        let round = async |first: usize, last: usize| {
            let builds = || first..last;
            let before = worker.usage()?;
            queues.publish_all("start", &api, builds()).await?;
            until("the start of every build", async || Ok(ended().await?.deferred == last as u64)).await?;
            let started = worker.usage()?;
            run_pods(&cluster)?;
            let running = worker.usage()?;
            queues.publish_all("verify", &api, builds()).await?;
            until("the check of every build", async || Ok(ended().await?.completed == last as u64)).await?;
            Outcome::Ok([(before, started), (running, worker.usage()?)])
        };
        // What the first ones need for all is no part of the cost.
        let warm_up = count / 10;
        round(0, warm_up).await?;
        let all = warm_up + count;
        let costs = round(warm_up, all).await?;
        queues.hold_checks_only(all).await?;
        api.was_told_once(all)?;
        if cluster.pods().len() != all || cluster.count_calls("create", "pods") != all {
            return Err(format!("{} pods were made of {all} builds", cluster.count_calls("create", "pods")).into());
        }
        drop(worker);
        queues.remove().await?;
        let rows = ["starts", "checks"].into_iter().zip(costs).map(|(what, (before, after))| Row {
            figure: format!("{count} {what} of Screwdriver's builds by one worker: CPU and memory each; 0 lost"),
            reached: format!(
                "{:.2} ms, {:.1} KiB",
                (after.cpu - before.cpu).as_secs_f64() * 1e3 / count as f64,
                after.kib_above(before, count)
            ),
            aim: "≤ 5 ms, ≤ 20 KiB",
            limit: EXISTING.to_owned(),
        });
        Ok(rows.collect())
    }
}

/// Lets the pods run that do not yet.
fn run_pods(cluster: &Cluster) -> Outcome<()> {
    for pod in cluster.pods().iter().filter(|pod| pod["spec"]["nodeName"].is_null()) {
        let name = pod["metadata"]["name"].as_str().ok_or("a pod without a name")?;
        cluster.schedule(name, "node-1");
        cluster.running(name);
    }
    Ok(())
}

/// The exchange and the queues of a Screwdriver.
struct Queues {
    _connection: Connection,
    channel: Channel,
    exchange: String,
    main: String,
    retry: String,
}

impl Queues {
    async fn declare(broker: &Broker) -> Outcome<Self> {
        let connection = Connection::connect(&broker.uri, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        let exchange = format!("build-{}", new_task_id());
        let (main, retry) = (format!("{exchange}-main"), format!("{exchange}-retry"));
        let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        channel.exchange_declare(exchange.as_str().into(), ExchangeKind::Topic, options, FieldTable::default()).await?;
        for name in [&main, &retry] {
            let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
            let arguments = header_table([("x-max-priority", AMQPValue::LongInt(3))]);
            channel.queue_declare(name.as_str().into(), options, arguments).await?;
            let (queue, options) = (name.as_str(), QueueBindOptions::default());
            channel
                .queue_bind(queue.into(), exchange.as_str().into(), queue.into(), options, FieldTable::default())
                .await?;
        }
        Ok(Self { _connection: connection, channel, exchange, main, retry })
    }

    /// Publishes as Screwdriver's queue service and its own worker do.
    async fn publish_all(&self, job: &str, api: &BuildApi, builds: std::ops::Range<usize>) -> Outcome<()> {
        let send = async |build: usize| {
            let message = message(job, build, &api.url).to_string();
            let properties =
                BasicProperties::default().with_delivery_mode(2).with_content_type("application/json".into());
            if job == "start" {
                return publish(&self.channel, &self.exchange, &self.main, properties, message.as_bytes()).await;
            }
            let headers = header_table([
                ("x-build-start-time", AMQPValue::LongLongInt(Timestamp::now().as_millisecond())),
                ("x-retry-count", AMQPValue::LongInt(0)),
            ]);
            let properties = properties.with_headers(headers);
            publish(&self.channel, &self.exchange, &self.retry, properties, message.as_bytes()).await
        };
        stream::iter(builds.map(Ok)).try_for_each_concurrent(WINDOW, send).await
    }

    /// Fails unless the worker's own checks, and nothing else, are left.
    async fn hold_checks_only(&self, count: usize) -> Outcome<()> {
        let checks = format!("{}.delay.{DELAY_MS}ms", self.retry);
        for (name, expected) in [(&self.main, 0), (&self.retry, 0), (&checks, count)] {
            let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
            let queue = self.channel.queue_declare(name.as_str().into(), options, FieldTable::default()).await?;
            if queue.message_count() as usize != expected {
                return Err(format!("{name} holds {} messages and not {expected}", queue.message_count()).into());
            }
        }
        Ok(())
    }

    async fn remove(self) -> Outcome<()> {
        remove_delays(&self.channel, &self.retry, &[DELAY_MS]).await?;
        for name in [&self.main, &self.retry] {
            self.channel.queue_delete(name.as_str().into(), QueueDeleteOptions::default()).await?;
        }
        let exchange = self.exchange.as_str().into();
        Ok(self.channel.exchange_delete(exchange, ExchangeDeleteOptions::default()).await?)
    }
}

/// Screwdriver publishes it so.
fn message(job: &str, build: usize, api: &str) -> Value {
    json!({ "job": job, "buildConfig": {
        "jobId": 2222, "jobName": "main", "jobState": "ENABLED", "jobArchived": false, "eventId": 777,
        "annotations": { "screwdriver.cd/executor": "k8s" }, "blockedBy": [2222], "pipelineId": 111,
        "pipeline": { "id": 111, "name": "org/repo", "scmContext": "github:github.com" }, "isPR": false,
        "apiUri": api, "buildId": build, "container": "registry/tool:1", "token": "e".repeat(TOKEN_BYTES),
        "enqueueTime": Timestamp::now().to_string(),
    } })
}

type Updates = Arc<Mutex<HashMap<usize, Vec<Value>>>>;

/// The build API, which accepts everything.
struct BuildApi {
    url: String,
    updates: Updates,
    _server: JoinSet<std::io::Result<()>>,
}

impl BuildApi {
    async fn start() -> Outcome<Self> {
        let updates = Updates::default();
        let update = async |State(updates): State<Updates>, Path(build): Path<usize>, Json(body): Json<Value>| {
            updates.lock().entry(build).or_default().push(body);
            Json(json!({}))
        };
        let router = Router::new().route("/v4/builds/{id}", put(update)).with_state(Arc::clone(&updates));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let mut server = JoinSet::new();
        server.spawn(async move { axum::serve(listener, router).await });
        Ok(Self { url, updates, _server: server })
    }

    /// Fails unless each build waited for resources first, and had a node then.
    fn was_told_once(&self, count: usize) -> Outcome<()> {
        let updates = self.updates.lock();
        for build in 0..count {
            let told = updates.get(&build).map_or(&[][..], Vec::as_slice);
            let fine = matches!(told, [first, then] if first["statusMessage"].is_string() && then["stats"]["hostname"] == "node-1");
            if !fine {
                return Err(format!("of build {build} the API was told {told:?}").into());
            }
        }
        Ok(())
    }
}
