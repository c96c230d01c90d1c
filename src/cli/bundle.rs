//! `journeyman bundle`: writes what a bug report needs into one text file, without secrets.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use clap::Args;
use tokio::process::Command;
use tokio::time::timeout;

use super::config_args::{ConfigArgs, NoFlags};
use super::exit::{Exit, ExitResult, Failure};
use super::worker::control_socket;
use super::{doctor, output, worker_setup};
use crate::config::show::{self, ShowOrigins};
use crate::control::client::ControlClient;
use journeyman_domain::limits::DOCTOR_CHECK_TIMEOUT;
use journeyman_platform::host::run_program;
use journeyman_platform::redact;
use journeyman_platform::settings::Environment;

/// The last lines of the log of the unit.
const LOG_LINES: &str = "1000";

/// `journeyman bundle`
#[derive(Debug, Args)]
pub(super) struct BundleArgs {
    /// The file to write, `-` for standard output; it must not exist
    #[arg(value_name = "FILE", default_value = "journeyman-bundle.txt", value_hint = clap::ValueHint::FilePath)]
    file: PathBuf,
    /// The systemd unit whose log is included
    #[arg(long, value_name = "UNIT", default_value = "journeyman")]
    unit: String,
    #[command(flatten)]
    settings: ConfigArgs<NoFlags>,
}

pub(super) async fn run(arguments: BundleArgs, environment: &Environment) -> ExitResult {
    let mut text = String::new();
    let mut add = |title: &str, part: &dyn Display| text.push_str(&format!("== {title}\n{part}\n\n"));
    add("versions", &versions());
    match arguments.settings.load(environment) {
        Err(failure) => add("configuration", &failure.message),
        Ok(loaded) => {
            worker_setup::redact_secrets(&loaded.config, environment);
            add("configuration", &show::to_toml(&loaded, ShowOrigins::Yes));
            add("doctor", &format!("{:#}", serde_json::json!(doctor::run_all(&loaded, environment).await)));
            let status = match ControlClient::new(&control_socket(&loaded.config)) {
                Ok(client) => client.status().await.map(|status| format!("{:#}", serde_json::json!(status))),
                Err(error) => Err(error),
            };
            add("status", &status.unwrap_or_else(|error| error.to_string()));
        }
    }
    add("log", &log_of(&arguments.unit).await);
    let text = redact::text(&text);
    if arguments.file == Path::new("-") {
        output::print(&text)?;
        return Ok(Exit::Success);
    }
    let written = std::fs::File::create_new(&arguments.file)
        .and_then(|mut file| std::io::Write::write_all(&mut file, text.as_bytes()));
    let name = arguments.file.display();
    written.map_err(|error| Failure::new(Exit::HostUnusable, format!("cannot write {name}: {error}")))?;
    output::line(&format!("wrote {name}; look through it before you send it: it names hosts, queues and tasks"))?;
    Ok(Exit::Success)
}

fn versions() -> String {
    let system = rustix::system::uname();
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME=")).unwrap_or("unknown");
    format!(
        "journeyman {}\n{} {} {}\n{}",
        env!("CARGO_PKG_VERSION"),
        system.sysname().to_string_lossy(),
        system.release().to_string_lossy(),
        system.machine().to_string_lossy(),
        name.trim_matches('"')
    )
}

async fn log_of(unit: &str) -> String {
    let mut command = Command::new("journalctl");
    command.args(["--no-pager", "--output=short-iso", "--lines", LOG_LINES, "--unit", unit]);
    match timeout(DOCTOR_CHECK_TIMEOUT, run_program::run(command, &[])).await {
        Ok(Ok(read)) if read.status.success() => read.stdout,
        Ok(Ok(failed)) => failed.last_error(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "journalctl did not answer".to_owned(),
    }
}
