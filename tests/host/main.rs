//! Termination notices: local metadata services that behave as documented, the watch, and whole workers that get a notice.

#![expect(
    unreachable_pub,
    clippy::expect_used,
    clippy::panic,
    reason = "a test binary has no outside, and its panics are failures"
)]

mod aws;
mod azure;
mod gcp;
mod metadata_service;
mod notice_file;
mod notice_watch;
mod termination;
