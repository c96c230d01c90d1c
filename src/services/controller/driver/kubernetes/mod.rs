//! Driver: workers as pods, one Deployment per key. Scaled by the controller (a pod is a worker) or by KEDA (the Deployment is
//! the worker).

mod manifests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

use jiff::Timestamp;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use super::{Driver, DriverError, ListedWorker, StartError, StopMode, WorkerExit, WorkerSpec, WorkerState};
use crate::controller::config::{KubernetesDriverConfig, KubernetesScaling, PoolConfig};
use journeyman_domain::group::Key;
use journeyman_domain::limits::{DRIVER_LOG_TAIL_BYTES_MAX, KUBERNETES_CHANGE_ATTEMPTS_MAX};
use journeyman_platform::kubernetes::{
    Kind, KubernetesClient, KubernetesError, PODS, Pod, PodState, PodWatch, SECRETS, existing, pod_state,
};
use journeyman_platform::settings::values::File;
use manifests::{
    CONTAINER, DEPLOYMENTS, GROUP, GroupManifests, POOL, TEMPLATE, WORKER, annotation, deployment_name, key_of,
    pool_label,
};

/// Of Deployments: the start or stop that changed the number of replicas last, which makes its repetition harmless.
const LAST_CHANGE: &str = "journeyman/last-change";
const PENDING_MARK: char = '~';

pub(super) struct KubernetesDriver {
    name: String,
    pool: PoolConfig,
    config: KubernetesDriverConfig,
    template: Value,
    client: Arc<KubernetesClient>,
    /// One list, start or stop at a time: each sees the Deployments and pods as the others leave them.
    listed_pods: Mutex<Option<BTreeSet<String>>>,
    watch: OnceLock<PodWatch>,
}

impl KubernetesDriver {
    pub(super) fn new(name: String, pool: PoolConfig, config: KubernetesDriverConfig) -> Result<Self, DriverError> {
        let template = match &config.template {
            None => json!({}),
            Some(File(path)) => {
                let unusable = |error| DriverError(format!("cannot use {} as a pod template: {error}", path.display()));
                let read = || Ok(serde_json::from_slice(&std::fs::read(path)?)?);
                read().map_err(|error: std::io::Error| unusable(error))?
            }
        };
        let kubeconfig = config.kubeconfig.as_ref().map(|File(path)| path.clone());
        let client = Arc::new(KubernetesClient::new(kubeconfig, config.namespace.clone()));
        Ok(Self { name, pool, config, template, client, listed_pods: Mutex::default(), watch: OnceLock::new() })
    }

    fn selector(&self) -> String {
        format!("{POOL}={}", pool_label(&self.name))
    }

    async fn objects<T: DeserializeOwned>(&self, kind: &Kind, what: &str) -> Result<Vec<T>, KubernetesError> {
        let selector = self.selector();
        let list = self.client.list(kind, (what, &self.name), &[("labelSelector", &selector)]).await?;
        Ok(list.items.unwrap_or_default())
    }

    async fn deployments(&self) -> Result<Vec<Value>, KubernetesError> {
        self.objects(&DEPLOYMENTS, "the Deployments of pool").await
    }

    async fn deployment(&self, name: &str) -> Result<Option<Value>, KubernetesError> {
        existing(self.client.get(&DEPLOYMENTS, name).await)
    }

