//! `journeyman controller status`: prints the status of a controller.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use crate::cli::control::{StatusArgs, print_repeatedly};
use crate::cli::exit::ExitResult;
use crate::cli::output::Format;
use crate::cli::table::{BOLD, RESET, format_seconds, strip_control_chars, table};
use crate::config::Environment;
use crate::control::controller_api::ControllerStatusReply;
use crate::controller::status::{DemandStatus, ErrorStatus, GroupStatus, PauseStatus, PoolStatus};

pub(super) async fn run(StatusArgs { how, watch }: StatusArgs, environment: &Environment) -> ExitResult {
    let client = how.target.controller_client(environment)?;
    print_repeatedly(watch.as_ref(), async || {
        let status = client.controller_status().await?;
        Ok(match how.output {
            Format::Json => format!("{:#}\n", serde_json::json!(status)),
            Format::Table => render(&status),
        })
    })
    .await
}

fn render(status: &ControllerStatusReply) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    _ = writeln!(
        out,
        "journeyman {}  controller  up {}  pid {}",
        status.version,
        format_seconds(status.uptime_seconds),
        status.pid
    );
    for pool in &status.pools {
        out.push_str(&render_pool(pool));
    }
    out
}

fn render_pool(pool: &PoolStatus) -> String {
    let mut out = format!(
        "\npool {}  {BOLD}{}{RESET} for {}   {}\n",
        strip_control_chars(&pool.name),
        pool.role.as_str().to_uppercase(),
        format_seconds(pool.seconds_in_role),
        strip_control_chars(&pool.broker.address)
    );
    let mut line = |label: &str, text: &str| {
        // Writing to a String cannot fail.
        _ = writeln!(out, "  {label:LABEL_WIDTH$}  {text}");
    };
    if let Some(why) = pool.inactive_reason() {
        line("", &format!("no worker is started or stopped: {}", strip_control_chars(&why)));
    }
    if let Some(paused) = &pool.paused {
        line("", &pause_text(paused));
    }
    if let Some(error) = &pool.driver_error {
        let (seconds, why) = (format_seconds(error.seconds_ago), strip_control_chars(&error.message));
        line("driver", &format!("UNAVAILABLE for {seconds}, no worker is started: {why}"));
    }
    line("workers", &workers_text(pool));
    for demand in &pool.external_demands {
        line("demand", &demand_text(demand));
    }
    let counts = pool.counters;
    line("orphans", &format!("{} held   {} forwarded", pool.orphans_held, counts.orphans_forwarded));
    line(
        "errors",
        &format!(
            "{} answered with an error   {} moved to the poison queue",
            counts.dead_letters, counts.poison_requests
        ),
    );
    let (settled, all) = (pool.settled_groups(), pool.groups.len());
    line("queues", &format!("{settled} of {all} settled   {} operations failed", counts.queue_operation_failures));
    if let Some(error) = &pool.last_error {
        line("last error", &error_text(error));
    }
    out.push_str("  groups\n");
    out.push_str(&group_table(pool));
    out
}

const LABEL_WIDTH: usize = 10;

fn workers_text(pool: &PoolStatus) -> String {
    if !pool.starts_workers {
        return "not started by this controller".to_owned();
    }
    let budget = pool.max_total.map_or_else(String::new, |budget| format!("   at most {budget}"));
    format!(
        "{}   {} started   {} failed{budget}",
        pool.workers, pool.counters.workers_started, pool.counters.workers_failed
    )
}

fn demand_text(demand: &DemandStatus) -> String {
    let number = |count: Option<u32>| count.map_or_else(|| "?".to_owned(), |count| count.to_string());
    let trouble =
        demand.error.as_ref().map_or_else(String::new, |why| format!("   NOT COUNTED: {}", strip_control_chars(why)));
    format!(
        "{} for {}   {} pending   {} claimed{trouble}",
        strip_control_chars(&demand.name),
        strip_control_chars(&demand.key),
        number(demand.pending),
        number(demand.claimed)
    )
}

fn pause_text(paused: &PauseStatus) -> String {
    let left = paused
        .remaining_seconds
        .map_or_else(|| "until it is resumed".to_owned(), |left| format!("for {}", format_seconds(left)));
    format!("PAUSED by {} {left}", strip_control_chars(&paused.by))
}

fn error_text(fault: &ErrorStatus) -> String {
    format!("{} ago: {}", format_seconds(fault.seconds_ago), strip_control_chars(&fault.message))
}

fn group_table(pool: &PoolStatus) -> String {
    if pool.groups.is_empty() {
        return "  none\n".to_owned();
    }
    let head = ["KEY", "PHASE", "NEXT", "READY", "HELD", "WORKERS", "WANTED", "WHY"];
    let rows = pool.groups.iter().map(|group| {
        let next = group.next_phase();
        let number = |count: Option<u32>| count.map_or_else(|| "-".to_owned(), |count| count.to_string());
        vec![
            strip_control_chars(&group.key),
            group.phase.as_str().to_owned(),
            group
                .next_phase_seconds
                .map_or_else(|| next.to_owned(), |left| format!("{next} in {}", format_seconds(left))),
            number(group.ready),
            number(group.unacknowledged),
            if pool.starts_workers { group.workers.to_string() } else { "-".to_owned() },
            number(group.wanted),
            group_reasons(group),
        ]
    });
    table(head, rows)
}

