//! ZooKeeper against a real server, and against Zuul's own classes from both sides.
#![allow(missing_docs, reason = "tests are named by what they show")]
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test that cannot go on fails"
)]

#[path = "../support/wire.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod wire;

#[path = "../amqp/process.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod process;

mod commands;
mod errors;
mod kills;
mod mechanisms;
mod page;
mod pauses;
mod recorded;
mod sessions;
mod support;
mod zuul_submits;
mod zuul_works;
