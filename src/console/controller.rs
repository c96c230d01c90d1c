//! What a controller shows.

use core::cmp::Reverse;
use std::collections::BTreeSet;

use serde_json::{Value as Json, json};

use super::openmetrics::{Metric, each, metrics, sample};
use super::rows::{
    Action, Cell, Headline, Level, NONE, Number, Report, Row, Section, Table, Value, cell, maybe, row, up,
};
use crate::control::controller_api::ControllerStatusReply;
use journeyman_domain::limits::PAGE_GROUPS_MAX;
use journeyman_services::controller::poison_message::PoisonedRequest;
use journeyman_services::controller::poison_queue::PoisonList;
use journeyman_services::controller::status::{
    DemandStatus, ErrorStatus, GroupPhase, GroupStatus, PauseStatus, PoolStatus, Role, ScaleStatus, WorkerActivity,
    WorkerStatus,
};

/// The author of the page's commands.
const AUTHOR: &str = "the page";

pub fn report(status: &ControllerStatusReply) -> Report {
    let pools = &status.pools;
    let names: Vec<&str> = pools.iter().map(|pool| pool.name.as_str()).collect();
    Report {
        title: format!("{} · {}", title(pools), names.join(", ")),
        name: cell("controller").and(up(status.uptime_seconds)),
        version: status.version.clone(),
        pid: status.pid,
        sections: pools.iter().map(section).collect(),
    }
}

fn title(pools: &[PoolStatus]) -> String {
    if let Some(pool) = pools.iter().find(|pool| pool.role != Role::Active) {
        return pool.role.as_str().to_owned();
    }
    let failing: usize = pools.iter().map(PoolStatus::failing_groups).sum();
    if failing > 0 {
        return format!("{failing} failing");
    }
    format!("{} workers", pools.iter().map(|pool| pool.workers.total()).sum::<u32>())
}

fn section(pool: &PoolStatus) -> Section {
    let mut alerts = Vec::new();
    if let Some(error) = &pool.driver_error {
        let what = "the driver is unavailable, so no worker is started";
        alerts.push((Level::Bad, format!("{what}: {}", error_text(error))));
    }
    if let Some(error) = pool.last_error.as_ref().filter(|_| pool.role != Role::Disconnected) {
        alerts.push((Level::Warn, format!("last error: {}", error_text(error))));
    }
    let mut tables = vec![groups(pool)];
    if pool.starts_workers && pool.groups.iter().any(|group| !group.worker_list.is_empty()) {
        tables.push(workers(pool));
    }
    let title = cell(format!("pool {}", pool.name)).and(&pool.broker.address);
    // A standby accepts no command.
    let title = if pool.role == Role::Standby { title } else { title.action(Some(pause(pool, None))) };
    let poison =
        || Action::new("poison queue", format!("/v1/poison?pool={}", urlencoding::encode(&pool.name)), Json::Null);
    Section {
        title: title.action((pool.role == Role::Active).then(poison)),
        headline: headline(pool),
        alerts,
        facts: facts(pool),
        tables,
    }
}

fn headline(pool: &PoolStatus) -> Headline {
    let failing = pool.failing_groups();
    let level = match pool.role {
        Role::Disconnected => Level::Bad,
        Role::Standby | Role::Starting => Level::Warn,
        Role::Active if failing > 0 => Level::Bad,
        Role::Active if pool.paused.is_some() => Level::Warn,
        Role::Active => Level::Plain,
    };
    let mut why = Vec::new();
    why.extend(pool.inactive_reason().map(|reason| format!("no worker is started or stopped: {reason}")));
    if failing > 0 {
        why.push(format!("groups with failing workers: {failing}"));
    }
    why.extend(pool.paused.as_ref().map(pause_text));
    if why.is_empty() {
        why.push("groups follow demand".to_owned());
    }
    let since = format!("for {}", Value::Took(pool.seconds_in_role).text());
    let cell = why.into_iter().fold(cell(since), Cell::and);
    Headline { level, state: pool.role.as_str().to_owned(), cell }
}

