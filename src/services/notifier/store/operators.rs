//! The statements of operators: the state of endpoints, what is in the lanes, and what is changed by hand.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::sql::{SqlError, Value, parameters, read, values};
use super::statements::generation;
use super::transaction::Tx;
use journeyman_domain::lane::dispatcher::LaneId;
use journeyman_domain::lane::endpoint::{DisableReason, EndpointHealth};
use journeyman_domain::limits::{NOTIFIER_REPLAY_LANES, NOTIFIER_SEARCH_EVENTS, NOTIFIER_SEARCH_STEPS};
use journeyman_domain::staged::Stamp;

type Result<T> = std::result::Result<T, SqlError>;

/// What the store knows of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct EndpointState {
    pub(crate) health: EndpointHealth,
    pub(crate) disabled: Option<DisableReason>,
    pub(crate) paused_until: Option<Stamp>,
    /// An operator's words.
    pub(crate) note: Option<String>,
    /// Sealed, of an endpoint that is in no configuration.
    pub(crate) settings: Option<Vec<u8>>,
}

/// What an operator does with an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndpointChange {
    /// `None` ends a pause.
    Pause {
        until: Option<Stamp>,
    },
    Disable(DisableReason),
    /// It is healthy again until it is tried.
    Enable,
    /// Its heads are tried at once; it is enabled if it was disabled, and resumed if it was paused.
    Redeliver,
}

/// What an operator does with a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LaneChange {
    Pause {
        until: Stamp,
    },
    /// It is open, if it was paused or parked.
    Resume,
    /// The head is never delivered, if it still is this message.
    SkipHead {
        position: i64,
    },
}

/// How many lanes have messages, and how many messages wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counts {
    pub lanes: u32,
    /// The lanes among them that are parked.
    pub parked: u32,
    pub paused: u32,
    pub messages: i64,
    /// Since when the oldest head waits.
    pub oldest: Option<Stamp>,
    /// The time at which the first head is due, if the endpoint lets it.
    pub(crate) next_due: Option<Stamp>,
}

/// The last failed attempt of the heads of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastFailure {
    pub at: Stamp,
    pub status: Option<u32>,
    pub error: Option<String>,
    pub detail: String,
}

/// A lane, as operators see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaneRow {
    pub id: i64,
    pub endpoint: String,
    pub key: String,
    /// `open`, `parked` or `paused`.
    pub state: String,
    pub note: Option<String>,
    pub epoch: u32,
    /// The number of the last message.
    pub(crate) seq: i64,
    /// The first message that waits.
    pub head: i64,
    pub waiting: i64,
    pub attempts: u32,
    pub due_at: Option<Stamp>,
    /// The time at which the head came.
    pub head_since: Option<Stamp>,
    pub head_type: Option<String>,
}

/// An attempt, as operators see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttemptRow {
    pub endpoint: String,
    pub key: String,
    pub lane: i64,
    pub position: i64,
    pub(crate) epoch: u32,
    pub(crate) seq: i64,
    pub event_id: String,
    pub r#type: String,
    pub number: i64,
    pub started_at: Stamp,
    pub took_ms: i64,
    pub status: Option<i64>,
    pub error: Option<String>,
    pub detail: String,
}

/// A message, as operators see it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MessageRow {
    pub lane: i64,
    pub position: i64,
    pub endpoint: String,
    pub key: String,
    pub epoch: u32,
    pub seq: i64,
    /// The place of its event among all events.
    pub event: i64,
    pub source: String,
    pub event_id: String,
    pub r#type: String,
    pub received_at: Stamp,
    /// `waiting` until it has ended.
    pub outcome: String,
    pub ended_at: Option<Stamp>,
    pub note: Option<String>,
    /// What the event carries, if it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<Box<RawValue>>,
}

/// A page of messages, the latest event first.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct MessagePage {
    pub messages: Vec<MessageRow>,
    /// The `before` of the next page; absent on the last one.
    pub next: Option<i64>,
}

/// Which messages are listed; what is absent, or an empty text, narrows nothing.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MessageFilter {
    pub endpoint: Option<String>,
    pub key: Option<String>,
    pub r#type: Option<String>,
    pub event_id: Option<String>,
    /// `waiting`, an outcome, or `dead` for those that were never delivered.
    pub outcome: Option<String>,
    /// A text in the data of the event.
    pub contains: Option<String>,
    /// The place of an event.
    pub before: Option<i64>,
    pub limit: Option<usize>,
    /// The data is listed too.
    pub data: bool,
}

