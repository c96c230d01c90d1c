//! The flags that set keys of the configuration, with help, variable and default from the schema.

use std::io::Read as _;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint};

use super::exit::{Exit, Failure};
use crate::config::{self, Document, LoadedConfig, Problems, Setting, reference};
use journeyman_domain::limits::CONFIG_BYTES_MAX;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::environment::FILE_VARIABLE;
use journeyman_platform::settings::key::variable;
use journeyman_platform::settings::problem::{Code, Problem, ValueOrigin};

/// A flag and the key that it sets.
#[derive(Debug, Clone, Copy)]
pub struct ConfigFlag {
    name: &'static str,
    key: &'static str,
    /// The default of this command, if it differs from the built-in value.
    default_override: Option<&'static str>,
}

const fn flag(name: &'static str, key: &'static str) -> ConfigFlag {
    ConfigFlag { name, key, default_override: None }
}

const LOG: [ConfigFlag; 2] = [flag("log-format", "log.format"), flag("log-level", "log.level")];

/// The flags of one command.
pub trait FlagSet: Clone + std::fmt::Debug {
    const LIST: &'static [ConfigFlag];
}

/// `journeyman worker`.
#[derive(Debug, Clone)]
pub struct WorkerFlags;

impl FlagSet for WorkerFlags {
    const LIST: &'static [ConfigFlag] = &[
        flag("id", "worker.id"),
        flag("group", "worker.group"),
        flag("capacity", "worker.capacity"),
        flag("work-dir", "worker.work_dir"),
        flag("drain-deadline", "worker.drain_deadline"),
        flag("termination-grace", "worker.termination_grace"),
        flag("status-poll-interval", "worker.status_poll_interval"),
        flag("exit-when-idle", "worker.exit_when_idle"),
        flag("max-tasks", "worker.max_tasks"),
        flag("max-uptime", "worker.max_uptime"),
        flag("task-log-max", "log.task_log_max"),
        LOG[0],
        LOG[1],
    ];
}

/// `journeyman queue`.
#[derive(Debug, Clone)]
pub struct QueueFlags;

impl FlagSet for QueueFlags {
    const LIST: &'static [ConfigFlag] = &[
        flag("db", "queue.db"),
        flag("listen", "queue.listen"),
        flag("claim-timeout", "queue.claim_timeout"),
        LOG[0],
        LOG[1],
    ];
}

/// The address of a console that is given none.
pub const CONSOLE_LISTEN: &str = "127.0.0.1:7117";

/// `journeyman console`.
#[derive(Debug, Clone)]
pub struct ConsoleFlags;

impl FlagSet for ConsoleFlags {
    const LIST: &'static [ConfigFlag] =
        &[ConfigFlag { default_override: Some(CONSOLE_LISTEN), ..flag("listen", "http.listen") }, LOG[0], LOG[1]];
}

/// `journeyman notifier`.
#[derive(Debug, Clone)]
pub struct NotifierFlags;

impl FlagSet for NotifierFlags {
    const LIST: &'static [ConfigFlag] = &[flag("db", "notifier.db"), flag("listen", "notifier.listen"), LOG[0], LOG[1]];
}

/// `journeyman controller`.
#[derive(Debug, Clone)]
pub struct ControllerFlags;

impl FlagSet for ControllerFlags {
    const LIST: &'static [ConfigFlag] = &[LOG[0], LOG[1]];
}

/// `journeyman dev`.
#[derive(Debug, Clone)]
pub struct DevFlags;

impl FlagSet for DevFlags {
    const LIST: &'static [ConfigFlag] = &[
        ConfigFlag { default_override: Some("4"), ..flag("capacity", "worker.capacity") },
        ConfigFlag { default_override: Some("127.0.0.1:0"), ..flag("listen", "queue.listen") },
        ConfigFlag { default_override: Some("a temporary file"), ..flag("db", "queue.db") },
        flag("claim-timeout", "queue.claim_timeout"),
        flag("drain-deadline", "worker.drain_deadline"),
        flag("termination-grace", "worker.termination_grace"),
        ConfigFlag { default_override: Some("500ms"), ..flag("status-poll-interval", "worker.status_poll_interval") },
        flag("task-log-max", "log.task_log_max"),
        ConfigFlag { default_override: Some("human"), ..LOG[0] },
        LOG[1],
    ];
}

/// `journeyman config …`: only `--set`.
#[derive(Debug, Clone)]
pub struct NoFlags;

impl FlagSet for NoFlags {
    const LIST: &'static [ConfigFlag] = &[];
}

/// The configuration file and the flags that override it.
#[derive(Debug, Clone)]
pub struct ConfigArgs<F: FlagSet> {
    file: Option<PathBuf>,
    overrides: Vec<Setting>,
    flags: PhantomData<F>,
}

/// The default files, in the order in which they are tried.
const CONFIG_FILES: [&str; 2] = ["journeyman.toml", "/etc/journeyman/journeyman.toml"];

