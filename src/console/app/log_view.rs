//! The log of a run: its lines with numbers that can be linked to, commands folded with their durations, colours, and a search.

use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use jiff::Timestamp;
use maud::{Markup, html};
use serde::Deserialize;

use super::listing::{parse_id, path};
use super::log_text::{colored, progress_bar, strip};
use super::{PageError, PageResult, Shared, within};
use crate::console::page::{PageContent, REFRESH_SECONDS};
use crate::console::task::card::{split_note, split_time};
use crate::console::task::log::{LOG_PREFIX, LogEnd, open_log, read_end};
use crate::console::task::status::TaskStatus;
use journeyman_domain::id::Run;
use journeyman_domain::limits::{
    CONSOLE_LOG_BYTES_MAX, CONSOLE_LOG_LINES_MAX, CONSOLE_LOG_STALL, CONSOLE_OVERVIEW_TIMEOUT, CONSOLE_QUEUE_TIMEOUT,
};

/// A log of so many lines is shown unfolded.
const LINES_OPEN_MAX: usize = 200;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Shown {
    run: Option<u32>,
    /// Lines with this text only.
    find: String,
}

pub(super) async fn page(
    State(console): Shared,
    Path((name, task)): Path<(String, String)>,
    Query(shown): Query<Shown>,
) -> PageResult {
    let (target, id) = (console.queue(&name)?, parse_id(&task)?);
    let status =
        within(async { target.api.task_status(&id).await.and_then(|status| TaskStatus::read(&status)) }).await?;
    let Some(number) = shown.run.or_else(|| status.runs.last().map(|run| run.number)) else {
        return Err(PageError(StatusCode::NOT_FOUND, status.missing_log_reason(None)));
    };
    let run = Run { task: id, run: number };
    let is_running = status.may_run(Some(number));
    let (limit, stall) =
        if is_running { (CONSOLE_OVERVIEW_TIMEOUT, Some(CONSOLE_LOG_STALL)) } else { (CONSOLE_QUEUE_TIMEOUT, None) };
    let log = match within(open_log(&target.api, &run, LOG_PREFIX)).await {
        Ok(download) => Some(read_end(download, CONSOLE_LOG_BYTES_MAX, limit, stall).await),
        Err(_) => None,
    };
    let main = html! {
        p { a href=(path(target, &task)) { "task " (task) } ", run "
            @for one in &status.runs { @if one.number == number { strong { (one.number) } } @else { a href={ "?run=" (one.number) } { (one.number) } } " " }
            span { (status.runs.iter().find(|one| one.number == number).map(|one| one.summary()).unwrap_or_default()) } }
        form.search method="get" {
            input type="hidden" name="run" value=(number);
            label { "search " input name="find" value=(shown.find); } button type="submit" { "find" }
        }
        @match &log {
            None => p.empty { (status.missing_log_reason(Some(number))) },
            Some(log) => {
                @if !log.is_whole { p.warn { "This log is longer than what could be read in time, or grows; " code { "journeyman task log " (task) } " prints all of it." } }
                (lines(log, number, &shown.find))
            }
        }
    };
    let content = console.page(&format!("log of {task}"), html! { "log" }, main);
    Ok(PageContent { refresh_seconds: if is_running { REFRESH_SECONDS } else { 0 }, follows: is_running, ..content }
        .build())
}

/// Some lines of a log below one title.
struct Step<'a> {
    /// Empty for lines of no command.
    title: String,
    failed: bool,
    lines: Vec<(usize, &'a str)>,
}

/// A command begins a step, and its result ends it.
fn steps(log: &LogEnd) -> Vec<Step<'_>> {
    let lines: Vec<&str> = log.text.lines().collect();
    let skipped = lines.len().saturating_sub(CONSOLE_LOG_LINES_MAX);
    let between = || Step { title: String::new(), failed: false, lines: Vec::new() };
    let mut steps = vec![between()];
    for (index, line) in lines.iter().enumerate().skip(skipped) {
        let note = split_note(line).map(|(_, note)| note).unwrap_or_default();
        if note.starts_with("executing command ") {
            steps.push(Step { title: note.to_owned(), ..between() });
        }
        let Some(step) = steps.last_mut() else { continue };
        step.lines.push((log.lines_cut + index + 1, *line));
        if note.starts_with("command ") && !step.title.is_empty() {
            step.failed = !note.contains("exit status 0");
            step.title = format!(
                "{}: {}",
                step.title.trim_start_matches("executing "),
                note.split_once(": ").map_or(note, |(_, end)| end)
            );
            steps.push(between());
        }
    }
    steps.retain(|step| !step.lines.is_empty());
    steps
}

