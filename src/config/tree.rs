//! A configuration before it has a shape: values with the place each came from, from the file, the environment and
//! the flags, laid over one another.

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::Value;
use toml::de::{DeTable, DeValue};

use super::problem::{Document, Problem, ProblemCode, ValueOrigin, suggest};
use crate::limits::{CONFIG_DEPTH_MAX, CONFIG_PROBLEMS_MAX};

/// A value and where it came from.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub(super) value: Content,
    pub(super) origin: ValueOrigin,
}

/// What a value is.
#[derive(Debug, Clone)]
pub(super) enum Content {
    Table(BTreeMap<String, Entry>),
    List(Vec<Node>),
    /// A value whose type the file states.
    Typed(Typed),
    /// A text from the environment or a flag; the schema says what it is read as.
    Untyped(String),
}

/// A value whose type the file states.
#[derive(Debug, Clone)]
pub(super) enum Typed {
    Text(String),
    Integer(String, Option<i64>),
    Other { kind: &'static str, value: Value },
}

/// A key of a table and what stands there.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) key: ValueOrigin,
    pub(super) node: Node,
}

impl Node {
    pub(super) fn empty() -> Self {
        Self { value: Content::Table(BTreeMap::new()), origin: ValueOrigin::Default }
    }
}

/// Reads a TOML document as far as it can be read.
pub(super) fn read_toml(document: &Document, problems: &mut Vec<Problem>) -> Node {
    let (table, errors) = DeTable::parse_recoverable(&document.text);
    for error in errors.into_iter().take(CONFIG_PROBLEMS_MAX) {
        let end = document.text.len();
        problems.push(Problem {
            code: ProblemCode::Syntax,
            message: format!("this is not TOML: {}", error.message()),
            origin: ValueOrigin::File(error.span().unwrap_or(end..end)),
            label: String::new(),
            help: None,
        });
    }
    let span = table.span();
    from_table(table.into_inner(), span, 0)
}

fn from_table(table: DeTable<'_>, span: Range<usize>, depth: usize) -> Node {
    let entries = table
        .into_iter()
        .map(|(key, value)| {
            let entry = Entry {
                key: ValueOrigin::File(key.span()),
                node: from_value(value.get_ref().clone(), value.span(), depth + 1),
            };
            (key.into_inner().into_owned(), entry)
        })
        .collect();
    Node { value: Content::Table(entries), origin: ValueOrigin::File(span) }
}

fn from_value(value: DeValue<'_>, span: Range<usize>, depth: usize) -> Node {
    let other = |kind, value| Content::Typed(Typed::Other { kind, value });
    let content = match value {
        _ if depth > CONFIG_DEPTH_MAX => other("something nested too deeply", Value::Null),
        DeValue::Table(table) => return from_table(table, span, depth),
        DeValue::Array(list) => Content::List(
            list.into_iter().map(|item| from_value(item.get_ref().clone(), item.span(), depth + 1)).collect(),
        ),
        DeValue::String(text) => Content::Typed(Typed::Text(text.into_owned())),
        DeValue::Integer(number) => {
            let value = i64::from_str_radix(number.as_str(), number.radix()).ok();
            Content::Typed(Typed::Integer(number.to_string(), value))
        }
        DeValue::Boolean(value) => other("a boolean", Value::Bool(value)),
        DeValue::Float(number) => {
            other("a number with a fraction", number.as_str().parse::<f64>().map_or(Value::Null, Value::from))
        }
        DeValue::Datetime(_) => other("a date", Value::Null),
    };
    Node { value: content, origin: ValueOrigin::File(span) }
}

/// A value set by name: from the environment or a flag.
#[derive(Debug, Clone)]
pub(super) struct Setting {
    /// The key's parts, as they were written.
    pub path: Vec<String>,
    /// What it is set to.
    pub text: String,
    /// Which variable or flag.
    pub origin: ValueOrigin,
}

/// How a setting spells its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// As in the file.
    Exact,
    /// As environment variables are: upper case, and `_` for what a variable cannot hold.
    Shouted,
}

/// Lays a setting over a tree. What cannot be placed becomes a problem and leaves the tree as it was.
pub(super) fn lay_over(tree: &mut Node, setting: Setting, how: Spelling, schema: &Value, problems: &mut Vec<Problem>) {
    let names = match resolve(tree, &setting, how, schema) {
        Ok(names) => names,
        Err(problem) => return problems.push(problem),
    };
    let mut node = tree;
    for name in names {
        // A value of the wrong type is replaced; the file's own mistake no longer counts once it is overridden.
        if !matches!(node.value, Content::Table(_)) {
            node.value = Content::Table(BTreeMap::new());
        }
        let Content::Table(table) = &mut node.value else { return };
        let entry = table.entry(name).or_insert_with(|| Entry {
            key: setting.origin.clone(),
            node: Node { value: Content::Table(BTreeMap::new()), origin: setting.origin.clone() },
        });
        node = &mut entry.node;
    }
    node.value = Content::Untyped(setting.text);
    node.origin = setting.origin;
}

