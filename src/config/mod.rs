//! Loads the configuration from a TOML file, the environment and flags, which override each other in this order.
//!
//! A key `worker.capacity` of the file is `JOURNEYMAN__WORKER__CAPACITY` in the environment and `--capacity` or
//! `--set worker.capacity=…` on the command line.

#[cfg(test)]
#[cfg(debug_assertions)]
mod committed_schema_tests;
pub(crate) mod handler_kinds;
pub mod reference;
mod rules;
pub mod schema;
pub mod show;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use toml::Value;

pub use journeyman_platform::settings::{Document, Environment, Problem, Problems, Setting, ValueOrigin, values};
pub use schema::Config;

use journeyman_platform::settings::broker::Assignment;
use journeyman_platform::settings::key::{NAME_EXPECTED, VARIABLE_EXPECTED, is_name, is_variable, join};
use journeyman_platform::settings::load::Loader;
use journeyman_platform::settings::problem::Code;
use schema::{Handler, RequestSource, Source};

use journeyman_platform::committed_schema;

/// The schema of a configuration, as JSON Schema (2020-12) without references.
pub static SCHEMA: LazyLock<serde_json::Value> =
    LazyLock::new(|| committed_schema::parse(include_str!("config.schema.json")));

/// A valid configuration and the origin of its values.
#[derive(Debug, Clone)]
pub struct LoadedConfig {
    /// The configuration.
    pub config: Config,
    /// The file it was loaded from, if any.
    pub document: Option<Document>,
    /// Where each value that is not built in comes from, by its dotted key.
    pub origins: BTreeMap<String, ValueOrigin>,
    /// Problems that do not keep the configuration from being used.
    pub warnings: Vec<Problem>,
}

