//! Problems of a configuration, shown with their place in the file and what to do about them.

use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::values::{MASK, is_inline_secret};
use journeyman_domain::limits::CONFIG_PROBLEMS_MAX;
use journeyman_domain::named_enum;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    Error,
    /// The configuration can be used all the same.
    Warning,
}

/// The layer that a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ValueOrigin {
    /// The built-in value.
    Default,
    /// The file, at these bytes.
    File(Range<usize>),
    /// An environment variable.
    Env(String),
    /// A flag.
    Flag(String),
}

named_enum! {
    /// The kind of a problem, which `journeyman guide configuration` explains.
    pub enum Code {
        Syntax = "syntax",
        UnknownKey = "unknown-key",
        WrongValue = "wrong-value",
        MissingKey = "missing-key",
        InvalidName = "invalid-name",
        UnknownVariable = "unknown-variable",
        /// Values that are good by themselves.
        Conflict = "conflict",
        /// A file or a program that a key names, or the configuration's own.
        File = "file",
    }
}

#[derive(Debug, Clone)]
pub struct Problem {
    pub severity: Severity,
    pub code: Code,
    /// One sentence without a full stop.
    pub message: String,
    /// The place of the value; [`ValueOrigin::Default`] has none.
    pub origin: ValueOrigin,
    /// What to do about it.
    pub help: Option<String>,
}

impl Problem {
    pub const fn error(code: Code, message: String, origin: ValueOrigin) -> Self {
        Self { severity: Severity::Error, code, message, origin, help: None }
    }

    pub const fn warning(code: Code, message: String, origin: ValueOrigin, help: String) -> Self {
        Self { severity: Severity::Warning, code, message, origin, help: Some(help) }
    }

    pub const fn is_warning(&self) -> bool {
        matches!(self.severity, Severity::Warning)
    }
}

/// A configuration file and the files that complete it, one after the other.
#[derive(Debug, Clone)]
pub struct Document {
    /// The first file's name in messages.
    pub name: Arc<str>,
    pub text: Arc<str>,
    /// The name of each file, and where its text starts.
    parts: Vec<(Arc<str>, usize)>,
}

impl Document {
    pub fn new(path: &Path, text: &str) -> Self {
        let name: Arc<str> = path.display().to_string().into();
        Self { parts: vec![(Arc::clone(&name), 0)], name, text: text.into() }
    }

    /// Appends a file whose values take precedence.
    #[must_use]
    pub fn with(mut self, path: &Path, text: &str) -> Self {
        self.parts.push((path.display().to_string().into(), self.text.len()));
        self.text = [&*self.text, text].concat().into();
        self
    }

    /// The start and the text of each file.
    pub(crate) fn texts(&self) -> impl Iterator<Item = (usize, &str)> {
        let ends = self.parts.iter().skip(1).map(|(_, start)| *start).chain([self.text.len()]);
        self.parts.iter().zip(ends).map(|((_, start), end)| (*start, &self.text[*start..end]))
    }

    /// Line and column of a byte in its file, both from 1; columns count characters.
    pub fn position(&self, byte: usize) -> Position {
        let byte = byte.min(self.text.len());
        let part = self.parts.partition_point(|(_, start)| *start <= byte).saturating_sub(1);
        let (name, start) = &self.parts[part];
        let head = self.text.get(*start..byte).unwrap_or_default();
        let line_start = head.rfind('\n').map_or(0, |at| at + 1);
        Position {
            file: Arc::clone(name),
            line: head.matches('\n').count() + 1,
            column: head[line_start..].chars().count() + 1,
            line_start: start + line_start,
        }
    }

    fn line_at(&self, start: usize) -> &str {
        self.text[start..].lines().next().unwrap_or("")
    }
}

/// A place in a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    pub file: Arc<str>,
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// The byte that the line starts at.
    line_start: usize,
}

/// All problems of a configuration.
#[derive(Debug, Clone)]
pub struct Problems {
    document: Option<Document>,
    list: Vec<Problem>,
}

impl Problems {
    /// Sorts the problems: errors before warnings, and by their place in the file, then variables, then flags.
    pub fn new(document: Option<Document>, mut list: Vec<Problem>) -> Self {
        let place = |problem: &Problem| match &problem.origin {
            ValueOrigin::File(span) => (0, span.start, String::new()),
            ValueOrigin::Default => (1, 0, String::new()),
            ValueOrigin::Env(name) => (2, 0, name.clone()),
            ValueOrigin::Flag(name) => (3, 0, name.clone()),
        };
        list.sort_by_key(|problem| (problem.is_warning(), place(problem)));
        Self { document, list }
    }

    /// The number of problems that are errors.
    pub fn error_count(&self) -> usize {
        self.list.iter().filter(|problem| !problem.is_warning()).count()
    }

    pub fn list(&self) -> &[Problem] {
        &self.list
    }

    /// An object for each problem, with its place.
    pub fn to_json(&self) -> Vec<serde_json::Value> {
        let list = self.list.iter();
        list.map(|problem| {
            let place = match (&problem.origin, &self.document) {
                (ValueOrigin::File(span), Some(document)) => Some(document.position(span.start)),
                _ => None,
            };
            let set_by = match &problem.origin {
                ValueOrigin::Env(name) | ValueOrigin::Flag(name) => Some(name),
                ValueOrigin::Default | ValueOrigin::File(_) => None,
            };
            serde_json::json!({
                "severity": if problem.is_warning() { "warning" } else { "error" },
                "code": problem.code.as_str(),
                "message": problem.message,
                "help": problem.help,
                "file": place.as_ref().map(|place| &*place.file),
                "line": place.as_ref().map(|place| place.line),
                "column": place.as_ref().map(|place| place.column),
                "set_by": set_by,
            })
        })
        .collect()
    }

