//! Workers of all hosts: what their addresses, the queues and the controllers tell of them.

use std::collections::{BTreeMap, BTreeSet};

use axum::extract::{Path, State};
use futures_util::future::join_all;
use maud::{Markup, html};

use super::listing::path;
use super::phases::{PHASES, bars, history};
use super::queues::workers_of_queue;
use super::targets::{QueueTarget, Reading, Target, read_all};
use super::{Console, PageError, PageResult, QUEUE_REFRESH_SECONDS, Shared, link_tasks, report, within_moment};
use crate::console::page::{self, PageContent};
use crate::console::picture::{Bar, Lane, SLOTS_MAX, legend, packed, slots, timeline};
use crate::console::rows::{Cell, Level, Section, Table, Value, cell, maybe};
use crate::console::text;
use crate::console::worker;
use crate::control::WorkerStatusReply;
use crate::control::controller_api::ControllerStatusReply;
use journeyman_domain::limits::{CONSOLE_TASKS_SHOWN, HISTORY_WINDOW};
use journeyman_worker::engine::ClaimHistory;
use journeyman_worker::task::formats::is_slugid;

fn slot_classes(status: &WorkerStatusReply) -> Vec<&'static str> {
    let view = &status.snapshot;
    let busy = view.claims.iter().map(|claim| if claim.state == "running" { "run" } else { "prepare" });
    let kept = view.cleanup_pending.iter().map(|_| "bad-slot");
    let free = if view.blocked_message.is_some() { "blocked" } else { "free" };
    let taken: Vec<&'static str> = busy.chain(kept).collect();
    let rest = (view.capacity as usize).saturating_sub(taken.len()).min(SLOTS_MAX);
    taken.into_iter().chain(std::iter::repeat_n(free, rest)).collect()
}

/// The slots of all workers.
pub(super) fn summary(workers: &[Reading<WorkerStatusReply>]) -> Markup {
    let known: Vec<&WorkerStatusReply> = workers.iter().filter_map(|reading| reading.status.as_deref()).collect();
    let busy: usize = known.iter().map(|status| status.snapshot.claims.len()).sum();
    let capacity: u64 = known.iter().map(|status| u64::from(status.snapshot.capacity)).sum();
    let silent = workers.iter().filter(|reading| reading.error.is_some()).count();
    html! {
        section {
            h2 { a href="/fleet" { "fleet" } }
            p { (known.len()) @if known.len() == 1 { " worker, " } @else { " workers, " } (busy) " of " (capacity) " slots busy"
                @if silent > 0 { ", " strong.bad { (silent) @if silent == 1 { " does not answer" } @else { " do not answer" } } } }
            div.grid { @for status in known {
                a href=(worker_path(status)) title=(worker::headline(&status.snapshot).cell.text()) { (slots(&slot_classes(status), status.snapshot.capacity as usize)) }
            } }
            (legend(&[("run", "running"), ("prepare", "another phase"), ("free", "free"), ("blocked", "not claiming"), ("bad-slot", "processes left")]))
        }
    }
}

fn worker_path(status: &WorkerStatusReply) -> String {
    format!("/workers/{}", urlencoding::encode(&status.id))
}

/// A row of the fleet, with the order in which it is shown.
type Row = (u8, Vec<Cell>);

/// The row of a worker whose slots and leases are unknown.
fn row_without_slots(rank: u8, [name, group, state, why, seen]: [Cell; 5]) -> Row {
    (rank, vec![name, group, state, cell(""), cell(""), why, seen])
}

fn row(target: &Target<WorkerStatusReply>, reading: &Reading<WorkerStatusReply>) -> Row {
    let error = reading.error.as_deref();
    let Some(status) = &reading.status else {
        let name = target.address().map_or("this host", |address| &address.name);
        let why = cell(error.unwrap_or_default());
        return row_without_slots(0, [cell(name), cell(""), cell("unknown").at(Level::Bad), why, cell("")]);
    };
    let view = &status.snapshot;
    let level = if error.is_some() { Level::Bad } else { worker::headline(view).level };
    let state = if error.is_some() { "silent" } else { view.state.as_str() };
    let why = cell(error.map_or_else(|| worker::claiming(view).1, str::to_owned));
    let name = Value::Link { text: status.id.clone(), href: worker_path(status) };
    let leases = view.claims.iter().filter_map(|claim| Some((claim.lease_left_seconds?, claim.lease_seconds)));
    let shortest = leases.min_by(|(one, _), (other, _)| one.total_cmp(other));
    let lease = shortest.map(|(seconds, of)| Value::Left { seconds, of });
    let seen = maybe(reading.age, |age| Value::Ago(age.as_secs_f64()));
    let rank = if level == Level::Bad || lease.as_ref().is_some_and(Value::is_short) {
        0
    } else if level == Level::Warn {
        1
    } else {
        2
    };
    let cells = vec![
        cell(name),
        cell(&status.group),
        cell(state).at(level),
        cell(view.occupancy()),
        maybe(lease, |left| left),
        why,
        seen,
    ];
    (rank, cells)
}

