//! RabbitMQ for tests: the one that `tests/run` has started, and others of a test's own.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A broker of one test, which it may stop and start. Removed on drop.
pub(crate) struct Broker {
    folder: tempfile::TempDir,
    output: String,
}

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support/rabbitmq")
}

impl Broker {
    /// Starts a broker with `extra` in its configuration.
    pub(crate) fn start(extra: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("rabbitmq.extra"), extra).expect("it is written");
        let mut broker = Self { folder, output: String::new() };
        broker.up();
        broker
    }

    pub(crate) fn up(&mut self) {
        let again = !self.output.is_empty();
        let output = self.command("start").output().expect("the script can be run");
        assert!(output.status.success(), "RabbitMQ does not start: {}", String::from_utf8_lossy(&output.stderr));
        self.output = String::from_utf8(output.stdout).expect("text");
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
        assert!(self.command("stop").status().expect("the script can be run").success());
    }

    /// Makes the broker store its list of queues, which it keeps in memory for some seconds: RabbitMQ
    /// 3.10.8 that is killed before forgets a queue (mnesia), or has a new empty log for a quorum queue (dets),
    /// although it had confirmed it.
    pub(crate) fn store_queue_list(&self) {
        self.ctl(&["eval", "mnesia:sync_log(), mnesia:dump_log(), [dets:sync(Table) || Table <- dets:all()]."]);
    }

    pub(crate) fn kill(&self) {
        assert!(self.command("kill").status().expect("the script can be run").success());
    }

    pub(crate) fn ctl(&self, arguments: &[&str]) -> String {
        let output = self.command("ctl").args(arguments).output().expect("the script can be run");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
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
        self.value("AMQP")
    }

    pub(crate) fn tls_uri(&self) -> String {
        self.value("AMQPS")
    }

    /// The directory of its certificates: `ca.pem`, `client.pem`, `client.key`.
    pub(crate) fn tls(&self) -> PathBuf {
        self.folder.path().join("tls")
    }

    fn value(&self, name: &str) -> String {
        let line = self.output.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        line.expect("it says where it is").to_owned()
    }

    fn command(&self, what: &str) -> Command {
        let mut command = Command::new(script());
        command.arg(what).arg(self.folder.path()).stdin(Stdio::null());
        command
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        drop(self.command("kill").stderr(Stdio::null()).status());
    }
}

/// The broker that all tests share; `None` where there is none, which is a failure in CI.
pub(crate) fn shared() -> Option<String> {
    let uri = std::env::var("JOURNEYMAN_TEST_AMQP").ok().filter(|uri| !uri.is_empty());
    let needed = std::env::var("CI").is_ok_and(|value| value == "true");
    assert!(uri.is_some() || !needed, "JOURNEYMAN_TEST_AMQP names no broker; tests/run starts one");
    if uri.is_none() {
        eprintln!("NOT TESTED: JOURNEYMAN_TEST_AMQP names no broker; tests/run starts one");
    }
    uri
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
