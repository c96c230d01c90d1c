//! `journeyman run --with-worker-runner`: a worker that Taskcluster's worker-runner starts in place of generic-worker.

use std::collections::BTreeMap;
use std::io::{self, BufRead as _, IsTerminal as _, Read as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use clap::Args;
use serde_json::Value;
use tokio::sync::mpsc;

use super::exit::{Exit, ExitResult, Failure};
use super::signals::ExitSignals;
use super::{amqp_setup, output, target, termination_watch, worker, worker_setup};
use crate::config::schema::Config;
use crate::config::{self, Document, Environment};
use crate::control::worker_api::ReloadFuture;
use crate::host::containment::{close_inherited_fds_on_exec, harden_process};
use crate::limits::{
    RUNNER_FILE_BYTES_MAX, RUNNER_LINE_BYTES_MAX, RUNNER_LINES_MAX, RUNNER_SEND_TIMEOUT, RUNNER_WELCOME_TIMEOUT,
};
use crate::observe::log;
use crate::source::taskcluster::Api;
use crate::worker::{Command, Control, Note};
use crate::worker_runner::{RunnerConfig, RunnerCredentials, RunnerProtocol, RunnerRequest, SOURCE_NAME};

/// `journeyman run`
#[derive(Debug, Args)]
pub(super) struct WorkerRunnerArgs {
    /// File that the worker-runner has written
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    config: PathBuf,
    /// Speak the worker-runner's protocol on standard input and output
    #[arg(long, required = true)]
    with_worker_runner: bool,
}

/// What is said on standard output; the log says it too, from any thread.
static CONVERSATION: Mutex<Option<RunnerProtocol>> = Mutex::new(None);

/// Runs it.
///
/// # Errors
///
/// A file that no worker can be made of; as `journeyman worker`.
pub(super) async fn run(arguments: WorkerRunnerArgs, environment: &Environment) -> ExitResult {
    with_conversation(|conversation| *conversation = Some(RunnerProtocol::default()));
    let mut lines = spawn_line_reader();
    let ended = Box::pin(run_worker(&arguments, environment, &mut lines)).await;
    if ended.is_err() {
        wait_for_welcome(&mut lines).await;
    }
    // The last word comes after the last line of the log.
    log::flush_and_stop();
    send_last_message(&ended).await;
    ended
}

async fn run_worker(arguments: &WorkerRunnerArgs, environment: &Environment, lines: &mut LineReceiver) -> ExitResult {
    let (config, credentials) = read_config(&arguments.config, environment)?;
    log::start_with_callback(&config.log, log_line);
    harden_process();
    let made = worker_setup::build_worker_with_apis(&config, environment)?;
    close_inherited_fds_on_exec();
    replace_credentials(&made.apis, &credentials)?;
    let export = worker::start_trace_export(&config, environment);
    let recorded = worker::with_trace_export(made.worker, export.as_ref());
    let control = recorded.control();
    let obey = ExitSignals::listen()?.apply_to(control.clone());
    let watch = termination_watch::watch_notices(&config, control.clone())?;
    let reload = || -> ReloadFuture {
        Box::pin(async { Err("the worker-runner writes this configuration at a start".to_owned()) })
    };
    let answers = worker::serve_control_socket(&config, control.clone(), Arc::new(reload))?;
    let reports = amqp_setup::report_activity(&config, &control, environment)?;
    let listen = handle_messages(lines, made.apis, control);
    let attend = async {
        tokio::select! {
            () = obey => {}
            () = async { tokio::join!(watch, listen, reports); std::future::pending().await } => {}
        }
    };
    let ended = tokio::select! {
        ended = worker::run_until_exit(recorded, attend) => ended,
        broken = answers => Err(broken),
    };
    if let Some(export) = export {
        export.close().await;
    }
    ended
}

/// Waits until the runner may be told why there is no worker: it says welcome first.
async fn wait_for_welcome(lines: &mut LineReceiver) {
    let welcome = async {
        while !with_conversation(|conversation| conversation.as_ref().is_none_or(RunnerProtocol::is_welcomed)) {
            let Some(Ok(line)) = lines.recv().await else { return };
            if let RunnerRequest::Reply(hello) = parse_line(&line) {
                send_hello(hello).await;
            }
        }
    };
    // A person who tries it by hand has nothing to say.
    if !io::stdin().is_terminal() {
        drop(tokio::time::timeout(RUNNER_WELCOME_TIMEOUT, welcome).await);
    }
}

/// The file as a configuration, and who we are.
fn read_config(path: &Path, environment: &Environment) -> Result<(Config, RunnerCredentials), Failure> {
    let unusable = |what: String| Failure::new(Exit::Config, format!("{}: {what}", path.display()));
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|error| unusable(error.to_string()))?;
    file.take(RUNNER_FILE_BYTES_MAX).read_to_string(&mut text).map_err(|error| unusable(error.to_string()))?;
    let given = RunnerConfig::parse(&text).map_err(|error| unusable(error.to_string()))?;
    let toml = given.to_toml().map_err(|error| unusable(error.to_string()))?;
    // Lines and columns are those of its text as TOML.
    let document = Document::new(Path::new(&format!("{} (as TOML)", path.display())), &toml);
    Ok((config::load(Some(document), environment, &[])?.config, given.credentials()))
}

