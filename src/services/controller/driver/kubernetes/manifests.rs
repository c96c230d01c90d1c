//! Kubernetes objects of a group: Deployment, Secret, and those of KEDA.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::controller::config::{KubernetesDriverConfig, PoolConfig};
use crate::controller::driver::WorkerSpec;
use crate::controller::driver::object_name::object_name;
use journeyman_domain::group::Key;
use journeyman_domain::limits::{DEPLOYMENT_NAME_BYTES_MAX, OBJECT_NAME_BYTES_MAX};
use journeyman_platform::kubernetes::Kind;
use journeyman_platform::settings::values::merge_json;

pub(super) const POOL: &str = "journeyman/pool";
pub(super) const GROUP: &str = "journeyman/group";
const KEY: &str = "journeyman/key";
/// The worker that a Deployment is, where KEDA scales it.
pub(super) const WORKER: &str = "journeyman/worker";
/// Of pods and Deployments: the hash of the pod template and the variables.
pub(super) const TEMPLATE: &str = "journeyman/template";
/// The container of a worker.
pub(super) const CONTAINER: &str = "worker";

pub(super) const DEPLOYMENTS: Kind = Kind { noun: "Deployment", api: "apis/apps/v1", plural: "deployments" };
const KEDA: &str = "apis/keda.sh/v1alpha1";
const TRIGGER_AUTHENTICATIONS: Kind =
    Kind { noun: "TriggerAuthentication", api: KEDA, plural: "triggerauthentications" };
const SCALED_OBJECTS: Kind = Kind { noun: "ScaledObject", api: KEDA, plural: "scaledobjects" };

pub(super) fn deployment_name(pool: &str, key: &Key) -> String {
    object_name(&[pool, key.as_str()], DEPLOYMENT_NAME_BYTES_MAX)
}

pub(super) fn pool_label(pool: &str) -> String {
    object_name(&[pool], OBJECT_NAME_BYTES_MAX)
}

/// The key of an object with these annotations, if it is of this pool.
pub(super) fn key_of<'a>(annotation: impl Fn(&str) -> Option<&'a str>, pool: &str) -> Option<Key> {
    annotation(KEY).filter(|_| annotation(POOL) == Some(pool)).and_then(Key::new)
}

pub(super) fn annotation<'a>(deployment: &'a Value, name: &str) -> Option<&'a str> {
    deployment["metadata"]["annotations"][name].as_str()
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
    pub(super) fn deployment(&self) -> Value {
        let mut metadata = self.metadata();
        metadata["annotations"][TEMPLATE] = json!(self.template_hash);
        json!({
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata,
            "spec": { "replicas": 0, "selector": { "matchLabels": { GROUP: self.name } }, "template": self.template },
        })
    }

    /// Has this template in an existing Deployment.
    pub(super) fn update(&self, deployment: &mut Value) {
        deployment["metadata"]["annotations"][TEMPLATE] = json!(self.template_hash);
        deployment["spec"]["template"] = self.template.clone();
    }

    pub(super) fn secret(&self, deployment: &Value) -> Value {
        self.owned_by(deployment, "v1", "Secret", ("data", json!(self.secret_data)))
    }

    /// The objects of KEDA.
    pub(super) fn scaler(&self, deployment: &Value, pool: &PoolConfig, queue: Option<&String>) -> [(Kind, Value); 2] {
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
        let objects = [(TRIGGER_AUTHENTICATIONS, authentication), (SCALED_OBJECTS, scaled)];
        objects.map(|(kind, spec)| (kind, self.owned_by(deployment, "keda.sh/v1alpha1", kind.noun, ("spec", spec))))
    }

    /// The cluster deletes an object together with its owner.
    fn owned_by(&self, owner: &Value, version: &str, kind: &str, (field, value): (&str, Value)) -> Value {
        let mut metadata = self.metadata();
        metadata["ownerReferences"] = json!([{
            "apiVersion": "apps/v1", "kind": "Deployment", "name": self.name, "uid": owner["metadata"]["uid"],
        }]);
        json!({ "apiVersion": version, "kind": kind, "metadata": metadata, field: value })
    }
}
