//! `journeyman bridge`: has the work of one queue done by another.

use std::sync::Arc;

use super::assemble::{self, Name};
use super::exit::{Ended, Exit, Failure};
use super::requests::{self, Work};
use super::worker::{self, WorkerArgs};
use crate::bridge;
use crate::client::Client;
use crate::config::Environment;
use crate::config::schema::{Bridge, Config, Form, Source};
use crate::handler::{self, Handler};
use crate::source::amqp;
use crate::worker::{Feed, Worker};

/// Runs it.
///
/// # Errors
///
/// As [`worker::run`].
pub(super) async fn run(arguments: WorkerArgs, environment: &Environment) -> Ended {
    Box::pin(worker::run_made_by(made, arguments, environment)).await
}

/// A worker that hands on what it claims.
fn made(config: &Config, environment: &Environment) -> Result<Worker, Failure> {
    if config.bridge.is_empty() {
        return Err(Failure::new(
            Exit::Config,
            "there is no [bridge.NAME], so there is nothing to hand on; `journeyman guide bridge` shows one",
        ));
    }
    assemble::hide_secrets(config, environment);
    let name = Name::of(config);
    let feeds: Result<Vec<Feed>, Failure> =
        config.bridge.iter().map(|(named, bridge)| feed(named, bridge, config, &name, environment)).collect();
    Ok(Worker::new(assemble::settings(config), feeds?))
}

fn feed(
    named: &str,
    bridge: &Bridge,
    config: &Config,
    name: &Name,
    environment: &Environment,
) -> Result<Feed, Failure> {
    // The configuration was refused already where a source is not there or of the wrong kind.
    let source = |name: &str| {
        let missing = || Failure::new(Exit::Config, format!("[bridge.{named}]: there is no [source.{name}]"));
        config.source.get(name).ok_or_else(missing)
    };
    let (from, to) = (source(&bridge.from)?, source(&bridge.to)?);
    let form = match bridge.form {
        Form::Whole => bridge::Form::Whole,
        Form::Body => bridge::Form::Body,
    };
    let longest = bridge.max_run_time.0;
    match (from.tasks(), to.tasks()) {
        (None, Some(tasks)) => {
            let handler: Arc<dyn Handler> = handler::erase(bridge::tasks::Tasks::new(bridge::tasks::Settings {
                api: assemble::api(&bridge.to, to, tasks, environment)?,
                task_queue: tasks.task_queue.clone(),
                origin: requests::queue(from, config),
                form,
                max_run_time: longest,
            }));
            let work = Work { handler, form: amqp::Form::Whole, longest: amqp::Longest::Set(longest) };
            requests::feed(&bridge.from, from, config, name, work, environment)
        }
        (Some(tasks), None) => {
            let Place { exchange, key } = Place::of(to, config);
            let handler = handler::erase(bridge::requests::Requests::new(bridge::requests::Settings {
                client: Client::new(requests::broker(&config.amqp, environment)?, requests::worker_id(config, name)),
                exchange,
                key,
                origin: tasks.root_url.as_str().to_owned(),
                form,
                max_run_time: longest,
            }));
            assemble::feed(&bridge.from, from, tasks, name, handler, environment).map(|(feed, _)| feed)
        }
        (None, None) | (Some(_), Some(_)) => Err(Failure::new(
            Exit::Config,
            format!("[bridge.{named}] leads from one source to another of the same kind"),
        )),
    }
}

/// Where requests are published.
struct Place {
    exchange: String,
    key: String,
}

impl Place {
    /// A queue that is named is published to as it is; otherwise the pool's exchange finds it, and its controller starts who
    /// works for the key.
    fn of(to: &Source, config: &Config) -> Self {
        match to.requests_queue.as_ref().or(config.amqp.requests_queue.as_ref()) {
            Some(queue) => Self { exchange: String::new(), key: queue.clone() },
            None => Self {
                exchange: format!("{}-req-xchg", config.amqp.pool),
                key: config.amqp.worker_key.clone().unwrap_or_default(),
            },
        }
    }
}
