//! The messages of the Azure dialect: one for each pending run.
//!
//! A task queue has messages once its poll URLs were requested; other task queues have none.

use rusqlite::{OptionalExtension, params};

use super::super::clock::UnixMillis;
use super::super::task_state::{RunState, TaskRecord};
use super::StoreError;
use super::tx::{Tx, read_task, select_tasks};
use std::time::Duration;

#[derive(Debug)]
pub(crate) struct ReceivedMessage {
    pub(crate) name: String,
    pub(crate) task_id: String,
    pub(crate) run: u32,
    pub(crate) inserted: UnixMillis,
    pub(crate) expires: UnixMillis,
    pub(crate) visible: UnixMillis,
    pub(crate) dequeued: u32,
    pub(crate) receipt: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeleteResult {
    Deleted,
    NotFound,
    /// The message was received again, or the receipt is wrong.
    ReceiptMismatch,
}

type StoreResult<T> = Result<T, StoreError>;

impl Tx<'_> {
    pub(crate) fn enable_messages(&mut self, queue: &str) -> StoreResult<()> {
        if self.has_messages(queue)? {
            return Ok(());
        }
        self.conn.prepare_cached("INSERT INTO message_queues (queue) VALUES (?1)")?.execute([queue])?;
        let waiting: Vec<TaskRecord> = self
            .conn
            .prepare_cached(&select_tasks("WHERE open = 1 AND queue = ?1 ORDER BY id"))?
            .query_map([queue], |row| read_task(row).map(|row| row.task))?
            .collect::<Result<_, _>>()?;
        for task in waiting {
            if let Some((run, record)) = task.pending_run().filter(|(_, run)| run.state == RunState::Pending) {
                self.put_message(&task, run, record.scheduled)?;
            }
        }
        Ok(())
    }

    pub(super) fn has_messages(&self, queue: &str) -> StoreResult<bool> {
        let mut found = self.conn.prepare_cached("SELECT 1 FROM message_queues WHERE queue = ?1")?;
        Ok(found.exists([queue])?)
    }

    pub(super) fn put_message(&mut self, task: &TaskRecord, run: u32, since: UnixMillis) -> StoreResult<()> {
        if !self.has_messages(&task.queue)? {
            return Ok(());
        }
        let name = uuid::Uuid::new_v4().to_string();
        self.conn
            .prepare_cached(
                "INSERT OR IGNORE INTO messages (name, queue, priority, task_id, run, inserted, expires, visible, \
                 dequeued, receipt) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?6, 0, '')",
            )?
            .execute(params![
                name,
                task.queue,
                task.priority.rank(),
                task.task_id,
                run,
                since.0,
                self.message_expiry(task).0,
            ])?;
        Ok(())
    }

    pub(super) fn drop_message(&mut self, task_id: &str, run: u32) -> StoreResult<()> {
        self.conn
            .prepare_cached("DELETE FROM messages WHERE task_id = ?1 AND run = ?2")?
            .execute(params![task_id, run])?;
        Ok(())
    }

    pub(crate) fn receive_messages(
        &mut self,
        queue: &str,
        rank: u8,
        limit: u8,
        hidden: Duration,
    ) -> StoreResult<Vec<ReceivedMessage>> {
        let visible = self.now.plus(hidden);
        let mut found: Vec<(i64, ReceivedMessage)> = self
            .conn
            .prepare_cached(
                "SELECT id, name, task_id, run, inserted, expires, dequeued FROM messages WHERE queue = ?1 \
                 AND priority = ?2 AND visible <= ?3 AND expires > ?3 ORDER BY visible, id LIMIT ?4",
            )?
            .query_map(params![queue, rank, self.now.0, limit], |row| {
                let received = ReceivedMessage {
                    name: row.get(1)?,
                    task_id: row.get(2)?,
                    run: row.get(3)?,
                    inserted: UnixMillis(row.get(4)?),
                    expires: UnixMillis(row.get(5)?),
                    visible,
                    dequeued: row.get::<_, u32>(6)?.saturating_add(1),
                    receipt: String::new(),
                };
                Ok((row.get(0)?, received))
            })?
            .collect::<Result<_, _>>()?;
        for (id, received) in &mut found {
            received.receipt = new_pop_receipt();
            self.conn
                .prepare_cached("UPDATE messages SET visible = ?2, dequeued = ?3, receipt = ?4 WHERE id = ?1")?
                .execute(params![*id, visible.0, received.dequeued, received.receipt])?;
        }
        Ok(found.into_iter().map(|(_, received)| received).collect())
    }

    /// Deletes a message if the receipt is of its latest reception.
    pub(crate) fn delete_message(
        &mut self,
        queue: &str,
        rank: u8,
        name: &str,
        receipt: &str,
    ) -> StoreResult<DeleteResult> {
        let found: Option<(i64, String)> = self
            .conn
            .prepare_cached(
                "SELECT id, receipt FROM messages WHERE name = ?1 AND queue = ?2 AND priority = ?3 AND expires > ?4",
            )?
            .query_row(params![name, queue, rank, self.now.0], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()?;
        let Some((id, current)) = found else { return Ok(DeleteResult::NotFound) };
        if current.is_empty() || current != receipt {
            return Ok(DeleteResult::ReceiptMismatch);
        }
        self.conn.prepare_cached("DELETE FROM messages WHERE id = ?1")?.execute([id])?;
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
