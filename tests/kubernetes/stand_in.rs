//! The stand-in behaves as an API server does. The cases of [`on_any_server`] run against a real one too, if
//! `JOURNEYMAN_TEST_KUBERNETES` is the kubeconfig of an administrator.

use std::collections::BTreeMap;
use std::path::Path;
use std::pin::pin;

use futures_util::{AsyncBufReadExt as _, AsyncReadExt as _, StreamExt as _, TryStreamExt as _};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{ConfigMap, Event, Pod, Secret};
use kube::api::{
    Api, DeleteParams, EvictParams, ListParams, LogParams, Patch, PatchParams, PostParams, Preconditions, WatchEvent,
    WatchParams,
};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::Status;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Client, Config, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::cluster::{Cluster, Fault, How};

async fn client(kubeconfig: &Path) -> Client {
    rustls::crypto::ring::default_provider().install_default().ok();
    let kubeconfig = Kubeconfig::read_from(kubeconfig).expect("a kubeconfig");
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    Client::try_from(config.expect("a configuration")).expect("a client")
}

async fn stand_in() -> (Cluster, Api<Pod>, Client) {
    let (cluster, place) = (Cluster::start().await, TempDir::new().expect("a folder"));
    let client = client(&cluster.kubeconfig(place.path())).await;
    (cluster, Api::default_namespaced(client.clone()), client)
}

fn object<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("a valid object")
}

fn pod(name: &str, label: &str) -> Pod {
    object(json!({
        "metadata": { "name": name, "labels": { "task": label } },
        "spec": { "restartPolicy": "Never", "containers": [{ "name": "build", "image": "build:1" }] },
    }))
}

fn value(pod: &Pod) -> Value {
    serde_json::to_value(pod).expect("JSON")
}

#[track_caller]
fn refusal<T: std::fmt::Debug>(result: kube::Result<T>) -> (u16, String, String) {
    match result {
        Err(kube::Error::Api(status)) => (status.code, status.reason.clone(), status.message.clone()),
        other => panic!("no refusal: {other:?}"),
    }
}

#[track_caller]
fn assert_refused<T: std::fmt::Debug>(result: kube::Result<T>, code: u16, reason: &str) {
    let found = refusal(result);
    assert_eq!((found.0, found.1.as_str()), (code, reason), "{}", found.2);
}

fn merge(patch: Value) -> Patch<Value> {
    Patch::Merge(patch)
}

async fn bind(pods: &Api<Pod>, name: &str) -> kube::Result<Status> {
    let target = json!({ "apiVersion": "v1", "kind": "Node", "name": "node-a" });
    let binding = json!({ "apiVersion": "v1", "kind": "Binding", "metadata": { "name": name }, "target": target });
    pods.create_subresource("binding", name, &PostParams::default(), &binding).await
}

async fn on_any_server(client: &Client, namespace: &str) {
    let pods = Api::namespaced(client.clone(), namespace);
    Box::pin(creation(&pods)).await;
    Box::pin(updates(&pods)).await;
    Box::pin(lists_and_watches(&pods)).await;
    Box::pin(binding_and_eviction(&pods)).await;
    Box::pin(deletion(&pods)).await;
    Box::pin(owned_objects(client, &pods, namespace)).await;
    Box::pin(events(&Api::namespaced(client.clone(), namespace), namespace)).await;
}

async fn creation(pods: &Api<Pod>) {
    let params = PostParams::default();
    let made = pods.create(&params, &pod("a", "1")).await.expect("it is created");
    let meta = &made.metadata;
    assert!(meta.uid.is_some() && meta.resource_version.is_some() && meta.creation_timestamp.is_some(), "{meta:?}");
    assert_eq!(value(&made)["status"]["phase"], "Pending");
    assert_eq!(value(&made)["spec"]["terminationGracePeriodSeconds"], 30);
    let again = refusal(pods.create(&params, &pod("a", "1")).await);
    assert_eq!(again, (409, "AlreadyExists".to_owned(), "pods \"a\" already exists".to_owned()));
    assert_eq!(refusal(pods.get("none").await), (404, "NotFound".to_owned(), "pods \"none\" not found".to_owned()));

    for (wrong, field) in [
        (pod("Upper_Case", "1"), "metadata.name"),
        (pod(&"a".repeat(254), "1"), "metadata.name"),
        (pod("b", "not a label"), "metadata.labels"),
        (pod("b", &"a".repeat(64)), "metadata.labels"),
        (object(json!({ "metadata": { "name": "b" }, "spec": { "containers": [] } })), "spec.containers"),
        (object(json!({ "spec": { "containers": [{ "name": "a", "image": "a" }] } })), "metadata.name"),
    ] {
        let (code, reason, message) = refusal(pods.create(&params, &wrong).await);
        assert!((code, reason.as_str()) == (422, "Invalid") && message.contains(field), "{code} {reason} {message}");
    }
    let mut generated = pod("", "1");
    (generated.metadata.name, generated.metadata.generate_name) = (None, Some("some-".to_owned()));
    let name = pods.create(&params, &generated).await.expect("it is created").name_any();
    assert!(name.starts_with("some-") && name.len() == 10, "{name}");
    for name in ["a", &name] {
        pods.delete(name, &DeleteParams::default()).await.expect("it is deleted");
    }
}

