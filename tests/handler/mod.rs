//! Tests of the built-in handlers and of what handlers use.

mod artifacts;
pub(crate) mod bench;
mod checks;
mod commands;
mod erased;
pub(crate) mod examples;
mod hooks;
mod logs;
mod processes;
mod programs;
mod services;
mod staged;
