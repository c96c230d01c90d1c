//! The same of a cluster, where a worker is called otherwise than it was started: what was started is a promise at first.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use serde_json::Value;

use super::real::StandIn;
use super::*;
use crate::config::pool::{KubernetesDriverConfig, KubernetesScaling};

const TOKEN: &str = "the-token";

/// Everybody, as the changes say.
#[derive(Debug, Default)]
struct ObservedWorkers {
    running: BTreeMap<String, Key>,
    pending: BTreeMap<String, Key>,
    stop_requested: BTreeSet<String>,
    exited: BTreeMap<String, (WorkerExit, bool)>,
}

impl ObservedWorkers {
    fn apply(&mut self, change: WorkerChange) {
        match change {
            WorkerChange::Discovered { id, key } => drop(self.running.insert(id, key)),
            WorkerChange::Pending { id, key } => drop(self.pending.insert(id, key)),
            WorkerChange::PendingResolved { id } => assert!(self.pending.remove(&id).is_some(), "{id} was promised"),
            WorkerChange::Exited { id, exit: end, requested: told, .. } => {
                assert!(self.running.remove(&id).is_some(), "{id} was there: {end:?}");
                self.exited.insert(id, (end, told));
            }
        }
    }

    fn keys(&self) -> BTreeSet<&str> {
        self.running.values().map(Key::as_str).collect()
    }

    async fn wait_for(&mut self, site: &mut DriverUnderTest, what: &str, like: impl Fn(&Self) -> bool) {
        let looking = async {
            while !like(self) {
                for change in site.list_changes().await {
                    self.apply(change);
                }
            }
        };
        let seen = timeout(TEST_TIMEOUT, looking).await;
        assert!(seen.is_ok(), "{what}: {self:?}");
    }

    /// Has one started, and answers with why not.
    async fn start(&mut self, site: &mut DriverUnderTest, assignment: WorkerSpec) -> Result<(), DriverError> {
        let (id, key) = (assignment.id.clone(), assignment.key.clone());
        site.handle.start(assignment);
        loop {
            match site.next_event().await {
                DriverEvent::Started(_) => {
                    self.pending.insert(id, key);
                    return Ok(());
                }
                DriverEvent::StartFailed { error: StartError::Driver(why), .. } => return Err(why),
                DriverEvent::StartFailed { error: StartError::Worker(why), .. } => return Err(DriverError(why)),
                DriverEvent::ListSlow(_) => {}
                DriverEvent::Listed(changes) => {
                    changes.expect("it can say").into_iter().for_each(|one| self.apply(one))
                }
            }
        }
    }

    /// Tells everybody to go who was not told yet.
    fn stop_all(&mut self, site: &mut DriverUnderTest) {
        for id in self.running.keys().chain(self.pending.keys()) {
            if self.stop_requested.insert(id.clone()) {
                assert!(site.handle.stop(id));
            }
        }
    }
}

