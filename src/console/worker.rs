//! What a worker shows.

use super::openmetrics::{Metric, Number, Sample, by_label, each, histogram, metrics, sample};
use super::rows::{Cell, Headline, Level, Report, Row, Section, Table, Value, cell, maybe, precise, row, up};
use super::text::cut;
use crate::control::WorkerStatusReply;
use journeyman_domain::outcome::PrepareFailure;
use journeyman_worker::engine::Note;
use journeyman_worker::engine::counters::OutcomeCounts;
use journeyman_worker::engine::durations::{BOUNDS_SECONDS, EndKind, TaskPhase};
use journeyman_worker::engine::status::{
    ActivityStatus, BlockedReason, ClaimCommandStatus, ClaimDetail, ClaimStatus, LifecycleState, PhaseStatus,
    RecentResult, SourceStatus, WorkerStatus,
};
use journeyman_worker::source::InspectionTable;

const PROCESSES_MAX: usize = 20;
const NAME_CHARS_MAX: usize = 40;
const PROGRESS_CHARS_MAX: usize = 100;

/// `inspected` are the sources that have a page of their own.
pub fn report(status: &WorkerStatusReply, inspected: &[String]) -> Report {
    let view = &status.snapshot;
    Report {
        title: format!("{} {}/{} · {}", view.state.as_str(), view.claims.len(), view.capacity, status.id),
        name: cell(format!("worker {} in {}", status.id, status.group)).and(up(view.uptime_seconds)),
        version: status.version.clone(),
        pid: status.pid,
        sections: vec![section(view, inspected)],
    }
}

pub fn section(view: &WorkerStatus, inspected: &[String]) -> Section {
    let mut tables = vec![claims(view), sources(&view.sources, inspected)];
    if !view.sidecars.is_empty() {
        tables.push(sidecars(view));
    }
    tables.extend([recent_results(&view.recent_results), last_hour(view.last_hour)]);
    Section {
        title: Cell::default(),
        headline: headline(view),
        alerts: view.hints.iter().map(|hint| (Level::Warn, format!("hint: {hint}"))).collect(),
        facts: facts(view),
        tables,
    }
}

/// Says whether the worker claims, and why not.
pub(crate) fn claiming(view: &WorkerStatus) -> (Level, String) {
    let down: Vec<&str> =
        view.sources.iter().filter(|source| source.failing).map(|source| source.name.as_str()).collect();
    let all_down = !down.is_empty() && !view.sources.iter().any(SourceStatus::is_up);
    match (&view.blocked_message, view.blocked_reason) {
        (Some(why), reason) => {
            let level = match reason {
                Some(reason) if reason.is_problem() => Level::Bad,
                Some(BlockedReason::Full) | None => Level::Plain,
                Some(_) => Level::Warn,
            };
            (level, format!("not claiming: {why}"))
        }
        (None, _) if all_down => (Level::Bad, format!("no source answers: {}", down.join(", "))),
        (None, _) if !down.is_empty() => (Level::Warn, format!("claiming, except from {}", down.join(", "))),
        (None, _) => (Level::Plain, "claiming".to_owned()),
    }
}

/// What the worker does, and why it claims nothing, if so.
pub fn headline(view: &WorkerStatus) -> Headline {
    let (level, claiming) = claiming(view);
    let pending = Some(view.cleanup_pending.len()).filter(|pending| *pending > 0);
    let cell = cell(view.occupancy())
        .and_some(pending.map(|pending| format!("{pending} cleanup pending")))
        .and(claiming)
        .and_some(view.note.as_ref().map(note));
    Headline { level, state: view.state.as_str().to_owned(), cell }
}

fn note(note: &Note) -> String {
    let text = if note.text.is_empty() { String::new() } else { format!(" “{}”", note.text) };
    format!("by {}{text}", note.by)
}

