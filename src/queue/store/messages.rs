//! The messages of the older dialect: one for each pending run, hidden for a while when it is received, gone when it
//! is deleted.
//!
//! A task queue has messages from the first time that somebody asks for its poll URLs; a fleet that never does pays
//! nothing for them.

use rusqlite::{OptionalExtension, params};

use super::super::auth::slugid;
use super::super::clock::Millis;
use super::super::rules::{State, Task};
use super::Trouble;
use super::room::{Room, read, select};
use std::time::Duration;

/// A message as it is received.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) name: String,
    pub(crate) task_id: String,
    pub(crate) run: u32,
    pub(crate) hint: String,
    pub(crate) inserted: Millis,
    pub(crate) expires: Millis,
    pub(crate) visible: Millis,
    pub(crate) dequeued: u32,
    pub(crate) receipt: String,
}

/// How a delete ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Deleted {
    Gone,
    NotThere,
    /// Somebody has received it since, or the receipt was garbled.
    OtherReceipt,
}

type Done<T> = Result<T, Trouble>;

impl Room<'_> {
    /// Makes sure that a task queue has messages, under this base name.
    pub(crate) fn open_messages(&mut self, queue: &str, base: &str) -> Done<()> {
        if self.has_messages(queue)? {
            return Ok(());
        }
        self.conn.prepare_cached("INSERT INTO message_queues (queue, base) VALUES (?1, ?2)")?.execute([queue, base])?;
        let waiting: Vec<Task> = self
            .conn
            .prepare_cached(&select("WHERE open = 1 AND queue = ?1 ORDER BY id"))?
            .query_map([queue], |row| read(row).map(|kept| kept.task))?
            .collect::<Result<_, _>>()?;
        for task in waiting {
            if let Some((run, record)) = task.pending().filter(|(_, run)| run.state == State::Pending) {
                self.put_message(&task, run, record.scheduled)?;
            }
        }
        Ok(())
    }

    /// The task queue behind a base name.
    pub(crate) fn queue_of(&self, base: &str) -> Done<Option<String>> {
        let mut found = self.conn.prepare_cached("SELECT queue FROM message_queues WHERE base = ?1")?;
        Ok(found.query_row([base], |row| row.get(0)).optional()?)
    }

    pub(super) fn has_messages(&self, queue: &str) -> Done<bool> {
        let mut found = self.conn.prepare_cached("SELECT 1 FROM message_queues WHERE queue = ?1")?;
        Ok(found.exists([queue])?)
    }

    pub(super) fn put_message(&mut self, task: &Task, run: u32, since: Millis) -> Done<()> {
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
                self.message_end(task).0,
            ])?;
        Ok(())
    }

    pub(super) fn drop_message(&mut self, task_id: &str, run: u32) -> Done<()> {
        self.conn
            .prepare_cached("DELETE FROM messages WHERE task_id = ?1 AND run = ?2")?
            .execute(params![task_id, run])?;
        Ok(())
    }

    /// Receives at most so many messages, and hides them for a while.
    pub(crate) fn receive(&mut self, queue: &str, rank: u8, most: u8, hidden: Duration) -> Done<Vec<Received>> {
        let visible = self.now.plus(hidden);
        let mut found: Vec<(i64, Received)> = self
            .conn
            .prepare_cached(
                "SELECT id, name, task_id, run, inserted, expires, dequeued FROM messages WHERE queue = ?1 \
                 AND priority = ?2 AND visible <= ?3 AND expires > ?3 ORDER BY visible, id LIMIT ?4",
            )?
            .query_map(params![queue, rank, self.now.0, most], |row| {
                let received = Received {
                    name: row.get(1)?,
                    task_id: row.get(2)?,
                    run: row.get(3)?,
                    hint: String::new(),
                    inserted: Millis(row.get(4)?),
                    expires: Millis(row.get(5)?),
                    visible,
                    dequeued: row.get::<_, u32>(6)?.saturating_add(1),
                    receipt: String::new(),
                };
                Ok((row.get(0)?, received))
            })?
            .collect::<Result<_, _>>()?;
        for (id, received) in &mut found {
            received.receipt = receipt();
            received.hint = slugid();
            self.conn
                .prepare_cached("UPDATE messages SET visible = ?2, dequeued = ?3, receipt = ?4 WHERE id = ?1")?
                .execute(params![*id, visible.0, received.dequeued, received.receipt])?;
        }
        Ok(found.into_iter().map(|(_, received)| received).collect())
    }

    /// Deletes a message, if the receipt is that of its last reception.
    pub(crate) fn delete(&mut self, queue: &str, rank: u8, name: &str, receipt: &str) -> Done<Deleted> {
        let found: Option<(i64, String)> = self
            .conn
            .prepare_cached(
                "SELECT id, receipt FROM messages WHERE name = ?1 AND queue = ?2 AND priority = ?3 AND expires > ?4",
            )?
            .query_row(params![name, queue, rank, self.now.0], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()?;
        let Some((id, current)) = found else { return Ok(Deleted::NotThere) };
        if current.is_empty() || current != receipt {
            return Ok(Deleted::OtherReceipt);
        }
        self.conn.prepare_cached("DELETE FROM messages WHERE id = ?1")?.execute([id])?;
        Ok(Deleted::Gone)
    }
}

/// A pop receipt laid out as the storage service's own: 20 bytes, so its base64 always ends in `=`, and may hold `+`
/// and `/`.
fn receipt() -> String {
    use base64::Engine as _;
    let mut bytes = [0_u8; 20];
    bytes[0] = 2;
    bytes[4] = 3;
    bytes[12..].copy_from_slice(&uuid::Uuid::new_v4().as_bytes()[..8]);
    base64::engine::general_purpose::STANDARD.encode(bytes)
}
