//! Driver: workers as pods, one Deployment per key. Scaled by the controller (a pod is a worker) or by KEDA (the Deployment is
//! the worker).

mod api;
mod manifests;

use std::collections::BTreeMap;

use serde_json::{Value, json};
use tokio::sync::Mutex;

use super::{Driver, DriverError, ListedWorker, StartError, StopMode, WorkerExit, WorkerSpec, WorkerState};
use crate::config::pool::{KubernetesDriverConfig, KubernetesScaling, PoolConfig};
use crate::config::values::File;
use crate::domain::group::Key;
use api::{DEPLOYMENTS, KubernetesApi, PODS, SCALED_OBJECTS, SECRETS, TRIGGER_AUTHENTICATIONS};
use manifests::{GROUP, GroupManifests, POOL, WORKER, deployment_name, key_of, name_of, pool_label};

const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";

pub(super) struct KubernetesDriver {
    name: String,
    pool: PoolConfig,
    cluster: KubernetesDriverConfig,
    template: Value,
    api: KubernetesApi,
    write_lock: Mutex<()>,
}

impl KubernetesDriver {
    pub(super) fn new(name: String, pool: PoolConfig, cluster: KubernetesDriverConfig) -> Result<Self, DriverError> {
        let template = match &cluster.template {
            None => json!({}),
            Some(File(path)) => {
                let unusable = |error| DriverError(format!("cannot use {} as a pod template: {error}", path.display()));
                let read = || Ok(serde_json::from_slice(&std::fs::read(path)?)?);
                read().map_err(|error: std::io::Error| unusable(error))?
            }
        };
        let api = KubernetesApi::new(&cluster)?;
        Ok(Self { name, pool, cluster, template, api, write_lock: Mutex::new(()) })
    }

    async fn list_pods(&self) -> Result<Vec<ListedWorker>, DriverError> {
        let (mut found, mut live) = (Vec::new(), BTreeMap::<String, u64>::new());
        for pod in self.api.list(PODS, POOL, &pool_label(&self.name)).await? {
            let (Some(key), Some(name)) = (key_of(&pod, &self.name), name_of(&pod)) else { continue };
            let goes = !pod["metadata"]["deletionTimestamp"].is_null();
            let standing = match pod["status"]["phase"].as_str() {
                _ if goes => WorkerState::Stopping,
                Some("Failed" | "Succeeded") => WorkerState::Exited(self.exit_of(name, &pod).await),
                Some(_) | None => WorkerState::Running,
            };
            if standing == WorkerState::Running
                && let Some(group) = pod["metadata"]["labels"][GROUP].as_str()
            {
                *live.entry(group.to_owned()).or_default() += 1;
            }
            found.push(ListedWorker { id: name.to_owned(), key, state: standing });
        }
        for deployment in self.list_deployments().await? {
            let (Some(key), Some(name)) = (key_of(&deployment, &self.name), name_of(&deployment)) else { continue };
            let there = live.get(name).copied().unwrap_or_default();
            for number in there..replicas(&deployment) {
                let id = format!("{name}{PENDING_MARK}{number}");
                found.push(ListedWorker { id, key: key.clone(), state: WorkerState::Pending });
            }
        }
        Ok(found)
    }

    async fn list_deployments(&self) -> Result<Vec<Value>, DriverError> {
        self.api.list(DEPLOYMENTS, POOL, &pool_label(&self.name)).await
    }

    async fn exit_of(&self, name: &str, pod: &Value) -> WorkerExit {
        let state = &pod["status"]["containerStatuses"][0]["state"]["terminated"];
        let reason = [&state["reason"], &pod["status"]["reason"]].into_iter().find_map(Value::as_str);
        let how = match (state["exitCode"].as_i64(), reason) {
            (Some(code), Some(reason)) => format!("exit status: {code} ({reason})"),
            (Some(code), None) => format!("exit status: {code}"),
            (None, reason) => reason.unwrap_or("the pod has ended").to_owned(),
        };
        WorkerExit { reason: how, log: None, log_tail: self.api.log_tail(name).await }
    }

