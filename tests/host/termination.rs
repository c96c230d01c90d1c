//! Whole worker processes on a host with a termination notice.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use journeyman_domain::id::TaskId;
use rustix::fs::{CWD, Mode, mkfifoat};
use serde_json::Value;

use crate::host::metadata_service::{Cloud, Metadata};
use crate::support::process::Process;
use crate::support::task_queue::{CLIENT_ID, TOKEN, TaskQueue, shell};
use crate::support::{until, within};

const TASK_QUEUE: &str = "test/spot";
/// Exits only in its second run.
const ENDLESS: &str = ": >\"$UP\"; [ \"$RUN_ID\" = 0 ] && exec sleep 600; exit 0";
/// The same, and ignores TERM.
const STUBBORN: &str = "trap '' TERM; : >\"$UP\"; while [ \"$RUN_ID\" = 0 ]; do sleep 1; done; exit 0";

/// Exits when the gate is opened.
const GATED: &str = ": >\"$UP\"; read line <\"$GATE\"";

struct Setup {
    queue: TaskQueue,
    folder: tempfile::TempDir,
}

struct Run {
    state: String,
    reason: String,
    resolved: Option<Timestamp>,
}

impl Setup {
    async fn start(long_poll: Duration) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let queue = TaskQueue::start(folder.path(), |config| config.long_poll = long_poll).await;
        mkfifoat(CWD, folder.path().join("gate"), Mode::RUSR | Mode::WUSR).expect("a named pipe");
        Self { queue, folder }
    }

    /// The script creates the file `$UP` when it runs.
    async fn create(&self, script: &str) -> TaskId {
        let script = format!("UP='{0}'/$TASK_ID.up; GATE='{0}'/gate; {script}", self.folder.path().display());
        self.queue.create(TASK_QUEUE, shell(&script)).await
    }

    /// Waits until the payload runs: a claim that has not started would be released.
    async fn wait_started(&self, task: &TaskId) {
        let up = self.folder.path().join(format!("{task}.up"));
        until("the payload runs", async || up.exists()).await;
    }

    /// The worker closes its long poll when it claims nothing more.
    async fn wait_no_long_poll(&self) {
        until("the worker closes its poll", async || self.queue.service.long_polls() == 0).await;
    }

    async fn open_gate(&self) {
        let opened = tokio::fs::write(self.folder.path().join("gate"), "go on\n");
        within("the task waits", opened).await.expect("it is a pipe");
    }

    async fn runs(&self, task: &TaskId) -> Vec<Run> {
        let status = self.queue.status(task).await;
        let text = |run: &Value, key: &str| run.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let runs = status["runs"].as_array().expect("runs");
        let run = |run: &Value| Run {
            state: text(run, "state"),
            reason: text(run, "reasonResolved"),
            resolved: text(run, "resolved").parse().ok(),
        };
        runs.iter().map(run).collect()
    }

    fn worker(&self, id: &str, host: &str) -> Process {
        let home = self.folder.path().join(id);
        std::fs::create_dir_all(&home).expect("a folder");
        let config = format!(
            "[host]\n{host}\n[worker]\nid = \"{id}\"\ncapacity = 8\nwork_dir = \"work\"\ntermination_grace = \"1s\"\n\
             [source.ci]\nkind = \"taskcluster\"\nroot_url = \"{}\"\ntask_queue = \"{TASK_QUEUE}\"\n\
             client_id = \"{CLIENT_ID}\"\naccess_token_file = \"token\"\n",
            self.queue.service.root_url()
        );
        std::fs::write(home.join("journeyman.toml"), config).expect("it can be written");
        std::fs::write(home.join("token"), TOKEN).expect("it can be written");
        let mut command = Command::new(env!("CARGO_BIN_EXE_journeyman"));
        command.arg("worker").current_dir(home).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        Process::of(command)
    }

    /// The first run was released before the deadline, and the second is pending.
    async fn assert_released(&self, task: &TaskId, deadline: Timestamp) {
        let runs = self.runs(task).await;
        let first = &runs[0];
        assert_eq!((first.state.as_str(), first.reason.as_str()), ("exception", "worker-shutdown"));
        assert!(first.resolved.is_some_and(|at| at < deadline), "{:?} is after {deadline}", first.resolved);
        assert_eq!((runs.len(), runs[1].state.as_str()), (2, "pending"));
    }
}

async fn exits_with(worker: Process, code: i32) -> String {
    let ended = worker.ends().await;
    assert_eq!(ended.code(), Some(code), "{}", ended.log);
    assert!(!ended.log.contains(TOKEN) && !ended.log.contains("token-1=="), "no token is logged:\n{}", ended.log);
    ended.log
}

/// Four tasks run at the notice; all are released before the deadline, and another worker completes them.
async fn releases_in_time(provider: &str, host: &str, notice: impl AsyncFnOnce(&mut Process) -> Timestamp) {
    let setup = Setup::start(Duration::from_secs(2)).await;
    let mut tasks = Vec::new();
    for script in [ENDLESS, ENDLESS, STUBBORN, STUBBORN] {
        tasks.push(setup.create(script).await);
    }
    let mut worker = setup.worker("first", host);
    worker.line("\"claimed\"", tasks.len()).await;
    for task in &tasks {
        setup.wait_started(task).await;
    }
    let deadline = notice(&mut worker).await;
    let line = worker.line("this host terminates", 1).await;
    assert!(line.contains(&format!("\"provider\":\"{provider}\"")), "{line}");
    exits_with(worker, 12).await;
    assert!(Timestamp::now() < deadline, "the worker exits before the host");
    for task in &tasks {
        setup.assert_released(task, deadline).await;
    }
    let mut other = setup.worker("other", "metadata_service = \"off\"");
    other.line("\"outcome\":\"completed\"", tasks.len()).await;
    for task in &tasks {
        let runs = setup.runs(task).await;
        assert_eq!((runs.len(), runs[1].state.as_str()), (2, "completed"));
    }
}

