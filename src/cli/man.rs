//! `journeyman man`: writes a manual page per command, from the texts of `--help`.

use std::path::Path;

use clap::CommandFactory as _;

use super::exit::{Exit, ExitResult, Failure};
use super::{Cli, output};

pub(super) fn run(folder: &Path) -> ExitResult {
    let failed =
        |error| Failure::new(Exit::HostUnusable, format!("cannot write manual pages to {}: {error}", folder.display()));
    std::fs::create_dir_all(folder).map_err(failed)?;
    clap_mangen::generate_to(Cli::command(), folder).map_err(failed)?;
    output::line(&format!("wrote the manual pages to {}", folder.display()))?;
    Ok(Exit::Success)
}
