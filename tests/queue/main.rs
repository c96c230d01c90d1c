//! The embedded queue, called over HTTP as any client calls it.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod access;
mod artifacts;
mod azure;
mod client;
mod durable;
mod golden;
mod life;
mod place;
mod record;
mod strangers;
