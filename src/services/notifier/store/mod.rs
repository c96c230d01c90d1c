//! The store of the notifier: events, lanes with their messages, attempts, and the state of endpoints.
//!
//! One set of statements runs on SQLite, for one node, and on PostgreSQL, for several.

mod batches;
mod operators;
mod postgres;
mod sql;
mod sqlite;
mod statements;
#[cfg(test)]
mod tests;
mod transaction;
mod upkeep;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use rusqlite::Connection;
use tokio::runtime::Handle;
use tokio::sync::watch;
use uuid::Uuid;

use self::batches::Batches;
pub(super) use self::operators::AttemptPlace;
pub use self::operators::{AttemptRow, LaneRow, MessageFilter, MessagePage, MessageRow};
pub(super) use self::operators::{
    Counts, EndpointChange, EndpointState, LaneChange, LastFailure, ReplayFilter, StoredEndpoints,
};
use self::postgres::{Hints, Use};
pub(super) use self::postgres::{Postgres, PostgresError, PostgresPool};
pub(super) use self::sql::{StoreFailure, words as postgres_words};
use self::sqlite::Tables;
pub(super) use self::statements::{
    Added, AttemptRecord, Committed, DueLane, DueLanes, EndedAttempt, Head, LaneEnd, Lease, NewEvents,
};
use self::statements::{NewCall, NextHead};
use self::transaction::Tx;
use journeyman_domain::lane::dispatcher::LaneId;
use journeyman_domain::lane::endpoint::EndpointHealth;
use journeyman_domain::lane::partitions::Partition;
use journeyman_domain::limits::{NOTIFIER_ENDS_AT_ONCE, NOTIFIER_LEASE, NOTIFIER_TRANSACTION_MAX};
use journeyman_domain::staged::Stamp;
use journeyman_platform::host::clock::stamp;
use journeyman_platform::sqlite::{Database, Db, OpenError, StoreStatus};

/// A handle. What it stores is on disk when it returns.
#[derive(Clone)]
pub(crate) struct Store {
    database: Kind,
    /// This process, among those that share the database.
    node: Arc<str>,
    hints: Arc<Hints>,
    intake: Arc<Batches<NewCall, Option<Vec<Added>>>>,
    heads: Arc<Batches<(LaneId, Stamp), NextHead>>,
    ends: Arc<Batches<Arc<EndedAttempt>, LaneEnd>>,
}

#[derive(Clone)]
enum Kind {
    Sqlite(journeyman_platform::sqlite::Store<Tables>),
    Postgres(Postgres),
}

/// Runs statements in one transaction of either database, on connections of its use.
macro_rules! transaction {
    (Pages, $store:expr, move |$db:ident| $work:expr) => {
        transaction!(Pages, $store, read, &mut Connection, move |$db| $work)
    };
    ($use:ident, $store:expr, move |$db:ident| $work:expr) => {
        transaction!($use, $store, execute, &mut &mut Connection, move |$db| $work)
    };
    ($use:ident, $store:expr, $run:ident, $conn:ty, move |$db:ident| $work:expr) => {
        match &$store.database {
            Kind::Sqlite(sqlite) => {
                let run = move |conn: $conn| {
                    let $db = &mut Tx::Sqlite(conn);
                    sqlite::run($work)
                };
                sqlite.$run(run).await
            }
            Kind::Postgres(postgres) => {
                let mut tries = 0;
                loop {
                    let mut tx = postgres.begin(Use::$use).await?;
                    let $db = &mut Tx::Postgres(&mut tx);
                    let result = $work.await;
                    if let Some(ended) = tx.end(result, &mut tries).await {
                        break ended;
                    }
                }
            }
        }
    };
}

impl Store {
    /// # Errors
    ///
    /// Fails if the database cannot be used.
    pub(crate) fn open(db: &Db) -> Result<(Self, watch::Receiver<StoreStatus>), OpenError> {
        let running = Database::open(db, &sqlite::SCHEMA)?.start(Tables, Handle::current())?;
        // One process has the file: it begins with what the one before it had.
        Ok((Self::new(Kind::Sqlite(running.store), "this".into()), running.status))
    }

