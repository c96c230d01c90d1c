//! The embedded queue over HTTP.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod access;
mod artifacts;
mod azure;
mod client;
mod durable;
mod golden;
mod life;
mod limits;
mod record;
mod test_queue;
