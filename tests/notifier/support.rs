//! A notifier with its database, and a receiver that checks the order of what it gets.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::gremlin::{Act, Asked, Gremlin, answer};
use crate::support::needs;
use crate::support::process::Process;

pub(crate) use crate::support::{TEST_TIMEOUT, within};

pub(crate) const TOKEN: &str = "token-of-the-test";
const SEAL_KEY: &str = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=";
/// The certificate of the receiver.
pub(crate) const KEY: &str = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz";

pub(crate) fn answered(status: u16) -> Act {
    answer(status, "text/plain", "")
}

/// How many deaths a test of them has: `JOURNEYMAN_CRASH_RUNS`, or so many.
pub(crate) fn deaths(default: usize) -> usize {
    std::env::var("JOURNEYMAN_CRASH_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(default)
}

/// A receiver of webhooks.
pub(crate) struct Receiver(pub(crate) Gremlin);

/// What the receiver got, in its order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Got {
    pub(crate) lane: String,
    pub(crate) epoch: u32,
    pub(crate) seq: u32,
    pub(crate) webhook_id: String,
    pub(crate) traceparent: Option<String>,
    pub(crate) body: Vec<u8>,
}

impl Got {
    fn of(asked: &Asked) -> Self {
        let text = |name: &str| asked.header(name).expect("the header is there").to_owned();
        let number = |name: &str| text(name).parse().expect("a number");
        Self {
            lane: text("journeyman-lane"),
            epoch: number("journeyman-epoch"),
            seq: number("journeyman-seq"),
            webhook_id: text("webhook-id"),
            traceparent: asked.header("traceparent").map(str::to_owned),
            body: asked.body.clone(),
        }
    }
}

impl Receiver {
    pub(crate) async fn answering(status: u16) -> Self {
        Self::with(move |_, _| status).await
    }

    /// Answers so many requests with this status, and all others with 200.
    pub(crate) async fn answering_at_first(status: u16, count: usize) -> Self {
        Self::by_number(move |number| if number < count { status } else { 200 }).await
    }

    /// Answers the first attempt of each third message of a lane with this status, and all others with 200.
    pub(crate) async fn failing_first(status: u16) -> Self {
        let seen = Mutex::new(BTreeSet::new());
        Self::with(move |_, asked| {
            let got = Got::of(asked);
            if got.seq.is_multiple_of(3) && seen.lock().insert(got.webhook_id) { status } else { 200 }
        })
        .await
    }

    /// Answers each attempt with the status of its number, from 0.
    pub(crate) async fn by_number(status: impl Fn(usize) -> u16 + Send + Sync + 'static) -> Self {
        Self::with(move |number, _| status(number)).await
    }

    async fn with(status: impl Fn(usize, &Asked) -> u16 + Send + Sync + 'static) -> Self {
        let number = AtomicUsize::new(0);
        let respond = move |asked: &Asked| {
            let status = status(number.fetch_add(1, Ordering::SeqCst), asked);
            let act: BoxFuture<'static, Act> = Box::pin(std::future::ready(answered(status)));
            act
        };
        Self(Gremlin::responding(respond).await)
    }

    pub(crate) fn got(&self) -> Vec<Got> {
        self.0.asked().iter().map(Got::of).collect()
    }

    /// Waits until so many different messages came, as long as there come any.
    pub(crate) async fn wait_for(&self, messages: usize) {
        let count = |asked: &[Asked]| {
            let ids: BTreeSet<_> = asked.iter().map(|one| one.header("webhook-id")).collect();
            ids.len()
        };
        let mut came = 0;
        while came < messages {
            let waiting = tokio::time::timeout(TEST_TIMEOUT, self.0.wait_asked(|asked| count(asked) > came)).await;
            assert!(waiting.is_ok(), "{came} of {messages} messages, and none within {TEST_TIMEOUT:?}");
            came = count(&self.0.asked());
        }
    }

    /// In each lane only the head is repeated, and no number is left out. Returns how many messages came.
    pub(crate) fn check_order(&self) -> usize {
        let mut lanes: BTreeMap<String, Vec<Got>> = BTreeMap::new();
        let mut messages = 0;
        for got in self.got() {
            let lane = lanes.entry(got.lane.clone()).or_default();
            match lane.last() {
                Some(last) if *last == got => continue,
                Some(last) if last.epoch == got.epoch => assert_eq!(got.seq, last.seq + 1, "{got:?} after {last:?}"),
                Some(last) => assert!(got.epoch > last.epoch && got.seq == 1, "{got:?} after {last:?}"),
                None => assert_eq!(got.seq, 1, "{got:?}"),
            }
            lane.push(got);
            messages += 1;
        }
        messages
    }
}

