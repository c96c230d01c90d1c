//! A Kubernetes API server in the test's process, over HTTP on a free port of the loopback address: pods with their
//! status, Secrets and Events, watches and logs: the calls of the worker and of Screwdriver's executor, with the checks that pods must pass.
//! The test is scheduler, kubelet and the source of faults.
//!
//! Nothing happens by itself, but that what belongs to an object goes with it.

#[path = "cluster/api.rs"]
mod api;
#[path = "cluster/store.rs"]
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::SignedDuration;
use journeyman_platform::kubernetes::parse_yaml;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use store::{Key, Store, kind_of};

pub(crate) const TOKEN: &str = "token-of-the-stand-in";
/// The namespace of the kubeconfig. There are as many others as are used.
pub(crate) const NAMESPACE: &str = "builds";

const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Resources and verbs of a role in `examples/kubernetes`.
pub(crate) fn rights_of_role(file: &str) -> BTreeSet<(String, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/kubernetes").join(file);
    let role = parse_yaml(&std::fs::read_to_string(path).expect("it is there")).expect("it is YAML");
    let texts = |rule: &Value, key: &str| -> Vec<String> {
        serde_json::from_value(rule[key].clone()).expect("a list of texts")
    };
    let of_rule = |rule: &Value| {
        let verbs = texts(rule, "verbs");
        let of = |resource: String| verbs.iter().map(|verb| (resource.clone(), verb.clone())).collect::<Vec<_>>();
        texts(rule, "resources").into_iter().flat_map(of).collect::<Vec<_>>()
    };
    role["rules"].as_array().expect("rules").iter().flat_map(of_rule).collect()
}

/// What goes wrong with the next calls of a route.
#[derive(Debug, Clone)]
pub(crate) struct Fault {
    /// As Kubernetes has it in its roles (`create`, `deletecollection`, …); `*` is any.
    pub(crate) verb: &'static str,
    /// `pods`, `pods/log`, …; `*` is any.
    pub(crate) resource: &'static str,
    pub(crate) times: usize,
    pub(crate) how: How,
}

#[derive(Debug, Clone)]
pub(crate) enum How {
    /// Not performed.
    Status { code: u16, message: String },
    /// Performed, and the connection closed without an answer.
    LoseAnswer,
    /// The connection is closed, and nothing performed.
    Refuse,
    /// Performed once the test adds a permit.
    Hold(Arc<Semaphore>),
}

/// A call with a valid token, also one that a fault ended.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub(crate) verb: &'static str,
    pub(crate) resource: String,
    /// Empty for collections.
    pub(crate) name: String,
    pub(crate) query: BTreeMap<String, String>,
    pub(crate) body: Value,
}

struct Shared {
    state: Mutex<State>,
    /// Signals every call and every change of the state.
    changed: watch::Sender<()>,
}

#[derive(Default)]
struct State {
    store: Store,
    calls: Vec<Call>,
    faults: Vec<Fault>,
    silent: bool,
    /// How many watches are open.
    watches: usize,
    watch_cuts: usize,
    log_cuts: usize,
}

/// A running stand-in. It ends when it is dropped.
pub(crate) struct Cluster {
    address: std::net::SocketAddr,
    shared: Arc<Shared>,
    _server: JoinSet<()>,
}

