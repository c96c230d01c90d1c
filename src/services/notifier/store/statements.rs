//! The statements that accept and deliver. Each function runs within the transaction of its caller, and may run twice.

use std::collections::hash_map::{Entry, HashMap};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::sql::{ForRows, Row, SqlError, Value, for_rows, parameters, values};
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

/// What the lane sends next, if anything is due.
pub(crate) type NextHead = Option<Box<Head>>;
pub(crate) type LaneEnd = (Committed, NextHead);

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

/// Events that follow each other in a lane, of one epoch. Only the last one may be the epoch's last.
struct Run {
    epoch: Option<u32>,
    is_last: bool,
    /// Ids, in the order of the lane.
    events: Vec<i64>,
}

/// A call, with the time at which it came.
pub(super) type NewCall = (Arc<NewEvents>, Stamp);

/// Stores the events of calls and appends each to its lanes, in the order of the calls. Returns what became of the events of each call,
/// in their order; nothing of a call if the endpoints have changed since it chose its own, and nothing of it is stored then.
pub(super) async fn add(db: &mut Tx<'_>, calls: &[NewCall]) -> Result<Vec<Option<Vec<Added>>>> {
    let generation = generation(db).await?;
    let is_current = |new: &NewEvents| new.generation == generation;
    let nothing_new = |(new, _): &NewCall| is_current(new).then(|| vec![Added::Duplicate; new.events.len()]);
    let mut added: Vec<_> = calls.iter().map(nothing_new).collect();
    let current = calls.iter().enumerate().filter(|(_, (new, _))| is_current(new));
    let sent = current.flat_map(|(call, (new, at))| {
        new.events.iter().enumerate().map(move |(index, (event, endpoints))| ((call, index), event, endpoints, at.0))
    });
    // The first one counts of events that are the same.
    let (mut places, mut given) = (HashMap::new(), Vec::new());
    for (place, event, endpoints, at) in sent {
        if let Entry::Vacant(entry) = places.entry((event.source.as_str(), event.id.as_str())) {
            entry.insert((place, event, endpoints));
            let occurred_at = event.time.map_or(at, jiff::Timestamp::as_millisecond);
            given.push(parameters![
                &event.source,
                &event.id,
                &event.r#type,
                occurred_at,
                at,
                event.data.get().as_bytes()
            ]);
        }
    }
    // Each node stores events in this order, so that none waits for another one that waits for it.
    given.sort_by(|one, other| one.iter().take(2).cmp(other.iter().take(2)));
    let mut stored = BTreeMap::new();
    for mut row in db.query_rows(&STORE, &given).await? {
        let (id, source, source_id): (i64, String, String) = (row.take()?, row.take()?, row.take()?);
        let place = places.get(&(source.as_str(), source_id.as_str()));
        let &(place @ (call, index), event, endpoints) = place.ok_or_else(|| missing("an event"))?;
        let of_call = added.get_mut(call).and_then(Option::as_mut);
        if let Some(added) = of_call.and_then(|added| added.get_mut(index)) {
            *added = Added::Stored { lanes: endpoints.len() };
        }
        stored.insert(place, (id, event, endpoints));
    }
    let now = calls.iter().map(|(_, at)| *at).max().unwrap_or(Stamp(0));
    append(db, stored.into_values(), now).await?;
    Ok(added)
}

