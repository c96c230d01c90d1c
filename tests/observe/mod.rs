//! What an operator sees: health, metrics, the status page, `top`, and the examples that build on them.

mod answers;
mod browser;
mod examples;
mod groups;
mod numbers;
mod orders;
mod terminal;
mod texts;
mod views;
mod whole;

use crate::cli::support;

/// Runs `journeyman task` for the `dev` of this directory.
fn task(folder: &std::path::Path, arguments: &[&str]) -> support::Said {
    support::run(support::journeyman(folder).arg("task").args(arguments), "")
}
