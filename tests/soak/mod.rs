//! A worker for hours, under faults: its queue is killed and started again, its connections are cut, its payloads are killed
//! and its tasks canceled, released and lost. No task is lost, no run is started twice, and what it holds of
//! memory and descriptors does not grow.
//!
//! `JOURNEYMAN_SOAK_MINUTES` is the length in minutes (0.5 by default).

mod figures;
mod hosts;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::support::wire::{Way, Wire};
use figures::Series;
use hosts::{Queue, Worker, ledger};
use journeyman::control::client::ControlClient;
use journeyman::control::{WorkerCommand, WorkerCommandRequest};
use journeyman::source::taskcluster::Api;
use journeyman::task::formats::new_task_id;
use journeyman::worker::Note;
use journeyman_domain::id::TaskId;
use serde_json::Value;

/// How often a task is created.
const CREATE_EVERY: Duration = Duration::from_millis(500);
/// How often one of the faults strikes.
const FAULT_EVERY: Duration = Duration::from_secs(4);
/// How often memory and descriptors are read.
const SAMPLE_EVERY: Duration = Duration::from_secs(5);
/// Longest time without a resolved task after the faults. A lost claim expires after a minute.
const QUIET_TIMEOUT: Duration = Duration::from_secs(180);

/// What a task does by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Completes,
    Fails,
    Sleeps,
}

/// The fault of a task, in addition to the faults of all tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum TaskFault {
    Nothing,
    Killed,
    CanceledByQueue,
    CanceledByOperator,
    Released,
}

const FAULTS: [&str; 7] = [
    "queue killed and started",
    "connections cut",
    "connections held up until the next fault",
    "payload killed",
    "canceled at the queue",
    "canceled at the worker",
    "released",
];

struct Soak {
    folder: tempfile::TempDir,
    queue: Queue,
    wire: Wire,
    worker: Worker,
    api: Api,
    tasks: BTreeMap<TaskId, (Kind, TaskFault)>,
    faults: BTreeMap<&'static str, u64>,
    refused: u64,
    rng: u64,
}