/// Appends events to their lanes, in their order.
async fn append<'a>(
    db: &mut Tx<'_>,
    stored: impl Iterator<Item = (i64, &'a Arc<Event>, &'a Vec<Arc<str>>)>,
    now: Stamp,
) -> Result<()> {
    // All transactions change lanes in the same order, so that none waits for another one that waits for it.
    let mut lanes = BTreeMap::<(&str, &str), VecDeque<Run>>::new();
    for (id, event, endpoints) in stored {
        for endpoint in endpoints {
            let runs = lanes.entry((&event.key, endpoint)).or_default();
            match runs.back_mut().filter(|run| run.epoch == event.epoch && !run.is_last) {
                Some(run) => {
                    run.events.push(id);
                    run.is_last = event.last;
                }
                None => runs.push_back(Run { epoch: event.epoch, is_last: event.last, events: vec![id] }),
            }
        }
    }
    let mut messages = Vec::new();
    while !lanes.is_empty() {
        let (mut runs, mut given, mut closed) = (HashMap::new(), Vec::new(), Vec::new());
        lanes.retain(|&(key, endpoint), of_lane| {
            let Some(run) = of_lane.pop_front() else { return false };
            let partition = i64::from(partition(endpoint, key).0);
            given.push(parameters![endpoint, key, partition, run.epoch.unwrap_or_default(), run.events.len(), now]);
            if run.is_last {
                closed.push(parameters![endpoint, key, run.epoch]);
            }
            runs.insert((endpoint, key), run);
            true
        });
        for mut row in db.query_rows(&APPEND, &given).await? {
            let (endpoint, key): (String, String) = (row.take()?, row.take()?);
            let run = runs.get(&(endpoint.as_str(), key.as_str())).ok_or_else(|| missing("a lane"))?;
            let (lane, tail, epoch, seq): (i64, i64, i64, i64) = (row.take()?, row.take()?, row.take()?, row.take()?);
            for (event, behind) in run.events.iter().rev().zip(0..) {
                messages.push(parameters![lane, tail - behind, epoch, seq - behind, *event]);
            }
        }
        db.query_rows(&CLOSE, &closed).await?;
    }
    db.query_rows(&ADD_MESSAGES, &messages).await.map(drop)
}

fn missing(what: &str) -> SqlError {
    SqlError::Unexpected(format!("{what} that was not given").into())
}

const STORE: ForRows = for_rows!(
    "INSERT INTO event (source, source_id, type, occurred_at, received_at, data) SELECT c1, c2, c3, c4, c5, c6 FROM",
    [1 "text", 2 "text", 3 "text", 4 "bigint", 5 "bigint", 6 "bytea"],
    "WHERE true ON CONFLICT DO NOTHING RETURNING id, source, source_id"
);
/// Events of an earlier epoch are late ones: they follow in the epoch of the lane.
const APPEND: ForRows = for_rows!(
    "INSERT INTO lane (endpoint, key, partition, epoch, seq, head, tail, due_at, last_at) SELECT c1, c2, c3, c4, c5, 1, c5, c6, c6 FROM",
    [1 "text", 2 "text", 3 "bigint", 4 "bigint", 5 "bigint", 6 "bigint"],
    "WHERE true ON CONFLICT (endpoint, key) DO UPDATE SET
         tail = lane.tail + excluded.tail,
         seq = CASE WHEN excluded.epoch > lane.epoch THEN excluded.seq ELSE lane.seq + excluded.seq END,
         epoch = CASE WHEN excluded.epoch > lane.epoch THEN excluded.epoch ELSE lane.epoch END,
         due_at = CASE WHEN lane.due_at IS NULL AND lane.state = 'open' THEN excluded.due_at ELSE lane.due_at END,
         last_at = excluded.last_at
     RETURNING endpoint, key, id, tail, epoch, seq"
);
/// A last event of an earlier epoch closes nothing.
const CLOSE: ForRows = for_rows!(
    "UPDATE lane SET closed_epoch = lane.epoch FROM",
    [1 "text", 2 "text", 3 "bigint"],
    "WHERE lane.endpoint = c1 AND lane.key = c2 AND coalesce(c3, lane.epoch) = lane.epoch"
);
const ADD_MESSAGES: ForRows = for_rows!(
    "INSERT INTO message (lane, position, epoch, seq, event) SELECT c1, c2, c3, c4, c5 FROM",
    [1 "bigint", 2 "bigint", 3 "bigint", 4 "bigint", 5 "bigint"],
    ""
);

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

/// The heads of lanes, of those from which this node is to deliver something.
pub(super) async fn heads(
    db: &mut Tx<'_>,
    node: &str,
    lanes: impl Iterator<Item = LaneId>,
    now: Stamp,
) -> Result<HashMap<LaneId, Box<Head>>> {
    let given: Vec<_> = lanes.map(|lane| parameters![lane.0, node, now]).collect();
    read_heads(db.query_rows(&HEADS, &given).await?)
}

