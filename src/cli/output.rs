//! The only place that writes to standard output and standard error, apart from the log.

use std::io::{self, IsTerminal as _, Write as _};

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

/// What a task has written, piece by piece. A terminal is not given what would act on it: a log may move the cursor, name the
/// window or ask for keys. A file or a pipe is given every byte.
#[derive(Debug)]
pub struct UntrustedOutput(Option<anstream::adapter::StripBytes>);

impl UntrustedOutput {
    /// For standard output as it is.
    #[must_use]
    pub fn to_stdout() -> Self {
        Self(io::stdout().is_terminal().then(anstream::adapter::StripBytes::new))
    }

    /// Writes the next piece.
    ///
    /// # Errors
    ///
    /// As [`print()`].
    pub fn print(&mut self, piece: &[u8]) -> io::Result<()> {
        match &mut self.0 {
            Some(strip) => strip.strip_next(piece).try_for_each(print_raw),
            None => print_raw(piece),
        }
    }
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
pub fn print_stderr(text: &str) {
    drop(writeln!(anstream::stderr().lock(), "{text}"));
}

/// Shows why a command failed.
pub fn print_failure(message: &str) {
    if message.is_empty() {
        return;
    }
    if message.starts_with("error") { print_stderr(message) } else { print_stderr(&format!("error: {message}")) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_terminal_is_given_nothing_that_acts_on_it_however_it_is_cut() {
        let text = b"a\x1b[2Jb\x07\x08\x1b]0;name\x07c\x1b[31md\x1b[0m\n\xc3\xa9\x1bPq\x1b\\e";
        for cut in 0..text.len() {
            let mut strip = anstream::adapter::StripBytes::new();
            let mut shown = Vec::new();
            for piece in [&text[..cut], &text[cut..]] {
                strip.strip_next(piece).for_each(|part| shown.extend_from_slice(part));
            }
            assert_eq!(String::from_utf8_lossy(&shown), "abcd\n\u{e9}e", "cut at {cut}");
        }
    }
}
