//! What a pod that runs a task does, or how it has ended: a pure function of the pod as the API server shows it.
//!
//! The container of the task is judged by its name, whatever runs beside it. Times are the API server's own.

use core::time::Duration;

use jiff::Timestamp;

use super::object::{ContainerStateTerminated, ContainerStateWaiting, ContainerStatus, Pod, PodStatus};
use journeyman_domain::limits::DRIVER_EXIT_REASON_CHARS_MAX;
use journeyman_domain::staged::{FailureClass, Progress, StagedAnswer, Stamp};

/// Phases of the work, whose limits are apart.
pub const UNSCHEDULED: &str = "unscheduled";
pub const PULLING: &str = "pulling";
pub const RUNNING: &str = "running";

/// How long an error of the start may last that often passes by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StartGraces {
    /// Of an image that cannot be pulled, counted from when the pod has a node.
    pub pull: Duration,
    /// The same for a container that cannot be created.
    pub create: Duration,
}

/// What a pod does, or how it has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodVerdict {
    Phase {
        name: &'static str,
        since: Option<Stamp>,
    },
    Done,
    Failed {
        cause: FailureCause,
        reason: Box<str>,
    },
    /// Its node does not answer.
    Unknown,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureCause {
    /// An image that cannot be had.
    Image,
    /// A container that cannot be created.
    Container,
    /// A container has exited.
    Exit,
    /// The cluster has ended it.
    Disruption,
}

impl FailureCause {
    pub(crate) const fn class(self) -> FailureClass {
        match self {
            Self::Image | Self::Container => FailureClass::Config,
            Self::Exit => FailureClass::Task,
            Self::Disruption => FailureClass::Infrastructure,
        }
    }
}

impl PodVerdict {
    pub fn into_answer(self, observed_at: Stamp) -> StagedAnswer {
        match self {
            Self::Phase { name, since } => {
                StagedAnswer::Progress(Progress { phase: name.into(), since, observed_at, check_in: None })
            }
            Self::Done => StagedAnswer::Done,
            Self::Failed { cause, reason } => StagedAnswer::Failed { class: cause.class(), reason },
            Self::Unknown => StagedAnswer::Unknown,
        }
    }
}

/// What a reason of a waiting container means.
enum Waiting {
    /// It is being started.
    Starting,
    /// It can never start like this.
    Invalid,
    Pull,
    Create,
    /// It has ended and waits for another start.
    Ended,
}

fn waiting_kind(reason: &str) -> Waiting {
    match reason {
        "InvalidImageName" | "ErrImageNeverPull" => Waiting::Invalid,
        "ErrImagePull" | "ImagePullBackOff" | "ImageInspectError" | "RegistryUnavailable" => Waiting::Pull,
        "CreateContainerConfigError"
        | "CreateContainerError"
        | "RunContainerError"
        | "PreCreateHookError"
        | "PreStartHookError"
        | "PostStartHookError"
        | "StartError" => Waiting::Create,
        "CrashLoopBackOff" => Waiting::Ended,
        _ => Waiting::Starting,
    }
}

/// Whether a registry says that there is no such image, or no right to it. Anything else may pass: a network that fails, a
/// registry that is overloaded, a limit of the kubelet.
fn is_final_pull_error(message: &str) -> bool {
    let message = message.to_ascii_lowercase();
    [
        "not found",
        "manifest unknown",
        "does not exist",
        "unauthorized",
        "access denied",
        "authentication required",
        "no match for platform",
    ]
    .iter()
    .any(|part| message.contains(part))
}