fn kubernetes_pool(place: &Fixture, port: &str, scaling: KubernetesScaling) -> PoolConfig {
    let (kubeconfig, template) = (place.path().join("kubeconfig"), place.path().join("template.json"));
    std::fs::write(place.path().join("token"), TOKEN).expect("it is written");
    let config = serde_json::json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{ "name": "test", "cluster": { "server": format!("http://127.0.0.1:{port}") } }],
        "users": [{ "name": "test", "user": { "tokenFile": place.path().join("token") } }],
        "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test" } }],
    });
    std::fs::write(&kubeconfig, config.to_string()).expect("it is written");
    let pod = serde_json::json!({ "spec": { "containers": [{ "resources": { "limits": { "cpu": 1 } } }] } });
    std::fs::write(&template, pod.to_string()).expect("it is written");
    let cluster = KubernetesDriverConfig {
        kubeconfig: Some(File(kubeconfig)),
        namespace: "here".to_owned(),
        image: "worker:1".to_owned(),
        template: Some(File(template)),
        scaling,
    };
    PoolConfig { driver: PoolDriver::Kubernetes, kubernetes: Some(cluster), ..PoolConfig::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_a_cluster_are_a_driver() {
    let place = Fixture::new();
    let worker = place.path().join("worker").display().to_string();
    let (_stand_in, port) = StandIn::start("kubernetes", &[TOKEN, "/bin/sh", &worker]);
    let means = kubernetes_pool(&place, &port, KubernetesScaling::Controller);
    let (core, other) = (place.test_pool("core", means.clone()), place.test_pool("core-2", means));
    let (mut site, mut stranger, mut known) =
        (DriverUnderTest::new(&core), DriverUnderTest::new(&other), ObservedWorkers::default());
    assert_eq!(site.list_changes().await, [], "no worker runs");

    // Two of a key are two pods of one Deployment; any key can be had.
    let mut texts = vec!["lives", "lives", "", "-", "Ü/ %2d.", "a=b\u{1}\"$`\\'\n"];
    let long = "é".repeat(120);
    texts.push(&long);
    for text in &texts {
        known.start(&mut site, worker_spec(&place, text)).await.expect("it is started");
    }
    known.wait_for(&mut site, "they are up", |known| known.running.len() == 7 && known.pending.is_empty()).await;
    assert_eq!(known.keys(), texts.iter().copied().collect());
    for (id, key) in &known.running {
        wait_until_up(&place, &WorkerSpec { id: id.clone(), key: key.clone(), variables: BTreeMap::new() }).await;
    }

    // The next controller finds each, wherever it runs, and those of another pool are none of its business.
    drop(site);
    let mut site = DriverUnderTest::new(&core);
    let mut again = ObservedWorkers::default();
    again.wait_for(&mut site, "they are found", |again| again.running == known.running).await;
    assert_eq!(stranger.list_changes().await, []);

    // The requested worker exits, and no other.
    let idle = known.running.iter().find(|(_, key)| key.as_str() == "lives").map(|(id, _)| id.clone()).expect("one");
    assert!(site.handle.stop(&idle));
    known.wait_for(&mut site, "it goes", |known| known.exited.contains_key(&idle)).await;
    assert!(known.exited[&idle].1 && known.running.len() == 6 && known.pending.is_empty(), "{known:?}");
    assert_eq!(site.list_changes().await, []);

    // One that does not is killed.
    known.start(&mut site, worker_spec(&place, "stays")).await.expect("it is started");
    let stays = |known: &ObservedWorkers| {
        known.running.iter().find(|(_, key)| key.as_str() == "stays").map(|(id, _)| id.clone())
    };
    known.wait_for(&mut site, "it is up", |known| stays(known).is_some()).await;
    let id = stays(&known).expect("it is up");
    wait_until_up(&place, &WorkerSpec { id: id.clone(), key: key("stays"), variables: BTreeMap::new() }).await;
    assert!(site.handle.stop(&id));
    known.wait_for(&mut site, "it is killed", |known| known.exited.contains_key(&id)).await;
    assert!(known.exited[&id].1, "{known:?}");

    // What the cluster refuses is said; what it evicts as well, with its status and its last words.
    let Err(DriverError(why)) = known.start(&mut site, worker_spec(&place, "cannot")).await else {
        panic!("it is refused")
    };
    assert!(why.contains("exceeded quota"), "{why}");
    known.exited.clear();
    known.start(&mut site, worker_spec(&place, "dies")).await.expect("it is started");
    known.wait_for(&mut site, "it is evicted", |known| !known.exited.is_empty()).await;
    let (end, told) = known.exited.values().next().expect("one");
    assert!(end.reason.contains("exit status: 3") && end.log_tail.contains("goodbye") && !told, "{end:?}");

    // In the end there is no worker, no Deployment and no Secret.
    let ending = async {
        while !(list_objects(&port, DEPLOYMENTS).await.is_empty() && list_objects(&port, SECRETS).await.is_empty()) {
            known.stop_all(&mut site);
            for change in site.list_changes().await {
                known.apply(change);
            }
        }
    };
    assert!(timeout(TEST_TIMEOUT, ending).await.is_ok(), "{known:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn with_keda_a_group_is_a_deployment_that_it_scales_by_its_queue() {
    let place = Fixture::new();
    let (_stand_in, port) = StandIn::start("kubernetes", &[TOKEN, "/bin/true"]);
    let (two, five) = (NonZeroU32::new(2).expect("two"), NonZeroU32::new(5).expect("five"));
    let settings = kubernetes_pool(&place, &port, KubernetesScaling::Keda);
    let core = place.test_pool("core", PoolConfig { min: 1, max: five, concurrency: two, ..settings });
    let mut site = DriverUnderTest::new(&core);
    let mut group = worker_spec(&place, "a b");
    group.variables.insert("WORKER_REQUESTS_QUEUE".to_owned(), "core-req-a%20b".to_owned());
    site.start(group.clone()).await.expect("it is made");
    assert_eq!(site.list_changes().await, []);
    let scaled = list_objects(&port, SCALED_OBJECTS).await.pop().expect("one");
    let trigger = &scaled["spec"]["triggers"][0]["metadata"];
    assert_eq!((&trigger["queueName"], &trigger["value"]), (&"core-req-a%20b".into(), &"2".into()), "{scaled}");
    assert_eq!((&scaled["spec"]["minReplicaCount"], &scaled["spec"]["maxReplicaCount"]), (&1.into(), &5.into()));
    assert_eq!(scaled["spec"]["scaleTargetRef"]["name"], "jm--core--a-20b");
    drop(site);
    let mut site = DriverUnderTest::new(&core);
    assert_eq!(site.list_changes().await, [WorkerChange::Discovered { id: group.id.clone(), key: group.key.clone() }]);
    assert!(site.handle.stop(&group.id));
    site.wait_for_exit(&group.id, true).await;
    for kind in [DEPLOYMENTS, SECRETS, SCALED_OBJECTS, ("apis/keda.sh/v1alpha1", "triggerauthentications")] {
        assert_eq!(list_objects(&port, kind).await, Vec::<Value>::new());
    }
}

const DEPLOYMENTS: (&str, &str) = ("apis/apps/v1", "deployments");
const SECRETS: (&str, &str) = ("api/v1", "secrets");
const SCALED_OBJECTS: (&str, &str) = ("apis/keda.sh/v1alpha1", "scaledobjects");

/// What the stand-in has of a kind.
async fn list_objects(port: &str, (path, kind): (&str, &str)) -> Vec<Value> {
    let label = "labelSelector=app.kubernetes.io/managed-by%3Djourneyman";
    let url = format!("http://127.0.0.1:{port}/{path}/namespaces/here/{kind}?{label}");
    let answer = reqwest::Client::new().get(url).bearer_auth(TOKEN).send().await.expect("it answers");
    let list: Value = serde_json::from_slice(&answer.bytes().await.expect("all of it")).expect("JSON");
    list["items"].as_array().cloned().expect("a list")
}
