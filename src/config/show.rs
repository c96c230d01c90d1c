//! Writes the configuration in effect as TOML or JSON, optionally with the origin of each value.

use std::fmt::Write as _;

use serde_json::Value;

use super::LoadedConfig;
use journeyman_platform::settings::key::{PREFIX, join};
use journeyman_platform::settings::problem::{Document, ValueOrigin};

/// Which origins are shown beside the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShowOrigins {
    /// Values only.
    No,
    /// Values and origins.
    Yes,
}

/// Writes the configuration in effect. Secrets are masked.
pub fn to_toml(loaded: &LoadedConfig, origins: ShowOrigins) -> String {
    let mut out = String::new();
    if let Ok(Value::Object(sections)) = serde_json::to_value(&loaded.config) {
        for (name, section) in &sections {
            table(loaded, origins, name, name, section, &mut out);
        }
    }
    out.trim_start().to_owned()
}

fn table(loaded: &LoadedConfig, origins: ShowOrigins, key: &str, header: &str, value: &Value, out: &mut String) {
    let Value::Object(entries) = value else { return };
    let set = entries.iter().filter(|(_, value)| !value.is_null());
    let (tables, leaves): (Vec<_>, Vec<_>) = set.partition(|(_, value)| value.is_object());
    if !leaves.is_empty() {
        _ = writeln!(out, "\n[{header}]");
    }
    let lines: Vec<_> = leaves
        .iter()
        // The JSON form of a text, a number or a list is valid TOML.
        .map(|(name, value)| (format!("{} = {value}", quoted(name)), show_origin(loaded, &join(key, name))))
        .collect();
    let width = lines.iter().map(|(line, _)| line.chars().count()).max().unwrap_or(0);
    for (line, from) in lines {
        match origins {
            ShowOrigins::No => _ = writeln!(out, "{line}"),
            ShowOrigins::Yes => _ = writeln!(out, "{line:width$}  # {from}"),
        }
    }
    for (name, value) in tables {
        table(loaded, origins, &join(key, name), &format!("{header}.{}", quoted(name)), value, out);
    }
}

/// A part of a key, in quotes where TOML needs them.
fn quoted(part: &str) -> String {
    let bare = part.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-');
    if bare && !part.is_empty() { part.to_owned() } else { Value::from(part).to_string() }
}

fn show_origin(loaded: &LoadedConfig, key: &str) -> String {
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
    format!("{}:{}:{}", place.file, place.line, place.column)
}

/// The value of a key in effect and where it comes from; secrets are masked. `None` for one that is not set.
pub fn value_of(loaded: &LoadedConfig, key: &str) -> Option<String> {
    let config = serde_json::to_value(&loaded.config).ok()?;
    let value = key.split('.').try_fold(&config, |value, part| value.get(part)).filter(|value| !value.is_null())?;
    Some(format!("{value} ({})", show_origin(loaded, key)))
}

/// The configuration in effect as JSON, with origins. Secrets are masked.
pub fn to_json(loaded: &LoadedConfig) -> Value {
    let origins: serde_json::Map<String, Value> =
        loaded.origins.keys().map(|key| (key.clone(), Value::from(show_origin(loaded, key)))).collect();
    serde_json::json!({
        "config": serde_json::to_value(&loaded.config).unwrap_or(Value::Null),
        "origins": origins,
        "environment_prefix": PREFIX,
    })
}
