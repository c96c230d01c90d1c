//! A Screwdriver around a worker: its queues on a vhost of the test's own, its build API, and a cluster.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};

use journeyman_platform::amqp::header_table;
use journeyman_platform::amqp::lapin::message::BasicGetMessage;
use journeyman_platform::amqp::lapin::options::{
    BasicGetOptions, BasicPublishOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions,
};
use journeyman_platform::amqp::lapin::types::{AMQPValue, FieldTable};
use journeyman_platform::amqp::lapin::{BasicProperties, Channel, Confirmation, Connection, ExchangeKind};
use parking_lot::Mutex;
use reqwest::Method;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::screwdriver::executor::{BUILD_TOKEN, start_message};
use crate::support::broker;
use crate::support::cluster::{Cluster, Fault, How, NAMESPACE};
use crate::support::gremlin::{self, Gremlin};
use crate::support::process::{Process, command};

pub(crate) use crate::support::{TEST_TIMEOUT, until};

/// A recorded message that starts a build, with this id.
pub(crate) fn start(build_id: u64) -> Value {
    of_build("start", build_id)
}

pub(crate) fn of_build(job: &str, build_id: u64) -> Value {
    let mut message = start_message();
    message["job"] = json!(job);
    message["buildConfig"]["buildId"] = json!(build_id);
    message
}

