//! Tasks as pods.

use std::sync::Arc;
use std::time::Duration;

use jiff::SignedDuration;
use journeyman::config::schema::{KubernetesHandler, WorkVolume};
use journeyman::config::values::{File, Span};
use journeyman::handler::kubernetes::Kubernetes;
use journeyman::handler::staged::{Staged, StagedHandler};
use journeyman::handler::{CancelCause, ExecuteError, ExecuteFailure, TaskInfo, erase};
use journeyman_domain::claim::LossReason;
use journeyman_domain::id::{Run, TaskId};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::Semaphore;

use crate::handler::bench::{Bench, RunResult};
use crate::support::cluster::{Cluster, Fault, How, NAMESPACE, rights_of_role};

struct Place {
    cluster: Cluster,
    folder: TempDir,
    config: KubernetesHandler,
}

impl Place {
    async fn new() -> Self {
        let (cluster, folder) = (Cluster::start().await, tempfile::tempdir().expect("a folder"));
        let config = KubernetesHandler {
            namespace: NAMESPACE.to_owned(),
            kubeconfig: Some(File(cluster.kubeconfig(folder.path()))),
            check_interval: Span(Duration::from_secs(1)),
            ..KubernetesHandler::default()
        };
        Self { cluster, folder, config }
    }

    fn with(mut self, change: impl FnOnce(&mut KubernetesHandler, &TempDir)) -> Self {
        change(&mut self.config, &self.folder);
        self
    }

    fn handler(&self) -> Kubernetes {
        Kubernetes::new("pods", self.config.clone()).expect("a handler")
    }

    /// Runs a task to its end and, unless it was handed over, to the removal of its pods.
    async fn run(&self, bench: &Bench, payload: Value) -> RunResult {
        let handler = erase(Staged(self.handler()));
        let ran = bench.run(&*handler, payload).await;
        if matches!(ran, RunResult::Ran(_)) && bench.context.cancellation().is_none() {
            bench.discard(&*handler).await.expect("its pods are removed");
        }
        ran
    }

    /// Runs a task, and does something with the name of its first pod meanwhile.
    async fn run_while(&self, bench: &Bench, payload: Value, meanwhile: impl AsyncFnOnce(&Cluster, &str)) -> RunResult {
        let acting = async {
            let pod = self.cluster.wait_for_pod(|_| true).await;
            meanwhile(&self.cluster, name(&pod)).await;
        };
        tokio::join!(self.run(bench, payload), acting).0
    }

    fn fault(&self, verb: &'static str, resource: &'static str, times: usize, how: How) {
        self.cluster.fault(Fault { verb, resource, times, how });
    }
}

fn name(pod: &Value) -> &str {
    pod["metadata"]["name"].as_str().expect("a name")
}

fn status(code: u16, message: &str) -> How {
    How::Status { code, message: message.to_owned() }
}

fn payload() -> Value {
    json!({ "image": "registry/tool:1", "command": ["tool", "--all"] })
}

fn succeed(cluster: &Cluster, pod: &str) {
    cluster.schedule(pod, "node-1");
    cluster.running(pod);
    cluster.terminate(pod, "task", 0, "Completed");
}

#[track_caller]
fn failed(result: RunResult, expected: ExecuteFailure) -> String {
    let RunResult::Ran(Err(ExecuteError { reason, message })) = result else { panic!("{result:?}") };
    assert_eq!(reason, expected, "{message}");
    message
}

