//! Merges file, environment and flags into one table, and reads the sections of the configuration from it.
//!
//! Serde stops at the first error of a section. The loader reports it, removes the value and reads the section again, so
//! that one run finds every wrong value.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::de::DeserializeOwned;
use serde_path_to_error::Segment;
use toml::de::{DeTable, DeValue};
use toml::{Table, Value};

use super::key::{NAME_EXPECTED, Setting, is_name, join, shout, variable};
use super::problem::{
    Code, Document, Problem, ValueOrigin, holds_password, is_file_with_secret, is_secret_name, suggest, without_path,
};
use journeyman_domain::limits::{CONFIG_DEPTH_MAX, CONFIG_PROBLEMS_MAX};

/// Reads sections and collects what is wrong with them.
#[derive(Debug)]
pub struct Loader<'a> {
    document: Option<&'a Document>,
    tree: Table,
    /// The place that sets each key first, by its dotted key.
    key_origins: BTreeMap<String, ValueOrigin>,
    /// The origin of each value, table and item of a list by its dotted key.
    pub origins: BTreeMap<String, ValueOrigin>,
    pub problems: Vec<Problem>,
}

impl<'a> Loader<'a> {
    pub fn new(document: Option<&'a Document>) -> Self {
        let (key_origins, origins) = (BTreeMap::new(), BTreeMap::new());
        let mut loader = Self { document, tree: Table::new(), key_origins, origins, problems: Vec::new() };
        let Some(document) = document else { return loader };
        for (start, text) in document.texts() {
            let (table, mut errors) = DeTable::parse_recoverable(text);
            match toml::from_str(text) {
                Ok(tree) => merge(&mut loader.tree, tree),
                // A number that no integer can hold.
                Err(error) if errors.is_empty() => errors.push(error),
                Err(_) => {}
            }
            for error in errors.into_iter().take(CONFIG_PROBLEMS_MAX) {
                let origin = file_origin(start, error.span().unwrap_or(text.len()..text.len()));
                loader.push(Code::Syntax, format!("invalid TOML: {}", error.message()), origin, None);
            }
            loader.record_table("", table.get_ref(), start);
        }
        loader
    }

    fn record_table(&mut self, key: &str, table: &DeTable<'_>, start: usize) {
        for (name, value) in table {
            let key = join(key, name.get_ref());
            self.key_origins.insert(key.clone(), file_origin(start, name.span()));
            self.origins.insert(key.clone(), file_origin(start, value.span()));
            for (index, item) in value.get_ref().as_array().into_iter().flat_map(|items| items.iter().enumerate()) {
                self.origins.insert(format!("{key}[{index}]"), file_origin(start, item.span()));
            }
            if let DeValue::Table(table) = value.get_ref() {
                self.record_table(&key, table, start);
            }
        }
    }

    /// Sets a value over that of the table.
    pub fn set(&mut self, setting: Setting) {
        let origin = setting.origin.clone();
        if let Err(message) = self.try_set(setting) {
            self.push(Code::WrongValue, message, origin, None);
        }
    }

    /// Variables spell names in upper case with `_` for `-`; a name that is not in the table is lower case.
    fn try_set(&mut self, Setting { path, text, origin }: Setting) -> Result<(), String> {
        let is_variable = matches!(origin, ValueOrigin::Env(_));
        let Some((last, around)) = path.split_last().filter(|_| path.len() <= CONFIG_DEPTH_MAX) else {
            return Err(format!("`{}` is a section without keys that deep", path[0]));
        };
        let mut key = String::new();
        let mut table = &mut self.tree;
        let name_in = |table: &Table, part: &String| {
            let same = |name: &&String| if is_variable { shout(name) == shout(part) } else { *name == part };
            let fresh = || if is_variable { part.to_lowercase() } else { part.clone() };
            table.keys().find(same).cloned().unwrap_or_else(fresh)
        };
        for part in around {
            let name = name_in(table, part);
            key = join(&key, &name);
            self.key_origins.entry(key.clone()).or_insert_with(|| origin.clone());
            self.origins.entry(key.clone()).or_insert_with(|| origin.clone());
            let Value::Table(inner) = table.entry(name).or_insert_with(|| Value::Table(Table::new())) else {
                return Err(format!("`{key}` is a value and has no keys"));
            };
            table = inner;
        }
        let name = name_in(table, last);
        key = join(&key, &name);
        if table.get(&name).and_then(Value::as_table).is_some_and(|table| !table.is_empty()) {
            return Err(format!("`{key}` is a section and cannot be set as a whole; set one of its keys"));
        }
        table.insert(name, Value::String(text));
        self.key_origins.entry(key.clone()).or_insert_with(|| origin.clone());
        self.origins.insert(key, origin);
        Ok(())
    }

