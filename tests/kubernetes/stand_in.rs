//! The stand-in behaves as an API server does. The cases of [`on_any_server`] run against a real one too, if
//! `JOURNEYMAN_TEST_KUBERNETES` is the kubeconfig of an administrator.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use reqwest::header::{ACCEPT, CONTENT_TYPE};
use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::support::cluster::{Cluster, NAMESPACE, TOKEN};

const MERGE_PATCH: &str = "application/merge-patch+json";
const METADATA: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
const METADATA_LIST: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";

/// The objects of a kind in a namespace.
#[derive(Clone)]
struct Api {
    http: reqwest::Client,
    /// The group of core objects.
    server: String,
    token: Option<&'static str>,
    namespace: String,
    resource: &'static str,
}

#[derive(Debug)]
enum Failure {
    Status(u16, Value),
    Connection,
}

type Answer = Result<Value, Failure>;

impl Api {
    fn of(&self, resource: &'static str) -> Self {
        Self { resource, ..self.clone() }
    }

    fn request(&self, method: Method, name: &str) -> RequestBuilder {
        self.request_with(method, name, &[])
    }

    fn request_with(&self, method: Method, name: &str, query: &[(&str, &str)]) -> RequestBuilder {
        let Self { server, namespace, resource, .. } = self;
        let slash = if name.is_empty() { "" } else { "/" };
        let url = format!("{server}/api/v1/namespaces/{namespace}/{resource}{slash}{name}");
        let request = self.http.request(method, url::Url::parse_with_params(&url, query).expect("a URL"));
        match self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }

    async fn get(&self, name: &str) -> Answer {
        value(self.request(Method::GET, name)).await
    }

    async fn list(&self, query: &[(&str, &str)]) -> Answer {
        value(self.request_with(Method::GET, "", query)).await
    }

    async fn names(&self, query: &[(&str, &str)]) -> Vec<String> {
        let list = self.list(query).await.expect("a list");
        list["items"].as_array().expect("items").iter().map(name_of).collect()
    }

    async fn version(&self, query: &[(&str, &str)]) -> String {
        let list = self.list(query).await.expect("a list");
        list["metadata"]["resourceVersion"].as_str().expect("a version").to_owned()
    }

    async fn create(&self, object: &Value) -> Answer {
        value(self.request(Method::POST, "").json(object)).await
    }

    /// Creates a subresource.
    async fn post(&self, name: &str, object: &Value) -> Answer {
        value(self.request(Method::POST, name).json(object)).await
    }

    async fn replace(&self, name: &str, object: &Value) -> Answer {
        value(self.request(Method::PUT, name).json(object)).await
    }

    async fn merge(&self, name: &str, patch: Value) -> Answer {
        value(self.request(Method::PATCH, name).header(CONTENT_TYPE, MERGE_PATCH).body(patch.to_string())).await
    }

    async fn delete(&self, name: &str, options: Value) -> Answer {
        value(self.request(Method::DELETE, name).json(&options)).await
    }

    async fn delete_all(&self, query: &[(&str, &str)]) -> Answer {
        value(self.request_with(Method::DELETE, "", query)).await
    }

    async fn watch(&self, version: &str, query: &[(&str, &str)]) -> Lines {
        let own = [("watch", "true"), ("allowWatchBookmarks", "true"), ("resourceVersion", version)];
        lines(self.request_with(Method::GET, "", &[&own[..], query].concat())).await.expect("a watch")
    }

    /// Waits until the object is there, or gone.
    async fn wait_for(&self, name: &str, is_there: bool) {
        let waiting = async {
            while self.get(name).await.is_ok() != is_there {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), waiting).await.expect("it comes, or goes");
    }
}

async fn open(request: RequestBuilder) -> Result<Response, Failure> {
    let answer = request.send().await.map_err(|_| Failure::Connection)?;
    if answer.status().is_success() {
        return Ok(answer);
    }
    let code = answer.status().as_u16();
    Err(Failure::Status(code, answer.json().await.map_err(|_| Failure::Connection)?))
}

