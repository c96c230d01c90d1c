//! What a notifier shows: how it is without a token, endpoints, lanes, attempts and messages with one.

use std::collections::BTreeMap;

use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use maud::{Markup, html};
use serde_json::json;

use super::openmetrics::{self, Metric, by_label, each, histogram, metrics, sample};
use super::page::{self, PageContent};
use super::rows::{Action, Cell, Headline, Level, NONE, Report, Section, Table, Value, cell};
use super::text::cut;
use journeyman_domain::lane::ErrorClass;
use journeyman_domain::lane::retry::MessageOutcome;
use journeyman_domain::staged::Stamp;
use journeyman_services::notifier::{
    AttemptRow, BOUNDS_SECONDS, Console, Counted, EndpointCondition, EndpointStatus, LaneRow, Lists, MessageFilter,
    MessageRow, Shown, Status,
};

/// Each refresh reads the store.
const REFRESH_SECONDS: u8 = 5;
const NAME_CHARS_MAX: usize = 40;

pub(crate) const CONSOLE: Console = Console { page, metrics: metrics_response };

fn page(shown: &Shown) -> Response {
    let Shown { status, lists, now, .. } = shown;
    let main = match lists {
        Some(lists) => draw(&report(status, lists, *now), lists, *now),
        None => html! {
            (page::section(&Section { headline: headline(status, *now), ..Section::default() }))
            p.dim.empty { "Endpoints, lanes, attempts and messages are shown with a token of the API: that of "
                code { "notifier.read_token_file" } " to look, that of " code { "notifier.token_file" } " for the buttons." }
        },
    };
    let silent = silent(status);
    let title = if silent > 0 { format!("{silent} not active · notifier") } else { "notifier".to_owned() };
    let content = PageContent::new(title, html! { "notifier" }, main);
    let links = html! { a href="/metrics" { "metrics" } " · " a href="/v1/openapi.json" { "API" } };
    let commands = Some("notifier.token_file");
    PageContent { commands, links, refresh_seconds: REFRESH_SECONDS, ..content }.build().into_response()
}

fn metrics_response(shown: &Shown) -> Response {
    ([(CONTENT_TYPE, openmetrics::CONTENT_TYPE)], openmetrics::text(&metric_list(shown))).into_response()
}

fn silent(status: &Status) -> usize {
    status.endpoints.values().filter(|endpoint| endpoint.state != EndpointCondition::Active).count()
}

fn headline(status: &Status, now: Stamp) -> Headline {
    let (endpoints, silent) = (&status.endpoints, silent(status));
    let stopped: u32 = endpoints.values().map(|endpoint| endpoint.counts.parked + endpoint.counts.paused).sum();
    let messages: i64 = endpoints.values().map(|endpoint| endpoint.counts.messages).sum();
    let oldest = endpoints.values().filter_map(|endpoint| endpoint.counts.oldest).min();
    let (level, state) = match (silent, stopped) {
        (0, 0) => (Level::Plain, "delivering".to_owned()),
        (0, _) => (Level::Warn, "delivering".to_owned()),
        (silent, _) => (Level::Bad, format!("{silent} of {} endpoints", endpoints.len())),
    };
    let mut cell = if silent > 0 { cell("fail, rest, or are paused or disabled") } else { Cell::default() };
    cell = cell.and(format!("{messages} messages wait"));
    if let Some(oldest) = oldest {
        cell = cell.and(format!("oldest {}", when(Some(oldest), now).text()));
    }
    if stopped > 0 {
        cell = cell.and(format!("lanes parked or paused: {stopped}"));
    }
    Headline { level, state, cell }
}

/// Shows a time, or a dash for one that never comes.
fn when(at: Option<Stamp>, now: Stamp) -> Value {
    match at {
        Some(at) if at.0 == i64::MAX => "no end".into(),
        Some(at) if at > now => Value::In(at.since(now).as_secs_f64()),
        Some(at) => Value::Ago(now.since(at).as_secs_f64()),
        None => NONE.into(),
    }
}

/// Shows the time of something that may be due already.
fn due(at: Option<Stamp>, now: Stamp) -> Value {
    if at.is_some_and(|at| at <= now) { "now".into() } else { when(at, now) }
}

