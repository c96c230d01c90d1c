//! A worker for the queue you already run: claims tasks, runs them with your handler, reclaims in time, and reports
//! exactly one outcome.

extern crate alloc;

pub mod activity;
pub mod amqp;
pub mod bridge;
pub mod cli;
pub mod client;
pub mod config;
pub mod control;
pub mod controller;
pub mod domain;
pub mod guide;
pub mod handler;
pub mod host;
pub mod limits;
pub mod observe;
pub mod queue;
pub mod redact;
pub mod source;
pub mod worker;
pub mod worker_runner;

pub use host::containment::shim;
