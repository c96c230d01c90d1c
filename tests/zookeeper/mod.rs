//! ZooKeeper against a real server, and against Zuul's own classes from both sides.

mod commands;
mod errors;
mod kills;
mod many;
mod mechanisms;
mod page;
mod pauses;
mod recorded;
mod sessions;
pub(crate) mod support;
mod zuul_submits;
mod zuul_works;
