//! Events to webhooks on this machine: how many a second, how late beside endpoints that do not answer, what a lane costs, and how a
//! notifier starts with a backlog. Each message is counted where it arrives: one that is missing, or out of order, fails the run.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::routing::post;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use journeyman::task::formats::new_task_id;
use journeyman_platform::amqp::lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use journeyman_platform::amqp::lapin::types::FieldTable;
use journeyman_platform::amqp::lapin::{Connection, ConnectionProperties};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until};

use crate::machine::{Row, Spans, Usage, flushes, millis, now};
use crate::programs::{Broker, Postgres, Program, until};
use crate::support::task_queue::TOKEN;
use crate::{Lab, Outcome};

/// Events of one call.
const BATCH: usize = 100;
/// Calls, commits and bare webhooks at once.
const CALLS: usize = 8;
const COMMITS: usize = 16;
const ATTEMPTS: usize = 64;
const AIM: &str = "≥ 60 % of the smaller";
const DEAD: usize = 10;
/// What a person, a collector of metrics and a client ask for.
const READ: [&str; 5] = ["/", "/metrics", "/v1/status", "/v1/lanes", "/v1/attempts"];

/// What the receivers of one measurement have.
#[derive(Default)]
pub(crate) struct Arrived {
    /// The last number of each lane.
    lanes: HashMap<String, u64>,
    pub(crate) repeated: usize,
    out_of_order: usize,
    at: HashMap<usize, Duration>,
}

pub(crate) struct Receiver {
    pub(crate) address: SocketAddr,
    pub(crate) arrived: Arc<Mutex<Arrived>>,
    pub(crate) count: watch::Receiver<usize>,
    _serving: JoinSet<()>,
}

type Counting = (Arc<Mutex<Arrived>>, watch::Sender<usize>);

async fn receive(State(counting): State<Arc<Counting>>, headers: HeaderMap, body: Bytes) {
    let (arrived, count) = &*counting;
    let at = now();
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let (lane, seq) = (text("journeyman-lane"), text("journeyman-seq").parse().unwrap_or(0));
    let mut arrived = arrived.lock();
    let last = arrived.lanes.entry(lane).or_default();
    if seq <= *last {
        arrived.repeated += 1;
        return;
    }
    let has_gap = seq > *last + 1;
    *last = seq;
    arrived.out_of_order += usize::from(has_gap);
    if let Some(number) = serde_json::from_slice::<Value>(&body).ok().and_then(|body| body["data"]["n"].as_u64()) {
        arrived.at.insert(usize::try_from(number).unwrap_or_default(), at);
    }
    count.send_modify(|count| *count += 1);
}

impl Receiver {
    pub(crate) async fn start() -> Outcome<Self> {
        let (sender, count) = watch::channel(0);
        let arrived = Arc::<Mutex<Arrived>>::default();
        let router = Router::new().route("/hook", post(receive)).with_state(Arc::new((Arc::clone(&arrived), sender)));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let mut serving = JoinSet::new();
        serving.spawn(async move { axum::serve(listener, router).await.unwrap_or_default() });
        Ok(Self { address, arrived, count, _serving: serving })
    }

    pub(crate) async fn wait_for(&self, messages: usize) -> Outcome<()> {
        self.wait_for_all(messages).await?;
        let repeated = self.arrived.lock().repeated;
        if repeated > 0 { Err(format!("{repeated} repeated").into()) } else { Ok(()) }
    }

    /// The last of a lane may be repeated.
    pub(crate) async fn wait_for_all(&self, messages: usize) -> Outcome<()> {
        let mut count = self.count.clone();
        // A measurement is given up when nothing comes any more.
        loop {
            let before = *count.borrow_and_update();
            if before >= messages {
                break;
            }
            if tokio::time::timeout(Duration::from_secs(60), count.changed()).await.is_err() {
                return Err(format!("{before} of {messages} messages, and no more").into());
            }
        }
        let out_of_order = self.arrived.lock().out_of_order;
        if out_of_order > 0 { Err(format!("{out_of_order} out of order").into()) } else { Ok(()) }
    }
}

