//! Commands to a controller: pause, scale, drain and retry.

use super::seen::{status, until};
use super::{Pool, fails, succeeds};

#[tokio::test(flavor = "multi_thread")]
async fn a_paused_pool_starts_and_stops_no_worker() {
    let Some(pool) = Pool::new().await else { return };
    let _controller = pool.active(&pool.echo()).await;
    let socket = pool.socket();
    pool.ask("old", "1").await;
    while pool.client.answer("1").await.partial {}

    let said = succeeds(&socket, &["pause", "--note", "kernel update"]).await;
    assert!(said.contains("is paused until it is resumed"), "{said}");
    pool.ask("new", "2").await;
    let waits = |seen: &serde_json::Value| {
        let groups = seen["groups"].as_array().expect("groups");
        groups.iter().any(|group| group["key"] == "new" && group["ready"] == 1)
    };
    let seen = until(&socket, "its request waits in its queue", waits).await;
    assert_eq!(seen["paused"]["by"], "ana: kernel update", "{seen}");
    assert_eq!((&seen["counters"]["workers_started"], &seen["workers"]["stopping"]), (&1.into(), &0.into()), "{seen}");
    let new = seen["groups"].as_array().expect("groups").iter().find(|group| group["key"] == "new").expect("it");
    assert!(new["reasons"].to_string().contains("paused"), "{new}");
    let table = status(&socket, &[]).await;
    assert!(table.contains("paused by ana: kernel update"), "{table}");
    // Who is there goes on to answer.
    pool.ask("old", "3").await;
    while pool.client.answer("3").await.partial {}

    let said = succeeds(&socket, &["resume"]).await;
    assert!(said.contains("is resumed"), "{said}");
    while pool.client.answer("2").await.partial {}
    let said = fails(&socket, &["resume"]).await;
    assert!(said.contains("is not paused"), "{said}");
}

#[tokio::test(flavor = "multi_thread")]
async fn scale_creates_a_group_and_overrides_its_limits() {
    let Some(pool) = Pool::new().await else { return };
    let _controller = pool.active(&format!("unbind_delay = \"1s\"\nstop_delay = \"1s\"\n{}", pool.echo())).await;
    let socket = pool.socket();
    let said = fails(&socket, &["scale", "--key", "warm", "--max", "1"]).await;
    assert!(said.contains("has no group \"warm\""), "{said}");
    let said = succeeds(&socket, &["scale", "--key", "warm", "--min", "2", "--for", "1h"]).await;
    assert!(said.contains("has 2 to 2 workers for 3600 s"), "{said}");
    let warm = |seen: &serde_json::Value| {
        seen["groups"][0]["wanted"] == 2
            && seen["counters"]["workers_started"] == 2
            && seen["groups"][0]["waiting_for"].is_null()
    };
    let seen = until(&socket, "two are there", warm).await;
    assert_eq!(seen["groups"][0]["scale_override"]["min"], 2, "{seen}");
    assert!(
        seen["groups"][0]["scale_override"]["remaining_seconds"].as_f64().is_some_and(|left| left > 3_000.0),
        "{seen}"
    );

    // Another one takes the place of a worker that was drained.
    let first = seen["groups"][0]["worker_list"][0]["id"].as_str().expect("a worker").to_owned();
    let said = succeeds(&socket, &["drain", &first]).await;
    assert!(said.contains("draining worker"), "{said}");
    until(&socket, "another one is started", |seen| seen["counters"]["workers_started"] == 3).await;
    let said = fails(&socket, &["drain", "no-worker"]).await;
    assert!(said.contains("has no worker no-worker"), "{said}");

    // There is no demand besides the command.
    succeeds(&socket, &["scale", "--key", "warm", "--for", "0s"]).await;
    until(&socket, "it has gone", |seen| seen["groups"] == serde_json::json!([])).await;
    pool.until(&format!("{}-req-warm", pool.name), None).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn retry_starts_a_failing_group_at_once() {
    let Some(pool) = Pool::new().await else { return };
    let _controller = pool.active("command = [\"/bin/false\"]\n").await;
    let socket = pool.socket();
    pool.ask("a", "1").await;
    // The delays grow; after a repair the operator does not wait for the next start.
    let waits = |seen: &serde_json::Value| {
        let group = &seen["groups"][0];
        group["consecutive_failures"].as_u64() >= Some(4) && group["restart_backoff_seconds"].as_f64().is_some()
    };
    until(&socket, "it waits", waits).await;
    let said = succeeds(&socket, &["retry", "--key", "a"]).await;
    assert!(said.contains("the next worker starts now"), "{said}");
    // Fewer than have failed in all.
    let anew = |seen: &serde_json::Value| {
        seen["groups"][0]["consecutive_failures"]
            .as_u64()
            .is_some_and(|row| Some(row) < seen["counters"]["workers_failed"].as_u64())
    };
    until(&socket, "it is counted anew", anew).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn c8_a_key_can_be_paused_before_its_first_request() {
    let Some(pool) = Pool::new().await else { return };
    let _controller = pool.active(&pool.echo()).await;
    let socket = pool.socket();
    let said = succeeds(&socket, &["pause", "--key", "new"]).await;
    assert!(said.contains("group \"new\" of pool") && said.contains("is paused until it is resumed"), "{said}");
    pool.ask("new", "1").await;
    let waits = |seen: &serde_json::Value| seen["groups"][0]["ready"] == 1 && !seen["groups"][0]["paused"].is_null();
    let seen = until(&socket, "its request waits", waits).await;
    assert_eq!(seen["counters"]["workers_started"], 0, "{seen}");
    succeeds(&socket, &["resume", "--key", "new"]).await;
    while pool.client.answer("1").await.partial {}
}