/// Workers that only a queue or a controller knows.
async fn others(console: &Console, known: &BTreeSet<&str>) -> Vec<Row> {
    let mut found: BTreeMap<String, Row> = BTreeMap::new();
    let of_queues = join_all(console.queues.iter().map(|queue| within_moment(workers_of_queue(queue)))).await;
    for (queue, answer) in console.queues.iter().zip(of_queues) {
        match answer {
            Ok(workers) => found.extend(workers.into_iter().map(|(id, group, task)| {
                let latest = cell(format!("latest task {task}"));
                let row = row_without_slots(3, [cell(&id), cell(group), cell("claimed lately"), latest, cell("")]);
                (id, row)
            })),
            Err(PageError(_, why)) => {
                let name = format!("queue {}", queue.name);
                let state = cell("unknown").at(Level::Bad);
                let row = row_without_slots(0, [cell(&name), cell(""), state, cell(why), cell("")]);
                found.insert(name, row);
            }
        }
    }
    for reading in read_all(&console.controllers).await {
        let pools = reading.status.as_deref().into_iter().flat_map(|status: &ControllerStatusReply| &status.pools);
        let groups = pools.flat_map(|pool| pool.groups.iter().map(move |group| (&pool.name, group)));
        for (pool, group) in groups {
            for one in &group.worker_list {
                let why = cell(format!("pool {pool}, key {}", group.key)).note_some(one.detail.clone());
                let age = cell(Value::Lasts(one.age_seconds));
                let row = row_without_slots(2, [cell(&one.id), cell(pool), cell(one.state.as_str()), why, age]);
                found.insert(one.id.clone(), row);
            }
        }
    }
    found.into_iter().filter(|(id, _)| !known.contains(id.as_str())).map(|(_, row)| row).collect()
}

/// The workers of all hosts, those to look at first.
async fn table(console: &Console, readings: &[Reading<WorkerStatusReply>]) -> Table {
    let known = readings.iter().filter_map(|reading| Some(reading.status.as_ref()?.id.as_str())).collect();
    let mut rows: Vec<Row> =
        console.workers.iter().zip(readings).map(|(target, reading)| row(target, reading)).collect();
    rows.extend(others(console, &known).await);
    rows.sort_by_key(|(rank, _)| *rank);
    let columns = ["worker", "group", "state", "slots", "shortest lease", "why", "seen"];
    Table::new("workers, those to look at first", &columns, rows.into_iter().map(|(_, row)| row))
        .or("No worker is known: none has claimed from a queue lately, and the console was told of none.")
}

/// The workers of all hosts, and the status of each that has answered, in lines.
pub(crate) async fn read(console: &Console) -> (Table, BTreeMap<String, String>) {
    let readings = read_all(&console.workers).await;
    let known = readings.iter().filter_map(|reading| reading.status.as_deref());
    let statuses = known.map(|status| (status.id.clone(), text::report(&worker::report(status, &[])))).collect();
    (table(console, &readings).await, statuses)
}

pub(super) async fn page(State(console): Shared) -> PageResult {
    let readings = read_all(&console.workers).await;
    let section = Section { tables: vec![table(&console, &readings).await], ..Section::default() };
    let main = html! { (summary(&readings)) (page::section(&section)) };
    let content = console.page("fleet", html! { "fleet" }, main);
    Ok(PageContent { refresh_seconds: QUEUE_REFRESH_SECONDS, ..content }.build())
}

pub(super) async fn worker_page(State(console): Shared, Path(id): Path<String>) -> PageResult {
    for target in &console.workers {
        let reading = target.read().await;
        if reading.status.as_ref().is_some_and(|status| status.id == id) {
            let history = history(&console, target).await;
            let mut report = report(&reading, "worker", |status| worker::report(status, &[]));
            let queue = console.only_queue();
            if let (Some(queue), Some(report)) = (queue, &mut report) {
                link_tasks(report.sections.iter_mut().flat_map(|section| &mut section.tables), queue);
            }
            let main = html! {
                @for section in report.iter().flat_map(|report| &report.sections) { (page::section(section)) }
                @if target.address().is_some() || console.history.is_some() { (hour(&history, queue)) }
            };
            let name = report.map_or_else(|| html! { "worker" }, |report| page::cell(&report.name));
            return Ok(console.page(&id, name, main).build());
        }
    }
    Err(PageError::not_found(format!("this console knows no worker {id:?}; it may not have answered yet")))
}

