//! The measuring side: starts processes, creates tasks, and counts what became of each.

use std::collections::HashSet;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use base64::Engine as _;
use jiff::{SignedDuration, Timestamp};
use journeyman::domain::id::TaskId;
use journeyman::source::taskcluster::Api;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::Done;
use crate::roles::{ACCESS_TOKEN, CLIENT_ID, QueueRole, Role, WorkerRole, api, now};

/// How long any one answer may take before the run is given up.
const PATIENCE: Duration = Duration::from_secs(90);
/// How many calls of ours are under way at once.
const CREATORS: usize = 64;
/// Threads of the processes that are measured, as many as `journeyman` itself uses.
pub(crate) const THREADS: usize = 2;
/// How many keep leases in a process that is a worker alone, as in `journeyman worker`, and of the loop that it is held against.
pub(crate) const WORKER_THREADS: usize = 1;

/// What a process has used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Usage {
    pub(crate) cpu: Duration,
    pub(crate) resident_kib: u64,
}

/// A process in one of the roles. Killed when it is dropped.
pub(crate) struct Process {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    pub(crate) fn start(role: &Role, log: &Path) -> Done<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("--role")
            .arg(serde_json::to_string(role)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::from(std::fs::File::create(log)?))
            .kill_on_drop(true)
            .spawn()?;
        let stdin = child.stdin.take().ok_or("it has a standard input")?;
        let stdout = child.stdout.take().ok_or("it has a standard output")?;
        Ok(Self { child, stdin, lines: BufReader::new(stdout).lines() })
    }

    /// The rest of the next line that begins with this word.
    pub(crate) async fn hear(&mut self, word: &str) -> Done<String> {
        let heard = async {
            while let Some(line) = self.lines.next_line().await? {
                if let Some(rest) = line.strip_prefix(word) {
                    return Ok(rest.trim().to_owned());
                }
            }
            Err(format!("a process ended and never said {word:?}").into())
        };
        timeout(PATIENCE, heard).await.map_err(|_| format!("a process did not say {word:?} in {PATIENCE:?}"))?
    }

    pub(crate) async fn tell(&mut self, word: &str) -> Done<()> {
        self.stdin.write_all(format!("{word}\n").as_bytes()).await?;
        Ok(self.stdin.flush().await?)
    }

    async fn ask(&mut self, word: &str) -> Done<String> {
        self.tell(word).await?;
        self.hear(word).await
    }

    pub(crate) async fn usage(&mut self) -> Done<Usage> {
        let [cpu, resident_kib] = numbers(&self.ask("usage").await?)?;
        Ok(Usage { cpu: Duration::from_nanos(cpu), resident_kib })
    }

    pub(crate) async fn counts(&mut self) -> Done<Value> {
        Ok(serde_json::from_str(&self.ask("counts").await?)?)
    }

    /// Until a counter has reached so many.
    pub(crate) async fn until(&mut self, counter: &str, count: u64) -> Done<()> {
        let reached = async {
            while self.counts().await?[counter].as_u64() < Some(count) {
                sleep(Duration::from_millis(20)).await;
            }
            Ok(())
        };
        timeout(PATIENCE, reached).await.map_err(|_| format!("a worker did not reach {count} {counter}"))?
    }

    pub(crate) async fn reclaims(&mut self) -> Done<[u64; 4]> {
        numbers(&self.ask("reclaims").await?)
    }

    /// Ends it and waits for that.
    pub(crate) async fn end(self) -> Done<()> {
        let Self { mut child, stdin, lines } = self;
        drop((stdin, lines));
        let status = timeout(PATIENCE, child.wait()).await.map_err(|_| "a process did not end")??;
        if status.success() { Ok(()) } else { Err(format!("a process ended with {status}").into()) }
    }
}

/// `journeyman worker` itself. Killed when it is dropped.
pub(crate) struct RealWorker {
    child: Child,
}

impl RealWorker {
    /// Starts it with a configuration of its own in a new folder.
    pub(crate) fn start(folder: &Path, azure: bool, root_url: &str, task_queues: &[String]) -> Done<Self> {
        let capacity = task_queues.len();
        let settings = format!("[host]\nmetadata_endpoint = \"http://127.0.0.1:9\"\n[worker]\ncapacity = {capacity}\n");
        Self::configured(folder, azure, root_url, task_queues, &settings)
    }