/// A notifier with its store.
pub(crate) struct Notifier {
    pub(crate) program: Program,
    http: reqwest::Client,
    url: String,
}

impl Notifier {
    pub(crate) async fn start(lab: &Lab, store: &str, more: &str) -> Outcome<Self> {
        let config = format!(
            "[log]\nlevel = \"info\"\n[notifier]\nlisten = \"127.0.0.1:0\"\ntoken_file = \"@HOME@/token\"\n\
             allowed_networks = [\"127.0.0.0/8\"]\n{store}\n{more}"
        );
        let program = Program::start(lab, "notifier", &config, &[])?;
        let line = program.logged("notifier listening").await?;
        let address = line
            .split('"')
            .find(|part| part.starts_with("127.0.0.1:"))
            .or_else(|| line.split(['=', ' ']).find(|part| part.starts_with("127.0.0.1:")));
        let url = format!("http://{}", address.ok_or_else(|| format!("no address in {line:?}"))?);
        Ok(Self { program, http: client()?, url })
    }

    async fn call(&self, path: &str, body: Vec<u8>) -> Outcome<()> {
        let call = self.http.post(format!("{}{path}", self.url)).bearer_auth(TOKEN);
        let answer = call.header("content-type", "application/json").body(body).send().await?;
        let status = answer.status();
        if status.is_success() { Ok(()) } else { Err(format!("{path}: {status}: {}", answer.text().await?).into()) }
    }

    /// Each lane's events in the order of their numbers.
    pub(crate) async fn publish(&self, kind: &str, numbers: std::ops::Range<usize>, lanes: usize) -> Outcome<()> {
        let batches = numbers.clone().step_by(BATCH).map(|first| {
            let batch = first..numbers.end.min(first + BATCH);
            let events: Vec<Value> = batch.map(|number| event(kind, number, lanes)).collect();
            async move { self.call("/v1/events", serde_json::to_vec(&events)?).await }
        });
        // Calls of one lane have to follow each other.
        let at_once = if lanes < BATCH * CALLS { 1 } else { CALLS };
        stream::iter(batches).map(Ok).try_buffer_unordered(at_once).try_collect().await
    }
}

/// The notifier closes connections that rest for 10 seconds, so this client does not use them any more.
fn client() -> reqwest::Result<reqwest::Client> {
    reqwest::Client::builder().no_proxy().pool_idle_timeout(Duration::from_secs(5)).build()
}

/// The process that listens on a port of this machine.
pub(crate) fn listening(port: u16) -> Outcome<u32> {
    let mut inode = None;
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let text = std::fs::read_to_string(table)?;
        let fields = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let found = text.lines().map(fields).find(|line| {
            line.get(1).is_some_and(|local| local.ends_with(&format!(":{port:04X}")))
                && line.get(3).is_some_and(|state| state == "0A")
        });
        inode = inode.or_else(|| found.and_then(|line| line.get(9).cloned()));
    }
    let socket = format!("socket:[{}]", inode.ok_or("no process listens there")?);
    for process in std::fs::read_dir("/proc")?.flatten() {
        let Ok(files) = std::fs::read_dir(process.path().join("fd")) else { continue };
        let is_its =
            |file: std::fs::DirEntry| std::fs::read_link(file.path()).is_ok_and(|to| to.as_os_str() == &*socket);
        if files.flatten().any(is_its) {
            return Ok(process.file_name().to_string_lossy().parse()?);
        }
    }
    Err("the process that listens is of another user".into())
}

fn event(kind: &str, number: usize, lanes: usize) -> Value {
    let (id, key) = (format!("{kind}-{number}"), format!("lane-{}", number % lanes));
    json!({ "source": "bench", "id": id, "type": format!("{kind}.event"), "key": key, "data": { "n": number } })
}

pub(crate) fn endpoint(name: &str, address: SocketAddr, kind: &str) -> String {
    format!(
        "[notifier.endpoint.{name}]\nurl = \"http://{address}/hook\"\nevents = [\"{kind}.*\"]\nattempts_max = {ATTEMPTS}\n"
    )
}

