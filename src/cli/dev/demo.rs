//! `journeyman dev --demo`: creates the tasks, shows them until they are resolved, and checks each result.

use std::fs;
use std::future::Future;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::json;
use tokio::time::Instant;

use super::super::exit::{Exit, ExitResult, Failure};
use super::super::signals::ExitSignals;
use super::super::target;
use super::super::task::{self, status};
use super::super::{output, worker, worker_setup};
use super::screen::{CheckResult, DemoScreen, Row};
use super::tasks::{self, DemoTask, Expectation, GREET, GREET_PROGRAM};
use super::{CLIENT_ID, DevSession};
use crate::config::Environment;
use crate::config::schema::{Config, Handler, ProgramHandler};
use crate::config::values::Span;
use crate::domain::id::{Run, TaskId};
use crate::limits::{DEMO_LOG_BYTES_MAX, DEMO_REDRAW_INTERVAL, DEMO_TASKS_TIMEOUT};
use crate::source::CallError;
use crate::source::taskcluster::Api;
use crate::source::taskcluster::formats::{format_time, new_task_id};
use crate::worker::Control;
use crate::worker::status::BlockedReason;
use status::{TaskState, TaskStatus};

/// Short enough that the demo shows a reclaim (at half of so short a claim), long enough to survive a stall of 5 s.
pub(super) const CLAIM_TIMEOUT: Duration = Duration::from_secs(20);
/// The long task waits for this file, which the demo creates once the claim was extended.
const RECLAIMED_MARKER: &str = "reclaimed";
/// Small enough that the log of `big-log` is truncated.
const TASK_LOG_MAX: &str = "1MiB";

/// Other lines would break the table.
const LOG_LEVEL: &str = "error";

pub(super) fn configure(config: &mut Config, temp_dir: &Path, set: impl Fn(&str) -> bool) -> Result<(), Failure> {
    let built_in = |what: String| Failure::new(Exit::Internal, what);
    if !set("worker.termination_grace") {
        config.worker.termination_grace = Span(Duration::from_secs(2));
    }
    if !set("log.task_log_max") {
        config.log.task_log_max = TASK_LOG_MAX.parse().map_err(built_in)?;
    }
    if !set("log.level") {
        config.log.level = LOG_LEVEL.parse().map_err(built_in)?;
    }
    config.handler.clear();
    let path = temp_dir.join("greet.sh");
    fs::write(&path, GREET_PROGRAM)
        .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o700)))
        .map_err(|error| Failure::new(Exit::HostUnusable, format!("cannot write {}: {error}", path.display())))?;
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
    let api = target::build_api(dev.queue.root_url(), Some(target::build_credentials(CLIENT_ID, &dev.token, None)?))?;
    let mut demo = Demo::new(api, temp_dir.join(RECLAIMED_MARKER), environment);
    output::line(&format!(
        "queue {}, {} tasks at once, claims of {} s",
        dev.queue.root_url(),
        dev.config.worker.capacity,
        CLAIM_TIMEOUT.as_secs()
    ))?;
    // Before the worker starts, so that it claims by priority.
    tokio::select! {
        created = demo.create() => created?,
        () = signals.next() => {
            dev.queue.stop().await;
            return Err(Failure::new(Exit::Failed, "stopped before the first task ran"));
        }
    }
    let worker = worker_setup::build_worker(&dev.config, environment)?;
    let control = worker.control();
    let mut worker = pin!(worker::run_until_exit(worker, signals.apply_to(control.clone())));
    let ended = tokio::select! {
        gone = &mut worker => gone.map(|_| Exit::Failed),
        shown = demo.watch(&control) => shown,
        failure = dev.wake_on_pending(control.clone()) => Err(failure),
    };
    control.drain().await;
    let ended = wait_for_worker(ended, worker).await;
    dev.queue.stop().await;
    demo.screen.print_summary(&demo.rows, demo.elapsed)?;
    ended
}

/// Waits for the drain, and returns the first failure.
async fn wait_for_worker(ended: ExitResult, worker: impl Future<Output = ExitResult>) -> ExitResult {
    let ended = ended?;
    if ended != Exit::Success {
        return Ok(ended);
    }
    match tokio::time::timeout(DEMO_TASKS_TIMEOUT, worker).await {
        Ok(drained) => drained,
        Err(_) => Err(Failure::new(Exit::Failed, "all tasks are resolved, but the worker did not finish draining")),
    }
}

struct Demo {
    api: Api,
    reclaimed_marker: PathBuf,
    tasks: Vec<(TaskId, DemoTask)>,
    rows: Vec<Row>,
    screen: DemoScreen,
    started_at: Instant,
    elapsed: Duration,
}

impl Demo {
    fn new(api: Api, reclaimed_marker: PathBuf, environment: &Environment) -> Self {
        let tasks: Vec<_> = tasks::tasks(&reclaimed_marker).into_iter().map(|task| (new_task_id(), task)).collect();
        let row = |(_, task): &(TaskId, DemoTask)| Row {
            name: task.name,
            description: task.description,
            status: None,
            result: CheckResult::Pending,
        };
        let rows: Vec<_> = tasks.iter().map(row).collect();
        let screen = DemoScreen::new(environment, rows.len());
        Self { api, reclaimed_marker, tasks, rows, screen, started_at: Instant::now(), elapsed: Duration::ZERO }
    }

    async fn create(&self) -> Result<(), Failure> {
        let now = Timestamp::now();
        let deadline = now + SignedDuration::from_mins(10);
        for (id, task) in &self.tasks {
            let definition = json!({
                "provisionerId": "dev",
                "workerType": task.handler,
                "created": format_time(now),
                "deadline": format_time(deadline),
                "priority": task.priority,
                "payload": task.payload,
                "metadata": {
                    "name": task.name,
                    "description": task.description,
                    "owner": "nobody@example.com",
                    "source": "https://example.com/journeyman",
                },
            });
            self.api.create_task(id, definition).await.map_err(call_failure)?;
        }
        Ok(())
    }

