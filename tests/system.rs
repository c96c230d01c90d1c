//! The suites that need the whole of journeyman: its roles in this process, or its program. Each folder is a suite, and one
//! binary links them all. `cargo nextest run --test system cli::` runs one.

#![allow(
    missing_docs,
    unreachable_pub,
    clippy::disallowed_methods,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    reason = "a test has no callers, is named by what it shows, and panics when it cannot go on"
)]

mod amqp;
mod cli;
mod conformance;
mod crash;
mod fuzz;
mod handler;
mod host;
mod kubernetes;
mod notifier;
mod observe;
mod payloads;
mod queue;
mod screwdriver;
mod soak;
mod source;
mod support;
mod worker;
mod zookeeper;

use handler::examples::example::memory_queue;
