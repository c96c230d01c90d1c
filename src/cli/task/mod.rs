//! `journeyman task`: creates, shows, waits for, cancels and lists tasks of any Taskcluster queue, and prints their logs.

pub mod create;

use std::io::{BufRead as _, IsTerminal as _};

use clap::{Args, Subcommand};
use jiff::Timestamp;
use serde_json::{Value, json};

use super::exit::{Exit, ExitResult, Failure};
use super::output::{self, Format};
use super::queue_client::{QueueClient, QueueClientArgs};
use crate::console::rows::{Table, cell};
use crate::console::task::bulk::{self, BulkAction};
use crate::console::task::card;
use crate::console::task::log::open_log;
use crate::console::task::status::{FoundTask, TaskState, TaskStatus};
use crate::console::text::{self, strip_control_chars};
use journeyman_domain::id::{Run, TaskId};
use journeyman_domain::limits::{
    TASK_LIST_PAGES_MAX, TASK_LOG_POLL, TASK_LOG_STALL, TASK_WAIT_EXPLAINED_AFTER, TASK_WAIT_POLL_MAX,
    TASK_WAIT_POLL_MIN,
};
use journeyman_domain::refusal::Refusal;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::{Queue, Span};
use journeyman_worker::source::CallError;
use journeyman_worker::source::taskcluster::{Api, ListPage, TaskSearch};
use journeyman_worker::task::formats::{TASK_STATES, is_slugid};

#[derive(Debug, Args)]
pub struct TaskArgs {
    #[command(flatten)]
    client: QueueClientArgs,
    #[command(subcommand)]
    command: TaskCommand,
}

#[derive(Debug, Subcommand)]
enum TaskCommand {
    /// Create a task and print its id
    Create(create::CreateArgs),
    /// Show the status of tasks
    Status(TaskIdsArgs),
    /// Wait until tasks are resolved; exit code 0 if all of them completed
    Wait(WaitArgs),
    /// Print the log of a task
    Log(LogArgs),
    /// Run resolved tasks again: those that are named, or all that a search of an embedded queue finds
    ///
    /// A search finds tasks that did not complete, unless --state names another state.
    Rerun(ManyArgs),
    /// Cancel tasks: those that are named, or all that a search of an embedded queue finds; exit code 0 if all of them are canceled
    Cancel(ManyArgs),
    /// List the pending and running tasks of a queue, or find tasks in any state
    #[command(visible_alias = "ls")]
    List(ListArgs),
}

#[derive(Debug, Args)]
struct TaskIdsArgs {
    /// Task ids
    #[arg(value_name = "TASK", required = true, value_parser = parse_task_id)]
    tasks: Vec<TaskId>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

#[derive(Debug, Args)]
struct ManyArgs {
    /// Task ids
    #[arg(value_name = "TASK", value_parser = parse_task_id, conflicts_with_all = ["failed", "yes", "dry_run", "queue", "state", "name", "since"])]
    tasks: Vec<TaskId>,
    #[command(flatten)]
    search: SearchArgs,
    /// As --state failed
    #[arg(long, conflicts_with = "state")]
    failed: bool,
    /// List the tasks that the search finds, and change none
    #[arg(long)]
    dry_run: bool,
    /// Do not ask before the tasks of a search are changed
    #[arg(long)]
    yes: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

/// What a list is narrowed by.
#[derive(Debug, Args)]
struct SearchArgs {
    /// Task queue
    #[arg(long, value_name = "PROVISIONER/WORKER-TYPE")]
    queue: Option<Queue>,
    /// In this state
    #[arg(long, value_parser = TASK_STATES)]
    state: Option<String>,
    /// With this in the name
    #[arg(long, value_name = "TEXT")]
    name: Option<String>,
    /// Created within this time
    #[arg(long, value_name = "TIME")]
    since: Option<Span>,
}

impl SearchArgs {
    fn is_empty(&self) -> bool {
        self.queue.is_none() && self.state.is_none() && self.name.is_none() && self.since.is_none()
    }

