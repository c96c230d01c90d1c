//! `journeyman controller plan` beside a running controller.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::Pool;
use super::seen::until;
use crate::support::within;

/// `journeyman controller plan -o json` of a pool's configuration.
async fn plan(pool: &Pool, file: &Path, more: &[&str]) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_journeyman"));
    command.args(["controller", "plan", "-o", "json", "--config"]).arg(file).args(more).env_clear();
    command.env("WORKER_AMQP_URI", &pool.uri).stdin(Stdio::null());
    let said = tokio::task::spawn_blocking(move || command.output().expect("it runs"));
    let said = within("the plan", said).await.expect("it ends");
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    let plans: Value = serde_json::from_slice(&said.stdout).expect("JSON");
    plans[0].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plan_shows_what_another_configuration_would_start_and_stop_without_doing_it() {
    let Some(pool) = Pool::new().await else { return };
    let echo = pool.echo();
    let _controller = pool.active(&format!("min = 1\nmax = 1\n{echo}")).await;
    pool.ask("7", "1").await;
    while pool.client.answer("1").await.partial {}
    let socket = pool.socket();
    let counted_and_idle =
        |pool: &Value| pool["groups"][0]["workers"]["idle"] == 1 && pool["groups"][0]["ready"].is_u64();
    let status = until(&socket, "its worker is idle and its queue is inspected", counted_and_idle).await;
    let id = &status["groups"][0]["worker_list"][0]["id"];

    let more = pool.write(&format!("min = 3\nmax = 3\n{echo}"));
    let planned = plan(&pool, &more, &[]).await;
    assert_eq!(planned["orphans_held"], 0, "{planned}");
    let group = &planned["groups"][0];
    assert_eq!((&group["workers"], &group["start"], &group["stop"]), (&1.into(), &2.into(), &json!([])), "{planned}");
    let none = pool.write(&format!("min = 0\nmax = 1\n{echo}"));
    let planned = plan(&pool, &none, &[]).await;
    let seen = until(&socket, "it is asked again", |_| true).await;
    assert_eq!(planned["groups"][0]["stop"], json!([id]), "{planned}");
    assert_eq!((&seen["workers"]["stopping"], &seen["counters"]["workers_started"]), (&0.into(), &1.into()), "{seen}");
}
