//! Every decision of the worker, and nothing else: no I/O, no clock, no async, no randomness, no logging.
//!
//! A machine here is a plain struct: events go in with the time they happened at, effects come out, and it says
//! when it next wants to be woken. `tests/purity` compiles this folder once more under `#![no_std]`, so that an
//! impure line is a build error. No machine is kept across a wait, so that no call can hold up another (I11).

pub mod activity;
pub mod backoff;
pub mod claim;
pub mod consumer_timeout;
pub mod delivery_attempts;
pub mod group;
pub mod host_health;
pub mod id;
pub mod jitter;
pub mod journal;
pub mod lease;
pub mod outcome;
pub mod poll;
pub mod prompt;
pub mod refusal;
pub mod service_supervisor;
pub mod slots;
pub mod termination_notice;
pub mod time;
pub mod trace_context;
pub mod unread_polls;
pub mod worker;