impl Soak {
    async fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let queue = Queue::start(folder.path());
        // Signed URLs of messages and artifacts name the queue itself.
        let wire = Wire::to(&queue.address.to_string()).await;
        let worker = Worker::start(folder.path(), &wire.root());
        let api = crate::support::task_queue::api(&format!("http://{}", queue.address));
        Self {
            folder,
            queue,
            wire,
            worker,
            api,
            tasks: BTreeMap::new(),
            faults: BTreeMap::new(),
            refused: 0,
            rng: 0x9e37_79b9_7f4a_7c15,
        }
    }

    fn random(&mut self, below: usize) -> usize {
        self.rng ^= self.rng << 13;
        self.rng ^= self.rng >> 7;
        self.rng ^= self.rng << 17;
        usize::try_from(self.rng % below.max(1) as u64).expect("small")
    }

    async fn create(&mut self) {
        let kind = match self.random(10) {
            0..=5 => Kind::Completes,
            6 => Kind::Fails,
            _ => Kind::Sleeps,
        };
        let seconds = self.random(12);
        let protocol = ["claim-work", "azure"][self.random(2)];
        let script = match kind {
            Kind::Completes => "echo done".to_owned(),
            Kind::Fails => "exit 3".to_owned(),
            Kind::Sleeps => format!("sleep {seconds}"),
        };
        let task = new_task_id();
        let script = format!("echo $TASK_ID/$RUN_ID >> {}; {script}", ledger(self.folder.path()).display());
        let definition = crate::support::task_queue::definition(
            &format!("soak/{protocol}"),
            &crate::support::task_queue::shell(&script),
        );
        // The queue may be down; one that was created all the same is asked after.
        let created = self.api.create_task(&task, definition).await.is_ok();
        if created || self.api.task_status(&task).await.is_ok() {
            self.tasks.insert(task, (kind, TaskFault::Nothing));
        } else {
            self.refused += 1;
        }
    }

    /// A running task without a fault.
    async fn held(&mut self, client: &ControlClient) -> Option<TaskId> {
        let held = client.status().await.ok()?.snapshot.claims;
        let running = held.iter().filter(|task| task.state == "running").filter_map(|task| TaskId::parse(&task.task));
        let mut untouched: Vec<TaskId> =
            running.filter(|task| self.tasks.get(task).is_some_and(|(_, done)| *done == TaskFault::Nothing)).collect();
        let chosen = self.random(untouched.len());
        (!untouched.is_empty()).then(|| untouched.swap_remove(chosen))
    }

    fn touched(&mut self, task: &TaskId, done: TaskFault) {
        if let Some((_, before)) = self.tasks.get_mut(task) {
            *before = done;
        }
    }

    async fn fault(&mut self, which: usize) {
        let client = self.worker.client();
        let name = FAULTS[which];
        self.wire.set(Way::Carry);
        match which {
            0 => self.queue.restart(self.folder.path()),
            1 => self.wire.cut(),
            2 => self.wire.set(Way::Stall),
            _ => {
                let Some(client) = client else { return };
                let Some(task) = self.held(&client).await else { return };
                let fault =
                    [TaskFault::Killed, TaskFault::CanceledByQueue, TaskFault::CanceledByOperator, TaskFault::Released]
                        [which - 3];
                // Noted first, because a request may succeed without an answer.
                self.touched(&task, fault);
                self.strike(&client, task, fault).await;
            }
        }
        *self.faults.entry(name).or_default() += 1;
    }

    async fn strike(&self, client: &ControlClient, task: TaskId, fault: TaskFault) {
        let name = task.as_str().to_owned();
        let command = match fault {
            TaskFault::Killed => {
                let detail = client.claim_details(&name).await;
                return detail.map(|detail| detail.processes).unwrap_or_default().into_iter().for_each(hosts::kill);
            }
            TaskFault::CanceledByQueue => return drop(self.api.cancel_task(&task).await),
            TaskFault::CanceledByOperator => WorkerCommand::Cancel { task: name },
            TaskFault::Released => WorkerCommand::Release { task: name },
            TaskFault::Nothing => return,
        };
        let note = Note { by: "soak".to_owned(), text: String::new() };
        drop(client.send_command(&WorkerCommandRequest { command, note }).await);
    }

    /// Creates tasks, injects faults and takes samples for `span`.
    async fn run_with_faults(&mut self, span: Duration, series: &mut Series) {
        let began = Instant::now();
        let mut create = tokio::time::interval(CREATE_EVERY);
        let mut fault = tokio::time::interval(FAULT_EVERY);
        let mut sample = tokio::time::interval(SAMPLE_EVERY);
        let mut next = 0;
        while began.elapsed() < span {
            tokio::select! {
                _ = create.tick() => self.create().await,
                _ = fault.tick() => {
                    self.fault(next % FAULTS.len()).await;
                    next += 1;
                }
                _ = sample.tick() => series.read(self.worker.pid(), began.elapsed()),
            }
            self.worker.assert_running();
            self.queue.assert_running();
        }
        self.wire.set(Way::Carry);
    }

    /// The final status of every task, once all are resolved or none was for a while.
    async fn wait_resolved(&mut self) -> BTreeMap<TaskId, Value> {
        let mut last = Instant::now();
        let mut resolved = BTreeMap::new();
        while resolved.len() < self.tasks.len() && last.elapsed() < QUIET_TIMEOUT {
            for task in self.tasks.keys().filter(|task| !resolved.contains_key(*task)).cloned().collect::<Vec<_>>() {
                let Ok(status) = self.api.task_status(&task).await else { break };
                let open = matches!(status["state"].as_str(), Some("pending" | "running" | "unscheduled") | None);
                if !open {
                    resolved.insert(task, status);
                    last = Instant::now();
                }
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        resolved
    }
}

/// The result of the run.
#[derive(Debug, Default)]
struct Verdict {
    lost: Vec<String>,
    wrong: Vec<String>,
    twice: Vec<String>,
    expired: u64,
    ends: BTreeMap<String, u64>,
}

fn judge(soak: &Soak, resolved: &BTreeMap<TaskId, Value>) -> Verdict {
    let mut verdict = Verdict::default();
    for (task, (kind, done)) in &soak.tasks {
        let Some(status) = resolved.get(task) else {
            verdict.lost.push(format!("{task} is not resolved"));
            continue;
        };
        let runs = status["runs"].as_array().cloned().unwrap_or_default();
        let reason = |run: &Value| run["reasonResolved"].as_str().unwrap_or("none").to_owned();
        verdict.expired += runs.iter().filter(|run| reason(run) == "claim-expired").count() as u64;
        let last = runs.last().map_or_else(|| "none".to_owned(), reason);
        *verdict.ends.entry(last.clone()).or_default() += 1;
        let own = if *kind == Kind::Fails { "failed" } else { "completed" };
        // An order that came too late, or never, leaves what the task does by itself.
        let allowed = match done {
            TaskFault::Nothing | TaskFault::Released => vec![own],
            TaskFault::Killed => vec![own, "failed"],
            TaskFault::CanceledByQueue => vec![own, "canceled"],
            TaskFault::CanceledByOperator => vec![own, "internal-error"],
        };
        if matches!(last.as_str(), "claim-expired" | "deadline-exceeded" | "none") {
            verdict.lost.push(format!("{task} ended as {last}"));
        } else if !allowed.contains(&last.as_str()) {
            verdict.wrong.push(format!("{task}, {kind:?} and {done:?}, ended as {last}"));
        }
    }
    let mut started = BTreeMap::<String, u32>::new();
    for line in std::fs::read_to_string(ledger(soak.folder.path())).unwrap_or_default().lines() {
        *started.entry(line.to_owned()).or_default() += 1;
    }
    verdict.twice = started.into_iter().filter(|(_, count)| *count > 1).map(|(run, _)| run).collect();
    verdict
}

async fn soak(minutes: f64) {
    let span = Duration::from_secs_f64(minutes * 60.0);
    let mut soak = Soak::start().await;
    let mut series = Series::default();
    soak.run_with_faults(span, &mut series).await;
    let resolved = soak.wait_resolved().await;
    let verdict = judge(&soak, &resolved);
    let code = soak.worker.drain();
    println!("soak: {minutes} minutes of faults, then wait_resolved");
    println!("| what | how much |\n| --- | --- |");
    println!("| tasks created, and refused by a queue that was down | {}, {} |", soak.tasks.len(), soak.refused);
    for (end, count) in &verdict.ends {
        println!("| ended as {end} | {count} |");
    }
    println!(
        "| lost, started twice, with another end than theirs | {}, {}, {} |",
        verdict.lost.len(),
        verdict.twice.len(),
        verdict.wrong.len()
    );
    println!("| claims that ran out | {} |", verdict.expired);
    for name in FAULTS {
        println!("| {name} | {} |", soak.faults.get(name).unwrap_or(&0));
    }
    print!("{}", series.rows());
    println!("soak: {} lost", verdict.lost.len());
    let bad = !verdict.lost.is_empty() || !verdict.twice.is_empty() || !verdict.wrong.is_empty() || code != Some(0);
    if bad {
        let kept = soak.folder.keep();
        panic!("{verdict:?}, exit {code:?}; logs are in {}", kept.display());
    }
    series.judge();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_under_faults_loses_nothing_and_does_not_grow() {
    let minutes = std::env::var("JOURNEYMAN_SOAK_MINUTES").ok().and_then(|text| text.parse().ok());
    soak(minutes.unwrap_or(0.5)).await;
}
