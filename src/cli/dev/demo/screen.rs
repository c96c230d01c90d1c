//! Shows the demo's tasks: a table that is redrawn on a terminal, a line per change elsewhere.

use std::io::{self, IsTerminal as _};
use std::time::Duration;

use jiff::Timestamp;

use super::tasks::{CheckResult, DemoTask};
use crate::cli::output;
use crate::cli::task::task_status::{TaskState, TaskStatus};
use crate::config::Environment;

#[derive(Debug)]
pub(super) enum DemoScreen {
    /// The last line printed for each task, and the last reason for claiming nothing.
    Plain(Vec<String>),
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
    pub(super) fn new(environment: &Environment, tasks: usize) -> Self {
        let usable = io::stdout().is_terminal() && environment.get("TERM").is_some_and(|term| term != "dumb");
        let size = usable.then(|| rustix::termios::tcgetwinsize(io::stdout()).ok()).flatten();
        let (rows, columns) = size.map_or((0, 0), |size| (size.ws_row.into(), size.ws_col.into()));
        if rows >= tasks + FRAME_LINES && columns >= COLUMNS_MIN {
            Self::Table { columns, lines_drawn: 0, color: environment.get("NO_COLOR").is_none() }
        } else {
            Self::Plain(vec![String::new(); tasks + 1])
        }
    }

    /// `blocked` is why the worker claims nothing although tasks are pending.
    pub(super) fn show(&mut self, tasks: &[DemoTask], elapsed: Duration, blocked: Option<&str>) -> io::Result<()> {
        match self {
            Self::Plain(printed) => {
                let known = tasks.iter().map(|task| {
                    let text = |status: &TaskStatus| columns_of(task, &status.summary());
                    task.status.as_ref().map_or_else(String::new, text)
                });
                let blocked = blocked.map_or_else(String::new, |why| format!("claiming nothing: {why}"));
                for (line, last) in known.chain([blocked]).zip(printed) {
                    if *last != line && !line.is_empty() {
                        output::line(&format!("{:6.1}s  {line}", elapsed.as_secs_f64()))?;
                    }
                    *last = line;
                }
                Ok(())
            }
            Self::Table { columns, lines_drawn, color } => {
                let lines = render(tasks, elapsed, blocked, *columns, *color);
                let up = if *lines_drawn == 0 { String::new() } else { format!("\x1b[{lines_drawn}A") };
                let body: String = lines.iter().flat_map(|line| ["\r\x1b[2K", line, "\n"]).collect();
                *lines_drawn = lines.len();
                output::print_raw(format!("{up}{body}").as_bytes())
            }
        }
    }

    /// Prints what the table does not show.
    pub(super) fn print_summary(&self, tasks: &[DemoTask], elapsed: Duration) -> io::Result<()> {
        if matches!(self, Self::Plain(_)) {
            output::line(&format!("\n{}", summary(tasks, elapsed)))?;
        }
        for task in tasks {
            if let CheckResult::Failed(why) = &task.result {
                output::line(&format!("  {} {why}", task.name))?;
            }
        }
        Ok(())
    }
}

fn columns_of(task: &DemoTask, state: &str) -> String {
    let run = task.status.as_ref().and_then(|status| status.runs.last());
    let run = run.map_or_else(String::new, |run| run.number.to_string());
    format!("{:10} {state:30} {run:>3}  {}", task.name, task.description)
}

fn render(tasks: &[DemoTask], elapsed: Duration, blocked: Option<&str>, columns: usize, color: bool) -> Vec<String> {
    let paint = |code: &str, text: &str| if color { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() };
    let cut = |text: &str| text.chars().take(columns.saturating_sub(1)).collect::<String>();
    let mut lines =
        vec![String::new(), paint("1", &cut(&format!("  {:10} {:28} {:>3}  DESCRIPTION", "TASK", "STATE", "RUN")))];
    for task in tasks {
        let (mark, code) = match (&task.result, task.status.as_ref().map(|status| status.state)) {
            (CheckResult::Passed, _) => ("✓", "32"),
            (CheckResult::Failed(_), _) => ("✗", "31"),
            (CheckResult::Pending, Some(TaskState::Running)) => ("●", "36"),
            (CheckResult::Pending, _) => ("·", "2"),
        };
        let state = task.status.as_ref().map(|status| status.short_summary(Timestamp::now()));
        // Only the mark is coloured, so that escape codes do not count towards the width.
        let rest = cut(&format!("  {}", columns_of(task, state.as_deref().unwrap_or("-"))));
        lines.push(format!("{}{}", paint(code, mark), rest.get(1..).unwrap_or("")));
    }
    lines.push(blocked.map_or_else(String::new, |why| paint("33", &cut(&format!("  claiming nothing: {why}")))));
    lines.push(paint("1", &cut(&summary(tasks, elapsed))));
    lines
}

fn summary(tasks: &[DemoTask], elapsed: Duration) -> String {
    let passed = tasks.iter().filter(|task| task.result == CheckResult::Passed).count();
    let pending = tasks.iter().filter(|task| task.result == CheckResult::Pending).count();
    let nonzero = |count: usize, what: &str| if count == 0 { String::new() } else { format!(", {count} {what}") };
    let (failed, pending) = (nonzero(tasks.len() - passed - pending, "not"), nonzero(pending, "pending"));
    format!("{passed} of {} ended as expected{failed}{pending}, {:.1} s", tasks.len(), elapsed.as_secs_f64())
}

/// What fits beside the other columns at 80.
#[cfg(test)]
pub(super) const DESCRIPTION_CHARS_MAX: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    fn tasks() -> [DemoTask; 3] {
        let results = [CheckResult::Pending, CheckResult::Passed, CheckResult::Failed("x".into())];
        let tasks = super::super::tasks::tasks(std::path::Path::new("reclaimed")).unwrap();
        let tasks =
            tasks.into_iter().zip(["running", "completed", "failed"]).zip(results).map(|((task, state), result)| {
                let status = serde_json::json!({ "state": state, "runs": [{ "runId": 0, "state": state }] });
                DemoTask { status: Some(TaskStatus::read(&status).unwrap()), result, ..task }
            });
        tasks.collect::<Vec<_>>().try_into().unwrap()
    }

    #[test]
    fn no_line_of_the_table_is_wider_than_the_terminal() {
        for columns in [50, 60, 200] {
            let lines = render(&tasks(), Duration::from_secs(1), Some(&"x".repeat(300)), columns, false);
            assert!(lines.iter().all(|line| line.chars().count() < columns), "{lines:#?}");
        }
    }

    #[test]
    fn the_summary_counts_passed_failed_and_pending_tasks() {
        let tasks = tasks();
        assert_eq!(summary(&tasks, Duration::from_millis(1500)), "1 of 3 ended as expected, 1 not, 1 pending, 1.5 s");
        assert_eq!(summary(&tasks[1..2], Duration::ZERO), "1 of 1 ended as expected, 0.0 s");
    }
}
