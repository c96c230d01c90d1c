//! The statements that accept and deliver. Each function runs within the transaction of its caller, and may run twice.

use std::collections::BTreeSet;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::sql::{Row, SqlError, parameters, values};
use super::transaction::Tx;
use journeyman_domain::lane::dispatcher::LaneId;
use journeyman_domain::lane::endpoint::EndpointHealth;
use journeyman_domain::lane::partitions::{Owned, Partition, Plan, plan};
use journeyman_domain::lane::retry::{HeadState, HeadVerdict};
use journeyman_domain::limits::{NOTIFIER_LEASE, NOTIFIER_PARTITIONS};
use journeyman_domain::staged::Stamp;
use journeyman_worker::notify::Event;

type Result<T> = std::result::Result<T, SqlError>;

/// What became of an event that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Added {
    /// The event is stored in so many lanes.
    Stored { lanes: usize },
    /// The source has sent it before.
    Duplicate,
}

/// The message that a lane sends next.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) lane: LaneId,
    /// The token of the lane's partition.
    pub(crate) token: i64,
    pub(crate) key: String,
    pub(crate) position: i64,
    /// It has ended before, and is sent once more.
    pub(crate) is_replay: bool,
    pub(crate) epoch: u32,
    pub(crate) seq: i64,
    pub(crate) state: HeadState,
    pub(crate) source: String,
    pub(crate) event_id: String,
    pub(crate) event_type: String,
    pub(crate) occurred_at: Stamp,
    pub(crate) data: Vec<u8>,
}

/// An attempt that has ended.
#[derive(Debug)]
pub(crate) struct AttemptRecord {
    pub(crate) started_at: Stamp,
    pub(crate) took_ms: i64,
    pub(crate) status: Option<u16>,
    pub(crate) error: Option<&'static str>,
    /// The head of the answer, or the error.
    pub(crate) detail: Vec<u8>,
}

/// What an attempt means for the head of its lane.
#[derive(Debug)]
pub(crate) struct EndedAttempt {
    pub(crate) head: Head,
    pub(crate) state: HeadState,
    pub(crate) attempt: AttemptRecord,
    pub(crate) verdict: HeadVerdict,
    pub(crate) at: Stamp,
}

/// What a lane does after an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Committed {
    /// It is attempted again then; never if it is empty or stopped.
    Due(Option<Stamp>),
    /// Another node has the lane, or an operator has skipped the message. Nothing was stored.
    Refused,
}

/// A lane that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DueLane {
    pub(crate) id: LaneId,
    pub(crate) partition: Partition,
}

/// Events, each with the endpoints that it is for.
#[derive(Debug)]
pub(crate) struct NewEvents {
    pub(crate) events: Vec<(Arc<Event>, Vec<Arc<str>>)>,
    /// The generation of the endpoints among which they were chosen.
    pub(crate) generation: i64,
}