async fn updates(pods: &Api<Pod>) {
    let params = PatchParams::default();
    let first = pods.create(&PostParams::default(), &pod("b", "1")).await.expect("it is created");
    let noted = merge(json!({ "metadata": { "annotations": { "note": "1" } }, "status": { "phase": "Failed" } }));
    let second = pods.patch("b", &params, &noted).await.expect("it is changed");
    assert_eq!(value(&second)["status"]["phase"], "Pending");
    assert_ne!(first.resource_version(), second.resource_version());
    let same = pods.patch("b", &params, &noted).await.expect("it is the same");
    assert_eq!(same.resource_version(), second.resource_version());

    let stale = json!({ "metadata": { "resourceVersion": first.resource_version(), "annotations": { "note": "2" } } });
    assert_refused(pods.patch("b", &params, &merge(stale)).await, 409, "Conflict");
    assert_refused(pods.replace("b", &PostParams::default(), &first).await, 409, "Conflict");
    assert_refused(pods.patch("b", &params, &merge(json!({ "spec": { "hostname": "x" } }))).await, 422, "Invalid");

    let failed = merge(json!({ "status": { "phase": "Failed", "reason": "Evicted" }, "spec": { "hostname": "x" } }));
    let third = value(&pods.patch_status("b", &params, &failed).await.expect("it is changed"));
    assert!(third["status"]["reason"] == "Evicted" && third["spec"]["hostname"].is_null(), "{third}");
    let by_field = ListParams::default().fields("status.phase=Failed");
    assert_eq!(pods.list(&by_field).await.expect("a list").items.len(), 1);
    assert_eq!(value(&pods.get_status("b").await.expect("a pod")), third);
    pods.delete("b", &DeleteParams::default()).await.expect("it is deleted");
}

async fn lists_and_watches(pods: &Api<Pod>) {
    let create = async |name, label| pods.create(&PostParams::default(), &pod(name, label)).await.expect("a pod");
    create("c1", "one").await;
    create("c2", "two").await;
    for (labels, expected) in [
        ("task=one", vec!["c1"]),
        ("task in (one, two)", vec!["c1", "c2"]),
        ("task==two,task", vec!["c2"]),
        ("task!=one", vec!["c2"]),
        ("!task", vec![]),
        ("task=three", vec![]),
    ] {
        let list = pods.list(&ListParams::default().labels(labels)).await.expect("a list");
        assert_eq!(list.items.iter().map(ResourceExt::name_any).collect::<Vec<_>>(), expected, "{labels}");
    }
    let named = ListParams::default().fields("metadata.name=c2");
    assert_eq!(pods.list_metadata(&named).await.expect("a list").items.len(), 1);
    assert_refused(pods.list(&ListParams::default().fields("spec.none=a")).await, 400, "BadRequest");

    let only = ListParams::default().labels("task=one");
    let version = pods.list(&only).await.expect("a list").metadata.resource_version.expect("a version");
    let watch = WatchParams::default().labels("task=one").timeout(60);
    let mut events = pods.watch(&watch, &version).await.expect("a watch").boxed();
    let mut partial = pods.watch_metadata(&watch, &version).await.expect("a watch").boxed();
    create("c3", "one").await;
    let label = |label: &str| merge(json!({ "metadata": { "labels": { "task": label } } }));
    for (name, to) in [("c2", "one"), ("c1", "two")] {
        pods.patch(name, &PatchParams::default(), &label(to)).await.expect("it is changed");
    }
    let note = merge(json!({ "metadata": { "annotations": { "note": "1" } } }));
    pods.patch("c3", &PatchParams::default(), &note).await.expect("it is changed");
    pods.delete("c3", &DeleteParams::default().grace_period(0)).await.expect("it is deleted");
    let mut seen = Vec::new();
    for _ in 0..5 {
        let short = match events.try_next().await.expect("an open watch").expect("an event") {
            WatchEvent::Added(pod) => format!("+{}", pod.name_any()),
            WatchEvent::Modified(pod) => format!("~{}", pod.name_any()),
            WatchEvent::Deleted(pod) => format!("-{}", pod.name_any()),
            other @ (WatchEvent::Bookmark(_) | WatchEvent::Error(_)) => panic!("{other:?}"),
        };
        seen.push(short);
    }
    // A pod leaves by a label that is no longer wanted, too.
    assert_eq!(seen, ["+c3", "+c2", "-c1", "~c3", "-c3"]);
    let first = partial.try_next().await.expect("an open watch").expect("an event");
    assert!(matches!(first, WatchEvent::Added(meta) if meta.metadata.name.as_deref() == Some("c3")));

    let all = ListParams::default().labels("task in (one,two)");
    pods.delete_collection(&DeleteParams::default(), &all).await.expect("they are deleted");
    assert!(pods.list(&all).await.expect("a list").items.is_empty());
}