/// How late each event of `numbers` arrives, published alone at a rate; those before have arrived.
async fn paced(
    notifier: &Notifier,
    receiver: &Receiver,
    numbers: std::ops::Range<usize>,
    lanes: usize,
    per_second: usize,
) -> Outcome<Spans> {
    let began = tokio::time::Instant::now();
    let sending = numbers.clone().zip(0..).map(async |(number, turn)| {
        sleep_until(began + Duration::from_secs(1) / u32::try_from(per_second).unwrap_or(1) * turn).await;
        let sent = now();
        notifier.call("/v1/events", serde_json::to_vec(&event("bench", number, lanes))?).await?;
        Outcome::Ok((number, sent))
    });
    let sent: Vec<_> = stream::iter(sending).buffered(ATTEMPTS).try_collect().await?;
    receiver.wait_for(numbers.end).await?;
    let arrived = receiver.arrived.lock();
    let late_by = |(number, at): &(usize, Duration)| Some(arrived.at.get(number)?.saturating_sub(*at));
    Ok(Spans::new(sent.iter().filter_map(late_by).collect()))
}

const SQLITE: &str = "db = \"@HOME@/notifier.db\"";

impl Lab {
    pub(crate) async fn notifier(&self) -> Outcome<Vec<Row>> {
        let mut rows = Vec::new();
        let webhooks = self.bare_webhooks().await?;
        let flushed = flushes(self.path(), self.pick(Duration::from_secs(3), Duration::from_millis(100))).await?;
        self.rates("SQLite", &|| async { Ok(SQLITE.to_owned()) }, flushed.per_second(), webhooks, &mut rows).await?;
        let postgres = Postgres::start(self)?;
        if let Some(postgres) = &postgres {
            let commits =
                postgres.commits_per_second(COMMITS, self.pick(Duration::from_secs(3), Duration::from_millis(100)));
            let commits = commits.await?;
            let fresh = async || {
                let (url, folder) = (postgres.database().await?, self.fresh("postgres")?);
                std::fs::write(folder.join("url"), url)?;
                let (file, ca) = (folder.join("url"), &postgres.ca);
                Outcome::Ok(format!("[notifier.postgres]\nurl_file = \"{}\"\nca_file = \"{ca}\"\n", file.display()))
            };
            self.rates("PostgreSQL", &fresh, commits, webhooks, &mut rows).await?;
        }
        rows.push(self.beside_dead_endpoints().await?);
        rows.push(self.beside_idle_endpoints().await?);
        rows.extend(self.backlog().await?);
        rows.extend(self.discovery().await?);
        Ok(rows)
    }

    /// How many webhooks a second a bare loop of reqwest sends to the receiver.
    async fn bare_webhooks(&self) -> Outcome<f64> {
        let receiver = Receiver::start().await?;
        let http = reqwest::Client::builder().no_proxy().http1_only().build()?;
        let count: usize = self.pick(30_000, 500);
        let body =
            json!({ "type": "bench.event", "timestamp": "2026-11-27T00:00:00Z", "data": { "n": 1 } }).to_string();
        let began = now();
        let send = async |number: usize| {
            let call = http.post(format!("http://{}/hook", receiver.address)).body(body.clone());
            call.header("journeyman-lane", number.to_string())
                .header("journeyman-seq", "1")
                .send()
                .await?
                .error_for_status()
        };
        stream::iter(0..count).map(send).buffer_unordered(ATTEMPTS).try_for_each(async |_| Ok(())).await?;
        Ok(count as f64 / (now() - began).as_secs_f64())
    }

