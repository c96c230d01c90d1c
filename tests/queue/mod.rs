//! The embedded queue over HTTP.

mod access;
mod artifacts;
mod azure;
mod client;
mod durable;
mod golden;
mod life;
mod limits;
mod listings;
mod test_queue;
