//! `journeyman controller` between clients and workers that it starts, on a real broker.

mod demand;
mod drivers;
mod example;
mod known;
mod orders;
mod poison;
mod policies;
mod refused;
mod seen;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use journeyman_platform::amqp;
use journeyman_platform::amqp::lapin::options::{BasicPublishOptions, QueueDeclareOptions};
use journeyman_platform::amqp::lapin::types::FieldTable;
use journeyman_platform::amqp::lapin::{BasicProperties, Confirmation};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;

use crate::amqp::controller::ECHO;
use crate::amqp::support::{Client, broker, shared_uri, within};
use crate::support::process::{self, Process};

/// A pool of a test's own.
struct Pool {
    name: String,
    folder: tempfile::TempDir,
    uri: String,
    client: Client,
}

impl Pool {
    async fn new() -> Option<Self> {
        Some(Self::at(shared_uri()?).await)
    }

    /// The pool is at a broker of a test's own.
    async fn at(uri: String) -> Self {
        let name = format!("p{}", uuid::Uuid::new_v4().simple());
        let client = Client::without_queue(&broker(&uri), "").await;
        Self { name, folder: tempfile::tempdir().expect("a folder"), uri, client }
    }

    /// Writes a configuration of it, with this said of the pool.
    fn write(&self, more: &str) -> PathBuf {
        let file = self.folder.path().join("controller.toml");
        let folder = self.folder.path().join("workers");
        let text = format!("[pool.{}]\nstate_dir = \"{}\"\n{more}", self.name, folder.display());
        std::fs::write(&file, text).expect("it is written");
        file
    }

    /// Starts a controller of it, with this said of the pool.
    fn controller(&self, more: &str) -> Process {
        let file = self.write(more);
        let mut command = Command::new(env!("CARGO_BIN_EXE_journeyman"));
        command.args(["controller", "--config"]).arg(file).env_clear();
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default()).env("WORKER_AMQP_URI", &self.uri);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        Process::of(command)
    }

    /// Starts a controller of it, and waits until that is the active one.
    async fn active(&self, more: &str) -> Process {
        let mut controller = self.controller(more);
        controller.says(READY).await;
        controller
    }

    /// The file in which its workers are written down.
    fn records(&self) -> PathBuf {
        self.folder.path().join("workers").join(&self.name)
    }

    /// Process and cgroup of each recorded worker.
    fn worker_records(&self) -> Vec<(i32, Option<String>)> {
        let Ok(state) = rusqlite::Connection::open(self.records().join("state.db")) else { return Vec::new() };
        state.busy_timeout(std::time::Duration::from_secs(5)).expect("it is set");
        // No table before the controller has started.
        let Ok(mut select) = state.prepare(
            "SELECT json_extract(record, '$.process.pid') AS pid, json_extract(record, '$.cgroup') FROM worker WHERE pid IS NOT NULL",
        ) else {
            return Vec::new();
        };
        let rows = select.query_map((), |row| Ok((row.get(0)?, row.get(1)?))).expect("the workers");
        rows.collect::<Result<_, _>>().expect("the workers")
    }

    /// What makes a controller start workers that echo.
    fn echo(&self) -> String {
        self.workers(ECHO)
    }

    /// What makes a controller start workers with this program.
    fn workers(&self, program: &str) -> String {
        let folder = self.folder.path();
        let more = "[source.requests]\nkind = \"amqp\"\nhandler = \"echo\"\n[host]\nmetadata_service = \"off\"\n";
        let config = process::config(folder, program, more);
        let worker = format!(
            "exec {} worker --config {} --work-dir {}/$WORKER_ID",
            env!("CARGO_BIN_EXE_journeyman"),
            config.display(),
            folder.display()
        );
        format!("command = [\"/bin/sh\", \"-c\", '{worker}']\n")
    }

    /// Workers that each request kills.
    fn killed_workers(&self) -> String {
        format!("queue_type = \"quorum\"\ndelivery_limit = 1\n{}", self.workers("#!/bin/sh\nkill -9 $PPID\n"))
    }

    /// Publishes a request under a key; whether it was routed.
    async fn publish(&self, key: &str, properties: BasicProperties) -> bool {
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let exchange = format!("{}-req-xchg", self.name);
        let channel = &self.client.channel;
        let confirm = channel.basic_publish(exchange.into(), key.into(), options, b"1", properties).await;
        matches!(confirm.expect("it is published").await.expect("it is confirmed"), Confirmation::Ack(None))
    }

    async fn ask(&self, key: &str, id: &str) {
        assert!(self.publish(key, Client::properties(id, "/echo")).await, "{key} leads somewhere");
    }

    /// Asks under a key, and waits for the last reply.
    async fn echoes(&self, key: &str, id: &str) -> Value {
        self.ask(key, id).await;
        self.answered(id).await
    }

    /// Waits for the last reply to a request.
    async fn answered(&self, id: &str) -> Value {
        loop {
            let answer = self.client.answer(id).await;
            if !answer.partial {
                assert_eq!(answer.status(), "ok", "{id}: {:?}", answer.json());
                return answer.json();
            }
        }
    }

    /// The reason of the error reply to a request.
    async fn rejected(&self, id: &str) -> String {
        let answer = self.client.answer(id).await;
        assert_eq!(answer.status(), "core_error", "{:?}", answer.json());
        answer.json()["context"]["reason"].as_str().expect("a reason").to_owned()
    }

    /// The logs of its workers, for the message of a failed assertion.
    fn last_words(&self) -> String {
        let logs = std::fs::read_dir(self.records()).into_iter().flatten().flatten().map(|entry| entry.path());
        let logs = logs.filter(|path| path.extension().is_some_and(|ending| ending == "log"));
        logs.map(|path| format!("{}:\n{}", path.display(), std::fs::read_to_string(&path).unwrap_or_default()))
            .collect()
    }

    /// How many requests wait in a queue, and how many consume from it; `None` where it is not there.
    async fn depth(&self, queue: &str) -> Option<(u32, u32)> {
        let connection = self.client.broker.connect("look").await.expect("the broker lets us in");
        let channel = connection.create_channel().await.expect("a channel");
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        match channel.queue_declare(queue.into(), options, FieldTable::default()).await {
            Ok(queue) => Some((queue.message_count(), queue.consumer_count())),
            Err(error) if amqp::reply_code(&error) == Some(amqp::NOT_FOUND) => None,
            Err(error) => panic!("{error}"),
        }
    }

    /// Polls a queue until it has this depth.
    async fn until(&self, queue: &str, like: Option<(u32, u32)>) {
        within(&format!("{queue} is {like:?}"), async { while self.depth(queue).await != like {} }).await;
    }
}

