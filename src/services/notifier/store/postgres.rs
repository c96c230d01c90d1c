//! The store in PostgreSQL, for several nodes: a pool of connections, and one that listens for what other nodes have stored.

use std::collections::BTreeSet;
use std::path::Path;
use std::str::FromStr as _;
use std::sync::Arc;

use deadpool_postgres::{Manager, Object, Pool, PoolError, Runtime};
use futures_util::future::poll_fn;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_postgres::config::SslMode;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::private::BytesMut;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, accepts, to_sql_checked};
use tokio_postgres::{AsyncMessage, Config};
use tokio_postgres_rustls::MakeRustlsConnect;
use uuid::Uuid;

use super::sql::{Row, SqlError, StoreFailure, Value, words};
use journeyman_domain::limits::{
    POSTGRES_DELIVERY_CONNECTIONS, POSTGRES_HINT_RETRY, POSTGRES_IDLE_TRANSACTION_TIMEOUT, POSTGRES_INTAKE_CONNECTIONS,
    POSTGRES_PAGE_CONNECTIONS, POSTGRES_STATEMENT_TIMEOUT, POSTGRES_TRIES_MAX, POSTGRES_WAIT_TIMEOUT,
};
use journeyman_domain::staged::Stamp;
use journeyman_platform::host::tls_config::{InvalidTls, client_config};

const FORMAT: i64 = 2;
/// Of the locks that nodes take for the schema and for their leases.
const LOCK: i64 = 0x6a72_6e6e;

/// Why PostgreSQL cannot be used. Holds no credential.
#[derive(Debug, thiserror::Error)]
pub enum PostgresError {
    #[error("the URL is no URL of PostgreSQL such as postgres://user:password@host/database: {0}")]
    Url(String),
    #[error(transparent)]
    Tls(#[from] InvalidTls),
    #[error("cannot use the database: {0}")]
    Unusable(String),
    #[error(
        "the tables of schema {SCHEMA} have version {found}, but this version of journeyman needs {FORMAT}; use the version that wrote them"
    )]
    Format { found: i64 },
}

/// A batch is small, whatever the planner thinks of a table that was empty when it planned, or of an array.
const BY_INDEX: &str = " -c enable_seqscan=off -c enable_hashjoin=off -c enable_mergejoin=off -c jit=off";

/// Channels of hints.
const STORED: &str = "journeyman_notifier_stored";
const CHANGED: &str = "journeyman_notifier_changed";
/// Holds the tables of the notifier.
const SCHEMA: &str = "journeyman_notifier";

/// The bytes of one hint; PostgreSQL takes less than 8,000.
const HINT_BYTES_MAX: usize = 7_000;

/// What the engine has to look at.
#[derive(Default)]
pub(super) struct Hints {
    /// The endpoints that have new messages; `None` if there may be some of each.
    stored_for: Mutex<Option<BTreeSet<Arc<str>>>>,
    is_stored: Notify,
    /// Endpoints and lanes.
    pub(super) changed: Notify,
}

impl Hints {
    /// `None` is each endpoint.
    pub(super) fn tell_stored(&self, endpoints: Option<BTreeSet<Arc<str>>>) {
        let mut stored_for = self.stored_for.lock();
        *stored_for = endpoints.zip(stored_for.take()).map(|(mut one, other)| {
            one.extend(other);
            one
        });
        self.is_stored.notify_one();
    }

    /// Waits for new messages. Returns their endpoints; `None` is each.
    pub(super) async fn stored(&self) -> Option<BTreeSet<Arc<str>>> {
        loop {
            self.is_stored.notified().await;
            let told = self.stored_for.lock().replace(BTreeSet::new());
            // The notification before this one may have brought them.
            if told.as_ref().is_none_or(|endpoints| !endpoints.is_empty()) {
                return told;
            }
        }
    }
}

