//! Shows the demo's tasks: a table that is drawn anew on a terminal, a line for each change elsewhere.

use std::io;
use std::time::Duration;

use jiff::Timestamp;

use super::super::output;
use super::super::task::status::{State, Status};
use super::canvas::{Canvas, Color};
use crate::config::Environment;

/// A line of the table.
#[derive(Debug, Clone)]
pub(super) struct Row {
    /// The task's short name.
    pub(super) name: &'static str,
    /// What it shows.
    pub(super) shows: &'static str,
    /// How the queue says it is.
    pub(super) status: Option<Status>,
    /// Whether that is as it should be.
    pub(super) judged: Judged,
}

/// Whether a task is as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Judged {
    /// It has not ended.
    NotYet,
    /// It is.
    Right,
    /// It is not, and why.
    Wrong(String),
}

/// Where the tasks are shown.
#[derive(Debug)]
pub(super) struct Screen {
    canvas: Canvas,
    /// What each row said when it was last printed; of plain lines only.
    said: Vec<String>,
}

/// Lines around the rows of the table, and one for the prompt.
const FRAME_LINES: usize = 5;
/// How much of what a task shows fits into 80 columns.
#[cfg(test)]
pub(super) const SHOWS_CHARS_MAX: usize = 32;
impl Screen {
    /// A table where there is a terminal that it fits in; plain lines otherwise. `NO_COLOR` is respected.
    pub(super) fn new(environment: &Environment, rows: usize) -> Self {
        Self { canvas: Canvas::new(environment, rows + FRAME_LINES), said: vec![String::new(); rows] }
    }

    /// Shows how it ended: what is not in the table.
    ///
    /// # Errors
    ///
    /// What writing says.
    pub(super) fn conclude(&self, rows: &[Row], elapsed: Duration) -> io::Result<()> {
        if self.canvas.columns().is_none() {
            output::line(&format!("\n{}", tally(rows, elapsed)))?;
        }
        for row in rows {
            if let Judged::Wrong(why) = &row.judged {
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
            None => self.changes(rows, elapsed),
            Some(columns) => self.canvas.draw(&table(rows, elapsed, columns, self.canvas.color())),
        }
    }

    fn changes(&mut self, rows: &[Row], elapsed: Duration) -> io::Result<()> {
        for (row, said) in rows.iter().zip(&mut self.said) {
            let Some(status) = &row.status else { continue };
            let line = format!("{:10} {:28} {:>3}  {}", row.name, status.in_words(), run(row), row.shows);
            if *said != line {
                output::line(&format!("{:6.1}s  {line}", elapsed.as_secs_f64()))?;
                *said = line;
            }
        }
        Ok(())
    }
}

fn table(rows: &[Row], elapsed: Duration, columns: usize, color: Color) -> Vec<String> {
    let paint = |code: &str, text: &str| color.paint(code, text);
    let cut = |text: &str| text.chars().take(columns.saturating_sub(1)).collect::<String>();
    let mut lines =
        vec![String::new(), paint("1", &cut(&format!("  {:10} {:28} {:>3}  WHAT IT SHOWS", "TASK", "STATE", "RUN")))];
    for row in rows {
        let (mark, code) = match (&row.judged, row.status.as_ref().map(|status| status.state)) {
            (Judged::Right, _) => ("✓", "32"),
            (Judged::Wrong(_), _) => ("✗", "31"),
            (Judged::NotYet, Some(State::Running)) => ("●", "36"),
            (Judged::NotYet, _) => ("·", "2"),
        };
        // The mark carries the colour, so that nothing has to be measured around escape codes.
        let rest = cut(&format!("  {:10} {:28} {:>3}  {}", row.name, state(row), run(row), row.shows));
        lines.push(format!("{}{}", paint(code, mark), rest.get(1..).unwrap_or("")));
    }
    lines.push(String::new());
    lines.push(paint("1", &cut(&tally(rows, elapsed))));
    lines
}

/// How far the demo has got, in one line.
fn tally(rows: &[Row], elapsed: Duration) -> String {
    let right = rows.iter().filter(|row| row.judged == Judged::Right).count();
    let wrong = rows.iter().filter(|row| matches!(row.judged, Judged::Wrong(_))).count();
    let left = rows.len() - right - wrong;
    let wrong = if wrong == 0 { String::new() } else { format!(", {wrong} not") };
    let left = if left == 0 { String::new() } else { format!(", {left} to go") };
    format!("{right} of {} ended as they should{wrong}{left}, {:.1} s", rows.len(), elapsed.as_secs_f64())
}

fn state(row: &Row) -> String {
    row.status.as_ref().map_or_else(|| "-".to_owned(), |status| status.in_short(Timestamp::now()))
}

fn run(row: &Row) -> String {
    let last = row.status.as_ref().and_then(|status| status.runs.last());
    last.map_or_else(String::new, |run| run.number.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(state: &str, judged: Judged) -> Row {
        let status = serde_json::json!({ "taskId": "a", "state": state, "runs": [{ "runId": 0, "state": state }] });
        Row { name: "long-name", shows: "what it shows, at length", status: Some(Status::read(&status)), judged }
    }

    #[test]
    fn no_line_of_the_table_is_wider_than_the_terminal() {
        let rows =
            [row("running", Judged::NotYet), row("completed", Judged::Right), row("failed", Judged::Wrong("x".into()))];
        for columns in [50, 60, 200] {
            let lines = table(&rows, Duration::from_secs(1), columns, Color::No);
            assert!(lines.iter().all(|line| line.chars().count() < columns), "{lines:#?}");
        }
    }

    #[test]
    fn the_tally_names_what_went_wrong_and_what_is_left() {
        let rows =
            [row("running", Judged::NotYet), row("completed", Judged::Right), row("failed", Judged::Wrong("x".into()))];
        assert_eq!(tally(&rows, Duration::from_millis(1500)), "1 of 3 ended as they should, 1 not, 1 to go, 1.5 s");
        assert_eq!(tally(&rows[1..2], Duration::ZERO), "1 of 1 ended as they should, 0.0 s");
    }
}
