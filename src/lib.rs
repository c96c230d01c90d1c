//! A worker for the queue you already run: claims tasks, runs them with your handler, reclaims in time, and reports
//! exactly one outcome.

#![warn(missing_docs)]

#[doc(hidden)]
pub mod activity;
#[doc(hidden)]
pub mod bridge;
#[doc(hidden)]
pub mod cli;
pub mod client;
mod committed_schema;
#[doc(hidden)]
pub mod config;
#[doc(hidden)]
pub mod console;
#[doc(hidden)]
pub mod control;
#[doc(hidden)]
pub mod controller;
pub mod guide;
pub mod handler;
mod notifier;
mod notify;
#[doc(hidden)]
pub mod observe;
#[doc(hidden)]
pub mod queue;
mod screwdriver;
pub mod source;
pub mod task;
pub mod worker;
#[doc(hidden)]
pub mod worker_runner;

pub use journeyman_domain::{id, outcome, time};
pub use journeyman_platform::host::clock;
pub use journeyman_platform::host::containment::shim;
