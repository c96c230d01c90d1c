//! Merges file, environment and flags into one tree, and reads the sections of the configuration from it.
//!
//! Serde stops at the first error of a section. The loader reports it, removes the value and reads the section again, so
//! that one run finds every wrong value.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::de::DeserializeOwned;
use serde_path_to_error::Segment;
use toml::Value;
use toml::de::{DeTable, DeValue};

use super::environment::variable;
use super::problem::{Document, Problem, ProblemCode, ValueOrigin, holds_password, is_secret_name, suggest};
use crate::limits::{CONFIG_DEPTH_MAX, CONFIG_PROBLEMS_MAX};

/// A value and its origin.
#[derive(Debug, Clone)]
pub(super) struct Node {
    value: NodeValue,
    origin: ValueOrigin,
}

#[derive(Debug, Clone)]
enum NodeValue {
    Table(BTreeMap<String, Entry>),
    List(Vec<Node>),
    Value(Value),
    /// A value from the environment or a flag. It becomes a number, a boolean or a list where the key needs one.
    Untyped(String),
}

#[derive(Debug, Clone)]
struct Entry {
    key_origin: ValueOrigin,
    node: Node,
}

/// A value that a variable or a flag sets.
#[derive(Debug, Clone)]
pub(super) struct Setting {
    pub path: Vec<String>,
    pub text: String,
    pub origin: ValueOrigin,
}

/// Keys of secrets, which only the environment may set. `*` is a name that the user chooses.
pub(super) const SECRET_KEYS: [&[&str]; 6] = [
    &["amqp", "uri"],
    &["source", "*", "access_token"],
    &["source", "*", "certificate"],
    &["demand", "*", "access_token"],
    &["demand", "*", "certificate"],
    &["queue", "clients", "*", "access_token"],
];

/// Tables whose keys the user chooses, and whether the keys are names of environment variables.
const NAMED_TABLES: [(&[&str], bool); 7] = [
    (&["source"], false),
    (&["bridge"], false),
    (&["pool"], false),
    (&["pool", "*", "env"], true),
    (&["demand"], false),
    (&["handler"], false),
    (&["queue", "clients"], false),
];

/// Reads sections and collects what is wrong with them.
#[derive(Debug)]
pub(super) struct Loader<'a> {
    document: Option<&'a Document>,
    tree: Node,
    pub problems: Vec<Problem>,
    /// The origin of each value by its dotted key.
    pub origins: BTreeMap<String, ValueOrigin>,
    /// The origin of each table by its dotted key.
    pub tables: BTreeMap<String, ValueOrigin>,
}

impl<'a> Loader<'a> {
    /// Parses the document, as far as it is TOML.
    pub(super) fn new(document: Option<&'a Document>) -> Self {
        let empty = Node { value: NodeValue::Table(BTreeMap::new()), origin: ValueOrigin::Default };
        let (origins, tables) = (BTreeMap::new(), BTreeMap::new());
        let mut loader = Self { document, tree: empty, problems: Vec::new(), origins, tables };
        let Some(document) = document else { return loader };
        let (table, errors) = DeTable::parse_recoverable(&document.text);
        for error in errors.into_iter().take(CONFIG_PROBLEMS_MAX) {
            let end = document.text.len();
            let origin = ValueOrigin::File(error.span().unwrap_or(end..end));
            loader.push(ProblemCode::Syntax, format!("invalid TOML: {}", error.message()), origin, None);
        }
        let span = table.span();
        loader.tree = Node::from_table(table.into_inner(), span);
        loader
    }

    /// Sets values over those of the tree, in this order.
    pub(super) fn overlay(&mut self, settings: Vec<Setting>) {
        for setting in settings {
            if let Err(problem) = self.tree.set(&setting) {
                self.problems.push(problem);
            }
        }
    }