fn facts(view: &WorkerStatus) -> Vec<Row> {
    let host = view.host;
    let free = |free: Option<u64>| free.map_or_else(|| cell("unknown"), |free| cell(Value::Bytes(free)));
    let min = |bytes| format!("at least {}", Value::Bytes(bytes).text());
    let mut rows = vec![
        row("disk free", free(host.disk_free).note(min(host.disk_min))),
        row("memory free", free(host.memory_free).note(min(host.memory_min))),
        row("containment", cell(&view.containment)),
    ];
    rows.extend(clock(&view.sources).map(|clock| row("clock", clock)));
    rows.extend(view.activity.iter().map(|activity| row("activity reports", reports(activity))));
    rows.extend(view.watches.iter().map(|watch| {
        let state = match &watch.error {
            None => cell("connected"),
            Some(error) => cell("unreachable").at(Level::Bad).note(error),
        };
        row(format!("termination notices: {}", watch.provider), state)
    }));
    rows.extend(
        view.notice.map(|notice| row("termination notice", cell(Value::Ago(notice.seconds_ago)).at(Level::Bad))),
    );
    rows.extend(view.recovered.map(|recovered| row("recovered", cell(recovered.to_string()))));
    rows.extend(view.next.as_ref().map(|next| row("next", cell(next))));
    rows
}

/// The largest difference between this host's clock and that of a source.
fn clock(sources: &[SourceStatus]) -> Option<Cell> {
    let skews = sources.iter().filter_map(|source| Some((source.clock_skew_seconds?, &source.name)));
    let (ahead, name) = skews.max_by_key(|(ahead, _)| ahead.unsigned_abs())?;
    // The Date header has whole seconds, and the response takes time.
    if ahead.unsigned_abs() <= 1 {
        return Some(cell("ok"));
    }
    let way = if ahead > 0 { "ahead of" } else { "behind" };
    Some(cell(format!("{} s {way} {name}", ahead.unsigned_abs())).at(Level::Warn))
}

fn reports(ActivityStatus { exchange, reports, failures, error }: &ActivityStatus) -> Cell {
    let cell = cell(format!("{reports} to {exchange}")).note(format!("{failures} failures"));
    match error {
        Some(error) => cell.note(error).at(Level::Bad),
        None => cell,
    }
}

fn ago(seconds: Option<f64>) -> Cell {
    seconds.map_or_else(|| cell("never"), |seconds| cell(Value::Ago(seconds)))
}

fn short_name(name: Option<&String>) -> Cell {
    maybe(name, |name| cut(name, NAME_CHARS_MAX).into())
}

fn claims(view: &WorkerStatus) -> Table {
    let next = if view.state == LifecycleState::Paused {
        " `journeyman resume` resumes claiming."
    } else if view.blocked_reason.is_none() && view.sources.iter().all(SourceStatus::is_up) {
        " No task is pending. `journeyman task create --queue QUEUE -- /bin/echo hello` creates one."
    } else {
        ""
    };
    claim_table(&view.claims).or(format!("No claims.{next}"))
}

fn progress(claim: &ClaimStatus) -> Option<&str> {
    claim.progress.as_deref().filter(|progress| !progress.is_empty())
}

/// `journeyman claims list`
pub fn claim_table(claims: &[ClaimStatus]) -> Table {
    let columns = ["task", "name", "lease left", "state", "source", "held for", "log", "memory", "reclaimed"];
    let rows = claims.iter().map(|claim| {
        vec![
            cell(Value::Code(format!("{}/{}", claim.task, claim.run))),
            short_name(claim.name.as_ref()),
            maybe(claim.lease_left_seconds, |seconds| Value::Left { seconds, of: claim.lease_seconds }),
            cell(&claim.state).and_some(progress(claim).map(|progress| cut(progress, PROGRESS_CHARS_MAX))),
            cell(&claim.source),
            cell(Value::Lasts(claim.held_seconds)),
            cell(Value::Bytes(claim.log_bytes)),
            maybe(claim.memory_bytes, Value::Bytes),
            ago(claim.reclaimed_seconds_ago),
        ]
    });
    Table::new("claims, shortest lease first", &columns, rows).or("No claims.")
}

fn sources(sources: &[SourceStatus], inspected: &[String]) -> Table {
    let columns = ["source", "status", "last poll", "last claim", "next poll", "claims", "detail"];
    let rows = sources.iter().map(|source| {
        let status = if source.failing || (source.polled_seconds_ago.is_none() && source.error.is_some()) {
            cell("FAILING").at(Level::Bad)
        } else if source.polled_seconds_ago.is_some() {
            cell("ok").at(Level::Good)
        } else {
            cell("not polled yet").at(Level::Warn)
        };
        let name = if inspected.contains(&source.name) {
            cell(Value::Link { text: source.name.clone(), href: format!("/sources/{}", source.name) })
        } else {
            cell(&source.name)
        };
        let detail = match &source.error {
            Some(error) => cell(&error.message)
                .note(format!("{} in a row", error.consecutive))
                .note(Value::Ago(error.seconds_ago))
                .note(&source.description),
            None => cell(&source.description),
        };
        let next = source.next_poll_in_seconds.map_or_else(|| cell(&source.state), |ahead| cell(Value::In(ahead)));
        let next = next.and_some(source.blocked_message.as_ref());
        let claims = cell(source.counts.claims);
        vec![name, status, ago(source.polled_seconds_ago), ago(source.last_received_seconds_ago), next, claims, detail]
    });
    Table::new("sources", &columns, rows)
}