#[tokio::test]
async fn a_task_is_a_pod_whose_log_is_the_tasks_and_which_is_removed() {
    let (place, bench) = (Place::new().await, Bench::new());
    let payload = json!({
        "image": "registry/tool:1", "command": ["tool", "--all"], "env": { "A": "b" }, "maxRunTime": 60,
        "resources": { "requests": { "cpu": "500m" }, "limits": { "memory": "1Gi" } },
    });
    let mut seen = Value::Null;
    let ran = place.run_while(&bench, payload, async |cluster, pod| {
        seen = cluster.pod(pod).expect("it is there");
        cluster.schedule(pod, "node-1");
        cluster.running(pod);
        cluster.log(pod, "task", "first");
        bench.logged("first").await;
        cluster.cut_logs();
        cluster.log(pod, "task", "second");
        bench.logged("second").await;
        cluster.log(pod, "task", "last");
        cluster.terminate(pod, "task", 0, "Completed");
    });
    ran.await.completed();
    let log = bench.log();
    for line in ["first\n", "second\n", "last\n", "it is unscheduled", "it is running"] {
        assert_eq!(log.matches(line).count(), 1, "{line} {log}");
    }
    let container = &seen["spec"]["containers"][0];
    assert_eq!((&container["image"], &container["command"]), (&json!("registry/tool:1"), &json!(["tool", "--all"])));
    let resources = json!({ "requests": { "cpu": "500m" }, "limits": { "memory": "1Gi" } });
    assert_eq!((&container["resources"], &seen["spec"]["restartPolicy"]), (&resources, &json!("Never")));
    let env = container["env"].as_array().expect("variables");
    for (name, value) in [("A", "b"), ("TASK_ID", "fN1SbArXTPSVFNUvaOlinQ"), ("RUN_ID", "3")] {
        assert!(env.contains(&json!({ "name": name, "value": value })), "{name}: {env:?}");
    }
    assert_eq!(place.cluster.pods(), Vec::<Value>::new());
    assert_eq!(place.cluster.count_calls("create", "pods"), 1);
}

#[tokio::test]
async fn s1_a_start_that_is_repeated_by_the_next_worker_makes_one_pod() {
    let (place, bench) = (Place::new().await, Bench::new());
    // The first worker dies with its future once the pod is there.
    let first = place.handler();
    let first = erase(Staged(first));
    tokio::select! {
        ended = bench.run(&*first, payload()) => panic!("{ended:?}"),
        _ = place.cluster.wait_for_pod(|_| true) => {}
    }
    drop(first);
    let next = Bench::new();
    let ran = place.run_while(&next, payload(), async |cluster, pod| {
        cluster.wait_until("it was found", |cluster| cluster.count_calls("list", "pods") >= 2).await;
        succeed(cluster, pod);
    });
    ran.await.completed();
    assert_eq!(place.cluster.count_calls("create", "pods"), 1);
}

#[tokio::test]
async fn s2_a_pod_whose_creation_was_not_answered_is_adopted() {
    let (place, bench) = (Place::new().await, Bench::new());
    place.fault("create", "pods", 1, How::LoseAnswer);
    place.run_while(&bench, payload(), async |cluster, pod| succeed(cluster, pod)).await.completed();
    assert_eq!(place.cluster.count_calls("create", "pods"), 1);
}

#[tokio::test]
async fn s8_an_api_server_that_is_away_is_no_verdict_about_a_running_pod() {
    let (place, bench) = (Place::new().await, Bench::new());
    let ran = place.run_while(&bench, payload(), async |cluster, pod| {
        cluster.schedule(pod, "node-1");
        cluster.running(pod);
        bench.logged("it is running").await;
        let how = [500, 403, 429].map(|code| status(code, "not now")).into_iter().chain([How::Refuse]);
        for how in how {
            let before = cluster.count_calls("get", "pods");
            place.fault("get", "pods", 1, how);
            cluster.wait_until("it was tried again", |cluster| cluster.count_calls("get", "pods") >= before + 2).await;
        }
        cluster.terminate(pod, "task", 0, "Completed");
    });
    ran.await.completed();
    assert_eq!(place.cluster.count_calls("create", "pods"), 1);
}

#[tokio::test]
async fn s9_a_pod_that_the_cluster_loses_or_ends_is_made_again_and_costs_the_task_nothing() {
    let (place, bench) = (Place::new().await, Bench::new());
    let ran = place.run_while(&bench, payload(), async |cluster, first| {
        cluster.schedule(first, "node-1");
        cluster.running(first);
        cluster.vanish(first);
        let second = cluster.wait_for_pod(|pod| name(pod) != first).await;
        let second = name(&second);
        cluster.schedule(second, "node-1");
        let evicted = json!({ "phase": "Failed", "reason": "Evicted", "message": "low on memory" });
        cluster.set_status(second, evicted);
        let third = cluster.wait_for_pod(|pod| ![first, second].contains(&name(pod))).await;
        assert!(cluster.pod(second).is_none(), "it was removed first");
        succeed(cluster, name(&third));
    });
    ran.await.completed();
    assert_eq!(place.cluster.count_calls("create", "pods"), 3);
}