    async fn watch(&mut self, control: &Control) -> ExitResult {
        let mut canceled = false;
        while self.started_at.elapsed() < DEMO_TASKS_TIMEOUT {
            for index in 0..self.tasks.len() {
                if self.rows[index].result == CheckResult::Pending {
                    self.update_row(index, &mut canceled).await?;
                }
            }
            self.elapsed = self.started_at.elapsed();
            self.screen.show(&self.rows, self.elapsed, blocked_by_host(control).await.as_deref())?;
            if self.rows.iter().all(|row| row.result != CheckResult::Pending) {
                let passed = self.rows.iter().all(|row| row.result == CheckResult::Passed);
                return Ok(if passed { Exit::Success } else { Exit::Failed });
            }
            tokio::time::sleep(DEMO_REDRAW_INTERVAL).await;
        }
        for row in self.rows.iter_mut().filter(|row| row.result == CheckResult::Pending) {
            row.result = CheckResult::Failed(format!("not resolved within {} s", DEMO_TASKS_TIMEOUT.as_secs()));
        }
        Ok(Exit::Failed)
    }

    async fn update_row(&mut self, index: usize, canceled: &mut bool) -> Result<(), Failure> {
        let (id, task) = &self.tasks[index];
        let status = TaskStatus::read(&self.api.task_status(id).await.map_err(call_failure)?);
        if task.expectation == Expectation::Canceled && status.state == TaskState::Running && !*canceled {
            self.api.cancel_task(id).await.map_err(call_failure)?;
            *canceled = true;
        }
        let extended = || status.runs.last().is_some_and(|run| run.was_extended(CLAIM_TIMEOUT));
        if task.expectation == Expectation::Reclaimed && status.state == TaskState::Running && extended() {
            fs::write(&self.reclaimed_marker, "").map_err(|error| Failure::from_error(Exit::HostUnusable, &error))?;
            self.rows[index].description = tasks::EXTENDED;
        }
        if status.is_resolved() {
            if let Some(wrong) = tasks::unexpected_result(task.expected, &status) {
                let last_line = self.last_line(id, &status).await;
                self.rows[index].result = CheckResult::Failed(format!("{wrong}{last_line}"));
            } else if let Some(result) = self.check_expectation(id, task, &status).await? {
                self.rows[index].result = result;
            }
        }
        self.rows[index].status = Some(status);
        Ok(())
    }

    async fn check_expectation(
        &self,
        id: &TaskId,
        task: &DemoTask,
        status: &TaskStatus,
    ) -> Result<Option<CheckResult>, Failure> {
        let check = |passed: bool, failure: &str| {
            Some(if passed { CheckResult::Passed } else { CheckResult::Failed(failure.to_owned()) })
        };
        let last = status.runs.last();
        let run = Run { task: id.clone(), run: last.map_or(0, |run| run.number) };
        Ok(match task.expectation {
            Expectation::None | Expectation::Canceled => Some(CheckResult::Passed),
            Expectation::Reclaimed => {
                check(last.is_some_and(|run| run.was_extended(CLAIM_TIMEOUT)), "claim was never extended")
            }
            Expectation::Artifacts(names) => {
                let found = self.artifacts(&run).await?;
                let missing = names.iter().find(|name| !found.iter().any(|found| found == *name));
                check(missing.is_none(), &format!("artifact {} is missing", missing.unwrap_or(&"")))
            }
            Expectation::LogContains(words) => {
                check(self.log(&run).await?.contains(words), &format!("log does not contain \"{words}\""))
            }
            Expectation::LogTruncated => {
                let log = self.log(&run).await?;
                let both = log.contains("one more line") && log.contains("the end");
                check(both && log.len() < DEMO_LOG_BYTES_MAX, "log was not truncated")
            }
            Expectation::StartedBefore(other) => self.started_before(status, other),
        })
    }

    /// `None` until the other task has started.
    fn started_before(&self, status: &TaskStatus, other: &str) -> Option<CheckResult> {
        let other = self.rows.iter().find(|row| row.name == other)?.status.as_ref()?.runs.first()?.started_at?;
        let own = status.runs.first()?.started_at?;
        Some(if own <= other { CheckResult::Passed } else { CheckResult::Failed("started too late".to_owned()) })
    }

    /// The artifacts of a run, which fit on one page.
    async fn artifacts(&self, run: &Run) -> Result<Vec<String>, Failure> {
        let page = self.api.artifacts(run, None).await.map_err(call_failure)?;
        let name = |entry: &serde_json::Value| entry.get("name").and_then(|name| name.as_str()).map(str::to_owned);
        Ok(page.entries.iter().filter_map(name).collect())
    }

    async fn last_line(&self, id: &TaskId, status: &TaskStatus) -> String {
        let run = Run { task: id.clone(), run: status.runs.last().map_or(0, |run| run.number) };
        let log = self.log(&run).await.unwrap_or_default();
        let last = log.lines().rev().find(|line| !line.trim().is_empty());
        last.map_or_else(String::new, |line| format!("; last line of its log: {line}"))
    }

    async fn log(&self, run: &Run) -> Result<String, Failure> {
        let mut download = self.api.artifact(run, task::LOG_ARTIFACT).await.map_err(call_failure)?;
        let mut log = Vec::new();
        while let Some(piece) = download.next_chunk().await.map_err(call_failure)? {
            log.extend(piece);
            if log.len() >= DEMO_LOG_BYTES_MAX {
                break;
            }
        }
        Ok(String::from_utf8_lossy(&log).into_owned())
    }
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