    /// Finishes the tree: checks names and secrets, and records where each value comes from.
    pub(super) fn inspect(&mut self) {
        let mut tree = std::mem::replace(&mut self.tree.value, NodeValue::Table(BTreeMap::new()));
        for (path, are_variables) in NAMED_TABLES {
            visit(&mut tree, path, "", &mut |table, key| {
                let NodeValue::Table(table) = table else { return };
                let wrong = |name: &String| if are_variables { !is_variable(name) } else { !is_name(name) };
                for name in table.keys().filter(|name| wrong(name)).cloned().collect::<Vec<_>>() {
                    let expected = if are_variables { VARIABLE_EXPECTED } else { NAME_EXPECTED };
                    let message = format!("`{}` is not a valid name: expected {expected}", join(key, &name));
                    if let Some(entry) = table.remove(&name) {
                        self.push(ProblemCode::Value, message, entry.key_origin, None);
                    }
                }
            });
        }
        for path in SECRET_KEYS {
            let Some((name, around)) = path.split_last() else { continue };
            visit(&mut tree, around, "", &mut |table, key| {
                let NodeValue::Table(table) = table else { return };
                let exposed = |entry: &Entry| !matches!(entry.node.origin, ValueOrigin::Env(_));
                if table.get(*name).is_some_and(exposed)
                    && let Some(entry) = table.remove(*name)
                {
                    self.exposed(&join(key, name), entry.node.origin);
                }
            });
        }
        self.tree.value = tree;
        self.tree.record("", &mut self.origins, &mut self.tables);
    }

    /// Reads a section, or returns its default.
    pub(super) fn section<T: DeserializeOwned + Default>(&mut self, name: &str) -> T {
        self.take(name).and_then(|node| self.read(name, node, "")).unwrap_or_default()
    }

    /// Reads the sections below `section`, whose names the user chooses.
    pub(super) fn named<T>(
        &mut self,
        section: &str,
        read: impl Fn(&mut Self, &str, Node) -> Option<T>,
    ) -> BTreeMap<String, T> {
        let Some(node) = self.take(section) else { return BTreeMap::new() };
        let NodeValue::Table(table) = node.value else {
            self.invalid(section, &node, "a table");
            return BTreeMap::new();
        };
        let read_entry = |(name, entry): (String, Entry)| {
            let value = read(self, &join(section, &name), entry.node)?;
            Some((name, value))
        };
        table.into_iter().filter_map(read_entry).collect()
    }

    /// Takes the value of the key that selects the type of a section; `None` where it has none, or an invalid one.
    pub(super) fn kind<T: DeserializeOwned + Copy>(
        &mut self,
        key: &str,
        node: &mut Node,
        default: Option<T>,
    ) -> Option<T> {
        let NodeValue::Table(table) = &mut node.value else {
            self.invalid(key, node, "a table");
            return None;
        };
        match (table.remove("kind"), default) {
            (Some(kind), _) => self.read(&join(key, "kind"), kind.node, ""),
            (None, Some(default)) => Some(default),
            (None, None) => {
                self.missing(key, "kind", node.origin.clone());
                None
            }
        }
    }

    /// Reports the sections that nothing has read.
    pub(super) fn finish(&mut self, known: &[&str]) {
        let NodeValue::Table(rest) = std::mem::replace(&mut self.tree.value, NodeValue::Table(BTreeMap::new())) else {
            return;
        };
        for (name, entry) in rest {
            self.unknown("", &name, entry.key_origin, known.iter().copied(), "");
        }
    }

    fn take(&mut self, name: &str) -> Option<Node> {
        let NodeValue::Table(table) = &mut self.tree.value else { return None };
        table.remove(name).map(|entry| entry.node)
    }

