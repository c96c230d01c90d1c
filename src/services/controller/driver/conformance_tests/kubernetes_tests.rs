//! The same of a cluster, where a worker is called otherwise than it was started: what was started is a promise at first.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use serde_json::Value;

use super::real::StandIn;
use super::*;
use crate::controller::config::{KubernetesDriverConfig, KubernetesScaling};
use journeyman_platform::http::client::client_builder;

const TOKEN: &str = "the-token";

/// Everybody, as the changes say.
#[derive(Debug, Default)]
pub(super) struct ObservedWorkers {
    pub(super) running: BTreeMap<String, Key>,
    pub(super) pending: BTreeMap<String, Key>,
    stop_requested: BTreeSet<String>,
    pub(super) exited: BTreeMap<String, (WorkerExit, bool)>,
}

impl ObservedWorkers {
    fn apply(&mut self, change: WorkerChange) {
        match change {
            WorkerChange::Discovered { id, key } => drop(self.pending.insert(id, key)),
            WorkerChange::Exited { id, exit: end, requested: told, .. } => {
                let known = self.running.remove(&id).or_else(|| self.pending.remove(&id));
                assert!(known.is_some(), "{id} was there: {end:?}");
                self.exited.insert(id, (end, told));
            }
        }
    }

    /// Lists, and takes what has changed over.
    pub(super) async fn refresh(&mut self, site: &mut DriverUnderTest) {
        site.list_changes().await.into_iter().for_each(|change| self.apply(change));
        let worker = |id: &String| site.handle.reconciler.worker(id);
        self.pending.retain(|id, _| worker(id).is_some());
        self.running.extend(self.pending.extract_if(.., |id, _| worker(id).is_some_and(|one| one.ready_at.is_some())));
    }

    fn keys(&self) -> BTreeSet<&str> {
        self.running.values().map(Key::as_str).collect()
    }

    pub(super) async fn wait_for(&mut self, site: &mut DriverUnderTest, what: &str, like: impl Fn(&Self) -> bool) {
        let looking = async {
            while !like(self) {
                self.refresh(site).await;
            }
        };
        let seen = timeout(TEST_TIMEOUT, looking).await;
        assert!(seen.is_ok(), "{what}: {self:?}");
    }

