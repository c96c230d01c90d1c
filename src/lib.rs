//! A worker for the queue you already run: claims tasks, runs them with your handler, reclaims in time, and reports
//! exactly one outcome.

#![warn(missing_docs)]

#[doc(hidden)]
pub mod cli;
#[doc(hidden)]
pub mod config;
#[doc(hidden)]
pub mod console;
#[doc(hidden)]
pub mod control;
mod embed;
pub mod guide;

pub use embed::{BuildError, Main, Serve, main, serve};
pub use journeyman_domain::{id, outcome, time};
pub use journeyman_platform::host::clock;
pub use journeyman_platform::host::containment::shim;
pub use journeyman_services::client;
pub use journeyman_worker::{engine as worker, handler, source, task, testing};
