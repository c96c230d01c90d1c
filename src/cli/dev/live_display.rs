//! Where a demo shows itself: lines that are drawn over themselves on a terminal, and nothing of that elsewhere.

use std::io::{self, IsTerminal as _};

use super::super::output;
use crate::config::Environment;

/// A terminal, or what is none.
#[derive(Debug)]
pub(super) struct LiveDisplay {
    mode: DisplayMode,
    color: Color,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DisplayMode {
    /// A line for each change.
    Plain,
    /// A table, drawn over itself; the number of lines drawn so far.
    Table { drawn: usize, columns: usize },
}

/// Whether it takes colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Color {
    Yes,
    No,
}

impl Color {
    /// A text in the colour of an escape code.
    pub(super) fn paint(self, code: &str, text: &str) -> String {
        match self {
            Self::Yes => format!("\x1b[{code}m{text}\x1b[0m"),
            Self::No => text.to_owned(),
        }
    }
}

/// The narrowest terminal that a table fits in.
const COLUMNS_MIN: usize = 50;

impl LiveDisplay {
    /// A terminal that so many lines fit in; otherwise nothing is drawn. `NO_COLOR` is respected.
    pub(super) fn new(environment: &Environment, lines: usize) -> Self {
        let size = io::stdout().is_terminal().then(|| rustix::termios::tcgetwinsize(io::stdout()).ok()).flatten();
        let fits = size.filter(|size| usize::from(size.ws_row) >= lines && usize::from(size.ws_col) >= COLUMNS_MIN);
        let dumb = environment.get("TERM").is_none_or(|term| term == "dumb");
        let mode = match fits {
            Some(size) if !dumb => DisplayMode::Table { drawn: 0, columns: size.ws_col.into() },
            Some(_) | None => DisplayMode::Plain,
        };
        let color = mode != DisplayMode::Plain && environment.get("NO_COLOR").is_none();
        Self { mode, color: if color { Color::Yes } else { Color::No } }
    }

    /// How wide it is; `None` where nothing is drawn.
    pub(super) const fn columns(&self) -> Option<usize> {
        match self.mode {
            DisplayMode::Plain => None,
            DisplayMode::Table { columns, .. } => Some(columns),
        }
    }

    /// Whether it takes colours.
    pub(super) const fn color(&self) -> Color {
        self.color
    }

    /// Draws lines over those that were drawn last.
    ///
    /// # Errors
    ///
    /// What writing says.
    pub(super) fn draw(&mut self, lines: &[String]) -> io::Result<()> {
        let DisplayMode::Table { drawn, columns } = self.mode else { return Ok(()) };
        let up = if drawn == 0 { String::new() } else { format!("\x1b[{drawn}A") };
        let body: String = lines.iter().flat_map(|line| ["\r\x1b[2K", line, "\n"]).collect();
        // What was drawn below is longer than this.
        let rest = if lines.len() < drawn { "\x1b[J" } else { "" };
        self.mode = DisplayMode::Table { drawn: lines.len(), columns };
        output::print_raw(format!("{up}{body}{rest}").as_bytes())
    }
}