/// Judges a pod by the container of this name, and by the containers that have to end before it starts.
pub fn judge(pod: &Pod, container: &str, graces: StartGraces, now: Stamp) -> PodVerdict {
    let none = PodStatus::default();
    let status = pod.status.as_ref().unwrap_or(&none);
    let own = statuses(&status.container_statuses).find(|one| one.name == container);
    let failed = |cause, reason: &str| PodVerdict::Failed { cause, reason: short(reason).into() };
    if let Some(why) = disruption(pod, status) {
        // Its end may be the disruption's doing.
        let has_succeeded = own.and_then(terminated).is_some_and(|end| end.exit_code == 0 && !is_oom(end));
        return if has_succeeded { PodVerdict::Done } else { failed(FailureCause::Disruption, &why) };
    }
    if let Some(end) = own.and_then(terminated) {
        return ended(end, container);
    }
    let before: Vec<&ContainerStatus> =
        statuses(&status.init_container_statuses).filter(|one| !is_sidecar(pod, &one.name)).collect();
    let failed_before =
        before.iter().find_map(|one| terminated(one).filter(|end| end.exit_code != 0).map(|end| (one, end)));
    if let Some((one, end)) = failed_before.filter(|_| status.phase.as_deref() == Some("Failed")) {
        return ended(end, &one.name);
    }
    match status.phase.as_deref() {
        Some("Succeeded") => return PodVerdict::Done,
        Some("Failed") => {
            let why = joined(status.reason.as_deref(), status.message.as_deref());
            return failed(FailureCause::Disruption, if why.is_empty() { "the pod has failed" } else { &why });
        }
        Some("Unknown") => return PodVerdict::Unknown,
        Some(_) | None => {}
    }
    let scheduled =
        condition(status, "PodScheduled").filter(|(status, ..)| *status == "True").map(|(_, since, _)| since);
    let Some(scheduled) = scheduled else {
        let created = pod.metadata.creation_timestamp.map(stamp);
        return PodVerdict::Phase { name: UNSCHEDULED, since: created };
    };
    let since = scheduled.unwrap_or(now);
    for one in before.into_iter().chain(own) {
        let Some(ContainerStateWaiting { reason: Some(reason), message }) =
            one.state.as_ref().and_then(|state| state.waiting.as_ref())
        else {
            continue;
        };
        let message = message.as_deref().unwrap_or_default();
        let why = || format!("container {} ({}): {}", one.name, one.image, joined(Some(reason), Some(message)));
        let lasted = now.since(since);
        match waiting_kind(reason) {
            Waiting::Invalid => return failed(FailureCause::Image, &why()),
            Waiting::Pull if is_final_pull_error(message) && lasted >= graces.pull => {
                return failed(FailureCause::Image, &why());
            }
            // A runtime that is slow to answer is no fault of the task.
            Waiting::Create if !message.contains("context deadline exceeded") && lasted >= graces.create => {
                return failed(FailureCause::Container, &why());
            }
            Waiting::Ended => {
                let last = one.last_state.as_ref().and_then(|state| state.terminated.as_ref());
                return last.map_or_else(|| failed(FailureCause::Exit, &why()), |end| ended(end, &one.name));
            }
            Waiting::Starting | Waiting::Pull | Waiting::Create => {}
        }
    }
    let running = own.and_then(|one| one.state.as_ref()?.running.as_ref());
    match running {
        Some(running) => PodVerdict::Phase { name: RUNNING, since: running.started_at.map(stamp) },
        None => PodVerdict::Phase { name: PULLING, since: Some(since) },
    }
}

/// Why the cluster ends the pod, and not the task.
fn disruption(pod: &Pod, status: &PodStatus) -> Option<String> {
    if let Some(("True", _, why)) = condition(status, "DisruptionTarget") {
        return Some(why);
    }
    if let Some(reason @ ("Evicted" | "NodeLost" | "NodeShutdown" | "Terminated" | "Preempting" | "Shutdown")) =
        status.reason.as_deref()
    {
        return Some(joined(Some(reason), status.message.as_deref()));
    }
    // A user deleted it, or its node is drained.
    pod.metadata.deletion_timestamp.map(|_| "the pod was deleted".to_owned())
}

/// Status, last transition and reason of a condition.
fn condition<'a>(status: &'a PodStatus, kind: &str) -> Option<(&'a str, Option<Stamp>, String)> {
    let one = status.conditions.iter().flatten().find(|one| one.type_ == kind)?;
    let why = joined(one.reason.as_deref(), one.message.as_deref());
    Some((&one.status, one.last_transition_time.map(stamp), why))
}

/// An init container that runs beside the others does not have to end before them.
fn is_sidecar(pod: &Pod, name: &str) -> bool {
    let containers = pod.spec.as_ref().and_then(|spec| spec.init_containers.as_ref());
    containers.iter().copied().flatten().any(|one| one.name == name && one.restart_policy.as_deref() == Some("Always"))
}

