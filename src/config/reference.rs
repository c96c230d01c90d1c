//! Lists every key with its type, default and description, as help texts, `config init` and the guide show them.

use std::fmt::Write as _;

use serde_json::Value;

use super::SCHEMA;
use super::environment::variable;

/// A key of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyReference {
    /// The dotted key; a part that the user chooses is `NAME`.
    pub key: String,
    /// What its values look like.
    pub value_kind: String,
    /// The built-in value as TOML, if there is one.
    pub default: Option<String>,
    /// Whether it has to be set.
    pub requirement: KeyRequirement,
    /// What it is for.
    pub description: String,
    /// A value as TOML for the template, where there is no built-in one.
    example: String,
    /// The kinds of section that have the key; empty if all have it.
    kinds: Vec<String>,
}

/// Whether a key has to be set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyRequirement {
    /// Yes.
    Required,
    /// No.
    Optional,
    /// No, and only the environment may set it.
    Secret,
}

/// The sections in the order of the reference.
pub(super) const SECTIONS: [&str; 14] = [
    "worker",
    "host",
    "source",
    "amqp",
    "activity",
    "bridge",
    "pool",
    "demand",
    "handler",
    "queue",
    "control",
    "http",
    "telemetry",
    "log",
];

/// Every key, in the order of the sections.
pub fn keys() -> Vec<KeyReference> {
    let mut keys = Vec::new();
    for section in SECTIONS {
        if let Some(schema) = SCHEMA.pointer(&format!("/properties/{section}")) {
            collect(schema, section, false, &mut keys);
        }
    }
    keys
}

/// The key of that name.
pub fn find(key: &str) -> Option<KeyReference> {
    keys().into_iter().find(|known| known.key == key)
}

fn collect(schema: &Value, key: &str, is_required: bool, keys: &mut Vec<KeyReference>) {
    let schema = without_null(schema);
    let variants: Vec<&Value> = list(schema, "oneOf").filter(|variant| variant.get("properties").is_some()).collect();
    if !variants.is_empty() {
        let default = schema.get("x-default-kind").map(Value::to_string);
        return collect_kinds(&variants, default, key, keys);
    }
    if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
        for (name, property) in properties {
            let is_required = list(schema, "required").any(|required| required == name);
            collect(property, &format!("{key}.{name}"), is_required, keys);
        }
    } else if let Some(schema) = schema.get("additionalProperties").filter(|schema| schema.is_object()) {
        collect(schema, &format!("{key}.NAME"), false, keys);
    } else {
        keys.push(describe(schema, key, is_required));
    }
}

/// Collects the keys of a section whose `kind` decides which keys it has.
fn collect_kinds(variants: &[&Value], default: Option<String>, key: &str, keys: &mut Vec<KeyReference>) {
    let kind_of = |variant: &Value| {
        variant.pointer("/properties/kind/const").and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let kinds: Vec<String> = variants.iter().map(|variant| kind_of(variant)).collect();
    let mut merged: Vec<KeyReference> = Vec::new();
    for (variant, kind) in variants.iter().zip(&kinds) {
        let mut own = Vec::new();
        for (name, property) in variant.get("properties").and_then(Value::as_object).into_iter().flatten() {
            let is_required = list(variant, "required").any(|required| required == name);
            collect(property, &format!("{key}.{name}"), is_required, &mut own);
        }
        for mut one in own {
            if let Some(known) = merged.iter_mut().find(|known| known.key == one.key) {
                known.kinds.push(kind.clone());
                continue;
            }
            one.kinds.push(kind.clone());
            merged.push(one);
        }
    }
    // `kind` comes first, and keys of all kinds last.
    merged.sort_by_key(|one| (!one.key.ends_with(".kind"), one.kinds.len() == kinds.len()));
    for mut one in merged {
        let of_kinds = one.kinds.iter().map(|kind| format!("`{kind}`")).collect::<Vec<_>>().join(" and ");
        if one.key.ends_with(".kind") {
            one.value_kind = choices(&kinds);
            one.requirement = if default.is_some() { KeyRequirement::Optional } else { KeyRequirement::Required };
            one.default.clone_from(&default);
            one.description = format!("Kind of the {}.", key.split('.').next().unwrap_or_default());
            one.kinds.clear();
        } else if one.kinds.len() == kinds.len() {
            one.kinds.clear();
        } else {
            one.description = format!("{} For {of_kinds}.", one.description);
        }
        keys.push(one);
    }
}

fn describe(schema: &Value, key: &str, is_required: bool) -> KeyReference {
    let inner = without_null(schema);
    let value_kind = value_kind(inner);
    let requirement = match is_required {
        _ if value_kind == "secret" => KeyRequirement::Secret,
        true => KeyRequirement::Required,
        false => KeyRequirement::Optional,
    };
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    KeyReference {
        key: key.to_owned(),
        value_kind,
        default: schema.get("default").filter(|value| !value.is_null()).map(Value::to_string),
        requirement,
        description: words(schema.get("description").and_then(Value::as_str).unwrap_or_default()),
        example: list(schema, "examples")
            .chain(list(inner, "examples"))
            .next()
            .map_or_else(|| "\"…\"".to_owned(), Value::to_string),
        kinds: Vec::new(),
    }
}

fn list<'a>(schema: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> {
    schema.get(name).and_then(Value::as_array).into_iter().flatten()
}

/// The schema of a value that may be absent is that of the value.
fn without_null(schema: &Value) -> &Value {
    list(schema, "anyOf").find(|choice| type_of(choice) != "null").unwrap_or(schema)
}

fn type_of(schema: &Value) -> &str {
    match schema.get("type") {
        Some(Value::String(name)) => name,
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).find(|name| *name != "null").unwrap_or(""),
        _ => "string",
    }
}

