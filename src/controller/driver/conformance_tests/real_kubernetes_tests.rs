//! The same with a real API server and controller manager, if `JOURNEYMAN_TEST_KUBERNETES` is the kubeconfig of an
//! administrator. The test plays the kubelet of a node, and the driver has no more rights than the Role of examples/.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, ResourceExt as _};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::kubernetes_tests::{ObservedWorkers, ROLE};
use super::*;
use crate::config::pool::{KubernetesDriverConfig, KubernetesScaling};
use journeyman_platform::host::crypto_provider::install_crypto_provider;

const DRIVER_USER: &str = "journeyman-test";

/// Runs pods as a kubelet does, without running anything.
async fn kubelet(pods: Api<Pod>, terminated: Arc<Mutex<BTreeSet<String>>>) {
    loop {
        for pod in pods.list(&ListParams::default()).await.map(|list| list.items).unwrap_or_default() {
            run_pod(&pods, &pod, &terminated).await.ok();
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn run_pod(pods: &Api<Pod>, pod: &Pod, terminated: &Mutex<BTreeSet<String>>) -> kube::Result<()> {
    let name = pod.name_any();
    let spec = pod.spec.as_ref().expect("a spec");
    if spec.node_name.is_none() {
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": { "name": name },
            "target": { "apiVersion": "v1", "kind": "Node", "name": "node-a" },
        });
        let params = PostParams::default();
        return pods.create_subresource::<_, Value>("binding", &name, &params, &binding).await.map(drop);
    }
    if pod.metadata.deletion_timestamp.is_some() {
        terminated.lock().insert(name.clone());
        return pods.delete(&name, &DeleteParams::default().grace_period(0)).await.map(drop);
    }
    let image = spec.containers.iter().find(|one| one.name == "worker").and_then(|one| one.image.clone());
    let is_missing = image.as_deref() == Some("missing");
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
    if pod.status.as_ref().and_then(|status| status.container_statuses.as_ref()).is_none() {
        pods.patch_status(&name, &PatchParams::default(), &Patch::Strategic(&status)).await?;
    }
    Ok(())
}

struct RealCluster {
    client: Client,
    namespace: String,
    kubeconfig: PathBuf,
    terminated: Arc<Mutex<BTreeSet<String>>>,
    _kubelet: JoinSet<()>,
}

impl RealCluster {
    async fn start(place: &Fixture) -> Option<Self> {
        let Some(path) = std::env::var_os("JOURNEYMAN_TEST_KUBERNETES") else {
            eprintln!("skipped: JOURNEYMAN_TEST_KUBERNETES is not set to a kubeconfig");
            return None;
        };
        install_crypto_provider();
        let mut kubeconfig = Kubeconfig::read_from(path).expect("a kubeconfig");
        let config = Config::from_custom_kubeconfig(kubeconfig.clone(), &KubeConfigOptions::default()).await;
        let client = Client::try_from(config.expect("a configuration")).expect("a client");
        for user in kubeconfig.auth_infos.iter_mut().filter_map(|user| user.auth_info.as_mut()) {
            user.impersonate = Some(DRIVER_USER.to_owned());
        }
        let path = place.path().join("driver.conf");
        std::fs::write(&path, serde_json::to_vec(&kubeconfig).expect("JSON")).expect("it is written");
        let namespace = format!("jm-{}", uuid::Uuid::new_v4().simple());
        let rbac = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}");
        let own = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": namespace } });
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": { "name": "driver" },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "journeyman-controller" },
            "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": DRIVER_USER }],
        });
        let objects = [
            ("/api/v1/namespaces".to_owned(), own.to_string()),
            (format!("{rbac}/roles"), ROLE.to_owned()),
            (format!("{rbac}/rolebindings"), binding.to_string()),
        ];
        for (path, object) in objects {
            let request =
                hyper::Request::post(path).header("content-type", "application/yaml").body(object.into_bytes());
            client.request_text(request.expect("a request")).await.expect("it is created");
        }
        let (pods, terminated) = (Api::namespaced(client.clone(), &namespace), Arc::default());
        let mut node = JoinSet::new();
        node.spawn(kubelet(pods, Arc::clone(&terminated)));
        Some(Self { client, namespace, kubeconfig: path, terminated, _kubelet: node })
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
        let request = hyper::Request::get(path.replace("NAMESPACE", &self.namespace)).body(Vec::new());
        let list: Value = self.client.request(request.expect("a request")).await.expect("a list");
        list["items"].as_array().expect("items").len()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a3_a4_a5_pods_of_a_real_cluster_are_a_driver() {
    let place = Fixture::new();
    let Some(cluster) = RealCluster::start(&place).await else { return };
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
