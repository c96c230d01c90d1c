//! Holds a tree of values against the schema: finds what is unknown, of the wrong type, not usable or missing, and
//! turns the rest into what the typed configuration is made of.
//!
//! It reads the part of JSON Schema that the configuration's own types produce, no more.

use std::collections::BTreeMap;

use serde_json::{Map, Number, Value};

use super::problem::{Problem, ProblemCode, ValueOrigin, holds_password, suggest};
use super::tree::{Content, Entry, Node, Typed};
use super::values::{check_format, check_least, example_of};

/// What a tree becomes.
#[derive(Debug)]
pub(super) struct Checked {
    /// What the typed configuration is made of.
    pub(super) value: Value,
    /// Where each leaf came from, by its dotted key.
    pub(super) origins: BTreeMap<String, ValueOrigin>,
    /// Where each table stands, by its dotted key.
    pub(super) tables: BTreeMap<String, ValueOrigin>,
}

/// Checks a whole tree.
pub(super) fn check(tree: &Node, schema: &Value, problems: &mut Vec<Problem>) -> Checked {
    let mut walk = Walk { problems, origins: BTreeMap::new(), tables: BTreeMap::new() };
    let value = walk.node(tree, schema, "").unwrap_or_else(|| Value::Object(Map::new()));
    Checked { value, origins: walk.origins, tables: walk.tables }
}

struct Walk<'p> {
    problems: &'p mut Vec<Problem>,
    origins: BTreeMap<String, ValueOrigin>,
    tables: BTreeMap<String, ValueOrigin>,
}

