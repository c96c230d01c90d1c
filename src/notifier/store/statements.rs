//! The statements of the store. Each function runs within the transaction of its caller.

use std::sync::Arc;

use rusqlite::{Connection, OptionalExtension as _, Result, params};

use crate::domain::lane::dispatcher::LaneId;
use crate::domain::lane::endpoint::EndpointHealth;
use crate::domain::lane::retry::{HeadState, HeadVerdict, MessageOutcome};
use crate::domain::staged::Stamp;
use crate::notifier::event::Event;

/// What became of an event that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Added {
    /// In so many lanes.
    Stored { lanes: usize },
    /// The source has sent it before.
    Duplicate,
}

/// The message at the head of a lane.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) lane: LaneId,
    pub(crate) key: String,
    pub(crate) position: i64,
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

/// How many lanes have messages, and how many messages wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub(crate) struct Counts {
    pub(crate) lanes: i64,
    pub(crate) messages: i64,
    /// Since when the oldest head waits, in milliseconds since 1970.
    pub(crate) oldest: Option<i64>,
}

/// Stores an event and appends it to its lane of each of these endpoints.
pub(crate) fn add(db: &Connection, event: &Event, endpoints: &[Arc<str>], now: Stamp) -> Result<Added> {
    let occurred_at = event.time.map_or(now.0, jiff::Timestamp::as_millisecond);
    let inserted = db
        .prepare_cached(
            "INSERT INTO event (source, source_id, type, occurred_at, received_at, data) VALUES (?, ?, ?, ?, ?, ?)
             ON CONFLICT DO NOTHING",
        )?
        .execute(params![event.source, event.id, event.r#type, occurred_at, now.0, event.data.get().as_bytes()])?;
    if inserted == 0 {
        return Ok(Added::Duplicate);
    }
    let id = db.last_insert_rowid();
    for endpoint in endpoints {
        append(db, endpoint, event, id, now)?;
    }
    Ok(Added::Stored { lanes: endpoints.len() })
}

/// An event of an earlier epoch is a late one: it follows in the epoch of the lane.
fn append(db: &Connection, endpoint: &str, event: &Event, id: i64, now: Stamp) -> Result<()> {
    let (lane, tail, epoch, seq): (i64, i64, u32, i64) = db
        .prepare_cached(
            "INSERT INTO lane (endpoint, key, epoch, seq, head, tail, due_at) VALUES (?1, ?2, coalesce(?3, 0), 1, 1, 1, ?4)
             ON CONFLICT (endpoint, key) DO UPDATE SET
                 tail = tail + 1,
                 seq = iif(coalesce(?3, epoch) > epoch, 1, seq + 1),
                 epoch = max(epoch, coalesce(?3, epoch)),
                 due_at = iif(head > tail AND state = 'open', ?4, due_at)
             RETURNING id, tail, epoch, seq",
        )?
        .query_row(params![endpoint, event.key, event.epoch, now.0], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?))
        })?;
    db.prepare_cached("INSERT INTO message (lane, position, epoch, seq, event) VALUES (?, ?, ?, ?, ?)")?
        .execute(params![lane, tail, epoch, seq, id])?;
    Ok(())
}

/// The lanes of an endpoint whose heads are due, the longest first.
pub(crate) fn due(db: &Connection, endpoint: &str, now: Stamp, max: usize) -> Result<Vec<LaneId>> {
    let mut statement =
        db.prepare_cached("SELECT id FROM lane WHERE endpoint = ? AND due_at <= ? ORDER BY due_at LIMIT ?")?;
    statement
        .query_map(params![endpoint, now.0, i64::try_from(max).unwrap_or(i64::MAX)], |row| row.get(0).map(LaneId))?
        .collect()
}

/// When a head of an endpoint is due that is not due yet.
pub(crate) fn next_due(db: &Connection, endpoint: &str, now: Stamp) -> Result<Option<Stamp>> {
    let next = db
        .prepare_cached("SELECT min(due_at) FROM lane WHERE endpoint = ? AND due_at > ?")?
        .query_row(params![endpoint, now.0], |row| row.get::<_, Option<i64>>(0))?;
    Ok(next.map(Stamp))
}

/// `None` if nothing of the lane is to be delivered.
pub(crate) fn head(db: &Connection, lane: LaneId) -> Result<Option<Head>> {
    db.prepare_cached(
        "SELECT lane.key, message.position, message.epoch, message.seq, lane.attempts, lane.first_attempt_at,
                event.source, event.source_id, event.type, event.occurred_at, event.data
         FROM lane JOIN message ON message.lane = lane.id AND message.position = lane.head
                   JOIN event ON event.id = message.event
         WHERE lane.id = ? AND lane.due_at IS NOT NULL",
    )?
    .query_row([lane.0], |row| {
        Ok(Head {
            lane,
            key: row.get(0)?,
            position: row.get(1)?,
            epoch: row.get(2)?,
            seq: row.get(3)?,
            state: HeadState { attempts: row.get(4)?, first_attempt_at: row.get::<_, Option<i64>>(5)?.map(Stamp) },
            source: row.get(6)?,
            event_id: row.get(7)?,
            event_type: row.get(8)?,
            occurred_at: Stamp(row.get(9)?),
            data: row.get(10)?,
        })
    })
    .optional()
}

