//! `journeyman config`: writes a template, and checks and shows the configuration and its schema.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand, ValueEnum};
use serde_json::json;

use super::config_args::{self, ConfigArgs, NoFlags};
use super::exit::{Exit, ExitResult, Failure};
use super::output::Format;
use super::{file_checks, output};
use crate::config::show::{self, ShowOrigins};
use crate::config::{LoadedConfig, Problem, Problems, SCHEMA, ValueOrigin, reference};
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::key::variable;
use journeyman_platform::settings::problem::{Code, suggest};

#[derive(Debug, Subcommand)]
pub(super) enum ConfigCommand {
    /// Write a configuration to start from, with the usual keys
    Init {
        /// Where to write it; standard output where it is not given. A file that is there is never overwritten
        #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
        file: Option<PathBuf>,
    },
    /// Say whether a configuration can be used, and every place that is wrong
    Check(CheckArgs),
    /// Show the configuration in effect, secrets masked
    Show(ShowArgs),
    /// Print the JSON Schema of the configuration, for editors
    Schema,
    /// Explain a key or a section: what it is for, its values, its default, and what it is set to
    Explain(ExplainArgs),
}

/// `config explain`
#[derive(Debug, Args)]
pub(super) struct ExplainArgs {
    /// The key, such as `worker.capacity` or `source.ci.task_queue`
    #[arg(value_name = "KEY")]
    key: String,
    #[command(flatten)]
    settings: ConfigArgs<NoFlags>,
}

/// `config check`
#[derive(Debug, Args)]
pub(super) struct CheckArgs {
    /// The file, `-` for standard input
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    file: Option<PathBuf>,
    /// Do not look at the files and programs that it names: it is for another machine
    #[arg(long)]
    no_files: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
    #[command(flatten)]
    settings: ConfigArgs<NoFlags>,
}

/// `config show`
#[derive(Debug, Args)]
pub(super) struct ShowArgs {
    /// The file, `-` for standard input
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    file: Option<PathBuf>,
    /// Say beside each value where it comes from
    #[arg(long)]
    origin: bool,
    /// How to print it
    #[arg(short, long, value_enum, default_value_t = ShowFormat::Toml)]
    output: ShowFormat,
    #[command(flatten)]
    settings: ConfigArgs<NoFlags>,
}

/// How `config show` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum ShowFormat {
    /// As it would stand in a file
    Toml,
    /// JSON with values and origins
    Json,
}

pub(super) fn run(command: ConfigCommand, environment: &Environment) -> ExitResult {
    match command {
        ConfigCommand::Init { file } => write_template(file.as_deref()),
        ConfigCommand::Check(check) => check_config(check, environment),
        ConfigCommand::Show(given) => {
            let loaded = given.settings.with_file(given.file).load(environment)?;
            config_args::print_warnings(&loaded);
            let beside = if given.origin { ShowOrigins::Yes } else { ShowOrigins::No };
            match given.output {
                ShowFormat::Toml => output::print(&show::to_toml(&loaded, beside))?,
                ShowFormat::Json => output::json(&show::to_json(&loaded))?,
            }
            Ok(Exit::Success)
        }
        ConfigCommand::Schema => {
            output::json(&SCHEMA)?;
            Ok(Exit::Success)
        }
        ConfigCommand::Explain(explain) => explain_key(&explain, environment),
    }
}

