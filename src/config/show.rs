//! The configuration in effect, written as TOML, with the place of each value where that is asked for.

use std::fmt::Write as _;

use serde_json::Value;

use super::environment::PREFIX;
use super::problem::{Document, ValueOrigin};
use super::{LoadedConfig, check::join};

/// What stands beside each value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShowOrigins {
    /// Nothing.
    No,
    /// Where it comes from.
    Yes,
}

/// Writes the configuration in effect. Secrets are masked.
#[must_use]
pub fn to_toml(loaded: &LoadedConfig, beside: ShowOrigins) -> String {
    let mut out = String::new();
    if let Ok(Value::Object(sections)) = serde_json::to_value(&loaded.config) {
        for (name, section) in &sections {
            table(loaded, beside, name, section, &mut out);
        }
    }
    out.trim_start().to_owned()
}

fn table(loaded: &LoadedConfig, beside: ShowOrigins, key: &str, value: &Value, out: &mut String) {
    let Value::Object(entries) = value else { return };
    let (tables, leaves): (Vec<_>, Vec<_>) = entries.iter().partition(|(_, value)| value.is_object());
    if !leaves.is_empty() {
        // Writing to a String cannot fail.
        _ = writeln!(out, "\n[{}]", quote_key(key));
    }
    let lines: Vec<_> = leaves
        .iter()
        .map(|(name, value)| (format!("{name} = {}", leaf(value)), origin(loaded, &join(key, name))))
        .collect();
    let width = lines.iter().map(|(line, _)| line.chars().count()).max().unwrap_or(0);
    for (line, from) in lines {
        match beside {
            ShowOrigins::No => _ = writeln!(out, "{line}"),
            ShowOrigins::Yes => _ = writeln!(out, "{line:width$}  # {from}"),
        }
    }
    for (name, value) in tables {
        table(loaded, beside, &join(key, name), value, out);
    }
}

/// A dotted key with its user-chosen parts quoted where TOML needs it.
fn quote_key(key: &str) -> String {
    let bare = |part: &str| part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-');
    let depth = if key.starts_with("queue.clients.") { 3 } else { 2 };
    let parts = key.splitn(depth, '.').map(|part| if bare(part) { part.to_owned() } else { format!("{part:?}") });
    parts.collect::<Vec<_>>().join(".")
}

fn leaf(value: &Value) -> String {
    // JSON's text and list forms of these values are TOML as well.
    value.to_string()
}

fn origin(loaded: &LoadedConfig, key: &str) -> String {
    match loaded.origins.get(key) {
        None | Some(ValueOrigin::Default) => "built-in".to_owned(),
        Some(ValueOrigin::File(span)) => {
            loaded.document.as_ref().map_or_else(String::new, |document| format_position(document, span.start))
        }
        Some(ValueOrigin::Env(name)) => format!("environment {name}"),
        Some(ValueOrigin::Flag(flag)) => format!("flag {flag}"),
    }
}

fn format_position(document: &Document, byte: usize) -> String {
    let place = document.position(byte);
    format!("{}:{}:{}", document.name, place.line, place.column)
}

/// The configuration in effect as JSON, with origins. Secrets are masked.
#[must_use]
pub fn to_json(loaded: &LoadedConfig) -> Value {
    let origins: serde_json::Map<String, Value> =
        loaded.origins.keys().map(|key| (key.clone(), Value::from(origin(loaded, key)))).collect();
    serde_json::json!({
        "config": serde_json::to_value(&loaded.config).unwrap_or(Value::Null),
        "origins": origins,
        "environment_prefix": PREFIX,
    })
}