impl MessageFilter {
    /// The filter without its empty texts, which a form sends.
    pub(crate) fn without_empty_texts(self) -> Self {
        let given = |text: Option<String>| text.filter(|text| !text.is_empty());
        Self {
            endpoint: given(self.endpoint),
            key: given(self.key),
            r#type: given(self.r#type),
            event_id: given(self.event_id),
            outcome: given(self.outcome),
            contains: given(self.contains),
            ..self
        }
    }

    fn matches(&self, outcome: &str, data: &[u8]) -> bool {
        let is_wanted = match self.outcome.as_deref() {
            Some("dead") => !matches!(outcome, "waiting" | "delivered"),
            Some(wanted) => wanted == outcome,
            None => true,
        };
        let has = |text: &String| data.windows(text.len()).any(|part| part == text.as_bytes());
        is_wanted && self.contains.as_ref().is_none_or(has)
    }
}

/// The `started_at`, `lane`, `position` and `number` of an attempt, by which the page after it is asked for.
pub(crate) type AttemptPlace = [i64; 4];

/// Messages that have ended, by what they are.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReplayFilter {
    pub(crate) endpoint: String,
    /// The earliest time at which their events came.
    pub(crate) since: Option<Timestamp>,
    pub(crate) until: Option<Timestamp>,
    pub(crate) key: Option<String>,
    pub(crate) r#type: Option<String>,
    pub(crate) event_id: Option<String>,
    /// Such as `exhausted`; any outcome otherwise.
    pub(crate) outcome: Option<String>,
    /// They are only counted.
    #[serde(default)]
    pub(crate) dry_run: bool,
}

/// What the store knows of its endpoints.
#[derive(Debug, Default)]
pub(crate) struct StoredEndpoints {
    /// The generation of these states, or a later one.
    pub(crate) generation: i64,
    pub(crate) states: BTreeMap<String, EndpointState>,
}

pub(super) async fn endpoints(db: &mut Tx<'_>) -> Result<StoredEndpoints> {
    let generation = generation(db).await?;
    let select = "SELECT name, health, disabled, paused_until, note, settings FROM endpoint";
    let mut all = BTreeMap::new();
    for mut row in db.query(select, values![]).await? {
        let name = row.take()?;
        let state = EndpointState {
            health: row.take::<Option<String>>()?.map_or_else(|| Ok(EndpointHealth::default()), |text| parse(&text))?,
            disabled: row.take::<Option<String>>()?.map(|text| parse(&format!("\"{text}\""))).transpose()?,
            paused_until: row.take()?,
            note: row.take()?,
            settings: row.take()?,
        };
        all.insert(name, state);
    }
    Ok(StoredEndpoints { generation, states: all })
}

fn parse<T: serde::de::DeserializeOwned>(text: &str) -> Result<T> {
    serde_json::from_slice(text.as_bytes()).map_err(|error| SqlError::Unexpected(error.into()))
}

/// An endpoint that is disabled keeps its first reason.
pub(super) async fn change_endpoint(
    db: &mut Tx<'_>,
    endpoint: &str,
    change: EndpointChange,
    note: Option<&str>,
    now: Stamp,
) -> Result<()> {
    db.execute("INSERT INTO endpoint (name) VALUES ($1) ON CONFLICT DO NOTHING", values![endpoint]).await?;
    match change {
        EndpointChange::Pause { until } => {
            let update = "UPDATE endpoint SET paused_until = $2, note = $3 WHERE name = $1";
            db.execute(update, values![endpoint, until, note]).await?;
        }
        EndpointChange::Disable(reason) => {
            let update =
                "UPDATE endpoint SET disabled = $2, note = coalesce($3, note) WHERE name = $1 AND disabled IS NULL";
            db.execute(update, values![endpoint, reason.as_str(), note]).await?;
        }
        EndpointChange::Enable => {
            let update = "UPDATE endpoint SET disabled = NULL, health = NULL, note = $2 WHERE name = $1";
            db.execute(update, values![endpoint, note]).await?;
        }
        EndpointChange::Redeliver => {
            let update =
                "UPDATE endpoint SET disabled = NULL, paused_until = NULL, health = NULL, note = $2 WHERE name = $1";
            db.execute(update, values![endpoint, note]).await?;
            let update = "UPDATE lane SET due_at = $2 WHERE endpoint = $1 AND due_at > $2";
            db.execute(update, values![endpoint, now]).await?;
        }
    }
    Ok(())
}

