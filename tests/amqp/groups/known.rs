//! Faults of a known controller, by their numbers: none of them is ours. ARCHITECTURE.md lists where the others are tested.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use journeyman_platform::amqp;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};

use super::seen::until;
use super::{Pool, assert_includes};
use crate::amqp::support::{Client, TEST_TIMEOUT, pika_python, within};
use crate::support::broker::Broker;

impl Pool {
    pub(super) fn socket(&self) -> PathBuf {
        self.folder.path().join("workers/controller.sock")
    }

    /// What its controller says of the pool, once it is so.
    pub(super) async fn sees(&self, what: &str, like: impl Fn(&Value) -> bool) -> Value {
        until(&self.socket(), what, like).await
    }

    /// Workers that reply once this file exists.
    fn waiting_workers(&self) -> (PathBuf, String) {
        let gate = self.folder.path().join("open");
        let wait = format!("#!/bin/sh\nuntil [ -e {} ]; do sleep 0.1; done\n", gate.display());
        let workers = self.workers(&format!("{wait}printf '{{\"type\":\"answer\",\"json\":1}}\\n' >&3\n"));
        (gate, workers)
    }

    /// The processes of its workers.
    fn workers_there(&self) -> Vec<i32> {
        let mut pids: Vec<i32> = self.worker_records().into_iter().map(|(pid, _)| pid).collect();
        pids.sort_unstable();
        pids
    }
}

/// The group of this key, as a controller shows it.
fn group<'a>(seen: &'a Value, key: &str) -> &'a Value {
    let groups = seen["groups"].as_array();
    groups.and_then(|groups| groups.iter().find(|group| group["key"] == key)).unwrap_or(&Value::Null)
}

#[tokio::test(flavor = "multi_thread")]
async fn b01_a_thousand_cold_keys_at_once_reach_their_queues_and_none_waits_for_another() {
    const KEYS: usize = 1_000;
    let Some(pool) = Pool::new().await else { return };
    let _controller = pool.active("").await;
    for number in 0..KEYS {
        pool.ask(&format!("k{number}"), &number.to_string()).await;
    }
    // All of them at once are much for a slow machine.
    for part in [KEYS / 4, KEYS / 2, KEYS] {
        let forwarded = |seen: &Value| seen["counters"]["orphans_forwarded"].as_u64() >= Some(part as u64);
        pool.sees("more are forwarded", forwarded).await;
    }
    let seen = pool
        .sees("each has its request", |seen| {
            let groups = seen["groups"].as_array().expect("a list");
            groups.len() == KEYS && groups.iter().all(|group| group["ready"] == 1)
        })
        .await;
    assert_eq!((&seen["orphans_held"], &seen["counters"]["orphans_forwarded"]), (&0.into(), &KEYS.into()), "once each");
    assert_eq!(seen["counters"]["queue_operation_failures"], 0, "{seen}");
}

#[tokio::test(flavor = "multi_thread")]
async fn b02_a_worker_gets_a_key_of_any_characters_unchanged() {
    let Some(pool) = Pool::new().await else { return };
    let _controller = pool.active(&pool.echo()).await;
    let ascii: Vec<char> = (0..=127_u8).map(char::from).filter(|char| *char != amqp::REPLACEMENT_CHAR).collect();
    let mut keys: Vec<String> = ascii.chunks(64).map(|chunk| chunk.iter().collect()).collect();
    keys.push("äß€😀 %41 %zz ../*#".to_owned());
    for (number, key) in keys.iter().enumerate() {
        pool.ask(key, &number.to_string()).await;
    }
    for (number, key) in keys.iter().enumerate() {
        let answer = pool.answered(&number.to_string()).await;
        let told = answer["key"].as_str().expect("a key");
        assert_eq!(urlencoding::decode(told).expect("text"), key.as_str());
    }
    let seen = pool.sees("it is quiet", |seen| seen["orphans_held"] == 0).await;
    assert_eq!(seen["counters"]["orphans_forwarded"], keys.len(), "no circle: {seen}");
}

