//! The statements that remove what is old.

use super::operators::begin_generation;
use super::sql::{SqlError, values};
use super::transaction::Tx;
use journeyman_domain::limits::NOTIFIER_UPKEEP_BATCH;
use journeyman_domain::staged::Stamp;

/// Removes a bounded number of messages that ended before this time, then events and lanes that nothing refers to. Returns how many
/// rows are gone.
///
/// Of lanes only those go whose last epoch has had its last event: another one would count again from 1, and receivers would take
/// its events for old ones.
///
/// An endpoint whose name is like `targets` was made for its lanes, and goes with the last one unless an operator has stopped it.
pub(super) async fn clean_up(db: &mut Tx<'_>, before: Stamp, targets: &str) -> Result<u64, SqlError> {
    let mut removed = 0;
    let old = db
        .query(
            "SELECT lane, position FROM message WHERE ended_at < $1
                 AND NOT EXISTS (SELECT 1 FROM replay
                     WHERE replay.lane = message.lane AND replay.position = message.position)
             ORDER BY ended_at LIMIT $2",
            values![before, NOTIFIER_UPKEEP_BATCH],
        )
        .await?;
    for mut row in old {
        let (lane, position): (i64, i64) = (row.take()?, row.take()?);
        for delete in [
            "DELETE FROM attempt WHERE lane = $1 AND position = $2",
            "DELETE FROM message WHERE lane = $1 AND position = $2",
        ] {
            removed += db.execute(delete, values![lane, position]).await?;
        }
    }
    removed += db
        .execute(
            "DELETE FROM event WHERE id IN (SELECT id FROM event WHERE received_at < $1
                 AND NOT EXISTS (SELECT 1 FROM message WHERE message.event = event.id)
             ORDER BY received_at LIMIT $2)",
            values![before, NOTIFIER_UPKEEP_BATCH],
        )
        .await?;
    removed += db
        .execute(
            // PostgreSQL looks again at what is outside of the list, once another transaction has changed the lane.
            "DELETE FROM lane WHERE last_at < $1 AND head > tail AND due_at IS NULL
                 AND id IN (SELECT id FROM lane WHERE last_at < $1 AND head > tail AND state = 'open'
                 AND closed_epoch = epoch
                 AND NOT EXISTS (SELECT 1 FROM message WHERE message.lane = lane.id)
             ORDER BY last_at LIMIT $2)",
            values![before, NOTIFIER_UPKEEP_BATCH],
        )
        .await?;
    let expired = db
        .execute(
            "DELETE FROM endpoint WHERE name LIKE $1 AND disabled IS NULL AND paused_until IS NULL
                 AND NOT EXISTS (SELECT 1 FROM lane WHERE lane.endpoint = endpoint.name)",
            values![targets],
        )
        .await?;
    if expired > 0 {
        begin_generation(db).await?;
    }
    Ok(removed + expired)
}
