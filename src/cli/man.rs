//! `journeyman man`: writes a manual page per command, from the texts of `--help`.

use std::path::PathBuf;

use clap::{Args, CommandFactory as _};

use super::exit::{Exit, ExitResult, Failure};
use super::{Cli, output};

#[derive(Debug, Args)]
pub(super) struct ManArgs {
    /// Target directory, such as /usr/local/share/man/man1; created if missing, existing pages are replaced
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    folder: PathBuf,
}

pub(super) fn run(arguments: &ManArgs) -> ExitResult {
    let folder = &arguments.folder;
    let failed =
        |error| Failure::new(Exit::HostUnusable, format!("cannot write manual pages to {}: {error}", folder.display()));
    std::fs::create_dir_all(folder).map_err(failed)?;
    clap_mangen::generate_to(Cli::command(), folder).map_err(failed)?;
    output::line(&format!("wrote the manual pages to {}", folder.display()))?;
    Ok(Exit::Success)
}
