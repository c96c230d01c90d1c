//! A worker's status as a person reads it.

use std::fmt::Write as _;

use super::shown;
use crate::control::Status;
use crate::worker::look::bytes;
use crate::worker::view::{Activity, Host, Outcomes, Service, Source, Spot, State, Task, View};

/// The width of the first column.
const LABEL: usize = 9;
/// A lease with less than this left is marked.
const LEASE_SHORT_SECONDS: f64 = 30.0;

/// The whole of it.
pub(super) fn table(status: &Status) -> String {
    let view = &status.view;
    let mut out = String::new();
    // Writing to a String cannot fail.
    _ = writeln!(
        out,
        "journeyman {}  worker {}  group {}  up {}  pid {}",
        status.version,
        status.id,
        status.group,
        shown(view.uptime_seconds),
        status.pid
    );
    label(&mut out, "state", &state(view));
    if let Some(why) = view.not_claiming.as_ref().filter(|_| view.state == State::Running) {
        label(&mut out, "", &format!("not claiming: {why}"));
    }
    label(
        &mut out,
        "host",
        &format!("{}{}   payloads held by {}", host(view.host), clock(&view.sources), view.containment),
    );
    for spot in &view.watches {
        label(&mut out, "spot", &heard(spot));
    }
    out.push_str("sources\n");
    out.push_str(&sources(&view.sources));
    if !view.services.is_empty() {
        out.push_str("services\n");
        out.push_str(&services(&view.services));
    }
    if let Some(reports) = &view.activity {
        label(&mut out, "activity", &activity(reports));
    }
    out.push_str("tasks\n");
    out.push_str(&tasks(&view.tasks));
    label(&mut out, "last hour", &outcomes(view.last_hour));
    if let Some(recovered) = view.recovered {
        label(&mut out, "recovered", &recovered.to_string());
    }
    if let Some(next) = &view.next {
        label(&mut out, "next", &format!("{} in {}", next.what, shown(next.in_seconds)));
    }
    for hint in &view.hints {
        label(&mut out, "hint", &plain(hint));
    }
    out
}

/// What becomes of the reports to a controller.
fn activity(reports: &Activity) -> String {
    let Activity { exchange, reports, failures, error } = reports;
    match error {
        Some(why) => format!("not reported to {}: {}", plain(exchange), plain(why)),
        None if *failures > 0 => {
            format!("{reports} reports to {}, which failed {failures} times before", plain(exchange))
        }
        None => format!("{reports} reports to {}", plain(exchange)),
    }
}

fn label(out: &mut String, label: &str, text: &str) {
    _ = writeln!(out, "{label:LABEL$}  {text}");
}

/// The state as a service manager shows it: in one line, with what keeps the worker from claiming.
pub(in crate::cli) fn one_line(view: &View) -> String {
    let mut text = state(view).replace(BOLD, "").replace(PLAIN, "");
    if let Some(why) = view.not_claiming.as_ref().filter(|_| view.state == State::Running) {
        _ = write!(text, "   not claiming: {why}");
    }
    for source in view.sources.iter().filter(|source| source.in_trouble) {
        _ = write!(text, "   {} in TROUBLE", source.name);
    }
    text
}

pub(in crate::cli) const BOLD: &str = "\x1b[1m";
pub(in crate::cli) const PLAIN: &str = "\x1b[0m";

fn state(view: &View) -> String {
    let mut text =
        format!("{BOLD}{}{PLAIN}   {}/{} busy", view.state.as_str().to_uppercase(), view.tasks.len(), view.capacity);
    if !view.kept.is_empty() {
        _ = write!(text, ", {} kept", view.kept.len());
    }
    if let Some(why) = view.not_claiming.as_ref().filter(|_| view.state != State::Running) {
        _ = write!(text, "   {why}");
    }
    if let Some(note) = &view.note {
        _ = write!(text, "   by {}", plain(&note.by));
        if !note.text.is_empty() {
            _ = write!(text, " \"{}\"", plain(&note.text));
        }
    }
    text
}

pub(super) fn host(host: Host) -> String {
    let free = |free: Option<u64>| free.map_or_else(|| "unknown".to_owned(), bytes);
    format!("disk {} free   memory {} free", free(host.disk_free), free(host.memory_free))
}

/// How far this host's clock is from that of the service it is furthest from.
fn clock(sources: &[Source]) -> String {
    let told = sources.iter().filter_map(|source| Some((source.clock_ahead_seconds?, &source.name)));
    match told.max_by_key(|(ahead, _)| ahead.unsigned_abs()) {
        None => String::new(),
        // Services tell whole seconds, and their word takes a while.
        Some((-1..=1, _)) => "   clock right".to_owned(),
        Some((ahead, name)) => {
            let way = if ahead > 0 { "ahead of" } else { "behind" };
            format!("   clock {} s {way} {name}", ahead.unsigned_abs())
        }
    }
}

