//! Programs with handlers of their own.

use std::process::ExitCode;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::cli;
use crate::config::handler_kinds::{self, HandlerKind};
use journeyman_platform::settings::{Environment, Setting};
use journeyman_worker::engine::Worker;
use journeyman_worker::handler::{PayloadHandler, erase};

/// Begins a program that has the command line of journeyman, and handlers of its own besides.
///
/// ```no_run
/// # use journeyman::handler::{Context, ExecuteError, PayloadHandler, PrepareError};
/// # struct Thumbs;
/// # impl PayloadHandler for Thumbs {
/// #     type Payload = (); type Prepared = ();
/// #     async fn prepare(&self, _: (), _: &Context) -> Result<(), PrepareError> { Ok(()) }
/// #     async fn execute(&self, _: (), _: &Context) -> Result<(), ExecuteError> { Ok(()) }
/// # }
/// fn main() -> std::process::ExitCode {
///     journeyman::main().handler("thumbs", Thumbs).run()
/// }
/// ```
///
/// Its `dev` serves each handler under the task queue `dev/KIND`, and its configuration has them as `[handler.NAME] kind = "KIND"`.
/// Call it first in `main`: payloads that are processes start through the program itself, before any thread does.
pub fn main() -> Main {
    crate::shim();
    Main::default()
}

/// Begins a program that is a worker for one queue and nothing else.
///
/// ```no_run
/// # use journeyman::handler::{Context, ExecuteError, PayloadHandler, PrepareError};
/// # struct Thumbs;
/// # impl PayloadHandler for Thumbs {
/// #     type Payload = (); type Prepared = ();
/// #     async fn prepare(&self, _: (), _: &Context) -> Result<(), PrepareError> { Ok(()) }
/// #     async fn execute(&self, _: (), _: &Context) -> Result<(), ExecuteError> { Ok(()) }
/// # }
/// fn main() -> std::process::ExitCode {
///     journeyman::serve("thumbs", Thumbs).amqp("thumb-requests").set("worker.capacity", "8").run()
/// }
/// ```
pub fn serve<H: PayloadHandler>(name: &str, handler: H) -> Serve {
    Serve { program: main().handler(name, handler), settings: Vec::new(), name: name.to_owned() }
}

/// A program with the command line of journeyman; see [`main`].
#[derive(Debug, Default)]
#[must_use]
pub struct Main {
    kinds: Vec<HandlerKind>,
}

/// The section of a handler without settings.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NoSettings {}

impl Main {
    /// Adds a handler without settings. Each section of this kind has the same one.
    pub fn handler<H: PayloadHandler>(self, kind: &str, handler: H) -> Self {
        let handler = erase(handler);
        self.add(HandlerKind::new(kind, move |NoSettings {}| Ok(Arc::clone(&handler))))
    }

    /// Adds a kind of handler that is made of its section of the configuration, without the key `kind`.
    ///
    /// What cannot be read as `S` is reported with its place in the file. `make` is called each time the configuration is read, for
    /// `config check` too: a handler connects in `prepare`. Let `S` deny unknown fields, so that a typing error is found.
    pub fn handler_with<S, H, E>(self, kind: &str, make: impl Fn(S) -> Result<H, E> + Send + Sync + 'static) -> Self
    where
        S: DeserializeOwned,
        H: PayloadHandler,
        E: std::fmt::Display,
    {
        let make = move |settings: S| match make(settings) {
            Ok(handler) => Ok(erase(handler)),
            Err(error) => Err(error.to_string()),
        };
        self.add(HandlerKind::new(kind, make))
    }

    fn add(mut self, kind: HandlerKind) -> Self {
        self.kinds.push(kind);
        self
    }

    /// Runs the command line of the process, and returns its exit code.
    ///
    /// # Panics
    ///
    /// Two handlers have one kind, or one that journeyman has, or a program is run twice in one process.
    pub fn run(self) -> ExitCode {
        handler_kinds::register(self.kinds);
        cli::run(std::env::args_os().collect(), &Environment::from_process()).into()
    }
}

/// A program that is a worker for one queue; see [`serve`].
#[derive(Debug)]
#[must_use]
pub struct Serve {
    program: Main,
    settings: Vec<Setting>,
    name: String,
}

impl Serve {
    /// Claims requests of a RabbitMQ queue. The URI of the broker is in the variable `JOURNEYMAN_AMQP_URI`, or in the file of
    /// `.set("amqp.uri_file", …)`; by default it is that of a RabbitMQ on this host.
    pub fn amqp(self, queue: &str) -> Self {
        self.source("amqp").set("source.queue.requests_queue", queue)
    }

    /// Claims tasks of a Taskcluster's task queue, such as `provisioner/type`, with credentials of this client. The access token is in
    /// a file, or in a variable (`env:NAME`).
    pub fn taskcluster(self, root_url: &str, task_queue: &str, client_id: &str, access_token_file: &str) -> Self {
        self.source("taskcluster")
            .set("source.queue.root_url", root_url)
            .set("source.queue.task_queue", task_queue)
            .set("source.queue.client_id", client_id)
            .set("source.queue.access_token_file", access_token_file)
    }

    fn source(self, kind: &str) -> Self {
        let name = self.name.clone();
        self.set("source.queue.kind", kind)
            .set("source.queue.handler", &name)
            .set(&format!("handler.{name}.kind"), &name)
    }

    /// Sets a key of the configuration, such as `worker.capacity`. A configuration file and variables set the others.
    pub fn set(mut self, key: &str, value: &str) -> Self {
        self.settings.push(Setting::of_flag(format!("set({key:?}, …)"), key, value));
        self
    }

    /// Runs the worker until a signal ends it, and returns the exit code of the process. `journeyman status`, `top` and the pages
    /// show it as any other worker.
    ///
    /// # Panics
    ///
    /// See [`Main::run`].
    pub fn run(self) -> ExitCode {
        handler_kinds::register(self.program.kinds);
        cli::run_worker(self.settings, &Environment::from_process()).into()
    }

    /// Builds the worker without running it, for a program with a runtime of its own.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with the configuration.
    ///
    /// # Panics
    ///
    /// See [`Main::run`].
    pub fn build(self) -> Result<Worker, BuildError> {
        handler_kinds::register(self.program.kinds);
        cli::build_worker(self.settings, &Environment::from_process()).map_err(BuildError)
    }
}

/// Why there is no worker.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BuildError(String);