/// Stores an attempt and what it means for the lane. Returns when the lane is due again; `None` if it is empty or stopped.
pub(crate) fn end_attempt(
    db: &Connection,
    head: &Head,
    state: HeadState,
    attempt: &AttemptRecord,
    verdict: HeadVerdict,
    now: Stamp,
) -> Result<Option<Stamp>> {
    let (lane, position) = (head.lane.0, head.position);
    db.prepare_cached(
        "INSERT INTO attempt (lane, position, number, started_at, took_ms, status, error, detail)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
    )?
    .execute(params![
        lane,
        position,
        state.attempts,
        attempt.started_at.0,
        attempt.took_ms,
        attempt.status,
        attempt.error,
        attempt.detail
    ])?;
    let due: Option<i64> = match verdict {
        HeadVerdict::Ended(outcome) => {
            db.prepare_cached("UPDATE message SET outcome = ?, ended_at = ? WHERE lane = ? AND position = ?")?
                .execute(params![outcome_text(outcome), now.0, lane, position])?;
            db.prepare_cached(
                "UPDATE lane SET head = head + 1, attempts = 0, first_attempt_at = NULL,
                     due_at = iif(head < tail AND state = 'open', ?, NULL)
                 WHERE id = ? AND head = ? RETURNING due_at",
            )?
            .query_row(params![now.0, lane, position], |row| row.get(0))?
        }
        HeadVerdict::TryAgain { at } => db
            .prepare_cached(
                "UPDATE lane SET attempts = ?, first_attempt_at = ?, due_at = iif(state = 'open', ?, NULL)
                 WHERE id = ? AND head = ? RETURNING due_at",
            )?
            .query_row(params![state.attempts, state.first_attempt_at.map(|at| at.0), at.0, lane, position], |row| {
                row.get(0)
            })?,
        HeadVerdict::Park => {
            db.prepare_cached(
                "UPDATE lane SET state = 'parked', attempts = ?, due_at = NULL WHERE id = ? AND head = ?",
            )?
            .execute(params![state.attempts, lane, position])?;
            None
        }
    };
    Ok(due.map(Stamp))
}

fn outcome_text(outcome: MessageOutcome) -> &'static str {
    match outcome {
        MessageOutcome::Delivered => "delivered",
        MessageOutcome::Exhausted => "exhausted",
        MessageOutcome::AbortedByReceiver => "aborted-by-receiver",
        MessageOutcome::SkippedByOperator => "skipped-by-operator",
    }
}

pub(crate) fn health(db: &Connection, endpoint: &str) -> Result<EndpointHealth> {
    let text: Option<String> = db
        .prepare_cached("SELECT health FROM endpoint WHERE name = ?")?
        .query_row([endpoint], |row| row.get(0))
        .optional()?;
    let parse = |text: String| {
        serde_json::from_str(&text)
            .map_err(|error| rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, error.into()))
    };
    text.map_or_else(|| Ok(EndpointHealth::default()), parse)
}

pub(crate) fn set_health(db: &Connection, endpoint: &str, health: &EndpointHealth) -> Result<()> {
    let text = serde_json::to_string(health).map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))?;
    db.prepare_cached("INSERT INTO endpoint (name, health) VALUES (?1, ?2) ON CONFLICT DO UPDATE SET health = ?2")?
        .execute([endpoint, &text])?;
    Ok(())
}

