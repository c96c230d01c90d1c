//! Shows the demo's tasks: a table that is drawn anew on a terminal, a line for each change elsewhere.

use std::io;
use std::time::Duration;

use jiff::Timestamp;

use super::super::output;
use super::super::task::status::{TaskState, TaskStatus};
use super::live_display::{Color, LiveDisplay};
use crate::config::Environment;

/// A line of the table.
#[derive(Debug, Clone)]
pub(super) struct Row {
    /// The task's short name.
    pub(super) name: &'static str,
    /// What it shows.
    pub(super) description: &'static str,
    /// How the queue says it is.
    pub(super) status: Option<TaskStatus>,
    /// Whether that is as it should be.
    pub(super) result: CheckResult,
}

/// Whether a task is as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CheckResult {
    /// It has not ended.
    Pending,
    /// It is.
    Passed,
    /// It is not, and why.
    Failed(String),
}

/// Where the tasks are shown.
#[derive(Debug)]
pub(super) struct DemoScreen {
    canvas: LiveDisplay,
    /// What each row said when it was last printed; of plain lines only.
    printed_lines: Vec<String>,
}

/// Lines around the rows of the table, and one for the prompt.
const FRAME_LINES: usize = 5;
/// How much of what a task shows fits into 80 columns.
#[cfg(test)]
pub(super) const SHOWS_CHARS_MAX: usize = 32;
impl DemoScreen {
    /// A table where there is a terminal that it fits in; plain lines otherwise. `NO_COLOR` is respected.
    pub(super) fn new(environment: &Environment, rows: usize) -> Self {
        Self { canvas: LiveDisplay::new(environment, rows + FRAME_LINES), printed_lines: vec![String::new(); rows] }
    }

    /// Shows how it ended: what is not in the table.
    ///
    /// # Errors
    ///
    /// What writing says.
    pub(super) fn print_summary(&self, rows: &[Row], elapsed: Duration) -> io::Result<()> {
        if self.canvas.columns().is_none() {
            output::line(&format!("\n{}", summary(rows, elapsed)))?;
        }
        for row in rows {
            if let CheckResult::Failed(why) = &row.result {
                output::line(&format!("  {} {why}", row.name))?;
            }
        }
        Ok(())
    }

    /// Shows the rows as they are.
    ///
    /// # Errors
    ///
    /// What writing says.
    pub(super) fn show(&mut self, rows: &[Row], elapsed: Duration) -> io::Result<()> {
        match self.canvas.columns() {
            None => self.print_changes(rows, elapsed),
            Some(columns) => self.canvas.draw(&render(rows, elapsed, columns, self.canvas.color())),
        }
    }

    fn print_changes(&mut self, rows: &[Row], elapsed: Duration) -> io::Result<()> {
        for (row, said) in rows.iter().zip(&mut self.printed_lines) {
            let Some(status) = &row.status else { continue };
            let line = format!("{:10} {:28} {:>3}  {}", row.name, status.summary(), run(row), row.description);
            if *said != line {
                output::line(&format!("{:6.1}s  {line}", elapsed.as_secs_f64()))?;
                *said = line;
            }
        }
        Ok(())
    }
}

fn render(rows: &[Row], elapsed: Duration, columns: usize, color: Color) -> Vec<String> {
    let paint = |code: &str, text: &str| color.paint(code, text);
    let cut = |text: &str| text.chars().take(columns.saturating_sub(1)).collect::<String>();
    let mut lines =
        vec![String::new(), paint("1", &cut(&format!("  {:10} {:28} {:>3}  WHAT IT SHOWS", "TASK", "STATE", "RUN")))];
    for row in rows {
        let (mark, code) = match (&row.result, row.status.as_ref().map(|status| status.state)) {
            (CheckResult::Passed, _) => ("✓", "32"),
            (CheckResult::Failed(_), _) => ("✗", "31"),
            (CheckResult::Pending, Some(TaskState::Running)) => ("●", "36"),
            (CheckResult::Pending, _) => ("·", "2"),
        };
        // The mark carries the colour, so that nothing has to be measured around escape codes.
        let rest = cut(&format!("  {:10} {:28} {:>3}  {}", row.name, state(row), run(row), row.description));
        lines.push(format!("{}{}", paint(code, mark), rest.get(1..).unwrap_or("")));
    }
    lines.push(String::new());
    lines.push(paint("1", &cut(&summary(rows, elapsed))));
    lines
}

/// How far the demo has got, in one line.
fn summary(rows: &[Row], elapsed: Duration) -> String {
    let right = rows.iter().filter(|row| row.result == CheckResult::Passed).count();
    let wrong = rows.iter().filter(|row| matches!(row.result, CheckResult::Failed(_))).count();
    let left = rows.len() - right - wrong;
    let wrong = if wrong == 0 { String::new() } else { format!(", {wrong} not") };
    let left = if left == 0 { String::new() } else { format!(", {left} to go") };
    format!("{right} of {} ended as they should{wrong}{left}, {:.1} s", rows.len(), elapsed.as_secs_f64())
}

fn state(row: &Row) -> String {
    row.status.as_ref().map_or_else(|| "-".to_owned(), |status| status.short_summary(Timestamp::now()))
}

fn run(row: &Row) -> String {
    let last = row.status.as_ref().and_then(|status| status.runs.last());
    last.map_or_else(String::new, |run| run.number.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(state: &str, judged: CheckResult) -> Row {
        let status = serde_json::json!({ "taskId": "a", "state": state, "runs": [{ "runId": 0, "state": state }] });
        Row {
            name: "long-name",
            description: "what it shows, at length",
            status: Some(TaskStatus::read(&status)),
            result: judged,
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
            let lines = render(&rows, Duration::from_secs(1), columns, Color::No);
            assert!(lines.iter().all(|line| line.chars().count() < columns), "{lines:#?}");
        }
    }

    #[test]
    fn the_tally_names_what_went_wrong_and_what_is_left() {
        let rows = [
            row("running", CheckResult::Pending),
            row("completed", CheckResult::Passed),
            row("failed", CheckResult::Failed("x".into())),
        ];
        assert_eq!(summary(&rows, Duration::from_millis(1500)), "1 of 3 ended as they should, 1 not, 1 to go, 1.5 s");
        assert_eq!(summary(&rows[1..2], Duration::ZERO), "1 of 1 ended as they should, 0.0 s");
    }
}