/// Stores events and appends each to its lane of these endpoints. Returns what became of each, in their order; nothing if the
/// endpoints have changed since they were chosen, and nothing is stored then.
pub(super) async fn add(db: &mut Tx<'_>, new: &NewEvents, now: Stamp) -> Result<Option<Vec<Added>>> {
    if generation(db).await? != new.generation {
        return Ok(None);
    }
    // All transactions change lanes in the same order, so that none waits for another one that waits for it.
    let mut order: Vec<_> = new.events.iter().enumerate().collect();
    order.sort_by_key(|(_, (event, _))| &event.key);
    let rows = order.iter().map(|(_, (event, _))| {
        let occurred_at = event.time.map_or(now.0, jiff::Timestamp::as_millisecond);
        parameters![&event.source, &event.id, &event.r#type, occurred_at, now, event.data.get().as_bytes()]
    });
    let insert = "INSERT INTO event (source, source_id, type, occurred_at, received_at, data)
                  VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING RETURNING id";
    let inserted = db.query_each(insert, &Vec::from_iter(rows)).await?;
    let mut added = vec![Added::Duplicate; new.events.len()];
    let (mut ids, mut lanes) = (Vec::new(), Vec::new());
    for ((index, (event, endpoints)), rows) in order.into_iter().zip(inserted) {
        let Some(mut row) = rows.into_iter().next() else { continue };
        let id: i64 = row.take()?;
        for endpoint in endpoints {
            let partition = i64::from(partition(endpoint, &event.key).0);
            lanes.push(parameters![endpoint, &event.key, partition, event.epoch, now, i64::from(event.last)]);
            ids.push(id);
        }
        if let Some(added) = added.get_mut(index) {
            *added = Added::Stored { lanes: endpoints.len() };
        }
    }
    let mut messages = Vec::with_capacity(ids.len());
    for (id, rows) in ids.into_iter().zip(db.query_each(APPEND, &lanes).await?) {
        let row = rows.into_iter().next();
        let mut row = row.ok_or_else(|| SqlError::Unexpected("no lane after it was stored".into()))?;
        let (lane, tail, epoch, seq): (i64, i64, i64, i64) = (row.take()?, row.take()?, row.take()?, row.take()?);
        messages.push(parameters![lane, tail, epoch, seq, id]);
    }
    let insert = "INSERT INTO message (lane, position, epoch, seq, event) VALUES ($1, $2, $3, $4, $5)";
    db.query_each(insert, &messages).await?;
    Ok(Some(added))
}

/// An event of an earlier epoch is a late one: it follows in the epoch of the lane.
const APPEND: &str =
    "INSERT INTO lane (endpoint, key, partition, epoch, seq, head, tail, due_at, last_at, closed_epoch)
     VALUES ($1, $2, $3, coalesce($4, CAST(0 AS BIGINT)), 1, 1, 1, $5, $5,
             CASE WHEN CAST($6 AS BIGINT) = 1 THEN coalesce($4, CAST(0 AS BIGINT)) END)
     ON CONFLICT (endpoint, key) DO UPDATE SET
         tail = lane.tail + 1,
         seq = CASE WHEN coalesce($4, lane.epoch) > lane.epoch THEN 1 ELSE lane.seq + 1 END,
         epoch = CASE WHEN coalesce($4, lane.epoch) > lane.epoch THEN $4 ELSE lane.epoch END,
         due_at = CASE WHEN lane.due_at IS NULL AND lane.state = 'open' THEN $5 ELSE lane.due_at END,
         last_at = $5,
         closed_epoch = CASE WHEN CAST($6 AS BIGINT) = 1 AND coalesce($4, lane.epoch) >= lane.epoch
             THEN coalesce($4, lane.epoch) ELSE lane.closed_epoch END
     RETURNING id, tail, epoch, seq";

/// Grows with each change of the endpoints that are stored.
pub(super) async fn generation(db: &mut Tx<'_>) -> Result<i64> {
    let row = db.first("SELECT generation FROM registry", values![]).await?;
    row.map_or(Ok(0), |mut row| row.take())
}

/// Closes the lanes, unless a later epoch has begun.
pub(super) async fn close_lanes(db: &mut Tx<'_>, endpoints: &str, key: &str, epoch: u32) -> Result<()> {
    db.execute(
        "UPDATE lane SET closed_epoch = epoch WHERE key = $1 AND epoch <= $2 AND endpoint LIKE $3",
        values![key, epoch, endpoints],
    )
    .await
    .map(drop)
}

/// Lanes are spread evenly.
fn partition(endpoint: &str, key: &str) -> Partition {
    let digest = Sha256::new().chain_update(endpoint).chain_update([0]).chain_update(key).finalize();
    let number = digest.first_chunk().map_or(0, |bytes| u16::from_be_bytes(*bytes));
    Partition(number % NOTIFIER_PARTITIONS)
}

/// The endpoints that have waiting lanes, with the time at which the first head of each is due. An idle endpoint costs nothing.
pub(super) async fn waiting(db: &mut Tx<'_>) -> Result<Vec<(String, Stamp)>> {
    let rows = db
        .query(
            "WITH RECURSIVE waiting (endpoint) AS (
                 SELECT min(endpoint) FROM lane WHERE due_at IS NOT NULL
                 UNION ALL
                 SELECT (SELECT min(lane.endpoint) FROM lane WHERE lane.due_at IS NOT NULL AND lane.endpoint > waiting.endpoint)
                 FROM waiting WHERE waiting.endpoint IS NOT NULL
             )
             SELECT endpoint, (SELECT min(lane.due_at) FROM lane WHERE lane.endpoint = waiting.endpoint AND lane.due_at IS NOT NULL)
             FROM waiting WHERE endpoint IS NOT NULL",
            values![],
        )
        .await?;
    rows.into_iter().map(|mut row| Ok((row.take()?, row.take()?))).collect()
}

