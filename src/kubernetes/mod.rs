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

pub(crate) use client::{KubernetesClient, KubernetesError, existing};
pub(crate) use object::{EVENTS, Event, Kind, PODS, Pod, SECRETS};
pub(crate) use pod::{PodState, pod_state};
pub(crate) use sweep::sweep_ended;
pub(crate) use template::PodTemplate;
pub(crate) use watch::{PodChange, PodWatch, watch_pods};
pub(crate) use work::{
    FailureCause, PULLING, PodVerdict, RUNNING, StartGraces, UNSCHEDULED, failed_init_container, has_started, judge,
    waits_for,
};
#[cfg(test)]
pub(crate) use yaml::from_str as parse_yaml;