impl Cluster {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a loopback port is free");
        let address = listener.local_addr().expect("an address");
        let shared = Arc::new(Shared { state: Mutex::default(), changed: watch::Sender::new(()) });
        // The first version of a real one is not 0 either, which means "any".
        shared.state.lock().store.version = 1;
        let mut server = JoinSet::new();
        server.spawn(api::serve(listener, Arc::clone(&shared)));
        Self { address, shared, _server: server }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Writes a kubeconfig, and the token beside it.
    pub(crate) fn kubeconfig(&self, dir: &Path) -> PathBuf {
        let (path, token) = (dir.join("kubeconfig"), dir.join("kubernetes-token"));
        std::fs::write(&token, TOKEN).expect("it is written");
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "here",
            "clusters": [{ "name": "here", "cluster": { "server": self.url() } }],
            "users": [{ "name": "here", "user": { "tokenFile": token } }],
            "contexts": [{ "name": "here", "context": { "cluster": "here", "user": "here", "namespace": NAMESPACE } }],
        });
        std::fs::write(&path, config.to_string()).expect("it is written");
        path
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let value = change(&mut self.shared.state.lock());
        self.shared.changed.send_replace(());
        value
    }

    // What is there.

    fn objects(&self, resource: &str) -> Vec<Value> {
        let state = self.shared.state.lock();
        state
            .store
            .objects
            .iter()
            .filter(|(key, _)| key.resource == resource)
            .map(|(_, one)| one.as_ref().clone())
            .collect()
    }

    pub(crate) fn pods(&self) -> Vec<Value> {
        self.objects("pods")
    }

    pub(crate) fn secrets(&self) -> Vec<Value> {
        self.objects("secrets")
    }

    fn find_pod(&self, mut wanted: impl FnMut(&Value) -> bool) -> Option<Value> {
        let state = self.shared.state.lock();
        let mut pods = state.store.objects.iter().filter(|(key, _)| key.resource == "pods");
        pods.find(|(_, pod)| wanted(pod)).map(|(_, pod)| pod.as_ref().clone())
    }

    pub(crate) fn pod(&self, name: &str) -> Option<Value> {
        self.find_pod(|pod| pod["metadata"]["name"] == name)
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.shared.state.lock().calls.clone()
    }

    pub(crate) fn count_calls(&self, verb: &str, resource: &str) -> usize {
        self.calls().iter().filter(|call| call.verb == verb && call.resource == resource).count()
    }

    /// Resources and verbs of all calls.
    pub(crate) fn used_rights(&self) -> BTreeSet<(String, String)> {
        self.calls().into_iter().map(|call| (call.resource, call.verb.to_owned())).collect()
    }

    pub(crate) fn open_watches(&self) -> usize {
        self.shared.state.lock().watches
    }

    /// Waits until a call or a change has made it so.
    pub(crate) async fn wait_until(&self, what: &str, mut is_so: impl FnMut(&Self) -> bool) {
        let mut changed = self.shared.changed.subscribe();
        let waiting = changed.wait_for(|()| is_so(self));
        let is_over = tokio::time::timeout(TEST_TIMEOUT, waiting).await.is_err();
        let calls: Vec<_> = self.calls().into_iter().map(|one| (one.verb, one.resource, one.name)).collect();
        assert!(!is_over, "waited in vain: {what}; pods: {:#?}; calls: {calls:?}", self.pods());
    }

    pub(crate) async fn wait_for_pod(&self, mut wanted: impl FnMut(&Value) -> bool) -> Value {
        let mut found = None;
        let look = |cluster: &Self| {
            found = cluster.find_pod(&mut wanted);
            found.is_some()
        };
        self.wait_until("a pod", look).await;
        found.expect("it was waited for")
    }

    // Faults.

    pub(crate) fn fault(&self, fault: Fault) {
        self.change(|state| state.faults.push(fault));
    }

    pub(crate) fn clear_faults(&self) {
        self.change(|state| state.faults.clear());
    }

    pub(crate) fn cut_watches(&self) {
        self.change(|state| state.watch_cuts += 1);
    }

    pub(crate) fn cut_logs(&self) {
        self.change(|state| state.log_cuts += 1);
    }

    /// Watches stay open and carry nothing, until they may again.
    pub(crate) fn silence_watches(&self, is_silent: bool) {
        self.change(|state| state.silent = is_silent);
    }

    /// Refuses watches from versions before the newest, by 410.
    pub(crate) fn compact(&self) {
        self.change(|state| {
            state.store.version += 1;
            state.store.compacted = state.store.version;
        });
    }

    /// Puts the cluster's clock ahead of the host's.
    pub(crate) fn set_skew(&self, skew: SignedDuration) {
        self.change(|state| state.store.skew = skew);
    }

    /// Whether deleted pods with a grace period stay until they are let [`Self::vanish`].
    pub(crate) fn keep_deleted(&self, keeps: bool) {
        self.change(|state| state.store.keeps_deleted = keeps);
    }

    // The life of a pod.

    fn edit(&self, name: &str, edit: impl FnOnce(&mut Value, &str)) {
        self.change(|state| {
            let (key, mut pod) = find_pod(&state.store, name);
            edit(&mut pod, &state.store.stamp());
            state.store.put(&key, pod);
        });
    }

    pub(crate) fn schedule(&self, name: &str, node: &str) {
        self.edit(name, |pod, now| {
            pod["spec"]["nodeName"] = json!(node);
            set_condition(pod, ("PodScheduled", "True"), ("", ""), now);
        });
    }

    pub(crate) fn unschedulable(&self, name: &str, message: &str) {
        self.edit(name, |pod, now| set_condition(pod, ("PodScheduled", "False"), ("Unschedulable", message), now));
    }

    /// A container, maybe an init container, waits on its node.
    pub(crate) fn waiting(&self, name: &str, container: &str, reason: &str, message: &str) {
        self.edit(name, |pod, now| {
            pass_init(pod, container, now);
            set_state(pod, container, json!({ "waiting": { "reason": reason, "message": message } }));
        });
    }

    /// All containers run, and init containers have run.
    pub(crate) fn running(&self, name: &str) {
        self.edit(name, |pod, now| {
            for container in names(pod, "containers") {
                pass_init(pod, &container, now);
                set_state(pod, &container, json!({ "running": { "startedAt": now } }));
            }
            pod["status"]["phase"] = json!("Running");
            for condition in ["Initialized", "ContainersReady", "Ready"] {
                set_condition(pod, (condition, "True"), ("", ""), now);
            }
        });
    }

    /// A container ends. Its pod ends with the last one, or with an init container that fails.
    pub(crate) fn terminate(&self, name: &str, container: &str, exit_code: i32, reason: &str) {
        self.edit(name, |pod, now| {
            pass_init(pod, container, now);
            set_state(pod, container, terminated(exit_code, reason, now));
            let codes: Vec<_> = names(pod, "containers")
                .iter()
                .map(|one| container_status(pod, one).and_then(|one| one["state"]["terminated"]["exitCode"].as_i64()))
                .collect();
            let is_init = names(pod, "initContainers").iter().any(|one| one == container);
            if is_init && exit_code != 0 || codes.iter().all(Option::is_some) && codes.iter().any(|one| *one != Some(0))
            {
                pod["status"]["phase"] = json!("Failed");
            } else if codes.iter().all(Option::is_some) {
                pod["status"]["phase"] = json!("Succeeded");
            }
        });
    }

    pub(crate) fn set_status(&self, name: &str, status: Value) {
        self.edit(name, |pod, _| pod["status"] = status);
    }

    /// The pod is gone, without a deletion time before.
    pub(crate) fn vanish(&self, name: &str) {
        self.change(|state| {
            let (key, _) = find_pod(&state.store, name);
            state.store.remove(&key);
        });
    }

    pub(crate) fn log(&self, name: &str, container: &str, line: &str) {
        self.change(|state| {
            let log = (uid(&find_pod(&state.store, name).1), container.to_owned());
            let now = state.store.now();
            let lines = state.store.logs.entry(log).or_default();
            // No two lines have the same time.
            let after_last = lines.last().map_or(now, |(at, _)| *at + SignedDuration::from_nanos(1));
            lines.push((now.max(after_last), line.to_owned()));
        });
    }

    /// An Event about a pod; `kind` is `Normal` or `Warning`.
    pub(crate) fn event(&self, name: &str, kind: &str, reason: &str, message: &str) {
        self.change(|state| {
            let (key, pod) = find_pod(&state.store, name);
            let (about, now) = (&pod["metadata"], state.store.stamp());
            let event = json!({
                "metadata": { "name": format!("{name}.{}", state.store.version) }, "type": kind, "reason": reason, "message": message,
                "involvedObject": { "kind": "Pod", "apiVersion": "v1", "name": name, "namespace": about["namespace"], "uid": about["uid"] },
                "firstTimestamp": now, "lastTimestamp": now, "count": 1, "source": { "component": "kubelet" },
            });
            state.store.create(kind_of("events").expect("a kind"), &key.namespace, event).expect("it is created");
        });
    }
}