#[tokio::test]
async fn s9_after_the_last_retry_the_task_ends_as_unavailable_with_the_reason() {
    let place = Place::new().await.with(|config, _| config.retries = 0);
    let bench = Bench::new();
    let ran = place.run_while(&bench, payload(), async |cluster, pod| {
        cluster.event(pod, "Warning", "Evicted", "The node was low on resource: memory.");
        cluster.event(pod, "Normal", "Pulled", "not shown");
        cluster.set_status(pod, json!({ "phase": "Failed", "reason": "Evicted", "message": "low on memory" }));
    });
    assert_eq!(failed(ran.await, ExecuteFailure::Unavailable), "Evicted: low on memory");
    let log = bench.log();
    assert!(log.contains("Evicted: The node was low on resource: memory.") && !log.contains("not shown"), "{log}");
}

#[tokio::test]
async fn a_container_that_fails_is_told_with_status_signal_and_memory() {
    for (code, reason, words) in [
        (3, "Error", "container task: exit status 3"),
        (143, "Error", "container task: exit status 143, signal 15"),
        (137, "OOMKilled", "container task: exit status 137, signal 9, out of memory"),
    ] {
        let (place, bench) = (Place::new().await, Bench::new());
        let ran = place.run_while(&bench, payload(), async |cluster, pod| {
            cluster.schedule(pod, "node-1");
            cluster.running(pod);
            cluster.log(pod, "task", "goodbye");
            cluster.terminate(pod, "task", code, reason);
        });
        assert_eq!(failed(ran.await, ExecuteFailure::Failed), words);
        assert!(bench.log().contains("goodbye"), "{}", bench.log());
        assert_eq!(place.cluster.pods(), Vec::<Value>::new());
    }
}

#[tokio::test]
async fn s10_an_init_container_is_told_by_name_with_its_log() {
    let template = "spec:\n  initContainers: [{ name: launcher, image: 'launcher:1' }]\n";
    let place = Place::new().await.with(|config, folder| {
        let path = folder.path().join("template.yaml");
        std::fs::write(&path, template).expect("it is written");
        config.template = Some(File(path));
    });
    let bench = Bench::new();
    let ran = place.run_while(&bench, payload(), async |cluster, pod| {
        cluster.schedule(pod, "node-1");
        cluster.waiting(pod, "launcher", "PodInitializing", "");
        cluster.log(pod, "launcher", "no space");
        cluster.terminate(pod, "launcher", 4, "Error");
    });
    assert_eq!(failed(ran.await, ExecuteFailure::Failed), "container launcher: exit status 4");
    assert!(bench.log().contains("no space"), "{}", bench.log());
}

#[tokio::test]
async fn s12_an_image_that_comes_late_is_no_failure_and_one_that_does_not_exist_is() {
    let place = Place::new().await.with(|config, _| config.pull_grace = Span(Duration::from_secs(90)));
    let bench = Bench::new();
    let ran = place.run_while(&bench, payload(), async |cluster, pod| {
        cluster.schedule(pod, "node-1");
        cluster.waiting(pod, "task", "ErrImagePull", "manifest unknown");
        let told = |text: &str| text.contains("container task: ErrImagePull: manifest unknown");
        cluster.wait_until("it is told", |_| bench.context.progress().is_some_and(|text| told(&text))).await;
        succeed(cluster, pod);
    });
    ran.await.completed();
    let bench = Bench::new();
    let ran = place.run_while(&bench, payload(), async |cluster, pod| {
        cluster.schedule(pod, "node-1");
        cluster.set_skew(SignedDuration::from_secs(91));
        cluster.waiting(pod, "task", "ErrImagePull", "manifest unknown");
    });
    let why = failed(ran.await, ExecuteFailure::Failed);
    assert_eq!(why, "container task (registry/tool:1): ErrImagePull: manifest unknown");
}

