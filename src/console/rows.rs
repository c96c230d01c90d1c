//! Rows: facts and tables whose values have a unit and a level. A role makes them of its status; renderers know nothing else.

use serde_json::Value as Json;

use super::text::cut;
use journeyman_domain::units::{format_bytes, format_seconds};

/// A lease with less time left is marked.
const LEASE_SHORT_SECONDS: f64 = 30.0;
const LONG_CHARS_MAX: usize = 100;
/// What stands for a value that does not exist.
pub const NONE: &str = "–";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Level {
    #[default]
    Plain,
    Good,
    Warn,
    Bad,
}

/// A value with its unit. Times are in seconds, relative to the status.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Text(String),
    /// An identifier.
    Code(String),
    Link {
        text: String,
        href: String,
    },
    /// Lines that a page folds.
    Long(String),
    Count(u64),
    Bytes(u64),
    /// The length of something that has ended.
    Took(f64),
    /// The length of something that lasts.
    Lasts(f64),
    Ago(f64),
    In(f64),
    /// The rest of a lease of this length.
    Left {
        seconds: f64,
        of: Option<f64>,
    },
}

impl Value {
    /// The value in a terminal.
    pub fn text(&self) -> String {
        match self {
            Self::Text(text) | Self::Code(text) | Self::Link { text, .. } => text.clone(),
            Self::Long(text) => cut(&text.replace('\n', " "), LONG_CHARS_MAX),
            Self::Count(count) => count.to_string(),
            Self::Bytes(bytes) => format_bytes(*bytes),
            Self::Took(seconds) | Self::Lasts(seconds) => format_seconds(*seconds),
            Self::Ago(seconds) => format!("{} ago", format_seconds(*seconds)),
            Self::In(seconds) => format!("in {}", format_seconds(*seconds)),
            Self::Left { seconds, .. } if self.is_short() => format!("{} !", format_seconds(*seconds)),
            Self::Left { seconds, .. } => format_seconds(*seconds),
        }
    }

    pub fn is_short(&self) -> bool {
        matches!(self, Self::Left { seconds, .. } if *seconds < LEASE_SHORT_SECONDS)
    }
}

/// The length of a phase: below a minute with milliseconds.
pub(crate) fn precise(seconds: f64) -> String {
    if seconds < 60.0 { format!("{seconds:.3}s") } else { format_seconds(seconds) }
}

macro_rules! value_from {
    ($($type:ty, $from:ident => $value:expr;)+) => {
        $(impl From<$type> for Value {
            fn from($from: $type) -> Self {
                $value
            }
        })+
    };
}

value_from! {
    &str, text => Self::Text(text.to_owned());
    &String, text => Self::Text(text.clone());
    String, text => Self::Text(text);
    u64, count => Self::Count(count);
    u32, count => Self::Count(count.into());
    i64, count => Self::Text(count.to_string());
    usize, count => Self::Count(count as u64);
}

#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    pub value: Value,
    pub level: Level,
    /// Explains the parts before it.
    pub is_note: bool,
}

/// What one row says: parts on a line, and notes about them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Cell {
    pub parts: Vec<Part>,
    /// Buttons of a page.
    pub actions: Vec<Action>,
}

pub fn cell(value: impl Into<Value>) -> Cell {
    Cell::default().and(value)
}

/// A dash without a value.
pub fn maybe<T>(value: Option<T>, make: impl FnOnce(T) -> Value) -> Cell {
    value.map_or_else(|| cell(NONE), |value| cell(make(value)))
}

impl Cell {
    fn with(mut self, value: Value, is_note: bool) -> Self {
        let level = if value.is_short() { Level::Bad } else { Level::Plain };
        self.parts.push(Part { value, level, is_note });
        self
    }

    #[must_use]
    pub fn and(self, value: impl Into<Value>) -> Self {
        self.with(value.into(), false)
    }

    #[must_use]
    pub fn and_some(self, value: Option<impl Into<Value>>) -> Self {
        value.into_iter().fold(self, Self::and)
    }

