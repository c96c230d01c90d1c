//! The worker on request queues of a real RabbitMQ.
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

#[path = "../support/task_queue.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod task_queue;

#[path = "../support/wire.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod wire;

mod bridge;
mod claims;
mod client;
mod configuration;
mod connection_cuts;
mod consumer_timeout;
mod controller;
mod deferred;
mod delays;
mod faults;
mod groups;
mod invalid_replies;
mod process;
mod replies;
mod reports;
mod services;
mod support;
mod worker_kills;
