//! What a pod does, or what it waits for, by its status.

use jiff::Timestamp;

use super::object::{ContainerState, ContainerStateTerminated, ContainerStatus, Pod, PodStatus};
use super::work::{joined, short, statuses, terminated};
use journeyman_domain::limits::KUBERNETES_START_GRACE_SECONDS;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodState {
    Ready,
    /// It may become ready by itself.
    Waiting(String),
    /// Its image or configuration has to change, or it exits again and again.
    CannotRun(String),
    /// The pod was deleted and finishes.
    Terminating,
    /// The pod has failed or succeeded, and does not start again.
    Ended(String),
}

/// Reasons of a container that starts. With any other it waits until an image or a configuration changes, although the kubelet
/// tries again.
const STARTING: [&str; 2] = ["PodInitializing", "ContainerCreating"];

/// Judges a pod by the container of this name, and by the containers that start before it.
pub fn pod_state(pod: &Pod, container: &str, now: Timestamp) -> PodState {
    let none = PodStatus::default();
    let status = pod.status.as_ref().unwrap_or(&none);
    let own = statuses(&status.container_statuses).find(|one| one.name == container);
    match status.phase.as_deref() {
        Some("Failed" | "Succeeded") => return PodState::Ended(short(&ended(status, own))),
        _ if pod.metadata.deletion_timestamp.is_some() => return PodState::Terminating,
        Some(_) | None => {}
    }
    let before = statuses(&status.init_container_statuses);
    let waiting = before.chain(own).find_map(|one| {
        let waiting = one.state.as_ref()?.waiting.as_ref()?;
        let reason = waiting.reason.as_deref().filter(|reason| !STARTING.contains(reason))?;
        Some((one, reason, waiting.message.as_deref()))
    });
    match waiting {
        Some((one, reason @ "CrashLoopBackOff", _)) => {
            let last = one.last_state.as_ref().and_then(|state| state.terminated.as_ref());
            PodState::CannotRun(short(&joined(Some(reason), last.map(exit_status).as_deref())))
        }
        Some((_, reason, message)) => {
            let why = short(&joined(Some(reason), message));
            let created = pod.metadata.creation_timestamp.unwrap_or(now);
            let is_old = now.duration_since(created).as_secs() >= KUBERNETES_START_GRACE_SECONDS;
            if is_old { PodState::CannotRun(why) } else { PodState::Waiting(why) }
        }
        None => {
            let condition =
                |kind: &str| status.conditions.iter().flatten().find(|one| one.type_ == kind && one.status == "False");
            let is_running = own.and_then(|one| one.state.as_ref()).is_some_and(is_running);
            match condition("PodScheduled").or_else(|| condition("Ready").filter(|_| is_running)) {
                Some(why) => {
                    let reason = why.reason.as_deref().unwrap_or("not ready");
                    PodState::Waiting(short(&joined(Some(reason), why.message.as_deref())))
                }
                None if is_running => PodState::Ready,
                None => PodState::Waiting("starting".to_owned()),
            }
        }
    }
}

fn is_running(state: &ContainerState) -> bool {
    state.running.is_some()
}

fn ended(status: &PodStatus, own: Option<&ContainerStatus>) -> String {
    let exit = own.and_then(terminated).map(exit_status);
    // Such as `Evicted: The node was low on resource: memory`.
    let why = joined(status.reason.as_deref(), status.message.as_deref());
    match (exit, why.is_empty()) {
        (Some(exit), true) => exit,
        (Some(exit), false) => format!("{why}; {exit}"),
        (None, true) => "the pod has ended".to_owned(),
        (None, false) => why,
    }
}

fn exit_status(state: &ContainerStateTerminated) -> String {
    match state.reason.as_deref() {
        Some(reason) => format!("exit status: {} ({reason})", state.exit_code),
        None => format!("exit status: {}", state.exit_code),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(status: Value) -> Pod {
        serde_json::from_value(json!({ "metadata": { "creationTimestamp": "2026-01-01T00:00:00Z" }, "status": status }))
            .unwrap()
    }

    /// The state of a pod so many seconds after its creation.
    fn state(status: Value, seconds: i64) -> PodState {
        let created: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        pod_state(&pod(status), "worker", Timestamp::from_second(created.as_second() + seconds).unwrap())
    }

    fn waiting(reason: &str) -> Value {
        json!({ "name": "worker", "state": { "waiting": { "reason": reason, "message": "why" } } })
    }

    #[test]
    fn a3_a_pod_whose_image_cannot_be_pulled_waits_for_30_seconds_and_then_cannot_run() {
        let status = json!({ "phase": "Pending", "containerStatuses": [waiting("ImagePullBackOff")] });
        assert_eq!(state(status.clone(), 29), PodState::Waiting("ImagePullBackOff: why".to_owned()));
        assert_eq!(state(status, 30), PodState::CannotRun("ImagePullBackOff: why".to_owned()));
    }

    #[test]
    fn a3_a_pod_without_a_node_waits_with_the_reason_of_the_scheduler() {
        let condition =
            json!({ "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes" });
        let status = json!({ "phase": "Pending", "conditions": [condition] });
        assert_eq!(state(status, 9999), PodState::Waiting("Unschedulable: 0/3 nodes".to_owned()));
        assert_eq!(state(json!({}), 9999), PodState::Waiting("starting".to_owned()));
    }

    #[test]
    fn a3_a_worker_that_exits_again_and_again_cannot_run() {
        let last = json!({ "terminated": { "exitCode": 3, "reason": "Error" } });
        let mut worker = waiting("CrashLoopBackOff");
        worker["lastState"] = last;
        let status = json!({ "phase": "Running", "containerStatuses": [worker] });
        assert_eq!(state(status, 5), PodState::CannotRun("CrashLoopBackOff: exit status: 3 (Error)".to_owned()));
    }

    #[test]
    fn c12_the_worker_is_judged_by_name_and_not_by_its_sidecar() {
        let sidecar = json!({ "name": "a-sidecar", "state": { "terminated": { "exitCode": 0 } } });
        let running = json!({ "name": "worker", "state": { "running": {} } });
        let ready = |status: &str| json!([{ "type": "Ready", "status": status, "reason": "ContainersNotReady" }]);
        let status =
            json!({ "phase": "Running", "containerStatuses": [sidecar, running], "conditions": ready("True") });
        assert_eq!(state(status.clone(), 9), PodState::Ready);
        let mut unready = status;
        unready["conditions"] = ready("False");
        assert_eq!(state(unready, 9), PodState::Waiting("ContainersNotReady".to_owned()));
        let failed = json!({ "name": "worker", "state": { "terminated": { "exitCode": 137, "reason": "OOMKilled" } } });
        let status = json!({ "phase": "Failed", "containerStatuses": [sidecar, failed] });
        assert_eq!(state(status, 9), PodState::Ended("exit status: 137 (OOMKilled)".to_owned()));
    }

    #[test]
    fn c12_an_eviction_is_named() {
        let status =
            json!({ "phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory. " });
        let evicted = "Evicted: The node was low on resource: memory.";
        assert_eq!(state(status, 9), PodState::Ended(evicted.to_owned()));
    }

    #[test]
    fn fields_that_are_unknown_or_missing_do_no_harm() {
        let status = json!({ "phase": "Running", "new": 1, "containerStatuses": [{ "name": "worker", "state": { "asleep": {} } }] });
        assert_eq!(state(status, 9), PodState::Waiting("starting".to_owned()));
    }
}
