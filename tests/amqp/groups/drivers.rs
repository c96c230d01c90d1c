//! A controller and who starts its workers.

use rustix::process::Signal;

use super::seen::until;
use super::{Pool, READY};
use crate::controller::ECHO;
use crate::process;

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_of_a_site_start_a_worker_that_answers_and_outlives_its_controller() {
    let Some(pool) = Pool::new().await else { return };
    let here = pool.folder.path();
    let config = process::config(here, ECHO, "[host]\nmetadata_service = \"off\"\n");
    let worker = format!(
        "exec {} worker --config {} --work-dir {}/$WORKER_ID",
        env!("CARGO_BIN_EXE_journeyman"),
        config.display(),
        here.display()
    );
    let driver = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/drivers/processes.py");
    let command = format!("[\"{driver}\", \"{}/notes\", \"/bin/sh\", \"-c\", '{worker}']", here.display());
    let pool_section = format!("driver = \"exec\"\nexec = {command}\n");
    let first = pool.active(&pool_section).await;
    pool.echoes("a b", "1").await;
    first.signal(Signal::KILL);
    let mut second = pool.controller(&pool_section);
    second.says("adopted running workers").await;
    second.says(READY).await;
    pool.echoes("a b", "2").await;
    assert_eq!(second.log().matches("worker started").count(), 0, "{}", second.log());
    kill_noted(here);
}

/// A controller leaves its workers as they are; a test does not.
fn kill_noted(here: &std::path::Path) {
    for entry in std::fs::read_dir(here.join("notes")).into_iter().flatten().flatten() {
        let note: serde_json::Value =
            serde_json::from_slice(&std::fs::read(entry.path()).unwrap_or_default()).unwrap_or_default();
        let pid = note["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
        if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
            // It may have ended by itself.
            rustix::process::kill_process(pid, Signal::KILL).ok();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn where_nobody_starts_workers_it_is_said_how_many_would_be() {
    let Some(pool) = Pool::new().await else { return };
    let mut controller = pool.active("driver = \"noop\"\nmin = 2\nmax = 3\n").await;
    pool.ask("a", "1").await;
    controller.says("workers are wanted, but this pool has no driver").await;
    let socket = pool.socket();
    let seen = until(&socket, "it has decided", |seen| seen["groups"][0]["wanted"] == 2).await;
    assert_eq!((&seen["starts_workers"], &seen["counters"]["workers_started"]), (&false.into(), &0.into()), "{seen}");
    assert!(seen["groups"][0]["reasons"].to_string().contains("raised to min = 2"), "{seen}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_whose_workers_cannot_even_be_started_is_an_alert_and_said_in_its_status() {
    let Some(pool) = Pool::new().await else { return };
    let program = r#"["/bin/sh", "-c", "if grep -q start; then echo no room >&2; exit 1; fi"]"#;
    let mut controller = pool.active(&format!("driver = \"exec\"\nexec = {program}\n")).await;
    pool.ask("a", "1").await;
    controller.says("workers of this key keep failing; last failure: failed to start: no room").await;
    let socket = pool.socket();
    let seen = until(&socket, "it fails", |seen| seen["groups"][0]["failing"] == true).await;
    let last = seen["groups"][0]["last_exit"]["message"].as_str().unwrap_or_default();
    assert_eq!(last, "failed to start: no room (exit status: 1)", "{seen}");
}
