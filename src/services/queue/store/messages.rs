//! The messages of the Azure dialect: one for each pending run, in the row of its task.
//!
//! A message is named `TASK-RUN`.

use std::time::Duration;

use rusqlite::{OptionalExtension, params};

use super::super::clock::UnixMillis;
use super::tx::{StoreResult, TaskRow, Tx};

#[derive(Debug)]
pub(crate) struct ReceivedMessage {
    pub(crate) task_id: String,
    pub(crate) run: u32,
    pub(crate) inserted: UnixMillis,
    pub(crate) expires: UnixMillis,
    pub(crate) visible: UnixMillis,
    pub(crate) dequeued: u32,
    pub(crate) receipt: String,
}

impl ReceivedMessage {
    pub(crate) fn name(&self) -> String {
        format!("{}-{}", self.task_id, self.run)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeleteResult {
    Deleted,
    NotFound,
    /// The message was received again, or the receipt is wrong.
    ReceiptMismatch,
}

impl Tx<'_> {
    pub(crate) fn receive_messages(
        &mut self,
        queue: &str,
        rank: u8,
        limit: u8,
        hidden: Duration,
    ) -> StoreResult<Vec<ReceivedMessage>> {
        let visible = self.now.plus(hidden);
        let found = self.tasks(
            "WHERE queue = ?1 AND priority = ?2 AND pending_since IS NOT NULL AND visible <= ?3 AND deadline > ?3 \
             ORDER BY pending_since, id LIMIT ?4",
            params![queue, rank, self.now.0, limit],
        )?;
        let mut received = Vec::new();
        for TaskRow { id, task, .. } in found {
            let Some((run, record)) = task.pending_run() else { continue };
            let (inserted, receipt) = (record.scheduled, new_pop_receipt());
            let update =
                "UPDATE tasks SET visible = ?2, dequeued = dequeued + 1, receipt = ?3 WHERE id = ?1 RETURNING dequeued";
            let dequeued = self.query_one(update, params![id, visible.0, receipt])?;
            let (task_id, expires) = (task.task_id, task.deadline);
            received.push(ReceivedMessage { task_id, run, inserted, expires, visible, dequeued, receipt });
        }
        Ok(received)
    }

    /// Deletes a message if the receipt is of its latest reception.
    pub(crate) fn delete_message(&mut self, queue: &str, name: &str, receipt: &str) -> StoreResult<DeleteResult> {
        let found: Option<(i64, String)> = self
            .conn
            .prepare_cached(
                "SELECT id, receipt FROM tasks WHERE queue = ?1 AND task_id = substr(?2, 1, 22) AND receipt != '' \
                 AND ?2 = task_id || '-' || (json_array_length(runs) - 1)",
            )?
            .query_row([queue, name], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()?;
        let Some((id, current)) = found else { return Ok(DeleteResult::NotFound) };
        if current != receipt {
            return Ok(DeleteResult::ReceiptMismatch);
        }
        self.execute("UPDATE tasks SET visible = ?2, receipt = '' WHERE id = ?1", [id, i64::MAX])?;
        Ok(DeleteResult::Deleted)
    }
}

/// In the format of Azure Queue Storage: 20 bytes, so the base64 ends in `=` and may contain `+` and `/` (I13).
fn new_pop_receipt() -> String {
    use base64::Engine as _;
    let mut bytes = [0_u8; 20];
    bytes[0] = 2;
    bytes[4] = 3;
    bytes[12..].copy_from_slice(&uuid::Uuid::new_v4().as_bytes()[..8]);
    base64::engine::general_purpose::STANDARD.encode(bytes)
}
