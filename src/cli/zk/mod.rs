//! `journeyman zk`: submits requests to a queue in a ZooKeeper, and looks at it.

mod doctor;
mod look;

use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::{Value, json};

use super::exit::{Exit, ExitResult, Failure};
use super::output::{self, Format};
use super::signals::ExitSignals;
use super::source_args::SourceArgs;
use crate::config::schema::Source;
use crate::source::zookeeper::config::ZooKeeperSource;
use crate::source::zookeeper::{Dialect, ZooKeeperQueue};
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::Span;
use journeyman_platform::zookeeper::Session;
use journeyman_platform::zookeeper::janitor::Janitor;
use journeyman_platform::zookeeper::job_queue::{JobError, JobQueue};
use journeyman_platform::zookeeper::submit::{CancelResult, Submission};

/// `journeyman zk`
#[derive(Debug, Subcommand)]
pub(super) enum ZkCommand {
    /// Add a request to a source's queue
    Submit(SubmitArgs),
    /// Ask for the end of a request
    Cancel(CancelArgs),
    /// End requests whose worker is gone and remove leftovers of a queue, each minute until stopped
    Janitor(JanitorArgs),
    /// Show a node: what it is, its data, who holds its lock
    Show(ShowArgs),
    /// Check server, permissions, clock, queues, locks and leftovers, and say how to fix what fails
    Doctor(SourceArgs),
}

#[derive(Debug, Args)]
pub(super) struct SubmitArgs {
    /// Payload in JSON: the parameters of a Zuul's request
    #[arg(value_name = "PAYLOAD", default_value = "{}")]
    payload: String,
    /// Precedence; the lowest is first
    #[arg(long, value_name = "NUMBER", default_value_t = 200)]
    precedence: i64,
    /// Further key of a Zuul's request, such as tenant_name=example; its value is text
    #[arg(long, value_name = "KEY=VALUE")]
    field: Vec<String>,
    /// Zone of the source whose queue gets it [default: the first]
    #[arg(long, value_name = "ZONE")]
    zone: Option<String>,
    /// Wait for the result and print it
    #[arg(long)]
    wait: bool,
    /// How long to wait [default: without end]
    #[arg(long, value_name = "TIME", requires = "wait")]
    timeout: Option<Span>,
    #[command(flatten)]
    source: SourceArgs,
}

#[derive(Debug, Args)]
pub(super) struct CancelArgs {
    /// Id of the request
    #[arg(value_name = "REQUEST")]
    request: String,
    #[command(flatten)]
    source: SourceArgs,
}

#[derive(Debug, Args)]
pub(super) struct JanitorArgs {
    /// Stop after one look, or after the second that ends the requests which the first one found lost
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    source: SourceArgs,
}

#[derive(Debug, Args)]
pub(super) struct ShowArgs {
    /// Path of the node, below the chroot of the source
    #[arg(value_name = "PATH")]
    path: String,
    #[command(flatten)]
    source: SourceArgs,
}

/// Runs the command.
///
/// # Errors
///
/// [`Exit::Unreachable`] without an answer, [`Exit::Failed`] if the call fails.
pub(super) async fn run(command: ZkCommand, environment: &Environment) -> ExitResult {
    match command {
        ZkCommand::Submit(arguments) => submit(arguments, environment).await,
        ZkCommand::Cancel(arguments) => {
            let (source, session, queues) = open(&arguments.source, environment).await?;
            let (id, session) = (&arguments.request, Arc::new(session));
            for queue in queues {
                let canceled = JobQueue::new(&queue.path).cancel(&session, source.dialect, id).await;
                let canceled = canceled.map_err(|error| job_failure(&error))?;
                let text = match canceled {
                    CancelResult::Canceled => "canceled",
                    CancelResult::Requested => "asked its worker to stop it",
                    CancelResult::Gone => continue,
                };
                return print(arguments.source.output, text, &json!({ "request": id, "cancel": canceled }));
            }
            Err(Failure::new(Exit::Failed, format!("there is no request {id} that could be canceled")))
        }
        ZkCommand::Janitor(arguments) => janitor(arguments, environment).await,
        ZkCommand::Show(ShowArgs { path, source }) => {
            look::show(&open(&source, environment).await?.1, &path, source.output).await
        }
        ZkCommand::Doctor(source) => doctor::run(&source, environment).await,
    }
}

