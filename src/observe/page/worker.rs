//! The status page of a worker.

use jiff::Timestamp;
use maud::{Markup, html};

use super::{Acts, Clock, Page, Parts, Refresh, page, shown};
use crate::control::Status;
use crate::worker::look::bytes;
use crate::worker::view::{Blocked, Host, Outcomes, Service, Source, State, Task, View};

/// A lease with less than this left is marked.
const LEASE_SHORT_SECONDS: f64 = 30.0;

/// The page as the worker looks at `now`.
#[must_use]
pub fn show(status: &Status, refresh: Refresh, now: Timestamp) -> Page {
    let (view, clock) = (&status.view, Clock { now });
    let parts = Parts {
        title: format!("{} {}/{} · {}", view.state.as_str(), view.tasks.len(), view.capacity, status.id),
        name: html! { code { (status.id) } " in " code { (status.group) } },
        main: body(status, clock),
        links: html! {
            a href="/metrics" { "metrics" } " · " a href="/readyz?verbose" { "readiness" } " · "
            a href="/status.json" { "JSON" } " · " a href="/status" { "this page, standing still" }
        },
        acts: Acts::No,
        version: status.version.clone(),
        pid: status.pid,
    };
    page(parts, refresh, clock)
}

fn body(status: &Status, clock: Clock) -> Markup {
    let view = &status.view;
    html! {
        (first(view))
        @for hint in &view.hints { p.warn { "hint: " (hint) } }
        (facts(view, clock))
        h2 { "Tasks, the shortest lease first" }
        @if view.tasks.is_empty() { (no_tasks(view)) } @else { (tasks(&view.tasks, clock)) }
        h2 { "Sources" }
        (sources(&view.sources, clock))
        @if !view.services.is_empty() {
            h2 { "Services" }
            (services(&view.services))
        }
        h2 { "Last hour" }
        (hour(view.last_hour))
    }
}

/// What it does, and why it claims nothing.
fn first(view: &View) -> Markup {
    let down: Vec<&str> =
        view.sources.iter().filter(|source| source.in_trouble).map(|source| source.name.as_str()).collect();
    let none = !down.is_empty() && !view.sources.iter().any(answered);
    let mood = match view.blocked {
        Some(Blocked::Disk | Blocked::Memory | Blocked::Unfit | Blocked::Service) => "first bad",
        Some(Blocked::Paused | Blocked::Leaving | Blocked::Draining | Blocked::HandingBack | Blocked::Exited) => {
            "first warn"
        }
        Some(Blocked::Full) | None if none => "first bad",
        Some(Blocked::Full) | None if !down.is_empty() => "first warn",
        Some(Blocked::Full) | None => "first",
    };
    html! {
        p class=(mood) {
            strong { (view.state.as_str().replace('-', " ")) }
            @match &view.not_claiming {
                Some(why) => { "not claiming: " (why) },
                None if none => { "asking, but no source answers: " (down.join(", ")) " in trouble" },
                None if !down.is_empty() => { "claiming, but not from " (down.join(", ")) },
                None => { "claiming" },
            }
            @if let Some(note) = &view.note {
                " · by " (note.by)
                @if !note.text.is_empty() { " “" (note.text) "”" }
            }
        }
    }
}

const fn answered(source: &Source) -> bool {
    source.polled_seconds_ago.is_some() && !source.in_trouble
}

fn facts(view: &View, clock: Clock) -> Markup {
    let Host { disk_free, disk_least, memory_free, memory_least } = view.host;
    let free = |free: Option<u64>| free.map_or_else(|| "unknown".to_owned(), bytes);
    html! {
        dl.facts {
            div { dt { "busy" } dd { (view.tasks.len()) " of " (view.capacity) } }
            div { dt { "up" } dd { (clock.at(-view.uptime_seconds, &shown(view.uptime_seconds)))
                small { "since " (clock.of_day(-view.uptime_seconds)) } } }
            div { dt { "disk free" } dd { (free(disk_free)) small { "at least " (bytes(disk_least)) } } }
            div { dt { "memory free" } dd { (free(memory_free)) small { "at least " (bytes(memory_least)) } } }
            div { dt { "payloads are held by" } dd { (view.containment) } }
            @if let Some(next) = &view.next {
                div { dt { "next" } dd { (next.what) " in " (clock.ahead(next.in_seconds)) } }
            }
            @if let Some(recovered) = view.recovered {
                div { dt { "an earlier life" } dd { (recovered) } }
            }
            @for spot in &view.watches {
                div { dt { "notices of " (spot.provider) }
                    @if spot.trouble.is_some() { dd.bad { "not heard since " (clock.ago(spot.seconds)) } }
                    @else if spot.heard { dd { "heard" } }
                    @else { dd { "no answer yet" } } }
            }
            @if let Some(notice) = view.notice {
                div { dt { "this host goes" } dd.bad { "told " (clock.ago(notice.seconds_ago)) } }
            }
        }
    }
}

