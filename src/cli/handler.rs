//! `journeyman handler`: prints the schema of a handler's payloads and tests programs against the handler contract.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueHint};
use serde_json::json;

use super::config_args::{self, ConfigArgs, NoFlags};
use super::exit::{Exit, ExitResult, Failure};
use super::output::Format;
use super::task::create::parse_json_arg;
use super::{output, worker_setup};
use crate::config::handler_kinds;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::values::{File, Span};
use journeyman_worker::handler::config::{Handler, ProgramHandler, StagedProgram};
use journeyman_worker::handler::contract_test::{self, ContractReport, TestPlan};
use journeyman_worker::handler::program::Program;
use journeyman_worker::task::COMMAND;

/// Between two `verify` calls of a test.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Inspect and test handlers.
#[derive(Debug, Subcommand)]
pub(super) enum HandlerCommand {
    /// Print the JSON Schema of a handler's payloads
    Schema(HandlerSchemaArgs),
    /// Test a program, or a kind of handlers of this binary, against the handler contract; exits 0 if every rule passes
    Test(HandlerTestArgs),
}

/// `handler schema`
#[derive(Debug, Args)]
pub(super) struct HandlerSchemaArgs {
    /// Name of a handler in the configuration
    #[arg(value_name = "NAME", default_value = COMMAND)]
    name: String,
    #[command(flatten)]
    settings: ConfigArgs<NoFlags>,
}

/// `handler test`
#[derive(Debug, Args)]
pub(super) struct HandlerTestArgs {
    /// The program and its arguments
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true, value_hint = ValueHint::CommandWithArguments)]
    exec: Vec<String>,
    /// A payload that it completes: JSON, `@FILE`, or `-` for standard input [default: `{}`, without --bad-payload]
    #[arg(long, value_name = "JSON")]
    payload: Option<String>,
    /// A payload that it rejects
    #[arg(long, value_name = "JSON")]
    bad_payload: Option<String>,
    /// File with the JSON Schema of its payloads
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    schema: Option<PathBuf>,
    /// A program that checks a payload before it runs; may be PROGRAM
    #[arg(long, value_name = "PROGRAM")]
    check: Option<String>,
    /// The program launches work elsewhere, by `start`, `verify` and `cancel`
    #[arg(long)]
    staged: bool,
    /// Time limit of a run
    #[arg(long, value_name = "TIME", default_value = "1m")]
    timeout: Span,
    /// Output format; standard error is not affected
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

pub(super) async fn run(command: HandlerCommand, environment: &Environment) -> ExitResult {
    match command {
        HandlerCommand::Schema(schema) => {
            let loaded = schema.settings.load(environment)?;
            config_args::print_warnings(&loaded);
            let mounter = worker_setup::build_mounter(&loaded.config)?;
            let handler = worker_setup::build_handler(&loaded.config, &schema.name, environment, &mounter, None)?;
            output::json(&handler.schema())?;
            Ok(Exit::Success)
        }
        HandlerCommand::Test(test) => test_program(test, environment).await,
    }
}

async fn test_program(test: HandlerTestArgs, environment: &Environment) -> ExitResult {
    let parse = |text: Option<String>, what| text.map(|text| parse_json_arg(&text, what)).transpose();
    let mut plan = TestPlan {
        payload: parse(test.payload, "payload")?,
        bad_payload: parse(test.bad_payload, "bad payload")?,
        timeout: test.timeout.0,
        cancel_after: contract_test::CANCEL_AFTER,
    };
    if plan.payload.is_none() && plan.bad_payload.is_none() {
        output::print_stderr("testing with the payload {}; use --payload and --bad-payload for others");
        plan.payload = Some(json!({}));
    }
    let unusable =
        |error: io::Error| Failure::new(Exit::HostUnusable, format!("cannot use a temporary directory: {error}"));
    if let Some(kind) = handler_kinds::find(&test.exec[0]) {
        let loaded = ConfigArgs::<NoFlags>::from_file(None).load(environment)?;
        let configured = loaded.config.handler.into_values().find_map(|handler| match handler {
            Handler::Custom(custom) if custom.kind == kind.name => Some(custom.handler),
            Handler::Custom(_)
            | Handler::Command(_)
            | Handler::Program(_)
            | Handler::Http(_)
            | Handler::Kubernetes(_) => None,
        });
        let handler = configured.map_or_else(|| kind.without_section().map(|made| made.handler), Ok)?;
        let report = contract_test::check_handler(&*handler, &plan).await.map_err(unusable)?;
        return print_report(test.output, &report);
    }
    let looks_often = StagedProgram { check_interval: Span(CHECK_INTERVAL), phases: BTreeMap::new(), retries: 0 };
    let config = ProgramHandler {
        staged: test.staged.then_some(looks_often),
        check: test.check.into_iter().collect(),
        schema: test.schema.map(File),
        ..ProgramHandler::new(test.exec)
    };
    let program =
        Program::new("test", config, environment).map_err(|error| Failure::from_error(Exit::Config, &error))?;
    // It stays if a rule fails.
    let folder = tempfile::Builder::new().prefix("journeyman-handler-test-").tempdir().map_err(unusable)?;
    let report = contract_test::check_program(&program, &plan, folder.path()).await.map_err(unusable)?;
    if !report.passed() {
        drop(folder.keep());
    }
    print_report(test.output, &report)
}

fn print_report(format: Format, report: &ContractReport) -> ExitResult {
    let (passed, logs) = (report.passed(), if report.passed() { &[][..] } else { &report.log_paths });
    output::show(&json!({ "passed": passed, "rules": report.rules, "logs": logs }), format, |_| {
        let lines = logs.iter().map(|log| format!("\nlog: {}", log.display())).collect::<String>();
        format!("{report}{lines}{}", if passed { "" } else { "\n" })
    })?;
    Ok(if passed { Exit::Success } else { Exit::Failed })
}
