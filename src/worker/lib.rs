//! The ports, sources, handlers and the engine that joins them to the rules of [`journeyman_domain`].

#![warn(missing_docs)]

#[doc(hidden)]
pub mod activity;
pub mod engine;
pub mod handler;
#[doc(hidden)]
pub mod notify;
pub mod source;
pub mod task;
pub mod testing;
#[doc(hidden)]
pub mod traces;
#[doc(hidden)]
pub mod worker_runner;
