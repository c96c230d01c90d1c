//! Writes to standard output and standard error; apart from the log, nothing else does.

use std::io::{self, IsTerminal as _, Write as _};

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// A table for reading
    Table,
    /// JSON with stable keys
    Json,
}

/// Strips colours for `NO_COLOR` and for anything but a terminal.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = anstream::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

pub fn print_raw(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(bytes)?;
    out.flush()
}

/// Prints what a task has written. Control sequences, which could move the cursor, rename the window or request input, are
/// removed for a terminal only.
#[derive(Debug)]
pub struct UntrustedOutput(Option<anstream::adapter::StripBytes>);

impl UntrustedOutput {
    pub fn to_stdout() -> Self {
        Self(io::stdout().is_terminal().then(anstream::adapter::StripBytes::new))
    }

    pub fn print(&mut self, piece: &[u8]) -> io::Result<()> {
        match &mut self.0 {
            Some(strip) => strip.strip_next(piece).try_for_each(print_raw),
            None => print_raw(piece),
        }
    }
}

pub fn line(text: &str) -> io::Result<()> {
    print(&format!("{text}\n"))
}

pub fn json(value: &serde_json::Value) -> io::Result<()> {
    line(&format!("{value:#}"))
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
    drop(writeln!(anstream::stderr().lock(), "{text}"));
}

pub fn print_failure(message: &str) {
    if message.is_empty() {
        return;
    }
    if message.starts_with("error") { print_stderr(message) } else { print_stderr(&format!("error: {message}")) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn control_sequences_are_removed_however_the_text_is_split() {
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
