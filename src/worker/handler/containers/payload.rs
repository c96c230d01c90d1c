//! The payload of docker-worker.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use serde::Deserialize;
use serde_json::{Map, Value};

use journeyman_domain::limits::CONTAINER_PATH_BYTES_MAX;

use crate::handler::payload_parts::OnExitStatus;

/// The payload of a container, in the format of docker-worker.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ContainerPayload {
    /// The image: its name at a registry, or an artifact.
    pub image: Image,
    /// The command and its arguments; by default what the image says.
    #[serde(default)]
    pub command: Vec<String>,
    /// Variables of the container.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Directories that are kept from task to task: the path in the container, by the name of the cache.
    #[serde(default)]
    pub cache: BTreeMap<String, String>,
    /// What to upload, by the name of the artifact.
    #[serde(default)]
    pub artifacts: BTreeMap<String, ContainerArtifact>,
    /// Features of docker-worker: `taskclusterProxy`, `allowPtrace`; without `artifacts` nothing is uploaded, without `bulkLog` no log, without `localLiveLog` only once the task has ended; any other must be false.
    #[serde(default)]
    pub features: Map<String, Value>,
    /// What the container may do besides.
    #[serde(default)]
    pub capabilities: Capabilities,
    /// Time limit of caches, image and container together, in seconds.
    #[cfg_attr(debug_assertions, schemars(range(min = 1, max = 4_294_967_295_u64)))]
    pub max_run_time: u32,
    /// The artifact that leads to the log; by default `public/logs/live.log`. The log itself has `_backing` before the extension.
    pub log: Option<String>,
    /// Exit statuses with a special meaning.
    #[serde(default)]
    pub on_exit_status: OnExitStatus,
    /// Not used.
    pub superseder_url: Option<String>,
}

/// The image of a container.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(untagged)]
pub enum Image {
    /// A name at a registry.
    Name(String),
    /// With its type.
    Typed(TypedImage),
}

/// The image of a container, by its type.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(tag = "type", rename_all = "kebab-case", rename_all_fields = "camelCase", deny_unknown_fields)]
pub enum TypedImage {
    /// A name at a registry.
    DockerImage {
        /// The name.
        name: String,
    },
    /// An artifact of a task, as `docker save` writes it.
    TaskImage {
        /// The task.
        task_id: String,
        /// The name of the artifact. The endings `.bz2`, `.gz`, `.lz4`, `.xz` and `.zst` say how it is compressed.
        path: String,
    },
    /// An artifact of the task that the index has.
    IndexedImage {
        /// The namespace in the index.
        namespace: String,
        /// The name of the artifact. The endings `.bz2`, `.gz`, `.lz4`, `.xz` and `.zst` say how it is compressed.
        path: String,
    },
}

/// What to upload.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ContainerArtifact {
    /// The kind of artifact.
    #[serde(rename = "type")]
    pub kind: ContainerArtifactType,
    /// Absolute path in the container.
    pub path: String,
    /// When the artifact expires (RFC 3339): not before the task's deadline, and not later than the task; by default with the task.
    pub expires: Option<String>,
}

/// The kind of artifact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum ContainerArtifactType {
    /// One regular file.
    File,
    /// All regular files in a directory and its subdirectories.
    Directory,
    /// The same of a directory that is empty at the start, and is not copied out of the container.
    Volume,
}

/// What a container may do besides.
#[derive(Debug, Clone, Default, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Capabilities {
    /// All that the host's root may do.
    #[serde(default)]
    pub privileged: bool,
    /// All system calls.
    #[serde(default)]
    pub disable_seccomp: bool,
    /// Devices: `kvm`, `hostSharedMemory`, `loopbackAudio`; any other must be false.
    #[serde(default)]
    pub devices: BTreeMap<String, bool>,
}

/// Why nothing can be at a path of a container; `None` if it can.
pub(super) fn path_error(path: &str) -> Option<&'static str> {
    let is_plain = Path::new(path).components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    if !path.starts_with('/') || !is_plain || Path::new(path).file_name().is_none() {
        Some("use an absolute path without '..'")
    } else if path.len() > CONTAINER_PATH_BYTES_MAX || path.contains(char::is_control) {
        Some("it is too long, or has a control character")
    } else {
        None
    }
}
