//! The calls of a session: bounded in time and size, with errors that name operation and node.

use std::future::Future;

use super::client::{Acl, CreateMode, Stat, Write};
use super::{Session, client as zk};
use journeyman_domain::limits::{ZOOKEEPER_CALL_TIMEOUT, ZOOKEEPER_MULTI_WRITES_MAX, ZOOKEEPER_NODE_BYTES_MAX};
use journeyman_domain::refusal::{CallError, Refusal};

/// A call that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot {operation} {path}: {cause}")]
pub struct Error {
    operation: &'static str,
    path: String,
    /// What the server or the client answered.
    pub cause: zk::Error,
}

impl Error {
    pub fn new(operation: &'static str, path: &str, cause: zk::Error) -> Self {
        Self { operation, path: path.to_owned(), cause }
    }

    /// The node does not exist.
    pub fn is_no_node(&self) -> bool {
        self.cause == zk::Error::NoNode
    }

    /// No server answered: whether the call took effect is unknown. The client gives calls in flight the error of their connection.
    pub const fn is_unanswered(&self) -> bool {
        matches!(self.cause, zk::Error::ConnectionLoss | zk::Error::Timeout | zk::Error::Throttled)
    }
}

impl From<Error> for CallError {
    #[expect(clippy::wildcard_enum_match_arm, reason = "after any other error a later try may succeed")]
    fn from(error: Error) -> Self {
        let refusal = match error.cause {
            zk::Error::NoNode | zk::Error::BadVersion | zk::Error::NodeExists => Refusal::Gone,
            zk::Error::NoAuth | zk::Error::AuthFailed | zk::Error::InvalidAcl => Refusal::Denied,
            zk::Error::BadArguments(_) | zk::Error::QuotaExceeded => Refusal::Rejected,
            _ => Refusal::Retry { retry_after: None },
        };
        Self { refusal, message: error.to_string() }
    }
}

/// A transaction that failed as a whole.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct MultiError {
    /// Which write failed; `None` if the server did not answer.
    pub index: Option<usize>,
    /// Why.
    pub error: Error,
}

impl Session {
    /// Creates a node and returns its path, which a sequential one gets its number in.
    ///
    /// # Errors
    ///
    /// [`zk::Error::NoNode`] without a parent, [`zk::Error::NodeExists`], [`zk::Error::BadArguments`] if it is too large.
    pub async fn create(&self, path: &str, data: &[u8], mode: CreateMode) -> Result<String, Error> {
        check_size(path, data)?;
        bounded("create", path, self.client.create(path, data, mode, Acl::AnyoneAll)).await
    }

    /// Creates a node with its parents, without data. Succeeds if it exists.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn ensure(&self, path: &str) -> Result<(), Error> {
        bounded("create", path, self.client.create_all(path)).await
    }

    /// Reads a node; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn get(&self, path: &str) -> Result<Option<(Vec<u8>, Stat)>, Error> {
        absent_is_none(bounded("read", path, self.client.get_data(path)).await)
    }

    /// Lists the names of a node's children, unordered; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn children(&self, path: &str) -> Result<Option<Vec<String>>, Error> {
        Ok(self.list(path).await?.map(|(names, _)| names))
    }

    /// Lists the names of a node's children, with its stat; `None` if it does not exist.
    pub(super) async fn list(&self, path: &str) -> Result<Option<(Vec<String>, Stat)>, Error> {
        absent_is_none(bounded("list", path, self.client.children(path)).await)
    }

    /// The stat of a node; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn stat(&self, path: &str) -> Result<Option<Stat>, Error> {
        bounded("read", path, self.client.stat(path)).await
    }

    /// Sets the data of a node, if it has this version.
    ///
    /// # Errors
    ///
    /// [`zk::Error::BadVersion`], [`zk::Error::NoNode`], [`zk::Error::BadArguments`] if it is too large.
    pub async fn set(&self, path: &str, data: &[u8], version: Option<i32>) -> Result<Stat, Error> {
        check_size(path, data)?;
        bounded("write", path, self.client.set_data(path, data, version)).await
    }

    /// Deletes a node. Succeeds if it is gone.
    ///
    /// # Errors
    ///
    /// [`zk::Error::NotEmpty`] if it has children.
    pub async fn delete(&self, path: &str) -> Result<(), Error> {
        absent_is_none(bounded("delete", path, self.client.delete(path, None)).await).map(drop)
    }

    /// Deletes a node with all below it. Succeeds if it is gone. A node that is created meanwhile is deleted too.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn delete_tree(&self, path: &str) -> Result<(), Error> {
        let mut stack = vec![path.to_owned()];
        while let Some(top) = stack.last() {
            match self.delete(top).await {
                Ok(()) => drop(stack.pop()),
                Err(error) if error.cause == zk::Error::NotEmpty => {
                    let children = self.children(top).await?.unwrap_or_default();
                    let children: Vec<String> = children.iter().map(|name| format!("{top}/{name}")).collect();
                    stack.extend(children);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Performs all writes or none.
    ///
    /// # Errors
    ///
    /// An error has the index of the write that failed.
    pub async fn multi(&self, writes: &[Write<'_>]) -> Result<(), MultiError> {
        let path = |index: usize| writes.get(index).map_or("", Write::path);
        let failed = |index: Option<usize>, cause| MultiError {
            index,
            error: Error::new("write", path(index.unwrap_or(0)), cause),
        };
        if writes.len() > ZOOKEEPER_MULTI_WRITES_MAX {
            return Err(failed(None, zk::Error::BadArguments("too many writes")));
        }
        for write in writes {
            if let Write::Create { path, data, .. } | Write::Set { path, data, .. } = write {
                check_size(path, data).map_err(|error| MultiError { index: None, error })?;
            }
        }
        match tokio::time::timeout(ZOOKEEPER_CALL_TIMEOUT, self.client.multi(writes)).await {
            Ok(done) => done.map_err(|zk::MultiError { index, cause }| failed(index, cause)),
            Err(_) => Err(failed(None, zk::Error::Timeout)),
        }
    }
}

fn check_size(path: &str, data: &[u8]) -> Result<(), Error> {
    if data.len() <= ZOOKEEPER_NODE_BYTES_MAX {
        return Ok(());
    }
    let what = format!("{} bytes to {path}", data.len());
    Err(Error::new("write", &what, zk::Error::BadArguments("a node may have 1,000,000 bytes")))
}

pub(super) async fn bounded<T>(
    operation: &'static str,
    path: &str,
    call: impl Future<Output = Result<T, zk::Error>>,
) -> Result<T, Error> {
    let answer = tokio::time::timeout(ZOOKEEPER_CALL_TIMEOUT, call).await;
    answer.unwrap_or(Err(zk::Error::Timeout)).map_err(|cause| Error::new(operation, path, cause))
}

fn absent_is_none<T>(answer: Result<T, Error>) -> Result<Option<T>, Error> {
    match answer {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.is_no_node() => Ok(None),
        Err(error) => Err(error),
    }
}
