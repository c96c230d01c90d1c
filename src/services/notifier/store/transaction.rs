//! A transaction of either database, in which statements run one after another.

use rusqlite::Connection;

use super::postgres::PostgresTx;
use super::sql::{Row, SqlError, Value};
use super::sqlite;
use journeyman_domain::staged::Stamp;
use journeyman_platform::host::clock::stamp;

/// One transaction. Statements run on SQLite and PostgreSQL alike; their parameters are `$1`, `$2` and so on.
/// One type serves both, so that each statement is compiled once.
pub(super) enum Tx<'a> {
    /// Exclusive, because a shared connection of SQLite is not `Send`.
    Sqlite(&'a mut Connection),
    Postgres(&'a mut PostgresTx),
}

impl Tx<'_> {
    /// Returns the rows of the statement.
    pub(super) async fn query(&mut self, sql: &'static str, values: &[Value]) -> Result<Vec<Row>, SqlError> {
        match self {
            Self::Sqlite(conn) => sqlite::query(conn, sql, values),
            Self::Postgres(tx) => tx.query(sql, values).await,
        }
    }

    /// Runs a statement once for each of these parameters, in their order. PostgreSQL has them all before it answers the first.
    pub(super) async fn query_each(
        &mut self,
        sql: &'static str,
        values: &[Vec<Value>],
    ) -> Result<Vec<Vec<Row>>, SqlError> {
        match self {
            Self::Sqlite(conn) => values.iter().map(|values| sqlite::query(conn, sql, values)).collect(),
            Self::Postgres(tx) => tx.query_each(sql, values).await,
        }
    }

    /// Returns how many rows the statement has changed.
    pub(super) async fn execute(&mut self, sql: &'static str, values: &[Value]) -> Result<u64, SqlError> {
        match self {
            Self::Sqlite(conn) => sqlite::execute(conn, sql, values),
            Self::Postgres(tx) => tx.execute(sql, values).await,
        }
    }

    pub(super) async fn first(&mut self, sql: &'static str, values: &[Value]) -> Result<Option<Row>, SqlError> {
        Ok(self.query(sql, values).await?.into_iter().next())
    }

    /// Until the end of the transaction, so that nodes renew their leases one after another.
    pub(super) async fn lock_leases(&mut self) -> Result<(), SqlError> {
        match self {
            // There is one writer.
            Self::Sqlite(_) => Ok(()),
            Self::Postgres(tx) => tx.lock_leases().await,
        }
    }

    pub(super) async fn now(&mut self) -> Result<Stamp, SqlError> {
        match self {
            Self::Sqlite(_) => Ok(stamp()),
            Self::Postgres(tx) => tx.now().await,
        }
    }
}