impl Walk<'_> {
    fn node(&mut self, node: &Node, schema: &Value, key: &str) -> Option<Value> {
        let schema = without_null(schema);
        match &node.value {
            Content::Table(table) if type_of(schema) == "object" => self.table(table, node, schema, key),
            Content::List(items) if type_of(schema) == "array" => self.list(items, node, schema, key),
            Content::Untyped(text) if type_of(schema) == "array" => self.untyped_list(text, node, schema, key),
            Content::Table(_) | Content::List(_) => self.wrong_type(node, schema, key),
            Content::Typed(_) | Content::Untyped(_) => self.leaf(node, schema, key),
        }
    }

    fn table(&mut self, table: &BTreeMap<String, Entry>, node: &Node, schema: &Value, key: &str) -> Option<Value> {
        let empty = Map::new();
        let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&empty);
        let any = schema.get("additionalProperties").filter(|any| any.is_object());
        let mut out = Map::new();
        self.tables.insert(key.to_owned(), node.origin.clone());
        for (name, entry) in table {
            let full = join(key, name);
            match properties.get(name).or(any) {
                Some(schema) if any.is_some() && schema.get(VARIABLE).is_some() && !is_variable(name) => {
                    self.bad_name(name, entry, key, VARIABLE_EXPECTED);
                }
                Some(schema) if any.is_some() && schema.get(VARIABLE).is_none() && !is_name(name) => {
                    self.bad_name(name, entry, key, NAME_EXPECTED);
                }
                Some(schema) => {
                    if let Some(value) = self.node(&entry.node, schema, &full) {
                        out.insert(name.clone(), value);
                    }
                }
                None => self.unknown(name, entry, key, properties),
            }
        }
        let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
        for name in required.filter_map(Value::as_str).filter(|name| !table.contains_key(*name)) {
            self.missing(name, node, properties.get(name), key);
        }
        Some(Value::Object(out))
    }

    fn list(&mut self, items: &[Node], node: &Node, schema: &Value, key: &str) -> Option<Value> {
        let item_schema = schema.get("items").unwrap_or(&Value::Null);
        let values = items
            .iter()
            .enumerate()
            .filter_map(|(at, item)| self.node(item, item_schema, &format!("{key}[{at}]")))
            .collect();
        self.origins.retain(|name, _| !name.starts_with(&format!("{key}[")));
        self.origins.insert(key.to_owned(), node.origin.clone());
        Some(Value::Array(values))
    }

    /// A list from the environment or a flag: a TOML list, or words with commas between.
    fn untyped_list(&mut self, text: &str, node: &Node, schema: &Value, key: &str) -> Option<Value> {
        if !text.trim_start().starts_with('[') {
            let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
            self.origins.insert(key.to_owned(), node.origin.clone());
            return Some(Value::Array(words.map(Value::from).collect()));
        }
        let list: Option<Vec<String>> = toml::from_str::<BTreeMap<String, Vec<String>>>(&format!("list = {text}"))
            .ok()
            .and_then(|mut found| found.remove("list"));
        let Some(list) = list else { return self.wrong_type(node, schema, key) };
        self.origins.insert(key.to_owned(), node.origin.clone());
        Some(Value::Array(list.into_iter().map(Value::from).collect()))
    }

    fn leaf(&mut self, node: &Node, schema: &Value, key: &str) -> Option<Value> {
        let value = match (type_of(schema), &node.value) {
            // What no i64 holds is out of every range.
            ("integer", Content::Typed(Typed::Integer(_, number))) => Some(Value::from(number.unwrap_or(i64::MAX))),
            ("integer", Content::Untyped(text)) => text.trim().parse::<i64>().ok().map(Value::from),
            ("boolean", Content::Typed(Typed::Other { value: value @ Value::Bool(_), .. })) => Some(value.clone()),
            ("boolean", Content::Untyped(text)) => text.trim().parse::<bool>().ok().map(Value::from),
            ("string", Content::Typed(Typed::Text(text)) | Content::Untyped(text)) => Some(Value::from(text.as_str())),
            _ => None,
        };
        let Some(value) = value else { return self.wrong_type(node, schema, key) };
        if is_secret(schema) && !matches!(node.origin, ValueOrigin::Env(_)) {
            self.exposed(node, key);
            return None;
        }
        if let Err(expected) = fits(&value, schema) {
            let near = value.as_str().and_then(|text| nearest_choice(text, schema));
            self.push(
                ProblemCode::Value,
                format!("`{key}` cannot be {}: expected {expected}", shown(node, schema)),
                node,
                near,
            );
            return None;
        }
        self.origins.insert(key.to_owned(), node.origin.clone());
        Some(value)
    }

    fn push(&mut self, code: ProblemCode, what: String, node: &Node, near: Option<String>) {
        let label = near.map_or_else(String::new, |near| format!("did you mean {near}?"));
        let (label, help) = match node.origin {
            ValueOrigin::File(_) | ValueOrigin::Default => (label, None),
            ValueOrigin::Env(_) | ValueOrigin::Flag(_) => {
                (String::new(), Some(label).filter(|label| !label.is_empty()))
            }
        };
        self.problems.push(Problem { code, message: what, origin: node.origin.clone(), label, help });
    }

    fn wrong_type(&mut self, node: &Node, schema: &Value, key: &str) -> Option<Value> {
        let what = format!("`{key}` has to be {}, and this is {}", wanted(schema), shown(node, schema));
        self.push(ProblemCode::Type, what, node, None);
        None
    }

    fn exposed(&mut self, node: &Node, key: &str) {
        let seen = match node.origin {
            ValueOrigin::Flag(_) => "every process of this machine can read a flag",
            ValueOrigin::File(_) | ValueOrigin::Default | ValueOrigin::Env(_) => {
                "a configuration file is copied and committed"
            }
        };
        self.problems.push(Problem {
            code: ProblemCode::ExposedSecret,
            message: format!("the secret `{key}` must not stand here: {seen}"),
            origin: node.origin.clone(),
            label: String::new(),
            help: Some(format!(
                "put it into a file that only its owner can read and name that with `{key}_file`, or set {}",
                super::environment::variable(key)
            )),
        });
    }

    fn unknown(&mut self, name: &str, entry: &Entry, key: &str, properties: &Map<String, Value>) {
        let place = if key.is_empty() { "at the top".to_owned() } else { format!("in [{key}]") };
        let near = suggest(name, properties.keys().map(String::as_str));
        let known: Vec<&str> = properties.keys().map(String::as_str).collect();
        self.problems.push(Problem {
            code: ProblemCode::Unknown,
            message: format!("unknown key `{name}` {place}"),
            origin: entry.key.clone(),
            label: near.map_or_else(String::new, |near| format!("did you mean `{near}`?")),
            help: near.is_none().then(|| format!("known are: {}", known.join(", "))),
        });
    }

    fn bad_name(&mut self, name: &str, entry: &Entry, key: &str, expected: &str) {
        self.problems.push(Problem {
            code: ProblemCode::Value,
            message: format!("`{}` is not a name: expected {expected}", join(key, name)),
            origin: entry.key.clone(),
            label: String::new(),
            help: None,
        });
    }

    fn missing(&mut self, name: &str, node: &Node, schema: Option<&Value>, key: &str) {
        let example = schema.map(|schema| example(without_null(schema))).unwrap_or_default();
        self.problems.push(Problem {
            code: ProblemCode::Missing,
            message: format!("[{key}] needs `{name}`"),
            origin: node.origin.clone(),
            label: String::new(),
            help: Some(format!("add `{name} = {example}` or set {}", super::environment::variable(&join(key, name)))),
        });
    }
}

const NAME_EXPECTED: &str = "letters, digits, `.`, `/`, `_` and `-`, at most 64, without `__`";

/// What the schema says of values that a process finds under their names in its environment.
const VARIABLE: &str = "x-variable";
const VARIABLE_EXPECTED: &str = "letters, digits, `.`, `_` and `-`, at most 128, with no digit first";

/// Whether a variable of an environment can have this name.
fn is_variable(name: &str) -> bool {
    let clean = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte));
    clean && name.len() <= 128 && name.starts_with(|first: char| !first.is_ascii_digit())
}

/// Whether a name chosen by the user can stand in a key, a variable's name and a log field.
fn is_name(name: &str) -> bool {
    let clean = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._/-".contains(&byte));
    clean && !name.is_empty() && name.len() <= 64 && !name.contains("__")
}

