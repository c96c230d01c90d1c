//! The Taskcluster source against a misbehaving server.
#![allow(missing_docs, reason = "tests are named by what they show")]
#![allow(clippy::expect_used, clippy::panic, reason = "a test that cannot go on fails")]

#[path = "../support/gremlin.rs"]
#[allow(dead_code, reason = "not all of it is used here")]
mod gremlin;

mod azure;
mod claims;
mod client;
mod faults;
mod support;
mod uploads;
