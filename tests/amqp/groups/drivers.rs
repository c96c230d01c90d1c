//! A controller and who starts its workers.

use super::Pool;
use super::seen::until;

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
