//! Checks of builds that were started.

use std::time::{Duration, Instant};

use jiff::SignedDuration;
use journeyman_platform::amqp::header_table;
use journeyman_platform::amqp::lapin::BasicProperties;
use journeyman_platform::amqp::lapin::types::AMQPValue;
use serde_json::Value;

use crate::screwdriver::support::{Place, of_build, start, status, text, until};
use crate::support::cluster::How;

/// The properties of a check of the existing worker's.
fn foreign_check(retry_count: i32, started_at: i64) -> BasicProperties {
    let headers = [
        ("x-retry-count", AMQPValue::LongInt(retry_count)),
        ("x-build-start-time", AMQPValue::LongLongInt(started_at)),
    ];
    BasicProperties::default().with_headers(header_table(headers)).with_content_type("application/json".into())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_with_one_slot_serves_both_queues_without_long_waits() {
    let Some(place) = Place::new().await else { return };
    let mut worker = place.worker_with(&[("JOURNEYMAN__WORKER__CAPACITY", "1")]);
    worker.says("\"consuming\",\"queue\":\"sdRetryQueue\"").await;
    let began = Instant::now();
    place.publish(&start(1001)).await;
    place.pod(1001).await;
    place.more_looks(1001, 2).await;
    place.run(1001).await;
    place.api.wait_for_node(1001).await;
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    place.finish([worker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_wait_queue_of_the_seed_is_used_where_it_is_configured() {
    let Some(place) = Place::new().await else { return };
    place.declare_wait_queue().await;
    let place = place.with_source("wait_queue = \"sdRetryQueue-wait\"\n").with_limits("delay = \"60s\"\n");
    let worker = place.worker();
    place.publish(&start(1001)).await;
    let check = place.take("sdRetryQueue-wait").await;
    let properties = check.properties.clone();
    assert_eq!(properties.expiration().as_ref().map(|text| text.as_str()), Some("60000"));
    let headers = properties.headers().clone().expect("headers");
    assert_eq!(headers.inner()["x-retry-count"], AMQPValue::LongInt(0));
    assert!(matches!(headers.inner()["x-build-start-time"], AMQPValue::LongLongInt(1_000_000_000_000..)));
    let body: Value = serde_json::from_slice(&check.data).expect("it is JSON");
    assert_eq!(body, of_build("verify", 1001));
    let queues = place.queues().await;
    assert!(!queues.iter().any(|queue| queue.contains("delay")), "{queues:?}");
    place.publish_to("sdRetryQueue", properties, &check.data).await;
    let again = place.take("sdRetryQueue-wait").await;
    let headers = again.properties.headers().clone().expect("headers");
    assert_eq!(headers.inner()["x-retry-count"], AMQPValue::LongInt(1));
    place.run(1001).await;
    // The broker expires it so.
    let soon = again.properties.clone().with_expiration("100".into());
    place.publish_to("sdRetryQueue-wait", soon, &again.data).await;
    place.api.wait_for_node(1001).await;
    place.finish([worker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s7_a_failure_that_screwdriver_does_not_take_is_kept_and_reported_in_the_end() {
    let Some(place) = Place::new().await else { return };
    let worker = place.worker();
    for build in [1001, 1002] {
        place.publish(&start(build)).await;
    }
    let pods = [place.pod(1001).await, place.pod(1002).await];
    place.api.answer_with(503);
    place.cluster.vanish(&pods[0]);
    place.fault("create", "pods", usize::MAX, status(422, "Pod \"p\" is invalid"));
    place.publish(&start(1003)).await;
    for build in [1001, 1003] {
        place.api.wait_for_attempts(build, 3).await;
    }
    // A kill between a check and the acknowledgement would leave both.
    place.drain(worker).await;
    until("no message is lost", async || place.ready().await.values().sum::<u32>() == 3).await;
    let worker = place.worker();
    place.api.wait_for_attempts(1001, 5).await;
    place.api.answer_with(200);
    let gone = "Failed to create pod. Pod status is: failed (its pod is gone)";
    assert_eq!(place.api.wait_for_failure(1001).await, gone);
    let invalid = place.api.wait_for_failure(1003).await;
    assert!(invalid.ends_with(": 422 Pod \"p\" is invalid)"), "{invalid}");
    place.run(1002).await;
    place.api.wait_for_node(1002).await;
    let counts = [1001, 1002, 1003].map(|build| place.api.failures(build).len());
    assert_eq!(counts, [1, 0, 1]);
    place.finish([worker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s1_a_worker_that_is_killed_after_its_report_may_report_again_and_loses_none() {
    let Some(place) = Place::new().await else { return };
    place.publish(&start(1001)).await;
    let worker = place.worker();
    let pod = place.pod(1001).await;
    place.more_looks(1001, 1).await;
    place.kill(worker).await;
    place.cluster.vanish(&pod);
    place.dies_at("build-failure-reported").await;
    let last = place.worker();
    place.api.wait_for_attempts(1001, 2).await;
    place.finish([last]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s8_an_api_server_that_is_away_is_no_verdict_about_a_running_pod() {
    let Some(place) = Place::new().await else { return };
    let worker = place.worker();
    place.publish(&start(1001)).await;
    let pod = place.pod(1001).await;
    place.more_looks(1001, 1).await;
    for how in [How::Refuse, status(500, "not now"), status(403, "not now")] {
        place.fault("list", "pods", 2, how);
    }
    place.more_looks(1001, 1).await;
    place.cluster.schedule(&pod, "node-a");
    place.cluster.running(&pod);
    place.more_looks(1001, 4).await;
    assert!(place.api.failures(1001).is_empty());
    place.api.wait_for_node(1001).await;
    assert_eq!((place.posts(1001), place.api.failures(1001).len()), (1, 0));
    place.finish([worker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s9_a_pod_that_vanishes_fails_its_build() {
    let Some(place) = Place::new().await else { return };
    let worker = place.worker();
    place.publish(&start(1001)).await;
    let pod = place.pod(1001).await;
    place.more_looks(1001, 1).await;
    place.cluster.vanish(&pod);
    let text = place.api.wait_for_failure(1001).await;
    assert_eq!(text, "Failed to create pod. Pod status is: failed (its pod is gone)");
    // Its check by the existing worker, without a header.
    place.publish_to("sdRetryQueue", BasicProperties::default(), of_build("verify", 1002).to_string().as_bytes()).await;
    assert_eq!(place.api.wait_for_failure(1002).await, text);
    assert_eq!((place.posts(1001), place.posts(1002)), (1, 0), "none is started again");
    place.finish([worker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s10_an_image_of_the_launcher_that_does_not_exist_is_reported_with_its_container() {
    let Some(place) = Place::new().await else { return };
    let place = place.with_limits("delay = \"1s\"\npull_grace = \"0s\"\n");
    let worker = place.worker();
    place.publish(&start(1001)).await;
    let pod = place.pod(1001).await;
    place.cluster.schedule(&pod, "node-a");
    place.cluster.waiting(&pod, "launcher-1001", "ErrImagePull", "manifest unknown");
    let text = place.api.wait_for_failure(1001).await;
    let why = "container launcher-1001 (screwdrivercd/launcher:stable): ErrImagePull: manifest unknown";
    assert_eq!(text, format!("Build failed to start. Please check if your image is valid. ({why})"));
    place.cluster.wait_until("its pod is removed", |cluster| cluster.pods().is_empty()).await;
    place.finish([worker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s12_an_image_that_comes_within_the_grace_is_no_failure() {
    let Some(place) = Place::new().await else { return };
    let worker = place.worker();
    place.publish(&start(1001)).await;
    let pod = place.pod(1001).await;
    place.cluster.schedule(&pod, "node-a");
    place.cluster.waiting(&pod, "1001", "ImagePullBackOff", "manifest unknown");
    place.more_looks(1001, 2).await;
    place.cluster.running(&pod);
    place.api.wait_for_node(1001).await;
    assert_eq!(place.api.failures(1001), Vec::<String>::new());
    place.finish([worker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s13_and_s20_a_node_and_images_have_budgets_of_their_own_by_the_clock_of_the_server() {
    // The cluster's clock is 5 minutes ahead, then behind.
    for skew in [300, -300] {
        let Some(place) = Place::new().await else { return };
        let place =
            place.with_limits("delay = \"1s\"\ndelay_step = \"0s\"\nchecks = 60\nscheduling_timeout = \"60s\"\n");
        let seconds = |after: i64| place.cluster.set_skew(SignedDuration::from_secs(skew + after));
        seconds(0);
        let worker = place.worker();
        place.publish(&start(1001)).await;
        let pod = place.pod(1001).await;
        place.cluster.unschedulable(&pod, "0/3 nodes");
        seconds(40);
        place.more_looks(1001, 2).await;
        place.cluster.schedule(&pod, "node-a");
        // A look that has begun before may get its answer at the later time.
        place.more_looks(1001, 1).await;
        seconds(80);
        place.more_looks(1001, 2).await;
        assert_eq!(place.api.failures(1001), Vec::<String>::new());
        place.cluster.running(&pod);
        place.api.wait_for_node(1001).await;

        for build in [1002, 1003] {
            place.publish(&start(build)).await;
        }
        let pulls = place.pod(1003).await;
        place.cluster.schedule(&pulls, "node-a");
        place.pod(1002).await;
        // A worker whose clock is behind has sent it.
        let long_ago = jiff::Timestamp::now().as_millisecond() - 300_000;
        place.publish(&start(1004)).await;
        place.pod(1004).await;
        let verify = of_build("verify", 1004).to_string();
        place.publish_to("sdRetryQueue", foreign_check(1, long_ago), verify.as_bytes()).await;
        place.more_looks(1004, 3).await;
        assert_eq!(place.api.failures(1004), Vec::<String>::new());
        place.run(1004).await;
        place.api.wait_for_node(1004).await;
        seconds(80 + 70);
        assert_eq!(place.api.wait_for_failure(1002).await, "Pod scheduling timeout exceeded");
        let text = "Build failed to start. Pod is still initializing.";
        assert_eq!(place.api.wait_for_failure(1003).await, text);
        place.finish([worker]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn s6_checks_of_the_existing_worker_are_counted_as_it_counts() {
    let Some(place) = Place::new().await else { return };
    let place = place.with_limits("delay = \"1s\"\nchecks = 6\n");
    let worker = place.worker();
    for build in [1001, 1002] {
        place.publish(&start(build)).await;
        place.pod(build).await;
    }
    let now = jiff::Timestamp::now().as_millisecond();
    let verify = of_build("verify", 1001).to_string();
    place.publish_to("sdRetryQueue", foreign_check(6, now), verify.as_bytes()).await;
    let text = place.api.wait_for_failure(1001).await;
    assert_eq!(text, "Build failed to start. Pod is still initializing.");
    let trace = header_table([("traceparent", text_of_trace())]);
    let verify = of_build("verify", 1002).to_string();
    place.publish_to("sdRetryQueue", BasicProperties::default().with_headers(trace), verify.as_bytes()).await;
    place.run(1002).await;
    place.api.wait_for_node(1002).await;
    place.finish([worker]).await;
}

fn text_of_trace() -> AMQPValue {
    text("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
}
