//! Watches of nodes, and of a whole tree.

use std::sync::Arc;

use zookeeper_client as zk;
use zookeeper_client::{AddWatchMode, EventType, PersistentWatcher, SessionState, Stat};

use super::call::bounded;
use super::{Error, Session};
use journeyman_domain::limits::{ZOOKEEPER_CALL_TIMEOUT, ZOOKEEPER_RETRY_DELAY};

/// What happened in a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TreeEvent {
    /// A node was created.
    Created(String),
    /// A node's data changed.
    Changed(String),
    /// A node was deleted.
    Deleted(String),
    /// The connection was lost meanwhile, and events with it: read the tree again.
    Reconnected,
    /// The session has ended. No other event follows.
    Ended,
}

/// A recursive watch. It needs ZooKeeper 3.6.
#[derive(Debug)]
pub struct TreeWatch {
    session: Arc<Session>,
    root: String,
    watcher: PersistentWatcher,
    is_outdated: bool,
}

impl TreeWatch {
    /// Watches a node with all below it, whether it exists or not.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn start(session: &Arc<Session>, root: &str) -> Result<Self, Error> {
        let watcher = session.retry(|| session.watch_tree(root)).await?;
        Ok(Self { session: Arc::clone(session), root: root.to_owned(), watcher, is_outdated: false })
    }

    /// The next event.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn next(&mut self) -> TreeEvent {
        loop {
            if self.is_outdated {
                // zookeeper-client 0.11 does not set recursive watches again on a new connection. The new one first, so that
                // nothing is missed in between.
                match self.session.watch_tree(&self.root).await {
                    Ok(watcher) => {
                        self.watcher = watcher;
                        self.is_outdated = false;
                        return TreeEvent::Reconnected;
                    }
                    Err(_) if self.session.is_ended() => return TreeEvent::Ended,
                    Err(_) => tokio::time::sleep(ZOOKEEPER_RETRY_DELAY).await,
                }
                continue;
            }
            if self.session.is_ended() {
                return TreeEvent::Ended;
            }
            let event = self.watcher.changed().await;
            match event.event_type {
                EventType::NodeCreated => return TreeEvent::Created(event.path),
                EventType::NodeDataChanged => return TreeEvent::Changed(event.path),
                EventType::NodeDeleted => return TreeEvent::Deleted(event.path),
                EventType::NodeChildrenChanged => {}
                EventType::Session if event.session_state.is_terminated() => return TreeEvent::Ended,
                EventType::Session => self.is_outdated |= event.session_state == SessionState::SyncConnected,
            }
        }
    }
}

impl Session {
    async fn watch_tree(&self, root: &str) -> Result<PersistentWatcher, Error> {
        let watched = self.client.watch(root, AddWatchMode::PersistentRecursive).await;
        watched.map_err(|cause| Error::new("watch", root, cause))
    }

    /// Whether events of watches carry the transaction that caused them, as since ZooKeeper 3.9. Writes to this node.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn has_event_zxids(&self, path: &str) -> Result<bool, Error> {
        let (_, watcher) = bounded("watch", path, self.client.check_and_watch_stat(path)).await?;
        self.set(path, b"x", None).await?;
        let event = tokio::time::timeout(ZOOKEEPER_CALL_TIMEOUT, watcher.changed()).await;
        Ok(event.is_ok_and(|event| event.zxid != zk::WatchedEvent::NO_ZXID))
    }

    /// Waits until a node is gone.
    ///
    /// # Errors
    ///
    /// If the session ends.
    pub async fn wait_until_deleted(&self, path: &str) -> Result<(), Error> {
        self.wait_until(path, |stat| stat.is_none()).await
    }

    /// Waits until a node exists.
    ///
    /// # Errors
    ///
    /// If the session ends.
    pub async fn wait_until_created(&self, path: &str) -> Result<(), Error> {
        self.wait_until(path, |stat| stat.is_some()).await
    }

    pub(super) async fn wait_until(&self, path: &str, is_wanted: impl Fn(Option<&Stat>) -> bool) -> Result<(), Error> {
        loop {
            let watched = self.client.check_and_watch_stat(path).await;
            match watched.map_err(|cause| Error::new("watch", path, cause)) {
                Ok((stat, _)) if is_wanted(stat.as_ref()) => return Ok(()),
                Ok((_, watcher)) => drop(watcher.changed().await),
                Err(error) if error.is_unanswered() && !self.is_ended() => {
                    tokio::time::sleep(ZOOKEEPER_RETRY_DELAY).await
                }
                Err(error) => return Err(error),
            }
            if self.is_ended() {
                return Err(Error::new("watch", path, zk::Error::SessionExpired));
            }
        }
    }
}