fn explain_key(ExplainArgs { key, settings }: &ExplainArgs, environment: &Environment) -> ExitResult {
    let found = reference::matching(key);
    if found.is_empty() {
        let near = suggest(key, reference::KEYS.iter().map(|known| known.key.as_str()));
        let near = near.map_or_else(String::new, |near| format!("; did you mean `{near}`?"));
        return Err(Failure::new(Exit::Usage, format!("there is no key `{key}`{near}")));
    }
    // What cannot be used can be explained.
    let loaded = settings.load_or_problems(environment)?.ok();
    for (number, known) in found.iter().enumerate() {
        let shown = if known.key.split('.').count() == key.split('.').count() { key } else { &known.key };
        let set = loaded.as_ref().and_then(|loaded| show::value_of(loaded, shown));
        let line =
            |name: &str, text: Option<String>| text.map_or_else(String::new, |text| format!("  {name:9} {text}\n"));
        output::print(&format!(
            "{}{shown}\n  {}\n{}{}{}{}",
            if number > 0 { "\n" } else { "" },
            known.description,
            line("values", Some(known.value_kind.clone())),
            line(
                "default",
                known.default.clone().or_else(|| known.is_required.then(|| "none, it has to be set".to_owned()))
            ),
            line("variable", Some(variable(shown))),
            line("set to", set),
        ))?;
    }
    Ok(Exit::Success)
}

fn check_config(check: CheckArgs, environment: &Environment) -> ExitResult {
    let checked = check.settings.with_file(check.file).load_or_problems(environment)?.and_then(|mut loaded| {
        // A worker that a controller starts, and `journeyman dev`, need no source, but handlers.
        if !names_any(&loaded, &["source", "pool", "handler", "notifier", "queue", "console"]) {
            let mut problem =
                Problem::error(Code::MissingKey, "the configuration runs nothing".to_owned(), ValueOrigin::Default);
            problem.help = Some(NO_ROLE_HELP.to_owned());
            loaded.warnings.push(problem);
        }
        if !check.no_files {
            loaded.warnings.extend(file_checks::check_files(&loaded, environment));
        }
        let problems = Problems::new(loaded.document.clone(), loaded.warnings.clone());
        if problems.error_count() > 0 { Err(problems) } else { Ok(loaded) }
    });
    if check.output == Format::Json {
        let (usable, problems) = match &checked {
            Ok(loaded) => (true, Problems::new(loaded.document.clone(), loaded.warnings.clone())),
            Err(problems) => (false, problems.clone()),
        };
        output::json(&json!({ "usable": usable, "problems": problems.to_json() }))?;
        return Ok(if usable { Exit::Success } else { Exit::Config });
    }
    let loaded = checked?;
    config_args::print_warnings(&loaded);
    let name = loaded.document.as_ref().map_or("the built-in configuration", |document| &document.name);
    let count = |count: usize, noun: &str| format!("{count} {noun}{}", if count == 1 { "" } else { "s" });
    let pools = loaded.config.pool.len();
    let pools = if pools == 0 { String::new() } else { format!("{}, ", count(pools, "pool")) };
    output::line(&format!(
        "{name} can be used: {pools}{}, {}, capacity {}",
        count(loaded.config.source.len(), "source"),
        count(loaded.config.handler.len(), "handler"),
        loaded.config.worker.capacity
    ))?;
    Ok(Exit::Success)
}

const NO_ROLE_HELP: &str = "add a [source.NAME] for a worker, a [pool.NAME] for a controller, or keys of [notifier] or [queue]; \
                            `journeyman config init FILE` writes an example";

/// Tells whether a key of one of these sections is set.
pub(super) fn names_any(loaded: &LoadedConfig, sections: &[&str]) -> bool {
    let is_of_one = |key: &String| key.split_once('.').is_some_and(|(section, _)| sections.contains(&section));
    loaded.origins.keys().any(is_of_one)
}

fn write_template(file: Option<&Path>) -> ExitResult {
    let Some(path) = file else {
        output::print(reference::TEMPLATE)?;
        return Ok(Exit::Success);
    };
    let written = std::fs::File::create_new(path)
        .and_then(|mut file| std::io::Write::write_all(&mut file, reference::TEMPLATE.as_bytes()));
    match written {
        Ok(()) => {
            output::line(&format!(
                "wrote {}; `journeyman config check {0}` says whether it can be used",
                path.display()
            ))?;
            Ok(Exit::Success)
        }
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            Err(Failure::new(Exit::HostUnusable, format!("{} is already there and was left as it is", path.display())))
        }
        Err(error) => Err(Failure::new(Exit::HostUnusable, format!("cannot write {}: {error}", path.display()))),
    }
}
