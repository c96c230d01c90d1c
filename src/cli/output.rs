//! The only place that writes to standard output and standard error, apart from the log.

use std::io::{self, Write as _};

/// How a command answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For a person.
    Table,
    /// JSON, whose shape is stable.
    Json,
}

/// Writes a text to standard output, colours stripped where they are not wanted (`NO_COLOR`, no terminal).
///
/// # Errors
///
/// What writing says; a broken pipe among it.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = anstream::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Writes bytes to standard output as they are.
///
/// # Errors
///
/// As [`print()`].
pub fn print_raw(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()
}

/// Writes a line to standard output.
///
/// # Errors
///
/// As [`print()`].
pub fn line(text: &str) -> io::Result<()> {
    print(&format!("{text}\n"))
}

/// Writes a JSON value to standard output.
///
/// # Errors
///
/// As [`print()`].
pub fn json(value: &serde_json::Value) -> io::Result<()> {
    line(&format!("{value:#}"))
}

/// Writes a line to standard error. That nobody listens there is not worth failing for.
pub fn note(text: &str) {
    drop(writeln!(anstream::stderr().lock(), "{text}"));
}

/// Shows why a command failed.
pub fn failure(message: &str) {
    if message.is_empty() {
        return;
    }
    if message.starts_with("error") { note(message) } else { note(&format!("error: {message}")) }
}
