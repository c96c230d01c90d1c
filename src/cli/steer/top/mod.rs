//! `journeyman top`: a worker on a terminal, redrawn as it changes, over the control socket.
//!
//! It shows what `journeyman status` shows. What keys do is decided in [`screen`], what it looks like in [`draw`]; here is
//! only the terminal, the socket and the time.

mod draw;
mod screen;

use std::io::IsTerminal as _;
use std::time::Duration;

use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyEvent, KeyEventKind};
use tokio::sync::mpsc;

use self::screen::{Act, Screen};
use super::{StatusArgs, Which, by, status};
use crate::cli::exit::{Ended, Exit, Failure};
use crate::cli::output::Format;
use crate::config::Environment;
use crate::config::values::Span;
use crate::control::client::{Client, Error, Follow};
use crate::control::{Order, Ordered};
use crate::limits::{TOP_EVERY, TOP_KEYS_MAX, TOP_KEYS_WAIT};
use crate::worker::Note;

/// `journeyman top`
#[derive(Debug, Args)]
pub(in crate::cli) struct TopArgs {
    #[command(flatten)]
    which: Which,
}

/// Shows it until `q`. Where there is no terminal, as `status --watch`.
pub(in crate::cli) async fn top(arguments: TopArgs, environment: &Environment) -> Ended {
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        let watch = Some(Span(Duration::from_secs(2)));
        return status(StatusArgs { which: arguments.which, output: Format::Table, watch }, environment).await;
    }
    let client = arguments.which.client(environment)?;
    // Before the terminal is taken: whoever is told that no worker answers wants to read it.
    let first = client.status().await?;
    let mut screen = Screen::default();
    screen.looked(first);
    let (sender, keys) = mpsc::channel(TOP_KEYS_MAX);
    let unfit = |error: std::io::Error| Failure::new(Exit::Unfit, format!("the terminal cannot be used: {error}"));
    let terminal = ratatui::try_init().map_err(unfit)?;
    let given_back = GivenBack;
    let reading = std::thread::Builder::new().name("keys".into()).spawn(move || read_keys(&sender)).map_err(unfit)?;
    let ended = show(terminal, screen, &client, by(environment), keys).await.map_err(unfit);
    drop(given_back);
    // It ends with the channel, which is gone.
    drop(reading.join());
    ended
}

/// Gives the terminal back as it was.
struct GivenBack;

impl Drop for GivenBack {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

/// What a terminal brings.
enum Input {
    Key(KeyEvent),
    /// It has another size.
    Resized,
}

/// Reads keys until nobody wants them any more.
fn read_keys(to: &mpsc::Sender<Input>) {
    while !to.is_closed() {
        let input = match event::poll(TOP_KEYS_WAIT) {
            Ok(false) => continue,
            Ok(true) => match event::read() {
                Ok(Event::Key(key)) if key.kind != KeyEventKind::Release => Input::Key(key),
                Ok(Event::Resize(..)) => Input::Resized,
                Ok(_) => continue,
                Err(_) => return,
            },
            Err(_) => return,
        };
        if to.blocking_send(input).is_err() {
            return;
        }
    }
}

async fn show(
    mut terminal: DefaultTerminal,
    mut screen: Screen,
    client: &Client,
    by: String,
    mut keys: mpsc::Receiver<Input>,
) -> std::io::Result<Exit> {
    let mut log: Option<reqwest::Response> = None;
    let mut looking = Box::pin(look(client));
    loop {
        terminal.draw(|frame| draw::draw(frame, &screen))?;
        tokio::select! {
            looked = &mut looking => {
                match looked {
                    Ok(status) => screen.looked(status),
                    Err(error) => screen.unanswered(&error.to_string()),
                }
                looking = Box::pin(look(client));
            }
            input = keys.recv() => match input {
                None => return Ok(Exit::Done),
                Some(Input::Resized) => {}
                Some(Input::Key(key)) => match screen.key(key) {
                    None => {}
                    Some(Act::Quit) => return Ok(Exit::Done),
                    Some(Act::Tell(order)) => {
                        let note = Note { by: by.clone(), text: String::new() };
                        let said = client.order(&Ordered { order, note }).await;
                        screen.said(&said.unwrap_or_else(|error| error.to_string()));
                        looking = Box::pin(look(client));
                    }
                    Some(Act::Follow(task)) => match client.log(&task, Follow::Yes).await {
                        Ok(answer) => log = Some(answer),
                        Err(error) => screen.log_ended(&error.to_string()),
                    },
                    Some(Act::LetGo) => log = None,
                },
            },
            piece = next(&mut log) => match piece {
                Some(piece) => screen.logged(&piece),
                None => {
                    log = None;
                    screen.log_ended("the log ends here");
                }
            }
        }
    }
}

async fn look(client: &Client) -> Result<crate::control::Status, Error> {
    tokio::time::sleep(TOP_EVERY).await;
    look_now(client).await
}

async fn look_now(client: &Client) -> Result<crate::control::Status, Error> {
    client.status().await
}

/// The next piece of a log that is followed; `None` where it has ended.
async fn next(log: &mut Option<reqwest::Response>) -> Option<Vec<u8>> {
    match log {
        Some(answer) => answer.chunk().await.ok().flatten().map(Vec::from),
        None => std::future::pending().await,
    }
}

/// What is asked before it is done, and the order that comes of it.
#[derive(Debug, Clone, PartialEq)]
struct Question {
    asks: String,
    order: Order,
}