    async fn list_pods(&self) -> Result<Vec<ListedWorker>, DriverError> {
        let mut listed = self.listed_pods.lock().await;
        let (now, mut found, mut live) = (Timestamp::now(), Vec::new(), BTreeMap::<String, Vec<LivePod>>::new());
        let (mut occupied, mut shown) = (BTreeSet::new(), BTreeSet::new());
        let was_listed = |name: &str| listed.as_ref().is_some_and(|listed| listed.contains(name));
        for pod in self.objects::<Pod>(&PODS, "the pods of pool").await? {
            let Some(key) = key_of(|name| pod.metadata.annotation(name), &self.name) else { continue };
            let group = pod.metadata.label(GROUP).unwrap_or_default().to_owned();
            occupied.insert(group.clone());
            let name = pod.metadata.name.clone();
            let state = match pod_state(&pod, CONTAINER, now) {
                // The cluster replaced a stopping pod, and thought better of it.
                PodState::Terminating if listed.is_some() && !was_listed(&name) => continue,
                PodState::Terminating => WorkerState::Stopping,
                PodState::Ended(reason) => WorkerState::Exited(self.exit_of(&pod, reason, false).await),
                state @ (PodState::Ready | PodState::Waiting(_) | PodState::CannotRun(_)) => {
                    live.entry(group).or_default().push(LivePod { pod, key, state });
                    continue;
                }
            };
            shown.insert(name.clone());
            found.push(ListedWorker { id: name, key, state, detail: None });
        }
        for deployment in self.deployments().await? {
            let key = key_of(|name| annotation(&deployment, name), &self.name);
            let (Some(key), name) = (key, name_of(&deployment).to_owned()) else { continue };
            let (replicas, mut pods) = (replicas(&deployment), live.remove(&name).unwrap_or_default());
            if replicas == 0 && !occupied.contains(&name) {
                self.sweep(&deployment).await?;
                continue;
            }
            pods.sort_by_cached_key(|pod| (!was_listed(&pod.pod.metadata.name), pod.rank()));
            let known = pods.iter().filter(|pod| was_listed(&pod.pod.metadata.name)).count();
            // More pods than replicas come from a rollout, or are about to be deleted. What was listed stays listed.
            let surplus = pods.split_off(known.max(replicas).min(pods.len()));
            for number in pods.len()..replicas {
                let (id, detail) = (format!("{name}{PENDING_MARK}{number}"), replica_failure(&deployment));
                found.push(ListedWorker { id, key: key.clone(), state: WorkerState::Pending, detail });
            }
            let rollout = rollout(&deployment, &pods, &surplus);
            for LivePod { pod, key, state } in pods {
                let id = pod.metadata.name.clone();
                // It has ended for the controller, also while the cluster removes it.
                if !matches!(state, PodState::CannotRun(_)) {
                    shown.insert(id.clone());
                }
                let (state, detail) = match state {
                    PodState::CannotRun(reason) => (WorkerState::Exited(self.exit_of(&pod, reason, true).await), None),
                    PodState::Waiting(reason) => (WorkerState::Pending, Some(reason)),
                    PodState::Ready | PodState::Terminating | PodState::Ended(_) => (WorkerState::Running, None),
                };
                found.push(ListedWorker { id, key, state, detail: detail.or_else(|| rollout.clone()) });
            }
        }
        *listed = Some(shown);
        Ok(found)
    }

    async fn list_groups(&self) -> Result<Vec<ListedWorker>, DriverError> {
        let _one = self.listed_pods.lock().await;
        let mut found = Vec::new();
        for deployment in self.deployments().await? {
            let Some(key) = key_of(|name| annotation(&deployment, name), &self.name) else { continue };
            let Some(id) = annotation(&deployment, WORKER).map(str::to_owned) else {
                // Its start did not finish.
                self.sweep(&deployment).await?;
                continue;
            };
            let status = |name: &str| deployment["status"][name].as_u64().unwrap_or_default();
            let (all, updated) = (status("replicas"), status("updatedReplicas"));
            let detail = (all > updated).then(|| format!("rollout: {updated} of {all} pods have the new template"));
            found.push(ListedWorker { id, key, state: WorkerState::Running, detail });
        }
        Ok(found)
    }

    /// `is_restarted`: the log of the last attempt counts, and not that of the container that waits.
    async fn exit_of(&self, pod: &Pod, reason: String, is_restarted: bool) -> WorkerExit {
        let bytes_max = DRIVER_LOG_TAIL_BYTES_MAX.to_string();
        let mut query = vec![("container", CONTAINER), ("tailLines", "20"), ("limitBytes", bytes_max.as_str())];
        if is_restarted {
            query.push(("previous", "true"));
        }
        let log_tail = self.client.log_tail(&pod.metadata.name, &query).await.unwrap_or_default();
        WorkerExit { reason, log: None, log_tail }
    }

    fn manifests(&self, spec: &WorkerSpec) -> GroupManifests {
        GroupManifests::new(&self.name, &self.pool, &self.config, &self.template, spec)
    }

    /// Creates the Deployment, or adopts it: an earlier attempt may have created it although its answer was lost.
    async fn ensure_deployment(&self, group: &GroupManifests) -> Result<Value, KubernetesError> {
        let mut result = Err(KubernetesError::Retry(String::new()));
        for _ in 0..KUBERNETES_CHANGE_ATTEMPTS_MAX {
            if let Some(deployment) = self.deployment(&group.name).await? {
                return Ok(deployment);
            }
            result = self.client.create(&DEPLOYMENTS, &group.deployment()).await;
            if !matches!(result, Err(KubernetesError::Conflict(_) | KubernetesError::Retry(_))) {
                break;
            }
        }
        result
    }

