//! What operators are told of endpoints and messages: lines in the log, and events for the endpoints that want `notifier.*`.

use serde_json::json;
use serde_json::value::{RawValue, to_raw_value};

use super::store::Head;
use journeyman_domain::lane::endpoint::{DISABLE_ATTEMPTS_MIN, DisableReason, EndpointHealth};
use journeyman_domain::lane::retry::{HeadVerdict, MessageOutcome};
use journeyman_platform::host::clock::stamp;
use journeyman_platform::settings::values::merge_json;
use journeyman_worker::notify::{Event, OWN_TYPES};

/// What one attempt has changed of its endpoint.
pub(super) struct Change<'a> {
    pub(super) endpoint: &'a str,
    pub(super) before: EndpointHealth,
    pub(super) after: EndpointHealth,
    pub(super) disabled: Option<DisableReason>,
    pub(super) verdict: HeadVerdict,
}

impl Change<'_> {
    /// Logs what operators should know, and returns it as events. The same change makes the same events: they are stored before the
    /// attempt is, and it may be repeated.
    pub(super) fn alerts(&self, head: &Head) -> Vec<Event> {
        let (endpoint, mut events) = (self.endpoint, Vec::new());
        let since = self.before.failing_since.or(self.after.failing_since).map_or(0, |since| since.0);
        let of_endpoint = |what: &str, more: serde_json::Value| {
            let mut data = json!({ "endpoint": endpoint, "failing_since": since, "failures": self.after.failures });
            merge_json(&mut data, more);
            event(&format!("endpoint.{what}"), &format!("{endpoint}/{since}"), endpoint, &data)
        };
        let was_failing = self.before.failures >= DISABLE_ATTEMPTS_MIN;
        if !was_failing && self.after.failures >= DISABLE_ATTEMPTS_MIN {
            tracing::warn!(
                alert = "endpoint-failing",
                endpoint,
                "[alert operator] endpoint {endpoint} has failed {DISABLE_ATTEMPTS_MIN} times; \
                 `journeyman notifier status` has the error"
            );
            events.push(of_endpoint("failing", json!({})));
        }
        if was_failing && self.after.failures == 0 {
            tracing::info!(endpoint, "endpoint {endpoint} has recovered after {} failures", self.before.failures);
            events.push(of_endpoint("recovered", json!({ "failures": self.before.failures })));
        }
        if let Some(reason) = self.disabled {
            let reason = reason.as_str();
            tracing::error!(
                alert = "endpoint-disabled",
                endpoint,
                "[alert operator] endpoint {endpoint} is disabled ({reason}); its messages are kept"
            );
            events.push(of_endpoint("disabled", json!({ "reason": reason })));
        }
        let is_exhausted = matches!(self.verdict, HeadVerdict::Ended(MessageOutcome::Exhausted) | HeadVerdict::Park);
        if is_exhausted {
            tracing::error!(
                alert = "message-exhausted",
                endpoint,
                lane = head.lane.0,
                position = head.position,
                "[alert operator] endpoint {endpoint} did not take a message in time; `journeyman notifier attempts` has the errors"
            );
        }
        // An alert that was not taken makes no other one.
        if is_exhausted && !head.event_type.starts_with(OWN_TYPES) {
            let id = format!(
                "{endpoint}/{}/{}/{}",
                head.lane.0,
                head.position,
                head.state.first_attempt_at.map_or(0, |at| at.0)
            );
            let data = json!({
                "endpoint": endpoint, "lane": head.lane.0, "position": head.position, "key": head.key,
                "epoch": head.epoch, "seq": head.seq, "event_id": head.event_id, "type": head.event_type,
                "attempts": head.state.attempts.saturating_add(1),
            });
            events.push(event("message.exhausted", &id, endpoint, &data));
        }
        events
    }
}

/// An event in the lane of the endpoint that it is about.
fn event(what: &str, id: &str, endpoint: &str, data: &serde_json::Value) -> Event {
    Event {
        source: "journeyman".to_owned(),
        id: format!("{what}/{id}"),
        r#type: format!("{OWN_TYPES}{what}"),
        key: endpoint.to_owned(),
        epoch: None,
        time: jiff::Timestamp::from_millisecond(stamp().0).ok(),
        last: false,
        data: to_raw_value(data).unwrap_or_else(|_| RawValue::NULL.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use journeyman_domain::lane::dispatcher::LaneId;
    use journeyman_domain::lane::retry::HeadState;
    use journeyman_domain::staged::Stamp;

    const AGAIN: HeadVerdict = HeadVerdict::TryAgain { at: Stamp(9) };

    fn head(event_type: &str) -> Head {
        Head {
            lane: LaneId(7),
            token: 1,
            key: "k".to_owned(),
            position: 3,
            is_replay: false,
            epoch: 0,
            seq: 3,
            state: HeadState { attempts: 9, first_attempt_at: Some(Stamp(5)) },
            source: "ci".to_owned(),
            event_id: "e".to_owned(),
            event_type: event_type.to_owned(),
            occurred_at: Stamp(1),
            data: b"{\"secret\":1}".to_vec(),
        }
    }

    fn health(failures: u32) -> EndpointHealth {
        EndpointHealth { failing_since: (failures > 0).then_some(Stamp(5)), failures, rests_until: None }
    }

    fn types(before: u32, after: u32, disabled: Option<DisableReason>, verdict: HeadVerdict, of: &str) -> Vec<String> {
        let change = Change { endpoint: "ci", before: health(before), after: health(after), disabled, verdict };
        let events = change.alerts(&head(of));
        assert!(events.iter().all(|event| event.is_about("ci") && !event.data.get().contains("secret")));
        let again = change.alerts(&head(of));
        assert!(events.iter().zip(&again).all(|(one, other)| one.id == other.id), "stored once");
        events.into_iter().map(|event| event.r#type).collect()
    }

    #[test]
    fn operators_are_told_once_that_an_endpoint_fails_recovers_is_disabled_or_lets_a_message_expire() {
        let exhausted = HeadVerdict::Ended(MessageOutcome::Exhausted);
        let delivered = HeadVerdict::Ended(MessageOutcome::Delivered);
        for (before, after, disabled, verdict, of, expected) in [
            (8, 9, None, AGAIN, "a", &[][..]),
            (9, 10, None, AGAIN, "a", &["notifier.endpoint.failing"]),
            (10, 11, None, AGAIN, "a", &[]),
            (9, 0, None, delivered, "a", &[]),
            (11, 0, None, delivered, "a", &["notifier.endpoint.recovered"]),
            (0, 1, Some(DisableReason::Gone), AGAIN, "a", &["notifier.endpoint.disabled"]),
            (11, 12, None, exhausted, "a", &["notifier.message.exhausted"]),
            (11, 12, None, HeadVerdict::Park, "a", &["notifier.message.exhausted"]),
            (11, 12, None, exhausted, "notifier.endpoint.failing", &[]),
        ] {
            assert_eq!(types(before, after, disabled, verdict, of), expected, "{before} {after} {verdict:?}");
        }
    }
}