fn read_heads(rows: Vec<Row>) -> Result<HashMap<LaneId, Box<Head>>> {
    let read = |mut row: Row| {
        let lane = LaneId(row.take()?);
        let head = Head {
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
        };
        Ok((lane, Box::new(head)))
    };
    rows.into_iter().map(read).collect()
}

const HEADS: ForRows = for_rows!(
    "SELECT lane.id, partition.token, lane.key, message.position, coalesce(replay.position, CAST(0 AS BIGINT)),
            message.epoch, message.seq,
            CASE WHEN replay.position IS NULL THEN lane.attempts ELSE replay.attempts END,
            CASE WHEN replay.position IS NULL THEN lane.first_attempt_at ELSE replay.first_attempt_at END,
            event.source, event.source_id, event.type, event.occurred_at, event.data
     FROM",
    [1 "bigint", 2 "text", 3 "bigint"],
    "JOIN lane ON lane.id = c1
     JOIN partition ON partition.number = lane.partition
     LEFT JOIN replay ON replay.lane = lane.id
         AND replay.position = (SELECT min(position) FROM replay WHERE replay.lane = lane.id)
     JOIN message ON message.lane = lane.id AND message.position = coalesce(replay.position, lane.head)
     JOIN event ON event.id = message.event
     WHERE lane.due_at <= c3 AND partition.owner = c2"
);

/// Stores attempts, each of another lane, and what they mean for their lanes. Returns that in their order, with the next heads of those
/// that are due.
pub(super) async fn end_attempts(
    db: &mut Tx<'_>,
    node: &str,
    ended: &[Arc<EndedAttempt>],
    now: Stamp,
) -> Result<Vec<LaneEnd>> {
    db.lock_lanes(ended.iter().map(|one| one.head.lane.0).collect()).await?;
    let (replays, heads): (Vec<_>, Vec<_>) = ended.iter().partition(|one| one.head.is_replay);
    let given: Vec<_> = heads.into_iter().map(|one| one.given(node)).collect();
    let mut updated = db.query_rows(&END_HEADS, &given).await?;
    for replay in replays {
        updated.extend(end_replay(db, node, replay).await?);
    }
    let read = |mut row: Row| Ok((LaneId(row.take()?), (row.take()?, row.take()?)));
    let updated: HashMap<LaneId, (Option<Stamp>, String)> = updated.into_iter().map(read).collect::<Result<_>>()?;
    let (mut outcomes, mut attempts) = (Vec::new(), Vec::new());
    for EndedAttempt { head, attempt, verdict, at, .. } in ended.iter().map(|one| &**one) {
        let Some((_, endpoint)) = updated.get(&head.lane) else { continue };
        let (lane, position) = (head.lane.0, head.position);
        if let HeadVerdict::Ended(outcome) = verdict {
            outcomes.push(parameters![lane, position, outcome.as_str(), *at]);
        }
        let AttemptRecord { started_at, took_ms, status, error, detail } = attempt;
        let status = status.map(u32::from);
        attempts.push(parameters![lane, position, *started_at, *took_ms, status, *error, detail.as_slice(), endpoint]);
    }
    let due = updated.iter().filter(|(_, (due, _))| due.is_some_and(|due| due <= now));
    let due: Vec<_> = due.map(|(lane, _)| parameters![lane.0, node, now]).collect();
    let [_, _, heads] = db.query_each([(&END_MESSAGES, &outcomes), (&ADD_ATTEMPTS, &attempts), (&HEADS, &due)]).await?;
    let mut next = read_heads(heads)?;
    let committed = |one: &Arc<EndedAttempt>| {
        let lane = one.head.lane;
        let committed = updated.get(&lane).map_or(Committed::Refused, |(due, _)| Committed::Due(*due));
        (committed, next.remove(&lane))
    };
    Ok(ended.iter().map(committed).collect())
}

