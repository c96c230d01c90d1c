//! Checks of builds: messages to the retry queue that the existing worker can read as well.

use bytes::Bytes;
use lapin::BasicProperties;
use lapin::message::Delivery;
use lapin::types::{AMQPValue, FieldTable};

use super::message::{Message, RetryHeaders};
use journeyman_domain::staged::StagedRecord;
use journeyman_platform::amqp::headers;
use journeyman_platform::host::clock::stamp;
use journeyman_worker::source::amqp::{Check, CheckFormat};
use journeyman_worker::task::NextCheck;

/// Carries what the existing worker does not know.
const RECORD: &str = "jm-work";

#[derive(Debug, Clone)]
pub struct BuildChecks {
    /// The queue that messages of this source come from.
    pub queue: String,
    pub is_retry_queue: bool,
    /// Whether checks expire in a queue with others, and the exchange gets them with their own times.
    pub has_wait_queue: bool,
}

impl BuildChecks {
    fn headers(&self, properties: &BasicProperties) -> (RetryHeaders, Option<StagedRecord>) {
        let none = FieldTable::default();
        let table = properties.headers().as_ref().unwrap_or(&none);
        let own = headers::text(table, RECORD).and_then(|text| serde_json::from_slice(text.as_bytes()).ok());
        (RetryHeaders::read(table, &self.queue), own)
    }

    /// Where the existing worker has had the message, failures are counted by the broker for a start, and by a header for a check.
    fn record(&self, properties: &BasicProperties) -> StagedRecord {
        let (found, own) = self.headers(properties);
        if let Some(own) = own {
            return own;
        }
        // `x-retry-count` belongs to the retry queue.
        let rejected = found.rejected;
        if !self.is_retry_queue {
            return StagedRecord {
                infrastructure_failures: rejected,
                capacity_failures: rejected,
                seq: rejected.into(),
                ..StagedRecord::default()
            };
        }
        // The existing worker looks for the pods of a build by their label.
        StagedRecord {
            handle: Some("".into()),
            phase_since: found.started_at,
            seq: found.retry_queue_retries().into(),
            ..StagedRecord::default()
        }
    }

    /// The existing worker counts its checks of each phase.
    fn counters(&self, properties: &BasicProperties, next: &StagedRecord) -> RetryHeaders {
        let (found, _) = self.headers(properties);
        let retry_count = match found.retry_count {
            None => 0,
            Some(_) if self.record(properties).phase != next.phase => 1,
            Some(count) => count.saturating_add(1),
        };
        let started_at = found.started_at.unwrap_or_else(stamp);
        RetryHeaders { started_at: Some(started_at), retry_count: Some(retry_count), rejected: 0 }
    }
}

impl CheckFormat for BuildChecks {
    fn read(&self, delivery: &Delivery) -> Option<StagedRecord> {
        Some(self.record(&delivery.properties))
    }

    /// A start, a check and a stop of a build are no copies of each other.
    fn key(&self, _delivery: &Delivery) -> Option<String> {
        None
    }

