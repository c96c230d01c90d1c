//! Configuration: one schema behind a TOML file, the environment and the flags.
//!
//! A key `worker.capacity` of the file is `JOURNEYMAN__WORKER__CAPACITY` in the environment and `--capacity` or
//! `--set worker.capacity=…` on the command line. Built-in values give way to the file, the file to the environment, the
//! environment to the flags. What cannot be used is refused as a whole, with every place that is wrong.

mod check;
pub mod collector;
pub mod demand;
pub mod environment;
pub mod pool;
pub mod problem;
pub mod reference;
mod rules;
pub mod schema;
pub mod secrets;
pub mod show;
mod tree;
pub mod values;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde_json::Value;

pub use environment::Environment;
pub use problem::{Document, Problem, Problems, ValueOrigin};
pub use schema::Config;

use problem::ProblemCode;
use tree::{Node, Setting, Spelling};

/// The schema of a configuration, as JSON Schema (2020-12) without references.
pub static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let settings =
        schemars::generate::SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    Value::from(settings.into_generator().into_root_schema_for::<Config>())
});

/// A key set by a flag.
#[derive(Debug, Clone)]
pub struct Override {
    /// The dotted key.
    pub key: String,
    /// What it is set to.
    pub value: String,
    /// The flag as it was written, for messages.
    pub flag: String,
}

/// A configuration that can be used, and where each part of it came from.
#[derive(Debug, Clone)]
pub struct LoadedConfig {
    /// The configuration.
    pub config: Config,
    /// The file, where there was one.
    pub document: Option<Document>,
    /// Where each value that somebody set came from, by its dotted key.
    pub origins: BTreeMap<String, ValueOrigin>,
    /// What is perhaps not as it was meant.
    pub warnings: Vec<Problem>,
}

/// Puts a configuration together.
///
/// # Errors
///
/// Everything that is wrong with it, each with its place.
pub fn load(
    document: Option<Document>,
    environment: &Environment,
    overrides: &[Override],
) -> Result<LoadedConfig, Problems> {
    let mut problems = Vec::new();
    let mut tree = document.as_ref().map_or_else(Node::empty, |document| tree::read_toml(document, &mut problems));
    let warnings = environment.unknown_variables();
    let refused = |document, problems: Vec<Problem>| Problems::new(document, [problems, warnings.clone()].concat());
    if !problems.is_empty() {
        // What follows a syntax error is read wrongly; to complain about it would hide the cause.
        return Err(refused(document, problems));
    }
    for setting in environment.settings(&mut problems) {
        tree::lay_over(&mut tree, setting, Spelling::Shouted, &SCHEMA, &mut problems);
    }
    for given in overrides {
        tree::lay_over(&mut tree, given.setting(), Spelling::Exact, &SCHEMA, &mut problems);
    }
    let checked = check::check(&tree, &SCHEMA, &mut problems);
    if !problems.is_empty() {
        return Err(refused(document, problems));
    }
    let config: Config = match serde_json::from_value(checked.value) {
        Ok(config) => config,
        Err(error) => {
            let what =
                format!("the schema let this pass and the types did not, which is a fault of journeyman: {error}");
            problems.push(Problem {
                code: ProblemCode::Value,
                message: what,
                origin: ValueOrigin::Default,
                label: String::new(),
                help: None,
            });
            return Err(refused(document, problems));
        }
    };
    let mut config = config;
    // A configuration with pools may be that of a controller, which is given the broker's address in the same variable.
    let is_worker =
        if config.pool.is_empty() { environment.is_started_by_controller() } else { environment.has_worker_group() };
    if config.source.is_empty() && is_worker {
        match handler_for_requests(&config) {
            Ok(handler) => {
                drop(config.source.insert(REQUESTS_SOURCE_NAME.to_owned(), schema::Source::requests(handler)))
            }
            Err(problem) => problems.push(problem),
        }
    }
    rules::check(&config, &checked.origins, &checked.tables, &mut problems);
    if problems.is_empty() {
        Ok(LoadedConfig { config, document, origins: checked.origins, warnings })
    } else {
        Err(refused(document, problems))
    }
}

/// The source of a worker that a controller has started and whose configuration has none.
pub const REQUESTS_SOURCE_NAME: &str = "requests";

/// The handler of that source: the only one, or the one that has its name.
fn handler_for_requests(config: &Config) -> Result<&str, Problem> {
    let mut names = config.handler.keys().map(String::as_str);
    match (names.next(), names.next()) {
        (Some(only), None) => Ok(only),
        _ if config.handler.contains_key(REQUESTS_SOURCE_NAME) => Ok(REQUESTS_SOURCE_NAME),
        (first, _) => Err(Problem {
            code: ProblemCode::Missing,
            message: format!(
                "a controller has started this worker (WORKER_KEY and the like), and {}",
                if first.is_some() {
                    "there are several handlers for its requests"
                } else {
                    "there is no handler for its requests"
                }
            ),
            origin: ValueOrigin::Default,
            label: String::new(),
            help: Some(format!(
                "write one [handler.NAME], or one that is named [handler.{REQUESTS_SOURCE_NAME}], or a [source.NAME] that names its handler"
            )),
        }),
    }
}

impl Override {
    fn setting(&self) -> Setting {
        Setting {
            path: self.key.split('.').map(str::to_owned).collect(),
            text: self.value.clone(),
            origin: ValueOrigin::Flag(self.flag.clone()),
        }
    }
}