fn find_pod(store: &Store, name: &str) -> (Key, Value) {
    let found = store.objects.iter().find(|(key, _)| key.resource == "pods" && key.name == name);
    found.map(|(key, pod)| (key.clone(), pod.as_ref().clone())).unwrap_or_else(|| panic!("there is no pod {name}"))
}

fn uid(object: &Value) -> String {
    object["metadata"]["uid"].as_str().unwrap_or_default().to_owned()
}

fn set_condition(pod: &mut Value, (kind, status): (&str, &str), (reason, message): (&str, &str), now: &str) {
    let conditions = entries(&mut pod["status"]["conditions"]);
    let mut new = json!({ "type": kind, "status": status, "lastTransitionTime": now });
    if !reason.is_empty() {
        new["reason"] = json!(reason);
        new["message"] = json!(message);
    }
    match conditions.iter_mut().find(|one| one["type"] == kind) {
        Some(old) => {
            if old["status"] == status {
                new["lastTransitionTime"] = old["lastTransitionTime"].clone();
            }
            *old = new;
        }
        None => conditions.push(new),
    }
}

fn entries(list: &mut Value) -> &mut Vec<Value> {
    if list.is_null() {
        *list = json!([]);
    }
    list.as_array_mut().expect("a list")
}

fn names(pod: &Value, list: &str) -> Vec<String> {
    let containers = pod["spec"][list].as_array().into_iter().flatten();
    containers.filter_map(|one| one["name"].as_str()).map(str::to_owned).collect()
}

