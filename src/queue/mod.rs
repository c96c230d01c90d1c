//! The embedded queue: both dialects of the Taskcluster queue API, served by one process from one SQLite file.
//!
//! It runs on one machine and has no replication. An answered call survives a crash of the process and of the host.

mod artifact_calls;
mod artifact_content;
mod artifact_files;
mod auth;
mod azure_storage;
mod clock;
mod dispatch;
mod field_types;
mod idle_timeout;
mod queue_error;
mod request_body;
mod response_json;
mod route;
mod scopes;
mod server;
mod store;
mod task_calls;
mod task_definition;
mod task_state;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use secrecy::SecretString;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;

pub use self::auth::{Auth, RegisteredClient};
pub use self::clock::QueueClock;
pub use self::store::OpenError;

use self::auth::Keyring;
use self::clock::UnixMillis;
use self::request_body::BodyBudget;
use self::store::open::RunningStore;
use self::store::{Store, StoreConfig, StoreStatus};
use crate::limits::{
    CLAIM_TIMEOUT_MIN, QUEUE_ARTIFACT_BYTES_MAX, QUEUE_CLAIM_DELAY, QUEUE_CLAIM_TIMEOUT, QUEUE_DEADLINE_DELAY,
    QUEUE_LONG_POLL_WAIT, QUEUE_LONG_POLLS_MAX, QUEUE_POLL_URL_TTL, QUEUE_POLL_URL_TTL_MIN, QUEUE_STOP_TIMEOUT,
    QUEUE_VISIBILITY_TIMEOUT, QUEUE_VISIBILITY_TIMEOUT_MIN,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Db {
    /// A database file, created if missing; SQLite keeps two more files beside it while the queue runs.
    File(PathBuf),
    /// Lost when the queue stops. For tests.
    Memory,
}

/// Start from [`Config::new`] and change what differs.
#[derive(Debug, Clone)]
pub struct Config {
    pub db: Db,
    /// Directory of artifact content; created if missing.
    pub artifacts: PathBuf,
    /// Port 0 picks a free port.
    pub listen: SocketAddr,
    pub auth: Auth,
    pub clients: Vec<RegisteredClient>,
    /// Scopes of every caller, with or without a signature.
    pub anonymous_scopes: Vec<String>,
    /// The URL that clients use if the queue is behind a proxy: `https://host[:port]`.
    pub public_root_url: Option<String>,
    pub claim_timeout: Duration,
    /// Delay after `takenUntil` before a claim is resolved as `claim-expired`. A late reclaim is accepted until
    /// then.
    pub claim_delay: Duration,
    /// Delay after the deadline before a task is resolved as `deadline-exceeded`. A report is accepted until then.
    pub deadline_delay: Duration,
    /// How long `claimWork` waits for a pending task; capped at a tenth of `claim_timeout`.
    pub long_poll: Duration,
    /// Lifetime of the signed poll URLs of the Azure dialect.
    pub poll_url_lifetime: Duration,
    /// How long a received message stays hidden.
    pub visibility_timeout: Duration,
    pub artifact_bytes_max: u64,
    pub clock: QueueClock,
}

impl Config {
    /// A queue on a free loopback port with authentication on and no clients.
    #[must_use]
    pub fn new(db: Db, artifacts: PathBuf) -> Self {
        Self {
            db,
            artifacts,
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            auth: Auth::Checked,
            clients: Vec::new(),
            anonymous_scopes: vec!["queue:get-artifact:public/*".to_owned()],
            public_root_url: None,
            claim_timeout: QUEUE_CLAIM_TIMEOUT,
            claim_delay: QUEUE_CLAIM_DELAY,
            deadline_delay: QUEUE_DEADLINE_DELAY,
            long_poll: QUEUE_LONG_POLL_WAIT,
            poll_url_lifetime: QUEUE_POLL_URL_TTL,
            visibility_timeout: QUEUE_VISIBILITY_TIMEOUT,
            artifact_bytes_max: QUEUE_ARTIFACT_BYTES_MAX,
            clock: QueueClock::wall(),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Database(#[from] OpenError),
    #[error("cannot listen on {address}: is another process using the port?")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error("cannot create the artifact directory {path}")]
    Folder { path: String, source: std::io::Error },
    #[error("public_root_url {0:?} is not of the form https://host[:port]")]
    PublicUrl(String),
    #[error(
        "authentication is off and {0} is reachable from other hosts; set `auth = \"checked\"`, listen on 127.0.0.1, or \
         set `auth = \"open-to-network\"` to allow it"
    )]
    UnauthenticatedAddress(String),
    #[error("{name} is {given:?}; the minimum is {least:?}")]
    TooShort { name: &'static str, given: Duration, least: Duration },
    #[error("opening the database was interrupted")]
    Interrupted,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QueueFailure {
    #[error("the database failed: {0}; check the disk, then restart the queue")]
    File(String),
    #[error("the store thread panicked (see the log); restart the queue")]
    Panic,
}

pub(crate) struct QueueState {
    pub(crate) store: Store,
    pub(crate) keyring: Keyring,
    /// Without a trailing slash.
    pub(crate) root_url: String,
    pub(crate) clock: QueueClock,
    pub(crate) long_poll: Duration,
    pub(crate) poll_url_lifetime: Duration,
    pub(crate) visibility_timeout: Duration,
    pub(crate) artifacts: PathBuf,
    pub(crate) artifact_bytes_max: u64,
    pub(crate) long_poll_permits: Arc<Semaphore>,
    pub(crate) body_budget: BodyBudget,
    stop: watch::Receiver<StopSignal>,
    started_at: UnixMillis,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StopSignal {
    Running,
    Stopping,
}

impl QueueState {
    pub(crate) fn now(&self) -> UnixMillis {
        self.clock.now()
    }

    pub(crate) fn uptime(&self) -> Duration {
        self.started_at.until(self.now())
    }

    pub(crate) async fn stop_requested(&self) {
        // The sender is dropped with the queue.
        self.stop.clone().wait_for(|stop| *stop == StopSignal::Stopping).await.ok();
    }
}

/// A running queue. Dropping it stops it without waiting; [`RunningQueue::stop`] waits.
#[derive(Debug)]
pub struct RunningQueue {
    address: SocketAddr,
    root_url: String,
    stop: watch::Sender<StopSignal>,
    pending: watch::Receiver<u64>,
    long_poll_permits: Arc<Semaphore>,
    store: Option<Store>,
    store_status: watch::Receiver<StoreStatus>,
    server: JoinHandle<()>,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Store")
    }
}

/// Opens the database, listens, and serves until the queue is stopped.
///
/// # Errors
///
/// The database, the artifact directory or the address cannot be used.
pub async fn start(config: Config) -> Result<RunningQueue, StartError> {
    validate(&config)?;
    let artifacts_dir = config.artifacts.clone();
    let folder_error = |source| StartError::Folder { path: artifacts_dir.display().to_string(), source };
    artifact_files::create_dir_synced(&artifacts_dir, artifact_files::sync).map_err(folder_error)?;
    let path = match &config.db {
        Db::File(path) => Some(path.clone()),
        Db::Memory => None,
    };
    let opened = tokio::task::spawn_blocking(move || store::open(path.as_deref()))
        .await
        .map_err(|_| StartError::Interrupted)??;
    // The database is locked, so no other queue writes to this directory.
    artifact_files::remove_incoming(&artifacts_dir).map_err(folder_error)?;
    let own_secret = SecretString::from(opened.own_secret()?);
    let failed = |source| StartError::Listen { address: config.listen, source };
    let listener = TcpListener::bind(config.listen).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let root_url = match &config.public_root_url {
        Some(url) => url.trim_end_matches('/').to_owned(),
        None => format!("http://{address}"),
    };
    let public_address = config.public_root_url.as_deref().map(parse_public_url).transpose()?;
    let store_config = StoreConfig {
        claim_timeout: config.claim_timeout,
        claim_delay: config.claim_delay,
        deadline_delay: config.deadline_delay,
        clock: config.clock.clone(),
        artifacts: artifacts_dir.clone(),
    };
    let RunningStore { store, status } = opened.start(store_config, tokio::runtime::Handle::current())?;
    let (stop, stopping) = watch::channel(StopSignal::Running);
    let keyring = Keyring::new(config.auth, &config.clients, own_secret, &config.anonymous_scopes, public_address);
    let started_at = config.clock.now();
    let long_poll_permits = Arc::new(Semaphore::new(QUEUE_LONG_POLLS_MAX));
    let app = Arc::new(QueueState {
        store: store.clone(),
        keyring,
        root_url: root_url.clone(),
        clock: config.clock,
        // A worker counts its lease from the time of the request, so a poll may take only a small part of it.
        long_poll: config.long_poll.min(config.claim_timeout / 10),
        poll_url_lifetime: config.poll_url_lifetime,
        visibility_timeout: config.visibility_timeout,
        artifacts: artifacts_dir,
        artifact_bytes_max: config.artifact_bytes_max,
        long_poll_permits: Arc::clone(&long_poll_permits),
        body_budget: BodyBudget::new(),
        stop: stopping.clone(),
        started_at,
    });
    let pending = store.pending();
    #[expect(clippy::disallowed_methods, reason = "owned by Running, which aborts and awaits it")]
    let server = tokio::spawn(server::serve(listener, app, stopping));
    Ok(RunningQueue {
        address,
        root_url,
        stop,
        pending,
        long_poll_permits,
        store: Some(store),
        store_status: status,
        server,
    })
}

fn validate(config: &Config) -> Result<(), StartError> {
    let outside = config.public_root_url.clone().or_else(|| {
        let address = config.listen;
        (!address.ip().to_canonical().is_loopback()).then(|| address.to_string())
    });
    match (config.auth, outside) {
        (Auth::Open, Some(address)) => return Err(StartError::UnauthenticatedAddress(address)),
        (Auth::OpenToNetwork, _) => {
            tracing::warn!("authentication is off: every caller that can reach this queue has all scopes");
        }
        (Auth::Open, None) | (Auth::Checked, _) => {}
    }
    let spans = [
        ("claim_timeout", config.claim_timeout, CLAIM_TIMEOUT_MIN),
        ("poll_url_lifetime", config.poll_url_lifetime, QUEUE_POLL_URL_TTL_MIN),
        ("visibility_timeout", config.visibility_timeout, QUEUE_VISIBILITY_TIMEOUT_MIN),
    ];
    match spans.into_iter().find(|(_, given, least)| given < least) {
        Some((name, given, least)) => Err(StartError::TooShort { name, given, least }),
        None => Ok(()),
    }
}

fn parse_public_url(url: &str) -> Result<auth::HostPort, StartError> {
    let wrong = || StartError::PublicUrl(url.to_owned());
    let (scheme, rest) = url.split_once("://").ok_or_else(wrong)?;
    let port = match scheme {
        "https" => 443,
        "http" => 80,
        _ => return Err(wrong()),
    };
    let host = rest.split('/').next().unwrap_or_default();
    auth::parse_host(host, port).ok_or_else(wrong)
}

impl RunningQueue {
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// The `rootUrl` for clients, without a trailing slash.
    #[must_use]
    pub fn root_url(&self) -> &str {
        &self.root_url
    }

    /// A counter that grows each time a run becomes pending.
    #[must_use]
    pub fn pending(&self) -> watch::Receiver<u64> {
        self.pending.clone()
    }

    /// The number of long polls in flight.
    #[must_use]
    pub fn long_polls(&self) -> usize {
        QUEUE_LONG_POLLS_MAX - self.long_poll_permits.available_permits()
    }

    /// Resolves due claims and deadlines now; for tests with a manual clock.
    pub async fn tick(&self) {
        if let Some(store) = &self.store {
            store.tick().await;
        }
    }

    /// Resolves when the database or the store thread has failed; never for a queue that was stopped.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub fn failed(&self) -> impl Future<Output = QueueFailure> + Send + use<> {
        let mut status = self.store_status.clone();
        async move {
            match store_ended(&mut status).await {
                Ok(StoreStatus::Failed(what)) => QueueFailure::File(what),
                Ok(StoreStatus::Running | StoreStatus::Closed) => std::future::pending().await,
                Err(_) => QueueFailure::Panic,
            }
        }
    }

    /// Answers the long polls, finishes the calls in flight and closes the database.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future stops the queue without waiting.
    pub async fn stop(mut self) {
        self.stop.send_replace(StopSignal::Stopping);
        if tokio::time::timeout(QUEUE_STOP_TIMEOUT, &mut self.server).await.is_err() {
            tracing::warn!("shutdown timed out with calls in flight");
            self.server.abort();
            (&mut self.server).await.ok();
        }
        self.store = None;
        if tokio::time::timeout(QUEUE_STOP_TIMEOUT, store_ended(&mut self.store_status)).await.is_err() {
            tracing::warn!("shutdown timed out before the database was closed");
        }
    }
}

async fn store_ended(status: &mut watch::Receiver<StoreStatus>) -> Result<StoreStatus, watch::error::RecvError> {
    status.wait_for(|status| *status != StoreStatus::Running).await.map(|status| status.clone())
}

impl Drop for RunningQueue {
    fn drop(&mut self) {
        self.stop.send_replace(StopSignal::Stopping);
    }
}
