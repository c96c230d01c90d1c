//! The store of the notifier: events, lanes with their messages, attempts, and the health of endpoints.

mod statements;

use std::sync::Arc;

use rusqlite::{Connection, ErrorCode};
use tokio::runtime::Handle;
use tokio::sync::watch;
use uuid::Uuid;

pub(crate) use self::statements::{Added, AttemptRecord, Counts, Head};
use super::event::Event;
use crate::domain::lane::dispatcher::LaneId;
use crate::domain::lane::endpoint::EndpointHealth;
use crate::domain::lane::retry::{HeadState, HeadVerdict};
use crate::domain::staged::Stamp;
use crate::sqlite::{self, Batch, Database, Db, JobError, OpenError, Owner, Schema, StoreStatus, Writer};

const SCHEMA: Schema = Schema {
    // `jrnn`.
    application_id: 0x6a72_6e6e,
    format: 1,
    sql: include_str!("schema.sql"),
    migrations: &[],
    owner: "notifier",
    key: "notifier.db",
};

/// Why nothing was stored or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum StoreFailure {
    #[error("disk full: the notifier cannot write its database")]
    DiskFull,
    #[error("the database failed; the log has the reason under {0}")]
    Failed(Uuid),
}

#[derive(Debug)]
pub(crate) struct Tables;

impl Owner for Tables {
    type Tx<'a> = &'a Connection;
    type Error = StoreFailure;
    type Effects = ();

    fn store_error(cause: Option<&rusqlite::Error>, incident: Uuid) -> StoreFailure {
        match cause.and_then(rusqlite::Error::sqlite_error_code) {
            Some(ErrorCode::DiskFull) => StoreFailure::DiskFull,
            Some(_) | None => StoreFailure::Failed(incident),
        }
    }

    fn begin<'a>(&'a self, conn: &'a Connection) -> &'a Connection {
        conn
    }

    fn collect_effects(_: &Connection, (): &mut ()) {}

    fn end_batch(_: &mut Writer<Self>, _: &mut Batch<Self>) {}

    fn committed(&mut self, (): ()) {}
}

/// A handle. What it stores is on disk when it returns.
#[derive(Debug, Clone)]
pub(crate) struct Store(sqlite::Store<Tables>);

impl Store {
    /// # Errors
    ///
    /// If the database cannot be used.
    pub(crate) fn open(db: &Db) -> Result<(Self, watch::Receiver<StoreStatus>), OpenError> {
        let running = Database::open(db, &SCHEMA)?.start(Tables, Handle::current())?;
        Ok((Self(running.store), running.status))
    }

    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreFailure> {
        self.0.execute(|db| work(db).map_err(JobError::from)).await
    }

    /// Appends events to the lanes of the endpoints that want them: all or none.
    pub(crate) async fn add(
        &self,
        events: Vec<(Event, Vec<Arc<str>>)>,
        now: Stamp,
    ) -> Result<Vec<Added>, StoreFailure> {
        self.run(move |db| events.iter().map(|(event, endpoints)| statements::add(db, event, endpoints, now)).collect())
            .await
    }

    pub(crate) async fn due(&self, endpoint: &Arc<str>, now: Stamp, max: usize) -> Result<Vec<LaneId>, StoreFailure> {
        let endpoint = Arc::clone(endpoint);
        self.run(move |db| statements::due(db, &endpoint, now, max)).await
    }

    /// When a head of the endpoint is due that is not due yet.
    pub(crate) async fn next_due(&self, endpoint: &Arc<str>, now: Stamp) -> Result<Option<Stamp>, StoreFailure> {
        let endpoint = Arc::clone(endpoint);
        self.run(move |db| statements::next_due(db, &endpoint, now)).await
    }

    pub(crate) async fn head(&self, lane: LaneId) -> Result<Option<Head>, StoreFailure> {
        self.run(move |db| statements::head(db, lane)).await
    }

    /// Returns when the lane is due again; `None` if it is empty or stopped.
    pub(crate) async fn end_attempt(
        &self,
        head: Head,
        state: HeadState,
        attempt: AttemptRecord,
        verdict: HeadVerdict,
        health: Option<(Arc<str>, EndpointHealth)>,
        now: Stamp,
    ) -> Result<Option<Stamp>, StoreFailure> {
        self.run(move |db| {
            if let Some((endpoint, health)) = &health {
                statements::set_health(db, endpoint, health)?;
            }
            statements::end_attempt(db, &head, state, &attempt, verdict, now)
        })
        .await
    }

    pub(crate) async fn health(&self, endpoint: &Arc<str>) -> Result<EndpointHealth, StoreFailure> {
        let endpoint = Arc::clone(endpoint);
        self.run(move |db| statements::health(db, &endpoint)).await
    }

    pub(crate) async fn counts(&self, endpoint: &Arc<str>) -> Result<Counts, StoreFailure> {
        let endpoint = Arc::clone(endpoint);
        self.run(move |db| statements::counts(db, &endpoint)).await
    }
}
