//! OpenAPI 3.1 description of the HTTP API of a controller.

use schemars::JsonSchema;
use schemars::generate::{SchemaGenerator, SchemaSettings};
use serde_json::{Value, json};

use crate::control::CommandReply;
use crate::control::controller_api::{ControllerStatusReply, PoolCommandRequest};
use crate::control::poison_api::{Inventories, PoisonActionRequest};
use crate::controller::poison_queue::PoisonOutcome;
use crate::observe::openmetrics;

pub(super) const COMMANDS_PATH: &str = "/v1/commands";
pub(super) const POISON_PATH: &str = "/v1/poison";
pub(super) const PATHS: &[&str] =
    &["/livez", "/readyz", "/metrics", "/", "/still", "/status", "/status.json", "/openapi.json"];
#[must_use]
pub fn document() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    let mut schemas = settings.into_generator();
    let mut paths = serde_json::Map::new();
    let status = schema_ref::<ControllerStatusReply>(&mut schemas);
    for path in PATHS {
        paths.insert((*path).to_owned(), json!({ "get": get_operation(path, &status) }));
    }
    let order = json!({
        "summary": "Send a command: pause, resume, scale, drain a worker, retry",
        "security": [{ "token": [] }],
        "requestBody": { "required": true, "content": { "application/json": { "schema": schema_ref::<PoolCommandRequest>(&mut schemas) } } },
        "responses": command_responses(&schema_ref::<CommandReply>(&mut schemas), &schema_ref::<CommandReply>(&mut schemas)),
    });
    paths.insert(COMMANDS_PATH.to_owned(), json!({ "post": order }));
    paths.insert(POISON_PATH.to_owned(), poison_operations(&mut schemas));
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "journeyman controller",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Reading the status needs no token. Commands and the poison queue need the token of `http.token_file`.",
        },
        "paths": paths,
        "components": {
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
            "schemas": schemas.take_definitions(true),
        },
    })
}

fn schema_ref<T: JsonSchema>(schemas: &mut SchemaGenerator) -> Value {
    serde_json::to_value(schemas.subschema_for::<T>()).unwrap_or_default()
}

fn get_operation(path: &str, status: &Value) -> Value {
    let plain = json!({ "type": "string" });
    let (summary, media, schema) = match path {
        "/livez" => ("Whether the loop of each pool replies in time", "text/plain", &plain),
        "/readyz" => ("Whether every pool is active", "text/plain", &plain),
        "/metrics" => ("OpenMetrics", media(openmetrics::CONTENT_TYPE), &plain),
        "/" => ("HTML page, refreshed", "text/html", &plain),
        "/still" => ("HTML page, static", "text/html", &plain),
        "/openapi.json" => ("This document", "application/json", &json!({ "type": "object" })),
        _ => ("Pools, groups and workers", "application/json", status),
    };
    let mut said = json!({
        "summary": summary,
        "responses": {
            "200": { "description": summary, "content": { media: { "schema": schema } } },
            "503": { "description": "No reply, or not ready", "content": { "text/plain": { "schema": plain } } },
        },
    });
    if path == "/readyz"
        && let Some(said) = said.as_object_mut()
    {
        let name = json!([{ "name": "verbose", "in": "query", "allowEmptyValue": true, "schema": plain, "description": "List the pools" }]);
        said.insert("parameters".to_owned(), name);
    }
    said
}

fn poison_operations(schemas: &mut SchemaGenerator) -> Value {
    let (refused, pool) = (schema_ref::<CommandReply>(schemas), json!({ "type": "string" }));
    json!({
        "get": {
            "summary": "List the poison queue",
            "security": [{ "token": [] }],
            "parameters": [{ "name": "pool", "in": "query", "schema": pool, "description": "Only this pool" }],
            "responses": command_responses(&schema_ref::<Inventories>(schemas), &refused),
        },
        "post": {
            "summary": "Requeue or discard requests",
            "security": [{ "token": [] }],
            "requestBody": { "required": true, "content": { "application/json": { "schema": schema_ref::<PoisonActionRequest>(schemas) } } },
            "responses": command_responses(&schema_ref::<PoisonOutcome>(schemas), &refused),
        },
    })
}

fn media(full: &'static str) -> &'static str {
    full.split(';').next().unwrap_or(full)
}

fn command_responses(answer: &Value, refused: &Value) -> Value {
    let codes = [
        ("200", "Done"),
        ("400", "Invalid request"),
        ("401", "Missing or wrong token"),
        ("403", "No token is configured"),
        ("404", "Not found"),
        ("409", "Not possible in the current state"),
        ("413", "Too large"),
        ("415", "Not JSON"),
        ("502", "The broker refused"),
        ("504", "No reply from the controller in time"),
    ];
    let said = |(code, why): (&str, &str)| {
        let schema = if code == "200" { answer } else { refused };
        (code.to_owned(), json!({ "description": why, "content": { "application/json": { "schema": schema } } }))
    };
    codes.map(said).into_iter().collect()
}
