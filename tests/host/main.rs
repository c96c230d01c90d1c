//! The end of the host: local metadata services that behave as the documented ones, the watch over them, and whole workers
//! that are told to go.

#![expect(
    unreachable_pub,
    clippy::expect_used,
    clippy::panic,
    reason = "a test binary has no outside, and its panics are failures"
)]

mod aws;
mod azure;
mod file;
mod gcp;
mod metadata;
mod watched;
mod worker;
