//! What the statements of the store need of a database: values, rows and errors.

use std::error::Error;
use std::sync::Arc;

use uuid::Uuid;

use journeyman_domain::staged::Stamp;
use journeyman_platform::http::client::{root_cause, tls_hint};

/// A parameter, or a field of a row.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Value {
    Null,
    Int(i64),
    Text(String),
    Bytes(Vec<u8>),
}

/// Why nothing was stored or read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreFailure {
    #[error("disk full: the notifier cannot write its database")]
    DiskFull,
    /// Nothing was stored.
    #[error("the endpoint {0} was removed or changed at the same time; try again")]
    Changed(String),
    /// Nothing else is stored either.
    #[error("the database cannot be used: {0}")]
    Unusable(String),
    /// What was to be stored is at fault.
    #[error("the database failed; the log has the reason under {0}")]
    Failed(Uuid),
}

#[derive(Debug, thiserror::Error)]
pub(super) enum SqlError {
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
    #[error("{}", words(.0))]
    Postgres(#[from] tokio_postgres::Error),
    /// Nothing that this version writes.
    #[error("the database holds an unexpected value: {0}")]
    Unexpected(Box<dyn Error + Send + Sync>),
}

/// The words of an error, without the values that it is about.
pub(crate) fn words(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        Some(reported) => format!("{} ({})", reported.message(), reported.code().code()),
        None => {
            let cause = root_cause(error);
            format!("{cause}{}", tls_hint(&cause))
        }
    }
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

/// A statement over the rows `given`, whose columns are `c1`, `c2` and so on: for one of them in SQLite, and for all in PostgreSQL.
pub(super) struct ForRows {
    pub(super) one: &'static str,
    pub(super) all: &'static str,
}

/// The statement before the rows, the types of their columns, and the statement after them.
macro_rules! for_rows {
    ($before:literal, [$first:literal $first_type:literal $(, $number:literal $type:literal)*], $after:literal) => {
        $crate::notifier::store::sql::ForRows {
            one: concat!($before, " (SELECT ?", $first, " AS c", $first $(, ", ?", $number, " AS c", $number)*, ") AS given ", $after),
            all: concat!(
                $before, " unnest($", $first, "::", $first_type, "[]" $(, ", $", $number, "::", $type, "[]")*,
                ") AS given (c", $first $(, ", c", $number)*, ") ", $after
            ),
        }
    };
}
pub(super) use for_rows;

/// The parameters of a statement.
macro_rules! values {
    ($($value:expr),* $(,)?) => { &[$($crate::notifier::store::sql::Value::from($value)),*] };
}
pub(super) use values;

/// The parameters of a statement that are put together, or a row that it is given.
macro_rules! parameters {
    ($($value:expr),* $(,)?) => { vec![$($crate::notifier::store::sql::Value::from($value)),*] };
}
pub(super) use parameters;

/// Reads a row as a struct, in the order of these fields.
macro_rules! read {
    ($type:ident => $($field:ident),*) => {
        |mut row: $crate::notifier::store::sql::Row| {
            Ok::<_, $crate::notifier::store::sql::SqlError>($type { $($field: row.take()?),* })
        }
    };
}
pub(super) use read;