#[tokio::test(flavor = "multi_thread")]
async fn b06_a_queue_with_requests_is_not_deleted() {
    let Some(pool) = Pool::new().await else { return };
    let _controller = pool.active("unbind_delay = \"1s\"\nstop_delay = \"1s\"\n").await;
    pool.ask("a", "1").await;
    // This takes several times its delays.
    let later = |seen: &Value| seen["seconds_in_role"].as_f64().is_some_and(|seconds| seconds > 6.0);
    let active = |seen: &Value| group(seen, "a")["phase"] == "active" && group(seen, "a")["ready"] == 1;
    let seen = pool.sees("time has passed", |seen| later(seen) && active(seen)).await;
    assert_includes(&seen["counters"], &json!({ "broker_disconnects": 0, "queue_operation_failures": 0 }));
    pool.ask("a", "2").await;
    pool.until(&format!("{}-req-a", pool.name), Some((2, 0))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn b09_a_request_that_its_queue_does_not_take_stays_an_orphan_until_it_does() {
    let Some(pool) = Pool::new().await else { return };
    let queue = format!("{}-req-k", pool.name);
    pool.client.declare_narrow(&queue).await;
    assert!(pool.client.publish_to(&queue, Client::properties("first", "/echo"), b"1").await);
    let mut controller = pool.active("").await;
    pool.ask("k", "second").await;
    controller.says("the queue exists with other arguments; adopting it").await;
    pool.sees("it is in hand", |seen| seen["orphans_held"] == 1 && group(seen, "k")["ready"] == 1).await;
    let id = async || {
        let got = pool.client.get(&queue).await;
        got.and_then(|delivery| delivery.properties.correlation_id().as_ref().map(ToString::to_string))
    };
    assert_eq!(id().await.as_deref(), Some("first"));
    pool.until(&queue, Some((1, 0))).await;
    assert_eq!(id().await.as_deref(), Some("second"));
    let seen = pool.sees("it was forwarded", |seen| seen["orphans_held"] == 0).await;
    assert_eq!(seen["counters"]["orphans_forwarded"], 1, "{seen}");
}

#[tokio::test(flavor = "multi_thread")]
async fn b10_a_worker_that_died_is_started_again() {
    let Some(pool) = Pool::new().await else { return };
    let mut controller = pool.active(&pool.echo()).await;
    pool.echoes("a", "1").await;
    let first = pool.workers_there();
    let pid = first.first().and_then(|pid| Pid::from_raw(*pid)).expect("a worker");
    kill_process_group(pid, Signal::KILL).expect("it is there");
    controller.says("worker exited").await;
    pool.echoes("a", "2").await;
    assert_ne!(pool.workers_there(), first);
}

#[tokio::test(flavor = "multi_thread")]
async fn b12_a_killed_broker_loses_no_durable_request_and_keeps_its_workers() {
    let Some(mut broker) = Broker::own() else { return };
    let pool = Pool::at(broker.uri()).await;
    let (gate, workers) = pool.waiting_workers();
    let mut controller = pool.active(&format!("queue_type = \"quorum\"\n{workers}")).await;
    for number in 0..20 {
        let properties = Client::properties(&number.to_string(), "/echo").with_delivery_mode(2);
        assert!(pool.publish("a", properties.with_reply_to("answers".into())).await);
    }
    let at_work = |seen: &Value| group(seen, "a")["workers"]["busy"] == 1;
    pool.sees("a worker is at work", at_work).await;
    let before = pool.workers_there();
    broker.store_queue_list();
    broker.kill();
    controller.says("lost connection to the broker").await;
    let broker = tokio::task::spawn_blocking(move || {
        broker.up();
        broker
    });
    let broker = broker.await.expect("it starts again");
    let back = |seen: &Value| {
        seen["role"] == "active" && group(seen, "a")["key"] == "a" && group(seen, "a")["waiting_for"].is_null()
    };
    pool.sees("it has the pool again", back).await;
    assert_eq!(pool.workers_there(), before, "its worker was left alone");
    let client = Client::without_queue(&crate::amqp::support::broker(&pool.uri), "answers").await;
    client.declare(crate::amqp::support::Kind::Durable, "answers").await;
    let mut answers = client.consume("answers").await;
    // It tries again after half a minute at most, and a queue on disk may take its time to come back as well.
    let queue = format!("{}-req-a", pool.name);
    let is_back = async { while pool.depth(&queue).await.is_none_or(|(_, consumers)| consumers == 0) {} };
    if tokio::time::timeout(TEST_TIMEOUT, is_back).await.is_err() {
        let (log, worker) = (controller.log(), pool.last_words());
        panic!("its worker has not come back within {TEST_TIMEOUT:?}\n{log}\n{worker}\n{}", broker.diagnostics());
    }
    std::fs::write(&gate, "").expect("it is written");
    let mut left: std::collections::BTreeSet<String> = (0..20).map(|number| number.to_string()).collect();
    while !left.is_empty() {
        let why = || format!("{left:?} are left\n{}\n{}", controller.log(), pool.last_words());
        let answer = answers.next_or(why).await;
        left.remove(answer.properties.correlation_id().as_ref().expect("an id").as_str());
    }
    assert_eq!(pool.workers_there(), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn b13_a_group_has_as_many_workers_as_its_load_needs() {
    let Some(pool) = Pool::new().await else { return };
    let (gate, workers) = pool.waiting_workers();
    let _controller = pool.active(&format!("max = 3\n{workers}")).await;
    for number in 0..5 {
        pool.ask("a", &number.to_string()).await;
    }
    let seen = pool.sees("three are at work", |seen| group(seen, "a")["workers"]["busy"] == 3).await;
    assert_eq!((&group(&seen, "a")["wanted"], &seen["counters"]["workers_started"]), (&3.into(), &3.into()), "{seen}");
    std::fs::write(&gate, "").expect("it is written");
    for number in 0..5 {
        pool.answered(&number.to_string()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a3_one_request_starts_one_worker() {
    let Some(pool) = Pool::new().await else { return };
    let (gate, workers) = pool.waiting_workers();
    let _controller = pool.active(&format!("max = 4\n{workers}")).await;
    pool.ask("a", "1").await;
    let at_work = |seen: &Value| group(seen, "a")["workers"]["busy"] == 1 && group(seen, "a")["ready"] == 0;
    let seen = pool.sees("it is at work", at_work).await;
    let since = seen["seconds_in_role"].as_f64().unwrap_or_default();
    pool.sees("time has passed", |seen| seen["seconds_in_role"].as_f64().is_some_and(|now| now > since + 3.0)).await;
    std::fs::write(&gate, "").expect("it is written");
    pool.answered("1").await;
    let seen = pool.sees("it is idle", |seen| group(seen, "a")["workers"]["idle"] == 1).await;
    assert_eq!(seen["counters"]["workers_started"], 1, "{seen}");
}

#[tokio::test(flavor = "multi_thread")]
async fn c13_an_adopted_idle_worker_is_idle() {
    let Some(pool) = Pool::new().await else { return };
    let echo = pool.echo();
    let first = pool.active(&echo).await;
    pool.echoes("a", "1").await;
    // After `started`, `ready`, and two reports of the request it has said that it is ready again.
    let has_reported = |seen: &Value| seen["counters"]["activity_reports"].as_u64() >= Some(5);
    pool.sees("it is idle", |seen| group(seen, "a")["workers"]["idle"] == 1 && has_reported(seen)).await;
    first.signal(Signal::KILL);
    first.ends().await;
    let mut second = pool.active(&echo).await;
    second.says("adopted running workers").await;
    let seen = pool.sees("it is adopted", |seen| group(seen, "a")["workers"] != Value::Null).await;
    assert_includes(&group(&seen, "a")["workers"], &json!({ "idle": 1, "busy": 0, "starting": 0 }));
}

fn support(name: &str) -> PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/support").join(name)
}

/// Runs a foreign client; returns what it prints.
async fn asks(python: &str, pool: &Pool, key: &[u8], count: usize) -> String {
    let mut client = std::process::Command::new(python);
    client.arg(support("known_client.py")).arg(&pool.name).arg(OsStr::from_bytes(key)).arg(count.to_string());
    client.env("AMQP_URI", &pool.uri).stdin(std::process::Stdio::null());
    let said = tokio::task::spawn_blocking(move || client.output().expect("it runs"));
    let said = within("the client", said).await.expect("it ends");
    assert!(said.status.success(), "{said:?}");
    String::from_utf8(said.stdout).expect("text")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_existing_client_and_an_existing_worker_are_served_as_they_are() {
    let (Some(pool), Some(python)) = (Pool::new().await, pika_python()) else { return };
    let delays = "unbind_delay = \"3s\"\nstop_delay = \"1s\"\n";
    let worker = support("known_worker.py");
    let _controller = pool.active(&format!("command = [\"{python}\", \"{}\"]\n{delays}", worker.display())).await;
    for key in ["42", "infra%3D42"] {
        let said = asks(&python, &pool, key.as_bytes(), 3).await;
        let lines: Vec<String> = (0..3).map(|number| format!("ok {{\"echo\":{number},\"key\":\"{key}\"}}\n")).collect();
        assert_eq!(said, lines.concat());
    }
    // Without demand its queue is deleted, and the worker exits then or by a signal.
    pool.until(&format!("{}-req-42", pool.name), None).await;
    pool.until(&format!("{}-req-infra%3D42", pool.name), None).await;
    assert_eq!(pool.workers_there(), Vec::<i32>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn b02_a_key_of_invalid_utf8_is_answered_with_an_error() {
    let (Some(pool), Some(python)) = (Pool::new().await, pika_python()) else { return };
    let _controller = pool.active("").await;
    let said = asks(&python, &pool, b"a\xff", 2).await;
    assert_eq!(said.matches("core_error ").count(), 2, "{said}");
    assert!(said.contains("journeyman:dead_letter:invalid-key"), "{said}");
    let seen = pool.sees("it has the pool", |seen| seen["role"] == "active" && seen["orphans_held"] == 0).await;
    assert_eq!(seen["counters"]["broker_disconnects"], 0, "{seen}");
}
