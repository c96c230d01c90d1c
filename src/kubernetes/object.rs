//! Objects of the Kubernetes API, as far as they are read.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Deserialize;

/// A kind of objects in a namespace.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kind {
    /// The word for it in messages.
    pub(crate) noun: &'static str,
    /// The start of its paths: `api/v1`, or `apis/` with group and version.
    pub(crate) api: &'static str,
    pub(crate) plural: &'static str,
}

pub(crate) const PODS: Kind = Kind { noun: "pod", api: "api/v1", plural: "pods" };
pub(crate) const SECRETS: Kind = Kind { noun: "Secret", api: "api/v1", plural: "secrets" };
pub(crate) const EVENTS: Kind = Kind { noun: "Event", api: "api/v1", plural: "events" };

#[derive(Debug, Deserialize)]
pub(crate) struct List<T> {
    #[serde(default)]
    pub(crate) metadata: ListMetadata,
    // An empty one may be null.
    pub(crate) items: Option<Vec<T>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ListMetadata {
    pub(crate) resource_version: Option<String>,
    /// The token of the next page.
    #[serde(rename = "continue")]
    pub(crate) next_page: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Metadata {
    pub(crate) name: String,
    pub(crate) uid: Option<String>,
    pub(crate) resource_version: Option<String>,
    pub(crate) creation_timestamp: Option<Timestamp>,
    pub(crate) deletion_timestamp: Option<Timestamp>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
}

impl Metadata {
    pub(crate) fn labels(&self) -> Option<&BTreeMap<String, String>> {
        self.labels.as_ref()
    }

    pub(crate) fn label(&self, name: &str) -> Option<&str> {
        self.labels.as_ref()?.get(name).map(String::as_str)
    }

    pub(crate) fn annotation(&self, name: &str) -> Option<&str> {
        self.annotations.as_ref()?.get(name).map(String::as_str)
    }
}

/// Any object, of which only the metadata is asked for.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct PartialObject {
    pub(crate) metadata: Metadata,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Pod {
    pub(crate) metadata: Metadata,
    pub(crate) spec: Option<PodSpec>,
    pub(crate) status: Option<PodStatus>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PodSpec {
    pub(crate) node_name: Option<String>,
    pub(crate) init_containers: Option<Vec<InitContainer>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct InitContainer {
    pub(crate) name: String,
    pub(crate) restart_policy: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PodStatus {
    pub(crate) phase: Option<String>,
    pub(crate) reason: Option<String>,
    pub(crate) message: Option<String>,
    pub(crate) start_time: Option<Timestamp>,
    pub(crate) conditions: Option<Vec<PodCondition>>,
    pub(crate) container_statuses: Option<Vec<ContainerStatus>>,
    pub(crate) init_container_statuses: Option<Vec<ContainerStatus>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct PodCondition {
    #[serde(rename = "type")]
    pub(crate) type_: String,
    pub(crate) status: String,
    pub(crate) reason: Option<String>,
    pub(crate) message: Option<String>,
    pub(crate) last_transition_time: Option<Timestamp>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ContainerStatus {
    pub(crate) name: String,
    pub(crate) image: String,
    pub(crate) state: Option<ContainerState>,
    pub(crate) last_state: Option<ContainerState>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ContainerState {
    pub(crate) waiting: Option<ContainerStateWaiting>,
    pub(crate) running: Option<ContainerStateRunning>,
    pub(crate) terminated: Option<ContainerStateTerminated>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(crate) struct ContainerStateWaiting {
    pub(crate) reason: Option<String>,
    pub(crate) message: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ContainerStateRunning {
    pub(crate) started_at: Option<Timestamp>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct ContainerStateTerminated {
    pub(crate) exit_code: i32,
    pub(crate) signal: Option<i32>,
    pub(crate) reason: Option<String>,
    pub(crate) message: Option<String>,
    pub(crate) finished_at: Option<Timestamp>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Event {
    pub(crate) reason: Option<String>,
    pub(crate) message: Option<String>,
}
