//! Delivers webhooks at least once and in order: events become messages in the lanes of a [`store`], and the [`engine`] sends
//! the head of each lane until its receiver has it.

mod delivery;
mod engine;
mod event;
mod format;
mod intake;
mod pattern;
mod store;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

pub(crate) use self::delivery::{Sender, SenderConfig, SigningKey};
pub(crate) use self::engine::Endpoint;
use self::engine::Engine;
use self::intake::Intake;
pub(crate) use self::intake::amqp::AmqpConfig;
use self::intake::amqp::AmqpIntake;
use self::intake::http::Api;
pub(crate) use self::intake::topology::{Topology, TopologyError};
pub(crate) use self::pattern::TypePattern;
use self::store::{Store, StoreFailure};
use crate::domain::lane::dispatcher::AttemptLimits;
use crate::domain::staged::Stamp;
use crate::http::{self, BearerToken, Limits};
use crate::limits::{
    HTTP_CONNECTIONS_MAX, HTTP_HEAD_TIMEOUT, NOTIFIER_ATTEMPTS_MAX, NOTIFIER_ATTEMPTS_PER_ENDPOINT_MAX,
    NOTIFIER_ATTEMPTS_PER_ORIGIN_MAX, NOTIFIER_STOP_TIMEOUT,
};
use crate::sqlite::{Db, OpenError, StoreStatus, store_ended};

pub(crate) struct NotifierConfig {
    pub(crate) db: Db,
    pub(crate) listen: SocketAddr,
    pub(crate) token: BearerToken,
    pub(crate) sender: Sender,
    /// Where events are taken besides HTTP.
    pub(crate) amqp: Option<AmqpConfig>,
    /// With the types of events that each wants.
    pub(crate) endpoints: BTreeMap<Arc<str>, (Endpoint, Vec<TypePattern>)>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum NotifierError {
    #[error(transparent)]
    Database(#[from] OpenError),
    #[error("cannot read the notifier's database: {0}")]
    Store(#[from] StoreFailure),
    #[error("cannot listen on {address}: is another process using the port?")]
    Listen { address: SocketAddr, source: std::io::Error },
    #[error("the notifier's database failed: {0}; check the disk, then restart the notifier")]
    Failed(String),
}

/// A notifier that listens and has not begun.
pub(crate) struct Notifier {
    engine: Engine,
    api: Api,
    amqp: Option<AmqpIntake>,
    listener: TcpListener,
    status: watch::Receiver<StoreStatus>,
}

impl Notifier {
    /// # Errors
    ///
    /// If the database or the address cannot be used.
    pub(crate) async fn start(config: NotifierConfig) -> Result<Self, NotifierError> {
        let (store, status) = Store::open(&config.db)?;
        let address = config.listen;
        let failed = |source| NotifierError::Listen { address, source };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let stored = Arc::new(Notify::new());
        let (mut endpoints, mut wanted) = (BTreeMap::new(), BTreeMap::new());
        for (name, (endpoint, patterns)) in config.endpoints {
            wanted.insert(Arc::clone(&name), patterns);
            endpoints.insert(name, endpoint);
        }
        let limits = AttemptLimits {
            in_all: NOTIFIER_ATTEMPTS_MAX,
            per_endpoint: NOTIFIER_ATTEMPTS_PER_ENDPOINT_MAX,
            per_origin: NOTIFIER_ATTEMPTS_PER_ORIGIN_MAX,
        };
        let engine = Engine::new(store.clone(), config.sender, endpoints, limits, Arc::clone(&stored)).await?;
        let intake = Arc::new(Intake::new(store, wanted, stored));
        let amqp = config.amqp.map(|amqp| AmqpIntake::new(amqp, Arc::clone(&intake)));
        let api = Api::new(intake, config.token);
        Ok(Self { engine, api, amqp, listener, status })
    }

    pub(crate) fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Runs until `stop`, then finishes the calls and attempts that are under way.
    ///
    /// # Errors
    ///
    /// If the database fails.
    pub(crate) async fn run(self, stop: CancellationToken) -> Result<(), NotifierError> {
        let Self { engine, api, amqp, listener, mut status } = self;
        let limits = Limits {
            connections_max: HTTP_CONNECTIONS_MAX,
            connections_per_peer_max: HTTP_CONNECTIONS_MAX,
            head_timeout: HTTP_HEAD_TIMEOUT,
            connection_age_max: None,
        };
        let serving = http::serve_until(listener, api.routes(), limits, SocketAddr::ip, stop.clone());
        let consuming = async {
            if let Some(amqp) = amqp {
                amqp.run(stop.clone()).await;
            }
        };
        let working = async {
            tokio::join!(serving, consuming, engine.run(stop.clone()));
        };
        let too_long = async {
            stop.cancelled().await;
            tokio::time::sleep(NOTIFIER_STOP_TIMEOUT).await;
            tracing::warn!("attempts are still under way; their messages are sent again after the next start");
        };
        tokio::select! {
            () = working => Ok(()),
            () = too_long => Ok(()),
            ended = store_ended(&mut status) => match ended {
                Ok(StoreStatus::Failed(why)) => Err(NotifierError::Failed(why)),
                Ok(StoreStatus::Running | StoreStatus::Closed) => Ok(()),
                Err(_) => Err(NotifierError::Failed("its thread panicked (see the log)".to_owned())),
            },
        }
    }
}

fn stamp() -> Stamp {
    Stamp(jiff::Timestamp::now().as_millisecond())
}