#[tokio::test]
async fn a_worker_on_google_releases_in_time() {
    let service = Metadata::start(Cloud::Google).await;
    // The provider is detected.
    let host = format!("metadata_endpoint = \"{}\"\non_termination_notice = \"release\"", service.url());
    releases_in_time("gcp", &host, async |_| {
        service.wait_until_requested("preempted?wait_for_change", 1).await;
        service.change(|state| state.preempted = "TRUE");
        service.in_seconds(30)
    })
    .await;
}

#[tokio::test]
async fn a_worker_with_a_termination_file_releases_in_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("terminate-at");
    let host = format!("metadata_service = \"off\"\ntermination_file = \"{}\"", path.display());
    releases_in_time("file", &host, async |_| {
        let time = Timestamp::now() + SignedDuration::from_secs(17);
        replace(&path, time.to_string());
        time
    })
    .await;
}

/// Writes a file that another process may read at any time.
pub fn replace(path: &Path, content: impl AsRef<[u8]>) {
    let new = path.with_extension("new");
    std::fs::write(&new, content).expect("it can be written");
    std::fs::rename(&new, path).expect("it can be renamed");
}

/// A worker with a termination file.
struct FileSetup {
    setup: Setup,
    file: PathBuf,
    host: String,
}

impl FileSetup {
    async fn start(long_poll: Duration, keys: &str) -> Self {
        let setup = Setup::start(long_poll).await;
        let file = setup.folder.path().join("terminate-at");
        let host = format!("metadata_service = \"off\"\ntermination_file = \"{}\"\n{keys}", file.display());
        Self { setup, file, host }
    }

    /// Starts a worker that executes a task.
    async fn execute(&self, script: &str) -> (TaskId, Process) {
        let task = self.setup.create(script).await;
        let mut worker = self.setup.worker("first", &self.host);
        worker.says("\"claimed\"").await;
        self.setup.wait_started(&task).await;
        (task, worker)
    }

    fn terminate_in(&self, seconds: i64) -> Timestamp {
        let time = Timestamp::now() + SignedDuration::from_secs(seconds);
        replace(&self.file, time.to_string());
        time
    }
}

#[tokio::test]
async fn a_task_that_can_finish_before_the_deadline_does_and_the_worker_exits_early() {
    let host = FileSetup::start(Duration::from_secs(1), "").await;
    let (task, mut worker) = host.execute(GATED).await;
    let deadline = host.terminate_in(600);
    worker.says("this host terminates").await;
    host.setup.open_gate().await;
    exits_with(worker, 12).await;
    let runs = host.setup.runs(&task).await;
    assert_eq!((runs.len(), runs[0].state.as_str()), (1, "completed"));
    assert!(Timestamp::now() + SignedDuration::from_secs(300) < deadline, "the worker does not wait for the deadline");
}

#[tokio::test]
async fn a_termination_file_without_a_time_means_at_once_and_is_logged() {
    let host = FileSetup::start(Duration::from_secs(1), "").await;
    let (task, mut worker) = host.execute(ENDLESS).await;
    replace(&host.file, "{\"action\": \"terminate\"}");
    let line = worker.line("contains no RFC 3339 time", 1).await;
    assert!(line.contains("WARN") && line.contains("terminate-at"), "{line}");
    worker.says("terminates soon").await;
    let log = exits_with(worker, 12).await;
    // The worker's open poll may claim the task again: that run is released as well.
    let runs = host.setup.runs(&task).await;
    let (last, before) = runs.split_last().expect("a run");
    assert_eq!(last.state, "pending");
    let back = |run: &Run| (run.state.as_str(), run.reason.as_str()) == ("exception", "worker-shutdown");
    assert!(!before.is_empty() && before.iter().all(back), "{log}");
}

/// The worker's long poll is open at the notice; a task that it claims afterwards is not started.
#[tokio::test]
async fn b12_no_task_that_is_created_after_the_notice_is_claimed() {
    let host = FileSetup::start(Duration::from_secs(20), "").await;
    let (running, mut worker) = host.execute(ENDLESS).await;
    let deadline = host.terminate_in(20);
    worker.says("this host terminates").await;
    host.setup.wait_no_long_poll().await;
    let late = host.setup.create(ENDLESS).await;
    let log = exits_with(worker, 12).await;
    host.setup.assert_released(&running, deadline).await;
    assert_eq!(host.setup.runs(&late).await[0].state, "pending");
    assert_eq!(log.matches("\"claimed\"").count(), 1, "{log}");
}

#[tokio::test]
async fn a_worker_that_starts_after_the_notice_exits() {
    let host = FileSetup::start(Duration::from_secs(1), "").await;
    host.terminate_in(600);
    let worker = host.setup.worker("first", &host.host);
    exits_with(worker, 12).await;
}

#[tokio::test]
async fn an_invalid_endpoint_is_rejected_at_the_start() {
    let setup = Setup::start(Duration::from_secs(1)).await;
    let worker = setup.worker("worker", "metadata_service = \"aws\"\nmetadata_endpoint = \"https://169.254.169.254\"");
    let log = exits_with(worker, 30).await;
    assert!(log.contains("metadata_endpoint"), "{log}");
}