    fn write(&self, properties: &BasicProperties, body: &Bytes, _key: &str, next: &NextCheck) -> Option<Check> {
        // Nothing was started, or stopped: the message itself comes again.
        let to_source = next.record.handle.is_none();
        let body = match Message::parse(body) {
            // The wait queue leads to the retry queue.
            _ if to_source && self.has_wait_queue => return None,
            Ok(Message::Start(build) | Message::Verify(build)) if !to_source => build.verify_body().into(),
            Ok(Message::Start(_) | Message::Verify(_) | Message::Stop { .. }) => body.clone(),
            Ok(Message::Clear(_)) | Err(_) => return None,
        };
        let mut table = FieldTable::default();
        for (name, value) in properties.headers().iter().flat_map(|table| table.inner()) {
            if !["x-death", "x-first-death-", "x-last-death-"].iter().any(|own| name.as_str().starts_with(own)) {
                table.insert(name.clone(), value.clone());
            }
        }
        if !to_source {
            self.counters(properties, &next.record).write(&mut table);
        }
        let record = serde_json::to_string(&next.record).unwrap_or_default();
        table.insert(RECORD.into(), AMQPValue::LongString(record.as_str().into()));
        let check = BasicProperties::default().with_headers(table).with_delivery_mode(2);
        let mut check = check.with_content_type("application/json".into());
        if self.has_wait_queue {
            check = check.with_expiration(next.wait.as_millis().to_string().as_str().into());
        }
        Some(Check { to_source, properties: check, body })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use journeyman_domain::staged::Stamp;
    use journeyman_platform::amqp::header_table;

    fn checks(is_retry_queue: bool) -> BuildChecks {
        let queue = if is_retry_queue { "sdRetryQueue" } else { "sdQueue" };
        BuildChecks { queue: queue.to_owned(), is_retry_queue, has_wait_queue: true }
    }

    fn body() -> Bytes {
        let build = json!({ "buildId": 7, "container": "a", "apiUri": "http://api", "token": "<jwt>", "more": [1] });
        json!({ "job": "start", "buildConfig": build }).to_string().into()
    }

    fn next(phase: &str, handle: Option<&str>) -> NextCheck {
        let record = StagedRecord { phase: phase.into(), handle: handle.map(Into::into), ..StagedRecord::default() };
        NextCheck { record, wait: Duration::from_secs(30) }
    }

    fn counters(check: &Check) -> (Option<u64>, bool) {
        let table = check.properties.headers().as_ref().unwrap();
        (headers::number(table, "x-retry-count"), headers::number(table, "x-build-start-time").is_some())
    }

    #[test]
    fn the_existing_worker_can_read_a_check_and_has_its_budget_in_each_phase() {
        let properties = BasicProperties::default();
        let first = checks(false).write(&properties, &body(), "", &next("unscheduled", Some("p"))).unwrap();
        assert_eq!(counters(&first), (Some(0), true));
        assert_eq!(first.properties.expiration().as_ref().map(|text| text.as_str()), Some("30000"));
        let sent: serde_json::Value = serde_json::from_slice(&first.body).unwrap();
        assert_eq!((&sent["job"], &sent["buildConfig"]["more"]), (&json!("verify"), &json!([1])));
        let mut last = first;
        for (phase, count) in [("unscheduled", 1), ("unscheduled", 2), ("pulling", 1), ("pulling", 2)] {
            let written = checks(true).write(&last.properties, &last.body, "", &next(phase, Some("p"))).unwrap();
            assert_eq!(counters(&written), (Some(count), true), "{phase}");
            last = written;
        }
        assert_eq!(checks(true).record(&last.properties).phase, "pulling".into());
    }

    #[test]
    fn s6_messages_of_others_are_read_whatever_headers_they_have() {
        let of = |table: FieldTable, is_retry| checks(is_retry).record(&BasicProperties::default().with_headers(table));
        let foreign = header_table([("traceparent", AMQPValue::LongString("00-1-2-03".into()))]);
        assert_eq!(of(foreign.clone(), false), StagedRecord::default());
        assert_eq!((of(foreign, true).handle, of(FieldTable::default(), true).seq), (Some("".into()), 0));
        let old =
            header_table([("x-retry-count", AMQPValue::LongInt(4)), ("x-build-start-time", AMQPValue::LongLongInt(9))]);
        let read = of(old, true);
        assert_eq!((read.seq, read.phase_since), (4, Some(Stamp(9))));
    }

    #[test]
    fn what_was_not_started_comes_again_as_it_is() {
        let again = |has_wait_queue| {
            let checks = BuildChecks { has_wait_queue, ..checks(false) };
            checks.write(&BasicProperties::default(), &body(), "", &next("", None))
        };
        assert!(again(true).is_none(), "the wait queue leads to the other queue");
        let check = again(false).unwrap();
        assert_eq!((check.to_source, &check.body, counters(&check)), (true, &body(), (None, false)));
    }
}