async fn binding_and_eviction(pods: &Api<Pod>) {
    for name in ["d1", "d2"] {
        pods.create(&PostParams::default(), &pod(name, "1")).await.expect("it is created");
    }
    bind(pods, "d1").await.expect("it is bound");
    assert_refused(bind(pods, "d1").await, 409, "Conflict");
    let bound = value(&pods.get("d1").await.expect("a pod"));
    let condition = &bound["status"]["conditions"][0];
    assert_eq!((&condition["type"], &condition["status"]), (&json!("PodScheduled"), &json!("True")));
    assert!(condition["lastTransitionTime"].is_string() && bound["spec"]["nodeName"] == "node-a", "{bound}");

    for name in ["d1", "d2"] {
        pods.evict(name, &EvictParams::default()).await.expect("it is evicted");
    }
    // Without a node there is nothing to wait for.
    assert_refused(pods.get("d2").await, 404, "NotFound");
    let evicted = pods.get("d1").await.expect("a pod");
    assert!(
        evicted.metadata.deletion_timestamp.is_some() && evicted.metadata.deletion_grace_period_seconds == Some(30)
    );
    pods.delete("d1", &DeleteParams::default().grace_period(0)).await.expect("it is deleted");
    assert_refused(pods.get("d1").await, 404, "NotFound");
}

async fn deletion(pods: &Api<Pod>) {
    pods.create(&PostParams::default(), &pod("e", "1")).await.expect("it is created");
    let other = Preconditions { uid: Some("another".to_owned()), resource_version: None };
    let only = DeleteParams { preconditions: Some(other), ..DeleteParams::default() };
    assert_refused(pods.delete("e", &only).await, 409, "Conflict");
    bind(pods, "e").await.expect("it is bound");
    let first = pods.delete("e", &DeleteParams::default()).await.expect("it is deleted").left().expect("the pod");
    assert!(first.metadata.deletion_timestamp.is_some());
    let again = pods.delete("e", &DeleteParams::default()).await.expect("it is deleted").left().expect("the pod");
    assert_eq!(again.metadata.deletion_timestamp, first.metadata.deletion_timestamp);

    // What has ended needs no grace.
    pods.create(&PostParams::default(), &pod("f", "1")).await.expect("it is created");
    bind(pods, "f").await.expect("it is bound");
    let over = merge(json!({ "status": { "phase": "Succeeded" } }));
    pods.patch_status("f", &PatchParams::default(), &over).await.expect("it is changed");
    pods.delete("f", &DeleteParams::default()).await.expect("it is deleted");
    assert_refused(pods.get("f").await, 404, "NotFound");
    pods.delete("e", &DeleteParams::default().grace_period(0)).await.expect("it is deleted");
}

