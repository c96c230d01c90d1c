//! A client of ZooKeeper: as much of the protocol as the mechanisms of this program need.
//!
//! A task for each session owns its socket. Calls reach it through a bounded channel, are sent at once and answered in order. A call
//! in flight fails with its connection and is never repeated: whether it took effect is for its caller to find out. A call that is
//! made without a connection waits for one until the session ends, so callers bound it.
//!
//! Cancel safety: a call that is dropped is not sent if it still waits for a connection. Otherwise it may take effect. Nothing else
//! is disturbed.

mod connection;
mod error;
mod jute;
mod path;
mod records;
mod session;
mod transport;
mod watches;

#[cfg(test)]
mod session_tests;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};

pub use error::Error;
pub use records::{Acl, CreateMode, Stat, Write};
pub use session::SessionState;
pub use watches::{NodeWatch, TreeEvent, TreeWatch};

use crate::tasks::supervised;
use connection::{Request, Waiting};
use journeyman_domain::limits::{ZOOKEEPER_CALLS_QUEUED_MAX, ZOOKEEPER_REQUEST_BYTES_MAX};
use jute::{Malformed, Reader};
use path::Chroot;
use records::Operation;
use session::{Session, Status};
use watches::Subscription;

/// The number of a call, which stands before its operation.
const HEAD_BYTES: usize = 4;

/// How a session is opened.
#[derive(Clone)]
pub struct ConnectOptions {
    /// Hosts with ports, separated by commas.
    pub servers: String,
    /// How long the session outlives its connection; the server may shorten or extend it.
    pub session_timeout: Duration,
    /// TLS, if the servers want it.
    pub tls: Option<Arc<rustls::ClientConfig>>,
    /// A scheme and its credentials, such as `digest` and `user:password`.
    pub auth: Option<(String, Vec<u8>)>,
}

/// A session, or a part of its tree. The session is closed when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct Client {
    requests: mpsc::Sender<Request>,
    status: watch::Receiver<Status>,
    chroot: Chroot,
}

/// A transaction that failed as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MultiError {
    /// Which write failed; `None` if none was tried, or it is not known.
    pub index: Option<usize>,
    /// Why.
    pub cause: Error,
}

impl From<Error> for MultiError {
    fn from(cause: Error) -> Self {
        Self { index: None, cause }
    }
}