#[tokio::test]
async fn s13_and_s20_a_node_and_an_image_have_limits_of_their_own_by_the_clock_of_the_server() {
    // The cluster's clock is 5 minutes ahead, then behind.
    for skew in [300, -300] {
        let (place, bench) = (Place::new().await, Bench::new());
        place.cluster.set_skew(SignedDuration::from_secs(skew));
        let ran = place.run_while(&bench, payload(), async |cluster, pod| {
            cluster.unschedulable(pod, "0/3 nodes");
            let told = |text: &str| text.contains("unscheduled: Unschedulable: 0/3 nodes");
            cluster.wait_until("it is told", |_| bench.context.progress().is_some_and(|text| told(&text))).await;
            cluster.set_skew(SignedDuration::from_secs(skew + 599));
            cluster.schedule(pod, "node-1");
            cluster.set_skew(SignedDuration::from_secs(skew + 599 + 899));
            succeed(cluster, pod);
        });
        ran.await.completed();
        let bench = Bench::new();
        let ran = place.run_while(&bench, payload(), async |cluster, pod| {
            cluster.unschedulable(pod, "0/3 nodes");
            cluster.set_skew(SignedDuration::from_secs(skew + 599 + 899 + 601));
        });
        let why = failed(ran.await, ExecuteFailure::Unavailable);
        assert!(why.starts_with("it was unscheduled for 60") && why.ends_with("the limit is 600 s"), "{why}");
        assert_eq!(place.cluster.pods(), Vec::<Value>::new(), "it is removed");
    }
}

#[tokio::test]
async fn s16_a_watch_that_is_cut_refused_or_silent_costs_time_only() {
    let (place, bench) = (Place::new().await, Bench::new());
    let ran = place.run_while(&bench, payload(), async |cluster, pod| {
        cluster.schedule(pod, "node-1");
        cluster.wait_until("it is watched", |cluster| cluster.open_watches() == 1).await;
        cluster.compact();
        cluster.cut_watches();
        cluster.running(pod);
        bench.logged("it is running").await;
        cluster.wait_until("it is watched again", |cluster| cluster.open_watches() == 1).await;
        cluster.silence_watches(true);
        cluster.terminate(pod, "task", 0, "Completed");
    });
    ran.await.completed();
}

#[tokio::test]
async fn a_change_is_noticed_by_the_watch_and_not_by_the_next_look() {
    let place = Place::new().await.with(|config, _| config.check_interval = Span(Duration::from_secs(3_600)));
    let bench = Bench::new();
    let ran = place.run_while(&bench, payload(), async |cluster, pod| {
        cluster.wait_until("it is watched", |cluster| cluster.open_watches() == 1).await;
        cluster.schedule(pod, "node-1");
        cluster.running(pod);
        bench.logged("it is running").await;
        cluster.terminate(pod, "task", 0, "Completed");
    });
    ran.await.completed();
}

#[tokio::test]
async fn s17_quota_is_waited_for_and_what_can_never_be_is_asked_for_once() {
    for (code, message) in [(403, "pods \"p\" is forbidden: violates PodSecurity"), (422, "Invalid value")] {
        let (place, bench) = (Place::new().await, Bench::new());
        place.fault("create", "pods", 1, status(code, message));
        let why = failed(place.run(&bench, payload()).await, ExecuteFailure::Failed);
        assert!(why.contains(message) && why.contains(&code.to_string()), "{why}");
        assert_eq!(place.cluster.count_calls("create", "pods"), 1);
    }
    let (place, bench) = (Place::new().await, Bench::new());
    place.fault("create", "pods", 1, status(403, "exceeded quota: pods, requested: 1, used: 9"));
    let work = place.run(&bench, payload());
    tokio::pin!(work);
    tokio::select! {
        ended = &mut work => panic!("{ended:?}"),
        () = place.cluster.wait_until("it was asked for", |cluster| cluster.count_calls("create", "pods") == 1) => {}
    }
    tokio::time::pause();
    let pod = tokio::select! {
        ended = &mut work => panic!("{ended:?}"),
        pod = place.cluster.wait_for_pod(|_| true) => pod,
    };
    tokio::time::resume();
    succeed(&place.cluster, name(&pod));
    work.await.completed();
    assert_eq!(place.cluster.count_calls("create", "pods"), 2);
}

#[tokio::test]
async fn e2_a_cluster_that_refuses_this_worker_is_no_fault_of_the_task() {
    for (code, message) in
        [(403, "pods is forbidden: User \"x\" cannot create"), (404, "namespaces \"builds\" not found")]
    {
        let (place, bench) = (Place::new().await, Bench::new());
        place.fault("create", "pods", 1, status(code, message));
        let why = failed(place.run(&bench, payload()).await, ExecuteFailure::AccessDenied);
        assert!(why.contains(message) && why.contains(&code.to_string()), "{why}");
    }
    // The client reads its credentials again and sends each refused call once more.
    let (place, bench) = (Place::new().await, Bench::new());
    place.fault("create", "pods", 2, status(401, "Unauthorized"));
    place.fault("list", "pods", 2, status(401, "Unauthorized"));
    place.run_while(&bench, payload(), async |cluster, pod| succeed(cluster, pod)).await.completed();
}

