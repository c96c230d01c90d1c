//! `journeyman task`: create, look at, wait for, read, cancel and list tasks of any queue that speaks the
//! Taskcluster API.

pub mod create;
pub mod status;

use clap::{Args, Subcommand};

use super::exit::{Ended, Exit, Failure};
use super::output::{self, Format};
use super::place::{Client, Place};
use super::steer::status::plain;
use crate::config::Environment;
use crate::config::values::{Queue, Span};
use crate::domain::id::{Run, TaskId};
use crate::domain::refusal::Refusal;
use crate::limits::{TASK_LIST_PAGES_MAX, TASK_WAIT_POLL_MAX, TASK_WAIT_POLL_MIN};
use crate::source::Refused;
use status::{State, Status};

/// The artifact that a task's log is found under.
pub const LOG: &str = "public/logs/live.log";

/// What to do with tasks.
#[derive(Debug, Args)]
pub struct TaskArgs {
    #[command(flatten)]
    place: Place,
    #[command(subcommand)]
    command: TaskCommand,
}

#[derive(Debug, Subcommand)]
enum TaskCommand {
    /// Create a task; its id is printed
    Create(create::Create),
    /// Show how tasks are
    Status(Named),
    /// Wait until tasks are resolved; exit code 0 when all of them completed
    Wait(Wait),
    /// Print the log of a task
    Log(Log),
    /// Cancel tasks; exit code 0 when all of them are canceled
    Cancel(Named),
    /// List the tasks of a queue that wait or run
    List(List),
}