fn facts(pool: &PoolStatus) -> Vec<Row> {
    let counts = pool.counters;
    let phases = GroupPhase::ALL.map(|phase| {
        let many = pool.groups.iter().filter(|group| group.phase == phase).count();
        format!("{many} {}", phase.as_str())
    });
    let ready: u64 = pool.groups.iter().filter_map(|group| group.ready).map(u64::from).sum();
    let settled = pool.groups.iter().filter(|group| group.waiting_for.is_none()).count();
    let warn = |count: u64| if count > 0 { Level::Warn } else { Level::Plain };
    let workers = if pool.starts_workers {
        let budget = pool.max_total.map(|budget| format!("at most {budget}"));
        cell(pool.workers.to_string())
            .note_some(budget)
            .note(format!("{} started", counts.workers_started))
            .note(format!("{} failed", counts.workers_failed))
            .at(warn(counts.workers_failed))
    } else {
        cell("not started by this controller")
    };
    let mut rows = vec![
        row("groups", cell(pool.groups.len()).note(phases.join(", "))),
        row("workers", workers),
        row("ready requests", cell(ready).note("not held by a worker")),
    ];
    rows.extend(pool.external_demands.iter().map(demand));
    rows.extend([
        row("orphans held", cell(pool.orphans_held).note(format!("{} forwarded", counts.orphans_forwarded))),
        row(
            "dead letters",
            cell(format!("{} answered", counts.dead_letters))
                .note(format!("{} moved to the poison queue", counts.poison_requests))
                .at(warn(counts.poison_requests)),
        ),
        row(
            "queues",
            cell(format!("{settled} of {} settled", pool.groups.len()))
                .note(format!("{} operations failed", counts.queue_operation_failures))
                .at(warn(counts.queue_operation_failures)),
        ),
        row("broker", cell(format!("{} disconnects", counts.broker_disconnects))),
    ]);
    rows
}

fn demand(DemandStatus { name, key, pending, claimed, error }: &DemandStatus) -> Row {
    let many = |count: Option<u32>, of: &str| count.map(|count| format!("{count} {of}"));
    let mut cell = cell(many(*pending, "pending").unwrap_or_else(|| "not counted".to_owned()))
        .note_some(many(*claimed, "claimed"));
    if let Some(why) = error {
        cell = cell.note(why).at(Level::Warn);
    }
    row(format!("demand {name} for {key}"), cell)
}

// Failing groups first, then those with work.
fn groups(pool: &PoolStatus) -> Table {
    let mut groups: Vec<&GroupStatus> = pool.groups.iter().collect();
    groups.sort_by_key(|group| (!group.failing, group.consecutive_failures == 0, Reverse(group.ready)));
    let more = groups.len().saturating_sub(PAGE_GROUPS_MAX);
    let columns = ["key", "phase", "next", "ready", "held", "workers", "wanted", "why"];
    let rows = groups.into_iter().take(PAGE_GROUPS_MAX).map(|group| {
        let next = cell(group.next_phase()).and_some(group.next_phase_seconds.map(Value::In));
        let workers = if pool.starts_workers { cell(group.workers.to_string()) } else { cell(NONE) };
        let count = |count: Option<u32>| maybe(count, Value::from);
        vec![
            key(&group.key),
            cell(group.phase.as_str()),
            next,
            count(group.ready),
            count(group.unacknowledged),
            workers,
            count(group.wanted),
            why(pool, group),
        ]
    });
    let empty = match pool.role {
        Role::Active => format!(
            "No groups: no request has arrived yet. `journeyman call --pool {} --key KEY --path /PATH '{{}}'` sends one.",
            pool.name
        ),
        Role::Standby => "The active controller shows the groups.".to_owned(),
        Role::Disconnected | Role::Starting => "Groups are unknown until the broker is connected.".to_owned(),
    };
    Table { more, ..Table::new("groups", &columns, rows).or(empty) }
}

fn key(key: &str) -> Cell {
    if key.is_empty() { cell("the empty key") } else { cell(Value::Code(key.to_owned())) }
}