pub(crate) fn text(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

pub(crate) fn waiting_for_resources() -> Value {
    json!({ "statusMessage": "Waiting for resources to be available." })
}

/// What the build API was told, and answered.
#[derive(Debug, Clone)]
pub(crate) struct Update {
    build_id: u64,
    pub(crate) body: Value,
    pub(crate) status: u16,
}

impl Update {
    pub(crate) fn failure(&self) -> Option<&str> {
        self.body["statusMessage"].as_str().filter(|_| self.body["status"] == "FAILURE")
    }

    /// It tells the place where the build runs.
    pub(crate) fn is_node(&self) -> bool {
        self.body["stats"]["hostname"].is_string()
    }

    fn is_accepted(&self) -> bool {
        self.status == 200
    }
}

/// Screwdriver's API.
pub(crate) struct BuildApi {
    server: Gremlin,
    status: Arc<AtomicU16>,
    updates: watch::Receiver<Vec<Update>>,
}

impl BuildApi {
    async fn start() -> Self {
        let (status, sender) = (Arc::new(AtomicU16::new(200)), watch::Sender::<Vec<Update>>::default());
        let (answer, updates) = (Arc::clone(&status), sender.subscribe());
        let server = Gremlin::responding(move |asked| {
            let status = answer.load(Ordering::SeqCst);
            let build_id =
                asked.line.strip_prefix("PUT /v4/builds/").and_then(|rest| rest.split(' ').next()?.parse().ok());
            let bearer = format!("Bearer {BUILD_TOKEN}");
            assert_eq!(asked.header("authorization"), Some(bearer.as_str()), "{}", asked.line);
            let update = Update { build_id: build_id.expect("an update of a build"), body: asked.json(), status };
            sender.send_modify(|all| all.push(update));
            // Some services repeat what they were sent.
            Box::pin(std::future::ready(gremlin::json(status, &json!({ "message": format!("you sent {bearer}") }))))
        });
        Self { server: server.await, status, updates }
    }

    pub(crate) fn url(&self) -> String {
        self.server.url()
    }

    /// Answers with this status from here on.
    pub(crate) fn answer_with(&self, status: u16) {
        self.status.store(status, Ordering::SeqCst);
    }

    pub(crate) fn updates(&self, build_id: u64) -> Vec<Update> {
        self.updates.borrow().iter().filter(|one| one.build_id == build_id).cloned().collect()
    }

    /// The texts of the failures of a build that were accepted.
    pub(crate) fn failures(&self, build_id: u64) -> Vec<String> {
        let updates = self.updates(build_id);
        updates.iter().filter(|one| one.is_accepted()).filter_map(Update::failure).map(str::to_owned).collect()
    }

    async fn wait(&self, what: &str, build_id: u64, mut is_so: impl FnMut(&[Update]) -> bool) {
        let mut updates = self.updates.clone();
        let waiting = updates.wait_for(|_| is_so(&self.updates(build_id)));
        let ended = tokio::time::timeout(TEST_TIMEOUT, waiting).await.map(drop);
        assert!(ended.is_ok(), "build {build_id}: {what}: not within {TEST_TIMEOUT:?}: {:?}", self.updates.borrow());
    }

    pub(crate) async fn wait_for_node(&self, build_id: u64) {
        let is_told = |all: &[Update]| all.iter().any(|one| one.is_node() && one.is_accepted());
        self.wait("it is told where it runs", build_id, is_told).await;
    }

    pub(crate) async fn wait_for_failure(&self, build_id: u64) -> String {
        self.wait("its failure is told", build_id, |_| !self.failures(build_id).is_empty()).await;
        self.failures(build_id).remove(0)
    }

    /// Waits until the failure was told so often, accepted or not.
    pub(crate) async fn wait_for_attempts(&self, build_id: u64, count: usize) {
        let attempts = |all: &[Update]| all.iter().filter(|one| one.failure().is_some()).count();
        self.wait("its failure is told again", build_id, |all| attempts(all) >= count).await;
    }
}

/// Screwdriver, a broker with its queues, and a cluster.
pub(crate) struct Place {
    pub(crate) cluster: Cluster,
    pub(crate) api: BuildApi,
    pub(crate) folder: tempfile::TempDir,
    pub(crate) uri: String,
    vhost: String,
    _connection: Connection,
    channel: Channel,
    /// Lines of the section of the source, and of its limits.
    pub(crate) source: String,
    pub(crate) limits: String,
    /// Whether Screwdriver's executor, whose pods hold tokens, makes some of the cluster's.
    pub(crate) has_executor: bool,
    workers: AtomicUsize,
    logs: Mutex<String>,
}

impl Place {
    /// With the queues of the seed but the wait queue. Rejected messages come back soon.
    pub(crate) async fn new() -> Option<Self> {
        let place = Self::without_queues().await?;
        let to = |key: &str| [("x-dead-letter-exchange", text("build")), ("x-dead-letter-routing-key", text(key))];
        let priorities = || [("x-max-priority", AMQPValue::LongInt(3))];
        let ttl = |ms: i32| [("x-message-ttl", AMQPValue::LongInt(ms))];
        let main = to("sdQueuedlr").into_iter().chain(priorities()).chain(ttl(28_800_000));
        place.declare("sdQueue", main).await;
        place.declare("sdQueuedlr", to("sdQueue").into_iter().chain(priorities()).chain(ttl(200))).await;
        place.declare("sdRetryQueue", priorities()).await;
        Some(place)
    }

    pub(crate) async fn without_queues() -> Option<Self> {
        let shared = broker::shared()?;
        let vhost = format!("sd{}", &uuid::Uuid::new_v4().simple().to_string()[..12]);
        broker::api(Method::PUT, &format!("vhosts/{vhost}"), None).await;
        let all = json!({ "configure": ".*", "write": ".*", "read": ".*" });
        broker::api(Method::PUT, &format!("permissions/{vhost}/guest"), Some(all)).await;
        let uri = broker::in_vhost(&shared, &vhost);
        let (connection, channel) = broker::connect_to(&uri).await;
        let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        let declaring = channel.exchange_declare("build".into(), ExchangeKind::Topic, options, FieldTable::default());
        declaring.await.expect("it is declared");
        let (cluster, api) = (Cluster::start().await, BuildApi::start().await);
        let folder = tempfile::tempdir().expect("a folder");
        let (source, limits) = (String::new(), "delay = \"1s\"\ndelay_step = \"0s\"\nchecks = 60\n".to_owned());
        let (workers, logs) = (AtomicUsize::new(0), Mutex::default());
        Some(Self {
            cluster,
            api,
            folder,
            uri,
            vhost,
            _connection: connection,
            channel,
            source,
            limits,
            has_executor: false,
            workers,
            logs,
        })
    }

    /// The section of the source has these lines more.
    pub(crate) fn with_source(mut self, lines: &str) -> Self {
        self.source.push_str(lines);
        self
    }

    pub(crate) fn with_limits(mut self, lines: &str) -> Self {
        lines.clone_into(&mut self.limits);
        self
    }

    /// Declares a queue and binds it by its name.
    pub(crate) async fn declare(&self, name: &str, arguments: impl IntoIterator<Item = (&'static str, AMQPValue)>) {
        let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        let declaring = self.channel.queue_declare(name.into(), options, header_table(arguments));
        declaring.await.expect("it is declared");
        let options = QueueBindOptions::default();
        let binding = self.channel.queue_bind(name.into(), "build".into(), name.into(), options, FieldTable::default());
        binding.await.expect("it is bound");
    }

    /// Declares the wait queue of the seed.
    pub(crate) async fn declare_wait_queue(&self) {
        let to = [("x-dead-letter-exchange", text("build")), ("x-dead-letter-routing-key", text("sdRetryQueue"))];
        self.declare("sdRetryQueue-wait", to).await;
    }

    /// Publishes as the queue service does.
    pub(crate) async fn publish(&self, message: &Value) {
        let properties = BasicProperties::default().with_delivery_mode(2);
        let properties = properties.with_content_type("application/json".into());
        self.publish_to("sdQueue", properties, message.to_string().as_bytes()).await;
    }

    pub(crate) async fn publish_to(&self, queue: &str, properties: BasicProperties, body: &[u8]) {
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let publishing = self.channel.basic_publish("build".into(), queue.into(), options, body, properties);
        let confirmed = publishing.await.expect("it is published").await.expect("it is confirmed");
        assert_eq!(confirmed, Confirmation::Ack(None), "it has reached a queue");
    }

    /// Takes a message out of a queue.
    pub(crate) async fn take(&self, queue: &str) -> BasicGetMessage {
        let mut found = None;
        until("a message", async || {
            let got = self.channel.basic_get(queue.into(), BasicGetOptions { no_ack: true }).await;
            found = got.expect("it can be looked into");
            found.is_some()
        })
        .await;
        found.expect("it was waited for")
    }

    pub(crate) async fn queues(&self) -> Vec<String> {
        let queues = broker::api(Method::GET, &format!("queues/{}?columns=name", self.vhost), None).await;
        let names = queues.as_array().into_iter().flatten().filter_map(|queue| queue["name"].as_str());
        names.map(str::to_owned).collect()
    }

    /// The numbers of messages in the queues that are not empty.
    pub(crate) async fn ready(&self) -> BTreeMap<String, u32> {
        let mut ready = BTreeMap::new();
        for name in self.queues().await {
            let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
            let declaring = self.channel.queue_declare(name.as_str().into(), options, FieldTable::default());
            let count = declaring.await.expect("the queue is there").message_count();
            if count > 0 {
                ready.insert(name, count);
            }
        }
        ready
    }

    fn config(&self) -> PathBuf {
        let kubeconfig = self.cluster.kubeconfig(self.folder.path());
        let (management, api, own, limits) = (broker::management(), self.api.url(), &self.source, &self.limits);
        let config = format!(
            "[amqp]\nmanagement_url = \"{management}\"\n\n[source.builds]\nkind = \"screwdriver\"\n\
             namespace = \"{NAMESPACE}\"\nkubeconfig = \"{}\"\napi = \"{api}\"\nui = \"{api}\"\nstore = \"{api}\"\n{own}\n\
             [source.builds.limits]\n{limits}",
            kubeconfig.display()
        );
        let path = self.folder.path().join("journeyman.toml");
        std::fs::write(&path, config).expect("it is written");
        path
    }

    pub(crate) fn worker(&self) -> Process {
        self.worker_with(&[])
    }

    /// A worker that kills itself where it is told to.
    pub(crate) async fn dies_at(&self, crash_point: &str) {
        let ended = self.worker_with(&[("JOURNEYMAN_CRASH_POINT", crash_point)]).ends().await;
        assert_eq!(ended.signal(), Some(Signal::KILL.as_raw()), "at {crash_point}: {}", ended.log);
        self.logs.lock().push_str(&ended.log);
    }

    pub(crate) async fn kill(&self, worker: Process) {
        worker.signal(Signal::KILL);
        let ended = worker.ends().await;
        self.logs.lock().push_str(&ended.log);
    }

    pub(crate) async fn drain(&self, worker: Process) {
        let log = worker.drained().await;
        self.logs.lock().push_str(&log);
    }

    /// The build has these variables more.
    pub(crate) fn worker_with(&self, variables: &[(&str, &str)]) -> Process {
        let id = format!("w{}", self.workers.fetch_add(1, Ordering::Relaxed));
        let folder = self.folder.path().join(&id);
        std::fs::create_dir(&folder).expect("a folder");
        let always = [
            ("JOURNEYMAN_AMQP_URI", self.uri.as_str()),
            ("JOURNEYMAN__WORKER__CAPACITY", "20"),
            ("JOURNEYMAN__WORKER__ID", &id),
        ];
        let mut command = command("worker", &folder, &self.config(), &always);
        command.envs(variables.iter().copied());
        Process::of(command)
    }

    pub(crate) fn fault(&self, verb: &'static str, resource: &'static str, times: usize, how: How) {
        self.cluster.fault(Fault { verb, resource, times, how });
    }

    /// Waits for the pod of a build, and returns its name.
    pub(crate) async fn pod(&self, build_id: u64) -> String {
        let pod = self.cluster.wait_for_pod(|pod| is_of(pod, build_id)).await;
        pod["metadata"]["name"].as_str().expect("a name").to_owned()
    }

    pub(crate) fn pods(&self, build_id: u64) -> Vec<Value> {
        self.cluster.pods().into_iter().filter(|pod| is_of(pod, build_id)).collect()
    }

    pub(crate) fn posts(&self, build_id: u64) -> usize {
        let calls = self.cluster.calls();
        calls
            .iter()
            .filter(|call| call.verb == "create" && call.resource == "pods" && is_of(&call.body, build_id))
            .count()
    }

    /// How often the pods of a build were listed: once before its start, and at each look.
    pub(crate) fn looks(&self, build_id: u64) -> usize {
        let selector = format!("sdbuild={build_id}");
        let is_look = |query: &BTreeMap<String, String>| query.get("labelSelector") == Some(&selector);
        self.cluster.calls().iter().filter(|call| call.verb == "list" && is_look(&call.query)).count()
    }

    /// Waits for so many more looks at a build.
    pub(crate) async fn more_looks(&self, build_id: u64, count: usize) {
        let before = self.looks(build_id);
        self.cluster.wait_until("it is looked at", |_| self.looks(build_id) >= before + count).await;
    }

    /// Lets the pod of a build run.
    pub(crate) async fn run(&self, build_id: u64) {
        let pod = self.pod(build_id).await;
        self.cluster.schedule(&pod, "node-a");
        self.cluster.running(&pod);
    }

    /// Waits until no message is left, drains the workers, and checks that they have held none and that the token is nowhere.
    /// Returns their logs.
    pub(crate) async fn finish(self, workers: impl IntoIterator<Item = Process>) -> String {
        let mut workers: Vec<_> = workers.into_iter().collect();
        let mut logs = std::mem::take(&mut *self.logs.lock());
        loop {
            let mut left = BTreeMap::new();
            let empty = async {
                left = self.ready().await;
                while !left.is_empty() {
                    left = self.ready().await;
                }
            };
            let ended = tokio::time::timeout(TEST_TIMEOUT, empty).await;
            for worker in workers.drain(..) {
                logs.push_str(&worker.drained().await);
            }
            assert!(ended.is_ok(), "messages are left: {left:?}; {logs}");
            if self.ready().await.is_empty() {
                break;
            }
            // The last message was being followed by a check.
            workers.push(self.worker());
        }
        self.has_no_token(&logs);
        broker::api(Method::DELETE, &format!("vhosts/{}", self.vhost), None).await;
        logs
    }

    fn has_no_token(&self, logs: &str) {
        assert!(!logs.contains("eyJ"), "{logs}");
        let calls = self.cluster.calls();
        for call in calls.iter().filter(|call| call.resource != "secrets" && !self.has_executor) {
            assert!(!call.body.to_string().contains("eyJ"), "{call:?}");
        }
        let mut folders = vec![self.folder.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    folders.push(entry.path());
                    continue;
                }
                let bytes = std::fs::read(entry.path()).unwrap_or_default();
                assert!(!bytes.windows(3).any(|part| part == b"eyJ"), "{}", entry.path().display());
            }
        }
    }
}

pub(crate) fn is_of(pod: &Value, build_id: u64) -> bool {
    pod["metadata"]["labels"]["sdbuild"].as_str() == Some(&build_id.to_string())
}

pub(crate) fn status(code: u16, message: &str) -> How {
    How::Status { code, message: message.to_owned() }
}
