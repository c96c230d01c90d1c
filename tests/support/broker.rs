//! RabbitMQ for tests: the one that `tests/run` has started, and others of a test's own.

use std::path::PathBuf;
use std::time::Duration;

use journeyman_platform::amqp;
use journeyman_platform::amqp::lapin::options::ConfirmSelectOptions;
use journeyman_platform::amqp::lapin::{Channel, Connection};

use crate::support::needs;
use crate::support::server::Server;

/// A broker of one test, which it may stop and start. Removed on drop.
pub(crate) struct Broker {
    server: Server,
    folder: tempfile::TempDir,
}

impl Broker {
    /// `None` where there is no RabbitMQ.
    pub(crate) fn own() -> Option<Self> {
        shared()?;
        Some(Self::start(""))
    }

    /// Starts a broker with `extra` in its configuration.
    pub(crate) fn start(extra: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("rabbitmq.extra"), extra).expect("it is written");
        let mut broker = Self { server: Server::new("rabbitmq", folder.path()), folder };
        broker.up();
        broker
    }

    pub(crate) fn up(&mut self) {
        let again = self.server.value("AMQP").is_some();
        self.server.start().expect("RabbitMQ starts");
        std::fs::write(self.folder.path().join("up"), "").expect("it is written");
        if again {
            // RabbitMQ 3.10.8: of some 70 quorum queues whose node was killed, three elected no leader afterwards, one of them not
            // within four minutes. One that has a leader does not care.
            self.ctl(&[
                "eval",
                "[ra:trigger_election(amqqueue:get_pid(Q)) || Q <- rabbit_amqqueue:list_local_quorum_queues()].",
            ]);
        }
    }

    pub(crate) fn stop(&self) {
        self.server.run("stop", &[]).expect("it stops");
    }

    /// Makes the broker store its list of queues, which it keeps in memory for some seconds: RabbitMQ
    /// 3.10.8 that is killed before forgets a queue (mnesia), or has a new empty log for a quorum queue (dets),
    /// although it had confirmed it.
    pub(crate) fn store_queue_list(&self) {
        self.ctl(&["eval", "mnesia:sync_log(), mnesia:dump_log(), [dets:sync(Table) || Table <- dets:all()]."]);
    }

    pub(crate) fn kill(&self) {
        self.server.run("kill", &[]).expect("it is killed");
    }

    pub(crate) fn ctl(&self, arguments: &[&str]) -> String {
        self.server.run("ctl", arguments).unwrap_or_else(|error| panic!("{arguments:?}: {error}"))
    }

    /// The state of its queues, and the end of its log.
    pub(crate) fn diagnostics(&self) -> String {
        const LINES: usize = 60;
        let queues = self.ctl(&["list_queues", "name", "type", "state", "consumers", "messages"]);
        let logs = std::fs::read_dir(self.folder.path().join("log")).into_iter().flatten().flatten();
        let texts = logs.map(|entry| std::fs::read_to_string(entry.path()).unwrap_or_default());
        let ends = texts.map(|text| {
            let lines: Vec<&str> = text.lines().collect();
            lines[lines.len().saturating_sub(LINES)..].join("\n")
        });
        format!("{queues}\n{}", ends.collect::<Vec<_>>().join("\n\n"))
    }

    pub(crate) fn uri(&self) -> String {
        self.server.value("AMQP").expect("it says where it is")
    }

    pub(crate) fn tls_uri(&self) -> String {
        self.server.value("AMQPS").expect("it says where it is")
    }

    /// The directory of its certificates: `ca.pem`, `client.pem`, `client.key`.
    pub(crate) fn tls(&self) -> PathBuf {
        self.folder.path().join("tls")
    }
}

/// The broker that all tests share; `None` where there is none, which is a failure in CI.
pub(crate) fn shared() -> Option<String> {
    needs("JOURNEYMAN_TEST_AMQP")
}

/// Whether it is the newer release of tests/support/rabbitmq, which permits no transient queue.
pub(crate) fn is_newer() -> bool {
    std::env::var_os("JOURNEYMAN_TEST_RABBITMQ_ROOT").is_some_and(|root| !root.is_empty())
}

/// The address of another vhost of a broker.
pub(crate) fn in_vhost(uri: &str, vhost: &str) -> String {
    format!("{}/{vhost}", uri.rsplit_once('/').expect("an address with a vhost").0)
}

/// A channel that confirms, and its connection.
pub(crate) async fn connect(broker: &amqp::Broker) -> (Connection, Channel) {
    let connection = broker.connect("test").await.expect("the broker lets us in");
    let channel = connection.create_channel().await.expect("a channel");
    channel.confirm_select(ConfirmSelectOptions::default()).await.expect("confirms");
    (connection, channel)
}

pub(crate) async fn connect_to(uri: &str) -> (Connection, Channel) {
    connect(&amqp::Broker::new(&amqp::BrokerConfig::new(uri)).expect("the address is good")).await
}

/// The management interface of the shared broker.
pub(crate) fn management() -> String {
    let base = std::env::var("JOURNEYMAN_TEST_AMQP_MANAGEMENT").expect("tests/run says where it is, with the broker");
    match base.split_once('@') {
        Some((_, host)) => format!("http://{host}"),
        None => base,
    }
}

/// Calls the management interface of the shared broker.
pub(crate) async fn api(method: reqwest::Method, path: &str, body: Option<serde_json::Value>) -> serde_json::Value {
    // It may be there already.
    rustls::crypto::ring::default_provider().install_default().ok();
    let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(60)).build().expect("a client");
    let mut asked = http.request(method, format!("{}/api/{path}", management())).basic_auth("guest", Some("guest"));
    if let Some(body) = body {
        asked = asked.header("content-type", "application/json").body(body.to_string());
    }
    let answer = asked.send().await.expect("it answers");
    assert!(answer.status().is_success(), "{path}: {}", answer.status());
    serde_json::from_slice(&answer.bytes().await.expect("it is read")).unwrap_or_default()
}