    /// Reads a section, or returns its default.
    pub fn section<T: DeserializeOwned + Default>(&mut self, name: &str) -> T {
        self.take(name).and_then(|value| self.read(name, value, "")).unwrap_or_default()
    }

    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.tree.remove(name)
    }

    /// Reads the sections below `section`, whose names the user chooses.
    pub fn named<T>(
        &mut self,
        section: &str,
        read: impl Fn(&mut Self, &str, Value) -> Option<T>,
    ) -> BTreeMap<String, T> {
        let mut sections = self.take(section);
        self.remove_invalid_names(section, sections.as_mut(), is_name, NAME_EXPECTED);
        match sections {
            Some(Value::Table(table)) => table
                .into_iter()
                .filter_map(|(name, value)| read(self, &join(section, &name), value).map(|value| (name, value)))
                .collect(),
            Some(other) => {
                self.invalid(section, &other, "a table");
                BTreeMap::new()
            }
            None => BTreeMap::new(),
        }
    }

    pub fn remove_invalid_names(
        &mut self,
        key: &str,
        table: Option<&mut Value>,
        is_valid: fn(&str) -> bool,
        expected: &str,
    ) {
        let Some(Value::Table(table)) = table else { return };
        table.retain(|name, _| {
            let (key, is_valid) = (join(key, name), is_valid(name));
            if !is_valid {
                let origin = self.key_origins.get(&key).cloned().unwrap_or(ValueOrigin::Default);
                let message = format!("`{key}` is not a valid name: expected {expected}");
                self.push(Code::InvalidName, message, origin, None);
            }
            is_valid
        });
    }

    /// Takes the value of the key that selects the type of a section; `None` where it has none, or an invalid one.
    pub fn kind<T: DeserializeOwned>(&mut self, key: &str, section: &mut Value, default: Option<T>) -> Option<T> {
        let Value::Table(table) = section else {
            self.invalid(key, section, "a table");
            return None;
        };
        match table.remove("kind") {
            Some(kind) => self.read(&join(key, "kind"), kind, ""),
            None => {
                if default.is_none() {
                    self.missing(key, "kind");
                }
                default
            }
        }
    }

    /// Reports the sections that nothing has read.
    pub fn finish(&mut self, known: &[&str]) {
        for (name, _) in std::mem::take(&mut self.tree) {
            self.unknown("", &name, known, "");
        }
    }

    /// Reads a value of the table. `kind` describes the section in messages about unknown keys.
    pub fn read<T: DeserializeOwned>(&mut self, key: &str, mut value: Value, kind: &str) -> Option<T> {
        let mut removed = Vec::new();
        loop {
            let error = match serde_path_to_error::deserialize(value.clone()) {
                Ok(value) => return Some(value),
                Err(error) => error,
            };
            let message = error.inner().message();
            let mut path: Vec<String> = error.path().iter().filter_map(segment).collect();
            let unknown = message.strip_prefix("unknown field ").and_then(first_quoted);
            if let Some(name) = unknown {
                path.pop_if(|last| last == name);
            }
            // A date is a map to serde.
            while value_at(&mut value, &path).is_none() {
                path.pop();
            }
            let full_key = path.iter().fold(key.to_owned(), |key, part| {
                if is_index(part) { format!("{key}[{part}]") } else { join(&key, part) }
            });
            let wrong = value_at(&mut value, &path)?;
            if self.is_text(&full_key) && retype(wrong, message) {
                continue;
            }
            if let Some(name) = message.strip_prefix("missing field ").and_then(first_quoted) {
                if !removed.contains(&[path.as_slice(), &[name.to_owned()]].concat()) {
                    self.missing(&full_key, name);
                }
            } else if let Some(name) = unknown {
                self.unknown(&full_key, name, &quoted(message).skip(1).collect::<Vec<_>>(), kind);
                path.push(name.to_owned());
            } else {
                self.wrong_value(&full_key, wrong, message);
            }
            // A list is removed as a whole, because the indexes of its other items would change.
            path.truncate(path.iter().position(|part| is_index(part)).unwrap_or(path.len()));
            if path.is_empty() || self.problems.len() > CONFIG_PROBLEMS_MAX || !remove(&mut value, &path) {
                return None;
            }
            removed.push(path);
        }
    }

    fn wrong_value(&mut self, key: &str, value: &Value, message: &str) {
        if message.starts_with("unknown variant ") {
            return self.not_a_choice(key, value, &quoted(message).skip(1).collect::<Vec<_>>());
        }
        match message.rsplit_once(", expected ").filter(|_| message.starts_with("invalid ")) {
            Some((_, expected)) => self.invalid(key, value, describe(expected)),
            None => self.invalid(key, value, message),
        }
    }

    /// Reports a value that is none of the choices.
    pub fn not_a_choice(&mut self, key: &str, value: &Value, choices: &[&str]) {
        let expected = choices.iter().map(|choice| format!("\"{choice}\"")).collect::<Vec<_>>().join(" or ");
        let near = value.as_str().and_then(|text| suggest(text, choices.iter().copied()));
        self.invalid_with_help(key, value, &expected, near.map(|near| format!("did you mean \"{near}\"?")));
    }

    pub(crate) fn invalid(&mut self, key: &str, value: &Value, expected: &str) {
        self.invalid_with_help(key, value, expected, None);
    }

    fn invalid_with_help(&mut self, key: &str, value: &Value, expected: &str, help: Option<String>) {
        let message = format!("`{key}` cannot be {}: expected {expected}", self.show(key, value));
        let is_quoted = self.is_text(key) && value.as_str().is_some_and(|text| text.starts_with(['"', '\'']));
        let help = if is_quoted { Some("write the value without the quotes".to_owned()) } else { help };
        self.push_at(Code::WrongValue, key, message, help);
    }

    /// True if a variable or a flag has set the value.
    fn is_text(&self, key: &str) -> bool {
        matches!(self.origins.get(key), Some(ValueOrigin::Env(_) | ValueOrigin::Flag(_)))
    }

    fn missing(&mut self, key: &str, name: &str) {
        let help = format!("add `{name} = …` or set {}", variable(&join(key, name)));
        self.push_at(Code::MissingKey, key, format!("[{key}] needs `{name}`"), Some(help));
    }

    fn unknown(&mut self, key: &str, name: &str, known: &[&str], kind: &str) {
        let origin = self.key_origins.get(&join(key, name)).cloned().unwrap_or(ValueOrigin::Default);
        let near = suggest(name, known.iter().copied()).map(|near| match &origin {
            ValueOrigin::Env(_) => variable(&join(key, near)),
            ValueOrigin::Flag(_) => join(key, near),
            ValueOrigin::File(_) | ValueOrigin::Default => near.to_owned(),
        });
        let help =
            near.map_or_else(|| format!("known keys: {}", known.join(", ")), |near| format!("did you mean `{near}`?"));
        let place = if key.is_empty() { "at the top level".to_owned() } else { format!("in [{key}]") };
        self.push(Code::UnknownKey, format!("unknown key `{name}` {place}{kind}"), origin, Some(help));
    }

    /// Reports a section that cannot be used, although each of its values can.
    pub fn refuse(&mut self, key: &str, why: &str) {
        let origin = self.key_origins.get(key).cloned().unwrap_or(ValueOrigin::Default);
        self.push(Code::Conflict, format!("[{key}] cannot be used: {why}"), origin, None);
    }

    fn push_at(&mut self, code: Code, key: &str, message: String, help: Option<String>) {
        let origin = self.origins.get(key).cloned().unwrap_or(ValueOrigin::Default);
        self.push(code, message, origin, help);
    }

    fn push(&mut self, code: Code, message: String, origin: ValueOrigin, help: Option<String>) {
        self.problems.push(Problem { help, ..Problem::error(code, message, origin) });
    }

    /// The value as it was written, without what may be a secret.
    fn show(&self, key: &str, value: &Value) -> String {
        const CHARS_MAX: usize = 60;
        let text = match (value, self.origins.get(key), self.document) {
            (Value::Table(_), _, _) => return "a table".to_owned(),
            (Value::Array(_), _, _) => return "a list".to_owned(),
            (_, Some(ValueOrigin::File(span)), Some(document)) => {
                document.text.get(span.clone()).unwrap_or_default().to_owned()
            }
            (value, _, _) => value.to_string(),
        };
        if is_secret_name(key) || holds_password(&text) || is_file_with_secret(key, &text) {
            return "this value".to_owned();
        }
        let text = if key.ends_with(".url") { without_path(&text) } else { text };
        let short: String = text.chars().take(CHARS_MAX).collect();
        if short.len() < text.len() { format!("{short}…") } else { text }
    }
}