    /// Reads a value of the tree. `kind` describes the section in messages about unknown keys.
    pub(super) fn read<T: DeserializeOwned>(&mut self, key: &str, mut node: Node, kind: &str) -> Option<T> {
        let mut removed = Vec::new();
        loop {
            let error = match serde_path_to_error::deserialize(node.to_toml()) {
                Ok(value) => return Some(value),
                Err(error) => error,
            };
            let mut path: Vec<String> = error.path().iter().filter_map(segment).collect();
            let message = error.inner().message();
            if node.at(&path).is_some_and(|node| node.retype(message)) {
                continue;
            }
            let unknown = message.strip_prefix("unknown field ").and_then(first_quoted);
            // A date is a map to serde, whose keys the tree does not have.
            while unknown.is_none() && node.at(&path).is_none() {
                path.pop();
            }
            if let Some(name) = message.strip_prefix("missing field ").and_then(first_quoted) {
                let at = join(key, &path.join("."));
                let is_known = removed.contains(&[path.as_slice(), &[name.to_owned()]].concat());
                if !is_known {
                    let origin = node.at(&path).map_or(ValueOrigin::Default, |node| node.origin.clone());
                    self.missing(&at, name, origin);
                }
            } else if let Some(name) = unknown {
                if path.last().is_none_or(|last| last != name) {
                    path.push(name.to_owned());
                }
                let at = join(key, &path[..path.len() - 1].join("."));
                let origin = node.key_origin(&path);
                self.unknown(&at, name, origin, quoted(message).skip(1), kind);
            } else {
                let at = path.iter().fold(key.to_owned(), |key, part| {
                    if part.bytes().all(|byte| byte.is_ascii_digit()) {
                        format!("{key}[{part}]")
                    } else {
                        join(&key, part)
                    }
                });
                self.wrong_value(&at, node.at(&path), message);
            }
            if path.is_empty() || self.problems.len() > CONFIG_PROBLEMS_MAX || !node.remove(&path) {
                return None;
            }
            removed.push(path);
        }
    }

    fn wrong_value(&mut self, key: &str, node: Option<&mut Node>, message: &str) {
        let Some(node) = node else { return };
        if let Some(text) = message.strip_prefix("unknown variant ").and_then(first_quoted) {
            let choices: Vec<&str> = quoted(message).skip(1).collect();
            let expected = choices.iter().map(|choice| format!("\"{choice}\"")).collect::<Vec<_>>().join(" or ");
            let message = format!("`{key}` cannot be {}: expected {expected}", self.show(key, node));
            let near = suggest(text, choices).map(|near| format!("did you mean \"{near}\"?"));
            return self.push(ProblemCode::Value, message, node.origin.clone(), near);
        }
        let is_serde = message.starts_with("invalid ");
        match message.rsplit_once(", expected ").filter(|_| is_serde) {
            Some((_, expected)) => self.invalid(key, node, &describe(expected)),
            None => self.invalid(key, node, message),
        }
    }

    fn invalid(&mut self, key: &str, node: &Node, expected: &str) {
        let message = format!("`{key}` cannot be {}: expected {expected}", self.show(key, node));
        self.push(ProblemCode::Value, message, node.origin.clone(), None);
    }

    fn missing(&mut self, key: &str, name: &str, origin: ValueOrigin) {
        self.problems.push(Problem {
            code: ProblemCode::Missing,
            message: format!("[{key}] needs `{name}`"),
            origin,
            label: String::new(),
            help: Some(format!("add `{name} = …` or set {}", variable(&join(key, name)))),
        });
    }