fn lines(log: &LogEnd, run: u32, find: &str) -> Markup {
    let steps = steps(log);
    let began = log.text.lines().find_map(|line| split_note(line).map(|(at, _)| at));
    let wanted = find.to_lowercase();
    let is_found = |line: &str| wanted.is_empty() || line.to_lowercase().contains(&wanted);
    let first = steps.first().and_then(|step| step.lines.first()).map_or(1, |(number, _)| *number);
    let count = steps.iter().flat_map(|step| &step.lines).filter(|(_, line)| is_found(line)).count();
    // A long log folds what went well.
    let is_long = steps.iter().map(|step| step.lines.len()).sum::<usize>() > LINES_OPEN_MAX;
    let is_open = |index: usize, step: &Step<'_>| !is_long || step.failed || index + 2 >= steps.len();
    html! {
        @if first > 1 { p.dim { "Lines 1 to " (first - 1) " are not shown." } }
        @if !find.is_empty() { p.dim { (count) " lines with “" (find) "”" } }
        div.log {
            @for (index, step) in steps.iter().enumerate() {
                @let rows = html! { @for (number, line) in step.lines.iter().filter(|(_, line)| is_found(line)) { (self::line(*number, line, began, run, find)) } };
                @if step.title.is_empty() || !find.is_empty() { (rows) } @else {
                    details open[is_open(index, step)] data-name=(step.title) { summary class=(if step.failed { "bad" } else { "" }) { (step.title) } (rows) }
                }
            }
        }
    }
}

fn line(number: usize, line: &str, began: Option<Timestamp>, run: u32, find: &str) -> Markup {
    let id = format!("L{number}");
    let note = split_note(line);
    let timed = note.or_else(|| split_time(line.strip_prefix('[')?));
    let (at, text) = timed.map_or((None, line), |(at, text)| (Some(at), text));
    // What a program drew over is not shown.
    let (text, is_progress) = match text.trim_end_matches('\r').rsplit_once('\r') {
        Some((_, last)) => (last, true),
        None => (text, false),
    };
    let href = if find.is_empty() { format!("#{id}") } else { format!("?run={run}#{id}") };
    html! {
        div id=(id) {
            a href=(href) { (number) }
            @if let Some(at) = at {
                time.note datetime=(at) title=(at) { "+" (format!("{:.1}", began.map_or(0.0, |began| at.duration_since(began).as_secs_f64()))) "s" } " "
            }
            @if note.is_some() { span.note { (text) } }
            @else if is_progress && text.contains('%') { (progress_bar(&strip(text))) }
            @else { (colored(text)) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_steps_with_their_results() {
        let note = |text: &str| format!("[journeyman 2026-11-29T10:00:00.5Z] {text}\n");
        let text = format!(
            "{}{}[2026-11-29T10:00:01.7Z] out\n{}{}",
            note("task T/0"),
            note("executing command 0: make"),
            note("command 0: exit status 2, after 1.5s"),
            note("failed")
        );
        let log = LogEnd { lines_cut: 10, text, is_whole: true };
        let steps = steps(&log);
        let titles: Vec<_> = steps.iter().map(|step| (step.title.as_str(), step.failed, step.lines.len())).collect();
        assert_eq!(titles, [("", false, 1), ("command 0: make: exit status 2, after 1.5s", true, 3), ("", false, 1)]);
        assert_eq!(steps[1].lines[0].0, 12);
        let drawn = lines(&log, 0, "OUT").into_string();
        assert!(drawn.contains("1 lines with") && drawn.contains(r#"id="L13""#) && !drawn.contains("L12"), "{drawn}");
        assert!(drawn.contains(">+1.2s</time> out</div>"), "{drawn}");
    }

    #[test]
    fn what_was_drawn_over_is_left_out() {
        let drawn = line(7, "10%\r 63% of it", None, 0, "").into_string();
        assert!(drawn.contains(r#"<progress max="100" value="63""#) && !drawn.contains("10%"), "{drawn}");
    }
}