/// Every call is signed with these from now on; calls under way are not disturbed.
fn replace_credentials(apis: &BTreeMap<String, Api>, new: &RunnerCredentials) -> Result<(), Failure> {
    // Sources that the pool's configuration adds have credentials of their own.
    if let Some(api) = apis.get(SOURCE_NAME) {
        api.replace_credentials(target::build_credentials(
            &new.client_id,
            &new.access_token,
            new.certificate.as_ref(),
        )?);
    }
    Ok(())
}

type LineReceiver = mpsc::Receiver<io::Result<Vec<u8>>>;

/// The runner's lines. A thread of its own reads them: a blocking read cannot be given up, and must not hold up the exit.
fn spawn_line_reader() -> LineReceiver {
    let (sender, lines) = mpsc::channel(RUNNER_LINES_MAX);
    std::thread::spawn(move || {
        let mut from = io::stdin().lock();
        loop {
            let mut line = Vec::new();
            let read = (&mut from).take(RUNNER_LINE_BYTES_MAX).read_until(b'\n', &mut line);
            let last = !matches!(read, Ok(1..));
            if !matches!(read, Ok(0)) && sender.blocking_send(read.map(|_| line)).is_err() || last {
                return;
            }
        }
    });
    lines
}

/// Does what the runner asks until it says no more.
async fn handle_messages(lines: &mut LineReceiver, apis: BTreeMap<String, Api>, control: Control) {
    while let Some(line) = lines.recv().await {
        let line = match line {
            Ok(line) => line,
            Err(error) => return tracing::warn!(%error, "the worker-runner can no longer be heard"),
        };
        let by = || Note::of("worker-runner");
        match parse_line(&line) {
            RunnerRequest::Ignore(None) => {}
            RunnerRequest::Ignore(Some(what)) => tracing::warn!("{what}"),
            RunnerRequest::Reply(hello) => send_hello(hello).await,
            RunnerRequest::Drain => control.command(Command::Drain { within: None }, by()).await,
            RunnerRequest::ReleaseClaims => control.command(Command::Terminate { deadline: None }, by()).await,
            RunnerRequest::NewCredentials(new) => match replace_credentials(&apis, &new) {
                Ok(()) => tracing::info!(client_id = new.client_id, "new credentials"),
                Err(failure) => tracing::error!("the new credentials cannot be used: {}", failure.message),
            },
        }
    }
    tracing::warn!("the worker-runner says no more; credentials are no longer renewed");
}

/// The last words: why it failed, or that this host is not needed any more.
async fn send_last_message(ended: &ExitResult) {
    let last = with_conversation(|conversation| {
        let conversation = conversation.as_ref()?;
        match ended {
            Ok(Exit::Idle | Exit::LimitReached) => conversation.shutdown_line(),
            Ok(_) => None,
            Err(failure) => conversation.error_report_line("the worker failed", &failure.message),
        }
    });
    if let Some(last) = last {
        send(last).await;
    }
}

fn with_conversation<T>(of: impl FnOnce(&mut Option<RunnerProtocol>) -> T) -> T {
    of(&mut CONVERSATION.lock().unwrap_or_else(PoisonError::into_inner))
}

fn parse_line(line: &[u8]) -> RunnerRequest {
    with_conversation(|conversation| conversation.as_mut().map(|conversation| conversation.receive(line)))
        .unwrap_or(RunnerRequest::Ignore(None))
}

/// Says hello. The log goes to the runner from then on, and no line of it earlier.
async fn send_hello(hello: String) {
    send_then(hello, || {
        with_conversation(|conversation| conversation.as_mut().map(RunnerProtocol::mark_hello_sent));
    })
    .await;
}

async fn send(line: String) {
    send_then(line, || {}).await;
}

/// Off the threads that keep leases: a runner that does not read holds up nothing.
async fn send_then(line: String, then: impl FnOnce() + Send + 'static) {
    let said = tokio::task::spawn_blocking(move || output::print_raw(line.as_bytes()).inspect(|()| then()));
    match tokio::time::timeout(RUNNER_SEND_TIMEOUT, said).await {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(error))) => tracing::warn!(%error, "the worker-runner does not listen"),
        Ok(Err(_)) | Err(_) => tracing::warn!("the worker-runner does not read what it is told"),
    }
}

/// A line of the log goes to the runner where it takes logs, and to standard error otherwise.
fn log_line(line: &[u8]) {
    let entry = serde_json::from_slice::<serde_json::Map<String, Value>>(line).ok();
    match with_conversation(|conversation| conversation.as_ref()?.log_line(entry?)) {
        // Not through `say`, which may log.
        Some(line) => drop(output::print_raw(line.as_bytes())),
        None => output::print_stderr(String::from_utf8_lossy(line).trim_end()),
    }
}
