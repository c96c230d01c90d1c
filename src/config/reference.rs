//! Lists every key with its type, default and description, as help texts and the guide show them.

use std::fmt::Write as _;
use std::sync::LazyLock;

use serde_json::Value;

use super::SCHEMA;
use journeyman_platform::settings::Environment;
use journeyman_platform::settings::key::{PREFIX, variable};
use journeyman_platform::settings::problem::{Code, Problem, ValueOrigin};

/// A key of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyReference {
    /// The dotted key; a part that the user chooses is `NAME`.
    pub key: String,
    /// What its values look like.
    pub value_kind: String,
    /// The built-in value as TOML, if there is one.
    pub default: Option<String>,
    /// The key has to be set.
    pub is_required: bool,
    /// What it is for.
    pub description: String,
}

/// The sections in the order of the reference.
pub(super) const SECTIONS: [&str; 15] = [
    "worker", "host", "source", "amqp", "bridge", "pool", "demand", "handler", "hooks", "queue", "notifier", "notify",
    "control", "http", "log",
];

/// Every key, in the order of the sections. The command line looks up one for each of its flags.
pub static KEYS: LazyLock<Vec<KeyReference>> = LazyLock::new(|| {
    let mut keys = Vec::new();
    for section in SECTIONS {
        if let Some(schema) = SCHEMA.pointer(&format!("/properties/{section}")) {
            collect(schema, section, false, &mut keys);
        }
    }
    keys
});

/// The key of that name.
pub fn find(key: &str) -> Option<&'static KeyReference> {
    KEYS.iter().find(|known| known.key == key)
}

/// The key, in which any name may stand for `NAME`, or the keys of a section.
pub fn matching(key: &str) -> Vec<&'static KeyReference> {
    let asked: Vec<&str> = key.split('.').collect();
    let fits = |known: &&KeyReference| {
        let parts: Vec<&str> = known.key.split('.').collect();
        parts.len() >= asked.len() && parts.iter().zip(&asked).all(|(part, asked)| part == asked || *part == "NAME")
    };
    let all: Vec<&KeyReference> = KEYS.iter().filter(fits).collect();
    let whole: Vec<&KeyReference> =
        all.iter().copied().filter(|known| known.key.split('.').count() == asked.len()).collect();
    if whole.is_empty() { all } else { whole }
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
    } else if let Some(values_schema) = schema.get("additionalProperties").filter(|schema| schema.is_object()) {
        let values = keys.len();
        collect(values_schema, &format!("{key}.NAME"), false, keys);
        // Plain values have no description of their own.
        if let Some(plain) = keys.get_mut(values).filter(|plain| plain.description.is_empty()) {
            plain.description = describe(schema, key, false).description;
        }
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
    keys.push(KeyReference {
        key: format!("{key}.kind"),
        value_kind: choices(&kinds),
        is_required: default.is_none(),
        default,
        description: format!("Kind of the {}.", key.split('.').next().unwrap_or_default()),
    });
    let mut merged: Vec<(KeyReference, Vec<&str>)> = Vec::new();
    for (variant, kind) in variants.iter().zip(&kinds) {
        let mut own = Vec::new();
        collect(variant, key, false, &mut own);
        for one in own.into_iter().filter(|one| !one.key.ends_with(".kind")) {
            let is_same = |known: &KeyReference| known.key == one.key && known.value_kind == one.value_kind;
            match merged.iter_mut().find(|(known, _)| is_same(known)) {
                Some((_, of_kinds)) => of_kinds.push(kind),
                None => merged.push((one, vec![kind])),
            }
        }
    }
    // Keys of all kinds come last.
    merged.sort_by_key(|(_, of_kinds)| of_kinds.len() == kinds.len());
    for (mut one, of_kinds) in merged {
        if of_kinds.len() < kinds.len() {
            one.description = format!("{} For `{}`.", one.description, of_kinds.join("` and `"));
        }
        keys.push(one);
    }
}

fn describe(schema: &Value, key: &str, is_required: bool) -> KeyReference {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    KeyReference {
        key: key.to_owned(),
        value_kind: value_kind(without_null(schema)),
        default: schema.get("default").filter(|value| !value.is_null()).map(Value::to_string),
        is_required,
        description: words(schema.get("description").and_then(Value::as_str).unwrap_or_default()),
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
    for key in KEYS.iter() {
        let default = match &key.default {
            _ if key.is_required => "required".to_owned(),
            Some(default) => format!("`{default}`"),
            None => String::new(),
        };
        _ = writeln!(out, "| `{}` | {} | {default} | {} |", key.key, key.value_kind, key.description);
    }
    out
}

/// A configuration to start from.
pub const TEMPLATE: &str = include_str!("template.toml");

/// Warnings about variables that would set a key if their underscores were doubled.
pub(super) fn unknown_variables(environment: &Environment) -> Vec<Problem> {
    let names = environment.names().filter(|name| name.starts_with("JOURNEYMAN_") && !name.starts_with(PREFIX));
    let suggestion = |name: &str| {
        let mut known = KEYS.iter().map(|key| variable(&key.key));
        known.find(|known| known.replace("__", "_") == name.replace("__", "_"))
    };
    let warnings = names.filter_map(|name| Some((name, suggestion(name)?))).map(|(name, known)| {
        let message = format!("the variable {name} sets nothing");
        Problem::warning(
            Code::UnknownVariable,
            message,
            ValueOrigin::Env(name.to_owned()),
            format!("did you mean `{known}`?"),
        )
    });
    warnings.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_a_description() {
        for key in KEYS.iter() {
            assert!(key.description.len() > 8 && key.description.ends_with('.'), "{key:?}");
        }
    }

    fn help(name: &str) -> Option<String> {
        unknown_variables(&Environment::from_pairs(&[(name, "1")])).into_iter().next().and_then(|problem| problem.help)
    }

    #[test]
    fn a_variable_with_single_underscores_is_suggested_correctly() {
        for (name, expected) in [
            ("JOURNEYMAN_WORKER_CAPACITY", "JOURNEYMAN__WORKER__CAPACITY"),
            ("JOURNEYMAN_WORKER__MAX_TASKS", "JOURNEYMAN__WORKER__MAX_TASKS"),
        ] {
            assert_eq!(help(name), Some(format!("did you mean `{expected}`?")), "{name}");
        }
    }

    #[test]
    fn known_and_unrelated_variables_raise_no_warning() {
        for name in ["JOURNEYMAN_CONFIG", "JOURNEYMAN__WORKER__CAPACITY", "JOURNEYMAN_SERVICE_HOST"] {
            assert_eq!(help(name), None, "{name}");
        }
    }
}
