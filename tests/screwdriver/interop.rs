//! The worker beside Screwdriver's own: each goes on with what the other has begun.

use journeyman_platform::amqp::header_table;
use journeyman_platform::amqp::lapin::BasicProperties;
use journeyman_platform::amqp::lapin::types::AMQPValue;
use serde_json::{Value, json};

use crate::screwdriver::executor::{BUILD_TOKEN, Executor, build_api};
use crate::screwdriver::support::{Place, is_of, of_build, start};
use crate::support::cluster::Cluster;

/// A created pod without what is meant to differ: the suffix of its name, and the place of the token.
fn comparable(body: &Value) -> Value {
    let mut pod = body.clone();
    // The executor has a `type` of volumes in the wrong place, which the API server ignores.
    for volume in pod["spec"]["volumes"].as_array_mut().expect("volumes") {
        volume.as_object_mut().expect("a volume").remove("type");
    }
    let name = pod["metadata"]["name"].as_str().expect("a name");
    let (start, suffix) = name.rsplit_once('-').expect("a suffix");
    assert!(
        suffix.len() == 5 && suffix.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit()),
        "{name}"
    );
    pod["metadata"]["name"] = start.into();
    let container = &mut pod["spec"]["containers"][0];
    let arguments = container["args"][0].as_str().expect("arguments");
    container["args"][0] = arguments.replace(BUILD_TOKEN, "$SD_TEMPORAL_TOKEN").into();
    let variables = container["env"].as_array_mut().expect("variables");
    variables.retain(|variable| variable["name"] != "SD_TEMPORAL_TOKEN");
    for variable in variables {
        // What is null is not set.
        variable.as_object_mut().expect("a variable").retain(|_, value| !value.is_null());
    }
    pod
}

fn created(cluster: &Cluster, build_id: &Value) -> Value {
    let build_id = build_id.as_u64().expect("a number");
    let posts = cluster.calls().into_iter().filter(|call| call.verb == "create" && call.resource == "pods");
    posts.map(|call| call.body).find(|body| is_of(body, build_id)).expect("it was created")
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pods_of_recorded_messages_are_created_as_screwdrivers_executor_creates_them() {
    let Some(place) = Place::new().await else { return };
    let theirs = Cluster::start().await;
    let Some(mut executor) = Executor::start(&theirs, &place.api.url()) else { return };
    let lines = include_str!("../../fixtures/screwdriver/pods.jsonl").replace("<jwt>", BUILD_TOKEN);
    let messages: Vec<Value> =
        lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("it is JSON")["message"].take()).collect();
    let worker = place.worker();
    for message in &messages {
        place.publish(message).await;
        executor.call("start", &message["buildConfig"]).await.expect("it starts");
    }
    for message in &messages {
        let build_id = &message["buildConfig"]["buildId"];
        place.run(build_id.as_u64().expect("a number")).await;
        let (own, other) = (created(&place.cluster, build_id), created(&theirs, build_id));
        assert_eq!(comparable(&own), comparable(&other), "build {build_id}");
    }
    for message in &messages {
        place.api.wait_for_node(message["buildConfig"]["buildId"].as_u64().expect("a number")).await;
    }
    place.finish([worker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn screwdrivers_executor_verifies_and_stops_what_this_worker_has_started() {
    let Some(place) = Place::new().await else { return };
    let api = build_api().await;
    let Some(mut executor) = Executor::start(&place.cluster, &api.url()) else { return };
    let worker = place.worker();
    let message = start(1001);
    let config = &message["buildConfig"];
    place.publish(&message).await;
    let pod = place.pod(1001).await;
    assert_eq!(executor.call("verify", config).await, Ok(json!("waiting")));
    place.cluster.schedule(&pod, "node-a");
    assert_eq!(executor.call("verify", config).await, Ok(json!("initializing")));
    place.cluster.running(&pod);
    assert_eq!(executor.call("verify", config).await, Ok(json!("")));
    place.api.wait_for_node(1001).await;
    executor.call("stop", config).await.expect("it stops");
    assert!(place.cluster.pods().is_empty());

    // One that the executor stops before it runs: Screwdriver refuses a failure of a build that was aborted.
    let message = start(1002);
    place.publish(&message).await;
    place.pod(1002).await;
    place.api.answer_with(403);
    executor.call("stop", &message["buildConfig"]).await.expect("it stops");
    place.api.wait_for_attempts(1002, 1).await;
    assert!(place.cluster.pods().is_empty() && place.posts(1002) == 1);
    place.finish([worker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn this_worker_verifies_and_stops_what_screwdrivers_executor_has_started() {
    let Some(mut place) = Place::new().await else { return };
    place.has_executor = true;
    let api = build_api().await;
    let Some(mut executor) = Executor::start(&place.cluster, &api.url()) else { return };
    for build in [1001, 1002] {
        executor.call("start", &start(build)["buildConfig"]).await.expect("it starts");
    }
    let worker = place.worker();
    for build in [1001, 1002] {
        let headers = [
            ("x-build-start-time", AMQPValue::LongLongInt(jiff::Timestamp::now().as_millisecond())),
            ("x-retry-count", AMQPValue::LongInt(0)),
        ];
        let check = BasicProperties::default().with_headers(header_table(headers));
        place.publish_to("sdRetryQueue", check, of_build("verify", build).to_string().as_bytes()).await;
    }
    place.more_looks(1001, 2).await;
    place.run(1001).await;
    place.api.wait_for_node(1001).await;
    let failing = place.pod(1002).await;
    place.cluster.schedule(&failing, "node-a");
    place.cluster.running(&failing);
    place.cluster.terminate(&failing, "1002", 137, "OOMKilled");
    let failures = async {
        // It may have been seen running before.
        tokio::select! {
            text = place.api.wait_for_failure(1002) => assert!(text.contains("out of memory"), "{text}"),
            () = place.api.wait_for_node(1002) => {}
        }
    };
    failures.await;
    place.publish(&of_build("stop", 1001)).await;
    place.cluster.wait_until("it is stopped", |cluster| cluster.pods().len() == 1).await;
    // A start that the executor has not acknowledged: its pod is taken over.
    executor.call("start", &start(1003)["buildConfig"]).await.expect("it starts");
    place.publish(&start(1003)).await;
    place.run(1003).await;
    place.api.wait_for_node(1003).await;
    assert_eq!((place.posts(1003), place.pods(1003).len()), (1, 1));
    place.finish([worker]).await;
}