async fn value(request: RequestBuilder) -> Answer {
    open(request).await?.json().await.map_err(|_| Failure::Connection)
}

/// The lines of an answer that may grow.
struct Lines {
    answer: Response,
    unread: Vec<u8>,
}

async fn lines(request: RequestBuilder) -> Result<Lines, Failure> {
    Ok(Lines { answer: open(request).await?, unread: Vec::new() })
}

impl Lines {
    /// `None` at an end in order.
    async fn next(&mut self) -> Result<Option<String>, Failure> {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line = self.unread.drain(..=end).collect();
                return Ok(Some(String::from_utf8(line).expect("a text").trim_end().to_owned()));
            }
            match self.answer.chunk().await.map_err(|_| Failure::Connection)? {
                Some(piece) => self.unread.extend_from_slice(&piece),
                None => return Ok(None),
            }
        }
    }

    async fn event(&mut self) -> Value {
        let line = self.next().await.expect("an open watch").expect("an event");
        serde_json::from_str(&line).expect("JSON")
    }
}

async fn stand_in() -> (Cluster, Api) {
    let cluster = Cluster::start().await;
    let (server, token, namespace) = (cluster.url(), Some(TOKEN), NAMESPACE.to_owned());
    let api = Api { http: http(), server, token, namespace, resource: "pods" };
    (cluster, api)
}

fn http() -> reqwest::Client {
    rustls::crypto::ring::default_provider().install_default().ok();
    reqwest::Client::builder().retry(reqwest::retry::never()).no_proxy().build().expect("a client")
}

fn pod(name: &str, label: &str) -> Value {
    json!({
        "metadata": { "name": name, "labels": { "task": label } },
        "spec": { "restartPolicy": "Never", "containers": [{ "name": "build", "image": "build:1" }] },
    })
}

fn name_of(object: &Value) -> String {
    object["metadata"]["name"].as_str().expect("a name").to_owned()
}

fn version_of(object: &Value) -> &str {
    object["metadata"]["resourceVersion"].as_str().expect("a version")
}

#[track_caller]
fn refusal(answer: Answer) -> (u16, String, String) {
    match answer {
        Err(Failure::Status(code, status)) => {
            let text = |field: &str| status[field].as_str().expect("a text").to_owned();
            assert_eq!((&status["kind"], &status["code"]), (&json!("Status"), &json!(code)));
            (code, text("reason"), text("message"))
        }
        other => panic!("no refusal: {other:?}"),
    }
}

#[track_caller]
fn assert_refused(answer: Answer, code: u16, reason: &str) {
    let found = refusal(answer);
    assert_eq!((found.0, found.1.as_str()), (code, reason), "{}", found.2);
}

async fn bind(pods: &Api, name: &str) -> Answer {
    let target = json!({ "apiVersion": "v1", "kind": "Node", "name": "node-a" });
    let binding = json!({ "apiVersion": "v1", "kind": "Binding", "metadata": { "name": name }, "target": target });
    pods.post(&format!("{name}/binding"), &binding).await
}

async fn on_any_server(pods: &Api) {
    Box::pin(creation(pods)).await;
    Box::pin(updates(pods)).await;
    Box::pin(lists_and_watches(pods)).await;
    Box::pin(binding_and_eviction(pods)).await;
    Box::pin(deletion(pods)).await;
    Box::pin(owned_objects(pods)).await;
    Box::pin(events(&pods.of("events"))).await;
}