/// The due lanes of a node and an endpoint, the longest first.
#[derive(Debug)]
pub(crate) struct DueLanes {
    pub(crate) endpoint: Arc<str>,
    pub(crate) lanes: Vec<DueLane>,
    /// The time at which its next head is due.
    pub(crate) next: Option<Stamp>,
}

/// Those of endpoints, so many at most of each.
pub(super) async fn due(
    db: &mut Tx<'_>,
    node: &str,
    endpoints: &[(Arc<str>, usize)],
    now: Stamp,
) -> Result<Vec<DueLanes>> {
    let mut all = Vec::with_capacity(endpoints.len());
    for (endpoint, max) in endpoints {
        let rows = db
            .query(
                "SELECT lane.id, lane.partition FROM lane JOIN partition ON partition.number = lane.partition
                 WHERE lane.endpoint = $1 AND lane.due_at <= $2 AND partition.owner = $3 ORDER BY lane.due_at LIMIT $4",
                values![endpoint, now, node, *max],
            )
            .await?;
        let due = |mut row: Row| Ok(DueLane { id: LaneId(row.take()?), partition: Partition(number(row.take()?)) });
        let lanes = rows.into_iter().map(due).collect::<Result<_>>()?;
        let select = "SELECT min(due_at) FROM lane WHERE endpoint = $1 AND due_at > $2";
        let next = db.first(select, values![endpoint, now]).await?.map_or(Ok(None), |mut row| row.take())?;
        all.push(DueLanes { endpoint: Arc::clone(endpoint), lanes, next });
    }
    Ok(all)
}

/// The clock was set back by so much: what a node has waits as long as it was to wait.
pub(super) async fn set_back(db: &mut Tx<'_>, node: &str, by_ms: i64, now: Stamp) -> Result<()> {
    db.execute(
        "UPDATE lane SET due_at = CASE WHEN due_at - $1 > $2 THEN due_at - $1 ELSE $2 END
         WHERE due_at > $2 AND partition IN (SELECT number FROM partition WHERE owner = $3)",
        values![by_ms, now, node],
    )
    .await
    .map(drop)
}

fn number(partition: i64) -> u16 {
    u16::try_from(partition).unwrap_or(u16::MAX)
}

/// `None` if nothing of the lane is to be delivered by this node.
pub(super) async fn head(db: &mut Tx<'_>, node: &str, lane: LaneId, now: Stamp) -> Result<Option<Head>> {
    let row = db
        .first(
            "SELECT partition.token, lane.key, message.position, coalesce(replay.position, CAST(0 AS BIGINT)),
                    message.epoch, message.seq,
                    CASE WHEN replay.position IS NULL THEN lane.attempts ELSE replay.attempts END,
                    CASE WHEN replay.position IS NULL THEN lane.first_attempt_at ELSE replay.first_attempt_at END,
                    event.source, event.source_id, event.type, event.occurred_at, event.data
             FROM lane
             JOIN partition ON partition.number = lane.partition
             LEFT JOIN replay ON replay.lane = lane.id
                 AND replay.position = (SELECT min(position) FROM replay WHERE lane = $1)
             JOIN message ON message.lane = lane.id AND message.position = coalesce(replay.position, lane.head)
             JOIN event ON event.id = message.event
             WHERE lane.id = $1 AND lane.due_at <= $3 AND partition.owner = $2",
            values![lane.0, node, now],
        )
        .await?;
    let read = |mut row: Row| {
        Ok(Head {
            lane,
            token: row.take()?,
            key: row.take()?,
            position: row.take()?,
            is_replay: row.take::<i64>()? != 0,
            epoch: row.take()?,
            seq: row.take()?,
            state: HeadState { attempts: row.take()?, first_attempt_at: row.take()? },
            source: row.take()?,
            event_id: row.take()?,
            event_type: row.take()?,
            occurred_at: row.take()?,
            data: row.take()?,
        })
    };
    row.map(read).transpose()
}