fn group_reasons(group: &GroupStatus) -> String {
    let mut why = Vec::new();
    if let Some(paused) = &group.paused {
        why.push(pause_text(paused));
    }
    if let Some(scaled) = &group.scale_override {
        let number =
            |number: Option<u32>| number.map_or_else(|| "as configured".to_owned(), |number| number.to_string());
        let (min, max) = (number(scaled.min), number(scaled.max));
        let left = format_seconds(scaled.remaining_seconds);
        why.push(format!("min {min} and max {max} by {} for {left}", strip_control_chars(&scaled.by)));
    }
    if !group.reasons.is_empty() {
        why.push(group.reasons.join(", "));
    }
    if group.consecutive_failures > 0 {
        let pause = group
            .restart_backoff_seconds
            .map_or_else(String::new, |left| format!(", next start in {}", format_seconds(left)));
        let fails = if group.failing { "FAILING: " } else { "" };
        why.push(format!("{fails}workers failed in a row: {}{pause}", group.consecutive_failures));
        why.extend(group.last_exit.iter().map(|exit| format!("last failure {}", error_text(exit))));
    }
    let details = group.worker_list.iter().filter_map(|worker| worker.detail.as_deref()).map(strip_control_chars);
    why.extend(details.collect::<BTreeSet<_>>());
    why.extend(group.waiting_for.clone());
    why.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::status::{BrokerStatus, CounterValues, GroupPhase, Role, WorkerCounts};

    fn group(key: &str, phase: GroupPhase) -> GroupStatus {
        GroupStatus {
            key: key.to_owned(),
            phase,
            next_phase_seconds: None,
            ready: None,
            unacknowledged: None,
            workers: WorkerCounts::default(),
            worker_list: Vec::new(),
            wanted: Some(0),
            reasons: Vec::new(),
            waiting_for: None,
            restart_backoff_seconds: None,
            paused: None,
            scale_override: None,
            consecutive_failures: 0,
            failing: false,
            last_exit: None,
        }
    }

    fn pool(name: &str, role: Role, groups: Vec<GroupStatus>) -> PoolStatus {
        PoolStatus {
            name: name.to_owned(),
            role,
            seconds_in_role: 62.0,
            broker: BrokerStatus {
                address: "amqp://mq:5672/%2f".to_owned(),
                error: (role == Role::Disconnected).then(|| "connection\nrefused".to_owned()),
                consecutive_failures: 4,
            },
            max_total: None,
            paused: None,
            starts_workers: true,
            driver_error: None,
            workers: WorkerCounts::default(),
            groups,
            external_demands: Vec::new(),
            orphans_held: 0,
            counters: CounterValues::default(),
            last_error: None,
        }
    }

    #[test]
    fn the_table_says_of_each_group_why_it_has_so_many_workers_and_of_each_pool_what_is_in_the_way() {
        let mut warm = group("42", GroupPhase::Active);
        warm.next_phase_seconds = Some(571.0);
        (warm.ready, warm.unacknowledged, warm.wanted) = (Some(5), Some(2), Some(3));
        warm.workers = WorkerCounts { starting: 1, idle: 0, busy: 2, stopping: 0 };
        warm.reasons = vec!["the load needs 5".to_owned(), "limited by max = 3".to_owned()];
        let mut failing = group("b\u{1b}[2J", GroupPhase::Unbound);
        failing.next_phase_seconds = Some(3.0);
        (failing.ready, failing.wanted) = (Some(0), Some(1));
        failing.reasons = vec!["the load needs 0".to_owned(), "raised to min = 1".to_owned()];
        (failing.consecutive_failures, failing.failing, failing.restart_backoff_seconds) = (6, true, Some(40.0));
        failing.last_exit = Some(ErrorStatus { message: "exit status: 1; log: x.log".to_owned(), seconds_ago: 12.0 });
        let mut going = group("c", GroupPhase::Deleting);
        going.workers.stopping = 1;
        going.reasons = vec!["the group is not needed".to_owned()];
        going.waiting_for = Some("the queue is deleted after its last worker exits".to_owned());
        let mut core = pool("core", Role::Active, vec![warm, failing, going]);
        (core.max_total, core.orphans_held) = (Some(10), 2);
        core.workers = WorkerCounts { starting: 1, idle: 0, busy: 2, stopping: 1 };
        core.counters = CounterValues {
            orphans_forwarded: 17,
            dead_letters: 3,
            poison_requests: 1,
            queue_operation_failures: 1,
            activity_reports: 40,
            workers_started: 11,
            workers_failed: 7,
            broker_disconnects: 0,
        };
        core.last_error = Some(ErrorStatus {
            message: "queue operation for key 42: timed out after 30s".to_owned(),
            seconds_ago: 75.0,
        });
        let pools = vec![
            core,
            pool("far", Role::Disconnected, Vec::new()),
            PoolStatus { starts_workers: false, ..pool("second", Role::Standby, Vec::new()) },
            PoolStatus {
                driver_error: Some(ErrorStatus { message: "cannot list\nthe workers".to_owned(), seconds_ago: 8.0 }),
                ..pool("third", Role::Active, Vec::new())
            },
        ];
        let (version, uptime_seconds) = ("1.2.3".to_owned(), 3_700.0);
        let text = render(&ControllerStatusReply { version, pid: 7, uptime_seconds, pools });
        assert_eq!(text.replace(BOLD, "").replace(RESET, ""), include_str!("status.txt"));
    }
}
