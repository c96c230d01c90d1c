//! The embedded queue, called over HTTP as any client calls it.

mod access;
mod artifacts;
mod azure;
mod client;
mod durable;
mod golden;
mod life;
mod place;
mod record;