/// The last hour of a worker as rows of slots.
fn hour(history: &[ClaimHistory], queue: Option<&QueueTarget>) -> Markup {
    let window = HISTORY_WINDOW.as_secs_f64();
    let named = |claim: &ClaimHistory| {
        let href = queue.filter(|_| is_slugid(&claim.task)).map(|queue| path(queue, &claim.task));
        let mut bars = bars(claim, href.as_deref());
        let name = claim.name.as_deref().unwrap_or(&claim.task);
        let end = claim.outcome.as_deref().unwrap_or("held");
        bars.iter_mut().for_each(|bar| bar.title = format!("{name}, {end}: {}", bar.title));
        bars
    };
    let lanes = packed(history.iter().map(named).filter(|bars| !bars.is_empty()).collect());
    let lane = |(index, bars): (usize, Vec<Bar>)| Lane { label: format!("{}", index + 1), bars, ticks: Vec::new() };
    let lanes: Vec<Lane> = lanes.into_iter().enumerate().map(lane).collect();
    let rows = history.iter().rev().take(CONSOLE_TASKS_SHOWN).map(|claim| {
        let phases = bars(claim, None).into_iter().map(|bar| bar.title).collect::<Vec<_>>().join(", ");
        let began = claim.phases.first().map(|phase| phase.seconds_ago);
        vec![
            cell(Value::Code(format!("{}/{}", claim.task, claim.run))).note_some(claim.name.as_ref()),
            cell(claim.outcome.as_deref().unwrap_or("held")),
            maybe(began, Value::Ago),
            cell(phases),
        ]
    });
    let more = history.len().saturating_sub(CONSOLE_TASKS_SHOWN);
    let mut numbers = Table { more, ..Table::new("", &["task", "outcome", "claimed", "phases"], rows) };
    if let Some(queue) = queue {
        link_tasks([&mut numbers], queue);
    }
    html! {
        section {
            h3 { "slots in the last hour" }
            @if lanes.is_empty() { p.empty { "No claim yet." } } @else {
                (timeline(&lanes, -window, 0.0, ["an hour ago", "now"]))
                (legend(&PHASES[1..]))
                details data-name="hour" { summary { "the same as numbers" } (page::table(&numbers)) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value as Json, json};

    use super::*;
    use journeyman_worker::engine::counters::WorkerCounts;

    fn reading(leases: &[Option<f64>]) -> Reading<WorkerStatusReply> {
        let claim = |left: &Option<f64>| {
            json!({
                "task": "fN1SbArXTPSVFNUvaOlinQ", "run": 0, "source": "ci", "state": "running", "held_seconds": 1.0,
                "lease_left_seconds": left, "lease_seconds": 1200.0, "log_bytes": 0,
            })
        };
        let status = json!({
            "version": "0.3.0", "id": "host-1", "group": "eu", "pid": 1, "state": "running", "uptime_seconds": 1.0,
            "capacity": 4, "sources": [], "claims": leases.iter().map(claim).collect::<Vec<Json>>(), "last_hour": {},
            "counts": WorkerCounts::default(), "containment": "group", "hints": [],
            "host": { "disk_free": 0, "disk_min": 0, "memory_free": 0, "memory_min": 0 },
        });
        let status: WorkerStatusReply = serde_json::from_value(status).unwrap();
        Reading { status: Some(Arc::new(status)), age: None, error: None }
    }

    #[test]
    fn a_worker_with_a_short_lease_comes_first_and_claims_without_a_lease_hide_none() {
        let this_host = Target::Own(Arc::new(|| Box::pin(async { None })));
        let shown = |leases: &[Option<f64>]| {
            let (rank, cells) = row(&this_host, &reading(leases));
            (rank, cells[4].text())
        };
        let (rank, cells) = row(&this_host, &Reading { status: None, age: None, error: Some("gone".to_owned()) });
        assert_eq!((rank, cells[0].text(), cells[5].text()), (0, "this host".to_owned(), "gone".to_owned()));
        assert_eq!(shown(&[]), (2, "–".to_owned()));
        assert_eq!(shown(&[None, Some(900.0), Some(600.0)]), (2, "10m00s".to_owned()));
        assert_eq!(shown(&[Some(900.0), Some(3.0)]), (0, "3s !".to_owned()));
    }
}