/// A notifier's configuration and database, and who publishes to it.
pub(crate) struct Place {
    folder: tempfile::TempDir,
    client: reqwest::Client,
}

impl Place {
    /// There is an endpoint for each of these receivers.
    pub(crate) fn new(endpoints: &[(&str, &Receiver)]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let mut config = "[notifier]\ndb = \"notifier.db\"\nlisten = \"127.0.0.1:0\"\ntoken_file = \"token\"\n\
             allowed_networks = [\"127.0.0.0/8\"]\nseal_key_files = [\"seal\"]\n"
            .to_owned();
        for (name, receiver) in endpoints {
            config.push_str(&format!(
                "\n[notifier.endpoint.{name}]\nurl = \"{}/hook\"\nkey_files = [\"key\"]\n",
                receiver.0.url()
            ));
        }
        for (name, text) in [("journeyman.toml", config.as_str()), ("token", TOKEN), ("key", KEY), ("seal", SEAL_KEY)] {
            std::fs::write(folder.path().join(name), text).expect("it is written");
        }
        rustls::crypto::ring::default_provider().install_default().ok();
        let client = reqwest::Client::builder().no_proxy().build().expect("a client");
        Self { folder, client }
    }

    /// With a database of its own in the PostgreSQL that tests/run starts, in place of the file; `None` without a server.
    pub(crate) async fn on_postgres(self) -> Option<Self> {
        let PostgresDatabase { url, ca } = PostgresDatabase::create().await?;
        Some(self.with_postgres(&url, &ca))
    }

    pub(crate) fn with_postgres(self, url: &str, ca: &str) -> Self {
        self.write("postgres", url);
        self.configure(&format!("\n[notifier.postgres]\nurl_file = \"postgres\"\nca_file = \"{ca}\"\n"));
        self
    }

    /// What is in the files of the database.
    pub(crate) fn database(&self) -> Vec<u8> {
        let files = ["notifier.db", "notifier.db-wal"].map(|name| std::fs::read(self.folder.path().join(name)));
        files.into_iter().flat_map(Result::unwrap_or_default).collect()
    }

    pub(crate) fn path(&self) -> &std::path::Path {
        self.folder.path()
    }

    pub(crate) fn write(&self, file: &str, text: &str) {
        std::fs::write(self.path().join(file), text).expect("it is written");
    }

    /// Adds keys of `[notifier]`.
    pub(crate) fn configure_first(&self, keys: &str) {
        let before = std::fs::read_to_string(self.path().join("journeyman.toml")).expect("it is read");
        self.write("journeyman.toml", &before.replacen("[notifier]\n", &format!("[notifier]\n{keys}"), 1));
    }

    /// Appends to the configuration.
    pub(crate) fn configure(&self, text: &str) {
        let before = std::fs::read_to_string(self.path().join("journeyman.toml")).expect("it is read");
        self.write("journeyman.toml", &format!("{before}{text}"));
    }

    pub(crate) async fn start(&self) -> Running<'_> {
        self.start_with(&[]).await
    }

    /// A command with the configuration.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_journeyman"));
        command.args(arguments).args(["--config", "journeyman.toml"]).current_dir(self.path()).env_clear();
        command
    }

    /// Does not wait until it listens.
    pub(crate) fn spawn(&self, variables: &[(&str, &str)]) -> Process {
        let mut command = self.command(&["notifier"]);
        command.env("JOURNEYMAN__LOG__LEVEL", "debug").envs(variables.iter().copied());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        Process::of(command)
    }

    pub(crate) async fn start_with(&self, variables: &[(&str, &str)]) -> Running<'_> {
        self.try_start(variables).await.expect("it does not end before it listens")
    }

    /// `None` if it was killed before it said that it listens.
    pub(crate) async fn try_start(&self, variables: &[(&str, &str)]) -> Option<Running<'_>> {
        let mut process = self.spawn(variables);
        if !process.says_or_ends("notifier listening").await {
            let ended = process.ends().await;
            assert_eq!(ended.signal(), Some(9), "{}", ended.log);
            return None;
        }
        let log = process.log();
        let line = log.lines().find(|line| line.contains("notifier listening"))?;
        let line: Value = serde_json::from_str(line).expect("a line of JSON");
        let url = format!("http://{}/v1", line["address"].as_str().expect("an address"));
        Some(Running { place: self, process, url })
    }
}

/// A database in the PostgreSQL that tests/run starts.
pub(crate) struct PostgresDatabase {
    pub(crate) url: String,
    pub(crate) ca: String,
}