#[tokio::test]
async fn s18_secret_variables_are_in_a_secret_of_the_pod_and_nowhere_else() {
    let (place, bench) = (Place::new().await, Bench::new());
    let payload = json!({ "image": "registry/tool:1", "secretEnv": { "PASSWORD": "canary-of-the-task" } });
    let ran = place.run_while(&bench, payload, async |cluster, pod| {
        cluster.wait_until("the secret is there", |cluster| !cluster.secrets().is_empty()).await;
        let (pod, secret) = (cluster.pod(pod).expect("it is there"), cluster.secrets().remove(0));
        assert!(!pod.to_string().contains("canary") && !pod.to_string().contains("PASSWORD"), "{pod}");
        assert_eq!(pod["spec"]["containers"][0]["envFrom"][0]["secretRef"]["name"], secret["metadata"]["name"]);
        assert_eq!(secret["metadata"]["ownerReferences"][0]["uid"], pod["metadata"]["uid"]);
        cluster.schedule(name(&pod), "node-1");
        cluster.running(name(&pod));
        cluster.log(name(&pod), "task", "the password is canary-of-the-task");
        cluster.terminate(name(&pod), "task", 0, "Completed");
    });
    ran.await.completed();
    assert!(bench.log().contains("the password is") && !bench.log().contains("canary-of-the-task"), "{}", bench.log());
    assert_eq!(place.cluster.secrets(), Vec::<Value>::new());
}

#[tokio::test]
async fn a_canceled_task_ends_its_pod_and_waits_until_it_has_ended() {
    let (place, bench) = (Place::new().await, Bench::new());
    place.cluster.keep_deleted(true);
    let ran = place.run_while(&bench, payload(), async |cluster, pod| {
        cluster.schedule(pod, "node-1");
        cluster.running(pod);
        bench.logged("it is running").await;
        bench.cancel_for(CancelCause::ClaimLost(LossReason::Revoked), Duration::from_secs(60));
        cluster.wait_for_pod(|pod| !pod["metadata"]["deletionTimestamp"].is_null()).await;
        cluster.vanish(pod);
    });
    ran.await.failed();
    assert_eq!(place.cluster.pods(), Vec::<Value>::new());
}

/// The task's attempt of this number.
fn attempt(run: u32) -> Bench {
    let info = Bench::new().context.task().clone();
    Bench::new().of(TaskInfo { run: Run { run, ..info.run.clone() }, ..info })
}

/// Starts the first attempt, whose worker dies.
async fn abandoned(place: &Place) -> String {
    let (first, handler) = (attempt(0), erase(Staged(place.handler())));
    let pod = tokio::select! {
        ended = first.run(&*handler, payload()) => panic!("{ended:?}"),
        pod = place.cluster.wait_for_pod(|_| true) => pod,
    };
    place.cluster.schedule(name(&pod), "node-1");
    place.cluster.running(name(&pod));
    name(&pod).to_owned()
}

#[tokio::test]
async fn s15_the_next_attempt_of_a_task_whose_worker_is_gone_goes_on_with_its_pod() {
    let place = Place::new().await;
    let pod = abandoned(&place).await;
    place.cluster.log(&pod, "task", "written meanwhile");
    let second = attempt(1);
    let ending = async {
        second.logged("written meanwhile").await;
        place.cluster.terminate(&pod, "task", 0, "Completed");
    };
    let (ran, ()) = tokio::join!(place.run(&second, payload()), ending);
    ran.completed();
    assert_eq!(place.cluster.count_calls("create", "pods"), 1);
    assert_eq!(place.cluster.pods(), Vec::<Value>::new());
}

#[tokio::test]
async fn e1_a_pod_that_has_ended_is_there_until_the_outcome_is_reported() {
    let (place, bench) = (Place::new().await, attempt(0));
    let handler = erase(Staged(place.handler()));
    let ending = async {
        let pod = place.cluster.wait_for_pod(|_| true).await;
        succeed(&place.cluster, name(&pod));
    };
    tokio::join!(bench.run(&*handler, payload()), ending).0.completed();
    // Killed here, its worker has told nobody; the next attempt has the result without another pod.
    assert_eq!(place.cluster.pods().len(), 1);
    place.run(&attempt(1), payload()).await.completed();
    assert_eq!(place.cluster.count_calls("create", "pods"), 1);
    assert_eq!(place.cluster.pods(), Vec::<Value>::new());
}