    /// May be repeated: applying an object creates or updates it.
    async fn apply_dependents(
        &self,
        group: &GroupManifests,
        deployment: &Value,
        spec: &WorkerSpec,
    ) -> Result<(), KubernetesError> {
        self.client.apply(&SECRETS, &group.name, &group.secret(deployment)).await?;
        if self.config.scaling == KubernetesScaling::Keda {
            let queue = spec.variables.get("WORKER_REQUESTS_QUEUE");
            for (kind, object) in group.scaler(deployment, &self.pool, queue) {
                self.client.apply(&kind, &group.name, &object).await?;
            }
        }
        Ok(())
    }

    /// Changes a Deployment once, whatever others change meanwhile and whether or not the API server's answers arrive.
    async fn change(&self, name: &str, id: &str, change: impl Fn(&mut Value)) -> Result<(), KubernetesError> {
        let mut result = Ok(());
        for _ in 0..KUBERNETES_CHANGE_ATTEMPTS_MAX {
            let Some(mut deployment) = self.deployment(name).await? else { return Ok(()) };
            if annotation(&deployment, LAST_CHANGE) == Some(id) {
                return Ok(());
            }
            deployment["metadata"]["annotations"][LAST_CHANGE] = json!(id);
            change(&mut deployment);
            result = self.client.replace(&DEPLOYMENTS, name, &deployment).await;
            if !matches!(result, Err(KubernetesError::Conflict(_) | KubernetesError::Retry(_))) {
                break;
            }
        }
        result
    }

    /// Deletes a Deployment unless it has changed. The cluster deletes what belongs to it.
    async fn sweep(&self, deployment: &Value) -> Result<(), KubernetesError> {
        let (uid, version) = (&deployment["metadata"]["uid"], &deployment["metadata"]["resourceVersion"]);
        let unchanged = json!({ "uid": uid, "resourceVersion": version });
        let options = json!({ "propagationPolicy": "Background", "preconditions": unchanged });
        match self.client.delete(&DEPLOYMENTS, name_of(deployment), &options).await.map(drop) {
            Err(KubernetesError::Conflict(_)) => Ok(()),
            other => other,
        }
    }

    async fn delete_pod(&self, id: &str, grace_seconds: u32) -> Result<(), KubernetesError> {
        let options = json!({ "gracePeriodSeconds": grace_seconds });
        let delete = async || self.client.delete(&PODS, id, &options).await.map(drop);
        match delete().await {
            Err(KubernetesError::Retry(_)) => delete().await,
            other => other,
        }
    }

    /// Deletes the pod before the number of replicas is reduced: the cluster would choose another one.
    async fn remove_pod(&self, id: &str, key: &Key) -> Result<(), KubernetesError> {
        let _one = self.listed_pods.lock().await;
        if !id.contains(PENDING_MARK) {
            let Some(pod) = existing(self.client.get::<Pod>(&PODS, id).await)? else { return Ok(()) };
            self.delete_pod(id, grace_seconds(&self.pool)).await?;
            if matches!(pod_state(&pod, CONTAINER, Timestamp::now()), PodState::Terminating | PodState::Ended(_)) {
                // The cluster does not count it.
                return Ok(());
            }
        }
        self.change(&deployment_name(&self.name, key), id, |deployment| {
            deployment["spec"]["replicas"] = json!(replicas(deployment).saturating_sub(1));
        })
        .await
    }
}

struct LivePod {
    pod: Pod,
    key: Key,
    state: PodState,
}

impl LivePod {
    /// Ready pods come first, and older ones.
    fn rank(&self) -> (bool, Option<Timestamp>, String) {
        (self.state != PodState::Ready, self.pod.metadata.creation_timestamp, self.pod.metadata.name.clone())
    }
}

/// What a rollout waits for, if one is under way.
fn rollout(deployment: &Value, pods: &[LivePod], surplus: &[LivePod]) -> Option<String> {
    let new = annotation(deployment, TEMPLATE);
    let all = || pods.iter().chain(surplus);
    let updated = all().filter(|pod| pod.pod.metadata.annotation(TEMPLATE) == new).count();
    let waiting = surplus.iter().find_map(|pod| match &pod.state {
        PodState::Waiting(reason) | PodState::CannotRun(reason) => {
            Some(format!("; {}: {reason}", pod.pod.metadata.name))
        }
        PodState::Ready | PodState::Terminating | PodState::Ended(_) => None,
    });
    let text = || format!("rollout: {updated} of {} pods have the new template", all().count());
    (updated < all().count()).then(|| text() + &waiting.unwrap_or_default())
}