    /// Has one started, and answers with why not.
    pub(super) async fn start(
        &mut self,
        site: &mut DriverUnderTest,
        assignment: WorkerSpec,
    ) -> Result<(), DriverError> {
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
    pub(super) fn stop_all(&mut self, site: &mut DriverUnderTest) {
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

    // There is no worker, no Deployment and no Secret at the end.
    let ending = async {
        while !(list_objects(&port, DEPLOYMENTS).await.is_empty() && list_objects(&port, SECRETS).await.is_empty()) {
            known.stop_all(&mut site);
            known.refresh(&mut site).await;
        }
    };
    let is_over = timeout(TEST_TIMEOUT, ending).await.is_ok();
    assert!(
        is_over,
        "{:?} {:?}",
        list_objects(&port, DEPLOYMENTS).await,
        list_objects(&port, ("api/v1", "pods")).await
    );
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
    let answer =
        client_builder().build().expect("a client").get(url).bearer_auth(TOKEN).send().await.expect("it answers");
    let list: Value = serde_json::from_slice(&answer.bytes().await.expect("all of it")).expect("JSON");
    list["items"].as_array().cloned().expect("a list")
}

struct Cluster {
    place: Fixture,
    port: String,
    settings: PoolConfig,
    _stand_in: StandIn,
}

impl Cluster {
    fn start(scaling: KubernetesScaling) -> Self {
        let place = Fixture::new();
        let worker = place.path().join("worker").display().to_string();
        let (stand_in, port) = StandIn::start("kubernetes", &[TOKEN, "/bin/sh", &worker]);
        let settings = kubernetes_pool(&place, &port, scaling);
        Self { place, port, settings, _stand_in: stand_in }
    }

    fn pool_of_image(&self, image: &str) -> TestPool {
        let mut settings = self.settings.clone();
        settings.kubernetes.as_mut().expect("a cluster").image = image.to_owned();
        self.place.test_pool("core", settings)
    }

    /// The next call of this verb on this resource: `lose` loses its answer, `conflict` changes the object before, a number
    /// is its status.
    async fn fail(&self, verb: &str, resource: &str, how: impl Into<Value>) {
        let faults = serde_json::json!([{ "verb": verb, "resource": resource, "do": how.into() }]);
        let url = format!("http://127.0.0.1:{}/faults", self.port);
        let call = client_builder().build().expect("a client").post(url).bearer_auth(TOKEN).body(faults.to_string());
        call.send().await.and_then(reqwest::Response::error_for_status).expect("it is told");
    }

    /// The verbs that were used on each resource of a group.
    async fn calls(&self) -> BTreeSet<(String, String, String)> {
        let url = format!("http://127.0.0.1:{}/calls", self.port);
        let answer =
            client_builder().build().expect("a client").get(url).bearer_auth(TOKEN).send().await.expect("it answers");
        serde_json::from_slice(&answer.bytes().await.expect("all of it")).expect("JSON")
    }
}

fn is_up(key: &str) -> impl Fn(&ObservedWorkers) -> bool {
    move |known| known.pending.is_empty() && known.running.values().filter(|one| one.as_str() == key).count() == 1
}

#[tokio::test(flavor = "multi_thread")]
async fn a3_a_pod_that_cannot_run_counts_as_failed_with_its_reason_and_is_removed() {
    let cluster = Cluster::start(KubernetesScaling::Controller);
    let (mut site, mut known) = (DriverUnderTest::new(&cluster.pool_of_image("missing")), ObservedWorkers::default());
    known.start(&mut site, worker_spec(&cluster.place, "lives")).await.expect("it is started");
    known.wait_for(&mut site, "it fails", |known| !known.exited.is_empty()).await;
    let (exit, requested) = known.exited.values().next().expect("one");
    assert_eq!((exit.reason.as_str(), *requested), ("ImagePullBackOff: no such image", false));
    let removing = async {
        while !list_objects(&cluster.port, ("api/v1", "pods")).await.is_empty() {
            site.list_changes().await;
        }
    };
    timeout(TEST_TIMEOUT, removing).await.expect("the controller decides when the next one is started");
}

#[tokio::test(flavor = "multi_thread")]
async fn a4_the_chosen_pod_gets_a_term_and_its_grace_and_no_other_pod_is_stopped() {
    let cluster = Cluster::start(KubernetesScaling::Controller);
    let core = cluster.pool_of_image("worker:1").with_long_grace();
    let (mut site, mut known) = (DriverUnderTest::new(&core), ObservedWorkers::default());
    known.start(&mut site, worker_spec(&cluster.place, "lives")).await.expect("it is started");
    known.wait_for(&mut site, "it is up", is_up("lives")).await;
    let oldest = known.running.keys().next().expect("one").clone();
    for _ in 0..2 {
        known.start(&mut site, worker_spec(&cluster.place, "lives")).await.expect("it is started");
    }
    known.wait_for(&mut site, "they are up", |known| known.running.len() == 3 && known.pending.is_empty()).await;
    for id in known.running.keys() {
        wait_until_up(&cluster.place, &WorkerSpec { id: id.clone(), key: key("lives"), variables: BTreeMap::new() })
            .await;
    }
    assert!(site.handle.stop(&oldest));
    known.wait_for(&mut site, "it goes", |known| !known.exited.is_empty()).await;
    let gone: Vec<_> = known.exited.iter().map(|(id, (_, requested))| (id.as_str(), *requested)).collect();
    assert_eq!(gone, [(oldest.as_str(), true)], "it obeys its TERM within a grace that is longer than this test");
    for _ in 0..5 {
        assert_eq!(site.list_changes().await, [], "the others stay, and none is added");
    }
    let pod = list_objects(&cluster.port, ("api/v1", "pods")).await.pop().expect("one");
    assert_eq!(pod["spec"]["terminationGracePeriodSeconds"], TEST_TIMEOUT.as_secs(), "a6: as the driver's own");
}

#[tokio::test(flavor = "multi_thread")]
async fn a5_a_lost_answer_or_a_conflict_costs_no_pod_and_makes_none_too_many() {
    let cluster = Cluster::start(KubernetesScaling::Controller);
    let core = cluster.pool_of_image("worker:1");
    let (mut site, mut known) = (DriverUnderTest::new(&core), ObservedWorkers::default());
    let faults: [(&str, &str, Value); 7] = [
        ("create", "deployments", "lose".into()),
        ("create", "deployments", 503.into()),
        ("patch", "secrets", "lose".into()),
        ("patch", "secrets", 500.into()),
        ("update", "deployments", "lose".into()),
        ("update", "deployments", "conflict".into()),
        ("update", "deployments", 503.into()),
    ];
    for (number, (verb, resource, how)) in faults.into_iter().enumerate() {
        let text = format!("lives{number}");
        cluster.fail(verb, resource, how.clone()).await;
        while let Err(why) = known.start(&mut site, worker_spec(&cluster.place, &text)).await {
            assert!(why.0.contains("Secret"), "everything else is repeated at once: {why:?}");
        }
        known.wait_for(&mut site, &format!("{verb} {resource} {how}"), is_up(&text)).await;
        assert_eq!(site.list_changes().await, []);
    }
    // The stop of a pod as well.
    let id = known.running.keys().next().expect("one").clone();
    cluster.fail("update", "deployments", "lose").await;
    cluster.fail("delete", "pods", "lose").await;
    assert!(site.handle.stop(&id));
    known.wait_for(&mut site, "it goes", |known| known.exited.contains_key(&id)).await;
    for _ in 0..5 {
        known.wait_for(&mut site, "nothing replaces it", |known| known.pending.is_empty()).await;
    }
    assert_eq!(known.running.len(), 6, "{known:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a5_a_new_image_or_password_reaches_existing_deployments_and_the_status_says_so() {
    let cluster = Cluster::start(KubernetesScaling::Controller);
    let core = cluster.pool_of_image("worker:1");
    let (mut site, mut known) = (DriverUnderTest::new(&core), ObservedWorkers::default());
    let mut spec = worker_spec(&cluster.place, "lives");
    known.start(&mut site, spec.clone()).await.expect("it is started");
    known.wait_for(&mut site, "it is up", is_up("lives")).await;

    // The same configuration changes nothing.
    let pods = async || list_objects(&cluster.port, ("api/v1", "pods")).await;
    let before = pods().await;
    let mut site = site.restart(&core).await;
    site.handle.update(spec.clone());
    for _ in 0..3 {
        known.refresh(&mut site).await;
    }
    assert_eq!(pods().await[0]["metadata"]["name"], before[0]["metadata"]["name"]);

    // An image that cannot be pulled keeps the old pod, and the reason is in the status.
    let mut site = site.restart(&cluster.pool_of_image("missing")).await;
    site.handle.update(spec.clone());
    let old = known.running.keys().next().expect("one").clone();
    let said = async {
        loop {
            known.refresh(&mut site).await;
            let detail = site.handle.reconciler.worker(&old).and_then(|worker| worker.detail.clone());
            if detail.is_some_and(|text| text.contains("rollout: 1 of 2") && text.contains("ImagePullBackOff: no such"))
            {
                break;
            }
        }
    };
    timeout(TEST_TIMEOUT, said).await.expect("the rollout is shown");
    assert_eq!((known.running.len(), known.exited.len()), (1, 0), "{known:?}");

    // A good image and a new password replace it.
    let mut site = site.restart(&cluster.pool_of_image("worker:2")).await;
    spec.variables.insert("WORKER_KEY".to_owned(), "lives with a new password".to_owned());
    site.handle.update(spec.clone());
    known.wait_for(&mut site, "it is replaced", |known| known.exited.contains_key(&old)).await;
    known.wait_for(&mut site, "the new one is up", is_up("lives")).await;
    assert!(known.exited.values().all(|(_, requested)| *requested), "no worker has failed: {known:?}");
    let new = WorkerSpec {
        id: known.running.keys().next().expect("one").clone(),
        key: key("lives with a new password"),
        variables: BTreeMap::new(),
    };
    wait_until_up(&cluster.place, &new).await;
    assert_eq!(pods().await[0]["spec"]["containers"][0]["image"], "worker:2");
}

#[tokio::test(flavor = "multi_thread")]
async fn c9_an_api_server_that_refuses_fails_no_worker_and_is_left_alone_for_as_long_as_it_asks() {
    let cluster = Cluster::start(KubernetesScaling::Controller);
    let mut site = DriverUnderTest::new(&cluster.pool_of_image("worker:1"));
    assert_eq!(site.list_changes().await, []);
    // Credentials that were good before are read again once.
    cluster.fail("get", "deployments", 401).await;
    for (status, is_driver) in [(401, true), (403, true), (503, true), (422, false)] {
        let verb = if is_driver { "get" } else { "create" };
        cluster.fail(verb, "deployments", status).await;
        site.handle.start(worker_spec(&cluster.place, "lives"));
        let error = loop {
            match site.next_event().await {
                DriverEvent::StartFailed { error, .. } => break error,
                DriverEvent::Listed(_) | DriverEvent::ListSlow(_) => {}
                DriverEvent::Started(id) => panic!("{id} was refused with {status}"),
            }
        };
        assert_eq!(matches!(error, StartError::Driver(_)), is_driver, "{status}: {error:?}");
    }
    cluster.fail("list", "pods", 429).await;
    let mut errors = Vec::new();
    while errors.len() < 2 {
        site.request_list();
        match site.next_event().await {
            DriverEvent::Listed(Err(DriverError(why))) => errors.push(why),
            DriverEvent::Listed(Ok(_)) | DriverEvent::ListSlow(_) => {}
            other @ (DriverEvent::Started(_) | DriverEvent::StartFailed { .. }) => panic!("{other:?}"),
        }
    }
    assert!(errors[0].contains("429") && errors[1].contains("asked to wait"), "{errors:?}");
}

/// The verbs of the Role in examples/.
pub(super) const ROLE: &str = include_str!("../../../../../examples/kubernetes/controller-role.yaml");

fn role_verbs() -> BTreeSet<(String, String, String)> {
    let list = |text: &str| serde_json::from_str::<Vec<String>>(text).expect("a list as in JSON");
    let (mut groups, mut resources, mut all) = (Vec::new(), Vec::new(), BTreeSet::new());
    for line in ROLE.lines().map(|line| line.trim_start_matches([' ', '-'])) {
        match line.split_once(": ") {
            Some(("apiGroups", text)) => groups = list(text),
            Some(("resources", text)) => resources = list(text),
            Some(("verbs", text)) => {
                let verbs = list(text);
                all.extend(
                    resources
                        .iter()
                        .flat_map(|of| verbs.iter().map(|verb| (verb.clone(), groups[0].clone(), of.clone()))),
                );
            }
            Some(_) | None => {}
        }
    }
    all
}

#[tokio::test(flavor = "multi_thread")]
async fn c14_the_role_holds_exactly_what_the_driver_calls() {
    let mut calls = BTreeSet::new();
    for scaling in [KubernetesScaling::Controller, KubernetesScaling::Keda] {
        let cluster = Cluster::start(scaling);
        let core = cluster.pool_of_image("worker:1");
        let (mut site, mut known) = (DriverUnderTest::new(&core), ObservedWorkers::default());
        let spec = worker_spec(&cluster.place, "lives");
        if scaling == KubernetesScaling::Keda {
            site.start(spec.clone()).await.expect("it is made");
            assert!(site.handle.stop(&spec.id));
        } else {
            known.start(&mut site, spec).await.expect("it is started");
            known.wait_for(&mut site, "it is up", is_up("lives")).await;
            known.start(&mut site, worker_spec(&cluster.place, "dies")).await.expect("it is started");
            known.wait_for(&mut site, "it fails", |known| !known.exited.is_empty()).await;
        }
        let ending = async {
            while !list_objects(&cluster.port, DEPLOYMENTS).await.is_empty() {
                if scaling == KubernetesScaling::Controller {
                    known.refresh(&mut site).await;
                    known.stop_all(&mut site);
                } else {
                    site.list_changes().await;
                }
            }
        };
        timeout(TEST_TIMEOUT, ending).await.expect("all are gone");
        calls.extend(cluster.calls().await.into_iter().map(|(verb, group, resource)| {
            let group =
                group.trim_start_matches("apis/").trim_start_matches("api").rsplit_once('/').unwrap_or_default().0;
            (verb, group.to_owned(), resource)
        }));
    }
    assert_eq!(calls, role_verbs());
}