async fn creation(pods: &Api) {
    let made = pods.create(&pod("a", "1")).await.expect("it is created");
    let meta = &made["metadata"];
    let given = ["uid", "resourceVersion", "creationTimestamp"].map(|field| meta[field].is_string());
    assert_eq!(given, [true; 3], "{meta}");
    assert_eq!(made["status"]["phase"], "Pending");
    assert_eq!(made["spec"]["terminationGracePeriodSeconds"], 30);
    let again = refusal(pods.create(&pod("a", "1")).await);
    assert_eq!(again, (409, "AlreadyExists".to_owned(), "pods \"a\" already exists".to_owned()));
    assert_eq!(refusal(pods.get("none").await), (404, "NotFound".to_owned(), "pods \"none\" not found".to_owned()));

    for (wrong, field) in [
        (pod("Upper_Case", "1"), "metadata.name"),
        (pod(&"a".repeat(254), "1"), "metadata.name"),
        (pod("b", "not a label"), "metadata.labels"),
        (pod("b", &"a".repeat(64)), "metadata.labels"),
        (json!({ "metadata": { "name": "b" }, "spec": { "containers": [] } }), "spec.containers"),
        (json!({ "spec": { "containers": [{ "name": "a", "image": "a" }] } }), "metadata.name"),
    ] {
        let (code, reason, message) = refusal(pods.create(&wrong).await);
        assert!((code, reason.as_str()) == (422, "Invalid") && message.contains(field), "{code} {reason} {message}");
    }
    for (field, value) in [("image", json!(1)), ("args", json!([true])), ("env", json!([{ "name": "a", "value": 1 }]))]
    {
        let mut wrong = pod("b", "1");
        wrong["spec"]["containers"][0][field] = value;
        assert_refused(pods.create(&wrong).await, 400, "BadRequest");
    }
    let mut generated = pod("", "1");
    generated["metadata"] = json!({ "generateName": "some-" });
    let name = name_of(&pods.create(&generated).await.expect("it is created"));
    assert!(name.starts_with("some-") && name.len() == 10, "{name}");
    for name in ["a", &name] {
        pods.delete(name, json!({})).await.expect("it is deleted");
    }
}

async fn updates(pods: &Api) {
    let first = pods.create(&pod("b", "1")).await.expect("it is created");
    let noted = json!({ "metadata": { "annotations": { "note": "1" } }, "status": { "phase": "Failed" } });
    let second = pods.merge("b", noted.clone()).await.expect("it is changed");
    assert_eq!(second["status"]["phase"], "Pending");
    assert_ne!(version_of(&first), version_of(&second));
    let same = pods.merge("b", noted).await.expect("it is the same");
    assert_eq!(version_of(&same), version_of(&second));

    let stale = json!({ "metadata": { "resourceVersion": version_of(&first), "annotations": { "note": "2" } } });
    assert_refused(pods.merge("b", stale).await, 409, "Conflict");
    assert_refused(pods.replace("b", &first).await, 409, "Conflict");
    assert_refused(pods.merge("b", json!({ "spec": { "hostname": "x" } })).await, 422, "Invalid");

    let failed = json!({ "status": { "phase": "Failed", "reason": "Evicted" }, "spec": { "hostname": "x" } });
    let third = pods.merge("b/status", failed).await.expect("it is changed");
    assert!(third["status"]["reason"] == "Evicted" && third["spec"]["hostname"].is_null(), "{third}");
    assert_eq!(pods.names(&[("fieldSelector", "status.phase=Failed")]).await, ["b"]);
    assert_eq!(pods.get("b/status").await.expect("a pod"), third);
    pods.delete("b", json!({})).await.expect("it is deleted");
}

