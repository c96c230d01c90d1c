//! A controller without a driver, and one whose driver fails.

use super::Pool;
use super::seen::until;

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_without_a_driver_shows_how_many_workers_are_wanted() {
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
async fn workers_that_cannot_be_started_raise_an_alert() {
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