impl Client {
    /// Opens a session.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`] if no server grants one in time.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a session that was granted expires.
    pub async fn connect(options: &ConnectOptions) -> Result<Self, Error> {
        let (requests, receiver) = mpsc::channel(ZOOKEEPER_CALLS_QUEUED_MAX);
        let (session, stream) = Session::open(options, receiver).await?;
        let status = session.status();
        #[expect(
            clippy::disallowed_methods,
            reason = "it outlives its client to close the session; a panic closes it too"
        )]
        tokio::spawn(supervised("a ZooKeeper session", session.run(stream)));
        Ok(Self { requests, status, chroot: Chroot::default() })
    }

    /// The same session, with all paths below this one.
    ///
    /// # Errors
    ///
    /// [`Error::BadArguments`] if it is no path.
    pub fn chroot(self, path: &str) -> Result<Self, Error> {
        Ok(Self { chroot: Chroot::new(path)?, ..self })
    }

    /// The id of the session.
    pub fn session_id(&self) -> i64 {
        self.status.borrow().id
    }

    /// The timeout that the server granted last.
    pub fn session_timeout(&self) -> Duration {
        self.status.borrow().timeout
    }

    /// When the last request was sent that was answered, on the boot clock: the session lasts for its timeout from then on.
    pub fn proved_at(&self) -> journeyman_domain::time::Instant {
        self.status.borrow().proved_at
    }

    /// The state of the session.
    pub fn state(&self) -> SessionState {
        self.status.borrow().state
    }

    /// Resolves when the session has ended.
    pub async fn ended(&self) {
        // It has ended as well where its task is gone.
        self.status.clone().wait_for(|status| status.state.is_terminated()).await.ok();
    }

    /// Creates a node and returns its path.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn create(&self, path: &str, data: &[u8], mode: CreateMode, acl: Acl) -> Result<String, Error> {
        let created = self.write(Write::Create { path, data, mode }, acl, |answer| answer.text()).await?;
        Ok(self.chroot.strip(&created).to_owned())
    }

    /// Creates a node with its parents, without data. Succeeds if it exists.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn create_all(&self, path: &str) -> Result<(), Error> {
        let mut missing = vec![path];
        while let Some(path) = missing.last() {
            match self.create(path, b"", CreateMode::Persistent, Acl::AnyoneAll).await {
                Ok(_) | Err(Error::NodeExists) => drop(missing.pop()),
                Err(Error::NoNode) => match path.rsplit_once('/') {
                    Some((parent, _)) if !parent.is_empty() => missing.push(parent),
                    Some(_) | None => return Err(Error::NoNode),
                },
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Deletes a node, of this version if one is given.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn delete(&self, path: &str, version: Option<i32>) -> Result<(), Error> {
        self.write(Write::Delete { path, version }, Acl::AnyoneAll, records::nothing).await
    }

    /// Reads a node.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn get_data(&self, path: &str) -> Result<(Vec<u8>, Stat), Error> {
        self.read(Operation::GetData, path, records::data).await
    }

    /// Sets the data of a node, of this version if one is given.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn set_data(&self, path: &str, data: &[u8], version: Option<i32>) -> Result<Stat, Error> {
        self.write(Write::Set { path, data, version }, Acl::AnyoneAll, records::stat).await
    }

    /// Lists the names of a node's children, unordered, with its stat.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn children(&self, path: &str) -> Result<(Vec<String>, Stat), Error> {
        self.read(Operation::GetChildren, path, records::children).await
    }

    /// The stat of a node; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn stat(&self, path: &str) -> Result<Option<Stat>, Error> {
        absent_is_none(self.read(Operation::Exists, path, records::stat).await)
    }

    /// The stat of a node, and a watch of it, whether it exists or not.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn stat_and_watch(&self, path: &str) -> Result<(Option<Stat>, NodeWatch), Error> {
        let node = self.chroot.node(path)?;
        let (subscription, watch) = Subscription::node(node.to_full());
        let found = self.call(records::read(Operation::Exists, node, true), Some(subscription), records::stat).await;
        Ok((absent_is_none(found)?, watch))
    }

    /// Watches a node with all below it, whether it exists or not.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn watch_tree(&self, root: &str) -> Result<TreeWatch, Error> {
        let node = self.chroot.node(root)?;
        let (subscription, watch) = Subscription::tree(node.to_full(), self.chroot.clone());
        self.call(records::add_recursive_watch(node), Some(subscription), records::nothing).await?;
        Ok(watch)
    }

    /// Ends all watches of a node. Their listeners have to be dropped before.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn unwatch(&self, root: &str) -> Result<(), Error> {
        self.call(records::remove_watches(self.chroot.node(root)?), None, records::nothing).await
    }

    /// Performs all writes or none.
    ///
    /// # Errors
    ///
    /// An error has the index of the write that failed.
    pub async fn multi(&self, writes: &[Write<'_>]) -> Result<(), MultiError> {
        let mut nodes = Vec::with_capacity(writes.len());
        for (index, write) in writes.iter().enumerate() {
            let node = self.chroot.target(write).map_err(|cause| MultiError { index: Some(index), cause })?;
            nodes.push((*write, node));
        }
        match self.call(records::multi(nodes.into_iter()), None, records::failed_write).await? {
            Some((index, code)) => Err(MultiError { index: Some(index), cause: Error::from_code(code) }),
            None => Ok(()),
        }
    }

    async fn write<T: Send + 'static>(
        &self,
        write: Write<'_>,
        acl: Acl,
        decode: fn(&mut Reader<'_>) -> Result<T, Malformed>,
    ) -> Result<T, Error> {
        self.call(records::write(write, self.chroot.target(&write)?, acl), None, decode).await
    }

    async fn read<T: Send + 'static>(
        &self,
        operation: Operation,
        path: &str,
        decode: fn(&mut Reader<'_>) -> Result<T, Malformed>,
    ) -> Result<T, Error> {
        self.call(records::read(operation, self.chroot.node(path)?, false), None, decode).await
    }

    async fn call<T: Send + 'static>(
        &self,
        body: Vec<u8>,
        watch: Option<Subscription>,
        decode: fn(&mut Reader<'_>) -> Result<T, Malformed>,
    ) -> Result<T, Error> {
        if body.len() > ZOOKEEPER_REQUEST_BYTES_MAX - HEAD_BYTES {
            return Err(Error::BadArguments("a request may have 1 MiB"));
        }
        let (reply, answer) = oneshot::channel();
        let request = Request { body, watch, caller: Box::new(Waiting { reply, decode }) };
        // A session that has ended has dropped the other end of both channels.
        match self.requests.send(request).await {
            Ok(()) => answer.await.unwrap_or_else(|_| Err(self.loss())),
            Err(_) => Err(self.loss()),
        }
    }

    fn loss(&self) -> Error {
        match self.state() {
            SessionState::Connected | SessionState::Disconnected => Error::ConnectionLoss,
            SessionState::Expired => Error::SessionExpired,
            SessionState::AuthFailed => Error::AuthFailed,
            SessionState::Closed => Error::Closed,
        }
    }
}

fn absent_is_none<T>(answer: Result<T, Error>) -> Result<Option<T>, Error> {
    match answer {
        Ok(found) => Ok(Some(found)),
        Err(Error::NoNode) => Ok(None),
        Err(error) => Err(error),
    }
}
