//! Starts of builds: one pod each, whatever happens meanwhile.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use journeyman_platform::host::crash_points::{BUILD_CRASH_POINTS, DEFERRAL_CRASH_POINTS};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::screwdriver::executor::BUILD_TOKEN;
use crate::screwdriver::support::{Place, of_build, start, status, until, waiting_for_resources};
use crate::support::cluster::{Cluster, How, rights_of_role};

#[tokio::test(flavor = "multi_thread")]
async fn a_build_goes_from_its_message_to_a_pod_that_runs() {
    let Some(place) = Place::new().await else { return };
    let worker = place.worker();
    place.publish(&start(1001)).await;
    let pod = place.pod(1001).await;
    place.more_looks(1001, 2).await;
    place.cluster.schedule(&pod, "node-a");
    place.cluster.running(&pod);
    place.api.wait_for_node(1001).await;
    let updates = place.api.updates(1001);
    assert_eq!(updates[0].body, waiting_for_resources());
    assert_eq!(updates[1].body["stats"]["hostname"], "node-a");
    assert_eq!((updates.len(), place.posts(1001)), (2, 1), "{updates:?}");
    place.finish([worker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s1_a_worker_that_is_killed_at_any_step_of_a_start_makes_one_pod() {
    let Some(place) = Place::new().await else { return };
    let steps = BUILD_CRASH_POINTS.iter().filter(|step| **step != "build-failure-reported");
    let steps = steps.chain(DEFERRAL_CRASH_POINTS).chain(&["before-report", "request-acknowledged"]);
    let mut builds = Vec::new();
    for step in steps {
        builds.push(1001 + builds.len() as u64);
        place.publish(&start(builds[builds.len() - 1])).await;
        place.dies_at(step).await;
    }
    let last = place.worker();
    for build in &builds {
        place.run(*build).await;
        place.api.wait_for_node(*build).await;
        assert_eq!((place.pods(*build).len(), place.posts(*build)), (1, 1), "build {build}");
    }
    assert_eq!(place.cluster.secrets().len(), builds.len(), "each has its token");
    place.finish([last]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s14_a_stop_that_comes_before_its_start_leaves_no_pod() {
    let Some(place) = Place::new().await else { return };
    let worker = place.worker();
    place.publish(&of_build("stop", 1001)).await;
    place.cluster.wait_until("it is stopped", |cluster| cluster.count_calls("deletecollection", "pods") == 1).await;
    place.publish(&start(1001)).await;
    place.publish(&start(1002)).await;
    place.run(1002).await;
    place.api.wait_for_node(1002).await;
    let looked = |place: &Place| place.cluster.calls().iter().filter(|call| call.name == "stopped-build-1001").count();
    place.cluster.wait_until("its start is processed", |_| looked(&place) >= 2).await;
    assert_eq!((place.pods(1001).len(), place.posts(1001)), (0, 0));
    place.finish([worker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn e7_the_role_of_the_example_allows_what_builds_need() {
    let Some(place) = Place::new().await else { return };
    let worker = place.worker();
    place.publish(&start(1001)).await;
    place.run(1001).await;
    place.api.wait_for_node(1001).await;
    place.publish(&of_build("stop", 1001)).await;
    place.cluster.wait_until("it is stopped", |cluster| cluster.count_calls("deletecollection", "pods") == 1).await;
    let (used, allowed) = (place.cluster.used_rights(), rights_of_role("screwdriver-role.yaml"));
    place.finish([worker]).await;
    // Not seen here: what is removed a day later, and a look at a pod that another start has made.
    let mut unused: Vec<_> = allowed.difference(&used).map(|(resource, verb)| format!("{verb} {resource}")).collect();
    unused.retain(|right| !["delete pods", "delete secrets", "get pods"].contains(&right.as_str()));
    assert!(used.is_subset(&allowed) && unused.is_empty(), "{used:?} {unused:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn s14_a_stop_during_the_start_leaves_no_pod_on_one_worker_and_on_two() {
    for count in [1, 2] {
        let Some(place) = Place::new().await else { return };
        let gate = Arc::new(Semaphore::new(0));
        place.fault("create", "pods", 1, How::Hold(Arc::clone(&gate)));
        // Each of two workers takes one message.
        let capacity = ["20", "1"][count - 1];
        let mut workers = Vec::new();
        for _ in 0..count {
            let mut worker = place.worker_with(&[("JOURNEYMAN__WORKER__CAPACITY", capacity)]);
            worker.says("\"consuming\",\"queue\":\"sdQueue\"").await;
            workers.push(worker);
        }
        place.publish(&start(1001)).await;
        place.cluster.wait_until("it is being started", |cluster| cluster.count_calls("create", "pods") == 1).await;
        place.publish(&of_build("stop", 1001)).await;
        let stops = |cluster: &Cluster| cluster.count_calls("deletecollection", "pods");
        if count == 1 {
            until("it is taken", async || place.ready().await.is_empty()).await;
        } else {
            place.cluster.wait_until("it is stopped", |cluster| stops(cluster) == 1).await;
        }
        gate.add_permits(1);
        // The worker that started it stops it once more, if another one has stopped it.
        place.cluster.wait_until("the pod is removed", |cluster| stops(cluster) == count).await;
        place.cluster.wait_until("no pod is left", |cluster| cluster.pods().is_empty()).await;
        let left: Vec<Value> = place.cluster.secrets().iter().map(|one| one["metadata"]["name"].clone()).collect();
        assert_eq!(left, ["stopped-build-1001"], "{count} workers");
        assert_eq!((place.posts(1001), place.api.failures(1001).len()), (1, 0));
        place.finish(workers).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_runs_is_stopped_by_its_label() {
    let Some(place) = Place::new().await else { return };
    let worker = place.worker();
    place.publish(&start(1001)).await;
    place.publish(&start(1002)).await;
    for build in [1001, 1002] {
        place.run(build).await;
        place.api.wait_for_node(build).await;
    }
    place.publish(&of_build("stop", 1001)).await;
    place.cluster.wait_until("it is stopped", |cluster| cluster.pods().len() == 1).await;
    assert_eq!(place.pods(1002).len(), 1);
    place.finish([worker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_is_stopped_while_it_pulls_has_not_failed() {
    let Some(place) = Place::new().await else { return };
    place.cluster.keep_deleted(true);
    let worker = place.worker();
    place.publish(&start(1001)).await;
    let pod = place.pod(1001).await;
    place.cluster.schedule(&pod, "node-a");
    place.more_looks(1001, 1).await;
    place.publish(&of_build("stop", 1001)).await;
    let is_ending = |pod: &Value| pod["metadata"]["deletionTimestamp"].is_string();
    place.cluster.wait_for_pod(is_ending).await;
    place.more_looks(1001, 1).await;
    until("it is not looked at again", async || place.ready().await.is_empty()).await;
    place.cluster.vanish(&pod);
    assert!(place.api.updates(1001).iter().all(|update| update.failure().is_none()), "{:?}", place.api.updates(1001));
    place.finish([worker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s17_want_of_quota_is_waited_for_and_what_can_never_be_created_fails_after_one_call() {
    let Some(place) = Place::new().await else { return };
    let quota = "pods \"p\" is forbidden: exceeded quota: builds, requested: limits.cpu=2, used: limits.cpu=9";
    let place = place.with_limits("delay = \"1s\"\nchecks = 60\nreprocess = 1\n");
    place.fault("create", "pods", 2, status(403, quota));
    // Errors are counted for themselves.
    place.fault("create", "pods", 1, status(500, "etcd has no leader"));
    let worker = place.worker();
    place.publish(&start(1001)).await;
    place.run(1001).await;
    place.api.wait_for_node(1001).await;
    assert_eq!((place.posts(1001), place.api.failures(1001).len()), (4, 0));
    let denied = "pods is forbidden: User \"w\" cannot create resource \"pods\"";
    for (build, code, message) in
        [(1002, 403, denied), (1003, 422, "Pod \"p\" is invalid: spec"), (1004, 404, "no namespace")]
    {
        place.fault("create", "pods", 1, status(code, message));
        place.publish(&start(build)).await;
        let text = place.api.wait_for_failure(build).await;
        let start = format!("Failed to create pod. (cannot create pod {build}-");
        assert!(text.starts_with(&start) && text.ends_with(&format!(": {code} {message})")), "{text}");
        assert_eq!((place.posts(build), place.pods(build).len()), (1, 0));
    }
    place.finish([worker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_fails_again_and_again_is_retried_by_its_queue_and_reported() {
    let Some(place) = Place::new().await else { return };
    let place = place.with_limits("delay = \"1s\"\nchecks = 60\nreprocess = 1\n");
    place.fault("create", "pods", usize::MAX, status(500, "etcd has no leader"));
    let worker = place.worker();
    place.publish(&start(1001)).await;
    let text = place.api.wait_for_failure(1001).await;
    assert!(text.starts_with("Failed to create pod. (cannot create pod 1001-"), "{text}");
    assert!(text.ends_with(": 500 etcd has no leader)"), "{text}");
    assert_eq!((place.posts(1001), place.api.failures(1001).len()), (2, 1));
    place.cluster.clear_faults();
    place.publish(&start(1002)).await;
    place.fault("list", "pods", 1, How::Refuse);
    place.run(1002).await;
    place.api.wait_for_node(1002).await;
    place.finish([worker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_main_queue_without_dead_letters_loses_no_start_and_no_stop() {
    let Some(place) = Place::without_queues().await else { return };
    place.declare("sdQueue", []).await;
    place.declare("sdRetryQueue", []).await;
    place.fault("create", "pods", 1, status(403, "exceeded quota: builds"));
    place.fault("deletecollection", "pods", 1, status(500, "etcd has no leader"));
    let worker = place.worker();
    place.publish(&start(1001)).await;
    place.run(1001).await;
    place.api.wait_for_node(1001).await;
    place.publish(&of_build("stop", 1001)).await;
    place.cluster.wait_until("it is stopped", |cluster| cluster.pods().is_empty()).await;
    place.finish([worker]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_that_fails_is_retried_by_its_queue() {
    let Some(place) = Place::new().await else { return };
    let place = place.with_limits("delay = \"1s\"\nreprocess = 1\n");
    let worker = place.worker();
    place.publish(&start(1001)).await;
    place.run(1001).await;
    place.api.wait_for_node(1001).await;
    place.fault("deletecollection", "pods", 2, status(500, "etcd has no leader"));
    place.publish(&of_build("stop", 1001)).await;
    place.cluster.wait_until("it is stopped", |cluster| cluster.pods().is_empty()).await;
    assert_eq!(place.cluster.count_calls("deletecollection", "pods"), 3);
    place.fault("deletecollection", "pods", usize::MAX, status(403, "pods is forbidden"));
    place.publish(&of_build("stop", 1002)).await;
    place.cluster.wait_until("it is given up", |cluster| cluster.count_calls("deletecollection", "pods") == 5).await;
    let log = place.finish([worker]).await;
    assert!(log.contains("build 1002 was not stopped, with 1 retries"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn s18_the_token_is_in_a_secret_that_goes_with_its_pod_and_nowhere_else() {
    let Some(place) = Place::new().await else { return };
    let worker = place.worker_with(&[("JOURNEYMAN__LOG__LEVEL", "trace")]);
    // Refusals, whose bodies repeat the token.
    place.api.answer_with(400);
    place.publish(&start(1001)).await;
    let name = place.pod(1001).await;
    place.cluster.wait_until("there is a Secret", |cluster| cluster.secrets().len() == 1).await;
    let secret = place.cluster.secrets().remove(0);
    assert_eq!(secret["metadata"]["name"], name);
    assert_eq!(secret["data"], json!({ "token": STANDARD.encode(BUILD_TOKEN) }));
    let pod = place.cluster.pod(&name).expect("it is there");
    let owner = &secret["metadata"]["ownerReferences"][0];
    assert_eq!((&owner["kind"], &owner["uid"]), (&json!("Pod"), &pod["metadata"]["uid"]));
    place.more_looks(1001, 1).await;
    place.cluster.vanish(&name);
    place.api.wait_for_attempts(1001, 1).await;
    assert!(place.cluster.secrets().is_empty());
    let log = place.finish([worker]).await;
    assert!(log.contains("Screwdriver refuses the failure of a build"), "{log}");
}
