//! Headers of requests in the poison queue: which worker exited while it held the request, and how.

use std::collections::BTreeMap;

use lapin::message::Delivery;
use lapin::options::BasicPublishOptions;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Confirmation};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::error_replies::DeadLetterReason;
use super::message_headers::{PERSISTENT, integer, without_user_id};
use super::queue_names::QueueNames;
use super::session_error::SessionError;
use journeyman_domain::limits::{
    CONTROLLER_HEADERS_BYTES_MAX, CONTROLLER_LOG_TAIL_LINES_MAX, DRIVER_EXIT_REASON_CHARS_MAX,
};
use journeyman_platform::amqp::headers;
use journeyman_platform::redact;

const ID: &str = "x-journeyman-poison-id";
const KEY: &str = "x-journeyman-key";
const REASON: &str = "x-journeyman-reason";
const SOURCE_QUEUE: &str = "x-journeyman-queue";
const ATTEMPTS: &str = "x-journeyman-attempts";
const POISONED_AT: &str = "x-journeyman-poisoned-at";
const POISON_COUNT: &str = "x-journeyman-poison-count";
const WORKER: &str = "x-journeyman-worker";
const WORKER_EXIT: &str = "x-journeyman-worker-exit";
const WORKER_LOG: &str = "x-journeyman-worker-log";

const OWN_PREFIX: &str = "x-journeyman-";
const BROKER_PREFIXES: [&str; 4] = ["x-death", "x-first-death-", "x-last-death-", "x-delivery-count"];
const ID_DIGITS: usize = 12;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoisonedRequest {
    pub id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    pub reason: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempts: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poisoned_at: Option<String>,
    pub poison_count: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_exit: Option<String>,
    #[serde(default)]
    pub worker_log: Vec<String>,
    pub body_bytes: usize,
    pub properties: BTreeMap<String, String>,
    pub headers: BTreeMap<String, String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ExitedWorker {
    pub(super) id: String,
    pub(super) exit: String,
    pub(super) log: Vec<String>,
}

impl ExitedWorker {
    pub(super) fn new(id: &str, reason: &str, log_tail: &str) -> Self {
        let first = |text: &str| text.chars().take(DRIVER_EXIT_REASON_CHARS_MAX).collect::<String>();
        let log_tail = redact::text(log_tail);
        let lines: Vec<&str> = log_tail.lines().collect();
        let last = lines.get(lines.len().saturating_sub(CONTROLLER_LOG_TAIL_LINES_MAX)..).unwrap_or_default();
        Self { id: id.to_owned(), exit: first(reason), log: last.iter().map(|line| first(line)).collect() }
    }
}

/// Why a request is moved to the poison queue.
pub(super) struct PoisonCause<'a> {
    pub(super) reason: &'a DeadLetterReason,
    pub(super) attempts: Option<u64>,
    pub(super) worker: Option<&'a ExitedWorker>,
}

/// The id of the copy; `None` if the poison queue rejects it.
pub(super) async fn move_to_poison_queue(
    channel: &Channel,
    names: &QueueNames,
    delivery: &Delivery,
    cause: PoisonCause<'_>,
) -> Result<Option<String>, SessionError> {
    let properties = poison_properties(delivery, names, cause, jiff::Timestamp::now());
    let id = properties.headers().as_ref().and_then(|table| headers::text(table, ID)).unwrap_or_default().to_owned();
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    let queue = names.poison_queue();
    let publishing = channel.basic_publish("".into(), queue.as_str().into(), options, &delivery.data, properties);
    match publishing.await?.await? {
        Confirmation::Ack(Some(_)) => Err(SessionError { reason: format!("the queue {queue} was deleted") }),
        Confirmation::Nack(_) => Ok(None),
        Confirmation::Ack(None) | Confirmation::NotRequested => Ok(Some(id)),
    }
}

fn poison_properties(
    delivery: &Delivery,
    names: &QueueNames,
    PoisonCause { reason, attempts, worker }: PoisonCause<'_>,
    now: jiff::Timestamp,
) -> BasicProperties {
    let empty = FieldTable::default();
    let before = delivery.properties.headers().as_ref().unwrap_or(&empty);
    let times = headers::number(before, POISON_COUNT).unwrap_or_default().saturating_add(1);
    // Attempts that a worker noted belong to an earlier copy.
    let noted = headers::number(before, ATTEMPTS);
    let attempts = noted.or(attempts).map(|_| noted.unwrap_or_default().saturating_add(attempts.unwrap_or_default()));
    let mut table = without_own_headers(before);
    let worker = worker.filter(|_| headers::wire_bytes(&table) <= CONTROLLER_HEADERS_BYTES_MAX / 2);
    let id = uuid::Uuid::new_v4().simple().to_string();
    let mut text = |name: &str, text: &str| {
        table.insert(name.into(), AMQPValue::LongString(text.into()));
    };
    text(ID, id.get(..ID_DIGITS).unwrap_or_default());
    text(KEY, &names.original_key(delivery));
    text(REASON, &reason.reason);
    if let Some(queue) = &reason.queue {
        text(SOURCE_QUEUE, queue);
    }
    if let Some(ExitedWorker { id, exit, log }) = worker {
        text(WORKER, id);
        text(WORKER_EXIT, exit);
        text(WORKER_LOG, &log.join("\n"));
    }
    if let Some(attempts) = attempts {
        table.insert(ATTEMPTS.into(), integer(attempts));
    }
    table.insert(POISONED_AT.into(), AMQPValue::Timestamp(u64::try_from(now.as_second()).unwrap_or_default()));
    table.insert(POISON_COUNT.into(), integer(times));
    without_user_id(&delivery.properties).with_headers(table).with_delivery_mode(PERSISTENT)
}