/// Each use has connections of its own, so that none waits for the others.
#[derive(Debug, Clone, Copy)]
pub(super) enum Use {
    Lease,
    /// The heads of lanes, and what their attempts have brought.
    Delivery,
    Intake,
    /// What operators change, on the connections of the intake.
    Operators,
    /// What operators read, however long it takes.
    Pages,
    /// The heads of lanes, read by one statement.
    Heads,
}

/// Connections to a database.
#[derive(Clone)]
pub(crate) struct PostgresPool {
    pool: Pool,
    config: Arc<Config>,
    tls: MakeRustlsConnect,
}

#[derive(Clone)]
pub(crate) struct Postgres {
    leases: PostgresPool,
    deliveries: PostgresPool,
    intake: PostgresPool,
    pages: PostgresPool,
    /// What other nodes have to look at. They would find it without a word, a little later.
    pub(super) told: Arc<Hints>,
}

impl PostgresPool {
    /// Connects later, with these options of the server.
    ///
    /// # Errors
    ///
    /// Fails if the URL or the certificates cannot be used.
    pub(crate) fn new(url: &str, ca: Option<&Path>, options: &str, size: usize) -> Result<Self, PostgresError> {
        // The error of the parser may quote the URL.
        let invalid =
            |_| PostgresError::Url("see https://www.postgresql.org/docs/current/libpq-connect.html".to_owned());
        let mut config = Config::from_str(url).map_err(invalid)?;
        let options = format!(
            "{} {options} -c idle_in_transaction_session_timeout={} -c statement_timeout={}",
            config.get_options().unwrap_or_default(),
            POSTGRES_IDLE_TRANSACTION_TIMEOUT.as_millis(),
            POSTGRES_STATEMENT_TIMEOUT.as_millis(),
        );
        config.options(options).application_name("journeyman notifier").connect_timeout(POSTGRES_WAIT_TIMEOUT);
        config.tcp_user_timeout(POSTGRES_STATEMENT_TIMEOUT).keepalives_idle(POSTGRES_STATEMENT_TIMEOUT);
        if ca.is_some() {
            config.ssl_mode(SslMode::Require);
        }
        let tls = MakeRustlsConnect::new(client_config(ca, None)?);
        let manager = Manager::new(config.clone(), tls.clone());
        let pool = Pool::builder(manager)
            .max_size(size)
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(POSTGRES_WAIT_TIMEOUT))
            .create_timeout(Some(POSTGRES_WAIT_TIMEOUT))
            .build()
            .map_err(|error| PostgresError::Unusable(error.to_string()))?;
        Ok(Self { pool, config: Arc::new(config), tls })
    }

    /// # Errors
    ///
    /// Why there is no connection, in words without a credential.
    pub(crate) async fn get(&self) -> Result<Object, String> {
        let words = |error| if let PoolError::Backend(error) = &error { words(error) } else { error.to_string() };
        self.pool.get().await.map_err(words)
    }
}

impl Postgres {
    /// Connects, and creates what is missing of the tables.
    ///
    /// # Errors
    ///
    /// Fails if the URL, the certificates or the database cannot be used.
    pub(crate) async fn open(url: &str, ca: Option<&Path>) -> Result<Self, PostgresError> {
        let pool = |size, more| PostgresPool::new(url, ca, &format!("-c search_path={SCHEMA}{more}"), size);
        let (leases, pages) = (pool(1, "")?, pool(POSTGRES_PAGE_CONNECTIONS, "")?);
        let (intake, deliveries) =
            (pool(POSTGRES_INTAKE_CONNECTIONS, BY_INDEX)?, pool(POSTGRES_DELIVERY_CONNECTIONS, BY_INDEX)?);
        let postgres = Self { leases, deliveries, intake, pages, told: Arc::default() };
        postgres.create_tables().await?;
        Ok(postgres)
    }