pub(super) fn join(key: &str, name: &str) -> String {
    if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") }
}

/// The schema of a value that may be absent is that of the value.
pub(super) fn without_null(schema: &Value) -> &Value {
    let choices = schema.get("anyOf").and_then(Value::as_array);
    choices.and_then(|choices| choices.iter().find(|choice| type_of(choice) != "null")).unwrap_or(schema)
}

pub(super) fn type_of(schema: &Value) -> &str {
    match schema.get("type") {
        Some(Value::String(name)) => name,
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).find(|name| *name != "null").unwrap_or(""),
        _ if schema.get("oneOf").is_some() || schema.get("enum").is_some() => "string",
        _ => "",
    }
}

fn format_of(schema: &Value) -> &str {
    schema.get("format").and_then(Value::as_str).unwrap_or("")
}

pub(super) fn is_secret(schema: &Value) -> bool {
    format_of(without_null(schema)) == "secret"
}

/// The words that an enumeration allows; none where it is not one.
pub(super) fn choices(schema: &Value) -> Vec<&str> {
    let listed = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
    let one_of = schema.get("oneOf").and_then(Value::as_array).into_iter().flatten();
    let consts = one_of.flat_map(|choice| {
        let several = choice.get("enum").and_then(Value::as_array).into_iter().flatten();
        choice.get("const").into_iter().chain(several)
    });
    listed.chain(consts).filter_map(Value::as_str).collect()
}

fn nearest_choice(text: &str, schema: &Value) -> Option<String> {
    suggest(text, choices(schema)).map(|near| format!("\"{near}\""))
}

/// The largest whole number where the schema names none.
const INTEGER_MAX: i64 = u32::MAX as i64;

fn fits(value: &Value, schema: &Value) -> Result<(), String> {
    let bound = |name: &str| schema.get(name).and_then(Value::as_i64);
    match value {
        Value::Number(number) => {
            let least = bound("minimum").unwrap_or(i64::MIN);
            let most = bound("maximum").unwrap_or(INTEGER_MAX);
            let within = Number::as_i64(number).is_some_and(|number| (least..=most).contains(&number));
            if within { Ok(()) } else { Err(format!("a whole number from {least} to {most}")) }
        }
        Value::String(text) => {
            let choices = choices(schema);
            if !choices.is_empty() && !choices.contains(&text.as_str()) {
                return Err(quoted(&choices));
            }
            check_format(format_of(schema), text)?;
            let said = |name: &str| schema.get(name).and_then(Value::as_str);
            said("x-least").map_or(Ok(()), |least| check_least(format_of(schema), text, least, said("x-zero")))
        }
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => Ok(()),
    }
}

fn quoted(choices: &[&str]) -> String {
    let choices: Vec<String> = choices.iter().map(|choice| format!("\"{choice}\"")).collect();
    choices.join(" or ")
}

fn wanted(schema: &Value) -> String {
    match type_of(schema) {
        "object" => "a table".to_owned(),
        "array" => "a list such as [\"one\", \"two\"]".to_owned(),
        "integer" => "a whole number without quotes".to_owned(),
        "boolean" => "true or false, without quotes".to_owned(),
        _ => match (choices(schema).as_slice(), example_of(format_of(schema))) {
            ([], Some(example)) => format!("a text in quotes such as \"{example}\""),
            ([], None) => "a text in quotes".to_owned(),
            (choices, _) => quoted(choices),
        },
    }
}

fn example(schema: &Value) -> String {
    match type_of(schema) {
        "integer" => "1".to_owned(),
        "boolean" => "true".to_owned(),
        "array" => "[…]".to_owned(),
        _ => match (choices(schema).first(), example_of(format_of(schema))) {
            (Some(choice), _) => format!("\"{choice}\""),
            (None, Some(example)) => format!("\"{example}\""),
            (None, None) => "\"…\"".to_owned(),
        },
    }
}

/// The most of a value that a message shows, in characters.
const SHOWN_CHARS_MAX: usize = 60;

fn shown(node: &Node, schema: &Value) -> String {
    let quote = |text: &str| {
        if is_secret(schema) {
            return "that".to_owned();
        }
        if holds_password(text) {
            return "this address".to_owned();
        }
        let short: String = text.chars().take(SHOWN_CHARS_MAX).collect();
        if short.len() < text.len() { format!("{:?}", format!("{short}…")) } else { format!("{text:?}") }
    };
    match &node.value {
        Content::Table(_) => "a table".to_owned(),
        Content::List(_) => "a list".to_owned(),
        Content::Typed(Typed::Text(text)) if type_of(schema) == "string" => quote(text),
        Content::Typed(Typed::Text(text)) => format!("the text {}", quote(text)),
        Content::Typed(Typed::Integer(text, _)) if type_of(schema) == "integer" => text.clone(),
        Content::Typed(Typed::Integer(text, _)) => format!("the number {text}"),
        Content::Typed(Typed::Other { kind, .. }) => (*kind).to_owned(),
        Content::Untyped(text) => quote(text),
    }
}
