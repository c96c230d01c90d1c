//! What the statements of the store need of a database: values, rows, and a transaction that runs one statement after another.

use std::error::Error;
use std::sync::Arc;

use rusqlite::Connection;

use super::postgres::PostgresTx;
use super::sqlite;
use journeyman_domain::staged::Stamp;
use journeyman_platform::host::clock::stamp;

/// A parameter, or a field of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Value {
    Null,
    Int(i64),
    Text(String),
    Bytes(Vec<u8>),
}

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

#[derive(Debug, thiserror::Error)]
pub(super) enum SqlError {
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
    #[error("{}", super::postgres::words(.0))]
    Postgres(#[from] tokio_postgres::Error),
    /// Nothing that this version writes.
    #[error("the database holds an unexpected value: {0}")]
    Unexpected(Box<dyn Error + Send + Sync>),
}

/// The fields of a row are taken in their order.
#[derive(Debug)]
pub(super) struct Row(std::vec::IntoIter<Value>);

impl Row {
    pub(super) fn new(fields: Vec<Value>) -> Self {
        Self(fields.into_iter())
    }

    pub(super) fn take<T: Field>(&mut self) -> Result<T, SqlError> {
        let value = self.0.next().unwrap_or(Value::Null);
        T::of(value).map_err(|value| SqlError::Unexpected(format!("a field is {}", value.kind()).into()))
    }
}

impl Value {
    /// The value itself may be secret.
    const fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Int(_) => "an integer",
            Self::Text(_) => "a text",
            Self::Bytes(_) => "bytes",
        }
    }
}

/// What a field can be read as.
pub(super) trait Field: Sized {
    fn of(value: Value) -> Result<Self, Value>;
}

impl Field for i64 {
    fn of(value: Value) -> Result<Self, Value> {
        if let Value::Int(number) = value { Ok(number) } else { Err(value) }
    }
}

impl Field for u32 {
    fn of(value: Value) -> Result<Self, Value> {
        i64::of(value).and_then(|number| Self::try_from(number).map_err(|_| Value::Int(number)))
    }
}

impl Field for Stamp {
    fn of(value: Value) -> Result<Self, Value> {
        i64::of(value).map(Self)
    }
}

impl Field for String {
    fn of(value: Value) -> Result<Self, Value> {
        match value {
            Value::Text(text) => Ok(text),
            // The bytes come from a receiver.
            Value::Bytes(bytes) => Ok(Self::from_utf8_lossy(&bytes).into_owned()),
            Value::Null | Value::Int(_) => Err(value),
        }
    }
}

impl Field for Vec<u8> {
    fn of(value: Value) -> Result<Self, Value> {
        if let Value::Bytes(bytes) = value { Ok(bytes) } else { Err(value) }
    }
}

impl<T: Field> Field for Option<T> {
    fn of(value: Value) -> Result<Self, Value> {
        if value == Value::Null { Ok(None) } else { T::of(value).map(Some) }
    }
}

macro_rules! from {
    ($($type:ty: |$from:ident| $made:expr;)*) => {
        $(impl From<$type> for Value {
            fn from($from: $type) -> Self {
                $made
            }
        })*
    };
}

from! {
    i64: |number| Self::Int(number);
    u32: |number| Self::Int(number.into());
    usize: |number| Self::Int(i64::try_from(number).unwrap_or(i64::MAX));
    Stamp: |at| Self::Int(at.0);
    &str: |text| Self::Text(text.to_owned());
    &String: |text| Self::Text(text.clone());
    &Arc<str>: |text| Self::Text((**text).to_owned());
    &[u8]: |bytes| Self::Bytes(bytes.to_vec());
}

impl<T: Into<Self>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

/// The parameters of a statement.
macro_rules! values {
    ($($value:expr),* $(,)?) => { &[$($crate::notifier::store::sql::Value::from($value)),*] };
}
pub(super) use values;

/// Reads a row as a struct, in the order of these fields.
macro_rules! read {
    ($type:ident => $($field:ident),*) => {
        |mut row: $crate::notifier::store::sql::Row| {
            Ok::<_, $crate::notifier::store::sql::SqlError>($type { $($field: row.take()?),* })
        }
    };
}
pub(super) use read;