    pub(crate) fn of(postgres: Postgres) -> Self {
        Self::new(Kind::Postgres(postgres), Uuid::new_v4().to_string().into())
    }

    fn new(database: Kind, node: Arc<str>) -> Self {
        let max = NOTIFIER_TRANSACTION_MAX;
        let intake = Batches::new("the intake of events", 1, |(call, _): &NewCall| call.events.len(), max);
        let heads = Batches::new("the reading of heads", 1, |_| 1, max);
        let ends = Batches::new("the ends of attempts", NOTIFIER_ENDS_AT_ONCE, |_| 1, max);
        Self { database, node, hints: Arc::default(), intake, heads, ends }
    }

    /// Waits until there may be something new to deliver. Returns the endpoints that have it; `None` is each.
    pub(crate) async fn stored(&self) -> Option<BTreeSet<Arc<str>>> {
        self.hints.stored().await
    }

    /// Waits until an endpoint may have changed, or a lane by an operator.
    pub(crate) async fn changed(&self) {
        self.hints.changed.notified().await;
    }

    /// Tells this node and the others.
    fn tell(&self, tell: impl Fn(&Hints)) {
        tell(&self.hints);
        if let Kind::Postgres(postgres) = &self.database {
            tell(&postgres.told);
        }
    }

    fn tell_changed(&self) {
        self.tell(|hints| hints.changed.notify_one());
    }

    /// Passes on what other nodes tell. Runs until it is dropped.
    pub(crate) async fn run_hints(&self) {
        match &self.database {
            Kind::Sqlite(_) => std::future::pending().await,
            Kind::Postgres(postgres) => postgres.run_hints(&self.hints).await,
        }
    }

    /// Appends events to the lanes of the endpoints that want them: all or none. Returns nothing, and stores nothing, if the endpoints
    /// have changed since they were chosen.
    pub(crate) async fn add(&self, new: NewEvents, now: Stamp) -> Result<Option<Vec<Added>>, StoreFailure> {
        let store = self.clone();
        let run = move |calls: Vec<NewCall>| {
            let store = store.clone();
            async move {
                let called = calls.clone();
                let added = transaction!(Intake, store, move |db| statements::add(db, &calls))?;
                // The caller may be gone.
                let stored = called.iter().zip(&added).filter(|(_, added)| added.is_some());
                let endpoints = stored.flat_map(|((new, _), _)| new.events.iter().flat_map(|(_, endpoints)| endpoints));
                let endpoints: BTreeSet<Arc<str>> = endpoints.cloned().collect();
                store.tell(|hints| hints.tell_stored(Some(endpoints.clone())));
                Ok(added)
            }
        };
        self.intake.call((Arc::new(new), now), run).await
    }

    /// Closes the lanes of these endpoints, unless a later epoch has begun.
    pub(crate) async fn close_lanes(&self, endpoints: &str, key: &str, epoch: u32) -> Result<(), StoreFailure> {
        let (endpoints, key) = (format!("{endpoints}%"), key.to_owned());
        transaction!(Intake, self, move |db| statements::close_lanes(db, &endpoints, &key, epoch))
    }

    /// Returns what this node has, and for how long from the call on; for ever in a database of its own.
    pub(crate) async fn keep_lease(&self, let_go: Vec<Partition>) -> Result<(Lease, Option<Duration>), StoreFailure> {
        let node = Arc::clone(&self.node);
        let lease = transaction!(Lease, self, move |db| statements::keep_lease(db, &node, &let_go))?;
        let lasts = match &self.database {
            Kind::Sqlite(_) => None,
            Kind::Postgres(_) => Some(NOTIFIER_LEASE),
        };
        Ok((lease, lasts))
    }

