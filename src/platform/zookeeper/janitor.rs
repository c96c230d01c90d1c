//! The clean-up of a queue: ends requests whose worker is gone, and removes what belongs to nothing any more.
//!
//! One process at a time does it, the one that holds the lock which Zuul's schedulers take too. Ages are measured by the server's
//! clock.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::event_queue::{EventQueue, clean_results};
use super::job_queue::{JobError, JobQueue, JobRequest, MERGE_COMPLETED, RequestState, merge_event_kind};
use super::lock::{HeldLock, LockMode};
use super::{Dialect, Error, Session, is_leftover};
use journeyman_domain::limits::{ZOOKEEPER_CLEAN_INTERVAL, ZOOKEEPER_SECOND_LOOK_DELAY};

/// Folders of a queue whose nodes are removed when that of their owner is gone.
pub(super) const OWNERS: [(&str, &str); 4] =
    [("params", "requests"), ("locks", "requests"), ("result-data", "waiters"), ("results", "waiters")];

/// What a clean-up did.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Cleaned {
    /// Requests whose worker was gone, by their ids.
    pub lost: Vec<String>,
    /// Nodes that were removed with all below them.
    pub removed: Vec<String>,
    /// Semaphores of which places were released whose build set is gone.
    pub released: Vec<String>,
}

/// Cleans one queue again and again.
#[derive(Debug)]
pub struct Janitor {
    queue: JobQueue,
    dialect: Dialect,
    /// Requests that ran without a lock when they were last looked at.
    suspects: BTreeSet<String>,
}

impl Janitor {
    /// A clean-up of this queue.
    pub fn new(queue: JobQueue, dialect: Dialect) -> Self {
        Self { queue, dialect, suspects: BTreeSet::new() }
    }

    /// True if the last look has found requests that the next one ends.
    pub fn has_suspects(&self) -> bool {
        !self.suspects.is_empty()
    }

    /// How long to wait before the next look: not long where a request may be lost.
    pub fn pause(&self) -> Duration {
        if self.has_suspects() { ZOOKEEPER_SECOND_LOOK_DELAY } else { ZOOKEEPER_CLEAN_INTERVAL }
    }

    /// The folder in which Zuul's schedulers lock the same clean-up.
    fn lock_folder(&self) -> String {
        match self.dialect {
            Dialect::ZuulMerger => "/zuul/cleanup/merge_requests".to_owned(),
            Dialect::ZuulExecutor => "/zuul/cleanup/build_requests".to_owned(),
            Dialect::Native => format!("{}/cleanup", self.queue.root()),
        }
    }

    /// Looks at the queue once; `None` if another process cleans it. A request counts as lost when two looks have found it
    /// running and unlocked; see [`Janitor::pause`].
    ///
    /// # Errors
    ///
    /// See [`JobError`]. What was done stays done.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: the lock is held until the session ends.
    pub async fn clean(&mut self, session: &Arc<Session>) -> Result<Option<Cleaned>, JobError> {
        let lock = HeldLock::try_take(session, &self.lock_folder(), LockMode::Exclusive).await?;
        let Some(lock) = lock else { return Ok(None) };
        let cleaned = self.clean_locked(session, &lock).await;
        lock.release().await?;
        cleaned.map(Some)
    }

    async fn clean_locked(&mut self, session: &Arc<Session>, lock: &HeldLock) -> Result<Cleaned, JobError> {
        let mut cleaned = Cleaned::default();
        // The node of the lock was created a moment ago.
        let now_ms = session.stat(&lock.path()).await?.map_or(0, |stat| stat.ctime);
        let suspects = std::mem::take(&mut self.suspects);
        for id in self.names(session, "requests").await? {
            match self.queue.read(session, &id).await {
                Ok(Some(request)) if self.is_unattended(session, &request).await? => {
                    if suspects.contains(&id) {
                        match self.end(session, request).await {
                            Ok(()) => cleaned.lost.push(id),
                            // It keeps no other from being ended.
                            Err(error) => tracing::warn!(request = id, "cannot end a lost request: {error}"),
                        }
                    } else {
                        self.suspects.insert(id);
                    }
                }
                Err(error @ JobError::Unreadable { .. }) => tracing::warn!(request = id, "{error}"),
                Err(error) => return Err(error),
                Ok(_) => {}
            }
        }
        let requests: BTreeSet<String> = self.names(session, "requests").await?.into_iter().collect();
        let waiters: BTreeSet<String> = self.names(session, "waiters").await?.into_iter().collect();
        for (folder, owners) in OWNERS {
            let owners = if owners == "requests" { &requests } else { &waiters };
            for id in self.names(session, folder).await?.into_iter().filter(|id| !owners.contains(id)) {
                let path = self.queue.path(folder, &id);
                if session.stat(&path).await?.is_some_and(|stat| is_leftover(&stat, now_ms)) {
                    session.delete_tree(&path).await?;
                    cleaned.removed.push(path);
                }
            }
        }
        if self.dialect != Dialect::Native {
            cleaned.removed.extend(clean_results(session, now_ms).await?);
        }
        if self.dialect == Dialect::ZuulExecutor {
            cleaned.released = session.release_leaked_semaphores().await?;
        }
        Ok(cleaned)
    }

    async fn names(&self, session: &Session, folder: &str) -> Result<Vec<String>, Error> {
        Ok(session.children(&format!("{}/{folder}", self.queue.root())).await?.unwrap_or_default())
    }

    /// Whether a request runs and no worker holds its lock. In the native layout the lock alone says that a task runs.
    async fn is_unattended(&self, session: &Session, request: &JobRequest) -> Result<bool, Error> {
        let runs = match request.state() {
            Some(RequestState::Running | RequestState::Paused) => true,
            // The worker of a merge removes it; a scheduler removes a build.
            Some(RequestState::Completed) => self.dialect == Dialect::ZuulMerger,
            Some(RequestState::Unsubmitted | RequestState::Hold | RequestState::Requested) | None => false,
        };
        if !runs || self.dialect == Dialect::Native {
            return Ok(false);
        }
        Ok(session
            .children(&self.queue.path("locks", &request.id))
            .await?
            .is_none_or(|contenders| contenders.is_empty()))
    }

    /// Completes a lost request: its submitter is told, and makes another.
    async fn end(&self, session: &Session, mut request: JobRequest) -> Result<(), JobError> {
        tracing::warn!(request = request.id, "its worker is gone; completing it, so that its submitter can try again");
        if self.dialect == Dialect::ZuulExecutor {
            return self.queue.complete_unlocked_build(session, request, "ABORTED").await.map(drop);
        }
        let text = |key: &str| request.json.get::<String>(key);
        // The result comes before the state, as a worker writes them; a worker that died in between has stored it.
        if request.state() != Some(RequestState::Completed) {
            let result = self.queue.path("results", &request.id);
            if text("result_path").is_none() {
                if let Some((tenant, pipeline)) = text("tenant_name").zip(text("pipeline_name")) {
                    let kind = merge_event_kind(&request);
                    let mut data = json!({ "request_uuid": request.id, "build_set_uuid": text("build_set_uuid") });
                    if kind == MERGE_COMPLETED {
                        (data["merged"], data["updated"]) = (false.into(), false.into());
                    }
                    EventQueue::of_pipeline(&tenant, &pipeline).put(session, kind, data).await?;
                }
            } else if session.stat(&result).await?.is_none() {
                self.queue.store_result(session, &request.id, b"{}").await?;
            }
            if !self.queue.set_state(session, &mut request, RequestState::Completed).await? {
                return Ok(());
            }
        }
        Ok(self.queue.remove(session, &request.id).await?)
    }
}