/// Loads a configuration.
///
/// # Errors
///
/// Every problem that keeps the configuration from being used, with its place.
pub fn load(
    document: Option<Document>,
    environment: &Environment,
    flags: &[Setting],
) -> Result<LoadedConfig, Problems> {
    let warnings = reference::unknown_variables(environment);
    let refused = |document: &Option<Document>, problems: Vec<Problem>| {
        Err(Problems::new(document.clone(), [problems, warnings.clone()].concat()))
    };
    let mut loader = Loader::new(document.as_ref());
    // After a syntax error the rest of the file is parsed wrongly, and further problems would hide the cause.
    if !loader.problems.is_empty() {
        return refused(&document, loader.problems);
    }
    let variables = environment.settings(&mut loader.problems);
    for setting in variables.into_iter().chain(flags.iter().cloned()) {
        loader.set(setting);
    }
    let mut config = Config {
        worker: loader.section("worker"),
        host: loader.section("host"),
        source: loader.named("source", read_source),
        amqp: loader.section("amqp"),
        bridge: loader.named("bridge", |loader, key, value| loader.read(key, value, "")),
        pool: loader.named("pool", |loader, key, mut pool| {
            loader.remove_invalid_names(&join(key, "env"), pool.get_mut("env"), is_variable, VARIABLE_EXPECTED);
            loader.read(key, pool, "")
        }),
        demand: loader.named("demand", |loader, key, value| loader.read(key, value, "")),
        handler: loader.named("handler", read_handler),
        queue: read_with_names(&mut loader, "queue", "clients").unwrap_or_default(),
        notifier: read_with_names(&mut loader, "notifier", "endpoint").unwrap_or_default(),
        notify: loader.section("notify"),
        control: loader.section("control"),
        console: read_with_names(&mut loader, "console", "target").unwrap_or_default(),
        http: loader.section("http"),
        hooks: loader.section("hooks"),
        log: loader.section("log"),
    };
    config.amqp.assignment = Assignment::from_environment(environment);
    loader.finish(&reference::SECTIONS);
    let Loader { mut problems, origins, .. } = loader;
    if !problems.is_empty() {
        return refused(&document, problems);
    }
    // A configuration with pools may be that of a controller, which gets the broker's URI in the same variable.
    let is_worker =
        if config.pool.is_empty() { environment.is_started_by_controller() } else { environment.has_worker_group() };
    if config.source.is_empty() && is_worker {
        match handler_for_requests(&config) {
            Ok(handler) => {
                let source = Source::Amqp(RequestSource::new(handler));
                config.source.insert(REQUESTS_SOURCE_NAME.to_owned(), source);
            }
            Err(problem) => problems.push(problem),
        }
    }
    rules::check(&config, &origins, &mut problems);
    if problems.iter().all(Problem::is_warning) {
        let warnings = [warnings, problems].concat();
        Ok(LoadedConfig { config, document, origins, warnings })
    } else {
        refused(&document, problems)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum SourceKind {
    Taskcluster,
    Amqp,
    Zookeeper,
    Screwdriver,
}

fn read_source(loader: &mut Loader<'_>, key: &str, mut section: Value) -> Option<Source> {
    match loader.kind(key, &mut section, None)? {
        SourceKind::Taskcluster => loader.read(key, section, " of kind `taskcluster`").map(Source::Taskcluster),
        SourceKind::Zookeeper => loader.read(key, section, " of kind `zookeeper`").map(Source::Zookeeper),
        SourceKind::Amqp => loader.read(key, section, " of kind `amqp`").map(Source::Amqp),
        SourceKind::Screwdriver => loader.read(key, section, " of kind `screwdriver`").map(Source::Screwdriver),
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum HandlerKind {
    Command,
    Program,
    Http,
    Kubernetes,
}

/// A section with the name of a kind that the program brings is of that kind, unless it says another.
fn read_handler(loader: &mut Loader<'_>, key: &str, mut section: Value) -> Option<Handler> {
    let kind = section.get("kind").map_or_else(|| key.strip_prefix("handler."), Value::as_str);
    if let Some(kind) = kind.and_then(handler_kinds::find)
        && let Value::Table(table) = &mut section
    {
        table.remove("kind");
        return kind.read(loader, key, section).map(Handler::Custom);
    }
    let known = handler_kinds::names();
    if let Some(other) = section.get("kind").filter(|kind| kind.as_str().is_some_and(|kind| !known.contains(&kind))) {
        loader.not_a_choice(&join(key, "kind"), other, &known);
        return None;
    }
    match loader.kind(key, &mut section, Some(HandlerKind::Program))? {
        HandlerKind::Command => loader.read(key, section, " of kind `command`").map(Handler::Command),
        HandlerKind::Program => loader.read(key, section, " of kind `program`").map(Handler::Program),
        HandlerKind::Http => loader.read(key, section, " of kind `http`").map(Handler::Http),
        HandlerKind::Kubernetes => loader.read(key, section, " of kind `kubernetes`").map(Handler::Kubernetes),
    }
}

/// Reads a section with a table whose names the user chooses.
fn read_with_names<T: DeserializeOwned>(loader: &mut Loader<'_>, key: &str, table: &str) -> Option<T> {
    let mut section = loader.take(key)?;
    loader.remove_invalid_names(&join(key, table), section.get_mut(table), is_name, NAME_EXPECTED);
    loader.read(key, section, "")
}

/// The source of a worker that a controller has started and whose configuration has none.
pub const REQUESTS_SOURCE_NAME: &str = "requests";

/// The handler of that source: the only one, or the one of the same name.
fn handler_for_requests(config: &Config) -> Result<&str, Problem> {
    let mut names = config.handler.keys().map(String::as_str);
    match (names.next(), names.next()) {
        (Some(only), None) => Ok(only),
        _ if config.handler.contains_key(REQUESTS_SOURCE_NAME) => Ok(REQUESTS_SOURCE_NAME),
        (first, _) => {
            let message = format!(
                "a controller has started this worker (WORKER_KEY and others are set), but it has {} for its requests",
                if first.is_some() { "several handlers" } else { "no handler" }
            );
            let help = format!(
                "configure exactly one [handler.NAME], or one named [handler.{REQUESTS_SOURCE_NAME}], or a [source.NAME] \
                 that names its handler"
            );
            Err(Problem { help: Some(help), ..Problem::error(Code::Conflict, message, ValueOrigin::Default) })
        }
    }
}
