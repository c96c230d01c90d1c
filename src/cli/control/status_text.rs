//! Prints `journeyman status` and `journeyman claims list`.

use std::fmt::Write as _;

use crate::cli::table::{BOLD, RESET, align_columns, cut, format_seconds, strip_control_chars, table};
use crate::control::WorkerStatusReply;
use crate::host::termination_notice::WatchStatus;
use crate::worker::Note;
use crate::worker::counters::OutcomeCounts;
use crate::worker::status::{
    ActivityStatus, ClaimStatus, HostStatus, LifecycleState, SidecarSummary, SourceStatus, WorkerStatus,
};
use journeyman_domain::units::format_bytes;

const LABEL_WIDTH: usize = 9;
const NAME_CHARS_MAX: usize = 40;
const LEASE_SHORT_SECONDS: f64 = 30.0;

pub(super) fn render(status: &WorkerStatusReply) -> String {
    let view = &status.snapshot;
    let mut out = String::new();
    // Writing to a String cannot fail.
    _ = writeln!(
        out,
        "journeyman {}  worker {}  group {}  up {}  pid {}",
        status.version,
        status.id,
        status.group,
        format_seconds(view.uptime_seconds),
        status.pid
    );
    push_line(&mut out, "state", &state_text(view));
    if let Some(why) = view.blocked_message.as_ref().filter(|_| view.state == LifecycleState::Running) {
        push_line(&mut out, "", &format!("not claiming: {why}"));
    }
    push_line(
        &mut out,
        "host",
        &format!("{}{}   containment: {}", host_text(view.host), clock_text(&view.sources), view.containment),
    );
    for watch in &view.watches {
        push_line(&mut out, "watch", &notice_watch_text(watch));
    }
    out.push_str("sources\n");
    out.push_str(&source_table(&view.sources));
    if !view.sidecars.is_empty() {
        out.push_str("sidecars\n");
        out.push_str(&sidecar_table(&view.sidecars));
    }
    if let Some(reports) = &view.activity {
        push_line(&mut out, "activity", &activity_text(reports));
    }
    out.push_str("claims\n");
    out.push_str(&claim_table(&view.claims));
    push_line(&mut out, "last hour", &outcomes_text(view.last_hour));
    if let Some(recovered) = view.recovered {
        push_line(&mut out, "recovered", &recovered.to_string());
    }
    if let Some(next) = &view.next {
        push_line(&mut out, "next", next);
    }
    for hint in &view.hints {
        push_line(&mut out, "hint", &strip_control_chars(hint));
    }
    out
}

fn activity_text(ActivityStatus { exchange, reports, failures, error }: &ActivityStatus) -> String {
    let error = error.as_ref().map_or_else(String::new, |why| format!(": {}", strip_control_chars(why)));
    format!("{reports} reports to {}, {failures} failures{error}", strip_control_chars(exchange))
}

fn push_line(out: &mut String, label: &str, text: &str) {
    _ = writeln!(out, "{label:LABEL_WIDTH$}  {text}");
}

/// For the service manager's STATUS=.
pub(in crate::cli) fn one_line(view: &WorkerStatus) -> String {
    let mut text = state_text(view).replace(BOLD, "").replace(RESET, "");
    if let Some(why) = view.blocked_message.as_ref().filter(|_| view.state == LifecycleState::Running) {
        _ = write!(text, "   not claiming: {why}");
    }
    for source in view.sources.iter().filter(|source| source.failing) {
        _ = write!(text, "   {} FAILING", source.name);
    }
    text
}

fn state_text(view: &WorkerStatus) -> String {
    let mut text = format!("{BOLD}{}{RESET}   {}", view.state.as_str().to_uppercase(), view.occupancy());
    if !view.cleanup_pending.is_empty() {
        _ = write!(text, ", {} cleanup pending", view.cleanup_pending.len());
    }
    if let Some(why) = view.blocked_message.as_ref().filter(|_| view.state != LifecycleState::Running) {
        _ = write!(text, "   {why}");
    }
    if let Some(note) = &view.note {
        _ = write!(text, "   {}", note_text(note));
    }
    text
}

pub(super) fn note_text(note: &Note) -> String {
    let text = if note.text.is_empty() { String::new() } else { format!(" \"{}\"", note.text) };
    strip_control_chars(&format!("by {}{text}", note.by))
}

pub(super) fn host_text(host: HostStatus) -> String {
    let free = |free: Option<u64>| free.map_or_else(|| "unknown".to_owned(), format_bytes);
    format!("disk {} free   memory {} free", free(host.disk_free), free(host.memory_free))
}