/// Why a group has so many workers, and what is in the way.
fn why(pool: &PoolStatus, group: &GroupStatus) -> Cell {
    let mut cell = Cell::default();
    if !group.reasons.is_empty() {
        cell = cell.and(group.reasons.join(", "));
    }
    // A pause of the pool is shown with the pool.
    if let Some(paused) = group.paused.as_ref().filter(|_| pool.paused.is_none()) {
        cell = cell.note(pause_text(paused)).at(Level::Warn);
    }
    cell = cell.note_some(group.scale_override.as_ref().map(scale_text));
    if group.consecutive_failures > 0 {
        let level = if group.failing { Level::Bad } else { Level::Warn };
        let next = group.restart_backoff_seconds.map(|left| format!(", next start {}", Value::In(left).text()));
        let text = format!("workers failed in a row: {}{}", group.consecutive_failures, next.unwrap_or_default());
        cell = cell.note(text).at(level);
        cell = cell.note_some(group.last_exit.as_ref().map(|exit| format!("last failure {}", error_text(exit))));
    }
    let details = group.worker_list.iter().filter_map(|worker| worker.detail.as_ref()).collect::<BTreeSet<_>>();
    cell = details.into_iter().chain(&group.waiting_for).fold(cell, Cell::note);
    if pool.role == Role::Standby || !pool.starts_workers { cell } else { group_actions(pool, group, cell) }
}

fn scale_text(scaled: &ScaleStatus) -> String {
    let number = |number: Option<u32>| number.map_or_else(|| "as configured".to_owned(), |number| number.to_string());
    let (min, max, left) = (number(scaled.min), number(scaled.max), Value::Took(scaled.remaining_seconds).text());
    format!("min {min} and max {max} by {} for {left}", scaled.by)
}

fn pause_text(paused: &PauseStatus) -> String {
    let left = paused.remaining_seconds.map(|left| format!("for {}", Value::Took(left).text()));
    format!("paused by {} {}", paused.by, left.as_deref().unwrap_or("until it is resumed"))
}

fn error_text(error: &ErrorStatus) -> String {
    format!("{}: {}", Value::Ago(error.seconds_ago).text(), error.message)
}

fn workers(pool: &PoolStatus) -> Table {
    let all = || pool.groups.iter().flat_map(|group| group.worker_list.iter().map(move |worker| (group, worker)));
    let rows = all().take(PAGE_GROUPS_MAX).map(|(group, worker)| {
        let is_stopping = worker.state == WorkerActivity::Stopping;
        let state = cell(worker.state.as_str()).at(if is_stopping { Level::Warn } else { Level::Plain });
        let drain = (!is_stopping && pool.role != Role::Standby).then(|| drain(pool, worker));
        vec![
            cell(Value::Code(worker.id.clone())),
            state.action(drain),
            key(&group.key),
            cell(Value::Lasts(worker.age_seconds)),
            maybe(worker.detail.clone(), Value::Text),
        ]
    });
    let more = all().count().saturating_sub(PAGE_GROUPS_MAX);
    Table { more, ..Table::new("workers", &["worker", "state", "key", "up", "detail"], rows) }
}

fn command(pool: &PoolStatus, label: &str, command: Json) -> Action {
    let body = json!({ "pool": pool.name, "command": command, "note": { "by": AUTHOR } });
    Action::new(label, "/v1/commands", body)
}

/// Pauses or resumes the pool or a group.
fn pause(pool: &PoolStatus, group: Option<&GroupStatus>) -> Action {
    let (of, paused) = match group {
        Some(group) => (json!({ "key": group.key }), &group.paused),
        None => (json!({}), &pool.paused),
    };
    match (paused.is_some(), group) {
        (true, _) => command(pool, "resume", json!({ "resume": of })),
        (false, Some(_)) => command(pool, "pause", json!({ "pause": of })),
        (false, None) => command(pool, "pause", json!({ "pause": of }))
            .confirm("Pause the whole pool? No worker is started or stopped until it is resumed."),
    }
}