impl PostgresDatabase {
    /// `None` without a server.
    pub(crate) async fn create() -> Option<Self> {
        let server = needs("JOURNEYMAN_TEST_POSTGRES")?;
        let name = format!("test_{}", uuid::Uuid::new_v4().simple());
        let (client, connection) = tokio_postgres::connect(&server, tokio_postgres::NoTls).await.expect("it connects");
        let create = format!("CREATE DATABASE {name}");
        tokio::select! {
            created = client.batch_execute(&create) => created.expect("it is created"),
            ended = connection => panic!("the connection has ended: {ended:?}"),
        }
        let (base, _) = server.rsplit_once('/').expect("it ends with a database");
        let ca = std::env::var("JOURNEYMAN_TEST_POSTGRES_CA").expect("tests/run says where it is, with the server");
        Some(Self { url: format!("{base}/{name}"), ca })
    }

    pub(crate) async fn execute(&self, sql: &str) {
        let (client, connection) =
            tokio_postgres::connect(&self.url, tokio_postgres::NoTls).await.expect("it connects");
        tokio::select! {
            done = client.batch_execute(sql) => done.expect("it is done"),
            ended = connection => panic!("the connection has ended: {ended:?}"),
        }
    }

    /// The rows of a query, as texts.
    pub(crate) async fn query(&self, sql: &str) -> Vec<String> {
        let (client, connection) =
            tokio_postgres::connect(&self.url, tokio_postgres::NoTls).await.expect("it connects");
        tokio::select! {
            rows = client.query(sql, &[]) => rows.expect("it is done").iter().map(|row| row.get(0)).collect(),
            ended = connection => panic!("the connection has ended: {ended:?}"),
        }
    }
}

pub(crate) struct Running<'a> {
    place: &'a Place,
    pub(crate) process: Process,
    url: String,
}

pub(crate) fn event(id: &str, key: &str) -> Value {
    json!({ "source": "test", "id": id, "type": "build.finished", "key": key, "data": { "id": id } })
}

impl Running<'_> {
    /// The status and body of the answer; `None` without one.
    pub(crate) async fn publish(&self, body: impl Into<reqwest::Body>) -> Option<(u16, Value)> {
        let call = self.place.client.post(format!("{}/events", self.url)).bearer_auth(TOKEN).body(body).send();
        let answer = within("an answer, or an error", call).await.ok()?;
        let status = answer.status().as_u16();
        Some((status, answer.json().await.ok()?))
    }

    pub(crate) async fn publish_all(&self, events: &[Value]) {
        let answer = self.publish(json!(events).to_string()).await;
        let expected = json!({ "accepted": events.len(), "duplicates": 0 });
        assert_eq!(answer, Some((202, expected)));
    }

    /// The status and body of a call with the write token.
    pub(crate) async fn call(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let method = method.to_uppercase().parse().expect("a method");
        let url = format!("{}{path}", self.address());
        let call = self.place.client.request(method, url).bearer_auth(TOKEN).body(body.to_owned());
        let call = call.header("content-type", "application/json").send();
        let answer = within("an answer", call).await.expect("it answers");
        (answer.status().as_u16(), answer.text().await.expect("a text"))
    }

    pub(crate) async fn status(&self, endpoint: &str) -> Value {
        let call = self.place.client.get(format!("{}/status", self.url)).bearer_auth(TOKEN).send();
        let answer = within("a status", call).await.expect("it answers");
        answer.json::<Value>().await.expect("JSON")["endpoints"][endpoint].clone()
    }

    /// Asks until it is so.
    pub(crate) async fn wait_for_status(&self, endpoint: &str, is_so: impl Fn(&Value) -> bool) {
        let asking = async {
            while !is_so(&self.status(endpoint).await) {
                tokio::task::yield_now().await;
            }
        };
        if tokio::time::timeout(TEST_TIMEOUT, asking).await.is_err() {
            panic!("not so in {TEST_TIMEOUT:?}: {}", self.status(endpoint).await);
        }
    }

    /// Without its path.
    pub(crate) fn address(&self) -> &str {
        self.url.trim_end_matches("/v1")
    }

    /// The answer of a path beside those of `/v1`.
    pub(crate) async fn get(&self, path: &str) -> Value {
        let root = self.url.trim_end_matches("/v1");
        let call = self.place.client.get(format!("{root}{path}")).bearer_auth(TOKEN).send();
        within("an answer", call).await.expect("it answers").json().await.expect("JSON")
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let root = self.url.trim_end_matches("/v1");
        let call = self.place.client.post(format!("{root}{path}")).bearer_auth(TOKEN).json(body).send();
        let answer = within("an answer", call).await.expect("it answers");
        (answer.status().as_u16(), answer.json().await.expect("JSON"))
    }

    pub(crate) async fn kill(self) {
        self.process.signal(Signal::KILL);
        self.process.ends().await;
    }

    pub(crate) async fn stop(self) -> String {
        let log = self.process.drained().await;
        assert!(!log.contains(TOKEN) && !log.contains(KEY), "{log}");
        log
    }
}