fn no_tasks(view: &View) -> Markup {
    html! {
        div.empty {
            p { "No task is held." }
            @match (view.state, view.blocked) {
                (State::Paused, _) => p { code { "journeyman resume" } " lets it claim again." },
                (State::Running, Some(Blocked::Disk)) => p { "Free some disk, or lower " code { "host.min_free_disk" } "." },
                (State::Running, Some(Blocked::Memory)) => {
                    p { "Free some memory, or lower " code { "host.min_free_memory" } "." }
                },
                (State::Running, Some(_)) => p { "The worker's log says more." },
                (State::Running, None) if view.sources.iter().any(|source| source.in_trouble) => {
                    p { "See below what the sources answer." }
                },
                (State::Running, None) => p {
                    "Nothing is pending for it. " code { "journeyman task create --queue QUEUE -- /bin/echo hello" }
                    " creates something to do."
                },
                (State::Leaving | State::Draining | State::HandingBack | State::Exited, _) => {
                    p { "The worker exits; start it again to claim more." }
                },
            }
        }
    }
}

fn tasks(tasks: &[Task], clock: Clock) -> Markup {
    html! {
        table {
            thead { tr { th { "task" } th { "lease left" } th { "held" } th { "reclaimed" } th { "step" } th { "log" } th { "memory" } } }
            tbody { @for task in tasks { (row(task, clock)) } }
        }
    }
}

fn row(task: &Task, clock: Clock) -> Markup {
    let name = format!("{}/{}", task.task, task.run);
    html! {
        tr {
            td.short data-label="task" {
                code { (name) } " "
                button type="button" data-copy=(name) hidden { "copy" }
                small { (task.source) }
            }
            td.short data-label="lease left" {
                @match task.lease_left_seconds {
                    Some(left) => {
                        @if let Some(full) = task.lease_seconds.filter(|full| *full > 0.0) {
                            progress max=(full) value=(left.clamp(0.0, full)) {} " "
                        }
                        span class=(if left < LEASE_SHORT_SECONDS { "bad" } else { "" }) { (clock.ahead(left)) }
                        small { "until " (clock.of_day(left)) }
                    },
                    None => { "–" },
                }
            }
            td.short data-label="held" {
                (clock.at(-task.held_seconds, &shown(task.held_seconds)))
                small { "since " (clock.of_day(-task.held_seconds)) }
            }
            td.short data-label="reclaimed" {
                @match task.reclaimed_seconds_ago { Some(ago) => { (clock.ago(ago)) }, None => { "not yet" } }
            }
            td data-label="step" {
                (task.step)
                @if let Some(progress) = &task.progress { " · " (progress) }
            }
            td.short data-label="log" { (bytes(task.log_bytes)) }
            td.short data-label="memory" { @match task.memory_bytes { Some(memory) => { (bytes(memory)) }, None => { "–" } } }
        }
    }
}

fn sources(sources: &[Source], clock: Clock) -> Markup {
    html! {
        table {
            thead { tr { th { "source" } th { "answers" } th { "last poll" } th { "last task" } th { "next poll" } th { "claims" } } }
            tbody {
                @for source in sources {
                    tr {
                        td data-label="source" { (source.name) small { (source.what) } }
                        td data-label="answers" { (answers(source, clock)) }
                        td.short data-label="last poll" { (past(source.polled_seconds_ago, clock)) }
                        td.short data-label="last task" { (past(source.brought_seconds_ago, clock)) }
                        td.short data-label="next poll" {
                            @match source.next_poll_in_seconds {
                                Some(ahead) => { "in " (clock.ahead(ahead)) },
                                None => { (source.step) },
                            }
                        }
                        td data-label="claims" { (source.counts.claims) }
                    }
                }
            }
        }
    }
}

fn services(services: &[Service]) -> Markup {
    html! {
        table {
            thead { tr { th { "handler" } th { "answers" } th { "what it does" } th { "started again" } } }
            tbody {
                @for service in services {
                    tr {
                        td data-label="handler" { (service.name) }
                        td data-label="answers" {
                            @if service.up { span.good { "ok" } } @else { span.bad { "down" } }
                        }
                        td data-label="what it does" { (service.what) }
                        td data-label="started again" { (service.restarts) }
                    }
                }
            }
        }
    }
}

fn answers(source: &Source, clock: Clock) -> Markup {
    html! {
        @if source.in_trouble || (source.polled_seconds_ago.is_none() && source.error.is_some()) { span.bad { "trouble" } }
        @else if source.polled_seconds_ago.is_some() { span.good { "ok" } }
        @else { span.warn { "not asked yet" } }
        @if let Some(error) = &source.error {
            p { (error.text) }
            small { (error.in_a_row) " in a row, the last " (clock.ago(error.seconds_ago)) }
        }
    }
}

fn past(seconds: Option<f64>, clock: Clock) -> Markup {
    html! { @match seconds { Some(ago) => { (clock.ago(ago)) }, None => { "never" } } }
}

fn hour(hour: Outcomes) -> Markup {
    let counts = [
        ("completed", hour.completed),
        ("failed", hour.failed),
        ("exceptions", hour.exceptions),
        ("handed back", hour.handed_back),
        ("superseded", hour.superseded),
        ("lost", hour.lost),
    ];
    html! { dl.facts { @for (name, many) in counts { div { dt { (name) } dd { (many) } } } } }
}