fn file_origin(start: usize, span: Range<usize>) -> ValueOrigin {
    ValueOrigin::File(start + span.start..start + span.end)
}

/// Tables are merged; every other value replaces the earlier one.
fn merge(into: &mut Table, from: Table) {
    for (name, value) in from {
        match (into.get_mut(&name), value) {
            (Some(Value::Table(into)), Value::Table(from)) => merge(into, from),
            (_, value) => drop(into.insert(name, value)),
        }
    }
}

fn value_at<'v>(value: &'v mut Value, path: &[String]) -> Option<&'v mut Value> {
    path.iter().try_fold(value, |value, part| match part.parse::<usize>() {
        Ok(index) if value.is_array() => value.get_mut(index),
        Ok(_) | Err(_) => value.get_mut(part),
    })
}

fn remove(value: &mut Value, path: &[String]) -> bool {
    let Some((name, around)) = path.split_last() else { return false };
    value_at(value, around).and_then(Value::as_table_mut).is_some_and(|table| table.remove(name).is_some())
}

/// Turns the text of a variable or a flag into the type that serde's message asks for; `false` where that is not possible.
fn retype(value: &mut Value, message: &str) -> bool {
    let Value::String(text) = &*value else { return false };
    let Some((_, expected)) = message.rsplit_once(", expected ").filter(|_| message.starts_with("invalid type")) else {
        return false;
    };
    let typed = match expected {
        "a sequence" => list(text).map(|items| Value::Array(items.into_iter().map(Value::String).collect())),
        "a boolean" => text.trim().parse().ok().map(Value::Boolean),
        number if INTEGERS.iter().any(|(name, _)| *name == number) => text.trim().parse().ok().map(Value::Integer),
        _ => None,
    };
    typed.map(|typed| *value = typed).is_some()
}