async fn lists_and_watches(pods: &Api) {
    for (name, label) in [("c1", "one"), ("c2", "two")] {
        pods.create(&pod(name, label)).await.expect("a pod");
    }
    for (labels, expected) in [
        ("task=one", vec!["c1"]),
        ("task in (one, two)", vec!["c1", "c2"]),
        ("task==two,task", vec!["c2"]),
        ("task!=one", vec!["c2"]),
        ("!task", vec![]),
        ("task=three", vec![]),
    ] {
        assert_eq!(pods.names(&[("labelSelector", labels)]).await, expected, "{labels}");
    }
    let named = pods.request_with(Method::GET, "", &[("fieldSelector", "metadata.name=c2")]);
    let partial = value(named.header(ACCEPT, METADATA_LIST)).await.expect("a list");
    assert_eq!((partial["items"].as_array().map(Vec::len), &partial["items"][0]["spec"]), (Some(1), &Value::Null));
    assert_refused(pods.list(&[("fieldSelector", "spec.none=a")]).await, 400, "BadRequest");

    let only = ("labelSelector", "task=one");
    let version = pods.version(&[only]).await;
    let mut events = pods.watch(&version, &[only, ("timeoutSeconds", "60")]).await;
    let query = [("watch", "true"), ("resourceVersion", version.as_str()), only];
    let partial = pods.request_with(Method::GET, "", &query).header(ACCEPT, METADATA);
    let mut partial = lines(partial).await.expect("a watch");
    pods.create(&pod("c3", "one")).await.expect("a pod");
    for (name, to) in [("c2", "one"), ("c1", "two")] {
        pods.merge(name, json!({ "metadata": { "labels": { "task": to } } })).await.expect("it is changed");
    }
    pods.merge("c3", json!({ "metadata": { "annotations": { "note": "1" } } })).await.expect("it is changed");
    pods.delete("c3", json!({ "gracePeriodSeconds": 0 })).await.expect("it is deleted");
    let mut seen = Vec::new();
    for _ in 0..5 {
        let event = events.event().await;
        seen.push(format!("{} {}", event["type"].as_str().expect("a type"), name_of(&event["object"])));
    }
    // A pod leaves by a label that is no longer wanted, too.
    assert_eq!(seen, ["ADDED c3", "ADDED c2", "DELETED c1", "MODIFIED c3", "DELETED c3"]);
    let first = partial.event().await;
    assert!(first["type"] == "ADDED" && name_of(&first["object"]) == "c3", "{first}");
    assert_eq!((&first["object"]["kind"], &first["object"]["spec"]), (&json!("PartialObjectMetadata"), &Value::Null));

    let all = [("labelSelector", "task in (one,two)")];
    pods.delete_all(&all).await.expect("they are deleted");
    assert!(pods.names(&all).await.is_empty());
}

async fn binding_and_eviction(pods: &Api) {
    for name in ["d1", "d2"] {
        pods.create(&pod(name, "1")).await.expect("it is created");
    }
    bind(pods, "d1").await.expect("it is bound");
    assert_refused(bind(pods, "d1").await, 409, "Conflict");
    let bound = pods.get("d1").await.expect("a pod");
    let condition = &bound["status"]["conditions"][0];
    assert_eq!((&condition["type"], &condition["status"]), (&json!("PodScheduled"), &json!("True")));
    assert!(condition["lastTransitionTime"].is_string() && bound["spec"]["nodeName"] == "node-a", "{bound}");

    for name in ["d1", "d2"] {
        let eviction = json!({ "apiVersion": "policy/v1", "kind": "Eviction", "metadata": { "name": name } });
        pods.post(&format!("{name}/eviction"), &eviction).await.expect("it is evicted");
    }
    // Without a node there is nothing to wait for.
    assert_refused(pods.get("d2").await, 404, "NotFound");
    let evicted = &pods.get("d1").await.expect("a pod")["metadata"];
    assert!(evicted["deletionTimestamp"].is_string() && evicted["deletionGracePeriodSeconds"] == 30, "{evicted}");
    pods.delete("d1", json!({ "gracePeriodSeconds": 0 })).await.expect("it is deleted");
    assert_refused(pods.get("d1").await, 404, "NotFound");
}

async fn deletion(pods: &Api) {
    pods.create(&pod("e", "1")).await.expect("it is created");
    let other = json!({ "preconditions": { "uid": "another" } });
    assert_refused(pods.delete("e", other).await, 409, "Conflict");
    bind(pods, "e").await.expect("it is bound");
    let first = &pods.delete("e", json!({})).await.expect("it is deleted")["metadata"]["deletionTimestamp"];
    assert!(first.is_string(), "{first}");
    let again = &pods.delete("e", json!({})).await.expect("it is deleted")["metadata"]["deletionTimestamp"];
    assert_eq!(first, again);

    // What has ended needs no grace.
    pods.create(&pod("f", "1")).await.expect("it is created");
    bind(pods, "f").await.expect("it is bound");
    pods.merge("f/status", json!({ "status": { "phase": "Succeeded" } })).await.expect("it is changed");
    pods.delete("f", json!({})).await.expect("it is deleted");
    assert_refused(pods.get("f").await, 404, "NotFound");
    pods.delete("e", json!({ "gracePeriodSeconds": 0 })).await.expect("it is deleted");
}

