//! The worker as its users run it: a process, a queue, and a cluster.

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use journeyman_domain::id::TaskId;
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use crate::support::cluster::{Cluster, Fault, How, NAMESPACE};
use crate::support::task_queue::{CLIENT_ID, TOKEN, TaskQueue, states};

const QUEUE: &str = "test/pods";

struct Place {
    folder: tempfile::TempDir,
    cluster: Cluster,
    queue: TaskQueue,
}

impl Place {
    async fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let cluster = Cluster::start().await;
        let queue = TaskQueue::start(folder.path(), |_| {}).await;
        cluster.kubeconfig(folder.path());
        Self { folder, cluster, queue }
    }

    /// A worker with one slot. It is killed when it is dropped.
    fn worker(&self) -> Child {
        self.worker_with(&[])
    }

    fn worker_with(&self, variables: &[(&str, &str)]) -> Child {
        let config = format!(
            "[worker]\nid = \"pods\"\ncapacity = 1\nwork_dir = \"work\"\nstatus_poll_interval = \"1s\"\n\
             [source.ci]\nkind = \"taskcluster\"\nroot_url = \"{}\"\ntask_queue = \"{QUEUE}\"\nclient_id = \"{CLIENT_ID}\"\n\
             access_token_file = \"env:TEST_TOKEN\"\nhandler = \"pods\"\n\
             [handler.pods]\nkind = \"kubernetes\"\nnamespace = \"{NAMESPACE}\"\nkubeconfig = \"kubeconfig\"\n",
            self.queue.service.root_url()
        );
        std::fs::write(self.folder.path().join("journeyman.toml"), config).expect("it is written");
        let mut command = Command::new(env!("CARGO_BIN_EXE_journeyman"));
        command.args(["worker", "--config", "journeyman.toml"]).current_dir(self.folder.path());
        command.env("TEST_TOKEN", TOKEN).env("JOURNEYMAN__HOST__METADATA_SERVICE", "off");
        command.envs(variables.iter().copied());
        command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true).spawn().expect("it starts")
    }

    async fn create(&self, image: &str) -> TaskId {
        self.queue.create(QUEUE, json!({ "image": image })).await
    }

    async fn log(&self, task: &TaskId, run: u32) -> String {
        String::from_utf8(self.queue.content(task, run, "public/logs/live_backing.log").await).expect("text")
    }
}

async fn end(worker: &mut Child) -> ExitStatus {
    let ended = tokio::time::timeout(Duration::from_secs(60), worker.wait()).await;
    ended.expect("it ends in time").expect("it is waited for")
}

fn name(pod: &Value) -> &str {
    pod["metadata"]["name"].as_str().expect("a name")
}

fn image(pod: &Value) -> &str {
    pod["spec"]["containers"][0]["image"].as_str().expect("an image")
}

