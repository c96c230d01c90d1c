//! The status page of a worker.

use jiff::Timestamp;
use maud::{Markup, html};

use super::{CommandButtons, HtmlPage, PageContent, SnapshotClock, build_page, format_seconds, status_links};
use crate::control::WorkerStatusReply;
use crate::worker::counters::OutcomeCounts;
use crate::worker::status::{
    BlockedReason, ClaimStatus, HostStatus, LifecycleState, RecentResult, SidecarSummary, SourceStatus, WorkerStatus,
};
use journeyman_domain::units::format_bytes;

const LEASE_SHORT_SECONDS: f64 = 30.0;

/// `inspected` are the sources that have a page of their own.
pub fn render(status: &WorkerStatusReply, inspected: &[String], now: Timestamp) -> HtmlPage {
    let (view, clock) = (&status.snapshot, SnapshotClock { now });
    let parts = PageContent {
        title: format!("{} {}/{} · {}", view.state.as_str(), view.claims.len(), view.capacity, status.id),
        name: html! { code { (status.id) } " in " code { (status.group) } },
        main: body(status, inspected, clock),
        buttons: CommandButtons::Hidden,
        version: status.version.clone(),
        pid: status.pid,
        aside: html! {},
        links: status_links(),
    };
    build_page(parts, clock)
}

pub(crate) fn body(status: &WorkerStatusReply, inspected: &[String], clock: SnapshotClock) -> Markup {
    let view = &status.snapshot;
    html! {
        (headline(view))
        @for hint in &view.hints { p.warn { "hint: " (hint) } }
        (facts(view, clock))
        h2 { "Claims, shortest lease first" }
        @if view.claims.is_empty() { (no_tasks(view)) } @else { (tasks(&view.claims, clock)) }
        h2 { "Sources" }
        (sources(&view.sources, inspected, clock))
        @if !view.sidecars.is_empty() {
            h2 { "Sidecars" }
            (sidecars(&view.sidecars))
        }
        h2 { "Recent results" }
        @if view.recent_results.is_empty() { div.empty { p { "No claim has ended yet." } } }
        @else { (recent_results(&view.recent_results, clock)) }
        h2 { "Last hour" }
        (last_hour(view.last_hour))
    }
}

fn headline(view: &WorkerStatus) -> Markup {
    let down: Vec<&str> =
        view.sources.iter().filter(|source| source.failing).map(|source| source.name.as_str()).collect();
    let all_down = !down.is_empty() && !view.sources.iter().any(SourceStatus::is_up);
    let mood = match view.blocked_reason.filter(|reason| *reason != BlockedReason::Full) {
        Some(reason) if reason.is_problem() => "first bad",
        Some(_) => "first warn",
        None if all_down => "first bad",
        None if !down.is_empty() => "first warn",
        None => "first",
    };
    html! {
        p class=(mood) {
            strong { (view.state.as_str().replace('-', " ")) }
            @match &view.blocked_message {
                Some(why) => { "not claiming: " (why) },
                None if all_down => { "no source answers: " (down.join(", ")) },
                None if !down.is_empty() => { "claiming, except from " (down.join(", ")) },
                None => { "claiming" },
            }
            @if let Some(note) = &view.note {
                " · by " (note.by)
                @if !note.text.is_empty() { " “" (note.text) "”" }
            }
        }
    }
}

fn facts(view: &WorkerStatus, clock: SnapshotClock) -> Markup {
    let HostStatus { disk_free, disk_min: disk_least, memory_free, memory_min: memory_least } = view.host;
    let free = |free: Option<u64>| free.map_or_else(|| "unknown".to_owned(), format_bytes);
    html! {
        dl.facts {
            div { dt { "busy" } dd { (view.claims.len()) " of " (view.capacity) } }
            div { dt { "up" } dd { (clock.time_tag(-view.uptime_seconds, &format_seconds(view.uptime_seconds)))
                small { "since " (clock.time_of_day(-view.uptime_seconds)) } } }
            div { dt { "disk free" } dd { (free(disk_free)) small { "at least " (format_bytes(disk_least)) } } }
            div { dt { "memory free" } dd { (free(memory_free)) small { "at least " (format_bytes(memory_least)) } } }
            div { dt { "containment" } dd { (view.containment) } }
            @if let Some(next) = &view.next {
                div { dt { "next" } dd { (next) } }
            }
            @if let Some(recovered) = view.recovered {
                div { dt { "recovered from the previous process" } dd { (recovered) } }
            }
            @for watch in &view.watches {
                div { dt { "termination notices: " (watch.provider) }
                    @if watch.error.is_some() { dd.bad { "unreachable" } } @else { dd { "connected" } } }
            }
            @if let Some(notice) = view.notice {
                div { dt { "host terminates" } dd.bad { "notice " (clock.ago(notice.seconds_ago)) } }
            }
        }
    }
}

fn no_tasks(view: &WorkerStatus) -> Markup {
    html! {
        div.empty {
            p { "No claims." }
            @if view.state == LifecycleState::Paused { p { code { "journeyman resume" } " resumes claiming." } }
            @else if view.blocked_reason.is_none() && view.sources.iter().all(SourceStatus::is_up) {
                p {
                    "No task is pending. " code { "journeyman task create --queue QUEUE -- /bin/echo hello" }
                    " creates one."
                }
            }
        }
    }
}

fn tasks(tasks: &[ClaimStatus], clock: SnapshotClock) -> Markup {
    html! {
        table {
            thead { tr { th { "task" } th { "lease left" } th { "claimed for" } th { "reclaimed" } th { "state" } th { "log" } th { "memory" } } }
            tbody { @for task in tasks { (row(task, clock)) } }
        }
    }
}