#[derive(Debug, Args)]
struct Named {
    /// The tasks
    #[arg(value_name = "TASK", required = true, value_parser = task_id)]
    tasks: Vec<TaskId>,
    /// How to print it
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

#[derive(Debug, Args)]
struct Wait {
    #[command(flatten)]
    named: Named,
    /// How long to wait at most
    #[arg(long, value_name = "TIME", default_value = "1h")]
    timeout: Span,
}

#[derive(Debug, Args)]
struct Log {
    /// The task
    #[arg(value_name = "TASK", value_parser = task_id)]
    task: TaskId,
    /// Which run; the last one where it is not given
    #[arg(long, value_name = "RUN")]
    run: Option<u32>,
    /// Wait until the run is resolved; the log is stored then
    #[arg(long)]
    wait: bool,
}

#[derive(Debug, Args)]
struct List {
    /// Which queue [default: that of `journeyman dev`]
    #[arg(long, value_name = "PROVISIONER/WORKER-TYPE")]
    queue: Option<Queue>,
    /// How to print it
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

fn task_id(text: &str) -> Result<TaskId, String> {
    TaskId::parse(text).ok_or_else(|| "a task id is printable ASCII without space and slash".to_owned())
}

/// Runs it.
///
/// # Errors
///
/// See [`Client::refused`].
pub async fn run(arguments: TaskArgs, environment: &Environment) -> Ended {
    let client = arguments.place.client(environment)?;
    match arguments.command {
        TaskCommand::Create(create) => create::run(create, &client).await,
        TaskCommand::Status(named) => {
            let (statuses, refused) = statuses(&client, &named.tasks).await;
            if refused.is_none() || !statuses.is_empty() {
                show(&statuses, named.output)?;
            }
            refused.map_or(Ok(Exit::Done), Err)
        }
        TaskCommand::Wait(wait) => {
            let statuses = wait_for(&client, &wait.named.tasks, wait.timeout).await?;
            show(&statuses, wait.named.output)?;
            let all = statuses.iter().all(|status| status.state == State::Completed);
            Ok(if all { Exit::Done } else { Exit::No })
        }
        TaskCommand::Log(log) => read_log(&client, &log).await,
        TaskCommand::Cancel(named) => cancel(&client, &named).await,
        TaskCommand::List(list) => list_queue(&client, list).await,
    }
}

/// Cancels each, whatever became of the one before it.
async fn cancel(client: &Client, named: &Named) -> Ended {
    let (mut statuses, mut refused) = (Vec::new(), None);
    for task in &named.tasks {
        match client.api.cancel_task(task).await.map_err(|refused| client.refused(refused)) {
            Ok(status) => statuses.push(Status::read(&status)),
            Err(failure) if named.tasks.len() == 1 => return Err(failure),
            Err(failure) => {
                output::note(&format!("error: {}", failure.message));
                refused = Some(failure.exit);
            }
        }
    }
    show(&statuses, named.output)?;
    let mut exit = refused.unwrap_or(Exit::Done);
    for status in statuses.iter().filter(|status| !status.is_canceled()) {
        output::note(&format!("{} is {} already, so there is nothing to cancel", status.task, status.in_words()));
        exit = Exit::No;
    }
    Ok(exit)
}

/// Those that can be had up to the first that cannot, and why that cannot.
async fn statuses(client: &Client, tasks: &[TaskId]) -> (Vec<Status>, Option<Failure>) {
    let mut statuses = Vec::new();
    for task in tasks {
        match client.api.task_status(task).await {
            Ok(status) => statuses.push(Status::read(&status)),
            Err(refused) => return (statuses, Some(client.refused(refused))),
        }
    }
    (statuses, None)
}

/// Asks until every task is resolved. What is transient is asked again for as long as the time lasts.
///
/// # Errors
///
/// A definite refusal, or [`Exit::No`] where the time is over.
pub async fn wait_for(client: &Client, tasks: &[TaskId], timeout: Span) -> Result<Vec<Status>, Failure> {
    let waited = tokio::time::timeout(timeout.0, async {
        let mut pause = TASK_WAIT_POLL_MIN;
        loop {
            match statuses_or_retry(client, tasks).await? {
                Some(statuses) if statuses.iter().all(Status::is_resolved) => return Ok(statuses),
                Some(_) | None => tokio::time::sleep(pause).await,
            }
            pause = (pause * 2).min(TASK_WAIT_POLL_MAX);
        }
    });
    waited.await.unwrap_or_else(|_| Err(Failure::new(Exit::No, format!("not resolved after {timeout}"))))
}

async fn statuses_or_retry(client: &Client, tasks: &[TaskId]) -> Result<Option<Vec<Status>>, Failure> {
    let mut statuses = Vec::new();
    for task in tasks {
        match client.api.task_status(task).await {
            Ok(status) => statuses.push(Status::read(&status)),
            Err(Refused { refusal: Refusal::Retry { .. } | Refusal::Throttled { .. }, what }) => {
                output::note(&format!("still waiting: {what}"));
                return Ok(None);
            }
            Err(refused) => return Err(client.refused(refused)),
        }
    }
    Ok(Some(statuses))
}

fn show(statuses: &[Status], format: Format) -> std::io::Result<()> {
    match (format, statuses) {
        (Format::Json, [one]) => output::json(&one.raw),
        (Format::Json, several) => {
            output::json(&serde_json::Value::Array(several.iter().map(|status| status.raw.clone()).collect()))
        }
        (Format::Table, statuses) => statuses.iter().try_for_each(|status| output::print(&status.describe())),
    }
}

async fn read_log(client: &Client, log: &Log) -> Ended {
    if log.wait {
        wait_for(client, std::slice::from_ref(&log.task), Span(std::time::Duration::from_secs(24 * 3600))).await?;
    }
    let status = client.api.task_status(&log.task).await.map_err(|refused| client.refused(refused))?;
    let status = Status::read(&status);
    let absent = || Failure::new(Exit::No, status.why_no_log(log.run));
    let Some(run) = log.run.or_else(|| status.runs.last().map(|run| run.number)) else {
        return Err(absent());
    };
    let run = Run { task: log.task.clone(), run };
    let mut download = match client.api.artifact(&run, LOG).await {
        Ok(download) => download,
        Err(Refused { refusal: Refusal::Gone, .. }) => return Err(absent()),
        Err(refused) => return Err(client.refused(refused)),
    };
    let mut shown = output::Foreign::to_stdout();
    while let Some(piece) = download.piece().await.map_err(|refused| client.refused(refused))? {
        shown.print(&piece)?;
    }
    Ok(Exit::Done)
}

async fn list_queue(client: &Client, list: List) -> Ended {
    let named = list.queue.map(|queue| queue.to_string());
    let Some(queue) = named.or_else(|| client.task_queue.clone()) else {
        return Err(Failure::new(Exit::Usage, "which queue? name it with --queue PROVISIONER/WORKER-TYPE"));
    };
    let mut entries = Vec::new();
    for listing in [Listing::Claimed, Listing::Pending] {
        let mut token = None;
        for _ in 0..TASK_LIST_PAGES_MAX {
            let page = match listing {
                Listing::Claimed => client.api.claimed_tasks(&queue, token.as_deref()).await,
                Listing::Pending => client.api.pending_tasks(&queue, token.as_deref()).await,
            };
            let page = page.map_err(|refused| client.refused(refused))?;
            entries.extend(page.entries.into_iter().map(|entry| (listing, entry)));
            token = page.continuation_token;
            if token.is_none() {
                break;
            }
        }
    }
    match list.output {
        Format::Json => {
            let of = |wanted: Listing| -> Vec<_> {
                entries.iter().filter(|(listing, _)| *listing == wanted).map(|(_, entry)| entry.clone()).collect()
            };
            output::json(&serde_json::json!({ "claimed": of(Listing::Claimed), "pending": of(Listing::Pending) }))?;
        }
        Format::Table if entries.is_empty() => output::line(&format!("nothing waits or runs in {queue}"))?,
        Format::Table => {
            let text = |entry: &serde_json::Value, path: &str| {
                entry.pointer(path).and_then(serde_json::Value::as_str).unwrap_or("-").to_owned()
            };
            for (listing, entry) in &entries {
                let state = match listing {
                    Listing::Claimed => "running",
                    Listing::Pending => "pending",
                };
                let (id, name, worker) =
                    (text(entry, "/taskId"), text(entry, "/task/metadata/name"), text(entry, "/workerId"));
                output::line(&plain(&format!("{id}  {state:7}  {worker:20}  {name}")))?;
            }
        }
    }
    Ok(Exit::Done)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listing {
    Claimed,
    Pending,
}