async fn owned_objects(client: &Client, pods: &Api<Pod>, namespace: &str) {
    let (secrets, maps) =
        (Api::<Secret>::namespaced(client.clone(), namespace), Api::<ConfigMap>::namespaced(client.clone(), namespace));
    let owner = pods.create(&PostParams::default(), &pod("g", "1")).await.expect("it is created");
    let reference = json!([{ "apiVersion": "v1", "kind": "Pod", "name": "g", "uid": owner.metadata.uid }]);
    let meta = json!({ "name": "of-g", "ownerReferences": reference });
    let secret: Secret = object(json!({ "metadata": meta, "stringData": { "token": "a" } }));
    let made = secrets.create(&PostParams::default(), &secret).await.expect("it is created");
    assert_eq!(made.data, Some(BTreeMap::from([("token".to_owned(), k8s_openapi::ByteString(b"a".to_vec()))])));
    maps.create(&PostParams::default(), &object(json!({ "metadata": meta }))).await.expect("it is created");
    let gone = watcher::watch_object(secrets.clone(), "of-g");
    pods.delete("g", &DeleteParams::default()).await.expect("it is deleted");
    let mut gone = pin!(gone.try_filter(|secret| std::future::ready(secret.is_none())));
    gone.try_next().await.expect("an open watch").expect("it goes");
    let mut gone = pin!(watcher::watch_object(maps, "of-g").try_filter(|map| std::future::ready(map.is_none())));
    gone.try_next().await.expect("an open watch").expect("it goes");
}

async fn events(events: &Api<Event>, namespace: &str) {
    for (name, uid) in [("h", "1"), ("h", "2"), ("i", "3")] {
        let about = json!({ "kind": "Pod", "name": name, "namespace": namespace, "uid": uid });
        let event = json!({
            "metadata": { "generateName": "h." }, "involvedObject": about, "type": "Warning", "reason": "Failed", "message": "no image",
        });
        events.create(&PostParams::default(), &object(event)).await.expect("it is created");
    }
    for (fields, expected) in
        [("involvedObject.name=h", 2), ("involvedObject.uid=2", 1), ("involvedObject.name=h,type=Normal", 0)]
    {
        assert_eq!(
            events.list(&ListParams::default().fields(fields)).await.expect("a list").items.len(),
            expected,
            "{fields}"
        );
    }
}

#[tokio::test]
async fn the_stand_in_behaves_as_an_api_server() {
    let (cluster, pods, client) = stand_in().await;
    // As on a cluster without nodes.
    cluster.keep_deleted(true);
    on_any_server(&client, pods.namespace().expect("a namespace")).await;
    assert!(cluster.pods().is_empty() && cluster.secrets().is_empty() && cluster.config_maps().is_empty());
    assert!(client.apiserver_version().await.expect("a version").git_version.starts_with("v1."));
}

#[tokio::test]
async fn a_real_api_server_behaves_the_same() {
    let Some(path) = std::env::var_os("JOURNEYMAN_TEST_KUBERNETES") else {
        eprintln!("skipped: JOURNEYMAN_TEST_KUBERNETES is not set to a kubeconfig");
        return;
    };
    let client = client(Path::new(&path)).await;
    let namespace = format!("jm-{}", uuid::Uuid::new_v4().simple());
    let namespaces = Api::<k8s_openapi::api::core::v1::Namespace>::all(client.clone());
    let own = object(json!({ "metadata": { "name": namespace } }));
    namespaces.create(&PostParams::default(), &own).await.expect("it is created");
    // The controller manager makes it, and pods need it.
    let accounts = Api::<k8s_openapi::api::core::v1::ServiceAccount>::namespaced(client.clone(), &namespace);
    let mut there =
        pin!(watcher::watch_object(accounts, "default").try_filter(|one| std::future::ready(one.is_some())));
    there.try_next().await.expect("an open watch").expect("it comes");
    on_any_server(&client, &namespace).await;
    namespaces.delete(&namespace, &DeleteParams::default()).await.expect("it is deleted");
}