fn sidecars(view: &WorkerStatus) -> Table {
    let rows = view.sidecars.iter().map(|sidecar| {
        let status = if sidecar.up { cell("ok").at(Level::Good) } else { cell("DOWN").at(Level::Bad) };
        vec![cell(&sidecar.name), status, cell(sidecar.restarts), cell(&sidecar.message)]
    });
    Table::new("sidecars", &["handler", "status", "restarts", "message"], rows)
}

fn recent_results(results: &[RecentResult]) -> Table {
    let rows = results.iter().map(|result| {
        let level = if result.outcome == "completed" { Level::Good } else { Level::Bad };
        vec![
            cell(Value::Code(format!("{}/{}", result.task, result.run))),
            short_name(result.name.as_ref()),
            cell(&result.outcome).at(level).and_some(reason_beside(result)),
            cell(&result.source),
            cell(Value::Took(result.held_seconds)),
            cell(Value::Ago(result.seconds_ago)),
        ]
    });
    Table::new("recent results", &["task", "name", "outcome", "source", "held for", "ended"], rows)
        .or("No claim has ended yet.")
}

/// The rest is in the task's log.
const REASON_CHARS_MAX: usize = 60;

/// Without what the outcome says too.
fn reason_beside(result: &RecentResult) -> Option<String> {
    let reason = result.reason.as_deref()?;
    let known = [&*result.outcome, PrepareFailure::Malformed.description()];
    let without = |known: &&str| reason.strip_prefix(*known)?.strip_prefix(": ");
    let reason = known.iter().find_map(without).unwrap_or(reason);
    Some(cut(reason, REASON_CHARS_MAX))
}

/// Kinds that are rare are left out where there were none.
fn last_hour(hour: OutcomeCounts) -> Table {
    let often = [
        ("completed", hour.completed),
        ("failed", hour.failed),
        ("exceptions", hour.exceptions()),
        ("released", hour.worker_shutdown),
        ("lost", hour.lost),
    ];
    let rare = [
        ("deferred", hour.deferred),
        ("canceled", hour.canceled),
        ("deadline exceeded", hour.deadline_exceeded),
        ("superseded", hour.superseded),
        ("unconfirmed", hour.unconfirmed),
    ];
    let shown = often.into_iter().chain(rare.into_iter().filter(|(_, count)| *count > 0));
    let (columns, counts): (Vec<&str>, Vec<Cell>) = shown.map(|(name, count)| (name, cell(count))).unzip();
    Table::new("last hour", &columns, [counts])
}

/// `journeyman claims show`
pub fn claim(detail: &ClaimDetail) -> Vec<Row> {
    let claim = &detail.claim;
    let processes: Vec<String> = detail.processes.iter().take(PROCESSES_MAX).map(ToString::to_string).collect();
    let more = Some(detail.processes.len().saturating_sub(PROCESSES_MAX)).filter(|more| *more > 0);
    let path = |path: &std::path::PathBuf| cell(path.display().to_string());
    let left = maybe(claim.lease_left_seconds, |seconds| Value::Left { seconds, of: claim.lease_seconds })
        .note_some(claim.lease_seconds.map(|whole| format!("of {}", Value::Took(whole).text())));
    let reclaimed = cell(format!("{} times", detail.reclaims))
        .note_some(claim.reclaimed_seconds_ago.map(Value::Ago))
        .note_some(detail.reclaim_in_seconds.map(|next| format!("next {}", Value::In(next).text())));
    let mut rows = vec![row("task", cell(Value::Code(format!("{}/{}", claim.task, claim.run))))];
    let mut add = |label: &str, cell: Option<Cell>| rows.extend(cell.map(|cell| row(label, cell)));
    add("name", claim.name.as_ref().map(cell));
    add("group", detail.group.as_ref().map(cell));
    add("source", Some(cell(&claim.source).note(&detail.source_description)));
    add("received", detail.dequeue_count.map(|count| cell(format!("{count} times"))));
    add("handler", Some(cell(&detail.handler)));
    add("state", Some(cell(&claim.state).and_some(progress(claim))));
    add("held", Some(cell(Value::Lasts(claim.held_seconds))));
    add("lease left", Some(left));
    add("reclaimed", Some(reclaimed));
    add("command", detail.last_command.as_ref().map(command));
    add("containment", Some(cell(&detail.containment)));
    add("cgroup", detail.cgroup.as_ref().map(path));
    add("processes", Some(cell(processes.join(" ")).note_some(more.map(|more| format!("and {more} more")))));
    add("directory", detail.work_dir.as_ref().map(path));
    add("log", Some(cell(Value::Bytes(claim.log_bytes))));
    add("memory", claim.memory_bytes.map(Value::Bytes).map(cell));
    add("peak memory", detail.memory_peak_bytes.map(Value::Bytes).map(cell));
    add("CPU time", detail.cpu_seconds.map(Value::Lasts).map(cell));
    add("trace", claim.trace_id.as_ref().map(cell));
    rows.extend(detail.phases.iter().map(phase));
    rows
}