    async fn create_tables(&self) -> Result<(), PostgresError> {
        let mut client = self.leases.get().await.map_err(PostgresError::Unusable)?;
        let failed = |error| PostgresError::Unusable(words(&error));
        let tx = client.transaction().await.map_err(failed)?;
        tx.execute("SELECT pg_advisory_xact_lock($1)", &[&LOCK]).await.map_err(failed)?;
        let exists: bool = tx
            .query_one("SELECT to_regclass($1) IS NOT NULL", &[&format!("{SCHEMA}.format")])
            .await
            .and_then(|row| row.try_get(0))
            .map_err(failed)?;
        if exists {
            let row = tx.query_one("SELECT version FROM format", &[]).await.map_err(failed)?;
            let found = row.try_get(0).map_err(failed)?;
            return if found == FORMAT { Ok(()) } else { Err(PostgresError::Format { found }) };
        }
        let create = format!(
            "CREATE SCHEMA IF NOT EXISTS {SCHEMA}; CREATE TABLE format (version BIGINT NOT NULL);
             INSERT INTO format VALUES ({FORMAT}); {}",
            tables(include_str!("schema.sql"))
        );
        tx.batch_execute(&create).await.map_err(failed)?;
        tx.commit().await.map_err(failed)
    }

    pub(super) async fn begin(&self, of: Use) -> Result<PostgresTx, StoreFailure> {
        let pool = match of {
            Use::Lease => &self.leases,
            Use::Delivery | Use::Heads => &self.deliveries,
            Use::Intake | Use::Operators => &self.intake,
            Use::Pages => &self.pages,
        };
        let client = pool.get().await.map_err(StoreFailure::Unusable)?;
        let stage = if matches!(of, Use::Heads) { Stage::Single } else { Stage::New };
        Ok(PostgresTx { client: Some(client), stage: Mutex::new(stage) })
    }

    /// Passes on what other nodes tell, until the caller drops it.
    pub(super) async fn run_hints(&self, hints: &Hints) {
        loop {
            if let Err(error) = self.exchange_hints(hints).await {
                tracing::debug!("no hints from other nodes for a while: {}", words(&error));
            }
            tokio::time::sleep(POSTGRES_HINT_RETRY).await;
        }
    }

    async fn exchange_hints(&self, hints: &Hints) -> Result<(), tokio_postgres::Error> {
        let (client, mut connection) = self.leases.config.connect(self.leases.tls.clone()).await?;
        let listening = async {
            while let Some(message) = poll_fn(|context| connection.poll_message(context)).await {
                if let AsyncMessage::Notification(hint) = message? {
                    let names = Some(hint.payload()).filter(|names| !names.is_empty());
                    match hint.channel() {
                        CHANGED => hints.changed.notify_one(),
                        _ => hints.tell_stored(names.map(|names| names.split('\n').map(Arc::from).collect())),
                    }
                }
            }
            Ok(())
        };
        let telling = async {
            client.batch_execute(&format!("LISTEN {STORED}; LISTEN {CHANGED}")).await?;
            // What was told before is not known, neither here nor by the others.
            self.told.tell_stored(None);
            self.told.changed.notify_one();
            loop {
                let (channel, names) = tokio::select! {
                    endpoints = self.told.stored() => {
                        let names = Vec::from_iter(endpoints.unwrap_or_default()).join("\n");
                        (STORED, Some(names).filter(|names| names.len() <= HINT_BYTES_MAX).unwrap_or_default())
                    }
                    () = self.told.changed.notified() => (CHANGED, String::new()),
                };
                client.execute("SELECT pg_notify($1, $2)", &[&channel, &names]).await?;
            }
        };
        tokio::select! {
            ended = listening => ended,
            ended = telling => ended,
        }
    }
}

/// The statements of SQLite, with the types of PostgreSQL.
fn tables(statements: &str) -> String {
    statements
        .replace("INTEGER PRIMARY KEY", "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY")
        .replace("INTEGER", "BIGINT")
        .replace("BLOB", "BYTEA")
        // It would lock the lane and the event of each message once more.
        .replace(" REFERENCES lane", "")
        .replace(" REFERENCES event", "")
        .replace(") STRICT, WITHOUT ROWID;", ");")
        .replace(") STRICT;", ");")
}