    async fn create_group(&self, new: &GroupManifests<'_>) -> Result<(), DriverError> {
        self.api.create(SECRETS, &new.secret()).await?;
        let deployment = match self.api.create(DEPLOYMENTS, &new.deployment()).await {
            Ok(deployment) => deployment,
            Err(why) => {
                // A leftover Secret is overwritten by the next start.
                self.api.delete(SECRETS, &new.secret_name(), &json!({})).await.ok();
                return Err(why);
            }
        };
        // Owner references delete the rest together with the Deployment.
        let owner = json!({ "metadata": { "ownerReferences": [{
            "apiVersion": "apps/v1", "kind": "Deployment", "name": new.deployment_name(), "uid": deployment["metadata"]["uid"],
        }] } });
        self.api.patch(SECRETS, &new.secret_name(), &owner).await?;
        if self.cluster.scaling == KubernetesScaling::Keda {
            let objects =
                [(TRIGGER_AUTHENTICATIONS, new.trigger_authentication()), (SCALED_OBJECTS, new.scaled_object())];
            for (kind, mut object) in objects {
                object["metadata"]["ownerReferences"] = owner["metadata"]["ownerReferences"].clone();
                if let Err(why) = self.api.create(kind, &object).await {
                    self.delete_group(&new.deployment_name()).await.ok();
                    return Err(why);
                }
            }
        }
        Ok(())
    }

    async fn delete_group(&self, group: &str) -> Result<(), DriverError> {
        self.api.delete(DEPLOYMENTS, group, &json!({ "propagationPolicy": "Background" })).await
    }

    async fn resize(&self, deployment: &Value, replicas: u64) -> Result<(), DriverError> {
        let Some(name) = name_of(deployment) else { return Ok(()) };
        let version = &deployment["metadata"]["resourceVersion"];
        let change = json!({ "metadata": { "resourceVersion": version }, "spec": { "replicas": replicas } });
        let resized = self.api.patch(DEPLOYMENTS, name, &change).await?;
        resized.map(drop).ok_or_else(|| DriverError(format!("Deployment {name} was not found")))
    }

    async fn remove_pod(&self, id: &str, key: &Key) -> Result<(), DriverError> {
        let _one = self.write_lock.lock().await;
        let group = deployment_name(&self.name, key);
        let Some(deployment) = self.api.get(DEPLOYMENTS, &group).await? else { return Ok(()) };
        let replicas = replicas(&deployment);
        if replicas <= 1 {
            return self.delete_group(&group).await;
        }
        if !id.contains(PENDING_MARK) {
            let first = json!({ "metadata": { "annotations": { DELETION_COST: "-1000" } } });
            self.api.patch(PODS, id, &first).await?;
        }
        self.resize(&deployment, replicas - 1).await
    }
}

const PENDING_MARK: char = '~';

fn replicas(deployment: &Value) -> u64 {
    deployment["spec"]["replicas"].as_u64().unwrap_or_default()
}

impl Driver for KubernetesDriver {
    async fn list(&self) -> Result<Vec<ListedWorker>, DriverError> {
        match self.cluster.scaling {
            KubernetesScaling::Controller => self.list_pods().await,
            KubernetesScaling::Keda => {
                let deployments = self.list_deployments().await?;
                let found = deployments.iter().filter_map(|deployment| {
                    let id = deployment["metadata"]["annotations"][WORKER].as_str()?.to_owned();
                    Some(ListedWorker { id, key: key_of(deployment, &self.name)?, state: WorkerState::Running })
                });
                Ok(found.collect())
            }
        }
    }

    async fn start(&self, assignment: WorkerSpec) -> Result<(), StartError> {
        let _one = self.write_lock.lock().await;
        let Self { name, pool, cluster, template, .. } = self;
        let new = GroupManifests { name, pool, cluster, template, assignment: &assignment };
        match (self.api.get(DEPLOYMENTS, &new.deployment_name()).await?, cluster.scaling) {
            (None, _) => Ok(self.create_group(&new).await?),
            (Some(deployment), KubernetesScaling::Controller) => {
                Ok(self.resize(&deployment, replicas(&deployment) + 1).await?)
            }
            (Some(_), KubernetesScaling::Keda) => Err(DriverError("the group exists already".to_owned()).into()),
        }
    }

    async fn stop(&self, id: String, key: Key, stop: StopMode) -> Result<(), DriverError> {
        match (stop, self.cluster.scaling) {
            (StopMode::Terminate, KubernetesScaling::Controller) => self.remove_pod(&id, &key).await,
            (StopMode::Kill, KubernetesScaling::Controller) if id.contains(PENDING_MARK) => Ok(()),
            (StopMode::Kill, KubernetesScaling::Controller) => {
                self.api.delete(PODS, &id, &json!({ "gracePeriodSeconds": 0 })).await
            }
            (StopMode::Remove, KubernetesScaling::Controller) => self.api.delete(PODS, &id, &json!({})).await,
            (StopMode::Terminate | StopMode::Kill | StopMode::Remove, KubernetesScaling::Keda) => {
                let _one = self.write_lock.lock().await;
                self.delete_group(&deployment_name(&self.name, &key)).await
            }
        }
    }
}