    async fn rates<F: Future<Output = Outcome<String>>>(
        &self,
        what: &str,
        store: &impl Fn() -> F,
        commits: f64,
        webhooks: f64,
        rows: &mut Vec<Row>,
    ) -> Outcome<()> {
        for (lanes, count) in
            self.pick([(1, 5_000), (1_000, 50_000), (100_000, 100_000)], [(1, 50), (1_000, 1_000), (2_000, 2_000)])
        {
            let receiver = Receiver::start().await?;
            let notifier =
                Notifier::start(self, &store().await?, &endpoint("bench", receiver.address, "bench")).await?;
            let (before, began) = (notifier.program.usage()?, now());
            futures_util::try_join!(notifier.publish("bench", 0..count, lanes), receiver.wait_for(count))?;
            let took = now() - began;
            let rate = count as f64 / took.as_secs_f64();
            let after = notifier.program.usage()?;
            rows.push(Row {
                figure: format!("events to webhooks, {what}, lanes {lanes}; 0 of {count} lost, in order"),
                reached: format!("{rate:.0} /s, {:.0} %", rate / commits.min(webhooks) * 100.0),
                aim: AIM,
                limit: format!(
                    "{commits:.0} {}, {webhooks:.0} /s by a bare loop of reqwest",
                    if what == "SQLite" { "fdatasync/s" } else { "commits of a row /s, connections 16" }
                ),
            });
            if lanes >= self.pick(100_000, 2_000) {
                rows.push(Row {
                    figure: format!("… memory, and CPU an event; all lanes idle afterwards, {what}"),
                    reached: format!(
                        "{:.2} KiB a lane, {:.0} µs",
                        after.kib_above(before, lanes),
                        (after.cpu - before.cpu).as_secs_f64() * 1e6 / count as f64
                    ),
                    aim: "",
                    limit: format!("{:.1} MB before", before.megabytes()),
                });
            }
        }
        Ok(())
    }

    async fn beside_dead_endpoints(&self) -> Outcome<Row> {
        let (lanes, per_second, seconds) = self.pick((1_000, 400, 20), (50, 100, 1));
        let mut late = Vec::new();
        for dead in [0, DEAD] {
            let receiver = Receiver::start().await?;
            let mut config = endpoint("bench", receiver.address, "bench");
            let mut silent = Vec::new();
            for number in 0..dead {
                // One half is silent, and nothing listens at the addresses of the other.
                let listener = TcpListener::bind("127.0.0.1:0").await?;
                config.push_str(&endpoint(&format!("dead{number}"), listener.local_addr()?, "dead"));
                silent.extend((number % 2 == 0).then_some(listener));
            }
            let notifier = Notifier::start(self, SQLITE, &config).await?;
            notifier.publish("dead", 0..lanes, lanes).await?;
            late.push(paced(&notifier, &receiver, 0..per_second * seconds, lanes, per_second).await?);
        }
        let [without, with] = &late[..] else { return Err("two runs".into()) };
        Ok(Row {
            figure: format!(
                "call to webhook beside {DEAD} endpoints that do not answer, {per_second} /s in {lanes} lanes: p50 and p99 of {}; 0 lost",
                with.len()
            ),
            reached: format!(
                "{}, {:+.1} ms",
                with.pair(50, 99),
                (with.percentile(99).as_secs_f64() - without.percentile(99).as_secs_f64()) * 1e3
            ),
            aim: "p99 ≤ +10 ms",
            limit: format!("{} without them", without.pair(50, 99)),
        })
    }

    /// What endpoints without events cost a busy one: as many events as it takes, then some at a rate.
    async fn beside_idle_endpoints(&self) -> Outcome<Row> {
        let (idle, count, lanes, per_second, seconds) =
            self.pick((1_000, 50_000, 1_000, 400, 20), (20, 1_000, 50, 100, 1));
        let mut runs = Vec::new();
        for idle in [0, idle] {
            let receiver = Receiver::start().await?;
            let mut config = endpoint("bench", receiver.address, "bench");
            for kind in (0..idle).map(|number| format!("idle{number}")) {
                config.push_str(&endpoint(&kind, receiver.address, &kind));
            }
            let notifier = Notifier::start(self, SQLITE, &config).await?;
            let began = now();
            futures_util::try_join!(notifier.publish("bench", 0..count, lanes), receiver.wait_for(count))?;
            let rate = count as f64 / (now() - began).as_secs_f64();
            let numbers = count..count + per_second * seconds;
            runs.push((rate, paced(&notifier, &receiver, numbers, lanes, per_second).await?));
        }
        let [(alone, without), (beside, with)] = &runs[..] else { return Err("two runs".into()) };
        Ok(Row {
            figure: format!(
                "one busy endpoint beside {idle} idle ones, SQLite, lanes {lanes}: events to webhooks, and call to webhook at \
                 {per_second} /s, p50 and p99; 0 of {} lost, in order",
                count + with.len()
            ),
            reached: format!("{beside:.0} /s, {:.0} %; {}", beside / alone * 100.0, with.pair(50, 99)),
            aim: "",
            limit: format!("{alone:.0} /s; {} alone", without.pair(50, 99)),
        })
    }