#[tokio::test]
async fn watches_are_refused_cut_and_silent_as_a_test_wants() {
    let (cluster, pods, _) = stand_in().await;
    pods.create(&PostParams::default(), &pod("a", "1")).await.expect("it is created");
    cluster.compact();
    let watch = WatchParams::default();
    let mut events = pods.watch(&watch, "2").await.expect("a watch").boxed();
    let first = events.try_next().await.expect("an open watch").expect("an event");
    assert!(
        matches!(&first, WatchEvent::Error(status) if status.code == 410 && status.reason == "Expired"),
        "{first:?}"
    );
    assert!(events.try_next().await.expect("it ends in order").is_none());

    let version =
        pods.list(&ListParams::default()).await.expect("a list").metadata.resource_version.expect("a version");
    let mut events = pods.watch(&watch, &version).await.expect("a watch").boxed();
    cluster.bookmark();
    let mark = events.try_next().await.expect("an open watch").expect("an event");
    assert!(matches!(mark, WatchEvent::Bookmark(mark) if mark.metadata.resource_version == version));
    cluster.silence_watches(true);
    cluster.schedule("a", "node-a");
    cluster.bookmark();
    assert!(futures_util::poll!(events.next()).is_pending());
    cluster.silence_watches(false);
    let change = events.try_next().await.expect("an open watch").expect("an event");
    let mark = events.try_next().await.expect("an open watch").expect("an event");
    assert!(matches!((change, mark), (WatchEvent::Modified(_), WatchEvent::Bookmark(_))));
    cluster.cut_watches();
    // For this client it just ends; a log shows the difference.
    assert!(!matches!(events.next().await, Some(Ok(_))));

    // The timeout that a client asks for: in order, and with a bookmark.
    let mut events = pods.watch(&watch.timeout(1), &version).await.expect("a watch").boxed();
    let mut last = None;
    while let Some(event) = events.try_next().await.expect("it ends in order") {
        last = Some(event);
    }
    assert!(matches!(last, Some(WatchEvent::Bookmark(_))));
    cluster.wait_until("no watch is left", |cluster| cluster.open_watches() == 0).await;
}

#[tokio::test]
async fn the_watcher_of_kube_goes_on_after_cuts_and_410() {
    let (cluster, pods, _) = stand_in().await;
    let mut seen = pin!(watcher(pods.clone(), watcher::Config::default()).default_backoff().applied_objects());
    for name in ["a", "b"] {
        pods.create(&PostParams::default(), &pod(name, "1")).await.expect("it is created");
        while !matches!(seen.next().await, Some(Ok(pod)) if pod.name_any() == name) {}
        cluster.compact();
        cluster.cut_watches();
    }
}

#[tokio::test]
async fn a_log_is_followed_until_its_container_ends() {
    let (cluster, pods, _) = stand_in().await;
    pods.create(&PostParams::default(), &pod("a", "1")).await.expect("it is created");
    let follow = LogParams { follow: true, timestamps: true, ..LogParams::default() };
    assert_eq!(pods.logs("a", &LogParams::default()).await.expect("no log"), "", "it has no node");
    cluster.schedule("a", "node-a");
    cluster.waiting("a", "build", "ImagePullBackOff", "no such image");
    let why = "container \"build\" in pod \"a\" is waiting to start: ImagePullBackOff";
    assert_eq!(refusal(pods.logs("a", &follow).await), (400, "BadRequest".to_owned(), why.to_owned()));
    let other = LogParams { container: Some("other".to_owned()), ..LogParams::default() };
    assert_refused(pods.logs("a", &other).await, 400, "BadRequest");

    cluster.running("a");
    cluster.log("a", "build", "one");
    let mut lines = pods.log_stream("a", &follow).await.expect("a log").lines();
    let first = lines.try_next().await.expect("an open log").expect("a line");
    cluster.log("a", "build", "two");
    let second = lines.try_next().await.expect("an open log").expect("a line");
    let (time, text) = second.split_once(' ').expect("a time");
    assert!(text == "two" && first.ends_with(" one") && time.len() == 30, "{first:?} {second:?}");
    cluster.terminate("a", "build", 137, "OOMKilled");
    assert_eq!(lines.try_next().await.expect("it ends in order"), None);
    let over = cluster.pod("a").expect("it is there");
    assert!(over["status"]["phase"] == "Failed", "{over}");

    // A second's lines come again, whatever part of it is asked for.
    let time: Timestamp = time.parse().expect("a time");
    for (ahead, tail, expected) in [(0, None, "one\ntwo\n"), (2, None, ""), (0, Some(1), "two\n")] {
        let since = Timestamp::from_second(time.as_second() + ahead).expect("a time");
        let since_time = if tail.is_none() { Some(since) } else { None };
        let params = LogParams { since_time, tail_lines: tail, ..LogParams::default() };
        let log = pods.logs("a", &params).await.expect("a log");
        assert!(expected.is_empty() && log.is_empty() || log.ends_with(expected), "{ahead} {log:?}");
    }
}