/// Why the cluster does not create the pods, such as a quota.
fn replica_failure(deployment: &Value) -> Option<String> {
    let conditions = deployment["status"]["conditions"].as_array()?;
    let failure = conditions.iter().find(|one| one["type"] == "ReplicaFailure" && one["status"] == "True")?;
    failure["message"].as_str().map(str::to_owned)
}

fn name_of(deployment: &Value) -> &str {
    deployment["metadata"]["name"].as_str().unwrap_or_default()
}

fn replicas(deployment: &Value) -> usize {
    deployment["spec"]["replicas"].as_u64().and_then(|count| usize::try_from(count).ok()).unwrap_or_default()
}

/// Zero would kill at once.
fn grace_seconds(pool: &PoolConfig) -> u32 {
    u32::try_from(pool.termination_grace.0.as_millis().div_ceil(1000)).unwrap_or(u32::MAX).max(1)
}

impl Driver for KubernetesDriver {
    async fn list(&self) -> Result<Vec<ListedWorker>, DriverError> {
        match self.config.scaling {
            KubernetesScaling::Controller => self.list_pods().await,
            KubernetesScaling::Keda => self.list_groups().await,
        }
    }

    async fn start(&self, spec: WorkerSpec) -> Result<(), StartError> {
        let _one = self.listed_pods.lock().await;
        let group = self.manifests(&spec);
        let deployment = self.ensure_deployment(&group).await?;
        self.apply_dependents(&group, &deployment, &spec).await?;
        let change = |deployment: &mut Value| {
            group.update(deployment);
            match self.config.scaling {
                KubernetesScaling::Controller => {
                    deployment["spec"]["replicas"] = json!(replicas(deployment) + 1);
                }
                KubernetesScaling::Keda => {
                    deployment["metadata"]["annotations"][WORKER] = json!(spec.id);
                }
            }
        };
        Ok(self.change(&group.name, &spec.id, change).await?)
    }

    async fn stop(&self, id: String, key: Key, mode: StopMode) -> Result<(), DriverError> {
        match (mode, self.config.scaling) {
            (StopMode::Terminate | StopMode::Remove, KubernetesScaling::Controller) => {
                self.remove_pod(&id, &key).await?;
            }
            (StopMode::Kill, KubernetesScaling::Controller) if id.contains(PENDING_MARK) => {}
            // Zero would forget the pod while it may run.
            (StopMode::Kill, KubernetesScaling::Controller) => self.delete_pod(&id, 1).await?,
            (StopMode::Terminate | StopMode::Kill | StopMode::Remove, KubernetesScaling::Keda) => {
                let _one = self.listed_pods.lock().await;
                let (name, options) = (deployment_name(&self.name, &key), json!({ "propagationPolicy": "Background" }));
                self.client.delete(&DEPLOYMENTS, &name, &options).await?;
            }
        }
        Ok(())
    }

    async fn update(&self, spec: WorkerSpec) -> Result<(), DriverError> {
        let _one = self.listed_pods.lock().await;
        let group = self.manifests(&spec);
        let Some(deployment) = self.deployment(&group.name).await? else { return Ok(()) };
        if annotation(&deployment, TEMPLATE) == Some(group.template_hash.as_str()) {
            return Ok(());
        }
        self.apply_dependents(&group, &deployment, &spec).await?;
        tracing::info!(deployment = group.name, "the workers' configuration has changed: a rollout replaces them");
        Ok(self.change(&group.name, &group.template_hash, |deployment| group.update(deployment)).await?)
    }

    async fn changed(&self) {
        let watch = self.watch.get_or_init(|| PodWatch::start(Arc::clone(&self.client), self.selector()));
        watch.changed().await;
    }
}

impl From<KubernetesError> for DriverError {
    fn from(error: KubernetesError) -> Self {
        Self(error.to_string())
    }
}

impl From<KubernetesError> for StartError {
    fn from(error: KubernetesError) -> Self {
        match error {
            KubernetesError::Rejected(why) => Self::Worker(why),
            KubernetesError::Gone(_)
            | KubernetesError::Conflict(_)
            | KubernetesError::Denied(_)
            | KubernetesError::Unauthorized(_)
            | KubernetesError::Retry(_) => Self::Driver(error.into()),
        }
    }
}
