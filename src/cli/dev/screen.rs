//! Shows the demo's tasks: a table that is redrawn on a terminal, a line per change elsewhere.

use std::io::{self, IsTerminal as _};
use std::time::Duration;

use jiff::Timestamp;

use super::super::output;
use super::super::task::status::{TaskState, TaskStatus};
use crate::config::Environment;

#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) description: &'static str,
    pub(super) status: Option<TaskStatus>,
    pub(super) result: CheckResult,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CheckResult {
    Pending,
    Passed,
    Failed(String),
}

#[derive(Debug)]
pub(super) enum DemoScreen {
    Plain {
        /// The last line printed for each row.
        printed: Vec<String>,
        blocked: bool,
    },
    Table {
        columns: usize,
        lines_drawn: usize,
        color: bool,
    },
}

/// Lines around the rows of the table, and one for the prompt.
const FRAME_LINES: usize = 5;
const COLUMNS_MIN: usize = 50;

impl DemoScreen {
    /// A table if stdout is a terminal that is large enough. `NO_COLOR` is respected.
    pub(super) fn new(environment: &Environment, rows: usize) -> Self {
        let size = io::stdout().is_terminal().then(|| rustix::termios::tcgetwinsize(io::stdout()).ok()).flatten();
        let large_enough = |rows_and_columns: (usize, usize)| {
            rows_and_columns.0 >= rows + FRAME_LINES && rows_and_columns.1 >= COLUMNS_MIN
        };
        let dumb = environment.get("TERM").is_none_or(|term| term == "dumb");
        match size.map(|size| (size.ws_row.into(), size.ws_col.into())).filter(|size| large_enough(*size)) {
            Some((_, columns)) if !dumb => {
                Self::Table { columns, lines_drawn: 0, color: environment.get("NO_COLOR").is_none() }
            }
            Some(_) | None => Self::Plain { printed: vec![String::new(); rows], blocked: false },
        }
    }

    /// `blocked` is why the worker claims nothing although tasks are pending.
    pub(super) fn show(&mut self, rows: &[Row], elapsed: Duration, blocked: Option<&str>) -> io::Result<()> {
        match self {
            Self::Plain { printed, blocked: was_blocked } => {
                if let Some(why) = blocked.filter(|_| !*was_blocked) {
                    output::line(&format!("{:6.1}s  claiming nothing: {why}", elapsed.as_secs_f64()))?;
                }
                *was_blocked = blocked.is_some();
                print_changes(printed, rows, elapsed)
            }
            Self::Table { columns, lines_drawn, color } => {
                let lines = render(rows, elapsed, blocked, *columns, *color);
                let up = if *lines_drawn == 0 { String::new() } else { format!("\x1b[{lines_drawn}A") };
                let body: String = lines.iter().flat_map(|line| ["\r\x1b[2K", line, "\n"]).collect();
                *lines_drawn = lines.len();
                output::print_raw(format!("{up}{body}").as_bytes())
            }
        }
    }

    /// Prints what the table does not show.
    pub(super) fn print_summary(&self, rows: &[Row], elapsed: Duration) -> io::Result<()> {
        if matches!(self, Self::Plain { .. }) {
            output::line(&format!("\n{}", summary(rows, elapsed)))?;
        }
        for row in rows {
            if let CheckResult::Failed(why) = &row.result {
                output::line(&format!("  {} {why}", row.name))?;
            }
        }
        Ok(())
    }
}

fn print_changes(printed: &mut [String], rows: &[Row], elapsed: Duration) -> io::Result<()> {
    for (row, last) in rows.iter().zip(printed) {
        let Some(status) = &row.status else { continue };
        let line = format!("{:10} {:28} {:>3}  {}", row.name, status.summary(), run(row), row.description);
        if *last != line {
            output::line(&format!("{:6.1}s  {line}", elapsed.as_secs_f64()))?;
            *last = line;
        }
    }
    Ok(())
}

fn render(rows: &[Row], elapsed: Duration, blocked: Option<&str>, columns: usize, color: bool) -> Vec<String> {
    let paint = |code: &str, text: &str| if color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() };
    let cut = |text: &str| text.chars().take(columns.saturating_sub(1)).collect::<String>();
    let mut lines =
        vec![String::new(), paint("1", &cut(&format!("  {:10} {:28} {:>3}  DESCRIPTION", "TASK", "STATE", "RUN")))];
    for row in rows {
        let (mark, code) = match (&row.result, row.status.as_ref().map(|status| status.state)) {
            (CheckResult::Passed, _) => ("✓", "32"),
            (CheckResult::Failed(_), _) => ("✗", "31"),
            (CheckResult::Pending, Some(TaskState::Running)) => ("●", "36"),
            (CheckResult::Pending, _) => ("·", "2"),
        };
        // Only the mark is coloured, so that escape codes do not count towards the width.
        let rest = cut(&format!("  {:10} {:28} {:>3}  {}", row.name, state(row), run(row), row.description));
        lines.push(format!("{}{}", paint(code, mark), rest.get(1..).unwrap_or("")));
    }
    lines.push(blocked.map_or_else(String::new, |why| paint("33", &cut(&format!("  claiming nothing: {why}")))));
    lines.push(paint("1", &cut(&summary(rows, elapsed))));
    lines
}

fn summary(rows: &[Row], elapsed: Duration) -> String {
    let passed = rows.iter().filter(|row| row.result == CheckResult::Passed).count();
    let failed = rows.iter().filter(|row| matches!(row.result, CheckResult::Failed(_))).count();
    let pending = rows.len() - passed - failed;
    let failed = if failed == 0 { String::new() } else { format!(", {failed} not") };
    let pending = if pending == 0 { String::new() } else { format!(", {pending} pending") };
    format!("{passed} of {} ended as expected{failed}{pending}, {:.1} s", rows.len(), elapsed.as_secs_f64())
}

fn state(row: &Row) -> String {
    row.status.as_ref().map_or_else(|| "-".to_owned(), |status| status.short_summary(Timestamp::now()))
}

fn run(row: &Row) -> String {
    let last = row.status.as_ref().and_then(|status| status.runs.last());
    last.map_or_else(String::new, |run| run.number.to_string())
}

/// What fits beside the other columns at 80.
#[cfg(test)]
pub(super) const DESCRIPTION_CHARS_MAX: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    fn row(state: &str, result: CheckResult) -> Row {
        let status = serde_json::json!({ "taskId": "a", "state": state, "runs": [{ "runId": 0, "state": state }] });
        Row {
            name: "long-name",
            description: "a description of some length",
            status: Some(TaskStatus::read(&status)),
            result,
        }
    }

    #[test]
    fn no_line_of_the_table_is_wider_than_the_terminal() {
        let rows = [
            row("running", CheckResult::Pending),
            row("completed", CheckResult::Passed),
            row("failed", CheckResult::Failed("x".into())),
        ];
        for columns in [50, 60, 200] {
            let lines = render(&rows, Duration::from_secs(1), Some(&"x".repeat(300)), columns, false);
            assert!(lines.iter().all(|line| line.chars().count() < columns), "{lines:#?}");
        }
    }

    #[test]
    fn the_summary_counts_passed_failed_and_pending_tasks() {
        let rows = [
            row("running", CheckResult::Pending),
            row("completed", CheckResult::Passed),
            row("failed", CheckResult::Failed("x".into())),
        ];
        assert_eq!(summary(&rows, Duration::from_millis(1500)), "1 of 3 ended as expected, 1 not, 1 pending, 1.5 s");
        assert_eq!(summary(&rows[1..2], Duration::ZERO), "1 of 1 ended as expected, 0.0 s");
    }
}
