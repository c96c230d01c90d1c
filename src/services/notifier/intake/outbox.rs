//! Takes events from a table in the PostgreSQL of an application, which writes them in its own transactions.
//!
//! One notifier at a time has a batch. A row goes once its event is on disk; one that comes again after a crash is a duplicate.

use std::path::Path;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::{Intake, parse_events};
use crate::notifier::store::{PostgresError, PostgresPool, postgres_words};
use journeyman_domain::limits::{NOTIFIER_BODY_BYTES_MAX, NOTIFIER_OUTBOX_INTERVAL, NOTIFIER_OUTBOX_ROWS};
use journeyman_platform::retry::retry_sessions;

/// The number of the lock that makes one notifier wait for another.
const LOCK: i64 = 0x6a72_6f62;

#[derive(Clone)]
pub struct Outbox {
    pool: PostgresPool,
    pub table: String,
}

impl Outbox {
    /// # Errors
    ///
    /// If the URL, the certificates or the name of the table cannot be used.
    pub fn new(url: &str, ca: Option<&Path>, table: &str) -> Result<Self, PostgresError> {
        let is_word = |part: &str| part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if table.is_empty() || table.split('.').count() > 2 || !table.split('.').all(is_word) {
            return Err(PostgresError::Unusable("a table's name has letters, digits and `_`".to_owned()));
        }
        Ok(Self { pool: PostgresPool::new(url, ca, "", 1)?, table: table.to_owned() })
    }

    /// Makes the table if it is missing.
    ///
    /// # Errors
    ///
    /// What the database or the user does not allow.
    pub async fn set_up(&self) -> Result<(), String> {
        let create = format!(
            "CREATE TABLE IF NOT EXISTS {} (id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, event TEXT NOT NULL, error TEXT)",
            self.table
        );
        self.pool.get().await?.batch_execute(&create).await.map_err(|error| postgres_words(&error))
    }

    /// Takes events until `stop`. After an error it connects again.
    pub(in crate::notifier) async fn run(self, intake: Arc<Intake>, stop: CancellationToken) {
        let what = format!("cannot take events from the table {}", self.table);
        retry_sessions(&what, &stop, async || {
            while !stop.is_cancelled() {
                if self.take(&intake).await? < NOTIFIER_OUTBOX_ROWS {
                    stop.run_until_cancelled(tokio::time::sleep(NOTIFIER_OUTBOX_INTERVAL)).await;
                }
            }
            Ok(())
        })
        .await;
    }

    /// Returns how many rows it found.
    async fn take(&self, intake: &Intake) -> Result<usize, String> {
        let words = |error| postgres_words(&error);
        let mut client = self.pool.get().await?;
        let tx = client.transaction().await.map_err(words)?;
        tx.execute("SELECT pg_advisory_xact_lock($1)", &[&LOCK]).await.map_err(words)?;
        let table = &self.table;
        let select = format!(
            "SELECT id, left(CAST(event AS TEXT), {NOTIFIER_BODY_BYTES_MAX} + 1) FROM {table}
             WHERE error IS NULL ORDER BY id LIMIT {NOTIFIER_OUTBOX_ROWS}"
        );
        let rows = tx.query(&select, &[]).await.map_err(words)?;
        let (mut events, mut done): (Vec<_>, Vec<i64>) = (Vec::new(), Vec::new());
        for row in &rows {
            let (id, event): (i64, &str) = (row.try_get(0).map_err(words)?, row.try_get(1).map_err(words)?);
            match parse_events(event.as_bytes()) {
                Ok(parsed) => {
                    events.extend(parsed);
                    done.push(id);
                }
                Err(why) => {
                    intake.counters.on_refused("outbox");
                    tracing::warn!(table, id, "a row is no event, so it stays with this as its `error`: {why}");
                    let refuse = format!("UPDATE {table} SET error = $2 WHERE id = $1");
                    tx.execute(&refuse, &[&id, &why]).await.map_err(words)?;
                }
            }
        }
        intake.take("outbox", events).await.map_err(|error| error.to_string())?;
        tx.execute(&format!("DELETE FROM {table} WHERE id = ANY($1)"), &[&done]).await.map_err(words)?;
        tx.commit().await.map_err(words)?;
        Ok(rows.len())
    }
}
