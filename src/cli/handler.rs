//! `journeyman handler`: the schema of a handler's payloads, and whether a program keeps the handler contract.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueHint};
use serde_json::{Value, json};

use super::exit::{Ended, Exit, Failure};
use super::settings::{self, NoFlags, Settings};
use super::task::create::read;
use super::{assemble, output};
use crate::config::Environment;
use crate::config::schema::{COMMAND, HandlerKind};
use crate::config::values::Span;
use crate::handler::check::{self, Plan, Report, ServicePlan};
use crate::handler::program::{self, Program};

/// What to do with handlers.
#[derive(Debug, Subcommand)]
pub(super) enum HandlerCommand {
    /// Print the JSON Schema of a handler's payloads
    Schema(Schema),
    /// Run a program or a service against the handler contract; exit code 0 when it breaks no rule
    Test(Test),
}

/// `handler schema`
#[derive(Debug, Args)]
pub(super) struct Schema {
    /// Which handler of the configuration
    #[arg(value_name = "NAME", default_value = COMMAND)]
    name: String,
    #[command(flatten)]
    settings: Settings<NoFlags>,
}

/// `handler test`
#[derive(Debug, Args)]
pub(super) struct Test {
    /// The program and its arguments
    #[arg(value_name = "PROGRAM", required_unless_present = "service", trailing_var_arg = true, value_hint = ValueHint::CommandWithArguments)]
    exec: Vec<String>,
    /// A handler of kind `http` of the configuration, in the place of a program: its service is started, asked and ended
    #[arg(long, value_name = "NAME", conflicts_with_all = ["exec", "schema", "check"])]
    service: Option<String>,
    /// A payload that it completes: JSON, `@FILE`, or `-` for standard input [default: `{}`, unless a bad one is given]
    #[arg(long, value_name = "JSON")]
    payload: Option<String>,
    /// A payload that it refuses
    #[arg(long, value_name = "JSON")]
    bad_payload: Option<String>,
    /// File with the JSON Schema of its payloads
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    schema: Option<PathBuf>,
    /// A program that checks a payload before it is run; may be the same
    #[arg(long, value_name = "PROGRAM")]
    check: Option<String>,
    /// How long a run may take
    #[arg(long, value_name = "TIME", default_value = "1m")]
    patience: Span,
    #[command(flatten)]
    settings: Settings<NoFlags>,
}

/// Runs it.
///
/// # Errors
///
/// A configuration or a payload that cannot be used, a folder that cannot be made.
pub(super) async fn run(command: HandlerCommand, environment: &Environment) -> Ended {
    match command {
        HandlerCommand::Schema(schema) => {
            let loaded = schema.settings.load(environment)?;
            settings::note_warnings(&loaded);
            let handler = assemble::handler(&loaded.config, &schema.name, environment)?;
            output::json(&handler.schema())?;
            Ok(Exit::Done)
        }
        HandlerCommand::Test(test) => match test.service.clone() {
            Some(name) => try_service(test, &name, environment).await,
            None => try_program(test, environment).await,
        },
    }
}

async fn try_service(test: Test, name: &str, environment: &Environment) -> Ended {
    let loaded = test.settings.load(environment)?;
    settings::note_warnings(&loaded);
    let wanted = loaded.config.handler.get(name).filter(|handler| handler.kind == HandlerKind::Http);
    let wanted = wanted.ok_or_else(|| {
        Failure::new(Exit::Config, format!("there is no [handler.{name}] of kind `http` in the configuration"))
    })?;
    let service = assemble::service(name, wanted, environment)?;
    let payload = test.payload.map(|text| parsed(&text, "payload")).transpose()?;
    let bad_payload = test.bad_payload.map(|text| parsed(&text, "bad payload")).transpose()?;
    let plan = ServicePlan { service, payload, bad_payload, patience: test.patience.0 };
    let folder = folder()?;
    let report = check::check_service(&plan, &folder).await.map_err(|error| unusable(&folder, &error))?;
    output::print(&report.to_string())?;
    finish(&report, &folder)
}

async fn try_program(test: Test, environment: &Environment) -> Ended {
    let settings = program::Settings {
        check: test.check.map(|check| vec![check]),
        schema: test.schema,
        env: crate::handler::environment::pick(&["PATH".to_owned(), "LANG".to_owned()], environment.pairs()),
        ..program::Settings::new("test", test.exec)
    };
    let program = Program::new(settings).map_err(|error| Failure::of(Exit::Config, &error))?;
    let payload = test.payload.map(|text| parsed(&text, "payload")).transpose()?;
    let bad_payload = test.bad_payload.map(|text| parsed(&text, "bad payload")).transpose()?;
    let untold = payload.is_none() && bad_payload.is_none();
    let payload = if untold { Some(json!({})) } else { payload };
    let plan = Plan { program, payload, bad_payload, patience: test.patience.0, cancel_after: check::CANCEL_AFTER };
    let folder = folder()?;
    let report = check::check_program(&plan, &folder).await.map_err(|error| unusable(&folder, &error))?;
    output::print(&report.to_string())?;
    if untold {
        output::note("it was tried with the payload {}; --payload and --bad-payload give it others");
    }
    finish(&report, &folder)
}

/// A folder for the tasks and the logs.
fn folder() -> Result<PathBuf, Failure> {
    let folder = std::env::temp_dir().join(format!("journeyman-handler-test-{}", uuid::Uuid::new_v4().simple()));
    std::fs::create_dir(&folder).map_err(|error| unusable(&folder, &error))?;
    Ok(folder)
}

fn unusable(folder: &Path, error: &std::io::Error) -> Failure {
    Failure::new(Exit::Unfit, format!("cannot use the folder {}: {error}", folder.display()))
}

fn finish(report: &Report, folder: &Path) -> Ended {
    if report.passed() {
        std::fs::remove_dir_all(folder).map_err(|error| unusable(folder, &error))?;
        return Ok(Exit::Done);
    }
    output::line("")?;
    for log in &report.logs {
        output::line(&format!("log: {}", log.display()))?;
    }
    Ok(Exit::No)
}

fn parsed(text: &str, what: &str) -> Result<Value, Failure> {
    serde_json::from_str(&read(text, what)?).map_err(|error| {
        Failure::new(Exit::Usage, format!("the {what} is not JSON: {error}; a file is named with `@` before its name"))
    })
}