/// An operator has put it back from the poison queue.
pub(super) fn was_requeued(delivery: &Delivery) -> bool {
    delivery.properties.headers().as_ref().is_some_and(|table| table.inner().contains_key(POISON_COUNT))
}

pub(super) fn requeue_properties(copy: &Delivery) -> BasicProperties {
    let empty = FieldTable::default();
    let before = copy.properties.headers().as_ref().unwrap_or(&empty);
    let mut table = without_own_headers(before);
    // Workers that move a request here do not count.
    table.insert(POISON_COUNT.into(), integer(headers::number(before, POISON_COUNT).unwrap_or(1)));
    without_user_id(&copy.properties).with_headers(table)
}

fn without_own_headers(table: &FieldTable) -> FieldTable {
    let mut kept = FieldTable::default();
    for (name, value) in table.inner() {
        if !is_own_header(name.as_str()) {
            kept.insert(name.clone(), value.clone());
        }
    }
    kept
}

fn is_own_header(name: &str) -> bool {
    name.starts_with(OWN_PREFIX) || BROKER_PREFIXES.iter().any(|brokers| name.starts_with(brokers))
}

pub(super) fn key(copy: &Delivery, names: &QueueNames) -> Option<String> {
    let table = copy.properties.headers().as_ref()?;
    if let Some(key) = headers::text(table, KEY) {
        return Some(key.to_owned());
    }
    names.parse_queue_name(headers::text(table, SOURCE_QUEUE)?).map(|key| names.encoded_key(&key))
}

pub(super) fn id(copy: &Delivery) -> String {
    let given = copy.properties.headers().as_ref().and_then(|table| headers::text(table, ID));
    if let Some(id) = given {
        return id.to_owned();
    }
    let digest = Sha256::new().chain_update(format!("{:?}", copy.properties)).chain_update(&copy.data).finalize();
    hex::encode(&digest[..ID_DIGITS / 2])
}

pub(super) fn describe(copy: &Delivery, names: &QueueNames) -> PoisonedRequest {
    let empty = FieldTable::default();
    let table = copy.properties.headers().as_ref().unwrap_or(&empty);
    let text = |name| headers::text(table, name).map(str::to_owned);
    let at =
        headers::number(table, POISONED_AT).and_then(|at| jiff::Timestamp::from_second(i64::try_from(at).ok()?).ok());
    let others = headers::text_entries(table).filter(|(name, _)| !is_own_header(name));
    let seen = others.map(|(name, text)| (name.to_owned(), redact::text(&text).into_owned()));
    PoisonedRequest {
        id: id(copy),
        key: key(copy, names),
        reason: text(REASON).unwrap_or_else(|| "unknown".to_owned()),
        attempts: headers::number(table, ATTEMPTS),
        poisoned_at: at.map(|at| at.to_string()),
        poison_count: headers::number(table, POISON_COUNT).unwrap_or(1),
        worker: text(WORKER),
        worker_exit: text(WORKER_EXIT),
        worker_log: text(WORKER_LOG).map(|log| log.lines().map(str::to_owned).collect()).unwrap_or_default(),
        body_bytes: copy.data.len(),
        properties: properties(&copy.properties),
        headers: seen.collect(),
    }
}