fn row(task: &ClaimStatus, clock: SnapshotClock) -> Markup {
    let name = format!("{}/{}", task.task, task.run);
    html! {
        tr {
            td data-label="task" {
                (task_name(task.name.as_deref()))
                span.short {
                    code { (name) } " "
                    button type="button" data-copy=(name) hidden { "copy" }
                }
                small { (task.source) }
            }
            td.short data-label="lease left" {
                @match task.lease_left_seconds {
                    Some(left) => {
                        @if let Some(full) = task.lease_seconds.filter(|full| *full > 0.0) {
                            progress max=(full) value=(left.clamp(0.0, full)) {} " "
                        }
                        span class=(if left < LEASE_SHORT_SECONDS { "bad" } else { "" }) { (clock.ahead(left)) }
                        small { "until " (clock.time_of_day(left)) }
                    },
                    None => { "–" },
                }
            }
            td.short data-label="claimed for" {
                (clock.time_tag(-task.held_seconds, &format_seconds(task.held_seconds)))
                small { "since " (clock.time_of_day(-task.held_seconds)) }
            }
            td.short data-label="reclaimed" {
                @match task.reclaimed_seconds_ago { Some(ago) => { (clock.ago(ago)) }, None => { "not yet" } }
            }
            td data-label="state" {
                (task.state)
                @if let Some(progress) = &task.progress { " · " (progress) }
            }
            td.short data-label="log" { (format_bytes(task.log_bytes)) }
            td.short data-label="memory" { @match task.memory_bytes { Some(memory) => { (format_bytes(memory)) }, None => { "–" } } }
        }
    }
}

fn task_name(name: Option<&str>) -> Markup {
    html! { @if let Some(name) = name { span.name { (name) } } }
}

fn recent_results(results: &[RecentResult], clock: SnapshotClock) -> Markup {
    html! {
        table {
            thead { tr { th { "task" } th { "outcome" } th { "held for" } th { "ended" } } }
            tbody {
                @for result in results {
                    tr {
                        td data-label="task" {
                            (task_name(result.name.as_deref()))
                            code.short { (result.task) "/" (result.run) }
                            small { (result.source) }
                        }
                        td data-label="outcome" {
                            span class=(if result.outcome == "completed" { "good" } else { "bad" }) { (result.outcome) }
                        }
                        td.short data-label="held for" { (format_seconds(result.held_seconds)) }
                        td.short data-label="ended" { (clock.ago(result.seconds_ago)) }
                    }
                }
            }
        }
    }
}

fn sources(sources: &[SourceStatus], inspected: &[String], clock: SnapshotClock) -> Markup {
    html! {
        table {
            thead { tr { th { "source" } th { "status" } th { "last poll" } th { "last claim" } th { "next poll" } th { "claims" } } }
            tbody {
                @for source in sources {
                    tr {
                        td data-label="source" {
                            @if inspected.contains(&source.name) { a href={ "/sources/" (source.name) } { (source.name) } }
                            @else { (source.name) }
                            small { (source.description) }
                        }
                        td data-label="status" { (source_state(source, clock)) }
                        td.short data-label="last poll" { (time_ago(source.polled_seconds_ago, clock)) }
                        td.short data-label="last claim" { (time_ago(source.last_received_seconds_ago, clock)) }
                        td.short data-label="next poll" {
                            @match source.next_poll_in_seconds {
                                Some(ahead) => { "in " (clock.ahead(ahead)) },
                                None => { (source.state) },
                            }
                        }
                        td data-label="claims" { (source.counts.claims) }
                    }
                }
            }
        }
    }
}

fn sidecars(sidecars: &[SidecarSummary]) -> Markup {
    html! {
        table {
            thead { tr { th { "handler" } th { "status" } th { "message" } th { "restarts" } } }
            tbody {
                @for sidecar in sidecars {
                    tr {
                        td data-label="handler" { (sidecar.name) }
                        td data-label="status" {
                            @if sidecar.up { span.good { "ok" } } @else { span.bad { "down" } }
                        }
                        td data-label="message" { (sidecar.message) }
                        td data-label="restarts" { (sidecar.restarts) }
                    }
                }
            }
        }
    }
}

fn source_state(source: &SourceStatus, clock: SnapshotClock) -> Markup {
    html! {
        @if source.failing || (source.polled_seconds_ago.is_none() && source.error.is_some()) { span.bad { "failing" } }
        @else if source.polled_seconds_ago.is_some() { span.good { "ok" } }
        @else { span.warn { "not polled yet" } }
        @if let Some(error) = &source.error {
            p { (error.message) }
            small { (error.consecutive) " in a row, last " (clock.ago(error.seconds_ago)) }
        }
    }
}

fn time_ago(seconds: Option<f64>, clock: SnapshotClock) -> Markup {
    html! { @match seconds { Some(ago) => { (clock.ago(ago)) }, None => { "never" } } }
}

fn last_hour(hour: OutcomeCounts) -> Markup {
    let counts = [
        ("completed", hour.completed),
        ("failed", hour.failed),
        ("exceptions", hour.exceptions()),
        ("released", hour.worker_shutdown),
        ("deferred", hour.deferred),
        ("canceled", hour.canceled),
        ("deadline exceeded", hour.deadline_exceeded),
        ("superseded", hour.superseded),
        ("unconfirmed", hour.unconfirmed),
        ("lost", hour.lost),
    ];
    html! { dl.facts { @for (name, count) in counts { div { dt { (name) } dd { (count) } } } } }
}