pub(crate) fn counts(db: &Connection, endpoint: &str) -> Result<Counts> {
    db.prepare_cached(
        "SELECT count(*), coalesce(sum(tail - head + 1), 0),
                min((SELECT event.received_at FROM message JOIN event ON event.id = message.event
                     WHERE message.lane = lane.id AND message.position = lane.head))
         FROM lane WHERE endpoint = ? AND head <= tail",
    )?
    .query_row([endpoint], |row| Ok(Counts { lanes: row.get(0)?, messages: row.get(1)?, oldest: row.get(2)? }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::lane::retry::OnExhausted;

    fn database() -> Connection {
        let db = Connection::open_in_memory().unwrap();
        db.execute_batch(include_str!("schema.sql")).unwrap();
        db
    }

    fn names(all: &[&str]) -> Vec<Arc<str>> {
        all.iter().map(|name| Arc::from(*name)).collect()
    }

    fn event(id: &str, key: &str, epoch: Option<u32>) -> Event {
        let data = serde_json::value::RawValue::from_string("{ \"a\":  1}".to_owned()).unwrap();
        let (source, r#type) = ("test".to_owned(), "build.finished".to_owned());
        Event { source, id: id.to_owned(), r#type, key: key.to_owned(), epoch, time: None, data }
    }

    fn ended(db: &Connection, lane: LaneId, verdict: HeadVerdict) -> Option<Stamp> {
        let head = head(db, lane).unwrap().unwrap();
        let mut state = head.state;
        state.attempts += 1;
        let attempt =
            AttemptRecord { started_at: Stamp(1), took_ms: 1, status: Some(200), error: None, detail: Vec::new() };
        end_attempt(db, &head, state, &attempt, verdict, Stamp(7)).unwrap()
    }

    #[test]
    fn an_event_is_stored_once_and_in_the_lane_of_each_endpoint() {
        let db = database();
        let added = add(&db, &event("1", "k", None), &names(&["a", "b"]), Stamp(5)).unwrap();
        assert_eq!(added, Added::Stored { lanes: 2 });
        assert_eq!(add(&db, &event("1", "k", None), &names(&["a", "b"]), Stamp(6)).unwrap(), Added::Duplicate);
        let [a, b] = ["a", "b"].map(|endpoint| due(&db, endpoint, Stamp(5), 9).unwrap());
        assert_eq!((a.len(), b.len(), due(&db, "a", Stamp(4), 9).unwrap().len()), (1, 1, 0));
        let head = head(&db, a[0]).unwrap().unwrap();
        assert_eq!((head.key.as_str(), head.data.as_slice()), ("k", b"{ \"a\":  1}".as_slice()), "byte for byte");
        assert_eq!(counts(&db, "a").unwrap(), Counts { lanes: 1, messages: 1, oldest: Some(5) });
    }

    #[test]
    fn p1_a_lane_goes_on_only_from_a_head_that_has_ended_and_counts_without_gaps() {
        let db = database();
        for (id, epoch) in [("1", None), ("2", None), ("3", Some(1)), ("4", Some(0)), ("5", Some(1))] {
            add(&db, &event(id, "k", epoch), &names(&["a"]), Stamp(5)).unwrap();
        }
        let [lane] = due(&db, "a", Stamp(5), 9).unwrap()[..] else { panic!("one lane") };
        let mut seen = Vec::new();
        let again = HeadVerdict::TryAgain { at: Stamp(99) };
        assert_eq!(
            (ended(&db, lane, again), next_due(&db, "a", Stamp(5)).unwrap()),
            (Some(Stamp(99)), Some(Stamp(99)))
        );
        loop {
            let head = head(&db, lane).unwrap().unwrap();
            seen.push((head.event_id.parse::<u32>().unwrap(), head.epoch, head.seq, head.state.attempts));
            if ended(&db, lane, HeadVerdict::Ended(MessageOutcome::Delivered)).is_none() {
                break;
            }
        }
        assert_eq!(seen, [(1, 0, 1, 1), (2, 0, 2, 0), (3, 1, 1, 0), (4, 1, 2, 0), (5, 1, 3, 0)]);
        assert_eq!((next_due(&db, "a", Stamp(5)).unwrap(), counts(&db, "a").unwrap().messages), (None, 0));
        add(&db, &event("6", "k", None), &names(&["a"]), Stamp(50)).unwrap();
        assert_eq!(due(&db, "a", Stamp(50), 9).unwrap(), [lane], "an empty lane begins again");
    }

    #[test]
    fn a_parked_lane_is_not_due_and_keeps_what_follows() {
        let db = database();
        add(&db, &event("1", "k", None), &names(&["a"]), Stamp(5)).unwrap();
        let lane = due(&db, "a", Stamp(5), 9).unwrap()[0];
        assert_eq!(ended(&db, lane, HeadVerdict::Park), None, "{:?}", OnExhausted::Park);
        add(&db, &event("2", "k", None), &names(&["a"]), Stamp(6)).unwrap();
        assert_eq!((next_due(&db, "a", Stamp(5)).unwrap(), counts(&db, "a").unwrap().messages), (None, 2));
    }

    #[test]
    fn the_health_of_an_endpoint_is_kept() {
        let db = database();
        let failing = EndpointHealth { failures: 3, failing_since: Some(Stamp(4)), ..EndpointHealth::default() };
        assert_eq!(health(&db, "a").unwrap(), EndpointHealth::default());
        set_health(&db, "a", &failing).unwrap();
        set_health(&db, "a", &failing).unwrap();
        assert_eq!(health(&db, "a").unwrap(), failing);
    }
}
