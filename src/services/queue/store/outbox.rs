//! Events of resolved tasks, kept with the tasks until a notifier has them.

use rusqlite::params;
use serde_json::json;

use super::super::response_json::status;
use super::super::task_state::{RunState, TaskRecord};
use super::tx::{StoreResult, Tx};
use super::{Store, StoreError};
use journeyman_domain::limits::{NOTIFY_BATCH_MAX, NOTIFY_OUTBOX_ROWS_MAX};
use journeyman_worker::notify::{Event, TypePattern};

/// The first events of the outbox.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    pub(crate) events: Vec<Event>,
    last: i64,
}

impl Tx<'_> {
    /// Of a task that was saved, in the same transaction. It may be told again; its id stays the same.
    pub(super) fn announce(&mut self, task: &TaskRecord) -> StoreResult<()> {
        let Some((run, last)) = task.last_run() else { return Ok(()) };
        let event_type = match last.state {
            RunState::Pending | RunState::Running => return Ok(()),
            RunState::Completed => "task.completed",
            RunState::Failed => "task.failed",
            RunState::Exception => "task.exception",
        };
        if !self.config.outbox_events.iter().any(|pattern| TypePattern::new(pattern).matches(event_type)) {
            return Ok(());
        }
        let event = json!({
            "source": "queue",
            "id": format!("{}/{run}/resolved", task.task_id),
            "type": event_type,
            "key": task.task_id,
            "epoch": run,
            "time": last.resolved,
            "last": true,
            "data": { "status": status(task), "runId": run },
        });
        let insert = "INSERT INTO outbox (event) SELECT ?1
                      WHERE coalesce((SELECT max(id) FROM outbox) - (SELECT min(id) FROM outbox), 0) < ?2";
        let added = self.execute(insert, params![event.to_string(), NOTIFY_OUTBOX_ROWS_MAX])?;
        if added == 0 {
            tracing::error!(task = task.task_id, "an event for the notifier is dropped: too many wait");
        }
        self.effects.announced += added;
        Ok(())
    }

    fn outbox(&self) -> StoreResult<Outbox> {
        let mut outbox = Outbox::default();
        let mut found = self.conn.prepare_cached("SELECT id, event FROM outbox ORDER BY id LIMIT ?1")?;
        let mut rows = found.query([i64::try_from(NOTIFY_BATCH_MAX).unwrap_or(i64::MAX)])?;
        while let Some(row) = rows.next()? {
            outbox.last = row.get(0)?;
            let event: String = row.get(1)?;
            outbox.events.push(serde_json::from_slice(event.as_bytes()).map_err(StoreError::json)?);
        }
        Ok(outbox)
    }
}

pub(crate) async fn read(store: &Store) -> Result<Outbox, super::QueueError> {
    store.execute(|tx| tx.outbox()).await
}

/// The notifier has them.
pub(crate) async fn clear(store: &Store, outbox: &Outbox) -> Result<(), super::QueueError> {
    let last = outbox.last;
    store.execute(move |tx| tx.execute("DELETE FROM outbox WHERE id <= ?1", [last]).map(drop)).await
}
