//! The worker as a whole: rules, loop, a real source, a real queue, and handlers.

#![expect(
    unreachable_pub,
    clippy::expect_used,
    clippy::panic,
    reason = "a test binary has no outside, and its panics are failures"
)]

mod blocked;
mod deployments;
mod earlier;
mod faults;
mod long;
mod namesakes;
mod outcomes;
mod scripted;
mod service;
mod unfit;
