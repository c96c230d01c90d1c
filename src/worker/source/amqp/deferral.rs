//! Checks: messages that have work looked at later, so that no claim is held for it meanwhile.
//!
//! A check is stored before the message that it follows is acknowledged, so a worker that dies in between leaves both. A worker that
//! has seen a later check, or the reply, settles such a copy without a look. Copies that two workers take are looked at twice.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use jiff::Timestamp;
use lapin::message::Delivery;
use lapin::types::{AMQPValue, ShortString};
use lapin::{BasicProperties, Connection};
use parking_lot::Mutex;
use tokio::time::timeout;

use super::delivery::{self, ReceivedRequest};
use crate::source::CallError;
use crate::task::NextCheck;
use journeyman_domain::limits::{AMQP_DECLARE_TIMEOUT, AMQP_DONE_LOOKS_MAX};
use journeyman_domain::staged::StagedRecord;
use journeyman_platform::amqp::delay::{DelayGuarantee, DelayQueues, early_by};
use journeyman_platform::amqp::headers;

/// How a source has work looked at later.
#[derive(Debug, Clone)]
pub struct DeferralConfig {
    /// The form of the messages.
    pub format: Arc<dyn CheckFormat>,
    /// The way that they take.
    pub route: CheckRoute,
}

/// The way of a check to the queue where it arrives.
#[derive(Debug, Clone)]
pub enum CheckRoute {
    /// Through delays, which the source declares.
    Delays {
        /// The delays.
        delays: DelayQueues,
        /// The queue that they lead to, beside the queue of the source.
        queue: ShortString,
    },
    /// Through a queue whose messages expire into another one. The source declares nothing.
    WaitQueue {
        /// The exchange that checks are published to.
        exchange: ShortString,
        /// Their routing key.
        key: ShortString,
    },
}

/// A message to publish.
#[derive(Debug, Clone)]
pub struct Check {
    /// Whether delays lead it to the queue of the source, where it came from.
    pub to_source: bool,
    /// With the header that carries the record. For a wait queue also with the expiration, and without the `x-death` family.
    pub properties: BasicProperties,
    /// The body.
    pub body: Bytes,
}

/// The form of checks.
pub trait CheckFormat: Debug + Send + Sync + 'static {
    /// The record that a message carries; `None` for the first one of a work.
    fn read(&self, delivery: &Delivery) -> Option<StagedRecord>;

    /// The key of the work, of letters, digits, `-` and `_`, where the message says it; `None` if its ids have to identify it.
    fn key(&self, delivery: &Delivery) -> Option<String>;

    /// Makes the check that follows a message with these properties and this body. `key` is that of the work, at each of its messages.
    /// `None` if the broker is to dead-letter the message itself, into queues from which it comes again.
    fn write(&self, properties: &BasicProperties, body: &Bytes, key: &str, next: &NextCheck) -> Option<Check>;
}

impl DeferralConfig {
    /// For requests: checks go through delays named after the queue, and are the request itself with two more headers.
    pub fn of_requests(queue: &ShortString) -> Self {
        let route = CheckRoute::Delays { delays: DelayQueues::new(queue.as_str(), &[]), queue: queue.clone() };
        Self { format: Arc::new(RequestChecks), route }
    }

    /// Declares the delays, if there are any.
    pub async fn declare(
        &self,
        connection: &Connection,
        own: &ShortString,
    ) -> Result<Option<DelayGuarantee>, CallError> {
        let CheckRoute::Delays { delays, queue } = &self.route else { return Ok(None) };
        let declaring = async {
            let guarantee = delays.declare(connection).await?;
            for queue in BTreeSet::from([queue, own]) {
                delays.lead_to(connection, queue.as_str()).await?;
            }
            Ok::<_, CallError>(Some(guarantee))
        };
        let timed_out = |_| CallError::retry(format!("cannot declare delays of {queue}: no answer"));
        timeout(AMQP_DECLARE_TIMEOUT, declaring).await.map_err(timed_out)?
    }