/// The largest difference between this host's clock and that of a source.
fn clock_text(sources: &[SourceStatus]) -> String {
    let skews = sources.iter().filter_map(|source| Some((source.clock_skew_seconds?, &source.name)));
    match skews.max_by_key(|(ahead, _)| ahead.unsigned_abs()) {
        None => String::new(),
        // The Date header has whole seconds, and the response takes time.
        Some((-1..=1, _)) => "   clock ok".to_owned(),
        Some((ahead, name)) => {
            let way = if ahead > 0 { "ahead of" } else { "behind" };
            format!("   clock {} s {way} {name}", ahead.unsigned_abs())
        }
    }
}

fn notice_watch_text(watch: &WatchStatus) -> String {
    match &watch.error {
        None => format!("{}: connected", watch.provider),
        Some(error) => format!("{}: UNREACHABLE: {}", watch.provider, strip_control_chars(error)),
    }
}

/// How long ago something was, or `never`.
pub(super) fn ago(seconds: Option<f64>) -> String {
    seconds.map_or_else(|| "never".to_owned(), |seconds| format!("{} ago", format_seconds(seconds)))
}

fn source_table(sources: &[SourceStatus]) -> String {
    let rows = sources.iter().map(|source| {
        let mut more = format!(
            "last poll {}   last claim {}",
            ago(source.polled_seconds_ago),
            ago(source.last_received_seconds_ago)
        );
        if let Some(seconds) = source.next_poll_in_seconds {
            _ = write!(more, "   next in {}", format_seconds(seconds));
        }
        let mark = match source.polled_seconds_ago {
            _ if source.failing => "FAILING",
            Some(_) => "ok",
            None if source.error.is_some() => "FAILING",
            None => "not polled yet",
        };
        vec![source.name.clone(), source.description.clone(), mark.to_owned(), source.state.clone(), more]
    });
    align_columns(rows)
}

fn sidecar_table(services: &[SidecarSummary]) -> String {
    let rows = services.iter().map(|service| {
        let mark = if service.up { "ok" } else { "DOWN" };
        let restarts = format!("restarts {}", service.restarts);
        vec![service.name.clone(), mark.to_owned(), strip_control_chars(&service.message), restarts]
    });
    align_columns(rows)
}

pub(super) fn claim_table(claims: &[ClaimStatus]) -> String {
    if claims.is_empty() {
        return "  none\n".to_owned();
    }
    let head =
        ["TASK", "NAME", "SOURCE", "STATE", "CLAIMED FOR", "LEASE LEFT", "RECLAIMED", "LOG", "MEMORY", "PROGRESS"];
    let rows = claims.iter().map(|claim| {
        vec![
            format!("{}/{}", claim.task, claim.run),
            short_name(claim),
            claim.source.clone(),
            claim.state.clone(),
            format_seconds(claim.held_seconds),
            lease_left(claim),
            ago(claim.reclaimed_seconds_ago),
            format_bytes(claim.log_bytes),
            claim.memory_bytes.map_or_else(|| "-".to_owned(), format_bytes),
            strip_control_chars(claim.progress.as_deref().unwrap_or("")),
        ]
    });
    table(head, rows)
}

pub(super) fn short_name(claim: &ClaimStatus) -> String {
    claim.name.as_deref().map_or_else(|| "-".to_owned(), |name| cut(&strip_control_chars(name), NAME_CHARS_MAX))
}

pub(super) fn is_lease_short(claim: &ClaimStatus) -> bool {
    claim.lease_left_seconds.is_some_and(|seconds| seconds < LEASE_SHORT_SECONDS)
}

pub(super) fn lease_left(claim: &ClaimStatus) -> String {
    let left = claim.lease_left_seconds.map_or_else(|| "-".to_owned(), format_seconds);
    if is_lease_short(claim) { format!("{left} !") } else { left }
}

pub(super) fn outcomes_text(hour: OutcomeCounts) -> String {
    let nonzero = |name: &str, count: u64| if count == 0 { String::new() } else { format!("   {name} {count}") };
    format!(
        "completed {}   failed {}   exceptions {}   released {}{}{}{}{}{}   lost {}",
        hour.completed,
        hour.failed,
        hour.exceptions(),
        hour.worker_shutdown,
        nonzero("deferred", hour.deferred),
        nonzero("canceled", hour.canceled),
        nonzero("deadline exceeded", hour.deadline_exceeded),
        nonzero("superseded", hour.superseded),
        nonzero("unconfirmed", hour.unconfirmed),
        hour.lost
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unreachable_metadata_service_is_shown_with_its_error() {
        let mut watch = WatchStatus { provider: "aws".to_owned(), error: None };
        assert_eq!(notice_watch_text(&watch), "aws: connected");
        watch.error = Some("500 for\nspot/instance-action".to_owned());
        assert_eq!(notice_watch_text(&watch), "aws: UNREACHABLE: 500 for spot/instance-action");
    }
}
