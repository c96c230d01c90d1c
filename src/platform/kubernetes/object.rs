//! Objects of the Kubernetes API, as far as they are read.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Deserialize;

/// A kind of objects in a namespace.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// The word for it in messages.
    pub noun: &'static str,
    /// The start of its paths: `api/v1`, or `apis/` with group and version.
    pub api: &'static str,
    pub plural: &'static str,
}

pub const PODS: Kind = Kind { noun: "pod", api: "api/v1", plural: "pods" };
pub const SECRETS: Kind = Kind { noun: "Secret", api: "api/v1", plural: "secrets" };
pub const EVENTS: Kind = Kind { noun: "Event", api: "api/v1", plural: "events" };

#[derive(Debug, Deserialize)]
pub struct List<T> {
    #[serde(default)]
    pub metadata: ListMetadata,
    // An empty one may be null.
    pub items: Option<Vec<T>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ListMetadata {
    pub(crate) resource_version: Option<String>,
    /// The token of the next page.
    #[serde(rename = "continue")]
    pub next_page: Option<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Metadata {
    pub name: String,
    pub uid: Option<String>,
    pub resource_version: Option<String>,
    pub creation_timestamp: Option<Timestamp>,
    pub deletion_timestamp: Option<Timestamp>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
}

impl Metadata {
    pub fn labels(&self) -> Option<&BTreeMap<String, String>> {
        self.labels.as_ref()
    }

    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.as_ref()?.get(name).map(String::as_str)
    }

    pub fn annotation(&self, name: &str) -> Option<&str> {
        self.annotations.as_ref()?.get(name).map(String::as_str)
    }
}

/// Any object, of which only the metadata is asked for.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct PartialObject {
    pub metadata: Metadata,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Pod {
    pub metadata: Metadata,
    pub spec: Option<PodSpec>,
    pub status: Option<PodStatus>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    pub node_name: Option<String>,
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
pub struct PodStatus {
    pub phase: Option<String>,
    pub(crate) reason: Option<String>,
    pub(crate) message: Option<String>,
    pub start_time: Option<Timestamp>,
    pub conditions: Option<Vec<PodCondition>>,
    pub(crate) container_statuses: Option<Vec<ContainerStatus>>,
    pub(crate) init_container_statuses: Option<Vec<ContainerStatus>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodCondition {
    #[serde(rename = "type")]
    pub type_: String,
    pub(crate) status: String,
    pub(crate) reason: Option<String>,
    pub(crate) message: Option<String>,
    pub last_transition_time: Option<Timestamp>,
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
pub struct Event {
    pub reason: Option<String>,
    pub message: Option<String>,
}
