//! Every key of the configuration with its type, its default and what it is for, read from the schema: what help texts,
//! `config init` and the guide's table are made of.

use std::fmt::Write as _;

use serde_json::Value;

use super::SCHEMA;
use super::check::{choices, is_secret, type_of, without_null};
use super::environment::variable;
use super::values::example_of;

/// One key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyReference {
    /// The dotted key; a part that the user chooses is `NAME`.
    pub key: String,
    /// What may stand there, in words.
    pub value_kind: String,
    /// The built-in value as it would stand in a file, where there is one.
    pub default: Option<String>,
    /// Whether it has to be set.
    pub requirement: KeyRequirement,
    /// What it is for.
    pub description: String,
}

/// Whether a key has to be set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyRequirement {
    /// It has to.
    Required,
    /// It need not.
    Optional,
    /// It need not, and can be set from the environment only.
    Secret,
}

/// Every key, in the order of the sections.
#[must_use]
pub fn keys() -> Vec<KeyReference> {
    let mut keys = Vec::new();
    for section in [
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
    ] {
        if let Some(schema) = SCHEMA.pointer(&format!("/properties/{section}")) {
            collect(schema, section, KeyRequirement::Optional, &mut keys);
        }
    }
    keys
}

/// The key of that name.
#[must_use]
pub fn find(key: &str) -> Option<KeyReference> {
    keys().into_iter().find(|known| known.key == key)
}

fn collect(schema: &Value, key: &str, need: KeyRequirement, keys: &mut Vec<KeyReference>) {
    if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
        let required: Vec<&str> =
            schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
        for (name, schema) in properties {
            let need =
                if required.contains(&name.as_str()) { KeyRequirement::Required } else { KeyRequirement::Optional };
            collect(schema, &format!("{key}.{name}"), need, keys);
        }
        return;
    }
    if let Some(schema) = schema.get("additionalProperties").filter(|schema| schema.is_object()) {
        return collect(schema, &format!("{key}.NAME"), KeyRequirement::Optional, keys);
    }
    let inner = without_null(schema);
    keys.push(KeyReference {
        key: key.to_owned(),
        value_kind: value_kind(inner),
        default: schema.get("default").filter(|value| !value.is_null()).map(Value::to_string),
        requirement: if is_secret(schema) { KeyRequirement::Secret } else { need },
        description: one_line(schema.get("description").and_then(Value::as_str).unwrap_or("")),
    });
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn value_kind(schema: &Value) -> String {
    let number = |name: &str| schema.get(name).and_then(Value::as_i64);
    match type_of(schema) {
        "integer" => match (number("minimum"), number("maximum")) {
            (Some(least), Some(most)) if most < i64::from(u32::MAX) => format!("whole number, {least} to {most}"),
            (Some(least), _) => format!("whole number from {least}"),
            _ => "whole number".to_owned(),
        },
        "array" => "list of texts".to_owned(),
        "boolean" => "true or false".to_owned(),
        _ => match choices(schema).as_slice() {
            [] => with_minimum(
                schema,
                match schema.get("format").and_then(Value::as_str) {
                    Some("span") => "time with unit",
                    Some("size") => "bytes with unit",
                    Some("worker-name") => "name",
                    Some("task-queue") => "provisioner/worker-type",
                    Some("web-address") => "web address",
                    Some("listen-address") => "address and port",
                    Some("file") => "path",
                    Some("secret-file") => "path, fd:N or systemd:NAME",
                    Some("log-filter") => "level or directives",
                    Some("secret") => "secret",
                    _ => "text",
                },
            ),
            choices => choices.iter().map(|choice| format!("\"{choice}\"")).collect::<Vec<_>>().join(", "),
        },
    }
}

fn with_minimum(schema: &Value, kind: &str) -> String {
    let said = |name: &str| schema.get(name).and_then(Value::as_str);
    match (said("x-least"), said("x-zero")) {
        (Some(least), Some(_)) => format!("{kind}, from {least}, or 0s"),
        (Some(least), None) => format!("{kind}, from {least}"),
        (None, _) => kind.to_owned(),
    }
}

