//! Text for tables and status lines in a terminal.

use std::fmt::Write as _;

use crate::observe::untrusted_text::is_unsafe;
pub(super) use journeyman_domain::units::format_seconds;

pub(super) const BOLD: &str = "\x1b[1m";
pub(super) const RESET: &str = "\x1b[0m";

/// For text from tasks and persons: one line, nothing that a terminal would interpret.
pub(super) fn strip_control_chars(text: &str) -> String {
    text.chars().map(|char| if is_unsafe(char) { ' ' } else { char }).collect()
}

/// With an ellipsis if it is longer.
pub(super) fn cut(text: &str, chars_max: usize) -> String {
    if text.chars().count() <= chars_max {
        text.to_owned()
    } else {
        text.chars().take(chars_max - 1).chain(['…']).collect()
    }
}

pub(super) fn table<const N: usize>(head: [&str; N], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    align_columns(std::iter::once(head.map(str::to_owned).to_vec()).chain(rows))
}

pub(super) fn align_columns(rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let rows: Vec<Vec<String>> = rows.into_iter().collect();
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
