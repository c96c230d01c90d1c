//! The embedded queue over HTTP.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod access;
mod artifacts;
mod azure;
mod client;
mod durable;
#[allow(unreachable_pub, reason = "shared with the library's own tests")]
#[path = "../support/exchange.rs"]
mod exchange;
mod golden;
mod life;
mod limits;
mod listings;
mod test_queue;