/// The reference as a Markdown table, as it stands in `guide/configuration.md`.
#[must_use]
pub fn markdown() -> String {
    let mut out =
        String::from("| key | what may stand there | default | what it is for |\n| --- | --- | --- | --- |\n");
    for key in keys() {
        let default = match (key.requirement, &key.default) {
            (KeyRequirement::Required, _) => "needed".to_owned(),
            (KeyRequirement::Secret, _) | (KeyRequirement::Optional, None) => String::new(),
            (KeyRequirement::Optional, Some(default)) => format!("`{default}`"),
        };
        let kind = key.value_kind.replace("\", \"", "\" or \"");
        // Writing to a String cannot fail.
        _ = writeln!(out, "| `{}` | {kind} | {default} | {} |", key.key, key.description);
    }
    out
}

/// A configuration to start from: every key with what it is for; what is not needed is commented out.
#[must_use]
pub fn template() -> String {
    let mut out = String::from(
        "# Configuration of journeyman. `journeyman config check FILE` says whether it can be used.\n\
         #\n\
         # A key `capacity` in [worker] is also JOURNEYMAN__WORKER__CAPACITY in the environment, and\n\
         # `--capacity` or `--set worker.capacity=…` on the command line. The environment wins over this file, a\n\
         # flag over both. What is commented out shows the built-in value, or an example where there is none.\n",
    );
    let mut section = String::new();
    for key in keys() {
        let (table, name) = key.key.rsplit_once('.').unwrap_or(("", &key.key));
        if table != section {
            section = table.to_owned();
            _ = write!(out, "{}", heading(table));
        }
        if key.requirement == KeyRequirement::Secret {
            let example = variable(&key.key.replace("NAME", "local"));
            _ = writeln!(out, "\n# {}\n# {name}: set {example}", key.description);
            continue;
        }
        let (mark, value) = match (table, name) {
            ("source.NAME", "kind") => ("", "\"taskcluster\"".to_owned()),
            ("source.NAME", "root_url") => ("", "\"http://127.0.0.1:7070\"".to_owned()),
            ("source.NAME", "task_queue") => ("", "\"journeyman/local\"".to_owned()),
            ("handler.NAME", "kind") => ("", "\"command\"".to_owned()),
            // The section leads from and to others that are not in this file.
            (table, _) if ["bridge.NAME", "demand.NAME"].contains(&table) || table.starts_with("pool.NAME") => {
                ("#  ", key.default.clone().unwrap_or_else(|| example(&key)))
            }
            // The section is one of the other kind.
            ("source.NAME", _) if key.description.ends_with("For `amqp` only.") => {
                ("#  ", key.default.clone().unwrap_or_else(|| example(&key)))
            }
            _ => ("# ", key.default.clone().unwrap_or_else(|| example(&key))),
        };
        _ = writeln!(out, "\n# {} ({})\n{mark}{name} = {value}", key.description, key.value_kind);
    }
    out
}

fn heading(table: &str) -> String {
    match table {
        "source.NAME" => "\n# One section for each queue; the name is yours.\n[source.local]\n".to_owned(),
        "handler.NAME" => "\n# One section for each handler; the name is what a source refers to.\n[handler.command]\n".to_owned(),
        "bridge.NAME" => "\n# One section for each bridge of `journeyman bridge`; the name is yours.\n#  [bridge.builds]\n".to_owned(),
        "pool.NAME" => "\n# One section for each pool of `journeyman controller`; the name is the pool's.\n#  [pool.core]\n".to_owned(),
        table if table.starts_with("pool.NAME.") => format!("\n#  [{}]\n", table.replace("NAME", "core")),
        "demand.NAME" => "\n# One section for each queue of elsewhere that a pool of `journeyman controller` has workers for.\n#  [demand.builds]\n".to_owned(),
        "queue.clients.NAME" => "\n# One section for each client of the embedded queue; the name is the client id.\n# [queue.clients.worker]\n".to_owned(),
        table => format!("\n[{table}]\n"),
    }
}

