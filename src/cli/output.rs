//! Writes to standard output and standard error; apart from the log, nothing else does.

use std::io::{self, IsTerminal as _, Write as _};

use crate::console::untrusted_text::{self, TextFilter};

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// A table for reading
    Table,
    /// JSON with stable keys
    Json,
}

/// Strips colours for `NO_COLOR` and for anything but a terminal. Of control characters only colours, tabs and line breaks
/// remain.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = anstream::stdout().lock();
    out.write_all(printable(text).as_bytes())?;
    out.flush()
}

/// Escape sequences other than colours lose their first character, which makes them text.
fn printable(text: &str) -> String {
    let is_color = |rest: &str| {
        let codes =
            rest.strip_prefix('[').map(|rest| rest.trim_start_matches(|char: char| matches!(char, '0'..='9' | ';')));
        codes.is_some_and(|rest| rest.starts_with('m'))
    };
    let mut pieces = text.split('\x1b');
    let mut out = untrusted_text::clean(pieces.next().unwrap_or_default());
    for piece in pieces {
        out.push(if is_color(piece) { '\x1b' } else { ' ' });
        out.push_str(&untrusted_text::clean(piece));
    }
    out
}

pub fn print_raw(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()
}

/// Prints what a task or a service has written; filtered for a terminal only.
#[derive(Debug)]
pub struct UntrustedOutput(Option<TextFilter>);

impl UntrustedOutput {
    pub fn to_stdout() -> Self {
        Self(io::stdout().is_terminal().then(TextFilter::default))
    }

    pub fn print(&mut self, piece: &[u8]) -> io::Result<()> {
        match &mut self.0 {
            Some(filter) => print_raw(filter.push(piece).as_bytes()),
            None => print_raw(piece),
        }
    }
}

pub fn line(text: &str) -> io::Result<()> {
    print(&format!("{text}\n"))
}

/// Prints the answer to a command.
pub fn message(text: &str, format: Format) -> io::Result<()> {
    show(&serde_json::json!({ "message": text }), format, |_| format!("{text}\n"))
}

/// JSON permits the characters that `print` replaces in strings only, as escapes too.
pub fn json(value: &serde_json::Value) -> io::Result<()> {
    line(&escape_unsafe(&format!("{value:#}")))
}

fn escape_unsafe(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for char in json.chars() {
        if char != '\n' && untrusted_text::is_unsafe(char) {
            // Each of them is in the basic plane, so that one escape suffices.
            out.push_str(&format!("\\u{:04x}", u32::from(char)));
        } else {
            out.push(char);
        }
    }
    out
}

/// Prints JSON, or what `render` makes of the value.
pub fn show<T: serde::Serialize + ?Sized>(
    value: &T,
    format: Format,
    render: impl FnOnce(&T) -> String,
) -> io::Result<()> {
    match format {
        Format::Json => json(&serde_json::json!(value)),
        Format::Table => print(&render(value)),
    }
}

/// Ignores write errors.
pub fn print_stderr(text: &str) {
    drop(writeln!(anstream::stderr().lock(), "{}", printable(text)));
}

pub fn print_failure(message: &str) {
    if message.is_empty() {
        return;
    }
    if message.starts_with("error") { print_stderr(message) } else { print_stderr(&format!("error: {message}")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d1_of_escape_sequences_only_colours_are_printed() {
        let text = "\x1b[1mbold\x1b[0m \x1b[31;1mred\x1b[2J\x1b]0;x\x07 \u{9b}2J \u{202e}\tend\n";
        assert_eq!(printable(text), "\x1b[1mbold\x1b[0m \x1b[31;1mred [2J ]0;x   2J  \tend\n");
    }

    #[test]
    fn d1_json_for_a_terminal_escapes_what_the_terminal_would_interpret() {
        let value = serde_json::json!({ "name": "a\u{9b}2Jb\u{202e}c\x1b[2J\u{7f}\n" });
        let shown = escape_unsafe(&format!("{value:#}"));
        assert!(shown.chars().all(|char| char == '\n' || !untrusted_text::is_unsafe(char)), "{shown}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
    }
}