fn short(text: &str) -> String {
    cut(text, NAME_CHARS_MAX)
}

fn answer(status: Option<i64>, error: Option<&str>) -> String {
    status.map_or_else(|| error.unwrap_or("no answer").to_owned(), |status| format!("HTTP {status}"))
}

fn detail(text: &str) -> Option<Value> {
    (!text.is_empty()).then(|| Value::Long(text.to_owned()))
}

/// The states by which messages are searched.
pub(crate) fn message_states() -> impl Iterator<Item = &'static str> {
    ["waiting", "dead"].into_iter().chain(MessageOutcome::ALL.map(MessageOutcome::as_str))
}

/// The filter as the query of a URL.
pub(crate) fn query(filter: &MessageFilter) -> String {
    serde_urlencoded::to_string(filter).unwrap_or_default()
}

/// What a reader of a notifier can change, with the buttons.
pub(crate) fn report(found: &Status, lists: &Lists, now: Stamp) -> Report {
    let lanes = Section { tables: vec![lane_table(&lists.lanes, now)], ..Section::default() };
    Report { sections: vec![status(found, now), lanes], ..Report::default() }
}

/// A report, the messages with a form that searches them, and the attempts.
pub(crate) fn draw(report: &Report, lists: &Lists, now: Stamp) -> Markup {
    let Lists { attempts, messages: page, filter, .. } = lists;
    let MessageFilter { endpoint, key, r#type, event_id, contains, .. } = filter;
    let fields =
        [("endpoint", endpoint), ("key", key), ("type", r#type), ("event_id", event_id), ("contains", contains)];
    let found = message_table(&page.messages, now);
    html! {
        @for section in &report.sections { (page::section(section)) }
        section {
            h3 { (found.title) }
            form.search method="get" {
                @for (name, value) in fields {
                    label { (name.replace('_', " ")) " " input name=(name) value=[value.as_ref()] size="12"; }
                }
                label { "state " select name="outcome" {
                    option value="" { "any" }
                    @for outcome in message_states() { option value=(outcome) selected[filter.outcome.as_deref() == Some(outcome)] { (outcome) } }
                } }
                button type="submit" { "find" }
            }
            (page::table(&Table { title: String::new(), ..found }))
            @if page.next.is_some() { p { a href={ "?" (query(&MessageFilter { before: page.next, ..filter.clone() })) } { "older messages" } } }
            (page::table(&attempt_table(attempts, now)))
        }
    }
}

pub(crate) fn status(status: &Status, now: Stamp) -> Section {
    Section { headline: headline(status, now), tables: vec![endpoints(status, now)], ..Section::default() }
}

fn endpoints(status: &Status, now: Stamp) -> Table {
    let columns = ["endpoint", "state", "failing since", "next try", "lanes", "messages", "oldest", "why"];
    let rows = status.endpoints.iter().map(|(name, one)| {
        let level = if one.state == EndpointCondition::Active { Level::Good } else { Level::Bad };
        let mut why = Cell::default().note_some(one.why.as_ref());
        if let Some(failure) = &one.last_failure {
            let what = answer(failure.status.map(i64::from), failure.error.as_deref());
            let ago = when(Some(failure.at), now).text();
            why = why.note(format!("last error {ago}: {what}")).note_some(detail(&failure.detail));
        }
        why = why.note_some(one.note.as_ref().map(|note| format!("“{note}”")));
        vec![
            endpoint_actions(name, one, cell(Value::Code(short(name)))),
            cell(one.state.as_str()).at(level),
            cell(when(one.health.failing_since, now)),
            cell(due(one.next_try, now)),
            cell(one.counts.lanes),
            cell(one.counts.messages),
            cell(when(one.counts.oldest, now)),
            why,
        ]
    });
    Table::new("endpoints", &columns, rows).or("No endpoints.")
}

fn endpoint_actions(name: &str, one: &EndpointStatus, cell: Cell) -> Cell {
    let act =
        |action: &str| Action::new(action, format!("/v1/endpoints/{}/{action}", urlencoding::encode(name)), json!({}));
    let pause = if one.state == EndpointCondition::Paused { act("resume") } else { act("pause").reason("Why?") };
    let disable = if one.disabled.is_some() {
        act("enable")
    } else {
        act("disable").reason("Why? It gets nothing until it is enabled.")
    };
    let redeliver = act("redeliver").confirm("Try all of its heads at once?");
    [pause, disable, redeliver, act("test")].into_iter().fold(cell, |cell, action| cell.action(Some(action)))
}

pub(crate) fn lane_table(lanes: &[LaneRow], now: Stamp) -> Table {
    let columns =
        ["lane", "endpoint", "key", "state", "head", "type", "came", "waiting", "attempts", "next try", "note"];
    let rows = lanes.iter().map(|one| {
        let act = |action: &str, body| Action::new(action, format!("/v1/lanes/{}/{action}", one.id), body);
        let head_type = one.head_type.as_deref().unwrap_or(NONE);
        let skip = act("skip-head", json!({ "position": one.head }))
            .reason(format!("Why is message {} ({head_type}) never sent?", one.head));
        let is_open = one.state == "open";
        let pause = if is_open { act("pause", json!({})).reason("Why?") } else { act("resume", json!({})) };
        let state = cell(&one.state).at(if is_open { Level::Good } else { Level::Warn });
        vec![
            cell(one.id),
            cell(short(&one.endpoint)),
            cell(Value::Code(short(&one.key))),
            state.action(Some(pause)).action(Some(skip)),
            cell(one.head).note(format!("epoch {}", one.epoch)),
            cell(short(head_type)),
            cell(when(one.head_since, now)),
            cell(one.waiting),
            cell(one.attempts),
            cell(due(one.due_at, now)),
            cell(one.note.as_deref().unwrap_or_default()),
        ]
    });
    Table::new("lanes with messages, oldest head first", &columns, rows).or("Nothing waits.")
}

pub(crate) fn message_table(messages: &[MessageRow], now: Stamp) -> Table {
    let columns = ["came", "endpoint", "key", "lane", "position", "type", "event", "state", "ended", "note"];
    let rows = messages.iter().map(|one| {
        let level = match one.outcome.as_str() {
            "delivered" => Level::Good,
            "waiting" => Level::Plain,
            _ => Level::Bad,
        };
        vec![
            cell(when(Some(one.received_at), now)),
            cell(short(&one.endpoint)),
            cell(Value::Code(short(&one.key))),
            cell(one.lane),
            cell(one.position),
            cell(short(&one.r#type)),
            cell(short(&one.event_id)).note_some(one.data.as_ref().map(|data| Value::Long(data.get().to_owned()))),
            cell(&one.outcome).at(level),
            cell(when(one.ended_at, now)),
            cell(one.note.as_deref().unwrap_or_default()),
        ]
    });
    Table::new("messages, latest event first", &columns, rows).or("No message is like this.")
}

pub(crate) fn attempt_table(attempts: &[AttemptRow], now: Stamp) -> Table {
    let columns = ["started", "endpoint", "lane", "key", "position", "type", "event", "attempt", "took", "result"];
    let rows = attempts.iter().map(|one| {
        let is_delivered = one.status.is_some_and(|status| (200..300).contains(&status));
        let level = if is_delivered { Level::Good } else { Level::Bad };
        vec![
            cell(when(Some(one.started_at), now)),
            cell(short(&one.endpoint)),
            cell(one.lane),
            cell(Value::Code(short(&one.key))),
            cell(one.position),
            cell(short(&one.r#type)),
            cell(short(&one.event_id)),
            cell(one.number),
            cell(format!("{} ms", one.took_ms)),
            cell(answer(one.status, one.error.as_deref())).at(level).note_some(detail(&one.detail)),
        ]
    });
    Table::new("attempts, latest first", &columns, rows).or("None yet.")
}

/// Counters are of this node, gauges of the whole store. Labels hold names of endpoints and words of fixed lists, never a key or text
/// of a receiver.
pub(crate) fn metric_list(Shown { status, counted, now, .. }: &Shown) -> Vec<Metric> {
    let endpoints = &status.endpoints;
    let Counted { deliveries, attempts, errors, intake, end_to_end, replayed, breakers, .. } = counted;
    let of = |counts: &BTreeMap<&'static str, u64>, word: &str| counts.get(word).copied().unwrap_or_default();
    let duplicates = intake.iter().filter(|((_, result), _)| *result == "duplicate").map(|(_, count)| count);
    let attempts_of = |is_delivered, outcome| {
        histogram(&[outcome], &BOUNDS_SECONDS, &attempts.get(&is_delivered).copied().unwrap_or_default())
    };
    let lanes = |(name, endpoint): (&String, &EndpointStatus)| {
        let counts = &endpoint.counts;
        let open = counts.lanes.saturating_sub(counts.parked + counts.paused);
        let lanes = [("open", open), ("parked", counts.parked), ("paused", counts.paused)];
        lanes.map(|(state, lanes)| sample([name, state], lanes))
    };
    let states = |(name, endpoint): (&String, &EndpointStatus)| {
        EndpointCondition::ALL.map(|state| sample([name, state.as_str()], endpoint.state == state))
    };
    // `status` is an answer other than 2xx.
    let classes = ErrorClass::ALL.map(ErrorClass::as_str).into_iter().chain(["status"]);
    let age = |oldest: Stamp| now.since(oldest).as_secs_f64();
    metrics! {
        Gauge "notifier_lanes{endpoint,state}" "Lanes with messages that wait, by state: open, parked or paused."
            = endpoints.iter().flat_map(lanes).collect::<Vec<_>>();
        Gauge "notifier_lane_head_age_seconds{endpoint}"
            "How long the oldest head has waited; 0 if nothing waits. The number to alert on."
            = each(endpoints, |(name, one)| sample([name], one.counts.oldest.map_or(0.0, age)));
        Gauge "notifier_messages_pending{endpoint}" "Messages that wait."
            = each(endpoints, |(name, one)| sample([name], u64::try_from(one.counts.messages).unwrap_or_default()));
        Gauge "notifier_endpoint_state{endpoint,state}" "1 for the state of the endpoint, 0 for the others."
            = endpoints.iter().flat_map(states).collect::<Vec<_>>();
        Gauge "notifier_breaker_open" "Servers of endpoints that do not work, so that one attempt at a time probes them."
            = breakers.len();
        Counter "notifier_deliveries{outcome}" "Messages that have ended, by outcome."
            = by_label(MessageOutcome::ALL.map(|outcome| (outcome.as_str(), of(deliveries, outcome.as_str()))));
        Histogram "notifier_attempt_duration_seconds{outcome,le}"
            "How long attempts took, by outcome: delivered or failed."
            = [attempts_of(true, "delivered"), attempts_of(false, "failed")].into_iter().flatten().collect::<Vec<_>>();
        Counter "notifier_attempt_errors{class}"
            "Failed attempts by class: dns, connect, tls, timeout, policy, protocol, or status (an answer other than 2xx)."
            = by_label(classes.map(|class| (class, of(errors, class))));
        Counter "notifier_policy_blocked" "Attempts at addresses that webhooks may not reach."
            = of(errors, ErrorClass::Policy.as_str());
        Counter "notifier_intake{source,result}"
            "Events by source and result: accepted, duplicate or refused (a whole call or message)."
            = each(intake, |((source, result), count)| sample([source, result], *count));
        Counter "notifier_intake_duplicates" "Events that were stored already." = duplicates.sum::<u64>();
        Histogram "notifier_end_to_end_seconds{le}" "Time from an event to the 2xx of its receiver, without replays."
            = histogram(&[], &BOUNDS_SECONDS, end_to_end);
        Counter "notifier_replayed" "Messages that operators have sent once more." = *replayed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_has_every_metric() {
        let (status, counted, now) = (Status::default(), Counted::default(), Stamp(0));
        let shown = Shown { status, counted, lists: None, now };
        let (guide, table) = (include_str!("../guide/notifier.md"), openmetrics::markdown(&metric_list(&shown)));
        assert!(guide.contains(&table), "in src/guide/notifier.md should be:\n{table}");
    }
}