/// `None` removes an endpoint that is in no configuration; its lanes stay.
pub(super) async fn set_settings(db: &mut Tx<'_>, endpoint: &str, settings: Option<&[u8]>) -> Result<()> {
    db.execute(
        "INSERT INTO endpoint (name, settings) VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET settings = $2",
        values![endpoint, settings],
    )
    .await?;
    begin_generation(db).await
}

pub(super) async fn begin_generation(db: &mut Tx<'_>) -> Result<()> {
    db.execute("UPDATE registry SET generation = generation + 1", values![]).await.map(drop)
}

pub(super) const COUNTS: &str =
    "SELECT endpoint, count(*), CAST(coalesce(sum(CASE WHEN state = 'parked' THEN 1 ELSE 0 END), 0) AS BIGINT),
                    CAST(coalesce(sum(CASE WHEN state = 'paused' THEN 1 ELSE 0 END), 0) AS BIGINT),
                    CAST(coalesce(sum(tail - head + 1 + (SELECT count(*) FROM replay WHERE replay.lane = lane.id)), 0) AS BIGINT),
                    min((SELECT event.received_at FROM message JOIN event ON event.id = message.event
                         WHERE message.lane = lane.id AND message.position = lane.head)),
                    min(due_at)
             FROM lane WHERE id IN (SELECT id FROM lane WHERE head <= tail AND endpoint > '' UNION ALL SELECT lane FROM replay) GROUP BY endpoint";

/// The failures of the heads.
pub(super) const LAST_FAILURES: &str =
    "SELECT last.endpoint, attempt.started_at, attempt.status, attempt.error, attempt.detail
             FROM (SELECT lane.endpoint, attempt.lane, attempt.position, attempt.number,
                       row_number() OVER (PARTITION BY lane.endpoint ORDER BY attempt.started_at DESC) AS place
                   FROM lane JOIN attempt ON attempt.lane = lane.id AND attempt.position = lane.head
                   WHERE lane.head <= lane.tail AND lane.endpoint > '') AS last
             JOIN attempt ON attempt.lane = last.lane AND attempt.position = last.position AND attempt.number = last.number
             WHERE last.place = 1";

/// What waits at the endpoints that have any, and the last failure of their heads.
pub(super) async fn counts(db: &mut Tx<'_>) -> Result<BTreeMap<String, (Counts, Option<LastFailure>)>> {
    let rows = db.query(COUNTS, values![]).await?;
    let mut all = BTreeMap::new();
    for mut row in rows {
        let endpoint = row.take()?;
        let read = read!(Counts => lanes, parked, paused, messages, oldest, next_due);
        all.insert(endpoint, (read(row)?, None));
    }
    let failed = db.query(LAST_FAILURES, values![]).await?;
    for mut row in failed {
        if let Some((_, failure)) = all.get_mut(&row.take::<String>()?) {
            let read = read!(LastFailure => at, status, error, detail);
            *failure = Some(read(row)?);
        }
    }
    Ok(all)
}

/// The lanes where a condition holds.
macro_rules! lanes {
    ($condition:expr) => {
        concat!(
            "SELECT lane.id, lane.endpoint, lane.key, lane.state, lane.note, lane.epoch, lane.seq,
                    coalesce(replay.position, lane.head),
                    lane.tail - lane.head + 1 + (SELECT count(*) FROM replay WHERE replay.lane = lane.id),
                    CASE WHEN replay.position IS NULL THEN lane.attempts ELSE replay.attempts END,
                    lane.due_at, event.received_at, event.type
             FROM lane
             LEFT JOIN replay ON replay.lane = lane.id
                 AND replay.position = (SELECT min(one.position) FROM replay AS one WHERE one.lane = lane.id)
             LEFT JOIN message ON message.lane = lane.id AND message.position = coalesce(replay.position, lane.head)
             LEFT JOIN event ON event.id = message.event
             WHERE ",
            $condition,
            " ORDER BY coalesce(event.received_at, CAST(9223372036854775807 AS BIGINT)), lane.id LIMIT $1"
        )
    };
}

