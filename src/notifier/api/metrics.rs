//! OpenMetrics of a notifier, open as those of workers are. Counters are of this node, gauges of the whole store.
//!
//! Labels hold names of endpoints and words of fixed lists, never a key or text of a receiver.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};

use super::status::{EndpointCondition, EndpointStatus};
use super::{Api, Refused};
use crate::host::clock::stamp;
use crate::notifier::counters::{BOUNDS_SECONDS, Counted, Histogram};
use crate::notifier::store::outcome_text;
use crate::observe::openmetrics::{self, MetricFamily, MetricKind, Sample, flag, float, labeled, unlabeled};
use journeyman_domain::lane::ErrorClass;
use journeyman_domain::lane::retry::MessageOutcome;
use journeyman_domain::staged::Stamp;

struct Snapshot {
    endpoints: BTreeMap<String, EndpointStatus>,
    counted: Counted,
    now: Stamp,
}

type Family = MetricFamily<Snapshot>;

const OUTCOMES: [MessageOutcome; 4] = [
    MessageOutcome::Delivered,
    MessageOutcome::Exhausted,
    MessageOutcome::AbortedByReceiver,
    MessageOutcome::SkippedByOperator,
];
/// Of attempts; `status` is an answer other than 2xx.
const CLASSES: [&str; 7] = [
    ErrorClass::Dns.name(),
    ErrorClass::Connect.name(),
    ErrorClass::Tls.name(),
    ErrorClass::Timeout.name(),
    ErrorClass::Policy.name(),
    ErrorClass::Protocol.name(),
    "status",
];

fn gauge(name: &'static str, help: &'static str, read: fn(&str, &EndpointStatus, Stamp) -> Vec<Sample>) -> Family {
    MetricFamily::new(MetricKind::Gauge, name, help, move |all: &Snapshot| {
        all.endpoints.iter().flat_map(|(name, endpoint)| read(name, endpoint, all.now)).collect()
    })
}

fn counter(name: &'static str, help: &'static str, read: fn(&Counted) -> Vec<Sample>) -> Family {
    MetricFamily::new(MetricKind::Counter, name, help, move |all: &Snapshot| read(&all.counted))
}

fn histogram(labels: &[&str], Histogram { buckets, sum_seconds }: &Histogram) -> Vec<Sample> {
    openmetrics::histogram(labels, &BOUNDS_SECONDS, buckets, *sum_seconds)
}

fn of(counts: &BTreeMap<&'static str, u64>, word: &str) -> f64 {
    float(counts.get(word).copied().unwrap_or_default())
}

fn duplicates(counted: &Counted) -> u64 {
    counted.intake.iter().filter(|((_, result), _)| *result == "duplicate").map(|(_, count)| count).sum()
}

fn families() -> Vec<Family> {
    vec![
        gauge(
            "notifier_lanes{endpoint,state}",
            "Lanes with messages that wait, by state: open, parked or paused.",
            |name, endpoint, _| {
                let counts = &endpoint.counts;
                let open = counts.lanes.saturating_sub(counts.parked + counts.paused);
                [("open", open), ("parked", counts.parked), ("paused", counts.paused)]
                    .map(|(state, lanes)| labeled([name, state], lanes.into()))
                    .into()
            },
        ),
        gauge(
            "notifier_lane_head_age_seconds{endpoint}",
            "How long the oldest head has waited; 0 if nothing waits. The number to alert on.",
            |name, endpoint, now| {
                let age = endpoint.counts.oldest.map_or(0.0, |oldest| now.since(oldest).as_secs_f64());
                vec![labeled([name], age)]
            },
        ),
        gauge("notifier_messages_pending{endpoint}", "Messages that wait.", |name, endpoint, _| {
            vec![labeled([name], float(u64::try_from(endpoint.counts.messages).unwrap_or_default()))]
        }),
        gauge(
            "notifier_endpoint_state{endpoint,state}",
            "1 for the state of the endpoint, 0 for the others.",
            |name, endpoint, _| {
                EndpointCondition::ALL
                    .map(|state| labeled([name, state.as_str()], flag(endpoint.state == state)))
                    .into()
            },
        ),
        MetricFamily::new(
            MetricKind::Gauge,
            "notifier_breaker_open",
            "Servers of endpoints that do not work, so that one attempt at a time probes them.",
            |all: &Snapshot| unlabeled(float(all.counted.breakers.len() as u64)),
        ),
        counter("notifier_deliveries{outcome}", "Messages that have ended, by outcome.", |counted| {
            OUTCOMES.map(outcome_text).map(|outcome| labeled([outcome], of(&counted.deliveries, outcome))).into()
        }),
        MetricFamily::new(
            MetricKind::Histogram,
            "notifier_attempt_duration_seconds{outcome,le}",
            "How long attempts took, by outcome: delivered or failed.",
            |all: &Snapshot| {
                let none = Histogram::default();
                let of = |is_delivered, outcome| {
                    histogram(&[outcome], all.counted.attempts.get(&is_delivered).unwrap_or(&none))
                };
                [of(true, "delivered"), of(false, "failed")].into_iter().flatten().collect()
            },
        ),
        counter(
            "notifier_attempt_errors{class}",
            "Failed attempts by class: dns, connect, tls, timeout, policy, protocol, or status (an answer other than 2xx).",
            |counted| CLASSES.map(|class| labeled([class], of(&counted.errors, class))).into(),
        ),
        counter("notifier_policy_blocked", "Attempts at addresses that webhooks may not reach.", |counted| {
            unlabeled(of(&counted.errors, ErrorClass::Policy.name()))
        }),
        counter(
            "notifier_intake{source,result}",
            "Events by source and result: accepted, duplicate or refused (a whole call or message).",
            |counted| {
                let counts = counted.intake.iter();
                counts.map(|((source, result), count)| labeled([*source, *result], float(*count))).collect()
            },
        ),
        counter("notifier_intake_duplicates", "Events that were stored already.", |counted| {
            unlabeled(float(duplicates(counted)))
        }),
        MetricFamily::new(
            MetricKind::Histogram,
            "notifier_end_to_end_seconds{le}",
            "Time from an event to the 2xx of its receiver, without replays.",
            |all: &Snapshot| histogram(&[], &all.counted.end_to_end),
        ),
        counter("notifier_replayed", "Messages that operators have sent once more.", |counted| {
            unlabeled(float(counted.replayed))
        }),
    ]
}

pub(super) async fn metrics(State(api): State<Arc<Api>>) -> Result<Response, Refused> {
    let endpoints = api.statuses().await?;
    let snapshot = Snapshot { endpoints, counted: api.intake.counters.counted(), now: stamp() };
    let text = openmetrics::text(&snapshot, &families());
    Ok(([(CONTENT_TYPE, openmetrics::CONTENT_TYPE)], text).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_has_every_metric() {
        let (guide, table) = (include_str!("../../guide/notifier.md"), openmetrics::markdown(&families()));
        assert!(guide.contains(&table), "in src/guide/notifier.md should be:\n{table}");
    }
}