    fn unknown<'k>(
        &mut self,
        key: &str,
        name: &str,
        origin: ValueOrigin,
        known: impl Iterator<Item = &'k str>,
        kind: &str,
    ) {
        let known: Vec<&str> = known.collect();
        let near = suggest(name, known.iter().copied());
        let full = near.map(|near| match &origin {
            ValueOrigin::Env(_) => variable(&join(key, near)),
            ValueOrigin::Flag(_) => join(key, near),
            ValueOrigin::File(_) | ValueOrigin::Default => near.to_owned(),
        });
        let place = if key.is_empty() { "at the top level".to_owned() } else { format!("in [{key}]") };
        let message = format!("unknown key `{name}` {place}{kind}");
        let is_near = full.is_some();
        self.push(ProblemCode::Unknown, message, origin, full.map(|near| format!("did you mean `{near}`?")));
        if !is_near && let Some(problem) = self.problems.last_mut() {
            problem.help = Some(format!("known keys: {}", known.join(", ")));
        }
    }

    fn exposed(&mut self, key: &str, origin: ValueOrigin) {
        let risk = if matches!(origin, ValueOrigin::Flag(_)) {
            "every process of this host can read a flag"
        } else {
            "a configuration file is copied and committed"
        };
        self.problems.push(Problem {
            code: ProblemCode::ExposedSecret,
            message: format!("the secret `{key}` must not be set here: {risk}"),
            origin,
            label: String::new(),
            help: Some(format!(
                "put it into a file that only its owner can read and set `{key}_file` to its path, or set {}",
                variable(key)
            )),
        });
    }

    fn push(&mut self, code: ProblemCode, message: String, origin: ValueOrigin, hint: Option<String>) {
        let is_file = matches!(origin, ValueOrigin::File(_));
        let label = hint.clone().filter(|_| is_file).unwrap_or_default();
        self.problems.push(Problem { code, message, origin, label, help: hint.filter(|_| !is_file) });
    }

    /// The value as it was written, without what may be a secret.
    fn show(&self, key: &str, node: &Node) -> String {
        const CHARS_MAX: usize = 60;
        let text = match (&node.value, &node.origin, self.document) {
            (NodeValue::Table(_), _, _) => return "a table".to_owned(),
            (NodeValue::List(_), _, _) => return "a list".to_owned(),
            (NodeValue::Untyped(text), _, _) => format!("{text:?}"),
            (NodeValue::Value(_), ValueOrigin::File(span), Some(document)) => {
                document.text.get(span.clone()).unwrap_or_default().to_owned()
            }
            (NodeValue::Value(value), _, _) => value.to_string(),
        };
        if is_secret_name(key) || holds_password(&text) {
            return "this value".to_owned();
        }
        let short: String = text.chars().take(CHARS_MAX).collect();
        if short.len() < text.len() { format!("{short}…") } else { text }
    }
}

impl Node {
    fn from_table(table: DeTable<'_>, span: Range<usize>) -> Self {
        let entries = table.into_iter().map(|(key, value)| {
            let key_origin = ValueOrigin::File(key.span());
            let span = value.span();
            (key.into_inner().into_owned(), Entry { key_origin, node: Self::from_value(value.into_inner(), span) })
        });
        Self { value: NodeValue::Table(entries.collect()), origin: ValueOrigin::File(span) }
    }

    fn from_value(value: DeValue<'_>, span: Range<usize>) -> Self {
        let value = match value {
            DeValue::Table(table) => return Self::from_table(table, span),
            DeValue::Array(list) => {
                let items = list.into_iter().map(|item| {
                    let span = item.span();
                    Self::from_value(item.into_inner(), span)
                });
                NodeValue::List(items.collect())
            }
            DeValue::String(text) => NodeValue::Value(Value::String(text.into_owned())),
            // No key allows a number that i64 cannot hold.
            DeValue::Integer(number) => {
                let number = i64::from_str_radix(number.as_str(), number.radix());
                NodeValue::Value(Value::Integer(number.unwrap_or(i64::MAX)))
            }
            DeValue::Boolean(value) => NodeValue::Value(Value::Boolean(value)),
            DeValue::Float(number) => NodeValue::Value(Value::Float(number.as_str().parse().unwrap_or(f64::NAN))),
            DeValue::Datetime(date) => NodeValue::Value(Value::Datetime(date)),
        };
        Self { value, origin: ValueOrigin::File(span) }
    }