impl EndedAttempt {
    /// The row of [`END_HEADS`].
    fn given(&self, node: &str) -> Vec<Value> {
        let Self { head, state, verdict, at: now, .. } = self;
        let (next_state, at, has_ended) = match *verdict {
            HeadVerdict::Ended(_) => ("open", *now, 1_i64),
            HeadVerdict::TryAgain { at } => ("open", at, 0),
            HeadVerdict::Park => ("parked", *now, 0),
        };
        let HeadState { attempts, first_attempt_at } = if has_ended == 1 { HeadState::default() } else { *state };
        let (lane, position, token) = (head.lane.0, head.position, head.token);
        parameters![lane, position, node, token, next_state, at, has_ended, attempts, first_attempt_at]
    }
}

/// The head of the lane stays what it is.
async fn end_replay(db: &mut Tx<'_>, node: &str, ended: &EndedAttempt) -> Result<Vec<Row>> {
    let values = ended.given(node);
    let (of_lane, of_replay) = values.split_at(7);
    let updated = db.query(END_REPLAY, of_lane).await?;
    if updated.is_empty() {
        return Ok(updated);
    }
    let (lane, position) = (ended.head.lane.0, ended.head.position);
    if let HeadVerdict::Ended(_) = ended.verdict {
        db.execute("DELETE FROM replay WHERE lane = $1 AND position = $2", values![lane, position]).await?;
    } else {
        let values = [values![lane, position], of_replay].concat();
        let update = "UPDATE replay SET attempts = $3, first_attempt_at = $4 WHERE lane = $1 AND position = $2";
        db.execute(update, &values).await?;
    }
    Ok(updated)
}

/// A lane that an operator has stopped meanwhile stays stopped. The node has its partition still, as it had it when it read the head.
const END_HEADS: ForRows = for_rows!(
    "UPDATE lane SET head = lane.head + c7, attempts = c8, first_attempt_at = c9,
         state = CASE WHEN lane.state = 'open' THEN c5 ELSE lane.state END,
         due_at = CASE WHEN lane.state = 'open' AND c5 = 'open' AND (c7 = 0 OR lane.head < lane.tail
             OR EXISTS (SELECT 1 FROM replay WHERE replay.lane = lane.id)) THEN c6 END
     FROM",
    [1 "bigint", 2 "bigint", 3 "text", 4 "bigint", 5 "text", 6 "bigint", 7 "bigint", 8 "bigint", 9 "bigint"],
    "WHERE lane.id = c1 AND lane.head = c2
         AND (SELECT token FROM partition WHERE number = lane.partition AND owner = c3) = c4
     RETURNING id, due_at, endpoint"
);
const END_REPLAY: &str = "UPDATE lane SET state = CASE WHEN state = 'open' THEN $5 ELSE state END,
         due_at = CASE WHEN state = 'open' AND $5 = 'open' AND (CAST($7 AS BIGINT) = 0 OR head <= tail
             OR EXISTS (SELECT 1 FROM replay WHERE replay.lane = lane.id AND replay.position <> $2))
             THEN CAST($6 AS BIGINT) END
     WHERE id = $1 AND EXISTS (SELECT 1 FROM replay WHERE replay.lane = $1 AND replay.position = $2)
         AND EXISTS (SELECT 1 FROM partition WHERE number = lane.partition AND owner = $3 AND token = $4)
     RETURNING id, due_at, endpoint";
const END_MESSAGES: ForRows = for_rows!(
    "UPDATE message SET outcome = c3, ended_at = c4 FROM",
    [1 "bigint", 2 "bigint", 3 "text", 4 "bigint"],
    "WHERE message.lane = c1 AND message.position = c2"
);
const ADD_ATTEMPTS: ForRows = for_rows!(
    "INSERT INTO attempt (lane, position, number, started_at, took_ms, status, error, detail, endpoint)
     SELECT c1, c2, (SELECT coalesce(max(number), 0) + 1 FROM attempt WHERE lane = c1 AND position = c2),
            c3, c4, c5, c6, c7, c8
     FROM",
    [1 "bigint", 2 "bigint", 3 "bigint", 4 "bigint", 5 "bigint", 6 "text", 7 "bytea", 8 "text"],
    ""
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
