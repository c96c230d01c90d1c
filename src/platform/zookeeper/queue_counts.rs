//! How many requests of a queue wait for a worker, for those that start workers by it.

use std::collections::HashSet;

use futures_util::{StreamExt as _, TryStreamExt as _, stream};

use super::job_queue::{JobQueue, RequestState};
use super::json_object::JsonObject;
use super::{Dialect, Error, Session};
use journeyman_domain::limits::ZOOKEEPER_READS_CONCURRENT_MAX;

/// The requests of a queue that need workers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueCounts {
    /// Requests that wait for a worker.
    pub pending: usize,
    /// Requests that a worker runs, or that wait to be resumed.
    pub claimed: usize,
}

impl JobQueue {
    /// Counts the requests of this queue; one that does not exist has none.
    ///
    /// # Errors
    ///
    /// See [`Error`]. No call is repeated.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn count(&self, session: &Session, dialect: Dialect) -> Result<QueueCounts, Error> {
        let list = async |folder: &str| {
            let names = session.children(&format!("{}/{folder}", self.root())).await;
            names.map(Option::unwrap_or_default)
        };
        let ids = list("requests").await?;
        if dialect == Dialect::Native {
            let locked: HashSet<String> = list("locks").await?.into_iter().collect();
            let claimed = ids.iter().filter(|id| locked.contains(*id)).count();
            return Ok(QueueCounts { pending: ids.len() - claimed, claimed });
        }
        let states = stream::iter(ids).map(|id| async move {
            let found = session.get(&self.path("requests", &id)).await?;
            let state = found.and_then(|(data, _)| JsonObject::parse(&data).ok()?.get::<RequestState>("state"));
            Ok(state)
        });
        let counted = states.buffer_unordered(ZOOKEEPER_READS_CONCURRENT_MAX);
        let add = async |mut counts: QueueCounts, state| {
            match state {
                Some(RequestState::Requested) => counts.pending += 1,
                Some(RequestState::Running | RequestState::Paused) => counts.claimed += 1,
                Some(RequestState::Unsubmitted | RequestState::Hold | RequestState::Completed) | None => {}
            }
            Ok(counts)
        };
        counted.try_fold(QueueCounts::default(), add).await
    }
}
