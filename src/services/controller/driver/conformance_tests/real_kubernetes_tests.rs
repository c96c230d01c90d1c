//! The same with a real API server and controller manager, if `JOURNEYMAN_TEST_KUBERNETES` is the kubeconfig of an
//! administrator. The test plays the kubelet of a node, and the driver has no more rights than the Role of examples/.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use reqwest::Method;
use serde_json::{Value, json};

use super::kubernetes_tests::{ObservedWorkers, ROLE};
use super::*;
use crate::controller::config::{KubernetesDriverConfig, KubernetesScaling};
use journeyman_platform::kubernetes::{KubernetesClient, KubernetesError, parse_yaml};

const DRIVER_USER: &str = "journeyman-test";
const JSON: &str = "application/json";

/// Runs pods as a kubelet does, without running anything.
async fn kubelet(client: Arc<KubernetesClient>, pods: String, terminated: Arc<Mutex<BTreeSet<String>>>) {
    loop {
        let list = client.request(Method::GET, &pods, JSON, &Value::Null).await.unwrap_or_default();
        for pod in list["items"].as_array().into_iter().flatten() {
            run_pod(&client, &pods, pod, &terminated).await.ok();
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn run_pod(
    client: &KubernetesClient,
    pods: &str,
    pod: &Value,
    terminated: &Mutex<BTreeSet<String>>,
) -> Result<(), KubernetesError> {
    let name = pod["metadata"]["name"].as_str().expect("a name");
    let path = format!("{pods}/{name}");
    if pod["spec"]["nodeName"].is_null() {
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": { "name": name },
            "target": { "apiVersion": "v1", "kind": "Node", "name": "node-a" },
        });
        return client.request(Method::POST, &format!("{path}/binding"), JSON, &binding).await.map(drop);
    }
    if !pod["metadata"]["deletionTimestamp"].is_null() {
        terminated.lock().insert(name.to_owned());
        return client.request(Method::DELETE, &path, JSON, &json!({ "gracePeriodSeconds": 0 })).await.map(drop);
    }
    let containers = pod["spec"]["containers"].as_array().expect("containers");
    let image = containers.iter().find(|one| one["name"] == "worker").map(|one| one["image"].clone());
    let is_missing = image.as_ref().is_some_and(|image| image == "missing");
    let state = if is_missing {
        json!({ "waiting": { "reason": "ImagePullBackOff", "message": "no such image" } })
    } else {
        json!({ "running": { "startedAt": "2026-01-01T00:00:00Z" } })
    };
    let container = json!({ "name": "worker", "image": image, "imageID": "", "ready": !is_missing, "restartCount": 0, "state": state });
    let (phase, ready) = if is_missing { ("Pending", "False") } else { ("Running", "True") };
    let status = json!({ "status": {
        "phase": phase, "conditions": [{ "type": "Ready", "status": ready }], "containerStatuses": [container],
    } });
    if pod["status"]["containerStatuses"].is_null() {
        let strategic = "application/strategic-merge-patch+json";
        client.request(Method::PATCH, &format!("{path}/status"), strategic, &status).await?;
    }
    Ok(())
}

struct RealCluster {
    client: Arc<KubernetesClient>,
    namespace: String,
    kubeconfig: PathBuf,
    terminated: Arc<Mutex<BTreeSet<String>>>,
    _kubelet: JoinSet<()>,
}

impl RealCluster {
    async fn start() -> Option<Self> {
        let Some(path) = std::env::var_os("JOURNEYMAN_TEST_KUBERNETES").map(PathBuf::from) else {
            eprintln!("NOT TESTED: JOURNEYMAN_TEST_KUBERNETES is not set to a kubeconfig");
            return None;
        };
        let text = std::fs::read_to_string(&path).expect("a kubeconfig");
        let mut kubeconfig = parse_yaml(&text).expect("a kubeconfig");
        for user in kubeconfig["users"].as_array_mut().expect("users") {
            user["user"]["as"] = json!(DRIVER_USER);
        }
        // Beside the other one, for paths in it.
        let own = path.with_extension("journeyman-test");
        std::fs::write(&own, kubeconfig.to_string()).expect("it is written");
        let namespace = format!("jm-{}", uuid::Uuid::new_v4().simple());
        let client = Arc::new(KubernetesClient::new(Some(path), namespace.clone()));
        let rbac = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}");
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": { "name": "driver" },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "journeyman-controller" },
            "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": DRIVER_USER }],
        });
        let objects = [
            (
                "/api/v1/namespaces".to_owned(),
                json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": namespace } }),
            ),
            (format!("{rbac}/roles"), parse_yaml(ROLE).expect("a role")),
            (format!("{rbac}/rolebindings"), binding),
        ];
        for (path, object) in objects {
            client.request(Method::POST, &path, JSON, &object).await.expect("it is created");
        }
        let (pods, terminated) = (format!("/api/v1/namespaces/{namespace}/pods"), Arc::default());
        let mut node = JoinSet::new();
        node.spawn(kubelet(Arc::clone(&client), pods, Arc::clone(&terminated)));
        Some(Self { client, namespace, kubeconfig: own, terminated, _kubelet: node })
    }

    fn pool(&self, place: &Fixture, image: &str) -> TestPool {
        let kubernetes = KubernetesDriverConfig {
            kubeconfig: Some(File(self.kubeconfig.clone())),
            namespace: self.namespace.clone(),
            image: image.to_owned(),
            template: None,
            scaling: KubernetesScaling::Controller,
        };
        let settings =
            PoolConfig { driver: PoolDriver::Kubernetes, kubernetes: Some(kubernetes), ..PoolConfig::default() };
        place.test_pool("core", settings).with_long_grace()
    }

    async fn count(&self, path: &str) -> usize {
        let path = path.replace("NAMESPACE", &self.namespace);
        let list = self.client.request(Method::GET, &path, JSON, &Value::Null).await.expect("a list");
        list["items"].as_array().expect("items").len()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a3_a4_a5_pods_of_a_real_cluster_are_a_driver() {
    let place = Fixture::new();
    let Some(cluster) = RealCluster::start().await else { return };
    let core = cluster.pool(&place, "worker:1");
    let (mut site, mut known) = (DriverUnderTest::new(&core), ObservedWorkers::default());
    let all_up = |count| move |known: &ObservedWorkers| known.running.len() == count && known.pending.is_empty();
    known.start(&mut site, worker_spec(&place, "a")).await.expect("it is started");
    known.wait_for(&mut site, "it is up", all_up(1)).await;
    let oldest = known.running.keys().next().expect("one").clone();
    for _ in 0..2 {
        known.start(&mut site, worker_spec(&place, "a")).await.expect("it is started");
    }
    known.wait_for(&mut site, "they are up", all_up(3)).await;

    // A4: the chosen pod, and no other.
    assert!(site.handle.stop(&oldest));
    known.wait_for(&mut site, "it goes", |known| known.exited.contains_key(&oldest)).await;
    known.wait_for(&mut site, "nothing replaces it", all_up(2)).await;
    assert!(known.exited.len() == 1 && cluster.terminated.lock().contains(&oldest), "{known:?}");

    // A5: a new image and variable by a rollout.
    let mut site = site.restart(&cluster.pool(&place, "worker:2")).await;
    let mut spec = worker_spec(&place, "a");
    spec.variables.insert("NEW".to_owned(), "1".to_owned());
    site.handle.update(spec);
    let before: BTreeSet<String> = known.running.keys().cloned().collect();
    known.wait_for(&mut site, "they are replaced", |known| before.iter().all(|id| known.exited.contains_key(id))).await;
    known.wait_for(&mut site, "the new ones are up", all_up(2)).await;
    assert!(known.exited.values().all(|(_, requested)| *requested), "no worker has failed: {known:?}");

    // A3: 30 seconds after its creation.
    let mut site = site.restart(&cluster.pool(&place, "missing")).await;
    known.start(&mut site, worker_spec(&place, "b")).await.expect("it is started");
    let failed =
        |known: &ObservedWorkers| known.exited.values().any(|(exit, _)| exit.reason.contains("ImagePullBackOff"));
    known.wait_for(&mut site, "it fails", failed).await;

    // The cluster deletes the Secrets with their Deployments.
    let ending = async {
        let path = "/apis/apps/v1/namespaces/NAMESPACE/deployments";
        while cluster.count(path).await + cluster.count("/api/v1/namespaces/NAMESPACE/secrets").await > 0 {
            known.stop_all(&mut site);
            known.refresh(&mut site).await;
        }
    };
    assert!(timeout(TEST_TIMEOUT, ending).await.is_ok(), "{known:?}");
}
