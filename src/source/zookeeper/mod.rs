//! A source of requests that are nodes of a ZooKeeper: Zuul's job queues, and a layout of our own.
//!
//! A claim is a lock, and its lease is the session: while the session stands, no other worker takes the lock. A reclaim looks at
//! the lock; a report writes the result and the state, then gives the lock up. A lost session and a cancel arrive as
//! [`SourceEvent`](super::SourceEvent)s.

mod claim;
pub(crate) mod config;
mod inspection;
mod job_source;
mod native;
mod queue_watch;
mod zuul;

pub use job_source::{ZooKeeperQueue, ZooKeeperSource, ZooKeeperSourceConfig};
pub use journeyman_platform::zookeeper::Dialect;