    /// What readers cost the intake and the delivery of a notifier that holds a backlog, and how soon it delivers when it starts with one.
    async fn backlog(&self) -> Outcome<Vec<Row>> {
        let (count, lanes) = self.pick((1_000_000, 100_000), (2_000, 500));
        let receiver = Receiver::start().await?;
        let live = Receiver::start().await?;
        let config = endpoint("held", receiver.address, "held") + &endpoint("bench", live.address, "bench");
        let folder = self.fresh("backlog")?;
        let store = format!("db = \"{}\"", folder.join("notifier.db").display());
        let filling = Notifier::start(self, &store, &config).await?;
        filling.call("/v1/endpoints/held/pause", b"{}".to_vec()).await?;
        let began = now();
        for first in (0..count).step_by(BATCH * CALLS * 10) {
            filling.publish("held", first..count.min(first + BATCH * CALLS * 10), lanes).await?;
        }
        let taken = count as f64 / (now() - began).as_secs_f64();
        let beside_readers = self.beside_readers(&filling, &live, count).await?;
        let mut program = filling.program;
        program.child.start_kill()?;
        program.child.wait().await?;
        let began = now();
        let notifier = Notifier::start(self, &store, &config).await?;
        let listens = now() - began;
        notifier.call("/v1/endpoints/held/resume", b"{}".to_vec()).await?;
        let resumed = now();
        receiver.wait_for(1).await?;
        let first = now() - resumed;
        let memory = notifier.program.usage()?.megabytes();
        let start = Row {
            figure: format!(
                "start with {count} messages that wait in {lanes} lanes: until it listens, and until the first webhook"
            ),
            reached: format!("{} and {}, {memory:.1} MB", millis(listens), millis(first)),
            aim: "",
            limit: format!("they were taken at {taken:.0} /s"),
        };
        Ok(vec![beside_readers, start])
    }

    /// How late events arrive while others read the pages and the API one after the other.
    async fn beside_readers(&self, notifier: &Notifier, live: &Receiver, messages: usize) -> Outcome<Row> {
        let (calls, per_second, lanes) = self.pick((4_000, 400, 1_000), (100, 100, 50));
        let without = paced(notifier, live, 0..calls, lanes, per_second).await?;
        let mut reads = Vec::new();
        let reading = async {
            loop {
                for path in READ {
                    let began = now();
                    let answer = notifier.http.get(format!("{}{path}", notifier.url)).bearer_auth(TOKEN).send().await?;
                    answer.error_for_status()?.bytes().await?;
                    reads.push(now() - began);
                }
            }
        };
        let with = tokio::select! {
            read = reading => return read,
            with = paced(notifier, live, calls..2 * calls, lanes, per_second) => with?,
        };
        let reads = Spans::new(reads);
        Ok(Row {
            figure: format!(
                "call to webhook beside a reader of pages and API, {messages} messages of history, {per_second} /s: p50 and p99 of {calls}; 0 lost"
            ),
            reached: format!(
                "{}, {:+.1} ms; slowest of {} reads {}",
                with.pair(50, 99),
                (with.percentile(99).as_secs_f64() - without.percentile(99).as_secs_f64()) * 1e3,
                reads.len(),
                millis(reads.percentile(100))
            ),
            aim: "p99 ≤ +10 ms",
            limit: format!("{} without", without.pair(50, 99)),
        })
    }

