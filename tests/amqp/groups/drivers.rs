//! A controller without a driver, and one whose driver fails.

use super::Pool;
use super::seen::until;
use crate::amqp::support::Client;

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

#[tokio::test(flavor = "multi_thread")]
async fn c9_a_driver_that_cannot_be_asked_starts_nothing_and_counts_no_worker_as_failed() {
    let Some(pool) = Pool::new().await else { return };
    let (away, starts) = (pool.folder.path().join("away"), pool.folder.path().join("starts"));
    let program = format!(
        "if [ -e {} ]; then echo no daemon >&2; exit 1; fi; if grep -q start; then echo >>{}; fi",
        away.display(),
        starts.display()
    );
    std::fs::write(&away, "").expect("it is written");
    let mut controller = pool.active(&format!("driver = \"exec\"\nexec = [\"/bin/sh\", \"-c\", '{program}']\n")).await;
    pool.ask("a", "1").await;
    controller.says("[alert operator] the driver is unavailable").await;
    let socket = pool.socket();
    let seen = until(&socket, "its request waits", |seen| seen["groups"][0]["ready"] == 1).await;
    let why = seen["driver_error"]["message"].as_str().unwrap_or_default();
    assert_eq!(why, "cannot list the workers: no daemon (exit status: 1)", "{seen}");
    assert_eq!(
        (&seen["counters"]["workers_failed"], &seen["groups"][0]["consecutive_failures"]),
        (&0.into(), &0.into()),
        "{seen}"
    );
    assert!(super::seen::status(&socket, &[]).await.contains("the driver is unavailable"), "it is shown");
    assert!(!starts.exists(), "nothing is started");
    let queue = format!("{}-req-a", pool.name);
    assert!(pool.client.get(&queue).await.is_some(), "it holds nothing that would not expire");
    assert!(pool.publish("a", Client::properties("2", "/echo").with_expiration("100".into())).await);
    let message = pool.client.answer("2").await.json()["message"].as_str().unwrap_or_default().to_owned();
    assert_eq!(message, format!("the request expired before a worker took it; {why}"), "c3");
    pool.ask("a", "3").await;
    std::fs::remove_file(&away).expect("it was there");
    controller.says("the driver is available again").await;
    controller.says("worker started").await;
    until(&socket, "it is up", |seen| seen["driver_error"].is_null()).await;
    assert_eq!(controller.log().matches("driver-unavailable").count(), 1, "one alert: {}", controller.log());
}