fn example(key: &KeyReference) -> String {
    let name = key.key.rsplit('.').next().unwrap_or("");
    match name {
        "kind" => "\"taskcluster\"".to_owned(),
        "pool" => "\"core\"".to_owned(),
        "key" => "\"42\"".to_owned(),
        "root_url" => "\"https://tc.example.com\"".to_owned(),
        "task_queue" => "\"provisioner/worker-type\"".to_owned(),
        "from" => "\"requests\"".to_owned(),
        "to" => "\"builds\"".to_owned(),
        "socket" if key.key.starts_with("handler.") => "\"/run/echo/echo.sock\"".to_owned(),
        "socket" => "\"/run/journeyman/control.sock\"".to_owned(),
        "image" => "\"worker:1\"".to_owned(),
        "network" => "\"host\"".to_owned(),
        "service_account" => "\"worker\"".to_owned(),
        "template" => "\"/etc/journeyman/pod.json\"".to_owned(),
        "token_file" if key.key.starts_with("http.") => "\"/etc/journeyman/http-token\"".to_owned(),
        "token_file" => "\"/var/run/secrets/kubernetes.io/serviceaccount/token\"".to_owned(),
        "ca_file" if key.key.starts_with("pool.") => {
            "\"/var/run/secrets/kubernetes.io/serviceaccount/ca.crt\"".to_owned()
        }
        "unit" => "\"worker\"".to_owned(),
        "url" => "\"http://127.0.0.1:8080\"".to_owned(),
        "health" => "\"/health\"".to_owned(),
        "otlp_endpoint" => "\"http://127.0.0.1:4318\"".to_owned(),
        "service_name" => "\"journeyman\"".to_owned(),
        "listen" => "\"127.0.0.1:7080\"".to_owned(),
        "exec" => "[\"/opt/handlers/build\", \"--verbose\"]".to_owned(),
        "artifacts" => "\"/var/lib/journeyman/queue.db-artifacts\"".to_owned(),
        "termination_file" => "\"/run/journeyman/terminate-at\"".to_owned(),
        "metadata_endpoint" => "\"http://169.254.169.254\"".to_owned(),
        "task_memory" => "\"4GiB\"".to_owned(),
        "task_pids" => "4096".to_owned(),
        "task_disk" => "\"20GiB\"".to_owned(),
        "public_root_url" => "\"https://queue.example.com\"".to_owned(),
        "check" => "[\"/opt/handlers/build\", \"--check\"]".to_owned(),
        "default_run_time" => "\"1h\"".to_owned(),
        "queue_hosts" => "[\".queue.core.windows.net\"]".to_owned(),
        "allow_hosts" => "[\"minio.internal\"]".to_owned(),
        "env_allow" => "[\"PATH\", \"LANG\"]".to_owned(),
        "client_id" => "\"worker/build\"".to_owned(),
        "access_token_file" => "\"/etc/journeyman/access-token\"".to_owned(),
        "uri_file" => "\"/etc/journeyman/amqp-uri\"".to_owned(),
        "management_url" => "\"http://127.0.0.1:15672\"".to_owned(),
        "ca_file" => "\"/etc/journeyman/amqp-ca.pem\"".to_owned(),
        "certificate_file" if key.key.starts_with("amqp.") => "\"/etc/journeyman/amqp.pem\"".to_owned(),
        "key_file" => "\"/etc/journeyman/amqp.key\"".to_owned(),
        "worker_key" => "\"42\"".to_owned(),
        "requests_queue" => "\"core-req-42\"".to_owned(),
        "poison_queue" => "\"core-poison\"".to_owned(),
        "exchange" => "\"core-activity-xchg\"".to_owned(),
        "worker_id" => "\"worker-1\"".to_owned(),
        "certificate_file" => "\"/etc/journeyman/certificate.json\"".to_owned(),
        "schema" => "\"/opt/handlers/build.schema.json\"".to_owned(),
        "queue_url" => format!("\"{}/api/queue/v1\"", example_of("web-address").unwrap_or("")),
        _ => "\"…\"".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_says_what_it_is_for() {
        let keys = keys();
        assert!(keys.len() > 25, "{}", keys.len());
        for key in keys {
            assert!(key.description.len() > 8 && key.description.ends_with('.'), "{key:?}");
        }
    }
}
