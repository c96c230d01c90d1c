//! The command line as a user meets it: the built binary, its texts, its exit codes.
#![allow(
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a test binary; helpers outside of #[test] included"
)]

mod config;
mod controller;
mod dev;
mod doctor;
mod exec_shim;
mod help;
mod host;
mod one_task;
mod readme;
mod runner;
mod running;
mod secrets;
mod server;
mod services;
mod steering;
mod support;
mod systemd;
mod tasks;
mod test_command;
mod traces;
mod unwell;
