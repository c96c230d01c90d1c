//! What payloads ask for beyond a plain container: by a scope of the task, and by what the operator allows.

use serde_json::Value;

use super::config::{ContainersConfig, HOST_NETWORK, Permission};
use super::payload::ContainerPayload;
use crate::handler::command::{is_wanted, unsupported_features};
use crate::handler::mounts::lacking_any_scope;
use crate::handler::{Context, PrepareError};

const DEVICES: [(&str, Permission, [&str; 2]); 3] = [
    ("kvm", Permission::Kvm, ["--device", "/dev/kvm"]),
    ("hostSharedMemory", Permission::HostSharedMemory, ["--volume", "/dev/shm:/dev/shm"]),
    ("loopbackAudio", Permission::LoopbackAudio, ["--device", "/dev/snd"]),
];

const FEATURES: [&str; 6] = ["taskclusterProxy", "allowPtrace", "artifacts", "bulkLog", "localLiveLog", "chainOfTrust"];

/// What this handler lacks.
pub(super) fn unsupported(payload: &ContainerPayload, config: &ContainersConfig) -> Vec<String> {
    let mut found = unsupported_features(&payload.features, &FEATURES);
    for name in wanted_devices(payload).filter(|name| !DEVICES.iter().any(|(device, ..)| device == name)) {
        found.push(format!("payload/capabilities/devices/{name}: not supported by this worker"));
    }
    if is_wanted(&payload.features, "taskclusterProxy") && config.network != HOST_NETWORK {
        found.push(format!(
            "payload/features/taskclusterProxy: this worker's containers are on the network {:?}, where they do not reach a proxy",
            config.network
        ));
    }
    found
}

/// The options of the client's `run` for what the payload may do.
pub(super) fn of_capabilities(
    payload: &ContainerPayload,
    config: &ContainersConfig,
    violations: &mut Vec<String>,
) -> Vec<String> {
    let mut options: Vec<&str> = Vec::new();
    let mut permit = |place: String, permission: Permission, flags: &[&'static str]| {
        if config.allow.contains(&permission) {
            options.extend(flags);
        } else {
            violations.push(format!("{place}: this worker does not allow it"));
        }
    };
    let capabilities = &payload.capabilities;
    if capabilities.privileged {
        permit("payload/capabilities/privileged".to_owned(), Permission::Privileged, &["--privileged"]);
    }
    if capabilities.disable_seccomp {
        let flags = ["--security-opt", "seccomp=unconfined"];
        permit("payload/capabilities/disableSeccomp".to_owned(), Permission::DisableSeccomp, &flags);
    }
    if is_wanted(&payload.features, "allowPtrace") {
        permit("payload/features/allowPtrace".to_owned(), Permission::AllowPtrace, &["--cap-add", "SYS_PTRACE"]);
    }
    for name in wanted_devices(payload) {
        if let Some((_, permission, flags)) = DEVICES.iter().find(|(device, ..)| *device == name) {
            permit(format!("payload/capabilities/devices/{name}"), *permission, flags);
        }
    }
    options.into_iter().map(str::to_owned).collect()
}

fn wanted_devices(payload: &ContainerPayload) -> impl Iterator<Item = &str> {
    payload.capabilities.devices.iter().filter(|(_, wanted)| **wanted).map(|(name, _)| name.as_str())
}

/// Says which scopes the task lacks for what it asks for.
pub(super) async fn missing_scopes(payload: &ContainerPayload, context: &Context) -> Result<Vec<String>, PrepareError> {
    let mut wanted: Vec<(String, Vec<String>)> = Vec::new();
    for name in payload.cache.keys() {
        // Tasks for d2g have the second.
        let scopes = ["docker-worker", "generic-worker"].map(|worker| format!("{worker}:cache:{name}"));
        wanted.push((format!("payload/cache/{name}"), scopes.to_vec()));
    }
    if payload.capabilities.privileged {
        let scope = "docker-worker:capability:privileged".to_owned();
        wanted.push(("payload/capabilities/privileged".to_owned(), vec![scope]));
    }
    for name in wanted_devices(payload) {
        let scope = format!("docker-worker:capability:device:{name}");
        wanted.push((format!("payload/capabilities/devices/{name}"), vec![scope]));
    }
    if payload.features.get("allowPtrace") == Some(&Value::Bool(true)) {
        wanted.push(("payload/features/allowPtrace".to_owned(), vec!["docker-worker:feature:allowPtrace".to_owned()]));
    }
    lacking_any_scope(wanted, context).await
}
