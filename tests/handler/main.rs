//! What handlers are given and what runs them, below the port.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::wildcard_enum_match_arm,
    reason = "a test that meets what it does not expect has to fail"
)]

mod artifacts;
mod bench;
mod checks;
mod commands;
mod erased;
mod examples;
mod logs;
mod processes;
mod programs;
mod services;
