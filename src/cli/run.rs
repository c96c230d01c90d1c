//! `journeyman run --with-worker-runner`: a worker that Taskcluster's worker-runner starts in place of generic-worker.

use std::collections::BTreeMap;
use std::io::{self, BufRead as _, IsTerminal as _, Read as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use clap::Args;
use serde_json::Value;
use tokio::sync::mpsc;

use super::exit::{Ended, Exit, Failure};
use super::signals::Signals;
use super::{assemble, output, place, requests, spot, worker};
use crate::config::schema::Config;
use crate::config::{self, Document, Environment};
use crate::control::server::Reloaded;
use crate::host::containment::{bequeath_nothing, harden};
use crate::limits::{
    RUNNER_FILE_BYTES_MAX, RUNNER_LINE_BYTES_MAX, RUNNER_LINES_MAX, RUNNER_SAY_TIMEOUT, RUNNER_WELCOME_WAIT,
};
use crate::observe::log;
use crate::runner::{Conversation, Credentials, Given, Heard, SOURCE};
use crate::source::taskcluster::Api;
use crate::worker::{Command, Control, Note};

/// `journeyman run`
#[derive(Debug, Args)]
pub(super) struct RunArgs {
    /// File that the worker-runner has written
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    config: PathBuf,
    /// Speak the worker-runner's protocol on standard input and output
    #[arg(long, required = true)]
    with_worker_runner: bool,
}

/// What is said on standard output; the log says it too, from any thread.
static CONVERSATION: Mutex<Option<Conversation>> = Mutex::new(None);

/// Runs it.
///
/// # Errors
///
/// A file that no worker can be made of; as `journeyman worker`.
pub(super) async fn run(arguments: RunArgs, environment: &Environment) -> Ended {
    with(|conversation| *conversation = Some(Conversation::default()));
    let mut lines = lines();
    let ended = Box::pin(work(&arguments, environment, &mut lines)).await;
    if ended.is_err() {
        welcomed(&mut lines).await;
    }
    // The last word comes after the last line of the log.
    log::finish();
    part(&ended).await;
    ended
}

async fn work(arguments: &RunArgs, environment: &Environment, lines: &mut Lines) -> Ended {
    let (config, credentials) = read(&arguments.config, environment)?;
    log::start_to(&config.log, log_line);
    harden();
    let made = assemble::made(&config, environment)?;
    bequeath_nothing();
    renew(&made.apis, &credentials)?;
    let export = worker::traced(&config, environment);
    let recorded = worker::recorded(made.worker, export.as_ref());
    let control = recorded.control();
    let obey = Signals::listen()?.obey(control.clone());
    let watch = spot::watch(&config, control.clone())?;
    let reload =
        || -> Reloaded { Box::pin(async { Err("the worker-runner writes this configuration at a start".to_owned()) }) };
    let answers = worker::answer(&config, control.clone(), Arc::new(reload))?;
    let reports = requests::reports(&config, &control, environment)?;
    let listen = listen(lines, made.apis, control);
    let attend = async {
        tokio::select! {
            () = obey => {}
            () = async { tokio::join!(watch, listen, reports); std::future::pending().await } => {}
        }
    };
    let ended = tokio::select! {
        ended = worker::until_gone(recorded, attend) => ended,
        broken = answers => Err(broken),
    };
    if let Some(export) = export {
        export.close().await;
    }
    ended
}

/// Waits until the runner may be told why there is no worker: it says welcome first.
async fn welcomed(lines: &mut Lines) {
    let welcome = async {
        while !with(|conversation| conversation.as_ref().is_none_or(Conversation::has_begun)) {
            let Some(Ok(line)) = lines.recv().await else { return };
            if let Heard::Answer(hello) = hear(&line) {
                answer(hello).await;
            }
        }
    };
    // A person who tries it by hand has nothing to say.
    if !io::stdin().is_terminal() {
        drop(tokio::time::timeout(RUNNER_WELCOME_WAIT, welcome).await);
    }
}

/// The file as a configuration, and who we are.
fn read(path: &Path, environment: &Environment) -> Result<(Config, Credentials), Failure> {
    let unusable = |what: String| Failure::new(Exit::Config, format!("{}: {what}", path.display()));
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(|error| unusable(error.to_string()))?;
    file.take(RUNNER_FILE_BYTES_MAX).read_to_string(&mut text).map_err(|error| unusable(error.to_string()))?;
    let given = Given::read(&text).map_err(|error| unusable(error.to_string()))?;
    let toml = given.toml().map_err(|error| unusable(error.to_string()))?;
    // Lines and columns are those of its text as TOML.
    let document = Document::new(Path::new(&format!("{} (as TOML)", path.display())), &toml);
    Ok((config::load(Some(document), environment, &[])?.config, given.credentials()))
}

/// Every call is signed with these from now on; calls under way are not disturbed.
fn renew(apis: &BTreeMap<String, Api>, new: &Credentials) -> Result<(), Failure> {
    // Sources that the pool's configuration adds have credentials of their own.
    if let Some(api) = apis.get(SOURCE) {
        api.replace_credentials(place::credentials(&new.client_id, &new.access_token, new.certificate.as_ref())?);
    }
    Ok(())
}

type Lines = mpsc::Receiver<io::Result<Vec<u8>>>;

/// The runner's lines. A thread of its own reads them: a blocking read cannot be given up, and must not hold up the exit.
fn lines() -> Lines {
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
async fn listen(lines: &mut Lines, apis: BTreeMap<String, Api>, control: Control) {
    while let Some(line) = lines.recv().await {
        let line = match line {
            Ok(line) => line,
            Err(error) => return tracing::warn!(%error, "the worker-runner can no longer be heard"),
        };
        let by = || Note::of("worker-runner");
        match hear(&line) {
            Heard::Nothing(None) => {}
            Heard::Nothing(Some(what)) => tracing::warn!("{what}"),
            Heard::Answer(hello) => answer(hello).await,
            Heard::Drain => control.command(Command::Drain { within: None }, by()).await,
            Heard::HandBack => control.command(Command::Terminate { deadline: None }, by()).await,
            Heard::Renew(new) => match renew(&apis, &new) {
                Ok(()) => tracing::info!(client_id = new.client_id, "new credentials"),
                Err(failure) => tracing::error!("the new credentials cannot be used: {}", failure.message),
            },
        }
    }
    tracing::warn!("the worker-runner says no more; credentials are no longer renewed");
}

/// The last words: why it failed, or that this host is not needed any more.
async fn part(ended: &Ended) {
    let last = with(|conversation| {
        let conversation = conversation.as_ref()?;
        match ended {
            Ok(Exit::Idle | Exit::Limit) => conversation.shutdown(),
            Ok(_) => None,
            Err(failure) => conversation.error_report("the worker failed", &failure.message),
        }
    });
    if let Some(last) = last {
        say(last).await;
    }
}

fn with<T>(of: impl FnOnce(&mut Option<Conversation>) -> T) -> T {
    of(&mut CONVERSATION.lock().unwrap_or_else(PoisonError::into_inner))
}

fn hear(line: &[u8]) -> Heard {
    with(|conversation| conversation.as_mut().map(|conversation| conversation.hears(line)))
        .unwrap_or(Heard::Nothing(None))
}

/// Says hello. The log goes to the runner from then on, and no line of it earlier.
async fn answer(hello: String) {
    say_and(hello, || {
        with(|conversation| conversation.as_mut().map(Conversation::answered));
    })
    .await;
}

async fn say(line: String) {
    say_and(line, || {}).await;
}

/// Off the threads that keep leases: a runner that does not read holds up nothing.
async fn say_and(line: String, then: impl FnOnce() + Send + 'static) {
    let said = tokio::task::spawn_blocking(move || output::print_raw(line.as_bytes()).inspect(|()| then()));
    match tokio::time::timeout(RUNNER_SAY_TIMEOUT, said).await {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(error))) => tracing::warn!(%error, "the worker-runner does not listen"),
        Ok(Err(_)) | Err(_) => tracing::warn!("the worker-runner does not read what it is told"),
    }
}

/// A line of the log goes to the runner where it takes logs, and to standard error otherwise.
fn log_line(line: &[u8]) {
    let entry = serde_json::from_slice::<serde_json::Map<String, Value>>(line).ok();
    match with(|conversation| conversation.as_ref()?.log(entry?)) {
        // Not through `say`, which may log.
        Some(line) => drop(output::print_raw(line.as_bytes())),
        None => output::note(String::from_utf8_lossy(line).trim_end()),
    }
}