    /// Starts it with these settings, which end in the section of the worker.
    pub(crate) fn configured(
        folder: &Path,
        azure: bool,
        root_url: &str,
        task_queues: &[String],
        settings: &str,
    ) -> Done<Self> {
        let home = fresh(folder, "worker")?;
        let token = home.join("token");
        std::fs::write(&token, ACCESS_TOKEN)?;
        std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600))?;
        let work_dir = home.join("work");
        let mut config =
            format!("{settings}id = \"worker\"\ngroup = \"bench\"\nwork_dir = \"{}\"\n", work_dir.display());
        let protocol = if azure { "azure" } else { "claim-work" };
        for (number, task_queue) in task_queues.iter().enumerate() {
            config.push_str(&format!(
                "[source.q{number}]\nkind = \"taskcluster\"\ndialect = \"{protocol}\"\nroot_url = \"{root_url}\"\n\
                 task_queue = \"{task_queue}\"\nclient_id = \"{CLIENT_ID}\"\naccess_token_file = \"{}\"\n",
                token.display()
            ));
        }
        let file = home.join("journeyman.toml");
        std::fs::write(&file, config)?;
        let child = Command::new(env!("CARGO_BIN_EXE_journeyman"))
            .arg("worker")
            .arg("--config")
            .arg(file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        Ok(Self { child })
    }

    /// Waits for its end and answers with its exit code.
    pub(crate) async fn ended(&mut self) -> Done<Option<i32>> {
        Ok(timeout(PATIENCE, self.child.wait()).await.map_err(|_| "the worker did not end")??.code())
    }

    /// What it has used, as the system tells: the time of every thread that is alive.
    pub(crate) fn usage(&self) -> Done<Usage> {
        let id = self.child.id().ok_or("the worker has ended by itself")?;
        let mut cpu = Duration::ZERO;
        for thread in std::fs::read_dir(format!("/proc/{id}/task"))? {
            let stat = std::fs::read_to_string(thread?.path().join("schedstat"))?;
            let [running, _, _] = numbers(stat.trim())?;
            cpu += Duration::from_nanos(running);
        }
        Ok(Usage { cpu, resident_kib: resident(&id.to_string())? })
    }
}

/// Resident memory of a process, in KiB.
pub(crate) fn resident(process: &str) -> Done<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    Ok(line.split_whitespace().next().unwrap_or_default().parse()?)
}

/// So many numbers from a line.
pub(crate) fn numbers<const N: usize>(line: &str) -> Done<[u64; N]> {
    let found: Vec<u64> = line.split(' ').map_while(|text| text.parse().ok()).collect();
    found.try_into().map_err(|_| format!("{line:?} is not {N} numbers").into())
}

/// A queue in a process of its own, with a folder of its own.
pub(crate) struct Queue {
    pub(crate) process: Process,
    pub(crate) client: Client,
}

impl Queue {
    pub(crate) async fn start(folder: &Path, claim_timeout: Duration) -> Done<Self> {
        let queue = QueueRole { folder: fresh(folder, "queue")?, claim_timeout };
        Self::of(Role { queue: Some(queue), threads: THREADS, ..Role::default() }, folder).await
    }

    /// With a worker in the same process.
    pub(crate) async fn with_worker(folder: &Path, claim_timeout: Duration, worker: WorkerRole) -> Done<Self> {
        let queue = QueueRole { folder: fresh(folder, "queue")?, claim_timeout };
        Self::of(Role { queue: Some(queue), worker: Some(worker), threads: THREADS, ..Role::default() }, folder).await
    }

    async fn of(role: Role, folder: &Path) -> Done<Self> {
        let mut process = Process::start(&role, &folder.join("queue.log"))?;
        let root_url = process.hear("listening").await?;
        let api = Api::new(api(&root_url)?)?;
        let counter = reqwest::Client::builder().no_proxy().build()?;
        Ok(Self { process, client: Client { root_url, api, counter } })
    }
}

/// Who speaks to a queue.
pub(crate) struct Client {
    pub(crate) root_url: String,
    api: Api,
    counter: reqwest::Client,
}

impl Client {
    /// Creates one task.
    pub(crate) async fn create_one(&self, task_queue: &str, payload: &Value) -> Done<TaskId> {
        let task = slugid();
        self.api.create_task(&task, definition(task_queue, payload)?).await?;
        Ok(task)
    }

    /// Creates so many tasks and answers with their names.
    pub(crate) async fn create(&self, task_queue: &str, count: usize, payload: &Value) -> Done<HashSet<String>> {
        let mut made = HashSet::new();
        let mut calls = JoinSet::new();
        for number in 0..count + CREATORS {
            if number >= CREATORS
                && let Some(name) = calls.join_next().await
            {
                let name: Result<TaskId, String> = name?;
                made.insert(name?.to_string());
            }
            if number < count {
                let (api, definition) = (self.api.clone(), definition(task_queue, payload)?);
                calls.spawn(async move {
                    let task = slugid();
                    api.create_task(&task, definition).await.map_err(|refused| refused.to_string())?;
                    Ok(task)
                });
            }
        }
        while let Some(name) = calls.join_next().await {
            made.insert(name??.to_string());
        }
        if made.len() == count { Ok(made) } else { Err(format!("{} of {count} tasks were made", made.len()).into()) }
    }

