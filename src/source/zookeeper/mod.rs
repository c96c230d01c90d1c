//! A source of requests that are nodes of a ZooKeeper: Zuul's job queues, and a layout of our own.
//!
//! A claim is a lock, and its lease is the session: while the session stands, no other worker takes the lock. A reclaim looks at
//! the lock; a report writes the result and the state, then gives the lock up. A lost session and a cancel arrive as
//! [`SourceEvent`](super::SourceEvent)s.

mod claim;
mod inspection;
mod job_source;
mod native;
mod queue_watch;
mod zuul;

use serde::{Deserialize, Serialize};

pub use job_source::{ZooKeeperQueue, ZooKeeperSource, ZooKeeperSourceConfig};

/// Whose layout a queue has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// A queue of merge jobs of a Zuul.
    ZuulMerger,
    /// A queue of builds of a Zuul.
    ZuulExecutor,
    /// One node a task.
    Native,
}

impl Dialect {
    /// The queue of a Zuul for this zone.
    pub fn usual_queue(self, zone: Option<&str>) -> String {
        match (self, zone) {
            (Self::ZuulMerger, _) => "/zuul/merger".to_owned(),
            (Self::ZuulExecutor, None) => "/zuul/executor/unzoned".to_owned(),
            (Self::ZuulExecutor, Some(zone)) => format!("/zuul/executor/zones/{zone}"),
            (Self::Native, _) => "/journeyman".to_owned(),
        }
    }
}
