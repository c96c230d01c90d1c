//! The embedded queue: both dialects of the Taskcluster queue API, served by one process from one SQLite file.
//!
//! It runs on one machine and has no replication. An answered call survives a crash of the process and of the host.

mod api;
mod artifact_calls;
mod artifact_content;
mod artifact_files;
mod auth;
mod azure_storage;
mod call;
mod clock;
pub mod config;
mod field_types;
mod origins;
mod queue_error;
mod response_json;
pub mod scopes;
mod store;
mod task_calls;
mod task_definition;
mod task_state;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::serve::ListenerExt as _;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

pub use self::clock::QueueClock;
pub use self::config::{Auth, Config, RegisteredClient};
pub use self::task_state::Priority;
pub use journeyman_platform::sqlite::{Db, OpenError};

use self::auth::Keyring;
use self::call::QueueState;
use self::store::{QueueStore, Store, outbox};
use journeyman_domain::limits::{
    NOTIFIER_STORE_RETRY, QUEUE_BACKLOG, QUEUE_BODIES_BYTES_MAX, QUEUE_CONNECTION_IDLE_MAX, QUEUE_CONNECTIONS_MAX,
    QUEUE_LONG_POLLS_MAX, QUEUE_STOP_TIMEOUT,
};
use journeyman_platform::http::{self, Limits};
use journeyman_platform::sqlite::{Database, RunningStore, StoreStatus, store_ended};
use journeyman_platform::tasks::supervised;
use journeyman_worker::notify::{Publisher, hand_over};

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Database(#[from] OpenError),
    #[error("cannot listen on {address}: is another process using the port?")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error("cannot create the artifact directory {path}")]
    Folder { path: String, source: std::io::Error },
    #[error(
        "authentication is off and {0} is reachable from other hosts; set `auth = \"checked\"`, listen on 127.0.0.1, or \
         set `auth = \"open-to-network\"` to allow it"
    )]
    UnauthenticatedAddress(String),
}

/// A running queue. Dropping it stops it without waiting; [`RunningQueue::stop`] waits.
#[derive(Debug)]
pub struct RunningQueue {
    address: SocketAddr,
    root_url: String,
    stop: DropGuard,
    long_poll_permits: Arc<Semaphore>,
    store: Store,
    store_status: watch::Receiver<StoreStatus>,
    server: JoinHandle<()>,
    announced: Arc<Notify>,
}

/// Opens the database, listens, and serves until the queue is stopped.
///
/// # Errors
///
/// The database, the artifact directory or the address cannot be used.
pub async fn start(config: Config) -> Result<RunningQueue, StartError> {
    start_with(config, |_| Router::new()).await
}

/// As [`start`], with pages at the same address, which is their argument.
///
/// # Errors
///
/// The database, the artifact directory or the address cannot be used.
#[expect(clippy::unused_async, reason = "it needs the runtime in which it is awaited")]
pub async fn start_with(mut config: Config, pages: impl FnOnce(&str) -> Router) -> Result<RunningQueue, StartError> {
    check_exposure(&config)?;
    // A worker counts its lease from the time of the request, so a poll may take only a small part of it.
    config.long_poll = config.long_poll.min(config.claim_timeout / 10);
    let config = Arc::new(config);
    let folder_error = |source| StartError::Folder { path: config.artifacts.display().to_string(), source };
    let database = Database::open(&config.db, &store::SCHEMA)?;
    let own_secret = store::own_secret(&database)?;
    // The database is locked, so no other queue writes to this directory.
    artifact_files::prepare(&config.artifacts).map_err(folder_error)?;
    let keyring = Keyring::new(&config, own_secret);
    let failed = |source| StartError::Listen { address: config.listen, source };
    let listener = listen(config.listen).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let root_url = format!("http://{address}");
    let owner = QueueStore::new(Arc::clone(&config));
    let (announced, activity) = (Arc::clone(&owner.announced), Arc::clone(&owner.activity));
    let RunningStore { store, status } = database.start(owner, tokio::runtime::Handle::current())?;
    let long_poll_permits = Arc::new(Semaphore::new(QUEUE_LONG_POLLS_MAX));
    let stop = CancellationToken::new();
    let app = QueueState {
        store: store.clone(),
        keyring,
        root_url: root_url.clone(),
        long_poll_permits: Arc::clone(&long_poll_permits),
        body_budget: Arc::new(Semaphore::new(QUEUE_BODIES_BYTES_MAX as usize)),
        stop: stop.clone(),
        activity,
        config,
    };
    let listener = listener.tap_io(|stream| {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "cannot set TCP_NODELAY");
        }
    });
    let limits = Limits {
        head_timeout: QUEUE_CONNECTION_IDLE_MAX,
        body_timeout: None,
        connection_age_max: None,
        ..Limits::for_connections(QUEUE_CONNECTIONS_MAX)
    };
    #[expect(clippy::disallowed_methods, reason = "owned by RunningQueue, which aborts and awaits it")]
    let server = tokio::spawn(supervised(
        "the queue's server",
        http::serve_until(
            listener,
            api::router(Arc::new(app)).merge(pages(&root_url)),
            limits,
            SocketAddr::ip,
            stop.clone(),
        ),
    ));
    let stop = stop.drop_guard();
    Ok(RunningQueue { address, root_url, stop, long_poll_permits, store, store_status: status, server, announced })
}

fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(QUEUE_BACKLOG)
}

fn check_exposure(config: &Config) -> Result<(), StartError> {
    let exposed = (!config.listen.ip().to_canonical().is_loopback()).then(|| config.listen.to_string());
    match (config.auth, exposed) {
        (Auth::Open, Some(address)) => return Err(StartError::UnauthenticatedAddress(address)),
        (Auth::OpenToNetwork, _) => {
            tracing::warn!("authentication is off: every caller that can reach this queue has all scopes");
        }
        (Auth::Open, None) => {
            tracing::warn!("authentication is off: every user and process of this machine has all scopes");
        }
        (Auth::Checked, _) => {}
    }
    Ok(())
}

impl RunningQueue {
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// The `rootUrl` for clients, without a trailing slash.
    pub fn root_url(&self) -> &str {
        &self.root_url
    }

    /// The number of long polls in flight.
    pub fn long_polls(&self) -> usize {
        QUEUE_LONG_POLLS_MAX - self.long_poll_permits.available_permits()
    }

    /// Resolves due claims and deadlines now; for tests with a manual clock.
    pub async fn tick(&self) {
        store::tick(&self.store).await;
    }

    /// Hands the events of resolved tasks to a notifier. Never resolves.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe; the events stay in the database until the notifier has them.
    pub fn hand_over_events(&self, mut publisher: Publisher) -> impl Future<Output = Infallible> + use<> {
        let (store, announced) = (self.store.clone(), Arc::clone(&self.announced));
        async move {
            loop {
                let handed = match outbox::read(&store).await {
                    Ok(outbox) if outbox.events.is_empty() => {
                        announced.notified().await;
                        continue;
                    }
                    Ok(outbox) => {
                        hand_over(&mut publisher, &outbox.events).await;
                        outbox::clear(&store, &outbox).await
                    }
                    Err(error) => Err(error),
                };
                if let Err(error) = handed {
                    tracing::error!(?error, "cannot read or clear the events for the notifier, retrying");
                    tokio::time::sleep(NOTIFIER_STORE_RETRY).await;
                }
            }
        }
    }

    /// Resolves when the database or the store thread has failed; never for a queue that was stopped.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub fn failed(&self) -> impl Future<Output = String> + Send + use<> {
        let mut status = self.store_status.clone();
        async move {
            match store_ended(&mut status).await {
                Ok(StoreStatus::Failed(what)) => {
                    format!("the database failed: {what}; check the disk, then restart the queue")
                }
                Ok(StoreStatus::Running | StoreStatus::Closed) => std::future::pending().await,
                Err(_) => "the store thread panicked (see the log); restart the queue".to_owned(),
            }
        }
    }

    /// Answers the long polls, finishes the calls in flight and closes the database.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future stops the queue without waiting.
    pub async fn stop(self) {
        let Self { stop, store, mut store_status, mut server, .. } = self;
        drop(stop);
        if tokio::time::timeout(QUEUE_STOP_TIMEOUT, &mut server).await.is_err() {
            tracing::warn!("shutdown timed out with calls in flight");
            server.abort();
            server.await.ok();
        }
        drop(store);
        if tokio::time::timeout(QUEUE_STOP_TIMEOUT, store_ended(&mut store_status)).await.is_err() {
            tracing::warn!("shutdown timed out before the database was closed");
        }
    }
}
