//! Kubernetes objects of a group: Deployment, Secret, and those of KEDA.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::config::pool::{KubernetesDriverConfig, KubernetesScaling, PoolConfig};
use crate::controller::driver::WorkerSpec;
use crate::controller::name_encoding;
use crate::domain::group::Key;
use crate::limits::{DEPLOYMENT_NAME_BYTES_MAX, OBJECT_NAME_BYTES_MAX};

pub(super) const POOL: &str = "journeyman/pool";
pub(super) const GROUP: &str = "journeyman/group";
const KEY: &str = "journeyman/key";
pub(super) const WORKER: &str = "journeyman/worker";

pub(super) fn deployment_name(pool: &str, key: &Key) -> String {
    name_encoding::object_name(&[pool, key.as_str()], DEPLOYMENT_NAME_BYTES_MAX)
}

pub(super) fn pool_label(pool: &str) -> String {
    name_encoding::object_name(&[pool], OBJECT_NAME_BYTES_MAX)
}

pub(super) fn key_of(object: &Value, pool: &str) -> Option<Key> {
    let notes = &object["metadata"]["annotations"];
    (notes[POOL] == pool).then(|| notes[KEY].as_str().and_then(Key::new)).flatten()
}

pub(super) fn name_of(object: &Value) -> Option<&str> {
    object["metadata"]["name"].as_str()
}

pub(super) struct GroupManifests<'a> {
    /// Of the pool.
    pub(super) name: &'a str,
    pub(super) pool: &'a PoolConfig,
    pub(super) cluster: &'a KubernetesDriverConfig,
    pub(super) template: &'a Value,
    pub(super) assignment: &'a WorkerSpec,
}

impl GroupManifests<'_> {
    pub(super) fn deployment_name(&self) -> String {
        deployment_name(self.name, &self.assignment.key)
    }

    pub(super) fn secret_name(&self) -> String {
        let WorkerSpec { id, key, .. } = self.assignment;
        name_encoding::object_name(&[self.name, key.as_str(), &id.replace('-', "")], OBJECT_NAME_BYTES_MAX)
    }

    fn metadata(&self, name: &str) -> Value {
        json!({
            "name": name,
            "labels": self.labels(),
            "annotations": {
                POOL: self.name, KEY: self.assignment.key.as_str(), WORKER: self.assignment.id,
            },
        })
    }

    fn labels(&self) -> Value {
        json!({ "app.kubernetes.io/managed-by": "journeyman", POOL: pool_label(self.name), GROUP: self.deployment_name() })
    }

    pub(super) fn secret(&self) -> Value {
        let mut told: BTreeMap<&str, &str> =
            self.assignment.variables.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        // Each pod has its own.
        told.remove("WORKER_ID");
        json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": self.metadata(&self.secret_name()), "stringData": told,
        })
    }

    pub(super) fn deployment(&self) -> Value {
        let KubernetesDriverConfig { image, scaling, .. } = self.cluster;
        let mut container = json!({
            "name": "worker",
            "image": image,
            "envFrom": [{ "secretRef": { "name": self.secret_name() } }],
            "env": [{ "name": "WORKER_ID", "valueFrom": { "fieldRef": { "fieldPath": "metadata.name" } } }],
        });
        if !self.pool.command.is_empty() {
            container["command"] = json!(self.pool.command);
        }
        let mut pod = json!({
            "metadata": { "labels": self.labels(), "annotations": { POOL: self.name, KEY: self.assignment.key.as_str() } },
            "spec": { "terminationGracePeriodSeconds": self.pool.termination_grace.0.as_secs() },
        });
        let mut whole = self.template.clone();
        // Other fields of the template's first container stay.
        let mut first = whole.pointer_mut("/spec/containers/0").map(Value::take).unwrap_or_default();
        merge(&mut first, container);
        let others = whole.pointer("/spec/containers").and_then(Value::as_array).cloned().unwrap_or_default();
        pod["spec"]["containers"] = [first].into_iter().chain(others.into_iter().skip(1)).collect();
        merge(&mut whole, pod);
        let replicas = match scaling {
            KubernetesScaling::Controller => 1,
            KubernetesScaling::Keda => 0,
        };
        json!({
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": self.metadata(&self.deployment_name()),
            "spec": { "replicas": replicas, "selector": { "matchLabels": { GROUP: self.deployment_name() } }, "template": whole },
        })
    }

    pub(super) fn trigger_authentication(&self) -> Value {
        json!({
            "apiVersion": "keda.sh/v1alpha1", "kind": "TriggerAuthentication", "metadata": self.metadata(&self.deployment_name()),
            "spec": { "secretTargetRef": [{ "parameter": "host", "name": self.secret_name(), "key": "WORKER_AMQP_URI" }] },
        })
    }

    pub(super) fn scaled_object(&self) -> Value {
        let queue = self.assignment.variables.get("WORKER_REQUESTS_QUEUE");
        json!({
            "apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": self.metadata(&self.deployment_name()),
            "spec": {
                "scaleTargetRef": { "name": self.deployment_name() },
                "minReplicaCount": self.pool.min,
                "maxReplicaCount": self.pool.max,
                "triggers": [{
                    "type": "rabbitmq",
                    "metadata": {
                        "queueName": queue, "mode": "QueueLength", "value": self.pool.concurrency.to_string(), "protocol": "amqp",
                    },
                    "authenticationRef": { "name": self.deployment_name() },
                }],
            },
        })
    }
}

fn merge(lower: &mut Value, upper: Value) {
    match (lower, upper) {
        (Value::Object(lower), Value::Object(upper)) => {
            for (name, value) in upper {
                merge(lower.entry(name).or_insert(Value::Null), value);
            }
        }
        (lower, upper) => *lower = upper,
    }
}
