//! Rows, tables and lines in a terminal.

use std::fmt::Write as _;

use super::rows::{Level, Report, Row, Section, Table};
use crate::console::untrusted_text::is_unsafe;

const RESET: &str = "\x1b[0m";

/// For text from tasks and persons: one line, nothing that a terminal would interpret.
pub fn strip_control_chars(text: &str) -> String {
    text.chars().map(|char| if is_unsafe(char) { ' ' } else { char }).collect()
}

/// Cuts a text that is longer, and adds an ellipsis.
pub fn cut(text: &str, chars_max: usize) -> String {
    if text.chars().count() <= chars_max {
        text.to_owned()
    } else {
        text.chars().take(chars_max - 1).chain(['…']).collect()
    }
}

pub fn report(report: &Report) -> String {
    let Report { version, name, pid, sections, .. } = report;
    let mut out = format!("journeyman {version}  {}  pid {pid}\n", strip_control_chars(&name.text()));
    for section in sections {
        out.push_str(&self::section(section));
    }
    out
}

pub fn section(section: &Section) -> String {
    let Section { title, headline, alerts, facts, tables } = section;
    let mut out = String::new();
    // Writing to a String cannot fail.
    if !title.parts.is_empty() {
        _ = writeln!(out, "\n{}", strip_control_chars(&title.text()));
    }
    if !headline.state.is_empty() {
        let (state, why) = (headline.state.to_uppercase(), strip_control_chars(&headline.cell.text()));
        _ = writeln!(out, "{}{state}{RESET}  {why}", color(headline.level));
    }
    for (level, text) in alerts {
        _ = writeln!(out, "{}{}{RESET}", color(*level), strip_control_chars(text));
    }
    out.push_str(&self::facts(facts));
    for table in tables {
        _ = writeln!(out, "{}", table.title);
        out.push_str(&self::table(table));
    }
    out
}

const fn color(level: Level) -> &'static str {
    match level {
        Level::Plain | Level::Good => "\x1b[1m",
        Level::Warn => "\x1b[1;33m",
        Level::Bad => "\x1b[1;31m",
    }
}

pub fn facts(rows: &[Row]) -> String {
    align_columns(rows.iter().map(|row| vec![row.label.clone(), row.cell.text()]))
}

pub fn table(table: &Table) -> String {
    let Table { columns, rows, more, empty, .. } = table;
    if rows.is_empty() {
        return format!("  {empty}\n");
    }
    let head = columns.iter().map(|column| column.to_uppercase()).collect();
    let rows = rows.iter().map(|row| row.iter().map(|cell| cell.text()).collect());
    let mut out = align_columns(std::iter::once(head).chain(rows));
    if *more > 0 {
        // Writing to a String cannot fail.
        _ = writeln!(out, "  and {more} more");
    }
    out
}

pub fn align_columns(rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let clean = |row: Vec<String>| row.iter().map(|cell| strip_control_chars(cell)).collect();
    let rows: Vec<Vec<String>> = rows.into_iter().map(clean).collect();
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..count).map(width).collect();
    let mut out = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        let line = cells.collect::<Vec<_>>().join("  ");
        // Writing to a String cannot fail.
        _ = writeln!(out, "  {}", line.trim_end());
    }
    out
}
