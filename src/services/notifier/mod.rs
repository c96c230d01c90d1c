//! Delivers webhooks at least once and in order: events become messages in the lanes of a store, and the engine sends
//! the head of each lane until its receiver has it.

mod alerts;
mod api;
pub mod config;
pub mod content_filter;
mod counters;
mod delivery;
mod engine;
mod format;
mod intake;
mod lease;
mod mistral;
mod registry;
mod seal;
mod store;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use secrecy::{ExposeSecret as _, SecretString};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use self::api::Api;
pub use self::api::{Console, EndpointCondition, EndpointStatus, Lists, Shown, Status, Tokens};
pub use self::counters::{BOUNDS_SECONDS, Counted};
pub use self::delivery::{ClientCertificate, Sender, SenderConfig, Signed, SigningKey, verify};
pub use self::engine::Endpoint;
use self::engine::Engine;
pub(crate) use self::format::Format;
use self::intake::Intake;
pub use self::intake::amqp::AmqpConfig;
use self::intake::amqp::AmqpIntake;
pub use self::intake::outbox::Outbox;
pub use self::intake::topology::Topology;
use self::mistral::MistralIntake;
pub use self::mistral::{MistralConfig, UrlKey};
use self::registry::Registry;
pub use self::registry::{EndpointSettings, Endpoints};
pub use self::seal::SealKeys;
pub use self::store::{AttemptRow, LaneRow, MessageFilter, MessagePage, MessageRow};
use self::store::{Postgres, PostgresError, Store, StoreFailure};
use journeyman_domain::lane::dispatcher::AttemptLimits;
use journeyman_domain::limits::{
    NOTIFIER_ATTEMPTS_MAX, NOTIFIER_ATTEMPTS_PER_ENDPOINT, NOTIFIER_ATTEMPTS_PER_ORIGIN_MAX, NOTIFIER_CONNECTIONS_MAX,
    NOTIFIER_LEASE_END_TIMEOUT, NOTIFIER_STOP_TIMEOUT, NOTIFIER_UPKEEP_INTERVAL, NOTIFIER_UPKEEP_PAUSE,
};
use journeyman_domain::staged::Stamp;
use journeyman_platform::host::clock::stamp;
use journeyman_platform::http::{self, Limits};
use journeyman_platform::sqlite::{Db, OpenError, StoreStatus, store_ended};
use journeyman_platform::tasks::supervised;

pub enum Database {
    /// The store of one node.
    Sqlite(Db),
    /// The store of several: its URL, and the certificate of its CA.
    Postgres { url: SecretString, ca: Option<PathBuf> },
}

impl Database {
    /// Makes what is missing of its tables.
    async fn open(&self) -> Result<(Store, Option<watch::Receiver<StoreStatus>>), NotifierError> {
        Ok(match self {
            Self::Sqlite(db) => Store::open(db).map(|(store, status)| (store, Some(status)))?,
            Self::Postgres { url, ca } => (Store::of(Postgres::open(url.expose_secret(), ca.as_deref()).await?), None),
        })
    }

    /// Makes the tables, or brings them to the format of this version.
    ///
    /// # Errors
    ///
    /// What the database or its user does not allow.
    pub async fn migrate(&self) -> Result<(), NotifierError> {
        self.open().await.map(drop)
    }
}

pub struct NotifierConfig {
    pub database: Database,
    pub listen: SocketAddr,
    pub tokens: Tokens,
    pub console: Console,
    /// How long messages are kept after they have ended.
    pub retention: Duration,
    pub sender: Sender,
    pub seal_keys: SealKeys,
    /// The ways besides HTTP by which events are taken.
    pub amqp: Option<AmqpConfig>,
    pub mistral: Option<MistralConfig>,
    pub outbox: Option<Outbox>,
    pub endpoints: Endpoints,
}

