//! `journeyman dev --demo`: creates the tasks, shows them until they are resolved, and checks each result.

mod screen;
mod tasks;

use std::fs;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::json;
use tokio::time::Instant;

use self::tasks::{CheckResult, DemoTask, Expectation, GREET, GREET_PROGRAM};
use super::{DevSession, write_file};
use crate::cli::exit::{Exit, ExitResult, Failure};
use crate::cli::signals::ExitSignals;
use crate::cli::task::{self, task_status};
use crate::cli::{output, worker, worker_setup};
use crate::config::Environment;
use crate::config::schema::{COMMAND, Config, Handler, ProgramHandler};
use crate::config::values::Span;
use crate::domain::id::Run;
use crate::limits::{DEMO_LOG_BYTES_MAX, DEMO_REDRAW_INTERVAL, DEMO_TASKS_TIMEOUT};
use crate::source::CallError;
use crate::source::taskcluster::Api;
use crate::source::taskcluster::formats::format_time;
use crate::worker::Control;
use crate::worker::status::BlockedReason;
use screen::DemoScreen;
use task_status::{TaskState, TaskStatus};

/// Short enough that the demo shows a reclaim (at half of so short a claim), long enough to survive a stall of 5 s.
pub(super) const CLAIM_TIMEOUT: Duration = Duration::from_secs(20);
/// The long task waits for this file, which the demo creates once the claim was extended.
const RECLAIMED_MARKER: &str = "reclaimed";
/// Small enough that the log of `big-log` is truncated.
const TASK_LOG_MAX: &str = "1MiB";

/// Other lines would break the table.
const LOG_LEVEL: &str = "error";

pub(super) fn configure(config: &mut Config, temp_dir: &Path, set: impl Fn(&str) -> bool) -> Result<(), Failure> {
    let invalid = |what: String| Failure::new(Exit::Internal, what);
    if !set("worker.termination_grace") {
        config.worker.termination_grace = Span(Duration::from_secs(2));
    }
    if !set("log.task_log_max") {
        config.log.task_log_max = TASK_LOG_MAX.parse().map_err(invalid)?;
    }
    if !set("log.level") {
        config.log.level = LOG_LEVEL.parse().map_err(invalid)?;
    }
    config.queue.claim_timeout = Span(CLAIM_TIMEOUT);
    config.handler.clear();
    let path = temp_dir.join("greet.sh");
    write_file(&path, GREET_PROGRAM, 0o700)?;
    let exec = vec![path.display().to_string()];
    config.handler.insert(GREET.to_owned(), Handler::Program(ProgramHandler::new(exec)));
    Ok(())
}

pub(super) async fn run(
    dev: DevSession,
    temp_dir: &Path,
    mut signals: ExitSignals,
    environment: &Environment,
) -> ExitResult {
    let api = dev.state().client()?;
    let mut demo = Demo::new(api, temp_dir.join(RECLAIMED_MARKER), environment)?;
    output::line(&format!(
        "queue {}, {} tasks at once, claims of {} s",
        dev.queue.root_url(),
        dev.config.worker.capacity,
        CLAIM_TIMEOUT.as_secs()
    ))?;
    // Before the worker starts, so that it claims by priority.
    tokio::select! {
        created = demo.create() => created?,
        _ = signals.next() => {
            dev.queue.stop().await;
            return Err(Failure::new(Exit::Failed, "stopped before the first task ran"));
        }
    }
    let worker = worker_setup::build_worker(&dev.config, environment)?.worker;
    let control = worker.control();
    let mut worker = pin!(worker::run_until_exit(worker, signals.apply_to(control.clone())));
    let ended = tokio::select! {
        gone = &mut worker => gone.map(|_| Exit::Failed),
        shown = demo.watch(&control) => shown,
    };
    control.drain().await;
    let ended = match ended {
        Ok(Exit::Success) => tokio::time::timeout(DEMO_TASKS_TIMEOUT, worker).await.unwrap_or_else(|_| {
            Err(Failure::new(Exit::Failed, "all tasks are resolved, but the worker did not finish draining"))
        }),
        Ok(_) | Err(_) => ended,
    };
    dev.queue.stop().await;
    demo.screen.print_summary(&demo.tasks, demo.started_at.elapsed())?;
    ended
}

struct Demo {
    api: Api,
    reclaimed_marker: PathBuf,
    tasks: Vec<DemoTask>,
    screen: DemoScreen,
    started_at: Instant,
}

impl Demo {
    fn new(api: Api, reclaimed_marker: PathBuf, environment: &Environment) -> Result<Self, Failure> {
        let tasks = tasks::tasks(&reclaimed_marker).map_err(|error| Failure::from_error(Exit::Internal, &error))?;
        let screen = DemoScreen::new(environment, tasks.len());
        Ok(Self { api, reclaimed_marker, tasks, screen, started_at: Instant::now() })
    }

    async fn create(&self) -> Result<(), Failure> {
        let now = Timestamp::now();
        for task in &self.tasks {
            let definition = json!({
                "provisionerId": "dev",
                "workerType": task.handler.as_deref().unwrap_or(COMMAND),
                "created": format_time(now),
                "deadline": format_time(now + SignedDuration::from_mins(10)),
                "priority": task.priority.as_deref().unwrap_or("medium"),
                "payload": task.payload,
                "metadata": {
                    "name": task.name,
                    "description": task.description,
                    "owner": "unknown@example.com",
                    "source": "https://example.com/journeyman",
                },
            });
            self.api.create_task(&task.id, definition).await.map_err(call_failure)?;
        }
        Ok(())
    }