fn container_status<'a>(pod: &'a Value, container: &str) -> Option<&'a Value> {
    let lists = ["containerStatuses", "initContainerStatuses"];
    lists
        .iter()
        .flat_map(|list| pod["status"][list].as_array().into_iter().flatten())
        .find(|one| one["name"] == container)
}

/// The status of a container; statuses are sorted by name, as a kubelet does.
fn status_mut<'a>(pod: &'a mut Value, container: &str) -> &'a mut Value {
    let list =
        ["containers", "initContainers"].into_iter().find(|list| names(pod, list).iter().any(|one| one == container));
    let list = list.unwrap_or_else(|| panic!("the pod has no container {container}"));
    let image = pod["spec"][list].as_array().into_iter().flatten().find(|one| one["name"] == container);
    let image = image.map_or(Value::Null, |one| one["image"].clone());
    let list = if list == "containers" { "containerStatuses" } else { "initContainerStatuses" };
    let statuses = entries(&mut pod["status"][list]);
    let index = statuses.iter().position(|one| one["name"] == container).unwrap_or_else(|| {
        let at = statuses.iter().position(|one| one["name"].as_str() > Some(container)).unwrap_or(statuses.len());
        let new = json!({
            "name": container, "image": image, "imageID": "", "ready": false, "restartCount": 0, "state": {}, "lastState": {},
        });
        statuses.insert(at, new);
        at
    });
    &mut statuses[index]
}

fn set_state(pod: &mut Value, container: &str, state: Value) {
    if pod["spec"]["nodeName"].is_null() {
        panic!("the pod has no node yet: schedule it first");
    }
    let status = status_mut(pod, container);
    status["ready"] = json!(!state["running"].is_null());
    status["state"] = state;
}

fn terminated(exit_code: i32, reason: &str, now: &str) -> Value {
    json!({ "terminated": { "exitCode": exit_code, "reason": reason, "startedAt": now, "finishedAt": now } })
}

/// Before a container has a state, those before it have run: sidecars among them run on.
fn pass_init(pod: &mut Value, container: &str, now: &str) {
    let init: Vec<_> = pod["spec"]["initContainers"].as_array().into_iter().flatten().cloned().collect();
    for one in init.iter().take_while(|one| one["name"] != container) {
        let name = one["name"].as_str().unwrap_or_default();
        if one["restartPolicy"] == "Always" {
            set_state(pod, name, json!({ "running": { "startedAt": now } }));
        } else if container_status(pod, name).is_none_or(|status| status["state"]["terminated"].is_null()) {
            set_state(pod, name, terminated(0, "Completed", now));
        }
    }
    if pod["status"]["startTime"].is_null() {
        pod["status"]["startTime"] = json!(now);
    }
    let creating = if init.is_empty() { "ContainerCreating" } else { "PodInitializing" };
    for name in names(pod, "containers") {
        if container_status(pod, &name).is_none() {
            set_state(pod, &name, json!({ "waiting": { "reason": creating } }));
        }
    }
}
