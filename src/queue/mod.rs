//! The embedded queue: both dialects of the Taskcluster queue API, served by one process from one file.
//!
//! It is for one machine. Its address, its file and its artifacts live where it runs; there is no second node to take
//! over. What it has answered survives a crash of the process and of the host. Where one machine is not enough, run a
//! Taskcluster and point the same worker at it.

mod artifact_calls;
mod artifact_content;
mod artifact_files;
mod auth;
mod azure_storage;
mod body_schema;
mod clock;
mod dispatch;
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

/// Where the queue keeps its tasks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Db {
    /// In this file, made where it is missing, and in two more beside it while the queue runs.
    File(PathBuf),
    /// In memory: gone when the queue stops. For tests.
    Memory,
}

/// How a queue is run. Start from [`Config::new`] and change what differs.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where the tasks are kept.
    pub db: Db,
    /// The folder that the content of artifacts is kept in; made where it is missing.
    pub artifacts: PathBuf,
    /// Where to listen; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Whether callers must prove who they are.
    pub auth: Auth,
    /// Who may call, and what each may do.
    pub clients: Vec<RegisteredClient>,
    /// What a caller without a signature may do, and every other caller too.
    pub anonymous_scopes: Vec<String>,
    /// The address under which clients reach the queue, where a proxy stands before it: `https://host[:port]`.
    pub public_root_url: Option<String>,
    /// How long a claim lasts.
    pub claim_timeout: Duration,
    /// How long after its end a claim is resolved as `claim-expired`. Until then a late reclaim is accepted.
    pub claim_delay: Duration,
    /// How long after its deadline a task is resolved as `deadline-exceeded`. Until then a report is accepted.
    pub deadline_delay: Duration,
    /// How long a request for work is held while there is none; at most a tenth of `claim_timeout`.
    pub long_poll: Duration,
    /// How long the signed poll URLs of the older dialect are accepted.
    pub poll_url_lifetime: Duration,
    /// How long a message that was received is hidden, as those URLs ask for it.
    pub visibility_timeout: Duration,
    /// The largest artifact that is stored, in bytes.
    pub artifact_bytes_max: u64,
    /// Where the time comes from.
    pub clock: QueueClock,
}

impl Config {
    /// The settings of a queue on a free loopback port: callers are checked, and there are no clients yet.
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

/// Why a queue did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its file cannot be used.
    #[error(transparent)]
    Database(#[from] OpenError),
    /// Its address cannot be listened on.
    #[error("the queue cannot listen on {address}; is something else listening there?")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system says.
        source: std::io::Error,
    },
    /// Its folder for artifacts cannot be made.
    #[error("the queue's folder for artifacts, {path}, cannot be made")]
    Folder {
        /// The folder.
        path: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// The public address is not one.
    #[error("the queue's public address {0:?} is not of the form https://host[:port]")]
    PublicUrl(String),
    /// Everybody who can reach its address could do everything.
    #[error(
        "the queue is open to everybody and its address, {0}, can be reached from outside; keep callers checked, or \
         listen on 127.0.0.1, or say `auth = \"open-to-network\"` if that is what you want"
    )]
    UnauthenticatedAddress(String),
    /// A length of time is too short to work with.
    #[error("the queue's {name} is {given:?}; at least {least:?} is needed")]
    TooShort {
        /// Which it is.
        name: &'static str,
        /// What it is.
        given: Duration,
        /// The least it may be.
        least: Duration,
    },
    /// Opening the file was interrupted.
    #[error("opening the queue's file was interrupted")]
    Interrupted,
}

/// Why a queue that runs can no longer do its work. What it has answered is in its file; start it again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum QueueFailure {
    /// Its file cannot be written or read.
    #[error("the queue's file can no longer be used: {0}; look at its disk, and start the queue again")]
    File(String),
    /// A fault of journeyman itself.
    #[error("the queue's store has ended in a panic, which its log shows; start the queue again")]
    Panic,
}

/// What every request needs.
pub(crate) struct QueueState {
    pub(crate) store: Store,
    pub(crate) keyring: Keyring,
    /// The address before `/api/…`, without a slash at its end.
    pub(crate) root_url: String,
    pub(crate) clock: QueueClock,
    pub(crate) long_poll: Duration,
    pub(crate) poll_url_lifetime: Duration,
    pub(crate) visibility_timeout: Duration,
    pub(crate) artifacts: PathBuf,
    pub(crate) artifact_bytes_max: u64,
    pub(crate) long_poll_permits: Semaphore,
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

    /// Resolves when the queue is to stop.
    pub(crate) async fn stop_requested(&self) {
        // Where the sender is gone, the queue has been dropped.
        self.stop.clone().wait_for(|stop| *stop == StopSignal::Stopping).await.ok();
    }
}

/// A queue that runs. Dropping it stops it without waiting; [`RunningQueue::stop`] waits.
#[derive(Debug)]
pub struct RunningQueue {
    address: SocketAddr,
    root_url: String,
    stop: watch::Sender<StopSignal>,
    pending: watch::Receiver<u64>,
    store: Option<Store>,
    store_status: watch::Receiver<StoreStatus>,
    server: JoinHandle<()>,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Store")
    }
}