#[tokio::test]
async fn a_log_is_cut_and_a_previous_one_is_kept() {
    let (cluster, pods, _) = stand_in().await;
    pods.create(&PostParams::default(), &pod("a", "1")).await.expect("it is created");
    cluster.schedule("a", "node-a");
    cluster.running("a");
    let previous = LogParams { previous: true, ..LogParams::default() };
    assert_refused(pods.logs("a", &previous).await, 400, "BadRequest");
    cluster.log("a", "build", "before");
    cluster.restart("a", "build", 1, "Error");
    cluster.log("a", "build", "a line that is cut");
    assert_eq!(pods.logs("a", &previous).await.expect("a log"), "before\n");

    cluster.fault(Fault { verb: "get", resource: "pods/log", times: 1, how: How::CutAfter(6) });
    let follow = LogParams { follow: true, ..LogParams::default() };
    let (mut log, mut text) = (pods.log_stream("a", &follow).await.expect("a log"), Vec::new());
    assert!(log.read_to_end(&mut text).await.is_err());
    assert_eq!(text, b"a line");
    let mut lines = pods.log_stream("a", &follow).await.expect("a log").lines();
    lines.try_next().await.expect("an open log").expect("a line");
    cluster.cut_logs();
    assert!(lines.try_next().await.is_err());
}

#[tokio::test]
async fn faults_end_the_calls_they_are_meant_for() {
    let (cluster, pods, client) = stand_in().await;
    let params = PostParams::default();
    let quota =
        "pods \"a\" is forbidden: exceeded quota: builds, requested: pods=1, used: pods=1, limited: pods=1".to_owned();
    let fault = |how| Fault { verb: "create", resource: "pods", times: 1, how };
    cluster.fault(fault(How::Status { code: 403, reason: "Forbidden", message: quota, retry_after: Some(7) }));
    assert_refused(pods.create(&params, &pod("a", "1")).await, 403, "Forbidden");
    cluster.fault(fault(How::Refuse));
    assert!(matches!(
        pods.create(&params, &pod("a", "1")).await,
        Err(kube::Error::HyperError(_) | kube::Error::Service(_))
    ));
    assert!(cluster.pods().is_empty());
    cluster.fault(fault(How::LoseAnswer));
    assert!(matches!(
        pods.create(&params, &pod("a", "1")).await,
        Err(kube::Error::HyperError(_) | kube::Error::Service(_))
    ));
    assert_eq!(cluster.pods().len(), 1);
    assert_eq!(cluster.count_calls("create", "pods"), 3, "each was sent once: {:?}", cluster.calls());
    cluster.fault(fault(How::Hang));
    let hanging = async { pods.create(&params, &pod("b", "1")).await.map(drop) };
    tokio::select! {
        ended = hanging => panic!("{ended:?}"),
        () = cluster.wait_until("it was asked", |cluster| cluster.count_calls("create", "pods") == 4) => {}
    }
    assert_eq!(cluster.pods().len(), 1);

    cluster.down(true);
    assert!(pods.get("a").await.is_err());
    cluster.down(false);
    pods.get("a").await.expect("it is up again");
    drop(client);
}

#[tokio::test]
async fn its_clock_is_its_own_and_its_token_is_needed() {
    let (cluster, pods, _) = stand_in().await;
    let since = Timestamp::now();
    cluster.set_skew(SignedDuration::from_mins(5));
    let made = pods.create(&PostParams::default(), &pod("a", "1")).await.expect("it is created");
    let ahead = made.creation_timestamp().expect("a time").0.as_second() - since.as_second();
    let answer = reqwest::Client::new().get(format!("{}/version", cluster.url())).send().await.expect("an answer");
    assert_eq!(answer.status(), 401);
    let date = answer.headers()["date"].to_str().expect("a text").to_owned();
    let date = jiff::fmt::rfc2822::parse(&date).expect("a date").timestamp();
    assert!((299..400).contains(&ahead) && (299..400).contains(&(date.as_second() - since.as_second())));
    let status: Value = answer.json().await.expect("a Status");
    assert_eq!((&status["kind"], &status["reason"]), (&json!("Status"), &json!("Unauthorized")));
}
