//! Whole worker processes on a host with a termination notice.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use journeyman_domain::id::TaskId;
use rustix::fs::{CWD, Mode, mkfifoat};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStderr, Command};

use crate::host::metadata_service::{Cloud, Metadata, STEP_TIMEOUT};
use crate::support::task_queue::{CLIENT_ID, TOKEN, TaskQueue, shell};

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

    fn up(&self, task: &TaskId) -> PathBuf {
        self.folder.path().join(format!("{task}.up"))
    }

    /// Waits until the payload runs: a claim that has not started would be released.
    async fn wait_started(&self, task: &TaskId) {
        let up = self.up(task);
        let running = async {
            while !up.exists() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(STEP_TIMEOUT, running).await.expect("the payload runs");
    }

    /// The worker closes its long poll when it claims nothing more.
    async fn wait_no_long_poll(&self) {
        let closed = async {
            while self.queue.service.long_polls() > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(STEP_TIMEOUT, closed).await.expect("the worker closes its poll");
    }

    async fn open_gate(&self) {
        let opened = tokio::fs::write(self.folder.path().join("gate"), "go on\n");
        tokio::time::timeout(STEP_TIMEOUT, opened).await.expect("the task waits").expect("it is a pipe");
    }

    async fn runs(&self, task: &TaskId) -> Vec<Run> {
        let status = self.queue.api.task_status(task).await.expect("a status");
        let text = |run: &Value, key: &str| run.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let runs = status["runs"].as_array().expect("runs");
        let run = |run: &Value| Run {
            state: text(run, "state"),
            reason: text(run, "reasonResolved"),
            resolved: text(run, "resolved").parse().ok(),
        };
        runs.iter().map(run).collect()
    }

    fn worker(&self, id: &str, host: &str) -> Worker {
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
        Worker::start(&home)
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

/// Killed when dropped.
struct Worker {
    child: Child,
    lines: Lines<BufReader<ChildStderr>>,
    log: String,
}

impl Worker {
    fn start(home: &Path) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_journeyman"))
            .arg("worker")
            .current_dir(home)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the binary starts");
        let lines = BufReader::new(child.stderr.take().expect("stderr is piped")).lines();
        Self { child, lines, log: String::new() }
    }

    /// The next log line with these words.
    async fn wait_for_log(&mut self, words: &str) -> String {
        let line = async {
            loop {
                let line = self.lines.next_line().await.expect("it is UTF-8");
                let line = line.unwrap_or_else(|| panic!("it exited without logging {words:?}:\n{}", self.log));
                self.log.push_str(&line);
                self.log.push('\n');
                if line.contains(words) {
                    return line;
                }
            }
        };
        tokio::time::timeout(STEP_TIMEOUT, line).await.expect("the line is logged in time")
    }

    async fn runs(&mut self, tasks: usize) {
        for _ in 0..tasks {
            self.wait_for_log("\"claimed\"").await;
        }
    }

    async fn exits_with(&mut self, code: i32) {
        let rest = async {
            while let Some(line) = self.lines.next_line().await.expect("it is UTF-8") {
                self.log.push_str(&line);
                self.log.push('\n');
            }
            self.child.wait().await.expect("it ends")
        };
        let status = tokio::time::timeout(STEP_TIMEOUT, rest).await.expect("it ends in time");
        assert_eq!(status.code(), Some(code), "{}", self.log);
        assert!(!self.log.contains(TOKEN) && !self.log.contains("token-1=="), "no token is logged:\n{}", self.log);
    }
}

/// Four tasks run at the notice; all are released before the deadline, and another worker completes them.
async fn releases_in_time(provider: &str, host: &str, notice: impl AsyncFnOnce(&mut Worker) -> Timestamp) {
    let setup = Setup::start(Duration::from_secs(2)).await;
    let mut tasks = Vec::new();
    for script in [ENDLESS, ENDLESS, STUBBORN, STUBBORN] {
        tasks.push(setup.create(script).await);
    }
    let mut worker = setup.worker("first", host);
    worker.runs(tasks.len()).await;
    for task in &tasks {
        setup.wait_started(task).await;
    }
    let deadline = notice(&mut worker).await;
    let line = worker.wait_for_log("this host terminates").await;
    assert!(line.contains(&format!("\"provider\":\"{provider}\"")), "{line}");
    worker.exits_with(12).await;
    assert!(Timestamp::now() < deadline, "the worker exits before the host");
    for task in &tasks {
        setup.assert_released(task, deadline).await;
    }
    let mut other = setup.worker("other", "metadata_service = \"off\"");
    for _ in &tasks {
        other.wait_for_log("\"outcome\":\"completed\"").await;
    }
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
    async fn execute(&self, script: &str) -> (TaskId, Worker) {
        let task = self.setup.create(script).await;
        let mut worker = self.setup.worker("first", &self.host);
        worker.runs(1).await;
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
    worker.wait_for_log("this host terminates").await;
    host.setup.open_gate().await;
    worker.exits_with(12).await;
    let runs = host.setup.runs(&task).await;
    assert_eq!((runs.len(), runs[0].state.as_str()), (1, "completed"));
    assert!(Timestamp::now() + SignedDuration::from_secs(300) < deadline, "the worker does not wait for the deadline");
}

#[tokio::test]
async fn a_termination_file_without_a_time_means_at_once_and_is_logged() {
    let host = FileSetup::start(Duration::from_secs(1), "").await;
    let (task, mut worker) = host.execute(ENDLESS).await;
    replace(&host.file, "{\"action\": \"terminate\"}");
    let line = worker.wait_for_log("contains no RFC 3339 time").await;
    assert!(line.contains("WARN") && line.contains("terminate-at"), "{line}");
    worker.wait_for_log("terminates soon").await;
    worker.exits_with(12).await;
    // The worker's open poll may claim the task again: that run is released as well.
    let runs = host.setup.runs(&task).await;
    let (last, before) = runs.split_last().expect("a run");
    assert_eq!(last.state, "pending");
    let back = |run: &Run| (run.state.as_str(), run.reason.as_str()) == ("exception", "worker-shutdown");
    assert!(!before.is_empty() && before.iter().all(back), "{}", worker.log);
}

/// The worker's long poll is open at the notice; a task that it claims afterwards is not started.
#[tokio::test]
async fn b12_no_task_that_is_created_after_the_notice_is_claimed() {
    let host = FileSetup::start(Duration::from_secs(20), "").await;
    let (running, mut worker) = host.execute(ENDLESS).await;
    let deadline = host.terminate_in(20);
    worker.wait_for_log("this host terminates").await;
    host.setup.wait_no_long_poll().await;
    let late = host.setup.create(ENDLESS).await;
    worker.exits_with(12).await;
    host.setup.assert_released(&running, deadline).await;
    assert_eq!(host.setup.runs(&late).await[0].state, "pending");
    assert_eq!(worker.log.matches("\"claimed\"").count(), 1, "{}", worker.log);
}

#[tokio::test]
async fn a_worker_that_starts_after_the_notice_exits() {
    let host = FileSetup::start(Duration::from_secs(1), "").await;
    host.terminate_in(600);
    let mut worker = host.setup.worker("first", &host.host);
    worker.exits_with(12).await;
}

#[tokio::test]
async fn an_invalid_endpoint_is_rejected_at_the_start() {
    let setup = Setup::start(Duration::from_secs(1)).await;
    let mut worker =
        setup.worker("worker", "metadata_service = \"aws\"\nmetadata_endpoint = \"https://169.254.169.254\"");
    worker.exits_with(30).await;
    assert!(worker.log.contains("metadata_endpoint"), "{}", worker.log);
}