    fn to_toml(&self) -> Value {
        match &self.value {
            NodeValue::Table(table) => {
                Value::Table(table.iter().map(|(name, entry)| (name.clone(), entry.node.to_toml())).collect())
            }
            NodeValue::List(items) => Value::Array(items.iter().map(Self::to_toml).collect()),
            NodeValue::Value(value) => value.clone(),
            NodeValue::Untyped(text) => Value::String(text.clone()),
        }
    }

    /// Sets a value. Variables spell names in upper case with `_` for `-`; a name that is not in the tree is lower case.
    fn set(&mut self, setting: &Setting) -> Result<(), Problem> {
        let is_variable = matches!(setting.origin, ValueOrigin::Env(_));
        let problem = |key: &str, what: &str, help: Option<String>| Problem {
            code: ProblemCode::Value,
            message: format!("`{key}` is a {what}"),
            origin: setting.origin.clone(),
            label: String::new(),
            help,
        };
        if setting.path.len() > CONFIG_DEPTH_MAX {
            return Err(problem(&setting.path[0], "section without keys that deep", None));
        }
        let mut key = String::new();
        let mut node = self;
        for part in &setting.path {
            if !matches!(node.value, NodeValue::Table(_)) {
                return Err(problem(&key, "value and has no keys", None));
            }
            let NodeValue::Table(table) = &mut node.value else { return Ok(()) };
            let same = |name: &&String| if is_variable { shout(name) == shout(part) } else { *name == part };
            let fresh = || if is_variable { part.to_lowercase() } else { part.clone() };
            let name = table.keys().find(same).cloned().unwrap_or_else(fresh);
            key = join(&key, &name);
            let origin = || setting.origin.clone();
            let entry = table.entry(name).or_insert_with(|| Entry {
                key_origin: origin(),
                node: Self { value: NodeValue::Table(BTreeMap::new()), origin: origin() },
            });
            node = &mut entry.node;
        }
        match &node.value {
            NodeValue::Table(table) if !table.is_empty() => {
                Err(problem(&key, "section and cannot be set as a whole", Some("set one of its keys".to_owned())))
            }
            NodeValue::Table(_) | NodeValue::List(_) | NodeValue::Value(_) | NodeValue::Untyped(_) => {
                node.value = NodeValue::Untyped(setting.text.clone());
                node.origin = setting.origin.clone();
                Ok(())
            }
        }
    }

    fn at(&mut self, path: &[String]) -> Option<&mut Self> {
        path.iter().try_fold(self, |node, part| match &mut node.value {
            NodeValue::Table(table) => table.get_mut(part).map(|entry| &mut entry.node),
            NodeValue::List(items) => part.parse::<usize>().ok().and_then(|index| items.get_mut(index)),
            NodeValue::Value(_) | NodeValue::Untyped(_) => None,
        })
    }

    fn key_origin(&mut self, path: &[String]) -> ValueOrigin {
        let entry = path.split_last().and_then(|(name, around)| match &self.at(around)?.value {
            NodeValue::Table(table) => table.get(name),
            NodeValue::List(_) | NodeValue::Value(_) | NodeValue::Untyped(_) => None,
        });
        entry.map_or(ValueOrigin::Default, |entry| entry.key_origin.clone())
    }

    fn remove(&mut self, path: &[String]) -> bool {
        let Some((name, around)) = path.split_last() else { return false };
        match self.at(around).map(|node| &mut node.value) {
            Some(NodeValue::Table(table)) => table.remove(name).is_some(),
            Some(NodeValue::List(items)) => match name.parse::<usize>() {
                Ok(index) if index < items.len() => {
                    items.remove(index);
                    true
                }
                Ok(_) | Err(_) => false,
            },
            Some(NodeValue::Value(_) | NodeValue::Untyped(_)) | None => false,
        }
    }