pub(super) const LANES: &str = lanes!(
    "lane.id IN (SELECT id FROM lane WHERE head <= tail AND endpoint > '' UNION ALL SELECT id FROM lane WHERE state <> 'open'
         UNION ALL SELECT lane FROM replay)"
);
pub(super) const LANES_OF_ENDPOINT: &str = lanes!(
    "lane.id IN (SELECT id FROM lane WHERE head <= tail AND endpoint = $2 UNION ALL SELECT id FROM lane WHERE state <> 'open'
         UNION ALL SELECT lane FROM replay) AND lane.endpoint || '' = $2"
);
pub(super) const LANES_OF_KEY: &str = lanes!("lane.key = $3 AND lane.endpoint = coalesce($2, lane.endpoint)");

/// The lanes that have messages or are stopped, those with the oldest heads first; or the lanes of one key.
pub(super) async fn lanes(
    db: &mut Tx<'_>,
    endpoint: Option<&str>,
    key: Option<&str>,
    max: usize,
) -> Result<Vec<LaneRow>> {
    let rows = match (endpoint, key) {
        (_, Some(key)) => db.query(LANES_OF_KEY, values![max, endpoint, key]).await?,
        (Some(endpoint), None) => db.query(LANES_OF_ENDPOINT, values![max, endpoint]).await?,
        (None, None) => db.query(LANES, values![max]).await?,
    };
    let read = read!(LaneRow => id, endpoint, key, state, note, epoch, seq, head, waiting, attempts, due_at, head_since, head_type);
    rows.into_iter().map(read).collect()
}