fn value_kind(schema: &Value) -> String {
    let number = |name: &str| schema.get(name).and_then(Value::as_i64);
    match type_of(schema) {
        "integer" => match (number("minimum"), number("maximum")) {
            (Some(min), Some(max)) if max < i64::from(u32::MAX) => format!("whole number, {min} to {max}"),
            (min, _) => format!("whole number from {}", min.unwrap_or(0)),
        },
        "array" => "list of texts".to_owned(),
        "boolean" => "true or false".to_owned(),
        _ => {
            let consts = list(schema, "oneOf").filter_map(|choice| choice.get("const")).chain(list(schema, "enum"));
            let several = list(schema, "oneOf").flat_map(|choice| list(choice, "enum"));
            let words: Vec<String> = consts.chain(several).filter_map(Value::as_str).map(str::to_owned).collect();
            if words.is_empty() {
                return schema.get("title").and_then(Value::as_str).unwrap_or("text").to_owned();
            }
            choices(&words)
        }
    }
}

fn choices(words: &[String]) -> String {
    words.iter().map(|word| format!("\"{word}\"")).collect::<Vec<_>>().join(" or ")
}

/// The reference as a Markdown table, for `guide/configuration.md`.
pub fn markdown() -> String {
    let mut out = String::from("| key | value | default | description |\n| --- | --- | --- | --- |\n");
    for key in keys() {
        let default = match (key.requirement, &key.default) {
            (KeyRequirement::Required, _) => "required".to_owned(),
            (KeyRequirement::Secret, _) | (KeyRequirement::Optional, None) => String::new(),
            (KeyRequirement::Optional, Some(default)) => format!("`{default}`"),
        };
        _ = writeln!(out, "| `{}` | {} | {default} | {} |", key.key, key.value_kind, key.description);
    }
    out
}

/// A configuration to start from: every key with its description, optional keys commented out.
pub fn template() -> String {
    let mut out = String::from(
        "# Configuration of journeyman. Check it with `journeyman config check FILE`.\n\
         #\n\
         # A key `capacity` in [worker] is also JOURNEYMAN__WORKER__CAPACITY in the environment, and\n\
         # `--capacity` or `--set worker.capacity=…` on the command line. The environment overrides this file, and\n\
         # flags override both. A key that is commented out shows its built-in value, or an example if it has none.\n",
    );
    let mut section = String::new();
    for key in keys() {
        let (table, name) = key.key.rsplit_once('.').unwrap_or(("", &key.key));
        if table != section {
            section = table.to_owned();
            out.push_str(&heading(table));
        }
        if key.requirement == KeyRequirement::Secret {
            let example = variable(&key.key.replace("NAME", "local"));
            _ = writeln!(out, "\n# {}\n# {name}: set {example}", key.description);
            continue;
        }
        let of_other_kind =
            !key.kinds.is_empty() && !key.kinds.iter().any(|kind| TEMPLATE_KINDS.contains(&kind.as_str()));
        let example = || key.default.clone().unwrap_or_else(|| key.example.clone());
        let (mark, value) = match (table, name) {
            ("source.NAME", "kind") => ("", "\"taskcluster\"".to_owned()),
            ("source.NAME", "root_url") => ("", "\"http://127.0.0.1:7070\"".to_owned()),
            ("source.NAME", "task_queue") => ("", "\"journeyman/local\"".to_owned()),
            ("handler.NAME", "kind") => ("", "\"command\"".to_owned()),
            ("demand.NAME", "kind") => ("#  ", "\"taskcluster\"".to_owned()),
            // A second `#` marks sections and keys that the others of this file do not need.
            (table, _) if ["bridge.NAME", "demand.NAME"].contains(&table) || table.starts_with("pool.NAME") => {
                ("#  ", example())
            }
            _ if of_other_kind => ("#  ", example()),
            _ => ("# ", example()),
        };
        _ = writeln!(out, "\n# {} ({})\n{mark}{name} = {value}", key.description, key.value_kind);
    }
    out
}

/// The kinds of the sections that the template configures.
const TEMPLATE_KINDS: [&str; 2] = ["taskcluster", "command"];

fn heading(table: &str) -> String {
    let (comment, mark, name) = match table {
        "source.NAME" => ("One section for each queue, with a name of your choice.", "", "source.local"),
        "handler.NAME" => ("One section for each handler. A source refers to it by its name.", "", "handler.command"),
        "bridge.NAME" => ("One section for each bridge of `journeyman bridge`.", "#  ", "bridge.builds"),
        "pool.NAME" => ("One section for each pool of `journeyman controller`.", "#  ", "pool.core"),
        "demand.NAME" => ("One section for each task queue that counts as demand for a pool.", "#  ", "demand.builds"),
        "queue.clients.NAME" => ("One section for each client of the embedded queue.", "# ", "queue.clients.worker"),
        table if table.starts_with("pool.NAME.") => return format!("\n#  [{}]\n", table.replace("NAME", "core")),
        table => return format!("\n[{table}]\n"),
    };
    format!("\n# {comment}\n{mark}[{name}]\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_a_description() {
        for key in keys() {
            assert!(key.description.len() > 8 && key.description.ends_with('.'), "{key:?}");
        }
    }

    #[test]
    fn secrets_are_the_keys_that_only_the_environment_may_set() {
        let secrets = keys().into_iter().filter(|key| key.requirement == KeyRequirement::Secret).map(|key| key.key);
        let known = super::super::load::SECRET_KEYS.iter().map(|path| path.join(".").replace('*', "NAME"));
        let (mut secrets, mut known) = (secrets.collect::<Vec<_>>(), known.collect::<Vec<_>>());
        secrets.sort();
        known.sort();
        assert_eq!(secrets, known);
    }
}
