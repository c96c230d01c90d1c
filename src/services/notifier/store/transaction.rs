//! A transaction of either database, in which statements run one after another.

use futures_util::future::join_all;
use rusqlite::Connection;

use super::postgres::PostgresTx;
use super::sql::{ForRows, Row, SqlError, Value};
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

    /// Runs a statement over these rows, of which no two may be about the same. Returns the rows of all, in any order.
    pub(super) async fn query_rows(&mut self, sql: &ForRows, given: &[Vec<Value>]) -> Result<Vec<Row>, SqlError> {
        match self {
            Self::Sqlite(conn) => {
                let rows = given.iter().map(|values| sqlite::query(conn, sql.one, values));
                Ok(rows.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect())
            }
            Self::Postgres(tx) => tx.query_rows(sql.all, given).await,
        }
    }

    /// Runs statements that do not concern each other, as [`Tx::query_rows`] does. PostgreSQL has them all before it answers the first.
    pub(super) async fn query_each<const N: usize>(
        &mut self,
        each: [(&ForRows, &Vec<Vec<Value>>); N],
    ) -> Result<[Vec<Row>; N], SqlError> {
        let mut all = [const { Vec::new() }; N];
        if let Self::Postgres(tx) = self {
            let queries = each.map(|(sql, given)| tx.query_rows(sql.all, given));
            // The first failure is the reason of those after it.
            for (rows, queried) in all.iter_mut().zip(join_all(queries).await) {
                *rows = queried?;
            }
        } else {
            for (rows, (sql, given)) in all.iter_mut().zip(each) {
                *rows = self.query_rows(sql, given).await?;
            }
        }
        Ok(all)
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

    /// Locks lanes until the end of the transaction, in the order in which each transaction does.
    pub(super) async fn lock_lanes(&mut self, lanes: Vec<i64>) -> Result<(), SqlError> {
        match self {
            Self::Sqlite(_) => Ok(()),
            Self::Postgres(tx) => tx.lock_lanes(&lanes).await,
        }
    }

    pub(super) async fn now(&mut self) -> Result<Stamp, SqlError> {
        match self {
            Self::Sqlite(_) => Ok(stamp()),
            Self::Postgres(tx) => tx.now().await,
        }
    }
}