/// The last attempts where a condition holds, in an order that has an index.
macro_rules! attempts {
    ($condition:expr, $order:expr) => {
        concat!(
            "SELECT attempt.endpoint, lane.key, attempt.lane, attempt.position, message.epoch, message.seq, event.source_id, event.type,
                    attempt.number, attempt.started_at, attempt.took_ms, attempt.status, attempt.error, attempt.detail
             FROM (SELECT * FROM attempt WHERE ",
            $condition,
            " ORDER BY ",
            $order,
            " LIMIT $1) AS attempt
             JOIN lane ON lane.id = attempt.lane
             JOIN message ON message.lane = attempt.lane AND message.position = attempt.position
             JOIN event ON event.id = message.event
             ORDER BY ",
            $order
        )
    };
}

/// The place of an attempt in the order.
macro_rules! by_time {
    () => {
        "attempt.started_at DESC, attempt.lane DESC, attempt.position DESC, attempt.number DESC"
    };
}

pub(super) const ATTEMPTS: &str = attempts!("(started_at, lane, position, number) < ($2, $3, $4, $5)", by_time!());
pub(super) const ATTEMPTS_OF_ENDPOINT: &str =
    attempts!("endpoint = $6 AND (started_at, lane, position, number) < ($2, $3, $4, $5)", by_time!());
pub(super) const ATTEMPTS_OF_LANE: &str =
    attempts!("lane = $2 AND (position, number) < ($3, $4)", "attempt.position DESC, attempt.number DESC");

/// The attempts before one, the latest first; those of a lane by its messages, the last one first.
pub(super) async fn attempts(
    db: &mut Tx<'_>,
    endpoint: Option<&str>,
    lane: Option<i64>,
    before: Option<AttemptPlace>,
    max: usize,
) -> Result<Vec<AttemptRow>> {
    let [at, last_lane, position, number] = before.unwrap_or([i64::MAX; 4]);
    let rows = match (endpoint, lane) {
        (_, Some(lane)) => db.query(ATTEMPTS_OF_LANE, values![max, lane, position, number]).await?,
        (Some(endpoint), None) => {
            db.query(ATTEMPTS_OF_ENDPOINT, values![max, at, last_lane, position, number, endpoint]).await?
        }
        (None, None) => db.query(ATTEMPTS, values![max, at, last_lane, position, number]).await?,
    };
    let read = read!(AttemptRow =>
        endpoint, key, lane, position, epoch, seq, event_id, r#type, number,
        started_at, took_ms, status, error, detail);
    rows.into_iter().map(read).collect()
}

/// Messages with their events, of the events where a condition holds.
macro_rules! messages {
    ($events:expr, $condition:expr) => {
        concat!(
            "SELECT message.lane, message.position, lane.endpoint, lane.key, message.epoch, message.seq, event.id, event.source,
                    event.source_id, event.type, event.received_at, coalesce(message.outcome, 'waiting'), message.ended_at,
                    message.note, CASE WHEN CAST($6 AS BIGINT) = 1 THEN event.data END
             FROM (",
            $events,
            ") AS event
             JOIN message ON message.event = event.id
             JOIN lane ON lane.id = message.lane
             WHERE ",
            $condition,
            " ORDER BY event.id DESC, message.lane"
        )
    };
}

pub(super) const MESSAGES: &str = messages!(
    "SELECT * FROM event WHERE id < $2 ORDER BY id DESC LIMIT $1",
    "lane.endpoint = coalesce($3, lane.endpoint) AND lane.key = coalesce($4, lane.key) AND event.type = coalesce($5, event.type)"
);
pub(super) const MESSAGES_OF_EVENT: &str = messages!(
    "SELECT * FROM event WHERE source_id = $2 ORDER BY id DESC LIMIT $1",
    "lane.endpoint = coalesce($3, lane.endpoint) AND lane.key = coalesce($4, lane.key) AND event.type = coalesce($5, event.type)"
);
pub(super) const MESSAGE: &str = messages!(
    "SELECT event.* FROM event JOIN message ON message.event = event.id WHERE message.lane = $1 AND message.position = $2",
    "message.lane = $1 AND message.position = $2 AND CAST($3 AS BIGINT) + CAST($4 AS BIGINT) + CAST($5 AS BIGINT) = 0"
);
pub(super) const SCANNED: &str =
    "SELECT count(*), min(id) FROM (SELECT id FROM event WHERE id < $2 ORDER BY id DESC LIMIT $1) AS scanned";

/// A message, and its data if that was read.
type WithData = (MessageRow, Option<Vec<u8>>);

fn read_message(mut row: super::sql::Row) -> Result<WithData> {
    let message = MessageRow {
        lane: row.take()?,
        position: row.take()?,
        endpoint: row.take()?,
        key: row.take()?,
        epoch: row.take()?,
        seq: row.take()?,
        event: row.take()?,
        source: row.take()?,
        event_id: row.take()?,
        r#type: row.take()?,
        received_at: row.take()?,
        outcome: row.take()?,
        ended_at: row.take()?,
        note: row.take()?,
        data: None,
    };
    Ok((message, row.take()?))
}

fn with_data((message, data): WithData) -> MessageRow {
    let data = data.and_then(|data| String::from_utf8(data).ok()).and_then(|text| RawValue::from_string(text).ok());
    MessageRow { data, ..message }
}

/// Looks at a limited number of events; the next page goes on behind them.
pub(super) async fn messages(db: &mut Tx<'_>, filter: &MessageFilter, max: usize) -> Result<MessagePage> {
    let mut page = MessagePage::default();
    let found = |rows: Vec<super::sql::Row>| rows.into_iter().map(read_message).collect::<Result<Vec<_>>>();
    let keep = |(message, data): &WithData| filter.matches(&message.outcome, data.as_deref().unwrap_or_default());
    let shown = |one: WithData| if filter.data { with_data(one) } else { one.0 };
    let MessageFilter { endpoint, key, r#type, .. } = filter;
    let reads_data = i64::from(filter.data || filter.contains.is_some());
    if let Some(event_id) = &filter.event_id {
        let (id, endpoint, key, of_type) = (event_id.as_str(), endpoint.as_deref(), key.as_deref(), r#type.as_deref());
        let given = values![NOTIFIER_SEARCH_EVENTS, id, endpoint, key, of_type, reads_data];
        let rows = db.query(MESSAGES_OF_EVENT, given).await?;
        page.messages.extend(found(rows)?.into_iter().filter(keep).map(shown));
        return Ok(page);
    }
    let mut before = filter.before.unwrap_or(i64::MAX);
    for _ in 0..NOTIFIER_SEARCH_STEPS {
        let mut scanned = db.query(SCANNED, values![NOTIFIER_SEARCH_EVENTS, before]).await?;
        let Some(mut scanned) = scanned.pop() else { break };
        let (count, lowest): (i64, Option<i64>) = (scanned.take()?, scanned.take()?);
        let of = [endpoint.as_deref(), key.as_deref(), r#type.as_deref()];
        let given = values![NOTIFIER_SEARCH_EVENTS, before, of[0], of[1], of[2], reads_data];
        let rows = found(db.query(MESSAGES, given).await?)?;
        for one in rows.into_iter().filter(keep) {
            // The messages of one event stay together.
            if page.messages.len() >= max && page.messages.last().is_some_and(|last| last.event != one.0.event) {
                page.next = page.messages.last().map(|last| last.event);
                return Ok(page);
            }
            page.messages.push(shown(one));
        }
        page.next = lowest.filter(|_| count >= i64::try_from(NOTIFIER_SEARCH_EVENTS).unwrap_or(i64::MAX));
        let Some(lowest) = page.next else { break };
        before = lowest;
        if page.messages.len() >= max {
            break;
        }
    }
    Ok(page)
}

/// One message with its data.
pub(super) async fn message(db: &mut Tx<'_>, lane: i64, position: i64) -> Result<Option<MessageRow>> {
    let row = db.query(MESSAGE, values![lane, position, 0_i64, 0_i64, 0_i64, 1_i64]).await?.pop();
    row.map(|row| read_message(row).map(with_data)).transpose()
}

/// Returns whether there is such a lane, whose head is that message.
pub(super) async fn change_lane(
    db: &mut Tx<'_>,
    LaneId(lane): LaneId,
    change: LaneChange,
    note: Option<&str>,
    now: Stamp,
) -> Result<bool> {
    let updated = match change {
        LaneChange::Pause { until } => {
            let update = "UPDATE lane SET state = 'paused', paused_until = $2, note = $3, due_at = NULL WHERE id = $1";
            db.execute(update, values![lane, until, note]).await?
        }
        LaneChange::Resume => {
            let update = "UPDATE lane SET state = 'open', paused_until = NULL, note = $2, first_attempt_at = NULL,
                     due_at = CASE WHEN head <= tail OR EXISTS (SELECT 1 FROM replay WHERE replay.lane = lane.id)
                         THEN CAST($3 AS BIGINT) END
                 WHERE id = $1";
            db.execute(update, values![lane, note, now]).await?
        }
        LaneChange::SkipHead { position } => {
            let delete = "DELETE FROM replay WHERE lane = $1 AND position = $2
                     AND position = (SELECT min(position) FROM replay WHERE lane = $1)";
            if db.execute(delete, values![lane, position]).await? > 0 {
                let update = "UPDATE message SET note = $3 WHERE lane = $1 AND position = $2";
                db.execute(update, values![lane, position, note]).await?;
                let update = "UPDATE lane SET state = CASE WHEN state = 'parked' THEN 'open' ELSE state END,
                         due_at = CASE WHEN state <> 'paused' AND (head <= tail
                             OR EXISTS (SELECT 1 FROM replay WHERE replay.lane = lane.id)) THEN CAST($2 AS BIGINT) END
                     WHERE id = $1";
                db.execute(update, values![lane, now]).await?;
                return Ok(true);
            }
            let update = "UPDATE lane SET head = head + 1, attempts = 0, first_attempt_at = NULL,
                     state = CASE WHEN state = 'parked' THEN 'open' ELSE state END,
                     due_at = CASE WHEN state <> 'paused' AND (head < tail
                         OR EXISTS (SELECT 1 FROM replay WHERE replay.lane = lane.id)) THEN CAST($3 AS BIGINT) END
                 WHERE id = $1 AND head = $2 AND head <= tail
                     AND NOT EXISTS (SELECT 1 FROM replay WHERE replay.lane = lane.id)";
            let updated = db.execute(update, values![lane, position, now]).await?;
            if updated > 0 {
                let update = "UPDATE message SET outcome = 'skipped-by-operator', note = $3, ended_at = $4
                     WHERE lane = $1 AND position = $2";
                db.execute(update, values![lane, position, note, now]).await?;
            }
            updated
        }
    };
    if updated == 0
        && let LaneChange::SkipHead { position } = change
    {
        return was_skipped(db, lane, position, note).await;
    }
    Ok(updated > 0)
}

/// The answer of an earlier call may be lost: its words are with the message.
async fn was_skipped(db: &mut Tx<'_>, lane: i64, position: i64, note: Option<&str>) -> Result<bool> {
    let select = "SELECT position FROM message WHERE lane = $1 AND position = $2 AND note = $3 AND outcome IS NOT NULL
                      AND NOT EXISTS (SELECT 1 FROM replay WHERE replay.lane = $1 AND replay.position = $2)";
    Ok(db.first(select, values![lane, position, note]).await?.is_some())
}

/// Opens the lanes whose pause has ended. Returns when the next one ends.
pub(super) async fn end_pauses(db: &mut Tx<'_>, now: Stamp) -> Result<Option<Stamp>> {
    db.execute(
        "UPDATE lane SET state = 'open', paused_until = NULL, note = NULL,
             due_at = CASE WHEN head <= tail OR EXISTS (SELECT 1 FROM replay WHERE replay.lane = lane.id)
                 THEN CAST($1 AS BIGINT) END
         WHERE state = 'paused' AND paused_until <= $1",
        values![now],
    )
    .await?;
    let next = db.first("SELECT min(paused_until) FROM lane WHERE state = 'paused'", values![]).await?;
    next.map_or(Ok(None), |mut row| row.take())
}

/// Of lanes with these keys, the messages that have ended for which a filter is true, and its condition on their event.
macro_rules! matching {
    ($select:expr, $condition:expr) => {
        concat!(
            $select,
            " FROM lane JOIN message ON message.lane = lane.id JOIN event ON event.id = message.event
             WHERE lane.endpoint = $1 AND lane.key >= $2 AND lane.key <= $3 AND message.outcome IS NOT NULL
                 AND (CAST($4 AS BIGINT) IS NULL OR event.received_at >= $4)
                 AND (CAST($5 AS BIGINT) IS NULL OR event.received_at < $5)
                 AND (CAST($6 AS TEXT) IS NULL OR event.type = $6)
                 AND (CAST($7 AS TEXT) IS NULL OR message.outcome = $7)
                 AND ",
            $condition
        )
    };
}

/// A statement for any event, and one for an event's id, which has an index.
macro_rules! for_filter {
    ($filter:ident, $select:expr, $end:expr) => {
        if $filter.event_id.is_some() {
            concat!(matching!($select, "event.source_id = $8"), $end)
        } else {
            concat!(matching!($select, "CAST($8 AS TEXT) IS NULL"), $end)
        }
    };
}

/// The first and the last of the keys of some lanes.
pub(super) type Keys = (String, String);

fn conditions(filter: &ReplayFilter, (first, last): &Keys) -> Vec<Value> {
    let ReplayFilter { endpoint, since, until, r#type, event_id, outcome, .. } = filter;
    let (since, until) = (since.map(Timestamp::as_millisecond), until.map(Timestamp::as_millisecond));
    parameters![endpoint, first, last, since, until, r#type.as_ref(), outcome.as_ref(), event_id.as_ref()]
}

/// The keys that a filter may be true for after one of them: few, unless an index finds its messages among all.
pub(super) async fn next_keys(db: &mut Tx<'_>, filter: &ReplayFilter, after: &str) -> Result<Option<Keys>> {
    let max = filter.event_id.as_ref().map_or(NOTIFIER_REPLAY_LANES, |_| usize::MAX);
    let select = "SELECT min(key), max(key)
                  FROM (SELECT key FROM lane WHERE endpoint = $1 AND key > $2 ORDER BY key LIMIT $3) AS next";
    let row = db.first(select, values![&filter.endpoint, after, max]).await?;
    row.map_or(Ok(None), |mut row| Ok(row.take::<Option<_>>()?.zip(row.take()?)))
}

/// How many messages that have ended a filter is true for.
pub(super) async fn count_ended(db: &mut Tx<'_>, filter: &ReplayFilter, keys: &Keys) -> Result<i64> {
    let row = db.first(for_filter!(filter, "SELECT count(*)", ""), &conditions(filter, keys)).await?;
    row.map_or(Ok(0), |mut row| row.take())
}

/// Sends these messages once more, each lane's in their order.
pub(super) async fn replay(db: &mut Tx<'_>, filter: &ReplayFilter, keys: &Keys, now: Stamp) -> Result<()> {
    let insert = for_filter!(
        filter,
        "INSERT INTO replay (lane, position) SELECT message.lane, message.position",
        " ON CONFLICT DO NOTHING"
    );
    db.execute(insert, &conditions(filter, keys)).await?;
    let update = "UPDATE lane SET due_at = $4 WHERE endpoint = $1 AND key >= $2 AND key <= $3 AND state = 'open'
                      AND id IN (SELECT lane FROM replay)";
    db.execute(update, values![&filter.endpoint, &keys.0, &keys.1, now]).await.map(drop)
}