impl<F: FlagSet> clap::Args for ConfigArgs<F> {
    fn augment_args(command: Command) -> Command {
        let file = Arg::new("config")
            .long("config")
            .short('c')
            .value_name("FILE")
            .value_hint(ValueHint::FilePath)
            .value_parser(clap::value_parser!(PathBuf))
            .help(format!("Configuration file, `-` for standard input [env: {FILE_VARIABLE}] [default: {} or {}, where there is one]", CONFIG_FILES[0], CONFIG_FILES[1]));
        let set = Arg::new("set")
            .long("set")
            .value_name("KEY=VALUE")
            .action(ArgAction::Append)
            .help("Any other key of the configuration, such as `--set source.ci.handler=build`");
        let command = command.arg(file);
        F::LIST.iter().fold(command, |command, flag| command.arg(flag_arg(flag))).arg(set)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

fn flag_arg(flag: &ConfigFlag) -> Arg {
    let key = reference::find(flag.key);
    let about = key.map_or("", |key| &key.description);
    let about = if flag.default_override.is_some() { about.replace(" [built-in: none]", "") } else { about.to_owned() };
    let default = flag.default_override.or_else(|| key?.default.as_deref());
    let default = default.map_or_else(String::new, |default| format!(" [default: {}]", default.trim_matches('"')));
    let value = match key.map_or("", |key| &key.value_kind) {
        time if time.starts_with("time with unit") => "TIME",
        size if size.starts_with("bytes with unit") => "SIZE",
        "path" => "PATH",
        "name" => "NAME",
        "address and port" => "ADDRESS",
        number if number.starts_with("whole number") => "COUNT",
        _ => "WORD",
    };
    Arg::new(flag.key)
        .long(flag.name)
        .value_name(value)
        .help(format!("{about} [env: {}]{default}", variable(flag.key)))
        .help_heading("Configuration")
}

impl<F: FlagSet> clap::FromArgMatches for ConfigArgs<F> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut overrides = Vec::new();
        for flag in F::LIST {
            if let Some(value) = matches.get_one::<String>(flag.key) {
                overrides.push(Setting::of_flag(format!("--{}", flag.name), flag.key, value));
            }
        }
        for pair in matches.get_many::<String>("set").into_iter().flatten() {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(clap::Error::raw(
                    clap::error::ErrorKind::ValueValidation,
                    format!("--set needs KEY=VALUE, such as worker.capacity=4, and got `{pair}`\n"),
                ));
            };
            overrides.push(Setting::of_flag(format!("--set {}", key.trim()), key.trim(), value));
        }
        Ok(Self { file: matches.get_one("config").cloned(), overrides, flags: PhantomData })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl<F: FlagSet> ConfigArgs<F> {
    /// Reads only a file: this one or a default one.
    pub const fn from_file(file: Option<PathBuf>) -> Self {
        Self { file, overrides: Vec::new(), flags: PhantomData }
    }

    /// Reads a default file, and overrides it by these settings.
    pub const fn with_settings(overrides: Vec<Setting>) -> Self {
        Self { file: None, overrides, flags: PhantomData }
    }

    /// The same settings with another file.
    pub fn with_file(mut self, file: Option<PathBuf>) -> Self {
        self.file = file.or(self.file);
        self
    }

    /// Reads file, environment and flags.
    ///
    /// # Errors
    ///
    /// [`Exit::Config`] with everything that is wrong.
    pub fn load(&self, environment: &Environment) -> Result<LoadedConfig, Failure> {
        Ok(self.load_or_problems(environment)??)
    }

    /// Loads as [`Self::load`] does, with the problems of a file that can be read.
    ///
    /// # Errors
    ///
    /// [`Exit::Config`] if the file cannot be read.
    pub fn load_or_problems(&self, environment: &Environment) -> Result<Result<LoadedConfig, Problems>, Failure> {
        let document = self.document(environment)?;
        Ok(config::load(document, environment, &self.overrides))
    }

    fn document(&self, environment: &Environment) -> Result<Option<Document>, Failure> {
        let named = self.file.clone().or_else(|| environment.get(FILE_VARIABLE).map(PathBuf::from));
        let found = named.or_else(|| CONFIG_FILES.iter().map(PathBuf::from).find(|path| path.exists()));
        let Some(path) = found else { return Ok(None) };
        let text = read(&path).map_err(|error| read_failure(&path, &error))?;
        if path == Path::new("-") {
            return Ok(Some(Document::new(Path::new("standard input"), &text)));
        }
        let folder = path.with_extension("conf.d");
        let parts = drop_ins(&folder).map_err(|error| read_failure(&folder, &error))?;
        let mut document = Document::new(&path, &text);
        for part in &parts {
            document = document.with(part, &read(part).map_err(|error| read_failure(part, &error))?);
        }
        Ok(Some(document))
    }
}

/// The files that complete a configuration, in the order of their names.
fn drop_ins(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<std::io::Result<Vec<_>>>()?;
    let is_toml = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "toml");
    let mut files: Vec<PathBuf> = paths.into_iter().filter(is_toml).collect();
    files.sort();
    Ok(files)
}

/// Logs the warnings.
pub fn log_warnings(loaded: &LoadedConfig) {
    for warning in &loaded.warnings {
        tracing::warn!("{}; {}", warning.message, warning.help.as_deref().unwrap_or_default());
    }
}

/// Prints the warnings to standard error.
pub fn print_warnings(loaded: &LoadedConfig) {
    if !loaded.warnings.is_empty() {
        super::output::print_stderr(&Problems::new(loaded.document.clone(), loaded.warnings.clone()).to_string());
    }
}

fn read(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let from: Box<dyn std::io::Read> =
        if path == Path::new("-") { Box::new(std::io::stdin().lock()) } else { Box::new(std::fs::File::open(path)?) };
    from.take(CONFIG_BYTES_MAX + 1).read_to_string(&mut text)?;
    if text.len() as u64 > CONFIG_BYTES_MAX {
        return Err(std::io::Error::other("the file is larger than 1 MiB"));
    }
    Ok(text)
}

fn read_failure(path: &Path, error: &std::io::Error) -> Failure {
    let help = "`journeyman config init FILE` writes one to start from".to_owned();
    let message = format!("cannot read {}: {error}", path.display());
    let problem = Problem { help: Some(help), ..Problem::error(Code::File, message, ValueOrigin::Default) };
    Failure::new(Exit::Config, Problems::new(None, vec![problem]).to_string())
}
