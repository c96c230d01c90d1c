//! `journeyman top`: a worker's status live in a terminal. [`screen`] handles keys, [`draw`] draws.

mod draw;
mod fleet;
mod screen;

use std::io::IsTerminal as _;
use std::time::Duration;

use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use tokio::sync::mpsc;

use self::screen::{KeyAction, TopScreen};
use super::{ShowArgs, SocketArgs, StatusArgs, operator_name, status};
use crate::cli::config_args::{ConfigArgs, NoFlags};
use crate::cli::console;
use crate::cli::exit::{Exit, ExitResult, Failure};
use crate::cli::output::Format;
use crate::control::client::{ControlClient, Error};
use crate::control::{WorkerCommand, WorkerCommandRequest};
use journeyman_domain::limits::{TOP_KEY_POLL_INTERVAL, TOP_KEYS_QUEUED_MAX, TOP_REFRESH_INTERVAL};
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::{Span, Url};
use journeyman_worker::engine::Note;

#[derive(Debug, Args)]
pub(in crate::cli) struct TopArgs {
    /// The workers of all hosts: those of [console.target.NAME], of --worker, and of this host
    #[arg(long)]
    fleet: bool,
    /// Address of a worker's pages, such as http://host:7070; may be repeated, and means --fleet
    #[arg(long, value_name = "URL")]
    worker: Vec<Url>,
    #[command(flatten)]
    target: SocketArgs,
}

/// Without a terminal, behaves as `status --watch`.
pub(in crate::cli) async fn top(arguments: TopArgs, environment: &Environment) -> ExitResult {
    let TopArgs { fleet, worker, target } = arguments;
    if fleet || !worker.is_empty() {
        return top_fleet(&worker, &target, environment).await;
    }
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        let how = ShowArgs { target, output: Format::Table };
        return status(StatusArgs { how, watch: Some(Span(Duration::from_secs(2))) }, environment).await;
    }
    let client = target.client(environment)?;
    // Before the alternate screen, so that an error stays visible.
    let first = client.status().await?;
    let mut screen = TopScreen::default();
    screen.set_status(first);
    let by = operator_name(environment);
    on_terminal(async |terminal, events| run_loop(terminal, screen, &client, by, events).await).await
}

async fn top_fleet(workers: &[Url], target: &SocketArgs, environment: &Environment) -> ExitResult {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(Failure::new(
            Exit::Usage,
            "`top --fleet` needs a terminal; `journeyman console` serves the same as a page",
        ));
    }
    let config = ConfigArgs::<NoFlags>::from_file(target.config.clone()).load(environment)?.config;
    let console = console::build(workers, &[], None, &config, environment)?;
    on_terminal(async |terminal, events| fleet::run(terminal, &console, events).await).await
}

async fn on_terminal(
    draw: impl AsyncFnOnce(DefaultTerminal, mpsc::Receiver<Event>) -> std::io::Result<Exit>,
) -> ExitResult {
    let (sender, events) = mpsc::channel(TOP_KEYS_QUEUED_MAX);
    let failed = |error: std::io::Error| Failure::new(Exit::HostUnusable, format!("cannot use the terminal: {error}"));
    let terminal = ratatui::try_init().map_err(failed)?;
    let guard = TerminalGuard;
    let reading =
        std::thread::Builder::new().name("keys".into()).spawn(move || read_events(&sender)).map_err(failed)?;
    let ended = draw(terminal, events).await.map_err(failed);
    drop(guard);
    // The channel is closed, so the thread ends.
    drop(reading.join());
    ended
}

struct TerminalGuard;

impl Drop for TerminalGuard {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// Reads events until the receiver is closed.
fn read_events(to: &mpsc::Sender<Event>) -> std::io::Result<()> {
    while !to.is_closed() {
        if event::poll(TOP_KEY_POLL_INTERVAL)? && to.blocking_send(event::read()?).is_err() {
            break;
        }
    }
    Ok(())
}

async fn run_loop(
    mut terminal: DefaultTerminal,
    mut screen: TopScreen,
    client: &ControlClient,
    by: String,
    mut events: mpsc::Receiver<Event>,
) -> std::io::Result<Exit> {
    let mut polling = Box::pin(poll_status(client));
    loop {
        terminal.draw(|frame| draw::draw(frame, &screen))?;
        tokio::select! {
            polled = &mut polling => {
                match polled {
                    Ok(status) => screen.set_status(status),
                    Err(error) => screen.set_error(&error.to_string()),
                }
                polling = Box::pin(poll_status(client));
            }
            event = events.recv() => match event {
                None => return Ok(Exit::Success),
                Some(Event::Key(key)) if key.kind != KeyEventKind::Release => match screen.on_key(key) {
                    None => {}
                    Some(KeyAction::Quit) => return Ok(Exit::Success),
                    Some(KeyAction::Send(command)) => {
                        let note = Note { by: by.clone(), text: String::new() };
                        let reply = client.send_command(&WorkerCommandRequest { command, note }).await;
                        screen.set_message(&reply.unwrap_or_else(|error| error.to_string()));
                        polling = Box::pin(poll_status(client));
                    }
                },
                // The next turn draws for another size.
                Some(_) => {}
            },
        }
    }
}

async fn poll_status(client: &ControlClient) -> Result<crate::control::WorkerStatusReply, Error> {
    tokio::time::sleep(TOP_REFRESH_INTERVAL).await;
    client.status().await
}

/// A command that needs a confirmation.
#[derive(Debug, Clone, PartialEq)]
struct Question {
    text: String,
    command: WorkerCommand,
}
