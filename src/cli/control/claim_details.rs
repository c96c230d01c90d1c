//! Prints `journeyman claims show`.

use std::fmt::Write as _;

use super::format_seconds;
use super::status_text::{note_text, strip_control_chars};
use crate::worker::snapshot::format_bytes;
use crate::worker::status::{ClaimCommandStatus, ClaimDetail, PhaseStatus};

const LABEL_WIDTH: usize = 11;
const PROCESSES_MAX: usize = 20;

pub(super) fn render(detail: &ClaimDetail) -> String {
    let task = &detail.claim;
    let mut out = String::new();
    let mut line = |label: &str, text: &str| {
        // Writing to a String cannot fail.
        _ = writeln!(out, "{}", format!("{label:LABEL_WIDTH$}  {}", strip_control_chars(text)).trim_end());
    };
    line("task", &format!("{}/{}", task.task, task.run));
    optional(&mut line, "name", detail.name.as_deref());
    optional(&mut line, "group", detail.group.as_deref());
    line("source", &format!("{}, {}", task.source, detail.source_description));
    optional(&mut line, "received", detail.dequeue_count.map(|count| format!("{count} times")).as_deref());
    line("handler", &detail.handler);
    line("state", &format!("{}   {}", task.state, task.progress.as_deref().unwrap_or("")));
    line("held", &format_seconds(task.held_seconds));
    line("lease", &lease_text(detail));
    optional(&mut line, "command", detail.last_command.as_ref().map(command_text).as_deref());
    line("containment", &detail.containment);
    optional(&mut line, "cgroup", detail.cgroup.as_ref().map(|path| path.display().to_string()).as_deref());
    line("processes", &processes_text(&detail.processes));
    optional(&mut line, "directory", detail.work_dir.as_ref().map(|path| path.display().to_string()).as_deref());
    line("log", &format_bytes(task.log_bytes));
    if let Some(memory) = task.memory_bytes {
        line("memory", &format_bytes(memory));
    }
    optional(&mut line, "trace", task.trace_id.as_deref());
    for (number, phase) in detail.phases.iter().enumerate() {
        line(if number == 0 { "phases" } else { "" }, &phase_text(phase));
    }
    out
}

fn optional(line: &mut impl FnMut(&str, &str), label: &str, text: Option<&str>) {
    if let Some(text) = text {
        line(label, text);
    }
}

fn lease_text(detail: &ClaimDetail) -> String {
    let text = |seconds: Option<f64>| seconds.map_or_else(|| "-".to_owned(), format_seconds);
    let ago = detail
        .claim
        .reclaimed_seconds_ago
        .map_or_else(String::new, |ago| format!(", last {} ago", format_seconds(ago)));
    let next = detail.reclaim_in_seconds.map_or_else(String::new, |next| format!(", next in {}", format_seconds(next)));
    format!(
        "{} left of {}   reclaimed {} times{ago}{next}",
        text(detail.claim.lease_left_seconds),
        text(detail.claim.lease_seconds),
        detail.reclaims
    )
}

fn command_text(command: &ClaimCommandStatus) -> String {
    format!("{} {} ago {}", command.command, format_seconds(command.seconds_ago), note_text(&command.note))
}

fn processes_text(processes: &[i32]) -> String {
    let listed: Vec<String> = processes.iter().take(PROCESSES_MAX).map(ToString::to_string).collect();
    match processes.len().saturating_sub(PROCESSES_MAX) {
        0 if listed.is_empty() => "none".to_owned(),
        0 => listed.join(" "),
        more => format!("{} and {more} more", listed.join(" ")),
    }
}

fn phase_text(phase: &PhaseStatus) -> String {
    let took = phase
        .duration_seconds
        .map_or_else(|| "running".to_owned(), |seconds| format!("took {}", format_precise(seconds)));
    format!("{:<8} {:>7} ago   {took}", phase.phase, format_seconds(phase.seconds_ago))
}

/// With milliseconds below a minute.
fn format_precise(seconds: f64) -> String {
    if seconds < 60.0 { format!("{seconds:.3}s") } else { format_seconds(seconds) }
}
