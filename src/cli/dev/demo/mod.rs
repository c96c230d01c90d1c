//! `journeyman dev --demo`: creates the tasks, prints how they proceed until they are resolved, and checks each result.

mod tasks;

use std::io;
use std::path::Path;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::json;
use tokio::time::Instant;

use self::tasks::{DemoTask, GREET, GREET_PROGRAM};
use super::{DevSession, write_file};
use crate::cli::exit::{Exit, ExitResult, Failure};
use crate::cli::signals::ExitSignals;
use crate::cli::{output, worker, worker_setup};
use crate::config::schema::Config;
use crate::console::task::status::{TaskState, TaskStatus};
use journeyman_domain::limits::{DEMO_POLL_INTERVAL, DEMO_TASKS_TIMEOUT};
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::Span;
use journeyman_worker::engine::Control;
use journeyman_worker::engine::status::BlockedReason;
use journeyman_worker::handler::config::{Handler, ProgramHandler};
use journeyman_worker::source::CallError;
use journeyman_worker::source::taskcluster::Api;
use journeyman_worker::task::COMMAND;
use journeyman_worker::task::formats::format_time;

/// Short enough that the task `long` is reclaimed (at half of so short a claim), long enough to survive a stall of 5 s.
const CLAIM_TIMEOUT: Duration = Duration::from_secs(20);
/// Small enough that the log of `big-log` is truncated.
const TASK_LOG_MAX: &str = "1MiB";

/// Other lines would hide those of the demo.
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

/// What follows the last task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Exit,
    Keep,
}

pub(super) async fn run(dev: DevSession, end: End, mut signals: ExitSignals, environment: &Environment) -> ExitResult {
    let api = dev.state().client()?;
    let tasks = tasks::tasks().map_err(|error| Failure::from_error(Exit::Internal, &error))?;
    let mut demo = Demo { api, tasks, blocked: None, started_at: Instant::now() };
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
    let (address, page) = dev.listen().await?;
    let address = address.map_or_else(String::new, |address| format!("http://{address}/"));
    output::line(&format!("page  {address}"))?;
    let mut watched = None;
    let background = async {
        watched = Some(demo.watch(&control).await);
        if end == End::Keep {
            let printed = demo.print_summary();
            let kept = "the queue and the worker stay until Ctrl-C: `journeyman task list --all` lists the tasks, and `journeyman task log TASK` prints a log";
            if let Err(error) = printed.and_then(|()| output::line(&format!("\n{kept}\npage  {address}"))) {
                return error.into();
            }
            return std::future::pending().await;
        }
        control.drain().await;
        tokio::time::sleep(DEMO_TASKS_TIMEOUT).await;
        Failure::new(Exit::Failed, "all tasks are resolved, but the worker did not finish draining")
    };
    let ended = Box::pin(worker::serve(worker, &dev.config, environment, signals, None, page, background)).await;
    dev.queue.stop().await;
    if end == End::Exit {
        demo.print_summary()?;
    }
    ended.and_then(|_| watched.unwrap_or(Ok(Exit::Failed)))
}

struct Demo {
    api: Api,
    tasks: Vec<DemoTask>,
    /// Why the host took no tasks when it was last asked.
    blocked: Option<String>,
    started_at: Instant,
}

impl Demo {
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
                if !self.tasks[index].is_resolved() {
                    self.update(index).await?;
                }
            }
            let blocked = blocked_by_host(control).await;
            if let Some(why) = blocked.as_ref().filter(|_| blocked != self.blocked) {
                self.print(&format!("claiming nothing: {why}"))?;
            }
            self.blocked = blocked;
            if self.tasks.iter().all(DemoTask::is_resolved) {
                let passed = self.tasks.iter().all(|task| task.problem().is_none());
                return Ok(if passed { Exit::Success } else { Exit::Failed });
            }
            tokio::time::sleep(DEMO_POLL_INTERVAL).await;
        }
        Ok(Exit::Failed)
    }

    async fn update(&mut self, index: usize) -> Result<(), Failure> {
        let task = &self.tasks[index];
        let status = self.api.task_status(&task.id).await.and_then(|status| TaskStatus::read(&status));
        let status = status.map_err(call_failure)?;
        if task.cancel && status.state == TaskState::Running {
            self.api.cancel_task(&task.id).await.map_err(call_failure)?;
        }
        let line = task.line(&status);
        if task.status.as_ref().is_none_or(|before| task.line(before) != line) {
            self.print(&line)?;
        }
        self.tasks[index].status = Some(status);
        Ok(())
    }

    fn print(&self, text: &str) -> io::Result<()> {
        output::line(&format!("{:6.1}s  {text}", self.started_at.elapsed().as_secs_f64()))
    }

    fn print_summary(&self) -> io::Result<()> {
        let problems: Vec<String> = self.tasks.iter().filter_map(DemoTask::problem).collect();
        let (passed, all) = (self.tasks.len() - problems.len(), self.tasks.len());
        output::line(&format!("\n{passed} of {all} ended as expected"))?;
        problems.iter().try_for_each(|problem| output::line(&format!("  {problem}")))
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