#[derive(Debug, thiserror::Error)]
pub enum NotifierError {
    #[error(transparent)]
    Database(#[from] OpenError),
    #[error("notifier.postgres")]
    Postgres(#[from] PostgresError),
    #[error("cannot read the notifier's database")]
    Store(#[from] StoreFailure),
    #[error(
        "endpoint {0} of the database cannot be opened, so its events would be lost: set the `notifier.seal_key_files` with which it was stored"
    )]
    Sealed(String),
    #[error("cannot listen on {address}: is another process using the port?")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error("the notifier's database failed: {0}; check the disk, then restart the notifier")]
    Failed(String),
}

/// A notifier that listens and has not begun.
pub struct Notifier {
    engine: Engine,
    api: Arc<Api>,
    amqp: Option<AmqpIntake>,
    mistral: Option<MistralIntake>,
    outbox: Option<Outbox>,
    intake: Arc<Intake>,
    listener: TcpListener,
    store: Store,
    retention: Duration,
    /// The status of SQLite's thread.
    status: Option<watch::Receiver<StoreStatus>>,
}

impl Notifier {
    /// # Errors
    ///
    /// Fails if the database or the address cannot be used.
    pub async fn start(config: NotifierConfig) -> Result<Self, NotifierError> {
        let (store, status) = config.database.open().await?;
        let address = config.listen;
        let failed = |source| NotifierError::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let registry = Arc::new(Registry::new(config.endpoints, config.seal_keys));
        let limits = AttemptLimits {
            in_all: NOTIFIER_ATTEMPTS_MAX,
            per_endpoint: NOTIFIER_ATTEMPTS_PER_ENDPOINT.into(),
            per_origin: NOTIFIER_ATTEMPTS_PER_ORIGIN_MAX.into(),
        };
        let intake = Arc::new(Intake::new(store.clone(), Arc::clone(&registry)));
        let engine = Engine::new(store.clone(), config.sender, registry, limits, Arc::clone(&intake)).await?;
        let endpoints = intake.endpoints();
        for (name, state) in store.endpoints().await?.states {
            if state.settings.is_some() && !endpoints.contains_key(name.as_str()) {
                return Err(NotifierError::Sealed(name));
            }
        }
        let amqp = config.amqp.map(|config| AmqpIntake { config, intake: Arc::clone(&intake) });
        let mistral = config.mistral.map(|config| MistralIntake { config, intake: Arc::clone(&intake) });
        let api = Arc::new(Api::new(Arc::clone(&intake), store.clone(), config.tokens, config.console));
        let NotifierConfig { outbox, retention, .. } = config;
        Ok(Self { engine, api, amqp, mistral, outbox, intake, listener, store, retention, status })
    }

    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Reads what the notifier shows without a token, while it runs; `None` if the store does not answer.
    pub fn snapshots(&self) -> impl AsyncFn() -> Option<Shown> + use<> {
        let api = Arc::clone(&self.api);
        async move || api.shown().await.ok()
    }

    /// Runs until `stop`, then finishes the calls and attempts that are under way.
    ///
    /// # Errors
    ///
    /// Fails if the database fails.
    pub async fn run(self, stop: CancellationToken) -> Result<(), NotifierError> {
        let Self { engine, api, amqp, mistral, outbox, intake, listener, store, retention, mut status } = self;
        let limits = Limits::for_connections(NOTIFIER_CONNECTIONS_MAX);
        let serving = http::serve_until(listener, api.routes(), limits, SocketAddr::ip, stop.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(supervised("a notifier's engine", engine.run(stop.clone())));
        tasks.spawn(supervised("a notifier's HTTP server", serving));
        let mut beside = JoinSet::new();
        let (hints, cleaning) = (store.clone(), store.clone());
        beside.spawn(supervised("hints of other nodes", async move { hints.run_hints().await }));
        beside.spawn(supervised("a notifier's clean-up", async move { clean_up(&cleaning, retention).await }));
        let amqp = amqp.map(|amqp| supervised("intake from RabbitMQ", amqp.run(stop.clone())));
        let mistral = mistral.map(|mistral| supervised("intake from Mistral", mistral.run(stop.clone())));
        let outbox = outbox.map(|outbox| supervised("intake from an outbox", outbox.run(intake, stop.clone())));
        let working = async {
            let tasks = async { while tasks.join_next().await.is_some() {} };
            tokio::join!(tasks, OptionFuture::from(amqp), OptionFuture::from(mistral), OptionFuture::from(outbox));
        };
        let too_long = async {
            stop.cancelled().await;
            tokio::time::sleep(NOTIFIER_STOP_TIMEOUT).await;
            tracing::warn!("attempts are still under way; their messages are sent again after the next start");
        };
        let failing = async {
            let Some(status) = &mut status else { return std::future::pending().await };
            match store_ended(status).await {
                Ok(StoreStatus::Failed(why)) => Err(NotifierError::Failed(why)),
                Ok(StoreStatus::Running | StoreStatus::Closed) => Ok(()),
                Err(_) => Err(NotifierError::Failed("its thread panicked (see the log)".to_owned())),
            }
        };
        let ended = tokio::select! {
            () = working => Ok(()),
            () = too_long => Ok(()),
            ended = failing => ended,
        };
        // An attempt that is under way ends before its lane is another node's.
        tasks.shutdown().await;
        beside.shutdown().await;
        if ended.is_ok() && !matches!(timeout(NOTIFIER_LEASE_END_TIMEOUT, store.end_lease()).await, Ok(Ok(()))) {
            tracing::warn!("cannot hand the lanes over; other nodes take over when the lease ends");
        }
        ended
    }
}

/// Removes what ended long ago, some at a time, until the caller drops it.
async fn clean_up(store: &Store, retention: Duration) {
    loop {
        let before = Stamp(stamp().0.saturating_sub(i64::try_from(retention.as_millis()).unwrap_or(i64::MAX)));
        let removed = store.clean_up(before, &mistral::name_pattern()).await.unwrap_or_else(|error| {
            tracing::error!("cannot remove old messages, retrying later: {error}");
            0
        });
        if removed == 0 {
            tokio::time::sleep(NOTIFIER_UPKEEP_INTERVAL).await;
        } else {
            tracing::debug!(removed, "removed old messages");
            tokio::time::sleep(NOTIFIER_UPKEEP_PAUSE).await;
        }
    }
}
