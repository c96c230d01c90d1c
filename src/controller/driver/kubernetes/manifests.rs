//! Kubernetes objects of a group: Deployment, Secret, and those of KEDA.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use kube::ResourceExt as _;
use kube::api::{ApiResource, DynamicObject};
use kube::core::GroupVersionKind;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::config::pool::{KubernetesDriverConfig, PoolConfig};
use crate::config::values::merge_json;
use crate::controller::driver::WorkerSpec;
use crate::controller::driver::object_name::object_name;
use journeyman_domain::group::Key;
use journeyman_domain::limits::{DEPLOYMENT_NAME_BYTES_MAX, OBJECT_NAME_BYTES_MAX};

pub(super) const POOL: &str = "journeyman/pool";
pub(super) const GROUP: &str = "journeyman/group";
const KEY: &str = "journeyman/key";
/// The worker that a Deployment is, where KEDA scales it.
pub(super) const WORKER: &str = "journeyman/worker";
/// Of pods and Deployments: the hash of the pod template and the variables.
pub(super) const TEMPLATE: &str = "journeyman/template";
/// The container of a worker.
pub(super) const CONTAINER: &str = "worker";

pub(super) fn deployments() -> ApiResource {
    resource("apps", "v1", "Deployment", "deployments")
}

pub(super) fn secrets() -> ApiResource {
    resource("", "v1", "Secret", "secrets")
}

fn resource(group: &str, version: &str, kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
}

pub(super) fn deployment_name(pool: &str, key: &Key) -> String {
    object_name(&[pool, key.as_str()], DEPLOYMENT_NAME_BYTES_MAX)
}

pub(super) fn pool_label(pool: &str) -> String {
    object_name(&[pool], OBJECT_NAME_BYTES_MAX)
}

pub(super) fn key_of(object: &impl kube::ResourceExt, pool: &str) -> Option<Key> {
    let notes = object.annotations();
    notes.get(KEY).filter(|_| notes.get(POOL).is_some_and(|name| name == pool)).and_then(|key| Key::new(key))
}

pub(super) struct GroupManifests {
    pub(super) name: String,
    pool: String,
    key: Key,
    pub(super) template_hash: String,
    template: Value,
    secret_data: BTreeMap<String, String>,
}

impl GroupManifests {
    pub(super) fn new(
        pool_name: &str,
        pool: &PoolConfig,
        config: &KubernetesDriverConfig,
        template: &Value,
        spec: &WorkerSpec,
    ) -> Self {
        // Each pod has its own `WORKER_ID`.
        let variables = spec.variables.iter().filter(|(name, _)| *name != "WORKER_ID");
        let secret_data = variables.map(|(name, value)| (name.clone(), STANDARD.encode(value))).collect();
        let mut group = Self {
            name: deployment_name(pool_name, &spec.key),
            pool: pool_name.to_owned(),
            key: spec.key.clone(),
            template_hash: String::new(),
            template: Value::Null,
            secret_data,
        };
        let mut template = group.pod_template(pool, config, template);
        let hashed = format!("{template}{}", json!(group.secret_data));
        group.template_hash = hex::encode(&Sha256::digest(hashed)[..8]);
        template["metadata"]["annotations"][TEMPLATE] = json!(group.template_hash);
        group.template = template;
        group
    }

    fn metadata(&self) -> Value {
        json!({ "name": self.name, "labels": self.labels(), "annotations": self.annotations() })
    }

    fn labels(&self) -> Value {
        json!({ "app.kubernetes.io/managed-by": "journeyman", POOL: pool_label(&self.pool), GROUP: self.name })
    }

    fn annotations(&self) -> Value {
        json!({ POOL: self.pool, KEY: self.key.as_str() })
    }

    fn pod_template(&self, pool: &PoolConfig, config: &KubernetesDriverConfig, template: &Value) -> Value {
        let mut container = json!({
            "name": CONTAINER,
            "image": config.image,
            "envFrom": [{ "secretRef": { "name": self.name } }],
            "env": [{ "name": "WORKER_ID", "valueFrom": { "fieldRef": { "fieldPath": "metadata.name" } } }],
        });
        if !pool.command.is_empty() {
            container["command"] = json!(pool.command);
        }
        let mut whole = template.clone();
        // Other fields of the template's first container stay.
        let mut first = whole.pointer_mut("/spec/containers/0").map(Value::take).unwrap_or_default();
        merge_json(&mut first, container);
        let others = whole.pointer("/spec/containers").and_then(Value::as_array).cloned().unwrap_or_default();
        let containers: Vec<Value> = [first].into_iter().chain(others.into_iter().skip(1)).collect();
        let pod = json!({
            "metadata": { "labels": self.labels(), "annotations": self.annotations() },
            "spec": { "terminationGracePeriodSeconds": super::grace_seconds(pool), "containers": containers },
        });
        merge_json(&mut whole, pod);
        whole
    }

    /// Without replicas: its Secret has to be there first.
    pub(super) fn deployment(&self) -> DynamicObject {
        let mut metadata = self.metadata();
        metadata["annotations"][TEMPLATE] = json!(self.template_hash);
        object(&json!({
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata,
            "spec": { "replicas": 0, "selector": { "matchLabels": { GROUP: self.name } }, "template": self.template },
        }))
    }

    /// Has this template in an existing Deployment.
    pub(super) fn update(&self, deployment: &mut DynamicObject) {
        deployment.annotations_mut().insert(TEMPLATE.to_owned(), self.template_hash.clone());
        deployment.data["spec"]["template"] = self.template.clone();
    }

    pub(super) fn secret(&self, deployment: &DynamicObject) -> Value {
        self.owned_by(deployment, "v1", "Secret", ("data", json!(self.secret_data)))
    }

    /// The objects of KEDA.
    pub(super) fn scaler(
        &self,
        deployment: &DynamicObject,
        pool: &PoolConfig,
        queue: Option<&String>,
    ) -> [(ApiResource, Value); 2] {
        let host = json!({ "parameter": "host", "name": self.name, "key": "WORKER_AMQP_URI" });
        let authentication = json!({ "secretTargetRef": [host] });
        let scaled = json!({
            "scaleTargetRef": { "name": self.name },
            "minReplicaCount": pool.min,
            "maxReplicaCount": pool.max,
            "triggers": [{
                "type": "rabbitmq",
                "metadata": {
                    "queueName": queue, "mode": "QueueLength", "value": pool.concurrency.to_string(), "protocol": "amqp",
                },
                "authenticationRef": { "name": self.name },
            }],
        });
        let objects = [
            ("TriggerAuthentication", "triggerauthentications", authentication),
            ("ScaledObject", "scaledobjects", scaled),
        ];
        objects.map(|(kind, plural, spec)| {
            let object = self.owned_by(deployment, "keda.sh/v1alpha1", kind, ("spec", spec));
            (resource("keda.sh", "v1alpha1", kind, plural), object)
        })
    }

    /// The cluster deletes an object together with its owner.
    fn owned_by(&self, owner: &DynamicObject, version: &str, kind: &str, (field, value): (&str, Value)) -> Value {
        let mut metadata = self.metadata();
        metadata["ownerReferences"] = json!([{
            "apiVersion": "apps/v1", "kind": "Deployment", "name": self.name, "uid": owner.metadata.uid,
        }]);
        json!({ "apiVersion": version, "kind": kind, "metadata": metadata, field: value })
    }
}

fn object(of: &Value) -> DynamicObject {
    // Each part of it is made above.
    serde_json::from_value(of.clone()).unwrap_or_else(|_| DynamicObject::new("", &deployments()))
}