    fn write_one(&self, problem: &Problem, out: &mut String) -> fmt::Result {
        let severity = if problem.is_warning() { "warning" } else { "error" };
        writeln!(out, "{severity}[{}]: {}", problem.code.as_str(), problem.message)?;
        let mut margin = 2;
        match (&problem.origin, &self.document) {
            (ValueOrigin::File(span), Some(document)) => {
                let place = document.position(span.start);
                margin = place.line.to_string().len() + 1;
                write_snippet(document, span, &place, margin, out)?;
            }
            (ValueOrigin::Env(name), _) => writeln!(out, " --> environment variable {name}")?,
            (ValueOrigin::Flag(name), _) => writeln!(out, " --> flag {name}")?,
            (ValueOrigin::Default | ValueOrigin::File(_), _) => {}
        }
        if let Some(help) = &problem.help {
            writeln!(out, "{:margin$}= help: {help}", "")?;
        }
        Ok(())
    }
}

/// Maximum characters of a source line in a message.
const LINE_CHARS_MAX: usize = 120;

fn write_snippet(
    document: &Document,
    span: &Range<usize>,
    place: &Position,
    margin: usize,
    out: &mut String,
) -> fmt::Result {
    let line = mask_secret(document.line_at(place.line_start));
    let shown: String = line.chars().take(LINE_CHARS_MAX).map(|c| if c == '\t' { ' ' } else { c }).collect();
    let before = (place.column - 1).min(LINE_CHARS_MAX);
    let spanned = document.text.get(span.clone()).unwrap_or("").lines().next().unwrap_or("").chars().count();
    let carets = spanned.min(shown.chars().count().saturating_sub(before)).max(1);
    let arrow = format!("{:>width$}", "-->", width = margin + 2);
    writeln!(out, "{arrow} {}:{}:{}", place.file, place.line, place.column)?;
    writeln!(out, "{:margin$}|", "")?;
    writeln!(out, "{:<margin$}| {}", place.line, shown.trim_end())?;
    writeln!(out, "{:margin$}| {:before$}{}", "", "", "^".repeat(carets))?;
    writeln!(out, "{:margin$}|", "")
}

/// Masks the value in a line of the file if it may be a secret.
fn mask_secret(line: &str) -> Cow<'_, str> {
    let Some((key, _)) = line.split_once('=') else { return Cow::Borrowed(line) };
    let lower = line.to_lowercase();
    let names_file = key.trim_end().ends_with("_file");
    if (is_secret_name(&lower) && !names_file) || holds_password(line) || is_file_with_secret(key, line) {
        Cow::Owned(format!("{key}= {MASK}"))
    } else if let Some(start) = url_start(line) {
        Cow::Owned([&line[..start], &without_path(&line[start..])].concat())
    } else {
        Cow::Borrowed(line)
    }
}

/// True if a key that names files has a secret instead.
pub(crate) fn is_file_with_secret(key: &str, value: &str) -> bool {
    (key.trim_end().ends_with("_file") || key.trim_end().ends_with("_files")) && is_inline_secret(value)
}

/// Where the value of the key `url` begins in a line, which may be an inline table.
fn url_start(line: &str) -> Option<usize> {
    let is_end = |at: &(usize, &str)| !line[..at.0].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '-');
    let (at, _) = line.match_indices("url").find(is_end)?;
    let rest = line[at + 3..].trim_start_matches(['"', '\'']).trim_start();
    rest.strip_prefix('=').map(|value| line.len() - value.len())
}

/// A URL up to its path, which may be a secret.
pub(crate) fn without_path(url: &str) -> String {
    let host = url.find("://").map_or(0, |at| at + 3);
    let path = url[host..].find(['/', '?', '#', '\\']).map(|at| host + at);
    let quote = url.trim_start().chars().next().filter(|first| matches!(first, '"' | '\'')).map(String::from);
    path.map_or_else(|| url.to_owned(), |path| format!("{}/{MASK}{}", &url[..path], quote.unwrap_or_default()))
}

/// True if a key or a line names a secret.
pub fn is_secret_name(text: &str) -> bool {
    ["token", "secret", "passw", "certificate", "credential", "key_file"].iter().any(|word| text.contains(word))
}

/// True if a text looks like a URL with a user and a password.
pub fn holds_password(text: &str) -> bool {
    text.split_once("://").is_some_and(|(_, rest)| rest.contains('@'))
}

impl fmt::Display for Problems {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = String::new();
        for problem in self.list.iter().take(CONFIG_PROBLEMS_MAX) {
            self.write_one(problem, &mut text)?;
            text.push('\n');
        }
        let hidden = self.list.len().saturating_sub(CONFIG_PROBLEMS_MAX);
        if hidden > 0 {
            writeln!(text, "… and {hidden} more")?;
        }
        match self.error_count() {
            0 => text.truncate(text.trim_end().len()),
            1 => text.push_str("1 problem in the configuration"),
            count => write!(text, "{count} problems in the configuration")?,
        }
        out.write_str(&text)
    }
}

impl std::error::Error for Problems {}

/// The known name that is most similar to an unknown one, if it is similar enough.
pub fn suggest<'a>(unknown: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lower = unknown.to_lowercase();
    let similarity = |name: &str| strsim::jaro_winkler(&lower, &name.to_lowercase());
    known
        .into_iter()
        .map(|name| (similarity(name), name))
        .filter(|(score, _)| *score >= 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name)
}