/// The watch for notices that the host goes.
fn heard(spot: &Spot) -> String {
    let (provider, since) = (&spot.provider, shown(spot.seconds));
    match &spot.trouble {
        None if spot.heard => format!("{provider}: notices are heard"),
        None => format!("{provider}: no answer yet"),
        Some(trouble) => format!("{provider}: NOT HEARD for {since}: {}", plain(trouble)),
    }
}

fn sources(sources: &[Source]) -> String {
    let rows = sources.iter().map(|source| {
        let ago = |seconds: Option<f64>| seconds.map_or_else(|| "never".to_owned(), |s| format!("{} ago", shown(s)));
        let mut more = format!("last poll {}", ago(source.polled_seconds_ago));
        _ = write!(more, "   last hit {}", ago(source.brought_seconds_ago));
        if let Some(seconds) = source.next_poll_in_seconds {
            _ = write!(more, "   again in {}", shown(seconds));
        }
        let mark = match source.polled_seconds_ago {
            _ if source.in_trouble => "TROUBLE",
            Some(_) => "ok",
            None if source.error.is_some() => "TROUBLE",
            None => "not asked yet",
        };
        vec![source.name.clone(), source.what.clone(), mark.to_owned(), source.step.clone(), more]
    });
    columns(rows.collect())
}

fn services(services: &[Service]) -> String {
    let rows = services.iter().map(|service| {
        let mark = if service.up { "ok" } else { "DOWN" };
        let restarts = match service.restarts {
            0 => String::new(),
            1 => "started again once".to_owned(),
            many => format!("started again {many} times"),
        };
        vec![service.name.clone(), mark.to_owned(), plain(&service.what), restarts]
    });
    columns(rows.collect())
}

/// What is held.
pub(super) fn tasks(tasks: &[Task]) -> String {
    if tasks.is_empty() {
        return "  none\n".to_owned();
    }
    let head = ["TASK", "SOURCE", "STEP", "HELD", "LEASE LEFT", "RECLAIMED", "LOG", "MEMORY", "PROGRESS"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(tasks.iter().map(|task| {
        let lease = task.lease_left_seconds.map_or_else(
            || "-".to_owned(),
            |seconds| format!("{}{}", shown(seconds), if seconds < LEASE_SHORT_SECONDS { " !" } else { "" }),
        );
        vec![
            format!("{}/{}", task.task, task.run),
            task.source.clone(),
            task.step.clone(),
            shown(task.held_seconds),
            lease,
            task.reclaimed_seconds_ago.map_or_else(|| "-".to_owned(), |seconds| format!("{} ago", shown(seconds))),
            bytes(task.log_bytes),
            task.memory_bytes.map_or_else(|| "-".to_owned(), bytes),
            plain(task.progress.as_deref().unwrap_or("")),
        ]
    }));
    columns(rows)
}

pub(super) fn outcomes(hour: Outcomes) -> String {
    let superseded = if hour.superseded == 0 { String::new() } else { format!("   superseded {}", hour.superseded) };
    format!(
        "completed {}   failed {}   exceptions {}   handed back {}{superseded}   lost {}",
        hour.completed, hour.failed, hour.exceptions, hour.handed_back, hour.lost
    )
}

/// What came from a task or a person, on one line and without control characters.
pub(in crate::cli) fn plain(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { ' ' } else { char }).collect()
}

/// Rows whose columns stand below each other.
pub(in crate::cli) fn columns(rows: Vec<Vec<String>>) -> String {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..count).map(width).collect();
    let mut out = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        let line = cells.collect::<Vec<_>>().join("  ");
        _ = writeln!(out, "  {}", line.trim_end());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_that_hears_nothing_says_for_how_long_and_why() {
        let mut spot = Spot { provider: "aws".to_owned(), heard: false, trouble: None, seconds: 75.0 };
        assert_eq!(heard(&spot), "aws: no answer yet");
        spot.heard = true;
        assert_eq!(heard(&spot), "aws: notices are heard");
        (spot.heard, spot.trouble) = (false, Some("500 for\nspot/instance-action".to_owned()));
        assert_eq!(heard(&spot), "aws: NOT HEARD for 1m15s: 500 for spot/instance-action");
    }

    #[test]
    fn reports_of_activity_are_shown_with_why_there_are_none() {
        let told = |failures, error: Option<&str>| {
            let error = error.map(str::to_owned);
            activity(&Activity { exchange: "core-activity-xchg".to_owned(), reports: 7, failures, error })
        };
        assert_eq!(told(0, None), "7 reports to core-activity-xchg");
        assert_eq!(told(2, None), "7 reports to core-activity-xchg, which failed 2 times before");
        assert_eq!(told(3, Some("it is gone")), "not reported to core-activity-xchg: it is gone");
    }
}