    #[must_use]
    pub fn note(self, value: impl Into<Value>) -> Self {
        self.with(value.into(), true)
    }

    #[must_use]
    pub fn note_some(self, value: Option<impl Into<Value>>) -> Self {
        value.into_iter().fold(self, Self::note)
    }

    /// Sets the level of the last part.
    #[must_use]
    pub fn at(mut self, level: Level) -> Self {
        if let Some(part) = self.parts.last_mut() {
            part.level = level;
        }
        self
    }

    #[must_use]
    pub fn action(mut self, action: Option<Action>) -> Self {
        self.actions.extend(action);
        self
    }

    /// The cell on one line of a terminal.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for part in &self.parts {
            if !text.is_empty() {
                text.push_str(if part.is_note { ", " } else { " · " });
            }
            text.push_str(&part.value.text());
        }
        text
    }
}

/// A call of the role's API that a button of its page makes.
#[derive(Debug, Clone, PartialEq)]
pub struct Action {
    pub label: String,
    pub path: String,
    pub body: Json,
    /// Asked before the call.
    pub confirm: Option<String>,
    /// Asked for, and sent as `note`.
    pub reason: Option<String>,
    pub numbers: Vec<Number>,
}

/// A number that is entered and becomes part of the body.
#[derive(Debug, Clone, PartialEq)]
pub struct Number {
    pub label: &'static str,
    /// Its place in the body, such as `command.scale.min`.
    pub place: &'static str,
    pub value: Option<u32>,
    /// How many units of the body it stands for.
    pub times: u32,
}

impl Action {
    pub fn new(label: &str, path: impl Into<String>, body: Json) -> Self {
        let (label, path) = (label.to_owned(), path.into());
        Self { label, path, body, confirm: None, reason: None, numbers: Vec::new() }
    }

    #[must_use]
    pub fn confirm(self, question: impl Into<String>) -> Self {
        Self { confirm: Some(question.into()), ..self }
    }

    #[must_use]
    pub fn reason(self, question: impl Into<String>) -> Self {
        Self { reason: Some(question.into()), ..self }
    }
}

pub fn up(seconds: f64) -> String {
    format!("up {}", format_seconds(seconds))
}

#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub label: String,
    pub cell: Cell,
}

pub fn row(label: impl Into<String>, cell: Cell) -> Row {
    Row { label: label.into(), cell }
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Table {
    pub title: String,
    /// The most important first: a narrow terminal shows fewer.
    pub columns: Vec<String>,
    pub rows: Vec<Vec<Cell>>,
    /// How many rows were left out.
    pub more: usize,
    /// What is said where there are no rows.
    pub empty: String,
}

impl Table {
    pub fn new(title: impl Into<String>, columns: &[&str], rows: impl IntoIterator<Item = Vec<Cell>>) -> Self {
        let columns = columns.iter().map(|column| (*column).to_owned()).collect();
        Self { title: title.into(), columns, rows: rows.into_iter().collect(), more: 0, empty: "None.".to_owned() }
    }

    #[must_use]
    pub fn or(self, empty: impl Into<String>) -> Self {
        Self { empty: empty.into(), ..self }
    }
}

/// The state in a word, and why nothing happens, if so.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Headline {
    pub level: Level,
    pub state: String,
    pub cell: Cell,
}

impl Headline {
    pub fn text(&self) -> String {
        format!("{}  {}", self.state.to_uppercase(), self.cell.text())
    }
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Section {
    /// What it is about, where a role has several.
    pub title: Cell,
    pub headline: Headline,
    pub alerts: Vec<(Level, String)>,
    pub facts: Vec<Row>,
    pub tables: Vec<Table>,
}

/// All that a role shows.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Report {
    /// The title of a browser's window.
    pub title: String,
    pub name: Cell,
    pub version: String,
    pub pid: u32,
    pub sections: Vec<Section>,
}
