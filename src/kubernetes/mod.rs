//! The Kubernetes API: the client, its errors, the state of a pod, and a watch for changes.

mod client;
mod pod;
mod watch;
#[cfg_attr(not(test), expect(dead_code, reason = "the handler of pods comes with the next commit"))]
mod work;

pub(crate) use client::{KubernetesClient, KubernetesError, existing};
pub(crate) use pod::{PodState, pod_state};
pub(crate) use watch::PodWatch;