    async fn watch(&mut self, control: &Control) -> ExitResult {
        while self.started_at.elapsed() < DEMO_TASKS_TIMEOUT {
            for index in 0..self.tasks.len() {
                if self.tasks[index].result == CheckResult::Pending {
                    self.update(index).await?;
                }
            }
            let blocked = blocked_by_host(control).await;
            self.screen.show(&self.tasks, self.started_at.elapsed(), blocked.as_deref())?;
            if self.tasks.iter().all(|task| task.result != CheckResult::Pending) {
                let passed = self.tasks.iter().all(|task| task.result == CheckResult::Passed);
                return Ok(if passed { Exit::Success } else { Exit::Failed });
            }
            tokio::time::sleep(DEMO_REDRAW_INTERVAL).await;
        }
        for task in self.tasks.iter_mut().filter(|task| task.result == CheckResult::Pending) {
            task.result = CheckResult::Failed(format!("not resolved within {} s", DEMO_TASKS_TIMEOUT.as_secs()));
        }
        Ok(Exit::Failed)
    }

    async fn update(&mut self, index: usize) -> Result<(), Failure> {
        let task = &self.tasks[index];
        let status = self.api.task_status(&task.id).await.and_then(|status| TaskStatus::read(&status));
        let status = status.map_err(call_failure)?;
        let running = status.state == TaskState::Running;
        let was_running = task.status.as_ref().is_some_and(|status| status.state == TaskState::Running);
        if task.expectation == Expectation::Canceled && running && !was_running {
            self.api.cancel_task(&task.id).await.map_err(call_failure)?;
        }
        let extended = task.expectation == Expectation::Reclaimed && running && was_extended(&status);
        if extended {
            fs::write(&self.reclaimed_marker, "").map_err(|error| Failure::from_error(Exit::HostUnusable, &error))?;
        }
        let result = if !status.is_resolved() {
            CheckResult::Pending
        } else if let Some(wrong) = tasks::unexpected_result(task, &status) {
            CheckResult::Failed(wrong)
        } else {
            self.check_expectation(task, &status).await?.map_or(CheckResult::Passed, CheckResult::Failed)
        };
        let task = &mut self.tasks[index];
        if extended {
            tasks::EXTENDED.clone_into(&mut task.description);
        }
        (task.status, task.result) = (Some(status), result);
        Ok(())
    }

    /// What is wrong with a resolved task.
    async fn check_expectation(&self, task: &DemoTask, status: &TaskStatus) -> Result<Option<String>, Failure> {
        let run = Run { task: task.id.clone(), run: status.runs.last().map_or(0, |run| run.number) };
        let (met, wrong) = match &task.expectation {
            Expectation::Nothing | Expectation::Canceled => return Ok(None),
            Expectation::Reclaimed => (was_extended(status), "claim was never extended".to_owned()),
            Expectation::Artifacts(names) => {
                let found = self.api.artifacts(&run, None).await.map_err(call_failure)?.entries;
                let missing = names.iter().find(|name| !found.iter().any(|entry| entry["name"] == **name));
                (missing.is_none(), format!("artifact {} is missing", missing.map_or("", String::as_str)))
            }
            Expectation::LogContains(words) => {
                (self.log(&run).await?.contains(words.as_str()), format!("log does not contain \"{words}\""))
            }
            Expectation::LogTruncated => {
                let log = self.log(&run).await?;
                let both_ends = log.contains("one more line") && log.contains("the end");
                (both_ends && log.len() < DEMO_LOG_BYTES_MAX, "log was not truncated".to_owned())
            }
            Expectation::StartedBefore(name) => {
                let started_at = |status: &TaskStatus| status.runs.first()?.started_at;
                let other = self.tasks.iter().find(|other| other.name == *name).and_then(|task| task.status.as_ref());
                let later = other.and_then(started_at).is_none_or(|other| started_at(status) <= Some(other));
                (later, "started too late".to_owned())
            }
        };
        Ok((!met).then_some(wrong))
    }

    async fn log(&self, run: &Run) -> Result<String, Failure> {
        let mut download = self.api.artifact(run, task::LOG_ARTIFACT).await.map_err(call_failure)?;
        let mut log = Vec::new();
        while let Some(piece) = download.next_chunk().await.map_err(call_failure)?
            && log.len() < DEMO_LOG_BYTES_MAX
        {
            log.extend(piece);
        }
        Ok(String::from_utf8_lossy(&log).into_owned())
    }
}

fn was_extended(status: &TaskStatus) -> bool {
    status.runs.last().is_some_and(|run| run.was_extended(CLAIM_TIMEOUT))
}

/// Why this host takes no tasks.
async fn blocked_by_host(control: &Control) -> Option<String> {
    let status = control.status().await?;
    let reason = status.blocked_reason?;
    let of_host = matches!(reason, BlockedReason::Disk | BlockedReason::Memory | BlockedReason::HostUnhealthy);
    status.blocked_message.filter(|_| of_host)
}

fn call_failure(refused: CallError) -> Failure {
    Failure::new(Exit::Internal, refused.message)
}