/// A transaction. If it is dropped before it has ended, its connection is closed, and the server rolls it back.
pub(super) struct PostgresTx {
    client: Option<Object>,
    stage: Mutex<Stage>,
}

#[derive(PartialEq, Eq)]
enum Stage {
    /// It begins with its first statement.
    New,
    Begun,
    /// A single statement is a transaction by itself.
    Single,
}

impl Drop for PostgresTx {
    fn drop(&mut self) {
        if let Some(client) = self.client.take() {
            drop(Object::take(client));
        }
    }
}

impl PostgresTx {
    /// Commits, or rolls back. Returns nothing if the transaction is to be tried again: another one was in its way, or the
    /// connection was lost, perhaps after the commit, so that what runs in a transaction must be able to run twice.
    pub(super) async fn end<T>(
        mut self,
        result: Result<T, SqlError>,
        tries: &mut usize,
    ) -> Option<Result<T, StoreFailure>> {
        *tries += 1;
        let ended = match &result {
            Ok(_) => self.run_last("COMMIT").await,
            // Its connection is closed: a session that may not write never may, and the next one may again.
            Err(SqlError::Postgres(error)) if error.code() == Some(&SqlState::READ_ONLY_SQL_TRANSACTION) => Ok(()),
            Err(_) => self.run_last("ROLLBACK").await,
        };
        let error = match (result, ended) {
            (Ok(done), Ok(())) => return Some(Ok(done)),
            (Err(error), _) | (Ok(_), Err(error)) => error,
        };
        if may_pass(&error) && *tries < POSTGRES_TRIES_MAX { None } else { Some(Err(failure(&error))) }
    }

    async fn run_last(&mut self, statement: &str) -> Result<(), SqlError> {
        if let Some(client) = self.client.as_ref().filter(|_| *self.stage.lock() == Stage::Begun) {
            client.batch_execute(statement).await?;
        }
        // Back to the pool.
        drop(self.client.take());
        Ok(())
    }

    /// Sends the beginning of the transaction before the first statement, and does not wait for it.
    async fn run<T>(
        &self,
        sql: &'static str,
        run: impl AsyncFnOnce(&Object, &tokio_postgres::Statement) -> Result<T, tokio_postgres::Error>,
    ) -> Result<T, SqlError> {
        let Some(client) = &self.client else { return Err(SqlError::Unexpected("the transaction has ended".into())) };
        let statement = client.prepare_cached(sql).await?;
        let begins = {
            let mut stage = self.stage.lock();
            let begins = *stage == Stage::New;
            if begins {
                *stage = Stage::Begun;
            }
            begins
        };
        let begin = async { if begins { client.batch_execute("BEGIN").await } else { Ok(()) } };
        let (begun, done) = tokio::join!(biased; begin, run(client, &statement));
        begun?;
        Ok(done?)
    }

    pub(super) async fn query(&self, sql: &'static str, values: &[Value]) -> Result<Vec<Row>, SqlError> {
        let parameters: Vec<_> = values.iter().map(|value| value as &(dyn ToSql + Sync)).collect();
        self.query_with(sql, &parameters).await
    }

    /// Gives the statement an array for each column of these rows.
    pub(super) async fn query_rows(&self, sql: &'static str, given: &[Vec<Value>]) -> Result<Vec<Row>, SqlError> {
        let Some(count) = given.first().map(Vec::len) else { return Ok(Vec::new()) };
        let column = |index| given.iter().filter_map(|row| row.get(index)).collect();
        let columns: Vec<Vec<&Value>> = (0..count).map(column).collect();
        let parameters: Vec<_> = columns.iter().map(|column| column as &(dyn ToSql + Sync)).collect();
        self.query_with(sql, &parameters).await
    }

