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

#[path = "../support/broker.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod broker;

#[path = "../support/gremlin.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod gremlin;

#[path = "../amqp/process.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod process;

#[path = "../support/headless.rs"]
mod headless;

#[path = "../support/wire.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod wire;

mod amqp;
mod announcements;
mod delivery;
mod memory;
mod mistral;
mod nodes;
mod operate;
mod outbox;
mod page;
mod signatures;
mod support;
mod tools;
