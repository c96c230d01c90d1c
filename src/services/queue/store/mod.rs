//! The queue's store: its tables, its own secret, and the workers that wait for work.

pub(crate) mod activity;
pub(crate) mod artifacts;
pub(crate) mod messages;
pub(super) mod outbox;
pub(crate) mod tx;
mod writer;

use secrecy::SecretString;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

pub(crate) use self::writer::QueueStore;

use self::tx::ClaimedRun;
use self::writer::run_waiter;
use super::queue_error::QueueError;
use super::task_state::{RunError, WorkerIdentity};
use journeyman_platform::sqlite::{self, Database, JobError, OpenError, Schema};
use journeyman_worker::task::formats::new_task_id;

pub(crate) type Store = sqlite::Store<QueueStore>;
pub(crate) type StoreError = JobError<QueueError>;
type Writer = sqlite::Writer<QueueStore>;
type Batch = sqlite::Batch<QueueStore>;

pub(crate) const SCHEMA: Schema = Schema {
    // `jrny`
    application_id: 0x6a72_6e79,
    format: 6,
    sql: include_str!("schema.sql"),
    owner: "queue",
    key: "queue.db",
};

/// The secret of the queue itself, created with the database.
pub(crate) fn own_secret(database: &Database) -> Result<SecretString, OpenError> {
    let secret: String = database.run(|conn| {
        let new_secret = format!("{}{}", new_task_id(), new_task_id());
        conn.execute("INSERT OR IGNORE INTO meta (key, value) VALUES ('secret', ?1)", [new_secret])?;
        conn.query_row("SELECT value FROM meta WHERE key = 'secret'", [], |row| row.get(0))
    })?;
    Ok(secret.into())
}

impl From<QueueError> for StoreError {
    fn from(error: QueueError) -> Self {
        Self::Refused(Box::new(error))
    }
}

impl From<RunError> for StoreError {
    fn from(error: RunError) -> Self {
        QueueError::from(error).into()
    }
}

#[derive(Debug)]
struct Waiter {
    queue: String,
    worker: WorkerIdentity,
    limit: u8,
    reply: oneshot::Sender<Vec<ClaimedRun>>,
    cancel: CancellationToken,
}

impl Waiter {
    fn is_gone(&self) -> bool {
        self.cancel.is_cancelled() || self.reply.is_closed()
    }
}

/// Claims pending runs, or waits for some until `cancel`. Without a reply, the claims failed.
pub(crate) async fn wait_for_work(
    store: &Store,
    queue: String,
    worker: WorkerIdentity,
    limit: u8,
    cancel: CancellationToken,
) -> Result<oneshot::Receiver<Vec<ClaimedRun>>, QueueError> {
    let (reply, answer) = oneshot::channel();
    let waiter = Waiter { queue, worker, limit, reply, cancel };
    store.send(Box::new(move |writer, batch| run_waiter(writer, batch, waiter))).await?;
    Ok(answer)
}

/// Resolves due claims and deadlines now.
pub(crate) async fn tick(store: &Store) {
    // Every batch does.
    store.execute(|_| Ok(())).await.ok();
}

#[cfg(test)]
mod tests;