/// Stores an attempt and what it means for the lane.
pub(super) async fn end_attempt(db: &mut Tx<'_>, node: &str, ended: &EndedAttempt) -> Result<Committed> {
    let EndedAttempt { head, state, attempt, verdict, at: now } = ended;
    let (verdict, now) = (*verdict, *now);
    let (lane, position) = (head.lane.0, head.position);
    let (next_state, at) = match verdict {
        HeadVerdict::Ended(_) => ("open", now),
        HeadVerdict::TryAgain { at } => ("open", at),
        HeadVerdict::Park => ("parked", now),
    };
    let (has_ended, state) = match verdict {
        HeadVerdict::Ended(_) => (1_i64, HeadState::default()),
        HeadVerdict::TryAgain { .. } | HeadVerdict::Park => (0, *state),
    };
    let HeadState { attempts, first_attempt_at } = state;
    let updated = if head.is_replay {
        let of_lane = values![lane, position, node, head.token, next_state, at, has_ended];
        let updated = db.first(END_REPLAY, of_lane).await?;
        match verdict {
            _ if updated.is_none() => {}
            HeadVerdict::Ended(_) => {
                let delete = "DELETE FROM replay WHERE lane = $1 AND position = $2";
                db.execute(delete, values![lane, position]).await?;
            }
            HeadVerdict::TryAgain { .. } | HeadVerdict::Park => {
                let update = "UPDATE replay SET attempts = $3, first_attempt_at = $4 WHERE lane = $1 AND position = $2";
                db.execute(update, values![lane, position, attempts, first_attempt_at]).await?;
            }
        }
        updated
    } else {
        let values = values![lane, position, node, head.token, next_state, at, has_ended, attempts, first_attempt_at];
        db.first(END_HEAD, values).await?
    };
    let Some(mut updated) = updated else { return Ok(Committed::Refused) };
    if let HeadVerdict::Ended(outcome) = verdict {
        db.execute(
            "UPDATE message SET outcome = $3, ended_at = $4 WHERE lane = $1 AND position = $2",
            values![lane, position, outcome.as_str(), now],
        )
        .await?;
    }
    db.execute(
        "INSERT INTO attempt (lane, position, number, started_at, took_ms, status, error, detail, endpoint)
         VALUES ($1, $2, (SELECT coalesce(max(number), 0) + 1 FROM attempt WHERE lane = $1 AND position = $2),
                 $3, $4, $5, $6, $7, (SELECT lane.endpoint FROM lane WHERE lane.id = $1))",
        values![
            lane,
            position,
            attempt.started_at,
            attempt.took_ms,
            attempt.status.map(u32::from),
            attempt.error,
            attempt.detail.as_slice(),
        ],
    )
    .await?;
    Ok(Committed::Due(updated.take()?))
}

/// The node ($3) has the partition of the lane still, as it had it ($4) when it read the head.
macro_rules! fenced {
    () => {
        " AND EXISTS (SELECT 1 FROM partition WHERE number = lane.partition AND owner = $3 AND token = $4)
          RETURNING due_at"
    };
}

