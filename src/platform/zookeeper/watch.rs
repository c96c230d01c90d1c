//! Watches of nodes, and of a whole tree.

use std::sync::Arc;

use super::call::bounded;
use super::client::Stat;
use super::{Error, Session, client as zk};
use journeyman_domain::limits::{ZOOKEEPER_CALL_TIMEOUT, ZOOKEEPER_RETRY_DELAY};

pub use super::client::{TreeEvent, TreeWatch};

impl TreeWatch {
    /// Watches a node with all below it, whether it exists or not.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn start(session: &Arc<Session>, root: &str) -> Result<Self, Error> {
        session.retry(|| bounded("watch", root, session.client.watch_tree(root))).await
    }

    /// Ends the watch of a node, so that the server tells no more of it.
    pub async fn end(self, session: &Session, root: &str) {
        drop(self);
        // A lost connection has ended it as well.
        if let Err(error) = bounded("end the watch of", root, session.client.unwatch(root)).await {
            tracing::debug!("{error}");
        }
    }
}

impl Session {
    /// Whether events of watches carry the transaction that caused them, as since ZooKeeper 3.9. Writes to this node.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn has_event_zxids(&self, path: &str) -> Result<bool, Error> {
        let (_, watch) = bounded("watch", path, self.client.stat_and_watch(path)).await?;
        self.set(path, b"x", None).await?;
        let zxid = tokio::time::timeout(ZOOKEEPER_CALL_TIMEOUT, watch.changed()).await;
        Ok(zxid.is_ok_and(|zxid| zxid.is_some()))
    }

    /// Waits until a node is gone.
    ///
    /// # Errors
    ///
    /// Fails if the session ends.
    pub async fn wait_until_deleted(&self, path: &str) -> Result<(), Error> {
        self.wait_until(path, |stat| stat.is_none()).await
    }

    /// Waits until a node exists.
    ///
    /// # Errors
    ///
    /// Fails if the session ends.
    pub async fn wait_until_created(&self, path: &str) -> Result<(), Error> {
        self.wait_until(path, |stat| stat.is_some()).await
    }

    async fn wait_until(&self, path: &str, is_wanted: impl Fn(Option<&Stat>) -> bool) -> Result<(), Error> {
        loop {
            let watched = self.client.stat_and_watch(path).await;
            match watched.map_err(|cause| Error::new("watch", path, cause)) {
                Ok((stat, _)) if is_wanted(stat.as_ref()) => return Ok(()),
                Ok((_, watch)) => drop(watch.changed().await),
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