    /// The check again, if it came before its time and the broker has not delayed it: it was moved by hand.
    pub(super) fn too_early(&self, delivery: &Delivery) -> Option<NextCheck> {
        let table = delivery.properties.headers().as_ref()?;
        let wait = early_by(table, Timestamp::now());
        if wait == Duration::ZERO || table.inner().contains_key("x-death") {
            return None;
        }
        Some(NextCheck { record: self.format.read(delivery)?, wait })
    }
}

/// A look at work that a message asks for.
#[derive(Debug)]
pub(super) struct Look {
    /// The key of the work, and where its reply goes.
    work: String,
    seq: u64,
    /// Not the first message of the work, or delivered before.
    is_copy: bool,
}

impl Look {
    pub(super) fn new(record: Option<&StagedRecord>, message: &ReceivedRequest) -> Self {
        let properties = &message.delivery.properties;
        let [to, id] = [properties.reply_to(), properties.correlation_id()]
            .map(|text| text.as_ref().map_or("", ShortString::as_str));
        Self {
            work: format!("{}\n{to}\n{id}", message.work_key()),
            seq: record.map_or(0, |record| record.seq),
            is_copy: record.is_some() || delivery::attempt_history(&message.delivery).is_suspect(),
        }
    }
}

/// The last look that this worker has done at each work.
#[derive(Debug, Default)]
pub(super) struct DoneLooks(Mutex<BTreeMap<String, u64>>);

impl DoneLooks {
    /// A client may send again what was replied to: that starts over.
    pub(super) fn begin(&self, look: &Look) {
        if !look.is_copy {
            self.0.lock().remove(&look.work);
        }
    }

    pub(super) fn contains(&self, look: &Look) -> bool {
        look.is_copy && self.0.lock().get(&look.work).is_some_and(|done| look.seq <= *done)
    }

    /// `next` is stored, or without it the reply. A check that came too early is followed by the same look.
    pub(super) fn end(&self, look: &Look, next: Option<&StagedRecord>) {
        let done = match next {
            Some(next) if next.seq > look.seq => next.seq - 1,
            Some(_) => return,
            None => u64::MAX,
        };
        let mut looks = self.0.lock();
        // Without the rest, copies cost a look.
        if looks.len() >= AMQP_DONE_LOOKS_MAX {
            looks.clear();
        }
        let known = looks.entry(look.work.clone()).or_default();
        *known = done.max(*known);
    }
}

/// Checks of requests: the reply goes to the client at the end.
#[derive(Debug)]
struct RequestChecks;

impl CheckFormat for RequestChecks {
    fn read(&self, delivery: &Delivery) -> Option<StagedRecord> {
        let text = headers::text(delivery.properties.headers().as_ref()?, delivery::RECORD_HEADER)?;
        serde_json::from_slice(text.as_bytes()).ok()
    }

    fn key(&self, delivery: &Delivery) -> Option<String> {
        let key = headers::text(delivery.properties.headers().as_ref()?, delivery::KEY_HEADER)?;
        // It names files and jobs, and a client may send anything.
        let is_name = key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
        (is_name && (1..=64).contains(&key.len())).then(|| key.to_owned())
    }

    fn write(&self, properties: &BasicProperties, body: &Bytes, key: &str, next: &NextCheck) -> Option<Check> {
        // The look before it has not ended its worker.
        let properties = delivery::copy_properties(properties, 0);
        let mut table = properties.headers().clone().unwrap_or_default();
        let record = serde_json::to_string(&next.record).unwrap_or_default();
        for (name, text) in [(delivery::RECORD_HEADER, record.as_str()), (delivery::KEY_HEADER, key)] {
            table.insert(name.into(), AMQPValue::LongString(text.into()));
        }
        Some(Check { to_source: true, properties: properties.with_headers(table), body: body.clone() })
    }
}