pub(super) fn statuses(of: &Option<Vec<ContainerStatus>>) -> impl Iterator<Item = &ContainerStatus> {
    of.iter().flatten()
}

pub(super) fn terminated(one: &ContainerStatus) -> Option<&ContainerStateTerminated> {
    one.state.as_ref()?.terminated.as_ref()
}

fn is_oom(end: &ContainerStateTerminated) -> bool {
    end.reason.as_deref() == Some("OOMKilled")
}

fn ended(end: &ContainerStateTerminated, container: &str) -> PodVerdict {
    // One that was killed in a child process may exit with 0.
    if end.exit_code == 0 && !is_oom(end) {
        return PodVerdict::Done;
    }
    let signal = end.signal.or_else(|| (129..=159).contains(&end.exit_code).then(|| end.exit_code - 128));
    let signal = signal.map(|signal| format!(", signal {signal}")).unwrap_or_default();
    let why = match end.reason.as_deref() {
        Some("OOMKilled") => ", out of memory".to_owned(),
        Some("Error") | None => String::new(),
        Some(other) => format!(", {other}"),
    };
    let message = end.message.as_deref().map(str::trim).filter(|message| !message.is_empty());
    let message = message.map(|message| format!(": {message}")).unwrap_or_default();
    let reason = format!("container {container}: exit status {}{signal}{why}{message}", end.exit_code);
    PodVerdict::Failed { cause: FailureCause::Exit, reason: short(&reason).into() }
}

/// The init container that has failed, if its failure has ended the pod.
pub fn failed_init_container(pod: &Pod) -> Option<&str> {
    let status = pod.status.as_ref()?;
    let failed = |one: &&ContainerStatus| terminated(one).is_some_and(|end| end.exit_code != 0);
    let mut before = statuses(&status.init_container_statuses).filter(|one| !is_sidecar(pod, &one.name));
    before.find(failed).map(|one| one.name.as_str())
}

/// True if a container has a log.
pub fn has_started(pod: &Pod, container: &str) -> bool {
    let own = pod.status.iter().flat_map(|status| statuses(&status.container_statuses));
    let state = own.filter(|one| one.name == container).find_map(|one| one.state.as_ref());
    state.is_some_and(|state| state.running.is_some() || state.terminated.is_some())
}

/// When the last container of a pod has ended; when it was created, if none has run.
pub(crate) fn ended_at(pod: &Pod) -> Option<Timestamp> {
    let ends = pod.status.iter().flat_map(|status| statuses(&status.container_statuses)).filter_map(terminated);
    let last = ends.filter_map(|end| end.finished_at).max();
    last.or(pod.metadata.creation_timestamp)
}

/// Why a pod has no node, or a container does not start, in the words of the cluster.
pub fn waits_for(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    if let Some((_, _, why)) = condition(status, "PodScheduled").filter(|(is_met, ..)| *is_met == "False") {
        return Some(short(&format!("{UNSCHEDULED}: {why}")));
    }
    let all = statuses(&status.init_container_statuses).chain(statuses(&status.container_statuses));
    let waiting = |one: &ContainerStatus| {
        let waiting = one.state.as_ref()?.waiting.as_ref()?;
        let reason = waiting.reason.as_deref().filter(|reason| !matches!(waiting_kind(reason), Waiting::Starting))?;
        let why = joined(Some(reason), waiting.message.as_deref());
        Some(short(&format!("{PULLING}: container {}: {why}", one.name)))
    };
    all.into_iter().find_map(waiting)
}

pub(super) fn joined(reason: Option<&str>, message: Option<&str>) -> String {
    let parts: Vec<&str> =
        [reason, message].into_iter().flatten().map(str::trim).filter(|part| !part.is_empty()).collect();
    parts.join(": ")
}

pub(super) fn short(text: &str) -> String {
    text.chars().take(DRIVER_EXIT_REASON_CHARS_MAX).collect()
}