#[tokio::test]
async fn e1_a_pod_whose_outcome_was_reported_is_no_result_of_a_rerun() {
    let place = Place::new().await;
    let pod = abandoned(&place).await;
    place.cluster.terminate(&pod, "task", 3, "Error");
    let info = Bench::new().context.task().clone();
    let rerun = attempt(1).of(TaskInfo { run: Run { run: 1, ..info.run.clone() }, reported_runs: 1, ..info });
    let ending = async {
        let next = place.cluster.wait_for_pod(|next| name(next) != pod).await;
        assert!(place.cluster.pod(&pod).is_none(), "it was removed first");
        succeed(&place.cluster, name(&next));
    };
    tokio::join!(place.run(&rerun, payload()), ending).0.completed();
}

#[tokio::test]
async fn s15_a_pod_that_ends_while_it_is_found_is_looked_at_soon() {
    let place = Place::new().await.with(|config, _| config.check_interval = Span(Duration::from_secs(3_600)));
    let pod = abandoned(&place).await;
    let gate = Arc::new(Semaphore::new(0));
    place.cluster.fault(Fault { verb: "create", resource: "secrets", times: 1, how: How::Hold(Arc::clone(&gate)) });
    let second = attempt(1);
    let ending = async {
        place.cluster.wait_until("it was found", |cluster| cluster.count_calls("create", "secrets") == 1).await;
        place.cluster.terminate(&pod, "task", 0, "Completed");
        gate.add_permits(1);
    };
    let payload = json!({ "image": "registry/tool:1", "secretEnv": { "PASSWORD": "canary-of-the-task" } });
    let (ran, ()) = tokio::join!(place.run(&second, payload), ending);
    ran.completed();
}

#[tokio::test]
async fn a_worker_that_stops_leaves_its_pod_to_the_next_attempt() {
    let place = Place::new().await;
    let first = attempt(0);
    let ran = place.run_while(&first, payload(), async |cluster, pod| {
        cluster.schedule(pod, "node-1");
        cluster.running(pod);
        first.logged("it is running").await;
        first.cancel(Duration::from_secs(60));
    });
    let RunResult::Ran(Err(_)) = ran.await else { panic!("it has not ended") };
    let second = attempt(1);
    let ran = place.run_while(&second, payload(), async |cluster, pod| {
        second.logged("it is running").await;
        cluster.terminate(pod, "task", 0, "Completed");
    });
    ran.await.completed();
    assert_eq!(place.cluster.count_calls("create", "pods"), 1);
}

#[tokio::test]
async fn a_pod_of_an_earlier_attempt_that_is_being_deleted_ends_before_the_next_one_starts() {
    let place = Place::new().await;
    let first = abandoned(&place).await;
    place.cluster.keep_deleted(true);
    let client = reqwest::Client::new();
    let url = format!("{}/api/v1/namespaces/{NAMESPACE}/pods/{first}", place.cluster.url());
    let deleted = client.delete(url).bearer_auth(crate::support::cluster::TOKEN).send().await;
    deleted.and_then(reqwest::Response::error_for_status).expect("it is deleted");
    let second = attempt(1);
    let ran = place.run_while(&second, payload(), async |cluster, _| {
        cluster.wait_until("it was deleted once more", |cluster| cluster.count_calls("delete", "pods") >= 2).await;
        assert_eq!(cluster.pods().len(), 1);
        cluster.vanish(&first);
        let next = cluster.wait_for_pod(|pod| name(pod) != first).await;
        succeed(cluster, name(&next));
    });
    ran.await.completed();
}

#[tokio::test]
async fn a_pod_of_the_same_name_that_is_not_the_tasks_is_left_alone() {
    let (place, bench) = (Place::new().await, Bench::new());
    let run = place.run_while(&bench, payload(), async |cluster, pod| succeed(cluster, pod));
    run.await.completed();
    let pod = place.cluster.calls().into_iter().find(|call| call.verb == "create").expect("it was made").body;
    let mut foreign = pod.clone();
    foreign["metadata"]["labels"] = json!({});
    let client = reqwest::Client::new();
    let url = format!("{}/api/v1/namespaces/{NAMESPACE}/pods", place.cluster.url());
    let call = client
        .post(url)
        .bearer_auth(crate::support::cluster::TOKEN)
        .header("content-type", "application/json")
        .body(foreign.to_string());
    call.send().await.and_then(reqwest::Response::error_for_status).expect("it is made");
    let why = failed(place.run(&Bench::new(), payload()).await, ExecuteFailure::Failed);
    assert!(why.contains("that is not of this task"), "{why}");
    assert_eq!(place.cluster.pods().len(), 1);
}