fn command(ClaimCommandStatus { command, seconds_ago, note: by }: &ClaimCommandStatus) -> Cell {
    cell(command).and(Value::Ago(*seconds_ago)).and(note(by))
}

fn phase(phase: &PhaseStatus) -> Row {
    let took = match phase.duration_seconds {
        None => "running".to_owned(),
        Some(seconds) => format!("took {}", precise(seconds)),
    };
    row(format!("phase {}", phase.phase), cell(Value::Ago(phase.seconds_ago)).note(took))
}

/// What the queue of a source holds and who works for it.
pub fn source(name: &str, tables: &Result<Vec<InspectionTable>, String>) -> Section {
    let (headline, tables) = match tables {
        Ok(tables) => (Headline { state: name.to_owned(), ..Headline::default() }, tables.as_slice()),
        Err(why) => (Headline { level: Level::Bad, state: "unknown".to_owned(), cell: cell(why) }, &[][..]),
    };
    let tables = tables.iter().map(inspection).collect();
    Section { title: cell(format!("Source {name}")), headline, tables, ..Section::default() }
}

fn inspection(found: &InspectionTable) -> Table {
    let columns: Vec<String> =
        found.columns.iter().map(|column| column.trim_end_matches("_seconds_ago").replace('_', " ")).collect();
    let cells = |row: &serde_json::Value| found.columns.iter().map(|column| json_cell(column, &row[*column])).collect();
    let title = found.note.map_or_else(|| found.name.to_owned(), |note| format!("{}: {note}", found.name));
    let rows = found.rows.iter().map(cells).collect();
    Table { title, columns, rows, more: found.more, empty: "None.".to_owned() }
}

fn json_cell(column: &str, value: &serde_json::Value) -> Cell {
    use serde_json::Value as Json;
    match value {
        Json::Null => maybe(None, Value::Text),
        Json::Bool(is_set) => cell(if *is_set { "yes" } else { "no" }),
        Json::Number(seconds) if column.ends_with("_seconds_ago") => {
            cell(Value::Ago(seconds.as_f64().unwrap_or_default()))
        }
        Json::Number(number) => cell(number.to_string()),
        Json::String(text) => cell(text),
        Json::Array(items) => {
            Cell { parts: items.iter().flat_map(|item| json_cell(column, item).parts).collect(), ..Cell::default() }
        }
        Json::Object(fields) => {
            let texts: Vec<String> = fields.values().map(|value| json_cell(column, value).text()).collect();
            cell(texts.join(" "))
        }
    }
}

