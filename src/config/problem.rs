//! What is wrong with a configuration, and how it is shown: a stable code, one sentence, the place, and what to do next.

use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::values::MASK;
use crate::limits::CONFIG_PROBLEMS_MAX;

/// A kind of problem. The number is stable and can be searched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProblemCode {
    /// The file could not be read.
    Unreadable,
    /// The file is not TOML.
    Syntax,
    /// A value is of the wrong type.
    Type,
    /// There is no such key.
    Unknown,
    /// A value is of the right type and cannot be used.
    Value,
    /// Something that has to be there is not.
    Missing,
    /// A secret stands where it can be seen.
    ExposedSecret,
    /// Two values do not go together.
    Conflict,
    /// A file or a program that is named cannot be used on this machine.
    Unusable,
    /// A variable looks like one of ours and sets nothing. A warning.
    UnknownVariable,
    /// Every user of this machine can read a secret's file. A warning.
    WorldReadable,
}

/// How much a problem matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The configuration cannot be used.
    Error,
    /// It can, and is perhaps not what was meant.
    Warning,
}

impl ProblemCode {
    /// The code as it is shown.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unreadable => "JM-CFG-001",
            Self::Syntax => "JM-CFG-002",
            Self::Type => "JM-CFG-003",
            Self::Unknown => "JM-CFG-004",
            Self::Value => "JM-CFG-005",
            Self::Missing => "JM-CFG-006",
            Self::ExposedSecret => "JM-CFG-007",
            Self::Conflict => "JM-CFG-008",
            Self::Unusable => "JM-CFG-009",
            Self::UnknownVariable => "JM-CFG-010",
            Self::WorldReadable => "JM-CFG-011",
        }
    }

    /// How much it matters.
    #[must_use]
    pub const fn severity(self) -> Severity {
        match self {
            Self::UnknownVariable | Self::WorldReadable => Severity::Warning,
            Self::Unreadable
            | Self::Syntax
            | Self::Type
            | Self::Unknown
            | Self::Value
            | Self::Missing
            | Self::ExposedSecret
            | Self::Conflict
            | Self::Unusable => Severity::Error,
        }
    }
}

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ValueOrigin {
    /// Nobody set it.
    Default,
    /// The file, at these bytes.
    File(Range<usize>),
    /// A variable of the environment.
    Env(String),
    /// A flag, as it was written.
    Flag(String),
}

/// One thing that is wrong.
#[derive(Debug, Clone)]
pub struct Problem {
    /// Which kind.
    pub code: ProblemCode,
    /// One sentence without a full stop.
    pub message: String,
    /// Where. [`ValueOrigin::Default`] is "nowhere".
    pub origin: ValueOrigin,
    /// What stands beside the caret.
    pub label: String,
    /// What to do next.
    pub help: Option<String>,
}

/// A configuration file: its name and its text.
#[derive(Debug, Clone)]
pub struct Document {
    /// The name it is shown under.
    pub name: Arc<str>,
    /// The text.
    pub text: Arc<str>,
}

impl Document {
    /// Makes a document of a file's content.
    #[must_use]
    pub fn new(path: &Path, text: &str) -> Self {
        Self { name: path.display().to_string().into(), text: text.into() }
    }

    /// Line and column of a byte, both from 1; columns count characters.
    #[must_use]
    pub fn position(&self, byte: usize) -> Position {
        let byte = byte.min(self.text.len());
        let head = self.text.get(..byte).unwrap_or(&self.text);
        let line_start = head.rfind('\n').map_or(0, |at| at + 1);
        Position { line: head.matches('\n').count() + 1, column: head[line_start..].chars().count() + 1, line_start }
    }

    fn line_at(&self, start: usize) -> &str {
        self.text[start..].lines().next().unwrap_or("")
    }
}

/// A place in a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// The byte that the line starts at.
    line_start: usize,
}

/// Everything that was found wrong with a configuration. Never empty.
#[derive(Debug, Clone)]
pub struct Problems {
    document: Option<Document>,
    list: Vec<Problem>,
}

impl Problems {
    /// Puts problems in the order a reader meets them: the file from its top, then environment, then flags; and warnings
    /// after all that.
    #[must_use]
    pub fn new(document: Option<Document>, mut list: Vec<Problem>) -> Self {
        let place = |problem: &Problem| match &problem.origin {
            ValueOrigin::File(span) => (0, span.start, String::new()),
            ValueOrigin::Default => (1, 0, String::new()),
            ValueOrigin::Env(name) => (2, 0, name.clone()),
            ValueOrigin::Flag(name) => (3, 0, name.clone()),
        };
        list.sort_by_key(|problem| (problem.code.severity(), place(problem)));
        Self { document, list }
    }

    /// How many there are that keep the configuration from being used.
    #[must_use]
    pub fn error_count(&self) -> usize {
        self.list.iter().filter(|problem| problem.code.severity() == Severity::Error).count()
    }

    /// The problems in reading order.
    #[must_use]
    pub fn list(&self) -> &[Problem] {
        &self.list
    }

    fn write_one(&self, problem: &Problem, out: &mut String) -> fmt::Result {
        let severity = match problem.code.severity() {
            Severity::Error => "error",
            Severity::Warning => "warning",
        };
        writeln!(out, "{severity}[{}]: {}", problem.code.as_str(), problem.message)?;
        let mut margin = 2;
        match (&problem.origin, &self.document) {
            (ValueOrigin::File(span), Some(document)) => {
                let place = document.position(span.start);
                margin = place.line.to_string().len() + 1;
                write_snippet(document, span, place, &problem.label, margin, out)?;
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

/// The longest piece of a source line that is shown, in characters.
const LINE_CHARS_MAX: usize = 120;

fn write_snippet(
    document: &Document,
    span: &Range<usize>,
    place: Position,
    label: &str,
    margin: usize,
    out: &mut String,
) -> fmt::Result {
    let line = mask_secret(document.line_at(place.line_start));
    let shown: String = line.chars().take(LINE_CHARS_MAX).map(|c| if c == '\t' { ' ' } else { c }).collect();
    let before = (place.column - 1).min(LINE_CHARS_MAX);
    let spanned = document.text.get(span.clone()).unwrap_or("").lines().next().unwrap_or("").chars().count();
    let carets = spanned.min(shown.chars().count().saturating_sub(before)).max(1);
    let arrow = format!("{:>width$}", "-->", width = margin + 2);
    writeln!(out, "{arrow} {}:{}:{}", document.name, place.line, place.column)?;
    writeln!(out, "{:margin$}|", "")?;
    writeln!(out, "{:<margin$}| {}", place.line, shown.trim_end())?;
    let marks = format!("{:before$}{} {label}", "", "^".repeat(carets));
    writeln!(out, "{:margin$}| {}", "", marks.trim_end())?;
    writeln!(out, "{:margin$}|", "")
}

/// A line of the file without what may be a secret: where the key is called so, the value is masked.
fn mask_secret(line: &str) -> Cow<'_, str> {
    let Some((key, _)) = line.split_once('=') else { return Cow::Borrowed(line) };
    let lower = line.to_lowercase();
    let names_file = key.trim_end().ends_with("_file");
    let telling = ["token", "secret", "passw", "certificate", "credential"].iter().any(|word| lower.contains(word));
    if (telling && !names_file) || holds_password(line) {
        Cow::Owned(format!("{key}= {MASK}"))
    } else {
        Cow::Borrowed(line)
    }
}

/// Whether a text looks like an address with a user and a password in it.
pub(super) fn holds_password(text: &str) -> bool {
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

/// The known name nearest to one that is not known, where it is near enough to be what was meant.
#[must_use]
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