async fn owned_objects(pods: &Api) {
    let (secrets, maps) = (pods.of("secrets"), pods.of("configmaps"));
    let owner = pods.create(&pod("g", "1")).await.expect("it is created");
    let reference = json!([{ "apiVersion": "v1", "kind": "Pod", "name": "g", "uid": owner["metadata"]["uid"] }]);
    let meta = json!({ "name": "of-g", "ownerReferences": reference });
    let secret = json!({ "metadata": meta, "stringData": { "token": "a" } });
    let made = secrets.create(&secret).await.expect("it is created");
    assert_eq!(made["data"], json!({ "token": "YQ==" }));
    maps.create(&json!({ "metadata": meta })).await.expect("it is created");
    pods.delete("g", json!({})).await.expect("it is deleted");
    secrets.wait_for("of-g", false).await;
    maps.wait_for("of-g", false).await;
}

async fn events(events: &Api) {
    for (name, uid) in [("h", "1"), ("h", "2"), ("i", "3")] {
        let about = json!({ "kind": "Pod", "name": name, "namespace": events.namespace, "uid": uid });
        let event = json!({
            "metadata": { "generateName": "h." }, "involvedObject": about, "type": "Warning", "reason": "Failed", "message": "no image",
        });
        events.create(&event).await.expect("it is created");
    }
    for (fields, expected) in
        [("involvedObject.name=h", 2), ("involvedObject.uid=2", 1), ("involvedObject.name=h,type=Normal", 0)]
    {
        assert_eq!(events.names(&[("fieldSelector", fields)]).await.len(), expected, "{fields}");
    }
}

#[tokio::test]
async fn the_stand_in_behaves_as_an_api_server() {
    let (cluster, pods) = stand_in().await;
    // A cluster without nodes does the same.
    cluster.keep_deleted(true);
    on_any_server(&pods).await;
    assert!(cluster.pods().is_empty() && cluster.secrets().is_empty() && cluster.config_maps().is_empty());
    let version = pods.http.get(format!("{}/version", cluster.url())).bearer_auth(TOKEN);
    assert!(value(version).await.expect("a version")["gitVersion"].as_str().expect("a text").starts_with("v1."));
}

#[tokio::test]
async fn a_real_api_server_behaves_the_same() {
    let Some(path) = std::env::var_os("JOURNEYMAN_TEST_KUBERNETES") else {
        eprintln!("skipped: JOURNEYMAN_TEST_KUBERNETES is not set to a kubeconfig");
        return;
    };
    // kubectl has the credentials.
    let mut kubectl = tokio::process::Command::new("kubectl");
    kubectl.arg("--kubeconfig").arg(Path::new(&path)).args(["proxy", "--port", "0"]);
    let mut proxy = kubectl.stdout(Stdio::piped()).kill_on_drop(true).spawn().expect("kubectl is installed");
    let mut said = String::new();
    BufReader::new(proxy.stdout.take().expect("it is piped")).read_line(&mut said).await.expect("it is ready");
    let server = format!("http://{}", said.trim().rsplit(' ').next().expect("an address"));
    let namespace = format!("jm-{}", uuid::Uuid::new_v4().simple());
    let http = http();
    let namespaces = format!("{server}/api/v1/namespaces");
    let own = json!({ "metadata": { "name": namespace } });
    value(http.post(&namespaces).json(&own)).await.expect("it is created");
    let pods = Api { http: http.clone(), server, token: None, namespace: namespace.clone(), resource: "pods" };
    // The controller manager makes it, and pods need it.
    pods.of("serviceaccounts").wait_for("default", true).await;
    on_any_server(&pods).await;
    value(http.delete(format!("{namespaces}/{namespace}"))).await.expect("it is deleted");
}