#[tokio::test]
async fn e4_a_dollar_sign_reaches_the_container_as_it_stands_in_the_payload() {
    let (place, bench) = (Place::new().await, Bench::new());
    let payload = json!({
        "image": "registry/tool:1", "command": ["sh", "-c", "echo $(RUN_ID) $$ $HOME"], "env": { "A": "$(TASK_ID)", "B": "$" },
    });
    let mut container = Value::Null;
    let ran = place.run_while(&bench, payload, async |cluster, pod| {
        container = cluster.pod(pod).expect("it is there")["spec"]["containers"][0].take();
        succeed(cluster, pod);
    });
    ran.await.completed();
    // Kubernetes replaces `$(NAME)`, and each `$$` by `$`.
    assert_eq!(container["command"][2], "echo $$(RUN_ID) $$$$ $$HOME");
    let env = container["env"].as_array().expect("variables");
    for (name, value) in [("A", "$$(TASK_ID)"), ("B", "$$")] {
        assert!(env.contains(&json!({ "name": name, "value": value })), "{name}: {env:?}");
    }
}

#[tokio::test]
async fn e7_the_role_of_the_example_allows_what_the_handler_does_and_no_more() {
    let place = Place::new().await;
    let payload = json!({ "image": "registry/tool:1", "secretEnv": { "PASSWORD": "canary-of-the-task" } });
    for code in [0, 3] {
        let bench = Bench::new();
        let ran = place.run_while(&bench, payload.clone(), async |cluster, pod| {
            cluster.wait_until("it is watched", |cluster| cluster.count_calls("watch", "pods") > 0).await;
            cluster.schedule(pod, "node-1");
            cluster.running(pod);
            cluster.terminate(pod, "task", code, "Error");
        });
        ran.await;
    }
    assert_eq!(place.cluster.used_rights(), rights_of_role("worker-role.yaml"));
}

#[tokio::test]
async fn a_template_gets_the_values_of_the_payload_and_its_own_parts_stay() {
    let template = "metadata:\n  labels: { team: {{ payload.parameters.team }} }\nspec:\n  serviceAccountName: builder\n  \
        containers:\n  - { name: proxy, image: 'proxy:1' }\n  - name: task\n    image: 'default:1'\n    env: [{ name: HOME, value: /home }]\n";
    let place = Place::new().await.with(|config, folder| {
        let path = folder.path().join("template.yaml");
        std::fs::write(&path, template).expect("it is written");
        config.template = Some(File(path));
    });
    let bench = Bench::new();
    let mut seen = Value::Null;
    let payload = json!({ "parameters": { "team": "a}, {b: c" }, "env": { "A": "b" } });
    // Kubernetes refuses such a label; the stand-in as well.
    let why = failed(place.run(&bench, payload).await, ExecuteFailure::Failed);
    assert!(why.contains("422"), "{why}");
    let payload = json!({ "parameters": { "team": "blue" }, "env": { "A": "b" } });
    let bench = Bench::new();
    let ran = place.run_while(&bench, payload, async |cluster, pod| {
        seen = cluster.pod(pod).expect("it is there");
        cluster.schedule(pod, "node-1");
        cluster.running(pod);
        cluster.terminate(pod, "task", 0, "Completed");
    });
    ran.await.completed();
    assert_eq!(
        (&seen["spec"]["serviceAccountName"], &seen["metadata"]["labels"]["team"]),
        (&json!("builder"), &json!("blue"))
    );
    let own = &seen["spec"]["containers"][1];
    let env = own["env"].as_array().expect("variables");
    assert_eq!((&own["name"], &own["image"]), (&json!("task"), &json!("default:1")));
    assert!(
        env.contains(&json!({ "name": "HOME", "value": "/home" }))
            && env.contains(&json!({ "name": "A", "value": "b" }))
    );
    let refused = place.run(&Bench::new(), json!({})).await.malformed();
    assert!(refused[0].contains("undefined value"), "{refused:?}");
}

