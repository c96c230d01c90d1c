//! What the statements of the store need of a database: values, rows, and a transaction that runs one statement after another.

use std::error::Error;
use std::sync::Arc;

use crate::domain::staged::Stamp;

/// A parameter, or a field of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Value {
    Null,
    Int(i64),
    Text(String),
    Bytes(Vec<u8>),
}

/// One transaction. Statements run on SQLite and PostgreSQL alike; their parameters are `$1`, `$2` and so on.
pub(super) trait Sql {
    /// Returns the rows of the statement.
    async fn query(&mut self, sql: &'static str, values: &[Value]) -> Result<Vec<Row>, SqlError>;

    /// Returns how many rows the statement has changed.
    async fn execute(&mut self, sql: &'static str, values: &[Value]) -> Result<u64, SqlError>;

    async fn first(&mut self, sql: &'static str, values: &[Value]) -> Result<Option<Row>, SqlError> {
        Ok(self.query(sql, values).await?.into_iter().next())
    }

    /// Until the end of the transaction, so that nodes renew their leases one after another.
    async fn lock_leases(&mut self) -> Result<(), SqlError>;

    async fn now(&mut self) -> Result<Stamp, SqlError>;
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
        if let Value::Text(text) = value { Ok(text) } else { Err(value) }
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

impl From<i64> for Value {
    fn from(number: i64) -> Self {
        Self::Int(number)
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        Self::Int(number.into())
    }
}

impl From<usize> for Value {
    fn from(number: usize) -> Self {
        Self::Int(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl From<Stamp> for Value {
    fn from(at: Stamp) -> Self {
        Self::Int(at.0)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<&String> for Value {
    fn from(text: &String) -> Self {
        Self::Text(text.clone())
    }
}

impl From<&Arc<str>> for Value {
    fn from(text: &Arc<str>) -> Self {
        Self::Text((**text).to_owned())
    }
}

impl From<&[u8]> for Value {
    fn from(bytes: &[u8]) -> Self {
        Self::Bytes(bytes.to_vec())
    }
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