    fn build(self) -> TaskSearch {
        let since = self.since.and_then(|span| Timestamp::now().checked_sub(span.0).ok());
        TaskSearch {
            queue: self.queue.map_or_else(String::new, |queue| queue.to_string()),
            state: self.state.unwrap_or_default(),
            name: self.name.unwrap_or_default(),
            since: since.map_or_else(String::new, |since| since.to_string()),
            limit: String::new(),
        }
    }
}

#[derive(Debug, Args)]
struct WaitArgs {
    #[command(flatten)]
    ids: TaskIdsArgs,
    /// Maximum time to wait
    #[arg(long, value_name = "TIME", default_value = "1h")]
    timeout: Span,
}

#[derive(Debug, Args)]
struct LogArgs {
    /// Task id
    #[arg(value_name = "TASK", value_parser = parse_task_id)]
    task: TaskId,
    /// Run number [default: the last run]
    #[arg(long, value_name = "RUN")]
    run: Option<u32>,
    /// Wait until the run is resolved and its log is uploaded
    #[arg(long)]
    wait: bool,
    /// Print the log as it grows, until the run is resolved; a worker of a Taskcluster needs `worker.live_log` for it
    #[arg(short, long, conflicts_with = "wait")]
    follow: bool,
}

#[derive(Debug, Args)]
struct ListArgs {
    #[command(flatten)]
    search: SearchArgs,
    /// All tasks of an embedded queue, resolved ones too, the newest first; so does --state, --name and --since
    #[arg(long)]
    all: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

fn parse_task_id(text: &str) -> Result<TaskId, String> {
    let valid = TaskId::parse(text).filter(|_| is_slugid(text));
    valid.ok_or_else(|| {
        "a task id is 22 letters, digits, dashes or underscores, such as XJOIQcqPRgykTZR_00-b1w".to_owned()
    })
}

pub async fn run(arguments: TaskArgs, environment: &Environment) -> ExitResult {
    let client = arguments.client.build(environment)?;
    match arguments.command {
        TaskCommand::Create(create) => create::run(create, &client).await,
        TaskCommand::Status(named) => {
            let (statuses, refused) = fetch_statuses(&client, &named.tasks).await;
            if refused.is_none() || !statuses.is_empty() {
                print_statuses(&client, &statuses, named.output).await?;
            }
            refused.map_or(Ok(Exit::Success), |refused| Err(client.call_failure(refused)))
        }
        TaskCommand::Wait(wait) => {
            let statuses = wait_for(&client, &wait.ids.tasks, wait.timeout).await?;
            print_statuses(&client, &statuses, wait.ids.output).await?;
            Ok(exit_after(&statuses))
        }
        TaskCommand::Log(log) => print_log(&client, &log).await,
        TaskCommand::Rerun(many) => change(&client, BulkAction::Rerun, many).await,
        TaskCommand::Cancel(many) => change(&client, BulkAction::Cancel, many).await,
        TaskCommand::List(list) => list_queue(&client, list).await,
    }
}

/// Changes the named tasks, or those that the search finds.
async fn change(client: &QueueClient, action: BulkAction, many: ManyArgs) -> ExitResult {
    if !many.tasks.is_empty() {
        return change_named(client, action, &many.tasks, many.output).await;
    }
    if many.search.is_empty() && !many.failed {
        return Err(Failure::new(
            Exit::Usage,
            "no task: name tasks, or what to search for by --failed, --state, --queue, --name or --since",
        ));
    }
    let mut search = many.search.build();
    if many.failed {
        "failed".clone_into(&mut search.state);
    }
    let found = bulk::find(&client.api, action, &search).await.map_err(|refused| client.call_failure(refused))?;
    if many.dry_run || found.is_empty() {
        print_found(&found)?;
        return Ok(Exit::Success);
    }
    if !many.yes && !confirm(&format!("{} {} tasks?", action.as_str(), found.len()))? {
        return Err(Failure::new(Exit::Usage, "nothing was changed; --yes does not ask, --dry-run lists the tasks"));
    }
    let ids = found.iter().filter_map(|task| TaskId::parse(&task.status.task)).collect();
    let result = bulk::apply(&client.api, action, ids).await;
    output::show(&json!(result), many.output, |_| {
        let failed = result.failed.iter().map(|(task, why)| strip_control_chars(&format!("{task}: {why}")) + "\n");
        format!("{} done, {} failed\n{}", result.succeeded.len(), result.failed.len(), failed.collect::<String>())
    })?;
    Ok(if result.failed.is_empty() { Exit::Success } else { Exit::Failed })
}

/// Asks a person; without a terminal the answer is no.
fn confirm(question: &str) -> std::io::Result<bool> {
    if !std::io::stdin().is_terminal() {
        return Ok(false);
    }
    output::print_stderr(&format!("{question} y or n"));
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(answer.trim().eq_ignore_ascii_case("y"))
}

/// Changes each task, also after an error, and prints their statuses.
async fn change_named(client: &QueueClient, action: BulkAction, tasks: &[TaskId], format: Format) -> ExitResult {
    let (mut statuses, mut exit) = (Vec::new(), Exit::Success);
    for task in tasks {
        match action.apply(&client.api, task).await.and_then(|status| TaskStatus::read(&status)) {
            Ok(status) => statuses.push(status),
            Err(refused) => {
                let failure = client.call_failure(refused);
                output::print_failure(&failure.message);
                exit = failure.exit;
            }
        }
    }
    match (format, statuses.as_slice()) {
        (_, []) => {}
        (Format::Json, statuses) => print_json(statuses)?,
        (Format::Table, statuses) => statuses.iter().try_for_each(|status| output::print(&status.describe()))?,
    }
    if action == BulkAction::Cancel {
        for status in statuses.iter().filter(|status| !status.is_canceled()) {
            output::print_stderr(&format!("{} is already {} and cannot be canceled", status.task, status.summary()));
            exit = Exit::Failed;
        }
    }
    Ok(exit)
}

/// The statuses up to the first error, and that error.
async fn fetch_statuses(client: &QueueClient, tasks: &[TaskId]) -> (Vec<TaskStatus>, Option<CallError>) {
    let mut statuses = Vec::new();
    for task in tasks {
        match client.api.task_status(task).await.and_then(|status| TaskStatus::read(&status)) {
            Ok(status) => statuses.push(status),
            Err(refused) => return (statuses, Some(refused)),
        }
    }
    (statuses, None)
}

/// Polls until every task is resolved; transient errors are retried until the timeout. Says once why a task waits.
pub async fn wait_for(client: &QueueClient, tasks: &[TaskId], timeout: Span) -> Result<Vec<TaskStatus>, Failure> {
    let waited = tokio::time::timeout(timeout.0, async {
        let (mut pause, began, mut has_explained) = (TASK_WAIT_POLL_MIN, tokio::time::Instant::now(), false);
        loop {
            match fetch_statuses(client, tasks).await {
                (statuses, None) if statuses.iter().all(TaskStatus::is_resolved) => return Ok(statuses),
                (statuses, None) if !has_explained && began.elapsed() >= TASK_WAIT_EXPLAINED_AFTER => {
                    has_explained = true;
                    let is_pending = |status: &&TaskStatus| status.state == TaskState::Pending;
                    if let Some(pending) = statuses.iter().find(is_pending) {
                        output::print_stderr(
                            format!("{}{}", pending.describe(), explain(client, pending).await).trim_end(),
                        );
                    }
                }
                (_, None) => {}
                (_, Some(CallError { refusal: Refusal::Retry { .. } | Refusal::Throttled { .. }, message })) => {
                    output::print_stderr(&format!("still waiting: {message}"));
                }
                (_, Some(refused)) => return Err(client.call_failure(refused)),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(TASK_WAIT_POLL_MAX);
        }
    });
    waited.await.unwrap_or_else(|_| Err(Failure::new(Exit::Failed, format!("not resolved after {timeout}"))))
}

/// Lines below the status of a task.
async fn explain(client: &QueueClient, status: &TaskStatus) -> String {
    let blocked = if status.state == TaskState::Pending { client.blocked_worker().await } else { None };
    card::read(&client.api, status, blocked, "").await.text(&status.task)
}

fn exit_after(resolved: &[TaskStatus]) -> Exit {
    let completed = resolved.iter().all(|status| status.state == TaskState::Completed);
    if completed { Exit::Success } else { Exit::Failed }
}

async fn print_statuses(client: &QueueClient, statuses: &[TaskStatus], format: Format) -> std::io::Result<()> {
    if format == Format::Json {
        return print_json(statuses);
    }
    for status in statuses {
        output::print(&format!("{}{}", status.describe(), explain(client, status).await))?;
    }
    Ok(())
}

fn print_json(statuses: &[TaskStatus]) -> std::io::Result<()> {
    match statuses {
        [one] => output::json(&one.raw),
        several => output::json(&Value::Array(several.iter().map(|status| status.raw.clone()).collect())),
    }
}

async fn print_log(client: &QueueClient, log: &LogArgs) -> ExitResult {
    if log.wait {
        wait_for(client, std::slice::from_ref(&log.task), Span(std::time::Duration::from_secs(24 * 3600))).await?;
    }
    let mut out = output::UntrustedOutput::to_stdout();
    let (mut chosen, mut printed) = (log.run, 0);
    loop {
        let status = client.api.task_status(&log.task).await.and_then(|status| TaskStatus::read(&status));
        let status = status.map_err(|refused| client.call_failure(refused))?;
        chosen = chosen.or_else(|| status.runs.last().map(|run| run.number));
        let run = chosen.map(|run| Run { task: log.task.clone(), run });
        // Before the log is read, so that the last reading has all of it.
        let may_grow = log.follow && status.may_run(chosen);
        let read = match &run {
            Some(run) => {
                // Without --follow, what the log of a running task has so far.
                let stalls_after = (!log.follow && status.may_run(chosen)).then_some(TASK_LOG_STALL);
                read_log(&client.api, run, stalls_after, &mut printed, &mut out).await?
            }
            None => Err(CallError { refusal: Refusal::Gone, message: String::new() }),
        };
        match read {
            Ok(()) if !may_grow => return Ok(Exit::Success),
            Err(CallError { refusal: Refusal::Gone, .. }) if !may_grow => {
                return Err(Failure::new(Exit::Failed, status.missing_log_reason(log.run)));
            }
            Err(refused @ CallError { refusal: Refusal::Rejected | Refusal::Denied | Refusal::Stale, .. }) => {
                return Err(client.call_failure(refused));
            }
            Err(refused) if !log.follow => return Err(client.call_failure(refused)),
            Ok(()) | Err(_) => tokio::time::sleep(TASK_LOG_POLL).await,
        }
    }
}

/// Prints the log after its first `printed` bytes. The outer error is one of standard output.
async fn read_log(
    api: &Api,
    run: &Run,
    stalls_after: Option<std::time::Duration>,
    printed: &mut usize,
    out: &mut output::UntrustedOutput,
) -> std::io::Result<Result<(), CallError>> {
    let mut download = match open_log(api, run, "").await {
        Ok(download) => download,
        Err(refused) => return Ok(Err(refused)),
    };
    let mut skipped = 0;
    loop {
        let chunk = match stalls_after {
            None => download.next_chunk().await,
            Some(limit) => tokio::time::timeout(limit, download.next_chunk()).await.unwrap_or(Ok(None)),
        };
        match chunk {
            Ok(None) => return Ok(Ok(())),
            Ok(Some(chunk)) => {
                let skip = (*printed - skipped).min(chunk.len());
                let new = chunk.get(skip..).unwrap_or_default();
                skipped += skip;
                *printed += new.len();
                skipped += new.len();
                out.print(new)?;
            }
            Err(refused) => return Ok(Err(refused)),
        }
    }
}

async fn list_queue(client: &QueueClient, list: ListArgs) -> ExitResult {
    let SearchArgs { state, name, since, .. } = &list.search;
    if list.all || state.is_some() || name.is_some() || since.is_some() {
        return find_tasks(client, list).await;
    }
    let queue = client.task_queue(list.search.queue)?.to_string();
    let claimed = all_pages(client, async |token| client.api.claimed_tasks(&queue, token).await).await?;
    let pending = all_pages(client, async |token| client.api.pending_tasks(&queue, token).await).await?;
    match list.output {
        Format::Json => output::json(&json!({ "claimed": claimed, "pending": pending }))?,
        Format::Table if claimed.is_empty() && pending.is_empty() => {
            output::line(&format!("no pending or running tasks in {queue}"))?;
        }
        Format::Table => {
            for (state, entry) in
                claimed.iter().map(|entry| ("running", entry)).chain(pending.iter().map(|entry| ("pending", entry)))
            {
                let text = |path| entry.pointer(path).and_then(Value::as_str).unwrap_or("-");
                let (id, worker, name) = (text("/taskId"), text("/workerId"), text("/task/metadata/name"));
                output::line(&strip_control_chars(&format!("{id}  {state:7}  {worker:20}  {name}")))?;
            }
        }
    }
    Ok(Exit::Success)
}

async fn find_tasks(client: &QueueClient, list: ListArgs) -> ExitResult {
    let search = list.search.build();
    let found = all_pages(client, async |token| {
        let page = client.api.find_tasks(&search, token).await;
        page.map_err(|mut refused| {
            if refused.refusal == Refusal::Gone {
                "only the queue of journeyman lists resolved tasks; without --all, --state, --name and --since, the \
                 pending and running tasks of one --queue are listed"
                    .clone_into(&mut refused.message);
            }
            refused
        })
    })
    .await?;
    if list.output == Format::Json {
        output::json(&json!({ "tasks": found }))?;
        return Ok(Exit::Success);
    }
    let tasks: Result<Vec<_>, _> = found.iter().map(FoundTask::read).collect();
    let tasks = tasks.map_err(|refused| client.call_failure(refused))?;
    print_found(&tasks)?;
    Ok(Exit::Success)
}

fn print_found(tasks: &[FoundTask]) -> std::io::Result<()> {
    if tasks.is_empty() {
        return output::line("no such tasks");
    }
    let row = |FoundTask { status, name, created }: &FoundTask| {
        let created = created.map_or_else(String::new, |at| at.strftime("%Y-%m-%d %H:%M:%SZ").to_string());
        [&status.task, &status.summary(), &status.task_queue(), &created, name].map(cell).to_vec()
    };
    output::print(&text::table(&Table::new("", &["task", "state", "queue", "created", "name"], tasks.iter().map(row))))
}

async fn all_pages(
    client: &QueueClient,
    list: impl AsyncFn(Option<&str>) -> Result<ListPage, CallError>,
) -> Result<Vec<Value>, Failure> {
    let (mut entries, mut token) = (Vec::new(), None::<String>);
    for _ in 0..TASK_LIST_PAGES_MAX {
        let page = list(token.as_deref()).await.map_err(|refused| client.call_failure(refused))?;
        entries.extend(page.entries);
        token = page.continuation_token;
        if token.is_none() {
            break;
        }
    }
    Ok(entries)
}
