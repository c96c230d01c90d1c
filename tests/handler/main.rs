//! Tests of the built-in handlers and of what handlers use.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::wildcard_enum_match_arm,
    reason = "a test fails by panicking"
)]

mod artifacts;
mod bench;
mod checks;
mod commands;
mod erased;
mod examples;
#[path = "../support/gremlin.rs"]
#[expect(dead_code, reason = "the suites share it")]
mod gremlin;
mod hooks;
mod logs;
mod processes;
mod programs;
mod services;
mod staged;
