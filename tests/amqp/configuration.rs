//! Configuration of an AMQP worker by variables and by file, and its requests in journal, page and metrics.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use journeyman_platform::amqp;

use crate::amqp::controller::{ECHO, Reports, fresh};
use crate::amqp::support::{Client, Kind, broker, shared_uri, within};
use crate::support::broker::is_newer;
use crate::support::http::get;
use crate::support::process::{Process, config};

async fn answers(client: &Client) {
    assert!(client.publish(Client::properties("a", "/a"), b"1").await);
    assert!(client.answer("a").await.partial);
    assert_eq!(client.answer("a").await.status(), "ok");
}

#[tokio::test(flavor = "multi_thread")]
async fn variables_that_are_not_set_have_defaults() {
    let Some(uri) = shared_uri() else { return };
    let key = fresh();
    let client = Client::on(&broker(&uri), Kind::Transient, &format!("core-req-{key}")).await;
    let mut reports = Reports::of(&client, "core-activity-xchg").await;
    let folder = tempfile::tempdir().expect("a folder");
    let config = config(folder.path(), ECHO, "[worker]\nid = \"a-worker\"\n");
    let variables = [("WORKER_KEY", key.as_str()), ("WORKER_AMQP_URI", &uri)];
    let worker = Process::start(folder.path(), &config, &variables);
    assert_eq!(reports.next(&key, "a-worker").await, "started");
    assert_eq!(reports.next(&key, "a-worker").await, "ready");
    answers(&client).await;
    worker.drained().await;
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_file_names_the_broker_and_the_queue() {
    let Some(uri) = shared_uri() else { return };
    let (key, exchange) = (fresh(), format!("{}-activity", fresh()));
    let client = Client::new(&broker(&uri), Kind::Durable).await;
    let mut reports = Reports::of(&client, &exchange).await;
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("uri");
    std::fs::write(&file, format!("{uri}\n")).expect("it is written");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("it is ours");
    let assigned = [("WORKER_ID", "w-1"), ("WORKER_ACTIVITY_EXCHANGE", exchange.as_str())];
    let text = format!(
        "[source.requests]\nkind = \"amqp\"\nhandler = \"echo\"\nrequests_queue = \"{}\"\n\
         [amqp]\nuri_file = \"{}\"\nworker_key = \"{key}\"\n",
        client.queue,
        file.display()
    );
    let worker = Process::start(folder.path(), &config(folder.path(), ECHO, &text), &assigned);
    assert_eq!(reports.next(&key, "w-1").await, "started");
    assert_eq!(reports.next(&key, "w-1").await, "ready");
    answers(&client).await;
    assert_eq!(reports.next(&key, "w-1").await, "request-received");
    worker.drained().await;
    client.delete_empty_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_max_run_time_above_the_consumer_timeout_is_warned_of() {
    let Some(uri) = shared_uri() else { return };
    let client = Client::new(&broker(&uri), Kind::Durable).await;
    let of = |longest: &str| format!("max_run_time = \"{longest}\"\n");
    // With two defaults there is no warning, though the default max_run_time exceeds RabbitMQ's default timeout.
    for (longest, consumer_timeout, warned) in [
        (of("20m"), "", false),
        (of("2h"), "", true),
        (String::new(), "", false),
        (String::new(), "consumer_timeout = \"20m\"\n", true),
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let text =
            format!("{longest}[source.requests]\nkind = \"amqp\"\nhandler = \"echo\"\n[amqp]\n{consumer_timeout}");
        let config = config(folder.path(), ECHO, &text);
        let variables = [("WORKER_REQUESTS_QUEUE", client.queue.as_str()), ("WORKER_AMQP_URI", &uri)];
        let worker = Process::start(folder.path(), &config, &variables);
        answers(&client).await;
        let log = worker.drained().await;
        let warnings = log.matches("requests may run for").count();
        // A newer broker gives a consumer the timeout that it asks for.
        assert_eq!(warnings, usize::from(warned && !is_newer()), "{longest} {consumer_timeout}: {log}");
    }
    client.delete_queue().await;
}

/// The address of the status page.
pub(crate) async fn listening(worker: &mut Process) -> String {
    worker.says("http://").await;
    let log = worker.log();
    log.split("http://").nth(1).and_then(|rest| rest.split('/').next()).expect("an address").to_owned()
}

/// Reports that it runs, and ends on permission.
fn waiting(folder: &Path) -> String {
    let folder = folder.display();
    format!("#!/bin/sh\ncat >/dev/null\necho running >{folder}/runs\nread go <{folder}/go\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_appears_as_a_claim_in_journal_page_and_metrics() {
    let Some(uri) = shared_uri() else { return };
    let client = Client::new(&broker(&uri), Kind::Durable).await;
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    for name in ["runs", "go"] {
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mkfifoat(rustix::fs::CWD, dir.join(name), mode).expect("a pipe");
    }
    let config = config(dir, &waiting(dir), "[http]\nlisten = \"127.0.0.1:0\"\n");
    let variables = [("WORKER_REQUESTS_QUEUE", client.queue.as_str()), ("WORKER_AMQP_URI", &uri)];
    let mut worker = Process::start(dir, &config, &variables);
    let address = &listening(&mut worker).await;
    let id = fresh();
    assert!(client.publish(Client::properties(&id, "/long"), b"1").await);
    let runs = dir.join("runs");
    let running = tokio::task::spawn_blocking(move || std::fs::read_to_string(runs).expect("it says so"));
    assert_eq!(within("it runs", running).await.expect("it was read"), "running\n");
    // In the journal before it starts, on the status page and in the metrics while it runs.
    let journal = std::fs::read_to_string(dir.join("work/journal")).expect("a journal");
    assert!(journal.lines().any(|line| line.contains("\"claimed\"") && line.contains(&id)), "{journal}");
    assert!(get(address, "/").await.body.contains(&id), "on the status page");
    let metrics = get(address, "/metrics").await.body;
    assert!(metrics.contains("journeyman_tasks_running{source=\"requests\"} 1.0"), "{metrics}");
    let go = dir.join("go");
    tokio::task::spawn_blocking(move || std::fs::write(go, "go\n").expect("it reads")).await.expect("it is let go");
    assert_eq!(client.answer(&id).await.body, b"null");
    // The reply arrives before it is counted.
    within("it is counted", async {
        while !get(address, "/metrics").await.body.contains("counter=\"replies\"} 1.0") {}
    })
    .await;
    worker.drained().await;
    client.delete_empty_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn b2_a_renewed_password_is_read_at_the_next_connection() {
    let Some(uri) = shared_uri() else { return };
    let wrong = uri.replacen('@', "-wrong@", 1);
    let renewed = uri.clone();
    let settings = amqp::BrokerConfig {
        reread_uri: Some(Arc::new(move || Some(renewed.clone().into()))),
        ..amqp::BrokerConfig::new(wrong)
    };
    let broker = amqp::Broker::new(&settings).expect("the address is good");
    let connection = broker.connect("test").await.expect("the renewed password is accepted");
    amqp::close(&connection, Duration::from_secs(5)).await;
}
