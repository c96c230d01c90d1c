//! `journeyman run --with-worker-runner`: a worker that Taskcluster's worker-runner starts in place of generic-worker.

use std::collections::BTreeMap;
use std::io::{self, BufRead as _, IsTerminal as _, Read as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Args;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::mpsc;

use super::exit::{EXIT_CODES, Exit, ExitResult, Failure};
use super::signals::ExitSignals;
use super::{output, taskcluster_setup, worker, worker_setup};
use crate::config::schema::Config;
use crate::config::{self, Document};
use crate::console::app::Console;
use journeyman_domain::limits::{
    RUNNER_FILE_BYTES_MAX, RUNNER_LINE_BYTES_MAX, RUNNER_LINES_MAX, RUNNER_SEND_TIMEOUT, RUNNER_WELCOME_TIMEOUT,
};
use journeyman_platform::host::clock::Clock;
use journeyman_platform::host::containment::{close_inherited_fds_on_exec, harden_process};
use journeyman_platform::log;
use journeyman_platform::settings::Environment;
use journeyman_worker::engine::{Command, Control, Note};
use journeyman_worker::source::taskcluster::{Api, ClientCredentials};
use journeyman_worker::worker_runner::{RunnerConfig, RunnerProtocol, RunnerRequest, SOURCE_NAME};

/// `journeyman run`
#[derive(Debug, Args)]
pub(super) struct WorkerRunnerArgs {
    /// Configuration file written by the worker-runner
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    config: PathBuf,
    /// Speak the worker-runner's protocol on standard input and output
    #[arg(long, required = true)]
    with_worker_runner: bool,
}

/// Global because the log sends lines from any thread.
static PROTOCOL: Mutex<RunnerProtocol> = Mutex::new(RunnerProtocol::INITIAL);
/// Set by the configuration of the pool.
static KEEPS_IDLE_HOST: AtomicBool = AtomicBool::new(false);

/// # Errors
///
/// An unusable file; otherwise as `journeyman worker`.
pub(super) async fn run(arguments: WorkerRunnerArgs, environment: &Environment) -> ExitResult {
    let mut lines = spawn_line_reader();
    let ended = Box::pin(run_worker(&arguments, environment, &mut lines)).await;
    if ended.is_err() {
        wait_for_welcome(&mut lines).await;
    }
    // The last message follows the last line of the log.
    log::flush_and_stop();
    send_last_message(&ended).await;
    ended
}

async fn run_worker(arguments: &WorkerRunnerArgs, environment: &Environment, lines: &mut LineReceiver) -> ExitResult {
    let (config, runner_config) = read_config(&arguments.config, environment)?;
    EXIT_CODES.set(config.worker.exit_codes).ok();
    KEEPS_IDLE_HOST.store(runner_config.shutdown_machine_on_idle == Some(false), Ordering::Relaxed);
    log::start_with_callback(&config.log, log_line);
    let unknown: Vec<&str> = runner_config.unknown_keys().collect();
    if !unknown.is_empty() {
        let unknown = unknown.join(", ");
        tracing::warn!("keys of the pool's configuration that this worker does not have, and ignores: {unknown}");
    }
    harden_process();
    let environment = &environment.with(runner_config.variables());
    let mut built = worker_setup::build_worker(&config, environment)?;
    close_inherited_fds_on_exec();
    replace_credentials(&built.apis, &runner_config.credentials())?;
    let control = built.worker.control();
    let signals = ExitSignals::listen()?;
    // A pool that does not need the worker ends it at once, which the runner has to be told.
    wait_for_welcome(lines).await;
    built.pools.join(&control).await?;
    let messages = handle_messages(lines, built.apis, control.clone());
    // The runner reports alerts, and removes the worker.
    let background = async { match tokio::join!(messages, built.pools.run(&control, None)).1 {} };
    let page = worker::listen_http(&config, worker::PAGE).await?.map(|listener| (listener, Console::default()));
    Box::pin(worker::serve(built.worker, &config, environment, signals, None, page, background)).await
}

/// Waits for `welcome`, before which nothing else may be sent.
async fn wait_for_welcome(lines: &mut LineReceiver) {
    let welcome = async {
        while !PROTOCOL.lock().is_welcomed() {
            let Some(Ok(line)) = lines.recv().await else { return };
            let request = PROTOCOL.lock().receive(&line);
            if let RunnerRequest::Reply(hello) = request {
                send_hello(hello).await;
            }
        }
    };
    // A terminal never sends `welcome`.
    if !io::stdin().is_terminal() {
        drop(tokio::time::timeout(RUNNER_WELCOME_TIMEOUT, welcome).await);
    }
}

fn read_config(path: &Path, environment: &Environment) -> Result<(Config, RunnerConfig), Failure> {
    let unusable = |what: String| Failure::new(Exit::Config, format!("{}: {what}", path.display()));
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|error| unusable(error.to_string()))?;
    file.take(RUNNER_FILE_BYTES_MAX).read_to_string(&mut text).map_err(|error| unusable(error.to_string()))?;
    let runner_config = RunnerConfig::parse(&text).map_err(&unusable)?;
    let toml = runner_config.to_toml().map_err(&unusable)?;
    // Errors have the lines and columns of the TOML text.
    let document = Document::new(Path::new(&format!("{} (as TOML)", path.display())), &toml);
    Ok((config::load(Some(document), environment, &[])?.config, runner_config))
}