impl Drop for Pool {
    /// A controller keeps its workers running; a test does not.
    fn drop(&mut self) {
        for (pid, cgroup) in self.worker_records() {
            if let Some(group) = Pid::from_raw(pid) {
                // It may have exited.
                kill_process_group(group, Signal::KILL).ok();
            }
            if let Some(group) = cgroup.as_deref().map(Path::new) {
                std::fs::write(group.join("cgroup.kill"), "1").ok();
                // Killed processes take a moment to exit.
                let until = std::time::Instant::now() + std::time::Duration::from_secs(2);
                while std::fs::remove_dir(group).is_err() && group.exists() && std::time::Instant::now() < until {
                    std::thread::yield_now();
                }
                group.parent().and_then(|pool| std::fs::remove_dir(pool).ok());
            }
        }
    }
}

/// Runs `journeyman controller` with these arguments.
async fn run(socket: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_journeyman"));
    command.arg("controller").args(arguments).arg("--socket").arg(socket).env_clear().env("USER", "ana");
    command.stdin(Stdio::null());
    let running = tokio::task::spawn_blocking(move || command.output().expect("it runs"));
    within("a command", running).await.expect("it ends")
}

/// What a command prints that succeeds.
async fn succeeds(socket: &Path, arguments: &[&str]) -> String {
    let output = run(socket, arguments).await;
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// What a command prints that fails.
async fn fails(socket: &Path, arguments: &[&str]) -> String {
    let Output { status, stdout, stderr } = run(socket, arguments).await;
    let text = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert_eq!(status.code(), Some(1), "{arguments:?}: {text}");
    text
}

/// Checks members of a JSON value, at any depth; of a list, the first ones.
fn assert_includes(value: &Value, expected: &Value) {
    assert!(includes(value, expected), "{expected} is not in {value}");
}

fn includes(value: &Value, expected: &Value) -> bool {
    match expected {
        Value::Object(members) => members.iter().all(|(name, member)| includes(&value[name], member)),
        Value::Array(items) => items.iter().enumerate().all(|(index, item)| includes(&value[index], item)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value == expected,
    }
}

const READY: &str = "acquired the pool; this controller is active";

fn files(folder: &Path, ending: &str) -> usize {
    let entries = std::fs::read_dir(folder).expect("a folder").flatten();
    entries.filter(|entry| entry.path().to_string_lossy().ends_with(ending)).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cold_key_is_answered_by_a_worker_that_starts_for_it_and_stops_without_demand() {
    let Some(pool) = Pool::new().await else { return };
    let delays = "unbind_delay = \"8s\"\nstop_delay = \"4s\"\n";
    let controller = pool.active(&format!("{delays}{}", pool.echo())).await;
    for key in ["infra=42 ü", "infra%3D42%20%C3%BC", "7"] {
        pool.ask(key, key).await;
    }
    for key in ["infra=42 ü", "infra%3D42%20%C3%BC", "7"] {
        pool.answered(key).await;
    }
    let queue = format!("{}-req-infra%3D42%20%C3%BC", pool.name);
    pool.until(&queue, None).await;
    pool.until(&format!("{}-req-7", pool.name), None).await;
    let workers = pool.records();
    assert_eq!((pool.worker_records(), files(&workers, ".log")), (Vec::new(), 2), "{}", controller.log());
    let log = controller.drained().await;
    assert_eq!(log.matches("worker started").count(), 2, "one for each key: {log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn b08_requests_under_many_cold_keys_reach_their_queues_though_their_controller_is_killed() {
    const KEYS: usize = 300;
    let Some(pool) = Pool::new().await else { return };
    let first = pool.active("").await;
    for number in 0..KEYS {
        pool.ask(&format!("k{number}"), &number.to_string()).await;
        if number == KEYS / 2 {
            first.signal(Signal::KILL);
        }
    }
    drop(first);
    let _second = pool.active("").await;
    for number in 0..KEYS {
        let queue = format!("{}-req-k{number}", pool.name);
        let there = async { while pool.depth(&queue).await.is_none_or(|(ready, _)| ready == 0) {} };
        within(&format!("{queue} has its request"), there).await;
    }
    pool.until(&format!("{}-orphan", pool.name), Some((0, 1))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn b03_many_expired_requests_are_answered_with_the_reason() {
    let Some(pool) = Pool::new().await else { return };
    let _controller = pool.active("message_ttl = \"200ms\"\n").await;
    for number in 0..300 {
        pool.ask("idle", &number.to_string()).await;
    }
    for number in 0..300 {
        let answer = pool.client.answer(&number.to_string()).await;
        assert_eq!(answer.status(), "core_error");
        let body = answer.json();
        assert_eq!(body["context"]["reason"], "expired", "{body}");
        assert_eq!(body["context"]["key"], "idle");
    }
    pool.until(&format!("{}-deadletter", pool.name), Some((0, 1))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn b14_a_second_controller_stands_by_takes_over_and_finds_the_workers_of_the_first() {
    let Some(pool) = Pool::new().await else { return };
    let echo = pool.echo();
    let first = pool.active(&echo).await;
    let mut second = pool.controller(&echo);
    second.says("standing by").await;
    // Its worker is started while the second one stands by.
    pool.echoes("a", "1").await;
    first.signal(Signal::KILL);
    second.says(READY).await;
    assert!(second.log().contains("adopted running workers"), "{}", second.log());
    pool.echoes("a", "2").await;
    assert_eq!(second.log().matches("worker started").count(), 0, "the first one's worker goes on");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_inherits_no_file_of_who_started_its_controller_and_no_core_is_written() {
    let Some(pool) = Pool::new().await else { return };
    let file = pool.folder.path().join("controller.toml");
    let look = "command = [\"/bin/sh\", \"-c\", \"ls /proc/self/fd; grep core /proc/self/limits\"]";
    let text =
        format!("[pool.{}]\nstate_dir = \"{}\"\n{look}", pool.name, pool.folder.path().join("workers").display());
    std::fs::write(&file, text).expect("it is written");
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "exec \"$@\" 7</dev/null", "sh", env!("CARGO_BIN_EXE_journeyman"), "controller", "--config"]);
    command.arg(file).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.env("WORKER_AMQP_URI", &pool.uri).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut controller = Process::of(command);
    controller.says(READY).await;
    pool.ask("a", "1").await;
    controller.says("worker exited").await;
    // Another one may have begun already, and may have said nothing yet.
    let seen = within("one has said all", async {
        loop {
            let logs = std::fs::read_dir(pool.records()).expect("a folder").flatten().map(|entry| entry.path());
            let logs = logs.filter(|path| path.extension().is_some_and(|extension| extension == "log"));
            let mut said = logs.map(|path| std::fs::read_to_string(path).expect("it is UTF-8"));
            if let Some(seen) = said.find(|seen| seen.contains("Max core file size") && seen.ends_with('\n')) {
                return seen;
            }
            tokio::task::yield_now().await;
        }
    })
    .await;
    let limit = seen.lines().find(|line| line.starts_with("Max core file size")).expect("the limit");
    assert_eq!(limit.split_whitespace().nth(4), Some("0"), "{seen}");
    // The last one is the folder that is listed.
    let open: Vec<&str> = seen.lines().take_while(|line| line.parse::<u32>().is_ok()).collect();
    assert_eq!(open, ["0", "1", "2", "3"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_came_to_a_queue_while_there_was_no_controller_gets_a_worker() {
    let Some(pool) = Pool::new().await else { return };
    // It exits at once, so that the key has a queue and no worker.
    let mut first = pool.active("command = [\"/bin/false\"]\n").await;
    pool.ask("a", "1").await;
    first.says("worker exited").await;
    first.drained().await;
    let _second = pool.active(&pool.echo()).await;
    pool.answered("1").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn b05_a_request_that_kills_its_workers_is_answered_and_put_aside() {
    let Some(pool) = Pool::new().await else { return };
    let delays = "unbind_delay = \"3s\"\nstop_delay = \"1s\"\n";
    let controller = pool.active(&format!("{delays}{}", pool.killed_workers())).await;
    pool.ask("a", "1").await;
    assert_eq!(pool.rejected("1").await, "delivery_limit");
    pool.until(&format!("{}-poison", pool.name), Some((1, 0))).await;
    // A quorum queue is deleted without the conditions that it does not know.
    pool.until(&format!("{}-req-a", pool.name), None).await;
    assert!(!controller.log().contains("lost connection to the broker"), "{}", controller.log());
}
