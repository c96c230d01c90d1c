//! Driver: workers as pods, one Deployment per key. Scaled by the controller (a pod is a worker) or by KEDA (the Deployment is
//! the worker).

mod manifests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, ListParams, LogParams, Patch, PatchParams, PostParams, Preconditions,
};
use serde_json::{Value, json};
use tokio::sync::Mutex;

use super::{Driver, DriverError, ListedWorker, StartError, StopMode, WorkerExit, WorkerSpec, WorkerState};
use crate::config::pool::{KubernetesDriverConfig, KubernetesScaling, PoolConfig};
use crate::config::values::File;
use crate::kubernetes::{KubernetesClient, KubernetesError, PodState, PodWatch, existing, pod_state};
use journeyman_domain::group::Key;
use journeyman_domain::limits::{DRIVER_LOG_TAIL_BYTES_MAX, KUBERNETES_CHANGE_ATTEMPTS_MAX};
use manifests::{
    CONTAINER, GROUP, GroupManifests, POOL, TEMPLATE, WORKER, deployment_name, deployments, key_of, pool_label, secrets,
};

/// Of Deployments: the start or stop that changed the number of replicas last, which makes its repetition harmless.
const LAST_CHANGE: &str = "journeyman/last-change";
const FIELD_MANAGER: &str = "journeyman";
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

    async fn deployments(&self) -> Result<Vec<DynamicObject>, KubernetesError> {
        let (api, params) =
            (self.client.objects(&deployments()).await?, ListParams::default().labels(&self.selector()));
        Ok(self.client.check("list the Deployments of pool", &self.name, api.list(&params)).await?.items)
    }

    async fn deployment(&self, name: &str) -> Result<Option<DynamicObject>, KubernetesError> {
        let api = self.client.objects(&deployments()).await?;
        existing(self.client.check("read Deployment", name, api.get(name)).await)
    }

    async fn list_pods(&self) -> Result<Vec<ListedWorker>, DriverError> {
        let mut listed = self.listed_pods.lock().await;
        let (api, params) = (self.client.api::<Pod>().await?, ListParams::default().labels(&self.selector()));
        let (now, mut found, mut live) = (Timestamp::now(), Vec::new(), BTreeMap::<String, Vec<LivePod>>::new());
        let (mut occupied, mut shown) = (BTreeSet::new(), BTreeSet::new());
        let was_listed = |name: &str| listed.as_ref().is_some_and(|listed| listed.contains(name));
        for pod in self.client.check("list the pods of pool", &self.name, api.list(&params)).await?.items {
            let Some(key) = key_of(&pod, &self.name) else { continue };
            let group = pod.labels().get(GROUP).cloned().unwrap_or_default();
            occupied.insert(group.clone());
            let name = pod.name_any();
            let state = match pod_state(&pod, CONTAINER, now) {
                // The cluster replaced a stopping pod, and thought better of it.
                PodState::Terminating if listed.is_some() && !was_listed(&name) => continue,
                PodState::Terminating => WorkerState::Stopping,
                PodState::Ended(reason) => WorkerState::Exited(self.exit_of(&api, &pod, reason, false).await),
                state @ (PodState::Ready | PodState::Waiting(_) | PodState::CannotRun(_)) => {
                    live.entry(group).or_default().push(LivePod { pod, key, state });
                    continue;
                }
            };
            shown.insert(name.clone());
            found.push(ListedWorker { id: name, key, state, detail: None });
        }
        for deployment in self.deployments().await? {
            let (Some(key), name) = (key_of(&deployment, &self.name), deployment.name_any()) else { continue };
            let (replicas, mut pods) = (replicas(&deployment), live.remove(&name).unwrap_or_default());
            if replicas == 0 && !occupied.contains(&name) {
                self.sweep(&deployment).await?;
                continue;
            }
            pods.sort_by_cached_key(|pod| (!was_listed(&pod.pod.name_any()), pod.rank()));
            let known = pods.iter().filter(|pod| was_listed(&pod.pod.name_any())).count();
            // More pods than replicas come from a rollout, or are about to be deleted. What was listed stays listed.
            let surplus = pods.split_off(known.max(replicas).min(pods.len()));
            for number in pods.len()..replicas {
                let (id, detail) = (format!("{name}{PENDING_MARK}{number}"), replica_failure(&deployment));
                found.push(ListedWorker { id, key: key.clone(), state: WorkerState::Pending, detail });
            }
            let rollout = rollout(&deployment, &pods, &surplus);
            for LivePod { pod, key, state } in pods {
                let id = pod.name_any();
                // It has ended for the controller, also while the cluster removes it.
                if !matches!(state, PodState::CannotRun(_)) {
                    shown.insert(id.clone());
                }
                let (state, detail) = match state {
                    PodState::CannotRun(reason) => {
                        (WorkerState::Exited(self.exit_of(&api, &pod, reason, true).await), None)
                    }
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
            let Some(key) = key_of(&deployment, &self.name) else { continue };
            let Some(id) = deployment.annotations().get(WORKER).cloned() else {
                // Its start did not finish.
                self.sweep(&deployment).await?;
                continue;
            };
            let status = |name: &str| deployment.data["status"][name].as_u64().unwrap_or_default();
            let (all, updated) = (status("replicas"), status("updatedReplicas"));
            let detail = (all > updated).then(|| format!("rollout: {updated} of {all} pods have the new template"));
            found.push(ListedWorker { id, key, state: WorkerState::Running, detail });
        }
        Ok(found)
    }

    /// `is_restarted`: the log of the last attempt counts, and not that of the container that waits.
    async fn exit_of(&self, api: &Api<Pod>, pod: &Pod, reason: String, is_restarted: bool) -> WorkerExit {
        let params = LogParams {
            container: Some(CONTAINER.to_owned()),
            tail_lines: Some(20),
            limit_bytes: i64::try_from(DRIVER_LOG_TAIL_BYTES_MAX).ok(),
            previous: is_restarted,
            ..LogParams::default()
        };
        let log_tail = self
            .client
            .check("read the log of pod", &pod.name_any(), api.logs(&pod.name_any(), &params))
            .await
            .unwrap_or_default();
        WorkerExit { reason, log: None, log_tail }
    }

    fn manifests(&self, spec: &WorkerSpec) -> GroupManifests {
        GroupManifests::new(&self.name, &self.pool, &self.config, &self.template, spec)
    }

    /// Creates the Deployment, or adopts it: an earlier attempt may have created it although its answer was lost.
    async fn ensure_deployment(&self, group: &GroupManifests) -> Result<DynamicObject, KubernetesError> {
        let mut result = Err(KubernetesError::Retry(String::new()));
        for _ in 0..KUBERNETES_CHANGE_ATTEMPTS_MAX {
            if let Some(deployment) = self.deployment(&group.name).await? {
                return Ok(deployment);
            }
            let (api, new) = (self.client.objects(&deployments()).await?, group.deployment());
            let params = PostParams::default();
            let create = api.create(&params, &new);
            result = self.client.check("create Deployment", &group.name, create).await;
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
        deployment: &DynamicObject,
        spec: &WorkerSpec,
    ) -> Result<(), KubernetesError> {
        self.apply(&secrets(), group, &group.secret(deployment)).await?;
        if self.config.scaling == KubernetesScaling::Keda {
            let queue = spec.variables.get("WORKER_REQUESTS_QUEUE");
            for (kind, object) in group.scaler(deployment, &self.pool, queue) {
                self.apply(&kind, group, &object).await?;
            }
        }
        Ok(())
    }

    async fn apply(&self, kind: &ApiResource, group: &GroupManifests, object: &Value) -> Result<(), KubernetesError> {
        let (api, params) = (self.client.objects(kind).await?, PatchParams::apply(FIELD_MANAGER).force());
        let (verb, patch) = (format!("apply {}", kind.kind), Patch::Apply(object));
        self.client.check(&verb, &group.name, api.patch(&group.name, &params, &patch)).await.map(drop)
    }

    /// Changes a Deployment once, whatever others change meanwhile and whether or not the API server's answers arrive.
    async fn change(&self, name: &str, id: &str, change: impl Fn(&mut DynamicObject)) -> Result<(), KubernetesError> {
        let mut result = Ok(());
        for _ in 0..KUBERNETES_CHANGE_ATTEMPTS_MAX {
            let Some(mut deployment) = self.deployment(name).await? else { return Ok(()) };
            let last = deployment.annotations_mut().insert(LAST_CHANGE.to_owned(), id.to_owned());
            if last.is_some_and(|last| last == id) {
                return Ok(());
            }
            change(&mut deployment);
            let (api, params) = (self.client.objects(&deployments()).await?, PostParams::default());
            let replace = api.replace(name, &params, &deployment);
            result = self.client.check("change Deployment", name, replace).await.map(drop);
            if !matches!(result, Err(KubernetesError::Conflict(_) | KubernetesError::Retry(_))) {
                break;
            }
        }
        result
    }

    /// Deletes a Deployment unless it has changed. The cluster deletes what belongs to it.
    async fn sweep(&self, deployment: &DynamicObject) -> Result<(), KubernetesError> {
        let unchanged = Preconditions { uid: deployment.uid(), resource_version: deployment.resource_version() };
        match self.delete_deployment(&deployment.name_any(), Some(unchanged)).await {
            Err(KubernetesError::Conflict(_)) => Ok(()),
            other => other,
        }
    }

    async fn delete_deployment(&self, name: &str, preconditions: Option<Preconditions>) -> Result<(), KubernetesError> {
        let api = self.client.objects(&deployments()).await?;
        let params = DeleteParams { preconditions, ..DeleteParams::background() };
        existing(self.client.check("delete Deployment", name, api.delete(name, &params)).await).map(drop)
    }

    async fn delete_pod(&self, id: &str, grace_seconds: u32) -> Result<(), KubernetesError> {
        let params = DeleteParams::default().grace_period(grace_seconds);
        let delete = async || {
            let api = self.client.api::<Pod>().await?;
            existing(self.client.check("delete pod", id, api.delete(id, &params)).await).map(drop)
        };
        match delete().await {
            Err(KubernetesError::Retry(_)) => delete().await,
            other => other,
        }
    }

    /// Deletes the pod before the number of replicas is reduced: the cluster would choose another one.
    async fn remove_pod(&self, id: &str, key: &Key) -> Result<(), KubernetesError> {
        let _one = self.listed_pods.lock().await;
        if !id.contains(PENDING_MARK) {
            let api = self.client.api::<Pod>().await?;
            let Some(pod) = existing(self.client.check("read pod", id, api.get(id)).await)? else {
                return Ok(());
            };
            self.delete_pod(id, grace_seconds(&self.pool)).await?;
            if matches!(pod_state(&pod, CONTAINER, Timestamp::now()), PodState::Terminating | PodState::Ended(_)) {
                // The cluster does not count it.
                return Ok(());
            }
        }
        self.change(&deployment_name(&self.name, key), id, |deployment| {
            deployment.data["spec"]["replicas"] = json!(replicas(deployment).saturating_sub(1));
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
        let created = self.pod.metadata.creation_timestamp.as_ref().map(|created| created.0);
        (self.state != PodState::Ready, created, self.pod.name_any())
    }
}

/// What a rollout waits for, if one is under way.
fn rollout(deployment: &DynamicObject, pods: &[LivePod], surplus: &[LivePod]) -> Option<String> {
    let new = deployment.annotations().get(TEMPLATE);
    let all = || pods.iter().chain(surplus);
    let updated = all().filter(|pod| pod.pod.annotations().get(TEMPLATE) == new).count();
    let waiting = surplus.iter().find_map(|pod| match &pod.state {
        PodState::Waiting(reason) | PodState::CannotRun(reason) => Some(format!("; {}: {reason}", pod.pod.name_any())),
        PodState::Ready | PodState::Terminating | PodState::Ended(_) => None,
    });
    let text = || format!("rollout: {updated} of {} pods have the new template", all().count());
    (updated < all().count()).then(|| text() + &waiting.unwrap_or_default())
}

/// Why the cluster does not create the pods, such as a quota.
fn replica_failure(deployment: &DynamicObject) -> Option<String> {
    let conditions = deployment.data["status"]["conditions"].as_array()?;
    let failure = conditions.iter().find(|one| one["type"] == "ReplicaFailure" && one["status"] == "True")?;
    failure["message"].as_str().map(str::to_owned)
}

fn replicas(deployment: &DynamicObject) -> usize {
    deployment.data["spec"]["replicas"].as_u64().and_then(|count| usize::try_from(count).ok()).unwrap_or_default()
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
        let change = |deployment: &mut DynamicObject| {
            group.update(deployment);
            match self.config.scaling {
                KubernetesScaling::Controller => {
                    deployment.data["spec"]["replicas"] = json!(replicas(deployment) + 1);
                }
                KubernetesScaling::Keda => {
                    deployment.annotations_mut().insert(WORKER.to_owned(), spec.id.clone());
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
                self.delete_deployment(&deployment_name(&self.name, &key), None).await?;
            }
        }
        Ok(())
    }

    async fn update(&self, spec: WorkerSpec) -> Result<(), DriverError> {
        let _one = self.listed_pods.lock().await;
        let group = self.manifests(&spec);
        let Some(deployment) = self.deployment(&group.name).await? else { return Ok(()) };
        if deployment.annotations().get(TEMPLATE) == Some(&group.template_hash) {
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
            | KubernetesError::Retry(_) => Self::Driver(error.into()),
        }
    }
}
