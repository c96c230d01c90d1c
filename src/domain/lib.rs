//! Every decision of the worker and the controller, without I/O, clock, async, randomness or logging.
//!
//! A machine is a plain struct: `handle(event, now)` takes events, effects come out, and `next_deadline` says when to
//! call again. Without the standard library an impure line does not compile. No machine is held across an await (I11).

#![cfg_attr(not(test), no_std)]

extern crate alloc;

pub mod ack_window;
pub mod activity;
pub mod backoff;
pub mod claim;
pub mod consumer_timeout;
pub mod delivery_attempts;
pub mod group;
pub mod host_health;
pub mod id;
pub mod jitter;
pub mod job_requests;
pub mod journal;
pub mod lane;
pub mod lease;
pub mod limits;
mod named_enum;
pub mod outcome;
pub mod poll;
pub mod refusal;
pub mod service_supervisor;
pub mod slots;
pub mod staged;
pub mod termination_notice;
pub mod time;
pub mod trace_context;
pub mod turns;
pub mod units;
pub mod worker;
pub mod worker_pool;
