//! The section of a handler that runs tasks as pods.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::handler::RunTime;
use crate::handler::config::{max_run_time, staged_retries};
use journeyman_platform::settings::values::{File, Span, built_in};

/// A handler that runs each task as a pod.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct KubernetesHandler {
    /// Namespace of the pods.
    pub namespace: String,
    /// Kubeconfig of the cluster. Its credentials and certificates may change while the worker runs [built-in: `KUBECONFIG`, else `~/.kube/config`, else the service account of the worker's pod].
    pub kubeconfig: Option<File>,
    /// File with a pod template (YAML with the expressions of Jinja), filled with `payload` and `task`.
    pub template: Option<File>,
    /// Name of the container that runs the task.
    pub container: String,
    /// Volume that holds `worker.work_dir`: a pod gets its task directory as `/task`, and can leave artifacts there.
    pub work_volume: Option<WorkVolume>,
    /// How long a pod may wait for a node.
    pub schedule_timeout: Span,
    /// How long a pod may take from there until its container runs.
    pub pull_timeout: Span,
    /// How long the registry may say that there is no such image, or no right to it, before the task fails.
    pub pull_grace: Span,
    /// How long a container may fail to be created, such as for want of a Secret.
    pub create_grace: Span,
    /// How often a task gets another pod after the cluster has lost or ended one.
    pub retries: u32,
    /// Interval at which a pod is looked at without a change that the cluster tells of, at least 1 s.
    pub check_interval: Span<1000>,
    /// Maximum run time of a task, whatever it asks for.
    pub max_run_time: RunTime,
}

impl Default for KubernetesHandler {
    fn default() -> Self {
        Self {
            namespace: "default".to_owned(),
            kubeconfig: None,
            template: None,
            container: "task".to_owned(),
            work_volume: None,
            schedule_timeout: built_in("10m"),
            pull_timeout: built_in("15m"),
            pull_grace: built_in("90s"),
            create_grace: built_in("30s"),
            retries: staged_retries(),
            check_interval: built_in("1m"),
            max_run_time: max_run_time(),
        }
    }
}

/// A volume that pods share with the worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct WorkVolume {
    /// Where the worker has it mounted; `worker.work_dir` is below.
    pub path: File,
    /// The volume as a pod names it, such as `{ persistentVolumeClaim = { claimName = "work" } }`.
    pub source: BTreeMap<String, serde_json::Value>,
}
