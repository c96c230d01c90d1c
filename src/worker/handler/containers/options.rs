//! What payloads ask for beyond a plain container: by a scope of the task, and by what the operator allows.

use super::config::{ContainersConfig, HOST_NETWORK, Permission};
use super::payload::ContainerPayload;
use crate::handler::mounts::lacking_any_scope;
use crate::handler::payload_parts::{CHAIN_OF_TRUST, PROXY, is_wanted, unsupported_features};
use crate::handler::{Context, PrepareError};

const FEATURES: [&str; 6] = [PROXY, "allowPtrace", "artifacts", "bulkLog", "localLiveLog", CHAIN_OF_TRUST];

/// The options of the client's `run` for what the payload may do.
///
/// # Errors
///
/// The services that know the task's scopes cannot be reached.
pub(super) async fn for_payload(
    payload: &ContainerPayload,
    config: &ContainersConfig,
    context: &Context,
    violations: &mut Vec<String>,
) -> Result<Vec<String>, PrepareError> {
    violations.extend(unsupported_features(&payload.features, &FEATURES));
    if is_wanted(&payload.features, PROXY) && config.network != HOST_NETWORK {
        violations.push(format!(
            "payload/features/{PROXY}: this worker's containers are on the network {:?}, where they do not reach a proxy",
            config.network
        ));
    }
    let capabilities = &payload.capabilities;
    let may_trace = is_wanted(&payload.features, "allowPtrace");
    let mut asked = vec![
        (capabilities.privileged, "capabilities/privileged", Permission::Privileged, "--privileged"),
        (
            capabilities.disable_seccomp,
            "capabilities/disableSeccomp",
            Permission::DisableSeccomp,
            "--security-opt=seccomp=unconfined",
        ),
        (may_trace, "features/allowPtrace", Permission::AllowPtrace, "--cap-add=SYS_PTRACE"),
    ];
    for (name, is_asked) in &capabilities.devices {
        asked.push(match name.as_str() {
            "kvm" => (*is_asked, "capabilities/devices/kvm", Permission::Kvm, "--device=/dev/kvm"),
            "hostSharedMemory" => {
                let place = "capabilities/devices/hostSharedMemory";
                (*is_asked, place, Permission::HostSharedMemory, HOST_SHARED_MEMORY)
            }
            "loopbackAudio" => {
                (*is_asked, "capabilities/devices/loopbackAudio", Permission::LoopbackAudio, "--device=/dev/snd")
            }
            _ => {
                let unsupported = || format!("payload/capabilities/devices/{name}: not supported by this worker");
                violations.extend(is_asked.then(unsupported));
                continue;
            }
        });
    }
    // Tasks for d2g have the second scope.
    let caches = payload.cache.keys().map(|name| {
        let scopes = ["docker-worker", "generic-worker"].map(|worker| format!("{worker}:cache:{name}"));
        (format!("payload/cache/{name}"), scopes.to_vec())
    });
    let (mut scopes, mut options): (Vec<_>, _) = (caches.collect(), Vec::new());
    for (_, place, permission, option) in asked.into_iter().filter(|(is_asked, ..)| *is_asked) {
        if config.allow.contains(&permission) {
            options.push(option.to_owned());
        } else {
            violations.push(format!("payload/{place}: this worker does not allow it"));
        }
        let scope = place.replace("capabilities/", "capability:").replace("features/", "feature:");
        let scope = format!("docker-worker:{}", scope.replace("devices/", "device:"));
        scopes.push((format!("payload/{place}"), vec![scope]));
    }
    violations.extend(lacking_any_scope(scopes, context).await?);
    Ok(options)
}

/// Takes the place of the container's own.
pub(super) const HOST_SHARED_MEMORY: &str = "--volume=/dev/shm:/dev/shm";