/// The names that a setting's path stands for, all the way down to a value.
fn resolve(tree: &Node, setting: &Setting, how: Spelling, schema: &Value) -> Result<Vec<String>, Problem> {
    let mut node = Some(tree);
    let mut schema = schema;
    let mut names: Vec<String> = Vec::new();
    for part in &setting.path {
        let step =
            step_into(schema, node, part, how).ok_or_else(|| unknown(setting, &names.join("."), part, schema, how))?;
        schema = step.schema;
        node = node.and_then(|node| match &node.value {
            Content::Table(table) => table.get(&step.name).map(|entry| &entry.node),
            Content::List(_) | Content::Typed(_) | Content::Untyped(_) => None,
        });
        names.push(step.name);
    }
    if schema.get("type").and_then(Value::as_str) == Some("object") {
        return Err(section(setting, &names.join("."), how, schema));
    }
    Ok(names)
}

fn section(setting: &Setting, key: &str, how: Spelling, schema: &Value) -> Problem {
    let inner = schema.get("properties").and_then(Value::as_object).and_then(|inner| inner.keys().next());
    let full = format!("{key}.{}", inner.map_or("NAME", String::as_str));
    let example = match how {
        Spelling::Exact => full,
        Spelling::Shouted => super::environment::variable(&full),
    };
    Problem {
        code: ProblemCode::Type,
        message: format!("`{key}` is a section and cannot be set as a whole"),
        origin: setting.origin.clone(),
        label: String::new(),
        help: Some(format!("set what is in it, such as `{example}`")),
    }
}

struct Step<'a> {
    name: String,
    schema: &'a Value,
}

fn step_into<'a>(schema: &'a Value, node: Option<&Node>, part: &str, how: Spelling) -> Option<Step<'a>> {
    let same = |name: &str| match how {
        Spelling::Exact => name == part,
        Spelling::Shouted => shout(name) == shout(part),
    };
    if let Some(properties) = schema.get("properties").and_then(Value::as_object)
        && let Some((name, schema)) = properties.iter().find(|(name, _)| same(name))
    {
        return Some(Step { name: name.clone(), schema });
    }
    let schema = schema.get("additionalProperties").filter(|schema| schema.is_object())?;
    let existing = node.and_then(|node| match &node.value {
        Content::Table(table) => table.keys().find(|name| same(name)).cloned(),
        Content::List(_) | Content::Typed(_) | Content::Untyped(_) => None,
    });
    let fresh = || match how {
        Spelling::Exact => part.to_owned(),
        Spelling::Shouted => part.to_lowercase(),
    };
    Some(Step { name: existing.unwrap_or_else(fresh), schema })
}

/// A key as an environment variable spells it.
pub(super) fn shout(name: &str) -> String {
    name.replace('-', "_").to_uppercase()
}

fn unknown(setting: &Setting, known: &str, part: &str, schema: &Value, how: Spelling) -> Problem {
    let names = schema.get("properties").and_then(Value::as_object);
    let names: Vec<String> = names.into_iter().flat_map(|names| names.keys().cloned()).collect();
    let near = suggest(part, names.iter().map(String::as_str));
    let key = match how {
        Spelling::Exact => part.to_owned(),
        Spelling::Shouted => part.to_lowercase(),
    };
    let place = if known.is_empty() { "at the top".to_owned() } else { format!("in [{known}]") };
    let full = |name: &str| if known.is_empty() { name.to_owned() } else { format!("{known}.{name}") };
    let help = match (near, how) {
        (Some(near), Spelling::Exact) => Some(format!("did you mean `{}`?", full(near))),
        (Some(near), Spelling::Shouted) => {
            Some(format!("did you mean `{}`?", super::environment::variable(&full(near))))
        }
        (None, _) if names.is_empty() => Some(format!("`{known}` is a value and has nothing below it")),
        (None, _) => Some(format!("known are: {}", names.join(", "))),
    };
    Problem {
        code: ProblemCode::Unknown,
        message: format!("unknown key `{key}` {place}"),
        origin: setting.origin.clone(),
        label: String::new(),
        help,
    }
}