fn group_actions(pool: &PoolStatus, group: &GroupStatus, cell: Cell) -> Cell {
    let key = &group.key;
    let scaled = group.scale_override.as_ref();
    let number = |label, place, value, times| Number { label, place, value, times };
    let scale = Action {
        numbers: vec![
            number("min", "command.scale.min", scaled.and_then(|scaled| scaled.min), 1),
            number("max", "command.scale.max", scaled.and_then(|scaled| scaled.max), 1),
            number("minutes", "command.scale.seconds", Some(60), 60),
        ],
        ..command(pool, "scale", json!({ "scale": { "key": key } }))
    };
    let retry = || command(pool, "retry now", json!({ "retry": { "key": key } }));
    let reset = || command(pool, "reset scale", json!({ "scale": { "key": key, "seconds": 0 } }));
    cell.action(pool.paused.is_none().then(|| pause(pool, Some(group))))
        .action((group.consecutive_failures > 0).then(retry))
        .action(Some(scale))
        .action(scaled.map(|_| reset()))
}

fn drain(pool: &PoolStatus, worker: &WorkerStatus) -> Action {
    command(pool, "drain", json!({ "drain": { "worker": worker.id } }))
        .confirm(format!("Drain {}? It finishes what it holds.", worker.id))
}

/// The poison queues of pools, the oldest request first.
pub fn poison<'a>(pools: impl IntoIterator<Item = (&'a String, &'a PoisonList)>) -> Table {
    let columns = ["id", "pool", "key", "reason", "attempts", "moved at", "worker", "exit", "bytes"];
    let mut table = Table::new("poison queue", &columns, []).or("The poison queue is empty.");
    for (pool, found) in pools {
        table.more += found.not_scanned as usize;
        table.rows.extend(found.requests.iter().map(|entry| poison_row(pool, entry)));
    }
    table
}

fn poison_row(pool: &str, entry: &PoisonedRequest) -> Vec<Cell> {
    let text = |text: &Option<String>| maybe(text.clone(), Value::Text);
    let these = json!({ "ids": [entry.id] });
    let discard =
        settle(pool, "discard", "discard", &these).confirm(format!("Discard {}? This cannot be undone.", entry.id));
    let times = (entry.poison_count > 1).then(|| format!("{} times", entry.poison_count));
    let log = (!entry.worker_log.is_empty()).then(|| Value::Long(entry.worker_log.join("\n")));
    vec![
        cell(Value::Code(entry.id.clone()))
            .action(Some(settle(pool, "requeue", "requeue", &these)))
            .action(Some(discard)),
        cell(pool),
        text(&entry.key),
        cell(&entry.reason),
        maybe(entry.attempts, |attempts| attempts.to_string().into()),
        text(&entry.poisoned_at).note_some(times),
        text(&entry.worker),
        text(&entry.worker_exit).note_some(log),
        cell(entry.body_bytes.to_string()),
    ]
}

fn settle(pool: &str, label: &str, action: &str, selection: &Json) -> Action {
    let body = json!({ "pool": pool, "selection": selection, "action": action, "by": AUTHOR });
    Action::new(label, "/v1/poison", body)
}

/// The poison queue of one pool on its page, with what can be done to all of it.
pub fn poison_section(pool: &String, found: &PoisonList) -> Section {
    let all = json!("all");
    let title = cell(format!("poison queue of {pool}"))
        .action(Some(settle(pool, "requeue all", "requeue", &all).confirm("Requeue all of them?")))
        .action(Some(
            settle(pool, "discard all", "discard", &all).confirm("Discard all of them? This cannot be undone."),
        ));
    Section { title, tables: vec![poison([(pool, found)])], ..Section::default() }
}

/// A request with the exit and the log of the last worker of its key.
pub fn poisoned(entry: &PoisonedRequest) -> Vec<Row> {
    let text = |text: &Option<String>| text.as_ref().map(cell);
    let times = (entry.poison_count > 1).then(|| format!("{} times", entry.poison_count));
    let mut rows = Vec::new();
    let mut add = |label: &str, cell: Option<Cell>| rows.extend(cell.map(|cell| row(label, cell)));
    add("id", Some(cell(&entry.id)));
    add("key", text(&entry.key));
    add("reason", Some(cell(&entry.reason)));
    add("attempts", entry.attempts.map(|attempts| cell(attempts.to_string())));
    add("moved at", text(&entry.poisoned_at).map(|at| at.note_some(times)));
    add("worker", text(&entry.worker));
    add("exit", text(&entry.worker_exit));
    add("body", Some(cell(format!("{} bytes", entry.body_bytes))));
    for (name, value) in entry.properties.iter().chain(&entry.headers) {
        add(name, Some(cell(value)));
    }
    for line in &entry.worker_log {
        add("worker log", Some(cell(line)));
    }
    rows
}