fn properties(from: &BasicProperties) -> BTreeMap<String, String> {
    let text = |value: &Option<ShortString>| value.as_ref().map(|value| value.as_str().to_owned());
    let reply_to = text(from.reply_to()).map(|reply_to| {
        // The suffix is a capability to answer in a worker's place.
        const DIRECT: &str = "amq.rabbitmq.reply-to";
        if reply_to.starts_with(DIRECT) { DIRECT.to_owned() } else { reply_to }
    });
    [
        ("correlation_id", text(from.correlation_id())),
        ("reply_to", reply_to),
        ("message_id", text(from.message_id())),
        ("type", text(from.kind())),
        ("app_id", text(from.app_id())),
        ("content_type", text(from.content_type())),
        ("content_encoding", text(from.content_encoding())),
        ("expiration", text(from.expiration())),
        ("priority", from.priority().map(|priority| priority.to_string())),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((name.to_owned(), redact::text(&value?).into_owned())))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use journeyman_platform::amqp;

    fn copied(key: &str, table: FieldTable) -> Delivery {
        let mut delivery = Delivery::mock(1, "".into(), key.into(), false, b"1234".to_vec());
        delivery.properties = BasicProperties::default()
            .with_headers(table)
            .with_reply_to("amq.rabbitmq.reply-to.token".into())
            .with_user_id("user".into())
            .with_correlation_id("c".into());
        delivery
    }

    fn text(text: &str) -> AMQPValue {
        AMQPValue::LongString(text.into())
    }

    fn letter() -> Delivery {
        let table = amqp::header_table([
            ("x-rpc-path", AMQPValue::ByteArray(b"/echo".to_vec().into())),
            ("x-first-death-reason", text("delivery_limit")),
            ("x-first-death-queue", text("core-req-a%2Fb")),
            ("x-delivery-count", integer(7)),
            ("x-death", AMQPValue::FieldArray(vec![].into())),
            ("x-journeyman-hops", integer(1)),
        ]);
        copied("a/b", table)
    }

    #[test]
    fn what_is_put_aside_says_who_ended_under_it_and_goes_back_as_it_came() {
        let names = QueueNames::new("core");
        let log = vec!["one".to_owned(), "two".to_owned()];
        let death = ExitedWorker { id: "w".to_owned(), exit: "signal: 9 (SIGKILL)".to_owned(), log: log.clone() };
        let mut aside = letter();
        let reason = DeadLetterReason::from_delivery(&letter());
        let cause = PoisonCause { reason: &reason, attempts: Some(3), worker: Some(&death) };
        aside.properties = poison_properties(&letter(), &names, cause, jiff::Timestamp::UNIX_EPOCH);
        let seen = describe(&aside, &names);
        assert_eq!(
            (seen.key.as_deref(), seen.reason.as_str(), seen.attempts),
            (Some("a/b"), "delivery_limit", Some(3))
        );
        assert_eq!((seen.worker.as_deref(), seen.worker_exit.as_deref()), (Some("w"), Some("signal: 9 (SIGKILL)")));
        assert_eq!((seen.worker_log, seen.body_bytes, seen.poison_count), (log, 4, 1));
        assert_eq!(seen.poisoned_at.as_deref(), Some("1970-01-01T00:00:00Z"));
        assert_eq!(seen.headers, BTreeMap::from([("x-rpc-path".to_owned(), "/echo".to_owned())]));
        assert_eq!(seen.properties["reply_to"], "amq.rabbitmq.reply-to", "the token is a capability");
        assert_eq!(seen.id.len(), ID_DIGITS);
        let again = requeue_properties(&aside);
        let table = again.headers().as_ref().unwrap();
        assert_eq!(table.inner().keys().map(ShortString::as_str).collect::<Vec<_>>(), [POISON_COUNT, "x-rpc-path"]);
        assert_eq!((again.user_id(), again.correlation_id().as_ref().map(ShortString::as_str)), (&None, Some("c")));
        aside.properties = again;
        let mut back = letter();
        assert!(was_requeued(&aside) && !was_requeued(&back));
        let cause = PoisonCause { reason: &reason, attempts: None, worker: None };
        back.properties = poison_properties(&aside, &names, cause, jiff::Timestamp::UNIX_EPOCH);
        let seen = describe(&back, &names);
        assert_eq!((seen.poison_count, seen.attempts, seen.worker), (2, None, None));
    }

    #[test]
    fn what_a_worker_has_put_back_comes_under_the_name_of_its_queue_and_keeps_its_key() {
        let names = QueueNames::new("core");
        let mut table = letter().properties.headers().clone().unwrap();
        table.insert(ATTEMPTS.into(), integer(2));
        let mut aside = copied("core-req-a%2Fb", table);
        let reason = DeadLetterReason::from_delivery(&aside);
        let cause = PoisonCause { reason: &reason, attempts: Some(3), worker: None };
        aside.properties = poison_properties(&aside, &names, cause, jiff::Timestamp::UNIX_EPOCH);
        let seen = describe(&aside, &names);
        assert_eq!((seen.key.as_deref(), seen.attempts), (Some("a%2Fb"), Some(5)));
    }

    #[test]
    fn what_a_worker_has_put_aside_and_what_anybody_has_is_read_as_far_as_it_goes() {
        let names = QueueNames::new("core");
        let of_worker = amqp::header_table([
            ("x-journeyman-attempts", AMQPValue::LongUInt(5)),
            ("x-journeyman-reason", text("it was tried 5 times")),
            ("x-journeyman-queue", text("core-req-a%2Fb")),
        ]);
        let seen = describe(&copied("core-poison", of_worker), &names);
        assert_eq!((seen.key.as_deref(), seen.attempts, seen.poison_count), (Some("a%2Fb"), Some(5), 1));
        let odd = amqp::header_table([("x-journeyman-queue", text("elsewhere")), ("x-odd", AMQPValue::Double(1.5))]);
        let seen = describe(&copied("core-poison", odd.clone()), &names);
        assert_eq!((seen.key, seen.reason.as_str(), seen.headers.len()), (None, "unknown", 1));
        let other = copied("core-poison", FieldTable::default());
        assert_eq!(seen.id, id(&copied("core-poison", odd)));
        assert_ne!(seen.id, id(&other));
        assert_eq!(seen.id.len(), ID_DIGITS);
    }
}
