//! What a controller answers over HTTP, as OpenAPI 3.1: the routes are written here, and what JSON looks like comes from the types
//! that it is made of.

use schemars::JsonSchema;
use schemars::generate::{SchemaGenerator, SchemaSettings};
use serde_json::{Value, json};

use crate::control::CommandReply;
use crate::control::controller_api::{ControllerStatusReply, PoolCommandRequest};
use crate::control::poison_api::{Inventories, PoisonActionRequest};
use crate::controller::poison_queue::PoisonOutcome;
use crate::observe::openmetrics;

/// Where orders are posted.
pub(super) const COMMANDS_PATH: &str = "/v1/commands";

/// Where what was put aside is looked at, and settled.
pub(super) const POISON_PATH: &str = "/v1/poison";

/// Every path that anybody can look at.
pub(super) const PATHS: &[&str] =
    &["/livez", "/readyz", "/metrics", "/", "/still", "/status", "/status.json", "/openapi.json"];

/// The document.
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
        "summary": "Give an order: pause, resume, scale, drain a worker, retry",
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
            "description": "Anybody who can reach it may look. Orders, and what was put aside, need the token of `http.token_file`.",
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
        "/livez" => ("Whether the loop of each pool answers in time", "text/plain", &plain),
        "/readyz" => ("Whether it controls every pool", "text/plain", &plain),
        "/metrics" => ("OpenMetrics", media(openmetrics::CONTENT_TYPE), &plain),
        "/" => ("A page for a browser, which refreshes itself", "text/html", &plain),
        "/still" => ("The same page, which does not", "text/html", &plain),
        "/openapi.json" => ("This document", "application/json", &json!({ "type": "object" })),
        _ => ("Pools, groups, workers and what is in the way", "application/json", status),
    };
    let mut said = json!({
        "summary": summary,
        "responses": {
            "200": { "description": summary, "content": { media: { "schema": schema } } },
            "503": { "description": "It does not answer, or is not ready", "content": { "text/plain": { "schema": plain } } },
        },
    });
    if path == "/readyz"
        && let Some(said) = said.as_object_mut()
    {
        let name = json!([{ "name": "verbose", "in": "query", "allowEmptyValue": true, "schema": plain, "description": "Each pool by name" }]);
        said.insert("parameters".to_owned(), name);
    }
    said
}

fn poison_operations(schemas: &mut SchemaGenerator) -> Value {
    let (refused, pool) = (schema_ref::<CommandReply>(schemas), json!({ "type": "string" }));
    json!({
        "get": {
            "summary": "The requests that were put aside since their workers ended under them",
            "security": [{ "token": [] }],
            "parameters": [{ "name": "pool", "in": "query", "schema": pool, "description": "This pool alone" }],
            "responses": command_responses(&schema_ref::<Inventories>(schemas), &refused),
        },
        "post": {
            "summary": "Try them once more, or drop them",
            "security": [{ "token": [] }],
            "requestBody": { "required": true, "content": { "application/json": { "schema": schema_ref::<PoisonActionRequest>(schemas) } } },
            "responses": command_responses(&schema_ref::<PoisonOutcome>(schemas), &refused),
        },
    })
}

/// A media type without what belongs to it.
fn media(full: &'static str) -> &'static str {
    full.split(';').next().unwrap_or(full)
}

/// What comes of what needs the token.
fn command_responses(answer: &Value, refused: &Value) -> Value {
    let codes = [
        ("200", "It is obeyed"),
        ("400", "It cannot be meant"),
        ("401", "The token is missing or is another one"),
        ("403", "No token is configured, so nobody can give orders"),
        ("404", "There is nothing of that name"),
        ("409", "It cannot be done as things stand"),
        ("413", "It is far too large"),
        ("415", "It is not JSON"),
        ("502", "The broker did not do it"),
        ("504", "The controller did not answer in time"),
    ];
    let said = |(code, why): (&str, &str)| {
        let schema = if code == "200" { answer } else { refused };
        (code.to_owned(), json!({ "description": why, "content": { "application/json": { "schema": schema } } }))
    };
    codes.map(said).into_iter().collect()
}