fn run(cluster: &Cluster, pod: &str) {
    cluster.schedule(pod, "node-1");
    cluster.running(pod);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_pods_run_at_once_through_one_slot() {
    let place = Place::new().await;
    let mut tasks = Vec::new();
    for number in 0..20 {
        tasks.push(place.create(&format!("tool:{number}")).await);
    }
    let _worker = place.worker();
    place.cluster.wait_until("all have a pod", |cluster| cluster.pods().len() == 20).await;
    for pod in place.cluster.pods() {
        run(&place.cluster, name(&pod));
        place.cluster.log(name(&pod), "task", &format!("this is {}", image(&pod)));
        let code = if image(&pod) == "tool:7" { 3 } else { 0 };
        place.cluster.terminate(name(&pod), "task", code, "Completed");
    }
    for (number, task) in tasks.iter().enumerate() {
        let status = place.queue.resolved(task).await;
        assert_eq!(status["state"], if number == 7 { "failed" } else { "completed" }, "{status}");
        let log = place.log(task, 0).await;
        assert!(log.contains(&format!("this is tool:{number}\n")), "{log}");
    }
    place.cluster.wait_until("no pod is left", |cluster| cluster.pods().is_empty()).await;
    assert_eq!(place.cluster.count_calls("create", "pods"), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_is_canceled_at_the_queue_ends_its_pod() {
    let place = Place::new().await;
    let task = place.create("tool:1").await;
    let _worker = place.worker();
    let pod = place.cluster.wait_for_pod(|_| true).await;
    run(&place.cluster, name(&pod));
    place.queue.api.cancel_task(&task).await.expect("it is canceled");
    place.cluster.wait_until("the pod is removed", |cluster| cluster.pods().is_empty()).await;
    assert_eq!(place.queue.resolved(&task).await["state"], "exception");
}

/// Runs so many tasks in pods that succeed, by a worker that is killed at a point, and then by another one.
async fn killed_at(point: &str, count: usize) {
    let place = Place::new().await;
    let mut tasks = Vec::new();
    for number in 0..count {
        tasks.push(place.create(&format!("tool:{number}")).await);
    }
    let mut worker = place.worker_with(&[("JOURNEYMAN_CRASH_POINT", point)]);
    place.cluster.wait_until("all have a pod", |cluster| cluster.pods().len() == count).await;
    for pod in place.cluster.pods() {
        run(&place.cluster, name(&pod));
        place.cluster.terminate(name(&pod), "task", 0, "Completed");
    }
    assert_eq!(end(&mut worker).await.signal(), Some(9), "killed at {point}");
    assert!(!place.cluster.pods().is_empty(), "{point}");
    let _worker = place.worker();
    for task in &tasks {
        assert_eq!(place.queue.resolved(task).await["state"], "completed");
    }
    place.cluster.wait_until("no pod is left", |cluster| cluster.pods().is_empty()).await;
    assert_eq!(place.cluster.count_calls("create", "pods"), count, "{point}");
}

#[tokio::test(flavor = "multi_thread")]
async fn e1_a_worker_that_is_killed_before_its_outcomes_are_stored_runs_no_pod_twice() {
    killed_at("after-upload:2", 6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn e1_a_pod_that_a_killed_worker_has_reported_is_removed_by_the_next_process() {
    killed_at("before-discard", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn e1_a_removal_that_fails_is_tried_again_after_the_report() {
    let place = Place::new().await;
    let task = place.create("tool:1").await;
    let _worker = place.worker();
    let pod = place.cluster.wait_for_pod(|_| true).await;
    let how = How::Status { code: 500, message: "not now".to_owned() };
    place.cluster.fault(Fault { verb: "delete", resource: "pods", times: 2, how });
    run(&place.cluster, name(&pod));
    place.cluster.terminate(name(&pod), "task", 0, "Completed");
    assert_eq!(place.queue.resolved(&task).await["state"], "completed");
    place.cluster.wait_until("the pod is removed", |cluster| cluster.pods().is_empty()).await;
    assert_eq!(place.cluster.count_calls("delete", "pods"), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn e3_a_task_that_was_canceled_while_its_worker_was_dead_loses_its_pod_at_the_next_start() {
    let place = Place::new().await;
    let (canceled, kept) = (place.create("tool:1").await, place.create("tool:2").await);
    let mut worker = place.worker();
    place.cluster.wait_until("both have a pod", |cluster| cluster.pods().len() == 2).await;
    place.cluster.pods().iter().for_each(|pod| run(&place.cluster, name(pod)));
    worker.kill().await.expect("it is killed");
    place.queue.api.cancel_task(&canceled).await.expect("it is canceled");
    let _worker = place.worker();
    place.cluster.wait_until("one pod is removed", |cluster| cluster.pods().len() == 1).await;
    let left = place.cluster.pods().remove(0);
    assert_eq!(image(&left), "tool:2");
    place.cluster.terminate(name(&left), "task", 0, "Completed");
    assert_eq!(place.queue.resolved(&kept).await["state"], "completed");
    assert_eq!(place.cluster.count_calls("create", "pods"), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn e6_a_worker_that_gets_term_leaves_its_pods_to_the_next_one() {
    let place = Place::new().await;
    let task = place.create("tool:1").await;
    let mut worker = place.worker();
    let pod = place.cluster.wait_for_pod(|_| true).await;
    run(&place.cluster, name(&pod));
    let pid = worker.id().and_then(|pid| rustix::process::Pid::from_raw(pid.cast_signed())).expect("it runs");
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it is signalled");
    assert_eq!(end(&mut worker).await.code(), Some(0));
    assert_eq!(states(&place.queue.status(&task).await), ["exception/worker-shutdown", "pending"]);
    let _worker = place.worker();
    place.cluster.terminate(name(&pod), "task", 0, "Completed");
    assert_eq!(place.queue.resolved(&task).await["state"], "completed");
    assert_eq!(place.cluster.count_calls("create", "pods"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_says_whether_the_pods_can_be_listed() {
    let place = Place::new().await;
    drop(place.worker());
    let doctor = async |folder: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_journeyman"));
        command.args(["doctor", "--config", "journeyman.toml"]).current_dir(folder).env("TEST_TOKEN", TOKEN);
        let output = command.env("JOURNEYMAN__HOST__METADATA_SERVICE", "off").output().await.expect("it runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let folder = place.folder.path();
    let found = doctor(folder).await;
    assert!(found.contains("pods: cluster") && found.contains("the pods of namespace builds can be listed"), "{found}");
    std::fs::write(folder.join("kubernetes-token"), "another").expect("it is written");
    let found = doctor(folder).await;
    assert!(found.contains("cannot list the pods of namespace builds: 401"), "{found}");
}