/// Signs every later call with the new credentials.
fn replace_credentials(apis: &BTreeMap<String, Api>, new: &ClientCredentials) -> Result<(), Failure> {
    // Sources that the pool's configuration adds have their own credentials.
    if let Some(api) = apis.get(SOURCE_NAME) {
        api.replace_credentials(taskcluster_setup::build_credentials(new)?);
    }
    Ok(())
}

type LineReceiver = mpsc::Receiver<io::Result<Vec<u8>>>;

/// Reads the runner's lines on a thread, because a blocking read cannot be cancelled and must not delay the exit.
fn spawn_line_reader() -> LineReceiver {
    let (sender, lines) = mpsc::channel(RUNNER_LINES_MAX);
    std::thread::spawn(move || {
        let mut stdin = io::stdin().lock();
        loop {
            let mut line = Vec::new();
            let read = (&mut stdin).take(RUNNER_LINE_BYTES_MAX).read_until(b'\n', &mut line);
            let last = !matches!(read, Ok(1..));
            if !matches!(read, Ok(0)) && sender.blocking_send(read.map(|_| line)).is_err() || last {
                return;
            }
        }
    });
    lines
}

/// Handles the runner's messages until its end of the pipe is closed.
async fn handle_messages(lines: &mut LineReceiver, apis: BTreeMap<String, Api>, control: Control) {
    while let Some(line) = lines.recv().await {
        let line = match line {
            Ok(line) => line,
            Err(error) => return tracing::warn!(%error, "cannot read from the worker-runner"),
        };
        let note = || Note::of("worker-runner");
        let request = PROTOCOL.lock().receive(&line);
        match request {
            RunnerRequest::Ignore(None) => {}
            RunnerRequest::Ignore(Some(what)) => tracing::warn!("{what}"),
            RunnerRequest::Reply(hello) => send_hello(hello).await,
            RunnerRequest::Drain => control.command(Command::Drain { within: None }, note()).await,
            RunnerRequest::ReleaseClaims => control.command(Command::Terminate { deadline: None }, note()).await,
            RunnerRequest::NewCredentials(new) => match replace_credentials(&apis, &new) {
                Ok(()) => tracing::info!(client_id = new.client_id, "received new credentials"),
                Err(failure) => tracing::error!("cannot use the new credentials: {}", failure.message),
            },
        }
    }
    tracing::warn!("the worker-runner closed its pipe; credentials are no longer renewed");
}

/// Reports a failure, or asks the runner to shut down the host if the worker exited because it was idle, reached its limit or is not needed.
async fn send_last_message(ended: &ExitResult) {
    let last = match ended {
        Ok(Exit::Idle) if KEEPS_IDLE_HOST.load(Ordering::Relaxed) => None,
        Ok(Exit::Idle | Exit::LimitReached | Exit::NotNeeded) => PROTOCOL.lock().shutdown_line(),
        Ok(_) => None,
        Err(failure) => PROTOCOL.lock().error_report_line("worker failed", &failure.message),
    };
    if let Some(last) = last {
        send(last).await;
    }
}

/// The log goes to the runner only after `hello`.
async fn send_hello(hello: String) {
    if send(hello).await {
        PROTOCOL.lock().mark_hello_sent();
    }
}

/// Writes on a blocking thread, because a runner that does not read would block reclaims. Returns whether it was written.
async fn send(line: String) -> bool {
    let printed = tokio::task::spawn_blocking(move || output::print_raw(line.as_bytes()));
    let result = tokio::time::timeout(RUNNER_SEND_TIMEOUT, printed).await;
    match &result {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(error))) => tracing::warn!(%error, "cannot write to the worker-runner"),
        Ok(Err(_)) | Err(_) => tracing::warn!("the worker-runner does not read its pipe"),
    }
    matches!(result, Ok(Ok(Ok(()))))
}

/// Sends a line of the log to the runner if it accepts log entries, or else to standard error.
fn log_line(line: &[u8]) {
    let entry = serde_json::from_slice::<serde_json::Map<String, Value>>(line).ok();
    let report = entry.as_ref().and_then(|entry| PROTOCOL.lock().alert_line(entry, Clock::boot().now()));
    if let Some(report) = report {
        drop(output::print_raw(report.as_bytes()));
    }
    match entry.and_then(|entry| PROTOCOL.lock().log_line(entry)) {
        // Not through `send`, which may log.
        Some(line) => drop(output::print_raw(line.as_bytes())),
        None => output::print_stderr(String::from_utf8_lossy(line).trim_end()),
    }
}
