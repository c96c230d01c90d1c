//! The status of a controller, its reload, and its readiness.

use std::path::Path;

use journeyman::client::{RpcClient, RpcRequest};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::{Pool, READY, assert_includes, succeeds};
use crate::amqp::configuration::listening;
use crate::amqp::support::{TEST_TIMEOUT, within};
use crate::support::http::get;

/// `journeyman controller status`.
pub(super) async fn status(socket: &Path, more: &[&str]) -> String {
    succeeds(socket, &[&["status"], more].concat()).await
}

/// Polls the first pool until it is as expected.
pub(super) async fn until(socket: &Path, what: &str, like: impl Fn(&Value) -> bool) -> Value {
    within(what, async {
        loop {
            let seen: Value = serde_json::from_str(&status(socket, &["-o", "json"]).await).expect("JSON");
            if like(&seen["pools"][0]) {
                return seen["pools"][0].clone();
            }
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn status_explains_the_workers_of_a_group() {
    let Some(pool) = Pool::new().await else { return };
    let _controller = pool.active(&format!("min_idle = 1\nmax = 1\n{}", pool.echo())).await;
    pool.echoes("a b", "1").await;
    let socket = pool.socket();
    // It is busy until it says that it is ready again: after `started`, `ready`, and two words for the request.
    let up = |group: &Value| group["workers"]["idle"] == 1 && group["unacknowledged"] == 0;
    let is_told = |seen: &Value| seen["counters"]["activity_reports"].as_u64() >= Some(5);
    let forwarded =
        |seen: &Value| (&seen["orphans_held"], &seen["counters"]["orphans_forwarded"]) == (&0.into(), &1.into());
    let there = |seen: &Value| {
        up(&seen["groups"][0]) && is_told(seen) && seen["groups"][0]["waiting_for"].is_null() && forwarded(seen)
    };
    let seen = until(&socket, "the worker is seen", there).await;
    assert_eq!(seen["role"], "active", "{seen}");
    assert_eq!(seen["counters"]["workers_started"], 1, "{seen}");
    let group = &seen["groups"][0];
    assert_eq!((&group["key"], &group["phase"], &group["wanted"]), (&"a b".into(), &"active".into(), &1.into()));
    assert!(group["next_phase_seconds"].as_f64().is_some_and(|left| left > 300.0 && left <= 601.0), "{group}");
    let reasons = group["reasons"].to_string();
    assert!(
        ["the load needs", "raised to min = 1", "limited by max = 1"].iter().any(|reason| reasons.contains(reason)),
        "{reasons}"
    );
    let table = status(&socket, &[]).await;
    assert!(table.contains("ACTIVE") && table.contains("a b") && table.contains("1 idle"), "{table}");
}

#[tokio::test(flavor = "multi_thread")]
async fn status_shows_failing_workers_and_the_log_of_the_last_one() {
    let Some(pool) = Pool::new().await else { return };
    let mut controller = pool.active("command = [\"/bin/false\"]\n").await;
    pool.ask("a", "1").await;
    controller.says("worker exited").await;
    let socket = pool.socket();
    let seen = until(&socket, "the end is seen", |seen| seen["groups"][0]["consecutive_failures"] != 0).await;
    let last = seen["groups"][0]["last_exit"]["message"].as_str().unwrap_or_default();
    // It may be over before it can be written down.
    let ended = last.starts_with("exit status: 1; log: ") && last.ends_with(".log");
    assert!(ended || last == "failed to start: exited at once", "{seen}");
    until(&socket, "its request waits", |seen| seen["groups"][0]["ready"] == 1).await;
    let table = status(&socket, &[]).await;
    assert!(table.contains(" failed") && table.contains("last failure "), "{table}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_controller_takes_over_the_socket_of_the_active_one() {
    let Some(pool) = Pool::new().await else { return };
    let first = pool.active("").await;
    let shared = pool.socket();
    until(&shared, "the first one controls", |seen| seen["role"] == "active").await;
    let own = pool.folder.path().join("second.sock");
    let mut second = pool.controller(&format!("[control]\nsocket = \"{}\"\n", own.display()));
    second.says("standing by").await;
    until(&own, "the second one stands by", |seen| seen["role"] == "standby").await;
    let table = status(&own, &[]).await;
    assert!(table.contains("STANDBY") && table.contains("no worker is started or stopped"), "{table}");
    let mut third = pool.controller("");
    third.says("another process listens on the control socket").await;
    first.signal(Signal::KILL);
    drop(first);
    // The first one's socket is the third one's then; which of both has the pool, the broker says.
    let active = async |socket: &Path| status(socket, &[]).await.contains("ACTIVE");
    within("the third one answers", async { while std::os::unix::net::UnixStream::connect(&shared).is_err() {} }).await;
    within("one of them has the pool", async { while !active(&own).await && !active(&shared).await {} }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_takes_effect_at_once_and_an_invalid_one_is_rejected() {
    let Some(pool) = Pool::new().await else { return };
    let echo = pool.echo();
    let mut controller = pool.active(&echo).await;
    pool.ask("a", "1").await;
    let socket = pool.socket();
    until(&socket, "one is enough", |seen| seen["groups"][0]["wanted"] == 1).await;
    pool.write(&format!("min = 2\nmax = 2\ntermination_grace = \"5s\"\n{echo}"));
    controller.signal(Signal::HUP);
    let name = &pool.name;
    let said =
        format!("changed: pool.{name}.max, pool.{name}.min; a restart is needed for pool.{name}.termination_grace");
    controller.says(&said).await;
    until(&socket, "two are wanted", |seen| seen["groups"][0]["wanted"] == 2).await;
    pool.write(&format!("min = 3\nmax = 2\n{echo}"));
    controller.signal(Signal::HUP);
    controller.says("configuration rejected, keeping the current one").await;
    until(&socket, "two are there", |seen| seen["counters"]["workers_started"] == 2).await;
    let seen = until(&socket, "two are wanted", |seen| seen["groups"][0]["wanted"] == 2).await;
    assert_eq!(seen["role"], "active", "{seen}");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_active_controller_is_ready() {
    let Some(pool) = Pool::new().await else { return };
    let http = "[http]\nlisten = \"127.0.0.1:0\"\n";
    let mut first = pool.active(http).await;
    let of_first = listening(&mut first).await;
    assert_eq!(get(&of_first, "/readyz").await.status, 200);
    pool.ask("a", "1").await;
    let socket = pool.socket();
    until(&socket, "it is forwarded", |seen| seen["counters"]["orphans_forwarded"] == 1).await;
    let metrics = get(&of_first, "/metrics").await.body;
    let sample = format!("journeyman_controller_orphans_forwarded_total{{pool=\"{}\"}} 1.0", pool.name);
    assert!(metrics.contains(&sample), "{metrics}");
    let mut second = pool.controller(http);
    second.says("standing by").await;
    let of_second = listening(&mut second).await;
    let ready = get(&of_second, "/readyz").await;
    assert!(ready.status == 503 && ready.body.contains("standby: another controller holds this pool"), "{ready:?}");
    first.signal(Signal::KILL);
    second.says(READY).await;
    assert_eq!(get(&of_second, "/readyz").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn c5_clients_of_osrdyne_see_the_workers_of_their_keys_and_the_reason_of_an_error() {
    let Some(pool) = Pool::new().await else { return };
    let mut controller = pool.active(&format!("{}[http]\nlisten = \"127.0.0.1:0\"\n", pool.echo())).await;
    let address = listening(&mut controller).await;
    pool.echoes("a", "1").await;
    let workers = async |query: &str| {
        let seen: Value = serde_json::from_str(&get(&address, query).await.body).expect("JSON");
        seen["workers"].as_object().expect("workers").values().cloned().collect::<Vec<_>>()
    };
    // It replies before the controller has its report.
    let is_ready = |one: &Value| one["status"] == "Ready";
    within("its worker is ready", async { while !workers("/status").await.iter().all(is_ready) {} }).await;
    let found = workers("/status?keys=b&keys=a").await;
    assert_eq!(found.len(), 1, "{found:?}");
    assert_includes(&found[0], &json!({ "status": "Ready", "worker_metadata": { "worker_key": "a" } }));
    assert_eq!(workers("/status").await, found);
    assert_eq!(workers("/status?keys=b").await, [] as [Value; 0]);
    let health = get(&address, "/health").await;
    assert_eq!((health.status, health.body.as_str()), (200, "{\"status\":\"ok\"}"));
    let (exchange, routing_key) = (format!("{}-req-xchg", pool.name), "%E4".to_owned());
    let call = RpcRequest { exchange, routing_key, timeout: TEST_TIMEOUT, ..RpcRequest::default() };
    let reply = RpcClient::new(pool.client.broker.clone(), "a caller").call(&call).await.expect("a reply");
    assert_eq!(reply.reason.as_deref(), Some("invalid-key"));
}
