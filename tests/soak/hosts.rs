//! The processes: a queue that can be killed and started again, and the worker.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use journeyman::control::client::ControlClient;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::task_queue::{CLIENT_ID, TOKEN};

const POLL_INTERVAL: Duration = Duration::from_millis(10);
const QUEUE_LOG: &str = "queue.log";
const PROGRAM: &str = env!("CARGO_BIN_EXE_journeyman");

/// The file in which each payload writes its run at its start.
pub fn ledger(folder: &Path) -> PathBuf {
    folder.join("started")
}

fn journeyman(folder: &Path, log: &str) -> Command {
    let mut command = Command::new(PROGRAM);
    let log = File::options().append(true).create(true).open(folder.join(log)).expect("a log");
    command.env_clear().current_dir(folder).env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.env("JOURNEYMAN__HOST__METADATA_SERVICE", "off").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command
}

/// The embedded queue in its own process.
pub struct Queue {
    child: Child,
    pub address: SocketAddr,
}

impl Queue {
    /// On a free port.
    pub fn start(folder: &Path) -> Self {
        let mut child = Self::listening(folder, "127.0.0.1:0");
        let root_url = loop {
            let log = std::fs::read_to_string(folder.join(QUEUE_LOG)).expect("a log");
            let mut lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            if let Some(root_url) = lines.find_map(|line| line["root_url"].as_str().map(str::to_owned)) {
                break root_url;
            }
            assert!(child.try_wait().expect("it can be asked").is_none(), "the queue ended before it listened: {log}");
            std::thread::sleep(POLL_INTERVAL);
        };
        Self { child, address: root_url.trim_start_matches("http://").parse().expect("an address") }
    }

    fn listening(folder: &Path, listen: &str) -> Child {
        let mut command = journeyman(folder, QUEUE_LOG);
        command.args(["queue", "--db", "queue.db", "--listen", listen, "--log-format", "json"]);
        command.env("JOURNEYMAN__QUEUE__CLAIM_TIMEOUT", "1m");
        command.env("JOURNEYMAN__QUEUE__CLIENTS__TESTER__ACCESS_TOKEN_FILE", "env:TEST_TOKEN").env("TEST_TOKEN", TOKEN);
        command.spawn().expect("the queue starts")
    }

    /// On the same port.
    pub fn restart(&mut self, folder: &Path) {
        self.child.kill().expect("it is there");
        self.child.wait().expect("it ends");
        self.child = Self::listening(folder, &self.address.to_string());
    }

    pub fn assert_running(&mut self) {
        let ended = self.child.try_wait().expect("it can be asked");
        assert!(ended.is_none(), "the queue has ended: {ended:?}");
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// The worker in its own process.
pub struct Worker {
    child: Child,
    socket: PathBuf,
}

impl Worker {
    /// One source of each dialect.
    pub fn start(folder: &Path, root: &str) -> Self {
        let source = |name: &str| {
            format!(
                "[source.{name}]\nkind = \"taskcluster\"\ndialect = \"{name}\"\nroot_url = \"{root}\"\n\
                 task_queue = \"soak/{name}\"\nclient_id = \"{CLIENT_ID}\"\naccess_token_file = \"token\"\n"
            )
        };
        let text = format!(
            "[worker]\nid = \"w\"\ngroup = \"soak\"\ncapacity = 8\nwork_dir = \"work\"\ntermination_grace = \"1s\"\n\
             status_poll_interval = \"5s\"\n{}{}",
            source("claim-work"),
            source("azure")
        );
        std::fs::write(folder.join("journeyman.toml"), text).expect("a file");
        std::fs::write(folder.join("token"), TOKEN).expect("a file");
        let mut command = journeyman(folder, "worker.log");
        let child = command.args(["worker", "--log-format", "json"]).spawn().expect("the worker starts");
        Self { child, socket: folder.join("work/control.sock") }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// `None` until it listens.
    pub fn client(&self) -> Option<ControlClient> {
        ControlClient::new(&self.socket).ok()
    }

    pub fn assert_running(&mut self) {
        let ended = self.child.try_wait().expect("it can be asked");
        assert!(ended.is_none(), "the worker has ended: {ended:?}");
    }

    pub fn drain(&mut self) -> Option<i32> {
        kill_process(Pid::from_child(&self.child), Signal::TERM).expect("it is there");
        self.child.wait().expect("it ends").code()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// A payload's process, which may have exited.
pub fn kill(process: i32) {
    if let Some(pid) = Pid::from_raw(process) {
        kill_process(pid, Signal::KILL).unwrap_or_default();
    }
}
