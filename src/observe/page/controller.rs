//! HTML page of a controller.

mod buttons;

use core::cmp::Reverse;

use jiff::Timestamp;
use maud::{Markup, html};

pub use super::CommandButtons;
use super::{HtmlPage, PageContent, SnapshotClock, build_page, format_seconds, status_links};
use crate::control::controller_api::ControllerStatusReply;
use crate::controller::status::{ErrorStatus, GroupPhase, GroupStatus, PauseStatus, PoolStatus, Role, WorkerActivity};
use journeyman_domain::limits::PAGE_GROUPS_MAX;

pub fn render(status: &ControllerStatusReply, acts: CommandButtons, now: Timestamp) -> HtmlPage {
    let (pools, clock) = (&status.pools, SnapshotClock { now });
    let names: Vec<&str> = pools.iter().map(|pool| pool.name.as_str()).collect();
    let parts = PageContent {
        title: format!("{} · {}", title(pools), names.join(", ")),
        name: html! { "controller, up " (clock.time_tag(-status.uptime_seconds, &format_seconds(status.uptime_seconds))) },
        main: html! { @for pool in pools { section { (pool_section(pool, acts, clock)) } } },
        buttons: acts,
        version: status.version.clone(),
        pid: status.pid,
        aside: html! {},
        links: status_links(),
    };
    build_page(parts, clock)
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

fn pool_section(pool: &PoolStatus, acts: CommandButtons, clock: SnapshotClock) -> Markup {
    // A standby accepts no command.
    let acts = if pool.role == Role::Standby { CommandButtons::Hidden } else { acts };
    html! {
        h2.pool {
            "Pool " code { (pool.name) } " " small.at { (pool.broker.address) } " "
            @if acts == CommandButtons::Shown { (buttons::pool_buttons(pool)) }
        }
        (headline(pool, clock))
        @if let Some(error) = &pool.last_error {
            @if pool.role != Role::Disconnected { p.warn { "last error, " (error_text(error, clock)) } }
        }
        @if let Some(error) = &pool.driver_error {
            p.bad { "The driver is unavailable, so no worker is started: " (error_text(error, clock)) }
        }
        @if let Some(paused) = &pool.paused {
            p.warn { (pause_text(paused, clock)) }
        }
        (facts(pool))
        h3 { "Groups" }
        @if pool.groups.is_empty() { (no_groups(pool)) } @else { (groups(pool, acts, clock)) }
    }
}

fn headline(pool: &PoolStatus, clock: SnapshotClock) -> Markup {
    let failing = pool.failing_groups();
    let mood = match pool.role {
        Role::Disconnected => "first bad",
        Role::Standby | Role::Starting => "first warn",
        Role::Active if failing > 0 => "first bad",
        Role::Active if pool.paused.is_some() => "first warn",
        Role::Active => "first",
    };
    html! {
        p class=(mood) {
            strong { (pool.role.as_str()) }
            "for " (clock.time_tag(-pool.seconds_in_role, &format_seconds(pool.seconds_in_role))) ". "
            @match pool.inactive_reason() {
                Some(why) => { "No worker is started or stopped: " (why) }
                None if failing > 0 => { "Groups with failing workers: " (failing) }
                None if pool.paused.is_some() => { "It is paused" }
                None => { "Groups follow demand" }
            }
            "."
        }
    }
}

fn facts(pool: &PoolStatus) -> Markup {
    let counts = pool.counters;
    let of_phase = |phase| pool.groups.iter().filter(|group| group.phase == phase).count();
    let ready: u64 = pool.groups.iter().filter_map(|group| group.ready).map(u64::from).sum();
    let steps_failed = if counts.queue_operation_failures > 0 { "warn" } else { "" };
    html! {
        dl.facts {
            div { dt { "groups" } dd { (pool.groups.len()) small { @for (at, phase) in GroupPhase::ALL.into_iter().enumerate() {
                @if at > 0 { ", " } (of_phase(phase)) " " (phase.as_str())
            } } } }
            div { dt { "workers" } dd {
                @if pool.starts_workers {
                    (pool.workers.total())
                    @if let Some(budget) = pool.max_total { " of " (budget) }
                    small { (pool.workers) }
                } @else { "–" small { "not started by this controller" } }
            } }
            div { dt { "ready requests" } dd { (ready) small { "not held by a worker" } } }
            @for demand in &pool.external_demands {
                div { dt { "demand " (demand.name) " for " (demand.key) }
                    dd { @match demand.pending { Some(pending) => { (pending) " pending" }, None => { "not counted" } }
                        @if let Some(claimed) = demand.claimed { small { (claimed) " claimed" } }
                        @if let Some(why) = &demand.error { small.warn { (why) } } } }
            }
            div { dt { "orphans held" } dd { (pool.orphans_held) small { (counts.orphans_forwarded) " forwarded" } } }
            div { dt { "dead letters" } dd { (counts.dead_letters) " answered"
                small class=(if counts.poison_requests > 0 { "warn" } else { "" }) { (counts.poison_requests) " moved to the poison queue" } } }
            div { dt { "workers started" } dd { (counts.workers_started)
                small class=(if counts.workers_failed > 0 { "warn" } else { "" }) { (counts.workers_failed) " failed" } } }
            div { dt { "queues" } dd {
                (pool.settled_groups()) " of " (pool.groups.len()) " settled"
                small class=(steps_failed) { (counts.queue_operation_failures) " queue operations failed" }
            } }
            div { dt { "broker" } dd {
                @if pool.role != Role::Disconnected { "connected" } @else { span.bad { "not connected" } }
                small { (counts.broker_disconnects) " disconnects" }
            } }
        }
    }
}

fn no_groups(pool: &PoolStatus) -> Markup {
    html! {
        div.empty {
            @if pool.role == Role::Active {
                p { "No groups: no request has arrived yet." }
                p { code { "journeyman call --pool " (pool.name) " --key KEY --path /PATH '{}'" } " sends one." }
            } @else if pool.role == Role::Standby {
                p { "The active controller shows the groups." }
            } @else { p { "Groups are unknown until the broker is connected." } }
        }
    }
}

// Failing groups first, then those with work.
fn groups(pool: &PoolStatus, acts: CommandButtons, clock: SnapshotClock) -> Markup {
    let mut groups: Vec<&GroupStatus> = pool.groups.iter().collect();
    groups.sort_by_key(|group| (!group.failing, group.consecutive_failures == 0, Reverse(group.ready)));
    let more = groups.len().saturating_sub(PAGE_GROUPS_MAX);
    html! {
        table {
            thead { tr { th { "key" } th { "phase" } th { "waiting" } th { "workers" } th { "wanted" } th { "waiting for" } } }
            tbody { @for group in groups.into_iter().take(PAGE_GROUPS_MAX) { (row(pool, group, acts, clock)) } }
        }
        @if more > 0 { p.dim { "and " (more) " more; " a href="/status.json" { "JSON" } " has all" } }
    }
}

fn row(pool: &PoolStatus, group: &GroupStatus, acts: CommandButtons, clock: SnapshotClock) -> Markup {
    html! {
        tr {
            td data-label="key" { @if group.key.is_empty() { span.dim { "the empty key" } } @else { code { (group.key) } } }
            td.short data-label="phase" {
                (group.phase.as_str())
                @if let Some(left) = group.next_phase_seconds { small { (group.next_phase()) " in " (clock.ahead(left)) } }
            }
            td.short data-label="waiting" { @match group.ready { Some(ready) => { (ready) }, None => { "–" } } }
            td data-label="workers" {
                @if !pool.starts_workers { "–" } @else if group.worker_list.is_empty() { "none" } @else { (workers(pool, group, acts, clock)) }
            }
            td data-label="wanted" {
                @match group.wanted { Some(wanted) => { (wanted) }, None => { "–" } }
                small { (group.reasons.join(", ")) }
            }
            td data-label="waiting for" {
                (blockers(pool, group, clock))
                @if acts == CommandButtons::Shown { (buttons::group_buttons(pool, group)) }
            }
        }
    }
}

fn workers(pool: &PoolStatus, group: &GroupStatus, acts: CommandButtons, clock: SnapshotClock) -> Markup {
    html! {
        details data-name=(format!("{} {}", pool.name, group.key)) {
            summary { (group.workers) }
            ul.plain {
                @for worker in &group.worker_list {
                    li {
                        code { (worker.id) } " "
                        span class=(if worker.state == WorkerActivity::Stopping { "warn" } else { "dim" }) { (worker.state.as_str()) }
                        ", up " (clock.time_tag(-worker.age_seconds, &format_seconds(worker.age_seconds)))
                        @if let Some(detail) = &worker.detail { ", " (detail) }
                        @if acts == CommandButtons::Shown && worker.state != WorkerActivity::Stopping { " " (buttons::worker_buttons(pool, worker)) }
                    }
                }
            }
        }
    }
}

fn blockers(pool: &PoolStatus, group: &GroupStatus, clock: SnapshotClock) -> Markup {
    // A pause of the pool is shown with the pool.
    let paused = group.paused.as_ref().filter(|_| pool.paused.is_none());
    let nothing = group.consecutive_failures == 0
        && group.waiting_for.is_none()
        && paused.is_none()
        && group.scale_override.is_none();
    html! {
        @if nothing { span.dim { "nothing" } }
        @if let Some(paused) = paused { p.warn { (pause_text(paused, clock)) } }
        @if let Some(scaled) = &group.scale_override {
            p {
                @if let Some(min) = scaled.min { "at least " (min) }
                @if let (Some(_), Some(_)) = (scaled.min, scaled.max) { ", " }
                @if let Some(max) = scaled.max { "at most " (max) }
                " for " (clock.ahead(scaled.remaining_seconds)) small { "by " (scaled.by) }
            }
        }
        @if group.consecutive_failures > 0 {
            p class=(if group.failing { "bad" } else { "warn" }) {
                "workers failed in a row: " (group.consecutive_failures)
                @if let Some(left) = group.restart_backoff_seconds { "; next start in " (clock.ahead(left)) }
            }
            @if let Some(end) = &group.last_exit { small { "last failure " (error_text(end, clock)) } }
        }
        @if let Some(waits) = &group.waiting_for {
            p { (waits) }
        }
    }
}

fn pause_text(paused: &PauseStatus, clock: SnapshotClock) -> Markup {
    html! {
        "paused by " (paused.by)
        @match paused.remaining_seconds { Some(left) => { ", for " (clock.ahead(left)) }, None => { ", until it is resumed" } }
    }
}

fn error_text(fault: &ErrorStatus, clock: SnapshotClock) -> Markup {
    html! { (clock.ago(fault.seconds_ago)) ": " (fault.message) }
}