fn stamp(time: Timestamp) -> Stamp {
    Stamp(time.as_millisecond())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const GRACES: StartGraces = StartGraces { pull: Duration::from_secs(90), create: Duration::from_secs(30) };

    fn at(seconds: i64) -> Stamp {
        Stamp(Timestamp::as_millisecond("2026-01-01T00:00:00Z".parse().unwrap()) + seconds * 1_000)
    }

    /// A pod that was created at 0 s and has got a node at 60 s, at this time.
    fn judged(mut status: Value, seconds: i64) -> PodVerdict {
        let scheduled =
            json!({ "type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:01:00Z" });
        let conditions = status["conditions"].as_array().cloned().unwrap_or_else(|| vec![scheduled]);
        status["conditions"] = conditions.into();
        let pod = json!({
            "metadata": { "creationTimestamp": "2026-01-01T00:00:00Z" },
            "spec": { "containers": [], "initContainers": [{ "name": "proxy", "restartPolicy": "Always" }, { "name": "launcher" }] },
            "status": status,
        });
        judge(&serde_json::from_value(pod).unwrap(), "build", GRACES, at(seconds))
    }

    fn container(name: &str, state: Value) -> Value {
        json!({ "name": name, "image": "registry/image:1", "imageID": "", "ready": false, "restartCount": 0, "state": state })
    }

    fn waits(reason: &str, message: &str) -> Value {
        json!({ "waiting": { "reason": reason, "message": message } })
    }

    fn own(state: Value) -> Value {
        json!({ "phase": "Pending", "containerStatuses": [container("build", state)] })
    }

    fn exits(code: i32, reason: &str) -> Value {
        json!({ "terminated": { "exitCode": code, "reason": reason } })
    }

    #[track_caller]
    fn is_failed(verdict: &PodVerdict, expected: FailureCause, words: &str) {
        let PodVerdict::Failed { cause, reason } = verdict else { panic!("{verdict:?}") };
        assert!(*cause == expected && reason.contains(words), "{verdict:?}");
    }

    #[track_caller]
    fn goes_on(verdict: &PodVerdict, phase: &'static str, since: i64) {
        assert_eq!(*verdict, PodVerdict::Phase { name: phase, since: Some(at(since)) });
    }

    #[test]
    fn s13_a_pod_without_a_node_and_one_that_pulls_are_phases_of_their_own() {
        let no_node = json!([{ "type": "PodScheduled", "status": "False", "reason": "Unschedulable" }]);
        goes_on(&judged(json!({ "phase": "Pending", "conditions": no_node }), 500), UNSCHEDULED, 0);
        goes_on(&judged(json!({ "phase": "Pending", "conditions": [] }), 500), UNSCHEDULED, 0);
        goes_on(&judged(own(waits("ContainerCreating", "")), 500), PULLING, 60);
        goes_on(&judged(json!({ "phase": "Pending" }), 500), PULLING, 60);
        let running = json!({ "running": { "startedAt": "2026-01-01T00:02:00Z" } });
        goes_on(&judged(own(running), 500), RUNNING, 120);
    }

    #[test]
    fn s10_an_init_container_is_reported_with_its_image_and_message() {
        let init = json!([container("launcher", waits("ErrImagePull", "manifest unknown"))]);
        let status = json!({
            "phase": "Pending", "initContainerStatuses": init, "containerStatuses": [container("build", waits("PodInitializing", ""))],
        });
        let answer = judged(status, 200);
        is_failed(
            &answer,
            FailureCause::Image,
            "container launcher (registry/image:1): ErrImagePull: manifest unknown",
        );
        let status = json!({ "phase": "Failed", "initContainerStatuses": [container("launcher", exits(3, "Error"))] });
        is_failed(&judged(status, 200), FailureCause::Exit, "container launcher: exit status 3");
    }

    #[test]
    fn s11_the_container_of_the_task_is_judged_and_none_beside_it() {
        let done = json!({ "terminated": { "exitCode": 0, "reason": "Completed" } });
        let broken = container("a-sidecar", exits(1, "Error"));
        let of = |state: Value, phase: &str| {
            let proxy = container("proxy", json!({ "terminated": { "exitCode": 2 } }));
            json!({ "phase": phase, "containerStatuses": [broken.clone(), container("build", state)], "initContainerStatuses": [proxy] })
        };
        goes_on(
            &judged(of(json!({ "running": { "startedAt": "2026-01-01T00:02:00Z" } }), "Running"), 200),
            RUNNING,
            120,
        );
        assert_eq!(judged(of(done.clone(), "Running"), 200), PodVerdict::Done, "others run on");
        assert_eq!(judged(of(done, "Failed"), 200), PodVerdict::Done);
    }

    #[test]
    fn s12_an_image_that_cannot_be_pulled_has_time_by_what_the_registry_says() {
        for message in ["pull QPS exceeded", "dial tcp: i/o timeout", "received unexpected HTTP status: 503"] {
            goes_on(&judged(own(waits("ImagePullBackOff", message)), 800), PULLING, 60);
        }
        for message in
            ["manifest unknown", "repository does not exist or may require 'docker login'", "401 Unauthorized"]
        {
            goes_on(&judged(own(waits("ErrImagePull", message)), 149), PULLING, 60);
            is_failed(&judged(own(waits("ErrImagePull", message)), 150), FailureCause::Image, message);
        }
        is_failed(&judged(own(waits("InvalidImageName", "x")), 61), FailureCause::Image, "InvalidImageName: x");
    }

    #[test]
    fn a_container_that_cannot_be_created_has_its_own_grace() {
        let of = |message: &str| own(waits("CreateContainerConfigError", message));
        goes_on(&judged(of("secret \"x\" not found"), 89), PULLING, 60);
        is_failed(&judged(of("secret \"x\" not found"), 90), FailureCause::Container, "secret \"x\" not found");
        goes_on(&judged(of("context deadline exceeded"), 500), PULLING, 60);
    }

    #[test]
    fn s9_a_pod_that_the_cluster_ends_is_no_failure_of_its_task() {
        let disrupted = json!([{ "type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "m" }]);
        let killed = json!({ "phase": "Failed", "conditions": disrupted, "containerStatuses": [container("build", exits(137, "Error"))] });
        is_failed(&judged(killed, 200), FailureCause::Disruption, "PreemptionByScheduler: m");
        let evicted = json!({ "phase": "Failed", "reason": "Evicted", "message": "low on memory" });
        is_failed(&judged(evicted, 200), FailureCause::Disruption, "Evicted: low on memory");
        let mut finished = json!({ "phase": "Failed", "reason": "NodeLost" });
        finished["containerStatuses"] = json!([container("build", exits(0, "Completed"))]);
        assert_eq!(judged(finished, 200), PodVerdict::Done);
        assert_eq!(judged(json!({ "phase": "Unknown" }), 200), PodVerdict::Unknown);
    }

    #[test]
    fn exit_status_signal_and_lack_of_memory_are_told_apart() {
        for (state, words) in [
            (exits(1, "Error"), "container build: exit status 1"),
            (exits(137, "Error"), "exit status 137, signal 9"),
            (exits(137, "OOMKilled"), "exit status 137, signal 9, out of memory"),
            (exits(0, "OOMKilled"), "exit status 0, out of memory"),
            (exits(128, "StartError"), "exit status 128, StartError"),
        ] {
            let status = json!({ "phase": "Failed", "containerStatuses": [container("build", state)] });
            is_failed(&judged(status, 200), FailureCause::Exit, words);
        }
        let mut looping = own(waits("CrashLoopBackOff", "back-off"));
        looping["containerStatuses"][0]["lastState"] = exits(4, "Error");
        is_failed(&judged(looping, 200), FailureCause::Exit, "exit status 4");
    }

    #[test]
    fn a_verdict_is_an_answer_with_the_time_of_the_server() {
        let answer = judged(json!({ "phase": "Pending" }), 500).into_answer(at(500));
        let progress = Progress { phase: PULLING.into(), since: Some(at(60)), observed_at: at(500), check_in: None };
        assert_eq!(answer, StagedAnswer::Progress(progress));
        let evicted = judged(json!({ "phase": "Failed", "reason": "Evicted" }), 200).into_answer(at(200));
        let class = FailureClass::Infrastructure;
        assert_eq!(evicted, StagedAnswer::Failed { class, reason: "Evicted".into() });
    }
}
