//! The pod of a task: the operator's template with what the payload asks for.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::PodPayload;
use crate::handler::EndedWork;
use crate::handler::kubernetes::config::KubernetesHandler;
use crate::handler::staged::Work;
use journeyman_platform::kubernetes::Pod;
use journeyman_platform::settings::values::merge_json;

/// Of pods: a hash of the task. It tells the pods of this worker's tasks from others of the same name.
pub(super) const TASK: &str = "journeyman/task";
/// The annotation of pods with the attempt of the task and the launch within it.
const LAUNCH: &str = "journeyman/launch";
/// The label of pods with the handler, whose ended pods are removed.
pub(super) const HANDLER: &str = "journeyman/handler";
/// The place of the task directory in the container.
const TASK_DIR: &str = "/task";
const WORK_VOLUME: &str = "journeyman-work";
const NAME_HASH_DIGITS: usize = 20;
const TASK_HASH_DIGITS: usize = 40;

/// Names the pod of a launch: each launch of a task has the same name on every worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PodName {
    /// The label of its task.
    pub(super) task: String,
    /// The attempt of the task, and the launch within it.
    pub(super) launch: (u32, u32),
}

impl PodName {
    pub(super) fn of(work: &Work<'_, PodPayload>) -> Self {
        Self::new(&work.context.work_name(), work.record.launch)
    }

    pub(super) fn new(work: &EndedWork, launch: u32) -> Self {
        let EndedWork { source, run, request } = work;
        // A request keeps its pod when it is delivered again.
        let (name, attempt) = request.as_ref().map_or((run.task.as_str(), run.run), |key| (key, 0));
        let hash = hex::encode(Sha256::digest(format!("{source} {name}")));
        Self { task: hash[..TASK_HASH_DIGITS].to_owned(), launch: (attempt, launch) }
    }

    /// That of a pod of the same task.
    pub(super) fn launch_of(pod: &Pod) -> Option<(u32, u32)> {
        let (attempt, launch) = pod.metadata.label(LAUNCH)?.split_once('-')?;
        Some((attempt.parse().ok()?, launch.parse().ok()?))
    }

    pub(super) fn is_of(&self, pod: &Pod) -> bool {
        self.is_task_of(pod) && Self::launch_of(pod) == Some(self.launch)
    }

    pub(super) fn is_task_of(&self, pod: &Pod) -> bool {
        pod.metadata.label(TASK) == Some(self.task.as_str())
    }

    pub(super) fn pod(&self) -> String {
        let (attempt, launch) = self.launch;
        format!("jm-{}-{attempt}-{launch}", &self.task[..NAME_HASH_DIGITS])
    }
}

/// The name of the container that runs the task: that of the configuration.
pub(super) fn manifest(
    handler: &str,
    config: &KubernetesHandler,
    template: Value,
    name: &PodName,
    env: BTreeMap<String, String>,
    active_seconds: u64,
    work: &Work<'_, PodPayload>,
) -> Result<Value, String> {
    let (payload, context) = (work.payload, work.context);
    let mut pod = json!({ "spec": { "automountServiceAccountToken": false } });
    merge_json(&mut pod, template);
    let containers = pod.pointer_mut("/spec/containers").map(Value::take).unwrap_or_else(|| json!([]));
    let Value::Array(mut containers) = containers else { return Err("spec.containers is no list".to_owned()) };
    let is_own = |one: &&mut Value| one["name"] == config.container;
    let own = match containers.iter_mut().find(is_own) {
        Some(own) => own,
        None => {
            containers.insert(0, json!({ "name": config.container }));
            &mut containers[0]
        }
    };
    if let Some(image) = &payload.image {
        own["image"] = json!(image);
    }
    if own["image"].is_null() {
        return Err("there is no image, neither in the payload nor in the template".to_owned());
    }
    if !payload.command.is_empty() {
        own["command"] = payload.command.iter().map(|part| literal(part)).collect();
    }
    let variables = env.into_iter().map(|(name, value)| json!({ "name": name, "value": literal(&value) }));
    append(&mut own["env"], variables)?;
    if !payload.secret_env.is_empty() {
        append(&mut own["envFrom"], [json!({ "secretRef": { "name": name.pod() } })])?;
    }
    if let Some(resources) = &payload.resources {
        merge_json(&mut own["resources"], json!(resources));
    }
    let spec = json!({ "restartPolicy": "Never", "activeDeadlineSeconds": active_seconds });
    if let Some(volume) = &config.work_volume {
        let path = context.workdir();
        let path = path
            .strip_prefix(&volume.path.0)
            .map_err(|_| format!("worker.work_dir is not below work_volume.path, {}", volume.path.0.display()))?;
        append(&mut own["volumeMounts"], [json!({ "name": WORK_VOLUME, "mountPath": TASK_DIR, "subPath": path })])?;
        if own["workingDir"].is_null() {
            own["workingDir"] = json!(TASK_DIR);
        }
        let mut source = json!(volume.source);
        source["name"] = json!(WORK_VOLUME);
        append(&mut pod["spec"]["volumes"], [source])?;
    }
    let labels = json!({
        "app.kubernetes.io/managed-by": "journeyman",
        HANDLER: handler_label(handler),
        TASK: name.task,
        LAUNCH: format!("{}-{}", name.launch.0, name.launch.1),
    });
    let metadata = json!({
        "name": name.pod(), "labels": labels, "annotations": { "journeyman/run": context.task().run.to_string() },
    });
    merge_json(&mut pod, json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec }));
    pod["spec"]["containers"] = containers.into();
    Ok(pod)
}

/// Label values have 63 characters of a few kinds.
pub(super) fn handler_label(handler: &str) -> String {
    hex::encode(&Sha256::digest(handler)[..16])
}

/// Kubernetes replaces `$(NAME)` in commands and variables, and `$$` by `$`.
fn literal(text: &str) -> String {
    text.replace('$', "$$")
}

fn append(list: &mut Value, more: impl IntoIterator<Item = Value>) -> Result<(), String> {
    if list.is_null() {
        *list = json!([]);
    }
    let list = list.as_array_mut().ok_or_else(|| "a list of the template is none".to_owned())?;
    list.extend(more);
    Ok(())
}

/// The cluster deletes it together with the pod.
pub(super) fn secret(pod: &Pod, values: &BTreeMap<String, String>) -> Value {
    let (name, uid) = (&pod.metadata.name, &pod.metadata.uid);
    let owner = json!({ "apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid });
    let metadata = json!({ "name": name, "labels": pod.metadata.labels(), "ownerReferences": [owner] });
    json!({ "apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": values })
}
