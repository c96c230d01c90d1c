//! The notifier as a process, against receivers that misbehave.
#![allow(missing_docs, reason = "tests are named by what they show")]
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a test that cannot go on fails"
)]

#[path = "../support/gremlin.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod gremlin;

#[path = "../amqp/process.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod process;

#[path = "../support/headless.rs"]
mod headless;

mod delivery;
mod operate;
mod page;
mod support;
mod tools;
