//! A worker for the queue you already run: claims tasks, runs them with your handler, reclaims in time, and reports
//! exactly one outcome.
//!
//! A handler is a type that implements [`PayloadHandler`](handler::PayloadHandler). [`main`](main()) makes a program of it that has
//! every command of journeyman, [`serve`] a worker for one queue, and [`testing`] runs it without either:
//!
//! ```no_run
#![doc = include_str!("../examples/greet.rs")]
//! ```
//!
//! # Claim and lease
//!
//! The queue grants a worker a *claim* on a run of a task, with a *lease*: unless the worker reclaims before it expires, the queue gives
//! the task to another worker. The worker reclaims after two thirds of the lease, and stops the payload before it expires, whatever
//! the handler does. [`Context::expires_at`](handler::Context::expires_at) tells a handler when that is.
//!
//! # Verdicts
//!
//! `prepare` checks the payload before anything of it runs; [`PrepareError::malformed`](handler::PrepareError::malformed) ends the task
//! as `malformed-payload`. `execute` runs it: `Ok` completes the task, [`ExecuteError`](handler::ExecuteError) says whether it failed by itself, asks for another run, or
//! lacked something of its host. Log and artifacts are stored before the outcome is reported, once.
//!
//! # Cancellation
//!
//! The queue may cancel a task, an operator may release it, and a host may have to go. [`Context::canceled`](handler::Context::canceled)
//! resolves then, and the handler has until its deadline to end the payload; after that its future is dropped, and the processes that
//! it has started in [`Context::scope`](handler::Context::scope) are killed.

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
pub use serde_json;

pub use journeyman_worker::{engine as worker, handler, source, task, testing};