    async fn query_with(&self, sql: &'static str, parameters: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, SqlError> {
        let rows = self.run(sql, async |client, statement| client.query(statement, parameters).await).await?;
        let read = |row: &tokio_postgres::Row| {
            let fields: Result<Vec<Value>, _> = (0..row.len()).map(|index| row.try_get(index)).collect();
            fields.map(Row::new)
        };
        Ok(rows.iter().map(read).collect::<Result<_, tokio_postgres::Error>>()?)
    }

    pub(super) async fn execute(&mut self, sql: &'static str, values: &[Value]) -> Result<u64, SqlError> {
        let parameters: Vec<_> = values.iter().map(|value| value as &(dyn ToSql + Sync)).collect();
        self.run(sql, async |client, statement| client.execute(statement, &parameters).await).await
    }

    pub(super) async fn lock_leases(&mut self) -> Result<(), SqlError> {
        self.query("SELECT 1 FROM pg_advisory_xact_lock($1)", &[Value::Int(LOCK)]).await.map(drop)
    }

    pub(super) async fn lock_lanes(&mut self, lanes: &Vec<i64>) -> Result<(), SqlError> {
        let lock =
            "SELECT 1 FROM lane WHERE id = ANY($1) ORDER BY key COLLATE \"C\", endpoint COLLATE \"C\" FOR UPDATE";
        self.query_with(lock, &[lanes]).await.map(drop)
    }

    /// The clock of the server, which the nodes share.
    pub(super) async fn now(&mut self) -> Result<Stamp, SqlError> {
        let rows = self.query("SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)", &[]).await?;
        rows.into_iter().next().ok_or_else(|| SqlError::Unexpected("no time".into()))?.take()
    }
}

fn failure(error: &SqlError) -> StoreFailure {
    let incident = Uuid::new_v4();
    tracing::error!(%error, %incident, "database operation failed");
    match error {
        SqlError::Postgres(full) if full.code() == Some(&SqlState::DISK_FULL) => StoreFailure::DiskFull,
        SqlError::Postgres(error) if !is_of_data(error) => StoreFailure::Unusable(words(error)),
        SqlError::Postgres(_) | SqlError::Sqlite(_) | SqlError::Unexpected(_) => StoreFailure::Failed(incident),
    }
}

/// The classes of invalid data and of violated constraints.
fn is_of_data(error: &tokio_postgres::Error) -> bool {
    error.code().is_some_and(|code| ["22", "23"].iter().any(|class| code.code().starts_with(class)))
}

fn may_pass(error: &SqlError) -> bool {
    let SqlError::Postgres(error) = error else { return false };
    error.code().is_none_or(|code| {
        [
            SqlState::T_R_SERIALIZATION_FAILURE,
            SqlState::T_R_DEADLOCK_DETECTED,
            SqlState::ADMIN_SHUTDOWN,
            SqlState::CRASH_SHUTDOWN,
            SqlState::CANNOT_CONNECT_NOW,
        ]
        .contains(code)
    })
}

impl ToSql for Value {
    fn to_sql(&self, r#type: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        match self {
            Self::Null => Ok(IsNull::Yes),
            Self::Int(number) => number.to_sql_checked(r#type, out),
            Self::Text(text) => text.to_sql_checked(r#type, out),
            Self::Bytes(bytes) => bytes.to_sql_checked(r#type, out),
        }
    }

    accepts!(INT8, TEXT, BYTEA);

    to_sql_checked!();
}

impl<'a> FromSql<'a> for Value {
    fn from_sql(r#type: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        match *r#type {
            Type::INT8 => i64::from_sql(r#type, raw).map(Self::Int),
            Type::INT4 => i32::from_sql(r#type, raw).map(|number| Self::Int(number.into())),
            Type::BYTEA => <&[u8]>::from_sql(r#type, raw).map(Self::from),
            _ => <&str>::from_sql(r#type, raw).map(Self::from),
        }
    }

    fn from_sql_null(_: &Type) -> Result<Self, Box<dyn std::error::Error + Sync + Send>> {
        Ok(Self::Null)
    }

    accepts!(INT8, INT4, TEXT, BYTEA);
}
