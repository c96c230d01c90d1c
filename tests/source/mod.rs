//! The Taskcluster source against a misbehaving server.

mod azure;
mod claims;
mod client;
mod faults;
mod support;
mod uploads;