    pub(crate) async fn end_lease(&self) -> Result<(), StoreFailure> {
        let node = Arc::clone(&self.node);
        transaction!(Lease, self, move |db| statements::end_lease(db, &node))
    }

    /// The endpoints that have waiting lanes, with the time at which the first head of each is due.
    pub(crate) async fn waiting(&self) -> Result<Vec<(String, Stamp)>, StoreFailure> {
        transaction!(Delivery, self, move |db| statements::waiting(db))
    }

    /// The due lanes of endpoints, so many at most of each.
    pub(crate) async fn due(
        &self,
        endpoints: Vec<(Arc<str>, usize)>,
        now: Stamp,
    ) -> Result<Vec<DueLanes>, StoreFailure> {
        let node = Arc::clone(&self.node);
        transaction!(Delivery, self, move |db| statements::due(db, &node, &endpoints, now))
    }

    /// The clock was set back by so much: heads that wait for a time are due earlier by it.
    pub(crate) async fn set_back(&self, by_ms: i64, now: Stamp) -> Result<(), StoreFailure> {
        let node = Arc::clone(&self.node);
        transaction!(Delivery, self, move |db| statements::set_back(db, &node, by_ms, now))
    }

    /// What the lane sends next; `None` if nothing is due, or if another node has the lane.
    pub(crate) async fn head(&self, lane: LaneId, now: Stamp) -> Result<NextHead, StoreFailure> {
        let store = self.clone();
        let run = move |asked: Vec<(LaneId, Stamp)>| {
            let (store, node) = (store.clone(), Arc::clone(&store.node));
            async move {
                let now = asked.iter().map(|(_, at)| *at).max().unwrap_or(Stamp(0));
                let lanes: Vec<_> = asked.into_iter().map(|(lane, _)| lane).collect();
                let of = lanes.clone();
                let mut heads =
                    transaction!(Heads, store, move |db| statements::heads(db, &node, of.iter().copied(), now))?;
                Ok(lanes.into_iter().map(|lane| heads.remove(&lane)).collect())
            }
        };
        self.heads.call((lane, now), run).await
    }

    /// Returns what the lane does next, with what it sends if that is due now.
    pub(crate) async fn end_attempt(&self, ended: Arc<EndedAttempt>) -> Result<LaneEnd, StoreFailure> {
        let store = self.clone();
        let run = move |ended: Vec<_>| {
            let (store, node, now) = (store.clone(), Arc::clone(&store.node), stamp());
            async move { transaction!(Delivery, store, move |db| statements::end_attempts(db, &node, &ended, now)) }
        };
        self.ends.call(ended, run).await
    }

    pub(crate) async fn set_health(&self, endpoint: &Arc<str>, health: EndpointHealth) -> Result<(), StoreFailure> {
        let endpoint = Arc::clone(endpoint);
        transaction!(Delivery, self, move |db| statements::set_health(db, &endpoint, &health))
    }

    pub(crate) async fn endpoints(&self) -> Result<StoredEndpoints, StoreFailure> {
        transaction!(Intake, self, move |db| operators::endpoints(db))
    }

    pub(crate) async fn change_endpoint(
        &self,
        endpoint: &str,
        change: EndpointChange,
        note: Option<String>,
        now: Stamp,
    ) -> Result<(), StoreFailure> {
        let endpoint = endpoint.to_owned();
        transaction!(Operators, self, move |db| operators::change_endpoint(db, &endpoint, change, note.as_deref(), now))
            .inspect(|()| self.tell_changed())
    }

    /// `None` removes an endpoint that is in no configuration; its lanes stay.
    pub(crate) async fn set_settings(&self, endpoint: &str, settings: Option<Vec<u8>>) -> Result<(), StoreFailure> {
        let endpoint = endpoint.to_owned();
        transaction!(Intake, self, move |db| operators::set_settings(db, &endpoint, settings.as_deref()))
            .inspect(|()| self.tell_changed())
    }

