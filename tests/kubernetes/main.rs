//! Work in pods, against a Kubernetes API server in the test's process.
#![cfg(feature = "kubernetes")]
#![allow(missing_docs, reason = "tests are named by what they show")]
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test that cannot go on fails"
)]

#[path = "../handler/bench.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod bench;
#[path = "../support/cluster.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod cluster;

#[path = "../support/task_queue.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod task_queue;

mod pods;
mod stand_in;
mod worker;
