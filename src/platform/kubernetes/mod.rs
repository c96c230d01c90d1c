//! The Kubernetes API: the client, its errors, the state of a pod, what a pod of a task says, and a watch for changes.

mod client;
#[cfg(test)]
mod client_tests;
mod connection;
mod exec_plugin;
mod kubeconfig;
mod object;
mod pod;
mod sweep;
mod template;
mod watch;
mod work;
mod yaml;

pub use client::{KubernetesClient, KubernetesError, existing};
pub use object::{EVENTS, Event, Kind, PODS, Pod, SECRETS};
pub use pod::{PodState, pod_state};
pub use sweep::sweep_ended;
pub use template::PodTemplate;
pub use watch::{PodChange, PodWatch, watch_pods};
pub use work::{
    FailureCause, PULLING, PodVerdict, RUNNING, StartGraces, UNSCHEDULED, failed_init_container, has_started, judge,
    waits_for,
};
pub use yaml::from_str as parse_yaml;