    /// When the last of these was handed back by its first run, if each of them was and waits for its second.
    pub(crate) async fn all_handed_back(&self, tasks: &HashSet<String>) -> Done<Timestamp> {
        let mut last = Timestamp::MIN;
        for task in tasks {
            let id = TaskId::parse(task).ok_or("a task has an id")?;
            let status = self.api.task_status(&id).await?;
            let (first, second) = (&status["runs"][0], &status["runs"][1]);
            if first["reasonResolved"] != "worker-shutdown" || second["state"] != "pending" {
                return Err(format!("{task} was not handed back: {status}").into());
            }
            last = last.max(first["resolved"].as_str().unwrap_or_default().parse()?);
        }
        Ok(last)
    }

    pub(crate) async fn cancel(&self, task: &TaskId) -> Done<()> {
        self.api.cancel_task(task).await?;
        Ok(())
    }

    /// Whether a task was canceled while its first run was, and has no other.
    pub(crate) async fn was_canceled(&self, task: &TaskId) -> Done<bool> {
        let status = self.api.task_status(task).await?;
        let runs = status["runs"].as_array().map_or(0, Vec::len);
        Ok(runs == 1 && status["runs"][0]["reasonResolved"] == "canceled" && !status["runs"][0]["started"].is_null())
    }

    /// How long the queue takes to answer a call.
    pub(crate) async fn round_trip(&self, task: &str) -> Done<Duration> {
        let id = TaskId::parse(task).ok_or("a task has an id")?;
        let began = now();
        self.api.task_status(&id).await?;
        Ok(now() - began)
    }

    /// How many of these were not completed by exactly one run, as the queue tells.
    pub(crate) async fn not_completed_once(&self, tasks: &HashSet<String>) -> Done<usize> {
        let mut completed = HashSet::new();
        let mut next: Option<String> = None;
        loop {
            let mut url = format!("{}/api/queue/v1/journeyman/tasks?limit=1000", self.root_url);
            if let Some(token) = &next {
                url.push_str("&continuationToken=");
                url.push_str(token);
            }
            let page: Value = self.counter.get(url).send().await?.error_for_status()?.json().await?;
            for entry in page["tasks"].as_array().into_iter().flatten() {
                let status = &entry["status"];
                let runs = status["runs"].as_array().map_or(0, Vec::len);
                if runs == 1 && status["state"] == "completed" {
                    completed.extend(status["taskId"].as_str().map(str::to_owned));
                }
            }
            next = page["continuationToken"].as_str().map(str::to_owned);
            if next.is_none() {
                break;
            }
        }
        Ok(tasks.iter().filter(|task| !completed.contains(*task)).count())
    }
}

/// An error unless a worker has claimed and completed so many tasks, and nothing else happened to any.
pub(crate) fn nothing_else(counts: &Value, tasks: usize) -> Done<()> {
    let number = |name: &str| counts[name].as_u64().unwrap_or(u64::MAX);
    let never = ["claims_refused", "failed", "exceptions", "handed_back", "superseded", "lost", "overlaps_possible"];
    let clean = never.iter().all(|name| number(name) == 0) && number("panics") == 0;
    if clean && number("claims") == tasks as u64 && number("completed") == tasks as u64 {
        return Ok(());
    }
    Err(format!("of {tasks} tasks the worker counted {counts}").into())
}

/// A new folder.
pub(crate) fn fresh(folder: &Path, name: &str) -> Done<PathBuf> {
    let path = folder.join(format!("{name}-{}", slugid()));
    std::fs::create_dir_all(&path)?;
    Ok(path)
}

/// A task for this queue.
pub(crate) fn definition(task_queue: &str, payload: &Value) -> Done<Value> {
    let (provisioner, worker_type) = task_queue.split_once('/').ok_or("a task queue has two parts")?;
    let at = |hours| (Timestamp::now() + SignedDuration::from_hours(hours)).to_string();
    Ok(json!({
        "provisionerId": provisioner,
        "workerType": worker_type,
        "created": at(0),
        "deadline": at(1),
        "expires": at(2),
        "payload": payload,
        "metadata": {
            "name": "bench",
            "description": "a task of tests/bench",
            "owner": "nobody@example.com",
            "source": "https://example.com/",
        },
    }))
}

/// A random task id.
pub(crate) fn slugid() -> TaskId {
    let mut bytes = *uuid::Uuid::new_v4().as_bytes();
    bytes[0] &= 0x7f;
    let text = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(bytes);
    TaskId::parse(&text).unwrap_or_else(|| unreachable!("22 letters are a name"))
}