/// A lane that an operator has stopped meanwhile stays stopped.
const END_HEAD: &str = concat!(
    "UPDATE lane SET head = head + $7, attempts = $8, first_attempt_at = $9,
         state = CASE WHEN state = 'open' THEN $5 ELSE state END,
         due_at = CASE WHEN state = 'open' AND $5 = 'open' AND ($7 = 0 OR head < tail
             OR EXISTS (SELECT 1 FROM replay WHERE replay.lane = lane.id)) THEN CAST($6 AS BIGINT) END
     WHERE id = $1 AND head = $2",
    fenced!()
);
/// The head of the lane stays what it is.
const END_REPLAY: &str = concat!(
    "UPDATE lane SET state = CASE WHEN state = 'open' THEN $5 ELSE state END,
         due_at = CASE WHEN state = 'open' AND $5 = 'open' AND (CAST($7 AS BIGINT) = 0 OR head <= tail
             OR EXISTS (SELECT 1 FROM replay WHERE replay.lane = lane.id AND replay.position <> $2))
             THEN CAST($6 AS BIGINT) END
     WHERE id = $1 AND EXISTS (SELECT 1 FROM replay WHERE replay.lane = $1 AND replay.position = $2)",
    fenced!()
);

pub(super) async fn set_health(db: &mut Tx<'_>, endpoint: &str, health: &EndpointHealth) -> Result<()> {
    let text = serde_json::to_string(health).map_err(|error| SqlError::Unexpected(error.into()))?;
    db.execute(
        "INSERT INTO endpoint (name, health) VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET health = $2",
        values![endpoint, &text],
    )
    .await
    .map(drop)
}

/// Renews the lease of a node, takes what it may take, and lets go what it says. Returns what the node has now.
pub(super) async fn keep_lease(db: &mut Tx<'_>, node: &str, let_go: &[Partition]) -> Result<Lease> {
    db.lock_leases().await?;
    let now = db.now().await?;
    db.execute(
        "INSERT INTO node (id, lease_until) VALUES ($1, $2) ON CONFLICT (id) DO UPDATE SET lease_until = $2",
        values![node, now.plus(NOTIFIER_LEASE)],
    )
    .await?;
    db.execute("DELETE FROM node WHERE lease_until < $1", values![now]).await?;
    for partition in let_go {
        let update = "UPDATE partition SET owner = NULL WHERE number = $1 AND owner = $2";
        db.execute(update, values![u32::from(partition.0), node]).await?;
    }
    let rows = db.query("SELECT id FROM node", values![]).await?;
    let live: BTreeSet<String> = rows.into_iter().map(|mut row| row.take()).collect::<Result<_>>()?;
    let rows = db.query("SELECT number, owner FROM partition ORDER BY number", values![]).await?;
    let owned = |mut row: Row| Ok(Owned { partition: Partition(number(row.take()?)), owner: row.take()? });
    let partitions: Vec<Owned> = rows.into_iter().map(owned).collect::<Result<_>>()?;
    let Plan { take, drain } = plan(node, &live, &partitions);
    for partition in &take {
        let update = "UPDATE partition SET owner = $2, token = token + 1 WHERE number = $1";
        db.execute(update, values![u32::from(partition.0), node]).await?;
    }
    let kept = partitions.iter().filter(|one| one.owner.as_deref() == Some(node)).map(|one| one.partition);
    Ok(Lease { has: kept.chain(take).collect(), drain: drain.into_iter().collect(), nodes: live.len() })
}

/// What a node has for a while.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Lease {
    pub(crate) has: BTreeSet<Partition>,
    /// It lets these go, once no attempt of theirs is under way.
    pub(crate) drain: BTreeSet<Partition>,
    /// That are live.
    pub(crate) nodes: usize,
}

/// A node that stops lets everything go.
pub(super) async fn end_lease(db: &mut Tx<'_>, node: &str) -> Result<()> {
    db.lock_leases().await?;
    db.execute("UPDATE partition SET owner = NULL WHERE owner = $1", values![node]).await?;
    db.execute("DELETE FROM node WHERE id = $1", values![node]).await.map(drop)
}