async fn submit(arguments: SubmitArgs, environment: &Environment) -> ExitResult {
    let usage = |message: String| Failure::new(Exit::Usage, message);
    let payload = serde_json::from_slice(arguments.payload.as_bytes())
        .map_err(|error| usage(format!("the payload is no JSON: {error}")))?;
    let field = |pair: &String| {
        let (key, value) = pair.split_once('=').ok_or_else(|| usage(format!("\"{pair}\" is not KEY=VALUE")))?;
        Ok((key.to_owned(), Value::from(value)))
    };
    let mut fields = arguments.field.iter().map(field).collect::<Result<serde_json::Map<_, _>, Failure>>()?;
    let (source, session, queues) = open(&arguments.source, environment).await?;
    if arguments.wait && source.dialect == Dialect::ZuulExecutor {
        return Err(usage("a build has no result to wait for: its scheduler gets events".to_owned()));
    }
    let zone = arguments.zone.as_ref();
    let queue = queues.iter().find(|queue| zone.is_none() || zone == queue.zone.as_ref());
    let queue = queue.ok_or_else(|| usage("the source claims nothing of this zone".to_owned()))?;
    if let Some(zone) = &queue.zone {
        fields.insert("zone".to_owned(), zone.as_str().into());
    }
    let queue = JobQueue::new(&queue.path);
    let SubmitArgs { precedence, wait, timeout, .. } = arguments;
    let submission = Submission { dialect: source.dialect, payload, precedence, fields, waits: wait };
    let id = queue.add(&session, &submission).await.map_err(|error| job_failure(&error))?;
    let output = arguments.source.output;
    if !wait {
        return print(output, &id, &json!({ "request": id }));
    }
    let waiting = queue.wait_for_result(&session, source.dialect, &id);
    let limit = timeout.map_or(Duration::MAX, |timeout| timeout.0);
    let late = || Failure::new(Exit::Failed, format!("request {id} had no result in time; `zk cancel` ends it"));
    let result = tokio::time::timeout(limit, waiting).await.map_err(|_| late())?;
    let result = result.map_err(|error| job_failure(&error))?;
    print(output, &result.to_string(), &json!({ "request": id, "result": result }))
}

/// One line: `text`, unless it is empty, or JSON.
fn print(format: Format, text: &str, json: &Value) -> ExitResult {
    match format {
        Format::Json => output::line(&json.to_string())?,
        Format::Table if text.is_empty() => {}
        Format::Table => output::line(text)?,
    }
    Ok(Exit::Success)
}

async fn janitor(arguments: JanitorArgs, environment: &Environment) -> ExitResult {
    let (source, session, queues) = open(&arguments.source, environment).await?;
    let (session, mut signals) = (Arc::new(session), ExitSignals::listen()?);
    let queues = queues.iter().map(|queue| Janitor::new(JobQueue::new(&queue.path), source.dialect));
    let (mut janitors, output) = (queues.collect::<Vec<_>>(), arguments.source.output);
    for look in 1_u64.. {
        for janitor in &mut janitors {
            match janitor.clean(&session).await.map_err(|error| job_failure(&error))? {
                None => drop(print(output, "another process cleans this queue", &json!({ "event": "busy" }))?),
                Some(cleaned) => {
                    let lost = cleaned.lost.iter().map(|id| ("lost", "request", id));
                    let removed = cleaned.removed.iter().map(|path| ("removed", "path", path));
                    let released = cleaned.released.iter().map(|path| ("released", "path", path));
                    for (what, key, name) in lost.chain(removed).chain(released) {
                        print(output, &format!("{what:<8} {name}"), &json!({ "event": what, key: name }))?;
                    }
                }
            }
        }
        if arguments.once && (look == 2 || janitors.iter().all(|janitor| !janitor.has_suspects())) {
            break;
        }
        let wait = janitors.iter().map(Janitor::pause).min().unwrap_or_default();
        tokio::select! {
            _ = signals.next() => break,
            () = tokio::time::sleep(wait) => {}
        }
    }
    Ok(Exit::Success)
}

fn find_source(arguments: &SourceArgs, environment: &Environment) -> Result<(String, ZooKeeperSource), Failure> {
    let config = arguments.settings.load(environment)?.config;
    let (name, source) = arguments.find(&config, "zookeeper", |source| match source {
        Source::Zookeeper(source) => Some(source),
        Source::Taskcluster(_) | Source::Amqp(_) | Source::Screwdriver(_) => None,
    })?;
    Ok((name.to_owned(), source.clone()))
}

async fn open(
    arguments: &SourceArgs,
    environment: &Environment,
) -> Result<(ZooKeeperSource, Session, Vec<ZooKeeperQueue>), Failure> {
    let (_, source) = find_source(arguments, environment)?;
    let connected = Session::connect(&source.connect_config()).await;
    let session = connected.map_err(|error| Failure::new(Exit::Unreachable, error.to_string()))?;
    let queues = source.queues();
    Ok((source, session, queues))
}

fn job_failure(error: &JobError) -> Failure {
    let exit = match error {
        JobError::Call(error) if error.is_unanswered() => Exit::Unreachable,
        JobError::Call(_) | JobError::Shards(_) | JobError::Unreadable { .. } => Exit::Failed,
    };
    Failure::new(exit, error.to_string())
}