/// All series of a source exist from the start, at zero, so that rates are right from the first event. Labels hold names from the
/// configuration and words of a fixed list, never text from a task.
pub fn metrics(status: &WorkerStatusReply) -> Vec<Metric> {
    let view = &status.snapshot;
    let (sources, counts, host) = (&view.sources, &view.counts, view.host);
    let recovered = view.recovered.unwrap_or_default();
    let running_log_bytes: u64 = view.claims.iter().map(|task| task.log_bytes).sum();
    let activity = view.activity.as_ref();
    let [aws, gcp, azure, file] = [counts.notices_aws, counts.notices_gcp, counts.notices_azure, counts.notices_file];
    let other = counts.notices.saturating_sub(aws + gcp + azure + file);
    let held = |source: &SourceStatus| view.claims.iter().filter(|task| task.source == source.name).count();
    let counters = |source: &SourceStatus| each(&source.metrics, |(name, count)| sample([&source.name, name], *count));
    let age = |source: &SourceStatus| source.polled_seconds_ago.map(|age| sample([&source.name], age));
    metrics! {
        Info "build{version}" "Version of the running binary." = sample([&status.version], true);
        Info "worker{worker_id,worker_group,containment}"
            "Worker id and group, and how payload processes are contained."
            = sample([&status.id, &status.group, &view.containment], true);
        Gauge "uptime_seconds" "Time since the worker started." = view.uptime_seconds;
        Gauge "state{state}" "1 for the current state of the worker, 0 for the others."
            = by_label(LifecycleState::ALL.map(|state| (state.as_str(), view.state == state)));
        Gauge "claiming_blocked{reason}" "1 for the reason why the worker claims nothing; all 0 while it claims."
            = by_label(BlockedReason::ALL.map(|why| (why.as_str(), view.blocked_reason == Some(why))));
        Gauge "capacity" "Maximum number of concurrent tasks." = view.capacity;
        Gauge "tasks_running{source}" "Claims held now." = by_source(sources, held);
        Gauge "lease_remaining_min_seconds" "Shortest remaining lease of all claims; absent without claims."
            = view.claims.iter().filter_map(|task| task.lease_left_seconds).reduce(f64::min);
        Counter "tasks{source,outcome,reason}"
            "Ended claims by outcome: completed, failed, exception with its reason, deferred (the work goes on elsewhere), canceled, deadline-exceeded \
            (stopped at the task's deadline), superseded (the queue had another outcome already), unconfirmed (the report was not answered), lost (ended without a report)."
            = sources.iter().flat_map(outcomes).collect::<Vec<_>>();
        Histogram "task_phase_seconds{source,phase,outcome,le}"
            "Time that ended claims took by phase: queue (pending, by the queue's clock; not with AMQP), start (from the claim to the \
            start of the payload), run, store (artifacts and log), report; by outcome: completed, failed, exception, lost."
            = sources.iter().flat_map(durations).collect::<Vec<_>>();
        Counter "claims{source}" "Claims granted." = by_source(sources, |source| source.counts.claims);
        Counter "claims_refused{source}" "Claim requests that the queue rejected or that failed."
            = by_source(sources, |source| source.counts.claims_refused);
        Counter "reclaims{source}" "Leases extended." = by_source(sources, |source| source.counts.reclaims);
        Counter "reclaim_failures{source}" "Reclaim requests that the queue rejected or that failed."
            = by_source(sources, |source| source.counts.reclaims_failed);
        Counter "polls{source}" "Polls answered." = by_source(sources, |source| source.counts.polls);
        Counter "poll_failures{source}" "Polls that the queue rejected or that failed."
            = by_source(sources, |source| source.counts.polls_failed);
        Counter "source_counters{source,counter}"
            "Counters of the source's own, such as replies and requeues of an AMQP source."
            = sources.iter().flat_map(counters).collect::<Vec<_>>();
        Counter "activity_reports" "Activity reports that the broker confirmed; absent where none are sent."
            = activity.map(|activity| activity.reports);
        Counter "activity_failures" "Activity reports that could not be sent."
            = activity.map(|activity| activity.failures);
        Gauge "activity_up" "1 if the last activity report was confirmed."
            = activity.map(|activity| activity.error.is_none() && activity.reports > 0);
        Gauge "source_up{source}" "1 if the source answers polls, 0 before its first answer and after repeated errors."
            = by_source(sources, SourceStatus::is_up);
        Counter "source_errors{source}" "Errors while opening, polling, claiming and recovering."
            = by_source(sources, |source| source.counts.refusals);
        Gauge "source_poll_age_seconds{source}"
            "Time since the source last answered a poll; absent before the first answer."
            = sources.iter().filter_map(age).collect::<Vec<_>>();
        Gauge "sidecar_up{handler}" "1 if the handler's sidecar is ready for tasks; absent for handlers without one."
            = each(&view.sidecars, |sidecar| sample([&sidecar.name], sidecar.up));
        Counter "sidecar_restarts{handler}" "Restarts of the handler's sidecar."
            = each(&view.sidecars, |sidecar| sample([&sidecar.name], sidecar.restarts));
        Counter "delete_failures" "Failed attempts to delete a message." = counts.deletes_failed;
        Counter "high_dequeue_counts" "Messages that the queue has delivered more than 10 times."
            = counts.dequeue_alerts;
        Counter "unreadable_messages" "Messages and claims that could not be parsed." = counts.unreadable_messages;
        Counter "possible_overlaps" "Claims whose payload may have run at the same time on another worker."
            = counts.overlaps_possible;
        Counter "cleanup_pending" "Claims whose payload may have left processes behind." = counts.cleanup_pending;
        Counter "artifacts{result}" "Uploads of artifacts, including logs, by result: stored or failed."
            = by_label([("stored", counts.artifacts), ("failed", counts.artifacts_failed)]);
        Counter "log_bytes" "Size of all task logs." = counts.log_bytes + running_log_bytes;
        Counter "termination_notices{provider}"
            "Notices that the host terminates, by origin: aws, gcp, azure, file or other."
            = by_label([("aws", aws), ("gcp", gcp), ("azure", azure), ("file", file), ("other", other)]);
        Gauge "termination_watch_up{provider}"
            "1 if the metadata service answers or the file can be read, else 0; absent where notices are not watched."
            = each(&view.watches, |watch| sample([&watch.provider], watch.error.is_none()));
        Gauge "termination_reaction_seconds"
            "Time from the first termination notice to the end of the last claim; absent before a notice."
            = view.notice.and_then(|notice| notice.last_claim_ended_after_seconds);
        Counter "recovered{result}"
            "Claims of the previous process, by result: killed (processes were left), reported, released or expired."
            = by_label([
                ("killed", recovered.killed),
                ("reported", recovered.reported),
                ("released", recovered.released),
                ("expired", recovered.expired),
            ]);
        Gauge "journal_errors" "Errors found in the journal of the previous process." = recovered.journal_errors;
        Counter "host_faults" "Times that a host probe failed." = counts.host_faults;
        Counter "config_reloads{result}" "Configuration reloads by result: applied or rejected."
            = by_label([("applied", counts.config_reloads), ("rejected", counts.config_reloads_rejected)]);
        Counter "trace_spans{result}" "Spans of ended claims by result: exported or dropped."
            = view.spans.map_or_else(Vec::new, |spans| by_label([("exported", spans.exported), ("dropped", spans.dropped)]));
        Gauge "disk_free_bytes" "Free space of the work directory; absent where it is unknown." = host.disk_free;
        Gauge "disk_min_bytes" "Below this the worker claims nothing." = host.disk_min;
        Gauge "memory_free_bytes" "Available memory; absent where it is unknown." = host.memory_free;
        Gauge "memory_min_bytes" "Below this the worker claims nothing." = host.memory_min;
    }
}

