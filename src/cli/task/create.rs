//! `journeyman task create`: creates a task from a command line, a payload or a definition.

use std::io::Read as _;
use std::path::Path;

use clap::Args;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::super::exit::{Exit, ExitResult, Failure};
use super::super::output::{self, Format};
use super::super::queue_client::QueueClient;
use crate::console::task::definition;
use journeyman_domain::id::TaskId;
use journeyman_domain::limits::TASK_DEFINITION_BYTES_MAX;
use journeyman_platform::settings::values::{Queue, Span};
use journeyman_services::queue::Priority;
use journeyman_worker::task::formats::new_task_id;

#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Program and arguments, for the `command` handler
    #[arg(value_name = "PROGRAM", last = true)]
    program: Vec<String>,
    /// Payload as JSON, `@FILE` to read a file, `-` to read standard input
    #[arg(long, value_name = "JSON", conflicts_with = "program")]
    payload: Option<String>,
    /// Definition as JSON, `@FILE` to read a file, `-` to read standard input; missing properties are filled in
    #[arg(long, value_name = "JSON", conflicts_with_all = ["program", "payload"])]
    definition: Option<String>,
    /// Task queue [default: the one of `journeyman dev`]
    #[arg(long, value_name = "PROVISIONER/WORKER-TYPE")]
    queue: Option<Queue>,
    /// Name of the task
    #[arg(long)]
    name: Option<String>,
    /// Priority among pending tasks [default: lowest]
    #[arg(long, value_enum)]
    priority: Option<Priority>,
    /// Maximum number of retries [default: 5]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(0..=49))]
    retries: Option<u8>,
    /// Time until the deadline of the task
    #[arg(long, value_name = "TIME", default_value = "1h")]
    deadline: Span,
    /// Maximum run time of the program
    #[arg(long, value_name = "TIME", default_value = "10m")]
    max_run_time: Span,
    /// Task id [default: a new one]
    #[arg(long, value_name = "TASK", value_parser = super::parse_task_id)]
    task_id: Option<TaskId>,
    /// Wait until the task is resolved; exit code 0 if it completed
    #[arg(long)]
    wait: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

pub async fn run(create: CreateArgs, client: &QueueClient) -> ExitResult {
    let task = create.task_id.clone().unwrap_or_else(new_task_id);
    let definition = create.definition(client)?;
    let status = client.api.create_task(&task, definition).await.map_err(|refused| client.call_failure(refused))?;
    if !create.wait {
        match create.output {
            Format::Table => output::line(task.as_str())?,
            Format::Json => output::json(&status)?,
        }
        return Ok(Exit::Success);
    }
    if create.output == Format::Table {
        output::print_stderr(&format!("{task} created, waiting"));
    }
    let statuses = super::wait_for(client, std::slice::from_ref(&task), create.deadline).await?;
    super::print_statuses(client, &statuses, create.output).await?;
    Ok(super::exit_after(&statuses))
}

impl CreateArgs {
    fn definition(&self, client: &QueueClient) -> Result<Value, Failure> {
        let mut definition = match &self.definition {
            Some(text) => parse_json_arg(text, "definition")?,
            None => Map::new(),
        };
        self.fill_queue(&mut definition, client)?;
        if !definition.contains_key("payload") {
            definition.insert("payload".to_owned(), self.payload()?);
        }
        let name = self.name.as_ref().or_else(|| self.program.first()).map_or("task", String::as_str);
        definition::complete(&mut definition, name, self.deadline.0)
            .ok_or_else(|| Failure::new(Exit::Usage, "--deadline is too large"))?;
        if let Some(priority) = self.priority {
            definition.insert("priority".to_owned(), json!(priority));
        }
        if let Some(retries) = self.retries {
            definition.insert("retries".to_owned(), json!(retries));
        }
        Ok(Value::Object(definition))
    }

    /// Uses provisionerId and workerType, which the Azure dialect also has; it has no taskQueueId.
    fn fill_queue(&self, definition: &mut Map<String, Value>, client: &QueueClient) -> Result<(), Failure> {
        let has_queue =
            ["taskQueueId", "provisionerId", "workerType"].iter().any(|name| definition.contains_key(*name));
        if has_queue && self.queue.is_none() {
            return Ok(());
        }
        let queue = client.task_queue(self.queue.clone())?;
        definition.remove("taskQueueId");
        definition.insert("provisionerId".to_owned(), json!(queue.provisioner()));
        definition.insert("workerType".to_owned(), json!(queue.worker_type()));
        Ok(())
    }

    fn payload(&self) -> Result<Value, Failure> {
        if let Some(text) = &self.payload {
            return parse_json_arg(text, "payload").map(Value::Object);
        }
        if self.program.is_empty() {
            return Err(Failure::new(
                Exit::Usage,
                "no payload: pass a program (`journeyman task create -- /bin/echo hello`), --payload or --definition",
            ));
        }
        Ok(json!({ "command": [self.program], "maxRunTime": self.max_run_time.0.as_secs().max(1) }))
    }
}

/// Parses a JSON argument: the text itself, `@FILE`, or `-` for standard input.
pub(in crate::cli) fn parse_json_arg<T: DeserializeOwned>(text: &str, what: &str) -> Result<T, Failure> {
    serde_json::from_slice(read_arg(text, what)?.as_bytes()).map_err(|error| {
        Failure::new(Exit::Usage, format!("the {what} is not valid JSON: {error}; to read a file, write @FILE"))
    })
}

fn read_arg(text: &str, what: &str) -> Result<String, Failure> {
    let from: Box<dyn std::io::Read> = match text.strip_prefix('@') {
        _ if text == "-" => Box::new(std::io::stdin().lock()),
        Some(path) => Box::new(std::fs::File::open(Path::new(path)).map_err(|error| {
            Failure::new(Exit::HostUnusable, format!("cannot read the {what} from {path}: {error}"))
        })?),
        None => return Ok(text.to_owned()),
    };
    let mut text = String::new();
    from.take(TASK_DEFINITION_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(|error| Failure::new(Exit::HostUnusable, format!("cannot read the {what}: {error}")))?;
    if text.len() as u64 > TASK_DEFINITION_BYTES_MAX {
        return Err(Failure::new(Exit::Usage, format!("the {what} exceeds the 1 MiB that queues accept")));
    }
    Ok(text)
}