#[tokio::test]
async fn artifacts_come_from_a_volume_that_the_pod_shares_with_the_worker() {
    let bench = Bench::new();
    let volume = bench.workdir().parent().expect("a folder").to_owned();
    let source = serde_json::from_value(json!({ "persistentVolumeClaim": { "claimName": "work" } })).expect("a volume");
    let place =
        Place::new().await.with(|config, _| config.work_volume = Some(WorkVolume { path: File(volume), source }));
    let payload = json!({
        "image": "registry/tool:1", "artifacts": [{ "type": "file", "path": "out.txt", "name": "public/out.txt" }],
    });
    let mut seen = Value::Null;
    let ran = place.run_while(&bench, payload.clone(), async |cluster, pod| {
        seen = cluster.pod(pod).expect("it is there");
        succeed(cluster, pod);
    });
    ran.await.completed();
    let own = &seen["spec"]["containers"][0];
    assert_eq!(
        (&own["volumeMounts"][0]["mountPath"], &own["volumeMounts"][0]["subPath"]),
        (&json!("/task"), &json!("task"))
    );
    assert_eq!(seen["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"], "work");
    assert!(!bench.context.artifacts().is_empty());
    let place = Place::new().await;
    let refused = place.run(&Bench::new(), payload).await.malformed();
    assert!(refused[0].contains("work_volume"), "{refused:?}");
}

#[tokio::test]
async fn e6_a_pod_that_leaves_its_files_in_the_directory_of_a_claim_is_not_handed_over() {
    let first = attempt(0);
    let volume = File(first.workdir().parent().expect("a folder").to_owned());
    let source = serde_json::from_value(json!({ "persistentVolumeClaim": { "claimName": "work" } })).expect("a volume");
    let place = Place::new().await.with(|config, _| config.work_volume = Some(WorkVolume { path: volume, source }));
    let payload =
        json!({ "image": "registry/tool:1", "artifacts": [{ "type": "file", "path": "a", "name": "public/a" }] });
    let ran = place.run_while(&first, payload, async |cluster, pod| {
        cluster.schedule(pod, "node-1");
        cluster.running(pod);
        first.logged("it is running").await;
        first.cancel(Duration::from_secs(60));
    });
    let RunResult::Ran(Err(_)) = ran.await else { panic!("it has not ended") };
    assert_eq!(place.cluster.pods(), Vec::<Value>::new());
}

#[tokio::test]
async fn a_payload_that_makes_no_pod_is_malformed() {
    let place = Place::new().await;
    for (payload, words) in [
        (json!({}), "there is no image"),
        (
            json!({ "image": "a", "maxRunTime": 4_000_000_000_u32 }),
            "payload/maxRunTime: the worker allows at most 86400 s",
        ),
        (json!({ "image": "a", "privileged": true }), "privileged"),
    ] {
        let refused = place.run(&Bench::new(), payload).await.malformed().join("; ");
        assert!(refused.contains(words), "{refused}");
    }
    assert_eq!(place.cluster.calls().len(), 0);
}

#[tokio::test]
async fn pods_that_have_ended_and_whose_worker_is_gone_are_removed() {
    let (place, bench) = (Place::new().await, Bench::new());
    let handler = erase(Staged(place.handler()));
    tokio::select! {
        ended = bench.run(&*handler, payload()) => panic!("{ended:?}"),
        pod = place.cluster.wait_for_pod(|_| true) => {
            place.cluster.schedule(name(&pod), "node-1");
            place.cluster.running(name(&pod));
        }
    }
    drop(handler);
    let pod = place.cluster.pods().remove(0);
    place.cluster.terminate(name(&pod), "task", 0, "Completed");
    place.cluster.set_skew(SignedDuration::from_hours(25));
    // Any task of another worker with this handler.
    let other = Bench::new().context.task().clone();
    let other =
        Bench::new().of(TaskInfo { run: Run { task: TaskId::parse("other").expect("an id"), run: 0 }, ..other });
    let handler = erase(Staged(place.handler()));
    let removing = place.cluster.wait_until("it is removed", |cluster| cluster.pod(name(&pod)).is_none());
    tokio::select! {
        ended = other.run(&*handler, payload()) => panic!("{ended:?}"),
        () = removing => {}
    }
}

#[tokio::test]
async fn the_handler_says_where_its_pods_are() {
    let place = Place::new().await;
    assert_eq!(Arc::new(place.handler()).describe(), "kubernetes (namespace builds)");
}
