//! Prints `journeyman claims show`.

use std::path::PathBuf;

use super::status_text::note_text;
use crate::cli::table::{align_columns, format_seconds, strip_control_chars};
use crate::worker::status::{ClaimCommandStatus, ClaimDetail, PhaseStatus};
use journeyman_domain::units::format_bytes;

const PROCESSES_MAX: usize = 20;

pub(super) fn render(detail: &ClaimDetail) -> String {
    let claim = &detail.claim;
    let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
    let rows = [
        ("task", Some(format!("{}/{}", claim.task, claim.run))),
        ("name", claim.name.clone()),
        ("group", detail.group.clone()),
        ("source", Some(format!("{}, {}", claim.source, detail.source_description))),
        ("received", detail.dequeue_count.map(|count| format!("{count} times"))),
        ("handler", Some(detail.handler.clone())),
        ("state", Some(format!("{}   {}", claim.state, claim.progress.as_deref().unwrap_or("")))),
        ("held", Some(format_seconds(claim.held_seconds))),
        ("lease", Some(lease_text(detail))),
        ("command", detail.last_command.as_ref().map(command_text)),
        ("containment", Some(detail.containment.clone())),
        ("cgroup", path(&detail.cgroup)),
        ("processes", Some(processes_text(&detail.processes))),
        ("directory", path(&detail.work_dir)),
        ("log", Some(format_bytes(claim.log_bytes))),
        ("memory", claim.memory_bytes.map(format_bytes)),
        ("trace", claim.trace_id.clone()),
    ];
    let phases = detail.phases.iter().map(phase_text).enumerate();
    let phases = phases.map(|(number, text)| (if number == 0 { "phases" } else { "" }, Some(text)));
    let row = |(label, text): (&str, Option<String>)| Some(vec![label.to_owned(), strip_control_chars(&text?)]);
    align_columns(rows.into_iter().chain(phases).filter_map(row))
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
