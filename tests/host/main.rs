//! Termination notices: local metadata services that behave as documented, the watch, and whole workers that get a notice.

#![expect(
    unreachable_pub,
    clippy::expect_used,
    clippy::panic,
    reason = "a test binary has no outside, and its panics are failures"
)]

#[path = "../support/task_queue.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod task_queue;

mod aws;
mod azure;
mod gcp;
#[path = "../support/gremlin.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod gremlin;
mod metadata_service;
mod notice_file;
mod notice_watch;
mod termination;