fn by_source<N: Number>(sources: &[SourceStatus], read: impl Fn(&SourceStatus) -> N) -> Vec<Sample> {
    each(sources, |source| sample([&source.name], read(source)))
}

fn durations(source: &SourceStatus) -> Vec<Sample> {
    let of = |phase: TaskPhase, end: EndKind| {
        let labels = [source.name.as_str(), phase.as_str(), end.as_str()];
        histogram(&labels, &BOUNDS_SECONDS, source.durations.of(phase, end))
    };
    TaskPhase::ALL.iter().flat_map(|phase| EndKind::ALL.iter().flat_map(|end| of(*phase, *end))).collect()
}

fn outcomes(source: &SourceStatus) -> [Sample; 13] {
    let ends = source.counts.outcomes;
    [
        ("completed", "", ends.completed),
        ("failed", "", ends.failed),
        ("exception", "worker-shutdown", ends.worker_shutdown),
        ("exception", "malformed-payload", ends.malformed_payload),
        ("exception", "resource-unavailable", ends.resource_unavailable),
        ("exception", "internal-error", ends.internal_error),
        ("exception", "intermittent-task", ends.intermittent_task),
        ("deferred", "", ends.deferred),
        ("canceled", "", ends.canceled),
        ("deadline-exceeded", "", ends.deadline_exceeded),
        ("superseded", "", ends.superseded),
        ("unconfirmed", "", ends.unconfirmed),
        ("lost", "", ends.lost),
    ]
    .map(|(outcome, reason, count)| sample([&source.name, outcome, reason], count))
}
