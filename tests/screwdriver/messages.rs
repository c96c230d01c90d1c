//! Messages of all kinds, and what an operator sees of the worker.

use journeyman_platform::amqp::header_table;
use journeyman_platform::amqp::lapin::BasicProperties;
use journeyman_platform::amqp::lapin::types::{AMQPValue, FieldTable};
use serde_json::json;

use crate::screwdriver::executor::BUILD_TOKEN;
use crate::screwdriver::support::{Place, start, text, until};
use crate::support::process::Process;
use crate::support::wire::{Way, Wire};

#[tokio::test(flavor = "multi_thread")]
async fn s6_a_start_is_handled_whatever_headers_it_has() {
    let Some(place) = Place::new().await else { return };
    let worker = place.worker();
    let death = header_table([("queue", text("elsewhere")), ("reason", text("expired")), ("count", text("9"))]);
    let deaths = vec![AMQPValue::Void, AMQPValue::FieldTable(death)];
    let all = [
        None,
        Some(FieldTable::default()),
        Some(header_table([("traceparent", text("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))])),
        Some(header_table([("x-death", AMQPValue::FieldArray(deaths.into())), ("x-first-death-queue", text("q"))])),
        Some(header_table([("x-death", text("none")), ("x-retry-count", text("many"))])),
        Some(header_table([("x-retry-count", AMQPValue::LongInt(99)), ("x-build-start-time", AMQPValue::Void)])),
        Some(header_table([("jm-work", text("{}")), ("jm-not-before", text("soon"))])),
    ];
    let builds = 1001..1001 + all.len() as u64;
    for (build, headers) in builds.clone().zip(all) {
        let properties = BasicProperties::default().with_priority(2);
        let properties = headers.into_iter().fold(properties, BasicProperties::with_headers);
        place.publish_to("sdQueue", properties, start(build).to_string().as_bytes()).await;
    }
    for build in builds {
        place.run(build).await;
        place.api.wait_for_node(build).await;
        assert_eq!((place.posts(build), place.api.failures(build).len()), (1, 0), "build {build}");
    }
    place.finish([worker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s18_a_message_that_cannot_be_read_is_dropped_with_a_line_that_quotes_nothing() {
    let Some(place) = Place::new().await else { return };
    let worker = place.worker();
    let mut no_id = start(1001);
    no_id["buildConfig"].as_object_mut().expect("fields").remove("buildId");
    let bodies =
        [String::new(), format!("{{\"token\": {BUILD_TOKEN}"), format!("\"{BUILD_TOKEN}\""), no_id.to_string()];
    for body in &bodies {
        place.publish_to("sdQueue", BasicProperties::default(), body.as_bytes()).await;
    }
    place.publish_to("sdRetryQueue", BasicProperties::default(), b"[]").await;
    let dropped = || worker.log().matches("a message is dropped").count();
    until("they are dropped", async || dropped() == bodies.len() + 1).await;
    let log = place.finish([worker]).await;
    assert!(log.contains("buildConfig.buildId is missing"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cache_is_cleared_where_the_configuration_has_one() {
    let Some(place) = Place::new().await else { return };
    let cache = place.folder.path().join("cache");
    let kept = cache.join("pipelines/2");
    for folder in [&cache.join("pipelines/1/deep"), &kept] {
        std::fs::create_dir_all(folder).expect("a folder");
    }
    let place = place.with_source(&format!("cache_path = \"{}\"\n", cache.display()));
    let worker = place.worker();
    let request = json!({
        "resource": "caches", "action": "delete", "scope": "pipelines", "prefix": "", "pipelineId": 1, "id": 1,
    });
    place.publish(&json!({ "job": "clear", "cacheConfig": request })).await;
    until("it is cleared", async || !cache.join("pipelines/1").exists()).await;
    assert!(kept.exists());
    place.finish([worker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_names_what_is_missing_and_dangerous_once_at_its_start() {
    let Some(place) = Place::without_queues().await else { return };
    place.declare("sdQueue", []).await;
    let mut worker = place.worker();
    for words in [
        "[source.builds]: queue sdQueue has no dead letter exchange: builds that are to be started again later are gone",
        "[source.builds]: queue sdRetryQueue does not exist",
    ] {
        worker.says(words).await;
    }
    place.declare("sdRetryQueue", []).await;
    place.publish(&start(1001)).await;
    place.run(1001).await;
    place.api.wait_for_node(1001).await;
    let log = place.finish([worker]).await;
    assert_eq!(log.matches("queue sdQueue has no dead letter exchange").count(), 1, "{log}");
    assert!(log.lines().any(|line| line.contains("ERROR") && line.contains("sdRetryQueue does not exist")), "{log}");
}

/// The answer to `GET /health`.
async fn health(worker: &mut Process) -> (u16, String) {
    const WORDS: &str = "http://127.0.0.1:";
    worker.says(WORDS).await;
    let log = worker.log();
    let address = log.split(WORDS).find_map(|rest| rest.split_once('/')?.0.parse::<u16>().ok()).expect("a port");
    rustls::crypto::ring::default_provider().install_default().ok();
    let http = reqwest::Client::builder().no_proxy().build().expect("a client");
    let answer = http.get(format!("http://127.0.0.1:{address}/health")).send().await.expect("it answers");
    (answer.status().as_u16(), answer.text().await.expect("text"))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_health_of_a_worker_is_that_of_its_connection_to_the_broker() {
    let Some(mut place) = Place::new().await else { return };
    let rest = place.uri.split_once('@').expect("a user").1;
    let wire = Wire::to(rest.split_once('/').expect("a vhost").0).await;
    place.uri = wire.uri(&place.uri);
    let mut worker = place.worker_with(&[("JOURNEYMAN__HTTP__LISTEN", "127.0.0.1:0")]);
    worker.says("consuming").await;
    assert_eq!(health(&mut worker).await, (200, "ok".to_owned()));
    wire.set(Way::Stall);
    wire.cut();
    until("it is down", async || health(&mut worker).await == (503, "unavailable".to_owned())).await;
    wire.set(Way::Carry);
    wire.cut();
    until("it is up", async || health(&mut worker).await.0 == 200).await;
    place.finish([worker]).await;
}