/// Opens the file, listens, and serves until the queue is stopped.
///
/// # Errors
///
/// Where the file, the folder or the address cannot be had; the text says which and what to do.
pub async fn start(settings: Config) -> Result<RunningQueue, StartError> {
    validate(&settings)?;
    let folder = settings.artifacts.clone();
    let no_folder = |source| StartError::Folder { path: folder.display().to_string(), source };
    artifact_files::create_dir_synced(&folder, artifact_files::sync).map_err(no_folder)?;
    let path = match &settings.db {
        Db::File(path) => Some(path.clone()),
        Db::Memory => None,
    };
    let opened = tokio::task::spawn_blocking(move || store::open(path.as_deref()))
        .await
        .map_err(|_| StartError::Interrupted)??;
    // The file is ours, so no other queue is writing there.
    artifact_files::remove_incoming(&folder).map_err(no_folder)?;
    let own = SecretString::from(opened.own_secret()?);
    let failed = |source| StartError::Listen { address: settings.listen, source };
    let listener = TcpListener::bind(settings.listen).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let root = match &settings.public_root_url {
        Some(url) => url.trim_end_matches('/').to_owned(),
        None => format!("http://{address}"),
    };
    let public = settings.public_root_url.as_deref().map(parse_public_url).transpose()?;
    let knobs = StoreConfig {
        claim_timeout: settings.claim_timeout,
        claim_delay: settings.claim_delay,
        deadline_delay: settings.deadline_delay,
        clock: settings.clock.clone(),
        artifacts: folder.clone(),
    };
    let RunningStore { store, status: life } = opened.start(knobs, tokio::runtime::Handle::current())?;
    let (stop, stopping) = watch::channel(StopSignal::Running);
    let keys = Keyring::new(settings.auth, &settings.clients, own, &settings.anonymous_scopes, public);
    let started = settings.clock.now();
    let app = Arc::new(QueueState {
        store: store.clone(),
        keyring: keys,
        root_url: root.clone(),
        clock: settings.clock,
        // A worker counts its lease from when it asked, so a poll must not be held for much of one.
        long_poll: settings.long_poll.min(settings.claim_timeout / 10),
        poll_url_lifetime: settings.poll_url_lifetime,
        visibility_timeout: settings.visibility_timeout,
        artifacts: folder,
        artifact_bytes_max: settings.artifact_bytes_max,
        long_poll_permits: Semaphore::new(QUEUE_LONG_POLLS_MAX),
        body_budget: BodyBudget::new(),
        stop: stopping.clone(),
        started_at: started,
    });
    let pending = store.pending();
    #[expect(clippy::disallowed_methods, reason = "owned by Running, which aborts and awaits it")]
    let server = tokio::spawn(server::serve(listener, app, stopping));
    Ok(RunningQueue { address, root_url: root, stop, pending, store: Some(store), store_status: life, server })
}

/// Refuses what would run and do harm.
fn validate(settings: &Config) -> Result<(), StartError> {
    let outside = settings.public_root_url.clone().or_else(|| {
        let address = settings.listen;
        (!address.ip().to_canonical().is_loopback()).then(|| address.to_string())
    });
    match (settings.auth, outside) {
        (Auth::Open, Some(address)) => return Err(StartError::UnauthenticatedAddress(address)),
        (Auth::OpenToNetwork, _) => {
            tracing::warn!("everybody who can reach this queue may do everything: it checks no caller");
        }
        (Auth::Open, None) | (Auth::Checked, _) => {}
    }
    let spans = [
        ("claim_timeout", settings.claim_timeout, CLAIM_TIMEOUT_MIN),
        ("poll_url_life", settings.poll_url_lifetime, QUEUE_POLL_URL_TTL_MIN),
        ("visibility", settings.visibility_timeout, QUEUE_VISIBILITY_TIMEOUT_MIN),
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
    /// The address that is listened on.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// The `rootUrl` for clients, without a slash at its end.
    #[must_use]
    pub fn root_url(&self) -> &str {
        &self.root_url
    }

    /// A number that grows each time something has become pending, for a worker in the same process to wait on.
    #[must_use]
    pub fn pending(&self) -> watch::Receiver<u64> {
        self.pending.clone()
    }

    /// Lets claims and deadlines be looked at now. With a clock that was moved by hand, this is when it is noticed.
    pub async fn tick(&self) {
        if let Some(store) = &self.store {
            store.tick().await;
        }
    }

    /// Resolves when the queue can no longer do its work, and says why. A queue that was stopped has not failed.
    ///
    /// # Cancel safety
    ///
    /// May be dropped and asked again.
    pub fn failed(&self) -> impl Future<Output = QueueFailure> + Send + use<> {
        let mut life = self.store_status.clone();
        async move {
            match store_ended(&mut life).await {
                Ok(StoreStatus::Failed(what)) => QueueFailure::File(what),
                Ok(StoreStatus::Running | StoreStatus::Closed) => std::future::pending().await,
                Err(_) => QueueFailure::Panic,
            }
        }
    }

    /// Stops: long polls are answered, calls under way end, the file is closed.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future stops without waiting.
    pub async fn stop(mut self) {
        self.stop.send_replace(StopSignal::Stopping);
        if tokio::time::timeout(QUEUE_STOP_TIMEOUT, &mut self.server).await.is_err() {
            tracing::warn!("calls were still under way when the queue was stopped");
            self.server.abort();
            (&mut self.server).await.ok();
        }
        self.store = None;
        if tokio::time::timeout(QUEUE_STOP_TIMEOUT, store_ended(&mut self.store_status)).await.is_err() {
            tracing::warn!("the queue's file was still in use when the queue was stopped");
        }
    }
}

/// Resolves when the store's thread has ended.
async fn store_ended(life: &mut watch::Receiver<StoreStatus>) -> Result<StoreStatus, watch::error::RecvError> {
    life.wait_for(|life| *life != StoreStatus::Running).await.map(|life| life.clone())
}

impl Drop for RunningQueue {
    fn drop(&mut self) {
        self.stop.send_replace(StopSignal::Stopping);
    }
}