    /// What waits at the endpoints that have any, and the last failure of their heads.
    pub(crate) async fn counts(&self) -> Result<BTreeMap<String, (Counts, Option<LastFailure>)>, StoreFailure> {
        transaction!(Pages, self, move |db| operators::counts(db))
    }

    /// The lanes that have messages or are stopped, those with the oldest heads first; or the lanes of one key.
    pub(crate) async fn lanes(
        &self,
        endpoint: Option<String>,
        key: Option<String>,
        max: usize,
    ) -> Result<Vec<LaneRow>, StoreFailure> {
        transaction!(Pages, self, move |db| operators::lanes(db, endpoint.as_deref(), key.as_deref(), max))
    }

    /// The attempts before one, the latest first; those of a lane by its messages, the last one first.
    pub(crate) async fn attempts(
        &self,
        endpoint: Option<String>,
        lane: Option<i64>,
        before: Option<AttemptPlace>,
        max: usize,
    ) -> Result<Vec<AttemptRow>, StoreFailure> {
        transaction!(Pages, self, move |db| operators::attempts(db, endpoint.as_deref(), lane, before, max))
    }

    /// Messages, the latest event first.
    pub(crate) async fn messages(&self, filter: MessageFilter, max: usize) -> Result<MessagePage, StoreFailure> {
        transaction!(Pages, self, move |db| operators::messages(db, &filter, max))
    }

    /// One message with its data.
    pub(crate) async fn message(&self, lane: i64, position: i64) -> Result<Option<MessageRow>, StoreFailure> {
        transaction!(Pages, self, move |db| operators::message(db, lane, position))
    }

    /// Returns whether there is such a lane, whose head is that message.
    pub(crate) async fn change_lane(
        &self,
        lane: LaneId,
        change: LaneChange,
        note: Option<String>,
        now: Stamp,
    ) -> Result<bool, StoreFailure> {
        transaction!(Operators, self, move |db| operators::change_lane(db, lane, change, note.as_deref(), now))
            .inspect(|_| self.tell_changed())
    }

    /// Opens the lanes whose pause has ended. Returns when the next one ends.
    pub(crate) async fn end_pauses(&self, now: Stamp) -> Result<Option<Stamp>, StoreFailure> {
        transaction!(Delivery, self, move |db| operators::end_pauses(db, now))
    }

    /// How many messages that have ended the filter is true for. They are sent once more, each lane's in their order, unless it is a
    /// dry run. Each transaction is short; after a failure some are sent.
    pub(crate) async fn replay(&self, filter: ReplayFilter, now: Stamp) -> Result<i64, StoreFailure> {
        let (filter, mut count) = (Arc::new(filter), 0);
        let next_keys = async |after: String| {
            let of = Arc::clone(&filter);
            transaction!(Pages, self, move |db| operators::next_keys(db, &of, &after))
        };
        let mut next = match &filter.key {
            Some(key) => Some((key.clone(), key.clone())),
            None => next_keys(String::new()).await?,
        };
        while let Some(keys) = next {
            next = if filter.key.is_some() { None } else { next_keys(keys.1.clone()).await? };
            let (of, of_keys) = (Arc::clone(&filter), keys.clone());
            // Not what is added: after a lost answer it would be 0.
            count += transaction!(Pages, self, move |db| operators::count_ended(db, &of, &of_keys))?;
            if !filter.dry_run {
                let of = Arc::clone(&filter);
                transaction!(Operators, self, move |db| operators::replay(db, &of, &keys, now))?;
            }
        }
        self.tell_changed();
        Ok(count)
    }

    /// Removes some of what ended before this time, and the endpoints of this pattern that have no lane. Returns how many rows.
    pub(crate) async fn clean_up(&self, before: Stamp, targets: &str) -> Result<u64, StoreFailure> {
        let targets = targets.to_owned();
        transaction!(Operators, self, move |db| upkeep::clean_up(db, before, &targets))
    }
}
