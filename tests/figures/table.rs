//! The table: a row for each figure, as Markdown, so that it can go into `src/guide/figures.md` as it is.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One figure.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) what: String,
    pub(crate) reached: String,
    pub(crate) aim: String,
    /// What the machine itself can do, measured in the same run.
    pub(crate) limit: String,
    /// How busy the machine was when the measurement began: processes ready to run, averaged over a minute.
    pub(crate) load: f64,
}

/// Rows in the order in which they were measured.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) rows: Vec<Row>,
}

/// The machine's load average over the last minute.
pub(crate) fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or(f64::NAN)
}

impl fmt::Display for Table {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = ["figure", "reached", "aim", "limit of the machine", "load"].map(str::to_owned);
        let rows = self.rows.iter().map(|row| {
            let load = format!("{:.1}", row.load);
            [row.what.clone(), row.reached.clone(), row.aim.clone(), row.limit.clone(), load]
        });
        let rows: Vec<[String; 5]> = std::iter::once(head).chain(rows).collect();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: [usize; 5] = std::array::from_fn(width);
        for (number, row) in rows.iter().enumerate() {
            write!(out, "|")?;
            for (cell, width) in row.iter().zip(widths) {
                write!(out, " {cell:width$} |")?;
            }
            writeln!(out)?;
            if number == 0 {
                let lines: Vec<String> = widths.iter().map(|width| "-".repeat(*width)).collect();
                writeln!(out, "| {} |", lines.join(" | "))?;
            }
        }
        Ok(())
    }
}