/// A list from the environment or a flag: a TOML array, or texts separated by commas.
fn list(text: &str) -> Option<Vec<String>> {
    if text.trim_start().starts_with('[') {
        let mut table: BTreeMap<String, Vec<String>> = toml::from_str(&format!("list = {text}")).ok()?;
        return table.remove("list");
    }
    Some(text.split(',').map(str::trim).filter(|item| !item.is_empty()).map(str::to_owned).collect())
}

fn segment(segment: &Segment) -> Option<String> {
    match segment {
        Segment::Seq { index } => Some(index.to_string()),
        Segment::Map { key } => Some(key.clone()),
        Segment::Enum { .. } | Segment::Unknown => None,
    }
}

/// The words that serde puts between backticks.
fn quoted(message: &str) -> impl Iterator<Item = &str> {
    message.split('`').skip(1).step_by(2)
}

fn first_quoted(message: &str) -> Option<&str> {
    quoted(message).next()
}

/// Serde's names of integer types, and the ranges of those that keys have.
const INTEGERS: [(&str, &str); 4] = [
    ("i64", "a whole number"),
    ("u16", "a whole number from 0 to 65535"),
    ("u32", "a whole number from 0 to 4294967295"),
    ("a nonzero u32", "a whole number from 1 to 4294967295"),
];

fn describe(expected: &str) -> &str {
    let integer = INTEGERS.iter().find(|(name, _)| *name == expected);
    match (expected, integer) {
        (_, Some((_, text))) => text,
        ("a sequence", None) => "a list such as [\"one\", \"two\"]",
        ("a boolean", None) => "true or false",
        ("a string" | "string or table", None) => "a text in quotes",
        (other, None) if other.starts_with("struct ") || other == "a map" => "a table",
        (other, None) => other,
    }
}

fn is_index(part: &str) -> bool {
    part.bytes().all(|byte| byte.is_ascii_digit())
}
