//! What an operator sees: health, metrics, the status page, `top`, and the examples that build on them.
#![allow(
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test binary; helpers outside of #[test] included"
)]

mod answers;
mod browser;
mod examples;
mod groups;
#[path = "../support/headless.rs"]
mod headless;
mod numbers;
mod orders;
#[path = "../cli/server.rs"]
#[expect(dead_code, reason = "shared with the tests of the command line")]
mod server;
#[path = "../cli/support.rs"]
#[expect(dead_code, reason = "shared with the tests of the command line")]
mod support;
mod terminal;
mod texts;
mod views;
mod whole;

/// Runs `journeyman task` for the `dev` of this directory.
fn task(folder: &std::path::Path, arguments: &[&str]) -> support::Said {
    support::run(support::journeyman(folder).arg("task").args(arguments), "")
}