/// No label holds a routing key, since the number of keys has no bound.
pub fn metrics(status: &ControllerStatusReply) -> Vec<Metric> {
    let pools = &status.pools;
    let in_phase = |pool: &PoolStatus, phase| pool.groups.iter().filter(|group| group.phase == phase).count();
    let by_pool = |read: fn(&PoolStatus) -> u64| each(pools, |pool| sample([&pool.name], read(pool)));
    let groups = |read: fn(&GroupStatus) -> u32| {
        each(pools, |pool| sample([&pool.name], pool.groups.iter().map(|group| u64::from(read(group))).sum::<u64>()))
    };
    let roles = pools.iter().flat_map(|pool| Role::ALL.map(|role| (pool, role)));
    let phases = pools.iter().flat_map(|pool| GroupPhase::ALL.map(|phase| (pool, phase)));
    let states = pools.iter().flat_map(|pool| pool.workers.by_state().map(|state| (pool, state)));
    metrics! {
        Info "build{version}" "The version that runs." = sample([&status.version], true);
        Gauge "controller_uptime_seconds" "Seconds since the controller started." = status.uptime_seconds;
        Gauge "controller_role{pool,role}" "1 for the role of this controller in the pool."
            = each(roles, |(pool, role)| sample([&pool.name, role.as_str()], pool.role == role));
        Gauge "controller_groups{pool,phase}" "Groups by phase."
            = each(phases, |(pool, phase)| sample([&pool.name, phase.as_str()], in_phase(pool, phase)));
        Gauge "controller_groups_failing{pool}" "Groups whose workers keep failing." = groups(|group| group.failing.into());
        Gauge "controller_driver_up{pool}" "1 while the driver lists and starts workers."
            = by_pool(|pool| pool.driver_error.is_none().into());
        Gauge "controller_workers{pool,state}" "Workers by state."
            = each(states, |(pool, (state, count))| sample([&pool.name, state], count));
        Gauge "controller_workers_wanted{pool}" "Desired number of workers, all groups together."
            = groups(|group| group.wanted.unwrap_or_default());
        Gauge "controller_ready_requests{pool}" "Requests that are ready in the queues of groups."
            = groups(|group| group.ready.unwrap_or_default());
        Gauge "controller_orphans_held{pool}" "Orphan requests that the controller holds." = by_pool(|pool| pool.orphans_held);
        Gauge "controller_groups_unsettled{pool}" "Groups whose queue waits for an operation."
            = groups(|group| group.waiting_for.is_some().into());
        Counter "controller_orphans_forwarded{pool}" "Orphan requests that were forwarded to their queue."
            = by_pool(|pool| pool.counters.orphans_forwarded);
        Counter "controller_dead_letters{pool}" "Requests that the controller answered with an error."
            = by_pool(|pool| pool.counters.dead_letters);
        Counter "controller_poison_requests{pool}" "Requests that were moved to the poison queue."
            = by_pool(|pool| pool.counters.poison_requests);
        Counter "controller_queue_operation_failures{pool}" "Queue operations that failed."
            = by_pool(|pool| pool.counters.queue_operation_failures);
        Counter "controller_activity_reports{pool}" "Activity reports of workers."
            = by_pool(|pool| pool.counters.activity_reports);
        Counter "controller_workers_started{pool}" "Workers that were started."
            = by_pool(|pool| pool.counters.workers_started);
        Counter "controller_worker_failures{pool}" "Workers that exited without a stop request, or failed to start."
            = by_pool(|pool| pool.counters.workers_failed);
        Counter "controller_broker_disconnects{pool}" "How often the connection to the broker was lost."
            = by_pool(|pool| pool.counters.broker_disconnects);
    }
}
