//! The store in SQLite: the thread that owns the database runs each transaction to its end.

use futures_util::FutureExt as _;
use rusqlite::types::{ToSqlOutput, ValueRef};
use rusqlite::{CachedStatement, Connection, ErrorCode, ToSql};
use uuid::Uuid;

use super::sql::{Row, SqlError, StoreFailure, Value};
use journeyman_platform::sqlite::{JobError, Owner, Schema};

pub(super) const SCHEMA: Schema = Schema {
    // `jrnn`.
    application_id: 0x6a72_6e6e,
    format: 2,
    sql: include_str!("schema.sql"),
    owner: "notifier",
    key: "notifier.db",
};

#[derive(Debug)]
pub(super) struct Tables;

impl Owner for Tables {
    type Tx<'a> = &'a mut Connection;
    type Error = StoreFailure;
    type Effects = ();

    fn store_error(cause: Option<&rusqlite::Error>, incident: Uuid) -> StoreFailure {
        let Some(cause) = cause else {
            return StoreFailure::Unusable("its thread or its transaction has ended".into());
        };
        match cause.sqlite_error_code() {
            Some(ErrorCode::DiskFull) => StoreFailure::DiskFull,
            None | Some(ErrorCode::ConstraintViolation | ErrorCode::TooBig | ErrorCode::TypeMismatch) => {
                StoreFailure::Failed(incident)
            }
            Some(_) => StoreFailure::Unusable(cause.to_string()),
        }
    }

    fn begin<'a>(&'a self, conn: &'a mut Connection) -> &'a mut Connection {
        conn
    }

    fn end(_: &mut Connection) {}
}

fn prepare<'a>(conn: &'a Connection, sql: &str, values: &[Value]) -> Result<CachedStatement<'a>, SqlError> {
    // SQLite takes `$1` for a name.
    let mut statement = conn.prepare_cached(&sql.replace('$', "?"))?;
    for (index, value) in values.iter().enumerate() {
        statement.raw_bind_parameter(index + 1, value)?;
    }
    Ok(statement)
}

pub(super) fn query(conn: &Connection, sql: &str, values: &[Value]) -> Result<Vec<Row>, SqlError> {
    let mut statement = prepare(conn, sql, values)?;
    let columns = statement.column_count();
    let mut rows = statement.raw_query();
    let mut all = Vec::new();
    while let Some(row) = rows.next()? {
        let fields = (0..columns).map(|index| row.get_ref(index).map(value_of));
        all.push(Row::new(fields.collect::<rusqlite::Result<_>>()?));
    }
    Ok(all)
}

pub(super) fn execute(conn: &Connection, sql: &str, values: &[Value]) -> Result<u64, SqlError> {
    let changed = prepare(conn, sql, values)?.raw_execute()?;
    Ok(u64::try_from(changed).unwrap_or(u64::MAX))
}

impl ToSql for Value {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Borrowed(match self {
            Self::Null => ValueRef::Null,
            Self::Int(number) => ValueRef::Integer(*number),
            Self::Text(text) => ValueRef::Text(text.as_bytes()),
            Self::Bytes(bytes) => ValueRef::Blob(bytes),
        }))
    }
}

fn value_of(value: ValueRef<'_>) -> Value {
    match value {
        ValueRef::Null => Value::Null,
        ValueRef::Integer(number) => Value::Int(number),
        // The schema has no such column.
        ValueRef::Real(number) => Value::Text(number.to_string()),
        ValueRef::Text(text) => Value::Text(String::from_utf8_lossy(text).into_owned()),
        ValueRef::Blob(bytes) => Value::Bytes(bytes.to_vec()),
    }
}

impl From<SqlError> for JobError<StoreFailure> {
    fn from(error: SqlError) -> Self {
        Self::Sql(if let SqlError::Sqlite(error) = error {
            error
        } else {
            rusqlite::Error::ToSqlConversionFailure(Box::new(error))
        })
    }
}

/// Runs work that never waits, because each statement has ended when it returns.
pub(super) fn run<T>(work: impl Future<Output = Result<T, SqlError>>) -> Result<T, JobError<StoreFailure>> {
    let done = work.now_or_never();
    Ok(done.unwrap_or_else(|| Err(SqlError::Unexpected("a statement waits".into())))?)
}