    /// What it costs to follow the queues of a Mistral, beside listing them as often as the blueprint does.
    async fn discovery(&self) -> Outcome<Vec<Row>> {
        let Some(broker) = Broker::start(self)? else { return Ok(Vec::new()) };
        let Some(management) = broker.management.clone() else { return Ok(Vec::new()) };
        let (queues, lasting) = self.pick((1_000, 62), (20, 1));
        let vhost = format!("bench-{}", new_task_id());
        let base: reqwest::Url = management.parse()?;
        let config = format!(
            "seal_key_files = [\"@HOME@/seal\"]\n[notifier.mistral]\nvhost = \"{vhost}\"\nurl_key_file = \"@HOME@/token\"\n\
             [amqp]\nuri_file = \"@HOME@/uri\"\nmanagement_url = \"{}://{}:{}\"\n",
            base.scheme(),
            base.host_str().unwrap_or_default(),
            base.port().unwrap_or(15672)
        );
        let env = [("JOURNEYMAN_AMQP_URI", broker.uri.as_str())];
        let config = format!("[notifier]\nlisten = \"127.0.0.1:0\"\ntoken_file = \"@HOME@/token\"\n{SQLITE}\n{config}");
        let config = config.replace("uri_file = \"@HOME@/uri\"\n", "").replace("@HOME@/seal", &self.seal()?);
        let program = Program::start(self, "notifier", &config, &env)?;
        program.logged("taking Mistral's notifications").await?;
        let uri = format!("{}/{vhost}", broker.uri.rsplit_once('/').map_or(broker.uri.as_str(), |(base, _)| base));
        let connection = Connection::connect(&uri, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        let name = |number: usize| format!("execution-{number}.{number:032x}");
        for number in 0..queues {
            let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
            channel.queue_declare(name(number).as_str().into(), options, FieldTable::default()).await?;
        }
        let http = client()?;
        let list = format!("{management}/api/queues/{vhost}?columns=name");
        let port =
            broker.uri.rsplit_once('/').and_then(|(base, _)| base.rsplit_once(':')).ok_or("no port")?.1.parse()?;
        let pid = listening(port)?;
        let is_consumed = async || {
            for number in 0..queues {
                let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
                let queue = name(number);
                let found = channel.queue_declare(queue.as_str().into(), options, FieldTable::default()).await?;
                if found.consumer_count() == 0 {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        until("a consumer of each queue", is_consumed).await?;
        let (broker_before, before) = (Usage::of(pid)?, program.usage()?);
        sleep(Duration::from_secs(lasting)).await;
        let (broker_after, after) = (Usage::of(pid)?, program.usage()?);
        let seconds = 5;
        let listing = Usage::of(pid)?;
        for _ in 0..seconds * 10 {
            let (next, call) = (tokio::time::Instant::now() + Duration::from_millis(100), http.get(&list).send());
            call.await?.bytes().await?;
            sleep_until(next).await;
        }
        let listed = Usage::of(pid)?;
        for number in 0..queues {
            channel.queue_delete(name(number).as_str().into(), QueueDeleteOptions::default()).await?;
        }
        drop(program);
        connection.close(200, "done".into()).await?;
        http.delete(format!("{management}/api/vhosts/{vhost}")).send().await?;
        let percent =
            |before: Usage, after: Usage, over: u64| (after.cpu - before.cpu).as_secs_f64() / over as f64 * 100.0;
        Ok(vec![Row {
            figure: format!(
                "{queues} idle queues of a Mistral, over {lasting} s: CPU of the notifier, and of the broker beside it"
            ),
            reached: format!(
                "{:.2} % and {:.2} %, {:.1} MB",
                percent(before, after, lasting),
                percent(broker_before, broker_after, lasting),
                after.megabytes()
            ),
            aim: "",
            limit: format!(
                "{:.0} % of the broker for their names ten times a second",
                percent(listing, listed, seconds)
            ),
        }])
    }

    /// A file with a key.
    fn seal(&self) -> Outcome<String> {
        let file = self.fresh("seal")?.join("key");
        std::fs::write(&file, "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=")?;
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        Ok(file.display().to_string())
    }
}
