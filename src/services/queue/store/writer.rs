//! What each batch of the store does beside its jobs: it resolves expired claims and deadlines, gives new work to
//! waiting workers, and removes files after the commit.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use rusqlite::{Connection, ErrorCode};
use tokio::sync::Notify;

use super::super::clock::UnixMillis;
use super::super::config::Config;
use super::super::queue_error::{QueueError, QueueErrorCode};
use super::activity::{Activity, TaskEvent};
use super::tx::Tx;
use super::{Batch, Waiter, Writer};
use journeyman_platform::sqlite::Owner;

#[derive(Debug)]
pub(crate) struct QueueStore {
    config: Arc<Config>,
    waiters: HashMap<String, VecDeque<Waiter>>,
    /// Notified when events of tasks were committed.
    pub(crate) announced: Arc<Notify>,
    pub(crate) activity: Arc<Mutex<Activity>>,
}

#[derive(Default)]
pub(crate) struct Effects {
    /// Task queues in which a run became pending.
    pub(super) queues_with_work: Vec<String>,
    /// Artifact files to remove after the commit.
    pub(super) files_to_remove: Vec<String>,
    /// Events that were added to the outbox.
    pub(super) announced: usize,
    /// What happened to tasks of queues, and when.
    pub(super) events: Vec<(String, TaskEvent, UnixMillis)>,
}

impl QueueStore {
    pub(crate) fn new(config: Arc<Config>) -> Self {
        Self { config, waiters: HashMap::new(), announced: Arc::default(), activity: Arc::default() }
    }
}

impl Owner for QueueStore {
    type Tx<'a> = Tx<'a>;
    type Error = QueueError;
    type Effects = Effects;

    /// Callers may be told that the disk is full, and nothing else.
    fn store_error(cause: Option<&rusqlite::Error>, incident: uuid::Uuid) -> QueueError {
        if cause.and_then(rusqlite::Error::sqlite_error_code) == Some(ErrorCode::DiskFull) {
            let message = "disk full: the queue cannot write its database";
            return QueueError::new(QueueErrorCode::InsufficientStorage, message);
        }
        QueueError::internal(&incident)
    }

    fn begin<'a>(&'a self, conn: &'a mut Connection) -> Tx<'a> {
        Tx::new(conn, &self.config)
    }

    fn end(tx: Tx<'_>) -> Effects {
        tx.effects
    }

    fn collect_effects(of_job: Effects, effects: &mut Effects) {
        effects.queues_with_work.extend(of_job.queues_with_work);
        effects.files_to_remove.extend(of_job.files_to_remove);
        effects.announced += of_job.announced;
        effects.events.extend(of_job.events);
    }

    fn end_batch(writer: &mut Writer, batch: &mut Batch) {
        if let Err(error) = writer.in_savepoint(batch, |tx| tx.expire_due().and_then(|()| tx.remove_expired())) {
            tracing::error!(?error, "cannot resolve and remove expired tasks; the next batch tries again");
        }
        serve_waiters(writer, batch);
    }

    fn committed(&mut self, effects: Effects) {
        for path in &effects.files_to_remove {
            super::super::artifact_files::remove(&self.config.artifacts, path);
        }
        if effects.announced > 0 {
            self.announced.notify_one();
        }
        if !effects.events.is_empty() {
            let mut activity = self.activity.lock();
            effects.events.iter().for_each(|(queue, event, at)| activity.count(queue, *event, *at));
        }
    }
}

pub(super) fn run_waiter(writer: &mut Writer, batch: &mut Batch, waiter: Waiter) {
    if let Some(waiter) = claim_for(writer, batch, waiter) {
        // Each connection has one waiter at most.
        let waiters = writer.owner.waiters.entry(waiter.queue.clone()).or_default();
        waiters.retain(|waiter| !waiter.is_gone());
        waiters.push_back(waiter);
    }
}

/// Longest wait first.
fn serve_waiters(writer: &mut Writer, batch: &mut Batch) {
    let mut queues = batch.effects.queues_with_work.clone();
    queues.sort_unstable();
    queues.dedup();
    for queue in queues {
        let Some(mut waiters) = writer.owner.waiters.remove(&queue) else { continue };
        while let Some(waiter) = waiters.pop_front() {
            if let Some(waiter) = claim_for(writer, batch, waiter) {
                waiters.push_front(waiter);
                break;
            }
        }
        if !waiters.is_empty() {
            writer.owner.waiters.insert(queue, waiters);
        }
    }
}

/// Returns the waiter if it has to wait for work.
fn claim_for(writer: &mut Writer, batch: &mut Batch, waiter: Waiter) -> Option<Waiter> {
    if waiter.is_gone() {
        return None;
    }
    let claims = writer.in_savepoint(batch, |tx| tx.claim_work(&waiter.queue, &waiter.worker, waiter.limit)).ok()?;
    if claims.is_empty() {
        return Some(waiter);
    }
    // If the receiver is gone, the claims expire, or their worker recovers them.
    batch.replies.push(Box::new(move |committed| drop(committed.map(|()| waiter.reply.send(claims)))));
    None
}
