//! The section of containers.

use serde::{Deserialize, Serialize};

use journeyman_platform::host::containment::ResourceLimits;

/// Containers for payloads that name an image.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ContainersConfig {
    /// The client that runs containers: `docker`, `podman`, or a path.
    pub program: String,
    /// Arguments of the client before its verb, such as `["-H", "unix:///run/docker.sock"]`.
    #[serde(default)]
    pub options: Vec<String>,
    /// The network of all containers, as the client names it. The proxy of a task needs `host`.
    #[serde(default = "host")]
    pub network: String,
    /// What payloads may ask for, with the scopes for it: `privileged`, `disableSeccomp`, `allowPtrace`, `device:kvm`, `device:hostSharedMemory`, `device:loopbackAudio`.
    #[serde(default)]
    pub allow: Vec<Permission>,
    /// Those of the host.
    #[serde(skip)]
    pub limits: ResourceLimits,
}

/// What may be allowed to payloads of containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum Permission {
    Privileged,
    DisableSeccomp,
    AllowPtrace,
    #[serde(rename = "device:kvm")]
    Kvm,
    #[serde(rename = "device:hostSharedMemory")]
    HostSharedMemory,
    #[serde(rename = "device:loopbackAudio")]
    LoopbackAudio,
}

fn host() -> String {
    HOST_NETWORK.to_owned()
}

/// The network on which a container reaches what listens on this host's loopback addresses.
pub(super) const HOST_NETWORK: &str = "host";