    /// Turns an untyped text into the type that serde's message asks for; `false` where that is not possible.
    fn retype(&mut self, message: &str) -> bool {
        let NodeValue::Untyped(text) = &self.value else { return false };
        let Some((_, expected)) = message.rsplit_once(", expected ").filter(|_| message.starts_with("invalid type"))
        else {
            return false;
        };
        let value = match expected {
            "a sequence" => list(text).map(|items| Value::Array(items.into_iter().map(Value::String).collect())),
            "a boolean" => text.trim().parse().ok().map(Value::Boolean),
            number if INTEGERS.iter().any(|(name, _)| *name == number) => text.trim().parse().ok().map(Value::Integer),
            _ => None,
        };
        let Some(value) = value else { return false };
        self.value = NodeValue::Value(value);
        true
    }

    fn record(
        &self,
        key: &str,
        origins: &mut BTreeMap<String, ValueOrigin>,
        tables: &mut BTreeMap<String, ValueOrigin>,
    ) {
        match &self.value {
            NodeValue::Table(table) => {
                tables.insert(key.to_owned(), self.origin.clone());
                for (name, entry) in table {
                    entry.node.record(&join(key, name), origins, tables);
                }
            }
            NodeValue::List(_) | NodeValue::Value(_) | NodeValue::Untyped(_) => {
                origins.insert(key.to_owned(), self.origin.clone());
            }
        }
    }
}

/// A list from the environment or a flag: a TOML array, or texts separated by commas.
fn list(text: &str) -> Option<Vec<String>> {
    if text.trim_start().starts_with('[') {
        let mut table: BTreeMap<String, Vec<String>> = toml::from_str(&format!("list = {text}")).ok()?;
        return table.remove("list");
    }
    Some(text.split(',').map(str::trim).filter(|item| !item.is_empty()).map(str::to_owned).collect())
}

/// Calls `found` with each value at `path` and its dotted key.
fn visit(value: &mut NodeValue, path: &[&str], key: &str, found: &mut impl FnMut(&mut NodeValue, &str)) {
    let Some((name, rest)) = path.split_first() else { return found(value, key) };
    let NodeValue::Table(table) = value else { return };
    for (child, entry) in table.iter_mut().filter(|(child, _)| *name == "*" || child == name) {
        visit(&mut entry.node.value, rest, &join(key, child), found);
    }
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

fn describe(expected: &str) -> String {
    let integer = INTEGERS.iter().find(|(name, _)| *name == expected);
    match (expected, integer) {
        (_, Some((_, text))) => (*text).to_owned(),
        ("a sequence", None) => "a list such as [\"one\", \"two\"]".to_owned(),
        ("a boolean", None) => "true or false".to_owned(),
        ("a string" | "string or table", None) => "a text in quotes".to_owned(),
        (other, None) if other.starts_with("struct ") || other == "a map" => "a table".to_owned(),
        (other, None) => other.to_owned(),
    }
}

const NAME_EXPECTED: &str = "letters, digits, `.`, `/`, `_` and `-`, at most 64, without `__`";
const VARIABLE_EXPECTED: &str = "letters, digits, `.`, `_` and `-`, at most 128, not starting with a digit";

fn is_variable(name: &str) -> bool {
    let is_clean = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    is_clean && name.len() <= 128 && name.starts_with(|first: char| !first.is_ascii_digit())
}

/// Whether a name can be part of a key, of a variable's name and of a log field.
fn is_name(name: &str) -> bool {
    let is_clean = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._/-".contains(&byte));
    is_clean && !name.is_empty() && name.len() <= 64 && !name.contains("__")
}

pub(super) fn join(key: &str, name: &str) -> String {
    match (key.is_empty(), name.is_empty()) {
        (true, _) => name.to_owned(),
        (_, true) => key.to_owned(),
        (false, false) => format!("{key}.{name}"),
    }
}

/// A key as environment variables spell it.
pub(super) fn shout(name: &str) -> String {
    name.replace('-', "_").to_uppercase()
}
