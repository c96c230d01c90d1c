//! Builds of a Screwdriver, against a real RabbitMQ and beside Screwdriver's own executor.
#![cfg(feature = "kubernetes")]
#![allow(missing_docs, reason = "tests are named by what they show")]
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a test that cannot go on fails"
)]

#[path = "../support/cluster.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod cluster;

#[path = "../support/gremlin.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod gremlin;

#[path = "../support/broker.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod broker;

#[path = "../amqp/process.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod process;

#[path = "../support/wire.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod wire;

mod checks;
mod executor;
mod interop;
mod messages;
mod starts;
mod support;
mod topology;
